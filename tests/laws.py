"""The law of structural operations, `dequantize(f(q)) == f(dequantize(q))`, and what every result obeys."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from math import gcd, lcm, prod
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree

import fq

Q4_K = "int4:g8:scale=(uint6:g4:sym:scale=float16):zp=(int6:g4:sym)"
# One of each kind: granularity, zero point, scale dtype, nesting, codes that share bytes unevenly.
FORMATS = (
    "int8",
    "int8:tensor",
    "int8:block4x8",
    "int4:g8",
    "int4:g32",
    "int4:g8:sym",
    "uint4:g8",
    "mxfp4",
    "nvfp4",
    Q4_K,
    "int3:g8",
    "uint5:g8",
    "fp8:g8",
)
# More elements and scale dtypes of the same kinds.
OTHERS = (
    "fp8:tensor",
    "e5m2:block4x8",
    "ue4m3:g8",
    "e2m3:g8:scale=e8m0",
    "e4m3:g8:scale=e8m0",
    "binary:g8",
    "nf4:g8",
    "nf4:g8:scale=(uint8:g4:sym)",
    "int4:g8:sym:scale=e4m3",
    "int8:scale=float16",
    "uint4:g8:scale=bfloat16",
    "uint4:g8:scale=(uint6:g4:sym:scale=float16):zp=(uint6:g4:sym:scale=float16:absmax_full)",
)
TEXTS = pytest.mark.parametrize(
    "text", [*FORMATS, *(pytest.param(t, marks=pytest.mark.slow) for t in OTHERS)]
)
# What a refusal must say: the alignment that is needed, or that the packed dimension stays.
REASONS = (
    r"inside a (byte|block)|one row high|packed dimension|shape that ends in|before the matrix|"
    r"None can stand|matrix dimensions stay|at least the matrix|"
    r"cannot rearrange|slices of the packed|cannot keep blocks|"
    r"one after the other|all must pack the same"
)


def quantized(text: str, *shape: int, axis: int = -1, **children: torch.Tensor) -> fq.QTensor:
    """A random tensor of logical `shape`, packed along `axis`, with additional children."""
    layout = fq.layout(text if axis == -1 else f"{text}:axis-2")
    return replace(fq.quantize(torch.randn(shape), layout), **children)


def along(axis: int, *shape: int) -> tuple[int, ...]:
    """The logical shape of matrices (*lead, rows, columns) stored with their packed columns last."""
    return shape if axis == -1 or len(shape) == 1 else (*shape[:-2], shape[-1], shape[-2])


def with_children(text: str, *shape: int, axis: int = -1) -> fq.QTensor:
    """A random tensor with `input_scale`, `pre_scale` and `perm`, all different for each matrix."""
    q = quantized(text, *shape, axis=axis)
    lead, k = q.data.shape[:-2] if q.data.ndim > 1 else (), q.inner[0]
    own = (1,) if q.data.ndim > 1 else ()
    count = prod(lead)
    perm = torch.stack([torch.randperm(k) for _ in range(count)]).reshape(*lead, *own, k)
    return replace(
        q,
        input_scale=torch.rand(*lead, *own, 1) + 0.5,
        pre_scale=torch.rand(*lead, *own, k) + 0.5,
        perm=perm,
    )


def same(got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal in shape, dtype and every value; NaN equals NaN."""
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True, check_stride=False)


def identical(a: fq.QTensor, b: fq.QTensor) -> None:
    """Equal static parts, and children equal bit for bit."""
    assert (a.layout, a.dtype, a.inner) == (b.layout, b.dtype, b.inner)
    one, other = pytree.tree_leaves(a), pytree.tree_leaves(b)
    for x, y in zip(one, other, strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        assert torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))


def holds(f: Callable[[Any], Any], q: fq.QTensor) -> bool:
    """Whether f takes q: then its result is exact. If not, f takes the dense tensor and says why not q."""
    want = f(fq.dequantize(q))
    try:
        got = f(q)
    except ValueError as error:
        if re.search(REASONS, str(error)):
            return False
        raise
    pairs = list(zip(got, want, strict=True)) if isinstance(want, tuple | list) else [(got, want)]
    for one, dense in pairs:
        assert isinstance(one, fq.QTensor)
        assert (one.shape, one.ndim, one.dtype) == (dense.shape, dense.ndim, dense.dtype)
        same(fq.dequantize(one), dense)
        is_sound(one)
    return True


def is_sound(q: fq.QTensor) -> None:
    """What holds for every canonical QTensor, however it was made."""
    assert q.nbytes == information(q)
    for plane, rows, cols in parts(q):
        block_rows, block_cols = plane.layout.block
        assert not 1 < block_rows >= rows, f"{plane}: a block that covers its rows is -1"
        assert not 1 < block_cols >= cols, f"{plane}: a block that covers its columns is -1"
        used = cols * plane.layout.element.bits % 8
        if used:
            assert not (plane.data[..., -1] >> used).any(), f"{plane}: bits of other tensors in the last byte"


def parts(q: fq.QTensor) -> list[tuple[fq.QTensor, int, int]]:
    """(QTensor, rows, columns) of q and of everything nested in it."""
    rows = q.data.shape[-2] if q.data.ndim > 1 else 1
    found = [(q, rows, prod(q.inner))]
    for child in (q.scale, q.zero_point):
        if isinstance(child, fq.QTensor):
            found += parts(child)
    return found


def information(q: fq.QTensor) -> int:
    """The bytes q needs: codes in whole bytes a row, and scales and zero points, one per block."""
    rows, cols = (q.data.shape[-2] if q.data.ndim > 1 else 1), prod(q.inner)
    matrices = prod(q.data.shape[:-2]) if q.data.ndim > 2 else 1
    total = matrices * rows * -(-cols * q.layout.element.bits // 8)
    cells = matrices
    for block, size in zip(q.layout.block, (rows, cols), strict=True):
        cells *= size if block == 1 else 1 if block == -1 else max(1, -(-size // block))
    for child in (q.scale, q.zero_point):
        if isinstance(child, fq.QTensor):
            total += information(child)
        elif child is not None:
            total += cells * child.dtype.itemsize
    extra = [c for c in (q.input_scale, q.pre_scale, q.perm) if c is not None]
    return total + sum(c.numel() * c.dtype.itemsize for c in extra)


def step(q: fq.QTensor, dim: int) -> int:
    """Where stored rows (-2) or columns (-1) may be cut: at multiples of this."""
    block, bits = q.layout.block[dim], q.layout.element.bits
    out = 8 // gcd(bits, 8) if dim == -1 else 1
    if block == -1:
        return out
    nested = [step(child, dim) for child in (q.scale, q.zero_point) if isinstance(child, fq.QTensor)]
    return lcm(out, block * lcm(1, *nested))
