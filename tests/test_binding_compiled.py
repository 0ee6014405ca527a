"""Compiled modules and compiled calls compute with the weights bound at the call, whatever came before."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import fq

pytestmark = pytest.mark.usefixtures("fresh_compile")
BACKEND = "aot_eager"


class Block(nn.Module):
    """A module used twice, a list and a dict of parameters, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.layers = nn.ModuleList([self.first, nn.Linear(8, 8, bias=False)])
        self.list = nn.ParameterList([torch.randn(8, 8), torch.randn(8)])
        self.dict = nn.ParameterDict({"w": torch.randn(8, 8)})
        self.register_buffer("offset", torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        x = nn.functional.linear(self.first(x), self.list[0], self.list[1])
        return x @ self.dict["w"] + self.offset


MATRICES = ("first.weight", "layers.1.weight", "list.0", "dict.w")
X = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))


def block() -> Block:
    torch.manual_seed(4)
    return Block().requires_grad_(False)


def leaves(seed: int, key: str = "int8") -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)
    return {n: fq.quantize(torch.randn(8, 8, generator=g), fq.layout(key)) for n in MATRICES}


def want(net: nn.Module, params: dict[str, Any]) -> Tensor:
    """A copy, because torch.func.functional_call spoils a module that two paths reach (pytorch#164759)."""
    return torch.func.functional_call(copy.deepcopy(net), fq.dequantize_params(params), X)


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_compiled_module_computes_with_what_is_bound():
    """Compiled before, during and after a bind; floats between; new values and new layouts."""
    net = block()
    names = list(net.state_dict())
    plain, q = net(X), [leaves(0), leaves(1), leaves(2, "mxfp4")]
    y = [want(net, p) for p in q]
    before = torch.compile(net, backend=BACKEND, fullgraph=True)
    close(before(X), plain)
    with fq.bind(net, q[0]):
        close(before(X), y[0])
        during = torch.compile(net, backend=BACKEND, fullgraph=True)
        close(during(X), y[0])
        with fq.bind(net, q[1]):
            close(before(X), y[1])
            close(during(X), y[1])
    after = torch.compile(net, backend=BACKEND, fullgraph=True)
    for compiled in (before, during, after):
        close(compiled(X), plain)
        with fq.bind(net, q[2]):
            close(compiled(X), y[2])
        fq.attach(net, q[1])
        close(compiled(X), y[1])
        fq.detach(net)
        close(compiled(X), plain)
    assert list(net.state_dict()) == names


def test_a_compiled_module_takes_other_floats_and_half_of_the_leaves():
    net = block()
    compiled = torch.compile(net, backend=BACKEND, fullgraph=True)
    q = leaves(0)
    some = {n: q[n] for n in ("list.0", "layers.1.weight")}
    floats = {"list.1": torch.randn(8), "offset": torch.randn(8), "first.weight": torch.randn(8, 8)}
    for params in (some, {**q, **floats, "first.weight": q["first.weight"]}, {**some, **floats}, floats):
        with fq.bind(net, params):
            close(compiled(X), want(block(), params))
    close(compiled(X), net(X))


def test_bind_inside_a_compiled_function():
    net = block()

    def call(p: dict[str, Any], x: Tensor) -> Tensor:
        with fq.bind(net, p):
            return net(x)

    compiled = torch.compile(call, backend=BACKEND, fullgraph=True)
    for seed in (0, 1):
        close(compiled(leaves(seed), X), want(net, leaves(seed)))
    assert list(net.state_dict()) == list(block().state_dict())


def test_one_compiled_call_serves_other_weights():
    """One graph for new values, one more for a new layout; the model is as it was."""
    net = block()
    counter = CompileCounterWithBackend(BACKEND)
    compiled = torch.compile(lambda p, x: fq.functional_call(net, p, x), backend=counter, fullgraph=True)
    for seed in range(3):
        params = {**leaves(seed), "offset": torch.randn(8)}
        close(compiled(params, X), want(net, params))
    assert counter.frame_count == 1
    close(
        compiled({**leaves(3, "int4:g4"), "offset": torch.ones(8)}, X),
        want(net, {**leaves(3, "int4:g4"), "offset": torch.ones(8)}),
    )
    assert counter.frame_count == 2
    assert list(net.state_dict()) == list(block().state_dict())
    assert [id(p) for p in net.parameters()] == [id(p) for p in dict(net.named_parameters()).values()]
    close(compiled(params, X), want(net, params))
    assert counter.frame_count == 2


def test_a_compiled_call_sees_what_changes_in_the_model():
    """Names left out take the model's own values, and ties are those of the moment."""
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).requires_grad_(False)
    q = leaves(0)["list.0"]
    compiled = torch.compile(lambda p, x: fq.functional_call(net, p, x), backend=BACKEND, fullgraph=True)
    close(compiled({"0.weight": q}, X), want(net, {"0.weight": q}))
    net[1].weight = nn.Parameter(torch.randn(8, 8), requires_grad=False)
    close(compiled({"0.weight": q}, X), want(net, {"0.weight": q}))
    net[1].weight = net[0].weight
    close(compiled({"0.weight": q}, X), want(net, {"0.weight": q, "1.weight": q}))
    net[1].weight = nn.Parameter(torch.randn(8, 8), requires_grad=False)
    close(compiled({"0.weight": q}, X), want(net, {"0.weight": q}))


def test_a_module_compiled_in_place():
    net = block()
    plain, y = net(X), want(net, leaves(0))
    net.compile(backend=BACKEND, fullgraph=True)
    close(net(X), plain)
    close(fq.functional_call(net, leaves(0), X), y)
    close(net(X), plain)


def test_a_wrapper_takes_its_own_names_and_those_of_the_module():
    net = nn.Sequential(nn.Linear(8, 8)).requires_grad_(False)
    q = leaves(0)["list.0"]
    y = want(net, {"0.weight": q})
    wrapper = torch.compile(net, backend=BACKEND, fullgraph=True)
    assert list(dict(wrapper.named_parameters())) == ["_orig_mod.0.weight", "_orig_mod.0.bias"]
    for name in ("_orig_mod.0.weight", "0.weight"):
        close(fq.functional_call(wrapper, {name: q}, X), y)
        with fq.bind(wrapper, {name: q}):
            close(wrapper(X), y)
            close(net(X), y)


@pytest.mark.parametrize("ours_first", [True, False])
def test_a_compiled_call_of_nested_calls(ours_first):
    """A call inside a call, inside a graph: the inner weights win, then the outer ones are back."""
    net = block()
    q, p = leaves(0), leaves(1)

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Tensor, inner: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
            return self.net(x), fq.functional_call(self.net, inner, x), self.net(x)

    twice = Twice()
    outer = {f"net.{n}": v for n, v in q.items()}
    f = torch.compile(lambda a, b: fq.functional_call(twice, a, (X, b)), backend=BACKEND, fullgraph=True)
    for a, b in (
        ((q, p), (p, q)) if ours_first else ((q, {"list.0": torch.randn(8, 8)}), (p, {"dict.w": p["list.0"]}))
    ):
        outer = {f"net.{n}": v for n, v in a.items()}
        y = f(outer, b)
        for got, params in zip(y, (a, {**a, **b}, a), strict=True):
            close(got, want(net, params))


@pytest.mark.parametrize("key", ["int8", "nvfp4"])
def test_case_L4_export_with_the_parameters_as_inputs_or_attached(key):
    """Exported for any batch; packed tensors are inputs, or constants of no more bytes."""
    net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8)).requires_grad_(False)
    params = [
        fq.quantize_params({n: torch.randn_like(p) for n, p in net.named_parameters()}, fq.layout(key))
        for _ in range(2)
    ]

    class Call(nn.Module):
        def forward(self, p: dict[str, Any], x: Tensor) -> Tensor:
            return fq.functional_call(net, p, x)

    x, y = torch.randn(4, 64), torch.randn(9, 64)
    shapes = torch.export.ShapesCollection()
    shapes[x] = {0: torch.export.Dim("batch", min=2, max=64)}
    program = torch.export.export(Call(), (params[0], x), dynamic_shapes=shapes)
    assert not program.state_dict and not program.constants
    for p in params:
        close(program.module()(p, y), fq.functional_call(net, p, y))
    fq.attach(net, params[0])
    program = torch.export.export(net, (x,))
    fq.detach(net)
    held = [*program.state_dict.values(), *program.constants.values()]
    assert sum(t.nbytes for t in held) == fq.summary(params[0]).nbytes
    close(program.module()(x), fq.functional_call(net, params[0], x))
