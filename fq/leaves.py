"""Other leaf types: FakeQuantized, a float weight whose matmuls also imitate activation quantization."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor

from fq.errors import UnsupportedOp
from fq.layouts import Layout
from fq.primitives import fake_quantize
from fq.qtensor import QTensor, apply_rule
from fq.rules import rule_for


@dataclass(frozen=True, eq=False)
class FakeQuantized:
    """A fake-quantized weight and the layout in which a matmul fake-quantizes its other operand.

    weight: a float tensor, already on the grid of its format; act: a Layout. Made by
    `fake_quantize_params` for layouts with `act`; everything stays differentiable.
    """

    weight: Tensor
    act: Layout

    @property
    def shape(self) -> torch.Size:
        return self.weight.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.weight.device

    @property
    def ndim(self) -> int:
        return self.weight.ndim

    @property
    def T(self) -> FakeQuantized:
        return replace(self, weight=self.weight.T)

    @property
    def mT(self) -> FakeQuantized:
        return replace(self, weight=self.weight.mT)

    def transpose(self, dim0: int, dim1: int) -> FakeQuantized:
        return replace(self, weight=self.weight.transpose(dim0, dim1))

    def chunk(self, chunks: int, dim: int = 0) -> list[FakeQuantized]:
        return [replace(self, weight=part) for part in self.weight.chunk(chunks, dim)]

    def __getitem__(self, index: Any) -> FakeQuantized:
        return replace(self, weight=self.weight[index])

    def __matmul__(self, other: Any) -> Any:
        return apply_rule(FakeQuantized, torch.matmul, (self, other), None)

    def __rmatmul__(self, other: Any) -> Any:
        return apply_rule(FakeQuantized, torch.matmul, (other, self), None)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return apply_rule(cls, func, args, kwargs)


pytree.register_pytree_node(
    FakeQuantized,
    lambda q: ([q.weight], q.act),
    lambda children, act: FakeQuantized(next(iter(children)), act),
    serialized_type_name="fq.FakeQuantized",
    to_dumpable_context=lambda act: act.key,
    from_dumpable_context=lambda key: _layout(key),
)

LEAF_TYPES: tuple[type, ...] = (QTensor, FakeQuantized)


def is_leaf(value: Any) -> bool:
    """Whether a parameter dict's value is one of fq's leaf types."""
    return isinstance(value, LEAF_TYPES)


def check_params(what: str, params: Any, *, values: bool = False) -> None:
    """Raise TypeError unless `params` is a dict, of tensors and leaves where `values` matter."""
    if not isinstance(params, Mapping):
        raise TypeError(f"{what}: expected a dict of name -> tensor or QTensor, got {type(params).__name__}")
    for name, value in params.items() if values else ():
        if not isinstance(value, (Tensor, *LEAF_TYPES)):
            raise TypeError(f"{what}: {name} must be a tensor or a QTensor, got {type(value).__name__}")


def _layout(key: str) -> Layout:
    from fq.layouts import layout

    return layout(key)


def _imitate(x: Tensor, q: FakeQuantized) -> Tensor:
    """Fake-quantize x along its last dimension, its rows flattened as the primitives flatten them."""
    if q.ndim > 2:  # one matrix of x per matrix of the weight
        return fake_quantize(x, q.act)
    return fake_quantize(x.reshape(-1, x.shape[-1]), q.act).reshape(x.shape)


@rule_for(FakeQuantized, F.linear)
def _linear(input: Tensor, weight: FakeQuantized, bias: Tensor | None = None) -> Tensor:
    return F.linear(_imitate(input, weight), weight.weight, bias)


def _product(function: Callable[..., Tensor], a: Any, b: Any) -> Tensor:
    if not isinstance(b, FakeQuantized):
        return function(a.weight, _imitate(b.mT, a).mT)
    if isinstance(a, FakeQuantized):
        raise UnsupportedOp(f"{function.__name__}: both operands are fake-quantized; use .weight of one")
    return function(_imitate(a, b), b.weight)


@rule_for(FakeQuantized, torch.matmul, Tensor.matmul, Tensor.__matmul__)
def _matmul(input: Any, other: Any) -> Tensor:
    return _product(torch.matmul, input, other)


@rule_for(FakeQuantized, Tensor.__rmatmul__)
def _rmatmul(self: Any, other: Any) -> Tensor:
    return _product(torch.matmul, other, self)


@rule_for(FakeQuantized, torch.mm, Tensor.mm)
def _mm(input: Any, mat2: Any) -> Tensor:
    return _product(torch.mm, input, mat2)


@rule_for(FakeQuantized, torch.bmm, Tensor.bmm)
def _bmm(input: Any, mat2: Any) -> Tensor:
    return _product(torch.bmm, input, mat2)


@rule_for(FakeQuantized, torch.addmm, Tensor.addmm)
def _addmm(input: Tensor, mat1: Tensor, mat2: FakeQuantized, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return torch.addmm(input, _imitate(mat1, mat2), mat2.weight, beta=beta, alpha=alpha)
