"""Parameter dicts to parameter dicts: quantizing, donating, stacking, splitting, measuring."""

from __future__ import annotations

import math
import subprocess
import sys
import types

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

import fq

I8, I4 = fq.int8(), fq.int4(group_size=32)
KEYS = [
    "int8",
    "int4:g32",
    "uint4:g32:int-zp",
    "mxfp4",
    "nvfp4",
    "fp8:block128x128",
    "nf4:g64",
    "int8:axis-2",
    "int4:g32:axis-2",
    "int8:tensor",
    "uint8:tensor",
    "fp8:tensor:scale=e8m0",
    "int8:block-1x64:absmax_full",
    "int8:tensor:mse",
    "int4:tensor",
    "nvfp4:four_over_six",
    "nf4:scale=(uint8:block8x2:sym)",
    "uint4:g32:scale=(uint6:g8:sym:scale=float16):zp=(uint6:g8:sym:scale=float16:absmax_full)",
]

HALF = "int4:g32:scale=bfloat16"


def same(a, b) -> None:
    """Assert that two trees are alike, bit for bit."""
    (x, s), (y, t) = pytree.tree_flatten(a), pytree.tree_flatten(b)
    assert s == t
    for p, q in zip(x, y, strict=True):
        assert p.dtype == q.dtype and torch.equal(p.view(torch.uint8), q.view(torch.uint8))


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32))


# --- quantize_params ---


def test_each_leaf_is_quantized_alone_and_the_rest_is_the_same_object():
    params = {"a": torch.randn(8, 64, requires_grad=True), "b": torch.randn(3, 8, 64), "bias": torch.randn(8)}
    given = dict(params)
    out = fq.quantize_params(params, {"a": I8, "b": I4})
    assert list(out) == list(params) and params == given
    same(out["a"], fq.quantize(params["a"], I8))
    same(out["b"], fq.quantize(params["b"], I4))
    assert out["bias"] is params["bias"]
    assert not out["a"].requires_grad


def test_all_that_is_not_finite_is_named_before_anything_is_done():
    params = {n: torch.randn(4, 64) for n in "abcd"}
    params["b"][0, 0], params["d"][3, 5] = torch.nan, -torch.inf
    kept, calls = dict(params), []
    for donate in (False, True):
        with pytest.raises(ValueError, match=r"not finite: b, d; fix them, or pass check_finite=False"):
            fq.quantize_params(params, I8, donate=donate, progress=lambda *a: calls.append(a))
    assert calls == [] and all(params[n] is kept[n] for n in "abcd")
    out = fq.quantize_params(params, I8, check_finite=False)
    assert [int(fq.dequantize(v).isnan().sum()) for v in out.values()] == [0, 64, 0, 64]
    skipped = fq.quantize_params(params, {"b": None, "d": None, "re:.": I8})  # what is kept may be anything
    assert skipped["b"] is params["b"]


def test_progress_counts_every_parameter():
    calls = []
    params = {"a": torch.ones(2, 4), "bias": torch.ones(2), "b": torch.ones(2, 4)}
    fq.quantize_params(params, I8, progress=lambda *a: calls.append(a))
    assert calls == [("a", 1, 3), ("bias", 2, 3), ("b", 3, 3)]


def test_wrong_kinds_are_named():
    with pytest.raises(TypeError, match=r"got a module; use dict\(module.named_parameters\(\)\)"):
        fq.quantize_params(net(), I8)
    frozen = fq.plan(net(), I8)
    with pytest.raises(KeyError, match=r"parameters that are not given: 2\.weight"):
        fq.quantize_params({"0.weight": torch.ones(96, 64)}, frozen)
    with pytest.raises(TypeError, match="donate=True pops from a dict, got mappingproxy"):
        fq.quantize_params(types.MappingProxyType({}), I8, donate=True)


@pytest.mark.parametrize("key", KEYS)
def test_a_donated_dict_gives_the_same_bits_and_leaves_other_holders_alone(key):
    layout = fq.layout(key)
    params = {
        "large": torch.randn(700, 512),  # large enough to be quantized in slices
        "square": torch.randn(1024, 512),
        "experts": torch.randn(5, 100, 1024).bfloat16(),
        "small": torch.randn(8, 64),
        "bias": torch.randn(8),
    }
    params["tied"] = params["large"].detach()
    params["view"] = params["large"][:100]
    held, before = dict(params), {n: v.clone() for n, v in params.items()}
    want = fq.quantize_params(dict(params), layout)
    out = fq.quantize_params(params, layout, donate=True)
    assert params == {} and list(out) == list(want)
    for name in out:
        same(out[name], want[name])
    assert out["tied"] is out["large"]
    for name, value in held.items():
        assert torch.equal(value, before[name]) and value.untyped_storage().nbytes() >= value.nbytes


PEAK = """
import sys, torch, fq

def status(key):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(key + ":")) / 1024

torch.set_num_threads(1)
layout, donate = fq.layout(sys.argv[1]), sys.argv[2] == "donate"
fq.quantize_params({"w": torch.randn(1024, 1024)}, layout, donate=True)  # warm-up: code, threads, heaps
weight = torch.randn(1024, 1024)
params = {f"l{i}.weight": weight.clone() for i in range(40)}
with open("/proc/self/clear_refs", "w") as f:
    f.write("5")  # the high-water mark starts anew
before = status("VmRSS")
out = fq.quantize_params(params, layout, donate=donate)
assert all(isinstance(q, fq.QTensor) for q in out.values())
print(status("VmHWM") - before)
"""


def peak(*arguments: str) -> float:
    run = [sys.executable, "-c", PEAK, *arguments]
    return float(subprocess.run(run, check=True, capture_output=True, text=True).stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="reads the high-water mark where Linux keeps it")
def test_case_R1_donating_peaks_below_the_input_and_two_tensors():
    assert peak("int4", "donate") < 2 * 4


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the high-water mark where Linux keeps it")
def test_the_peak_is_bounded_where_encoding_takes_much_room_and_only_when_donating():
    assert peak("mxfp4", "donate") < 2 * 4
    assert peak("nvfp4", "donate") < 2 * 4
    assert peak("int8:tensor", "donate") < 2 * 4
    assert peak("int8:axis-2", "donate") < 2 * 4
    assert peak("fp8:block100x100", "donate") < 2 * 4
    assert peak("nvfp4:four_over_six", "donate") < 2 * 4
    assert peak("int4", "keep") > 20


# --- there and back ---


def test_dequantize_params_keeps_ties_and_leaves_floats_alone():
    w = torch.randn(8, 64)
    params = {"a": w, "b": w.detach(), "c": w.clone(), "bias": torch.randn(8)}
    q = fq.quantize_params(params, I8)
    out = fq.dequantize_params(q)
    assert out["a"] is out["b"] and out["c"] is not out["a"] and out["bias"] is params["bias"]
    assert torch.equal(out["a"], fq.dequantize(fq.quantize(w, I8)))
    remade = pytree.tree_map(lambda t: t, q)  # other leaf objects on the same tensors
    assert remade["a"] is not remade["b"]
    again = fq.dequantize_params(remade)
    assert again["a"] is again["b"] and torch.equal(again["a"], out["a"])
    turned = fq.dequantize_params({"a": q["a"], "t": q["a"].T})  # one storage, two meanings
    assert torch.equal(turned["t"], turned["a"].T)


@pytest.mark.parametrize("key", [*KEYS, HALF])
def test_whole_trees_are_prepacked_and_come_back_byte_for_byte(key):
    model, x = net(), torch.randn(5, 64).bfloat16()
    params = {k: v.detach().bfloat16() for k, v in model.named_parameters()}
    params = fq.quantize_params(params, fq.layout(key))
    packed = fq.prepack({"model": params, "other": [params["0.weight"], 3]})
    back = fq.canonical(packed)
    same(back["model"], params)
    same(back["other"][0], params["0.weight"])
    assert back["other"][1] == 3
    assert packed["model"]["0.bias"] is params["0.bias"]
    changed = packed["model"]["0.weight"].layout.storage != "canonical"
    assert changed == (key == HALF)  # the one that a kernel wants in another order
    assert changed or packed["model"]["0.weight"] is params["0.weight"]
    want = fq.functional_call(model, fq.dequantize_params(params), x)
    got = fq.functional_call(model, packed["model"], x)
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


def test_attach_and_detach_serve_a_quantized_tree():
    model, x = net(), torch.randn(5, 64)
    own, want_float = dict(model.named_parameters()), model(x)
    params = fq.quantize_params(own, fq.plan(model, I4))
    want = fq.functional_call(model, params, x)
    fq.attach(model, params)
    assert torch.equal(model(x), want) and model[0].weight is params["0.weight"]
    assert not torch.equal(want, want_float)
    fq.detach(model)
    assert list(model.named_parameters()) == list(own.items())
    assert torch.equal(model(x), want_float)


# --- trees ---


@pytest.mark.parametrize("key", KEYS)
def test_stacked_trees_are_an_ensemble_under_vmap(key):
    model, x = net(), torch.randn(3, 64)
    trees = []
    for _ in range(3):
        fresh = {k: torch.randn_like(v) for k, v in model.named_parameters()}
        trees.append(fq.quantize_params(fresh, fq.layout(key)))
    stacked = fq.tree_stack(trees)
    for i, tree in enumerate(trees):
        same({n: v[i] for n, v in stacked.items()}, tree)
    got = torch.vmap(lambda p: fq.functional_call(model, p, x))(stacked)
    want = torch.stack([fq.functional_call(model, tree, x) for tree in trees])
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-3)


def test_trees_that_differ_do_not_stack():
    w, bias = torch.randn(8, 64), torch.randn(8)
    q8, q4 = fq.quantize(w, I8), fq.quantize(w, I4)
    for trees, message in (
        ([], "at least one tree"),
        ([{"w": w, "a": w}, {"w": w, "b": w}], "differ in the names a, b"),
        ([{"w": q8}, {"w": w}], "w is quantized in some trees and not in others"),
        ([{"w": q8}, {"w": q4}], r"w has layouts int4:g32, int8; fq\.requantize"),
        ([{"b": bias}, {"b": bias[:4]}], r"b has shapes \[\(4,\), \(8,\)\]"),
    ):
        with pytest.raises(ValueError, match=message):
            fq.tree_stack(trees)
    vectors = [fq.quantize(torch.randn(64), I4) for _ in range(2)]
    stacked = fq.tree_stack([{"v": v} for v in vectors])["v"]
    got = torch.vmap(fq.dequantize)(stacked)
    assert torch.equal(got, torch.stack([fq.dequantize(v) for v in vectors]))


def test_tree_to_moves_everything_and_keeps_ties():
    w = torch.randn(8, 64)
    q = fq.quantize_params({"a": w, "b": w.detach(), "bias": torch.randn(8)}, I4)
    tree = {**q, "c": w, "d": w.detach(), "t": q["a"].T}
    same(fq.tree_to(tree, "cpu"), tree)
    moved = fq.tree_to(tree, "meta")
    assert all(t.is_meta for t in pytree.tree_leaves(moved))
    assert moved["a"] is moved["b"] and moved["c"] is moved["d"] and moved["c"] is not moved["a"]
    assert moved["t"].shape == (64, 8) and moved["a"].layout == I4


def test_partition_and_combine_are_inverse():
    params = fq.quantize_params(
        {"a": torch.randn(8, 64), "bias": torch.randn(8), "b": torch.randn(8, 64)}, I8
    )
    quantized, floats = fq.partition(params, lambda n, v: isinstance(v, fq.QTensor))
    assert (list(quantized), list(floats)) == (["a", "b"], ["bias"])
    joined = fq.combine(quantized, floats)
    assert joined == params
    named, _ = fq.partition(params, lambda n, v: n == "b")
    assert list(named) == ["b"]
    with pytest.raises(ValueError, match="names in both trees: a, b"):
        fq.combine(params, quantized)


def test_grad_over_one_part_of_a_partition():
    model, x = net(), torch.randn(5, 64)
    params = fq.quantize_params({k: v.detach() for k, v in model.named_parameters()}, I4)
    frozen, trained = fq.partition(params, lambda n, v: isinstance(v, fq.QTensor))
    assert list(trained) == ["0.bias", "2.bias"]

    def loss(trained, frozen):
        return fq.functional_call(model, fq.combine(trained, frozen), x).square().sum()

    got = torch.func.grad(loss)(trained, frozen)
    want = torch.func.grad(loss)(trained, fq.dequantize_params(frozen))
    for name in trained:
        torch.testing.assert_close(got[name], want[name], rtol=1e-4, atol=1e-3)
        assert got[name].abs().max() > 0.1


# --- reports ---


def test_sqnr_of_known_values():
    a = torch.tensor([3.0, 4.0])
    assert fq.sqnr(a, torch.tensor([3.0, 4.5])) == 20.0
    assert fq.sqnr(a, a.bfloat16()) == math.inf
    assert fq.sqnr(torch.zeros(3), torch.zeros(3)) == math.inf
    assert fq.sqnr(a, 2 * a) == 0.0
    assert fq.sqnr(torch.zeros(2), a) == -math.inf
    w = torch.randn(32, 256)
    q = fq.quantize(w, I8)
    want = 20 * math.log10(float(w.double().norm() / (w.double() - fq.dequantize(q).double()).norm()))
    assert fq.sqnr(w, q) == pytest.approx(want, abs=1e-9)
    assert fq.sqnr(q, fq.dequantize(q)) == math.inf
    with pytest.raises(ValueError, match=r"shapes \(2,\) and \(1, 2\) differ"):
        fq.sqnr(a, a.reshape(1, 2))


def test_summary_counts_bytes_bits_and_errors():
    w, bias = torch.randn(16, 64), torch.randn(16).bfloat16()
    params = {"a": w, "tied": w.detach(), "b": w + 1, "bias": bias, "f": w, "g": w.detach()}
    q = fq.quantize_params(params, {"a": I8, "tied": I8, "b": I4, "bias": None, "f": None, "g": None})
    out = fq.summary(q, params)
    rows = {r.name: r for r in out.rows}
    assert list(rows) == list(params)
    assert [r.nbytes for r in out.rows] == [16 * 64 + 64, 0, 16 * 32 + 2 * 16 * 2 * 4, 32, w.nbytes, 0]
    assert [r.bits for r in out.rows] == [8.5, 0.0, 6.0, 16.0, 32.0, 0.0]
    assert [r.layout for r in out.rows] == ["int8", "int8", "int4:g32", "bfloat16", "float32", "float32"]
    assert out.nbytes == sum(r.nbytes for r in out.rows)
    assert out.bits == pytest.approx(out.nbytes * 8 / (3 * w.numel() + 16))
    for name in ("a", "tied", "b"):
        assert rows[name].sqnr == fq.sqnr(params[name], q[name])
        error = (params[name] - fq.dequantize(q[name])).abs().max()
        assert rows[name].max_error == float(error) > 0
    assert rows["f"].sqnr is rows["f"].max_error is None
    assert [r.sqnr for r in fq.summary(q).rows] == [None] * 6
    with pytest.raises(KeyError, match="the reference has no 'b'"):
        fq.summary(q, {"a": w, "tied": w})


def test_summary_prints_its_rows_and_the_total():
    w = torch.randn(1000, 500)
    q = fq.quantize_params({"w": w}, I8)
    lines = [line.split() for line in str(fq.summary(q, {"w": w})).splitlines()]
    row = fq.summary(q, {"w": w}).rows[0]
    assert lines[1] == ["w", "1000×500", "int8", "0.504", "8.06", f"{row.sqnr:.2f}", f"{row.max_error:.3g}"]
    assert lines[2] == ["total", "0.504", "8.06"]
    empty = fq.summary({})
    assert (empty.nbytes, empty.bits, empty.rows) == (0, 0.0, ())


def test_summary_of_a_tree_on_meta_has_bytes_and_no_errors():
    w: Tensor = torch.empty(16, 64, device="meta")
    q = fq.quantize_params({"w": w}, fq.plan({"w": w}, I4))
    row = fq.summary(q, {"w": w}).rows[0]
    assert (row.nbytes, row.sqnr) == (16 * 32 + 2 * 16 * 2 * 4, None)
