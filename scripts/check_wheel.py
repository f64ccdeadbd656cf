#!/usr/bin/env python3
"""Check wheels before a release, and print their sizes; exits with 1 if one is wrong.

    python scripts/check_wheel.py [--try] [--any-platform] [--flavour CPU|CUDA] WHEEL...

A wheel may have 3 MB without CUDA and 80 MB with it. It has to run on glibc 2.28 (manylinux_2_28;
not checked with --any-platform, for wheels built for this machine), and to hold one libhot whose
soname has the version. `--try` installs each into a new environment of this Python and runs
scripts/smoke.py there.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

LIMITS = {"CPU": 3.0, "CUDA": 80.0}  # MB, 10^6 bytes
GLIBC = 28  # manylinux_2_*
SMOKE = Path(__file__).resolve().parent / "smoke.py"


def problems(wheel: Path, any_platform: bool, wanted: str | None) -> tuple[str, list[str]]:
    """A line about the wheel, and its defects; ``wanted``: "CPU" or "CUDA"."""
    name, version, *_, platform = wheel.stem.split("-")
    found: list[str] = []
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        libraries = [n for n in names if n.startswith("hotcore/lib/libhot")]
        soname = "libhot.so." + ".".join(version.split(".")[:2])
        if libraries != [f"hotcore/lib/{soname}"]:
            found.append(f"holds {libraries or 'no libhot'}; expected hotcore/lib/{soname} alone")
        # The source tree had a second one, maybe for another Python.
        modules = [n for n in names if re.fullmatch(r"hotcore/_core\..*so", n)]
        if len(modules) != 1:
            found.append(f"holds {len(modules)} extension modules: {', '.join(modules)}")
        flavour = "CPU"
        for library in libraries:
            content = archive.read(library)
            if soname.encode() + b"\0" not in content:
                found.append(f"{library} has another soname than {soname}")
            if b".nv_fatbin" in content:
                flavour = "CUDA"
        if unexpected := [n for n in names if not n.startswith(("hotcore/", f"{name}-{version}."))]:
            found.append(f"holds {', '.join(unexpected[:3])}")
    if wanted not in (None, flavour):
        found.append(f"is for {flavour}; expected {wanted}")
    size = wheel.stat().st_size / 1e6
    if size > LIMITS[flavour]:
        found.append(f"{size:.1f} MB is more than {LIMITS[flavour]:g}, the limit with {flavour}")
    glibc = [int(minor) for minor in re.findall(r"manylinux_2_(\d+)_x86_64", platform)]
    if not any_platform and (not glibc or min(glibc) > GLIBC):
        found.append(f"is for {platform}; expected manylinux_2_{GLIBC}_x86_64 or older")
    limit = f"{flavour}, limit {LIMITS[flavour]:g} MB"
    return f"{wheel.name}: {size:.2f} MB ({limit})", found


def try_out(wheel: Path) -> list[str]:
    """Install into an empty environment and run; returns the errors."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder)  # this Python's pip installs into it
        python = f"{folder}/bin/python"
        install = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet"]
        # Neither this checkout nor the caller's environment may be visible.
        hidden = ("PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH")
        clean = {name: value for name, value in os.environ.items() if name not in hidden}
        for words in ([*install, str(wheel.resolve())], [python, str(SMOKE)]):
            done = subprocess.run(words, cwd=folder, env=clean, check=False)
            if done.returncode != 0:
                return [f"{' '.join(words)} ended with {done.returncode}"]
    return []


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("wheels", nargs="+", type=Path, metavar="WHEEL")
    parser.add_argument("--try", action="store_true", dest="run", help="install and run each")
    parser.add_argument("--flavour", choices=tuple(LIMITS), help="what it has to be")
    parser.add_argument("--any-platform", action="store_true", help="for this machine alone")
    options = parser.parse_args()
    failed = False
    for wheel in options.wheels:
        line, found = problems(wheel, options.any_platform, options.flavour)
        print(line, flush=True)
        if options.run and not found:
            found = try_out(wheel)
        for problem in found:
            print(f"  FAILED: {problem}", flush=True)
        failed |= bool(found)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
