"""Stage gemm: exact sums, and the dequantisation to the bit."""

import hotcore
import numpy as np
import pytest
import reference
from hypothesis import given
from hypothesis import strategies as st
from support import FLOATS, SIZES, array, equal_bits, given_as, isas, refused, running, widened

SAFE_K = 131_071


def codes(rng: np.random.Generator, rows: int, k: int, bits: int = 8) -> np.ndarray:
    limit = 127 if bits == 8 else 7
    return rng.integers(-limit, limit + 1, (rows, k), dtype=np.int8)


def exact(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return a.astype(np.int64) @ b.astype(np.int64).T


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bits", [8, 4])
@given(
    sizes=st.tuples(*[st.integers(0, 70)] * 2, st.sampled_from(SIZES) | st.integers(0, 300)),
    divisor=st.sampled_from([1, 2, 16, 64]), one_scale=st.tuples(st.booleans(), st.booleans()),
    accumulate=st.booleans(), seed=st.integers(0, 2**32),
)  # fmt: skip
def test_sums_and_their_dequantisation(
    bits: int, dtype: str, sizes: tuple[int, int, int], divisor: int, one_scale: tuple[bool, bool],
    accumulate: bool, seed: int,
) -> None:  # fmt: skip
    (m, n, k), rng = sizes, np.random.default_rng(seed)
    a, b = codes(rng, m, k, bits), codes(rng, n, k, bits)
    counts = (1 if one else rows for one, rows in zip(one_scale, (m, n), strict=True))
    a_scale, b_scale = (np.exp(rng.standard_normal(c)).astype(np.float32) / 64 for c in counts)
    sums = exact(a, b)
    # docs/numerics.md, "Integer GEMM and dequantisation"
    wide = sums.astype(np.float32) * b_scale[None, :] * (a_scale / np.float32(divisor))[:, None]
    before = array(rng.standard_normal((m, n)).astype(np.float32), dtype)
    expected = array(widened(before) + wide if accumulate else wide, dtype)
    if bits == 4:
        a, b = hotcore.pack_int4(a), hotcore.pack_int4(b)
    name, more = f"gemm_int{bits}", {"k": k} if bits == 4 else {}
    call, model = getattr(hotcore, name), getattr(reference, name)
    equal_bits(call(a, b, **more), sums.astype(np.int32))
    more["divisor"] = divisor
    equal_bits(wide, model(a, b, a_scale, b_scale, **more))
    more |= {"out": before, "accumulate": True} if accumulate else {"out_dtype": dtype}
    got = call(*given_as(dtype, a, b, a_scale, b_scale), **more)
    assert not accumulate or got is before
    equal_bits(got, expected)


def test_longest_int32_contraction() -> None:
    a = np.full((2, SAFE_K), -128, np.int8)
    b = np.stack([a[0], ~a[0]])
    assert hotcore.gemm_int8(a, b).tolist() == [[128 * 128 * SAFE_K, -128 * 127 * SAFE_K]] * 2
    longer = np.full((1, SAFE_K + 1), -128, np.int8)
    refused(lambda: hotcore.gemm_int8(longer, longer), "131072.*131071")


@pytest.mark.parametrize("k", [SAFE_K + 1, 200_003, 400_001])
@pytest.mark.parametrize("isa", isas())
def test_contraction_beyond_int32(k: int, isa: str) -> None:
    a = np.full((1, k), -128, np.int8)
    b = np.stack([a[0], np.where(np.arange(k) % 2, -126, 127).astype(np.int8), ~a[0]])
    one = np.ones(1, np.float32)
    with running(1, isa):
        got = hotcore.gemm_int8(a, b, one, one)
    np.testing.assert_array_equal(got, exact(a, b).astype(np.float32))


@pytest.mark.parametrize("isa", isas())
def test_every_code_is_multiplied_right(isa: str) -> None:
    # quantize never gives -128, but a caller may pass it. Saturating arithmetic would fail here.
    every = np.arange(-128, 128, dtype=np.int64).astype(np.int8)[:, None]
    with running(0, isa):
        np.testing.assert_array_equal(hotcore.gemm_int8(every, every), exact(every, every))
        a = np.full((3, 64), -128, np.int8)
        b = np.tile(every.T, (4, 1))[:, :64]
        np.testing.assert_array_equal(hotcore.gemm_int8(a, b), exact(a, b))
        np.testing.assert_array_equal(hotcore.gemm_int8(b, a), exact(b, a))


def test_rows_with_gaps(rng: np.random.Generator) -> None:
    a, b = codes(rng, 12, 90), codes(rng, 10, 100)
    views = a[::2, 5:70], b[::-1, 11:76]
    np.testing.assert_array_equal(hotcore.gemm_int8(*views), exact(*views))
    out = np.zeros((6, 30), np.float32)
    one = np.ones(1, np.float32)
    hotcore.gemm_int8(*views, one, one, out=out[:, 7:17])
    np.testing.assert_array_equal(out[:, 7:17], exact(*views))
    assert not out[:, :7].any() and not out[:, 17:].any()


def test_nan_scales_show(rng: np.random.Generator) -> None:
    a, b = codes(rng, 3, 16), codes(rng, 4, 16)
    sa = np.array([1, np.nan, 1], np.float32)
    sb = np.array([1, 1, 1, np.nan], np.float32)
    got = np.isnan(hotcore.gemm_int8(a, b, sa, sb))
    assert got[1].all() and got[:, 3].all() and got.sum() == 6
    # The result is NaN even if all codes are zero.
    assert np.isnan(hotcore.gemm_int8(a * 0, b, sa, sb)).sum() == 6


def test_int4_odd_contraction_ignores_the_last_nibble(rng: np.random.Generator) -> None:
    a, b = codes(rng, 4, 7, 4), codes(rng, 6, 7, 4)
    pa, pb = hotcore.pack_int4(a), hotcore.pack_int4(b)
    pa[:, -1] |= 0x50
    np.testing.assert_array_equal(hotcore.gemm_int4(pa, pb, k=7), exact(a, b))


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_longer_contractions_are_rounded_once(
    rng: np.random.Generator, dtype: str, accumulate: bool
) -> None:
    a, b = codes(rng, 3, 300_000), codes(rng, 5, 300_001)[:, :-1]
    sa, sb = (np.exp(rng.standard_normal(n)).astype(np.float32) / np.float32(2**20) for n in (3, 5))
    sums = (a.astype(np.int64) @ b.astype(np.int64).T).astype(np.float32)
    expected = sums * sb * (sa / np.float32(4))[:, None]
    out = rng.standard_normal((3, 5)).astype(dtype)
    if accumulate:
        expected = out.astype(np.float32) + expected
    hotcore.gemm_int8(a, b, sa, sb, divisor=4, out=out, accumulate=accumulate)
    equal_bits(out, expected.astype(dtype))
