"""Checks of what primitives are given: a wrong kind is a TypeError, a wrong value a ValueError."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from fq.layouts import Layout, block
from fq.layouts import scale as scales
from fq.layouts.packing import row_bytes
from fq.layouts.storage import CANONICAL
from fq.qtensor import QTensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check_float(what: str, name: str, x: Any) -> None:
    """Raise TypeError unless x is a tensor of a float dtype of at least 16 bits."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{what}: {name} must be a tensor, got {type(x).__name__}")
    if x.dtype not in FLOATS:
        raise TypeError(f"{what}: {name} must be float32, bfloat16, float16 or float64, got {x.dtype}")


def check_qtensor(what: str, q: Any) -> None:
    """Raise unless q is a QTensor whose children fit its layout.

    Traced code sees only the type; the opaque calls check the rest, on fake tensors, without guards.
    A QTensor found to fit is not checked again: its children keep their dtypes and sizes.
    """
    if not isinstance(q, QTensor):
        raise TypeError(f"{what}: expected a QTensor, got {type(q).__name__}; quantize it first")
    if not torch.compiler.is_compiling() and "_fits" not in q.__dict__:
        check_children(what, q)
        q.__dict__["_fits"] = True


def check_children(what: str, q: QTensor) -> None:
    """Raise ValueError unless the dtypes and sizes of q's children fit its layout."""
    if q.layout.storage == CANONICAL:
        _check_children(what, q)


def _check_children(what: str, q: QTensor) -> None:
    layout, data = q.layout, q.data
    size = prod(q.inner)
    if data.dtype != layout.element.storage_dtype:
        raise ValueError(
            f"{what}: {layout.key} data must be {layout.element.storage_dtype}, got {data.dtype}"
        )
    width = row_bytes(size, layout.element.bits)
    if data.shape[-1] != width:
        raise ValueError(
            f"{what}: {size} columns of {layout.key} take {width} bytes, data has {data.shape[-1]}"
        )
    rows = data.shape[-2] if data.ndim > 1 else 1
    grid = block.grid((rows, size), layout.block)
    for name, child, kind in (
        ("scale", q.scale, layout.scale),
        ("zero_point", q.zero_point, layout.zero_point),
    ):
        if (child is None) != (kind is None):
            raise ValueError(f"{what}: {layout.key} {'has no' if kind is None else 'needs a'} {name}")
        if isinstance(child, QTensor):
            if child.layout.element != getattr(kind, "element", None):
                raise ValueError(f"{what}: {name} of {layout.key} is quantized as {child.layout.key}")
            _check_children(f"{what}: {name}", child)
        elif child is None:
            continue
        elif isinstance(kind, Layout):
            raise ValueError(f"{what}: {name} of {layout.key} must be a QTensor, got a tensor")
        elif name == "scale" and child.dtype != (wanted := scales.stored_dtype(layout.scale)):
            raise ValueError(f"{what}: scale of {layout.key} must be {wanted}, got {child.dtype}")
        elif name == "zero_point" and child.dtype.is_floating_point != (kind == "float"):
            raise ValueError(f"{what}: zero_point of {layout.key} must be {kind}, got {child.dtype}")
        wanted_shape = (*data.shape[:-2], *grid) if data.ndim > 1 else grid[1:]
        if tuple(child.shape) != wanted_shape:
            raise ValueError(
                f"{what}: {name} of {layout.key} must be a block grid of {wanted_shape}, "
                f"got {tuple(child.shape)}"
            )
    for name, child, width in (
        ("input_scale", q.input_scale, 1),
        ("pre_scale", q.pre_scale, size),
        ("perm", q.perm, size),
    ):
        if child is None:
            continue
        wanted_shape = (*data.shape[:-2], 1, width) if data.ndim > 1 else (width,)
        if tuple(child.shape) != wanted_shape:
            raise ValueError(f"{what}: {name} must have shape {wanted_shape}, got {tuple(child.shape)}")
        if (name == "perm") != (child.dtype == torch.int64):
            raise ValueError(f"{what}: {name} is {child.dtype}; perm is int64, the scales are floats")
