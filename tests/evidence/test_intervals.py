"""Student's intervals of the benchmarks, and the verdict on equivalence."""

import json
import math
import statistics
from pathlib import Path

import pytest
from evidence import evidence_tables, intervals

TABLE = {1: 12.7062, 2: 4.3027, 3: 3.1824, 4: 2.7764, 5: 2.5706, 12: 2.1788, 30: 2.0423}
"""Printed 97.5 % points by degrees of freedom."""


@pytest.mark.parametrize("degrees", TABLE)
def test_the_printed_quantiles(degrees: int) -> None:
    t = intervals.quantile(0.975, degrees)
    assert t == pytest.approx(TABLE[degrees], abs=5e-5)
    assert intervals.cumulative(t, degrees) == pytest.approx(0.975, abs=1e-10)
    assert intervals.cumulative(-t, degrees) == pytest.approx(0.025, abs=1e-10)
    assert intervals.cumulative(0.0, degrees) == 0.5


def test_interval() -> None:
    values = [1.0, 2.0, 4.0]
    result = intervals.interval(values)
    assert result is not None and result.count == 3
    half = TABLE[2] * statistics.stdev(values) / math.sqrt(3)
    assert result.mean == pytest.approx(7 / 3)
    assert (result.low, result.high) == pytest.approx((7 / 3 - half, 7 / 3 + half), abs=1e-4)
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
    result = intervals.Interval((low + high) / 2, low, high, 5)
    assert intervals.verdict(result, 0.01) == words and intervals.verdict(None, 0.01) == "not shown"


def test_two_one_sided_tests() -> None:
    """p agrees with the interval: 0.025 if an end of it lies on the margin."""
    values = [0.001, 0.004, -0.002, 0.003]
    result = intervals.interval(values)
    assert result is not None
    for sample in (values, [-value for value in values]):
        assert intervals.tost(sample, result.high) == pytest.approx(0.025, abs=1e-9)
    assert intervals.tost(values, result.mean) == pytest.approx(0.5)
    assert intervals.tost([0.02, 0.021], 0.01) == pytest.approx(1.0, abs=0.05)
    assert intervals.tost([0.0, 0.0], 0.01) == 0 and intervals.tost([0.1, 0.1], 0.01) == 1
    assert intervals.tost([0.1], 0.01) is None and intervals.tost([0.1, math.nan], 0.01) is None


def test_steps_to_a_loss() -> None:
    """Interpolation between two points, the first crossing, and no crossing."""
    curve = [(0, 9.0), (40, 5.0), (80, 6.0), (120, 4.0)]
    for loss, steps in ((5.0, 40), (7.0, 20), (4.5, 110), (3.9, None), (9.5, 0)):
        assert evidence_tables.steps_to(curve, loss) == steps


def test_a_planned_size_counts_whole_seeds(tmp_path: Path) -> None:
    """Seed 3 lacks a contender and counts for none; `fast`, planned for two seeds, stops none."""
    gaps = {"bf16": [0.0] * 4, "default": [0.01, 0.02, 0.03, 9.0], "fast": [0.1, 0.2]}
    gaps["FP8 tensorwise"] = [0.0] * 3
    runs = ((n, i, g) for n, gs in gaps.items() for i, g in reversed(list(enumerate(gs))))
    curves = {f"{n}/{i}": [(0, 9.0), (4, 2 + g)] for n, i, g in runs}
    report = {
        "settings": {"steps": 4, "size": {"batch": 1, "context": 8, "validation_batches": 1}},
        "runs": {k: {"curve": c, "validation_loss": c[-1][1]} for k, c in curves.items()},
        "parameters": 25e6,
        "text": {"epochs": 1.0, "training": 9, "packages": {"torch": 9}},
        "device": "NVIDIA X",
    }
    (tmp_path / "cuda-gpt-25M-20.json").write_text(json.dumps(report))
    lines = list(evidence_tables.decided(tmp_path, "25M-20"))
    cells = ([cell.strip() for cell in line.split("|")] for line in lines[2:6])
    rows = {name: row for _, name, *row in cells}
    assert rows["bf16's loss, ± deviation"][0] == "3" and rows["default"][0] == "3"
    assert rows["default"][1].startswith("+0.0200") and rows["FP8 tensorwise"][0] == "3"
    assert rows["default"][2] == "+0.0100, +0.0200, +0.0300"
    assert rows["fast"][0] == "2" and rows["fast"][1].startswith("+0.1500")
    by_size = evidence_tables.gaps_by_size(tmp_path, ["25M-20"])["25M-20"]
    assert {name: len(values) for name, values in by_size.items()} == {
        "bf16": 3, "default": 3, "FP8 tensorwise": 3, "fast": 2,
    }  # fmt: skip
