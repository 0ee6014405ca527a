"""PyTorch's own quantized kernels, behind operators that batch, trace and know their shapes.

CPU: `_weight_int4pack_mm_for_cpu` (storage "aten_cpu"), `_weight_int8pack_mm`, `_int_mm`. PyTorch leaves
them without derivative and without batching rule; ours get the former from `autograd`, the latter here:
a mapped activation becomes rows, a mapped weight a leading dimension. In float32, and for int8 × int8 before
VNNI, they are scalar loops: beyond a few rows a float32 GEMM over the same integers is many times faster.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from fq.backends.registry import implements
from fq.layouts import Layout
from fq.layouts.element import Int
from fq.layouts.layout import changed
from fq.layouts.packing import pack, unpack
from fq.layouts.storage import CANONICAL, Hook, register_storage
from fq.numerics import quantize_activation
from fq.qtensor import QTensor

_lib = torch.library.Library("fq", "FRAGMENT")
_HALF = (torch.bfloat16, torch.float16)
_FEW = 4  # rows up to which PyTorch's scalar loops beat decoding the weight for a GEMM


def _operator(schema: str, shape: Callable[..., Any], weights: int) -> Callable[[Callable[..., Tensor]], Any]:
    """Define fq::NAME for one matrix (M, K) and a batch of them; the first argument is the activation.

    `shape(*args)` gives the output's shape and dtype; `weights` tensors follow the activation. Tensors
    have the same leading dimensions, over which one call runs matrix by matrix.
    """

    def register(kernel: Callable[..., Tensor]) -> Any:
        name = schema.split("(")[0]
        _lib.define(schema)

        def run(*args: Any) -> Tensor:
            first = args[0]
            if first.ndim == 2:
                return kernel(*args)
            lead = first.shape[:-2]
            flat = [
                a.reshape(prod(lead), *a.shape[len(lead) :]) if isinstance(a, Tensor) else a for a in args
            ]
            size, dtype = shape(*args)
            out = first.new_empty((prod(lead), *size[len(lead) :]), dtype=dtype)
            for i in range(prod(lead)):
                out[i] = kernel(*(a[i] if isinstance(a, Tensor) else a for a in flat))
            return out.reshape(size)

        _lib.impl(name, run, "CPU")
        _lib.impl(name, torch.library.fallthrough_kernel, "Autograd")
        qualified = f"fq::{name}"

        def fake(*args: Any) -> Tensor:
            size, dtype = shape(*args)
            return args[0].new_empty(size, dtype=dtype)

        torch.library.register_fake(qualified, fake, lib=_lib)

        def batched(info: Any, dims: tuple[Any, ...], *args: Any) -> tuple[Tensor, int]:
            op = getattr(torch.ops.fq, name)
            front = [a.movedim(d, 0) if d is not None else a for a, d in zip(args, dims, strict=True)]
            if (
                weights and all(d is None for d in dims[1 : 1 + weights]) and args[0].ndim == 3
            ):  # more rows, one call
                x = front[0]
                y = op(x.reshape(x.shape[0] * x.shape[1], x.shape[2]), *front[1:])
                return y.reshape(x.shape[0], x.shape[1], y.shape[-1]), 0
            full = [
                a.expand(info.batch_size, *a.shape) if isinstance(a, Tensor) and d is None else a
                for a, d in zip(front, dims, strict=True)
            ]
            return op(*full), 0

        torch.library.register_vmap(qualified, batched, lib=_lib)
        return getattr(torch.ops.fq, name)

    return register


# --- int4, float zero point ---


@_operator(
    "aten_int4_mm(Tensor x, Tensor data, Tensor scale, int group) -> Tensor",
    lambda x, data, scale, group: ((*x.shape[:-1], data.shape[-2]), x.dtype),
    weights=2,
)
def _int4_mm(x: Tensor, data: Tensor, scale: Tensor, group: int) -> Tensor:
    if x.shape[0] == 0:
        return x.new_empty((0, data.shape[0]))
    return torch.ops.aten._weight_int4pack_mm_for_cpu(x.contiguous(), data, group, scale)


@_operator("aten_int4_pack(Tensor data) -> Tensor", lambda data: (tuple(data.shape), torch.uint8), weights=0)
def _int4_pack(data: Tensor) -> Tensor:
    codes = unpack(data, 4, 2 * data.shape[-1]).to(torch.int32) ^ 8  # two's complement to offset binary
    return torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)


@_operator(
    "aten_int4_unpack(Tensor data) -> Tensor", lambda data: (tuple(data.shape), torch.uint8), weights=0
)
def _int4_unpack(data: Tensor) -> Tensor:
    """Invert the packing, whose order depends on the processor, by packing the digits of each index."""
    rows, size = data.shape[0], 2 * data.shape[1]
    index = torch.arange(rows * size, dtype=torch.int32).reshape(rows, size)
    place = torch.zeros(rows * size, dtype=torch.int64)
    for digit in range(max(1, (rows * size - 1).bit_length() + 3) // 4):
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu((index >> (4 * digit)) & 15, 1)
        place |= unpack(packed, 4, size).reshape(-1).to(torch.int64) << (4 * digit)
    codes = torch.empty(rows * size, dtype=torch.uint8)
    codes[place] = unpack(data, 4, size).reshape(-1)
    return pack(codes.reshape(rows, size) ^ 8, 4)


def _int4_accepts(q: QTensor) -> str | None:
    layout = q.layout
    if q.device.type != "cpu":
        return f"device is {q.device.type}, the kernel runs on cpu"
    if layout.element != Int(4) or layout.zero_point not in (None, "float"):
        return f"{layout.key} is not int4, symmetric or with a float zero point"
    if layout.scale not in (torch.float32, *_HALF):
        return f"{layout.key} has nested or e8m0 scales"
    if layout.act is not None:
        return f"{layout.key} quantizes activations, the kernel is weight-only"
    rows, group, size = layout.block[0], layout.block[1], q.inner[0]
    group = size if group == -1 else group
    if len(q.inner) != 1 or rows != 1 or group not in (32, 64, 128, 256) or size % group:
        return f"group {group} over K={prod(q.inner)}: the kernel takes whole groups of 32, 64, 128 or 256"
    if q.data.ndim < 2 or q.data.shape[-2] % 16 or q.data.shape[-2] == 0:
        return f"N={q.data.shape[-2] if q.data.ndim > 1 else 1} is not a multiple of 16"
    return None


def _int4_unwanted(q: QTensor) -> str | None:
    if q.layout.scale == torch.float32:
        return "PyTorch multiplies float32 by int4 in a scalar loop; quantize with scale=torch.bfloat16"
    return None


def _int4_prepack(q: QTensor) -> QTensor:
    """Data reordered for the kernel; scale and zero point merged: (*lead, K/g, N, 2)."""
    zero = torch.zeros_like(q.scale) if q.zero_point is None else q.zero_point
    merged = torch.stack((q.scale, zero), -1).transpose(-3, -2)
    data = torch.ops.fq.aten_int4_pack(q.data)
    return replace(
        q,
        data=data,
        scale=merged.contiguous(),
        zero_point=None,
        layout=changed(q.layout.key, storage="aten_cpu"),
    )


def _int4_canonical(q: QTensor) -> QTensor:
    scale, zero = q.scale.transpose(-3, -2).unbind(-1)
    layout = changed(q.layout.key, storage=CANONICAL)
    return replace(
        q,
        data=torch.ops.fq.aten_int4_unpack(q.data),
        scale=scale.contiguous(),
        zero_point=None if layout.zero_point is None else zero.contiguous(),
        layout=layout,
    )


register_storage("aten_cpu", Hook(_int4_accepts, _int4_prepack, _int4_canonical, "aten", _int4_unwanted))


# --- int8 ---


def _aligned(x: Tensor) -> Tensor:
    """Return x dense and on a vector boundary; the int8 kernel crashes on others."""
    dense = x.stride(-1) == 1 and x.is_contiguous() and x.data_ptr() % 64 == 0
    return x if dense else x.clone(memory_format=torch.contiguous_format)


@_operator(
    "aten_int8_mm(Tensor x, Tensor data, Tensor scale) -> Tensor",
    lambda x, data, scale: ((*x.shape[:-1], data.shape[-2]), x.dtype),
    weights=2,
)
def _int8_mm(x: Tensor, data: Tensor, scale: Tensor) -> Tensor:
    if 0 in x.shape or 0 in data.shape:
        return x.new_zeros((x.shape[0], data.shape[0]))
    if x.dtype == torch.float32 and x.shape[0] > _FEW:
        return (x @ data.to(torch.float32).mT) * scale.mT
    return torch.ops.aten._weight_int8pack_mm(_aligned(x), data, scale.reshape(-1))


@_operator(
    "aten_int_mm(Tensor x, Tensor data) -> Tensor",
    lambda x, data: ((*x.shape[:-1], data.shape[-2]), torch.int32),
    weights=1,
)
def _int_mm(x: Tensor, data: Tensor) -> Tensor:
    if x.shape[0] <= _FEW or torch.cpu._is_vnni_supported():
        return torch._int_mm(_aligned(x), data.mT)
    total = torch.zeros((x.shape[0], data.shape[0]), dtype=torch.int32)
    for a, b in zip(
        x.split(1024, 1), data.split(1024, 1), strict=True
    ):  # 1024 products of 2^14: exact in float32
        total += (a.to(torch.float32) @ b.to(torch.float32).mT).to(torch.int32)
    return total


# --- linear ---


def _plain_int8(layout: Layout) -> bool:
    return layout.element == Int(8) and layout.zero_point is None and layout.block == (1, -1)


def _supports(x: Tensor, q: QTensor) -> str | None:
    layout = q.layout
    if x.device.type != "cpu":
        return f"device is {x.device.type}, these kernels run on cpu"
    if not q.data.is_contiguous() or not q.scale.is_contiguous():
        return "the weight is not contiguous and nothing is copied in the call; call .contiguous() once"
    if layout.storage == "aten_cpu":
        dtype = q.scale.dtype
        if x.dtype == dtype:
            return None
        return f"x is {x.dtype} but scales are {dtype}; quantize with scale={x.dtype}"
    if layout.storage != CANONICAL:
        return f"storage {layout.storage!r} is not aten's"
    if layout.element == Int(4) and _int4_accepts(q) is None:
        wanted = "" if _int4_unwanted(q) is None else ', backend="aten"'
        return f"int4 runs from its own byte order; call fq.prepack(q{wanted}) once, ahead"
    if not _plain_int8(layout):
        return f"{layout.key} is neither int8 by row nor prepacked int4"
    act = layout.act
    if act is None:
        if layout.scale != x.dtype:
            return f"x is {x.dtype} but scales are {layout.scale}; quantize with scale={x.dtype}"
        if x.dtype in _HALF and q.inner[0] % 32:
            return f"K={q.inner[0]} is not a multiple of 32, which the half-precision kernel overruns"
        return None if x.dtype in (torch.float32, *_HALF) else f"x is {x.dtype}"
    if not _plain_int8(act) or isinstance(act.scale, Layout):
        return f"activations in {act.key}; the kernel takes int8 by row"
    return None


@implements("linear", backend="aten", priority=10, supports=_supports)
def linear(x: Tensor, q: QTensor, bias: Tensor | None = None) -> Tensor:
    """x: (*lead, M, C), q: (*lead, R, C) -> (*lead, M, R)."""
    if q.layout.act is not None:
        a = quantize_activation(x.to(torch.float32), q)
        total = torch.ops.fq.aten_int_mm(a.data, q.data).to(torch.float32)
        y = total * a.scale.to(torch.float32) * q.scale.to(torch.float32).mT
        return (y if bias is None else y + bias.to(torch.float32)).to(x.dtype)
    if q.layout.storage == "aten_cpu":
        size, groups = q.inner[0], q.scale.shape[-3]
        y = torch.ops.fq.aten_int4_mm(x, q.data, q.scale, size // groups)
    else:
        y = torch.ops.fq.aten_int8_mm(x, q.data, q.scale)
    return y if bias is None else (y.to(torch.float32) + bias.to(torch.float32)).to(x.dtype)
