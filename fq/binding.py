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

from fq.leaves import LEAF_TYPES, check_params, is_leaf

_ATTACHED = "_fq_attached"
_CONFLICT: Any = object()
_REFUSED = (nn.DataParallel, torch.jit.ScriptModule)  # by torch.func.functional_call
_TURNS: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()

Place = tuple[str, nn.Module, str, str, Any]  # name, owner, attribute, which dict of the owner, value


# --- where a name lies ---


def _modules(module: nn.Module, what: str, path: str = "") -> list[tuple[str, nn.Module]]:
    """Return every (dotted path with a final dot, module), a shared module once per path."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"{what}: expected a module, then its parameters; got {type(module).__name__}")
    found = [(path, module)]
    for name, child in module._modules.items():
        if child is not None:
            found += _modules(child, what, f"{path}{name}.")
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


def _home(owner: Any, attribute: str) -> str:
    """Return the name of the owner's dict in which a tensor or leaf stands, "" where none does."""
    if owner is None:
        return ""
    if attribute in owner._parameters:
        return "_parameters"
    if attribute in owner._buffers:
        return "_buffers"
    return "__dict__" if isinstance(owner.__dict__.get(attribute), (*LEAF_TYPES, Tensor)) else ""


def _is_bound(owner: nn.Module, attribute: str, home: str) -> bool:
    """Whether a leaf stands there."""
    return home == "__dict__" and is_leaf(owner.__dict__[attribute])


def _identity(value: Any) -> Any:
    """Return what tells a value from others; Dynamo guards the id of a parameter, so it sees new ties."""
    return id(value) if isinstance(value, nn.Parameter) else value


def _placed(
    modules: list[tuple[str, nn.Module]],
    values: Mapping[str, Any],
    tie: bool,
    what: str,
    lenient: bool = False,
) -> tuple[list[Place], bool]:
    """Return where each value goes, with `tie` at aliases not given too, before anything is touched.

    `lenient` passes over floats that torch.func.functional_call has a word to say about, and the second
    result tells whether there were any; otherwise they are errors, or stand where they were given.
    """
    check_params(what, values)
    owners: dict[str, Any] = dict(modules)
    places: dict[tuple[int, str], Place] = {}
    passed = False
    for name, value in values.items():
        owner, attribute = _find(owners, name)
        home, leaf = _home(owner, attribute), is_leaf(value)
        known = home != "" and not (leaf and home == "_buffers")
        slot = (id(owner), attribute)
        other = places[slot][4] if slot in places else value
        if lenient and not leaf and not (known and isinstance(value, Tensor)):
            passed = True
        elif not known:
            raise KeyError(f"{what}: {name!r} is no parameter of {type(modules[0][1]).__name__}")
        elif not leaf and not isinstance(value, Tensor | None):
            raise TypeError(f"{what}: {name!r} must be a tensor or a QTensor, got {type(value).__name__}")
        elif other is value:
            places[slot] = (name, owner, attribute, home, value)
        elif lenient and not leaf and not is_leaf(other):
            passed = True
        else:
            raise ValueError(
                f"{what}: {name!r} and another name are one parameter; they got different values"
            )
    if not tie:
        return list(places.values()), passed
    others = [o for o in _others(modules, set(values), places) if (id(o[1]), o[2]) not in places]
    aliases, contradictory = _aliases(list(places.values()), others, what)
    return [*places.values(), *aliases], passed or contradictory


def _others(
    modules: list[tuple[str, nn.Module]], names: set[str], places: Mapping[Any, Place]
) -> list[tuple[str, nn.Module, str, str]]:
    """Return (name, owner, attribute, dict) of all that is not named and may be tied to what is placed."""
    found = [(path + a, owner, a, "_parameters") for path, owner in modules for a in owner._parameters]
    homes = {place[3] for place in places.values()}
    if "_buffers" in homes:
        found += [(path + a, owner, a, "_buffers") for path, owner in modules for a in owner._buffers]
    if "__dict__" in homes:
        for path, owner in modules:
            found += [(path + a, owner, a, "__dict__") for a, v in owner.__dict__.items() if is_leaf(v)]
    return [other for other in found if other[0] not in names]


def _aliases(
    places: list[Place], others: list[tuple[str, nn.Module, str, str]], what: str
) -> tuple[list[Place], bool]:
    """Return places for those of `others` that are tied to given ones, and whether tied floats contradict."""
    given: dict[Any, Any] = {}  # what stands at the places now -> the value that replaces it
    contradictory = False
    for _, owner, attribute, home, value in places:
        here, leaf = getattr(owner, home)[attribute], is_leaf(value)
        if here is None:
            continue
        tied = given.get(_identity(here), value)
        if tied is _CONFLICT or (tied is not value and leaf == is_leaf(tied)):
            given[_identity(here)] = _CONFLICT
            contradictory = contradictory or not leaf
        elif leaf or not is_leaf(tied):  # a leaf goes before a float
            given[_identity(here)] = value
    found = []
    for name, owner, attribute, home in others:
        here = getattr(owner, home)[attribute]
        value = None if here is None else given.get(_identity(here))
        if value is _CONFLICT:
            raise ValueError(f"{what}: {name!r} is tied to names of different values; give it too")
        if value is not None:
            found.append((name, owner, attribute, home, value))
    return found, contradictory


# --- putting and restoring ---


def _save(places: list[Place]) -> list[Any]:
    """Return what `_restore` needs: per owner its parameters in order, and what stands at each attribute."""
    saved: dict[int, Any] = {}
    for _, owner, attribute, home, _ in places:
        if id(owner) not in saved:
            saved[id(owner)] = (owner, dict(owner._parameters), {})
        here = None if home == "_parameters" else getattr(owner, home)[attribute]
        saved[id(owner)][2][attribute] = (home, here)
    return list(saved.values())


def _put(places: list[Place]) -> None:
    for _, owner, attribute, home, value in places:
        if is_leaf(value):
            owner._parameters.pop(attribute, None)
            owner.__dict__[attribute] = value
        elif _is_bound(owner, attribute, home):
            del owner.__dict__[attribute]
            owner._parameters[attribute] = value
        else:
            getattr(owner, home)[attribute] = value


def _restore(saved: list[Any]) -> None:
    for owner, parameters, attributes in saved:
        # what the forward itself assigned to other names stays, as under torch.func.functional_call
        parameters.update({a: p for a, p in owner._parameters.items() if a not in attributes})
        owner._parameters.clear()
        owner._parameters.update(parameters)
        for attribute, (home, here) in attributes.items():
            owner.__dict__.pop(attribute, None)
            if home == "_buffers":
                owner._buffers[attribute] = here
            elif home == "__dict__":
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
    places, _ = _placed(_modules(module, "bind"), params, True, "bind")
    saved = _save(places)
    try:
        _put(places)
        yield module
    finally:
        _restore(saved)


def attach(module: nn.Module, params: Mapping[str, Any]) -> nn.Module:
    """Bind `params` until `detach`, for code that wants a module, such as torch.export; returns the module.

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
    modules = _modules(module, "attach")
    if _ATTACHED in module.__dict__:
        raise ValueError(
            f"attach: {type(module).__name__} has parameters attached already; call fq.detach first"
        )
    places, _ = _placed(modules, params, True, "attach")
    module.__dict__[_ATTACHED] = _save(places)
    _put(_as_parameters(places))
    return module


def _as_parameters(places: list[Place]) -> list[Place]:
    """Make parameters of plain tensors that will stand for some; torch.export and others insist."""
    made: dict[int, nn.Parameter] = {}
    out = []
    for name, owner, attribute, home, value in places:
        if type(value) is Tensor and home == "_parameters" and value.grad_fn is None:
            value = made.setdefault(id(value), nn.Parameter(value, value.requires_grad))
        out.append((name, owner, attribute, home, value))
    return out


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
    if _ATTACHED not in getattr(module, "__dict__", ()):
        raise ValueError(f"detach: nothing is attached to {type(module).__name__}")
    _restore(module.__dict__.pop(_ATTACHED))
    return module


def functional_call(
    module: nn.Module,
    params: dict[str, Any] | Sequence[dict[str, Any]],
    args: Any = None,
    kwargs: dict[str, Any] | None = None,
    *,
    tie_weights: bool = True,
    strict: bool = False,
) -> Any:
    """Call a module with these parameters in place of its own, quantized ones included.

    The signature and semantics of torch.func.functional_call, and exactly its result where no leaf is
    quantized. The module is untouched: its state, parameter order and types are the same afterwards,
    also when the forward raises. Threads that call one module take turns.

    Args:
        module: any nn.Module.
        params: name -> tensor or QTensor, or several such dicts; names left out keep their own values.
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
    modules = _modules(module, "functional_call")
    with _turn(module):
        merged = _merged(params)
        places, passed = _placed(modules, merged, tie_weights, "functional_call", lenient=True)
        leaves = [p for p in places if is_leaf(p[4]) or _is_bound(p[1], p[2], p[3])]
        floats: Any = params
        shared: list[Any] = []
        by_torch = not leaves or passed or strict or isinstance(module, _REFUSED)
        if by_torch:  # its results where there are no leaves, and its errors
            places, shared = leaves, _shared(modules)
            floats = {n: v for n, v in merged.items() if not is_leaf(v)} if merged else params
        saved = _save(places)
        try:
            _put(places)
            if by_torch:
                return torch.func.functional_call(
                    module, floats, args, kwargs, tie_weights=tie_weights, strict=strict
                )
            args = () if args is None else args if isinstance(args, tuple) else (args,)
            return module(*args, **(kwargs or {}))
        finally:
            if not by_torch:
                _note_assigned(merged, places)
            elif merged:
                _write_back(merged, floats, shared)
            _restore(saved)


def _merged(params: Any) -> dict[str, Any]:
    """Return one dict of what torch.func.functional_call takes; {} where it will say what is wrong."""
    if isinstance(params, dict):
        return params
    if not isinstance(params, Sequence) or not all(isinstance(d, dict) for d in params):
        return {}
    merged = {name: value for d in params for name, value in d.items()}
    return merged if len(merged) == sum(len(d) for d in params) else {}


def _shared(modules: list[tuple[str, nn.Module]]) -> list[Any]:
    """Return (registry, its content) of modules that several paths reach."""
    seen: set[int] = set()
    found: list[Any] = []
    for _, module in modules:
        if id(module) in seen:
            found += [(r, dict(r)) for r in (module._parameters, module._buffers)]
        seen.add(id(module))
    return found


def _note_assigned(given: dict[str, Any], places: list[Place]) -> None:
    """Put what a forward assigned to given names into the dict, as torch.func.functional_call does."""
    for name, owner, attribute, home, value in places:
        after = owner._parameters.get(attribute, getattr(owner, home).get(attribute, value))
        if after is not value and name in given and not is_leaf(value):
            given[name] = after


def _write_back(given: dict[str, Any], after: Mapping[str, Any], shared: list[Any]) -> None:
    """Put what torch.func.functional_call noted into the dict, and undo what it spoils.

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
