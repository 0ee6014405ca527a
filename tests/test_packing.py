"""Codes to bytes and back: dense, LSB first, each row on its own bytes, for 1 to 8 bits and any shape."""

from __future__ import annotations

import struct
import warnings

import oracle
import pytest
import torch

import fq

BITS = range(1, 9)
GRID = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
GOLDEN = bytes.fromhex("1032547698badcfe")  # of GRID, as compressed-tensors, auto-round and ModelOpt pack it


def random_codes(bits: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, 2**bits, shape, dtype=torch.uint8)


def every_byte(*shape: int) -> torch.Tensor:
    return torch.arange(256).to(torch.uint8).reshape(shape)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 8, 13, 33])
def test_a_row_is_a_little_endian_bit_stream(bits, size):
    codes = random_codes(bits, 3, size)
    packed = fq.pack_bits(codes, bits)
    assert packed.dtype == torch.uint8
    assert packed.tolist() == [oracle.pack(row, bits) for row in codes.tolist()]
    assert torch.equal(fq.unpack_bits(packed, bits, size), codes)


@pytest.mark.parametrize("bits", BITS)
def test_case_G4_pack_and_unpack_any_rank(bits):
    for shape in ((8, 16), (2, 8, 16), (2, 3, 5, 11), (7,), (1, 1)):
        codes = random_codes(bits, *shape)
        packed = fq.pack_bits(codes, bits)
        rows = torch.stack([fq.pack_bits(row, bits) for row in codes.reshape(-1, shape[-1])])
        assert torch.equal(packed, rows.reshape(*shape[:-1], -1))
        assert torch.equal(fq.unpack_bits(packed, bits, shape[-1]), codes)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("shape", "packed"), [((0,), 0), ((3, 0), 0), ((0, 5), None), ((2, 0, 3), None)])
def test_empty_codes_pack_to_empty_bytes(bits, shape, packed):
    size = (shape[-1] * bits + 7) // 8 if packed is None else packed
    out = fq.pack_bits(random_codes(bits, *shape), bits)
    assert (out.shape, out.dtype) == ((*shape[:-1], size), torch.uint8)
    back = fq.unpack_bits(out, bits, shape[-1])
    assert (back.shape, back.dtype) == (shape, torch.uint8)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64])
def test_wide_and_negative_codes_are_masked_to_their_width(bits, dtype):
    codes = torch.arange(-128, 128).to(dtype) if dtype != torch.uint8 else every_byte(256)
    plain = [int(c) % 2**bits for c in codes]
    assert fq.unpack_bits(fq.pack_bits(codes, bits), bits, 256).tolist() == plain
    if dtype.itemsize > 1:
        assert torch.equal(fq.pack_bits(codes.to(dtype) + 256, bits), fq.pack_bits(codes, bits))


def test_compressed_tensors_vectors_are_the_same_bytes():
    three = torch.tensor([(5 * k) % 8 for k in range(32)])
    assert bytes(fq.pack_bits(three, 3)) == struct.pack("<3I", 0xA878CEA8, 0xCEA878CE, 0x78CEA878)
    four = torch.arange(-4, 1) + 8  # offset binary
    assert bytes(fq.pack_bits(four, 4)) == struct.pack("<I", 0x00087654)[:3]


def test_golden_fp4_bytes():
    x = torch.tensor(GRID)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        assert bytes(fq.cast_fp4x2(x.to(dtype))) == GOLDEN
    codes = torch.arange(16)
    assert bytes(fq.pack_fp4x2(codes)) == GOLDEN
    assert torch.equal(fq.unpack_fp4x2(fq.pack_fp4x2(codes)), codes.to(torch.uint8))
    q = fq.quantize(x.repeat(2), fq.mxfp4())
    assert (bytes(q.data), q.scale.item()) == (GOLDEN * 2, 127)
    assert torch.equal(fq.dequantize(q).signbit(), x.repeat(2).signbit())


@pytest.mark.parametrize(
    ("pack", "unpack"), [(fq.pack_fp4x2, fq.unpack_fp4x2), (fq.pack_int4, fq.unpack_int4)]
)
def test_every_byte_survives_unpack_and_pack(pack, unpack):
    assert torch.equal(pack(unpack(every_byte(16, 16))), every_byte(16, 16))


@pytest.mark.parametrize("bits", BITS)
def test_every_full_byte_survives_unpack_and_pack_bits(bits):
    bytes_ = every_byte(256).repeat(bits)
    size = 256 * 8
    assert torch.equal(fq.pack_bits(fq.unpack_bits(bytes_, bits, size), bits), bytes_)


def test_torchao_fp4_table():
    x = torch.tensor([[0, 0.5, 4, -0.0], [-0.0, 1, -6, 3]])
    want = [[0b00010000, 0b10000110], [0b00101000, 0b01011111]]
    assert fq.cast_fp4x2(x).tolist() == want
    ties = {
        0.25: 0,
        0.75: 1,
        1.25: 1,
        1.75: 2,
        2.5: 2,
        3.5: 4,
        5.0: 4,
        6.1: 6,
        5.5: 6,
        0.26: 0.5,
        0.2501: 0.5,
    }
    for x, want in ties.items():
        for sign in (1, -1):
            code = fq.unpack_fp4x2(fq.cast_fp4x2(torch.full((2,), sign * x)))[0].item()
            assert oracle.E2M1.value(code) == sign * want


def test_cast_fp4x2_saturates_and_maps_nan_to_six():
    inf, nan = torch.inf, torch.nan
    x = torch.tensor([inf, -inf, nan, -nan, 3e38, -3e38, -0.0, -1e-45])
    assert fq.unpack_fp4x2(fq.cast_fp4x2(x)).tolist() == [7, 15, 7, 7, 7, 15, 8, 8]
    assert fq.cast_fp4x2(torch.zeros(2, 0, 6)).shape == (2, 0, 3)
    assert fq.cast_fp4x2(torch.zeros(3, 0)).shape == (3, 0)


def test_int4_codes_are_twos_complement_nibbles():
    codes = torch.arange(-8, 8)
    assert bytes(fq.pack_int4(codes)) == bytes.fromhex("98badcfe10325476")
    back = fq.unpack_int4(fq.pack_int4(codes))
    assert back.dtype == torch.int8
    assert back.tolist() == codes.tolist()


@pytest.mark.parametrize("shape", [(5, 3), (1, 1), (4, 7)])
def test_case_F5_odd_rows(shape):
    codes = random_codes(4, *shape)
    for pack in (fq.pack_fp4x2, fq.pack_int4, lambda c: fq.cast_fp4x2(c.float())):
        with pytest.raises(ValueError, match=rf"even last dimension, got {shape[-1]} in shape .*pack_bits"):
            pack(codes)
    packed = fq.pack_bits(codes, 4)
    assert packed.shape == (shape[0], (shape[1] + 1) // 2)
    assert torch.equal(fq.unpack_bits(packed, 4, shape[1]), codes)
    for layout in (fq.nvfp4(), fq.mxfp4(), fq.int4(32)):
        x = torch.randn(shape)
        q = fq.quantize(x, layout)
        assert (q.shape, q.data.shape) == (shape, packed.shape)
        assert (q.data[:, -1] >> 4 == 0).all()  # what pads a row is zero
        rows = torch.stack([fq.dequantize(fq.quantize(row, layout, outer_scale=outer(q))) for row in x])
        assert torch.equal(fq.dequantize(q), rows)


def outer(q: fq.QTensor) -> float | None:
    return q.scale.scale.item() if isinstance(q.scale, fq.QTensor) else None


def test_non_contiguous_codes_pack_by_value():
    codes = random_codes(4, 6, 12)
    for view in (codes[:, ::2], codes.T, codes[::2], codes[:, 3:9], codes[0].expand(3, 12)):
        assert torch.equal(fq.pack_fp4x2(view), fq.pack_fp4x2(view.contiguous()))
        assert torch.equal(fq.unpack_fp4x2(view), fq.unpack_fp4x2(view.contiguous()))
    x = torch.randn(6, 12)
    for view in (x[:, ::2], x.T, x[::2]):
        assert torch.equal(fq.cast_fp4x2(view), fq.cast_fp4x2(view.contiguous()))


@pytest.mark.parametrize("bits", [1, 3, 4, 8])
def test_compiled_and_mapped_bytes_equal_eager_ones(bits, fresh_compile):
    codes = random_codes(bits, 3, 4, 10)
    packed = fq.pack_bits(codes, bits)

    def both(c):
        p = fq.pack_bits(c, bits)
        return p, fq.unpack_bits(p, bits, 10)

    with warnings.catch_warnings(action="error"):
        for run in (torch.vmap(both), torch.compile(torch.vmap(both), fullgraph=True, backend="aot_eager")):
            p, u = run(codes)
            assert torch.equal(p, packed)
            assert torch.equal(u, codes)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: fq.pack_bits(torch.ones(4), 4),
            TypeError,
            "pack_bits: expected integer codes, got torch.float32",
        ),
        (lambda: fq.pack_bits([1, 2], 4), TypeError, "pack_bits: expected integer codes, got list"),
        (lambda: fq.pack_bits(torch.tensor(3), 4), ValueError, "pack_bits: expected at least one dimension"),
        (lambda: fq.pack_bits(torch.tensor([3]), 9), ValueError, "pack_bits: bits must be 1 to 8, got 9"),
        (lambda: fq.pack_bits(torch.tensor([3]), 0), ValueError, "pack_bits: bits must be 1 to 8, got 0"),
        (
            lambda: fq.pack_bits(torch.tensor([3]), True),
            TypeError,
            "pack_bits: bits must be an int, got True",
        ),
        (lambda: fq.pack_bits(torch.tensor([3]), 4.0), TypeError, "pack_bits: bits must be an int, got 4.0"),
        (lambda: fq.unpack_bits(torch.tensor([3]), 4, 2), TypeError, "expected uint8 bytes, got torch.int64"),
        (
            lambda: fq.unpack_bits(every_byte(256), 4, 2),
            ValueError,
            "2 codes of 4 bits take 1 bytes, got .* of 256",
        ),
        (lambda: fq.unpack_bits(every_byte(256)[0], 3, 1), ValueError, "at least one dimension"),
        (
            lambda: fq.unpack_fp4x2(torch.ones(2)),
            TypeError,
            "unpack_fp4x2: expected uint8 bytes, got torch.float32",
        ),
        (
            lambda: fq.unpack_int4(torch.ones(2).char()),
            TypeError,
            "unpack_int4: expected uint8 bytes, got torch.int8",
        ),
        (
            lambda: fq.cast_fp4x2(torch.ones(2).int()),
            TypeError,
            "cast_fp4x2: x must be float32, .* got torch.int32",
        ),
        (lambda: fq.cast_fp4x2(torch.tensor(1.0)), ValueError, "cast_fp4x2: .* got a 0-dimensional tensor"),
        (lambda: fq.pack_fp4x2(torch.tensor(1)), ValueError, "pack_fp4x2: expected at least one dimension"),
    ],
)
def test_wrong_input_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call()
