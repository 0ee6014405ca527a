"""Inputs for all peers, and the two ways in which bytes may compare."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

NAN, INF = float("nan"), float("inf")
DTYPES = (torch.float32, torch.bfloat16)
ROWS: dict[str, Callable[[Tensor], Tensor]] = {  # from a row of normal numbers
    "zeros": torch.zeros_like,
    "minus zeros": lambda x: -torch.zeros_like(x),
    "some zeros": lambda x: torch.where(x < 0, x * 0.0, x),
    "NaN": lambda x: x.index_fill(-1, torch.tensor([5]), NAN),
    "inf": lambda x: x.index_fill(-1, torch.tensor([5]), INF),
    "-inf": lambda x: x.index_fill(-1, torch.tensor([5]), -INF),
    "subnormal": lambda x: x * 2.0**-127,
    "tiny": lambda x: x * 2.0**-100,
    "small": lambda x: x * 2.0**-20,
    "large": lambda x: x * 2.0**20,
    "huge": lambda x: (x * 2.0**125).clamp(-3e38, 3e38),
    "ties": lambda x: (
        torch.round(x * 16) / 8
    ),  # multiples of 1/8: halfway between codes, where the scale is 1
    "integers": lambda x: torch.round(x * 40),
    "constant": lambda x: torch.full_like(x, 0.7),
    "positive": torch.abs,
    "negative": lambda x: -x.abs(),
    "outlier": lambda x: x.index_fill(-1, torch.tensor([3]), -300.0),
}


def ordinary(dtype: torch.dtype = torch.float32, rows: int = 48, columns: int = 512) -> Tensor:
    """Return normal numbers, each row of another magnitude."""
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(7))
    return (x * torch.exp2(torch.arange(rows) % 12 - 6.0).unsqueeze(-1)).to(dtype)


def special(*names: str, dtype: torch.dtype = torch.float32, columns: int = 512) -> Tensor:
    """Return the named rows of ROWS."""
    x = torch.randn(columns, generator=torch.Generator().manual_seed(8))
    return torch.stack([ROWS[name](x) for name in names]).to(dtype)


def all_but(*names: str) -> tuple[str, ...]:
    """Return the names of the other special rows."""
    assert set(names) <= set(ROWS)
    return tuple(name for name in ROWS if name not in names)


def bits(x: Tensor) -> Tensor:
    """Return x as integers, every NaN as the one NaN: which of its codes it is tells nothing."""
    if not x.dtype.is_floating_point:
        return x
    if x.dtype.itemsize == 1:  # here the code is what is compared
        return x.view(torch.uint8)
    x = torch.where(torch.isnan(x), NAN, x)
    return x.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.dtype.itemsize])


def same(ours: Tensor, theirs: Tensor) -> None:
    """Assert equal shapes, dtypes and bits."""
    assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype), (
        ours.shape,
        ours.dtype,
        theirs.shape,
        theirs.dtype,
    )
    a, b = bits(ours), bits(theirs)
    wrong = (a != b).nonzero()
    first = tuple(wrong[0].tolist()) if len(wrong) else ()
    assert not len(wrong), f"{len(wrong)} of {a.numel()} differ; at {first}: {ours[first]} != {theirs[first]}"


def differ(ours: Tensor, theirs: Tensor, where: Tensor) -> None:
    """Assert equal bits but for `where`, and that each place there, row or element, has a difference."""
    assert ours.shape == theirs.shape, (ours.shape, theirs.shape)
    unequal = bits(ours) != bits(theirs)
    if where.ndim < unequal.ndim:
        unequal = unequal.flatten(where.ndim).any(-1)
    assert where.any(), "no place to differ"
    assert torch.equal(unequal, where.expand_as(unequal)), (
        f"unequal but not there: {(unequal & ~where).nonzero()[:3].tolist()}; "
        f"there but equal: {(where & ~unequal).nonzero()[:3].tolist()}"
    )


def difference(name: str) -> pytest.MarkDecorator:
    """Mark a test as the proof of a row of docs/peers.md."""
    return pytest.mark.difference(name)


def explained(ours: Tensor, theirs: Tensor, predicted: Tensor) -> None:
    """Assert that theirs is what a formula predicts, in every bit, and that ours is something else."""
    same(theirs, predicted)
    assert not torch.equal(bits(ours), bits(theirs)), "no difference"
