"""Products with a quantized operand: linear, matmul, embedding, and their checked per-format forms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from fq import autograd
from fq.backends.registry import kernel_of, requested
from fq.checks import check_float, check_qtensor
from fq.layouts import Layout
from fq.layouts import layout as parse
from fq.layouts.element import E2M1, E4M3, Float, Int, UInt
from fq.layouts.scale import E8M0
from fq.primitives import _unpermute
from fq.qtensor import QTensor
from fq.spec import stored_key, to_leaves
from fq.structure import as_matrix, map_lead


def linear(x: Tensor, q: QTensor, bias: Tensor | None = None, *, backend: str = "auto") -> Tensor:
    """Return x Wᵀ + bias for x: (..., K) and q: (N, K) standing for W; (..., N) in x's dtype.

    Differentiable in x, bias, float scales and zero points. Operands are multiplied as float32 (int32 for
    int8 × int8), scales combined in float32, bias added, and the result rounded once to x.dtype. Where
    `q.layout.act` is set, x is quantized to it first, with a straight-through derivative.

    Raises:
        TypeError: x is no float tensor or q no QTensor.
        ValueError: sizes differ.
        BackendError: the backend asked for cannot run the call.

    Example:
        >>> import fq, torch
        >>> q = fq.quantize(127.5 * torch.eye(2, 4), fq.int8())
        >>> fq.linear(torch.tensor([[1.0, 2.0, 3.0, 4.0]]), q)
        tensor([[127., 254.]])
    """
    check_float("linear", "x", x)
    check_qtensor("linear", q)
    if q.data.ndim != 2 or len(q.inner) != 1:
        raise ValueError(f"linear: expected a weight of shape (N, K), got {tuple(q.shape)}; use fq.matmul")
    adjoint = q.layout.axis == -2
    if bias is not None:
        check_float("linear", "bias", bias)
        size = q.inner[0] if adjoint else q.data.size(-2)
        if bias.ndim != 1 or bias.size(0) != size:
            if bias.ndim > 1 or bias.numel() != 1:
                raise ValueError(f"linear: bias must have shape ({size},), got {tuple(bias.shape)}")
            bias = bias.expand(size)
    return _contract("linear", x, q, bias, adjoint, requested(backend))


def matmul(a: Any, b: Any, *, backend: str = "auto") -> Tensor:
    """Return a @ b, one of them quantized, with the broadcasting of torch.matmul.

    a: (..., M, K) or (K,); b: (..., K, N) or (K,). A contraction along the packed axis is `linear`, one
    along the rows its adjoint. Differentiable as `linear` is; the result has the float operand's dtype.

    Raises:
        TypeError: none or both are quantized.
        ValueError: sizes differ or do not broadcast.

    Example:
        >>> import fq, torch
        >>> q = fq.quantize(torch.full((3, 2, 4), 127.5), fq.int8())
        >>> fq.matmul(torch.ones(5, 4), q.mT).shape
        torch.Size([3, 5, 2])
    """
    if isinstance(a, QTensor) == isinstance(b, QTensor):
        kind = "both are" if isinstance(a, QTensor) else "neither is"
        raise TypeError(
            f"matmul: expected one quantized operand, {kind}; fq.dequantize one, or use torch.matmul"
        )
    backend = requested(backend)
    if isinstance(b, QTensor):
        check_float("matmul", "a", a)
        check_qtensor("matmul", b)
        if b.ndim == 1:
            return _contract("matmul", a, as_matrix(b), None, False, backend).squeeze(-1)
        return _contract("matmul", a, b, None, b.layout.axis == -1, backend)
    check_float("matmul", "b", b)
    check_qtensor("matmul", a)
    if b.ndim == 1:  # (..., N, K) @ (K,): b is one row
        return _contract(
            "matmul", b.unsqueeze(0), _flipped(a), None, _flipped(a).layout.axis == -1, backend
        ).squeeze(-2)
    if a.ndim == 1:
        return _contract("matmul", b.mT, as_matrix(a), None, False, backend).squeeze(-1)
    return _contract("matmul", b.mT, a.mT, None, a.layout.axis == -2, backend).mT


def _flipped(q: QTensor) -> QTensor:
    return as_matrix(q).mT if q.ndim == 1 else q.mT


def _contract(what: str, x: Tensor, q: QTensor, bias: Tensor | None, adjoint: bool, backend: str) -> Tensor:
    """Contract x's last dimension with q's packed axis, or (adjoint) with its rows, over batch dimensions."""
    if len(q.inner) != 1:
        raise ValueError(f"{what}: the packed axis stands for dimensions {q.inner}; a matmul needs one")
    data = q.data
    size, out = (data.size(-2), q.inner[0]) if adjoint else (q.inner[0], data.size(-2))
    if x.ndim == 0 or x.size(-1) != size:
        got = x.shape[-1] if x.ndim else "no dimension"
        raise ValueError(
            f"{what}: x has K={got}, q was quantized with K={size} ({q.layout.key}, shape {tuple(q.shape)})"
        )
    device = x.device
    if device != data.device or (bias is not None and bias.device != device):
        raise ValueError(f"{what}: x is on {device}, q on {data.device}; bring x, q and bias to one device")
    if q.perm is not None or q.pre_scale is not None:
        return _contract_adjusted(what, x, q, bias, adjoint, backend)
    if x.ndim == data.ndim == 2:
        return _call(x, q, bias, adjoint, backend)
    if data.ndim == 2:
        return _call(x.reshape(prod(x.shape[:-1]), size), q, bias, adjoint, backend).reshape(
            *x.shape[:-1], out
        )
    return _batched(what, x, q, adjoint, backend)


def _contract_adjusted(
    what: str, x: Tensor, q: QTensor, bias: Tensor | None, adjoint: bool, backend: str
) -> Tensor:
    """Contract with q's `perm` and `pre_scale` applied to the activation, in float32, rounding once."""
    plain = replace(q, perm=None, pre_scale=None)
    rows = x.unsqueeze(0) if x.ndim == 1 else x
    if adjoint:
        y = _contract(what, rows.to(torch.float32), plain, None, True, backend)
        y = _unpermute(y, q.perm)
        y = y if q.pre_scale is None else y / q.pre_scale.to(torch.float32)
        y = y if bias is None else y + bias.to(torch.float32)
    else:
        y = _contract(what, _match_columns(rows.to(torch.float32), q), plain, bias, False, backend)
    return (y.squeeze(-2) if x.ndim == 1 else y).to(x.dtype)


def _match_columns(x: Tensor, q: QTensor) -> Tensor:
    """Divide x by pre_scale and put its columns in stored order."""
    if q.pre_scale is not None:
        x = x / q.pre_scale.to(torch.float32)
    if q.perm is None:
        return x
    lead = torch.broadcast_shapes(x.shape[:-1], q.perm.shape[:-1])
    return torch.gather(x.expand(*lead, -1), -1, q.perm.expand(*lead, -1))


def _batched(what: str, x: Tensor, q: QTensor, adjoint: bool, backend: str) -> Tensor:
    """Broadcast x (..., M, K) against q's leading dimensions; what q lacks is folded into the rows of x."""
    vector = x.ndim == 1
    x = x.unsqueeze(0) if vector else x
    lead = tuple(q.data.shape[:-2])
    batch = tuple(x.shape[:-2])
    try:
        both = torch.broadcast_shapes(batch, lead)
    except RuntimeError:
        raise ValueError(f"{what}: batch dimensions {batch} of x and {lead} of q do not broadcast") from None
    lead = (1,) * (len(both) - len(lead)) + lead
    x = x.expand(*both, *x.shape[-2:])
    kept = [i for i, n in enumerate(lead) if n == both[i] and n != 1]
    folded = [i for i in range(len(both)) if i not in kept]
    m = len(both)
    rows = x.permute(*kept, *folded, m, m + 1)
    rows = rows.reshape(*[both[i] for i in kept], prod([both[i] for i in folded]) * x.shape[-2], x.shape[-1])
    leaf = q if len(kept) == q.data.ndim - 2 else _squeeze_lead(q, [both[i] for i in kept])
    y = _call(rows, leaf, None, adjoint, backend)
    y = y.reshape(*[both[i] for i in (*kept, *folded)], x.shape[-2], y.shape[-1])
    order = [*kept, *folded]
    y = y.permute(*[order.index(i) for i in range(m)], m, m + 1)
    return y.squeeze(-2) if vector else y


def _squeeze_lead(q: QTensor, lead: list[int]) -> QTensor:
    return map_lead(q, lambda t: t.reshape(*lead, *t.shape[-2:]))


def _call(x: Tensor, q: QTensor, bias: Tensor | None, adjoint: bool, backend: str) -> Tensor:
    if not torch.compiler.is_compiling() and _is_plain(x, bias, q):
        return kernel_of(q, autograd.product(adjoint), backend, x)(x, q, bias)
    tensors, spec = to_leaves(q)
    return autograd.call_matmul(x, bias, spec, backend, adjoint, *tensors)


def _is_plain(x: Tensor, bias: Tensor | None, q: QTensor) -> bool:
    """Whether nothing is differentiated, transformed or autocast, so that the kernel alone will do."""
    if autograd.is_transformed() or torch._C._is_any_autocast_enabled():
        return False
    if not torch.is_grad_enabled():
        return True
    if x.requires_grad or q.scale.requires_grad or (bias is not None and bias.requires_grad):
        return False
    return q.zero_point is None or not q.zero_point.requires_grad


def embedding(ids: Tensor, q: QTensor, *, backend: str = "auto") -> Tensor:
    """Return the rows of q: (V, D) that ids: (...) name, dequantized: (..., D) in q.dtype.

    Only those rows are decoded. Differentiable in float scales and zero points.

    Raises:
        TypeError: ids are no integers or q no QTensor.
        ValueError: q is no matrix of rows, or its blocks span rows.
        IndexError: an id is out of range.

    Example:
        >>> import fq, torch
        >>> q = fq.quantize(torch.full((4, 2), 127.5), fq.int8())
        >>> fq.embedding(torch.tensor([[0, 3]]), q).shape
        torch.Size([1, 2, 2])
    """
    check_qtensor("embedding", q)
    if not isinstance(ids, Tensor) or ids.dtype not in (torch.int64, torch.int32):
        raise TypeError(
            f"embedding: ids must be int64 or int32, got {getattr(ids, 'dtype', type(ids).__name__)}"
        )
    if ids.device != q.device:
        raise ValueError(f"embedding: ids are on {ids.device}, q on {q.device}; bring both to one device")
    if q.ndim != 2 or q.layout.axis != -1 or q.data.ndim != 2:
        raise ValueError(
            f"embedding: expected rows (V, D) packed along D, got {q.layout.key} of {tuple(q.shape)}"
        )
    if q.layout.block[0] not in (1, -1):
        raise ValueError(f"embedding: {q.layout.key} shares blocks between rows; use blocks one row high")
    adjusted = q.perm is not None or q.pre_scale is not None
    leaves, spec = to_leaves(replace(q, perm=None, pre_scale=None, input_scale=None) if adjusted else q)
    out = autograd.call_embedding(
        ids, spec, torch.float32 if adjusted else q.dtype, requested(backend), *leaves
    )
    if adjusted:
        out = _unpermute(out, None if q.perm is None else q.perm.squeeze(0))
        out = (out if q.pre_scale is None else out / q.pre_scale.squeeze(-2).to(torch.float32)).to(q.dtype)
    return out


# --- one format each ---


def _checked(
    name: str, wanted: str, accepts: Callable[[Layout], bool], layout_name: str
) -> Callable[..., Tensor]:
    def product(
        x: Tensor, q: Any, bias: Tensor | None = None, *, layout: Layout | None = None, backend: str = "auto"
    ) -> Tensor:
        check_float(name, "x", x)
        if isinstance(q, tuple):
            q = _from_tuple(name, x, q, layout)
        check_qtensor(name, q)
        if not accepts(q.layout):
            raise ValueError(f"{name}: expected {wanted}, got {q.layout.key}; fq.linear takes any layout")
        if q.ndim == 2 and x.ndim and x.shape[-1] != q.shape[-1]:
            raise ValueError(f"{name}: x has K={x.shape[-1]}, q was quantized with K={q.shape[-1]}")
        return linear(x, q, bias, backend=backend)

    product.__name__ = product.__qualname__ = name
    product.__doc__ = f"""Return `linear(x, q, bias)` for q checked to be {wanted}.

    x: (..., K); q: a QTensor (N, K), or a plain tuple (data, scale[, zero_point]) with `layout=`, where a
    nested scale is itself a tuple (data, scale). Returns (..., N) in x's dtype.

    Raises:
        TypeError: x is no float tensor, or a tuple came without a layout.
        ValueError: q is of another format, or sizes differ.

    Example:
        >>> import fq, torch
        >>> q = fq.quantize(torch.ones(2, 32), fq.{layout_name}())
        >>> fq.{name}(torch.ones(1, 32), q).shape
        torch.Size([1, 2])
    """
    return product


def _from_tuple(name: str, x: Tensor, parts: tuple[Any, ...], layout: Layout | None) -> QTensor:
    if not isinstance(layout, Layout):
        raise TypeError(f"{name}: a plain tuple needs layout=, such as layout=fq.int4()")
    if not 2 <= len(parts) <= 3:
        raise ValueError(
            f"{name}: expected (data, scale) or (data, scale, zero_point), got {len(parts)} parts"
        )
    data, scale, *zero = parts
    if not isinstance(data, Tensor) or data.ndim < 2 or x.ndim == 0:
        got = tuple(data.shape) if isinstance(data, Tensor) else type(data).__name__
        raise ValueError(f"{name}: expected x (..., K) and data of shape (N, row bytes), got {got}")
    size = x.shape[-1] if layout.axis == -1 else data.shape[-1] * 8 // layout.element.bits

    def child(value: Any, kind: Any) -> Any:
        if not isinstance(value, tuple):
            return value
        if not (isinstance(kind, Layout) and len(value) == 2 and isinstance(value[0], Tensor)):
            raise ValueError(f"{name}: only nested scales of {layout.key} are tuples (data, scale)")
        return QTensor(value[0], child(value[1], kind.scale), kind, torch.float32, (value[0].shape[-1],))

    stored = parse(stored_key(layout, (data.shape[-2], size)))
    return QTensor(
        data,
        child(scale, layout.scale),
        stored,
        x.dtype,
        (size,),
        child(zero[0], layout.zero_point) if zero else None,
    )


def _is_nvfp4(layout: Layout) -> bool:
    scale = layout.scale.element if isinstance(layout.scale, Layout) else None
    kept = scale == E4M3 or layout.scale == torch.float8_e4m3fn
    return layout.element == E2M1 and kept and layout.block in ((1, 16), (1, -1))


int4_matmul = _checked(
    "int4_matmul", "a 4-bit integer format", lambda t: t.element in (Int(4), UInt(4)), "int4"
)
int8_matmul = _checked(
    "int8_matmul", "an 8-bit integer format", lambda t: t.element in (Int(8), UInt(8)), "int8"
)
fp8_matmul = _checked(
    "fp8_matmul",
    "an 8-bit float format",
    lambda t: isinstance(t.element, Float) and t.element.bits == 8,
    "fp8",
)
mx_matmul = _checked("mx_matmul", "an MX format (e8m0 scales)", lambda t: t.scale == E8M0, "mxfp4")
nvfp4_matmul = _checked("nvfp4_matmul", "NVFP4 (e2m1 under e4m3 scales)", _is_nvfp4, "nvfp4")
