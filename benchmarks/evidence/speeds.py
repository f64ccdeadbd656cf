"""Speed and peak memory of whole models beside plain bf16: tables, and rows of the README's plot.

Speed is bf16's step time over the contender's: above 1 is faster. A peak is a share of bf16's.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from evidence import several_tables
from evidence.evidence_tables import Lines, Report, dates_line, header, line, report_of, table_of

STEPS, WHOLE = "cuda-rivals-h100.json", "cuda-8b.json"
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


def beside(row: Report, plain: Report, rate: str) -> Ratio:
    """Ratio of two rows whose speed is ``rate``, such as tokens a second."""
    return Ratio(row[rate] / plain[rate], row["peak_gib"] / plain["peak_gib"])


def rows(results: Path) -> list[Row]:
    """Return the rows of the README that a report holds. All are of one H100."""
    whole = report_of(results, WHOLE)["whole"]

    def kept(name: str, plain: str) -> Ratio:
        mine, other = (whole[f"{one}, attention kept"] for one in (name, plain))
        return beside(mine, other, "tokens_per_s")

    fp8 = kept("FP8 tensorwise", "bf16")
    out = [
        Row("Llama-3-8B", kept("default int8-forward", "bf16"), fp8, None),
        Row("Llama-3-8B, LoRA", kept("LoRA frozen int8", "LoRA bf16"), None, None),
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


def table(results: Path) -> Lines:
    """The README's table."""
    first, *others = rows(results)
    four = several_tables.settings_of(results)["llama_8b, 4 GPUs, 3 a GPU"]
    hot, fp8 = (
        beside(four[name], four["bf16"], "per_second_per_gpu") if name in four else None
        for name in ("default int8-forward", "FP8 tensorwise")
    )
    assert hot is not None
    sharded = Row("Llama-3-8B, FSDP2, four H100s", hot, fp8, None)
    yield from header(["model", "HOT", "FP8", "bf16, graphs", "HOT's peak", "FP8's peak"])
    for row in (first, sharded, *others):
        ratios = (row.hot, row.fp8, row.graphs)
        speeds = [f"{ratio.speed:.2f}×" if ratio else "" for ratio in ratios]
        peaks = [f"{ratio.peak:.2f}" if ratio else "" for ratio in ratios[:2]]
        yield line([row.model, *speeds, *peaks])
    yield from ("", dates_line(results, (STEPS, WHOLE, several_tables.SPEEDS)))


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
