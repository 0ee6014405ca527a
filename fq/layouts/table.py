"""Tables made from the elements; `python -m fq.layouts.table FILE` renews those in a file."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path

import torch

from fq.layouts import scale as scales
from fq.layouts.element import Codebook, Float, Int, UInt, element

FLOATS = (
    *("e2m1", "e3m0", "e2m3", "e3m2", "e4m3", "e5m2", "e3m4", "ue4m3", "ue5m3"),
    *("e4m3fnuz", "e5m2fnuz", "e4m3fnuzb11", "e4m3ieee", "e3m4ieee"),
)
OTHERS = ("int8", "int4", "int2", "uint8", "uint4", "nf4", "binary")
_NAN = {
    "finite": "none",
    "fn": "all ones",
    "ieee": "exponent all ones, mantissa not 0",
    "fnuz": "minus zero",
}


def float_table(names: Iterable[str] = FLOATS) -> str:
    """Return a Markdown table of float elements: bits, range, special values, as ml_dtypes shows its own.

    Its last row is e8m0. Numbers are exact.

    Raises:
        ValueError: a name is no float element.

    Example:
        >>> from fq.layouts.table import float_table
        >>> print(float_table(["e2m1"]).splitlines()[2])
        | `e2m1` | 4 | `SEEM` | 1 | 6 | 1 | 0.5 | 0.5 | none | none |
    """
    rows = []
    for name in names:
        found = element(name)
        if not isinstance(found, Float):
            raise ValueError(f"float_table: {name!r} is no float element")
        numbers = (found.max, found.smallest_normal, found.smallest, found.eps)
        rows.append(
            (
                *(f"`{found.name}`", found.bits, f"`{found.bit_pattern}`", found.bias),
                *(_number(n) for n in numbers),
                _NAN[str(found.special)],
                "exponent all ones, mantissa 0" if found.has_inf else "none",
            )
        )
    rows.append(_e8m0())
    head = ("element", "bits", "pattern", "bias", "max", "smallest normal", "smallest", "eps", "NaN", "inf")
    return _markdown(head, rows)


def code_table(names: Iterable[str] = OTHERS) -> str:
    """Return a Markdown table of integer elements and codebooks.

    Raises:
        ValueError: a name is a float element.

    Example:
        >>> from fq.layouts.table import code_table
        >>> print(code_table(["int4"]).splitlines()[2])
        | `int4` | 4 | two's complement | -8 | 7 |
    """
    rows = []
    for name in names:
        found = element(name)
        if isinstance(found, Float):
            raise ValueError(f"code_table: {name!r} is a float element")
        kind = {Int: "two's complement", UInt: "plain binary"}.get(type(found), "index into ascending values")
        high = found.values[-1] if isinstance(found, Codebook) else found.max
        rows.append((f"`{found.name}`", found.bits, kind, f"{found.min:g}", f"{high:g}"))
    return _markdown(("element", "bits", "codes", "min", "max"), rows)


def renewed(text: str) -> str:
    """Return `text` with the tables between `<!-- NAME -->` and `<!-- end -->` made anew."""
    for name, made in (("floats", float_table()), ("codes", code_table())):
        text = re.sub(rf"(<!-- {name} -->\n).*?(<!-- end -->)", rf"\g<1>{made}\n\g<2>", text, flags=re.DOTALL)
    return text


def _e8m0() -> tuple[object, ...]:
    """The row of e8m0, which is a scale and no element: a power of two, its exponent alone."""
    values = scales.load(torch.arange(256, dtype=torch.uint8), scales.E8M0)
    finite = values[torch.isfinite(values)]
    bias = int((values == 1).nonzero().item())
    top, low = finite.max().item(), finite.min().item()
    return (
        "e8m0 (a scale)",
        8,
        "`EEEEEEEE`",
        bias,
        _number(top),
        _number(low),
        _number(low),
        "1",
        "all ones",
        "none",
    )


def _number(value: float) -> str:
    """Write a number exactly, as a power of two where it is a small one."""
    mantissa, exponent = value.hex().split("p")
    if mantissa == "0x1.0000000000000" and not -4 < int(exponent) < 24:
        return f"2^{int(exponent)}"
    return f"{value:.17g}"


def _markdown(head: tuple[str, ...], rows: list[tuple[object, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(str(cell) for cell in line)} |" for line in lines)


if __name__ == "__main__":
    file = Path(sys.argv[1])
    file.write_text(renewed(file.read_text(encoding="utf-8")), encoding="utf-8")
