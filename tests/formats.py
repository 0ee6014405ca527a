"""The presets under test, how to read a QTensor's codes, and what the oracle says of the same input."""

from __future__ import annotations

import numpy as np
import oracle
import torch

import fq

MX_RULES = ("floor", "ceil", "rceil", "even")
PRESETS = {
    "int8": fq.int8(),
    "int8_narrow": fq.int8(rule="absmax_narrow"),
    "int8_full": fq.int8(rule="absmax_full"),
    "int4": fq.int4(32),
    "int4_sym": fq.int4(32, symmetric=True),
    **{f"mxfp4_{rule}": fq.mxfp4(rule) for rule in MX_RULES},
    "nvfp4": fq.nvfp4(),
}


def expected(name: str, x) -> oracle.Quantized:
    """The oracle's result for preset `name` on a matrix x (N, K)."""
    x = np.asarray(x.to(torch.float32) if isinstance(x, torch.Tensor) else x, np.float64)
    if name.startswith("int8"):
        return oracle.symmetric(x, 8, -1, "absmax" + name.removeprefix("int8"))
    if name == "int4":
        return oracle.affine(x, 32)
    if name == "int4_sym":
        return oracle.symmetric(x, 4, 32)
    return oracle.nvfp4(x) if name == "nvfp4" else oracle.mxfp4(x, name.removeprefix("mxfp4_"))


def codes(q: fq.QTensor) -> torch.Tensor:
    """Plain unsigned codes, one per element of the stored matrix."""
    bits = q.layout.element.bits
    return q.data.view(torch.uint8) if bits == 8 else fq.unpack_bits(q.data, bits, q.inner[0])


def assert_equal(a: torch.Tensor, b: torch.Tensor) -> None:
    """Equal bit for bit, except that NaN is NaN: its bits mean nothing, and kernels differ in them."""
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    if a.dtype.is_floating_point and a.dtype.itemsize > 1:
        assert torch.equal(a.isnan(), b.isnan())
        a, b = a.nan_to_num(0.0, torch.inf, -torch.inf), b.nan_to_num(0.0, torch.inf, -torch.inf)
        assert torch.equal(a.signbit(), b.signbit())
        assert torch.equal(a, b)
    else:
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def assert_same(a: fq.QTensor, b: fq.QTensor) -> None:
    """Equal layouts, and equal children."""
    assert (a.layout, a.dtype, a.inner) == (b.layout, b.dtype, b.inner)
    one, other = torch.utils._pytree.tree_leaves(a), torch.utils._pytree.tree_leaves(b)
    assert len(one) == len(other)
    for x, y in zip(one, other, strict=True):
        assert_equal(x, y)


def assert_matches(q: fq.QTensor, want: oracle.Quantized) -> None:
    """q holds the oracle's codes, scales and zero points, and dequantizes to its values, bit for bit."""
    assert codes(q).tolist() == want.codes.tolist()
    if isinstance(q.scale, fq.QTensor):
        assert q.scale.data.view(torch.uint8).tolist() == want.scale.tolist()
        np.testing.assert_array_equal(q.scale.scale.item(), want.outer)
    else:
        np.testing.assert_array_equal(q.scale.double().numpy(), want.scale)
    if q.zero_point is not None:
        np.testing.assert_array_equal(q.zero_point.double().numpy(), want.zero)
    got = fq.dequantize(q, torch.float32).double().numpy()
    np.testing.assert_array_equal(got, want.values)
    finite = np.isfinite(want.values)
    np.testing.assert_array_equal(np.signbit(got[finite]), np.signbit(want.values[finite]))
