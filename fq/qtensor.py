"""QTensor: a pytree of plain tensors plus the static layout that says what they mean."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import optree
import torch
import torch.utils._pytree as pytree
from torch import Tensor

from fq import indexing
from fq.errors import UnsupportedOp
from fq.indexing import cat as cat
from fq.indexing import stack as stack
from fq.layouts import Layout, layout

CHILDREN = ("data", "scale", "zero_point", "input_scale", "pre_scale", "perm")
_RULES: dict[Any, dict[type, Callable[..., Any]]] = {}


def register_rule(function: Any, leaf_type: type) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register what a torch function does with leaves of a type; use as a decorator.

    `function`: a torch function or method, or the qualified name of an operator ("namespace::name").
    The rule is called with the function's own arguments.

    Raises:
        TypeError: `function` is neither callable nor a name.

    Example:
        >>> import fq, torch
        >>> @fq.register_rule(torch.numel, fq.QTensor)
        ... def numel(q):
        ...     return q.numel()
        >>> torch.numel(fq.quantize(torch.ones(2, 4), fq.int8()))
        8
    """
    if not (callable(function) or isinstance(function, str)):
        raise TypeError(f"register_rule: expected a torch function or an operator's name, got {function!r}")

    def register(rule: Callable[..., Any]) -> Callable[..., Any]:
        _RULES.setdefault(function, {})[leaf_type] = rule
        return rule

    return register


def apply_rule(leaf_type: type, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    """Call the rule for (function, leaf type), or raise UnsupportedOp; nothing is densified."""
    rules = _RULES.get(function)
    if rules is None and isinstance(function, torch._ops.OpOverloadPacket):
        rules = _RULES.get(function._qualified_op_name)
    elif rules is None and isinstance(function, torch._ops.OpOverload):
        rules = _RULES.get(function._schema.name)
    rule = rules.get(leaf_type) if rules is not None else None
    if rule is None:
        operator = isinstance(function, torch._ops.OpOverloadPacket | torch._ops.OpOverload)
        name = str(function) if operator else getattr(function, "__name__", repr(function))
        raise UnsupportedOp(
            f"{name}: no rule for a {leaf_type.__name__}; register one with fq.register_rule, "
            "or call fq.dequantize on the leaf first"
        )
    return rule(*args, **(kwargs or {}))


@dataclass(frozen=True, eq=False, repr=False)
class QTensor:
    """A quantized tensor: a pytree `(data, scale, zero_point)` of plain tensors and a static Layout.

    It is tensor-like (shape, indexing, transpose, reshape, `to`) but no torch.Tensor. Children: `data`,
    the codes (*lead, R, row bytes); `scale` and `zero_point` over the block grid (*lead, rows, cols),
    QTensors themselves where the layout nests; rarely `input_scale` (*lead, 1, 1), a static activation
    scale, `pre_scale` (*lead, 1, K), by which `dequantize` divides columns, and `perm` (*lead, 1, K),
    the logical column each stored one holds. Static: `layout`, `dtype` (the float dtype it stands for),
    `inner` (the logical shape of the packed axis). Sizes come from `data`. Hash is by identity.

    Example:
        >>> import fq, torch
        >>> q = fq.quantize(torch.ones(6, 8), fq.int4(group_size=4))
        >>> q.shape, q[:2].shape, q.T.shape
        (torch.Size([6, 8]), torch.Size([2, 8]), torch.Size([8, 6]))
    """

    data: Tensor
    scale: Any
    layout: Layout
    dtype: torch.dtype
    inner: tuple[int, ...]
    zero_point: Any = None
    input_scale: Tensor | None = None
    pre_scale: Tensor | None = None
    perm: Tensor | None = None

    # --- what it looks like ---

    @property
    def shape(self) -> torch.Size:
        """The logical shape."""
        lead = self.data.shape[:-1]
        if self.layout.axis == -1:
            return torch.Size((*lead, *self.inner))
        return torch.Size((*lead[:-1], *self.inner, lead[-1]))

    @property
    def ndim(self) -> int:
        return self.data.ndim - 1 + len(self.inner)

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def is_meta(self) -> bool:
        return self.data.is_meta

    @property
    def nbytes(self) -> int:
        """Bytes of all children."""
        return sum(t.nbytes for t in pytree.tree_leaves(self))

    @property
    def requires_grad(self) -> bool:
        children = (self.data, self.scale, self.zero_point, self.input_scale, self.pre_scale, self.perm)
        return any(c is not None and c.requires_grad for c in children)

    @property
    def T(self) -> QTensor:
        """The transpose of a matrix: flips `layout.axis`, moves no byte."""
        if self.ndim > 2:
            raise ValueError(f"QTensor.T is for matrices, got shape {tuple(self.shape)}; use mT")
        return self if self.ndim == 1 else self.mT

    @property
    def mT(self) -> QTensor:
        return self.transpose(-2, -1)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[indexing.position(self, dim)]

    def dim(self) -> int:
        return self.ndim

    def numel(self) -> int:
        return prod(self.shape)

    def is_floating_point(self) -> bool:
        """True: it stands for a tensor of a float dtype."""
        return True

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        try:
            extra = "".join(f", {n}" for n in CHILDREN[3:] if getattr(self, n) is not None)
            return (
                f"QTensor({tuple(self.shape)}, {self.layout.key}, {str(self.dtype).removeprefix('torch.')}, "
                f"{self.nbytes} bytes, {self.device}{extra})"
            )
        except Exception as error:  # a repr inside an error report must not raise another
            return f"QTensor(<{type(error).__name__}: {str(error)[:80]}>)"

    def _repr_html_(self) -> str:
        from fq.report import qtensor_html  # the one import that points up, made when a notebook asks

        try:
            return qtensor_html(self)
        except Exception as error:  # a picture inside an error report must not raise another
            return f"<code>{type(error).__name__} in {type(self).__name__}</code>"

    # --- structure ---

    def __getitem__(self, index: Any) -> QTensor:
        return indexing.getitem(self, index)

    def __iter__(self) -> Any:
        return (self[i] for i in range(len(self)))

    def transpose(self, dim0: int, dim1: int) -> QTensor:
        """Exchange two dimensions; the last two flip `layout.axis` and move no byte."""
        order = list(range(self.ndim))
        a, b = indexing.position(self, dim0), indexing.position(self, dim1)
        order[a], order[b] = order[b], order[a]
        return self.permute(*order)

    def permute(self, *dims: Any) -> QTensor:
        """Reorder dimensions; the packed one stays within the last two."""
        return indexing.permute(self, dims)

    def reshape(self, *shape: Any) -> QTensor:
        """Reshape leading dimensions, and leading dimensions into rows and back."""
        return indexing.reshape(self, shape)

    view = reshape

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> QTensor:
        start, end = indexing.position(self, start_dim), indexing.position(self, end_dim)
        shape = self.shape
        return self.reshape(*shape[:start], prod(shape[start : end + 1]), *shape[end + 1 :])

    def unflatten(self, dim: int, sizes: Sequence[int]) -> QTensor:
        at, shape = indexing.position(self, dim), self.shape
        return self.reshape(*shape[:at], *indexing.infer(sizes, shape[at], "unflatten"), *shape[at + 1 :])

    def unsqueeze(self, dim: int) -> QTensor:
        at = indexing.position(self, dim, 1)
        return self.reshape(*self.shape[:at], 1, *self.shape[at:])

    def squeeze(self, dim: int | Sequence[int] | None = None) -> QTensor:
        return indexing.squeeze(self, range(self.ndim) if dim is None else dim)

    def expand(self, *sizes: Any) -> QTensor:
        """Expand leading dimensions as views."""
        return indexing.expand(self, sizes)

    def narrow(self, dim: int, start: int, length: int) -> QTensor:
        return indexing.narrow(self, dim, start, length)

    def split(self, split_size: int | Sequence[int], dim: int = 0) -> tuple[QTensor, ...]:
        return indexing.split(self, split_size, dim)

    def chunk(self, chunks: int, dim: int = 0) -> tuple[QTensor, ...]:
        indexing.check_ints("chunk", chunks)
        if chunks < 1:
            raise ValueError(f"chunk: expected at least one chunk, got {chunks}")
        size = self.shape[dim]
        return self.split(-(-size // chunks), dim) if size else (self,) * chunks

    def unbind(self, dim: int = 0) -> tuple[QTensor, ...]:
        at = indexing.position(self, dim)
        return tuple(self[(*[slice(None)] * at, i)] for i in range(self.shape[at]))

    # --- moving and copying ---

    def _map(self, f: Callable[[Tensor], Tensor]) -> QTensor:
        return pytree.tree_map(f, self)

    def to(self, *args: Any, **kwargs: Any) -> QTensor:
        """Move to a device, or stand for another float dtype; codes and scales never change."""
        copy = kwargs.pop("copy", False)
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)  # type: ignore[attr-defined]
        out = self
        if copy or device is not None:
            out = out._map(lambda t: t.to(device or t.device, non_blocking=non_blocking, copy=copy))
        if dtype is not None:
            if not dtype.is_floating_point or dtype.itemsize < 2:
                raise TypeError(f"QTensor.to: expected a float dtype that it can stand for, got {dtype}")
            out = replace(out, dtype=dtype)
        return out

    def cpu(self) -> QTensor:
        return self.to("cpu")

    def cuda(self) -> QTensor:
        return self.to("cuda")

    def detach(self) -> QTensor:
        return self._map(Tensor.detach)

    def clone(self) -> QTensor:
        return self._map(Tensor.clone)

    def contiguous(self) -> QTensor:
        return self._map(Tensor.contiguous)

    def is_contiguous(self) -> bool:
        return all(t.is_contiguous() for t in pytree.tree_leaves(self))

    def pin_memory(self) -> QTensor:
        return self._map(Tensor.pin_memory)

    def share_memory_(self) -> QTensor:
        """Move the children's storages to shared memory, in place."""
        for tensor in pytree.tree_leaves(self):
            tensor.share_memory_()
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Keep float8 children as bytes: plain pickle cannot load torch's float8 (2.13)."""
        state = {n: v for n, v in vars(self).items() if n[0] != "_"}  # not what was remembered with it
        return {n: (v.view(torch.uint8), v.dtype) if _is_float8(v) else v for n, v in state.items()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            packed = isinstance(value, tuple) and isinstance(value[0], Tensor)
            self.__dict__[name] = value[0].view(value[1]) if packed else value

    # --- torch functions ---

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return apply_rule(cls, func, args, kwargs)

    def __matmul__(self, other: Any) -> Any:
        return apply_rule(QTensor, torch.matmul, (self, other), None)

    def __rmatmul__(self, other: Any) -> Any:
        return apply_rule(QTensor, torch.matmul, (other, self), None)

    def __add__(self, other: Any) -> Any:
        return apply_rule(QTensor, torch.add, (self, other), None)

    def __sub__(self, other: Any) -> Any:
        return apply_rule(QTensor, torch.sub, (self, other), None)

    def __mul__(self, other: Any) -> Any:
        return apply_rule(QTensor, torch.mul, (self, other), None)

    def __truediv__(self, other: Any) -> Any:
        return apply_rule(QTensor, torch.div, (self, other), None)

    def __neg__(self) -> Any:
        return apply_rule(QTensor, torch.neg, (self,), None)

    def __radd__(self, other: Any) -> Any:
        return apply_rule(QTensor, torch.add, (other, self), None)

    def __rsub__(self, other: Any) -> Any:
        return apply_rule(QTensor, torch.sub, (other, self), None)

    def __rmul__(self, other: Any) -> Any:
        return apply_rule(QTensor, torch.mul, (other, self), None)


def _is_float8(child: Any) -> bool:
    return isinstance(child, Tensor) and child.is_floating_point() and child.dtype.itemsize == 1


# --- pytree ---

_Context = tuple[Layout, torch.dtype, tuple[int, ...], tuple[str, ...]]


def _flatten(q: QTensor) -> tuple[list[Any], _Context]:
    names = tuple(n for n in CHILDREN if getattr(q, n) is not None)
    return [getattr(q, n) for n in names], (q.layout, q.dtype, q.inner, names)


def _flatten_with_keys(q: QTensor) -> Any:
    children, context = _flatten(q)
    return [(pytree.GetAttrKey(n), c) for n, c in zip(context[3], children, strict=True)], context


def _unflatten(children: Any, context: _Context) -> QTensor:
    layout_, dtype, inner, names = context
    return QTensor(layout=layout_, dtype=dtype, inner=inner, **dict(zip(names, children, strict=True)))


def _dump(context: _Context) -> str:
    layout_, dtype, inner, names = context
    return json.dumps([layout_.key, str(dtype).removeprefix("torch."), list(inner), list(names)])


def _load(text: str) -> _Context:
    key, dtype, inner, names = json.loads(text)
    return layout(key), getattr(torch, dtype), tuple(inner), tuple(names)


# For users, in the namespace that all others fall back to; fq itself uses torch's pytree only.
_register_optree: Any = optree.register_pytree_node  # its stubs take containers only
_register_optree(
    QTensor,
    lambda q: (*_flatten(q), _flatten(q)[1][3]),
    lambda context, children: _unflatten(children, context),
    path_entry_type=optree.GetAttrEntry,
    namespace=optree.registry.__GLOBAL_NAMESPACE,  # type: ignore[attr-defined]
)
pytree.register_pytree_node(
    QTensor,
    _flatten,
    _unflatten,
    serialized_type_name="fq.QTensor",
    to_dumpable_context=_dump,
    from_dumpable_context=_load,
    flatten_with_keys_fn=_flatten_with_keys,
)
torch.serialization.add_safe_globals([QTensor, layout])
