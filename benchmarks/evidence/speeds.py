"""Speed and peak memory of whole models beside plain bf16: tables, and rows of the README's plot.

Speed is bf16's step time over the contender's: above 1 is faster. A peak is a share of bf16's.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from evidence.evidence_tables import Lines, Report, dates_line, header, line, report_of, table_of

STEPS, WHOLE, FSDP = "cuda-rivals-h100.json", "cuda-8b.json", "cuda-fsdp.json"
GRAPHS = "bf16 reduce-overhead"
README_MODELS = {
    "llama_1b_blocks": "compiled",
    **dict.fromkeys(("vit_l", "vit_b", "bert", "gpt2"), "reduce-overhead"),
}
"""Model -> how HOT runs: CUDA graphs (reduce-overhead) where layers are too short for the host."""
COLUMNS = {
    "default int8-forward compiled": "HOT",
    "default int8-forward reduce-overhead": "HOT, graphs",
    "default compiled": "HOT, plain forward",
    "fast int8-forward reduce-overhead": "`fast`, graphs",
    "FP8 tensorwise compiled": "FP8",
    "FP8 tensorwise reduce-overhead": "FP8, graphs",
    "bf16 reduce-overhead": "bf16, graphs",
}
"""Contender -> its column."""


class Ratio(NamedTuple):
    """One contender beside bf16."""

    speed: float
    peak: float


class Row(NamedTuple):
    """One model; None: not measured."""

    model: str
    hot: Ratio
    fp8: Ratio | None
    graphs: Ratio | None
    """bf16 with CUDA graphs."""


def ratio_of(row: Report | None) -> Ratio | None:
    ratios = (row or {}).get("of reference")
    return Ratio(1 / ratios["step"], ratios["peak"]) if ratios else None


def rows(results: Path) -> list[Row]:
    """Return the rows of the README that a report holds. All are of one H100."""
    whole = report_of(results, WHOLE)["whole"]

    def beside(name: str, plain: str) -> Ratio:
        mine, other = (whole[f"{one}, attention kept"] for one in (name, plain))
        speed = mine["tokens_per_s"] / other["tokens_per_s"]
        return Ratio(speed, mine["peak_gib"] / other["peak_gib"])

    fp8 = beside("FP8 tensorwise", "bf16")
    out = [
        Row("Llama-3-8B", beside("default int8-forward", "bf16"), fp8, None),
        Row("Llama-3-8B, LoRA", beside("LoRA frozen int8", "LoRA bf16"), None, None),
    ]
    steps = report_of(results, STEPS)["steps"]
    for model, how in README_MODELS.items():
        contenders = steps[model]["rows"]
        hot = ratio_of(contenders[f"default int8-forward {how}"])
        assert hot is not None
        fp8, graphs = (
            ratio_of(contenders.get(name)) for name in ("FP8 tensorwise compiled", GRAPHS)
        )
        out.append(Row(steps[model]["title"], hot, fp8, graphs))
    return out


def four_gpus(results: Path) -> Row:
    """Row of docs/results/several-gpus.md."""
    rows = report_of(results, FSDP)["rows"]

    def beside(name: str) -> Ratio | None:
        mine, plain = (rows.get(f"llama_8b, 4 GPUs, 3 a GPU/{one}") for one in (name, "bf16"))
        if mine is None or plain is None:
            return None
        speed = mine["per_second_per_gpu"] / plain["per_second_per_gpu"]
        return Ratio(speed, mine["peak_gib"] / plain["peak_gib"])

    hot = beside("default int8-forward")
    assert hot is not None
    return Row("Llama-3-8B, FSDP2, four H100s", hot, beside("FP8 tensorwise"), None)


def table(results: Path) -> Lines:
    """The README's table."""
    first, *others = rows(results)
    yield from header(["model", "HOT", "FP8", "bf16, graphs", "HOT's peak", "FP8's peak"])
    for row in (first, four_gpus(results), *others):
        ratios = (row.hot, row.fp8, row.graphs)
        speeds = [f"{ratio.speed:.2f}×" if ratio else "" for ratio in ratios]
        peaks = [f"{ratio.peak:.2f}" if ratio else "" for ratio in ratios[:2]]
        yield line([row.model, *speeds, *peaks])
    yield from ("", dates_line(results, (STEPS, WHOLE, FSDP)))


def by_model(report: Report, quantity: str) -> Lines:
    """Speed or peak of every contender, a row a model."""
    entries = list(report["steps"].values())
    names = [name for name in COLUMNS if any(name in entry["rows"] for entry in entries)]

    def cell(row: Report | None) -> str:
        ratio = ratio_of(row)
        if ratio is None:
            return ""
        return f"{ratio.speed:.2f}×" if quantity == "speed" else f"{ratio.peak:.2f}"

    yield from table_of(
        [quantity, *(COLUMNS[name] for name in names)],
        ([e["title"], *(cell(e["rows"].get(name)) for name in names)] for e in entries),
    )
