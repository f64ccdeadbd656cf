"""Tables of measurements in the docs, made from the reports that hold them.

    python benchmarks/doc_tables.py            # rewrite what is out of date
    python benchmarks/doc_tables.py --check    # say what is, and fail
    python benchmarks/doc_tables.py --train FOLDER...   # cpu-train.json from runs of train.sh

A page has the lines ``<!-- table: KIND ARGUMENT... -->`` and ``<!-- end -->``; what is between them
comes from here. Every page of the repository that has such a line is looked at. Kinds:

  about FILE       one line: device, versions and date of a report
  pays             when HOT gains and when not, one line for each kind of work (several reports)
  cpu-layers FILE  backward of layers on a CPU, and with the forward (cpu-backward.json)
  mma-sync         the product by mma.sync as planned (cuda-mma-sync.json)
  forward-convolutions  k×k convolutions, and what their 8-bit forward would take
  train            losses of scripts/train.sh, mean of seeds (cpu-train.json)
  layers           sums of a model's layers beside their rivals (gpu-check.json)
  both             forward and backward of those layers together (the same)
  each-layer       every layer of those (the same)
  floor            the sums beside the floor (the same)
  forward          compressing x, and the forward pass with it (the same)
  small            the paper's layers in a CUDA graph (the same)
  fwht             fwht's share of a copy's speed (the same)
  products         INT8 products beside their rivals (cuda-gemm.json)
  host             the host's time for a small layer (gpu-check.json)
  targets          bars and what was measured (the same)
  tests            tests of that run (the same)
  steps MODEL      every contender of a model (cuda-steps.json)
  steps-of FILE    the same of every model of another report
  lora             LoRA's contenders: tokens a second and memory (cuda-lora.json)
  all-steps        the same of all models, each under its name
  summary          one line for each model: compiled bf16, and its rivals beside it (the same)
  eager FILE MODEL...  eager steps of some contenders (parts peak and time of FILE)
  gpt              a GPT trained on text (cuda-gpt.json)
  gpt-forward      the same with an 8-bit forward, 400 steps (cuda-gpt-forward.json)
  autotune         layers by features, of plain bf16's time (cuda-autotune.json)
  convolutions     steps of ResNet-50 (the same)
  points FILE MODEL...  every contender's time and peak, by peak (cuda-memory-points.json)
  distributed      DDP and FSDP2 by NCCL (nccl.json)
  gradients [MODEL...]  cosine with fp32's gradient, by recipe (cuda-models-table.json)
  losses           the loss after some steps on one batch (the same)
  losses-note      how it compares with fp32's, one line (the same)
  kept BITS        forms of x in blocks of 64 tokens: error and bias (storage.json)
  kept-blocks      the chosen forms by tokens of a block (the same)
  kept-cases       error of g_w where tokens differ in size (the same)
  kept-times       time of those forms on a GPU (cuda-quantize.json)
  forward-input    x for the forward product and to be kept, by one call and by two (the same)
  forward-blocks   time of it by block, sums of layers (cuda-forward.json)
  forward-error    error of an 8-bit forward, beside FP8 (forward-error.json)
  frozen-error     error of g_x from a frozen weight's codes, and its time (frozen-error.json)
  one-code PART    one code a value: `chosen`, `cases`, `gx` or a choice of it (one-code.json)
  paper-rows       the paper's eight rows, three readings (training-rows-*.json)
  cases            error of g_w where tokens differ in size, by recipe (recipe-cases.json)
  trust            long runs on a GPU machine (gpu-trust.json)
  sanitizer        compute-sanitizer there (the same)
  earlier NAME     figures of runs whose scripts are not in the repository (earlier.json)
  claims           every claim of the sources, and what was measured (several; claims.py)
  trainings FILE...  losses less fp32's, paired (training.json, ablations.json, finetune.json, ...)
  rows FILE NAME;...  some rows of one of those
  gradient-quality error, noise and bias along training, by method (gradients.json)
  latency [PART]   the paper's layers (cuda-latency.json)
  breakdown        Fig. 1 of the supplement (the same)
  memory           a step of ViT-B by batch (cuda-memory.json)
  scaling          GPTs by size (cuda-gpt-10M.json, ...)
  pooled           the same over all sizes, and whether it shows equivalence (the same)
  pooled-words     the same of a few contenders, a sentence
  recipes FILE NAME;...  seed 0's last losses of one of those, a row
  to-loss          steps and time of bf16 to each contender's loss (the same, cuda-gpt.json)
  to-loss-words NAME  the same of one contender, a sentence
  quality          pooled-words, and to-loss-words of `fast`
  figure NAME FOLDER WORD...  a figure of plot.py --all, where its report is there

Of claims to quality a report that is not there is a line that says what makes it.

A test keeps the pages as the reports are.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import claims
import evidence_tables
import kernel_classes
import model_table
from evidence_tables import contenders_of, header, line

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/results"
BLOCK = re.compile(r"^<!-- table: (?P<words>.+?) -->\n(?P<body>.*?)^<!-- end -->$", re.S | re.M)


def pages() -> list[Path]:
    """Those with a table of measurements."""
    found = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    return [page for page in sorted(found) if BLOCK.search(page.read_text(encoding="utf-8"))]


PAGES = tuple(pages())
Report = Mapping[str, Any]
RIVALS = (
    *("FP8 tensorwise compiled", "default int8-forward compiled", "default compiled"),
    *("fast int8-forward compiled", "fast compiled", "bf16 reduce-overhead"),
    *("default int8-forward reduce-overhead", "default reduce-overhead"),
    "fast int8-forward reduce-overhead",
)
"""Of the summary, each as time and peak of compiled bf16's."""
EAGER = ("bf16", "default", "fast")


class Unknown(Exception):
    """A block that nothing here makes, or whose report is not there."""


def steps(report: Report, model: str) -> Iterator[str]:
    """Every contender: step, host, peak, kernels by class."""
    rows = contenders_of(report["steps"][model])
    head = ["", "step, ms", "of bf16's", "host, ms", "peak, GiB", "of bf16's", "kernels, ms"]
    head += kernel_classes.CLASSES
    yield from table_of(head, ([name, *cells(row)] for name, row in rows.items()))


def all_steps(report: Report) -> Iterator[str]:
    """The same for every model that was measured."""
    for model, entry in report["steps"].items():
        yield f"**{entry['title']}**"
        yield ""
        yield from steps(report, model)
        yield ""


FORMS = {
    "default": "`int4` (`default`)",
    "default, equalised": "`int4`, equalised",
    "rht4": "4 bits, transformed as `rht2`",
    "rht2": "`rht2`",
    "compact": "`rht2`, equalised (`compact`)",
    "accurate": "`int8` (`accurate`)",
    "fast": "sketch (`fast`)",
}
"""Forms of x as bench_quantize.py names them -> as the docs do."""


def kept_times(report: Report) -> Iterator[str]:
    """Compressing x, g_y's columns and x's operand; their sum beside `default`'s."""
    parts = ("compress", "columns", "operand")
    shapes = {name: report["shapes"][name] for name in ("25216,3072", "8192,4096")}
    head = ["x kept as"]
    for name in shapes:
        head += [f"{name.replace(',', ' × ')}: compress, µs", *parts[1:], "of `default`'s sum"]
    found = []
    for form, title in FORMS.items():
        row = [title]
        for rows in shapes.values():
            mine, base = ([rows[f"{part} {of}"] for part in parts] for of in (form, "default"))
            ratio = sum(r["median_ms"] for r in mine) / sum(r["median_ms"] for r in base)
            row += [*map(micro, mine), f"{ratio:.2f}"]
        found.append(row)
    yield from table_of(head, found)


def forward_input(report: Report) -> Iterator[str]:
    """x read and written (a copy), quantised and kept by two calls, and by one, microseconds."""
    forms = {"default": "INT4", "fast": "`fast`", "accurate": "INT8"}
    head = ["x", "a copy"]
    for title in forms.values():
        head += [f"{title}: two calls", "one", "ratio"]
    found = []
    for name, rows in report["shapes"].items():
        row = [name.replace(",", " × "), micro(rows["copy"])]
        for form in forms:
            two, one = (rows[f"{way} {form}"] for way in ("rows, compress", "rows and"))
            row += [*map(micro, (two, one)), times(two["median_ms"] / one["median_ms"])]
        found.append(row)
    yield from table_of(head, found)


def lora(report: Report) -> Iterator[str]:
    """LoRA's contenders: speed, and the memory of weights, between steps, at the peak."""
    rows = report["steps"]["llama_lora"]["rows"]
    head = ["", "tokens a second", "of bf16's", "weights, GiB", "between steps, GiB", "peak, GiB"]
    reference = rows["bf16 compiled"]["tokens_per_s"]
    found = []
    for name, row in rows.items():
        if "step" not in row:
            found.append([name, cells(row)[0], *[""] * 4])
            continue
        speed = row["tokens_per_s"]
        memory = [row["weight_bytes"] / 2**30, row.get("between_steps_gib"), row.get("peak_gib")]
        figures = [f"{speed:,.0f}", f"{speed / reference:.2f}", *(number(m, 2) for m in memory)]
        found.append([name, *figures])
    yield from table_of(head, found)


def cells(row: Report) -> list[str]:
    """Of one contender; why there are none where it has no figures."""
    if "step" not in row:
        why = "failed" if "error" in row else f"left out: {row['left_out']}"
        return [why] + [""] * (5 + len(kernel_classes.CLASSES))
    of, kernels = row.get("of reference", {}), row.get("kernels") or {"ms": {}}
    ratio = number(of.get("step"), 2)
    ratios = [run["step"] for run in row.get("runs", ()) if "step" in run]
    if ratios and row.get("how", {}).get("compiled"):
        ratio += f" ({min(ratios):.2f} to {max(ratios):.2f})"
    times = [kernels.get("all_ms"), *(kernels["ms"].get(name) for name in kernel_classes.CLASSES)]
    return [
        f"{row['step']['median_ms']:.1f}",
        ratio,
        f"{row['host']['median_ms']:.1f}",
        number(row.get("peak_gib"), 2),
        number(of.get("peak"), 2),
        *(number(ms, 1) for ms in times),
    ]


def number(value: float | None, digits: int) -> str:
    """Nothing where there is none: no reference ran, or the profiler failed."""
    return "" if value is None else f"{value:.{digits}f}"


def summary(report: Report) -> Iterator[str]:
    """A line for each model."""
    head = ["time (peak) of compiled bf16's", "bf16, ms (GiB)", *RIVALS]
    yield from header(head)
    for entry in report["steps"].values():
        rows = entry["rows"]
        plain = rows["bf16 compiled"]
        found = [entry["title"]]
        if "step" in plain:
            found.append(f"{plain['step']['median_ms']:.1f} ({plain['peak_gib']:.2f})")
        else:
            found.append("failed")
        for name in RIVALS:
            row = rows.get(name, {})
            of = row.get("of reference")
            figures = f"{of['step']:.2f} ({of['peak']:.2f})" if of else ""
            found.append("failed" if "error" in row else figures)
        yield line(found)


def eager(report: Report, *models: str) -> Iterator[str]:
    """Eager steps of several models, some contenders."""
    head = ["", "contender", "peak, GiB", "of bf16's", "step, ms", "of bf16's"]
    yield from header(head)
    for model in models:
        found = report["models"][model]
        batch = " × ".join(map(str, next(iter(found["batch"].values()))))
        for name in EAGER:
            peak, time = found["peak"][name], found["time"][name]
            title = f"{found['title']}, {batch}" if name == EAGER[0] else ""
            figures = [f"{peak['peak_gib']:.2f}", f"{peak['of bf16']:.3f}"]
            figures += [f"{time['median_ms']:.1f}", f"{time['of bf16']:.2f}"]
            yield line([title, name, *figures])


# ---- layers and products ----

HOTCORE = ("default", "fast", "paper")


def about(report: Report) -> Iterator[str]:
    """Where and when a report was made."""
    versions = report.get("versions", report)
    day = report.get("date", report.get("bench_backward", {}).get("date", ""))[:10]
    words = [report.get("device", report.get("machine", ""))]
    facts = versions if words == ["x86_64"] else report
    words += [facts["isa"]] if "isa" in facts else []
    if "threads" in facts:
        count = int(facts["threads"])
        words.append("one thread" if count == 1 else f"{count} threads")
    words += [f"torch {versions['torch']}", day]
    yield f"*{', '.join(word for word in words if word)}*"


def layers(report: Report) -> Iterator[str]:
    """Microseconds of a model's four layers, and how many times faster than each rival."""
    rivals = {
        "torch bf16": "torch bf16",
        "bf16 products": "bf16, products only",
        "torch tf32": "torch tf32",
        "torch fp32": "torch fp32",
        "torchao both - forward": "torchao FP8, both less forward",
        "torchao backward": "torchao FP8, backward alone",
    }
    yield from header(["sum of four layers", "µs", *rivals.values()])
    for group, found in report["bench_backward"]["layers"].items():
        for recipe, row in found["recipes"].items():
            of = row["faster than"]
            figures = [times(of.get(name)) for name in rivals]
            yield line([f"{group}, `{recipe}`", f"{1e3 * row['sum_ms']:.0f}", *figures])


def both(report: Report) -> Iterator[str]:
    """Forward and backward of a model's four layers together."""
    rivals = {"torch bf16 both": "torch bf16", "torchao both": "torchao FP8 (no bias)"}
    yield from header(["sum of four layers", "µs", *rivals.values()])
    for group, found in report["bench_backward"]["layers"].items():
        for name, row in found["both"].items():
            recipe = name.removesuffix(" both").removesuffix(" int8")
            forward = ", 8-bit forward" if " int8" in name else ", bf16 forward"
            figures = [times(row["faster than"].get(rival)) for rival in rivals]
            yield line([f"{group}, `{recipe}`{forward}", f"{1e3 * row['sum_ms']:.0f}", *figures])


def forward_blocks(report: Report) -> Iterator[str]:
    """The forward product's time by block of its transform; in brackets with w's codes kept."""
    blocks = ("16", "64", "128")
    head = ["sum of four layers, µs", "torch bf16", "FP8 product alone"]
    yield from header([*head, *(f"block {block}" for block in blocks)])
    for group, found in report["groups"].items():
        us = {name: f"{1e3 * value:.0f}" for name, value in found["sum_ms"].items()}
        own = [f"{us[f'block {n}']} ({us[f'block {n}, codes of w']})" for n in blocks]
        yield line([group, us["torch bf16"], us["fp8 product"], *own])


def each_layer(report: Report) -> Iterator[str]:
    """Microseconds of each layer."""
    rivals = ("torch bf16", "bf16 products", "fp8 products", "int8 products")
    yield from header(["layer", "L, O, I", *rivals, *(f"`{recipe}`" for recipe in HOTCORE)])
    for group, found in report["bench_backward"]["layers"].items():
        for name, layer in found["layers"].items():
            rows = layer["rows"]
            mine = [rows[f"hotcore {recipe}"] for recipe in HOTCORE]
            figures = [micro(row) for row in [*(rows.get(rival) for rival in rivals), *mine]]
            yield line([f"{group} {name}", ", ".join(map(str, layer["shape"])), *figures])


def floor(report: Report) -> Iterator[str]:
    """Sums, floors, and their ratio."""
    yield from header(["sum of four layers", "µs", "floor, µs", "of the floor"])
    for group, found in report["bench_backward"]["layers"].items():
        for recipe, row in found["recipes"].items():
            figures = [f"{1e3 * row['sum_ms']:.0f}", f"{1e3 * row['floor_ms']:.0f}"]
            yield line([f"{group}, `{recipe}`", *figures, f"{row['times the floor']:.2f}"])


def forward(report: Report) -> Iterator[str]:
    """Compressing x, in copies of x; what it adds to a plain bf16 layer's forward pass."""
    found = report["bench_backward"]
    yield from header(["", "recipe", "compress, copies of x", "extra time of the forward pass"])
    for group, entry in found["layers"].items():
        extra = found["forward"][group]["extra"]
        for recipe, row in entry["recipes"].items():
            figures = [f"{row['compress of a copy']:.2f}", f"{100 * extra[recipe]:.0f} %"]
            yield line([group, f"`{recipe}`", *figures])


def small(report: Report) -> Iterator[str]:
    """The paper's layers, one image each, in a CUDA graph."""
    yield from header(["16 layers, one image", "geometric mean", "worst layer"])
    for name, row in report["bench_backward"]["paper"]["rotating"]["means"].items():
        if name != "fp32":
            yield line([name, times(row["geomean"]), times(row["worst"])])


def fwht(report: Report) -> Iterator[str]:
    """Of a copy's speed, by block."""
    found = report["bench_fwht"]["n"]
    yield from header(["n", *found])
    shares = [f"{row['hotcore']['of the copy']:.2f}" for row in found.values()]
    yield line(["share of a copy's speed", *shares])


def products(report: Report) -> Iterator[str]:
    """TOPS of each product, and times faster than its rivals."""
    rivals = ("torch._int_mm", "torch fp8 rowwise")
    head = ["product", "M, N, K", "TOPS", *(f"of {rival}" for rival in rivals)]
    yield from header([*head, "of the best stock tile"])
    for group, entries in report["products"].items():
        for name, entry in entries.items():
            row = entry["rows"]["hotcore"]
            figures = [number(row["faster than"].get(rival), 2) for rival in rivals]
            figures += [number(row.get("of the best stock tile"), 2)]
            shape = ", ".join(map(str, entry["M, N, K"]))
            yield line([f"{group} {name}", shape, f"{row['TOPS']:.0f}", *figures])


def host(report: Report) -> Iterator[str]:
    """The host's microseconds for one small layer."""
    yield from header(["", "µs a call"])
    for name, row in report["bench_backward"]["host"]["rows"].items():
        yield line([name, micro(row)])


def bars(report: Report) -> Iterator[str]:
    """The bars that the project set itself."""
    yield from header(["", "measured", "bar", "aim", "reached"])
    for row in report["targets"]:
        figures = [f"{row[name]:.3g}" for name in ("measured", "must", "aim")]
        yield line([row["work"], *figures, row["reached"]])


def tests(report: Report) -> Iterator[str]:
    """What ran on the GPU machine."""
    yield from header(["", "passed", "failed", "skipped"])
    for name, row in report["tests"].items():
        yield line([name, *(str(row[key]) for key in ("passed", "failed", "skipped"))])


def backward_times(report: Report) -> Iterator[str]:
    """Microseconds of backward and of compress, of the first recipe's in brackets, beside bf16."""
    names = report["recipes"]
    columns = [f"`{name}`{of}" for of in (", backward", ", compress") for name in names]
    yield from header(["", "L, O, I", "torch bf16", *columns])
    for group, found in report["layers"].items():
        for layer, entry in found["layers"].items():
            rows = entry["rows"]
            cells = []
            for what in ("hotcore", "compress"):
                first = rows[f"{what} {names[0]}"]["median_ms"]
                for name in names:
                    own = rows[f"{what} {name}"]["median_ms"]
                    of = "" if name == names[0] else f" ({own / first:.2f})"
                    cells.append(f"{1e3 * own:.0f}{of}")
            shape = ", ".join(map(str, entry["shape"]))
            plain = f"{1e3 * rows['torch bf16']['median_ms']:.0f}"
            yield line([f"{group} {layer}", shape, plain, *cells])


def cpu_layers(report: Report) -> Iterator[str]:
    """Milliseconds of a layer on a CPU, and how many times faster than fp32, and than bf16."""
    recipes = [name for name in report["recipes"] if name in ("default", "fast")]
    (group,) = report["layers"].values()
    tables = [(layer["shape"], layer["rows"]) for layer in group["layers"].values()]
    kinds = [kind for kind in ("fp32", "bf16") if f"torch {kind} both" in tables[0][1]]
    head = ["L, O, I", *(f"torch {kind}" for kind in kinds), "INT8 products alone, oneDNN"]
    head += [f"`{recipe}`" for recipe in recipes]
    head += [f"with the forward: torch {kind}" for kind in kinds]
    yield from header([*head, *(f"`{recipe}`, 8-bit forward" for recipe in recipes)])
    for shape, rows in tables:

        def cells(rivals: Sequence[str], mine: Sequence[str], rows: Report = rows) -> list[str]:
            found = [f"{rows[rival]['median_ms']:.2f}" for rival in rivals]
            for name in mine:
                own = rows[name]["median_ms"]
                ratios = (f"{rows[rival]['median_ms'] / own:.1f}×" for rival in rivals)
                found.append(f"{own:.2f} ({', '.join(ratios)})")
            return found

        alone = cells([f"torch {kind}" for kind in kinds], [f"hotcore {r}" for r in recipes])
        alone.insert(len(kinds), f"{rows['int8 products']['median_ms']:.2f}")
        both = cells([f"torch {kind} both" for kind in kinds], [f"{r} int8 both" for r in recipes])
        yield line([", ".join(map(str, shape)), *alone, *both])


def mma_sync(report: Report) -> Iterator[str]:
    """The chosen plan of each product by mma.sync, beside its rivals of the same run."""
    yield from header(["product", "M, N, K", "plan", "TOPS", "of the best stock tile",
                       "of our best tile", "of `_int_mm`"])  # fmt: skip
    for group, products in report["products"].items():
        for name, found in products.items():
            row = found["rows"]["chosen"]
            yield line(
                [
                    f"{group} {name}",
                    ", ".join(map(str, found["M, N, K"])),
                    found["choice"],
                    f"{row['TOPS']:.0f}",
                    *(f"{row[key]:.2f}" for key in row if key.startswith("of ")),
                ]
            )


def forward_convolutions(report: Report) -> Iterator[str]:
    """Microseconds of a k×k convolution, and of what its 8-bit forward would take."""
    images = report["convolutions"].values()
    names = list(next(iter(images))["rows"])
    yield from header(["N, C, O, H = W", *names])
    for found in images:
        cells_of = []
        for row in found["rows"].values():
            of = "" if row["of torch conv"] == 1 else f" ({row['of torch conv']:.1f}×)"
            cells_of.append(f"{1e3 * row['median_ms']:.0f}{of}")
        yield line([", ".join(map(str, found["image"])), *cells_of])


TASKS = {"vit": "small ViT, scikit-learn's digits", "gpt": "small GPT, Python's standard library"}


def train(report: Report) -> Iterator[str]:
    """Final validation loss less fp32's, mean of the seeds; bytes kept by the linear layers."""
    names = report["recipes"]
    yield from header(["", "fp32's loss", *(f"`{name}`" for name in names)])
    for task, entry in report["tasks"].items():
        differences = [f"{entry['difference'][name]:+.3f}" for name in names]
        yield line([f"{TASKS[task]}: less fp32's", f"{entry['fp32']:.2f}", *differences])
    for task, entry in report["tasks"].items():
        kept = [f"{100 * entry['kept'][name]:.1f} %" for name in names]
        yield line([f"{TASKS[task]}: kept by the linear layers", "100 %", *kept])


def gpt(report: Report) -> Iterator[str]:
    """Validation loss, step and peak of every run, beside bf16's of the same seed."""
    head = ["", "seed", "validation loss", "less bf16's", "step, ms", "of bf16's"]
    yield from header([*head, "peak, GiB", "of bf16's"])
    for title, row in report["runs"].items():
        name, seed = title.rsplit("/", 1)
        plain = report["runs"].get(f"bf16/{seed}")
        figures = [f"{row['validation_loss']:.3f}"]
        figures += [f"{row['validation_loss'] - plain['validation_loss']:+.3f}" if plain else ""]
        for key, digits in (("step_ms", 1), ("peak_gib", 2)):
            ratio = row[key] / plain[key] if plain and plain.get(key) and row.get(key) else None
            figures += [number(row.get(key), digits), number(ratio, 2)]
        yield line([name, seed, *figures])


def autotune(report: Report) -> Iterator[str]:
    """Forward and backward of a layer by `default` and `fast`, of plain bf16's time."""
    kinds = report["grid"]
    found: dict[str, dict[str, str]] = {}
    for kind, entry in kinds.items():
        for row in entry["rows"]:
            plain = row["times"]["plain"][0]
            ratios = [row["times"][name][0] / plain for name in ("default", "fast")]
            shape = row["shape"].split(", x [")[0]
            found.setdefault(shape, {})[kind] = " / ".join(f"{ratio:.2f}" for ratio in ratios)
    linear = [kind for kind in kinds if kind.startswith("linear")]
    for chosen in (linear, [kind for kind in kinds if kind not in linear]):
        rows = {shape: cells for shape, cells in found.items() if cells.keys() & set(chosen)}
        yield from table_of(
            ["`default` / `fast`", *chosen],
            ([shape, *(cells.get(kind, "") for kind in chosen)] for shape, cells in rows.items()),
        )
        yield ""


def convolutions(report: Report) -> Iterator[str]:
    """Forward and backward of ResNet-50 as `convert` leaves it and with everything converted."""
    yield from header(["ResNet-50, 128 images", "", "layers converted", "ms", "of plain's"])
    for layout, entry in report["steps"].items():
        for name, row in entry.items():
            figures = [f"{row['median_ms']:.1f}", f"{row['of plain']:.2f}"]
            yield line([layout, name, row["converted"], *figures])


def distributed(report: Report) -> Iterator[str]:
    """A step and the loss, plain and by recipe."""
    head = ["", "", "step, ms", "loss", "cosine with the mean gradient", "replicas equal"]
    yield from header(head)
    for way in ("DDP", "FSDP2"):
        for name, row in report[way].items():
            equal = "yes" if row["same parameters"] else "no"
            figures = [f"{row['step_ms']:.1f}", f"{row['loss'][-1]:.3f}", f"{row['cosine']:.4f}"]
            yield line([way, name, *figures, equal])


PAYS = {
    "llama_blocks_2k": "compiled",
    "vit_b": "reduce-overhead",
    "bert": "reduce-overhead",
    "gpt2": "reduce-overhead",
    "llama_lora": "compiled",
}
"""Model -> how it is run, its rival too."""
EARLIER = "cuda-steps-earlier.json"
"""What was measured step by step, a synchronisation before and after each, and not again since."""
CONVOLUTION = "cuda-convolution.json"
PAYS_FP8 = ("llama_blocks_2k", "vit_b")
REFERENCE = "bf16 compiled"
BUDGETS = (0.7, 0.5, 0.3, 0.2)
PAYS_LESS_MEMORY = {
    "`hot.recompute` but for attention, CUDA graphs": "reduce-overhead, attention kept",
    '`saved={"attention": 4}`, CUDA graphs': "reduce-overhead, saved 8/4",
}


def pays(results: Path) -> Iterator[str]:
    """Times faster than the rival, and in brackets the peak memory beside the rival's."""

    used: list[str] = []

    def report(name: str) -> Report:
        used.append(name)
        return json.loads((results / name).read_text())

    check = report("gpu-check.json")
    models = report("cuda-steps.json")["steps"] | report("cuda-lora.json")["steps"]
    small = report("cuda-memory-points.json")["steps"]["bert"]
    processors = [
        [layer["rows"] for layer in group["layers"].values()]
        for name in ("cpu-backward.json", "cpu-backward-amx.json")
        for group in report(name)["layers"].values()
    ]
    names = ("default", "fast")
    recipes = ("default", "default int8-forward", "fast", "fast int8-forward")
    columns = ["`default`", "`default`, 8-bit forward", "`fast`", "`fast`, 8-bit forward"]
    yield from header(["times faster (peak memory)", "than", "plain bf16 so", *columns])

    def both(group: str) -> list[str]:
        found = check["bench_backward"]["layers"][group]["both"]
        rows = [f"{name.removesuffix('-forward')} both" for name in recipes]
        return ["", *(times(found[row]["faster than"].get("torch bf16 both")) for row in rows)]

    def of_recipes(plain: Sequence[float | None]) -> list[str]:
        """Of backward passes, which have no forward."""
        default, fast = map(times, plain)
        return ["", default, "", fast, ""]

    def backward(group: str, rival: str) -> list[str]:
        found = check["bench_backward"]["layers"][group]["recipes"]
        return of_recipes([found[name]["faster than"].get(rival) for name in names])

    def step(rows: Report, name: str, rival: str) -> str:
        """Both figures are of compiled bf16 in their own waves, so their ratio is fair."""
        mine, theirs = (rows.get(one, {}).get("of reference") for one in (name, rival))
        if not mine or not theirs:
            return ""
        return f"{theirs['step'] / mine['step']:.2f}× ({mine['peak'] / theirs['peak']:.2f})"

    def steps_of(model: str, how: str, rival: str) -> list[str]:
        return [step(models[model]["rows"], f"{name} {how}", rival) for name in recipes]

    def on_cpu(rows: list[Report], rival: str, mine: Sequence[str]) -> list[str]:
        found = []
        for name in mine:
            ratios = [row[rival]["median_ms"] / row[name]["median_ms"] for row in rows]
            low, high = f"{min(ratios):.1f}", f"{max(ratios):.1f}"
            found.append(f"{low}×" if low == high else f"{low} to {high}×")
        return found

    llama, vit = "Llama-3-8B", "ViT-B"
    title = f"backward of {llama}'s layers, 8192 tokens"
    yield line([title, "bf16", *backward(llama, "torch bf16")])
    yield line([f"backward of {vit}'s layers, batch 128", "bf16", *backward(vit, "torch bf16")])
    yield line([f"forward and backward of {llama}'s layers", "bf16", *both(llama)])
    for model, how in PAYS.items():
        if model not in models:
            continue
        words = ", CUDA graphs" if how == "reduce-overhead" else ""
        title = f"step of {models[model]['title']}"
        figures = steps_of(model, how, f"bf16 {how}")
        yield line([f"{title}{words}", f"compiled bf16{words}", "", *figures])
        if model == "llama_blocks_2k":
            long = report(EARLIER)["steps"]["llama_blocks"]["rows"]
            figures = [step(long, f"{name} compiled", REFERENCE) for name in recipes]
            yield line(["the same, one sequence of 8192", "compiled bf16", "", *figures])
        if model not in PAYS_FP8:
            continue
        eight = "FP8 tensorwise compiled"
        figures = steps_of(model, "compiled", eight)
        if any(figures):
            yield line([f"{title}, compiled", f"torchao {eight}", "", *figures])
    for entry in (models["vit_b"], small):
        rows = entry["rows"]
        for words, suffix in PAYS_LESS_MEMORY.items():
            plain, *fewer = (step(rows, f"{name} {suffix}", REFERENCE)
                             for name in ("bf16", *recipes))  # fmt: skip
            if any(fewer):
                yield line([f"step of {entry['title']}, {words}", "compiled bf16", plain, *fewer])
    rows = small["rows"]
    plain = ", ".join(step(rows, f"bf16 compiled, budget {b}", REFERENCE) for b in BUDGETS)
    title = f"step of {small['title']}, `activation_memory_budget` {', '.join(map(str, BUDGETS))}"
    yield line([title, "compiled bf16", plain, *[""] * 4])
    means = check["bench_backward"]["paper"]["rotating"]["means"]
    ratios = [means[f"hotcore {name}"]["geomean"] for name in names]
    title = "backward of small layers, 49 to 3136 tokens"
    yield line([title, "fp32", *of_recipes(ratios)])
    bf16 = means["bf16"]["geomean"]
    yield line(["the same", "bf16", *of_recipes([ratio / bf16 for ratio in ratios])])
    if (results / CONVOLUTION).exists():
        rows = report(CONVOLUTION)["steps"]["resnet50"]["rows"]
        for words, suffix in (("", ""), (", `saved=8`", ", saved")):
            found = step(rows, f"default compiled{suffix}", REFERENCE)
            title = f"step of ResNet-50, convolutions converted{words}"
            yield line([title, "compiled bf16", "", found, "", "", ""])
    large = [row for rows in processors for row in rows[:-1]]
    tiny = [rows[-1] for rows in processors]
    alone = [f"hotcore {name}" for name in names]
    together = [f"{name.removesuffix('-forward')} both" for name in recipes]
    two = "two CPUs"  # the range is over the layers and both machines

    def spaced(found: Sequence[str]) -> list[str]:
        return ["", found[0], "", found[1], ""]

    title = f"{two}: backward of {vit}'s layers, 8 images"
    yield line([title, "fp32", *spaced(on_cpu(large, "torch fp32", alone))])
    yield line(["the same", "bf16", *spaced(on_cpu(large, "torch bf16", alone))])
    title = f"{two}: forward and backward of {vit}'s layers"
    yield line([title, "bf16", "", *on_cpu(large, "torch bf16 both", together)])
    title = f"{two}: backward of one layer, one image"
    yield line([title, "bf16", *spaced(on_cpu(tiny, "torch bf16", alone))])
    yield ""
    yield evidence_tables.dates_line(results, used)


def points(report: Report, *models: str) -> Iterator[str]:
    """Time and peak of every contender of some models, by peak; what none beats in both is bold."""
    head = ["", "contender", "step, ms", "of bf16's", "peak, GiB", "of bf16's"]
    yield from header(head)
    for model in models:
        entry = report["steps"][model]
        rows = {name: row for name, row in entry["rows"].items() if "of reference" in row}
        # By the times themselves: a reference that waits for its host differs from wave to wave.
        figures = {name: (row["step"]["median_ms"], row["peak_gib"]) for name, row in rows.items()}
        title = entry["title"]
        for name in sorted(rows, key=lambda name: figures[name][::-1]):
            time, peak = figures[name]
            beaten = any(
                other[0] <= time and other[1] <= peak and other != (time, peak)
                for other in figures.values()
            )
            words = name if beaten else f"**{name}**"
            of = rows[name]["of reference"]
            cells = [f"{time:.1f}", f"{of['step']:.2f}", f"{peak:.2f}", f"{of['peak']:.2f}"]
            yield line([title, words, *cells])
            title = ""


# ---- tables of all kinds ----


def table_of(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield from header(head)
    yield from map(line, rows)


def times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}×"


def forward_error(report: Report) -> Iterator[str]:
    """Percent, by activations and product."""
    names = list(report["rows"][0]["error"])
    yield from table_of(
        ["activations", "in features", *names],
        (
            [row["activation"], str(row["width"])]
            + [f"{100 * row['error'][name]:.2f} %" for name in names]
            for row in report["rows"]
        ),
    )


def frozen_error(report: Report) -> Iterator[str]:
    """Percent of the gradient with w, in brackets of that with the codes' weight; milliseconds."""
    names = list(report["rows"][0]["error"])
    yield from table_of(
        ["weights", "g_y", "out × in", *names],
        (
            [row["weights"], row["gradient"], " × ".join(map(str, row["shape"]))]
            + [f"{100 * e['weight']:.2f} ({100 * e['codes']:.2f})" for e in row["error"].values()]
            for row in report["rows"]
        ),
    )
    times, shape = report["time"]["rows"], " × ".join(map(str, report["time"]["shape"]))
    yield line(["bytes a value kept, w in bf16", "", ""] + [str(report["bytes"][n]) for n in names])
    yield line(
        [f"g_x of {shape}, ms", "", ""] + [f"{times[name]['median_ms']:.0f}" for name in names]
    )


def micro(row: Report | None) -> str:
    return "" if row is None else f"{1e3 * row['median_ms']:.0f}"


def _of_models(report: Report, index: int, models: Sequence[str] = ()) -> Iterator[str]:
    chosen = {name: report["models"][name] for name in models or report["models"]}
    yield from model_table.markdown(chosen).strip().split("\n\n")[index].split("\n")


def losses_note(report: Report) -> Iterator[str]:
    """How the last losses of some contenders compare with fp32's, over the models."""
    models = report["models"].values()
    parts = []
    for name in ("default", "bf16", "fast", "paper"):
        ratios = [row["loss"][name][-1] / row["loss"]["fp32"][-1] for row in models]
        above = sum(ratio > 1 for ratio in ratios)
        low, high, middle = (
            f"{r:.2f}" for r in (min(ratios), max(ratios), statistics.median(ratios))
        )
        parts.append(
            f"`{name}` above in {above} of {len(ratios)} ({low} to {high} times, median {middle})"
        )
    yield f"*The last loss beside fp32's: {'; '.join(parts)}.*"


def kept(report: Report, bits: str) -> Iterator[str]:
    """Error of every form, and its bias in brackets."""
    rows = [row for row in report["blocks"] if row["block"] == 64 and row["bits"] == int(bits)]
    names = {name: name for name in rows[0]["forms"]}
    if bits == "2":
        names["dither 1.75"] = "dither 1.75 (`rht2`)"
    yield from table_of(
        ["one block of x", *names.values()],
        (
            [row["input"], *(f"{f['error']:.3f} ({f['bias']:.3f})" for f in row["forms"].values())]
            for row in rows
        ),
    )


def kept_blocks(report: Report) -> Iterator[str]:
    """The forms that were chosen and the codebook's, in blocks of 16, 32 and 64."""
    chosen = ((4, "dither"), (4, "codebook"), (2, "dither 1.75"), (2, "codebook"))
    found = {(row["block"], row["bits"], row["input"]): row for row in report["blocks"]}
    inputs = ("Gauss", "Student t, 3 degrees", "one token × 30")
    yield from header(["", "tokens of a block", "bytes a value", *inputs])
    for bits, form in chosen:
        for block in (64, 32, 16):
            cells = [found[block, bits, name] for name in inputs]
            pairs = [(row["forms"][form]["error"], row["forms"][form]["bias"]) for row in cells]
            yield line(
                [
                    f"{form}, {bits} bits",
                    str(block),
                    f"{cells[0]['bytes']:.3f}",
                    *(f"{error:.3f} ({bias:.3f})" for error, bias in pairs),
                ]
            )


def kept_cases(report: Report) -> Iterator[str]:
    """Plain, and equalised by the mean magnitude; by the other measures for rht2."""
    rows = report["cases"]
    head, picks = ["case"], []
    for name in rows[0]["forms"]:
        for measure, words in (("plain", ""), ("mean", ", equalised")):
            head.append(name.replace("rht4", "dither, 4 bits") + words)
            picks.append((name, measure))
    for measure, words in (("rms", "root mean square"), ("largest", "largest value")):
        head.append(f"rht2, by the {words}")
        picks.append(("rht2", measure))
    yield from table_of(
        head,
        (
            [row["case"], *(f"{row['forms'][name][measure]:.3f}" for name, measure in picks)]
            for row in rows
        ),
    )


def one_code(report: Report, *words: str) -> Iterator[str]:
    """Relative errors of one code a value (bench_one_code.py)."""
    part = " ".join(words)
    if part == "chosen":
        head = ["", "", "all", "out features", "in features", "bias"]
        rows = one_code_rows(report["layers"])
    elif part == "gx":
        sets = report["gx"]
        head = ["", *sets]
        rows = (
            [name, *(f"{of[name][0]:.4f} ({of[name][7]:.4f})" for of in sets.values())]
            for name in next(iter(sets.values()))
        )
    elif part == "cases":
        names = ("default", "accurate", "token8", "token4")
        head = ["case", *(f"`{name}`" for name in names)]
        rows = (
            [case, *(one_code_cell((of["today"] | of["chosen"])[name]) for name in names)]
            for case, of in report["cases"].items()
        )
    else:
        yield from one_code_choice(report, part)
        return
    yield from table_of(head, rows)


def one_code_rows(sets: Mapping[str, Report]) -> Iterator[list[str]]:
    """Of every set of layers, today's recipes and the forms that were chosen."""
    for title, choices in sets.items():
        for at, (name, row) in enumerate((choices["today"] | choices["chosen"]).items()):
            yield [title if at == 0 else "", f"`{name}`", *one_code_cells(row)]


def one_code_cells(row: Sequence[float]) -> list[str]:
    """All; median, 95 % and largest of rows and of columns; bias."""
    digits = 4 if row[0] < 0.02 else 3
    sides = (", ".join(f"{value:.{digits}f}" for value in row[at : at + 3]) for at in (1, 4))
    return [f"{row[0]:.4f}", *sides, f"{row[7]:.4f}"]


def one_code_cell(row: Sequence[float], biased: bool = False) -> str:
    """All, 95 % of rows, 95 % of columns; the bias in brackets."""
    figures = " / ".join(f"{row[at]:.{3 if row[at] < 10 else 1}f}" for at in (0, 2, 5))
    return figures + (f" ({row[7]:.4f})" if biased else "")


ONE_CODE_CASES = {
    "sizes": ("Gauss", "features log-normal 1.5", "the same, a massive token without gradient"),
    "scales": ("Gauss",),
}
"""Synthetic cases beside the layers, where a choice is about them."""


def one_code_choice(report: Report, choice: str) -> Iterator[str]:
    """All, 95 % of out features, 95 % of in features; the bias in brackets."""
    sets = {**report["layers"], **{c: report["cases"][c] for c in ONE_CODE_CASES.get(choice, ())}}
    forms = {f"`{name}`": ("chosen", name) for name in ("token4", "token8")}
    others = {name: (choice, name) for name in next(iter(sets.values()))[choice]}
    if not any("token8" in name for name in others):
        del forms["`token8`"]
    if all("token8" in name for name in others):
        del forms["`token4`"]
    biased = len(report["layers"]["GPT"][choice][next(iter(others))]) > 7
    yield from table_of(
        ["", *sets],
        (
            [name, *(one_code_cell(of[where][key], biased) for of in sets.values())]
            for name, (where, key) in {**forms, **others}.items()
        ),
    )


READINGS = {
    "diagonal": "0 2 3 8 10 11 12 14",
    "axes": "0 1 2 3 4 8 10 12 (`paper`)",
    "ten": "0 1 2 3 4 8 10 11 12 14 (the authors' code)",
}


def paper_rows(results: Path) -> Iterator[str]:
    """Validation loss less fp32's of the same seed, by what `paper` keeps of 16 tokens."""
    reports = {
        name: json.loads((results / f"training-rows-{name}.json").read_text())
        for name in ("vit", "gpt")
    }
    columns = (("gpt", "", "GPT"), ("vit", "", "ViT"), ("vit", ", tiles", "ViT, tiles"))
    yield from header(["rows kept", *(name for *_, name in columns)])
    for reading, rows in READINGS.items():
        cells = [rows]
        for task, of, _ in columns:
            runs = reports[task]["runs"]
            differences = [
                runs[f"{task}/paper, {reading}{of}/{seed}"]["val_loss"]
                - runs[f"{task}/fp32/{seed}"]["val_loss"]
                for seed in reports[task]["settings"]["seeds"]
            ]
            each = ", ".join(f"{value:+.2f}" for value in differences)
            cells.append(f"{statistics.mean(differences):+.3f} ({each})")
        yield line(cells)
    yield ""
    yield evidence_tables.dates_line(results, [f"training-rows-{name}.json" for name in reports])


def recipe_cases(report: Report) -> Iterator[str]:
    """Relative error of g_w: every case, every recipe that was measured."""
    recipes = report["recipes"]
    yield from header(["case", *(f"`{name}`" for name in recipes)])
    for case, errors in report["cases"].items():
        yield line([case, *(f"{errors[name]:.3f}" for name in recipes)])


TRUST = {
    "random": "random small calls, CUDA against the CPU",
    "overlap": "random layers, overlapping launches against one at a time",
    "load": "64 threads on 8 streams",
    "steps": "training steps, four of ten given up",
    "large": "arrays past 2³¹ elements",
    "faults": "errors of CUDA, full memory, forks, managed and pinned memory",
    "devices": "two GPUs at once: by threads of one process, by a process each",
    "sanitizer": "compute-sanitizer, every C++ GPU test",
}
FIGURES = {
    "cases": "cases",
    "calls": "calls",
    "devices": "GPUs",
    "layers": "layers",
    "steps": "steps",
    "given_up": "given up",
    "elements": "elements",
    "integers_compared": "integers",
    "results_compared": "floats",
    "integers_different": "integers different",
    "results_different": "floats different",
    "different": "different",
    "growth_device": "bytes grown on the device",
    "growth_reserved": "bytes grown in its allocator",
    "growth_host": "bytes grown on the host",
    "failed_steps": "failed steps",
    "places": "places of a failure",
    "message": "message",
}
"""Of a test's figures, those that are shown, in this order."""


def trust(report: Report) -> Iterator[str]:
    """Each part: its result, its tests with their figures."""
    yield from header(["run", "result", "seconds", "figures"])
    for name, title in TRUST.items():
        part = report["parts"].get(name)
        if part is None:
            yield line([title, "not run", "", ""])
            continue
        shown = []
        for test, row in part.get("tests", {}).items() if name != "sanitizer" else ():
            figures = row["figures"]
            words = [
                f"{figures[key]:,} {word}" if isinstance(figures[key], int) else str(figures[key])
                for key, word in FIGURES.items()
                if figures.get(key, "") != ""
            ]
            if words and row["result"] != "suppressed":
                shown.append(f"`{test}`: {', '.join(words)}")
            elif row["result"] in ("failed", "skipped"):
                shown.append(f"`{test}` {row['result']}")
        if name == "sanitizer":
            tools = part["tools"].items()
            shown = [f"{tool} {len(row['clean'])} of {part['tests']} clean" for tool, row in tools]
        yield line([title, part["result"], f"{part['seconds']:.0f}", "; ".join(shown)])


def sanitizer(report: Report) -> Iterator[str]:
    """Each tool: tests that were clean, that had errors, that did not finish."""
    part = report["parts"].get("sanitizer")
    yield from header(["tool", "clean", "with errors", "not finished in time"])
    for tool, row in part["tools"].items() if part else ():
        lists = [", ".join(f"`{name}`" for name in row[key]) for key in ("errors", "not finished")]
        yield line([tool, str(len(row["clean"])), *(names or "none" for names in lists)])
    if part is None:
        yield line(["not run", "", "", ""])


def earlier(report: Report, name: str) -> Iterator[str]:
    """Figures that were written down: no script of the repository makes them again."""
    heads = [head.replace("`int4`", "`default`, g_x in INT4") for head in report[name]["columns"]]
    yield from table_of(heads, report[name]["rows"])


def config_fields(results: Path) -> Iterator[str]:
    """The fields of a configuration, from libhot's table; no report has them."""
    from hotcore.config import FIELDS

    rows = (
        [f"`{field.name}`", field.values_text("`"), f"`{field.default!r}`", field.doc]
        for field in FIELDS.values()
    )
    yield from table_of(["field", "values", "default", "what it is"], rows)


CHECK, AUTOTUNE, MODELS = "gpu-check.json", "cuda-autotune.json", "cuda-models-table.json"
KINDS: dict[str, tuple[str | None, Callable[..., Iterator[str]]]] = {
    "about": (None, about),
    "pays": ("", pays),
    "cpu-layers": (None, cpu_layers),
    "mma-sync": ("cuda-mma-sync.json", mma_sync),
    "forward-convolutions": ("cuda-forward-convolutions.json", forward_convolutions),
    "train": ("cpu-train.json", train),
    "layers": (CHECK, layers),
    "both": (CHECK, both),
    "each-layer": (CHECK, each_layer),
    "floor": (CHECK, floor),
    "forward": (CHECK, forward),
    "small": (CHECK, small),
    "backward-times": (None, backward_times),
    "fwht": (CHECK, fwht),
    "products": ("cuda-gemm.json", products),
    "host": (CHECK, host),
    "targets": (CHECK, bars),
    "tests": (CHECK, tests),
    "eager": (None, eager),
    "steps": ("cuda-steps.json", steps),
    "all-steps": ("cuda-steps.json", all_steps),
    "steps-of": (None, all_steps),
    "summary": ("cuda-steps.json", summary),
    "lora": ("cuda-lora.json", lora),
    "gpt": ("cuda-gpt.json", gpt),
    "gpt-forward": ("cuda-gpt-forward.json", gpt),
    "autotune": (AUTOTUNE, autotune),
    "convolutions": (AUTOTUNE, convolutions),
    "distributed": ("nccl.json", distributed),
    "points": (None, points),
    "gradients": (MODELS, lambda report, *models: _of_models(report, 0, models)),
    "losses": (MODELS, lambda report, *models: _of_models(report, 1, models)),
    "losses-note": (MODELS, losses_note),
    "kept": ("storage.json", kept),
    "kept-blocks": ("storage.json", kept_blocks),
    "kept-cases": ("storage.json", kept_cases),
    "kept-times": ("cuda-quantize.json", kept_times),
    "forward-input": ("cuda-quantize.json", forward_input),
    "forward-error": ("forward-error.json", forward_error),
    "frozen-error": ("frozen-error.json", frozen_error),
    "forward-blocks": ("cuda-forward.json", forward_blocks),
    "one-code": ("one-code.json", one_code),
    "paper-rows": ("", paper_rows),
    "cases": ("recipe-cases.json", recipe_cases),
    "trust": ("gpu-trust.json", trust),
    "sanitizer": ("gpu-trust.json", sanitizer),
    "earlier": ("earlier.json", earlier),
    "claims": ("", claims.table),
    "trainings": ("", evidence_tables.trainings),
    "rows": ("", evidence_tables.rows),
    "gradient-quality": ("", evidence_tables.gradient_quality),
    "latency": ("", evidence_tables.latency),
    "breakdown": ("", evidence_tables.breakdown),
    "memory": ("", evidence_tables.memory),
    "scaling": ("", evidence_tables.scaling),
    "pooled": ("", evidence_tables.pooled),
    "pooled-words": ("", evidence_tables.pooled_words),
    "recipes": ("", evidence_tables.recipes),
    "to-loss": ("", evidence_tables.to_loss),
    "to-loss-words": ("", evidence_tables.to_loss_words),
    "quality": ("", evidence_tables.quality),
    "figure": ("", evidence_tables.figure),
    "config-fields": ("", config_fields),
}
"""Kind -> the report (None: the first argument names it, "": several), and what makes the lines."""


def table(words: str, results: Path) -> str:
    """What belongs between the two lines. Raises Unknown."""
    kind, *arguments = words.split()
    if kind not in KINDS:
        raise Unknown(f"{kind!r} is none of {', '.join(KINDS)}")
    file, make = KINDS[kind]
    if file is None:
        file = arguments.pop(0) if arguments else "a report's name"
    try:
        if not file:
            return "".join(f"{line}\n" for line in make(results, *arguments))
        report = json.loads((results / file).read_text())
        return "".join(f"{line}\n" for line in make(report, *arguments))
    except FileNotFoundError as error:
        raise Unknown(f"{error.filename} is not there") from error
    except TypeError as error:  # another number of arguments
        raise Unknown(str(error)) from error
    except KeyError as error:
        raise Unknown(f"the report has no {error.args[0]}") from error


def rewritten(text: str, results: Path = RESULTS) -> str:
    """A page with its tables as the reports are. Raises Unknown, naming the block."""

    def replace(match: re.Match[str]) -> str:
        words = match["words"]
        try:
            return f"<!-- table: {words} -->\n{table(words, results)}<!-- end -->"
        except Unknown as error:
            raise Unknown(f"<!-- table: {words} -->: {error}") from error

    return BLOCK.sub(replace, text)


def trained(folders: Sequence[Path]) -> dict[str, Any]:
    """cpu-train.json: several runs of scripts/train.sh, which differ in their seeds alone.

    Raises ValueError where a task has no run in fp32.
    """
    runs = [json.loads((folder / "train.json").read_text()) for folder in folders]
    rows = [row for run in runs for row in run["results"]]
    recipes = [name for name in dict.fromkeys(row["recipe"] for row in rows) if name != "fp32"]
    without = {row["task"] for row in rows} - {r["task"] for r in rows if r["recipe"] == "fp32"}
    if without:
        raise ValueError(f"no run in fp32 of {', '.join(sorted(without))}: train.sh needs one")

    def mean(task: str, recipe: str, key: str) -> float:
        return statistics.mean(
            row[key] for row in rows if (row["task"], row["recipe"]) == (task, recipe)
        )

    tasks = {}
    for task in dict.fromkeys(row["task"] for row in rows):
        exact = mean(task, "fp32", "val_loss")
        kept = mean(task, "fp32", "linear_saved_bytes")
        tasks[task] = {
            "fp32": exact,
            "difference": {name: mean(task, name, "val_loss") - exact for name in recipes},
            "kept": {name: mean(task, name, "linear_saved_bytes") / kept for name in recipes},
        }
    about = {
        key: value for key, value in runs[0].items() if key not in ("data", "python", "results")
    }
    seeds = sorted({row["seed"] for row in rows})
    return {**about, "seeds": seeds, "recipes": recipes, "tasks": tasks}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("pages", type=Path, nargs="*", default=list(PAGES))
    parser.add_argument("--check", action="store_true", help="change nothing; fail if stale")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--train", type=Path, nargs="+", metavar="FOLDER", help="train.sh's --out")
    args = parser.parse_args(argv)
    if args.train:
        try:
            report = json.dumps(trained(args.train), indent=1) + "\n"
        except ValueError as error:
            sys.exit(f"--train: {error}")
        (args.results / "cpu-train.json").write_text(report)
    stale = []
    for page in args.pages:
        before = page.read_text()
        try:
            after = rewritten(before, args.results)
        except Unknown as error:
            sys.exit(f"{page}: {error}")
        if after != before:
            stale.append(str(page))
            if not args.check:
                page.write_text(after)
                print(f"written: {page}")
    if args.check and stale:
        sys.exit(f"stale: {', '.join(stale)}; run python benchmarks/doc_tables.py")


if __name__ == "__main__":
    main()
