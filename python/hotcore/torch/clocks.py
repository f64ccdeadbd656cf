"""What ``advise`` and ``memory_report`` measure with: steps and a clock."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from .probe import LossFn, loss_of

Step = Callable[[], object]


@dataclasses.dataclass(frozen=True)
class Measured:
    """Steps under one setting: milliseconds, median and quartiles of the rounds, and bytes."""

    median_ms: float
    q1_ms: float
    q3_ms: float
    kept_bytes: int

    @property
    def spread_ms(self) -> float:
        """Half of the distance between the quartiles."""
        return (self.q3_ms - self.q1_ms) / 2


class Clock:
    """The host's clock, around a burst of calls on CUDA, until the device is done with them."""

    def __init__(self, device: torch.device, burst: int) -> None:
        """Measure on this device; ``burst`` calls together where the device runs behind."""
        self.device = device
        self._burst = burst if device.type == "cuda" else 1

    def measure(self, step: Step) -> float:
        """Milliseconds of a call."""
        self._wait()
        start = time.perf_counter()
        for _ in range(self._burst):
            step()
        self._wait()
        return (time.perf_counter() - start) * 1e3 / self._burst

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def spread(values: Sequence[float], kept_bytes: int) -> Measured:
    """Median and quartiles of the rounds."""
    q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
    return Measured(median, q1, q3, kept_bytes)


def whole(
    model: nn.Module, inputs: Any, loss_fn: LossFn | None, update: Step | None = None
) -> Step:
    """Forward and backward of the model, and ``update`` before the gradients are dropped."""

    def step() -> None:
        loss = loss_of(model, inputs, loss_fn)
        # As where a training loop leaves autocast: the next step casts the weights anew.
        torch.clear_autocast_cache()
        with torch.autocast(loss.device.type, enabled=False):
            loss.backward()  # type: ignore[no-untyped-call]
            if update is not None:
                update()
        for parameter in model.parameters():
            parameter.grad = None

    return step


def device_name(device: torch.device) -> str:
    """The GPU, or the CPU's threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type}, {torch.get_num_threads()} threads"
