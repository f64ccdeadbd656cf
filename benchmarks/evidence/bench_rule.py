"""Layers plain and with each recipe, and the default filter's rule on CUDA, which is their fit.

    python -m benchmarks.evidence.bench_rule --device cuda
    python -m benchmarks.evidence.bench_rule --fit benchmarks/results/cuda-rule.json

Forward and backward of linear layers and 1x1 convolutions by features and tokens, trained and
frozen weights, one layer at a time: what the rule of hotcore.torch.gains is fitted to. All under
bf16 autocast with fp32 weights (on the CPU: toy sizes, fp32). The report holds the fit, too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import hotcore.torch as hot
import numpy as np
import timing
import torch
from hotcore.torch import gains
from torch import Tensor, nn
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

Case = Iterator[tuple[str, nn.Module, Tensor]]
"""In words, a layer, its x."""


def cases(device: str) -> dict[str, Case]:
    cuda = device == "cuda"
    like = {"device": device, "dtype": torch.bfloat16 if cuda else torch.float32}

    def linears(tokens: int, trained: bool) -> Case:
        for ins, outs in FEATURES if cuda else FEATURES[:2]:
            layer = nn.Linear(ins, outs, device=device)
            layer.weight.requires_grad_(trained)
            yield f"Linear {outs} x {ins}", layer, torch.randn(tokens, ins, **like)

    def convolutions(memory_format: torch.memory_format) -> Case:
        for ins, outs, side in POINTWISE if cuda else ((64, 64, 8),):
            layer = nn.Conv2d(ins, outs, 1, bias=False, device=device)
            x = torch.randn(128 if cuda else 2, ins, side, side, **like)
            x = x.contiguous(memory_format=memory_format)
            yield f"Conv2d 1x1 {outs} x {ins}", layer.to(memory_format=memory_format), x

    out: dict[str, Case] = {}
    for tokens in TOKENS if cuda else (256,):
        out[f"linear, {tokens} tokens"] = linears(tokens, True)
        out[f"linear, {tokens} tokens, weight frozen"] = linears(tokens, False)
    out["1x1, NCHW"] = convolutions(torch.contiguous_format)
    out["1x1, channels_last"] = convolutions(torch.channels_last)
    return out


def passes(layer: nn.Module, x: Tensor, cuda: bool) -> Callable[[], object]:
    """Forward and backward of a layer, as it stands under autocast."""
    x = x.detach().requires_grad_()
    wanted = [x, *(p for p in layer.parameters() if p.requires_grad)]

    def forward() -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16, enabled=cuda):
            y: Tensor = layer(x)
        return y

    gy = torch.randn_like(forward())
    return lambda: torch.autograd.grad(forward(), wanted, gy)


def row_of(name: str, layer: nn.Module, x: Tensor, args: Any) -> dict[str, Any]:
    """Median and quartiles of each recipe, in turns with the plain layer."""
    cuda = args.device == "cuda"
    calls = {"plain": passes(layer, x, cuda)}
    for recipe in RECIPES:
        alone = nn.Sequential(layer)  # convert changes children
        hot.convert(alone, recipe, lambda *_: True, slower=True)
        calls[recipe] = passes(alone[0], x, cuda)
    rows = timing.in_turns(calls, args.rounds, args.device)
    keys = ("median_ms", "q1_ms", "q3_ms")
    return {
        "shape": name,
        "times": {name: [row[key] for key in keys] for name, row in rows.items()},
    }


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
    parser = timing.arguments(__doc__, "rule")
    parser.set_defaults(rounds=10)
    parser.add_argument("--fit", type=Path, help="print the fit of a report, measure nothing")
    args = timing.begin(parser, argv)
    if args.fit is not None:
        found = json.loads(args.fit.read_text())
        show({"trained": fit(found), "frozen": fit(found, False)})
        return
    content: dict[str, Any] = {"grid": {}}
    for case, layers in cases(args.device).items():
        print(case, flush=True)
        content["grid"][case] = {"rows": []}
        for name, layer, x in layers:
            with cleaned(args.device):
                row = row_of(name, layer, x, args)
            plain, *others = (f"{name} {times[0]:.4g}" for name, times in row["times"].items())
            print(f"  {name:28s} {plain} ms, {', '.join(others)}", flush=True)
            content["grid"][case]["rows"].append(row)
    if args.device == "cuda":
        content["fit"] = {"trained": fit(content), "frozen": fit(content, False)}
    timing.write(args, "rule", content)
    show(content.get("fit", {}))


if __name__ == "__main__":
    main()
