"""The reference: plain torch ops, obviously right, on every device; the others are compared with it."""

from __future__ import annotations

import torch
from torch import Tensor

from fq.backends.registry import implements
from fq.layouts import Layout
from fq.layouts.element import E2M1, Int
from fq.layouts.packing import pack, unpack
from fq.numerics import (
    decode_matrix,
    dequantize_matrix,
    load_scale,
    quantize_activation,
    quantize_matrix,
)
from fq.qtensor import QTensor
from fq.spec import canonical_leaf
from fq.structure import take_rows


@implements("quantize", backend="reference")
def quantize(
    x: Tensor,
    layout: Layout,
    scale: Tensor | None = None,
    zero_point: Tensor | None = None,
    outer_scale: Tensor | None = None,
    noise: Tensor | None = None,
) -> QTensor:
    """Quantize a stored matrix x: (*lead, R, C)."""
    return quantize_matrix(
        x.to(torch.float32), layout, scale=scale, zero_point=zero_point, outer_scale=outer_scale, noise=noise
    )


@implements("dequantize", backend="reference")
def dequantize(q: QTensor, dtype: torch.dtype) -> Tensor:
    """Return the stored matrix (*lead, R, C)."""
    return dequantize_matrix(canonical_leaf(q), dtype)


@implements("embedding", backend="reference")
def embedding(ids: Tensor, q: QTensor, dtype: torch.dtype) -> Tensor:
    """Gather rows of q (R, C) and decode only those: (*ids, C)."""
    rows = take_rows(q, ids.reshape(-1).to(torch.int64), "embedding")
    return dequantize_matrix(rows, dtype).reshape(*ids.shape, rows.inner[0])


@implements("linear", backend="reference")
def linear(x: Tensor, q: QTensor, bias: Tensor | None = None) -> Tensor:
    """Contract the packed axis: x (*lead, M, C), q (*lead, R, C) -> (*lead, M, R)."""
    q, x32 = canonical_leaf(q), x.to(torch.float32)
    y = None
    if q.layout.act is not None:
        a = quantize_activation(x32, q)
        if _exact_integers(a, q):
            y = _integer_matmul(a, q)
        x32 = dequantize_matrix(a)
    if y is not None:
        y = y if bias is None else y + bias.to(torch.float32)
    elif bias is not None and x.ndim == 2:
        y = torch.addmm(bias.to(torch.float32), x32, dequantize_matrix(q).mT)
    else:
        y = x32 @ dequantize_matrix(q).mT
        y = y if bias is None else y + bias.to(torch.float32)
    return y.to(x.dtype)


@implements("linear_adjoint", backend="reference")
def linear_adjoint(x: Tensor, q: QTensor, bias: Tensor | None = None) -> Tensor:
    """Contract the rows: x (*lead, M, R), q (*lead, R, C) -> (*lead, M, C)."""
    q, x32 = canonical_leaf(q), x.to(torch.float32)
    if q.layout.act is not None:
        x32 = dequantize_matrix(quantize_activation(x32, q))
    y = x32 @ dequantize_matrix(q)
    return (y if bias is None else y + bias.to(torch.float32)).to(x.dtype)


def _exact_integers(a: QTensor, q: QTensor) -> bool:
    """Whether both sides are plain integers with one scale per row, so that int32 sums are exact."""
    for t in (a, q):
        rows, cols = t.layout.block
        plain = isinstance(t.layout.element, Int) and t.zero_point is None and rows in (1, -1) and cols == -1
        if not plain or isinstance(t.layout.scale, Layout):
            return False
    return True


def _integer_matmul(a: QTensor, q: QTensor) -> Tensor:
    # float64 holds every int32 sum, and unlike integer matmul it runs on every device and under vmap
    total = decode_matrix(a).to(torch.float64) @ decode_matrix(q).to(torch.float64).mT
    return (
        total.to(torch.float32) * load_scale(a.scale, a.layout.scale) * load_scale(q.scale, q.layout.scale).mT
    )


@implements("cast_fp4x2", backend="reference")
def cast_fp4x2(x: Tensor) -> Tensor:
    """Round to e2m1 and pack pairs."""
    return pack(E2M1.encode(x.to(torch.float32)), 4)


implements("pack_bits", backend="reference")(pack)
implements("unpack_bits", backend="reference")(unpack)
