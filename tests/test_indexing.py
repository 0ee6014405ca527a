"""Indexing, permuting and the torch functions for them give what they give on the dense tensor."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from laws import TEXTS, along, holds, quantized, same, step

import fq

AXES = (-1, -2)
I = torch.tensor([2, 0, -1, 2])
I2 = torch.tensor([[1, 0, -1], [2, 2, 1]])
NONE = torch.empty(0, dtype=torch.int64)
NONE2 = torch.empty((0, 3), dtype=torch.int64)
ROWS_MASK = torch.tensor([True, False, True, True, False, False])

# On matrices (6, 16), packed along -1: everything that leaves the packed dimension whole.
ON_ROWS = {
    "int": lambda t: t[4],
    "negative int": lambda t: t[-6],
    "numpy int": lambda t: t[np.int64(3)],
    "tensor int": lambda t: t[torch.tensor(-2)],
    "all": lambda t: t[:],
    "ellipsis": lambda t: t[...],
    "ellipsis first": lambda t: t[..., 1, :],
    "nothing": lambda t: t[()],
    "none": lambda t: t[None],
    "none twice": lambda t: t[None, None, 3],
    "strided": lambda t: t[1::2],
    "strided past the end": lambda t: t[::5],
    "negative slice": lambda t: t[-3:-1],
    "slice past the end": lambda t: t[4:100],
    "backwards is empty": lambda t: t[4:2],
    "index": lambda t: t[I],
    "int32 index": lambda t: t[I.to(torch.int32)],
    "index of two dimensions": lambda t: t[I2],
    "index of three dimensions": lambda t: t[I2[None]],
    "list": lambda t: t[[1, -1, 1]],
    "empty index": lambda t: t[NONE],
    "empty index of two dimensions": lambda t: t[NONE2],
    "index of empty rows": lambda t: t[NONE2.mT],
    "mask": lambda t: t[ROWS_MASK],
    "list of bools": lambda t: t[[True, False, False, True, True, False]],
    "mask of nothing": lambda t: t[torch.zeros(6, dtype=torch.bool)],
    "none and index": lambda t: t[None, I],
    "none and mask": lambda t: t[None, ROWS_MASK],
    "twice: index": lambda t: t[I][1:3],
}


@TEXTS
def test_indexing_rows(text):
    q = quantized(text, 6, 16)
    for name, f in ON_ROWS.items():
        rows_shared = q.layout.block[0] > 1
        gathers = not (rows_shared and any(w in name for w in ("index", "mask", "list", "strided", "tensor")))
        slices = not (rows_shared and name == "negative slice")
        assert holds(f, q) == (gathers and slices), name


# On stacks (3, 2, 6, 16) of such matrices: leading dimensions take anything.
ON_LEAD = {
    "int": lambda t: t[2],
    "ints": lambda t: t[-1, 1],
    "ints to a row": lambda t: t[1, 0, 5],
    "row of each": lambda t: t[:, :, -1],
    "row of each, by ellipsis": lambda t: t[..., 2, :],
    "slice": lambda t: t[1:],
    "strided": lambda t: t[::2, 1:],
    "index": lambda t: t[I],
    "index of two dimensions": lambda t: t[I2],
    "index of the second": lambda t: t[:, I % 2],
    "both": lambda t: t[I, I % 2],
    "broadcast": lambda t: t[I2, torch.tensor([1, 0, 0])],
    "index and int": lambda t: t[I, 1],
    "int and index": lambda t: t[1, I % 2],
    "empty": lambda t: t[NONE],
    "empty of two dimensions": lambda t: t[NONE2],
    "mask": lambda t: t[torch.tensor([True, False, True])],
    "mask of two dimensions": lambda t: t[torch.tensor([[True, False], [False, False], [True, True]])],
    "mask of the second": lambda t: t[:, torch.tensor([False, True])],
    "none first": lambda t: t[None, 1],
    "none between": lambda t: t[1, None],
    "none before the matrix": lambda t: t[1, :, None],
    "none and index": lambda t: t[I, None],
    "separated": lambda t: t[I, None, I % 2],
}


@pytest.mark.parametrize("axis", AXES)
@TEXTS
def test_indexing_leading_dimensions(text, axis):
    q = quantized(text, *along(axis, 3, 2, 6, 16), axis=axis)
    for name, f in ON_LEAD.items():
        if axis == -2 and "row" in name:
            continue
        assert holds(f, q), name
    if axis == -2:
        assert holds(lambda t: t[..., -1], q)
        assert holds(lambda t: t[1, 0, :, 5], q)
        assert holds(lambda t: t[:, 1, :, 0:4], q)


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("text", ["int8", "int4:g8", "mxfp4", "nvfp4", "uint5:g8"])
def test_indexing_leading_dimensions_and_rows_at_once(text, axis):
    q = quantized(text, *along(axis, 3, 2, 6, 16), axis=axis)
    last = (slice(None),)
    place = (lambda i: (i, *last)) if axis == -1 else (lambda i: (*last, i))
    for rows in (2, -1, I, ROWS_MASK, slice(1, 4), slice(None, None, 2), torch.tensor(3)):
        for lead in ((1,), (slice(1, None),), (1, 0), (None, 1), (0, None)):
            index = (*lead, ..., *place(rows)) if len(lead) < 2 or None in lead else (*lead, *place(rows))
            assert holds(lambda t, i=index: t[i], q), index
    for rows in (2, slice(1, 4), slice(0, 0)):
        for lead in ((I,), (I2,), (I, I % 2), (torch.tensor([True, False, True]),)):
            index = (*lead, ..., *place(rows))
            assert holds(lambda t, i=index: t[i], q), index
    assert holds(lambda t: t[0, 1][place(I2)], q) == (axis == -1)
    assert holds(lambda t: t[:, 1, I2] if axis == -1 else t[:, 1], q)
    assert not holds(lambda t: t[(I, ..., *place(I))], q)


@TEXTS
def test_rows_that_share_a_block_are_not_gathered_but_whole_ones_are(text):
    q = quantized(text, 6, 16)
    every = step(q, -2)
    assert holds(lambda t: t[I], q) == (every == 1)
    tall = quantized("int8:tensor", 6, 16)
    assert holds(lambda t: t[I], tall)
    assert tall[I].scale.shape == (1, 1)
    assert holds(lambda t: t[::2], tall)


def test_an_index_that_cannot_be_is_said():
    q = quantized("int4:g8", 3, 6, 16)
    for index in (3, -4, (0, 6), (0, -7), (0, 0, 0, 0), (..., 0, 0, 0, 0)):
        with pytest.raises(IndexError):
            q[index]
    for index in (True, (0, False), torch.tensor(True), 1.0, "rows", torch.tensor([1.0]), object()):
        with pytest.raises(TypeError, match="index"):
            q[index]
    with pytest.raises(
        TypeError, match="int64, int32 or bool, got torch.uint8"
    ):  # torch takes bytes as a mask
        q[torch.tensor([1, 0, 1], dtype=torch.uint8)]
    with pytest.raises(IndexError, match="a mask of 5 for 6 rows"):
        q[0][torch.ones(5, dtype=torch.bool)]
    with pytest.raises(IndexError):
        q[torch.ones(2, dtype=torch.bool)]
    with pytest.raises(ValueError, match="a mask covers leading dimensions or rows; flatten them first"):
        q[torch.ones(3, 6, dtype=torch.bool)]
    with pytest.raises(ValueError, match="slice steps are positive"):
        q[0, ::-1]
    for index in (
        (..., 3),
        (..., I),
        (0, 0, 3),
        (..., slice(0, 8, 2)),
        (0, slice(None), torch.ones(16).bool()),
    ):
        with pytest.raises(ValueError, match="packed dimension"):
            q[index]
    with pytest.raises(ValueError, match="None can stand only before or between leading dimensions"):
        q[:, :, None]
    with pytest.raises((IndexError, RuntimeError)):
        q[0][torch.tensor([6])]


def test_iterating_gives_the_experts_then_the_rows():
    q = quantized("nvfp4", 3, 2, 16)
    assert len(q) == 3
    for one, want in zip(q, fq.dequantize(q), strict=True):
        same(fq.dequantize(one), want)
        for row, dense in zip(one, want, strict=True):
            same(fq.dequantize(row), dense)


def test_convolution_weights_keep_their_inner_dimensions_together():
    q = fq.quantize(torch.randn(6, 2, 3, 3), fq.layout("int4:g8:sym"), inner=3)
    for f in (lambda t: t[1:4], lambda t: t[I], lambda t: t[ROWS_MASK], lambda t: t[2], lambda t: t[None]):
        assert holds(f, q)
    assert holds(lambda t: torch.cat([t, t]), q)
    assert holds(lambda t: torch.stack([t, t]), q)
    assert holds(lambda t: t.unflatten(0, (2, 3)), q)
    assert holds(lambda t: t.unflatten(0, (2, 3)).flatten(0, 1), q)
    assert holds(lambda t: t.expand(2, 6, 2, 3, 3), q)
    for f in (lambda t: t[:, 0:1], lambda t: torch.cat([t, t], 1), lambda t: t.transpose(0, 1)):
        with pytest.raises(ValueError, match=r"packed (axis|dimension)"):
            f(q)


# --- permuting ---


@pytest.mark.parametrize("axis", AXES)
@TEXTS
def test_transposing_the_matrix_moves_no_byte(text, axis):
    for shape in ((5, 13), (2, 5, 13), (1, 2, 5, 13)):
        q = quantized(text, *shape, axis=axis)
        for f in (lambda t: t.mT, lambda t: t.transpose(-1, -2), lambda t: t.mT.mT, lambda t: t.mT[..., 0:0]):
            assert holds(f, q)
        assert q.mT.data is q.data
        assert q.mT.layout.axis == -3 - axis
    assert holds(lambda t: t.T, quantized(text, 5, 13, axis=axis))
    assert holds(torch.t, quantized(text, 13))
    with pytest.raises(ValueError, match=r"T is for matrices, got shape \(2, 5, 13\); use mT"):
        quantized(text, 2, 5, 13, axis=axis).T  # noqa: B018


@TEXTS
def test_permuting_leading_dimensions_and_rows(text):
    q = quantized(text, 2, 3, 4, 16)
    one_row_high = q.layout.block[0] == 1 and text != "nvfp4"
    for dims, allowed in {
        (0, 1, 2, 3): True,
        (1, 0, 2, 3): True,
        (1, 0, 3, 2): True,
        (0, 1, -1, -2): True,
        (2, 1, 0, 3): one_row_high,
        (1, 2, 0, 3): one_row_high,
        (0, 2, 3, 1): one_row_high,
        (3, 0, 1, 2): False,
        (0, 3, 1, 2): False,
    }.items():
        assert holds(lambda t, d=dims: t.permute(d), q) == allowed, dims
    assert holds(lambda t: t.transpose(0, 2), q) == one_row_high
    assert holds(lambda t: t.transpose(1, 1), q)
    for wrong in ((0, 1, 2), (0, 0, 2, 3)):
        with pytest.raises(ValueError, match="expected an order of 4 dimensions"):
            q.permute(wrong)
    with pytest.raises(IndexError, match="dimension 4 is out of range"):
        q.transpose(0, 4)
    if not one_row_high:
        with pytest.raises(ValueError, match=r"blocks one row high; scale has"):
            q.transpose(0, 2)


@TEXTS
def test_squeeze_and_unsqueeze(text):
    q = quantized(text, 1, 2, 1, 16)
    for f in (
        lambda t: t.squeeze(),
        lambda t: t.squeeze(0),
        lambda t: t.squeeze(-2),
        lambda t: t.squeeze((0, 2)),
        lambda t: t.squeeze(1),
        lambda t: t.unsqueeze(0),
        lambda t: t.unsqueeze(2),
        lambda t: t.unsqueeze(-5),
    ):
        assert holds(f, q)
    assert holds(lambda t: t.squeeze(-1), quantized(text, 16, 1, axis=-2))
    assert not holds(lambda t: t.squeeze(-1), quantized(text, 16, 1))
    matrix = quantized(text, 6, 16)
    assert holds(lambda t: t.unsqueeze(1), matrix)
    assert holds(lambda t: t.unsqueeze(1).squeeze(1), matrix)
    assert not holds(lambda t: t.unsqueeze(-1), matrix)
    for wrong in (3, -4):
        with pytest.raises(IndexError, match="out of range"):
            matrix.unsqueeze(wrong)
    with pytest.raises(IndexError, match="out of range"):
        matrix.squeeze(2)


# --- by torch's own functions ---

FUNCTIONS = {
    "cat": lambda t: torch.cat([t, t], 1),
    "concat": lambda t: torch.concat((t, t), dim=0),
    "concatenate": lambda t: torch.concatenate([t, t]),
    "stack": lambda t: torch.stack((t, t), dim=1),
    "transpose": lambda t: torch.transpose(t, 0, 1),
    "transpose of the matrix": lambda t: torch.transpose(t, -1, -2),
    "swapaxes": lambda t: torch.swapaxes(t, 0, 1),
    "permute": lambda t: torch.permute(t, (1, 0, 2)),
    "reshape": lambda t: torch.reshape(t, (6, 16)),
    "flatten": lambda t: torch.flatten(t, 0, 1),
    "flatten by name": lambda t: torch.flatten(t, start_dim=0, end_dim=1),
    "unflatten": lambda t: torch.unflatten(t, 1, (3, 1)),
    "squeeze": lambda t: torch.squeeze(t[:1]),
    "squeeze one": lambda t: torch.squeeze(t[:1], 0),
    "unsqueeze": lambda t: torch.unsqueeze(t, 1),
    "narrow": lambda t: torch.narrow(t, 1, 1, 2),
    "split": lambda t: torch.split(t, 2, dim=1),
    "split by sizes": lambda t: torch.split(t, [1, 2], 1),
    "chunk": lambda t: torch.chunk(t, 2, 2),
    "unbind": lambda t: torch.unbind(t, 1),
    "clone": torch.clone,
    "detach": torch.detach,
    "t": lambda t: torch.t(t[0]),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_torch_functions_take_qtensors(name):
    for text in ("int8", "int4:g8", "mxfp4", "uint4:g8"):
        assert holds(FUNCTIONS[name], quantized(text, 2, 3, 16))


def test_torch_functions_say_the_same_numbers():
    q = quantized("int4:g8", 2, 3, 16)
    assert torch.numel(q) == 96
    assert torch.is_floating_point(q)
    for f in (torch.roll, torch.flip, torch.nonzero, torch.add):
        with pytest.raises(fq.UnsupportedOp, match=r"no rule for a QTensor; register one .* fq.dequantize"):
            f(q, 1) if f in (torch.roll, torch.add) else f(q, (0,)) if f is torch.flip else f(q)
