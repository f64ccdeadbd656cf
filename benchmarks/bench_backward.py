"""Backward of one linear layer: hotcore beside torch, in one run.

    python benchmarks/bench_backward.py [--device cpu|cuda] [--shape L,O,I ...] [--recipe NAME ...]

Everybody does the whole work: torch `gy @ w`, `gy.T @ x`, `gy.sum(0)`; hotcore quantises g_y and
w, multiplies, dequantises and sums, x having been compressed before (its time has its own line).
On the CPU all arrays are fp32; on CUDA hotcore takes bf16, and the rivals are fp32, tf32, bf16.
Contenders take turns, so that a slower moment of the machine hits all. A turn on the CPU is two
unmeasured calls and three measured: thread pools spin on after a call, and would slow the next
contender's first one. On CUDA the L2 is overwritten before every measurement and device events take
the time. Medians and the spread (10th to 90th percentile) are printed, and written to
benchmarks/results/.
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
RECIPES = ("default", "fast", "int4", "paper", "accurate")
CPU_SHAPES = [(1576, 768, 768), (1576, 3072, 768), (1576, 768, 3072), (197, 768, 768)]
CUDA_SHAPES = [
    *((25216, 2304, 768), (25216, 768, 768), (25216, 3072, 768), (25216, 768, 3072)),  # ViT-B
    *((8192, 6144, 4096), (8192, 4096, 4096), (8192, 14336, 4096), (8192, 4096, 14336)),  # Llama
]
Call = Callable[[], object]


def parse_shape(text: str) -> tuple[int, int, int]:
    parts = tuple(int(part) for part in text.split(","))
    if len(parts) != 3 or min(parts) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is no shape; expected L,O,I, e.g. 1576,768,768")
    return parts[0], parts[1], parts[2]


def host_timer() -> Callable[[Call], float]:
    def measure(call: Call) -> float:
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e3

    return measure


def cuda_timer() -> Callable[[Call], float]:
    flush = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")  # several times the L2

    def measure(call: Call) -> float:
        flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    return measure


def in_turns(contenders: dict[str, Call], rounds: int, device: str) -> dict[str, list[float]]:
    """Milliseconds of every contender, a turn each a round."""
    measure = host_timer() if device == "cpu" else cuda_timer()
    unmeasured, measured = (2, 3) if device == "cpu" else (0, 1)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for call in contenders.values():
        call()
        call()
    for _ in range(rounds):
        for name, call in contenders.items():
            for _ in range(unmeasured):
                call()
            times[name] += [measure(call) for _ in range(measured)]
    return times


def summary(values: list[float]) -> dict[str, float]:
    deciles = statistics.quantiles(values, n=10)
    return {"median_ms": statistics.median(values), "p10_ms": deciles[0], "p90_ms": deciles[-1]}


def torch_backward(
    gy: torch.Tensor, w: torch.Tensor, x: torch.Tensor, tf32: bool | None = None
) -> Call:
    def call() -> object:
        if tf32 is not None:
            torch.backends.cuda.matmul.allow_tf32 = tf32
        return gy @ w, gy.t() @ x, gy.sum(0)

    return call


def bench(
    shape: tuple[int, int, int], recipes: list[str], rounds: int, device: str
) -> dict[str, dict[str, float]]:
    length, out_features, in_features = shape
    torch.manual_seed(0)
    gy = torch.randn(length, out_features, device=device)
    x = torch.randn(length, in_features, device=device)
    w = torch.randn(out_features, in_features, device=device)
    if device == "cpu":
        rivals = {"torch fp32": torch_backward(gy, w, x)}
    else:
        rivals = {
            "torch fp32": torch_backward(gy, w, x, tf32=False),
            "torch tf32": torch_backward(gy, w, x, tf32=True),
        }
        gy, w, x = gy.bfloat16(), w.bfloat16(), x.bfloat16()
        rivals["torch bf16"] = torch_backward(gy, w, x)
        rivals["copy of x"] = x.clone

    contenders: dict[str, Call] = dict(rivals)
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
    out = {name: summary(v) for name, v in in_turns(contenders, rounds, device).items()}
    for name in recipes:
        mine = out[f"hotcore {name}"]
        for rival in rivals:
            if rival.startswith("torch"):
                mine[f"vs {rival}"] = out[rival]["median_ms"] / mine["median_ms"]
        if "copy of x" in out:
            forward = out[f"compress {name}"]
            forward["of a copy"] = forward["median_ms"] / out["copy of x"]["median_ms"]
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--shape", type=parse_shape, action="append", help="L,O,I; repeatable")
    parser.add_argument("--recipe", action="append", choices=RECIPES)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.rounds < 2 or args.threads < 1:
        parser.error("--rounds must be at least 2 and --threads at least 1")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no CUDA device")
    torch.set_num_threads(args.threads)
    hotcore.set_num_threads(args.threads)
    recipes = args.recipe or ["default", "fast", "paper"]
    shapes = args.shape or (CPU_SHAPES if args.device == "cpu" else CUDA_SHAPES)
    out = args.out or RESULTS / f"{args.device}-backward.json"

    report: dict[str, object] = {
        "machine": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "hotcore": hotcore.__version__,
        "rounds": args.rounds,
    }
    if args.device == "cpu":
        report |= {"isa": hotcore.isa(), "threads": args.threads}
        print(f"{args.threads} threads, {hotcore.isa()}, torch {torch.__version__}")
    else:
        report["machine"] = torch.cuda.get_device_name(0)
        print(f"{report['machine']}, torch {torch.__version__}")
    print("ms: median [p10, p90]")
    rows_of: dict[str, dict[str, dict[str, float]]] = {}
    for shape in shapes:
        rows = bench(shape, recipes, args.rounds, args.device)
        rows_of[",".join(map(str, shape))] = rows
        print(f"\nL, O, I = {shape}")
        for name, row in rows.items():
            ratios = "  ".join(f"{key} {v:.2f}x" for key, v in row.items() if " " in key)
            print(
                f"  {name:18s} {row['median_ms']:8.3f}  [{row['p10_ms']:.3f}, "
                f"{row['p90_ms']:.3f}]   {ratios}"
            )
    report["shapes"] = rows_of
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=1) + "\n")
    print(f"\nwritten: {out}")


if __name__ == "__main__":
    main()
