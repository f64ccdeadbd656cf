"""Table of models: report, gradients by recipe, and the loss after some steps on one batch.

All rows except "bf16" compute in fp32, so that the difference to fp32 is HOT's alone.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import torch
from evidence.evidence_tables import Lines, Report, header, line
from training import RECIPES, Contender, Make, Trainer, cleaned, cosine

LOSS_STEPS = 30
EXACT = Contender("fp32")
RIVAL = Contender("bf16", autocast=True)
TRAINED = ("default", "fast", "paper")
"""Recipes whose loss is measured."""

Row = dict[str, Any]


def summary(trainer: Trainer) -> Row:
    """Count converted layers, and plain layers by reason."""
    report = trainer.report
    assert report is not None
    reasons = Counter(layer.reason for layer in report.skipped)
    return {"converted": len(report.converted), "plain": dict(reasons.most_common())}


def measure(make: Make, device: str) -> Row:
    """Make all measurements of one model."""
    out: Row = {"cosine": {}, "finite": {}}
    with cleaned(device):
        exact = make(EXACT).gradients()
        for contender in (RIVAL, *(Contender(recipe, recipe) for recipe in RECIPES)):
            trainer = make(contender)
            got = trainer.gradients()
            out["finite"][contender.name] = all(bool(g.isfinite().all()) for g in got.values())
            out["cosine"][contender.name] = cosine(got, exact)
            if trainer.report is not None:
                out |= summary(trainer)
            del trainer, got
        del exact
    out["loss"] = {}
    for contender in (EXACT, RIVAL, *(Contender(recipe, recipe) for recipe in TRAINED)):
        with cleaned(device):
            trainer = make(contender)
            steps = torch.stack([trainer.step() for _ in range(LOSS_STEPS)])
            losses = [*steps.tolist(), float(trainer.step())]
            out["finite"][contender.name] = all(map(math.isfinite, losses)) and (
                out["finite"].get(contender.name, True)
            )
            out["loss"][contender.name] = [losses[0], losses[-1]]
            del trainer
    return out


def gradients(report: Report, *models: str) -> Lines:
    """Yield the cosine with fp32's gradient by recipe, for all models or some."""
    rivals = (RIVAL.name, *RECIPES)
    yield from header(["cosine with fp32's gradient", "converted, plain", *rivals])
    for row in (report["models"][name] for name in models or report["models"]):
        counts = f"{row['converted']}, {sum(row['plain'].values())}"
        cells = (f"{row['cosine'][name]:.4f}" for name in rivals)
        yield line([f"{row['title']}, {shape(row)}", counts, *cells])


def losses(report: Report) -> Lines:
    """Yield the loss after some steps on one batch, then losses that are not finite."""
    models, names = report["models"], (EXACT.name, RIVAL.name, *TRAINED)
    yield from header(["loss on one batch", "first", *(f"{n}, {LOSS_STEPS} steps" for n in names)])
    for row in models.values():
        cells = (f"{row['loss'][name][-1]:.4g}" for name in names)
        yield line([row["title"], f"{row['loss'][EXACT.name][0]:.4g}", *cells])
    bad = [f"{row['title']}, {name}" for row in models.values()
           for name, finite in row["finite"].items() if not finite]  # fmt: skip
    if bad:
        yield from ("", f"*Not finite: {'; '.join(bad)}*")


def shape(row: Row) -> str:
    """Format the shape of the batch's first array, as in 32 × 3 × 224 × 224."""
    return " × ".join(map(str, next(iter(row["batch"].values()))))
