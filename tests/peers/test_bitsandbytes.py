"""NF4 and FP4 against bitsandbytes: packed bytes, scales, values, double quantization."""

from __future__ import annotations

import pytest
import torch
from bitsandbytes.functional import QuantState, dequantize_4bit, quantize_4bit
from common import DTYPES, all_but, differ, difference, explained, ordinary, same, special
from torch import Tensor

import fq
from fq.layouts.block import expand

REGULAR = all_but("zeros", "minus zeros", "NaN", "inf", "-inf", "subnormal")
NF4 = torch.tensor(fq.nf4().element.values)


def bnb(x: Tensor, kind: str = "nf4", nested: bool = False) -> tuple[Tensor, QuantState, Tensor]:
    """Return bytes in fq's order, the even element in the low nibble, the state, and the values."""
    packed, state = quantize_4bit(x, blocksize=64, quant_type=kind, compress_statistics=nested)
    flat = packed.flatten()
    return flat >> 4 | flat << 4, state, dequantize_4bit(packed, state)


def sorted_table(kind: str) -> Tensor:
    """Return the numbers of a kind: of FP4's 16 codes two are zero."""
    return torch.tensor(sorted(set(bnb(torch.ones(1, 64), kind)[1].code.tolist())))


def codebook(kind: str) -> fq.Layout:
    return fq.layout(f"lut({','.join(map(repr, sorted_table(kind).tolist()))}):g64")


def codes_as_values(q: fq.QTensor) -> Tensor:
    return q.layout.element.decode(fq.unpack_bits(q.data, 4, q.shape[-1])) + 0.0


@pytest.mark.parametrize("dtype", DTYPES)
def test_nf4_bytes_and_values_are_equal(dtype):
    for x in (ordinary(dtype), special(*REGULAR, dtype=dtype)):
        packed, state, values = bnb(x)
        q = fq.quantize(x, fq.nf4())
        same(NF4, state.code)
        same(q.scale.flatten(), state.absmax)
        same(q.data.flatten(), packed)
        same(fq.dequantize(q), values)


def test_nf4_of_a_matrix_that_blocks_do_not_divide_is_equal_as_one_row():
    x = torch.randn(7, 100)
    packed, state, values = bnb(x)
    q = fq.quantize(x.reshape(1, 700), fq.nf4())
    same(q.scale.flatten(), state.absmax)
    same(q.data.flatten(), packed)
    same(fq.dequantize(q).reshape(7, 100), values)


@difference("bnb-rows")
def test_blocks_stay_within_a_row_where_bitsandbytes_runs_on():
    x = torch.randn(7, 100)
    _, state, _ = bnb(x)
    q = fq.quantize(x, fq.nf4())
    assert q.scale.shape == (7, 2) and state.absmax.shape == (11,)
    same(q.scale[:, 0], x[:, :64].abs().amax(-1))


@difference("bnb-reciprocal")
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_codes_are_of_exact_quotients_and_midpoints_where_those_of_bitsandbytes_are_rounded(kind):
    table = sorted_table(kind)
    middles = (table[1:] + table[:-1]) / 2  # in float32
    amax = torch.rand(400, 1, generator=torch.Generator().manual_seed(1)) + 1
    x = torch.zeros(400, 64)
    x[:, : len(middles)] = middles * amax  # halfway, but for a rounding
    x[:, 63] = amax[:, 0]
    packed, state, _ = bnb(x, kind)
    q = fq.quantize(x, codebook(kind))
    same(q.scale[:, 0], state.absmax)
    predicted = table[torch.bucketize(x * (1 / amax), middles)]
    theirs = state.code[fq.unpack_fp4x2(packed).int()].reshape(x.shape)
    explained(codes_as_values(q), theirs + 0.0, predicted)
    exact = (table[1:].double() + table[:-1].double()) / 2
    same(codes_as_values(q), table[torch.bucketize((x / amax).double(), exact)])


@difference("bnb-special")
def test_scales_are_at_least_the_smallest_normal_and_blocks_with_inf_are_nan():
    for name in ("zeros", "minus zeros"):
        q, (packed, state, values) = fq.quantize(special(name), fq.nf4()), bnb(special(name))
        assert (q.scale == 2.0**-126).all() and (state.absmax == 0).all()
        same(q.data.flatten(), packed)
        same(fq.dequantize(q), values)
    q, (packed, state, _) = fq.quantize(special("subnormal"), fq.nf4()), bnb(special("subnormal"))
    differ(q.scale.flatten(), state.absmax, state.absmax < 2.0**-126)
    assert not torch.equal(q.data.flatten(), packed)  # there 1/1e-38 is the largest factor
    for name in ("NaN", "inf", "-inf"):
        q, (packed, state, values) = fq.quantize(special(name), fq.nf4()), bnb(special(name))
        assert torch.isnan(q.scale[0, 0]) and not torch.isfinite(state.absmax[0])
        assert torch.isnan(fq.dequantize(q)[0, :64]).all() and torch.isnan(values[0, :64]).all() == (
            name == "NaN"
        )
        same(q.data.flatten()[32:], packed[32:])
        same(q.scale.flatten()[1:], state.absmax[1:])


@difference("bnb-nested")
def test_double_quantization_is_linear_and_codes_obey_it_where_bitsandbytes_has_a_table():
    x = ordinary(rows=64)
    packed, state, values = bnb(x, nested=True)
    plain, plain_state, _ = bnb(x)
    same(packed, plain)  # the codes do not know of the second rounding
    same(state.offset, plain_state.absmax.mean())
    nested = state.state2
    scale = nested.code[state.absmax.int()] * nested.absmax.repeat_interleave(256) + state.offset
    table = NF4[fq.unpack_fp4x2(packed).int()].reshape(-1, 64)
    same((table * scale.unsqueeze(-1)).reshape(64, 512), values)
    q = fq.quantize(x, fq.nf4(double_quant=True))
    assert (q.scale.data.dtype, state.absmax.dtype) == (torch.uint8, torch.uint8)
    largest = fq.quantize(x, fq.nf4()).scale
    same(q.scale.data, torch.round(largest / (largest.amax(-1, keepdim=True) / 255)).to(torch.uint8))
    stored = expand(fq.dequantize(q.scale), x.shape, (1, 64))
    same(q.data, fq.pack_int4(q.layout.element.encode(x / stored)))  # the codes are those of the stored scale
    assert not torch.equal(q.data.flatten(), packed)


def test_fp4_is_a_codebook():
    for x in (ordinary(), special(*REGULAR)):
        packed, state, values = bnb(x, "fp4")
        q = fq.quantize(x, codebook("fp4"))
        same(q.scale.flatten(), state.absmax)
        theirs = state.code[fq.unpack_fp4x2(packed).int()].reshape(x.shape)
        same(codes_as_values(q), theirs + 0.0)
        same(fq.dequantize(q) + 0.0, values + 0.0)
