"""Time the public FWHT beside a copy of the array, and beside alternatives in torch.

    python -m benchmarks.evidence.bench_fwht [--device cpu|cuda] [--n N ...] [--elements E]

Bytes count one read and one write of each element. The rivals are the package
fast_hadamard_transform, if installed, and a product with the Hadamard matrix.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import hotcore
import timing
import torch
from timing import Call, Row

SIZES = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 32768)
LARGEST_MATRIX = 4096


def rival() -> Any:
    try:
        return importlib.import_module("fast_hadamard_transform").hadamard_transform
    except ImportError:
        return None


def contenders(n: int, elements: int, device: str) -> dict[str, Call]:
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    x = torch.randn(max(1, elements // n), n, device=device).to(dtype)
    out = torch.empty_like(x)
    calls: dict[str, Call] = {
        "copy": lambda: out.copy_(x),
        "hotcore": lambda: hotcore.fwht(x, block=n, out=out),
    }
    if x.shape[0] % n == 0 and n <= 64:
        calls["hotcore along axis 0"] = lambda: hotcore.fwht(x, axis=0, block=n, out=out)
    theirs = rival()
    if theirs is not None and device == "cuda":
        calls["fast_hadamard_transform"] = lambda: theirs(x)
    if n <= LARGEST_MATRIX:
        matrix = hotcore.fwht(torch.eye(n), block=n).to(device, dtype)
        calls["torch matmul"] = lambda: torch.mm(x, matrix, out=out)
    return calls


def bench(n: int, elements: int, rounds: int, device: str) -> dict[str, Row]:
    rows = timing.in_turns(contenders(n, elements, device), rounds, device)
    nbytes = 2 * max(1, elements // n) * n * (4 if device == "cpu" else 2)
    for row in rows.values():
        row["TB/s"] = nbytes / row["median_ms"] / 1e9
        row["of the copy"] = rows["copy"]["median_ms"] / row["median_ms"]
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    parser = timing.arguments(__doc__, "fwht")
    parser.add_argument("--n", type=int, action="append", choices=SIZES, help="repeatable")
    parser.add_argument("--elements", type=int, help="size (default: 2^28, on the CPU 2^20)")
    args = timing.begin(parser, argv)
    elements = args.elements or (1 << (20 if args.device == "cpu" else 28))
    if rival() is None:
        print("fast_hadamard_transform: cannot be imported, left out")
    out: dict[str, Any] = {}
    print(f"\n{elements} elements: TB/s, read and written (share of the copy's speed)")
    for n in args.n or SIZES:
        rows = bench(n, elements, args.rounds, args.device)
        out[str(n)] = rows
        words = (
            f"{name} {row['TB/s']:.3g} ({row['of the copy']:.2f})" for name, row in rows.items()
        )
        print(f"  n {n:5d}  {'  '.join(words)}", flush=True)
    timing.write(args, "fwht", {"elements": elements, "n": out})


if __name__ == "__main__":
    main()
