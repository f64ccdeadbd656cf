"""Data, parallel runs, tables and figures of the evidence; scripts at toy size."""

import gzip
import itertools
import json
import math
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import refused, report_of

torch = pytest.importorskip("torch")
Image = pytest.importorskip("PIL.Image")
for needed in ("sklearn", "tqdm"):
    pytest.importorskip(needed)
ROOT = Path(__file__).resolve().parents[2]

import bench_head  # noqa: E402
import bench_latency  # noqa: E402
import bench_memory  # noqa: E402
import bench_training  # noqa: E402
from evidence import evidence_tables, side_by_side, small_tasks  # noqa: E402
from models import mend_torchvision  # noqa: E402
from train_lib import images  # noqa: E402

pytestmark = pytest.mark.usefixtures("seeded_torch")


def generator(rng: np.random.Generator) -> torch.Generator:
    return torch.Generator().manual_seed(int(rng.integers(1 << 31)))


def test_photographs_share_no_pixel(rng: np.random.Generator) -> None:
    """No training tile reaches the columns of validation tiles."""
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


def fake_images(kind: str, folder: Path, rng: np.random.Generator) -> None:
    """Write a data set of ten classes in its usual form: 40 images to train, 10 to validate."""

    def pixels(*shape: int) -> np.ndarray:
        return rng.integers(256, size=shape, dtype=np.uint8)

    folder.mkdir()
    if kind in images.CIFAR:
        train, test, labels, _ = images.CIFAR[kind]
        for name, count in [*((name, 40 // len(train)) for name in train), (test, 10)]:
            rows = np.concatenate([pixels(count, labels) % 10, pixels(count, 3072)], axis=1)
            rows[:, labels - 1] = np.arange(count) % 10
            (folder / name).write_bytes(rows.tobytes())
    elif kind == "mnist":
        for part, count in (("train", 40), ("t10k", 10)):
            head, size = b"\0\0\x08", np.array([count, 28, 28], ">u4").tobytes()
            data = gzip.compress(head + b"\3" + size + pixels(count, 28, 28).tobytes())
            (folder / f"{part}-images-idx3-ubyte.gz").write_bytes(data)
            data = head + b"\1" + size[:4] + bytes(i % 10 for i in range(count))
            (folder / f"{part}-labels-idx1-ubyte").write_bytes(data)
    else:
        parts = {"folder": ("train", "test"), "imagenet": ("train", "val")}[kind]
        for part, count in zip(parts, (4, 1), strict=True):
            for label, n in itertools.product(range(10), range(count)):
                path = folder / part / f"n{label:08d}" / f"{n}.JPEG"
                path.parent.mkdir(parents=True, exist_ok=True)
                side = 32 if kind == "folder" else 240 + 10 * label
                Image.fromarray(pixels(side, 300 if kind == "imagenet" else 32, 3)).save(path)


@pytest.mark.parametrize("kind", images.READERS)
def test_data_sets_in_usual_forms(kind: str, tmp_path: Path, rng: np.random.Generator) -> None:
    fake_images(kind, tmp_path / "data", rng)
    data = images.load_images(f"{kind}:{tmp_path}/data")
    side = 224 if kind == "imagenet" else 32
    assert data.classes == 10 and data.pixels == side and data.count == 40
    batch, labels = data.batch(6, generator(rng))
    assert batch.shape == (6, 3, side, side) and labels.shape == (6,) and batch.isfinite().all()
    halves = (data.half(1).batch(6, generator(np.random.default_rng(3)))[0] for _ in range(2))
    assert torch.equal(*halves)
    held = [(one, *rest) for one, *rest in zip(*(b.split(4) for b in data.validation), strict=True)]
    assert torch.cat([label for _, label in held]).tolist() == list(range(10))
    assert torch.cat([part for part, _ in held]).shape == (10, 3, side, side)


def test_a_shifted_image_is_mirrored_at_its_edge(rng: np.random.Generator) -> None:
    one = torch.randint(256, (1, 3, 32, 32), dtype=torch.uint8)
    data = images.Images((one, torch.zeros(1, dtype=torch.long)), (one, torch.zeros(1)), "one")
    padded = torch.nn.functional.pad(one.float(), (4, 4, 4, 4), mode="reflect")[0]
    parts = [padded[:, y : y + 32, x : x + 32] for y in range(9) for x in range(9)]
    every = torch.stack([f for part in parts for f in (part, part.flip(2))]).flatten(1)
    shown, _ = data.batch(30, generator(rng))
    centred = (t - t.mean(-1, keepdim=True) for t in (shown.flatten(1)[:, None], every[None]))
    cosines = torch.nn.functional.cosine_similarity(*centred, dim=-1)
    assert cosines.max(1).values.min() > 0.9999  # contrast and brightness differ


SUPPLEMENT = ("fp32", "bf16", "naive_int4", "luq", "lbp_wht", "default", "paper as published",
              "paper as published, LQS of g_x, too")  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "task", "methods"),
    [("folder", "images-vit", SUPPLEMENT),
     ("cifar10", "images-resnet18", ("fp32", "lbp_wht")),
     ("imagenet", "images-resnet18", ("fp32", "default"))],
)  # fmt: skip
def test_the_supplements_table(
    kind: str, task: str, methods: tuple[str, ...], tmp_path: Path, rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Two steps on a small fake data set; the table has every method's accuracy."""
    mend_torchvision()
    pytest.importorskip("timm")
    monkeypatch.setitem(small_tasks.VITS, "images-vit", (64, 1, 4, 2e-3, 600))
    monkeypatch.setattr(images.Photos, "pixels", 96)
    fake_images(kind, tmp_path / "data", rng)
    words = [] if methods == SUPPLEMENT else ["--methods", ";".join(methods)]
    words += ["--table", "supplement", "--tasks", task, "--images", f"{kind}:{tmp_path}/data"]
    words += ["--batch", "2", "--epochs", "0.1", "--seeds", "0"]
    report = report_of(bench_training, tmp_path / "table.json", *words)
    assert list(report["runs"]) == [f"{task}/{name}/0" for name in methods]
    assert set(report["left out"]) == {"lora"}
    assert all(run["curve"][-1][0] == 2 for run in report["runs"].values())
    shown = evidence_tables.accuracies(tmp_path, "table.json")
    names = [line.split(" | ")[0].strip("| ") for line in shown]
    assert names[2 : 2 + len(methods)] == list(methods)


def test_methods_without_figures_are_named(tmp_path: Path) -> None:
    """A table of accuracies names what was left out, a figure of gaps what diverged."""
    runs = {"images-vit/fp32/0": {"val_loss": 2.0, "val_accuracy": 0.5}}
    runs["images-vit/paper/0"] = {"diverged": "loss is nan"}
    report = {"runs": runs, "left out": {"luq": "no  memory", "lora": "for fine-tuning"}}
    report["settings"] = {"images": "ten", "table": "supplement"}
    (tmp_path / "a.json").write_text(json.dumps(report))
    lines = list(evidence_tables.accuracies(tmp_path, "a.json"))
    assert "*a.json: `luq` left out: no memory*" in lines and "lora" not in "".join(lines)
    pytest.importorskip("matplotlib")
    from evidence import plot_evidence

    plot_evidence.plot_differences(report, "images-vit", tmp_path / "gaps.svg")
    assert "images-vit; diverged or without fp32" in (tmp_path / "gaps.svg").read_text()


def test_a_row_that_was_not_steady_stays_in_the_tables() -> None:
    """It has no sum: a bar without a figure, and a row of empty cells."""
    from evidence import doc_tables, targets

    rows = dict.fromkeys(["hotcore fast", "hotcore default", "fast int8 both", "torch bf16 both"])
    table = {"layers": {"qkv": {"rows": rows}}, "both": {}, "recipes": {}}
    figures = {"sum_ms": 1.0, "floor_ms": 0.5, "times the floor": 2.0, "compress of a copy": 1}
    table["recipes"]["fast"] = {**figures, "faster than": {"bf16 products": 2.0}}
    report = {"recipes": ["default", "fast"], "layers": {"ViT-B": table}}
    found = {row["work"]: row["reached"] for row in targets.rows(report, {}, {})}
    assert found["ViT-B sum, fast faster than bf16 products"] == "aim"
    assert found["ViT-B sum, default faster than bf16 products"] == "no figure"
    assert [*found.values()].count("no figure") == 3  # with two of forward and backward
    check = {"bench_backward": report}
    assert "| ViT-B, `default` |  |  |  |" in list(doc_tables.floor(check))
    assert list(doc_tables.both(check))[2:] == ["| ViT-B, `fast`, 8-bit forward |  |  |"]


def test_work_side_by_side() -> None:
    work = [(str(i), math.factorial, (i,)) for i in range(5)]
    for jobs in (1, 2):
        got: dict[str, int] = {}
        assert side_by_side.run_all(work, got.__setitem__, jobs=jobs) == []
        assert got == {str(i): math.factorial(i) for i in range(5)}
    late = side_by_side.run_all(work, got.__setitem__, budget_s=1e-9)
    assert late == [name for name, *_ in work[len(work) - len(late) :]] and late
    assert len(side_by_side.run_all(work, got.__setitem__, budget_s=60, longest_s=61)) == 5


def test_a_piece_that_fails_loses_no_other() -> None:
    """The piece beside it ends and is handed over; nothing else starts."""
    work = [("bad", math.factorial, (-1,)), ("slow", time.sleep, (3,))]
    work.append(("never", math.factorial, (3,)))
    got: dict[str, Any] = {}
    refused(side_by_side.run_all, "negative", ValueError, work, got.__setitem__, jobs=2)
    assert got == {"slow": None}


def test_latency(tmp_path: Path) -> None:
    path, words = tmp_path / "latency.json", ["--quick", "--rounds", "2", "--threads", "1"]
    report = report_of(bench_latency, path, *words, "--parts", "graph")
    assert set(report["graph"]) == set(bench_latency.TOY)
    for table in report["graph"].values():
        assert {"fp32", "LBP-WHT", "hotcore paper"} <= set(table["rows"])
        assert all(row["median_ms"] > 0 for row in table["rows"].values())
    assert report["means"]["graph"]["fp32"]["geomean"] == pytest.approx(1)
    assert len(report_of(bench_latency, path, *words, "--budget", "-1")["left out"]) == 2 + 2


def test_head(tmp_path: Path) -> None:
    words = ["--quick", "--rounds", "2", "--threads", "1", "--contenders", "torch", "hotcore*"]
    report = report_of(bench_head, tmp_path / "head.json", *words)
    recipes = (f"hotcore {name}" for name in bench_head.RECIPES)
    assert set(report["heads"]["toy"]) == {"torch", "hotcore", "hotcore, Liger's chunks", *recipes}
    for rows in report["errors"].values():
        assert all(row["gx"] < 0.02 and row["gw"] < 0.02 for row in rows.values())


def test_memory(tmp_path: Path) -> None:
    mend_torchvision()
    pytest.importorskip("timm")
    words = ["--quick", "--batches", "4", "--threads", "1", "--contenders", "fp32", "HOT paper"]
    report = report_of(bench_memory, tmp_path / "memory.json", *words, "LUQ", "*recomputed")
    rows = {name: found["4"] for name, found in report["rows"].items()}
    kept = {name: row["kept_gib"] for name, row in rows.items()}
    assert kept["HOT paper"] < 0.75 * kept["fp32"] and kept["LUQ"] == pytest.approx(kept["fp32"])
    assert kept["fp32, blocks recomputed"] < 0.5 * kept["fp32"]
    assert rows["HOT paper"]["formula_gib"] < rows["fp32"]["formula_gib"]


def test_the_formula_is_the_papers_figure() -> None:
    mend_torchvision()
    pytest.importorskip("timm")
    for name in ("fp32", "HOT paper"):
        contender = next(c for c in bench_memory.CONTENDERS if c.name == name)
        found = bench_memory.formula(contender, quick=False)
        for batch, bar in bench_memory.PAPER_GB[name].items():
            got = (found["fixed_bytes"] + batch * found["image_bytes"]) / 2**30
            assert got == pytest.approx(bar, abs=0.3)


def test_what_to_switch_on(tmp_path: Path) -> None:
    """hot.advise's rules choose, from the first report that has a model."""
    from evidence import doc_tables

    def row(ms: float, gib: float) -> dict[str, Any]:
        step = {"median_ms": ms, "q1_ms": ms, "q3_ms": ms}
        return {"step": step, "peak_gib": gib, "of reference": {"step": ms / 10, "peak": gib / 10}}

    rows = {
        **{"bf16 compiled": row(10, 10), "bf16 compiled, budget 0.5": row(12, 5)},
        **{"default compiled": row(8, 9), "default compiled, kept": row(14, 4)},
        **{"default compiled, saved 8": row(5, 1), "default compiled, saved 8/4": row(1, 1)},
        **{"fast compiled": row(5, 5), "FP8 tensorwise compiled": row(1, 1), "failed": {}},
        **{"torchao INT8 compiled": row(1, 1), "frozen nf4 compiled": row(1, 1)},
        "bf16 compiled, Liger": row(1, 1),
    }
    other = {"bf16 compiled": row(10, 10)}
    for name, found in (("a", {"m": rows}), ("b", {"m": other, "n": other})):
        steps = {model: {"title": model.upper(), "rows": rows} for model, rows in found.items()}
        report = {"date": "2026-11-24T01:02:03+00:00", "steps": steps}
        (tmp_path / f"{name}.json").write_text(json.dumps(report))
    assert doc_tables.table("switch a.json b.json", tmp_path).splitlines()[2:] == [
        "| M | time | default compiled | 1.25× | 0.90 | bf16 compiled | 1.00× | 1.00 |",
        "|  | memory | default compiled, kept | 0.71× | 0.40 | bf16 compiled, budget 0.5 | 0.83× |"
        " 0.50 |",
        "|  | both | default compiled | 1.25× | 0.90 | bf16 compiled | 1.00× | 1.00 |",
        "| N | time | bf16 compiled | 1.00× | 1.00 | bf16 compiled | 1.00× | 1.00 |",
        "|  | memory | bf16 compiled | 1.00× | 1.00 | bf16 compiled | 1.00× | 1.00 |",
        "|  | both | bf16 compiled | 1.00× | 1.00 | bf16 compiled | 1.00× | 1.00 |",
        *("", "*Measured: a 2026-11-24, b 2026-11-24.*"),
    ]


def test_the_words_of_an_example_stand_beside_plain() -> None:
    """Also if plain is not the first of its contenders."""
    from evidence import doc_tables

    rows = {
        name: {"a_second": speed, "peak_gib": 1.0} for name, speed in (("HOT", 2), ("plain", 1))
    }
    report = {"examples": {"clip": {"unit": "images", "contenders": rows}}}
    lines = list(doc_tables.gallery(report))
    assert lines[2] == "|  | HOT | 2 images | 2.00× | 1.00 | 1.00 |"
    words = "[CLIP](../../examples/clip.py), ViT-B/16, batch 128"
    assert lines[3] == f"| {words} | plain | 1 images | 1.00× | 1.00 | 1.00 |"


def test_claims_link_to_what_is_there() -> None:
    """Anchors are checked by the site's build, which sees the generated table."""
    from evidence import claims

    for claim in claims.CLAIMS:
        path = claim.where.partition("#")[0]
        assert (ROOT / "docs" / (path or "paper.md")).is_file(), claim


def test_prose_has_the_figures_of_the_table() -> None:
    from evidence import RESULTS, speeds

    rows = {row.model: row.hot for row in speeds.rows(RESULTS)}
    for page in ("README.md", "docs/index.md", "docs/results.md", "docs/results/speed.md"):
        text = (ROOT / page).read_text().split("<!-- table")[0]
        assert f"Llama-3-8B trains at {rows['Llama-3-8B'].speed:.2f}×" in text, page
        found = set(re.findall(r"ViT-B (?:trains )?at ([\d.]+)", text))
        assert found <= {f"{rows['ViT-B/16'].speed:.2f}"}, page


def test_every_figure(tmp_path: Path) -> None:
    """If a page's figure is not current: run python -m benchmarks.evidence.plot_evidence.

    Another version of matplotlib places text otherwise, so only its own figures are compared.
    """
    matplotlib = pytest.importorskip("matplotlib")
    from evidence import RESULTS, plot_evidence

    plot_evidence.main(["--results", str(RESULTS), "--out", str(tmp_path)])
    drawn = {path.stem: path.read_text() for path in tmp_path.iterdir()}
    names = ("breakdown", "training-vit", "speed", "loss-time", "shared-gpu", "several-gpus")
    assert drawn.keys() >= set(names)
    for name, text in drawn.items():
        page = (ROOT / f"docs/img/{name}.svg").read_text()
        if f"Matplotlib v{matplotlib.__version__}," in page:
            assert text == page, f"{name}.svg is not current"
    text = drawn["speed"]
    assert text.startswith("<?xml") and all(word in text for word in ("Llama-3-8B", "HOT"))


@pytest.mark.long
def test_formats_of_a_base(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("bitsandbytes")
    from evidence import bench_base

    (rows,) = report_of(bench_base, tmp_path / "bases.json", "--quick")["cases"].values()
    assert list(rows) == [*bench_base.ROUNDED, *bench_base.FROZEN]
    ours = "hot.freeze(model, 4, inputs)"
    assert rows[ours]["w"] < 1.1 * rows[bench_base.BASELINE]["w"]
    assert rows[ours]["bytes"] < 0.6 < rows["hot.freeze_int8(model)"]["bytes"] < 1.1
    assert rows["hot.freeze_int8(model)"]["error"] < 0.2 * rows[ours]["error"]
    assert ours in capsys.readouterr().out


def test_neither_toys_nor_adapters_replace_the_bases_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without --json: each has a report of its own, and a toy's is not among the results."""
    from evidence import bench_lora

    for name in ("RESULTS", "QUICK"):
        monkeypatch.setattr(f"timing.{name}", tmp_path / name)
    text = torch.zeros(2, 4), torch.zeros(2)
    task = bench_lora.Task(torch.nn.Module(), [], text, text, 1, 1)
    monkeypatch.setattr(bench_lora, "TASKS", {"gpt": lambda quick: task})
    monkeypatch.setattr(bench_lora, "measured", lambda task, forms, rows, seeds, write: write())
    monkeypatch.setattr("evidence.doc_tables.lora_gap", lambda *_: "")
    for words in ([], ["--adapters"], ["--quick"]):
        bench_lora.main(words)
    found = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.json"))
    names = ("QUICK/base-lora", "RESULTS/base-lora-adapters", "RESULTS/base-lora")
    assert found == [f"{name}.json" for name in names]
    bench_lora.main([])
    text[0][0, 0] = 1
    refused(bench_lora.main, "rows of gpt are of another text", SystemExit, [])


def test_a_trained_base_is_that_of_its_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decoder in the cache must not stand for one of another Python's library."""
    from evidence import bench_lora

    def cache_of(token: int) -> Path:
        text = torch.full((1, 4), token), torch.zeros(1)
        monkeypatch.setattr(bench_lora, "_windows", lambda files, size: (text, text))
        bench_lora.gpt(False)
        return caches.pop()

    def pretrained(size: object, text: object, cache: Path) -> torch.nn.Module:
        caches.append(cache)
        return torch.nn.Module()

    caches: list[Path] = []
    monkeypatch.setattr(bench_lora, "pretrained", pretrained)
    assert cache_of(1) == cache_of(1) != cache_of(2)


@pytest.mark.long
def test_losses_of_lora_by_base(tmp_path: Path) -> None:
    """Every form at toy size, on a decoder that has hardly been trained."""
    mend_torchvision()
    pytest.importorskip("peft")
    pytest.importorskip("bitsandbytes")
    from evidence import bench_lora

    rows = report_of(bench_lora, tmp_path / "lora.json", "--quick")["tasks"]["gpt"]
    assert list(rows) == list(bench_lora.FORMS)
    kl = {name: row["kl"] for name, row in rows.items()}
    measured, plain = (kl[f"hot.freeze(model, 4{end})"] for end in (", inputs", ""))
    assert kl["bf16"] < kl["hot.freeze_int8(model)"] < measured < plain
    for row in rows.values():
        assert set(row["loss"]) == {"0", "1"}  # seeds
        assert all(loss < row["other before"] - 0.01 for loss in row["loss"].values())
    losses = [rows[name]["loss"]["1"] for name in ("hot.freeze_int8(model)", "bf16")]
    assert abs(losses[0] - losses[1]) < 0.002
    path = tmp_path / "adapters.json"
    rows = report_of(bench_lora, path, "--quick", "--adapters")["tasks"]["gpt"]
    exact, *coded = (tuple(row["loss"].values()) for row in rows.values())
    assert len({exact, *coded}) == 3
    assert all(losses == pytest.approx(exact, abs=0.002) for losses in coded)
