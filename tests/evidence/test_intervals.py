"""Student's intervals of the benchmarks, and the verdict on equivalence."""

from __future__ import annotations

import json
import math
import statistics
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from evidence import evidence_tables, intervals  # noqa: E402

TABLE = {1: 12.7062, 2: 4.3027, 3: 3.1824, 4: 2.7764, 5: 2.5706, 12: 2.1788, 30: 2.0423}
"""Degrees of freedom -> the printed 97.5 % points."""


@pytest.mark.parametrize("degrees", TABLE)
def test_the_printed_quantiles(degrees: int) -> None:
    t = intervals.quantile(0.975, degrees)
    assert t == pytest.approx(TABLE[degrees], abs=5e-5)
    assert intervals.cumulative(t, degrees) == pytest.approx(0.975, abs=1e-10)
    assert intervals.cumulative(-t, degrees) == pytest.approx(0.025, abs=1e-10)
    assert intervals.cumulative(0.0, degrees) == 0.5


def test_interval() -> None:
    values = [1.0, 2.0, 4.0]
    found = intervals.interval(values)
    assert found is not None and found.count == 3
    half = TABLE[2] * statistics.stdev(values) / math.sqrt(3)
    assert found.mean == pytest.approx(7 / 3)
    assert (found.low, found.high) == pytest.approx((7 / 3 - half, 7 / 3 + half), abs=1e-4)
    assert intervals.interval([1.0]) is None and intervals.interval([1.0, math.inf]) is None


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [
        (-0.004, 0.0099, "equivalent"),
        (-0.004, 0.0107, "not shown"),
        (-0.011, 0.004, "not shown"),
        (0.0035, 0.015, "not shown, above zero"),
        (-0.015, -0.001, "not shown, below zero"),
        (0.001, 0.009, "equivalent"),
        (0.0269, 0.0443, "differs by more than the margin"),
        (-0.03, -0.02, "differs by more than the margin"),
    ],
)
def test_verdict(low: float, high: float, words: str) -> None:
    found = intervals.Interval((low + high) / 2, low, high, 5)
    assert intervals.verdict(found, 0.01) == words
    assert intervals.verdict(None, 0.01) == "not shown"


def test_two_one_sided_tests() -> None:
    """Their p is that of the interval: 0.025 where an end of it lies on the margin."""
    values = [0.001, 0.004, -0.002, 0.003]
    found = intervals.interval(values)
    assert found is not None
    assert intervals.tost(values, found.high) == pytest.approx(0.025, abs=1e-9)
    falling = [-value for value in values]
    assert intervals.tost(falling, found.high) == pytest.approx(0.025, abs=1e-9)
    assert intervals.tost(values, found.mean) == pytest.approx(0.5)
    assert intervals.tost([0.02, 0.021], 0.01) == pytest.approx(1.0, abs=0.05)
    assert intervals.tost([0.0, 0.0], 0.01) == 0 and intervals.tost([0.1, 0.1], 0.01) == 1
    assert intervals.tost([0.1], 0.01) is None and intervals.tost([0.1, math.nan], 0.01) is None


def test_steps_to_a_loss() -> None:
    """By a line between two points; the first time; never."""
    curve = [(0, 9.0), (40, 5.0), (80, 6.0), (120, 4.0)]
    assert evidence_tables.steps_to(curve, 5.0) == 40
    assert evidence_tables.steps_to(curve, 7.0) == 20
    assert evidence_tables.steps_to(curve, 4.5) == 110
    assert evidence_tables.steps_to(curve, 3.9) is None
    assert evidence_tables.steps_to(curve, 9.5) == 0


def test_equal_seeds() -> None:
    """A seed that one of several lacks is in nobody's mean."""
    gaps = {"a": {0: 1.0, 1: 2.0, 2: 3.0}, "b": {1: 4.0, 2: 5.0, 4: 6.0}, "alone": {7: 8.0}}
    found = evidence_tables.of_equal_seeds(gaps)
    assert found == {"a": {1: 2.0, 2: 3.0}, "b": {1: 4.0, 2: 5.0}, "alone": {7: 8.0}}


def test_days_of_a_report() -> None:
    runs = {"a/0": {"date": "2026-03-02"}, "a/1": {"date": "2026-03-01"}, "a/2": {}}
    assert evidence_tables.days_of({"runs": runs}) == ["2026-03-01", "2026-03-02"]
    assert evidence_tables.days_of({"date": "2026-03-03T04:05", "runs": {}}) == ["2026-03-03"]
    assert evidence_tables.days_of({"part": {"date": "2026-03-04T00"}}) == ["2026-03-04"]
    assert evidence_tables.days_of({"settings": {}, "runs": {"a": {}}}) == []


def test_the_gap_along_a_run(tmp_path: Path) -> None:
    """By seed and step, of equal seeds; the table says what the report shows; the figure."""
    curves = {
        "bf16": ([(0, 9.0), (50, 5.0), (100, 4.0)], [(0, 9.2), (50, 5.2), (100, 4.2)]),
        "default": ([(0, 9.0), (50, 5.002), (100, 4.001)], [(0, 9.2), (50, 5.204), (100, 4.202)]),
        "fast": ([(0, 9.0), (50, 5.1), (100, 4.1)], [(0, 9.2), (50, 5.3), (100, 4.3)]),
    }
    runs = {
        f"{name}/{seed}": {"curve": curve, "validation_loss": curve[-1][1], "date": "2026-11-25"}
        | {"step_ms": {"bf16": 10.0, "default": 9.0, "fast": 8.0}[name]}
        for name, of in curves.items()
        for seed, curve in enumerate(of)
    }
    size = {"batch": 1, "context": 100, "validation_batches": 50}
    report = {
        "device": "NVIDIA H100", "date": "2026-11-25", "parameters": 500, "runs": runs,
        "settings": {"steps": 100, "size": size},
        "text": {"training": 4000, "epochs": 2.5, "packages": {"torch": 9, "jax": 4}},
    }  # fmt: skip
    along = evidence_tables.gaps_along(report, "default")
    assert list(along) == [0, 50, 100]
    assert along[50] == pytest.approx([0.002, 0.004])
    assert along[100] == pytest.approx([0.001, 0.002])
    assert list(evidence_tables.decided(tmp_path, "10M-20")) == ["*Planned, not run.*"]
    (tmp_path / "cuda-gpt-10M-20.json").write_text(json.dumps(report))
    text = "\n".join(evidence_tables.decided(tmp_path, "10M-20"))
    ours, fast = (line for line in text.splitlines() if line.startswith(("| default", "| fast")))
    assert "| default | 2 | +0.0015 [-0.0049, +0.0079] | 0.019 | equivalent |" in ours
    assert "| 0.90 | below" not in ours and ours.endswith("| 0.90 | 0.90 |")
    assert "differs by more than the margin" in fast and fast.endswith("| 0.80 | 0.84 |")
    assert "2.50 passes over 4,000 tokens of 2 packages (torch, jax, …)" in text
