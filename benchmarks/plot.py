"""Plots of reports: the backward pass by layer, its stages, speed and peak of models.

    python benchmarks/plot.py [REPORT] [--out docs/img] [--format svg]

REPORT is a report of bench_backward.py or gpu-check.json. The default is
benchmarks/results/cuda-backward.json. The script draws speedup_by_layer, and breakdown if the
report has stages. evidence/plot_evidence.py draws the figures of the pages.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
matplotlib.rcdefaults()  # not the user's: the same report gives the same file
matplotlib.rcParams["svg.hashsalt"] = "hotcore"
matplotlib.rcParams["svg.fonttype"] = "none"  # text, not its outlines: half of the file
matplotlib.rcParams["axes.spines.top"] = matplotlib.rcParams["axes.spines.right"] = False
import matplotlib.pyplot as plt  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
COLORS = {
    "default": "#4477aa",
    "fast": "#ee6677",
    "int4": "#ccbb44",
    "paper": "#aaaaaa",
    "accurate": "#228833",
}
STAGES = {
    "product g_x": "#4477aa",
    "product g_w": "#66ccee",
    "quantise g_y, g_b": "#ee6677",
    "quantise w": "#ccbb44",
    "unpack x": "#aa3377",
    "between kernels": "#bbbbbb",
}
WIDTH = 0.8
PLAIN, FP8 = "#888888", "#ee8833"
ON_ANY = "#7a7a7a"
"""Text and lines, legible on white and on GitHub's dark page."""
CONTENDERS = {
    "bf16 with CUDA graphs": (PLAIN, "s"),
    "FP8 (torchao)": (FP8, "D"),
    "HOT": ("#4488cc", "o"),
}
"""Contender -> colour and marker."""


def rival_of(rows: Mapping[str, Any]) -> str:
    """The strictest of torch's rows in the layer's dtype: two bf16 products (CPU: fp32)."""
    return "bf16 products" if "bf16 products" in rows else "fp32 products"


def speedups(report: Mapping[str, Any]) -> tuple[list[str], dict[str, list[float]], str]:
    """Layers, recipe -> times faster in each of them, and the rival."""
    names: list[str] = []
    out: dict[str, list[float]] = {recipe: [] for recipe in report["recipes"]}
    rival = ""
    for group, table in report["layers"].items():
        for layer, found in table["layers"].items():
            rows = found["rows"]
            rival = rival_of(rows)
            names.append(f"{group}\n{layer}")
            for recipe, values in out.items():
                mine = rows[f"hotcore {recipe}"]["median_ms"]
                values.append(rows[rival]["median_ms"] / mine)
    return names, out, rival


def plot_speedups(report: Mapping[str, Any], path: Path) -> None:
    names, values, rival = speedups(report)
    size = (max(6.0, 1.6 + 1.15 * len(names)), 3.6)
    figure, axes = plt.subplots(figsize=size, layout="constrained")
    width = WIDTH / len(values)
    for index, (recipe, heights) in enumerate(values.items()):
        left = [place - WIDTH / 2 + (index + 0.5) * width for place in range(len(names))]
        bars = axes.bar(left, heights, width, label=recipe, color=COLORS[recipe])
        axes.bar_label(bars, fmt="%.2g", fontsize=6, color=ON_ANY)
    axes.margins(y=0.18)  # room for the legend
    axes.axhline(1, color=ON_ANY, linewidth=0.8)
    axes.set_xticks(range(len(names)), names, fontsize=8)
    title = f"Backward of a linear layer, {report['device']}"
    label(axes, title, y=f"times faster than torch\n({rival})", columns=len(values))
    save(figure, path)


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


def plot_speeds(rows: Mapping[str, Mapping[str, tuple[float, float]]], path: Path) -> None:
    """Speed and peak memory beside compiled bf16: model -> contender -> both ratios."""
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


def has_stages(report: Mapping[str, Any]) -> bool:
    return any(
        "stages" in found
        for layers in report.get("stages", {}).values()
        for entry in layers.values()
        for found in entry["recipes"].values()
    )


def plot_report(whole: Mapping[str, Any], out: Path, suffix: str = "svg") -> int:
    """Draw the figures whose parts a report has, and return their number."""
    report = whole.get("bench_backward", whole)
    drawn = 0
    for there, draw, name in (
        ("layers" in report, plot_speedups, "speedup_by_layer"),
        (has_stages(report), plot_breakdown, "breakdown"),
    ):
        if there:
            draw(report, out / f"{name}.{suffix}")
            drawn += 1
    return drawn


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    default = ROOT / "benchmarks/results/cuda-backward.json"
    parser.add_argument("report", type=Path, nargs="?", default=default)
    parser.add_argument("--out", type=Path, default=ROOT / "docs/img")
    parser.add_argument("--format", choices=("svg", "png"), default="svg")
    args = parser.parse_args(argv)
    if not plot_report(json.loads(args.report.read_text()), args.out, args.format):
        parser.error(f"{args.report}: has neither layers nor stages of CUDA kernels")


if __name__ == "__main__":
    main()
