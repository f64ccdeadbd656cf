#!/usr/bin/env python3
"""Check wheels before a release, and print their sizes; exits with 1 if one is wrong.

    python scripts/check_wheel.py [--try] [--any-platform] [--flavour CPU|CUDA] WHEEL...

A wheel may have 3 MB without CUDA and 80 MB with it. It has to run on glibc 2.28 (manylinux_2_28),
and to hold one libhot whose soname has the version. `--any-platform` allows any glibc, for wheels
that are built for this machine. `--try` installs each wheel into a new environment of this Python
and runs scripts/smoke.py there. A wheel for aarch64 runs under qemu, in Debian 13's Python.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

LIMITS = {"CPU": 3.0, "CUDA": 80.0}  # MB, 10^6 bytes
GLIBC = 28  # manylinux_2_*
SMOKE = Path(__file__).resolve().parent / "smoke.py"
ROOT = SMOKE.parent.parent
DEBIAN_13 = (
    "python3.13-minimal libpython3.13-minimal libpython3.13-stdlib libc6 libexpat1 zlib1g libffi8 "
    "libssl3t64 libgcc-s1 libstdc++6"
)


def problems(wheel: Path, any_platform: bool, expected: str | None) -> tuple[str, list[str]]:
    """Return a line about the wheel, and its defects; ``wanted``: "CPU" or "CUDA"."""
    name, version, *_, platform = wheel.stem.split("-")
    defects: list[str] = []
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        libraries = [n for n in names if n.startswith("hotcore/lib/libhot")]
        soname = "libhot.so." + ".".join(version.split(".")[:2])
        if libraries != [f"hotcore/lib/{soname}"]:
            defects.append(f"holds {libraries or 'no libhot'}; expected hotcore/lib/{soname} alone")
        # A second module can come from the source tree, built for another Python.
        modules = [n for n in names if re.fullmatch(r"hotcore/_core\..*so", n)]
        if len(modules) != 1:
            defects.append(f"holds {len(modules)} extension modules: {', '.join(modules)}")
        flavour = "CPU"
        for library in libraries:
            content = archive.read(library)
            if soname.encode() + b"\0" not in content:
                defects.append(f"{library} has another soname than {soname}")
            if b".nv_fatbin" in content:
                flavour = "CUDA"
        if unexpected := [n for n in names if not n.startswith(("hotcore/", f"{name}-{version}."))]:
            defects.append(f"holds {', '.join(unexpected[:3])}")
    if expected not in (None, flavour):
        defects.append(f"is for {flavour}; expected {expected}")
    size = wheel.stat().st_size / 1e6
    if size > LIMITS[flavour]:
        defects.append(f"{size:.1f} MB is more than {LIMITS[flavour]:g}, the limit with {flavour}")
    glibc = [int(n) for n in re.findall(r"manylinux_2_(\d+)_(?:x86_64|aarch64)", platform)]
    if not any_platform and (not glibc or min(glibc) > GLIBC):
        defects.append(f"is for {platform}; expected manylinux_2_{GLIBC} or older")
    limit = f"{flavour}, limit {LIMITS[flavour]:g} MB"
    return f"{wheel.name}: {size:.2f} MB ({limit})", defects


def aarch64(folder: str) -> tuple[list[str], list[str]]:
    """Return pip's options that install for aarch64 into ``folder``, and a Python that uses it."""
    root = ROOT / "build" / "aarch64-python"
    unpack = ["bash", str(SMOKE.with_name("debian_root.sh")), str(root), "trixie", "arm64"]
    subprocess.run([*unpack, *DEBIAN_13.split()], check=True)
    options = [f"--platform=manylinux_2_{minor}_aarch64" for minor in range(17, GLIBC + 1)]
    options += ["--python-version=3.13", "--only-binary=:all:", f"--target={folder}"]
    emulator = shutil.which("qemu-aarch64-static") or "qemu-aarch64"
    # cortex-a72 has no SVE, with which qemu 7.2 gives wrong products in NumPy's OpenBLAS.
    emulator_options = ["-cpu", "cortex-a72", "-L", str(root), "-E", f"PYTHONPATH={folder}"]
    return options, [emulator, *emulator_options, f"{root}/usr/bin/python3.13"]


def try_out(wheel: Path) -> list[str]:
    """Install into an empty environment and run. Returns the errors."""
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip"]
        if wheel.stem.endswith("aarch64") and os.uname().machine != "aarch64":
            options, python = aarch64(folder)
            install = [*pip, "install", *options]
        else:
            venv.create(folder)  # this Python's pip installs into it
            python = [f"{folder}/bin/python"]
            install = [*pip, "--python", *python, "install"]
        # Neither this checkout nor the caller's environment may be visible.
        hidden = ("PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH")
        clean = {name: value for name, value in os.environ.items() if name not in hidden}
        for words in ([*install, "--quiet", str(wheel.resolve())], [*python, str(SMOKE)]):
            done = subprocess.run(words, cwd=folder, env=clean, check=False)
            if done.returncode != 0:
                return [f"{' '.join(words)} ended with {done.returncode}"]
    return []


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("wheels", nargs="+", type=Path, metavar="WHEEL")
    parser.add_argument("--try", action="store_true", dest="run", help="install and run each")
    parser.add_argument(
        "--flavour", choices=tuple(LIMITS), help="flavour that every wheel must have"
    )
    parser.add_argument("--any-platform", action="store_true", help="allow wheels for this machine")
    options = parser.parse_args()
    failed = False
    for wheel in options.wheels:
        line, defects = problems(wheel, options.any_platform, options.flavour)
        print(line, flush=True)
        if options.run and not defects:
            defects = try_out(wheel)
        for problem in defects:
            print(f"  FAILED: {problem}", flush=True)
        failed |= bool(defects)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
