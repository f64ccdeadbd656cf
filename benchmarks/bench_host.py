"""Host time of a layer: how long Python, torch and hotcore take to queue a training step.

    python benchmarks/bench_host.py --device cuda     # ViT-L at 16 images, whose GPU waits
    python benchmarks/bench_host.py --quick           # a toy; on a CPU the products count too

Blocks are compiled one by one, without CUDA graphs; "eager" contenders are not compiled. Each step
begins on an idle device and ends when it is queued. The table gives microseconds a linear layer,
and how many of them a contender takes beyond bf16 in the same mode.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

import models
import timing
import torch
from steps import Session, Setting, described, many_recompilations, said, setting_of
from timing import Row
from torch import nn
from training import Contender, Left, by_name, cleaned

MODEL = "vit_l"
IMAGES = 16
KINDS = ("bf16", "default", "default int8-forward", "FP8 tensorwise")


def contenders() -> list[Contender]:
    """Every kind in both modes; FP8 only compiled, as torchao asks for."""
    names = [f"{kind} {way}" for way in ("compiled", "eager") for kind in KINDS]
    return [by_name(name, autocast=True) for name in names if name != "FP8 tensorwise eager"]


def few_images() -> None:
    """Make batches so small that a fast GPU waits for the host."""
    task = models.TASKS[MODEL]
    assert task.full is not None
    batch = models._images(IMAGES, 224, 1000)
    models.TASKS[MODEL] = dataclasses.replace(
        task, full=dataclasses.replace(task.full, batch=batch)
    )


def measured(contender: Contender, setting: Setting, rounds: int) -> Row:
    row: Row = {"how": described(contender)}
    session = Session(MODEL, contender, setting)
    try:
        with many_recompilations():
            row |= session.start()
            times = [time for _ in range(rounds) for time in session.host()]
        layers = sum(isinstance(m, nn.Linear) for m in session._trainer.model.modules())
        row["host"] = timing.spread(times)
        row["layers"] = layers
        row["us_per_layer"] = statistics.median(times) * 1e3 / layers
    except Left as left:
        row["left_out"] = str(left)
    except Exception as error:
        row["error"] = said(error)
    session.close()
    return row


def main(argv: Sequence[str] | None = None) -> None:
    parser = timing.arguments(__doc__, "host", "contenders", "quick", "backend")
    args = timing.begin(parser, argv)
    listed = contenders()
    names = timing.fitting(parser, [c.name for c in listed], args.contenders)
    few_images()
    setting, rows = setting_of(args), {}
    for contender in listed:
        name = contender.name
        if name not in names:
            continue
        with cleaned(args.device):
            torch._dynamo.reset()
            row = rows[name] = measured(contender, setting, args.rounds)
        base = rows.get(f"bf16 {'eager' if contender.compiled is None else 'compiled'}", {})
        if "us_per_layer" not in row:
            print(f"{name:32s} {row.get('left_out') or row.get('error')}", flush=True)
            continue
        words = f"{name:32s} {row['us_per_layer']:8.1f} us a layer"
        if "us_per_layer" in base and base is not row:
            row["us_beyond_bf16"] = row["us_per_layer"] - base["us_per_layer"]
            words += f"  {row['us_beyond_bf16']:+8.1f} beside bf16"
        print(words, flush=True)
    timing.write(args, "host", {"host": rows})


if __name__ == "__main__":
    main()
