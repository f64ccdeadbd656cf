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
from evidence import rivals  # noqa: E402  (after the path)

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
