"""Where noise shows: bench_gpt.py's ways of training and its noise of gradients, and the tables."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("tokenizers")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import bench_gpt  # noqa: E402  (after the path)
from evidence import doc_tables, evidence_tables, rivals  # noqa: E402  (after the path)

pytestmark = pytest.mark.usefixtures("seeded_torch")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("text")


def trained(folder: Path, cache: Path, *words: str) -> dict[str, Any]:
    """The report's runs at toy size."""
    path = folder / f"{len(list(folder.iterdir()))}.json"
    base = ["--quick", "--backend", "eager", "--threads", "1", "--cache", str(cache)]
    bench_gpt.main([*base, "--json", str(path), *words])
    runs: dict[str, Any] = json.loads(path.read_text())["runs"]
    return runs


# ---- noise of the gradient ----


def test_noise_of_known_errors() -> None:
    """Each part comes back: the batch's noise, the draw's, the batch's rounding, the bias."""
    count, values = 32, 20000

    def of_norm(norm: float, *shape: int) -> Any:
        return norm * torch.randn(*shape, values) / values**0.5

    exact = of_norm(2.0) + of_norm(3.0, count)
    rounding = of_norm(0.3, count, 1)
    drawn = exact[:, None] + of_norm(0.2) + rounding + of_norm(0.4, count, 2)
    found = bench_gpt.batch_noise(exact, 100)
    assert found["gradient"] == pytest.approx(2.0, rel=0.03)
    assert found["batch"] == pytest.approx(3.0, rel=0.03)
    assert found["noise_scale"] == pytest.approx(100 * 9 / 4, rel=0.06)
    of = bench_gpt.noise_of(exact, drawn)
    assert of["bias"] == pytest.approx(0.2, rel=0.05)
    assert of["chance"] == pytest.approx(0.4, rel=0.03)
    assert of["noise"] == pytest.approx(0.5, rel=0.03)
    assert of["error"] == pytest.approx(math.hypot(0.5, 0.2), rel=0.03)
    assert list(of["accumulated"]) == [1, 2, 4, 8, 16, 32]
    for several, error in of["accumulated"].items():
        assert error == pytest.approx(math.hypot(0.5 / several**0.5, 0.2), rel=0.05)
    assert bench_gpt.noise_of(exact, exact[:, None].expand(-1, 2, -1))["error"] == 0


@pytest.mark.long
def test_noise_is_measured_beside_a_run(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run stays the same; the methods' errors are as their recipes are."""
    monkeypatch.setattr(bench_gpt, "NOISE_BATCHES", 8)
    words = ["--contenders", "default"]
    plain = trained(tmp_path, cache, *words)["default/0"]
    measured = ["--noise", "bf16", "default", "fast", "--noise-at", "0", "0.5", "1"]
    run = trained(tmp_path, cache, *measured, *words)["default/0"]
    assert run["curve"] == plain["curve"] and run["training"] == plain["training"]
    assert list(run["noise"]) == ["0", "2", "4"] and "noise" not in plain
    for found in run["noise"].values():
        assert found["tokens"] == 128 and found["batches"] == 8
        assert found["gradient"] > 0 and found["batch"] > 0
        bf16, default, fast = found["contenders"].values()
        assert bf16["chance"] == 0 < bf16["error"] < 0.3 * default["error"]
        assert default["error"] < 0.5 * fast["error"] < found["batch"]
        assert fast["chance"] == pytest.approx(fast["noise"], rel=0.1)
        assert fast["accumulated"]["8"] < 0.5 * fast["accumulated"]["1"]


# ---- ways to train ----


@pytest.mark.long
def test_a_diverged_run_is_a_row(tmp_path: Path, cache: Path) -> None:
    runs = trained(tmp_path, cache, "--rates", "1", "1e7", "--contenders", "bf16",
                   "default int8-forward", "fast", "FP8 tensorwise")  # fmt: skip
    diverged = {key for key, run in runs.items() if "diverged" in run}
    assert {"bf16 @ rate 1/0", "default int8-forward @ rate 1e+07/0"} <= set(runs)
    assert diverged == {key for key in runs if "rate 1e+07" in key}
    for key in diverged:
        assert runs[key]["diverged"] == f"loss is nan at step {len(runs[key]['curve'])}"
        assert "validation_loss" not in runs[key]
    assert "NaN" not in (tmp_path / "0.json").read_text()


def test_a_loss_that_rises_has_diverged(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_gpt, "DIVERGED", -1.0)
    run = trained(tmp_path, cache, "--contenders", "bf16")["bf16/0"]
    last = run["curve"][-1][1]
    assert run["diverged"] == f"loss is {last:.3f} after {min(v for _, v in run['curve']):.3f}"


def test_accumulated_batches_are_one(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two batches of four train as one of eight does, and a smaller one is another batch."""
    toy, clip, norms = bench_gpt.QUICK, torch.nn.utils.clip_grad_norm_, []
    monkeypatch.setattr(
        torch.nn.utils, "clip_grad_norm_", lambda *words: norms.append(float(clip(*words)))
    )
    twice = trained(tmp_path, cache, "--tokens-per-step", "256", "--contenders", "bf16")["bf16/0"]
    settings = json.loads((tmp_path / "0.json").read_text())["settings"]
    assert settings["accumulate"] == 2 and settings["size"]["batch"] == toy.batch == 4
    monkeypatch.setattr(bench_gpt, "QUICK", dataclasses.replace(toy, batch=8))
    once = trained(tmp_path, cache, "--contenders", "bf16")["bf16/0"]
    assert once["training"] == pytest.approx(twice["training"], rel=2e-3)
    assert len(norms) == 8 and norms[4:] == pytest.approx(norms[:4], rel=0.02)
    smaller = trained(tmp_path, cache, "--tokens-per-step", "128", "--contenders", "bf16")["bf16/0"]
    settings = json.loads((tmp_path / "2.json").read_text())["settings"]
    assert settings["size"]["batch"] == 4 and "accumulate" not in settings
    assert smaller["training"][0] != pytest.approx(once["training"][0], rel=1e-5)


def torchao_optimizer(*words: Any) -> Any:
    try:
        return bench_gpt.optimizer_of(*words)
    except rivals.TorchaoMissing as missing:
        pytest.skip(str(missing))  # third_party/torchao is fetched for GPU runs alone


def test_optimizers_step_alike() -> None:
    """By torch and by torchao: the same step, of states in 8 bits nearly."""
    first = [torch.randn(64, 64), torch.randn(64)]
    grads = [torch.randn_like(value) for value in first]
    found = {}
    for kind, dtype in bench_gpt.OPTIMIZERS.items():
        weights = [torch.nn.Parameter(value.to(dtype, copy=True)) for value in first]
        optimizer = torchao_optimizer(weights, kind, False)
        for _ in range(3):
            for weight, grad in zip(weights, grads, strict=True):
                weight.grad = grad.to(dtype)
            for group in optimizer.param_groups:
                if isinstance(group["lr"], torch.Tensor):
                    group["lr"].fill_(0.01)
                else:
                    group["lr"] = 0.01
            optimizer.step()
        assert all(weight.dtype == dtype for weight in weights)
        found[kind] = [weight.detach().float() for weight in weights]
    large, small = found["8-bit"]
    torch.testing.assert_close(small, found["adamw"][1], rtol=1e-5, atol=1e-6)  # is not quantised
    assert 0 < (large - found["adamw"][0]).abs().max() < 0.02
    assert (found["8-bit-bf16"][0] - first[0]).abs().max() < 0.07


@pytest.mark.long
def test_optimizers_train(tmp_path: Path, cache: Path) -> None:
    torchao_optimizer([torch.zeros(1, requires_grad=True)], "8-bit", False)
    kinds = list(bench_gpt.OPTIMIZERS)
    runs = trained(tmp_path, cache, "--optimizers", *kinds, "--contenders", "bf16",
                   "default int8-forward")  # fmt: skip
    losses = {key: run["validation_loss"] for key, run in runs.items()}
    assert set(losses) == {f"{name} @ {kind}/0" for name in ("bf16", "default int8-forward")
                           for kind in kinds}  # fmt: skip
    assert len(set(losses.values())) == len(losses)
    first = [run["curve"][0][1] for run in runs.values()]
    assert max(losses.values()) < min(first) and max(losses.values()) < 1.01 * min(losses.values())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--tokens-per-step", "33"], "--tokens-per-step must be a multiple of 32, above 128"),
        (["--tokens-per-step", "160"], "--tokens-per-step must be a multiple of 32, above 128"),
        (["--rates", "1", "0"], "--rates must be above 0"),
        (["--noise-at", "1.5"], "--noise-at: shares of a run"),
        (["--noise", "nobody"], "--noise: 'nobody' fits none"),
    ],
)
def test_refused(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_gpt.main(["--quick", *words])
    assert said in capsys.readouterr().err


# ---- tables ----


def written(folder: Path, runs: dict[str, Any], **settings: Any) -> None:
    size = {"batch": 1, "context": 100}
    report = {"runs": runs, "parameters": 1000, "date": "2026-01-02T03",
              "settings": {"steps": 50, "size": size, **settings}}  # fmt: skip
    (folder / "cuda-gpt-x.json").write_text(json.dumps(report))


def test_table_of_ways(tmp_path: Path) -> None:
    """Gaps to bf16 of the same way and seed; what diverged is counted."""
    losses: dict[str, dict[str, list[float | None]]] = {
        "rate 1": {"bf16": [3.0, 4.0], "default": [3.01, 4.03], "fast": [3.5, None]},
        "rate 8": {"bf16": [None, 5.0], "default": [6.0, 5.5], "fast": [None, None]},
    }
    written(tmp_path, {
        f"{name} @ {way}/{seed}": {"diverged": "x"} if loss is None else {"validation_loss": loss}
        for way, of in losses.items() for name, each in of.items() for seed, loss in enumerate(each)
    }, accumulate=3)  # fmt: skip
    words = "planned ways cuda-gpt-x.json"
    lines = doc_tables.table(words, tmp_path).splitlines()
    of = "300 tokens a step, 50 steps, rate"
    assert lines[0] == f"| validation loss less bf16's | {of} 1 | {of} 8 |"
    assert lines[2:5] == [
        "| bf16's loss | 3.5000 ± 0.7071 | 5.0000, 1 diverged |",
        "| default | +0.0200 ± 0.0141 | +0.5000, 1 where bf16 diverged |",
        "| fast | +0.5000, 1 diverged | diverged |",
    ]
    assert doc_tables.table("planned ways other.json", tmp_path) == "*Planned, not run.*\n"
    with pytest.raises(doc_tables.Unknown, match="none of"):
        doc_tables.table("planned no-such-kind other.json", tmp_path)
    pytest.importorskip("matplotlib")
    from evidence import plot_evidence

    report = evidence_tables.report_of(tmp_path, "cuda-gpt-x.json")
    plot_evidence.plot_ways(report, tmp_path / "rates.svg")
    assert "300 tokens a step" in (tmp_path / "rates.svg").read_text()


def test_table_of_noise(tmp_path: Path) -> None:
    of = {"error": 0.5, "chance": 0.3, "noise": 0.4, "bias": 0.1}
    noise = {
        "tokens": 100, "batches": 4, "gradient": 0.5, "batch": 2.0, "noise_scale": 1600.0,
        "contenders": {"fast": {**of, "accumulated": {"1": 0.5, "2": 0.3, "4": 0.25}}},
    }  # fmt: skip
    written(tmp_path, {"bf16/0": {"validation_loss": 3.0, "noise": {"25": noise}}})
    lines = doc_tables.table("noise cuda-gpt-x.json", tmp_path).splitlines()
    assert lines[0].startswith("| 2.50 tokens a parameter | noise at 100 tokens, of the batch's |")
    assert lines[0].endswith("| error at 100 tokens, of the gradient | at 400 |")
    assert lines[2] == "| the batch's own | 1 |  |  | 4.000 | 2.000 |"
    assert lines[3] == "| fast | 0.200 | 0.150 | 0.200 | 1.000 | 0.500 |"
    assert "alike at 1,600 tokens" in lines[5]
