"""Time training steps of whole models, plain, with rivals and with HOT, in one run.

    python benchmarks/bench_models.py --device cuda [--models vit_b resnet50 ...] [--budget 600]
    python benchmarks/bench_models.py --device cuda --contenders "*compiled" "default*" --jobs 4
    python benchmarks/bench_models.py --device cuda --models llama_lora --jobs 5 --contenders \
        "default compiled" "default int8-forward compiled" "frozen int8*compiled" \
        --json benchmarks/results/cuda-lora.json
    python benchmarks/bench_models.py --device cuda --models resnet50_last --contenders \
        "bf16 *" "default compiled*" "default reduce-overhead*" \
        --json benchmarks/results/cuda-convolution.json
    python benchmarks/bench_models.py --device cuda --part table --budget 300
    python benchmarks/bench_models.py --quick              # small versions; CPU too

Part "step" has bf16, torchao's FP8 and HOT, each eager, compiled, checkpointed, with memory budgets
and under CUDA graphs. Their rows hold step time, host time, kernel time by class and peak memory.
steps.py measures, and training.people lists the contenders. Part "table" has all models of the
paper at full size and small batches: report, gradients, loss (evidence/model_table.py).

Blocks are compiled one by one (`block.compile()`), as torch recommends, unless the contender says
"whole". A contender that fails, or whose package is missing, has a row with the reason. The report
is written after each model or wave of contenders. With --budget no wave starts that the slowest so
far would not finish in time.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import steps
import timing
import torch
from evidence import doc_tables, model_table
from models import TASKS
from training import Contender, Trainer, cleaned, people

STEP_MODELS = (
    *("vit_b", "llama_blocks_2k", "bert", "resnet50", "gpt2", "llama_lora", "llama_blocks"),
)
"""Models of the part "step", by importance."""
JOBS = 8
"""Contenders that start at the same time on a GPU, each with two of its host's 16 cores."""


def in_steps(args: Any, content: dict[str, Any], left_s: Callable[[], float]) -> None:
    """Measure the part "step" of all models into ``content["steps"]``. Writes after each wave."""
    setting = steps.setting_of(args)
    if args.jobs:  # inherited by the contenders' processes, which would each take all cores
        cores = max(1, (os.cpu_count() or 1) // args.jobs)
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(cores))
    jobs = {model: steps.jobs_for(model, args.jobs, args.device) for model in args.models}
    content["steps"] = entries = earlier(args, setting.backend)
    done = {
        model: [name for name, row in entry["rows"].items() if "step" in row]
        for model, entry in entries.items()
    }
    content["backend"] = setting.backend
    slowest = 0.0
    for model, among in steps.waves_of(args.models, args.contenders, jobs, done):
        task = TASKS[model]
        start = time.perf_counter()
        print(f"\n{task.title}: {' | '.join(c.name for c in among)}", flush=True)
        if left_s() < slowest:
            rows = {c.name: {"left_out": "no time left"} for c in among}
        else:
            patience = min(steps.START_TIMEOUT_S, left_s())
            words = (args.rounds, jobs[model], patience, args.runs, not args.no_kernels)
            rows = steps.measure(model, among, setting, *words)
        table = doc_tables.steps({"steps": {model: {"rows": rows}}}, model)
        print("\n".join([*table, *steps.notes(rows)]))
        entry = entries.setdefault(model, {"title": task.title, "rows": {}})
        measured = {name: row for name, row in entry["rows"].items() if "step" in row}
        known = entry["rows"] | rows | measured  # keeps the reference's row of the first wave
        entry["rows"] = {c.name: known[c.name] for c in people(task) if c.name in known} | known
        slowest = max(slowest, time.perf_counter() - start)
        print(f"  {time.perf_counter() - start:.0f} s", flush=True)
        timing.write(args, "steps", content)
    for model, entry in entries.items():
        for name, row in entry["rows"].items():
            if "error" in row:
                content["failed"][f"{model}, {name}"] = row["error"]


def earlier(args: Any, backend: str) -> dict[str, Any]:
    """Read the models of --resume's report. Raises ValueError if its machine or settings differ."""
    if args.resume is None:
        return {}
    report = json.loads(args.resume.read_text())
    facts = timing.machine(args.device)
    here = (facts["device"], facts["torch"], args.quick, args.seed, backend)
    there = (report["device"], report["versions"]["torch"], report["quick"], report["seed"],
             report["backend"])  # fmt: skip
    if here != there:
        raise ValueError(f"--resume: {args.resume} is of {there}, this is {here}")
    steps: dict[str, Any] = report["steps"]
    return steps


def in_a_table(args: Any, content: dict[str, Any], left_s: Callable[[], float]) -> None:
    """Measure the part "table", one model after the other, in this process."""
    slowest = 0.0
    for name in args.models:
        start = time.perf_counter()
        if left_s() < slowest:
            print(f"\n{TASKS[name].title}: left out, no time left")
            content["skipped"][name] = "no time left"
        else:
            try:
                with cleaned(args.device):
                    content["models"][name] = table_row(name, args)
            except ModuleNotFoundError as missing:
                print(f"\n{TASKS[name].title}: skipped, {missing}")
                content["skipped"][name] = str(missing)
            except Exception as error:  # named here and at the end; the others go on
                traceback.print_exc()
                content["failed"][name] = f"{type(error).__name__}: {error}"
        slowest = max(slowest, time.perf_counter() - start)
        timing.write(args, "models-table", content)  # now, for a run that is interrupted


def table_row(name: str, args: Any) -> dict[str, Any]:
    """Measure one model. Raises ModuleNotFoundError if its package is missing."""
    task, start = TASKS[name], time.perf_counter()
    size = task.small if args.quick or task.table is None else task.table
    torch.manual_seed(args.seed)
    model = size.build().to(args.device)
    batch = size.batch(torch.Generator().manual_seed(args.seed))
    batch = {key: value.to(args.device) for key, value in batch.items()}

    def make(contender: Contender) -> Trainer:
        torch.manual_seed(args.seed)
        return Trainer(contender, model, batch, task)

    out: dict[str, Any] = {
        "title": task.title,
        "parameters": sum(p.numel() for p in model.parameters()),
        "batch": {key: list(value.shape) for key, value in batch.items()},
        **model_table.measure(make, args.device),
        "seconds": time.perf_counter() - start,
    }
    alone = {"models": {name: out}}
    tables = (*model_table.gradients(alone), "", *model_table.losses(alone))
    print("", *tables, sep="\n", flush=True)
    return out


def arguments(argv: Sequence[str] | None) -> Any:
    parser = timing.arguments(__doc__, "steps", "quick", "budget", "contenders", "backend")
    parser.set_defaults(rounds=3)
    parser.add_argument("--models", nargs="+", choices=tuple(TASKS), metavar="MODEL")
    parser.add_argument("--part", choices=("step", "table"), default="step")
    step = parser.add_argument_group("part step")
    step.add_argument("--runs", type=int, default=1, help="repetitions in new processes")
    step.add_argument("--no-kernels", action="store_true", help="profile no kernels")
    step.add_argument("--list", action="store_true", help="print the contenders and end")
    step.add_argument(
        "--jobs", type=int, help=f"processes that start together ({JOBS}); 0: all in this one"
    )
    step.add_argument(
        "--resume", type=Path, metavar="REPORT", help="report to continue; keeps its rows"
    )
    args = timing.begin(parser, argv)
    if args.quick:
        args.rounds = 2
    if args.jobs is None:
        args.jobs = JOBS if args.device == "cuda" else 0
    if args.part == "step":
        args.models = args.models or STEP_MODELS
    else:
        args.models = args.models or [name for name, task in TASKS.items() if task.table]
        if args.contenders:
            parser.error("--contenders: for part step; the table has all recipes")
        if any(TASKS[name].frozen for name in args.models):
            parser.error("--models: LoRA's blocks have part step alone: they do not train in fp32")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    begun = time.perf_counter()
    args = arguments(argv)
    if args.list:
        for name in args.models:
            print(f"{name}: {' | '.join(c.name for c in people(TASKS[name]))}")
        return
    content: dict[str, Any] = {"quick": args.quick, "models": {}, "skipped": {}, "failed": {}}
    part = in_steps if args.part == "step" else in_a_table
    try:
        part(args, content, lambda: args.budget - (time.perf_counter() - begun))
    except ValueError as error:
        sys.exit(f"bench_models.py: {error}")
    print(f"\n{time.perf_counter() - begun:.0f} s")
    timing.write(args, "steps" if args.part == "step" else "models-table", content)
    if content["failed"]:
        sys.exit(f"failed: {content['failed']}")


if __name__ == "__main__":
    main()
