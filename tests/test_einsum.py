"""einsum, tensordot, embedding_bag and index_select on quantized operands, against the dequantized ones."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import fq

EQUATIONS = [
    ("bk,nk->bn", (5, 8), (6, 8)),
    ("nk,bk->bn", (6, 8), (5, 8)),
    ("bk,kn->nb", (5, 6), (6, 8)),
    ("...k,nk->...n", (2, 3, 8), (6, 8)),
    ("btk,ekn->bten", (2, 3, 6), (4, 6, 8)),
    ("bek,enk->ben", (5, 4, 8), (4, 6, 8)),
    ("bthd,hdm->btm", (2, 3, 4, 6), (4, 6, 8)),
    ("bhd,hmd->hbm", (2, 4, 8), (4, 6, 8)),
    ("bk,nk", (5, 8), (6, 8)),
    ("k,nk->n", (8,), (6, 8)),
    ("b i d , d j -> b i j", (2, 3, 6), (6, 8)),
    ("abk,adnk->abdn", (2, 5, 8), (2, 3, 6, 8)),
]


@pytest.mark.parametrize("key", ["int8", "int4:g4", "mxfp4", "nvfp4", "int8:axis-2"])
@pytest.mark.parametrize(("equation", "left", "right"), EQUATIONS, ids=[e for e, *_ in EQUATIONS])
def test_einsum_is_that_of_the_dequantized_operand(key, equation, left, right):
    layout = fq.layout(key)
    a, b = torch.randn(left), torch.randn(right)
    quantize_left = equation.startswith("nk,")
    q = fq.quantize(a if quantize_left else b, layout)
    operands = (q, b) if quantize_left else (a, q)
    dense = (fq.dequantize(q), b) if quantize_left else (a, fq.dequantize(q))
    want = torch.einsum(equation, *dense)
    torch.testing.assert_close(torch.einsum(equation, *operands), want, rtol=1e-5, atol=1e-4)


def test_einsum_composes():
    x, q = torch.randn(3, 2, 5, 4, 6), fq.quantize(torch.randn(4, 6, 8), fq.int4(4))
    w = fq.dequantize(q)

    def call(x):
        return torch.einsum("bthd,hdm->btm", x, q)

    want = torch.einsum("sbthd,hdm->sbtm", x, w)
    torch.testing.assert_close(torch.vmap(call)(x), want, rtol=1e-5, atol=1e-4)
    fast = torch.compile(call, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(fast(x[0]), want[0], rtol=1e-5, atol=1e-4)
    g = torch.randn(2, 5, 8)
    got = torch.func.grad(lambda x: (call(x) * g).sum())(x[0])
    torch.testing.assert_close(got, torch.einsum("btm,hdm->bthd", g, w), rtol=1e-5, atol=1e-4)
    half = call(x[0].bfloat16())
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), call(x[0].bfloat16().float()), rtol=2**-8, atol=1e-3)


@pytest.mark.parametrize(
    ("a", "b", "dims"),
    [
        ((5, 6), (6, 8), 1),
        ((5, 8), (6, 8), ([1], [1])),
        ((5, 4, 6), (4, 6, 8), 2),
        ((4, 5, 6), (4, 6, 8), ([0, 2], [0, 1])),
        ((5, 8), (6, 8), ([-1], [-1])),
    ],
)
def test_tensordot_is_that_of_the_dequantized_operand(a, b, dims):
    x, q = torch.randn(a), fq.quantize(torch.randn(b), fq.int4(4))
    want = torch.tensordot(x, fq.dequantize(q), dims)
    torch.testing.assert_close(torch.tensordot(x, q, dims), want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("equation", "x", "why"),
    [
        ("bn,nk->bnk", (5, 6), "one must be contracted"),
        ("nk,nk->", (6, 8), "one must be contracted"),
        ("bk,nk->b", (5, 8), "must stand in the quantized operand and the result alone"),
        ("bck,nk->bn", (5, 2, 8), "summed alone"),
        ("bnk,nk->bn", (5, 6, 8), "must stand in the quantized operand and the result alone"),
    ],
)
def test_a_pattern_that_is_no_matmul_is_refused(equation, x, why):
    q = fq.quantize(torch.randn(6, 8), fq.int8())
    with pytest.raises(fq.UnsupportedOp, match=why):
        torch.einsum(equation, torch.randn(x), q)
    with pytest.raises(fq.UnsupportedOp, match="two operands"):
        torch.einsum("bk,nk,b->bn", torch.randn(5, 8), q, torch.randn(5))
    with pytest.raises(ValueError, match="'k' is 7 in one operand, 8 in the other"):
        torch.einsum("bk,nk->bn", torch.randn(5, 7), q)
    with pytest.raises(ValueError, match="names 1 dimensions of 2"):
        torch.einsum("bk,n->bn", torch.randn(5, 8), q)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding", [None, 0, -1])
def test_embedding_bag_is_that_of_the_dequantized_table(mode, padding):
    q = fq.quantize(torch.randn(10, 8), fq.int8())
    ids, offsets = torch.tensor([1, 0, 9, 3, 3, 0, 9]), torch.tensor([0, 2, 2, 5])
    weights = torch.rand(7) if mode == "sum" else None
    kwargs = {"mode": mode, "padding_idx": padding, "per_sample_weights": weights}
    got = F.embedding_bag(ids, q, offsets, **kwargs)
    torch.testing.assert_close(got, F.embedding_bag(ids, fq.dequantize(q), offsets, **kwargs))
    bags = torch.tensor([[1, 2, 0], [9, 9, 4]])
    torch.testing.assert_close(
        F.embedding_bag(bags, q, mode=mode, padding_idx=padding),
        F.embedding_bag(bags, fq.dequantize(q), mode=mode, padding_idx=padding),
    )
    bag = torch.nn.EmbeddingBag(10, 8, mode=mode, padding_idx=padding)
    torch.testing.assert_close(
        fq.functional_call(bag, {"weight": q}, (ids, offsets)),
        torch.func.functional_call(bag, {"weight": fq.dequantize(q)}, (ids, offsets)),
    )


def test_index_select_takes_rows_and_leading_dimensions():
    q = fq.quantize(torch.randn(4, 6, 8), fq.int4(4))
    index = torch.tensor([2, 0, 2])
    for dim in (0, 1, -2):
        want = torch.index_select(fq.dequantize(q), dim, index)
        assert torch.equal(fq.dequantize(torch.index_select(q, dim, index)), want)
