"""Cases A, B and C that users met, compiled by Inductor: its bytes and numbers are those of eager."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from formats import assert_equal, assert_same, codes
from test_cases_integers import STATIC
from test_cases_scales import EVEN, TIES, UP, with_block_scales

import fq

pytestmark = pytest.mark.slow
NAN, INF = torch.nan, torch.inf


@pytest.fixture(autouse=True)
def _fresh(fresh_compile):
    pass


def compiled(f, *args):
    return torch.compile(f, fullgraph=True)(*args)


def test_case_A4_compiled_does_not_flush_to_zero():
    block = torch.tensor([352, -88, 0.15625, 448] + [0] * 28, dtype=torch.float64)
    x = (block * 2.0**-127).float().expand(3, 32)

    def f(x):
        return [(q, fq.dequantize(q)) for q in (fq.quantize(x, fq.mxfp8(rule=r)) for r in ("floor", "rceil"))]

    assert x[0, 2] == 1.25 * 2.0**-130
    both = compiled(lambda x, y: (f(x), f(y)), x, x.bfloat16())
    for y, found in zip((x, x.bfloat16()), both, strict=True):
        for q, back in found:
            assert q.scale.tolist() == [[0]] * 3
            assert torch.equal(q.data.double(), block.expand(3, 32))
            assert torch.equal(back, y) and (back[:, :4] != 0).all()


def test_case_A6_the_floor_of_block_scales_compiled():
    x = torch.zeros(2, 16)
    x[:, 3], x[:, 4] = 6 * 2.0**-11, -(2.0**-10)
    layouts = (fq.nvfp4(), fq.nvfp4(scale="e4m3"))
    nested, plain = compiled(
        lambda x: [
            fq.quantize(x, k, outer_scale=1.0) if k is layouts[0] else fq.quantize(x, k) for k in layouts
        ],
        x,
    )
    assert (nested.scale.data.view(torch.uint8) == 1).all() and (plain.scale.view(torch.uint8) == 1).all()
    assert torch.equal(fq.dequantize(nested), x) and torch.equal(fq.dequantize(plain), x)


def test_case_A7_all_126_block_scales_compiled():
    code = torch.arange(1, 127, dtype=torch.uint8)
    e, m = (code >> 3).double(), (code & 7).double()
    value = torch.where(e == 0, m * 2.0**-9, (8 + m) * torch.exp2(e - 10)).float()[:, None].expand(126, 16)
    q = with_block_scales(code)
    half, bf16 = compiled(lambda q: (fq.dequantize(q, torch.float16), fq.dequantize(q, torch.bfloat16)), q)
    assert_equal(half, value.half())
    assert_equal(bf16, value.bfloat16())


def test_case_A9_special_scale_bytes_compiled():
    scale = torch.tensor([0, 1, 126, 127, 128, 254, 255], dtype=torch.uint8)[:, None]
    want = torch.tensor([2.0**-127, 2.0**-126, 0.5, 1, 2, 2.0**127, NAN], dtype=torch.float64)
    fp4 = fq.quantize(torch.ones(7, 32), fq.mxfp4(), scale=1.0)
    fp8 = fq.quantize(torch.ones(7, 32), fq.mxfp8(), scale=1.0)
    fp6 = fq.quantize(torch.ones(7, 32), fq.mxfp6(), scale=1.0)
    out = compiled(lambda s, *qs: [fq.dequantize(replace(q, scale=s)) for q in qs], scale, fp4, fp6, fp8)
    for y in out:
        assert_equal(y.double(), want[:, None].expand(7, 32))


def test_case_B1_static_casts_compiled():
    keys = ("fp8", "e5m2", "e2m1", "e3m2", "int8")
    inputs = [torch.tensor([[*STATIC[k][0], NAN]], dtype=torch.float32) for k in keys]

    def f(*inputs):
        return [fq.quantize(x, fq.layout(k), scale=1.0) for x, k in zip(inputs, keys, strict=True)]

    for key, got, want in zip(keys, compiled(f, *inputs), f(*inputs), strict=True):
        assert_same(got, want)
        assert fq.dequantize(got)[0, :-1].tolist() == STATIC[key][1]
        assert codes(got)[0, -1] == {"e2m1": 7, "e3m2": 31, "int8": 0}.get(key, 0x7F)


def test_case_B2_nan_and_infinity_in_a_block_compiled():
    clean = torch.randn(4, 96).bfloat16()
    x = clean.clone()
    x[1, 40], x[2, 70], x[3, 0] = NAN, INF, -INF
    layouts = (fq.mxfp8(), fq.nvfp4())
    f = lambda x: [fq.quantize(x, k) for k in layouts]  # noqa: E731
    for got, want, whole in zip(compiled(f, x), f(x), f(clean), strict=True):
        assert_same(got, want)
        y = fq.dequantize(got)
        if "nvfp4" in got.layout.key:
            assert y.isnan().all()
            continue
        hit = torch.zeros(4, 3, dtype=torch.bool)
        hit[1, 1] = hit[2, 2] = hit[3, 0] = True
        spread = hit.repeat_interleave(32, 1)
        assert y[spread].isnan().all() and torch.equal(y[~spread], fq.dequantize(whole)[~spread])
        assert got.scale.dtype != torch.uint8 or torch.equal(got.scale == 255, hit)


def test_case_B3_integers_with_nan_compiled():
    x = torch.randn(2, 64)
    x[0, 3], x[1, 40] = NAN, INF
    keys = ("int8:g32", "int4:g32", "uint4:g32")
    f = lambda x: [fq.quantize(x, fq.layout(k)) for k in keys]  # noqa: E731
    for got, want in zip(compiled(f, x), f(x), strict=True):
        assert_same(got, want)
        assert got.scale.isnan().tolist() == [[True, False], [False, True]]
        assert (codes(got)[0, :32] == 0).all() and (codes(got)[1, 32:] == 0).all()


def test_case_B4_infinities_are_clamped_before_the_cast_compiled():
    x = torch.tensor([[INF, -INF, 3e38]]).repeat(2, 8)
    zero = torch.tensor(0)
    q = compiled(
        lambda x, z: fq.quantize(x, fq.layout("uint8:row:int-zp"), scale=0.01, zero_point=z), x, zero
    )
    assert q.data.tolist() == [[255, 0, 255] * 8] * 2


def test_case_C1_ties_compiled():
    x = torch.zeros(2, 32)
    x[0, :8], x[1, :8] = TIES, -TIES

    def f(x):
        return (
            fq.cast_fp4x2(x),
            fq.quantize(x, fq.mxfp4(), scale=1.0),
            fq.quantize(x, fq.nvfp4(), outer_scale=1.0),
        )

    packed, mx, nv = compiled(f, x)
    assert torch.equal(packed, fq.cast_fp4x2(x))
    for q in (mx, nv):
        assert torch.equal(q.data, packed)
        assert fq.dequantize(q)[:, :8].tolist() == [EVEN, [-v for v in EVEN]]


def test_case_C2_given_scales_compiled():
    given, x = torch.tensor(list(UP))[:, None], torch.ones(len(UP), 32)
    layouts = (fq.mxfp4(), fq.int8((1, 32), scale="e8m0"))
    f = lambda x, s: [fq.quantize(x, k, scale=s) for k in layouts]  # noqa: E731
    want = torch.tensor(list(UP.values()), dtype=torch.float64)
    for got, eager in zip(compiled(f, x, given), f(x, given), strict=True):
        assert_same(got, eager)
        assert torch.equal(torch.exp2(got.scale.double() - 127)[:, 0], want)


def test_case_C3_one_rounding_compiled():
    middles = {
        "fp8": (1.0625, 2.125, 17.0, 34.0),
        "e5m2": (1.125, 2.25, 18.0, 36.0),
        "e2m1": (0.75, 1.25, 2.5, 5.0),
    }
    above = {"fp8": [1.125, 2.25, 18, 36], "e5m2": [1.25, 2.5, 20, 40], "e2m1": [1, 1.5, 3, 6]}
    below = {"fp8": [1, 2, 16, 32], "e5m2": [1, 2, 16, 32], "e2m1": [0.5, 1, 2, 4]}
    t = torch.tensor(list(middles.values()), dtype=torch.float64)
    x = (0.01 * torch.stack([t * (1 - 2.0**-11), t * (1 + 2.0**-11)], 1)).float()

    def f(x):
        return [fq.quantize(x[i], fq.layout(k), scale=0.01) for i, k in enumerate(middles)]

    for key, q in zip(middles, compiled(f, x), strict=True):
        assert q.layout.element.decode(codes_of(q)).tolist() == [below[key], above[key]]


def codes_of(q: fq.QTensor) -> torch.Tensor:
    return codes(q).view(q.layout.element.storage_dtype)
