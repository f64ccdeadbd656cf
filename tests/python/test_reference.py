"""``hotcore.reference`` against known facts, against definitions, and its golden vectors.

Runs from the source tree, without the compiled extension: see ``make_golden.load_reference``.
"""

from __future__ import annotations

import dataclasses
import itertools
import subprocess
import sys
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from golden import make_golden
from hypothesis import given
from hypothesis import strategies as st

ref = make_golden.ref
f32 = np.float32
ROUNDINGS = ("nearest", "stochastic", "pseudo_stochastic")
RECIPES = ("default", "fast", "paper", "accurate", "compact")
ALL = ("gx", "gw", "gb")


def sylvester(n: int) -> np.ndarray:
    """H by definition: (-1) to the number of bits that row and column share."""
    index = np.arange(n)
    shared = index[:, None] & index[None, :]
    return np.array([[-1 if bin(v).count("1") % 2 else 1 for v in row] for row in shared])


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(f32)


def integers(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.integers(-8, 9, shape).astype(f32)


def layer(rng: np.random.Generator, tokens: int, outs: int, ins: int) -> tuple[np.ndarray, ...]:
    return normal(rng, tokens, outs), normal(rng, outs, ins), normal(rng, tokens, ins)


def distance(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def test_needs_numpy_only() -> None:
    program = (
        "import sys; sys.modules['torch'] = None; sys.path.insert(0, sys.argv[1])\n"
        "import make_golden\n"
        "assert not any(name.split('.')[0] == 'hotcore' for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program, str(make_golden.FOLDER)], check=True)


# --------------------------------------------------------------------------------------------- FWHT


def test_fwht_golden() -> None:
    got = ref.fwht(np.arange(1, 17, dtype=f32))
    assert got.tolist() == [136, -8, -16, 0, -32, 0, 0, 0, -64, 0, 0, 0, 0, 0, 0, 0]
    third = ref.fwht(np.eye(16, dtype=f32)[3])
    assert third.tolist() == [1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1, 1]


@pytest.mark.parametrize("block", [1, 2, 4, 16, 64, 256])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_fwht_is_the_sylvester_matrix(rng: np.random.Generator, block: int, axis: int) -> None:
    shape = [3, 2, 5]
    shape[axis] = 2 * block
    x = integers(rng, *shape)
    lines = np.moveaxis(x, axis, -1)
    blocks = lines.reshape(*lines.shape[:-1], 2, block)
    wanted = np.moveaxis((blocks @ sylvester(block).astype(f32)).reshape(lines.shape), -1, axis)
    assert np.array_equal(ref.fwht(x, axis=axis, block=block), wanted)


def test_fwht_error_bound(rng: np.random.Generator) -> None:
    x = normal(rng, 50, 256) * np.exp2(rng.integers(-20, 20, (50, 256))).astype(f32)
    wanted = x.astype(np.float64) @ sylvester(256)
    bound = 8 * 2.0**-24 * np.abs(x.astype(np.float64)).sum(axis=1, keepdims=True) * (1 + 1e-5)
    assert (np.abs(ref.fwht(x, block=256) - wanted) <= bound).all()


def test_fwht_rounds_once(rng: np.random.Generator) -> None:
    x = normal(rng, 40, 64).astype(np.float16)
    wide = ref.fwht(x.astype(f32), block=64)
    assert ref.fwht(x, block=64).dtype == np.float16
    assert np.array_equal(ref.fwht(x, block=64), wide.astype(np.float16))
    assert np.array_equal(ref.fwht(x, block=64, out_dtype="bfloat16"), ref.round_bf16(wide))


@pytest.mark.parametrize(("size", "block"), [(20, 16), (24, 12), (0, 0), (65536, 65536)])
def test_fwht_refuses(size: int, block: int) -> None:
    with pytest.raises(ValueError, match="block"):
        ref.fwht(np.zeros(size, f32), block=block)


# -------------------------------------------------------------------------------------- Random bits


def test_philox_known_answers() -> None:
    # Random123's kat_vectors, 7 rounds
    for counter, key, words in (
        ([0] * 4, [0] * 2, "5f6fb709 0d893f64 4f121f81 4f730a48"),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, "5207ddc2 45165e59 4d8ee751 8c52f662"),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            "4dfccaba 190a87f0 c47362ba b6b5242a",
        ),
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


@pytest.mark.parametrize("key", [-1, 1 << 64, (0, 1 << 64), (0, 0, 8192)])
def test_key_range(key: Any) -> None:
    with pytest.raises(ValueError, match="key"):
        ref.random_bytes(1, 1, key, 0)


# -------------------------------------------------------------------------------------------- Bases

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


def test_sequency_order() -> None:
    wanted = [0, 8, 12, 4, 6, 14, 10, 2, 3, 11, 15, 7, 5, 13, 9, 1]
    assert ref.basis_order("sequency") == wanted


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
    assert ref.hla_rows(21, basis=basis, rank=rank) == 2 * rank


def test_row_list(rng: np.random.Generator) -> None:
    x = integers(rng, 16, 2)
    got = ref.hla(x, basis="lowpass", rows=[12, 0, 3])
    assert np.array_equal(got, sylvester(16)[[0, 3, 12]] @ x)


def test_full_is_the_identity(rng: np.random.Generator) -> None:
    x = normal(rng, 37, 2)
    got = ref.hla(x, basis="full", rank=3, token_grid=(14, 14), prefix_tokens=5)
    assert np.array_equal(got, x)
    assert ref.hla_rows(37, basis="full") == 37


@pytest.mark.parametrize(
    "options",
    [
        {"basis": "lowpass", "rank": 0},
        {"basis": "lowpass", "rank": 17},
        {"basis": "lowpass", "rows": [1, 1]},
        {"basis": "lowpass", "rows": [16]},
        {"basis": "sequency", "rows": [1]},
        {"basis": "sketch", "rank": 1},
        {"basis": "sketch", "rank": 6},
        {"basis": "sketch", "rank": 2, "block": 64},
        {"basis": "lowpass", "rank": 2, "block": 128},
        {"basis": "haar"},
        {"basis": "lowpass", "prefix_tokens": 1},
        {"basis": "lowpass", "token_grid": (3, 5)},
        {"side": "weight"},
    ],
)
def test_hla_refuses(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="rank|rows|block|basis|prefix_tokens|token_grid|side"):
        ref.hla(np.zeros((16, 1), f32), **options)


# ------------------------------------------------------------------------------------------- Sketch


def walsh_rows(folded: np.ndarray) -> list[int]:
    """Which rows of the Sylvester matrix these rows are; fails unless each is one."""
    n = folded.shape[1]
    spectrum = folded @ sylvester(n)
    assert (np.count_nonzero(spectrum, axis=1) == 1).all() and (spectrum.max(axis=1) == n).all()
    return spectrum.argmax(axis=1).tolist()


def kept_by(n: int, shifts: tuple[int, ...]) -> list[int]:
    """Rows that folding with these shifts and an FWHT keep."""
    v = np.eye(n, dtype=f32)[None]
    for shift in shifts:
        v = ref.fold(v, np.array([shift]))
    return walsh_rows(ref.fwht(v[0], axis=0, block=v.shape[1]))


@pytest.mark.parametrize("a", range(1, 16))
def test_fold_keeps_the_hyperplane(a: int) -> None:
    rows = kept_by(16, (a,))
    assert rows[0] == 0
    assert sorted(rows) == [k for k in range(16) if bin(a & k).count("1") % 2 == 0]


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
    # probability of being kept, times the gradient's weight: 1 for every row
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


def test_expectation_of_gw(rng: np.random.Generator) -> None:
    gy, w, x = layer(rng, 21, 5, 4)
    plain = gy.astype(np.float64).T @ x
    config = ref.recipe("fast")
    draws = np.array(
        [
            ref.backward_linear(gy, w, x, config=config, need=("gw",), key=(7, offset)).gw
            for offset in range(600)
        ]
    ).astype(np.float64)
    z = (draws.mean(axis=0) - plain) / (draws.std(axis=0) / np.sqrt(len(draws)))
    assert np.abs(z).max() < 4.5 and 0.5 < np.sqrt((z**2).mean()) < 1.6
    # A fixed basis instead has the expectation g_y^T P x, which is another.
    low = ref.recipe("fast", basis="lowpass")
    many = [
        ref.backward_linear(gy, w, x, config=low, need=("gw",), key=(7, offset)).gw
        for offset in range(50)
    ]
    kept = {"basis": "lowpass", "rank": 8}
    projected = ref.hla(gy, **kept, side="gradient").T @ ref.hla(x, **kept) / 16
    assert distance(np.mean(many, axis=0), projected) < 0.01
    assert distance(projected, plain) > 0.3


# ------------------------------------------------------------------------------------- Token layout


@given(
    samples=st.integers(0, 3),
    height=st.integers(1, 15),
    width=st.integers(1, 15),
    prefix=st.integers(0, 3),
    bits=st.integers(1, 6),
)
def test_layout_is_a_bijection(
    samples: int, height: int, width: int, prefix: int, bits: int
) -> None:
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
    tiles = [
        token(s, 2 * down + i, 4 * across + j)
        for s in range(2)
        for down in range(2)
        for across in range(2)
        for i in range(2)
        for j in range(4)
    ]
    left_over = [
        token(s, i, j) for s in range(2) for i in range(5) for j in range(9) if i == 4 or j == 8
    ]
    assert body.tolist() == tiles + left_over


def test_prefix_rows_are_appended_with_their_factor(rng: np.random.Generator) -> None:
    x = integers(rng, 2 * 37, 3)
    for basis in ("lowpass", "sketch"):
        options = {"basis": basis, "block": 32, "rank": 4, "token_grid": (5, 7), "prefix_tokens": 2}
        for side, factor in (("activation", 4), ("gradient", 8)):  # 2^floor(5/2), 2^ceil(5/2)
            got = ref.hla(x, **options, side=side)
            assert got.shape[0] == ref.hla_rows(74, **options) == 3 * 4 + 4
            assert np.array_equal(got[-4:], x[[0, 1, 37, 38]] * factor)


@pytest.mark.parametrize("tokens", [1, 21, 37, 197])
@pytest.mark.parametrize("block", [2, 16, 64])
def test_padding_is_exact(rng: np.random.Generator, tokens: int, block: int) -> None:
    gy, x = integers(rng, tokens, 5), integers(rng, tokens, 3)
    for basis in ("lowpass", "sequency", "sketch"):
        options = {"basis": basis, "block": block, "rank": block}
        product = ref.hla(gy, **options, side="gradient").T @ ref.hla(x, **options)
        assert np.array_equal(product / block, gy.T @ x)


@pytest.mark.parametrize("block", [8, 16, 32])
def test_padding_is_exact_with_a_layout(rng: np.random.Generator, block: int) -> None:
    for grid, prefix, samples in (((14, 14), 1, 2), ((5, 7), 2, 3), ((1, 3), 0, 4)):
        tokens = samples * (prefix + grid[0] * grid[1])
        gy, x = integers(rng, tokens, 5), integers(rng, tokens, 3)
        options = {"basis": "lowpass", "block": block, "rank": block}
        layout = {"token_grid": grid, "prefix_tokens": prefix}
        product = ref.hla(gy, **options, **layout, side="gradient").T @ ref.hla(
            x, **options, **layout
        )
        assert np.array_equal(product / block, gy.T @ x)


# ----------------------------------------------------------------------------------------- Rounding


@pytest.mark.parametrize("bits", [4, 8])
def test_stochastic_rounding_by_definition(rng: np.random.Generator, bits: int) -> None:
    limit = 7 if bits == 4 else 127
    # Halves of 1/256, where the sum with the byte decides; their neighbours; anything.
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


def test_stochastic_rounding_is_unbiased(rng: np.random.Generator) -> None:
    values = rng.uniform(-6.9, 6.9, 400).astype(f32)
    values[0] = 7  # the scale is 1
    draws = np.array(
        [ref.quantize(values[None], bits=4, key=(3, offset))[0][0] for offset in range(2000)]
    )
    fraction = values.astype(np.float64) - np.floor(values.astype(np.float64))
    used = (fraction > 0.05) & (fraction < 0.95)
    spread = np.sqrt(fraction * (1 - fraction) / len(draws))
    z = ((draws.mean(axis=0) - values) / np.where(used, spread, 1))[used]
    assert used.sum() > 300
    assert abs(z.mean()) < 4 / np.sqrt(z.size) and abs(z.std() - 1) < 4 / np.sqrt(2 * z.size)


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


def test_integers_stay_where_they_are() -> None:
    for bits, limit in ((4, 7), (8, 127)):
        v = np.arange(-limit, limit + 1).astype(f32)
        for rounding in ROUNDINGS:
            for byte in (0, 255):
                u = np.full(v.shape, byte, np.uint8)
                assert np.array_equal(ref.round_codes(v, f32(1), bits, rounding, u), v)


def test_nearest_is_half_to_even() -> None:
    v = np.array([0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 0.49999997, 6.5, 7.5], f32)
    assert ref.round_codes(v, f32(1), 4, "nearest").tolist() == [0, 2, 2, 0, -2, -2, 0, 6, 7]


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("bits", [4, 8])
def test_codes_stay_in_range(rng: np.random.Generator, rounding: str, bits: int) -> None:
    limit = 7 if bits == 4 else 127
    x = normal(rng, 40, 33) * np.exp2(rng.integers(-90, 120, (40, 1))).astype(f32)
    codes, scale = ref.quantize(x, bits=bits, rounding=rounding, key=4)
    assert codes.dtype == np.int8 and codes.min() == -limit and codes.max() == limit
    assert np.array_equal(scale, np.abs(x).max(axis=1) / f32(limit))
    error = np.abs(codes * scale[:, None].astype(np.float64) - x)
    allowed = 0.5 if rounding == "nearest" else 1
    assert (error <= scale[:, None] * (allowed + 1e-4)).all()


@pytest.mark.parametrize("scale", ["row", "column", "tensor"])
def test_sets_that_share_a_scale(rng: np.random.Generator, scale: str) -> None:
    x = normal(rng, 6, 9)
    codes, scales = ref.quantize(x, scale=scale, rounding="nearest")
    axis = {"row": 1, "column": 0, "tensor": None}[scale]
    amax = np.abs(x).max(axis=axis, keepdims=True)
    assert np.array_equal(scales, np.ravel(amax / f32(127)))
    assert np.array_equal(codes, np.rint(x * (f32(127) / amax)).astype(np.int8))
    back = ref.dequantize(codes, scales, granularity=scale)
    wide = scales.reshape(np.shape(amax)) if axis is not None else scales[None]
    assert np.array_equal(back, codes.astype(f32) * wide)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("bits", [4, 8])
def test_sets_without_a_scale(rounding: str, bits: int) -> None:
    least = f32(2.0**-100)
    below = np.nextafter(least, f32(0))
    x = np.array(
        [
            [1, 2, np.nan],
            [1, -np.inf, 3],
            [np.inf, np.nan, -np.nan],
            [0, -0.0, 0],
            [below, -below, 0],
            [least, 0, -least],
            [3, 2, 1],
        ],
        f32,
    )
    limit = 7 if bits == 4 else 127
    codes, scale = ref.quantize(x, bits=bits, rounding=rounding, key=1)
    assert np.isnan(scale[:3]).all() and (scale[3:5] == 0).all()
    assert not codes[:5].any()
    assert scale[5] == least / f32(limit) and codes[5].tolist() == [limit, 0, -limit]
    assert scale[6] == f32(3) / f32(limit) and codes[6, 0] == limit
    codes, scale = ref.quantize(x, bits=bits, scale="tensor", rounding=rounding, key=1)
    assert np.isnan(scale).all() and not codes.any()
    value = ref.dequantize(codes, scale, granularity="tensor")
    assert np.isnan(value).all()


def test_key_is_replayable(rng: np.random.Generator) -> None:
    x = normal(rng, 20, 50)
    first = ref.quantize(x, key=(1, 2, 3))[0]
    assert np.array_equal(ref.quantize(x, key=(1, 2, 3))[0], first)
    for other in ((2, 2, 3), (1, 3, 3), (1, 2, 4), (1 | 1 << 32, 2, 3), (1, 2 | 1 << 32, 3)):
        assert not np.array_equal(ref.quantize(x, key=other)[0], first)


# -------------------------------------------------------------------------------- bfloat16 and INT4


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


@given(rows=st.integers(0, 5), cols=st.integers(0, 9), seed=st.integers(0, 99))
def test_pack_round_trip(rows: int, cols: int, seed: int) -> None:
    codes = np.random.default_rng(seed).integers(-8, 8, (rows, cols)).astype(np.int8)
    packed = ref.pack_int4(codes)
    assert packed.shape == (rows, (cols + 1) // 2) and packed.dtype == np.uint8
    assert np.array_equal(ref.unpack_int4(packed, cols), codes)
    whole = ref.unpack_int4(packed)
    assert whole.shape == (rows, 2 * packed.shape[1]) and not whole[:, cols:].any()


def test_pack_is_low_nibble_first() -> None:
    codes = np.array([[1, -2, 7], [-8, 0, -1]], np.int8)
    assert ref.pack_int4(codes).tolist() == [[0xE1, 0x07], [0x08, 0x0F]]


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
    for c in range(channels):
        for g in range(3):
            part = x[64 * g : 64 * (g + 1), c]
            code = saved.codes[c, 64 * g : 64 * g + part.size]
            amax = np.abs(part).max()
            if not np.isfinite(amax):
                assert saved.scales[c, g] == 0x7FC0 and not code.any()
                continue
            scale = ref.bf16_values(saved.scales[c, g])
            if amax == 0:
                assert scale == 0 and not code.any()
                continue
            assert scale >= amax / f32(7)
            assert ref.bf16_values(saved.scales[c, g] - np.uint16(1)) < amax / f32(7)
            bytes_ = u[c, 64 * g : 64 * g + part.size]
            assert np.array_equal(
                code, ref.round_codes(part, f32(1) / scale, 4, "stochastic", bytes_)
            )
    assert not saved.codes[:, tokens:].any()
    assert np.array_equal(ref.unpack_int4(saved.packed), saved.codes)


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_back_to_int8_by_definition(rng: np.random.Generator, rounding: str) -> None:
    tokens, channels = 150, 4
    x = normal(rng, tokens, channels) * np.exp2(np.arange(tokens) // 64)[:, None].astype(f32)
    x[3, 2] = np.nan
    x[:, 3] = 0
    config = ref.recipe("default", x_rounding=rounding)
    saved = ref.compress_activation(x, config, key=8)
    codes, scale = ref.requantize(saved, (9, 9, 9))
    assert codes.shape == (channels, 160)
    u = ref.random_bytes(channels, 160, (9, 9, 9), 6)
    groups = ref.bf16_values(saved.scales)
    for c in range(2):
        amax = f32(7) * groups[c].max()
        assert scale[c] == amax / f32(127)
        factor = np.repeat(groups[c] * (f32(127) / amax), 64)[:160]
        values = saved.codes[c, :160].astype(f32)
        how = "stochastic" if rounding == "stochastic" else "nearest"
        assert np.array_equal(codes[c], ref.round_codes(values, factor, 8, how, u[c]))
    assert np.isnan(scale[2]) and scale[3] == 0 and not codes[2:].any()
    assert np.array_equal(ref.requantize(saved)[0], ref.requantize(saved, 8)[0])


def test_int4_storage_error(rng: np.random.Generator) -> None:
    x = normal(rng, 197, 20)
    x[50] *= 100  # one outlier token costs its group, not its channel
    saved = ref.compress_activation(x, ref.recipe("default", x_rounding="nearest"))
    groups = np.repeat(ref.bf16_values(saved.scales), 64, axis=1)[:, :197]
    stored = saved.codes[:, :197] * groups
    assert (np.abs(stored - x.T) <= groups * 0.5001).all()
    assert distance(stored[:, 64:], x.T[:, 64:]) < 0.2


def rotated_by_definition(x: np.ndarray, tokens: int, key: tuple[int, int, int]) -> np.ndarray:
    """H D x of one channel, in fp64: ``[K]``."""
    depth = -(-tokens // 64) * 64
    padded = np.zeros(depth)
    padded[:tokens] = x
    for block in range(depth // 64):
        words = ref.random_words(np.array([block]), key, 7)[0]
        for j in range(64):
            if int(words[j // 32]) >> (j % 32) & 1:
                padded[64 * block + j] *= -1
    h = np.array([[(-1) ** (i & j).bit_count() for j in range(64)] for i in range(64)])
    return (h @ padded.reshape(-1, 64).T).T.reshape(-1)


def test_rotated_storage_by_definition(rng: np.random.Generator) -> None:
    tokens, channels, key = 165, 4, (3, 1, 4)
    # Integers, so that every sum of the transform is exact.
    x = np.rint(100 * rng.standard_normal((tokens, channels))).astype(f32)
    x[64:128, 1] = 0
    x[70, 2] = np.inf
    saved = ref.compress_activation(x, ref.recipe("default", storage="rht2"), key=key)
    assert saved.codes.shape == (channels, 192) and saved.scales.shape == (channels, 3)
    assert saved.packed.shape == (channels, 192 // 4)
    u = ref.random_bytes(1, 192, key, 3)[0].astype(int)
    for c in range(channels):
        with np.errstate(invalid="ignore"):
            y = rotated_by_definition(x[:, c], tokens, key)
        for b in range(3):
            part = slice(64 * b, 64 * (b + 1))
            code, byte = saved.codes[c, part].astype(int), u[part]
            if not np.isfinite(y[part]).all():
                assert saved.scales[c, b] == 0x7FC0 and not code.any()
                continue
            scale = float(ref.bf16_values(saved.scales[c, b]))
            if not y[part].any():
                assert scale == 0 and not code.any()
                continue
            amax = np.abs(y[part]).max()
            step = min(amax, 1.75 * np.sqrt((y[part] ** 2).mean())) / 1.5
            # Floor of value and dither, in 256ths; one 256th of room for the rounding of fp32.
            sums = np.clip(256 * y[part] / step, -384, 384) + byte + 384
            assert ((code == (sums - 0.51) // 256) | (code == (sums + 0.51) // 256)).all()
            values = (512 * code + 511 - 2 * byte - 1024) / 512
            assert (np.abs(values) < 2).all()
            # <y, s values> = <y, y>
            assert scale * (y[part] @ values) == pytest.approx(y[part] @ y[part], rel=2**-8)
    unpacked = np.stack([saved.packed >> (2 * j) & 3 for j in range(4)], -1)
    assert np.array_equal(unpacked.reshape(saved.codes.shape), saved.codes)


def test_rotated_storage_back_to_int8(rng: np.random.Generator) -> None:
    tokens, channels = 150, 3
    x = normal(rng, tokens, channels) * np.exp2(np.arange(tokens) // 64 * 3)[:, None].astype(f32)
    x[3, 2] = np.nan
    saved = ref.compress_activation(x, ref.recipe("default", storage="rht2"), key=8)
    codes, scale = ref.requantize(saved, (9, 9, 9))
    assert codes.shape == (channels, 192) and np.isnan(scale[2]) and not codes[2].any()
    groups = ref.bf16_values(saved.scales)
    u = ref.random_bytes(channels, 192, (9, 9, 9), 6)
    for c in range(2):
        amax = f32(2) * groups[c].max()
        assert scale[c] == amax / f32(127)
        factor = np.repeat(groups[c] * (f32(127) / amax), 64)
        dither = ref.random_bytes(1, 192, 8, 3)[0].astype(int)
        values = (saved.codes[c] - 2 + (511 - 2 * dither) / 512).astype(f32)
        assert np.array_equal(codes[c], ref.round_codes(values, factor, 8, "stochastic", u[c]))


def test_the_cut_off_scale_is_positive(rng: np.random.Generator) -> None:
    """rht2: whatever the 64 values are, the cut-off ones outweigh what dither turns below 0."""
    u = rng.integers(0, 256, (300, 64)).astype(np.uint8)
    for spikes in range(65):
        y = rng.choice([-1.0, 1.0], (300, 64)) * rng.uniform(0, 0.6, (300, 1))
        y[:, :spikes] *= rng.uniform(1, 30, (300, 1))
        y = y.astype(f32)
        reach = np.minimum(
            np.abs(y).max(1, keepdims=True), f32(1.75) * np.sqrt((y * y).mean(1, keepdims=True))
        )
        values = ref._code_values(ref._dithered(y, f32(1.5) / reach, u), u)
        assert ((y * values).sum(1) > 0).all(), spikes


def test_token_exponents_by_definition(rng: np.random.Generator) -> None:
    x = normal(rng, 40, 37) * np.exp2(rng.integers(-130, 120, (40, 1))).astype(f32)
    x[3] = 0
    x[4, 5], x[5, 6] = np.nan, -np.inf
    x[6] *= 0
    x[6, 8] = 3
    found = ref.token_exponents(x)
    with np.errstate(all="ignore"):
        mean = np.abs(x.astype(np.float64)).mean(1)
    for token, size in enumerate(mean):
        if not np.isfinite(size):
            assert found[token] == 127
        elif np.abs(x[token]).max() < 2.0**-100:
            assert found[token] == 27
        else:  # the power of two at or below, but for the fixed point's last digits
            at, below = np.floor(np.log2(size * np.array([1 + 2**-9, 1 - 2**-9])))
            assert np.clip(below, -100, 100) <= found[token] - 127.0 <= np.clip(at, -100, 100)
    assert found[6] == 127 + np.floor(np.log2(3 / 37))


@pytest.mark.parametrize("storage", ["int8", "int4", "rht2"])
def test_equalised_tokens_come_back(rng: np.random.Generator, storage: str) -> None:
    """What is kept of x / t, times t, is what is kept of x where all t are alike."""
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
    limit = {"int8": 0.05, "int4": 0.5, "rht2": 1.2}[storage]
    lost = np.linalg.norm(back - x * sizes, axis=1) / np.linalg.norm(x * sizes, axis=1)
    assert np.median(lost) < limit


# --------------------------------------------------------------------------------------------- GEMM


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
    with pytest.raises(ValueError, match="133143"):
        ref.gemm_int8(a, b)
    top = ref.gemm_int8(a[:1, :133_143], b[:, :133_143])
    assert top.dtype == np.int32 and top[0, 0] == 127 * 127 * 133_143


@pytest.mark.parametrize("out_dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("accumulate", [False, True])
def test_gemm_order_of_rounding(rng: np.random.Generator, out_dtype: str, accumulate: bool) -> None:
    a = rng.integers(-127, 128, (5, 300)).astype(np.int8)
    b = rng.integers(-127, 128, (4, 300)).astype(np.int8)
    a_scale, b_scale = np.abs(normal(rng, 5)), np.abs(normal(rng, 4)) * f32(1e-3)
    c = make_golden.rounded(normal(rng, 5, 4), out_dtype)
    got = ref.gemm_int8(
        a, b, a_scale, b_scale, divisor=16, out_dtype=out_dtype, out=c, accumulate=accumulate
    )
    for m, n in itertools.product(range(5), range(4)):
        acc = f32(int(a[m].astype(int) @ b[n].astype(int)))
        value = f32(f32(acc * b_scale[n]) * f32(a_scale[m] / f32(16)))
        if accumulate:
            value = f32(f32(c[m, n]) + value)
        assert got[m, n] == make_golden.rounded(np.array([value], f32), out_dtype)[0]
    assert got.dtype == (np.float16 if out_dtype == "float16" else f32)


def test_gemm_int4_is_gemm_int8_of_the_codes(rng: np.random.Generator) -> None:
    a = rng.integers(-7, 8, (5, 37)).astype(np.int8)
    b = rng.integers(-7, 8, (4, 37)).astype(np.int8)
    packed = ref.pack_int4(a), ref.pack_int4(b)
    scales = np.abs(normal(rng, 5)), np.abs(normal(rng, 1))
    assert np.array_equal(ref.gemm_int4(*packed, k=37), a.astype(int) @ b.astype(int).T)
    assert np.array_equal(
        ref.gemm_int4(*packed, *scales, k=37, divisor=4), ref.gemm_int8(a, b, *scales, divisor=4)
    )


# -------------------------------------------------------------------------------- The linear layer


def test_nearest_codes_of_the_research_notes() -> None:
    """Values of research/golden_small.json, made by another program."""
    t, o, i = np.ogrid[:21, :20, :18]
    x = ((5 * t + 9 * i) % 13 - 6).astype(f32)[:, 0]
    paper = {"x_rounding": "nearest", "gw_rounding": "nearest", "gx_rounding": "nearest"}
    rows = (0, 2, 3, 8, 10, 11, 12, 14)  # the other reading of a tie
    saved = ref.compress_activation(x, ref.recipe("paper", **paper, rows=rows))
    assert (
        saved.codes[:, :16].sum() == -39 and float(saved.scales[0]).hex() == "0x1.c3870e0000000p-3"
    )
    wanted = [-14, -9, -5, 0, 5, 9, 14, 18, 23, -32, 32, -23, -18, -14, -9, -5, 0, 5]
    assert saved.codes[:, 0].tolist() == wanted
    saved = ref.compress_activation(x, ref.recipe("paper", **paper, rank=16))
    assert saved.codes.sum() == 3 and float(saved.scales[0]).hex() == "0x1.a3468e0000000p-2"
    gy = ((7 * t + 3 * o) % 11 - 5).astype(f32)[:, :, 0]
    w = ((3 * o + 11 * i) % 17 - 8).astype(f32)[0]
    for scale, corner in (("tensor", "-0x1.79d0fcp+6"), ("row", "-0x1.83e0a6p+6")):
        config = ref.recipe("paper", **paper, gx_scale=scale)
        gx = ref.backward_linear(gy, w, None, config=config, need=("gx",)).gx
        assert gx[0, 0] == pytest.approx(float.fromhex(corner), rel=2**-22)


@pytest.mark.parametrize(
    "config", [ref.recipe("default"), ref.recipe("default", gx_bits=4), ref.recipe("paper")]
)
@pytest.mark.parametrize(
    ("tokens", "outs", "ins", "block"), [(21, 19, 7, 16), (37, 35, 18, 1), (5, 100, 3, 64)]
)
def test_gx_bound(
    rng: np.random.Generator, config: ref.Config, tokens: int, outs: int, ins: int, block: int
) -> None:
    gy, w, x = layer(rng, tokens, outs, ins)
    config = dataclasses.replace(config, hadamard_block=block)
    _, s_y = ref.quantize_gradient_rows(gy, config, 3)
    _, s_w = ref.quantize_weight(w, config)
    pad = -outs % block
    big_y = ref.fwht(np.pad(gy, ((0, 0), (0, pad))), block=block).astype(np.float64)
    big_w = ref.fwht(np.pad(w, ((0, pad), (0, 0))), axis=0, block=block).astype(np.float64)
    s_y, s_w = s_y.astype(np.float64)[:, None], s_w.astype(np.float64)[None]
    bound = (
        s_y * np.abs(big_w).sum(axis=0)
        + s_w / 2 * np.abs(big_y).sum(axis=1, keepdims=True)
        + (outs + pad) * s_y * s_w / 2
    ) / block
    plain = gy.astype(np.float64) @ w
    error = np.abs(ref.backward_linear(gy, w, x, config=config, need=("gx",), key=3).gx - plain)
    assert (error <= bound * (1 + 1e-4)).all()
    assert distance(plain + error, plain) > 1e-4  # it is quantised


@pytest.mark.parametrize("tokens", [21, 37, 197])
def test_full_basis_is_close_to_the_plain_product(rng: np.random.Generator, tokens: int) -> None:
    gy, w, x = layer(rng, tokens, 35, 18)
    plain = gy.astype(np.float64).T @ x
    rms = np.sqrt(tokens)
    for name, limit in (("accurate", 0.02), ("default", 0.2)):
        got = ref.backward_linear(gy, w, x, config=ref.recipe(name), need=("gw",), key=5).gw
        assert distance(got, plain) < limit
    config = ref.recipe("accurate")
    saved = ref.compress_activation(x, config, key=5)
    _, s_y = ref.quantize_gradient_columns(gy, config, 5)
    s_y, s_x = s_y.astype(np.float64)[:, None], saved.scales.astype(np.float64)[None]
    bound = s_y * np.abs(x).sum(axis=0) + s_x * np.abs(gy).sum(axis=0)[:, None] + tokens * s_y * s_x
    exact = ref.backward_linear(gy, w, saved, config=config, need=("gw",), key=5).gw
    assert (np.abs(exact - plain) <= bound * (1 + 1e-4)).all()
    assert np.abs(exact - plain).max() > 1e-4 * rms  # it is quantised


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("tokens", [1, 21, 197])
def test_operands_are_padded_with_zeros(rng: np.random.Generator, name: str, tokens: int) -> None:
    gy, w, x = layer(rng, tokens, 19, 7)
    config = ref.recipe(name)
    rows, scales = ref.quantize_gradient_rows(gy, config, 1)
    weight, weight_scales = ref.quantize_weight(w, config)
    columns, column_scales = ref.quantize_gradient_columns(gy, config, 1)
    saved = ref.compress_activation(x, config, key=1)
    right = saved.codes if saved.packed is None else ref.requantize(saved)[0]
    k = tokens if config.basis == "full" else -(-tokens // 16) * config.rank
    padded = -(-k // 16) * 16
    if config.storage == "rht2":  # a transform leaves nothing 0
        k = padded = -(-tokens // 64) * 64
    assert rows.shape == (tokens, 32) and weight.shape == (7, 32)
    assert columns.shape == (19, padded) and right.shape == (7, padded)
    assert not columns[:, k:].any() and not right[:, k:].any()
    paper = name == "paper"
    assert (scales.size, weight_scales.size) == ((1, 1) if paper else (tokens, 7))
    assert (column_scales.size, saved.scales.size // (-(-tokens // 64) if saved.packed is not None
            else 1)) == ((1, 1) if paper else (19, 7))  # fmt: skip


def test_operands_by_definition(rng: np.random.Generator) -> None:
    """Transform, one scale a row, the random bytes of the operand's purpose."""
    gy, w, x = layer(rng, 37, 19, 7)
    key, kept = (1, 2, 3), {"basis": "sketch", "rank": 8, "key": (1, 2, 3)}
    config = ref.recipe("fast")

    def padded(values: np.ndarray, columns: int) -> np.ndarray:
        return np.pad(values, ((0, 0), (0, columns - values.shape[1])))

    for values, purpose, codes in (
        (ref.fwht(padded(gy, 32)), 1, ref.quantize_gradient_rows(gy, config, key)[0]),
        (ref.fwht(padded(w.T, 32)), 2, ref.quantize_weight(w, config)[0]),
        (padded(ref.hla(x, **kept).T, 32), 3, ref.compress_activation(x, config, key=key).codes),
        (
            padded(ref.hla(gy, **kept, side="gradient").T, 32),
            4,
            ref.quantize_gradient_columns(gy, config, key)[0],
        ),
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
    b, s_b = (saved.codes, saved.scales)
    if saved.packed is not None:
        b, s_b = ref.requantize(saved, 2)
    divisor = 64 if config.storage == "rht2" else 1 if config.basis == "full" else 16
    assert np.array_equal(grads.gw, ref.gemm_int8(a, b, s_a, s_b, divisor=divisor))
    only = ref.backward_linear(gy, None, saved, need=("gw",), key=2)
    assert only.gx is None and only.gb is None and np.array_equal(only.gw, grads.gw)


def test_sketch_of_backward_is_that_of_forward(rng: np.random.Generator) -> None:
    gy, w, x = layer(rng, 64, 6, 5)
    config = ref.recipe("fast", rank=16, block=64)  # four folds' worth of possible disagreement
    wide = {"basis": "sketch", "rank": 16, "block": 64}
    saved = ref.compress_activation(x, config, key=1)
    exact = ref.hla(gy, **wide, side="gradient", key=1).T @ ref.hla(x, **wide, key=1) / 64
    for key in (None, 1, 2):
        got = ref.backward_linear(gy, w, saved, need=("gw",), key=key).gw
        assert distance(got, exact) < 0.03


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
            assert got[m, n] == f32(f32(acc * s_b[n]) / divisor)
    plain = gy.astype(np.float64).T @ x
    assert distance(got, plain) < 0.03  # accurate


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


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_output_types_and_accumulation(rng: np.random.Generator, dtype: str) -> None:
    gy, w, x = layer(rng, 21, 6, 5)
    for config in (ref.recipe("default"), ref.recipe("fast", gw_scale="token")):
        plain = ref.backward_linear(gy, w, x, config=config, need=ALL, key=1)
        before = [make_golden.rounded(normal(rng, *shape), dtype) for shape in ((6, 5), (6,))]
        typed = ref.backward_linear(gy, w, x, config=config, need=ALL, key=1, out_dtype=dtype)
        for got, wide in zip(typed, plain, strict=True):
            assert np.array_equal(got, make_golden.rounded(wide, dtype))
        summed = ref.backward_linear(
            gy, w, x, config=config, need=ALL, key=1, out_dtype=dtype,
            gw_out=before[0], gb_out=before[1], accumulate=True,
        )  # fmt: skip
        assert np.array_equal(summed.gx, typed.gx)
        for got, wide, c in zip(summed[1:], plain[1:], before, strict=True):
            assert np.array_equal(got, make_golden.rounded(c.astype(f32) + wide, dtype))


def test_half_inputs_are_widened(rng: np.random.Generator) -> None:
    halves = [v.astype(np.float16) for v in layer(rng, 21, 6, 5)]
    wide = [v.astype(f32) for v in halves]
    got = ref.backward_linear(*halves, need=ALL, key=1, out_dtype="float32")
    for a, b in zip(got, ref.backward_linear(*wide, need=ALL, key=1), strict=True):
        assert np.array_equal(a, b)
    assert ref.backward_linear(*halves, key=1).gw.dtype == np.float16
    with pytest.raises(ValueError, match="gy: dtype float64"):
        ref.backward_linear(wide[0].astype(np.float64), *wide[1:])


def test_leading_dimensions_collapse(rng: np.random.Generator) -> None:
    gy, w, x = layer(rng, 42, 6, 5)
    flat = ref.backward_linear(gy, w, x, need=ALL)
    deep = ref.backward_linear(gy.reshape(2, 3, 7, 6), w, x.reshape(2, 3, 7, 5), need=ALL)
    assert deep.gx.shape == (2, 3, 7, 5)
    assert np.array_equal(deep.gx.reshape(42, 5), flat.gx)
    assert np.array_equal(deep.gw, flat.gw) and np.array_equal(deep.gb, flat.gb)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["gy", "w", "x"])
def test_overflow_is_seen(rng: np.random.Generator, name: str, bad: float, where: str) -> None:
    names = ("gy", "w", "x")
    arrays = dict(zip(names, layer(rng, 37, 19, 7), strict=True))
    arrays[where][5, 3] = bad
    grads = ref.backward_linear(
        *(arrays[n] for n in names), config=ref.recipe(name), need=ALL, key=1
    )
    with np.errstate(all="ignore"):
        plain_gx = arrays["gy"] @ arrays["w"]
        plain_gw = arrays["gy"].T @ arrays["x"]
        plain_gb = arrays["gy"].sum(axis=0)
    if name != "paper":  # its basis may drop nothing, but one scale for all makes all NaN
        assert np.isfinite(grads.gx).any() and np.isfinite(grads.gw).any()
    assert np.isnan(grads.gx[~np.isfinite(plain_gx)]).all()
    assert np.isnan(grads.gw[~np.isfinite(plain_gw)]).all()
    assert np.array_equal(np.isfinite(grads.gb), np.isfinite(plain_gb))
    # Results that do not depend on the bad value stay finite.
    assert np.isfinite(grads.gx).all() == (where == "x")
    assert np.isfinite(grads.gw).all() == (where == "w")


@pytest.mark.parametrize("gw_scale", ["token", "tensor"])
def test_overflow_is_seen_with_every_gradient_scale(
    rng: np.random.Generator, gw_scale: str
) -> None:
    for where in (0, 2):
        arrays = layer(rng, 37, 19, 7)
        arrays[where][5, 3] = np.inf
        config = ref.recipe("fast", gw_scale=gw_scale)
        gw = ref.backward_linear(*arrays, config=config, need=("gw",)).gw
        hit = gw[3] if where == 0 else gw[:, 3]
        assert np.isnan(hit).all()


def test_activation_near_the_largest_float() -> None:
    """7 * S overflows within 0.2 % of the largest float: the channel is NaN, not wrong."""
    top = np.finfo(f32).max
    x = np.array([[top, top * f32(0.99)]], f32)
    codes, scale = ref.requantize(ref.compress_activation(x, ref.recipe("default")))
    assert np.isnan(scale[0]) and np.isfinite(scale[1])
    assert not codes[0].any() and codes[1, 0] != 0


@pytest.mark.parametrize("name", RECIPES)
def test_zeros_stay_exact_zeros(rng: np.random.Generator, name: str) -> None:
    gy, w, x = layer(rng, 21, 6, 5)
    zero = ref.backward_linear(gy * 0, w, x, config=ref.recipe(name), need=ALL)
    assert not any(np.any(g) for g in zero)
    half = ref.backward_linear(gy, w * 0, x * 0, config=ref.recipe(name), need=ALL)
    assert not half.gx.any() and not half.gw.any() and half.gb.any()


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("shape", [(0, 3, 4), (3, 0, 4), (3, 4, 0), (0, 0, 0)])
def test_empty(name: str, shape: tuple[int, int, int]) -> None:
    tokens, outs, ins = shape
    gy, w, x = np.ones((tokens, outs), f32), np.ones((outs, ins), f32), np.ones((tokens, ins), f32)
    grads = ref.backward_linear(gy, w, x, config=ref.recipe(name), need=ALL)
    assert [g.shape for g in grads] == [(tokens, ins), (outs, ins), (outs,)]
    if tokens == 0 or outs == 0:
        assert not grads.gx.any() and not grads.gw.any()
    before = np.full((outs, ins), 3, f32), np.full(outs, 4, f32)
    if tokens == 0:
        kept = ref.backward_linear(
            gy, w, x, config=ref.recipe(name), need=("gw", "gb"),
            gw_out=before[0], gb_out=before[1], accumulate=True,
        )  # fmt: skip
        assert np.array_equal(kept.gw, before[0]) and np.array_equal(kept.gb, before[1])


# -------------------------------------------------------------------------------- One code a value


def one_code(storage: str, **fields: Any) -> Any:
    """A configuration of a token storage, as users have it."""
    given = {"hadamard_block": 64, "gx_rounding": "nearest", "gw_scale": "token", **fields}
    return ref.Config(storage=storage, **given)


def power_of(value: Fraction) -> int:
    """e of 2^e <= value < 2^(e+1)."""
    e = value.numerator.bit_length() - value.denominator.bit_length()
    return e if Fraction(2) ** e <= value else e - 1


def reversed4(value: int) -> int:
    return sum((value >> bit & 1) << (3 - bit) for bit in range(4))


def test_feature_blocks() -> None:
    widths = {0: 64, 1: 16, 15: 16, 16: 16, 17: 16, 31: 32, 48: 16, 56: 16, 57: 64, 63: 64, 64: 64}
    widths |= {96: 32, 127: 64, 144: 32, 197: 16, 199: 16, 200: 32, 300: 64, 768: 64, 1000: 64}
    for width, wanted in widths.items():
        assert ref.feature_block(width) == wanted
        for limit in (16, 32, 64):
            fits = [n for n in (16, 32, 64) if -(-width // n) * n <= width + width // 8]
            wanted = max([n for n in fits if n <= limit], default=16)
            assert ref.feature_block(width, limit) == wanted
    with pytest.raises(ValueError, match="hadamard_block"):
        ref.feature_block(64, 128)


def test_feature_signs() -> None:
    key = (3, 1, 4)
    signs = ref.feature_signs(150, key)
    assert signs.dtype == f32 and signs.shape == (150,)
    for j in range(150):
        words = ref.random_words(np.array([j >> 6]), key, 7)[0]
        assert signs[j] == (-1 if int(words[j >> 5 & 1]) >> (j & 31) & 1 else 1)
    assert 50 < (signs < 0).sum() < 100


def sizes_by_definition(values: np.ndarray) -> list[int]:
    """Whole numbers and fractions alone."""
    tokens, width = values.shape
    count = min(tokens, 512)
    sums = [0] * width
    for j in range(count):
        row = values[j * tokens // count]
        f = int(np.abs(row).max().view(np.uint32)) >> 23
        if f < 27 or f == 255:
            continue
        biased = int(ref.token_exponents(row[None])[0])
        for i, value in enumerate(row):
            z = f32(Fraction(float(value)) * Fraction(2) ** (127 - biased))
            square = f32(float(z) ** 2)  # a product of two floats is exact in fp64
            sums[i] += round(min(Fraction(float(square)) * 2**24, Fraction(2) ** 44))
    eighths = {}
    for i, total in enumerate(sums):
        if total > 0:
            rounded = Fraction(float(np.array([total]).astype(f32)[0]))
            e = power_of(rounded)
            eighths[i] = 8 * (e + 127) + int((rounded / Fraction(2) ** e - 1) * 8)
    result = [0] * width
    for i, value in eighths.items():
        d = value - sum(eighths.values()) // len(eighths)
        if abs(d) >= 32:
            result[i] = max(-30, min(30, (d + 16) // 32))
    return result


def test_feature_sizes_by_definition(rng: np.random.Generator) -> None:
    for tokens, width in ((1, 5), (40, 33), (513, 7), (700, 5), (1100, 3), (2, 3000)):
        values = normal(rng, tokens, width) * np.exp2(rng.integers(-20, 20, width)).astype(f32)
        values *= np.exp2(rng.integers(-60, 60, (tokens, 1))).astype(f32)
        values[0, 0] = values[0].max() * f32(4096)  # of 3000 features it meets the upper limit
        found = ref.feature_sizes(values)
        assert found.tolist() == sizes_by_definition(values) and (found.any() or tokens == 1)
        if tokens >= 40:
            values[3], values[4], values[5, 1] = np.inf, 0, np.nan
            values[6] *= f32(2.0**-130)
            values[:, 2] = 0
            found = ref.feature_sizes(values)
            assert found.tolist() == sizes_by_definition(values) and found[2] == 0
    assert ref.feature_sizes(np.full((3, 4), np.nan, f32)).tolist() == [0] * 4
    assert ref.feature_sizes(np.zeros((0, 4), f32)).tolist() == [0] * 4
    assert ref.feature_sizes(np.zeros((4, 0), f32)).shape == (0,)


def test_feature_sizes_are_square_roots(rng: np.random.Generator) -> None:
    sizes = np.ones(64)
    sizes[3], sizes[4], sizes[5] = 2, 2.0**6, 2.0**-8
    values = normal(rng, 300, 64) * sizes.astype(f32)
    wanted = np.zeros(64)
    wanted[4], wanted[5] = 3, -4
    assert ref.feature_sizes(values).tolist() == wanted.tolist()
    values = np.full((4, 400), 2.0**-17, f32)
    values[:, 0] = 1  # 34 octaves of mean square above the others
    assert ref.feature_sizes(values).tolist() == [9] + [0] * 399


def test_edges_of_feature_sizes(rng: np.random.Generator) -> None:
    # The limit of a square is 2^20 (of z = 2^12): 240 eighths above the others, or 239.
    for others, wanted in ((2.0**-17, 8), (2.0**-17 * 1.08, 7)):
        values = np.full((1, 4096), others, f32)
        values[0, 0] = 1
        assert ref.feature_sizes(values).tolist() == [wanted] + [0] * 4095
        assert sizes_by_definition(values)[:9] == [wanted] + [0] * 8
    # The smallest token that counts.
    values = np.full((3, 8), 2.0**-110, f32)
    for largest, wanted in ((2.0**-100, 4), (2.0**-101 * 1.9, 0)):
        values[:, 2] = largest
        assert ref.feature_sizes(values).tolist() == [0, 0, wanted, 0, 0, 0, 0, 0]
    # Every second of 1024 tokens is looked at.
    for first, wanted in ((0, 3), (1, 0)):
        values = normal(rng, 1024, 64)
        values[first::2, 5] *= f32(2.0**6)
        assert ref.feature_sizes(values)[5] == wanted


def test_tile_bytes_by_definition() -> None:
    key, rows, cols = (5, 6, 7), 35, 48
    got = ref.tile_bytes(rows, cols, key, 3)
    for r, c in itertools.product(range(rows), range(cols)):
        words = ref.random_words(np.array([(r >> 4) * (cols // 16) + (c >> 4)]), key, 3)[0]
        stored = b"".join(int(word).to_bytes(4, "little") for word in words)
        assert got[r, c] == (stored[r & 15] + 16 * reversed4(c & 15)) & 255
    assert np.array_equal(ref.tile_bytes(35, 37, key, 3), got[:, :37])  # ceil(37 / 16) tiles, too


# What R stands for: 2^-16 to 1, 16 steps to an octave.
STANDS_FOR = [
    Fraction(16 + (r + 1) % 16, 16) * Fraction(2) ** ((r + 1) // 16 - 16) for r in range(256)
]


def rotated_tokens(x: np.ndarray, block: int, sizes: np.ndarray, key: Any = 0) -> np.ndarray:
    """u of integers x ``[L, I]``, in fp64 and exact: signs, sizes, and H by definition."""
    width = -(-x.shape[1] // block) * block
    padded = np.zeros((x.shape[0], width))
    padded[:, : x.shape[1]] = x * ref.feature_signs(x.shape[1], key) / np.exp2(sizes)
    blocks = padded.reshape(x.shape[0], width // block, block)
    with np.errstate(invalid="ignore"):
        return (blocks @ sylvester(block)).reshape(padded.shape)


def awkward_tokens(rng: np.random.Generator, tokens: int, width: int) -> np.ndarray:
    """Integers, so that transforms are exact; two features are large, a group and a token 0."""
    x = np.rint(16 * rng.standard_normal((tokens, width))).astype(f32)
    x[:, 1] *= 256
    x[:, 2] *= 1024
    x[3] = 0
    x[4, :32] = 0
    x[5, 7] = np.inf
    x[6] *= f32(2.0**-130)
    x[7] *= 4096
    return x


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_token8_storage_by_definition(rng: np.random.Generator, rounding: str) -> None:
    tokens, width, key = 21, 35, (3, 1, 4)
    x = awkward_tokens(rng, tokens, width)
    saved = ref.compress_activation(x, one_code("token8", x_rounding=rounding), key=key)
    assert saved.codes.shape == (tokens, 48) and saved.scales.dtype == f32
    assert saved.packed is None and saved.ratios is None and saved.exponents is None
    sizes = saved.sizes.astype(int) - 127
    assert sizes.tolist() == sizes_by_definition(x) and sizes[2] > 0
    u = rotated_tokens(x, 16, sizes).astype(f32)
    random = ref.random_bytes(tokens, 48, key, 3)
    for token in range(tokens):
        amax = np.abs(u[token]).max()
        if not np.isfinite(amax):
            assert np.isnan(saved.scales[token]) and not saved.codes[token].any()
            continue
        if amax < 2.0**-100:
            assert saved.scales[token] == 0 and not saved.codes[token].any() and token in (3, 6)
            continue
        assert saved.scales[token] == amax / f32(127)
        wanted = ref.round_codes(u[token], f32(127) / amax, 8, rounding, random[token])
        assert np.array_equal(saved.codes[token], wanted)


@pytest.mark.parametrize(("width", "block", "limit"), [(35, 16, 64), (96, 32, 64), (61, 64, 64)])
def test_token4_storage_by_definition(
    rng: np.random.Generator, width: int, block: int, limit: int
) -> None:
    tokens, key = 21, (3, 1, 4)
    x = awkward_tokens(rng, tokens, width)
    saved = ref.compress_activation(x, one_code("token4", hadamard_block=limit), key=key)
    padded = -(-width // block) * block
    groups = -(-padded // 32)
    assert saved.codes.shape == (tokens, padded) and saved.packed.shape == (tokens, padded // 2)
    assert saved.scales.shape == (tokens,) and saved.scales.dtype == np.uint16
    assert saved.ratios.shape == (tokens, groups) and saved.ratios.dtype == np.uint8
    assert np.array_equal(ref.unpack_int4(saved.packed), saved.codes)
    sizes = saved.sizes.astype(int) - 127
    assert sizes.tolist() == sizes_by_definition(x) and sizes[2] > 0
    u = rotated_tokens(x, block, sizes)
    random = ref.tile_bytes(tokens, padded, key, 3).astype(int)
    back = ref._token_values(saved)
    for token in range(tokens):
        bits, ratios = saved.scales[token], saved.ratios[token]
        if not np.isfinite(u[token]).all():
            assert bits == 0x7FC0 and not ratios.any() and not saved.codes[token].any()
            continue
        if np.abs(u[token]).max() < 2.0**-100:
            assert (
                bits == 0 and not ratios.any() and not saved.codes[token].any() and token in (3, 6)
            )
            continue
        seventh = f32(np.abs(u[token]).max()) / f32(7.5)
        t = ref.bf16_values(bits)
        assert t >= seventh > ref.bf16_values(bits - np.uint16(1))
        for g in range(groups):
            part = slice(32 * g, min(32 * (g + 1), padded))
            code, amax = saved.codes[token, part], f32(np.abs(u[token, part]).max())
            if amax == 0:
                assert ratios[g] == 0 and not code.any() and not back[0][token, part].any()
                continue
            rho = Fraction(float((amax / f32(7.5)) / t))
            ratio = min((r for r, value in enumerate(STANDS_FOR) if value >= rho), default=None)
            assert ratios[g] == max(1, ratio)
            stands = STANDS_FOR[ratios[g]]
            step = f32(stands * Fraction(float(t)))
            assert Fraction(float(step)) == stands * Fraction(float(t))  # exact
            inv = Fraction(float(f32(1) / step))
            for value, byte, c, of in zip(
                u[token, part],
                random[token, part],
                code.tolist(),
                back[0][token, part].tolist(),
                strict=True,
            ):
                assert c == (round(256 * Fraction(value) * inv) + int(byte) - 128) >> 8
                assert -8 <= c <= 7 and Fraction(of) == c + Fraction(511 - 2 * int(byte), 512)
                assert abs(value - of * float(step)) <= float(step) / 2 * (1 + 2.0**-18)
            assert (back[1][token, part] == step).all()


def neighbours_first(values: list[np.float32]) -> np.float32:
    """Their sum, one float operation after the other."""
    while len(values) > 1:
        values = [a + b for a, b in zip(values[::2], values[1::2], strict=True)]
    return values[0]


def nearest_ratio(value: Fraction) -> int:
    """R of what stands next to it; where two are as near, the one whose last bit is 0."""
    distances = [abs(stands - value) for stands in STANDS_FOR[1:]]
    best = [r for r, d in enumerate(distances, 1) if d == min(distances)]
    return next((r for r in best if r % 2), best[0])  # 1777 is odd: an odd R has an even last bit


@pytest.mark.parametrize(("width", "block", "limit"), [(35, 16, 64), (96, 32, 64), (61, 64, 64)])
def test_token2_storage_by_definition(
    rng: np.random.Generator, width: int, block: int, limit: int
) -> None:
    """With fractions where results are exact, otherwise by single float operations."""
    tokens, key = 21, (3, 1, 4)
    x = awkward_tokens(rng, tokens, width)
    x[8, 32:] = 0  # a group of zeros where blocks do not reach across
    saved = ref.compress_activation(x, one_code("token2", hadamard_block=limit), key=key)
    padded = -(-width // block) * block
    groups = -(-padded // 32)
    assert saved.codes.shape == (tokens, padded) and saved.codes.dtype == np.int8
    assert saved.packed.shape == (tokens, padded // 4) and saved.packed.dtype == np.uint8
    fields = saved.packed[:, :, None] >> np.array([0, 2, 4, 6], np.uint8) & 3
    assert np.array_equal(fields.reshape(tokens, padded), saved.codes)
    assert saved.scales.shape == (tokens,) and saved.scales.dtype == np.uint16
    assert saved.ratios.shape == (tokens, groups) and saved.ratios.dtype == np.uint8
    sizes = saved.sizes.astype(int) - 127
    assert sizes.tolist() == sizes_by_definition(x) and sizes[2] > 0
    u = rotated_tokens(x, block, sizes, key)
    random = ref.tile_bytes(tokens, padded, key, 3).astype(int)
    back = ref._token_values(saved)
    empty = cut_off = 0
    for token in range(tokens):
        bits, ratios = saved.scales[token], saved.ratios[token]
        if not np.isfinite(u[token]).all():
            assert bits == 0x7FC0 and not ratios.any() and not saved.codes[token].any()
            assert np.isnan(back[1][token]).all()
            continue
        if np.abs(u[token]).max() < 2.0**-100:
            assert bits == 0 and not ratios.any() and not saved.codes[token].any()
            assert not back[0][token].any() and token in (3, 6)
            continue
        found = []
        for g in range(groups):
            part = slice(32 * g, min(32 * (g + 1), padded))
            values, code = u[token, part], saved.codes[token, part].tolist()
            if not values.any():
                found.append(f32(0))
                assert ratios[g] == 0 and not any(code) and not back[0][token, part].any()
                empty += 1
                continue
            e = power_of(Fraction(np.abs(values).max()))
            y = [f32(value * 2.0 ** (1 - e)) for value in values]
            q = neighbours_first([v * v for v in y])
            reach = f32(1.75) * np.sqrt(q / f32(len(y)))
            cut_off += sum(abs(v) > reach for v in y)
            inv = Fraction(float(f32(1.5) / min(reach, max(map(abs, y)))))
            val = []
            for v, byte, c in zip(y, random[token, part].tolist(), code, strict=True):
                scaled = round(256 * Fraction(float(v)) * inv)
                assert c == (max(-384, min(384, scaled)) + byte + 384) // 256 and 0 <= c <= 3
                val.append(f32((512 * c + 511 - 2 * byte - 1024) / 512))
            assert back[0][token, part].tolist() == val
            d = neighbours_first([v * of for v, of in zip(y, val, strict=True)])
            found.append((q / d) * f32(2.0 ** (e - 1)))
        t = ref.bf16_values(bits)
        largest = Fraction(float(max(found)))
        near = (ref.bf16_values(np.uint16(int(bits) + by)) for by in (0, -1, 1))
        off = [abs(Fraction(float(value)) - largest) for value in near]
        assert off[0] == min(off)
        for g, scale in enumerate(found):
            part = slice(32 * g, min(32 * (g + 1), padded))
            if scale:
                assert ratios[g] == nearest_ratio(Fraction(float(scale / t)))
            step = float(STANDS_FOR[ratios[g]] * Fraction(float(t))) if scale else 0
            assert (back[1][token, part] == step).all() and f32(step) == step
    assert cut_off and (empty or block == 64)


def test_ratios_to_nearest(rng: np.random.Generator) -> None:
    """token2: groups down to 2^-40 of their token's largest; halves go to even, the least is 1."""
    tokens = 400
    rotated = np.zeros((tokens, 64), f32)
    rotated[:, :32] = normal(rng, 32)
    rotated[:, 32:] = rotated[:, :32] * np.exp2(-np.arange(tokens)[:, None] / 10).astype(f32)
    rotated[7, 32:] = 0
    rotated[8, 32:] = f32(2.0**-101)
    rotated[8, :32] *= f32(2.0**-70)
    rotated[9, 32:] = f32(2.0**-100)
    codes, scales, ratios = ref._cut_off_tokens(rotated, 3)
    assert (ratios[:, 0] > 250).all()  # T is rounded up, by less than a 128th
    assert (ratios[7:10, 1] == [0, 0, 1]).all() and not codes[7:9, 32:].any()
    used = np.delete(np.arange(tokens), [7, 8])
    _, found = ref._cut_off(
        rotated.reshape(tokens, 2, 32),
        ref.tile_bytes(tokens, 64, 3, 3).reshape(tokens, 2, 32),
        f32(32),
    )
    for token in used:
        rho = Fraction(float(found[token, 1, 0] / ref.bf16_values(scales[token])))
        assert ratios[token, 1] == nearest_ratio(rho)
    assert len(set(ratios[:, 1].tolist())) > 100 and ratios[-1, 1] == 1


def test_ties_of_ratios(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scales of groups halfway between two ratios; T is a bf16 number, so rho is exact."""
    halves = np.array([[1, (4 * j + 1) / 64, (4 * j + 3) / 64] for j in range(8, 16)], f32)
    monkeypatch.setattr(
        ref, "_cut_off", lambda y, u, count: (np.zeros(y.shape, np.int8), halves[:, :, None])
    )
    _, scales, ratios = ref._cut_off_tokens(np.ones((8, 96), f32), 0)
    assert (scales == 0x3F80).all() and (ratios[:, 0] == 255).all()
    wanted = [[nearest_ratio(Fraction(float(v))) for v in row] for row in halves]
    assert ratios.tolist() == wanted and (ratios % 2 == 1).all()


def test_overflow_of_token2_is_seen() -> None:
    """A scale above the largest bf16 number: T is Inf, and nothing of the token is finite."""
    x = np.zeros((600, 32), f32)
    x[:, 0] = np.finfo(f32).max
    codes, scales, ratios = ref._cut_off_tokens(x, 3)
    over = scales == 0x7F80
    assert over.any() and not over.all() and (ratios[over] == 1).all()
    plain = ref.compress_activation(x, one_code("token2"), key=3)
    saved = dataclasses.replace(
        plain, codes=codes[over], scales=scales[over], ratios=ratios[over], tokens=int(over.sum())
    )
    assert not np.isfinite(ref.decompress_activation(saved)).any()
    for gradient in (0, 1):
        gy = np.full((saved.tokens, 3), gradient, f32)
        assert np.isnan(ref.backward_linear(gy, None, saved, need=("gw",)).gw).all()


def test_signs_of_token2_are_of_the_key_that_x_is_kept_with(rng: np.random.Generator) -> None:
    """Wherever they are used: bits differ between keys, x and g_w come back with any."""
    gy, _, x = layer(rng, 40, 16, 100)
    for storage in ref.TOKEN_STORAGES:
        saved = [ref.compress_activation(x, one_code(storage), key=(1, key)) for key in (2, 3)]
        signs = [ref.in_factors(one) for one in saved]
        own = storage == "token2"
        for one, got in zip(saved, signs, strict=True):
            assert np.array_equal(got, ref.feature_signs(100, one.key if own else 0))
        assert np.array_equal(*signs) == (not own)
        for one in saved:
            assert distance(ref.decompress_activation(one), x) < 0.42
            gw = ref.backward_linear(gy, None, one, need=("gw",), key=(7, 7)).gw
            assert distance(gw, gy.astype(np.float64).T @ x) < 0.42


def test_every_ratio(rng: np.random.Generator) -> None:
    """Groups down to 2^-40 of their token's largest value: ratios 1 to 255, 0 for zeros alone."""
    tokens = 400
    rotated = np.zeros((tokens, 64), f32)
    rotated[:, 0] = f32(7.5)
    rotated[:, 40] = np.exp2(-np.arange(tokens) / 10).astype(f32) * f32(7.5)
    rotated[7, 40] = 0
    rotated[8, 40] = np.nextafter(f32(7.5 / 2), f32(8))
    rotated[9, 40] = f32(2.0**-149)
    codes, scales, ratios = ref._quantize_tokens(rotated, 3)
    assert (ratios[:, 0] == 255).all() and (scales == 0x3F80).all()
    assert ratios[7, 1] == 0 and not codes[7, 32:].any()
    assert ratios[8, 1] == 240 and ratios[9, 1] == 1  # above a half by one float; the least
    other = np.delete(ratios[:, 1], [7, 8, 9]).astype(int)
    assert other[0] == 255 and other[-1] == 1 and (np.diff(other) <= 0).all()
    assert codes.min() >= -8 and codes.max() <= 7


@pytest.mark.parametrize("storage", ref.TOKEN_STORAGES)
@pytest.mark.parametrize("width", [1, 16, 35, 48, 96, 144, 200, 1000])
def test_tokens_back_to_x(rng: np.random.Generator, storage: str, width: int) -> None:
    """Within half a step before the transform is undone (token2, which cuts off, is not); sizes of
    features come back, too.
    """
    x = normal(rng, 45, width) * np.exp2(rng.integers(-9, 9, (45, 1))).astype(f32)
    x[:, ::7] *= 1000
    config = one_code(storage, x_rounding="nearest" if storage == "token8" else "stochastic")
    saved = ref.compress_activation(x, config, key=5)
    n = ref.feature_block(width)
    padded = -(-width // n) * n
    back = ref.decompress_activation(saved)
    assert back.shape == x.shape and back.dtype == f32
    assert np.array_equal(ref.decompress_activation(saved, 3, 17), back[3:17])
    factors = ref.in_factors(saved)
    assert (np.abs(factors) == np.exp2(saved.sizes.astype(float) - 127)).all()
    assert width < 16 or not (saved.sizes == 127).all()
    wide = np.zeros((45, padded))
    wide[:, :width] = x.astype(np.float64) / factors
    u = (wide.reshape(-1, n) @ sylvester(n)).reshape(45, padded)
    values, steps = ref._token_values(saved)
    kept = values * steps.astype(np.float64)
    half = np.abs(kept - u) <= steps * 0.5001 + 1e-6 * np.abs(u).max(1, keepdims=True)
    assert half.all() or storage == "token2"
    undone = (kept.reshape(-1, n) @ sylvester(n)).reshape(45, padded)[:, :width] * factors / n
    assert np.allclose(back, undone, rtol=0, atol=1e-5 * np.abs(undone).max(1, keepdims=True))
    limit = {"token8": 0.012, "token4": 0.12, "token2": 0.42}[storage]
    assert distance(back / factors, x / factors) < limit


@pytest.mark.parametrize("storage", ref.TOKEN_STORAGES)
@pytest.mark.parametrize(("tokens", "width", "padded"), [(3, 35, 48), (37, 96, 96), (5, 61, 64)])
def test_stored_bytes(
    rng: np.random.Generator, storage: str, tokens: int, width: int, padded: int
) -> None:
    x = normal(rng, tokens, width) * f32(1000) ** (np.arange(width) % 2).astype(f32)
    saved = ref.compress_activation(x, one_code(storage), key=5)
    got = ref.saved_bytes_of(saved)
    assert got.dtype == np.uint8 and got.ndim == 1
    if storage == "token8":
        rows, size = tokens * padded, 4
        assert np.array_equal(got[:rows].view(np.int8), saved.codes.reshape(-1))
    else:
        groups = -(-padded // 32)
        bits = 4 if storage == "token4" else 2
        codes = tokens * padded * bits // 8
        rows, size = -(-(codes + tokens * groups) // 4) * 4, 2
        shifts = np.arange(0, 8, bits)
        fields = (got[:codes, None] >> shifts & (1 << bits) - 1).astype(int).reshape(-1)
        signed = fields - 16 * (fields > 7)
        assert np.array_equal(signed, saved.codes.reshape(-1))
        ratios = got[codes : codes + tokens * groups]
        assert np.array_equal(ratios, saved.ratios.reshape(-1))
        assert not got[codes + tokens * groups : rows].any()
    assert got.size == rows + size * tokens + width
    scales = got[rows : rows + size * tokens].view("<u2" if size == 2 else "<f4")
    assert np.array_equal(scales, saved.scales)
    e = got[rows + size * tokens :].astype(int) - 127
    assert np.array_equal(e, ref.feature_sizes(x)) and e.any()
    with pytest.raises(ValueError, match="storage"):
        ref.saved_bytes_of(ref.compress_activation(x))


def test_bytes_of_a_value(rng: np.random.Generator) -> None:
    x = normal(rng, 512, 768)
    for storage, most in (("token8", 1.008), ("token4", 0.537), ("token2", 0.29)):
        kept = ref.saved_bytes_of(ref.compress_activation(x, one_code(storage)))
        assert 0.97 * most < kept.size / x.size <= most


@pytest.mark.parametrize("storage", ref.TOKEN_STORAGES)
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_one_code_products_by_definition(
    rng: np.random.Generator, storage: str, rounding: str
) -> None:
    """From the codes and scales, with integers and single float operations."""
    gy, w, x = layer(rng, 37, 19, 35)
    gy[:, 2] *= 1000
    x[:, 3] *= 5000
    gy[4], x[5] = 0, 0
    key, kept = (1, 2, 3), (4, 5, 6)
    config = one_code(storage, gx_rounding=rounding, gw_rounding=rounding)
    saved = ref.compress_activation(x, config, key=kept)
    got = ref.backward_linear(gy, w, saved, need=ALL, key=key)

    c = np.exp2(ref.feature_sizes(gy)).astype(f32)
    factors = ref.feature_signs(19, key) * c
    assert (c != 1).any() and np.array_equal(ref.out_factors(gy, key), factors)

    def rotated(values: np.ndarray) -> np.ndarray:
        return ref.fwht(np.pad(values.astype(f32), ((0, 0), (0, 13))), block=16)

    v, w_rows = rotated(gy / factors), rotated(w.T * factors)
    u = ref.random_bytes(37, 32, key, 1)
    amax = np.abs(v).max(1, keepdims=True)
    inv = np.where(amax == 0, f32(0), f32(127) / np.where(amax == 0, f32(1), amax))
    q, s = ref.round_codes(v, inv, 8, rounding, u), (amax / f32(127))[:, 0]
    weight = ref.quantize(w_rows, rounding="nearest")
    for found, wanted in (
        (ref.quantize_token_gradient(gy, factors, config, key), (q, s)),
        (ref.quantize_token_weight(w, factors, config), weight),
    ):
        assert all(np.array_equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert np.array_equal(got.gx, ref.gemm_int8(q, weight[0], s, weight[1], divisor=16))

    big = np.zeros((37, 48), f32)
    for token, i in itertools.product(range(37), range(48)):
        code = int(saved.codes[token, i])
        if storage == "token8":
            big[token, i] = f32(code) * f32(saved.scales[token] * s[token])
            continue
        ratio = saved.ratios[token, i // 32]
        step = f32(STANDS_FOR[ratio] * Fraction(float(ref.bf16_values(saved.scales[token]))))
        byte = int(ref.tile_bytes(37, 48, kept, 3)[token, i])
        if ratio:
            value = code + (511 - 2 * byte) / 512 - (2 if storage == "token2" else 0)
            big[token, i] = f32(value) * f32(step * s[token])
    assert np.array_equal(ref.contributions(saved, s), big)
    amax = np.abs(big).max(0)
    u = np.zeros((48, 37), np.uint8)
    for i, token in itertools.product(range(48), range(37)):
        words = ref.random_words(np.array([(i >> 4) * 3 + (token >> 4)]), key, 6)[0]
        byte = words.astype("<u4").view(np.uint8)[i & 15]
        u[i, token] = (int(byte) + 16 * reversed4(token & 15)) & 255
    codes = ref.round_codes(big.T, (f32(127) / amax)[:, None], 8, rounding, u)
    added, scales = ref.requantize_contributions(big, config, key)
    assert added.shape == (48, 48) and not added[:, 37:].any()
    assert np.array_equal(added[:, :37], codes) and np.array_equal(scales, amax / f32(127))

    tau = (q.T.astype(int) @ codes.T.astype(int)).astype(f32) * scales
    tau = ref.fwht(ref.fwht(tau, block=16).T.copy(), block=16).T
    inward = ref.feature_signs(35, kept if storage == "token2" else 0)
    inward = inward * np.exp2(ref.feature_sizes(x)).astype(f32)
    assert (np.abs(inward) != 1).any() and np.array_equal(ref.in_factors(saved), inward)
    for o, i in itertools.product(range(19), range(35)):
        assert got.gw[o, i] == f32(tau[o, i] * (inward[i] / f32(16))) * (factors[o] / f32(16))
    assert np.array_equal(got.gb, ref.bias_gradient(gy))
    for part in ("gx", "gw"):
        only = ref.backward_linear(gy, w, saved, need=(part,), key=key)
        assert np.array_equal(getattr(only, part), getattr(got, part)) and only.gb is None


@pytest.mark.parametrize("storage", ref.TOKEN_STORAGES)
def test_one_code_with_a_quantised_weight(rng: np.random.Generator, storage: str) -> None:
    """Codes of w that know neither g_y nor backward's key."""
    gy, w, x = layer(rng, 37, 48, 20)
    gy[:, 3] *= 10_000
    config = one_code(storage)
    signs = ref.feature_signs(48, 0)
    assert np.array_equal(ref.out_factors(gy, 5, quantized_weight=True), signs)
    kept = ref.quantize_token_weight(w, signs, config)
    for key in (5, 6):
        got = ref.backward_linear(gy, w, x, config=config, key=key, quantized_weight=True)
        a, s_a = ref.quantize_token_gradient(gy, signs, config, key)
        assert np.array_equal(got.gx, ref.gemm_int8(a, kept[0], s_a, kept[1], divisor=16))
        limit = 0.6 if storage == "token2" else 0.2
        assert distance(got.gx, gy @ w) < 0.02 and distance(got.gw, gy.T @ x) < limit
        other = ref.backward_linear(gy, w, x, config=config, key=key)
        assert not np.array_equal(other.gx, got.gx) and not np.array_equal(other.gw, got.gw)
    with pytest.raises(ValueError, match="quantized_weight"):
        ref.backward_linear(gy, w, x, quantized_weight=True)


# Errors of g_w on Gaussian data by storage, and room for chance.
ONE_CODE_ERROR = {"token8": (0.0153, 0.001), "token4": (0.094, 0.003), "token2": (0.383, 0.01)}


@pytest.mark.parametrize("massive", [False, True])
@pytest.mark.parametrize("storage", ref.TOKEN_STORAGES)
def test_one_code_errors(rng: np.random.Generator, storage: str, massive: bool) -> None:
    """A massive token without a gradient changes nothing: its contributions are 0."""
    gy, w, x = layer(rng, 1024, 128, 192)
    if massive:
        x[5] *= 1000
        gy[5] = 0
    config = one_code(storage, x_rounding="nearest" if storage == "token8" else "stochastic")
    grads = ref.backward_linear(gy, w, x, config=config, key=3)
    wanted, room = ONE_CODE_ERROR[storage]
    assert distance(grads.gw, gy.astype(np.float64).T @ x) == pytest.approx(wanted, abs=room)
    assert distance(grads.gx, gy.astype(np.float64) @ w) == pytest.approx(0.0092, abs=0.0005)
    stochastic = dataclasses.replace(config, gx_rounding="stochastic")
    grads = ref.backward_linear(gy, w, x, config=stochastic, need=("gx",), key=3)
    assert distance(grads.gx, gy.astype(np.float64) @ w) == pytest.approx(0.0112, abs=0.0006)


@pytest.mark.parametrize("storage", ref.TOKEN_STORAGES)
def test_one_code_is_unbiased(rng: np.random.Generator, storage: str) -> None:
    # token2 cuts off, which random signs make up for where blocks are wide and no feature stands
    # out of one; test_bias_of_token2 has what is left elsewhere.
    gy, w, x = layer(rng, 50, 64, 64 if storage == "token2" else 48)
    gy[:, 5] *= 100
    x[:, 6] *= 1 if storage == "token2" else 100
    plain = gy.astype(np.float64).T @ x
    keys = 240
    for rounding in ("stochastic", "nearest"):  # of g_y: its random signs leave no bias, either
        config = one_code(storage, gx_rounding=rounding)
        errors = np.array(
            [
                ref.backward_linear(
                    gy, w, ref.compress_activation(x, config, key=(7, j)), key=(8, j), need=("gw",)
                ).gw
                - plain
                for j in range(keys)
            ]
        )
        spread = errors.std(axis=0, ddof=1)
        z = errors.mean(axis=0) / (spread / np.sqrt(keys))
        # Errors of a block of 64 x 16 are correlated a little: wider than for independent values.
        assert abs(z.mean()) < 0.15 and 0.8 < z.std() < 1.2 and np.abs(z).max() < 6
        assert (spread > 0).all()


@pytest.mark.parametrize(("width", "most"), [(48, 0.04), (96, 0.02), (64, 0.012), (192, 0.012)])
@pytest.mark.parametrize("heavy", [1, 100])
def test_bias_of_token2(rng: np.random.Generator, width: int, most: float, heavy: int) -> None:
    """Relative to x, over the signs: small beside the error, the smaller the wider the blocks."""
    x = normal(rng, 50, width)
    x[:, 6] *= heavy
    keys, means, squares = 300, np.zeros((2, 50, width)), 0.0
    factors = np.abs(ref.in_factors(ref.compress_activation(x, one_code("token2"))))
    for j in range(keys):
        back = ref.decompress_activation(ref.compress_activation(x, one_code("token2"), key=(7, j)))
        error = ((back - x) / factors).astype(np.float64)
        means[j % 2] += error * 2 / keys
        squares += float((error**2).sum()) / keys
    size = float(np.linalg.norm(x / factors))
    bias = np.sqrt(max(0, float((means[0] * means[1]).sum()))) / size  # chance drops out of it
    assert bias < most and 0.3 < np.sqrt(squares) / size < 0.4
    assert abs(float((means.mean(0) * (x / factors)).sum())) / size**2 < 0.006


@pytest.mark.parametrize("storage", ref.TOKEN_STORAGES)
@pytest.mark.parametrize("width", [1, 15, 48, 96, 144, 200, 1000])
def test_one_code_padding_does_no_harm(rng: np.random.Generator, storage: str, width: int) -> None:
    config = one_code(storage)
    saved_width = -(-width // ref.feature_block(width)) * ref.feature_block(width)
    for outs, ins in ((64, width), (width, 64)):
        gy, w, x = layer(rng, 300, outs, ins)
        saved = ref.compress_activation(x, config, key=4)
        assert ins == 64 or saved.codes.shape == (300, saved_width)
        grads = ref.backward_linear(gy, w, saved, key=3)
        limit = {"token8": 0.023, "token4": 0.13, "token2": 0.44}[storage]
        assert distance(grads.gw, gy.astype(np.float64).T @ x) < limit
        assert distance(grads.gx, gy.astype(np.float64) @ w) < 0.013


@pytest.mark.parametrize("storage", ref.TOKEN_STORAGES)
def test_one_code_features_of_many_sizes(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, storage: str
) -> None:
    """A feature's own error: the root of the sizes' spread is left of what it is without sizes."""
    gy, w, x = layer(rng, 512, 128, 128)
    for a in (gy, x):
        a *= np.exp2(np.resize([-6, 0, 0, 0, 6, 0, 0, 8], 128)).astype(f32)
    w /= np.linalg.norm(gy, axis=0)[:, None]
    plain = gy.astype(np.float64).T @ x
    sizes = np.linalg.norm(gy, axis=0)[:, None] * np.linalg.norm(x, axis=0)[None]

    def errors() -> tuple[float, float]:
        grads = ref.backward_linear(gy, w, x, config=one_code(storage), key=3)
        relative = (grads.gw - plain) * np.sqrt(512) / sizes
        small = relative[:, ::8], relative[::8]
        assert distance(grads.gw, plain) < 2 * ONE_CODE_ERROR[storage][0]
        worst = max(float(np.sqrt((part**2).mean())) for part in small)
        return worst, distance(grads.gx, gy.astype(np.float64) @ w)

    gw, gx = errors()
    monkeypatch.setattr(ref, "feature_sizes", lambda values: np.zeros(values.shape[1], np.int64))
    plain_gw, plain_gx = errors()
    assert gw < plain_gw / 100 and gx < plain_gx / 20


@pytest.mark.parametrize("storage", ref.TOKEN_STORAGES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["gy", "w", "x"])
def test_one_code_overflow_is_seen(
    rng: np.random.Generator, storage: str, bad: float, where: str
) -> None:
    """A token that is not finite gives NaN everywhere in g_w, whatever it meets there."""
    for other in (None, 0):
        arrays = dict(zip(("gy", "w", "x"), layer(rng, 37, 70, 100), strict=True))
        arrays[where][5, 3] = bad
        if other is not None and where != "w":
            arrays["x" if where == "gy" else "gy"][5] = 0
        grads = ref.backward_linear(*arrays.values(), config=one_code(storage), need=ALL, key=1)
        assert np.isnan(grads.gw).all() if where != "w" else np.isfinite(grads.gw).all()
        lost = np.zeros(grads.gx.shape, bool)
        lost[5] = where == "gy"
        lost[:, 3] |= where == "w"
        assert np.array_equal(np.isnan(grads.gx), lost)
        assert np.isfinite(grads.gb[np.arange(70) != 3]).all()
        assert np.isfinite(grads.gb[3]) == (where != "gy")
    x = arrays["x"]
    back = ref.decompress_activation(ref.compress_activation(x, one_code(storage)))
    assert np.array_equal(np.isnan(back).all(1), ~np.isfinite(x).all(1))
    assert np.array_equal(np.isnan(back).any(1), ~np.isfinite(x).all(1))


@pytest.mark.parametrize("storage", ref.TOKEN_STORAGES)
def test_one_code_zeros_and_tiny_values(rng: np.random.Generator, storage: str) -> None:
    gy, w, x = layer(rng, 21, 20, 40)
    config = one_code(storage)
    for factors in ((0, 1, 1), (1, 1, 0), (1, 0, 0), (2.0**-110, 1, 1), (1, 1, 2.0**-110)):
        operands = [v * f32(k) for v, k in zip((gy, w, x), factors, strict=True)]
        grads = ref.backward_linear(*operands, config=config, key=2)
        assert not grads.gw.any()
        assert grads.gx.any() == (factors[0] == 1 and factors[1] == 1)
    # Scales of their own, contributions below 2^-100.
    grads = ref.backward_linear(gy * f32(2.0**-60), w, x * f32(2.0**-60), config=config, key=2)
    assert not grads.gw.any() and grads.gx.any()
    # Powers of two alone change nothing else.
    plain = ref.backward_linear(gy, w, x, config=config, key=2)
    small = ref.backward_linear(gy * f32(2.0**-40), w, x * f32(2.0**-30), config=config, key=2)
    assert np.array_equal(small.gw, plain.gw * f32(2.0**-70))
    large = ref.backward_linear(gy * f32(2.0**40), w, x * f32(2.0**60), config=config, key=2)
    assert np.array_equal(large.gw, plain.gw * f32(2.0**100))


@pytest.mark.parametrize("storage", ref.TOKEN_STORAGES)
@pytest.mark.parametrize("shape", [(0, 3, 4), (3, 0, 4), (3, 4, 0), (0, 0, 0), (1, 1, 1)])
def test_one_code_empty(storage: str, shape: tuple[int, int, int]) -> None:
    tokens, outs, ins = shape
    gy, w, x = np.ones((tokens, outs), f32), np.ones((outs, ins), f32), np.ones((tokens, ins), f32)
    config = one_code(storage)
    saved = ref.compress_activation(x, config)
    grads = ref.backward_linear(gy, w, saved, need=ALL)
    assert [g.shape for g in grads] == [(tokens, ins), (outs, ins), (outs,)]
    assert ref.decompress_activation(saved).shape == (tokens, ins)
    padded = 16 * (ins > 0)
    assert saved.codes.shape == (tokens, padded)
    stored = tokens * (padded + 4)
    if storage != "token8":
        codes = tokens * padded // (2 if storage == "token4" else 4)
        stored = -(-(codes + tokens * (ins > 0)) // 4) * 4 + 2 * tokens
    assert ref.saved_bytes_of(saved).size == stored + ins
    if tokens == 0 or outs == 0:
        assert not grads.gx.any() and not grads.gw.any()
    if shape == (1, 1, 1):
        assert grads.gx[0, 0] == pytest.approx(1, rel=0.01)
        assert grads.gw[0, 0] == pytest.approx(1, rel=0.3) and grads.gb[0] == 1
    before = np.full((outs, ins), 3, f32), np.full(outs, 4, f32)
    if tokens == 0:
        kept = ref.backward_linear(
            gy, w, x, config=config, need=("gw", "gb"),
            gw_out=before[0], gb_out=before[1], accumulate=True,
        )  # fmt: skip
        assert np.array_equal(kept.gw, before[0]) and np.array_equal(kept.gb, before[1])


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_one_code_output_types_and_shapes(rng: np.random.Generator, dtype: str) -> None:
    halves = [v.astype(np.float16) for v in layer(rng, 42, 6, 35)]
    gy, w, x = (v.astype(f32) for v in halves)
    config = one_code("token4")
    plain = ref.backward_linear(gy, w, x, config=config, need=ALL, key=1)
    before = [make_golden.rounded(normal(rng, *shape), dtype) for shape in ((6, 35), (6,))]
    deep = halves[0].reshape(2, 21, 6), halves[1], halves[2].reshape(2, 21, 35)
    got = ref.backward_linear(
        *deep, config=config, need=ALL, key=1, out_dtype=dtype,
        gw_out=before[0], gb_out=before[1], accumulate=True,
    )  # fmt: skip
    assert np.array_equal(got.gx, make_golden.rounded(plain.gx, dtype).reshape(2, 21, 35))
    for found, wide, c in zip(got[1:], plain[1:], before, strict=True):
        assert np.array_equal(found, make_golden.rounded(c.astype(f32) + wide, dtype))


@pytest.mark.parametrize(
    ("storage", "field", "value"),
    [
        ("token4", "basis", "lowpass"),
        ("token4", "hadamard_block", 8),
        ("token8", "hadamard_block", 128),
        ("token4", "gx_bits", 4),
        ("token4", "gx_scale", "tensor"),
        ("token4", "weight_scale", "tensor"),
        ("token8", "gw_scale", "channel"),
        ("token8", "gw_rounding", "pseudo_stochastic"),
        ("token4", "x_scale", "tensor"),
        ("token4", "x_rounding", "nearest"),
        ("token8", "x_rounding", "pseudo_stochastic"),
        ("token4", "equalize_tokens", True),
        ("token2", "x_rounding", "nearest"),
        ("token2", "gw_scale", "tensor"),
    ],
)
def test_one_code_refuses(storage: str, field: str, value: Any) -> None:
    gy, w, x = (np.ones(shape, f32) for shape in ((3, 4), (4, 5), (3, 5)))
    config = dataclasses.replace(one_code(storage), **{field: value})
    with pytest.raises(ValueError, match=field):
        ref.compress_activation(x, config)
    with pytest.raises(ValueError, match=field):
        ref.backward_linear(gy, w, None, config=config, need=("gx",))


def test_storages_are_not_mixed() -> None:
    gy, w, x = (np.ones(shape, f32) for shape in ((3, 4), (4, 5), (3, 5)))
    saved = ref.compress_activation(x, one_code("token4"))
    for settings in (ref.recipe("default"), one_code("token8"), one_code("token2")):
        with pytest.raises(ValueError, match="storage: 'token4'"):
            ref.backward_linear(gy, w, saved, config=settings)
    with pytest.raises(ValueError, match="storage: 'int4'"):
        ref.backward_linear(gy, w, ref.compress_activation(x), config=one_code("token4"))
    for refused in (
        lambda: ref.quantize_gradient_rows(gy, one_code("token4")),
        lambda: ref.quantize_gradient_columns(gy, one_code("token4")),
        lambda: ref.quantize_weight(w, one_code("token4")),
        lambda: ref.requantize(saved),
        lambda: ref.quantize_token_weight(w, np.ones(4, f32), ref.Config()),
    ):
        with pytest.raises(ValueError, match="storage"):
            refused()


def test_fields_are_those_of_the_package() -> None:
    hotcore = pytest.importorskip("hotcore", exc_type=ImportError)
    for name in RECIPES:
        package = hotcore.HotConfig.recipe(name)
        assert dataclasses.asdict(package) == dataclasses.asdict(ref.recipe(name))


# ------------------------------------------------------------------------------------------ Goldens


@pytest.mark.parametrize("stage", make_golden.STAGES)
def test_goldens_are_what_the_reference_makes(stage: str) -> None:
    assert make_golden.differences(stage, make_golden.STAGES[stage]()) == []


@pytest.mark.parametrize("stage", make_golden.STAGES)
def test_text_goldens_read_as_documented(stage: str) -> None:
    """Read the .txt as C++ does, word by word, and find what the .npz holds."""
    lines = (make_golden.FOLDER / f"{stage}.txt").read_text(encoding="ascii").split("\n", 1)
    assert lines[0].startswith("#")
    words = iter(lines[1].split())
    dtypes = {short: np.dtype(name) for name, short in make_golden.DTYPES.items()}
    found: dict[str, dict[str, Any]] = {}
    case: dict[str, Any] = {}
    for kind in words:
        name = next(words)
        if kind == "case":
            case = found[name] = {}
        elif kind == "param":
            case[name] = [next(words) for _ in range(int(next(words)))]
        else:
            assert kind == "array"
            dtype = dtypes[next(words)]
            shape = tuple(int(next(words)) for _ in range(int(next(words))))
            raw = bytes.fromhex(next(words).replace("-", ""))
            case[name] = np.frombuffer(raw, dtype.newbyteorder(">")).reshape(shape).astype(dtype)
    wanted = make_golden.load_npz(stage)
    assert list(found) == list(wanted)
    for name, content in wanted.items():
        assert set(found[name]) == set(content)
        for part, value in content.items():
            got = found[name][part]
            if isinstance(value, np.ndarray):
                assert got.shape == value.shape and got.dtype == value.dtype
                assert got.tobytes() == value.tobytes()
            else:
                assert got == [str(v) for v in (value if isinstance(value, list) else [value])]


def test_goldens_are_small() -> None:
    files = [*make_golden.FOLDER.glob("*.npz"), *make_golden.FOLDER.glob("*.txt")]
    assert len(files) == 2 * len(make_golden.STAGES)
    assert sum(file.stat().st_size for file in files) < 1_050_000
