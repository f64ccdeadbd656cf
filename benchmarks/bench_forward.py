"""The 8-bit forward product: blocks of its transform, beside torch's bf16 layer and FP8 products.

    python benchmarks/bench_forward.py [--device cpu|cuda] [--block N ...]

"block n" is :func:`hotcore.forward_linear` of x and w in the working type with a bias: both are
quantised, multiplied and dequantised. "block n, codes of w" has w's codes from before
(``quantize_forward_weight``), as a frozen weight or a second micro-batch has them. "fp8 product" is
``torch._scaled_mm`` of finished FP8 operands, one scale a tensor: no casts, no bias. How it is
measured: timing.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import hotcore
import timing
import torch
from bench_backward import tensors, working_dtype
from evidence import rivals
from layers import CPU_GROUPS, CUDA_GROUPS, Shape
from timing import Call

BLOCKS = (16, 64, 128)


def contenders(shape: Shape, blocks: Sequence[int], device: str) -> dict[str, Call]:
    tokens, outs, ins = shape
    _, w, x = tensors(shape, device, working_dtype(device))
    bias = torch.randn(outs, device=device)  # fp32, as parameters under autocast
    own = bias.to(x.dtype)
    name = "torch fp32" if device == "cpu" else "torch bf16"
    found: dict[str, Call] = {name: lambda: torch.nn.functional.linear(x, w, own)}
    if device == "cuda":
        found["fp8 product"] = rivals.fp8_product(tokens, outs, ins)
    for block in blocks:
        config = hotcore.HotConfig(forward_block=block)
        forward = partial(hotcore.forward_linear, x, bias=bias, config=config)
        found[f"block {block}"] = partial(forward, w)
        codes = hotcore.quantize_forward_weight(w, config)
        found[f"block {block}, codes of w"] = partial(forward, codes)
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = timing.arguments(__doc__, "forward")
    parser.add_argument("--block", type=int, action="append", help=f"default {BLOCKS}; repeatable")
    args = timing.begin(parser, argv)
    out: dict[str, Any] = {}
    for group, shapes in (CPU_GROUPS if args.device == "cpu" else CUDA_GROUPS).items():
        layers: dict[str, Any] = {}
        for name, shape in shapes.items():
            calls = contenders(shape, args.block or BLOCKS, args.device)
            rows = timing.printed(f"{group} {name}: L, O, I = {shape}", calls, args)
            layers[name] = {"shape": shape, "rows": rows}
        sums = timing.summed([layer["rows"] for layer in layers.values()])
        out[group] = {"layers": layers, "sum_ms": sums}
        words = "  ".join(f"{name} {1e3 * value:.0f}" for name, value in sums.items())
        print(f"\n{group}, sum of {len(shapes)}, us: {words}", flush=True)
    timing.write(args, "forward", {"groups": out})


if __name__ == "__main__":
    main()
