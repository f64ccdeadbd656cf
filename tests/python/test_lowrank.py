"""Stage hla: the bits of tests/reference.py for every basis and layout; the sketch unbiased."""

from __future__ import annotations

from typing import Any

import hotcore
import numpy as np
import pytest
import reference
from hotcore import Key
from hypothesis import given
from hypothesis import strategies as st
from support import (
    FLOATS,
    KEY,
    KINDS,
    SIZES,
    array,
    data,
    equal_bits,
    golden,
    golden_options,
    parted_key,
    poison,
    rounded,
    same_on_every_path,
    strided,
    widened,
)

BASES = ("full", "lowpass", "sequency", "sketch")
SIDES = ("activation", "gradient")


def projected(gy: np.ndarray, x: np.ndarray, **options: object) -> np.ndarray:
    """(P gy)^T (P x) / n in float64."""
    left = hotcore.hla(gy, side="gradient", key=3, **options).astype(np.float64)
    return left.T @ hotcore.hla(x, key=3, **options) / options.get("block", 16)


def test_basis_orders() -> None:
    expected = [0, 8, 2, 12, 3, 10, 4, 1, 14, 11, 6, 9, 15, 7, 13, 5]
    assert hotcore.basis_order("lowpass") == expected
    assert hotcore.basis_order("lowpass", 8) == [0, 4, 2, 3, 6, 1, 7, 5]
    expected = [0, 8, 12, 4, 6, 14, 10, 2, 3, 11, 15, 7, 5, 13, 9, 1]
    assert hotcore.basis_order("sequency") == expected


@pytest.mark.parametrize("basis", ["lowpass", "sequency"])
@pytest.mark.parametrize("block", [2, 4, 8, 16, 32, 64])
def test_order_equals_reference(basis: str, block: int) -> None:
    order = hotcore.basis_order(basis, block)
    assert order == list(reference.basis_order(basis, block))
    assert sorted(order) == list(range(block))
    if basis == "sequency":  # the number of sign changes of the rows rises by one
        rows = hotcore.fwht(np.eye(block, dtype=np.float32), block=block)[order]
        assert (np.diff(rows, axis=1) != 0).sum(1).tolist() == list(range(block))


@pytest.mark.parametrize("name", [name for name in golden("lowrank") if "_" in name])
def test_golden(name: str) -> None:
    case = golden("lowrank")[name]
    if "order" in case:
        assert hotcore.basis_order(case["basis"], case["block"]) == case["order"]
    elif "out" in case:
        names = ("basis", "rank", "block", "rows", "token_grid", "prefix_tokens", "side", "key")
        equal_bits(hotcore.hla(case["x"], **golden_options(case, *names)), case["out"])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("basis", BASES)
def test_equals_reference(rng: np.random.Generator, basis: str, side: str, dtype: str) -> None:
    for tokens in SIZES:
        for rank in (1, 2, 4, 8, 16):
            if basis == "sketch" and rank == 1:
                continue
            x = array(data(rng, (tokens, 19), "outliers"), dtype)
            options = dict(rank=rank, basis=basis, side=side, key=KEY)
            expected = reference.hla(widened(x), **options)
            equal_bits(
                widened(hotcore.hla(x, **options)), expected, f"{tokens} tokens, rank {rank}"
            )


@given(
    basis=st.sampled_from(BASES),
    exponent=st.integers(1, 6),
    rank=st.integers(1, 64),
    tokens=st.integers(0, 200),
    channels=st.integers(0, 40),
    side=st.sampled_from(SIDES),
    kind=st.sampled_from(KINDS),
    gaps=st.booleans(),
    seed=st.integers(0, 2**64 - 1),
)
def test_any_shape_equals_reference(
    basis: str,
    exponent: int,
    rank: int,
    tokens: int,
    channels: int,
    side: str,
    kind: str,
    gaps: bool,
    seed: int,
) -> None:
    block = 2**exponent
    rank = min(rank, block)
    if basis == "sketch":
        rank = max(2 ** (rank.bit_length() - 1), 2, block // 16)
    x = data(np.random.default_rng(seed % 2**32), (tokens, channels), kind)
    options = dict(rank=rank, basis=basis, block=block, side=side, key=Key(seed, 7, 5))
    expected = reference.hla(x, **options)
    equal_bits(hotcore.hla(strided(x) if gaps else x, **options), expected)


@pytest.mark.parametrize("basis", ["lowpass", "sequency", "sketch"])
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(
    ("grid", "prefix", "block"),
    [
        ((14, 14), 1, 16),
        ((7, 7), 0, 16),
        ((3, 3), 2, 16),
        ((4, 9), 1, 8),
        ((5, 1), 3, 4),
        ((2, 16), 0, 32),
        ((8, 8), 5, 64),
        ((1, 1), 1, 2),
    ],
)
def test_token_grid_and_prefix(
    rng: np.random.Generator, basis: str, side: str, grid: tuple[int, int], prefix: int, block: int
) -> None:
    for samples in (0, 1, 3):
        tokens = samples * (prefix + grid[0] * grid[1])
        x = data(rng, (tokens, 11))
        for rank in (2, 4, block):
            if rank > block or (basis == "sketch" and rank * 16 < block):
                continue
            options = dict(
                rank=rank,
                basis=basis,
                block=block,
                token_grid=grid,
                prefix_tokens=prefix,
                side=side,
                key=KEY,
            )
            equal_bits(
                hotcore.hla(x, **options),
                reference.hla(x, **options),
                f"{samples} x {grid}, {rank}",
            )


@pytest.mark.parametrize("basis", ["lowpass", "sequency", "sketch"])
@pytest.mark.parametrize("block", [2, 4, 8, 16, 32, 64])
def test_full_rank_keeps_the_product(rng: np.random.Generator, basis: str, block: int) -> None:
    gy, x = (rng.integers(-4, 5, (53, n)).astype(np.float32) for n in (6, 9))
    product = projected(gy, x, basis=basis, block=block, rank=block)
    np.testing.assert_array_equal(product, gy.T.astype(np.float64) @ x)


@pytest.mark.parametrize("basis", ["lowpass", "sequency", "sketch"])
@pytest.mark.parametrize(
    "layout", [(14, 14, 1), (8, 8, 0), (3, 5, 2), (4, 9, 1), (9, 4, 0), (1, 1, 1), (5, 6, 2)]
)
def test_token_grid_is_a_bijection(
    rng: np.random.Generator, basis: str, layout: tuple[int, int, int]
) -> None:
    # With every row kept the order of the tokens does not matter, if each is there once.
    height, width, prefix = layout
    tokens = 3 * (height * width + prefix)
    gy, x = (rng.integers(-4, 5, (tokens, n)).astype(np.float32) for n in (2, 3))
    product = projected(
        gy, x, basis=basis, rank=16, token_grid=(height, width), prefix_tokens=prefix
    )
    np.testing.assert_array_equal(product, gy.T.astype(np.float64) @ x)


def test_token_grid_tiles() -> None:
    # 8 x 8 patches, a class token: block 0 is the upper left 4 x 4 tile, block 1 the one beside it.
    tokens = np.arange(65, dtype=np.float32)[:, None]
    options = dict(basis="lowpass", rank=1, token_grid=(8, 8), prefix_tokens=1)
    image = tokens[1:].reshape(2, 4, 2, 4)
    sums = image.sum((1, 3)).ravel().tolist()
    assert hotcore.hla(tokens, **options).ravel().tolist() == [*sums, 0]
    tokens[0] = 3
    for side in SIDES:
        assert hotcore.hla(tokens, side=side, **options)[-1, 0] == 12
    options["block"] = 8  # tiles of 2 x 4
    assert hotcore.hla(tokens, **options).ravel()[-1] == 6
    assert hotcore.hla(tokens, side="gradient", **options).ravel()[-1] == 12


def test_row_counts() -> None:
    def count(tokens: int, **options: object) -> int:
        return int(hotcore.hla(np.zeros((tokens, 1), np.float32), **options).shape[0])

    assert count(197, basis="lowpass") == 13 * 8
    assert count(0) == 0
    assert count(197, basis="full") == 197
    layout = dict(token_grid=(14, 14), prefix_tokens=1)
    assert count(2 * 197, basis="lowpass", **layout) == (2 * 196 + 15) // 16 * 8 + 2


def test_full_is_the_identity(rng: np.random.Generator) -> None:
    x = data(rng, (37, 5))
    for side in SIDES:
        equal_bits(hotcore.hla(x, basis="full", side=side), x)


def test_rows_are_rows_of_the_transform(rng: np.random.Generator) -> None:
    x = data(rng, (40, 7))
    rows = [0, 1, 2, 3, 4, 8, 10, 11, 12, 14]  # the authors' code
    got = hotcore.hla(x, basis="lowpass", rows=rows)
    padded = np.zeros((48, 7), np.float32)
    padded[:40] = x
    every = hotcore.fwht(padded, axis=0).reshape(3, 16, 7)
    equal_bits(got, every[:, rows].reshape(30, 7))
    equal_bits(hotcore.hla(x, basis="lowpass", rows=rows[::-1]), got)
    equal_bits(got, reference.hla(x, basis="lowpass", rows=rows))


def test_eight_rows_of_a_smooth_image() -> None:
    # Waves of at least 8 pixels. The ten rows of the authors' code are all whose two sequencies add
    # up to 3 or less; of the last four, the two along an edge of the tile are the ones that matter.
    rng = np.random.default_rng(0)
    y, x = np.mgrid[0:32, 0:32] / 32

    def images(count: int) -> np.ndarray:
        waves = rng.uniform(0, 4, (count, 6, 2))
        phase, size = rng.uniform(0, 2 * np.pi, (count, 6)), rng.standard_normal((count, 6))
        angle = waves[..., :1, None] * y + waves[..., 1:, None] * x  # [count, 6, 32, 32]
        values = size[..., None, None] * np.cos(2 * np.pi * angle + phase[..., None, None])
        return np.ascontiguousarray(values.sum(1).reshape(count, -1).T, np.float32)

    gy, tokens = images(40), images(48)
    exact = gy.T @ tokens

    def error(**options: Any) -> float:
        kept = [
            hotcore.hla(v, basis="lowpass", token_grid=(32, 32), side=side, **options)
            for v, side in ((gy, "gradient"), (tokens, "activation"))
        ]
        return float(np.linalg.norm(kept[0].T @ kept[1] / 16 - exact) / np.linalg.norm(exact))

    ten = error(rows=[0, 1, 2, 3, 4, 8, 10, 11, 12, 14])
    assert error() < 1.6 * ten  # 1.4; rows 11 and 14 in place of 1 and 4: 3.7
    assert error(rows=[0, 2, 3, 8, 10, 11, 12, 14]) > 3 * ten


def test_sketch_keeps_a_subspace() -> None:
    # The rows of a sketch are the rows of the transform with parity(a & k) = 0, for one a != 0.
    x = np.random.default_rng(5).integers(-50, 51, (16 * 200, 1)).astype(np.float32)
    every = hotcore.fwht(x, axis=0).reshape(200, 16)
    got = hotcore.hla(x, key=77).reshape(200, 8)
    parity = np.array([bin(i).count("1") & 1 for i in range(16)])
    index = np.arange(16)
    drawn = set()
    for rows, kept in zip(every, got, strict=True):
        fits = [a for a in range(1, 16) if sorted(rows[parity[a & index] == 0]) == sorted(kept)]
        assert fits
        drawn.update(fits[:1])
        assert kept[0] == rows[0]
    assert len(drawn) == 15


def test_lowpass_keeps_what_is_smooth() -> None:
    # Of a linear ramp nothing is lost; a wave keeps more where the 16 tokens are a tile.
    y, x = np.meshgrid(np.arange(16), np.arange(16), indexing="ij")

    def lost(image: np.ndarray, grid: tuple[int, int] | None) -> float:
        tokens = image.astype(np.float32).reshape(256, 1)
        rows = hotcore.hla(tokens, basis="lowpass", rank=8, token_grid=grid).astype(np.float64)
        return float(1 - (rows**2).sum() / 16 / (tokens.astype(np.float64) ** 2).sum())

    assert lost(y + x, (16, 16)) == 0
    wave = np.cos(2 * np.pi * (3 * y + 2 * x) / 32)
    assert lost(wave, (16, 16)) < 0.03 < 0.1 < lost(wave, None)


def test_out(rng: np.random.Generator) -> None:
    x = data(rng, (33, 10))
    expected = hotcore.hla(x, key=9)
    for dtype in ("float32", "float16"):
        out = poison((24, 10), dtype)
        assert hotcore.hla(x, key=9, out=out) is out
        equal_bits(widened(out), rounded(expected, dtype))


def test_key_decides_the_sketch(rng: np.random.Generator) -> None:
    x = data(rng, (160, 4))
    base = hotcore.hla(x, key=Key(1, 2, 3))
    equal_bits(hotcore.hla(x, key=Key(1, 2, 3)), base)
    for other in (Key(2, 2, 3), Key(1, 3, 3), Key(1, 2, 4), Key(1 << 40, 2, 3), Key(1, 1 << 40, 3)):
        assert (hotcore.hla(x, key=other) != base).any()
    equal_bits(hotcore.hla(x, key=5), hotcore.hla(x, key=Key(5, 0, 0)))


@pytest.mark.parametrize("rank", [2, 4, 8])
def test_sketch_is_unbiased(rng: np.random.Generator, rank: int) -> None:
    # Mean over many keys of G^T X / n against g_y^T x; standard errors from the same draws.
    gy, x = data(rng, (160, 5)), data(rng, (160, 6))
    exact = gy.T.astype(np.float64) @ x
    draws = np.stack(
        [
            hotcore.hla(gy, rank=rank, side="gradient", key=key).astype(np.float64).T
            @ hotcore.hla(x, rank=rank, key=key)
            / 16
            for key in range(4000)
        ]
    )
    error = draws.std(0, ddof=1) / np.sqrt(len(draws))
    z = (draws.mean(0) - exact) / error
    assert np.abs(z).max() < 4.5
    assert 0.4 < np.sqrt((z**2).mean()) < 1.6


def test_sketch_weighs_rows_by_their_chance() -> None:
    # A unit vector of the transform: row k of 16 is kept with probability 7/15, row 0 always.
    basis = hotcore.fwht(np.eye(16, dtype=np.float32)).astype(np.float32)
    draws = np.zeros((16, 16))
    keys = 3000
    for key in range(keys):
        g = hotcore.hla(basis, side="gradient", key=key).astype(np.float64)
        draws += g.T @ hotcore.hla(basis, key=key) / 16
    mean = draws / keys / 16  # E = identity
    assert mean[0, 0] == pytest.approx(1, abs=1e-6)
    sd = np.sqrt((15 / 7 - 1) / keys)
    assert np.abs(np.diag(mean)[1:] - 1).max() < 4.5 * sd
    off = mean - np.diag(np.diag(mean))
    assert np.abs(off).max() < 4.5 * sd


@pytest.mark.parametrize("basis", BASES)
def test_same_bits_on_every_path(rng: np.random.Generator, basis: str) -> None:
    for dtype in FLOATS:
        x = array(data(rng, (3 * 197, 35)), dtype)
        for side in SIDES:
            same_on_every_path(lambda x=x, side=side: hotcore.hla(x, basis=basis, side=side, key=4))


def test_non_finite_values_stay_in_their_block(rng: np.random.Generator) -> None:
    x = data(rng, (48, 3))
    x[20, 1] = np.nan
    for basis in ("lowpass", "sequency"):
        out = hotcore.hla(x, basis=basis).reshape(3, 8, 3)
        assert np.isnan(out[1, :, 1]).all()
        assert np.isfinite(np.delete(out, 1, axis=0)).all()
        assert np.isfinite(out[1][:, [0, 2]]).all()


def test_counter_is_added_to_the_offset(rng: np.random.Generator) -> None:
    x = rng.standard_normal((100, 9)).astype(np.float32)
    plain, counted, _ = parted_key(rng)
    options = {"basis": "sketch", "rank": 8}
    equal_bits(hotcore.hla(x, key=counted, **options), hotcore.hla(x, key=plain, **options))
