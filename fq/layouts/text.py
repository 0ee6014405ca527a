"""The text form of layouts, `ELEMENT[:OPTION]*[@ACT]`: written and parsed, exactly inverse."""

from __future__ import annotations

import re
from typing import Any

import torch

from fq.layouts import scale as scales
from fq.layouts.element import BINARY, E2M1, E4M3, E5M2, NF4, Element, Float, Int, UInt, element
from fq.layouts.storage import CANONICAL, STORAGES

# What a head stands for: element, block, scale, zero point. A nested scale is spelled as text.
_HEADS: dict[str, tuple[Element, tuple[int, int], Any, str | None]] = {
    "int8": (Int(8), (1, -1), torch.float32, None),
    "int4": (Int(4), (1, 128), torch.float32, "float"),
    **{f"int{b}": (Int(b), (1, 128), torch.float32, None) for b in (1, 2, 3, 5, 6, 7)},
    **{f"uint{b}": (UInt(b), (1, 128), torch.float32, "int") for b in range(1, 9)},
    "fp8": (E4M3, (1, -1), torch.float32, None),
    "e5m2": (E5M2, (1, -1), torch.float32, None),
    "mxfp4": (E2M1, (1, 32), scales.E8M0, None),
    "mxfp6": (Float(3, 2), (1, 32), scales.E8M0, None),
    "mxfp8": (E4M3, (1, 32), scales.E8M0, None),
    "nvfp4": (E2M1, (1, 16), "fp8:tensor", None),
    "nf4": (NF4, (1, 64), torch.float32, None),
    "binary": (BINARY, (1, 128), torch.float32, None),
}
_ZEROS = {"sym": None, "asym": "float", "int-zp": "int"}


def _head(name: str) -> tuple[Element, tuple[int, int], Any, str | None]:
    return _HEADS[name] if name in _HEADS else (element(name), (1, -1), torch.float32, None)


def write(layout: Any) -> str:
    """Return the shortest text of a layout, the first by head where two are as short."""
    names = [n for n, h in _HEADS.items() if h[0] == layout.element] or [layout.element.name]
    options = min((_options(layout, name) for name in names), key=len)
    text = ":".join(options)
    return text if layout.act is None else f"{text}@{layout.act.key}"


def _options(layout: Any, name: str) -> list[str]:
    _, block, scale, zero_point = _head(name)
    out = [name]
    if layout.block != block:
        rows, cols = layout.block
        if (rows, cols) == (-1, -1):
            out.append("tensor")
        elif rows == 1:
            out.append("row" if cols == -1 else f"g{cols}")
        else:
            out.append(f"block{rows}x{cols}")
    if layout.zero_point != zero_point:
        plain = {None: "sym", "float": "asym", "int": "int-zp"}
        out.append(plain.get(layout.zero_point) or f"zp=({layout.zero_point.key})")
    nested_scale = getattr(layout.scale, "key", None)
    if nested_scale is not None and nested_scale != scale:
        out.append(f"scale=({nested_scale})")
    elif nested_scale is None and layout.scale != scale:
        out.append(f"scale={scales.dtype_name(layout.scale)}")
    if layout.axis != -1:
        out.append("axis-2")
    if layout.rule != scales.default_rule(layout.element, layout.scale, layout.zero_point):
        out.append(layout.rule)
    if layout.storage != CANONICAL:
        out.append(layout.storage)
    return out


def _split(text: str, mark: str) -> list[str]:
    """Split at `mark` outside parentheses."""
    parts, depth, start = [], 0, 0
    for at, char in enumerate(text):
        depth += (char == "(") - (char == ")")
        if char == mark and depth == 0:
            parts.append(text[start:at])
            start = at + 1
    if depth:
        raise ValueError(f"layout: unbalanced parentheses in {text!r}")
    return [*parts, text[start:]]


def parse(text: str, make: Any) -> Any:
    """Return `make(element, block, scale, zero_point, axis, storage, act, rule)` of a text."""
    body, *acts = _split(text, "@")
    if len(acts) > 1:
        raise ValueError(f"layout: expected at most one '@', got {text!r}")
    name, *options = _split(body, ":")
    kind, block, scale, zero_point = _head(name)
    axis, storage, rule = -1, CANONICAL, None
    seen: set[str] = set()
    for option in options:
        part = "block"
        if match := re.fullmatch(r"g([0-9]{1,99})", option):
            block = (1, int(match[1]))
        elif option in ("row", "token"):
            block = (1, -1)
        elif option == "tensor":
            block = (-1, -1)
        elif match := re.fullmatch(r"block(-?[0-9]{1,99})x(-?[0-9]{1,99})", option):
            block = (int(match[1]), int(match[2]))
        elif option in _ZEROS:
            zero_point, part = _ZEROS[option], "zero point"
        elif match := re.fullmatch(r"scale=\((.*)\)", option):
            scale, part = match[1], "scale"
        elif match := re.fullmatch(r"zp=\((.*)\)", option):
            zero_point, part = parse(match[1], make), "zero point"
        elif option.startswith("scale="):
            scale, part = scales.dtype_of(option.removeprefix("scale=")), "scale"
        elif option == "axis-2":
            axis, part = -2, "axis"
        elif option in scales.RULES:
            rule, part = option, "rule"
        elif option in STORAGES:
            storage, part = option, "storage"
        else:
            known = ("g32", "row", "token", "tensor", "block128x128", *_ZEROS, "axis-2", "scale=DTYPE")
            names = ", ".join((*known, *scales.RULES, *STORAGES))
            raise ValueError(f"layout: unknown option {option!r} in {text!r}; known are {names}")
        if part in seen:
            raise ValueError(f"layout: {text!r} says its {part} twice")
        seen.add(part)
    if isinstance(scale, str) and scale != scales.E8M0:
        scale = parse(scale, make)
    act = parse(acts[0], make) if acts else None
    return make(kind, block, scale, zero_point, axis, storage, act, rule)
