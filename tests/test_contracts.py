"""What torchao, compressed-tensors, auto-round and vLLM test of their numbers, in functional form."""

from __future__ import annotations

from dataclasses import replace

import formats
import numpy as np
import oracle
import oracle_formats
import pytest
import torch
from oracle_formats import Format

import fq

NAN, INF = torch.nan, torch.inf


def bits(pattern: int) -> float:
    """The float32 number of a bit pattern."""
    return np.uint32(pattern).view(np.float32).item()


def under_one(values: list[float], layout: fq.Layout) -> list[int]:
    """The codes of numbers under the scale one."""
    x = torch.tensor([values])
    q = fq.quantize(x, layout, scale=torch.ones(fq.quantize(x, layout).scale.shape))
    return formats.codes(q)[0].tolist()


# --- FP6: all codes and roundings ---

E2M3 = [*np.arange(0, 2, 0.125), *np.arange(2, 4, 0.25), *np.arange(4, 8, 0.5)]
E3M2 = [0, 1 / 16, 2 / 16, 3 / 16]
E3M2 += [2.0**e * m for e in range(-2, 5) for m in (1, 1.25, 1.5, 1.75)]
ROUNDINGS = {
    # value: code; ties go to the even code, and 7.75 and 30 are beyond the largest
    "e2m3": {0.0624: 0, 0.0625: 0, 0.0626: 1, 0.1875: 2, 1.9375: 16, 3.875: 24, 6.75: 30, 7.6: 31, 7.75: 31},
    "e3m2": {0.03: 0, 0.0314: 1, 0.1251: 2, 0.21875: 4, 1.125: 12, 15.0: 28, 26.0: 30, 29.0: 31, 30.0: 31},
}


@pytest.mark.parametrize(("element", "values"), [("e2m3", E2M3), ("e3m2", E3M2)])
def test_fp6_codes_and_roundings(element, values):
    layout = fq.mxfp6(element)
    magnitudes = [float(v) for v in values]
    assert len(magnitudes) == 32
    assert under_one([*magnitudes, *(-v for v in magnitudes)], layout) == list(range(64))
    data = fq.pack_bits(torch.arange(64, dtype=torch.uint8), 6)[None]
    ones = torch.full((1, 2), 127, dtype=torch.uint8)
    got = fq.dequantize(fq.QTensor(data, ones, layout, torch.float32, (64,)))[0]
    assert data.numel() == 48  # six bits each
    assert got.tolist() == [*magnitudes, *(-v for v in magnitudes)]
    assert got[32].signbit()
    rounded = ROUNDINGS[element]
    assert under_one(list(rounded), layout) == list(rounded.values())
    assert under_one([-v for v in rounded], layout) == [c + 32 for c in rounded.values()]


# --- e8m0: 18 pairs of RCEIL ---

RCEIL = {
    0x00000000: 0,
    0x00000001: 0,
    0x00400000: 0,
    0x00400001: 1,
    0x007FFFFF: 1,
    0x00800000: 1,
    0x1F800000: 63,
    0x1F800001: 64,
    0x3F7FFFFF: 127,
    0x3F800000: 127,
    0x3F800001: 128,
    0x5F800000: 191,
    0x5F800001: 192,
    0x7F000000: 254,
    # torchao overflows to NaN here; fq never makes NaN of a finite scale, and a given infinity saturates
    0x7F000001: 254,
    0x7F7FFFFF: 254,
    0x7F800000: 254,
    0x7FC00000: 255,
}


def test_e8m0_rounds_up():
    given = torch.tensor([[bits(pattern)] for pattern in RCEIL])
    q = fq.quantize(torch.zeros(len(RCEIL), 32), fq.mxfp8(), scale=given)
    assert q.scale[:, 0].tolist() == list(RCEIL.values())
    # By the rule: e3m0's largest number is 16, so that amax·(1/16) is the pair's number, exactly.
    pairs = {p: byte for p, byte in RCEIL.items() if bits(p) * 16 <= oracle.LARGEST}
    x = torch.tensor([[bits(pattern) * 16] for pattern in pairs])
    q = fq.quantize(x, fq.layout("e3m0:g32:scale=e8m0:rceil"))
    assert len(pairs) == 13
    assert q.scale[:, 0].tolist() == list(pairs.values())


# --- mxfp8: 18 rows of bytes ---


def semantic_rows(dtype: torch.dtype, rule: str) -> dict[str, tuple[list[float], int, list[int]]]:
    """Name: the block's distinct numbers, its scale byte, their codes."""
    info, floor, half = torch.finfo(dtype), rule == "floor", dtype == torch.bfloat16
    tiny = torch.tensor([1], dtype=torch.int16 if half else torch.int32).view(dtype).item()
    top, top_code = (246, 0x7E) if floor else (247, 0x78)  # 2^119 and saturated, or 2^120 and 256
    low = 0x08 if half else 0x00  # 2^-133 is 2^-6 under byte 0
    just_over = torch.tensor(bits(0x40600001)).to(dtype).item()  # 3.5 and an ulp
    just_under = torch.tensor(bits(0x43FFFFFF)).to(dtype).item()  # 512 less an ulp
    over = (120, 0x7E) if floor or half else (121, 0x76)
    under = (127, 0x7E) if floor and not half else (128, 0x78)
    full = (127, 0x7E) if floor else (128, 0x77)
    return {
        "zero": ([0.0], 0, [0x00]),
        "smallest normal": ([info.tiny], 0, [0x40]),
        "has inf": ([INF, 1.0], 255, [0x7F, 0x7F]),
        "has nan": ([NAN, 1.0], 255, [0x7F, 0x7F]),
        "e4m3's largest": ([448.0], 127, [0x7E]),
        "e4m3's lowest": ([-448.0], 127, [0xFE]),
        "the dtype's largest": ([info.max], top, [top_code]),
        "the dtype's lowest": ([-info.max], top, [top_code | 0x80]),
        "smallest subnormal": ([tiny], 0, [low]),
        "negative subnormal": ([-tiny], 0, [low | 0x80]),
        "one and a subnormal": ([tiny, 1.0], 119, [0x00, 0x78]),
        "one and a negative subnormal": ([-tiny, 1.0], 119, [0x80, 0x78]),
        "one and the largest": ([info.max, 1.0], top, [top_code, 0x00]),
        "just over 3.5": ([just_over], *over[:1], [over[1]]),
        "just under 512": ([just_under], under[0], [under[1]]),
        "all nan": ([NAN], 255, [0x7F]),
        "past the largest": ([480.0], full[0], [full[1]]),
        "past the lowest": ([-480.0], full[0], [full[1] | 0x80]),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rule", ["floor", "rceil"])
def test_mxfp8_semantic_rows(dtype, rule):
    rows = semantic_rows(dtype, rule)
    assert len(rows) == 18
    for name, (numbers, byte, codes) in rows.items():
        x = torch.full((1, 32), numbers[-1], dtype=dtype)
        x[0, 0] = numbers[0]
        q = fq.quantize(x, fq.mxfp8(rule=rule))
        got = q.data.view(torch.uint8)[0]
        assert q.scale.item() == byte, name
        assert [got[0].item(), *got[1:].unique().tolist()] == [codes[0], codes[-1]], name


# --- FP4: T1, T2, T4, T5 of the formats' list ---

GRID = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
# Where packers in use differ; the right codes are those of round to nearest, ties to even, saturating.
OFF_GRID = {-0.0: 8, -0.1: 8, 0.26: 1, 0.25: 0, 0.75: 2, 1.25: 2, 1.75: 4, 2.5: 4, 3.5: 6, 5.0: 6, 5.5: 7}
OFF_GRID |= {5.999999: 7, 6.1: 7, 64: 7, 100: 7, 127: 7, 2048.5: 7, 1.5e8: 7, INF: 7, -INF: 15, 0.2501: 1}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_T1_fp4_grid(dtype):
    base = torch.tensor(GRID, dtype=dtype).roll(3).repeat(2).reshape(4, 8)
    packed = fq.cast_fp4x2(base)
    want = torch.arange(16).roll(3).repeat(2).reshape(4, 8)
    assert torch.equal(packed, fq.pack_fp4x2(want))
    assert torch.equal(packed, (want[:, ::2] | want[:, 1::2] << 4).to(torch.uint8))
    ones = torch.full((4, 1), 127, dtype=torch.uint8)
    back = fq.dequantize(fq.QTensor(packed, ones, fq.layout("mxfp4:row"), dtype, (8,)))
    assert torch.equal(back, base)
    assert torch.equal(back.signbit(), base.signbit())
    wide = torch.stack([base, base + 1], -1).flatten(1)
    assert torch.equal(fq.cast_fp4x2(wide[:, ::2]), packed)
    for pack in (fq.cast_fp4x2, fq.pack_fp4x2):
        with pytest.raises(ValueError, match="pack_bits"):
            pack(base[:, :7] if pack is fq.cast_fp4x2 else want[:, :7])


def test_T2_numbers_off_the_fp4_grid():
    x = torch.tensor(list(OFF_GRID), dtype=torch.float64)
    assert fq.unpack_fp4x2(fq.cast_fp4x2(torch.stack([x, x], -1)))[:, 0].tolist() == list(OFF_GRID.values())
    for dtype in (torch.bfloat16, torch.float16):
        half = x.to(dtype)
        got = fq.unpack_fp4x2(fq.cast_fp4x2(torch.stack([half, half], -1)))[:, 1]
        assert got.tolist() == oracle.E2M1.encode(half.double().numpy()).tolist()


@pytest.mark.parametrize(
    ("value", "byte"), [(6, 0x77), (100, 0x77), (-6, 0xFF), (0.5, 0x11), (0, 0), (-0.0, 0x88)]
)
def test_T4_constant_rows(value, byte):
    assert (fq.cast_fp4x2(torch.full((3, 8), float(value))) == byte).all()


def test_T5_fp4_rounding_list():
    x = torch.tensor([0, 0.25, 0.4, 0.75, 1.25, 1.4, 1.75, 2.5, 2.9, 3.5, 5, 5.1, 6, 6.2, 8.9, 0])
    want = [0, 0, 0.5, 1, 1, 1.5, 2, 2, 3, 4, 4, 6, 6, 6, 6, 0]
    for sign in (1, -1):
        got = oracle.E2M1.decode(fq.unpack_fp4x2(fq.cast_fp4x2(sign * x)).numpy())
        assert got.tolist() == [sign * v for v in want]
    assert [fq.cast_fp4x2(torch.zeros(s)).shape for s in ((0,), (1, 0, 4))] == [(0,), (1, 0, 2)]


# --- integers: T6, T7, T16 ---


def words(codes: np.ndarray, width: int) -> np.ndarray:
    """Rows of codes q in compressed-tensors' words: q + 2^(width - 1), one bit stream a row."""
    offset = codes.astype(np.int64) + 2 ** (width - 1)
    size = -(-codes.shape[-1] * width // 32)
    rows = [sum(int(u) << (i * width) for i, u in enumerate(row)) for row in offset]
    return np.array([np.frombuffer(r.to_bytes(4 * size, "little"), "<u4") for r in rows])


def as_words(packed: torch.Tensor) -> np.ndarray:
    """The same bytes read as 32-bit words, zeros after the end of a row."""
    return np.pad(packed.numpy(), ((0, 0), (0, -packed.shape[-1] % 4))).view("<u4")


@pytest.mark.parametrize("width", range(1, 9))
def test_T6_bytes_are_compressed_tensors_words(width):
    for shape in ((16, 1024), (9, 100), (128, 33)):
        codes = torch.randint(-(2 ** (width - 1)), 2 ** (width - 1), shape)
        packed = fq.pack_bits(codes + 2 ** (width - 1), width)
        got = as_words(packed)
        assert got.shape == (shape[0], -(-shape[1] * width // 32))
        np.testing.assert_array_equal(got, words(codes.numpy(), width))
        assert torch.equal(
            fq.unpack_bits(packed, width, shape[1]), (codes + 2 ** (width - 1)).to(torch.uint8)
        )
    stacked = fq.pack_bits(codes.reshape(2, 64, 33), width)
    assert torch.equal(stacked, torch.stack([fq.pack_bits(c, width) for c in codes.reshape(2, 64, 33)]))
    if 8 % width == 0:  # no code crosses a byte, so element-aligned packers agree
        lanes = (codes[:, :32] % 2**width).reshape(128, -1, 8 // width) << torch.arange(0, 8, width)
        assert torch.equal(fq.pack_bits(codes[:, :32], width), lanes.sum(-1).to(torch.uint8))


def test_T6_published_words():
    def row(codes, width):
        return as_words(fq.pack_bits(torch.tensor([codes]) + 2 ** (width - 1), width))[0].tolist()

    assert row(list(range(-8, 8)), 4) == [0x76543210, 0xFEDCBA98]
    assert row(list(range(-4, 1)), 4) == [0x00087654]
    assert row(list(range(-128, -124)), 8) == [0x03020100]
    assert row([(5 * k) % 8 - 4 for k in range(32)], 3) == [0xA878CEA8, 0xCEA878CE, 0x78CEA878]
    zeros = torch.tensor([[-8, -7, 0, 7, 1]]).T  # packed along N: the transpose
    assert as_words(fq.pack_bits(zeros.T + 8, 4)).tolist() == [[0x0009F810]]


@pytest.mark.parametrize("width", range(2, 9))
def test_T6_stored_codes_are_those_words_but_for_the_sign_bit(width):
    q = fq.quantize(torch.randn(5, 96), fq.intx(width, 32))
    plain = formats.codes(q).to(torch.int64) ^ 2 ** (width - 1)
    signed = oracle.int_decode(formats.codes(q).numpy(), width)
    np.testing.assert_array_equal(as_words(fq.pack_bits(plain, width)), words(signed, width))


@pytest.mark.parametrize("width", range(1, 9))
def test_T7_a_round_trip_is_fake_quantization(width):
    """Asymmetric, groups of 128 over 350 columns; also with columns reordered (act-order)."""
    w = torch.randn(61, 350) + 0.5
    layout = fq.intx(width, 128, symmetric=False)
    want = oracle_formats.quantize(w, Format(oracle.IntFormat(width), (1, 128), zero="int", rule="minmax"))
    q = fq.quantize(w, layout)
    assert torch.equal(fq.dequantize(q), fq.fake_quantize(w, layout))
    np.testing.assert_array_equal(fq.dequantize(q).double().numpy(), want.values)
    order = torch.randperm(350)
    sorted_ = fq.quantize(w[:, order], layout)
    reordered = replace(sorted_, perm=order[None])
    assert torch.equal(fq.dequantize(reordered)[:, order], fq.fake_quantize(w[:, order], layout))


@pytest.mark.parametrize("width", [4, 8])
def test_T16_asymmetric_numbers_far_from_zero(width):
    w = torch.randn(512, 1024) + 2
    error = fq.dequantize(fq.quantize(w, fq.intx(width, 128, symmetric=False))) - w
    assert error.std() < (torch.rand(512, 1024) - torch.rand(512, 1024)).std()
    step = fq.quantize(w, fq.intx(width, 128, symmetric=False)).scale.repeat_interleave(128, 1)
    assert abs((error / step).std().item() - 12**-0.5) < 0.01  # uniform within half a step


# --- scales: T8, T9, T17 ---


def test_T8_even_rounds_amax_at_seven_fourths():
    """Every positive bfloat16 number: up from a fraction of 1.75, down below; then two exponents less."""
    amax = torch.arange(0x0080, 0x7F80, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    fraction, exponent = np.frexp(amax.double().numpy())
    power = exponent - 1 + (2 * fraction >= 1.75)
    want = np.clip(power - 2 + 127, 0, 254)
    assert fq.quantize(amax[:, None], fq.mxfp4()).scale[:, 0].tolist() == want.tolist()
    published = {5.687891: 4, 0.965272: 1, 7.290238: 8, -1.540329: -1, 0.073246: 0.0625, 8.571118: 8}
    x = torch.tensor(list(published)).bfloat16()[:, None]
    bytes_ = fq.quantize(x, fq.mxfp4()).scale[:, 0].tolist()
    assert [2.0 ** (b - 125) for b in bytes_] == [abs(v) for v in published.values()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_T8_noise_leaves_powers_of_two(dtype):
    powers = torch.exp2(torch.arange(-10.0, 2.0))[:, None]
    noisy = (powers * (1 + 0.2 * torch.rand(12, 32))).to(dtype)
    noisy[:, 0] = (powers[:, 0] * 1.2).to(dtype)
    q = fq.quantize(noisy, fq.mxfp4())
    assert (q.scale[:, 0].int() - 125).tolist() == list(range(-10, 2))


def test_T9_mxfp8_round_trip():
    x = torch.randn(512, 1024)
    q = fq.quantize(x, fq.mxfp8(rule="even"))  # compressed-tensors' rule
    torch.testing.assert_close(fq.dequantize(q), x, atol=0.1, rtol=0.1)
    amax = x.unflatten(1, (-1, 32)).abs().amax(-1)
    fraction, exponent = torch.frexp(amax)
    assert torch.equal(q.scale.int(), exponent - 1 + (fraction >= 1 - 2.0**-5).int() - 8 + 127)


def test_T17_nvfp4_global_scales():
    x = torch.tensor([[1.0, -4.0, 2.0, 0.5] * 4])
    outer = fq.quantize(x, fq.nvfp4()).scale.scale.item()
    assert outer == np.float32(4) / np.float32(2688)
    assert abs(1 / outer - 2688 / 4) < 1e-5 * 672  # compressed-tensors stores the divisor
    zero = fq.quantize(torch.zeros(2, 16), fq.nvfp4())
    assert zero.scale.scale.item() == 2.0**-126
    assert (fq.dequantize(zero) == 0).all()


def test_T17_fused_projections_share_the_largest_outer_scale():
    parts = [torch.randn(4, 32) * s for s in (1.0, 3.0, 0.2)]
    alone = [fq.quantize(p, fq.nvfp4()).scale.scale.item() for p in parts]
    fused = fq.quantize(torch.cat(parts), fq.nvfp4())
    assert fused.scale.scale.item() == max(alone)
    for i, part in enumerate(parts):
        formats.assert_same(fused[4 * i : 4 * i + 4], fq.quantize(part, fq.nvfp4(), outer_scale=max(alone)))


def test_T17_ue5m3():
    """Bias 15, 0xFF is NaN, the largest number 114688; rounding carries into the exponent."""
    layout = fq.layout("ue5m3:g32")
    pairs = {0.0: 0, 2.0**-17: 1, 7 * 2.0**-17: 7, 2.0**-14: 8, 2.0**-18: 0, 1.5 * 2.0**-17: 2}
    pairs |= {1.0: 0x78, 1.875: 0x7F, 1.97: 0x80, 2.0: 0x80, 114688.0: 0xFE, 131072.0: 0xFE, -1.0: 0}
    assert under_one(list(pairs), layout) == list(pairs.values())
