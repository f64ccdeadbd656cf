"""Stage pack: two INT4 codes a byte, low nibble first."""

import hotcore
import numpy as np
import pytest
import reference
from hypothesis import given
from hypothesis import strategies as st
from support import equal_bits, same_on_every_path, torch


def test_low_nibble_first() -> None:
    q = np.array([[1, -1, 7, -8, -7]], np.int8)
    packed = hotcore.pack_int4(q)
    assert packed.dtype == np.uint8
    assert packed.tolist() == [[0xF1, 0x87, 0x09]]  # the last high nibble is 0
    equal_bits(hotcore.unpack_int4(packed, 5), q)


@given(rows=st.integers(0, 9), columns=st.integers(0, 70), seed=st.integers(0, 2**32))
def test_round_trip(rows: int, columns: int, seed: int) -> None:
    q = np.random.default_rng(seed).integers(-8, 8, (rows, columns), dtype=np.int8)
    packed = hotcore.pack_int4(q)
    assert packed.shape == (rows, (columns + 1) // 2)
    equal_bits(packed, reference.pack_int4(q))
    equal_bits(hotcore.unpack_int4(packed, columns), q)
    equal_bits(reference.unpack_int4(packed, columns), q)


def test_rows_with_gaps(rng: np.random.Generator) -> None:
    q = rng.integers(-8, 8, (6, 50), dtype=np.int8)
    view = q[::2, 3:20]
    equal_bits(hotcore.pack_int4(view), hotcore.pack_int4(view.copy()))
    packed = hotcore.pack_int4(q)[::2, 1:9]
    equal_bits(hotcore.unpack_int4(packed), hotcore.unpack_int4(packed.copy()))


def test_columns_of_a_narrow_type(rng: np.random.Generator) -> None:
    q = rng.integers(-8, 8, (2, 255), dtype=np.int8)
    packed, scale = hotcore.pack_int4(q), np.ones(2, np.float32)
    equal_bits(hotcore.unpack_int4(packed, np.uint8(255)), q)
    equal_bits(hotcore.dequantize(packed, scale, packed=True, columns=np.uint8(255)), np.float32(q))
    saved = hotcore.compress_activation(rng.standard_normal((300, 64), np.float32))
    tail = hotcore.decompress_activation(saved, np.uint8(250))
    equal_bits(tail, hotcore.decompress_activation(saved, 250))


@pytest.mark.skipif(torch is None, reason="torch is not installed")
def test_torch(rng: np.random.Generator) -> None:
    q = torch.from_numpy(rng.integers(-8, 8, (3, 11), dtype=np.int8))
    packed = hotcore.pack_int4(q)
    assert packed.dtype == torch.uint8
    equal_bits(packed, hotcore.pack_int4(q.numpy()))
    assert torch.equal(hotcore.unpack_int4(packed, 11), q)


def test_same_bits_on_every_path(rng: np.random.Generator) -> None:
    q = rng.integers(-8, 8, (37, 333), dtype=np.int8)
    same_on_every_path(lambda: hotcore.pack_int4(q))
    packed = hotcore.pack_int4(q)
    same_on_every_path(lambda: hotcore.unpack_int4(packed, 333))
