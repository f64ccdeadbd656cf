"""Tables of trainings on several GPUs, and a model of the wire that predicts larger machines."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from evidence import evidence_tables, intervals
from evidence.evidence_tables import Lines, Report, dates_line, line, report_of, table_of

SPEEDS, DDP, LOSSES = "cuda-fsdp.json", "cuda-ddp.json", "cuda-several.json"
"""Reports of bench_fsdp.py, by plan, and of several.py."""
WIRE = {"10M, DDP": "cuda-wire-10M.json", "91M, FSDP2": "cuda-wire-91M.json"}
"""Reports of several.py about GPTs, by size and plan."""
SEEDS = 3
"""Pairs that :func:`wire_losses` needs for a verdict."""
NO_PEER = ", no peer access"
"""End of a setting."""
LAST = 20
"""Last losses of a run that are averaged."""
GPUS, GBITS = (8, 512), (25, 100, 400)
FORMS = (
    *("bf16", "default int8-forward", "default int8-forward, INT8 weights and gradients"),
    "FP8 tensorwise, gathered in FP8",
)
"""Contenders of :func:`predicted`."""


def settings_of(results: Path, report: str = SPEEDS) -> dict[str, dict[str, Report]]:
    """Rows of a report by setting and contender."""
    out: dict[str, dict[str, Report]] = {}
    for key, row in report_of(results, report)["rows"].items():
        setting, name = key.split("/", 1)
        out.setdefault(setting, {})[name] = row
    return out


def bytes_of(row: Report) -> float:
    """Bytes that a GPU sends in a step."""
    return float(sum(row["wire"].values()))


def predicted_ms(compute_ms: float, sent: float, gb_per_s: float, overlap: float) -> float:
    """Time of a step: the longer of arithmetic and wire, and what of the shorter is not hidden."""
    wire_ms = sent / gb_per_s / 1e6
    return max(compute_ms, wire_ms) + (1 - overlap) * min(compute_ms, wire_ms)


def compute_ms(row: Report) -> float:
    """Time of a step with peer access without the time in which only communication runs."""
    alone = row.get("kernels", {}).get("communication_ms", {}).get("alone", 0.0)
    return float(row["step"]["median_ms"] - alone)


def wire_of(peers: Mapping[str, Report], no_peers: Mapping[str, Report]) -> tuple[float, float]:
    """GB a second and overlap without peer access, from bf16's rows.

    A row without the profiler's time of communication counts the whole step as communication.
    """
    row, compute = no_peers["bf16"], compute_ms(peers["bf16"])
    step = row["step"]["median_ms"]
    wire = row.get("kernels", {}).get("communication_ms", {}).get("all", step)
    hidden = compute + wire - step
    return bytes_of(row) / wire / 1e6, max(0.0, min(1.0, hidden / min(compute, wire)))


def predictions(settings: Mapping[str, Mapping[str, Report]], setting: str) -> dict[str, float]:
    """Predicted milliseconds of the rows without peer access, except bf16's."""
    peers, no_peers = settings.get(setting.removesuffix(NO_PEER), {}), settings[setting]
    if not setting.endswith(NO_PEER) or any(
        "step" not in p.get("bf16", {}) for p in (peers, no_peers)
    ):
        return {}
    wire = wire_of(peers, no_peers)
    return {
        name: predicted_ms(arithmetic_ms(name, peers, no_peers), bytes_of(row), *wire)
        for name, row in no_peers.items()
        if name != "bf16" and "step" in row and ("kernels" in row or "step" in peers.get(name, {}))
    }


def arithmetic_ms(name: str, peers: Mapping[str, Report], no_peers: Mapping[str, Report]) -> float:
    """Time of a contender's arithmetic, by its row with peer access if there is one.

    Otherwise it is the time of the kernels that do not communicate.
    """
    if "step" in peers.get(name, {}):
        return compute_ms(peers[name])
    return float(no_peers[name]["kernels"]["busy_ms"])


def several(results: Path) -> Lines:
    """Speed, peak and bytes sent of every contender, by model and connection."""
    settings, cells = settings_of(results), []
    for setting, rows in settings.items():
        predicted, plain, title = predictions(settings, setting), rows.get("bf16", {}), setting
        for name, row in rows.items():
            if "step" not in row:
                cells.append([title, name, row.get("left_out", "failed"), *[""] * 6])
            else:
                speed, of = row["per_second_per_gpu"], plain.get("per_second_per_gpu")
                peak, of_peak = row.get("peak_gib"), plain.get("peak_gib")
                sent, ms = bytes_of(row) / 1e9, row["step"]["median_ms"]
                cells.append([
                    title, name, f"{speed:,.0f}", f"{speed / of:.2f}×" if of else "", f"{ms:.0f}",
                    f"{predicted[name]:.0f}" if name in predicted else "",
                    f"{peak:.1f}" if peak else "",
                    f"{peak / of_peak:.2f}" if peak and of_peak else "", f"{sent:.1f}",
                ])  # fmt: skip
            title = ""
    yield from table_of(
        ["", "", "a second, a GPU", "speed", "step, ms", "predicted, ms", "peak, GiB",
         "of bf16's peak", "GB sent a step"], cells,
    )  # fmt: skip
    yield from ("", dates_line(results, [SPEEDS]))


def ddp(results: Path) -> Lines:
    """Steps: milliseconds of bf16, the others' speed, the largest share of its peak."""
    models: dict[str, dict[str, dict[str, Report]]] = {}
    for setting, rows in settings_of(results, DDP).items():
        model, gpus, _, *peer = setting.split(", ")
        models.setdefault(model, {})[", ".join([gpus, *peer])] = rows
    places = sorted(
        {place for found in models.values() for place in found}, key=lambda p: (len(p), p)
    )
    cells = []
    for model, found in models.items():
        for name in dict.fromkeys(name for rows in found.values() for name in rows):
            words, peaks = [model if name == "bf16" else "", name], []
            for place in places:
                row, plain = (found.get(place, {}).get(one, {}) for one in (name, "bf16"))
                if "step" in row and "step" in plain:
                    ms = row["step"]["median_ms"]
                    of = row.get("bf16_ms", plain["step"]["median_ms"])  # in its turns
                    words.append(f"{ms:.0f} ms" if name == "bf16" else f"{of / ms:.2f}×")
                    peaks += [row["peak_gib"] / plain["peak_gib"]] if "peak_gib" in row else []
                else:
                    words.append(row.get("left_out", "failed") if row else "")
            cells.append([*words, f"{max(peaks):.2f}" if peaks else ""])
    yield from table_of(["", "", *places, "peak, of bf16's"], cells)
    yield from ("", dates_line(results, [DDP]))


def predicted(results: Path) -> Lines:
    """Predicted tokens a second of a GPU for larger machines, from the rows of one host.

    The model is the 8B. Bytes grow with (n - 1) / n, and the overlap is that without peer access.
    """
    settings = settings_of(results)
    setting = next(s for s in settings if s.startswith("llama_8b") and s + NO_PEER in settings)
    peers, no_peers = settings[setting], settings[setting + NO_PEER]
    here = int(setting.split(", ")[1].split()[0])
    rows = {**peers, **no_peers}
    rows = {name: rows[name] for name in FORMS if "step" in rows.get(name, {})}
    _, overlap = wire_of(peers, no_peers)
    cells = []
    for gpus in GPUS:
        for gbit in GBITS:
            words = [str(gpus), str(gbit)]
            for name, row in rows.items():
                sent = bytes_of(row) * (gpus - 1) / gpus * here / (here - 1)
                ms = predicted_ms(arithmetic_ms(name, peers, no_peers), sent, gbit / 8, overlap)
                tokens = row["per_second_per_gpu"] * row["step"]["median_ms"]
                words.append(f"{tokens / ms:,.0f}")
            cells.append(words)
    yield from table_of(["GPUs", "Gbit/s a GPU", *rows], cells)


def several_losses(results: Path) -> Lines:
    """Mean of the last losses less bf16's by seed, equal bits on resume, and gap to one process.

    The other parts stand beside the losses, with their GPUs if these are others.
    """
    heads = ["run", "seeds", "loss", "less bf16's [95 %] (pairs)", "resumed", "one process"]
    yield from table_of(heads, ())
    runs: dict[tuple[str, str, str], dict[str, dict[str, Report]]] = {}
    rows = {tuple(key.split("/")): row for key, row in report_of(results, LOSSES)["rows"].items()}
    places = {(model, name): gpus for model, gpus, part, name, _ in rows if part == "losses"}
    for (model, gpus, part, name, seed), row in rows.items():
        place = gpus if part == "losses" else places.get((model, name), gpus)
        of = runs.setdefault((model, place, name), {}).setdefault(part, {})
        of[seed] = row | {"place": "" if gpus == place else f" ({gpus} GPUs)"}
    last = {run: {seed: statistics.fmean(row["losses"][-LAST:])
                  for seed, row in parts.get("losses", {}).items() if "losses" in row}
            for run, parts in runs.items()}  # fmt: skip
    for run, parts in runs.items():
        model, gpus, name = run
        plain = {} if name == "bf16" else last.get((model, gpus, "bf16"), {})
        gaps = [loss - plain[seed] for seed, loss in last[run].items() if seed in plain]
        by_seed = ": " + ", ".join(f"{gap:+.4f}" for gap in gaps) if len(gaps) > 1 else ""
        loss = f"{statistics.mean(last[run].values()):.4f}" if last[run] else ""
        resumed = [{True: "to the bit", False: "other losses"}.get(row.get("equal"), "failed")
                   + row["place"] for row in parts.get("resume", {}).values()]  # fmt: skip
        gap = [(f"{row['largest_gap']:+.4f}" if "largest_gap" in row else "failed") + row["place"]
               for row in parts.get("one", {}).values()]  # fmt: skip
        yield line([
            f"{model}, {gpus} GPUs, {name}", ", ".join(parts.get("losses", {})), loss or "failed",
            evidence_tables.interval_words(gaps) + by_seed, ", ".join(resumed), ", ".join(gap),
        ])  # fmt: skip
    yield from ("", dates_line(results, [LOSSES]))


def wire_losses(results: Path) -> Lines:
    """Validation losses of GPTs less those of bf16 with a reduction in fp32, paired by seed.

    The last column is :func:`differs`, once all pairs are there.
    """
    yield from table_of(
        ["", "pairs", "loss less bf16's [95 %]", "by seed", "bf16's deviation", "beyond it"], ()
    )
    for title, name in WIRE.items():
        if not (results / name).exists():
            yield line([f"{title}: not run", *[""] * 5])
            continue
        rows = report_of(results, name)["rows"]
        runs = {"/".join(key.split("/")[3:]): row for key, row in rows.items()}
        report = {"runs": {k: row for k, row in runs.items() if "validation_loss" in row}}
        by_seed = evidence_tables.runs_by_seed(report)
        losses = [run["validation_loss"] for run in by_seed.get("bf16", {}).values()]
        spread = statistics.stdev(losses) if len(losses) > 1 else None
        words = [f"{loss:.4f}" for loss in losses]
        mean = f"{statistics.mean(losses):.4f}" if losses else "failed"
        yield line([f"{title}, bf16's loss", str(len(losses)), mean, ", ".join(words), "", ""])
        for contender in dict.fromkeys(key.rpartition("/")[0] for key in runs):
            if contender == "bf16":
                continue
            pairs = evidence_tables.pairs_of(report, contender)
            gaps = evidence_tables.gaps_of_pairs(pairs)
            gap = evidence_tables.interval_words(gaps).rpartition(" (")[0] or "failed"
            cells = [f"{title}, {contender}", str(len(gaps)), gap]
            cells += [", ".join(f"{value:+.4f}" for value in gaps)]
            if spread is not None and len(gaps) == len(losses) >= SEEDS:
                cells += [f"{spread:.4f}", "yes" if differs(gaps, spread) else "no"]
            yield line([*cells, "", ""][:6])
    if names := [name for name in WIRE.values() if (results / name).exists()]:
        yield from ("", dates_line(results, names))


def differs(gaps: Sequence[float], spread: float) -> bool:
    """Whether the mean gap exceeds ``spread``, or its 95 % interval leaves out zero."""
    ends = intervals.interval(gaps)
    return not abs(statistics.mean(gaps)) <= spread or (
        ends is not None and not ends.low <= 0 <= ends.high
    )
