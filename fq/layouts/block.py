"""Blocks of a matrix, the one notion of granularity: -1 is a whole dimension, the last may be smaller."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Block = tuple[int, int]


def count(size: int, block: int) -> int:
    """Return how many blocks cover `size` elements; a covering block is one block, even when empty."""
    if block == 1:
        return size
    return 1 if block == -1 or size == 0 else (size + block - 1) // block


def grid(shape: tuple[int, int], block: Block) -> tuple[int, int]:
    """Return the shape of the block grid over a matrix of `shape`."""
    return count(shape[0], block[0]), count(shape[1], block[1])


def reduce(x: Tensor, block: Block, op: Callable[..., Tensor]) -> Tensor:
    """Reduce each block of a matrix (..., R, C) to one number: (..., rows, cols) of the grid.

    `op` is torch.amax, torch.amin or torch.sum; an empty block gives 0.
    """
    return _reduce_axis(_reduce_axis(x, -1, block[1], op), -2, block[0], op)


def _reduce_axis(x: Tensor, dim: int, block: int, op: Callable[..., Tensor]) -> Tensor:
    size = x.shape[dim]
    if block == 1:
        return x
    if size == 0:
        shape = list(x.shape)
        shape[dim] = 1
        return x.new_zeros(shape)
    if block == -1:
        return op(x, dim, keepdim=True)
    whole = size // block
    parts = []
    if whole:
        parts.append(
            op(x.narrow(dim, 0, whole * block).unflatten(dim, (whole, block)), dim if dim == -1 else -2)
        )
    if size % block:
        parts.append(op(x.narrow(dim, whole * block, size % block), dim, keepdim=True))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def expand(values: Tensor, shape: tuple[int, int], block: Block) -> Tensor:
    """Repeat a block grid (..., rows, cols) so that it broadcasts against the matrix (..., R, C)."""
    return _expand_axis(_expand_axis(values, -1, shape[1], block[1]), -2, shape[0], block[0])


def _expand_axis(values: Tensor, dim: int, size: int, block: int) -> Tensor:
    if block in (1, -1) or values.shape[dim] == 1:  # one per element, or one for all: it broadcasts
        return values
    return repeat(values, dim, block, size)


def repeat(values: Tensor, dim: int, times: int, size: int) -> Tensor:
    """Repeat each entry `times` times along `dim` (-1 or -2) and keep the first `size`.

    The ragged end is joined, not cut off: Inductor (2.13, CPU) drops part of a loop over i that it indexes
    by i // times and ends inside a block.
    """
    whole = size // times
    parts = [values.narrow(dim, 0, whole).repeat_interleave(times, dim)] if whole else []
    if size % times:
        sizes = [-1] * values.ndim
        sizes[dim] = size % times
        parts.append(values.narrow(dim, whole, 1).expand(sizes))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim) if parts else values.narrow(dim, 0, 0)


def stored(shape: tuple[int, int], block: Block) -> Block:
    """Return `block` with -1 in place of a size that covers its dimension; a block of one stays one."""
    rows, cols = block
    return (-1 if 1 < rows >= shape[0] else rows), (-1 if 1 < cols >= shape[1] else cols)
