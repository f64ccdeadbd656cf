"""A training step of ResNet-50: plain bf16 beside HOT, time and peak memory.

    python benchmarks/bench_convolution.py --device cuda                            # 1.5 minutes
    python benchmarks/bench_convolution.py --device cuda --contenders "*eager*"     # half of that
    python benchmarks/bench_convolution.py --device cuda --contenders "*"           # everything
    python benchmarks/bench_convolution.py --quick                                  # toy size, CPU

128 images of 224 x 224, channels_last, bf16 autocast, fp32 weights, AdamW; eager and compiled. HOT
converts every convolution but the first, expected gain or not. "k x k alone": only kernels other
than 1x1, whose products stay torch's. "saved": ReLU keeps a bit instead of its result, which is the
x of the next convolution (``convert(saved=)``). A storage that the device does not have yet is a
row with that error. How it is measured: steps.py, every contender in a process of its own; most of
the time is that of the compilers, side by side. ``doc_tables.py`` shows a report with
``points cuda-convolution.json resnet50``.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import steps
import timing
from models import TASKS
from training import REFERENCE, Contender

MODEL = "resnet50"
USUAL = ("bf16 eager", "default compiled", "token? compiled", "default compiled, saved")
"""Those that are measured unless others are named; the reference always is."""


def contenders() -> list[Contender]:
    """The reference first, then by importance."""

    def one(name: str, recipe: str | None = None, **options: Any) -> Contender:
        how = {"compiled": "default"} if "compiled" in name else {}
        return Contender(name, recipe, autocast=True, channels_last=True, **how, **options)

    found = [one(REFERENCE), one("bf16 eager")]
    kinds: tuple[tuple[str, dict[str, Any]], ...] = (
        ("default {}", {}),
        ("token8 {}", {"settings": {"storage": "token8", "gw_scale": "token"}}),
        ("token4 {}", {"settings": {"storage": "token4", "gw_scale": "token"}}),
        ("default {}, k x k alone", {"wide": True}),
        ("default {}, saved", {"kept": 8}),
    )
    return found + [
        one(name.format(how), "default", **options)
        for name, options in kinds
        for how in ("compiled", "eager")
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = timing.arguments(__doc__, "convolution")
    parser.set_defaults(rounds=2)
    parser.add_argument("--contenders", nargs="+", metavar="PATTERN", default=USUAL)
    parser.add_argument("--quick", action="store_true", help="a toy size")
    parser.add_argument("--kernels", action="store_true", help="kernel time by class, too")
    parser.add_argument("--jobs", type=int, help="0: all in this process, the default of a CPU")
    parser.add_argument("--backend", help="of torch.compile; default inductor, where it can")
    args = timing.begin(parser, argv)
    begun = time.perf_counter()
    cuda = args.device == "cuda"
    among = [
        c
        for c in contenders()
        if c.name == REFERENCE or any(fnmatchcase(c.name, p) for p in args.contenders)
    ]
    jobs = args.jobs if args.jobs is not None else (len(among) if cuda else 0)
    if jobs:  # the contenders' processes inherit it; each would take all cores
        compilers = sum(c.compiled is not None for c in among)
        cores = max(1, (os.cpu_count() or 1) // max(1, compilers))
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(cores))
    setting = steps.setting_of(args)
    rows = steps.measure(MODEL, among, setting, args.rounds, jobs, profiled=args.kernels)
    title = TASKS[MODEL].title
    print(f"\n{title}, of {REFERENCE}:")
    print("\n".join(steps.lines(rows)))
    print(f"{time.perf_counter() - begun:.0f} s")
    entry = {"title": title, "rows": rows}
    timing.write(args, "convolution", {"quick": args.quick, "steps": {MODEL: entry}})
    missing = ("NotImplementedError", "ModuleNotFoundError")
    failed = [
        n for n, row in rows.items() if "error" in row and row["error"].split(":")[0] not in missing
    ]
    if failed:
        sys.exit(f"failed: {failed}")


if __name__ == "__main__":
    main()
