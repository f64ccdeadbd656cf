"""One code a value in ``tests/reference.py``: storages token8, token4 and token2.

Against definitions in exact arithmetic, and against what they promise.
"""

from __future__ import annotations

import dataclasses
import itertools
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from reference_support import ALL, distance, f32, layer, normal, ref, sylvester


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
        assert found.tolist() == sizes_by_definition(values)
        assert found.any() or width < 30  # of few, one may leave the others nothing
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


BLOCKS = pytest.mark.parametrize(
    ("width", "block", "limit"), [(35, 16, 64), (96, 32, 64), (61, 64, 64)]
)


def in_groups(rng: np.random.Generator, storage: str, width: int, block: int, limit: int) -> Any:
    """What is kept of x and comes back, u, random bytes; the slices of groups. Shapes are right."""
    tokens, key, bits = 21, (3, 1, 4), int(storage[-1])
    x = awkward_tokens(rng, tokens, width)
    x[8, 32:] *= storage == "token4"  # a group of zeros where blocks do not reach across
    saved = ref.compress_activation(x, one_code(storage, hadamard_block=limit), key=key)
    padded = -(-width // block) * block
    groups = [slice(first, min(first + 32, padded)) for first in range(0, padded, 32)]
    assert saved.codes.shape == (tokens, padded) and saved.codes.dtype == np.int8
    assert saved.packed.shape == (tokens, padded * bits // 8) and saved.packed.dtype == np.uint8
    assert saved.scales.shape == (tokens,) and saved.scales.dtype == np.uint16
    assert saved.ratios.shape == (tokens, len(groups)) and saved.ratios.dtype == np.uint8
    sizes = saved.sizes.astype(int) - 127
    assert sizes.tolist() == sizes_by_definition(x) and sizes[2] > 0
    u = rotated_tokens(x, block, sizes, key if storage == "token2" else 0)
    random = ref.tile_bytes(tokens, padded, key, 3).astype(int)
    for token, values in enumerate(u):
        empty = not np.isfinite(values).all() or np.abs(values).max() < 2.0**-100
        assert empty == (token in (3, 5, 6))
        if empty:
            assert saved.scales[token] == (0x7FC0 if token == 5 else 0)
            assert not saved.ratios[token].any() and not saved.codes[token].any()
    return saved, ref._token_values(saved), u, random, groups


@BLOCKS
def test_token4_storage_by_definition(
    rng: np.random.Generator, width: int, block: int, limit: int
) -> None:
    saved, back, u, random, groups = in_groups(rng, "token4", width, block, limit)
    assert np.array_equal(ref.unpack_int4(saved.packed), saved.codes)
    for token in np.flatnonzero((saved.scales != 0) & (saved.scales != 0x7FC0)):
        bits, ratios = saved.scales[token], saved.ratios[token]
        seventh = f32(np.abs(u[token]).max()) / f32(7.5)
        t = ref.bf16_values(bits)
        assert t >= seventh > ref.bf16_values(bits - np.uint16(1))
        for g, part in enumerate(groups):
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
                assert -8 <= c <= 7 and Fraction(of) == c + Fraction(31 - 2 * (int(byte) >> 4), 32)
                # Half a step, 15 of 512 of the byte's lower half, and half a 256th where RN rounds.
                assert abs(value - of * float(step)) <= float(step) * 271 / 512 * (1 + 2.0**-18)
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


@BLOCKS
def test_token2_storage_by_definition(
    rng: np.random.Generator, width: int, block: int, limit: int
) -> None:
    """With fractions where results are exact, otherwise by single float operations."""
    saved, back, u, random, groups = in_groups(rng, "token2", width, block, limit)
    fields = saved.packed[:, :, None] >> np.array([0, 2, 4, 6], np.uint8) & 3
    assert np.array_equal(fields.reshape(saved.codes.shape), saved.codes)
    assert np.isnan(back[1][5]).all() and not back[0][[3, 6]].any()
    empty = cut_off = 0
    for token in np.flatnonzero((saved.scales != 0) & (saved.scales != 0x7FC0)):
        bits, ratios = saved.scales[token], saved.ratios[token]
        found = []
        for g, part in enumerate(groups):
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
                val.append(f32(c - 2 + (31 - 2 * (byte >> 4)) / 32))
            assert back[0][token, part].tolist() == val
            d = neighbours_first([v * of for v, of in zip(y, val, strict=True)])
            found.append((q / d) * f32(2.0 ** (e - 1)))
        t = ref.bf16_values(bits)
        largest = Fraction(float(max(found)))
        near = (ref.bf16_values(np.uint16(int(bits) + by)) for by in (0, -1, 1))
        off = [abs(Fraction(float(value)) - largest) for value in near]
        assert off[0] == min(off)
        for g, (part, scale) in enumerate(zip(groups, found, strict=True)):
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
        u := ref.tile_bytes(tokens, 64, 3, 3).reshape(tokens, 2, 32),
        ref._upper_half(u),
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
        ref, "_cut_off", lambda y, *_: (np.zeros(y.shape, np.int8), halves[:, :, None])
    )
    _, scales, ratios = ref._cut_off_tokens(np.ones((8, 96), f32), 0)
    assert (scales == 0x3F80).all() and (ratios[:, 0] == 255).all()
    wanted = [[nearest_ratio(Fraction(float(v))) for v in row] for row in halves]
    assert ratios.tolist() == wanted and (ratios % 2 == 1).all()


def test_overflow_of_token2_is_seen() -> None:
    """A scale above the largest bf16 number: T is Inf, and nothing of the token is finite."""
    # Beside the largest of a group, values that the dither turns over.
    x = np.where(ref.tile_bytes(600, 32, 3, 3) < 128, f32(1), f32(-1)) * f32(2.0**122)
    x[:, 0] = f32(1.914 * 2.0**127)
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
    """Within half a step, and a 32nd where dither is, before the transform is undone (token2, which
    cuts off, is not); sizes of features come back, too.
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
    half = np.abs(kept - u) <= steps * (0.5001 if storage == "token8" else 0.5294) + 1e-6 * np.abs(
        u
    ).max(1, keepdims=True)
    assert half.all() or storage == "token2"
    undone = (kept.reshape(-1, n) @ sylvester(n)).reshape(45, padded)[:, :width] * factors / n
    assert np.allclose(back, undone, rtol=0, atol=1e-5 * np.abs(undone).max(1, keepdims=True))
    limit = {"token8": 0.012, "token4": 0.12, "token2": 0.42}[storage]
    assert distance(back / factors, x / factors) < limit


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
        b = int(ref.tile_bytes(37, 48, kept, 3)[token, i]) >> 4
        if ratio:
            value = code + (31 - 2 * b) / 32 - (2 if storage == "token2" else 0)
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
