"""Which parameter gets which layout: policies, roles, ties, and the Plan that says so beforehand."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from fq.checks import FLOATS
from fq.layouts import Layout
from fq.leaves import LEAF_TYPES
from fq.primitives import quantize
from fq.qtensor import QTensor

Policy = Layout | Mapping[str, Layout | None] | Callable[[str, Any], Layout | None]


@dataclass(frozen=True)
class Entry:
    """What happens to one parameter: `layout` None means it is kept, and `reason` says why.

    `tied_to` is the first name of the same storage and layout, whose result it shares; `untied_from` the
    first name of the same storage where the layouts differ. A storage's `nbytes` count once.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    role: str
    layout: Layout | None
    reason: str
    nbytes: int
    axis: int = -1
    inner: int = 1
    tied_to: str | None = None
    untied_from: str | None = None
    guessed: bool = False

    @property
    def bytes_before(self) -> int:
        return 0 if self.tied_to or self.untied_from else self.nbytes

    @property
    def bytes_after(self) -> int:
        if self.tied_to:
            return 0
        return self.nbytes if self.layout is None else quantized_bytes(self.shape, self.layout, self.inner)


@dataclass(frozen=True)
class Plan:
    """What `quantize_params` will do, parameter by parameter; prints as a table."""

    entries: tuple[Entry, ...]

    def __getitem__(self, name: str) -> Entry:
        for entry in self.entries:
            if entry.name == name:
                return entry
        raise KeyError(f"plan: no parameter {name!r}")

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def quantized(self) -> tuple[str, ...]:
        """Names that become QTensors."""
        return tuple(e.name for e in self.entries if e.layout is not None)

    def __str__(self) -> str:
        head = ("name", "shape", "role", "layout", "MB", "", "reason")
        body = [
            (
                e.name,
                "×".join(map(str, e.shape)),
                f"{e.role}{' (guess)' if e.guessed else ''}",
                "-" if e.layout is None else e.layout.key,
                f"{e.bytes_before / 1e6:.2f}",
                f"{e.bytes_after / 1e6:.2f}",
                e.reason,
            )
            for e in self.entries
        ]
        before, after = sum(e.bytes_before for e in self.entries), sum(e.bytes_after for e in self.entries)
        note = f"{len(self.quantized)} of {len(self.entries)} quantized"
        return table([head, *body, ("total", "", "", "", f"{before / 1e6:.2f}", f"{after / 1e6:.2f}", note)])

    __repr__ = __str__


def table(rows: list[tuple[str, ...]]) -> str:
    """Return rows as text in aligned columns."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def quantized_bytes(shape: tuple[int, ...], layout: Layout, inner: int = 1) -> int:
    """Return the bytes of a QTensor of a logical shape, without making it."""
    return quantize(torch.empty(shape, device="meta"), layout, inner=inner).nbytes


# --- policies ---


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern matches a parameter's name.

    A pattern of letters, digits, `_` and `.` is a run of whole dotted components; anything else, or a
    leading `re:`, is a regular expression for the whole name.
    """
    if pattern.startswith("re:"):
        return re.fullmatch(pattern[3:], name) is not None
    if re.fullmatch(r"[A-Za-z0-9_.]+", pattern):
        return f".{pattern}." in f".{name}."
    return re.fullmatch(pattern, name) is not None


def _decide(policy: Policy, role: str, name: str, value: Any, used: set[str]) -> tuple[Layout | None, str]:
    """Return the layout that a policy gives a parameter, and the reason."""
    vector = value.ndim < 2
    if isinstance(policy, Layout):
        if vector:
            return None, f"{value.ndim}-dimensional"
        if value.dtype not in FLOATS:
            return None, f"{value.dtype} is no float to quantize"
        return (policy, "policy") if role == "matmul" else (None, f"{role} is kept by default")
    if isinstance(policy, Mapping):
        for pattern, layout in policy.items():
            if matches(pattern, name):
                used.add(pattern)
                if vector and pattern != name and layout is not None:
                    return None, f"{value.ndim}-dimensional; only its whole name quantizes it"
                return (
                    layout,
                    f"pattern {pattern!r}" if layout is not None else f"pattern {pattern!r} keeps it",
                )
        return None, "no pattern matches"
    layout = policy(name, value)
    if layout is not None and not isinstance(layout, Layout):
        raise TypeError(
            f"plan: the policy function returned {layout!r} for {name}; expected a Layout or None"
        )
    if vector and layout is not None:
        return None, f"{value.ndim}-dimensional; only a pattern that is its whole name quantizes it"
    return layout, "policy function" if layout is not None else "policy function keeps it"


def _check_policy(policy: Any) -> None:
    if not isinstance(policy, Mapping):
        if isinstance(policy, Layout) or callable(policy):
            return
        raise TypeError(
            f"plan: a policy is a Layout, a dict of pattern -> Layout or a function, got {policy!r}"
        )
    for pattern, layout in policy.items():
        if not isinstance(pattern, str) or not (layout is None or isinstance(layout, Layout)):
            raise TypeError(f"plan: expected pattern -> Layout or None, got {pattern!r}: {layout!r}")
        try:
            matches(pattern, "")
        except re.error as error:
            raise ValueError(f"plan: pattern {pattern!r} is no regular expression: {error}") from None


def _check_used(policy: Policy, names: Iterable[str], used: set[str]) -> None:
    """Raise on patterns that decided nothing."""
    unused = [p for p in policy if p not in used] if isinstance(policy, Mapping) else []
    nothing = [p for p in unused if not any(matches(p, name) for name in names)]
    if nothing:
        raise ValueError(f"plan: patterns that match nothing: {', '.join(map(repr, nothing))}")
    if unused:
        raise ValueError(
            f"plan: earlier patterns match all that these do: {', '.join(map(repr, unused))}; move them up"
        )


# --- roles ---

_EMBEDDINGS = {"embed", "embedding", "embeddings", "embed_tokens", "wte", "wpe", "word_embeddings", "shared"}
_HEADS = {"lm_head", "head", "classifier", "score", "cls", "qa_outputs"}
_ROUTERS = {"router", "gate"}


def _guess(name: str, value: Any) -> str:
    """Guess a role from a bare name and shape."""
    parts = set(name.split("."))
    if value.ndim < 2:
        return "vector"
    if parts & _EMBEDDINGS or any(p.endswith(("_embedding", "_embeddings")) for p in parts):
        return "embedding"
    if parts & _HEADS:
        return "head"
    return "router" if _is_router(name, value) else "matmul"


def _is_router(name: str, value: Any) -> bool:
    """Whether a matrix chooses among experts: fewer outputs than inputs, and named so."""
    return bool(_ROUTERS & set(name.split("."))) and value.shape[-2] < value.shape[-1]


def _guessed_roles(params: Mapping[str, Any]) -> dict[str, str]:
    """Guess the role of every entry of a bare dict; what shares an embedding's storage is a head."""
    roles = {name: _guess(name, value) for name, value in params.items()}
    embeddings = {view_key(params[name]) for name, role in roles.items() if role == "embedding"}
    if embeddings:
        for name, role in roles.items():
            if role == "matmul" and view_key(params[name]) in embeddings:
                roles[name] = "head"
    return roles


def _is_linear(owner: nn.Module) -> bool:
    """Whether a module multiplies by its weight; torch marks those whose owner reads the weight itself."""
    return isinstance(owner, nn.Linear) and not isinstance(owner, NonDynamicallyQuantizableLinear)


def _module_roles(module: nn.Module) -> dict[str, str]:
    """Return the role of every parameter by the type of the module that owns it."""
    roles: dict[str, str] = {}
    embeddings = [m for m in module.modules() if isinstance(m, nn.Embedding)]
    tied = {id(m.weight) for m in embeddings if "weight" in m._parameters}
    sizes = {(m.num_embeddings, m.embedding_dim) for m in embeddings}
    for path, owner in module.named_modules(remove_duplicate=False):
        for attribute, parameter in owner._parameters.items():
            if parameter is None:
                continue
            name = f"{path}.{attribute}" if path else attribute
            if isinstance(owner, nn.Embedding):
                roles[name] = "embedding"
            elif _is_linear(owner) and attribute == "weight":
                last, size = path.rpartition(".")[2], (owner.out_features, owner.in_features)
                is_head = id(parameter) in tied or last in _HEADS or (size in sizes and size[0] != size[1])
                roles[name] = "head" if is_head else "router" if _is_router(name, parameter) else "matmul"
            elif parameter.ndim < 2:
                roles[name] = "vector"
            else:
                roles[name] = type(owner).__name__
    return roles


def plan(module_or_params: nn.Module | Mapping[str, Any], policy: Policy) -> Plan:
    """Say which parameters will be quantized, how, and why the others are kept; prints as a table.

    Args:
        module_or_params: a module, whose roles come from its types, or a dict of name -> tensor, whose
            roles are guessed from names and shapes and printed as guesses.
        policy: a Layout for every matmul weight (embeddings, heads, routers, norms and biases stay); a
            dict of pattern -> Layout or None, the first match wins; or a function (name, tensor) ->
            Layout or None. A pattern of `[A-Za-z0-9_.]` is a run of whole name components; anything
            else, or a leading `re:`, is a regular expression for the whole name.

    Raises:
        TypeError: the policy or a parameter is of the wrong kind, or integers are to be quantized.
        ValueError: a pattern matches nothing, or a matched tensor is already quantized.

    Example:
        >>> import fq, torch
        >>> net = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Linear(4, 6))
        >>> fq.plan(net, fq.int8()).quantized
        ('1.weight',)
    """
    _check_policy(policy)
    if isinstance(module_or_params, nn.Module):
        params: Mapping[str, Any] = dict(module_or_params.named_parameters(remove_duplicate=False))
        roles, guessed = _module_roles(module_or_params), False
    else:
        params = _checked(module_or_params)
        roles, guessed = _guessed_roles(params), True
    used: set[str] = set()
    seen: dict[Any, dict[str | None, str]] = {}
    decided = {name: _decide(policy, roles[name], name, value, used) for name, value in params.items()}
    _check_used(policy, params, used)
    _check_values(params, [name for name, (layout, _) in decided.items() if layout is not None])
    return Plan(tuple(_entry(n, v, roles[n], *decided[n], guessed, seen) for n, v in params.items()))


def _checked(params: Any) -> Mapping[str, Any]:
    if not isinstance(params, Mapping):
        raise TypeError(f"plan: expected a module or a dict of name -> tensor, got {type(params).__name__}")
    for name, value in params.items():
        if not isinstance(value, (Tensor, *LEAF_TYPES)):
            raise TypeError(f"plan: {name} must be a tensor, got {type(value).__name__}")
    return params


def _check_values(params: Mapping[str, Any], names: list[str]) -> None:
    """Raise on values that cannot be quantized, naming all of them."""
    done = [n for n in names if isinstance(params[n], LEAF_TYPES)]
    if done:
        forms = ", ".join(f"{n} is already quantized ({_form(params[n])})" for n in done)
        raise ValueError(f"plan: {forms}; use fq.requantize, or leave it out")
    wrong = [f"{n} is {params[n].dtype}" for n in names if params[n].dtype not in FLOATS]
    if wrong:
        raise TypeError(f"plan: {', '.join(wrong)}; only tensors of 16-bit floats or wider are quantized")
    scalars = [n for n in names if params[n].ndim == 0]
    if scalars:
        raise ValueError(f"plan: {', '.join(scalars)}: a tensor without dimensions cannot be quantized")


def _form(leaf: Any) -> str:
    return leaf.layout.key if isinstance(leaf, QTensor) else type(leaf).__name__


def _entry(
    name: str,
    value: Any,
    role: str,
    layout: Layout | None,
    reason: str,
    guessed: bool,
    seen: dict[Any, dict[str | None, str]],
) -> Entry:
    if isinstance(value, LEAF_TYPES):
        reason = f"already quantized ({_form(value)})"
    key = None if layout is None else layout.key
    names = seen.setdefault(view_key(value), {})  # those of one storage, by layout
    first = next(iter(names.values()), None)
    tied_to = names.setdefault(key, name)
    if tied_to != name:
        reason, untied_from = f"{reason}; tied to {tied_to}", None
    elif first is not None:
        reason, tied_to, untied_from = f"{reason}; untied from {first}", None, first
    else:
        tied_to = untied_from = None
    nbytes = sum(t.nbytes for t in pytree.tree_leaves(value))
    axis = layout.axis if layout is not None else -1
    return Entry(
        name,
        tuple(value.shape),
        value.dtype,
        role,
        layout,
        reason,
        nbytes,
        axis,
        1,
        tied_to,
        untied_from,
        guessed,
    )


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
