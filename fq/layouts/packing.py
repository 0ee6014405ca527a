"""Codes of 1 to 8 bits to dense bytes and back: LSB first along the last axis, each row on its own bytes."""

from __future__ import annotations

from math import gcd

import torch
from torch import Tensor


def period(bits: int) -> tuple[int, int]:
    """Return the smallest (codes, bytes) after which the pattern of `bits`-bit codes repeats."""
    common = gcd(bits, 8)
    return 8 // common, bits // common


def row_bytes(size: int, bits: int) -> int:
    """Return how many bytes a row of `size` codes takes."""
    return (size * bits + 7) // 8


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack codes (..., K) into bytes (..., ceil(K·bits/8)) uint8; codes are masked to `bits`."""
    size = codes.shape[-1]
    codes = codes.to(torch.uint8)
    if bits == 8:
        return codes
    count, width = period(bits)
    codes = codes & ((1 << bits) - 1)
    if size % count:
        codes = torch.constant_pad_nd(codes, (0, -size % count))
    lanes = codes.unflatten(-1, (codes.shape[-1] // count, count)).unbind(-1)
    out = []
    for byte in range(width):
        value = None
        for lane, code in enumerate(lanes):
            shift = lane * bits - byte * 8  # where this code starts, seen from this byte
            if -bits < shift < 8:
                part = code << shift if shift >= 0 else code >> -shift
                value = part if value is None else value | part
        assert value is not None
        out.append(value)
    packed = out[0] if width == 1 else torch.stack(out, -1).flatten(-2)[..., : row_bytes(size, bits)]
    return packed.contiguous()


def unpack(packed: Tensor, bits: int, size: int) -> Tensor:
    """Unpack bytes (..., ceil(K·bits/8)) into plain codes (..., K) uint8, K = `size`."""
    if bits == 8:
        return packed
    count, width = period(bits)
    if packed.shape[-1] % width:
        packed = torch.constant_pad_nd(packed, (0, -packed.shape[-1] % width))
    bytes_ = packed.unflatten(-1, (packed.shape[-1] // width, width)).unbind(-1)
    mask = (1 << bits) - 1
    out = []
    for lane in range(count):
        byte, shift = divmod(lane * bits, 8)
        value = bytes_[byte] >> shift
        if shift + bits > 8:
            value = value | (bytes_[byte + 1] << (8 - shift))
        out.append(value & mask)
    return (out[0] if count == 1 else torch.stack(out, -1).flatten(-2))[..., :size]
