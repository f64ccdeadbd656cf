"""Draw the figures of the pages from the reports, into docs/img.

python -m benchmarks.evidence.plot_evidence [--out FOLDER] [--results FOLDER]
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from evidence import RESULTS, ROOT, several_tables, speeds
from evidence import evidence_tables as tables
from evidence.evidence_tables import shown

matplotlib.use("Agg")
matplotlib.rcdefaults()  # not the user's: the same report gives the same file
matplotlib.rcParams["svg.hashsalt"] = "hotcore"
matplotlib.rcParams["svg.fonttype"] = "none"  # text, not its outlines: half of the file
matplotlib.rcParams["axes.spines.top"] = matplotlib.rcParams["axes.spines.right"] = False
import matplotlib.pyplot as plt  # noqa: E402  (after the backend)

STAGES = {
    "product g_x": "#4477aa",
    "product g_w": "#66ccee",
    "quantise g_y, g_b": "#ee6677",
    "quantise w": "#ccbb44",
    "unpack x": "#aa3377",
    "between kernels": "#bbbbbb",
}
PLAIN, FP8 = "#888888", "#ee8833"
ON_ANY = "#7a7a7a"
"""Text and lines, legible on white and on GitHub's dark page."""
CONTENDERS = {
    "bf16 with CUDA graphs": (PLAIN, "s"),
    "FP8 (torchao)": (FP8, "D"),
    "HOT": ("#4488cc", "o"),
}
"""Contender -> colour and marker."""


def label(
    axes: Any, title: str = "", x: str = "", y: str = "", columns: int = 0, **legend: Any
) -> None:
    """Title, labels, frame and a legend of ``columns``, read on a light and on a dark page."""
    axes.set_title(title, fontsize=10, color=ON_ANY)
    axes.set_xlabel(x, color=ON_ANY)
    axes.set_ylabel(y, color=ON_ANY)
    axes.tick_params(colors=ON_ANY)
    for spine in axes.spines.values():
        spine.set_color(ON_ANY)
    if columns:
        options = {"fontsize": 8, "frameon": False, "labelcolor": ON_ANY, "ncols": columns}
        axes.legend(**options | legend)


def save(figure: Any, path: Path, transparent: bool = True) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = {"Date": None} if path.suffix == ".svg" else None
    figure.savefig(path, dpi=150, metadata=metadata, transparent=transparent)
    plt.close(figure)
    print(f"written: {path}")


def mean_curve(runs: Mapping[Any, Mapping[str, Any]]) -> dict[int, float]:
    """Step -> mean loss of the seeds that kept their curves."""
    by_step = zip(*(run["curve"] for run in runs.values() if "curve" in run), strict=True)
    return {points[0][0]: statistics.mean(loss for _, loss in points) for points in by_step}


def plot_trainings(report: Mapping[str, Any], folder: Path) -> None:
    """Draw every task of a report: curves of the rivals, differences of the other tables."""
    table = report["settings"]["table"]
    for task in tables.tasks_of(report):
        if table == "rivals":
            plot_training(report, task, folder / f"training-{task}.svg")
        else:
            plot_differences(report, task, folder / f"{table}-{task}.svg")


def mean_loss(runs: Mapping[str, Mapping[str, Any]]) -> float:
    """Mean over the seeds, infinite if one diverged."""
    return statistics.mean(run.get("val_loss", math.inf) for run in runs.values())


def plot_training(report: Mapping[str, Any], task: str, path: Path) -> None:
    """Draw the mean learning curve of every method, with a band over the seeds."""
    figure, axes = plt.subplots(figsize=(9, 5.5), layout="constrained")
    by_loss = sorted(tables.of_task(report, task).items(), key=lambda item: mean_loss(item[1]))
    for index, (method, runs) in enumerate(by_loss):
        curves = [run["curve"] for run in runs.values() if "curve" in run]
        if not curves:
            continue
        steps = [step for step, _ in curves[0]]
        values = [[loss for _, loss in points] for points in zip(*curves, strict=True)]
        plain = method == "fp32"
        color = "black" if plain else plt.get_cmap("tab20")(index % 20)
        label = f"{method}  {mean_loss(runs):.3f}"
        means = list(map(statistics.mean, values))
        axes.plot(steps, means, "--" if plain else "-", color=color, lw=1.3, label=label)
        ends = list(map(min, values)), list(map(max, values))
        axes.fill_between(steps, *ends, color=color, alpha=0.08)
    axes.set_yscale("log")
    axes.set(xlabel="step", ylabel="validation loss")
    axes.set_title(f"{task}: mean over seeds, band from lowest to highest", fontsize=10)
    axes.legend(fontsize=7, ncol=2)
    save(figure, path, transparent=False)


def plot_differences(report: Mapping[str, Any], task: str, path: Path) -> None:
    """Draw every method's difference to fp32: the mean and each seed."""
    gaps = {name: tables.differences(report, task, name) for name in tables.of_task(report, task)}
    rows = {n: values for n, values in gaps.items() if values and math.isfinite(sum(values))}
    lacking = [shown(name) for name in gaps if name not in rows]
    worst_first = sorted(rows, key=lambda name: -statistics.mean(rows[name]))
    figure, axes = plt.subplots(figsize=(8, 1.2 + 0.23 * len(rows)), layout="constrained")
    for place, name in enumerate(worst_first):
        color = "black" if name == "fp32" else "#4477aa"
        axes.plot(rows[name], [place] * len(rows[name]), ".", color=color, alpha=0.4)
        axes.plot(statistics.mean(rows[name]), place, "D", color=color, markersize=5)
    axes.set_yticks(range(len(rows)), [shown(name) for name in worst_first], fontsize=8)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_xscale("symlog", linthresh=0.05)
    axes.set_xlabel("validation loss less fp32's of the same seed; dots: seeds")
    words = f"; diverged or without fp32's seed: {', '.join(lacking)}" if lacking else ""
    axes.set_title(f"{report['settings']['table']}: {task}{words}", fontsize=10)
    save(figure, path, transparent=False)


def plot_gradients(report: Mapping[str, Any], path: Path) -> None:
    """Draw the error of g_w against cost and bytes, its parts, and its course over the run."""
    tasks = report["settings"]["tasks"]
    size = {"figsize": (17, 3.9 * len(tasks)), "layout": "constrained", "squeeze": False}
    figure, grid = plt.subplots(len(tasks), 4, **size)
    every = dict.fromkeys(name for task in tasks for name in tables.methods_of(report, task))
    colors = {name: plt.get_cmap("tab20")(i % 20) for i, name in enumerate(every)}
    for row, task in zip(grid, tasks, strict=True):
        of = functools.partial(tables.over_layers, report, task)
        names = tables.methods_of(report, task)
        labels = ("bit operations of backward, of full precision's", "bytes kept a value of x")
        for axes, key, title in zip(row[:2], ("cost", "bytes"), labels, strict=True):
            for name in names:
                at, error = of(None, name, key), of(None, name, "gw", "error")
                filled = of(None, name, "gw", "noise") > 0.9 * error
                fill = colors[name] if filled else "none"
                axes.plot(at, error, "o", color=colors[name], ms=7, mfc=fill)
                axes.annotate(shown(name), (at, error), (4, 3),
                              textcoords="offset points", fontsize=7)  # fmt: skip
            axes.set(xscale="log", yscale="log", xlabel=title, ylabel="relative error of g_w")
            axes.margins(x=0.25)
        row[1].set_xticks([0.25, 0.5, 1, 2, 4], ["1/4", "1/2", "1", "2", "4"])
        row[1].minorticks_off()
        row[0].set_title(f"{task}: filled: noise alone; hollow: biased", fontsize=9)
        for offset, value, color in ((0.2, "noise", PLAIN), (-0.2, "bias", "#cc3311")):
            widths = [of(None, name, "gw", value) for name in names]
            places = [place + offset for place in range(len(names))]
            row[2].barh(places, widths, 0.38, label=value, color=color)
        row[2].set_yticks(range(len(names)), [shown(name) for name in names], fontsize=7)
        row[2].set_xlabel("of the norm of g_w")
        row[2].legend(fontsize=7)
        steps = report["settings"]["at"]
        for name in names:
            values = [of(step, name, "gw", "error") for step in steps]
            row[3].plot(steps, values, marker=".", color=colors[name], label=shown(name), lw=1)
        noise = [tables.batch_noise_of(report, task, step) for step in steps]
        row[3].plot(steps, noise, "k--", label="other batches", lw=1.5)
        row[3].set(yscale="log", xlabel="step", ylabel="relative error of g_w")
        row[3].legend(fontsize=6, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    save(figure, path, transparent=False)


def plot_breakdown(report: Mapping[str, Any], path: Path) -> None:
    """One bar for each layer and recipe, microseconds by stage."""
    bars = {
        f"{group} {layer}, {recipe}": found["stages"]
        for group, layers in report["stages"].items()
        for layer, entry in layers.items()
        for recipe, found in entry["recipes"].items()
    }
    figure, axes = plt.subplots(figsize=(8, 1.4 + 0.28 * len(bars)), layout="constrained")
    left = [0.0] * len(bars)
    for stage, color in STAGES.items():
        widths = [stages[stage] for stages in bars.values()]
        axes.barh(list(bars), widths, left=left, label=stage, color=color)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelsize=8)
    below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.22)}
    title = f"Where the time goes, {report['device']}"
    label(axes, title, "µs of one backward", columns=3, **below)
    save(figure, path)


def plot_speeds(results: Path, path: Path) -> None:
    """Draw speed and peak memory beside compiled bf16: the README's figure."""
    rows = {
        row.model: {
            name: ratio
            for name, ratio in zip(CONTENDERS, (row.graphs, row.fp8, row.hot), strict=True)
            if ratio
        }
        for row in speeds.rows(results)
    }
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(5.2, 1.2 + 0.34 * len(rows)), layout="constrained", sharey=True
    )
    for axes, part in ((left, 0), (right, 1)):
        axes.axvline(1, color=ON_ANY, linewidth=1.5, label="compiled bf16 = 1")
        for name, (color, mark) in CONTENDERS.items():
            places = [place for place, ratios in enumerate(rows.values()) if name in ratios]
            values = [ratios[name][part] for ratios in rows.values() if name in ratios]
            axes.plot(values, places, mark, color=color, markersize=8, label=name)
        axes.grid(axis="y", color=ON_ANY, alpha=0.25)
        axes.margins(x=0.14)
        label(axes)
        axes.tick_params(labelsize=11, length=0)
        axes.xaxis.set_major_locator(plt.MultipleLocator(0.2))
    left.set_yticks(range(len(rows)), rows)
    left.invert_yaxis()
    left.set_title("speed (more is better)", fontsize=11, color=ON_ANY)
    right.set_title("peak (less is better)", fontsize=11, color=ON_ANY)
    figure.legend(
        *left.get_legend_handles_labels(), fontsize=11, frameon=False, labelcolor=ON_ANY,
        ncols=2, loc="outside lower center", handletextpad=0.4, columnspacing=1.2,
    )  # fmt: skip
    save(figure, path)


CURVES = {
    "bf16": (PLAIN, "-"),
    "FP8 tensorwise": (FP8, "--"),
    "default int8-forward": ("#4488cc", "-"),
}
"""Contender -> colour and line."""
TIMED = {"91M": "91M parameters, H200", "10M-20": "10M parameters, 20 tokens each, H100"}


def plot_loss_against_time(results: Path, path: Path) -> None:
    """Draw validation loss against time, mean of the seeds.

    STEP_REPORTS names the report with step times of the same model.
    """
    figure, grid = plt.subplots(len(TIMED), 1, figsize=(5.2, 5.6), layout="constrained")
    for axes, (size, title) in zip(grid, TIMED.items(), strict=True):
        report = tables.of_sizes(results, [size])[size]
        timed = tables.report_of(results, tables.STEP_REPORTS[size][-1])
        for name, (color, style) in CURVES.items():
            times = [run["step_ms"] for run in tables.runs_by_seed(timed).get(name, {}).values()]
            if not times:
                continue
            runs = [mine for mine, _ in tables.pairs_of(report, name)]
            curve = mean_curve(dict(enumerate(runs)))
            seconds = [step * statistics.mean(times) / 1e3 for step in curve]
            words = "HOT, 8-bit forward" if name.startswith("default") else name.split()[0]
            axes.plot(seconds, curve.values(), style, color=color, linewidth=2, label=words)
        last = report["settings"]["steps"]
        axes.set_ylim(min(curve.values()) - 0.05, curve[sorted(curve)[len(curve) // 4]])
        axes.set_xlim(left=0.15 * last * statistics.mean(times) / 1e3)
        label(axes, title, "seconds", "validation loss", columns=1)
        for text in (axes.title, axes.xaxis.label, axes.yaxis.label):
            text.set_fontsize(11)
        axes.tick_params(labelsize=11)
        axes.legend(fontsize=11, frameon=False, labelcolor=ON_ANY)
    save(figure, path)


HOT = "#4488cc"
BESIDE = {
    "products and forward": {
        "INT8 product": ("#66bbdd", "v"),
        "HOT forward": (HOT, "o"),
        "bf16 product": (PLAIN, "s"),
        "FP8 product": (FP8, "D"),
    },
    "backward": {"HOT backward": (HOT, "o"), "bf16 backward": (PLAIN, "s")},
}
"""Part of a layer -> call of bench_shared_gpu.py -> colour and marker."""


def plot_shared(report: Mapping[str, Any], path: Path) -> None:
    """Draw times beside a kernel on S multiprocessors: median and range over the layers."""
    figure, grid = plt.subplots(1, 2, figsize=(7.6, 3.9), layout="constrained", sharey=True)
    least = report["least"]
    held = list(map(int, least))
    for axes, (title, calls) in zip(grid, BESIDE.items(), strict=True):
        line = {"color": ON_ANY, "lw": 1.5, "label": "SMs / (SMs - S)"}
        axes.plot([0, *held], [1, *least.values()], "--", **line)
        for place, (name, (color, mark)) in enumerate(calls.items()):
            places = [count + 1.5 * (place - (len(calls) - 1) / 2) for count in held]
            layers = [
                [entry["rows"][name]["of alone"][count] for entry in report["layers"].values()]
                for count in least
            ]
            axes.vlines(places, list(map(min, layers)), list(map(max, layers)), color, lw=2)
            axes.plot(places, list(map(statistics.median, layers)), mark, color=color, label=name)
        axes.grid(axis="y", color=ON_ANY, alpha=0.25)
        axes.set_xticks([0, *held])
        below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.17), "fontsize": 10}
        label(axes, title, "multiprocessors held (S)", columns=2, **below)
    grid[0].set_ylabel("time, of the time alone")
    grid[0].set_ylim(bottom=1)
    save(figure, path)


WIRE = {
    "bf16": ("bf16", PLAIN, "s", 11),
    "FP8 tensorwise": ("FP8 (torchao)", FP8, "D", 11),
    "FP8 tensorwise, gathered in FP8": ("FP8, weights gathered in FP8", FP8, "<", 8),
    "default int8-forward": ("HOT, 8-bit forward", HOT, "o", 6),
    "default int8-forward, INT8 gradients": ("HOT, gradients in INT8", HOT, "v", 8),
    "default int8-forward, INT8 weights and gradients": ("HOT, both in INT8", HOT, "<", 8),
}
"""Contender of bench_fsdp.py -> words, colour, marker, and size; equal speeds overlap."""


def plot_wire(results: Path, path: Path) -> None:
    """Draw Llama-3-8B's tokens a second of a GPU against the bytes that it sends in a step."""
    figure, grid = plt.subplots(
        1, 2, figsize=(7.6, 4.2), layout="constrained", sharex=True, sharey=True
    )
    settings, legend = several_tables.settings_of(results), {}
    for setting in (name for name in settings if name.startswith("llama_8b")):
        rows = {name: row for name, row in settings[setting].items() if "step" in row}
        if not rows:
            continue
        peers = setting.removesuffix(several_tables.NO_PEER)
        axes = grid[int(peers != setting)]
        for name, (words, color, mark, size) in WIRE.items():
            if name in rows:
                at = several_tables.bytes_of(rows[name]) / 1e9, rows[name]["per_second_per_gpu"]
                style = {"color": color, "ms": size, "mfc": "none" if size > 10 else color}
                (legend[words],) = axes.plot(*at, mark, mew=2, **style)
        slowest = min(rows.values(), key=lambda row: row["per_second_per_gpu"])
        at = several_tables.bytes_of(slowest) / 1e9, slowest["per_second_per_gpu"]
        style = {"textcoords": "offset points", "ha": "center", "fontsize": 9, "color": ON_ANY}
        axes.annotate(peers.split(", ", 1)[1], at, (0, -20), **style)
        if several_tables.predictions(settings, setting):
            plain, with_peers = rows["bf16"], settings[peers]
            compute = several_tables.compute_ms(with_peers["bf16"])
            wire = several_tables.wire_of(with_peers, rows)
            sent = [several_tables.bytes_of(plain) * part / 20 for part in range(21)]
            tokens = plain["per_second_per_gpu"] * plain["step"]["median_ms"]
            rates = [tokens / several_tables.predicted_ms(compute, n, *wire) for n in sent]
            (legend["model of the wire, bf16's arithmetic"],) = axes.plot(
                [n / 1e9 for n in sent], rates, "--", color=ON_ANY, lw=1.2
            )
    for axes, title in zip(grid, ("with peer access", "without peer access"), strict=True):
        axes.grid(color=ON_ANY, alpha=0.25)
        label(axes, title, "GB that a GPU sends in a step")
    grid[0].set_ylabel("tokens a second, a GPU")
    grid[0].yaxis.set_major_formatter("{x:,.0f}")
    grid[0].margins(x=0.2, y=0.1)
    grid[0].set(xlim=(0, None), ylim=(0, None))
    figure.legend(
        legend.values(), legend, fontsize=10, frameon=False, labelcolor=ON_ANY, ncols=2,
        loc="outside lower center",
    )  # fmt: skip
    save(figure, path)


def plot_all(results: Path, out: Path) -> list[str]:
    """Draw the figures whose reports are there, and return the names of missing reports."""
    trainings = ("training", "ablations", "finetune", "bert")
    figures: dict[str, Callable[[Mapping[str, Any]], object]] = {
        "gpu-check": lambda report: plot_breakdown(report["bench_backward"], out / "breakdown.svg"),
        **dict.fromkeys(trainings, lambda report: plot_trainings(report, out)),
        "cuda-rivals-h100": lambda _: plot_speeds(results, out / "speed.svg"),
        "shared-gpu": lambda report: plot_shared(report, out / "shared-gpu.svg"),
        "cuda-fsdp": lambda _: plot_wire(results, out / "several-gpus.svg"),
        "cuda-gpt-10M-20": lambda _: plot_loss_against_time(results, out / "loss-time.svg"),
    }
    for name, draw in figures.items():
        if (results / f"{name}.json").exists():
            draw(tables.report_of(results, f"{name}.json"))
    return [f"{name}.json" for name in figures if not (results / f"{name}.json").exists()]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs/img")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    for name in plot_all(args.results, args.out):
        print(f"no figure: {args.results / name} is not there")


if __name__ == "__main__":
    main()
