"""Train small models by every method from the same weights: rivals, ablations, fine-tuning.

    python benchmarks/bench_training.py                    # continues a report
    python benchmarks/bench_training.py --table ablations --jobs 16
    python benchmarks/bench_training.py --table finetune --tasks vit,gpt,bert
    python benchmarks/bench_training.py --methods "fp32;default;mine.py:Mine" --plot FOLDER
    python benchmarks/bench_training.py --tasks images-vit --images cifar100:FOLDER --device cuda
    python benchmarks/bench_training.py --table supplement --tasks images-vit-s --epochs 30 \
        --images cifar10:FOLDER --device cuda              # docs/dev/evidence.md

A seed fixes the first weights and the order of the data for every method, so each run has an fp32
partner. The table shows the mean difference to it, and the spread. Seeds run one after the other.
``--budget`` leaves out whole late seeds, which the report names. The tables ``rivals``,
``ablations`` and ``supplement`` train from scratch. In ``finetune`` each seed trains in fp32 on one
half of the data. Every method and LoRA then continue on the other half. ``--jobs`` runs processes
of one thread side by side, on ``--devices`` GPUs, and reports no times.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import timing
import torch
from evidence import ROOT, side_by_side, small_tasks
from evidence.bench_gradients import numbers
from evidence.evidence_tables import tasks_of, training_lines
from evidence.small_tasks import Contender, training
from torch import Tensor, nn

KEYS = ("val_loss", "val_accuracy", "linear_saved_bytes", "curve")


@functools.cache
def task_of(
    name: str, images: str, table: str, batch: int | None = None, epochs: float | None = None
) -> training.Task:
    """Load a task with its data; fine-tuning takes the second half.

    Raises ValueError if ``epochs`` are asked of data without a number of images.
    """
    task = small_tasks.load_task(name, images)
    if table == "finetune":
        task = small_tasks.of_second_half(task)
    task = replace(task, batch_size=batch or task.batch_size)
    if epochs is None:
        return task
    count = getattr(task.data, "count", None)
    if count is None:
        raise ValueError(f"epochs: {name} on {images} draws without end; expected --steps")
    return replace(task, steps=math.ceil(epochs * count / task.batch_size))


def train(
    task: training.Task,
    contender: Contender,
    seed: int,
    steps: int,
    device: str = "cpu",
    start: Path | None = None,
) -> dict[str, Any]:
    """Train one run. Returns train_lib's measurements, or the reason of an early end.

    Raises TorchaoMissing or NotImplementedError if this machine lacks the method.
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
        figures = result.to_json()
        out = {key: figures[key] for key in KEYS}
    out["cpu_seconds"] = time.process_time() - began
    return out | {"date": timing.today(), "seconds": time.perf_counter() - wall}


def one_run(
    words: tuple[Any, ...],
    contender: Contender,
    seed: int,
    steps: int | None,
    device: str,
    start: Path | None,
) -> dict[str, Any]:
    """Run :func:`train` on the :func:`task_of` of ``words``."""
    task = task_of(*words)
    options = (task, contender, seed, steps or task.steps, device, start)
    return side_by_side.or_left_out(device, lambda: train(*options))


def pretrain(name: str, images: str, seed: int, steps: int | None, device: str, path: Path) -> None:
    """Train in fp32 on the first half of the data, and save the weights to ``path``."""
    task = small_tasks.load_task(name, images)
    task = replace(task, data=task.data.half(0))

    def finished(model: nn.Module) -> None:
        weights = {key: value.cpu() for key, value in model.state_dict().items()}
        timing.write_whole(path, lambda part: torch.save(weights, part))

    training.train(task, "fp32", seed, steps or task.steps, torch.device(device), finished=finished)


def pretrained_path(args: argparse.Namespace, name: str, seed: int) -> Path:
    """Path of the pre-trained weights; its name contains everything they depend on."""
    task = task_of(name, args.images, "finetune")
    facts = f"{task.data.description}, {args.steps or 'all'} steps, torch {torch.__version__}"
    facts += f", {args.device}{', TF32' if args.tf32 else ''}"
    return args.cache / f"{name}-{seed}-{hashlib.sha256(facts.encode()).hexdigest()[:12]}.pt"


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    options = ("device", "devices", "budget")
    parser = timing.error_arguments(__doc__, "[cuda-]TABLE", *options, threads=1)
    parser.add_argument("--jobs", type=timing.COUNT, default=1)
    parser.add_argument("--table", choices=small_tasks.TABLES, default="rivals")
    parser.add_argument("--tasks", default="vit,gpt", help=f"of {', '.join(small_tasks.TASKS)}")
    parser.add_argument("--methods", help="names with semicolons; default: all")
    parser.add_argument("--seeds", type=numbers, default=[0, 1, 2])
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=timing.COUNT, help="default: each task's own")
    length.add_argument("--epochs", type=timing.above_zero(float))
    words = "images or texts a step; default: the task's"
    parser.add_argument("--batch", type=timing.COUNT, help=words)
    kinds = ", ".join(f"{kind}:FOLDER" for kind in small_tasks.images.READERS)
    parser.add_argument("--images", default="tiles", help=f"tiles, {kinds}")
    parser.add_argument(
        "--tf32", action="store_true", help="plain products in TF32, for large models on a GPU"
    )
    parser.add_argument("--plot", nargs="?", type=Path, const=ROOT / "docs/img", help="a folder")
    parser.add_argument("--cache", type=Path, default=ROOT / "build/pretrained")
    args = parser.parse_args(argv)
    if args.tf32:  # torch reads it at its start, also in the processes of --jobs
        os.environ["TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"] = "1"
        torch.backends.cuda.matmul.allow_tf32 = True
    args.tasks = args.tasks.split(",")
    if not set(args.tasks) <= set(small_tasks.TASKS):
        parser.error(f"--tasks: of {', '.join(small_tasks.TASKS)}")
    if args.epochs is not None and args.table == "finetune":
        parser.error("--epochs: not for fine-tuning")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no CUDA device")
    args.devices = timing.devices_of(parser, args)
    if args.json is None:
        name = "training" if args.table == "rivals" else args.table
        args.json = timing.RESULTS / f"{'cuda-' if args.device == 'cuda' else ''}{name}.json"
    try:
        args.methods_of = {
            task: small_tasks.chosen(task, args.methods, args.table) for task in args.tasks
        }
        for task in args.tasks if args.epochs is not None else ():
            task_of(task, args.images, args.table, args.batch, args.epochs)
        args.report = begun(args)
    except (ValueError, FileNotFoundError) as error:
        parser.error(str(error))
    return args


def begun(args: argparse.Namespace) -> dict[str, Any]:
    """Read the report to continue. Raises ValueError if its settings differ.

    Tasks, methods and seeds may differ, because no run depends on the others.
    """
    settings: dict[str, Any] = {"table": args.table, "steps": args.steps, "device": "cpu"}
    settings |= {name: getattr(args, name) for name in ("batch", "epochs") if getattr(args, name)}
    if args.tf32:
        settings["tf32"] = True
    if args.device != "cpu":
        settings["device"] = torch.cuda.get_device_name(0)
    if set(args.tasks) & set(small_tasks.IMAGES):
        settings["images"] = small_tasks.images_of(args.images).description
    why = "" if args.table == "finetune" else "for fine-tuning"
    return small_tasks.begun(
        args.json, "training", settings, args.threads, why, "runs", args.methods_of
    )


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    timing.use_threads(args.threads)
    report, began = args.report, time.perf_counter()
    runs = report["runs"]
    every = [
        (f"{task}/{contender.name}/{seed}", task, contender, seed)
        for seed in args.seeds
        for task in args.tasks
        for contender in args.methods_of[task]
    ]
    chosen = [row for row in every if row[0] not in runs]
    for *_, contender, _ in chosen:  # tried again: another machine may have what was missing
        report["left out"].pop(contender.name, None)

    def done(key: str, run: dict[str, Any]) -> None:
        if "left out" in run:
            report["left out"][key.split("/")[1]] = run["left out"]
        else:
            runs[key] = run
        report["cpu_seconds"] = sum(run["cpu_seconds"] for run in runs.values())
        timing.write_json(args.json, report)

    pool = {"jobs": args.jobs, "threads": args.threads, "devices": args.devices}
    longest = max((run["seconds"] for run in runs.values()), default=0.0)
    starts: dict[tuple[str, int], Path] = {}
    if args.table == "finetune":
        for task, seed in dict.fromkeys((task, seed) for _, task, _, seed in chosen):
            starts[task, seed] = pretrained_path(args, task, seed)
        first = [
            (f"{task}/{seed}", pretrain, (task, args.images, seed, args.steps, args.device, path))
            for (task, seed), path in starts.items()
            if not path.exists()
        ]
        title = "pre-training"
        late = side_by_side.run_all(
            first, lambda *_: None, budget_s=args.budget, title=title, **pool
        )
        chosen = [row for row in chosen if f"{row[1]}/{row[3]}" not in late]
    work = [
        (
            key,
            one_run,
            ((task, args.images, args.table, args.batch, args.epochs), contender, seed, args.steps,
             args.device, starts.get((task, seed))),
        )
        for key, task, contender, seed in chosen
    ]  # fmt: skip
    left_s = args.budget - (time.perf_counter() - began)
    side_by_side.run_all(work, done, budget_s=left_s, title=args.table, longest_s=longest, **pool)
    report["not run"] = [
        key for key, *_ in every if key not in runs and key.split("/")[1] not in report["left out"]
    ]
    timing.write_json(args.json, report)
    print("\n".join(training_lines([(report, task) for task in tasks_of(report)])))
    if args.plot is not None:
        from evidence.plot_evidence import plot_trainings  # needs matplotlib

        plot_trainings(report, args.plot)
    counted = f"{len(runs)} runs, {report.get('cpu_seconds', 0):.0f} s of a core"
    print(f"\n{counted}; not run: {len(report['not run'])}; written: {args.json}")


if __name__ == "__main__":
    main()
