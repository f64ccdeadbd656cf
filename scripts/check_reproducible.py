#!/usr/bin/env python3
"""Build the wheel twice, in two folders, and compare: equal sources must give equal bytes.

    python scripts/check_reproducible.py [--out FOLDER]

Both folders hold the checked-out commit (git archive) and have different names. ccache is off, and
HOT_CUDA is OFF unless the environment sets it. Prints the SHA-256 of both wheels. If they differ,
it prints which members differ and exits with 1. Two builds take some minutes.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def build(folder: Path, commit: str, epoch: str) -> Path:
    """Build the wheel of the commit in ``folder``."""
    sources, out = folder / "sources", folder / "out"
    sources.mkdir(parents=True)
    archive = subprocess.run(
        ["git", "-C", ROOT, "archive", commit], check=True, stdout=subprocess.PIPE
    )
    subprocess.run(["tar", "-x", "-C", sources], check=True, input=archive.stdout)
    env = {
        "HOT_CUDA": "OFF",
        "HOT_JAX": "OFF",
        **os.environ,
        "SOURCE_DATE_EPOCH": epoch,
        "CCACHE_DISABLE": "1",
    }
    words = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", out, "."]
    subprocess.run(words, check=True, cwd=sources, env=env)
    (wheel,) = out.glob("*.whl")
    return wheel


def members(wheel: Path) -> dict[str, str]:
    """Return the SHA-256 and date of every member by its name."""
    with zipfile.ZipFile(wheel) as archive:
        return {
            entry.filename: f"{hashlib.sha256(archive.read(entry)).hexdigest()} {entry.date_time}"
            for entry in archive.infolist()
        }


def main() -> int:
    """Build, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="keep both builds there")
    options = parser.parse_args()
    said = subprocess.run(
        ["git", "-C", ROOT, "log", "-1", "--format=%H %ct"],
        check=True,
        capture_output=True,
        text=True,
    )
    source = said.stdout.split()  # the commit and its date
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.out or Path(scratch)
        first, second = (build(folder / name, *source) for name in ("one", "another-folder"))
        for wheel in (first, second):
            print(f"{hashlib.sha256(wheel.read_bytes()).hexdigest()}  {wheel.name}")
        if first.read_bytes() == second.read_bytes():
            print("equal")
            return 0
        one, other = members(first), members(second)
        for name in sorted(one.keys() | other.keys()):
            if one.get(name) != other.get(name):
                print(f"differs: {name}: {one.get(name)} and {other.get(name)}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
