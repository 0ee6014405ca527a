"""The aten backend where it does without PyTorch's kernels: many float32 rows, exact integer sums."""

from __future__ import annotations

import pytest
import torch

import fq

EPS = 2.0**-24


@pytest.mark.parametrize("rows", [1, 4, 5, 40])
def test_int8_times_float32_is_within_the_bound_for_any_number_of_rows(rows):
    w, x, bias = torch.randn(48, 1500), torch.randn(rows, 1500), torch.randn(48)
    q = fq.quantize(w, fq.int8())
    wide = fq.dequantize(q).double()
    exact = x.double() @ wide.T + bias.double()
    y = fq.linear(x, q, bias, backend="aten")
    bound = 2 * 1500 * EPS * (x.double().abs() @ wide.abs().T) + 2 * EPS * exact.abs()
    assert ((y.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("rows", [1, 4, 5, 40])
@pytest.mark.parametrize("columns", [1, 1024, 2500])
def test_int8_times_int8_sums_exactly(rows, columns):
    a = torch.randint(-128, 128, (rows, columns), dtype=torch.int8)
    b = torch.randint(-128, 128, (16, columns), dtype=torch.int8)
    a[0], b[0] = -128, -128
    a[-1], b[1] = -128, 127
    fq.linear(torch.ones(1, 4), fq.quantize(torch.ones(2, 4), fq.int8()))  # loads the backends and their ops
    got = torch.ops.fq.aten_int_mm(a, b)
    assert got.dtype == torch.int32
    assert torch.equal(got.long(), a.long() @ b.long().T)


def test_prepack_leaves_float32_int4_to_the_reference_unless_aten_is_named():
    w, x = torch.randn(32, 64), torch.randn(3, 64)
    q = fq.quantize(w, fq.int4(group_size=32))
    assert fq.prepack(q) is q
    why = str(fq.explain(fq.linear, x, q))
    assert 'fq.prepack(q, backend="aten")' in why
    packed = fq.prepack(q, backend="aten")
    assert packed.layout.storage == "aten_cpu"
    half = fq.quantize(w.bfloat16(), fq.int4(group_size=32, scale=torch.bfloat16))
    assert fq.prepack(half).layout.storage == "aten_cpu"
    assert "call fq.prepack(q) once" in str(fq.explain(fq.linear, x.bfloat16(), half))
    exact = x.double() @ fq.dequantize(q).double().T
    bound = 2 * 64 * EPS * (x.double().abs() @ fq.dequantize(q).double().abs().T)
    assert ((fq.linear(x, packed, backend="aten").double() - exact).abs() <= bound).all()
