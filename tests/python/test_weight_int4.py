"""Stage weight_int4: the reference's bits, products with exponents, error, edges."""

import copy
from dataclasses import replace
from typing import Any

import hotcore
import numpy as np
import pytest
import reference
from hotcore import HotConfig
from hypothesis import given
from hypothesis import strategies as st
from support import FLOATS, KINDS, array, data, equal_bits, refused, strided, widened


def exponents_of(rng: np.random.Generator, ins: int, limit: int = 4) -> np.ndarray:
    return rng.integers(-limit, limit, ins, np.int8, endpoint=True)


def joined(*arrays: np.ndarray) -> np.ndarray:
    return np.concatenate([part.ravel().view(np.uint8) for part in arrays])


def parts(codes: hotcore.QuantizedWeightInt4) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    outs = codes.out_features
    k = -(-codes.in_features // codes.config.forward_block) * codes.config.forward_block
    scales, steps = outs * k // 2, outs * (k // 2 + 4)
    packed, factors, last = np.split(codes.data, [scales, steps])
    return packed.reshape(outs, -1), factors.view(np.float32), last.reshape(outs, -1)


@given(
    block=st.sampled_from((1, 16, 32, 64, 256)), group=st.sampled_from((32, 64)),
    outs=st.integers(0, 20), groups=st.integers(0, 5), missing=st.integers(0, 31),
    kind=st.sampled_from(KINDS), dtype=st.sampled_from(FLOATS),
    limit=st.sampled_from((None, 0, 4, 127)), seed=st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_any_shape_equals_reference(
    block: int, group: int, outs: int, groups: int, missing: int, kind: str, dtype: str,
    limit: int | None, seed: int,
) -> None:  # fmt: skip
    rng = np.random.default_rng(seed)
    whole = max(block, group)
    ins = max(0, groups * whole - (missing if missing < block >= group else 0))
    w = array(data(rng, (outs, ins), kind), dtype)
    exponents = None if limit is None else exponents_of(rng, ins, limit)
    options = {"group": group, "exponents": exponents}
    got = hotcore.quantize_weight_int4(w, HotConfig(forward_block=block), **options)
    packed, scales, steps = reference.quantize_weight_int4(widened(w), block, group, exponents)
    equal_bits(got.data, joined(packed, scales, steps))
    codes = reference.expand_weight_int4(packed, steps, group)
    expanded = hotcore.expand_weight_int4(got)
    equal_bits(expanded.data, joined(codes, scales))
    assert (expanded.out_features, expanded.in_features) == (outs, ins)
    assert expanded.exponents is exponents
    wide = reference.dequantize_weight(codes, scales, block, ins, exponents)
    equal_bits(hotcore.dequantize_weight(expanded, "float32"), wide)
    rounded = hotcore.dequantize_weight(expanded, dtype)
    equal_bits(rounded, array(wide, dtype))


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_product_with_exponents_equals_reference(rng: np.random.Generator, dtype: str) -> None:
    for tokens, outs, ins, block, group in ((7, 5, 128, 64, 32), (40, 33, 300, 256, 64)):
        config = HotConfig(forward_block=block)
        x, w = (array(data(rng, (n, ins)), dtype) for n in (tokens, outs))
        bias, exponents = array(data(rng, (outs,)), dtype), exponents_of(rng, ins)
        left = reference.quantize_forward_operand(widened(x), block, exponents)
        x_codes = hotcore.quantize_forward_input(x, config, exponents=exponents)
        equal_bits(x_codes.data, joined(*left))
        for again in (x, strided(x)):
            options = {"keep": True, "exponents": exponents}
            kept, saved = hotcore.quantize_forward_input(again, config, **options)
            equal_bits(kept.data, x_codes.data)
            equal_bits(saved.data, hotcore.compress_activation(x, config).data)
        packed, scales, steps = reference.quantize_weight_int4(widened(w), block, group, exponents)
        right = reference.expand_weight_int4(packed, steps, group), scales
        expected = reference.forward_product(left, right, widened(bias), block)
        options = {"group": group, "exponents": exponents}
        codes = hotcore.quantize_weight_int4(strided(w), config, **options)
        weight = hotcore.expand_weight_int4(codes)
        for operand in (x, x_codes):
            y = hotcore.forward_linear(operand, weight, bias, out_dtype="float32")
            equal_bits(y, expected)


def test_steps_have_the_least_error(rng: np.random.Generator) -> None:
    """Sums are within 3 % of the best of all steps, with the best code of each value."""
    w = data(rng, (16, 256))
    packed, scales, steps = parts(hotcore.quantize_weight_int4(w))
    operand = reference.fwht(w, block=64).astype(np.float64)
    values = (operand / scales[:, None].astype(np.float64)).reshape(-1, 32)
    chosen = reference.expand_weight_int4(packed, steps).reshape(values.shape)
    error = np.square(values - chosen).sum(1)
    least = np.full(len(values), np.inf)
    for step in range(1, 136):
        every = np.arange(256, dtype=np.uint8)[None]
        grid = reference.expand_weight_int4(every, np.full((1, 16), step))
        distance = np.abs(values[..., None] - np.unique(grid)).min(-1)
        least = np.minimum(least, np.square(distance).sum(1))
    assert (error >= least - 1e-6 * error).all()
    assert (error < 2 * least).all() and error.sum() < 1.03 * least.sum()


def test_error_of_the_weight(rng: np.random.Generator) -> None:
    """Relative error of normal values; NF4 in blocks of 64 has 0.094 of them."""
    w = data(rng, (128, 1024))
    for group, expected in ((32, 0.0846), (64, 0.0931)):
        codes = hotcore.quantize_weight_int4(w, group=group)
        expanded = hotcore.expand_weight_int4(codes).data
        values = expanded[: w.size].view(np.int8).reshape(w.shape).astype(np.float64)
        values *= expanded[w.size :].view(np.float32)[:, None]
        back = reference.fwht(values.astype(np.float32), block=64) / 64
        error = np.linalg.norm(back - w) / np.linalg.norm(w)
        assert abs(error - expected) < 0.002, (group, error)


def test_every_code_and_step_expands() -> None:
    """All INT4 codes with all bytes as steps; steps above 135 count as 135."""
    codes = np.tile(np.arange(256, dtype=np.uint8), (256, 1))
    steps = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 16, 1)
    buffer = joined(codes, np.ones(256, np.float32), steps)
    w = hotcore.QuantizedWeightInt4(buffer, 256, 512, HotConfig())
    got = hotcore.expand_weight_int4(w).data[: 256 * 512].view(np.int8).reshape(256, 512)
    expected = reference.expand_weight_int4(codes, np.minimum(steps, 135))
    equal_bits(got, expected)
    assert np.abs(got.astype(int)).max() == 127


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite(rng: np.random.Generator, bad: float) -> None:
    w = data(rng, (5, 128))
    w[3] = 0
    plain = [part.copy() for part in parts(hotcore.quantize_weight_int4(w))]
    assert not plain[1][3] and not plain[2][3].any()
    w[2, 77] = bad
    packed, scales, steps = parts(hotcore.quantize_weight_int4(w))
    assert np.isnan(scales[2]) and not packed[2].any() and not steps[2].any()
    for got, expected in zip((packed, scales, steps), plain, strict=True):
        equal_bits(np.delete(got, 2, 0), np.delete(expected, 2, 0))


def test_bad_arguments_are_named(rng: np.random.Generator) -> None:
    w, exponents = data(rng, (4, 128)), exponents_of(rng, 128)
    quantise = hotcore.quantize_weight_int4
    for match, call in (
        ("w: shape", lambda: quantise(w[0])),
        ("w: dtype", lambda: quantise(w.astype(np.float64))),
        ("weight_int4_bytes: group is 48; expected 32 or 64", lambda: quantise(w, group=48)),
        (".*w has 48 in features, 48 after.*multiple of group = 32",
         lambda: quantise(w[:, :48], HotConfig(forward_block=16))),
        ("exponents: dtype", lambda: quantise(w, exponents=exponents.astype(np.int32))),
        (".*exponents has shape", lambda: quantise(w, exponents=exponents[:64])),
        (".*exponents has 2 dim", lambda: quantise(w, exponents=exponents[None])),
        (".*exponents has stride", lambda: quantise(w[:, :64], exponents=exponents[::2])),
        (".*exponents is not aligned", lambda: quantise(w[:, 1:], exponents=exponents[1:])),
        (".*exponents has shape",
         lambda: hotcore.quantize_forward_input(w, exponents=exponents[:64])),
    ):  # fmt: skip
        refused(call, f"^{match}")
    codes = quantise(w, exponents=exponents)
    expand, dequantise = hotcore.expand_weight_int4, hotcore.dequantize_weight
    expanded, plain = expand(codes), hotcore.quantize_forward_weight(w)
    other, less = replace(codes, group=64), replace(expanded, out_features=3)
    refused(lambda: expand(other), "w has .* bytes; expected")
    refused(lambda: expand(plain), "w: expected a QuantizedWeightInt4", TypeError)
    refused(lambda: dequantise(codes), "w: expected a QuantizedForwardWeight", TypeError)
    refused(lambda: dequantise(less), "^dequantize_weight: w has .* bytes; expected")
    scaled = hotcore.quantize_forward_input(w, exponents=exponents)
    for x, other in (
        (hotcore.quantize_forward_input(w), expanded),
        (hotcore.quantize_forward_input(w, exponents=exponents + 1), expanded),
        (scaled, w),
        (scaled, replace(expanded, exponents=None)),
    ):
        with pytest.raises(ValueError, match="^x: quantised with other exponents than w"):
            hotcore.forward_linear(x, other)


def test_restored_operands_have_equal_exponents(rng: np.random.Generator) -> None:
    """Operands that come from a file have arrays of their own."""
    w, x = data(rng, (4, 128)), data(rng, (3, 128))
    exponents = exponents_of(rng, 128)
    expanded = hotcore.expand_weight_int4(hotcore.quantize_weight_int4(w, exponents=exponents))
    codes = hotcore.quantize_forward_input(x, exponents=exponents)
    expected = hotcore.forward_linear(codes, expanded)
    for left, right in (
        (copy.deepcopy(codes), expanded),
        (codes, replace(expanded, exponents=exponents.copy())),
    ):
        equal_bits(hotcore.forward_linear(left, right), expected)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda e: e.astype(np.int32), "w.exponents: dtype int32; expected int8"),
        (lambda e: e[:64].copy(), r"\w+: w.exponents has shape"),
        (lambda e: e[None], r"\w+: w.exponents has 2 dim"),
        (list, "w.exponents: expected an array"),
    ],
)
def test_exponents_of_a_weight_are_named(rng: np.random.Generator, change: Any, match: str) -> None:
    """The caller of these functions has passed no ``exponents``."""
    w, exponents = data(rng, (4, 128)), exponents_of(rng, 128)
    expanded = hotcore.expand_weight_int4(hotcore.quantize_weight_int4(w, exponents=exponents))
    expanded = replace(expanded, exponents=change(exponents))
    error = TypeError, ValueError
    refused(lambda: hotcore.dequantize_weight(expanded), f"^{match}", error)
    refused(lambda: hotcore.forward_linear(w, expanded), f"^{match}", error)
