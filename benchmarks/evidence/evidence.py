"""The evidence that needs a GPU machine, in calls.

    python -m benchmarks.evidence.evidence --call a --out FOLDER  # 440 s: latency, memory, GPTs
    python -m benchmarks.evidence.evidence --call b --out FOLDER  # 1260 s: a larger GPT, images
    python -m benchmarks.evidence.evidence --call c --out FOLDER  # 1510 s: largest GPT and ViT
    python -m benchmarks.evidence.evidence --call d --out FOLDER  # 2530 s: more seeds, ranks
    python -m benchmarks.evidence.evidence --parts latency memory --out FOLDER
    python -m benchmarks.evidence.evidence --list    # parts, their commands and seconds

The parts of a call run one after the other. Each has a limit, and writes its report after every
run: a part that is stopped loses what it is at. Reports of the same name in FOLDER, or in
benchmarks/results/, are gone on with. FOLDER gets the reports and a log of each part; copy the
reports to benchmarks/results/, then run plot_evidence and doc_tables.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from evidence import RESULTS, ROOT

FOLDER = ROOT / "benchmarks"
SCALE = ("bf16", "default", "default int8-forward", "fast", "FP8 tensorwise")
LARGEST = ("bf16", "default int8-forward", "default", "FP8 tensorwise")
EVERY = (*SCALE, "accurate", "paper",
         *(f"{name} int8-forward" for name in ("fast", "accurate", "paper")))  # fmt: skip
SEEDS = "0 1 2 3 4"
"""Of every contender of a size, fixed here before a run (docs/dev/benchmarks.md)."""
GRACE_S = 15.0
"""Between a part's own budget and the time at which it is ended."""


CUDA = ("--device", "cuda")


@dataclass(frozen=True)
class Part:
    """One command; ``{budget}`` is the seconds it may take."""

    name: str
    seconds: float
    words: tuple[str, ...]
    report: str
    """Where its JSON goes."""


def gpt(name: str, seconds: float, contenders: Sequence[str], *more: str, part: str = "") -> Part:
    """Of bench_gpt.py, ``name`` begins with its size; ``part``: where another has that report."""
    words = ("bench_gpt.py", *CUDA, "--size", name.partition("-")[0], *more, "--budget", "{budget}",
             "--contenders", *contenders)  # fmt: skip
    return Part(f"gpt-{name}{part}", seconds, words, f"cuda-gpt-{name}.json")


def scale(
    size: str, seconds: float, seeds: str, contenders: Sequence[str], jobs: int, more: str = ""
) -> Part:
    """A size of the scaling study: 400 steps for each, 13.1 M tokens."""
    words = ("--steps", "400", "--jobs", str(jobs), "--seeds", *seeds.split())
    return gpt(size, seconds, contenders, *words, part=more)


def decides(size: str, seconds: float) -> Part:
    """Twenty tokens a parameter, on all GPUs; its plan is docs/dev/evidence.md."""
    return gpt(f"{size}-20", seconds, SCALE, "--tokens-per-parameter", "20", "--graph",
               "--validation-batches", "50", "--points", "30", "--epochs", "8", "--devices", "0",
               "--seeds", "0", "1", "2", "3")  # fmt: skip


def training(name: str, seconds: float, jobs: int, tasks: str, *more: str) -> Part:
    """A table of bench_training, on the GPU."""
    words = ("bench_training.py", "--tasks", tasks, "--jobs", str(jobs), "--budget", "{budget}")
    return Part(name, seconds, (*words, "--device", "cuda", *more), f"{name}.json")


IMAGES = "fp32;bf16;naive_int4;luq;lbp_wht;authors_hot;default;fast;int4;paper"
OF_VIT = f"{IMAGES};paper, tiles;default int8-forward;torchao_fp8"
FEW = "fp32;naive_int4;luq;lbp_wht;default;fast;paper"
OF_LARGE_VIT = (
    "fp32;bf16;torchao_fp8;naive_int4;luq;lbp_wht;default;fast;paper;default int8-forward"
)
TUNED = (
    "fp32;bf16;torchao_fp8;naive_int4;luq;default;fast;paper;LoRA;"
    "default int8-forward;fast int8-forward"
)
RANKS = ";".join(f"paper{of}{rank}" for of in ("", ", g_x in INT8")
                 for rank in (", rank 16", "", ", rank 4", ", rank 2", ", rank 1"))  # fmt: skip
VIT_S = training("cuda-images-vit-s", 380, 8, "images-vit-s", "--methods", OF_LARGE_VIT)
VIT_B = training(
    "cuda-finetune-vit-b", 420, 8, "images-vit-b", "--tf32", "--table", "finetune",
    "--methods", TUNED,
)  # fmt: skip
CALLS: dict[str, tuple[Part, ...]] = {
    "a": (
        Part("latency", 85, ("bench_latency.py", *CUDA, "--budget", "{budget}"),
             "cuda-latency.json"),
        Part("memory", 80, ("bench_memory.py", *CUDA, "--budget", "{budget}"),
             "cuda-memory.json"),
        scale("10M", 110, "0 1 2", SCALE, 5),
        scale("25M", 165, "0 1 2", SCALE, 5),
    ),
    "b": (
        scale("91M", 480, "0 1", EVERY, 4),
        training("cuda-images-vit", 150, 8, "images-vit", "--methods", OF_VIT),
        training("cuda-images-resnet18", 300, 8, "images-resnet18", "--methods", IMAGES),
        training("cuda-images-efficientformer", 330, 8, "images-efficientformer",
                 "--methods", FEW),
    ),
    "c": (
        scale("311M", 560, "0 1", LARGEST, 2),
        # The installed packages hold no text for ten tokens a parameter.
        gpt("10M-long", 150, SCALE, "--tokens-per-parameter", "5", "--jobs", "5",
            "--seeds", "0", "1"),
        VIT_S,
        VIT_B,
    ),
    "d": (
        VIT_B,
        VIT_S,
        scale("10M", 120, SEEDS, SCALE, 4, more="-seeds"),
        scale("25M", 200, SEEDS, SCALE, 4, more="-seeds"),
        scale("91M", 400, SEEDS, SCALE, 4, more="-seeds"),
        training("cuda-ranks-efficientformer", 450, 8, "images-efficientformer", "--table",
                 "ablations", "--methods", f"fp32;{RANKS}"),
        scale("311M", 560, SEEDS, LARGEST, 2, more="-seeds"),
    ),
    "e": (decides("10M", 1100), decides("25M", 7500)),
}  # fmt: skip


def run(part: Part, out: Path, deadline: float) -> str:
    """One part; its output goes to a log. How it ended."""
    left = deadline - time.monotonic()
    budget = min(part.seconds, left - GRACE_S)
    if budget < 5:
        return "left out, no time left"
    report = out / part.report
    if not report.exists() and (RESULTS / part.report).exists():
        shutil.copy(RESULTS / part.report, report)
    words = [word.replace("{budget}", f"{budget:.0f}") for word in part.words]
    command = [sys.executable, str(FOLDER / words[0]), *words[1:], "--json", str(report)]
    few = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "2"}
    with (out / f"{part.name}.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True,
                                   env={**os.environ, **few})  # fmt: skip
        try:
            return f"status {process.wait(min(budget + GRACE_S, max(1.0, left)))}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 15)  # its own session: it and the workers that it started
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
        return "ended at its limit"


def listed(call: str) -> str:
    lines = [f"call {call}:"]
    for part in CALLS[call]:
        words = shlex.join(part.words).replace("'{budget}'", f"{part.seconds:.0f}")
        lines.append(f"  {part.name:28s} {part.seconds:4.0f} s  {words}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    named = {part.name: part for parts in CALLS.values() for part in parts}
    parser.add_argument("--call", choices=tuple(CALLS), default="a")
    parser.add_argument("--parts", nargs="+", choices=tuple(named), help="default: all of a call")
    parser.add_argument("--out", type=Path, help="where reports and logs go")
    parser.add_argument("--seconds", type=float, default=480, help="of this call, at most")
    parser.add_argument("--list", action="store_true")
    args = parser.parse_args(argv)
    if args.list:
        print("\n".join(map(listed, CALLS)))
        return
    if args.out is None:
        parser.error("--out is needed: a folder")
    args.out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + args.seconds
    parts = [named[name] for name in args.parts] if args.parts else CALLS[args.call]

    for part in parts:
        began = time.monotonic()
        status = run(part, args.out, deadline)
        print(f"{part.name}: {status}, {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
