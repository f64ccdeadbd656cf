"""Bit operations of the paper's models by method, beside the paper's own figures.

    python -m benchmarks.evidence.bench_compute [--models vit_b,resnet50] [--json PATH]

Seconds on any machine: models and inputs are on the meta device, one image of 224 x 224 as in the
paper. ``hotcore.paper.compute_report`` counts every layer (its formulas are the paper's Table 5
with the products added); beside it stands what the code of HOT's authors counts, by which the
paper's figures were made (docs/dev/rivals.md says what agrees). Timm's models are left out where
timm is missing, and the report says so.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import hotcore.torch as hot
import timing
import torch
from evidence.evidence_tables import Lines, header, line
from hotcore import paper
from models import mend_torchvision
from torch import nn

Shape = tuple[int, int, int]
RECIPES = ("default", "fast", "paper", "accurate")
TERA = 1e12

MODELS = {
    "resnet50": "resnet50",
    "vit_b": "vit_base_patch16_224",
    "efficientformer_l7": "efficientformer_l7",
    "efficientformer_l1": "efficientformer_l1",
    "efficientformer_l3": "efficientformer_l3",
    "resnet18": "resnet18",
    "resnet34": "resnet34",
    "vit_s": "vit_small_patch16_224",
    "efficientnetv2_s": "tf_efficientnetv2_s",
}

FIGURE: dict[str, dict[str, float]] = {
    "resnet50": {"FP": 12.5, "LBP-WHT": 5.4, "LUQ": 4.8, "HOT": 4.65},
    "vit_b": {
        "FP": 51.8, "LoRA": 52.5, "LBP-WHT": 20.4, "LUQ": 19.0, "HOT": 18.35, "HOT + LoRA": 18.55,
    },
    "efficientformer_l7": {
        "FP": 31.0, "LoRA": 32.1, "LBP-WHT": 13.6, "LUQ": 11.7, "HOT": 11.35, "HOT + LoRA": 11.8,
    },
}  # fmt: skip
"""Forward and backward, 10^12 BOPs: the bars of comp_analysis.png in the authors' repository (the
paper's figure of computation cost), read off to 0.05 or so."""

TABLE_2 = {16: 1647.48, 8: 1383.54, 4: 1251.56, 2: 1185.58, 1: 1152.59}
"""The supplement's Table 2: rank of HLA -> 10^9 BOPs of the backward pass, "EfficientFormer-L1"."""

EXAMPLE: Shape = (49, 448, 1792)
EXAMPLE_PAPER = {"vanilla BP": 137.3, "HOT": 11.5}
"""Appendix D: MFLOPs of stages.3.fc2 of EfficientFormer-L1."""

EVERY: Any = lambda *_: True  # noqa: E731  (a filter: all layers)
LORA_TARGETS = ["fc1", "fc2", "qkv", "proj"]
LORA_RANK = 8


def authors_bops(shape: Shape, method: str, rank: int = 8, *, base: bool = False) -> float:
    """BOPs of a layer's backward pass as the authors' analysis code counts them.

    Against Table 5: the rounding of x costs I r/n O there, not I r/n L; of LBP-WHT's two products
    only one is counted; a LoRA's frozen layers have both products in full precision.

    Args:
        shape: L (of one image), O, I.
        method: "FP", "LBP-WHT", "LUQ" or "HOT"; LoRA is FP of a model with adapters.
        rank: r of n = 16.
        base: a frozen layer below a LoRA: no g_w for HOT.

    Source: github.com/sungonuni/HOT at 460db09, utils/analysis_calculator.py.
    """
    tokens, outs, ins = shape
    gy, w, x, product, full = tokens * outs, outs * ins, tokens * ins, tokens * outs * ins, 1024
    steps, share = math.log2(16), rank / 16
    if method == "FP":
        return 2 * product * full
    if method == "LBP-WHT":
        return (gy * steps + x * steps + product * share) * full
    if method == "LUQ":
        return 3 * (gy + 2 * w + 2 * x) * full + product * 64
    gx = ((gy + w) * steps + gy + w + x) * full + product * 16
    if base:
        return gx
    rounding = gy * share + w * share
    return gx + ((x + gy) * steps + rounding + w) * full + product * share * 64


def shapes_of(report: hot.ComputeReport) -> dict[str, Shape]:
    return {row.name: (row.tokens, row.outs, row.ins) for row in report.layers}


def built(name: str) -> tuple[nn.Module, torch.Tensor]:
    """A timm model of 100 classes and an image, on the meta device."""
    mend_torchvision()
    timm = importlib.import_module("timm")
    with torch.device("meta"):
        model: nn.Module = timm.create_model(MODELS[name], num_classes=100)
        return model.train(), torch.empty(1, 3, 224, 224)


def counted_by_authors(name: str) -> dict[str, float]:
    """Forward and backward, 10^12 BOPs, of the figure's methods."""
    model, image = built(name)
    shapes = shapes_of(paper.compute_report(model, image, filter_fn=EVERY))
    forward = sum(math.prod(shape) for shape in shapes.values()) * 1024

    def total(method: str, rank: int = 8) -> float:
        each = (authors_bops(shape, method, rank) for shape in shapes.values())
        return (forward + sum(each)) / TERA

    out = {method: total(method) for method in ("FP", "LBP-WHT", "LUQ", "HOT")}
    out["HOT, r = 1"] = total("HOT", 1)
    if any(name.rpartition(".")[2] in LORA_TARGETS for name in shapes):
        out |= _with_lora(model, image)
    return out


def _with_lora(model: nn.Module, image: torch.Tensor) -> dict[str, float]:
    peft = importlib.import_module("peft")
    config = peft.LoraConfig(r=LORA_RANK, target_modules=LORA_TARGETS)
    adapted = peft.inject_adapter_in_model(config, model)
    shapes = shapes_of(paper.compute_report(adapted, image, filter_fn=EVERY))
    forward = sum(math.prod(shape) for shape in shapes.values()) * 1024
    plain = sum(authors_bops(shape, "FP") for shape in shapes.values())
    mixed = sum(
        authors_bops(shape, "HOT", base=name.endswith("base_layer"))
        for name, shape in shapes.items()
    )
    return {"LoRA": (forward + plain) / TERA, "HOT + LoRA": (forward + mixed) / TERA}


def rank_table(name: str, varied: Callable[[nn.Module], bool]) -> dict[int, float]:
    """Table 2 as the authors' code counts it: r changed for the layers that ``varied`` names."""
    model, image = built(name)
    shapes = shapes_of(paper.compute_report(model, image, filter_fn=EVERY))
    return {
        rank: sum(
            authors_bops(shape, "HOT", rank if varied(model.get_submodule(layer)) else 8)
            for layer, shape in shapes.items()
        )
        / 1e9
        for rank in TABLE_2
    }


def worked_example() -> dict[str, dict[str, float]]:
    """MFLOPs of Appendix D's layer: the paper's figures and every reading that Table 5 allows."""
    tokens, outs, ins = EXAMPLE
    layer = nn.Linear(ins, outs, device="meta")
    x = torch.empty(tokens, ins, device="meta")
    report = paper.compute_report(layer, x, "paper", filter_fn=EVERY)
    vanilla, ours = report.flops() / 1e6, report.flops("HOT") / 1e6
    products = 2 * math.prod(EXAMPLE) * (4 * 4 + 8 * 8 / 2) / 1024 / 1e6
    code = 2 * authors_bops(EXAMPLE, "HOT") / 1024 / 1e6
    return {
        "paper": dict(EXAMPLE_PAPER),
        "Table 5 and the integer products": {"vanilla BP": vanilla, "HOT": ours},
        "Table 5 alone": {"vanilla BP": vanilla, "HOT": ours - products},
        "the authors' code": {"vanilla BP": vanilla, "HOT": code},
        "the authors' code, an operation one FLOP": {"vanilla BP": vanilla / 2, "HOT": code / 2},
    }


def count(name: str) -> dict[str, Any]:
    """One model: by Table 5, by recipe, by the authors' code, and the paper's figure."""
    model, image = built(name)
    rows = {}
    for recipe in RECIPES:
        report = paper.compute_report(model, image, recipe, filter_fn=EVERY)
        for method in report.methods:
            rows[method] = (report.forward + report.backward(method)) / TERA
    return {
        "forward": report.forward / TERA,
        "table 5": rows,
        "authors' code": counted_by_authors(name),
        "paper": FIGURE.get(name, {}),
    }


def table(name: str, found: Mapping[str, Any]) -> Lines:
    """By method: 10^12 BOPs, forward and backward."""
    counted, code, paper = (found[key] for key in ("table 5", "authors' code", "paper"))
    yield from header([f"{name}, forward {found['forward']:.2f}", "Table 5", "code", "paper"])
    for method in [*code, *(m for m in counted if m in (*RECIPES, "naive INT4"))]:
        of = counted.get("full precision" if method == "FP" else method)
        cells = (of, code.get(method), paper.get(method))
        yield line([method, *("" if cell is None else f"{cell:.2f}" for cell in cells)])


def printed(title: str, rows: Mapping[str, Mapping[Any, float]]) -> None:
    print(f"\n{title}")
    for source, cells in rows.items():
        print(f"  {source:42s}", "  ".join(f"{key}: {value:.2f}" for key, value in cells.items()))


def main(argv: Sequence[str] | None = None) -> None:
    parser = timing.error_arguments(__doc__, "compute")
    parser.add_argument("--models", default=",".join(MODELS), help=f"of {', '.join(MODELS)}")
    args = parser.parse_args(argv)
    names = args.models.split(",")
    unknown = [name for name in names if name not in MODELS]
    if unknown:
        parser.error(f"--models: {', '.join(unknown)}: none of {', '.join(MODELS)}")
    content: dict[str, Any] = {
        "unit": "10^12 bit operations, forward and backward, one image of 224 x 224, 100 classes",
        "models": {},
        "left out": {},
    }
    for name in names:
        try:
            content["models"][name] = count(name)
        except ImportError as error:
            content["left out"][name] = str(error)
            print(f"\n{name}: left out, {error}")
            continue
        print("", *table(name, content["models"][name]), sep="\n")
    if not content["left out"]:
        content["table 2"] = {
            "unit": "10^9 bit operations, backward",
            "paper": TABLE_2,
            "code, L7, r of convolutions": rank_table(
                "efficientformer_l7", lambda module: isinstance(module, nn.Conv2d)
            ),
            "code, L7, r of all layers": rank_table("efficientformer_l7", lambda module: True),
            "code, L1, r of all layers": rank_table("efficientformer_l1", lambda module: True),
        }
        ranks = {key: cells for key, cells in content["table 2"].items() if key != "unit"}
        printed("Table 2, rank of HLA: 10^9 BOPs backward", ranks)
    content["example"] = worked_example()
    printed(f"Appendix D's example {EXAMPLE}, MFLOPs of a backward pass", content["example"])
    timing.write(args, "compute", content)


if __name__ == "__main__":
    main()
