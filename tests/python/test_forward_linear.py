"""Stage forward_linear: the reference's bits, its bound, its errors."""

import dataclasses
import itertools

import hotcore
import numpy as np
import pytest
import reference
from hotcore import HotConfig, Key, _core
from hotcore.config import RECIPES
from hypothesis import given
from hypothesis import strategies as st
from support import (
    FLOATS,
    KINDS,
    array,
    data,
    equal_bits,
    poison,
    refused,
    rounded,
    same_on_every_path,
    strided,
    torch,
    widened,
)

BLOCKS = (1, 2, 4, 8, 16, 32, 64, 256)


def layer(
    rng: np.random.Generator, tokens: int, outs: int, ins: int, kind: str = "normal"
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x, w and a bias."""
    return data(rng, (tokens, ins), kind), data(rng, (outs, ins), kind), data(rng, (outs,), kind)


def check_against_reference(x: object, w: object, bias: object, block: int, dtype: str) -> None:
    config = HotConfig(forward_block=block)
    wide = (widened(x), widened(w), None if bias is None else widened(bias))
    expected = reference.forward_linear(*wide, config=config, out_dtype=dtype)
    for weight in (w, hotcore.quantize_forward_weight(w, config)):
        got = hotcore.forward_linear(x, weight, bias, config=config, out_dtype=dtype)
        assert str(got.dtype).endswith(dtype)
        equal_bits(got, expected, f"block {block}, {dtype}")


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("block", BLOCKS)
@given(
    shape=st.tuples(st.integers(0, 200), st.integers(0, 100), st.integers(0, 260)),
    kind=st.sampled_from(KINDS), biased=st.booleans(), seed=st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_any_shape_equals_reference(
    block: int, shape: tuple[int, int, int], kind: str, dtype: str, biased: bool, seed: int
) -> None:
    x, w, bias = (array(v, dtype) for v in layer(np.random.default_rng(seed), *shape, kind))
    check_against_reference(x, w, bias if biased else None, block, dtype)


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_quantised_input_gives_the_same_bits(rng: np.random.Generator, dtype: str) -> None:
    for tokens, outs, ins, block in ((1, 20, 70, 32), (7, 1, 1, 64), (130, 33, 129, 16)):
        config = HotConfig(forward_block=block)
        x, w, bias = (array(part, dtype) for part in layer(rng, tokens, outs, ins))
        expected = hotcore.forward_linear(x, w, bias, config=config)
        codes = hotcore.quantize_forward_input(x, config)
        assert (codes.tokens, codes.in_features, codes.dtype) == (tokens, ins, dtype)
        for weight in (w, hotcore.quantize_forward_weight(w, config)):
            equal_bits(hotcore.forward_linear(codes, weight, bias), expected)
        equal_bits(hotcore.quantize_forward_input(strided(x), config).data, codes.data)
        narrow = hotcore.forward_linear(codes, w, bias, out_dtype="float16")
        equal_bits(narrow, hotcore.forward_linear(x, w, bias, config=config, out_dtype="float16"))
    # The result has the leading dimensions of x.
    cube = hotcore.quantize_forward_input(x.reshape(2, 5, 13, 129), config)
    equal_bits(hotcore.forward_linear(cube, w, bias), expected.reshape(2, 5, 13, 33))
    out = poison((130, 33), dtype)
    assert hotcore.forward_linear(cube, w, bias, out=out) is out
    equal_bits(out, expected)
    same_on_every_path(lambda: hotcore.quantize_forward_input(x, config).data)


@given(
    recipe=st.sampled_from(tuple(RECIPES)), storage=st.sampled_from((None, "int8", "int4")),
    equalize=st.booleans(), block=st.sampled_from(BLOCKS),
    shape=st.tuples(st.integers(0, 140), st.integers(0, 150)),
    dtype=st.sampled_from(("float32", "float16", *(("bfloat16",) if torch else ()))),
    kind=st.sampled_from(KINDS), spread=st.booleans(), seed=st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_an_input_that_is_kept_has_the_bits_of_both_calls(
    recipe: str, storage: str | None, equalize: bool, block: int, shape: tuple[int, int],
    dtype: str, kind: str, spread: bool, seed: int,
) -> None:  # fmt: skip
    config = HotConfig.recipe(recipe, forward_block=block, equalize_tokens=equalize)
    if config.basis == "full" and storage is not None:
        config = dataclasses.replace(config, storage=storage)
    x = array(data(np.random.default_rng(seed), shape, kind), dtype)
    x = strided(x) if spread else x
    key = Key(seed, seed // 3, seed % 8192)
    codes, saved = hotcore.quantize_forward_input(x, config, keep=True, key=key)
    equal_bits(codes.data, hotcore.quantize_forward_input(x, config).data)
    expected = hotcore.compress_activation(x, config, key=key)
    equal_bits(saved.data, expected.data)
    assert dataclasses.replace(saved, data=None) == dataclasses.replace(expected, data=None)
    wanted = hotcore.QuantizedInput(None, shape, dtype, config)
    assert dataclasses.replace(codes, data=None) == wanted


def test_operands_of_different_dtypes(rng: np.random.Generator) -> None:
    if torch is None:
        pytest.skip("bfloat16 needs torch")
    x, w, bias = layer(rng, 33, 20, 70)
    tensors = {name: [array(rounded(v, name), "bfloat16").to(getattr(torch, name))
                      for v in (x, w, bias)] for name in FLOATS}  # fmt: skip
    for a, b, c in itertools.product(FLOATS, repeat=3):
        check_against_reference(tensors[a][0], tensors[b][1], tensors[c][2], 64, c)


def test_leading_dimensions_and_strides(rng: np.random.Generator) -> None:
    x, w, bias = layer(rng, 24, 20, 70)
    expected = hotcore.forward_linear(x, w, bias)
    cube = hotcore.forward_linear(x.reshape(2, 3, 4, 70), w, bias)
    equal_bits(cube, expected.reshape(2, 3, 4, 20))
    equal_bits(hotcore.forward_linear(strided(x), strided(w), strided(bias)), expected)
    equal_bits(hotcore.forward_linear(x, np.asfortranarray(w), bias), expected)
    out = poison((24, 40), "float32")[:, :20]  # rows with gaps
    assert hotcore.forward_linear(x, w, bias, out=out) is out
    equal_bits(np.ascontiguousarray(out), expected)
    half = poison((24, 20), "float16")
    hotcore.forward_linear(x, w, bias, out=half)
    equal_bits(half, expected.astype(np.float16))


def test_empty_arrays(rng: np.random.Generator) -> None:
    bias = data(rng, (5,))
    for tokens, outs, ins in ((0, 5, 7), (3, 0, 7), (0, 0, 0), (3, 5, 0)):
        x, w = np.empty((tokens, ins), np.float32), np.empty((outs, ins), np.float32)
        y = hotcore.forward_linear(x, w, bias[:outs])
        assert y.shape == (tokens, outs)
        equal_bits(hotcore.forward_linear(x, w), np.zeros((tokens, outs), np.float32))
    equal_bits(y, np.broadcast_to(bias, (3, 5)).copy())  # I = 0
    x, w = (np.empty((0, 2**31), np.float32) for _ in range(2))
    assert hotcore.forward_linear(hotcore.quantize_forward_input(x), w).shape == (0, 0)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_are_seen(rng: np.random.Generator, bad: float) -> None:
    x, w, bias = layer(rng, 20, 11, 70)
    plain = hotcore.forward_linear(x, w, bias)
    for operand, where in ((x, np.s_[3]), (w, np.s_[:, 3])):
        before = operand[3, 69]
        operand[3, 69] = bad
        y = hotcore.forward_linear(x, w, bias)
        operand[3, 69] = before
        assert np.isnan(y[where]).all()
        y[where] = plain[where]
        equal_bits(y, plain)
    bias[4] = bad
    y = hotcore.forward_linear(x, w, bias)
    assert (np.isnan(y[:, 4]) if np.isnan(bad) else y[:, 4] == bad).all()
    y[:, 4] = plain[:, 4]
    equal_bits(y, plain)


def test_the_transform_spreads_an_outlier(rng: np.random.Generator) -> None:
    """One channel is 30 times the others: without a transform the others lose five bits."""
    x, w = data(rng, (256, 256)), data(rng, (64, 256))
    x[:, 17] *= 30
    exact = x.astype(np.float64) @ w.astype(np.float64).T
    errors = {}
    for block in (1, 16, 64):
        y = hotcore.forward_linear(x, w, config=HotConfig(forward_block=block))
        errors[block] = np.linalg.norm(y - exact) / np.linalg.norm(exact)
    assert errors[64] < errors[16] < errors[1] and errors[64] < 0.015


def test_same_bits_on_every_path(rng: np.random.Generator) -> None:
    x, w, bias = layer(rng, 97, 61, 200, "outliers")
    for block in (1, 64, 256):
        config = HotConfig(forward_block=block)
        same_on_every_path(lambda c=config: hotcore.forward_linear(x, w, bias, config=c))
        same_on_every_path(lambda c=config: hotcore.quantize_forward_weight(w, c).data)


def test_bad_arguments_are_named(rng: np.random.Generator) -> None:
    x, w, bias = layer(rng, 8, 5, 7)
    codes = hotcore.quantize_forward_weight(w)
    for match, arguments, options in (
        ("x: shape", (x[0], w), {}),
        ("x: dtype", (x.astype(np.float64), w), {}),
        ("w: shape", (x, w[:, :6]), {}),
        ("w: shape", (x, w[0]), {}),
        ("w: shape", (x[:, :6], codes), {}),
        ("w: dtype", (x, w.astype(np.int8)), {}),
        ("forward_linear: bias has shape", (x, w, bias[:4]), {}),
        ("forward_linear: bias has 2 dimensions", (x, w, bias[None]), {}),
        ("bias: dtype", (x, w, bias.astype(np.float64)), {}),
        ("out: shape", (x, w), {"out": np.empty((8, 6), np.float32)}),
        ("out: dtype", (x, w), {"out": np.empty((8, 5), np.float64)}),
        ("out_dtype: ", (x, w), {"out_dtype": "int8"}),
        ("w: quantised with forward_block = 64; expected 16", (x, codes),
         {"config": HotConfig(forward_block=16)}),
    ):  # fmt: skip
        refused(hotcore.forward_linear, f"^({match})", ValueError, *arguments, **options)
    refused(lambda: HotConfig(forward_block=48), "^forward_block: expected .*, got 48")
    with pytest.raises(TypeError, match=r"^w: quantised for g_x .*quantize_forward_weight"):
        hotcore.forward_linear(x, hotcore.quantize_weight(w))
    refused(lambda: hotcore.forward_linear(x, None), r"^w: ", TypeError)


def test_bad_inputs_are_named(rng: np.random.Generator) -> None:
    x, w, bias = layer(rng, 8, 5, 7)
    codes = hotcore.quantize_forward_input(x)
    for match, arguments, options in (
        ("x: shape", (x[0],), {}),
        ("x: shape", (x[None, None, None],), {}),
        ("x: dtype", (x.astype(np.float64),), {}),
        ("x: dtype", (x.astype(np.int8),), {"keep": True}),
        ("config: .best. is not", (x, "best"), {}),
        ("key: ", (x,), {"keep": True, "key": Key(1, 2, 8192)}),
    ):
        refused(hotcore.quantize_forward_input, f"^({match})", ValueError, *arguments, **options)
    refused(lambda: hotcore.quantize_forward_input(None), r"^x: ", TypeError)
    short = dataclasses.replace(codes, data=codes.data[:-16])
    wrong = dataclasses.replace(codes, shape=(9, 7))
    floats = dataclasses.replace(codes, data=codes.data.astype(np.float32))
    narrow = dataclasses.replace(codes, dtype="bfloat16")  # as torch tensors have it
    out = poison((8, 5), "float32")
    before = out.copy()
    for match, arguments, options in (
        ("x: quantised with forward_block = 64; expected 16", (codes, w),
         {"config": HotConfig(forward_block=16)}),
        ("w: quantised with forward_block = 16; expected 64",
         (codes, hotcore.quantize_forward_weight(w, HotConfig(forward_block=16))), {}),
        ("w: shape", (codes, w[:, :6]), {}),
        ("forward_linear: bias has shape", (codes, w, bias[:4]), {}),
        ("x.data: dtype", (floats, w), {}),
        ("x.dtype: NumPy has no bfloat16", (narrow, w), {}),
        ("out: shape", (codes, w), {"out": np.empty((7, 5), np.float32)}),
        ("forward_linear: x has .* bytes; expected", (short, w), {"out": out}),
        ("forward_linear: x has .* bytes; expected", (wrong, w), {}),
    ):  # fmt: skip
        refused(hotcore.forward_linear, f"^{match}", ValueError, *arguments, **options)
    equal_bits(out.view(np.uint32), before.view(np.uint32))
    refused(lambda: hotcore.forward_linear(codes, codes), r"^w: ", TypeError)
    refused(lambda: hotcore.forward_linear(hotcore.compress_activation(x), w), r"^x: ", TypeError)


def test_supported_says_why_not() -> None:
    config = HotConfig(forward="int8")
    assert hotcore.supported(8, 5, 7, config) == (True, "")
    assert not hotcore.supported(-1, 5, 7, config)[0]
    context = _core.CoreContext(1)
    spec = _core.ForwardLinearSpec(hadamard_block=48)
    runs, why = _core.forward_supported(context, 8, 5, 7, spec)
    assert not runs and "48" in why
