"""FP8, MX and NVFP4 against compressed-tensors: scales, codes and packed bytes."""

from __future__ import annotations

import pytest
import torch
from common import DTYPES, all_but, bits, differ, difference, explained, ordinary, same, special
from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
from compressed_tensors.compressors.mxfp6.base import MXFP6PackedCompressor
from compressed_tensors.compressors.mxfp8.base import MXFP8QuantizationCompressor
from compressed_tensors.compressors.naive_quantized.base import NaiveQuantizationCompressor
from compressed_tensors.compressors.nvfp4 import (
    NVFP4PackedCompressor,
    pack_fp4_to_uint8,
    unpack_fp4_from_uint8,
)
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from torch import Tensor

import fq
from fq.layouts.block import expand, reduce
from fq.numerics import load_scale

FP8 = {
    "fp8": {"strategy": "channel"},
    "fp8:tensor": {"strategy": "tensor"},
    "fp8:block16x128": {"strategy": "block", "block_structure": [16, 128]},
}
MX = {
    "mxfp4": (4, MXFP4PackedCompressor),
    "e2m3:g32:scale=e8m0:even": (6, MXFP6PackedCompressor),
    "mxfp8:even": (8, MXFP8QuantizationCompressor),
}
NONFINITE = ("NaN", "inf", "-inf")
DEGENERATE = ("zeros", "minus zeros", "subnormal", *NONFINITE)


def compressed(
    x: Tensor, layout: fq.Layout, args: QuantizationArgs, compressor: type, outer: Tensor | None = None
):
    """Return x as compressed-tensors keeps it: its scales in the shape of fq's, its codes, and its values."""
    low, high = (reduce(x, layout.block, op) for op in (torch.amin, torch.amax))
    scale, _ = calculate_qparams(low, high, args, global_scale=outer)
    state = {"weight": x, "weight_scale": scale} | ({} if outer is None else {"weight_global_scale": outer})
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    state = compressor.compress(state, scheme)
    codes = state.get("weight_packed", state.get("weight"))
    return state["weight_scale"].reshape(low.shape), codes, compressor.decompress(state, scheme)["weight"]


def fp8(x: Tensor, text: str) -> tuple[fq.QTensor, Tensor, Tensor, Tensor]:
    args = QuantizationArgs(num_bits=8, type="float", **FP8[text])
    return fq.quantize(x, fq.layout(text)), *compressed(x, fq.layout(text), args, NaiveQuantizationCompressor)


@pytest.mark.parametrize("text", FP8)
def test_fp8_bytes_of_float32_are_equal(text):
    for x in (ordinary(), ordinary(rows=37, columns=300), *special(*all_but(*DEGENERATE)).split(1)):
        q, scale, data, values = fp8(x, text)  # blocks that do not divide the matrix, too
        same(q.scale, scale)
        same(q.data, data)
        same(fq.dequantize(q), values)


@difference("ct-fp8-bfloat16")
@pytest.mark.parametrize("text", FP8)
def test_fp8_is_computed_in_float32_where_compressed_tensors_uses_the_dtype_of_the_weight(text):
    x = (ordinary() * 1.1).bfloat16()
    q, scale, data, _ = fp8(x, text)
    wide = fq.quantize(x.float(), fq.layout(text))
    same(q.scale, wide.scale)
    same(q.data, wide.data)
    amax = reduce(x.abs(), q.layout.block, torch.amax)
    explained(q.scale, scale.float(), (amax / torch.tensor(448.0, dtype=x.dtype)).float())
    scaled = x / expand(scale, x.shape, q.layout.block)  # rounded to bfloat16, and then again
    explained(q.data, data, torch.clamp(scaled, -448, 448).to(torch.float8_e4m3fn))


@difference("ct-fp8-special")
@pytest.mark.parametrize("text", FP8)
def test_fp8_scales_are_at_least_the_smallest_and_nan_with_inf(text):
    for name in ("zeros", "minus zeros"):
        q, scale, data, _ = fp8(special(name), text)
        assert (q.scale == 2.0**-126).all() and (scale == 2.0**-23).all()  # eps, where the scale is 0
        same(q.data, data)
    q, scale, _, _ = fp8(special("subnormal"), text)
    assert (q.scale == 2.0**-126).all() and (scale < 2.0**-126).all()
    for name in ("inf", "-inf"):
        q, scale, data, _ = fp8(special(name), text)
        differ(q.scale, scale, torch.isinf(scale))
        assert torch.isnan(q.scale[torch.isinf(scale)]).all()
    q, scale, data, _ = fp8(special("NaN"), text)
    same(q.scale, scale)
    same(q.data.float(), data.float())


def mx(x: Tensor, text: str) -> tuple[fq.QTensor, Tensor, Tensor, Tensor]:
    width, compressor = MX[text]
    args = QuantizationArgs(
        num_bits=width,
        type="float",
        strategy="group",
        group_size=32,
        scale_dtype=torch.uint8,
        zp_dtype=torch.uint8,
    )
    return fq.quantize(x, fq.layout(text)), *compressed(x, fq.layout(text), args, compressor)


def codes(packed: Tensor, columns: int) -> Tensor:
    """Return one code per element of packed or plain bytes."""
    width = packed.shape[-1] * 8 // columns
    return fq.unpack_bits(packed.view(torch.uint8), width, columns)


@pytest.mark.parametrize("dtype", DTYPES)
def test_mxfp6_bytes_are_equal(dtype):
    for x in (ordinary(dtype), special(*all_but(*NONFINITE), dtype=dtype)):
        q, scale, data, values = mx(x, "e2m3:g32:scale=e8m0:even")
        same(q.scale, scale)
        same(q.data, data)
        same(fq.dequantize(q, values.dtype), values)


@difference("ct-fp4-minus-zero")
@pytest.mark.parametrize("dtype", DTYPES)
def test_mxfp4_keeps_the_sign_of_zero_where_compressed_tensors_loses_it(dtype):
    q, scale, data, values = mx(ordinary(dtype), "mxfp4")
    same(q.scale, scale)
    same(q.data, data)
    same(fq.dequantize(q, values.dtype), values)
    x = special(*all_but(*NONFINITE), dtype=dtype)
    q, scale, data, _ = mx(x, "mxfp4")
    same(q.scale, scale)
    differ(codes(q.data, 512), codes(data, 512), (x == 0) & torch.signbit(x))


@difference("ct-mxfp8-even")
@pytest.mark.parametrize("dtype", DTYPES)
def test_mxfp8_even_rounds_to_the_elements_precision_where_compressed_tensors_rounds_to_that_of_fp4(dtype):
    x = torch.cat(
        [ordinary(dtype), special(*all_but(*NONFINITE, "zeros", "minus zeros", "subnormal"), dtype=dtype)]
    )
    q, scale, data, _ = mx(x, "mxfp8:even")
    explained(q.scale, scale, fq.quantize(x, fq.layout("mxfp4:even")).scale + 2 - 8)  # emax of e2m1 and e4m3
    given = fq.quantize(x, fq.layout("mxfp8"), scale=load_scale(scale, "e8m0"))
    same(given.scale, scale)
    same(given.data, data)


@difference("ct-mx-nonfinite")
@pytest.mark.parametrize("text", MX)
def test_mx_blocks_with_nan_or_inf_become_nan_and_touch_no_other(text):
    q, scale, data, _ = mx(special(*NONFINITE), text)
    assert (q.scale[:, 0] == 255).all() and (scale[:, 0] != 255).all()
    if text != "mxfp8:even":
        same(q.scale[:, 1:], scale[:, 1:])
        same(codes(q.data, 512)[:, 32:], codes(data, 512)[:, 32:])


def nvfp4(x: Tensor) -> tuple[fq.QTensor, Tensor, Tensor, Tensor, Tensor]:
    args = QuantizationArgs(
        num_bits=4,
        type="float",
        strategy="tensor_group",
        group_size=16,
        scale_dtype=torch.float8_e4m3fn,
        zp_dtype=torch.float8_e4m3fn,
    )
    outer = generate_gparam(x.amin(), x.amax())
    return fq.quantize(x, fq.nvfp4()), outer, *compressed(x, fq.nvfp4(), args, NVFP4PackedCompressor, outer)


def test_nvfp4_bytes_of_float32_are_equal_but_for_minus_zero():
    for x in (ordinary(), *special(*all_but(*DEGENERATE)).split(1)):
        q, _, scale, data, values = nvfp4(x)
        same(q.scale.data, scale)
        minus = (x == 0) & torch.signbit(x)
        assert torch.equal(codes(q.data, 512) != codes(data, 512), minus)
        torch.testing.assert_close(
            fq.dequantize(q, values.dtype), values, rtol=2.0**-7, atol=0
        )  # twice bfloat16


@difference("ct-nvfp4-divisor")
def test_nvfp4_has_an_outer_factor_where_compressed_tensors_has_a_divisor():
    for x in ordinary().split(1):
        q, outer, _, _, _ = nvfp4(x)
        same(outer, 2688 / x.abs().amax().reshape(1))
        same(q.scale.scale, (x.abs().amax() / 2688).reshape(1, 1))
        torch.testing.assert_close(q.scale.scale.flatten(), 1 / outer, rtol=2.0**-22, atol=0)
    found = [nvfp4(x)[:2] for x in ordinary().split(1)]
    assert any(q.scale.scale.item() != (1 / outer).item() for q, outer in found)


@difference("ct-nvfp4-bfloat16")
def test_nvfp4_is_computed_in_float32_where_compressed_tensors_begins_in_the_dtype_of_the_weight():
    x = ordinary(torch.bfloat16)
    q, outer, scale, data, _ = nvfp4(x)
    wide = fq.quantize(x.float(), fq.nvfp4())
    same(q.scale.data, wide.scale.data)
    same(q.data, wide.data)
    same(outer, (2688 / x.abs().amax().reshape(1)).float())
    largest = reduce(x.abs(), (1, 16), torch.amax) / torch.tensor(6.0, dtype=x.dtype)
    explained(q.scale.data, scale, (outer * largest).clamp(max=448).to(torch.float8_e4m3fn))
    scaled = x / expand(scale.float() / outer, x.shape, (1, 16))
    predicted = q.layout.element.encode(scaled)
    explained(q.data, data, fq.pack_fp4x2(torch.where(predicted == 8, torch.where(x == 0, 0, 8), predicted)))


@difference("ct-nvfp4-special")
def test_nvfp4_zeros_have_the_smallest_scales_and_nonfinite_matrices_are_nan():
    for name in ("zeros", "minus zeros", "subnormal"):
        q, outer, scale, data, _ = nvfp4(special(name))
        assert outer.item() == 1 and (scale.float() == 0.125).all() and (fq.unpack_fp4x2(data) % 8 == 0).all()
        assert q.scale.scale.item() == 2.0**-126
        if name != "subnormal":
            assert (q.scale.data.float() == 2.0**-9).all() and (fq.unpack_fp4x2(q.data) % 8 == 0).all()
    for name in NONFINITE:
        q, outer, scale, _, _ = nvfp4(special(name))
        assert torch.isnan(fq.dequantize(q)).all() and torch.isfinite(outer).all()
        assert torch.isnan(scale.float()).sum() == 1


def test_fp4_packing_is_equal():
    every = torch.arange(256, dtype=torch.uint8).reshape(4, 64)
    for dtype in DTYPES:
        values = unpack_fp4_from_uint8(every, 4, 128, dtype)
        same(values, fq.layout("e2m1").element.decode(fq.unpack_fp4x2(every)).to(dtype))
        same(fq.cast_fp4x2(values), pack_fp4_to_uint8(values))
        same(fq.cast_fp4x2(values), every)
    assert bits(values).unique().numel() == 16
