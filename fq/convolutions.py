"""Convolutions with a quantized weight: weight-only, in one, two and three dimensions, transposed or not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fq import numerics
from fq.autograd import is_forward_mode, is_transformed, plain, refuse_inference, wants_grad
from fq.checks import check_children, check_float, check_qtensor
from fq.dynamo import allow_in_graph
from fq.qtensor import QTensor
from fq.spec import Spec, canonical_leaf, from_leaves, to_leaves

Sizes = tuple[int, ...]
# stride, padding, dilation, transposed, output padding, groups: as aten::convolution takes them
Config = tuple[Sizes, Sizes, Sizes, bool, Sizes, int]


@dataclass(frozen=True)
class _Static:
    """Spec and Config as one argument of a Function; torch.func would flatten tuples."""

    spec: Spec
    config: Config


def _run(x: Tensor, w: Tensor, bias: Tensor | None, config: Config) -> Tensor:
    """Convolve in float32."""
    return torch.ops.aten.convolution(x.to(torch.float32), w, bias, *config)


def _dense(q: QTensor) -> Tensor:
    """Return the weight (R, *inner) in float32."""
    matrix = numerics.dequantize_matrix(canonical_leaf(q))
    return matrix.reshape(*matrix.shape[:-1], *q.inner)


class Convolution(torch.autograd.Function):
    """The convolution of x with the weight of q; q's leaves come last. The backward keeps them packed."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, bias: Tensor | None, static: _Static, *leaves: Tensor) -> Tensor:
        with plain(x.device):
            wide = None if bias is None else bias.to(torch.float32)
            y = _run(x, _dense(from_leaves(leaves, static.spec)), wide, static.config)
            return y.to(x.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, bias, ctx.static, *leaves = inputs
        ctx.set_materialize_grads(False)
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.dtype, ctx.size = x.dtype, x.shape[2:]
        x = x if any(ctx.needs_input_grad[3:]) or is_forward_mode() else None
        ctx.save_for_backward(x, *leaves)
        ctx.save_for_forward(x, *leaves)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, *leaves = ctx.saved_tensors
        spec, config = ctx.static.spec, ctx.static.config
        gx = gb = None
        gl: list[Tensor | None] = [None] * len(leaves)
        with plain(g.device):
            q = from_leaves(leaves, spec)
            if ctx.needs_input_grad[0]:
                adjoint = _Static(spec, _adjoint(config, ctx.size, q.inner[1:]))
                gx = Convolution.apply(g, None, adjoint, *leaves).to(ctx.dtype)
            if ctx.needs_input_grad[1]:
                gb = g.to(torch.float32).sum((0, *range(2, g.ndim))).to(ctx.bias_dtype)
            if any(ctx.needs_input_grad[3:]):
                parts = (g.to(torch.float32), x.to(torch.float32), _dense(q), None, *config)
                gw = torch.ops.aten.convolution_backward(*parts, [False, True, False])[1]
                grads = numerics.leaf_gradients(canonical_leaf(q), gw.flatten(1))
                gl[: len(grads)] = grads
        return gx, gb, None, *gl

    @staticmethod
    def jvp(ctx: Any, xt: Any, bt: Any, _static: Any, *tangents: Any) -> Tensor:
        x, *leaves = ctx.saved_tensors
        spec, config = ctx.static.spec, ctx.static.config
        q = from_leaves(leaves, spec)
        with plain(x.device):
            y = Convolution.apply(x if xt is None else xt, None, ctx.static, *leaves)
            y = torch.zeros_like(y) if xt is None else y
            wt = numerics.leaf_tangent(canonical_leaf(q), list(tangents)) if _any(tangents) else None
            if wt is not None:
                y = y + _run(x, wt.reshape(*wt.shape[:-1], *q.inner), None, config)
            if bt is not None:
                y = y + bt.reshape(-1, *(1 for _ in q.inner[1:]))
        return y.to(x.dtype)


def _any(tangents: Sequence[Any]) -> bool:
    return any(t is not None for t in tangents)


def _adjoint(config: Config, size: Sizes, kernel: Sizes) -> Config:
    """Return the convolution that takes an output's gradient back to an input of `size`."""
    stride, padding, dilation, transposed, _, groups = config
    left = tuple(
        0 if transposed else (n + 2 * p - d * (k - 1) - 1) % s
        for n, k, s, p, d in zip(size, kernel, stride, padding, dilation, strict=True)
    )
    return stride, padding, dilation, not transposed, left, groups


@allow_in_graph
def call_convolution(x: Tensor, bias: Tensor | None, spec: Spec, config: Config, *leaves: Tensor) -> Tensor:
    """Run Convolution, or its forward alone where nothing is differentiated or transformed."""
    check_children("convolution", from_leaves(leaves, spec))
    if wants_grad(x, bias, *leaves) or is_transformed():
        refuse_inference("convolution", x, bias, *leaves)
        return Convolution.apply(x, bias, _Static(spec, config), *leaves)
    return Convolution.forward(x, bias, _Static(spec, config), *leaves)


def convolution(
    what: str,
    dims: int,
    x: Tensor,
    q: QTensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
    transposed: bool = False,
    output_padding: Any = 0,
) -> Tensor:
    """Convolve x (B, C, *size) or (C, *size) with q, as torch.nn.functional's function named `what`."""
    check_float(what, "x", x)
    check_qtensor(what, q)
    if bias is not None:
        check_float(what, "bias", bias)
    if q.data.ndim != 2 or len(q.inner) != dims + 1 or q.layout.axis != -1:
        raise ValueError(
            f"{what}: expected a weight of {dims + 2} dimensions packed along the last {dims + 1}, got "
            f"{q.layout.key} of {tuple(q.shape)}, packed along {len(q.inner)}; quantize with "
            f"inner={dims + 1}, or by fq.plan(module, ...)"
        )
    if q.layout.act is not None or q.perm is not None or q.pre_scale is not None:
        raise ValueError(f"{what}: it is weight-only; act, perm and pre_scale do not apply ({q.layout.key})")
    if x.ndim not in (dims + 1, dims + 2):
        raise ValueError(f"{what}: x must have {dims + 1} or {dims + 2} dimensions, got {tuple(x.shape)}")
    channels = q.data.shape[-2] if transposed else q.inner[0] * groups
    if x.shape[-dims - 1] != channels:
        raise ValueError(f"{what}: x has {x.shape[-dims - 1]} channels, the weight takes {channels}")
    if x.device != q.device:
        raise ValueError(f"{what}: x is on {x.device}, q on {q.device}; bring both to one device")
    sizes = [_sizes(what, name, value, dims) for name, value in (("stride", stride), ("dilation", dilation))]
    if isinstance(padding, str):
        x, pads = _named_padding(what, padding, x, q.inner[1:], *sizes)
    else:
        pads = _sizes(what, "padding", padding, dims)
    outs = _sizes(what, "output_padding", output_padding, dims)
    config = (sizes[0], pads, sizes[1], transposed, outs, groups)
    leaves, spec = to_leaves(q)
    if x.ndim == dims + 1:
        return call_convolution(x.unsqueeze(0), bias, spec, config, *leaves).squeeze(0)
    return call_convolution(x, bias, spec, config, *leaves)


def _sizes(what: str, name: str, value: Any, dims: int) -> Sizes:
    """Return one size per dimension."""
    values = (value,) * dims if isinstance(value, int) else tuple(value)
    values = values * dims if len(values) == 1 else values
    if len(values) != dims:
        raise ValueError(f"{what}: {name} must be one number or {dims}, got {value!r}")
    return values


def _named_padding(
    what: str, padding: str, x: Tensor, kernel: Sizes, stride: Sizes, dilation: Sizes
) -> tuple[Tensor, Sizes]:
    """Return x and the padding that "valid" and "same" mean; an odd one is made of zeros at the end."""
    if padding not in ("valid", "same"):
        raise ValueError(f"{what}: padding must be numbers, 'valid' or 'same', got {padding!r}")
    if padding == "valid":
        return x, (0,) * len(kernel)
    if any(s != 1 for s in stride):
        raise ValueError(f"{what}: padding='same' needs stride 1, got {stride}")
    totals = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
    if any(total % 2 for total in totals):
        ends: list[int] = []
        for total in reversed(totals):
            ends += [0, total % 2]
        x = torch.constant_pad_nd(x, ends)
    return x, tuple(total // 2 for total in totals)


def _public(dims: int) -> Callable[..., Tensor]:
    name = f"conv{dims}d"

    def function(
        x: Tensor,
        q: QTensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Tensor:
        return convolution(name, dims, x, q, bias, stride, padding, dilation, groups)

    size = "×".join("LHW"[-dims:] if dims > 1 else "L")
    kernel = ", ".join(["3"] * dims)
    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"""Convolve x with a quantized weight, as torch.nn.functional.{name} does.

    x: (B, C, {size}) or (C, {size}); q: (O, C/groups, kernel...), quantized with `inner={dims + 1}`. The
    weight is decoded in the call; products and sums are float32, rounded once to x.dtype. Differentiable
    in x, bias, float scales and zero points; the backward keeps the packed weight.

    Raises:
        TypeError: x is no float tensor or q no QTensor.
        ValueError: sizes do not fit, or the layout quantizes activations.

    Example:
        >>> import fq, torch
        >>> q = fq.quantize(torch.randn(4, 2, {kernel}), fq.int8(), inner={dims + 1})
        >>> fq.{name}(torch.ones(1, 2, {", ".join(["5"] * dims)}), q, padding=1).shape
        torch.Size([1, 4, {", ".join(["5"] * dims)}])
    """
    return function


conv1d, conv2d, conv3d = _public(1), _public(2), _public(3)
