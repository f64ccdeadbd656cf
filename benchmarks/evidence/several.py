"""Losses on several GPUs: bf16, FP8 and HOT; the same bits on resume; one process or several.

    python -m benchmarks.evidence.several --device cuda --gpus 4    # Llama-3-8B, FSDP2
    python -m benchmarks.evidence.several --device cuda --gpus 4 --model vit_l    # DDP
    python -m benchmarks.evidence.several --quick    # toy, two processes on the CPU

Parts: ``losses`` trains the whole model. ``resume`` cuts a run of ``SHORT`` steps at its half and
goes on in new processes by torch.distributed.checkpoint, with deterministic algorithms. ``one``
trains with all parts of a batch in one process, and with one part in each. These two have
``--layers`` blocks of the model. A report continues; a row with an error is measured again.

FSDP2 shards fp32 weights and AdamW's states, computes in bf16 and reduces gradients in bf16. DDP
trains fp32 weights under bf16 autocast. A step's data depend on its number alone: text of
bench_gpt.py for the language model, ``--images`` at 224 x 224 pixels for the ViT.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import bench_8b
import timing
import torch
import torch.distributed as dist
import torch.nn.functional as F
from evidence import ROOT, small_tasks
from models import TASKS, Batch, Task, mend_torchvision
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
TIMEOUT_S = 900.0


def contenders(model: str) -> list[Contender]:
    """List the contenders; the first is the baseline."""
    sharded = model == "llama_8b"
    how: dict[str, Any] = {
        "compiled": "default", "slower": False, "autocast": not sharded,
        "head": "torch" if sharded else "",
    }  # fmt: skip
    return [
        Contender("bf16", **how),
        Contender("FP8 tensorwise", fp8="tensorwise", **how),
        Contender("default int8-forward", "default", forward="int8", **how),
    ]


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


def build(args: argparse.Namespace, device: torch.device) -> tuple[nn.Module, Task]:
    """Build the model with fp32 weights, equal in every process, and its task."""
    torch.manual_seed(args.seed)
    mend_torchvision()
    with torch.device(device):
        if args.model == "llama_8b":
            import transformers

            shape = bench_8b.TOY if args.quick else bench_8b.FULL
            more = {"num_hidden_layers": args.layers} if args.layers else {}
            config = transformers.LlamaConfig(**(shape.config | more), use_cache=False)
            task = dataclasses.replace(TASKS["llama"], blocks="model.layers")
            return transformers.LlamaForCausalLM(config), task
        import timm

        size = {"embed_dim": 64, "num_heads": 2, "depth": 2} if args.quick else {}
        size |= {"depth": args.layers} if args.layers else {}
        classes = small_tasks.images_of(args.images).classes
        name = "vit_large_patch16_224"
        return timm.create_model(name, num_classes=classes, **size), TASKS["vit_l"]


def data(args: argparse.Namespace, device: torch.device) -> Iterator[list[Batch]]:
    """Yield this process's parts of each step's batch, from ``args.first`` on."""
    each = 2 if args.quick else EACH[args.model]
    world, rank = dist.get_world_size(), dist.get_rank()
    mine = [rank * args.gpus // world + part for part in range(args.gpus // world)]
    steps = range(args.first, args.steps)
    if args.model == "llama_8b":
        shape = bench_8b.TOY if args.quick else bench_8b.FULL
        shape = dataclasses.replace(shape, sequences=STEPS * args.gpus * each)
        if rank:
            dist.barrier()  # process 0 makes the text
        text = bench_8b.sequences_of(shape, args.cache, str(device))
        if not rank:
            dist.barrier()
        rows = text.view(STEPS, args.gpus, each, -1).roll(args.seed, 0)
        for step in steps:
            yield [{"x": rows[step, part]} for part in mine]
        return
    images = small_tasks.images_of(args.images)
    for step in steps:
        parts = []
        for part in mine:
            draw = torch.Generator().manual_seed((args.seed * STEPS + step) * args.gpus + part)
            x, y = images.batch(each, draw)
            x = F.interpolate(x.to(device), (224, 224), mode="bilinear")
            parts.append({"x": x, "y": y.to(device)})
        yield parts


def worker(args: argparse.Namespace) -> None:
    """Train one run and write its row, by process 0."""
    rank = int(os.environ["LOCAL_RANK"])
    device = torch.device(args.device, rank if args.device == "cuda" else None)
    if args.device == "cuda":
        torch.cuda.set_device(device)
    torch.use_deterministic_algorithms(args.deterministic)
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    row: Row = {"date": timing.today()}
    try:
        with many_recompilations():
            row |= trained(args, device)
    except Exception as error:
        row["error"] = said(error)
    if dist.get_rank() == 0:
        timing.write_whole(args.json, json.dumps(row))
    if "error" in row:
        os._exit(1)  # the other processes wait inside of a collective
    dist.destroy_process_group()


def trained(args: argparse.Namespace, device: torch.device) -> Row:
    """Train from ``args.first`` to ``args.steps``; every process of the run calls this."""
    begun = time.perf_counter()
    (name,) = args.contenders
    contender = next(one for one in contenders(args.model) if one.name == name)
    model, task = build(args, device)
    steps = data(args, device)
    parts = next(steps)
    backend = "aot_eager" if args.quick else "inductor"
    run = Several(contender, model, parts[0], task, in_place=True, backend=backend)
    torch.manual_seed(1000 * (args.seed + 1) + dist.get_rank())  # HOT's rounding
    if args.first:
        checkpointed(run, args.checkpoint, load=True)
    losses = []
    for step in range(args.first, args.steps):
        losses.append(run.train(step, parts))
        parts = next(steps, [])
    if args.checkpoint and not args.first:
        checkpointed(run, args.checkpoint, load=False)
    return {"losses": torch.stack(losses).tolist(), "seconds": time.perf_counter() - begun}


def checkpointed(run: Several, folder: Path, load: bool) -> None:
    """Save or load weights, optimizer and random states by torch.distributed.checkpoint."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    device = next(run.model.parameters()).device
    on_device = torch.cuda if device.type == "cuda" else torch
    path = folder / f"random{dist.get_rank()}.pt"
    model, optimizer = get_state_dict(run.model, run.optimizer)
    state = {"model": model, "optimizer": optimizer}
    if not load:
        dcp.save(state, checkpoint_id=folder)
        torch.save([torch.get_rng_state(), on_device.get_rng_state()], path)
        return
    dcp.load(state, checkpoint_id=folder)
    parts = {"model_state_dict": model, "optim_state_dict": optimizer}
    set_state_dict(run.model, run.optimizer, **parts)
    cpu, other = torch.load(path, weights_only=True)
    torch.set_rng_state(cpu)
    on_device.set_rng_state(other)


# ---- all runs ----


def launched(
    args: argparse.Namespace, name: str, seed: int, folder: Path, *more: str, gpus: int = 0
) -> Row:
    """Return the row of a run in processes of its own."""
    path = folder / "row.json"
    path.unlink(missing_ok=True)
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
             str(gpus or args.gpus), "-m", "benchmarks.evidence.several", "--worker", "--json",
             str(path), "--contenders", name, "--seed", str(seed), *more]  # fmt: skip
    for option in ("device", "model", "gpus", "images", "cache"):
        words += [f"--{option}", str(getattr(args, option))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "NCCL_NVLS_ENABLE": "0",
                   "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # fmt: skip
    with open(folder / "log", "w") as log:
        try:
            subprocess.run(
                [*words, *(["--quick"] if args.quick else [])], cwd=ROOT, env=environment,
                stdout=log, stderr=log, timeout=TIMEOUT_S, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return {"error": f"no result within {TIMEOUT_S:.0f} s"}
    if path.exists():
        row: Row = json.loads(path.read_text())
        return row
    return {"error": (folder / "log").read_text()[-400:]}


def row_of(part: str, name: str, seed: int, args: argparse.Namespace, folder: Path) -> Row:
    """Return the row of a part; the first run with an error replaces it."""
    steps = 4 if args.quick else SHORT
    few = ("--layers", str(args.layers or 2), "--steps")
    if part == "losses":
        more = ("--layers", str(args.layers)) if args.layers else ()
        count = str(steps if args.quick else STEPS)
        return launched(args, name, seed, folder, *more, "--steps", count)
    if part == "one":
        run = (args, name, seed, folder, *few, str(steps))
        rows = {"several": launched(*run), "one": launched(*run, gpus=1)}
    else:
        half, saved = str(steps // 2), ("--checkpoint", str(folder / "state"))
        run = (args, name, seed, folder, "--deterministic", *few)
        rows = {
            "whole": launched(*run, str(steps)),
            "cut": launched(*run, half, *saved),
            "resumed": launched(*run, str(steps), *saved, "--first", half),
        }
    for row in rows.values():
        if "error" in row:
            return row
    out = {key: row["losses"] for key, row in rows.items()}
    if part == "resume":
        return {"losses": out, "equal": out["cut"] + out["resumed"] == out["whole"]}
    gaps = [alone - several for several, alone in zip(out["several"], out["one"], strict=True)]
    return {"losses": out, "largest_gap": max(gaps, key=abs)}


def parser_of() -> argparse.ArgumentParser:
    parser = timing.arguments(__doc__, "several", "contenders", "quick", "budget", "cache")
    add = parser.add_argument
    add("--gpus", type=int, default=2, help="processes, and parts of a batch")
    add("--model", choices=tuple(EACH), default="llama_8b")
    add("--part", nargs="+", choices=PARTS, default=list(PARTS))
    add("--seeds", type=int, nargs="+", default=[0], help="of the part losses")
    add("--layers", type=int, default=0, help="blocks of the model")
    add("--images", default="tiles", help="data of the ViT, as in bench_training.py")
    for name, kind in (("steps", int), ("first", int), ("checkpoint", Path)):
        add(f"--{name}", type=kind, default=None if kind is Path else 0, help=argparse.SUPPRESS)
    for name in ("worker", "deterministic"):
        add(f"--{name}", action="store_true", help=argparse.SUPPRESS)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of()
    if "--worker" in (sys.argv if argv is None else argv):
        return worker(parser.parse_args(argv))
    begun = time.perf_counter()
    args = timing.begin(parser, argv)
    if args.device == "cpu" and not args.quick:
        parser.error("--device cpu: whole models need GPUs; --quick trains toys on a CPU")
    names = timing.fitting(parser, [c.name for c in contenders(args.model)], args.contenders)
    args.json = args.json or timing.RESULTS / f"{args.device}-several.json"
    report = json.loads(args.json.read_text()) if args.json.exists() else {}
    rows: dict[str, Row] = report.get("rows", {})
    work = [
        (f"{args.model}/{args.gpus}/{part}/{name}/{seed}", part, name, seed)
        for part in args.part
        for seed in (args.seeds if part == "losses" else args.seeds[:1])
        for name in names
    ]
    longest = 0.0
    for key, part, name, seed in work:
        if "losses" in rows.get(key, {}):
            continue
        start = time.perf_counter()
        if start - begun + longest > args.budget:
            print(f"{key}: left out, no time left", flush=True)
            continue
        with tempfile.TemporaryDirectory(prefix="several-") as folder:
            rows[key] = row_of(part, name, seed, args, Path(folder))
        longest = max(longest, time.perf_counter() - start)
        shown = {k: v for k, v in rows[key].items() if k != "losses"}
        print(f"{key}: {shown}", flush=True)
        timing.write(args, "several", {"settings": {"steps": STEPS, "each": EACH}, "rows": rows})
    if errors := [key for key, *_ in work if "error" in rows.get(key, {})]:
        sys.exit(f"failed: {errors}")


if __name__ == "__main__":
    main()
