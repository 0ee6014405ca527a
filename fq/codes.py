"""Primitives on codes and bytes: casting to packed FP4, packing, unpacking. None is differentiable."""

from __future__ import annotations

import torch
from torch import Tensor

from fq import autograd
from fq.backends.registry import requested
from fq.checks import check_float
from fq.layouts.packing import row_bytes


def cast_fp4x2(x: Tensor, *, backend: str = "auto") -> Tensor:
    """Round x: (..., K) to e2m1 and pack pairs, the even element in the low nibble: (..., K/2) uint8.

    To nearest even, saturating at ±6; ±inf give ±6, NaN gives +6 (as `cvt.rn.satfinite.e2m1x2` does),
    -0.0 keeps its sign. torchao #2832.

    Raises:
        TypeError: x is no float tensor.
        ValueError: K is odd.

    Example:
        >>> import fq, torch
        >>> fq.cast_fp4x2(torch.tensor([0.5, 1.0, -6.0, 2.5]))
        tensor([33, 79], dtype=torch.uint8)
    """
    check_float("cast_fp4x2", "x", x)
    _even("cast_fp4x2", x)
    return autograd.call_codes("cast_fp4x2", requested(backend), x.detach())


def pack_bits(codes: Tensor, bits: int, *, backend: str = "auto") -> Tensor:
    """Pack codes: (..., K) of `bits` bits densely into (..., ceil(K·bits/8)) uint8.

    LSB first along the last axis, each row starting on a byte; codes are masked to their width.

    Raises:
        TypeError: codes are no integers. ValueError: bits is not 1 to 8.

    Example:
        >>> import fq, torch
        >>> fq.pack_bits(torch.tensor([1, 2, 3]), 3)
        tensor([209,   0], dtype=torch.uint8)
    """
    _integers("pack_bits", codes)
    return autograd.call_codes("pack_bits", requested(backend), codes, _bits("pack_bits", bits))


def unpack_bits(packed: Tensor, bits: int, size: int, *, backend: str = "auto") -> Tensor:
    """Unpack bytes (..., ceil(size·bits/8)) uint8 into plain codes (..., size) uint8.

    Raises:
        TypeError: packed is not uint8.
        ValueError: the last dimension does not hold `size` codes.

    Example:
        >>> import fq, torch
        >>> fq.unpack_bits(torch.tensor([209, 0], dtype=torch.uint8), 3, 3)
        tensor([1, 2, 3], dtype=torch.uint8)
    """
    bits = _bits("unpack_bits", bits)
    _bytes("unpack_bits", packed)
    if packed.shape[-1] != row_bytes(size, bits):
        raise ValueError(
            f"unpack_bits: {size} codes of {bits} bits take {row_bytes(size, bits)} bytes, "
            f"got a last dimension of {packed.shape[-1]}"
        )
    return autograd.call_codes("unpack_bits", requested(backend), packed, bits, size)


def pack_fp4x2(codes: Tensor, *, backend: str = "auto") -> Tensor:
    """Pack e2m1 codes (..., K), K even, into (..., K/2) uint8, the even element in the low nibble.

    Raises:
        TypeError: codes are no integers. ValueError: K is odd; see `pack_bits`.

    Example:
        >>> import fq, torch
        >>> fq.pack_fp4x2(torch.tensor([0, 1, 2, 3])).tolist() == [0x10, 0x32]
        True
    """
    _integers("pack_fp4x2", codes)
    _even("pack_fp4x2", codes)
    return autograd.call_codes("pack_bits", requested(backend), codes, 4)


def unpack_fp4x2(packed: Tensor, *, backend: str = "auto") -> Tensor:
    """Unpack bytes (..., K/2) uint8 into e2m1 codes (..., K) uint8.

    Raises:
        TypeError: packed is not uint8.

    Example:
        >>> import fq, torch
        >>> fq.unpack_fp4x2(torch.tensor([0x10, 0x32], dtype=torch.uint8))
        tensor([0, 1, 2, 3], dtype=torch.uint8)
    """
    _bytes("unpack_fp4x2", packed)
    return autograd.call_codes("unpack_bits", requested(backend), packed, 4, 2 * packed.shape[-1])


def pack_int4(codes: Tensor, *, backend: str = "auto") -> Tensor:
    """Pack int4 codes (..., K), K even, as two's complement nibbles into (..., K/2) uint8, even ones low.

    Raises:
        TypeError: codes are no integers. ValueError: K is odd; see `pack_bits`.

    Example:
        >>> import fq, torch
        >>> fq.pack_int4(torch.tensor([-8, 7])).tolist() == [0x78]
        True
    """
    _integers("pack_int4", codes)
    _even("pack_int4", codes)
    return autograd.call_codes("pack_bits", requested(backend), codes, 4)


def unpack_int4(packed: Tensor, *, backend: str = "auto") -> Tensor:
    """Unpack bytes (..., K/2) uint8 into int4 codes (..., K) int8 of -8..7.

    Raises:
        TypeError: packed is not uint8.

    Example:
        >>> import fq, torch
        >>> fq.unpack_int4(torch.tensor([0x78], dtype=torch.uint8))
        tensor([-8,  7], dtype=torch.int8)
    """
    _bytes("unpack_int4", packed)
    codes = autograd.call_codes("unpack_bits", requested(backend), packed, 4, 2 * packed.shape[-1])
    return (codes ^ 8).to(torch.int8) - 8


def _even(what: str, x: Tensor) -> None:
    if x.ndim == 0 or x.shape[-1] % 2:
        size = "a 0-dimensional tensor" if x.ndim == 0 else f"{x.shape[-1]} in shape {tuple(x.shape)}"
        raise ValueError(f"{what}: expected an even last dimension, got {size}; fq.pack_bits packs odd rows")


def _integers(what: str, codes: Tensor) -> None:
    if not isinstance(codes, Tensor) or codes.is_floating_point() or codes.is_complex():
        raise TypeError(
            f"{what}: expected integer codes, got {getattr(codes, 'dtype', type(codes).__name__)}"
        )
    if codes.ndim == 0:
        raise ValueError(f"{what}: expected at least one dimension, got a 0-dimensional tensor")


def _bytes(what: str, packed: Tensor) -> None:
    if not isinstance(packed, Tensor) or packed.dtype != torch.uint8:
        raise TypeError(
            f"{what}: expected uint8 bytes, got {getattr(packed, 'dtype', type(packed).__name__)}"
        )
    if packed.ndim == 0:
        raise ValueError(f"{what}: expected at least one dimension, got a 0-dimensional tensor")


def _bits(what: str, bits: int) -> int:
    if isinstance(bits, bool) or not isinstance(bits, int):
        raise TypeError(f"{what}: bits must be an int, got {bits!r}")
    if not 1 <= bits <= 8:
        raise ValueError(f"{what}: bits must be 1 to 8, got {bits}")
    return bits
