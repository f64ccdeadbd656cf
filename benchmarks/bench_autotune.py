"""Layers plain and with each recipe, by hot.autotune, and the default filter's rule on CUDA.

    python benchmarks/bench_autotune.py --device cuda
    python benchmarks/bench_autotune.py --fit benchmarks/results/cuda-autotune.json

Linear layers and 1x1 convolutions by features and tokens, trained and frozen weights: what the rule
of hotcore.torch.gains is fitted to. All under bf16 autocast with fp32 weights (on the CPU: toy
sizes, fp32). The report also holds the fit of the times: see ``fit``.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hotcore.torch as hot
import numpy as np
import timing
import torch
from hotcore.torch import gains
from torch import nn
from training import cleaned

RECIPES = ("accurate", "default", "fast")
FEATURES = (
    (64, 64), (128, 128), (256, 256), (384, 384), (384, 1536), (1536, 384), (512, 512),
    (512, 2048), (2048, 512), (768, 768), (768, 2304), (768, 3072), (3072, 768), (1024, 1024),
    (1024, 4096), (4096, 1024), (2048, 2048), (4096, 4096), (4096, 14336), (14336, 4096),
)  # fmt: skip
TOKENS = (4096, 16384)
POINTWISE = (  # a ResNet-50's, and an EfficientFormer-L7's: channels in, out, pixels of a side
    (64, 256, 56), (256, 128, 56), (512, 256, 28), (256, 1024, 14), (1024, 512, 14),
    (512, 2048, 7), (2048, 512, 7), (384, 1536, 14), (1536, 384, 14), (768, 3072, 7),
)  # fmt: skip
FIT_TOKENS = 16384


class Layers(nn.Module):
    """Parallel layers, each with its own x."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        pairs = zip(self.layers, inputs, strict=True)
        return torch.stack([layer(x).mean().float() for layer, x in pairs]).sum()


def autocast(device: str) -> Any:
    return torch.autocast(device, torch.bfloat16, enabled=device != "cpu")


def content_of(plan: hot.Plan, seconds: float) -> dict[str, Any]:
    """The measurements, each kind of work once."""
    rows: dict[Any, dict[str, Any]] = {}
    for layer in plan.layers:
        key = (layer.shape, tuple(layer.times.items()))
        row = rows.setdefault(key, {"layer": layer.name, "shape": layer.shape, "count": 0})
        row["count"] += 1
        row["times"] = {
            name: [t.median_ms, t.q1_ms, t.q3_ms, t.kept_bytes] for name, t in layer.times.items()
        }
        row |= {"choice": layer.choice, "reason": layer.reason}
    rest = {"rows": list(rows.values()), "seconds": seconds}
    return {"machine": plan.machine, "objective": plan.objective, **rest}


def grid(args: Any) -> dict[str, Any]:
    cuda = args.device == "cuda"
    like = {"device": args.device, "dtype": torch.bfloat16 if cuda else torch.float32}

    def linears(tokens: int, trained: bool) -> Any:
        for ins, outs in FEATURES if cuda else FEATURES[:2]:
            layer = nn.Linear(ins, outs, device=args.device)
            layer.weight.requires_grad_(trained)
            yield layer, torch.randn(tokens, ins, **like).requires_grad_()

    def convolutions(memory_format: torch.memory_format) -> Any:
        for ins, outs, side in POINTWISE if cuda else ((64, 64, 8),):
            layer = nn.Conv2d(ins, outs, 1, bias=False, device=args.device)
            x = torch.randn(128 if cuda else 2, ins, side, side, **like)
            x = x.contiguous(memory_format=memory_format).requires_grad_()
            yield layer.to(memory_format=memory_format), x

    cases: dict[str, Any] = {}
    for tokens in TOKENS if cuda else (256,):
        cases[f"linear, {tokens} tokens"] = lambda n=tokens: linears(n, True)
        cases[f"linear, {tokens} tokens, weight frozen"] = lambda n=tokens: linears(n, False)
    cases["1x1, NCHW"] = lambda: convolutions(torch.contiguous_format)
    cases["1x1, channels_last"] = lambda: convolutions(torch.channels_last)
    out: dict[str, Any] = {}
    for name, make in cases.items():
        with cleaned(args.device), autocast(args.device):
            print(name)
            start = time.perf_counter()
            layers, inputs = zip(*make(), strict=True)
            # The step says nothing here: the device limits the layers, as in a large model.
            plan = hot.autotune(
                Layers(layers), inputs, None, allow=RECIPES, filter_fn=lambda *_: True,
                verify=False, clock="device", rounds=max(5, args.rounds), budget_ms=100.0,
            )  # fmt: skip
            seconds = time.perf_counter() - start
            print(f"{plan}\n  {seconds:.1f} s\n", flush=True)
            out[name] = content_of(plan, seconds)
            del layers, inputs
    return out


# ---- the fit ----


def samples(content: dict[str, Any], weight_trained: bool = True) -> list[Any]:
    """In, out and milliseconds by contender: the linear layers that the rule is fitted to."""
    case = f"linear, {FIT_TOKENS} tokens" + ("" if weight_trained else ", weight frozen")
    found = []
    for row in content["grid"][case]["rows"] if case in content["grid"] else ():
        sizes = row["shape"].removeprefix("Linear ").split(", x [")[0]
        outs, ins = (int(n) for n in sizes.split(" x "))
        if min(ins, outs) >= gains.MIN_CUDA_FEATURES:
            found.append((ins, outs, {name: times[0] for name, times in row["times"].items()}))
    return found


def fit(content: dict[str, Any], weight_trained: bool = True) -> dict[str, Any]:
    """Least squares of the relative error; picoseconds per token.

    Terms: each in x out feature, each in feature, each out feature, and a constant.
    """
    rows = samples(content, weight_trained)
    if not rows:
        return {}
    terms = np.array([[i * o, i, o, 1] for i, o, _ in rows], float)
    out: dict[str, Any] = {}
    fitted = {}
    for name in ("plain", *RECIPES):
        per_token = np.array([times[name] / FIT_TOKENS * 1e9 for *_, times in rows])
        factors = np.linalg.lstsq(terms / per_token[:, None], np.ones(len(rows)), rcond=None)[0]
        fitted[name] = terms @ factors
        error = fitted[name] / per_token - 1
        out[name] = {"ps": list(map(float, factors)), "worst error": float(np.abs(error).max())}
        if name != "plain":
            ratios = fitted[name] / fitted["plain"]
            out[name]["ratios"] = [
                [i, o, times[name] / times["plain"], float(ratio)]
                for (i, o, times), ratio in zip(rows, ratios, strict=True)
            ]
    return out


def show(fits: dict[str, Any]) -> None:
    for case, entries in fits.items():
        for name, entry in entries.items():
            numbers = ", ".join(f"{value:.4g}" for value in entry["ps"])
            print(f"{case}, {name}: _Fit({numbers})  worst error {entry['worst error']:.1%}")
            for ins, outs, measured, fitted in entry.get("ratios", ()):
                slower = ", plain" if fitted > gains.SLOWER else ""
                shape = f"{ins:6d} -> {outs:6d}"
                print(f"    {shape}  {measured:.3f} measured, {fitted:.3f} fitted{slower}")


def main(argv: Sequence[str] | None = None) -> None:
    parser = timing.arguments(__doc__, "autotune")
    parser.set_defaults(rounds=10)
    parser.add_argument("--fit", type=Path, help="print the fit of a report, measure nothing")
    args = timing.begin(parser, argv)
    if args.fit is not None:
        found = json.loads(args.fit.read_text())
        show({"trained": fit(found), "frozen": fit(found, False)})
        return
    content: dict[str, Any] = {"grid": grid(args)}
    if args.device == "cuda":
        content["fit"] = {"trained": fit(content), "frozen": fit(content, False)}
    timing.write(args, "autotune", content)
    show(content.get("fit", {}))


if __name__ == "__main__":
    main()
