"""Tables of measurements in the docs, made from the reports that hold them.

    python benchmarks/doc_tables.py            # rewrite what is out of date
    python benchmarks/doc_tables.py --check    # say what is, and fail

A page has the lines ``<!-- table: KIND ARGUMENT... -->`` and ``<!-- end -->``; what is between them
comes from here. Kinds:
  steps MODEL      every contender of a model (cuda-steps.json)
  summary          one line for each model: compiled bf16, and its rivals beside it (the same)
  variants MODEL   eager steps with compress_saved's settings (cuda-models-variants.json)
  eager FILE MODEL...  eager steps of some contenders (parts peak and time of FILE)
  gradients        cosine with fp32's gradient, by recipe (cuda-models-table.json)
  losses           the loss after some steps on one batch (the same)
A test keeps the pages as the reports are.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import kernel_classes
import model_table

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/results"
PAGES = (ROOT / "docs/torch.md",)
BLOCK = re.compile(r"^<!-- table: (?P<words>.+?) -->\n(?P<body>.*?)^<!-- end -->$", re.S | re.M)

Report = Mapping[str, Any]
RIVALS = (
    *("FP8 tensorwise compiled", "FP8 rowwise compiled", "default compiled", "fast compiled"),
    *("default reduce-overhead", "default compiled, saved 8/4"),
)
"""Of the summary, each as time and peak of compiled bf16's."""
EAGER = ("bf16", "default", "fast", "default + saved 8", "fast + saved 8")


class Unknown(Exception):
    """A block that nothing here makes, or whose report is not there."""


def steps(report: Report, model: str) -> Iterator[str]:
    """Every contender: step, host, peak, kernels by class."""
    rows = report["steps"][model]["rows"]
    head = ["", "step, ms", "of bf16's", "host, ms", "peak, GiB", "of bf16's", "kernels, ms"]
    head += kernel_classes.CLASSES
    yield line(head)
    yield "|---" * len(head) + "|"
    for name, row in rows.items():
        yield line([name, *cells(row)])


def cells(row: Report) -> list[str]:
    """Of one contender; why there are none where it has no figures."""
    if "step" not in row:
        why = "failed" if "error" in row else f"left out: {row['left_out']}"
        return [why] + [""] * (5 + len(kernel_classes.CLASSES))
    of, kernels = row.get("of reference", {}), row.get("kernels") or {"ms": {}}
    times = [kernels.get("all_ms"), *(kernels["ms"].get(name) for name in kernel_classes.CLASSES)]
    return [
        f"{row['step']['median_ms']:.1f}",
        number(of.get("step"), 2),
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
    yield line(head)
    yield "|---" * len(head) + "|"
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


def variants(report: Report, model: str) -> Iterator[str]:
    """Eager steps of HOT with compress_saved in several settings."""
    found = report["models"][model]["variants"]
    head = ["", "peak, GiB", "of bf16's", "of fp32's", "step, ms", "of bf16's", "cosine"]
    yield line(head)
    yield "|---" * len(head) + "|"
    for name, peak in found["peak"].items():
        time, cosine = found["time"].get(name, {}), found["gradient"].get(name)
        figures = [f"{peak['peak_gib']:.2f}", f"{peak['of bf16']:.3f}", f"{peak['of fp32']:.3f}"]
        figures += [number(time.get("median_ms"), 1), number(time.get("of bf16"), 3)]
        yield line([name, *figures, number(cosine, 4)])


def eager(report: Report, *models: str) -> Iterator[str]:
    """Eager steps of several models, some contenders."""
    head = ["", "contender", "peak, GiB", "of bf16's", "step, ms", "of bf16's"]
    yield line(head)
    yield "|---" * len(head) + "|"
    for model in models:
        found = report["models"][model]
        batch = " × ".join(map(str, next(iter(found["batch"].values()))))
        for name in EAGER:
            peak, time = found["peak"][name], found["time"][name]
            title = f"{found['title']}, {batch}" if name == EAGER[0] else ""
            figures = [f"{peak['peak_gib']:.2f}", f"{peak['of bf16']:.3f}"]
            figures += [f"{time['median_ms']:.1f}", f"{time['of bf16']:.2f}"]
            yield line([title, name, *figures])


def line(words: Sequence[str]) -> str:
    return f"| {' | '.join(words)} |"


def _of_models(report: Report, index: int) -> Iterator[str]:
    yield from model_table.markdown(report["models"]).strip().split("\n\n")[index].split("\n")


KINDS: dict[str, tuple[str | None, Callable[..., Iterator[str]]]] = {
    "variants": ("cuda-models-variants.json", variants),
    "eager": (None, eager),
    "steps": ("cuda-steps.json", steps),
    "summary": ("cuda-steps.json", summary),
    "gradients": ("cuda-models-table.json", lambda report: _of_models(report, 0)),
    "losses": ("cuda-models-table.json", lambda report: _of_models(report, 1)),
}


def table(words: str, results: Path) -> str:
    """What belongs between the two lines. Raises Unknown."""
    kind, *arguments = words.split()
    if kind not in KINDS:
        raise Unknown(f"{kind!r} is none of {', '.join(KINDS)}")
    file, make = KINDS[kind]
    if file is None:
        file = arguments.pop(0) if arguments else "a report's name"
    if not (results / file).is_file():
        raise Unknown(f"{results / file} is not there")
    report = json.loads((results / file).read_text())
    try:
        return "".join(f"{line}\n" for line in make(report, *arguments))
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
        sys.exit(f"stale: {', '.join(stale)}; run python benchmarks/doc_tables.py")


if __name__ == "__main__":
    main()
