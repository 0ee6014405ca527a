"""Elements against ml_dtypes: every code decoded, all float16 and a million float32 patterns encoded."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from common import difference

import fq
from fq.layouts import scale as scales
from fq.layouts.element import Float, element

FLOATS = {
    "e2m1": ml_dtypes.float4_e2m1fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
    "e4m3fnuzb11": ml_dtypes.float8_e4m3b11fnuz,
    "e4m3ieee": ml_dtypes.float8_e4m3,
    "e3m4ieee": ml_dtypes.float8_e3m4,
}
INTEGERS = ("int1", "uint1", "int2", "uint2", "int4", "uint4")


def inputs() -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    exponents = generator.integers(-20, 20, 500_000)
    return {
        "all float16": np.arange(65536, dtype=np.uint16).view(np.float16),
        "any float32": generator.integers(0, 2**32, 1_000_000, dtype=np.uint32).view(np.float32),
        "near": np.ldexp(generator.standard_normal(500_000), exponents).astype(np.float32),
        "edges": np.array([0.0, -0.0, np.inf, -np.inf], dtype=np.float32),
    }


INPUTS = inputs()


def encoded(name: str, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return x as float32, fq's codes and those of ml_dtypes, in one byte each."""
    wide = x.astype(np.float32)
    codes = element(name).encode(torch.from_numpy(wide)).view(torch.uint8)
    return wide, codes.numpy(), x.astype(FLOATS[name]).view(np.uint8)


def float_element(name: str) -> Float:
    found = element(name)
    assert isinstance(found, Float)
    return found


def first_over(found: Float) -> float:
    """The tie between the largest number and the one that would follow it: what rounds past the largest."""
    spacing = found.max - found.decode(code(found, found.largest_code - 1)).item()
    return found.max + spacing / 2


def code(found: Float, number: int) -> torch.Tensor:
    codes = torch.tensor([number], dtype=torch.uint8)
    return codes if found.native is None else codes.view(found.native)


@pytest.mark.parametrize("name", FLOATS)
def test_every_code_means_the_same_number(name):
    found = float_element(name)
    codes = torch.arange(1 << found.bits, dtype=torch.uint8)
    ours = found.decode(codes if found.native is None else codes.view(found.native)).numpy()
    theirs = codes.numpy().view(FLOATS[name]).astype(np.float32)
    nan = np.isnan(theirs)
    assert np.array_equal(np.isnan(ours), nan)
    assert np.array_equal(ours.view(np.int32)[~nan], theirs.view(np.int32)[~nan])


@pytest.mark.parametrize("name", FLOATS)
def test_limits_are_those_of_finfo(name):
    found, info = float_element(name), ml_dtypes.finfo(FLOATS[name])
    ours = (found.max, found.min, found.smallest_normal, found.smallest, found.eps, found.bits)
    theirs = (info.max, info.min, info.smallest_normal, info.smallest_subnormal, info.eps, info.bits)
    assert ours == tuple(float(n) for n in theirs)


@pytest.mark.parametrize("source", INPUTS)
@pytest.mark.parametrize("name", FLOATS)
def test_numbers_in_range_have_the_same_code(name, source):
    x, ours, theirs = encoded(name, INPUTS[source])
    found = float_element(name)
    within = np.abs(x) < first_over(found) if found.has_nan else ~np.isnan(x)  # without NaN both saturate
    assert np.array_equal(ours[within], theirs[within]) and within.sum() > 1


@difference("ml-dtypes-overflow")
@pytest.mark.parametrize("name", [n for n in FLOATS if float_element(n).has_nan])
def test_overflow_saturates_where_ml_dtypes_makes_it_inf_or_nan(name):
    found = float_element(name)
    for source in ("any float32", "edges"):
        x, ours, theirs = encoded(name, INPUTS[source])
        # a tie goes to the even code, which is the one beyond the largest where that is odd
        limit, odd = first_over(found), found.largest_code % 2
        over = (np.abs(x) >= limit) if odd else (np.abs(x) > limit)
        decoded = theirs[over].view(FLOATS[name]).astype(np.float32)
        assert np.isinf(decoded).all() if found.has_inf else np.isnan(decoded).all()
        values = ours[over].view(FLOATS[name]).astype(np.float32)
        assert np.array_equal(values, np.copysign(np.float32(found.max), x[over])) and over.any()


@difference("ml-dtypes-nan")
@pytest.mark.parametrize("name", FLOATS)
def test_nan_is_one_code_where_ml_dtypes_has_its_own(name):
    found = float_element(name)
    x, ours, theirs = encoded(name, INPUTS["all float16"])
    nan = np.isnan(x)
    assert (ours[nan] == found.nan_code).all()
    decoded = theirs[nan].view(FLOATS[name]).astype(np.float32)
    if found.has_nan:
        assert np.isnan(decoded).all()
        assert (ours[nan] != theirs[nan]).any() == (found.special != "fnuz")
    else:
        assert (decoded == 0).all()


def test_all_codes_of_e8m0_mean_the_same_number():
    codes = torch.arange(256, dtype=torch.uint8)
    ours = scales.load(codes, scales.E8M0).numpy()
    theirs = codes.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    assert np.isnan(ours[255]) and np.isnan(theirs[255])
    assert np.array_equal(ours[:255].view(np.int32), theirs[:255].view(np.int32))


@difference("ml-dtypes-e8m0")
def test_a_scale_is_rounded_up_to_e8m0_where_ml_dtypes_rounds_to_nearest():
    x = np.abs(INPUTS["near"])
    ours = scales.store(torch.from_numpy(x), scales.E8M0).numpy().astype(int)
    theirs = x.astype(ml_dtypes.float8_e8m0fnu).view(np.uint8).astype(int)
    fraction, exponent = np.frexp(x)  # of 1/2 to 1
    assert np.array_equal(ours, exponent + 126 + (fraction > 0.5))
    down = (fraction > 0.5) & (fraction < 0.75)  # nearer to the power of two below
    even = (fraction == 0.75) & (ours != theirs)  # a tie
    assert np.array_equal(ours - theirs, (down | even).astype(int)) and down.any()


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_in_range_have_the_same_code(name):
    found, dtype = element(name), getattr(ml_dtypes, name)
    numbers = np.arange(found.min, found.max + 1, dtype=np.float32)
    ours = found.encode(torch.from_numpy(numbers)).numpy()
    assert np.array_equal(ours.astype(int), numbers.astype(dtype).astype(int))
    mask = (1 << found.bits) - 1
    codes = torch.arange(mask + 1, dtype=torch.uint8)
    theirs = codes.numpy().view(dtype).astype(np.float32)
    assert np.array_equal(found.decode(codes).numpy(), theirs)
    assert np.array_equal(
        fq.pack_bits(torch.from_numpy(ours), 8).numpy() & mask, numbers.astype(dtype).view(np.uint8) & mask
    )


@difference("ml-dtypes-integers")
@pytest.mark.parametrize("name", INTEGERS)
def test_integers_round_and_saturate_where_ml_dtypes_truncates_and_wraps(name):
    found = element(name)
    x = np.arange(-20, 20, 0.25, dtype=np.float32)
    ours = found.encode(torch.from_numpy(x)).numpy().astype(int)
    theirs = x.astype(getattr(ml_dtypes, name)).astype(int)
    assert np.array_equal(ours, np.clip(np.rint(x), found.min, found.max).astype(int))
    span = 1 << found.bits
    low = int(found.min)
    assert np.array_equal(theirs, (np.trunc(x).astype(int) - low) % span + low)
