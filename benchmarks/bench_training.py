"""Every method trains the README's two small tasks from scratch, from the same weights and data.

    python benchmarks/bench_training.py                    # goes on where it was broken off
    python benchmarks/bench_training.py --budget 1200      # at most so many seconds of a core more
    python benchmarks/bench_training.py --plot             # also draws docs/img/training-*.svg

A seed fixes the first weights and the order of the data, for every method alike, so that each run
has a partner in fp32; the table shows the mean difference to it and the spread. Seeds are run one
after the other: what a budget leaves out are whole late ones, and the report names them. LoRA is
for fine-tuning and has no part in this.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import rivals
import small_tasks
import torch
from bench_gradients import numbers
from small_tasks import Contender, training
from timing import RESULTS
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
FULL = Contender("fp32", "fp32")
INT8_FORWARD = tuple(
    Contender(f"{name} int8-forward", name, {"forward": "int8"}) for name in small_tasks.RECIPES
)
"""The recipes with an 8-bit forward."""
PAPER_ROWS: dict[str, tuple[int, ...]] = {
    "diagonal": (0, 2, 3, 8, 10, 11, 12, 14),
    "axes": (0, 1, 2, 3, 4, 8, 10, 12),
    "ten": (0, 1, 2, 3, 4, 8, 10, 11, 12, 14),
}
"""Readings of the paper's eight low-pass rows, and the ten of its authors' code (docs/paper.md)."""
PAPER_READINGS = tuple(
    Contender(f"paper, {name}{of}", "paper", {"rows": rows, **layout})
    for of, layout in (("", {}), (", tiles", small_tasks.VIT_TILES))
    for name, rows in PAPER_ROWS.items()
)


def train(task: training.Task, contender: Contender, seed: int, steps: int) -> dict[str, Any]:
    """One run: what train_lib measures of it, or why it ended early."""

    def convert(model: nn.Module, _: str) -> None:
        done = rivals.convert(model, contender.method, training.in_blocks, **contender.settings)
        wanted = sum(
            isinstance(module, nn.Linear) and training.in_blocks(module, name)
            for name, module in model.named_modules()
        )
        if len(done.names) != wanted:
            raise ValueError(f"{contender.name}: took {len(done.names)} of {wanted}: {done.left}")

    began = time.process_time()
    try:
        result = training.train(task, contender.name, seed, steps, torch.device("cpu"), convert)
    except RuntimeError as error:
        if "loss is" not in str(error):
            raise
        return {"diverged": str(error), "cpu_seconds": time.process_time() - began}
    keys = ("val_loss", "val_accuracy", "linear_saved_bytes", "curve")
    found = result.to_json()
    return {key: found[key] for key in keys} | {"cpu_seconds": time.process_time() - began}


def summary(report: Mapping[str, Any], task: str) -> list[dict[str, Any]]:
    """Each method's losses, and the differences to fp32 with the same seed, best first."""
    runs: dict[str, dict[str, dict[str, Any]]] = {}
    for key, run in report["runs"].items():
        name, method, seed = key.split("/")
        if name == task:
            runs.setdefault(method, {})[seed] = run
    partners = runs.get("fp32", {})
    rows = []
    for method, seeds in runs.items():
        losses = [run.get("val_loss", math.inf) for run in seeds.values()]
        differences = [
            run.get("val_loss", math.inf) - partners[seed]["val_loss"]
            for seed, run in seeds.items()
            if "val_loss" in partners.get(seed, {})
        ]
        accuracy = [run["val_accuracy"] for run in seeds.values() if "val_accuracy" in run]
        rows.append(
            {
                "method": method,
                "seeds": len(seeds),
                "diverged": sum("diverged" in run for run in seeds.values()),
                "val_loss": statistics.mean(losses),
                "spread": statistics.stdev(losses) if len(losses) > 1 else None,
                "difference": statistics.mean(differences) if differences else None,
                "difference_spread": statistics.stdev(differences)
                if len(differences) > 1
                else None,
                "val_accuracy": statistics.mean(accuracy) if accuracy else None,
            }
        )
    return sorted(rows, key=lambda row: row["val_loss"])


def print_table(report: Mapping[str, Any], task: str) -> None:
    def shown(value: float | None, sign: str = "") -> str:
        return f"{'-':>8s}" if value is None else f"{value:{sign}8.3f}"

    print(f"\n{task}: validation loss, mean over seeds ± spread; difference to fp32, paired")
    for row in summary(report, task):
        print(
            f"  {row['method']:14s} {shown(row['val_loss'])} ±{shown(row['spread'])} "
            f"{shown(row['difference'], '+')} ±{shown(row['difference_spread'])}  "
            f"accuracy {shown(row['val_accuracy'])}  seeds {row['seeds']}"
            + (f", {row['diverged']} diverged" if row["diverged"] else "")
        )


def plot(report: Mapping[str, Any], task: str, path: Path) -> None:
    """Mean learning curve of every method, a band from the lowest to the highest seed."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "hotcore", "svg.fonttype": "none"})
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(9, 5.5), layout="constrained")
    rows = summary(report, task)
    for index, row in enumerate(rows):
        method = row["method"]
        curves = [
            run["curve"]
            for key, run in report["runs"].items()
            if key.startswith(f"{task}/{method}/") and "curve" in run
        ]
        if not curves:
            continue
        steps = [point[0] for point in curves[0]]
        values = list(zip(*([point[1] for point in curve] for curve in curves), strict=True))
        colour = "black" if method == "fp32" else plt.get_cmap("tab20")(index % 20)
        mean = [statistics.mean(group) for group in values]
        style = "--" if method == "fp32" else "-"
        axis.plot(
            steps, mean, style, color=colour, lw=1.3, label=f"{method}  {row['val_loss']:.3f}"
        )
        axis.fill_between(
            steps, list(map(min, values)), list(map(max, values)), color=colour, alpha=0.08
        )
    axis.set_yscale("log")
    axis.set_xlabel("step")
    axis.set_ylabel("validation loss")
    axis.set_title(f"{task}: mean over seeds, band from lowest to highest", fontsize=10)
    axis.legend(fontsize=7, ncol=2)
    axis.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tasks", default="vit,gpt")
    parser.add_argument("--methods", help="names with semicolons; default: all")
    parser.add_argument("--seeds", type=numbers, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, help="default: vit 350, gpt 300")
    parser.add_argument("--budget", type=float, help="seconds of a core for this call; none: all")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, default=RESULTS / "training.json")
    parser.add_argument("--plot", nargs="?", type=Path, const=ROOT / "docs/img", help="a folder")
    args = parser.parse_args(argv)
    tasks = args.tasks.split(",")
    if not set(tasks) <= set(small_tasks.TASKS):
        parser.error(f"--tasks: of {', '.join(small_tasks.TASKS)}")
    small_tasks.use_threads(args.threads)
    settings = {"tasks": tasks, "methods": args.methods, "seeds": args.seeds, "steps": args.steps}
    try:
        more = (FULL, *INT8_FORWARD, *PAPER_READINGS)
        methods = {task: small_tasks.chosen(task, args.methods, more) for task in tasks}
        why = "for fine-tuning"
        report = small_tasks.begun(args.json, "training", settings, args.threads, why, "runs")
    except ValueError as error:
        parser.error(str(error))
    runs = report["runs"]
    wanted = [
        (task, contender, seed)
        for seed in args.seeds
        for task in tasks
        for contender in methods[task]
    ]
    began = time.process_time()
    loaded = {task: small_tasks.load_task(task) for task in tasks}
    missing = []
    for task, contender, seed in wanted:
        key = f"{task}/{contender.name}/{seed}"
        if key in runs or contender.name in report["left out"]:
            continue
        if args.budget is not None and time.process_time() - began > args.budget:
            missing.append(key)
            continue
        steps = args.steps or loaded[task].steps
        try:
            runs[key] = train(loaded[task], contender, seed, steps)
        except rivals.TorchaoMissing as error:
            report["left out"][contender.name] = str(error)
        report["cpu_seconds"] = sum(run["cpu_seconds"] for run in runs.values())
        small_tasks.save(args.json, report)
    report["not run"] = missing
    report["summary"] = {task: summary(report, task) for task in tasks}
    small_tasks.save(args.json, report)
    for task in tasks:
        print_table(report, task)
        if args.plot is not None:
            plot(report, task, args.plot / f"training-{task}.svg")
    done = f"{len(runs)} runs, {report.get('cpu_seconds', 0):.0f} s of a core"
    print(f"\n{done}; not run: {len(missing)}; written: {args.json}")


if __name__ == "__main__":
    main()
