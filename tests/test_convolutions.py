"""Convolutions with quantized weights, against those with the dequantized ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import grad, jacrev, jvp, vmap

import fq

CASES = [
    (1, {"stride": 2, "padding": 1}),
    (1, {"padding": "same", "dilation": 3}),
    (2, {"stride": (2, 1), "padding": (1, 0), "groups": 2}),
    (2, {"padding": "same"}),
    (2, {"padding": "valid", "dilation": 2}),
    (3, {"padding": 1, "stride": 2}),
    (-1, {"stride": 3, "padding": 1, "output_padding": 2}),
    (-2, {"stride": 2, "padding": 1, "groups": 2, "output_padding": (1, 0)}),
    (-3, {"stride": 2}),
]
KEYS = ["int8", "int4:g16", "nvfp4"]


def problem(dims: int, groups: int = 1):
    """Function, weight and input of a convolution, transposed where dims is negative."""
    d = abs(dims)
    name = f"conv{d}d" if dims > 0 else f"conv_transpose{d}d"
    weight = torch.randn(4, 6 // groups, *(4, 3, 2)[:d])
    channels = 6 if dims > 0 else 4
    return getattr(F, name), weight, torch.randn(2, channels, *(9, 8, 7)[:d])


@pytest.mark.filterwarnings("ignore:Using padding='same'")  # torch's, about its own copy
@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize(("dims", "options"), CASES)
def test_a_convolution_and_its_derivatives_are_those_of_the_dequantized_weight(key, dims, options):
    function, weight, x = problem(dims, options.get("groups", 1))
    q = fq.quantize(weight, fq.layout(key), inner=abs(dims) + 1)
    w = fq.dequantize(q)
    channels = weight.shape[0] if dims > 0 else weight.shape[1] * options.get("groups", 1)
    bias = torch.randn(channels)
    want = function(x, w, bias, **options)
    got = function(x, q, bias, **options)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(function(x[0], q, bias, **options), want[0], rtol=1e-5, atol=1e-4)
    g = torch.randn_like(want)
    ours = grad(lambda x, b: (function(x, q, b, **options) * g).sum(), (0, 1))(x, bias)
    theirs = grad(lambda x, b: (function(x, w, b, **options) * g).sum(), (0, 1))(x, bias)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-3)
    if q.scale.__class__ is torch.Tensor:
        ours = grad(lambda s: (function(x, replaced(q, s), **options) * g).sum())(q.scale)
        theirs = grad(lambda s: (function(x, fq.dequantize(replaced(q, s)), **options) * g).sum())(q.scale)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-3)


def replaced(q: fq.QTensor, scale: torch.Tensor) -> fq.QTensor:
    return replace(q, scale=scale)


def test_convolutions_compose():
    q = fq.quantize(torch.randn(4, 3, 3, 3), fq.int4(8), inner=3)
    w, x = fq.dequantize(q), torch.randn(5, 2, 3, 6, 6)

    def call(x, s):
        return fq.conv2d(x, replaced(q, s), padding=1, stride=2).square().sum()

    def dense(x, s):
        return F.conv2d(x, fq.dequantize(replaced(q, s)), padding=1, stride=2).square().sum()

    close = {"rtol": 1e-4, "atol": 1e-3}
    torch.testing.assert_close(vmap(lambda x: F.conv2d(x, q))(x), vmap(lambda x: F.conv2d(x, w))(x), **close)
    torch.testing.assert_close(
        vmap(grad(call), (0, None))(x, q.scale), vmap(grad(dense), (0, None))(x, q.scale), **close
    )
    t, ts = torch.randn_like(x[0]), torch.randn_like(q.scale)
    ours, theirs = (jvp(f, (x[0], q.scale), (t, ts))[1] for f in (call, dense))
    torch.testing.assert_close(ours, theirs, **close)
    small = x[0, :1, :, :3, :3]
    ours, theirs = (jacrev(grad(f))(small, q.scale) for f in (call, dense))
    torch.testing.assert_close(ours, theirs, **close)
    ours, theirs = (grad(lambda s, f=f: grad(f)(small, s).square().sum())(q.scale) for f in (call, dense))
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-1)
    stacked = fq.stack([q, fq.quantize(torch.randn(4, 3, 3, 3), fq.int4(8), inner=3)])
    got = vmap(lambda q: fq.conv2d(x[0], q))(stacked)
    torch.testing.assert_close(got[0], F.conv2d(x[0], w), **close)
    fast = torch.compile(vmap(grad(call), (0, None)), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(fast(x, q.scale), vmap(grad(dense), (0, None))(x, q.scale), **close)


def test_the_backward_keeps_the_packed_weight_and_half_precision_rounds_once():
    q = fq.quantize(torch.randn(16, 8, 3, 3), fq.int4(8), inner=3)
    x = torch.randn(1, 8, 5, 5, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        F.conv2d(x, q)
    assert sum(t.nbytes for t in saved) <= q.nbytes
    half = x.detach().bfloat16()
    assert torch.equal(F.conv2d(half, q), F.conv2d(half.float(), q).bfloat16())


def test_a_network_of_convolutions_runs_quantized_from_a_plan():
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, padding_mode="circular"),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, groups=4, stride=2, padding="valid"),
        nn.ConvTranspose2d(8, 4, 3, stride=2, bias=False),
        nn.Flatten(),
        nn.Linear(4 * 7 * 7, 5),
    ).eval()
    params = {n: p.detach() for n, p in net.named_parameters()}
    x = torch.randn(2, 3, 8, 8)
    made = fq.plan(net, fq.int8())
    assert made.quantized == ("0.weight", "3.weight", "4.weight", "6.weight")
    assert [made[n].inner for n in made.quantized] == [3, 3, 3, 1]
    q = fq.quantize_params(params, made)
    assert q["0.weight"].shape == (8, 3, 3, 3)
    want = torch.func.functional_call(net, fq.dequantize_params(q), (x,))
    torch.testing.assert_close(fq.functional_call(net, q, (x,)), want, rtol=1e-5, atol=1e-4)
    guessed = fq.quantize_params(params, fq.int8())  # a bare dict: four dimensions are a convolution's
    torch.testing.assert_close(fq.functional_call(net, guessed, (x,)), want, rtol=1e-5, atol=1e-4)
    kept = fq.plan(net, fq.int8(act=fq.int8()))
    assert kept.quantized == ("6.weight",)
    assert kept["0.weight"].reason == (
        "convolution weights have no rule with quantized activations, which the layout has"
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": fq.quantize(torch.randn(4, 27), fq.int8())}, "expected a weight of 4 dimensions packed"),
        ({"weight": fq.quantize(torch.randn(4, 3, 3, 3), fq.layout("int8@int8"), inner=3)}, "weight-only"),
        ({"x": torch.randn(1, 5, 6, 6)}, "x has 5 channels, the weight takes 3"),
        ({"x": torch.randn(6, 6)}, r"x must have 3 or 4 dimensions, got \(6, 6\)"),
        ({"padding": "full"}, "padding must be numbers, 'valid' or 'same', got 'full'"),
        ({"padding": "same", "stride": 2}, "needs stride 1"),
        ({"stride": (1, 1, 1)}, "stride must be one number or 2"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    arguments = {"x": torch.randn(1, 3, 6, 6), "weight": None, **change}
    weight = arguments.pop("weight") or fq.quantize(torch.randn(4, 3, 3, 3), fq.int8(), inner=3)
    with pytest.raises(ValueError, match=message):
        fq.conv2d(arguments.pop("x"), weight, **arguments)
