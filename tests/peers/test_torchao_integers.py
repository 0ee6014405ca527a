"""Integers, bit packing and NF4 against torchao: scales, zero points, codes."""

from __future__ import annotations

import pytest
import torch
from common import DTYPES, ROWS, all_but, difference, explained, ordinary, same, special
from torch import Tensor
from torchao.prototype.dtypes.uintx.bitpacking import pack_cpu, unpack_cpu
from torchao.quantization import Int8Tensor
from torchao.quantization.granularity import PerGroup, PerRow, PerTensor
from torchao.quantization.qat.fake_quantize_config import Int4WeightFakeQuantizeConfig
from torchao.quantization.qat.fake_quantizer import Int4WeightFakeQuantizer
from torchao.quantization.quant_primitives import (
    MappingType,
    _choose_qparams_affine_tinygemm,
    _quantize_affine_tinygemm,
    choose_qparams_affine,
    quantize_affine,
)
from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

import fq
from fq.layouts.block import expand

GROUP = (1, 128)
FINITE = all_but("NaN", "inf", "-inf")
KINDS = [
    (bits, kind) for bits in range(1, 9) for kind in ("sym", "asym", "unsigned") if (bits, kind) != (1, "sym")
]


def codes_of(q: fq.QTensor) -> Tensor:
    """Return the integers that q holds, one per element."""
    bits = q.layout.element.bits
    return q.layout.element.decode(fq.unpack_bits(q.data, bits, q.shape[-1]) if bits < 8 else q.data).int()


def affine(x: Tensor, bits: int, kind: str) -> tuple[fq.QTensor, Tensor, Tensor, Tensor]:
    """Return fq's QTensor and torchao's scale, zero point and codes, in groups of 128."""
    unsigned = kind == "unsigned"
    low, high = (0, (1 << bits) - 1) if unsigned else (-(1 << (bits - 1)), (1 << (bits - 1)) - 1)
    dtype = torch.uint8 if unsigned else torch.int8
    mapping = MappingType.SYMMETRIC if kind == "sym" else MappingType.ASYMMETRIC
    scale, zero = choose_qparams_affine(
        x, mapping, GROUP, dtype, low, high, scale_dtype=torch.float32, keepdim=True
    )
    codes = quantize_affine(x, GROUP, scale, zero, dtype, low, high)
    q = fq.quantize(x, fq.intx(bits, symmetric=kind == "sym", signed=not unsigned))
    return q, scale, zero.int(), codes.int()


@pytest.mark.parametrize(("bits", "kind"), KINDS)
def test_scales_and_zero_points_of_float32_are_equal(bits, kind):
    for x in (ordinary(), special(*FINITE)):
        q, scale, zero, _ = affine(x, bits, kind)
        same(q.scale, scale)
        if kind == "sym":
            assert (zero == 0).all() and q.zero_point is None
        else:
            same(q.zero_point.int(), zero)


@pytest.mark.parametrize(("bits", "kind"), [k for k in KINDS if k != (1, "asym")])  # its zero point is a tie
def test_codes_are_equal_where_the_reciprocal_is_exact_and_nothing_is_a_tie(bits, kind):
    steps = (1 << bits) - 1
    x = torch.randn(16, 512, generator=torch.Generator().manual_seed(3)).clamp(-1, 1)
    x[:, ::128], x[:, 1::128] = -1.0, 1.0
    x *= steps / 2 * 2.0**-5  # a range of `steps` scales of 2^-5
    q, scale, zero, codes = affine(x, bits, kind)
    assert (scale == 2.0**-5).all()
    same(q.scale, scale)
    fraction = torch.abs(x / scale.repeat_interleave(128, -1)) % 1
    tie = fraction == 0.5
    assert torch.equal(codes_of(q)[~tie], codes[~tie])
    if kind != "sym":
        same(q.zero_point.int(), zero)


@difference("torchao-reciprocal")
@pytest.mark.parametrize(("bits", "kind"), KINDS)
def test_integers_divide_and_round_once_where_torchao_multiplies_and_rounds_before_the_zero_point(bits, kind):
    x = torch.cat([ordinary(), ordinary(torch.bfloat16).float(), special(*FINITE)])
    q, scale, zero, codes = affine(x, bits, kind)
    reciprocal, shift = (expand(part, x.shape, GROUP) for part in (1.0 / scale, zero))
    element = q.layout.element
    explained(
        codes_of(q), codes, torch.clamp(torch.round(x * reciprocal) + shift, element.min, element.max).int()
    )
    assert (codes_of(q) - codes).abs().max() == 1 and (codes_of(q) != codes).float().mean() < 0.01


@difference("torchao-zero-point")
def test_a_zero_point_is_rounded_once_where_torchao_rounds_before_it_adds_an_odd_minimum():
    x = torch.tensor([-1.0, 1.0]).repeat(1, 64)
    q, scale, zero, _ = affine(x, 1, "asym")
    same(q.scale, scale)
    assert (q.zero_point.item(), zero.item()) == (0, -1)  # of -1/2
    for bits in range(2, 9):  # the minimum is even, and so does not tell
        q, _, zero, _ = affine(x, bits, "asym")
        assert q.zero_point.item() == zero.item()


@difference("torchao-integers-special")
@pytest.mark.parametrize(("bits", "kind"), KINDS)
def test_integer_blocks_with_nan_or_inf_become_nan(bits, kind):
    x = special("NaN", "inf", "-inf")
    q, scale, zero, codes = affine(x, bits, kind)
    assert torch.isnan(q.scale[:, 0]).all() and (codes_of(q)[:, :128] == 0).all()
    assert torch.isnan(scale[0, 0]) and torch.isinf(scale[1:, 0]).all()
    same(q.scale[:, 1:], scale[:, 1:])
    same(codes_of(q)[:, 128:], codes[:, 128:])
    if kind != "sym":
        assert (q.zero_point[:, 0] == 0).all() and (zero[0, 0] != 0).all()
        same(q.zero_point[:, 1:].int(), zero[:, 1:])


def int8(x: Tensor, text: str) -> tuple[fq.QTensor, Tensor, Tensor]:
    granularity = {"int8": PerRow(), "int8:tensor": PerTensor(), "int8:g128": PerGroup(128)}[text]
    theirs = Int8Tensor.from_hp(x, granularity)
    return fq.quantize(x, fq.layout(text)), theirs.scale, theirs.qdata


@difference("torchao-int8")
@pytest.mark.parametrize("text", ["int8", "int8:tensor", "int8:g128"])
def test_int8_has_no_floor_of_2_to_the_minus_23_and_the_scales_of_float32(text):
    x = ordinary()
    q, scale, data = int8(x, text)
    same(q.scale, scale)
    reciprocal = expand(1.0 / scale, x.shape, q.layout.block)
    same(data, torch.clamp(torch.round(x * reciprocal), -128, 127).to(torch.int8))
    half = (ordinary() * 1.1).bfloat16()
    q, scale, data = int8(half, text)
    explained(q.scale, scale, ((q.scale * 127.5).bfloat16() / 127.5).float())
    same(
        data,
        torch.clamp(torch.round(half * expand(1.0 / scale, x.shape, q.layout.block)), -128, 127).to(
            torch.int8
        ),
    )
    for name in ("zeros", "subnormal", "tiny", "small"):
        q, scale, data = int8(special(name), text)
        assert (scale == 2.0**-23).all() and (q.scale < 2.0**-23).all()
        if name == "zeros":
            same(q.data, data)


def dyadic() -> Tensor:
    """Return rows of maximum 127.5 times a power of two: the reciprocals of their scales are exact."""
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(4)).clamp(-3, 3) * 40
    x[:, ::128] = 127.5
    return x * torch.exp2(torch.arange(64) % 12 - 6.0).unsqueeze(-1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("text", ["int8", "int8:tensor", "int8:g128"])
def test_int8_bytes_are_equal_where_the_reciprocal_is_exact(text, dtype):
    x = dyadic().to(dtype)
    q, scale, data = int8(x, text)
    same(q.scale, scale)
    same(q.data, data)


@pytest.mark.parametrize("dtype", DTYPES)
def test_int4_values_are_those_of_the_mirror_of_the_mslk_kernel(dtype):
    mirror = Int4WeightFakeQuantizer(
        Int4WeightFakeQuantizeConfig(group_size=128, activation_dtype=torch.bfloat16)
    )
    for x in (ordinary(dtype), special(*ROWS, dtype=dtype)):
        same(fq.dequantize(fq.quantize(x, fq.int4())), mirror(x))


def tinygemm(x: Tensor) -> tuple[fq.QTensor, Tensor, Tensor, Tensor]:
    """Return fq's QTensor and the scale, zero point and codes of -8..7 in torchao's tinygemm layout."""
    scale, zero = _choose_qparams_affine_tinygemm(x, MappingType.ASYMMETRIC, GROUP, torch.uint8, 0, 15)
    codes = _quantize_affine_tinygemm(x, GROUP, scale, zero, torch.uint8, 0, 15)
    grid = (x.shape[0], -1)
    return fq.quantize(x, fq.int4()), scale.reshape(grid), zero.reshape(grid), codes.int() - 8


def test_int4_scales_and_zero_points_are_those_of_tinygemm():
    for x in (
        ordinary(),
        special(*all_but("NaN", "inf", "-inf", "zeros", "minus zeros", "subnormal", "tiny", "constant")),
    ):
        q, scale, zero, codes = tinygemm(x)
        same(q.scale, scale)
        same(q.zero_point, zero)
        assert (codes_of(q) != codes).float().mean() < 1e-2


@difference("torchao-tinygemm-origin")
def test_int4_subtracts_the_minimum_where_tinygemm_subtracts_z_minus_8_s():
    x = ordinary(torch.bfloat16, rows=1000).float() + 3  # ties, and a minimum that is not exact in z - 8s
    q, scale, zero, codes = tinygemm(x)
    origin, step = expand(zero - scale * 8, x.shape, GROUP), expand(scale, x.shape, GROUP)
    explained(codes_of(q), codes, torch.clamp(torch.round((x - origin) / step), 0, 15).int() - 8)
    given = fq.quantize(x, fq.int4(), scale=scale, zero_point=zero)  # without the minimum fq does the same
    same(codes_of(given), codes)


@difference("torchao-tinygemm-floor")
def test_int4_ranges_are_at_least_1e_6_as_in_mslk_where_tinygemm_has_no_floor():
    for name in ("zeros", "minus zeros", "subnormal", "tiny", "constant"):
        q, scale, _, _ = tinygemm(special(name))
        assert (q.scale == torch.tensor(1e-6) / 15).all() and (scale < 1e-8).all()


@pytest.mark.parametrize("bits", range(1, 8))
def test_bit_packing_holds_the_same_codes_in_as_many_bytes(bits):
    codes = torch.randint(0, 1 << bits, (6, 64), dtype=torch.uint8)
    shards = pack_cpu(codes, bits)
    packed = fq.pack_bits(codes, bits)
    assert packed.numel() == sum(shard.numel() for shard in shards)
    same(fq.unpack_bits(packed, bits, 64), unpack_cpu(shards, bits))


@difference("torchao-uintx")
@pytest.mark.parametrize("bits", range(1, 8))
def test_bits_are_one_stream_where_torchao_splits_codes_and_interleaves_parts_of_the_row(bits):
    codes = torch.randint(0, 1 << bits, (6, 64), dtype=torch.uint8)
    shards, rest = [], codes
    for width in (4, 2, 1):
        if bits & width:
            part, rest = rest & ((1 << width) - 1), rest >> width
            lanes = part.unflatten(-1, (8 // width, -1)).mT.flatten(
                -2
            )  # one from each part of the row in a byte
            shards.append(fq.pack_bits(lanes, width))
    theirs = pack_cpu(codes, bits)
    assert len(theirs) == len(shards)
    for ours, shard in zip(shards, theirs, strict=True):
        same(ours, shard)
    assert not torch.equal(fq.pack_bits(codes, bits), torch.cat(theirs, -1))


def nf4(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes of fq with torchao's table, and torchao's, whose even ones are in the high nibble."""
    theirs = to_nf4(x, 64, 64)
    table = fq.layout(f"lut({','.join(str(round(v, 4)) for v in theirs.nf4.tolist())}):g64")
    packed = theirs.quantized_data.reshape(x.shape[0], -1)
    return codes_of_lut(fq.quantize(x, table)), fq.unpack_fp4x2(packed >> 4 | packed << 4)


def codes_of_lut(q: fq.QTensor) -> Tensor:
    return fq.unpack_bits(q.data, q.layout.element.bits, q.shape[-1])


def test_nf4_codes_are_equal_in_a_codebook_of_the_same_numbers():
    x = ordinary()
    ours, theirs = nf4(x)
    same(ours, theirs)
    names = all_but("zeros", "minus zeros", "NaN", "inf", "-inf", "subnormal")
    same(*nf4(special(*names[:8])))
    same(*nf4(special(*names[-8:])))


@difference("torchao-nf4-special")
def test_nf4_blocks_of_zeros_have_the_code_of_zero():
    ours, theirs = nf4(special("zeros").repeat(8, 1))
    assert (ours == 7).all() and (theirs == 0).all()  # 0/0 is nearest to nothing
    ours, theirs = nf4(special("inf").repeat(8, 1))
    assert (ours[:, :64] == 0).all() and (theirs[:, 5] == 0).all() and (theirs[:, :64] != 0).any()
    same(ours[:, 64:], theirs[:, 64:])
    ours, theirs = nf4(special("subnormal").repeat(8, 1))  # divided by 2^-126
    assert (ours != theirs).any()


@difference("torchao-nf4-table")
def test_nf4_has_the_table_of_qlora_where_torchao_rounds_it_to_four_digits():
    x = ordinary(rows=128)
    _, theirs = nf4(x)
    ours = codes_of_lut(fq.quantize(x, fq.nf4()))
    table = torch.tensor(fq.nf4().element.values)
    rounded = to_nf4(x, 64, 64).nf4
    assert 1e-5 < (table - rounded).abs().max() < 6e-5
    different = ours != theirs
    relative = x / expand(fq.quantize(x, fq.nf4()).scale, x.shape, (1, 64))
    middles = (table[1:] + table[:-1]) / 2
    assert different.any() and ((relative[different].unsqueeze(-1) - middles).abs().amin(-1) < 6e-5).all()


@difference("torchao-nf4-scales")
def test_nf4_double_quantization_keeps_scales_and_not_their_distance_from_the_mean():
    x = ordinary()
    theirs = to_nf4(x, 64, 64)
    absmax = x.reshape(-1, 64).abs().amax(-1)
    distance = (absmax - absmax.mean()).reshape(-1, 64)
    factor = 256 / (2 * distance.abs().amax(-1, keepdim=True))
    same(
        theirs.quantized_scalers,
        torch.clamp(torch.round(distance * factor), -128, 127).flatten().to(torch.int8),
    )
    q = fq.quantize(x, fq.nf4(double_quant=True))
    same(q.scale.data, fq.quantize(absmax.reshape(48, 8), fq.layout("uint8:g256:sym")).data)
    assert q.scale.data.dtype != theirs.quantized_scalers.dtype
