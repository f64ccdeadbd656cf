"""Stage fwht: the same bits as tests/reference.py, and the Hadamard matrix in float64."""

import math

import hotcore
import numpy as np
import pytest
import reference
from hypothesis import given
from hypothesis import strategies as st
from support import (
    FLOATS,
    KINDS,
    array,
    data,
    equal_bits,
    isas,
    running,
    same_on_every_path,
    strided,
    torch,
    widened,
)


def matrix(order: int) -> np.ndarray:
    """Sylvester matrix from its definition, parity(i & k)."""
    index = np.arange(order)
    parity = np.array([bin(i).count("1") & 1 for i in range(order)])
    return 1.0 - 2.0 * parity[index[:, None] & index[None, :]]


@given(
    exponent=st.integers(0, 6), blocks=st.integers(0, 3),
    others=st.lists(st.integers(0, 7), min_size=0, max_size=3), axis=st.integers(0, 3),
    kind=st.sampled_from(KINDS), gaps=st.booleans(), seed=st.integers(0, 2**32),
)  # fmt: skip
def test_any_shape_equals_reference(
    exponent: int, blocks: int, others: list[int], axis: int, kind: str, gaps: bool, seed: int
) -> None:
    block = 2**exponent
    axis = axis % (len(others) + 1)
    shape = (*others[:axis], blocks * block, *others[axis:])
    x = data(np.random.default_rng(seed), shape, kind)
    expected = reference.fwht(x, axis=axis, block=block)
    for along in (axis, axis - len(shape)):
        equal_bits(hotcore.fwht(strided(x) if gaps else x, axis=along, block=block), expected)


@pytest.mark.parametrize("block", [1, 2, 4, 8, 16, 32, 64, 256, 512, 2048])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_matches_float64_on_every_axis(rng: np.random.Generator, block: int, axis: int) -> None:
    shape = [3, 5, 7]
    shape[axis] = block * (2 if block <= 64 else 1)
    x = data(rng, tuple(shape), "outliers")
    out = hotcore.fwht(x, axis=axis, block=block)
    rows = np.moveaxis(x, axis, -1).astype(np.float64)
    blocks = rows.reshape(*rows.shape[:-1], -1, block)
    exact = blocks @ matrix(block)
    got = np.moveaxis(out, axis, -1).reshape(blocks.shape)
    bound = math.log2(block) * 2.0**-24 * np.abs(blocks).sum(-1, keepdims=True) * (1 + 1e-6)
    assert (np.abs(got - exact) <= bound).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_types(rng: np.random.Generator, dtype: str) -> None:
    x = rng.integers(-8, 9, (3, 32)).astype(np.float32)  # sums of 16 are exact in every type
    equal_bits(widened(hotcore.fwht(array(x, dtype))), hotcore.fwht(x))


@pytest.mark.parametrize("isa", isas())
def test_half_conversion_rounds_to_even(isa: str) -> None:
    if torch is None:
        pytest.skip("needs torch")
    every = np.arange(65536, dtype=np.uint16)
    with running(1, isa):
        for dtype, one_up in ((torch.float16, 2.0**-10), (torch.bfloat16, 2.0**-7)):
            halves = torch.from_numpy(every.copy()).view(dtype)
            wide = hotcore.fwht(halves, block=1, out=torch.empty(65536))
            equal_bits(wide, halves.float())
            back = hotcore.fwht(wide, block=1, out=torch.empty(65536, dtype=dtype))
            finite = ~torch.isnan(halves)
            assert torch.equal(back[finite].view(torch.int16), halves[finite].view(torch.int16))
            ties = torch.tensor([1 + one_up / 2, 1 + 3 * one_up / 2, 1 + one_up / 2 + 2.0**-20])
            got = hotcore.fwht(ties, block=1, out=torch.empty(3, dtype=dtype))
            assert got.tolist() == [1.0, 1 + 2 * one_up, 1 + one_up]
            assert torch.equal(got, ties.to(dtype))


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtype", FLOATS)
def test_same_bits_on_every_path(rng: np.random.Generator, axis: int, dtype: str) -> None:
    x = array(data(rng, (96, 80)), dtype)
    same_on_every_path(lambda: hotcore.fwht(x, axis=axis))
    same_on_every_path(lambda: hotcore.fwht(x[:, :67] if axis == 0 else x[:67], axis=axis, block=8))
