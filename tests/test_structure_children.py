"""Structural operations on QTensors with more children than scales, and on prepacked ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.utils._pytree as pytree
from laws import along, holds, quantized, same, with_children

import fq

AXES = (-1, -2)
TEXTS = ("int8", "int8:block4x8", "int4:g8", "nvfp4")
STORED = ((1, 13), (5, 13), (2, 4, 16), (2, 3, 4, 16))


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("text", TEXTS)
def test_dequantize_moves_columns_as_perm_says_and_divides_by_the_pre_scale(text, axis):
    for stored in ((13,), *STORED):
        q = with_children(text, *along(axis, *stored), axis=-1 if len(stored) == 1 else axis)
        rows, k = (1, *stored)[-2:]
        want = fq.dequantize(replace(q, perm=None, pre_scale=None, input_scale=None))
        got = fq.dequantize(q)
        want, got = ((t if q.layout.axis == -1 else t.mT).reshape(-1, rows, k) for t in (want, got))
        perms, scales = q.perm.reshape(-1, k), q.pre_scale.reshape(-1, k)
        for e in range(len(want)):
            for j in range(k):
                column = int(perms[e, j])
                same(got[e, :, column], want[e, :, j] / scales[e, column])


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("text", TEXTS)
def test_every_child_follows_its_matrix_and_its_columns(text, axis):
    rows = -2 if axis == -1 else -1
    for stored in STORED:
        q = with_children(text, *along(axis, *stored), axis=axis)
        single = len(stored) == 2
        for f in (
            lambda t: t.mT,
            lambda t: t.clone(),
            lambda t: t.unsqueeze(0),
            lambda t: t.unsqueeze(0).squeeze(0),
            lambda t: t.expand(3, *t.shape),
            lambda t: torch.stack([t, t]),
            lambda t: t.narrow(rows, 0, 1),
            lambda t: t[..., 0:3, :] if rows == -2 else t[..., 0:3],
        ):
            assert holds(f, q)
        # a row of a stack is a row of a matrix of rows, each with its own columns: that is no QTensor
        assert holds(lambda t: t.unbind(rows), q) == single
        if q.layout.block[0] == 1:
            index = torch.tensor([0, -1, 0])
            assert holds(lambda t, i=index: t[..., i, :] if rows == -2 else t[..., i], q)
        if not single:
            index = torch.tensor([[1, 1, 0]])
            for f in (
                lambda t: t[1],
                lambda t, i=index: t[i],
                lambda t: torch.cat([t, t[:1]]),
                lambda t: t.flatten(0, -3).unflatten(0, (1, -1)),
            ):
                assert holds(f, q)
        if len(stored) == 4:
            assert holds(lambda t: t.transpose(0, 1), q)
    vector = with_children(text, 13)
    assert holds(lambda t: t.unsqueeze(0), vector)
    assert holds(lambda t: t.clone(), vector)


@pytest.mark.parametrize("axis", AXES)
def test_a_pre_scale_is_cut_and_joined_with_its_columns(axis):
    q = replace(with_children("int4:g8", *along(axis, 2, 12, 16), axis=axis), perm=None, input_scale=None)
    rows, cols = (1, 2) if axis == -1 else (2, 1)
    assert holds(lambda t: t.narrow(cols, 8, 5), q)
    assert holds(lambda t: t.chunk(2, cols), q)
    assert holds(lambda t: torch.cat([t, t], cols), q)
    assert holds(lambda t: t[1].unflatten(0, (3, 4) if axis == -1 else (2, 8)), q)
    assert holds(lambda t: t.flatten(0, 1), q) == (axis == -2)
    assert not holds(lambda t: torch.cat([t, t], rows), q)


@pytest.mark.parametrize("axis", AXES)
def test_a_child_that_cannot_follow_is_named(axis):
    q = with_children("int4:g8", *along(axis, 2, 4, 16), axis=axis)
    rows, cols = (1, 2) if axis == -1 else (2, 1)
    refused = {
        "perm": (
            lambda t: t.narrow(cols, 8, 8),
            lambda t: torch.cat([t, t], cols),
            lambda t: t.flatten(0, 1),
        ),
        "input_scale": (lambda t: torch.cat([t, t], rows), lambda t: torch.cat([t, t], cols)),
        "pre_scale": (lambda t: torch.cat([t, t], rows), lambda t: t.unbind(rows)),
    }
    for name, functions in refused.items():
        alone = replace(q, **{n: None for n in refused if n != name})
        for f in functions:
            with pytest.raises(ValueError, match=f"q carries a {name}, which this cannot rearrange"):
                f(alone)
    if axis == -1:
        with pytest.raises(ValueError, match="blocks one row high; input_scale has -1"):
            q.transpose(0, 1)


# --- prepacked ---


def prepacked(*lead: int, text: str = "int4:g32") -> fq.QTensor:
    q = quantized(text, *lead, 16, 64)
    p = fq.prepack(q, backend="aten")
    assert p.layout.storage != "canonical"
    return p


@pytest.mark.parametrize("text", ["int4:g32", "int4:g32:sym"])
def test_canonical_of_prepacked_is_byte_equal(text):
    for lead in ((), (3,), (2, 3)):
        q = quantized(text, *lead, 32, 128)
        back = fq.canonical(fq.prepack(q, backend="aten"))
        assert back.layout == q.layout
        for a, b in zip(pytree.tree_leaves(back), pytree.tree_leaves(q), strict=True):
            assert a.dtype == b.dtype
            assert torch.equal(a, b)


PREPACKED_TAKES = {
    "index": lambda t: t[1],
    "slice": lambda t: t[1:],
    "gather": lambda t: t[torch.tensor([2, 0, 2])],
    "mask": lambda t: t[torch.tensor([True, False, True])],
    "new dimension": lambda t: t[None],
    "unsqueeze": lambda t: t.unsqueeze(1),
    "squeeze": lambda t: t[:1].squeeze(0),
    "unflatten": lambda t: t.unflatten(0, (3, 1)).transpose(0, 1),
    "reshape": lambda t: t.unflatten(0, (1, 3)).reshape(3, 16, 64),
    "expand": lambda t: t.expand(2, 3, 16, 64),
    "stack": lambda t: torch.stack([t, t], 1),
    "cat": lambda t: torch.cat([t, t]),
    "split": lambda t: t.split([1, 2]),
    "unbind": lambda t: t.unbind(),
    "transpose": lambda t: t.mT,
    "clone": lambda t: t.clone(),
}
PREPACKED_REFUSES = {
    "rows": lambda t: t[:, 0:8],
    "columns": lambda t: t[..., 32:],
    "one row": lambda t: t[1, 3],
    "gathered rows": lambda t: t[:, torch.tensor([1, 0])],
    "joined rows": lambda t: torch.cat([t, t], 1),
    "joined columns": lambda t: torch.cat([t, t], 2),
    "merged rows": lambda t: t.flatten(0, 1),
    "split rows": lambda t: t.unflatten(1, (2, 8)),
    "exchanged rows": lambda t: t.transpose(0, 1),
    "refined blocks": lambda t: torch.stack([t, prepacked(3, text="int4:g64")]),
}


@pytest.mark.parametrize("name", PREPACKED_TAKES)
def test_prepacked_batches_over_leading_dimensions(name):
    f, p = PREPACKED_TAKES[name], prepacked(3)
    got, want = f(p), f(fq.dequantize(p))
    for one, dense in zip(*(t if isinstance(t, tuple) else (t,) for t in (got, want)), strict=True):
        assert one.shape == dense.shape
        assert one.layout.storage == p.layout.storage
        same(fq.dequantize(one), dense)


@pytest.mark.parametrize("name", PREPACKED_REFUSES)
def test_prepacked_refuses_the_rest_and_names_canonical(name):
    with pytest.raises(ValueError, match=r"only leading dimensions .* fq\.canonical"):
        PREPACKED_REFUSES[name](prepacked(3))
