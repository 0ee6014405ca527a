"""Cases B, D and E that users met: saturation, infinities, mixed dtypes, zero points that wrap around."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from formats import assert_equal, assert_same, codes

import fq

NAN, INF = torch.nan, torch.inf
FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
# By element: numbers, and what they become under the scale 1; infinities saturate as other numbers do.
STATIC = {
    "fp8": (
        [448, 449, 464, 465, 1000, -1000, 1e30, -1e30, INF, -INF, 432, 433],
        [448, 448, 448, 448, 448, -448, 448, -448, 448, -448, 448, 448],
    ),
    "e5m2": (
        [57344, 57345, 61440, 65535, 1e6, -1e6, 1e30, -1e30, INF, -INF, 53248, 53249],
        [57344, 57344, 57344, 57344, 57344, -57344, 57344, -57344, 57344, -57344, 49152, 57344],
    ),
    "e4m3fnuz": ([240, 241, 256, -1e30, INF, -INF], [240, 240, 240, -240, 240, -240]),
    "e3m2": ([28, 29, 30, 32, -1e30, INF, -INF], [28, 28, 28, 28, -28, 28, -28]),
    "e2m3": ([7.5, 7.6, 8, -1e30, INF, -INF], [7.5, 7.5, 7.5, -7.5, 7.5, -7.5]),
    "e2m1": ([6, 7, 8, -1e30, INF, -INF], [6, 6, 6, -6, 6, -6]),
    "int8": ([127, 128, 1e30, -129, -1e30, INF, -INF], [127, 127, 127, -128, -128, 127, -128]),
    "int4:row:sym": ([7, 8, 1e30, -9, INF, -INF], [7, 7, 7, -8, 7, -8]),
    "uint8:row:sym": ([255, 256, 1e30, -1, INF, -INF], [255, 255, 255, 0, 255, 0]),
}


@pytest.mark.parametrize("key", STATIC)
def test_case_B1_casts_under_a_static_scale_saturate(key):
    x, want = (torch.tensor([v], dtype=torch.float32) for v in STATIC[key])
    for rows in (x, x.expand(2, -1)):
        q = fq.quantize(rows, fq.layout(key), scale=1.0)
        assert torch.equal(fq.dequantize(q), want.expand_as(rows))
        assert torch.equal(
            fq.fake_quantize(rows, fq.layout(key), scale=torch.ones(len(rows), 1)), fq.dequantize(q)
        )
    assert_same(torch.vmap(lambda x: fq.quantize(x, fq.layout(key), scale=1.0))(x[None])[0], q[:1])
    half = fq.quantize(x.clamp(-6e4, 6e4).half(), fq.layout(key), scale=1.0)
    assert_equal(
        codes(half), codes(fq.quantize(x.clamp(-6e4, 6e4).half().float(), fq.layout(key), scale=1.0))
    )


@pytest.mark.parametrize(
    ("element", "code"), [("fp8", 0x7F), ("e5m2", 0x7F), ("e2m1", 7), ("e3m2", 31), ("int8", 0)]
)
def test_case_B1_nan_under_a_static_scale(element, code):
    q = fq.quantize(torch.tensor([[NAN, -NAN, 1.0]]), fq.layout(element), scale=1.0)
    assert codes(q)[0, :2].tolist() == [code, code]
    assert fq.dequantize(q)[0, 2] == 1


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize(
    "key", ["int8:g32", "int8:g32:int-zp", "int8:g32:asym", "int4:g32:sym", "int4:g32", "uint4:g32"]
)
def test_case_B3_a_group_with_nan_is_nan(key, bad):
    clean = torch.randn(2, 64)
    x = clean.clone()
    x[0, 3] = bad
    for q, want in (
        (fq.quantize(x, fq.layout(key)), fq.quantize(clean, fq.layout(key))),
        (
            torch.vmap(lambda x: fq.quantize(x, fq.layout(key)))(x[None])[0],
            fq.quantize(clean, fq.layout(key)),
        ),
    ):
        assert q.scale.isnan().tolist() == [[True, False], [False, False]]
        assert fq.dequantize(q)[0, :32].isnan().all() and (codes(q)[0, :32] == 0).all()
        assert_same(q[:, 32:], want[:, 32:])
        assert_same(q[1:], want[1:])
        assert fq.linear(torch.ones(1, 64), q).isnan().tolist() == [[True, False]]


def test_case_B4_clamped_as_floats_then_cast():
    x, layout = torch.tensor([[INF, -INF, 3e38]]), fq.layout("uint8:row:int-zp")
    q = fq.quantize(x, layout, scale=0.01, zero_point=torch.tensor(0))
    assert q.data.tolist() == [[255, 0, 255]] and q.zero_point.dtype == torch.uint8
    largest = float(np.float32(255) * np.float32(0.01))  # 2.55
    assert fq.dequantize(q).tolist() == [[largest, 0, largest]] and abs(largest - 2.55) < 1e-6
    scale, zero = torch.full((1, 1), 0.01), torch.zeros(1, 1)
    assert_equal(fq.fake_quantize(x, layout, scale=scale, zero_point=zero), fq.dequantize(q))
    signed = fq.quantize(x, fq.layout("int8:row:int-zp"), scale=0.01, zero_point=torch.tensor(-128))
    assert signed.data.tolist() == [[127, -128, 127]]
    assert_equal(fq.dequantize(signed), fq.dequantize(q))
    affine = fq.quantize(x, fq.layout("uint8:row:asym"), scale=0.01, zero_point=torch.tensor(-1.0))
    assert affine.data.tolist() == [[255, 0, 255]]


@pytest.mark.parametrize(
    ("rule", "byte", "value"),
    [("floor", 128, 896), ("even", 128, 896), ("ceil", 129, 960), ("rceil", 129, 960)],
)
def test_case_B5_why_896(rule, byte, value):
    x = torch.linspace(-600, 600, 32)[None]
    x[0, 7] = 957
    q = fq.quantize(x, fq.mxfp8(rule=rule))
    assert q.scale.item() == byte
    assert fq.dequantize(q)[0, 7] == value  # explained in docs/formats.md
    assert fq.mxfp8() == fq.mxfp8(rule="rceil")


@pytest.mark.parametrize(("w_dtype", "x_dtype"), list(product(FLOATS, FLOATS)), ids=str)
def test_case_D6_any_mixture_of_dtypes(w_dtype, x_dtype):
    w, x, bias = (
        torch.randn(256, 256).to(w_dtype),
        torch.randn(16, 256).to(x_dtype),
        torch.randn(256).to(w_dtype),
    )
    eps = torch.finfo(x_dtype).eps if x_dtype != torch.float64 else 2.0**-23  # computed in float32
    for key, scale in product(("int4", "int4:sym", "uint4", "int8:g128"), ("float32", "bfloat16", "float16")):
        q = fq.quantize(w, fq.layout(f"{key}:scale={scale}"))
        assert q.dtype == w_dtype and str(q.scale.dtype) == f"torch.{scale}"
        dense = fq.dequantize(q, torch.float64)
        want = x.double() @ dense.T + bias.double()
        bound = (2.0**-8 + 256 * 2.0**-24) * (x.double().abs() @ dense.abs().T) + 2 * eps * want.abs() + 1e-6
        leaves = [(q, "auto"), (q, "reference")]
        if str(x_dtype) == f"torch.{scale}" and key in ("int4", "int4:sym"):
            leaves.append((fq.prepack(q, backend="aten"), "aten"))
        for leaf, backend in leaves:
            y = fq.linear(x, leaf, bias, backend=backend)
            assert y.dtype == x_dtype
            assert ((y.double() - want).abs() <= bound).all(), (key, scale, backend)
    assert want.std() > 5


@pytest.mark.parametrize(
    ("key", "want"),
    [
        ("int4:row:sym", [[7, 4], [7, 3]]),  # s = amax/7.5: 7.5 and 4.12; 7.5 and 3.47
        ("int4:row:sym:absmax_narrow", [[7, 4], [7, 3]]),  # 7 and 3.84; 7 and 3.24
        ("int8", [[127, 70], [127, 59]]),  # 127.5 and 70.03; 127.5 and 59.01
        ("int3:row", [[3, 2], [3, 2]]),  # 3.5 and 1.92; 3.5 and 1.62
        ("int2:row", [[1, 1], [1, 1]]),  # 1.5 and 0.82; 1.5 and 0.69
    ],
)
def test_case_E1_all_positive_weights_keep_their_range(key, want):
    w, layout = torch.tensor([[0.8315, 0.4567], [0.4362, 0.2019]]), fq.layout(key)
    q = fq.quantize(w, layout)
    assert layout.element.decode(codes(q)).tolist() == want
    error = (fq.dequantize(q) - w).abs()
    assert (error <= q.scale / 2 + 2.0**-23 * w).all()
    if layout.element.bits == 4:
        assert (error <= w.amax(1, keepdim=True) / 14 * (1 + 1e-6)).all()


@pytest.mark.parametrize(("zero", "want"), [(-128, [25.5, 0, 12.8]), (127, [0, -25.5, -12.7])])
def test_case_E2_int8_zero_points_do_not_wrap(zero, want):
    x = torch.tensor([want])
    q = fq.quantize(x, fq.layout("int8:row:int-zp"), scale=0.1, zero_point=torch.tensor(zero))
    assert q.data.tolist() == [[127, -128, 0]] and q.zero_point.dtype == torch.int8
    for leaf in (q, q.contiguous(), fq.stack([q, q])[0]):
        torch.testing.assert_close(fq.dequantize(leaf), x, rtol=1e-6, atol=0)
    torch.testing.assert_close(fq.linear(torch.eye(3), q), x.T, rtol=1e-6, atol=0)
    half = fq.dequantize(q, torch.bfloat16)
    assert torch.equal(half, (torch.tensor([[127.0, -128, 0]]) - zero).mul(torch.tensor(0.1)).bfloat16())


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("zero", ["uint8", "layout"])
def test_case_E3_unsigned_codes_minus_their_zero(bits, zero):
    size, middle = 1 << bits, 1 << (bits - 1)
    text = f"uint{bits}:row" if zero == "uint8" else f"uint{bits}:row:scale=(uint8:tensor:sym):int-zp"
    q = fq.quantize(torch.zeros(1, size), fq.layout(text))
    data = torch.arange(size, dtype=torch.uint8)[None]
    q = replace(
        q,
        data=data if bits == 8 else fq.pack_bits(data, bits),
        zero_point=torch.full((1, 1), middle, dtype=torch.uint8),
        scale=torch.ones(1, 1)
        if zero == "uint8"
        else fq.quantize(torch.ones(1, 1), q.scale.layout, scale=1.0),
    )
    want = torch.arange(-middle, size - middle)[None]
    for dtype in (torch.float16, torch.float32, torch.bfloat16):
        assert torch.equal(fq.dequantize(q, dtype), want.to(dtype))
    assert torch.equal(fq.linear(torch.eye(size).half(), q).T, want.half())
    assert torch.equal(fq.embedding(torch.tensor([0]), q), want.float())


CONSTANT = {
    "uint8:g2:int-zp": 255,
    "int8:g2:int-zp": 255,
    "uint8:g2:asym": 255,
    "int8:g2:asym": 255,
    "int4:g2": 15,
}
CONSTANT |= {f"uint{b}:g2": 2**b - 1 for b in range(1, 8)}


@pytest.mark.parametrize("key", CONSTANT)
def test_case_E4_constant_groups(key):
    layout = fq.layout(key)
    for x in (torch.tensor([[9.0, 9.0], [-9.0, -9.0]]), torch.full((64, 64), 3.0), torch.full((3, 5), -1e-3)):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            q, x = fq.quantize(x.to(dtype), layout), x.to(dtype).float()
            y = fq.dequantize(q, torch.float32)
            assert torch.isfinite(q.scale).all() and torch.isfinite(q.zero_point.float()).all()
            span = x.abs() if layout.zero_point == "int" else torch.tensor(1e-6)  # 0 is in an integer's range
            step = span / CONSTANT[key]
            assert ((y - x).abs() <= step / 2 + 2.0**-23 * x.abs()).all()
