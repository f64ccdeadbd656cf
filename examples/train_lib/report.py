"""Reports of the runs: a table on the terminal, a plot as a PNG, all figures as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from .training import Result, Task

# A colour-blind safe set; the baseline is black and the others keep their colour in every plot.
COLOURS = {
    "fp32": "#222222",
    "default": "#0072b2",
    "fast": "#009e73",
    "paper": "#d55e00",
    "accurate": "#56b4e9",
}


def _colour(recipe: str) -> str:
    """Colour of the recipe; both forwards share it."""
    return COLOURS[recipe.removesuffix("+int8")]


def baseline_of(results: Sequence[Result], task: str) -> Result | None:
    """Return the fp32 run of ``task``, or None."""
    return next((r for r in results if r.task == task and r.recipe == "fp32"), None)


def _bytes(count: int, baseline: int | None) -> str:
    text = f"{count / 2**20:.2f} MiB"
    return text if not baseline else f"{text} {100 * count / baseline:5.1f}%"


def table(results: Sequence[Result]) -> str:
    """Format a table of all runs, each compared with the fp32 run of its task."""
    head = ["task", "recipe", "val loss", "vs fp32", "accuracy"]
    head += ["Linear saved", "all saved", "step"]
    rows: list[tuple[str, ...]] = []
    for r in results:
        base = baseline_of(results, r.task)
        rows.append(
            (
                r.task,
                r.recipe,
                f"{r.val_loss:.3f}",
                f"{r.val_loss - base.val_loss:+.3f}" if base else "-",
                f"{100 * r.val_accuracy:.1f}%",
                _bytes(r.linear_saved_bytes, base and base.linear_saved_bytes),
                _bytes(r.total_saved_bytes, base and base.total_saved_bytes),
                f"{r.step_ms:.1f} ms{'*' if r.busy else ''}",
            )
        )
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]

    def line(row: Sequence[str]) -> str:
        cells = [
            cell.ljust(width) if i < 2 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        return "  ".join(cells).rstrip()

    rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
    lines = [line(head), rule]
    for i, row in enumerate(rows):
        if i and row[0] != rows[i - 1][0]:
            lines.append(rule)
        lines.append(line(row))
    lines += [
        rule,
        "val loss: differences below 0.03 are seed noise.",
        "accuracy: of images (vit), of next characters (gpt).",
        "saved: bytes that a step keeps from forward to backward, without weights, by the blocks'",
        "Linear layers and by all operations.",
        "step: median time. These models are too small to gain time.",
        "Begin with default or default+int8; paper is the method as published.",
    ]
    if any(r.busy for r in results):
        lines.append("* Other processes were busy: repeat these times on an idle machine.")
    return "\n".join(lines)


def _spread(values: Sequence[float], gap: float) -> list[float]:
    """Return positions near ``values``, in the same order, at least ``gap`` apart."""
    order = sorted(range(len(values)), key=values.__getitem__)
    places = list(values)
    for _ in range(100):
        for low, high in pairwise(order):
            push = max(0.0, gap - (places[high] - places[low])) / 2
            places[low] -= push
            places[high] += push
    return places


def plot(results: Sequence[Result], tasks: Sequence[Task], path: Path) -> None:
    """Plot the validation loss, a panel per task with named curves, and the saved activations."""
    import matplotlib

    matplotlib.use("Agg")  # no display needed
    import matplotlib.pyplot as plt

    style: dict[str, object] = {"font.size": 10, "axes.edgecolor": "#888888"}
    style |= dict.fromkeys(("axes.spines.top", "axes.spines.right"), False)
    style |= dict.fromkeys(("xtick.color", "ytick.color"), "#444444")
    with plt.rc_context(style):
        figure, axes = plt.subplots(
            1, len(tasks) + 1, figsize=(6.2 * len(tasks) + 5, 4.4), layout="constrained"
        )
        _plot_saved(axes[-1], results, tasks)
        for axis, task in zip(axes[:-1], tasks, strict=True):
            runs = [r for r in results if r.task == task.name]
            for run in runs:
                x, y = zip(*run.curve, strict=True)
                axis.plot(
                    x,
                    y,
                    color=_colour(run.recipe),
                    linestyle="--" if run.recipe.endswith("+int8") else "-",
                    linewidth=2.4 if run.recipe == "fp32" else 1.7,
                    # The baseline is drawn below the others, so coinciding curves stay visible.
                    zorder=2 if run.recipe == "fp32" else 3,
                    solid_capstyle="round",
                )
            low = min(loss for r in runs for _, loss in r.curve)
            high = max(loss for r in runs for _, loss in r.curve)
            axis.set_ylim(low - 0.08 * (high - low), high + 0.05 * (high - low))
            ends = [r.curve[-1][1] for r in runs]
            places = _spread(ends, gap=0.062 * (high - low))
            for run, end, place in zip(runs, ends, places, strict=True):
                colour = _colour(run.recipe)
                axis.annotate(
                    f"{run.recipe}  {run.val_loss:.2f}",
                    xy=(run.steps, end),
                    xytext=(1.03, place),
                    textcoords=axis.get_yaxis_transform(),
                    color=colour,
                    fontweight="bold",
                    va="center",
                    annotation_clip=False,
                    arrowprops={"arrowstyle": "-", "color": colour, "lw": 0.6, "shrinkB": 1},
                )
            axis.set_xlim(0, max(r.steps for r in runs))
            axis.set_title(task.title, loc="left", fontweight="bold")
            axis.set_xlabel("step")
            axis.set_ylabel("validation loss (cross entropy)")
            axis.grid(axis="y", color="#dddddd", linewidth=0.7)
            axis.set_axisbelow(True)
        figure.savefig(path, dpi=150)
        plt.close(figure)


def _plot_saved(axis, results: Sequence[Result], tasks: Sequence[Task]) -> None:
    """Draw a bar of saved bytes for each run, grouped by task."""
    longest = max(r.linear_saved_bytes for r in results) / 2**20
    row = 0.0
    for task in tasks:
        axis.text(0, row, task.title, va="center", color="#444444")
        for r in (r for r in results if r.task == task.name):
            row += 1
            size, colour = r.linear_saved_bytes / 2**20, _colour(r.recipe)
            axis.barh(row, size, 0.7, color=colour, alpha=0.5 if "+" in r.recipe else 1)
            text = f"{r.recipe}  {size:.2f}"
            axis.text(size + 0.02 * longest, row, text, va="center", color=colour, weight="bold")
        row += 1.6
    axis.set_ylim(row - 0.6, -0.8)
    axis.set_yticks([])
    axis.set_xlim(0, 1.35 * longest)
    axis.set_title("Activations that Linear layers save", loc="left", fontweight="bold")
    axis.set_xlabel("MiB per step")


def write_json(results: Sequence[Result], about: dict[str, object], path: Path) -> None:
    """Write all figures of all runs, with the versions of the libraries."""
    content = {**about, "results": [r.to_json() for r in results]}
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
