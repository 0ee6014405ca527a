"""What people who quantize ran into: zeros, tiny and huge numbers, NaN, dtypes, ragged and odd shapes."""

from __future__ import annotations

import formats
import numpy as np
import oracle
import pytest
import torch
from formats import ALL, CORE, PRESETS, SPECS, assert_equal, assert_same, codes, presets
from oracle_formats import Blocks, Format

import fq

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LARGEST = torch.finfo(torch.float32).max
INF, NAN = torch.inf, torch.nan


def scales(q: fq.QTensor) -> torch.Tensor:
    """The scales as numbers, over the block grid."""
    if isinstance(q.scale, fq.QTensor):
        return fq.dequantize(q.scale)
    if q.scale.dtype != torch.uint8:
        return q.scale.float()
    return torch.tensor([[oracle.e8m0_decode(b) for b in row] for row in q.scale.tolist()])


def zero_code(layout: fq.Layout) -> int:
    """The code of a number that is zero, where all of its block are."""
    if layout.zero_point in ("int", "float"):  # zero is the minimum
        return int(layout.element.min) % 2**layout.element.bits
    return 7 if layout.element.name == "nf4" else 0


LAYOUTS_OF_A1 = (
    *PRESETS.values(),
    *(fq.int8(block=block) for block in ((-1, -1), (1, 32), (128, 128))),
    fq.int8(scale=torch.float16),
    fq.int4(32, scale=torch.bfloat16),
    fq.int8(block=(1, 32), scale="e8m0"),
    fq.nvfp4(scale="e4m3"),
    fq.layout("int4:g32:zp=(int8:g2)"),
)


@pytest.mark.parametrize("layout", LAYOUTS_OF_A1, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_case_A1_blocks_of_zeros(layout, dtype):
    q = fq.quantize(torch.zeros(4, 64, dtype=dtype), layout)
    assert (codes(q) == zero_code(layout)).all()
    assert torch.isfinite(scales(q)).all()
    assert ((scales(q) == 0) == (layout.element.name == "binary")).all()  # which has no code for zero
    assert torch.equal(fq.dequantize(q), torch.zeros(4, 64, dtype=dtype))
    x = torch.randn(4, 64).to(dtype)
    x[2] = 0
    q, others = fq.quantize(x, layout), fq.quantize(x[[0, 1, 3]], layout)
    y = fq.dequantize(q)
    assert torch.isfinite(y).all()
    assert (y[2] == 0).all()
    assert torch.equal(y[[0, 1, 3]], fq.dequantize(others))
    assert torch.equal(codes(q)[[0, 1, 3]], codes(others))


@ALL
@pytest.mark.parametrize("amax", [1e-20, 1e-30, 1e-38, 1e-40, 1e-45])
def test_case_A3_tiny_groups(name, amax):
    x = amax * (torch.randint(0, 2, (2, 64)) * 2.0 - 1) * torch.rand(2, 64)
    x[:, 0] = amax
    q = fq.quantize(x, PRESETS[name])
    y = fq.dequantize(q)
    assert torch.isfinite(scales(q)).all()
    assert ((y - x).abs() <= (max(amax, 2.0**-126) if name == "binary" else amax)).all()
    formats.assert_matches(q, formats.expected(name, x))


def test_case_A5_scales_that_half_precision_cannot_hold():
    x = torch.full((1, 32), 1e-6, dtype=torch.float16)
    x[0, ::2] *= -1
    q = fq.quantize(x, fq.int8(block=(1, 32)))
    assert ((fq.dequantize(q, torch.float32) - x.float()).abs() <= q.scale / 2).all()
    q = fq.quantize(x, fq.int8(block=(1, 32), scale=torch.float16))
    assert q.scale.item() == 2.0**-24
    assert (q.data.abs() == 17).all()
    assert fq.dequantize(q, torch.float32)[0, 1].item() == 17 * 2.0**-24  # 1.0133e-6


def test_case_A6_block_scales_are_floored():
    x = torch.zeros(1, 16)
    x[0, 3] = 6 * 2.0**-11
    x[0, 4] = -(2.0**-10)
    q = fq.quantize(x, fq.nvfp4(), outer_scale=1.0)
    assert q.scale.data.view(torch.uint8).item() == 1  # 2^-9, the smallest e4m3 number
    assert torch.equal(fq.dequantize(q), x)


@ALL
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_case_B2_nan_and_infinities_poison_their_block_only(name, bad, dtype):
    layout = PRESETS[name]
    clean = torch.randn(4, 96).to(dtype)
    x = clean.clone()
    x[1, 40] = bad
    q, want = fq.quantize(x, layout), fq.quantize(clean, layout)
    spec = SPECS[name]
    blocks = Blocks((4, 96), spec.block)
    poisoned = np.zeros(blocks.grid, bool)
    poisoned.flat[blocks.of[1, 40]] = True
    if isinstance(spec.scale, Format):  # the outer block counts
        outer = Blocks(blocks.grid, spec.scale.block)
        poisoned = outer.of == outer.of[poisoned]
    hit, poisoned = torch.from_numpy(blocks.spread(poisoned)), torch.from_numpy(poisoned)
    y = fq.dequantize(q)
    assert y.isnan()[hit].all()
    assert torch.equal(y[~hit], fq.dequantize(want)[~hit])
    assert torch.equal(codes(q)[~hit], codes(want)[~hit])
    assert (codes(q)[hit] == spec.element.nan).all()
    assert scales(q)[poisoned].isnan().all()
    assert torch.equal(scales(q)[~poisoned], scales(want)[~poisoned])
    if layout.scale == "e8m0":
        assert (q.scale[poisoned] == 255).all()
    if isinstance(q.scale, fq.QTensor):
        assert (codes(q.scale)[poisoned] == spec.scale.element.nan).all()
    if q.zero_point is not None:
        zero, clean_zero = (
            fq.dequantize(z) if isinstance(z, fq.QTensor) else z for z in (q.zero_point, want.zero_point)
        )
        bad_zero = zero[poisoned]
        assert (bad_zero == 0 if layout.zero_point == "int" else bad_zero.isnan()).all()
        assert torch.equal(zero[~poisoned], clean_zero[~poisoned])


def test_case_B2_one_nan_poisons_one_experts_nvfp4_matrix():
    clean = torch.randn(3, 8, 32)
    x = clean.clone()
    x[1, 4, 5] = NAN
    q, want = fq.quantize(x, fq.nvfp4()), fq.quantize(clean, fq.nvfp4())
    assert fq.dequantize(q)[1].isnan().all()
    for i in (0, 2):
        assert_same(q[i], want[i])


def test_case_B2_quantize_params_names_what_is_not_finite():
    params = {"good.weight": torch.randn(8, 32), "bad.weight": torch.randn(8, 32)}
    params["bad.weight"][3, 4] = INF
    with pytest.raises(ValueError, match=r"bad\.weight") as error:
        fq.quantize_params(params, fq.int4(32))
    assert "good.weight" not in str(error.value)
    forced = fq.quantize_params(params, fq.int4(32), check_finite=False)
    assert fq.dequantize(forced["bad.weight"])[3].isnan().all()


@ALL
@pytest.mark.parametrize("dtype", DTYPES)
def test_finite_input_never_becomes_nan_or_inf(name, dtype):
    largest = torch.finfo(dtype).max
    x = torch.randn(6, 64).to(dtype)
    x[0, 3] = largest
    x[1, 3] = -largest
    x[2, 3], x[2, 4] = largest, -largest
    x[3] = largest
    x[4] = -largest
    x[5] = (torch.rand(64) * 2 - 1) * largest
    q = fq.quantize(x, PRESETS[name])
    y = fq.dequantize(q)
    assert torch.isfinite(scales(q)).all()
    assert torch.isfinite(y).all()
    assert torch.isfinite(fq.dequantize(q, torch.float16)).all()
    assert torch.isfinite(fq.fake_quantize(x, PRESETS[name])).all()
    formats.assert_matches(q, formats.expected(name, x))
    if name in CORE and name != "int4":  # whose range is a difference, which saturates
        assert ((y.double() - x.double()).abs() <= largest / 3).all()


@pytest.mark.parametrize("rule", formats.MX_RULES)
@pytest.mark.parametrize("sign", [1, -1])
def test_case_C1_ties_go_to_the_even_code(rule, sign):
    x = torch.zeros(1, 32)
    x[0, :8] = sign * torch.tensor([6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    q = fq.quantize(x, fq.mxfp4(rule), scale=torch.ones(1, 1))
    assert q.scale.item() == 127
    assert (sign * fq.dequantize(q)[0, :8]).tolist() == [6, 0, 1, 1, 2, 2, 4, 4]


@pytest.mark.parametrize("backend", ["reference", "aten"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_case_D1_scales_are_combined_before_the_result_is_rounded(backend, dtype):
    q = fq.quantize(torch.full((3, 8), 127.0), fq.int8(act=fq.int8()), scale=127.0, input_scale=1e-4)
    assert (q.data == 1).all()
    y = fq.linear(torch.full((2, 8), 0.0127, dtype=dtype), q, backend=backend)
    assert (y.dtype, y.shape) == (dtype, (2, 3))
    assert torch.equal(y, torch.full((2, 3), 1016 * 1e-4 * 127).to(dtype))  # 12.9, past 1016·127


def test_case_D2_scales_are_float32_by_default():
    x, w = torch.randn(64, 512).bfloat16(), torch.randn(256, 512).bfloat16()
    exact = x.double() @ w.double().T
    a, b = (formats.expected("int8", t).values for t in (x, w))
    ideal = decibels(exact, torch.from_numpy(a @ b.T).bfloat16())
    q = fq.quantize(w, fq.int8(act=fq.int8()))
    assert q.scale.dtype == torch.float32
    assert abs(decibels(exact, fq.linear(x, q)) - ideal) < 0.05
    half = fq.quantize(w, fq.int8(scale=torch.bfloat16, act=fq.int8(scale=torch.bfloat16)))
    assert half.scale.dtype == torch.bfloat16
    assert abs(decibels(exact, fq.linear(x, half)) - ideal) < 0.05  # codes are chosen for the scale as stored


def decibels(want: torch.Tensor, got: torch.Tensor) -> float:
    return 20 * torch.log10(want.norm() / (want - got.double()).norm()).item()


def test_case_D3_small_bfloat16_weights():
    w = torch.randn(128, 256).bfloat16() * 0.01
    formats_ = ((fq.int8(block=(1, 32)), 40, 127), (fq.int4(32), 20, 7), (PRESETS["int4_sym"], 18, 7))
    for layout, least, top in formats_:
        q = fq.quantize(w, layout)
        assert_same(q.to(torch.float32), fq.quantize(w.float(), layout))
        assert q.scale.unique().numel() > 100  # one for all, if bfloat16's eps were its floor
        signed = oracle.int_decode(codes(q).numpy(), layout.element.bits)
        assert np.abs(signed.reshape(128, 8, 32)).max(-1).min() >= top  # every group uses the range
        assert decibels(w.double(), fq.dequantize(q)) >= least


def test_case_D4_scales_are_not_rounded_to_the_output():
    q = fq.quantize(torch.randn(16, 64), fq.int8(), scale=0.0123456 * (1 + torch.rand(16, 1)))
    y = fq.dequantize(q, torch.bfloat16)
    assert torch.equal(y, (q.data.float() * q.scale).bfloat16())
    assert not torch.equal(y, q.data.bfloat16() * q.scale.bfloat16())


@pytest.mark.parametrize("backend", ["auto", "reference", "aten"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("symmetric", [False, True])
def test_case_D5_int4_in_every_dtype(backend, dtype, symmetric):
    w, x = torch.randn(64, 128).to(dtype), torch.randn(5, 128).to(dtype)
    for scale in (torch.float32, dtype):
        q = fq.quantize(w, fq.int4(32, symmetric=symmetric, scale=scale))
        q = fq.prepack(q, backend="aten") if backend == "aten" else q
        if backend == "aten" and scale != dtype:
            with pytest.raises(
                fq.BackendError, match=f"backend 'aten' cannot run this call: aten: x is {dtype}"
            ):
                fq.linear(x, q, backend=backend)
            continue
        y = fq.linear(x, q, backend=backend)
        assert (y.dtype, y.shape) == (dtype, (5, 64))
        dense = fq.dequantize(q, torch.float32).double()
        bound = (2.0**-8 + 128 * 2.0**-24) * (x.double().abs() @ dense.abs().T)
        assert ((y.double() - x.double() @ dense.T).abs() <= bound + torch.finfo(dtype).eps * y.abs()).all()


@pytest.mark.parametrize(
    ("shape", "layout"),
    [
        ((32, 4304), fq.int4(64)),
        ((288, 288), fq.int4(256)),
        ((8, 100), fq.int4(32, symmetric=True)),
        ((8, 100), fq.int8(block=(1, 32))),
        ((8, 40), fq.mxfp4()),
        ((8, 40), fq.nvfp4()),
    ],
    ids=str,
)
def test_case_F1_ragged_groups_keep_their_own_scale(shape, layout):
    w = torch.randn(shape)
    tail = shape[1] % layout.block[1]
    w[:, -tail:] *= 0.01  # one scale for all would show
    q = fq.quantize(w, layout, outer_scale=0.001 if layout == fq.nvfp4() else None)
    y = fq.dequantize(q)
    assert y.shape == shape
    assert scales(q).shape == (shape[0], -(-shape[1] // layout.block[1]))
    alone = fq.quantize(w[:, -tail:], layout, outer_scale=0.001 if layout == fq.nvfp4() else None)
    assert torch.equal(y[:, -tail:], fq.dequantize(alone))
    x = torch.randn(3, shape[1])
    torch.testing.assert_close(fq.linear(x, q), x @ y.T, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", presets(n for n in PRESETS if PRESETS[n].block[0] == 1))
def test_case_F3_rows_do_not_share_blocks(name):
    x = torch.randn(3, 40) * torch.tensor([1.0, 10.0, 100.0])[:, None]
    whole = getattr(PRESETS[name].scale, "block", None) == (-1, -1)
    outer = {"outer_scale": 0.05} if whole else {}
    q = fq.quantize(x, PRESETS[name], **outer)
    for i in range(3):
        assert_same(q[i], fq.quantize(x[i], PRESETS[name], **outer))


def views_of_case_G1():
    x = torch.randn(4, 3, 38, 70)
    yield "rows", torch.randn(64, 128)[::2]
    yield "middle", torch.randn(3, 4, 6)[:, ::2, :]
    yield "slice", x[:, :, 10:15]
    yield "columns", x[..., 3:67:2]
    yield "transposed", torch.randn(48, 32).t()
    yield "expanded", torch.randn(1, 64).expand(5, 64)
    yield "permuted", x.permute(2, 0, 3, 1)
    yield "offset", torch.randn(200)[7:71]


@ALL
def test_case_G1_strided_views(name):
    for kind, view in views_of_case_G1():
        q = fq.quantize(view, PRESETS[name])
        assert_same(q, fq.quantize(view.contiguous(), PRESETS[name]))
        assert fq.dequantize(q).shape == view.shape, kind
        noise = torch.rand_like(view)
        noisy = fq.quantize(view, PRESETS[name], noise=noise)
        assert_same(noisy, fq.quantize(view.contiguous(), PRESETS[name], noise=noise.contiguous()))


@pytest.mark.parametrize(
    ("layout", "size", "backend"),
    [(layout, 80, "auto") for layout in PRESETS.values()]
    + [(fq.int4(32), 96, "aten"), (fq.int8(), 80, "aten")],
    ids=str,
)
def test_case_G3_one_row_is_the_row_of_many(layout, size, backend):
    q, x = fq.quantize(torch.randn(48, size), layout), torch.randn(7, size)
    q = fq.prepack(q, backend="aten") if size == 96 else q
    y = fq.linear(x, q, backend=backend)
    torch.testing.assert_close(y, x @ fq.dequantize(q).T, rtol=1e-4, atol=1e-4)
    for i in range(7):
        one, vector = fq.linear(x[i : i + 1], q, backend=backend), fq.linear(x[i], q, backend=backend)
        assert (one.shape, vector.shape) == ((1, 48), (48,))
        torch.testing.assert_close(one[0], y[i], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(vector, y[i], rtol=1e-5, atol=1e-5)


@ALL
@pytest.mark.parametrize("shape", [(128,), (1, 128), (128, 1), (1, 1, 64)])
def test_case_G5_shapes_come_back(name, shape):
    x = torch.randn(shape)
    matrix = fq.dequantize(fq.quantize(x.reshape(-1, shape[-1]), PRESETS[name]))
    assert_equal(fq.dequantize(fq.quantize(x, PRESETS[name])), matrix.reshape(shape))
    with pytest.raises(ValueError, match=r"0-dimensional tensor; reshape it to \(1,\)"):
        fq.quantize(torch.tensor(1.0), PRESETS[name])


@ALL
def test_case_H2_empty_operands(name, fresh_compile):
    layout = PRESETS[name]
    w, none = fq.quantize(torch.randn(24, 128), layout), fq.quantize(torch.zeros(0, 64), layout)
    calls = (
        (torch.zeros(0, 128), w, (0, 24)),
        (torch.randn(5, 64), none, (5, 0)),
        (torch.zeros(2, 0, 128), w, (2, 0, 24)),
        (torch.randn(64), none, (0,)),
    )
    compiled = torch.compile(fq.linear, fullgraph=True, backend="aot_eager")
    for linear, some in ((fq.linear, calls), (compiled, calls[:2] if name in ("int8", "nvfp4") else ())):
        for x, q, shape in some:
            y = linear(x, q)
            assert (y.shape, y.dtype) == (shape, torch.float32)
    thin = fq.quantize(torch.zeros(6, 0), layout)
    assert_equal(fq.linear(torch.zeros(5, 0), thin), torch.zeros(5, 6))  # a sum of nothing
    assert fq.dequantize(fq.quantize(torch.zeros(0), layout)).shape == (0,)
    assert fq.dequantize(none).shape == (0, 64)
