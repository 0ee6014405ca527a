"""Cases A and C that users met: scales of zeros and tiny blocks, special scale bytes, one rounding."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from formats import assert_equal, codes

import fq
from fq.layouts.element import Codebook

Q4_K = "uint4:g32:scale=(uint6:g8:sym:scale=float16):zp=(uint6:g8:sym:scale=float16:absmax_full)"
FP8 = tuple(f"{e}{block}" for e in ("fp8", "e5m2") for block in (":tensor", "", ":g32", ":block128x128"))
MX = ("mxfp4", "mxfp6", "e2m3:g32:scale=e8m0", "mxfp8", "e5m2:g32:scale=e8m0")
INTS = ("int8", "int4:g32", "int4:g32:sym", "uint4:g32", "int8:g32:int-zp", "uint8:g32:asym", "int2:g32")
TABLES = ("nf4:g32", "nf4:g32:scale=(uint8:g256:sym)", "lut(-1.0,0.0,2.0):g32")
NESTED = ("nvfp4", "nvfp4:four_over_six", "nvfp4:scale=e4m3", Q4_K)
SEARCHED = ("int4:g32:mse", "int4:g32:sym:mse", "mxfp4:mse", "nvfp4:mse")
HALVES = ("int8:scale=float16", "fp8:g32:scale=bfloat16", "fp8:g32:scale=e4m3", "uint4:g32:scale=e8m0")
OTHERS = ("e3m0:g32", "e4m3fnuz", "binary:g32", "int3:g32", "uint6:g32:sym")
KEYS = (*FP8, *MX, *INTS, *TABLES, *NESTED, *SEARCHED, *HALVES, *OTHERS)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NAN, INF = torch.nan, torch.inf
MODES = ["eager", "vmapped"]


def in_mode(mode: str, f, x):
    """f(x), itself or as one of two under vmap; what Inductor compiles stands in test_cases_inductor.py."""
    if mode == "vmapped":
        return torch.utils._pytree.tree_map(
            lambda t: t[1], torch.vmap(f)(torch.stack([torch.ones_like(x), x]))
        )
    return f(x)


def scales(q: fq.QTensor) -> torch.Tensor:
    """The scales as numbers, over the block grid."""
    if isinstance(q.scale, fq.QTensor):
        return fq.dequantize(q.scale)
    if q.scale.dtype != torch.uint8:
        return q.scale.float()
    return torch.where(q.scale == 255, NAN, torch.exp2(q.scale.double() - 127)).float()


def code_of_zero(layout: fq.Layout) -> int:
    """What a block of zeros holds: the minimum's code under a zero point, else the code of zero."""
    if isinstance(layout.element, Codebook):  # without a zero the scale is 0, and 0/0 is encoded as 0
        return layout.element.values.index(0.0) if layout.element.has_zero else 0
    return 1 << (layout.element.bits - 1) if layout.zero_point and layout.element.signed else 0


@pytest.mark.parametrize("key", KEYS)
def test_case_A1_zeros_in_every_format(key):
    layout = fq.layout(key)
    for dtype in DTYPES:
        q = fq.quantize(torch.zeros(4, 64, dtype=dtype), layout)
        assert (codes(q) == code_of_zero(layout)).all()
        assert torch.isfinite(scales(q)).all() and (scales(q) != 0).all() == (key != "binary:g32")
        assert torch.equal(fq.dequantize(q), torch.zeros(4, 64, dtype=dtype))
        x = torch.randn(4, 64).to(dtype)
        x[2] = 0
        q, others = fq.quantize(x, layout), fq.quantize(x[[0, 1, 3]], layout)
        y = fq.dequantize(q)
        assert torch.isfinite(scales(q)).all() and torch.isfinite(y).all()
        assert (y[2] == 0).all() and (y[[0, 1, 3]] != 0).any(-1).all()
        assert torch.equal(y[[0, 1, 3]], fq.dequantize(others))
        assert torch.equal(codes(q)[[0, 1, 3]], codes(others))


@pytest.mark.parametrize(
    "key", ["int8", "int8:g64:int-zp", "uint8:g64:asym", "int4:g64", "int4:g64:sym", Q4_K]
)
def test_case_A2_unused_rows_of_an_embedding(key):
    table = torch.randn(1000, 512)
    table[[107, 528, 999]] = 0
    q = fq.quantize(table, fq.layout(key))
    out = fq.embedding(torch.arange(1000), q)
    assert torch.isfinite(scales(q)).all() and torch.isfinite(out).all()
    assert (out[[107, 528, 999]] == 0).all()
    assert (out != 0).any(-1).sum() == 997
    assert fq.sqnr(table, out) > 15


@pytest.mark.parametrize("key", KEYS)
def test_case_A3_groups_near_zero_in_every_format(key):
    signs = torch.randint(0, 2, (2, 64)) * 2.0 - 1
    layout = fq.layout(key)
    for amax in (1e-20, 1e-30, 1e-38, 1e-40, 1e-45):
        for x in (amax * signs, amax * signs * torch.rand(2, 64)):
            q = fq.quantize(x, layout)
            y = fq.dequantize(q)
            assert torch.isfinite(scales(q)).all()
            bound = torch.tensor(amax)
            if key == "uint8:g32:asym":  # all codes are 0, which is the minimum
                bound = 2 * bound
            elif key == "binary:g32":  # no code is zero, and the scale is floored
                bound = bound.clamp(min=2.0**-126)
            assert ((y - x).abs() <= bound).all()
            assert_equal(fq.fake_quantize(x, layout), y)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_case_A4_blocks_below_the_normal_numbers(mode, dtype):
    x = torch.zeros(3, 32, dtype=torch.float64)
    x[:, :4] = torch.tensor([352, -88, 0.15625, 448], dtype=torch.float64)
    x = (x * 2.0**-127).to(dtype)
    assert x[0, 2] == 1.25 * 2.0**-130  # not flushed in the making
    want = torch.tensor([352, -88, 0.15625, 448] + [0] * 28)

    def both(x, rule):
        q = fq.quantize(x, fq.mxfp8(rule=rule))
        return q, fq.dequantize(q, torch.float32)

    for rule, byte in (("floor", 0), ("even", 0), ("rceil", 0), ("ceil", 1)):
        q, y = in_mode(mode, lambda x, rule=rule: both(x, rule), x)
        assert q.scale.tolist() == [[byte]] * 3
        assert torch.equal(q.data.float(), (want / 2**byte).expand(3, 32))
        assert torch.equal(y, x.float()) and (y[:, :4] != 0).all()
        assert torch.equal(fq.linear(torch.eye(32), q).mT, y)


@pytest.mark.parametrize(
    ("key", "high", "low"),  # the scales are integers times 2^-24, and so are the numbers, ±17
    [
        ("uint8:g32:scale=float16", 17, 17),  # floored: codes 0 to 34 around their zero, 17
        ("int8:g32:scale=float16", 17, 17),
        ("int4:g32:sym:scale=float16", 2 * 7, 2 * 8),  # 17/7.5 is stored as 2; ±8.5 is clamped
        ("fp8:g32:scale=float16", 16, 16),  # floored; 17 is a tie between 16 and 18
        ("mxfp4:scale=float16", 3 * 6, 3 * 6),  # 17/6 is stored as 3
        ("nf4:g32:scale=float16", 17, 17),
    ],
)
def test_case_A5_no_format_loses_what_half_precision_scales_cannot_hold(key, high, low):
    x = torch.full((1, 32), 1e-6, dtype=torch.float16)
    x[0, ::2] *= -1
    y = fq.dequantize(fq.quantize(x, fq.layout(key)), torch.float32)
    assert (y[0] * 2.0**24).tolist() == [-low, high] * 16
    wide = fq.dequantize(fq.quantize(x, fq.layout(key.removesuffix(":scale=float16"))), torch.float32)
    assert ((wide - x.float()).abs() <= 17 * 2.0**-24 / 15).all()  # half a step of the coarsest of them


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("key", ["nvfp4", "nvfp4:scale=e4m3"])
def test_case_A6_the_floor_of_block_scales_is_the_same_everywhere(mode, key):
    x = torch.zeros(1, 16)
    x[0, 3], x[0, 4] = 6 * 2.0**-11, -(2.0**-10)
    outer = {"outer_scale": 1.0} if key == "nvfp4" else {}
    q = in_mode(mode, lambda x: fq.quantize(x, fq.layout(key), **outer), x)
    kept = q.scale.data if key == "nvfp4" else q.scale
    assert kept.view(torch.uint8).item() == 1  # 2^-9
    assert torch.equal(fq.dequantize(q), x)


def with_block_scales(scale: torch.Tensor) -> fq.QTensor:
    """NVFP4 rows of ones under one given e4m3 scale each, and the outer scale 1."""
    q = fq.quantize(torch.zeros(len(scale), 16), fq.nvfp4(), outer_scale=1.0)
    inner = replace(q.scale, data=scale.reshape(-1, 1).contiguous().view(torch.float8_e4m3fn))
    return replace(q, data=torch.full_like(q.data, 0x22), scale=inner)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_case_A7_all_126_block_scales(mode, dtype):
    code = torch.arange(1, 127, dtype=torch.uint8)
    e, m = (code >> 3).double(), (code & 7).double()
    value = torch.where(e == 0, m * 2.0**-9, (8 + m) * torch.exp2(e - 10))
    assert value.max() == 448 and value.min() == 2.0**-9 and value.unique().numel() == 126
    y = in_mode(mode, lambda c: fq.dequantize(with_block_scales(c), dtype), code)
    assert_equal(y, value.float().to(dtype)[:, None].expand(126, 16))


def test_case_A8_subnormal_block_scales():
    y = fq.dequantize(with_block_scales(torch.arange(8, dtype=torch.uint8)))
    want = [0.0, 0.001953125, 0.00390625, 0.005859375, 0.0078125, 0.009765625, 0.01171875, 0.013671875]
    assert y[:, 0].tolist() == want and y[:, 15].tolist() == want


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("key", "one"),
    [("mxfp4", 2), ("mxfp6", 12), (MX[2], 8), ("mxfp8", 0x38), (MX[4], 0x3C), ("int8:g32:scale=e8m0", 1)],
)
def test_case_A9_special_scale_bytes(mode, key, one):
    scale = torch.tensor([0, 1, 126, 127, 128, 254, 255], dtype=torch.uint8)
    want = torch.tensor([2.0**-127, 2.0**-126, 0.5, 1, 2, 2.0**127, NAN], dtype=torch.float64)
    q = fq.quantize(torch.zeros(7, 32), fq.layout(key))
    bits = q.layout.element.bits
    data = torch.full((7, 32), one, dtype=torch.uint8)
    data = data.view(q.data.dtype) if bits == 8 else fq.pack_bits(data, bits)
    q = replace(q, data=data)
    for dtype in (torch.float32, torch.bfloat16):
        y = in_mode(mode, lambda s, dtype=dtype: fq.dequantize(replace(q, scale=s[:, None]), dtype), scale)
        assert_equal(y.double(), want[:, None].expand(7, 32))
    y = fq.linear(torch.eye(32)[:3], replace(q, scale=scale[:, None])[:6])
    assert_equal(y.double(), want[:6].expand(3, 6))


@pytest.mark.parametrize(
    "key", ["fp8@fp8", "fp8:tensor@fp8:tensor", "int8@int8", "mxfp8@mxfp8", "nvfp4@nvfp4"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_case_A10_activations_of_zeros(key, dtype):
    w, bias = torch.randn(32, 16).to(dtype), torch.randn(32).to(dtype)
    q, x, t = fq.quantize(w, fq.layout(key)), torch.randn(8, 16).to(dtype), torch.randn(8, 32)
    a, b = torch.randn(4, 16).to(dtype).requires_grad_(), torch.zeros(16, 4, dtype=dtype, requires_grad=True)
    y = fq.linear(x @ a.mT @ b.mT, q, bias)
    assert torch.equal(y, bias.expand(8, 32))
    (y.float() * t).sum().backward()
    g = t.to(dtype).double() @ fq.dequantize(q).double()  # straight through the activation's quantizer
    want = g.mT @ (x @ a.detach().mT).double()
    assert (a.grad == 0).all() and want.norm() > 1
    assert (b.grad.double() - want).norm() <= 3 * torch.finfo(dtype).eps * want.norm()


# --- C: one rounding, to nearest even ---


TIES = torch.tensor([6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
EVEN = [6, 0, 1, 1, 2, 2, 4, 4]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sign", [1, -1])
def test_case_C1_ties_in_every_form_of_fp4(mode, sign):
    x = torch.zeros(2, 32)
    x[:, :8] = sign * TIES
    signed = [sign * v for v in EVEN]
    packed = in_mode(mode, fq.cast_fp4x2, x)
    nibbles = [int(2 * v) if v < 2 else {2: 4, 4: 6, 6: 7}[v] for v in EVEN]
    nibbles = [n + 8 * (sign < 0) for n in nibbles]
    assert fq.unpack_fp4x2(packed)[1, :8].tolist() == nibbles
    assert torch.equal(fq.pack_fp4x2(torch.tensor(nibbles)), packed[0, :4])
    for layout, given in ((fq.mxfp4(), {"scale": torch.ones(2, 1)}), (fq.nvfp4(), {"outer_scale": 1.0})):
        y = in_mode(mode, lambda x, k=layout, g=given: fq.quantize(x, k, **g), x)
        assert torch.equal(y.data, packed) and (scales(y) == 1)[:, 0].all()
        assert fq.dequantize(y)[0, :8].tolist() == signed


UP = {
    3.0: 4,
    0.75: 1,
    6.0: 8,
    5.0: 8,
    2.0: 2,
    0.5: 0.5,
    1.0: 1,
    1 + 2.0**-23: 2,
    2 - 2.0**-23: 2,
    4 - 2.0**-22: 4,
}
UP |= {
    2.0**-127: 2.0**-127,
    2.0**-126: 2.0**-126,
    3 * 2.0**-128: 2.0**-126,
    2.0**-149: 2.0**-127,
    0.0: 2.0**-127,
}
UP |= {2.0**127: 2.0**127, 3e38: 2.0**127}  # beyond the largest byte it saturates


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("key", ["mxfp4", "mxfp8", "int8:g32:scale=e8m0"])
def test_case_C2_given_scales_round_up_to_a_power_of_two(mode, key):
    given, x, layout = torch.tensor(list(UP))[:, None], torch.ones(len(UP), 32), fq.layout(key)
    q = in_mode(mode, lambda s: fq.quantize(x, layout, scale=s), given)
    want = torch.tensor(list(UP.values()), dtype=torch.float64)
    assert torch.equal(torch.exp2(q.scale.double() - 127)[:, 0], want)


@pytest.mark.parametrize("mode", MODES)
def test_case_C2_outer_scales_round_up_as_well(mode):
    x, layout = torch.randn(3, 32), fq.layout("int4:g8:sym:scale=(uint6:g2:sym:scale=e8m0)")
    q = in_mode(mode, lambda s: fq.quantize(x, layout, outer_scale=s), torch.tensor(3.0))
    assert q.scale.scale.tolist() == [[129, 129]] * 3  # one given for all stands in every outer block
    assert (codes(q.scale) == 1).all()  # below 4: the smallest
    assert torch.equal(fq.dequantize(q), 4 * torch.round(x / 4))


def test_case_C2_a_chosen_scale_follows_the_same_rule():
    x = torch.zeros(4, 32)
    x[:, 0] = 127.5 * torch.tensor([3.0, 0.75, 6.0, 4.0])  # amax/127.5 are the scales
    assert fq.quantize(x, fq.int8((1, 32), scale="e8m0")).scale[:, 0].tolist() == [129, 127, 130, 129]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("element", "middles"),
    [
        ("e4m3", (1.0625, 1.1875, 2.125, 17.0, 19.0, 34.0, 232.0, 2.0**-10, 3 * 2.0**-10)),
        ("e5m2", (1.125, 1.375, 2.25, 18.0, 36.0, 2.0**-17, 53248.0)),
        ("e2m3", (1.0625, 0.0625, 4.25, 7.25)),
        ("e3m2", (1.125, 0.03125, 4.5, 26.0)),
        ("e2m1", (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)),
    ],
)
def test_case_C3_one_rounding_under_a_static_scale(mode, element, middles):
    t = torch.tensor(middles, dtype=torch.float64)
    x = (0.01 * torch.stack([t * (1 - 2.0**-11), t * (1 + 2.0**-11)])).float()
    layout = fq.layout(element)
    decode = layout.element.decode
    y = in_mode(mode, lambda x: decode_codes(fq.quantize(x, layout, scale=0.01)), x).double()
    every = decode(torch.arange(2**layout.element.bits, dtype=torch.uint8).view(layout.element.storage_dtype))
    values = np.unique(every[every.isfinite()].double().numpy())
    at = np.searchsorted(values, t.numpy())
    assert np.array_equal((values[at - 1] + values[at]) / 2, t.numpy())  # middles they are
    assert y.tolist() == [values[at - 1].tolist(), values[at].tolist()]


def decode_codes(q: fq.QTensor) -> torch.Tensor:
    return fq.dequantize(replace(q, scale=torch.ones_like(q.scale)), torch.float32)


def test_case_C5_nvfp4_moves_under_the_second_smallest_scale_only():
    """An ideal scale of 1.5 to 1.67 steps is stored as 2, of which amax is 4 and not 6."""
    x = torch.zeros(64, 16)
    ideal = torch.linspace(0.5, 8, 64)
    x[:, 0], x[:, 1] = 6 * ideal * 2.0**-9, -1.3 * ideal * 2.0**-9
    q = fq.quantize(x, fq.nvfp4(), outer_scale=1.0)
    y = fq.dequantize(q)
    z = fq.dequantize(fq.quantize(y, fq.nvfp4(), outer_scale=1.0))
    two = (q.scale.data.view(torch.uint8) == 2)[:, 0]
    assert torch.equal(z[~two], y[~two]) and not torch.equal(z, y)
    assert torch.equal((z != y).any(-1), two & (ideal < 5 / 3))
    assert ((z - y).abs() <= 2 * scales(q)).all()  # one step, the last spacing of e2m1
