"""Storages token8, token4 and token2, one code a value: what they have beside others.

Golden values, the reference's bits, paths, strides, parts alone and errors where tokens differ in
size are in test_backward_linear.py.
"""

from __future__ import annotations

from typing import Any

import hotcore
import numpy as np
import pytest
import reference
from hotcore import HotConfig
from support import (
    ALL,
    KEY,
    KINDS,
    OTHER_KEY,
    TOKEN_STORAGES,
    check_against_reference,
    data,
    equal_bits,
    layer,
    one_code,
)


def relative(got: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))


@pytest.mark.parametrize("storage", TOKEN_STORAGES)
def test_long_and_wide(rng: np.random.Generator, storage: str) -> None:
    """More tokens than the sizes of features are taken from; rows longer than a thread's buffer."""
    sizes = np.exp(rng.normal(0, 2, 4200)).astype(np.float32)
    for tokens, outs, ins in ((1500, 20, 24), (40, 3, 4200), (40, 4200, 3)):
        gy, w, x = layer(rng, tokens, outs, ins)
        check_against_reference(gy * sizes[:outs], w, x * sizes[:ins], one_code(storage))


@pytest.mark.parametrize("storage", TOKEN_STORAGES)
def test_what_is_kept(rng: np.random.Generator, storage: str) -> None:
    """Codes, scales, ratios and sizes by name, and how many bytes they are."""
    x = data(rng, (50, 200), "outliers")
    saved = hotcore.compress_activation(x, one_code(storage), key=KEY)
    model = reference.compress_activation(x, one_code(storage), key=KEY)
    equal_bits(saved.exponents(), model.sizes)
    if storage == "token8":
        equal_bits(saved.codes(), model.codes)
        equal_bits(saved.scales(), model.scales)
        assert saved.ratios() is None
        assert saved.nbytes == 50 * 224 + 50 * 4 + 200
    else:
        equal_bits(saved.codes(), model.packed)
        equal_bits(saved.scales(), reference.bf16_values(model.scales))
        equal_bits(saved.ratios(), model.ratios)
        row = {"token4": 112, "token2": 56}[storage]
        assert saved.nbytes == 50 * (row + 7) + 2 + 50 * 2 + 200
    wide = hotcore.saved.saved_layout(25216, 768, one_code(storage)).bytes / (25216 * 768)
    assert wide < {"token8": 1.006, "token4": 0.535, "token2": 0.285}[storage]


@pytest.mark.parametrize("storage", TOKEN_STORAGES)
def test_quantized_weight(rng: np.random.Generator, storage: str) -> None:
    """It has fixed signs, and so do the calls that take it: the reference's bits, no others."""
    config = one_code(storage, gx_rounding="stochastic")
    gy, w, x = layer(rng, 90, 70, 48)
    weight = hotcore.quantize_weight(w, config)
    saved = hotcore.compress_activation(x, config, key=KEY)
    model = reference.compress_activation(x, config, key=KEY)
    got = hotcore.backward_linear(gy, weight, saved, need=ALL, key=OTHER_KEY)
    expected = reference.backward_linear(
        gy, w, model, config=config, need=ALL, key=OTHER_KEY, quantized_weight=True
    )
    for name, ours, theirs in zip(ALL, got, expected, strict=True):
        equal_bits(ours, theirs, name)
    with pytest.raises(ValueError, match="w: quantised with"):
        hotcore.backward_linear(gy, weight, None, config=HotConfig(), need="gx")


@pytest.mark.parametrize("storage", TOKEN_STORAGES)
def test_unbiased(rng: np.random.Generator, storage: str) -> None:
    """Over 256 keys of both passes the mean error of g_w and g_x is what so many draws leave."""
    config = one_code(storage, x_rounding="stochastic")
    gy, w, x = layer(rng, 96, 40, 48)
    gy[::16] *= 30  # large tokens, beside which rounding to nearest would be biased
    draws = 256
    for part, exact in (("gw", gy.astype(np.float64).T @ x), ("gx", gy.astype(np.float64) @ w)):
        total, square = np.zeros_like(exact), 0.0
        for key in range(draws):
            saved = hotcore.compress_activation(x, config, key=1000 + key)
            got = hotcore.backward_linear(gy, w, saved, need=(part,), key=5000 + key)
            error = getattr(got, part).astype(np.float64) - exact
            total += error
            square += float((error**2).sum())
        noise = np.sqrt(square / draws)
        left = float(np.linalg.norm(total / draws))
        # What is left of so many draws has about the length noise / 16.
        # What is cut off of 2 bits comes back in the mean of many signs: a block has 16 here.
        cut = 0.1 * noise if (storage, part) == ("token2", "gw") else 0.002 * np.linalg.norm(exact)
        assert left < 1.25 * noise / np.sqrt(draws) + cut, part


@pytest.mark.parametrize("storage", TOKEN_STORAGES)
def test_a_share_of_the_tokens(rng: np.random.Generator, storage: str) -> None:
    """Half, by size: the reference's bits, unbiased, and all where only half have gradients."""
    half = {"basis": "sketch", "block": 16, "rank": 8}
    config = one_code(storage, x_rounding="stochastic", **half)
    full = one_code(storage, x_rounding="stochastic")
    for kind in KINDS:
        check_against_reference(*layer(rng, 197, 40, 50, kind), config, what=kind)
    gy, w, x = layer(rng, 160, 40, 48)
    gy *= np.exp(1.5 * rng.standard_normal((160, 1))).astype(np.float32)
    exact = gy.astype(np.float64).T @ x
    saved = hotcore.compress_activation(x, config, key=KEY)
    equal_bits(saved.data, hotcore.compress_activation(x, full, key=KEY).data)
    total, square, draws = np.zeros_like(exact), 0.0, 400
    for key in range(draws):
        error = hotcore.backward_linear(gy, None, saved, need="gw", key=key).gw - exact
        total += error
        square += float((error**2).sum())
    noise = np.sqrt(square / draws)
    kept = relative(hotcore.decompress_activation(saved).T.astype(np.float64) @ gy, exact.T)
    assert noise / np.linalg.norm(exact) < 0.8  # all of equal size: 1
    left = float(np.linalg.norm(total / draws)) / np.linalg.norm(exact)
    assert left < 1.3 * noise / np.linalg.norm(exact) / np.sqrt(draws) + kept
    # 80 slots, and fewer tokens that contribute: all are taken.
    gy[::2] = 0
    few, all_of_them = (
        relative(
            hotcore.backward_linear(gy, None, x, config=c, need="gw", key=5).gw,
            gy.astype(np.float64).T @ x,
        )
        for c in (config, full)
    )
    assert few < 1.5 * all_of_them
    # g_x and g_b are those of all tokens.
    ours = hotcore.backward_linear(gy, w, x, config=config, need=("gx", "gb"), key=5)
    theirs = hotcore.backward_linear(gy, w, x, config=full, need=("gx", "gb"), key=5)
    equal_bits(ours.gx, theirs.gx)
    equal_bits(ours.gb, theirs.gb)


@pytest.mark.parametrize("storage", TOKEN_STORAGES)
def test_features_that_differ_in_size(rng: np.random.Generator, storage: str) -> None:
    """A small feature's gradient is no noise beside a feature 1000 times its size."""
    gy, _, x = layer(rng, 512, 128, 192)
    config = one_code(storage)
    for which, axis in (("x", 0), ("gy", 1)):
        arrays = {"gy": gy.copy(), "x": x.copy()}
        arrays[which][:, 7] *= 1000
        exact = arrays["gy"].astype(np.float64).T @ arrays["x"]
        got = hotcore.backward_linear(
            arrays["gy"], None, arrays["x"], config=config, need="gw", key=3
        ).gw
        lost = np.linalg.norm(got - exact, axis=axis) / np.linalg.norm(exact, axis=axis)
        # Without sizes: 7 (x in 4 bits), 1.2 (x in 8 bits) and 1.2 (g_y).
        assert lost.max() < {"token8": 0.25, "token4": 0.8, "token2": 4.0}[storage], which


@pytest.mark.parametrize("storage", TOKEN_STORAGES)
def test_tiny_and_huge(rng: np.random.Generator, storage: str) -> None:
    config = one_code(storage)
    gy, w, x = layer(rng, 40, 20, 30)
    # What is below 2^-100 counts as zero, also what a token contributes.
    for left, right in ((2.0**-110, 1), (1, 2.0**-110), (2.0**-60, 2.0**-60)):
        tiny = gy * np.float32(left), w, x * np.float32(right)
        got = hotcore.backward_linear(*tiny, config=config, need=ALL)
        assert not got.gw.any() and got.gx.any() == (left > 2.0**-100)
    # Powers of two change exponents alone.
    plain, large = (
        hotcore.backward_linear(gy * np.float32(a), w, x * np.float32(b), config=config, key=2).gw
        for a, b in ((1, 1), (2.0**40, 2.0**60))
    )
    equal_bits(large, plain * np.float32(2.0**100))


@pytest.mark.parametrize("storage", TOKEN_STORAGES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["gy", "w", "x"])
def test_overflow_is_seen(rng: np.random.Generator, storage: str, bad: float, where: str) -> None:
    """A token that is not finite gives NaN everywhere in g_w, whatever it meets there."""
    for meets_zero in (False, True):
        arrays = dict(zip(("gy", "w", "x"), layer(rng, 37, 70, 100), strict=True))
        arrays[where][5, 3] = bad
        if meets_zero and where != "w":
            arrays["x" if where == "gy" else "gy"][5] = 0
        got = hotcore.backward_linear(*arrays.values(), config=one_code(storage), need=ALL, key=1)
        assert np.isnan(got.gw).all() if where != "w" else np.isfinite(got.gw).all()
        lost = np.zeros(got.gx.shape, bool)
        lost[5] = where == "gy"
        lost[:, 3] |= where == "w"
        assert np.array_equal(np.isnan(got.gx), lost)
        assert np.array_equal(~np.isfinite(got.gb), (np.arange(70) == 3) & (where == "gy"))
    back = hotcore.decompress_activation(
        hotcore.compress_activation(arrays["x"], one_code(storage), key=KEY)
    )
    assert np.array_equal(np.isnan(back).any(1), np.isnan(back).all(1))
    assert np.array_equal(np.isnan(back).all(1), ~np.isfinite(arrays["x"]).all(1))


@pytest.mark.parametrize("storage", TOKEN_STORAGES[1:])
def test_groups_of_zeros(rng: np.random.Generator, storage: str) -> None:
    """A group without a scale is 0 times its token's: NaN where that, or g_y's scale, is no number.

    T of token2 overflows beside a feature near the largest number, where the dither leaves it alone
    and turns the others over.
    """
    config = one_code(storage, hadamard_block=16)
    gy, w, x = layer(rng, 48, 20, 96)
    x[5, 32:] = 0
    broken = gy.copy()
    broken[5, 3] = np.nan
    check_against_reference(broken, w, x, config)
    got = hotcore.backward_linear(broken, None, x, config=config, need="gw", key=KEY)
    assert np.isnan(got.gw).all()
    if storage == "token4":  # rounded up from 2/15 of the largest number
        return
    dither = reference.tile_bytes(48, 16, KEY, reference.PURPOSE_GW_ACTIVATION)
    token, feature = np.argwhere(dither >= 240)[0]
    rotated = np.zeros((48, 16), np.float32)
    rotated[token] = np.where(dither[token] < 128, 1, -1) * np.float32(2.0**118)
    rotated[token, feature] = 1.99 * 2.0**123
    x[:] = 0
    x[:, :16] = reference.fwht(rotated) * reference.feature_signs(16, KEY)
    saved = hotcore.compress_activation(x, config, key=KEY)
    assert np.isinf(saved.scales()[token])
    check_against_reference(gy, w, x, config)
    equal_bits(
        hotcore.decompress_activation(saved),
        reference.decompress_activation(reference.compress_activation(x, config, key=KEY)),
    )
    back = hotcore.decompress_activation(saved)[token]
    assert not np.isfinite(back).any() and np.isnan(back[32:]).all()


FIXED: tuple[tuple[str, Any, str], ...] = (
    ("hadamard_block", 128, "16 or 32 or 64"),
    ("hadamard_block", 8, "16 or 32 or 64"),
    ("gx_bits", 4, "8"),
    ("gx_scale", "tensor", "token"),
    ("weight_scale", "tensor", "channel"),
    ("gw_scale", "channel", "token"),
    ("gx_rounding", "pseudo_stochastic", "nearest"),
    ("gw_rounding", "pseudo_stochastic", "nearest"),
    ("x_rounding", "pseudo_stochastic", "stochastic"),
    ("x_scale", "tensor", "int8"),
    ("equalize_tokens", True, "False"),
    ("basis", "lowpass", "'full' or 'sketch'"),
)


@pytest.mark.parametrize("storage", TOKEN_STORAGES)
@pytest.mark.parametrize(("field", "value", "expected"), FIXED)
def test_errors(storage: str, field: str, value: Any, expected: str) -> None:
    """The configuration names the field; so does libhot, for those who come to it past that."""
    named = "storage" if field == "basis" else field
    with pytest.raises(ValueError, match=f"{named}.*{expected}"):
        one_code(storage, **{field: value})


@pytest.mark.parametrize("storage", TOKEN_STORAGES)
def test_gy_is_read_once_on_cuda(storage: str) -> None:
    """Also of a device that is not there."""
    plan = hotcore.explain(4096, 768, 3072, config=one_code(storage), device="sm_90")
    assert "token_rows_kernel" in str(plan) and "slow:" not in str(plan)
