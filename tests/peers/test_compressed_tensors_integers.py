"""Packed integers against compressed-tensors: words, scales, zero points, and what they dequantize to."""

from __future__ import annotations

import pytest
import torch
from common import DTYPES, all_but, difference, explained, ordinary, same, special
from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor, pack_to_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from torch import Tensor

import fq
from fq.layouts.block import expand, reduce

KINDS = [
    (bits, symmetric) for bits in range(1, 9) for symmetric in (True, False) if (bits, symmetric) != (1, True)
]
REGULAR = all_but("zeros", "minus zeros", "NaN", "inf", "-inf", "subnormal")


def words(codes: Tensor, bits: int) -> Tensor:
    """Return unsigned codes in int32 words, as fq packs them."""
    packed = fq.pack_bits(codes.clone(memory_format=torch.contiguous_format), bits)
    return torch.nn.functional.pad(packed, (0, -packed.shape[-1] % 4)).view(torch.int32)


def signed(q: fq.QTensor) -> Tensor:
    """Return the integers that q holds, one per element."""
    bits = q.layout.element.bits
    return q.layout.element.decode(fq.unpack_bits(q.data, bits, q.shape[-1]) if bits < 8 else q.data).int()


@pytest.mark.parametrize("bits", range(1, 9))
def test_pack_to_int32_is_pack_bits_seen_as_words(bits):
    half = 1 << (bits - 1)
    for columns in (1, 5, 31, 32, 33, 100, 256):
        codes = torch.randint(-half, half, (7, columns), dtype=torch.int8)
        same(words(codes.int() + half, bits), pack_to_int32(codes, bits))
    experts = torch.randint(-half, half, (3, 4, 37), dtype=torch.int8)
    same(words(experts.int() + half, bits), pack_to_int32(experts, bits))
    same(words(codes.T.int() + half, bits).T, pack_to_int32(codes, bits, packed_dim=0))


def compressed(
    x: Tensor, bits: int, symmetric: bool, group: int
) -> tuple[QuantizationScheme, dict[str, Tensor]]:
    """Return x as compressed-tensors keeps it; a group of -1 is a channel."""
    strategy = {"strategy": "channel"} if group == -1 else {"strategy": "group", "group_size": group}
    args = QuantizationArgs(num_bits=bits, symmetric=symmetric, **strategy)
    low, high = (reduce(x, (1, group), op) for op in (torch.amin, torch.amax))
    scale, zero = calculate_qparams(low, high, args)
    state = {"weight": x, "weight_scale": scale} | ({} if symmetric else {"weight_zero_point": zero})
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    return scheme, PackedQuantizationCompressor.compress(state, scheme)


def quantized(x: Tensor, bits: int, symmetric: bool, group: int) -> fq.QTensor:
    return fq.quantize(x, fq.intx(bits, group, symmetric=symmetric))


def check(x: Tensor, bits: int, symmetric: bool, group: int) -> None:
    """Assert that fq's bytes are those of compressed-tensors, and what they dequantize to."""
    scheme, state = compressed(x, bits, symmetric, group)
    q, half = quantized(x, bits, symmetric, group), 1 << (bits - 1)
    same(q.scale, state["weight_scale"])
    same(words(signed(q) + half, bits), state["weight_packed"])
    assert state["weight_shape"].tolist() == list(q.shape)
    if not symmetric:
        same(words(q.zero_point.T.int() + half, bits).T, state["weight_zero_point"])  # packed along the rows
    same(fq.dequantize(q), PackedQuantizationCompressor.decompress(state, scheme)["weight"])


@pytest.mark.parametrize(("bits", "symmetric"), KINDS)
def test_bytes_of_float32_are_equal(bits, symmetric):
    for group in (128, -1):
        check(ordinary(), bits, symmetric, group)
        check(special(*REGULAR), bits, symmetric, group)
    check(ordinary(columns=333), bits, symmetric, -1)  # ragged words


@difference("ct-bfloat16")
@pytest.mark.parametrize(("bits", "symmetric"), KINDS)
def test_integers_are_computed_in_float32_where_compressed_tensors_uses_the_dtype_of_the_weight(
    bits, symmetric
):
    x = torch.cat([ordinary(torch.bfloat16), special(*REGULAR, dtype=torch.bfloat16)])
    q, half = quantized(x, bits, symmetric, 128), 1 << (bits - 1)
    wide = quantized(x.float(), bits, symmetric, 128)
    same(q.data, wide.data)
    same(q.scale, wide.scale)
    low, high = (reduce(x, (1, 128), op) for op in (torch.amin, torch.amax))
    low, high = low.clamp(max=0), high.clamp(min=0)
    steps = torch.tensor(float(2 * half - 1), dtype=torch.bfloat16)
    if symmetric:
        scale, zero = torch.maximum(-low, high) / (steps / 2), torch.zeros_like(low)
    else:
        scale = (high - low) / steps
        zero = torch.round(torch.clamp(-half - low / scale, -half, half - 1))
    _, state = compressed(x, bits, symmetric, 128)
    same(state["weight_scale"], scale)
    scaled = x / expand(scale, x.shape, (1, 128)) + expand(
        zero, x.shape, (1, 128)
    )  # each rounded to bfloat16
    codes = torch.round(torch.clamp(scaled, -half, half - 1)).int()
    explained(words(signed(q) + half, bits), state["weight_packed"], words(codes + half, bits))
    assert not torch.equal(q.scale, scale.float())


@difference("ct-eps")
@pytest.mark.parametrize("symmetric", [True, False])
def test_a_scale_of_zero_becomes_the_smallest_where_compressed_tensors_takes_eps(symmetric):
    for dtype in DTYPES:
        x = special("zeros", "minus zeros", dtype=dtype)
        _, state = compressed(x, 4, symmetric, 128)
        q = quantized(x, 4, symmetric, 128)
        assert (q.scale == 2.0**-126).all() and (state["weight_scale"] == torch.finfo(dtype).eps).all()
        assert (fq.dequantize(q) == 0).all()
        if symmetric:
            same(words(signed(q) + 8, 4), state["weight_packed"])
        else:  # there 0/0 is the zero point, and NaN as an integer is whatever the machine makes of it
            assert (q.zero_point == -8).all() and (signed(q) == -8).all()
    q, (_, state) = (
        quantized(special("subnormal"), 8, symmetric, 128),
        compressed(special("subnormal"), 8, symmetric, 128),
    )
    assert (q.scale == 2.0**-126).all() and (state["weight_scale"] < 2.0**-126).all()


@difference("ct-nonfinite")
@pytest.mark.parametrize(("bits", "symmetric"), KINDS)
def test_blocks_with_nan_or_inf_become_nan_and_touch_no_other(bits, symmetric):
    x = special("NaN", "inf", "-inf")
    q, (_, state) = quantized(x, bits, symmetric, 128), compressed(x, bits, symmetric, 128)
    assert torch.isnan(q.scale[:, 0]).all() and torch.isinf(state["weight_scale"][1:, 0]).all()
    same(q.scale[:, 1:], state["weight_scale"][:, 1:])
    same(words(signed(q) + (1 << (bits - 1)), bits)[:, 4 * bits :], state["weight_packed"][:, 4 * bits :])
