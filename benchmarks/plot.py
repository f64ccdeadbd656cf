"""Plots of the reports: speed-up by layer, and where the time goes.

    python benchmarks/plot.py [REPORT] [--out docs/img] [--format svg]

REPORT is what bench_backward.py wrote, or gpu-check.json, which holds one; default
benchmarks/results/cuda-backward.json. Makes speedup_by_layer and breakdown, each where the report
has its part.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
matplotlib.rcParams["svg.hashsalt"] = "hotcore"  # the same report gives the same file
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
    figure, axes = plt.subplots(
        figsize=(max(6.0, 1.6 + 1.15 * len(names)), 3.6), layout="constrained"
    )
    width = WIDTH / len(values)
    for index, (recipe, heights) in enumerate(values.items()):
        left = [place - WIDTH / 2 + (index + 0.5) * width for place in range(len(names))]
        bars = axes.bar(left, heights, width, label=recipe, color=COLORS[recipe])
        axes.bar_label(bars, fmt="%.2g", fontsize=6)
    axes.margins(y=0.18)  # room for the legend
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(names)), names, fontsize=8)
    axes.set_ylabel(f"times faster than torch\n({rival})")
    axes.set_title(f"Backward of a linear layer, {report['device']}", fontsize=10)
    axes.legend(fontsize=8, frameon=False, ncols=len(values))
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
    axes.set_xlabel("µs of one backward")
    axes.set_title(f"Where the time goes, {report['device']}", fontsize=10)
    axes.legend(fontsize=8, frameon=False, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.22))
    save(figure, path)


def save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = {"Date": None} if path.suffix == ".svg" else None
    figure.savefig(path, dpi=150, metadata=metadata)
    plt.close(figure)
    print(f"written: {path}")


def has_stages(report: Mapping[str, Any]) -> bool:
    return any(
        "stages" in found
        for layers in report.get("stages", {}).values()
        for entry in layers.values()
        for found in entry["recipes"].values()
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    default = ROOT / "benchmarks/results/cuda-backward.json"
    parser.add_argument("report", type=Path, nargs="?", default=default)
    parser.add_argument("--out", type=Path, default=ROOT / "docs/img")
    parser.add_argument("--format", choices=("svg", "png"), default="svg")
    args = parser.parse_args(argv)
    report = json.loads(args.report.read_text())
    report = report.get("bench_backward", report)
    if "layers" not in report and not has_stages(report):
        parser.error(f"{args.report}: has neither layers nor stages of CUDA kernels")
    if "layers" in report:
        plot_speedups(report, args.out / f"speedup_by_layer.{args.format}")
    if has_stages(report):
        plot_breakdown(report, args.out / f"breakdown.{args.format}")


if __name__ == "__main__":
    main()
