"""Clock and reports of the benchmarks (described in docs/dev/benchmarks.md).

All contenders of a comparison run in one process and take turns in changing order. Slow moments of
the machine therefore hit all of them. Reports hold medians and quartiles. A turn on the CPU
is two untimed calls and three timed ones, because spinning thread pools slow the next contender's
first call. On CUDA device events take the time. The L2 is full of unwritten bytes, and a spinning
kernel hides the host's work. Small layers are captured into graphs.
"""

from __future__ import annotations

import argparse
import datetime
import fnmatch
import itertools
import json
import math
import multiprocessing
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import hotcore
import torch
from layers import Call, parse_shape

RESULTS = Path(__file__).parent / "results"
QUICK, TEXT = (Path(__file__).parents[1] / "build" / name for name in ("quick", "text"))
"""Folders of --quick's reports, which replace none of RESULTS, and of the text's tokens."""
FLUSH_BYTES = 1 << 28
SPIN_CYCLES = 1_000_000  # half a millisecond, longer than most contenders' host work
MOST_SPIN_CYCLES = 1 << 28
LEAST_ROUNDS = 5
GIB = 2**30
REPETITIONS = 3  # of a layer that is not steady
STEADY = 0.05
"""Largest distance of a steady row's quartiles, as a share of the median."""

Stopwatch = Callable[[Call], float]
Row = dict[str, Any]
"""Row of a contender: median_ms, q1_ms, q3_ms, measurements, and a script's own figures."""


def synchronized_stopwatch(device: str, count: int = 1) -> Stopwatch:
    """Return a host clock: milliseconds per call, over ``count`` calls and a synchronisation."""

    def measure(call: Call) -> float:
        synchronize(device)
        start = time.perf_counter()
        for _ in range(count):
            call()
        synchronize(device)
        return (time.perf_counter() - start) * 1e3 / count

    return measure


def cuda_stopwatch() -> Stopwatch:
    """Return a clock of events on the current CUDA device and stream, in milliseconds.

    The clock raises RuntimeError if the host cannot queue a call within the longest spin.
    """
    buffer = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    spins: dict[int, int] = {}  # by the id of a call, which lives until its measurements end

    def measure(call: Call) -> float:
        while (cycles := spins.get(id(call), SPIN_CYCLES)) <= MOST_SPIN_CYCLES:
            buffer.zero_()
            torch.cuda._sleep(cycles)
            start.record()
            call()
            end.record()
            ahead = not start.query()  # the device still spins, so it did not wait for the host
            end.synchronize()
            if ahead:
                return start.elapsed_time(end)
            spins[id(call)] = 2 * cycles
        raise RuntimeError("the host is too slow for this call, or it waits for the device")

    return measure


def mark(device: str) -> Any:
    """Return a mark in the device's queue on CUDA, else the time of the host's clock."""
    if device == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between(marks: Sequence[Any], device: str) -> list[float]:
    """Return the milliseconds between marks. Waits for the last one."""
    synchronize(device)
    if device == "cpu":
        return [(end - start) * 1e3 for start, end in itertools.pairwise(marks)]
    return [start.elapsed_time(end) for start, end in itertools.pairwise(marks)]


def stopwatch(device: str) -> Stopwatch:
    return synchronized_stopwatch("cpu") if device == "cpu" else cuda_stopwatch()


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def in_turns(
    contenders: Mapping[str, Call],
    rounds: int,
    device: str,
    *,
    watch: Stopwatch | None = None,
    calls_in: Mapping[str, int] | None = None,
    budget_ms: float = 400.0,
) -> dict[str, Row]:
    """Time every contender, with one turn each per round.

    Args:
        contenders: functions to call, by name.
        rounds: number of turns.
        device: "cpu" or "cuda".
        watch: clock, by default the device's.
        calls_in: units of work in one call, by name (a graph of many calls); 1 by default.
        budget_ms: time after which a contender takes no more turns, but at least 5.

    Returns:
        Row of every contender, with times per unit of work.
    """
    if rounds < 1:
        raise ValueError(f"rounds: {rounds}; expected at least 1")
    measure = watch or stopwatch(device)
    unmeasured, measured = (2, 3) if device == "cpu" else (0, 1)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for call in contenders.values():
        call()
        call()
    synchronize(device)
    names = list(contenders)
    for turn in range(rounds):
        # A new order each turn spreads a contender's after-effects (clocks, pages) over all.
        random.Random(turn).shuffle(names)
        for name in names:
            call = contenders[name]
            if turn >= LEAST_ROUNDS and sum(times[name]) > budget_ms:
                continue
            for _ in range(unmeasured):
                call()
            times[name] += [measure(call) for _ in range(measured)]
    counts = calls_in or {}
    return {name: spread([t / counts.get(name, 1) for t in ts]) for name, ts in times.items()}


def steady(row: Row) -> bool:
    """Whether a row is steady; a difference of medians, without quartiles, counts as steady."""
    return "q1_ms" not in row or _apart(row) <= STEADY


def steadied(contenders: Mapping[str, Call], rounds: int, device: str) -> dict[str, Row]:
    """Run :func:`in_turns`. CUDA repeats rows that are not steady, and marks the last of them."""
    rows = in_turns(contenders, rounds, device)
    if device == "cpu":
        return rows
    for _ in range(REPETITIONS):
        shaky = {name: contenders[name] for name, row in rows.items() if not steady(row)}
        if not shaky:
            break
        again = in_turns(shaky, rounds, device)
        rows |= {name: row for name, row in again.items() if _apart(row) < _apart(rows[name])}
    for row in rows.values():
        if not steady(row):
            row["unsteady"] = True
    return rows


def _apart(row: Row) -> float:
    """Return the distance of a row's quartiles, as a share of its median."""
    return float((row["q3_ms"] - row["q1_ms"]) / row["median_ms"])


def spread(values: Sequence[float]) -> Row:
    """Compute median and quartiles."""
    q1, median, q3 = (
        statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else 3 * values[:1]
    )
    return {"median_ms": median, "q1_ms": q1, "q3_ms": q3, "measurements": len(values)}


def summed(tables: Sequence[Mapping[str, Row]]) -> dict[str, float]:
    """Sum the medians over several layers' rows, for contenders that occur in all.

    A contender with an unsteady row has no sum.
    """
    names = [
        name
        for name in tables[0]
        if all(name in rows and not rows[name].get("unsteady") for rows in tables)
    ]
    return {name: sum(rows[name]["median_ms"] for rows in tables) for name in names}


def in_graphs(
    make: Callable[[], Mapping[str, Call]],
    nbytes: int,
    rounds: int,
    device: str,
    least_calls: int = 24,
    budget_ms: float = 400.0,
) -> dict[str, Any]:
    """Time one call of each contender in CUDA graphs, or give the reason why it cannot be captured.

    The CPU times plain calls.

    Args:
        make: makes contenders with their own arrays. A graph holds as many calls as exceed the L2
            three times with their arrays.
        nbytes: bytes of the arrays of the contender with the smallest ones.
        rounds: as for :func:`in_turns`, also ``budget_ms``.
        device: "cpu" or "cuda".
        least_calls: lowest number of calls in a graph, which share a replay's own cost.
    """
    if device == "cpu":
        return {**in_turns(make(), rounds, device)}
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    sets = [make() for _ in range(max(2, min(48, -(-3 * cache // nbytes))))]
    repeats = max(1, least_calls // len(sets))
    graphs: dict[str, Call] = {}
    out: dict[str, Any] = {}
    for name in sets[0]:
        try:
            graphs[name] = captured([one[name] for one in sets] * repeats)
        except Exception as error:  # the row says why the call cannot be captured
            out[name] = f"{type(error).__name__}: {error!s:.200}"
    counts = dict.fromkeys(graphs, len(sets) * repeats)
    return out | in_turns(graphs, rounds, device, calls_in=counts, budget_ms=budget_ms)


def captured(calls: Sequence[Call]) -> Call:
    """Return the replay of a CUDA graph that holds ``calls`` one after the other."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # creates handles, workspaces and contexts before the capture
        for call in calls[:2]:
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    return graph.replay


# ---- reports ----


def above_zero(kind: Callable[[str], float]) -> Callable[[str], float]:
    """Return the ``type`` of an option whose number must be above zero."""

    def parse(text: str) -> float:
        if (value := kind(text)) <= 0:
            raise argparse.ArgumentTypeError(f"{text}; expected a number above 0")
        return value

    return parse


COUNT = above_zero(int)
"""``type`` of an option that counts."""
OPTIONS: dict[str, dict[str, Any]] = {
    "device": {"choices": ("cpu", "cuda"), "default": "cpu"},
    "devices": {"type": int, "default": 1, "help": "GPUs to use (0: all)"},
    "rounds": {"type": int, "default": 40, "help": "number of turns of each contender"},
    "seed": {"type": int, "default": 0, "help": "seed of the random arrays"},
    "quick": {"action": "store_true", "help": "toy sizes, for a test"},
    "budget": {"type": float, "default": math.inf, "help": "seconds; what would end later is left"},
    "backend": {"help": "of torch.compile; default inductor, where it can compile"},
    "contenders": {"nargs": "+", "metavar": "PATTERN", "help": "names; default: all"},
    "cache": {"type": Path, "default": TEXT, "help": "folder of the text's tokens"},
    "shape": {"type": parse_shape, "action": "append", "help": "three sizes; repeatable"},
}
"""Options that several scripts share."""


def fitting(
    parser: argparse.ArgumentParser,
    names: Sequence[str],
    patterns: Any,
    option: str = "--contenders",
) -> list[str]:
    """Return the names that an option selects. Ends the script if a pattern fits none."""
    for pattern in patterns or ():
        if not fnmatch.filter(names, pattern):
            parser.error(f"{option}: {pattern!r} fits none of {list(names)}")
    return [name for name in names if any(fnmatch.fnmatchcase(name, p) for p in patterns or ["*"])]


def error_arguments(
    description: str | None, benchmark: str, *more: str, **numbers: int
) -> argparse.ArgumentParser:
    """Make a parser for a script without times: ``--json``, and the options ``numbers``.

    ``more`` names options of :data:`OPTIONS`.
    """
    parser = argparse.ArgumentParser(description=(description or "").split("\n")[0])
    for name in more:
        parser.add_argument(f"--{name}", **OPTIONS[name])
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    words = f"report; default benchmarks/results/{benchmark}.json"
    words += ", with --quick in build/quick" if "quick" in more else ""
    parser.add_argument("--json", type=Path, help=words)
    return parser


def arguments(
    description: str | None, benchmark: str, *more: str, own: Collection[str] = ()
) -> argparse.ArgumentParser:
    """Make a parser with the options of all timed scripts, and ``more`` of :data:`OPTIONS`.

    ``own``: of "rounds" and "seed" those for which a script has its own rule.
    """
    usual = [name for name in ("device", "rounds", "seed") if name not in own]
    threads = torch.get_num_threads()
    return error_arguments(description, f"DEVICE-{benchmark}", *usual, *more, threads=threads)


def facts_of(benchmark: str, device: str = "cpu") -> dict[str, Any]:
    """Return the head of a report."""
    facts = machine(device)
    name = facts.pop("device")
    return {"benchmark": benchmark, "date": today(), "device": name, "versions": facts}


def devices_of(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    """Return ``--devices``, all GPUs for 0. Ends the script if they are not there."""
    there = max(1, torch.cuda.device_count()) if args.device == "cuda" else 1
    if not 0 <= args.devices <= there:
        parser.error(f"--devices: {args.devices} GPUs are not there")
    return args.devices or there


def begin(
    parser: argparse.ArgumentParser,
    argv: Sequence[str] | None,
    settings: Callable[[argparse.Namespace], None] | None = None,
) -> argparse.Namespace:
    """Parse and check options, set threads, seed and ``settings``, and print the machine."""
    args = parser.parse_args(argv)
    if vars(args).get("rounds", 2) < 2 or args.threads < 1:
        parser.error("--rounds must be at least 2 and --threads at least 1")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no CUDA device")
    if args.device == "cpu":
        use_threads(args.threads)
        # glibc returns large blocks to the system until it has freed one as large, and a call then
        # pays for new pages. A training process is past that.
        torch.empty(31 << 20, dtype=torch.uint8)
    torch.manual_seed(vars(args).get("seed", 0))
    if settings is not None:
        settings(args)
    print(", ".join(f"{key} {value}" for key, value in machine(args.device).items()), flush=True)
    return args


def use_threads(count: int) -> None:
    """Set the threads of torch and hotcore."""
    torch.set_num_threads(count)
    hotcore.set_num_threads(count)


def start_method(device: str) -> str:
    """Return how processes for work on ``device`` start: "forkserver" or "spawn".

    On a CPU they fork from one that has imported torch and its compiler, which takes six seconds.
    They have the environment of the first call. CUDA refuses to work in a fork.
    """
    if device == "cuda" or "forkserver" not in multiprocessing.get_all_start_methods():
        return "spawn"
    multiprocessing.set_forkserver_preload(["torch._inductor.compile_fx", "torch.distributed.fsdp"])
    return "forkserver"


def machine(device: str) -> dict[str, str]:
    """Return the device, and the versions of all relevant libraries."""
    out = {
        "device": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "hotcore": hotcore.__version__,
        "python": platform.python_version(),
    }
    if device == "cpu":
        return out | {"isa": hotcore.isa(), "threads": str(torch.get_num_threads())}
    return out | {
        "device": torch.cuda.get_device_name(0),
        "cuda": str(torch.version.cuda),
        "driver": driver_version(),
    }


def driver_version() -> str:
    if shutil.which("nvidia-smi") is None:
        return "?"
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    words = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()
    return words[0] if words else "?"


def path_of(args: argparse.Namespace, benchmark: str) -> Path:
    """Return the report's path: ``--json``, or one in RESULTS, with ``--quick`` in QUICK."""
    folder = QUICK if getattr(args, "quick", False) else RESULTS
    device = f"{args.device}-" if hasattr(args, "device") else ""
    path: Path = args.json or folder / f"{device}{benchmark}.json"
    return path


def write(args: argparse.Namespace, benchmark: str, content: Mapping[str, Any]) -> Path:
    """Write the report: device, versions and date, then ``content``."""
    facts = facts_of(benchmark, getattr(args, "device", "cpu"))
    facts |= {key: getattr(args, key) for key in ("rounds", "seed") if hasattr(args, key)}
    path = path_of(args, benchmark)
    write_json(path, {**facts, **content})
    print(f"\nwritten: {path}")
    return path


def resumed(path: Path, settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """Read the report at ``path`` to continue it; None if there is none.

    Ends the script if the report has other settings.
    """
    if not path.exists():
        return None
    report: dict[str, Any] = json.loads(path.read_text())
    same = json.loads(json.dumps(rounded(settings)))  # as they are read from a report
    if report.get("settings") != same:
        sys.exit(
            f"json: {path} has other settings, {report.get('settings')}; expected {same}. Name "
            "another file, or remove it"
        )
    return report


def unusual(options: object, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that a report names only if they differ, because earlier reports name none."""
    found = {name: getattr(options, name) for name in defaults}
    return {name: value for name, value in found.items() if value != defaults[name]}


def begun(path: Path, benchmark: str, settings: Mapping[str, Any], entries: str) -> dict[str, Any]:
    """Read the report at ``path`` to continue it, or begin a new one with an empty ``entries``."""
    empty = {**facts_of(benchmark), "settings": settings, entries: {}}
    return resumed(path, settings) or empty


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a report with a line per entry of its inner mappings, because files are committed."""
    lines = []
    for key, value in rounded(content).items():
        text = json.dumps(value)
        if isinstance(value, Mapping) and value:
            inner = (f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in value.items())
            text = "{\n" + ",\n".join(inner) + "\n }"
        lines.append(f" {json.dumps(key)}: {text}")
    write_whole(path, "{\n" + ",\n".join(lines) + "\n}\n")


def write_whole(path: Path, content: str | Callable[[Path], object]) -> None:
    """Write a file so that readers see the whole old or the whole new one, also after a break."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    content(part) if callable(content) else part.write_text(content, encoding="utf-8")
    part.replace(path)


def today() -> str:
    """Return the date of a run, because a report may grow over several days."""
    return datetime.datetime.now(datetime.timezone.utc).date().isoformat()


def rounded(value: Any, digits: int = 6) -> Any:
    """Round floats to significant digits; further digits are noise in committed files."""
    if isinstance(value, float):
        return float(f"{value:.{digits}g}")
    if isinstance(value, Mapping):
        return {key: rounded(item, digits) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(item, digits) for item in value]
    return value


def line(name: str, row: Row, notes: str = "") -> str:
    """Format a row: median, quartiles, notes, in microseconds."""
    low, mid, high = (row[key] * 1e3 for key in ("q1_ms", "median_ms", "q3_ms"))
    return f"  {name:26s} {mid:10.1f}  [{low:.1f}, {high:.1f}]  {notes}".rstrip()
