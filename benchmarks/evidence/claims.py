"""Claims of the paper beside measurements of this repository: one row each, for doc_tables.py.

The measured figures come from the reports. The verdicts are written by hand.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from evidence import evidence_tables as tables


@dataclass(frozen=True)
class Claim:
    """One row. ``where`` is a link from docs/paper.md."""

    claim: str
    claimed: str
    measured: Callable[[Path], str]
    verdict: str
    where: str


CHECK, LATENCY, MEMORY, LARGE = (
    *("gpu-check.json", "cuda-latency.json", "cuda-memory.json"),
    "cuda-gpt-91M.json",
)
TRAINING, ABLATIONS, FINETUNE = "training.json", "ablations.json", "finetune.json"


def _gaps(file: str, *methods: str, tasks: str = "vit gpt") -> Callable[[Path], str]:
    """Losses less fp32's. Only several methods are named."""

    def measured(results: Path) -> str:
        report, parts = tables.report_of(results, file), []
        for method in methods:
            gaps = (tables.differences(report, task, method) for task in tasks.split())
            words = ", ".join(map(tables.plus_minus, gaps))
            parts.append(f"{method}: {words}" if len(methods) > 1 else words)
        return "; ".join(parts)

    return measured


def _speed(tokens: str) -> Callable[[Path], str]:
    """Speed of the paper's layers with these tokens, one image, in CUDA graphs."""

    def measured(results: Path) -> str:
        paper = tables.report_of(results, CHECK)["bench_backward"]["paper"]["rotating"]
        layers = [one["rows"] for name, one in paper["shapes"].items() if name.startswith(tokens)]
        mine, low = (
            statistics.geometric_mean(rows[name]["faster than fp32"] for rows in layers)
            for name in ("hotcore paper", "bf16")
        )
        return f"{mine:.2f}× of fp32's speed; torch's bf16 {low:.2f}×"

    return measured


def _speed_of_batch(results: Path) -> str:
    groups = tables.report_of(results, CHECK)["bench_backward"]["layers"]
    faster = groups["ViT-B"]["recipes"]["paper"]["faster than"]
    return f"{faster['torch fp32']:.1f}× of fp32's speed, {faster['torch bf16']:.2f}× of bf16's"


def _beside_lbp_wht(results: Path) -> str:
    means = tables.report_of(results, LATENCY)["means"]["graph"]
    hot, low = (means[name]["geomean"] for name in ("hotcore paper", "LBP-WHT"))
    return f"HOT {hot:.2f}×, LBP-WHT {low:.2f}× of fp32's speed"


def _overhead(results: Path) -> str:
    stages = tables.report_of(results, LATENCY)["breakdown"]["qkv"]["stages"]
    total, products = tables.hot_parts(stages["paper, fp32 arrays"])
    plain = stages["fp32"]["products"]
    return f"{total - products:.0f} of {plain:.0f} µs (H200); products {products:.0f} µs"


def _peak(results: Path) -> str:
    rows = tables.report_of(results, MEMORY)["rows"]["HOT paper"].values()
    saved = [100 * (1 - row["of fp32"]) for row in rows if "of fp32" in row]
    return f"{min(saved):.0f} to {max(saved):.0f} % of a step's peak, 64 to 1024 images"


def _saved_bytes(results: Path) -> str:
    runs = tables.report_of(results, TRAINING)["runs"]
    mine, plain = (runs[f"vit/{name}/0"]["linear_saved_bytes"] for name in ("paper", "fp32"))
    return f"{100 * (1 - mine / plain):.1f} % less"


def _text(results: Path) -> str:
    runs = tables.runs_by_seed(tables.report_of(results, LARGE))
    (seed,) = runs["paper"]
    loss, plain = (runs[name][seed]["validation_loss"] for name in ("paper", "bf16"))
    small = _gaps(ABLATIONS, "paper", tasks="gpt")(results)
    return f"{small}; a GPT of 91M: {loss:.2f} beside bf16's {plain:.2f}"


def _ranks(results: Path) -> str:
    """Accuracies of two tasks by rank."""
    report = tables.report_of(results, ABLATIONS)

    def of(task: str, ranks: Iterable[int]) -> str:
        base, runs = "paper, g_x in INT8", tables.of_task(report, task)
        names = [base if rank == 8 else f"{base}, rank {rank}" for rank in ranks]
        seeds = set.intersection(*(set(runs[name]) for name in names))
        means = (
            statistics.mean(100 * runs[name][seed].get("val_accuracy", math.nan) for seed in seeds)
            for name in names
        )
        return ", ".join(f"{mean:.1f}" for mean in means)

    ranks = (16, 8, 1)
    return f"accuracy at r = 16, 8, 1: {of('vit', ranks)} (ViT), {of('gpt', ranks)} (GPT)"


RIVALS = "dev/rivals.md"
CLAIMS = (
    Claim("speed of ViT-B's backward, one image", "2.6× of fp32 (RTX 3090)", _speed("197,"),
          "holds beside fp32, not beside bf16", "results/speed.md#small-layers"),
    Claim("the same at 128 images", "–", _speed_of_batch, "above bf16, too",
          "results/speed.md#layers-on-a-gpu"),
    Claim("speed of all 16 layers of its table", "2.08×", _speed(""),
          "holds beside fp32, not beside bf16", "results/speed.md#small-layers"),
    Claim("faster than LBP-WHT", "2.08× and 1.31×", _beside_lbp_wht,
          "this LBP-WHT is not fused: its code is slow, not its method",
          "../benchmarks/results/cuda-latency.json"),
    Claim("transforms and quantisers of ViT-B's qkv, of fp32's time", "29 of 182 µs", _overhead,
          "a larger share: products are short on Hopper",
          "../benchmarks/results/cuda-latency.json"),
    Claim("memory saved", "up to 75 %", _peak, "the formula counts linear layers only",
          "results/memory.md#the-papers-formula"),
    Claim("memory of linear layers' activations", "7/8 less", _saved_bytes, "holds",
          f"{RIVALS}#training"),
    Claim("pre-training of images", "70.01 → 69.4 % (ViT-B)", _gaps(
        ABLATIONS, "paper", "paper as published", "paper as published, LQS of g_x, too",
        tasks="vit"), "holds with all parts and LQS of both products", f"{RIVALS}#ablations"),
    Claim("pre-training of text", "–", _text, "does not hold", "#where-paper-falls-behind"),
    Claim("fine-tuning", "within 0.3 %", _gaps(FINETUNE, "paper"), "not decided: tiny models",
          f"{RIVALS}#fine-tuning"),
    Claim("ABC costs no accuracy", "93.2 → 93.2 %", _gaps(ABLATIONS, "paper", "paper without ABC"),
          "holds", f"{RIVALS}#ablations"),
    Claim("8 of 16 rows suffice, 1 does not", "76.25 and 47.28 %", _ranks,
          "on images, with g_x in INT8", f"{RIVALS}#ablations"),
    Claim("LUQ, LBP-WHT and naive INT4 fail", "67.1 %, NaN, NaN", _gaps(
        TRAINING, "luq", "lbp_wht", "naive_int4", tasks="vit"), "naive INT4 alone does",
          f"{RIVALS}#training"),
    Claim("LoRA: HOT on frozen weights, not on adapters", "92.51 and 57.96 %", _gaps(
        FINETUNE, "LoRA, paper on the frozen", "LoRA, paper on the adapters"),
        "same direction on text", f"{RIVALS}#fine-tuning"),
    Claim("the authors' own code", "–", _gaps(TRAINING, "authors_hot"), "images train, text does "
          "not", f"{RIVALS}#training"),
)  # fmt: skip


def table(results: Path) -> tables.Lines:
    """Every claim."""
    heads = ["claim", "claimed", "measured here", "verdict"]
    rows = ([c.claim, c.claimed, c.measured(results), f"[{c.verdict}]({c.where})"] for c in CLAIMS)
    yield from tables.table_of(heads, rows)
    files = (CHECK, LATENCY, MEMORY, LARGE, TRAINING, ABLATIONS, FINETUNE)
    yield from ("", tables.dates_line(results, files))
