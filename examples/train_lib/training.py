"""One training run: the loop for both tasks and every recipe, and its measurements."""

from __future__ import annotations

import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import hotcore.torch as hot
import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from tqdm import tqdm

from .data import Batch, Data, Digits, StdlibText
from .models import SmallGPT, SmallViT

WARMUP_STEPS = 20
CURVE_POINTS = 20
BUSY_CORES = 0.25
"""Cores that other processes may take from the threads of a run without a mark."""


def in_blocks(module: nn.Module, fqn: str) -> bool:
    """Selects the Linear layers of the transformer blocks; embeddings and the head stay plain."""
    return fqn.startswith("blocks.")


@dataclass(frozen=True)
class Task:
    """A dataset, a model for it, and how to train that model."""

    name: str
    title: str
    data: Data
    build: Callable[[], nn.Module]
    learning_rate: float
    steps: int
    batch_size: int
    chosen: Callable[[nn.Module, str], bool] = in_blocks
    """Selects the layers that are converted and counted in ``linear_saved_bytes``."""


def load_task(name: str) -> Task:
    """Read the data of task ``vit`` or ``gpt``."""
    if name == "vit":
        title = "Small ViT, handwritten digits"
        return Task(name, title, Digits(), SmallViT, learning_rate=4e-3, steps=350, batch_size=32)
    text = StdlibText()
    title = "Small GPT, Python's standard library"

    def build() -> nn.Module:
        return SmallGPT(text.VOCAB, context=text.CONTEXT)

    return Task(name, title, text, build, learning_rate=3e-3, steps=300, batch_size=16)


@dataclass
class Result:
    """Measurements of a run; ``curve`` holds (step, validation loss)."""

    task: str
    recipe: str
    seed: int
    steps: int
    val_loss: float = math.nan
    val_accuracy: float = math.nan
    linear_saved_bytes: int = 0
    total_saved_bytes: int = 0
    step_ms: float = math.nan
    seconds: float = math.nan
    busy: bool = False
    """Whether other processes took CPU time that this run's threads needed."""
    curve: list[tuple[int, float]] = field(default_factory=list)

    def to_json(self) -> dict[str, object]:
        """Plain values, for ``json.dump``."""
        return asdict(self)


def convert_blocks(model: nn.Module, recipe: str) -> None:
    """Apply ``recipe`` to the blocks, and fail for a partly converted model.

    ``"NAME+int8"`` is the recipe with an 8-bit forward.
    """
    chosen = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and in_blocks(module, name)
    ]
    name, _, forward = recipe.partition("+")
    config = hot.HotConfig.recipe(name, forward=forward or "plain")
    report = hot.convert(model, config, in_blocks).hot_report
    plain = [name for name in chosen if not isinstance(model.get_submodule(name), hot.HotLinear)]
    if plain:
        raise RuntimeError(f"recipe {recipe!r}: these stay plain: {', '.join(plain)}\n{report}")


class SavedBytes:
    """Bytes that autograd keeps for the backward pass, without parameters.

    A storage counts once, even if two operations save it. ``linear`` counts the ``chosen`` Linear
    layers and convolutions, ``total`` counts all operations.
    """

    def __init__(
        self, model: nn.Module, chosen: Callable[[nn.Module, str], bool] = in_blocks
    ) -> None:
        self._model = model
        self._chosen = chosen
        self._parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self._linear: dict[int, int] = {}
        self._all: dict[int, int] = {}
        self._depth = 0

    @property
    def linear(self) -> int:
        """Bytes saved by the chosen layers."""
        return sum(self._linear.values())

    @property
    def total(self) -> int:
        """Bytes saved by all operations."""
        return sum(self._all.values())

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._parameters:
            self._all[storage.data_ptr()] = storage.nbytes()
            if self._depth:
                self._linear[storage.data_ptr()] = storage.nbytes()
        return tensor

    def _enter(self, *_: object) -> None:
        self._depth += 1

    def _leave(self, *_: object) -> None:
        self._depth -= 1

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Count what the forward pass inside saves; the graph must outlive the context."""
        hooks = []
        for name, module in self._model.named_modules():
            if isinstance(module, nn.Linear | nn.Conv2d) and self._chosen(module, name):
                hooks += [
                    module.register_forward_pre_hook(self._enter),
                    module.register_forward_hook(self._leave),
                ]
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor):
                yield
        finally:
            for hook in hooks:
                hook.remove()


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross entropy, over images or over every position of the text."""
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


@torch.no_grad()
def evaluate(model: nn.Module, batch: Batch, device: torch.device) -> tuple[float, float]:
    """Loss and accuracy over ``batch``; the model returns to training mode."""
    model.eval()
    loss, right, count = 0.0, 0, 0
    for inputs, targets in zip(batch[0].split(256), batch[1].split(256), strict=True):
        logits = model(inputs.to(device)).flatten(0, -2)
        labels = targets.to(device).flatten()
        loss += F.cross_entropy(logits, labels, reduction="sum").item()
        right += int((logits.argmax(dim=-1) == labels).sum())
        count += int((labels >= 0).sum())
    model.train()
    return loss / count, right / count


def learning_rate_factor(step: int, steps: int) -> float:
    """Linear warm-up, then cosine to zero."""
    warmup = min(1.0, (step + 1) / min(WARMUP_STEPS, steps))
    return warmup * 0.5 * (1.0 + math.cos(math.pi * step / steps))


def optimizer_of(
    task: Task, model: nn.Module, steps: int
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LambdaLR]:
    """AdamW and the schedule of its learning rate."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=task.learning_rate, betas=(0.9, 0.95), weight_decay=0.05
    )
    return optimizer, torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate_factor(step, steps)
    )


def train(
    task: Task,
    recipe: str,
    seed: int,
    steps: int,
    device: torch.device,
    convert: Callable[[nn.Module, str], Callable[[], None] | None] = convert_blocks,
    start: Mapping[str, Tensor] | None = None,
    finished: Callable[[nn.Module], None] | None = None,
) -> Result:
    """Train ``task`` in plain fp32 (recipe ``fp32``) or with a HOT recipe.

    ``convert(model, recipe)`` changes the model's layers in place; benchmarks pass other methods.
    If it returns a function, that is called after every step. ``start`` has the first weights, by
    their names in the plain model; None draws them from the seed. ``finished`` gets the trained
    model.

    The seed fixes the initial weights and the order of the data, equally for every recipe. Through
    torch's generator it also fixes HOT's rounding.
    """
    torch.manual_seed(seed)
    model = task.build().to(device)
    if start is not None:
        model.load_state_dict(start)
    after = convert(model, recipe) if recipe != "fp32" else None
    order = Generator().manual_seed(seed)
    optimizer, schedule = optimizer_of(task, model, steps)
    result = Result(task.name, recipe, seed, steps)
    saved = SavedBytes(model, task.chosen)
    times: list[float] = []
    every = max(1, steps // CURVE_POINTS)
    interactive = sys.stderr.isatty()
    progress = tqdm(
        total=steps,
        desc=f"{task.name}  {recipe:<13}",
        unit="step",
        dynamic_ncols=interactive,
        mininterval=0.1 if interactive else 5.0,
    )
    began, others = time.perf_counter(), _cpu_seconds_of_others()
    validation = math.nan
    with progress:
        for step in range(steps):
            if step % every == 0:
                validation, _ = evaluate(model, task.data.validation, device)
                result.curve.append((step, validation))
            inputs, targets = task.data.batch(task.batch_size, order)
            batch = (inputs.to(device), targets.to(device))

            started = _now(device)
            if step == 0:  # the saved bytes of a real step, whose time is discarded below
                with saved.watch():
                    loss = loss_of(model, batch)
                result.linear_saved_bytes, result.total_saved_bytes = saved.linear, saved.total
            else:
                loss = loss_of(model, batch)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            schedule.step()
            times.append(_now(device) - started)
            if after is not None:
                after()

            value = loss.item()
            if not math.isfinite(value):
                raise RuntimeError(f"{task.name} with {recipe}: loss is {value} at step {step}")
            progress.set_postfix(loss=f"{value:.3f}", validation=f"{validation:.3f}", refresh=False)
            progress.update()
        result.val_loss, result.val_accuracy = evaluate(model, task.data.validation, device)
        result.curve.append((steps, result.val_loss))
        progress.set_postfix(loss=f"{value:.3f}", validation=f"{result.val_loss:.3f}")
    if finished is not None:
        finished(model)
    # The first steps warm caches and allocate the optimizer's state.
    result.step_ms = 1e3 * statistics.median(times[min(5, len(times) - 1) :])
    result.seconds = time.perf_counter() - began
    free = len(os.sched_getaffinity(0)) - torch.get_num_threads() + BUSY_CORES
    result.busy = _cpu_seconds_of_others() - others > free * result.seconds
    return result


def _cpu_seconds_of_others() -> float:
    """CPU time that other processes have had on this process's CPUs, or 0 without Linux's file."""
    try:
        lines = Path("/proc/stat").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0.0
    names = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    times = [list(map(int, line.split()[1:9])) for line in lines if line.split()[0] in names]
    ticks = sum(sum(row) - row[3] - row[4] for row in times)  # without idle and iowait
    return ticks / os.sysconf("SC_CLK_TCK") - time.process_time()


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
