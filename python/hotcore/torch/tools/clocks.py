"""Steps, their time and memory as ``advise`` and ``memory_report`` measure; lines of progress."""

from __future__ import annotations

import dataclasses
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, TypeVar

import torch
from torch import nn

from ..conversion.probe import LossFn, loss_of

Step = Callable[[], object]
now = time.monotonic
_QUIET_S = 5.0
"""Seconds without a line of progress."""
_Item = TypeVar("_Item")


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


def shown(
    items: Iterable[_Item],
    text: str,
    progress: bool,
    budget: float = math.inf,
    clock: Callable[[], float] | None = None,
) -> Iterator[_Item]:
    """Yield items; on a terminal a line says which one is at work, and the time left.

    Args:
        items: without a length there is no time left.
        text: the line, with ``{}`` for an item that is a str, otherwise for its number.
        progress: False yields the items alone.
        budget: seconds after which the work ends.
        clock: by default :data:`now`.
    """
    clock = clock or now
    begun, count = clock(), len(items) if isinstance(items, Sized) else 0
    progress = progress and sys.stderr.isatty()
    for i, item in enumerate(items):
        took = clock() - begun
        if progress and took > _QUIET_S:
            line = text.format(item if isinstance(item, str) else i + 1)
            if count and i:  # a loader's first batch may take long
                left = max(0.0, min(took / i * (count - i), budget - took))
                line += f", {i + 1} of {count}, {left:.0f} s left"
            print(f"\r{line}\033[K", end="", file=sys.stderr, flush=True)
        yield item
    if progress:
        print("\r\033[K", end="", file=sys.stderr, flush=True)
