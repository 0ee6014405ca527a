"""plan: which parameter gets which layout, why the others are kept, and what it all weighs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fq

I8, I4 = fq.int8(), fq.int4(group_size=32)


class Model(nn.Module):
    """One of each kind of parameter that a role is told by."""

    def __init__(self, tie: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 64)
        self.conv = nn.Conv2d(3, 8, 3)
        self.attention = nn.MultiheadAttention(64, 2)
        self.norm = nn.LayerNorm((2, 64))
        self.up = nn.Linear(64, 96)
        self.gate = nn.Linear(64, 4, bias=False)
        self.out = nn.Linear(64, 40, bias=False)
        if tie:
            self.out.weight = self.embed.weight


def weights(*names: str, shape: tuple[int, ...] = (8, 64)) -> dict[str, Tensor]:
    return {name: torch.randn(shape) for name in names}


def layouts(plan) -> dict[str, str | None]:
    return {e.name: None if e.layout is None else e.layout.key for e in plan}


# --- policies ---


def test_a_layout_is_for_every_matmul_weight():
    params = {**weights("a.weight", "b.weight"), "a.bias": torch.randn(8), "s": torch.tensor(1.0)}
    plan = fq.plan(params, I8)
    assert layouts(plan) == {"a.weight": "int8", "b.weight": "int8", "a.bias": None, "s": None}
    assert plan.quantized == ("a.weight", "b.weight") and len(plan) == 4
    assert (plan["a.bias"].reason, plan["s"].reason) == ("1-dimensional", "0-dimensional")
    with pytest.raises(KeyError, match="no parameter 'c'"):
        plan["c"]


def test_the_first_matching_pattern_wins():
    params = weights("layers.0.mlp.up", "layers.0.mlp.down", "layers.1.mlp.up", "other")
    plan = fq.plan(params, {"layers.0.mlp.up": I4, "layers.1": None, "re:.*mlp.*": I8})
    assert list(layouts(plan).values()) == ["int4:g32", "int8", None, None]
    assert [e.reason for e in plan] == [
        "pattern 'layers.0.mlp.up'",
        "pattern 're:.*mlp.*'",
        "pattern 'layers.1' keeps it",
        "no pattern matches",
    ]


def test_a_function_decides_from_name_and_tensor():
    params = {**weights("a", "b"), "bias": torch.randn(8)}
    given = []

    def policy(name, value):
        given.append((name, value is params[name]))
        return None if name == "b" else I8

    plan = fq.plan(params, policy)
    assert given == [("a", True), ("b", True), ("bias", True)]
    assert layouts(plan) == {"a": "int8", "b": None, "bias": None}
    assert plan["b"].reason == "policy function keeps it"
    assert plan["bias"].reason.startswith("1-dimensional; only")


def test_case_O1_names_match_by_whole_components():
    names = [f"layers.{i}.mlp.{n}" for i in (0, 1, 10) for n in ("gate", "gate_proj", "gate_up_proj")]
    plan = fq.plan(weights(*names), {"layers.0.mlp.gate": None, "layers.1": None, "re:.*": I8})
    kept = [e.name for e in plan if e.layout is None]
    assert kept == ["layers.0.mlp.gate", *(n for n in names if n.startswith("layers.1."))]
    assert all(e.layout == I8 for e in plan if e.name not in kept)
    inner = fq.plan(weights("a.mlp.gate.w", "mlp.gate_proj.w", "amlp.gate.w"), {"mlp.gate": I8})
    assert inner.quantized == ("a.mlp.gate.w",)


def test_case_O2_regular_expressions_match_whole_names():
    names = [f"model.layers.{i}.w" for i in range(21)]
    params = weights("lm_head.weight", "my_lm_head_2", "vision_tower.x", "a.vision_tower.x", *names)
    skip = {r"re:.*lm_head.*": None, "re:vision_tower.*": None, r"re:model.layers.([0-9])\..*$": None}
    plan = fq.plan(params, {**skip, "re:.*": I8})
    assert plan.quantized == ("a.vision_tower.x", *names[10:])
    matched = {p: [e.name for e in plan if e.reason == f"pattern {p!r} keeps it"] for p in skip}
    assert list(matched.values()) == [["lm_head.weight", "my_lm_head_2"], ["vision_tower.x"], names[:10]]
    # any other character makes a pattern a regular expression, and a substring is no match
    assert fq.plan(params, {r".*\.1\d\.w": I8}).quantized == (tuple(names[10:20]))
    with pytest.raises(ValueError, match=r"match nothing: 're:lm_head', 'lm_hea'$"):
        fq.plan(params, {"re:lm_head": None, "lm_hea": I8, "re:.*": I8})


def test_a_pattern_behind_others_that_take_all_of_its_names_is_an_error():
    with pytest.raises(ValueError, match="earlier patterns match all that these do: 'lm_head'; move them up"):
        fq.plan(weights("lm_head.weight", "a"), {"re:.*": I8, "lm_head": None})


def test_a_vector_is_quantized_by_its_whole_name_only():
    params = {"a.bias": torch.randn(64), "b.bias": torch.randn(64)}
    plan = fq.plan(params, {"a.bias": I4, "bias": I4})
    assert layouts(plan) == {"a.bias": "int4:g32", "b.bias": None}
    assert plan["b.bias"].reason == "1-dimensional; only its whole name quantizes it"
    out = fq.quantize_params(params, plan)
    assert out["b.bias"] is params["b.bias"]
    assert torch.equal(fq.dequantize(out["a.bias"]), fq.dequantize(fq.quantize(params["a.bias"], I4)))
    assert plan["a.bias"].bytes_after == out["a.bias"].nbytes


@pytest.mark.parametrize(
    ("params", "policy", "error", "message"),
    [
        ({"w": 3}, I8, TypeError, "w must be a tensor, got int"),
        ([1], I8, TypeError, "expected a module or a dict of name -> tensor, got list"),
        (
            {},
            "int8",
            TypeError,
            "a policy is a Layout, a dict of pattern -> Layout or a function, got 'int8'",
        ),
        ({}, {"w": "int8"}, TypeError, "pattern -> Layout or None, got 'w': 'int8'"),
        ({}, {3: I8}, TypeError, "pattern -> Layout or None, got 3"),
        ({"w": torch.ones(2, 2)}, lambda n, v: "int8", TypeError, "returned 'int8' for w"),
        ({}, {"*.weight": I8}, ValueError, r"'\*.weight' is no regular expression: nothing to repeat"),
        ({"s": torch.tensor(1.0)}, {"s": I8}, ValueError, "s: a tensor without dimensions"),
        (
            {
                "a": torch.ones(2, 2).int(),
                "b": torch.ones(2, 2),
                "c": torch.ones(2, 2).to(torch.float8_e4m3fn),
            },
            {"re:.": I8},
            TypeError,
            "a is torch.int32, c is torch.float8_e4m3fn; only tensors of 16-bit floats",
        ),
    ],
)
def test_wrong_kinds_and_values_are_named(params, policy, error, message):
    with pytest.raises(error, match=message):
        fq.plan(params, policy)


def test_a_layout_leaves_integers_and_float8_codes_alone():
    params = {"ids": torch.zeros(1, 8, dtype=torch.int64), "w": torch.ones(2, 4).to(torch.float8_e5m2)}
    plan = fq.plan({**params, **weights("a")}, I8)
    assert plan.quantized == ("a",)
    assert plan["ids"].reason == "torch.int64 is no float to quantize"
    assert plan["w"].reason == "torch.float8_e5m2 is no float to quantize"
    assert plan["ids"].bytes_after == 64


def test_case_Q3_quantizing_a_tree_twice_names_every_leaf_and_the_way_out():
    once = fq.quantize_params({**weights("a", "b"), "bias": torch.randn(8)}, {"a": I8, "b": I4})
    with pytest.raises(
        ValueError, match=r"a is already quantized \(int8\), b is .*\(int4:g32\); use fq.requantize"
    ):
        fq.quantize_params(once, I8)
    kept = fq.plan({**once, **weights("c")}, {"c": I8})
    assert kept.quantized == ("c",)
    assert kept["a"].reason == "already quantized (int8)"
    assert (kept["a"].bytes_before, kept["a"].bytes_after) == (once["a"].nbytes, once["a"].nbytes)
    assert kept["a"].shape == (8, 64)


# --- roles ---


def test_roles_come_from_module_types():
    plan = fq.plan(Model(), I8)
    roles = {e.name: e.role for e in plan}
    assert roles == {
        "embed.weight": "embedding",
        "conv.weight": "convolution",
        "conv.bias": "vector",
        "attention.in_proj_weight": "matmul",
        "attention.in_proj_bias": "vector",
        "attention.out_proj.weight": "matmul",
        "attention.out_proj.bias": "vector",
        "norm.weight": "LayerNorm",
        "norm.bias": "LayerNorm",
        "up.weight": "matmul",
        "up.bias": "vector",
        "gate.weight": "router",
        "out.weight": "head",
    }
    attention = ("attention.in_proj_weight", "attention.out_proj.weight")
    assert plan.quantized == ("conv.weight", *attention, "up.weight")
    assert plan["conv.weight"].inner == 3
    assert plan["gate.weight"].reason == "router is kept by default"
    assert "guess" not in str(plan)
    assert fq.plan(Model(), {"re:.*gate.*": I8, "out": I8}).quantized == ("gate.weight", "out.weight")


def test_what_a_layout_quantizes_by_default_runs():
    net, x = (
        nn.TransformerEncoderLayer(64, 2, 96, batch_first=True).requires_grad_(False),
        torch.randn(2, 5, 64),
    )
    plan = fq.plan(net.eval(), I8)
    projections = ("self_attn.in_proj_weight", "self_attn.out_proj.weight")
    assert plan.quantized == (*projections, "linear1.weight", "linear2.weight")
    params = fq.quantize_params(dict(net.named_parameters()), plan)
    want = torch.func.functional_call(net, fq.dequantize_params(params), (x,))
    torch.testing.assert_close(fq.functional_call(net, params, (x,)), want, rtol=1e-4, atol=1e-4)


def test_a_head_has_the_shape_of_an_embedding_and_not_only_its_count():
    net = nn.ModuleDict(
        {
            "tokens": nn.Embedding(100, 64),
            "positions": nn.Embedding(64, 64),
            "up": nn.Linear(64, 100, bias=False),
            "square": nn.Linear(64, 64, bias=False),
            "down": nn.Linear(100, 64, bias=False),
            "other": nn.Linear(32, 100, bias=False),
        }
    )
    roles = {e.name: e.role for e in fq.plan(net, I8)}
    assert roles["up.weight"] == "head"
    assert {roles[f"{n}.weight"] for n in ("square", "down", "other")} == {"matmul"}


def test_a_tied_head_is_a_head_whatever_its_size_or_name():
    net = Model(tie=True)
    net.embed.num_embeddings = 41  # the count no longer gives it away
    assert fq.plan(net, I8)["out.weight"].role == "head"
    w = torch.randn(40, 64)
    bare = fq.plan({"out": w.detach(), "wte": w.detach(), "up": w.clone()}, I8)
    assert [e.role for e in bare] == ["head", "embedding", "matmul"]
    assert bare.quantized == ("up",)


def test_roles_of_a_bare_dict_are_printed_as_guesses():
    params = weights("model.embed_tokens.weight", "pos_embedding", "lm_head.weight", "q_proj.weight")
    plan = fq.plan({**params, "norm.weight": torch.ones(64)}, I8)
    assert [e.role for e in plan] == ["embedding", "embedding", "head", "matmul", "vector"]
    rows = str(plan).splitlines()[1:-1]
    assert all(f"{e.role} (guess)" in row and e.reason in row for e, row in zip(plan, rows, strict=True))


def test_case_O6_routers_are_kept_and_other_gates_quantized():
    params = {
        "a.mlp.gate.weight": torch.randn(8, 64),
        "a.mlp.gate_proj.weight": torch.randn(64, 64),
        "b.att.gate.weight": torch.randn(64, 64),
        "b.router.weight": torch.randn(4, 64),
    }
    plan = fq.plan(params, I8)
    assert plan.quantized == ("a.mlp.gate_proj.weight", "b.att.gate.weight")
    assert plan["a.mlp.gate.weight"].reason == plan["b.router.weight"].reason == "router is kept by default"
    assert fq.plan(params, {"re:.*": I8}).quantized == tuple(params)


def test_case_J1_experts_are_quantized_and_every_byte_reported():
    params = {
        "experts.gate_up_proj": torch.randn(4, 128, 64),
        "experts.down_proj": torch.randn(4, 64, 64),
        "q_proj.weight": torch.randn(64, 64).bfloat16(),
        "norm.weight": torch.randn(64),
    }
    plan, out = fq.plan(params, I4), fq.quantize_params(params, I4)
    assert (
        plan.quantized == tuple(params)[:3] == tuple(n for n, v in out.items() if isinstance(v, fq.QTensor))
    )
    assert [e.bytes_before for e in plan] == [v.nbytes for v in params.values()]
    assert [e.bytes_after for e in plan] == [v.nbytes for v in out.values()]


@pytest.mark.parametrize(
    "key", ["int8", "int4:g32", "int3:g32:int-zp", "mxfp4", "nvfp4", "nf4:g64", "int8@int8"]
)
def test_the_table_prints_the_bytes_there_will_be(key):
    params = {"a": torch.randn(300, 1000), "b": torch.randn(3, 70, 1001).bfloat16(), "norm": torch.ones(5000)}
    plan, out = fq.plan(params, fq.layout(key)), fq.quantize_params(params, fq.layout(key))
    cells = [row.split() for row in str(plan).splitlines()]
    for name, value in out.items():
        row = next(c for c in cells if c[0] == name)
        text = "-" if isinstance(value, Tensor) else fq.layout(key).key
        assert row[row.index("(guess)") + 1 :][:3] == [
            text,
            f"{params[name].nbytes / 1e6:.2f}",
            f"{value.nbytes / 1e6:.2f}",
        ]
    after = sum(v.nbytes for v in out.values()) / 1e6
    assert cells[-1][:3] == ["total", f"{sum(v.nbytes for v in params.values()) / 1e6:.2f}", f"{after:.2f}"]
    assert str(plan).endswith("2 of 3 quantized") and repr(plan) == str(plan)


def test_case_M5_no_grad_changes_nothing():
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(64, 96)

        @torch.no_grad()
        def forward(self, x: Tensor) -> Tensor:
            return self.up(x)

    net, x = Frozen(), torch.randn(3, 64)
    params = dict(net.named_parameters())
    want = fq.quantize_params(params, fq.plan(net, I8))
    with torch.no_grad():
        plan = fq.plan(net, I8)
        got = fq.quantize_params(params, plan)
    assert plan.quantized == ("up.weight",)
    assert torch.equal(got["up.weight"].data, want["up.weight"].data)
    assert torch.equal(got["up.weight"].scale, want["up.weight"].scale)
    assert torch.equal(fq.functional_call(net, got, x), fq.linear(x, want["up.weight"], net.up.bias))


# --- ties ---


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_ties_are_told_by_storage_and_view(device):
    w = torch.randn(64, 64, device=device)
    params = {"a": w, "b": w.detach(), "c": w.T, "d": w[:32], "e": w.clone(), "f": w.view(torch.int32)}
    plan = fq.plan(params, {"f": None, "re:.*": I8})
    assert [e.tied_to for e in plan] == [None, "a", None, None, None, None]
    assert plan["b"].reason == "pattern 're:.*'; tied to a"
    assert (plan["b"].bytes_before, plan["b"].bytes_after) == (0, 0)
    out = fq.quantize_params(params, plan)
    assert out["a"] is out["b"] and out["c"] is not out["a"]


def test_case_O4_a_tied_head_has_three_results():
    net = nn.ModuleDict({"embed": nn.Embedding(1000, 64), "lm_head": nn.Linear(64, 1000, bias=False)})
    net["lm_head"].weight = net["embed"].weight
    w = net["embed"].weight
    params = {"embed.weight": w, "lm_head.weight": w}
    q = fq.quantize(w, I4)
    results = {}
    for chosen in (("embed",), ("lm_head",), ("embed", "lm_head")):
        policy = dict.fromkeys(chosen, I4)
        plan = fq.plan(net, policy)
        out = fq.quantize_params(params, plan)
        for name, value in out.items():
            if name.split(".")[0] in chosen:
                assert torch.equal(value.data, q.data) and torch.equal(value.scale, q.scale)
            else:
                assert value is w
        assert sum(e.bytes_before for e in plan) == w.nbytes
        results[chosen] = sum(e.bytes_after for e in plan)
        assert results[chosen] == fq.summary(out).nbytes
    assert list(results.values()) == [q.nbytes + w.nbytes, q.nbytes + w.nbytes, q.nbytes]
    assert out["embed.weight"] is out["lm_head.weight"]
    assert (
        fq.plan(net, {"embed": I4})["lm_head.weight"].reason == "no pattern matches; untied from embed.weight"
    )


def test_names_of_one_storage_share_by_layout():
    w = torch.randn(8, 64)
    params = {n: w.detach() for n in "abcd"}
    plan = fq.plan(params, {"a": I8, "b": I4, "c": I4, "d": I8})
    assert [(e.tied_to, e.untied_from) for e in plan] == [(None, None), (None, "a"), ("b", None), ("a", None)]
    out = fq.quantize_params(params, plan)
    assert out["a"] is out["d"] and out["b"] is out["c"] and out["a"] is not out["b"]
    assert sum(e.bytes_before for e in plan) == w.nbytes
    assert sum(e.bytes_after for e in plan) == out["a"].nbytes + out["b"].nbytes == fq.summary(out).nbytes


def test_a_plan_holds_for_a_dict_with_one_name_of_each_tie_and_for_values_since_untied():
    net = Model(tie=True)
    plan = fq.plan(net, {"embed": I8, "out": I8, "up": I4})
    params = dict(net.named_parameters())
    assert "out.weight" not in params
    assert set(fq.quantize_params(params, plan)) == set(params)
    apart = {**params, "out.weight": torch.randn(40, 64)}
    out = fq.quantize_params(apart, plan)
    assert torch.equal(out["out.weight"].data, fq.quantize(apart["out.weight"], I8).data)
    only = {n: v for n, v in apart.items() if n != "embed.weight"}
    with pytest.raises(KeyError, match=r"not given: embed\.weight"):
        fq.quantize_params(only, plan)


def test_planning_under_transforms_knows_no_ties_and_says_so_by_value():
    w = torch.randn(3, 8, 64)
    seen = []

    def run(w):
        plan = fq.plan({"a": w, "b": w, "c": w + 0}, I8)
        seen.append([e.tied_to for e in plan])
        return fq.quantize_params({"a": w}, I8, check_finite=False)["a"].data

    assert torch.equal(torch.vmap(run)(w), fq.quantize(w, I8).data)
    assert seen == [[None, "a", None]]
