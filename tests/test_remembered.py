"""What is looked up once per weight: never used where it does not hold, and it never leaves the process."""

from __future__ import annotations

import copy
import io
import pickle
from dataclasses import replace

import pytest
import torch
import torch.utils._pytree as pytree

import fq
from fq.backends import registry


@pytest.fixture
def used() -> fq.QTensor:
    q = fq.quantize(torch.randn(16, 64), fq.int8())
    fq.linear(torch.randn(2, 64), q)
    return q


def test_a_used_weight_is_copied_and_saved_without_what_was_remembered(used):
    fresh = vars(fq.quantize(torch.randn(16, 64), fq.int8())).keys()
    assert vars(used).keys() > fresh
    file = io.BytesIO()
    torch.save({"w": used}, file)
    file.seek(0)
    for q in (
        copy.deepcopy(used),
        copy.copy(used),
        pickle.loads(pickle.dumps(used)),
        torch.load(file, weights_only=True)["w"],
        replace(used),
        pytree.tree_map(torch.clone, used),
    ):
        assert vars(q).keys() == fresh
        assert torch.equal(q.data, used.data)


def test_a_used_weight_obeys_the_backend_that_is_asked_for(used):
    x = torch.randn(3, 64)
    auto = fq.linear(x, used)
    want = x @ fq.dequantize(used).T
    for name in ("reference", "aten", "reference"):
        with fq.use_backend(name):
            torch.testing.assert_close(fq.linear(x, used), want, rtol=1e-5, atol=1e-4)
        assert torch.equal(fq.linear(x, used, backend=name), fq.linear(x, copy.deepcopy(used), backend=name))
    assert torch.equal(fq.linear(x, used), auto)
    packed = fq.prepack(fq.quantize(torch.randn(16, 64), fq.int4(32)), backend="aten")
    fq.linear(x, packed)
    with pytest.raises(fq.BackendError, match="x is torch.bfloat16 but scales are torch.float32"):
        fq.linear(x.bfloat16(), packed, backend="aten")
    assert fq.linear(x.bfloat16(), packed).dtype == torch.bfloat16


def test_a_kernel_registered_later_is_found(used, monkeypatch):
    monkeypatch.setitem(registry._KERNELS, "linear", list(registry.kernels("linear")))
    x = torch.randn(3, 64)
    fq.linear(x, used)

    @registry.implements("linear", backend="later", priority=1000)
    def linear(x, q, bias=None):
        return torch.full((x.shape[0], 16), 7.0)

    assert torch.equal(fq.linear(x, used), torch.full((3, 16), 7.0))


def test_a_scale_that_starts_to_need_a_gradient_gets_one(used):
    x = torch.randn(3, 64)
    assert not fq.linear(x, used).requires_grad
    used.scale.requires_grad_()
    fq.linear(x, used).sum().backward()
    want = (used.data.float() * x.sum(0)).sum(1, keepdim=True)
    torch.testing.assert_close(used.scale.grad, want, rtol=1e-4, atol=1e-3)
    with torch.no_grad():
        assert not fq.linear(x, used).requires_grad


@pytest.mark.parametrize("call", ["linear", "dequantize"])
def test_a_used_weight_that_was_changed_by_hand_is_checked_again(used, call):
    run = {"linear": lambda q: fq.linear(torch.randn(2, 64), q), "dequantize": fq.dequantize}[call]
    run(used)
    for wrong in (
        pytree.tree_map(lambda t: t.bfloat16() if t.is_floating_point() else t, used),
        replace(used, scale=used.scale[:8]),
        replace(used, inner=(63,)),
    ):
        with pytest.raises(ValueError, match=f"^{call}: "):
            run(wrong)
