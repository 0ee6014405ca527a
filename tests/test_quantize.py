"""Codes, scales and values of every preset, bit for bit against the oracle, for every shape and input."""

from __future__ import annotations

import formats
import numpy as np
import oracle
import oracle_formats
import pytest
import torch
from formats import ALL, MX_RULES, PRESETS, assert_matches, assert_same, expected

import fq


def powers() -> np.ndarray:
    """Block maxima at and next to 2^k, 6·2^k and 7·2^k, subnormals and the largest float32 included."""
    k = 2.0 ** np.arange(-149, 128)
    points = np.concatenate([k, 1.5 * k, 1.75 * k, 1.25 * k, [oracle.LARGEST, 2.0**-148 * 1.5]])
    points = points[points <= oracle.LARGEST].astype(np.float32)
    near = [points, np.nextafter(points, np.float32(0)), np.nextafter(points, np.float32(oracle.LARGEST))]
    return np.unique(np.concatenate(near))


@ALL
@pytest.mark.parametrize("spread", [1.0, 1e-3, 300.0])
def test_random_weights(name, spread):
    x = torch.randn(48, 96) * spread
    assert_matches(fq.quantize(x, PRESETS[name]), expected(name, x))


@ALL
def test_random_magnitudes_and_ties(name):
    """Rows spread over all of float32, and rows whose values lie on and halfway between grid points."""
    wild = torch.randn(8, 64) * torch.exp2(torch.randint(-140, 127, (8, 1)).float())
    mixed = torch.randn(8, 64) * torch.exp2(torch.randint(-20, 20, (8, 64)).float())
    halves = torch.randint(-255, 256, (8, 64)) / 2
    halves[:, 0], halves[:, 32] = 127.5, -127.5
    quarters = torch.randint(-24, 25, (8, 64)) / 4
    quarters[:, ::16] = 6.0
    for x in (wild, mixed, halves, quarters):
        assert_matches(fq.quantize(x, PRESETS[name]), expected(name, x))


@pytest.mark.parametrize("rule", MX_RULES)
def test_mx_exponents(rule):
    amax = torch.from_numpy(powers())
    x = torch.rand(len(amax), 32) * amax[:, None]
    x[:, 7] = amax * torch.where(torch.arange(len(amax)) % 2 == 0, 1.0, -1.0)
    q = fq.quantize(x, fq.mxfp4(rule))
    want = [oracle.mx_byte(float(a), rule) for a in amax]
    assert q.scale[:, 0].tolist() == want
    assert_matches(q, oracle_formats.quantize(x, formats.mx(oracle.E2M1, rule)))


# block amax -> the byte by floor, ceil, rceil, even; the published table and its neighbours
BYTES = {
    0.0: (0, 0, 0, 0),
    1.0: (125, 125, 125, 125),
    1.5: (125, 126, 125, 125),
    1.74: (125, 126, 126, 125),
    1.75: (125, 126, 126, 126),
    3.49: (126, 127, 127, 126),
    3.5: (126, 127, 127, 127),
    4.0: (127, 127, 127, 127),
    6.0: (127, 128, 127, 127),
    7.0: (127, 128, 128, 128),
    2.0**-149: (0, 0, 0, 0),
    2.0**-126: (0, 0, 0, 0),
    oracle.LARGEST: (252, 253, 253, 253),
}


@pytest.mark.parametrize("amax", BYTES)
def test_published_mx_bytes(amax):
    x = torch.zeros(1, 32)
    x[0, 5] = -amax
    assert tuple(fq.quantize(x, fq.mxfp4(rule)).scale.item() for rule in MX_RULES) == BYTES[amax]


def test_case_A9_every_scale_byte_decodes():
    q = fq.quantize(torch.ones(256, 32), fq.mxfp4())
    data = fq.pack_fp4x2(torch.full((256, 32), 2))  # 1.0
    q = fq.QTensor(data, torch.arange(256).to(torch.uint8)[:, None], q.layout, torch.float32, (32,))
    y = fq.dequantize(q)
    want = [oracle.e8m0_decode(byte) for byte in range(256)]
    np.testing.assert_array_equal(y.double().numpy(), np.repeat(np.array(want)[:, None], 32, 1))
    for byte, value in ((0, 2.0**-127), (1, 2.0**-126), (126, 0.5), (127, 1.0), (128, 2.0), (254, 2.0**127)):
        assert y[byte, 0].item() == value
    assert y[255].isnan().all()


def test_nvfp4_outer_scale_is_one_division():
    """amax/2688 and (amax/6)/448 round differently; the outer scale is the former."""
    amax = torch.randn(4000, generator=torch.Generator().manual_seed(3)).abs()
    differ = amax / 2688 != amax / 6 / 448
    assert differ.sum() > 50
    for a in amax[differ][:50]:
        assert fq.quantize(a.expand(1, 16), fq.nvfp4()).scale.scale.item() == (a / 2688).item()


def test_nvfp4_block_scales_are_floored_not_flushed():
    x = torch.full((2, 32), 1.0)
    x[1] = 2.0**-30
    q = fq.quantize(x, fq.nvfp4())
    assert q.scale.data.view(torch.uint8).tolist() == [[0x7E, 0x7E], [1, 1]]
    assert_matches(q, expected("nvfp4", x))


# --- shapes ---


@ALL
@pytest.mark.parametrize("shape", [(3, 40), (5, 33), (4, 7), (2, 1), (1, 95), (3, 129)])
def test_ragged_odd_and_short_rows(name, shape):
    x = torch.randn(shape)
    q = fq.quantize(x, PRESETS[name])
    assert q.shape == shape
    assert_matches(q, expected(name, x))


@ALL
def test_axis_minus_two_quantizes_the_transpose(name):
    layout = fq.layout(PRESETS[name].key + ":axis-2")
    x = torch.randn(2, 70, 12)
    q, straight = fq.quantize(x, layout), fq.quantize(x.mT, PRESETS[name])
    assert q.shape == x.shape
    assert_same(q.mT, straight)
    assert torch.equal(fq.dequantize(q), fq.dequantize(straight).mT)


@ALL
def test_leading_dimensions_are_a_stack_of_matrices(name):
    x = torch.randn(2, 3, 10, 50) * torch.tensor([1.0, 100.0, 0.01])[:, None, None]
    q = fq.quantize(x, PRESETS[name])
    for i in range(2):
        for j in range(3):
            assert_same(q[i, j], fq.quantize(x[i, j], PRESETS[name]))
            assert_matches(q[i, j], expected(name, x[i, j]))


@ALL
@pytest.mark.parametrize("size", [1, 31, 96])
def test_a_vector_is_one_row(name, size):
    x = torch.randn(size)
    q = fq.quantize(x, PRESETS[name])
    assert q.shape == (size,)
    matrix = fq.quantize(x[None], PRESETS[name])
    assert torch.equal(formats.codes(q), formats.codes(matrix)[0])
    assert torch.equal(fq.dequantize(q), fq.dequantize(matrix)[0])
    scale = q.scale.data if isinstance(q.scale, fq.QTensor) else q.scale
    cols = PRESETS[name].block[1]
    assert scale.shape == (1 if cols == -1 else -(-size // cols),)


@ALL
@pytest.mark.parametrize("shape", [(0, 128), (4, 0), (0,), (0, 0), (2, 0, 32), (0, 3, 32), (3, 5, 0)])
@pytest.mark.parametrize("axis", [-1, -2])
def test_empty_tensors(name, shape, axis):
    layout = fq.layout(PRESETS[name].key + (":axis-2" if axis == -2 else ""))
    if axis == -2 and len(shape) == 1:
        return
    for dtype in (torch.float32, torch.bfloat16):
        q = fq.quantize(torch.zeros(shape, dtype=dtype), layout)
        y = fq.dequantize(q)
        assert (q.shape, y.shape, y.dtype) == (shape, shape, dtype)
        again = fq.requantize(q, fq.int4(32))
        assert again.shape == shape


@ALL
def test_inner_flattens_trailing_dimensions(name):
    x = torch.randn(4, 6, 3, 5)
    q = fq.quantize(x, PRESETS[name], inner=3)
    flat = fq.quantize(x.flatten(1), PRESETS[name])
    assert (q.shape, q.inner) == (x.shape, (6, 3, 5))
    assert torch.equal(q.data.view(torch.uint8), flat.data.view(torch.uint8))
    assert torch.equal(fq.dequantize(q), fq.dequantize(flat).reshape(x.shape))
    one = fq.quantize(x[0], PRESETS[name], inner=3)
    assert torch.equal(fq.dequantize(one), fq.dequantize(fq.quantize(x[:1], PRESETS[name], inner=3))[0])


@pytest.mark.parametrize(
    "block", [(-1, -1), (4, 8), (3, 5), (7, -1), (-1, 4), (1, 1), (2**31 - 1, 2**31 - 1)]
)
def test_blocks_over_rows_and_columns(block):
    """Block (r, c) of the grid covers rows r·R..., columns c·C...; the last ones are smaller."""
    x = torch.randn(10, 13) * torch.exp2(torch.arange(13.0) - 6)
    q = fq.quantize(x, fq.int8(block=block))
    rows, cols = (size if b == -1 else min(b, size) for b, size in zip(block, x.shape, strict=True))
    want = torch.empty_like(x)
    for r in range(0, 10, rows):
        for c in range(0, 13, cols):
            part = x[r : r + rows, c : c + cols]
            scale = (part.abs().max() / 127.5).clamp(min=2.0**-126)
            assert q.scale[r // rows, c // cols] == scale
            want[r : r + rows, c : c + cols] = (part / scale).round().clamp(-128, 127) * scale
    assert torch.equal(fq.dequantize(q), want)


# --- input dtypes, given scales, noise ---


@ALL
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_floats_give_the_codes_of_float32(name, dtype):
    x = (torch.randn(12, 64, dtype=torch.float64) * 3).to(dtype)
    q, wide = fq.quantize(x, PRESETS[name]), fq.quantize(x.float(), PRESETS[name])
    assert q.dtype == dtype
    assert_same(q.to(torch.float32), wide)
    y = fq.dequantize(q)
    assert y.dtype == dtype
    assert torch.equal(y, fq.dequantize(wide).to(dtype))  # computed in float32, rounded once


@pytest.mark.parametrize("name", ["int8", "int4_sym", "mxfp4_even"])
def test_given_scales_are_stored_and_divided_by(name):
    layout = PRESETS[name]
    x = torch.randn(6, 64) * 5
    grid = (6, 1) if name == "int8" else (6, 2)
    scale = torch.exp2(torch.randint(-3, 3, grid).float()) * (1 if "mx" in name else 1.37)
    q = fq.quantize(x, layout, scale=scale)
    stored = torch.exp2(q.scale.float() - 127) if "mx" in name else q.scale
    assert torch.equal(stored, scale)
    spread = scale.repeat_interleave(64 // grid[1], 1).numpy().astype(np.float64)
    ratio = oracle.f32(x.numpy() / spread)
    bits = layout.element.bits
    codes = oracle.E2M1.encode(ratio) if "mx" in name else oracle.int_encode(ratio, bits)
    assert formats.codes(q).tolist() == codes.tolist()
    assert_same(q, fq.quantize(x, layout, scale=stored))  # requantizing with the kept scale changes nothing
    if name == "int8":
        assert_same(fq.quantize(x, layout, scale=0.5), fq.quantize(x, layout, scale=torch.full(grid, 0.5)))


def test_given_scales_saturate_infinities_and_poison_nothing_else():
    x = torch.tensor([[torch.inf, -torch.inf, 1e30, 0.5]])
    assert fq.quantize(x, fq.int8(), scale=1.0).data.tolist() == [[127, -128, 127, 0]]
    assert fq.dequantize(fq.quantize(x, fq.mxfp4(), scale=torch.ones(1, 1))).tolist() == [[6, -6, 6, 0.5]]


@pytest.mark.parametrize(
    ("given", "byte"), [(3.0, 129), (0.75, 127), (6.0, 130), (5.0, 130), (2.0, 128), (0.0, 0)]
)
def test_case_C2_a_given_scale_rounds_up_to_e8m0(given, byte):
    q = fq.quantize(torch.full((1, 32), given), fq.mxfp4(), scale=torch.full((1, 1), given))
    assert q.scale.item() == byte


def test_given_zero_points():
    x = torch.randn(4, 64)
    auto = fq.quantize(x, fq.int4(32))
    q = fq.quantize(x, fq.int4(32), scale=auto.scale, zero_point=auto.zero_point)
    assert torch.equal(q.scale, auto.scale)
    assert torch.equal(q.zero_point, auto.zero_point)
    low = (auto.zero_point - 8 * auto.scale).repeat_interleave(32, 1)
    codes = ((x - low) / auto.scale.repeat_interleave(32, 1)).round().clamp(0, 15) - 8
    assert formats.codes(q).tolist() == (codes.int() % 16).tolist()


def test_given_outer_scales():
    x = torch.randn(3, 8, 64)
    outer = torch.tensor([0.001, 0.002, 0.003])
    q = fq.quantize(x, fq.nvfp4(), outer_scale=outer[:, None, None])
    for i in range(3):
        want = expected("nvfp4", x[i], outer=float(outer[i]))
        assert_matches(q[i], want)
    assert_same(fq.quantize(x, fq.nvfp4(), outer_scale=0.002)[1], q[1])


def representable(x: torch.Tensor, layout: fq.Layout) -> torch.Tensor:
    """x without what unsigned elements cannot stand for."""
    return x if layout.element.signed or layout.zero_point is not None else x.abs()


@ALL
def test_noise_rounds_to_a_neighbour_and_is_unbiased(name):
    x = representable(torch.randn(2, 64), PRESETS[name])
    plain = fq.quantize(x, PRESETS[name])
    runs = 256
    noise = ((torch.arange(runs) + 0.5) / runs)[:, None, None].expand(runs, 2, 64)
    q = fq.quantize(x.expand(runs, 2, 64), PRESETS[name], noise=noise)
    y = fq.dequantize(q)
    scale = fq.dequantize(plain.scale) if isinstance(plain.scale, fq.QTensor) else plain.scale
    for i in (0, runs - 1):  # noise chooses codes, never scales
        kept = fq.dequantize(q[i].scale) if isinstance(plain.scale, fq.QTensor) else q[i].scale
        assert torch.equal(kept, scale)
    grid = y.sort(0).values
    low, high = grid[0], grid[-1]
    inside = (low <= x) & (x <= high)
    assert inside.float().mean() > (0.5 if name == "binary" else 0.9)  # whose two values are ±mean|x|
    error = (y.double().mean(0) - x.double()).abs()
    tolerance = (high - low).double() / runs + 1e-6
    assert (error <= tolerance)[inside].all()
    assert ((y == low) | (y == high)).all()


@pytest.mark.parametrize("name", ["int8", "int4_sym", *(n for n in PRESETS if "mxfp4" in n)])
@pytest.mark.parametrize("u", [0.0, 0.5, 1 - 2.0**-24])
def test_noise_leaves_what_is_on_the_grid(name, u):
    layout, x = PRESETS[name], torch.randn(4, 64) * 40
    scale = None if "mx" in name else torch.full((4, 1 if name == "int8" else 2), 0.5)
    w = fq.dequantize(fq.quantize(x, layout, scale=scale))
    again = fq.quantize(w, layout, scale=scale, noise=torch.full_like(w, u))
    assert torch.equal(fq.dequantize(again), w)


# --- how scales are kept ---


def kept(scale: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """float32 numbers rounded to a half dtype."""
    return torch.from_numpy(scale).to(torch.float32).to(dtype).double().numpy()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["int8", "int4_sym", "int4"])
def test_codes_are_for_the_scale_as_stored(name, dtype):
    layout = fq.layout(f"{PRESETS[name].key}:scale={str(dtype).removeprefix('torch.')}")
    x = torch.randn(16, 80) * torch.exp2(torch.randint(-6, 6, (16, 1)).float())
    q, ideal = fq.quantize(x, layout), expected(name, x)
    scale = kept(ideal.scale, dtype)
    np.testing.assert_array_equal(q.scale.double().numpy(), scale)
    spread = np.repeat(scale, 80 if name == "int8" else 32, 1)[:, :80]
    values, low = x.double().numpy(), 0.0
    if name == "int4":
        zero = kept(oracle.f32(x_min(x) + oracle.f32(8 * scale)), dtype)
        np.testing.assert_array_equal(q.zero_point.double().numpy(), zero)
        low = np.repeat(oracle.f32(zero - oracle.f32(8 * scale)), 32, 1)[:, :80]
    ratio = oracle.f32(oracle.f32(values - low) / spread)
    bits = layout.element.bits
    shifted = np.clip(np.rint(ratio), 0, 15) - 8 if name == "int4" else ratio
    assert formats.codes(q).tolist() == oracle.int_encode(shifted, bits).tolist()


def x_min(x: torch.Tensor) -> np.ndarray:
    return np.array([[row[i : i + 32].min() for i in range(0, 80, 32)] for row in x.double().numpy()])


def test_one_level_nvfp4_is_two_levels_with_an_outer_scale_of_one():
    x = torch.randn(6, 80) * torch.exp2(torch.randint(-12, 12, (6, 1)).float())
    q, want = fq.quantize(x, fq.nvfp4(scale="e4m3")), expected("nvfp4", x, outer=1.0)
    assert q.scale.dtype == torch.float8_e4m3fn
    assert q.scale.view(torch.uint8).tolist() == want.scale.codes.tolist()
    assert formats.codes(q).tolist() == want.codes.tolist()
    np.testing.assert_array_equal(fq.dequantize(q).double().numpy(), want.values)


@pytest.mark.parametrize(
    ("scale", "smallest", "largest"),
    [
        ("float32", 2.0**-126, None),
        ("bfloat16", 2.0**-126, None),
        ("float16", 2.0**-24, 65504.0),
        ("e4m3", 2.0**-9, 448.0),
        ("e8m0", 2.0**-127, None),
    ],
)
def test_scales_that_underflow_or_overflow_their_dtype_saturate(scale, smallest, largest):
    layout = fq.int8(scale=scale)
    for tiny in (0.0, 1e-45, 1e-40):
        q = fq.quantize(torch.full((1, 4), tiny), layout)
        value = oracle.e8m0_decode(q.scale.item()) if scale == "e8m0" else q.scale.float().item()
        assert value == smallest
    for huge in (torch.full((1, 4), 3e38), torch.full((1, 4), -oracle.LARGEST)):
        q = fq.quantize(huge, layout)
        assert torch.isfinite(fq.dequantize(q)).all()
        if largest is not None:
            assert q.scale.float().item() == largest
            assert (q.data == (127 if huge[0, 0] > 0 else -128)).all()
    infinite = fq.quantize(torch.ones(1, 4), layout, scale=torch.inf)  # a given scale saturates too
    assert torch.isfinite(fq.dequantize(infinite)).all()


@ALL
def test_requantizing_gives_the_same_values(name):
    """Exactly, where the rule keeps the extreme element; up to a rounding of float32 for zero points."""
    layout = PRESETS[name]
    y = fq.dequantize(fq.quantize(representable(torch.randn(256, 128) * 3, layout), layout))
    q = fq.quantize(y, layout)
    again = fq.dequantize(q)
    if layout.element.name.startswith("int") and layout.rule in ("absmax", "mse"):
        # absmax puts the extreme between two codes; a search may cut two codes more
        scale = oracle.load(q.scale.numpy(), "e8m0") if layout.scale == "e8m0" else q.scale.numpy()
        step = torch.from_numpy(scale).repeat_interleave(128 // q.scale.shape[1], 1)
        assert ((again - y).abs() <= step * (1.001 if layout.rule == "absmax" else 3)).all()
    elif layout.zero_point is not None:
        torch.testing.assert_close(again, y, rtol=0, atol=1e-5)
    else:
        assert torch.equal(again, y)
