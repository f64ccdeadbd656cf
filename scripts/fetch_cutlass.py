#!/usr/bin/env python3
"""Put the CUTLASS headers into third_party/cutlass (third_party/README.md says which and why).

    python scripts/fetch_cutlass.py [--wheel FILE] [--force]

Downloads one pinned wheel with pip, without its dependencies, checks its SHA-256 and keeps its
headers. `--wheel` takes a wheel that is already here, for machines without a network.
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

VERSION = "4.2.0"
PACKAGE = "nvidia-cutlass==4.2.0.0"
SHA256 = "f9599ada45c7bcb6bf53f7d3f0a7d154183e53451c01bfa59eecd37dd4a693f6"

SOURCE = "cutlass_library/source/"
KEPT = ("include/", "tools/util/include/")
TARGET = Path(__file__).resolve().parent.parent / "third_party" / "cutlass"


def download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    subprocess.run([*command, "--dest", str(folder), PACKAGE], check=True, stdout=sys.stderr)
    return next(folder.glob("*.whl"))


def check(wheel: Path) -> None:
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if found != SHA256:
        sys.exit(f"{wheel}: SHA-256 is {found}; expected {SHA256}")


def unpack(wheel: Path, target: Path) -> int:
    count = 0
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            path = name.removeprefix(SOURCE)
            is_licence = ".dist-info/" in name and Path(name).name.startswith("LICENSE")
            if is_licence:
                path = Path(name).name
            elif path == name or not path.startswith(KEPT) or name.endswith("/"):
                continue
            (target / path).parent.mkdir(parents=True, exist_ok=True)
            (target / path).write_bytes(archive.read(name))
            count += 1
    return count


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--wheel", type=Path, help="use this wheel instead of downloading it")
    parser.add_argument("--force", action="store_true", help="replace third_party/cutlass")
    options = parser.parse_args()

    stamp = TARGET / "SHA256"
    if stamp.exists() and stamp.read_text().strip() == SHA256 and not options.force:
        print(f"CUTLASS {VERSION} is already in {TARGET}")
        return 0
    if TARGET.exists() and not stamp.exists() and not options.force:
        sys.exit(f"{TARGET} exists and was not made by this script; remove it or pass --force")

    # Unpacked beside the target and renamed: an interrupted run leaves no half tree.
    with tempfile.TemporaryDirectory(dir=TARGET.parent, prefix=".cutlass-") as name:
        folder = Path(name)
        wheel = options.wheel or download(folder)
        check(wheel)
        count = unpack(wheel, folder / "cutlass")
        (folder / "cutlass" / "SHA256").write_text(SHA256 + "\n")
        if TARGET.exists():
            shutil.rmtree(TARGET)
        (folder / "cutlass").rename(TARGET)
    print(f"CUTLASS {VERSION}: {count} files in {TARGET}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
