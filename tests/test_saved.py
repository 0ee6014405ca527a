"""What a backward keeps: the packed weight, and the activation only where a scale is differentiated."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import fq


def saved_by(run) -> list[torch.Tensor]:
    kept: list[torch.Tensor] = []

    def pack(tensor):
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = run()
        y.sum().backward()
    return kept


@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize("key", ["int8", "int4:g32", "mxfp4", "nvfp4", "int8@int8"])
def test_linear_keeps_the_packed_weight_and_nothing_else(key, backend):
    q = fq.quantize(torch.randn(48, 64), fq.layout(key))
    x = torch.randn(5, 64, requires_grad=True)
    kept = saved_by(lambda: fq.linear(x, q, backend=backend))
    own = {t.data_ptr() for t in torch.utils._pytree.tree_leaves(q)}
    assert {t.data_ptr() for t in kept} == own
    assert sum(t.nbytes for t in kept) == q.nbytes


def test_linear_keeps_the_activation_for_the_gradient_of_a_scale():
    q = fq.quantize(torch.randn(48, 64), fq.int8())
    q = replace(q, scale=q.scale.requires_grad_())
    x = torch.randn(5, 64)
    kept = saved_by(lambda: fq.linear(x, q))
    assert {t.data_ptr() for t in kept} == {x.data_ptr(), q.data.data_ptr(), q.scale.data_ptr()}
    want = torch.ones(5, 48).T @ x
    torch.testing.assert_close(q.scale.grad, (want * q.data).sum(1, keepdim=True))


def test_a_prepacked_weight_stays_prepacked_in_the_backward():
    q = fq.prepack(fq.quantize(torch.randn(48, 64), fq.int4(group_size=32)), backend="aten")
    x = torch.randn(5, 64, requires_grad=True)
    kept = saved_by(lambda: fq.linear(x, q))
    assert {t.data_ptr() for t in kept} == {q.data.data_ptr(), q.scale.data_ptr()}
    torch.testing.assert_close(x.grad, torch.ones(5, 48) @ fq.dequantize(q))


def test_dequantize_and_embedding_keep_only_what_is_packed():
    q = fq.quantize(torch.randn(48, 64), fq.int4(group_size=32))
    q = replace(q, scale=q.scale.requires_grad_())
    assert sum(t.nbytes for t in saved_by(lambda: fq.dequantize(q))) == q.nbytes
    ids = torch.tensor([3, 3, 7])
    dense = 3 * 64 * 4
    assert max(t.nbytes for t in saved_by(lambda: fq.embedding(ids, q))) < dense
