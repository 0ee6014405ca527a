"""Which parameter gets which layout: policies, roles, ties, and the Plan that says so beforehand."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fq.layouts import Layout
from fq.leaves import LEAF_TYPES
from fq.primitives import quantize
from fq.qtensor import QTensor

Policy = Layout | Mapping[str, Layout | None] | Callable[[str, Any], Layout | None]


@dataclass(frozen=True)
class Entry:
    """What happens to one parameter: `layout` None means it is kept, and `reason` says why."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    role: str
    layout: Layout | None
    reason: str
    axis: int = -1
    inner: int = 1
    tied_to: str | None = None
    guessed: bool = False

    @property
    def bytes_before(self) -> int:
        return 0 if self.tied_to else _numel(self.shape) * self.dtype.itemsize

    @property
    def bytes_after(self) -> int:
        if self.layout is None or self.tied_to:
            return self.bytes_before
        return quantized_bytes(self.shape, self.layout, self.inner)


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


def _numel(shape: tuple[int, ...]) -> int:
    out = 1
    for n in shape:
        out *= n
    return out


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
    return layout, "policy function" if layout is not None else "policy function keeps it"


def _check_policy(policy: Any) -> None:
    if isinstance(policy, Layout) or callable(policy):
        return
    if not isinstance(policy, Mapping):
        raise TypeError(
            f"plan: a policy is a Layout, a dict of pattern -> Layout or a function, got {policy!r}"
        )
    for pattern, layout in policy.items():
        if not isinstance(pattern, str) or not (layout is None or isinstance(layout, Layout)):
            raise TypeError(f"plan: expected pattern -> Layout or None, got {pattern!r}: {layout!r}")


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
    if parts & _ROUTERS and value.shape[-2] < value.shape[-1]:
        return "router"
    return "matmul"


def _module_roles(module: nn.Module) -> dict[str, str]:
    """Return the role of every parameter by the type of the module that owns it."""
    roles: dict[str, str] = {}
    embeddings = [m for m in module.modules() if isinstance(m, nn.Embedding)]
    tied = {id(m.weight) for m in embeddings if "weight" in m._parameters}
    counts = {m.num_embeddings for m in embeddings}
    for path, owner in module.named_modules(remove_duplicate=False):
        for attribute, parameter in owner._parameters.items():
            if parameter is None:
                continue
            name = f"{path}.{attribute}" if path else attribute
            if isinstance(owner, nn.Embedding):
                roles[name] = "embedding"
            elif isinstance(owner, nn.Linear) and attribute == "weight":
                last = path.rpartition(".")[2]
                is_head = id(parameter) in tied or last in _HEADS or owner.out_features in counts
                roles[name] = "head" if is_head else "matmul"
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
        TypeError: the policy is of the wrong kind.
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
        params, roles, guessed = module_or_params, None, True
    used: set[str] = set()
    seen: dict[Any, str] = {}
    entries = [_entry(name, value, policy, roles, guessed, used, seen) for name, value in params.items()]
    if isinstance(policy, Mapping):
        unused = [p for p in policy if p not in used]
        if unused:
            raise ValueError(f"plan: patterns that match nothing: {', '.join(map(repr, unused))}")
    decided = {e.name: e for e in entries}
    return Plan(tuple(_follow_tie(e, decided) for e in entries))


def _entry(
    name: str,
    value: Any,
    policy: Policy,
    roles: Mapping[str, str] | None,
    guessed: bool,
    used: set[str],
    seen: dict[Any, str],
) -> Entry:
    shape = tuple(value.shape)
    role = roles.get(name, "other") if roles is not None else _guess(name, value)
    layout, reason = _decide(policy, role, name, value, used)
    if isinstance(value, LEAF_TYPES):
        if layout is not None:
            form = value.layout.key if isinstance(value, QTensor) else type(value).__name__
            raise ValueError(
                f"plan: {name} is already quantized ({form}); use fq.requantize, or leave it out"
            )
        return Entry(name, shape, value.dtype, role, None, "already quantized", guessed=guessed)
    if layout is not None and not value.is_floating_point():
        raise ValueError(f"plan: {name} is {value.dtype}; only float tensors are quantized")
    if layout is not None and value.ndim == 0:
        raise ValueError(f"plan: {name} has no dimension; it cannot be quantized")
    tied_to = _tie(name, value, seen)
    axis = layout.axis if layout is not None else -1
    return Entry(name, shape, value.dtype, role, layout, reason, axis, 1, tied_to, guessed)


def _tie(name: str, value: Tensor, seen: dict[Any, str]) -> str | None:
    """Return the first name with the same storage and view, if there is one."""
    if torch._C._functorch.is_functorch_wrapped_tensor(value):  # type: ignore[attr-defined]
        key: Any = id(value)  # inside a transform there is no storage to compare
    else:
        storage = value.untyped_storage()._cdata
        key = (storage, value.storage_offset(), tuple(value.shape), tuple(value.stride()))
    first = seen.setdefault(key, name)
    return None if first == name else first


def _follow_tie(entry: Entry, decided: Mapping[str, Entry]) -> Entry:
    """Share a packed tensor between tied names of one layout; names given different layouts part."""
    if entry.tied_to is None:
        return entry
    first = decided[entry.tied_to]
    if first.layout == entry.layout:
        return entry
    return replace(entry, tied_to=None, reason=f"{entry.reason}; untied from {first.name}")
