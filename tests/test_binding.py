"""functional_call, bind and attach: the model is untouched, and calls compute with what they were given."""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Callable
from functools import partial
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fq


class Model(nn.Module):
    """A tied head, a buffer that the forward reassigns, a batch norm, a list and a dict of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8, bias=False)])
        self.shared = self.layers[0]
        self.norm = nn.BatchNorm1d(8)
        self.list = nn.ParameterList([torch.randn(8, 8), torch.randn(8)])
        self.dict = nn.ParameterDict({"w": torch.randn(8, 8)})
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, ids: Tensor, fail: bool = False) -> Tensor:
        self.calls = self.calls + 1
        x = self.shared(self.embed(ids))
        for layer in self.layers:
            x = torch.tanh(layer(x))
        x = self.norm(x) + nn.functional.linear(x, self.list[0], self.list[1])
        x = x @ self.dict["w"]
        if fail:
            raise RuntimeError("the forward failed")
        return self.head(x)


def model() -> Model:
    torch.manual_seed(3)
    return Model().requires_grad_(False).eval()


IDS = torch.tensor([1, 5, 11])
MATRICES = ("embed.weight", "layers.0.weight", "layers.1.weight", "list.0", "dict.w")


def leaves(net: nn.Module, key: str = "int8", factor: float = 1.0) -> dict[str, Any]:
    layout = fq.layout(key)
    return {name: fq.quantize(factor * net.get_parameter(name), layout) for name in MATRICES}


def dense(params: dict[str, Any]) -> dict[str, Tensor]:
    return fq.dequantize_params(params)


def oracle(net: nn.Module, params: dict[str, Any], *args: Any) -> Tensor:
    """What a fresh model computes with the dequantized weights; the model is left as it was."""
    return torch.func.functional_call(copy.deepcopy(net), dense(params), args, tie_weights=True)


def snapshot(net: nn.Module) -> list[Any]:
    """Everything that must not change: types, attributes, the identity and order of parameters, bytes."""
    objects = [
        (
            path,
            type(m),
            sorted(m.__dict__),
            [(a, id(p)) for a, p in m._parameters.items()],
            [(a, id(b)) for a, b in m._buffers.items() if a != "calls"],
            [(a, id(c)) for a, c in m._modules.items()],
        )
        for path, m in net.named_modules()
    ]
    return [objects, [(n, t.numpy().tobytes()) for n, t in net.state_dict().items() if n != "calls"]]


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


# --- the model is untouched ---


def run_call(net: nn.Module, params: dict[str, Any], **kwargs: Any) -> Any:
    return fq.functional_call(net, params, (IDS,), kwargs)


def run_bind(net: nn.Module, params: dict[str, Any], **kwargs: Any) -> Any:
    with fq.bind(net, params):
        return net(IDS, **kwargs)


def run_nested(net: nn.Module, params: dict[str, Any], **kwargs: Any) -> Any:
    with fq.bind(net, leaves(net, "int4:g4")), fq.bind(net, {"norm.bias": torch.ones(8)}):
        return fq.functional_call(net, {**params, "norm.bias": net.norm.running_mean}, IDS, kwargs)


def run_attached(net: nn.Module, params: dict[str, Any], **kwargs: Any) -> Any:
    try:
        return fq.attach(net, params)(IDS, **kwargs)
    finally:
        fq.detach(net)


@pytest.mark.parametrize("run", [run_call, run_bind, run_nested, run_attached])
def test_the_model_is_untouched(run):
    net = model()
    params = leaves(net)
    before = snapshot(net)
    close(run(net, params), oracle(net, params, IDS))
    assert snapshot(net) == before
    with pytest.raises(RuntimeError, match="the forward failed"):
        run(net, params, fail=True)
    assert snapshot(net) == before


@pytest.mark.parametrize("run", [run_call, run_bind, run_attached])
def test_floats_and_buffers_go_with_leaves(run):
    net = model()
    params = {**leaves(net), "list.1": torch.randn(8), "norm.running_mean": torch.randn(8)}
    before = snapshot(net)
    close(run(net, params), oracle(net, params, IDS))
    assert snapshot(net) == before


def test_what_the_forward_assigns_stays_as_under_torch():
    ours, theirs = model(), model()
    q = leaves(ours)
    for given in ({}, {"calls": torch.tensor(5.0)}):
        a, b = {**q, **given}, {**dense(q), **given}
        fq.functional_call(ours, a, (IDS,))
        torch.func.functional_call(theirs, b, (IDS,))
        assert ours.calls == theirs.calls == 1
        assert a.get("calls") == b.get("calls")
    assert a["calls"] == 6


def test_a_parameter_that_the_forward_assigns_beside_a_leaf_stays():
    class Counting(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.bias = nn.Parameter(self.bias + 1)
            return super().forward(x)

    net, x = Counting(4, 3), torch.ones(1, 4)
    bias = net.bias.detach().clone()
    q = {"weight": fq.quantize(net.weight, fq.int8())}
    for times in (1, 2):
        fq.functional_call(net, q, x)
        assert torch.equal(net.bias, bias + times)
    fq.functional_call(net, {**q, "bias": torch.zeros(3)}, x)
    assert torch.equal(net.bias, bias + 2)
    assert [n for n, _ in net.named_parameters()] == ["weight", "bias"]


# --- names ---


@pytest.mark.parametrize(
    "name", ["layers.0.wieght", "layers.7.weight", "head", "", "norm.running_mean", "norm.eps"]
)
def test_a_misspelt_leaf_is_a_key_error_and_changes_nothing(name):
    net = model()
    before = snapshot(net)
    params = {**leaves(net), name: fq.quantize(torch.ones(8, 8), fq.int8())}
    for enter in (
        fq.bind(net, params).__enter__,
        lambda: fq.attach(net, params),
        lambda: run_call(net, params),
    ):
        with pytest.raises(KeyError, match="is no parameter of Model"):
            enter()
        assert snapshot(net) == before
    with pytest.raises(KeyError, match=r"bind: 'norm\.scale' is no parameter of Model"):  # a float too
        fq.bind(net, {**leaves(net), "norm.scale": torch.ones(8)}).__enter__()
    assert snapshot(net) == before


# --- torch.func.functional_call ---


def outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:
        return type(error), str(error)


def same(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b


def float_params(net: nn.Module) -> dict[str, Any]:
    every = {n: p + 0.25 for n, p in net.named_parameters()}
    buffers = {n: b + 1 for n, b in net.named_buffers()}
    tied = every["embed.weight"]
    return {
        "all": every,
        "some": {"layers.0.bias": every["layers.0.bias"]},
        "none": {},
        "buffers too": {**every, **buffers},
        "by both names": {**every, "head.weight": tied, "shared.weight": every["layers.0.weight"]},
        "contradicting": {**every, "head.weight": tied + 1},
        "unknown": {**every, "layers.0.scale": torch.ones(1), "nowhere.weight": torch.ones(1)},
        "unknown attribute": {"layers.0.scale": torch.ones(1)},
        "a tuple": (every, buffers),
        "a list": [every, buffers],
        "twice": (every, {"list.0": every["list.0"]}),
        "no dicts": (every, 3),
        "a mapping": MappingProxyType(every),
        "nothing": None,
        "no tensor": {"list.0": 3.0},
    }


ARGS = [
    ((IDS,), None),
    (IDS, None),
    (IDS, {"fail": False}),
    ((), {"ids": IDS}),
    (None, {"ids": IDS}),
    (None, None),
]


@pytest.mark.parametrize("params", list(float_params(model())))
def test_without_leaves_it_is_torch_func_functional_call(params):
    for (args, kwargs), tie, strict in itertools.product(ARGS, (True, False), (True, False)):
        if (tie, strict) != (True, False) and args is not IDS:
            continue
        results, dicts = [], []
        for call in (fq.functional_call, torch.func.functional_call):
            net = model()
            dicts.append(float_params(net)[params])
            options = {"tie_weights": tie, "strict": strict}
            results.append(outcome(partial(call, net, dicts[-1], args, kwargs, **options)))
        assert same(*results), (args, kwargs, options, results)
        if isinstance(dicts[0], dict):
            assert dicts[0].get("calls") == dicts[1].get("calls")


@pytest.mark.parametrize(
    "params",
    [
        "all",
        "some",
        "contradicting",
        "by both names",
        "buffers too",
        "unknown attribute",
        "a tuple",
        "a list",
        "twice",
    ],
)
@pytest.mark.parametrize("strict", [True, False])
def test_with_a_leaf_floats_follow_strict_as_in_torch(params, strict):
    """As if the model had no parameter where the leaf stands."""

    class Without(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, dense({"w": q})["w"])

    ours, theirs = model(), model()
    q = leaves(ours)["layers.1.weight"]
    theirs.layers[1].__class__ = Without
    del theirs.layers[1].weight
    theirs._get_name = lambda: "Model"

    def floats(net: nn.Module) -> Any:
        out = float_params(net)[params]
        for part in out if not isinstance(out, dict) else [out]:
            part.pop("layers.1.weight", None)
        return out

    a, b = floats(ours), floats(theirs)
    a = {**a, "layers.1.weight": q} if isinstance(a, dict) else type(a)((*a, {"layers.1.weight": q}))
    got = outcome(lambda: fq.functional_call(ours, a, IDS, strict=strict))
    want = outcome(lambda: torch.func.functional_call(theirs, b, IDS, strict=strict))
    if isinstance(want, Tensor):
        close(got, want)
    else:
        assert got == want


@pytest.mark.parametrize("leaf", [True, False])
def test_a_module_that_two_paths_reach_is_untouched_by_floats_too(leaf):
    """torch.func.functional_call leaves the given value in it (pytorch#164759)."""
    net, weight, bias = model(), torch.randn(8, 8), torch.randn(8)
    q = {"layers.1.weight": leaves(net)["layers.1.weight"]} if leaf else {}
    before = snapshot(net)
    for tie, names in itertools.product((True, False), (["layers.0"], ["shared"], ["layers.0", "shared"])):
        params = {**q, **{f"{n}.weight": weight for n in names}, **{f"{n}.bias": bias for n in names}}
        given = dict(params)
        close(fq.functional_call(net, params, IDS, tie_weights=tie), oracle(net, params, IDS))
        assert snapshot(net) == before
        assert all(params[n] is given[n] for n in given)


def test_a_float_over_a_leaf_counts_as_given_for_strict():
    net = nn.Linear(4, 3).requires_grad_(False)
    x, w = torch.randn(2, 4), torch.randn(3, 4)
    with fq.bind(net, {"weight": fq.quantize(net.weight, fq.int8())}):
        y = fq.functional_call(net, {"weight": w, "bias": net.bias}, x, strict=True)
        assert torch.equal(y, nn.functional.linear(x, w, net.bias))
        with pytest.raises(RuntimeError, match="Unexpected key"):
            fq.functional_call(net, {"weight": w, "bias": net.bias, "b": w}, x, strict=True)
        assert isinstance(net.weight, fq.QTensor)


# --- nesting ---


def test_nested_binds_and_a_float_over_a_leaf():
    net, x = nn.Sequential(nn.Linear(4, 3)).requires_grad_(False), torch.randn(5, 4)
    a, b = ({"0.weight": fq.quantize(torch.randn(3, 4), fq.int8())} for _ in range(2))
    with_a, with_b, zero = oracle(net, a, x), oracle(net, b, x), {"0.weight": torch.zeros(3, 4)}
    with fq.bind(net, a):
        close(net(x), with_a)
        with fq.bind(net, b):
            close(net(x), with_b)
            with fq.bind(net, zero):
                assert sorted(n for n, _ in net.named_parameters()) == ["0.bias", "0.weight"]
                assert torch.equal(net(x), net[0].bias.expand(5, 3))
            close(net(x), with_b)
        assert torch.equal(fq.functional_call(net, zero, x), net[0].bias.expand(5, 3))
        close(fq.functional_call(net, b, x), with_b)
        close(net(x), with_a)
    assert [n for n, _ in net.named_parameters()] == ["0.weight", "0.bias"]


# --- copies and threads ---


def test_a_copy_of_an_attached_model_has_its_own_of_everything():
    net = model()
    plain = net(IDS)
    fq.attach(net, leaves(net))
    bound = net(IDS)
    other = copy.deepcopy(net)
    assert other.layers[0].weight.data.data_ptr() != net.layers[0].weight.data.data_ptr()
    assert torch.equal(other(IDS), bound)
    fq.detach(other)
    assert torch.equal(other(IDS), plain)
    assert other.head.weight is other.embed.weight
    assert other.embed.weight is not net.embed.weight
    assert torch.equal(net(IDS), bound)
    assert list(dict(fq.detach(net).named_parameters())) == list(dict(other.named_parameters()))


def test_attach_and_detach_come_in_pairs():
    net = model()
    params, before = leaves(net), snapshot(net)
    with pytest.raises(ValueError, match="detach: nothing is attached to Model"):
        fq.detach(net)
    fq.attach(net, params)
    with pytest.raises(
        ValueError, match=r"attach: Model has parameters attached already; call fq\.detach first"
    ):
        fq.attach(net, params)
    fq.detach(net)
    assert snapshot(net) == before


def test_threads_that_call_one_model_get_their_own_weights():
    net = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)).requires_grad_(False)
    before, x = snapshot(net), torch.randn(3, 16)
    params: list[dict[str, Any]] = [
        {f"{i}.weight": fq.quantize(torch.randn(16, 16), fq.int8()) for i in (0, 2)} for _ in range(3)
    ]
    params.append({f"{i}.weight": torch.randn(16, 16) for i in (0, 2)})
    want = [oracle(net, p, x) for p in params]
    wrong: list[Any] = []
    start = threading.Barrier(len(params))

    def work(k: int) -> None:
        start.wait()
        for _ in range(100):
            y = outcome(lambda: fq.functional_call(net, params[k], x))
            if not (isinstance(y, Tensor) and torch.allclose(y, want[k], rtol=1e-4, atol=1e-5)):
                wrong.append((k, y))

    threads = [threading.Thread(target=work, args=(k,)) for k in range(len(params))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong
    assert snapshot(net) == before
