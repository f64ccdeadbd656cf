#!/usr/bin/env python3
"""Build on a GPU machine, run every GPU test and a short benchmark, write what came out.

    python3 scripts/gpu_check.py [--out benchmarks/results/gpu-check.json] [--build build/gpu]

Needs nvcc, CMake, ninja, GoogleTest, and a Python with torch, nanobind and pytest; no network. The
CUTLASS headers must lie in third_party/cutlass (scripts/fetch_cutlass.py, where there is one).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as tree
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HASHED = ("cpp", "cuda", "python/bindings")


def source_hash() -> str:
    """One hash over the files below `HASHED`, names and contents."""
    total = hashlib.sha256()
    for folder in HASHED:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                total.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return total.hexdigest()


def run(*command: object, env: dict[str, str] | None = None, log: Path | None = None) -> int:
    print("+", *command, flush=True)
    words = [str(word) for word in command]
    if log is None:
        return subprocess.run(words, cwd=ROOT, env=env, check=False).returncode
    with log.open("w") as file:
        return subprocess.run(
            words, cwd=ROOT, env=env, check=False, stdout=file, stderr=subprocess.STDOUT
        ).returncode


def counts(report: Path) -> dict[str, int]:
    """passed, failed, skipped of a JUnit file; a missing file is one failure."""
    total = {"passed": 0, "failed": 0, "skipped": 0}
    if not report.exists():
        return {"passed": 0, "failed": 1, "skipped": 0}
    for case in tree.parse(report).getroot().iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            total["failed"] += 1
        elif case.find("skipped") is not None or case.get("status") in ("notrun", "disabled"):
            total["skipped"] += 1
        else:
            total["passed"] += 1
    return total


def versions() -> dict[str, str]:
    import torch

    nvcc = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=False)
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=False,
    )
    return {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "nvcc": nvcc.stdout.strip().splitlines()[-1] if nvcc.stdout else "?",
        "driver": driver.stdout.strip().splitlines()[0] if driver.stdout else "?",
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/gpu-check.json")
    parser.add_argument("--build", type=Path, default=ROOT / "build/gpu")
    args = parser.parse_args()
    build: Path = args.build.resolve()
    reports = build / "reports"
    reports.mkdir(parents=True, exist_ok=True)
    start = time.time()

    import torch

    if not torch.cuda.is_available():
        sys.exit("gpu_check: torch sees no CUDA device")
    site = build / "site"
    steps: dict[str, int] = {}
    steps["configure"] = run(
        "cmake", "-S", ROOT, "-B", build, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release",
        "-DHOT_CUDA=ON", "-DHOT_CUTLASS=ON", "-DCMAKE_CUDA_ARCHITECTURES=90a-real",
        "-DHOT_BUILD_TESTS=ON", "-DHOT_BUILD_PYTHON=ON", f"-DPython_EXECUTABLE={sys.executable}",
        "-DCMAKE_INSTALL_LIBDIR=lib", log=reports / "configure.log",
    )  # fmt: skip
    steps["build"] = run("cmake", "--build", build, log=reports / "build.log")
    if steps["build"] != 0:
        print((reports / "build.log").read_text()[-4000:])
    shutil.rmtree(site, ignore_errors=True)
    shutil.copytree(ROOT / "python/hotcore", site / "hotcore")
    for component in ("python", "devel"):
        steps[f"install {component}"] = run(
            "cmake", "--install", build, "--prefix", site / "hotcore", "--component", component,
            log=reports / f"install-{component}.log",
        )  # fmt: skip
    built = time.time()

    tests: dict[str, dict[str, int]] = {}
    ctest_report = reports / "ctest.xml"
    run(
        "ctest", "--test-dir", build, "-j", "4", "-LE", "consumer", "--no-tests=error",
        "--output-on-failure", "--output-junit", ctest_report, log=reports / "ctest.log",
    )  # fmt: skip
    tests["C++"] = counts(ctest_report)
    environment = {**os.environ, "PYTHONPATH": str(site), "PYTHONUNBUFFERED": "1"}
    pytest_report = reports / "pytest.xml"
    code = run(
        sys.executable, "-m", "pytest", "-q", "tests/gpu", "--junit-xml", pytest_report,
        env=environment, log=reports / "pytest.log",
    )  # fmt: skip
    tests["Python"] = counts(pytest_report)
    if code != 0:
        print((reports / "pytest.log").read_text()[-6000:])
    if tests["C++"]["failed"]:
        print((reports / "ctest.log").read_text()[-6000:])

    sanitizer: dict[str, str] = {}
    if shutil.which("compute-sanitizer"):
        for tool in ("memcheck", "racecheck", "initcheck"):
            log = reports / f"{tool}.log"
            code = run(
                "compute-sanitizer", "--tool", tool, "--error-exitcode", "3",
                build / "tests/cpp/test_stages_cuda",
                "--gtest_filter=*gemm_equals_cpu:*repeats*:*hla*:*quantize*", log=log,
            )  # fmt: skip
            sanitizer[tool] = "clean" if code == 0 else f"exit {code}: {log.read_text()[-300:]}"

    bench_file = reports / "bench.json"
    code = run(
        sys.executable, "benchmarks/bench_backward.py", "--device", "cuda", "--rounds", "12",
        "--out", bench_file, env=environment,
    )  # fmt: skip
    bench = json.loads(bench_file.read_text()) if code == 0 else {"failed": code}
    steps["bench_backward"] = code

    total = {
        key: sum(part[key] for part in tests.values()) for key in ("passed", "failed", "skipped")
    }
    total["failed"] += sum(code != 0 for code in steps.values())
    total["failed"] += sum(word != "clean" for word in sanitizer.values())
    result = {
        "device": torch.cuda.get_device_name(0),
        "versions": versions(),
        "source_hash": source_hash(),
        "hashed": list(HASHED),
        **total,
        "tests": tests,
        "steps": steps,
        "sanitizer": sanitizer,
        "build_s": round(built - start),
        "total_s": round(time.time() - start),
        "bench_backward": bench,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{total['passed']} passed, {total['failed']} failed, {total['skipped']} skipped")
    print(f"written: {args.out}")
    return int(total["failed"] > 0 or total["passed"] == 0)


if __name__ == "__main__":
    sys.exit(main())
