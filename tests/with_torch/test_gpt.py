"""benchmarks/bench_gpt.py at toy size: its text, its batches, comparable contenders."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("tokenizers")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import bench_gpt  # noqa: E402  (after the skips, from benchmarks/)


def test_every_window_comes_once(seeded: None) -> None:
    size = bench_gpt.QUICK
    text = torch.arange(size.context * 21 + 5)
    order = torch.Generator().manual_seed(int(torch.randint(1000, ())))
    seen = list(bench_gpt.batches(text, size, order))
    assert len(seen) == 21 // size.batch
    first = [int(row[0]) for inputs, _ in seen for row in inputs]
    assert len(set(first)) == len(first) and all(value % size.context == 0 for value in first)
    for inputs, targets in seen:
        assert torch.equal(targets, inputs + 1)


def test_a_run_is_paired_resumed_and_guarded(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    words = ["--quick", "--backend", "aot_eager", "--json", str(path), "--cache", str(tmp_path)]
    bench_gpt.main([*words, "--contenders", "bf16", "fast, attention kept"])
    runs = json.loads(path.read_text())["runs"]
    assert set(runs) == {"bf16/0", "fast, attention kept/0"}
    plain, ours = runs.values()
    # The same weights and the same first batch; the forward pass is the plain layers'.
    assert ours["training"][0] == pytest.approx(plain["training"][0], rel=1e-3)
    assert ours["curve"][0][1] == pytest.approx(plain["curve"][0][1], rel=1e-3)
    assert len(plain["training"]) == 4 and plain["curve"][-1][0] == 4
    kept = path.read_text()
    bench_gpt.main([*words, "--contenders", "bf16"])  # nothing is left to do
    assert path.read_text() == kept
    bench_gpt.main([*words, "--contenders", "bf16", "--seeds", "1", "--budget", "-1"])
    assert path.read_text() == kept
    with pytest.raises(SystemExit, match="made with other settings"):
        bench_gpt.main([*words, "--steps", "3"])
    with pytest.raises(SystemExit):
        bench_gpt.main([*words, "--contenders", "nobody"])


def test_validation_text_is_apart(tmp_path: Path) -> None:
    training, validation = bench_gpt.tokens(bench_gpt.QUICK, 20000, tmp_path)
    assert len(training) >= 20000 and len(validation) > 0
    texts = list(bench_gpt.sources(90000))
    assert len(set(texts)) == len(texts) >= 2
    assert sum(len(text) for i, text in enumerate(texts) if i % bench_gpt.EVERY) >= 90000
    assert training.max() < bench_gpt.QUICK.vocabulary
    again = bench_gpt.tokens(bench_gpt.QUICK, 20000, tmp_path)
    assert torch.equal(again[0], training)
