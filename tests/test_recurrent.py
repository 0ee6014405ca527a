"""Recurrent layers on quantized weights, which are decoded in the call and planned as such."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fq

CELLS = [nn.LSTMCell, nn.GRUCell, nn.RNNCell]
LAYERS = [nn.LSTM, nn.GRU, nn.RNN]


def output(y):
    return y[0] if isinstance(y, tuple) else y


@pytest.mark.parametrize("kind", [*LAYERS, *CELLS])
@pytest.mark.parametrize("key", ["int8", "nvfp4"])
def test_a_recurrent_layer_is_that_of_the_dequantized_weights(kind, key):
    torch.manual_seed(0)
    net = (kind(16, 32) if kind in CELLS else kind(16, 32, 2, bidirectional=True)).requires_grad_(False)
    x = torch.randn(3, 16) if kind in CELLS else torch.randn(5, 3, 16)
    before = output(net(x))
    made = fq.plan(net, fq.layout(key))
    assert all(made[n].reason == "policy; decoded in every call" for n in made.quantized)
    assert len(made.quantized) == (2 if kind in CELLS else 8)
    q = fq.quantize_params(dict(net.named_parameters()), made)
    want = output(torch.func.functional_call(net, fq.dequantize_params(q), (x,)))
    assert torch.equal(output(fq.functional_call(net, q, (x,))), want)
    with fq.bind(net, q):
        assert torch.equal(output(net(x)), want)
    assert torch.equal(output(net(x)), before) and not torch.equal(before, want)

    def loss(x):
        return output(fq.functional_call(net, q, (x,))).square().sum()

    dense = fq.dequantize_params(q)
    got = torch.func.grad(loss)(x)
    want = torch.func.grad(lambda x: output(torch.func.functional_call(net, dense, (x,))).square().sum())(x)
    assert torch.equal(got, want)


def test_quantized_activations_leave_recurrent_weights_as_they_are():
    plan = fq.plan(nn.LSTM(16, 32), fq.layout("int8@int8"))
    assert plan.quantized == ()
    assert plan["weight_hh_l0"].reason == (
        "recurrent weights have no rule with quantized activations, which the layout has"
    )
