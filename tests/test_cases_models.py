"""Cases about experts and about names in checkpoints."""

from __future__ import annotations

import pytest
import torch
import torch.utils._pytree as pytree

import fq


def test_case_O3_a_short_name_matches_the_runtime_path_on_dots():
    name = "language_model.model.layers.0.linear_attn.in_proj_qkv.weight"
    params = {name: torch.randn(4, 8), name.replace("qkv", "qkvz"): torch.randn(4, 8)}
    plan = fq.plan(params, {"linear_attn.in_proj_qkv": None, "re:.*": fq.int8()})
    assert plan.quantized == (name.replace("qkv", "qkvz"),)


def test_case_J3_experts_stored_either_way_are_the_same_experts():
    torch.manual_seed(0)
    factor = torch.where(torch.arange(128) // 32 % 2 == 0, 1.0, 1000.0)
    straight = torch.randn(2, 16, 128) * factor  # (E, out, in)
    turned = straight.mT.contiguous()  # (E, in, out)
    a, b = fq.quantize(straight, fq.int4(32)), fq.quantize(turned, fq.int4(32, axis=-2))
    assert torch.equal(fq.dequantize(a), fq.dequantize(b).mT)
    assert fq.sqnr(straight, a) > 20
    x = torch.randn(2, 5, 128)
    assert torch.equal(torch.bmm(x, a.mT), torch.bmm(x, b))


@pytest.mark.parametrize("key", ["fp8", "mxfp8", "nvfp4", "e5m2", "mxfp6"])
def test_case_J5_routed_experts_are_gathered_leaf_by_leaf(key):
    torch.manual_seed(0)
    w = torch.randn(8, 32, 64)
    q, idx = fq.quantize(w, fq.layout(key)), torch.tensor([5, 0, 5])
    gathered = pytree.tree_map(lambda t: t[idx], q)
    assert torch.equal(fq.dequantize(gathered), fq.dequantize(fq.quantize(w[idx], fq.layout(key))))
    assert torch.equal(fq.dequantize(q[idx]), fq.dequantize(gathered))
    joined = pytree.tree_map(lambda *t: torch.cat(t), gathered, q)
    assert torch.equal(fq.dequantize(joined), torch.cat([fq.dequantize(gathered), fq.dequantize(q)]))
    assert torch.equal(fq.dequantize(fq.cat([gathered, q])), fq.dequantize(joined))
