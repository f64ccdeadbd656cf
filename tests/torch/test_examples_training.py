"""examples/finetune_vit.py and examples/pretrain_gpt.py at toy size, and their data."""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
for needed in ("sklearn", "tqdm"):
    pytest.importorskip(needed)
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "benchmarks")]
import finetune_vit  # noqa: E402
import pretrain_gpt  # noqa: E402
from models import mend_torchvision  # noqa: E402
from train_lib.images import Cifar, FaintDigits, Folder  # noqa: E402


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two steps of pre-training, and one thread: more only wait for each other at this size."""
    monkeypatch.setattr(finetune_vit, "PRETRAINING_STEPS", 2)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def runs_of(path: Path) -> dict[str, dict]:
    return {run["run"]: run for run in json.loads(path.read_text())["runs"]}


def test_finetune_on_digits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "runs.json"
    options = ["--recipe", "default", "fast", "--compress-saved", "8", "--calibrate", "1"]
    assert finetune_vit.main([*options, "--steps", "3", "--batch", "16", "--json", str(path)]) == 0
    runs = runs_of(path)
    assert list(runs) == ["fp32", "default + saved 8", "fast + saved 8"]
    assert len({run["val_loss"] for run in runs.values()}) == 3
    losses = [run["val_loss"] for run in runs.values()]
    assert max(losses) - min(losses) < 0.05
    for name in ("default + saved 8", "fast + saved 8"):
        assert runs[name]["kept_mib"] < 0.35 * runs["fp32"]["kept_mib"]
    printed = capsys.readouterr().out
    assert "gw_scale=" in printed  # the plan
    assert "8 of 10 layers run HOT" in printed
    assert f"{runs['fp32']['val_loss']:.3f}" in printed


def test_finetune_without_extras(tmp_path: Path) -> None:
    path = tmp_path / "runs.json"
    assert finetune_vit.main(["--steps", "2", "--no-baseline", "--bf16", "--json", str(path)]) == 0
    assert list(runs_of(path)) == ["default"]


def test_same_seed_same_run(tmp_path: Path) -> None:
    losses = []
    for seed in ("1", "1", "2"):
        path = tmp_path / "runs.json"
        options = ["--steps", "2", "--no-baseline", "--seed", seed, "--json", str(path)]
        assert pretrain_gpt.main(options) == 0
        losses.append(runs_of(path)["default"]["val_loss"])
    assert losses[0] == losses[1] != losses[2]


def test_pretrain_on_the_standard_library(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "runs.json"
    assert pretrain_gpt.main(["--steps", "3", "--warmup", "1", "--json", str(path)]) == 0
    runs = runs_of(path)
    assert list(runs) == ["fp32", "default"]
    assert runs["default"]["val_loss"] == pytest.approx(runs["fp32"]["val_loss"], abs=0.02)
    assert runs["default"]["val_loss"] != runs["fp32"]["val_loss"]
    assert "modules" in capsys.readouterr().out


def test_pretrain_on_a_text(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(range(256)) * 40)
    path = tmp_path / "runs.json"
    options = ["--text", str(text), "--context", "64", "--batch", "4", "--steps", "2"]
    assert pretrain_gpt.main([*options, "--json", str(path)]) == 0
    data = pretrain_gpt.Text(text.read_bytes(), 64, "text")
    inputs, targets = data.batch(4, torch.Generator().manual_seed(0))
    assert inputs.shape == targets.shape == (4, 64)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert torch.equal((inputs + 1) % 256, targets)


def images_in(folder: Path, classes: int, count: int) -> None:
    image = pytest.importorskip("PIL.Image")
    for label in range(classes):
        (folder / f"class{label}").mkdir(parents=True)
        for i in range(count):
            pixels = np.full((20, 30, 3), 60 * label, np.uint8)
            image.fromarray(pixels).save(folder / f"class{label}" / f"{i}.png")


def test_folder(tmp_path: Path) -> None:
    images_in(tmp_path / "a" / "train", 3, 4)
    images_in(tmp_path / "a" / "val", 3, 2)
    data = Folder(tmp_path / "a", 16)
    images, labels = data.validation
    assert images.shape == (6, 3, 16, 16) and data.classes == 3
    assert torch.allclose(images[:, 0, 0, 0], labels * 60 / 127.5 - 1)
    images, labels = data.batch(5, torch.Generator().manual_seed(0))
    assert images.shape == (5, 3, 16, 16)
    assert torch.allclose(images[:, 0, 0, 0], labels * 60 / 127.5 - 1)
    images_in(tmp_path / "b", 2, 10)
    assert len(Folder(tmp_path / "b", 16).validation[1]) == 2  # every tenth
    (tmp_path / "c" / "only").mkdir(parents=True)
    with pytest.raises(ValueError, match="1 classes with 0 images"):
        Folder(tmp_path / "c", 16)


@pytest.mark.parametrize("kind", [10, 100])
def test_cifar(kind: int, tmp_path: Path) -> None:
    folder = tmp_path / Cifar.FOLDERS[kind]
    folder.mkdir()
    names = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"] if kind == 10 else None
    for i, name in enumerate(names or ["train", "test"]):
        data = np.full((7, 3072), i, np.uint8)
        labels = [i] * 7
        content = {b"data": data, (b"labels" if kind == 10 else b"fine_labels"): labels}
        (folder / name).write_bytes(pickle.dumps(content))
    data = Cifar(kind, tmp_path, 48)
    images, labels = data.validation
    last = 5 if kind == 10 else 1
    assert images.shape == (7, 3, 48, 48) and set(labels.tolist()) == {last}
    images, labels = data.batch(9, torch.Generator().manual_seed(0))
    assert torch.allclose(images[:, 0, 0, 0], labels / 127.5 - 1)
    with pytest.raises(FileNotFoundError, match="nothing is downloaded"):
        Cifar(kind, tmp_path / "elsewhere", 32)


def test_faint_digits() -> None:
    data = FaintDigits()
    images, labels = data.batch(64, torch.Generator().manual_seed(0))
    clear, same = data.before.batch(64, torch.Generator().manual_seed(0))
    assert torch.equal(labels, same)
    assert float((images - 0.3 - 0.5 * clear).std()) == pytest.approx(0.1, rel=0.05)


def test_a_model_of_timm_with_weights(tmp_path: Path) -> None:
    mend_torchvision()
    timm = pytest.importorskip("timm")
    images_in(tmp_path / "data", 3, 12)
    name, weights = "vit_tiny_patch16_224", tmp_path / "vit.pth"
    model = timm.create_model(name, img_size=32)
    torch.save(model.state_dict(), weights)
    options = ["--data", "folder", "--root", str(tmp_path / "data"), "--pixels", "32"]
    options += ["--model", name, "--weights", str(weights)]
    parsed = finetune_vit.options_of(options)
    data = finetune_vit.data_of(parsed)
    loaded = finetune_vit.model_of(parsed, data)
    block = "blocks.3.mlp.fc1.weight"
    assert torch.equal(loaded.state_dict()[block], model.state_dict()[block])
    assert loaded.head.out_features == 3
    path = tmp_path / "runs.json"
    rest = ["--steps", "1", "--batch", "4", "--no-baseline", "--json", str(path)]
    assert finetune_vit.main([*options, *rest]) == 0
    assert list(runs_of(path)) == ["default"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--data", "cifar10"], "--data cifar10 needs --root and --model"),
        (["--weights", "x"], "--weights needs --model"),
        (["--recipe", "fats"], "invalid choice: 'fats'"),
        (["--steps", "0"], "'0' is no whole number above 0"),
        (["--compress-saved", "2"], "invalid choice"),
    ],
)
def test_bad_options(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        finetune_vit.main(options)
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_errors_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert pretrain_gpt.main(["--text", str(tmp_path / "absent.txt")]) == 1
    assert "absent.txt" in capsys.readouterr().err
    (tmp_path / "short.txt").write_text("short")
    assert pretrain_gpt.main(["--text", str(tmp_path / "short.txt")]) == 1
    assert "5 bytes; expected at least" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        pretrain_gpt.main(["--width", "65"])
    assert "--width 65 is no multiple of --heads 4" in capsys.readouterr().err
    assert pretrain_gpt.main(["--device", "cuda:99", "--steps", "1"]) == 1
    assert "error: --device cuda:99: torch sees" in capsys.readouterr().err
