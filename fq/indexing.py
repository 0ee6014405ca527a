"""Indexing, permuting, reshaping and joining in logical dimensions, in terms of stored rows and columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fq import structure
from fq.layouts.layout import Layout, changed
from fq.structure import COLS, ROWS, map_lead

if TYPE_CHECKING:
    from fq.qtensor import QTensor


def position(q: QTensor, dim: int, extra: int = 0) -> int:
    """Return a logical dimension, of `extra` more than q has, as a non-negative number."""
    if isinstance(dim, bool) or not hasattr(dim, "__index__"):
        raise TypeError(f"dimension: expected an int, got {dim!r}")
    ndim = q.ndim + extra
    if not -ndim <= dim < ndim:
        raise IndexError(f"dimension {dim} is out of range for a QTensor of {q.ndim} dimensions")
    return dim % ndim


def _roles(q: QTensor) -> list[int | str]:
    """Return what each logical dimension is: a leading position, "rows", or "cols" (once per inner dim)."""
    lead: list[int | str] = list(range(q.data.ndim - 2))
    cols: list[int | str] = ["cols"] * len(q.inner)
    if q.data.ndim == 1:
        return cols
    return [*lead, "rows", *cols] if q.layout.axis == -1 else [*lead, *cols, "rows"]


def _sizes(sizes: Sequence[Any]) -> tuple[int, ...]:
    """Return what stands in f(1, 2) and in f((1, 2))."""
    return tuple(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], tuple | list) else tuple(sizes)


def check_ints(what: str, *values: Any) -> None:
    """Raise TypeError unless all values are ints."""
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int | torch.SymInt):
            raise TypeError(f"{what}: expected ints, got {value!r}")


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
    """Index with ints, slices, None, Ellipsis, index and mask tensors; `structure` says what must align."""
    items = [_item(i) for i in index] if isinstance(index, tuple) else [_item(index)]
    used = sum(_width(i) for i in items)
    if used > q.ndim:
        raise IndexError(f"QTensor: {used} indices for {q.ndim} dimensions")
    at = next((k for k, i in enumerate(items) if i is Ellipsis), len(items))
    items[at : at + 1] = [slice(None)] * (q.ndim - used)
    roles = _roles(q)
    lead: list[Any] = []
    rows: Any = slice(None)
    cols: list[Any] = []
    for item in items:
        if item is None:
            if len(roles) <= len(q.inner):
                raise ValueError("QTensor: None can stand only before or between leading dimensions")
            lead.append(None)
            continue
        role, *others = roles[: _width(item)]
        roles = roles[_width(item) :]
        if others and not isinstance(others[-1], int):
            raise ValueError("QTensor: a mask covers leading dimensions or rows; flatten them first")
        if role == "rows":
            rows = item
        elif role == "cols":
            cols.append(item)
        else:
            lead.append(item)
    q = _index_cols(q, cols)
    if isinstance(rows, Tensor) and any(isinstance(i, Tensor) for i in lead):
        raise ValueError("QTensor: index leading dimensions and rows with tensors one after the other")
    single = isinstance(rows, int) or (isinstance(rows, Tensor) and rows.ndim == 0)
    if not single:
        q = _index_rows(q, rows)
    if any(not _is_full(i) for i in lead):
        q = map_lead(q, lambda t: t[(*lead, slice(None), slice(None))])
    return _index_rows(q, rows) if single else q  # last: a leading dimension becomes the rows


def _item(item: Any) -> Any:
    """Return one index as None, Ellipsis, an int, a slice or a tensor of int64, int32 or bool."""
    if item is None or item is Ellipsis or isinstance(item, slice):
        return item
    if isinstance(item, list):
        item = torch.as_tensor(item)
    if isinstance(item, Tensor):
        if item.dtype not in (torch.int64, torch.int32, torch.bool):
            raise TypeError(f"QTensor: an index tensor holds int64, int32 or bool, got {item.dtype}")
        if item.dtype == torch.bool and item.ndim == 0:
            raise TypeError("QTensor: a single bool is no index; use None for a new dimension")
        return item
    if isinstance(item, bool) or not hasattr(item, "__index__"):
        raise TypeError(f"QTensor: cannot index with {item!r}")
    return item if isinstance(item, int) else item.__index__()


def _width(item: Any) -> int:
    """Return how many dimensions an index takes."""
    if item is None or item is Ellipsis:
        return 0
    return item.ndim if isinstance(item, Tensor) and item.dtype == torch.bool else 1


def _is_full(item: Any) -> bool:
    return isinstance(item, slice) and item == slice(None)


def _bounds(item: slice, size: int) -> tuple[int, int, int]:
    start, stop, step = item.indices(size)
    if step < 1:
        raise ValueError(f"QTensor: slice steps are positive, got {step}")
    return start, max(stop - start, 0), step


def _index_cols(q: QTensor, items: list[Any]) -> QTensor:
    if all(_is_full(i) for i in items):
        return q
    if len(q.inner) != 1 or not isinstance(items[0], slice):
        raise ValueError(
            "QTensor: the packed dimension takes a slice that starts on a block and byte boundary, got "
            f"{items!r}; dequantize first, or index the other dimensions"
        )
    start, length, step = _bounds(items[0], prod(q.inner))
    if step != 1:
        raise ValueError(f"QTensor: slices of the packed dimension have step 1, got {step}; dequantize first")
    return structure.narrow(q, COLS, start, length, what="slice")


def _index_rows(q: QTensor, item: Any) -> QTensor:
    if _is_full(item):
        return q
    size = q.data.shape[-2]
    if isinstance(item, slice):
        start, length, step = _bounds(item, size)
        if step == 1:
            return structure.narrow(q, ROWS, start, length, what="slice")
        item = torch.arange(start, start + length, step, device=q.device)
    if isinstance(item, int):
        if not -size <= item < size:
            raise IndexError(f"QTensor: row {item} is out of range for {size} rows")
        row = structure.select_row(q, item % size)
        return row if row.layout.axis == -1 else replace(row, layout=changed(row.layout.key, axis=-1))
    if item.dtype == torch.bool:
        if item.shape[0] != size:
            raise IndexError(f"QTensor: a mask of {item.shape[0]} for {size} rows")
        item = item.nonzero().squeeze(-1)
    flat = item.reshape(-1).to(q.device, torch.int64)
    q = structure.take_rows(q, torch.where(flat < 0, flat + size, flat))
    if item.ndim == 1:
        return q
    if item.ndim == 0:
        return _index_rows(q, 0)
    if q.layout.axis == -2:
        raise ValueError("QTensor: an index of several dimensions needs the packed dimension last")
    return structure.split(q, ROWS, tuple(item.shape), "index")


def narrow(q: QTensor, dim: int, start: int, length: int) -> QTensor:
    """Cut `length` from `start` along a logical dimension."""
    at = position(q, dim)
    size = q.shape[at]
    check_ints("narrow", start, length)
    start = start + size if start < 0 else start
    if not 0 <= start <= start + length <= size:
        raise IndexError(f"narrow: start {start} and length {length} are out of range for a size of {size}")
    return getitem(q, (*[slice(None)] * at, slice(start, start + length)))


def split(q: QTensor, split_size: int | Sequence[int], dim: int) -> tuple[QTensor, ...]:
    """Cut a logical dimension into pieces of one size, the last one smaller, or of the given sizes."""
    total = q.shape[position(q, dim)]
    check_ints("split", *(split_size if isinstance(split_size, tuple | list) else [split_size]))
    if isinstance(split_size, int):
        if split_size < 1:
            raise ValueError(f"split: expected pieces of at least one, got {split_size}")
        sizes = [min(split_size, total - i) for i in range(0, total, split_size)] or [0]
    else:
        sizes = list(split_size)
    if sum(sizes) != total:
        raise ValueError(f"split: sizes {sizes} do not add up to {total}, the size of dimension {dim}")
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return tuple(narrow(q, dim, start, size) for start, size in zip(starts, sizes, strict=True))


def squeeze(q: QTensor, dims: int | Sequence[int]) -> QTensor:
    """Drop those of the logical dimensions `dims` that have size 1."""
    shape, drop = q.shape, [position(q, d) for d in ([dims] if isinstance(dims, int) else dims)]
    kept = tuple(0 if i in drop and n == 1 else slice(None) for i, n in enumerate(shape))
    return getitem(q, kept) if 0 in kept else q


def permute(q: QTensor, dims: Sequence[int]) -> QTensor:
    """Permute logical dimensions."""
    dims = _sizes(dims)
    if sorted(position(q, d) for d in dims) != list(range(q.ndim)):
        raise ValueError(f"permute: expected an order of {q.ndim} dimensions, got {tuple(dims)}")
    roles = _roles(q)
    order = [roles[position(q, d)] for d in dims]
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
    shape = infer(_sizes(shape), prod(old), "reshape")
    if shape == old:
        return q
    kept = q.inner if q.layout.axis == -1 else (q.data.shape[-2],)
    if shape[-len(kept) :] != tuple(kept):
        raise ValueError(
            f"reshape: expected a shape that ends in {tuple(kept)}, got {shape}; dequantize first to repack"
        )
    if q.data.ndim == 1:
        q = structure.as_matrix(q)
    wanted = shape[: -len(kept)]
    dim = ROWS if q.layout.axis == -1 else COLS
    lead, size = tuple(q.data.shape[:-2]), structure.size(q, dim)
    if (not wanted and dim == COLS) or prod(wanted) != prod(lead) * size:
        raise ValueError(f"reshape: {old} to {shape} changes the packed dimension; dequantize first")
    if wanted and wanted[-1] == size and prod(wanted[:-1]) == prod(lead):
        return map_lead(q, lambda t: t.reshape(*wanted[:-1], *t.shape[-2:]))
    if lead:
        q = map_lead(q, lambda t: t.reshape(prod(lead), *t.shape[-2:]))
        q = structure.merge(q, dim)
    if not wanted:
        return structure.select_row(q, 0)
    return structure.split(q, dim, wanted) if len(wanted) > 1 else q


def expand(q: QTensor, sizes: Sequence[int]) -> QTensor:
    """Expand leading dimensions."""
    sizes = _sizes(sizes)
    own = 1 + len(q.inner)
    if q.data.ndim == 1 or len(sizes) < own:
        raise ValueError(f"expand: expected at least the matrix of {tuple(q.shape)}, got {tuple(sizes)}")
    matrix = tuple(q.shape[-own:])
    if any(s not in (-1, m) for s, m in zip(sizes[-own:], matrix, strict=True)):
        raise ValueError(f"expand: matrix dimensions stay {matrix}, got {tuple(sizes[-own:])}")
    return map_lead(q, lambda t: t.expand(*sizes[:-own], *t.shape[-2:]))


def cat(tensors: Sequence[QTensor], dim: int = 0) -> QTensor:
    """Concatenate; along a blocked dimension blocks are refined to the gcd of the joined extents.

    Raises:
        TypeError: not all are QTensors.
        ValueError: they differ in shape outside `dim` or in format, or are joined inside a byte.

    Example:
        >>> import fq, torch
        >>> q = fq.quantize(torch.ones(2, 8), fq.int8())
        >>> fq.cat([q, q], -1)
        QTensor((2, 16), int8:g8, float32, 48 bytes, cpu)
    """
    first = _first(tensors, "cat")
    at = position(first, dim)
    shape = list(first.shape)
    for t in tensors[1:]:
        other = list(t.shape)
        other[at : at + 1] = shape[at : at + 1]
        if other != shape:
            raise ValueError(f"cat: {tuple(first.shape)} and {tuple(t.shape)} differ outside dimension {dim}")
    role = _roles(first)[at]
    if role == "rows":
        return structure.cat_stored(tensors, ROWS)
    if role == "cols":
        if len(first.inner) != 1:
            raise ValueError(f"cat: the packed axis stands for dimensions {first.inner}; it cannot be joined")
        return structure.cat_stored(tensors, COLS)
    return structure.join(tensors, lambda ts: torch.cat(ts, int(role)), "cat")


def stack(tensors: Sequence[QTensor], dim: int = 0) -> QTensor:
    """Stack along a new leading dimension; vectors become rows.

    Raises:
        TypeError: not all are QTensors.
        ValueError: they differ in shape or format, or the new dimension is no leading one.

    Example:
        >>> import fq, torch
        >>> q = fq.quantize(torch.ones(2, 8), fq.int8())
        >>> fq.stack([q, q, q]).shape
        torch.Size([3, 2, 8])
    """
    first = _first(tensors, "stack")
    at = position(first, dim, 1)
    for t in tensors[1:]:
        if t.shape != first.shape:
            raise ValueError(f"stack: shapes {tuple(first.shape)} and {tuple(t.shape)} differ")
    if first.data.ndim == 1 and at == 0:
        return structure.cat_stored([structure.as_matrix(t) for t in tensors], ROWS, "stack")
    if at > first.data.ndim - 2 or first.data.ndim == 1:
        raise ValueError(
            f"stack: the new dimension comes before the matrix, got {dim} for {tuple(first.shape)}"
        )
    return structure.join(tensors, lambda ts: torch.stack(ts, at), "stack")


def _first(tensors: Sequence[Any], what: str) -> Any:
    """Return the first of `tensors`, all QTensors that pack the same dimensions."""
    if not isinstance(tensors, list | tuple):
        raise TypeError(f"{what}: expected a list of QTensors, got {type(tensors).__name__}")
    if not tensors:
        raise ValueError(f"{what}: expected at least one QTensor")
    for t in tensors:
        if not isinstance(getattr(t, "layout", None), Layout):
            raise TypeError(f"{what}: expected QTensors, got {type(t).__name__}; quantize it first")
        if _roles(t) != _roles(tensors[0]):
            raise ValueError(
                f"{what}: all must pack the same dimensions, got {tuple(tensors[0].shape)} packed along axis "
                f"{tensors[0].layout.axis} and {tuple(t.shape)} along {t.layout.axis}"
            )
    return tensors[0]
