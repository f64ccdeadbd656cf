"""Run a benchmark in several processes, for accuracy and never for times.

``run_all`` gives every piece of work to a process of a pool until a time limit. It hands over each
result at once, so that the report on disk is complete.
"""

from __future__ import annotations

import contextlib
import math
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
"""Name, function of a module (pickled by name), and its arguments."""


def _prepare(path: list[str], threads: int) -> None:
    sys.path[:] = path
    import timing

    timing.use_threads(threads)


def or_left_out(device: str, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return ``run``'s result, or a row with the reason if this machine lacks something.

    On a GPU a failure becomes a row, so that the others go on; on the CPU it is raised.
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
    budget_s: float = math.inf,
    threads: int = 1,
    title: str = "runs",
    longest_s: float = 0.0,
) -> list[str]:
    """Do the work in order, ``jobs`` at a time. Returns the names that the budget left out.

    ``done`` gets each piece's name and result, in this process. One job does all work here; of
    several each sees one of ``devices``, as "cuda". No piece starts that would exceed the budget
    if it took as long as the longest so far (``longest_s``: of an earlier call). An exception of a
    piece ends everything, after the running pieces have handed over their results.
    """
    began = time.perf_counter()
    longest = longest_s
    failed: BaseException | None = None

    def in_time() -> bool:
        return time.perf_counter() - began + longest < budget_s

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
        # tqdm reads it at import. Bars of parallel runs would overwrite each other.
        seen = [{"TQDM_DISABLE": "1"} | _only(device, devices) for device in range(devices)]
        with contextlib.ExitStack() as stack:
            pools = [
                stack.enter_context(ProcessPoolExecutor(-(-jobs // devices), context, *prepare))
                for _ in range(devices)
            ]
            waiting = list(reversed(work))
            running: dict[Future[Any], tuple[str, float, int]] = {}
            while waiting or running:
                while waiting and len(running) < jobs and failed is None:
                    name, function, arguments = waiting.pop()
                    if not in_time():
                        left.append(name)
                        continue
                    busy = [device for *_, device in running.values()]
                    free = min(range(devices), key=busy.count)
                    with mock.patch.dict(os.environ, seen[free]):  # a submit starts a process
                        future = pools[free].submit(function, *arguments)
                    running[future] = name, time.perf_counter(), free
                if not running:
                    break
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    name, start, _ = running.pop(future)
                    longest = max(longest, time.perf_counter() - start)
                    if (error := future.exception()) is None:
                        done(name, future.result())
                    failed = failed or error
                    bar.update()
    if failed is not None:
        raise failed
    return left


def _only(device: int, devices: int) -> dict[str, str]:
    """Return the environment of a process that sees one device."""
    if devices == 1:
        return {}
    listed = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(devices)))
    return {"CUDA_VISIBLE_DEVICES": listed.split(",")[device]}
