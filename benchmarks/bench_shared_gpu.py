"""Products and layers while another kernel holds some of the GPU's multiprocessors.

    python benchmarks/bench_shared_gpu.py --device cuda [--held 8 16 24 32] [--contenders PATTERN]

NCCL's kernels hold multiprocessors during most of a distributed backward. Here one CTA with 220 KB
of shared memory holds each of S multiprocessors. A row gives the time of a call beside it, divided
by the time of the same call alone. If arithmetic decides, the ratio is SMs / (SMs - S) or more.
Contenders are cuBLAS in bf16 and FP8, hotcore's INT8 product, and HOT's forward, compression and
backward.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import hotcore
import timing
import torch
from evidence import rivals
from layers import Call, Shape

LAYERS: dict[str, Shape] = {
    "Llama-3-8B up, 6144 tokens": (6144, 14336, 4096),
    "Llama-3-8B down, 6144 tokens": (6144, 4096, 14336),
    "Llama-3-8B o, 6144 tokens": (6144, 4096, 4096),
    "Llama-3.2-1B qkv, 16384 tokens": (16384, 3072, 2048),
    "ViT-B fc1, batch 128": (25216, 3072, 768),
    "ViT-B proj, batch 128": (25216, 768, 768),
}
HELD_BYTES = 220 * 1024
CALLS = 4
"""Calls of one measurement, without a synchronisation between them."""

SOURCE = r"""
extern "C" __global__ void hold(volatile int* end, int* started) {
  extern __shared__ char shared[];
  shared[threadIdx.x] = 1;
  if (threadIdx.x == 0) {
    atomicAdd(started, 1);
    while (*end == 0) __nanosleep(2000);
  }
}
"""


class Holder:
    """A kernel that occupies multiprocessors until it is told to end."""

    def __init__(self) -> None:
        import cupy

        self._cupy = cupy
        self._kernel = cupy.RawKernel(SOURCE, "hold")
        self._kernel.max_dynamic_shared_size_bytes = HELD_BYTES
        self._words = torch.zeros(2, dtype=torch.int32, device="cuda")
        self._held, self._control = torch.cuda.Stream(priority=-1), torch.cuda.Stream()

    @contextlib.contextmanager
    def holding(self, count: int) -> Iterator[None]:
        """Hold ``count`` multiprocessors; all of their CTAs run when this returns."""
        self._words.zero_()
        torch.cuda.synchronize()
        if count:
            end, started = self._words.data_ptr(), self._words.data_ptr() + 4
            with self._cupy.cuda.ExternalStream(self._held.cuda_stream):
                self._kernel((count,), (32,), (end, started), shared_mem=HELD_BYTES)
            with torch.cuda.stream(self._control):
                while int(self._words[1]) < count:
                    pass
        try:
            yield
        finally:
            with torch.cuda.stream(self._control):
                self._words[0].fill_(1)
            torch.cuda.synchronize()


def calls_of(shape: Shape) -> dict[str, Call]:
    tokens, outs, ins = shape

    def wide(*size: int) -> torch.Tensor:
        return torch.randn(*size, device="cuda").bfloat16()

    def codes(*size: int) -> torch.Tensor:
        return torch.randint(-127, 128, size, dtype=torch.int8, device="cuda")

    x, w, gy = wide(tokens, ins), wide(outs, ins) * 0.02, wide(tokens, outs)
    q_x, q_w = codes(tokens, ins), codes(outs, ins)
    s_x, s_w = torch.rand(tokens, device="cuda"), torch.rand(outs, device="cuda")
    y = torch.empty_like(gy)
    config = hotcore.HotConfig.recipe("default", forward="int8")
    saved = hotcore.compress_activation(x, config, key=1)
    calls: dict[str, Call] = {
        "bf16 product": lambda: torch.mm(x, w.t(), out=y),
        "INT8 product": lambda: hotcore.gemm_int8(q_x, q_w, s_x, s_w, out=y),
        "bf16 backward": lambda: (gy @ w, gy.t() @ x),
        "HOT forward": lambda: hotcore.forward_linear(x, w, config=config),
        "HOT compression": lambda: hotcore.compress_activation(x, config, key=1),
        "HOT backward": lambda: hotcore.backward_linear(
            gy, w, saved, config=config, need=("gx", "gw")
        ),
    }
    if torch.cuda.get_device_capability() >= (8, 9):
        x8, w8 = x.to(rivals.FP8), w.to(rivals.FP8)
        one = torch.ones((), device="cuda")
        calls["FP8 product"] = lambda: rivals.fp8_product(x8, w8, one, one)
    return calls


def measured(call: Call) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(CALLS):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / CALLS


def bench(shape: Shape, holder: Holder, args: argparse.Namespace) -> dict[str, Any]:
    """Medians in ms by contender and number of held multiprocessors, and ratios to none."""
    calls = calls_of(shape)
    names = timing.fitting(args.parser, list(calls), args.contenders)
    for name in names:
        for _ in range(3):
            calls[name]()
    turns = [(name, held) for name in names for held in (0, *args.held)]
    times: dict[tuple[str, int], list[float]] = {turn: [] for turn in turns}
    for number in range(args.rounds):
        random.Random(number).shuffle(turns)
        for name, held in turns:
            with holder.holding(held):
                times[name, held].append(measured(calls[name]))
    medians = {turn: statistics.median(values) for turn, values in times.items()}
    return {
        name: {
            "alone_ms": medians[name, 0],
            "of alone": {str(held): medians[name, held] / medians[name, 0] for held in args.held},
        }
        for name in names
    }


def described(row: Mapping[str, Any]) -> str:
    ratios = "  ".join(f"{held}: {ratio:.2f}" for held, ratio in row["of alone"].items())
    return f"{row['alone_ms'] * 1e3:8.0f} us  {ratios}"


def main(argv: Sequence[str] | None = None) -> None:
    parser = timing.arguments(__doc__, "shared-gpu", "shape", "contenders")
    parser.add_argument("--held", type=int, nargs="+", default=[8, 16, 24, 32])
    args = timing.begin(parser, argv)
    if args.device == "cpu":
        parser.error("--device cpu: only a GPU's multiprocessors can be held; use --device cuda")
    args.parser = parser
    count = torch.cuda.get_device_properties(0).multi_processor_count
    least = {str(held): count / (count - held) for held in args.held}
    print("time of alone with S multiprocessors held; arithmetic:", least)
    layers = {",".join(map(str, s)): s for s in args.shape} if args.shape else LAYERS
    holder = Holder()
    rows: dict[str, Any] = {}
    for layer, shape in layers.items():
        print(f"\n{layer}:")
        rows[layer] = {"shape": shape, "rows": bench(shape, holder, args)}
        for name, row in rows[layer]["rows"].items():
            print(f"  {name:18s} {described(row)}", flush=True)
    timing.write(args, "shared-gpu", {"least": least, "layers": rows})


if __name__ == "__main__":
    main()
