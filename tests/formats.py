"""The presets under test, how to read a QTensor's codes, and what the oracle says of the same input."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import oracle_formats
import pytest
import torch
from oracle import BINARY, E2M1, E2M3, E3M2, E4M3, E5M2, FLOATS, NF4, IntFormat
from oracle_formats import MX_RULES, Format

import fq

ROW, G32, TENSOR = (1, -1), (1, 32), (-1, -1)
INT8, INT4, UINT4, UINT6 = IntFormat(8), IntFormat(4), IntFormat(4, False), IntFormat(6, False)
NVFP4 = Format(E2M1, (1, 16), Format(E4M3, TENSOR))
_INT4 = Format(INT4, G32, zero="float", rule="minmax")
_SUPER = Format(UINT6, (1, 8), "float16")  # of Q4_K: 8 scales of 6 bits, and as many minima


def mx(element, rule: str = "rceil") -> Format:
    return Format(element, G32, "e8m0", rule=rule)


# What most tests run over; all else is marked slow in those.
CORE = {
    "int8": (fq.int8(), Format(INT8, ROW)),
    "int8_narrow": (fq.int8(rule="absmax_narrow"), Format(INT8, ROW, rule="absmax_narrow")),
    "int8_full": (fq.int8(rule="absmax_full"), Format(INT8, ROW, rule="absmax_full")),
    "int4": (fq.int4(32), _INT4),
    "int4_sym": (fq.int4(32, symmetric=True), Format(INT4, G32)),
    **{f"mxfp4_{rule}": (fq.mxfp4(rule), mx(E2M1, rule)) for rule in MX_RULES},
    "nvfp4": (fq.nvfp4(), NVFP4),
}
OTHERS = {
    "binary": (fq.intx(1, 32), Format(BINARY, G32, rule="absmean")),
    "int3": (fq.intx(3, 32), Format(IntFormat(3), G32)),
    "int3_affine": (
        fq.intx(3, 32, symmetric=False),
        Format(IntFormat(3), G32, zero="int", rule="minmax"),
    ),
    "uint5": (fq.intx(5, 32, signed=False), Format(IntFormat(5, False), G32)),
    "uint4": (fq.uint4(32), Format(UINT4, G32, zero="int", rule="minmax")),
    "fp8": (fq.fp8(), Format(E4M3, ROW)),
    "fp8_e5m2": (fq.fp8(element="e5m2"), Format(E5M2, ROW)),
    "fp8_tensor": (fq.fp8((-1, -1)), Format(E4M3, TENSOR)),
    "fp8_group": (fq.fp8((1, 32)), Format(E4M3, G32)),
    "fp8_block": (fq.fp8((128, 128)), Format(E4M3, (128, 128))),
    "fp8_fnuz": (fq.fp8(element="e4m3fnuz"), Format(FLOATS["e4m3fnuz"], ROW)),
    "ue4m3": (fq.fp8(G32, element="ue4m3"), Format(FLOATS["ue4m3"], G32)),
    "ue5m3": (fq.fp8(G32, element="ue5m3"), Format(FLOATS["ue5m3"], G32)),
    "mxfp6": (fq.mxfp6(), mx(E3M2)),
    "mxfp6_e2m3": (fq.mxfp6("e2m3"), mx(E2M3)),
    "mxfp8": (fq.mxfp8(), mx(E4M3)),
    "mxfp8_e5m2": (fq.mxfp8("e5m2"), mx(E5M2)),
    **{f"mxfp8_{rule}": (fq.mxfp8(rule=rule), mx(E4M3, rule)) for rule in MX_RULES if rule != "rceil"},
    "nf4": (fq.nf4(32), Format(NF4, G32)),
    "nf4_double": (
        fq.nf4(32, double_quant=True),
        Format(NF4, G32, Format(IntFormat(8, False), (1, 256))),
    ),
    "nvfp4_e4m3": (fq.nvfp4(scale="e4m3"), Format(E2M1, (1, 16), "e4m3")),
    "int8_float16": (fq.int8(scale="float16"), Format(INT8, ROW, "float16")),
    "int4_bfloat16": (fq.int4(32, scale="bfloat16"), replace(_INT4, scale="bfloat16")),
    "int8_e8m0": (fq.int8(scale="e8m0"), Format(INT8, ROW, "e8m0")),
    "q4_k": (
        fq.layout("uint4:g32:scale=(uint6:g8:sym:scale=float16):zp=(uint6:g8:sym:scale=float16:absmax_full)"),
        Format(UINT4, G32, _SUPER, replace(_SUPER, rule="absmax_full"), "minmax"),
    ),
    "int4_mse": (fq.layout("int4:g32:mse"), replace(_INT4, rule="mse")),
    "int4_sym_mse": (fq.layout("int4:g32:sym:mse"), Format(INT4, G32, rule="mse")),
    "mxfp4_mse": (fq.mxfp4("mse"), mx(E2M1, "mse")),
    "nvfp4_mse": (fq.nvfp4("mse"), replace(NVFP4, rule="mse")),
    "nvfp4_four_over_six": (fq.nvfp4("four_over_six"), replace(NVFP4, rule="four_over_six")),
}
# Every width, for the comparison with the oracle alone.
WIDTHS = {
    f"intx_{'' if signed else 'u'}{bits}{'_affine' if affine else ''}": (
        fq.intx(bits, 16, symmetric=not affine, signed=signed),
        Format(IntFormat(bits, signed), (1, 16), zero="int", rule="minmax")
        if affine
        else Format(IntFormat(bits, signed), (1, 16)),
    )
    for bits in range(1, 9)
    for signed in (True, False)
    for affine in (True, False)
    if (bits, signed, affine) != (1, True, False)  # that is the codebook
}
EVERY = {name: layout for name, (layout, _) in {**CORE, **OTHERS, **WIDTHS}.items()}
SPECS = {name: spec for name, (_, spec) in {**CORE, **OTHERS, **WIDTHS}.items()}
PRESETS = {name: EVERY[name] for name in (*CORE, *OTHERS)}


def presets(names: Iterable[str]) -> list:
    """Parameters of a test: all but the core ones are slow."""
    return [name if name in CORE else pytest.param(name, marks=pytest.mark.slow) for name in names]


ALL = pytest.mark.parametrize("name", presets(PRESETS))


def expected(name: str, x, **given) -> oracle_formats.Quantized:
    """The oracle's result for one of EVERY on a matrix x (N, K)."""
    x = np.asarray(x.to(torch.float32) if isinstance(x, torch.Tensor) else x, np.float64)
    return oracle_formats.quantize(x, SPECS[name], **given)


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


def assert_matches(q: fq.QTensor, want: oracle_formats.Quantized) -> None:
    """q holds the oracle's codes, scales and zero points, and dequantizes to its values, bit for bit."""
    np.testing.assert_array_equal(codes(q).numpy(), want.codes)
    for child, kept in ((q.scale, want.scale), (q.zero_point, want.zero)):
        if isinstance(child, fq.QTensor):
            assert_matches(child, kept)
        elif child is not None:
            np.testing.assert_array_equal(child.double().numpy(), kept)
    got = fq.dequantize(q, torch.float32).double().numpy()
    np.testing.assert_array_equal(got, want.values)
    finite = np.isfinite(want.values)
    np.testing.assert_array_equal(np.signbit(got[finite]), np.signbit(want.values[finite]))
