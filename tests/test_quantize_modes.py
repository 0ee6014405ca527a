"""Quantizing under vmap and compile gives the eager bits; published signal-to-noise ratios; wrong calls."""

from __future__ import annotations

import warnings

import pytest
import torch
from formats import ALL, PRESETS, assert_equal, assert_same

import fq


def hard_input() -> torch.Tensor:
    """Matrices with ties, zero blocks, subnormals, huge numbers, NaN and inf, and a ragged edge."""
    x = torch.randn(4, 6, 80)
    x[0] = torch.randint(-24, 25, (6, 80)) / 4
    x[1, 0] = 2.0**-149
    x[1, 1, ::2], x[1, 1, 1::2] = torch.finfo(torch.float32).max, -torch.finfo(torch.float32).max
    x[1, 2] = 0.0
    x[1, 3] *= 2.0**-130
    x[1, 4] *= 2.0**120
    x[2, 1, 40] = torch.nan
    x[2, 4, 3] = -torch.inf
    x[3, :, ::2] = -0.0
    return x


def round_trip(layout: fq.Layout):
    def run(x):
        q = fq.quantize(x, layout)
        return q, fq.dequantize(q)

    return run


def same(got, want) -> None:
    assert_same(got[0], want[0])
    assert_equal(got[1], want[1])


@ALL
def test_mapped_and_compiled_bits_equal_eager_ones(name, fresh_compile):
    x, run = hard_input(), round_trip(PRESETS[name])
    with warnings.catch_warnings(action="error"):
        warnings.filterwarnings("ignore", message=".*torch.jit.script", category=DeprecationWarning)
        each = [run(m) for m in x]
        want = (fq.stack([q for q, _ in each]), torch.stack([y for _, y in each]))
        mapped = torch.vmap(run)
        same(mapped(x), want)
        same(torch.vmap(run, in_dims=1)(x.transpose(0, 1)), want)
        if name in ("int8", "mxfp4_even", "nvfp4"):
            same(torch.compile(mapped, fullgraph=True, backend="aot_eager")(x), want)
            return
        compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
        for m, eager in zip(x[1:3], each[1:3], strict=True):
            same(compiled(m), eager)


# Half-precision scales: Inductor skips a cast down that is followed by one up.
FAST = ["mxfp4", "int4:g32:scale=bfloat16"]
BLOCKS = ["int8:g32", "int8:block20x1", "fp8:block5x24", "int4:g32:scale=float16", "nf4:g32:scale=e4m3"]
SLOW = [*BLOCKS, *(layout.key for layout in PRESETS.values() if layout.key not in FAST)]
CHUNKS = [FAST, *(SLOW[i : i + 6] for i in range(0, len(SLOW), 6))]


@pytest.mark.parametrize(
    "keys",
    [pytest.param(keys, marks=() if keys == FAST else pytest.mark.slow, id=keys[0]) for keys in CHUNKS],
)
def test_inductor_bits_equal_eager_ones(keys, fresh_compile):
    """Its own kernels: rows of 80 leave a ragged block, and no multiple of its vectors."""
    x, runs = hard_input(), {key: round_trip(fq.layout(key)) for key in keys}
    compiled = torch.compile(lambda x: {key: run(x) for key, run in runs.items()}, fullgraph=True)(x)
    for key, run in runs.items():
        same(compiled[key], run(x))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_inductor_bits_of_half_precision_input_equal_eager_ones(dtype, fresh_compile):
    x = torch.clamp(hard_input(), torch.finfo(dtype).min, torch.finfo(dtype).max).to(dtype)
    runs = {key: round_trip(fq.layout(key)) for key in ("int8", "int4:g32", "mxfp6", "fp8", "nf4:g32")}
    compiled = torch.compile(lambda x: {key: run(x) for key, run in runs.items()}, fullgraph=True)(x)
    for key, run in runs.items():
        same(compiled[key], run(x))


@pytest.mark.slow
def test_inductor_casts_equal_eager_ones(fresh_compile):
    bits = torch.randint(-(2**31), 2**31, (2**16,)).to(torch.int32).view(torch.float32)
    noise, layout = torch.rand(2**16), fq.mxfp4()

    def casts(x, u):
        return fq.cast_fp4x2(x), fq.quantize(x.reshape(-1, 64), layout, noise=u.reshape(-1, 64))

    bytes_, q = torch.compile(casts, fullgraph=True)(bits, noise)
    want, q_want = casts(bits, noise)
    assert torch.equal(bytes_, want)
    assert_same(q, q_want)


@pytest.mark.parametrize("name", ["int8", "nvfp4", "int4"])
def test_mapped_arguments(name):
    """Scales, zero points, outer scales and noise may be mapped, or not."""
    layout, x, u = PRESETS[name], torch.randn(3, 4, 64), torch.rand(4, 64)
    given = {}
    if name == "nvfp4":
        given["outer_scale"] = torch.rand(3) + 0.5
    else:
        given["scale"] = torch.rand(3, 4, 1 if name == "int8" else 2)
    if name == "int4":
        given["zero_point"] = torch.randn(3, 4, 2)

    def run(x, given):
        return fq.quantize(x, layout, noise=u, **given)

    want = fq.stack([run(x[i], {k: v[i] for k, v in given.items()}) for i in range(3)])
    assert_same(torch.vmap(run)(x, given), want)
    one = {k: v[1] for k, v in given.items()}
    assert_same(torch.vmap(run, in_dims=(0, None))(x, one)[1], want[1])


@ALL
def test_every_context_and_the_meta_device_agree(name):
    x, run = hard_input(), round_trip(PRESETS[name])
    want = run(x)
    for context in (torch.no_grad(), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16)):
        with context:
            same(run(x), want)
    q, y = run(x.to("meta"))
    assert (q.layout, q.inner, q.shape, y.shape, y.dtype) == (
        want[0].layout,
        (80,),
        x.shape,
        x.shape,
        x.dtype,
    )
    leaves = [torch.utils._pytree.tree_leaves(t) for t in (q, want[0])]
    assert [(t.shape, t.dtype) for t in leaves[0]] == [(t.shape, t.dtype) for t in leaves[1]]


# --- signal-to-noise ratios of round-to-nearest on N(0, 1), 512 x 512 ---

BASELINES = {
    "int4": 20.0,
    "int4:g32": 22.1,
    "int4:sym": 19.1,
    "int8:absmax_narrow": 42.6,
    "mxfp4:floor": 18.8,
    "mxfp4:ceil": 16.8,
    "mxfp4:rceil": 18.7,
    "mxfp4:even": 19.0,
    "nvfp4": 20.4,
}


@pytest.mark.parametrize("key", BASELINES)
def test_signal_to_noise_is_the_published_one(key):
    x = torch.randn(512, 512)
    y = fq.dequantize(fq.quantize(x, fq.layout(key)))
    decibels = 20 * torch.log10(x.double().norm() / (x - y).double().norm())
    assert abs(decibels.item() - BASELINES[key]) < 0.2
    small = fq.dequantize(fq.quantize(x * 0.01, fq.layout(key)))
    tiny = 20 * torch.log10((x * 0.01).double().norm() / (x * 0.01 - small).double().norm())
    assert abs(tiny.item() - decibels.item()) < 0.7  # small weights lose nothing


# --- wrong calls ---


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda x: fq.quantize(x.int(), fq.int8()),
            TypeError,
            "quantize: x must be float32, .*got torch.int32",
        ),
        (lambda x: fq.quantize(x.to(torch.complex64), fq.int8()), TypeError, "got torch.complex64"),
        (lambda x: fq.quantize(x.to(torch.float8_e4m3fn), fq.int8()), TypeError, "got torch.float8_e4m3fn"),
        (lambda x: fq.quantize(x.tolist(), fq.int8()), TypeError, "x must be a tensor, got list"),
        (lambda x: fq.quantize(x, "int8"), TypeError, "expected a Layout such as fq.int4"),
        (
            lambda x: fq.quantize(fq.quantize(x, fq.int8()), fq.int8()),
            TypeError,
            "got a QTensor.*requantize",
        ),
        (
            lambda x: fq.quantize(x[0, 0], fq.int8()),
            ValueError,
            "0-dimensional tensor; reshape it to \\(1,\\)",
        ),
        (
            lambda x: fq.quantize(x, fq.int8(), inner=3),
            ValueError,
            "inner=3 trailing dimensions, but x has 2",
        ),
        (lambda x: fq.quantize(x, fq.int8(), inner=0), ValueError, "inner=0"),
        (lambda x: fq.quantize(x, fq.int8(axis=-2), inner=2), ValueError, "axis=-2 .*inner=1"),
        (
            lambda x: fq.quantize(x, fq.int8(), noise=x[0]),
            ValueError,
            "noise must have x's shape \\(4, 64\\)",
        ),
        (
            lambda x: fq.quantize(x, fq.int8(), scale=x),
            ValueError,
            "scale must be a block grid of shape \\(4, 1\\)",
        ),
        (
            lambda x: fq.quantize(x, fq.int8(), scale=x[:, 0]),
            ValueError,
            "block grid of shape \\(4, 1\\), got \\(4,\\)",
        ),
        (lambda x: fq.quantize(x, fq.int4(32), scale=x[:, :2]), ValueError, "give zero_point= with scale="),
        (
            lambda x: fq.quantize(x, fq.int8(), zero_point=x[:, :1]),
            ValueError,
            "zero_point= goes with scale=",
        ),
        (lambda x: fq.quantize(x, fq.int8(), outer_scale=1.0), ValueError, "int8 has no nested scale"),
        (lambda x: fq.quantize(x, fq.int8(), input_scale=1.0), ValueError, "does not quantize activations"),
        (
            lambda x: fq.quantize(x, fq.layout("int4:aten_cpu")),
            ValueError,
            "storage 'aten_cpu' is made by fq.prepack",
        ),
        (
            lambda x: fq.quantize(x, fq.int8(), backend="gpu"),
            ValueError,
            "unknown name 'gpu'; known are auto",
        ),
        (lambda x: fq.dequantize(x), TypeError, "dequantize: expected a QTensor, got Tensor"),
        (lambda x: fq.requantize(x, fq.int8()), TypeError, "requantize: expected a QTensor, got Tensor"),
        (lambda x: fq.requantize(fq.quantize(x, fq.int8()), "int4"), TypeError, "expected a Layout"),
    ],
)
def test_wrong_calls_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call(torch.randn(4, 64))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": torch.zeros(4, 63, dtype=torch.int8)}, "64 columns of int8 take 64 bytes, data has 63"),
        ({"data": torch.zeros(4, 64)}, "int8 data must be torch.int8, got torch.float32"),
        ({"scale": torch.ones(4, 2)}, r"scale of int8 must be a block grid of \(4, 1\), got \(4, 2\)"),
        ({"scale": torch.ones(1, 4)}, r"block grid of \(4, 1\), got \(1, 4\)"),
        ({"scale": torch.ones(4, 1).bfloat16()}, "scale of int8 must be torch.float32, got torch.bfloat16"),
        ({"zero_point": torch.ones(4, 1)}, "int8 has no zero_point"),
        ({"inner": (32,)}, "32 columns of int8 take 32 bytes, data has 64"),
    ],
)
def test_children_that_do_not_fit_their_layout_are_named(change, message):
    q = fq.quantize(torch.randn(4, 64), fq.int8())
    parts = {
        "data": q.data,
        "scale": q.scale,
        "layout": q.layout,
        "dtype": q.dtype,
        "inner": q.inner,
        **change,
    }
    with pytest.raises(ValueError, match=message):
        fq.dequantize(fq.QTensor(**parts))


def test_input_scales_are_kept_beside_the_weight():
    x = torch.randn(4, 64)
    q = fq.quantize(x, fq.int8(act=fq.int8()), input_scale=0.25)
    assert (q.input_scale.shape, q.input_scale.item()) == ((1, 1), 0.25)
    plain = fq.quantize(x, fq.int8(act=fq.int8()))
    assert torch.equal(q.data, plain.data)
    assert torch.equal(fq.dequantize(q), fq.dequantize(plain))


def test_quantize_is_detached():
    x = torch.randn(4, 64, requires_grad=True)
    q = fq.quantize(x, fq.int4(32), noise=torch.rand(4, 64))
    assert not q.requires_grad
    scale = torch.rand(4, 1, requires_grad=True)
    assert not fq.quantize(x, fq.int8(), scale=scale).requires_grad
