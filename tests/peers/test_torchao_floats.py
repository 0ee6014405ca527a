"""MX, NVFP4 and FP8 against torchao: scale bytes, codes and packed bytes."""

from __future__ import annotations

import pytest
import torch
from common import DTYPES, all_but, bits, differ, difference, explained, ordinary, same, special
from torch import Tensor
from torchao.prototype.mx_formats.constants import DTYPE_FP6_E2M3, DTYPE_FP6_E3M2
from torchao.prototype.mx_formats.kernels import f32_to_f4_unpacked, pack_uint4, unpack_uint4
from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx
from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale
from torchao.quantization import Float8Tensor
from torchao.quantization.granularity import PerBlock, PerGroup, PerRow, PerTensor

import fq
from fq.layouts.block import expand
from fq.numerics import load_scale

MX = {
    "e2m1": torch.float4_e2m1fn_x2,
    "e2m3": DTYPE_FP6_E2M3,
    "e3m2": DTYPE_FP6_E3M2,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
}
RULES = ("floor", "ceil", "rceil", "even")
FP8 = {
    "fp8": PerRow(),
    "fp8:tensor": PerTensor(),
    "fp8:g128": PerGroup(128),
    "fp8:block16x128": PerBlock([16, 128]),
    "e5m2": PerRow(),
}


def mx(x: Tensor, element: str, rule: str) -> tuple[fq.QTensor, Tensor, Tensor, Tensor]:
    """Return fq's QTensor and its bytes, one per FP6 code, then torchao's scale bytes and bytes."""
    q = fq.quantize(x, fq.layout(f"{element}:g32:scale=e8m0:{rule}"))
    scale, data = to_mx(x, MX[element], 32, ScaleCalculationMode[rule.upper()])
    ours = (
        fq.unpack_bits(q.data, 6, x.shape[-1]) if q.layout.element.bits == 6 else q.data
    )  # theirs: a byte each
    return q, ours.view(torch.uint8), scale.view(torch.uint8), data.view(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("element", MX)
def test_mx_bytes_are_equal(element, rule, dtype):
    for x in (ordinary(dtype), special(*all_but("NaN", "inf", "-inf", "subnormal"), dtype=dtype)):
        q, ours, scale, data = mx(x, element, rule)
        same(q.scale, scale)
        same(ours, data)


@difference("torchao-mx-nan")
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("element", MX)
def test_codes_of_mx_blocks_with_nan_are_the_one_of_nan(element, rule):
    q, ours, scale, data = mx(special("positive", "NaN"), element, rule)
    same(q.scale, scale)
    assert (q.scale == 255).tolist() == [[False] * 16, [True] + [False] * 15]
    block = ours.shape[-1] // 16
    same(ours[1, block:], data[1, block:])
    code = q.layout.element.nan_code
    assert (ours[1, :block] == (code * 17 if element == "e2m1" else code)).all()
    if element in ("e2m1", "e2m3", "e3m2") or rule != "rceil":  # eight bits by rceil: NaN too, as it happens
        assert (ours[1, :block] != data[1, :block]).any()
    assert torch.isnan(fq.dequantize(q)[1, :32]).all()


@difference("torchao-mx-inf")
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("element", MX)
def test_mx_blocks_with_inf_are_nan_where_torchao_takes_a_large_scale(element, rule):
    q, ours, scale, data = mx(special("inf", "-inf", "positive"), element, rule)
    poisoned = torch.zeros(3, 16, dtype=torch.bool)
    poisoned[:2, 0] = True
    differ(q.scale, scale, poisoned)
    top = 254 if rule == "rceil" else 255 - q.layout.element.max_exponent
    assert (scale[poisoned] == top).all() and (q.scale[poisoned] == 255).all()
    differ(ours.unflatten(-1, (16, -1)), data.unflatten(-1, (16, -1)), poisoned)


@difference("torchao-mx-subnormal")
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("element", MX)
def test_the_smallest_mx_scale_divides_by_two_to_the_minus_127(element, rule):
    x = special("subnormal", "positive")
    q, ours, scale, data = mx(x, element, rule)
    same(q.scale, scale)
    smallest = q.scale == 0
    divisor = torch.where(smallest, 1.0 if rule == "rceil" else 2.0**-126, load_scale(q.scale, "e8m0"))
    predicted = q.layout.element.encode(x / expand(divisor, x.shape, (1, 32))).view(torch.uint8)
    predicted = fq.pack_fp4x2(predicted) if element == "e2m1" else predicted
    explained(ours, data, predicted)
    differ(ours.unflatten(-1, (16, -1)), data.unflatten(-1, (16, -1)), smallest)


@difference("torchao-mx-rceil")
@pytest.mark.parametrize("element", MX)
def test_rceil_is_exact_where_torchao_takes_a_float32_logarithm(element):
    largest = fq.layout(element).element.max
    for exponent, inexact in ((-100, True), (-2, False), (0, False), (100, True)):
        start = torch.tensor(largest * 2.0**exponent)
        near = start.view(torch.int32) + torch.arange(-200, 200, dtype=torch.int32)
        amax = near.view(torch.float32)
        x = torch.zeros(400, 32)
        x[:, 0] = amax
        q, _, scale, _ = mx(x, element, "rceil")
        exact = torch.ceil(torch.log2(amax.double() / largest))
        same(load_scale(q.scale, "e8m0")[:, 0], torch.exp2(exact).float())
        above = (amax > start) & (torch.log2(amax / largest) == exponent)  # a little, and rounded away
        assert above.any() == inexact
        same(scale[:, 0].int(), q.scale[:, 0].int() - above.int())


def nvfp4(x: Tensor) -> tuple[fq.QTensor, Tensor, Tensor, Tensor]:
    """Return fq's QTensor and torchao's outer scale, block scales and packed bytes."""
    q = fq.quantize(x, fq.nvfp4())
    outer = per_tensor_amax_to_scale(x.abs().amax())
    return q, outer.reshape(1, 1), *nvfp4_quantize(x, 16, outer)


def test_nvfp4_bytes_of_float32_are_equal():
    for x in (
        ordinary(),
        *special(*all_but("zeros", "minus zeros", "NaN", "inf", "-inf", "subnormal")).split(1),
    ):
        q, outer, scale, data = nvfp4(x)
        same(q.scale.scale, outer)
        same(q.scale.data, scale)
        same(q.data, data)


@difference("torchao-nvfp4-reciprocal")
def test_nvfp4_divides_where_torchao_multiplies_by_a_reciprocal():
    x = ordinary(torch.bfloat16)  # of which many are ties
    q, outer, scale, data = nvfp4(x)
    same(q.scale.scale, outer)
    same(q.scale.data, scale)
    reciprocal = (1.0 / outer) / scale.float()
    scaled = x.float() * expand(reciprocal, x.shape, (1, 16))
    explained(q.data, data, fq.pack_fp4x2(q.layout.element.encode(scaled)))
    assert (fq.unpack_fp4x2(q.data) != fq.unpack_fp4x2(data)).float().mean() < 0.01


@difference("torchao-nvfp4-floor")
def test_nvfp4_block_scales_reach_subnormals_where_torchao_stops_at_the_smallest_normal():
    x = ordinary() * torch.exp2(-torch.arange(48.0) % 20).unsqueeze(-1)
    q, _, scale, data = nvfp4(x)
    low = q.scale.data.float() < 2.0**-6
    differ(q.scale.data, scale, low)
    assert (scale[low].float() == 2.0**-6).all() and q.scale.data[low].float().min() >= 2.0**-9
    unequal = bits(q.data) != bits(data)
    assert not unequal.unflatten(-1, (32, 8)).any(-1)[~low].any() and unequal.any()


@difference("torchao-nvfp4-special")
def test_nvfp4_matrices_of_zeros_stay_zero_and_those_with_inf_become_nan():
    for name in ("zeros", "minus zeros"):
        q, outer, scale, _ = nvfp4(special(name))
        assert outer.item() == 0 and torch.isnan(scale.float()).all()
        assert (fq.dequantize(q) == 0).all()
    for name in ("inf", "-inf", "NaN"):
        q, outer, scale, data = nvfp4(special(name))
        assert torch.isnan(q.scale.scale).all() and torch.isnan(outer).all() == (name == "NaN")
        assert (
            torch.isnan(q.scale.data.float()).all() and (q.data == 0x77).all()
        )  # one outer scale for all blocks
        assert torch.isnan(scale[0, 0].float()) and not torch.equal(q.data, data)
    q, outer, _, _ = nvfp4(special("subnormal"))  # an outer scale below the smallest normal float32
    assert q.scale.scale.item() == 2.0**-126 and 0 < outer.item() < 2.0**-126


def float8(x: Tensor, text: str, **given: Tensor) -> tuple[fq.QTensor, Tensor, Tensor]:
    """Return fq's QTensor and torchao's scales and codes."""
    layout = fq.layout(text)
    dtype = torch.float8_e5m2 if text == "e5m2" else torch.float8_e4m3fn
    theirs = Float8Tensor.from_hp(x, granularity=FP8[text], float8_dtype=dtype)
    q = fq.quantize(x, layout, **{k: v(theirs.scale) for k, v in given.items()})
    return q, theirs.scale, theirs.qdata


def sixteen(*names: str, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return each special row as a matrix of 16 rows."""
    return [x.repeat(16, 1) for x in special(*names, dtype=dtype).split(1)]


@pytest.mark.parametrize("text", FP8)
def test_fp8_bytes_of_float32_are_equal(text):
    for x in (ordinary(), *sixteen(*all_but("zeros", "minus zeros", "NaN", "inf", "-inf", "subnormal"))):
        q, scale, data = float8(x, text)
        same(q.scale, scale)
        same(q.data, data)


@difference("torchao-fp8-bfloat16")
@pytest.mark.parametrize("text", FP8)
def test_fp8_scales_of_bfloat16_are_those_of_float32_where_torchao_rounds_them_to_bfloat16(text):
    x = (ordinary() * 1.1).bfloat16()
    q, scale, _ = float8(x, text)
    wide, _, _ = float8(x.float(), text)
    same(q.scale, wide.scale)
    same(q.data, wide.data)
    explained(q.scale, scale, q.scale.bfloat16().float())
    given, _, data = float8(x, text, scale=lambda scale: scale)  # under torchao's scale the codes are equal
    same(given.data, data)


@difference("torchao-fp8-special")
@pytest.mark.parametrize("text", FP8)
def test_fp8_blocks_of_zeros_stay_zero_and_those_with_inf_become_nan(text):
    for x in sixteen("zeros", "minus zeros"):
        q, scale, data = float8(x, text)
        assert (scale == 0).all() and torch.isnan(data.float()).all()
        assert (q.data.float() == 0).all() and (q.scale == 2.0**-126).all()
        same(torch.signbit(fq.dequantize(q)), torch.signbit(x))
    for x in sixteen("inf", "-inf"):
        q, scale, data = float8(x, text)
        differ(q.scale, scale, torch.isinf(scale))
        assert torch.isnan(q.scale[torch.isinf(scale)]).all()
        differ(q.data, data, expand(torch.isinf(scale), x.shape, q.layout.block).expand(x.shape))
    (x,) = sixteen("NaN")
    q, scale, data = float8(x, text)
    same(q.scale, scale)
    same(q.data.float(), data.float())  # NaN of either sign
    (x,) = sixteen("subnormal")
    q, scale, _ = float8(x, text)
    assert (q.scale == 2.0**-126).all() and (scale < 2.0**-126).all() and (scale > 0).all()


def test_fp4_cast_and_pack_are_equal():
    exponents = torch.arange(-20, 20).repeat_interleave(500)
    x = torch.cat(
        [torch.randn(20_000) * torch.exp2(exponents), torch.arange(-8, 8, 1 / 16), torch.tensor([0.0, -0.0])]
    )
    codes = f32_to_f4_unpacked(x)
    same(fq.layout("e2m1").element.encode(x), codes)
    same(fq.cast_fp4x2(x), pack_uint4(codes))
    same(fq.pack_fp4x2(codes), pack_uint4(codes))
    every = torch.arange(256, dtype=torch.uint8).reshape(2, 128)
    same(fq.unpack_fp4x2(every), unpack_uint4(every))


@difference("torchao-fp4-nan")
def test_fp4_cast_makes_nan_six_where_torchao_makes_it_any_number():
    x = torch.tensor([0x7FC00000, 0x7F800001, 0x7FFFFFFF], dtype=torch.int32).view(torch.float32)
    assert fq.layout("e2m1").element.encode(x).tolist() == [7, 7, 7]
    assert f32_to_f4_unpacked(x).tolist() == [3, 2, 4]
    assert fq.cast_fp4x2(x[:2]).tolist() == [0x77]
