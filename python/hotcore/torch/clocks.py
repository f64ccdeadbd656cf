"""Steps and the clock with which ``advise`` and ``memory_report`` measure."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
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


def milliseconds(step: Step, device: torch.device, calls: int = 1) -> float:
    """Milliseconds of a step by the host's clock, over some calls, until the device is done."""
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    for _ in range(calls):
        step()
    if cuda:
        torch.cuda.synchronize(device)
    return (time.perf_counter() - start) * 1e3 / calls


def whole(
    model: nn.Module, inputs: Any, loss_fn: LossFn | None, update: Step | None = None
) -> Step:
    """Return a step: forward, backward and ``update``, then gradients are dropped."""

    def step() -> None:
        loss = loss_of(model, inputs, loss_fn)
        # A training loop leaves autocast here, so that the next step casts the weights anew.
        torch.clear_autocast_cache()
        with torch.autocast(loss.device.type, enabled=False):
            loss.backward()  # type: ignore[no-untyped-call]  # torch's has no annotations
            if update is not None:
                update()
        for parameter in model.parameters():
            parameter.grad = None

    return step
