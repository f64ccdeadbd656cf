"""The evidence's data, its runs side by side; bench_latency, bench_memory, evidence at toy size."""

from __future__ import annotations

import json
import os
import pickle
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
Image = pytest.importorskip("PIL.Image")
for needed in ("sklearn", "tqdm"):
    pytest.importorskip(needed)
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import bench_head  # noqa: E402
import bench_latency  # noqa: E402
import bench_memory  # noqa: E402
import bench_training  # noqa: E402
from evidence import rivals, side_by_side, small_tasks  # noqa: E402
from evidence.rivals.conversion import method_of  # noqa: E402
from layers import PAPER, PAPER_LATENCY  # noqa: E402
from models import mend_torchvision  # noqa: E402
from train_lib import data, images, training  # noqa: E402

pytestmark = pytest.mark.usefixtures("seeded_torch")


def generator(rng: np.random.Generator) -> torch.Generator:
    return torch.Generator().manual_seed(int(rng.integers(1 << 31)))


# ---- data ----


def test_photographs_share_no_pixel(rng: np.random.Generator) -> None:
    """Validation tiles are of columns that no training tile reaches."""
    found = images.Photographs()
    assert found.classes >= 48 and len(found.validation[0]) == 6 * found.classes
    assert found.validation[0].shape[1:] == (3, 32, 32)
    for cell in found._train:
        assert cell.shape[1] >= 96 and cell.shape[2] >= 64
    china = images._read(images._bundled("sklearn", "datasets/images", ["china.jpg"])[0])
    cell = found._cells(china)[0]
    assert torch.equal(found._train[0], cell[:, :, :-32])
    assert torch.equal(images.normalised(cell[:, :32, -32:]), found.validation[0][0])
    tiles, labels = found.batch(20, generator(rng))
    assert tiles.shape == (20, 3, 32, 32) and 0 <= labels.min() <= labels.max() < found.classes


@pytest.mark.parametrize("kind", ["cifar10", "cifar100"])
def test_cifar(kind: str, tmp_path: Path, rng: np.random.Generator) -> None:
    """A made folder of the binary version: images and classes come back as they were written."""
    train, test, labels, classes = images.CIFAR[kind]
    written: dict[str, np.ndarray] = {}
    for name in [*train, test]:
        rows = rng.integers(0, 256, (7, labels + 3072), dtype=np.uint8)
        rows[:, :labels] = rng.integers(0, classes, (7, labels))
        rows.tofile(tmp_path / name)
        written[name] = rows
    found = images.load_images(f"{kind}:{tmp_path}")
    held = written[test]
    assert torch.equal(found.validation[1], torch.from_numpy(held[:, labels - 1].astype(np.int64)))
    exact = images.normalised(torch.from_numpy(held[:, labels:].reshape(-1, 3, 32, 32)))
    assert torch.equal(found.validation[0], exact)
    assert len(found._train[0]) == 7 * len(train)
    first = found._train[0][0].numpy()
    assert np.array_equal(first.ravel(), written[train[0]][0, labels:])
    assert found.batch(5, generator(rng))[0].shape == (5, 3, 32, 32)
    halves = [found.half(index) for index in (0, 1)]
    assert sum(len(half._train[0]) for half in halves) == len(found._train[0])


def test_cifar_refuses_what_it_is_not(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no data_batch_1\.bin.*not the Python pickles"):
        images.cifar("cifar10", tmp_path)
    train, test, _, _ = images.CIFAR["cifar100"]
    pickle.dump({"data": 1}, (tmp_path / train[0]).open("wb"))  # is not unpickled: not of records
    (tmp_path / test).write_bytes(bytes(3074))
    with pytest.raises(ValueError, match="are no records of 3074"):
        images.cifar("cifar100", tmp_path)
    (tmp_path / train[0]).write_bytes(bytes([0, 100]) + bytes(3072))
    with pytest.raises(ValueError, match="class 100; expected less than 100"):
        images.cifar("cifar100", tmp_path)
    for where in ("tile", "cifar10", "folder:"):
        with pytest.raises(ValueError, match="expected tiles, cifar10:FOLDER"):
            images.load_images(where)


def test_image_folder(tmp_path: Path, rng: np.random.Generator) -> None:
    """The middle square of each image, by class; a tenth or the folder ``val`` for validation."""
    colours = {"blue": (0, 0, 200), "red": (200, 0, 0)}
    for name, colour in colours.items():
        (tmp_path / "plain" / name).mkdir(parents=True)
        for index in range(11):
            image = Image.new("RGB", (80, 40), (255, 255, 255))
            image.paste(colour, (20, 0, 60, 40))  # the middle square alone has it
            image.save(tmp_path / "plain" / name / f"{index:02d}.png")
    (tmp_path / "plain" / "red" / "notes.txt").write_text("no image")
    found = images.load_images(f"folder:{tmp_path / 'plain'}")
    assert found.classes == 2 and len(found._train[0]) == 18
    assert found.validation[1].tolist() == [0, 0, 1, 1]
    for image, label in zip(*found.validation, strict=True):
        wanted = torch.tensor(list(colours.values())[label]).view(3, 1, 1).expand(3, 32, 32)
        torch.testing.assert_close(image, images.normalised(wanted), atol=0.01, rtol=0)
    for part in ("train", "val"):
        (tmp_path / "split").mkdir(exist_ok=True)
        (tmp_path / "split" / part).symlink_to(tmp_path / "plain")
    assert len(images.image_folder(tmp_path / "split").validation[0]) == 22
    with pytest.raises(ValueError, match="0 classes"):
        images.image_folder(tmp_path / "plain" / "red")
    (tmp_path / "plain" / "red" / "00.png").write_text("no image")
    with pytest.raises(ValueError, match=r"00\.png"):
        images.image_folder(tmp_path / "plain")


def test_masked_text(rng: np.random.Generator) -> None:
    """15 % are wanted; of those 80 % are gaps, and what is not wanted is as it was."""
    text = data.MaskedText()
    inputs, targets = text.batch(64, generator(rng))
    plain, _ = data.StdlibText.batch(text, 64, generator(rng))
    assert inputs.shape == targets.shape == plain.shape
    wanted = targets >= 0
    assert wanted.float().mean() == pytest.approx(0.15, abs=0.03)
    gaps = (inputs == text.VOCAB - 1)[wanted].float().mean()
    assert gaps == pytest.approx(0.8, abs=0.08)
    assert (inputs[~wanted] < text.VOCAB - 1).all() and (targets[~wanted] == data.NO_CLASS).all()
    exact = torch.zeros(*targets.shape, text.VOCAB).scatter_(2, targets.clamp_min(0)[..., None], 50)

    class Knows(torch.nn.Module):
        def forward(self, _: Any) -> Any:
            return exact

    loss, accuracy = training.evaluate(Knows(), (inputs, targets), torch.device("cpu"))
    assert accuracy == 1 and loss == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("kind", [data.Digits, data.StdlibText, images.Photographs])
def test_halves_are_apart(kind: Any, rng: np.random.Generator) -> None:
    whole = kind()
    first, second = whole.half(0), whole.half(1)
    assert first.description != second.description
    assert all(map(torch.equal, first.validation, whole.validation))
    parts = [
        getattr(half, "_images", getattr(half, "_text", getattr(half, "_train", None)))
        for half in (first, second)
    ]
    if kind is images.Photographs:
        joined = [torch.cat(pair, 1) for pair in zip(*parts, strict=True)]
        assert all(map(torch.equal, joined, whole._train))
    else:
        every = whole._text if kind is data.StdlibText else whole._images
        assert len(parts[0]) + len(parts[1]) == len(every)
    assert len(first.batch(3, generator(rng))[0]) == 3


# ---- methods ----


def test_without_abc_is_the_recipe(rng: np.random.Generator) -> None:
    """x kept whole, gradients of the recipe's noise and no more."""
    method = method_of("without_abc", recipe="accurate")
    gy, w, x = torch.randn(2, 32, 48), torch.randn(48, 64), torch.randn(2, 32, 64)
    exact = {"gx": gy @ w, "gw": gy.flatten(0, 1).t() @ x.flatten(0, 1)}
    for name, found in (("gx", method.g_x(gy, w)), ("gw", method.g_w(gy, x))):
        error = (found - exact[name]).norm() / exact[name].norm()
        assert 1e-4 < error < 0.05
    model = torch.nn.Sequential(torch.nn.Linear(64, 64))
    done = rivals.convert(model, "without_abc", lambda *_: True, recipe="paper")
    assert done.names == ("0",)


def test_every_contender_is_put() -> None:
    """Adapters, LQS and schedules reach the layers that they name."""
    task = small_tasks.load_task("vit")
    found = {c.name: c for c in [*small_tasks.ablations("vit"), *small_tasks.finetuned("vit")]}

    def put(name: str) -> tuple[Any, Any]:
        torch.manual_seed(0)  # LQS chooses by the weights' own gradients
        model = task.build()
        return model, small_tasks.put(found[name], model, task, 16, 0)

    def converted(model: Any) -> set[str]:
        return {n for n, m in model.named_modules() if type(m).__name__ == "HotLinear"}

    model, _ = put("LoRA, paper on the frozen")
    assert len(converted(model)) == 8
    assert all(name.endswith("base_layer") for name in converted(model))
    model, _ = put("LoRA, paper on the adapters")
    assert len(converted(model)) == 16 and all("lora_" in name for name in converted(model))
    model, _ = put("LoRA, default on both")
    assert len(converted(model)) == 24
    model, step = put("paper, INT8 first")
    bits = []
    for _ in range(3):
        bits.append(model.blocks[0].qkv.config.gx_bits)
        step()
    assert bits == [8, 8, 4]  # 25 of 200 of 16 steps: two
    scales = {}
    for name in ("paper with LQS", "paper with LQS of g_x, too"):
        model, _ = put(name)
        assert len(converted(model)) == 8
        scales[name] = [
            (m.config.gx_scale, m.config.gw_scale)
            for m in model.modules()
            if type(m).__name__ == "HotLinear"
        ]
    alone, both = scales.values()
    assert {gx for gx, _ in alone} == {"tensor"} and "token" in {gx for gx, _ in both}
    assert [gw for _, gw in alone] == [gw for _, gw in both]
    for contender in small_tasks.published("vit"):
        model, step = put(contender.name)
        layers = [m for m in model.modules() if type(m).__name__ == "HotLinear"]
        before = [layer.config for layer in layers]
        assert {c.gx_bits for c in before} == {8} and {c.token_grid for c in before} == {(8, 8)}
        rounding = {(c.gx_rounding, c.gw_rounding) for c in before}
        assert rounding == {("pseudo_stochastic",) * 2}
        assert ("token" in {c.gx_scale for c in before}) == ("gx_scale" in contender.lqs)
        for _ in range(2):
            step()
        assert [layer.config for layer in layers] == [replace(c, gx_bits=4) for c in before]
    model, _ = put("paper, rank 1")
    assert model.blocks[0].qkv.config.rank == 1


def test_tables_have_their_rows() -> None:
    for task in small_tasks.TASKS:
        for table in small_tasks.TABLES:
            names = [c.name for c in small_tasks.table_of(task, table)]
            assert names[0] == "fp32" and len(set(names)) == len(names)
    ranks = [c.settings.get("rank") for c in small_tasks.ablations("gpt")]
    assert {16, 4, 2, 1} <= set(ranks)
    with pytest.raises(ValueError, match="none of rivals"):
        small_tasks.table_of("vit", "all")
    assert not any("tiles" in c.name for c in small_tasks.ablations("gpt"))


def test_massive_token_is_the_first_alone() -> None:
    torch.manual_seed(0)
    model = small_tasks.load_task("gpt-massive").build()
    tokens = torch.randint(0, model.embed.num_embeddings, (8, 128))
    taken: dict[str, list[torch.Tensor]] = {"before": [], "after": []}
    for when, inputs in taken.items():
        hook = model.blocks[0].fc2.register_forward_pre_hook(
            lambda _, args, inputs=inputs: inputs.append(args[0])
        )
        with torch.no_grad():
            model(tokens)
        hook.remove()
        if when == "before":
            small_tasks.graft_massive_token(model)
    before, after = taken["before"][0], taken["after"][0]
    torch.testing.assert_close(after[:, 0, :4], torch.full((8, 4), 1000.0), rtol=0.01, atol=0)
    after[:, 0, :4] = before[:, 0, :4]
    assert torch.equal(after, before)


# ---- side by side ----


def square(value: int) -> int:
    return value * value


def slow(value: int) -> int:
    time.sleep(0.2)
    return value


def test_work_side_by_side() -> None:
    work = [(str(i), square, (i,)) for i in range(5)]
    for jobs in (1, 2):
        got: dict[str, int] = {}
        assert side_by_side.run_all(work, got.__setitem__, jobs=jobs) == []
        assert got == {str(i): i * i for i in range(5)}
    late = side_by_side.run_all(
        [(str(i), slow, (i,)) for i in range(6)], lambda *_: None, budget_s=0.5
    )
    assert late == ["2", "3", "4", "5"]


def visible(_: int) -> str:
    time.sleep(0.2)
    return os.environ.get("CUDA_VISIBLE_DEVICES", "")


@pytest.mark.parametrize(("listed", "each"), [("", {"0", "1"}), ("5,3,1", {"5", "3"})])
def test_work_on_several_devices(
    listed: str, each: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process sees one device; two pieces at a time are on different ones."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    got: dict[str, str] = {}
    work = [(str(i), visible, (i,)) for i in range(2)]
    side_by_side.run_all(work, got.__setitem__, jobs=2, devices=2)
    assert set(got.values()) == each
    assert os.environ["CUDA_VISIBLE_DEVICES"] == listed


def test_fine_tuning_goes_on_from_one_start(tmp_path: Path) -> None:
    """Pre-training happens once a seed, and every method begins with its weights."""
    path = tmp_path / "finetune.json"
    words = ["--table", "finetune", "--tasks", "vit", "--seeds", "0", "--steps", "3",
             "--json", str(path), "--cache", str(tmp_path / "kept")]  # fmt: skip
    bench_training.main([*words, "--methods", "fp32;default"])
    (kept,) = (tmp_path / "kept").iterdir()
    before = kept.stat().st_mtime_ns
    bench_training.main([*words, "--methods", "fp32;default;LoRA", "--plot", str(tmp_path)])
    assert kept.stat().st_mtime_ns == before
    report = json.loads(path.read_text())
    starts = {run["curve"][0][1] for run in report["runs"].values()}
    assert len(report["runs"]) == 3 and len(starts) == 1
    assert all(len(run["date"]) == 10 for run in report["runs"].values())
    scratch = tmp_path / "scratch.json"
    bench_training.main(["--tasks", "vit", "--seeds", "0", "--steps", "3", "--methods", "fp32",
                         "--json", str(scratch)])  # fmt: skip
    other = json.loads(scratch.read_text())["runs"]["vit/fp32/0"]["curve"]
    assert other[0][1] not in starts  # three steps of pre-training have changed something
    assert (tmp_path / "finetune-vit.svg").stat().st_size > 3000
    with pytest.raises(SystemExit):  # other steps: not to be mixed
        bench_training.main([*words[:-4], "--steps", "4", "--json", str(path)])


# ---- the paper's tables ----


def test_the_papers_ratios() -> None:
    """As it prints them: within its own rounding of the times that it gives."""
    assert len(PAPER) == 16
    for shape, row in PAPER_LATENCY.values():
        assert PAPER[shape] == row["faster"]
        assert row["FP"] / row["HOT"] == pytest.approx(row["faster"], abs=0.1)


def test_latency(tmp_path: Path) -> None:
    path = tmp_path / "latency.json"
    bench_latency.main(["--quick", "--rounds", "2", "--threads", "1", "--json", str(path),
                        "--parts", "graph"])  # fmt: skip
    report = json.loads(path.read_text())
    assert set(report["graph"]) == set(bench_latency.TOY)
    for table in report["graph"].values():
        assert {"fp32", "LBP-WHT", "hotcore paper"} <= set(table["rows"])
        assert all(row["median_ms"] > 0 for row in table["rows"].values())
    assert report["means"]["graph"]["fp32"]["geomean"] == pytest.approx(1)
    bench_latency.main(["--quick", "--rounds", "2", "--threads", "1", "--json", str(path),
                        "--budget", "-1"])  # fmt: skip
    assert len(json.loads(path.read_text())["left out"]) == 2 + 2


def test_lbp_whts_calls_are_right() -> None:
    """At full rank LBP-WHT's timed products are the exact ones, class token or none."""
    for tokens in (65, 64, 49):
        method = bench_latency.lbp_wht(tokens)
        method.rank = 16
        gy, w, x = torch.randn(2, tokens, 48), torch.randn(48, 32), torch.randn(2, tokens, 32)
        torch.testing.assert_close(method.g_x(gy, w), gy @ w, atol=1e-3, rtol=1e-3)
        gw = method.g_w(gy, method.keep(x)[0])
        exact = gy.flatten(0, 1).t() @ x.flatten(0, 1)
        if tokens != 49:  # 7 x 7 is filled up to 8 x 8 by reflection, so this sum has more terms
            torch.testing.assert_close(gw, exact, atol=1e-2, rtol=1e-3)
    with pytest.raises(ValueError, match="no square"):
        bench_latency.lbp_wht(63)


def test_head(tmp_path: Path) -> None:
    path = tmp_path / "head.json"
    bench_head.main(["--quick", "--rounds", "2", "--threads", "1", "--json", str(path),
                     "--contenders", "torch", "hotcore*"])  # fmt: skip
    report = json.loads(path.read_text())
    assert set(report["heads"]["toy"]) == {"torch", "hotcore", "hotcore, Liger's chunks"} | {
        f"hotcore {name}" for name in bench_head.RECIPES
    }
    for rows in report["errors"].values():
        assert all(row["gx"] < 0.02 and row["gw"] < 0.02 for row in rows.values())


def test_memory(tmp_path: Path) -> None:
    mend_torchvision()
    pytest.importorskip("timm")
    path = tmp_path / "memory.json"
    bench_memory.main(["--quick", "--batches", "4", "--threads", "1", "--json", str(path),
                       "--contenders", "fp32", "HOT paper", "LUQ", "*recomputed"])  # fmt: skip
    rows = {name: found["4"] for name, found in json.loads(path.read_text())["rows"].items()}
    kept = {name: row["kept_gib"] for name, row in rows.items()}
    assert kept["HOT paper"] < 0.75 * kept["fp32"] and kept["LUQ"] == pytest.approx(kept["fp32"])
    assert kept["fp32, blocks recomputed"] < 0.5 * kept["fp32"]
    assert rows["HOT paper"]["formula_gib"] < rows["fp32"]["formula_gib"]


def test_the_formula_is_the_papers_figure() -> None:
    """Every bar of the figure, within what can be read off."""
    mend_torchvision()
    pytest.importorskip("timm")
    for name in ("fp32", "HOT paper"):
        contender = next(c for c in bench_memory.CONTENDERS if c.name == name)
        found = bench_memory.formula(contender, quick=False)
        for batch, bar in bench_memory.PAPER_GB[name].items():
            got = (found["fixed_bytes"] + batch * found["image_bytes"]) / 2**30
            assert got == pytest.approx(bar, abs=0.3)


# ---- tables, claims and figures ----


def made_reports(folder: Path) -> None:
    """Small reports of every kind, of known figures."""
    runs = {
        f"{task}/{method}/{seed}": {"val_loss": loss + seed + gap, "val_accuracy": 0.5,
                                    "linear_saved_bytes": 8, "cpu_seconds": 1.0,
                                    "curve": [[0, 3.0], [1, loss]]}
        for task, loss in (("vit", 1.0), ("gpt", 2.0))
        for method, gap in (("fp32", 0.0), ("default", 0.25), ("paper", 0.5))
        for seed in (0, 1)
    }  # fmt: skip
    runs["gpt/paper/1"] = {"diverged": "loss is nan at step 1", "cpu_seconds": 1.0}
    report = {"settings": {"table": "rivals"}, "left out": {"lora": "x", "luq": "CPU only"},
              "runs": runs}  # fmt: skip
    (folder / "training.json").write_text(json.dumps(report))
    report["settings"] = {"table": "ablations"}
    (folder / "ablations.json").write_text(json.dumps(report))
    paper = {"FP": 182.0, "LBP-WHT": 110.0, "HOT": 70.0, "faster": 2.6}
    rows = {"fp32": {"median_ms": 0.2}, "hotcore paper": {"median_ms": 0.1},
            "LBP-WHT": {"median_ms": 0.4}, "bf16": "OutOfMemoryError: no"}  # fmt: skip
    tables = {"qkv": {"shape": [197, 2304, 768], "paper_us": paper, "rows": rows}}
    latency = {"device": "GPU", "graph": tables, "means": {"graph": bench_latency.means(tables)},
               "left out": ["batch qkv"]}  # fmt: skip
    (folder / "cuda-latency.json").write_text(json.dumps(latency))
    memory = {"device": "GPU", "model": "ViT", "rows": {
        "fp32": {"64": {"peak_gib": 8.0, "kept_gib": 6.0, "formula_gib": 9.74, "paper_gb": 9.8}},
        "LUQ": {"64": {"peak_gib": 11.0, "kept_gib": 5.0}},
        "HOT paper": {"64": {"left out": "OutOfMemoryError: no"}},
    }}  # fmt: skip
    bench_memory.compare(memory["rows"])
    (folder / "cuda-memory.json").write_text(json.dumps(memory))
    gaps = {"bf16": (0.0, 0.0, 0.0), "default": (0.02, 0.03, 0.5), "FP8 tensorwise": (0.04, 0.06),
            "fast": (-0.1,)}  # fmt: skip
    gpt = {
        f"{name}/{seed}": {"validation_loss": 3.0 + seed + gap,
                           "training": [9.0] * 90 + [3.0 + seed + 2 * gap] * 10,
                           "curve": [[0, 5.0], [200, 4.0 + seed], [400, 3.0 + seed + gap]]}
        for name, values in gaps.items()
        for seed, gap in enumerate(values)
    }  # fmt: skip
    size = {"steps": 400, "size": {"batch": 64, "context": 512}}
    (folder / "cuda-gpt-10M.json").write_text(
        json.dumps({"date": "2026-01-02T03", "device": "NVIDIA H200", "runs": gpt,
                    "settings": size, "parameters": 6553600})
    )  # fmt: skip


def made_ranks(path: Path, *tasks: str) -> None:
    """An ablations report with the ranks alone: 54 % and 1 % a row right, 2 % more with seed 1."""
    names = {"fp32": 0} | {
        recipe if rank == 8 else f"{recipe}, rank {rank}": rank
        for recipe in ("paper", "paper, g_x in INT8")
        for rank in (16, 8, 4, 2, 1)
    }
    runs = {
        f"{task}/{name}/{seed}": {"val_loss": 1.0, "val_accuracy": 0.54 + 0.01 * rank + 0.02 * seed}
        for task in tasks
        for name, rank in names.items()
        for seed in (0, 1)
    }
    path.write_text(json.dumps({"runs": runs}))


def made_gradients(path: Path) -> None:
    """bench_gradients.py's report: a layer, two steps, a method of both tasks and one of one."""

    def row(error: float) -> dict[str, Any]:
        gw = {"error": error, "cosine": 1.0, "noise": 0.0, "bias": error}
        return {"gx": gw | {"error": 0.1}, "gw": gw, "cost": 0.25, "bytes": 2.0}

    points = {
        f"{task}/0/{step}": {"layers": {"fc": {"batch": 1.0 + step, "methods": {
            **({"tiles": row((0.3, 0.4)[step])} if task == "vit" else {}), "good": row(0.2),
        }}}}
        for task in ("vit", "gpt") for step in (0, 1)
    }  # fmt: skip
    path.write_text(json.dumps({"settings": {"tasks": ["vit", "gpt"]}, "points": points}))


def test_tables_of_the_evidence(tmp_path: Path) -> None:
    from evidence import claims, doc_tables

    made_reports(tmp_path)

    def claim(beginning: str) -> str:
        """The only row that begins so."""
        every = (*claims.SOURCES, *claims.OURS)
        (found,) = (one for one in every if one.claim.startswith(beginning))
        return claims.row_of(found, tmp_path)

    def table(words: str) -> str:
        return doc_tables.table(words, tmp_path)

    found = table("trainings training.json")
    assert "| ViT, digits, 2 seeds | GPT, text, 2 seeds |" in found
    assert "| fp32's loss | 1.500 ± 0.707 | 2.500 ± 0.707 |" in found
    assert "| default | +0.250 ± 0.000 | +0.250 ± 0.000 |" in found
    assert "| paper | +0.500 ± 0.000 | +0.500, 1 diverged |" in found
    assert "|\n\n*training.json: `luq` left out: CPU only*\n" in found  # no row of the table
    assert found.index("| default") < found.index("| paper")
    found = table("rows ablations.json paper; nobody")
    assert "| nobody |  |  |" in found and "default" not in found
    found = table("latency")
    assert "| qkv (197, 2304, 768) | 1.7 | 2.6 | 200.0 | 0.50 |  | 2.00 |" in found
    assert "No time left for: batch qkv" in found
    found = table("memory")
    assert "| fp32 | 8.0 (6.0) |" in found and "| LUQ | 7.0 (5.0) |" in found
    assert "| fp32: the formula (the paper's bar) | 9.7 (9.8) |" in found
    assert "| HOT paper | out of memory |" in found
    found = table("scaling")
    assert "10M, 2.00 tokens a parameter" in found
    # FP8 has two seeds: the third of default is not compared, a lone run is and has no interval.
    assert "| default | +0.0250 [-0.0385, +0.0885] (2) |" in found
    assert "| fast | -0.1000 (1) |" in found and "| 3.5000 ± 0.7071 |" in found
    assert "*Measured: cuda-gpt-10M 2026-01-02 (H200).*" in found
    found = table("pooled")
    last = "+0.1833 [-0.4980, +0.8647] (3)"
    trained = "+0.0500 [-0.0771, +0.1771] (2)"  # of the same two seeds
    assert f"| +0.0250 | [-0.0385, +0.0885] | not shown | {last} | {trained} |" in found
    assert "| default less FP8 tensorwise | 10M | 2 | -0.0250 |" in found
    assert "fast less" not in found
    words = table("pooled-words")
    assert "default +0.025 [-0.039, +0.089] (2 pairs: not shown)" in words and "fast" not in words
    found = table("to-loss")
    assert "| default | 0.99 (0.98 to 0.99) |" in found and "| fast | >1 |" in found
    assert "this share of its steps: >1 (10M, 2.00" in table("to-loss-words fast")
    assert "default: +0.250 ± 0.000 (ViT), +0.250 ± 0.000 (GPT)" in claim("`default` trains")
    found = claim("latency table")
    assert "geometric mean of 16 layers: HOT 2.00×, LBP-WHT 0.50×" in found
    assert "LBP-WHT here is unfused" in found
    assert "not measured: no such GPU" in claim("times on an RTX 3090")
    found = claim("the same by size")
    assert "default less bf16 +0.0250 [-0.0385, +0.0885] (2 pairs: not shown)" in found
    assert "2 pairs: not shown) | 2026-01-02 | [by size]" in found
    made_ranks(tmp_path / "ablations.json", "vit", "gpt")
    made_ranks(tmp_path / claims.LARGE_RANKS, "images-efficientformer")
    ranks = "71.0, 63.0, 59.0, 57.0, 56.0 (fp32 55.0; ± 1.4)"
    wanted = [
        f"{title}, `{recipe}`: {ranks}"
        for title in ("ViT", "GPT", "EfficientFormer-L1, photographs")
        for recipe in ("paper", "paper, g_x in INT8")
    ]
    found = claim("Table 2: 8 of 16 rows")
    assert f"| accuracy, {'; '.join(wanted)}; no CIFAR here" in found
    with pytest.raises(doc_tables.Unknown, match=r"gradients\.json is not there"):
        table("gradient-quality")
    made_gradients(tmp_path / "gradients.json")
    lines = table("gradient-quality").splitlines()
    # Root mean square of 0.3 and 0.4 over two steps; the better method first; GPT lacks "tiles".
    assert lines[2] == (
        "| good | 0.100 | 0.200 | 0.000 | 0.200 | 0.100 | 0.200 | 0.000 | 0.200 | 0.25 | 2.00 |"
    )
    assert lines[3] == "| tiles | 0.100 | 0.354 | 0.000 | 0.354 |  |  |  |  | 0.25 | 2.00 |"
    assert lines[4] == "| other batches (median) |  | 1.50 |  |  |  | 1.50 |  |  |  |  |"


def test_a_gpu_of_a_user_s_is_a_row(tmp_path: Path) -> None:
    from evidence import doc_tables

    check = json.loads((doc_tables.RESULTS / "gpu-check.json").read_text())
    (tmp_path / "gpu-check.json").write_text(json.dumps(check))
    del check["ratios"]["ViT-B, sum, times faster than"]["fast"]
    check["ratios"]["vit_b, a step, of compiled bf16"] = {"bf16 reduce-overhead": "out of memory"}
    (tmp_path / "device-rtx-4090.json").write_text(json.dumps({**check, "device": "RTX 4090"}))
    *_, first, second = doc_tables.devices(tmp_path)
    assert first.startswith("| NVIDIA H") and second.startswith("| RTX 4090 |")
    assert first.count("×") == 5 and second.count("×") == 3


def test_what_pays_is_of_both_processors() -> None:
    """A range over the layers of one machine alone would leave out the slower rows."""
    from evidence import doc_tables

    ratios = []
    for name in ("cpu-backward.json", "cpu-backward-amx.json"):
        (group,) = json.loads((doc_tables.RESULTS / name).read_text())["layers"].values()
        for layer in list(group["layers"].values())[:-1]:
            rows = layer["rows"]
            ratios.append(rows["torch bf16"]["median_ms"] / rows["hotcore default"]["median_ms"])
    rows = doc_tables.table("pays", doc_tables.RESULTS).splitlines()
    (first,) = (i for i, row in enumerate(rows) if "CPUs: backward of ViT-B's layers" in row)
    wanted = f"| the same | bf16 |  | {min(ratios):.1f} to {max(ratios):.1f}× |"
    assert rows[first + 1].startswith(wanted)
    assert "cpu-backward-amx 2026-" in rows[-1]


def test_what_to_switch_on(tmp_path: Path) -> None:
    """By the rules of hot.advise; the first report that has a model counts."""
    from evidence import doc_tables

    def row(ms: float, gib: float) -> dict[str, Any]:
        step = {"median_ms": ms, "q1_ms": ms, "q3_ms": ms}
        return {"step": step, "peak_gib": gib, "of reference": {"step": ms / 10, "peak": gib / 10}}

    rows = {
        **{"bf16 compiled": row(10, 10), "bf16 compiled, budget 0.5": row(12, 5)},
        **{"default compiled": row(8, 9), "default compiled, kept": row(14, 4)},
        **{"default compiled, saved 8": row(5, 1), "default compiled, saved 8/4": row(1, 1)},
        **{"fast compiled": row(5, 5), "FP8 tensorwise compiled": row(1, 1), "failed": {}},
    }
    other = {"bf16 compiled": row(10, 10)}
    for name, found in (("a", {"m": rows}), ("b", {"m": other, "n": other})):
        steps = {model: {"title": model.upper(), "rows": rows} for model, rows in found.items()}
        report = {"date": "2026-11-24T01:02:03+00:00", "steps": steps}
        (tmp_path / f"{name}.json").write_text(json.dumps(report))
    assert doc_tables.table("switch a.json b.json", tmp_path).splitlines()[2:] == [
        "| M | time | default compiled | 0.80 | 0.90 | bf16 compiled | 1.00 | 1.00 |",
        "|  | memory | default compiled, kept | 1.40 | 0.40 | bf16 compiled, budget 0.5 | 1.20 |"
        " 0.50 |",
        "|  | both | default compiled | 0.80 | 0.90 | bf16 compiled | 1.00 | 1.00 |",
        "| N | time | bf16 compiled | 1.00 | 1.00 | bf16 compiled | 1.00 | 1.00 |",
        "|  | memory | bf16 compiled | 1.00 | 1.00 | bf16 compiled | 1.00 | 1.00 |",
        "|  | both | bf16 compiled | 1.00 | 1.00 | bf16 compiled | 1.00 | 1.00 |",
        *("", "*Measured: a 2026-11-24, b 2026-11-24.*"),
    ]


def test_claims_point_to_what_is_there() -> None:
    """Anchors of the page, scripts and their options."""
    from evidence import claims

    page = (ROOT / "docs/results.md").read_text() + (ROOT / "docs/dev/rivals.md").read_text()
    heads = {
        "".join(c for c in line.lstrip("# ").lower() if c.isalnum() or c in " -").replace(" ", "-")
        for line in (page + (ROOT / "docs/paper.md").read_text()).splitlines()
        if line.startswith("#")
    }
    for claim in (*claims.SOURCES, *claims.OURS):
        for target in claim.where.split("](")[1:]:
            path, _, anchor = target.split(")")[0].partition("#")
            assert not path or (ROOT / "docs" / path).is_file(), claim
            assert anchor in heads, (claim.claim, anchor)
        if claim.command:
            script = claim.command.split()[0]
            places = (ROOT / "benchmarks", ROOT / "benchmarks/evidence")
            assert any((place / script).is_file() for place in places), claim


def test_every_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    from evidence import plot_evidence

    made_reports(tmp_path)
    out = tmp_path / "img"
    plot_evidence.main(["--results", str(tmp_path), "--out", str(out)])
    names = {path.name for path in out.iterdir()}
    assert names == {"training-vit.svg", "training-gpt.svg", "ablations-vit.svg",
                     "ablations-gpt.svg", "latency.svg", "memory.svg"}  # fmt: skip
    said = capsys.readouterr().out
    assert "finetune.json is not there" in said
