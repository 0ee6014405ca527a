"""An independent oracle in float64 NumPy, written from the formats' specifications; no code is fq's.

Numbers are float64 arrays that hold float32 values; `f32` is the one rounding that float32 arithmetic does
(a float64 division, product or sum of float32 numbers, rounded to float32, is the IEEE float32 result).
Codes are plain unsigned integers, one per element; integers below zero are two's complement.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

LARGEST = float(np.finfo(np.float32).max)
SMALLEST_SCALE = 2.0**-126


def f32(x):
    with np.errstate(over="ignore"):
        return np.asarray(x, np.float64).astype(np.float32).astype(np.float64)


# --- elements ---


@dataclass(frozen=True)
class FloatFormat:
    """`special`: "finite" none, "fn" all ones is NaN, "ieee" the top exponent, "fnuz" minus zero is NaN."""

    exponent: int
    mantissa: int
    special: str = "finite"
    signed: bool = True

    @property
    def bits(self):
        return self.signed + self.exponent + self.mantissa

    @property
    def bias(self):
        return 2 ** (self.exponent - 1) - 1 + (self.special == "fnuz")

    @property
    def codes(self):
        return np.arange(2**self.bits)

    def value(self, code):
        magnitude = code % 2 ** (self.exponent + self.mantissa)
        e, m = divmod(magnitude, 2**self.mantissa)
        negative = code != magnitude
        ones = magnitude == 2 ** (self.exponent + self.mantissa) - 1
        if (self.special == "fn" and ones) or (self.special == "fnuz" and negative and magnitude == 0):
            return math.nan
        if self.special == "ieee" and e == 2**self.exponent - 1:
            return math.nan if m else (-math.inf if negative else math.inf)
        fraction = m / 2**self.mantissa
        value = math.ldexp(fraction, 1 - self.bias) if e == 0 else math.ldexp(1 + fraction, e - self.bias)
        return -value if negative else value

    def decode(self, codes):
        return np.array([self.value(int(c)) for c in self.codes])[np.asarray(codes, np.int64)]

    @property
    def magnitudes(self):
        """The finite numbers from zero up; their index is their code."""
        values = self.decode(np.arange(2 ** (self.exponent + self.mantissa)))
        return values[np.isfinite(values)]

    @property
    def nan(self):
        if self.special == "finite":
            return len(self.magnitudes) - 1
        return 2 ** (self.bits - 1) if self.special == "fnuz" else 2 ** (self.exponent + self.mantissa) - 1

    def encode(self, x):
        """To the nearest, ties to the even code; saturates; NaN as `nan` says."""
        x = np.asarray(x, np.float64)
        values = self.magnitudes
        middles = (values[1:] + values[:-1]) / 2
        size = np.abs(x) if self.signed else np.maximum(x, 0)
        code = np.searchsorted(middles, size, side="left")
        tie = np.append(middles, np.nan)[code] == size
        code = code + (tie & (code % 2 == 1))
        sign = np.signbit(x) & self.signed & ~((self.special == "fnuz") & (code == 0))
        code = code + sign * 2 ** (self.exponent + self.mantissa)
        return np.where(np.isnan(x), self.nan, code)


E2M1 = FloatFormat(2, 1)
E4M3 = FloatFormat(4, 3, "fn")


def int_encode(x, bits, signed=True):
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    rounded = np.where(np.isnan(x), 0, np.clip(np.rint(np.nan_to_num(x, nan=0.0)), low, high))
    return rounded.astype(np.int64) % 2**bits


def int_decode(codes, bits, signed=True):
    codes = np.asarray(codes, np.int64)
    return (np.where(codes >= 2 ** (bits - 1), codes - 2**bits, codes) if signed else codes).astype(
        np.float64
    )


def table_encode(x, values):
    """The index of the nearest number of an ascending table, ties to the lower."""
    middles = (values[1:] + values[:-1]) / 2
    return np.where(np.isnan(x), 0, np.searchsorted(middles, np.nan_to_num(x, nan=0.0), side="left"))


def e8m0_decode(byte):
    return math.nan if byte == 255 else 2.0 ** (byte - 127)


def pack(codes, bits):
    """One row of codes as a little-endian bit stream."""
    stream = sum(int(c) % 2**bits << (i * bits) for i, c in enumerate(codes))
    return list(stream.to_bytes((len(codes) * bits + 7) // 8, "little"))


# --- scales ---


def mx_byte(amax, rule, emax=2, mantissa=1, largest=6.0):
    """The e8m0 byte of a block, from OCP MX v1.0 §6.3 (floor) and torchao's other modes."""
    if not math.isfinite(amax):
        return 255
    if amax == 0:
        return 0
    if rule == "rceil":
        amax = float(f32(amax * f32(1 / largest)))
        if amax == 0:
            return 0
    fraction, exponent = math.frexp(amax)  # amax = fraction·2**exponent, fraction in [0.5, 1)
    if rule == "floor":
        e = exponent - 1 - emax
    elif rule == "ceil":
        e = exponent - (fraction == 0.5) - emax
    elif rule == "rceil":
        e = exponent - (fraction == 0.5)
    else:  # "even": half of the last mantissa bit is added to the bits, and the exponent field taken
        bits = int(np.float32(amax).view(np.uint32)) + 2 ** (23 - mantissa - 1)
        e = (bits >> 23) - 127 - emax
    return min(max(e + 127, 0), 254)


def floored(s):
    """A scale that underflows float32 becomes the smallest usable one; NaN stays."""
    return np.where(np.abs(s) < SMALLEST_SCALE, np.copysign(SMALLEST_SCALE, s), s)


# --- presets: x is (N, K), blocks are rows of at most g columns ---


@dataclass
class Quantized:
    """Codes (N, K), what is stored as scale and zero point over the block grid, and the values decoded."""

    codes: np.ndarray
    scale: np.ndarray
    values: np.ndarray
    zero: np.ndarray | None = None
    outer: float | None = None


def blockwise(x, g, one):
    """Apply `one(block) -> (codes, scale, values, zero)` to each block of at most g columns of each row."""
    x = np.asarray(x, np.float64)
    g = x.shape[1] if g == -1 else g
    rows = [[one(row[i : i + g]) for i in range(0, len(row), g)] for row in x]
    with np.errstate(over="ignore"):
        codes, values = (np.array([np.concatenate([b[i] for b in row]) for row in rows]) for i in (0, 2))
    scale, zero = (np.array([[b[i] for b in row] for row in rows], np.float64) for i in (1, 3))
    return Quantized(codes, scale, np.clip(values, -LARGEST, LARGEST), zero)


def symmetric(x, bits, g, rule="absmax"):
    """compressed-tensors: s = amax/((2^b - 1)/2), q = round(clamp(x/s)); narrow: s = amax/(2^(b-1) - 1)."""

    def one(block):
        if rule == "absmax_full":  # auto-round: the extreme element, with its sign, is the lowest code
            extreme = block[np.argmax(np.abs(block))] if np.isfinite(block).all() else math.nan
            extreme = abs(extreme) if abs(extreme) in block else extreme
            s = extreme / -(2 ** (bits - 1))
        else:
            divisor = (2**bits - 1) / 2 if rule == "absmax" else 2 ** (bits - 1) - 1
            s = np.max(np.abs(block)) / divisor
        s = floored(f32(s if np.isfinite(block).all() else math.nan))
        low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
        codes = int_encode(np.clip(f32(block / s), low, high), bits)
        return codes, s, f32(int_decode(codes, bits) * s), 0.0

    return blockwise(x, g, one)


def affine(x, g):
    """MSLK: s = max(max - min, 1e-6)/15, z = min + 8s, q = clamp(round((x - min)/s), 0, 15) - 8."""

    def one(block):
        low, high = np.min(block), np.max(block)
        if not np.isfinite(block).all():
            return np.zeros(len(block), np.int64), math.nan, np.full(len(block), math.nan), math.nan
        span = min(float(f32(high - low)), LARGEST)
        s = f32(max(span, float(np.float32(1e-6))) / 15)
        z = f32(low + f32(8 * s))
        with np.errstate(over="ignore"):
            codes = int_encode(np.clip(np.rint(f32(f32(block - low) / s)), 0, 15) - 8, 4)
        return codes, s, f32(f32(int_decode(codes, 4) * s) + z), z

    return blockwise(x, g, one)


def mxfp4(x, rule, g=32):
    def one(block):
        byte = mx_byte(float(np.max(np.abs(block))), rule)
        s = e8m0_decode(byte)
        codes = E2M1.encode(f32(block / s))
        return codes, byte, f32(E2M1.decode(codes) * s), 0.0

    return blockwise(x, g, one)


def nvfp4(x, g=16, outer=None):
    """outer = amax/2688 (= 6·448), block scale = e4m3((amax/6)/outer), at least 2^-9; w = q·(block·outer)."""
    x = np.asarray(x, np.float64)
    if outer is None:
        outer = float(floored(f32(np.max(np.abs(x)) / 2688 if np.isfinite(x).all() else math.nan)))

    def one(block):
        ideal = f32(f32(np.max(np.abs(block)) / 6) / outer)
        byte = int(E4M3.encode(np.maximum(ideal, 2.0**-9)))
        s = f32(E4M3.decode(byte) * outer)
        codes = E2M1.encode(f32(block / s))
        return codes, byte, f32(E2M1.decode(codes) * s), 0.0

    out = blockwise(x, g, one)
    out.outer = outer
    return out
