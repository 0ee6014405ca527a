"""The public pure functions: checks, shapes, and the choice of backend.

x: (..., K) activations; q: a QTensor of logical shape (N, K). `perm` and `pre_scale` are applied here, to
the activation, so that no kernel knows them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fq import autograd
from fq.backends.registry import requested
from fq.checks import FLOATS, check_float, check_qtensor
from fq.layouts import Layout, block
from fq.layouts.layout import changed
from fq.layouts.storage import CANONICAL
from fq.qtensor import QTensor
from fq.spec import canonical_leaf, from_leaves, spec_of, to_leaves
from fq.structure import map_lead, select_row


def quantize(
    x: Tensor,
    layout: Layout,
    *,
    scale: Tensor | float | None = None,
    zero_point: Tensor | None = None,
    outer_scale: Tensor | float | None = None,
    input_scale: Tensor | float | None = None,
    noise: Tensor | None = None,
    inner: int = 1,
    backend: str = "auto",
) -> QTensor:
    """Quantize x: (*lead, N, *inner) to `layout`; not differentiable, see `fake_quantize`.

    The input is read as float32, divided by the scale as stored (IEEE division), rounded once to nearest
    even, and saturated. A block with NaN or inf gets a NaN scale and dequantizes to NaN, all of it.

    Args:
        x: float tensor of at least one dimension; blocks run along the trailing dimensions.
        layout: how to store it; its rule chooses the scales.
        scale: block grid (*lead, rows, cols), float, to use instead of the rule's; stored as the layout says.
        zero_point: block grid, goes with `scale` where the layout has one.
        outer_scale: scale of nested scales (NVFP4's per-matrix one), broadcast to (*lead, 1, 1).
        input_scale: a static scale for the activation, kept beside the weight and used with `layout.act`.
        noise: uniform [0, 1) float32 of x's shape: stochastic rounding.
        inner: how many trailing dimensions are flattened into the packed axis (3 for a conv weight).
        backend: a backend's name, or "auto".

    Raises:
        TypeError: x is no float tensor, or layout no Layout.
        ValueError: x has no dimension, or a given grid has the wrong shape.

    Example:
        >>> import fq, torch
        >>> q = fq.quantize(torch.tensor([[0.5, 1.0, -6.0, 3.0]]), fq.mxfp4())
        >>> fq.dequantize(q)
        tensor([[ 0.5000,  1.0000, -6.0000,  3.0000]])
    """
    if isinstance(x, QTensor):
        raise TypeError("quantize: expected a float tensor, got a QTensor; use fq.requantize")
    check_float("quantize", "x", x)
    if not isinstance(layout, Layout):
        raise TypeError(f"quantize: expected a Layout such as fq.int4(), got {layout!r}")
    if layout.storage != CANONICAL:
        raise ValueError(
            f"quantize: storage {layout.storage!r} is made by fq.prepack from a canonical QTensor"
        )
    if x.ndim == 0:
        raise ValueError(
            "quantize: expected at least one dimension, got a 0-dimensional tensor; reshape it to (1,)"
        )
    if isinstance(inner, bool) or not isinstance(inner, int):
        raise TypeError(f"quantize: inner must be an int, got {inner!r}")
    if not 1 <= inner <= x.ndim:
        raise ValueError(f"quantize: inner={inner} trailing dimensions, but x has {x.ndim}")
    if noise is not None:
        check_float("quantize", "noise", noise)
    if x.ndim == inner == 1 and layout.axis == -2:  # a vector is one row, whichever way it lies
        layout = changed(layout.key, axis=-1)
    x, noise = x.detach(), None if noise is None else noise.detach()
    if noise is not None and noise.shape != x.shape:
        raise ValueError(f"quantize: noise must have x's shape {tuple(x.shape)}, got {tuple(noise.shape)}")
    matrix = _stored_matrix(x, layout.axis, inner)
    shape = (matrix.shape[-2], matrix.shape[-1])
    lead, size = matrix.shape[:-2], block.grid(shape, layout.block)
    inner_shape = tuple(x.shape[x.ndim - inner :]) if layout.axis == -1 else (matrix.shape[-1],)
    scale = _grid("scale", scale, (*lead, *size), x.device)
    if scale is not None and layout.zero_point is not None and zero_point is None:
        raise ValueError(f"quantize: {layout.key} has a zero point; give zero_point= with scale=")
    if zero_point is not None and (layout.zero_point is None or scale is None):
        raise ValueError("quantize: zero_point= goes with scale= and a layout that has a zero point")
    if outer_scale is not None and not isinstance(layout.scale, Layout):
        raise ValueError(f"quantize: {layout.key} has no nested scale; outer_scale= does not apply")
    leaves = autograd.call_quantize(
        matrix,
        scale,
        _grid("zero_point", zero_point, (*lead, *size), x.device),
        _grid("outer_scale", outer_scale, (*lead, 1, 1), x.device),
        None if noise is None else _stored_matrix(noise, layout.axis, inner),
        layout.key,
        requested(backend),
    )
    q = from_leaves(leaves, spec_of(layout, shape, x.dtype, inner_shape))
    if input_scale is not None:
        if layout.act is None:
            raise ValueError(
                f"quantize: {layout.key} does not quantize activations; input_scale= does not apply"
            )
        if layout.act.zero_point is not None:
            raise ValueError(
                f"quantize: activations {layout.act.key} have zero points, which a static scale lacks; "
                "leave input_scale= out, or quantize them symmetrically"
            )
        q = replace(q, input_scale=_grid("input_scale", input_scale, (*lead, 1, 1), x.device))
    return _as_vector(q) if x.ndim == inner else q


def _stored_matrix(x: Tensor, axis: int, inner: int) -> Tensor:
    """Return x as (*lead, R, C), the packed axis last."""
    if x.ndim == inner:
        x = x.unsqueeze(0)
    if inner > 1:
        x = x.flatten(-inner)
    if axis == -2:
        if inner > 1:
            raise ValueError("quantize: axis=-2 packs one dimension; expected inner=1")
        x = x.mT
    return x


def _as_vector(q: QTensor) -> QTensor:
    """Return a matrix of one row as a vector: its rows are gone, its blocks one row high."""
    return select_row(q, 0)


def _grid(name: str, value: Any, shape: tuple[int, ...], device: torch.device) -> Tensor | None:
    """Return a given scale or zero point as a detached grid of `shape`."""
    if value is None:
        return None
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = torch.tensor(float(value), dtype=torch.float32, device=device)
    if not isinstance(value, Tensor) or value.is_complex():
        got = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"quantize: {name} must be a real tensor or a number, got {got}")
    if name != "zero_point" and not value.is_floating_point():
        raise TypeError(
            f"quantize: {name} must be floats, got {value.dtype}; e8m0 bytes are .view(torch.float8_e8m0fnu)"
        )
    value = value.detach()
    if value.ndim <= 1 and value.numel() == 1:
        return value.reshape((1,) * len(shape)).expand(shape)
    ok = value.ndim <= len(shape) and all(
        a in (1, b) for a, b in zip(reversed(value.shape), reversed(shape), strict=False)
    )
    grid = shape[-2:]
    whole = grid in (tuple(value.shape[-2:]), (1, *value.shape)) if name in ("scale", "zero_point") else True
    if not (ok and whole):
        raise ValueError(f"quantize: {name} must be a block grid of shape {shape}, got {tuple(value.shape)}")
    return value.expand(shape)


def dequantize(q: QTensor, dtype: torch.dtype | None = None, *, backend: str = "auto") -> Tensor:
    """Return q as a float tensor of its logical shape; differentiable in float scales and zero points.

    `w = decode(code)·scale (+ zero)`, computed in float32 and rounded once to `dtype` (default q.dtype).

    Raises:
        TypeError: q is no QTensor.
        ValueError: its children do not fit its layout.

    Example:
        >>> import fq, torch
        >>> fq.dequantize(fq.quantize(torch.tensor([[127.5, -10.0]]), fq.int8()))
        tensor([[127., -10.]])
    """
    check_qtensor("dequantize", q)
    dtype = q.dtype if dtype is None else dtype
    if dtype not in FLOATS:
        raise TypeError(f"dequantize: dtype must be float32, bfloat16, float16 or float64, got {dtype!r}")
    q = canonical_leaf(q)
    vector = q.data.ndim == 1
    if vector:
        q = map_lead(q, lambda t: t.unsqueeze(0))
    adjusted = q.perm is not None or q.pre_scale is not None
    plain = replace(q, perm=None, pre_scale=None, input_scale=None)
    leaves, spec = to_leaves(plain)
    w = autograd.call_dequantize(spec, torch.float32 if adjusted else dtype, requested(backend), *leaves)
    if adjusted:
        w = _unpermute(w, q.perm)
        w = (w if q.pre_scale is None else w / q.pre_scale.to(torch.float32)).to(dtype)
    if len(q.inner) > 1:
        w = w.unflatten(-1, q.inner)
    if vector:
        w = w.squeeze(0)
    return w.mT if q.layout.axis == -2 else w


def _unpermute(t: Tensor, perm: Tensor | None) -> Tensor:
    """Move stored columns to their logical places."""
    if perm is None:
        return t
    order = perm.argsort(-1)
    return torch.gather(t, -1, order.expand(*t.shape[: t.ndim - order.ndim], *order.shape).expand(t.shape))


def requantize(q: QTensor, layout: Layout, *, backend: str = "auto") -> QTensor:
    """Quantize to another layout what q dequantizes to (in float32).

    Raises:
        TypeError: q is no QTensor.

    Example:
        >>> import fq, torch
        >>> q = fq.quantize(torch.ones(2, 64), fq.int8())
        >>> fq.requantize(q, fq.mxfp4()).layout
        fq.layout('mxfp4')
    """
    check_qtensor("requantize", q)
    inner = len(q.inner)
    out = quantize(dequantize(q, torch.float32, backend=backend), layout, inner=inner, backend=backend)
    return replace(out, dtype=q.dtype)


def fake_quantize(
    x: Tensor, layout: Layout, *, scale: Tensor | None = None, zero_point: Tensor | None = None
) -> Tensor:
    """Return dequantize(quantize(x, layout)), bit for bit, with straight-through gradients.

    The gradient is 1 unless |x/s| exceeds the largest code by more than half a step (integers) or half
    the last spacing (floats), then 0. A given float `scale` gets the LSQ gradient with its factor
    1/sqrt(N·Q_max) (Esser et al., 2020); e8m0, e4m3 and nested scales have none.

    Args:
        x: (*lead, N, K), float.
        layout: the format to imitate; a learned `scale` has its block grid (*lead, rows, cols).
        scale: learned scales.
        zero_point: with them, where the layout has one.

    Raises:
        TypeError: x is no float tensor.
        ValueError: a grid has the wrong shape.

    Example:
        >>> import fq, torch
        >>> x = torch.tensor([[0.3, 1.0]], requires_grad=True)
        >>> fq.fake_quantize(x, fq.int8()).sum().backward()
        >>> x.grad
        tensor([[1., 1.]])
    """
    check_float("fake_quantize", "x", x)
    if not isinstance(layout, Layout):
        raise TypeError(f"fake_quantize: expected a Layout, got {layout!r}")
    if x.ndim == 0:
        raise ValueError("fake_quantize: expected at least one dimension, got a 0-dimensional tensor")
    for name, value in (("scale", scale), ("zero_point", zero_point)):
        if value is not None:
            check_float("fake_quantize", name, value)
    if x.ndim == 1 and layout.axis == -2:
        layout = changed(layout.key, axis=-1)
    matrix = _stored_matrix(x, layout.axis, 1)
    shape = (*matrix.shape[:-2], *block.grid((matrix.shape[-2], matrix.shape[-1]), layout.block))
    if (zero_point is not None) != (scale is not None and layout.zero_point is not None):
        raise ValueError("fake_quantize: zero_point= goes with scale= and a layout that has a zero point")
    vector = x.ndim == 1
    scale, zero_point = (
        _learned("scale", scale, shape, vector),
        _learned("zero_point", zero_point, shape, vector),
    )
    y = autograd.call_fake_quantize(matrix, scale, zero_point, layout.key)
    y = y.mT if layout.axis == -2 else y
    return y.squeeze(0) if vector else y


def _learned(name: str, value: Tensor | None, shape: tuple[int, ...], vector: bool) -> Tensor | None:
    """Return a grid of exactly `shape`: what has a gradient is not broadcast."""
    if value is None:
        return None
    value = value.unsqueeze(0) if vector and value.ndim == 1 else value
    if tuple(value.shape) != shape:
        raise ValueError(
            f"fake_quantize: {name} must be a block grid of shape {shape}, got {tuple(value.shape)}"
        )
    return value
