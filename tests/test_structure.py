"""Cutting, joining, reshaping and expanding obey the law, by value, or name the alignment they need."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from laws import FORMATS, Q4_K, TEXTS, along, holds, is_sound, quantized, same, step

import fq

AXES = (-1, -2)
# (rows, columns): ragged in every block above, odd, even, one row, one column, smaller than any block.
MATRICES = ((11, 40), (5, 13), (8, 64), (1, 24), (9, 1))


def at(q: fq.QTensor, dim: int, index) -> tuple:
    """The index that takes `index` of the stored rows (-2) or columns (-1)."""
    if q.data.ndim == 1:
        return (index,)
    position = dim if q.layout.axis == -1 else -3 - dim
    return (..., index) if position == -1 else (..., index, slice(None))


# --- cutting ---


@pytest.mark.parametrize("axis", AXES)
@TEXTS
def test_a_slice_starts_on_a_block_and_byte_and_ends_anywhere(text, axis):
    for rows, cols in MATRICES:
        for lead in ((), (2,))[: 1 + (cols == 13)]:
            q = quantized(text, *lead, *along(axis, rows, cols), axis=axis)
            for dim, size in ((-2, rows), (-1, cols)):
                every = step(q, dim)
                for start in {0, 1, 2, every // 2, every, every + 1, 2 * every}:
                    for stop in (start + 3, size):
                        cut = at(q, dim, slice(start, stop))
                        taken = holds(lambda t, cut=cut: t[cut], q)
                        assert taken == (start % every == 0 or start >= size), (q, dim, start, stop)


@pytest.mark.parametrize("text", ["int8:block4x8", "int4:g8", "nvfp4", Q4_K, "int3:g8", "int8:tensor"])
def test_a_slice_of_a_vector(text):
    for size in (1, 13, 64):
        q = quantized(text, size)
        for start in range(0, size, 2):
            assert holds(lambda t, s=start: t[s : s + 9], q) == (start % step(q, -1) == 0)


@TEXTS
def test_nothing_can_be_cut_anywhere_and_joined_again(text):
    q = quantized(text, 11, 40)
    for start in (0, 3, 11):
        assert holds(lambda t, s=start: t[s:s], q)
        assert holds(lambda t, s=start: t[:, s:s], q)
        assert holds(lambda t, s=start: t[s:s, s:s], q)
    rows, cols = q[0:0], q[:, 0:0]
    same(fq.dequantize(fq.cat([rows, q, rows])), fq.dequantize(q))
    same(fq.dequantize(fq.cat([cols, q, cols], 1)), fq.dequantize(q))
    assert holds(lambda t: torch.cat([t, t], 1), rows) == ("uint6" not in text)  # 5 · 6 bits end in a byte
    assert holds(lambda t: torch.stack([t, t]), cols)
    assert holds(lambda t: t[0:0].unsqueeze(0), q)


@pytest.mark.parametrize("bits", range(1, 8))
def test_a_slice_holds_the_bytes_of_its_own_codes_only(bits):
    layout = fq.layout("int1:g8" if bits == 1 else f"int{bits}:g8")
    q = replace(
        fq.quantize(torch.zeros(3, 40), layout), data=torch.full((3, 5 * bits), 255, dtype=torch.uint8)
    )
    codes = fq.unpack_bits(q.data, bits, 40)
    for start in range(0, 40, 8):
        for stop in range(start + 1, 41):
            want = fq.pack_bits(codes[:, start:stop], bits)
            assert torch.equal(q[:, start:stop].data, want), (start, stop)


def test_a_refused_slice_names_the_multiple_that_is_needed():
    q = quantized("int4:g8", 4, 32)
    with pytest.raises(ValueError, match=r"column 3 is inside a byte; int4 is cut at multiples of 2"):
        q[:, 3:]
    with pytest.raises(
        ValueError, match=r"column 4 is inside a block; start at a multiple of 8, or dequantize"
    ):
        q[:, 4:]
    with pytest.raises(ValueError, match=r"row 2 is inside a block; start at a multiple of 4, or dequantize"):
        quantized("int8:block4x8", 8, 16)[2:]


@pytest.mark.parametrize("axis", AXES)
@TEXTS
def test_split_chunk_narrow_and_unbind(text, axis):
    q = quantized(text, 2, *along(axis, 12, 64), axis=axis)
    rows, cols = (1, 2) if axis == -1 else (2, 1)
    assert holds(lambda t: t.split(1), q)
    assert holds(lambda t: t.chunk(2), q)
    assert holds(lambda t: t.unbind(), q)
    assert holds(lambda t: t.unbind(rows), q)
    assert holds(lambda t: t.split(4, rows), q)
    assert holds(lambda t: t.split([4, 0, 8], rows - 3), q)
    assert holds(lambda t: t.chunk(3, rows), q)
    assert holds(lambda t: t.chunk(7, rows), q) == (step(q, -2) == 1)
    assert holds(lambda t: t.split(32, cols), q)
    assert holds(lambda t: t.chunk(2, cols), q)
    assert holds(lambda t: t.narrow(cols, 32, 7), q)
    assert holds(lambda t: t.narrow(cols, -32, 32), q)
    assert holds(lambda t: t.narrow(0, -1, 1), q)
    assert holds(lambda t: t[:, 0:0].chunk(3, 1), q)
    for outside in ((0, 1, 2), (0, -3, 1), (cols, 60, 5)):
        with pytest.raises(IndexError, match="out of range"):
            q.narrow(*outside)
    with pytest.raises(ValueError, match="do not add up to 64"):
        q.split([32, 16], cols)


# --- joining ---


@pytest.mark.parametrize("axis", AXES)
@TEXTS
def test_case_G6_cat_along_every_dimension(text, axis):
    for (rows, cols), others in {
        (4, 16): (4, 16),
        (6, 40): (10, 24),
        (3, 32): (1, 5),
        (5, 13): (2, 8),
    }.items():
        for lead in ((), (2,), (5, 1)):
            q = quantized(text, *lead, *along(axis, rows, cols), axis=axis)
            more = quantized(text, *lead, *along(axis, others[0], cols), axis=axis)
            wide = quantized(text, *lead, *along(axis, rows, others[1]), axis=axis)
            dims = {-2: -2, -1: -1} if axis == -1 else {-2: -1, -1: -2}
            assert joins([q, more, q], dims[-2])
            aligned = cols * q.layout.element.bits % 8 == 0 and "uint6" not in text
            assert joins([q, wide], dims[-1]) >= aligned
            for dim in range(len(lead)):
                assert joins([q, q], dim)


def joins(qs: list[fq.QTensor], dim: int) -> bool:
    """The law for cat; its first argument stands for all of them."""
    dense = [fq.dequantize(q) for q in qs]
    return holds(lambda t: torch.cat([t, *(qs[1:] if isinstance(t, fq.QTensor) else dense[1:])], dim), qs[0])


def test_cat_refines_a_block_to_the_gcd_of_the_joined_extents():
    a, b = quantized("int8", 3, 16), quantized("int8", 3, 24)
    assert fq.cat([a, b], 1).layout.block == (1, 8)
    assert fq.cat([a, a], 1).layout.block == (1, 16)
    assert fq.cat([a, a]).layout.block == (1, -1)
    tall, flat = quantized("int8:tensor", 6, 16), quantized("int8:tensor", 4, 16)
    assert fq.cat([tall, flat]).layout.block == (2, -1)
    assert joins([tall, flat], 0)
    assert joins([a, b, a], 1)


def test_cat_of_different_blocks_of_one_format():
    a, b = quantized("int4:g32", 3, 64), quantized("int4:g8", 3, 24)
    for qs in ([a, b], [b, a], [a, b, a]):
        assert joins(qs, 1)
    assert joins([quantized("int4:g32", 3, 64), quantized("int4:g8", 5, 64)], 0)
    stacked = fq.stack([quantized("int4:g32", 3, 64), quantized("int4:g8", 3, 64)])
    assert stacked.layout.block == (1, 8)
    is_sound(stacked)


def test_case_J4_nvfp4_halves_keep_their_own_outer_scales():
    gate = quantized("nvfp4", 8, 32)
    up = replace(gate, scale=replace(gate.scale, scale=2.14 * gate.scale.scale))
    for dim in (0, 1):
        joined = fq.cat([gate, up], dim)
        same(fq.dequantize(joined), torch.cat([fq.dequantize(gate), fq.dequantize(up)], dim))
        for half, own in zip(joined.chunk(2, dim), (gate, up), strict=True):
            same(fq.dequantize(half), fq.dequantize(own))


@pytest.mark.parametrize("axis", AXES)
@TEXTS
def test_stack_and_unbind_are_inverse(text, axis):
    for lead in ((), (2,), (2, 1)):
        q = quantized(text, *lead, *along(axis, 5, 13), axis=axis)
        for dim in range(len(lead) + 1):
            assert holds(lambda t, d=dim: torch.stack([t, t, t], d), q)
            assert holds(lambda t, d=dim: torch.stack([t, t, t], d).unbind(d), q)
        assert not holds(lambda t: torch.stack([t, t], -1), q)
    vector = quantized(text, 13)
    assert holds(lambda t: torch.stack([t, t]), vector)
    assert not holds(lambda t: torch.stack([t, t], 1), vector)


@pytest.mark.parametrize("join", [torch.cat, torch.stack, fq.cat, fq.stack])
def test_what_cannot_be_joined_is_said(join):
    q = quantized("int4:g8", 4, 16)
    with pytest.raises(TypeError, match="expected QTensors, got Tensor; quantize it first"):
        join([q, torch.ones(4, 16)])
    with pytest.raises(TypeError, match="expected QTensors, got Tensor; quantize it first"):
        join([torch.ones(4, 16), q])
    for other in ("mxfp4", "int4:g8:sym", "uint4:g8", "int4:g8:scale=float16"):
        with pytest.raises(ValueError, match=r"expected tensors of one format, got int4:g8 .* fq.requantize"):
            join([q, quantized(other, 4, 16)])
    with pytest.raises(ValueError, match="one format"):
        join([q, q.to(torch.bfloat16)])
    with pytest.raises(ValueError, match="all must pack the same dimensions"):
        join([q, quantized("int4:g8", 4, 16, axis=-2)])
    with pytest.raises(ValueError, match=r"\(4, 16\) and \(3, 8\) differ"):
        join([q, quantized("int4:g8", 3, 8)])
    kernels = fq.quantize(torch.randn(4, 2, 8), fq.int8(), inner=2)
    with pytest.raises(ValueError, match="all must pack the same dimensions"):
        join([kernels, quantized("int8", 4, 2, 8)])
    with pytest.raises(ValueError, match="at least one"):
        fq.cat([])
    with pytest.raises(IndexError, match="out of range"):
        join([q, q], 5)


# --- leading dimensions into rows and columns ---


@pytest.mark.parametrize("axis", AXES)
@TEXTS
def test_experts_merge_into_their_rows_or_columns_and_come_back(text, axis):
    for experts in (1, 2, 5):
        for rows, cols in ((6, 40), (4, 64), (3, 13)):
            q = quantized(text, experts, *along(axis, rows, cols), axis=axis)
            shape = tuple(q.shape)
            kept = 1 if axis == -1 else cols * q.layout.element.bits % 8 == 0
            merged = holds(lambda t: t.reshape(-1, t.shape[-1]), q)
            assert merged or not kept or "uint6" in text
            assert holds(lambda t: t.flatten(0, 1), q) == merged
            if merged:
                assert holds(lambda t, s=shape: t.flatten(0, 1).reshape(s), q)
                assert holds(lambda t, e=experts: t.flatten(0, 1).unflatten(0, (e, -1)), q)
                assert holds(lambda t, e=experts: t.flatten(0, 1).unflatten(0, (1, e, 1, -1)), q)


@TEXTS
def test_leading_dimensions_reshape_among_themselves(text):
    q = quantized(text, 2, 3, 5, 13)
    for shape in (
        (6, 5, 13),
        (3, 2, 5, 13),
        (1, 6, 1, 5, 13),
        (-1, 5, 13),
        (2, 15, 13),
        (10, 3, 13),
        (30, 13),
    ):
        assert holds(lambda t, s=shape: t.reshape(s), q), shape
    turned = quantized(text, 2, 3, 16, 5, axis=-2)
    for shape in ((6, 16, 5), (3, 2, 16, 5), (1, 6, 1, 16, 5), (-1, 16, 5)):
        assert holds(lambda t, s=shape: t.reshape(s), turned), shape
    with pytest.raises(ValueError, match=r"sizes \(4, 13\) do not hold 390 elements"):
        q.reshape(4, 13)
    assert not holds(lambda t: t.reshape(-1), q)
    assert not holds(lambda t: t.reshape(5), quantized(text, 1, 5, axis=-2))
    assert holds(lambda t: t.reshape(13), quantized(text, 1, 13))
    assert holds(lambda t: t.reshape(1, 1, 13), quantized(text, 13))


def test_an_empty_stack_of_experts_keeps_its_shape():
    for text in FORMATS:
        q = quantized(text, 3, 4, 16)[0:0]
        if q.layout.block[0] == 1 and text != "nvfp4":
            assert holds(lambda t: t.flatten(0, 1).unflatten(0, (0, 4)), q)
        else:
            with pytest.raises(ValueError, match="an empty tensor cannot keep blocks of 4"):
                q.flatten(0, 1)
        assert holds(lambda t: t[:, 0:0].flatten(0, 1), quantized(text, 2, 4, 16))
        assert holds(lambda t: t[:, 0:0].reshape(3, 0, 16), quantized(text, 2, 4, 16))


@TEXTS
def test_expand_is_a_view_of_the_same_bytes(text):
    q = quantized(text, 5, 13)
    assert holds(lambda t: t.expand(3, 2, 5, 13), q)
    assert holds(lambda t: t.expand(4, -1, -1), q)
    assert holds(lambda t: t.unsqueeze(0).expand(4, -1, -1)[1:3], q)
    assert holds(lambda t: t.expand(2, -1, -1), quantized(text, 13, 5, axis=-2))
    assert q.expand(3, 5, 13).data.data_ptr() == q.data.data_ptr()
    assert not holds(lambda t: t.expand(5, 13), quantized(text, 1, 13))
