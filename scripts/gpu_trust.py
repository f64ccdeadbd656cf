#!/usr/bin/env python3
"""Run long tests on a GPU machine: load, faults, sizes past 2^31, compute-sanitizer; one report.

    python3 scripts/gpu_trust.py                        # all parts, about 500 s on an H200
    python3 scripts/gpu_trust.py random overlap         # two parts; the report keeps the others'
    python3 scripts/gpu_trust.py --budget 300 sanitizer    # continues a report of these sources

It builds in gpu_check.py's folder, so each reuses the other's build, and has the same requirements.
Parts that use little of the device run side by side. PARTS below and tests/cpp/test_trust_cuda.cpp
have the sizes.

parts:

  random     random small calls, CUDA against the CPU bit for bit
  overlap    random layers, overlapping launches against one launch at a time
  load       64 threads on 8 streams
  steps      training steps, some given up, without growth of memory
  large      arrays past 2^31 elements
  faults     errors of CUDA, memory that runs out, forks, memory of other kinds
  devices    every GPU of the machine at once, by threads of one process and by processes
  sanitizer  compute-sanitizer, four tools, over every C++ GPU test
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as tree
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Lock
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import gpu_check  # noqa: E402
from gpu_check import ROOT  # noqa: E402

OUT = ROOT / "benchmarks/results/gpu-trust.json"
TOOLS = ("racecheck", "memcheck", "initcheck", "synccheck")  # the slowest first
# Tests that start this program again or cause a CUDA error on purpose, which a sanitizer reports.
NOT_SANITIZED = ("an_illegal_address", "a_device_that_is_reset", "a_full_device", "overlapping_",
                 "an_error_of_others")  # fmt: skip
SANITIZED = (
    *("cpp/include", "cuda", "tests/cpp"),
    *(
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "cpp/src").iterdir())
        if path.is_file()
    ),
)
"""Sources of the kernels that a sanitizer sees, without the CPU backend."""
LONG = {
    "GemmMmaCuda.longest_contraction_is_exact": 6,
    "GemmMmaCuda.longer_contractions_are_exact": 6,
    "GemmMmaCuda.every_tile_equals_cpu": 6,
    "StagesCuda.every_replay_reads_the_counter": 9,
}
"""Tests too long for a sanitizer, which start first, and their parts that run side by side
(HOT_TEST_PART)."""
SHORT = {"HOT_RANDOM_CASES": "150", "HOT_LOAD_SECONDS": "0", "HOT_TRUST_THREADS": "2"}
"""Sizes of the long tests under a sanitizer."""


@dataclass(frozen=True)
class Run:
    """Process of a part: a gtest program with a filter, or a pytest file with an expression."""

    what: str
    """Program test_trust_cuda, or a file of tests."""
    chosen: str
    environment: dict[str, str]


def parts_of(size: float, cores: int) -> dict[str, list[Run]]:
    """Return every part except the sanitizer's; ``size``: a share of the full sizes."""
    workers = str(max(1, cores - 2))
    cpp, python = "test_trust_cuda", "tests/gpu/test_trust.py"

    def count(full: int) -> str:
        return str(max(1, round(full * size)))

    faults = ":".join(
        f"TrustCuda.{name}"
        for name in (
            *("an_illegal_address*", "an_error_of_others*", "a_full_device", "a_device_that_is*"),
            *("managed_memory", "pinned_memory"),
        )
    )
    large = {"HOT_LARGE": "1"}
    return {
        "random": [
            Run(cpp, "TrustCuda.random_cases_equal_cpu",
                {"HOT_RANDOM_CASES": count(1_000_000), "HOT_TRUST_THREADS": workers}),
        ],
        "overlap": [
            Run(cpp, "TrustCuda.overlapping_launches_change_nothing",
                {"HOT_OVERLAP_CASES": count(10_000), "HOT_TRUST_THREADS": str(max(1, cores // 3))}),
        ],
        "load": [
            Run(cpp, "TrustCuda.threads_on_shared_streams", {"HOT_LOAD_SECONDS": count(60)}),
        ],
        "steps": [Run(python, "growth", {"HOT_STEPS": count(100_000)})],
        "large": [
            Run(cpp, "TrustCuda.fwht_past_two_to_the_31:TrustCuda.large_*", large),
            Run(python, "two_to_the_31", large),
        ],
        "faults": [
            Run(cpp, faults, large),
            Run(python, "not two_to_the_31 and not growth and not several_gpus", large),
        ],
        "devices": [
            Run(python, "several_gpus", {"HOT_LOAD_SECONDS": count(20)}),
            Run("tests/gpu/test_runtime.py", "of_its_arrays or of_two_devices", {}),
        ],
    }  # fmt: skip


GROUPS = (("random", "steps"), ("overlap", "load"), ("large",), ("faults",), ("devices",),
          ("sanitizer",))  # fmt: skip
"""Parts that run side by side, in this order. ``large`` and ``faults`` fill the device."""
LIMITS = {"random": 240, "steps": 260, "overlap": 150, "load": 110, "large": 200, "faults": 120,
          "devices": 120}  # fmt: skip
"""Longest time of a part in seconds."""


def gtest_results(path: Path) -> dict[str, dict[str, Any]]:
    """Read each test's result and properties from --gtest_output=json."""
    if not path.exists():
        return {}
    known = {"name", "status", "result", "timestamp", "time", "classname", "file", "line"}
    results = {}
    for suite in json.loads(path.read_text())["testsuites"]:
        for case in suite["testsuite"]:
            if case.get("result") == "SUPPRESSED":  # a child's, which its parent runs
                continue
            result = "failed" if case.get("failures") else case.get("result", "?").lower()
            results[case["name"]] = {
                "result": {"completed": "passed"}.get(result, result),
                "seconds": float(case["time"].rstrip("s")),
                "figures": {k: number(v) for k, v in case.items() if k not in known | {"failures"}},
                **({"failures": [f["failure"][:600] for f in case["failures"][:6]]}
                   if case.get("failures") else {}),
            }  # fmt: skip
    return results


def pytest_results(path: Path) -> dict[str, dict[str, Any]]:
    """Read each test's result and properties from --junit-xml."""
    if not path.exists():
        return {}
    results = {}
    for case in tree.parse(path).getroot().iter("testcase"):
        trouble = [one for one in case if one.tag in ("failure", "error")]
        skipped = case.find("skipped") is not None
        results[case.get("name", "?")] = {
            "result": "failed" if trouble else "skipped" if skipped else "passed",
            "seconds": float(case.get("time", 0)),
            "figures": {p.get("name"): number(p.get("value", "")) for p in case.iter("property")},
            **({"failures": [(trouble[0].text or "")[-600:]]} if trouble else {}),
        }
    return results


def number(text: str) -> int | str:
    """Convert a figure to a number, and leave other text."""
    return int(text) if text.removeprefix("-").isdigit() else text


def shares(cores: Sequence[int], jobs: int) -> list[list[int]]:
    """Divide the cores among jobs, with at least one for each."""
    return [list(cores[i::jobs]) or [cores[i % len(cores)]] for i in range(jobs)]


class Trust:
    """Runs the parts of one call.

    Args:
        build: gpu_check's folder.
        environment: environment of the Python tests.
        deadline: time.monotonic() after which no test starts.
    """

    def __init__(self, build: Path, environment: dict[str, str], deadline: float) -> None:
        self.build, self.environment, self.deadline = build, environment, deadline
        self.reports = build / "reports/trust"
        self.reports.mkdir(parents=True, exist_ok=True)

    def left(self) -> float:
        return max(0.0, self.deadline - time.monotonic())

    def part(self, name: str, runs: Sequence[Run]) -> dict[str, Any]:
        """Run one part and return its tests by name."""
        began = time.monotonic()
        tests: dict[str, Any] = {}
        trouble = []
        for index, run in enumerate(runs):
            seconds = min(self.left(), LIMITS[name] - (time.monotonic() - began))
            if seconds < 5:
                trouble.append(f"{run.what}: no time left")
                continue
            done, word = self.run(f"{name}-{index}", run, seconds)
            tests |= done
            if word:
                trouble.append(f"{run.what}: {word}")
        failed = [test for test, row in tests.items() if row["result"] == "failed"]
        passed = [test for test, row in tests.items() if row["result"] == "passed"]
        result = "failed" if failed or trouble or not passed else "passed"
        print(f"{name}: {result}, {time.monotonic() - began:.0f} s {trouble or ''}", flush=True)
        return {
            "result": result,
            "seconds": round(time.monotonic() - began, 1),
            "trouble": trouble,
            "tests": tests,
        }

    def run(self, name: str, run: Run, seconds: float) -> tuple[dict[str, Any], str]:
        """Run one process. Returns its tests, and the failure of the process itself."""
        python = run.what.endswith(".py")
        path = self.reports / f"{name}.{'xml' if python else 'json'}"
        path.unlink(missing_ok=True)
        if python:
            command = [
                sys.executable, "-m", "pytest", "-q", run.what, "-k", run.chosen,
                "-o", "junit_family=xunit1", "--junit-xml", str(path), "-p", "no:cacheprovider",
            ]  # fmt: skip
        else:
            command = [
                str(self.build / "tests/cpp" / run.what),
                f"--gtest_filter={run.chosen}",
                f"--gtest_output=json:{path}",
            ]
        log = self.reports / f"{name}.log"
        environment = {**self.environment, **run.environment}
        with log.open("w") as file:
            try:
                code = subprocess.run(
                    command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT,
                    timeout=seconds, check=False,
                ).returncode  # fmt: skip
            except subprocess.TimeoutExpired:
                return {}, f"did not end in {seconds:.0f} s"
        results = pytest_results(path) if python else gtest_results(path)
        if code != 0:
            print(log.read_text()[-3000:], flush=True)
        return results, f"exit code {code}" if code != 0 and not results else ""

    # ---- the sanitizer ----

    def sanitizer(self, jobs: int, seconds_a_test: float, before: dict[str, Any]) -> dict[str, Any]:
        """Run compute-sanitizer's four tools over every C++ GPU test, until time is up.

        ``before`` is this part of a report of the same sources, whose clean tests are not repeated.
        """
        began = time.monotonic()
        if not shutil.which("compute-sanitizer"):
            return {"result": "failed", "trouble": ["there is no compute-sanitizer"], "tools": {}}
        tests = [
            (program, test)
            for program in sorted((self.build / "tests/cpp").glob("test_*_cuda"))
            for test in self.tests_in(program)
        ]
        names = {test for _, test in tests}
        results: dict[str, dict[str, Any]] = {}
        for tool in TOOLS:
            clean = [test for test in before.get(tool, {}).get("clean", ()) if test in names]
            results[tool] = {"clean": clean, "errors": {}, "not finished": []}
        jobs_left = [
            (tool, program, test, part)
            for tool in TOOLS
            for program, test in sorted(tests, key=lambda one: one[1] not in LONG)
            if test not in results[tool]["clean"]
            for part in range(LONG.get(test, 1))
        ]
        words: dict[tuple[str, str], list[str | None]] = {}

        lock = Lock()
        cores: SimpleQueue[list[int]] = SimpleQueue()
        for share in shares(sorted(os.sched_getaffinity(0)), jobs):
            cores.put(share)

        def one(job: tuple[str, Path, str, int]) -> None:
            tool, program, test, part = job
            mine = cores.get()
            seconds = min(self.left(), seconds_a_test)
            word = self.sanitize(tool, program, test, seconds, mine, part) if seconds > 3 else None
            cores.put(mine)
            if word not in (None, "clean"):
                print(f"{tool} {test}: {word[:400]}", flush=True)
            with lock:
                words.setdefault((tool, test), []).append(word)

        with ThreadPoolExecutor(jobs) as pool:
            # In the order of the tools: if time runs out, tests of the last tools are missing.
            list(pool.map(one, jobs_left))
        for (tool, test), said in words.items():
            errors_of_it = [word for word in said if word not in (None, "clean")]
            if errors_of_it:
                results[tool]["errors"][test] = errors_of_it[0]
            elif None in said:
                results[tool]["not finished"].append(test)
            else:
                results[tool]["clean"].append(test)
        errors = any(row["errors"] for row in results.values())
        complete = not any(row["not finished"] for row in results.values())
        result = "failed" if errors else "passed" if complete else "not finished"
        print(f"sanitizer: {result}, {time.monotonic() - began:.0f} s", flush=True)
        return {
            "result": result,
            "seconds": round(time.monotonic() - began, 1),
            "trouble": [],
            "tests": len(tests),
            "sanitized_hash": gpu_check.source_hash(SANITIZED),
            "tools": results,
        }

    def tests_in(self, program: Path) -> list[str]:
        """List the full names of a gtest program's tests."""
        text = subprocess.run(
            [program, "--gtest_list_tests"], capture_output=True, text=True, check=True
        ).stdout
        names, suite = [], ""
        for line in text.splitlines():
            word = line.split("#")[0].strip()
            if line and not line[0].isspace() and word.endswith("."):
                suite = word
            elif line.startswith("  ") and "DISABLED_" not in word:
                names.append(suite + word)
        return [name for name in names if not any(part in name for part in NOT_SANITIZED)]

    def sanitize(
        self,
        tool: str,
        program: Path,
        test: str,
        seconds: float,
        cores: Sequence[int],
        part: int = 0,
    ) -> str | None:
        """Return the tool's messages, or None if time ran out.

        ``cores`` are the test's, whose CPU threads wait actively. ``part`` is for a test in LONG.
        """
        log = self.reports / f"{tool}-{test.replace('/', '_')}-{part}.log"
        environment = {**os.environ, **SHORT}
        if test in LONG:
            environment["HOT_TEST_PART"] = f"{part}/{LONG[test]}"
        with log.open("w") as file:
            try:
                code = subprocess.run(
                    ["taskset", "-c", ",".join(map(str, cores)), "compute-sanitizer", "--tool",
                     tool, "--error-exitcode", "3", str(program), f"--gtest_filter={test}"],
                    cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT,
                    timeout=seconds, check=False,
                ).returncode  # fmt: skip
            except subprocess.TimeoutExpired:
                return None
        if code == 0:
            return "clean"
        lines = log.read_text().splitlines()
        said = [line for line in lines if line.startswith("=====")]
        if code != 3:  # the test itself failed
            said = [line for line in lines if not line.startswith("=====")][-12:] + said[-2:]
        return f"exit {code}: " + "\n".join(said[:8] + said[-2:])


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    every = [name for group in GROUPS for name in group]
    parser.add_argument("parts", nargs="*", metavar="PART", help="default: all")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--build", type=Path, default=ROOT / "build/gpu")
    parser.add_argument("--budget", type=float, default=500, help="seconds after the build")
    parser.add_argument(
        "--size", type=float, default=1, help="share of the full sizes, for a trial"
    )
    parser.add_argument(
        "--sanitizer-seconds", type=float, default=100, help="longest time of one test"
    )
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 4) - 2))
    args = parser.parse_args()
    unknown = set(args.parts) - set(every)
    if unknown:
        parser.error(f"no part {', '.join(sorted(unknown))}; expected some of {', '.join(every)}")
    import torch

    if not torch.cuda.is_available():
        sys.exit("gpu_trust: torch sees no CUDA device")
    build: Path = args.build.resolve()
    reports = build / "reports"
    reports.mkdir(parents=True, exist_ok=True)
    steps = gpu_check.build_all(build, reports, gpu_check.architecture())
    if any(steps.values()):
        sys.exit(f"gpu_trust: the build failed: {steps}")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(gpu_check.package(build)), str(ROOT / "tests")]),
        "PYTHONUNBUFFERED": "1",
    }
    trust = Trust(build, environment, time.monotonic() + args.budget)
    runs = parts_of(args.size, os.cpu_count() or 4)
    about = {
        "device": torch.cuda.get_device_name(0),
        "versions": gpu_check.versions(),
        "source_hash": gpu_check.source_hash(),
        "size": args.size,
    }
    report = json.loads(args.out.read_text()) if args.out.exists() else {}
    results: dict[str, Any] = report.get("parts", {})
    chosen = args.parts or every
    for group in GROUPS:
        works: dict[str, Callable[[], dict[str, Any]]] = {}
        for name in group:
            if name not in chosen:
                continue
            if name == "sanitizer":
                last = results.get(name, {})
                same = last.get("sanitized_hash") == gpu_check.source_hash(SANITIZED)
                tools = last.get("tools", {}) if same else {}
                works[name] = partial(trust.sanitizer, args.jobs, args.sanitizer_seconds, tools)
            else:
                works[name] = partial(trust.part, name, runs[name])
        with ThreadPoolExecutor(max(1, len(works))) as pool:
            if works:
                longest = max(LIMITS.get(name, args.budget) for name in works)
                print(f"running {', '.join(works)}: at most {longest:.0f} s", flush=True)
            running = {name: pool.submit(work) for name, work in works.items()}
            for name, result in running.items():
                results[name] = {**result.result(), **about}
        # Written after every group, so that an interrupted call leaves a report.
        args.out.parent.mkdir(parents=True, exist_ok=True)
        ordered = {name: results[name] for name in every if name in results}
        today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
        args.out.write_text(json.dumps({"date": today, "parts": ordered}, indent=1) + "\n")
    failed = [name for name in chosen if results[name]["result"] == "failed"]
    print(f"written: {args.out}; failed: {', '.join(failed) or 'none'}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
