"""What a parameter dict holds, and how far it is from another: bytes, bits per weight, SQNR."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from fq.leaves import FakeQuantized, check_params
from fq.policies import table
from fq.primitives import dequantize
from fq.qtensor import QTensor
from fq.roles import view_key

Params = Mapping[str, Any]


def sqnr(a: Any, b: Any) -> float:
    """Return the signal-to-quantization-noise ratio 20·log10(‖a‖/‖a − b‖) of b against a, in dB.

    Raises:
        ValueError: shapes differ.

    Example:
        >>> import fq, torch
        >>> fq.sqnr(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5]))
        20.0
    """
    x, y = _wide(a), _wide(b)
    if x.shape != y.shape:
        raise ValueError(f"sqnr: shapes {tuple(x.shape)} and {tuple(y.shape)} differ")
    noise = (x - y).norm()
    return math.inf if noise == 0 else float(20 * torch.log10(x.norm() / noise))


def _wide(value: Any) -> Tensor:
    """Return what a leaf or a tensor stands for, in float64."""
    if isinstance(value, QTensor):
        value = dequantize(value, torch.float32)
    elif isinstance(value, FakeQuantized):
        value = value.weight
    if not isinstance(value, Tensor) or value.is_complex():
        got = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"sqnr: expected real tensors or QTensors, got {got}")
    return value.detach().to(torch.float64)


@dataclass(frozen=True)
class Row:
    """One parameter in a Summary; `sqnr` and `max_error` are against the reference, if one was given."""

    name: str
    shape: tuple[int, ...]
    layout: str
    nbytes: int
    bits: float
    sqnr: float | None = None
    max_error: float | None = None


@dataclass(frozen=True)
class Summary:
    """What a parameter dict holds: bytes, bits per weight, error against a reference; prints as a table."""

    rows: tuple[Row, ...]

    @property
    def nbytes(self) -> int:
        return sum(r.nbytes for r in self.rows)

    @property
    def bits(self) -> float:
        """Bits per weight over the whole dict."""
        count = sum(r.nbytes * 8 / r.bits for r in self.rows if r.bits)
        return self.nbytes * 8 / count if count else 0.0

    def __str__(self) -> str:
        def number(value: float | None, form: str) -> str:
            return "" if value is None else format(value, form)

        body = [
            (
                r.name,
                "×".join(map(str, r.shape)),
                r.layout,
                f"{r.nbytes / 1e6:.3f}",
                f"{r.bits:.2f}",
                number(r.sqnr, ".2f"),
                number(r.max_error, ".3g"),
            )
            for r in self.rows
        ]
        head = ("name", "shape", "layout", "MB", "bits", "SQNR dB", "max error")
        return table([head, *body, ("total", "", "", f"{self.nbytes / 1e6:.3f}", f"{self.bits:.2f}", "", "")])

    __repr__ = __str__


def summary(params: Params, reference: Params | None = None) -> Summary:
    """Summarize a parameter dict: bytes and bits per weight, and the error against a reference dict.

    A tied leaf is counted once, at its first name.

    Raises:
        KeyError: the reference lacks a quantized name.

    Example:
        >>> import fq, torch
        >>> w = {"w": torch.randn(8, 64)}
        >>> fq.summary(fq.quantize_params(w, fq.int8()), w).rows[0].bits
        8.5
    """
    check_params("summary", params, values=True)
    rows, seen = [], set()
    for name, value in params.items():
        tensors = pytree.tree_leaves(value)
        nbytes = sum(t.nbytes for t in tensors if view_key(t) not in seen)
        shared = bool(tensors) and all(view_key(t) in seen for t in tensors)
        seen.update(map(view_key, tensors))
        shape = tuple(value.shape)
        layout = value.layout.key if isinstance(value, QTensor) else str(value.dtype).removeprefix("torch.")
        ratio = error = None
        if reference is not None and isinstance(value, QTensor) and not value.is_meta:
            if name not in reference:
                raise KeyError(f"summary: the reference has no {name!r}")
            wide = dequantize(value, torch.float32)
            ratio = sqnr(reference[name], wide)
            difference = reference[name].detach().to(torch.float32) - wide
            error = float(difference.abs().max()) if wide.numel() else 0.0
        size, bits = (0, 0.0) if shared else (nbytes, nbytes * 8 / max(1, torch.Size(shape).numel()))
        rows.append(Row(name, shape, layout, size, bits, ratio, error))
    return Summary(tuple(rows))
