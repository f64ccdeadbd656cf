"""Tables for doc_tables.py: trainings, gradients, GPTs by size.

Each function takes the folder of reports, and raises FileNotFoundError for a missing one.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

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
"""Current names of runs whose report names a removed recipe."""
LEFT_OUT = re.compile(
    r"\bcompact\b|\bone code\b|\brht\d|\btoken[248]\b|, saved\b|^(feature_sums|sampled_tokens|"
    r"(requantize_)?rotated?|token_(amax|contributions|rows|transpose)|undo_transforms)_kernel"
)
"""Rows that no table shows, because the measured feature was removed (docs/dev/tried.md)."""
GPT_SIZES = ("10M", "25M", "91M", "311M")
GPT_LONGER = ("10M-long", "10M-20", "25M-20")
"""Sizes that were trained on more text."""

Make = Callable[..., Iterator[str]]


def report_of(results: Path, name: str) -> Report:
    """Read a report without the rows in LEFT_OUT."""

    def value_of(value: Any) -> Any:
        if not isinstance(value, list):
            return value
        return [one for one in value if not (isinstance(one, str) and LEFT_OUT.search(one))]

    def shown(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        return {key: value_of(value) for key, value in pairs if not LEFT_OUT.search(key)}

    report: Report = json.loads((results / name).read_text(), object_pairs_hook=shown)
    return report


def reports_of(results: Path, names: Iterable[str]) -> dict[str, Report]:
    """Read the reports that exist."""
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
    """Split words into names between semicolons."""
    return [name.strip() for name in " ".join(words).split(";")]


def plus_minus(values: Sequence[float], digits: int = 3, sign: str = "+") -> str:
    """Format the mean, with the standard deviation of several values; no values give no text."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return "diverged" if values else ""
    mean = f"{statistics.mean(finite):{sign}.{digits}f}"
    if len(finite) < len(values):
        mean += f", {len(values) - len(finite)} diverged"
    return mean if len(finite) < 2 else f"{mean} ± {statistics.stdev(finite):.{digits}f}"


# ---- trainings ----

Columns = Sequence[tuple[Report, str]]
"""Pairs of a report and one of its tasks."""


def of_task(report: Report, task: str) -> dict[str, dict[str, Report]]:
    """Return the runs of a task by method and seed."""
    out: dict[str, dict[str, Report]] = {}
    for key, run in report["runs"].items():
        name, method, seed = key.split("/")
        if name == task:
            out.setdefault(method, {})[seed] = run
    return out


def differences(report: Report, task: str, method: str) -> list[float]:
    """Return validation losses less fp32's of the same seed; infinite if diverged."""
    runs = of_task(report, task)
    return [
        run.get("val_loss", math.inf) - partner["val_loss"]
        for seed, run in runs.get(method, {}).items()
        if "val_loss" in (partner := runs.get("fp32", {}).get(seed, {}))
    ]


def trainings(results: Path, *files: str) -> Lines:
    """Yield validation losses less fp32's by task, as mean ± deviation over paired seeds."""
    reports, columns = _columns(results, files)
    yield from training_lines(columns)
    yield from _left_out(reports)
    yield from ("", dates_line(results, reports))


def _columns(results: Path, files: Iterable[str]) -> tuple[dict[str, Report], Columns]:
    """Read reports, and list their tasks."""
    reports = {name: report_of(results, name) for name in files}
    return reports, [(report, task) for report in reports.values() for task in tasks_of(report)]


def _left_out(reports: Mapping[str, Report]) -> Lines:
    """Yield the methods without rows, and why; LoRA is for another table."""
    for name, report in reports.items():
        for method, why in report["left out"].items():
            if method != "lora":
                yield from ("", f"*{name}: `{method}` left out: {' '.join(why.split())}*")


def accuracies(results: Path, *files: str) -> Lines:
    """Yield each method's accuracy in per cent, and its points less fp32's of the same seeds."""
    reports, tasks = _columns(results, files)
    columns = [
        {
            method: {seed: 100 * run.get("val_accuracy", math.nan) for seed, run in runs.items()}
            for method, runs in of_task(report, task).items()
        }
        for report, task in tasks
    ]
    titles = (TITLES.get(task, task).partition(",")[0] for _, task in tasks)
    yield from header(["", *(w for title in titles for w in (title, "less fp32's [95 %] (pairs)"))])
    for method in dict.fromkeys(method for runs in columns for method in runs):
        cells = [shown(method)]
        for mine, plain in ((runs.get(method, {}), runs.get("fp32", {})) for runs in columns):
            gaps = [value - plain[seed] for seed, value in mine.items() if seed in plain]
            cells.append(plus_minus([*mine.values()], 2, ""))
            cells.append("" if method == "fp32" else interval_words(gaps, 2))
        yield line(cells)
    yield from _left_out(reports)
    data = dict.fromkeys(report["settings"]["images"] for report in reports.values())
    yield from ("", f"*{'; '.join(data)}.*", "", dates_line(results, files))


def rows(results: Path, file: str, *words: str) -> Lines:
    """Yield the rows of some methods of one file, whose names are between semicolons."""
    yield from training_lines(_columns(results, [file])[1], names_in(words))
    yield from ("", dates_line(results, [file]))


def tasks_of(report: Report) -> list[str]:
    return list(dict.fromkeys(key.split("/")[0] for key in report["runs"]))


def gaps_of(columns: Columns) -> dict[str, list[list[float]]]:
    """Return each method's differences to fp32 by column, sorted by their mean."""
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
    """Yield column heads with the number of seeds of ``methods``, by default of all."""
    for report, task in columns:
        runs_of = of_task(report, task)
        counts = [len(runs) for name, runs in runs_of.items() if name in (methods or runs_of)]
        few, many = min(counts), max(counts)
        seeds = (
            f"{few} to {many} seeds" if few < many else "one seed" if many == 1 else f"{many} seeds"
        )
        yield f"{TITLES.get(task, task)}, {seeds}"


def training_lines(columns: Columns, names: Sequence[str] = ()) -> Lines:
    """Yield rows of the named methods, or fp32's losses and the rows of every method."""
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
    """Yield the layers at every point of a task, or at one step."""
    for key, point in report["points"].items():
        name, _, when = key.split("/")
        if name == task and step in (None, int(when)):
            yield from point["layers"].values()


def over_layers(report: Report, task: str, step: int | None, method: str, *path: str) -> float:
    """Average over layers, seeds and, for None, steps; errors by root mean square."""
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
    """Return the median over layers; the ratio is unbounded for a mean gradient near zero."""
    values = [layer["batch"] for layer in _layers(report, task, step)]
    return statistics.median(values) if values else float("nan")


def methods_of(report: Report, task: str) -> list[str]:
    return list(dict.fromkeys(m for layer in _layers(report, task, None) for m in layer["methods"]))


def gradient_quality(report: Report) -> Lines:
    """Yield errors of g_x and g_w, noise and bias of g_w by method, sorted by error of g_w."""
    tasks = report["settings"]["tasks"]
    measures = (("gx", "error"), ("gw", "error"), ("gw", "noise"), ("gw", "bias"))
    heads = [w for task in tasks for w in (f"{TITLES[task]}: g_x", "g_w", "noise", "bias")]
    yield from header(["", *heads, "cost", "bytes"])

    def column(method: str, *path: str) -> list[float]:
        """Return the figures of the tasks that the method has."""
        values = [over_layers(report, task, None, method, *path) for task in tasks]
        return [value for value in values if not math.isnan(value)]

    methods = dict.fromkeys(name for task in tasks for name in methods_of(report, task))
    for method in sorted(methods, key=lambda name: statistics.mean(column(name, "gw", "error"))):
        values = [over_layers(report, task, None, method, *m) for task in tasks for m in measures]
        cells = ["" if math.isnan(value) else f"{value:.3f}" for value in values]
        tail = [dict.fromkeys(f"{v:.2f}" for v in column(method, key)) for key in ("cost", "bytes")]
        yield line([shown(method), *cells, *map(", ".join, tail)])
    cells = [c for task in tasks for c in ("", f"{batch_noise_of(report, task):.2f}", "", "")]
    yield line(["other batches (median)", *cells, "", ""])


def hot_parts(layer: Report) -> tuple[float, float]:
    """Return the microseconds of all kernels, and of the products (bench_backward.cuda_stages)."""
    return sum(kernel["us"] for kernel in layer["kernels"]), layer["products together"]


# ---- GPTs by size ----

MARGIN = 0.01
"""Margin of equivalence with bf16 in nats, for the whole 95 % interval."""
FP8 = "FP8 tensorwise"
PLANNED: dict[str, tuple[str, ...]] = {"10M-20": (), "25M-20": ("fast",)}
"""Sizes in which a seed counts only if every contender has it, and contenders whose plan has fewer
seeds (docs/dev/evidence.md)."""
STEP_REPORTS = {"91M": ("cuda-gpt.json", "cuda-gpt-forward.json")} | {
    size: (f"cuda-gpt-{size}.json",) for size in PLANNED
}
"""Reports with step times of the same model, by size."""


def file_of(size: str) -> str:
    return f"cuda-gpt-{size}.json"


def of_sizes(results: Path, sizes: Sequence[str] = (*GPT_SIZES, *GPT_LONGER)) -> dict[str, Report]:
    """Read the existing reports by size, with whole seeds only.

    Sizes without a plan may have contenders with a single run.
    """
    reports, out = reports_of(results, map(file_of, sizes)), {}
    for size in [size for size in sizes if file_of(size) in reports]:
        report = reports[file_of(size)]
        single = [name for name, runs in runs_by_seed(report).items() if len(runs) == 1]
        out[size] = {**report, "runs": in_whole_seeds(report["runs"], PLANNED.get(size, single))}
    return {size: report for size, report in out.items() if report["runs"]}


def in_whole_seeds(runs: Mapping[str, Report], fewer: Iterable[str] = ()) -> dict[str, Report]:
    """Select the runs of seeds that every contender has, except those with ``fewer`` seeds."""
    names = {key.rpartition("/")[0] for key in runs}.difference(fewer)
    keys = [key.rpartition("/") for key in runs]
    seeds = [seed for name, _, seed in keys if name in names]
    return {k: run for k, run in runs.items() if seeds.count(k.rpartition("/")[2]) == len(names)}


def runs_by_seed(report: Report) -> dict[str, dict[int, Report]]:
    """Return the runs of a bench_gpt.py report by contender and seed, seeds in their order."""
    out: dict[str, dict[int, Report]] = {}
    for key, run in report["runs"].items():
        name, _, seed = key.rpartition("/")
        out.setdefault(name, {})[int(seed)] = run
    return {name: dict(sorted(seeds.items())) for name, seeds in out.items()}


def pairs_of(report: Report, name: str, less: str = "bf16") -> list[tuple[Report, Report]]:
    """Pair the runs of two contenders by seed."""
    runs = runs_by_seed(report)
    mine, other = runs.get(name, {}), runs.get(less, {})
    return [(run, other[seed]) for seed, run in mine.items() if seed in other]


def gaps_of_pairs(pairs: Iterable[tuple[Report, Report]]) -> list[float]:
    """Return the differences of the last validation losses."""
    return [mine["validation_loss"] - other["validation_loss"] for mine, other in pairs]


def gaps_by_size(
    results: Path, sizes: Sequence[str] = GPT_SIZES
) -> dict[str, dict[str, list[float]]]:
    """Return losses less bf16's of equal seeds by size and contender; for bf16 its losses."""
    return {
        size: {
            name: gaps_of_pairs(pairs_of(report, name))
            if name != "bf16"
            else [run["validation_loss"] for run in runs.values()]
            for name, runs in runs_by_seed(report).items()
        }
        for size, report in of_sizes(results, sizes).items()
    }


def in_order(names: Iterable[str]) -> list[str]:
    """Sort HOT's recipes, best first and each with its 8-bit forward, then rivals; drop bf16."""
    every = set(names) - {"bf16"}
    recipes = ("default", "accurate", "int4", "fast", "paper")
    ordered = [n for r in recipes for n in (r, f"{r} int8-forward") if n in every]
    return [*ordered, *sorted(every.difference(ordered))]


def ends_of(interval: intervals.Interval, digits: int = 4) -> str:
    return f"[{interval.low:+.{digits}f}, {interval.high:+.{digits}f}]"


def interval_words(values: Sequence[float], digits: int = 4) -> str:
    """Format mean, Student's 95 % interval and count; no values give no text."""
    if not values:
        return ""
    interval = intervals.interval(values)
    ends = "" if interval is None else f" {ends_of(interval, digits)}"
    return f"{statistics.mean(values):+.{digits}f}{ends} ({len(values)})"


def _size_heads(reports: Mapping[str, Report]) -> Lines:
    for size, report in reports.items():
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


def half_width_words(values: Sequence[float]) -> str:
    """Mean ± half of its 95 % interval, without an interval for a single pair."""
    found = intervals.interval(values) if values else None
    mean = f"{statistics.mean(values):+.4f}" if values else ""
    return f"{mean} ± {(found.high - found.low) / 2:.4f}" if found else mean


def pooled_gaps(results: Path, name: str, less: str = "bf16") -> dict[str, list[float]]:
    """Return the gaps of ``name`` to ``less`` by size, for sizes with several equal seeds."""
    gaps = {
        size: gaps_of_pairs(pairs_of(report, name, less))
        for size, report in of_sizes(results, GPT_SIZES).items()
    }
    return {size: values for size, values in gaps.items() if len(values) > 1}


def pooled_interval(by_size: Mapping[str, Sequence[float]]) -> intervals.Interval | None:
    """Return the interval over all sizes, with equal weight for every pair."""
    return intervals.interval([v for values in by_size.values() for v in values])


LAST_POINTS = 10
"""Number of last training losses that are averaged, of a hundred that a run keeps."""


def training_gaps(results: Path, name: str, less: str = "bf16") -> list[float]:
    """Return last training losses of ``name`` less those of ``less``, for pooled_gaps' pairs.

    Each batch is seen once, by the trained forward pass. Runs without such losses are left out.
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
    """Yield one sentence with the pooled gaps of the main contenders."""
    parts = []
    sizes: dict[str, None] = {}
    for name in ("default", "default int8-forward", FP8, "fast"):
        by_size = pooled_gaps(results, name)
        interval = pooled_interval(by_size)
        if interval is not None:
            sizes |= dict.fromkeys(by_size)
            words = f"{interval.count} pairs: {intervals.verdict(interval, MARGIN)}"
            parts.append(f"{name} {interval.mean:+.3f} {ends_of(interval, 3)} ({words})")
    yield (
        f"*GPTs of {', '.join(sizes)}: validation loss less bf16's, pairs of equal seeds pooled, "
        f"mean [95 % interval] and whether it is equivalent within {MARGIN}: {'; '.join(parts)}.*"
    )


# ---- steps and time to a loss ----


def gaps_along(report: Report, name: str) -> dict[int, list[float]]:
    """Return the validation losses of ``name`` less bf16's by step, for every pair."""
    out: dict[int, list[float]] = {}
    for mine, plain in pairs_of(report, name):
        for (step, loss), (_, least) in zip(mine["curve"], plain["curve"], strict=True):
            out.setdefault(step, []).append(loss - least)
    return out


def decided(results: Path, size: str) -> Lines:
    """Yield one size's gaps at the end and during training, the test, and the time to a loss."""
    report = of_sizes(results, [size])[size]
    last = report["settings"]["steps"]
    head = ["", "pairs", "loss less bf16's [95 %]", "by seed", "p", f"within ±{MARGIN}"]
    head += ["at a quarter", "at half", "at three quarters"]
    yield from header([*head, "step, of bf16's", "time to its loss, of bf16's"])
    runs, ratios = runs_by_seed(report), step_ratios(results, size)
    losses = [run["validation_loss"] for run in runs.get("bf16", {}).values()]
    by_seed = ", ".join(f"{loss:.4f}" for loss in losses)
    loss = plus_minus(losses, 4, "")
    yield line(["bf16's loss, ± deviation", str(len(losses)), loss, by_seed, *[""] * 7])
    for name in in_order(runs):
        along = gaps_along(report, name)
        values = along.get(last, [])
        if not values:
            continue
        p = intervals.tost(values, MARGIN)
        gap = interval_words(values).rpartition(" (")[0]
        verdict = intervals.verdict(intervals.interval(values), MARGIN)
        by_seed = ", ".join(f"{value:+.4f}" for value in values)
        cells = [shown(name), str(len(values)), gap, by_seed]
        cells += ["" if p is None else f"{p:.3f}", verdict]
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
    """Return the tokens per step."""
    size = report["settings"]["size"]
    return int(size["batch"] * size["context"])


def steps_to(curve: Sequence[tuple[int, float]], loss: float) -> float | None:
    """Return the step at which a curve first reaches ``loss``, interpolated; None if never.

    ``curve`` is a validation curve ``[(step, loss), ...]`` of bench_gpt.py.
    """
    for (step, before), (later, after) in pairwise(curve):
        if after <= loss:
            share = (before - loss) / (before - after) if before > after else 0.0
            return step + (later - step) * max(0.0, share)
    return None


def shares_of_steps(report: Report, name: str) -> tuple[float | None, list[float | None]]:
    """Return the share of bf16's steps to the contender's last loss; None if never reached.

    The first result uses the mean curve and loss of common seeds, the list each seed.
    """
    pairs = pairs_of(report, name)

    def share(pairs: Sequence[tuple[Report, Report]]) -> float | None:
        curves = zip(*(plain["curve"] for _, plain in pairs), strict=True)
        mean = [(points[0][0], statistics.mean(loss for _, loss in points)) for points in curves]
        step = steps_to(mean, statistics.mean(mine["validation_loss"] for mine, _ in pairs))
        return None if step is None else step / report["settings"]["steps"]

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


def step_ratios(results: Path, size: str) -> dict[str, float]:
    """Return each contender's step time over bf16's, from reports of the same model."""
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
    """Yield one sentence: bf16's share of steps to a contender's last loss, by size."""
    name = " ".join(words)
    reports = {s: r for s, r in of_sizes(results).items() if pairs_of(r, name)}
    shares = [_share(shares_of_steps(report, name)[0]) for report in reports.values()]
    parts = zip(shares, _size_heads(reports), strict=True)
    listed = ", ".join(f"{share} ({head})" for share, head in parts)
    yield f"*GPTs on text: bf16 has `{name}`'s last loss after this share of its steps: {listed}.*"


# ---- dates, figures ----


def days_of(report: Report) -> list[str]:
    """Return the first and last day of a report's figures, one day if equal, none if undated.

    The report's own date, its last writing, counts if its rows and runs have none.
    """
    parts = [part for part in report.values() if isinstance(part, Mapping)]
    parts += [row for part in parts for row in part.values() if isinstance(row, Mapping)]
    dated = [part for part in parts if "date" in part] or [report]
    days = [str(part["date"])[:10] for part in dated if "date" in part]
    return sorted({min(days), max(days)}) if days else []


def dates_line(results: Path, names: Iterable[str]) -> str:
    """Format date and GPU of each report, for tables that combine several."""
    parts = []
    for name in dict.fromkeys(names):
        report = report_of(results, name)
        days = " to ".join(days_of(report)) or "not dated"
        maker, _, gpu = report.get("device", "").partition(" ")
        where = f" ({gpu.split()[0]})" if maker == "NVIDIA" else ""
        parts.append(f"{name.removesuffix('.json')} {days}{where}")
    return f"*Measured: {', '.join(parts)}.*"
