"""Reports of the runs: a table on the terminal, the curves as a PNG, everything as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
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
    """That of the recipe, with either forward."""
    return COLOURS[recipe.removesuffix("+int8")]


def baseline_of(results: Sequence[Result], task: str) -> Result | None:
    """The fp32 run of ``task``, if there is one."""
    return next((r for r in results if r.task == task and r.recipe == "fp32"), None)


def _bytes(count: int, baseline: int | None) -> str:
    text = f"{count / 2**20:.2f} MiB"
    return text if not baseline else f"{text} {100 * count / baseline:5.1f}%"


def table(results: Sequence[Result]) -> str:
    """A table of all runs, each compared with the fp32 run of its task."""
    head = [
        "task",
        "recipe",
        "val loss",
        "vs fp32",
        "accuracy",
        "Linear saved",
        "all saved",
        "step",
    ]
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
                f"{r.step_ms:.1f} ms",
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
        "accuracy: of images (vit), of next characters (gpt).  step: median time.",
        "saved: what one step keeps from forward to backward, by the blocks' Linear layers and by",
        "all operations together; weights not counted.",
    ]
    return "\n".join(lines)


def _spread(wanted: Sequence[float], gap: float) -> list[float]:
    """Positions near ``wanted``, in the same order, at least ``gap`` apart."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    # Neighbours that are too close form a cluster, spaced evenly around its mean.
    clusters: list[list[int]] = []
    for i in order:
        clusters.append([i])
        while len(clusters) > 1:
            below, above = clusters[-2:]
            top = _lowest(wanted, below, gap) + gap * (len(below) - 1)
            if _lowest(wanted, above, gap) - top >= gap:
                break
            clusters[-2:] = [below + above]
    placed = [0.0] * len(wanted)
    for cluster in clusters:
        low = _lowest(wanted, cluster, gap)
        for place, i in enumerate(cluster):
            placed[i] = low + gap * place
    return placed


def _lowest(wanted: Sequence[float], cluster: Sequence[int], gap: float) -> float:
    mean = sum(wanted[i] for i in cluster) / len(cluster)
    return mean - gap * (len(cluster) - 1) / 2


def plot(results: Sequence[Result], tasks: Sequence[Task], path: Path) -> None:
    """Validation loss during training, a panel for each task, every curve named at its end."""
    import matplotlib

    matplotlib.use("Agg")  # no display needed
    import matplotlib.pyplot as plt

    style = {
        "font.size": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": "#888888",
        "xtick.color": "#444444",
        "ytick.color": "#444444",
    }
    with plt.rc_context(style):
        figure, axes = plt.subplots(
            1, len(tasks), figsize=(6.2 * len(tasks), 4.4), squeeze=False, layout="constrained"
        )
        for axis, task in zip(axes[0], tasks, strict=True):
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
                axis.annotate(
                    f"{run.recipe}  {run.val_loss:.2f}",
                    xy=(run.steps, end),
                    xytext=(1.03, place),
                    textcoords=axis.get_yaxis_transform(),
                    color=_colour(run.recipe),
                    fontweight="bold",
                    va="center",
                    annotation_clip=False,
                    arrowprops={
                        "arrowstyle": "-",
                        "color": _colour(run.recipe),
                        "linewidth": 0.6,
                        "shrinkA": 1,
                        "shrinkB": 1,
                    },
                )
            axis.set_xlim(0, max(r.steps for r in runs))
            axis.set_title(task.title, loc="left", fontweight="bold")
            axis.set_xlabel("step")
            axis.set_ylabel("validation loss (cross entropy)")
            axis.grid(axis="y", color="#dddddd", linewidth=0.7)
            axis.set_axisbelow(True)
        figure.savefig(path, dpi=150)
        plt.close(figure)


def write_json(results: Sequence[Result], about: dict[str, object], path: Path) -> None:
    """All figures of all runs, and the versions that made them."""
    content = {**about, "results": [r.to_json() for r in results]}
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
