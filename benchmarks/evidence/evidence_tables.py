"""Tables of the evidence, for doc_tables.py: trainings, gradients, latency, memory, GPTs by size.

Each takes the folder of the reports, and raises FileNotFoundError where one is not there.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from evidence import intervals

Report = Mapping[str, Any]
Lines = Iterator[str]

TITLES = {
    "vit": "ViT, digits",
    "gpt-massive": "GPT, a massive first token",
    "gpt": "GPT, text",
    "bert": "BERT, text",
    "llama": "Llama, text",
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
}
"""Runs whose reports call them by a recipe that was removed -> what they are."""
LEFT_OUT = re.compile(
    r"\bcompact\b|\bone code\b|\brht\d|\btoken[248]\b|, saved\b|^(feature_sums|sampled_tokens|"
    r"(requantize_)?rotated?|token_(amax|contributions|rows|transpose)|undo_transforms)_kernel"
)
"""Rows of reports that no table shows: what they measured was removed (docs/dev/tried.md)."""
GPT_SIZES = ("10M", "25M", "91M", "311M")
GPT_LONGER = ("10M-long", "10M-20", "25M-20")
"""Sizes with more text."""


Make = Callable[..., Iterator[str]]
T = TypeVar("T")


def report_of(results: Path, name: str) -> Report:
    """A report without the rows that are left out."""

    def kept(value: Any) -> Any:
        if not isinstance(value, list):
            return value
        return [one for one in value if not (isinstance(one, str) and LEFT_OUT.search(one))]

    def shown(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        return {key: kept(value) for key, value in pairs if not LEFT_OUT.search(key)}

    found: Report = json.loads((results / name).read_text(), object_pairs_hook=shown)
    return found


def reports_of(results: Path, names: Iterable[str]) -> dict[str, Report]:
    """Those that are there."""
    return {name: report_of(results, name) for name in names if (results / name).exists()}


def line(words: Sequence[str]) -> str:
    return f"| {' | '.join(words)} |"


def header(words: Sequence[str]) -> Lines:
    yield line(words)
    yield "|---" * len(words) + "|"


def table_of(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Lines:
    yield from header(head)
    yield from map(line, rows)


def shown(name: str) -> str:
    return SHOWN.get(name, name)


def names_in(words: Sequence[str]) -> list[str]:
    """Names between semicolons."""
    return [name.strip() for name in " ".join(words).split(";")]


def plus_minus(values: Sequence[float], digits: int = 3, sign: str = "+") -> str:
    """Mean, and the standard deviation where there are several; nothing of none."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return "diverged" if values else ""
    mean = f"{statistics.mean(finite):{sign}.{digits}f}"
    if len(finite) < len(values):
        mean += f", {len(values) - len(finite)} diverged"
    return mean if len(finite) < 2 else f"{mean} ± {statistics.stdev(finite):.{digits}f}"


# ---- trainings ----

Columns = Sequence[tuple[Report, str]]
"""Reports with one of their tasks each."""


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
    found = {name: report_of(results, name) for name in files}
    columns = [(report, task) for report in found.values() for task in tasks_of(report)]
    yield from training_lines(columns)
    for name, report in found.items():
        for method, why in report["left out"].items():
            if method != "lora":
                yield from ("", f"*{name}: `{method}` left out: {' '.join(why.split())}*")
    yield from ("", dates_line(results, found))


def rows(results: Path, file: str, *words: str) -> Lines:
    """Some methods of one file, in the order given: names between semicolons."""
    report = report_of(results, file)
    columns = [(report, task) for task in tasks_of(report)]
    yield from training_lines(columns, names_in(words))
    yield from ("", dates_line(results, [file]))


def tasks_of(report: Report) -> list[str]:
    return list(dict.fromkeys(key.split("/")[0] for key in report["runs"]))


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


def _heads(columns: Columns, methods: Collection[str] = ()) -> Lines:
    """``methods``: whose seeds count; all, if none is named."""
    for report, task in columns:
        found = of_task(report, task)
        counts = [len(runs) for name, runs in found.items() if name in (methods or found)]
        few, most = min(counts), max(counts)
        seeds = (
            f"{few} to {most} seeds" if few < most else "one seed" if most == 1 else f"{most} seeds"
        )
        yield f"{TITLES.get(task, task)}, {seeds}"


def training_lines(columns: Columns, names: Sequence[str] = ()) -> Lines:
    """Some methods of some reports' tasks; or fp32's own losses, and below them every method."""
    gaps = gaps_of(columns)
    yield from header(["validation loss less fp32's" if names else "", *_heads(columns, names)])
    if not names:
        plain = (of_task(report, task).get("fp32", {}).values() for report, task in columns)
        losses = ([run["val_loss"] for run in runs] for runs in plain)
        yield line(["fp32's loss", *(plus_minus(values, sign="") for values in losses)])
    for method in names or gaps:
        yield line([shown(method), *map(plus_minus, gaps.get(method, [[] for _ in columns]))])


# ---- gradients ----


def _layers(report: Report, task: str, step: int | None) -> Iterator[Report]:
    """Of every point of a task, or of those at one step."""
    for key, point in report["points"].items():
        name, _, when = key.split("/")
        if name == task and step in (None, int(when)):
            yield from point["layers"].values()


def over_layers(report: Report, task: str, step: int | None, method: str, *path: str) -> float:
    """Over layers, seeds and, for None, steps: the root mean square of errors, else the mean."""
    values = []
    for layer in _layers(report, task, step):
        entry: Any = layer["methods"].get(method)
        for part in path if entry is not None else ():
            entry = entry.get(part)
        values += [] if entry is None else [entry]
    if not values:
        return float("nan")
    if path[-1] in ("error", "noise", "bias"):
        return statistics.fmean(value**2 for value in values) ** 0.5
    return statistics.fmean(values)


def batch_noise_of(report: Report, task: str, step: int | None = None) -> float:
    """Median over layers: where a mean gradient is lost in noise, the ratio has no bound."""
    values = [layer["batch"] for layer in _layers(report, task, step)]
    return statistics.median(values) if values else float("nan")


def methods_of(report: Report, task: str) -> list[str]:
    return list(dict.fromkeys(m for layer in _layers(report, task, None) for m in layer["methods"]))


def gradient_quality(report: Report) -> Lines:
    """Errors of g_x and g_w, noise and bias of g_w by method, least error of g_w first."""
    tasks = report["settings"]["tasks"]
    measures = (("gx", "error"), ("gw", "error"), ("gw", "noise"), ("gw", "bias"))
    heads = [w for task in tasks for w in (f"{TITLES[task]}: g_x", "g_w", "noise", "bias")]
    yield from header(["", *heads, "cost", "bytes"])

    def of(method: str, *path: str) -> list[float]:
        """Of the tasks that the method has."""
        values = [over_layers(report, task, None, method, *path) for task in tasks]
        return [value for value in values if not math.isnan(value)]

    methods = dict.fromkeys(name for task in tasks for name in methods_of(report, task))
    for method in sorted(methods, key=lambda name: statistics.mean(of(name, "gw", "error"))):
        values = [over_layers(report, task, None, method, *m) for task in tasks for m in measures]
        cells = ["" if math.isnan(value) else f"{value:.3f}" for value in values]
        tail = [dict.fromkeys(f"{v:.2f}" for v in of(method, key)) for key in ("cost", "bytes")]
        yield line([shown(method), *cells, *map(", ".join, tail)])
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
           "hotcore paper", "hotcore default", "hotcore fast",
           "torchao FP8")  # fmt: skip
UNFUSED = (
    "*LBP-WHT: its transforms and products are separate operations of torch in fp32, HOT's are "
    "fused kernels. Its column is the time of that code, no bound on the method's.*"
)


def latency(report: Report, part: str = "graph") -> Lines:
    """The paper's layers: times faster than fp32, a row a layer; the paper's two columns first."""
    tables = report[part]
    known = {name for table in tables.values() for name in table["rows"]}
    names = [n for n in LATENCY if n in known]
    head = ["layer (L, O, I)", "paper: LBP-WHT", "paper: HOT", "fp32, µs"]
    yield from header([*head, *(f"`{n.removeprefix('hotcore ')}`" if n.startswith("hotcore")
                                else n for n in names)])  # fmt: skip
    for name, table in tables.items():
        paper, rows = table["paper_us"], table["rows"]
        shape = ", ".join(map(str, table["shape"]))
        plain = f"{1e3 * rows['fp32']['median_ms']:.1f}"
        figures = [f"{paper['FP'] / paper['LBP-WHT']:.1f}", f"{paper['faster']:.1f}", plain]
        yield line([f"{name} ({shape})", *figures, *(ratio(rows, n) for n in names)])
    means = report.get("means", {}).get(part)
    if means:
        theirs = ("the paper's LBP-WHT", "the paper's HOT")
        cells = [f"{means[n]['geomean']:.2f}" if n in means else "" for n in (*theirs, *names)]
        yield line(["geometric mean", *cells[:2], "", *cells[2:]])
    yield from ("", UNFUSED)
    if report["left out"]:
        yield from ("", f"*No time left for: {', '.join(report['left out'])}.*")


def breakdown(report: Report) -> Lines:
    """Fig. 1 of the supplement: microseconds of the device by stage."""
    head = ["µs", "fp32's products", "LBP-WHT", "HOT", "its products", "transforms and quantisers",
            "launches", "the paper: fp32, LBP-WHT, HOT"]  # fmt: skip
    yield from header(head)
    for name, found in report["breakdown"].items():
        of, paper = found["stages"], found["paper_us"]
        low = of["LBP-WHT"]
        low_us = low["products, transforms among them"] + low["rest"]
        for way in ("paper, fp32 arrays", "paper"):
            total, products = hot_parts(of[way])
            figures = (of["fp32"]["products"], low_us, total, products, total - products)
            theirs = ", ".join(f"{paper[who]:.0f}" for who in ("FP", "LBP-WHT", "HOT"))
            yield line([f"{name}, `paper`{way.removeprefix('paper')}",
                        *(f"{us:.1f}" for us in figures),
                        f"{of[way]['launches']:.0f}", theirs])  # fmt: skip
    yield from ("", UNFUSED)


def hot_parts(found: Report) -> tuple[float, float]:
    """Of bench_backward.cuda_stages: microseconds of all kernels, and of the products."""
    return sum(kernel["us"] for kernel in found["kernels"]), found["products together"]


# ---- memory ----


def memory(report: Report) -> Lines:
    """A step of ViT-B by batch: peak and, in brackets, what forward keeps; the formula below."""
    rows = report["rows"]
    batches = list(dict.fromkeys(batch for found in rows.values() for batch in found))

    def measured(row: Report) -> str:
        if "peak_gib" in row:
            peak = row.get("peak by kept", row["peak_gib"])
            return f"{peak:.1f} ({row['kept_gib']:.1f})"
        if "kept_gib" in row:  # on the CPU
            return f"({row['kept_gib']:.4f})"
        why = row.get("left out", "")
        return "out of memory" if "OutOfMemory" in why else why[:40]

    def formula(row: Report) -> str:
        bar = f" ({row['paper_gb']:.1f})" if "paper_gb" in row else ""
        return f"{row['formula_gib']:.1f}{bar}" if "formula_gib" in row else ""

    yield from header(["GiB", *(f"{batch} images" for batch in batches)])
    for name, found in rows.items():
        of_batches = [found.get(batch, {}) for batch in batches]
        yield line([name, *map(measured, of_batches)])
        if any(map(formula, of_batches)):
            yield line([f"{name}: the formula (the paper's bar)", *map(formula, of_batches)])


# ---- GPTs by size ----

MARGIN = 0.01
"""Nats. A contender is equivalent to bf16 where the whole 95 % interval lies within them."""
FP8 = "FP8 tensorwise"
PLANNED = ("10M-20", "25M-20")
"""Of these a seed counts when every contender has it (docs/dev/evidence.md)."""
STEP_REPORTS = {"91M": ("cuda-gpt.json", "cuda-gpt-forward.json")} | {
    size: (f"cuda-gpt-{size}.json",) for size in PLANNED
}
"""Size -> reports of the same model that have its contenders' steps in milliseconds."""


def file_of(size: str) -> str:
    return f"cuda-gpt-{size}.json"


def of_sizes(results: Path, sizes: Sequence[str] = (*GPT_SIZES, *GPT_LONGER)) -> dict[str, Report]:
    """Size -> its report, of those that are there; of those in PLANNED whole seeds alone."""
    found = reports_of(results, map(file_of, sizes))
    out = {size: found[file_of(size)] for size in sizes if file_of(size) in found}
    for size in [size for size in PLANNED if size in out]:
        out[size] = {**out[size], "runs": in_whole_seeds(out[size]["runs"])}
    return {size: report for size, report in out.items() if report["runs"]}


def in_whole_seeds(runs: Mapping[str, Report]) -> dict[str, Report]:
    """The runs of those seeds that every contender has."""
    names = {key.rpartition("/")[0] for key in runs}
    seeds = [key.rpartition("/")[2] for key in runs]
    return {k: run for k, run in runs.items() if seeds.count(k.rpartition("/")[2]) == len(names)}


def runs_by_seed(report: Report) -> dict[str, dict[int, Report]]:
    """Contender -> seed -> run, of a report of bench_gpt.py."""
    out: dict[str, dict[int, Report]] = {}
    for key, run in report["runs"].items():
        name, _, seed = key.rpartition("/")
        out.setdefault(name, {})[int(seed)] = run
    return out


def of_equal_seeds(found: Mapping[str, Mapping[int, T]]) -> dict[str, dict[int, T]]:
    """Of those seeds alone that every contender with more than one has; a lone run stays."""
    several = [set(values) for values in found.values() if len(values) > 1]
    common = set.intersection(*several) if several else set()
    return {
        name: {seed: v for seed, v in values.items() if len(values) == 1 or seed in common}
        for name, values in found.items()
    }


def pairs_of(
    report: Report, name: str, less: str = "bf16", *, every: bool = False
) -> list[tuple[Report, Report]]:
    """Runs of two contenders of the same seed; of equal seeds, or of ``every`` that both have."""
    runs = runs_by_seed(report)
    mine, other = (runs if every else of_equal_seeds(runs)).get(name, {}), runs.get(less, {})
    return [(run, other[seed]) for seed, run in mine.items() if seed in other]


def gaps_of_pairs(pairs: Iterable[tuple[Report, Report]]) -> list[float]:
    """Differences of the last validation losses."""
    return [mine["validation_loss"] - other["validation_loss"] for mine, other in pairs]


def gaps_by_size(
    results: Path, sizes: Sequence[str] = GPT_SIZES
) -> dict[str, dict[str, list[float]]]:
    """Size -> contender -> validation losses less bf16's of equal seeds; of bf16 its losses."""
    return {
        size: {
            name: gaps_of_pairs(pairs_of(report, name))
            if name != "bf16"
            else [run["validation_loss"] for run in runs.values()]
            for name, runs in of_equal_seeds(runs_by_seed(report)).items()
        }
        for size, report in of_sizes(results, sizes).items()
    }


def in_order(names: Iterable[str]) -> list[str]:
    """HOT's recipes, the best first, each with its 8-bit forward; then the rivals; not bf16."""
    every = set(names) - {"bf16"}
    recipes = ("default", "accurate", "int4", "fast", "paper")
    ordered = [n for r in recipes for n in (r, f"{r} int8-forward") if n in every]
    return [*ordered, *sorted(every.difference(ordered))]


def ends_of(found: intervals.Interval, digits: int = 4) -> str:
    return f"[{found.low:+.{digits}f}, {found.high:+.{digits}f}]"


def interval_words(values: Sequence[float], digits: int = 4) -> str:
    """The mean, Student's 95 % interval of it, and of how many; nothing of none."""
    if not values:
        return ""
    found = intervals.interval(values)
    ends = "" if found is None else f" {ends_of(found, digits)}"
    return f"{statistics.mean(values):+.{digits}f}{ends} ({len(values)})"


def _size_heads(found: Mapping[str, Report]) -> Lines:
    for size, report in found.items():
        settings = report["settings"]
        tokens = settings["steps"] * tokens_of(report)
        name = size.partition("-")[0]
        yield f"{name}, {tokens / report['parameters']:.2f} tokens a parameter"


def scaling(results: Path, *words: str) -> Lines:
    """Gap to bf16 by size, of pairs of equal seeds: mean, ± half of the 95 % interval.

    ``words``: names of contenders between semicolons; all without them.
    """
    reports = of_sizes(results)
    found = gaps_by_size(results, list(reports)).values()
    yield from header(["validation loss less bf16's", *_size_heads(reports)])
    yield line(["bf16's loss, ± deviation", *(plus_minus(gaps["bf16"], 4, "") for gaps in found)])
    for name in names_in(words) if words else in_order(n for gaps in found for n in gaps):
        yield line([shown(name), *(half_width_words(gaps.get(name, [])) for gaps in found)])
    yield from ("", dates_line(results, map(file_of, reports)))


def half_width_words(values: Sequence[float]) -> str:
    """Mean ± half of its 95 % interval, without an interval for a single pair."""
    found = intervals.interval(values) if values else None
    mean = f"{statistics.mean(values):+.4f}" if values else ""
    return f"{mean} ± {(found.high - found.low) / 2:.4f}" if found else mean


def pooled_gaps(
    results: Path, name: str, less: str = "bf16", *, every: bool = False
) -> dict[str, list[float]]:
    """Size -> gaps of ``name`` to ``less``, of equal seeds, where there are several.

    Args:
        results: folder of the reports.
        name: of a contender.
        less: bf16, or the contender that ``name`` is compared with, seed by seed.
        every: all pairs, also of seeds that other contenders lack and of the longer run.
    """
    sizes = (*GPT_SIZES, *GPT_LONGER) if every else GPT_SIZES
    found = {
        size: gaps_of_pairs(pairs_of(report, name, less, every=every))
        for size, report in of_sizes(results, sizes).items()
    }
    return {size: values for size, values in found.items() if len(values) > (0 if every else 1)}


def pooled_interval(by_size: Mapping[str, Sequence[float]]) -> intervals.Interval | None:
    """Of all sizes, every pair counted once."""
    return intervals.interval([v for values in by_size.values() for v in values])


LAST_POINTS = 10
"""Of the hundred training losses that a run keeps."""


def training_gaps(results: Path, name: str, less: str = "bf16") -> list[float]:
    """Last training losses of ``name`` less those of ``less``, the same pairs as pooled_gaps.

    Each batch is seen once, by the forward pass that is trained; of runs that kept them.
    """
    return [
        statistics.mean(mine["training"][-LAST_POINTS:])
        - statistics.mean(other["training"][-LAST_POINTS:])
        for report in of_sizes(results, list(pooled_gaps(results, name, less))).values()
        for mine, other in pairs_of(report, name, less)
        if mine.get("training") and other.get("training")
    ]


def pooled(results: Path) -> Lines:
    """The gap over all sizes, every pair counted once, and whether it shows equivalence."""
    names = in_order({n for gaps in gaps_by_size(results).values() for n in gaps})
    pairs = [(name, "bf16") for name in names]
    pairs += [(name, FP8) for name in ("default", "default int8-forward")]
    head = ["validation loss, all sizes", "pairs", "mean", "95 %: from", "to"]
    yield from header([*head, f"within ±{MARGIN}", "mean, last training losses"])
    for name, less in pairs:
        found = pooled_interval(pooled_gaps(results, name, less))
        if found is not None:
            last = statistics.mean(training_gaps(results, name, less))
            figures = [f"{value:+.4f}" for value in (found.mean, found.low, found.high)]
            words = [intervals.verdict(found, MARGIN), f"{last:+.4f}"]
            yield line([f"{shown(name)} less {less}", str(found.count), *figures, *words])
    yield from ("", dates_line(results, map(file_of, of_sizes(results))))


def pooled_words(results: Path) -> Lines:
    """The pooled gaps of those that a reader chooses among, one sentence."""
    parts = []
    sizes: dict[str, None] = {}
    for name in ("default", "default int8-forward", FP8, "fast"):
        by_size = pooled_gaps(results, name)
        found = pooled_interval(by_size)
        if found is not None:
            sizes |= dict.fromkeys(by_size)
            words = f"{found.count} pairs: {intervals.verdict(found, MARGIN)}"
            parts.append(f"{name} {found.mean:+.3f} {ends_of(found, 3)} ({words})")
    yield (
        f"*GPTs of {', '.join(sizes)}: validation loss less bf16's, pairs of equal seeds pooled, "
        f"mean [95 % interval] and whether it is equivalent within {MARGIN}: {'; '.join(parts)}.*"
    )


# ---- steps and time to a loss ----


def gaps_along(report: Report, name: str) -> dict[int, list[float]]:
    """Step -> validation loss of ``name`` less bf16's there, of every equal seed."""
    out: dict[int, list[float]] = {}
    for mine, plain in pairs_of(report, name):
        for (step, loss), (_, least) in zip(mine["curve"], plain["curve"], strict=True):
            out.setdefault(step, []).append(loss - least)
    return out


def decided(results: Path, size: str) -> Lines:
    """Of one size: the gap at the end and on the way, the test of equivalence, time to a loss."""
    report = of_sizes(results, [size]).get(size)
    if report is None:
        yield "*Planned, not run.*"
        return
    last = report["settings"]["steps"]
    head = ["", "pairs", "loss less bf16's [95 %]", "p", f"within ±{MARGIN}"]
    head += ["at a quarter", "at half", "at three quarters"]
    yield from header([*head, "step, of bf16's", "time to its loss, of bf16's"])
    runs, ratios = runs_by_seed(report), step_ratios(results, size)
    losses = [run["validation_loss"] for run in runs.get("bf16", {}).values()]
    yield line(["bf16's loss, ± deviation", str(len(losses)), plus_minus(losses, 4, ""), *[""] * 7])
    for name in in_order(runs):
        along = gaps_along(report, name)
        values = along.get(last, [])
        if not values:
            continue
        p = intervals.tost(values, MARGIN)
        gap = interval_words(values).rpartition(" (")[0]
        found = intervals.verdict(intervals.interval(values), MARGIN)
        cells = [shown(name), str(len(values)), gap, "" if p is None else f"{p:.3f}", found]
        for share in (0.25, 0.5, 0.75):
            nearest = min(along, key=lambda step: abs(step - share * last))
            cells.append(f"{statistics.mean(along[nearest]):+.4f}")
        of_steps, _ = shares_of_steps(report, name)
        ratio = ratios.get(name)
        cells.append("" if ratio is None else f"{ratio:.2f}")
        if ratio is None:
            cells.append("")
        else:
            cells.append(f"below {ratio:.2f}" if of_steps is None else f"{ratio / of_steps:.2f}")
        yield line(cells)
    text = report["text"]
    yield ""
    yield (
        f"*{next(_size_heads({size: report}))}, {last} steps, {text['epochs']:.2f} passes over "
        f"{text['training']:,} tokens of {len(text['packages'])} packages "
        f"({', '.join(list(text['packages'])[:8])}, …); validation on "
        f"{report['settings']['size']['validation_batches']} batches.*"
    )
    yield from ("", dates_line(results, [file_of(size)]))


def tokens_of(report: Report) -> int:
    """Tokens of a step."""
    settings = report["settings"]
    size = settings["size"]
    return int(size["batch"] * size["context"] * settings.get("accumulate", 1))


def steps_to(curve: Sequence[tuple[int, float]], loss: float) -> float | None:
    """Step at which a falling curve first has ``loss``, between its points by a line; None: never.

    Source: of a validation curve ``[(step, loss), ...]`` as bench_gpt.py writes it.
    """
    for (step, before), (later, after) in pairwise(curve):
        if after <= loss:
            share = (before - loss) / (before - after) if before > after else 0.0
            return step + (later - step) * max(0.0, share)
    return None


def shares_of_steps(report: Report, name: str) -> tuple[float | None, list[float | None]]:
    """Share of bf16's steps after which bf16 has the contender's last loss; None: never.

    By the mean curve and loss of the seeds that both have, and seed by seed.
    """
    pairs = pairs_of(report, name)

    def share(pairs: Sequence[tuple[Report, Report]]) -> float | None:
        curves = zip(*(plain["curve"] for _, plain in pairs), strict=True)
        mean = [(points[0][0], statistics.mean(loss for _, loss in points)) for points in curves]
        found = steps_to(mean, statistics.mean(mine["validation_loss"] for mine, _ in pairs))
        return None if found is None else found / report["settings"]["steps"]

    return share(pairs), [share([pair]) for pair in pairs]


def _share(value: float | None) -> str:
    return ">1" if value is None else f"{value:.2f}"


def to_loss(results: Path) -> Lines:
    """Share of bf16's steps after which bf16 has each contender's last loss."""
    found = of_sizes(results)
    yield from header(["share of bf16's steps to the same loss", *_size_heads(found)])
    for name in ("default int8-forward", "default", FP8, "fast"):
        shares = (
            _share(shares_of_steps(report, name)[0]) if pairs_of(report, name) else ""
            for report in found.values()
        )
        yield line([name, *shares])
    yield from ("", dates_line(results, map(file_of, found)))


def step_ratios(results: Path, size: str) -> dict[str, float]:
    """Contender -> its step's time over bf16's, of reports of the same model with times."""
    out = {}
    for report in reports_of(results, STEP_REPORTS.get(size, ())).values():
        timed = runs_by_seed(report)
        for contender, runs in timed.items():
            ratios = [run["step_ms"] / timed["bf16"][seed]["step_ms"] for seed, run in runs.items()
                      if "step_ms" in run and seed in timed["bf16"]]  # fmt: skip
            if ratios and contender != "bf16":
                out[contender] = statistics.mean(ratios)
    return out


def to_loss_words(results: Path, *words: str) -> Lines:
    """One sentence: where bf16 has the last loss of a contender, by size."""
    name = " ".join(words)
    found = {s: r for s, r in of_sizes(results).items() if pairs_of(r, name)}
    shares = [_share(shares_of_steps(report, name)[0]) for report in found.values()]
    parts = zip(shares, _size_heads(found), strict=True)
    listed = ", ".join(f"{share} ({head})" for share, head in parts)
    yield f"*GPTs on text: bf16 has `{name}`'s last loss after this share of its steps: {listed}.*"


# ---- dates, figures ----


def days_of(report: Report) -> list[str]:
    """First and last day of a report's figures; one where they are of one day, none: not dated."""
    parts = [report, *(part for part in report.values() if isinstance(part, Mapping))]
    days = [str(part["date"])[:10] for part in parts if "date" in part]
    runs = report.get("runs", {})
    days += [run["date"] for run in runs.values() if isinstance(run, Mapping) and "date" in run]
    return sorted({min(days), max(days)}) if days else []


def dates_line(results: Path, names: Iterable[str]) -> str:
    """When each report was made, and on which GPU: of tables that put several side by side."""
    parts = []
    for name in dict.fromkeys(names):
        report = report_of(results, name)
        days = " to ".join(days_of(report)) or "not dated"
        maker, _, gpu = report.get("device", "").partition(" ")
        where = f" ({gpu.split()[0]})" if maker == "NVIDIA" else ""
        parts.append(f"{name.removesuffix('.json')} {days}{where}")
    return f"*Measured: {', '.join(parts)}.*"
