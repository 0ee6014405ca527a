"""Presets: a number format is one function here, over elements, blocks and scales."""

from __future__ import annotations

from typing import Any

from fq.dynamo import constant
from fq.layouts.element import E2M1, E4M3, Int
from fq.layouts.layout import Layout as Layout
from fq.layouts.layout import check_size
from fq.layouts.layout import layout as layout
from fq.layouts.scale import E8M0

Scale = Any  # a torch.dtype, "e8m0", or a Layout


@constant
def int8(
    block: tuple[int, int] = (1, -1),
    *,
    rule: str = "absmax",
    scale: Scale = "float32",
    act: Layout | None = None,
    axis: int = -1,
) -> Layout:
    """Describe symmetric int8, by default one scale per row: `s = amax/127.5`, `q = clamp(round(x/s))`.

    `rule="absmax_narrow"` divides amax by 127, `"absmax_full"` makes the extreme element exact with a
    signed scale extreme/-128. `act=fq.int8()` gives W8A8. Conventions: compressed-tensors.

    Raises:
        ValueError: a block size is neither -1 nor at least 1, or the rule does not fit.
        TypeError: a block size is no int.

    Example:
        >>> import fq, torch
        >>> fq.quantize(torch.tensor([[-127.5, 64.0]]), fq.int8()).data
        tensor([[-128,   64]], dtype=torch.int8)
    """
    return Layout(Int(8), block, scale, axis=axis, act=act, rule=rule)


@constant
def int4(
    group_size: int = 128,
    *,
    symmetric: bool = False,
    scale: Scale = "float32",
    act: Layout | None = None,
    axis: int = -1,
) -> Layout:
    """Describe int4 in groups along the packed axis, with a float zero point or symmetric.

    `s = max(max - min, 1e-6)/15`, `z = min + 8·s`, `q = clamp(round((x - min)/s), 0, 15) - 8`,
    `w = q·s + z` (MSLK/FBGEMM `int4_row_quantize_zp`); symmetric: `s = amax/7.5` (compressed-tensors).

    Raises:
        ValueError: the group size is neither -1 (a whole row) nor at least 1.
        TypeError: the group size is no int.

    Example:
        >>> import fq, torch
        >>> q = fq.quantize(torch.arange(16.0).reshape(1, 16), fq.int4())
        >>> q.scale.item(), q.zero_point.item()
        (1.0, 8.0)
    """
    block = (1, check_size("group_size", group_size))
    return Layout(Int(4), block, scale, None if symmetric else "float", axis, act=act)


@constant
def mxfp4(rule: str = "even", *, scale: Scale = E8M0, act: Layout | None = None, axis: int = -1) -> Layout:
    """Describe OCP MXFP4: e2m1 elements, blocks of 32, e8m0 scales.

    Rules for the shared exponent: `floor` (OCP MX v1.0 §6.3), `ceil`, `rceil` (round amax/6 up to a power
    of two, as sm_100 does) and `even` (amax rounded to the element's precision first).

    Raises:
        ValueError: the rule is unknown.

    Example:
        >>> import fq, torch
        >>> fq.quantize(torch.full((1, 32), 6.0), fq.mxfp4()).scale
        tensor([[127]], dtype=torch.uint8)
    """
    return Layout(E2M1, (1, 32), scale, axis=axis, act=act, rule=rule)


@constant
def nvfp4(rule: str = "absmax", *, scale: Scale = None, act: Layout | None = None, axis: int = -1) -> Layout:
    """Describe NVFP4: e2m1 elements, blocks of 16, e4m3 scales under one float32 scale per matrix.

    `outer = amax/2688`, `block = e4m3((block amax/6)/outer)`, `w = q·(block·outer)`. It is a nested
    layout: the scales are quantized by `fq.layout("fp8:tensor")`.

    Raises:
        ValueError: the rule is unknown.

    Example:
        >>> import fq, torch
        >>> q = fq.quantize(torch.full((1, 16), 3.0), fq.nvfp4())
        >>> q.scale.data.dtype, fq.dequantize(q)[0, 0].item()
        (torch.float8_e4m3fn, 3.0)
    """
    return Layout(
        E2M1, (1, 16), Layout(E4M3, (-1, -1)) if scale is None else scale, axis=axis, act=act, rule=rule
    )
