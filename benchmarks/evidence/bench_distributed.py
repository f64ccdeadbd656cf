"""DDP and FSDP2 of a ViT-S/16 on all GPUs of a machine, by NCCL: plain beside HOT.

    python -m benchmarks.evidence.bench_distributed --device cuda    # results/nccl.json
    python -m benchmarks.evidence.bench_distributed --quick          # small, gloo, two processes

Every process has a fixed batch of its own. For both ways to distribute, plain and with HOT, bf16
autocast on CUDA:

  gradients    of the first step beside the mean of what each process computes alone under its own
               seed (their cosine), and whether all processes hold the same bits
  loss         mean over the processes, first and after the steps; it has to fall as plain's does
  replicas     whether all processes hold the same parameters after the steps
  step         milliseconds, median

Exits non-zero if a gradient or replica is wrong, or if a loss does not fall as plain's.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import timing
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from models import TASKS
from torch import Tensor, nn
from training import Contender, Trainer, cosine

TASK = TASKS["vit_s"]
WAYS = ("DDP", "FSDP2")
STEPS = 30
MIN_COSINE = 0.9999  # sums have another order, attention's use atomics
FALL = 0.2  # share of plain's fall by which another may differ: tests/with_torch/test_models.py


def contenders(device: str) -> list[Contender]:
    recipes = {"plain": None, "default": "default", "fast": "fast"}
    return [Contender(name, of, autocast=device == "cuda") for name, of in recipes.items()]


def wrapped(model: Any, way: str, device: torch.device) -> nn.Module:
    """The converted model, distributed."""
    if way == "DDP":
        return nn.parallel.DistributedDataParallel(model)
    from torch.distributed.fsdp import fully_shard

    mesh = dist.device_mesh.init_device_mesh(device.type, (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def whole(tensor: Tensor) -> Tensor:
    """A sharded tensor's content; all processes have to call this together."""
    full = getattr(tensor, "full_tensor", None)
    return tensor if full is None else full()


def same_everywhere(tensors: Sequence[Tensor]) -> bool:
    """Whether all processes hold the same bits."""
    same = torch.ones((), device=tensors[0].device)
    for tensor in tensors:
        first = tensor.detach().clone()
        dist.broadcast(first, 0)
        same *= float(torch.equal(first, tensor))
    dist.all_reduce(same, dist.ReduceOp.MIN)
    return bool(same.item())


def mean(value: Tensor) -> Tensor:
    """Over the processes, added as DDP does."""
    total = value.detach() / dist.get_world_size()
    dist.all_reduce(total)
    return total


def run(contender: Contender, way: str, model: nn.Module, batch: Any, args: Any) -> dict[str, Any]:
    seed = args.seed + 1 + dist.get_rank()  # each process has its own rounding
    trainer = Trainer(contender, model, batch, TASK)
    torch.manual_seed(seed)
    expected = {name: mean(g) for name, g in trainer.gradients().items()}
    trainer.wrap(wrapped(trainer.model, way, trainer.device))
    torch.manual_seed(seed)
    got = {name.removeprefix("module."): whole(g) for name, g in trainer.gradients().items()}
    out: dict[str, Any] = {
        "cosine": cosine(got, expected),
        "same gradients": same_everywhere(list(got.values())),
    }
    losses: list[Tensor] = []
    times, watch = [], timing.synchronized_stopwatch(args.device)
    for _ in range(args.steps + 1):
        times.append(watch(lambda: losses.append(trainer.step())))
    values = mean(torch.stack(losses)).tolist()
    out["loss"] = [values[0], values[-1]]
    out["step_ms"] = timing.spread(times[len(times) // 2 :])["median_ms"]
    out["same parameters"] = same_everywhere([whole(p) for p in trainer.model.parameters()])
    return out


def faults(rows: dict[str, dict[str, Any]]) -> list[str]:
    """The defects of every contender of a way."""
    first, last = rows["plain"]["loss"]
    found = []
    for name, row in rows.items():
        if row["cosine"] < MIN_COSINE:
            found.append(f"{name}: gradients are not the mean: cosine {row['cosine']:.6f}")
        found += [
            f"{name}: {k} is False" for k in ("same gradients", "same parameters") if not row[k]
        ]
        fall = row["loss"][0] - row["loss"][1]
        if not abs(fall - (first - last)) <= FALL * (first - last):
            found.append(f"{name}: the loss falls by {fall:.4f}, plain by {first - last:.4f}")
    return found


def work(rank: int, world: int, store: str, args: argparse.Namespace) -> None:
    """One process."""
    cuda = args.device == "cuda"
    if cuda:
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(args.threads)
    backend = "nccl" if cuda else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world)
    try:
        content = measure(rank, args, torch.device(args.device, rank) if cuda else "cpu")
        if rank == 0:
            timing.write(args, "nccl", {"backend": backend, "processes": world, **content})
    finally:
        gc.collect()  # a sharded model keeps the group alive
        dist.destroy_process_group()


def measure(rank: int, args: argparse.Namespace, device: Any) -> dict[str, Any]:
    size = TASK.small if args.quick or TASK.table is None else TASK.table
    torch.manual_seed(args.seed)  # the same weights everywhere
    model = size.build()
    batch = size.batch(torch.Generator().manual_seed(args.seed + rank))
    batch = {name: value.to(device) for name, value in batch.items()}
    shapes = {k: list(v.shape) for k, v in batch.items()}
    out: dict[str, Any] = {"model": TASK.title, "batch": shapes, "faults": {}}
    for way in WAYS:
        out[way] = {}
        for contender in contenders(args.device):
            row = out[way][contender.name] = run(contender, way, model, batch, args)
            if rank == 0:
                print(f"{way:6s} {contender.name:8s}", timing.rounded(row), flush=True)
        out["faults"][way] = faults(out[way])
    return out


def main(argv: Sequence[str] | None = None) -> int:
    parser = timing.arguments(__doc__, "nccl", "quick")
    parser.set_defaults(json=timing.RESULTS / "nccl.json")
    parser.add_argument("--steps", type=int, default=STEPS)
    args = timing.begin(parser, argv)
    world = torch.cuda.device_count() if args.device == "cuda" else 2
    if world < 2:
        sys.exit("bench_distributed: needs two CUDA devices")
    if args.json.exists():
        args.json.unlink()  # an old report must not stand for an interrupted run
    with tempfile.TemporaryDirectory() as folder:
        # A failure in a process is raised here, with its traceback.
        mp.spawn(work, (world, os.path.join(folder, "store"), args), nprocs=world)
    found = json.loads(args.json.read_text())["faults"]
    for way, lines in found.items():
        for line in lines:
            print(f"FAULT {way}: {line}")
    return int(any(found.values()))


if __name__ == "__main__":
    sys.exit(main())
