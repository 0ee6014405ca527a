"""The composition matrix: transforms of functional_call on a small network, and what they must give."""

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
SPINE = [
    "int8",
    "int4:g32",
    "int4:g32:sym",
    "mxfp4",
    "nvfp4",
    "int8@int8",
    "int4:g32:sym@int8",
    "nvfp4@nvfp4",
]
Transform = Callable[[Callable[..., Tensor]], Callable[..., Any]]


def network(layers: int = 2) -> nn.Module:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 16, bias=False)).requires_grad_(False)
    return net[:1] if layers == 1 else net


def parameters(
    key: str, storage: str = "canonical", seed: int = 0, layers: int = 2, input_scale: float | None = None
) -> dict[str, Any]:
    torch.manual_seed(seed)
    params = {
        "0.weight": torch.randn(32, 64) / 4,
        "0.bias": torch.randn(32),
        "2.weight": torch.randn(16, 32) / 4,
    }
    if layers == 1:
        del params["2.weight"]
    out = fq.quantize_params(params, fq.layout(key))
    if input_scale is not None:
        static = torch.full((1, 1), input_scale)
        out = {
            n: replace(q, input_scale=static * (1 + seed)) if isinstance(q, fq.QTensor) else q
            for n, q in out.items()
        }
    return fq.prepack(out, backend="aten") if storage == "prepacked" else out


def dense(q: Any) -> Tensor:
    """Decode in plain torch ops, which torch differentiates by itself."""
    return numerics.dequantize_matrix(fq.canonical(q)) if isinstance(q, fq.QTensor) else q


def seen(x: Tensor, q: Any) -> Tensor:
    """The activation as the weight meets it, straight-through."""
    if q.layout.act is None:
        return x
    rows = x.reshape(-1, x.shape[-1])
    rounded = numerics.dequantize_matrix(numerics.quantize_activation(rows.detach(), q)).reshape(x.shape)
    return x + (rounded - x).detach()


def oracle(p: dict[str, Any], x: Tensor) -> Tensor:
    h = seen(x, p["0.weight"]) @ dense(p["0.weight"]).mT + p["0.bias"]
    if "2.weight" not in p:
        return h
    h = torch.tanh(h)
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


def transforms(
    key: str, storage: str = "canonical", **options: Any
) -> dict[str, tuple[Transform, tuple[Any, ...]]]:
    """Name -> (how to transform f(params, x), the arguments of what comes out)."""
    p = parameters(key, storage, **options)
    many = [parameters(key, storage, seed, **options) for seed in range(3)]
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
        if scale.shape[0] == 1:
            out["hessian scale"] = (lambda f: T.hessian(lambda s: loss(f(with_scale(p, s), x))), (scale,))
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
    """Run transforms one by one, each in a graph of its own."""
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


def run_together(
    keys: list[str], compile_with: str | None, only: list[str], layers: int = 1, **options: Any
) -> None:
    """Run all transforms of several layouts, in one graph where compiled."""
    net = network(layers)
    tables = {key: transforms(key, layers=layers, **options) for key in keys}
    arguments = {key: {n: t[n][1] for n in only if n in t} for key, t in tables.items()}

    def every(call: Callable[..., Tensor], arguments: Any) -> Any:
        return {
            key: {name: tables[key][name][0](call)(*args) for name, args in table.items()}
            for key, table in arguments.items()
        }

    def ours(arguments: Any) -> Any:
        return every(lambda p, x: fq.functional_call(net, p, x), arguments)

    if compile_with is not None:
        ours = torch.compile(ours, backend=compile_with, fullgraph=True)
    with fq.use_backend("reference"):
        got = ours(arguments)
    want = every(oracle, arguments)
    for key, table in want.items():
        for name, values in table.items():
            try:
                check(got[key][name], values)
            except AssertionError as error:
                raise AssertionError(f"{key}, {name}: {error}") from error
