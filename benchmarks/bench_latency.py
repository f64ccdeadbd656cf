"""Measure the paper's latency table and its Fig. 1, beside the paper's figures.

    python benchmarks/bench_latency.py --device cuda                   # about a minute and a half
    python benchmarks/bench_latency.py --device cuda --parts graph breakdown --budget 60
    python benchmarks/bench_latency.py --quick                         # two toy layers; CPU too

The paper times g_x and g_w of 16 layers, one image each, on an RTX 3090. The parts are sorted by
importance. ``--budget`` leaves out the last rows, which the report names:

  graph      g_x and g_w of one image in CUDA graphs, arrays beyond the L2 (CPU: plain calls)
  breakdown  Fig. 1: the device's time by stage, three layers, by the profiler (CUDA)
  batch      the same calls at 128 images

FP8's operands are already quantised and transposed, with tokens padded to a multiple of 16. LBP-WHT
is its reference algorithm in fp32 with rank 8, whose torch operations are not fused. Its time is no
bound for the method. hotcore's recipes take bf16 arrays and compressed x.
"""

from __future__ import annotations

import argparse
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import bench_backward
import timing
import torch
from evidence import evidence_tables, rivals
from evidence.rivals.conversion import method_of
from layers import PAPER_LATENCY, Shape
from timing import Call, Row

PARTS = ("graph", "breakdown", "batch")
FIG_1 = ("layer4.conv2", "qkv", "stages.1.fc1")
"""Layers of Fig. 1: ResNet-50's, ViT-B's, EfficientFormer-L7's."""
RECIPES = ("default", "fast", "paper")
PAPERS = ("LBP-WHT", "HOT")
"""Columns of the paper's table."""
BATCH = 128
GRAPH_CALLS = 24
LARGE_CALL_BUDGET_MS = 60.0
TOY: dict[str, tuple[Shape, dict[str, float]]] = {
    "qkv": ((65, 96, 64), {"FP": 1.0, "LBP-WHT": 1.0, "HOT": 1.0, "faster": 1.0}),
    "conv": ((64, 64, 64), {"FP": 1.0, "LBP-WHT": 1.0, "HOT": 1.0, "faster": 1.0}),
}


def lbp_wht(tokens: int) -> Any:
    """LBP-WHT for an image's tokens: a square grid, with or without a class token."""
    prefix = 0 if math.isqrt(tokens) ** 2 == tokens else 1
    side = math.isqrt(tokens - prefix)
    if side * side != tokens - prefix:
        raise ValueError(f"tokens: {tokens} are no square, nor one more")
    return method_of("lbp_wht", token_grid=(side, side), prefix_tokens=prefix)


def calls(shape: Shape, images: int, device: str) -> dict[str, Call]:
    """Return each contender's call for g_x and g_w of ``images`` images, with fresh arrays."""
    tokens, outs, ins = shape
    whole = (images * tokens, outs, ins)
    out = bench_backward.paper_calls(whole, RECIPES, device)
    gy, w, x = bench_backward.tensors(whole, device, torch.float32)
    method, gy_of = lbp_wht(tokens), gy.view(images, tokens, outs)
    saved = method.keep(x.view(images, tokens, ins))
    out["LBP-WHT"] = _exact(lambda: (method.g_x(gy_of, w), method.g_w(gy_of, saved[0])))
    if device == "cuda":
        out["tf32"] = rivals.products(gy, w, x, tf32=True)
        filled = (-(-whole[0] // 16) * 16, outs, ins)  # FP8 products need such a number of tokens
        out["FP8 products"] = rivals.fp8_products(*filled)
    return out


def _exact(call: Call) -> Call:
    """Run its products in fp32, without TF32."""

    def run() -> object:
        torch.backends.cuda.matmul.allow_tf32 = False
        return call()

    return run


def in_graphs(shape: Shape, args: argparse.Namespace, images: int) -> dict[str, Row | str]:
    """Time calls in a CUDA graph, or plain calls on the CPU."""
    tokens, outs, ins = shape
    nbytes = bench_backward.paper_bytes((images * tokens, outs, ins))
    make = functools.partial(calls, shape, images, args.device)
    least = GRAPH_CALLS if images == 1 else 1
    return timing.in_graphs(make, nbytes, args.rounds, args.device, least, LARGE_CALL_BUDGET_MS)


# ---- Fig. 1 ----


def breakdown(shape: Shape) -> dict[str, Any]:
    """Measure the device's microseconds by stage: fp32, LBP-WHT, HOT (``paper``, fp32 and bf16).

    HOT's "between kernels" is 0, because only the device's time counts.
    """
    contenders = calls(shape, 1, "cuda")
    plain = bench_backward.kernel_times(contenders["fp32"])
    low = bench_backward.kernel_times(contenders["LBP-WHT"])
    out: dict[str, Any] = {
        "fp32": {"products": sum(kernel["us"] for kernel in plain), "kernels": plain}
    }
    products, others = bench_backward.split(low)
    out["LBP-WHT"] = {"products, transforms among them": products, "rest": others, "kernels": low}
    for name, dtype in (("paper, fp32 arrays", torch.float32), ("paper", torch.bfloat16)):
        arrays = bench_backward.tensors(shape, "cuda", dtype)
        out[name] = bench_backward.cuda_stages(arrays, "paper", 0.0)
    return out


def in_stages(stages: Mapping[str, Any]) -> str:
    """Format the microseconds of each contender's stages."""
    parts = {"fp32": {"products": stages["fp32"]["products"]}}
    parts["LBP-WHT"] = {n: us for n, us in stages["LBP-WHT"].items() if n != "kernels"}
    for name in ("paper, fp32 arrays", "paper"):
        total, products = evidence_tables.hot_parts(stages[name])
        parts[name] = {"products": products, "rest": total - products}
    return f"{timing.rounded(parts, 3)}"


# ---- all ----


def means(tables: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Compute geometric mean and minimum of the speed in units of fp32's, beside the paper's."""
    speeds = []
    for table in tables.values():
        paper = {name: table["paper_us"]["FP"] / table["paper_us"][name] for name in PAPERS}
        speeds.append(bench_backward.speeds_of(table["rows"]))
        speeds[-1] |= {f"the paper's {name}": speed for name, speed in paper.items()}
    found = bench_backward.means_of(speeds)
    return {name: row | {"layers": len(speeds)} for name, row in found.items()}


def main(argv: Sequence[str] | None = None) -> None:
    parser = timing.arguments(__doc__, "latency", "quick", "budget")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    args = timing.begin(parser, argv)
    shapes = TOY if args.quick else PAPER_LATENCY
    few = {name: layers for name, layers in shapes.items() if name in FIG_1}
    images = 2 if args.quick else BATCH
    begun = time.perf_counter()
    out: dict[str, Any] = {"images": {"graph": 1, "batch": images}, "left out": []}
    if args.device == "cpu":
        args.parts = [part for part in args.parts if part != "breakdown"]

    def table(part: str, name: str, measure: Callable[[Shape], Any]) -> None:
        if time.perf_counter() - begun > args.budget:
            out["left out"].append(f"{part} {name}")
            return
        shape, paper = shapes[name]
        rows = measure(shape)
        out.setdefault(part, {})[name] = {"shape": shape, "paper_us": paper, "rows": rows}
        print(f"{part}: {name} {shape}, us: {bench_backward.in_words(rows)}", flush=True)
        if args.device == "cuda":
            torch.cuda.empty_cache()

    makes: dict[str, Callable[[Shape], Any]] = {
        "graph": lambda shape: in_graphs(shape, args, 1),
        "batch": lambda shape: in_graphs(shape, args, images),
    }
    for part in [part for part in PARTS if part in args.parts]:
        if part in makes:
            for name in shapes:
                table(part, name, makes[part])
        elif time.perf_counter() - begun <= args.budget:
            out["breakdown"] = {}
            for name, (shape, paper) in few.items():
                stages = breakdown(shape)
                out["breakdown"][name] = {"shape": shape, "paper_us": paper, "stages": stages}
                print(f"{name}, us by stage, the paper's {paper}: {in_stages(stages)}")
        else:
            out["left out"].append("breakdown")
    for part, tables in list(out.items()):
        if part in PARTS and part != "breakdown":
            found = out.setdefault("means", {})[part] = means(tables)
            print(f"\n{part}, times faster than fp32: geometric mean, worst layer")
            for name, row in found.items():
                print(f"  {name:28s} {row['geomean']:.2f}  {row['worst']:.2f}")
    timing.write(args, "latency", out)


if __name__ == "__main__":
    main()
