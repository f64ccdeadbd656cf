#!/usr/bin/env python3
"""Put torchao, a rival of the benchmarks, into third_party/torchao; nothing is installed.

    python scripts/fetch_torchao.py [--wheel FILE] [--force]

Downloads one pinned wheel with pip, without its dependencies, checks its SHA-256 and keeps its
Python files. FP8 training does not use its C++ kernels. 0.17.0 is the release for
torch 2.11 (github.com/pytorch/ao/issues/2919); benchmarks/evidence/rivals puts the folder on the
path.
"""

from __future__ import annotations

import sys

from pinned_wheel import Wheel, main


def place(name: str) -> str | None:
    """Select the package and its metadata, which holds licence and version."""
    return name if name.startswith(("torchao/", "torchao-")) and not name.endswith(".so") else None


WHEEL = Wheel(
    title="torchao 0.17.0",
    requirement="torchao==0.17.0",
    sha256="87a418ce0ec064a821ceab83c921b501acef0ce9a6ccd1be358fcd16c3ae8c58",
    folder="torchao",
    place=place,
    options=("--platform", "manylinux_2_28_x86_64", "--python-version", "3.12", "--abi", "abi3"),
)

if __name__ == "__main__":
    sys.exit(main(WHEEL, __doc__))
