"""Tables of the evidence, for doc_tables.py: trainings, gradients, latency, memory, GPTs by size.

Each takes the folder of the reports. A report that is not there is a line that says what makes it:
the pages hold these tables from the start.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

Report = Mapping[str, Any]
Lines = Iterator[str]

MAKES = {
    "training.json": "bench_training.py",
    "ablations.json": "bench_training.py --table ablations",
    "finetune.json": "bench_training.py --table finetune",
    "gradients.json": "bench_gradients.py",
    **{
        name: "evidence.py --call a --out FOLDER"
        for name in ("cuda-latency.json", "cuda-memory.json", "cuda-gpt-10M.json",
                     "cuda-gpt-25M.json")
    },
    **{
        name: "evidence.py --call b --out FOLDER"
        for name in ("cuda-gpt-91M.json", "bert.json", "cuda-images-vit.json",
                     "cuda-images-resnet18.json", "cuda-images-efficientformer.json")
    },
    **{
        name: "evidence.py --call c --out FOLDER"
        for name in ("cuda-gpt-311M.json", "cuda-gpt-10M-long.json", "cuda-images-vit-s.json",
                     "cuda-finetune-vit-b.json")
    },
    "cuda-ranks-efficientformer.json":
        "evidence.py --parts cuda-ranks-efficientformer --out FOLDER",
}  # fmt: skip
TITLES = {
    "vit": "ViT, digits",
    "gpt": "GPT, text",
    "bert": "BERT, text",
    "images-vit": "small ViT, photographs",
    "images-vit-s": "ViT-S's blocks, photographs",
    "images-vit-b": "ViT-B's blocks, photographs",
    "images-resnet18": "ResNet-18, photographs",
    "images-efficientformer": "EfficientFormer-L1, photographs",
}
SHOWN = {
    "int4": "default, g_x in INT4",
    "int4, g_x without HT": "default, g_x in INT4 without HT",
    "int4 int8-forward": "default int8-forward, g_x in INT4",
    "default, x as rht4": "default, x in 4 bits, transformed",
    "default, x as rht4, equalised": "default, x in 4 bits, transformed and equalised",
}
"""Runs whose reports call them by a recipe or a storage that is gone -> what they are."""
GPT_SIZES = ("10M", "25M", "91M", "311M")
GPT_LONGER = ("10M-long",)
"""Sizes with more text."""


def report_of(results: Path, name: str) -> Report | None:
    path = results / name
    return json.loads(path.read_text()) if path.exists() else None


def missing(name: str) -> str:
    """What a page says instead of a table."""
    return f"*Not run yet: `python benchmarks/{MAKES.get(name, name)}` makes `{name}`.*"


def line(words: Sequence[str]) -> str:
    return f"| {' | '.join(words)} |"


def header(words: Sequence[str]) -> Lines:
    yield line(words)
    yield "|---" * len(words) + "|"


def plus_minus(values: Sequence[float], digits: int = 3, sign: str = "+") -> str:
    """Mean, and the standard deviation where there are several."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return "diverged"
    mean = f"{statistics.mean(finite):{sign}.{digits}f}"
    if len(finite) < len(values):
        mean += f", {len(values) - len(finite)} diverged"
    return mean if len(finite) < 2 else f"{mean} ± {statistics.stdev(finite):.{digits}f}"


# ---- trainings ----


def of_task(report: Report, task: str) -> dict[str, dict[str, Report]]:
    """Method -> seed -> run."""
    out: dict[str, dict[str, Report]] = {}
    for key, run in report["runs"].items():
        name, method, seed = key.split("/")
        if name == task:
            out.setdefault(method, {})[seed] = run
    return out


def differences(report: Report, task: str, method: str) -> list[float]:
    """Validation loss less fp32's of the same seed; inf: diverged."""
    runs = of_task(report, task)
    return [
        run.get("val_loss", math.inf) - partner["val_loss"]
        for seed, run in runs.get(method, {}).items()
        if "val_loss" in (partner := runs.get("fp32", {}).get(seed, {}))
    ]


def trainings(results: Path, *files: str) -> Lines:
    """Validation loss less fp32's, paired, mean ± deviation of the seeds; a column a task."""
    found = [(name, report_of(results, name)) for name in files]
    columns = [
        (report, task) for _, report in found if report is not None for task in tasks_of(report)
    ]
    if columns:
        yield from _trainings(columns)
    for name, report in found:
        notes = [
            f"*{name}: `{method}` left out: {' '.join(why.split())}*"
            for method, why in (report["left out"] if report else {}).items()
            if method != "lora"
        ]
        for note in notes if report else [missing(name)]:
            if columns:
                yield ""  # else it would be another row
            yield note


def rows(results: Path, file: str, *words: str) -> Lines:
    """Some methods of one file, in the order given: names between semicolons."""
    report = report_of(results, file)
    if report is None:
        yield missing(file)
        return
    names = [name.strip() for name in " ".join(words).split(";")]
    columns = [(report, task) for task in tasks_of(report)]
    gaps = gaps_of(columns)
    yield from header(["validation loss less fp32's", *_heads(columns)])
    for name in names:
        found = gaps.get(name, [[] for _ in columns])
        cells = (plus_minus(values) if values else "" for values in found)
        yield line([SHOWN.get(name, name), *cells])


def tasks_of(report: Report) -> list[str]:
    return list(dict.fromkeys(key.split("/")[0] for key in report["runs"]))


Columns = Sequence[tuple[Report, str]]


def gaps_of(columns: Columns) -> dict[str, list[list[float]]]:
    """Method -> differences to fp32 in every column; best first by their means."""
    methods = dict.fromkeys(m for report, task in columns for m in of_task(report, task))
    gaps = {
        method: [differences(report, task, method) for report, task in columns]
        for method in methods
        if method != "fp32"
    }

    def order(method: str) -> float:
        means = [statistics.mean(values) for values in gaps[method] if values]
        return statistics.mean(means) if means else math.inf

    return {method: gaps[method] for method in sorted(gaps, key=order)}


def _heads(columns: Columns) -> list[str]:
    out = []
    for report, task in columns:
        counts = [len(runs) for runs in of_task(report, task).values()]
        few, most = min(counts), max(counts)
        seeds = (
            f"{few} to {most} seeds" if few < most else "one seed" if most == 1 else f"{most} seeds"
        )
        out.append(f"{TITLES.get(task, task)}, {seeds}")
    return out


def _trainings(columns: Columns) -> Lines:
    yield from header(["", *_heads(columns)])
    losses = [
        [run["val_loss"] for run in of_task(report, task).get("fp32", {}).values()]
        for report, task in columns
    ]
    yield line(["fp32's loss", *(plus_minus(values, sign="") for values in losses)])
    for method, gaps in gaps_of(columns).items():
        cells = (plus_minus(values) if values else "" for values in gaps)
        yield line([SHOWN.get(method, method), *cells])


# ---- gradients ----


def over_layers(report: Report, task: str, step: int | None, method: str, *path: str) -> float:
    """Over layers, seeds and, for None, steps: the root mean square of errors, else the mean."""
    values = []
    for key, point in report["points"].items():
        name, _, when = key.split("/")
        if name == task and step in (None, int(when)):
            for layer in point["layers"].values():
                entry: Any = layer["methods"].get(method)
                for part in path if entry is not None else ():
                    entry = entry[part]
                values += [] if entry is None else [entry]
    if not values:
        return float("nan")
    if path[-1] in ("error", "noise", "bias"):
        return statistics.fmean(value**2 for value in values) ** 0.5
    return statistics.fmean(values)


def batch_noise_of(report: Report, task: str, step: int | None = None) -> float:
    """Median over layers: where a mean gradient is lost in noise, the ratio has no bound."""
    values = [
        layer["batch"]
        for key, point in report["points"].items()
        if key.startswith(f"{task}/") and step in (None, int(key.rpartition("/")[2]))
        for layer in point["layers"].values()
    ]
    return statistics.median(values) if values else float("nan")


def methods_of(report: Report, task: str) -> list[str]:
    found: dict[str, None] = {}
    for key, point in report["points"].items():
        if key.startswith(f"{task}/"):
            for layer in point["layers"].values():
                found |= dict.fromkeys(layer["methods"])
    return list(found)


def gradient_quality(results: Path) -> Lines:
    """Errors of g_x and g_w, noise and bias of g_w by method, least error of g_w first."""
    report = report_of(results, "gradients.json")
    if report is None:
        yield missing("gradients.json")
        return
    tasks = report["settings"]["tasks"]
    measures = (("gx", "error"), ("gw", "error"), ("gw", "noise"), ("gw", "bias"))
    heads = [
        f"{TITLES[task]}: {words}" if words == "g_x" else words
        for task in tasks
        for words in ("g_x", "g_w", "noise", "bias")
    ]
    yield from header(["", *heads, "cost", "bytes"])

    def of(method: str, *path: str) -> list[float]:
        """Of the tasks that the method has."""
        values = [over_layers(report, task, None, method, *path) for task in tasks]
        return [value for value in values if not math.isnan(value)]

    methods = dict.fromkeys(name for task in tasks for name in methods_of(report, task))
    for method in sorted(methods, key=lambda name: statistics.mean(of(name, "gw", "error"))):
        values = [
            over_layers(report, task, None, method, *way) for task in tasks for way in measures
        ]
        cells = ["" if math.isnan(value) else f"{value:.3f}" for value in values]
        tail = [dict.fromkeys(f"{v:.2f}" for v in of(method, key)) for key in ("cost", "bytes")]
        yield line([SHOWN.get(method, method), *cells, *map(", ".join, tail)])
    cells = [c for task in tasks for c in ("", f"{batch_noise_of(report, task):.2f}", "", "")]
    yield line(["other batches (median)", *cells, "", ""])


# ---- latency ----


def ratio(rows: Mapping[str, Any], name: str) -> str:
    """Times faster than fp32."""
    row = rows.get(name)
    if not isinstance(row, Mapping) or not isinstance(rows.get("fp32"), Mapping):
        return ""
    return f"{rows['fp32']['median_ms'] / row['median_ms']:.2f}"


LATENCY = ("LBP-WHT", "tf32", "bf16", "FP8 products", "hotcore paper, fp32 arrays",
           "hotcore paper", "hotcore default", "hotcore fast", "hotcore compact")  # fmt: skip


def latency(results: Path, part: str = "graph") -> Lines:
    """Times faster than fp32, a row a layer; the paper's two columns first."""
    report = report_of(results, "cuda-latency.json")
    if report is None or part not in report:
        yield missing("cuda-latency.json")
        return
    tables = report[part]
    known = {name for table in tables.values() for name in table["rows"]}
    names = [n for n in (*LATENCY, "torchao FP8") if n in known]
    head = ["layer (L, O, I)", "paper: LBP-WHT", "paper: HOT", "fp32, µs"]
    yield from header([*head, *(f"`{n.removeprefix('hotcore ')}`" if n.startswith("hotcore")
                                else n for n in names)])  # fmt: skip
    for name, table in tables.items():
        paper, rows = table["paper_us"], table["rows"]
        shape = ", ".join(map(str, table["shape"]))
        plain = f"{1e3 * rows['fp32']['median_ms']:.1f}"
        figures = [f"{paper['FP'] / paper['LBP-WHT']:.1f}", f"{paper['faster']:.1f}", plain]
        yield line([f"{name} ({shape})", *figures, *(ratio(rows, n) for n in names)])
    means = report["means"].get(part)
    if means:
        theirs = ("the paper's LBP-WHT", "the paper's HOT")
        paper = [f"{means[name]['geomean']:.2f}" for name in theirs]
        cells = [f"{means[n]['geomean']:.2f}" if n in means else "" for n in names]
        yield line(["geometric mean", *paper, "", *cells])
    if report["left out"]:
        yield ""
        yield f"*No time left for: {', '.join(report['left out'])}.*"


def breakdown(results: Path) -> Lines:
    """Fig. 1: microseconds of the device by stage."""
    report = report_of(results, "cuda-latency.json")
    if report is None or "breakdown" not in report:
        yield missing("cuda-latency.json")
        return
    head = ["µs", "fp32's products", "LBP-WHT", "HOT", "its products", "transforms and quantisers",
            "launches", "the paper: fp32, LBP-WHT, HOT"]  # fmt: skip
    yield from header(head)
    for name, found in report["breakdown"].items():
        for way in ("paper, fp32 arrays", "paper"):
            of, paper = found["stages"], found["paper_us"]
            low = of["LBP-WHT"]
            low_us = low["products, transforms among them"] + low["rest"]
            arrays = way.removeprefix("paper")
            total, products = hot_parts(of[way])
            yield line([
                f"{name}, `paper`{arrays}",
                *(f"{us:.1f}" for us in (of["fp32"]["products"], low_us, total, products)),
                f"{total - products:.1f}",
                f"{of[way]['launches']:.0f}",
                f"{paper['FP']:.0f}, {paper['LBP-WHT']:.0f}, {paper['HOT']:.0f}",
            ])  # fmt: skip


def hot_parts(found: Report) -> tuple[float, float]:
    """Of bench_backward.cuda_stages: microseconds of all kernels, and of the products."""
    return sum(kernel["us"] for kernel in found["kernels"]), found["products together"]


# ---- memory ----


def memory(results: Path) -> Lines:
    """Peak of a step and, in brackets, what forward keeps; the formula and the paper's bar."""
    report = report_of(results, "cuda-memory.json")
    if report is None:
        yield missing("cuda-memory.json")
        return
    rows = report["rows"]
    batches = list(dict.fromkeys(batch for found in rows.values() for batch in found))
    yield from header(["GiB", *(f"{batch} images" for batch in batches)])
    for name, found in rows.items():
        cells = []
        for batch in batches:
            row = found.get(batch, {})
            if "peak_gib" in row:
                peak = row.get("peak by kept", row["peak_gib"])
                cells.append(f"{peak:.1f} ({row['kept_gib']:.1f})")
            else:
                why = row.get("left out", "")
                cells.append("out of memory" if "OutOfMemory" in why else why[:40])
        yield line([name, *cells])
        if any("formula_gib" in row for row in found.values()):
            cells = []
            for row in (found.get(batch, {}) for batch in batches):
                bar = f" ({row['paper_gb']:.1f})" if "paper_gb" in row else ""
                cells.append(f"{row['formula_gib']:.1f}{bar}" if "formula_gib" in row else "")
            yield line([f"{name}: the formula (the paper's bar)", *cells])


# ---- GPTs by size ----


def gaps_by_size(
    results: Path, sizes: Sequence[str] = GPT_SIZES
) -> dict[str, dict[str, list[float]]]:
    """Size -> contender -> validation loss less bf16's of the same seed; of bf16 its losses."""
    out: dict[str, dict[str, list[float]]] = {}
    for size in sizes:
        report = report_of(results, f"cuda-gpt-{size}.json")
        if report is None:
            continue
        runs = report["runs"]
        found: dict[str, list[float]] = {}
        for key, run in runs.items():
            name, _, seed = key.rpartition("/")
            plain = runs.get(f"bf16/{seed}")
            if name == "bf16":
                found.setdefault(name, []).append(run["validation_loss"])
            elif plain:
                found.setdefault(name, []).append(run["validation_loss"] - plain["validation_loss"])
        out[size] = found
    return out


def scaling(results: Path) -> Lines:
    """The gap to bf16 by size, mean ± deviation of paired seeds."""
    sizes = (*GPT_SIZES, *GPT_LONGER)
    found = gaps_by_size(results, sizes)
    for size in sizes:
        if size not in found:
            yield missing(f"cuda-gpt-{size}.json")
    if not found:
        return
    yield ""
    heads = []
    for size in found:
        report = report_of(results, f"cuda-gpt-{size}.json")
        assert report is not None
        settings = report["settings"]
        tokens = settings["steps"] * settings["size"]["batch"] * settings["size"]["context"]
        name = size.removesuffix("-long")
        heads.append(f"{name}, {tokens / report['parameters']:.2f} tokens a parameter")
    yield from header(["validation loss less bf16's", *heads])
    yield line(["bf16's loss", *(plus_minus(f.get("bf16", []), 4, "") for f in found.values())])
    every = {n for f in found.values() for n in f if n != "bf16"}
    # HOT's recipes, the best first, each with its 8-bit forward; then the rivals.
    recipes = ("default", "compact", "accurate", "int4", "fast", "paper")
    ordered = [n for r in recipes for n in (r, f"{r} int8-forward") if n in every]
    for name in [*ordered, *sorted(every.difference(ordered))]:
        cells = []
        for one in found.values():
            values = one.get(name, [])
            cells.append(f"{plus_minus(values, 4)} ({len(values)})" if values else "")
        yield line([SHOWN.get(name, name), *cells])


# ---- figures ----


FIGURES = {
    "latency": "cuda-latency.json",
    "memory": "cuda-memory.json",
    "scaling": "cuda-gpt-10M.json",
    "curves": "cuda-gpt-91M.json",
    "ablations-vit": "ablations.json",
    "ablations-gpt": "ablations.json",
    "finetune-vit": "finetune.json",
    "finetune-gpt": "finetune.json",
}
"""Figure of plot.py --all -> the report that it is made of."""


def figure(results: Path, name: str, folder: str, *words: str) -> Lines:
    """The figure, with ``words`` for who cannot see it, where its report is there."""
    if (results / FIGURES[name]).exists():
        yield f"![{' '.join(words)}]({folder}/{name}.svg)"
