"""nn.MultiheadAttention and nn.TransformerEncoder on quantized projections, against the dequantized ones."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fq

CLOSE = {"rtol": 1e-4, "atol": 1e-5}
CAUSAL = nn.Transformer.generate_square_subsequent_mask(5)


def both(net: nn.Module, q: dict, args: tuple, kwargs: dict):
    dense = fq.dequantize_params(q)
    return fq.functional_call(net, q, args, kwargs), torch.func.functional_call(net, dense, args, kwargs)


@pytest.mark.parametrize(
    "options", [{}, {"bias": False}, {"add_bias_kv": True}, {"add_zero_attn": True}, {"kdim": 24, "vdim": 16}]
)
@pytest.mark.parametrize(
    "call",
    [
        {},
        {"need_weights": False},
        {"average_attn_weights": False},
        {"attn_mask": CAUSAL},
        {"attn_mask": CAUSAL, "is_causal": True, "need_weights": False},
        {"attn_mask": torch.randn(2 * 4, 5, 5) > 0.5, "need_weights": False},
        {"key_padding_mask": torch.tensor([[False] * 5, [False] * 3 + [True] * 2])},
        {"key_padding_mask": torch.tensor([[False] * 5, [False] * 4 + [True]]), "attn_mask": CAUSAL < -1},
    ],
)
def test_attention_is_that_of_the_dequantized_projections(options, call):
    torch.manual_seed(0)
    net = nn.MultiheadAttention(32, 4, **options).eval().requires_grad_(False)
    x = torch.randn(5, 2, 32)
    key = torch.randn(5, 2, options.get("kdim", 32))
    value = torch.randn(5, 2, options.get("vdim", 32))
    q = fq.quantize_params(dict(net.named_parameters()), {"re:.*proj.*weight": fq.int4(8)})
    assert sum(isinstance(v, fq.QTensor) for v in q.values()) == (4 if "kdim" in options else 2)
    inputs = [(x, key, value)] if "kdim" in options else [(x, key, value), (x, x, x)]
    for args in inputs:
        got, want = both(net, q, args, call)
        torch.testing.assert_close(got, want, **CLOSE)


def test_unbatched_and_batch_first_attention_and_its_gradients():
    torch.manual_seed(0)
    net = nn.MultiheadAttention(32, 4, batch_first=True).eval().requires_grad_(False)
    q = fq.quantize_params(dict(net.named_parameters()), fq.plan(net, fq.int8()))
    assert isinstance(q["in_proj_weight"], fq.QTensor) and isinstance(q["out_proj.weight"], fq.QTensor)
    x = torch.randn(2, 5, 32)
    torch.testing.assert_close(*both(net, q, (x, x, x), {}), **CLOSE)
    torch.testing.assert_close(*both(net, q, (x[0], x[0], x[0]), {}), **CLOSE)
    dense = fq.dequantize_params(q)

    def ours(x):
        return fq.functional_call(net, q, (x, x, x))[0].square().sum()

    def theirs(x):
        return torch.func.functional_call(net, dense, (x, x, x))[0].square().sum()

    torch.testing.assert_close(torch.func.grad(ours)(x), torch.func.grad(theirs)(x), **CLOSE)
    xs = torch.randn(3, 2, 5, 32)
    torch.testing.assert_close(
        torch.vmap(torch.func.grad(ours))(xs)[1], torch.func.grad(theirs)(xs[1]), **CLOSE
    )
    fast = torch.compile(torch.func.grad(ours), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(fast(x), torch.func.grad(theirs)(x), **CLOSE)


@pytest.mark.parametrize("training", [False, True])
def test_an_encoder_runs_on_quantized_projections(training):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 48, dropout=0.0, batch_first=True)
    net = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train(training).requires_grad_(False)
    made = fq.plan(net, fq.int4(16))
    assert len(made.quantized) == 8
    q = fq.quantize_params(dict(net.named_parameters()), made)
    x = torch.randn(2, 5, 32)
    got, want = both(net, q, (x,), {"mask": CAUSAL, "src_key_padding_mask": torch.zeros(2, 5)})
    torch.testing.assert_close(got, want, **CLOSE)


def test_what_has_no_meaning_is_refused():
    net = nn.MultiheadAttention(32, 4).requires_grad_(False)
    q = fq.quantize_params(dict(net.named_parameters()), fq.plan(net, fq.int8()))
    x = torch.randn(5, 2, 32)
    with pytest.raises(RuntimeError, match="is_causal is a hint about attn_mask"):
        fq.functional_call(net, q, (x, x, x), {"is_causal": True})
    with pytest.raises(ValueError, match="query has 16 features, expected 32"):
        fq.functional_call(net, q, (x[..., :16], x, x))
