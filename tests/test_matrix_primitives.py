"""Every primitive, by value: plain, vmap, grad, vmap of grad, jacrev and jvp, eager and compiled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree

import fq
from fq import numerics

T = torch.func
LAYOUTS = ["int8", "int4:g8", "int4:g8:sym", "mxfp4", "nvfp4", "int8:tensor", "int4:g8:axis-2"]
COMPILED = ["int4:g8", "nvfp4"]
Q4_K = "uint4:g8:scale=(uint6:g2:sym:scale=float16):zp=(uint6:g2:sym:scale=float16:absmax_full)"
OTHERS = ["uint4:g8", "fp8", "mxfp6", "nf4:g8:scale=(uint8:g4:sym)", Q4_K]
OTHERS_SLOWLY = [
    "binary:g8",
    "int3:g8",
    "uint5:g8:axis-2",
    "fp8:tensor",
    "fp8:block4x8",
    "e5m2:g8",
    "ue5m3:g8",
]
OTHERS_SLOWLY += ["mxfp8", "nf4:g8", "int4:g8:sym:scale=e4m3", "int8:scale=float16", "int4:g8:scale=bfloat16"]


def make(key: str, *shape: int, seed: int = 0) -> fq.QTensor:
    torch.manual_seed(seed)
    return fq.quantize(torch.randn(*shape), fq.layout(key))


def dense(q: fq.QTensor) -> torch.Tensor:
    w = numerics.dequantize_matrix(q)
    return w.mT if q.layout.axis == -2 else w


def scaled(q: fq.QTensor, s: torch.Tensor) -> fq.QTensor:
    """Put a float scale into q: the outer one where scales are nested."""
    return replace(q, scale=replace(q.scale, scale=s) if isinstance(q.scale, fq.QTensor) else s)


def scale_of(q: fq.QTensor) -> torch.Tensor | None:
    s = q.scale.scale if isinstance(q.scale, fq.QTensor) else q.scale
    return s if s.dtype == torch.float32 else None


def check(got: Any, want: Any) -> None:
    got, want = pytree.tree_leaves(got), pytree.tree_leaves(want)
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        assert b.abs().max() > 1e-3
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * float(b.abs().max()))


def compose(
    f: Callable[..., Any], oracle: Callable[..., Any], q: fq.QTensor, x: torch.Tensor, mode: str | None
) -> None:
    """Compare f(q, x) with oracle(q, x) under every transform of x, of q and of q's float scale."""
    stacked = pytree.tree_map(lambda *t: torch.stack(t), q, q, q)
    xs = torch.stack([x, x + 1, x]) if x.is_floating_point() else torch.stack([x, x.flip(0), x])
    s = scale_of(q)
    cases: list[tuple[str, Callable[[Any], Any], tuple[Any, ...]]] = [
        ("plain", lambda g: g, (q, x)),
        ("vmap x", lambda g: T.vmap(g, (None, 0)), (q, xs)),
        ("vmap q", lambda g: T.vmap(g, (0, None)), (stacked, x)),
        ("vmap both", lambda g: T.vmap(g), (stacked, xs)),
    ]
    if x.is_floating_point():
        cases += [
            ("grad", lambda g: T.grad(lambda x: g(q, x).pow(3).sum()), (x,)),
            ("vmap grad", lambda g: T.vmap(T.grad(lambda x: g(q, x).pow(3).sum())), (xs,)),
            ("jacrev", lambda g: T.jacrev(lambda x: g(q, x)), (x,)),
            ("jvp", lambda g: lambda x, v: T.jvp(lambda x: g(q, x), (x,), (v,)), (x, torch.ones_like(x))),
        ]
    if s is not None:
        cases += [
            ("grad scale", lambda g: T.grad(lambda s: g(scaled(q, s), x).pow(3).sum()), (s,)),
            (
                "vmap grad scale",
                lambda g: T.vmap(T.grad(lambda s: g(scaled(q, s), x).pow(3).sum())),
                (stack3(s),),
            ),
            ("jacrev scale", lambda g: T.jacrev(lambda s: g(scaled(q, s), x)), (s,)),
            ("jvp scale", lambda g: lambda s, v: T.jvp(lambda s: g(scaled(q, s), x), (s,), (v,)), (s, s)),
        ]
    if q.layout.zero_point == "float":
        z = q.zero_point
        cases.append(
            ("grad zero", lambda g: T.grad(lambda z: g(replace(q, zero_point=z), x).pow(3).sum()), (z,))
        )
    for name, transform, args in cases:
        h = transform(f)
        if mode is not None:
            torch._dynamo.reset()
            h = torch.compile(h, fullgraph=True, backend=mode)
        try:
            check(h(*args), transform(oracle)(*args))
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


def stack3(t: torch.Tensor) -> torch.Tensor:
    return torch.stack([t, 2 * t, t])


PRODUCTS: dict[str, tuple[Callable[..., Any], Callable[..., Any], Callable[[fq.QTensor], torch.Tensor]]] = {
    "linear": (
        lambda q, x: fq.linear(x, q),
        lambda q, x: x @ dense(q).mT,
        lambda q: torch.randn(3, q.shape[1]),
    ),
    "x @ q": (lambda q, x: fq.matmul(x, q), lambda q, x: x @ dense(q), lambda q: torch.randn(3, q.shape[0])),
    "q @ x": (lambda q, x: fq.matmul(q, x), lambda q, x: dense(q) @ x, lambda q: torch.randn(q.shape[1], 3)),
    "q @ vector": (
        lambda q, x: fq.matmul(q, x),
        lambda q, x: dense(q) @ x,
        lambda q: torch.randn(q.shape[1]),
    ),
}
EAGER = [(key, None) for key in LAYOUTS]
EAGER += [(key, None) for key in OTHERS]
EAGER += [pytest.param(key, None, marks=pytest.mark.slow) for key in OTHERS_SLOWLY]
CASES = [*EAGER, *(pytest.param(key, "aot_eager", marks=pytest.mark.slow) for key in COMPILED)]
QUICK = [*EAGER, pytest.param("int4:g8", "aot_eager", marks=pytest.mark.slow), ("nvfp4", "aot_eager")]


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize(("key", "mode"), CASES)
def test_products(name, key, mode):
    f, oracle, activation = PRODUCTS[name]
    q = make(key, 8, 40)
    compose(f, oracle, q, activation(q), mode)


@pytest.mark.parametrize(("key", "mode"), CASES)
def test_batched_matmul(key, mode):
    q = make(key, 2, 8, 24)
    compose(lambda q, x: fq.matmul(x, q), lambda q, x: x @ dense(q), q, torch.randn(2, 3, q.shape[1]), mode)
    if mode is None:
        compose(
            lambda q, x: fq.matmul(q, x), lambda q, x: dense(q) @ x, q, torch.randn(5, 1, q.shape[2], 3), mode
        )


@pytest.mark.parametrize(("key", "mode"), QUICK)
def test_dequantize(key, mode):
    q = make(key, 6, 40)
    compose(lambda q, x: fq.dequantize(q) * x, lambda q, x: dense(q) * x, q, torch.randn(q.shape[1]), mode)


@pytest.mark.parametrize(("key", "mode"), QUICK)
def test_embedding(key, mode):
    if "axis" in key or "block" in key:
        with pytest.raises(ValueError, match="packed along D|blocks one row high"):
            fq.embedding(torch.tensor([0]), make(key, 9, 40))
        return
    q = make(key, 9, 40)
    ids = torch.tensor([[3, 8], [0, 3]])
    compose(lambda q, i: fq.embedding(i, q), lambda q, i: dense(q)[i], q, ids, mode)


CODES: dict[str, tuple[Callable[..., Any], torch.Tensor]] = {
    "cast_fp4x2": (fq.cast_fp4x2, torch.randn(4, 5, 6) * 4),
    "pack_fp4x2": (fq.pack_fp4x2, torch.randint(0, 16, (4, 5, 6), dtype=torch.uint8)),
    "unpack_fp4x2": (fq.unpack_fp4x2, torch.randint(0, 256, (4, 5, 6), dtype=torch.uint8)),
    "pack_int4": (fq.pack_int4, torch.randint(-8, 8, (4, 5, 6), dtype=torch.int8)),
    "unpack_int4": (fq.unpack_int4, torch.randint(0, 256, (4, 5, 6), dtype=torch.uint8)),
    "pack_bits": (lambda c: fq.pack_bits(c, 5), torch.randint(0, 32, (4, 5, 7), dtype=torch.uint8)),
    "unpack_bits": (lambda b: fq.unpack_bits(b, 5, 7), torch.randint(0, 256, (4, 3, 5), dtype=torch.uint8)),
}


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", CODES)
def test_codes(name, backend, fresh_compile):
    f, x = CODES[name]
    want = torch.stack([f(row) for row in x])
    assert len(want.unique()) > 4
    for g in (f, T.vmap(f), T.vmap(T.vmap(f))):
        assert torch.equal(g(x), want)
    if backend == "aot_eager" or name in ("cast_fp4x2", "unpack_bits"):
        assert torch.equal(torch.compile(f, fullgraph=True, backend=backend)(x), want)
        assert torch.equal(torch.compile(T.vmap(f), fullgraph=True, backend=backend)(x), want)


@pytest.mark.parametrize(
    "key",
    [
        *LAYOUTS,
        "int4:g8:scale=(uint6:g2:sym:scale=float16):zp=(int6:g2:sym)",
        *OTHERS,
        *(pytest.param(key, marks=pytest.mark.slow) for key in OTHERS_SLOWLY),
    ],
)
@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_quantize_is_bit_identical(key, backend, fresh_compile):
    layout, x = fq.layout(key), torch.randn(3, 6, 40)
    x[1, 2, 3], x[2, 0, 0] = torch.nan, torch.inf

    def wrap(f):
        return f if backend is None else torch.compile(f, fullgraph=True, backend=backend)

    want = [fq.quantize(row, layout) for row in x]
    single = wrap(lambda x: fq.quantize(x, layout))(x[1])
    mapped = wrap(T.vmap(lambda x: fq.quantize(x, layout)))(x)
    whole = wrap(lambda x: fq.quantize(x, layout))(x)
    for got, expected in ((single, want[1]), (mapped, fq.stack(want)), (whole, fq.stack(want))):
        for a, b in zip(*map(pytree.tree_leaves, (got, expected)), strict=True):
            assert a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("key", ["int8", "nvfp4"])
def test_quantize_by_inductor_is_bit_identical(key, fresh_compile):
    layout, x = fq.layout(key), torch.randn(6, 40)
    x[2, 3] = torch.nan
    got = torch.compile(lambda x: fq.quantize(x, layout), fullgraph=True)(x)
    for a, b in zip(*map(pytree.tree_leaves, (got, fq.quantize(x, layout))), strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize(
    "key",
    ["int8", "int4:g8", "mxfp4", "nvfp4", *(pytest.param(key, marks=pytest.mark.slow) for key in OTHERS)],
)
def test_primitives_export(key):
    class Program(torch.nn.Module):
        def forward(self, q, x, ids):
            y = fq.linear(x, q)
            a = fq.quantize(x, fq.layout(key))
            return y, fq.matmul(y, q), fq.dequantize(a), fq.embedding(ids, q), fq.cast_fp4x2(x)

    q, x, ids = make(key, 8, 40), torch.randn(3, 40), torch.tensor([1, 7])
    program = torch.export.export(Program(), (q, x, ids))
    for got, want in zip(program.module()(q, x, ids), Program()(q, x, ids), strict=True):
        torch.testing.assert_close(got, want)
