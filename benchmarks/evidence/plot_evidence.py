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

import plot
from evidence import RESULTS, ROOT, speeds
from evidence import evidence_tables as tables
from evidence.evidence_tables import shown
from plot import FP8, ON_ANY, PLAIN, label, plt, save


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
    axes.set_title(f"{report['settings']['table']}: {task}", fontsize=10)
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


def plot_speeds(results: Path, path: Path) -> None:
    """The README's figure."""
    plot.plot_speeds(
        {
            row.model: {
                name: (ratio.speed, ratio.peak)
                for name, ratio in zip(plot.CONTENDERS, (row.graphs, row.fp8, row.hot), strict=True)
                if ratio
            }
            for row in speeds.rows(results)
        },
        path,
    )


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


def plot_all(results: Path, out: Path) -> list[str]:
    """Draw the figures whose reports are there, and return the names of missing reports."""
    trainings = ("training", "ablations", "finetune", "bert")
    figures: dict[str, Callable[[Mapping[str, Any]], object]] = {
        "gpu-check": lambda report: plot.plot_breakdown(
            report["bench_backward"], out / "breakdown.svg"
        ),
        **dict.fromkeys(trainings, lambda report: plot_trainings(report, out)),
        "cuda-rivals-h100": lambda _: plot_speeds(results, out / "speed.svg"),
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
