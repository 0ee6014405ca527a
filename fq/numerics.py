"""The numeric contract in plain torch ops: matrices to codes and scales, and back, with its derivative.

Everything here works on stored matrices (*lead, R, C) in float32; `perm`, `pre_scale`, `inner` and `axis`
are the primitives' business. It is what `reference` registers, and what defines right.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fq.layouts import Layout, block
from fq.layouts import scale as scales
from fq.layouts.element import Codebook, Int, UInt
from fq.layouts.layout import changed
from fq.layouts.layout import layout as parse
from fq.layouts.packing import pack, unpack
from fq.qtensor import QTensor
from fq.spec import stored_key

AFFINE_FLOOR = 1e-6  # MSLK's smallest group range
FOUR_OVER_SIX_TOP = 256.0  # the largest block scale, so that amax/4 stays below e4m3's 448


def quantize_matrix(
    x: Tensor,
    layout: Layout,
    *,
    scale: Tensor | None = None,
    zero_point: Tensor | None = None,
    outer_scale: Tensor | None = None,
    noise: Tensor | None = None,
    divisor: float | Tensor = 1.0,
    is_scale: bool = False,
) -> QTensor:
    """Quantize x/divisor, x: (*lead, R, C) float32.

    `divisor` lets nested scales be chosen in one division: their own scale is statistic/(divisor·d).
    With `is_scale` the values are scales, which never become zero.
    """
    if scale is not None:
        grid = _given(scale, zero_point, outer_scale, layout)
    elif layout.rule in scales.SEARCH_RULES:
        grid = _searched(x, layout, outer_scale)
    else:
        grid = _chosen(_extremes(x, layout), layout, divisor, outer_scale)
    shape = (x.shape[-2], x.shape[-1])
    codes = _encode(_divided(x, divisor), grid, layout, noise, is_scale)
    data = pack(codes, layout.element.bits) if layout.element.bits < 8 else codes
    stored = parse(stored_key(layout, shape))
    return QTensor(
        _dense(data), _dense(grid.scale), stored, torch.float32, (shape[1],), _dense(grid.zero_point)
    )


def _dense(child: Any) -> Any:
    """Return a child row by row, not in the strides of a transposed input, which kernels refuse."""
    return child.contiguous() if isinstance(child, Tensor) else child


@dataclass(frozen=True)
class _Grid:
    """What the numbers of a block are measured against: kept scale and zero point, and code zero's place."""

    scale: Any
    zero_point: Any = None
    origin: Tensor | None = None


def _given(scale: Tensor, zero_point: Tensor | None, outer_scale: Tensor | None, layout: Layout) -> _Grid:
    kept = _keep(scale.to(torch.float32), layout.scale, 1.0, outer_scale)
    if layout.zero_point is None:
        return _Grid(kept)
    if zero_point is None:
        raise ValueError("quantize: a layout with a zero point needs zero_point= where scale= is given")
    return _Grid(kept, _keep_zero(zero_point, layout))


def _chosen(
    extremes: tuple[Tensor, Tensor],
    layout: Layout,
    divisor: float | Tensor = 1.0,
    outer_scale: Tensor | None = None,
    shrink: Tensor | None = None,
) -> _Grid:
    """Choose scales and zero points; `shrink` is the part of its range that each block's are chosen for."""
    low, high = extremes
    if shrink is not None and (layout.zero_point is not None or layout.rule in scales.MX_RULES):
        low, high, shrink = low * shrink, high * shrink, None
    kept = _choose_scale(low, high, layout, divisor, outer_scale, shrink)
    if layout.zero_point is None:
        return _Grid(kept)
    zero = _choose_zero(low, high, load_scale(kept, layout.scale), layout)
    # MSLK subtracts the minimum itself, not z - 8s
    origin = low if layout.zero_point == "float" and layout.scale == torch.float32 else None
    return _Grid(kept, _keep_zero(zero, layout), origin)


def _encode(
    x: Tensor, grid: _Grid, layout: Layout, noise: Tensor | None = None, is_scale: bool = False
) -> Tensor:
    """Return the codes of x, one per element."""
    shape, element = (x.shape[-2], x.shape[-1]), layout.element
    wide = load_scale(grid.scale, layout.scale)
    spread = block.expand(wide, shape, layout.block)
    if layout.zero_point is None:
        value = x / spread
        if is_scale:
            value = scales.floor_to(value, element.smallest, element.max)
        return element.encode(value, noise)
    assert isinstance(element, Int | UInt)
    zero = load_zero(grid.zero_point, layout)
    if layout.zero_point == "int":
        return element.encode(x / spread + block.expand(zero, shape, layout.block), noise)
    origin = _saturated(zero + _saturated(element.min * wide)) if grid.origin is None else grid.origin
    return element.encode((x - block.expand(origin, shape, layout.block)) / spread, noise, element.min)


def _extremes(x: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """Return the block minimum and maximum, with zero in their range unless the zero point is a float."""
    if layout.rule in ("minmax", "absmax_full"):
        low, high = block.reduce(x, layout.block, torch.amin), block.reduce(x, layout.block, torch.amax)
        if layout.zero_point == "int" or _is_unsigned(layout.zero_point):
            low, high = torch.clamp(low, max=0.0), torch.clamp(high, min=0.0)
        # which of two zeros is the smaller depends on the order of comparing
        return torch.where(low == 0, 0.0, low), torch.where(high == 0, 0.0, high)
    if layout.rule == "absmean":
        # in float64, so that the order of a sum does not show in float32
        total = block.reduce(x.abs().to(torch.float64), layout.block, torch.sum)
        count = block.reduce(torch.ones_like(x, dtype=torch.float64), layout.block, torch.sum)
        high = (total / torch.clamp(count, min=1.0)).to(torch.float32)
    else:
        high = block.reduce(x.abs(), layout.block, torch.amax)
    return -high, high


def _is_unsigned(zero_point: Any) -> bool:
    """Whether zero points are quantized to unsigned codes: then none may be above zero."""
    return isinstance(zero_point, Layout) and not zero_point.element.signed


def _divided(x: Tensor, divisor: float | Tensor) -> Tensor:
    return x if isinstance(divisor, float) and divisor == 1.0 else x / divisor


def _choose_scale(
    low: Tensor,
    high: Tensor,
    layout: Layout,
    divisor: float | Tensor,
    outer_scale: Tensor | None,
    shrink: Tensor | None,
) -> Any:
    """Return the kept scale; blocks with NaN or inf get NaN."""
    finite = torch.isfinite(low) & torch.isfinite(high)
    if layout.rule in scales.MX_RULES:
        amax = torch.where(finite, high, torch.nan)
        return scales.MX_RULES[str(layout.rule)](amax / divisor, layout.element)  # type: ignore[arg-type]
    statistic, own = scales.LINEAR_RULES[str(layout.rule)](low, high, layout.element)
    statistic = torch.where(finite, _saturated(statistic), torch.nan)
    if layout.zero_point is not None and layout.zero_point != "int":
        # rounded up to a power of two, the range must not reach beyond float32
        widest = own * 2.0 ** (128 - layout.element.bits) if layout.scale == scales.E8M0 else None
        statistic = torch.clamp(statistic, AFFINE_FLOOR, widest)
    if shrink is not None:
        own = torch.full_like(shrink, own) / shrink  # number / tensor multiplies by the reciprocal
    kept = _keep(statistic, layout.scale, divisor * own, outer_scale)
    if isinstance(layout.element, Codebook) and not layout.element.has_zero:
        kept = torch.where(statistic == 0, 0.0, kept)  # only so does a block of zeros decode to zeros
    return kept


def _searched(x: Tensor, layout: Layout, outer_scale: Tensor | None) -> _Grid:
    """Choose, for each block, from several parts of its range the one whose codes err least."""
    base = changed(layout.key, rule=None)
    extremes, nested = _extremes(x, base), layout.scale
    amax = torch.maximum(-extremes[0], extremes[1])
    if isinstance(nested, Layout) and outer_scale is None:
        if layout.rule == "four_over_six":
            top = torch.where(torch.isfinite(amax), amax, torch.nan)
            top = block.reduce(top, nested.block, torch.amax) / (layout.element.max * FOUR_OVER_SIX_TOP)
            outer_scale = scales.load(scales.store(top, nested.scale), nested.scale)  # type: ignore[arg-type]
        else:
            outer_scale = load_scale(_chosen(extremes, base).scale.scale, nested.scale)
    best = torch.ops.fq.search(x, outer_scale, layout.key)
    return _chosen(extremes, base, outer_scale=outer_scale, shrink=best)


# An operator, because compilers take minutes to fuse the many candidates.
_lib = torch.library.Library("fq", "FRAGMENT")
_lib.define("search(Tensor x, Tensor? outer_scale, str key) -> Tensor")


def _search(x: Tensor, outer_scale: Tensor | None, key: str) -> Tensor:
    """Return, over the block grid, the factor of `search_factors` with the least squared error."""
    layout, base = parse(key), changed(key, rule=None)
    extremes = _extremes(x, base)
    amax = torch.maximum(-extremes[0], extremes[1])
    largest = block.expand(amax, (x.shape[-2], x.shape[-1]), layout.block)
    first, *others = scales.search_factors(str(layout.rule), layout.scale)

    def error(shrink: Tensor) -> Tensor:
        grid = _chosen(extremes, base, outer_scale=outer_scale, shrink=shrink)
        values = _values(base.element.decode(_encode(x, grid, base)), grid.scale, grid.zero_point, base)
        return _squared_error(_saturated(values), x, largest, layout.block)

    best = torch.full_like(amax, first)
    least = error(best)
    for factor in others:
        shrink = torch.full_like(amax, factor)
        found = error(shrink)
        best, least = torch.where(found < least, shrink, best), torch.minimum(found, least)
    return best


def _search_fake(x: Tensor, outer_scale: Tensor | None, key: str) -> Tensor:
    return x.new_empty((*x.shape[:-2], *block.grid((x.shape[-2], x.shape[-1]), parse(key).block)))


def _search_batched(info: Any, dims: tuple[Any, ...], x: Tensor, outer: Tensor | None, key: str) -> Any:
    x = x.expand(info.batch_size, *x.shape) if dims[0] is None else x.movedim(dims[0], 0)
    if dims[1] is not None and outer is not None:  # it may lack dimensions that an inner vmap gave x
        outer = outer.movedim(dims[1], 0)
        outer = outer.reshape(outer.shape[0], *[1] * (x.ndim - outer.ndim), *outer.shape[1:])
    return torch.ops.fq.search(x, outer, key), 0


_lib.impl("search", _search, "CompositeExplicitAutograd")
_lib.impl("search", torch.library.fallthrough_kernel, "Autograd")
torch.library.register_fake("fq::search", _search_fake, lib=_lib)
torch.library.register_vmap("fq::search", _search_batched, lib=_lib)


def _squared_error(w: Tensor, x: Tensor, amax: Tensor, blocks: block.Block) -> Tensor:
    """Return each block's squared error as an integer: no order of adding changes the sum."""
    unit = 2.0**40 if -1 not in blocks else 2.0**31
    relative = ((w - x) / amax).to(torch.float64)
    # A difference that overflows is at most twice amax.
    error = torch.round(torch.nan_to_num(relative * relative, 0.0, 4.0) * unit)
    return block.reduce(error.to(torch.int64), blocks, torch.sum)


def _keep(statistic: Tensor, kind: Any, divisor: float | Tensor, outer_scale: Tensor | None) -> Any:
    """Store statistic/divisor as a scale of `kind`: a tensor, or a QTensor where the layout nests."""
    if isinstance(kind, Layout):
        if outer_scale is not None:  # one for all stands in every outer block
            outer = block.grid((statistic.shape[-2], statistic.shape[-1]), kind.block)
            outer_scale = outer_scale.expand(*statistic.shape[:-2], *outer)
        return quantize_matrix(statistic, kind, scale=outer_scale, divisor=divisor, is_scale=True)
    return scales.store(_divided(statistic, divisor), kind)


def _saturated(x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Replace what overflowed by the largest number of `dtype`; NaN stays."""
    largest = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
    return torch.clamp(x, -largest, largest)


def _choose_zero(low: Tensor, high: Tensor, scale: Tensor, layout: Layout) -> Tensor:
    element = layout.element
    if layout.zero_point == "int":
        zero = torch.clamp(torch.round(element.min - low / scale), element.min, element.max)
        return torch.where(torch.isnan(scale), 0.0, zero)
    zero = _saturated(low - element.min * scale)
    if isinstance(layout.zero_point, Layout):  # once quantized it would not cancel a block of zeros
        zero = torch.where((low == 0) & (high == 0), 0.0, zero)
    return torch.where(torch.isnan(scale), torch.nan, zero)


def _keep_zero(zero: Tensor, layout: Layout) -> Any:
    if isinstance(layout.zero_point, Layout):
        return quantize_matrix(zero.to(torch.float32), layout.zero_point)
    if layout.zero_point == "int":
        return zero.to(torch.int8 if isinstance(layout.element, Int) else torch.uint8)
    dtype = zero_dtype(layout)
    return scales.narrow(_saturated(zero.to(torch.float32), dtype), dtype)


def zero_dtype(layout: Layout) -> torch.dtype:
    """Return the dtype of a float zero point: the scale's own where that is a plain float."""
    plain = layout.scale in (torch.float32, torch.float16, torch.bfloat16)
    return layout.scale if plain else torch.float32  # type: ignore[return-value]


def load_scale(kept: Any, kind: Any) -> Tensor:
    """Return kept scales in float32 over their block grid; nested ones are the one product block·outer."""
    return dequantize_matrix(kept) if isinstance(kind, Layout) else scales.load(kept, kind)


def load_zero(kept: Any, layout: Layout) -> Tensor:
    """Return kept zero points in float32 over their block grid."""
    return dequantize_matrix(kept) if isinstance(layout.zero_point, Layout) else kept.to(torch.float32)


def decode_matrix(q: QTensor) -> Tensor:
    """Return the decoded elements (*lead, R, C) float32, before scale and zero point."""
    element = q.layout.element
    size = 1
    for n in q.inner:
        size *= n
    codes = unpack(q.data, element.bits, size) if element.bits < 8 else q.data
    return element.decode(codes)


def _centred(q: QTensor, shape: tuple[int, int]) -> Tensor:
    """Return what the scale multiplies."""
    codes = decode_matrix(q)
    if q.layout.zero_point != "int":
        return codes
    return codes - block.expand(load_zero(q.zero_point, q.layout), shape, q.layout.block)


def dequantize_matrix(q: QTensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the stored matrix (*lead, R, C), computed in float32 and rounded once to `dtype`.

    It saturates: rounding up, the largest code may stand for more than the largest number of `dtype`.
    """
    w = _values(decode_matrix(q), q.scale, q.zero_point, q.layout)
    return _saturated(w, dtype).to(dtype)


def _values(codes: Tensor, scale: Any, zero_point: Any, layout: Layout) -> Tensor:
    """Return what decoded codes (*lead, R, C) stand for under kept scales and zero points."""
    shape = (codes.shape[-2], codes.shape[-1])
    spread = block.expand(load_scale(scale, layout.scale), shape, layout.block)
    if layout.zero_point is None:
        return codes * spread
    zero = block.expand(load_zero(zero_point, layout), shape, layout.block)
    return (codes - zero) * spread if layout.zero_point == "int" else codes * spread + zero


def quantize_activation(x: Tensor, q: QTensor) -> QTensor:
    """Quantize x (*lead, M, K) as `q.layout.act` says, with q's static scale if it has one."""
    act = q.layout.act
    assert act is not None
    if q.input_scale is None:
        return quantize_matrix(x, act)
    scale = q.input_scale.detach()  # straight-through: a static scale has no gradient
    if isinstance(act.scale, Layout):
        return quantize_matrix(x, act, outer_scale=scale)
    shape = block.grid((x.shape[-2], x.shape[-1]), act.block)
    return quantize_matrix(x, act, scale=scale.expand(*x.shape[:-2], *shape))


def leaf_gradients(q: QTensor, g: Tensor) -> list[Tensor | None]:
    """Return the adjoint of `dequantize_matrix`: gradients of q's leaves, in their order; codes have none.

    g: (*lead, R, C) float32.
    """
    shape = (g.shape[-2], g.shape[-1])
    out: list[Tensor | None] = [None]
    gs = block.reduce(g * _centred(q, shape), q.layout.block, torch.sum)
    out += leaf_gradients(q.scale, gs) if isinstance(q.scale, QTensor) else [_as_leaf(gs, q.scale)]
    if q.zero_point is not None:
        gz = block.reduce(g, q.layout.block, torch.sum)
        if isinstance(q.zero_point, QTensor):
            out += leaf_gradients(q.zero_point, gz)
        else:
            out.append(_as_leaf(gz, q.zero_point))
    return out


def _as_leaf(g: Tensor, leaf: Tensor) -> Tensor | None:
    return g.to(leaf.dtype) if leaf.dtype.is_floating_point and leaf.dtype.itemsize > 1 else None


def leaf_tangent(q: QTensor, tangents: list[Tensor | None]) -> Tensor | None:
    """Return the derivative of `dequantize_matrix` along tangents of q's leaves, None being zero.

    It consumes the list.
    """
    tangents.pop(0)  # codes
    ts = leaf_tangent(q.scale, tangents) if isinstance(q.scale, QTensor) else tangents.pop(0)
    tz = None
    if q.zero_point is not None:
        tz = leaf_tangent(q.zero_point, tangents) if isinstance(q.zero_point, QTensor) else tangents.pop(0)
        tz = None if q.layout.zero_point == "int" else tz
    if ts is None and tz is None:
        return None
    codes = decode_matrix(q)
    shape = (codes.shape[-2], codes.shape[-1])
    out = torch.zeros_like(codes)
    if ts is not None:
        out = _centred(q, shape) * block.expand(ts.to(torch.float32), shape, q.layout.block)
    if tz is not None:
        out = out + block.expand(tz.to(torch.float32), shape, q.layout.block)
    return out
