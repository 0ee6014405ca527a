"""HQQ's quantizer, without its optimization, against layouts with a float zero point."""

from __future__ import annotations

import pytest
import torch
from common import difference, explained, ordinary, same, special
from hqq.core.quantize import Quantizer
from torch import Tensor

import fq
from fq.layouts.block import expand

GROUP = (1, 64)
BITS = (2, 3, 4, 5, 6, 8)


def hqq(x: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return HQQ's codes, scale and zero over fq's grid, and its values in float32."""
    codes, meta = Quantizer.quantize(
        x,
        nbits=bits,
        group_size=64,
        optimize=False,
        axis=1,
        bitpack=False,
        compute_dtype=torch.float32,
        device="cpu",
    )
    meta["compute_dtype"] = torch.float32
    values = Quantizer.dequantize(codes, meta)
    grid = (x.shape[0], -1)
    return codes.reshape(x.shape), meta["scale"].reshape(grid), meta["zero"].reshape(grid), values


def quantized(x: Tensor, bits: int) -> tuple[fq.QTensor, Tensor]:
    """Return fq's QTensor, and its codes."""
    q = fq.quantize(x, fq.layout(f"uint{bits}:g64:asym"))
    return q, fq.unpack_bits(q.data, bits, x.shape[-1]) if bits < 8 else q.data


@pytest.mark.parametrize("bits", BITS)
def test_codes_are_within_one_and_values_within_a_step_of_it(bits):
    for x in (ordinary(), special("ties", "integers", "positive", "negative", "outlier", "some zeros")):
        (q, ours), (codes, scale, _, values) = quantized(x, bits), hqq(x, bits)
        torch.testing.assert_close(q.scale, scale, rtol=2.0**-22, atol=0)
        apart = (ours.float() - codes).abs()
        assert apart.max() <= 1 and apart.mean() < 1e-3
        step = expand(scale, x.shape, GROUP)
        close = (fq.dequantize(q) - values).abs() <= step * (apart + 2.0**-14)
        assert close.all()


@difference("hqq-reciprocal")
@pytest.mark.parametrize("bits", BITS)
def test_codes_are_of_one_division_where_hqq_multiplies_and_adds_a_zero(bits):
    x = torch.round(torch.randn(400, 512) * 8) / 8 + 0.3  # many are halfway
    (q, ours), (codes, scale, zero, values) = quantized(x, bits), hqq(x, bits)
    blocks = x.unflatten(-1, (-1, 64))
    low, high = blocks.amin(-1), blocks.amax(-1)
    top = (1 << bits) - 1
    inverse = (top / (high - low)).clamp(max=2e4)
    same(zero, -low * inverse)
    same(scale, 1.0 / inverse)
    product = x * expand(inverse, x.shape, GROUP) + expand(zero, x.shape, GROUP)
    explained(ours.float(), codes.float(), torch.clamp(torch.round(product), 0, top))
    step = expand(scale, x.shape, GROUP)
    same(values, (codes - expand(zero, x.shape, GROUP)) * step)
    same(q.zero_point, low)  # it is added, where HQQ's is subtracted before the scale


@difference("hqq-small")
@pytest.mark.parametrize("bits", BITS)
def test_small_ranges_keep_their_codes_where_hqq_loses_them(bits):
    x = torch.randn(8, 512) * 1e-5
    (q, ours), (codes, scale, _, values) = quantized(x, bits), hqq(x, bits)
    assert (scale == 1).all() and codes.unique().numel() == 1  # a range below 1e-4 has scale 1
    assert ours.unique().numel() > 0.9 * (1 << bits)
    assert fq.sqnr(x, fq.dequantize(q)) > fq.sqnr(x, values) + 5
    x = torch.full((8, 512), -1.1e-4 / 2)
    x[:, ::2] *= -1  # of a range above that the scale is at least 1/20000
    (q, _), (_, scale, _, _) = quantized(x, bits), hqq(x, bits)
    torch.testing.assert_close(q.scale, torch.full_like(scale, 1.1e-4 / ((1 << bits) - 1)))
    torch.testing.assert_close(scale, q.scale.clamp(min=1 / 2e4))
    assert (q.scale < scale).all()


@difference("hqq-packing")
def test_codes_pack_along_the_row_where_hqq_packs_two_halves_of_the_matrix():
    x = ordinary()
    codes, _, _, _ = hqq(x, 4)
    packed, _ = Quantizer.quantize(x, nbits=4, group_size=64, optimize=False, axis=1, device="cpu")
    upper, lower = codes.reshape(-1, 64).to(torch.uint8).chunk(2)
    same(packed, upper << 4 | lower)
    same(fq.unpack_bits(fq.pack_bits(codes.to(torch.uint8), 4), 4, 512), codes.to(torch.uint8))
