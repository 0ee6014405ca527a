"""Every preset, rule and width: codes, scales and values are the oracle's, on all kinds of input."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from formats import EVERY, SPECS, assert_matches, expected
from oracle import ELEMENTS, LARGEST
from oracle_formats import Format, Quantized, quantize

import fq
from fq.layouts import scale as scales


def hard() -> torch.Tensor:
    """Rows of zeros, NaN, infinities, subnormals, huge numbers, one sign, ties; blocks end in the middle."""
    x = torch.randn(14, 75)
    x[1] = 0.0
    x[2, 7], x[3, 50], x[4, 40] = torch.nan, torch.inf, -torch.inf
    x[5], x[6, :32] = -0.0, 0.0
    x[7], x[8] = x[7].abs(), -x[8].abs()
    x[9] *= 1e-41
    x[10] *= torch.exp2(torch.randint(-140, 120, (75,)).float())
    x[11] = x[11].clamp(-3, 3) * 1e38
    x[12] = torch.randint(-24, 25, (75,)) / 4
    x[13] = torch.tensor([LARGEST, -LARGEST, 1.0]).repeat(25)
    return x


def others() -> Iterator[torch.Tensor]:
    yield torch.randn(130, 140)
    yield torch.randn(5, 37)
    yield torch.randn(1, 1)
    yield torch.randn(4, 40) * 1e-38
    yield torch.randn(4, 40) * 1e-41
    yield torch.randn(4, 40).clamp(-3, 3) * 1e38
    yield torch.randn(8, 64) * torch.exp2(torch.randint(-140, 127, (8, 1)).float())
    yield torch.randn(8, 64) * torch.exp2(torch.randint(-20, 20, (8, 64)).float())
    yield torch.rand(6, 50) + 3
    for value in (0.0, -0.0, 3.0, -3.0, 1e-45, LARGEST, -LARGEST):
        yield torch.full((2, 40), value)


@pytest.mark.parametrize("name", EVERY)
def test_hard_rows_are_the_oracles(name):
    """Also where one scale spans the matrix: the rows that poison it are then taken one by one."""
    x = hard()
    assert_matches(fq.quantize(x, EVERY[name]), expected(name, x))
    finite = x[torch.isfinite(x).all(1)]
    assert_matches(fq.quantize(finite[:-1], EVERY[name]), expected(name, finite[:-1]))


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_other_inputs_are_the_oracles(name):
    for x in others():
        assert_matches(fq.quantize(x, EVERY[name]), expected(name, x))


# Elements, blocks, scales, zero points and rules as no preset puts them together.
COMBINATIONS = [
    "int5:g16:asym:scale=e8m0",
    "uint6:block-1x8:int-zp:scale=e4m3",
    "int8:block3x5:absmax_full:scale=float16",
    "uint3:g1:sym:absmax_full:scale=bfloat16",
    "e3m0:block4x-1:scale=e8m0:ceil",
    "e4m3ieee:tensor:scale=float16",
    "e3m4:block3x5:mse",
    "e5m2fnuz:g7:scale=(ue5m3:block4x-1:scale=e8m0)",
    "e4m3fnuzb11:g16:scale=(int8:g2:scale=bfloat16)",
    "ue4m3:row:scale=(e5m2:tensor)",
    "nf4:g7:scale=e8m0",
    "nf4:block3x5:scale=(e4m3:g2:scale=float16):mse",
    "binary:block-1x8:scale=float16",
    "int8:g7:int-zp:scale=(int8:g7:scale=float16)",
    "int2:row:int-zp:scale=(uint4:g1:sym:scale=e8m0):mse",
    "uint6:g16:zp=(fp8:g7:scale=e4m3):scale=(uint6:tensor:sym:scale=bfloat16)",
    "int4:g7:zp=(int8:row):scale=(ue4m3:g1:scale=(uint8:tensor:sym))",
]


def spec_of(layout: fq.Layout) -> Format:
    """The oracle's description of a layout."""
    scale, zero = layout.scale, layout.zero_point
    return Format(
        ELEMENTS[layout.element.name],
        layout.block,
        spec_of(scale) if isinstance(scale, fq.Layout) else scales.dtype_name(scale),
        spec_of(zero) if isinstance(zero, fq.Layout) else zero,
        layout.rule,
    )


@pytest.mark.parametrize("key", COMBINATIONS)
def test_combinations_are_the_oracles(key):
    layout = fq.layout(key)
    for x in (hard(), hard()[[0, 1, 5, 6, 7, 8, 12]], hard()[[0, 7, 8, 9, 11, 12]]):
        assert_matches(fq.quantize(x, layout), quantize(x, spec_of(layout)))


def test_presets_are_made_of_what_they_say():
    assert {name: spec_of(layout) for name, layout in EVERY.items()} == SPECS


def test_every_preset_and_rule_is_compared():
    """A rule, scale dtype or kind of zero point that is added needs a row in `formats`."""
    layouts = list(EVERY.values())
    assert {layout.rule for layout in layouts} == set(scales.RULES)
    dtypes = {layout.scale for layout in layouts if not isinstance(layout.scale, fq.Layout)}
    assert {scales.dtype_name(d) for d in dtypes} == {"float32", "float16", "bfloat16", "e4m3", "e8m0"}
    zeros = {"nested" if isinstance(z, fq.Layout) else z for z in (layout.zero_point for layout in layouts)}
    assert zeros == {None, "int", "float", "nested"}


@pytest.mark.parametrize(
    ("name", "row", "codes", "scale", "values"),
    [
        ("intx_3", [3.5, -3.5, 1.0, 0.5], [3, 4, 1, 0], 1.0, [3.0, -4.0, 1.0, 0.0]),
        ("binary", [1.0, -2.0, 3.0, 0.0], [1, 0, 1, 0], 1.5, [1.5, -1.5, 1.5, -1.5]),
        ("uint4", [-4.0, 11.0, 0.5, 1.5], [0, 15, 4, 6], 1.0, [-4.0, 11.0, 0.0, 2.0]),
        ("fp8", [448.0, 17.0, -19.0, 0.0], [0x7E, 0x58, 0xDA, 0], 1.0, [448.0, 16.0, -20.0, 0.0]),
        ("nf4", [-2.0, 0.0, 0.32, 2.0], [0, 7, 9, 15], 2.0, [-2.0, 0.0, 0.32186040282249451, 2.0]),
        ("mxfp6", [28.0, 1.0, -0.0625, 13.0], [0x1F, 12, 33, 26], 127, [28.0, 1.0, -0.0625, 12.0]),
    ],
)
def test_small_examples_worked_by_hand(name, row, codes, scale, values):
    """So that oracle and library cannot be wrong alike."""
    for got in (expected(name, torch.tensor([row])), quantized(torch.tensor([row]), name)):
        assert (got.codes.tolist(), got.scale.tolist(), got.values.tolist()) == ([codes], [[scale]], [values])


def quantized(x: torch.Tensor, name: str) -> Quantized:
    q = fq.quantize(x, EVERY[name])
    want = quantize(x.numpy(), SPECS[name])
    assert_matches(q, want)
    return Quantized(want.codes, q.scale.numpy(), fq.dequantize(q).numpy())
