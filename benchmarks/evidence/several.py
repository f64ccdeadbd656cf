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

import datetime
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import bench_8b
import bench_gpt
import timing
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from evidence import small_tasks
from models import TASKS, Batch, Task
from steps import many_recompilations, said
from timing import Row
from torch import Tensor, nn
from training import Contender, Trainer, blocks_of

PARTS = ("losses", "resume", "one")
STEPS, SHORT = 300, 20
"""Steps of a whole run, and of ``resume`` and ``one``."""
EACH = {"llama_8b": 3, "vit_l": 64}
"""Sequences or images of a part of a batch."""
WARM_UP, RATE, CLIP = 50, 1e-4, 1.0
TIMEOUT = datetime.timedelta(seconds=300)


def contenders(model: str) -> list[Contender]:
    """List bf16, FP8 and HOT with an 8-bit forward, compiled block by block."""
    names = ("bf16", "FP8 tensorwise", "default int8-forward")
    plain = {} if model == "llama_8b" else {"head": "", "autocast": True}
    return [replace(one, **plain) for one in bench_8b.CONTENDERS if one.name in names]


@dataclass(frozen=True)
class Run:
    """Settings of a run, which all of its processes share."""

    model: str
    contender: str
    gpus: int
    steps: int
    cache: Path
    each: int
    device: str = "cpu"
    images: str = "tiles"
    seed: int = 0
    quick: bool = False
    layers: int = 0  # the model's blocks; 0: all
    first: int = 0  # the step with which it begins, from the checkpoint
    checkpoint: Path | None = None
    deterministic: bool = False

    @property
    def shape(self) -> bench_8b.Size:
        """Shape of the language model, with sequences for all steps."""
        shape = bench_8b.TOY if self.quick else bench_8b.FULL
        config = dict(shape.config)
        config["num_hidden_layers"] = self.layers or config["num_hidden_layers"]
        return replace(shape, config=config, sequences=STEPS * self.gpus * self.each)


# ---- a process of a run ----


class Several(Trainer):
    """Contender's model on the processes of a run."""

    def wrap(self, model: nn.Module) -> None:
        """Distribute the model, and make its optimizer."""
        if self._task.blocks == "model.layers":
            from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

            policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
            for block in (*blocks_of(model, self._task.blocks).values(), model):
                fully_shard(block, mp_policy=policy)
        elif dist.get_world_size() > 1:
            model = nn.parallel.DistributedDataParallel(model)
        super().wrap(model)

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


def build(run: Run, device: torch.device) -> tuple[nn.Module, Task]:
    """Build the model with fp32 weights, equal in every process, and its task."""
    torch.manual_seed(run.seed)
    if run.model == "llama_8b":
        model = bench_8b.build(run.shape, Contender("bf16"), str(device)).float()
        return model, replace(TASKS["llama"], blocks="model.layers")
    task = TASKS["vit_l"]
    vit: Any = (task.small if run.quick or task.full is None else task.full).build()
    vit.blocks = vit.blocks[: run.layers or None]
    return vit.to(device), task


def data(run: Run, device: torch.device) -> Iterator[list[Batch]]:
    """Yield this process's parts of each step's batch, from ``run.first`` on."""
    world, rank = dist.get_world_size(), dist.get_rank()
    parts = range(rank * run.gpus // world, (rank + 1) * run.gpus // world)
    if run.model == "llama_8b":
        if rank:
            dist.barrier()  # process 0 makes the text
        text = bench_8b.sequences_of(run.shape, run.cache, str(device))
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
    model, task = build(run, device)
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


def process(rank: int, world: int, run: Run, folder: Path) -> None:
    """Train as one of ``world`` processes; the first one writes the losses."""
    device = torch.device(run.device, rank if run.device == "cuda" else None)
    if run.device == "cuda":
        torch.cuda.set_device(device)
    torch.use_deterministic_algorithms(run.deterministic)
    store, backend = f"file://{folder}/store", "nccl" if run.device == "cuda" else "gloo"
    dist.init_process_group(backend, store, TIMEOUT, rank=rank, world_size=world)
    with many_recompilations():
        losses = trained(run, device)
    if rank == 0:
        (folder / "losses.json").write_text(json.dumps(losses))
    dist.destroy_process_group()
    os._exit(0)  # a gloo thread may outlive the interpreter, which would abort


# ---- all runs ----


def launched(run: Run, world: int) -> list[float]:
    """Return the losses of a run in ``world`` new processes. Raises what a process raises."""
    with tempfile.TemporaryDirectory(prefix="several-") as folder:
        mp.spawn(process, (world, run, Path(folder)), world)
        losses: list[float] = json.loads((Path(folder) / "losses.json").read_text())
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
    add, begun = parser.add_argument, time.perf_counter()
    add("--gpus", type=int, default=2, help="processes, and parts of a batch")
    add("--model", choices=tuple(EACH), default="llama_8b")
    add("--part", nargs="+", choices=PARTS, default=list(PARTS))
    add("--seeds", type=int, nargs="+", default=[0])
    add("--layers", type=int, default=0, help="blocks of the model; default: all, or 2")
    add("--images", default="tiles", help="data of the ViT, as in bench_training.py")
    args = timing.begin(parser, argv)
    if args.device == "cpu" and not args.quick:
        parser.error("--device cpu: whole models need GPUs; --quick trains toys on a CPU")
    if args.device == "cuda" and args.gpus > torch.cuda.device_count():
        parser.error(f"--gpus: {args.gpus} GPUs are not there")
    names = timing.fitting(parser, [c.name for c in contenders(args.model)], args.contenders)
    args.json = path = args.json or timing.RESULTS / f"{args.device}-several.json"
    rows: dict[str, Row] = json.loads(path.read_text())["rows"] if path.exists() else {}
    os.environ |= {"NCCL_NVLS_ENABLE": "0", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    options = ("model", "gpus", "cache", "device", "images", "quick", "layers")
    steps, each = (4, 2) if args.quick else (STEPS, EACH[args.model])
    run = Run(contender="", steps=steps, each=each, **{o: vars(args)[o] for o in options})
    longest = 0.0
    for part, seed, name in itertools.product(args.part, args.seeds, names):
        key, start = f"{args.model}/{args.gpus}/{part}/{name}/{seed}", time.perf_counter()
        if "losses" in rows.get(key, {}) or start - begun + longest > args.budget:
            continue
        try:
            rows[key] = row_of(part, replace(run, contender=name, seed=seed))
        except Exception as error:  # a row; the others go on
            rows[key] = {"error": said(error)}
        longest = max(longest, time.perf_counter() - start)
        rows[key] |= {"date": timing.today(), "seconds": time.perf_counter() - start}
        print(key, {k: v for k, v in rows[key].items() if k != "losses"}, flush=True)
        timing.write(args, "several", {"settings": {"steps": STEPS, "each": EACH}, "rows": rows})
    if failed := [key for key, row in rows.items() if "error" in row]:
        sys.exit(f"failed: {failed}")


if __name__ == "__main__":
    main()
