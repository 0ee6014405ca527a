"""Putting parameters into an untouched module: functional_call, bind, and the persistent attach/detach.

For the time of a call, quantized leaves stand as instance attributes and their parameters are out of
`_parameters`; floats are swapped inside it. Both come back, in order, also on error. Simpler mechanisms
break, or silently keep old weights, under torch.compile(module).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fq.leaves import LEAF_TYPES

_ATTACHED = "_fq_attached"


def is_leaf(value: Any) -> bool:
    """Whether a parameter dict's value is one of fq's leaf types."""
    return isinstance(value, LEAF_TYPES)


def _owner(module: nn.Module, name: str, what: str) -> tuple[nn.Module, str]:
    path, _, attribute = name.rpartition(".")
    try:
        return module.get_submodule(path), attribute
    except AttributeError:
        raise KeyError(f"{what}: {name!r} names no parameter of {type(module).__name__}") from None


def _placed(module: nn.Module, values: Mapping[str, Any], what: str) -> tuple[list[Any], dict[str, nn.Module]]:
    """Return (owner, attribute, value) of every name, aliases included, before anything is touched."""
    places: list[Any] = []
    owners: dict[str, nn.Module] = {}
    given: dict[int, Any] = {}
    for name, value in values.items():
        owner, attribute = _owner(module, name, what)
        here = owner._parameters.get(attribute)
        if here is None and not isinstance(owner.__dict__.get(attribute), (*LEAF_TYPES, Tensor)):
            raise KeyError(f"{what}: {name!r} is no parameter of {type(module).__name__}")
        owners[name.rpartition(".")[0]] = owner
        places.append((owner, attribute, value))
        if here is not None:
            given[id(here)] = value
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if name not in values and id(parameter) in given:
            path, _, attribute = name.rpartition(".")
            owner = owners[path] = module.get_submodule(path)
            places.append((owner, attribute, given[id(parameter)]))
    return places, owners


def _put(places: list[Any]) -> None:
    for owner, attribute, value in places:
        if is_leaf(value):
            owner._parameters.pop(attribute, None)
            owner.__dict__[attribute] = value
        else:
            owner.__dict__.pop(attribute, None)
            owner._parameters[attribute] = value


def _snapshot(places: list[Any], owners: Mapping[str, nn.Module]) -> list[Any]:
    return [
        (o, dict(o._parameters), {a: o.__dict__[a] for w, a, _ in places if w is o and a in o.__dict__})
        for o in owners.values()
    ]


def _restore(places: list[Any], saved: list[Any]) -> None:
    for owner, attribute, _ in places:
        owner.__dict__.pop(attribute, None)
    for owner, parameters, attributes in saved:
        owner._parameters.clear()
        owner._parameters.update(parameters)
        owner.__dict__.update(attributes)


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
    places, owners = _placed(module, params, "bind")
    saved = _snapshot(places, owners)
    try:
        _put(places)
        yield module
    finally:
        _restore(places, saved)


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
        raise ValueError(f"attach: {type(module).__name__} has parameters attached already; call fq.detach first")
    places, owners = _placed(module, params, "attach")
    module.__dict__[_ATTACHED] = (places, _snapshot(places, owners))
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
    _restore(*module.__dict__.pop(_ATTACHED))
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
    args = () if args is None else args if isinstance(args, tuple) else (args,)
    held = {k: v for k, v in params.items() if is_leaf(v) or _is_bound(module, k)}
    floats = {k: v for k, v in params.items() if k not in held}
    if not held:
        return torch.func.functional_call(module, floats, args, kwargs, tie_weights=tie_weights, strict=strict)
    places, owners = _placed(module, held, "functional_call")
    if not tie_weights:
        places = places[: len(held)]
    saved = _snapshot(places, owners)
    try:
        _put(places)
        return torch.func.functional_call(module, floats, args, kwargs, tie_weights=tie_weights, strict=strict)
    finally:
        _restore(places, saved)


def _is_bound(module: nn.Module, name: str) -> bool:
    """Whether a leaf stands where the parameter `name` is registered otherwise."""
    path, _, attribute = name.rpartition(".")
    try:
        owner = module.get_submodule(path)
    except AttributeError:
        return False
    return isinstance(owner.__dict__.get(attribute), LEAF_TYPES)
