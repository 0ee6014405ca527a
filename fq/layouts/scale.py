"""Scales: how a block's scale is chosen (rules) and how it is kept (dtypes).

A linear rule gives a block statistic and a constant divisor, `scale = statistic / divisor`, so that a
nested scale can fold its own divisor into the same single division. An MX rule gives an e8m0 byte.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fq.layouts.element import BINARY, E2M1, E4M3, Codebook, Element, Float, Int, UInt, power_of_two

E8M0 = "e8m0"  # kept as uint8 bytes: Inductor's CPU code generator does not know float8_e8m0fnu
ScaleDtype = torch.dtype | str

_NAMES: dict[str, ScaleDtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "e4m3": torch.float8_e4m3fn,
    E8M0: E8M0,
}
# The smallest scale of each dtype by which dividing is safe; DESIGN's floor for an underflow.
_FLOORS: dict[ScaleDtype, float] = {
    torch.float32: 2.0**-126,
    torch.bfloat16: 2.0**-126,
    torch.float16: 2.0**-24,
    torch.float8_e4m3fn: 2.0**-9,
}

_DROPPED = {torch.bfloat16: 16, torch.float16: 13}  # mantissa bits that float32 has more


def dtype_name(dtype: ScaleDtype) -> str:
    """Return the name under which a scale dtype stands in a layout's text."""
    for name, value in _NAMES.items():
        if value == dtype:
            return name
    raise ValueError(f"scale: expected one of {', '.join(_NAMES)}, got {dtype}")


def dtype_of(name: str | torch.dtype) -> ScaleDtype:
    """Return the scale dtype that `name` spells; torch dtypes pass through, float8_e8m0fnu is "e8m0"."""
    if name == torch.float8_e8m0fnu:
        return E8M0
    if isinstance(name, torch.dtype):
        return _NAMES[dtype_name(name)]
    if not isinstance(name, str):
        raise TypeError(f"scale: expected a dtype, its name or a Layout, got {name!r}")
    if name not in _NAMES:
        raise ValueError(f"scale: expected one of {', '.join(_NAMES)} or a Layout, got {name!r}")
    return _NAMES[name]


def least(kind: Any) -> float:
    """Return the smallest number that a kept scale can stand for, before float32 rounds it."""
    if _is_layout(kind):
        return kind.element.smallest * least(kind.scale)
    return 2.0**-127 if kind == E8M0 else _FLOORS[kind]


def stored_dtype(dtype: Any) -> torch.dtype:
    """Return the dtype of the tensor that holds scales of `dtype`."""
    return torch.uint8 if isinstance(dtype, str) else dtype


def floor_to(scale: Tensor, smallest: float, largest: float) -> Tensor:
    """Keep the magnitude of `scale` in [smallest, largest], sign and NaN as they are."""
    scale = torch.where(
        scale.abs() < smallest, torch.copysign(torch.full_like(scale, smallest), scale), scale
    )
    return torch.clamp(scale, -largest, largest)


def store(scale: Tensor, dtype: ScaleDtype) -> Tensor:
    """Round float32 scales to the dtype they are kept in; underflow is floored, overflow saturates."""
    if isinstance(dtype, str):
        largest = torch.finfo(torch.float32).max
        return _ceil_byte(torch.clamp(scale, -largest, largest))
    return narrow(floor_to(scale, _FLOORS[dtype], torch.finfo(dtype).max), dtype)


def narrow(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round float32 numbers within the range of `dtype` to it; NaN becomes the one NaN.

    To half precision by their bits: Inductor skips a cast that is followed by one back to float32, and
    codes are computed against what is stored.
    """
    rounded = x
    if dtype in _DROPPED:
        bits, dropped = x.view(torch.int32), _DROPPED[dtype]
        half = (1 << (dropped - 1)) - 1 + ((bits >> dropped) & 1)
        rounded = ((bits + half) & -(1 << dropped)).view(torch.float32)
        if dtype == torch.float16:  # its subnormal numbers are evenly spaced
            rounded = torch.where(x.abs() < 2.0**-14, torch.round(x * 2.0**24) * 2.0**-24, rounded)
    return torch.where(torch.isnan(x), torch.nan, rounded).to(dtype)


def load(scale: Tensor, dtype: ScaleDtype) -> Tensor:
    """Return kept scales as float32, exactly."""
    if not isinstance(dtype, str):
        return scale.to(torch.float32)
    byte = scale.to(torch.int32)
    value = power_of_two(torch.clamp(byte, 1, 254) - 127)
    value = torch.where(byte == 0, 2.0**-127, value)
    return torch.where(byte == 255, torch.nan, value)


# --- rules ---


def absmax_divisor(element: Element) -> float:
    """Return what amax is divided by, so that amax reaches the end of the code range."""
    if isinstance(element, Int):
        return ((1 << element.bits) - 1) / 2
    return element.max


def _absmax(low: Tensor, high: Tensor, element: Element) -> tuple[Tensor, float]:
    return torch.maximum(-low, high), absmax_divisor(element)


def _absmax_narrow(low: Tensor, high: Tensor, element: Element) -> tuple[Tensor, float]:
    return torch.maximum(-low, high), element.max


def _absmax_full(low: Tensor, high: Tensor, element: Element) -> tuple[Tensor, float]:
    return torch.where(high >= -low, high, low), element.min if element.signed else element.max


def _absmean(low: Tensor, high: Tensor, element: Element) -> tuple[Tensor, float]:
    return high, 1.0  # `high` is the mean: see numerics


def _minmax(low: Tensor, high: Tensor, element: Element) -> tuple[Tensor, float]:
    return high - low, element.max - element.min


LINEAR_RULES: dict[str, Callable[[Tensor, Tensor, Element], tuple[Tensor, float]]] = {
    "absmax": _absmax,
    "absmax_narrow": _absmax_narrow,
    "absmax_full": _absmax_full,
    "minmax": _minmax,
    "absmean": _absmean,
}


def _byte(exponent: Tensor, amax: Tensor) -> Tensor:
    byte = torch.clamp(exponent + 127, 0, 254)
    return torch.where(torch.isfinite(amax), byte, 255).to(torch.uint8)


def _ceil_byte(scale: Tensor) -> Tensor:
    """Round up to a power of two: the block's largest element then never saturates."""
    mantissa, exponent = torch.frexp(scale.abs())
    return _byte(torch.where(scale == 0, -127, exponent - (mantissa == 0.5).to(torch.int32)), scale)


def _mx_floor(amax: Tensor, element: Float) -> Tensor:
    return _byte(torch.where(amax == 0, -127, torch.frexp(amax)[1] - 1 - element.max_exponent), amax)


def _mx_ceil(amax: Tensor, element: Float) -> Tensor:
    mantissa, exponent = torch.frexp(amax)
    up = exponent - (mantissa == 0.5).to(torch.int32)
    return _byte(torch.where(amax == 0, -127, up - element.max_exponent), amax)


def _mx_even(amax: Tensor, element: Float) -> Tensor:
    mantissa, exponent = torch.frexp(amax)
    carry = (mantissa >= 1 - 2.0 ** -(element.mantissa + 2)).to(torch.int32)
    return _byte(torch.where(amax == 0, -127, exponent - 1 + carry - element.max_exponent), amax)


def _mx_rceil(amax: Tensor, element: Float) -> Tensor:
    reciprocal = float(torch.tensor(1.0 / element.max, dtype=torch.float32))
    byte = _ceil_byte(amax * reciprocal)
    return torch.where(torch.isfinite(amax), byte, 255).to(torch.uint8)


MX_RULES: dict[str, Callable[[Tensor, Float], Tensor]] = {
    "floor": _mx_floor,
    "ceil": _mx_ceil,
    "rceil": _mx_rceil,
    "even": _mx_even,
}
# Rules that try several scales per block and keep the one with the least squared error.
SEARCH_RULES = ("mse", "four_over_six")
RULES = (*LINEAR_RULES, *MX_RULES, *SEARCH_RULES)


def search_factors(rule: str, scale: object) -> tuple[float, ...]:
    """Return the parts of the default rule's range that a search tries, the whole one first."""
    if rule == "four_over_six":
        return 1.0, 1.5  # the largest element becomes 6 or 4
    return (1.0, 0.5) if scale == E8M0 else tuple(1 - i / 25 for i in range(16))


def default_rule(element: Element, scale: object, zero_point: object) -> str:
    """Return the rule that a layout has when none is named."""
    if zero_point is not None:
        return "minmax"
    if element == BINARY:
        return "absmean"
    if scale == E8M0 and isinstance(element, Float):
        return "even" if element.bits == 4 else "rceil"
    return "absmax"


def check_rule(rule: str, element: Element, scale: Any, zero_point: Any) -> None:
    """Raise unless `rule` can choose a scale for this element, scale and zero point."""
    if rule not in RULES:
        raise ValueError(f"Layout: unknown rule {rule!r}; known are {', '.join(RULES)}")
    if rule in MX_RULES and not (scale == E8M0 and isinstance(element, Float)):
        raise ValueError(f"Layout: rule {rule!r} chooses e8m0 scales of float elements, got {element.name}")
    if zero_point is not None and rule not in ("minmax", "mse"):
        raise ValueError(f"Layout: with a zero point the rule is 'minmax' or 'mse', got {rule!r}")
    if rule == "minmax" and zero_point is None:
        raise ValueError("Layout: rule 'minmax' needs a zero point")
    if rule == "absmax_narrow" and not isinstance(element, Int):
        raise ValueError(f"Layout: rule {rule!r} is for signed integers, got {element.name}")
    if rule == "absmax_full" and not isinstance(element, Int | UInt):
        raise ValueError(f"Layout: rule {rule!r} is for integers, got {element.name}")
    if zero_point is not None and not isinstance(element, Int | UInt):
        raise ValueError(f"Layout: a zero point goes with integer elements, got {element.name}")
    if rule == "absmax_narrow" and element.max == 0:
        raise ValueError("Layout: 'absmax_narrow' has no positive code at 1 bit")
    if (rule == "absmean") != (element == BINARY):
        raise ValueError(f"Layout: element 'binary' takes rule 'absmean', and it alone; got {rule!r}")
    if isinstance(element, Codebook) and not element.has_zero and (scale == E8M0 or _is_layout(scale)):
        raise ValueError(
            f"Layout: {element.name} has no zero, so a block of zeros needs a scale of zero, which e8m0 and "
            "quantized scales cannot be; use scale='float32'"
        )
    nested = getattr(scale, "element", None)
    if nested is not None and (nested.values[-1] if isinstance(nested, Codebook) else nested.max) <= 0:
        raise ValueError(f"Layout: scales are positive, and {nested.name} has no positive number")
    if nested is not None and rule == "absmax_full" and not nested.signed:
        raise ValueError(
            f"Layout: rule 'absmax_full' makes signed scales, which {nested.name} cannot hold; quantize "
            "them to a signed element, or use rule 'absmax'"
        )
    if rule == "four_over_six" and not (element == E2M1 and nested == E4M3):
        raise ValueError("Layout: rule 'four_over_six' is for e2m1 elements under quantized e4m3 scales")
    if rule in SEARCH_RULES and (_is_layout(zero_point) or _is_layout(getattr(scale, "scale", None))):
        raise ValueError(
            f"Layout: rule {rule!r} compares scales block by block; quantized zero points and scales of "
            "scales of scales depend on other blocks"
        )


def _is_layout(part: object) -> bool:
    """Whether a scale or zero point is described by a Layout, which this file stands below."""
    return not (part is None or isinstance(part, str | torch.dtype))
