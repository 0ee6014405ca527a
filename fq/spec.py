"""Taking a QTensor apart into tensors and a Spec of constants, which can stand in a graph, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fq.layouts import Layout, block, layout
from fq.layouts.layout import stored_layout
from fq.layouts.storage import CANONICAL, HOOKS
from fq.qtensor import CHILDREN, QTensor

# Spec: what a QTensor is besides its tensors, all constants, so that it can stand in a graph.
Spec = tuple[str, torch.dtype, tuple[int, ...], tuple[tuple[str, Any], ...]]


def to_leaves(q: QTensor) -> tuple[list[Tensor], Spec]:
    """Return the tensors of q and a Spec of constants from which `from_leaves` rebuilds it."""
    leaves: list[Tensor] = []
    names: list[tuple[str, Any]] = []
    for name in CHILDREN:
        child = getattr(q, name)
        if child is None:
            continue
        if isinstance(child, QTensor):
            nested, spec = to_leaves(child)
            leaves.extend(nested)
            names.append((name, spec))
        else:
            leaves.append(child)
            names.append((name, None))
    return leaves, (q.layout.key, q.dtype, q.inner, tuple(names))


def from_leaves(leaves: Sequence[Any], spec: Spec) -> QTensor:
    """Rebuild the QTensor that `to_leaves` took apart."""
    remaining = iter(leaves)

    def build(spec: Spec) -> QTensor:
        key, dtype, inner, names = spec
        children: dict[str, Any] = {
            name: next(remaining) if nested is None else build(nested) for name, nested in names
        }
        return QTensor(layout=layout(key), dtype=dtype, inner=inner, **children)

    return build(spec)


def canonical_leaf(q: QTensor) -> QTensor:
    """Return q in canonical storage."""
    return q if q.layout.storage == CANONICAL else HOOKS[q.layout.storage].canonical(q)


def spec_of(layout_: Layout, shape: tuple[int, int], dtype: torch.dtype, inner: tuple[int, ...]) -> Spec:
    """Return the Spec of a matrix of `shape` quantized with a layout, without quantizing it."""
    key = stored_key(layout_, shape)
    size = block.grid(shape, layout_.block)
    names: list[tuple[str, Any]] = [("data", None)]
    for name, part in (("scale", layout_.scale), ("zero_point", layout_.zero_point)):
        if isinstance(part, Layout):
            names.append((name, spec_of(part, size, torch.float32, (size[1],))))
        elif part is not None:
            names.append((name, None))
    return key, dtype, inner, tuple(names)


def stored_key(layout_: Layout, shape: tuple[int, int]) -> str:
    """Return the key of the layout under which a matrix of `shape` is stored."""
    rows, cols = layout_.block
    whole_rows = True if 1 < rows >= shape[0] else False  # noqa: SIM210 - a symbolic comparison becomes a guard
    whole_cols = True if 1 < cols >= shape[1] else False  # noqa: SIM210
    return stored_layout(layout_.key, whole_rows, whole_cols).key
