"""Losses on several GPUs: bf16, FP8 and HOT; the same bits on resume; one process or several.

    python -m benchmarks.evidence.several --device cuda --gpus 4    # Llama-3-8B, FSDP2
    python -m benchmarks.evidence.several --device cuda --gpus 4 --model vit_l    # DDP
    python -m benchmarks.evidence.several --quick    # toy, two processes on the CPU

Parts: ``losses`` trains the whole model. ``resume`` cuts a run of ``SHORT`` steps at its half and
goes on in new processes by torch.distributed.checkpoint, with deterministic algorithms. ``one``
trains on all parts of a batch in one process, and on one part in each. FSDP2 shards fp32 weights
and AdamW's states, computes and reduces in bf16. DDP trains fp32 weights under bf16 autocast. Text
is bench_gpt.py's. A report continues; a row with an error is measured again.
"""

from __future__ import annotations

import functools
import itertools
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import bench_8b
import bench_fsdp
import bench_gpt
import timing
import torch
import torch.distributed as dist
import torch.nn.functional as F
from evidence import small_tasks
from models import Batch
from timing import Row
from torch import Tensor
from training import Contender

PARTS = ("losses", "resume", "one")
STEPS, SHORT = 300, 20
"""Steps of a whole run, and of ``resume`` and ``one``."""
MODELS = ("llama_8b", "vit_l")
WARM_UP, RATE, CLIP = 50, 1e-4, 1.0


def contenders(model: str) -> list[Contender]:
    """List bf16, FP8, HOT with an 8-bit forward, and bf16 with a byte on the wire."""
    byte = "bf16, INT8 weights and gradients"
    names = ("bf16", "FP8 tensorwise", "default int8-forward", byte)
    return [one for one in bench_fsdp.contenders(model) if one.name in names]


@dataclass(frozen=True)
class Run(bench_fsdp.Run):
    """Settings of a run, which all of its processes share."""

    steps: int = STEPS
    cache: Path = timing.TEXT
    images: str = "tiles"
    first: int = 0  # the step with which it begins, from the checkpoint
    checkpoint: Path | None = None
    deterministic: bool = False


# ---- a process of a run ----


class Several(bench_fsdp.Several):
    """Contender's model on the processes of a run."""

    def train(self, step: int, parts: Sequence[Batch]) -> Tensor:
        """Train a step on this process's parts of a batch. Returns the mean loss of all parts."""
        self.optimizer.zero_grad(set_to_none=True)
        losses = []
        for self._batch in parts:
            loss = self.loss()
            (loss / len(parts)).backward()
            losses.append(loss.detach().float())
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        for group in self.optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / WARM_UP)
        self.optimizer.step()
        mean = torch.stack(losses).mean() / dist.get_world_size()
        dist.all_reduce(mean)
        return mean


def data(run: Run, device: torch.device) -> Iterator[list[Batch]]:
    """Yield this process's parts of each step's batch, from ``run.first`` on."""
    world, rank = dist.get_world_size(), dist.get_rank()
    parts = range(rank * run.gpus // world, (rank + 1) * run.gpus // world)
    if run.model == "llama_8b":
        if rank:
            dist.barrier()  # process 0 makes the text
        shape = replace(run.shape, sequences=STEPS * run.gpus * run.each)
        text = bench_8b.sequences_of(shape, run.cache, str(device))
        if not rank:
            dist.barrier()
        rows = text.view(STEPS, run.gpus, run.each, -1).roll(run.seed, 0)
        for step in range(run.first, run.steps):
            yield [{"x": rows[step, part]} for part in parts]
        return
    pixels, classes = (32, 10) if run.quick else (224, 1000)
    for step in range(run.first, run.steps):
        batches = []
        for part in parts:
            draw = torch.Generator().manual_seed((run.seed * STEPS + step) * run.gpus + part)
            x, y = small_tasks.images_of(run.images).batch(run.each, draw)
            x = F.interpolate(x.to(device), (pixels, pixels), mode="bilinear")
            batches.append({"x": x, "y": y.to(device) % classes})
        yield batches


def trained(run: Run, device: torch.device) -> list[float]:
    """Train from ``run.first`` to ``run.steps``, in every process of the run. Returns losses."""
    contender = next(one for one in contenders(run.model) if one.name == run.contender)
    torch.use_deterministic_algorithms(run.deterministic)
    model, task = bench_fsdp.build(run, device)
    steps = data(run, device)
    parts = next(steps)
    backend = "aot_eager" if run.quick else "inductor"
    several = Several(contender, model, parts[0], task, in_place=True, backend=backend)
    torch.manual_seed(1000 * (run.seed + 1) + dist.get_rank())  # HOT's rounding
    if run.first:
        checkpointed(several, run)
    losses = []
    for step in range(run.first, run.steps):
        losses.append(several.train(step, parts))
        parts = next(steps, [])
    if run.checkpoint and not run.first:
        checkpointed(several, run)
    return [float(loss) for loss in losses]


def checkpointed(several: Several, run: Run) -> None:
    """Load weights, optimizer and random states for a run that goes on; save them for others."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    assert run.checkpoint is not None
    path = run.checkpoint / f"random{dist.get_rank()}.pt"
    model, optimizer = get_state_dict(several.model, several.optimizer)
    state = {"model_state_dict": model, "optim_state_dict": optimizer}
    if run.first:
        dcp.load(state, checkpoint_id=run.checkpoint)
        set_state_dict(several.model, several.optimizer, **state)
        bench_gpt.set_random_states(torch.load(path, weights_only=True))
    else:
        dcp.save(state, checkpoint_id=run.checkpoint)
        torch.save(bench_gpt.random_states(), path)


# ---- all runs ----


def launched(run: Run, world: int) -> list[float]:
    """Return the losses of a run in ``world`` new processes."""
    losses: list[float] = bench_fsdp.launched(trained, run, world)
    return losses


def row_of(part: str, run: Run) -> Row:
    """Return the row of a part."""
    if part == "losses":
        return {"losses": launched(run, run.gpus)}
    run = replace(run, steps=min(SHORT, run.steps), layers=run.layers or 2)
    if part == "one":
        several, one = launched(run, run.gpus), launched(run, 1)
        gap = max((a - b for a, b in zip(one, several, strict=True)), key=abs)
        return {"losses": {"several": several, "one": one}, "largest_gap": gap}
    run, half = replace(run, deterministic=True), run.steps // 2
    whole = launched(run, run.gpus)
    with tempfile.TemporaryDirectory(prefix="checkpoint-") as folder:
        run = replace(run, checkpoint=Path(folder))
        cut = launched(replace(run, steps=half), run.gpus)
        resumed = launched(replace(run, first=half), run.gpus)
    losses = {"whole": whole, "cut": cut, "resumed": resumed}
    return {"losses": losses, "equal": cut + resumed == whole}


def main(argv: Sequence[str] | None = None) -> None:
    parser = timing.arguments(__doc__, "several", "contenders", "quick", "budget", "cache")
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument(
        "--images", default="tiles", help="data of the ViT, as in bench_training.py"
    )
    parser.add_argument("--steps", type=int, help=f"of a whole run; default {STEPS}, quick 4")
    args = bench_fsdp.arguments(parser, argv, MODELS)
    names = timing.fitting(parser, [c.name for c in contenders(args.model)], args.contenders)
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # for deterministic products
    options = ("model", "gpus", "each", "cache", "device", "images", "quick", "layers")
    steps = args.steps or (4 if args.quick else STEPS)
    shared = {o: vars(args)[o] for o in options}
    jobs = {}
    for part, seed, name in itertools.product(args.part, args.seeds, names):
        run = Run(contender=name, steps=steps, seed=seed, **shared)
        key = f"{args.model}/{args.gpus}/{part}/{name}/{seed}"
        jobs[key] = functools.partial(row_of, part, run)
    bench_fsdp.measure_all(args, "several", jobs, {"steps": STEPS, "each": bench_fsdp.EACH})


if __name__ == "__main__":
    main()
