"""``tests/reference.py`` against known facts and against definitions.

Runs from the source tree, without the compiled extension.
"""

import dataclasses
import itertools
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference as ref
from hypothesis import given
from hypothesis import strategies as st

f32 = np.float32
ALL = ("gx", "gw", "gb")
RECIPES = ("default", "fast", "paper", "accurate")


def sylvester(n: int) -> np.ndarray:
    """H by definition: (-1) to the number of bits that row and column share."""
    index = np.arange(n)
    shared = index[:, None] & index[None, :]
    return np.array([[-1 if bin(v).count("1") % 2 else 1 for v in row] for row in shared])


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(f32)


def layer(rng: np.random.Generator, tokens: int, outs: int, ins: int) -> tuple[np.ndarray, ...]:
    return normal(rng, tokens, outs), normal(rng, outs, ins), normal(rng, tokens, ins)


def integers(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.integers(-8, 9, shape).astype(f32)


def test_needs_numpy_only() -> None:
    program = (
        "import sys; sys.modules['torch'] = None; sys.path.insert(0, sys.argv[1])\n"
        "import reference\n"
        "assert not any(name.split('.')[0] == 'hotcore' for name in sys.modules)"
    )
    folder = Path(__file__).resolve().parents[1]
    subprocess.run([sys.executable, "-c", program, str(folder)], check=True)


def test_philox_known_answers() -> None:
    # Random123's kat_vectors, 7 rounds
    pi = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], [0xA4093822, 0x299F31D0]
    for counter, key, words in (
        ([0] * 4, [0] * 2, "5f6fb709 0d893f64 4f121f81 4f730a48"),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, "5207ddc2 45165e59 4d8ee751 8c52f662"),
        (*pi, "4dfccaba 190a87f0 c47362ba b6b5242a"),
    ):
        got = ref.philox4x32(np.array(counter), np.array(key))
        assert " ".join(f"{word:08x}" for word in got) == words


def test_random_bytes_are_the_bytes_of_their_block() -> None:
    seed, offset, stream, purpose = 0x1234567890ABCDEF, 0xFEDCBA0987654321, 8191, 6
    got = ref.random_bytes(3, 37, (seed, offset, stream), purpose)
    for i, k in ((0, 0), (0, 15), (0, 16), (1, 36), (2, 5)):
        block = i * 3 + k // 16
        counter = [block, (stream * 8 + purpose) << 16, offset & 0xFFFFFFFF, offset >> 32]
        words = ref.philox4x32(np.array(counter), np.array([seed & 0xFFFFFFFF, seed >> 32]))
        stored = b"".join(int(word).to_bytes(4, "little") for word in words)
        assert got[i, k] == stored[k % 16]


def test_block_numbers_of_48_bits() -> None:
    block = (0xABCD << 32) + 0x12345678
    got = ref.random_words(np.array([block]), (1, 2, 3), 4)[0]
    wanted = ref.philox4x32(np.array([0x12345678, 0xABCD | 28 << 16, 2, 0]), np.array([1, 0]))
    assert got.tolist() == wanted.tolist()


ORDERS = {
    2: "0 1",
    4: "0 2 1 3",
    8: "0 4 2 3 6 1 7 5",
    16: "0 8 2 12 3 10 4 1 14 11 6 9 15 7 13 5",
    32: "0 16 4 24 6 20 8 2",
}


@pytest.mark.parametrize("block", ORDERS)
def test_lowpass_order(block: int) -> None:
    wanted = [int(row) for row in ORDERS[block].split()]
    assert ref.basis_order("lowpass", block)[: len(wanted)] == wanted


@pytest.mark.parametrize("bits", range(1, 7))
def test_sequency_counts_sign_changes(bits: int) -> None:
    changes = (np.diff(sylvester(1 << bits), axis=1) != 0).sum(axis=1)
    assert [ref.sequency(k, bits) for k in range(1 << bits)] == changes.tolist()
    for basis in ("lowpass", "sequency"):
        assert sorted(ref.basis_order(basis, 1 << bits)) == list(range(1 << bits))


@pytest.mark.parametrize("basis", ["lowpass", "sequency"])
@pytest.mark.parametrize("rank", [1, 2, 4, 8, 16])
def test_kept_rows_are_ascending(rng: np.random.Generator, basis: str, rank: int) -> None:
    x = integers(rng, 21, 3)
    padded = np.concatenate([x, np.zeros((11, 3), f32)])
    rows = sorted(ref.basis_order(basis)[:rank])
    wanted = np.concatenate([sylvester(16)[rows] @ padded[:16], sylvester(16)[rows] @ padded[16:]])
    for side in ("activation", "gradient"):
        assert np.array_equal(ref.hla(x, basis=basis, rank=rank, side=side), wanted)


def walsh_rows(folded: np.ndarray) -> list[int]:
    """Return the indices of these rows in the Sylvester matrix; fails if one is not in it."""
    n = folded.shape[1]
    spectrum = folded @ sylvester(n)
    assert (np.count_nonzero(spectrum, axis=1) == 1).all() and (spectrum.max(axis=1) == n).all()
    return spectrum.argmax(axis=1).tolist()


def kept_by(n: int, shifts: tuple[int, ...]) -> list[int]:
    """Rows that remain after folding with these shifts and an FWHT."""
    v = np.eye(n, dtype=f32)[None]
    for shift in shifts:
        v = ref.fold(v, np.array([shift]))
    return walsh_rows(ref.fwht(v[0], axis=0, block=v.shape[1]))


@pytest.mark.parametrize("a", range(1, 16))
def test_fold_keeps_the_hyperplane(a: int) -> None:
    rows = kept_by(16, (a,))
    assert rows[0] == 0 and sorted(rows) == [k for k in range(16) if bin(a & k).count("1") % 2 == 0]


def test_hyperplane_moments() -> None:
    kept = [set(kept_by(16, (a,))) for a in range(1, 16)]
    for k in range(1, 16):
        assert Fraction(sum(k in rows for rows in kept), 15) == Fraction(7, 15)
    for k, other in itertools.combinations(range(1, 16), 2):
        assert Fraction(sum({k, other} <= rows for rows in kept), 15) == Fraction(1, 5)


@pytest.mark.parametrize(("n", "rank"), [(16, 8), (16, 4), (16, 2), (8, 2), (32, 8), (2, 2)])
def test_sketch_is_unbiased_over_all_subspaces(n: int, rank: int) -> None:
    folds = (n // rank).bit_length() - 1
    choices = list(itertools.product(*(range(1, n >> j) for j in range(folds))))
    count = np.zeros(n, np.int64)
    for shifts in choices:
        rows = kept_by(n, shifts)
        assert rows[0] == 0 and len(set(rows)) == rank
        count[rows] += 1
    assert count[0] == len(choices)
    # the probability of a row times the gradient's weight is 1
    weight = Fraction(n - 1, rank - 1)
    assert all(Fraction(int(c), len(choices)) * weight == 1 for c in count[1:])


@pytest.mark.parametrize(("n", "rank"), [(16, 8), (16, 2), (16, 16), (64, 4)])
def test_sketch_rows_and_weights(n: int, rank: int) -> None:
    key, blocks = (5, 6, 7), 9
    x = np.tile(np.eye(n, dtype=f32), (blocks, 1))
    options = {"basis": "sketch", "block": n, "rank": rank, "key": key}
    activation = ref.hla(x, **options).reshape(blocks, rank, n)
    gradient = ref.hla(x, **options, side="gradient").reshape(blocks, rank, n)
    shifts = ref.sketch_folds(blocks, n, rank, key)
    for b in range(blocks):
        assert walsh_rows(activation[b]) == kept_by(n, tuple(shifts[b].tolist()))
    assert np.array_equal(gradient[:, :1], activation[:, :1])
    assert np.array_equal(gradient[:, 1:], activation[:, 1:] * (f32(n - 1) / f32(rank - 1)))


def test_sketch_draws_every_subspace_equally_often() -> None:
    shifts = ref.sketch_folds(45_000, 16, 4, 11)
    for j, size in enumerate((15, 7)):
        counts = np.bincount(shifts[:, j], minlength=size + 1)
        assert counts[0] == 0 and counts.size == size + 1
        expected = 45_000 / size
        chi_square = ((counts[1:] - expected) ** 2 / expected).sum()
        assert chi_square < 40  # 14 and 6 degrees of freedom: below 1 in 3000
    assert abs(np.corrcoef(shifts.T)[0, 1]) < 0.02


def test_sketch_words_by_definition() -> None:
    key = (99, 3, 12)
    words = ref.random_words(np.arange(20), key, 5).tolist()
    wanted = [[1 + (w[0] * 63 >> 32), 1 + (w[1] * 31 >> 32), 1 + (w[2] * 15 >> 32)] for w in words]
    assert ref.sketch_folds(20, 64, 8, key).tolist() == wanted


@given(
    samples=st.integers(0, 3), height=st.integers(1, 15), width=st.integers(1, 15),
    prefix=st.integers(0, 3), bits=st.integers(1, 6),
)  # fmt: skip
def test_layout_is_bijective(samples: int, height: int, width: int, prefix: int, bits: int) -> None:
    tokens = samples * (prefix + height * width)
    spec = ref.LowRank("lowpass", 1, 1 << bits, None, (height, width), prefix)
    body, first = ref.token_order(tokens, spec)
    assert sorted([*body.tolist(), *first.tolist()]) == list(range(tokens))
    assert first.size == samples * prefix


def test_layout_of_tiles() -> None:
    spec = ref.LowRank("lowpass", 1, 8, None, (5, 9), 2)  # tiles of 2 x 4
    body, prefix = ref.token_order(2 * 47, spec)

    def token(sample: int, row: int, column: int) -> int:
        return sample * 47 + 2 + row * 9 + column

    assert prefix.tolist() == [0, 1, 47, 48]
    steps = itertools.product(*map(range, (2, 2, 2, 2, 4)))
    tiles = [token(s, 2 * down + i, 4 * across + j) for s, down, across, i, j in steps]
    cells = itertools.product(range(2), range(5), range(9))
    left_over = [token(s, i, j) for s, i, j in cells if i == 4 or j == 8]
    assert body.tolist() == tiles + left_over


@pytest.mark.parametrize("bits", [4, 8])
def test_stochastic_rounding_by_definition(rng: np.random.Generator, bits: int) -> None:
    limit = 7 if bits == 4 else 127
    # Halves of 1/256 (the sum with the byte decides), their neighbours, and any values.
    halves = (2 * rng.integers(-256 * limit, 256 * limit, 200) + 1) / 512
    values = np.concatenate(
        [halves, np.nextafter(halves.astype(f32), f32(0)), rng.uniform(-limit, limit, 400),
         [0, limit, -limit, 2.0**-30, -(2.0**-30), np.nextafter(f32(1), f32(0))]]
    ).astype(f32)  # fmt: skip
    for inv in (f32(1), f32(limit) / f32(rng.uniform(0.1, 9))):
        v = values if inv == 1 else (values / inv * f32(1 - 2.0**-20)).astype(f32)
        u = rng.integers(0, 256, v.size, dtype=np.uint8)
        got = ref.round_codes(v, inv, bits, "stochastic", u)
        for value, byte, code in zip(v.tolist(), u.tolist(), got.tolist(), strict=True):
            # round() of a Fraction is exact, half to even
            assert code == round(256 * Fraction(value) * Fraction(float(inv)) + byte) >> 8


def test_nearest_rounding_of_the_exact_product(rng: np.random.Generator) -> None:
    inv = f32(127 / 3)
    values = np.concatenate(
        [((np.arange(-126, 127) + 0.5) / inv).astype(f32), rng.uniform(-3, 3, 400).astype(f32)]
    )
    got = ref.round_codes(values, inv, 8, "nearest")
    exact = [round(Fraction(value) * Fraction(float(inv))) for value in values.tolist()]
    assert got.tolist() == exact


def test_pseudo_stochastic_definition(rng: np.random.Generator) -> None:
    for bits, limit, h in ((4, 7, 10), (8, 127, 8)):
        v = rng.uniform(-limit, limit, 4000).astype(f32)
        v[:5] = (0, 1, -2, 0.5, limit)
        got = ref.round_codes(v, f32(1), bits, "pseudo_stochastic")
        ups = 0
        for value, code in zip(v.tolist(), got.tolist(), strict=True):
            a = abs(Fraction(value))
            whole = int(a)
            digits = f"{int((a - whole) * 2 ** (2 * h + 1)):0{2 * h + 1}b}"
            p, r = int(digits[:h], 2), int(digits[h:], 2)
            up = 2 * p + 1 > r and "1" in digits
            ups += up
            assert code == (-1 if value < 0 else 1) * min(whole + up, limit)
        assert abs(ups / v.size - 0.5) < 0.05


def test_nearest_is_half_to_even() -> None:
    v = np.array([0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 0.49999997, 6.5, 7.5], f32)
    assert ref.round_codes(v, f32(1), 4, "nearest").tolist() == [0, 2, 2, 0, -2, -2, 0, 6, 7]


@pytest.mark.parametrize("scale", ["token", "channel", "tensor"])
def test_sets_that_share_a_scale(rng: np.random.Generator, scale: str) -> None:
    x = normal(rng, 6, 9)
    codes, scales = ref.quantize(x, scale=scale, rounding="nearest")
    axis = {"token": 1, "channel": 0, "tensor": None}[scale]
    amax = np.abs(x).max(axis=axis, keepdims=True)
    assert np.array_equal(scales, np.ravel(amax / f32(127)))
    assert np.array_equal(codes, np.rint(x * (f32(127) / amax)).astype(np.int8))
    back = ref.dequantize(codes, scales, granularity=scale)
    wide = scales.reshape(np.shape(amax)) if axis is not None else scales[None]
    assert np.array_equal(back, codes.astype(f32) * wide)


def test_bf16_rounding(rng: np.random.Generator) -> None:
    words = rng.integers(0, 1 << 32, 20_000, dtype=np.uint32)
    words[:6] = (0, 0x80000000, 0x3F808000, 0x3F818000, 0x7F7F8000, 0x00000001)
    values = words.view(f32)
    values = values[np.isfinite(values)]
    below = (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(f32)  # towards zero
    above = ((below.view(np.uint32) >> 16) + 1 << 16).astype(np.uint32).view(f32)  # away from it
    exact, low, high = (v.astype(np.float64) for v in (values, below, above))
    high = np.where(np.isinf(high), np.copysign(2.0**128, high), high)
    even = (below.view(np.uint32) >> 16) % 2 == 0
    nearer = np.abs(exact - low) < np.abs(high - exact)
    tie = np.abs(exact - low) == np.abs(high - exact)
    assert tie.any()
    wanted = np.where(nearer | (tie & even), below, above)
    assert np.array_equal(ref.round_bf16(values), wanted)
    up = np.where((values > 0) & (exact != low), above, below)
    assert np.array_equal(ref.round_up_bf16(values), up)
    assert np.array_equal(ref.bf16_values(ref.bf16_bits(up)), up)
    broken = np.array([np.nan, -np.nan, np.inf, -np.inf], f32)
    for function in (ref.round_bf16, ref.round_up_bf16):
        assert ref.bf16_bits(function(broken)).tolist() == [0x7FC0, 0x7FC0, 0x7F80, 0xFF80]


def test_int4_storage_by_definition(rng: np.random.Generator) -> None:
    tokens, channels = 165, 5  # Kp 176, stored as 192
    x = normal(rng, tokens, channels) * np.exp2(rng.integers(-9, 9, (tokens, 1))).astype(f32)
    x[64:128, 1] = 0
    x[70, 2] = np.inf
    x[:, 3] = 0
    key = (3, 1, 4)
    saved = ref.compress_activation(x, ref.recipe("default"), key=key)
    assert saved.codes.shape == (channels, 192) and saved.packed.shape == (channels, 96)
    assert saved.scales.shape == (channels, 3) and saved.scales.dtype == np.uint16
    u = ref.random_bytes(channels, 176, key, 3)
    for c, g in itertools.product(range(channels), range(3)):
        part = x[64 * g : 64 * (g + 1), c]
        where = np.s_[c, 64 * g : 64 * g + part.size]
        code, amax, stored = saved.codes[where], np.abs(part).max(), saved.scales[c, g]
        scale = ref.bf16_values(stored)
        if amax == 0 or not np.isfinite(amax):
            assert stored == (0 if amax == 0 else 0x7FC0) and not code.any()
            continue
        assert ref.bf16_values(stored - np.uint16(1)) < amax / f32(7) <= scale
        wanted = ref.round_codes(part, f32(1) / scale, 4, "stochastic", u[where])
        assert np.array_equal(code, wanted)
    assert not saved.codes[:, tokens:].any()
    assert np.array_equal(ref.unpack_int4(saved.packed), saved.codes)


def test_back_to_int8_by_definition(rng: np.random.Generator) -> None:
    tokens, channels, depth = 150, 4, 160
    x = normal(rng, tokens, channels) * np.exp2(np.arange(tokens) // 64 * 3)[:, None].astype(f32)
    x[3, 2] = np.nan
    x[:, 3] = 0
    saved = ref.compress_activation(x, key=8)
    codes, scale = ref.requantize(saved, (9, 9, 9))
    assert codes.shape == (channels, depth)
    u = ref.random_bytes(channels, depth, (9, 9, 9), 6)
    groups = ref.bf16_values(saved.scales)
    for c in range(2):
        amax = f32(7) * groups[c].max()
        assert scale[c] == amax / f32(127)
        factor = np.repeat(groups[c] * (f32(127) / amax), 64)[:depth]
        values = saved.codes[c, :depth].astype(f32)
        assert np.array_equal(codes[c], ref.round_codes(values, factor, 8, "stochastic", u[c]))
    assert np.isnan(scale[2]) and scale[3] == 0 and not codes[2:].any()
    assert np.array_equal(ref.requantize(saved)[0], ref.requantize(saved, 8)[0])


def test_token_exponents_by_definition(rng: np.random.Generator) -> None:
    x = normal(rng, 40, 37) * np.exp2(rng.integers(-130, 120, (40, 1))).astype(f32)
    x[3] = 0
    x[4, 5], x[5, 6] = np.nan, -np.inf
    x[6] *= 0
    x[6, 8] = 3
    exponents = ref.token_exponents(x)
    with np.errstate(all="ignore"):
        mean = np.abs(x.astype(np.float64)).mean(1)
    for token, size in enumerate(mean):
        if not np.isfinite(size):
            assert exponents[token] == 127
        elif np.abs(x[token]).max() < 2.0**-100:
            assert exponents[token] == 27
        else:  # the largest power of two not above, except for the fixed point's last digits
            at, below = np.floor(np.log2(size * np.array([1 + 2**-9, 1 - 2**-9])))
            assert np.clip(below, -100, 100) <= exponents[token] - 127.0 <= np.clip(at, -100, 100)
    assert exponents[6] == 127 + np.floor(np.log2(3 / 37))


@pytest.mark.parametrize("storage", ["int8", "int4"])
def test_equalised_tokens_come_back(rng: np.random.Generator, storage: str) -> None:
    """If all t are equal, the codes of x / t times t are the codes of x."""
    x = normal(rng, 130, 9)
    plain = ref.recipe("default", storage=storage)
    config = dataclasses.replace(plain, equalize_tokens=True)
    sizes = np.exp2(rng.integers(-20, 20, (130, 1))).astype(f32)
    saved = ref.compress_activation(x * sizes, config, key=3)
    t = np.exp2(saved.exponents.astype(np.float64) - 127).astype(f32)[:, None]
    inner = ref.compress_activation(x * sizes / t, plain, key=3)
    assert np.array_equal(saved.codes, inner.codes) and np.array_equal(saved.scales, inner.scales)
    back = ref.decompress_activation(saved)
    assert np.array_equal(back, ref.decompress_activation(inner) * t)
    limit = {"int8": 0.05, "int4": 0.5}[storage]
    lost = np.linalg.norm(back - x * sizes, axis=1) / np.linalg.norm(x * sizes, axis=1)
    assert np.median(lost) < limit


def test_sums_are_exact_beyond_32_bits() -> None:
    k = 200_000
    a = np.full((2, k), 127, np.int8)
    a[1, ::2] = -127
    a[1, 0] = 1
    b = np.full((1, k), 127, np.int8)
    sums = ref.integer_product(a, b)
    assert sums.ravel().tolist() == [127 * 127 * k, 127 + 127 * 127]
    got = ref.gemm_int8(a, b, np.ones(1, f32), np.ones(1, f32))
    assert np.array_equal(got, sums.astype(f32))
    top = ref.gemm_int8(a[:1, :133_143], b[:, :133_143])
    assert top.dtype == np.int32 and top[0, 0] == 127 * 127 * 133_143


def test_nearest_codes_of_the_research_notes() -> None:
    """Values of research/golden_small.json, which another program computed."""
    t, o, i = np.ogrid[:21, :20, :18]
    x = ((5 * t + 9 * i) % 13 - 6).astype(f32)[:, 0]
    rows = (0, 2, 3, 8, 10, 11, 12, 14)  # the other definition of a tie

    def kept(**fields: Any) -> tuple[np.ndarray, np.ndarray]:
        projected = ref.hla(x, basis="lowpass", **fields)
        return ref.quantize(projected.T, scale="tensor", rounding="nearest")

    codes, scale = kept(rank=8, rows=rows)
    assert codes[:, :16].sum() == -39 and float(scale[0]).hex() == "0x1.c3870e0000000p-3"
    wanted = [-14, -9, -5, 0, 5, 9, 14, 18, 23, -32, 32, -23, -18, -14, -9, -5, 0, 5]
    assert codes[:, 0].tolist() == wanted
    codes, scale = kept(rank=16)
    assert codes.sum() == 3 and float(scale[0]).hex() == "0x1.a3468e0000000p-2"
    gy = ((7 * t + 3 * o) % 11 - 5).astype(f32)[:, :, 0]
    w = ((3 * o + 11 * i) % 17 - 8).astype(f32)[0]
    config = ref.recipe("paper", gx_rounding="nearest")
    gx = ref.backward_linear(gy, w, None, config=config, need=("gx",)).gx
    assert gx[0, 0] == pytest.approx(float.fromhex("-0x1.79d0fcp+6"), rel=2**-22)


def test_operands_by_definition(rng: np.random.Generator) -> None:
    """Transform rows, then quantise with a scale per row and the operand's random bytes."""
    gy, w, x = layer(rng, 37, 19, 7)
    key, kept = (1, 2, 3), {"basis": "sketch", "rank": 8, "key": (1, 2, 3)}
    config = ref.recipe("fast")

    def padded(values: np.ndarray, columns: int) -> np.ndarray:
        return np.pad(values, ((0, 0), (0, columns - values.shape[1])))

    low_x, low_gy = ref.hla(x, **kept), ref.hla(gy, **kept, side="gradient")
    for values, purpose, codes in (
        (ref.fwht(padded(gy, 32)), 1, ref.quantize_gradient_rows(gy, config, key)[0]),
        (ref.fwht(padded(w.T, 32)), 2, ref.quantize_weight(w, config)[0]),
        (padded(low_x.T, 32), 3, ref.compress_activation(x, config, key=key).codes),
        (padded(low_gy.T, 32), 4, ref.quantize_gradient_columns(gy, config, key)[0]),
    ):
        inv = f32(127) / np.abs(values).max(axis=1, keepdims=True)
        u = ref.random_bytes(*values.shape, key, purpose)
        rounding = "nearest" if purpose == 2 else "stochastic"
        assert np.array_equal(codes, ref.round_codes(values, inv, 8, rounding, u))


@pytest.mark.parametrize("name", RECIPES)
def test_products_of_the_integers(rng: np.random.Generator, name: str) -> None:
    gy, w, x = layer(rng, 37, 19, 7)
    config = ref.recipe(name)
    saved = ref.compress_activation(x, config, key=1)
    grads = ref.backward_linear(gy, w, saved, need=ALL, key=2)  # the configuration of saved
    a, s_a = ref.quantize_gradient_rows(gy, config, 2)
    b, s_b = ref.quantize_weight(w, config)
    assert np.array_equal(grads.gx, ref.gemm_int8(a, b, s_a, s_b, divisor=16))
    a, s_a = ref.quantize_gradient_columns(gy, config, 2, 1, saved.exponents)
    b, s_b = (saved.codes, saved.scales) if saved.packed is None else ref.requantize(saved, 2)
    divisor = 1 if config.basis == "full" else 16
    assert np.array_equal(grads.gw, ref.gemm_int8(a, b, s_a, s_b, divisor=divisor))
    only = ref.backward_linear(gy, None, saved, need=("gw",), key=2)
    assert only.gx is None and only.gb is None and np.array_equal(only.gw, grads.gw)


def test_scale_per_token(rng: np.random.Generator) -> None:
    gy, w, x = layer(rng, 37, 6, 4)
    gy *= np.exp2(rng.integers(-8, 8, (37, 1))).astype(f32)
    for name in ("default", "fast", "accurate"):
        config = ref.recipe(name, gw_scale="token")
        saved = ref.compress_activation(x, config, key=3)
        got = ref.backward_linear(gy, w, saved, need=("gw",), key=3).gw
        a, s_a = ref.quantize_gradient_columns(gy, config, 3)
        b, s_b = (saved.codes, saved.scales) if saved.packed is None else ref.requantize(saved, 3)
        assert s_a.shape == (a.shape[1],)
        divisor = f32(1 if config.basis == "full" else 16)
        for m, n in itertools.product(range(6), range(4)):
            acc = f32(0)
            for k in range(a.shape[1]):
                acc = f32(acc + f32(f32(f32(a[m, k]) * s_a[k]) * f32(b[n, k])))
            assert got[m, n] == f32(f32(acc * s_b[n % s_b.size]) / divisor)


@pytest.mark.parametrize("tokens", [0, 1, 21, 1024, 2500])
def test_gb(rng: np.random.Generator, tokens: int) -> None:
    gy = normal(rng, tokens, 3) + f32(1)
    got = ref.bias_gradient(gy)
    exact = gy.astype(np.float64).sum(axis=0)
    assert (np.abs(got - exact) <= 68 * 2.0**-24 * np.abs(gy).sum(axis=0, dtype=np.float64)).all()
    padded = np.pad(gy, ((0, -tokens % 16), (0, 0)))
    total = np.zeros(3, np.float64)
    for start in range(0, len(padded), 1024):
        run = np.zeros(3, f32)
        for block in range(start, min(start + 1024, len(padded)), 16):
            v = list(padded[block : block + 16])
            while len(v) > 1:
                v = [v[i] + v[i + 1] for i in range(0, len(v), 2)]
            run = run + v[0]
        total += run
    assert np.array_equal(got, total.astype(f32))


def test_fields_are_those_of_the_package() -> None:
    hotcore = pytest.importorskip("hotcore", exc_type=ImportError)
    for name in RECIPES:
        package = hotcore.HotConfig.recipe(name)
        assert dataclasses.asdict(package) == dataclasses.asdict(ref.recipe(name))
