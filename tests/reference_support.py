"""Shared by the tests of ``tests/reference.py``, which run without the compiled extension."""

from __future__ import annotations

import numpy as np
from golden import make_golden

ref = make_golden.ref
f32 = np.float32
ALL = ("gx", "gw", "gb")


def sylvester(n: int) -> np.ndarray:
    """H by definition: (-1) to the number of bits that row and column share."""
    index = np.arange(n)
    shared = index[:, None] & index[None, :]
    return np.array([[-1 if bin(v).count("1") % 2 else 1 for v in row] for row in shared])


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(f32)


def layer(rng: np.random.Generator, tokens: int, outs: int, ins: int) -> tuple[np.ndarray, ...]:
    return normal(rng, tokens, outs), normal(rng, outs, ins), normal(rng, tokens, ins)


def distance(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))
