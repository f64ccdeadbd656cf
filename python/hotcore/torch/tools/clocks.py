"""Steps, and the time and memory of one, as ``advise`` and ``memory_report`` measure them."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..conversion.probe import LossFn, loss_of

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


def allocator_peak(device: torch.device, step: Step) -> int:
    """The CUDA allocator's peak over a step, including earlier allocations."""
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device)


def unallocated_in_pools(segments: Sequence[Mapping[str, Any]]) -> int:
    """Bytes of CUDA graphs' private pools that the allocator does not count as allocated."""
    private = [s for s in segments if tuple(s.get("segment_pool_id", (0, 0))) != (0, 0)]
    return sum(s["total_size"] - s["allocated_size"] for s in private)
