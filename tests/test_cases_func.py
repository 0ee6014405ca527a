"""Cases that users met elsewhere: transforms, compilation, autograd, parameter dicts; named by id."""

from __future__ import annotations

import copy
import pickle
import warnings
from dataclasses import replace
from itertools import product

import pytest
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import nn
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend

import fq

KEYS = ["int8", "int4:g8", "mxfp4", "nvfp4"]
MODES = {"normal": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}


def same(a: fq.QTensor, b: fq.QTensor) -> None:
    left, right = pytree.tree_leaves(a), pytree.tree_leaves(b)
    assert a.layout == b.layout and len(left) == len(right)
    for s, t in zip(left, right, strict=True):
        assert s.dtype == t.dtype and torch.equal(s.view(torch.uint8), t.view(torch.uint8))


# --- K: torch.func ---


@pytest.mark.parametrize("key", KEYS)
def test_case_K1_vmap_of_quantize_dequantize_and_matmul(key):
    x, y = torch.randn(4, 8, 64), torch.randn(3, 64)
    quantize = lambda t: fq.quantize(t, fq.layout(key))  # noqa: E731
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        q = torch.vmap(quantize)(x)
        wide = torch.vmap(fq.dequantize)(q)
        out = torch.vmap(fq.linear, (None, 0))(y, q)
        back = torch.vmap(fq.linear, (0, None))(torch.stack([y, -y]), q[1])
    same(q, fq.stack([quantize(t) for t in x]))
    assert torch.equal(wide, torch.stack([fq.dequantize(quantize(t)) for t in x]))
    torch.testing.assert_close(out, torch.stack([fq.linear(y, quantize(t)) for t in x]))
    torch.testing.assert_close(back, torch.stack([fq.linear(y, q[1]), fq.linear(-y, q[1])]))


@pytest.mark.parametrize("key", KEYS)
def test_case_K2_an_ensemble_equals_the_loop(key):
    net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 5)).requires_grad_(False)
    x = torch.randn(6, 64)
    members = []
    for _ in range(3):
        params = {k: torch.randn_like(v) / 8 for k, v in net.named_parameters()}
        members.append(fq.quantize_params(params, fq.layout(key)))
    got = torch.vmap(lambda p, x: fq.functional_call(net, p, x), (0, None))(fq.tree_stack(members), x)
    want = torch.stack([fq.functional_call(net, p, x) for p in members])
    assert want.std() > 0.01
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("key", ["int8", "nvfp4"])
def test_case_K3_nothing_is_compiled_inside(key, fresh_compile):
    x = torch.randn(3, 8, 64)
    f = lambda t: fq.dequantize(fq.quantize(t, fq.layout(key)))  # noqa: E731
    counter = CompileCounterWithBackend("aot_eager")
    assert torch.equal(torch.vmap(f)(x), torch.stack([f(t) for t in x]))
    assert torch.equal(torch.compile(torch.vmap(f), fullgraph=True, backend=counter)(x), torch.vmap(f)(x))
    assert counter.frame_count == 1


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 64)
        self.lm_head = nn.Linear(64, 20, bias=False)
        self.lm_head.weight = self.embed.weight

    def forward(self, ids):
        return self.lm_head(self.embed(ids))


def test_case_K4_tied_names():
    net, ids = Tied().requires_grad_(False), torch.tensor([[1, 2], [3, 19]])
    w, q = net.embed.weight, fq.quantize(net.embed.weight, fq.int8())
    d = fq.dequantize(q)
    both = fq.functional_call(net, {"embed.weight": q}, ids)  # one name stands at both
    torch.testing.assert_close(both, F.linear(d[ids], d))
    head = fq.functional_call(net, {"lm_head.weight": q, "embed.weight": w}, ids)
    torch.testing.assert_close(head, F.linear(w[ids], d))
    embed = fq.functional_call(net, {"lm_head.weight": w, "embed.weight": q}, ids)
    torch.testing.assert_close(embed, F.linear(d[ids], w))
    untied = fq.functional_call(net, {"lm_head.weight": q}, ids, tie_weights=False)
    torch.testing.assert_close(untied, F.linear(w[ids], d))
    assert not torch.allclose(both, head, atol=1e-3) and net.lm_head.weight is net.embed.weight


def test_case_K5_no_slow_fallback_under_vmap():
    x = torch.randn(64, 32, 64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        q = torch.vmap(lambda t: fq.quantize(t, fq.mxfp4()))(x)
    same(q, fq.quantize(x, fq.mxfp4()))


# --- L: torch.compile and torch.export ---


def test_case_L1_bf16_scales_do_not_depend_on_the_compiler(fresh_compile):
    x = torch.randn(16, 16, 768).bfloat16()
    layout = fq.int8((-1, -1))
    same(torch.compile(lambda x: fq.quantize(x, layout), fullgraph=True)(x), fq.quantize(x, layout))


@pytest.mark.parametrize("key", KEYS)
def test_case_L2_many_shapes_two_graphs(key, fresh_compile):
    counter = CompileCounter()
    f = torch.compile(lambda w: fq.quantize(w, fq.layout(key)), fullgraph=True, backend=counter, dynamic=True)
    for i in range(12):
        w = torch.randn(16 + i, 64 + 16 * i)
        same(f(w), fq.quantize(w, fq.layout(key)))
    assert counter.frame_count <= 2


@pytest.mark.parametrize("key", KEYS)
def test_case_L3_batches_of_one_and_more(key, fresh_compile):
    q, x = fq.quantize(torch.randn(32, 128), fq.layout(key)), torch.randn(2, 64, 128)
    torch._dynamo.mark_dynamic(x, 0)
    counter = CompileCounter()
    f = torch.compile(fq.linear, fullgraph=True, backend=counter)
    torch.testing.assert_close(f(x, q), fq.linear(x, q))
    for batch in (1, 3, 7):
        y = torch.randn(batch, 64, 128)
        torch.testing.assert_close(f(y, q), fq.linear(y, q))
    assert counter.frame_count <= 2


@pytest.mark.parametrize("key", KEYS)
def test_case_L4_export_with_buffers_of_packed_bytes(key):
    class Layer(nn.Module):
        def __init__(self, q):
            super().__init__()
            leaves, self.spec = pytree.tree_flatten(q)
            for i, leaf in enumerate(leaves):
                self.register_buffer(f"leaf{i}", leaf)
            self.count = len(leaves)

        def forward(self, x):
            leaves = [getattr(self, f"leaf{i}") for i in range(self.count)]
            return F.linear(x, pytree.tree_unflatten(leaves, self.spec))

    q = fq.quantize(torch.randn(32, 64), fq.layout(key))
    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(Layer(q), (torch.randn(4, 64),), dynamic_shapes=({0: batch},))
    assert sum(v.nbytes for v in program.state_dict.values()) == q.nbytes
    x = torch.randn(9, 64)
    torch.testing.assert_close(program.module()(x), fq.linear(x, q))


# --- M: autograd, autocast, inference mode ---


@pytest.mark.parametrize(("made", "called"), list(product(MODES, MODES)))
@pytest.mark.parametrize("key", KEYS)
def test_case_M1_any_mode_to_quantize_any_mode_to_call(key, made, called):
    w, x = torch.randn(16, 64), torch.randn(3, 64)
    want_q = fq.quantize(w, fq.layout(key))
    with MODES[made]():
        q = fq.quantize(w, fq.layout(key))
    with MODES[called]():
        same(q, want_q)
        assert torch.equal(fq.linear(x, q), fq.linear(x, want_q))
        assert torch.equal(fq.dequantize(q[4:8]), fq.dequantize(want_q[4:8]))


def test_case_M1_training_through_an_inference_weight_says_what_to_do():
    x = torch.randn(3, 64, requires_grad=True)
    with torch.inference_mode():
        q = fq.quantize(torch.randn(16, 64), fq.int8())
    with pytest.raises(RuntimeError, match="inference_mode.*clone"):
        fq.linear(x, q)
    fq.linear(x, q.clone()).sum().backward()
    torch.testing.assert_close(x.grad, fq.dequantize(q).sum(0).expand(3, 64))


@pytest.mark.parametrize("key", KEYS)
def test_case_M2_the_backward_runs_under_autocast(key):
    q, x = fq.quantize(torch.randn(16, 64), fq.layout(key)), torch.randn(3, 64, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        F.linear(x, q).sum().backward()
        g = torch.func.grad(lambda x: F.linear(x, q).float().sum())(x.detach())
    want = fq.dequantize(q).sum(0).expand(3, 64)
    for got in (x.grad, g):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2 * float(want.abs().max()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, None])
@pytest.mark.parametrize("compiled", [False, True])
def test_case_M3_output_dtypes_under_autocast(dtype, compiled, fresh_compile):
    q, x, b = fq.quantize(torch.randn(16, 64), fq.int4(32)), torch.randn(3, 64), torch.randn(16)
    w = fq.dequantize(q)
    calls = [
        lambda w: F.linear(x, w, b),
        lambda w: x @ w.T,
        lambda w: torch.addmm(b, x, w.T),
        lambda w: torch.mm(x, w.T),
    ]
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
        for call in calls:
            f = torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call
            got, want = f(q), call(w)
            assert got.dtype == want.dtype == (dtype or torch.float32)
            torch.testing.assert_close(got.float(), want.float(), rtol=2e-2, atol=5e-2)


@pytest.mark.parametrize("key", KEYS)
def test_case_M4_gradients_flow_through_frozen_layers(key):
    q1, q2 = (fq.quantize(torch.randn(32, 32) / 4, fq.layout(key)) for _ in range(2))
    x, a, b = torch.randn(5, 32), torch.randn(4, 32), torch.randn(32, 4)

    def loss(linear, a, b, x):
        return linear(torch.relu(linear(x, 1) + x @ a.T @ b.T), 2).pow(2).sum()

    def quantized(x, i):
        return fq.linear(x, (q1, q2)[i - 1])

    def dense(x, i):
        return F.linear(x, fq.dequantize((q1, q2)[i - 1]))

    got = torch.func.grad(loss, (1, 2, 3))(quantized, a, b, x)
    want = torch.func.grad(loss, (1, 2, 3))(dense, a, b, x)
    for g, w in zip(got, want, strict=True):
        assert w.abs().max() > 1e-2
        torch.testing.assert_close(g, w, rtol=1e-3, atol=1e-3 * float(w.abs().max()))
    assert not any(t.requires_grad for t in pytree.tree_leaves((q1, q2)))


def test_case_M5_no_grad_around_the_transform_and_the_forward():
    class Frozen(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(64, 8)

        @torch.no_grad()
        def forward(self, x):
            return self.layer(x)

    net, x = Frozen(), torch.randn(3, 64)
    want = fq.quantize_params(dict(net.named_parameters()), fq.int8())
    with torch.no_grad():
        plan = fq.plan(net, fq.int8())
        got = fq.quantize_params(dict(net.named_parameters()), plan)
    assert plan.quantized == ("layer.weight",)
    same(got["layer.weight"], want["layer.weight"])
    torch.testing.assert_close(
        fq.functional_call(net, got, x), F.linear(x, fq.dequantize(got["layer.weight"]), net.layer.bias)
    )


# --- N: copies ---


@pytest.mark.parametrize("key", KEYS)
def test_case_N4_copies_of_a_parameter_dict(key):
    params = fq.quantize_params({"w": torch.randn(8, 64), "b": torch.randn(8)}, {"w": fq.layout(key)})
    for copied in (copy.deepcopy(params), pickle.loads(pickle.dumps(params))):
        same(copied["w"], params["w"])
        ours = {t.data_ptr() for t in pytree.tree_leaves(params)}
        assert not ours & {t.data_ptr() for t in pytree.tree_leaves(copied)}
    shallow = copy.copy(params["w"])
    assert shallow.data is params["w"].data
    shared = copy.deepcopy(params["w"]).share_memory_()
    assert all(t.is_shared() for t in pytree.tree_leaves(shared))
    assert fq.tree_to(params, "meta")["w"].is_meta


@pytest.mark.parametrize("key", KEYS)
def test_case_N5_a_parameter_dict_prints_briefly_everywhere(key):
    params = fq.quantize_params({"w": torch.randn(8, 64), "b": torch.randn(2)}, {"w": fq.layout(key)})
    stacked, texts = fq.tree_stack([params, params]), []

    def note(p):
        texts.extend([str(p["w"]), str({"w": p["w"]})])
        return fq.linear(torch.ones(1, 64, device=p["w"].device), p["w"])

    note(params)
    note(fq.tree_to(params, "meta"))
    torch.vmap(note)(stacked)
    torch.func.grad(lambda x, p: (note(p) * x).sum())(torch.ones(8), params)
    assert len(texts) == 8 and max(map(len, texts)) < 400
    assert all("(8, 64)" in t and key in t for t in texts)


# --- P: bias ---


@pytest.mark.parametrize("rows", [1, 33])
@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_case_P1_bias_is_added_once(key, rows, dtype):
    bias, x = torch.tensor([1.0, 2.0, 3.0]), torch.randn(rows, 32).to(dtype)
    q = fq.quantize(torch.zeros(3, 32), fq.layout(key))
    named = {
        "int8": fq.int8_matmul,
        "int4:g8": fq.int4_matmul,
        "mxfp4": fq.mx_matmul,
        "nvfp4": fq.nvfp4_matmul,
    }
    outs = [fq.linear(x, q, bias), fq.linear(x, q, bias, backend="reference"), named[key](x, q, bias)]
    outs += [F.linear(x, q, bias), torch.addmm(bias, x, q.T), x @ q.T + bias.to(dtype)]
    for out in outs:
        assert torch.equal(out.float(), bias.expand(rows, 3))


def test_case_P1_bias_on_the_kernels_of_aten():
    bias = torch.randn(16)
    zero = torch.zeros(16, 64)
    for q in (
        fq.quantize(zero, fq.int8()),
        fq.quantize(zero, fq.int8(act=fq.int8())),
        fq.prepack(fq.quantize(zero, fq.int4(32)), backend="aten"),
    ):
        for rows in (1, 33):
            out = fq.linear(torch.randn(rows, 64), q, bias, backend="aten")
            assert torch.equal(out, bias.expand(rows, 16))


@pytest.mark.parametrize("key", KEYS)
def test_case_P2_float32_bias_with_bf16_activations(key):
    net = nn.Linear(64, 16)
    params = fq.quantize_params({k: v.detach() for k, v in net.named_parameters()}, fq.layout(key))
    assert params["bias"].data_ptr() == net.bias.data_ptr()
    x = torch.randn(3, 64).bfloat16()
    got = fq.functional_call(net, params, x)
    wide = F.linear(x.float(), fq.dequantize(params["weight"]), net.bias.detach())
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, wide.bfloat16()) or (got.float() - wide).abs().max() <= 2**-8 * wide.abs().max()


def test_learned_scales_train_under_plain_autograd():
    q = fq.quantize(torch.randn(8, 64), fq.int8())
    q = replace(q, scale=q.scale.clone().requires_grad_())
    x, target = torch.randn(20, 64), torch.randn(20, 8)
    optimizer = torch.optim.SGD([q.scale], lr=1e-8)
    losses = []
    for _ in range(5):
        loss = (F.linear(x, q) - target).pow(2).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0]
