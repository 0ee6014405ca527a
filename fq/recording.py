"""What a forward does with each parameter: one run on tensors that note the operations they meet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor, nn

from fq.einsum import parse_equation


@dataclass(frozen=True)
class Use:
    """One use of a parameter: "matmul" along `axis`, "embedding", or the name of another operation."""

    role: str
    axis: int = -1


# (function -> position of an operand, its keyword, the dimension of it that is contracted)
_CONTRACTIONS: dict[Any, list[tuple[int, str, int]]] = {
    F.linear: [(1, "weight", -1)],
    **{f: [(0, "input", -1), (1, "other", -2)] for f in (torch.matmul, Tensor.matmul, Tensor.__matmul__)},
    Tensor.__rmatmul__: [(0, "self", -2), (1, "other", -1)],
    **{f: [(0, "input", -1), (1, "mat2", -2)] for f in (torch.mm, torch.bmm, Tensor.mm, Tensor.bmm)},
    **{f: [(1, "mat1", -1), (2, "mat2", -2)] for f in (torch.addmm, Tensor.addmm)},
    **{f: [(1, "batch1", -1), (2, "batch2", -2)] for f in (torch.baddbmm, Tensor.baddbmm)},
}
_CONTRACTIONS[F.multi_head_attention_forward] = [
    (5, "in_proj_weight", -1),
    (11, "out_proj_weight", -1),
    *((18 + i, f"{name}_proj_weight", -1) for i, name in enumerate("qkv")),
]
_CONVOLUTIONS = (F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
_ROLES: dict[Any, str] = {F.embedding: "embedding", **dict.fromkeys(_CONVOLUTIONS, "convolution")}
_COPIES = (
    Tensor.contiguous,
    Tensor.clone,
    torch.clone,
    Tensor.to,
    Tensor.float,
    Tensor.half,
    Tensor.bfloat16,
)
_GATHERS = (Tensor.__getitem__, torch.index_select, Tensor.index_select)


class _Noted(Tensor):
    """A parameter's value that notes what it meets; views and copies of it are noted too.

    `probe`, a tensor without data, goes through the same views: its strides tell which dimension of the
    parameter each dimension is.
    """

    origin: str
    probe: Tensor
    strides: tuple[int, ...]
    log: dict[str, list[Use]]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        noted = [a for a in pytree.tree_leaves((args, kwargs)) if isinstance(a, _Noted)]
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **kwargs)
        if not any(isinstance(t, Tensor) for t in pytree.tree_leaves(out)):
            return out
        if func in _CONTRACTIONS:
            for position, keyword, dim in _CONTRACTIONS[func]:
                operand = args[position] if len(args) > position else kwargs.get(keyword)
                if isinstance(operand, _Noted):
                    operand._note("matmul", operand._axis(dim))
                    noted = [other for other in noted if other is not operand]
            for other in noted:  # biases
                other._note("vector" if other.ndim < 2 else func.__name__)
            return out
        if func is torch.einsum:
            noted[0]._note(*_einsum_use(noted[0], *args))
            return out
        if func in _ROLES:
            noted[0]._note(_ROLES[func])
            return out
        if len(noted) == 1:
            followed = noted[0]._followed(func, args, kwargs, out)
            if followed is not None:
                return followed
        for one in noted:
            one._note(getattr(func, "__name__", str(func)))
        return out

    def _note(self, role: str, axis: int = -1) -> None:
        use = Use(role, axis)
        if use not in self.log[self.origin]:
            self.log[self.origin].append(use)

    def _axis(self, dim: int) -> int:
        """Return which axis of the parameter a dimension of this view of it is."""
        if self.ndim < 2:
            dim = -1
        stride = self.probe.stride(dim)
        found = [i for i, s in enumerate(self.strides) if s == stride]
        return found[-1] - len(self.strides) if found else 0

    def _followed(self, func: Any, args: Any, kwargs: Any, out: Any) -> Any:
        """Return the outputs as noted tensors where they are this one, seen or copied differently."""
        if func in _COPIES and isinstance(out, Tensor):
            return self._as(out, self.probe)
        if func in _GATHERS and isinstance(out, Tensor) and not _shares(out, self):
            index, dim = args[-1], (0 if func is Tensor.__getitem__ else args[1] if len(args) > 1 else 0)
            if (
                args[0] is self
                and dim == 0
                and isinstance(index, Tensor)
                and not index.dtype.is_floating_point
            ):
                if self.ndim == 2 and index.ndim > 0:
                    return None  # rows of a matrix: its own operation
                rows = self.probe.select(0, 0)
                return self._as(out, rows.expand(*index.shape, *rows.shape) if index.ndim else rows)
            return None
        leaves, spec = pytree.tree_flatten(out)
        if not all(isinstance(t, Tensor) and _shares(t, self) for t in leaves):
            return None
        probed_args, probed_kwargs = pytree.tree_map(lambda a: a.probe if a is self else a, (args, kwargs))
        with torch._C.DisableTorchFunctionSubclass():
            probes = pytree.tree_leaves(func(*probed_args, **probed_kwargs))
        return spec.unflatten([self._as(t, p) for t, p in zip(leaves, probes, strict=True)])

    def _as(self, value: Tensor, probe: Tensor) -> _Noted:
        return _noted(value, self.origin, probe, self.strides, self.log)


def _einsum_use(operand: _Noted, equation: Any, *operands: Any) -> tuple[str, int]:
    """Return role and axis: a matmul where one of the last two dimensions is summed."""
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = tuple(operands[0])
    if not isinstance(equation, str) or len(operands) != 2 or operand.ndim < 2:
        return "einsum", -1
    terms, result = parse_equation(equation, operands[0].ndim, operands[1].ndim)
    letters = terms[0 if operands[0] is operand else 1]
    summed = [dim for dim in (-2, -1) if letters[dim] not in result]
    return ("matmul", operand._axis(summed[0])) if len(summed) == 1 else ("einsum", -1)


def _shares(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata


def _noted(
    value: Tensor, name: str, probe: Tensor, strides: tuple[int, ...], log: dict[str, list[Use]]
) -> _Noted:
    with torch._C.DisableTorchFunctionSubclass():
        out = value.as_subclass(_Noted)
    out.origin, out.probe, out.strides, out.log = name, probe, strides, log
    return out


def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, list[Use]]:
    """Return the uses of each parameter in one forward; module, buffers and seeds stay as they are."""
    log: dict[str, list[Use]] = {}
    values: dict[str, Tensor] = {n: b.detach().clone() for n, b in module.named_buffers()}
    for name, parameter in module.named_parameters():
        log[name] = []
        probe = torch.empty(parameter.shape, device="meta")
        values[name] = _noted(parameter.detach(), name, probe, probe.stride(), log)
    call: Callable[..., Any] = torch.func.functional_call
    devices = [d for d in {p.device for p in module.parameters()} if d.type == "cuda"]
    with torch.no_grad(), torch.random.fork_rng(devices=devices):
        call(module, values, args, kwargs)
    return log
