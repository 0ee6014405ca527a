"""Torch functions on QTensors: the right primitive and operands, and UnsupportedOp for all else."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import fq

KEYS = ["int8", "int4:g8", "int4:g8:sym", "mxfp4", "nvfp4"]


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.shape == want.shape and got.dtype == want.dtype
    assert want.abs().max() > 0.1
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))


def pair(key: str, *shape: int) -> tuple[fq.QTensor, torch.Tensor]:
    q = fq.quantize(torch.randn(*shape), fq.layout(key))
    return q, fq.dequantize(q)


@pytest.mark.parametrize("key", KEYS)
def test_two_dimensional_products(key):
    q, w = pair(key, 12, 40)
    x, v, left = torch.randn(3, 40), torch.randn(40), torch.randn(3, 12)
    bias = torch.randn(12)
    close(F.linear(x, q), F.linear(x, w))
    close(F.linear(x, q, bias), F.linear(x, w, bias))
    close(F.linear(v, q, bias), F.linear(v, w, bias))
    close(F.linear(x.reshape(3, 1, 1, 40), q), F.linear(x.reshape(3, 1, 1, 40), w))
    for f in (torch.matmul, torch.mm, torch.Tensor.matmul, torch.Tensor.mm):
        close(f(x, q.T), f(x, w.T))
        close(f(left, q), f(left, w))
    close(torch.mm(q, x.T), w @ x.T)
    close(torch.matmul(q.T, left.T), w.T @ left.T)
    close(x @ q.T, x @ w.T)
    close(q @ x.T, w @ x.T)
    close(q @ v, w @ v)
    close(v @ q.T, v @ w.T)
    close(torch.addmm(bias, x, q.T), torch.addmm(bias, x, w.T))
    close(torch.addmm(bias, x, q.T, beta=0.5, alpha=2), torch.addmm(bias, x, w.T, beta=0.5, alpha=2))
    close(torch.addmm(left, x, q.T), torch.addmm(left, x, w.T))


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_transposed_weight_keeps_its_bias(key, dtype):
    """Contracted along its rows, not along the packed axis; rounded once, bias and all."""
    q, w = pair(key, 12, 40)
    x, bias = torch.randn(3, 12).to(dtype), 10 * torch.randn(40)
    want = F.linear(x.float(), w.T, bias)
    for got in (F.linear(x, q.T, bias), fq.linear(x[None], q.T, bias)[0], torch.addmm(bias, x, q)):
        assert got.dtype == dtype
        assert (got.float() - want).abs().max() <= (
            2**-8 if dtype == torch.bfloat16 else 1e-5
        ) * want.abs().max()
    single = fq.linear(x, q.T, torch.tensor([10.0]))
    assert (single.float() - F.linear(x.float(), w.T) - 10).abs().max() <= 2**-7 * want.abs().max()
    y, g = x.float().requires_grad_(), bias.clone().requires_grad_()
    F.linear(y, q.T, g).sum().backward()
    close(y.grad, w.sum(1).expand(3, 12))
    assert torch.equal(g.grad, torch.full((40,), 3.0))


def test_products_by_torchs_own_keywords():
    q, w = pair("int8", 12, 40)
    three, dense = pair("int8", 2, 12, 40)
    x, y, bias = torch.randn(3, 40), torch.randn(2, 3, 40), torch.randn(12)
    close(F.linear(input=x, weight=q, bias=bias), F.linear(x, w, bias))
    close(torch.matmul(input=x, other=q.T), x @ w.T)
    close(torch.mm(input=x, mat2=q.T), x @ w.T)
    close(torch.bmm(input=y, mat2=three.mT), y @ dense.mT)
    close(torch.addmm(input=bias, mat1=x, mat2=q.T, beta=2), torch.addmm(bias, x, w.T, beta=2))
    added = torch.randn(2, 3, 12)
    close(torch.baddbmm(added, batch1=y, batch2=three.mT), torch.baddbmm(added, y, dense.mT))
    close(F.embedding(input=torch.tensor([3, 0]), weight=q), w[[3, 0]])


def test_addmm_with_beta_zero_does_not_read_what_it_adds_to():
    q, w = pair("int8", 12, 40)
    x, nan = torch.randn(3, 40), torch.full((3, 12), torch.nan)
    close(torch.addmm(nan, x, q.T, beta=0), x @ w.T)
    close(torch.baddbmm(nan[None], x[None], q.T[None], beta=0, alpha=3), 3 * (x @ w.T)[None])
    assert torch.addmm(nan, x, q.T).isnan().all()


def test_products_of_a_fixed_rank_do_not_broadcast():
    two, three = pair("int8", 12, 40)[0], pair("int8", 2, 12, 40)[0]
    x, y = torch.randn(3, 40), torch.randn(2, 3, 40)
    for call, name, rank in (
        (lambda: torch.mm(y, three.mT), "mm", 2),
        (lambda: torch.addmm(torch.zeros(12), y, three.mT), "addmm", 2),
        (lambda: torch.bmm(x, two.T), "bmm", 3),
        (lambda: torch.baddbmm(torch.zeros(12), x, two.T), "baddbmm", 3),
    ):
        with pytest.raises(ValueError, match=f"^{name}: expected {rank}-dimensional operands, got "):
            call()
    for call, name in (
        (lambda: torch.bmm(y[:1], three.mT), "bmm"),
        (lambda: torch.baddbmm(torch.zeros(1, 3, 12), y[:1], three.mT), "baddbmm"),
    ):
        with pytest.raises(ValueError, match=f"^{name}: batches differ, 1 and 2"):
            call()
    with pytest.raises(RuntimeError, match="must match the existing size"):
        torch.addmm(torch.zeros(3, 5), x, two.T)


@pytest.mark.parametrize("key", KEYS)
def test_batched_products(key):
    q, w = pair(key, 4, 12, 40)
    x, left = torch.randn(4, 3, 40), torch.randn(4, 3, 12)
    close(torch.bmm(x, q.mT), torch.bmm(x, w.mT))
    close(torch.bmm(q, x.mT), torch.bmm(w, x.mT))
    close(torch.bmm(left, q), torch.bmm(left, w))
    close(torch.baddbmm(left, x, q.mT, beta=2), torch.baddbmm(left, x, w.mT, beta=2))
    for shape in ((3, 40), (1, 3, 40), (5, 1, 3, 40), (5, 4, 3, 40), (40,)):
        y = torch.randn(*shape)
        close(y @ q.mT, y @ w.mT)
    two, dense = pair(key, 2, 1, 12, 40)
    close(x[:3] @ two.mT, x[:3] @ dense.mT)
    close(two @ x[:3].mT, dense @ x[:3].mT)
    one, dense = pair(key, 1, 12, 40)
    close(x @ one.mT, x @ dense.mT)


@pytest.mark.parametrize("key", KEYS)
def test_vectors(key):
    q, w = pair(key, 40)
    x = torch.randn(3, 40)
    close(x @ q, x @ w)
    close(q @ x.T, w @ x.T)


@pytest.mark.parametrize("key", KEYS)
def test_embedding(key):
    q, w = pair(key, 12, 40)
    ids = torch.tensor([[0, 11], [3, 3]])
    assert torch.equal(F.embedding(ids, q), w[ids])
    assert torch.equal(F.embedding(ids, q, padding_idx=0), w[ids])
    with pytest.raises(fq.UnsupportedOp, match="max_norm"):
        F.embedding(ids, q, max_norm=1.0)
    for wrong in (12, -1):
        with pytest.raises(IndexError):
            F.embedding(torch.tensor([wrong]), q)


@pytest.mark.parametrize(
    "function", [torch.sin, torch.add, torch.softmax, F.bilinear, torch.linalg.norm, F.gelu]
)
def test_everything_else_raises(function):
    q, _ = pair("int8", 4, 8)
    args = {
        torch.add: (q, 1.0),
        torch.softmax: (q, -1),
        F.bilinear: (torch.randn(2, 8), torch.randn(2, 8), q),
    }.get(function, (q,))
    with pytest.raises(fq.UnsupportedOp) as error:
        function(*args)
    for part in (function.__name__, "QTensor", "fq.register_rule", "fq.dequantize"):
        assert part in str(error.value)


def test_the_wrong_operand_is_refused():
    q, _ = pair("int8", 8, 8)
    x = torch.randn(8, 8)
    for call in (lambda: F.linear(q, x), lambda: F.linear(x, x, q), lambda: torch.addmm(q, x, x)):
        with pytest.raises(fq.UnsupportedOp, match="dequantize"):
            call()
    with pytest.raises(TypeError, match="both are"):
        q @ q


def test_a_rule_for_an_operator_by_its_qualified_name():
    lib = torch.library.Library("fq_test_rules", "DEF")
    lib.define("twice(Tensor x, Tensor w) -> Tensor")
    lib.impl("twice", lambda x, w: 2 * x @ w.mT, "CPU")

    @fq.register_rule("fq_test_rules::twice", fq.QTensor)
    def twice(x, w):
        return 2 * fq.linear(x, w)

    q, w = pair("int4:g8", 12, 40)
    x = torch.randn(3, 40)
    for op in (torch.ops.fq_test_rules.twice, torch.ops.fq_test_rules.twice.default):
        close(op(x, q), op(x, w))
    with pytest.raises(TypeError, match="register_rule"):
        fq.register_rule(3, fq.QTensor)


def test_errors_say_subject_expected_and_got():
    q, _ = pair("int4:g8", 12, 40)
    x = torch.randn(3, 41)
    with pytest.raises(ValueError, match=r"linear: x has K=41, q was quantized with K=40"):
        fq.linear(x, q)
    with pytest.raises(ValueError, match=r"int4_matmul: x has K=41, q was quantized with K=40"):
        fq.int4_matmul(x, q)
    with pytest.raises(ValueError, match=r"int8_matmul: expected an 8-bit integer format, got int4:g8"):
        fq.int8_matmul(x, q)
    with pytest.raises(
        TypeError, match=r"linear: x must be float32, bfloat16, float16 or float64, got torch.int64"
    ):
        fq.linear(torch.ones(3, 40, dtype=torch.int64), q)
    with pytest.raises(ValueError, match=r"bias must have shape \(12,\), got \(13,\)"):
        fq.linear(x[:, :40], q, torch.ones(13))
    with pytest.raises(ValueError, match="batch dimensions"):
        fq.matmul(torch.randn(3, 2, 40), pair("int8", 4, 12, 40)[0].mT)
    with pytest.raises(ValueError, match="unknown name 'cuda'"):
        fq.linear(x[:, :40], q, backend="cuda")
    with pytest.raises(
        fq.BackendError, match=r"backend 'aten' cannot run this call: aten: .*backends that can: reference"
    ):
        fq.linear(x[:, :40], q, backend="aten")


@pytest.mark.parametrize("key", KEYS)
def test_named_matmuls_take_plain_tuples(key):
    layout = fq.layout(key)
    q, w = pair(key, 12, 40)
    x = torch.randn(3, 40)
    scale = (q.scale.data, q.scale.scale) if isinstance(q.scale, fq.QTensor) else q.scale
    parts = (q.data, scale) if q.zero_point is None else (q.data, scale, q.zero_point)
    call = {"int8": fq.int8_matmul, "mxfp4": fq.mx_matmul, "nvfp4": fq.nvfp4_matmul}.get(key, fq.int4_matmul)
    close(call(x, parts, layout=layout), x @ w.T)
    close(call(x, q), x @ w.T)
    with pytest.raises(TypeError, match="layout="):
        call(x, parts)
    cut = (scale[0][:, :-1], scale[1]) if isinstance(scale, tuple) else scale[:, :-1].clone()
    with pytest.raises(ValueError, match="block grid|bytes"):
        call(x, (q.data, cut, *parts[2:]), layout=layout)


def test_a_reflected_product_keeps_the_order_of_its_operands():
    q, x = fq.quantize(torch.randn(8, 8), fq.int8()), torch.randn(8, 8)
    assert torch.equal(torch.Tensor.__rmatmul__(x, q), q @ x)  # x.__rmatmul__(q) is q @ x
    torch.testing.assert_close(q @ x, fq.dequantize(q) @ x)
