"""Cases F, G and H that users met: groups, ragged and odd sizes, orientation, empty tensors, wrong sizes."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

import pytest
import torch
import torch.utils._pytree as pytree
from formats import assert_equal, assert_same

import fq

Q4_K = "uint4:g32:scale=(uint6:g8:sym:scale=float16):zp=(uint6:g8:sym:scale=float16:absmax_full)"
PRESETS = ("int8", "int4", "int4:sym", "uint4", "int3", "binary", "fp8", "fp8:block128x128", "mxfp4", "mxfp6")
PRESETS += ("mxfp8", "nvfp4", "nvfp4:scale=e4m3", "nf4", "nf4:scale=(uint8:g256:sym)", "int4:mse", Q4_K)
PRESETS += ("int8@int8", "nvfp4@nvfp4", "fp8@fp8:g128")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def test_case_F2_ragged_weights_are_quantized_and_named_beforehand():
    shapes = {"a": (16, 64), "bad1": (16, 100), "b": (16, 128), "bad2": (32, 40), "c": (8, 32)}
    params = {f"layers.{k}.weight": torch.randn(s) for k, s in shapes.items()}
    plan = fq.plan(params, fq.int4(32))
    assert plan.quantized == tuple(params)
    for name, w in params.items():
        row = next(line for line in str(plan).splitlines() if line.startswith(name))
        assert f"{w.shape[0]}×{w.shape[1]}" in row and "int4:g32" in row
    quantized = fq.quantize_params(params, plan)
    for name, w in params.items():
        assert quantized[name].scale.shape == (w.shape[0], ceil(w.shape[1] / 32))
        assert_same(quantized[name], fq.quantize(w, fq.int4(32)))
    skipped = fq.quantize_params(params, {"re:.*bad.*": None, "layers": fq.int4(32)})
    assert [k for k, v in skipped.items() if not isinstance(v, fq.QTensor)] == [
        n for n in params if "bad" in n
    ]


def test_case_F2_a_kernel_that_cannot_take_them_names_all_before_any_work(monkeypatch):
    from fq.layouts.storage import HOOKS

    params = {f"{i}.weight": torch.randn(16, k) for i, k in enumerate((64, 100, 128, 40, 32))}
    tree = fq.quantize_params(params, fq.int4(32))
    packed = []
    hook = replace(HOOKS["aten_cpu"], prepack=packed.append)
    monkeypatch.setitem(HOOKS, "aten_cpu", hook)
    with pytest.raises(fq.BackendError) as error:
        fq.prepack({"model": tree}, backend="aten")
    text = str(error.value)
    assert "['model']['1.weight']" in text and "['model']['3.weight']" in text and not packed
    assert text.count("the kernel takes whole groups of 32") == 2 and "K=100" in text and "K=40" in text
    assert not any(f"'{i}.weight'" in text for i in (0, 2, 4))


def fill_freed_memory(value: float) -> None:
    """Leave `value` where the allocator will look for the next tensors."""
    blocks = [torch.full((n,), value) for n in (16, 64, 128, 256, 1024, 4096) for _ in range(8)]
    del blocks


@pytest.mark.parametrize(
    "key", ["nf4:g64", "int4:g64", "int8:g64", "fp8:g64", "e2m1:g64", "uint4:g64", "int3:g64"]
)
def test_case_F4_the_last_block_reads_its_own_numbers(key, poisoned_empty):
    layout, x = fq.layout(key), torch.rand(100) * 2 - 1
    x[70] = 0.125
    x[64:] *= 0.25
    first = None
    for value in (1e4, torch.nan, -1e4):
        fill_freed_memory(value)
        q = fq.quantize(x, layout)
        rows = fq.quantize(x.expand(10, 100), layout)
        assert q.scale.shape == (2,)
        if key == "nf4:g64":
            assert q.scale.tolist() == [x[:64].abs().max(), x[64:].abs().max()]
        assert_same(fq.quantize(x[64:], layout), replace(q[64:], layout=fq.quantize(x[64:], layout).layout))
        assert_equal(fq.dequantize(rows), fq.dequantize(q).expand(10, 100))
        first = first or q
        assert_same(q, first)


@pytest.mark.parametrize("shape", [(5, 3), (1, 1), (4, 7)])
def test_case_F5_odd_rows(shape):
    nibbles = torch.randint(0, 16, shape)
    for pack in (fq.pack_fp4x2, fq.pack_int4):
        with pytest.raises(ValueError, match=rf"even last dimension, got {shape[1]} in shape .*pack_bits"):
            pack(nibbles)
    with pytest.raises(ValueError, match="even last dimension.*pack_bits"):
        fq.cast_fp4x2(nibbles.float())
    packed = fq.pack_bits(nibbles, 4)
    assert packed.shape == (shape[0], (shape[1] + 1) // 2)
    assert torch.equal(fq.unpack_bits(packed, 4, shape[1]), nibbles.to(torch.uint8))
    for i in range(shape[0]):  # each row starts on a byte
        assert torch.equal(packed[i], fq.pack_bits(nibbles[i], 4))
    for key in ("nvfp4", "mxfp4", "int4", "nf4", "mxfp6", "int3", "int5:g32"):
        x = torch.randn(shape)
        q = fq.quantize(x, fq.layout(key), **({"outer_scale": 0.01} if key == "nvfp4" else {}))
        for i in range(shape[0]):
            row = fq.quantize(x[i], fq.layout(key), **({"outer_scale": 0.01} if key == "nvfp4" else {}))
            assert_equal(fq.dequantize(q)[i], fq.dequantize(row))


@pytest.mark.parametrize(
    "key", ["fp8", "mxfp8", "int8", "fp8@fp8", "mxfp8@mxfp8", "int8@int8", "fp8:tensor@fp8:tensor"]
)
@pytest.mark.parametrize(("n", "k", "m"), [(15, 32, 2), (7, 23, 13)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_case_F6_sizes_that_are_no_multiple_of_16(key, n, k, m, dtype):
    layout = fq.layout(key)
    w, bias = torch.randn(n, k), torch.randn(n).to(dtype).requires_grad_()
    x, g = torch.randn(m, k).to(dtype).requires_grad_(), torch.randn(m, n).to(dtype)
    q = fq.quantize(w.to(dtype), layout)
    y = fq.linear(x, q, bias)
    y.backward(g)
    dense = fq.dequantize(q, torch.float64)
    seen = (
        x.detach()
        if layout.act is None
        else fq.dequantize(fq.quantize(x.detach(), layout.act), torch.float32)
    )
    eps = 4 * torch.finfo(dtype).eps
    want = seen.double() @ dense.T + bias.double()
    assert (
        y.dtype == dtype
        and ((y.double() - want).abs() <= eps * (seen.double().abs() @ dense.abs().T + 4)).all()
    )
    assert ((x.grad.double() - g.double() @ dense).abs() <= eps * (g.double().abs() @ dense.abs())).all()
    torch.testing.assert_close(bias.grad.double(), g.double().sum(0), rtol=eps, atol=m * eps)


@pytest.mark.parametrize("g", [16, 32, 64, 128, 256, 512])
@pytest.mark.parametrize("key", ["int4", "int4:sym", "uint4"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_case_F7_every_group_size_on_every_backend(g, key, dtype):
    w, x = torch.randn(256, 512).to(dtype), torch.randn(16, 512).to(dtype)
    w *= torch.logspace(-1, 1, 32, dtype=dtype).repeat_interleave(16)  # a group of another size would show
    q = fq.quantize(w, fq.layout(f"{key}:g{g}:scale={str(dtype).removeprefix('torch.')}"))
    dense = fq.dequantize(q, torch.float64)
    want, size = x.double() @ dense.T, x.double().abs() @ dense.abs().T
    leaves = [(q, "auto"), (q, "reference")]
    if key != "uint4" and 32 <= g <= 256:
        leaves.append((fq.prepack(q, backend="aten"), "aten"))
    else:
        with pytest.raises(
            fq.BackendError, match=f"group {g} over K=512" if key != "uint4" else "uint4.* is not int4"
        ):
            fq.prepack(q, backend="aten")
        with pytest.raises(
            fq.BackendError, match="backend 'aten' cannot run this call.*backends that can: reference"
        ):
            fq.int4_matmul(x, q, backend="aten")
    for leaf, backend in leaves:
        y = fq.int4_matmul(x, leaf, backend=backend)
        bound = (2.0**-8 + 512 * 2.0**-24) * size + torch.finfo(dtype).eps * want.abs()
        assert y.dtype == dtype and ((y.double() - want).abs() <= bound).all(), backend


SIZED = {
    "int4": fq.int4,
    "int4 sym": lambda g: fq.int4(g, symmetric=True),
    "uint4": fq.uint4,
    "int3": lambda g: fq.intx(3, g),
    "int6 affine": lambda g: fq.intx(6, g, symmetric=False),
    "binary": lambda g: fq.intx(1, g),
    "nf4": fq.nf4,
    "nf4 double": lambda g: fq.nf4(g, double_quant=True),
    "int8": lambda g: fq.int8((1, g)),
    "int8 rows": lambda g: fq.int8((g, -1)),
    "fp8": lambda g: fq.fp8((1, g)),
    "fp8 blocks": lambda g: fq.fp8((g, g)),
    "Layout": lambda g: fq.Layout(fq.int8().element, (1, g)),
}


@pytest.mark.parametrize("name", [n for n in SIZED if n not in ("int8 rows", "fp8 blocks")])
def test_case_F8_groups_beyond_the_row_whole_rows_and_single_numbers(name):
    make, w, x = SIZED[name], torch.randn(8, 64), torch.randn(3, 64)
    whole = fq.quantize(w, make(-1))
    for g in (64, 128, 2**31 - 1):
        assert_same(fq.quantize(w, make(g)), whole)
    assert whole.scale.shape == (8, 1)
    ones = fq.quantize(w, make(1))
    y = fq.dequantize(ones)
    scale = ones.scale if isinstance(ones.scale, torch.Tensor) else fq.dequantize(ones.scale)
    assert ones.scale.shape == (8, 64)
    if name in ("int4 sym", "int3", "int8", "Layout"):  # half a step, for the largest code is clamped
        assert ((y - w).abs() <= scale * (0.5 + 2.0**-15)).all()
    else:
        rtol = 1 / 256 if name == "nf4 double" else 2.0**-22  # whose scales have 8 bits
        assert (
            (y - w).abs() <= rtol * (w.abs() if rtol < 0.001 else w.abs().amax(1, keepdim=True)) + 1e-7
        ).all()
    torch.testing.assert_close(fq.linear(x, ones), x @ y.T)


@pytest.mark.parametrize("key", ["nvfp4@nvfp4", "mxfp8@mxfp8", "nvfp4", "mxfp8"])
@pytest.mark.parametrize("m", [1, 3, 33])
def test_case_F9_no_padding_reaches_the_result(key, m, poisoned_empty):
    layout = fq.layout(key)
    w, x, results = torch.randn(96, 80), torch.randn(m, 80), []
    for value in (torch.nan, 1e4):
        fill_freed_memory(value)
        q = fq.quantize(w, layout)
        results.append(fq.linear(x, q))
        assert q.scale.shape == (96, ceil(80 / layout.block[1]))  # canonical scales have no padding
    seen = x if layout.act is None else fq.dequantize(fq.quantize(x, layout.act))
    assert torch.equal(*results)
    torch.testing.assert_close(results[0], seen @ fq.dequantize(q).T, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("key", ["fp8", "e5m2", "fp8:tensor", "int8", "mxfp8", "nvfp4", "int4:g16", "nf4"])
def test_case_G2_transposed_and_tiny_inputs(key):
    layout, x = fq.layout(key), (torch.randn(64, 32) * torch.logspace(-2, 2, 32)).t()
    q = fq.quantize(x, layout)
    assert q.shape == (32, 64) and q.is_contiguous()
    assert_same(q, fq.quantize(x.contiguous(), layout))
    rough = 2.0**-3 if layout.element.bits < 8 else 2.0**-2 if key == "e5m2" else 2.0**-3
    error = (fq.dequantize(q) - x).norm(dim=-1) / x.norm(dim=-1)
    assert (error[-8:] < rough).all() and (layout.block[0] == -1 or key == "nvfp4" or (error < rough).all())
    tiny = torch.tensor([[1.0, -2.0, 3.0], [100.0, 50.0, -200.0]])
    y = fq.dequantize(fq.quantize(tiny, layout))
    assert y.shape == (2, 3) and ((y - tiny).abs() <= tiny.abs().amax(1, keepdim=True) / 6).all()
    assert_same(fq.quantize(tiny.T, layout), fq.quantize(tiny.T.contiguous(), layout))


def test_case_G7_the_scale_grid_keeps_its_orientation():
    i, j = torch.arange(4.0)[:, None], torch.arange(48.0)
    grid, layout = torch.exp2(i - 2) * (1 + j / 64), fq.fp8((128, 128))
    data = torch.randn(512, 6144).to(torch.float8_e4m3fn)
    rows, cols = torch.arange(512) // 128, torch.arange(6144) // 128
    spread = grid[rows][:, cols]
    q = fq.quantize(data.float() * spread, layout, scale=grid)
    assert_equal(q.data, data)
    for leaf in (q, replace(q, data=data, scale=grid.clone())):
        assert torch.equal(fq.dequantize(leaf), data.float() * spread)
    x = torch.randn(2, 6144)
    torch.testing.assert_close(fq.linear(x, q), x @ (data.float() * spread).T, rtol=1e-4, atol=2e-3)
    for wrong in (grid.T.contiguous(), grid.reshape(48, 4), grid.reshape(-1), grid[:, :47], grid[None]):
        bad = replace(q, scale=wrong)
        for call in (
            lambda b=bad: fq.dequantize(b),
            lambda b=bad: fq.linear(x, b),
            lambda b=bad: fq.requantize(b, layout),
        ):
            with pytest.raises(
                ValueError, match=r"scale of fp8:block128x128 must be a block grid of \(4, 48\)"
            ):
                call()
        with pytest.raises(ValueError, match=r"scale must be a block grid of shape \(4, 48\)"):
            fq.quantize(data.float(), layout, scale=wrong)


def products(x: torch.Tensor, w: torch.Tensor, layout: fq.Layout) -> dict[str, torch.Tensor]:
    """Every primitive on x (M, K) and w (N, K)."""
    q = fq.quantize(w, layout)
    ids = torch.zeros(0, 2, dtype=torch.int64)
    out = {
        "dequantize": fq.dequantize(q),
        "to bfloat16": fq.dequantize(q, torch.bfloat16),
        "fake_quantize": fq.fake_quantize(w, layout),
        "requantize": fq.dequantize(fq.requantize(q, fq.int8())),
        "linear": fq.linear(x, q),
        "with bias": fq.linear(x, q, torch.ones(w.shape[0])),
        "vector": fq.linear(torch.ones(w.shape[1]), q),
        "batch": fq.linear(x.expand(2, *x.shape), q),
        "matmul": fq.matmul(x, q.T),
        "left": fq.matmul(q, x.T),
        "adjoint": fq.matmul(torch.ones(3, w.shape[0]), q),
        "activation": fq.dequantize(fq.quantize(x, layout)),
        "cast": fq.unpack_fp4x2(fq.cast_fp4x2(w)),
        "pack": fq.unpack_bits(fq.pack_bits(w.to(torch.uint8), 3), 3, w.shape[1]),
    }
    if layout.block[0] == 1:
        out["embedding"] = fq.embedding(ids, q)
    return out


def wanted(x: torch.Tensor, w: torch.Tensor) -> dict[str, torch.Tensor]:
    ones = torch.ones
    return {
        **dict.fromkeys(("dequantize", "fake_quantize", "requantize"), w),
        "to bfloat16": w.bfloat16(),
        "linear": x @ w.T,
        "with bias": x @ w.T + 1,
        "vector": ones(w.shape[1]) @ w.T,
        "batch": x.expand(2, *x.shape) @ w.T,
        "matmul": x @ w.T,
        "left": w @ x.T,
        "adjoint": ones(3, w.shape[0]) @ w,
        "activation": x,
        "cast": w.to(torch.uint8),
        "pack": w.to(torch.uint8),
        "embedding": w.new_zeros(0, 2, w.shape[1]),
    }


EMPTY = [((0, 128), (24, 128)), ((5, 64), (0, 64)), ((0, 64), (0, 64)), ((5, 0), (6, 0)), ((0, 0), (0, 0))]


def check_empty(key: str, call, shapes=EMPTY) -> None:
    for x_shape, w_shape in shapes:  # zeros, so that what is not empty is exact
        x, w = torch.zeros(x_shape), torch.zeros(w_shape)
        want = wanted(x, w)
        for name, got in call(x, w, fq.layout(key)).items():
            assert (got.dtype, got.shape) == (want[name].dtype, want[name].shape), (name, x_shape, w_shape)
            assert torch.equal(got, want[name]), (name, x_shape, w_shape)


@pytest.mark.parametrize("key", PRESETS)
def test_case_H2_every_primitive_on_nothing(key):
    check_empty(key, products)
    layout = fq.layout(key)
    vector = fq.quantize(torch.zeros(0, dtype=torch.bfloat16), layout)
    assert_equal(fq.dequantize(vector), torch.zeros(0, dtype=torch.bfloat16))
    stacked = fq.quantize(torch.zeros(0, 4, 64), layout)
    assert_equal(fq.matmul(torch.zeros(0, 3, 64), stacked.mT), torch.zeros(0, 3, 4))
    x = torch.zeros(0, 64, requires_grad=True)
    fq.linear(x, fq.quantize(torch.randn(4, 64), layout)).sum().backward()
    assert_equal(x.grad, torch.zeros(0, 64))
    assert fq.quantize(torch.zeros(0, 64), layout).nbytes <= 4  # an outer scale of the matrix at most


@pytest.mark.slow
@pytest.mark.parametrize(("key", "shapes"), [(k, EMPTY[i % 2]) for i, k in enumerate(PRESETS[:-2])])
def test_case_H2_every_primitive_on_nothing_compiled(key, shapes, fresh_compile):
    check_empty(key, torch.compile(products, fullgraph=True, backend="aot_eager"), [shapes])


@pytest.mark.parametrize("shape", [(64,), (1, 5, 64), (2, 3, 5, 64)])
@pytest.mark.parametrize("key", [*PRESETS, "int8@int8:tensor", "fp8:tensor@fp8:tensor", "mxfp4@mxfp8"])
def test_case_H3_activations_of_any_rank(key, shape):
    q, x, bias = fq.quantize(torch.randn(32, 64), fq.layout(key)), torch.randn(shape), torch.randn(32)
    flat = fq.linear(x.reshape(-1, 64), q, bias)
    seen = x.reshape(-1, 64)
    act = q.layout.act
    seen = seen if act is None else fq.dequantize(fq.quantize(seen, act))
    torch.testing.assert_close(flat, seen @ fq.dequantize(q).T + bias, rtol=1e-4, atol=1e-4)
    assert_equal(fq.linear(x, q, bias), flat.reshape(*shape[:-1], 32))
    assert_equal(torch.nn.functional.linear(x, q, bias), flat.reshape(*shape[:-1], 32))


@pytest.mark.parametrize("name", SIZED)
def test_case_H6_sizes_that_are_none(name):
    for size in (0, -7, 2**40, 2**64, -(2**63)):
        with pytest.raises(ValueError, match=rf"expected -1 .*or 1 to .*, got {size}"):
            SIZED[name](size)
    for size in (3.5, True, None, "32", torch.tensor(32)):
        with pytest.raises(TypeError, match="expected an int"):
            SIZED[name](size)
    assert pytree.tree_leaves(SIZED[name](1)) and SIZED[name](2**31 - 1).block[1] in (2**31 - 1, -1)


@pytest.mark.parametrize(
    "text", ["int4:g0", "int4:g-7", f"nf4:g{2**40}", "int8:g3.5", "fp8:gTrue", "int8:block0x128"]
)
def test_case_H6_sizes_that_are_none_as_text(text):
    with pytest.raises(ValueError, match=r"expected -1 .*or 1 to|unknown option"):
        fq.layout(text)


@pytest.mark.parametrize("bits", [0, 9, -1, 2**40])
def test_case_H6_widths_that_are_none(bits):
    with pytest.raises(ValueError, match=f"bits must be 1 to 8, got {bits}"):
        fq.intx(bits)
    with pytest.raises(ValueError, match=f"bits must be 1 to 8, got {bits}"):
        fq.pack_bits(torch.zeros(4, dtype=torch.uint8), bits)
    for wrong in (3.5, True, "4"):
        with pytest.raises(TypeError, match="bits must be an int"):
            fq.intx(wrong)
        with pytest.raises(TypeError, match="bits must be an int"):
            fq.pack_bits(torch.zeros(4, dtype=torch.uint8), wrong)
