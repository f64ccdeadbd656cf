"""Sum the kernel time of a step by class, from torch's profiler and the kernels' names."""

from __future__ import annotations

import json
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

PRODUCTS, QUANTISERS, POINTWISE = "products", "hotcore's quantisers", "pointwise, reductions"
ATTENTION, OPTIMIZER, OTHER = "attention", "optimizer", "other"
COMMUNICATION = "communication"
CLASSES = (PRODUCTS, QUANTISERS, POINTWISE, ATTENTION, OPTIMIZER, OTHER)

_NAMES: tuple[tuple[str, str], ...] = (
    (COMMUNICATION, r"^nccl"),
    # Inductor's names list fused operators: only the prefix identifies the kernel.
    (PRODUCTS, r"^triton_(tem|mm)_"),
    (POINTWISE, r"^triton_"),
    # before the products, because these kernels also contain CUTLASS names
    (ATTENTION, r"flash|fmha|sdpa|attention|cudnn::fusion"),
    (PRODUCTS, r"hot::.*\b(tile|fixup|token|gemm_small)_kernel"),
    (PRODUCTS, r"cutlass|gemm|gemv|nvjet|cublas|splitKreduce|xmma"),
    (PRODUCTS, r"[fdw](prop|grad)_|convolve|conv2d"),
    (QUANTISERS, r"hot::"),
    (OPTIMIZER, r"multi_tensor_apply|adam"),
    (OTHER, r"^Mem(cpy|set)"),
    (POINTWISE, r"elementwise|vectorized|unrolled|reduce|norm|GammaBeta|softmax|\bbn_|pool"),
    (POINTWISE, r"nll|loss|embedding|index|gather|scatter|cat|copy|fill|dropout|gelu|nhwc|nchw"),
    (POINTWISE, r"transpose"),
)
_PATTERNS = tuple((name, re.compile(pattern, re.IGNORECASE)) for name, pattern in _NAMES)
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of a trace, without ranges

LONGEST = 12


class Event(NamedTuple):
    """Kernel, copy or fill with its times in microseconds."""

    name: str
    start: float
    duration: float


def class_of(name: str) -> str:
    """Return the class in :data:`CLASSES` of the first pattern that matches the name."""
    return next((kind for kind, pattern in _PATTERNS if pattern.search(name)), OTHER)


def events_of(trace: Mapping[str, Any]) -> list[Event]:
    """List the kernels of a trace that torch's profiler exported."""
    return [
        Event(str(event["name"]), float(event["ts"]), float(event["dur"]))
        for event in trace["traceEvents"]
        if event.get("ph") == "X" and event.get("cat") in _ON_DEVICE
    ]


def counted_once(events: Sequence[Event]) -> list[Event]:
    """Sort kernels by start and cut overlaps, so that their sum is the time in which any runs.

    A kernel of hotcore or CUTLASS starts while its predecessor still runs, and waits for it
    (programmatic dependent launch). The profiler's duration includes that wait.
    """
    counted, end = [], float("-inf")
    for event in sorted(events, key=lambda event: event.start):
        stop = event.start + event.duration
        counted.append(event._replace(duration=max(0.0, stop - max(end, event.start))))
        end = max(end, stop)
    return counted


def by_name(events: Sequence[Event], steps: int) -> list[tuple[str, float, float]]:
    """List name, microseconds and launches a step of every kernel, the longest first."""
    spent, launches = Counter[str](), Counter(event.name for event in events)
    for event in counted_once(events):
        spent[event.name] += event.duration / steps
    return [(name, us, launches[name] / steps) for name, us in spent.most_common()]


def summary(events: Sequence[Event], steps: int) -> dict[str, Any]:
    """Sum the milliseconds of a step by class, and name the longest kernels.

    Returns:
        ``ms`` (class -> ms, every class, :func:`counted_once`), ``busy_ms`` their sum,
        ``launches``, ``longest`` (kernels by time: name, class, ms, launches).
    """
    kernels, by_class = by_name(events, steps), dict.fromkeys(CLASSES, 0.0)
    for name, us, _ in kernels:
        by_class[class_of(name)] += us / 1e3
    longest = [
        {"kernel": name[:120], "class": class_of(name), "ms": us / 1e3, "launches": launches}
        for name, us, launches in kernels[:LONGEST]
    ]
    times = {"busy_ms": sum(by_class.values()), "launches": len(events) / steps}
    return {"ms": by_class, **times, "longest": longest}


def beside_communication(events: Sequence[Event], steps: int) -> dict[str, Any]:
    """:func:`summary` of what computes, and communication's milliseconds a step.

    Returns:
        That, and ``communication_ms``: ``all`` of it, and ``alone``, in which nothing computes.
    """
    computes = [event for event in events if class_of(event.name) != COMMUNICATION]
    moves = [event for event in events if class_of(event.name) == COMMUNICATION]
    busy, computing, moving = (
        sum(event.duration for event in counted_once(among)) / 1e3 / steps
        for among in (events, computes, moves)
    )
    return summary(computes, steps) | {
        "communication_ms": {"all": moving, "alone": busy - computing}
    }


def profiled_events(step: Callable[[], object], steps: int) -> list[Event]:
    """Profile the kernels of some steps on CUDA."""
    import torch  # only this function needs it
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return events_of(json.loads(path.read_text()))


def profiled(step: Callable[[], object], steps: int) -> dict[str, Any]:
    """Return the :func:`summary` of steps on CUDA. Raises RuntimeError without a kernel."""
    events = profiled_events(step, steps)
    if not events:
        raise RuntimeError("torch's profiler saw no kernel")
    return summary(events, steps)
