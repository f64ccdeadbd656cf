"""Plots of the reports: speed-up by layer, where the time goes, steps against memory, a whole 8B.

    python benchmarks/plot.py [REPORT] [--out docs/img] [--format svg]

REPORT is what bench_backward.py, bench_models.py (part step) or bench_8b.py wrote, or
gpu-check.json, which holds the first two; default benchmarks/results/cuda-backward.json. Makes
speedup_by_layer, breakdown, steps and whole_8b, each where the report has its part.
evidence/plot_evidence.py draws all other figures.
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
COLORS_INT8 = {"default": "#004488", "fast": "#aa2233"}
"""With an 8-bit forward."""
STAGES = {
    "product g_x": "#4477aa",
    "product g_w": "#66ccee",
    "quantise g_y, g_b": "#ee6677",
    "quantise w": "#ccbb44",
    "unpack x": "#aa3377",
    "between kernels": "#bbbbbb",
}
WIDTH = 0.8
PLAIN, EXACT, FP8, INT8_TORCHAO = "#888888", "#aa55cc", "#ee8833", "#997733"
ON_ANY = "#7a7a7a"  # text and lines that are read on white and on GitHub's dark page alike
PANEL = (3.4, 2.9)  # inches
SLOWEST = 2.5  # times the quickest step: what takes longer is named, not drawn


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


def color_of(how: Mapping[str, Any]) -> str:
    """Of a contender: by what computes its products."""
    if "fp8" in how:
        return FP8
    if "int8_torchao" in how:
        return INT8_TORCHAO
    if "recipe" in how:
        return (COLORS_INT8 if how.get("forward") == "int8" else COLORS)[how["recipe"]]
    return PLAIN if how.get("autocast") else EXACT


def marker_of(how: Mapping[str, Any]) -> str:
    """Of a contender: by what is done to the model around the products."""
    graphs = how.get("compiled") == "reduce-overhead"
    if "frozen_int8" in how:
        return ("+" if graphs else "<") if how.get("forward") == "int8" else "1"
    if "first" in how:
        letter = {0.75: "q", 0.5: "h"}[how["first"]]
        return f"${letter.upper() if graphs else letter}$"
    if "head" in how:
        letter = "a" if "attention_kept" in how else "c" if how["head"] == "torch" else "e"
        return f"${letter.upper() if graphs else letter}$"
    if "whole" in how:
        return "$w$"
    if "attention_kept" in how:
        return "H" if graphs else ">"
    if "checkpointed" in how:
        return "X" if "compiled" in how else "x"
    if "memory_budget" in how:
        if graphs:
            return f"${10 * how['memory_budget']:.0f}$"
        return {0.7: "2", 0.5: "v", 0.3: "<", 0.2: "3"}[how["memory_budget"]]
    if "liger" in how:
        return "D"
    if how.get("fp8", "tensorwise") != "tensorwise":
        return "*" if how["fp8"] == "rowwise" else "P"
    if "compiled" in how and "recipe" in how and how.get("slower", True):
        return "h"
    modes = {"default": "s", "reduce-overhead": "^", "max-autotune": "p"}
    return modes.get(how.get("compiled", ""), "o")


def frontier(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Those that no other beats in both figures, by the first."""
    out: list[tuple[float, float]] = []
    for point in sorted(points):
        if not out or point[1] < out[-1][1]:
            out.append(point)
    return out


def plot_steps(report: Mapping[str, Any], path: Path) -> None:
    """A panel for each model: every contender's step against its peak memory.

    The line joins the contenders that none beats in both. Those far slower than the others, and
    those without figures, stand in the panel's title.
    """
    models = report["steps"]
    columns = min(3, len(models))
    lines = -(-len(models) // columns)
    names = {name for entry in models.values() for name in entry["rows"]}
    width, longest = PANEL[0] * columns, max(map(len, names))
    beside = max(1, int(width / (0.062 * longest + 0.4)))  # of a font of 8 points, with the mark
    size = (width, PANEL[1] * lines + 0.18 * -(-len(names) // beside))
    figure, grid = plt.subplots(lines, columns, figsize=size, layout="constrained", squeeze=False)
    handles: dict[str, Any] = {}
    for axes, entry in zip(grid.flat, models.values(), strict=False):
        handles |= plot_panel(axes, entry, known=handles)
    for axes in grid.flat[len(models) :]:
        axes.set_visible(False)
    figure.legend(
        handles.values(), handles, fontsize=8, frameon=False, labelcolor=ON_ANY,
        ncols=beside, loc="outside lower center",
    )  # fmt: skip
    save(figure, path)


def plot_panel(axes: Any, entry: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """One model; returns the handles of contenders that are not known yet."""
    rows = entry["rows"]
    points = {
        name: (row["peak_gib"], row["step"]["median_ms"])
        for name, row in rows.items()
        if "peak_gib" in row and "step" in row
    }
    quickest = min(ms for _, ms in points.values())
    notes = [
        f"{name}: {ms:.0f} ms, {gib:.1f} GiB"
        for name, (gib, ms) in points.items()
        if ms > SLOWEST * quickest
    ]
    drawn = {name: point for name, point in points.items() if point[1] <= SLOWEST * quickest}
    if len(points) < len(rows):
        notes.append(f"{len(rows) - len(points)} without figures")
    handles = {}
    axes.plot(*zip(*frontier(list(drawn.values())), strict=True), color=ON_ANY, linewidth=0.7)
    for name, point in drawn.items():
        how = rows[name]["how"]
        mark, color = marker_of(how), color_of(how)
        (handle,) = axes.plot(
            *point, marker=mark, linestyle="none", color=color, label=name,
            markersize=6.5, markeredgecolor=color, markeredgewidth=1.2,
        )  # fmt: skip
        if name not in known:
            handles[name] = handle
    label(axes, "\n".join([entry["title"], "; ".join(notes)]), "peak, GiB", "step, ms")
    for part in (axes.title, axes.xaxis.label, axes.yaxis.label):
        part.set_fontsize(8)
    axes.tick_params(labelsize=8)
    axes.margins(0.12)
    return handles


def plot_whole(report: Mapping[str, Any], path: Path) -> None:
    """A whole model by contender: speed and peak of the timed steps, the largest batch, energy."""
    rows = {name: row for name, row in report["whole"].items() if "step" in row}
    panels = {
        "tokens a second": [row["tokens_per_s"] for row in rows.values()],
        "peak, GiB": [row.get("peak_gib", 0.0) for row in rows.values()],
        "tokens a second, largest batch": [row["largest"]["tokens_per_s"] for row in rows.values()],
        "largest batch, tokens": [row["largest"]["tokens"] for row in rows.values()],
        "joules a token": [row.get("joules_per_token", 0.0) for row in rows.values()],
    }
    panels = {name: values for name, values in panels.items() if all(values)}
    size = (3.2 + 2.6 * len(panels), 1.0 + 0.3 * len(rows))
    figure, grid = plt.subplots(1, len(panels), figsize=size, layout="constrained", sharey=True)
    colors = [color_of({"autocast": True, **row["how"]}) for row in rows.values()]
    for axes, (name, values) in zip(grid.flat, panels.items(), strict=True):
        bars = axes.barh(list(rows), values, color=colors)
        axes.bar_label(
            bars, fmt="{:,.3g}" if max(values) < 1 else "{:,.0f}", fontsize=7, color=ON_ANY
        )
        axes.margins(x=0.2)
        axes.locator_params(axis="x", nbins=4)
        axes.tick_params(axis="x", labelsize=7)
        axes.tick_params(axis="y", labelsize=8)
        label(axes, x=name)
    grid.flat[0].invert_yaxis()
    figure.suptitle(f"Llama-3-8B, trained whole, {report['device']}", fontsize=10, color=ON_ANY)
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


def has_rows(rows: Mapping[str, Any]) -> bool:
    return any("step" in row for row in rows.values())


def has_steps(report: Mapping[str, Any]) -> bool:
    """Whether every model has a contender with a step and a peak (on the CPU there is none)."""
    models = report.get("steps", {}).values()
    return bool(models) and all(
        any("step" in row and "peak_gib" in row for row in entry["rows"].values())
        for entry in models
    )


def plot_report(whole: Mapping[str, Any], out: Path, suffix: str = "svg") -> int:
    """The figures that a report has the parts of; how many they are."""
    report, steps = whole.get("bench_backward", whole), whole.get("bench_models", whole)
    drawn = 0
    for there, draw, found, name in (
        ("layers" in report, plot_speedups, report, "speedup_by_layer"),
        (has_stages(report), plot_breakdown, report, "breakdown"),
        (has_steps(steps), plot_steps, steps, "steps"),
        (has_rows(whole.get("whole", {})), plot_whole, whole, "whole_8b"),
    ):
        if there:
            draw(found, out / f"{name}.{suffix}")
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
        parser.error(
            f"{args.report}: has neither layers nor stages of CUDA kernels nor steps nor a model"
        )


if __name__ == "__main__":
    main()
