"""What the training examples share: options, the loop, the runs that are compared, their table."""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import hotcore.torch as hot
import torch
from torch import Generator, nn
from tqdm import tqdm

from .data import Batch
from .training import evaluate, learning_rate_factor, loss_of

RECIPES = ("default", "fast", "int4", "paper", "accurate")


class Data(Protocol):
    """A dataset: training batches from the caller's generator, and one batch to validate on."""

    description: str
    validation: Batch

    def batch(self, size: int, generator: Generator) -> Batch: ...


@dataclass(frozen=True)
class Outcome:
    """What one run measured."""

    run: str
    val_loss: float
    val_accuracy: float
    kept_mib: float
    step_ms: float


def add_options(parser: argparse.ArgumentParser, steps: int, batch: int, rate: float) -> None:
    """Options of both examples."""
    parser.add_argument(
        "--recipe", nargs="+", choices=RECIPES, default=["default"], help="of HOT, one run each"
    )
    parser.add_argument("--no-baseline", action="store_true", help="leave full precision out")
    parser.add_argument(
        "--compress-saved",
        type=int,
        choices=(8, 4),
        metavar="BITS",
        help="in the HOT runs, keep what the other layers save in 8 or 4 bits, too",
    )
    parser.add_argument("--bf16", action="store_true", help="train under bf16 autocast")
    parser.add_argument("--steps", type=_count, default=steps, metavar="N")
    parser.add_argument("--batch", type=_count, default=batch, metavar="N")
    parser.add_argument("--lr", type=float, default=rate, metavar="RATE")
    parser.add_argument("--device", default="cpu", help="cpu (default), cuda, cuda:1, ...")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


def compare(
    model: nn.Module,
    data: Data,
    options: argparse.Namespace,
    prepare: Callable[[nn.Module, str], Callable[[], None]],
) -> list[Outcome]:
    """Train ``model`` in full precision and with every recipe, from the same weights.

    ``prepare(model, recipe)`` converts a copy and returns what is to be called after every step.
    """
    outcomes = []
    if not options.no_baseline:
        name = "bf16" if options.bf16 else "fp32"
        outcomes.append(train(copy.deepcopy(model), data, options, name, _nothing, None))
    for recipe in options.recipe:
        changed = copy.deepcopy(model)
        after_step = prepare(changed, recipe)
        compress, name = None, recipe
        if options.compress_saved is not None:
            compress = hot.compress_saved(options.compress_saved, min_values=4096)
            name = f"{recipe} + saved {options.compress_saved}"
        outcomes.append(train(changed, data, options, name, after_step, compress))
    return outcomes


def _nothing() -> None:
    pass


def train(
    model: nn.Module,
    data: Data,
    options: argparse.Namespace,
    name: str,
    after_step: Callable[[], None],
    compress: hot.Compression | None,
) -> Outcome:
    """One run."""
    device = torch.device(options.device)
    model = model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate_factor(step, options.steps)
    )
    torch.manual_seed(options.seed)
    order = Generator().manual_seed(options.seed)  # the same batches for every run
    kept = kept_bytes(model, data, options, compress)
    times = []
    bar = progress(options.steps, name)
    for _ in bar:
        batch = _to(data.batch(options.batch, order), device)
        began = _now(device)
        optimizer.zero_grad(set_to_none=True)
        with _autocast(options), compress or contextlib.nullcontext():
            loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        schedule.step()
        after_step()
        times.append(_now(device) - began)
        if not math.isfinite(loss.item()):
            raise RuntimeError(f"{name}: the loss is {loss.item()}")
        bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
    val_loss, accuracy = evaluate(model, data.validation, device)
    step = 1e3 * statistics.median(times[min(3, len(times) - 1) :])
    return Outcome(name, val_loss, accuracy, kept / 2**20, step)


def progress(steps: int, name: str) -> Any:
    """A progress bar; where nobody watches, a line every five seconds."""
    interval = 0.1 if sys.stderr.isatty() else 5.0
    return tqdm(range(steps), desc=f"{name:<18}", unit="step", mininterval=interval)


def kept_bytes(
    model: nn.Module, data: Data, options: argparse.Namespace, compress: hot.Compression | None
) -> int:
    """Bytes that autograd keeps of one forward pass; nothing is changed by measuring them."""
    batch = _to(data.batch(options.batch, Generator().manual_seed(0)), torch.device(options.device))
    converted = any(isinstance(getattr(m, "config", None), hot.HotConfig) for m in model.modules())
    if not converted and compress is None:
        # The report wants something to compare with; what it says of the plain model is wanted.
        compress = hot.compress_saved()
        with _autocast(options):
            return hot.memory_report(model, batch, None, loss_fn=loss_of, compress=compress).before
    with _autocast(options):
        return hot.memory_report(model, batch, None, loss_fn=loss_of, compress=compress).after


def table(outcomes: list[Outcome]) -> str:
    """The runs, a line each."""
    head = f"{'run':<20}{'val loss':>10}{'accuracy':>10}{'kept for backward':>20}{'step':>12}"
    lines = [head, "-" * len(head)]
    for o in outcomes:
        kept = f"{o.kept_mib:.2f} MiB ({100 * o.kept_mib / outcomes[0].kept_mib:.0f} %)"
        accuracy = f"{100 * o.val_accuracy:.1f} %"
        lines.append(f"{o.run:<20}{o.val_loss:>10.3f}{accuracy:>10}{kept:>20}{o.step_ms:>9.1f} ms")
    return "\n".join(lines)


def main(name: str, run: Callable[[], list[Outcome]], options: argparse.Namespace) -> int:
    """Run, print, write; errors that a user can mend become one line."""
    try:
        _check_device(torch.device(options.device))
        torch.manual_seed(options.seed)
        outcomes = run()
    except (OSError, RuntimeError, ValueError, NotImplementedError, ImportError) as error:
        print(f"{name}: error: {error}", file=sys.stderr)
        return 1
    print(f"\n{table(outcomes)}")
    if options.json is not None:
        content: dict[str, Any] = {"runs": [asdict(outcome) for outcome in outcomes]}
        options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0


def _check_device(device: torch.device) -> None:
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"--device {device}: torch sees {torch.cuda.device_count()} CUDA devices")


def _autocast(options: argparse.Namespace) -> Any:
    if not options.bf16:
        return contextlib.nullcontext()
    return torch.autocast(torch.device(options.device).type, torch.bfloat16)


def _to(batch: Batch, device: torch.device) -> Batch:
    inputs, targets = batch
    return inputs.to(device), targets.to(device)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
