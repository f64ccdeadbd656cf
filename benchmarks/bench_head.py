"""Measure an output head with its loss, forward and backward: time, peak memory, errors.

    python benchmarks/bench_head.py --device cuda      # some 50 s: the heads of HEADS
    python benchmarks/bench_head.py --quick            # a toy head; CPU too

x and weight are bf16. Contenders:

* F.cross_entropy of fp32 logits, as in transformers: eager, compiled, and with auto_chunker
* torch's chunks (F.linear_cross_entropy with options, torch 2.13) and Liger-Kernel's, if installed
* hotcore with torch's products, also in chunks of Liger's size, and with HOT's products

Peaks (CUDA) include gradients, but not x and weight. Errors are relative to float64 for the heads
in ERRORS. A fresh model has flat probabilities; a trained one gives targets from small to near 1.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import hotcore.torch as hot
import timing
import torch
import torch._inductor.config
import torch.nn.functional as F
from timing import Row
from torch import Tensor

HEADS = {
    "Llama-3-8B": (8192, 128256, 4096),
    "GPT-2 small": (16384, 50257, 768),
    "Qwen2.5-7B": (8192, 152064, 3584),
}
"""Tokens, vocabulary and in features by name."""
TOY = {"toy": (700, 1001, 64)}
ERRORS = (4096, 16384, 512)
TOY_ERRORS = (512, 1001, 64)
INT8 = hot.HotConfig.recipe("accurate", forward="int8")
RECIPES = {"default": "default", "accurate": "accurate", "accurate, 8-bit forward": INT8}

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def plain(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight).float(), target)


def contenders(args: argparse.Namespace, shape: tuple[int, int, int]) -> dict[str, Loss]:
    """Return each contender's loss as a function of x, weight and target."""
    tokens, vocab, width = shape
    out: dict[str, Loss] = {"torch": plain}
    if args.device == "cuda" or args.backend:
        out["torch, compiled"] = torch.compile(plain, backend=args.backend or "inductor")
    if args.device == "cuda" and hasattr(torch._inductor.config, "auto_chunker"):
        chunks = {"auto_chunker.enable": True}
        out["torch, compiled in chunks"] = torch.compile(plain, options=chunks)
    chunked = getattr(F, "linear_cross_entropy", None)
    options = getattr(torch.nn, "LinearCrossEntropyOptions", None)
    if chunked is not None and options is not None:
        out["torch's chunks"] = functools.partial(chunked, options=options())
    if args.device == "cuda" and importlib.util.find_spec("liger_kernel"):
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

        out["Liger"] = liger_fused_linear_cross_entropy
    out["hotcore"] = hot.linear_cross_entropy
    rows = -(-tokens // -(-vocab // width))
    small = 1 << (rows - 1).bit_length()
    out["hotcore, Liger's chunks"] = functools.partial(hot.linear_cross_entropy, chunk=small)
    for name, config in RECIPES.items():
        out[f"hotcore {name}"] = functools.partial(hot.linear_cross_entropy, config=config)
    return out


def chosen(args: argparse.Namespace, shape: tuple[int, int, int]) -> dict[str, Loss]:
    return {n: loss for n, loss in contenders(args, shape).items() if n in args.contenders}


def tensors(
    shape: tuple[int, int, int], device: str, trained: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw x, weight (bf16) and target. In a trained model x points to its target's row."""
    tokens, vocab, width = shape
    weight = torch.randn(vocab, width, device=device, dtype=torch.bfloat16) / math.sqrt(width)
    target = torch.randint(vocab, (tokens,), device=device)
    x = torch.randn(tokens, width, device=device)
    if trained:
        x = 2 * x + 2 * math.log(vocab) * torch.rand(tokens, 1, device=device) * weight[target]
    x = x.bfloat16()
    target[::16] = -100
    return x.requires_grad_(), weight.requires_grad_(), target


def step(loss: Loss, x: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    out = loss(x, weight, target)
    return (out.detach(), *torch.autograd.grad(out, (x, weight)))


def peak_of(call: Callable[[], Any]) -> float:
    """Return the GiB that a call allocates on top of its inputs."""
    call()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return float(torch.cuda.max_memory_allocated() - before) / 2**30


def measured(args: argparse.Namespace, shape: tuple[int, int, int]) -> dict[str, Row]:
    """Measure time and peak of every contender, or give the reason for their absence."""
    arrays = tensors(shape, args.device)
    calls, rows = {}, {}
    for name, loss in chosen(args, shape).items():
        call = functools.partial(step, loss, *arrays)
        try:
            peak = {"peak_gib": peak_of(call)} if args.device == "cuda" else {}
            calls[name], rows[name] = call, peak
        except Exception as error:  # out of memory, or of the compiler
            rows[name] = {"left out": f"{type(error).__name__}: {error!s:.120}"}
    watch = timing.synchronized_stopwatch(args.device, 1 if args.device == "cpu" else 2)
    for name, row in timing.in_turns(calls, args.rounds, args.device, watch=watch).items():
        rows[name] |= row
    return rows


def errors(args: argparse.Namespace, shape: tuple[int, int, int], trained: bool) -> dict[str, Row]:
    """Compute relative errors of g_x and g_w, and the change of the loss."""
    arrays = tensors(shape, args.device, trained)
    x, weight, target = arrays
    exact = (x.detach().double().requires_grad_(), weight.detach().double().requires_grad_())
    out = F.cross_entropy(F.linear(*exact), target)
    right = (out.detach(), *torch.autograd.grad(out, exact))
    rows = {}
    for name, loss in chosen(args, shape).items():
        if name.startswith("torch, compiled"):
            continue
        result = step(loss, *arrays)
        gx, gw = (
            float((got.double() - want).norm() / want.norm())
            for got, want in zip(result[1:], right[1:], strict=True)
        )
        rows[name] = {
            "loss": float(right[0]),
            "change": float(result[0] - right[0]),
            "gx": gx,
            "gw": gw,
        }
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    parser = timing.arguments(__doc__, "head", "quick", "budget", "backend", "contenders")
    parser.set_defaults(rounds=8)
    args = timing.begin(parser, argv)
    names = list(contenders(args, TOY["toy"]))
    args.contenders = timing.fitting(parser, names, args.contenders)
    begun = time.perf_counter()
    content: dict[str, Any] = {"heads": {}, "errors": {}}
    for name, trained in (("fresh", False), ("trained", True)):
        rows = errors(args, TOY_ERRORS if args.quick else ERRORS, trained)
        content["errors"][name] = rows
        print(f"\nerrors, {name}: g_x, g_w, change of the loss")
        for contender, row in rows.items():
            values = f"{row['gx']:.5f}  {row['gw']:.5f}  {row['change']:+.1e} of {row['loss']:.2f}"
            print(f"  {contender:36s} {values}", flush=True)
    for name, shape in (TOY if args.quick else HEADS).items():
        if time.perf_counter() - begun > args.budget:
            content["heads"][name] = {"left out": "no time left"}
            continue
        rows = content["heads"][name] = measured(args, shape)
        print(f"\n{name}: {shape[0]} tokens, {shape[2]} -> {shape[1]}; us, median [quartiles]")
        for contender, row in rows.items():
            peak = f"{row['peak_gib']:.2f} GiB" if "peak_gib" in row else ""
            words = timing.line(contender, row, peak) if "median_ms" in row else row["left out"]
            print(words if "median_ms" in row else f"  {contender:36s} {words}", flush=True)
        if args.device == "cuda":
            torch.cuda.empty_cache()
            torch._dynamo.reset()
    timing.write(args, "head", content)


if __name__ == "__main__":
    main()
