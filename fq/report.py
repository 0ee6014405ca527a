"""How a QTensor looks in a notebook: a small table that touches no more than a sample of it."""

from __future__ import annotations

from html import escape
from typing import Any

import torch
from torch import Tensor

from fq.layouts import scale as scales
from fq.qtensor import QTensor

SAMPLE = 4096  # scales read, at most


def qtensor_html(q: QTensor) -> str:
    """Return a QTensor as an HTML table: format, logical shape, block, bytes, range of the scales.

    Legible on light and dark backgrounds, and never raises: what cannot be read (meta, fake, mapped and
    traced values) is left out.
    """
    size = max(1, q.numel())
    rows = [
        ("format", q.layout.key),
        ("shape", " × ".join(map(str, q.shape))),
        ("stands for", str(q.dtype).removeprefix("torch.")),
        ("block", " × ".join("all" if n == -1 else str(n) for n in q.layout.block)),
        ("bytes", f"{q.nbytes:,} ({q.nbytes * 8 / size:.2f} bits per element)"),
        ("device", str(q.device)),
    ]
    found = _scale_range(q)
    if found is not None:
        rows.append(("scales", f"{found[0]:.3g} to {found[1]:.3g}"))
    cells = "".join(
        f"<tr><th align='left'>{escape(name)}</th><td align='left'>{escape(text)}</td></tr>"
        for name, text in rows
    )
    return f"<table style='border-collapse:collapse'><caption>QTensor</caption>{cells}</table>"


def _scale_range(q: QTensor) -> tuple[float, float] | None:
    """Return the least and largest of the first scales, where there are numbers to read."""
    kept: Any = q.scale.scale if isinstance(q.scale, QTensor) else q.scale
    kind = q.layout.scale.scale if isinstance(q.scale, QTensor) else q.layout.scale  # type: ignore[union-attr]
    if not _is_concrete(kept) or kept.numel() == 0 or not isinstance(kind, torch.dtype | str):
        return None
    sample = scales.load(kept.detach().flatten()[:SAMPLE], kind)
    return float(sample.min()), float(sample.max())


def _is_concrete(t: Any) -> bool:
    if type(t) is not Tensor or t.is_meta:
        return False
    return not torch._C._functorch.is_functorch_wrapped_tensor(t)  # type: ignore[attr-defined]
