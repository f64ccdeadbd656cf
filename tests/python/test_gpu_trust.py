"""scripts/gpu_trust.py: its reader of test results, and its tables. No GPU is needed."""

import json
import re
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")  # for the tables
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "benchmarks")]
import gpu_trust  # noqa: E402
from evidence import doc_tables  # noqa: E402

SUITE = [
    {"name": "fast", "result": "COMPLETED", "time": "1.5s", "cases": "70", "word": "a"},
    {"name": "gone", "result": "SKIPPED", "time": "0s"},
    {"name": "DISABLED_child", "result": "SUPPRESSED", "time": "0s"},
    {"name": "bad", "result": "COMPLETED", "time": "0.1s",
     "failures": [{"failure": "case 3 differs"}]},
]  # fmt: skip
GTEST = {"testsuites": [{"testsuite": SUITE}]}


def test_reads_gtest(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    assert gpu_trust.gtest_results(path) == {}  # a crashed program wrote no file
    path.write_text(json.dumps(GTEST))
    results = gpu_trust.gtest_results(path)
    found = {name: row["result"] for name, row in results.items()}
    assert found == {"fast": "passed", "gone": "skipped", "bad": "failed"}
    assert results["fast"]["figures"] == {"cases": 70, "word": "a"}
    assert results["bad"]["failures"] == ["case 3 differs"]


def test_every_part_is_run_and_shown() -> None:
    groups = [name for group in gpu_trust.GROUPS for name in group]
    runs = gpu_trust.parts_of(0.001, 16)
    assert sorted(groups) == sorted([*runs, "sanitizer"]) == sorted(doc_tables.TRUST)
    assert set(gpu_trust.LIMITS) == set(runs)
    # Every test that a filter names exists.
    sources = (ROOT / "tests/cpp/test_trust_cuda.cpp").read_text()
    for run in (run for part in runs.values() for run in part if run.what == "test_trust_cuda"):
        for pattern in run.chosen.split(":"):
            name = pattern.removeprefix("TrustCuda.").rstrip("*")
            assert f"TEST_F(TrustCuda, {name}" in sources, pattern
        for variable in run.environment:
            assert variable in sources


@pytest.fixture
def trust(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> gpu_trust.Trust:
    program = tmp_path / "tests/cpp/test_all_cuda"
    program.parent.mkdir(parents=True)
    program.touch()
    monkeypatch.setattr(gpu_trust.shutil, "which", lambda name: name)
    return gpu_trust.Trust(tmp_path, {}, time.monotonic() + 60)


def test_long_tests_run_in_parts(trust: gpu_trust.Trust, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_trust, "LONG", {"A.b": 3, "A.c": 2, "A.d": 2})
    monkeypatch.setattr(trust, "tests_in", lambda program: ["A.a", "A.b", "A.c", "A.d"])
    ran: list[tuple[str, str | None]] = []

    def process(command: list[str], env: dict[str, str], **_: object) -> object:
        test = command[-1].partition("=")[2]
        part = env.get("HOT_TEST_PART")
        ran.append((test, part))
        if (test, part) == ("A.c", "1/2"):
            raise gpu_trust.subprocess.TimeoutExpired(command, 5)
        bad = (test, part) == ("A.d", "0/2")
        return gpu_trust.subprocess.CompletedProcess(command, 3 if bad else 0)

    monkeypatch.setattr(gpu_trust.subprocess, "run", process)
    summary = trust.sanitizer(1, 5, {})
    row = summary["tools"]["memcheck"]
    found = sorted(row["clean"]), list(row["errors"]), row["not finished"]
    assert found == (["A.a", "A.b"], ["A.d"], ["A.c"])
    assert sorted(set(ran)) == sorted(
        [("A.a", None), *(("A.b", f"{i}/3") for i in range(3)),
         *((test, f"{i}/2") for test in ("A.c", "A.d") for i in range(2))]
    )  # fmt: skip
    assert ran[-1] == ("A.a", None)  # the long ones start first


def test_the_long_tests_know_their_parts() -> None:
    texts = [path.read_text() for path in (ROOT / "tests/cpp").glob("test_*_cuda.cpp")]
    tests = [test for text in texts for test in with_parts(text)]
    assert sorted(gpu_trust.LONG) == sorted(f"{suite}.{name}" for suite, name in tests)


def with_parts(source: str) -> list[tuple[str, str]]:
    tests = re.split(r"^TEST_F\((\w+), (\w+)\)", source, flags=re.MULTILINE)
    return [(a, b) for a, b, body in zip(*[iter(tests[1:])] * 3, strict=True) if "in_part(" in body]
