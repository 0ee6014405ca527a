"""One autograd.Function per differentiable primitive, for all backends, and the opaque calls around them.

The recipe: the calls marked `allow_in_graph` take tensors and constants only (a QTensor as its leaves and
Spec), so Dynamo guards what the constants were read from and never traces the kernels. Backends supply a
kernel and its adjoint; every backward applies a Function again, so derivatives of any order compose.
Nothing is saved but the inputs: a backward keeps the packed weight.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fq import numerics
from fq.backends.registry import kernels, resolve
from fq.checks import check_children
from fq.dynamo import allow_in_graph
from fq.layouts import Layout, block
from fq.layouts.element import Float
from fq.layouts.layout import changed
from fq.layouts.layout import layout as parse
from fq.layouts.storage import CANONICAL
from fq.qtensor import QTensor
from fq.spec import Spec, canonical_leaf, from_leaves, to_leaves
from fq.structure import take_rows


@dataclass(frozen=True)
class Static:
    """A Spec as one argument of a Function; torch.func would flatten the tuple that it is."""

    spec: Spec


def plain(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which autocast is off on a device."""
    on = torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if on else nullcontext()


def is_transformed() -> bool:
    """Whether a torch.func transform or forward-mode level is active."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def is_forward_mode() -> bool:
    """Whether a jvp is under way; in a compiled one only the stack of transforms tells."""
    if forward_ad._current_level >= 0:
        return True
    functorch: Any = getattr(torch._C, "_functorch")  # noqa: B009 - its stubs do not know it
    return any(t.key() == functorch.TransformType.Jvp for t in functorch.get_interpreter_stack() or ())


def wants_grad(*tensors: Tensor | None) -> bool:
    """Whether autograd records an operation on these tensors."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def without_act(q: QTensor) -> QTensor:
    """Return q without activation quantization: what derivatives see (straight-through)."""
    if q.layout.act is None and q.input_scale is None:
        return q
    return replace(q, layout=changed(q.layout.key, act=None), input_scale=None)


def product(adjoint: bool) -> str:
    """Return the primitive that contracts q's packed axis, or (adjoint) its rows."""
    return "linear_adjoint" if adjoint else "linear"


def run_matmul(x: Tensor, bias: Tensor | None, q: QTensor, backend: str, adjoint: bool) -> Tensor:
    """Run the kernel: x (*lead, M, K) against q's packed axis, or x (*lead, M, R) against its rows."""
    return resolve(product(adjoint), backend, x, q).function(x, q, bias)


def run_plain(x: Tensor, bias: Tensor | None, q: QTensor, backend: str, adjoint: bool) -> Tensor:
    """Run the kernel with autocast off."""
    with plain(x.device):
        return run_matmul(x, bias, q, backend, adjoint)


def _backward_backend(x: Tensor, q: QTensor, backend: str, adjoint: bool) -> tuple[str, QTensor]:
    """Return the backend of a derivative: the same if it has the kernel, else the reference on canonical."""
    for kernel in kernels(product(adjoint)):
        if (
            kernel.backend != "reference"
            and backend in ("auto", kernel.backend)
            and kernel.supports(x, q) is None
        ):
            return kernel.backend, q
    return "reference", canonical_leaf(q)


class MatMul(torch.autograd.Function):
    """y = x Wᵀ + bias, or x W (adjoint=True), with W the stored matrix of q; q's leaves come last."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, bias: Tensor | None, static: Static, backend: str, adjoint: bool, *leaves: Tensor
    ) -> Tensor:
        return run_plain(x, bias, from_leaves(leaves, static.spec), backend, adjoint)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, bias, static, ctx.backend, ctx.adjoint, *leaves = inputs
        ctx.spec = static.spec
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.dtype = x.dtype
        ctx.set_materialize_grads(False)  # an absent tangent is None, not a dense zero
        wanted = any(ctx.needs_input_grad[5:]) or is_forward_mode()
        x = x if wanted else None  # only gradients of scales need the activation
        ctx.save_for_backward(x, *leaves)  # packed, never dense
        ctx.save_for_forward(x, *leaves)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, *leaves = ctx.saved_tensors
        gx = gb = None
        gl: list[Tensor | None] = [None] * len(leaves)
        with plain(g.device):
            q = without_act(from_leaves(leaves, ctx.spec))
            if ctx.needs_input_grad[0]:
                gx = _derivative(g, q, ctx.backend, not ctx.adjoint).to(ctx.dtype)
            if ctx.needs_input_grad[1]:
                gb = g.sum(tuple(range(g.ndim - 1))).to(ctx.bias_dtype)
            if any(ctx.needs_input_grad[5:]):
                if ctx.spec != to_leaves(q)[1]:
                    x = _seen(x, from_leaves(leaves, ctx.spec))
                a, b = (g, x) if not ctx.adjoint else (x, g)
                gw = a.to(torch.float32).mT @ b.to(torch.float32)
                grads = numerics.leaf_gradients(_differentiable(q), gw)
                gl[: len(grads)] = grads
        return gx, gb, None, None, None, *gl

    @staticmethod
    def jvp(ctx: Any, xt: Any, bt: Any, _spec: Any, _backend: Any, _adjoint: Any, *tangents: Any) -> Tensor:
        x, *leaves = ctx.saved_tensors
        with plain(x.device):
            full = from_leaves(leaves, ctx.spec)
            q = without_act(full)
            y = None if xt is None else _derivative(xt, q, ctx.backend, ctx.adjoint)
            if any(t is not None for t in tangents):
                wt = numerics.leaf_tangent(_differentiable(q), list(tangents))
                if wt is not None:
                    seen = _seen(x, full).to(torch.float32)
                    part = (seen @ (wt if ctx.adjoint else wt.mT)).to(x.dtype)
                    y = part if y is None else y + part
            if bt is not None:
                y = bt if y is None else y + bt
        if y is None:
            rows = leaves[0].shape[-2] if not ctx.adjoint else full.inner[0]
            return x.new_zeros((*x.shape[:-1], rows))
        return y.to(x.dtype).expand(*x.shape[:-1], y.shape[-1])


def _differentiable(q: QTensor) -> QTensor:
    if q.layout.storage != CANONICAL:
        raise ValueError(
            f"gradient of scales: storage {q.layout.storage!r} merges them; differentiate fq.canonical(q)"
        )
    return q


def _seen(x: Tensor, q: QTensor) -> Tensor:
    """Return the activation that the weight met, with the identity as its derivative."""
    if q.layout.act is None:
        return x
    rounded = numerics.dequantize_matrix(numerics.quantize_activation(x.detach().to(torch.float32), q)).to(
        x.dtype
    )
    return x + (rounded - x).detach()


def _derivative(g: Tensor, q: QTensor, backend: str, adjoint: bool) -> Tensor:
    backend, q = _backward_backend(g, q, backend, adjoint)
    leaves, spec = to_leaves(q)
    return MatMul.apply(g, None, Static(spec), backend, adjoint, *leaves)


class Dequantize(torch.autograd.Function):
    """The stored matrix of q in `dtype`; differentiable in float scales and zero points."""

    generate_vmap_rule = True

    @staticmethod
    def forward(static: Static, dtype: torch.dtype, backend: str, *leaves: Tensor) -> Tensor:
        q = from_leaves(leaves, static.spec)
        return resolve("dequantize", backend, q, dtype).function(q, dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.set_materialize_grads(False)
        static, ctx.dtype, _, *leaves = inputs
        ctx.spec = static.spec
        ctx.save_for_backward(*leaves)
        ctx.save_for_forward(*leaves)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        q = _differentiable(from_leaves(ctx.saved_tensors, ctx.spec))
        gl: list[Tensor | None] = [None] * len(ctx.saved_tensors)
        grads = numerics.leaf_gradients(q, g.to(torch.float32))
        gl[: len(grads)] = grads
        return None, None, None, *gl

    @staticmethod
    def jvp(ctx: Any, _spec: Any, _dtype: Any, _backend: Any, *tangents: Any) -> Tensor | None:
        q = _differentiable(from_leaves(ctx.saved_tensors, ctx.spec))
        t = numerics.leaf_tangent(q, list(tangents))
        return None if t is None else t.to(ctx.dtype)


class FakeQuantize(torch.autograd.Function):
    """dequantize(quantize(x)) with straight-through gradients, and LSQ gradients for a given scale."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, scale: Tensor | None, zero_point: Tensor | None, key: str) -> Tensor:
        q = numerics.quantize_matrix(x.to(torch.float32), parse(key), scale=scale, zero_point=zero_point)
        return numerics.dequantize_matrix(q, x.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.set_materialize_grads(False)
        x, scale, zero_point, ctx.key = inputs
        ctx.given = (scale is not None, zero_point is not None)
        saved = [t for t in (x, scale, zero_point) if t is not None]
        ctx.save_for_backward(*saved)
        ctx.save_for_forward(*saved)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        _, scale, zero, slope, factor, clipped, layout = _fake_parts(ctx)
        gx = torch.where(clipped, 0.0, g) if ctx.needs_input_grad[0] else None
        gs = gz = None
        g32 = g.to(torch.float32)
        if scale is not None and ctx.needs_input_grad[1] and _learns(layout):
            gs = (
                (block.reduce(g32 * slope, layout.block, torch.sum) * factor).to(scale.dtype).expand_as(scale)
            )
        if zero is not None and ctx.needs_input_grad[2] and layout.zero_point == "float":
            gz = block.reduce(torch.where(clipped, g32, 0.0), layout.block, torch.sum).to(zero.dtype)
        return gx, gs, gz, None

    @staticmethod
    def jvp(ctx: Any, xt: Any, st: Any, zt: Any, _key: Any) -> Tensor:
        x, _, _, slope, factor, clipped, layout = _fake_parts(ctx)
        out = torch.zeros_like(x) if xt is None else torch.where(clipped, 0.0, xt)
        shape = (x.shape[-2], x.shape[-1])
        if st is not None and _learns(layout):
            out = out + slope * block.expand(st.to(torch.float32) * factor, shape, layout.block)
        if zt is not None and layout.zero_point == "float":
            out = out + torch.where(clipped, block.expand(zt.to(torch.float32), shape, layout.block), 0.0)
        return out.to(x.dtype)


def _learns(layout: Layout) -> bool:
    """Whether scales of this layout can have a gradient: plain floats, not e8m0, e4m3 or nested."""
    return layout.scale in (torch.float32, torch.float16, torch.bfloat16)


def _fake_parts(ctx: Any) -> tuple[Any, ...]:
    """Return x, scale, zero, d(output)/d(scale), LSQ's factor, what clips, layout."""
    saved = list(ctx.saved_tensors)
    x = saved.pop(0)
    scale = saved.pop(0) if ctx.given[0] else None
    zero = saved.pop(0) if ctx.given[1] else None
    layout, element = parse(ctx.key), parse(ctx.key).element
    x32 = x.detach().to(torch.float32)
    q = numerics.quantize_matrix(
        x32,
        layout,
        scale=None if scale is None else scale.detach(),
        zero_point=None if zero is None else zero.detach(),
    )
    shape = (x.shape[-2], x.shape[-1])
    spread = block.expand(numerics.load_scale(q.scale, q.layout.scale), shape, layout.block)
    centred = numerics._centred(q, shape)
    low: Any = element.min
    high: Any = element.max
    if layout.zero_point is not None:
        zeros = block.expand(numerics.load_zero(q.zero_point, q.layout), shape, layout.block)
        if layout.zero_point == "int":
            low, high = low - zeros, high - zeros
        else:
            x32 = x32 - zeros
    value = x32 / spread
    half = 0.5
    if isinstance(element, Float):
        half = 2.0 ** (element.max_exponent - element.mantissa - 1)
    slack = 1 + 2.0**-20  # amax/(amax/7.5) may be an ulp above 7.5
    clipped = (value > (high + half) * slack) | (value < (low - half) * slack)
    slope = torch.where(clipped, centred, centred - value)
    count = block.reduce(x32.new_ones(()).expand(shape), layout.block, torch.sum)
    factor = torch.rsqrt(torch.clamp(count, min=1.0) * element.max)
    return x, scale, zero, slope, factor, clipped, layout


# --- opaque calls ---


def refuse_inference(what: str, *tensors: Tensor | None) -> None:
    """Raise where a backward would have to save a tensor that inference_mode made."""
    if wants_grad(*tensors) and any(t is not None and t.is_inference() for t in tensors):
        raise RuntimeError(
            f"{what}: a tensor made under inference_mode cannot be saved for a backward; call clone() on it "
            "outside inference_mode, or quantize under no_grad"
        )


@allow_in_graph
def call_matmul(
    x: Tensor, bias: Tensor | None, spec: Spec, backend: str, adjoint: bool, *leaves: Tensor
) -> Tensor:
    """Run MatMul, or its kernel alone where nothing is differentiated or transformed."""
    q = from_leaves(leaves, spec)
    check_children("linear", q)
    if wants_grad(x, bias, *leaves) or is_transformed():
        refuse_inference("linear", x, bias, *leaves)
        return MatMul.apply(x, bias, Static(spec), backend, adjoint, *leaves)
    return run_plain(x, bias, q, backend, adjoint)


@allow_in_graph
def call_dequantize(spec: Spec, dtype: torch.dtype, backend: str, *leaves: Tensor) -> Tensor:
    """Run Dequantize, or its kernel alone where nothing is differentiated or transformed."""
    check_children("dequantize", from_leaves(leaves, spec))
    if wants_grad(*leaves) or is_transformed():
        refuse_inference("dequantize", *leaves)
        return Dequantize.apply(Static(spec), dtype, backend, *leaves)
    return Dequantize.forward(Static(spec), dtype, backend, *leaves)


@allow_in_graph
def call_fake_quantize(x: Tensor, scale: Tensor | None, zero_point: Tensor | None, key: str) -> Tensor:
    """Run FakeQuantize."""
    with plain(x.device):
        return FakeQuantize.apply(x, scale, zero_point, key)


@allow_in_graph
def call_quantize(
    x: Tensor,
    scale: Tensor | None,
    zero_point: Tensor | None,
    outer_scale: Tensor | None,
    noise: Tensor | None,
    key: str,
    backend: str,
) -> tuple[Tensor, ...]:
    """Run the kernel of quantize and return the leaves of what it made."""
    layout = parse(key)
    kernel = resolve("quantize", backend, x, layout)
    with plain(x.device):
        q = kernel.function(x, layout, scale, zero_point, outer_scale, noise)
    return tuple(to_leaves(q)[0])


@allow_in_graph
def call_embedding(ids: Tensor, spec: Spec, dtype: torch.dtype, backend: str, *leaves: Tensor) -> Tensor:
    """Run the kernel of embedding, or gather and Dequantize where something is differentiated."""
    q = from_leaves(leaves, spec)
    check_children("embedding", q)
    if wants_grad(*leaves) or is_transformed():
        rows, spec = to_leaves(take_rows(q, ids.reshape(-1).to(torch.int64), "embedding"))
        return call_dequantize(spec, dtype, "reference", *rows).reshape(*ids.shape, q.inner[0])
    return resolve("embedding", backend, ids, q, dtype).function(ids, q, dtype)


@allow_in_graph
def call_codes(primitive: str, backend: str, x: Tensor, *constants: int) -> Tensor:
    """Run a primitive on codes or bytes: nothing to differentiate."""
    return resolve(primitive, backend, x, *constants).function(x, *constants)
