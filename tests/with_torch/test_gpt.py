"""benchmarks/bench_gpt.py at toy size: text, batches, comparable contenders."""

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support import SHORT_TEXT, refused, report_of

pytest.importorskip("tokenizers")

import bench_gpt


def test_every_window_comes_once_a_pass(seeded: None) -> None:
    size = bench_gpt.QUICK
    text = torch.arange(size.context * 21 + 5)
    order = torch.Generator().manual_seed(int(torch.randint(1000, ())))
    a_pass = 21 // size.batch
    seen = list(itertools.islice(bench_gpt.batches(text, size, order), 2 * a_pass))
    for inputs, targets in seen:
        assert torch.equal(targets, inputs + 1)
    first = [int(row[0]) for inputs, _ in seen for row in inputs]
    passes = [first[: len(first) // 2], first[len(first) // 2 :]]
    assert all(value % size.context == 0 for value in first) and passes[0] != passes[1]
    assert all(len(set(of)) == len(of) == a_pass * size.batch for of in passes)


def test_a_run_is_paired_resumed_and_guarded(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    words = ["--quick", "--backend", "aot_eager", "--json", str(path), "--cache", str(tmp_path)]
    bench_gpt.main([*words, "--contenders", "bf16", "fast, attention kept"])
    runs = json.loads(path.read_text())["runs"]
    assert set(runs) == {"bf16/0", "fast, attention kept/0"}
    plain, ours = runs.values()
    # Weights and first batch are equal, and the forward pass is plain.
    assert ours["training"][0] == pytest.approx(plain["training"][0], rel=1e-3)
    assert ours["curve"][0][1] == pytest.approx(plain["curve"][0][1], rel=1e-3)
    assert len(plain["training"]) == 4 and plain["curve"][-1][0] == 4
    kept = path.read_text()
    bench_gpt.main([*words, "--contenders", "bf16"])  # nothing is left to do
    assert path.read_text() == kept
    bench_gpt.main([*words, "--contenders", "bf16", "--seeds", "1", "--budget", "-1"])
    assert path.read_text() == kept
    for more in (["--steps", "3"], ["--backend", "eager"]):
        refused(bench_gpt.main, "has other settings", SystemExit, [*words, *more])
    with pytest.raises(SystemExit):
        bench_gpt.main([*words, "--contenders", "nobody"])
    assert bench_gpt.arguments(["--quick", "--seed", "3"]).seeds == [3]  # short for --seeds
    refused(lambda: bench_gpt.main([*words, "--rounds", "3"]), "", SystemExit)
    assert not {"rounds", "seed"} & json.loads(kept).keys()


def test_a_contender_that_is_left_out_stays_in_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it is the last one, and after a later call for another contender."""
    monkeypatch.setattr(bench_gpt, "sources", lambda *_: SHORT_TEXT)
    path = tmp_path / "report.json"
    words = ["--quick", "--backend", "eager", "--cache", str(tmp_path), "--contenders"]
    done = {"seconds": 1.0, "validation_loss": 2.0}
    for name, row in (("FP8 rowwise", {"left out": "no torchao"}), ("bf16", done)):
        monkeypatch.setattr(bench_gpt, "one_run", lambda *_, row=row: row)
        report = report_of(bench_gpt, path, *words, name)
        assert report["left out"] == {"FP8 rowwise": "no torchao"}
    assert set(report["runs"]) == {"bf16/0"}


def test_validation_text_is_apart(tmp_path: Path) -> None:
    text = bench_gpt.tokens(bench_gpt.QUICK, 20000, tmp_path)
    assert len(text.training) >= 20000 and len(text.validation) > 0
    files = list(bench_gpt.sources(90000))
    texts = [words for _, words in files]
    assert len(set(texts)) == len(texts) >= 2
    assert sum(len(words) for i, words in enumerate(texts) if i % bench_gpt.EVERY) >= 90000
    assert text.training.max() < bench_gpt.QUICK.vocabulary
    chars = sum(map(len, texts))
    assert sum(text.packages.values()) == chars and set(text.packages) == {n for n, _ in files}
    again = bench_gpt.tokens(bench_gpt.QUICK, 20000, tmp_path)
    assert torch.equal(again.training, text.training) and again.packages == text.packages
    # A text in the cache may lack what a later call asks for.
    many = dataclasses.replace(bench_gpt.QUICK, validation_batches=8, batch=10**6)
    for words in ((many, 20000, tmp_path), (bench_gpt.QUICK, 20000, tmp_path, 0)):
        refused(bench_gpt.tokens, "the installed packages give", ValueError, *words)


def test_a_report_keeps_its_text_and_points(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.json"
    words = ["--quick", "--backend", "eager", "--json", str(path), "--contenders", "bf16"]
    words += ["--tokens-per-parameter", "20", "--points", "4", "--validation-batches", "2"]
    report = report_of(bench_gpt, path, *words, "--cache", str(tmp_path))
    assert [step for step, _ in report["runs"]["bf16/0"]["curve"]] == [0, 1, 2, 3, 4]
    assert report["settings"]["points"] == 4
    assert report["settings"]["size"]["validation_batches"] == 2
    assert report["text"]["training"] == report["tokens"] and report["text"]["packages"]
    monkeypatch.setattr(bench_gpt, "sources", lambda *_: SHORT_TEXT)
    with pytest.raises(SystemExit, match="has runs on another text"):
        bench_gpt.main([*words, "--cache", str(tmp_path / "other"), "--seeds", "1"])
    with pytest.raises(SystemExit):
        bench_gpt.main([*words, "--graph"])
    assert "--graph needs --device cuda" in capsys.readouterr().err


def test_losses_of_parts_train_like_that_of_the_whole(
    seeded: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two batches of four train like one of eight; one batch of four differs."""
    size, clip, norms = bench_gpt.QUICK, torch.nn.utils.clip_grad_norm_, []
    monkeypatch.setattr(
        torch.nn.utils, "clip_grad_norm_", lambda *words: norms.append(float(clip(*words)))
    )
    x, y = torch.randint(size.vocabulary, (2, 8, size.context))
    weights = []
    for rows in ([slice(4), slice(4, 8)], [slice(8)], [slice(4)]):
        torch.manual_seed(0)
        model = bench_gpt.model_of(size, bench_gpt.CONTENDERS[0], "cpu", None)
        optimizer = bench_gpt.optimizer_of(list(model.parameters()), graph=False)
        bench_gpt.set_rate(optimizer, 1e-3)
        losses = (bench_gpt.cross_entropy(model(x[part]), y[part]) for part in rows)
        assert len(bench_gpt.update(optimizer, losses, len(rows))) == len(rows)
        weights.append(model.blocks[0].fc1.weight.detach().clone())
    assert norms[0] == pytest.approx(norms[1], rel=1e-4) != pytest.approx(norms[2], rel=1e-3)
    assert torch.allclose(weights[0], weights[1], atol=2e-4)
    assert not torch.allclose(weights[2], weights[1], atol=5e-4)


@pytest.mark.parametrize("contender", ["bf16", "default int8-forward"])
def test_a_cut_run_goes_on_to_the_same_bits(
    contender: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut before its third step, it ends with the losses of a run that was never cut."""
    (chosen,) = (one for one in bench_gpt.CONTENDERS if one.name == contender)
    how = bench_gpt.How(4, bench_gpt.QUICK, "cpu", "eager", tmp_path, 4, 4, False, True, 0.0)
    whole = bench_gpt.train(chosen, 0, how, how.text())
    rate, steps = bench_gpt.rate, []

    def cut_once(step: int, *more: Any) -> float:
        steps.append(step)
        if steps == [0, 1, 2]:
            raise KeyboardInterrupt
        return rate(step, *more)

    monkeypatch.setattr(bench_gpt, "rate", cut_once)
    with pytest.raises(KeyboardInterrupt):
        bench_gpt.train(chosen, 0, how, how.text())
    assert len(list(tmp_path.glob("state-*.pt"))) == 1
    run = bench_gpt.train(chosen, 0, how, how.text())
    assert steps == [0, 1, 2, 2, 3] and not list(tmp_path.glob("state-*.pt"))
    assert len(run["training"]) == 4 and run["training"] == whole["training"]
    assert run["curve"] == whole["curve"] and len(run["curve"]) == 5


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_graph_trains_as_its_steps_do(tmp_path: Path) -> None:
    """Replays from step 3 on have their own batches, learning rates and updates of weights."""
    reports = []
    for more in ([], ["--graph"]):
        path = tmp_path / f"report{len(more)}.json"
        bench_gpt.main(["--quick", "--device", "cuda", "--backend", "aot_eager", "--points", "4",
                        "--json", str(path), "--cache", str(tmp_path), "--contenders", "bf16",
                        "default", *more])  # fmt: skip
        reports.append(json.loads(path.read_text())["runs"])
    for name, run in reports[0].items():
        assert reports[1][name]["training"] == pytest.approx(run["training"], rel=1e-2), name
        curves = zip(run["curve"], reports[1][name]["curve"], strict=True)
        assert all(loss == pytest.approx(other, rel=1e-2) for (_, loss), (_, other) in curves)
