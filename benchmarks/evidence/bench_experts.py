"""Experts of a mixture, forward and backward: time and bytes kept, plain beside codes of x.

    python -m benchmarks.evidence.bench_experts [--device cpu|cuda] [--quick]

The layers are transformers' Mixtral-8x7B's and Qwen3-30B-A3B's on CUDA, in bf16, and small ones on
the CPU; the experts of a token are drawn at random, all alike. "grouped_mm" is transformers' own
forward, "saved N" keeps x of the products and the gate's factors in N bits. How it is measured:
timing.py.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import timing
import torch
from hotcore.torch import probe, saved
from models import mend_torchvision
from timing import Call, Row
from torch import Tensor, nn

SHAPES = {
    "cpu": {"small": (256, 256, 256, 8, 2)},
    "cuda": {"Mixtral-8x7B": (4096, 4096, 14336, 8, 2), "Qwen3-30B-A3B": (8192, 2048, 768, 128, 8)},
}
"""Tokens, features, features of an expert, experts, experts of a token."""
TOY = {"toy": (32, 64, 128, 4, 2)}


def built(shape: Sequence[int], device: str) -> nn.Module:
    mend_torchvision()
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    _, width, inner, count, _ = shape
    config = MixtralConfig(hidden_size=width, intermediate_size=inner, num_local_experts=count)
    config._experts_implementation = "grouped_mm"
    with torch.device(device):
        layer = MixtralExperts(config).to(torch.bfloat16 if device == "cuda" else torch.float32)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return layer


def contenders(layer: nn.Module) -> dict[str, nn.Module]:
    """They hold the same parameters."""
    found = {"grouped_mm": layer}
    for bits in (8, 4):
        found[f"saved {bits}"] = other = copy.copy(layer)
        saved.convert_saved(other, bits)
    return found


def step(layer: nn.Module, inputs: tuple[Tensor, ...], gy: Tensor) -> Call:
    def call() -> None:
        for tensor in (*layer.parameters(), inputs[0], inputs[2]):
            tensor.grad = None
        layer(*inputs).backward(gy)

    return call


def kept_bytes(layer: nn.Module, inputs: tuple[Tensor, ...]) -> float:
    watch = probe.Watch({"experts": layer})
    with watch.on():
        y = layer(*inputs)
    assert y.requires_grad
    return watch.uses["experts"].kept_bytes


def main(argv: Sequence[str] | None = None) -> None:
    parser = timing.arguments(__doc__, "experts", "quick")
    args = timing.begin(parser, argv)
    out: dict[str, Any] = {}
    for name, shape in (TOY if args.quick else SHAPES[args.device]).items():
        tokens, width, _, count, each = shape
        layer = built(shape, args.device)
        x = torch.randn(tokens, width, device=args.device, dtype=layer.down_proj.dtype)
        chosen = torch.rand(tokens, count, device=args.device).topk(each).indices
        scores = torch.rand(tokens, each, device=args.device).softmax(1)
        inputs = (x.requires_grad_(), chosen, scores.requires_grad_())
        layers, gy = contenders(layer), torch.randn_like(x)
        kept = {key: kept_bytes(each_layer, inputs) for key, each_layer in layers.items()}

        def notes(key: str, row: Row, rows: Any, kept: dict[str, float] = kept) -> str:
            ratio = row["median_ms"] / rows["grouped_mm"]["median_ms"]
            return f"{ratio:.2f} of the time, keeps {kept[key] / 2**20:.1f} MiB"

        calls = {key: step(each_layer, inputs, gy) for key, each_layer in layers.items()}
        rows = timing.printed(f"{name}: T, I, H, E, k = {shape}", calls, args, notes)
        for key, row in rows.items():
            row["kept_bytes"] = kept[key]
        out[name] = {"shape": shape, "rows": rows}
    timing.write(args, "experts", {"layers": out})


if __name__ == "__main__":
    main()
