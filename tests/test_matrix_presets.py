"""The composition matrix of every preset and every kind of quantized activation, by value."""

from __future__ import annotations

import pytest
from formats import PRESETS
from matrix import SPINE, TRANSFORMS, run_together

from fq.layouts.layout import changed

# A rule leaves no trace in what is stored, so one preset stands for all that differ in it only; the blocks
# of 128x128 cover these weights, so smaller ones stand for them.
STORED = {changed(layout.key, rule=None).key for layout in PRESETS.values()} - {"fp8:block128x128"}
LAYOUTS = sorted(STORED | {"fp8:block8x16", "int8:tensor", "int8:block4x8"})
# Weights and activations of every kind, by themselves and mixed.
DYNAMIC = [
    "int8@uint8:token",
    "int8@uint8:token:sym",
    "fp8@fp8",
    "fp8@fp8:tensor",
    "fp8:block8x16@fp8:g16",
    "mxfp8@mxfp8",
    "mxfp8@e5m2:g32:scale=e8m0",
    "mxfp4@mxfp8",
    "mxfp6@mxfp6",
    "mxfp4@mxfp4:floor",
    "nf4:g32@nvfp4:four_over_six",
    "uint4:g32@int8:scale=bfloat16",
    "int4:g32@int4:g16",
]
STATIC = {
    "int8@int8": 4 / 127.5,
    "int8@int8:tensor": 4 / 127.5,
    "fp8@fp8": 4 / 448,
    "fp8@fp8:tensor": 4 / 448,
    "nvfp4@nvfp4": 4 / 2688,
}
# The mechanisms: plain floats, six bits, tables, nested and integer zero points, activations.
QUICK = {"fp8:block8x16", "mxfp6", "nf4:g32:scale=(uint8:g256:sym)", "uint4:g32", "mxfp8@mxfp8"}


def slow(keys):
    return [pytest.param(key, marks=() if key in QUICK else pytest.mark.slow) for key in keys]


def chunks(keys, size=5):
    return [pytest.param(keys[i : i + size], id=keys[i]) for i in range(0, len(keys), size)]


@pytest.mark.parametrize("key", slow([*LAYOUTS, *DYNAMIC]))
def test_eager(key):
    run_together([key], None, TRANSFORMS, layers=2)


COMPILED = [key for key in [*LAYOUTS, *DYNAMIC] if key not in SPINE]


@pytest.mark.parametrize(
    "key", [pytest.param(key, marks=() if key == "mxfp8@mxfp8" else pytest.mark.slow) for key in COMPILED]
)
def test_compiled(key, fresh_compile):
    run_together([key], "aot_eager", TRANSFORMS)


@pytest.mark.slow
@pytest.mark.parametrize("keys", chunks([key for key in COMPILED if "@" not in key] + DYNAMIC[2:6]))
def test_inductor(keys, fresh_compile):
    run_together(keys, "inductor", ["forward", "grad x", "vmap params"])


@pytest.mark.parametrize("key", STATIC)
def test_static_activation_scales(key):
    run_together([key], None, TRANSFORMS, layers=2, input_scale=STATIC[key])


@pytest.mark.slow
@pytest.mark.parametrize("key", STATIC)
def test_static_activation_scales_compiled(key, fresh_compile):
    run_together([key], "aot_eager", TRANSFORMS, input_scale=STATIC[key])
