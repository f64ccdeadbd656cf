"""What ``autotune`` and ``advise`` measure with: steps, clocks, and settings in turns."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from .plan import Measured
from .probe import LossFn, loss_of

MIN_ROUNDS = 5
_COVER_BYTES = 1 << 28  # written before each measurement on CUDA: beyond the L2, 0.1 ms or less
_BURST = 8  # calls between two readings of the host's clock on CUDA

Step = Callable[[], object]


class Clock:
    """The host's clock, around a burst of calls on CUDA, until the device is done with them."""

    def __init__(self, device: torch.device, burst: int = _BURST) -> None:
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


class DeviceClock(Clock):
    """On CUDA: events around a call that is queued before the device reaches it.

    Meanwhile the device writes a buffer larger than the L2, which also removes every choice's
    inputs from the cache.
    """

    def __init__(self, device: torch.device) -> None:
        """Measure on this device."""
        super().__init__(device)
        with torch.cuda.device(device):
            event: Any = torch.cuda.Event
            self._start, self._end = event(enable_timing=True), event(enable_timing=True)
        self._buffer = torch.empty(_COVER_BYTES, dtype=torch.uint8, device=device)
        self._write_ms = statistics.median(self._elapsed(self._buffer.zero_) for _ in range(5))

    def measure(self, step: Step) -> float:
        """Milliseconds of the device; the writes take longer than queueing the call."""
        self._wait()
        start = time.perf_counter()
        step()
        queued_ms = (time.perf_counter() - start) * 1e3
        for _ in range(max(1, math.ceil(1.5 * queued_ms / max(self._write_ms, 1e-3)))):
            self._buffer.zero_()
        return self._elapsed(step)

    def _elapsed(self, step: Step) -> float:
        stream = torch.cuda.current_stream(self.device)
        self._start.record(stream)
        step()
        self._end.record(stream)
        self._end.synchronize()
        return float(self._start.elapsed_time(self._end))


def in_turns(
    steps: Mapping[str, Step],
    clock: Clock,
    rounds: int,
    budget_ms: float = math.inf,
    settings: Mapping[str, Callable[[], AbstractContextManager[None]]] = MappingProxyType({}),
) -> dict[str, list[float]]:
    """Milliseconds of every step; each takes one turn per round, so slow moments hit all.

    After ``budget_ms``, and the least number of rounds, a step takes no more turns. ``settings``
    are contexts in which the steps of their names run.
    """
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds):
        for name, step in steps.items():
            if turn >= MIN_ROUNDS and sum(times[name]) > budget_ms:
                continue
            with settings.get(name, nullcontext)():
                for _ in range(1 if turn else 3):  # compiles; wakes threads
                    step()
                times[name].append(clock.measure(step))
    return times


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
