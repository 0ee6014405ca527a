"""Layouts: text, JSON, pickles and equality agree, and what contradicts itself is refused."""

from __future__ import annotations

import copy
import itertools
import json
import pickle

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fq
from fq.layouts import element as E
from fq.layouts import scale as scales
from fq.layouts.storage import STORAGES

# text -> the same layout by its parts
SPELLED = {
    "int8": fq.int8(),
    "int8:tensor": fq.int8(block=(-1, -1)),
    "int8:block128x64": fq.int8(block=(128, 64)),
    "int8:absmax_full": fq.int8(rule="absmax_full"),
    "int8:scale=bfloat16:absmax_narrow": fq.int8(rule="absmax_narrow", scale=torch.bfloat16),
    "int8@int8": fq.int8(act=fq.int8()),
    "int4": fq.int4(),
    "int4:g32": fq.int4(32),
    "int4:row": fq.int4(-1),
    "int4:sym": fq.int4(symmetric=True),
    "int4:g64:sym:axis-2": fq.int4(64, symmetric=True, axis=-2),
    "int4:scale=float16": fq.int4(scale=torch.float16),
    "mxfp4": fq.mxfp4(),
    "mxfp4:floor": fq.mxfp4("floor"),
    "mxfp4:rceil@mxfp4:ceil": fq.mxfp4("rceil", act=fq.mxfp4("ceil")),
    "nvfp4": fq.nvfp4(),
    "nvfp4@nvfp4": fq.nvfp4(act=fq.nvfp4()),
    "nvfp4:scale=e4m3": fq.nvfp4(scale="e4m3"),
    "nvfp4:scale=(fp8)": fq.nvfp4(scale=fq.layout("fp8:row")),
    "uint4": fq.Layout(E.UInt(4), (1, 128), zero_point="int"),
    "uint4:zp=(int8:g8)": fq.Layout(E.UInt(4), (1, 128), zero_point=fq.layout("int8:g8")),
    "fp8:block128x128": fq.Layout(E.E4M3, (128, 128)),
    "mxfp6": fq.Layout(E.Float(3, 2), (1, 32), "e8m0"),
    "mxfp8:even": fq.Layout(E.E4M3, (1, 32), "e8m0", rule="even"),
    "nf4:scale=(int8:g256)": fq.Layout(E.NF4, (1, 64), fq.layout("int8:g256")),
    "e3m2fn:g32": fq.Layout(E.Float(3, 2, special="fn"), (1, 32)),
    "ue4m3b9": fq.Layout(E.Float(4, 3, False, 9), (1, -1)),
    "lut(-1.5,0.0,2.0):g4": fq.Layout(E.Codebook((-1.5, 0.0, 2.0)), (1, 4)),
}
# other ways to say the same
ALIASES = {
    "int8:row": "int8",
    "int8:token": "int8",
    "int4:g128:sym": "int4:sym",
    "int4:g128": "int4",
    "int8:row@int8:token": "int8@int8",
    "int8:sym": "int8",
    "mxfp4:even": "mxfp4",
    "mxfp4:scale=e8m0": "mxfp4",
    "int8:canonical": "int8",
    "int4:minmax": "int4",
    "uint4:int-zp": "uint4",
    "nvfp4:scale=(fp8:tensor)": "nvfp4",
    "e2m1:g32:scale=e8m0": "mxfp4",
    "e4m3": "fp8",
    "int4:axis-2:g64:sym": "int4:g64:sym:axis-2",
}


@pytest.mark.parametrize("text", SPELLED)
def test_text_and_parts_say_the_same(text):
    layout = SPELLED[text]
    assert fq.layout(text) == layout
    assert str(layout) == layout.key == text
    assert repr(layout) == f"fq.layout({text!r})"
    assert eval(repr(layout), {"fq": fq}) == layout


@pytest.mark.parametrize(("alias", "text"), ALIASES.items())
def test_other_spellings_have_one_key(alias, text):
    assert fq.layout(alias).key == text


def test_fields_survive_the_text():
    q = fq.layout("int4:g64:scale=float16:axis-2@int8:absmax_full")
    assert (q.element, q.block, q.scale, q.zero_point) == (E.Int(4), (1, 64), torch.float16, "float")
    assert (q.axis, q.storage, q.rule, q.act.rule) == (-2, "canonical", "minmax", "absmax_full")
    nested = fq.layout("nvfp4").scale
    assert (nested.element, nested.block, nested.scale, nested.rule) == (
        E.E4M3,
        (-1, -1),
        torch.float32,
        "absmax",
    )


def test_different_layouts_are_different():
    for a, b in itertools.combinations(SPELLED.values(), 2):
        assert a != b
        assert a.key != b.key
    assert len(set(SPELLED.values())) == len(SPELLED)
    assert fq.int8() != "int8"


@pytest.mark.parametrize("layout", SPELLED.values(), ids=str)
def test_copies_are_equal(layout):
    for other in (
        pickle.loads(pickle.dumps(layout)),
        copy.copy(layout),
        copy.deepcopy(layout),
        fq.Layout.from_json(json.loads(json.dumps(layout.to_json()))),
    ):
        assert other == layout
        assert hash(other) == hash(layout)
        assert other.to_json() == layout.to_json()
        assert other.scale == layout.scale
    assert {layout: 1}[fq.layout(layout.key)] == 1


def test_a_layout_cannot_be_changed():
    with pytest.raises(AttributeError):
        fq.int8().axis = -2


def test_torch_loads_layouts_without_pickled_code(tmp_path):
    torch.save(fq.quantize(torch.ones(2, 4), fq.nvfp4()), tmp_path / "q.pt")
    assert torch.load(tmp_path / "q.pt", weights_only=True).layout == fq.layout("nvfp4:row")


# --- random layouts ---

elements = st.one_of(
    st.builds(E.Int, st.integers(1, 8)),
    st.builds(E.UInt, st.integers(1, 8)),
    st.builds(
        E.Float,
        st.integers(1, 5),
        st.integers(0, 2),
        st.booleans(),
        st.none() | st.integers(-5, 20),
        st.none() | st.sampled_from(["finite", "fn", "fnuz", "ieee"]),
    ),
    st.sampled_from([E.E2M1, E.E4M3, E.E5M2, E.NF4]),
    st.builds(
        lambda v: E.Codebook(tuple(sorted(v))),
        st.sets(st.floats(-8, 8, width=32).filter(lambda v: str(v) != "-0.0"), min_size=2, max_size=5),
    ),
)
sizes = st.just(-1) | st.integers(1, 2**31 - 1)
plain_scales = st.sampled_from(["float32", "float16", "bfloat16", "e4m3", "e8m0"])


@st.composite
def layouts(draw, depth: int = 0):
    nested = layouts(depth + 1).filter(lambda t: t.act is None and t.axis == -1)
    wide = depth < 2
    try:
        return fq.Layout(
            draw(elements),
            draw(st.tuples(sizes, sizes)),
            draw(plain_scales | nested if wide else plain_scales),
            draw(st.sampled_from([None, None, "int", "float"]) | nested if wide else st.none()),
            draw(st.sampled_from([-1, -2])) if depth == 0 else -1,
            draw(st.sampled_from(STORAGES)),
            draw(st.none() | nested) if depth == 0 else None,
            draw(st.none() | st.sampled_from(scales.RULES)),
        )
    except ValueError:  # fields that contradict each other
        return draw(st.sampled_from([t for t in SPELLED.values() if t.act is None and t.axis == -1]))


@settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(layouts())
def test_every_layout_survives_text_and_json(layout):
    again = fq.layout(str(layout))
    other = fq.Layout.from_json(json.loads(json.dumps(layout.to_json())))
    assert again == layout == other
    names = ("element", "block", "scale", "zero_point", "axis", "storage", "act", "rule")
    for name in names:
        assert getattr(again, name) == getattr(layout, name) == getattr(other, name)


# --- errors ---


@pytest.mark.parametrize("size", [0, -7, 2**40, 2**64])
def test_case_H6_impossible_group_sizes(size):
    for make in (fq.int4, lambda g: fq.int8(block=(1, g)), lambda g: fq.int8(block=(g, 1))):
        with pytest.raises(ValueError, match=rf"expected -1 .* or 1 to 2\*\*31 - 1, got {size}"):
            make(size)
    with pytest.raises(ValueError, match="expected -1" if size >= 0 else "unknown option"):
        fq.layout(f"int4:g{size}")


@pytest.mark.parametrize("size", [3.5, True, "32", None, 32.0])
def test_case_H6_group_sizes_that_are_no_integers(size):
    for make in (fq.int4, lambda g: fq.int8(block=(1, g)), lambda g: fq.int8(block=(g, 1))):
        with pytest.raises(TypeError, match=f"expected an int, got {size!r}"):
            make(size)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "unknown name ''"),
        ("int9", "unknown name 'int9'"),
        ("int4:g", "unknown option 'g'"),
        ("int4::g32", "unknown option ''"),
        ("int4:g32x", "unknown option 'g32x'"),
        ("int4:block8", "unknown option 'block8'"),
        ("int4:block0x8", "block: expected -1"),
        ("int4@int8@int8", "at most one '@'"),
        ("int4@int8:axis-2", "a nested layout is canonical, with axis -1 and no act"),
        ("int4:scale=float64", "scale: expected one of .*got 'float64'"),
        ("int4:scale=(fp8:tensor", "unbalanced parentheses"),
        ("int4:scale=(int8@int8)", "a nested layout is canonical"),
        ("int8:asym:absmax", "with a zero point the rule is 'minmax' or 'mse'"),
        ("fp8:asym", "a zero point goes with integer elements, got e4m3"),
        ("fp8:absmax_narrow", "rule 'absmax_narrow' is for signed integers, got e4m3"),
        ("int8:floor", "rule 'floor' chooses e8m0 scales of float elements, got int8"),
        ("int1:absmax_narrow", "no positive code at 1 bit"),
        ("nf4:absmax_full", "is for integers, got nf4"),
        ("lut()", "Codebook: expected 2 to 256"),
        ("lut(1,x)", "unknown name 'lut"),
        ("lut(2.0,1.0)", "ascending"),
        ("e4m3:g16:scale=(ue7m0:row)", "quantized scales ue7m0 can become zero, and blocks of zeros NaN"),
        ("int4:g8:sym:scale=(ue4m3:g2:scale=(e5m2))", "can become zero, and blocks of zeros NaN"),
        (" int8", "unknown name"),
    ],
)
def test_wrong_text_is_a_value_error(text, message):
    with pytest.raises(ValueError, match=message):
        fq.layout(text)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: fq.layout(None), TypeError, "expected text"),
        (lambda: fq.layout(4), TypeError, "expected text"),
        (lambda: fq.Layout("int8", (1, -1)), TypeError, "element must be Int, UInt, Float or Codebook"),
        (lambda: fq.int8(block=32), TypeError, "expected \\(rows, cols\\), got 32"),
        (lambda: fq.int8(block=(1, 2, 3)), TypeError, "expected \\(rows, cols\\)"),
        (lambda: fq.int8(axis=0), ValueError, "axis must be -1 or -2, got 0"),
        (lambda: fq.int8(rule="best"), ValueError, "unknown rule 'best'; known are absmax"),
        (lambda: fq.int8(scale="float64"), ValueError, "scale: expected one of float32"),
        (lambda: fq.int8(scale=torch.float64), ValueError, "scale: expected one of float32"),
        (lambda: fq.int8(scale=torch.int8), ValueError, "scale: expected one of float32"),
        (lambda: fq.int8(act="int8"), TypeError, "act must be a Layout or None, got 'int8'"),
        (lambda: fq.mxfp4("up"), ValueError, "unknown rule 'up'"),
        (lambda: fq.nvfp4("floor"), ValueError, "rule 'floor' chooses e8m0 scales"),
        (
            lambda: fq.Layout(E.Int(8), (1, -1), zero_point="floats"),
            ValueError,
            "zero_point must be None, 'int'",
        ),
        (lambda: fq.Layout(E.Int(8), (1, -1), storage="tiles"), ValueError, "unknown storage 'tiles'"),
        (lambda: fq.Layout(E.Codebook((0.0, 1.0), "mine"), (1, -1)), ValueError, "unknown name 'mine'"),
        (
            lambda: fq.Layout(E.Codebook((0.0, 1.0), "nf4"), (1, -1)),
            ValueError,
            "label .* names another element",
        ),
    ],
)
def test_wrong_parts_are_named(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    "value",
    [
        {},
        [],
        {"element": "int8"},
        {"element": "int8", "block": [1, -1], "blocks": 1},
        {"element": "int8", "block": [0, -1]},
        {"element": "int8", "block": 5},
        {"element": 8, "block": [1, -1]},
        {"element": "int9", "block": [1, -1]},
        {"element": "int8", "block": [1, -1], "scale": "double"},
        {"element": "int8", "block": [1, -1], "act": "int8"},
    ],
)
def test_wrong_json_is_refused(value):
    with pytest.raises((TypeError, ValueError), match=r"Layout|element|block|scale|act"):
        fq.Layout.from_json(value)
