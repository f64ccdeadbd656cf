"""Tables of measurements in the docs, made from the reports that hold them.

    python -m benchmarks.evidence.doc_tables            # rewrite what is out of date
    python -m benchmarks.evidence.doc_tables --check    # say what is, and fail

A page has the lines ``<!-- table: KIND ARGUMENT... -->`` and ``<!-- end -->``; what is between them
comes from here. Every page of the repository that has such a line is looked at. ``KINDS`` at the
end lists the kinds, with their reports; what each holds says the function of its name, here, in
claims.py or in evidence_tables.py. A test keeps the pages as the reports are.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import kernel_classes
from evidence import RESULTS, ROOT, claims, evidence_tables, model_table
from evidence.evidence_tables import Lines, Make, Report, header, line, table_of
from hotcore.torch.advise import Advice, Tried
from hotcore.torch.clocks import Measured
from training import of_a_whole_model

BLOCK = re.compile(r"^<!-- table: (?P<words>.+?) -->\n(?P<body>.*?)^<!-- end -->$", re.S | re.M)


PAGES = tuple(
    page
    for page in sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
    if BLOCK.search(page.read_text(encoding="utf-8"))
)
"""Those with a table of measurements."""


class Unknown(Exception):
    """A block that nothing here makes, or whose report is not there."""


# ---- cells ----


def number(value: float | None, digits: int) -> str:
    """Nothing where there is none: no reference ran, or the profiler failed."""
    return "" if value is None else f"{value:.{digits}f}"


def times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}×"


def micro(row: Report | None) -> str:
    return "" if row is None else f"{1e3 * row['median_ms']:.0f}"


def listed(shape: Iterable[int]) -> str:
    return ", ".join(map(str, shape))


def by_code(names: Iterable[str]) -> list[str]:
    return [f"`{name}`" for name in names]


# ---- steps of models ----


RIVALS = (
    *("FP8 tensorwise compiled", "default int8-forward compiled", "default compiled"),
    *("fast int8-forward compiled", "fast compiled", "bf16 reduce-overhead"),
    *("default int8-forward reduce-overhead", "default reduce-overhead"),
    "fast int8-forward reduce-overhead",
)
"""Of the summary, each as time and peak of compiled bf16's."""


def steps(report: Report, model: str) -> Lines:
    """Every contender of a model: step, host, peak, kernels by class."""
    head = ["", "step, ms", "of bf16's", "host, ms", "peak, GiB", "of bf16's", "kernels, ms"]
    rows = report["steps"][model]["rows"].items()
    yield from table_of([*head, *kernel_classes.CLASSES], ([n, *cells(row)] for n, row in rows))


def all_steps(report: Report) -> Lines:
    """The same for every model that was measured, each under its name."""
    for model, entry in report["steps"].items():
        yield from (f"**{entry['title']}**", "", *steps(report, model), "")


def by_model(report: Report) -> Lines:
    """A step of every contender, of compiled bf16's, by model."""
    entries = report["steps"].values()
    yield from header(["of compiled bf16's", *(entry["title"] for entry in entries)])
    every = (name for entry in entries for name in entry["rows"])
    for name in dict.fromkeys(name for name in every if name != REFERENCE):
        rows = [entry["rows"].get(name) for entry in entries]
        own = [[""] * 2 if row is None else cells(row) for row in rows]
        yield line([name, *(ratio or first.partition(":")[0] for first, ratio, *_ in own)])


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
    spent = [kernels.get("busy_ms"), *(kernels["ms"].get(name) for name in kernel_classes.CLASSES)]
    host, peak = f"{row['host']['median_ms']:.1f}", number(row.get("peak_gib"), 2)
    figures = [f"{row['step']['median_ms']:.1f}", ratio, host, peak, number(of.get("peak"), 2)]
    return figures + [number(ms, 1) for ms in spent]


def lora(report: Report) -> Lines:
    """LoRA's contenders: speed, and the memory of weights, between steps, at the peak."""
    rows = report["steps"]["llama_lora"]["rows"]
    yield from header(["", "tokens a second", "of bf16's", "weights, GiB", "between steps, GiB",
                       "peak, GiB"])  # fmt: skip
    reference = rows["bf16 compiled"]["tokens_per_s"]
    for name, row in rows.items():
        if "step" not in row:
            yield line([name, cells(row)[0], *[""] * 4])
            continue
        speed = row["tokens_per_s"]
        memory = [row["weight_bytes"] / 2**30, row.get("between_steps_gib"), row.get("peak_gib")]
        figures = [f"{speed:,.0f}", f"{speed / reference:.2f}", *(number(m, 2) for m in memory)]
        yield line([name, *figures])


def whole(report: Report) -> Lines:
    """A whole model by contender: speed, energy and peak of a step, and the largest batch."""
    rows = report["whole"]
    tokens = report["settings"]["size"]["length"]
    yield from header(["", "sequences a step", "ms", "tokens a second", "joules a token",
                       "peak, GiB", "largest batch, tokens", "tokens a second there"])  # fmt: skip
    for name in (contender.name for contender in of_a_whole_model()):
        row = rows.get(name, {"left_out": "not run"})
        if "step" not in row:
            yield line([name, row.get("left_out", "failed"), *[""] * 6])
            continue
        most, sequences = row["largest"], f"{row['sequences']} × {tokens:,}"
        figures = [f"{row['step']['median_ms']:,.0f}", f"{row['tokens_per_s']:,.0f}"]
        figures += [number(row.get("joules_per_token"), 4), number(row.get("peak_gib"), 1)]
        figures += [f"{most['tokens']:,}", f"{most['tokens_per_s']:,.0f}"]
        yield line([name, sequences, *figures])


def summary(report: Report) -> Lines:
    """One line for each model: compiled bf16, and its rivals beside it."""
    yield from header(["time (peak) of compiled bf16's", "bf16, ms (GiB)", *RIVALS])
    for entry in report["steps"].values():
        rows = entry["rows"]
        plain, found = rows["bf16 compiled"], [entry["title"]]
        own = "step" in plain and f"{plain['step']['median_ms']:.1f} ({plain['peak_gib']:.2f})"
        found.append(own or "failed")
        for row in (rows.get(name, {}) for name in RIVALS):
            of = row.get("of reference")
            figures = f"{of['step']:.2f} ({of['peak']:.2f})" if of else ""
            found.append("failed" if "error" in row else figures)
        yield line(found)


def points(report: Report, *models: str) -> Lines:
    """Time and peak of every contender of some models, by peak; what none beats in both is bold."""
    head = ["", "contender", "step, ms", "of bf16's", "peak, GiB", "of bf16's"]
    yield from header(head)
    for entry in (report["steps"][model] for model in models):
        rows = {name: row for name, row in entry["rows"].items() if "of reference" in row}
        # By the times themselves: a reference that waits for its host differs from wave to wave.
        figures = {name: (row["step"]["median_ms"], row["peak_gib"]) for name, row in rows.items()}
        title = entry["title"]
        for name in sorted(rows, key=lambda name: figures[name][::-1]):
            time, peak = own = figures[name]
            beaten = any(o[0] <= time and o[1] <= peak and o != own for o in figures.values())
            of, words = rows[name]["of reference"], name if beaten else f"**{name}**"
            yield line([title, words, f"{time:.1f}", f"{of['step']:.2f}", f"{peak:.2f}",
                        f"{of['peak']:.2f}"])  # fmt: skip
            title = ""


def switch(results: Path, *files: str) -> Lines:
    """What to switch on by model and goal, as hot.advise chooses, beside the best of plain bf16.

    A model is of the first of these reports that has it.
    """
    entries: dict[str, tuple[str, Report]] = {}
    for file in files:
        for model, entry in evidence_tables.report_of(results, file)["steps"].items():
            entries.setdefault(model, (file, entry))
    own = ["switch on", "time", "peak"]
    yield from header(["of compiled bf16's", "for", *own, "the best of plain bf16", *own[1:]])
    for _, entry in entries.values():
        rows = {name: row for name, row in entry["rows"].items() if "of reference" in row}
        found = []
        for name, row in rows.items():
            plain, step = name.startswith("bf16 ") and " head" not in name, row["step"]
            size, quartiles = round(row["peak_gib"] * 2**30), (step["q1_ms"], step["q3_ms"])
            own_time = Measured(step["median_ms"], *quartiles, size)
            if "eager" not in name and "FP8" not in name:
                noisy = name.startswith("fast")
                found.append(Tried(name, "", plain, noisy, own_time))
        title = entry["title"]
        for goal in ("time", "memory", "both"):
            words = [title, goal]
            for chosen in (found, [row for row in found if row.plain]):
                best = Advice(tuple(chosen), goal, "peak", "").best
                assert best is not None
                of = rows[best.name]["of reference"]
                words += [best.name, f"{of['step']:.2f}", f"{of['peak']:.2f}"]
            yield line(words)
            title = ""
    yield from ("", evidence_tables.dates_line(results, files))


def gpt(report: Report) -> Lines:
    """Validation loss, step and peak of every run, beside bf16's of the same seed."""
    head = ["", "seed", "validation loss", "less bf16's", "step, ms", "of bf16's"]
    yield from header([*head, "peak, GiB", "of bf16's"])
    for title, row in report["runs"].items():
        name, seed = title.rsplit("/", 1)
        plain = report["runs"].get(f"bf16/{seed}", {})
        losses = [run.get("validation_loss") for run in (row, plain)]
        figures = ["diverged" if losses[0] is None else f"{losses[0]:.3f}"]
        figures.append("" if None in losses else f"{losses[0] - losses[1]:+.3f}")
        for key, digits in (("step_ms", 1), ("peak_gib", 2)):
            ratio = row[key] / plain[key] if plain and plain.get(key) and row.get(key) else None
            figures += [number(row.get(key), digits), number(ratio, 2)]
        yield line([name, seed, *figures])


def losses_note(report: Report) -> Lines:
    """How the last losses of some contenders compare with fp32's, over the models; one line."""
    models = report["models"].values()
    parts = []
    for name in ("default", "bf16", "fast", "paper"):
        ratios = [row["loss"][name][-1] / row["loss"]["fp32"][-1] for row in models]
        above = f"`{name}` above in {sum(ratio > 1 for ratio in ratios)} of {len(ratios)}"
        spread = f"{min(ratios):.2f} to {max(ratios):.2f} times"
        parts.append(f"{above} ({spread}, median {statistics.median(ratios):.2f})")
    yield f"*The last loss beside fp32's: {'; '.join(parts)}.*"


# ---- layers and products ----

HOTCORE = ("default", "fast", "paper")


def about(report: Report) -> Lines:
    """One line: where and when a report was made."""
    versions = report.get("versions", report)
    day = report.get("date", report.get("bench_backward", {}).get("date", ""))[:10]
    words = [report.get("device", report.get("machine", ""))]
    facts = versions if words == ["x86_64"] else report
    words += [facts["isa"]] if "isa" in facts else []
    if "threads" in facts:
        count = int(facts["threads"])
        words.append("one thread" if count == 1 else f"{count} threads")
    words += [f"torch {versions['torch']}" if "torch" in versions else "", day]
    yield f"*{', '.join(word for word in words if word)}*"


def each_group(report: Report, part: str) -> Iterator[tuple[str, str, Report]]:
    """Group of layers, recipe or contender, and its row, of a gpu-check."""
    for group, found in report["bench_backward"]["layers"].items():
        for name, row in found[part].items():
            yield group, name, row


def faster(report: Report, part: str, rivals: Mapping[str, str]) -> Lines:
    """Microseconds of a group's four layers, and how many times faster than each rival."""
    yield from header(["sum of four layers", "µs", *rivals.values()])
    for group, name, row in each_group(report, part):
        recipe = name.removesuffix(" both").removesuffix(" int8")
        forward = ", 8-bit forward" if " int8" in name else ", bf16 forward"
        title = f"{group}, `{recipe}`" + (forward if part == "both" else "")
        figures = [times(row["faster than"].get(rival)) for rival in rivals]
        yield line([title, f"{1e3 * row['sum_ms']:.0f}", *figures])


def layers(report: Report) -> Lines:
    """Backward of a model's layers."""
    rivals = {
        "torch bf16": "torch bf16",
        "bf16 products": "bf16, products only",
        "torch tf32": "torch tf32",
        "torch fp32": "torch fp32",
        "torchao both - forward": "torchao FP8, both less forward",
        "torchao backward": "torchao FP8, backward alone",
    }
    yield from faster(report, "recipes", rivals)


def both(report: Report) -> Lines:
    """Forward and backward of those layers together."""
    rivals = {"torch bf16 both": "torch bf16", "torchao both": "torchao FP8 (no bias)"}
    yield from faster(report, "both", rivals)


def floor(report: Report) -> Lines:
    """The sums, their floors, and their ratio."""
    yield from header(["sum of four layers", "µs", "floor, µs", "of the floor"])
    for group, recipe, row in each_group(report, "recipes"):
        figures = [f"{1e3 * row['sum_ms']:.0f}", f"{1e3 * row['floor_ms']:.0f}"]
        yield line([f"{group}, `{recipe}`", *figures, f"{row['times the floor']:.2f}"])


def forward(report: Report) -> Lines:
    """Compressing x, in copies of x; what it adds to a plain bf16 layer's forward pass."""
    yield from header(["", "recipe", "compress, copies of x", "extra time of the forward pass"])
    for group, recipe, row in each_group(report, "recipes"):
        extra = report["bench_backward"]["forward"][group]["extra"][recipe]
        yield line(
            [group, f"`{recipe}`", f"{row['compress of a copy']:.2f}", f"{100 * extra:.0f} %"]
        )


def each_layer(report: Report) -> Lines:
    """Microseconds of every layer of those."""
    rivals = ("torch bf16", "bf16 products", "fp8 products", "int8 products")
    yield from header(["layer", "L, O, I", *rivals, *by_code(HOTCORE)])
    for group, name, layer in each_group(report, "layers"):
        rows = layer["rows"]
        own = [micro(rows[f"hotcore {recipe}"]) for recipe in HOTCORE]
        theirs = [micro(rows.get(rival)) for rival in rivals]
        yield line([f"{group} {name}", listed(layer["shape"]), *theirs, *own])


def small(report: Report) -> Lines:
    """The paper's layers, one image each, in a CUDA graph."""
    yield from header(["16 layers, one image", "geometric mean", "worst layer"])
    for name, row in report["bench_backward"]["paper"]["rotating"]["means"].items():
        if name != "fp32":
            yield line([name, times(row["geomean"]), times(row["worst"])])


def fwht(report: Report) -> Lines:
    """Its share of a copy's speed, by block."""
    found = report["bench_fwht"]["n"]
    yield from header(["n", *found])
    shares = [f"{row['hotcore']['of the copy']:.2f}" for row in found.values()]
    yield line(["share of a copy's speed", *shares])


def host(report: Report) -> Lines:
    """The host's microseconds for one small layer."""
    rows = report["bench_backward"]["host"]["rows"].items()
    yield from table_of(["", "µs a call"], ([name, micro(row)] for name, row in rows))


def targets(report: Report) -> Lines:
    """The bars that the project set itself, and what was measured."""
    yield from header(["", "measured", "bar", "aim", "reached"])
    for row in report["targets"]:
        figures = [f"{row[name]:.3g}" for name in ("measured", "must", "aim")]
        yield line([row["work"], *figures, row["reached"]])


def tests(report: Report) -> Lines:
    """What ran on the GPU machine."""
    keys = ("passed", "failed", "skipped")
    rows = report["tests"].items()
    yield from table_of(["", *keys], ([name, *(str(row[k]) for k in keys)] for name, row in rows))


def products(report: Report) -> Lines:
    """TOPS of each INT8 product, and times faster than its rivals."""
    rivals = ("torch._int_mm", "torch fp8 rowwise")
    head = ["product", "M, N, K", "TOPS", *(f"of {rival}" for rival in rivals)]
    yield from header([*head, "of the best stock tile"])
    for group, entries in report["products"].items():
        for name, entry in entries.items():
            row = entry["rows"]["hotcore"]
            ratios = [row["faster than"].get(rival) for rival in rivals]
            figures = (number(v, 2) for v in [*ratios, row.get("of the best stock tile")])
            title = [f"{group} {name}", listed(entry["M, N, K"])]
            yield line([*title, f"{row['TOPS']:.0f}", *figures])


def cpu_layers(report: Report) -> Lines:
    """Milliseconds of a layer on a CPU, and how many times faster than fp32, and than bf16."""
    recipes = [name for name in report["recipes"] if name in ("default", "fast")]
    (group,) = report["layers"].values()
    tables = [(layer["shape"], layer["rows"]) for layer in group["layers"].values()]
    kinds = [kind for kind in ("fp32", "bf16") if f"torch {kind} both" in tables[0][1]]
    head = ["L, O, I", *(f"torch {kind}" for kind in kinds), "INT8 products alone, oneDNN"]
    head += [*by_code(recipes), *(f"with the forward: torch {kind}" for kind in kinds)]
    yield from header([*head, *(f"`{recipe}`, 8-bit forward" for recipe in recipes)])
    for shape, rows in tables:
        ms = {name: row["median_ms"] for name, row in rows.items()}
        words = [listed(shape)]
        for of, names in (("", [f"hotcore {r}" for r in recipes]),
                          (" both", [f"{r} int8 both" for r in recipes])):  # fmt: skip
            rivals = [ms[f"torch {kind}{of}"] for kind in kinds]
            words += [f"{rival:.2f}" for rival in rivals]
            words += [] if of else [f"{ms['int8 products']:.2f}"]
            for own in (ms[name] for name in names):
                words.append(f"{own:.2f} ({', '.join(f'{rival / own:.1f}×' for rival in rivals)})")
        yield line(words)


def rule(report: Report) -> Lines:
    """Forward and backward of a layer by `default` and `fast`, of plain bf16's time."""
    kinds = report["grid"]
    found: dict[str, dict[str, str]] = {}
    for kind, entry in kinds.items():
        for row in entry["rows"]:
            ms = {name: spread[0] for name, spread in row["times"].items()}
            ratios = " / ".join(f"{ms[name] / ms['plain']:.2f}" for name in ("default", "fast"))
            found.setdefault(row["shape"].split(", x [")[0], {})[kind] = ratios
    linear = [kind for kind in kinds if kind.startswith("linear")]
    for chosen in (linear, [kind for kind in kinds if kind not in linear]):
        rows = [
            [shape, *(of.get(kind, "") for kind in chosen)]
            for shape, of in found.items()
            if of.keys() & set(chosen)
        ]
        yield from (*table_of(["`default` / `fast`", *chosen], rows), "")


TASKS = {"vit": "small ViT, scikit-learn's digits", "gpt": "small GPT, Python's standard library"}


def train(report: Report) -> Lines:
    """Final validation loss less fp32's, mean of the seeds; bytes kept by the linear layers."""
    names = report["recipes"]
    yield from header(["", "fp32's loss", *by_code(names)])
    for task, entry in report["tasks"].items():
        gaps = [f"{entry['difference'][name]:+.3f}" for name in names]
        yield line([f"{TASKS[task]}: less fp32's", f"{entry['fp32']:.2f}", *gaps])
    for task, entry in report["tasks"].items():
        shares = [f"{100 * entry['kept'][name]:.1f} %" for name in names]
        yield line([f"{TASKS[task]}: kept by the linear layers", "100 %", *shares])


GALLERY = {
    "finetune_vit": ("a ViT-B/16", "fine-tuned at 224 × 224, batch 128"),
    "continue_llama": ("a Llama", "1B's shape in bf16, 4 × 2048 tokens, blocks recomputed"),
    "lora": ("LoRA", "rank 16, 8B's shape, 2 × 2048 tokens, blocks recomputed, within 24 GiB"),
    "diffusion": ("a diffusion transformer", "DiT-B/2 on 32 × 32, batch 128"),
    "clip": ("CLIP", "ViT-B/16, batch 128"),
}


def gallery(report: Report) -> Lines:
    """The examples at a real size: speed and peak memory, of plain's."""
    yield from header(["script", "contender", "a second", "of plain's", "peak, GiB", "of plain's"])
    for name, example in report["examples"].items():
        title, words = GALLERY[name]
        plain = example["contenders"]["plain"]
        for contender, row in example["contenders"].items():
            first = f"[{title}](../../examples/{name}.py), {words}" if row is plain else ""
            if "left out" in row:
                yield line([first, contender, row["left out"][:80], *[""] * 3])
                continue
            speed, of_speed, peak, of_peak = (
                value
                for key in ("a_second", "peak_gib")
                for value in (row.get(key), _share(row.get(key), plain.get(key)))
            )
            words = "" if speed is None else f"{speed:,.0f} {example['unit']}"
            cells = [words, times(of_speed), number(peak, 2), number(of_peak, 2)]
            yield line([first, contender, *cells])


def _share(mine: float | None, of: float | None) -> float | None:
    return mine / of if mine and of else None


# ---- when it pays ----

PAYS = {
    "llama_blocks_2k": "compiled",
    "vit_b": "reduce-overhead",
    "bert": "reduce-overhead",
    "llama_lora": "compiled",
}
"""Model -> how it is run, its rival too."""
CONVOLUTION = "cuda-convolution.json"
RIVALS_REPORT = "cuda-rivals.json"
PAYS_FP8 = ("llama_blocks_2k", "vit_b")
PAYS_RIVALS = ("llama_1b_blocks", "qwen_blocks", "gpt2")
"""Of the report of rivals, under CUDA graphs on both sides."""
REFERENCE = "bf16 compiled"
BUDGETS = (0.7, 0.5, 0.3, 0.2)
PAYS_LESS_MEMORY = {
    "`hot.recompute` but for attention, CUDA graphs": "reduce-overhead, attention kept",
}


def devices(results: Path) -> Lines:
    """Every GPU that gpu_check.py ran on: its tests, and times faster than bf16."""
    reports = [results / "gpu-check.json", *sorted(results.glob("device-*.json"))]
    groups, recipes = ("Llama-3-8B", "ViT-B"), ("default", "fast")
    backwards = [f"backward, {group}, `{name}`" for group in groups for name in recipes]
    yield from header(["GPU", "tests: passed, failed", *backwards, "ViT-B's step, graphs"])
    step, plain = "default int8-forward reduce-overhead", "bf16 reduce-overhead"
    for path in reports:
        report = json.loads(path.read_text())
        found, counts = report["ratios"], f"{report['passed']}, {report['failed']}"
        of = [found.get(f"{group}, sum, times faster than", {}) for group in groups]
        cells = [times(one.get(name, {}).get("torch bf16")) for one in of for name in recipes]
        rows = found.get("vit_b, a step, of compiled bf16", {})
        both = [row["step"] for name in (plain, step) if isinstance(row := rows.get(name), dict)]
        last = times(both[0] / both[1] if len(both) == 2 else None)
        yield line([report["device"], counts, *cells, last])


def limits(report: Report, *archs: str) -> Lines:
    """What every kernel takes on GPUs that are not here, from the compiled code."""
    rows = report["limits"]
    yield from header(["kernel", "threads", "shared memory, bytes",
                       *(f"{arch}: registers, stack, resident" for arch in archs)])  # fmt: skip
    for kernel in sorted(set().union(*(rows[arch] for arch in archs))):
        found = [rows[arch].get(kernel) for arch in archs]
        some = next(row for row in found if row)
        figures = [f"{r['registers']}, {r['stack']}, {r['resident']}" if r else "" for r in found]
        yield line([f"`{kernel}`", str(some["threads"]), f"{some['shared']:,}", *figures])


PAYS_COLUMNS = {
    "bf16": "plain bf16 so",
    "default": "`default`",
    "default int8-forward": "`default`, 8-bit forward",
    "fast": "`fast`",
    "fast int8-forward": "`fast`, 8-bit forward",
}


def pays(results: Path) -> Lines:
    """Times faster than the rival, and in brackets the peak memory beside the rival's.

    When HOT gains and when not, one line for each kind of work.
    """
    used: list[str] = []

    def report(name: str) -> Report:
        used.append(name)
        return evidence_tables.report_of(results, name)

    check = report("gpu-check.json")["bench_backward"]
    models = report("cuda-steps.json")["steps"] | report("cuda-lora.json")["steps"]
    less = report("cuda-memory-points-h100.json")["steps"]
    cpus = [
        [layer["rows"] for layer in group["layers"].values()]
        for name in ("cpu-backward.json", "cpu-backward-amx.json")
        for group in report(name)["layers"].values()
    ]
    names, recipes = ("default", "fast"), tuple(PAYS_COLUMNS)[1:]
    alone = {name: f"hotcore {name}" for name in names}
    together = {name: f"{name.removesuffix('-forward')} both" for name in recipes}

    def of_layers(group: str, part: str, rows: Mapping[str, str], rival: str) -> dict[str, str]:
        found = check["layers"][group][part]
        return {name: times(found[row]["faster than"].get(rival)) for name, row in rows.items()}

    def step(rows: Report, name: str, rival: str) -> str:
        """Both figures are of compiled bf16 in their own waves, so their ratio is fair."""
        mine, theirs = (rows.get(one, {}).get("of reference") for one in (name, rival))
        if not mine or not theirs:
            return ""
        return f"{theirs['step'] / mine['step']:.2f}× ({mine['peak'] / theirs['peak']:.2f})"

    def steps_of(rows: Report, how: str, rival: str) -> dict[str, str]:
        return {name: step(rows, f"{name} {how}", rival) for name in recipes}

    def on_cpu(rows: list[Report], rival: str, mine: Mapping[str, str]) -> dict[str, str]:
        found = {}
        for column, name in mine.items():
            ratios = [row[rival]["median_ms"] / row[name]["median_ms"] for row in rows]
            ends = dict.fromkeys(f"{end:.1f}" for end in (min(ratios), max(ratios)))
            found[column] = f"{' to '.join(ends)}×"
        return found

    def lines() -> Iterator[tuple[str, str, Mapping[str, str]]]:
        """Work, rival, and the cells by column."""
        llama, vit, bf16 = "Llama-3-8B", "ViT-B", "compiled bf16"
        own = {name: name for name in names}
        for group, size in ((llama, "8192 tokens"), (vit, "batch 128")):
            figures = of_layers(group, "recipes", own, "torch bf16")
            yield f"backward of {group}'s layers, {size}", "bf16", figures
        figures = of_layers(llama, "both", together, "torch bf16 both")
        yield f"forward and backward of {llama}'s layers", "bf16", figures
        for model, how in PAYS.items():
            if model not in models:
                continue
            words = ", CUDA graphs" if how == "reduce-overhead" else ""
            title, rows = f"step of {models[model]['title']}", models[model]["rows"]
            yield title + words, bf16 + words, steps_of(rows, how, f"bf16 {how}")
            eight = "FP8 tensorwise compiled"
            figures = steps_of(rows, "compiled", eight)
            if model in PAYS_FP8 and any(figures.values()):
                yield f"{title}, compiled", f"torchao {eight}", figures
        how, words = "reduce-overhead", ", CUDA graphs"
        for entry in (report(RIVALS_REPORT)["steps"][model] for model in PAYS_RIVALS):
            for name, rival in (("bf16", bf16), ("FP8 tensorwise", "torchao FP8 tensorwise")):
                figures = steps_of(entry["rows"], how, f"{name} {how}")
                if any(figures.values()):
                    yield f"step of {entry['title']}{words}", f"{rival}{words}", figures
        for entry in (less["vit_b"], less["bert"]):
            for words, suffix in PAYS_LESS_MEMORY.items():
                figures = steps_of(entry["rows"], suffix, REFERENCE)
                if any(figures.values()):
                    figures["bf16"] = step(entry["rows"], f"bf16 {suffix}", REFERENCE)
                    yield f"step of {entry['title']}, {words}", bf16, figures
        rows, title = less["vit_b"]["rows"], f"step of {less['vit_b']['title']}"
        budgets = [step(rows, f"bf16 reduce-overhead, budget {b}", REFERENCE) for b in BUDGETS]
        title += f", `activation_memory_budget` {listed(BUDGETS)}, CUDA graphs"
        yield title, bf16, {"bf16": ", ".join(budgets)}
        means = {name: row["geomean"] for name, row in check["paper"]["rotating"]["means"].items()}
        for title, rival, plain in (
            ("backward of small layers, 49 to 3136 tokens", "fp32", 1.0),
            ("the same", "bf16", means["bf16"]),
        ):
            yield title, rival, {name: times(means[row] / plain) for name, row in alone.items()}
        if (results / CONVOLUTION).exists():
            rows = report(CONVOLUTION)["steps"]["resnet50_last"]["rows"]
            ratio = step(rows, "default reduce-overhead", "bf16 reduce-overhead")
            title = "step of ResNet-50, convolutions converted, CUDA graphs"
            yield title, f"{bf16}, CUDA graphs", {"default": ratio}
        large, tiny = [row for rows in cpus for row in rows[:-1]], [rows[-1] for rows in cpus]
        two = "two CPUs"  # the range is over the layers and both machines
        title = f"{two}: backward of {vit}'s layers, 8 images"
        yield title, "fp32", on_cpu(large, "torch fp32", alone)
        yield "the same", "bf16", on_cpu(large, "torch bf16", alone)
        figures = on_cpu(large, "torch bf16 both", together)
        yield f"{two}: forward and backward of {vit}'s layers", "bf16", figures
        figures = on_cpu(tiny, "torch bf16", alone)
        yield f"{two}: backward of one layer, one image", "bf16", figures

    head = ["times faster (peak memory)", "than", *PAYS_COLUMNS.values()]
    cells = ([work, of, *(found.get(c, "") for c in PAYS_COLUMNS)] for work, of, found in lines())
    yield from table_of(head, cells)
    yield from ("", evidence_tables.dates_line(results, used))


def cases(report: Report) -> Lines:
    """Relative error of g_w where tokens differ in size: every case, every recipe."""
    recipes = report["recipes"]
    rows = report["cases"].items()
    yield from table_of(
        ["case", *by_code(recipes)],
        ([case, *(f"{errors[name]:.3f}" for name in recipes)] for case, errors in rows),
    )


# ---- runs on a GPU machine ----

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
FIGURES = (
    *("cases", "calls", "devices", "layers", "steps", "given_up", "elements"),
    *("integers_compared", "results_compared", "integers_different", "results_different"),
    *("different", "growth_device", "growth_reserved", "growth_host", "failed_steps", "places"),
    "message",
)
"""Of a test's figures, those that are shown, in this order."""
FIGURE_WORDS = {
    **{"devices": "GPUs", "integers_compared": "integers", "results_compared": "floats"},
    **{"results_different": "floats different", "places": "places of a failure"},
    **{"growth_device": "bytes grown on the device", "growth_host": "bytes grown on the host"},
    "growth_reserved": "bytes grown in its allocator",
}
"""Where they are not their keys."""


def trust(report: Report) -> Lines:
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
                f"{figures[key]:,} {FIGURE_WORDS.get(key, key.replace('_', ' '))}"
                if isinstance(figures[key], int)
                else str(figures[key])
                for key in FIGURES
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


def sanitizer(report: Report) -> Lines:
    """Each tool: tests that were clean, that had errors, that did not finish."""
    part = report["parts"].get("sanitizer")
    yield from header(["tool", "clean", "with errors", "not finished in time"])
    for tool, row in part["tools"].items() if part else ():
        lists = [", ".join(by_code(row[key])) for key in ("errors", "not finished")]
        yield line([tool, str(len(row["clean"])), *(names or "none" for names in lists)])
    if part is None:
        yield line(["not run", "", "", ""])


def config_fields(results: Path) -> Lines:
    """The fields of a configuration, from libhot's table; no report has them."""
    from hotcore.config import FIELDS

    rows = (
        [f"`{field.name}`", field.values_text("`"), f"`{field.default!r}`", field.doc]
        for field in FIELDS.values()
    )
    yield from table_of(["field", "values", "default", "what it is"], rows)


# ---- all kinds ----


def _of(file: str | None, *makes: Make) -> dict[str, tuple[str | None, Make]]:
    return {make.__name__.replace("_", "-"): (file, make) for make in makes}


TABLES = evidence_tables
KINDS: dict[str, tuple[str | None, Make]] = {
    **_of(None, about, cpu_layers, points, by_model),
    **_of("", config_fields),
    "steps-of": (None, all_steps),
    **_of("gpu-check.json", layers, both, each_layer, floor, forward, small, fwht, host, targets),
    **_of("gpu-check.json", tests),
    **_of("cuda-steps.json", steps, all_steps, summary),
    **_of("cuda-models-table.json", model_table.gradients, model_table.losses, losses_note),
    **_of("cuda-rule.json", rule),
    **_of("gpu-trust.json", trust, sanitizer),
    **_of("limits.json", limits),
    **_of("cpu-train.json", train),
    **_of("cuda-gemm.json", products),
    **_of("cuda-lora.json", lora),
    **_of("cuda-8b.json", whole),
    **_of("cuda-examples.json", gallery),
    **_of("cuda-gpt.json", gpt),
    "gpt-forward": ("cuda-gpt-forward.json", gpt),
    **_of("recipe-cases.json", cases),
    "claims": ("", claims.table),
    **_of("gradients.json", TABLES.gradient_quality),
    **_of("cuda-latency.json", TABLES.latency, TABLES.breakdown),
    **_of("cuda-memory.json", TABLES.memory),
    **_of("", pays, switch, devices, TABLES.trainings, TABLES.rows, TABLES.scaling, TABLES.pooled),
    **_of("", TABLES.pooled_words, TABLES.recipes, TABLES.to_loss, TABLES.to_loss_words),
    **_of("", TABLES.quality, TABLES.decided),
}
"""Kind -> the report (None: the first argument names it, "": several), and what makes the lines."""
DATED = ("gradient-quality", "latency", "breakdown", "memory")
"""Kinds of one report whose date stands below the table, as where there are several."""


def table(words: str, results: Path) -> str:
    """What belongs between the two lines. Raises Unknown."""
    kind, *arguments = words.split()
    if kind not in KINDS:
        raise Unknown(f"{kind!r} is none of {', '.join(KINDS)}")
    file, make = KINDS[kind]
    if file is None:
        file = arguments.pop(0) if arguments else "a report's name"
    try:
        source = evidence_tables.report_of(results, file) if file else results
        lines = [*make(source, *arguments)]
        if kind in DATED:
            lines += ["", evidence_tables.dates_line(results, [str(file)])]
        return "".join(f"{line}\n" for line in lines)
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


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("pages", type=Path, nargs="*", default=list(PAGES))
    parser.add_argument("--check", action="store_true", help="change nothing; fail if stale")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
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
        sys.exit(f"stale: {', '.join(stale)}; run python -m benchmarks.evidence.doc_tables")


if __name__ == "__main__":
    main()
