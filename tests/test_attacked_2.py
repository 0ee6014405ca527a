"""Faults that an attack on every preset, rule and searched scale found: each kind once, by value."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.utils._pytree as pytree
from formats import assert_same

import fq
from fq import slices

NESTED_ROWS = "e2m1:g16:scale=(fp8:row):four_over_six"


@pytest.mark.parametrize("key", ["nvfp4:four_over_six", "nvfp4:mse", NESTED_ROWS])
def test_searches_under_outer_scales_that_another_vmap_maps(key):
    layout, x, outer = fq.layout(key), torch.randn(3, 4, 40), torch.tensor([0.002, 0.02, 0.005])

    def quantize(t, s):
        return fq.quantize(t, layout, outer_scale=s)

    want = fq.stack([fq.stack([quantize(t, s) for t in x]) for s in outer])
    both = torch.vmap(torch.vmap(quantize, in_dims=(0, None)), in_dims=(None, 0))(x, outer)
    assert_same(both, want)
    assert_same(torch.vmap(quantize, in_dims=(None, 0))(x, outer), want)
    swapped = torch.vmap(torch.vmap(quantize, in_dims=(None, 0)), in_dims=(0, None))(x, outer)
    assert_same(swapped, pytree.tree_map(lambda t: t.transpose(0, 1), want))


@pytest.mark.parametrize("key", ["int8:tensor:absmax_full", "int8:block-1x4:absmax_full", "uint4:block-1x4"])
def test_the_sign_of_zeros_does_not_depend_on_the_order_of_comparing(key):
    layout, x = fq.layout(key), torch.zeros(37, 40)
    x[::2, ::3] = -0.0
    want = fq.quantize(x, layout)
    assert_same(fq.quantize(-x, layout), want)
    assert_same(fq.quantize(x.flip(0), layout), replace(want, data=want.data.flip(0)))


@pytest.mark.parametrize(
    "key",
    [
        "int8:tensor:absmax_full",
        "nvfp4:scale=(mxfp8:tensor)",
        "e2m1:g16:scale=(fp8:tensor:scale=float16)",
        "int4:g8:sym:scale=(int8:tensor:absmax_full):absmax_full",
        "int4:g8:sym:scale=(int8:tensor:sym):absmax_full",
    ],
)
@pytest.mark.parametrize("axis", [-1, -2])
def test_donated_tensors_get_the_same_bits_under_every_outer_scale(key, axis, monkeypatch):
    monkeypatch.setattr(slices, "LARGE", 1)
    layout = replace(fq.layout(key), axis=axis)
    x = torch.randn(37, 40)
    x[20, 3] = -9.0  # the extreme of largest magnitude is negative
    for value in (x, x.half(), -0.0 * x, 1e-44 * x, torch.randn(2, 19, 17)):
        want = fq.quantize_params({"w": value}, {"w": layout})["w"]
        assert_same(fq.quantize_params({"w": value}, {"w": layout}, donate=True)["w"], want)


def test_parts_of_a_layout_of_the_wrong_kind_are_type_errors_that_name_them():
    part = {"element": fq.int8().element, "block": (1, -1)}
    for name, value in (
        ("scale", [1]),
        ("scale", 3),
        ("scale", None),
        ("axis", -1.0),
        ("axis", True),
        ("rule", ["mse"]),
        ("storage", None),
        ("zero_point", []),
    ):
        with pytest.raises(TypeError, match=f"{name}.*got"):
            fq.Layout(**part, **{name: value})
    for preset, flag in ((fq.int4, "symmetric"), (fq.nf4, "double_quant")):
        with pytest.raises(TypeError, match=f"{flag}: expected True or False, got 'no'"):
            preset(**{flag: "no"})
    for flag in ("symmetric", "signed"):
        with pytest.raises(TypeError, match=f"{flag}: expected True or False, got 0"):
            fq.intx(4, **{flag: 0})


def test_a_preset_takes_elements_of_its_own_width_only():
    for preset, element in ((fq.fp8, "e2m1"), (fq.mxfp6, "e4m3"), (fq.mxfp6, "e2m1"), (fq.mxfp8, "e3m2")):
        with pytest.raises(ValueError, match=f"{preset.__name__}: .* bits, got '{element}'; fq.layout takes"):
            preset(element=element)
    assert fq.fp8(element="ue4m3").element.bits == 7


def test_numbers_in_texts_are_plain_and_of_a_sane_length():
    for text in (
        "e٣m٣",
        "lut(1.2.3)",
        "lut(-)",
        "int8:g" + 5000 * "9",
        "e4m3b" + 5000 * "9",
        1000 * "int8:scale=(" + "int8" + 1000 * ")",
    ):
        with pytest.raises(ValueError, match=r"unknown name|unknown option|nested too deeply"):
            fq.layout(text)
    assert fq.layout("lut(-1,.5,2e0)").key == "lut(-1.0,0.5,2.0)"


def test_a_scale_given_as_bytes_is_refused_and_as_e8m0_is_exact():
    x = torch.randn(4, 64)
    q = fq.quantize(x, fq.mxfp4())
    with pytest.raises(TypeError, match=r"scale must be floats, got torch.uint8; .*float8_e8m0fnu"):
        fq.quantize(x, fq.mxfp4(), scale=q.scale)
    assert_same(fq.quantize(x, fq.mxfp4(), scale=q.scale.view(torch.float8_e8m0fnu)), q)


def test_a_static_scale_of_activations_with_zero_points_is_refused_at_once():
    w = torch.randn(8, 64)
    for key in ("int8@uint8:token", "int4:g32@int4:g32"):
        with pytest.raises(ValueError, match=r"have zero points, which a static scale lacks; leave"):
            fq.quantize(w, fq.layout(key), input_scale=0.05)
    q, x = fq.quantize(w, fq.layout("int8@uint8:token")), torch.rand(5, 64)
    want = fq.dequantize(fq.quantize(x, fq.layout("uint8:token"))) @ fq.dequantize(q).T
    torch.testing.assert_close(fq.linear(x, q), want, rtol=1e-5, atol=1e-5)


def test_plain_tuples_that_do_not_fit_their_layout_say_so():
    x, w = torch.randn(5, 64), torch.randn(16, 64)
    q, n = fq.quantize(w, fq.fp8()), fq.quantize(w, fq.nvfp4())
    assert torch.equal(fq.fp8_matmul(x, (q.data, q.scale), layout=fq.fp8()), fq.linear(x, q))
    nested = (n.data, (n.scale.data, n.scale.scale))
    assert torch.equal(fq.nvfp4_matmul(x, nested, layout=fq.nvfp4()), fq.linear(x, n))
    for parts, message in (
        ((q.data[0], q.scale[0]), "data of shape"),
        ((None, q.scale), "data of shape"),
        ((q.data, (q.data, q.scale)), "only nested scales of fp8 are tuples"),
        ((q.data, None), "needs a scale"),
    ):
        with pytest.raises(ValueError, match=f"fp8_matmul: .*{message}"):
            fq.fp8_matmul(x, parts, layout=fq.fp8())
    with pytest.raises(ValueError, match="data of shape"):
        fq.fp8_matmul(torch.tensor(1.0), (q.data, q.scale), layout=fq.fp8())
    with pytest.raises(ValueError, match="nvfp4_matmul: only nested"):
        fq.nvfp4_matmul(x, (n.data, (n.scale.data,)), layout=fq.nvfp4())


def test_what_is_no_module_and_no_dict_is_named():
    q, net = fq.quantize(torch.randn(8, 64), fq.int8()), torch.nn.Linear(64, 8)
    for call, what in (
        (lambda: fq.functional_call({"weight": q}, net, torch.ones(1, 64)), "functional_call: .*got dict"),
        (lambda: fq.attach({"weight": q}, net), "attach: .*got dict"),
        (lambda: fq.bind({"weight": q}, net).__enter__(), "bind: .*got dict"),
        (lambda: fq.bind(net, None).__enter__(), "bind: expected a dict .*got NoneType"),
        (lambda: fq.dequantize_params([q]), "dequantize_params: expected a dict"),
        (lambda: fq.tree_to({"w": 3}, "cpu"), "tree_to: w must be a tensor"),
        (lambda: fq.summary({"w": 3}), "summary: w must be a tensor"),
        (lambda: fq.partition(q, lambda n, v: True), "partition: expected a dict"),
        (lambda: fq.combine({}, [q]), "combine: expected a dict"),
        (lambda: fq.tree_stack(q), "tree_stack: expected a list"),
    ):
        with pytest.raises(TypeError, match=what):
            call()
    assert net(torch.ones(1, 64)).shape == (1, 8) and list(dict(net.named_parameters())) == ["weight", "bias"]


def test_wrong_arguments_are_named_by_the_function_that_got_them():
    x, q = torch.randn(4, 64), fq.quantize(torch.randn(8, 64), fq.int8())
    for call, message in (
        (lambda: fq.explain(fq.linear, q, x), r"fq.explain\(fq.linear, x, q\), got \(QTensor, Tensor\)"),
        (lambda: fq.explain(fq.dequantize), r"fq.explain\(fq.dequantize, q\), got \(\)"),
        (lambda: fq.explain(fq.matmul, x, x), "explain: expected"),
        (lambda: fq.sqnr(x, 3), "sqnr: expected real tensors or QTensors, got int"),
        (lambda: fq.linear(x, q, backend=["aten"]), r"backend: expected a name, got \['aten'\]"),
        (lambda: fq.use_backend(["aten"]).__enter__(), "backend: expected a name"),
        (lambda: q.split(1.5), "split: expected ints, got 1.5"),
        (lambda: q.chunk(None), "chunk: expected ints"),
        (lambda: q.narrow(0, 0, 2.0), "narrow: expected ints"),
        (lambda: q.transpose("a", 0), "dimension: expected an int, got 'a'"),
        (lambda: fq.cat(q), "cat: expected a list of QTensors, got QTensor"),
        (lambda: fq.stack(iter([q])), "stack: expected a list"),
    ):
        with pytest.raises(TypeError, match=message):
            call()
    for size in (0, -1):
        with pytest.raises(ValueError, match=f"split: expected pieces of at least one, got {size}"):
            q.split(size)
    assert fq.explain(fq.matmul, q, x.T).count("<- auto") == 1


def test_signed_scales_are_not_quantized_to_elements_of_one_sign():
    for key in ("int4:g8:sym:scale=(uint8:sym):absmax_full", "int4:g8:sym:scale=(ue4m3):absmax_full"):
        with pytest.raises(ValueError, match="absmax_full' makes signed scales, which u.* cannot hold"):
            fq.layout(key)
    for key in ("int4:g8:sym:scale=(int1:sym)", "int4:g8:sym:scale=(lut(-1.0,0.0):row)"):
        with pytest.raises(ValueError, match="scales are positive, and .* has no positive number"):
            fq.layout(key)
    x = torch.randn(16, 256)
    assert fq.sqnr(x, fq.quantize(x, fq.layout("int4:g8:sym:scale=(int8:sym):absmax_full"))) > 23


def test_floats_without_positive_numbers_are_refused_and_eps_is_the_step_above_one():
    for name in ("e1m0fn", "e1m0ieee"):
        with pytest.raises(ValueError, match="2 bits have no positive number beside '(fn|ieee)' codes"):
            fq.layout(f"{name}:g8")
    for name in ("e1m1", "e1m2", "e2m1", "e4m3", "ue5m3"):
        layout = fq.layout(name)
        codes = torch.arange(1 << layout.element.bits).to(torch.uint8).view(layout.element.storage_dtype)
        values = layout.element.decode(codes)
        assert layout.element.eps == float(values[values > 1].min()) - 1
