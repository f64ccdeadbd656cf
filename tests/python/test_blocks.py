"""Stage blocks: codes of transformed blocks of 64 values, and their sum over processes."""

from typing import Any

import hotcore
import numpy as np
import pytest
import reference
from c_api import CONSTANTS, CApi, tensor
from hotcore import Key, _core, contexts
from hypothesis import given
from hypothesis import strategies as st
from support import (
    FLOATS,
    KINDS,
    array,
    data,
    equal_bits,
    keys,
    numpy_of,
    parted_key,
    poison,
    widened,
)

ROUNDINGS = ("nearest", "stochastic", "pseudo_stochastic")
PLAIN = Key(0)


def wire_of(count: int, *leading: int) -> np.ndarray:
    """Poisoned bytes for vectors of ``count`` values; the last of ``leading`` is their parts."""
    blocks = -(-count // (64 * leading[-1]))
    return np.full((*leading, blocks * 68), 0xA5, np.uint8)


def encode(x: Any, parts: int = 1, rounding: str = "stochastic", key: Key = PLAIN) -> np.ndarray:
    wire = wire_of(len(x), parts)
    _core.encode_blocks(contexts.cpu(hotcore.num_threads()), x, rounding, key, wire)
    return wire


def add(wires: np.ndarray, count: int, factor: float, dtype: str = "float32") -> Any:
    out = poison((count + 1,), dtype)[1:]
    _core.sum_blocks(contexts.cpu(hotcore.num_threads()), wires, factor, out)
    return out


def expected_wire(x: Any, parts: int, rounding: str, key: Key) -> np.ndarray:
    wire, size = wire_of(len(x), parts), -(-len(x) // parts)
    for i, row in enumerate(wire):
        blocks = np.zeros((wire.shape[1] // 68, 64), np.float32)
        part = widened(x)[i * size : (i + 1) * size]
        blocks.ravel()[: len(part)] = part
        with np.errstate(invalid="ignore", over="ignore"):
            rows = reference.fwht(blocks, block=64)
        options = {"rounding": rounding, "key": key._replace(stream=key.stream + i)}
        q, scale = reference.quantize(rows, **options)
        row[:] = np.concatenate([q.view(np.uint8).ravel(), scale.view(np.uint8).ravel()])
    return wire


def expected_sum(wires: np.ndarray, count: int, factor: float) -> np.ndarray:
    """Codes times scales, added in order and transformed once, in fp32."""
    ranks, parts, size = wires.shape
    blocks = size // 68
    codes = wires[..., : blocks * 64].copy().view(np.int8).reshape(ranks, parts, blocks, 64)
    scales = wires[..., blocks * 64 :].copy().view(np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        values = codes.astype(np.float32) * scales[..., None]
        total = values[0]
        for one in values[1:]:
            total = total + one
        total = reference.fwht(total, block=64) * np.float32(factor / 64)
    return total.reshape(parts, -1)[:, : -(-count // parts)].ravel()[:count]


@given(
    count=st.one_of(st.integers(0, 200), st.integers(200, 5000)), parts=st.integers(1, 9),
    ranks=st.integers(1, 8), offset=st.integers(0, 9),
    dtypes=st.tuples(st.sampled_from(FLOATS), st.sampled_from(FLOATS)), kind=st.sampled_from(KINDS),
    rounding=st.sampled_from(ROUNDINGS), key=keys(),
)  # fmt: skip
def test_any_vector_equals_reference(
    count: int, parts: int, ranks: int, offset: int, dtypes: tuple[str, str], kind: str,
    rounding: str, key: Key,
) -> None:  # fmt: skip
    rng = np.random.default_rng(key.seed % 2**32)
    key = key._replace(stream=min(key.stream, 8192 - parts))
    wires = wire_of(count, ranks, parts)
    for rank in range(ranks):
        x = array(data(rng, (1, count + offset), kind)[0], dtypes[0])[offset:]
        own = key._replace(offset=(key.offset + rank) % 2**64)
        wires[rank] = encode(x, parts, rounding, own)
        equal_bits(wires[rank], expected_wire(x, parts, rounding, own))
    factor = float(np.float32(rng.uniform(-2, 2)))
    wanted = expected_sum(wires, count, factor)
    equal_bits(add(wires, count, factor, dtypes[1]), array(wanted, dtypes[1]))
    if parts == 1:
        equal_bits(add(wires[:, 0], count, factor), wanted)


def test_the_sum_is_near_and_unbiased(rng: np.random.Generator) -> None:
    x = data(rng, (1, 1000))[0]
    wires = np.stack([encode(x, key=Key(seed)) for seed in range(64)])
    errors = [np.linalg.norm(add(wire[None], 1000, 1.0) - x) for wire in wires[:4]]
    assert 0 < max(errors) < 0.02 * np.linalg.norm(x)
    assert np.linalg.norm(add(wires, 1000, 1 / 64) - x) < max(errors) / 4


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_value_that_is_not_finite_shows_in_its_block(bad: float) -> None:
    x = np.ones(200, np.float32)
    x[70] = bad
    found = np.isnan(add(encode(x)[None], 200, 1.0))
    assert found[64:128].all() and found.sum() == 64


def test_a_counter_is_part_of_the_key(rng: np.random.Generator) -> None:
    x = data(rng, (1, 300))[0]
    plain, counted, counter = parted_key(rng)
    wanted = encode(x, key=plain)
    equal_bits(encode(x, key=counted), wanted)
    counter[0] += np.uint64(1)
    assert (encode(x, key=counted) != wanted).any()


def test_by_the_c_api(api: CApi, rng: np.random.Generator) -> None:
    x, out = data(rng, (1, 300))[0], np.full(300, np.nan, np.float32)
    wire, key = wire_of(300, 1, 2), Key(3, 4, 5)
    api.key(key)
    api.on("hot_encode_blocks", tensor(x), CONSTANTS["HOT_STOCHASTIC"], tensor(wire[0]))
    equal_bits(wire[0], encode(x, 2, key=key))
    api.on("hot_sum_blocks", tensor(wire), 0.3, tensor(out))
    equal_bits(out, numpy_of(add(wire, 300, 0.3)))
