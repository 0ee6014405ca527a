"""Zeros, subnormals, huge numbers, NaN and inf: every preset keeps to the numeric contract, by value."""

from __future__ import annotations

import math

import pytest
import torch
from formats import PRESETS, assert_equal, assert_same, codes
from oracle import ELEMENTS
from torch import Tensor

import fq

LARGEST = torch.finfo(torch.float32).max
# Kinds that no preset has: small 2-D blocks, blocks of scales over several rows, other scale dtypes.
KEYS = {
    **{name: layout.key for name, layout in PRESETS.items()},
    "int8_block": "int8:block4x8",
    "int8_tensor": "int8:tensor",
    "uint8_sym": "uint8:sym:g16",
    "uint4_nested": "uint4:g32:scale=(ue5m3:block4x2)",
    "uint4_e4m3": "uint4:g32:scale=e4m3",
    "int4_e8m0": "int4:g32:scale=e8m0",
    "q4_signed": "int4:g8:scale=(uint6:g4:sym:scale=float16):zp=(int6:g4:sym)",
    "binary_float16": "binary:g32:scale=float16",
    "nf4_e4m3": "nf4:g32:scale=e4m3",
}
# Each kind of element, block, scale and zero point once.
QUICK = ["int8", "int8_full", "int4", "mxfp4_even", "nvfp4", "binary", "int3_affine", "fp8_tensor", "mxfp6"]
QUICK += ["nf4_double", "int8_float16", "q4_k", "int8_block", "uint4_nested"]
ALL = pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in KEYS]
)
ROWS, COLS = 12, 72  # ragged in groups of 16 and 32
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def ordinary() -> Tensor:
    """Two matrices."""
    return torch.randn(2, ROWS, COLS, generator=torch.Generator().manual_seed(3))


def blocks(layout: fq.Layout) -> tuple[int, int]:
    rows, cols = layout.block
    return (ROWS if rows == -1 else min(rows, ROWS)), (COLS if cols == -1 else min(cols, COLS))


def first_block(layout: fq.Layout) -> tuple[slice, slice]:
    """The second block along rows and columns, if there are two."""
    rows, cols = blocks(layout)
    row, col = (rows if rows < ROWS else 0), (cols if cols < COLS else 0)
    return slice(row, row + rows), slice(col, col + cols)


def specials(shape: tuple[int, int], dtype: torch.dtype) -> dict[str, Tensor]:
    """Blocks of finite numbers that are seldom tried."""
    info, count = torch.finfo(dtype), shape[0] * shape[1]
    normal = torch.randn(count, generator=torch.Generator().manual_seed(4))
    sign = 1 - 2.0 * (torch.arange(count) % 2)
    outlier = normal.clone()
    outlier[0] = info.max
    found = {
        "zeros": torch.zeros(count),
        "minus zeros": -torch.zeros(count),
        "smallest numbers": torch.full((count,), info.smallest_normal * info.eps),
        "subnormals": normal * info.smallest_normal / 8,
        "positive subnormals": normal.abs() * info.smallest_normal / 8,
        "tiny": normal * info.smallest_normal * 64,
        "1e-7": normal * 1e-7,
        "large": normal * (info.max / 8),
        "largest": torch.full((count,), info.max),
        "lowest": torch.full((count,), info.min),
        "both ends": sign * info.max,
        "ends and between": torch.clamp(normal * (info.max / 2), info.min, info.max),
        "one outlier": outlier,
        "one constant": torch.full((count,), -3.0),
    }
    return {k: torch.clamp(v, info.min, info.max).to(dtype).reshape(shape) for k, v in found.items()}


def wide(kept, layout: fq.Layout) -> Tensor:
    """Stored scales or zero points as float64, over their grid."""
    if isinstance(kept, fq.QTensor):
        return fq.dequantize(kept, torch.float32).double()
    if layout.scale == "e8m0" and kept.dtype == torch.uint8:
        return torch.where(kept == 255, math.nan, torch.exp2(kept.double() - 127))
    return kept.double()


def over_elements(grid: Tensor, layout: fq.Layout) -> Tensor:
    rows, cols = blocks(layout)
    return grid.repeat_interleave(rows, -2)[..., :ROWS, :].repeat_interleave(cols, -1)[..., :COLS]


def nearest(x: Tensor, q: fq.QTensor) -> tuple[Tensor, Tensor]:
    """The distance of x from the nearest number that its block can express, and a bound on rounding."""
    layout = q.layout
    values = torch.as_tensor(ELEMENTS[layout.element.name].values, dtype=torch.float64)
    values = values[values.isfinite()]
    scale = over_elements(wide(q.scale, layout), layout)
    zero = torch.zeros_like(scale)
    if q.zero_point is not None:
        kept = q.zero_point if isinstance(q.zero_point, fq.QTensor) else q.zero_point.double()
        zero = over_elements(wide(kept, layout) if isinstance(kept, fq.QTensor) else kept, layout)
    best = torch.full(x.shape, math.inf, dtype=torch.float64)
    for v in values:
        w = (v - zero) * scale if layout.zero_point == "int" else v * scale + zero
        best = torch.minimum(best, (torch.clamp(w, -LARGEST, LARGEST) - x.double()).abs())
    offset = zero * scale if layout.zero_point == "int" else zero
    return best, 2.0**-21 * (x.double().abs() + offset.abs() + scale.abs()) + 2.0**-149


@ALL
def test_finite_blocks_stay_finite_and_take_the_nearest_numbers_of_their_scale(name):
    layout = fq.layout(KEYS[name])
    at = (0, *first_block(layout))
    for dtype in DTYPES:
        clean = fq.quantize(ordinary().to(dtype), layout)
        shape = tuple(ordinary()[at].shape)
        for kind, block in specials(shape, dtype).items():
            x = ordinary().to(dtype)
            x[at] = block
            q = fq.quantize(x, layout)
            y = fq.dequantize(q, torch.float32)
            where = f"{kind}, {dtype}"
            assert wide(q.scale, layout).isfinite().all(), where
            assert y.isfinite().all() and fq.dequantize(q).isfinite().all(), where
            if "zeros" in kind:
                assert (y[at] == 0).all(), where
            best, rounding = nearest(x, q)
            assert ((y.double() - x.double()).abs() <= best + rounding).all(), where
            assert_same(q[1], clean[1])  # the other matrix knows nothing of it
            if not isinstance(layout.scale, fq.Layout):
                others = torch.ones(2, ROWS, COLS, dtype=torch.bool)
                others[at] = False
                assert torch.equal(codes(q)[others], codes(clean)[others]), where
                assert torch.equal(y[others], fq.dequantize(clean, torch.float32)[others]), where
        same = fq.quantize(ordinary().to(dtype).float(), layout).to(dtype)
        assert_same(clean, same)


def shared(poisoned: Tensor, layout: fq.Layout) -> Tensor:
    """Which entries of a matrix a NaN reaches: those of its block, and of its block of blocks."""
    size = poisoned.shape[-2:]
    rows, cols = (n if b == -1 else min(b, n) for b, n in zip(layout.block, size, strict=True))
    grid = torch.stack(
        [
            torch.stack([part.flatten(-2).any(-1) for part in strip.split(cols, -1)], -1)
            for strip in poisoned.split(rows, -2)
        ],
        -2,
    )
    for nested in (layout.scale, layout.zero_point):
        if isinstance(nested, fq.Layout):
            grid = shared(grid, nested)
    return grid.repeat_interleave(rows, -2)[..., : size[0], :].repeat_interleave(cols, -1)[..., : size[1]]


def is_nan_scale(q: fq.QTensor, poisoned: Tensor) -> None:
    """NaN scales, codes of NaN and empty zero points where `poisoned`, and nowhere else."""
    assert torch.equal(fq.dequantize(q, torch.float32).isnan(), poisoned)
    nan = ELEMENTS[q.layout.element.name].nan
    assert (codes(q)[poisoned] == nan).all()
    rows, cols = (1 if b == 1 else b for b in q.layout.block)
    grid = poisoned[..., :: poisoned.shape[-2] if rows == -1 else rows, :]
    grid = grid[..., :: poisoned.shape[-1] if cols == -1 else cols]
    if isinstance(q.scale, fq.QTensor):
        is_nan_scale(q.scale, grid)
    else:
        assert torch.equal(wide(q.scale, q.layout).isnan(), grid)
    if isinstance(q.zero_point, fq.QTensor):
        is_nan_scale(q.zero_point, grid)
    elif q.layout.zero_point == "int":
        assert (q.zero_point[grid] == 0).all()
    elif q.zero_point is not None:
        assert torch.equal(q.zero_point.isnan(), grid)


@ALL
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_and_inf_poison_their_block_and_leave_every_other_bit(name, value):
    layout = fq.layout(KEYS[name])
    clean = fq.quantize(ordinary(), layout)
    for place in ((0, 5, 40), (0, ROWS - 1, COLS - 1), (1, 0, 0)):
        x = ordinary()
        x[place] = value
        q = fq.quantize(x, layout)
        hit = torch.zeros(x.shape, dtype=torch.bool)
        hit[place] = True
        poisoned = shared(hit, layout)
        assert not poisoned[1 - place[0]].any()
        is_nan_scale(q, poisoned)
        assert torch.equal(codes(q)[~poisoned], codes(clean)[~poisoned])
        assert torch.equal(fq.dequantize(q)[~poisoned], fq.dequantize(clean)[~poisoned])
        assert_same(q[1 - place[0]], clean[1 - place[0]])


# What a block of zeros keeps as its scale: the smallest usable of each dtype.
FLOORS = {
    "int8": 2.0**-126,
    "uint4": 2.0**-126,
    "fp8": 2.0**-126,
    "nf4": 2.0**-126,
    "int8:scale=bfloat16": 2.0**-126,
    "int8:scale=float16": 2.0**-24,
    "e2m1:g16:scale=e4m3": 2.0**-9,
    "mxfp4": 0,  # the byte of 2^-127
    "mxfp8": 0,
    "int4:g32": float(torch.tensor(1e-6) / 15),  # MSLK's smallest range
    "binary": 0.0,
}


@pytest.mark.parametrize("key", FLOORS)
def test_a_block_of_zeros_keeps_the_smallest_usable_scale(key):
    for zero in (0.0, -0.0):
        q = fq.quantize(torch.full((3, 40), zero), fq.layout(key))
        assert (q.scale.double() == FLOORS[key]).all()
        assert (fq.dequantize(q) == 0).all()


def test_nested_scales_of_zeros_keep_the_smallest_code_under_their_outer_scale():
    q = fq.quantize(torch.zeros(3, 32), fq.nvfp4())
    assert q.scale.scale.item() == 2.0**-126 and (q.scale.data.float() == 2.0**-9).all()
    x = torch.zeros(3, 32)
    x[1, 3] = 2688.0
    q = fq.quantize(x, fq.nvfp4())
    assert q.scale.scale.item() == 1.0
    assert q.scale.data.float().tolist() == [[2.0**-9] * 2, [448.0, 2.0**-9], [2.0**-9] * 2]
    assert fq.dequantize(q).tolist() == x.tolist()
    double = fq.quantize(torch.zeros(3, 128), fq.nf4(double_quant=True))
    assert (double.scale.data == 1).all() and (double.scale.scale == 2.0**-126).all()


# [-largest, largest] and what becomes of it: a difference or a scale that overflows saturates.
OVERFLOWS = {
    "int4:g32": [-LARGEST, 0.0],  # range -> largest, so code 7 stands for -largest + 15/15·largest
    "uint4:g32": [-LARGEST, 0.0],
    "int8": [-LARGEST, 127 * (LARGEST / 127.5)],
    "int8:absmax_full": [-LARGEST / 128 * 127, LARGEST],
    "int8:scale=float16": [-128 * 65504.0, 127 * 65504.0],
    "e2m1:scale=e4m3": [-6 * 448.0, 6 * 448.0],
    "fp8:scale=float16": [-448 * 65504.0, 448 * 65504.0],
    "mxfp4:floor": [-6 * 2.0**125, 6 * 2.0**125],
    "mxfp4:rceil": [-LARGEST, LARGEST],  # 4·2^126 is 2^128
    "mxfp8": [-LARGEST, LARGEST],
    "nvfp4": [-LARGEST, LARGEST],
    "nf4": [-LARGEST, LARGEST],
    "binary": [-LARGEST, LARGEST],
}


@pytest.mark.parametrize("key", OVERFLOWS)
def test_what_overflows_saturates(key):
    x = torch.tensor([[-LARGEST, LARGEST]])
    y = fq.dequantize(fq.quantize(x, fq.layout(key)))
    torch.testing.assert_close(y, torch.tensor([OVERFLOWS[key]]), rtol=2e-7, atol=0)


@pytest.mark.parametrize("key", ["int8", "mxfp4:rceil", "nf4", "fp8", "nvfp4"])
def test_what_rounds_beyond_a_half_precision_dtype_saturates(key):
    for dtype in (torch.float16, torch.bfloat16):
        top = torch.finfo(dtype).max
        x = torch.tensor([[-top, top]], dtype=dtype)
        y = fq.dequantize(fq.quantize(x, fq.layout(key)))
        assert y.dtype == dtype and y.isfinite().all()
        assert_equal(y.abs() > 0.98 * top, torch.ones(1, 2, dtype=torch.bool))


@pytest.mark.parametrize(
    "key", ["binary:scale=e8m0", "binary:scale=(uint8:g256:sym)", "lut(-2,1):scale=e8m0"]
)
def test_numbers_without_a_zero_need_a_scale_that_can_be_zero(key):
    with pytest.raises(ValueError, match="has no zero, so a block of zeros needs a scale of zero"):
        fq.layout(key)
