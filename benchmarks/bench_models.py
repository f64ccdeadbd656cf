"""Whole models: step time and allocator's peak, plain and with HOT, in one run.

    python benchmarks/bench_models.py --device cuda [--models vit_b resnet50 ...] [--part ...]
    python benchmarks/bench_models.py --device cuda --part variants --models vit_b
    python benchmarks/bench_models.py --device cuda --part table --budget 300
    python benchmarks/bench_models.py --quick              # small versions, seconds each; CPU too

Parts:
  peak      the CUDA allocator's peak over a whole step (weights, gradients, optimizer's state and
            activations), every contender alone on the device
  time      whole steps (zero_grad, forward, loss, backward, AdamW), in turns, the host's clock
            around device synchronisations
  saved     bytes that autograd keeps, by type of module, before and after
  gradient  cosine of the gradient of all parameters with fp32's, every recipe
  loss      30 steps on one fixed batch: the loss before and after, plain and with HOT
  codes     compress_saved's kernels alone, beside a copy
  variants  peak, time, gradient and the host's share of a step for several settings of
            compress_saved; only where it is named
  table     all models of the paper at full size and small batches: report, gradients, loss
            (model_table.py); only where it is named

On CUDA HOT runs under bf16 autocast, as its rival does (not in gradient and table). On the CPU
everything is fp32. The report is written after each model; with --budget no model is begun that
would not be done in time, going by the slowest so far.
"""

from __future__ import annotations

import copy
import importlib
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import hotcore.torch as hot
import model_table
import timing
import torch
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
    variants,
)

PARTS = ("peak", "time", "saved", "gradient", "loss", "codes")
NAMED = ("variants", "table")
"""Parts that run only where they are named."""
GIB = 2**30


def peaks(make: Make, device: str, among: Sequence[Contender]) -> dict[str, Row]:
    """Allocator's peak in GiB; every contender alone, in its third step."""
    out: dict[str, Row] = {}
    for contender in among:
        with cleaned(device):
            trainer = make(contender)
            trainer.step()
            trainer.step()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            static = torch.cuda.memory_allocated()
            trainer.step()
            peak = torch.cuda.max_memory_allocated()
            out[contender.name] = {"peak_gib": peak / GIB, "between_steps_gib": static / GIB}
            del trainer
    for row in out.values():
        for rival in ("fp32", "bf16"):
            row[f"of {rival}"] = row["peak_gib"] / out[rival]["peak_gib"]
    print("  peak GiB of the allocator (between steps); of fp32's, of bf16's")
    for name, row in out.items():
        print(
            f"    {name:34s} {row['peak_gib']:8.2f} ({row['between_steps_gib']:.2f})  "
            f"{row['of fp32']:.3f}  {row['of bf16']:.3f}"
        )
    return out


def times(make: Make, device: str, rounds: int, among: Sequence[Contender]) -> dict[str, Row]:
    """Milliseconds of a step, in turns."""

    def watch(call: Callable[[], object]) -> float:
        timing.synchronize(device)
        start = time.perf_counter()
        call()
        timing.synchronize(device)
        return (time.perf_counter() - start) * 1e3

    trainers = {contender.name: make(contender) for contender in among}
    rows = timing.in_turns(
        {name: trainer.step for name, trainer in trainers.items()},
        rounds,
        device,
        watch=watch,
        budget_ms=60_000,
    )
    rivals = [name for name in ("fp32", "tf32", "bf16") if name in rows]
    print(f"  step ms, median [quartiles]; times {', '.join(rivals)}")
    for name, row in rows.items():
        for rival in rivals:
            row[f"of {rival}"] = row["median_ms"] / rows[rival]["median_ms"]
        ratios = "  ".join(f"{row[f'of {rival}']:.3f}" for rival in rivals)
        print(
            f"    {name:34s} {row['median_ms']:9.2f} [{row['q1_ms']:.2f}, {row['q3_ms']:.2f}]  "
            f"{ratios}"
        )
    return rows


def saved(make: Make, device: str, task: Task, batch: Batch, quick: bool) -> dict[str, Any]:
    """Bytes kept for backward by type of module: plain, default, default + compress_saved."""
    plain = next(c for c in reversed(contenders(device)[:3]) if c.recipe is None)
    trainer = make(plain)
    compress = hot.compress_saved(8, min_values=1024 if quick else 65536)
    with autocast(plain, trainer.device):
        alone = hot.memory_report(trainer.model, batch, loss_fn=task.loss)
        both = hot.memory_report(trainer.model, batch, loss_fn=task.loss, compress=compress)
    rows: dict[str, list[int]] = {}
    for column, value in enumerate((alone.modules, both.modules)):
        for module in value:
            row = rows.setdefault(module.type, [0, 0, 0])
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


def hosts(make: Make, device: str, rounds: int, among: Sequence[Contender]) -> dict[str, Row]:
    """Milliseconds until the host has queued forward, backward and AdamW, and until each is done.

    Each begins on an idle device: where the two are close, the host is what takes the time.
    """
    out: dict[str, Row] = {}
    for contender in among:
        with cleaned(device):
            trainer = make(contender)
            trainer.step()
            stages: dict[str, list[float]] = {}
            for _ in range(rounds):
                trainer.optimizer.zero_grad(set_to_none=True)
                found: list[torch.Tensor] = []
                calls: dict[str, Callable[[], Any]] = {
                    "forward": lambda t=trainer, f=found: f.append(t.loss()),
                    "backward": lambda f=found: f.pop().backward(),
                    "optimizer": trainer.optimizer.step,
                }
                for stage, call in calls.items():
                    timing.synchronize(device)
                    start = time.perf_counter()
                    call()
                    stages.setdefault(f"{stage}, host", []).append(time.perf_counter() - start)
                    timing.synchronize(device)
                    stages.setdefault(stage, []).append(time.perf_counter() - start)
            out[contender.name] = {
                stage: statistics.median(values) * 1e3 for stage, values in stages.items()
            }
            del trainer
    print(f"  ms of {', '.join(next(iter(out.values())))}")
    for name, row in out.items():
        print(f"    {name:34s}" + "".join(f"{value:9.2f}" for value in row.values()))
    return out


def varied(make: Make, device: str, rounds: int) -> dict[str, Any]:
    """Settings of compress_saved."""
    among = variants(device)
    out: dict[str, Any] = {}
    if device == "cuda":
        out["peak"] = peaks(make, device, among)
    timed = [contender for contender in among if contender.name != "fp32"] or among
    with cleaned(device):
        out["time"] = times(make, device, rounds, timed)
    with cleaned(device):
        out["gradient"] = gradients(make, timed)
    out["host"] = hosts(make, device, min(rounds, 5), timed)
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
    """compress_saved's kernels: what a ViT-B keeps at batch 128."""
    module = importlib.import_module("hotcore.torch.compress_saved")
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
            packed = module._Packed(x, (0, 1), bits, (1, 2))
            calls[f"compress {bits}"] = lambda x=x, b=bits: module._Packed(x, (0, 1), b, (1, 2))
            calls[f"restore {bits}"] = packed.restore
            moved |= dict.fromkeys(
                (f"compress {bits}", f"restore {bits}"), x.nbytes + packed.nbytes
            )
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
        return Trainer(contender, model, batch, task, args.quick)

    if "table" in args.part:
        start = time.perf_counter()
        out |= model_table.measure(make, device)
        out["seconds"] = time.perf_counter() - start
        print("\n".join(model_table.lines(out)), flush=True)
        return out
    report = hot.convert(copy.deepcopy(model), "default")
    out["converted"] = len(report.converted)
    out["plain"] = {layer.name: layer.reason for layer in report.skipped}
    among = contenders(device)
    recipes = [Contender(recipe, recipe) for recipe in RECIPES]
    parts: dict[str, Callable[[], Any]] = {
        "time": lambda: times(make, device, args.rounds, among),
        "saved": lambda: saved(make, device, task, batch, args.quick),
        "gradient": lambda: gradients(make, recipes),
        "loss": lambda: falling(make, device),
        "variants": lambda: varied(make, device, args.rounds),
    }
    if device == "cuda":
        parts = {"peak": lambda: peaks(make, device, among), **parts}
    for part, run in parts.items():
        if part in args.part:
            with cleaned(device):
                out[part] = run()
    return out


def arguments(argv: Sequence[str] | None) -> Any:
    parser = timing.arguments(__doc__, "models")
    parser.set_defaults(rounds=None)
    parser.add_argument("--models", nargs="+", choices=tuple(TASKS), metavar="MODEL")
    parser.add_argument("--part", nargs="+", choices=(*PARTS, *NAMED), default=PARTS)
    parser.add_argument("--quick", action="store_true", help="small versions, few rounds")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds in all")
    known, _ = parser.parse_known_args(argv)
    table = "table" in known.part
    if table and len(known.part) > 1:
        parser.error("--part table: its models have sizes of their own; name no other part")
    if known.rounds is None:
        parser.set_defaults(rounds=2 if known.quick else 15)
    if known.models is None:
        sized = {name: task.table if table else task.full for name, task in TASKS.items()}
        parser.set_defaults(models=[name for name, size in sized.items() if size is not None])
    return timing.begin(parser, argv)


def main(argv: Sequence[str] | None = None) -> None:
    begun = time.perf_counter()
    args = arguments(argv)
    name_of = {("table",): "models-table", ("variants",): "models-variants"}
    report = name_of.get(tuple(args.part), "models")
    content: dict[str, Any] = {"quick": args.quick, "models": {}, "skipped": {}, "failed": {}}
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
        path = timing.write(args, report, content)  # now, so that a run cut short leaves it
        if "table" in args.part:
            model_table.write(content["models"], path)
    if content["failed"]:
        sys.exit(f"failed: {content['failed']}")


if __name__ == "__main__":
    main()
