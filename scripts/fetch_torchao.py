#!/usr/bin/env python3
"""Put torchao, a rival of the benchmarks, into third_party/torchao; nothing is installed.

    python scripts/fetch_torchao.py [--wheel FILE]

Downloads one pinned wheel with pip, without its dependencies, checks its SHA-256 and keeps its
Python files. Its C++ kernels have no part in FP8 training and stay out. 0.17.0 is the release for
torch 2.11 (github.com/pytorch/ao/issues/2919); benchmarks/rivals.py puts the folder on the path.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "torchao==0.17.0"
SHA256 = "87a418ce0ec064a821ceab83c921b501acef0ce9a6ccd1be358fcd16c3ae8c58"
PLATFORM = ("--platform", "manylinux_2_28_x86_64", "--python-version", "3.12", "--abi", "abi3")
KEPT = ("torchao/", "torchao-")  # the package and its metadata, which holds licence and version
TARGET = Path(__file__).resolve().parent.parent / "third_party" / "torchao"


def download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    words = [*command, *PLATFORM, "--dest", str(folder), PACKAGE]
    subprocess.run(words, check=True, stdout=sys.stderr)
    return next(folder.glob("*.whl"))


def unpack(wheel: Path, target: Path) -> int:
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if found != SHA256:
        sys.exit(f"{wheel}: SHA-256 is {found}; expected {SHA256}")
    with zipfile.ZipFile(wheel) as archive:
        names = [
            name
            for name in archive.namelist()
            if name.startswith(KEPT) and not name.endswith(("/", ".so"))
        ]
        archive.extractall(target, names)
    (target / "SHA256").write_text(SHA256 + "\n")
    return len(names)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--wheel", type=Path, help="use this wheel instead of downloading it")
    options = parser.parse_args()
    stamp = TARGET / "SHA256"
    if stamp.exists() and stamp.read_text().strip() == SHA256:
        print(f"{PACKAGE} is already in {TARGET}")
        return 0
    # Unpacked beside the target and renamed: an interrupted run leaves no half tree.
    with tempfile.TemporaryDirectory(dir=TARGET.parent, prefix=".torchao-") as name:
        folder = Path(name)
        count = unpack(options.wheel or download(folder), folder / "torchao")
        if TARGET.exists():
            shutil.rmtree(TARGET)
        (folder / "torchao").rename(TARGET)
    print(f"{PACKAGE}: {count} files in {TARGET}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
