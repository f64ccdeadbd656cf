"""Write scikit-learn's digits for cpp_trainer: ``python export_digits.py digits.bin``.

The little-endian file holds "DIGITS1\\0", then count, features and classes as uint32. Then follow
count x features float32 from 0 to 1, and count labels as uint8. The order is shuffled once.
"""

import sys
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: export_digits.py FILE")
    digits = load_digits()
    order = np.random.default_rng(2025).permutation(len(digits.target))
    images = (digits.data[order] / 16).astype("<f4")
    labels = digits.target[order].astype(np.uint8)
    header = np.array([*images.shape, labels.max() + 1], "<u4")
    parts = (header, images, labels)
    Path(sys.argv[1]).write_bytes(b"DIGITS1\0" + b"".join(part.tobytes() for part in parts))


if __name__ == "__main__":
    main()
