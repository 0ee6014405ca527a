"""GGUF blocks against the gguf package: what is quantized, and random bytes decoded."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from common import all_but, difference, explained, ordinary, same, special
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

import fq
from fq.layouts.block import expand
from fq.numerics import load_scale

LAYOUTS = {
    Kind.Q8_0: "int8:g32:scale=float16:absmax_narrow",
    Kind.Q4_0: "int4:g32:sym:scale=float16:absmax_full",
    Kind.Q5_0: "int5:g32:scale=float16:absmax_full",
    Kind.Q4_1: "uint4:g32:asym:scale=float16",
    Kind.Q5_1: "uint5:g32:asym:scale=float16",
}
IN_RANGE = ("some zeros", "ties", "integers", "positive", "negative", "outlier")  # of float16 scales


def halves(packed: Tensor) -> Tensor:
    """Return the codes of bytes that hold element j low and element j + n/2 high: (..., n/2) to (..., n)."""
    return torch.cat([packed & 15, packed >> 4], -1)


def half(two: Tensor) -> Tensor:
    return two.contiguous().view(torch.float16)[..., 0]


def fifth_bits(four: Tensor) -> Tensor:
    """Return 32 bits, LSB first, each in bit 4."""
    return fq.unpack_bits(four.contiguous(), 1, 32) << 4


def blocks_of(x: Tensor, kind: Kind) -> Tensor:
    with np.errstate(all="ignore"):
        data = gguf.quantize(x.numpy(), kind)
    size = gguf.GGML_QUANT_SIZES[kind][1]
    return torch.from_numpy(data).reshape(x.shape[0], -1, size)


def parsed(blocks: Tensor, kind: Kind) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return the scales, minima and plain codes of blocks (rows, n, bytes)."""
    scale, rest, low = half(blocks[..., :2]), blocks[..., 2:], None
    if kind in (Kind.Q4_1, Kind.Q5_1):
        low, rest = half(rest[..., :2]), rest[..., 2:]
    if kind == Kind.Q8_0:
        codes = rest
    elif kind in (Kind.Q5_0, Kind.Q5_1):
        codes = halves(rest[..., 4:]) | fifth_bits(rest[..., :4])
    else:
        codes = halves(rest)
    return scale, low, codes.flatten(-2)


def plain(codes: Tensor, kind: Kind) -> Tensor:
    """Return codes as fq numbers them: those of Q4_0 and Q5_0 count from the lowest."""
    if kind in (Kind.Q4_0, Kind.Q5_0):
        top = 8 if kind == Kind.Q4_0 else 16
        return codes ^ top  # two's complement
    return codes


def held(codes: Tensor, scale: Tensor, low: Tensor | None, kind: Kind) -> fq.QTensor:
    """Return the QTensor of GGUF's parts."""
    layout = fq.layout(LAYOUTS[kind])
    bits = layout.element.bits
    data = plain(codes, kind)
    data = data.view(torch.int8) if bits == 8 else fq.pack_bits(data, bits)
    stored = fq.quantize(torch.zeros(codes.shape), layout).layout
    return fq.QTensor(data, scale, stored, torch.float32, (codes.shape[-1],), low)


@pytest.mark.parametrize("kind", LAYOUTS, ids=lambda kind: kind.name)
def test_random_blocks_dequantize_to_the_same_numbers(kind):
    blocks = torch.randint(0, 256, (16, 8, gguf.GGML_QUANT_SIZES[kind][1]), dtype=torch.uint8)
    ends = (2, 4) if kind in (Kind.Q4_1, Kind.Q5_1) else (2,)
    for end in ends:  # scales that are numbers
        blocks[..., end - 2 : end] = torch.randn(16, 8, 1).half().view(torch.uint8)
    theirs = torch.from_numpy(gguf.dequantize(blocks.flatten(-2).numpy(), kind))
    scale, low, codes = parsed(blocks, kind)
    same(fq.dequantize(held(codes, scale, low, kind)), theirs)


def expected(x: Tensor, kind: Kind) -> tuple[Tensor, Tensor]:
    """Return scales in float32 and codes as GGUF computes them: before the scale is rounded to float16."""
    blocks = x.unflatten(-1, (-1, 32))
    low, high = blocks.amin(-1), blocks.amax(-1)
    if kind == Kind.Q8_0:
        scale = torch.maximum(-low, high) / 127
        value = blocks * (1 / scale).unsqueeze(-1)
        codes = torch.sign(value) * torch.floor(value.abs() + 0.5)  # away from zero
        return scale, codes.flatten(-2).to(torch.int8).view(torch.uint8)
    if kind in (Kind.Q4_0, Kind.Q5_0):
        top = 8 if kind == Kind.Q4_0 else 16
        scale = torch.gather(blocks, -1, blocks.abs().argmax(-1, keepdim=True))[..., 0] / -top
        codes = torch.trunc(blocks * (1 / scale).unsqueeze(-1) + (top + 0.5)).clamp(0, 2 * top - 1)
    else:
        top = 15 if kind == Kind.Q4_1 else 31
        scale = (high - low) / top
        codes = torch.trunc((blocks - low.unsqueeze(-1)) * (1 / scale).unsqueeze(-1) + 0.5).clamp(0, top)
    return scale, codes.flatten(-2).to(torch.uint8)


@difference("gguf-float16")
@pytest.mark.parametrize("kind", LAYOUTS, ids=lambda kind: kind.name)
def test_codes_obey_the_stored_scale_where_gguf_rounds_it_afterwards(kind):
    x = torch.cat([ordinary(), special(*IN_RANGE)])
    q = fq.quantize(x, fq.layout(LAYOUTS[kind]))
    scale, low, codes = parsed(blocks_of(x, kind), kind)
    wide, predicted = expected(x, kind)
    same(scale, wide.half())
    same(q.scale, scale)
    if low is not None:
        same(q.zero_point, low + 0.0)  # see the sign of zero, below
    bits = q.layout.element.bits
    ours = fq.unpack_bits(q.data, bits, 512) if bits < 8 else q.data.view(torch.uint8)
    explained(ours, plain(codes, kind), plain(predicted, kind))
    assert (ours != plain(codes, kind)).float().mean() < 0.02


@pytest.mark.parametrize("kind", LAYOUTS, ids=lambda kind: kind.name)
def test_bytes_are_equal_where_the_scale_is_a_power_of_two_and_nothing_is_a_tie(kind):
    x = torch.rand(16, 512, generator=torch.Generator().manual_seed(2)) * 2 - 1
    x[:, ::32], x[:, 1::32] = {
        Kind.Q8_0: (127 / 128, -127 / 128),
        Kind.Q4_0: (-1.0, 0.9),
        Kind.Q5_0: (1.0, -0.9),
        Kind.Q4_1: (-15 / 16, 15 / 16),
        Kind.Q5_1: (-31 / 32, 31 / 32),
    }[kind]
    x = x.clamp(-float(x[0, 0].abs()), float(x[0, 0].abs())) * torch.exp2(torch.arange(16) - 8.0).unsqueeze(
        -1
    )
    q = fq.quantize(x, fq.layout(LAYOUTS[kind]))
    scale, low, codes = parsed(blocks_of(x, kind), kind)
    theirs = held(codes, scale, low, kind)
    same(q.scale, theirs.scale)
    same(q.data, theirs.data)
    same(fq.dequantize(q), fq.dequantize(theirs))


@difference("gguf-zero-sign")
@pytest.mark.parametrize("kind", [Kind.Q4_1, Kind.Q5_1], ids=lambda kind: kind.name)
def test_the_minimum_of_negative_zeros_is_positive_in_fq_and_negative_in_gguf(kind):
    x = torch.full((1, 512), -0.0)
    q = fq.quantize(x, fq.layout(LAYOUTS[kind]))
    _, low, _ = parsed(blocks_of(x, kind), kind)
    assert low is not None and low.signbit().all() and not q.zero_point.signbit().any()
    same(q.zero_point, low + 0.0)


@difference("gguf-range")
@pytest.mark.parametrize("kind", LAYOUTS, ids=lambda kind: kind.name)
def test_scales_stay_in_the_range_of_float16_where_gguf_has_zero_or_inf(kind):
    for names, number in ((("zeros", "tiny", "subnormal"), 0.0), (("huge",), torch.inf)):
        q = fq.quantize(special(*names), fq.layout(LAYOUTS[kind]))
        scale, _, _ = parsed(blocks_of(special(*names), kind), kind)
        assert (scale.abs() == number).all()
        assert (
            torch.isfinite(q.scale).all() and (q.scale != 0).all() and torch.isfinite(fq.dequantize(q)).all()
        )


@difference("gguf-nonfinite")
def test_blocks_with_nan_or_inf_become_nan_and_touch_no_other():
    x = special("NaN", "inf", "-inf")
    for kind, text in LAYOUTS.items():
        q = fq.quantize(x, fq.layout(text))
        scale, _, _ = parsed(blocks_of(x, kind), kind)
        assert torch.isnan(q.scale[:, 0]).all() and torch.isinf(scale[1:, 0]).all()
        same(q.scale[:, 1:], scale[:, 1:])


def mxfp4(x: Tensor) -> tuple[fq.QTensor, Tensor, Tensor, Tensor]:
    """Return fq's QTensor and its codes, then GGUF's scale bytes and codes."""
    blocks = blocks_of(x, Kind.MXFP4)
    q = fq.quantize(x, fq.mxfp4("floor"))
    return q, fq.unpack_fp4x2(q.data), blocks[..., 0], halves(blocks[..., 1:]).flatten(-2)


@difference("gguf-mxfp4-ties")
def test_mxfp4_rounds_ties_to_even_and_keeps_the_sign_of_zero():
    x = torch.cat([ordinary(), special(*all_but("NaN", "inf", "-inf", "subnormal"))])
    q, ours, scale, codes = mxfp4(x)
    same(q.scale, scale)
    value = (x / expand(load_scale(q.scale, "e8m0"), x.shape, (1, 32))).abs()
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    toward_zero = (value.unsqueeze(-1) > middles).sum(-1).to(torch.uint8)
    sign = torch.where(torch.signbit(x) & (toward_zero > 0), 8, 0).to(torch.uint8)
    explained(ours, codes, toward_zero | sign)
    unequal = (ours != codes) & (ours != 8)
    assert (value[unequal].unsqueeze(-1) == middles).any(-1).all() and unequal.any()


@difference("gguf-mxfp4-special")
def test_mxfp4_scales_of_the_smallest_numbers_saturate_where_gguf_wraps_around():
    q, _, scale, _ = mxfp4(special("subnormal"))
    assert (q.scale == 0).all() and (scale >= 254).all()
    q, _, scale, _ = mxfp4(special("NaN", "inf", "-inf"))
    assert (q.scale[:, 0] == 255).all() and (scale[:, 0] == 0).all()
    same(q.scale[:, 1:], scale[:, 1:])


def test_random_mxfp4_and_nvfp4_blocks_dequantize_to_the_same_numbers():
    blocks = torch.randint(0, 256, (16, 8, 17), dtype=torch.uint8)
    blocks[..., 0] = torch.randint(0, 253, (16, 8))
    theirs = torch.from_numpy(gguf.dequantize(blocks.flatten(-2).numpy(), Kind.MXFP4))
    data = fq.pack_fp4x2(halves(blocks[..., 1:]).flatten(-2))
    q = fq.QTensor(data, blocks[..., 0], fq.quantize(theirs, fq.mxfp4()).layout, torch.float32, (256,))
    same(fq.dequantize(q) + 0.0, theirs + 0.0)  # GGUF has one zero
    blocks = torch.randint(0, 256, (16, 8, 36), dtype=torch.uint8)
    blocks[..., :4] &= 0x7F
    blocks[..., :4] -= (blocks[..., :4] == 0x7F).to(torch.uint8)  # NaN in fq, zero in GGUF
    theirs = torch.from_numpy(gguf.dequantize(blocks.flatten(-2).numpy(), Kind.NVFP4))
    data = fq.pack_fp4x2(halves(blocks[..., 4:].unflatten(-1, (4, 8))).flatten(1))
    layout = fq.quantize(theirs, fq.layout("e2m1:g16:scale=e4m3")).layout
    q = fq.QTensor(data, blocks[..., :4].flatten(1).view(torch.float8_e4m3fn), layout, torch.float32, (512,))
    same(fq.dequantize(q) + 0.0, theirs + 0.0)


def numbers(blocks: Tensor, places: tuple[int, ...]) -> None:
    """Put small float16 numbers where blocks (rows, n, bytes) have their scales."""
    for at in places:
        blocks[..., at : at + 2] = torch.rand(*blocks.shape[:2], 1).half().view(torch.uint8)


def sixes(s: Tensor) -> tuple[Tensor, Tensor]:
    """Return the 8 scales and 8 minima of six bits in the 12 bytes of a K-quant."""
    first, second, third = s[..., :4], s[..., 4:8], s[..., 8:]
    scale = torch.cat([first & 63, third & 15 | first >> 6 << 4], -1)
    low = torch.cat([second & 63, third >> 4 | second >> 6 << 4], -1)
    return scale.flatten(-2), low.flatten(-2)


@pytest.mark.parametrize("bits", [4, 5])
def test_random_q4_k_and_q5_k_blocks_are_quantized_scales_and_zero_points(bits):
    kind = Kind.Q4_K if bits == 4 else Kind.Q5_K
    blocks = torch.randint(0, 256, (8, 4, gguf.GGML_QUANT_SIZES[kind][1]), dtype=torch.uint8)
    numbers(blocks, (0, 2))
    theirs = torch.from_numpy(gguf.dequantize(blocks.flatten(-2).numpy(), kind))
    scale, low = sixes(blocks[..., 4:16])
    codes = (
        halves(blocks[..., -128:].unflatten(-1, (4, 32))).unflatten(-1, (2, 32)).flatten(2, 3)
    )  # sub-blocks of 32
    if bits == 5:
        high = blocks[..., 16:48].unsqueeze(-2) >> torch.arange(8, dtype=torch.uint8).unsqueeze(-1)
        codes = codes | (high & 1) << 4
    nested = "uint6:g8:sym:scale=float16"
    layout = fq.quantize(
        theirs, fq.layout(f"uint{bits}:g32:scale=({nested}):zp=({nested}:absmax_full)")
    ).layout
    parts = [
        fq.QTensor(fq.pack_bits(part, 6), factor, fq.layout(nested), torch.float32, (32,))
        for part, factor in ((scale, half(blocks[..., :2])), (low, -half(blocks[..., 2:4])))
    ]
    data = fq.pack_bits(codes.flatten(1), bits)
    q = fq.QTensor(data, parts[0], layout, torch.float32, (1024,), parts[1])
    same(fq.dequantize(q), theirs)


def test_random_q6_k_blocks_are_quantized_scales():
    blocks = torch.randint(0, 256, (8, 4, 210), dtype=torch.uint8)
    numbers(blocks, (208,))
    theirs = torch.from_numpy(gguf.dequantize(blocks.flatten(-2).numpy(), Kind.Q6_K))
    low = halves(blocks[..., :128].unflatten(-1, (2, 64))).unflatten(-1, (4, 32))
    shift = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).unsqueeze(-1)
    high = blocks[..., 128:192].unflatten(-1, (2, 1, 32)) >> shift & 3
    codes = ((low | high << 4) ^ 32).flatten(1)  # counted from -32
    scale = blocks[..., 192:208].flatten(-2).view(torch.int8)
    layout = fq.layout("int6:g16:scale=(int8:g16:scale=float16)")
    nested = fq.QTensor(
        scale, half(blocks[..., 208:]), fq.layout("int8:g16:scale=float16"), torch.float32, (64,)
    )
    q = fq.QTensor(fq.pack_bits(codes, 6), nested, layout, torch.float32, (1024,))
    same(fq.dequantize(q), theirs)
