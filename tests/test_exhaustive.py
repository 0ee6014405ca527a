"""Encodings, exhaustively: every code and half-precision number, 2^24 float32 ones, all pairs of scales."""

from __future__ import annotations

import functools

import numpy as np
import oracle
import pytest
import torch
from oracle import ELEMENTS, f32

import fq
from fq.layouts import scale as scales
from fq.layouts.element import element as make

STORES = ("float32", "float16", "bfloat16", "e4m3", "e8m0")
HALVES = ("float16", "bfloat16")


def stored(name: str) -> torch.Tensor:
    """All codes of an element, in the dtype it keeps them in."""
    bits = make(name).bits
    return torch.arange(2**bits, dtype=torch.int64).to(torch.uint8).view(make(name).storage_dtype)


def plain(codes: torch.Tensor, bits: int) -> np.ndarray:
    """Codes as an element returns them, as unsigned integers of its width."""
    return codes.view(torch.uint8).numpy().astype(np.int64) % 2**bits


@functools.cache
def half(dtype: str) -> torch.Tensor:
    """All 65536 numbers of a half-precision dtype, in float32."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    return bits.view(getattr(torch, dtype)).to(torch.float32)


@functools.cache
def edges() -> torch.Tensor:
    """The places where the rounding of an element is decided, with their neighbours."""
    points = []
    for kind in ELEMENTS.values():
        values = np.unique(kind.values[np.isfinite(kind.values)])
        points += [values, (values[1:] + values[:-1]) / 2, values * 1.25]
    at = np.unique(np.concatenate(points).astype(np.float32))
    up, down = np.nextafter(at, np.float32(np.inf)), np.nextafter(at, np.float32(-np.inf))
    tiny = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 2.0**-149, -(2.0**-149)], np.float32)
    return torch.from_numpy(np.concatenate([at, up, down, tiny]))


def floats(part: int) -> torch.Tensor:
    """One of 16 parts of 2^24 float32 bit patterns, none twice within a half.

    The first half has one pattern of each sign, exponent and leading 14 mantissa bits; the second has those
    with 12 mantissa bits alone, where ties are, their neighbours, and their middles.
    """
    i = np.arange(2**20, dtype=np.uint32) + np.uint32(part % 8 << 20)
    if part < 8:
        bits = (i << np.uint32(9)) + (i * np.uint32(2654435761) >> np.uint32(23))
    else:
        offset = np.array([0, 1, 2**32 - 1, 2**10], np.uint32)[i % 4]
        bits = (i // np.uint32(4) << np.uint32(11)) + offset
    return torch.from_numpy(bits.view(np.float32))


def test_the_bit_patterns_are_spread_over_all_of_float32():
    i = np.arange(2**20)
    for part in range(8):
        leading = floats(part).numpy().view(np.uint32) >> 9  # sign, exponent, 14 bits
        np.testing.assert_array_equal(leading, i + (part << 20))
        ties = floats(part + 8).numpy()[::4].view(np.uint32)
        np.testing.assert_array_equal(ties, ((i + (part << 20)) // 4 << 11)[::4])


# --- elements ---


@pytest.mark.parametrize("name", ELEMENTS)
def test_every_code_decodes_as_specified_and_encodes_back(name):
    element, want = make(name), ELEMENTS[name].values
    values = element.decode(stored(name))
    assert values.dtype == torch.float32
    np.testing.assert_array_equal(values.double().numpy(), want)
    kept = np.isfinite(want)
    np.testing.assert_array_equal(np.signbit(values.numpy()[kept]), np.signbit(want[kept]))
    back = plain(element.encode(values), element.bits)
    np.testing.assert_array_equal(back[kept], np.arange(2**element.bits)[kept])
    assert (back[np.isnan(want)] == ELEMENTS[name].nan).all()
    infinite = np.isinf(want)  # infinities saturate: the code below
    np.testing.assert_array_equal(back[infinite], np.arange(2**element.bits)[infinite] - 1)


def same_codes(name: str, x: torch.Tensor) -> None:
    element = make(name)
    codes = element.encode(x)
    assert codes.dtype == element.storage_dtype or codes.dtype == torch.int8  # int1..7 before packing
    np.testing.assert_array_equal(plain(codes, element.bits), ELEMENTS[name].encode(x.double().numpy()))


@pytest.mark.parametrize("name", ELEMENTS)
def test_every_half_precision_number_encodes_to_the_nearest(name):
    for x in (half("float16"), half("bfloat16"), edges()):
        same_codes(name, x)


@pytest.mark.slow
@pytest.mark.parametrize("name", ELEMENTS)
def test_float32_bit_patterns_encode_to_the_nearest(name):
    for part in range(16):
        same_codes(name, floats(part))


# --- scales ---


def same_scales(name: str, x: torch.Tensor) -> None:
    kept = scales.store(x, scales.dtype_of(name))
    np.testing.assert_array_equal(kept.to(torch.float64).numpy(), oracle.store(x.double().numpy(), name))


@pytest.mark.parametrize("name", STORES)
def test_every_half_precision_number_is_kept_as_the_nearest_scale(name):
    for x in (half("float16"), half("bfloat16"), edges()):
        same_scales(name, x)


@pytest.mark.slow
@pytest.mark.parametrize("name", STORES)
def test_float32_bit_patterns_are_kept_as_the_nearest_scale(name):
    for part in range(16):
        same_scales(name, floats(part))


def test_every_e8m0_byte_is_a_power_of_two_and_so_is_its_reciprocal():
    bytes_ = torch.arange(256, dtype=torch.uint8)
    values = scales.load(bytes_, "e8m0")
    want = np.ldexp(1.0, np.arange(255) - 127).astype(np.float32)
    np.testing.assert_array_equal(values[:255].numpy().view(np.int32), want.view(np.int32))
    assert values[255].isnan()
    # byte 254 is 2^127, whose reciprocal is subnormal
    np.testing.assert_array_equal(
        (1 / values[:255]).view(torch.int32), values[:255].flip(0).view(torch.int32)
    )
    assert (1 / values[254]).view(torch.int32).item() == 0x00400000
    back = scales.store(values, "e8m0")
    assert torch.equal(back, bytes_)


@pytest.mark.parametrize("name", ["e2m1", "e2m3", "e3m2", "e4m3", "e5m2"])
def test_every_code_under_every_e8m0_byte(name):
    """Dequantized, their product, which saturates; divided by the scale again, the same code."""
    element, kind = make(name), ELEMENTS[name]
    finite = np.isfinite(kind.values)
    codes = torch.from_numpy(np.arange(2**element.bits)[finite]).to(torch.uint8)
    rows = codes.expand(256, -1)
    data = (
        fq.pack_bits(rows, element.bits)
        if element.bits < 8
        else rows.contiguous().view(element.storage_dtype)
    )
    layout = fq.Layout(element, (1, -1), "e8m0")
    bytes_ = torch.arange(256, dtype=torch.uint8)[:, None]
    q = fq.QTensor(data, bytes_, layout, torch.float32, (len(codes),))
    scale = oracle.load(bytes_.numpy(), "e8m0")
    want = np.clip(f32(kind.values[finite] * scale), -oracle.LARGEST, oracle.LARGEST)
    got = fq.dequantize(q)
    np.testing.assert_array_equal(got.double().numpy(), want)
    exact = np.abs(kind.values[finite] * scale) == np.abs(want)
    again = fq.quantize(got, layout, scale=scales.load(bytes_, "e8m0"))
    np.testing.assert_array_equal(again.scale.numpy(), bytes_.numpy())
    back = (
        fq.unpack_bits(again.data, element.bits, len(codes))
        if element.bits < 8
        else again.data.view(torch.uint8)
    )
    assert exact[:255].mean() > 0.9
    np.testing.assert_array_equal(back.numpy()[exact], rows.numpy()[exact])


def test_every_product_of_nvfp4_scales_is_rounded_once():
    """127 e4m3 block scales by 127 outer ones by 8 codes: the code times the one float32 product."""
    g = torch.Generator().manual_seed(0)
    mantissa = torch.cat([torch.tensor([1.0, 2.0 - 2.0**-23]), 1 + torch.rand(125, generator=g)])
    outer = torch.ldexp(mantissa, torch.arange(127) - 80)  # 2^-80 to 2^47
    blocks = torch.arange(127, dtype=torch.uint8)
    scale = fq.QTensor(
        blocks.view(torch.float8_e4m3fn)[None, :, None].expand(127, 127, 1),
        outer[:, None, None],
        fq.layout("fp8:tensor"),
        torch.float32,
        (1,),
    )
    data = fq.pack_bits(torch.arange(8, dtype=torch.uint8), 4).expand(127, 127, 4)
    layout = fq.layout("nvfp4:row")
    got = fq.dequantize(fq.QTensor(data, scale, layout, torch.float32, (8,)))
    block = oracle.E4M3.decode(np.arange(127))[None, :, None]
    wide, values = outer.double().numpy()[:, None, None], oracle.E2M1.decode(np.arange(8))
    want = f32(values * f32(block * wide))
    np.testing.assert_array_equal(got.double().numpy(), want)
    # Other orders of the same product round differently, so the order shows.
    assert (f32(f32(values * wide) * block) != want).mean() > 0.05
    assert (f32(values * block * wide) != want).mean() > 0.05
