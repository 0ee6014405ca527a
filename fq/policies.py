"""Which parameter gets which layout: policies, roles, ties, and the Plan that says so beforehand."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from fq.checks import FLOATS
from fq.layouts import Layout
from fq.layouts.layout import changed
from fq.leaves import LEAF_TYPES
from fq.primitives import quantize
from fq.qtensor import QTensor
from fq.roles import Role, guessed_roles, module_roles, view_key

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
        if role in ("convolution", "recurrent") and policy.act is not None:
            return None, f"{role} weights have no rule with quantized activations, which the layout has"
        if role == "recurrent":
            return policy, "policy; decoded in every call"
        quantized = role in ("matmul", "convolution")
        return (policy, "policy") if quantized else (None, f"{role} is kept by default")
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


def plan(
    module_or_params: nn.Module | Mapping[str, Any],
    policy: Policy,
    *,
    example: tuple[tuple[Any, ...], dict[str, Any]] | None = None,
) -> Plan:
    """Say which parameters will be quantized, how, and why the others are kept; prints as a table.

    Args:
        module_or_params: a module, whose roles come from its types, or a dict of name -> tensor, whose
            roles are guessed from names and shapes and printed as guesses.
        policy: a Layout for every matmul weight (embeddings, heads, routers, norms and biases stay); a
            dict of pattern -> Layout or None, the first match wins; or a function (name, tensor) ->
            Layout or None. A pattern of `[A-Za-z0-9_.]` is a run of whole name components; anything
            else, or a leading `re:`, is a regular expression for the whole name.
        example: (args, kwargs) of one forward, run to see what it does with each parameter: for modules
            whose types say too little. It may be on the meta device, as the module.

    A layout of axis -1 is turned to -2 where the matmul contracts the other dimension: the weights (in, out)
    of transformers' Conv1D, experts (E, in, out).

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
        roles = module_roles(module_or_params, example)
    elif example is not None:
        raise TypeError("plan: example= runs a module, got a dict of tensors")
    else:
        params = _checked(module_or_params)
        roles = guessed_roles(params)
    used: set[str] = set()
    seen: dict[Any, dict[str | None, str]] = {}
    decided = {name: _decide(policy, roles[name].name, name, value, used) for name, value in params.items()}
    _check_used(policy, params, used)
    _check_values(params, [name for name, (layout, _) in decided.items() if layout is not None])
    return Plan(tuple(_entry(n, v, roles[n], *decided[n], seen) for n, v in params.items()))


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
    role: Role,
    layout: Layout | None,
    reason: str,
    seen: dict[Any, dict[str | None, str]],
) -> Entry:
    if isinstance(value, LEAF_TYPES):
        reason = f"already quantized ({_form(value)})"
    if layout is not None and layout.axis == -1 and role.axis == -2 and value.ndim > 1:
        layout = changed(layout.key, axis=-2)
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
    axis = layout.axis if layout is not None else role.axis
    return Entry(
        name,
        tuple(value.shape),
        value.dtype,
        role.name,
        layout,
        reason,
        nbytes,
        axis,
        role.inner,
        tied_to,
        untied_from,
        role.guessed,
    )
