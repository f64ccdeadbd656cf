"""Layers plain and with each recipe, by hot.autotune, and the default filter's rule on CUDA.

    python benchmarks/bench_autotune.py --device cuda [--part grid vit_b resnet50 steps]
    python benchmarks/bench_autotune.py --fit benchmarks/results/cuda-autotune.json

Parts:
  grid      linear layers and 1x1 convolutions by features and tokens, trained and frozen weights:
            what the rule of hotcore.torch.gains is fitted to
  vit_b     hot.autotune of ViT-B/16, 128 images, for time and for memory, eager
  resnet50  hot.autotune of ResNet-50, 128 images, in both memory formats, eager
  steps     whole steps of ResNet-50, plain, converted by default, and with slower=True
  compiled  hot.autotune of ViT-B/16 with compiled layers; runs only if named: it compiles 12

All under bf16 autocast with fp32 weights (on the CPU: toy sizes, fp32). The report also holds the
fit of the times: see ``fit``.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hotcore.torch as hot
import numpy as np
import timing
import torch
from hotcore.torch import gains
from models import TASKS
from torch import nn
from training import cleaned

PARTS = ("grid", "vit_b", "resnet50", "steps")
NAMED = ("compiled",)
"""Parts that run only if they are named."""
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
    if device == "cpu":
        return contextlib.nullcontext()
    return torch.autocast(device, torch.bfloat16)


def rows_of(plan: hot.Plan) -> list[dict[str, Any]]:
    """The measurements, each kind of work once."""
    out: dict[Any, dict[str, Any]] = {}
    for layer in plan.layers:
        key = (layer.shape, tuple(layer.times.items()))
        row = out.setdefault(key, {"layer": layer.name, "shape": layer.shape, "count": 0})
        row["count"] += 1
        row["times"] = {
            name: [t.median_ms, t.q1_ms, t.q3_ms, t.kept_bytes] for name, t in layer.times.items()
        }
        row |= {"choice": layer.choice, "reason": layer.reason}
    return list(out.values())


def content_of(plan: hot.Plan, seconds: float) -> dict[str, Any]:
    steps = {name: [t.median_ms, t.q1_ms, t.q3_ms] for name, t in plan.steps.items()}
    return {
        "machine": plan.machine,
        "objective": plan.objective,
        "steps": steps,
        "rows": rows_of(plan),
        "seconds": seconds,
    }


def tuned(args: Any, model: nn.Module, inputs: Any, loss: Any, **options: Any) -> dict[str, Any]:
    """Run autotune, print its plan."""
    start = time.perf_counter()
    rounds = {"rounds": max(5, args.rounds), "budget_ms": 100.0}
    with autocast(args.device):
        plan = hot.autotune(model, inputs, loss, **{"allow": RECIPES, **rounds, **options})
    seconds = time.perf_counter() - start
    print(f"{plan}\n  {seconds:.1f} s\n", flush=True)
    return content_of(plan, seconds)


def every(module: nn.Module, name: str) -> bool:
    return True


def grid(args: Any) -> dict[str, Any]:
    cuda = args.device == "cuda"
    features = FEATURES if cuda else FEATURES[:2]
    token_counts = TOKENS if cuda else (256,)
    images = 128 if cuda else 2
    pointwise = POINTWISE if cuda else ((64, 64, 8),)
    dtype = torch.bfloat16 if cuda else torch.float32
    out: dict[str, Any] = {}

    def linears(tokens: int, trained: bool) -> tuple[list[nn.Module], list[torch.Tensor]]:
        layers, inputs = [], []
        for ins, outs in features:
            layer = nn.Linear(ins, outs, device=args.device)
            layer.weight.requires_grad_(trained)
            layers.append(layer)
            x = torch.randn(tokens, ins, device=args.device, dtype=dtype)
            inputs.append(x.requires_grad_())
        return layers, inputs

    def convolutions(memory_format: torch.memory_format) -> Any:
        layers, inputs = [], []
        for ins, outs, side in pointwise:
            layer = nn.Conv2d(ins, outs, 1, bias=False, device=args.device)
            layers.append(layer.to(memory_format=memory_format))
            x = torch.randn(images, ins, side, side, device=args.device, dtype=dtype)
            inputs.append(x.contiguous(memory_format=memory_format).requires_grad_())
        return layers, inputs

    cases: dict[str, Any] = {}
    for tokens in token_counts:
        for trained in (True, False):
            name = f"linear, {tokens} tokens" + ("" if trained else ", weight frozen")
            cases[name] = lambda n=tokens, t=trained: linears(n, t)
    cases["1x1, NCHW"] = lambda: convolutions(torch.contiguous_format)
    cases["1x1, channels_last"] = lambda: convolutions(torch.channels_last)
    for name, make in cases.items():
        with cleaned(args.device):
            layers, inputs = make()
            print(name)
            model = Layers(layers)
            # The step says nothing here: the device limits the layers, as in a large model.
            out[name] = tuned(
                args, model, tuple(inputs), None, filter_fn=every, verify=False, clock="device"
            )
            del layers, inputs, model
    return out


def whole(args: Any, name: str) -> tuple[nn.Module, Any, Any]:
    task = TASKS[name]
    size = task.full if args.device == "cuda" and task.full is not None else task.small
    torch.manual_seed(args.seed)
    model = size.build().to(args.device).train()
    batch = size.batch(torch.Generator().manual_seed(args.seed))
    return model, {key: value.to(args.device) for key, value in batch.items()}, task.loss


def vit_b(args: Any) -> dict[str, Any]:
    model, batch, loss = whole(args, "vit_b")
    return {
        "time": tuned(args, model, batch, loss),
        "memory": tuned(args, model, batch, loss, objective="memory", verify=False),
    }


def compiled(args: Any) -> dict[str, Any]:
    model, batch, loss = whole(args, "vit_b")
    options = {"backend": "aot_eager"} if args.device == "cpu" else {}
    allow = ("default", "fast")
    return tuned(args, model, batch, loss, allow=allow, compiled=options, verify=False, rounds=7)


def resnet50(args: Any) -> dict[str, Any]:
    model, batch, loss = whole(args, "resnet50")
    out = {"NCHW": tuned(args, model, batch, loss)}
    last = torch.channels_last
    batch["x"] = batch["x"].contiguous(memory_format=last)
    out["channels_last"] = tuned(args, model.to(memory_format=last), batch, loss)
    return out


def steps(args: Any) -> dict[str, Any]:
    """Forward and backward of ResNet-50, contenders in turns."""
    out: dict[str, Any] = {}
    for label, layout in (
        ("NCHW", torch.contiguous_format),
        ("channels_last", torch.channels_last),
    ):
        calls: dict[str, Any] = {}
        converted: dict[str, str] = {}
        kinds = {"plain": None, "default": {}, "default, slower=True": {"slower": True}}
        for name, options in kinds.items():
            model, batch, loss = whole(args, "resnet50")
            model = model.to(memory_format=layout)
            batch["x"] = batch["x"].contiguous(memory_format=layout)
            if options is not None:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # that all stay plain: the report says it
                    report = hot.convert(model, "default", **options).hot_report
                converted[name] = f"{len(report.converted)} of {len(report.layers)}"

            def step(model: nn.Module = model, batch: Any = batch, loss: Any = loss) -> None:
                model.zero_grad(set_to_none=True)
                with autocast(args.device):
                    value = loss(model, batch)
                value.backward()

            calls[name] = step

        def watch(call: Any) -> float:
            timing.synchronize(args.device)
            start = time.perf_counter()
            call()
            timing.synchronize(args.device)
            return (time.perf_counter() - start) * 1e3

        rows = timing.in_turns(calls, min(args.rounds, 10), args.device, watch=watch)
        print(f"ResNet-50, {label}: forward and backward, ms")
        for name, row in rows.items():
            row["of plain"] = row["median_ms"] / rows["plain"]["median_ms"]
            row["converted"] = converted.get(name, "")
            print(
                f"  {name:24s} {row['median_ms']:8.2f}  {row['of plain']:.3f}  {row['converted']}"
            )
        out[label] = rows
        calls.clear()
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
    parser.add_argument("--part", nargs="+", choices=(*PARTS, *NAMED), default=PARTS)
    parser.add_argument("--fit", type=Path, help="print the fit of a report, measure nothing")
    known, _ = parser.parse_known_args(argv)
    if known.fit is not None:
        found = json.loads(known.fit.read_text())
        show({"trained": fit(found), "frozen": fit(found, False)})
        return
    args = timing.begin(parser, argv)
    content: dict[str, Any] = {}
    failed = {}
    parts = {
        "grid": grid, "vit_b": vit_b, "resnet50": resnet50, "steps": steps, "compiled": compiled,
    }  # fmt: skip
    for name in args.part:
        start = time.perf_counter()
        print(f"---- {name}", flush=True)
        try:
            with cleaned(args.device):
                content[name] = parts[name](args)
        except ModuleNotFoundError as missing:
            print(f"{name}: skipped, {missing}")
            content[name] = {"skipped": str(missing)}
        except Exception as error:  # the other parts still run
            failed[name] = f"{type(error).__name__}: {error}"
            print(f"{name}: failed, {failed[name]}", flush=True)
        print(f"---- {name}: {time.perf_counter() - start:.1f} s", flush=True)
        if "grid" in content and args.device == "cuda":
            content["fit"] = {"trained": fit(content), "frozen": fit(content, False)}
        timing.write(args, "autotune", {**content, "failed": failed})
    show(content.get("fit", {}))
    if failed:
        sys.exit(f"failed: {failed}")


if __name__ == "__main__":
    main()
