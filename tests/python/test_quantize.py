"""Stage quantize: the codes and scales of tests/reference.py, and their properties."""

import hotcore
import numpy as np
import pytest
import reference
from hotcore import Key
from hypothesis import given
from hypothesis import strategies as st
from support import (
    FLOATS,
    KINDS,
    data,
    equal_bits,
    given_as,
    keys,
    numpy_of,
    parted_key,
    rounded,
    same_on_every_path,
    strided,
    widened,
)

SCALES = ("token", "channel", "tensor")
ROUNDINGS = ("nearest", "stochastic", "pseudo_stochastic")


def spread(scale: np.ndarray, granularity: str) -> np.ndarray:
    return scale[:, None] if granularity == "token" else scale[None, :]


@given(
    rows=st.integers(0, 40), columns=st.integers(0, 150), bits=st.sampled_from([4, 8]),
    scale=st.sampled_from(SCALES), rounding=st.sampled_from(ROUNDINGS), kind=st.sampled_from(KINDS),
    gaps=st.booleans(), key=keys(),
)  # fmt: skip
def test_any_shape_equals_reference(
    rows: int, columns: int, bits: int, scale: str, rounding: str, kind: str, gaps: bool, key: Key
) -> None:
    x = data(np.random.default_rng(key.seed % 2**32), (rows, columns), kind)
    options = dict(bits=bits, scale=scale, rounding=rounding, key=key)
    q, s = hotcore.quantize(strided(x) if gaps else x, **options)
    expected_q, expected_s = reference.quantize(x, **options)
    equal_bits(s, expected_s)
    equal_bits(q, expected_q)


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_zero_stays_zero(rounding: str) -> None:
    x = np.zeros((2, 32), np.float32)
    x[0, 5] = 2.0**-101  # below the smallest amax
    q, s = hotcore.quantize(x, rounding=rounding)
    assert not q.any() and not s.any()
    x[0, 5] = 2.0**-100
    q, s = hotcore.quantize(x, rounding=rounding)
    assert q[0, 5] == 127 and s[0] > 0
    x[0, 5] = 127
    q, s = hotcore.quantize(x, scale="tensor", rounding=rounding)
    assert q[0, 5] == 127 and np.count_nonzero(q) == 1 and s.tolist() == [1]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("bits", [4, 8])
def test_non_finite_values(rng: np.random.Generator, bits: int, rounding: str, bad: float) -> None:
    x = data(rng, (3, 40))
    x[1, 7] = bad
    for scale, where in (("token", [1]), ("channel", [7]), ("tensor", [0])):
        q, s = hotcore.quantize(x, bits=bits, scale=scale, rounding=rounding)
        assert np.flatnonzero(np.isnan(s)).tolist() == where
        lost = np.broadcast_to(np.isnan(spread(s, scale)), x.shape)
        assert not q[lost].any()
        assert np.isnan(hotcore.dequantize(q, s, granularity=scale)[lost]).all()
        if scale != "tensor":
            assert q[~lost].any()


@pytest.mark.parametrize("columns", [0, 1, 2, 33, 4096, 4099])
def test_packed_codes(rng: np.random.Generator, columns: int) -> None:
    x = data(rng, (3, columns))
    q, s = hotcore.quantize(x, bits=4, key=5)
    packed, packed_s = hotcore.quantize(x, bits=4, key=5, packed=True)
    equal_bits(packed, hotcore.pack_int4(q))
    equal_bits(packed_s, s)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_dequantize_multiplies(rng: np.random.Generator, scale: str, dtype: str) -> None:
    q, s = hotcore.quantize(data(rng, (5, 21)), bits=4, scale=scale)
    expected = rounded(q.astype(np.float32) * spread(s, scale), dtype)
    packed = hotcore.pack_int4(q)
    q, s, packed = given_as(dtype, q, s, packed)
    options = dict(granularity=scale, dtype=dtype)
    got = hotcore.dequantize(q, s, **options)
    equal_bits(widened(got), expected)
    equal_bits(hotcore.dequantize(packed, s, packed=True, columns=21, **options), got)
    back = widened(hotcore.dequantize(q, s, granularity=scale))
    equal_bits(back, reference.dequantize(numpy_of(q), numpy_of(s), granularity=scale))


def test_counter_is_added_to_the_offset(rng: np.random.Generator) -> None:
    x = rng.standard_normal((48, 21)).astype(np.float32)
    plain, counted, counter = parted_key(rng)
    expected, _ = hotcore.quantize(x, bits=4, key=plain)
    equal_bits(hotcore.quantize(x, bits=4, key=counted)[0], expected)
    counter += np.uint64(1)  # each call reads it
    assert not np.array_equal(hotcore.quantize(x, bits=4, key=counted)[0], expected)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("scale", SCALES)
def test_same_bits_on_every_path(rng: np.random.Generator, scale: str, rounding: str) -> None:
    x = data(rng, (int(rng.integers(1, 30)), int(rng.integers(1, 5000))))
    for bits in (4, 8):
        options = {"bits": bits, "scale": scale, "rounding": rounding, "key": 3}
        same_on_every_path(lambda options=options: hotcore.quantize(x, **options))
