"""Runs of a benchmark in several processes: for accuracy, never for times.

``run_all`` gives every piece of work to a process of a pool, one thread each, until a time is over;
what is done is handed over at once, so that a report on disk is never far behind.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from typing import Any
from unittest import mock

from evidence import rivals
from tqdm import tqdm

Work = tuple[str, Callable[..., Any], tuple[Any, ...]]
"""A name, a function of a module (it travels by name), its arguments."""


def _prepare(path: list[str], threads: int) -> None:
    sys.path[:] = path
    import hotcore
    import torch

    torch.set_num_threads(threads)
    hotcore.set_num_threads(threads)


def or_left_out(device: str, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What ``run`` returns; what cannot be had here is a row with the reason.

    On a lent GPU any failure costs its row, not the others' time; on the CPU it is raised.
    """
    try:
        return run()
    except Exception as error:
        missing = isinstance(error, (rivals.TorchaoMissing, NotImplementedError))
        if device == "cpu" and not missing:
            raise
        return {"left out": f"{type(error).__name__}: {error!s:.300}"}


def run_all(
    work: Sequence[Work],
    done: Callable[[str, Any], None],
    *,
    jobs: int = 1,
    devices: int = 1,
    budget_s: float | None = None,
    threads: int = 1,
    title: str = "runs",
) -> list[str]:
    """Do the work in its order, ``jobs`` at a time; the names of what a budget left out.

    Args:
        work: pieces of work; the result of each has to be picklable.
        done: is called with each piece's name and result, in this process.
        jobs: 1: all in this process.
        devices: CUDA devices that the jobs are spread over; each process sees one alone, as "cuda".
        budget_s: no piece is begun that would end later than this many seconds from now, if it took
            as long as the longest so far.
        threads: of each process.
        title: of the progress bar.

    An exception of a piece ends everything, after what runs beside it is done.
    """
    began = time.perf_counter()
    longest = 0.0

    def in_time() -> bool:
        return budget_s is None or time.perf_counter() - began + longest < budget_s

    left: list[str] = []
    with tqdm(total=len(work), desc=title, unit="run", mininterval=5, disable=jobs == 1) as bar:
        if jobs == 1:
            for name, function, arguments in work:
                if not in_time():
                    left.append(name)
                    continue
                start = time.perf_counter()
                done(name, function(*arguments))
                longest = max(longest, time.perf_counter() - start)
            return left
        context = multiprocessing.get_context("spawn")
        prepare = (_prepare, (list(sys.path), threads))
        # Read when tqdm is imported: bars of runs side by side would overwrite each other.
        seen = [{"TQDM_DISABLE": "1"} | _only(device, devices) for device in range(devices)]
        with contextlib.ExitStack() as stack:
            pools = [
                stack.enter_context(ProcessPoolExecutor(-(-jobs // devices), context, *prepare))
                for _ in range(devices)
            ]
            waiting = list(reversed(work))
            running: dict[Future[Any], tuple[str, float, int]] = {}
            while waiting or running:
                while waiting and len(running) < jobs:
                    name, function, arguments = waiting.pop()
                    if not in_time():
                        left.append(name)
                        continue
                    busy = [device for *_, device in running.values()]
                    free = min(range(devices), key=busy.count)
                    with mock.patch.dict(os.environ, seen[free]):  # a submit starts its process
                        future = pools[free].submit(function, *arguments)
                    running[future] = name, time.perf_counter(), free
                if not running:
                    break
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    name, start, _ = running.pop(future)
                    longest = max(longest, time.perf_counter() - start)
                    done(name, future.result())
                    bar.update()
    return left


def _only(device: int, devices: int) -> dict[str, str]:
    """The environment of a process that sees the one device; of one alone as it is."""
    if devices == 1:
        return {}
    listed = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(devices)))
    return {"CUDA_VISIBLE_DEVICES": listed.split(",")[device]}
