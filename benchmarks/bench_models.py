"""Whole models: step time and allocator's peak, plain and with HOT, in one run.

    python benchmarks/bench_models.py --device cuda [--models vit_b resnet50 ...] [--part ...]
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

On CUDA HOT runs under bf16 autocast, as its rival does. On the CPU everything is fp32.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import importlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import hotcore.torch as hot
import timing
import torch
from models import TASKS, Batch, Task
from timing import Row
from torch import nn

PARTS = ("peak", "time", "saved", "gradient", "loss", "codes")
RECIPES = ("default", "fast", "int4", "paper", "accurate")
LOSS_STEPS = 30
GIB = 2**30


@dataclass(frozen=True)
class Contender:
    """How a model is trained."""

    name: str
    recipe: str | None = None
    bits: int | None = None  # of compress_saved
    autocast: bool = False
    tf32: bool = False


def contenders(device: str) -> list[Contender]:
    if device == "cpu":
        return [
            Contender("fp32"),
            Contender("default", "default"),
            Contender("fast", "fast"),
            Contender("default + saved 8", "default", 8),
            Contender("default + saved 4", "default", 4),
        ]
    hots = [
        Contender("default", "default"),
        Contender("fast", "fast"),
        Contender("default + saved 8", "default", 8),
        Contender("default + saved 4", "default", 4),
        Contender("fast + saved 8", "fast", 8),
    ]
    return [
        Contender("fp32"),
        Contender("tf32", tf32=True),
        Contender("bf16", autocast=True),
        *(Contender(c.name, c.recipe, c.bits, autocast=True) for c in hots),
    ]


class Trainer:
    """A model of its own, its optimizer, and the step."""

    def __init__(
        self, contender: Contender, model: nn.Module, batch: Batch, task: Task, quick: bool
    ) -> None:
        self._contender, self._batch, self._task = contender, batch, task
        self.device = next(iter(batch.values())).device
        self.model = copy.deepcopy(model).to(self.device).train()
        if contender.recipe is not None:
            self.model = hot.convert(self.model, contender.recipe).model
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        least = 1024 if quick else 65536
        self._compress: Any = contextlib.nullcontext()
        if contender.bits is not None:
            self._compress = hot.compress_saved(contender.bits, min_values=least)

    def loss(self) -> torch.Tensor:
        with autocast(self._contender, self.device), self._compress:
            return self._task.loss(self.model, self._batch)

    def step(self) -> torch.Tensor:
        allow_tf32(self._contender.tf32)
        self._optimizer.zero_grad(set_to_none=True)
        loss = self.loss()
        loss.backward()
        self._optimizer.step()
        return loss.detach()

    def gradient(self) -> torch.Tensor:
        allow_tf32(self._contender.tf32)
        self.loss().backward()
        grads = [p.grad.flatten() for p in self.model.parameters() if p.grad is not None]
        return torch.cat(grads)


def autocast(contender: Contender, device: torch.device) -> Any:
    if not contender.autocast:
        return contextlib.nullcontext()
    return torch.autocast(device.type, torch.bfloat16)


def allow_tf32(allowed: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = allowed
    torch.backends.cudnn.allow_tf32 = allowed


@contextlib.contextmanager
def cleaned(device: str) -> Iterator[None]:
    """Gives the device's memory back afterwards."""
    try:
        yield
    finally:
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()


Make = Callable[[Contender], Trainer]


def peaks(make: Make, device: str) -> dict[str, Row]:
    """Allocator's peak in GiB; every contender alone, in its third step."""
    out: dict[str, Row] = {}
    for contender in contenders(device):
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
            f"    {name:20s} {row['peak_gib']:8.2f} ({row['between_steps_gib']:.2f})  "
            f"{row['of fp32']:.3f}  {row['of bf16']:.3f}"
        )
    return out


def times(make: Make, device: str, rounds: int) -> dict[str, Row]:
    """Milliseconds of a step, in turns."""

    def watch(call: Callable[[], object]) -> float:
        timing.synchronize(device)
        start = time.perf_counter()
        call()
        timing.synchronize(device)
        return (time.perf_counter() - start) * 1e3

    trainers = {contender.name: make(contender) for contender in contenders(device)}
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
            f"    {name:20s} {row['median_ms']:9.2f} [{row['q1_ms']:.2f}, {row['q3_ms']:.2f}]  "
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


def gradients(make: Make) -> dict[str, float]:
    """Cosine with the gradient in fp32, every recipe in fp32."""
    exact = make(Contender("fp32")).gradient().double()
    out = {}
    for recipe in RECIPES:
        got = make(Contender(recipe, recipe)).gradient().double()
        out[recipe] = float(nn.functional.cosine_similarity(got, exact, dim=0))
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
            values = [float(trainer.step()) for _ in range(LOSS_STEPS)]
            out[contender.name] = [values[0], values[-1]]
            del trainer
    print(f"  loss on one batch, first and after {LOSS_STEPS} steps")
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
    task = TASKS[name]
    size = task.small if args.quick or task.full is None else task.full
    torch.manual_seed(args.seed)
    model = size.build()
    batch = size.batch(torch.Generator().manual_seed(args.seed))
    shapes = {key: list(value.shape) for key, value in batch.items()}
    parameters = sum(p.numel() for p in model.parameters())
    print(f"\n{task.title}, {parameters / 1e6:.1f} M parameters, {shapes}", flush=True)
    batch = {key: value.to(args.device) for key, value in batch.items()}

    def make(contender: Contender) -> Trainer:
        torch.manual_seed(args.seed)
        return Trainer(contender, model, batch, task, args.quick)

    out: dict[str, Any] = {"title": task.title, "parameters": parameters, "batch": shapes}
    report = hot.convert(copy.deepcopy(model), "default")
    out["converted"] = len(report.converted)
    out["plain"] = {layer.name: layer.reason for layer in report.skipped}
    parts: dict[str, Callable[[], Any]] = {
        "time": lambda: times(make, args.device, args.rounds),
        "saved": lambda: saved(make, args.device, task, batch, args.quick),
        "gradient": lambda: gradients(make),
        "loss": lambda: falling(make, args.device),
    }
    if args.device == "cuda":
        parts = {"peak": lambda: peaks(make, args.device), **parts}
    for part, run in parts.items():
        if part in args.part:
            with cleaned(args.device):
                out[part] = run()
    return out


def main(argv: Sequence[str] | None = None) -> None:
    full = [name for name, task in TASKS.items() if task.full is not None]
    parser = timing.arguments(__doc__, "models")
    parser.set_defaults(rounds=None)
    parser.add_argument("--models", nargs="+", choices=tuple(TASKS), metavar="MODEL", default=full)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--quick", action="store_true", help="small versions, few rounds")
    known, _ = parser.parse_known_args(argv)
    if known.rounds is None:
        parser.set_defaults(rounds=2 if known.quick else 15)
    args = timing.begin(parser, argv)
    content: dict[str, Any] = {"quick": args.quick, "models": {}, "skipped": {}}
    if "codes" in args.part:
        content["codes"] = codes(args.device, args.rounds, args.quick)
    for name in args.models:
        try:
            with cleaned(args.device):
                content["models"][name] = bench(name, args)
        except ModuleNotFoundError as missing:
            print(f"\n{TASKS[name].title}: skipped, {missing}")
            content["skipped"][name] = str(missing)
    timing.write(args, "models", content)


if __name__ == "__main__":
    main()
