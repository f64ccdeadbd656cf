"""Measure the paper's memory figure: a training step of ViT-B by batch, beside its formula.

    python benchmarks/bench_memory.py --device cuda          # about a minute; needs timm, peft
    python benchmarks/bench_memory.py --device cuda --batches 128 256 --contenders fp32 "HOT*"
    python benchmarks/bench_memory.py --quick                # a toy; the CPU has kept bytes only

It measures the allocator's peak over a whole step, and the bytes that forward keeps for backward.
Weights are fp32, products TF32, which changes no kept byte. LBP-WHT and LUQ are simulated, so their
peaks include temporaries of the simulation. Their "peak by kept" is fp32's peak less the difference
in kept bytes.

The formula is that of the authors' analysis code. An output of a linear layer or convolution has
four bytes a value, with HOT half a byte. The output of qkv counts four times, its weights three
times. Normalisations, GELU and attention's tensors count nothing. The code leaves out LoRA's frozen
weights, which the paper's figure contains; they are added here.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import hotcore.torch as hot
import timing
import torch
import torch.nn.functional as F
from evidence import rivals
from evidence.small_tasks import training
from models import mend_torchvision
from timing import GIB, Row
from torch import Tensor, nn
from training import cleaned

BATCHES = (64, 128, 256, 512, 1024)
LORA = {"qkv", "proj", "fc1", "fc2"}
LORA_RANK = 8

PAPER_GB: dict[str, dict[int, float]] = {
    "fp32": {64: 9.8, 128: 17.48, 256: 33.2, 512: 64.5, 1024: 127.0},
    "LoRA": {64: 8.3, 128: 16.2, 256: 31.95, 512: 63.3, 1024: 126.2},
    "LBP-WHT": {64: 9.8, 128: 17.48, 256: 33.2, 512: 64.5, 1024: 127.0},
    "LUQ": {64: 9.8, 128: 17.48, 256: 33.2, 512: 64.5, 1024: 127.0},
    "HOT paper": {64: 2.9, 128: 3.8, 256: 5.8, 512: 9.8, 1024: 17.5},
    "HOT paper + LoRA": {64: 1.5, 128: 2.4, 256: 4.45, 512: 8.4, 1024: 16.2},
}
"""Values read off mem_analysis1.png of the authors' repository, the paper's figure, to about 0.3.
For 128 images Table 1 of the supplement has 17.48 and 3.8."""


@dataclass(frozen=True)
class Contender:
    """Method and adapters of a training."""

    name: str
    method: str = "fp32"
    """Method of ``rivals.convert``."""
    lora: bool = False
    autocast: bool = False
    checkpointed: bool = False


CONTENDERS = (
    Contender("fp32"),
    Contender("HOT paper", "paper"),
    Contender("LoRA", lora=True),
    Contender("HOT paper + LoRA", "paper", lora=True),
    Contender("LBP-WHT", "lbp_wht"),
    Contender("LUQ", "luq"),
    Contender("fp32, blocks recomputed", checkpointed=True),
    Contender("HOT default", "default"),
    Contender("HOT default + LoRA", "default", lora=True),
    Contender("bf16", autocast=True),
    Contender("bf16, HOT default", "default", autocast=True),
    Contender("bf16, blocks recomputed", autocast=True, checkpointed=True),
)
SIMULATED = ("LBP-WHT", "LUQ")


def vit(quick: bool) -> Any:
    """Build ViT-B/16 with 100 classes, as in the paper's figure, or a toy."""
    mend_torchvision()
    timm = importlib.import_module("timm")
    small = {"img_size": 32, "patch_size": 4, "embed_dim": 64, "depth": 2, "num_heads": 2}
    return timm.create_model("vit_base_patch16_224", num_classes=100, **(small if quick else {}))


def chosen(module: nn.Module, name: str) -> bool:
    """Select the layers of the blocks, and under LoRA their base weights."""
    return name.startswith("blocks.") and "lora_" not in name


def prepared(contender: Contender, model: Any) -> Any:
    """Apply the contender's method to the model in place."""
    if contender.lora:
        peft = importlib.import_module("peft")
        config = peft.LoraConfig(r=LORA_RANK, target_modules=sorted(LORA))
        peft.inject_adapter_in_model(config, model)
        model.head.requires_grad_(True)
    settings: dict[str, Any] = {}
    if contender.method == "lbp_wht":
        side = math.isqrt(model.patch_embed.num_patches)
        settings = {"token_grid": (side, side), "prefix_tokens": 1}
    if contender.method != "fp32":
        rivals.convert(model, contender.method, chosen, **settings)
    if contender.checkpointed:
        hot.recompute(model.blocks, None)
    return model


class Trainer:
    """Model of a contender and AdamW with its state allocated."""

    def __init__(self, contender: Contender, device: str, quick: bool) -> None:
        self._contender, self._device, self._side = contender, device, 32 if quick else 224
        torch.manual_seed(0)
        with torch.device(device):
            self._model = prepared(contender, vit(quick)).train().to(device)
        trained = [p for p in self._model.parameters() if p.requires_grad]
        self.trained = sum(p.numel() for p in trained)
        self._optimizer = torch.optim.AdamW(trained, fused=device == "cuda")
        self.step(2)

    def step(self, batch: int) -> Row:
        """Train one step. Raises torch.cuda.OutOfMemoryError."""
        cuda = self._device == "cuda"
        images = torch.randn(batch, 3, self._side, self._side, device=self._device)
        labels = torch.randint(100, (batch,), device=self._device)
        before = 0
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        began = time.perf_counter()
        saved = training.SavedBytes(self._model)
        watch = contextlib.nullcontext() if cuda else saved.watch()
        low = self._contender.autocast
        with watch, torch.autocast(self._device, torch.bfloat16, enabled=low):
            loss = F.cross_entropy(self._model(images).float(), labels)
        kept = torch.cuda.memory_allocated() - before if cuda else saved.total
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        out: Row = {"trained parameters": self.trained, "kept_gib": kept / GIB}
        if cuda:
            torch.cuda.synchronize()
            out["peak_gib"] = torch.cuda.max_memory_allocated() / GIB
        out["step_s"] = time.perf_counter() - began
        if not math.isfinite(float(loss.detach())):
            raise RuntimeError(f"{self._contender.name}: the loss is not finite")
        return out

    def clear(self) -> None:
        """Free the gradients of a step that did not fit."""
        self._optimizer.zero_grad(set_to_none=True)


def formula(contender: Contender, quick: bool) -> dict[str, float]:
    """Compute the authors' formula: bytes independent of the batch, and bytes per image.

    Source: github.com/sungonuni/HOT at 460db09, utils/analysis_calculator.py.
    """
    model = prepared(Contender("", lora=contender.lora), vit(quick))
    each = 0.5 if contender.method == "paper" else 4.0
    values: list[float] = []

    def add(name: str, module: Any) -> None:
        def hook(_: nn.Module, __: Any, output: Tensor) -> None:
            if module.weight.requires_grad:
                values.append(output.numel() * (4 if "qkv" in name else 1))

        module.register_forward_hook(hook)

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            add(name, module)
    side = 32 if quick else 224
    with torch.no_grad():
        model.eval()(torch.zeros(1, 3, side, side))
    weights = {True: 0, False: 0}
    for name, p in model.named_parameters():
        weights[p.requires_grad] += p.numel() * (3 if "qkv" in name else 1)
    fixed = 16.0 * weights[True] + 4.0 * weights[False]
    return {"fixed_bytes": fixed, "image_bytes": each * sum(values)}


def compare(rows: dict[str, dict[str, Row]]) -> None:
    """Fill in "of fp32", and for simulated rivals the peak computed from their kept bytes."""
    for name, batches in rows.items():
        for batch, row in batches.items():
            plain = rows.get("fp32", {}).get(batch, {})
            if "peak_gib" not in row or "peak_gib" not in plain:
                continue
            peak = row["peak_gib"]
            if name in SIMULATED:
                peak = plain["peak_gib"] - plain["kept_gib"] + row["kept_gib"]
                row["peak by kept"] = peak
            row["of fp32"] = peak / plain["peak_gib"]


def main(argv: Sequence[str] | None = None) -> None:
    options, own = ("quick", "budget", "contenders"), ("rounds", "seed")
    parser = timing.arguments(__doc__, "memory", *options, own=own)
    parser.add_argument("--batches", type=timing.COUNT, nargs="+", default=list(BATCHES))
    args = timing.begin(parser, argv)
    names = timing.fitting(parser, [c.name for c in CONTENDERS], args.contenders)
    among = [c for c in CONTENDERS if c.name in names]
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    begun = time.perf_counter()
    rows: dict[str, dict[str, Row]] = {c.name: {} for c in among}
    formulas: dict[str, dict[str, float]] = {}
    content = {"model": "ViT-B/16, 100 classes, 224 x 224" if not args.quick else "toy",
               "rows": rows, "formula": formulas}  # fmt: skip
    for contender in among:
        if contender.name in PAPER_GB:
            formulas[contender.name] = formula(contender, args.quick)
    for contender in among:
        trainer: Trainer | None = None
        for batch in args.batches:
            row: Row = {"left out": "no time left"}
            if time.perf_counter() - begun <= args.budget:
                with cleaned(args.device):
                    try:
                        trainer = trainer or Trainer(contender, args.device, args.quick)
                        row = trainer.step(batch)
                    except RuntimeError as error:
                        if args.device == "cpu":
                            raise
                        row = {"left out": f"{type(error).__name__}: {error!s:.120}"}
                    if trainer is not None:
                        trainer.clear()
            if contender.name in formulas:
                terms = formulas[contender.name]
                row["formula_gib"] = (terms["fixed_bytes"] + batch * terms["image_bytes"]) / GIB
                if batch in PAPER_GB[contender.name] and not args.quick:
                    row["paper_gb"] = PAPER_GB[contender.name][batch]
            rows[contender.name][str(batch)] = row
            compare(rows)
            print(f"{contender.name}, {batch} images: {timing.rounded(row, 3)}", flush=True)
    timing.write(args, "memory", content)


if __name__ == "__main__":
    main()
