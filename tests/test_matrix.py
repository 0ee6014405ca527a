"""The composition matrix, by value: presets under transforms, eager and compiled, on every backend."""

from __future__ import annotations

import pytest
from matrix import SPINE, TRANSFORMS, run

ON_ATEN = {
    "int8": "canonical",
    "int8@int8": "canonical",
    "int4:g32": "prepacked",
    "int4:g32:sym": "prepacked",
}
CASES = [(key, "reference", "canonical") for key in SPINE]
CASES += [(key, "aten", storage) for key, storage in ON_ATEN.items()]
CASES += [(key, "reference", "prepacked") for key, storage in ON_ATEN.items() if storage == "prepacked"]


@pytest.mark.parametrize(("key", "backend", "storage"), CASES)
def test_eager(key, backend, storage):
    run(key, backend, storage, None, TRANSFORMS)


QUICK = {
    ("int8", "aten", "canonical"),
    ("int4:g32", "aten", "prepacked"),
}


@pytest.mark.parametrize(
    ("key", "backend", "storage"),
    [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in CASES],
)
def test_compiled(key, backend, storage):
    run(key, backend, storage, "aot_eager", TRANSFORMS)


@pytest.mark.parametrize(("key", "backend", "storage"), CASES)
@pytest.mark.slow
def test_inductor(key, backend, storage):
    run(key, backend, storage, "inductor", ["forward", "grad x", "vmap params"])


@pytest.mark.parametrize("key", ["int8", "nvfp4"])
def test_inductor_quick(key):
    run(key, "reference", "canonical", "inductor", ["forward", "grad x"])
