#!/usr/bin/env python3
"""Build on a GPU machine, run every GPU test and a short benchmark, write a report.

    python3 scripts/gpu_check.py [--out benchmarks/results/gpu-check.json] [--build build/gpu]

On other GPUs than H100 and H200 it builds for that GPU, and runs the C++ tests, the adapter's tests
and fewer benchmarks. That takes ten minutes on 8 cores and 20 GiB of GPU memory. The report is
benchmarks/results/device-NAME.json, which a table of the docs shows.

It needs nvcc, CMake, ninja, GoogleTest, and a Python with torch, nanobind and pytest. No network is
needed after scripts/fetch_cutlass.py (headers) and scripts/fetch_torchao.py (the FP8 rival).
`--skip-tests` and `--skip-bench` leave out a half, so that two short leases can share a check. A
report at `--out` of the same sources and GPU keeps its half. Without one the check has failed.
`--fail-fast` skips the benchmarks if a test fails. After a test was mended, `--skip-tests --again
TEST...` runs failed tests of the kept half once more.
`--build-only` needs no GPU. A later check of the same sources at the same path reuses the build,
also on another machine.
On a terminal a line every 30 seconds names the part and the time left, by the last report.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as tree
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
from evidence import targets  # noqa: E402  (needs neither torch nor hotcore)

HASHED = ("cpp", "cuda", "python/bindings", "python/hotcore/torch")
BUILT = (
    *("CMakeLists.txt", "cmake", "cpp", "cuda", "python/bindings", "tests/cpp"),
    "benchmarks/stock_gemm",
)
"""Sources of HOT that the build reads."""
LONGEST_TEST = "tests/gpu/test_cpp.py::test_consumer_of_a_static_library"
"""Longest test, which builds libhot once more and therefore starts first."""
OTHER_TESTS = ("tests/gpu/test_cuda.py", "tests/gpu/test_runtime.py::test_the_self_test")
"""Tests for GPUs other than H100 and H200."""
SIDE_BY_SIDE = ("-n", str(min(24, max(12, (os.cpu_count() or 1) // 3))), "--dist", "worksteal")
BENCHMARKS: dict[str, tuple[str, ...]] = {
    "backward": (
        *("--short", "--rounds", "10"),
        *("--recipe", "default", "--recipe", "fast", "--recipe", "paper"),
    ),
    "fwht": ("--rounds", "10", "--n", "16", "--n", "128", "--n", "1024", "--n", "4096"),
    "gemm": ("--rounds", "10"),
    "models": (
        *("--part", "step", "--models", "vit_b", "--rounds", "2", "--jobs", "15", "--no-kernels"),
        "--contenders",
        *("default compiled", "default int8-forward compiled"),
        *(
            "bf16 reduce-overhead*",
            "default reduce-overhead",
            "default int8-forward reduce-overhead",
        ),
        "default int8-forward reduce-overhead, attention kept",
    ),
}


HOPPER = "90a-real"
SMALL = {name: BENCHMARKS[name] for name in ("backward", "gemm")} | {
    "models": (
        *("--part", "step", "--models", "vit_b", "--rounds", "2", "--no-kernels"),
        *("--contenders", "default compiled", "default int8-forward compiled"),
        *("bf16 reduce-overhead", "default int8-forward reduce-overhead"),
    )
}
"""Benchmarks for other GPUs."""


def architecture() -> str:
    """Return this GPU's architecture in CMake's notation; without a GPU the H100's."""
    if importlib.util.find_spec("torch") is None:
        return HOPPER
    import torch

    if not torch.cuda.is_available():
        return HOPPER
    major, minor = torch.cuda.get_device_capability()
    return HOPPER if (major, minor) == (9, 0) else f"{major}{minor}-real"


def device_name() -> str:
    """Return the GPU's name for a file: lower case, with hyphens between words."""
    import torch

    words = torch.cuda.get_device_name(0).lower().replace("nvidia", "").replace("geforce", "")
    return "-".join(words.split())


def source_hash(names: tuple[str, ...] = HASHED) -> str:
    """Hash the names and contents of all files at or below some paths."""
    total = hashlib.sha256()
    for name in names:
        top = ROOT / name
        for path in [top] if top.is_file() else sorted(top.rglob("*")):
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


def earlier(report: Path, device: str) -> dict[str, Any]:
    """Return a report of these sources on such a GPU, of which a half can be kept; else nothing."""
    found: dict[str, Any] = json.loads(report.read_text()) if report.exists() else {}
    same = (found.get("source_hash"), found.get("device")) == (source_hash(), device)
    return found if same else {}


def outcomes(report: Path) -> list[tuple[str, str]]:
    """Return the tests of a JUnit file, named as pytest takes them: passed, failed or skipped."""
    found = []
    for case in tree.parse(report).getroot().iter("testcase") if report.exists() else ():
        outcome = "passed"
        if case.find("failure") is not None or case.find("error") is not None:
            outcome = "failed"
        elif case.find("skipped") is not None or case.get("status") in ("notrun", "disabled"):
            outcome = "skipped"
        module = case.get("classname", "").replace(".", "/")
        found.append((f"{module}.py::{case.get('name')}", outcome))
    return found


def counts(report: Path) -> dict[str, int]:
    """Count passed, failed and skipped tests of a JUnit file. A missing file is one failure."""
    total = {"passed": 0, "failed": int(not report.exists()), "skipped": 0}
    for _, outcome in outcomes(report):
        total[outcome] += 1
    return total


def last_line(*command: str) -> str:
    """Return the last line that a command prints, or "?" if the command is missing."""
    if shutil.which(command[0]) is None:
        return "?"
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return (done.stdout.strip().splitlines() or ["?"])[-1]


def versions() -> dict[str, str]:
    import torch

    return {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "nvcc": last_line("nvcc", "--version"),
        "driver": last_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
    }


def compile_torchao(log: Path) -> subprocess.Popen[bytes] | None:
    """Start compiling the rival's layers into inductor's cache, beside the build."""
    if not (ROOT / "third_party/torchao").is_dir():
        return None
    command = ["nice", sys.executable, "-m", "benchmarks.evidence.compile_torchao", "Llama-3-8B"]
    print("+", *command, "&", flush=True)
    with log.open("w") as file:
        return subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)


def build_all(build: Path, reports: Path, arch: str) -> dict[str, int]:
    """Configure, build and install into build/prefix; exit codes by step.

    Does nothing if build/built-from names these sources.
    """
    stamp, prefix = build / "built-from", build / "prefix"
    # Hashed before the build, which may or may not contain later changes.
    sources = f"{source_hash(BUILT)} {arch}"
    cutlass = "ON" if arch == HOPPER else "OFF"
    if stamp.exists() and stamp.read_text() == sources:
        print(f"built before, from the same sources: {build}", flush=True)
        return {"built before": 0}
    stamp.unlink(missing_ok=True)
    steps: dict[str, int] = {}
    steps["configure"] = run(
        "cmake", "-S", ROOT, "-B", build, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release",
        "-DHOT_CUDA=ON", f"-DHOT_CUTLASS={cutlass}", f"-DCMAKE_CUDA_ARCHITECTURES={arch}",
        "-DHOT_BUILD_TESTS=ON", "-DHOT_BUILD_PYTHON=ON", f"-DHOT_BUILD_STOCK_GEMM={cutlass}",
        f"-DPython_EXECUTABLE={sys.executable}",
        "-DCMAKE_INSTALL_LIBDIR=lib", log=reports / "configure.log",
    )  # fmt: skip
    steps["build"] = run("cmake", "--build", build, log=reports / "build.log")
    if steps["build"] != 0:
        print((reports / "build.log").read_text()[-4000:])
    shutil.rmtree(prefix, ignore_errors=True)
    for component in ("devel", "python"):  # the extension's stub is made beside libhot
        steps[f"install {component}"] = run(
            "cmake", "--install", build, "--prefix", prefix, "--component", component,
            log=reports / f"install-{component}.log",
        )  # fmt: skip
    # Lists the tests' cases now, so CMake is not needed later.
    steps["list tests"] = run("ctest", "--test-dir", build, "-N", log=reports / "list.log")
    if not any(steps.values()):
        stamp.write_text(sources)
    return steps


def package(build: Path) -> Path:
    """build/site with the current Python sources and the built files, for PYTHONPATH."""
    site = build / "site"
    shutil.rmtree(site, ignore_errors=True)
    shutil.copytree(ROOT / "python/hotcore", site / "hotcore")
    if (build / "prefix").is_dir():
        shutil.copytree(build / "prefix", site / "hotcore", dirs_exist_ok=True)
    return site


def test_all(
    build: Path, reports: Path, env: dict[str, str], arch: str
) -> dict[str, dict[str, int]]:
    tests: dict[str, dict[str, int]] = {}
    ctest_report, pytest_report = reports / "ctest.xml", reports / "pytest.xml"
    for report in (ctest_report, pytest_report):
        report.unlink(missing_ok=True)  # an old report must not stand for an interrupted run
    run(
        "ctest", "--test-dir", build, "-j", "16", "-LE", "consumer", "--no-tests=error",
        "--output-on-failure", "--output-junit", ctest_report, log=reports / "ctest.log",
    )  # fmt: skip
    tests["C++"] = counts(ctest_report)
    every = (LONGEST_TEST, "tests/gpu", "tests/with_torch")
    code = run(
        sys.executable, "-m", "pytest", "-q",
        *(every if arch == HOPPER else OTHER_TESTS), "-m", "cuda",
        "--durations=5",
        *(SIDE_BY_SIDE if importlib.util.find_spec("xdist") else ()),
        "--junit-xml", pytest_report, env=env, log=reports / "pytest.log",
    )  # fmt: skip
    tests["Python"] = counts(pytest_report)
    if code != 0:
        print((reports / "pytest.log").read_text()[-6000:])
        # A run that broke off (a crash, a collection error) may have reported no failure.
        tests["Python"]["failed"] = max(1, tests["Python"]["failed"])
    if tests["C++"]["failed"]:
        print((reports / "ctest.log").read_text()[-6000:])
    return tests


def run_again(reports: Path, env: dict[str, str], names: list[str]) -> set[str]:
    """Run Python tests. Returns those that passed."""
    report = reports / "again.xml"
    report.unlink(missing_ok=True)
    run(
        sys.executable, "-m", "pytest", "-q", *names, "-m", "cuda", "--junit-xml", report,
        env=env, log=reports / "again.log",
    )  # fmt: skip
    print((reports / "again.log").read_text()[-2000:])
    return {name for name, outcome in outcomes(report) if outcome == "passed"}


def sanitize(build: Path, reports: Path) -> dict[str, str]:
    """Run compute-sanitizer over a few tests. Returns "clean" or its messages."""
    out: dict[str, str] = {}
    if not shutil.which("compute-sanitizer"):
        return out
    for tool in ("memcheck", "racecheck", "initcheck"):
        log = reports / f"{tool}.log"
        code = run(
            "compute-sanitizer", "--tool", tool, "--error-exitcode", "3",
            build / "tests/cpp/test_stages_cuda",
            "--gtest_filter=*gemm_equals_cpu:*repeats*", log=log,
        )  # fmt: skip
        said = [line for line in log.read_text().splitlines() if line.startswith("=====")]
        out[tool] = "clean" if code == 0 else f"exit {code}: " + "\n".join(said[:12] + said[-2:])
    return out


def bench_all(
    build: Path, reports: Path, env: dict[str, str], arch: str
) -> tuple[dict[str, int], dict[str, Any]]:
    """Run the benchmarks. Returns their exit codes and reports."""
    steps: dict[str, int] = {}
    results: dict[str, Any] = {}
    stock = str(build / "benchmarks/stock_gemm/libhot_stock_gemm.so")
    words_of = SMALL
    if arch == HOPPER:
        words_of = BENCHMARKS | {"gemm": (*BENCHMARKS["gemm"], "--stock", stock)}
    for name, words in words_of.items():
        path = reports / f"{name}.json"
        path.unlink(missing_ok=True)
        script = [f"benchmarks/bench_{name}.py"]
        if not (ROOT / script[0]).exists():
            script = ["-m", f"benchmarks.evidence.bench_{name}"]
        code = run(
            sys.executable, *script, "--device", "cuda", *words, "--json", path, env=env,
            log=reports / f"bench_{name}.log",
        )  # fmt: skip
        print((reports / f"bench_{name}.log").read_text()[-4000:])
        steps[f"bench_{name}"] = code
        # A benchmark that failed in one part has written the other parts; its code counts.
        results[name] = json.loads(path.read_text()) if path.exists() else {}
    return steps, results


def ratios(bench: dict[str, Any]) -> dict[str, Any]:
    """Collect the figures that pages quote: sums of groups, the paper's layers, copies, steps."""
    backward, fwht, gemm, models = (bench.get(name, {}) for name in BENCHMARKS)
    out: dict[str, Any] = {}
    for group, table in backward.get("layers", {}).items():
        out[f"{group}, sum, times faster than"] = {
            recipe: row["faster than"] for recipe, row in table["recipes"].items()
        }
        out[f"{group}, sum, forward and backward, times faster than"] = {
            name: row["faster than"] for name, row in table.get("both", {}).items()
        }
        out[f"{group}, sum, compress, copies of x"] = {
            recipe: row["compress of a copy"] for recipe, row in table["recipes"].items()
        }
    for arrays, table in backward.get("paper", {}).items():
        out[f"the paper's layers, arrays {arrays}, times faster than fp32"] = table["means"]
    for group, table in backward.get("forward", {}).items():
        out[f"{group}, forward, extra time"] = table["extra"]
    if "host" in backward:
        rows = backward["host"]["rows"]
        out["host, us a call"] = {name: 1e3 * row["median_ms"] for name, row in rows.items()}
    if "n" in fwht:
        shares = {n: rows["hotcore"]["of the copy"] for n, rows in fwht["n"].items()}
        out["fwht, share of the copy's speed"] = shares
    for group, products in gemm.get("products", {}).items():
        out[f"INT8 product, {group}, TOPS"] = {
            name: product["rows"]["hotcore"]["TOPS"] for name, product in products.items()
        }
        out[f"INT8 product, {group}, of the best stock tile"] = {
            name: product["rows"]["hotcore"].get("of the best stock tile")
            for name, product in products.items()
        }
    for model, entry in models.get("steps", {}).items():
        out[f"{model}, a step, of compiled bf16"] = {
            name: row["of reference"] if "of reference" in row else row.get("error", "left out")
            for name, row in entry["rows"].items()
        }
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, help="default: in benchmarks/results, by the GPU")
    parser.add_argument("--build", type=Path, default=ROOT / "build/gpu")
    parser.add_argument("--build-only", action="store_true")
    parser.add_argument("--skip-tests", action="store_true")
    parser.add_argument("--again", nargs="+", default=[], metavar="TEST")
    parser.add_argument("--skip-bench", action="store_true")
    parser.add_argument("--fail-fast", action="store_true")
    args = parser.parse_args()
    build: Path = args.build.resolve()
    reports = build / "reports"
    reports.mkdir(parents=True, exist_ok=True)
    arch = architecture()
    if args.build_only:
        return max(build_all(build, reports, arch).values())

    import torch

    if not torch.cuda.is_available():
        sys.exit("gpu_check: torch sees no CUDA device")
    name = "gpu-check.json" if arch == HOPPER else f"device-{device_name()}.json"
    out: Path = args.out or ROOT / "benchmarks/results" / name
    seconds: dict[str, int] = {}
    last = start = time.time()
    kept = earlier(out, torch.cuda.get_device_name(0))
    before = out if out.exists() else ROOT / "benchmarks/results/gpu-check.json"
    expected: dict[str, int] = json.loads(before.read_text())["seconds"]

    def done(part: str) -> None:
        nonlocal last
        seconds[part] = round(time.time() - last)
        last = time.time()

    def show() -> None:
        while True:
            time.sleep(30)
            rest = {part: took for part, took in expected.items() if part not in seconds}
            left = sum(rest.values()) - min(time.time() - last, next(iter(rest.values()), 0))
            part = next(iter(rest), "report")
            print(f"gpu_check: {part}; about {left / 60:.0f} min left, as last time", flush=True)

    if sys.stdout.isatty():
        threading.Thread(target=show, daemon=True).start()

    steps: dict[str, int] = {}
    tests: dict[str, dict[str, int]] = {}
    sanitizer: dict[str, str] = {}
    bench: dict[str, Any] = {}
    compiling = None if args.skip_bench else compile_torchao(reports / "torchao.log")
    steps |= build_all(build, reports, arch)
    done("build")
    # Test processes take these GPUs in turns; benchmarks run on the first.
    gpus = ",".join(map(str, range(torch.cuda.device_count())))
    env = {"CUDA_VISIBLE_DEVICES": gpus, **os.environ, "PYTHONUNBUFFERED": "1"}
    env["PYTHONPATH"] = str(package(build))
    if args.skip_tests:
        tests, sanitizer = kept.get("tests", {}), kept.get("sanitizer", {})
        failed_tests = kept.get("failed_tests", [])
        if args.again:
            if other := [name for name in args.again if name not in failed_tests]:
                sys.exit(f"gpu_check: --again: {other} did not fail in {out}: {failed_tests}")
            mended = run_again(reports, env, args.again) & set(failed_tests)
            failed_tests = [name for name in failed_tests if name not in mended]
            tests["Python"]["passed"] += len(mended)
            tests["Python"]["failed"] -= len(mended)
        steps |= {} if tests else {"tests: skipped": 1}
    else:
        with ThreadPoolExecutor(1) as beside:  # the sanitizer uses one core
            sanitized = beside.submit(sanitize, build, reports)
            tests = test_all(build, reports, env, arch)
            report = outcomes(reports / "pytest.xml")
            failed_tests = [name for name, outcome in report if outcome == "failed"]
            done("tests")
            sanitizer = sanitized.result()
        done("sanitizer, after the tests")
    failed = any(part["failed"] for part in tests.values()) or any(
        word != "clean" for word in sanitizer.values()
    )
    if args.skip_bench or (args.fail_fast and failed):
        codes = {k: v for k, v in kept.get("steps", {}).items() if k.startswith("bench_")}
        steps |= codes or {"benchmarks: skipped": 1}
        bench = {name: kept[f"bench_{name}"] for name in BENCHMARKS if f"bench_{name}" in kept}
        if compiling is not None:
            compiling.terminate()
    else:
        if compiling is not None:
            compiling.wait()
            print((reports / "torchao.log").read_text()[-500:])
        done("waiting for torchao")
        bench_steps, bench = bench_all(build, reports, env, arch)
        steps |= bench_steps
        done("benchmarks")

    total = {
        key: sum(part[key] for part in tests.values()) for key in ("passed", "failed", "skipped")
    }
    total["failed"] += sum(code != 0 for code in steps.values())
    total["failed"] += sum(word != "clean" for word in sanitizer.values())
    goals = []  # the project's goals are for the H200
    if arch == HOPPER:
        goals = targets.rows(*(bench.get(name, {}) for name in BENCHMARKS))
    result = {
        "device": torch.cuda.get_device_name(0),
        "architecture": arch,
        "versions": versions(),
        "source_hash": source_hash(),
        "hashed": list(HASHED),
        **total,
        "tests": tests,
        "failed_tests": failed_tests,
        "steps": steps,
        "sanitizer": sanitizer,
        "build_s": seconds["build"],
        "total_s": round(time.time() - start),
        "seconds": kept.get("seconds", {}) | seconds,
        "ratios": ratios(bench),
        "targets": goals,
        **{f"bench_{name}": report for name, report in bench.items()},
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
    for goal in goals:
        print(f"{goal['reached']:7s} {goal['measured']:8.3g} (must {goal['must']:g}, aim "
              f"{goal['aim']:.3g})  {goal['work']}")  # fmt: skip
    print(f"seconds: {seconds}")
    print(f"{total['passed']} passed, {total['failed']} failed, {total['skipped']} skipped")
    print(f"written: {out}")
    return int(total["failed"] > 0 or total["passed"] == 0)


if __name__ == "__main__":
    sys.exit(main())
