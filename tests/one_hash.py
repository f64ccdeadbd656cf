"""One layer and the hash of its backward in each recipe, the same on every machine.

scripts/smoke.py uses it with only NumPy and hotcore installed.
"""

import hashlib
import json
from pathlib import Path

import hotcore
import numpy as np
from hotcore import Key

HASHES = json.loads((Path(__file__).parent / "golden" / "hashes.json").read_text())
F = np.float32


def numbers(rows: int, columns: int, salt: int) -> np.ndarray:
    """Multiples of 2^-12, equal on every machine."""
    index = np.arange(rows * columns, dtype=np.uint64) + np.uint64(salt * 1_000_003)
    words = (index * np.uint64(2_654_435_761) >> np.uint64(7)) % np.uint64(1 << 16)
    return ((words.astype(np.int64) - (1 << 15)).astype(F) / F(4096)).reshape(rows, columns)


def layer() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return numbers(197, 72, 1), numbers(72, 56, 2), numbers(197, 56, 3)


def digest(recipe: str) -> str:
    gy, w, x = layer()
    saved = hotcore.compress_activation(x, recipe, key=Key(0, HASHES["seed"]))
    got = hotcore.backward_linear(gy, w, saved, need=("gx", "gw", "gb"))
    return hashlib.sha256(b"".join(v.tobytes() for v in (saved.data, *got))).hexdigest()
