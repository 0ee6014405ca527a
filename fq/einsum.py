"""einsum and tensordot with one quantized operand, as a matmul between permutations of the other."""

from __future__ import annotations

from math import prod
from string import ascii_letters
from typing import Any

import torch
from torch import Tensor

from fq import products
from fq.dynamo import cached_constant
from fq.errors import UnsupportedOp
from fq.qtensor import QTensor


def einsum(equation: str, *operands: Any) -> Tensor:
    """Contract a float and a quantized operand: torch.einsum where it is a matmul after permuting x.

    One of the last two dimensions of q is contracted, the other stands in the result. Each leading
    dimension of q may be a batch dimension, stand in the result alone, or be contracted too (summed in
    float32). q is never permuted, so that nothing is copied.

    Raises:
        UnsupportedOp: another pattern, or not exactly two operands, one of them quantized.
        ValueError: the equation does not fit the operands.

    Example:
        >>> import fq, torch
        >>> q = fq.quantize(torch.full((2, 3, 4), 127.5), fq.int8())
        >>> torch.einsum("bk,enk->ebn", torch.ones(5, 4), q).shape
        torch.Size([2, 5, 3])
    """
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = tuple(operands[0])
    if len(operands) != 2 or sum(isinstance(t, QTensor) for t in operands) != 1:
        raise UnsupportedOp(f"einsum {equation!r}: expected two operands, one of them quantized")
    terms, result = parse_equation(equation, operands[0].ndim, operands[1].ndim)
    at = 0 if isinstance(operands[0], QTensor) else 1
    return _contract(equation, operands[1 - at], terms[1 - at], operands[at], terms[at], result)


def tensordot(a: Any, b: Any, dims: Any = 2) -> Tensor:
    """Contract dimensions of a float and a quantized operand, as torch.tensordot; see `einsum`.

    Raises:
        UnsupportedOp: a pattern that is no matmul. ValueError: the dimensions do not fit.

    Example:
        >>> import fq, torch
        >>> q = fq.quantize(torch.full((3, 4), 127.5), fq.int8())
        >>> torch.tensordot(torch.ones(5, 4), q, ([1], [1])).shape
        torch.Size([5, 3])
    """
    if isinstance(dims, Tensor):
        dims = dims.tolist()
    if isinstance(dims, int):
        pairs = (list(range(a.ndim - dims, a.ndim)), list(range(dims)))
    else:
        pairs = ([d % a.ndim for d in dims[0]], [d % b.ndim for d in dims[1]])
    if len(pairs[0]) != len(pairs[1]):
        raise ValueError(f"tensordot: {len(pairs[0])} dimensions of a against {len(pairs[1])} of b")
    left = list(ascii_letters[: a.ndim])
    right = list(ascii_letters[a.ndim : a.ndim + b.ndim])
    for i, j in zip(*pairs, strict=True):
        right[j] = left[i]
    kept = [x for i, x in enumerate(left) if i not in pairs[0]]
    kept += [x for j, x in enumerate(right) if j not in pairs[1]]
    return einsum(f"{''.join(left)},{''.join(right)}->{''.join(kept)}", a, b)


@cached_constant
def parse_equation(equation: str, *ndims: int) -> tuple[tuple[str, ...], str]:
    """Return the letters of both operands and of the result, an ellipsis spelled out."""
    sides, arrow, result = equation.replace(" ", "").partition("->")
    terms = sides.split(",")
    if len(terms) != 2:
        raise ValueError(f"einsum {equation!r}: it names {len(terms)} operands, 2 were given")
    spare = [c for c in ascii_letters if c not in equation]
    widths = [ndim - len(term.replace("...", "")) for ndim, term in zip(ndims, terms, strict=True)]
    dots = max([w for w, term in zip(widths, terms, strict=True) if "..." in term], default=0)
    full = "".join(spare[:dots])
    for i, width in enumerate(widths):
        if width < 0 or (width > 0 and "..." not in terms[i]):
            raise ValueError(
                f"einsum {equation!r}: {terms[i]!r} names {len(terms[i].replace('...', ''))} dimensions of "
                f"{ndims[i]}"
            )
        terms[i] = terms[i].replace("...", full[dots - width :])
    if not arrow:  # the letters that occur once, in order
        both = terms[0] + terms[1]
        result = "..." + "".join(sorted(c for c in set(both) - set(full) if both.count(c) == 1))
    result = result.replace("...", full)
    if len(set(result)) != len(result) or not set(result) <= set(terms[0] + terms[1]):
        raise ValueError(f"einsum {equation!r}: the result must name letters of the operands, each once")
    return tuple(terms), result


def _contract(equation: str, x: Tensor, xs: str, q: QTensor, qs: str, result: str) -> Tensor:
    def unsupported(why: str) -> UnsupportedOp:
        return UnsupportedOp(f"einsum {equation!r}: {why}; fq.dequantize the quantized operand first")

    if len(set(xs)) != len(xs) or len(set(qs)) != len(qs):
        raise unsupported("a letter stands twice in one operand")
    if q.ndim < 2 or len(q.inner) != 1:
        raise unsupported("the quantized operand is no matrix or batch of matrices")
    if set(xs) - set(qs) - set(result):
        raise unsupported("a dimension of one operand is summed alone")
    *lead, row, col = qs
    inner = [c for c in (row, col) if c in xs and c not in result]
    if len(inner) != 1:
        raise unsupported("of the last two dimensions of the quantized operand, one must be contracted")
    (k,) = inner
    n = col if k == row else row
    if n in xs or n not in result:
        raise unsupported(f"dimension {n!r} must stand in the quantized operand and the result alone")
    summed = [c for c in lead if c not in result]
    if any(c not in xs for c in summed):
        raise unsupported("a dimension of one operand is summed alone")
    sizes = dict(zip(qs, q.shape, strict=True))
    for c, size in zip(xs, x.shape, strict=True):
        if sizes.setdefault(c, size) != size:
            raise ValueError(f"einsum {equation!r}: {c!r} is {size} in one operand, {sizes[c]} in the other")
    rows = [c for c in xs if c not in qs]
    order = [xs.index(c) for c in (*(c for c in lead if c in xs), *rows, k)]
    flat = x.permute(order).reshape(
        *(sizes[c] if c in xs else 1 for c in lead), prod([sizes[c] for c in rows]), sizes[k]
    )
    if summed:
        flat = flat.to(torch.float32)
    y = products.matmul(flat, q if k == row else q.mT)
    y = y.reshape(*(sizes[c] for c in lead), *(sizes[c] for c in rows), sizes[n])
    letters = [*lead, *rows, n]
    if summed:
        y = y.sum([letters.index(c) for c in summed]).to(x.dtype)
        letters = [c for c in letters if c not in summed]
    return y.permute([letters.index(c) for c in result])
