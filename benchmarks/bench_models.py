"""Whole models: training steps as people run them, plain, with rivals and with HOT, in one run.

    python benchmarks/bench_models.py --device cuda [--models vit_b resnet50 ...] [--budget 600]
    python benchmarks/bench_models.py --device cuda --contenders "*compiled" "default*" --jobs 4
    python benchmarks/bench_models.py --device cuda --models llama_lora --jobs 5 --contenders \
        "default compiled" "default int8-forward compiled" "frozen int8*compiled" \
        --json benchmarks/results/cuda-lora.json
    python benchmarks/bench_models.py --device cuda --part table --budget 300
    python benchmarks/bench_models.py --quick              # small versions; CPU too

Parts; "step" unless others are named:
  step      bf16 eager, compiled, with memory budgets, checkpointed, under CUDA graphs; torchao's
            FP8; HOT in the same ways. Each: time of a step, the host's share, kernel time by class,
            the allocator's peak (steps.py measures, training.people lists them)
  saved     bytes that autograd keeps, by type of module: plain, default, with convert(saved=8)
  gradient  cosine of the gradient of all parameters with fp32's, every recipe
  loss      30 steps on one fixed batch: the loss before and after, plain and with HOT
  codes     the kernels of saved= in eager mode alone, beside a copy
  table     all models of the paper at full size and small batches: report, gradients, loss
            (model_table.py)

Transformers' blocks are compiled one by one (`block.compile()`), as torch recommends; --whole
compiles models as wholes. A contender that fails is a row with its error, one whose package is
missing a row that says so. The report is written after each model, or wave of contenders; with
--budget nothing is begun that would not be done in time, going by the slowest so far.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import hotcore.torch as hot
import steps
import timing
import torch
from evidence import model_table
from hotcore.torch.saved import blocks
from models import TASKS, Batch, Task
from timing import Row
from training import (
    RECIPES,
    Contender,
    Make,
    Trainer,
    autocast,
    cleaned,
    contenders,
    cosine,
    people,
)

PARTS = ("step", "saved", "gradient", "loss", "codes", "table")
STEP_MODELS = (
    *("vit_b", "llama_blocks_2k", "bert", "resnet50", "gpt2", "llama_lora", "llama_blocks"),
)
"""Those of the part "step", by importance."""
JOBS = 8
"""Contenders that start beside each other on a GPU, each with two of its host's 16 cores."""
GIB = 2**30


def saved(make: Make, device: str, task: Task, batch: Batch) -> dict[str, Any]:
    """Bytes kept for backward by type of module: plain, default, default with saved=8."""
    plain = next(c for c in reversed(contenders(device)[:3]) if c.recipe is None)
    trainer = make(plain)
    with autocast(plain, trainer.device):
        alone = hot.memory_report(trainer.model, batch, loss_fn=task.loss, slower=True)
        hot.convert(trainer.model, "default", saved=8, slower=True)
        both = hot.memory_report(trainer.model, batch, loss_fn=task.loss)
    kinds = {module.name: module.type for module in alone.modules}
    rows: dict[str, list[int]] = {}
    for column, value in enumerate((alone.modules, both.modules)):
        for module in value:
            row = rows.setdefault(kinds.get(module.name, module.type), [0, 0, 0])
            row[0] += module.before if column == 0 else 0
            row[1 + column] += module.after
    print("  kept for backward, MiB: plain, default, default + saved 8")
    for name, row in sorted(rows.items(), key=lambda item: -max(item[1])):
        if max(row) >= 0.01 * alone.before:
            print(f"    {name:30s}" + "".join(f"{value / 2**20:12.2f}" for value in row))
    sums = [alone.before, alone.after, both.after]
    print(f"    {'all':30s}" + "".join(f"{value / 2**20:12.2f}" for value in sums))
    return {"columns": ["plain", "default", "default + saved 8"], "bytes": rows, "all": sums}


def gradients(make: Make, among: Sequence[Contender]) -> dict[str, float]:
    """Cosine with the gradient in fp32."""
    exact = make(Contender("fp32")).gradients()
    out = {contender.name: cosine(make(contender).gradients(), exact) for contender in among}
    print(
        "  cosine of the gradient with fp32's:", ", ".join(f"{k} {v:.4f}" for k, v in out.items())
    )
    return out


def falling(make: Make, device: str) -> dict[str, list[float]]:
    """[first, last] loss of 30 steps on one fixed batch, from the same weights."""
    out = {}
    for contender in contenders(device):
        with cleaned(device):
            trainer = make(contender)
            values = [float(trainer.step()) for _ in range(model_table.LOSS_STEPS)]
            out[contender.name] = [values[0], values[-1]]
            del trainer
    print(f"  loss on one batch, first and after {model_table.LOSS_STEPS} steps")
    for name, (first, last) in out.items():
        print(f"    {name:20s} {first:10.5f} {last:10.5f}")
    return out


def codes(device: str, rounds: int, quick: bool) -> dict[str, dict[str, Row]]:
    """The kernels of saved=, in eager mode: what a ViT-B keeps at batch 128."""
    out: dict[str, dict[str, Row]] = {}
    tokens = 197 * (2 if quick else 128)
    for label, width, dtype in (
        ("normalisation's input", 768, torch.float32),
        ("GELU's input", 3072, torch.bfloat16),
    ):
        x = torch.randn(tokens, width, device=device).to(dtype)
        target = torch.empty_like(x)
        calls: dict[str, Callable[[], object]] = {"copy": lambda x=x, t=target: t.copy_(x)}
        moved = {"copy": 2 * x.nbytes}
        for bits in (8, 4, 1):
            kept = blocks.encode_blocks(x, bits, (1, 2))
            calls[f"encode {bits}"] = lambda x=x, b=bits: blocks.encode_blocks(x, b, (1, 2))
            calls[f"decode {bits}"] = lambda x=x, b=bits, k=kept: blocks.decode_blocks(
                *k, b, x.shape, x.dtype
            )
            nbytes = x.nbytes + sum(part.nbytes for part in kept)
            moved |= dict.fromkeys((f"encode {bits}", f"decode {bits}"), nbytes)
        rows = timing.in_turns(calls, rounds, device)
        print(f"\n{label}, [{tokens}, {width}] {str(dtype).removeprefix('torch.')}: us")
        for name, row in rows.items():
            row["TB/s"] = moved[name] / row["median_ms"] / 1e9
            print(timing.line(name, row, f"{row['TB/s']:.3g} TB/s"))
        out[label] = rows
    return out


def bench(name: str, args: Any) -> dict[str, Any]:
    """All parts for one model; ModuleNotFoundError where its package is missing."""
    task, device = TASKS[name], args.device
    size = task.table if "table" in args.part else task.full
    if args.quick or size is None:
        size = task.small
    torch.manual_seed(args.seed)
    model = size.build()
    batch = size.batch(torch.Generator().manual_seed(args.seed))
    shapes = {key: list(value.shape) for key, value in batch.items()}
    parameters = sum(p.numel() for p in model.parameters())
    print(f"\n{task.title}, {parameters / 1e6:.1f} M parameters, {shapes}", flush=True)
    batch = {key: value.to(device) for key, value in batch.items()}
    out: dict[str, Any] = {"title": task.title, "parameters": parameters, "batch": shapes}
    if "table" in args.part:  # peaks are not measured: the copies may be made on the device
        model = model.to(device)

    def make(contender: Contender) -> Trainer:
        torch.manual_seed(args.seed)
        return Trainer(contender, model, batch, task)

    if "table" in args.part:
        start = time.perf_counter()
        out |= model_table.measure(make, device)
        out["seconds"] = time.perf_counter() - start
        print("\n".join(model_table.lines(out)), flush=True)
        return out
    report = hot.convert(copy.deepcopy(model), "default")
    out["converted"] = len(report.converted)
    out["plain"] = {layer.name: layer.reason for layer in report.skipped}
    recipes = [Contender(recipe, recipe) for recipe in RECIPES]
    parts: dict[str, Callable[[], Any]] = {
        "saved": lambda: saved(make, device, task, batch),
        "gradient": lambda: gradients(make, recipes),
        "loss": lambda: falling(make, device),
    }
    for part, run in parts.items():
        if part in args.part:
            with cleaned(device):
                out[part] = run()
    return out


def in_steps(args: Any, content: dict[str, Any], left_s: Callable[[], float]) -> None:
    """The part "step", all models: fills ``content["steps"]``, and writes after each wave.

    Args:
        args: of the command line.
        content: of the report.
        left_s: seconds that --budget leaves.
    """
    setting = steps.Setting(
        args.device,
        quick=args.quick,
        seed=args.seed,
        threads=args.threads,
        backend=args.backend,
        whole=args.whole,
    )
    if args.jobs:  # the contenders' processes inherit it; each would take all cores
        cores = max(1, (os.cpu_count() or 1) // args.jobs)
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(cores))
    jobs = {model: steps.jobs_for(model, args.jobs, args.device) for model in args.models}
    content["steps"] = found = earlier(args)
    done = {
        model: [name for name, row in entry["rows"].items() if "step" in row]
        for model, entry in found.items()
    }
    content |= {"backend": args.backend, "compiled": "whole" if args.whole else "blocks"}
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
        print("\n".join(steps.lines(rows)))
        entry = found.setdefault(model, {"title": task.title, "rows": {}})
        measured = {name: row for name, row in entry["rows"].items() if "step" in row}
        known = entry["rows"] | rows | measured  # the reference's row is that of the first wave
        entry["rows"] = {c.name: known[c.name] for c in people(task) if c.name in known}
        slowest = max(slowest, time.perf_counter() - start)
        print(f"  {time.perf_counter() - start:.0f} s", flush=True)
        timing.write(args, args.report, content)
    for model, entry in found.items():
        for name, row in entry["rows"].items():
            if "error" in row:
                content["failed"][f"{model}, {name}"] = row["error"]


def earlier(args: Any) -> dict[str, Any]:
    """The models of the report that --resume names; ValueError where it is of another machine."""
    if args.resume is None:
        return {}
    report = json.loads(args.resume.read_text())
    facts = timing.machine(args)
    here = (facts["device"], facts["torch"], args.quick)
    there = (report["device"], report["versions"]["torch"], report["quick"])
    if here != there:
        raise ValueError(f"--resume: {args.resume} is of {there}, this is {here}")
    found: dict[str, Any] = report["steps"]
    return found


def arguments(argv: Sequence[str] | None) -> Any:
    parser = timing.arguments(__doc__, "models")
    parser.set_defaults(rounds=None)
    parser.add_argument("--models", nargs="+", choices=tuple(TASKS), metavar="MODEL")
    parser.add_argument("--part", nargs="+", choices=PARTS, default=("step",))
    parser.add_argument("--quick", action="store_true", help="small versions, few rounds")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds in all")
    step = parser.add_argument_group("part step")
    step.add_argument("--contenders", nargs="+", metavar="PATTERN", help="names; default all")
    step.add_argument(
        "--runs", type=int, default=1, help="times over, each from new processes: their range"
    )
    step.add_argument("--no-kernels", action="store_true", help="profile none: saves a third")
    step.add_argument("--list", action="store_true", help="print the contenders, and end")
    step.add_argument(
        "--jobs", type=int, help=f"processes that start together ({JOBS}); 0: all in this one"
    )
    step.add_argument(
        "--resume", type=Path, metavar="REPORT", help="go on: keep its rows, run what it lacks"
    )
    step.add_argument("--whole", action="store_true", help="compile models as wholes")
    step.add_argument("--backend", help="of torch.compile; default inductor, where it can compile")
    known, _ = parser.parse_known_args(argv)
    alone = [part for part in ("table", "step") if part in known.part and len(known.part) > 1]
    if alone:
        parser.error(f"--part {alone[0]}: has sizes and a report of its own; name no other part")
    if known.rounds is None:
        rounds = 3 if "step" in known.part else 15
        parser.set_defaults(rounds=2 if known.quick else rounds)
    if known.models is None:
        sized = {name: task.table if "table" in known.part else task.full
                 for name, task in TASKS.items() if not task.frozen}  # fmt: skip
        models = [name for name, size in sized.items() if size is not None]
        parser.set_defaults(models=list(STEP_MODELS) if "step" in known.part else models)
    elif "step" not in known.part and any(TASKS[name].frozen for name in known.models):
        parser.error("--models: LoRA's blocks have part step alone: they do not train in fp32")
    if known.jobs is None:
        parser.set_defaults(jobs=JOBS if known.device == "cuda" else 0)
    if known.backend is None:
        compiles = known.device == "cuda" or shutil.which("g++") is not None
        parser.set_defaults(backend="inductor" if compiles else "aot_eager")
    if known.list:
        for name in known.models or STEP_MODELS:
            print(f"{name}: {' | '.join(c.name for c in people(TASKS[name]))}")
        parser.exit()
    args = timing.begin(parser, argv)
    reports = {("table",): "models-table", ("step",): "steps"}
    args.report = reports.get(tuple(args.part), "models")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    begun = time.perf_counter()
    args = arguments(argv)
    content: dict[str, Any] = {"quick": args.quick, "models": {}, "skipped": {}, "failed": {}}
    if "step" in args.part:
        try:
            in_steps(args, content, lambda: args.budget - (time.perf_counter() - begun))
        except ValueError as error:
            sys.exit(f"bench_models.py: {error}")
    else:
        one_by_one(args, content, begun)
    print(f"\n{time.perf_counter() - begun:.0f} s")
    timing.write(args, args.report, content)
    if content["failed"]:
        sys.exit(f"failed: {content['failed']}")


def one_by_one(args: Any, content: dict[str, Any], begun: float) -> None:
    """All other parts: model after model, in this process."""
    if "codes" in args.part:
        content["codes"] = codes(args.device, args.rounds, args.quick)
    slowest = 0.0
    for name in args.models:
        start = time.perf_counter()
        if start - begun + slowest > args.budget:
            print(f"\n{TASKS[name].title}: left out, {args.budget:.0f} s are nearly over")
            content["skipped"][name] = "no time left"
        else:
            try:
                with cleaned(args.device):
                    content["models"][name] = bench(name, args)
            except ModuleNotFoundError as missing:
                print(f"\n{TASKS[name].title}: skipped, {missing}")
                content["skipped"][name] = str(missing)
            except Exception as error:  # said here and at the end: the others are worth having
                traceback.print_exc()
                content["failed"][name] = f"{type(error).__name__}: {error}"
        slowest = max(slowest, time.perf_counter() - start)
        path = timing.write(args, args.report, content)  # now, so that a run cut short leaves it
        if "table" in args.part:
            model_table.write(content["models"], path)


if __name__ == "__main__":
    main()
