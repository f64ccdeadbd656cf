"""bench_gradients.py and bench_training.py: their figures, breaks, and each at toy size."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
for needed in ("sklearn", "matplotlib"):
    pytest.importorskip(needed)

import bench_training  # noqa: E402
from evidence import bench_gradients, small_tasks  # noqa: E402
from evidence.small_tasks import Contender  # noqa: E402
from torch import Tensor  # noqa: E402

pytestmark = pytest.mark.usefixtures("seeded_torch")


def capture() -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(4, 32, 48), torch.randn(64, 48), torch.randn(4, 32, 64)


def test_quality_of_known_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A constant shift is bias, randomness is noise, and both add up to the error."""
    x, w, gy = capture()
    exact = {"gx": gy @ w, "gw": gy.flatten(0, 1).t() @ x.flatten(0, 1)}
    scale = {kind: value.norm() / value.numel() ** 0.5 for kind, value in exact.items()}

    def drawn(*_: Any) -> dict[str, Tensor]:
        return {k: 0.9 * v + 0.3 * scale[k] * torch.randn_like(v) for k, v in exact.items()}

    monkeypatch.setattr(bench_gradients, "draw", drawn)
    figures = bench_gradients.quality(Contender("x", "bf16"), (x, w, gy), 40)
    for kind in ("gx", "gw"):
        row = figures[kind]
        assert row["bias"] == pytest.approx(0.1, abs=0.01)
        assert row["noise"] == pytest.approx(0.3, rel=0.03)
        assert row["error"] == pytest.approx(0.1**0.5, rel=0.03)
        assert row["cosine"] == pytest.approx(0.9 / (0.81 + 0.09) ** 0.5, abs=0.005)
    fixed = {kind: 1.1 * value for kind, value in exact.items()}
    monkeypatch.setattr(bench_gradients, "draw", lambda *_: fixed)
    row = bench_gradients.quality(Contender("x", "bf16"), (x, w, gy), 40)
    assert row["draws"] == 2 and row["gw"]["noise"] < 1e-6
    assert row["gw"]["bias"] == pytest.approx(0.1) == row["gw"]["error"]


def test_a_method_that_was_left_out_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full GPU in one run must not leave a method out of all later ones."""
    path = tmp_path / "report.json"
    words = ["--tasks", "vit", "--methods", "fp32;luq", "--json", str(path), "--seeds"]
    rows = [{"val_loss": 1.0, "cpu_seconds": 0.0, "seconds": 0.0}, {"left out": "no memory"}]

    def one_run(task: Any, contender: Contender, *_: Any) -> dict[str, Any]:
        return rows[contender.name == "luq"]

    monkeypatch.setattr(bench_training, "one_run", one_run)
    bench_training.main([*words, "0"])
    first = json.loads(path.read_text())
    assert list(first["runs"]) == ["vit/fp32/0"] and first["left out"]["luq"] == "no memory"
    rows[1] = {**rows[0], "val_loss": 1.5}
    bench_training.main([*words, "0,1"])
    report = json.loads(path.read_text())
    assert len(report["runs"]) == 4 and set(report["left out"]) == {"lora"}


def test_weights_to_fine_tune_are_those_of_the_settings(tmp_path: Path) -> None:
    """A GPU's run does not start from weights that a CPU, or other products, have trained."""
    plain = {"device": "cpu", "tf32": False, "steps": None, "images": "tiles", "cache": tmp_path}
    changes: list[dict[str, Any]] = [{}, {"device": "cuda"}, {"tf32": True}, {"steps": 3}]
    settings = [argparse.Namespace(**plain | change) for change in changes]
    paths = [bench_training.pretrained_path(one, "vit", 0) for one in settings]
    assert len({*paths, bench_training.pretrained_path(settings[0], "vit", 1)}) == 5


def test_cost() -> None:
    """Every method's bit operations over full precision's, at a shape dominated by products."""
    shape = (1 << 20, 1 << 14, 1 << 14)
    contenders = (c for task in small_tasks.README for c in small_tasks.contenders(task))
    costs = {c.name: bench_gradients.cost(c, shape, 1 << 13) for c in contenders}
    eighths, fourths = 64 / 1024, 16 / 1024
    expected = {
        "bf16": 1 / 4, "torchao_fp8": eighths, "torchao_int8": eighths, "naive_int4": fourths,
        "luq": fourths, "lbp_wht_flat": 1 / 2, "lbp_wht": 1 / 2, "actnn_2bit": 1.0,
        "authors_hot": (16 + 32 * 36 / 128) / 2 / 1024, "default": eighths,
        "fast": (64 + 32) / 2 / 1024, "int4": (16 + 64) / 2 / 1024,
        "paper": (16 + 32) / 2 / 1024, "accurate": eighths, "paper, tiles": (16 + 32) / 2 / 1024,
    }  # fmt: skip
    assert costs == pytest.approx(expected, abs=1.5e-3)


def test_batch_noise_of_a_known_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of a constant and noise give their ratio."""
    task = small_tasks.load_task("vit")
    model = task.build()
    layers = bench_gradients.layers_of(model)
    assert len(layers) == 8 and all(name.startswith("blocks.") for name in layers)
    fixed = {name: torch.randn_like(layer.weight) for name, layer in layers.items()}

    def loss(model: Any, batch: Any) -> Tensor:
        parts = (
            (layer.weight * (fixed[name] + 2 * torch.randn_like(layer.weight))).sum()
            for name, layer in bench_gradients.layers_of(model).items()
        )
        return torch.stack(list(parts)).sum()

    monkeypatch.setattr(bench_gradients.training, "loss_of", loss)
    ratios = bench_gradients.batch_noise(model, task, 0, 20)
    assert list(ratios) == list(layers)
    assert all(value == pytest.approx(2.0, rel=0.1) for value in ratios.values())


def test_training_goes_on_after_a_break(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "training.json"
    words = ["--tasks", "vit", "--methods", "fp32;lbp_wht", "--seeds", "0,1", "--steps", "2",
             "--json", str(path)]  # fmt: skip
    bench_training.main([*words, "--budget", "0"])
    first = json.loads(path.read_text())
    assert len(first["runs"]) + len(first["not run"]) == 4 and first["not run"]
    bench_training.main([*words, "--plot", str(tmp_path)])
    report = json.loads(path.read_text())
    assert len(report["runs"]) == 4 and not report["not run"]
    runs = report["runs"]
    for seed in (0, 1):  # equal first weights and data, so equal first losses
        starts = {tuple(runs[f"vit/{name}/{seed}"]["curve"][0]) for name in ("fp32", "lbp_wht")}
        assert len(starts) == 1
    a, b = (runs[f"vit/{name}/0"]["val_loss"] + runs[f"vit/{name}/1"]["val_loss"]
            for name in ("lbp_wht", "fp32"))  # fmt: skip
    gap = (a - b) / 2
    printed = capsys.readouterr().out
    assert f"| lbp_wht | {gap:+.3f} ±" in printed and "| ViT, digits, 2 seeds |" in printed
    kept = [runs[f"vit/{name}/0"]["linear_saved_bytes"] for name in ("fp32", "lbp_wht")]
    assert kept[0] > kept[1] > kept[0] / 2  # the class tokens whole
    assert (tmp_path / "training-vit.svg").stat().st_size > 5000
