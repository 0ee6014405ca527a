"""What each parameter is for, and along which axis: by module types, by a recorded run, or guessed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from fq.recording import Use, record


@dataclass(frozen=True)
class Role:
    """What a parameter is for, the axis a matmul contracts, and how many trailing dimensions that is."""

    name: str
    axis: int = -1
    inner: int = 1
    guessed: bool = False


_EMBEDDINGS = {"embed", "embedding", "embeddings", "embed_tokens", "wte", "wpe", "word_embeddings", "shared"}
_HEADS = {"lm_head", "head", "classifier", "score", "cls", "qa_outputs"}
_ROUTERS = {"router", "gate"}


def guessed_roles(params: Mapping[str, Any]) -> dict[str, Role]:
    """Guess the role of every entry of a bare dict; what shares an embedding's storage is a head."""
    names = {name: _guess(name, value) for name, value in params.items()}
    embeddings = {view_key(params[name]) for name, role in names.items() if role == "embedding"}
    if embeddings:
        for name, role in names.items():
            if role == "matmul" and view_key(params[name]) in embeddings:
                names[name] = "head"
    return {
        name: Role(role, inner=params[name].ndim - 1 if role == "convolution" else 1, guessed=True)
        for name, role in names.items()
    }


def _guess(name: str, value: Any) -> str:
    """Guess a role from a bare name and shape."""
    parts = set(name.split("."))
    if value.ndim < 2:
        return "vector"
    if parts & _EMBEDDINGS or any(p.endswith(("_embedding", "_embeddings")) for p in parts):
        return "embedding"
    if parts & _HEADS:
        return "head"
    if value.ndim > 3:  # of three dimensions experts are likelier than a Conv1d
        return "convolution"
    return "router" if _is_router(name, value) else "matmul"


def _is_router(name: str, value: Any) -> bool:
    """Whether a matrix chooses among experts: fewer outputs than inputs, and named so."""
    return bool(_ROUTERS & set(name.split("."))) and value.shape[-2] < value.shape[-1]


def _is_conv1d(owner: nn.Module) -> bool:
    """Whether a module is transformers' Conv1D: a linear layer whose weight is (in, out)."""
    return type(owner).__name__ == "Conv1D" and type(owner).__module__.startswith("transformers.")


def module_roles(module: nn.Module, example: Any = None) -> dict[str, Role]:
    """Return the role of every parameter by the type of its owner, or by what one forward does with it."""
    roles = _typed_roles(module)
    if example is None:
        return roles
    args, kwargs = _example(example)
    uses, firsts = record(module, args, kwargs), _first_names(module)
    values = dict(module.named_parameters(remove_duplicate=False))
    return {name: _recorded(name, values[name], role, uses[firsts[name]]) for name, role in roles.items()}


def _typed_roles(module: nn.Module) -> dict[str, Role]:
    roles: dict[str, Role] = {}
    embeddings = [m for m in module.modules() if isinstance(m, nn.Embedding)]
    tied = {id(m.weight) for m in embeddings if "weight" in m._parameters}
    sizes = {(m.num_embeddings, m.embedding_dim) for m in embeddings}
    for path, owner in module.named_modules(remove_duplicate=False):
        for attribute, parameter in owner._parameters.items():
            if parameter is None:
                continue
            name = f"{path}.{attribute}" if path else attribute
            if isinstance(owner, nn.Embedding):
                roles[name] = Role("embedding")
            elif isinstance(owner, nn.Linear) and attribute == "weight":
                last, size = path.rpartition(".")[2], (owner.out_features, owner.in_features)
                is_head = id(parameter) in tied or last in _HEADS or (size in sizes and size[0] != size[1])
                roles[name] = Role(
                    "head" if is_head else "router" if _is_router(name, parameter) else "matmul"
                )
            elif parameter.ndim < 2:
                roles[name] = Role("vector")
            elif _is_conv1d(owner) and attribute == "weight":
                roles[name] = Role("matmul", axis=-2)
            elif isinstance(owner, nn.MultiheadAttention) and attribute.endswith("proj_weight"):
                roles[name] = Role("matmul")
            elif isinstance(owner, nn.RNNBase | nn.RNNCellBase):
                roles[name] = Role("recurrent")
            elif isinstance(owner, _ConvNd):
                roles[name] = _convolution(parameter)
            elif parameter.ndim == 3 and isinstance(getattr(owner, "is_transposed", None), bool):
                roles[name] = Role("matmul", axis=-2 if owner.is_transposed else -1)  # transformers' experts
            else:
                roles[name] = Role(type(owner).__name__)
    return roles


def _example(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example, tuple) and len(example) == 2:
        args, kwargs = example
        if isinstance(args, tuple) and isinstance(kwargs, dict):
            return args, kwargs
    raise TypeError(f"plan: example must be (args, kwargs), a tuple and a dict, got {type(example).__name__}")


def _first_names(module: nn.Module) -> dict[str, str]:
    """Return, for every name of a parameter, the first name of the same parameter."""
    firsts = {id(p): name for name, p in module.named_parameters()}
    return {name: firsts[id(p)] for name, p in module.named_parameters(remove_duplicate=False)}


def _convolution(weight: Tensor) -> Role:
    """Return the role of a weight (O, C/groups, *kernel); of those one channel deep there is little."""
    return Role("depthwise convolution" if weight.shape[1] == 1 else "convolution", inner=weight.ndim - 1)


def _recorded(name: str, value: Tensor, role: Role, uses: list[Use]) -> Role:
    """Return the role that uses tell; which matmuls are heads and routers, types and names tell."""
    if role.name == "vector":
        return role
    names = {use.role for use in uses}
    if not uses:
        return replace(role, name="unused in the example")
    if names == {"matmul"}:
        axes = {use.axis for use in uses}
        if len(axes) > 1 or not axes <= {-1, -2}:
            return replace(role, name=f"matmul along axes {', '.join(map(str, sorted(axes)))}")
        told = role.name if role.name in ("matmul", "head", "router") else _guess(name, value)
        return Role(told if told in ("head", "router") else "matmul", axis=axes.pop())
    if names == {"convolution"} and value.ndim > 2:
        return _convolution(value)
    if role.name == "recurrent":
        return role
    if names <= {"matmul", "embedding"}:
        return role if role.name in ("embedding", "head") else Role("embedding")
    return replace(role, name=" + ".join(sorted(names)))


# --- ties ---


def view_key(value: Any) -> Any:
    """Return what two values have in common that are the same numbers of the same storage."""
    if torch.compiler.is_compiling():
        return id(value)  # Dynamo sees no storages
    if isinstance(value, Tensor):
        return _view(value)
    leaves, spec = pytree.tree_flatten(value)
    return spec, *map(_view, leaves)


def _view(t: Tensor) -> Any:
    if torch._C._functorch.is_functorch_wrapped_tensor(t):  # type: ignore[attr-defined]
        return id(t)  # inside a transform there is no storage to compare
    storage = t.untyped_storage()._cdata  # on meta every data_ptr is 0
    return storage, t.storage_offset(), t.dtype, tuple(t.shape), tuple(t.stride())
