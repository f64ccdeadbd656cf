"""Every method trains small models from the same weights and data: rivals, ablations, fine-tuning.

    python benchmarks/bench_training.py                    # goes on where it was broken off
    python benchmarks/bench_training.py --table ablations --jobs 16
    python benchmarks/bench_training.py --table finetune --tasks vit,gpt,bert
    python benchmarks/bench_training.py --tasks images-vit --images cifar100:FOLDER --device cuda
    python benchmarks/bench_training.py --budget 1200      # no run is begun that would end later
    python benchmarks/bench_training.py --plot             # also draws docs/img/TABLE-TASK.svg

A seed fixes the first weights and the order of the data, for every method alike, so that each run
has a partner in fp32; the table shows the mean difference to it and the spread. Seeds are run one
after the other: what a budget leaves out are whole late ones, and the report names them.

Tables: ``rivals``, from scratch, every rival, recipe and 8-bit forward (LoRA is for fine-tuning and
has no part in it). ``ablations``, from scratch, one setting changed at a time. ``finetune``: each
seed trains in fp32 on one half of the data; from there every method trains on the other half, LoRA
among them. ``--jobs`` runs side by side, a process and a thread each: times mean nothing then, and
none are reported. Whole reruns, in seconds of a core: docs/dev/rivals.md.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from evidence import ROOT, rivals, side_by_side, small_tasks
from evidence.bench_gradients import numbers
from evidence.evidence_tables import SHOWN
from evidence.small_tasks import Contender, training
from timing import RESULTS
from torch import Tensor, nn

KEYS = ("val_loss", "val_accuracy", "linear_saved_bytes", "curve")


@functools.cache
def task_of(name: str, images: str, table: str) -> training.Task:
    """With its data; of fine-tuning the second half."""
    task = small_tasks.load_task(name, images)
    return small_tasks.of_second_half(task) if table == "finetune" else task


def train(
    task: training.Task,
    contender: Contender,
    seed: int,
    steps: int,
    device: str = "cpu",
    start: Path | None = None,
) -> dict[str, Any]:
    """One run: what train_lib measures of it, or why it ended early.

    Raises TorchaoMissing, NotImplementedError where the method is not to be had here.
    """

    def convert(model: nn.Module, _: str) -> Callable[[], None] | None:
        return small_tasks.put(contender, model, task, steps, seed)

    weights: Mapping[str, Tensor] | None = None
    if start is not None:
        weights = torch.load(start, weights_only=True, map_location=device)
    began, wall = time.process_time(), time.perf_counter()
    plain = contender.method == "fp32" and not contender.adapters
    try:
        result = training.train(
            task, "fp32" if plain else contender.name, seed, steps, torch.device(device), convert,
            start=weights,
        )  # fmt: skip
    except RuntimeError as error:
        if "loss is" not in str(error):
            raise
        out: dict[str, Any] = {"diverged": str(error)}
    else:
        found = result.to_json()
        out = {key: found[key] for key in KEYS}
    out["cpu_seconds"] = time.process_time() - began
    out["date"] = (
        datetime.now(timezone.utc).date().isoformat()
    )  # a report may be filled over several days
    return out | {"seconds": time.perf_counter() - wall}


def one_run(
    name: str,
    images: str,
    table: str,
    contender: Contender,
    seed: int,
    steps: int | None,
    device: str,
    start: Path | None,
) -> dict[str, Any]:
    """:func:`train` by the task's name; what cannot be had here is a row with the reason."""
    task = task_of(name, images, table)
    try:
        return train(task, contender, seed, steps or task.steps, device, start)
    except Exception as error:
        missing = (rivals.TorchaoMissing, NotImplementedError)
        if device == "cpu" and not isinstance(error, missing):
            raise  # on a lent GPU a method that fails costs its row, not the others' time
        return {"left out": f"{type(error).__name__}: {error!s:.300}"}


def pretrain(name: str, images: str, seed: int, steps: int | None, device: str, path: Path) -> None:
    """Train in fp32 on the first half of the data; the weights go to ``path``."""
    from dataclasses import replace

    task = small_tasks.load_task(name, images)
    task = replace(task, data=task.data.half(0))

    def finished(model: nn.Module) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.part")
        torch.save({key: value.cpu() for key, value in model.state_dict().items()}, part)
        part.replace(path)

    training.train(task, "fp32", seed, steps or task.steps, torch.device(device), finished=finished)


def pretrained_path(cache: Path, name: str, images: str, seed: int, steps: int | None) -> Path:
    """Of the weights; its name says what they depend on."""
    task = task_of(name, images, "finetune")
    facts = f"{task.data.description}, {steps or 'all'} steps, torch {torch.__version__}"
    return cache / f"{name}-{seed}-{hashlib.sha256(facts.encode()).hexdigest()[:12]}.pt"


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
                "spread": deviation(losses),
                "difference": statistics.mean(differences) if differences else None,
                "differences": differences,
                "difference_spread": deviation(differences),
                "val_accuracy": statistics.mean(accuracy) if accuracy else None,
            }
        )
    return sorted(rows, key=lambda row: row["val_loss"])


def deviation(values: Sequence[float]) -> float | None:
    """Standard deviation; None of fewer than two values, or where a run has diverged."""
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return None
    return statistics.stdev(values)


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


def plot_differences(report: Mapping[str, Any], task: str, path: Path) -> None:
    """Every method's difference to fp32, the mean and each seed."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "hotcore", "svg.fonttype": "none"})
    import matplotlib.pyplot as plt

    rows = [row for row in summary(report, task) if row["difference"] is not None]
    rows = [row for row in rows if math.isfinite(row["difference"])][::-1]
    figure, axis = plt.subplots(figsize=(8, 1.2 + 0.23 * len(rows)), layout="constrained")
    for place, row in enumerate(rows):
        colour = "black" if row["method"] == "fp32" else "#4477aa"
        axis.plot(
            row["differences"], [place] * len(row["differences"]), ".", color=colour, alpha=0.4
        )
        axis.plot(row["difference"], place, "D", color=colour, markersize=5)
    names = [SHOWN.get(row["method"], row["method"]) for row in rows]
    axis.set_yticks(range(len(rows)), names, fontsize=8)
    axis.axvline(0, color="black", linewidth=0.8)
    axis.set_xscale("symlog", linthresh=0.05)
    axis.set_xlabel("validation loss less fp32's of the same seed; dots: seeds")
    axis.set_title(f"{report['settings']['table']}: {task}", fontsize=10)
    axis.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)


def tasks_of(report: Mapping[str, Any]) -> list[str]:
    """Of its runs."""
    return list(dict.fromkeys(key.split("/")[0] for key in report["runs"]))


def plot_report(report: Mapping[str, Any], folder: Path, suffix: str = "svg") -> None:
    """Every task: curves of the rivals, differences of the other tables."""
    table = report["settings"]["table"]
    for task in tasks_of(report):
        if table == "rivals":
            plot(report, task, folder / f"training-{task}.{suffix}")
        else:
            plot_differences(report, task, folder / f"{table}-{task}.{suffix}")


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--table", choices=small_tasks.TABLES, default="rivals")
    parser.add_argument("--tasks", default="vit,gpt", help=f"of {', '.join(small_tasks.TASKS)}")
    parser.add_argument("--methods", help="names with semicolons; default: all")
    parser.add_argument("--seeds", type=numbers, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, help="default: each task's own")
    parser.add_argument(
        "--images", default="tiles", help="tiles, cifar10:FOLDER, cifar100:FOLDER, folder:FOLDER"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--tf32", action="store_true", help="plain products in TF32: of large models on a GPU"
    )
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side, a process each")
    parser.add_argument("--budget", type=float, help="seconds for this call; none: all")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="default: benchmarks/results/[cuda-]TABLE.json")
    parser.add_argument("--plot", nargs="?", type=Path, const=ROOT / "docs/img", help="a folder")
    parser.add_argument("--cache", type=Path, default=ROOT / "build/pretrained")
    args = parser.parse_args(argv)
    if args.tf32:  # read when torch starts, by the processes of --jobs, too
        os.environ["TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"] = "1"
        torch.backends.cuda.matmul.allow_tf32 = True
    args.tasks = args.tasks.split(",")
    if not set(args.tasks) <= set(small_tasks.TASKS):
        parser.error(f"--tasks: of {', '.join(small_tasks.TASKS)}")
    if args.jobs < 1 or (args.steps is not None and args.steps < 1):
        parser.error("--jobs and --steps must be at least 1")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no CUDA device")
    if args.json is None:
        name = "training" if args.table == "rivals" else args.table
        args.json = RESULTS / f"{'cuda-' if args.device == 'cuda' else ''}{name}.json"
    try:
        args.methods_of = {
            task: small_tasks.chosen(
                task, args.methods, small_tasks.PAPER_READINGS, table=args.table
            )
            for task in args.tasks
        }
        args.report = begun(args)
    except (ValueError, FileNotFoundError) as error:
        parser.error(str(error))
    return args


def begun(args: argparse.Namespace) -> dict[str, Any]:
    """The report to go on with. Raises ValueError where it was made with other settings.

    Tasks, methods and seeds may be others than before: no run depends on them.
    """
    settings: dict[str, Any] = {"table": args.table, "steps": args.steps, "device": "cpu"}
    if args.tf32:
        settings["tf32"] = True
    if args.device != "cpu":
        settings["device"] = torch.cuda.get_device_name(0)
    if set(args.tasks) & set(small_tasks.IMAGES):
        settings["images"] = small_tasks.images.load_images(args.images).description
    why = "" if args.table == "finetune" else "for fine-tuning"
    return small_tasks.begun(args.json, "training", settings, args.threads, why, "runs")


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    small_tasks.use_threads(args.threads)
    report, began = args.report, time.perf_counter()
    runs = report["runs"]
    every = [
        (f"{task}/{contender.name}/{seed}", task, contender, seed)
        for seed in args.seeds
        for task in args.tasks
        for contender in args.methods_of[task]
    ]
    wanted = [row for row in every if row[0] not in runs and row[2].name not in report["left out"]]

    def done(key: str, run: dict[str, Any]) -> None:
        if "left out" in run:
            report["left out"][key.split("/")[1]] = run["left out"]
        else:
            runs[key] = run
        report["cpu_seconds"] = sum(run["cpu_seconds"] for run in runs.values())
        small_tasks.save(args.json, report)

    pool = {"jobs": args.jobs, "threads": args.threads}
    starts: dict[tuple[str, int], Path | None] = {}
    if args.table == "finetune":
        for task, seed in dict.fromkeys((task, seed) for _, task, _, seed in wanted):
            starts[task, seed] = pretrained_path(args.cache, task, args.images, seed, args.steps)
        first = [
            (f"{task}/{seed}", pretrain, (task, args.images, seed, args.steps, args.device, path))
            for (task, seed), path in starts.items()
            if path is not None and not path.exists()
        ]
        title = "pre-training"
        late = side_by_side.run_all(
            first, lambda *_: None, budget_s=args.budget, title=title, **pool
        )
        wanted = [row for row in wanted if f"{row[1]}/{row[3]}" not in late]
    work = [
        (
            key,
            one_run,
            (task, args.images, args.table, contender, seed, args.steps, args.device,
             starts.get((task, seed))),
        )
        for key, task, contender, seed in wanted
    ]  # fmt: skip
    left_s = None if args.budget is None else args.budget - (time.perf_counter() - began)
    side_by_side.run_all(work, done, budget_s=left_s, title=args.table, **pool)
    report["not run"] = [
        key for key, *_ in every if key not in runs and key.split("/")[1] not in report["left out"]
    ]
    report["summary"] = {task: summary(report, task) for task in tasks_of(report)}
    small_tasks.save(args.json, report)
    for task in args.tasks:
        print_table(report, task)
    if args.plot is not None:
        plot_report(report, args.plot)
    counted = f"{len(runs)} runs, {report.get('cpu_seconds', 0):.0f} s of a core"
    print(f"\n{counted}; not run: {len(report['not run'])}; written: {args.json}")


if __name__ == "__main__":
    main()
