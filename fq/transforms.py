"""Params -> params: pure functions over parameter dicts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from fq.layouts.layout import changed
from fq.leaves import FakeQuantized, check_params, is_leaf
from fq.policies import Plan, Policy, plan
from fq.primitives import dequantize, fake_quantize, quantize
from fq.qtensor import QTensor, stack
from fq.roles import view_key
from fq.slices import quantize_slices

Params = Mapping[str, Any]


def _as_plan(params: Params, plan_or_policy: Plan | Policy) -> Plan:
    if not isinstance(plan_or_policy, Plan):
        return plan(params, plan_or_policy)
    wanted = [e for e in plan_or_policy if e.layout is not None]
    missing = [e.name for e in wanted if e.name not in params and e.tied_to not in params]
    if missing:
        raise KeyError(f"quantize_params: the plan names parameters that are not given: {', '.join(missing)}")
    return plan_or_policy


def _shared(params: Params, made: Plan) -> dict[str, str]:
    """Return name -> the tied name whose result it shares, for those that are tied here as in the plan."""
    ties = [(e.name, e.tied_to) for e in made if e.layout is not None and e.tied_to is not None]
    given = [(name, first) for name, first in ties if name in params and first in params]
    return {name: first for name, first in given if _same(params[name], params[first])}


def _same(a: Any, b: Any) -> bool:
    return a is b or view_key(a) == view_key(b)


def quantize_params(
    params: Params,
    plan_or_policy: Plan | Policy,
    *,
    donate: bool = False,
    check_finite: bool = True,
    progress: Callable[[str, int, int], None] | None = None,
) -> dict[str, Any]:
    """Quantize a parameter dict leaf by leaf, as a plan or a policy says; the rest is passed through.

    Args:
        params: name -> tensor.
        plan_or_policy: what `fq.plan` returned, or a policy for it.
        donate: pop entries from `params` as they are done, and quantize large ones slice by slice, so that
            the peak stays below the input and two tensors when the dict owns them.
        check_finite: raise on weights with NaN or inf, naming them, before anything is done.
        progress: called as progress(name, done, total) after each parameter.

    Tied names (one storage) share one QTensor.

    Raises:
        ValueError: a weight is not finite, or a pattern matches nothing.
        KeyError: a plan names a parameter that is not given.

    Example:
        >>> import fq, torch
        >>> q = fq.quantize_params({"w": torch.ones(4, 64), "b": torch.ones(4)}, fq.int4(group_size=32))
        >>> q["w"].layout, q["b"].dtype
        (fq.layout('int4:g32'), torch.float32)
    """
    if isinstance(params, nn.Module):
        raise TypeError("quantize_params: expected a dict, got a module; use dict(module.named_parameters())")
    if donate and not isinstance(params, dict):
        raise TypeError(f"quantize_params: donate=True pops from a dict, got {type(params).__name__}")
    made = _as_plan(params, plan_or_policy)
    chosen = {e.name: e for e in made}
    if check_finite:
        named = (e.name for e in made if e.layout is not None and e.name in params)
        bad = [name for name in named if not _finite(params[name])]
        if bad:
            raise ValueError(
                f"quantize_params: not finite: {', '.join(bad)}; fix them, or pass check_finite=False"
            )
    out: dict[str, Any] = {}
    names, shared = list(params), _shared(params, made)
    for done, name in enumerate(names, 1):
        value = params.pop(name) if donate else params[name]  # type: ignore[attr-defined]
        entry = chosen.get(name)
        if entry is None or entry.layout is None:
            out[name] = value
        elif shared.get(name) in out:
            out[name] = out[shared[name]]
        else:
            with torch.no_grad():
                out[name] = (quantize_slices if donate else quantize)(value, entry.layout, inner=entry.inner)
        del value
        if progress is not None:
            progress(name, done, len(names))
    return out


def _finite(value: Tensor) -> bool:
    """Whether all of a tensor is finite, without a temporary of its size."""
    if value.is_meta or value.numel() == 0:
        return True
    low, high = torch.aminmax(value.detach())
    return bool(torch.isfinite(low) & torch.isfinite(high))


def dequantize_params(params: Params) -> dict[str, Any]:
    """Dequantize the QTensors of a parameter dict; tied ones stay tied.

    Example:
        >>> import fq, torch
        >>> q = fq.quantize_params({"w": torch.ones(4, 64)}, fq.int8())
        >>> fq.dequantize_params(q)["w"].shape
        torch.Size([4, 64])
    """
    check_params("dequantize_params", params)
    done: dict[Any, Tensor] = {}
    out: dict[str, Any] = {}
    for name, value in params.items():
        if isinstance(value, QTensor):
            key = view_key(value)
            if key not in done:
                done[key] = dequantize(value)
            value = done[key]
        elif isinstance(value, FakeQuantized):
            value = value.weight
        out[name] = value
    return out


def fake_quantize_params(params: Params, plan_or_policy: Plan | Policy) -> dict[str, Any]:
    """Fake-quantize a parameter dict: float tensors on the grid, with straight-through gradients.

    For quantization-aware training: differentiate through it, then `quantize_params` with the same policy
    gives the weights that were trained. A layout with `act` gives a leaf whose matmuls fake-quantize
    their activation too.

    Raises:
        ValueError: a pattern matches nothing.

    Example:
        >>> import fq, torch
        >>> loss = lambda p: fq.fake_quantize_params(p, fq.int8())["w"].square().sum()
        >>> torch.func.grad(loss)({"w": torch.ones(1, 4)})["w"].shape
        torch.Size([1, 4])
    """
    made = _as_plan(params, plan_or_policy)
    chosen, shared = {e.name: e for e in made}, _shared(params, made)
    out: dict[str, Any] = {}
    for name, value in params.items():
        entry = chosen.get(name)
        if entry is None or entry.layout is None:
            out[name] = value
            continue
        if shared.get(name) in out:
            out[name] = out[shared[name]]
            continue
        act = entry.layout.act
        weight = fake_quantize(value, changed(entry.layout.key, act=None))
        out[name] = weight if act is None else FakeQuantized(weight, act)
    return out


# --- trees ---


def tree_stack(trees: Sequence[Params]) -> dict[str, Any]:
    """Stack parameter dicts of the same names, shapes and layouts along a new first dimension, for vmap.

    Raises:
        ValueError: names, shapes or layouts differ.

    Example:
        >>> import fq, torch
        >>> q = {"w": fq.quantize(torch.ones(2, 4), fq.int8())}
        >>> fq.tree_stack([q, q])["w"].shape
        torch.Size([2, 2, 4])
    """
    if not isinstance(trees, list | tuple):
        raise TypeError(f"tree_stack: expected a list of parameter dicts, got {type(trees).__name__}")
    if not trees:
        raise ValueError("tree_stack: expected at least one tree")
    for tree in trees:
        if not isinstance(tree, Mapping):
            raise TypeError(f"tree_stack: expected parameter dicts, got {type(tree).__name__}; see fq.stack")
    names = list(trees[0])
    for tree in trees[1:]:
        if set(tree) != set(names):
            differ = sorted(set(tree) ^ set(names))
            raise ValueError(f"tree_stack: trees differ in the names {', '.join(differ)}")
    return {name: _stack_leaves(name, [tree[name] for tree in trees]) for name in names}


def _stack_leaves(name: str, values: list[Any]) -> Any:
    kinds = {type(v) if is_leaf(v) else Tensor for v in values}
    if len(kinds) > 1:
        raise ValueError(f"tree_stack: {name} is quantized in some trees and not in others")
    first = values[0]
    if isinstance(first, QTensor):
        keys = {v.layout.key for v in values}
        if len(keys) > 1:
            raise ValueError(
                f"tree_stack: {name} has layouts {', '.join(sorted(keys))}; fq.requantize to one"
            )
        if first.data.ndim > 1:
            return stack(values)
    if any(tuple(v.shape) != tuple(first.shape) for v in values):
        raise ValueError(f"tree_stack: {name} has shapes {sorted({tuple(v.shape) for v in values})}")
    return pytree.tree_map(lambda *ts: torch.stack(ts), *values)


def tree_to(tree: Params, device: torch.device | str) -> dict[str, Any]:
    """Move every tensor of a parameter dict to a device; ties stay ties.

    Example:
        >>> import fq, torch
        >>> fq.tree_to({"w": fq.quantize(torch.ones(2, 4), fq.int8())}, "meta")["w"].device
        device(type='meta')
    """
    check_params("tree_to", tree, values=True)
    moved: dict[Any, Any] = {}
    out: dict[str, Any] = {}
    for name, value in tree.items():
        key = view_key(value)
        if key not in moved:
            moved[key] = pytree.tree_map(lambda t: t.to(device), value)
        out[name] = moved[key]
    return out


def partition(tree: Params, predicate: Callable[[str, Any], bool]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split a parameter dict by predicate(name, value) into those for which it holds and the rest.

    Absent keys are left out, so that `torch.func.grad` can differentiate one part.

    Example:
        >>> import fq, torch
        >>> a, b = fq.partition({"w": torch.ones(2, 2), "b": torch.ones(2)}, lambda n, v: v.ndim > 1)
        >>> list(a), list(b)
        (['w'], ['b'])
    """
    check_params("partition", tree)
    yes = {n: v for n, v in tree.items() if predicate(n, v)}
    return yes, {n: v for n, v in tree.items() if n not in yes}


def combine(a: Params, b: Params) -> dict[str, Any]:
    """Join two parameter dicts that share no name; the inverse of `partition`.

    Raises:
        ValueError: a name is in both.

    Example:
        >>> import fq
        >>> fq.combine({"a": 1}, {"b": 2})
        {'a': 1, 'b': 2}
    """
    check_params("combine", a)
    check_params("combine", b)
    both = sorted(set(a) & set(b))
    if both:
        raise ValueError(f"combine: names in both trees: {', '.join(both)}")
    return {**a, **b}
