"""Roles and axes that module types do not tell, seen in one recorded forward."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fq


class Uses(nn.Module):
    """A module whose parameters are used in many ways."""

    def __init__(self) -> None:
        super().__init__()
        shapes = {
            "rows": (8, 16),
            "transposed": (16, 8),
            "turned_and_copied": (16, 8),
            "experts": (3, 16, 8),
            "chosen": (3, 8, 16),
            "chunked": (16, 16),
            "both": (16, 16),
            "table": (5, 16),
            "summed": (16, 16),
            "einsum": (8, 16),
            "unused": (8, 16),
        }
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))
        self.bias = nn.Parameter(torch.randn(8))
        self.norm = nn.BatchNorm1d(16)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.norm(x)) + F.embedding(ids, self.table)
        y = F.linear(x, self.rows, self.bias) + torch.addmm(self.bias, x, self.transposed)
        y = y + x @ self.turned_and_copied.t().contiguous().float().t()
        y = y + torch.bmm(x.expand(3, -1, -1), self.experts).sum(0)
        y = y + F.linear(x, self.chosen[torch.tensor(1)]) + (x @ self.chosen[1:].mT).sum(0)
        a, b = self.chunked.chunk(2)
        y = y + F.linear(x, a) * F.linear(x, b)
        y = y + F.linear(x @ self.both + F.linear(x, self.both), self.rows)
        return y + (x * self.summed.sum(0)) @ self.rows.mT + torch.einsum("bk,nk->bn", x, self.einsum)


WANT = {
    "rows": ("matmul", -1),
    "transposed": ("matmul", -2),
    "turned_and_copied": ("matmul", -2),
    "experts": ("matmul", -2),
    "chosen": ("matmul", -1),
    "chunked": ("matmul", -1),
    "both": ("matmul along axes -2, -1", -1),
    "table": ("embedding", -1),
    "summed": ("sum", -1),
    "einsum": ("matmul", -1),
    "unused": ("unused in the example", -1),
    "bias": ("vector", -1),
}


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_recorded_forward_tells_roles_and_contraction_axes(device):
    net = Uses().to(device)
    example = ((torch.randn(4, 16, device=device), torch.zeros(4, dtype=torch.int64, device=device)), {})
    made = fq.plan(net, fq.int8(), example=example)
    assert {n: (made[n].role, made[n].axis) for n in WANT} == WANT
    quantized = [n for n, (role, _) in WANT.items() if role == "matmul"]
    assert made.quantized == tuple(quantized)
    assert [made[n].layout for n in quantized] == [fq.int8(axis=WANT[n][1]) for n in quantized]
    assert "sum is kept by default" in str(made)


def test_recording_leaves_the_module_its_buffers_and_the_seed_as_they_were():
    net = Uses()
    state = {n: v.clone() for n, v in net.state_dict().items()}
    parameters = dict(net.named_parameters())
    torch.manual_seed(7)
    seed = torch.get_rng_state()
    fq.plan(net, fq.int8(), example=((torch.randn(4, 16), torch.zeros(4, dtype=torch.int64)), {}))
    torch.manual_seed(7)
    torch.randn(4, 16)
    after = torch.get_rng_state()
    torch.set_rng_state(seed)
    torch.randn(4, 16)
    assert torch.equal(after, torch.get_rng_state())
    assert all(torch.equal(v, state[n]) for n, v in net.state_dict().items())
    assert all(p is parameters[n] and type(p) is nn.Parameter for n, p in net.named_parameters())


def test_what_a_recorded_plan_quantizes_runs():
    net = Uses().eval()
    x, ids = torch.randn(4, 16), torch.tensor([0, 1, 2, 4])
    params = {n: p.detach() for n, p in net.named_parameters()}
    made = fq.plan(net, {"re:rows|transposed|experts": fq.int4(8)}, example=((x, ids), {}))
    qparams = fq.quantize_params(params, made)
    assert qparams["transposed"].scale.shape == (8, 2)  # groups along the contraction, stored (out, in)
    want = torch.func.functional_call(net, fq.dequantize_params(qparams), (x, ids))
    torch.testing.assert_close(fq.functional_call(net, qparams, (x, ids)), want, rtol=1e-5, atol=1e-4)


def test_a_wrong_example_is_refused():
    net = nn.Linear(4, 2)
    with pytest.raises(TypeError, match=r"example must be \(args, kwargs\), a tuple and a dict, got Tensor"):
        fq.plan(net, fq.int8(), example=torch.ones(1, 4))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="example= runs a module, got a dict"):
        fq.plan(dict(net.named_parameters()), fq.int8(), example=((torch.ones(1, 4),), {}))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        fq.plan(net, fq.int8(), example=((torch.ones(1, 5),), {}))


def test_case_O5_gpt2_weights_are_grouped_along_their_inputs():
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
    layer = conv1d(192, 64)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(64, 192) * torch.logspace(-3, 1, 64).unsqueeze(1))
    made = fq.plan(layer, fq.int4(32))
    assert (made["weight"].role, made["weight"].axis) == ("matmul", -2)
    q = fq.quantize_params(dict(layer.named_parameters()), made)["weight"]
    assert q.shape == (64, 192) and q.scale.shape == (192, 2)
    x = torch.randn(3, 64)
    want = x @ fq.dequantize(q) + layer.bias
    got = fq.functional_call(layer, {"weight": q}, (x,))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    groups = layer.weight.detach().T.unflatten(1, (2, 32))  # (out, group, in)
    assert torch.equal(q.scale, (groups.amax(-1) - groups.amin(-1)) / 15)


@pytest.mark.parametrize("transposed", [False, True])
def test_experts_are_grouped_along_the_contraction_as_their_module_declares(transposed):
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.is_transposed = transposed
            self.up = nn.Parameter(torch.randn(3, 8, 16) if transposed else torch.randn(3, 16, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.stack([x @ w if transposed else F.linear(x, w) for w in self.up])

    net = Experts()
    x = torch.randn(2, 8)
    for made in (fq.plan(net, fq.int8()), fq.plan(net, fq.int8(), example=((x,), {}))):
        assert made["up"].axis == (-2 if transposed else -1)
    q = fq.quantize_params(dict(net.named_parameters()), made)
    assert q["up"].scale.shape == (3, 16, 1)
    want = torch.func.functional_call(net, fq.dequantize_params(q), (x,))
    torch.testing.assert_close(fq.functional_call(net, q, (x,)), want, rtol=1e-5, atol=1e-4)
