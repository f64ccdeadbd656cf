"""Write the tables of the docs from the reports in benchmarks/results.

    python -m benchmarks.evidence.doc_tables            # rewrite stale tables
    python -m benchmarks.evidence.doc_tables --check    # name stale pages, and fail

The text between ``<!-- table: KIND ARGUMENT... -->`` and ``<!-- end -->`` is generated, on every
page of the repository. ``KINDS`` lists the kinds with their reports. The function of a kind's name
says what the table shows. A test fails if a page is stale.
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
from evidence import (
    RESULTS,
    ROOT,
    claims,
    evidence_tables,
    intervals,
    model_table,
    several_tables,
    speeds,
)
from evidence.evidence_tables import Lines, Make, Report, header, line, table_of
from hotcore.torch.tools.advise import Advice, Tried
from hotcore.torch.tools.clocks import Measured

BLOCK = re.compile(r"^<!-- table: (?P<words>.+?) -->\n(?P<body>.*?)^<!-- end -->$", re.S | re.M)


PAGES = tuple(
    page
    for page in sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
    if BLOCK.search(page.read_text(encoding="utf-8"))
)
"""Pages with a generated table."""


class Unknown(Exception):
    """Raised for an unknown kind of table, and for a missing report."""


# ---- cells ----


def number(value: float | None, digits: int) -> str:
    """Format a number; None gives an empty cell."""
    return "" if value is None else f"{value:.{digits}f}"


def times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}×"


def listed(shape: Iterable[int]) -> str:
    return ", ".join(map(str, shape))


def by_code(names: Iterable[str]) -> list[str]:
    return [f"`{name}`" for name in names]


# ---- steps of models ----


def steps(report: Report, model: str) -> Lines:
    """Step, host time, peak, and kernel time by class of every contender of a model."""
    head = ["", "step, ms", "of bf16's", "host, ms", "peak, GiB", "of bf16's", "kernels, ms"]
    rows = report["steps"][model]["rows"].items()
    yield from table_of([*head, *kernel_classes.CLASSES], ([n, *cells(row)] for n, row in rows))


def cells(row: Report) -> list[str]:
    """Cells of one contender, or the reason of missing figures."""
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


def shared(report: Report) -> Lines:
    """Time of each call beside a kernel that holds S multiprocessors, of its time alone."""
    held = list(report["least"])
    head = ["", "", "alone, µs", *(f"S = {count}" for count in held)]
    rows = [["SMs / (SMs - S)", "", "", *(number(report["least"][count], 2) for count in held)]]
    for layer, entry in report["layers"].items():
        for name, row in entry["rows"].items():
            cells = [number(row["of alone"][count], 2) for count in held]
            rows.append([layer, name, number(1e3 * row["alone_ms"], 0), *cells])
    yield from table_of(head, rows)


BASES = {
    "bf16": ("bf16", ("bf16",)),
    "NF4, blocks of 64, scales quantised (QLoRA)": (
        "NF4, double quantisation",
        ("frozen nf4", "frozen nf4 fp32", "frozen nf4 torchao"),
    ),
    "INT4, `hot.freeze(model, 4)`": ("hot.freeze(model, 4)", ("frozen int4",)),
    "INT4, `hot.freeze(model, 4, inputs=batches)`": (
        "hot.freeze(model, 4, inputs)",
        ("frozen int4",),
    ),
    "INT8, `hot.freeze_int8(model)`": ("hot.freeze_int8(model)", ("frozen int8",)),
}
"""Rows of :func:`bases`: the name in reports of bases, and the ends of bench_8b's contenders."""
NF4 = "NF4, double quantisation"
TUNED = {"gpt": "a GPT of 0.4M", "bert": "BERT", "albert": "ALBERT"}
"""Tasks of base-lora.json."""


def bases(results: Path) -> Lines:
    """Bytes, speed and peak, errors of outputs and losses of LoRA by the form of a frozen base.

    The fastest library of a form counts.
    """
    errors, lora, large = (
        evidence_tables.report_of(results, f"{name}.json")
        for name in ("base-formats", "base-lora", "cuda-8b")
    )
    cases = errors["cases"]
    tasks = [f"loss less bf16's [95 %], {words}" for words in TUNED.values()]
    yield from header(["base", "bytes a value", "8B: tokens a second", "8B: peak, GiB",
                       "error of outputs, of NF4's", *tasks])  # fmt: skip
    for words, (name, ends) in BASES.items():
        ratios = [rows[name]["sequence"] / rows[NF4]["sequence"] for rows in cases.values()]
        runs = [large["whole"].get(f"LoRA {end}, attention kept", {}) for end in ends]
        best = max(runs, key=lambda run: run.get("tokens_per_s", 0))
        speed, peak = best.get("tokens_per_s"), number(best.get("peak_gib"), 1)
        cells = ["" if speed is None else f"{speed:,.0f}", peak]
        cells.append(number(statistics.geometric_mean(ratios), 2))
        cells += (lora_gap(lora["tasks"][task], name) for task in TUNED)
        size = number(next(iter(cases.values()))[name]["bytes"], 3)
        yield line([words, size, *cells])


def lora_gap(rows: Report, name: str, baseline: str = "bf16") -> str:
    """The loss after LoRA less the baseline's, paired by seed; the baseline's own loss."""
    plain = rows[baseline]["loss"]
    if name == baseline:
        return f"{statistics.mean(plain.values()):.4f}"
    ends = intervals.interval([rows[name]["loss"][seed] - plain[seed] for seed in plain])
    assert ends is not None
    return f"{ends.mean:+.4f} [{ends.low:+.4f}, {ends.high:+.4f}]"


def adapters(results: Path) -> Lines:
    """Losses of adapters whose x is in codes less those of plain ones; plain ones' own losses."""
    tasks = evidence_tables.report_of(results, "base-lora-adapters.json")["tasks"]
    plain, *coded = tasks["gpt"]
    yield from header(["adapters", *TUNED.values()])
    for form, words in ((plain, "plain"), *zip(coded, coded, strict=True)):
        yield line([words, *(lora_gap(tasks[task], form, plain) for task in TUNED)])


def base_errors(results: Path) -> Lines:
    """Errors of weights and outputs of three models with real weights, and of a GPT."""
    errors, lora = (
        evidence_tables.report_of(results, f"base-{name}.json") for name in ("formats", "lora")
    )
    cases, rows = errors["cases"], lora["tasks"]["gpt"]
    ends = [f"1 - cosine, {case}" for case in cases]
    yield from header(["base", "error of w", *ends, "KL, GPT", "GPT's loss less bf16's"])
    for words, (name, _) in BASES.items():
        mine = [content[name] for content in cases.values()]
        gap = rows[name]["before"] - rows["bf16"]["before"]
        figures = [number(row["sequence"], 4) for row in mine]
        yield line([words, number(mine[0]["w"], 3), *figures, f"{rows[name]['kl']:.5f}",
                    f"{gap:+.4f}"])  # fmt: skip


def whole(report: Report) -> Lines:
    """Speed, energy and peak of a step of a whole model, and its largest batch.

    The baseline is bf16 with recomputed blocks, for LoRA bf16's LoRA.
    """
    rows = report["whole"]
    yield from header(["", "tokens a second", "speed", "joules a token", "peak, GiB",
                       "largest batch, tokens", "speed there"])  # fmt: skip
    for name, row in rows.items():
        if "step" not in row:
            yield line([name, row.get("left_out", "failed"), *[""] * 5])
            continue
        plain = rows.get(f"{'LoRA ' * name.startswith('LoRA')}bf16, attention kept", {})
        largest = row["largest"]
        figures = [f"{row['tokens_per_s']:,.0f}"]
        figures += [times(_share(row["tokens_per_s"], plain.get("tokens_per_s")))]
        figures += [number(row.get("joules_per_token"), 4), number(row.get("peak_gib"), 1)]
        there = _share(largest["tokens_per_s"], plain.get("largest", {}).get("tokens_per_s"))
        yield line([name, *figures, f"{largest['tokens']:,}", times(there)])


def points(report: Report, *models: str) -> Lines:
    """Speed and peak of the contenders that no other beats in both, by peak."""
    yield from header(["", "setting", "speed", "peak, GiB", "of bf16's peak"])
    for entry in (report["steps"][model] for model in models):
        rows = {name: row for name, row in entry["rows"].items() if "of reference" in row}
        # Ratios differ from wave to wave with the host, so contenders are compared by their times.
        figures = {name: (row["step"]["median_ms"], row["peak_gib"]) for name, row in rows.items()}
        title = entry["title"]
        for name, (ms, peak) in sorted(figures.items(), key=lambda item: item[1][::-1]):
            if any(o[0] <= ms and o[1] <= peak and o != (ms, peak) for o in figures.values()):
                continue
            of = rows[name]["of reference"]
            yield line([title, name, times(1 / of["step"]), f"{peak:.2f}", f"{of['peak']:.2f}"])
            title = ""


RIVALS = ("FP8", "torchao", "Liger", "nf4")
"""Words of other libraries' contenders, which hot.advise does not try."""


def switch(results: Path, *files: str) -> Lines:
    """Setting by model and goal that hot.advise chooses, beside the best of plain bf16.

    The first report that has a model counts.
    """
    entries: dict[str, tuple[str, Report]] = {}
    for file in files:
        for model, entry in evidence_tables.report_of(results, file)["steps"].items():
            entries.setdefault(model, (file, entry))
    heads = ["speed", "peak"]
    yield from header(["", "for", "switch on", *heads, "the best of plain bf16", *heads])
    for _, entry in entries.values():
        rows = {name: row for name, row in entry["rows"].items() if "of reference" in row}
        tried = []
        for name, row in rows.items():
            plain, step = name.startswith("bf16 ") and " head" not in name, row["step"]
            rival = any(words in name for words in RIVALS)
            size, quartiles = round(row["peak_gib"] * 2**30), (step["q1_ms"], step["q3_ms"])
            measured = Measured(step["median_ms"], *quartiles, size)
            if "eager" not in name and not rival:
                noisy = name.startswith("fast")
                tried.append(Tried(name, "", plain, noisy, measured))
        title = entry["title"]
        for goal in ("time", "memory", "both"):
            words = [title, goal]
            for chosen in (tried, [row for row in tried if row.plain]):
                best = Advice(tuple(chosen), goal, "peak", "").best
                assert best is not None
                ratios = rows[best.name]["of reference"]
                words += [best.name, times(1 / ratios["step"]), f"{ratios['peak']:.2f}"]
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
    """Last losses of some contenders beside fp32's, over the models."""
    models = report["models"].values()
    yield from header(["last loss, of fp32's", "above it in", "median", "largest"])
    for name in ("default", "bf16", "fast", "paper"):
        ratios = [row["loss"][name][-1] / row["loss"]["fp32"][-1] for row in models]
        above = f"{sum(ratio > 1 for ratio in ratios)} of {len(ratios)} models"
        yield line([name, above, f"{statistics.median(ratios):.2f}", f"{max(ratios):.3g}"])


# ---- layers and products ----


def about(report: Report) -> Lines:
    """Line with the machine and the day of a report."""
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
    """Yield group of layers, contender and its row, from gpu-check; no figures if not steady."""
    for group, parts in report["bench_backward"]["layers"].items():
        rows = next(iter(parts["layers"].values()))["rows"]
        if part == "both":
            names = [name for name in rows if name.endswith(" both") and "torch" not in name]
        else:
            names = [n.removeprefix("hotcore ") for n in rows if n.startswith("hotcore ")]
        for name in names:
            yield group, name, parts[part].get(name, {"faster than": {}})


def faster(report: Report, part: str, rivals: Mapping[str, str]) -> Lines:
    """Speed over a model's four layers beside each rival."""
    yield from header(["speed, sum of four layers", *(f"of {name}" for name in rivals.values())])
    for group, name, row in each_group(report, part):
        recipe = name.removesuffix(" both").removesuffix(" int8")
        forward = ", 8-bit forward" if " int8" in name else ", bf16 forward"
        title = f"{group}, `{recipe}`" + (forward if part == "both" else "")
        yield line([title, *(times(row["faster than"].get(rival)) for rival in rivals)])


def layers(report: Report) -> Lines:
    """Speed of the backward pass of a model's layers."""
    rivals = {"torch fp32": "fp32", "torch bf16": "bf16", "torchao backward": "FP8's backward"}
    yield from faster(report, "recipes", rivals)


def both(report: Report) -> Lines:
    """Speed of forward and backward of the same layers."""
    yield from faster(report, "both", {"torch bf16 both": "bf16", "torchao both": "FP8"})


def floor(report: Report) -> Lines:
    """Times of the layers' backward, their floors, and the ratio."""
    yield from header(["sum of four layers", "µs", "floor, µs", "of the floor"])
    for group, recipe, row in each_group(report, "recipes"):
        us = (1e3 * row[key] if key in row else None for key in ("sum_ms", "floor_ms"))
        figures = [*(number(value, 0) for value in us), number(row.get("times the floor"), 2)]
        yield line([f"{group}, `{recipe}`", *figures])


def host(report: Report) -> Lines:
    """Host time of a linear layer's share of a step, and what it takes beyond bf16's."""
    yield from header(["ViT-L, 16 images: host, µs a layer", "compiled", "eager"])
    for kind in dict.fromkeys(name.rpartition(" ")[0] for name in report["host"]):
        rows = [report["host"].get(f"{kind} {way}", {}) for way in ("compiled", "eager")]
        both = [(number(r.get("us_per_layer"), 0), r.get("us_beyond_bf16")) for r in rows]
        yield line([kind, *(f"{us} ({more:+.0f})" if more else us for us, more in both)])


def small(report: Report) -> Lines:
    """Speed of the paper's layers beside fp32, one image each, in a CUDA graph."""
    yield from header(["speed, 16 layers, one image", "geometric mean", "worst layer"])
    for name, row in report["bench_backward"]["paper"]["rotating"]["means"].items():
        if name != "fp32":
            yield line([name, times(row["geomean"]), times(row["worst"])])


def targets(report: Report) -> Lines:
    """Targets of the project, and measurements."""
    yield from header(["", "measured", "bar", "aim", "reached"])
    for row in report["targets"]:
        figures = [f"{row[name]:.3g}" for name in ("measured", "must", "aim")]
        yield line([row["work"], *figures, row["reached"]])


def tests(report: Report) -> Lines:
    """Counts of tests on the GPU machine."""
    keys = ("passed", "failed", "skipped")
    rows = report["tests"].items()
    yield from table_of(["", *keys], ([name, *(str(row[k]) for k in keys)] for name, row in rows))


def cpu_layers(report: Report) -> Lines:
    """Speed of `default` on a CPU: the backward pass, and both passes with the 8-bit forward."""
    (group,) = report["layers"].values()
    backward, both = "hotcore default", "default int8 both"
    pairs = [("torch fp32", backward), ("torch bf16", backward), ("torch bf16 both", both)]
    heads = ["backward, of fp32's speed", "backward, of bf16's", "forward and backward, of bf16's"]
    yield from header(["L, O, I", *heads])
    for layer in group["layers"].values():
        ms = {name: row["median_ms"] for name, row in layer["rows"].items()}
        yield line([listed(layer["shape"]), *(f"{ms[a] / ms[b]:.1f}×" for a, b in pairs)])


def rule(report: Report) -> Lines:
    """Speed over forward and backward of square linear layers, beside bf16."""
    speeds: dict[str, dict[str, str]] = {}
    for shape, rows in report["rule"]["shapes"].items():
        tokens, outs, ins = map(int, shape.split(","))
        if outs != ins:
            continue
        speed = times(rows["plain"]["median_ms"] / rows["default int8"]["median_ms"])
        speeds.setdefault(f"{outs} × {ins}", {})[f"{tokens:,} tokens"] = speed
    columns = [*next(iter(speeds.values()))]
    cells = ([shape, *(row[column] for column in columns)] for shape, row in speeds.items())
    yield from table_of(["out × in features", *columns], cells)


TASKS = {"vit": "small ViT, scikit-learn's digits", "gpt": "small GPT, Python's standard library"}


def train(report: Report) -> Lines:
    """Last validation loss less fp32's, mean of the seeds, and bytes that linear layers keep."""
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
    """Speed and peak of the examples at a real size, beside plain torch."""
    yield from header(["script", "contender", "a second", "of plain's", "peak, GiB", "of plain's"])
    for name, example in report["examples"].items():
        title, what = GALLERY[name]
        plain = example["contenders"]["plain"]
        for contender, row in example["contenders"].items():
            first = f"[{title}](../../examples/{name}.py), {what}" if row is plain else ""
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


def devices(results: Path) -> Lines:
    """Tests and speeds beside bf16 of every GPU that gpu_check.py ran on."""
    reports = [results / "gpu-check.json", *sorted(results.glob("device-*.json"))]
    groups, recipes = ("Llama-3-8B", "ViT-B"), ("default", "fast")
    backwards = [f"backward, {group}, `{name}`" for group in groups for name in recipes]
    yield from header(["GPU", "tests: passed, failed", *backwards, "ViT-B's step, graphs"])
    step, plain = "default int8-forward reduce-overhead", "bf16 reduce-overhead"
    for path in reports:
        report = json.loads(path.read_text())
        ratios, counts = report["ratios"], f"{report['passed']}, {report['failed']}"
        sums = [ratios.get(f"{group}, sum, times faster than", {}) for group in groups]
        cells = [times(one.get(name, {}).get("torch bf16")) for one in sums for name in recipes]
        rows = ratios.get("vit_b, a step, of compiled bf16", {})
        both = [row["step"] for name in (plain, step) if isinstance(row := rows.get(name), dict)]
        last = times(both[0] / both[1] if len(both) == 2 else None)
        yield line([report["device"], counts, *cells, last])


def limits(report: Report, *archs: str) -> Lines:
    """Registers, stack and shared memory of every kernel by architecture, from compiled code."""
    rows = report["limits"]
    yield from header(["kernel", "threads", "shared memory, bytes",
                       *(f"{arch}: registers, stack, resident" for arch in archs)])  # fmt: skip
    for kernel in sorted(set().union(*(rows[arch] for arch in archs))):
        by_arch = [rows[arch].get(kernel) for arch in archs]
        some = next(row for row in by_arch if row)
        figures = [f"{r['registers']}, {r['stack']}, {r['resident']}" if r else "" for r in by_arch]
        yield line([f"`{kernel}`", str(some["threads"]), f"{some['shared']:,}", *figures])


def cases(report: Report) -> Lines:
    """Relative error of g_w by case and recipe, for tokens that differ in size."""
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
"""Figures of a test in the order of the table."""
FIGURE_WORDS = {
    **{"devices": "GPUs", "integers_compared": "integers", "results_compared": "floats"},
    **{"results_different": "floats different", "places": "places of a failure"},
    **{"growth_device": "bytes grown on the device", "growth_host": "bytes grown on the host"},
    "growth_reserved": "bytes grown in its allocator",
}
"""Words of the figures whose keys are unclear."""


def trust(report: Report) -> Lines:
    """Result of each part, and its tests with their figures."""
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
    """Tests by tool: clean, with errors, unfinished."""
    part = report["parts"].get("sanitizer")
    yield from header(["tool", "clean", "with errors", "not finished in time"])
    for tool, row in part["tools"].items() if part else ():
        lists = [", ".join(by_code(row[key])) for key in ("errors", "not finished")]
        yield line([tool, str(len(row["clean"])), *(names or "none" for names in lists)])
    if part is None:
        yield line(["not run", "", "", ""])


def config_fields(results: Path) -> Lines:
    """Fields of a configuration, from libhot's table."""
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
    **_of(None, about, cpu_layers, points, speeds.by_model, whole),
    **_of("", config_fields),
    "speeds": ("", speeds.table),
    **_of("", several_tables.several, several_tables.predicted, several_tables.several_losses),
    **_of("", several_tables.wire_losses, several_tables.ddp),
    **_of("gpu-check.json", layers, both, floor, small, targets, tests),
    **_of("cuda-steps.json", steps),
    **_of("cuda-models-table.json", model_table.gradients, losses_note),
    **_of("cuda-rule.json", rule),
    **_of("gpu-trust.json", trust, sanitizer),
    **_of("limits.json", limits),
    **_of("cpu-train.json", train),
    **_of("shared-gpu.json", shared),
    **_of("cuda-host.json", host),
    **_of("cuda-examples.json", gallery),
    **_of("recipe-cases.json", cases),
    "claims": ("", claims.table),
    **_of("gradients.json", TABLES.gradient_quality),
    **_of("", bases, adapters, base_errors),
    **_of("", switch, devices, TABLES.trainings, TABLES.rows, TABLES.scaling, TABLES.pooled),
    **_of("", TABLES.accuracies),
    **_of("", TABLES.pooled_words, TABLES.to_loss, TABLES.to_loss_words, TABLES.decided),
}
"""Kind -> its report and its function. None: the first argument names the report; "": several."""
DATED = ("gradient-quality", "host")
"""Kinds of one report with its date below the table, like the tables of several reports."""


def table(words: str, results: Path) -> str:
    """Lines of a table. Raises Unknown."""
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
    """Return a page with fresh tables. Raises Unknown, naming the block."""

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
