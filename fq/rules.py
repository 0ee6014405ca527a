"""What torch functions do with QTensors: (function, leaf type) -> primitive. All else raises UnsupportedOp.

Under autocast the float operands are cast as the float operation would cast them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor

from fq import convolutions, products
from fq import einsum as contractions
from fq.errors import UnsupportedOp
from fq.primitives import dequantize
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


@rule_for(QTensor, torch.matmul, Tensor.matmul, Tensor.__matmul__)
def _matmul(input: Any, other: Any) -> Tensor:
    return products.matmul(_cast(input), _cast(other))


@rule_for(QTensor, Tensor.__rmatmul__)
def _rmatmul(self: Any, other: Any) -> Tensor:
    return _matmul(other, self)


def _ranked(name: str, rank: int, a: Any, b: Any) -> Tensor:
    """Multiply matrices (rank 2) or batches of as many (rank 3), which do not broadcast."""
    if a.ndim != rank or b.ndim != rank:
        raise ValueError(
            f"{name}: expected {rank}-dimensional operands, got {tuple(a.shape)} and {tuple(b.shape)}"
        )
    if rank == 3 and a.shape[0] != b.shape[0]:
        raise ValueError(f"{name}: batches differ, {a.shape[0]} and {b.shape[0]}")
    return products.matmul(_cast(a), _cast(b))


@rule_for(QTensor, torch.mm, Tensor.mm)
def _mm(input: Any, mat2: Any) -> Tensor:
    return _ranked("mm", 2, input, mat2)


@rule_for(QTensor, torch.bmm, Tensor.bmm)
def _bmm(input: Any, mat2: Any) -> Tensor:
    return _ranked("bmm", 3, input, mat2)


@rule_for(QTensor, torch.addmm, Tensor.addmm)
def _addmm(input: Any, mat1: Any, mat2: Any, *, beta: float = 1, alpha: float = 1) -> Tensor:
    bias = isinstance(mat2, QTensor) and mat1.ndim == mat2.ndim == 2 and beta == alpha == 1
    if bias and isinstance(input, Tensor) and input.shape == mat2.shape[1:]:
        return products.linear(_cast(mat1), mat2.T, _cast(input))  # rounded once, as addmm is
    return _added("addmm", 2, input, mat1, mat2, beta, alpha)


@rule_for(QTensor, torch.baddbmm, Tensor.baddbmm)
def _baddbmm(input: Any, batch1: Any, batch2: Any, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return _added("baddbmm", 3, input, batch1, batch2, beta, alpha)


def _added(name: str, rank: int, input: Any, a: Any, b: Any, beta: float, alpha: float) -> Tensor:
    """Return beta·input + alpha·(a @ b) in the product's dtype; with beta 0 the input is not read."""
    if isinstance(input, QTensor):
        raise UnsupportedOp(f"{name}: the added matrix is quantized; fq.dequantize it first")
    product = _ranked(name, rank, a, b)
    input = input.expand(product.shape)
    wide = torch.promote_types(product.dtype, torch.float32)
    total = alpha * product.to(wide)
    return (total if beta == 0 else total + beta * input.to(wide)).to(product.dtype)


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


def _convolution(name: str, dims: int, transposed: bool) -> Callable[..., Tensor]:
    def rule(
        input: Any,
        weight: Any,
        bias: Any = None,
        stride: Any = 1,
        padding: Any = 0,
        *rest: Any,
        **named: Any,
    ) -> Tensor:
        order = ("output_padding", "groups", "dilation") if transposed else ("dilation", "groups")
        named.update(zip(order, rest, strict=False))
        weight = _weight(weight, name, "the weight")
        return convolutions.convolution(
            name,
            dims,
            _cast(input),
            weight,
            _cast(bias),
            stride,
            padding,
            transposed=transposed,
            **named,
        )

    return rule


for _dims, _plain, _transposed in (
    (1, F.conv1d, F.conv_transpose1d),
    (2, F.conv2d, F.conv_transpose2d),
    (3, F.conv3d, F.conv_transpose3d),
):
    rule_for(QTensor, _plain)(_convolution(f"conv{_dims}d", _dims, False))
    rule_for(QTensor, _transposed)(_convolution(f"conv_transpose{_dims}d", _dims, True))


@rule_for(QTensor, torch.einsum)
def _einsum(*args: Any) -> Tensor:
    equation, *operands = args
    if not isinstance(equation, str):
        raise UnsupportedOp("einsum: the sublist form has no rule; write the equation as text")
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = list(operands[0])
    return contractions.einsum(equation, *map(_cast, operands))


@rule_for(QTensor, torch.tensordot)
def _tensordot(a: Any, b: Any, dims: Any = 2, out: Any = None) -> Tensor:
    return contractions.tensordot(_cast(a), _cast(b), dims)


@rule_for(QTensor, F.embedding_bag)
def _embedding_bag(
    input: Tensor,
    weight: Any,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """Decode the rows that the bags name, once each time they are named, and bag those."""
    if max_norm is not None:
        raise UnsupportedOp(
            "embedding_bag: max_norm rewrites the weight in place, which a quantized weight cannot"
        )
    weight = _weight(weight, "embedding_bag", "the weight")
    rows = products.embedding(input.reshape(-1), weight)
    ids = torch.arange(input.numel(), device=input.device).reshape(input.shape)
    if padding_idx is not None:  # one more row stands for all that is left out
        padding = padding_idx % weight.shape[0]
        ids = torch.where(input == padding, input.numel(), ids)
        rows, padding_idx = torch.cat([rows, rows.new_zeros(1, rows.shape[1])]), input.numel()
    return F.embedding_bag(
        ids,
        rows,
        None if offsets is None else offsets.to(torch.int64),
        mode=mode,
        per_sample_weights=per_sample_weights,
        include_last_offset=include_last_offset,
        padding_idx=padding_idx,
    )


def _decoding(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a rule that decodes quantized weights in the call, as `plan` says of recurrent layers."""

    def rule(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = pytree.tree_map(
            lambda t: dequantize(t) if isinstance(t, QTensor) else t,
            (args, kwargs),
            is_leaf=lambda t: isinstance(t, QTensor),
        )
        return function(*args, **kwargs)

    return rule


for _name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
    for _function in (getattr(torch, _name), getattr(torch, f"{_name}_cell")):
        rule_for(QTensor, _function)(_decoding(_function))


# --- structure ---


@rule_for(QTensor, torch.index_select)
def _index_select(input: QTensor, dim: int, index: Tensor) -> QTensor:
    at = dim if dim >= 0 else dim + input.ndim
    return input[(*(slice(None),) * at, index)]


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
