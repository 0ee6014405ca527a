"""Putting parameters into an untouched module: functional_call, bind, and the persistent attach/detach.

For the time of a call, quantized leaves stand as instance attributes and their parameters are out of
`_parameters`; floats are swapped inside it. Both come back, in order, also on error. Simpler mechanisms
break, or silently keep old weights, under torch.compile(module).
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fq.leaves import LEAF_TYPES

_ATTACHED = "_fq_attached"
_ABSENT: Any = object()
_CONFLICT: Any = object()
_TURNS: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()

Place = tuple[nn.Module, str, Any]  # owner, attribute, value


def is_leaf(value: Any) -> bool:
    """Whether a parameter dict's value is one of fq's leaf types."""
    return isinstance(value, LEAF_TYPES)


# --- where a name lies ---


def _modules(module: nn.Module, path: str = "") -> list[tuple[str, nn.Module]]:
    """Return every (dotted path with a final dot, module), a shared module once per path."""
    found = [(path, module)]
    for name, child in module._modules.items():
        if child is not None:
            found += _modules(child, f"{path}{name}.")
    return found


def _find(owners: dict[str, Any], name: str) -> tuple[Any, str]:
    """Return the module that a name is an attribute of, or None, and the attribute."""
    cut = name.rfind(".") + 1
    path = name[:cut]
    if path not in owners:
        try:  # torch.compile(module) passes attributes on
            owners[path] = owners[""].get_submodule(path[:-1])
        except AttributeError:
            owners[path] = None
    return owners[path], name[cut:]


def _standing(owner: Any, attribute: str) -> Any:
    """Return what stands at an attribute: a leaf, a parameter, a buffer, a plain tensor, or _ABSENT."""
    if owner is None:
        return _ABSENT
    for registry in (owner._parameters, owner._buffers):
        if attribute in registry:
            return registry[attribute]
    here = owner.__dict__.get(attribute)
    return here if isinstance(here, (*LEAF_TYPES, Tensor)) else _ABSENT


def _identity(value: Any) -> Any:
    """Return what tells a value from others; Dynamo guards the id of a parameter, so it sees new ties."""
    return id(value) if isinstance(value, nn.Parameter) else value


def _placed(
    modules: list[tuple[str, nn.Module]],
    values: Mapping[str, Any],
    names: Mapping[str, Any],
    tie: bool,
    what: str,
) -> list[Place]:
    """Return where each value goes, before anything is touched; with `tie` also at aliases not in `names`."""
    owners: dict[str, Any] = dict(modules)
    places: dict[tuple[int, str], Place] = {}
    given: dict[Any, Any] = {}  # what stands there now -> the value that replaces it
    shadowing = False
    for name, value in values.items():
        owner, attribute = _find(owners, name)
        here = _standing(owner, attribute)
        if here is _ABSENT or (is_leaf(value) and attribute in owner._buffers):
            raise KeyError(f"{what}: {name!r} is no parameter of {type(modules[0][1]).__name__}")
        slot = (id(owner), attribute)
        if slot in places and places[slot][2] is not value:
            raise ValueError(
                f"{what}: {name!r} and another name are one parameter; they got different values"
            )
        places[slot] = (owner, attribute, value)
        if here is not None:
            key = _identity(here)
            given[key] = _CONFLICT if key in given and given[key] is not value else value
        shadowing = shadowing or attribute in owner.__dict__
    if not tie:
        return list(places.values())
    for path, owner in modules:
        here_all = [*owner._parameters.items()]
        if shadowing:
            here_all += [(a, v) for a, v in owner.__dict__.items() if is_leaf(v)]
        for attribute, here in here_all:
            key = _identity(here)
            if key not in given or (id(owner), attribute) in places or path + attribute in names:
                continue
            if given[key] is _CONFLICT:
                raise ValueError(
                    f"{what}: {path + attribute!r} is tied to names of different values; give it too"
                )
            places[id(owner), attribute] = (owner, attribute, given[key])
    return list(places.values())


# --- putting and restoring ---


def _save(places: list[Place]) -> list[Any]:
    """Return what `_restore` needs: per owner its parameters in order, and what stands at each attribute."""
    saved: dict[int, Any] = {}
    for owner, attribute, _ in places:
        if id(owner) not in saved:
            saved[id(owner)] = (owner, dict(owner._parameters), {})
        saved[id(owner)][2][attribute] = _standing(owner, attribute)
    return list(saved.values())


def _put(places: list[Place]) -> None:
    for owner, attribute, value in places:
        if is_leaf(value):
            owner._parameters.pop(attribute, None)
            owner.__dict__[attribute] = value
        elif attribute in owner._buffers:
            owner._buffers[attribute] = value
        elif isinstance(owner.__dict__.get(attribute), Tensor):
            owner.__dict__[attribute] = value
        else:
            owner.__dict__.pop(attribute, None)
            owner._parameters[attribute] = value


def _restore(saved: list[Any]) -> None:
    for owner, parameters, attributes in saved:
        # what the forward itself assigned to other names stays, as under torch.func.functional_call
        parameters.update({a: p for a, p in owner._parameters.items() if a not in attributes})
        owner._parameters.clear()
        owner._parameters.update(parameters)
        for attribute, here in attributes.items():
            owner.__dict__.pop(attribute, None)
            if attribute in owner._buffers:
                owner._buffers[attribute] = here
            elif attribute not in parameters:
                owner.__dict__[attribute] = here


# --- public ---


@contextlib.contextmanager
def bind(module: nn.Module, params: Mapping[str, Any]) -> Iterator[nn.Module]:
    """Let a module compute with `params` inside the `with` block; afterwards it is as before.

    For code that calls the module itself, such as `model.generate`. Values are QTensors or tensors; a
    leaf given for one tied name stands at every alias that is not given itself; binds nest. A
    torch.compile(module) made before, during or after computes with the weights bound at the call.

    Raises:
        KeyError: a name is no parameter; nothing was touched.

    Example:
        >>> import fq, torch
        >>> net = torch.nn.Linear(4, 2)
        >>> with fq.bind(net, {"weight": fq.quantize(net.weight, fq.int8())}):
        ...     net(torch.ones(1, 4)).shape
        torch.Size([1, 2])
        >>> list(net.state_dict())
        ['weight', 'bias']
    """
    places = _placed(_modules(module), params, params, True, "bind")
    saved = _save(places)
    try:
        _put(places)
        yield module
    finally:
        _restore(saved)


def attach(module: nn.Module, params: Mapping[str, Any]) -> nn.Module:
    """Bind `params` until `detach`, for code that wants a module; returns the module.

    Raises:
        KeyError: a name is no parameter. ValueError: something is attached already.

    Example:
        >>> import fq, torch
        >>> net = torch.nn.Linear(4, 2)
        >>> _ = fq.attach(net, {"weight": fq.quantize(net.weight, fq.int8())})
        >>> net.weight.layout
        fq.layout('int8')
        >>> fq.detach(net).weight.dtype
        torch.float32
    """
    if _ATTACHED in module.__dict__:
        raise ValueError(
            f"attach: {type(module).__name__} has parameters attached already; call fq.detach first"
        )
    places = _placed(_modules(module), params, params, True, "attach")
    module.__dict__[_ATTACHED] = _save(places)
    _put(places)
    return module


def detach(module: nn.Module) -> nn.Module:
    """Undo `attach`: the module's own parameters return, in order; returns the module.

    Raises:
        ValueError: nothing is attached.

    Example:
        >>> import fq, torch
        >>> net = torch.nn.Linear(4, 2)
        >>> weight = net.weight
        >>> net = fq.detach(fq.attach(net, {"weight": fq.quantize(weight, fq.int8())}))
        >>> net.weight is weight
        True
    """
    if _ATTACHED not in module.__dict__:
        raise ValueError(f"detach: nothing is attached to {type(module).__name__}")
    _restore(module.__dict__.pop(_ATTACHED))
    return module


def functional_call(
    module: nn.Module,
    params: Mapping[str, Any],
    args: Any = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    tie_weights: bool = True,
    strict: bool = False,
) -> Any:
    """Call a module with these parameters in place of its own, quantized ones included.

    The signature and semantics of torch.func.functional_call, and exactly its result where no leaf is
    quantized. The module is untouched: its state, parameter order and types are the same afterwards,
    also when the forward raises.

    Args:
        module: any nn.Module.
        params: name -> tensor or QTensor; names left out keep the module's own values.
        args: the positional arguments: a tuple, or one value.
        kwargs: the keyword arguments.
        tie_weights: a value given for one tied name stands at every alias not given itself.
        strict: missing or unexpected float names are an error.

    Raises:
        KeyError: a QTensor's name is no parameter.
        RuntimeError: `strict` and the names do not match.

    Example:
        >>> import fq, torch
        >>> net = torch.nn.Linear(4, 2)
        >>> params = fq.quantize_params(dict(net.named_parameters()), fq.int8())
        >>> fq.functional_call(net, params, torch.ones(3, 4)).shape
        torch.Size([3, 2])
    """
    with _turn(module):
        merged, modules = _merged(params), _modules(module)
        owners: dict[str, Any] = dict(modules)
        held = {name: v for name, v in merged.items() if is_leaf(v) or _is_bound(owners, name)}
        floats = {name: v for name, v in merged.items() if not is_leaf(v)} if merged else params
        places = _placed(modules, held, merged, tie_weights, "functional_call")
        saved, shared = _save(places), _shared(modules)
        try:
            _put(places)
            return torch.func.functional_call(
                module, floats, args, kwargs, tie_weights=tie_weights, strict=strict
            )
        finally:
            if merged:
                _repair(shared, merged, floats)
            _restore(saved)


def _merged(params: Any) -> dict[str, Any]:
    """Return one dict of what torch.func.functional_call takes; {} where it will say what is wrong."""
    if isinstance(params, dict):
        return params
    if not isinstance(params, Sequence) or not all(isinstance(d, dict) for d in params):
        return {}
    merged = {name: value for d in params for name, value in d.items()}
    return merged if len(merged) == sum(len(d) for d in params) else {}


def _is_bound(owners: dict[str, Any], name: str) -> bool:
    """Whether a leaf stands at a name."""
    owner, attribute = _find(owners, name)
    return owner is not None and is_leaf(owner.__dict__.get(attribute))


def _shared(modules: list[tuple[str, nn.Module]]) -> list[Any]:
    """Return (registry, its content) of modules that several paths reach."""
    seen: set[int] = set()
    found: list[Any] = []
    for _, module in modules:
        if id(module) in seen:
            found += [(r, dict(r)) for r in (module._parameters, module._buffers)]
        seen.add(id(module))
    return found


def _repair(shared: list[Any], given: dict[str, Any], after: Mapping[str, Any]) -> None:
    """Write back what the forward assigned to given names, as torch does, and undo what torch spoils.

    It swaps a module of several paths once per path, and then leaves the given value in the module and
    the module's own in the dict (pytorch#164759).
    """
    own = [value for _, before in shared for value in before.values()]
    for registry, before in shared:
        for name, value in before.items():
            if any(registry.get(name) is v for v in given.values()):
                registry[name] = value
    for name, value in after.items():
        if value is not given[name] and not any(value is v for v in own):
            given[name] = value


def _turn(module: nn.Module) -> contextlib.AbstractContextManager[Any]:
    """Let threads that call one module take turns: its attributes are the same for all of them."""
    if torch.compiler.is_compiling():
        return contextlib.nullcontext()
    return _TURNS.setdefault(module, threading.RLock())
