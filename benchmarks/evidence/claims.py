"""Every claim of the sources, and what was measured here: one row each, for doc_tables.py.

The measured words come from the reports; where nothing here could decide, the row says why.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evidence import intervals
from evidence.evidence_tables import (
    FP8,
    MARGIN,
    Report,
    days_of,
    differences,
    ends_of,
    gaps_by_size,
    header,
    hot_parts,
    line,
    of_task,
    plus_minus,
    pooled_gaps,
    pooled_interval,
    report_of,
    runs_by_seed,
)

Measured = Callable[[Path], str]


@dataclass(frozen=True)
class Claim:
    """One row."""

    claim: str
    claimed: str
    measured: Measured
    where: str
    command: str


_days: set[str] = set()
"""Of the reports that the row at hand was made of: its column of dates."""


def need(results: Path, name: str) -> Report:
    report = report_of(results, name)
    _days.update(days_of({key: part for key, part in report.items() if key != "runs"}))
    return report


def dated(runs: Iterable[Report]) -> None:
    """Note the days of single runs: a report may have been filled over several."""
    _days.update(run["date"] for run in runs if "date" in run)


def _gap(results: Path, file: str, task: str, method: str) -> str:
    report = need(results, file)
    runs = of_task(report, task)
    dated(run for name in (method, "fp32") for run in runs[name].values())
    return plus_minus(differences(report, task, method))


def _gaps(file: str, *methods: str, tasks: Sequence[str] = ("vit", "gpt")) -> Measured:
    """Differences to fp32; of a task alone without its name."""
    words = {"vit": " (ViT)", "gpt": " (GPT)"} if len(tasks) > 1 else {}

    def measured(results: Path) -> str:
        def of(method: str) -> str:
            gaps = (_gap(results, file, task, method) + words.get(task, "") for task in tasks)
            return f"{method}: {', '.join(gaps)}"

        return "; ".join(map(of, methods))

    return measured


def _accuracies(report: Mapping[str, Any], task: str, recipe: str) -> str:
    """By rank, mean and largest deviation of the seeds."""
    names = ["fp32", *(recipe if r == 8 else f"{recipe}, rank {r}" for r in (16, 8, 4, 2, 1))]
    runs = of_task(report, task)
    seeds = set.intersection(*(set(runs[name]) for name in names))
    dated(runs[name][seed] for name in names for seed in seeds)
    found = [[100 * runs[name][seed].get("val_accuracy", math.nan) for seed in seeds]
             for name in names]  # fmt: skip
    plain, *means = (f"{statistics.mean(values):.1f}" for values in found)
    spread = max((statistics.stdev(values) for values in found if len(values) > 1), default=0)
    return f"`{recipe}`: {', '.join(means)} (fp32 {plain}; ± {spread:.1f})"


def _ranks(results: Path) -> str:
    """Accuracies by rank of the small tasks, and of the source's own model."""
    tasks = {
        "vit": ("ViT", "ablations.json"),
        "gpt": ("GPT", "ablations.json"),
        "images-efficientformer": ("EfficientFormer-L1, photographs", LARGE_RANKS),
    }
    parts = [
        f"{title}, {_accuracies(need(results, file), task, recipe)}"
        for task, (title, file) in tasks.items()
        for recipe in ("paper", "paper, g_x in INT8")
    ]
    return f"accuracy, {'; '.join(parts)}; no CIFAR here"


def _small_layers(results: Path) -> Report:
    """The paper's layers, one image, in CUDA graphs."""
    found: Report = need(results, "gpu-check.json")["bench_backward"]["paper"]["rotating"]
    return found


def _faster(found: Report, shapes: Iterable[str]) -> tuple[list[float], list[float]]:
    """Times faster than fp32: ``paper``, and torch's bf16."""
    rows = [found["shapes"][shape]["rows"] for shape in shapes]
    mine, low = (
        [row[name]["faster than fp32"] for row in rows] for name in ("hotcore paper", "bf16")
    )
    return mine, low


def _speed_of_vit(results: Path) -> str:
    """Of the layers that the claim is about, each counted once, as the claim has them."""
    found = _small_layers(results)
    mine, low = _faster(found, (shape for shape in found["shapes"] if shape.startswith("197,")))
    return (
        f"ViT-B's four layers, one image, CUDA graphs, geometric mean: "
        f"{statistics.geometric_mean(mine):.2f}× of fp32, worst {min(mine):.2f}×; but torch's bf16 "
        f"is {statistics.geometric_mean(low):.2f}×"
    )


def _speed_of_layers(results: Path) -> str:
    means = _small_layers(results)["means"]
    mine = means["hotcore paper"]
    return (
        f"16 layers, one image, CUDA graphs: {mine['geomean']:.2f}× of fp32, "
        f"worst {mine['worst']:.2f}×; but torch's bf16 is {means['bf16']['geomean']:.2f}×"
    )


def _of_shapes(*shapes: str) -> Measured:
    """Of some of the paper's layers, paper's recipe."""

    def measured(results: Path) -> str:
        mine, low = (
            " to ".join(f"{end:.1f}" for end in dict.fromkeys((min(of), max(of))))
            for of in _faster(_small_layers(results), shapes)
        )
        return f"{mine}× (torch's bf16: {low}×)"

    return measured


def _batch(results: Path) -> str:
    found = need(results, "gpu-check.json")["bench_backward"]["layers"]["ViT-B"]
    faster = found["recipes"]["paper"]["faster than"]
    return (
        f"ViT-B's layers at 128 images: {faster['torch fp32']:.1f}× of fp32, "
        f"{faster['torch tf32']:.2f}× of tf32, {faster['torch bf16']:.2f}× of bf16"
    )


def _steps(results: Path, name: str = "cuda-steps.json", model: str = "vit_b") -> Report:
    found: Report = need(results, name)["steps"][model]["rows"]
    return found


def _step(results: Path) -> str:
    earlier, rows = _steps(results, "cuda-steps-earlier.json"), _steps(results)
    of = {name: row["of reference"]["step"] for name, row in rows.items()}
    plain = earlier["fp32 eager"]["of reference"]["step"]
    graphs = {
        words: of["bf16 reduce-overhead"] / of[f"{name} reduce-overhead"]
        for name, words in (("default", "`default`"), ("default int8-forward", "8-bit forward"))
    }
    return (
        f"a whole step of ViT-B, `default`: {plain / of['default compiled']:.1f}× of eager fp32, "
        f"{1 / of['default compiled']:.2f}× of compiled bf16; both under CUDA graphs: "
        + ", ".join(f"{ratio:.2f}× ({words})" for words, ratio in graphs.items())
    )


def _memory(results: Path) -> str:
    rows = need(results, "cuda-memory.json")["rows"]
    found = rows["HOT paper"]
    parts = [
        f"{100 * (1 - row['of fp32']):.0f} % at {batch}"
        for batch, row in found.items()
        if "of fp32" in row
    ]
    return f"peak of a whole step of ViT-B, less than fp32's by {', '.join(parts)} images"


def _kept(results: Path) -> str:
    rows = need(results, "training.json")["runs"]
    mine, plain = rows["vit/paper/0"], rows["vit/fp32/0"]
    dated((mine, plain))
    share = mine["linear_saved_bytes"] / plain["linear_saved_bytes"]
    return f"kept by the linear layers themselves: {100 * (1 - share):.1f} % less (`paper`)"


def _peak_of_steps(results: Path) -> str:
    rows = {**_steps(results), **_steps(results, "cuda-steps-earlier.json")}

    def share(name: str) -> str:
        return f"{rows[name]['peak_gib'] / rows['fp32 eager']['peak_gib']:.2f}"

    return (
        "ViT-B, 128 images, peak under bf16 autocast of fp32's: bf16 "
        f"{share('bf16 eager')}, `default` {share('default eager')}; compiled: bf16 "
        f"{share('bf16 compiled')}, with a memory budget of 0.3 "
        f"{share('bf16 compiled, budget 0.3')}, `default` {share('default compiled')}"
    )


def _formula(results: Path) -> str:
    rows = need(results, "cuda-memory.json")["rows"]
    row = rows["HOT paper"]["128"]
    return (
        f"the authors' formula gives {row['formula_gib']:.2f} here, too; measured "
        f"{row['peak_gib']:.1f} of fp32's {rows['fp32']['128']['peak_gib']:.1f} GiB: it counts "
        "outputs of linear layers alone"
    )


def _example(results: Path) -> str:
    found = need(results, "compute.json")["example"]
    own, code = found["Table 5 and the integer products"], found["the authors' code"]
    return (
        f"no: Table 5's formulas give {own['vanilla BP']:.1f} and {own['HOT']:.1f}, the authors' "
        f"code {code['HOT']:.1f}"
    )


def _table_2(results: Path) -> str:
    found = need(results, "compute.json")["table 2"]
    l7, l1 = found["code, L7, r of convolutions"]["8"], found["code, L1, r of all layers"]["8"]
    return f"the costs are EfficientFormer-L7's ({l7:.2f} at r = 8), not L1's ({l1:.0f})"


def _cost(results: Path) -> str:
    found = need(results, "compute.json")["models"]["vit_b"]
    code = found["authors' code"]
    return (
        f"ViT-B, 10^12 BOPs: {code['FP']:.1f} → {code['HOT']:.2f} by the authors' code "
        f"({code['HOT, r = 1']:.2f} at r = 1, which is what is drawn); LBP-WHT "
        f"{code['LBP-WHT']:.1f}, not 20.4"
    )


def _breakdown(results: Path) -> str:
    of = need(results, "cuda-latency.json")["breakdown"]["qkv"]["stages"]
    total, products = hot_parts(of["paper, fp32 arrays"])
    quantisers = total - products
    return (
        f"H200, fp32 arrays: products {of['fp32']['products']:.0f} → {products:.0f} µs, transforms "
        f"and quantisers together {quantisers:.0f} µs"
    )


def _graphs(results: Path) -> str:
    means = need(results, "cuda-latency.json")["means"]["graph"]
    names = ("hotcore paper", "LBP-WHT", "the paper's HOT", "the paper's LBP-WHT")
    hot, low, theirs, their_low = (means[name]["geomean"] for name in names)
    return (
        f"geometric mean of 16 layers: HOT {hot:.2f}×, LBP-WHT {low:.2f}× (the paper: "
        f"{theirs:.2f}× and {their_low:.2f}×); LBP-WHT here is unfused torch operations, HOT is "
        "fused kernels: its time is that of the code, not of the method"
    )


def _without(reason: str) -> Measured:
    return lambda results: f"not measured: {reason}"


def _scaling(results: Path) -> str:
    parts = []
    for name, less in (("default", "bf16"), ("default int8-forward", "bf16"), (FP8, "bf16"),
                       ("default", FP8), ("fast", "bf16")):  # fmt: skip
        found = pooled_interval(pooled_gaps(results, name, less))
        if found is not None:
            words = f"{found.count} pairs: {intervals.verdict(found, MARGIN)}"
            parts.append(f"{name} less {less} {found.mean:+.4f} {ends_of(found)} ({words})")
    for size in gaps_by_size(results):
        need(results, f"cuda-gpt-{size}.json")  # for its date
    return f"95 % intervals, equivalence within {MARGIN}: {'; '.join(parts)}"


def _large(results: Path) -> str:
    runs = runs_by_seed(need(results, "cuda-gpt-91M.json"))
    (seed,) = runs["paper"]
    loss, plain = (runs[name][seed]["validation_loss"] for name in ("paper", "bf16"))
    return f"`paper` {loss:.3f} beside bf16's {plain:.3f}, GPT of 91M on text, one seed"


def _noise(results: Path) -> str:
    runs = need(results, "training.json")["runs"]
    spread = [
        statistics.stdev(
            run["val_loss"] for k, run in runs.items() if k.startswith(f"{task}/fp32/")
        )
        for task in ("vit", "gpt")
    ]
    gaps = _gaps("training.json", "default")(results)
    return f"{gaps}; fp32's own seeds spread by {spread[0]:.3f} and {spread[1]:.3f}"


def _against_fp8(results: Path) -> str:
    """Steps on both GPUs that were measured, and a whole model at the largest batch of each."""
    names = ("FP8 tensorwise", "default int8-forward", "fast int8-forward")
    found = []
    for name in ("cuda-steps.json", "cuda-rivals-h100.json"):
        rows = _steps(results, name, "llama_blocks_2k")
        of = [
            f"{one} {row['of reference']['step']:.2f}"
            for one in names
            if (row := rows.get(f"{one} compiled"))
        ]
        found.append(f"{need(results, name)['device'].split()[1]}: {', '.join(of)}")
    whole = need(results, "cuda-8b.json")["whole"]
    fp8, mine = (whole[f"{one}, attention kept"]["largest"]["tokens_per_s"] for one in names[:2])
    found.append(f"a whole Llama-3-8B at its largest batch: FP8 {fp8 / mine:.2f} times as fast")
    return "; ".join(found)


TABLES = "bench_training.py --table"
LARGE_RANKS = "cuda-ranks-efficientformer.json"
PUBLISHED = ("paper as published", "paper as published, LQS of g_x, too")
IMAGENET = "no CIFAR, no ImageNet and no pre-trained weights here, nothing is downloaded"

PLACES = {
    "small": ("[small layers](#small-layers)", "bench_backward.py --device cuda"),
    "layers": ("[layers](#layers-on-a-gpu)", "bench_backward.py --device cuda"),
    "compiled": ("[compiled](#compiled)", "bench_models.py --device cuda"),
    "latency": ("[the paper's table](#the-papers-latency-table)", "bench_latency.py --device cuda"),
    "Fig. 1": ("[Fig. 1](#the-papers-latency-table)", "bench_latency.py --device cuda"),
    "memory": ("[memory by batch](#memory-by-batch)", "bench_memory.py --device cuda"),
    "training": ("[training](dev/rivals.md#training)", "bench_training.py"),
    "ablations": ("[ablations](dev/rivals.md#ablations)", f"{TABLES} ablations"),
    "fine-tuning": ("[fine-tuning](dev/rivals.md#fine-tuning)", f"{TABLES} finetune"),
    "compute": ("[compute](dev/rivals.md#compute)", ""),
    "text": ("[paper.md](paper.md#where-paper-falls-behind)", "bench_gpt.py --device cuda"),
    "ranks": ("[ablations](dev/rivals.md#ablations)",
              f"{TABLES} ablations --tasks images-efficientformer"),
    "rounding": ("[ablations](dev/rivals.md#ablations), [paper.md](paper.md#what-differs-and-why)",
                 f"{TABLES} ablations"),
    "size": ("[by size](#by-size)", "bench_gpt.py --device cuda --size 10M"),
    "": ("", ""),
}  # fmt: skip
"""Where the docs have a claim's figures, and the command that measures them."""


def _claim(claim: str, claimed: str, measured: Measured, place: str = "") -> Claim:
    return Claim(claim, claimed, measured, *PLACES[place])


_ablated = functools.partial(_gaps, "ablations.json")
_trained = functools.partial(_gaps, "training.json")
_tuned = functools.partial(_gaps, "finetune.json")
SOURCES: tuple[Claim, ...] = (
    _claim("average speed-up on a real GPU (abstract; ViT-B, RTX 3090)", "2.6×", _speed_of_vit,
           "small"),
    _claim("the same of all 16 layers of its table", "2.08×", _speed_of_layers, "small"),
    _claim("the same at a training batch", "–", _batch, "layers"),
    _claim("the same, a whole step", "–", _step, "compiled"),
    _claim("largest: ViT-B's fc2", "3.3×", _of_shapes("197,768,3072"), "small"),
    _claim("ResNet-50's layers (unfolded)", "1.8 to 2.3×", _of_shapes(
        "3136,64,256", "3136,64,576", "784,128,512", "784,128,1152", "196,256,2304",
        "49,512,4608"), "small"),
    _claim("EfficientFormer-L7's layers", "1.6 to 2.2×", _of_shapes(
        "3136,384,96", "784,768,192", "196,1536,384", "49,1536,768", "49,768,1024",
        "49,3072,768"), "small"),
    _claim("latency table: HOT against LBP-WHT", "faster in every row", _graphs, "latency"),
    _claim("Fig. 1, ViT-B's qkv: products 182 → 25 µs, HT 18, HLA 11", "16 % overhead",
           _breakdown, "Fig. 1"),
    _claim("times on an RTX 3090", "all of the above", _without(
        "no such GPU; sm_80 to sm_89 kernels are compiled, not run")),
    _claim("memory saved (abstract)", "up to 75 %", _memory, "memory"),
    _claim("the same, of activations", "7/8", _kept, "training"),
    _claim("the same, beside bf16 autocast", "–", _peak_of_steps, "compiled"),
    _claim("Table 1: ViT-B, 128 images", "17.48 → 3.8 GB", _formula, "memory"),
    _claim("Table 1: ABC costs no accuracy", "93.2 → 93.2",
           _ablated("paper", "paper without ABC"), "ablations"),
    _claim("Table 1: LQS", "92.99, 2.3 → 2.6×",
           _ablated("paper", "paper with LQS", "paper with LQS of g_x, too"), "ablations"),
    _claim("accuracy close to fp32's, pre-training (Table 4, ImageNet-1k ViT-B)",
           "70.01 → 69.4", _trained("paper"), "training"),
    _claim("the same with all that was published: LQS, INT8 first, tiles, pseudo-stochastic "
           "rounding", "–", _ablated(*PUBLISHED), "ablations"),
    _claim("the same with tiles of tokens alone, as LP_L1 means", "–",
           _trained("paper, tiles", tasks=["vit"]), "training"),
    _claim("the same, the authors' own code", "–", _trained("authors_hot"), "training"),
    _claim("the same on text (not in the paper's pre-training)", "–", _large, "text"),
    _claim("accuracy close to fp32's, fine-tuning", "within 0.3 %", _tuned("paper"),
           "fine-tuning"),
    _claim("LUQ falls behind or diverges", "67.1 (ViT-B)",
           _trained("luq", "luq_forward", "luq_forward, in eval, too"), "training"),
    _claim("LBP-WHT falls behind or fails", "NaN (ViT-B)",
           _trained("lbp_wht", "lbp_wht_flat", tasks=["vit"]), "training"),
    _claim("naive INT4 falls behind or diverges", "NaN (ViT-B)", _trained("naive_int4"),
           "training"),
    _claim("Table 2: 8 of 16 rows suffice, 1 does not (EfficientFormer-L1, CIFAR-100)",
           "76.35, 76.25, 73.09, 68.46, 47.28 at r = 16, 8, 4, 2, 1", _ranks, "ranks"),
    _claim("Table 2: cost of the backward pass", "1383.54 Gbops at r = 8", _table_2, "compute"),
    _claim("Table 3: HOT on LoRA's frozen weights, not on the adapters",
           "92.51 beside 57.96 (plain 92.61)", _tuned(
               "LoRA", *(f"LoRA, paper on {of}" for of in ("the frozen", "the adapters", "both"))),
           "fine-tuning"),
    _claim("INT8 for the first eighth of a pre-training steadies it", "–",
           _ablated("paper", "paper, INT8 first"), "ablations"),
    _claim("the Hadamard transform makes INT4 of g_x work", "–",
           _ablated("paper", "paper, g_x without HT", "int4", "int4, g_x without HT"), "ablations"),
    _claim("pseudo-stochastic rounding is unbiased", "–", _ablated(
        *(f"{name}{of}" for name in ("paper", "default")
          for of in ("", ", rounding as the paper's", ", rounding to nearest"))), "rounding"),
    _claim("worked example (49, 448, 1792), Appendix D", "137.3 → 11.5 MFLOPs", _example,
           "compute"),
    _claim("figure of the computation cost", "51.8 → 18.35 (ViT-B)", _cost, "compute"),
    _claim("accuracies on CIFAR-10, CIFAR-100, ImageNet-100, ImageNet-1k; detection; BERT; "
           "Llama-3-8B", "Table 4 and the main text", _without(
               f"{IMAGENET} (`--images cifar100:FOLDER` runs it where the data lie)")),
    _claim("Fig. 2: gradients' outliers by token in fc2 and proj", "ViT-S, ResNet-34", _without(
        "needs ImageNet training; `paper.calibrate` prints the pattern of any model")),
)  # fmt: skip

OURS: tuple[Claim, ...] = (
    _claim("`default` trains as full precision does", "within seeds' noise", _noise, "training"),
    _claim("the same by size, GPTs of 10 to 311 M", f"equivalent to bf16 within {MARGIN}", _scaling,
           "size"),
    _claim("fine-tuning with `default`", "within seeds' noise", _tuned("default"), "fine-tuning"),
    _claim("the 8-bit forward costs little", "–", _trained("default int8-forward"), "training"),
    _claim("a step of Llama-3-8B's blocks against FP8, times of compiled bf16's",
           "faster with an 8-bit forward", _against_fp8, "compiled"),
)  # fmt: skip


def table(results: Path) -> Iterator[str]:
    """The sources' claims, then this project's."""
    yield from header(["claim", "claimed", "measured here", "date", "where", "command"])
    for claim in SOURCES:
        yield row_of(claim, results)
    yield line(["**of this project**", "", "", "", "", ""])
    for claim in OURS:
        yield row_of(claim, results)


def row_of(claim: Claim, results: Path) -> str:
    _days.clear()
    found = claim.measured(results)
    command = f"`{claim.command}`" if claim.command else ""
    days = " to ".join(sorted({min(_days), max(_days)})) if _days else ""
    return line([claim.claim, claim.claimed, found, days, claim.where, command])
