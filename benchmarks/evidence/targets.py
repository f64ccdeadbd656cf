"""Compare the CUDA backend's targets with the benchmarks' reports."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any, NamedTuple

Report = Mapping[str, Any]
SIZES_OF_FWHT = ("16", "32", "64", "128", "256", "512", "1024", "2048", "4096")


class Target(NamedTuple):
    """Target: measured figure, bar, and aim."""

    work: str
    measured: float
    must: float
    aim: float
    more_is_better: bool = True

    @property
    def verdict(self) -> str:
        """ "aim", "must" or "missed"; "no figure" if a row was not steady or a rival is missing."""
        if math.isnan(self.measured):
            return "no figure"

        def reached(bar: float) -> bool:
            return self.measured >= bar if self.more_is_better else self.measured <= bar

        return "aim" if reached(self.aim) else "must" if reached(self.must) else "missed"


AGAINST = {  # group, recipe, rival -> must, aim (speed in the rival's, sum of the group's layers)
    ("Llama-3-8B", "fast", "bf16 products"): (2.1, 2.4),
    ("Llama-3-8B", "default", "bf16 products"): (1.7, 1.9),
    ("Llama-3-8B", "fast", "torchao both - forward"): (1.3, 1.55),
    ("Llama-3-8B", "default", "torchao both - forward"): (1.05, 1.2),
    ("ViT-B", "fast", "bf16 products"): (1.6, 2.0),
    ("ViT-B", "default", "bf16 products"): (1.3, 1.5),
    ("ViT-B", "paper", "fp32 products"): (20, 25),
    ("ViT-B", "paper", "tf32 products"): (4.4, 5.5),
}


BOTH = {  # group, forward and backward with the 8-bit forward -> must, aim (speed in bf16's)
    ("Llama-3-8B", "fast"): (1.75, 1.9),
    ("Llama-3-8B", "default"): (1.5, 1.6),
    ("ViT-B", "fast"): (1.45, 1.7),
    ("ViT-B", "default"): (1.25, 1.4),
}


OF_STOCK = {  # group of bench_gemm.py -> products in the table of stock tiles
    "ViT-B g_x": ("qkv", "proj", "fc1", "fc2"),
    "ViT-B g_w, r = 8": ("qkv", "proj", "fc1", "fc2"),
    "ViT-B g_w, full": ("fc1",),
    "Llama-3-8B g_x": ("qkv", "o", "up", "down"),
    "Llama-3-8B g_w, r = 8": ("qkv", "o", "up", "down"),
    "Llama-3-8B g_w, full": ("up",),
}


NONE: Report = {"faster than": {}}
"""Row of a contender without a sum."""


def of_backward(report: Report) -> Iterator[Target]:
    measured = {*product(report.get("layers", {}), report.get("recipes", ()))}
    for (group, recipe, rival), (must, aim) in AGAINST.items():
        if (group, recipe) in measured:
            row = report["layers"][group]["recipes"].get(recipe, NONE)
            speed = row["faster than"].get(rival, math.nan)
            yield Target(f"{group} sum, {recipe} faster than {rival}", speed, must, aim)
    for (group, recipe), (must, aim) in BOTH.items():
        if (group, recipe) in measured:
            row = report["layers"][group]["both"].get(f"{recipe} int8 both", NONE)
            speed = row["faster than"].get("torch bf16 both", math.nan)
            work = f"{group} sum, forward and backward, {recipe} with an 8-bit forward, of bf16"
            yield Target(work, speed, must, aim)
    for group, table in report.get("layers", {}).items():
        for recipe, row in table["recipes"].items():
            work = f"{group}, compress {recipe}, copies of x"
            yield Target(work, row["compress of a copy"], 1.3, 1.0, False)
    paper = report.get("paper", {}).get("rotating", {})
    if mean := paper.get("means", {}).get("hotcore paper"):
        work = "the paper's layers, arrays rotating, paper faster than fp32"
        yield Target(f"{work}: geometric mean", mean["geomean"], 2.1, paper["published geomean"])
        yield Target(f"{work}: worst row", mean["worst"], 1.3, 1.6)
    for group, table in report.get("forward", {}).items():
        for recipe, extra in table["extra"].items():
            yield Target(f"{group}, forward {recipe}, extra time", extra, 0.15, 0.05, False)
    for name, row in report.get("host", {}).get("rows", {}).items():
        if "adapter backward" in name:  # the whole call, and the adapter's part
            yield Target(f"host, {name}, us", row["median_ms"] * 1e3, 60, 60, False)
        if "of nn.Linear" in row:
            yield Target(f"host, {name}, of nn.Linear", row["of nn.Linear"], 1.2, 1.2, False)


def of_fwht(report: Report) -> Iterator[Target]:
    shares = [
        report["n"][n]["hotcore"]["of the copy"] for n in SIZES_OF_FWHT if n in report.get("n", {})
    ]
    if shares:
        yield Target("fwht, slowest n, share of the copy", min(shares), 0.85, 0.95)


def of_gemm(report: Report) -> Iterator[Target]:
    for group, names in OF_STOCK.items():
        products = report.get("products", {}).get(group, {})
        for name in names:
            mine = products.get(name, {}).get("rows", {}).get("hotcore", {})
            if "of the best stock tile" in mine:
                aim = 2.5 if name == "proj" and "g_w" in group else 1.1
                work = f"INT8 product, {group} {name}, of the best stock tile"
                yield Target(work, mine["of the best stock tile"], 1.0, aim)


def of_models(report: Report) -> Iterator[Target]:
    """Yield targets of a ViT-B step (bench_models.py, part "step") beside compiled bf16."""
    steps = report.get("steps", {}).get("vit_b", {}).get("rows", {})
    measured = {name: row for name, row in steps.items() if "step" in row}
    plain, graphs = (measured.get(f"bf16 {how}", {}) for how in ("compiled", "reduce-overhead"))
    step, how = "ViT-B step, default", "reduce-overhead"
    for key, name, work, bars in (
        ("host", f"default {how}", f"{step}, {how}: host, of bf16's", (1.1, 1)),
        ("step", f"default int8-forward {how}", f"{step}, 8-bit forward, {how}: of bf16's there",
         (1.0, 0.93)),
    ):  # fmt: skip
        if name in measured and graphs:
            share = measured[name][key]["median_ms"] / graphs[key]["median_ms"]
            yield Target(work, share, *bars, False)
    if mine := measured.get("default compiled", {}).get("of reference"):
        yield Target(f"{step} compiled: host, of bf16's", mine["host"], 1.25, 1.1, False)
    if "peak_gib" in plain:
        quick = [
            row["peak_gib"]
            for row in measured.values()
            if {"recipe", "compiled"} <= row["how"].keys()
            and row.get("of reference", {}).get("step", 9) <= 1.1
        ]
        work = "ViT-B, compiled: least peak at 1.1 of compiled bf16's time, of its peak"
        least = min([plain["peak_gib"], *quick])
        yield Target(work, least / plain["peak_gib"], 0.45, 0.33, False)


def rows(
    backward: Report, fwht: Report, gemm: Report, models: Report | None = None
) -> list[dict[str, Any]]:
    """List every target for which the reports have a figure."""
    targets = [*of_backward(backward), *of_fwht(fwht), *of_gemm(gemm), *of_models(models or {})]
    keys = ("work", "measured", "must", "aim")
    return [{key: getattr(t, key) for key in keys} | {"reached": t.verdict} for t in targets]
