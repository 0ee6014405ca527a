"""Indexing, permuting, reshaping and joining in logical dimensions, in terms of stored rows and columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fq import structure
from fq.layouts.layout import changed
from fq.structure import COLS, ROWS, map_lead

if TYPE_CHECKING:
    from fq.qtensor import QTensor


def dim(q: QTensor, d: int) -> int:
    """Return a logical dimension as a non-negative number."""
    if not -q.ndim <= d < q.ndim:
        raise IndexError(f"dimension {d} is out of range for a QTensor of {q.ndim} dimensions")
    return d % q.ndim


def _roles(q: QTensor) -> list[int | str]:
    """Return what each logical dimension is: a leading position, "rows", or "cols" (once per inner dim)."""
    lead: list[int | str] = list(range(q.data.ndim - 2))
    cols: list[int | str] = ["cols"] * len(q.inner)
    if q.data.ndim == 1:
        return cols
    return [*lead, "rows", *cols] if q.layout.axis == -1 else [*lead, *cols, "rows"]


def infer(sizes: Sequence[int], total: int, what: str) -> tuple[int, ...]:
    """Replace one -1 by what is left of `total`."""
    sizes = tuple(sizes)
    if sizes.count(-1) == 1:
        rest = prod(s for s in sizes if s != -1)
        if rest and total % rest == 0:
            return tuple(total // rest if s == -1 else s for s in sizes)
    if -1 in sizes or prod(sizes) != total:
        raise ValueError(f"{what}: sizes {sizes} do not hold {total} elements")
    return sizes


def getitem(q: QTensor, index: Any) -> QTensor:
    """Index with ints, slices, None, Ellipsis and index tensors; see `structure` for the alignment needed."""
    items = list(index) if isinstance(index, tuple) else [index]
    used = sum(i is not None and i is not Ellipsis for i in items)
    if used > q.ndim:
        raise IndexError(f"QTensor: {used} indices for {q.ndim} dimensions")
    at = next((k for k, i in enumerate(items) if i is Ellipsis), len(items))
    items[at : at + 1] = [slice(None)] * (q.ndim - used)
    roles = _roles(q)
    lead: list[Any] = []
    rows: Any = slice(None)
    cols: list[Any] = []
    position = 0
    for item in items:
        if item is None:
            if position > q.data.ndim - 2 or q.data.ndim == 1:
                raise ValueError("QTensor: None can stand only before or between leading dimensions")
            lead.append(None)
            continue
        role = roles[position]
        position += 1
        item = torch.as_tensor(item, device=q.device) if isinstance(item, list) else item
        if role == "rows":
            rows = item
        elif role == "cols":
            cols.append(item)
        else:
            lead.append(item)
    q = _index_cols(q, cols)
    if isinstance(rows, Tensor) and any(isinstance(i, Tensor) for i in lead):
        raise ValueError("QTensor: index leading dimensions and rows with tensors one after the other")
    if q.data.ndim > 1:
        q = _index_rows(q, rows) if not isinstance(rows, int) or not lead else q
    if lead and any(not _is_full(i) for i in lead):
        q = map_lead(q, lambda t: t[(*lead, slice(None), slice(None))])
    if lead and isinstance(rows, int):
        q = _index_rows(q, rows)
    return q


def _is_full(item: Any) -> bool:
    return isinstance(item, slice) and item == slice(None)


def _bounds(item: slice, size: int) -> tuple[int, int]:
    start, stop, step = item.indices(size)
    if step != 1:
        raise ValueError(f"QTensor: slices have step 1, got {step}; index with a tensor instead")
    return start, max(stop - start, 0)


def _index_cols(q: QTensor, items: list[Any]) -> QTensor:
    if all(_is_full(i) for i in items):
        return q
    if len(q.inner) != 1 or not isinstance(items[0], slice):
        raise ValueError(
            "QTensor: the packed dimension takes a slice that starts on a block and byte boundary, got "
            f"{items!r}; dequantize first, or index the other dimensions"
        )
    return structure.narrow(q, COLS, *_bounds(items[0], prod(q.inner)), what="slice")


def _index_rows(q: QTensor, item: Any) -> QTensor:
    size = q.data.shape[-2]
    if _is_full(item):
        return q
    if isinstance(item, slice):
        start, stop, step = item.indices(size)
        if step == 1:
            return structure.narrow(q, ROWS, start, max(stop - start, 0), what="slice")
        item = torch.arange(start, stop, step, device=q.device)
    if isinstance(item, int):
        if not -size <= item < size:
            raise IndexError(f"QTensor: row {item} is out of range for {size} rows")
        row = structure.select_row(q, item % size)
        return row if row.layout.axis == -1 else replace(row, layout=changed(row.layout.key, axis=-1))
    if not isinstance(item, Tensor):
        raise TypeError(f"QTensor: cannot index rows with {type(item).__name__}")
    if item.dtype == torch.bool:
        item = item.nonzero().squeeze(-1)
    if item.dtype not in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
        raise TypeError(f"QTensor: an index tensor holds integers or bools, got {item.dtype}")
    flat = item.reshape(-1).to(torch.int64)
    flat = torch.where(flat < 0, flat + size, flat)
    q = structure.take_rows(q, flat)
    if item.ndim == 1:
        return q
    if q.layout.axis == -2:
        raise ValueError("QTensor: an index of several dimensions needs the packed dimension last")
    if item.ndim == 0:
        return structure.select_row(q, 0)
    return structure.split(q, ROWS, tuple(item.shape[:-1]), "index")


def permute(q: QTensor, dims: Sequence[int]) -> QTensor:
    """Permute logical dimensions."""
    if sorted(dim(q, d) for d in dims) != list(range(q.ndim)):
        raise ValueError(f"permute: expected an order of {q.ndim} dimensions, got {tuple(dims)}")
    roles = _roles(q)
    order = [roles[dim(q, d)] for d in dims]
    if order == roles:
        return q
    if len(q.inner) != 1 or q.data.ndim == 1:
        raise ValueError(f"permute: the packed axis stands for dimensions {q.inner}; their order is fixed")
    axis = -1 if order[-1] == "cols" else -2
    if order[axis] != "cols":
        raise ValueError("permute: the packed dimension must stay within the last two; dequantize first")
    rest = [r for r in order if r != "cols"]
    last = q.data.ndim - 2
    positions = [last if r == "rows" else int(r) for r in rest]
    if positions[-1] == last:
        if positions != list(range(last + 1)):
            q = map_lead(q, lambda t: t.permute(*positions, t.ndim - 1))
    else:
        q = structure.exchange_rows(q, positions)
    return q if q.layout.axis == axis else replace(q, layout=changed(q.layout.key, axis=axis))


def reshape(q: QTensor, shape: Sequence[int]) -> QTensor:
    """Reshape what is not packed: leading dimensions and rows (or, transposed, columns)."""
    old = tuple(q.shape)
    shape = infer(shape, prod(old), "reshape")
    if shape == old:
        return q
    kept = q.inner if q.layout.axis == -1 else (q.data.shape[-2],)
    if shape[-len(kept) :] != tuple(kept):
        raise ValueError(
            f"reshape: expected a shape that ends in {tuple(kept)}, got {shape}; the packed dimension is fixed"
        )
    if q.data.ndim == 1:
        q = structure.as_matrix(q)
    wanted = shape[: -len(kept)]
    dim_ = ROWS if q.layout.axis == -1 else COLS
    lead = tuple(q.data.shape[:-2])
    if wanted and wanted[-1] == structure.size(q, dim_):
        return map_lead(q, lambda t: t.reshape(*wanted[:-1], *t.shape[-2:]))
    if lead:
        q = map_lead(q, lambda t: t.reshape(prod(lead), *t.shape[-2:]))
        q = structure.merge(q, dim_)
    if not wanted:
        return structure.select_row(q, 0)
    return structure.split(q, dim_, wanted[:-1]) if len(wanted) > 1 else q


def expand(q: QTensor, sizes: Sequence[int]) -> QTensor:
    """Expand leading dimensions."""
    own = 1 + len(q.inner)
    if q.data.ndim == 1 or len(sizes) < own:
        raise ValueError(f"expand: expected at least the matrix dimensions of {tuple(q.shape)}, got {tuple(sizes)}")
    matrix = tuple(q.shape[-own:])
    if any(s not in (-1, m) for s, m in zip(sizes[-own:], matrix, strict=True)):
        raise ValueError(f"expand: matrix dimensions stay {matrix}, got {tuple(sizes[-own:])}")
    return map_lead(q, lambda t: t.expand(*sizes[:-own], *t.shape[-2:]))


def cat(tensors: Sequence[Any], dim_: int = 0) -> QTensor:
    """Concatenate along a logical dimension."""
    first = _first(tensors, "cat")
    at = dim(first, dim_)
    role = _roles(first)[at]
    for t in tensors[1:]:
        if t.ndim != first.ndim or any(a != b for i, (a, b) in enumerate(zip(t.shape, first.shape, strict=True)) if i != at):
            raise ValueError(f"cat: shapes {tuple(first.shape)} and {tuple(t.shape)} differ outside dimension {dim_}")
        if t.layout.axis != first.layout.axis:
            raise ValueError("cat: one tensor is transposed and another is not")
    if role == "rows":
        return structure.cat_stored(tensors, ROWS)
    if role == "cols":
        if len(first.inner) != 1:
            raise ValueError(f"cat: the packed axis stands for dimensions {first.inner}; it cannot be joined")
        return structure.cat_stored(tensors, COLS)
    return structure._join(tensors, lambda ts: torch.cat(ts, int(role)), "cat")


def stack(tensors: Sequence[Any], dim_: int = 0) -> QTensor:
    """Stack along a new leading dimension; vectors become rows."""
    first = _first(tensors, "stack")
    at = dim_ if dim_ >= 0 else dim_ + first.ndim + 1
    for t in tensors[1:]:
        if t.shape != first.shape or t.layout.axis != first.layout.axis:
            raise ValueError(f"stack: shapes {tuple(first.shape)} and {tuple(t.shape)} differ")
    if first.data.ndim == 1 and at == 0:
        return structure.cat_stored([structure.as_matrix(t) for t in tensors], ROWS, "stack")
    if not 0 <= at <= first.data.ndim - 2 or first.data.ndim == 1:
        raise ValueError(f"stack: the new dimension comes before the matrix, got dim={dim_} for {tuple(first.shape)}")
    return structure._join(tensors, lambda ts: torch.stack(ts, at), "stack")


def _first(tensors: Sequence[Any], what: str) -> Any:
    if not tensors:
        raise ValueError(f"{what}: expected at least one QTensor")
    for t in tensors:
        if not hasattr(t, "layout"):
            raise TypeError(f"{what}: expected QTensors, got {type(t).__name__}; quantize it first")
    return tensors[0]
