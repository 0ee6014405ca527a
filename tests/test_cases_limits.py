"""Cases H1 and H4 that users met: few rows of int8, and backends that cannot run a call."""

from __future__ import annotations

import pytest
import torch

import fq

ROWS = (1, 2, 4, 5, 15, 16, 17)


def operands(dtype: torch.dtype) -> tuple[torch.Tensor, fq.QTensor]:
    w = torch.randn(256, 1024)
    return torch.randn(32, 1024).to(dtype), fq.quantize(w, fq.int8(act=fq.int8()))


@pytest.mark.parametrize("backend", ["auto", "reference", "aten"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_case_H1_few_rows_are_rows_of_many(backend, dtype):
    x, q = operands(dtype)
    many = fq.int8_matmul(x, q, backend=backend)
    act = fq.quantize(x, fq.int8())
    exact = (act.data.double() @ q.data.double().T) * act.scale.double() * q.scale.double().T
    torch.testing.assert_close(many.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-4)
    for m in ROWS:  # sums of integers are exact, in whatever order
        assert torch.equal(fq.int8_matmul(x[:m], q, backend=backend), many[:m])


@pytest.mark.slow
def test_case_H1_few_rows_are_rows_of_many_compiled(fresh_compile):
    x, q = operands(torch.float32)
    f = torch.compile(fq.linear, fullgraph=True, dynamic=True, backend="aot_eager")
    for m in (17, *ROWS):
        assert torch.equal(f(x[:m], q), fq.linear(x, q)[:m])


def test_case_H4_a_backend_that_cannot_says_why_and_which_can():
    x, q = torch.randn(3, 64), fq.quantize(torch.randn(16, 64), fq.fp8())
    with pytest.raises(ValueError, match=r"unknown name 'fbgemm'; known are auto, reference, aten"):
        fq.linear(x, q, backend="fbgemm")
    with pytest.raises(fq.BackendError) as error:
        fq.fp8_matmul(x, q, backend="aten")
    for part in ("linear: backend 'aten' cannot run this call", "fp8", "backends that can: reference"):
        assert part in str(error.value)
    assert torch.equal(fq.fp8_matmul(x, q), fq.fp8_matmul(x, q, backend="reference"))
    meta = fq.quantize(torch.randn(16, 64), fq.int8()).to("meta")
    assert "aten       no: device is meta" in fq.explain(fq.linear, x.to("meta"), meta)
