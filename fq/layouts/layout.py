"""Layout: a static, hashable description of how numbers are stored."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fq.dynamo import cached_constant
from fq.layouts import scale as scales
from fq.layouts.block import Block
from fq.layouts.element import Codebook, Element, Float, Int, UInt, element
from fq.layouts.storage import CANONICAL, STORAGES
from fq.layouts.text import parse, write


@dataclass(frozen=True, eq=False, repr=False)
class Layout:
    """Describe how numbers are stored: element × block × scale × zero point × storage.

    Fields: `element` (Int, UInt, Float, Codebook); `block` (rows, cols) over the stored matrix, -1 for a
    whole dimension; `scale`, a dtype, "e8m0", or a Layout (the scales are themselves quantized);
    `zero_point` None, "int" (`(q - z)·s`), "float" (`q·s + z`) or a Layout; `axis` -1, or -2 when the
    logical matrix is the transpose of the stored one; `storage`, a byte order; `act`, the Layout in which
    a matmul quantizes its other operand; `rule`, how a block's scale is chosen. `key` is the text form,
    made once: equal keys are equal layouts, and traced code decides by it.

    Raises:
        TypeError: a field is of the wrong kind.
        ValueError: the fields contradict each other.

    Example:
        >>> import fq
        >>> fq.int4(group_size=64).key
        'int4:g64'
        >>> fq.layout("int8:row@int8:token") == fq.int8(act=fq.int8())
        True
    """

    element: Element
    block: Block
    scale: torch.dtype | str | Layout = torch.float32
    zero_point: str | Layout | None = None
    axis: int = -1
    storage: str = CANONICAL
    act: Layout | None = None
    rule: str | None = None
    key: str = field(init=False)

    def __post_init__(self) -> None:
        if not isinstance(self.element, Int | UInt | Float | Codebook):
            raise TypeError(f"Layout: element must be Int, UInt, Float or Codebook, got {self.element!r}")
        if element(self.element.name) != self.element:
            raise ValueError(f"Layout: the label of {self.element!r} names another element")
        _set(self, "block", check_block(self.block))
        if not isinstance(self.scale, Layout):
            _set(self, "scale", scales.dtype_of(self.scale))
        for name, kind in (("zero_point", str | Layout | None), ("storage", str), ("rule", str | None)):
            _check_kind(name, getattr(self, name), kind)
        if not (isinstance(self.zero_point, Layout) or self.zero_point in (None, "int", "float")):
            raise ValueError(
                f"Layout: zero_point must be None, 'int', 'float' or a Layout, got {self.zero_point!r}"
            )
        if _check_kind("axis", self.axis, int) not in (-1, -2):
            raise ValueError(f"Layout: axis must be -1 or -2, got {self.axis!r}")
        if self.storage not in STORAGES:
            raise ValueError(f"Layout: unknown storage {self.storage!r}; known are {', '.join(STORAGES)}")
        if not (self.act is None or isinstance(self.act, Layout)):
            raise TypeError(f"Layout: act must be a Layout or None, got {self.act!r}")
        for part in (self.scale, self.zero_point, self.act):
            if isinstance(part, Layout) and (
                part.act is not None or part.axis != -1 or part.storage != CANONICAL
            ):
                raise ValueError(
                    f"Layout: a nested layout is canonical, with axis -1 and no act, got {part.key}"
                )
        for part in (self.scale, self.zero_point):
            if isinstance(part, Layout) and part.rule in scales.SEARCH_RULES:
                raise ValueError(
                    f"Layout: quantized scales and zero points take no searched rule, got {part.key}"
                )
        if isinstance(self.scale, Layout) and self.scale.zero_point is not None:
            raise ValueError(f"Layout: quantized scales have no zero point, got {self.scale.key}; use ':sym'")
        if scales.least(self.scale) < 2.0**-149:  # the smallest float32 number
            raise ValueError(
                f"Layout: quantized scales {self.scale} can become zero, and blocks of zeros NaN; use fewer "
                "levels, or an element of less range"
            )
        zero = self.zero_point
        if isinstance(zero, Layout) and not zero.element.signed and self._misfits(zero):
            raise ValueError(
                "Layout: an unsigned quantized zero point goes with an unsigned element, whose zeros have "
                f"one sign, and with the signed scale of rule 'absmax_full'; got {zero.key}"
            )
        if self.rule is None:
            _set(self, "rule", scales.default_rule(self.element, self.scale, self.zero_point))
        scales.check_rule(str(self.rule), self.element, self.scale, self.zero_point)
        _set(self, "key", write(self))

    def _misfits(self, zero: Layout) -> bool:
        """Whether zero points of this element can have the sign that unsigned codes lack."""
        return self.element.signed or zero.rule != "absmax_full"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __str__(self) -> str:
        return self.key

    def __repr__(self) -> str:
        return f"fq.layout({self.key!r})"

    def __reduce__(self) -> Any:
        return layout, (self.key,)

    def __copy__(self) -> Layout:
        return self

    def __deepcopy__(self, memo: Any) -> Layout:
        return self

    @property
    def packed(self) -> bool:
        """Whether several codes share a byte."""
        return self.element.bits < 8

    def to_json(self) -> dict[str, Any]:
        """Return the layout as a JSON object, one entry per field; `from_json` reads it back.

        Example:
            >>> import fq
            >>> fq.int8().to_json()["block"]
            [1, -1]
        """

        def part(value: Any) -> Any:
            return value.to_json() if isinstance(value, Layout) else value

        scale = self.scale if isinstance(self.scale, Layout) else scales.dtype_name(self.scale)
        return {
            "element": self.element.name,
            "block": list(self.block),
            "scale": part(scale),
            "zero_point": part(self.zero_point),
            "axis": self.axis,
            "storage": self.storage,
            "act": part(self.act),
            "rule": self.rule,
        }

    @staticmethod
    def from_json(value: dict[str, Any]) -> Layout:
        """Return the layout that a JSON object describes.

        Raises:
            ValueError: a field is missing, unknown or wrong. TypeError: it is of the wrong kind.

        Example:
            >>> import fq
            >>> fq.Layout.from_json(fq.nvfp4().to_json()) == fq.nvfp4()
            True
        """
        known = {"element", "block", "scale", "zero_point", "axis", "storage", "act", "rule"}
        if not isinstance(value, dict) or not {"element", "block"} <= set(value) <= known:
            raise ValueError(
                f"Layout.from_json: expected an object with fields {sorted(known)}, got {value!r}"
            )
        parts = {k: Layout.from_json(v) if isinstance(v, dict) else v for k, v in value.items()}
        return Layout(**{**parts, "element": element(value["element"])})


def _set(target: Layout, name: str, value: object) -> None:
    object.__setattr__(target, name, value)


def _check_kind(name: str, value: Any, kind: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, kind):
        wanted = getattr(kind, "__name__", None) or str(kind).replace("fq.layouts.layout.", "")
        raise TypeError(f"Layout: {name} must be of type {wanted}, got {value!r}")
    return value


def check_block(block: Any) -> Block:
    """Return a (rows, cols) pair of sizes that are -1 or at least 1."""
    if not (isinstance(block, tuple | list) and len(block) == 2):
        raise TypeError(f"block: expected (rows, cols), got {block!r}")
    return check_size("block", block[0]), check_size("block", block[1])


def check_size(name: str, size: Any) -> int:
    """Return a block size: an int, -1 or at least 1."""
    if isinstance(size, bool) or not isinstance(size, int):
        raise TypeError(f"{name}: expected an int, got {size!r}")
    if size != -1 and not 1 <= size < 1 << 31:
        raise ValueError(f"{name}: expected -1 (the whole dimension) or 1 to 2**31 - 1, got {size}")
    return size


def check_flag(name: str, flag: Any) -> bool:
    """Return a switch: True or False, and nothing that is as good as one of them."""
    if not isinstance(flag, bool):
        raise TypeError(f"{name}: expected True or False, got {flag!r}")
    return flag


@cached_constant
def layout(text: str) -> Layout:
    """Return the layout that `text` spells: `ELEMENT[:OPTION]*[@ACT]`, the form of `str(layout)`.

    ELEMENT: int1..8, uint1..8, fp8, e5m2, mxfp4, mxfp6, mxfp8, nvfp4, nf4, binary, or an element's own name.
    OPTION: g32 (group), row, token, tensor, block128x128, sym, asym, int-zp, axis-2, scale=DTYPE,
    scale=(LAYOUT), zp=(LAYOUT), a rule, a storage. ACT: the layout of the other operand.

    Raises:
        ValueError: the text does not parse.

    Example:
        >>> import fq
        >>> fq.layout("int4:g128:sym").zero_point is None
        True
    """
    if not isinstance(text, str):
        raise TypeError(f"layout: expected text such as 'int4:g128', got {text!r}")
    try:
        return parse(text, Layout)
    except RecursionError:
        raise ValueError(f"layout: {text[:40]!r}... is nested too deeply") from None


@cached_constant
def stored_layout(key: str, whole_rows: bool, whole_cols: bool) -> Layout:
    """Return how a tensor quantized with layout `key` is stored: the rule dropped, covering blocks as -1."""
    full = layout(key)
    rows, cols = full.block
    block = (-1 if whole_rows else rows, -1 if whole_cols else cols)
    return replace(full, block=block, rule=None)


@cached_constant
def changed(key: str, **fields: Any) -> Layout:
    """Return layout `key` with other fields, by key so that it can be traced."""
    return replace(layout(key), **fields)
