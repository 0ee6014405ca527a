"""Faults that an attack on the whole library found: each kind once, by value."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import fq


def test_activations_off_the_vector_boundary_do_not_crash_the_int8_kernel():
    q = fq.quantize(torch.randn(32, 64).bfloat16(), fq.int8(scale=torch.bfloat16))
    base = torch.randn(3, 80).bfloat16()
    for start in range(16):
        x = base[1, start : start + 64]
        got = fq.linear(x, q, backend="aten")
        torch.testing.assert_close(
            got.float(), fq.linear(x, q, backend="reference").float(), rtol=2e-2, atol=0.2
        )
    rows = torch.randn(6 * 64 + 1).bfloat16()[1:].reshape(6, 64)
    assert fq.linear(rows, q).shape == (6, 32)


def test_single_rows_with_strides_are_dense_for_the_kernel():
    q = fq.quantize(torch.randn(4, 1), fq.int8())
    assert torch.equal(fq.linear(torch.ones(1, 2)[:, ::2], q), fq.dequantize(q).T)
    x = torch.ones(1, 4, requires_grad=True)
    fq.linear(x, fq.quantize(torch.randn(4, 1).T, fq.int8())).sum().backward()
    assert torch.isfinite(x.grad).all() and x.grad.abs().max() > 0


def test_quantized_scales_have_no_zero_point():
    for key in ("int4:g4:scale=(uint8)", "int8:scale=(int8:asym)"):
        with pytest.raises(ValueError, match="quantized scales have no zero point"):
            fq.layout(key)
    x = torch.randn(5, 64)
    assert fq.sqnr(x, fq.quantize(x, fq.layout("int4:g4:scale=(uint8:sym)"))) > 29


def test_operands_on_two_devices_are_refused():
    q = fq.quantize(torch.randn(4, 8), fq.int8())
    for x, w, b in ((torch.ones(2, 8), q.to("meta"), None), (torch.ones(2, 8, device="meta"), q, None)):
        with pytest.raises(ValueError, match=r"linear: x is on (cpu|meta), q on (cpu|meta)"):
            fq.linear(x, w, b)
    with pytest.raises(ValueError, match="embedding: ids are on meta"):
        fq.embedding(torch.tensor([1, 2], device="meta"), q)
    with pytest.raises(ValueError, match="one device"):
        fq.linear(torch.ones(2, 8), q, torch.ones(4, device="meta"))


@pytest.mark.parametrize("child", ["pre_scale", "perm"])
def test_vectors_keep_their_rank_with_adjusted_columns(child):
    def adjusted(*shape):
        q = fq.quantize(torch.randn(*shape), fq.int8())
        v = torch.rand(*shape[:-2], 1, shape[-1]) + 0.5
        return replace(q, **{child: v if child == "pre_scale" else v.argsort(-1)})

    q, q3 = adjusted(6, 8), adjusted(3, 6, 8)
    w, w3 = fq.dequantize(q), fq.dequantize(q3)
    a, b = torch.randn(6), torch.randn(8)
    for got, want in (
        (fq.matmul(a, q), a @ w),
        (fq.linear(b, q), b @ w.T),
        (fq.linear(a, q.T, b), a @ w + b),
        (fq.matmul(q, b), w @ b),
        (fq.embedding(torch.tensor(3), q), w[3]),
        (fq.matmul(a, q3), a @ w3),
        (fq.matmul(b, q3.mT), b @ w3.mT),
        (torch.vmap(fq.matmul)(torch.stack([a, a, a]), q3), torch.stack([a @ t for t in w3])),
    ):
        assert got.shape == want.shape
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_pre_scale_rounds_once():
    w = 100 * torch.randn(32, 64)
    q = replace(fq.quantize(w.half(), fq.int8()), pre_scale=torch.full((1, 64), 256.0))
    x = torch.full((1, 32), 100.0).half()
    wide = x.float() @ fq.dequantize(q, torch.float32)
    assert wide.abs().max() > 100
    torch.testing.assert_close(fq.matmul(x, q), wide.half(), rtol=2e-3, atol=0)
    small = replace(q, pre_scale=torch.full((1, 64), 2.0**-8))
    y = fq.linear(torch.full((1, 64), 1e-2).half(), small)
    want = (torch.full((1, 64), 1e-2).half().float() @ fq.dequantize(small, torch.float32).T).half()
    torch.testing.assert_close(y, want, rtol=2e-3, atol=0.5)


def test_a_static_activation_scale_has_no_gradient():
    q = fq.quantize(torch.randn(4, 8), fq.int8(act=fq.int8()), input_scale=0.02)
    i = torch.tensor([[0.02]], requires_grad=True)
    q = replace(q, input_scale=i)
    for x in (torch.randn(2, 8), torch.randn(2, 8, requires_grad=True)):
        y = fq.linear(x, q)
        assert not y.requires_grad or torch.autograd.grad(y.sum(), i, allow_unused=True) == (None,)


def test_integer_products_of_blocks_several_rows_high():
    w, x = torch.randn(4, 8), torch.randn(4, 8)
    for key in ("int8:block2x-1@int8", "int8@int8:block2x-1", "int8:tensor@int8:tensor"):
        q = fq.quantize(w, fq.layout(key))
        a = fq.dequantize(fq.quantize(x, q.layout.act))
        torch.testing.assert_close(fq.linear(x, q), a @ fq.dequantize(q).T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("key", ["int8", "int4:g4", "nvfp4"])
def test_a_vector_is_one_row_whichever_way_it_lies(key):
    x = torch.randn(8)
    layout = fq.layout(f"{key}:axis-2")
    assert torch.equal(fq.dequantize(fq.quantize(x, layout)), fq.dequantize(fq.quantize(x, fq.layout(key))))
    assert torch.equal(fq.fake_quantize(x, layout), fq.dequantize(fq.quantize(x, layout)))


def test_children_that_do_not_fit_are_refused():
    q, x = fq.quantize(torch.randn(4, 8), fq.int8()), torch.randn(2, 8)
    bad = {
        "scale": q.scale.expand(3, 4, 1),
        "pre_scale": torch.ones(2, 1),
        "perm": torch.arange(4).reshape(1, 4),
        "input_scale": torch.ones(3),
    }
    for name, child in bad.items():
        with pytest.raises(ValueError, match=name):
            fq.linear(x, replace(q, **{name: child}))
    with pytest.raises(ValueError, match="perm is torch.float32"):
        fq.linear(x, replace(q, perm=torch.ones(1, 8)))
    a = fq.quantize(torch.randn(4, 8), fq.int4(4))
    with pytest.raises(ValueError, match="zero_point of int4:g4 must be float"):
        fq.linear(x, replace(a, zero_point=a.zero_point.to(torch.int8)))


def test_wrong_kinds_are_type_errors_that_name_the_argument():
    x, q = torch.randn(4, 8), fq.quantize(torch.randn(4, 8), fq.int8())
    for call, name in (
        (lambda: fq.quantize(x, fq.int8(), noise=0.5), "noise"),
        (lambda: fq.quantize(x, fq.int8(), scale="a"), "scale"),
        (lambda: fq.quantize(x, fq.int8(), scale=torch.full((4, 1), 0.1 + 0.5j)), "scale"),
        (lambda: fq.quantize(x, fq.int8(), inner=1.0), "inner"),
        (lambda: fq.quantize(x, fq.int8(), inner=True), "inner"),
        (lambda: fq.fake_quantize(x, fq.int8(), scale=0.1), "scale"),
        (lambda: fq.dequantize(q, torch.int32), "dtype"),
        (lambda: fq.dequantize(q, torch.complex64), "dtype"),
        (lambda: fq.tree_stack([q, q]), "tree_stack"),
    ):
        with pytest.raises(TypeError, match=name):
            call()
    with pytest.raises(ValueError, match="chunk"):
        q.chunk(0)
    for call in (lambda: q + 1, lambda: 1 - q, lambda: q * x, lambda: q / 2, lambda: -q):
        with pytest.raises(fq.UnsupportedOp, match=r"fq\.dequantize"):
            call()


def test_texts_that_mean_nothing_are_refused():
    for text in (
        "int8:g32:g64",
        "int8:scale=bfloat16:scale=float16",
        "int8:g٣٢",
        "int8:scale=(int4:sym:aten_cpu)",
    ):
        with pytest.raises(ValueError, match="layout|Layout"):
            fq.layout(text)
    for values in ((0.0, 1e-46), (-1e300, 1e300)):
        with pytest.raises(ValueError, match="Codebook"):
            fq.layout(f"lut({values[0]},{values[1]})")


def test_inference_tensors_say_what_to_do_in_every_primitive():
    with torch.inference_mode():
        q = fq.quantize(torch.randn(4, 8), fq.int8())
    learned = replace(q, scale=torch.ones(4, 1, requires_grad=True))
    for call in (lambda: fq.dequantize(learned), lambda: F.linear(torch.ones(1, 8), learned)):
        with pytest.raises(RuntimeError, match=r"inference_mode.*clone"):
            call()
