"""Structural operations on quantized tensors, written once over the block grid.

A QTensor is a stack of matrices in storage orientation, rows × packed columns. Each child is a *plane*
over that matrix: one value per block of it (`data` has blocks of one element, packed; `scale` and
`zero_point` the layout's block; `pre_scale` and `perm` one per column; `input_scale` one for all). An
operation moves rows, columns or leading dimensions of every plane alike, so

    dequantize(f(q)) == f(dequantize(q))        exactly, or a ValueError names the alignment needed.

A plane may itself be a QTensor (nested scales); the same functions then recurse into its grid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import gcd, prod
from operator import index
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fq.layouts.block import Block, count
from fq.layouts.block import repeat as repeat_each
from fq.layouts.layout import changed
from fq.layouts.packing import pack, period, row_bytes, unpack
from fq.layouts.storage import CANONICAL

if TYPE_CHECKING:
    from fq.qtensor import QTensor

ROWS, COLS = -2, -1


def block_of(q: QTensor) -> Block:
    """Return q's block as constants, of which layouts are made: traced, an int that changed is a symbol."""
    rows, cols = q.layout.block
    return index(rows), index(cols)


def bits_of(q: QTensor) -> int:
    """Return the bits of q's element as a constant."""
    return index(q.layout.element.bits)


def planes(q: QTensor) -> Iterator[tuple[str, Any, Block]]:
    """Yield (name, plane, block) of every child but `data`."""
    yield "scale", q.scale, block_of(q)
    if q.zero_point is not None:
        yield "zero_point", q.zero_point, block_of(q)
    if q.input_scale is not None:
        yield "input_scale", q.input_scale, (-1, -1)
    if q.pre_scale is not None:
        yield "pre_scale", q.pre_scale, (-1, 1)
    if q.perm is not None:
        yield "perm", q.perm, (-1, 1)


def size(q: QTensor, dim: int) -> int:
    """Return the number of rows or columns of the stored matrix."""
    return prod(q.inner) if dim == COLS else q.data.shape[-2]


def is_plain(plane: Any) -> bool:
    """Whether a plane is a tensor, not a QTensor."""
    return isinstance(plane, Tensor)


def map_lead(q: QTensor, f: Callable[[Tensor], Tensor]) -> QTensor:
    """Apply `f`, which leaves the last two dimensions alone, to every tensor of q."""
    lead = q.data.ndim - 2

    def on(plane: Any) -> Any:
        if not is_plain(plane):
            return map_lead(plane, f)
        if q.layout.storage == CANONICAL:
            return f(plane)
        own = plane.shape[lead:]  # a kernel's byte order may keep any shape per matrix
        out = f(plane.reshape(*plane.shape[:lead], 1, prod(own)))
        return out.reshape(*out.shape[:-2], *own)

    return replace(q, data=f(q.data), **{name: on(plane) for name, plane, _ in planes(q)})


def _with_block(q: QTensor, dim: int, block: int, new_size: int) -> Any:
    """Return q's layout with another block along `dim`, kept as -1 where it covers the dimension."""
    block = -1 if 1 < block >= new_size else index(block)
    rows, cols = block_of(q)
    wanted = (block, cols) if dim == ROWS else (rows, block)
    return q.layout if wanted == block_of(q) else changed(q.layout.key, block=wanted)


def require_canonical(q: QTensor, what: str) -> None:
    """Raise if q is in a kernel's own byte order."""
    if q.layout.storage != CANONICAL:
        raise ValueError(
            f"{what}: storage {q.layout.storage!r} is defined per matrix and only leading dimensions can be "
            "rearranged; convert with fq.canonical(q) first"
        )


def _require_bytes(q: QTensor, at: int, what: str) -> None:
    step = period(bits_of(q))[0]
    if at % step:
        raise ValueError(
            f"{what}: column {at} is inside a byte; {q.layout.element.name} is cut at multiples of {step}"
        )


def _recode(q: QTensor, size: int, f: Callable[[Tensor], Tensor]) -> Tensor:
    """Return q's data with its codes, `size` a row, rearranged along the rows by `f`."""
    bits = bits_of(q)
    return f(q.data) if bits == 8 else pack(f(unpack(q.data, bits, size)), bits)


def _as_bytes(t: Tensor, f: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply `f`, which moves entries; float8 goes as its bytes, since vmap cannot gather it."""
    return f(t) if t.dtype.itemsize > 1 else f(t.view(torch.uint8)).view(t.dtype)


def _absent(q: QTensor, what: str, *names: str) -> None:
    for name in names:
        if getattr(q, name) is not None:
            raise ValueError(f"{what}: q carries a {name}, which this cannot rearrange; dequantize it first")


# --- cutting ---


def narrow(q: Any, dim: int, start: int, length: int, what: str = "narrow") -> Any:
    """Cut `length` stored rows or columns from `start`, which must begin a block (and a byte)."""
    if is_plain(q):
        return q.narrow(dim, start, length)
    full = size(q, dim)
    if start == 0 and length == full:
        return q
    require_canonical(q, what)
    start = start if length else 0  # nothing can be cut anywhere, and keeps one block
    if dim == COLS:
        _absent(q, what, "perm")
        bits = bits_of(q)
        _require_bytes(q, start, what)
        first = start * bits // 8
        data = q.data.narrow(-1, first, row_bytes(length, bits))
        if (length * bits) % 8 and start + length < full:  # bits past the end belong to others
            data = _recode(replace(q, data=data), length, lambda codes: codes)
    else:
        data = q.data.narrow(-2, start, length)
    cut = {}
    for name, plane, blocks in planes(q):
        block = blocks[dim]
        if block == -1:
            cut[name] = plane
            continue
        if start % block:
            axis = "row" if dim == ROWS else "column"
            raise ValueError(
                f"{what}: {axis} {start} is inside a block; start at a multiple of {block}, or dequantize"
            )
        first = start // block
        cut[name] = narrow(plane, dim, first, count(start + length, block) - first, f"{what}: {name}")
    block = block_of(q)[dim]
    new = replace(q, data=data, layout=_with_block(q, dim, block, length), **cut)
    return replace(new, inner=(length,)) if dim == COLS else new


def take_rows(q: Any, index: Tensor, what: str = "index") -> Any:
    """Gather stored rows by a 1-D index; blocks must be one row high, or all rows."""
    if is_plain(q):
        return _as_bytes(q, lambda t: t.index_select(-2, index))
    require_canonical(q, what)
    new = {}
    for name, plane, (block, _) in planes(q):
        if block not in (1, -1):
            raise ValueError(f"{what}: rows share blocks of {block}; gathering needs blocks one row high")
        new[name] = plane if block == -1 else take_rows(plane, index, f"{what}: {name}")
    return replace(q, data=take_rows(q.data, index), **new)


def select_row(q: Any, row: int, what: str = "index") -> Any:
    """Take one stored row of every matrix: the last leading dimension becomes the rows."""
    if is_plain(q):
        return q.select(-2, row)
    require_canonical(q, what)
    if q.data.ndim > 2:
        _absent(q, what, "input_scale", "pre_scale", "perm")
    new = {}
    for name, plane, (block, _) in planes(q):
        new[name] = select_row(plane, 0 if block == -1 else row // block, what)
    return replace(q, data=q.data.select(-2, row), layout=_with_block(q, ROWS, 1, 2), **new)


# --- refining blocks ---


def repeat(q: Any, dim: int, times: int, length: int) -> Any:
    """Repeat each row or column `times` times and keep the first `length`."""
    if is_plain(q):
        return _as_bytes(q, lambda t: repeat_each(t, dim, times, length))
    if times == 1:
        return narrow(q, dim, 0, length)
    if dim == COLS:
        data = _recode(q, size(q, dim), lambda codes: repeat(codes, dim, times, length))
        q = replace(q, inner=(length,))
    else:
        data = repeat(q.data, dim, times, length)
    block = block_of(q)[dim]
    if block == -1:
        return replace(q, data=data)
    cells = count(length, block * times)
    new = {name: narrow(plane, dim, 0, cells) for name, plane, _ in planes(q)}
    return replace(q, data=data, layout=_with_block(q, dim, block * times, length), **new)


def _refine(plane: Any, dim: int, full: int, block: int, finer: int) -> Any:
    """Return the plane of blocks of `finer`, which divides `block`, over `full` rows or columns."""
    old = full if block == -1 else block
    return plane if old == finer else repeat(plane, dim, max(1, old // finer), count(full, finer))


def refine(q: QTensor, dim: int, block: int) -> QTensor:
    """Repeat scales so that blocks are `block` rows or columns, a divisor of the present ones."""
    require_canonical(q, "refine")
    full, old = size(q, dim), block_of(q)[dim]
    new = {
        name: _refine(plane, dim, full, old, block)
        for name, plane, _ in planes(q)
        if name in ("scale", "zero_point")
    }
    rows, cols = block_of(q)
    wanted = (block, cols) if dim == ROWS else (rows, block)
    return replace(q, layout=changed(q.layout.key, block=wanted), **new)


def _finer(block: int, full: int) -> int:
    """Return the largest block that divides both `block` and `full`, -1 being `full`."""
    return max(index(full), 1) if block == -1 else gcd(block, index(full))


# --- leading dimensions into rows or columns, and back ---


def merge(q: Any, dim: int, what: str = "reshape") -> Any:
    """Merge the last leading dimension into the rows or the columns of the stored matrix."""

    def plain(t: Tensor) -> Tensor:
        return t.flatten(-3, -2) if dim == ROWS else t.movedim(-3, -2).flatten(-2)

    if is_plain(q):
        return plain(q)
    require_canonical(q, what)
    _absent(q, what, "perm", "input_scale", *(("pre_scale",) if dim == ROWS else ()))
    full, lead = size(q, dim), q.data.shape[-3]
    if dim == COLS:
        _require_bytes(q, full, what)
    block = _finer(block_of(q)[dim], full)
    if lead == 0 and block != 1:
        raise ValueError(f"{what}: an empty tensor cannot keep blocks of {block}; dequantize first")
    new = {
        name: merge(
            _refine(plane, dim, full, blocks[dim], block if name != "pre_scale" else 1),
            dim,
            f"{what}: {name}",
        )
        for name, plane, blocks in planes(q)
    }
    layout = _with_block(q, dim, block, full * lead)
    out = replace(q, data=plain(q.data), layout=layout, **new)
    return replace(out, inner=(full * lead,)) if dim == COLS else out


def split(q: Any, dim: int, sizes: Sequence[int], what: str = "reshape") -> Any:
    """Split the rows or columns of the stored matrix into leading dimensions and the rest."""
    *lead, rest = sizes

    def plain(t: Tensor, rest: int) -> Tensor:
        t = t.unflatten(dim, (*lead, rest))
        return t if dim == ROWS else t.movedim(-2 - len(lead), -2)

    def spread(t: Tensor) -> Tensor:  # one value for all: the same for each part
        own = t.shape[-2:]
        return t.reshape(*t.shape[:-2], *[1] * len(lead), *own).expand(*t.shape[:-2], *lead, *own)

    if is_plain(q):
        return plain(q, rest)
    require_canonical(q, what)
    full, width = size(q, dim), rest
    if dim == COLS:
        width = row_bytes(rest, bits_of(q))
        _absent(q, what, "perm")
        _require_bytes(q, rest, what)
    new, block = {}, block_of(q)[dim]
    for name, plane, blocks in planes(q):
        if blocks[dim] == -1:
            new[name] = spread(plane) if is_plain(plane) else map_lead(plane, spread)
        else:
            finer = gcd(blocks[dim], index(rest))
            cells = (*lead, count(rest, finer))
            new[name] = split(_refine(plane, dim, full, blocks[dim], finer), dim, cells, f"{what}: {name}")
    layout = q.layout if block == -1 else _with_block(q, dim, gcd(block, index(rest)), rest)
    out = replace(q, data=plain(q.data, width), layout=layout, **new)
    return replace(out, inner=(rest,)) if dim == COLS else out


def exchange_rows(q: Any, order: Sequence[int], what: str = "permute") -> Any:
    """Permute leading dimensions and rows (positions in the stored tensor, the packed axis left out)."""
    if is_plain(q):
        return q.permute(*order, q.ndim - 1)
    require_canonical(q, what)
    for name, _, (block, _) in planes(q):
        if block != 1:
            raise ValueError(
                f"{what}: rows become a leading dimension in blocks one row high; {name} has {block}"
            )
    new = {name: exchange_rows(plane, order, f"{what}: {name}") for name, plane, _ in planes(q)}
    return replace(q, data=q.data.permute(*order, q.data.ndim - 1), **new)


def as_matrix(q: QTensor) -> QTensor:
    """Return a 1-D tensor as one stored row."""
    return map_lead(q, lambda t: t.unsqueeze(0))


# --- joining ---


def _same_format(qs: Sequence[QTensor], what: str) -> None:
    first = qs[0]
    for q in qs[1:]:
        same = changed(q.layout.key, block=block_of(first)).key == first.layout.key
        children = [n for n, _, _ in planes(q)] == [n for n, _, _ in planes(first)]
        if not (same and children and q.dtype == first.dtype):
            raise ValueError(
                f"{what}: expected tensors of one format, got {first.layout.key} ({first.dtype}) and "
                f"{q.layout.key} ({q.dtype}); fq.requantize one of them"
            )


def join(parts: Sequence[Any], f: Callable[[list[Tensor]], Tensor], what: str) -> Any:
    """Join tensors that differ in leading dimensions only."""
    if is_plain(parts[0]):
        return f(list(parts))
    _same_format(parts, what)
    parts = _common_block(parts, ROWS, [])
    parts = _common_block(parts, COLS, [])
    names = [name for name, _, _ in planes(parts[0])]
    new = {name: join([getattr(p, name) for p in parts], f, what) for name in names}
    return replace(parts[0], data=f([p.data for p in parts]), **new)


def _common_block(qs: Sequence[QTensor], dim: int, cuts: list[int]) -> list[QTensor]:
    """Refine all to the largest block that divides each block and each of `cuts`."""
    blocks = {block_of(q)[dim] for q in qs}
    if len(blocks) == 1 and (not cuts or blocks == {1}):
        return list(qs)
    extents = [size(q, dim) if block_of(q)[dim] == -1 else block_of(q)[dim] for q in qs]
    finer = gcd(*(index(n) for n in (*cuts, *extents)))
    return [refine(q, dim, max(finer, 1)) for q in qs]


def cat_stored(qs: Sequence[Any], dim: int, what: str = "cat") -> Any:
    """Join stored rows or columns; blocks are refined to the gcd of the joined extents."""
    if is_plain(qs[0]):
        return torch.cat(list(qs), dim)
    qs = [q for q in qs if size(q, dim)] or list(qs[:1])
    if len(qs) == 1:
        return qs[0]
    _same_format(qs, what)
    for q in qs:
        require_canonical(q, what)
        _absent(q, what, "perm", "input_scale", *(("pre_scale",) if dim == ROWS else ()))
    if dim == COLS:
        for q in qs[:-1]:
            _require_bytes(q, size(q, dim), what)
    qs = _common_block(qs, COLS if dim == ROWS else ROWS, [])
    qs = _common_block(qs, dim, [size(q, dim) for q in qs[:-1]])
    total = sum(size(q, dim) for q in qs)
    new = {
        name: cat_stored([getattr(q, name) for q in qs], dim, f"{what}: {name}")
        for name, _, _ in planes(qs[0])
    }
    out = replace(
        qs[0],
        data=torch.cat([q.data for q in qs], dim),
        layout=_with_block(qs[0], dim, block_of(qs[0])[dim], total),
        **new,
    )
    return replace(out, inner=(total,)) if dim == COLS else out
