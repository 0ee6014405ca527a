"""Presets: a number format is one function here, over elements, blocks and scales."""

from __future__ import annotations

from typing import Any

from fq.dynamo import constant
from fq.layouts.element import BINARY, E2M1, E4M3, NF4, Float, Int, UInt
from fq.layouts.element import element as parse_element
from fq.layouts.layout import Layout as Layout
from fq.layouts.layout import check_flag, check_size
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
    affine = not check_flag("symmetric", symmetric)
    return Layout(Int(4), block, scale, "float" if affine else None, axis, act=act)


@constant
def uint4(
    group_size: int = 128, *, scale: Scale = "float32", act: Layout | None = None, axis: int = -1
) -> Layout:
    """Describe uint4 in groups with an integer zero point: the numbers of GPTQ and AWQ.

    `s = (max - min)/15` with 0 in the range, `z = round(-min/s)`, `q = clamp(round(x/s + z), 0, 15)`,
    `w = (q - z)·s`.

    Raises:
        ValueError: the group size is neither -1 (a whole row) nor at least 1.
        TypeError: the group size is no int.

    Example:
        >>> import fq, torch
        >>> q = fq.quantize(torch.arange(-4.0, 12.0).reshape(1, 16), fq.uint4())
        >>> q.scale.item(), q.zero_point.item(), fq.dequantize(q)[0, 0].item()
        (1.0, 4, -4.0)
    """
    return intx(4, group_size, symmetric=False, signed=False, scale=scale, act=act, axis=axis)


@constant
def intx(
    bits: int,
    group_size: int = 128,
    *,
    symmetric: bool = True,
    signed: bool = True,
    scale: Scale = "float32",
    act: Layout | None = None,
    axis: int = -1,
) -> Layout:
    """Describe integers of 1 to 8 bits in groups along the packed axis, packed densely.

    Symmetric: `s = amax/((2^b - 1)/2)` (unsigned: amax/(2^b - 1), for numbers that are never negative); one
    bit, symmetric and signed, is the codebook (-1, +1) with `s = mean|x|` (XNOR-Net). `symmetric=False`:
    `s = (max - min)/(2^b - 1)` with 0 in the range, `z = round(qmin - min/s)`, `w = (q - z)·s`.

    Raises:
        ValueError: bits are not 1 to 8, or the group size is neither -1 (a whole row) nor at least 1.
        TypeError: one of them is no int.

    Example:
        >>> import fq, torch
        >>> q = fq.quantize(torch.tensor([[-3.5, 0.9, 2.2, 3.0]]), fq.intx(3))
        >>> q.scale.item(), q.nbytes, fq.dequantize(q).tolist()
        (1.0, 6, [[-4.0, 1.0, 2.0, 3.0]])
    """
    element = (Int if check_flag("signed", signed) else UInt)(bits)
    block = (1, check_size("group_size", group_size))
    if check_flag("symmetric", symmetric) and bits == 1 and signed:
        return Layout(BINARY, block, scale, axis=axis, act=act)
    return Layout(element, block, scale, None if symmetric else "int", axis, act=act)


@constant
def fp8(
    block: tuple[int, int] = (1, -1),
    *,
    element: str = "e4m3",
    scale: Scale = "float32",
    act: Layout | None = None,
    axis: int = -1,
) -> Layout:
    """Describe 8-bit floats, by default one scale per row: `s = amax/448` (e5m2: amax/57344).

    `block=(-1, -1)` is one scale per tensor, `(1, 128)` groups, `(128, 128)` DeepSeek's blocks. `element`:
    "e4m3", "e5m2", or any other such as "e4m3fnuz" (OCP FP8; the fnuz kinds are of Graphcore and AMD).

    Raises:
        ValueError: the element is unknown or no float, or a block size is neither -1 nor at least 1.
        TypeError: a block size is no int.

    Example:
        >>> import fq, torch
        >>> fq.quantize(torch.tensor([[448.0, 1.06]]), fq.fp8()).data
        tensor([[448.,   1.]], dtype=torch.float8_e4m3fn)
    """
    return Layout(_float("fp8", element, 7, 8), block, scale, axis=axis, act=act)


def _float(what: str, name: str, *bits: int) -> Float:
    found = parse_element(name)
    if not (isinstance(found, Float) and found.bits in bits):
        raise ValueError(
            f"{what}: element must be a float of {' or '.join(map(str, bits))} bits, got {name!r}; "
            "fq.layout takes any, as in 'e2m1:g32:scale=e8m0'"
        )
    return found


@constant
def mxfp6(
    element: str = "e3m2",
    rule: str = "rceil",
    *,
    scale: Scale = E8M0,
    act: Layout | None = None,
    axis: int = -1,
) -> Layout:
    """Describe OCP MXFP6: e3m2 or e2m3 elements, really 6 bits each, blocks of 32, e8m0 scales.

    Rules: see `mxfp4`.

    Raises:
        ValueError: the element or the rule is unknown.

    Example:
        >>> import fq, torch
        >>> q = fq.quantize(torch.full((1, 32), 28.0), fq.mxfp6())
        >>> q.data.shape, q.scale.item()
        (torch.Size([1, 24]), 127)
    """
    return Layout(_float("mxfp6", element, 6), (1, 32), scale, axis=axis, act=act, rule=rule)


@constant
def mxfp8(
    element: str = "e4m3",
    rule: str = "rceil",
    *,
    scale: Scale = E8M0,
    act: Layout | None = None,
    axis: int = -1,
) -> Layout:
    """Describe OCP MXFP8: e4m3 or e5m2 elements, blocks of 32, e8m0 scales.

    Rules: see `mxfp4`; `floor` lets a block's largest element saturate, `rceil` does not.

    Raises:
        ValueError: the element or the rule is unknown.

    Example:
        >>> import fq, torch
        >>> x = torch.full((1, 32), 957.0)
        >>> [fq.dequantize(fq.quantize(x, fq.mxfp8(rule=r)))[0, 0].item() for r in ("floor", "rceil")]
        [896.0, 960.0]
    """
    return Layout(_float("mxfp8", element, 8), (1, 32), scale, axis=axis, act=act, rule=rule)


@constant
def nf4(
    group_size: int = 64,
    *,
    double_quant: bool = False,
    scale: Scale = "float32",
    act: Layout | None = None,
    axis: int = -1,
) -> Layout:
    """Describe NF4, 16 quantiles of the normal distribution: `s = amax`, the nearest value (QLoRA).

    `double_quant=True` keeps the scales as uint8, in groups of 256 along a row under float32 ones.

    Raises:
        ValueError: the group size is neither -1 (a whole row) nor at least 1, or both scale= and
            double_quant=True are given.
        TypeError: the group size is no int.

    Example:
        >>> import fq, torch
        >>> q = fq.quantize(torch.tensor([[-2.0, 0.0, 0.3, 2.0]]), fq.nf4())
        >>> fq.unpack_int4(q.data).tolist(), q.scale.item()
        ([[0, 7, -7, -1]], 2.0)
    """
    if check_flag("double_quant", double_quant):
        if scale != "float32":
            raise ValueError("nf4: double_quant=True has scales of its own; leave scale= out")
        scale = Layout(UInt(8), (1, 256))
    return Layout(NF4, (1, check_size("group_size", group_size)), scale, axis=axis, act=act)


@constant
def mxfp4(rule: str = "even", *, scale: Scale = E8M0, act: Layout | None = None, axis: int = -1) -> Layout:
    """Describe OCP MXFP4: e2m1 elements, blocks of 32, e8m0 scales.

    Rules for the shared exponent: `floor` (OCP MX v1.0 §6.3), `ceil`, `rceil` (round amax/6 up to a power
    of two, as sm_100 does) and `even` (amax rounded to the element's precision first); `mse` tries the
    exponent below as well and keeps what errs less.

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
    layout: the scales are quantized by `fq.layout("fp8:tensor")`. `rule="four_over_six"` lets each block's
    largest element become 6 or 4, whichever errs less, with `outer = amax/1536` (Four Over Six); `"mse"`
    tries smaller scales.

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
