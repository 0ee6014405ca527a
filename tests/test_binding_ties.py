"""Tied parameters: what is given for one name, for both, and what nested calls make of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fq


class Tied(nn.Module):
    """A language model's two ends, which share one weight, and a third place that uses it too."""

    def __init__(self, third: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embed.weight
        if third:
            self.extra = nn.Linear(8, 20, bias=False)
            self.extra.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.head(x) + (self.extra(x) if hasattr(self, "extra") else 0)


IDS = torch.tensor([3, 0, 19])


def tied(third: bool = False) -> Tied:
    torch.manual_seed(5)
    return Tied(third).requires_grad_(False)


def want(embed: Any, *heads: Any) -> Tensor:
    full = [fq.dequantize(w) if isinstance(w, fq.QTensor) else w for w in (embed, *heads)]
    x = F.embedding(IDS, full[0])
    return sum((F.linear(x, w) for w in full[1:]), torch.zeros(()))


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.fixture
def weights() -> tuple[Tensor, fq.QTensor, fq.QTensor]:
    torch.manual_seed(6)
    w = torch.randn(20, 8)
    return torch.randn(20, 8), fq.quantize(w, fq.int8()), fq.quantize(w, fq.int4(group_size=4))


@pytest.mark.parametrize("name", ["embed.weight", "head.weight"])
def test_a_leaf_given_for_one_name_stands_at_both(name, weights):
    net, q = tied(), weights[1]
    close(fq.functional_call(net, {name: q}, IDS), want(q, q))
    with fq.bind(net, {name: q}):
        assert net.embed.weight is net.head.weight is q
        close(net(IDS), want(q, q))
    assert net.embed.weight is net.head.weight


@pytest.mark.parametrize("name", ["embed.weight", "head.weight"])
def test_without_tie_weights_it_stands_where_it_was_given(name, weights):
    net, q = tied(), weights[1]
    own = net.embed.weight
    y = fq.functional_call(net, {name: q}, IDS, tie_weights=False)
    close(y, want(q, own) if name == "embed.weight" else want(own, q))


def test_case_K4_one_name_quantized_and_the_other_float(weights):
    net, (w, q, p) = tied(), weights
    for embed, head in ((q, w), (w, q), (q, p), (p, q), (q, net.head.weight), (net.embed.weight, q)):
        for params in (
            {"embed.weight": embed, "head.weight": head},
            {"head.weight": head, "embed.weight": embed},
        ):
            for tie in (True, False):
                close(fq.functional_call(net, params, IDS, tie_weights=tie), want(embed, head))
            with fq.bind(net, params):
                close(net(IDS), want(embed, head))
        assert net.embed.weight is net.head.weight


@pytest.mark.parametrize(
    "rule", [{"embed": fq.int8()}, {"head": fq.int8()}, {"embed": fq.int8(), "head": fq.int8()}]
)
def test_case_O4_three_results(rule):
    net = tied()
    w = net.embed.weight.detach()
    params = dict(net.named_parameters(remove_duplicate=False))
    out = fq.quantize_params(params, rule)
    kinds = tuple(isinstance(out[n], fq.QTensor) for n in ("embed.weight", "head.weight"))
    assert kinds == ("embed" in rule, "head" in rule)
    q = fq.quantize(w, fq.int8())
    close(fq.functional_call(net, out, IDS), want(q if kinds[0] else w, q if kinds[1] else w))
    if all(kinds):
        assert out["embed.weight"] is out["head.weight"]
        assert fq.summary(out).nbytes == q.nbytes
    else:
        assert fq.summary(out).nbytes == q.nbytes + w.nbytes


def test_an_alias_of_names_that_got_different_values_must_be_given_too(weights):
    net, (w, q, p) = tied(third=True), weights
    two = {"embed.weight": q, "head.weight": p}
    with pytest.raises(
        ValueError, match=r"'extra\.weight' is tied to names of different values; give it too"
    ):
        fq.functional_call(net, two, IDS)
    assert net.embed.weight is net.head.weight is net.extra.weight
    close(fq.functional_call(net, {**two, "extra.weight": w}, IDS), want(q, p, w))
    close(fq.functional_call(net, two, IDS, tie_weights=False), want(q, p, net.extra.weight))
    for params in ({"embed.weight": q, "head.weight": w}, {"head.weight": w, "embed.weight": q}):
        close(fq.functional_call(net, params, IDS), want(q, w, q))  # a leaf goes before a float


@pytest.mark.parametrize("leaf", [False, True])
def test_floats_that_contradict_are_refused_as_by_torch(leaf, weights):
    """Where a third name is tied too, torch.func.functional_call raises a KeyError about it."""
    net, (w, q, _) = tied(third=True), weights
    net.other = nn.Linear(8, 20, bias=False)
    two = {"embed.weight": w, "head.weight": w + 1, **({"other.weight": q} if leaf else {})}
    three = {**two, "extra.weight": w - 1}
    with pytest.raises(ValueError, match="got multiple values for keys.*Consider using tie_weights=False"):
        fq.functional_call(net, three, IDS)
    close(fq.functional_call(net, three, IDS, tie_weights=False), want(w, w + 1, w - 1))
    with fq.bind(net, three):
        close(net(IDS), want(w, w + 1, w - 1))
    for call in (lambda: fq.functional_call(net, two, IDS), fq.bind(net, two).__enter__):
        with pytest.raises(
            ValueError, match=r"'extra\.weight' is tied to names of different values; give it"
        ):
            call()
    assert net.embed.weight is net.head.weight is net.extra.weight


def test_what_is_no_tensor_is_refused():
    net = tied()
    with pytest.raises(TypeError, match=r"bind: 'head\.weight' must be a tensor or a QTensor, got float"):
        fq.bind(net, {"head.weight": 3.0}).__enter__()
    assert net.embed.weight is net.head.weight


def test_a_nested_call_replaces_a_tied_leaf_at_every_name(weights):
    net, (w, q, p) = tied(), weights
    with fq.bind(net, {"embed.weight": q}):
        for name in ("embed.weight", "head.weight"):
            close(fq.functional_call(net, {name: p}, IDS), want(p, p))
            close(fq.functional_call(net, {name: w}, IDS), want(w, w))
            close(
                fq.functional_call(net, {name: w}, IDS, tie_weights=False),
                want(*((w, q) if name[0] == "e" else (q, w))),
            )
        close(net(IDS), want(q, q))
    with fq.bind(net, {"embed.weight": q, "head.weight": w}):  # untied by the outer bind
        close(fq.functional_call(net, {"embed.weight": p}, IDS), want(p, w))
        close(fq.functional_call(net, {"head.weight": p}, IDS), want(q, p))
    assert net.embed.weight is net.head.weight


def test_one_module_under_two_names_has_one_weight(weights):
    _, q, p = weights
    inner = nn.Linear(8, 8, bias=False).requires_grad_(False)
    net = nn.Sequential(inner, nn.Tanh(), inner)
    q, p, x = q[:8], p[:8], torch.randn(2, 8)
    w = fq.dequantize(q)
    y = F.linear(torch.tanh(F.linear(x, w)), w)
    for params in ({"0.weight": q}, {"2.weight": q}, {"0.weight": q, "2.weight": q}):
        for tie in (True, False):
            close(fq.functional_call(net, params, x, tie_weights=tie), y)
    for other in (p, torch.zeros(8, 8)):
        with pytest.raises(
            ValueError, match="'2.weight' and another name are one parameter; they got different"
        ):
            fq.functional_call(net, {"0.weight": q, "2.weight": other}, x)
    assert list(net.state_dict()) == ["0.weight", "2.weight"]
    assert net[0].weight is inner.weight


def test_attached_tensors_are_parameters_and_stay_tied(weights):
    net, own = tied(third=True), nn.Parameter(torch.randn(20, 8))
    fq.attach(net, {"embed.weight": weights[0], "head.weight": weights[0], "extra.weight": own})
    assert isinstance(net.embed.weight, nn.Parameter) and net.extra.weight is own
    assert net.embed.weight is net.head.weight
    assert net.embed.weight.data_ptr() == weights[0].data_ptr() and not net.embed.weight.requires_grad
    close(net(IDS), want(weights[0], weights[0], own))
    fq.detach(net)
    assert net.embed.weight is net.head.weight is net.extra.weight


def test_tied_buffers_take_one_value_beside_a_leaf_as_without(weights):
    net = tied()
    net.register_buffer("scale", torch.ones(8))
    net.embed.register_buffer("same", net.scale)
    seen = []
    net.register_forward_hook(lambda m, args, y: seen.append((m.scale, m.embed.same)))
    for leaf in ({}, {"embed.weight": weights[1]}):
        given = torch.full((8,), 2.0)
        fq.functional_call(net, {**leaf, "embed.same": given}, IDS)
        assert seen[-1][0] is given and seen[-1][1] is given
    assert net.scale is net.embed.same and (net.scale == 1).all()
