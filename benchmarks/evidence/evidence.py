"""The evidence that needs a GPU machine, in calls: timings alone, then trainings side by side.

    python -m benchmarks.evidence.evidence --call a --out FOLDER  # 480 s: latency, memory, two GPTs
    python -m benchmarks.evidence.evidence --call b --out FOLDER  # 480 s: a larger GPT, images
    python -m benchmarks.evidence.evidence --call c --out FOLDER  # 900 s: the largest GPT and ViT
    python -m benchmarks.evidence.evidence --call d --out FOLDER  # 1800 s: more seeds of all, ranks
    python -m benchmarks.evidence.evidence --parts latency memory --out FOLDER
    python -m benchmarks.evidence.evidence --list    # parts, their commands and seconds

Parts of one call run in its order: those with times have the machine to themselves; after them the
GPU's trainings run one after the other while the CPU's (what ablations and BERT lack) run beside
them on the other cores (losses alone, no times). Every part has a limit; each writes its report
after every run, so a part that is stopped loses what it is at. Reports in benchmarks/results/ of
the same name are gone on with: unpack the first call's archive there before the second.

FOLDER gets one archive a call, ``evidence-CALL.tar.gz``, with the reports and a log of each part;
it is rewritten after every part, and every half minute while trainings run. Unpack it over
benchmarks/results/, then run plot_evidence and doc_tables.
"""

from __future__ import annotations

import argparse
import math
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from evidence import RESULTS, ROOT

FOLDER = ROOT / "benchmarks"

SCALE = ("bf16", "default", "default int8-forward", "fast", "FP8 tensorwise", "compact")
LARGEST = ("bf16", "default int8-forward", "default", "FP8 tensorwise")
EVERY = (*SCALE, *(f"{name} int8-forward" for name in ("fast", "compact")), "accurate",
         "paper", *(f"{name} int8-forward" for name in ("accurate", "paper")))  # fmt: skip
SEEDS = "0 1 2 3 4"
"""Of every contender of a size, fixed here before a run (docs/dev/benchmarks.md)."""
TOKENS_PER_PARAMETER = 5.0
"""Of the longer run; the installed packages hold no text for ten."""
GRACE_S = 15.0
"""Between a part's own budget and the time at which it is ended."""
PACK_S = 30.0
"""Between two archives while a part runs that takes no times."""


@dataclass(frozen=True)
class Part:
    """One command; ``{report}`` is where its JSON goes, ``{budget}`` the seconds it may take."""

    name: str
    seconds: float
    words: tuple[str, ...]
    report: str
    alone: bool = False
    """Measures time or memory: nothing runs beside it."""
    gpu: bool = True
    """Runs on the GPU, after the one before; else beside those, on the other cores."""


def gpt(
    size: str,
    seconds: float,
    seeds: str,
    contenders: Sequence[str],
    jobs: int,
    tokens_per_parameter: float | None = None,
    more: str = "",
) -> Part:
    """A size of the scaling study: 400 steps for each, 13.1 M tokens, or as many as are said.

    ``more``: of the part's name, where another has that report, too.
    """
    many = tokens_per_parameter is not None
    length = ("--tokens-per-parameter", str(tokens_per_parameter)) if many else ("--steps", "400")
    words = ("bench_gpt.py", "--device", "cuda", "--size", size, *length, "--jobs",
             str(jobs), "--budget", "{budget}", "--seeds", *seeds.split(), "--contenders",
             *contenders)  # fmt: skip
    name = f"gpt-{size}-long" if many else f"gpt-{size}"
    return Part(name + more, seconds, words, f"cuda-{name}.json")


def training(name: str, seconds: float, jobs: int, tasks: str, *more: str) -> Part:
    """A table of bench_training."""
    on_gpu = "--device" in more
    words = ("bench_training.py", "--tasks", tasks, "--jobs", str(jobs), "--budget", "{budget}")
    return Part(name, seconds, (*words, *more), f"{name}.json", gpu=on_gpu)


IMAGES = "fp32;bf16;naive_int4;luq;lbp_wht;authors_hot;default;fast;int4;paper"
OF_VIT = f"{IMAGES};paper, tiles;default int8-forward;torchao_fp8"
FEW = "fp32;naive_int4;luq;lbp_wht;default;fast;paper"
OF_BERT = (
    "fp32;bf16;naive_int4;luq;lbp_wht_flat;authors_hot;default;fast;int4;paper;default int8-forward"
)
OF_LARGE_VIT = (
    "fp32;bf16;torchao_fp8;naive_int4;luq;lbp_wht;default;fast;paper;default int8-forward"
)
TUNED = (
    "fp32;bf16;torchao_fp8;naive_int4;luq;default;fast;compact;paper;LoRA;"
    "default int8-forward;fast int8-forward;compact int8-forward"
)
CUDA = ("--device", "cuda")
RANKS = ";".join(f"paper{of}{rank}" for of in ("", ", g_x in INT8")
                 for rank in (", rank 16", "", ", rank 4", ", rank 2", ", rank 1"))  # fmt: skip
VIT_S = training("cuda-images-vit-s", 380, 8, "images-vit-s", *CUDA, "--methods", OF_LARGE_VIT)
VIT_B = training(
    "cuda-finetune-vit-b", 420, 8, "images-vit-b", *CUDA, "--tf32", "--table", "finetune",
    "--methods", TUNED,
)  # fmt: skip
CALLS: dict[str, tuple[Part, ...]] = {
    "a": (
        Part("latency", 85, ("bench_latency.py", *CUDA, "--budget", "{budget}"),
             "cuda-latency.json", alone=True),
        Part("memory", 80, ("bench_memory.py", *CUDA, "--budget", "{budget}"),
             "cuda-memory.json", alone=True),
        gpt("10M", 110, "0 1 2", SCALE, 5),
        gpt("25M", 165, "0 1 2", SCALE, 5),
        training("ablations", 290, 10, "vit,gpt", "--table", "ablations"),
    ),
    "b": (
        gpt("91M", 480, "0 1", EVERY, 4),
        training("cuda-images-vit", 150, 8, "images-vit", *CUDA, "--methods", OF_VIT),
        training("cuda-images-resnet18", 300, 8, "images-resnet18", *CUDA, "--methods", IMAGES),
        training("cuda-images-efficientformer", 330, 8, "images-efficientformer", *CUDA,
                 "--methods", FEW),
        training("ablations", 180, 10, "vit,gpt", "--table", "ablations"),
        training("bert", 120, 10, "bert", "--methods", OF_BERT),
    ),
    "c": (
        gpt("311M", 560, "0 1", LARGEST, 2),
        gpt("10M", 150, "0 1", SCALE, 5, TOKENS_PER_PARAMETER),
        VIT_S,
        VIT_B,
    ),
    "d": (
        VIT_B,
        VIT_S,
        gpt("10M", 120, SEEDS, SCALE, 4, more="-seeds"),
        gpt("25M", 200, SEEDS, SCALE, 4, more="-seeds"),
        gpt("91M", 400, SEEDS, SCALE, 4, more="-seeds"),
        training("cuda-ranks-efficientformer", 450, 8, "images-efficientformer", *CUDA, "--table",
                 "ablations", "--methods", f"fp32;{RANKS}"),
        gpt("311M", 560, SEEDS, LARGEST, 2, more="-seeds"),
    ),
}  # fmt: skip


class Runner:
    """Runs parts; their reports and logs lie in ``work``, an archive of them in ``out``."""

    def __init__(self, call: str, out: Path, work: Path, deadline: float) -> None:
        self._out, self._work, self._deadline = out / f"evidence-{call}.tar.gz", work, deadline
        self._lock = threading.Lock()

    def run(self, part: Part) -> None:
        """One part; its output goes to a log. Says how it ended."""
        left = self._deadline - time.monotonic()
        budget = min(part.seconds, left - GRACE_S)
        if budget < 5:
            self._say(f"{part.name}: left out, no time left")
            return
        report = self._work / part.report
        if not report.exists() and (RESULTS / part.report).exists():
            shutil.copy(RESULTS / part.report, report)
        words = command(part, report, budget)
        began = time.monotonic()
        with (self._work / f"{part.name}.log").open("w") as log:
            process = subprocess.Popen(
                words, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1",
                     "TORCHINDUCTOR_COMPILE_THREADS": "2"},
            )  # fmt: skip
            until = time.monotonic() + min(budget + GRACE_S, max(1.0, left))
            status = self._wait(process, until, math.inf if part.alone else PACK_S)
        self._say(f"{part.name}: status {status}, {time.monotonic() - began:.0f} s")
        self._pack()

    def _wait(self, process: subprocess.Popen[bytes], until: float, interval: float) -> str:
        """How the process ended. Packs at intervals, since a machine may be taken back."""
        while (left := until - time.monotonic()) > 0:
            try:
                return str(process.wait(min(interval, left)))
            except subprocess.TimeoutExpired:
                self._pack()
        os.killpg(process.pid, 15)  # its own session: it and the workers that it started
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
        return "ended at its limit"

    def _say(self, text: str) -> None:
        with self._lock:
            print(text, flush=True)
            with (self._work / "evidence.log").open("a") as log:
                log.write(text + "\n")

    def _pack(self) -> None:
        with self._lock:
            part = self._out.with_name(f".{self._out.name}.part")
            with tarfile.open(part, "w:gz") as archive:
                for path in sorted(self._work.iterdir()):
                    if path.is_file() and not path.name.endswith(".part"):
                        archive.add(path, path.name)
            part.replace(self._out)


def command(part: Part, report: Path, budget: float) -> list[str]:
    """What is executed."""
    words = [word.replace("{budget}", f"{budget:.0f}") for word in part.words]
    return [sys.executable, str(FOLDER / words[0]), *words[1:], "--json", str(report)]


def listed(call: str) -> str:
    lines = [f"call {call}:"]
    for part in CALLS[call]:
        place = "alone" if part.alone else "GPU" if part.gpu else "CPU, beside"
        words = shlex.join(part.words).replace("'{budget}'", f"{part.seconds:.0f}")
        lines.append(f"  {part.name:28s} {part.seconds:4.0f} s  {place:11s}  {words}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    known = list(dict.fromkeys(part.name for parts in CALLS.values() for part in parts))
    parser.add_argument("--call", choices=tuple(CALLS), default="a")
    parser.add_argument(
        "--parts", nargs="+", choices=known, help="of any call; default: all of one"
    )
    parser.add_argument("--out", type=Path, help="where the archive goes")
    parser.add_argument("--seconds", type=float, default=480, help="of this call, at most")
    parser.add_argument("--list", action="store_true")
    args = parser.parse_args(argv)
    if args.list:
        print("\n".join(map(listed, CALLS)))
        return
    if args.out is None:
        parser.error("--out is needed: a folder")
    args.out.mkdir(parents=True, exist_ok=True)
    parts: list[Part] = list(CALLS[args.call])
    if args.parts:
        named = {part.name: part for call in CALLS.values() for part in call}
        parts = [named[name] for name in args.parts]
    deadline = time.monotonic() + args.seconds
    with tempfile.TemporaryDirectory(prefix="evidence-") as folder:
        runner = Runner(args.call, args.out, Path(folder), deadline)
        for part in parts:
            if part.alone:
                runner.run(part)
        rest = [part for part in parts if not part.alone]
        queues = [[part for part in rest if part.gpu], [part for part in rest if not part.gpu]]

        def one_by_one(queue: Sequence[Part]) -> None:
            for part in queue:
                runner.run(part)

        threads = [threading.Thread(target=one_by_one, args=(queue,)) for queue in queues]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


if __name__ == "__main__":
    main()
