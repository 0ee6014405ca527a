"""Elements: their limits, special values, stochastic rounding and wrong calls."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from oracle import ELEMENTS, FLOATS, INTS

from fq.layouts import element as E

NAMES = tuple(ELEMENTS)


def make(name: str) -> E.Element:
    return E.element(name)


def expected_values(name: str) -> np.ndarray:
    """The number that each code stands for."""
    return ELEMENTS[name].values


def plain(codes: torch.Tensor, bits: int) -> np.ndarray:
    """Codes as an element returns them, as unsigned integers of its width."""
    return codes.view(torch.uint8).numpy().astype(np.int64) % 2**bits


def stored(name: str) -> torch.Tensor:
    """All codes of an element, in the dtype it keeps them in."""
    element = make(name)
    return torch.arange(2**element.bits, dtype=torch.int64).to(torch.uint8).view(element.storage_dtype)


@pytest.mark.parametrize("name", NAMES)
def test_limits_are_those_of_the_format(name):
    element, want = make(name), expected_values(name)
    finite = want[np.isfinite(want)]
    assert element.bits == int(np.log2(len(want)))
    assert element.min == finite.min()
    assert element.max == np.abs(finite).max() if name not in INTS else element.max == finite.max()
    assert element.smallest == np.abs(finite[finite != 0]).min()
    if name in FLOATS:
        assert element.max_exponent == np.floor(np.log2(finite.max()))


@pytest.mark.parametrize(
    ("name", "nan", "inf"),
    [
        ("e2m1", 0x7, 0x7),
        ("e2m3", 0x1F, 0x1F),
        ("e3m2", 0x1F, 0x1F),
        ("e4m3", 0x7F, 0x7E),
        ("e5m2", 0x7F, 0x7B),
        ("e4m3fnuz", 0x80, 0x7F),
        ("ue5m3", 0xFF, 0xFE),
        ("int8", 0, 127),
        ("int4", 0, 7),
        ("uint4", 0, 15),
        ("nf4", 0, 15),
    ],
)
def test_nan_and_infinities_have_one_documented_code(name, nan, inf):
    element = make(name)
    x = torch.tensor([torch.nan, -torch.nan, torch.inf, -torch.inf])
    assert plain(element.encode(x), element.bits).tolist()[:3] == [nan, nan, inf]
    lowest = element.decode(element.encode(x))[3].item()
    assert lowest == element.min


def test_minus_zero_keeps_its_sign_where_the_format_has_one():
    zeros = torch.tensor([-0.0, -1e-30, 0.0, 1e-30])
    for name, sign in (("e2m1", 8), ("e4m3", 128), ("e5m2", 128), ("e2m3", 32)):
        assert plain(make(name).encode(zeros), make(name).bits).tolist() == [sign, sign, 0, 0]
    for name in ("e4m3fnuz", "ue4m3", "int4"):  # in fnuz the code of minus zero is NaN
        assert plain(make(name).encode(zeros), make(name).bits).tolist() == [0, 0, 0, 0]


def test_fp4_ties_go_to_the_even_code():
    x = torch.tensor([6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    want = torch.tensor([6.0, 0, 1, 1, 2, 2, 4, 4])
    element = make("e2m1")
    assert torch.equal(element.decode(element.encode(x)), want)
    assert torch.equal(element.decode(element.encode(-x)), -want)


NOISY = ("int8", "int4", "uint3", "e2m1", "e2m3", "e4m3", "e5m2", "ue5m3", "e4m3fnuz", "e3m0", "nf4")


@pytest.mark.parametrize("name", NOISY)
@pytest.mark.parametrize("u", [0.0, 0.25, 0.5, 1 - 2.0**-24])
def test_stochastic_rounding_leaves_grid_points(name, u):
    element = make(name)
    codes = stored(name)
    values = element.decode(codes)
    kept = torch.isfinite(values)
    again = element.decode(element.encode(values[kept], torch.full((int(kept.sum()),), u)))
    assert torch.equal(again, values[kept])


@pytest.mark.parametrize("name", NOISY)
def test_stochastic_rounding_is_unbiased(name):
    """Over evenly spread noise the mean of the results is the number itself."""
    element, n = make(name), 128
    values = torch.from_numpy(np.unique(expected_values(name)[np.isfinite(expected_values(name))])).float()
    low, high = values[:-1], values[1:]
    for part in (0.125, 0.5, 0.8):
        x = low + (high - low) * part
        noise = ((torch.arange(n) + 0.5) / n).expand(len(x), n)
        rounded = element.decode(element.encode(x[:, None].expand(len(x), n), noise))
        assert ((rounded == low[:, None]) | (rounded == high[:, None])).all()
        error = (rounded.double().mean(1) - x.double()).abs()
        assert (error <= (high - low).double() / n).all()


@pytest.mark.parametrize("name", NOISY)
def test_stochastic_rounding_keeps_specials(name):
    element = make(name)
    x = torch.tensor([torch.nan, torch.inf, -torch.inf, 3e38, -3e38])
    noisy = element.encode(x, torch.full((5,), 0.7))
    assert torch.equal(noisy.view(torch.uint8), element.encode(x).view(torch.uint8))


@pytest.mark.parametrize("bits", [0, 9, -1])
@pytest.mark.parametrize("kind", [E.Int, E.UInt])
def test_impossible_widths_are_refused(kind, bits):
    with pytest.raises(ValueError, match=f"{kind.__name__}: bits must be 1 to 8, got {bits}"):
        kind(bits)


@pytest.mark.parametrize("bits", [True, 4.0, "4"])
def test_widths_that_are_no_integers_are_refused(bits):
    with pytest.raises(TypeError, match="bits must be an int"):
        E.Int(bits)


@pytest.mark.parametrize(
    ("make_it", "message"),
    [
        (lambda: E.Float(5, 3), "expected 2 to 8 bits"),
        (lambda: E.Float(0, 3), "expected 2 to 8 bits"),
        (lambda: E.Float(4, 3, special="funny"), "special must be finite, fn, ieee or fnuz, got 'funny'"),
        (lambda: E.Float(4, 3, bias=300), "beyond float32"),
        (lambda: E.Codebook((1.0,)), "expected 2 to 256 ascending values"),
        (lambda: E.Codebook((1.0, 0.0)), "expected 2 to 256 ascending values"),
        (lambda: E.Codebook((0.0, float("nan"))), "expected 2 to 256 ascending values"),
        (lambda: E.element("int9"), "unknown name 'int9'"),
        (lambda: E.element("e9"), "unknown name 'e9'"),
    ],
)
def test_impossible_elements_are_refused(make_it, message):
    with pytest.raises(ValueError, match=message):
        make_it()
