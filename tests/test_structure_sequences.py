"""Sequences of structural operations: experts as a loader moves them, random ones, strided and NaN inputs."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
import torch.utils._pytree as pytree
from hypothesis import given, settings
from laws import FORMATS, Q4_K, REASONS, TEXTS, holds, is_sound, quantized, same

import fq

AXES = (-1, -2)


# --- experts ---


@pytest.mark.parametrize("text", ["int8", "int8:tensor", "int8:block4x8", "int4:g32", "mxfp4", "nvfp4", Q4_K])
def test_llama4_experts_keep_their_values_at_every_step_of_loading(text):
    """As TorchAO's MoE test: a checkpoint's (E, K, N) experts go to 2-D and back, then shards are joined."""
    experts, dim, hidden = 2, 128, 64
    w1 = quantized(text, experts, hidden, dim).mT  # (E, dim, hidden), dim packed
    w2 = quantized(text, experts, dim, hidden).mT  # (E, hidden, dim), hidden packed
    for w in (w1, w2):
        k, n = w.shape[1:]
        assert holds(lambda t: t.transpose(1, 2), w)
        assert holds(lambda t, k=k: t.transpose(1, 2).reshape(-1, k), w)
        assert holds(lambda t, k=k: t.transpose(1, 2).reshape(-1, k).unflatten(0, (2, -1)), w)
        assert holds(lambda t, k=k: t.transpose(1, 2).reshape(-1, k).unflatten(0, (2, -1)).transpose(1, 2), w)
        assert holds(lambda t, n=n: t.reshape(-1, n), w)
        assert holds(lambda t, n=n: t.reshape(-1, n).unflatten(0, (2, -1)), w)
        back = w.transpose(1, 2).reshape(-1, k).unflatten(0, (2, -1)).transpose(1, 2)
        assert torch.equal(back.data, w.data)
        other = replace(w, scale=w.scale.flip(0)) if isinstance(w.scale, torch.Tensor) else w.clone()
        for join in (0, 1, 2, -1, -2):
            both = fq.cat([w, other], join)
            same(fq.dequantize(both), torch.cat([fq.dequantize(w), fq.dequantize(other)], join))
            is_sound(both)
            for part, whole in zip(both.split(w.shape[join], join), (w, other), strict=True):
                same(fq.dequantize(part), fq.dequantize(whole))


# --- random sequences ---


def _slice(r, t):
    at = r.randrange(t.ndim)
    start = r.choice([0, 0, 1, 2, 4, 8, 16])
    cut = slice(start, r.choice([None, -1, start + r.randrange(1, 9)]), r.choice([None, None, 2]))
    return lambda t: t[(*[slice(None)] * at, cut)]


def _index(r, t):
    at = r.randrange(t.ndim)
    n = max(1, t.shape[at])
    index = r.choice([r.randrange(-n, n), torch.tensor([[r.randrange(-n, n) for _ in range(3)]] * 2)])
    return lambda t: t[(*[slice(None)] * at, index)]


def _transpose(r, t):
    dims = r.randrange(t.ndim), r.randrange(t.ndim)
    return lambda t: t.transpose(*dims)


def _flatten(r, t):
    start = r.randrange(t.ndim)
    end = r.randrange(start, t.ndim)
    return lambda t: t.flatten(start, end)


def _unflatten(r, t):
    at = r.randrange(t.ndim)
    n = r.choice([n for n in (1, 2, 3, 4) if t.shape[at] % n == 0])
    return lambda t: t.unflatten(at, (n, t.shape[at] // n))


def _unsqueeze(r, t):
    at = r.randrange(-t.ndim - 1, t.ndim + 1)
    return lambda t: t.unsqueeze(at)


def _squeeze(r, t):
    dims = r.choice([None, r.randrange(t.ndim)])
    return lambda t: t.squeeze() if dims is None else t.squeeze(dims)


def _cat(r, t):
    at, order = r.randrange(t.ndim), r.choice([1, 2])
    return lambda t: torch.cat([t, t[:order], t] if at == 0 else [t, t], at)


def _stack(r, t):
    at = r.randrange(t.ndim + 1)
    return lambda t: torch.stack([t, t], at)


def _expand(r, t):
    sizes = [r.choice([1, 2]), *[-1] * t.ndim]
    return lambda t: t.expand(*sizes)


def _chunk(r, t):
    at, n = r.randrange(t.ndim), r.choice([1, 2, 3])
    return lambda t: t.chunk(n, at)[-1]


OPERATIONS = (
    _slice,
    _index,
    _transpose,
    _flatten,
    _unflatten,
    _unsqueeze,
    _squeeze,
    _cat,
    _stack,
    _expand,
    _chunk,
)
counts = {"taken": 0, "refused": 0}


@settings(max_examples=250, deadline=None, derandomize=True)
@given(
    st.sampled_from(FORMATS),
    st.sampled_from(AXES),
    st.sampled_from(
        [(64,), (13,), (8, 64), (5, 13), (2, 6, 40), (5, 4, 24), (1, 3, 7), (2, 3, 4, 16), (2, 1, 5, 9)]
    ),
    st.integers(0, 10**6),
)
def test_any_sequence_of_operations_is_exact(text, axis, shape, seed):
    r = random.Random(seed)
    shape = shape[:-2] + shape[-2:][::-1] if axis == -2 and len(shape) > 1 else shape
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        q = quantized(text, *shape, axis=axis if len(shape) > 1 else -1)
    for _ in range(6):
        dense = fq.dequantize(q)
        f = r.choice(OPERATIONS)(r, dense)
        try:
            want = f(dense)
        except (ValueError, IndexError, RuntimeError):
            continue
        if want.ndim == 0 or want.ndim > 6 or want.numel() > 20000:
            continue
        try:
            got = f(q)
        except ValueError as refusal:
            counts["refused"] += 1
            if re.search(REASONS, str(refusal)):
                continue
            raise
        assert got.shape == want.shape
        same(fq.dequantize(got), want)
        is_sound(got)
        counts["taken"] += 1
        q = got


def test_most_operations_of_the_sequences_were_taken():
    """Runs after the sequences: a QTensor that refuses everything obeys the law too."""
    if not counts["taken"]:
        test_any_sequence_of_operations_is_exact()
    assert counts["taken"] > counts["refused"] > 0, counts


# --- what the children hold, and how they lie in memory ---


@TEXTS
def test_children_may_be_strided_views(text):
    wide = quantized(text, 3, 6, 64)
    q = pytree.tree_map(
        lambda t: torch.stack([t, t], -1)[..., 0].transpose(0, 1).contiguous().transpose(0, 1), wide
    )
    assert not q.is_contiguous()
    for f in (
        lambda t: t[:, :3],
        lambda t: t[..., :33],
        lambda t: t[..., 32:45],
        lambda t: t.mT,
        lambda t: t.flatten(0, 1),
        lambda t: t.unflatten(1, (2, 3)),
        lambda t: torch.cat([t, t], 1),
        lambda t: torch.cat([t, t], 2),
        lambda t: torch.stack([t, t]),
        lambda t: t.contiguous(),
    ):
        assert holds(f, q)


@pytest.mark.parametrize(
    "text", ["int8", "int8:block4x8", "int4:g8", "mxfp4", "uint4:g8", "int3:g8", "nvfp4"]
)
def test_poisoned_blocks_stay_where_they_are(text):
    x = torch.randn(2, 8, 64)
    x[0, 2, 11] = torch.nan
    x[1, 6] = torch.inf
    q = fq.quantize(x, fq.layout(text))
    assert fq.dequantize(q).isnan().any()
    for f in (
        lambda t: t[:, 4:],
        lambda t: t[..., 32:61],
        lambda t: t.flatten(0, 1),
        lambda t: torch.cat([t, t[:, :4]], 1),
        lambda t: torch.cat([t, t], -1),
        lambda t: t.unflatten(1, (4, 2)).mT,
    ):
        assert holds(f, q)
