"""The 8-bit forward product: blocks of its transform, beside torch's bf16 layer and FP8 products.

    python benchmarks/bench_forward.py [--device cpu|cuda] [--block N ...]

"block n" is :func:`hotcore.forward_linear` of x and w in the working type with a bias: both are
quantised, multiplied and dequantised. "block n, codes of w" has w's codes from before
(``quantize_forward_weight``), as a frozen weight or a second micro-batch has them. "fp8 product" is
``torch._scaled_mm`` of finished FP8 operands, one scale a tensor: no casts, no bias. The error of
each block is bench_forward_error.py's. How it is measured: timing.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import hotcore
import timing
import torch
from bench_backward import working_dtype
from evidence import rivals
from layers import CPU_GROUPS, CUDA_GROUPS, Shape
from timing import Call

BLOCKS = (16, 64, 128)


def contenders(shape: Shape, blocks: Sequence[int], device: str) -> dict[str, Call]:
    tokens, outs, ins = shape
    dtype = working_dtype(device)
    x = torch.randn(tokens, ins, device=device).to(dtype)
    w = torch.randn(outs, ins, device=device).to(dtype)
    bias = torch.randn(outs, device=device)  # fp32, as parameters under autocast
    own = bias.to(dtype)
    name = "torch fp32" if device == "cpu" else "torch bf16"
    found: dict[str, Call] = {name: lambda: torch.nn.functional.linear(x, w, own)}
    if device == "cuda":
        found["fp8 product"] = rivals.fp8_product(tokens, outs, ins)
    for block in blocks:
        config = hotcore.HotConfig(forward_block=block)
        codes = hotcore.quantize_forward_weight(w, config)

        def whole(config: hotcore.HotConfig = config) -> object:
            return hotcore.forward_linear(x, w, bias, config=config)

        def kept(config: hotcore.HotConfig = config, codes: Any = codes) -> object:
            return hotcore.forward_linear(x, codes, bias, config=config)

        found[f"block {block}"] = whole
        found[f"block {block}, codes of w"] = kept
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
            rows = timing.in_turns(calls, args.rounds, args.device)
            layers[name] = {"shape": shape, "rows": rows}
            print(f"\n{group} {name}: L, O, I = {shape}; us, median [quartiles]")
            for contender, row in rows.items():
                print(timing.line(contender, row))
        sums = timing.summed([layer["rows"] for layer in layers.values()])
        out[group] = {"layers": layers, "sum_ms": sums}
        words = "  ".join(f"{name} {1e3 * value:.0f}" for name, value in sums.items())
        print(f"\n{group}, sum of {len(shapes)}, us: {words}", flush=True)
    timing.write(args, "forward", {"groups": out})


if __name__ == "__main__":
    main()
