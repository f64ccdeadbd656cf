"""Clocks of ``autotune`` and ``advise``, and the one loop that times with them."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    """Milliseconds of one call. On the CPU: the host's clock around it."""

    unmeasured = 1
    """Calls before each measurement: thread pools still spin after the previous one."""

    def __init__(self, device: torch.device) -> None:
        """Measure on this device."""
        self.device = device

    def begin(self, steps: Iterable[Step]) -> None:
        """Warm up."""
        for step in steps:
            step()
            step()
        self._wait()

    def measure(self, step: Step) -> float:
        """Milliseconds of a call."""
        start = time.perf_counter()
        step()
        return (time.perf_counter() - start) * 1e3

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class HostClock(Clock):
    """On CUDA if the host limits the step: bursts of calls, timed until the device is done."""

    unmeasured = 0

    def __init__(self, device: torch.device, burst: int = _BURST) -> None:
        """Measure ``burst`` calls together."""
        super().__init__(device)
        self._burst = burst

    def measure(self, step: Step) -> float:
        """Milliseconds of a call, of those of a burst."""
        self._wait()
        start = time.perf_counter()
        for _ in range(self._burst):
            step()
        self._wait()
        return (time.perf_counter() - start) * 1e3 / self._burst


def host_clock(device: torch.device, burst: int = _BURST) -> Clock:
    """The host's clock; ``burst`` calls together where the device runs behind."""
    return HostClock(device, burst) if device.type == "cuda" else Clock(device)


class DeviceClock(Clock):
    """On CUDA: events around a call that is queued before the device reaches it.

    Meanwhile the device writes a buffer larger than the L2, which also removes every choice's
    inputs from the cache.
    """

    unmeasured = 0

    def __init__(self, device: torch.device) -> None:
        """Measure on this device."""
        super().__init__(device)
        with torch.cuda.device(device):
            event: Any = torch.cuda.Event
            self._start, self._end = event(enable_timing=True), event(enable_timing=True)
        self._buffer = torch.empty(_COVER_BYTES, dtype=torch.uint8, device=device)
        self._writes = 1

    def begin(self, steps: Iterable[Step]) -> None:
        """Warm up, and find how many writes take longer than queueing the slowest call."""
        each = []
        for step in steps:
            step()
            self._wait()
            start = time.perf_counter()
            step()
            each.append((time.perf_counter() - start) * 1e3)
        self._writes = 1
        write = statistics.median(self._elapsed(self._buffer.zero_) for _ in range(5))
        self._writes = max(1, math.ceil(1.5 * max(each, default=0.0) / max(write, 1e-3)))

    def measure(self, step: Step) -> float:
        """Milliseconds of the device."""
        for _ in range(self._writes):
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
    steps: Mapping[str, Step], clock: Clock, rounds: int, budget_ms: float
) -> dict[str, list[float]]:
    """Milliseconds of every step; each takes one turn per round, so slow moments hit all."""
    clock.begin(steps.values())
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds):
        for name, step in steps.items():
            if turn >= MIN_ROUNDS and sum(times[name]) > budget_ms:
                continue
            for _ in range(clock.unmeasured):
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
