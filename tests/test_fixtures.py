"""The fixtures of conftest.py do what they say."""

from __future__ import annotations

import pytest
import torch

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2)


def call_as(module: str, source: str, **names):
    """Evaluate `source` as code of the module of that name would."""
    return eval(source, {"__name__": module, "torch": torch, **names})


@pytest.mark.parametrize(
    "source",
    ["torch.empty(3, 5, dtype=d)", "torch.empty_like(x)", "x.new_empty((3, 5))", "x.new_empty(3, 5)"],
)
@pytest.mark.parametrize("dtype", INTEGERS + FLOATS)
def test_fq_gets_poisoned_memory(poisoned_empty, source, dtype):
    y = call_as("fq.backends.cpu", source, d=dtype, x=torch.zeros(3, 5, dtype=dtype))
    assert y.shape == (3, 5)
    assert y.dtype == dtype
    if dtype.is_floating_point:
        assert y.float().isnan().all()
    else:
        assert (y.view(torch.uint8) == 0xAB).all()


@pytest.mark.parametrize("module", ["torch.nn", "fqx", "tests"])
def test_others_do_not(poisoned_empty, module):
    memory = torch.ones(4)
    assert call_as(module, "torch.empty(4, out=memory)", memory=memory) is memory
    assert (memory == 1).all()


def test_tracing_does_not(poisoned_empty, fresh_compile):
    names = {"__name__": "fq.probe", "torch": torch}
    exec("def f(x): return torch.empty_like(x).copy_(x), x.new_empty((2,)).fill_(3.0)", names)
    x = torch.randn(4)
    same, threes = torch.compile(names["f"], fullgraph=True, backend="aot_eager")(x)
    assert torch.equal(same, x)
    assert torch.equal(threes, torch.full((2,), 3.0))
    assert names["f"](x.to("meta"))[1].is_meta


def test_every_test_starts_from_the_same_seed():
    assert torch.initial_seed() == 0
