"""The composition matrix, by value: presets under transforms, eager and compiled, on every backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

import fq
from fq import numerics

T = torch.func
LAYOUTS = [
    "int8",
    "int4:g32",
    "int4:g32:sym",
    "mxfp4",
    "nvfp4",
    "int8@int8",
    "int4:g32:sym@int8",
    "nvfp4@nvfp4",
]
ON_ATEN = {
    "int8": "canonical",
    "int8@int8": "canonical",
    "int4:g32": "prepacked",
    "int4:g32:sym": "prepacked",
}
CASES = [(key, "reference", "canonical") for key in LAYOUTS]
CASES += [(key, "aten", storage) for key, storage in ON_ATEN.items()]
CASES += [(key, "reference", "prepacked") for key, storage in ON_ATEN.items() if storage == "prepacked"]


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 16, bias=False)).requires_grad_(False)


def parameters(key: str, storage: str = "canonical", seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    params = {
        "0.weight": torch.randn(32, 64) / 4,
        "0.bias": torch.randn(32),
        "2.weight": torch.randn(16, 32) / 4,
    }
    out = fq.quantize_params(params, fq.layout(key))
    return fq.prepack(out, backend="aten") if storage == "prepacked" else out


def dense(q: Any) -> Tensor:
    """Decode in plain torch ops, which torch differentiates by itself."""
    return numerics.dequantize_matrix(fq.canonical(q)) if isinstance(q, fq.QTensor) else q


def seen(x: Tensor, q: Any) -> Tensor:
    """The activation as the weight meets it, straight-through."""
    act = q.layout.act
    if act is None:
        return x
    rows = x.reshape(-1, x.shape[-1])
    rounded = numerics.dequantize_matrix(numerics.quantize_matrix(rows.detach(), act)).reshape(x.shape)
    return x + (rounded - x).detach()


def oracle(p: dict[str, Any], x: Tensor) -> Tensor:
    h = torch.tanh(seen(x, p["0.weight"]) @ dense(p["0.weight"]).mT + p["0.bias"])
    return seen(h, p["2.weight"]) @ dense(p["2.weight"]).mT


def with_scale(p: dict[str, Any], scale: Tensor) -> dict[str, Any]:
    """Replace the float scale of the first weight: the outer one where scales are nested."""
    q = p["0.weight"]
    inner = replace(q.scale, scale=scale) if isinstance(q.scale, fq.QTensor) else scale
    return {**p, "0.weight": replace(q, scale=inner)}


def float_scale(q: Any) -> Tensor | None:
    scale = q.scale.scale if isinstance(q.scale, fq.QTensor) else q.scale
    return scale if scale.dtype == torch.float32 else None


def loss(y: Tensor) -> Tensor:
    return y.pow(3).sum()


Transform = Callable[[Callable[..., Tensor]], Callable[..., Any]]


def transforms(key: str, storage: str) -> dict[str, tuple[Transform, tuple[Any, ...]]]:
    """Name -> (how to transform f(params, x), the arguments of what comes out)."""
    p = parameters(key, storage)
    many = [parameters(key, storage, seed) for seed in range(3)]
    stacked = fq.tree_stack(many)
    second = pytree.tree_map(lambda *t: torch.stack(t, 1), *many)
    torch.manual_seed(2)
    x, xs, v = torch.randn(5, 64), torch.randn(3, 5, 64), torch.randn(5, 64)
    out: dict[str, tuple[Transform, tuple[Any, ...]]] = {
        "forward": (lambda f: f, (p, x)),
        "vmap x": (lambda f: T.vmap(f, (None, 0)), (p, xs)),
        "vmap params": (lambda f: T.vmap(f, (0, None)), (stacked, x)),
        "vmap params along 1": (lambda f: T.vmap(f, (1, None)), (second, x)),
        "vmap both": (lambda f: T.vmap(f), (stacked, xs)),
        "grad x": (lambda f: T.grad(lambda x: loss(f(p, x))), (x,)),
        "vmap grad x": (lambda f: T.vmap(T.grad(lambda x: loss(f(p, x)))), (xs,)),
        "vmap params grad x": (lambda f: T.vmap(T.grad(lambda x, q: loss(f(q, x))), (None, 0)), (x, stacked)),
        "jacrev": (lambda f: T.jacrev(lambda x: f(p, x)), (x[:2],)),
        "jvp": (lambda f: lambda x, v: T.jvp(lambda x: f(p, x), (x,), (v,)), (x, v)),
        "hessian": (lambda f: T.hessian(lambda x: loss(f(p, x))), (x[0, :],)),
        "grad grad": (lambda f: T.grad(lambda x: T.grad(lambda x: loss(f(p, x)))(x).pow(2).sum()), (x,)),
    }
    scale = float_scale(p["0.weight"]) if storage == "canonical" else None
    if scale is not None:
        out["grad scale"] = (lambda f: T.grad(lambda s, x: loss(f(with_scale(p, s), x))), (scale, x))
        out["per-sample grad scale"] = (
            lambda f: T.vmap(T.grad(lambda s, x: loss(f(with_scale(p, s), x))), (None, 0)),
            (scale, xs),
        )
        out["jvp scale"] = (
            lambda f: lambda s, t: T.jvp(lambda s: f(with_scale(p, s), x), (s,), (t,)),
            (scale, scale),
        )
        out["hessian scale"] = (
            lambda f: T.hessian(lambda s: loss(f(with_scale(p, s), x))),
            (scale[:1].clone(),),
        )
        if scale.shape[0] != 1:
            del out["hessian scale"]
    if storage == "canonical" and p["0.weight"].layout.zero_point == "float":
        q = p["0.weight"]
        out["grad zero point"] = (
            lambda f: T.grad(lambda z: loss(f({**p, "0.weight": replace(q, zero_point=z)}, x))),
            (q.zero_point,),
        )
    return out


TRANSFORMS = [
    "forward",
    "vmap x",
    "vmap params",
    "vmap params along 1",
    "vmap both",
    "grad x",
    "vmap grad x",
    "vmap params grad x",
    "jacrev",
    "jvp",
    "hessian",
    "grad grad",
    "grad scale",
    "per-sample grad scale",
    "jvp scale",
    "hessian scale",
    "grad zero point",
]


def check(got: Any, want: Any) -> None:
    got, want = pytree.tree_leaves(got), pytree.tree_leaves(want)
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        assert torch.isfinite(b).all() and b.abs().max() > 1e-3  # an oracle of zeros would prove nothing
        torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-4 * float(b.abs().max()))


def run(key: str, backend: str, storage: str, compile_with: str | None, only: list[str]) -> None:
    net, table = network(), transforms(key, storage)
    for name in only:
        if name not in table:
            continue
        transform, args = table[name]
        want = transform(oracle)(*args)
        f = transform(lambda p, x: fq.functional_call(net, p, x))
        if compile_with is not None:
            torch._dynamo.reset()
            f = torch.compile(f, backend=compile_with, fullgraph=True)
        if (
            backend == "aten" and name == "vmap params along 1"
        ):  # nothing is copied in the call, so aten refuses
            with fq.use_backend("aten"), pytest.raises(fq.BackendError, match="not contiguous"):
                transform(lambda p, x: fq.functional_call(net, p, x))(*args)
            check(f(*args), want)
            continue
        with fq.use_backend(backend):
            try:
                check(f(*args), want)
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from error


@pytest.mark.parametrize(("key", "backend", "storage"), CASES)
def test_eager(key, backend, storage):
    run(key, backend, storage, None, TRANSFORMS)


QUICK = {
    ("int8", "aten", "canonical"),
    ("int4:g32", "aten", "prepacked"),
}


@pytest.mark.parametrize(
    ("key", "backend", "storage"),
    [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in CASES],
)
def test_compiled(key, backend, storage):
    run(key, backend, storage, "aot_eager", TRANSFORMS)


@pytest.mark.parametrize(("key", "backend", "storage"), CASES)
@pytest.mark.slow
def test_inductor(key, backend, storage):
    run(key, backend, storage, "inductor", ["forward", "grad x", "vmap params"])


@pytest.mark.parametrize("key", ["int8", "nvfp4"])
def test_inductor_quick(key):
    run(key, "reference", "canonical", "inductor", ["forward", "grad x"])
