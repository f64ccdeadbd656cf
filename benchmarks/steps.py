"""Measure training steps of one model for all contenders: time, host, kernels, memory.

Every contender runs in its own process, so that none sees another's compiled code, graphs or
memory, and a crash ends only one. They start together, which also compiles in parallel. Between
steps they free the memory that only a step needs. Then they take turns, the reference among them.
``jobs`` 0 runs all of them in this process (toy sizes in tests).
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Collection, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import kernel_classes
import timing
import torch
from hotcore.torch import _compat
from hotcore.torch.tools.clocks import unallocated_in_pools
from models import TASKS
from timing import GIB, Row
from training import REFERENCE, Contender, Left, Trainer, cleaned, people

STEPS_TO_START = 5
"""Untimed first steps: they compile, and the second and third record CUDA graphs."""
STEPS_A_TURN = 20
"""Steps queued one after the other, as in training. A synchronisation between them would add the
host's work to the contender's time."""
STEPS_FROM_IDLE = 3
PROFILED_STEPS = 2
START_TIMEOUT_S = 300.0  # for all that start together
CALL_TIMEOUT_S = 120.0


@dataclasses.dataclass(frozen=True)
class Setting:
    """Settings that all contenders of a run share."""

    device: str
    quick: bool = False
    seed: int = 0
    threads: int = 1
    backend: str = "inductor"
    """Backend of torch.compile."""


def setting_of(args: Any) -> Setting:
    """Read the settings from a script's arguments."""
    compiles = args.device == "cuda" or shutil.which("g++") is not None
    backend = args.backend or ("inductor" if compiles else "aot_eager")
    return Setting(args.device, args.quick, args.seed, args.threads, backend)


class Session:
    """Contender that runs in this process: built, compiled, stepping.

    ``begin`` and ``answer`` are those of a :class:`Remote`.
    """

    _asked = ""

    def __init__(self, model: str, contender: Contender, setting: Setting) -> None:
        """Store the arguments; :meth:`start` builds."""
        self._model, self.contender, self._setting = model, contender, setting
        self._trainer: Any = None

    def start(self) -> Row:
        """Build, compile, and run the first steps.

        Raises Left if a library is missing, RuntimeError if the loss is not finite, and torch's
        errors.
        """
        begun = time.perf_counter()
        setting, task = self._setting, TASKS[self._model]
        size = task.small if setting.quick or task.full is None else task.full
        torch.manual_seed(setting.seed)
        try:
            with torch.device(setting.device):
                model = size.build()
        except ModuleNotFoundError as missing:
            raise Left(str(missing)) from missing
        batch = size.batch(torch.Generator().manual_seed(setting.seed))
        batch = {key: value.to(setting.device) for key, value in batch.items()}
        options = {"in_place": True, "backend": setting.backend}
        trainer = self._trainer = Trainer(self.contender, model, batch, task, **options)
        build_s = time.perf_counter() - begun
        with _compat.memory_budget(self.contender.memory_budget):
            losses = [float(trainer.step())]
            first_s = time.perf_counter() - begun - build_s
            losses += [float(trainer.step()) for _ in range(STEPS_TO_START - 1)]
        if not all(map(math.isfinite, losses)):
            raise RuntimeError(f"the loss is not finite: {losses}")
        out: Row = {
            "parameters": sum(p.numel() for p in trainer.model.parameters()),
            "batch": {key: list(value.shape) for key, value in batch.items()},
            "weight_bytes": sum(p.nbytes for p in trainer.model.parameters()),
            "build_s": build_s,
            "first_step_s": first_s,
            "loss": [losses[0], losses[-1]],
        }
        if trainer.report is not None:
            out["converted"] = len(trainer.report.converted)
        if self.contender.compiled is not None:
            out["compiler"] = compiler_counts()
        self.rest()
        return out

    def rest(self) -> None:
        """Free the memory that only a step needs."""
        if self._setting.device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def turn(self) -> float:
        """Return milliseconds per step: many steps and one synchronisation, after an untimed one.

        The CPU runs a few steps, because its host cannot run ahead.
        """
        device = self._setting.device
        count = STEPS_FROM_IDLE if device == "cpu" else STEPS_A_TURN
        self._trainer.step()
        return timing.synchronized_stopwatch(device, count)(self._trainer.step)

    def host(self) -> list[float]:
        """Time the host while it queues a step on an idle device, in milliseconds."""
        times = []
        for _ in range(STEPS_FROM_IDLE):
            timing.synchronize(self._setting.device)
            start = time.perf_counter()
            self._trainer.step()
            times.append((time.perf_counter() - start) * 1e3)
        timing.synchronize(self._setting.device)
        return times

    def memory(self) -> Row:
        """Return the allocator's peak over a step, and the bytes between steps, in GiB. CUDA only.

        The pools of CUDA graphs count whole, because the allocator does not see a replay use them.
        """
        self._trainer.step()
        self.rest()
        torch.cuda.reset_peak_memory_stats()
        static = torch.cuda.memory_allocated()
        self._trainer.step()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated()
        pools = unallocated_in_pools(torch.cuda.memory_snapshot())
        self.rest()
        names = ("peak_gib", "between_steps_gib", "graph_pools_gib")
        values = (peak + pools, static + pools, pools)
        return {name: value / GIB for name, value in zip(names, values, strict=True)}

    def kernels(self) -> Row:
        """Return kernel time by class. CUDA only; the profiler slows the host afterwards."""
        self._trainer.step()
        out = kernel_classes.profiled(self._trainer.step, PROFILED_STEPS)
        self.rest()
        return out

    def begin(self, name: str) -> None:
        self._asked = name

    def answer(self, timeout_s: float) -> Any:
        return getattr(self, self._asked)()

    def hang_up(self) -> None:
        """Do nothing: only a :class:`Remote` has a process to end."""

    def close(self) -> None:
        self._trainer = None


def compiler_counts() -> dict[str, int]:
    """Count graphs, graph breaks, and regions that did not become CUDA graphs."""
    from torch._dynamo.utils import counters  # the source of TORCH_LOGS

    return {
        "graphs": counters["stats"]["unique_graphs"],
        "graph breaks": sum(counters["graph_break"].values()),
        "cudagraph skips": counters["inductor"]["cudagraph_skips"],
    }


# ---- in a separate process ----


def serve(
    connection: Connection, log: str, model: str, contender: Contender, setting: Setting
) -> None:
    """Answer calls of a :class:`Remote` until it ends."""
    with open(log, "w", buffering=1) as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())
        if setting.device == "cpu":
            timing.use_threads(setting.threads)
        session = Session(model, contender, setting)
        with contextlib.suppress(EOFError, BrokenPipeError):
            while (name := connection.recv()) != "close":
                try:
                    connection.send((True, getattr(session, name)()))
                except Left as left:
                    connection.send((False, left))
                except Exception as error:
                    traceback.print_exc()
                    connection.send((False, Said(said(error))))


class Said(Exception):
    """Error of another process, as text."""


def said(error: Exception) -> str:
    """Return kind and message of an error in one line for a report."""
    if isinstance(error, Said):
        return str(error)
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words[:400]}"


class Remote:
    """A :class:`Session` in its own process. A call can start now and be answered later."""

    def __init__(self, model: str, contender: Contender, setting: Setting, folder: Path) -> None:
        """Start the process."""
        context = multiprocessing.get_context(timing.start_method(setting.device))
        self.contender = contender
        self._log = folder / f"{model}-{contender.name}.log".replace(" ", "_").replace("/", "-")
        self._connection, theirs = context.Pipe()
        words = (theirs, str(self._log), model, contender, setting)
        self._process = context.Process(target=serve, args=words)
        self._process.start()
        theirs.close()

    def begin(self, name: str) -> None:
        # A dead process is reported by :meth:`answer`.
        with contextlib.suppress(BrokenPipeError):
            self._connection.send(name)

    def answer(self, timeout_s: float) -> Any:
        """Return the result of the last call, or raise its error or the reason for no answer."""
        if not self._connection.poll(timeout_s):
            self._process.kill()
            raise Said(f"no answer within {timeout_s:.0f} s; {self._last_words()}")
        try:
            good, value = self._connection.recv()
        except (EOFError, ConnectionResetError) as error:
            self._process.join(5)
            code = self._process.exitcode
            raise Said(f"the process ended ({code}); {self._last_words()}") from error
        if not good:
            raise value
        return value

    def hang_up(self) -> None:
        """Let the process end; :meth:`close` waits for it."""
        with contextlib.suppress(BrokenPipeError, OSError):
            self._connection.send("close")

    def close(self) -> None:
        self.hang_up()
        self._process.join(5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._connection.close()

    def _last_words(self) -> str:
        lines = self._log.read_text().split("\n") if self._log.exists() else []
        return " / ".join(line.strip() for line in lines if line.strip())[-400:] or "said nothing"


# ---- all contenders of a model ----


class Wave:
    """Contenders of a model that live together until the end of the context.

    The reference is the first if the others are compared with it. Without ``jobs`` all run in this
    process, else each has its own.
    """

    def __init__(self, model: str, among: Sequence[Contender], setting: Setting, jobs: int) -> None:
        self._model, self._setting, self._remote = model, setting, jobs > 0
        self._contenders = {c.name: c for c in among}
        self.rows: dict[str, Row] = {c.name: {"how": described(c)} for c in among}
        self._alive: dict[str, Remote | Session] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Wave:
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="steps-"))
            self._folder = Path(folder)
            if not self._remote:
                stack.enter_context(cleaned(self._setting.device))
                stack.enter_context(many_recompilations())
            stack.callback(self._close)
            for name in self._contenders:
                self._open(name)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _open(self, name: str) -> None:
        words = (self._model, self._contenders[name], self._setting)
        session = Remote(*words, self._folder) if self._remote else Session(*words)
        self._alive[name] = session
        session.begin("start")

    def _close(self) -> None:
        for session in self._alive.values():
            session.hang_up()  # all end at the same time
        for session in self._alive.values():
            session.close()

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of contenders without an error."""
        return iter(list(self._alive))

    def start(self, patience_s: float) -> None:
        """Wait until all contenders are ready or have failed; their rows record it."""
        end = time.monotonic() + patience_s
        for name in self:
            self.rows[name] |= self._answer(name, end - time.monotonic()) or {}
        if not self._remote:
            return
        lacking = [n for n, row in self.rows.items() if "OutOfMemory" in row.get("error", "")]
        for name in lacking:  # the others have finished their first, largest steps
            print(f"    {name}: no memory beside the others, tried again", flush=True)
            del self.rows[name]["error"]
            self._open(name)
            self.rows[name] |= self._answer(name, patience_s) or {}

    def measure(self, rounds: int, patience_s: float, profiled: bool) -> None:
        """Start, take turns, and fill the rows."""
        begun, rows = time.perf_counter(), self.rows
        cuda = self._setting.device == "cuda"
        times: dict[str, list[float]] = {name: [] for name in rows}
        spent = dict.fromkeys(times, 0.0)
        self.start(patience_s)
        started_s = time.perf_counter() - begun
        for name in self if cuda else ():
            rows[name] |= self.call(name, "memory") or {}
        for _ in range(rounds):
            for name in self:
                start = time.perf_counter()
                step_ms = self.call(name, "turn")
                times[name] += [] if step_ms is None else [step_ms]
                spent[name] += time.perf_counter() - start
        for name in self:
            row = rows[name]
            row["step"] = timing.spread(times[name])
            if TASKS[self._model].frozen:  # a usual figure for LoRA
                tokens = math.prod(row["batch"]["x"][:2])
                row["tokens_per_s"] = tokens / row["step"]["median_ms"] * 1e3
            row["seconds"] = {"started together": started_s, "turns": spent[name]}
        for name in self:
            queued = self.call(name, "host")
            if queued is not None:
                rows[name]["host"] = timing.spread(queued)
        for name in self if cuda and profiled else ():
            # Last, because the profiler slows the host.
            rows[name]["kernels"] = self.call(name, "kernels", fatal=False)
        for row in rows.values():
            if "error" in row:  # its earlier turns do not count
                row.pop("step", None)

    def call(self, name: str, what: str, *, fatal: bool = True) -> Any:
        """Return a session's answer, or None if it fails; the row then holds the error.

        ``fatal`` ends the contender, and its earlier measurements do not count.
        """
        self._alive[name].begin(what)
        return self._answer(name, CALL_TIMEOUT_S, fatal)

    def _answer(self, name: str, timeout_s: float, fatal: bool = True) -> Any:
        try:
            return self._alive[name].answer(max(timeout_s, 0.0))
        except Left as left:
            self.rows[name]["left_out"] = str(left)
        except Exception as error:
            if not self._remote:
                traceback.print_exc()
            self.rows[name]["error" if fatal else "warning"] = said(error)
        if fatal:
            self._alive.pop(name).close()
        return None


def measure(
    model: str,
    among: Sequence[Contender],
    setting: Setting,
    rounds: int,
    jobs: int,
    patience_s: float = START_TIMEOUT_S,
    runs: int = 1,
    profiled: bool = True,
) -> dict[str, Row]:
    """Measure contenders that live together, and return their rows.

    Each of the ``runs`` starts new processes. With ``profiled`` the first run profiles kernels.

    Returns:
        Row by contender: ``how`` with the figures, or with ``error`` or ``left_out``.
    """
    rows = []
    for run in range(runs):
        with Wave(model, among, setting, jobs) as wave:
            wave.measure(rounds, patience_s, profiled and run == 0)
            compare(wave.rows)
            rows.append(wave.rows)
    return combined(rows)


def combined(runs: Sequence[dict[str, Row]]) -> dict[str, Row]:
    """Combine the rows of several runs: medians, and each run's figures under ``runs``.

    Memory, kernels and the compiler's counts come from the first run. A contender that failed in
    one run has that run's row, without figures.
    """
    first, *others = runs
    out: dict[str, Row] = {}
    for name, row in first.items():
        all_of = [row, *(run[name] for run in others)]
        lacking = [one for one in all_of if "step" not in one]
        out[name] = lacking[0] if lacking else row
        if lacking or not others:
            continue
        figures = [{"step_ms": one["step"]["median_ms"]} | one.get("of reference", {})
                 for one in all_of]  # fmt: skip
        row["runs"] = [{k: one[k] for k in ("step_ms", "step") if k in one} for one in figures]
        first_ms = row["step"]["median_ms"]
        for key in ("step", "host"):
            if all(key in one for one in all_of):
                row[key] = timing.spread([one[key]["median_ms"] for one in all_of])
        if "tokens_per_s" in row:
            row["tokens_per_s"] *= first_ms / row["step"]["median_ms"]
        for key in ("step", "host"):
            ratios = [one[key] for one in figures if key in one]
            if ratios:
                row["of reference"][key] = statistics.median(ratios)
    return out


@contextlib.contextmanager
def many_recompilations() -> Iterator[None]:
    """Raise dynamo's limit of eight, because contenders of one process compile the same code."""
    import torch._dynamo.config as dynamo

    name = "recompile_limit" if hasattr(dynamo, "recompile_limit") else "cache_size_limit"
    with dynamo.patch({name: 256}):
        yield


def described(contender: Contender) -> dict[str, Any]:
    """Return the fields, except the name, that differ from a plain eager step in fp32."""
    plain = Contender(contender.name)
    return {
        field.name: getattr(contender, field.name)
        for field in dataclasses.fields(contender)
        if getattr(contender, field.name) != getattr(plain, field.name)
    }


def compare(rows: dict[str, Row]) -> None:
    """Add each contender's shares of the reference's figures."""
    reference = rows.get(REFERENCE, {})
    if "step" not in reference:
        return
    for row in rows.values():
        if "step" not in row:
            continue
        keys = ("step", "host")
        shares = {key: row[key]["median_ms"] / reference[key]["median_ms"] for key in keys}
        if "peak_gib" in row and "peak_gib" in reference:
            shares["peak"] = row["peak_gib"] / reference["peak_gib"]
        if row.get("kernels") and reference.get("kernels"):
            shares["kernels"] = row["kernels"]["busy_ms"] / reference["kernels"]["busy_ms"]
        row["of reference"] = shares
        row["reference"] = {key: reference[key]["median_ms"] for key in ("step", "host")}


def notes(rows: Mapping[str, Row]) -> Iterator[str]:
    """Yield the lines below a wave's table: errors, and further figures of a step."""
    for name, row in rows.items():
        skips = row.get("compiler", {}).get("cudagraph skips", 0)
        words = [row[key] for key in ("error", "left_out", "warning") if key in row]
        words += ["no layer converted"] if row.get("converted") == 0 else []
        words += [f"{skips} regions are NO CUDA graphs"] if skips else []
        if "tokens_per_s" in row:
            weights = f"weights {row['weight_bytes'] / GIB:.2f} GiB"
            words.append(f"{row['tokens_per_s']:.0f} tokens/s, {weights}")
        if words:
            yield f"  {name}: {'; '.join(words)}"


# ---- all models ----


def waves_of(
    models: Sequence[str],
    patterns: Sequence[str] | None,
    jobs: Mapping[str, int],
    done: Mapping[str, Collection[str]] | None = None,
) -> list[tuple[str, list[Contender]]]:
    """Order the measurements: the most important contenders of all models come first.

    The reference always runs. ``jobs`` has the number of contenders that live together, 0 for all;
    ``done`` those that need not run again. Raises ValueError if a pattern fits no contender of any
    model.
    """
    used: set[str] = set()
    parts_of: list[tuple[int, int, str, list[Contender]]] = []
    for order, model in enumerate(models):
        among = people(TASKS[model])
        reference = next(c for c in among if c.name == REFERENCE)
        others = []
        for contender in among:
            fitting = [p for p in patterns or ["*"] if fnmatchcase(contender.name, p)]
            used.update(fitting)
            known = contender.name in (done or {}).get(model, ())
            if fitting and contender is not reference and not known:
                others.append(contender)
        if not others and done and model in done:
            continue
        size = (jobs[model] - 1) if jobs[model] else max(1, len(others))
        parts = [others[i : i + size] for i in range(0, len(others), size)] or [[]]
        parts_of += [(tier, order, model, [reference, *part]) for tier, part in enumerate(parts)]
    unused = sorted(set(patterns or ()) - used)
    if unused:
        raise ValueError(f"--contenders: {unused} fit none of these models' contenders")
    return [(model, part) for _, _, model, part in sorted(parts_of, key=lambda item: item[:2])]


def jobs_for(model: str, jobs: int, device: str) -> int:
    """Return how many contenders start together: at most ``jobs``, and as memory allows."""
    if jobs == 0 or device == "cpu":
        return jobs
    free, _ = torch.cuda.mem_get_info()
    context_gib = 1.0  # a process needs this besides its tensors
    return max(2, min(jobs, int(0.9 * free / GIB / (TASKS[model].peak_gib + context_gib))))
