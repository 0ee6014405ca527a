"""Faults that an attack on every preset, rule and searched scale found: each kind once, by value."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.utils._pytree as pytree
from formats import assert_same

import fq
from fq import slices

NESTED_ROWS = "e2m1:g16:scale=(fp8:row):four_over_six"


@pytest.mark.parametrize("key", ["nvfp4:four_over_six", "nvfp4:mse", NESTED_ROWS])
def test_searches_under_outer_scales_that_another_vmap_maps(key):
    layout, x, outer = fq.layout(key), torch.randn(3, 4, 40), torch.tensor([0.002, 0.02, 0.005])

    def quantize(t, s):
        return fq.quantize(t, layout, outer_scale=s)

    want = fq.stack([fq.stack([quantize(t, s) for t in x]) for s in outer])
    both = torch.vmap(torch.vmap(quantize, in_dims=(0, None)), in_dims=(None, 0))(x, outer)
    assert_same(both, want)
    assert_same(torch.vmap(quantize, in_dims=(None, 0))(x, outer), want)
    swapped = torch.vmap(torch.vmap(quantize, in_dims=(None, 0)), in_dims=(0, None))(x, outer)
    assert_same(swapped, pytree.tree_map(lambda t: t.transpose(0, 1), want))


@pytest.mark.parametrize("key", ["int8:tensor:absmax_full", "int8:block-1x4:absmax_full", "uint4:block-1x4"])
def test_the_sign_of_zeros_does_not_depend_on_the_order_of_comparing(key):
    layout, x = fq.layout(key), torch.zeros(37, 40)
    x[::2, ::3] = -0.0
    want = fq.quantize(x, layout)
    assert_same(fq.quantize(-x, layout), want)
    assert_same(fq.quantize(x.flip(0), layout), replace(want, data=want.data.flip(0)))


@pytest.mark.parametrize(
    "key",
    [
        "int8:tensor:absmax_full",
        "nvfp4:scale=(mxfp8:tensor)",
        "e2m1:g16:scale=(fp8:tensor:scale=float16)",
        "int4:g8:sym:scale=(int8:tensor:absmax_full):absmax_full",
        "int4:g8:sym:scale=(int8:tensor:sym):absmax_full",
    ],
)
@pytest.mark.parametrize("axis", [-1, -2])
def test_donated_tensors_get_the_same_bits_under_every_outer_scale(key, axis, monkeypatch):
    monkeypatch.setattr(slices, "LARGE", 1)
    layout = replace(fq.layout(key), axis=axis)
    x = torch.randn(37, 40)
    x[20, 3] = -9.0  # the extreme of largest magnitude is negative
    for value in (x, x.half(), -0.0 * x, 1e-44 * x, torch.randn(2, 19, 17)):
        want = fq.quantize_params({"w": value}, {"w": layout})["w"]
        assert_same(fq.quantize_params({"w": value}, {"w": layout}, donate=True)["w"], want)


def test_parts_of_a_layout_of_the_wrong_kind_are_type_errors_that_name_them():
    part = {"element": fq.int8().element, "block": (1, -1)}
    for name, value in (
        ("scale", [1]),
        ("scale", 3),
        ("scale", None),
        ("axis", -1.0),
        ("axis", True),
        ("rule", ["mse"]),
        ("storage", None),
        ("zero_point", []),
    ):
        with pytest.raises(TypeError, match=f"{name}.*got"):
            fq.Layout(**part, **{name: value})
    for preset, flag in ((fq.int4, "symmetric"), (fq.nf4, "double_quant")):
        with pytest.raises(TypeError, match=f"{flag}: expected True or False, got 'no'"):
            preset(**{flag: "no"})
    for flag in ("symmetric", "signed"):
        with pytest.raises(TypeError, match=f"{flag}: expected True or False, got 0"):
            fq.intx(4, **{flag: 0})


def test_a_preset_takes_elements_of_its_own_width_only():
    for preset, element in ((fq.fp8, "e2m1"), (fq.mxfp6, "e4m3"), (fq.mxfp6, "e2m1"), (fq.mxfp8, "e3m2")):
        with pytest.raises(ValueError, match=f"{preset.__name__}: .* bits, got '{element}'; fq.layout takes"):
            preset(element=element)
    assert fq.fp8(element="ue4m3").element.bits == 7


def test_numbers_in_texts_are_plain_and_of_a_sane_length():
    for text in (
        "e٣m٣",
        "lut(1.2.3)",
        "lut(-)",
        "int8:g" + 5000 * "9",
        "e4m3b" + 5000 * "9",
        1000 * "int8:scale=(" + "int8" + 1000 * ")",
    ):
        with pytest.raises(ValueError, match=r"unknown name|unknown option|nested too deeply"):
            fq.layout(text)
    assert fq.layout("lut(-1,.5,2e0)").key == "lut(-1.0,0.5,2.0)"
