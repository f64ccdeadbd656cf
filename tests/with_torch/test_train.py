"""`examples/train.py`: a few steps of every recipe, its options and its table."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("hotcore.torch")
for needed in ("matplotlib", "sklearn", "tqdm"):
    pytest.importorskip(needed)

ROOT = Path(__file__).resolve().parents[2]
TRAIN = ROOT / "examples" / "train.py"
RECIPES = ("fp32", "default", "fast", "paper", "accurate")
FLOAT = 4
pytestmark = pytest.mark.long


def train(*options: object) -> subprocess.CompletedProcess[str]:
    """Run the example like a user, on one thread."""
    command = [sys.executable, str(TRAIN), "--threads", "1", *map(str, options)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def results_of(folder: Path) -> dict[tuple[str, str], dict]:
    """Return the measurements by task and recipe."""
    content = json.loads((folder / "train.json").read_text())
    return {(r["task"], r["recipe"]): r for r in content["results"]}


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Run two steps of both tasks with every recipe. Returns the output and the folder."""
    folder = tmp_path_factory.mktemp("train")
    done = train("--steps", 2, "--recipe", ",".join(RECIPES), "--out", folder / "new")
    assert done.returncode == 0, done.stderr
    return done.stdout, folder / "new"


def test_every_recipe_trains_both_tasks(short: tuple[str, Path]) -> None:
    results = results_of(short[1])
    assert set(results) == {(task, recipe) for task in ("vit", "gpt") for recipe in RECIPES}
    for result in results.values():
        assert math.isfinite(result["val_loss"])
        assert 0 <= result["val_accuracy"] <= 1
        assert result["step_ms"] > 0
        assert [step for step, _ in result["curve"]] == [0, 1, 2]
        assert all(math.isfinite(loss) for _, loss in result["curve"])


def test_runs_start_alike_and_part(short: tuple[str, Path]) -> None:
    results = results_of(short[1])
    for task in ("vit", "gpt"):
        runs = [results[task, recipe] for recipe in RECIPES]
        # Weights are equal, and HOT's forward pass has the plain one's bits.
        assert len({run["curve"][0][1] for run in runs}) == 1
        # Gradients differ, so no recipe is silently plain or another recipe.
        assert len({run["val_loss"] for run in runs}) == len(RECIPES)


def test_saved_bytes(short: tuple[str, Path]) -> None:
    results = results_of(short[1])
    # The inputs of qkv, proj, fc1 (width) and fc2 (4 width), in 2 blocks.
    values = {"vit": 32 * 65 * (3 * 48 + 4 * 48) * 2, "gpt": 16 * 128 * (3 * 64 + 4 * 64) * 2}
    # default has half a byte and a 16-bit scale per 64 values; others have scales of channels.
    most = {"default": 0.54, "fast": 0.51, "paper": 0.505, "accurate": 1.01}
    for task, count in values.items():
        plain = results[task, "fp32"]
        assert plain["linear_saved_bytes"] == count * FLOAT
        for recipe, limit in most.items():
            run = results[task, recipe]
            assert 0 < run["linear_saved_bytes"] <= limit * count
            assert run["total_saved_bytes"] < plain["total_saved_bytes"]


@pytest.mark.usefixtures("seeded_torch")
def test_same_seed_same_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(TRAIN.parent))
    import train as script

    losses = []
    options = ["--task", "gpt", "--recipe", "fast", "--steps", "1", "--threads", "1"]
    for seed, forward in ((7, "plain"), (7, "plain,int8"), (8, "plain")):
        words = ["--out", str(tmp_path), "--seed", str(seed), "--forward", forward]
        assert script.main([*options, *words]) == 0
        results, out = results_of(tmp_path), capsys.readouterr().out
        losses.append(results["gpt", "fast"]["val_loss"])
        if "int8" in forward:  # the 8-bit forward is a second run
            other = results["gpt", "fast+int8"]["val_loss"]
            assert other != losses[-1] and other == pytest.approx(losses[-1], rel=0.01)
            assert "fast+int8" in out
    assert losses[0] == losses[1] != losses[2]


def test_default_rows_and_the_mark_of_a_busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TRAIN.parent))
    import train as script
    from train_lib import report, training

    assert script.parse_options([]).recipe == ["fp32", "default", "default+int8", "paper"]
    busy = training.Result("vit", "fp32", 0, 3, step_ms=5, busy=True)
    assert "5.0 ms*" in report.table([busy]) and "* Other processes" in report.table([busy])
    busy.busy = False
    assert "*" not in report.table([busy]) and "0.03 are seed noise" in report.table([busy])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--recipe", "fp32,fats"], "unknown name 'fats'; choose from fp32, default, fast"),
        (["--forward", "fp8"], "unknown name 'fp8'; choose from plain, int8"),
        (["--task", "resnet"], "argument --task: invalid choice: 'resnet'"),
        (["--steps", "0"], "argument --steps: must be at least 1, not 0"),
        (["--seed", "-1"], "argument --seed: must be between 0 and"),
        (
            ["--device", "tpu"],
            "argument --device: expected cpu, cuda, cuda:0, cuda:1, ..., got 'tpu'",
        ),
        (["--out", str(TRAIN)], "expected a folder, got the file"),
    ],
)
def test_bad_option(options: list[str], message: str) -> None:
    done = train(*options)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
