"""benchmarks/bench_8b.py: the search for the largest batch, and the script at toy size."""

import functools
import importlib.util
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import SHORT_TEXT, needs_torchao, refused, report_of, without_broken_torchvision

torch = pytest.importorskip("torch")
with without_broken_torchvision():
    pytest.importorskip("transformers", minversion="5")
pytest.importorskip("tokenizers")

import bench_8b  # noqa: E402
from bench_8b import Tried  # noqa: E402
from evidence import doc_tables  # noqa: E402


def toy(blocks: int) -> Any:
    config = bench_8b.TOY.config | {"num_hidden_layers": blocks}
    return bench_8b.dataclasses.replace(bench_8b.TOY, config=config)


LAYER = "base_model.model.model.layers.2.mlp.down_proj.base_layer"
PLAIN, OURS = "bf16, attention kept", "default int8-forward, attention kept"


def test_the_largest_batch_is_found(rng: np.random.Generator) -> None:
    """Synthetic models with the peak at backward's begin or end, with and without fragmentation."""
    foretold = 0
    for _ in range(200):
        static, gradients = rng.uniform(5, 50), rng.uniform(0, 20)
        each, fixed, beyond = rng.uniform(0.05, 5), rng.uniform(0, 3), rng.uniform(0.05, 2)
        lost, limit = rng.choice([1.0, 1.02]), 80.0
        sizes = (static, static + gradients, fixed, each, beyond, lost)
        step = functools.partial(made_step, sizes, limit)
        if step(2) is None:
            continue
        trials = [one for one in (step(2), step(4)) if one is not None]
        failed = None if len(trials) == 2 else 4
        failed = bench_8b.largest(step, trials, failed, limit, lambda: math.inf)
        best = trials[-1].sequences
        largest_size = max(size for size in range(2, 2000) if step(size))
        assert largest_size - largest_size // 8 <= best <= largest_size
        assert failed is None or step(failed) is None
        foretold += lost == 1 and best == largest_size
    assert foretold > 50


def made_step(sizes: Sequence[float], limit: float, size: int) -> Tried | None:
    static, after, fixed, each, beyond, lost = sizes
    held = static + fixed + each * size
    peak = max(held, after) + 0.3 + beyond * size
    return Tried(size, held, after, peak, 1.0, 0.0) if peak * lost <= limit else None


def test_no_step_begins_that_would_not_end(rng: np.random.Generator) -> None:
    tried: list[int] = []
    trials = [Tried(2, 2, 2, 4, 1000.0, 0.0), Tried(4, 4, 2, 6, 2000.0, 0.0)]
    assert bench_8b.largest(lambda n: tried.append(n), trials, None, 100, lambda: 5.0) is None
    assert not tried and len(trials) == 2


def options_of(folder: Path) -> list[str]:
    return ["--quick", "--backend", "eager", "--threads", "1", "--cache", str(folder)]


def run(folder: Path, *words: str) -> Any:
    return report_of(bench_8b, folder / "8b.json", *options_of(folder), *words)


@needs_torchao
def test_contenders_are_paired_and_a_run_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_8b, "TOY", toy(1))
    # Text of the installed packages is another one on each machine.
    monkeypatch.setattr("bench_gpt.sources", lambda *_: SHORT_TEXT)
    monkeypatch.setattr(bench_8b, "LEARNING_RATE", 3e-4)  # ten steps lower the loss
    lora = ["LoRA bf16", "LoRA frozen int8", "LoRA frozen int4", "LoRA frozen nf4 torchao"]
    if importlib.util.find_spec("bitsandbytes"):
        lora += ["LoRA frozen nf4", "LoRA frozen nf4 fp32"]
    coded = "LoRA frozen int4, x of adapters in 8 bits"
    names = [OURS, PLAIN, *(f"{name}, attention kept" for name in lora), coded]
    report = run(tmp_path, "--contenders", *names)
    rows = report["whole"]
    assert list(rows) == [name for name in (c.name for c in bench_8b.CONTENDERS) if name in names]
    for name, row in rows.items():
        layers = 0 if "bf16" in name or "nf4" in name else 14 if name == coded else 7
        assert row["converted"] == layers, name
        assert ("frozen_s" in row) == ("frozen" in name), name
        assert row["head"] == "loss in chunks, torch products" and row["graphs"] == 1, name
        assert row["sequences"] == bench_8b.COMMON and row["step"]["measurements"] == 6
        assert row["largest"]["tokens"] == 4 * 32 and row["tokens_per_s"] > 0
    # Weights and batches are equal, so losses are close, and below those of random guesses.
    for name in (n for n in names if n != PLAIN):
        ours, plain = (rows[name]["losses"][0], rows[PLAIN]["losses"][0])
        assert ours == pytest.approx(plain, rel=5e-3), name
    assert rows[OURS]["loss"] == pytest.approx(rows[PLAIN]["loss"], rel=5e-3)
    assert rows[PLAIN]["loss"] < rows[PLAIN]["losses"][0] - 1.5
    lines = list(doc_tables.whole(report))
    assert len(lines) == 2 + len(names) and lines[2].startswith(f"| {OURS} | ")

    kept = dict(rows)
    report["whole"][PLAIN] = {"begun": 1}  # its process died
    (tmp_path / "8b.json").write_text(json.dumps(report))
    rows = run(tmp_path, "--contenders", *names)["whole"]
    assert rows[PLAIN]["loss"] == kept[PLAIN]["loss"] and rows[OURS] == kept[OURS]
    report["whole"][PLAIN] = {"begun": 2}
    (tmp_path / "8b.json").write_text(json.dumps(report))
    refused(lambda: run(tmp_path, "--contenders", *names), "attention kept", SystemExit)
    assert "twice" in json.loads((tmp_path / "8b.json").read_text())["whole"][PLAIN]["error"]
    monkeypatch.setattr(bench_8b, "TOY", bench_8b.dataclasses.replace(bench_8b.TOY, length=16))
    refused(lambda: run(tmp_path), "has other settings", SystemExit)


def test_a_report_is_that_of_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also without --json: a run of the 1B must not replace the 8B's report."""
    monkeypatch.setattr("timing.QUICK", tmp_path)
    monkeypatch.setattr(bench_8b, "row_of", lambda *_: {"error": "stop"})
    monkeypatch.setattr(bench_8b, "sequences_of", lambda *_: None)
    words = ["--quick", "--size", "1b", "--contenders", "bf16"]
    refused(bench_8b.main, "failed", SystemExit, words)
    assert [path.name for path in tmp_path.iterdir()] == ["cpu-1b.json"]


def test_a_report_keeps_its_settings_and_all_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another seed or compiler is refused. Rows stay whose contender this version does not have."""
    monkeypatch.setattr(bench_8b, "row_of", lambda *_: {"left_out": "nothing"})
    monkeypatch.setattr(bench_8b, "sequences_of", lambda *_: None)
    path = tmp_path / "8b.json"
    report = run(tmp_path, "--contenders", "bf16")
    report["whole"] = {"bf16 of yesterday": {"left_out": "removed"}} | report["whole"]
    path.write_text(json.dumps(report))
    assert list(run(tmp_path, "--contenders", "bf16", PLAIN)["whole"]) == [
        PLAIN, "bf16", "bf16 of yesterday",
    ]  # fmt: skip
    for words in (["--seed", "1"], ["--backend", "aot_eager"]):
        refused(run, "has other settings", SystemExit, tmp_path, *words)


def test_a_base_never_exists_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block is frozen before the next is made, from the weights that bf16's LoRA has."""
    plain: list[int] = []
    freeze = bench_8b.freeze

    def watched(block: Any, contender: Any) -> None:
        blocks.append(block)
        plain.append(sum(type(b.mlp.up_proj.weight) is torch.nn.Parameter for b in blocks))
        freeze(block, contender)

    blocks: list[Any] = []
    monkeypatch.setattr(bench_8b, "freeze", watched)
    models = {}
    for form in ("frozen int4", "bf16"):
        (contender,) = (c for c in bench_8b.CONTENDERS if c.name == f"LoRA {form}, attention kept")
        torch.manual_seed(0)
        models[form], seconds = bench_8b.build(toy(3), contender, "cpu")
        assert (seconds > 0) == bool(contender.frozen)
    assert plain == [1, 1, 1]
    codes, bf16 = (models[form].get_submodule(LAYER).weight.float() for form in models)
    assert 0.05 < (codes - bf16).norm() / bf16.norm() < 0.12


@needs_torchao
def test_memory_that_does_not_suffice_is_no_figure(tmp_path: Path) -> None:
    """A contender that fails is a row with its error, the others run."""
    failing = bench_8b.Contender("bf16", head="torch", settings={}, fp8="no such recipe")
    text = torch.zeros(4, 32, dtype=torch.int64)
    arguments = bench_8b.arguments([*options_of(tmp_path)])
    row = bench_8b.row_of(failing, arguments, text, lambda: 1.0)
    assert "no such recipe" in row["error"]
