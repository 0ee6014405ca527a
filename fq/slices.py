"""Quantizing a large tensor slice by slice, to the same bits, so that the temporaries stay small."""

from __future__ import annotations

from math import lcm

import torch
from torch import Tensor

from fq.layouts import Layout
from fq.layouts.layout import changed
from fq.layouts.scale import SEARCH_RULES
from fq.numerics import load_scale
from fq.primitives import quantize
from fq.qtensor import QTensor, stack
from fq.spec import from_leaves, spec_of, to_leaves

LARGE = 1 << 20  # bytes; below, the calls cost more than the temporaries
SLICES = 16


def quantize_slices(value: Tensor, layout: Layout, *, inner: int = 1) -> QTensor:
    """Return `quantize(value, layout, inner=inner)`, made in slices of the rows of the stored matrix.

    Scales of a whole tensor come from its extremes first. Where they do not (one searched, averaged, beside
    a float zero point, or above signed ones), the tensor is quantized in one piece, with temporaries of
    several times its size.
    """
    if value.nbytes < LARGE or value.ndim <= inner:
        return quantize(value, layout, inner=inner)
    if value.ndim > inner + 1:
        return stack([quantize_slices(matrix, layout, inner=inner) for matrix in value.unbind(0)])
    if layout.axis == -2:
        return quantize_slices(value.mT, changed(layout.key, axis=-1)).mT
    period = _period(layout)
    if period is not None:
        step = -(-value.shape[0] // (SLICES * period)) * period
        made = [quantize(part, layout, inner=inner) for part in value.split(step)]
        return _joined(made, value, layout, inner)
    if layout.block[0] == -1 and _by_extremes(layout):
        return _under_its_scales(value, layout, inner)
    if _has_one_outer_scale(layout):
        return _under_one_outer_scale(value, layout, inner)
    return quantize(value, layout, inner=inner)


def _period(layout: Layout) -> int | None:
    """Return a number of rows whose multiples no block straddles, those of nested scales included, if any."""
    rows = layout.block[0]
    if rows == -1:
        return None
    periods = [1]
    for part in (layout.scale, layout.zero_point):
        if isinstance(part, Layout):
            nested = _period(part)
            if nested is None:
                return None
            periods.append(nested)
    return rows * lcm(*periods)


def _by_extremes(layout: Layout) -> bool:
    """Whether plain scales, and zero points that go with given scales, follow from minimum and maximum."""
    plain = not isinstance(layout.scale, Layout) and layout.zero_point in (None, "int")
    return plain and layout.rule not in (*SEARCH_RULES, "absmean")


def _under_its_scales(value: Tensor, layout: Layout, inner: int) -> QTensor:
    """Choose the scales from each column's extremes, and quantize slices of rows with them."""
    parts = value.split(-(-value.shape[0] // SLICES))
    low = torch.stack([part.amin(0) for part in parts]).amin(0)
    high = torch.stack([part.amax(0) for part in parts]).amax(0)
    chosen = quantize(torch.stack([low, high]), layout, inner=inner)
    scale = load_scale(chosen.scale, layout.scale)
    made = [quantize(p, layout, scale=scale, zero_point=chosen.zero_point, inner=inner) for p in parts]
    return _joined(made, value, layout, inner, shared=1 if chosen.zero_point is None else 2)


def _has_one_outer_scale(layout: Layout) -> bool:
    """Whether rows are quantized alone but for one plain scale of the whole matrix, as in NVFP4."""
    scale = layout.scale
    if not isinstance(scale, Layout) or isinstance(scale.scale, Layout) or layout.block[0] == -1:
        return False
    signed_or_mean = layout.rule == "absmax_full" or scale.rule == "absmean"
    return layout.zero_point is None and not signed_or_mean and scale.block == (-1, -1)


def _under_one_outer_scale(value: Tensor, layout: Layout, inner: int) -> QTensor:
    """Choose the outer scale from the largest element, and quantize slices of rows with it."""
    rows, nested = layout.block[0], layout.scale
    assert isinstance(nested, Layout)
    parts = value.split(-(-value.shape[0] // (SLICES * rows)) * rows)
    probe = torch.zeros_like(value[:1])
    probe.view(-1)[0] = torch.stack([part.abs().amax() for part in parts]).amax()
    outer = load_scale(quantize(probe, layout, inner=inner).scale.scale, nested.scale)
    made = [quantize(part, layout, inner=inner, outer_scale=outer) for part in parts]
    return _joined(made, value, layout, inner, shared=1)


def _joined(parts: list[QTensor], value: Tensor, layout: Layout, inner: int, shared: int = 0) -> QTensor:
    """Join rows of slices, leaf by leaf; the last `shared` leaves are the same for all."""
    shape = (value.shape[0], value[0].numel())
    leaves = list(zip(*(to_leaves(part)[0] for part in parts), strict=True))
    kept = len(leaves) - shared
    joined = [torch.cat(leaf) for leaf in leaves[:kept]] + [leaf[0] for leaf in leaves[kept:]]
    return from_leaves(joined, spec_of(layout, shape, value.dtype, tuple(value.shape[1:])))
