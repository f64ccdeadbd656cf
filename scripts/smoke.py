#!/usr/bin/env python3
"""One backward pass of the hotcore that is installed, against its reference; ends with 1 if wrong.

    cd / && python /path/to/scripts/smoke.py

Needs nothing beside hotcore: what a wheel is tried with in an empty environment.
"""

from __future__ import annotations

import sys
from pathlib import Path

import hotcore
import numpy as np


def main() -> int:
    root = Path(__file__).resolve().parent.parent
    if root in Path(hotcore.__file__).resolve().parents and "site-packages" not in hotcore.__file__:
        sys.exit(f"smoke: this is the source tree, {hotcore.__file__}, and no installation")
    rng = np.random.default_rng(0)
    gy, w, x = (rng.standard_normal(s, dtype="f4") for s in ((256, 96), (96, 64), (256, 64)))
    got = hotcore.backward_linear(gy, w, x, need=("gx", "gw", "gb"), key=1)
    errors = []
    for name, array, exact in zip(
        ("gx", "gw", "gb"), got, (gy @ w, gy.T @ x, gy.sum(0)), strict=True
    ):
        error = float(np.linalg.norm(array - exact) / np.linalg.norm(exact))
        errors.append(f"{name} {error:.4f}")
        # Noise is the worst that x can be for INT4: about 0.15. g_b is a sum in fp32.
        if not error < (1e-5 if name == "gb" else 0.25):
            sys.exit(f"smoke: FAILED: relative error of {name} is {error}")
    ok, why = hotcore.supported(256, 96, 64)
    if not ok:
        sys.exit(f"smoke: FAILED: {why}")
    print(f"smoke: hotcore {hotcore.__version__}, {hotcore.isa()}, errors: {', '.join(errors)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
