"""Preparing weights for a backend's kernels, and saying which backend serves a call and why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor

from fq.backends.registry import check_name, verdicts
from fq.checks import check_qtensor
from fq.errors import BackendError
from fq.layouts import Layout
from fq.layouts.storage import CANONICAL, HOOKS
from fq.qtensor import QTensor
from fq.spec import canonical_leaf


def prepack(tree: Any, backend: str = "auto") -> Any:
    """Convert QTensors in a tree to the byte order that a backend's kernels want, once and exactly.

    "auto" leaves a layout that no kernel wants as it is; a named backend that cannot raises. Nothing is
    rounded: `canonical(prepack(q))` is byte-equal to q.

    Raises:
        BackendError: the named backend has no storage for some leaves; names each, and says why.

    Example:
        >>> import fq, torch
        >>> q = fq.quantize(torch.randn(32, 64), fq.int4(group_size=32))
        >>> torch.equal(fq.canonical(fq.prepack(q)).data, q.data)
        True
    """
    check_name(backend)
    verdicts("linear_adjoint")  # loads the backends, which register their storages
    refused = []

    def choose(path: Any, q: Any) -> Any:
        if not isinstance(q, QTensor) or q.layout.storage != CANONICAL:
            return None
        check_qtensor("prepack", q)
        reasons = []
        for hook in HOOKS.values():
            if backend not in ("auto", hook.backend):
                continue
            reason = hook.accepts(q) or (hook.unwanted(q) if backend == "auto" else None)
            if reason is None:
                return hook
            reasons.append(reason)
        if backend != "auto":
            where = f" ({pytree.keystr(path)})" if path else ""
            why = "; ".join(reasons) or "it keeps every layout canonical"
            refused.append(f"{q.layout.key}{where}: {why}")
        return None

    leaves, spec = pytree.tree_flatten_with_path(tree, is_leaf=lambda v: isinstance(v, QTensor))
    hooks = [choose(path, q) for path, q in leaves]
    if refused:  # all of them, before any is converted
        raise BackendError(f"prepack: backend {backend!r} has no storage for {'; '.join(refused)}")
    out = [q if hook is None else hook.prepack(q) for hook, (_, q) in zip(hooks, leaves, strict=True)]
    return pytree.tree_unflatten(out, spec)


def canonical(tree: Any) -> Any:
    """Convert QTensors in a tree back to canonical storage, byte for byte.

    Raises:
        TypeError: a leaf's storage belongs to no loaded backend.

    Example:
        >>> import fq, torch
        >>> q = fq.quantize(torch.ones(2, 4), fq.int8())
        >>> fq.canonical(q) is q
        True
    """
    return pytree.tree_map(
        lambda q: canonical_leaf(q) if isinstance(q, QTensor) else q,
        tree,
        is_leaf=lambda v: isinstance(v, QTensor),
    )


class Explanation(str):
    """Text whose repr is itself, so that it reads well at a prompt."""

    def __repr__(self) -> str:
        return str(self)


_KINDS = {"x": Tensor, "ids": Tensor, "q": QTensor, "layout": Layout}
_ARGUMENTS = {
    **dict.fromkeys(("linear", "matmul", "int4_matmul", "int8_matmul", "fp8_matmul"), ("x", "q")),
    **dict.fromkeys(("mx_matmul", "nvfp4_matmul"), ("x", "q")),
    "dequantize": ("q",),
    "embedding": ("ids", "q"),
    "quantize": ("x", "layout"),
    "cast_fp4x2": ("x",),
}


def _fit(args: tuple[Any, ...], names: tuple[str, ...]) -> bool:
    return len(args) == len(names) and all(isinstance(a, _KINDS[n]) for a, n in zip(args, names, strict=True))


def explain(primitive: Callable[..., Any], *args: Any) -> Explanation:
    """Say which backends could run a call, in the order they are asked, and why the others cannot.

    Args:
        primitive: fq.linear, fq.matmul, fq.quantize, fq.dequantize, fq.embedding or fq.cast_fp4x2.
        args: what it would be called with.

    Raises:
        TypeError: the arguments are not those of the primitive.
        ValueError: the function has no kernels of its own.

    Example:
        >>> import fq, torch
        >>> q = fq.quantize(torch.ones(2, 32), fq.mxfp4())
        >>> fq.explain(fq.linear, torch.ones(1, 32), q)
        linear
          aten       no: ...
          reference  yes  <- auto
    """
    called = name = getattr(primitive, "__name__", repr(primitive))
    names = _ARGUMENTS.get(name)
    if names is not None:
        args = args[: len(names)]
        if not (_fit(args, names) or (name == "matmul" and _fit(args[::-1], names))):
            got = ", ".join(type(a).__name__ for a in args)
            raise TypeError(f"explain: expected fq.explain(fq.{name}, {', '.join(names)}), got ({got})")
    if name == "matmul":
        name = "linear"
        a, b = args
        args = (a, b) if isinstance(b, QTensor) else (b, a)
        rows = args[1].layout.axis == (-1 if isinstance(b, QTensor) else -2)
        name = "linear_adjoint" if rows else "linear"
    elif name.endswith("_matmul"):
        name = "linear"
    elif name == "linear" and args[1].layout.axis == -2:
        name = "linear_adjoint"
    if name in ("dequantize", "embedding"):
        args = (*args, args[-1].dtype)
    found = verdicts(name, *args[: 3 if name == "embedding" else 2])
    if not found:
        raise ValueError(f"explain: {called} has no kernels of its own; try fq.linear or fq.quantize")
    lines, chosen = [called], False
    for backend, reason in found:
        mark = "" if chosen or reason is not None else "  <- auto"
        chosen = chosen or reason is None
        lines.append(f"  {backend:<10} {'yes' if reason is None else f'no: {reason}'}{mark}")
    return Explanation("\n".join(lines))
