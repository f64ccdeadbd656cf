"""Backward of one linear layer on the CPU: hotcore beside torch's fp32, in one run.

    python benchmarks/bench_backward.py [--shape L,O,I ...] [--recipe NAME ...] [--threads N]

Both sides do the whole work from fp32 arrays: torch `gy @ w`, `gy.T @ x`, `gy.sum(0)`; hotcore
quantises g_y and w, multiplies, dequantises and sums, x having been compressed before (its time is
a column of its own). The rounds of all contenders are interleaved, so that a slower minute of the
machine hits all of them; medians and the spread (10th to 90th percentile) are printed, and written
to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import hotcore
import torch

RESULTS = Path(__file__).parent / "results"
SHAPES = [(1576, 768, 768), (1576, 3072, 768), (1576, 768, 3072), (197, 768, 768)]


def parse_shape(text: str) -> tuple[int, int, int]:
    parts = tuple(int(part) for part in text.split(","))
    if len(parts) != 3 or min(parts) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is no shape; expected L,O,I, e.g. 1576,768,768")
    return parts[0], parts[1], parts[2]


def interleaved(contenders: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of every contender, one call each a round."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for call in contenders.values():
        call()
    for _ in range(rounds):
        for name, call in contenders.items():
            start = time.perf_counter()
            call()
            times[name].append((time.perf_counter() - start) * 1e3)
    return times


def summary(values: list[float]) -> dict[str, float]:
    deciles = statistics.quantiles(values, n=10)
    return {"median_ms": statistics.median(values), "p10_ms": deciles[0], "p90_ms": deciles[-1]}


def bench(
    shape: tuple[int, int, int], recipes: list[str], rounds: int
) -> dict[str, dict[str, float]]:
    length, out_features, in_features = shape
    generator = torch.Generator().manual_seed(0)
    gy = torch.randn(length, out_features, generator=generator)
    x = torch.randn(length, in_features, generator=generator)
    w = torch.randn(out_features, in_features, generator=generator)

    def torch_fp32() -> object:
        return gy @ w, gy.t() @ x, gy.sum(0)

    contenders: dict[str, Callable[[], object]] = {"torch fp32": torch_fp32}
    for name in recipes:
        config = hotcore.HotConfig.recipe(name)
        saved = hotcore.compress_activation(x, config, key=1)

        def backward(config=config, saved=saved) -> object:
            return hotcore.backward_linear(
                gy, w, saved, config=config, need=("gx", "gw", "gb"), key=1
            )

        def compress(config=config) -> object:
            return hotcore.compress_activation(x, config, key=1)

        contenders[f"hotcore {name}"] = backward
        contenders[f"compress {name}"] = compress
    times = interleaved(contenders, rounds)
    out = {name: summary(values) for name, values in times.items()}
    for name in recipes:
        out[f"hotcore {name}"]["speedup"] = (
            out["torch fp32"]["median_ms"] / out[f"hotcore {name}"]["median_ms"]
        )
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shape", type=parse_shape, action="append", help="L,O,I; repeatable")
    parser.add_argument("--recipe", action="append", choices=hotcore.RECIPES)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--out", type=Path, default=RESULTS / "cpu-backward.json")
    args = parser.parse_args()
    if args.rounds < 2 or args.threads < 1:
        parser.error("--rounds must be at least 2 and --threads at least 1")
    torch.set_num_threads(args.threads)
    hotcore.set_num_threads(args.threads)
    recipes = args.recipe or ["default", "fast", "paper"]

    report: dict[str, object] = {
        "machine": platform.processor() or platform.machine(),
        "isa": hotcore.isa(),
        "threads": args.threads,
        "torch": torch.__version__,
        "hotcore": hotcore.__version__,
        "rounds": args.rounds,
        "shapes": {},
    }
    print(
        f"{args.threads} threads, {hotcore.isa()}, torch {torch.__version__}; ms, median [p10, p90]"
    )
    for shape in args.shape or SHAPES:
        rows = bench(shape, recipes, args.rounds)
        report["shapes"][",".join(map(str, shape))] = rows  # type: ignore[index]
        print(f"\nL, O, I = {shape}")
        for name, row in rows.items():
            ratio = f"   {row['speedup']:.2f}x torch" if "speedup" in row else ""
            print(
                f"  {name:18s} {row['median_ms']:8.2f}  [{row['p10_ms']:.2f}, "
                f"{row['p90_ms']:.2f}]{ratio}"
            )
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    print(f"\nwritten: {args.out}")


if __name__ == "__main__":
    main()
