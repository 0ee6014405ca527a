"""What torch functions do with QTensors: (function, leaf type) -> primitive. All else raises UnsupportedOp.

Under autocast the float operands are cast as the float operation would cast them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fq import products
from fq.errors import UnsupportedOp
from fq.qtensor import QTensor, cat, register_rule, stack


def _cast(x: Any) -> Any:
    """Cast a float operand as autocast would; float64 stays, as for torch's own matmuls."""
    if not torch._C._is_any_autocast_enabled() or not isinstance(x, Tensor):
        return x
    device = x.device.type
    if not torch.is_autocast_enabled(device) or not x.is_floating_point() or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(device))


def rule_for(leaf_type: type, *functions: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register one rule for several torch functions."""

    def register(rule: Callable[..., Any]) -> Callable[..., Any]:
        for function in functions:
            register_rule(function, leaf_type)(rule)
        return rule

    return register


def _weight(q: Any, what: str, position: str) -> QTensor:
    if not isinstance(q, QTensor):
        raise UnsupportedOp(
            f"{what}: only {position} can be quantized; fq.dequantize the other operand first"
        )
    return q


@rule_for(QTensor, F.linear)
def _linear(input: Any, weight: Any, bias: Any = None) -> Tensor:
    if isinstance(input, QTensor) or isinstance(bias, QTensor):
        raise UnsupportedOp("linear: only the weight can be quantized; fq.dequantize the input or bias first")
    return products.linear(_cast(input), weight, _cast(bias))


@rule_for(QTensor, torch.matmul, Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__)
def _matmul(a: Any, b: Any) -> Tensor:
    return products.matmul(_cast(a), _cast(b))


def _ranked(name: str, rank: int) -> Callable[[Any, Any], Tensor]:
    def rule(a: Any, b: Any) -> Tensor:
        if a.ndim != rank or b.ndim != rank:
            raise ValueError(
                f"{name}: expected {rank}-dimensional operands, got {tuple(a.shape)} and {tuple(b.shape)}"
            )
        if rank == 3 and a.shape[0] != b.shape[0]:
            raise ValueError(f"{name}: batches differ, {a.shape[0]} and {b.shape[0]}")
        return products.matmul(_cast(a), _cast(b))

    return rule


rule_for(QTensor, torch.mm, Tensor.mm)(_ranked("mm", 2))
rule_for(QTensor, torch.bmm, Tensor.bmm)(_ranked("bmm", 3))


@rule_for(QTensor, torch.addmm, Tensor.addmm, torch.baddbmm, Tensor.baddbmm)
def _addmm(input: Any, a: Any, b: Any, *, beta: float = 1, alpha: float = 1) -> Tensor:
    if isinstance(input, QTensor):
        raise UnsupportedOp("addmm: the added matrix is quantized; fq.dequantize it first")
    input, a, b = _cast(input), _cast(a), _cast(b)
    if (
        alpha == 1
        and beta == 1
        and isinstance(b, QTensor)
        and b.ndim == 2
        and input.ndim == 1
        and b.layout.axis == -2
    ):
        return products.linear(a, b.T, input)  # one rounding, as addmm has
    product = products.matmul(a, b)
    return beta * input + (product if alpha == 1 else alpha * product)


@rule_for(QTensor, F.embedding)
def _embedding(
    input: Tensor,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    if max_norm is not None:
        raise UnsupportedOp(
            "embedding: max_norm rewrites the weight in place, which a quantized weight cannot"
        )
    return products.embedding(input, _weight(weight, "embedding", "the weight"))


# --- structure ---


@rule_for(QTensor, torch.cat, torch.concat, torch.concatenate)
def _cat(tensors: Any, dim: int = 0) -> QTensor:
    return cat(tensors, dim)


@rule_for(QTensor, torch.stack)
def _stack(tensors: Any, dim: int = 0) -> QTensor:
    return stack(tensors, dim)


def _method(name: str) -> Callable[..., Any]:
    def rule(q: QTensor, *args: Any, **kwargs: Any) -> Any:
        return getattr(q, name)(*args, **kwargs)

    return rule


for _name, _functions in {
    "transpose": (torch.transpose, torch.swapaxes),
    "permute": (torch.permute,),
    "reshape": (torch.reshape,),
    "flatten": (torch.flatten,),
    "unflatten": (torch.unflatten,),
    "squeeze": (torch.squeeze,),
    "unsqueeze": (torch.unsqueeze,),
    "narrow": (torch.narrow,),
    "split": (torch.split,),
    "chunk": (torch.chunk,),
    "unbind": (torch.unbind,),
    "clone": (torch.clone,),
    "detach": (torch.detach,),
}.items():
    rule_for(QTensor, *_functions)(_method(_name))


@rule_for(QTensor, torch.t)
def _t(q: QTensor) -> QTensor:
    return q.T


@rule_for(QTensor, torch.is_floating_point)
def _is_floating_point(q: QTensor) -> bool:
    return True


@rule_for(QTensor, torch.numel)
def _numel(q: QTensor) -> int:
    return q.numel()
