"""How the benchmarks of whole models train: the contenders, and a model with its optimizer."""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import hotcore.torch as hot
import torch
from models import Batch, Task
from torch import Tensor, nn

RECIPES = ("default", "fast", "int4", "paper", "accurate")
LEARNING_RATE = 1e-4


@dataclass(frozen=True)
class Contender:
    """How a model is trained."""

    name: str
    recipe: str | None = None
    saved: Mapping[str, int | None] = field(default_factory=dict)
    """Arguments of compress_saved; empty: without it."""
    autocast: bool = False
    tf32: bool = False


def contenders(device: str) -> list[Contender]:
    """Those of the tables. On CUDA HOT runs under bf16 autocast, as its rival does."""
    cuda = device == "cuda"
    found = [Contender("fp32")]
    if cuda:
        found += [Contender("tf32", tf32=True), Contender("bf16", autocast=True)]
    return found + [
        Contender("default", "default", autocast=cuda),
        Contender("fast", "fast", autocast=cuda),
        Contender("default + saved 8", "default", {"bits": 8}, autocast=cuda),
        Contender("default + saved 4", "default", {"bits": 4}, autocast=cuda),
        Contender("fast + saved 8", "fast", {"bits": 8}, autocast=cuda),
    ]


VARIANTS: dict[str, dict[str, int | None]] = {
    "8": {"bits": 8},
    "8, GELU 4": {"bits": 8, "activation": 4},
    "8, no attention": {"bits": 8, "attention": None},
    "8, GELU 4, no attention": {"bits": 8, "activation": 4, "attention": None},
    "4, no norm": {"bits": 4, "norm": None},
    "4": {"bits": 4},
}
"""Settings of compress_saved: what it may leave alone. Under bf16 autocast a block of ViT-B keeps,
at batch 128, plain and in 8 bits: two inputs of normalisation (fp32) 155 and 41 MB, GELU's input
155 and 82, attention's q, k, v and result 155 and 82. So attention gives least memory for the most
launches (4 of 7), and it is what quantising changes most."""


def variants(device: str) -> list[Contender]:
    """compress_saved in several settings, beside both rivals and HOT alone."""
    cuda = device == "cuda"
    found = [Contender("fp32")]
    if cuda:
        found.append(Contender("bf16", autocast=True))
    for recipe in ("default", "fast"):
        found.append(Contender(recipe, recipe, autocast=cuda))
        found += [
            Contender(f"{recipe} + {name}", recipe, options, autocast=cuda)
            for name, options in VARIANTS.items()
        ]
    return found


class Trainer:
    """A model of its own, its optimizer, and the step."""

    def __init__(
        self, contender: Contender, model: nn.Module, batch: Batch, task: Task, quick: bool
    ) -> None:
        """Copy ``model`` to the device of ``batch`` and convert the copy."""
        self.contender, self._batch, self._task = contender, batch, task
        self.device = next(iter(batch.values())).device
        model = copy.deepcopy(model).to(self.device).train()
        self.report: hot.ConversionReport | None = None
        if contender.recipe is not None:
            self.report = hot.convert(model, contender.recipe)
            model = self.report.model
        self.wrap(model)
        self._compress: Any = contextlib.nullcontext()
        if contender.saved:
            least = 1024 if quick else 65536
            self._compress = hot.compress_saved(min_values=least, **contender.saved)

    def wrap(self, model: nn.Module) -> None:
        """Train ``model`` from now on, what the model was put into (DDP, FSDP2)."""
        self.model = model
        # Fused on CUDA, the default of transformers' Trainer: else AdamW is a fifth of the step.
        fused = self.device.type == "cuda"
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=fused)

    def loss(self) -> Tensor:
        """Forward pass."""
        with autocast(self.contender, self.device), self._compress:
            return self._task.loss(self.model, self._batch)

    def step(self) -> Tensor:
        """zero_grad, forward, backward, AdamW; the loss."""
        allow_tf32(self.contender.tf32)
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def gradients(self) -> dict[str, Tensor]:
        """Gradient of every parameter that has one, by name."""
        allow_tf32(self.contender.tf32)
        self.optimizer.zero_grad(set_to_none=True)
        self.loss().backward()
        named = self.model.named_parameters()
        return {name: p.grad for name, p in named if p.grad is not None}


def autocast(contender: Contender, device: torch.device) -> Any:
    if not contender.autocast:
        return contextlib.nullcontext()
    return torch.autocast(device.type, torch.bfloat16)


def allow_tf32(allowed: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = allowed
    torch.backends.cudnn.allow_tf32 = allowed


def cosine(got: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> float:
    """Of two gradients of all parameters, summed in float64."""
    sums = torch.zeros(3, dtype=torch.float64, device=next(iter(exact.values())).device)
    for name, b in exact.items():
        a, b = got[name].double().flatten(), b.double().flatten()
        sums += torch.stack([a @ b, a @ a, b @ b])
    product, left, right = sums.tolist()
    return float(product / (left * right) ** 0.5) if left * right else float("nan")


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
