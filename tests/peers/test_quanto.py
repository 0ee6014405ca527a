"""Weight quantizers of optimum-quanto: codes, scales, shifts."""

from __future__ import annotations

import pytest
import torch
from common import all_but, difference, explained, ordinary, same, special
from optimum.quanto import (
    AbsmaxOptimizer,
    MaxOptimizer,
    qfloat8_e4m3fn,
    qfloat8_e5m2,
    qint2,
    qint4,
    qint8,
    quantize_weight,
)
from optimum.quanto.tensor.packed import PackedTensor
from torch import Tensor

import fq
from fq.layouts.block import expand

BYTES = {
    "int8:absmax_narrow": qint8,
    "fp8": qfloat8_e4m3fn,
    "e5m2": qfloat8_e5m2,
}
BITS = {"int4": qint4, "int2:asym": qint2}
REGULAR = all_but("zeros", "minus zeros", "NaN", "inf", "-inf", "subnormal")


def unpacked(packed: PackedTensor) -> Tensor:
    """Return the codes of parts of the rows, the first in the low bits."""
    bits = packed._bits
    parts = [packed._data >> bits * i & ((1 << bits) - 1) for i in range(8 // bits)]
    return torch.cat(parts)[: packed.shape[0]]


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PackedTensor, "unpack", unpacked)  # quanto's compiles C++ first, for minutes


def eight(x: Tensor, text: str) -> tuple[fq.QTensor, Tensor, Tensor]:
    """Return fq's QTensor, and quanto's scale and codes; one scale a row."""
    qtype = BYTES[text]
    scale = AbsmaxOptimizer()(x, qtype, axis=0)
    theirs = quantize_weight(x, qtype, 0, scale, optimized=False)
    return fq.quantize(x, fq.layout(text)), theirs._scale, theirs._data


@pytest.mark.parametrize("text", BYTES)
def test_bytes_of_float32_are_equal(text):
    for x in (ordinary(), ordinary(columns=333), special(*REGULAR)):
        q, scale, data = eight(x, text)
        same(q.scale, scale)
        same(q.data, data)


@difference("quanto-bfloat16")
@pytest.mark.parametrize("text", BYTES)
def test_bytes_are_computed_in_float32_where_quanto_uses_the_dtype_of_the_weight(text):
    x = ordinary(torch.bfloat16)
    q, scale, data = eight(x, text)
    wide = fq.quantize(x.float(), fq.layout(text))
    same(q.scale, wide.scale)
    same(q.data, wide.data)
    element = q.layout.element
    amax = x.abs().amax(-1, keepdim=True)
    explained(q.scale, scale.float(), (amax / element.max).float())
    scaled = x / scale  # rounded to bfloat16
    if element.bits == 8 and text.startswith("int8"):
        predicted = torch.clamp(torch.round(scaled), -128, 127).to(torch.int8)
    else:
        predicted = torch.clamp(scaled, element.min, element.max).to(q.data.dtype)
    explained(q.data, data, predicted)


@difference("quanto-special")
@pytest.mark.parametrize("text", BYTES)
def test_zeros_stay_zero_and_nonfinite_rows_become_nan(text):
    q, scale, data = eight(special("zeros", "minus zeros", "positive"), text)
    assert (scale[:2] == 0).all() and (q.scale[:2] == 2.0**-126).all()
    assert (q.data[:2].float() == 0).all()
    if text != "int8:absmax_narrow":  # of integers 0/0 is whatever the machine makes of it
        assert torch.isnan(data[:2].float()).all()
    same(q.data[2], data[2])
    q, scale, data = eight(special("NaN", "inf", "-inf", "positive"), text)
    assert torch.isnan(q.scale[:3]).all() and torch.isinf(scale[1:3]).all()
    same(q.data[3], data[3])
    q, scale, _ = eight(special("subnormal", "positive"), text)
    assert (q.scale[0] == 2.0**-126).all() and (scale[0] < 2.0**-126).all()


def few(x: Tensor, text: str) -> tuple[fq.QTensor, Tensor, Tensor, Tensor, Tensor]:
    """Return fq's QTensor, and quanto's scale, shift and codes in groups of 128, and values."""
    qtype = BITS[text]
    scale, shift = MaxOptimizer()(x, qtype, 0, 128)
    theirs = quantize_weight(x, qtype, 0, scale, shift, 128, optimized=False)
    codes = theirs._data.unpack().reshape(x.shape)
    grid = (x.shape[0], -1)
    q = fq.quantize(x, fq.layout(text))
    return q, scale.reshape(grid), shift.reshape(grid), codes, theirs.dequantize()


def counted(q: fq.QTensor) -> Tensor:
    """Return codes counted from the lowest."""
    bits = q.layout.element.bits
    return fq.unpack_bits(q.data, bits, q.shape[-1]) ^ (1 << (bits - 1))


@pytest.mark.parametrize("text", BITS)
def test_few_bits_of_float32_are_equal(text):
    for x in (ordinary(), special(*[name for name in REGULAR if name not in ("constant", "tiny")])):
        q, scale, shift, codes, _ = few(x, text)
        same(q.scale, scale)
        same(counted(q), codes)
        same(q.zero_point, -shift - q.layout.element.min * scale)


@difference("quanto-shift")
@pytest.mark.parametrize("text", BITS)
def test_codes_are_signed_about_a_zero_point_where_quanto_keeps_the_minimum(text):
    x = ordinary()
    q, scale, shift, codes, values = few(x, text)
    step, minimum = expand(scale, x.shape, (1, 128)), expand(shift, x.shape, (1, 128))
    predicted = codes * step - minimum
    explained(fq.dequantize(q), values, predicted)
    largest = x.unflatten(-1, (-1, 128)).abs().amax(-1)
    error = (fq.dequantize(q) - values).abs() / expand(largest, x.shape, (1, 128))
    assert error.max() < 2.0**-21


@difference("quanto-floor")
@pytest.mark.parametrize("text", BITS)
def test_a_range_is_at_least_1e_6_where_quanto_has_no_floor(text):
    for name in ("zeros", "constant", "tiny"):
        q, scale, _, _, _ = few(special(name), text)
        steps = (1 << q.layout.element.bits) - 1
        assert (q.scale == torch.tensor(1e-6) / steps).all() and (scale < 1e-8).all()
        if name != "tiny":
            assert (scale == 0).all()
            torch.testing.assert_close(fq.dequantize(q), special(name), atol=0, rtol=2.0**-23)


@difference("quanto-few-bfloat16")
@pytest.mark.parametrize("text", BITS)
def test_few_bits_are_computed_in_float32_where_quanto_uses_the_dtype_of_the_weight(text):
    x = ordinary(torch.bfloat16)
    q, scale, shift, codes, _ = few(x, text)
    same(q.data, fq.quantize(x.float(), fq.layout(text)).data)
    blocks = x.unflatten(-1, (-1, 128))
    top = (1 << q.layout.element.bits) - 1
    same(scale, (blocks.amax(-1) - blocks.amin(-1)) / top)
    same(shift, -blocks.amin(-1))
    predicted = torch.clamp(torch.round((blocks + shift.unsqueeze(-1)) / scale.unsqueeze(-1)), 0, top)
    explained(counted(q), codes, predicted.flatten(-2).to(torch.uint8))


@difference("quanto-packing")
@pytest.mark.parametrize("text", BITS)
def test_codes_pack_along_the_row_where_quanto_packs_parts_of_the_matrix(text):
    codes = torch.randint(0, 1 << BITS[text].bits, (16, 128), dtype=torch.uint8)
    packed = PackedTensor.pack(codes, BITS[text].bits)
    same(unpacked(packed), codes)
    parts = (
        codes.unflatten(0, (8 // packed._bits, -1)).movedim(0, -1).flatten(1)
    )  # one of each part, side by side
    ours = fq.pack_bits(parts, packed._bits)
    same(ours, packed._data)
    assert not torch.equal(fq.pack_bits(codes, packed._bits).flatten(), ours.flatten())
