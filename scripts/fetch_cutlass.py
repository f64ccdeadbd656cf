#!/usr/bin/env python3
"""Put the CUTLASS headers into third_party/cutlass (see third_party/README.md).

    python scripts/fetch_cutlass.py [--wheel FILE] [--force]

Downloads one pinned wheel with pip, without its dependencies, checks its SHA-256 and keeps its
headers. `--wheel` uses a local wheel, for machines without a network.
"""

from __future__ import annotations

import sys
from pathlib import Path

from pinned_wheel import Wheel, main

SOURCE = "cutlass_library/source/"
KEPT = ("include/", "tools/util/include/")


def place(name: str) -> str | None:
    """Select the headers and the licence."""
    if ".dist-info/" in name and Path(name).name.startswith("LICENSE"):
        return Path(name).name
    path = name.removeprefix(SOURCE)
    return path if path != name and path.startswith(KEPT) else None


WHEEL = Wheel(
    title="CUTLASS 4.2.0",
    requirement="nvidia-cutlass==4.2.0.0",
    sha256="f9599ada45c7bcb6bf53f7d3f0a7d154183e53451c01bfa59eecd37dd4a693f6",
    folder="cutlass",
    place=place,
)

if __name__ == "__main__":
    sys.exit(main(WHEEL, __doc__))
