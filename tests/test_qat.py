"""fake_quantize_params and FakeQuantized: training computes, bit for bit, what will be served."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.func import grad, jvp, vmap

import fq
from fq.leaves import FakeQuantized

WEIGHTS = ["int8", "int4:g32", "int4:g32:sym", "mxfp4", "nvfp4", "fp8:block128x128", "int8:axis-2"]
ACTS = ["int4:g32:sym@int8", "mxfp4@mxfp8", "nvfp4@nvfp4", "fp8@fp8", "fp8:block32x32@fp8:g32"]
INTEGERS = ["int8@int8", "int8:tensor@int8:tensor"]  # served by exact integer products


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32))


def own(model: nn.Module) -> dict[str, Tensor]:
    return {k: v.detach() for k, v in model.named_parameters()}


# --- what is trained is what is served ---


@pytest.mark.parametrize("key", [*WEIGHTS, *ACTS])
def test_training_computes_the_bits_that_are_served(key):
    model, x = net(), torch.randn(4, 5, 64)
    params, layout = own(model), fq.layout(key)
    with fq.use_backend("reference"):
        fake = fq.functional_call(model, fq.fake_quantize_params(params, layout), x)
        served = fq.functional_call(model, fq.quantize_params(params, layout), x)
    assert torch.equal(fake, served)
    assert not torch.equal(fake, model(x))


@pytest.mark.parametrize("key", INTEGERS)
def test_integer_products_round_only_once_and_training_stays_within_float32_of_them(key):
    model, x = net(), torch.randn(4, 5, 64)
    params, layout = own(model), fq.layout(key)
    with fq.use_backend("reference"):
        fake = fq.functional_call(model, fq.fake_quantize_params(params, layout), x)
        served = fq.functional_call(model, fq.quantize_params(params, layout), x)
    # a hidden value on a rounding boundary may take the neighbouring code of the second layer
    step = 1 / 127 * fq.dequantize(fq.quantize(params["2.weight"], fq.int8())).abs().max()
    torch.testing.assert_close(fake, served, rtol=1e-5, atol=float(step))
    one = F.linear(x, fq.fake_quantize_params({"w": params["0.weight"]}, layout)["w"])
    torch.testing.assert_close(
        one, F.linear(x, fq.quantize(params["0.weight"], layout)), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("key", ["int4:g32:sym", "mxfp4@mxfp8", "int8@int8"])
def test_gradients_are_straight_through(key):
    model, x, layout = net(), torch.randn(5, 64), fq.layout(key)
    params = own(model)
    upstream = torch.randn(5, 32)

    def loss(p, x):
        return (fq.functional_call(model, fq.fake_quantize_params(p, layout), x) * upstream).sum()

    got, got_x = grad(loss, argnums=(0, 1))(params, x)
    # by hand: every rounding has the identity as its derivative, as no absmax weight or activation clips
    fake = {n: getattr(v, "weight", v) for n, v in fq.fake_quantize_params(params, layout).items()}

    def imitate(x):
        act = layout.act
        return x if act is None else fq.dequantize(fq.quantize(x, act))

    seen = imitate(x)
    hidden = F.linear(seen, fake["0.weight"], params["0.bias"])
    seen_hidden = imitate(hidden.relu())
    back = (upstream @ fake["2.weight"]) * (hidden > 0)
    want = {
        "0.weight": back.T @ seen,
        "0.bias": back.sum(0),
        "2.weight": upstream.T @ seen_hidden,
        "2.bias": upstream.sum(0),
    }
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(got_x, back @ fake["0.weight"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("key", ["int8", "int4:g32@int8"])
@pytest.mark.parametrize("frozen", [False, True])
def test_an_ensemble_trains_under_vmap(key, frozen):
    model, x = net(), torch.randn(5, 64)
    members = [{k: torch.randn_like(v) / 8 for k, v in own(model).items()} for _ in range(3)]
    policy = fq.plan(members[0], fq.layout(key)) if frozen else fq.layout(key)

    def loss(p):
        return fq.functional_call(model, fq.fake_quantize_params(p, policy), x).square().sum()

    got = vmap(grad(loss))(fq.tree_stack(members))
    for i, member in enumerate(members):
        want = grad(loss)(member)
        for name in want:
            torch.testing.assert_close(got[name][i], want[name], rtol=1e-3, atol=1e-3)
    _, tangent = jvp(loss, (members[0],), (members[1],))
    by_grad = sum((grad(loss)(members[0])[n] * members[1][n]).sum() for n in members[0])
    torch.testing.assert_close(tangent, by_grad, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_compiled_step_has_the_gradients_of_an_eager_one(frozen, fresh_compile):
    model, x = net(), torch.randn(5, 64)
    params, layout = own(model), fq.layout("int4:g32@int8")
    policy = fq.plan(params, layout) if frozen else {"re:.*weight": layout}

    def loss(p, x):
        return fq.functional_call(model, fq.fake_quantize_params(p, policy), x).square().mean()

    step = torch.compile(grad(loss), fullgraph=True, backend="aot_eager")
    got, want = step(params, x), grad(loss)(params, x)
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("key", ["int4:g32:sym", "int4:g32@int8:g32"])
def test_a_training_loop_learns_and_is_served_as_it_trained(key):
    layout, model = fq.layout(key), net()
    x = torch.randn(64, 64)
    target = torch.tanh(x @ torch.randn(64, 32) / 8)
    params = own(model)

    def loss(p):
        return F.mse_loss(fq.functional_call(model, fq.fake_quantize_params(p, layout), x), target)

    with fq.use_backend("reference"):
        before = loss(params)
        for _ in range(20):
            grads = grad(loss)(params)
            params = {n: p - 0.5 * grads[n] for n, p in params.items()}
        after = loss(params)
        served = fq.quantize_params(params, layout)
        assert torch.equal(F.mse_loss(fq.functional_call(model, served, x), target), after)
    assert after < 0.75 * before
    fine = fq.quantize_params(own(model), layout)
    assert F.mse_loss(fq.functional_call(model, fine, x), target) > after


def test_tied_names_share_one_fake_weight_and_both_uses_count():
    w = torch.randn(20, 32)
    ids = torch.tensor([3, 7])

    def loss(w):
        p = fq.fake_quantize_params({"embed": w, "head": w}, {"re:.*": fq.int8()})
        assert p["embed"] is p["head"]
        return (F.embedding(ids, p["embed"]) @ p["head"].T).square().sum()

    fake = fq.fake_quantize(w, fq.int8())
    want = grad(lambda f: (F.embedding(ids, f) @ f.T).square().sum())(fake)
    torch.testing.assert_close(grad(loss)(w), want)

    def apart(p):  # two inputs of one value are two inputs
        q = fq.fake_quantize_params(p, fq.plan({"embed": w, "head": w}, {"re:.*": fq.int8()}))
        return (F.embedding(ids, q["embed"]) @ q["head"].T).square().sum()

    parts = grad(apart)({"embed": w, "head": w})
    assert parts["embed"].abs().max() > 0 and parts["head"].abs().max() > 0
    torch.testing.assert_close(parts["embed"] + parts["head"], want)


def test_a_pattern_that_matches_nothing_is_an_error_here_too():
    with pytest.raises(ValueError, match="match nothing: 'up'"):
        fq.fake_quantize_params({"w": torch.ones(2, 4)}, {"up": fq.int8()})


# --- the leaf ---


@pytest.fixture
def leaf() -> FakeQuantized:
    return fq.fake_quantize_params({"w": torch.randn(8, 8)}, fq.layout("int8@int8"))["w"]


def one(leaf: FakeQuantized) -> FakeQuantized:
    return pytree.tree_map(lambda t: t[None], leaf)


def imitated(x: Tensor) -> Tensor:
    return fq.dequantize(fq.quantize(x, fq.int8()))


def test_products_imitate_the_other_operand(leaf):
    x, bias, w = torch.randn(3, 8), torch.randn(8), leaf.weight
    assert torch.equal(F.linear(x, leaf, bias), F.linear(imitated(x), w, bias))
    for got in (x @ leaf.T, torch.matmul(x, leaf.mT), x.matmul(leaf.T), torch.mm(x, leaf.T), x.mm(leaf.T)):
        assert torch.equal(got, imitated(x) @ w.T)
    for got in (
        torch.matmul(input=x, other=leaf),
        torch.mm(x, mat2=leaf),
        torch.bmm(x[None], mat2=one(leaf))[0],
    ):
        assert torch.equal(got, imitated(x) @ w)
    assert torch.equal(x @ leaf, imitated(x) @ w)
    assert torch.equal(leaf @ x.T, w @ imitated(x).T)
    assert torch.equal(Tensor.__rmatmul__(x.T, leaf), w @ imitated(x).T)
    assert torch.equal(torch.addmm(bias, x, leaf.T), torch.addmm(bias, imitated(x), w.T))
    assert torch.equal(
        torch.addmm(bias, x, leaf.T, beta=2, alpha=3), torch.addmm(bias, imitated(x), w.T, beta=2, alpha=3)
    )


@pytest.mark.parametrize("act", ["int8", "int8:tensor"])
def test_batched_products_imitate_each_matrix_as_the_served_ones_do(act):
    layout = fq.layout(f"int8@{act}")
    w, x = torch.randn(3, 6, 16), torch.randn(3, 4, 16) * torch.tensor([1.0, 10, 100])[:, None, None]
    leaf = fq.fake_quantize_params({"w": w}, layout)["w"]
    q = fq.quantize(w, layout)
    torch.testing.assert_close(torch.bmm(x, leaf.mT), torch.bmm(x, q.mT), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(x @ leaf.mT, x @ q.mT, rtol=1e-5, atol=1e-4)


def test_wrong_ranks_and_all_else_raise(leaf):
    x = torch.randn(3, 8)
    with pytest.raises(RuntimeError, match="must be a matrix"):
        torch.mm(x[None], leaf.T)
    with pytest.raises(fq.UnsupportedOp, match="both operands are fake-quantized"):
        leaf @ leaf
    for run in (
        lambda: torch.einsum("bk,nk->bn", x, leaf),
        lambda: torch.relu(leaf),
        lambda: x + leaf,
        lambda: F.embedding(torch.tensor([1]), leaf),
        lambda: torch.cat([x, leaf]),
    ):
        with pytest.raises(fq.UnsupportedOp, match=r"no rule for a FakeQuantized; .*fq\.register_rule"):
            run()


def test_the_leaf_is_a_pytree_of_one_tensor(leaf):
    leaves, spec = pytree.tree_flatten({"w": leaf})
    assert len(leaves) == 1 and leaves[0] is leaf.weight
    back = pytree.tree_unflatten(leaves, spec)["w"]
    assert back.act == leaf.act and back.weight is leaf.weight
    text = pytree.treespec_dumps(spec)
    assert pytree.treespec_loads(text) == spec
    doubled = pytree.tree_map(lambda t: 2 * t, leaf)
    assert torch.equal(doubled.weight, 2 * leaf.weight) and isinstance(doubled, FakeQuantized)
    assert (leaf.shape, leaf.dtype, leaf.device, leaf.ndim) == ((8, 8), torch.float32, torch.device("cpu"), 2)
    assert torch.equal(leaf.T.weight, leaf.weight.T) and leaf.T.act == leaf.act


def test_trees_with_the_leaf_stack_split_and_are_measured():
    model, x = net(), torch.randn(5, 64)
    params = own(model)
    fake = fq.fake_quantize_params(params, fq.layout("int4:g32@int8"))
    weights = fq.dequantize_params(fake)
    assert weights["0.weight"] is fake["0.weight"].weight and weights["0.bias"] is params["0.bias"]
    assert 10 < fq.sqnr(params["0.weight"], fake["0.weight"]) < 30
    assert fq.summary(fake).nbytes == sum(p.nbytes for p in params.values())
    stacked = fq.tree_stack([fake, fake])
    got = vmap(lambda p: fq.functional_call(model, p, x))(stacked)
    want = fq.functional_call(model, fake, x)
    torch.testing.assert_close(got, want.expand(2, -1, -1), rtol=1e-5, atol=1e-5)
    assert fq.tree_to(fake, "meta")["0.weight"].weight.is_meta
    with pytest.raises(ValueError, match=r"0\.weight is already quantized \(FakeQuantized\)"):
        fq.fake_quantize_params(fake, fq.int8())
