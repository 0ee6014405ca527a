"""Structural operations under torch.compile, vmap and grad give the bytes that they give eagerly."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from laws import Q4_K, along, identical, quantized, same

import fq

INDEX = torch.tensor([3, 0, -1])
OPERATIONS = {
    "slice": lambda q: q[4:6],
    "columns": lambda q: q[:, 32:45],
    "mT": lambda q: q.mT,
    "row": lambda q: q[1],
    "cat": lambda q: fq.cat([q, q]),
    "cat of columns": lambda q: torch.cat([q, q], 1),
    "stack": lambda q: torch.stack([q, q]),
    "split": lambda q: q.unflatten(0, (2, 4)),
    "merge": lambda q: torch.stack([q, q]).flatten(0, 1),
    "expand": lambda q: q.expand(3, -1, -1),
}
GATHERS = {
    "index": lambda q: q[INDEX],
    "index of two dimensions": lambda q: q[INDEX[None]],
    "strided": lambda q: q[::3],
}


def operations(text: str) -> dict:
    return OPERATIONS if text == "int8:block4x8" else {**OPERATIONS, **GATHERS}


@pytest.mark.parametrize("text", ["int4:g8", "nvfp4"])
def test_compiled_operations_return_the_same_qtensor(text, fresh_compile):
    fs, q = operations(text), quantized(text, 8, 64)

    def every(q):
        return [f(q) for f in fs.values()]

    got = torch.compile(every, fullgraph=True, backend="aot_eager")(q)
    for name, one, want in zip(fs, got, every(q), strict=True):
        assert isinstance(one, fq.QTensor), name
        identical(one, want)


def test_compiled_joins_serve_every_format_of_equal_shapes(fresh_compile):
    compiled = torch.compile(lambda a, b: fq.cat([a, b], 1), fullgraph=True, backend="aot_eager")
    for text in ("int4:g8", "uint4:g8", "int3:g8", "int4:g32"):
        a, b = quantized(text, 8, 64), quantized(text, 8, 64)
        identical(compiled(a, b), fq.cat([a, b], 1))


def test_compiled_joins_of_mixed_formats_say_so(fresh_compile):
    compiled = torch.compile(lambda a, b: fq.cat([a, b]), fullgraph=True, backend="aot_eager")
    a, b = quantized("int4:g8:sym", 8, 64), quantized("uint4:g8", 8, 64)
    identical(compiled(a, a), fq.cat([a, a]))
    with pytest.raises(Exception, match="expected tensors of one format"):
        compiled(a, replace(b, zero_point=None))


def test_compiled_slices_serve_every_number_of_rows(fresh_compile):
    compiled = torch.compile(lambda q: q[1:-1].mT, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (4, 7, 12):
        q = quantized("int4:g8", rows, 24)
        identical(compiled(q), q[1:-1].mT)


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("text", ["int8", "int8:block4x8", "int4:g8", "nvfp4", Q4_K, "uint5:g8"])
def test_operations_under_vmap_are_those_of_each_part(text, axis):
    parts = [quantized(text, *along(axis, 8, 64), axis=axis) for _ in range(3)]
    stacked = fq.stack(parts)
    for name, f in operations(text).items():

        def matrix(q, f=f):
            return f(q if axis == -1 else q.mT)

        want = [matrix(q) for q in parts]
        if name != "row":  # vectors stack into rows of a matrix, whose blocks are one row high
            identical(torch.vmap(matrix)(stacked), fq.stack(want))
        dense = torch.vmap(lambda q, matrix=matrix: fq.dequantize(matrix(q)))(stacked)
        same(dense, torch.stack([fq.dequantize(w) for w in want]))


def test_vmap_maps_any_leading_dimension():
    q = quantized("int4:g8", 2, 3, 8, 16)
    got = torch.vmap(lambda q: fq.dequantize(q[:, 2:5]), in_dims=1, out_dims=1)(q)
    same(got, fq.dequantize(q)[:, :, 2:5])
    twice = torch.vmap(torch.vmap(lambda q: fq.dequantize(q.mT[8:])))(q)
    same(twice, fq.dequantize(q).mT[:, :, 8:])


@pytest.mark.parametrize("text", ["int8", "int8:tensor", "int4:g8", "nvfp4", "fp8:g8", Q4_K])
def test_vmap_maps_the_index(text):
    q, stacked = quantized(text, 6, 16), quantized(text, 3, 6, 16)
    dense, parts = fq.dequantize(q), fq.dequantize(stacked)
    ids = torch.tensor([[1, 0], [-1, 2], [5, 5]])
    for i in (ids, ids[:, 1]):
        same(torch.vmap(lambda i: fq.dequantize(q[i]))(i), dense[i])
        want = torch.stack([part[one] for part, one in zip(parts, i, strict=True)])
        same(torch.vmap(lambda q, i: fq.dequantize(q[i]))(stacked, i), want)


@pytest.mark.parametrize(
    "f",
    [
        lambda t: t[:, 2:5],
        lambda t: t.mT,
        lambda t: torch.cat([t, t], 2),
        lambda t: t.flatten(0, 1)[INDEX],
        lambda t: t[..., 8:],
    ],
    ids=["slice", "mT", "cat", "gather", "columns"],
)
def test_gradients_of_scales_go_through(f):
    q = quantized("int4:g8", 2, 8, 16)
    g = torch.randn(f(fq.dequantize(q)).shape)
    got = torch.func.grad(lambda s: (fq.dequantize(f(replace(q, scale=s))) * g).sum())(q.scale)
    want = torch.func.grad(lambda s: (f(fq.dequantize(replace(q, scale=s))) * g).sum())(q.scale)
    assert want.abs().max() > 0.1
    torch.testing.assert_close(got, want)
