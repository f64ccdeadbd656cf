"""The 8-bit forward product: blocks of its transform, beside torch's bf16 layer and FP8 products.

    python benchmarks/bench_forward.py [--device cpu|cuda] [--block N ...]
    python benchmarks/bench_forward.py --device cuda --convolutions

"block n" is :func:`hotcore.forward_linear` of x and w in the working type with a bias: both are
quantised, multiplied and dequantised. "block n, codes of w" has w's codes from before
(``quantize_forward_weight``), as a frozen weight or a second micro-batch has them. "fp8 product" is
``torch._scaled_mm`` of finished FP8 operands, one scale a tensor: no casts, no bias. The error of
each block is bench_forward_error.py's. How it is measured: timing.py.

``--convolutions`` asks whether a k×k convolution's forward could gain: "torch conv" (channels last)
beside the unfolding of x into rows of k·k·C values that an integer product would need, and beside
that product alone, with w's codes from before.
"""

from __future__ import annotations

import argparse
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
Image = tuple[int, int, int, int]
"""Images, channels in and out, height and width; the kernel is 3×3, padding and stride 1."""
CONVOLUTIONS: dict[str, dict[str, Image]] = {
    "cpu": {"stage 3": (1, 256, 256, 14)},
    "cuda": {  # ResNet-50's
        "stage 1": (128, 64, 64, 56),
        "stage 2": (128, 128, 128, 28),
        "stage 3": (128, 256, 256, 14),
        "stage 4": (128, 512, 512, 7),
    },
}


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


def unfolded(x: torch.Tensor) -> torch.Tensor:
    """The 3×3 neighbourhoods of a channels-last x as rows, [N·H·W, 9·C]."""
    padded = torch.nn.functional.pad(x, (1, 1, 1, 1)).permute(0, 2, 3, 1)
    windows = padded.unfold(1, 3, 1).unfold(2, 3, 1)  # [N, H, W, C, 3, 3]
    return windows.permute(0, 1, 2, 4, 5, 3).reshape(-1, 9 * x.shape[1])


def convolutions(image: Image, block: int, device: str) -> dict[str, Call]:
    images, ins, outs, size = image
    dtype = working_dtype(device)
    x = torch.randn(images, ins, size, size, device=device).to(dtype)
    x = x.to(memory_format=torch.channels_last)
    w = torch.randn(outs, ins, 3, 3, device=device).to(dtype)
    w_last = w.to(memory_format=torch.channels_last)
    config = hotcore.HotConfig(forward_block=block)
    rows = unfolded(x)
    codes = hotcore.quantize_forward_weight(w.permute(0, 2, 3, 1).reshape(outs, -1), config)

    def product(of: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(hotcore.forward_linear(of, codes, None, config=config))

    exact = torch.nn.functional.conv2d(x, w_last, padding=1)
    found = product(rows).reshape(images, size, size, outs).permute(0, 3, 1, 2)
    difference = (found.float() - exact.float()).norm() / exact.float().norm()
    if difference > 0.03:
        raise AssertionError(f"the unfolded product differs from the convolution: {difference}")
    return {
        "torch conv": lambda: torch.nn.functional.conv2d(x, w_last, padding=1),
        "unfold": lambda: unfolded(x),
        "8-bit product of unfolded rows": lambda: product(rows),
        "unfold and 8-bit product": lambda: product(unfolded(x)),
    }


def part_convolutions(block: int, args: argparse.Namespace) -> dict[str, Any]:
    torch.backends.cudnn.benchmark = True
    out: dict[str, Any] = {}
    for name, image in CONVOLUTIONS[args.device].items():
        rows = timing.in_turns(convolutions(image, block, args.device), args.rounds, args.device)
        plain = rows["torch conv"]["median_ms"]
        for row in rows.values():
            row["of torch conv"] = row["median_ms"] / plain
        out[name] = {"image": image, "rows": rows}
        print(f"\n{name}: N, C, O, H = {image}; us, median [quartiles]")
        for contender, row in rows.items():
            print(timing.line(contender, row, f"of the convolution: {row['of torch conv']:.2f}"))
    return out


def main(argv: Sequence[str] | None = None) -> None:
    parser = timing.arguments(__doc__, "forward")
    parser.add_argument("--block", type=int, action="append", help=f"default {BLOCKS}; repeatable")
    parser.add_argument("--convolutions", action="store_true", help="these alone")
    args = timing.begin(parser, argv)
    if args.convolutions:
        block = (args.block or [64])[0]
        content = {"block": block, "convolutions": part_convolutions(block, args)}
        timing.write(args, "forward-convolutions", content)
        return
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
