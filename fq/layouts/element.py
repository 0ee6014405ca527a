"""Number formats of single elements: two pure functions each, `encode(float32) -> codes` and `decode`."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor


def round_to_grid(x: Tensor, noise: Tensor | None = None) -> Tensor:
    """Round to the nearest integer, ties to even; with uniform `noise` in [0, 1) stochastically."""
    if noise is None:
        return torch.round(x)
    low = torch.floor(x)
    return low + (noise < x - low).to(x.dtype)  # x + noise would round, and move grid points


def power_of_two(exponent: Tensor) -> Tensor:
    """Return 2**exponent exactly, in float32, for int32 exponents -126..127."""
    return ((exponent + 127) << 23).view(torch.float32)


@dataclass(frozen=True)
class Int:
    """A two's complement integer of 1 to 8 bits."""

    bits: int
    signed: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_bits(type(self).__name__, self.bits)

    @property
    def name(self) -> str:
        return f"int{self.bits}"

    @property
    def min(self) -> float:
        return -float(1 << (self.bits - 1))

    @property
    def max(self) -> float:
        return float((1 << (self.bits - 1)) - 1)

    smallest: ClassVar[float] = 1.0

    @property
    def storage_dtype(self) -> torch.dtype:
        return torch.int8 if self.bits == 8 else torch.uint8

    def encode(self, x: Tensor, noise: Tensor | None = None, shift: float = 0.0) -> Tensor:
        """Round, add `shift`, saturate; NaN becomes 0. Codes are int8, one per element."""
        codes = torch.clamp(round_to_grid(x, noise) + shift, self.min, self.max)
        return torch.where(torch.isnan(codes), 0.0, codes).to(torch.int8)

    def decode(self, codes: Tensor) -> Tensor:
        if self.bits < 8:  # unpacked bits carry no sign
            half = 1 << (self.bits - 1)
            codes = ((codes & ((1 << self.bits) - 1)) ^ half).to(torch.int8) - half
        return codes.to(torch.float32)


@dataclass(frozen=True)
class UInt:
    """A plain unsigned integer of 1 to 8 bits."""

    bits: int
    signed: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _check_bits(type(self).__name__, self.bits)

    @property
    def name(self) -> str:
        return f"uint{self.bits}"

    min: ClassVar[float] = 0.0

    @property
    def max(self) -> float:
        return float((1 << self.bits) - 1)

    smallest: ClassVar[float] = 1.0
    storage_dtype: ClassVar[torch.dtype] = torch.uint8

    def encode(self, x: Tensor, noise: Tensor | None = None, shift: float = 0.0) -> Tensor:
        """Round, add `shift`, saturate; NaN becomes 0. Codes are uint8, one per element."""
        codes = torch.clamp(round_to_grid(x, noise) + shift, 0.0, self.max)
        return torch.where(torch.isnan(codes), 0.0, codes).to(torch.uint8)

    def decode(self, codes: Tensor) -> Tensor:
        return (codes & ((1 << self.bits) - 1)).to(torch.float32)


@dataclass(frozen=True)
class Float:
    """A small IEEE-like float: `[sign | exponent | mantissa]`, subnormals included.

    `special` says what the highest codes mean: "finite" (numbers, OCP FP4 and FP6), "fn" (the code of
    all ones is NaN, e4m3), "ieee" (the highest exponent is inf and NaN, e5m2), "fnuz" (minus zero is NaN).
    """

    exponent: int
    mantissa: int
    signed: bool = True
    bias: int | None = None
    special: str | None = None

    def __post_init__(self) -> None:
        bits = self.signed + self.exponent + self.mantissa
        if not (self.exponent >= 1 and self.mantissa >= 0 and 2 <= bits <= 8):
            raise ValueError(
                f"Float: expected 2 to 8 bits, got exponent={self.exponent}, mantissa={self.mantissa}"
            )
        if self.special is None:
            default = "finite" if bits < 7 else ("ieee" if (self.exponent, self.mantissa) == (5, 2) else "fn")
            object.__setattr__(self, "special", default)
        if self.special not in ("finite", "fn", "ieee", "fnuz"):
            raise ValueError(f"Float: special must be finite, fn, ieee or fnuz, got {self.special!r}")
        if self.bias is None:
            bias = (1 << (self.exponent - 1)) - 1 + (self.special == "fnuz")
            object.__setattr__(self, "bias", bias)
        if 1 - self._bias - self.mantissa < -126 or (self.largest_code >> self.mantissa) - self._bias > 127:
            raise ValueError(f"Float: with bias={self.bias} its numbers reach beyond float32's normal ones")
        if self.largest_code <= 0:
            raise ValueError(f"Float: {self.bits} bits have no positive number beside {self.special!r} codes")

    @property
    def _bias(self) -> int:
        assert self.bias is not None
        return self.bias

    @cached_property
    def name(self) -> str:
        plain = Float(self.exponent, self.mantissa, self.signed)
        text = f"{'' if self.signed else 'u'}e{self.exponent}m{self.mantissa}"
        if self.special != plain.special:
            text += str(self.special)
        if self.bias != Float(self.exponent, self.mantissa, self.signed, None, self.special).bias:
            text += f"b{self.bias}"
        return text

    @property
    def bits(self) -> int:
        return self.signed + self.exponent + self.mantissa

    @property
    def largest_code(self) -> int:
        """The magnitude bits of the largest finite number."""
        top = (1 << (self.exponent + self.mantissa)) - 1
        if self.special == "ieee":
            return top - (1 << self.mantissa)
        return top - 1 if self.special == "fn" else top

    @property
    def nan_code(self) -> int:
        """The code that NaN is encoded as: NaN where the format has one, else its largest number."""
        if self.special == "finite":
            return self.largest_code
        return 1 << (self.bits - 1) if self.special == "fnuz" else (1 << (self.exponent + self.mantissa)) - 1

    @cached_property
    def max(self) -> float:
        exponent, mantissa = divmod(self.largest_code, 1 << self.mantissa)
        if exponent == 0:
            return mantissa * self.smallest
        return math.ldexp(mantissa + (1 << self.mantissa), exponent - self._bias - self.mantissa)

    @property
    def min(self) -> float:
        return -self.max if self.signed else 0.0

    @cached_property
    def max_exponent(self) -> int:
        """floor(log2(max)), the OCP `emax`."""
        return math.frexp(self.max)[1] - 1

    @property
    def smallest(self) -> float:
        """The smallest positive number, subnormal where there is a mantissa."""
        return math.ldexp(1.0, 1 - self._bias - self.mantissa)

    @property
    def smallest_normal(self) -> float:
        """The smallest positive number with the full mantissa."""
        return math.ldexp(1.0, 1 - self._bias)

    @property
    def eps(self) -> float:
        """The distance from 1.0 to the next larger number."""
        return max(math.ldexp(1.0, -self.mantissa), self.smallest)  # one may be subnormal

    @property
    def has_nan(self) -> bool:
        return self.special != "finite"

    @property
    def has_inf(self) -> bool:
        return self.special == "ieee"

    @property
    def bit_pattern(self) -> str:
        """Sign, exponent and mantissa bits from the highest, as `SEEEEMMM`."""
        return "S" * self.signed + "E" * self.exponent + "M" * self.mantissa

    @cached_property
    def native(self) -> torch.dtype | None:
        """The torch dtype with exactly this encoding, if there is one."""
        return {
            "e4m3": torch.float8_e4m3fn,
            "e5m2": torch.float8_e5m2,
            "e4m3fnuz": torch.float8_e4m3fnuz,
            "e5m2fnuz": torch.float8_e5m2fnuz,
        }.get(self.name)

    @property
    def storage_dtype(self) -> torch.dtype:
        return self.native or torch.uint8

    def encode(self, x: Tensor, noise: Tensor | None = None) -> Tensor:
        """Round once to the nearest number, ties to even, and saturate; infinities saturate too."""
        if self.native is not None and noise is None:
            x = torch.where(torch.isnan(x), torch.nan, torch.clamp(x, self.min, self.max))
            return x.to(self.native)
        magnitude = torch.clamp(x.abs() if self.signed else x, 0.0, self.max)
        lowest = 1 - self._bias
        exponent = torch.clamp((magnitude.view(torch.int32) >> 23) - 127, min=lowest)
        steps = magnitude / power_of_two(exponent - self.mantissa)
        if self.mantissa:
            steps = round_to_grid(steps, noise)
        else:  # a tie's even neighbour is told by the exponent
            odd = (exponent - lowest) & 1
            steps = round_to_grid(steps - odd, noise) + odd
        # Linear in the code within a binade, and a carry into the next binade is the next code.
        codes = ((exponent - lowest) << self.mantissa) + steps.nan_to_num(0.0).to(torch.int32)
        codes = torch.clamp(codes, max=self.largest_code)
        if self.signed:
            sign = torch.signbit(x).to(torch.int32) << (self.bits - 1)
            codes = codes | (sign if self.special != "fnuz" else torch.where(codes == 0, 0, sign))
        codes = torch.where(torch.isnan(x), self.nan_code, codes).to(torch.uint8)
        return codes if self.native is None else codes.view(self.native)

    def decode(self, codes: Tensor) -> Tensor:
        if self.native is not None:
            return codes.to(torch.float32)
        codes = codes.to(torch.int32) & ((1 << self.bits) - 1)
        magnitude = codes & ((1 << (self.exponent + self.mantissa)) - 1)
        exponent = magnitude >> self.mantissa
        significand = (magnitude & ((1 << self.mantissa) - 1)) + (
            (exponent > 0).to(torch.int32) << self.mantissa
        )
        step = power_of_two(torch.clamp(exponent, min=1) - (self._bias + self.mantissa))
        value = significand.to(torch.float32) * step
        if self.signed:
            value = torch.where(codes > magnitude, -value, value)
        if self.special == "ieee":
            value = torch.where(magnitude == self.largest_code + 1, value.sign() * torch.inf, value)
            value = torch.where(magnitude > self.largest_code + 1, torch.nan, value)
        elif self.special == "fn":
            value = torch.where(magnitude > self.largest_code, torch.nan, value)
        elif self.special == "fnuz":
            value = torch.where(codes == self.nan_code, torch.nan, value)
        return value


@dataclass(frozen=True)
class Codebook:
    """A table of numbers in ascending order; an element is the index of the nearest, ties to the lower."""

    values: tuple[float, ...]
    label: str = ""

    def __post_init__(self) -> None:
        ascending = all(low < high for low, high in pairwise(self.values))
        if not (2 <= len(self.values) <= 256 and ascending and all(map(math.isfinite, self.values))):
            raise ValueError(f"Codebook: expected 2 to 256 ascending values, got {self.values!r}")
        if any(v and not 2.0**-100 <= abs(v) <= 2.0**100 for v in self.values):
            raise ValueError(f"Codebook: expected magnitudes of 2**-100 to 2**100, got {self.values!r}")

    @property
    def name(self) -> str:
        return self.label or f"lut({','.join(repr(float(v)) for v in self.values)})"

    @property
    def bits(self) -> int:
        return (len(self.values) - 1).bit_length()

    @property
    def signed(self) -> bool:
        return self.values[0] < 0

    @property
    def has_zero(self) -> bool:
        return 0.0 in self.values

    @property
    def min(self) -> float:
        return self.values[0]

    @property
    def max(self) -> float:
        return max(abs(v) for v in self.values)

    @property
    def smallest(self) -> float:
        return min(abs(v) for v in self.values if v)

    storage_dtype: ClassVar[torch.dtype] = torch.uint8

    def encode(self, x: Tensor, noise: Tensor | None = None) -> Tensor:
        """Count the midpoints below x, one comparison at a time; NaN becomes 0."""
        codes = torch.zeros_like(x, dtype=torch.uint8)
        for low, high in pairwise(self.values):
            middle = _float32_below((low + high) / 2)
            above = x > middle if noise is None else (x - low) / (high - low) > noise
            codes = codes + above.to(torch.uint8)
        return codes

    def decode(self, codes: Tensor) -> Tensor:
        table = torch.tensor(self.values, dtype=torch.float32, device=codes.device)
        return table[torch.clamp(codes.to(torch.int64), max=len(self.values) - 1)]


def _float32_below(value: float) -> float:
    """Return the largest float32 number not above `value`: float32 numbers compare alike with both."""
    fraction, exponent = math.frexp(value)
    return math.ldexp(math.floor(math.ldexp(fraction, 24)), exponent - 24)


Element = Int | UInt | Float | Codebook

NF4 = Codebook(
    (
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ),
    "nf4",
)
BINARY = Codebook((-1.0, 1.0), "binary")
E2M1, E4M3, E5M2 = Float(2, 1), Float(4, 3), Float(5, 2)
_NUMBER = r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?"


def element(name: str) -> Element:
    """Return the element of a name: int1..8, uint1..8, e2m1, ue4m3, e4m3fnuz, nf4, binary, lut(...)."""
    if not isinstance(name, str):
        raise TypeError(f"element: expected a name such as 'int8', got {name!r}")
    if match := re.fullmatch(r"(u?)int([1-8])", name):
        return (UInt if match[1] else Int)(int(match[2]))
    if match := re.fullmatch(r"(u?)e([0-9])m([0-9])(finite|fnuz|fn|ieee)?(?:b(-?[0-9]{1,4}))?", name):
        bias = int(match[5]) if match[5] else None
        return Float(int(match[2]), int(match[3]), not match[1], bias, match[4])
    if name in ("nf4", "binary"):
        return NF4 if name == "nf4" else BINARY
    if match := re.fullmatch(rf"lut\(((?:{_NUMBER}(?:,{_NUMBER})*)?)\)", name):
        return Codebook(tuple(float(v) for v in match[1].split(",") if v))
    raise ValueError(
        f"element: unknown name {name!r}; known are int1..8, uint1..8, eXmY, ueXmY, nf4, binary, lut(...)"
    )


def _check_bits(kind: str, bits: int) -> None:
    if isinstance(bits, bool) or not isinstance(bits, int):
        raise TypeError(f"{kind}: bits must be an int, got {bits!r}")
    if not 1 <= bits <= 8:
        raise ValueError(f"{kind}: bits must be 1 to 8, got {bits}")
