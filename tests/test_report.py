"""How QTensors look in notebooks: never raises, touches a sample, in every state a tensor can be in."""

from __future__ import annotations

import time

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import fq

KEYS = ["int8", "int4:g32", "mxfp4", "nvfp4", "int4:g8:scale=(uint6:g4:sym:scale=float16):zp=(int6:g4:sym)"]


@pytest.mark.parametrize("key", KEYS)
def test_case_N5_html_says_what_it_is(key):
    q = fq.quantize(torch.randn(8, 64), fq.layout(key))
    text = q._repr_html_()
    for part in (q.layout.key, "8 × 64", f"{q.nbytes:,}", "bits per element", "float32"):
        assert part in text
    assert "scales" in text


def test_case_N5_html_in_every_state():
    q = fq.quantize(torch.randn(8, 64), fq.nvfp4())
    seen = [q.to("meta")._repr_html_()]
    with FakeTensorMode() as mode:
        seen.append(torch.utils._pytree.tree_map(mode.from_tensor, q)._repr_html_())

    def look(q):
        seen.append(q._repr_html_())
        return fq.dequantize(q).sum()

    torch.vmap(look)(fq.stack([q, q]))
    torch.func.grad(lambda x: look(fq.quantize(x, fq.nvfp4())) + x.sum())(torch.randn(8, 64))
    assert len(seen) == 4
    for text in seen:
        assert "nvfp4" in text and "8 × 64" in text


def test_case_N5_html_of_a_large_weight_is_quick():
    q = fq.QTensor(
        torch.zeros(4096, 4096, dtype=torch.int8), torch.ones(4096, 1), fq.int8(), torch.float32, (4096,)
    )
    q._repr_html_()
    start = time.perf_counter()
    text = q._repr_html_()
    assert time.perf_counter() - start < 0.05
    assert "1 to 1" in text
