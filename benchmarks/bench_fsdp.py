"""Whole models on several GPUs of one host: speed, peak memory, kernels by class, losses.

    python benchmarks/bench_fsdp.py --device cuda --gpus 4                 # Llama-3-8B, FSDP2
    python benchmarks/bench_fsdp.py --device cuda --gpus 4 --no-peer       # NCCL_P2P_DISABLE=1
    python benchmarks/bench_fsdp.py --device cuda --gpus 4 --model vit_l   # DDP
    python benchmarks/bench_fsdp.py --quick                                # toy, two CPU processes

Every contender runs in processes of its own, started by torch.distributed.run. FSDP2 shards fp32
weights and AdamW's states, computes in bf16 and reduces gradients in bf16. DDP trains fp32 weights
under bf16 autocast. Blocks are compiled one by one; head and loss of the language model come in
chunks. Steps are queued one after the other, with one synchronisation per repeat. --no-peer makes
GPUs exchange data by way of the host, as consumer cards and many PCIe machines do.
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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import bench_8b
import kernel_classes
import timing
import torch
import torch.distributed as dist
from models import TASKS, Batch, Size, Task, mend_torchvision
from steps import GIB, described, many_recompilations, said
from timing import Row
from torch import Tensor, nn
from training import Contender, Left, Trainer, blocks_of

WARM_UP, REPEATS, STEPS = 4, 3, 4
BATCHES = 16
"""Batches that the steps take in turns."""
SEQUENCES = 3
"""Sequences a GPU of a step of the 8B."""
LAUNCH_TIMEOUT_S = 540.0


def contenders(model: str) -> list[Contender]:
    """Contenders by importance; the first is the baseline."""
    sharded = model == "llama_8b"

    def one(name: str, recipe: str | None = None, **options: Any) -> Contender:
        head = "torch" if sharded else ""
        more = {"compiled": "default", "slower": False, "autocast": not sharded, "head": head}
        return Contender(name, recipe, **(more | options))

    hot8: dict[str, Any] = {"recipe": "default", "forward": "int8"}
    listed = [
        one("bf16"),
        one("FP8 tensorwise", fp8="tensorwise"),
        one("default int8-forward", **hot8),
        one("fast int8-forward", "fast", forward="int8"),
        one("FP8 rowwise", fp8="rowwise"),
    ]
    if sharded:
        listed.insert(2, one("FP8 tensorwise, gathered in FP8", fp8="gathered"))
        listed.append(one("default int8-forward, 8-bit head", **hot8 | {"head": "accurate"}))
    return listed


# ---- a process of a contender ----


def task_of(model: str, quick: bool) -> tuple[Task, Size]:
    """The task, and how its model is built."""
    if model == "llama_8b":
        task = dataclasses.replace(TASKS["llama"], blocks="model.layers")
        return task, task.small
    task = TASKS[model]
    return task, task.small if quick or task.full is None else task.full


def build(model: str, size: Size, quick: bool, device: torch.device) -> nn.Module:
    """The model on ``device`` with fp32 weights, the same in every process."""
    torch.manual_seed(0)
    with torch.device(device):
        if model != "llama_8b":
            return size.build()
        mend_torchvision()
        import transformers

        shape = bench_8b.TOY if quick else bench_8b.FULL
        config = transformers.LlamaConfig(**shape.config, use_cache=False)
        return transformers.LlamaForCausalLM(config)


def batches_of(model: str, size: Size, quick: bool, rank: int) -> list[Batch]:
    """Batches of this process."""
    draw = torch.Generator().manual_seed(1 + rank)
    if model != "llama_8b":
        return [size.batch(draw) for _ in range(2 if quick else BATCHES)]
    shape = bench_8b.TOY if quick else bench_8b.FULL
    sequences = (BATCHES, SEQUENCES, shape.length)
    # Frequent and rare tokens, so that the loss can fall.
    tokens = torch.rand(sequences, generator=draw).pow(6) * shape.config["vocab_size"]
    return [{"x": x} for x in tokens.long()]


class Several(Trainer):
    """A contender's model on several devices."""

    def __init__(self, contender: Contender, model: nn.Module, task: Task, batches: list[Batch],
                 sharded: bool, backend: str) -> None:  # fmt: skip
        """Convert, compile and distribute ``model``."""
        self._sharded, self._batches, self._taken = sharded, batches, 0
        super().__init__(contender, model, batches[0], task, in_place=True, backend=backend)

    def wrap(self, model: nn.Module) -> None:
        """Distribute the model, and make its optimizer."""
        if self._sharded:
            from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

            policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
            for block in (*blocks_of(model, self._task.blocks).values(), model):
                fully_shard(block, mp_policy=policy)
        elif dist.get_world_size() > 1:
            model = nn.parallel.DistributedDataParallel(model)
        super().wrap(model)

    def step(self) -> Tensor:
        self._batch = self._batches[self._taken % len(self._batches)]
        self._taken += 1
        loss = super().step()
        if self.contender.fp8 == "gathered":
            from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

            precompute_float8_dynamic_scale_for_fsdp(self.model)
        return loss


def mean_loss(loss: Tensor) -> float:
    total = loss.detach().float().clone()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def measured(contender: Contender, options: Any) -> Row:
    """The row of a contender; every process of it calls this."""
    quick, model, begun = options.quick, options.model, time.perf_counter()
    rank = int(os.environ["LOCAL_RANK"])
    device = torch.device(options.device, rank if options.device == "cuda" else None)
    task, size = task_of(model, quick)
    batches = [
        {name: value.to(device) for name, value in batch.items()}
        for batch in batches_of(model, size, quick, dist.get_rank())
    ]
    plain = build(model, size, quick, device)
    backend = "aot_eager" if quick else "inductor"
    run = Several(contender, plain, task, batches, model == "llama_8b", backend)
    del plain
    losses = [mean_loss(run.step())]
    for _ in range(1 if quick else WARM_UP - 1):
        run.step()
    timing.synchronize(options.device)
    row: Row = {"started_s": time.perf_counter() - begun}
    if options.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    steps, times = 1 if quick else STEPS, []
    for _ in range(REPEATS):
        dist.barrier()
        timing.synchronize(options.device)
        start = time.perf_counter()
        for _ in range(steps):
            loss = run.step()
        timing.synchronize(options.device)
        times.append((time.perf_counter() - start) * 1e3 / steps)
        losses.append(mean_loss(loss))
    count = batches[0]["x"].numel() if batches[0]["x"].dim() == 2 else len(batches[0]["x"])
    row["step"] = timing.spread(times)
    row["per_second_per_gpu"] = count / row["step"]["median_ms"] * 1e3
    row["losses"] = losses
    if run.report is not None:
        row["converted"] = len(run.report.converted)
    if options.device == "cuda":
        row["peak_gib"] = torch.cuda.max_memory_allocated() / GIB
        row["kernels"] = kernel_classes.beside_communication(
            kernel_classes.profiled_events(run.step, 2), 2
        )
    return row


def worker(options: Any) -> None:
    """Measure one contender and write its row, by rank 0."""
    name = options.contenders[0]
    contender = next(c for c in contenders(options.model) if c.name == name)
    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    row: Row = {"how": described(contender)}
    try:
        with many_recompilations():
            row |= measured(contender, options)
    except Left as left:
        row["left_out"] = str(left)
    except Exception as error:
        row["error"] = said(error)
    if dist.get_rank() == 0:
        timing.write_json(options.json, row)
    if "error" in row:
        os._exit(1)  # the other processes wait inside of a collective
    dist.destroy_process_group()


# ---- all contenders ----


def launched(name: str, args: argparse.Namespace, folder: Path) -> Row:
    """The row of a contender, measured by processes of its own."""
    path = folder / "row.json"
    path.unlink(missing_ok=True)
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
             str(args.gpus), __file__, "--device", args.device, "--model", args.model,
             "--contenders", name, "--json", str(path), "--worker"]  # fmt: skip
    environment = {**os.environ, "NCCL_NVLS_ENABLE": "0", "OMP_NUM_THREADS": "1"}
    if args.no_peer:
        environment["NCCL_P2P_DISABLE"] = "1"
    with open(folder / "log", "w") as log:
        try:
            subprocess.run(
                [*words, *(["--quick"] if args.quick else [])],
                env=environment, stdout=log, stderr=log, timeout=LAUNCH_TIMEOUT_S, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return {"error": f"no result within {LAUNCH_TIMEOUT_S:.0f} s"}
    if path.exists():
        row: Row = json.loads(path.read_text())
        return row
    return {"error": " / ".join((folder / "log").read_text().strip().split("\n")[-5:])[-400:]}


def summary(name: str, row: Row, baseline: Row | None) -> str:
    if "step" not in row:
        return f"{name:34s} {row.get('left_out') or row.get('error')}"
    text = f"{name:34s} {row['per_second_per_gpu']:9,.0f} a second a GPU"
    if baseline is not None and "step" in baseline:
        text += f"  {row['per_second_per_gpu'] / baseline['per_second_per_gpu']:.3f} of bf16's"
    if "peak_gib" in row:
        text += f"  peak {row['peak_gib']:.2f} GiB"
    return f"{text}  loss {row['losses'][0]:.3f} to {row['losses'][-1]:.3f}"


def main(argv: Sequence[str] | None = None) -> None:
    parser = timing.arguments(__doc__, "fsdp", "contenders", "quick")
    parser.add_argument("--gpus", type=int, default=2, help="processes")
    parser.add_argument("--model", choices=("llama_8b", "vit_l", "bert_large"), default="llama_8b")
    parser.add_argument("--no-peer", action="store_true", help="NCCL_P2P_DISABLE=1")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    if "--worker" in (sys.argv if argv is None else argv):
        return worker(parser.parse_args(argv))
    args = timing.begin(parser, argv)
    if args.device == "cpu" and not args.quick:
        parser.error("--device cpu: whole models need GPUs; --quick trains toys on a CPU")
    names = timing.fitting(parser, [c.name for c in contenders(args.model)], args.contenders)
    setting = f"{args.model}, {args.gpus} GPUs" + (", no peer access" if args.no_peer else "")
    path = args.json or timing.RESULTS / f"{args.device}-fsdp.json"
    report = json.loads(path.read_text()) if path.exists() else {}
    rows = report.get("settings", {}).get(setting, {})
    print(f"\n{setting}:")
    with tempfile.TemporaryDirectory(prefix="fsdp-") as folder:
        for name in names:
            rows[name] = launched(name, args, Path(folder))
            print(f"  {summary(name, rows[name], rows.get('bf16'))}", flush=True)
            timing.write(args, "fsdp", {"settings": report.get("settings", {}) | {setting: rows}})
    errors = [name for name in names if "error" in rows[name]]
    if errors:
        sys.exit(f"failed: {errors}")


if __name__ == "__main__":
    main()
