"""A QTensor looks like a tensor, prints safely, moves, copies, pickles, and is a node of every pytree."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
import time
from collections import namedtuple
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import optree
import pytest
import torch
import torch.utils._pytree as pytree
from laws import FORMATS, Q4_K, along, holds, identical, information, is_sound, quantized, same, with_children
from torch._subclasses.fake_tensor import FakeTensorMode

import fq

ROOT = Path(__file__).resolve().parents[1]
AXES = (-1, -2)


# --- what it looks like ---


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("text", FORMATS)
def test_it_answers_as_the_tensor_it_stands_for(text, axis):
    for stored in ((13,), (5, 13), (2, 5, 13), (2, 1, 5, 13)):
        q = quantized(text, *along(axis, *stored), axis=-1 if len(stored) == 1 else axis).to(torch.bfloat16)
        dense = fq.dequantize(q)
        for name in ("shape", "ndim", "dtype", "device", "is_meta", "requires_grad"):
            assert getattr(q, name) == getattr(dense, name), name
        assert (q.size(), q.dim(), q.numel(), len(q)) == (
            dense.size(),
            dense.dim(),
            dense.numel(),
            len(dense),
        )
        assert [q.size(d) for d in range(-q.ndim, q.ndim)] == [dense.size(d) for d in range(-q.ndim, q.ndim)]
        assert q.is_floating_point()
        is_sound(q)


def test_nbytes_is_the_information_rounded_up_by_row():
    for text, shape, want in (
        ("int4:g32", (4, 64), 4 * 32 + 2 * (4 * 2 * 4)),  # codes; scales and zero points in float32
        ("int4:g32:sym", (4, 63), 4 * 32 + 4 * 2 * 4),
        ("int3:g8", (5, 13), 5 * 5 + 5 * 2 * 4),  # 39 bits are 5 bytes
        ("int8:tensor", (7, 9), 63 + 4),
        ("mxfp4", (3, 64), 3 * 32 + 3 * 2),
        ("nvfp4", (2, 3, 32), 2 * (3 * 16 + 3 * 2 + 4)),
        (
            Q4_K,
            (2, 64),
            2 * (32 + (6 + 4) + (6 + 8)),
        ),  # 8 scales in 6 bits under 2 halves, 8 zeros under 2 floats
    ):
        q = quantized(text, *shape)
        assert q.nbytes == want, text
        assert information(q) == want, text
    q = with_children("int8", 4, 16)
    assert q.nbytes == 64 + 16 + 4 + 64 + 128


def test_it_is_frozen_and_equal_to_itself_only():
    q = quantized("int8", 4, 8)
    other = q.clone()
    assert q == q
    assert q != other
    assert len({q, other, q}) == 2
    with pytest.raises(FrozenInstanceError):
        q.data = other.data


def test_requires_grad_is_that_of_any_child():
    q = quantized("nvfp4", 4, 16)
    outer = q.scale.scale.clone().requires_grad_()
    assert not q.requires_grad
    assert replace(q, scale=replace(q.scale, scale=outer)).requires_grad
    assert not replace(q, scale=replace(q.scale, scale=outer)).detach().requires_grad


# --- repr ---


def test_case_N5_repr_is_short_instant_and_never_raises():
    big = fq.QTensor(
        torch.zeros(4096, 2048, dtype=torch.uint8),
        torch.ones(4096, 32),
        fq.int4(128),
        torch.bfloat16,
        (4096,),
        torch.ones(4096, 32),
    )
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        text = repr(big)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.01  # dequantizing it takes a hundred times as long
    for part in ("(4096, 4096)", "int4", "bfloat16", str(4096 * 2048 + 2 * 4 * 4096 * 32), "cpu"):
        assert part in text
    shown = [
        text,
        str(big),
        f"{big}",
        repr(big.to("meta")),
        repr([big]),
        repr(quantized(Q4_K, 2, 3, 64, axis=-2)),
    ]
    assert "meta" in shown[3]
    with FakeTensorMode():
        shown.append(repr(fq.quantize(torch.empty(64, 64), fq.nvfp4())))
        assert "(64, 64), nvfp4" in shown[-1]

    def inside(q):
        shown.append(repr(q))
        return fq.dequantize(q).sum()

    q = quantized("nvfp4", 3, 4, 32)
    torch.vmap(inside)(q)
    assert "QTensor((4, 32), nvfp4" in shown[-1]
    torch.func.grad(lambda s: inside(replace(q, scale=replace(q.scale, scale=s))))(q.scale.scale)
    torch.func.vmap(torch.func.grad(lambda s, q: inside(replace(q, scale=replace(q.scale, scale=s)))))(
        q.scale.scale, q
    )
    broken = replace(q, data=None)
    shown += [repr(broken), repr(replace(q, layout=None)), repr(with_children("int4:g8", 2, 16))]
    assert "pre_scale" in shown[-1]
    assert "AttributeError" in repr(broken)
    assert all(len(s) < 400 and "QTensor(" in s for s in shown), max(shown, key=len)


# --- moving and copying ---


@pytest.mark.parametrize("text", ["int8", "int4:g8", "nvfp4", Q4_K])
def test_to_moves_every_child_and_changes_what_it_stands_for(text):
    q = quantized(text, 2, 5, 13)
    meta = q.to("meta")
    assert meta.is_meta
    assert all(t.is_meta for t in pytree.tree_leaves(meta))
    assert (meta.shape, meta.dtype, meta.nbytes, meta.layout) == (q.shape, q.dtype, q.nbytes, q.layout)
    assert meta[1:].mT.shape == (1, 13, 5)
    assert fq.dequantize(meta).shape == (2, 5, 13)
    half = q.to(torch.bfloat16)
    assert half.dtype == torch.bfloat16
    assert all(a is b for a, b in zip(pytree.tree_leaves(half), pytree.tree_leaves(q), strict=True))
    same(fq.dequantize(half), fq.dequantize(q).to(torch.bfloat16))
    for args in (
        ("meta", torch.float16),
        (torch.device("meta"),),
        (torch.empty(1, device="meta", dtype=torch.float16),),
    ):
        moved = q.to(*args)
        assert moved.is_meta
        assert moved.dtype == (
            torch.float32 if len(args) == 1 and isinstance(args[0], torch.device) else torch.float16
        )
    assert all(a is b for a, b in zip(pytree.tree_leaves(q.cpu()), pytree.tree_leaves(q), strict=True))
    apart = q.to("cpu", copy=True)
    identical(apart, q)
    assert apart.data.data_ptr() != q.data.data_ptr()
    for wrong in (torch.int8, torch.float8_e4m3fn, torch.complex64):
        with pytest.raises(TypeError, match="expected a float dtype that it can stand for"):
            q.to(wrong)


COPIES = {
    "clone": lambda q: q.clone(),
    "deepcopy": copy.deepcopy,
    "pickle": lambda q: pickle.loads(pickle.dumps(q)),
    "unflatten": lambda q: pytree.tree_map(torch.clone, q),
}


@pytest.mark.parametrize("copied", COPIES)
@pytest.mark.parametrize("axis", AXES)
def test_case_N4_copies_are_equal_and_share_nothing(copied, axis):
    for text in FORMATS:
        tree = {"a": quantized(text, 3, 24, axis=axis), "b": [with_children(text, 2, 4, 16, axis=axis)]}
        twin = pytree.tree_map(lambda q: COPIES[copied](q), tree, is_leaf=lambda t: isinstance(t, fq.QTensor))
        for q, other in ((tree["a"], twin["a"]), (tree["b"][0], twin["b"][0])):
            identical(q, other)
            assert other.layout is q.layout or other.layout == q.layout
            for a, b in zip(pytree.tree_leaves(q), pytree.tree_leaves(other), strict=True):
                assert a.data_ptr() != b.data_ptr()
    whole = copy.deepcopy(tree)
    identical(whole["b"][0], tree["b"][0])


def test_case_N4_shallow_copies_views_and_shared_memory():
    q = quantized("nvfp4", 3, 24)
    assert copy.copy(q).data.data_ptr() == q.data.data_ptr()
    identical(copy.copy(q), q)
    assert q.detach().data.data_ptr() == q.data.data_ptr()
    assert q.contiguous().data is q.data
    assert copy.deepcopy(q.to("meta")).is_meta
    assert q.share_memory_() is q
    assert all(t.is_shared() for t in pytree.tree_leaves(q))
    turned = pytree.tree_map(lambda t: t.mT.contiguous().mT, quantized("int8", 3, 24))
    assert not turned.is_contiguous()
    assert turned.contiguous().is_contiguous()
    identical(turned.contiguous(), turned)


def test_a_saved_tree_loads_with_weights_only_where_only_fq_is_imported(tmp_path):
    tree = {text: quantized(text, 3, 24) for text in FORMATS}
    tree |= {"children": with_children("int4:g8", 2, 4, 16, axis=-2), "plain": torch.ones(3)}
    tree["act"] = fq.quantize(torch.randn(4, 16), fq.int8(act=fq.int8()), input_scale=0.5)
    torch.save(tree, tmp_path / "tree.pt")
    torch.save({k: fq.dequantize(v) for k, v in tree.items() if k != "plain"}, tmp_path / "dense.pt")
    code = f"""
import fq
import torch
tree, dense = (torch.load({str(tmp_path)!r} + name, weights_only=True) for name in ("/tree.pt", "/dense.pt"))
for name, want in dense.items():
    q = tree[name]
    assert type(q) is fq.QTensor and q.layout is fq.layout(q.layout.key), name
    assert torch.equal(fq.dequantize(q), want), name
assert tree["act"].input_scale.item() == 0.5 and tree["act"].layout.act == fq.int8()
print(len(dense))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == len(FORMATS) + 2


# --- pytrees ---


@pytest.mark.parametrize("text", FORMATS)
def test_flatten_and_unflatten_keep_everything(text):
    for q in (quantized(text, 2, 4, 16), with_children(text, 3, 16, axis=-2), quantized(text, 13)):
        leaves, spec = pytree.tree_flatten({"w": q})
        assert all(isinstance(t, torch.Tensor) for t in leaves)
        identical(pytree.tree_unflatten(leaves, spec)["w"], q)
        assert spec == pytree.tree_structure({"w": q.clone()})
        assert hash(spec) == hash(pytree.tree_structure({"w": q.clone()}))
        restored = pytree.treespec_loads(pytree.treespec_dumps(spec))
        assert restored == spec
        identical(pytree.tree_unflatten(leaves, restored)["w"], q)
        json.loads(pytree.treespec_dumps(spec))
        paths = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path({"w": q})[0]]
        assert paths[0] == "['w'].data"
        assert "['w'].scale" in paths or "['w'].scale.data" in paths
        assert len(paths) == len(leaves)


def test_treespecs_differ_where_the_meaning_does():
    q = quantized("int8", 4, 16)
    others = [
        quantized("int8", 4, 16, axis=-2),
        q.to(torch.bfloat16),
        q[:, :8],
        quantized("int8:tensor", 4, 16),
        replace(q, input_scale=torch.ones(1, 1)),
        replace(q, layout=fq.int8(act=fq.int8())),
    ]
    specs = [pytree.tree_structure(o) for o in (q, *others)]
    assert all(a != b for i, a in enumerate(specs) for b in specs[:i])
    rules = [fq.quantize(torch.randn(4, 16), fq.int8(rule=rule)) for rule in ("absmax", "absmax_narrow")]
    assert pytree.tree_structure(rules[0]) == pytree.tree_structure(
        rules[1]
    )  # how numbers were chosen is gone
    assert pytree.tree_structure(q) == pytree.tree_structure(quantized("int8", 7, 16))  # rows are in the data


def test_optree_sees_the_same_leaves_in_any_namespace():
    tree = {"w": quantized("nvfp4", 4, 32), "v": [quantized("int4:g8", 2, 16, axis=-2), torch.ones(2)]}
    for namespace in ("", "torch", "somebody_else"):
        leaves, spec = optree.tree_flatten(tree, namespace=namespace)
        assert len(leaves) == 7
        back = optree.tree_unflatten(spec, leaves)
        identical(back["w"], tree["w"])
        identical(back["v"][0], tree["v"][0])
        assert spec == optree.tree_structure(tree, namespace=namespace)
    assert [a.codify("t") for a in optree.tree_accessors({"w": tree["w"]})] == [
        "t['w'].data",
        "t['w'].scale.data",
        "t['w'].scale.scale",
    ]
    assert optree.tree_structure(tree["w"]) != optree.tree_structure(tree["w"].to(torch.bfloat16))


Pair = namedtuple("Pair", "first second")


def test_the_two_pytrees_agree_on_a_leafs_children():
    q = with_children(Q4_K, 2, 4, 64)
    for a, b in zip(pytree.tree_leaves(Pair(q, q)), optree.tree_leaves(Pair(q, q)), strict=True):
        assert a is b


# --- an already quantized weight ---


def test_case_Q3_quantizing_twice_is_refused_and_shapes_stay_logical():
    x = torch.randn(2048, 2048)
    q = fq.quantize(x, fq.nvfp4())
    assert q.data.shape == (2048, 1024)
    assert (q.shape, q.numel(), q.size(-1)) == ((2048, 2048), 2048 * 2048, 2048)
    assert q.scale.shape == (2048, 128)
    with pytest.raises(TypeError, match="got a QTensor.*use fq.requantize"):
        fq.quantize(q, fq.nvfp4())
    small = {"w": x[:16, :64], "b": x[0]}
    once = fq.quantize_params(small, fq.nvfp4())
    with pytest.raises(ValueError, match="w is already quantized"):
        fq.quantize_params(once, fq.nvfp4())


# --- stacks ---


def test_case_J2_packing_a_stack_is_packing_each_matrix():
    for shape, bits in (((4, 8, 24), 4), ((2, 3, 8, 10), 3)):
        codes = torch.randint(0, 1 << bits, shape)
        packed = fq.pack_bits(codes, bits)
        flat = codes.flatten(0, -3)
        each = torch.stack([fq.pack_bits(c, bits) for c in flat]).reshape(packed.shape)
        assert torch.equal(packed, each)
        assert torch.equal(torch.vmap(lambda c, b=bits: fq.pack_bits(c, b))(codes), packed)
        assert torch.equal(fq.unpack_bits(packed, bits, shape[-1]), codes.to(torch.uint8))
        assert torch.equal(
            torch.vmap(lambda p, b=bits, n=shape[-1]: fq.unpack_bits(p, b, n))(packed), codes.to(torch.uint8)
        )
    x = torch.randn(5, 8, 24)
    for text in FORMATS:
        layout = fq.layout(text)
        whole = fq.quantize(x, layout)
        each = [fq.quantize(m, layout) for m in x]
        assert whole.scale.shape[0] == 5
        identical(whole, fq.stack(each))
        identical(whole, torch.vmap(lambda m, layout=layout: fq.quantize(m, layout))(x))
        assert holds(lambda t: t[3], whole)
        identical(whole[3], each[3])
