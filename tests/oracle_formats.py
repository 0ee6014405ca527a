"""The oracle for matrices: how scales and zero points are chosen and kept, and what codes then mean."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from oracle import BINARY, HALVES, LARGEST, FloatFormat, IntFormat, bounded, f32, load, mx_byte, store

MX_RULES = ("floor", "ceil", "rceil", "even")
SEARCHES = ("mse", "four_over_six")


@dataclass(frozen=True)
class Format:
    """How numbers are kept: a block size of -1 is a whole dimension; quantized parts are Formats."""

    element: Any
    block: tuple[int, int]
    scale: str | Format = "float32"
    zero: str | Format | None = None  # None, "int": (q - z)·s, "float" or a Format: q·s + z
    rule: str = "absmax"


@dataclass
class Quantized:
    """Codes (N, K), what is kept as scale and zero point over the block grid, and the values decoded."""

    codes: np.ndarray
    scale: Any
    values: np.ndarray
    zero: Any = None


class Blocks:
    """The blocks of a matrix, and of each element the block it is in; the last ones may be smaller."""

    def __init__(self, shape, block):
        rows, cols = (max(n, 1) if b == -1 else b for n, b in zip(shape, block, strict=True))
        self.grid = (-(-shape[0] // rows), -(-shape[1] // cols))
        r, c = np.arange(shape[0]) // rows, np.arange(shape[1]) // cols
        self.of = r[:, None] * self.grid[1] + c[None, :]

    def reduce(self, op, x, start):
        out = np.full(self.grid[0] * self.grid[1], start)
        op.at(out, self.of.ravel(), x.ravel())
        return out.reshape(self.grid)

    def spread(self, values):
        return values.ravel()[self.of]


def quantize(x, fmt: Format, *, scale=None, outer=None, divisor=1.0, is_scale=False, part=None) -> Quantized:
    """Quantize x / divisor, in the scale's own rounding.

    A scale may be given, or `outer`, the scale of the scales. Scales (`is_scale`) never become zero. `part`
    is the part of its range that a block keeps, where a rule searches it.
    """
    x = np.asarray(x, np.float64)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        if fmt.rule in SEARCHES and scale is None:
            return searched(x, fmt)
        blocks = Blocks(x.shape, fmt.block)
        low, high = extremes(x, fmt, blocks)
        finite = np.isfinite(low) & np.isfinite(high)
        low, high = np.where(finite, low, np.nan), np.where(finite, high, np.nan)
        if part is not None and (fmt.zero is not None or fmt.rule in MX_RULES):
            low, high, part = f32(low * f32(part)), f32(high * f32(part)), None
        if scale is None:
            kept = chosen(low, high, fmt, divisor, part, outer)
        else:
            kept = keep(np.broadcast_to(np.asarray(scale, np.float64), blocks.grid), fmt.scale, 1.0, outer)
        number = kept.values if isinstance(kept, Quantized) else load(kept, fmt.scale)
        codes, values, zero = coded(f32(x / divisor), fmt, blocks, number, low, high, is_scale)
    return Quantized(codes, kept, saturated(values), zero)


def extremes(x, fmt, blocks):
    """Block minimum and maximum: around zero, or, for a float zero point, of the numbers alone."""
    if fmt.rule in ("minmax", "absmax_full"):
        low, high = blocks.reduce(np.minimum, x, np.inf), blocks.reduce(np.maximum, x, -np.inf)
        unsigned = isinstance(fmt.zero, Format) and not fmt.zero.element.signed
        if fmt.zero == "int" or unsigned:  # unsigned zero points stand for numbers of one sign
            low, high = np.minimum(low, 0.0), np.maximum(high, 0.0)
        return low + 0.0, high + 0.0  # zeros have no sign: which is the smaller depends on the order
    if fmt.rule == "absmean":
        high = f32(blocks.reduce(np.add, np.abs(x), 0.0) / blocks.reduce(np.add, np.ones_like(x), 0.0))
    else:
        high = blocks.reduce(np.maximum, np.abs(x), 0.0)
    return -high, high


def chosen(low, high, fmt, divisor, part, outer):
    """The scale of each block, as it is kept."""
    if fmt.rule in MX_RULES:
        return np.array([[mx_byte(a, fmt.rule, fmt.element) for a in row] for row in f32(high / divisor)])
    span, reach = statistic(low, high, fmt)
    span = saturated(span)
    if fmt.zero not in (None, "int"):
        span = np.maximum(span, f32(1e-6))  # MSLK's smallest range
        if fmt.scale == "e8m0":  # rounded up, all codes must still be float32 numbers
            span = np.minimum(span, reach * 2.0 ** (128 - fmt.element.bits))
    kept = keep(span, fmt.scale, divisor * (reach if part is None else f32(reach / f32(part))), outer)
    if fmt.element == BINARY:  # it has no zero, so a block of zeros has scale zero
        kept = np.where(span == 0, 0.0, kept)
    return kept


def statistic(low, high, fmt):
    """What is divided by what."""
    element = fmt.element
    if fmt.rule == "absmean":  # XNOR-Net
        return high, 1.0
    if fmt.rule == "minmax":
        return high - low, 2**element.bits - 1
    if fmt.rule == "absmax_full":  # auto-round: the extreme, with its sign, becomes the code of largest size
        return np.where(high >= -low, high, low), element.lowest if element.signed else element.largest
    if fmt.rule == "absmax" and isinstance(element, IntFormat) and element.signed:  # compressed-tensors
        return high, (2**element.bits - 1) / 2
    return high, element.largest


def keep(span, scale, divisor, outer):
    if isinstance(scale, Format):
        return quantize(span, scale, scale=outer, divisor=divisor, is_scale=True)
    return store(f32(span / divisor), scale)


def coded(x, fmt, blocks, scale, low, high, is_scale):
    """Codes, values and the zero points as kept."""
    element, s = fmt.element, blocks.spread(scale)
    if fmt.zero is None:
        ratio = f32(x / s)
        codes = element.encode(bounded(ratio, element.smallest, element.largest) if is_scale else ratio)
        return codes, f32(element.decode(codes) * s), None
    if fmt.zero == "int":
        zero = np.clip(np.rint(f32(element.lowest - f32(low / scale))), element.lowest, element.largest)
        zero = np.where(np.isnan(zero), 0.0, zero)
        codes = element.encode(f32(np.rint(f32(f32(x / s) + blocks.spread(zero)))))
        return codes, f32((element.decode(codes) - blocks.spread(zero)) * s), zero
    zero = number = saturated(low - f32(element.lowest * scale))
    if isinstance(fmt.zero, Format):  # once rounded it would not cancel a block of zeros
        flat = (low == 0) & (high == 0) & ~np.isnan(scale)
        zero = quantize(np.where(flat, 0.0, zero), fmt.zero)
        number = zero.values
    elif fmt.scale in HALVES:  # kept in the scale's dtype
        kind = HALVES[fmt.scale]
        zero = number = kind.decode(kind.encode(zero))
    # MSLK, whose scales are float32, subtracts the minimum itself.
    plain = fmt.zero == "float" and fmt.scale == "float32"
    origin = low if plain else saturated(number + saturated(element.lowest * scale))
    codes = element.encode(np.rint(f32(f32(x - blocks.spread(origin)) / s)) + element.lowest)
    return codes, f32(f32(element.decode(codes) * s) + blocks.spread(number)), zero


def saturated(x):
    return np.clip(f32(x), -LARGEST, LARGEST)


def searched(x, fmt):
    """The part of its range that errs least, block by block, the first where several do.

    An error is counted in whole units of 2^-40 of amax squared (2^-31 where a block spans a dimension).
    """
    plain = "minmax" if fmt.zero is not None else "absmax"
    if fmt.scale == "e8m0" and isinstance(fmt.element, FloatFormat):
        plain = "even" if fmt.element.bits == 4 else "rceil"
    base, blocks = replace(fmt, rule=plain), Blocks(x.shape, fmt.block)
    low, high = extremes(x, base, blocks)
    amax, outer = np.maximum(-low, high), None
    if fmt.rule == "four_over_six":  # 6·256: amax/4 must stay below 448
        top = Blocks(amax.shape, fmt.scale.block).reduce(
            np.maximum, np.where(np.isfinite(amax), amax, np.nan), 0.0
        )
        outer = store(f32(top / 1536), fmt.scale.scale)
    elif isinstance(fmt.scale, Format):
        outer = load(quantize(x, base).scale.scale, fmt.scale.scale)
    parts = [1 - i / 25 for i in range(16)]
    if fmt.rule == "four_over_six":
        parts = [1.0, 1.5]  # the largest element becomes 6, or 4
    elif fmt.scale == "e8m0":
        parts = [1.0, 0.5]
    best, least = np.ones(blocks.grid), np.full(blocks.grid, np.inf)
    for part in parts:
        values = quantize(x, base, outer=outer, part=np.full(blocks.grid, part)).values
        error = f32(f32(values - x) / blocks.spread(amax)) ** 2
        error = np.rint(np.nan_to_num(error, nan=0, posinf=4) * (2.0**31 if -1 in fmt.block else 2.0**40))
        error = blocks.reduce(np.add, error, 0.0)
        best, least = np.where(error < least, part, best), np.minimum(error, least)
    return quantize(x, base, outer=outer, part=best)
