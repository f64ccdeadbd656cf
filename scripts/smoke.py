#!/usr/bin/env python3
"""Check the installed hotcore's backward to the bit, in each recipe; exit with 1 if it is wrong.

    cd / && python /path/to/scripts/smoke.py

It needs only hotcore, because check_wheel.py runs it in an empty environment.
"""

from __future__ import annotations

import sys
from pathlib import Path

import hotcore

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "tests"))


def main() -> int:
    installed = Path(hotcore.__file__).resolve()
    if ROOT in installed.parents and "site-packages" not in hotcore.__file__:
        sys.exit(f"smoke: this is the source tree, {hotcore.__file__}, and no installation")
    from one_hash import HASHES, digest

    for recipe in hotcore.config.RECIPES:
        if digest(recipe) != HASHES[recipe]:
            sys.exit(f"smoke: FAILED: recipe {recipe} has other bits than tests/golden/hashes.json")
    ok, why = hotcore.supported(256, 96, 64)
    if not ok:
        sys.exit(f"smoke: FAILED: {why}")
    recipes = ", ".join(hotcore.config.RECIPES)
    print(f"smoke: hotcore {hotcore.__version__}, {hotcore.isa()}, all bits right: {recipes}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
