"""An independent oracle in float64 NumPy, written from the formats' specifications; no code is fq's.

Numbers are float64 arrays that hold float32 values; `f32` is the one rounding that float32 arithmetic does
(a float64 division, product or sum of float32 numbers, rounded to float32, is the IEEE float32 result).
Codes are plain unsigned integers, one per element; integers below zero are two's complement. This file has
elements, packing and scale bytes; `oracle_formats` quantizes matrices with them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

LARGEST = float(np.finfo(np.float32).max)


def f32(x):
    with np.errstate(over="ignore"):
        return np.asarray(x, np.float64).astype(np.float32).astype(np.float64)


# --- elements: `encode` a number, `decode` a code, `values` of all codes ---


@dataclass(frozen=True)
class FloatFormat:
    """`special`: "finite" none, "fn" all ones is NaN, "ieee" the top exponent, "fnuz" minus zero is NaN."""

    exponent: int
    mantissa: int
    special: str = "finite"
    signed: bool = True
    own_bias: int | None = None

    @property
    def bits(self):
        return self.signed + self.exponent + self.mantissa

    @property
    def bias(self):
        usual = 2 ** (self.exponent - 1) - 1 + (self.special == "fnuz")
        return usual if self.own_bias is None else self.own_bias

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

    @cached_property
    def values(self):
        return np.array([self.value(code) for code in range(2**self.bits)])

    def decode(self, codes):
        return self.values[np.asarray(codes, np.int64)]

    @cached_property
    def magnitudes(self):
        """The finite numbers from zero up; their index is their code."""
        values = self.values[: 2 ** (self.exponent + self.mantissa)]
        return values[np.isfinite(values)]

    @cached_property
    def middles(self):
        return (self.magnitudes[1:] + self.magnitudes[:-1]) / 2

    @property
    def largest(self):
        return float(self.magnitudes[-1])

    @property
    def smallest(self):
        return float(self.magnitudes[1])

    @property
    def nan(self):
        if self.special == "finite":
            return len(self.magnitudes) - 1
        return 2 ** (self.bits - 1) if self.special == "fnuz" else 2 ** (self.exponent + self.mantissa) - 1

    def encode(self, x):
        """To the nearest, ties to the even code; saturates; NaN as `nan` says."""
        x = np.asarray(x, np.float64)
        size = np.abs(x) if self.signed else np.maximum(x, 0)
        code = np.searchsorted(self.middles, size, side="left")
        tie = np.append(self.middles, np.nan)[code] == size
        code = code + (tie & (code % 2 == 1))
        sign = np.signbit(x) & self.signed & ~((self.special == "fnuz") & (code == 0))
        code = code + sign * 2 ** (self.exponent + self.mantissa)
        return np.where(np.isnan(x), self.nan, code)


def int_encode(x, bits, signed=True):
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    rounded = np.where(np.isnan(x), 0, np.clip(np.rint(np.nan_to_num(x, nan=0.0)), low, high))
    return rounded.astype(np.int64) % 2**bits


def int_decode(codes, bits, signed=True):
    codes = np.asarray(codes, np.int64)
    return (np.where(codes >= 2 ** (bits - 1), codes - 2**bits, codes) if signed else codes).astype(
        np.float64
    )


@dataclass(frozen=True)
class IntFormat:
    """Two's complement, or plain binary where not signed; halves round to even, NaN is 0."""

    bits: int
    signed: bool = True
    nan = 0
    smallest = 1.0

    @property
    def lowest(self):
        return -(2 ** (self.bits - 1)) if self.signed else 0

    @property
    def largest(self):
        return self.lowest + 2**self.bits - 1

    @property
    def values(self):
        return self.decode(np.arange(2**self.bits))

    def encode(self, x):
        return int_encode(x, self.bits, self.signed)

    def decode(self, codes):
        return int_decode(codes, self.bits, self.signed)


@dataclass(frozen=True)
class TableFormat:
    """The index of the nearest number of an ascending table, ties to the lower; NaN is 0."""

    table: tuple[float, ...]
    nan = 0

    @property
    def bits(self):
        return math.ceil(math.log2(len(self.table)))

    @property
    def largest(self):
        return max(abs(v) for v in self.table)

    @property
    def values(self):
        return np.array(self.table)

    def encode(self, x):
        middles = (self.values[1:] + self.values[:-1]) / 2
        return np.where(np.isnan(x), 0, np.searchsorted(middles, np.nan_to_num(x, nan=0.0), side="left"))

    def decode(self, codes):
        return self.values[np.asarray(codes, np.int64)]


# bitsandbytes' table, from QLoRA's appendix E
NF4_TABLE = """-1.0 -0.6961928009986877 -0.5250730514526367 -0.39491748809814453 -0.28444138169288635
-0.18477343022823334 -0.09105003625154495 0.0 0.07958029955625534 0.16093020141124725 0.24611230194568634
0.33791524171829224 0.44070982933044434 0.5626170039176941 0.7229568362236023 1.0"""

E2M1, E3M2, E2M3 = FloatFormat(2, 1), FloatFormat(3, 2), FloatFormat(2, 3)
E4M3, E5M2 = FloatFormat(4, 3, "fn"), FloatFormat(5, 2, "ieee")
NF4, BINARY = TableFormat(tuple(float(v) for v in NF4_TABLE.split())), TableFormat((-1.0, 1.0))
FLOATS = {
    "e2m1": E2M1,
    "e3m0": FloatFormat(3, 0),
    "e2m3": E2M3,
    "e3m2": E3M2,
    "e4m3": E4M3,
    "e5m2": E5M2,
    "e3m4": FloatFormat(3, 4, "fn"),
    "ue4m3": FloatFormat(4, 3, "fn", signed=False),
    "ue5m3": FloatFormat(5, 3, "fn", signed=False),
    "e4m3fnuz": FloatFormat(4, 3, "fnuz"),
    "e5m2fnuz": FloatFormat(5, 2, "fnuz"),
    "e4m3fnuzb11": FloatFormat(4, 3, "fnuz", own_bias=11),
    "e4m3ieee": FloatFormat(4, 3, "ieee"),
    "e3m4ieee": FloatFormat(3, 4, "ieee"),
}
INTS = {f"{'' if s else 'u'}int{b}": IntFormat(b, s) for s in (True, False) for b in range(1, 9)}
ELEMENTS = {**INTS, **FLOATS, "nf4": NF4, "binary": BINARY}
HALVES = {"float16": FloatFormat(5, 10, "ieee"), "bfloat16": FloatFormat(8, 7, "ieee")}


def pack(codes, bits):
    """One row of codes as a little-endian bit stream."""
    stream = sum(int(c) % 2**bits << (i * bits) for i, c in enumerate(codes))
    return list(stream.to_bytes((len(codes) * bits + 7) // 8, "little"))


# --- scales ---


def e8m0_decode(byte):
    return math.nan if byte == 255 else 2.0 ** (byte - 127)


def e8m0_encode(x):
    """The byte of the next power of two, up; it has neither sign nor zero, and saturates."""
    fraction, exponent = np.frexp(np.abs(np.where(np.isfinite(x), x, 0.0)))
    byte = np.clip(exponent - (fraction == 0.5) + 127, 0, 254)
    byte = np.where(fraction == 0, 0, byte)
    return np.where(np.isnan(x), 255, np.where(np.isinf(x), 254, byte))


def mx_byte(amax, rule, element=E2M1):
    """The e8m0 byte of a block, from OCP MX v1.0 §6.3 (floor) and torchao's other modes."""
    if not math.isfinite(amax):
        return 255
    if amax == 0:
        return 0
    emax = math.floor(math.log2(element.largest))
    if rule == "rceil":
        amax = float(f32(amax * f32(1 / element.largest)))
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
        bits = int(np.float32(amax).view(np.uint32)) + 2 ** (23 - element.mantissa - 1)
        e = (bits >> 23) - 127 - emax
    return min(max(e + 127, 0), 254)


FLOORS = {"float32": 2.0**-126, "bfloat16": 2.0**-126, "float16": 2.0**-24, "e4m3": 2.0**-9}


def bounded(x, smallest, largest):
    """Magnitudes within [smallest, largest]; sign and NaN as they are."""
    x = np.where(np.abs(x) < smallest, np.copysign(smallest, x), x)
    return np.clip(x, -largest, largest)


def store(x, name):
    """Scales as a dtype holds them: bytes of e8m0, else numbers; what underflows becomes the smallest."""
    if name == "e8m0":
        return e8m0_encode(x)
    kind = {**HALVES, "e4m3": E4M3}.get(name)
    x = bounded(x, FLOORS[name], LARGEST if kind is None else kind.largest)
    return f32(x) if kind is None else kind.decode(kind.encode(x))


def load(kept, name):
    if name != "e8m0":
        return kept
    return np.array([e8m0_decode(byte) for byte in range(256)])[np.asarray(kept, np.int64)]
