"""fake_quantize: forward the bits of a round trip; straight-through and LSQ gradients under transforms."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from formats import ALL, PRESETS, assert_equal
from torch.func import grad, jvp, vjp, vmap

import fq

LEARNED = {"int8": fq.int8(), "int8_groups": fq.int8(block=(1, 32)), "int4_sym": fq.int4(32, symmetric=True)}
MODES = ["eager", "compiled"]


def run(f, mode: str):
    return f if mode == "eager" else torch.compile(f, fullgraph=True, backend="aot_eager")


def round_trip(x, layout, **given):
    return fq.dequantize(fq.quantize(x, layout, **given))


# --- forward ---


@ALL
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_forward_has_the_bits_of_a_round_trip(name, dtype):
    layout, largest = PRESETS[name], torch.finfo(dtype).max
    hard = torch.randn(6, 80).to(dtype)
    hard[0], hard[1, 3], hard[2, 40], hard[3, 5] = 0.0, torch.nan, torch.inf, min(largest, 3.4e38)
    for x in (
        hard,
        torch.randn(2, 3, 5, 33).to(dtype),
        torch.randn(40).to(dtype),
        torch.zeros(0, 64).to(dtype),
    ):
        assert_equal(fq.fake_quantize(x, layout), round_trip(x, layout))
    axis = fq.layout(layout.key + ":axis-2")
    assert_equal(fq.fake_quantize(hard.T, axis), round_trip(hard.T, axis))


@pytest.mark.parametrize("name", ["int8", "int8_groups", "int4_sym", "mxfp4_even", "nvfp4", "int4"])
def test_forward_with_given_scales(name):
    layout = {**PRESETS, **LEARNED}[name]
    x = torch.randn(5, 80)
    q = fq.quantize(x, layout)
    given = {"scale": torch.rand(q.scale.shape) + 0.01}
    if name == "int4":
        given["zero_point"] = torch.randn(q.scale.shape)
    assert_equal(fq.fake_quantize(x, layout, **given), round_trip(x, layout, **given))
    row = {k: v[0] for k, v in given.items()}
    assert_equal(fq.fake_quantize(x[0], layout, **row), round_trip(x[0], layout, **row))


# --- gradients: a finite formula in NumPy ---


def lsq(x, scale, g, layout, zero=None):
    """Gradients (x, scale, zero) of sum(g·fq(x)), element by element, and LSQ's 1/sqrt(N·Q_max)."""
    x, scale, g = (t.detach().double().numpy() for t in (x, scale, g))
    low, high = -(2 ** (layout.element.bits - 1)), 2 ** (layout.element.bits - 1) - 1
    cols = x.shape[1] if layout.block[1] == -1 else layout.block[1]
    gx, gs, gz = np.zeros_like(x), np.zeros_like(scale), np.zeros_like(scale)
    for r in range(x.shape[0]):
        for c in range(x.shape[1]):
            b = c // cols
            size = min(cols, x.shape[1] - b * cols)
            offset = 0.0 if zero is None else float(zero[r, b])
            v = (x[r, c] - offset) / scale[r, b]
            inside = low - 0.5 <= v <= high + 0.5
            code = min(max(np.rint(v), low), high)
            gx[r, c] = g[r, c] * inside
            gs[r, b] += g[r, c] * (code - v if inside else code) / (size * high) ** 0.5
            gz[r, b] += g[r, c] * (not inside)
    return gx, gs, gz


def close(got, want) -> None:
    np.testing.assert_allclose(got.detach().double().numpy(), want, rtol=1e-5, atol=1e-5)


def learned(name: str):
    """x, a scale that clips some of it, and an upstream gradient; rows of 80 leave a ragged block."""
    layout = LEARNED[name]
    x = torch.randn(4, 80)
    scale = fq.quantize(x, layout).scale * (0.4 + 0.8 * torch.rand(fq.quantize(x, layout).scale.shape))
    return layout, x, scale, torch.randn(4, 80)


@pytest.mark.parametrize("name", LEARNED)
@pytest.mark.parametrize("mode", MODES)
def test_learned_scales_get_the_lsq_gradient(name, mode, fresh_compile):
    layout, x, scale, g = learned(name)
    want = lsq(x, scale, g, layout)
    assert 0.02 < (want[0] == 0).mean() < 0.7  # some clip, some do not

    def loss(x, s):
        return (fq.fake_quantize(x, layout, scale=s) * g).sum()

    gx, gs = run(grad(loss, argnums=(0, 1)), mode)(x, scale)
    close(gx, want[0])
    close(gs, want[1])
    if mode == "eager":
        a, b = x.clone().requires_grad_(), scale.clone().requires_grad_()
        loss(a, b).backward()
        assert torch.equal(a.grad, gx)
        assert torch.equal(b.grad, gs)


@pytest.mark.parametrize("mode", MODES)
def test_learned_zero_points(mode, fresh_compile):
    layout, x, g = fq.int4(32), torch.randn(4, 80) + 3, torch.randn(4, 80)
    q = fq.quantize(x, layout)
    scale, zero = q.scale * 0.7, q.zero_point + 0.1
    want = lsq(x, scale, g, layout, zero)

    def loss(x, s, z):
        return (fq.fake_quantize(x, layout, scale=s, zero_point=z) * g).sum()

    for got, expected in zip(run(grad(loss, argnums=(0, 1, 2)), mode)(x, scale, zero), want, strict=True):
        close(got, expected)


@ALL
def test_scales_of_the_rule_pass_every_gradient_that_does_not_clip(name):
    layout, x, g = PRESETS[name], torch.randn(4, 80), torch.randn(4, 80)
    x = x if layout.element.signed or layout.zero_point is not None else x.abs()
    got = grad(lambda x: (fq.fake_quantize(x, PRESETS[name]) * g).sum())(x)
    y = fq.fake_quantize(x, PRESETS[name])
    kept = got != 0
    assert torch.equal(got[kept], g[kept])
    may_clip = name in ("int8_full", "binary", "int8_float16") or layout.rule in ("floor", "even", "mse")
    if may_clip:  # these alone may leave an extreme outside
        assert ((y[~kept] - x[~kept]).abs() / x[~kept].abs() > 0.002).all()
    else:
        assert kept.all()


@pytest.mark.parametrize(
    ("layout", "scale", "last_in", "first_out"),
    [
        (fq.int8(), 1.0, [127.5, -128.5], [127.6, -128.6]),
        (fq.int4(32, symmetric=True), 0.5, [3.75, -4.25], [3.8, -4.3]),
        (fq.mxfp4(), 1.0, [7.0, -7.0], [7.01, -7.01]),
        (fq.mxfp4(), 4.0, [28.0, -28.0], [28.1, -28.1]),
    ],
    ids=str,
)
def test_the_gradient_stops_half_a_step_past_the_largest_code(layout, scale, last_in, first_out):
    x = torch.zeros(1, 32)
    x[0, :4] = torch.tensor([*last_in, *first_out])
    got = grad(lambda x: fq.fake_quantize(x, layout, scale=torch.full((1, 1), scale)).sum())(x)
    assert got[0, :5].tolist() == [1, 1, 0, 0, 1]


@pytest.mark.parametrize("name", ["mxfp4_even", "nvfp4"])
def test_e8m0_and_nested_scales_have_no_gradient(name):
    x = torch.randn(2, 32)
    scale = torch.ones(2, 32 // PRESETS[name].block[1])
    got = grad(lambda s: fq.fake_quantize(x, PRESETS[name], scale=s).sum())(scale)
    assert torch.equal(got, torch.zeros_like(scale))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_gradients_have_their_inputs_dtypes(dtype):
    layout, x, scale, g = learned("int8_groups")
    a = x.to(dtype).requires_grad_()
    b = scale.clone().requires_grad_()
    y = fq.fake_quantize(a, layout, scale=b)
    y.backward(g.to(dtype))
    assert (y.dtype, a.grad.dtype, b.grad.dtype) == (dtype, dtype, torch.float32)
    want = lsq(a, b, g.to(dtype), layout)
    np.testing.assert_allclose(b.grad.double().numpy(), want[1], rtol=1e-4, atol=1e-4)


# --- transforms ---


@pytest.mark.parametrize(
    ("name", "mode"),
    [(name, "eager") for name in PRESETS]
    + [(name, "compiled") for name in ("int8", "int4", "mxfp4_even", "nvfp4")],
)
def test_vmap_and_vmap_of_grad(name, mode, fresh_compile):
    layout, x, g = PRESETS[name], torch.randn(3, 4, 40) * 3, torch.randn(4, 40)

    def loss(x):
        return (fq.fake_quantize(x, layout) * g).sum()

    def both(x):
        return vmap(lambda x: fq.fake_quantize(x, layout))(x), vmap(grad(loss))(x)

    y, gx = run(both, mode)(x)
    assert_equal(y, torch.stack([round_trip(m, layout) for m in x]))
    assert_equal(gx, torch.stack([grad(loss)(m) for m in x]))


@pytest.mark.parametrize("mode", MODES)
def test_vmap_of_grad_over_learned_scales(mode, fresh_compile):
    layout, x, scale, g = learned("int8_groups")
    scales = torch.stack([scale, scale * 0.5, scale * 2])

    def loss(x, s):
        return (fq.fake_quantize(x, layout, scale=s) * g).sum()

    gx, gs = run(vmap(grad(loss, argnums=(0, 1)), in_dims=(None, 0)), mode)(x, scales)
    for i in range(3):
        want = lsq(x, scales[i], g, layout)
        close(gx[i], want[0])
        close(gs[i], want[1])


@pytest.mark.parametrize("name", ["int8_groups", "int4", "mxfp4_floor", "nvfp4"])
@pytest.mark.parametrize("mode", MODES)
def test_jvp_is_the_transpose_of_vjp(name, mode, fresh_compile):
    layout = {**PRESETS, **LEARNED}[name]
    x, tx, g = torch.randn(3, 40) * 2, torch.randn(3, 40), torch.randn(3, 40)
    given = (x,)
    tangents = (tx,)
    if name == "int8_groups":
        s = fq.quantize(x, layout).scale * 0.6
        given, tangents = (x, s), (tx, torch.randn_like(s))

    def f(x, s=None):
        return fq.fake_quantize(x, layout, scale=s)

    y, ty = run(lambda given, tangents: jvp(f, given, tangents), mode)(given, tangents)
    want, pull = vjp(f, *given)
    assert_equal(y, want)
    one = (ty.double() * g.double()).sum()
    other = sum((a.double() * b.double()).sum() for a, b in zip(pull(g), tangents, strict=True))
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    many = vmap(lambda t: jvp(f, given, (t, *tangents[1:]))[1])(torch.stack([tx, 2 * tx]))
    torch.testing.assert_close(many[0], ty)


# --- wrong calls ---


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x: fq.fake_quantize(x.int(), fq.int8()), TypeError, "fake_quantize: x must be float32"),
        (lambda x: fq.fake_quantize(x, "int8"), TypeError, "expected a Layout, got 'int8'"),
        (lambda x: fq.fake_quantize(x[0, 0], fq.int8()), ValueError, "got a 0-dimensional tensor"),
        (
            lambda x: fq.fake_quantize(x, fq.int8(), scale=x[:, 0]),
            ValueError,
            r"scale must be .* \(4, 1\), got \(4,\)",
        ),
        (
            lambda x: fq.fake_quantize(x, fq.int4(32), scale=x[:, :2]),
            ValueError,
            "zero_point= goes with scale=",
        ),
        (
            lambda x: fq.fake_quantize(x, fq.int4(32), zero_point=x[:, :2]),
            ValueError,
            "zero_point= goes with scale=",
        ),
        (
            lambda x: fq.fake_quantize(x, fq.int8(), scale=x[:, :1], zero_point=x[:, :1]),
            ValueError,
            "goes with",
        ),
    ],
)
def test_wrong_calls_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call(torch.rand(4, 64))
