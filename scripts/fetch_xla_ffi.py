#!/usr/bin/env python3
"""Put XLA's foreign function interface into third_party/xla_ffi (see third_party/README.md).

    python scripts/fetch_xla_ffi.py [--wheel FILE] [--force]

Downloads one pinned wheel of jaxlib with pip, without its dependencies, checks its SHA-256 and
keeps three headers. `--wheel` uses a local wheel, for machines without a network.
"""

from __future__ import annotations

import sys
from pathlib import Path

from pinned_wheel import Wheel, main

SOURCE = "jaxlib/include/"


def place(name: str) -> str | None:
    """Select the headers and the licence."""
    if ".dist-info/" in name and Path(name).name.startswith("LICENSE"):
        return Path(name).name
    path = name.removeprefix(SOURCE)
    return path if path != name and path.startswith("xla/ffi/api/") else None


WHEEL = Wheel(
    title="XLA FFI 0.1 (jaxlib 0.7.2)",
    requirement="jaxlib==0.7.2",
    sha256="11f32319e662ccff66859eb393757050d8971bd880bc4dd70dec6434d890fb59",
    folder="xla_ffi",
    place=place,
    options=("--platform", "manylinux_2_27_x86_64", "--python-version", "3.12"),
)

if __name__ == "__main__":
    sys.exit(main(WHEEL, __doc__))
