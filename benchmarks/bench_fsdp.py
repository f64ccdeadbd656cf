"""Whole models on several GPUs of one host: speed, peak memory, kernels by class, losses.

    python benchmarks/bench_fsdp.py --device cuda --gpus 4                 # Llama-3-8B, FSDP2
    python benchmarks/bench_fsdp.py --device cuda --gpus 4 --no-peer       # NCCL_P2P_DISABLE=1
    python benchmarks/bench_fsdp.py --device cuda --gpus 4 --model vit_l   # DDP
    python benchmarks/bench_fsdp.py --quick                                # toy, two CPU processes

FSDP2 shards fp32 weights and AdamW's states, computes in bf16 and reduces gradients in bf16. DDP
trains fp32 weights under bf16 autocast, with the settings of ``DDP``, and torch.compile does not
split blocks at its buckets. "INT8 gradients" is hot.int8_gradients. Blocks are compiled one by one;
head and loss of the language model come in chunks. Steps are queued one after the other, with one
synchronisation per repeat. DDP's contenders live in the same processes, and their repeats take
turns, bf16's among them: hosts vary more than contenders. FSDP2's run one after the other.
--no-peer makes GPUs exchange data by way of the host, as consumer cards and many PCIe machines do.
A report continues: rows that it has are not measured again, except for errors.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bench_8b
import hotcore.torch as hot
import kernel_classes
import timing
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from models import TASKS, Batch, Task
from steps import Said, described, many_recompilations, said
from timing import GIB, Row
from torch import Tensor, nn
from training import Contender, Left, Trainer, blocks_of, by_name

WARM_UP, REPEATS = 4, 5
STEPS = {"llama_8b": 4, "vit_l": 12, "bert_large": 12}
"""Steps of a repeat."""
BATCHES = 16
"""Batches that the steps take in turns."""
EACH = {"llama_8b": 3, "vit_l": 64, "bert_large": 32}
"""Sequences or images of a GPU's step."""
INT8_WEIGHTS, INT8_GRADIENTS = ("int8 weights", "int8 both"), ("int8", "int8 both")
"""Contenders' ``wire`` with weights, and with gradients, in a byte."""
HOOKS = ("bf16_compress_hook", "PowerSGD")
"""Hooks of torch, which need NCCL."""
DDP: dict[str, Any] = {"bucket_cap_mb": 100, "gradient_as_bucket_view": True}
"""Settings of DDP, for every contender."""
TIMEOUT_S = 540.0
RANK = 4
"""Rank of PowerSGD."""


def contenders(model: str) -> list[Contender]:
    """Contenders by importance; the first is the baseline."""
    sharded = model == "llama_8b"
    hot8, gathered = "default int8-forward", "FP8 tensorwise, gathered in FP8"
    names = ["bf16", hot8, f"{hot8}, INT8 gradients"]
    if sharded:
        names += [f"{name}, INT8 weights and gradients" for name in (hot8, "bf16")]
        names += [f"{hot8}, INT8 weights", gathered, f"{gathered}, INT8 gradients"]
    else:
        names += [f"bf16, {wire}" for wire in ("INT8 gradients", *HOOKS)]
        names += [f"{hot8}, {hook}" for hook in HOOKS]
    names += ["FP8 tensorwise", "fast int8-forward", "FP8 rowwise"]
    if sharded:
        names += [f"{hot8}, 8-bit head"]
    else:
        names += [f"{name} reduce-overhead" for name in ("bf16", hot8, "FP8 tensorwise")]
    base: dict[str, Any] = {"compiled": "default", "slower": False, "autocast": not sharded}
    return [by_name(name, **base, head="torch" if sharded else "") for name in names]


def named(model: str, name: str) -> Contender:
    """The contender of that name."""
    return next(one for one in contenders(model) if one.name == name)


@dataclass(frozen=True)
class Run:
    """Settings that all processes of a training share."""

    model: str
    contender: str
    gpus: int
    each: int
    device: str = "cpu"
    seed: int = 0
    quick: bool = False
    layers: int = 0  # the model's blocks; 0: all
    beside: tuple[str, ...] = ()  # contenders that take turns with it

    @property
    def shape(self) -> bench_8b.Size:
        """Shape of the language model."""
        shape = bench_8b.TOY if self.quick else bench_8b.FULL
        count = self.layers or shape.config["num_hidden_layers"]
        return dataclasses.replace(shape, config=shape.config | {"num_hidden_layers": count})


# ---- a process ----


def build(run: Run, device: torch.device) -> tuple[nn.Module, Task]:
    """Build the model with fp32 weights, equal in every process, and its task."""
    torch.manual_seed(run.seed)
    if run.model == "llama_8b":
        plain = Contender("bf16")
        model, _ = bench_8b.build(run.shape, plain, str(device), torch.float32)
        return model, dataclasses.replace(TASKS["llama"], blocks="model.layers")
    task = TASKS[run.model]
    with torch.device(device):
        model = (task.small if run.quick or task.full is None else task.full).build()
    blocks: Any = next(m for name, m in model.named_modules() if name.endswith(task.blocks))
    del blocks[run.layers or len(blocks) :]
    return model, task


class Several(Trainer):
    """A contender's model on several devices."""

    reduced = torch.bfloat16
    """Type in which FSDP2 reduces gradients."""

    @property
    def sharded(self) -> bool:
        """Whether FSDP2 shards the model, and casts it; DDP's models run under autocast."""
        return not self.contender.autocast

    def wrap(self, model: nn.Module) -> None:
        """Distribute the model, and make its optimizer."""
        hook = self.contender.wire
        torchs = hook in ("bf16", "powersgd")
        if torchs and self.device.type == "cpu":
            raise Left(f"{hook}: torch's hook needs NCCL")
        if self.sharded:
            from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

            policy = MixedPrecisionPolicy(torch.bfloat16, self.reduced)
            for block in (*blocks_of(model, self._task.blocks).values(), model):
                fully_shard(block, mp_policy=policy)
        elif dist.get_world_size() > 1:
            torch._dynamo.config.optimize_ddp = False  # blocks are compiled one by one
            model = nn.parallel.DistributedDataParallel(model, **DDP)
        if hook in INT8_WEIGHTS:
            print(hot.int8_weights(model))
        if hook in INT8_GRADIENTS:
            print(hot.int8_gradients(model))
        if torchs:
            from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

            if hook == "powersgd":  # two steps without, which are not timed
                state = powerSGD_hook.PowerSGDState(None, RANK, start_powerSGD_iter=2)
                model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
            else:
                model.register_comm_hook(None, default_hooks.bf16_compress_hook)
        super().wrap(model)

    def next_step(self, batch: Batch) -> Tensor:
        """Train a step on ``batch``."""
        self._batch = batch
        loss = super().step()
        if self.contender.fp8 == "gathered":
            from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

            precompute_float8_dynamic_scale_for_fsdp(self.model)
        return loss


def bytes_of(run: Several) -> dict[str, float]:
    """Bytes that a GPU sends in a step: weights that are gathered, gradients that are reduced."""
    world, hook = dist.get_world_size(), run.contender.wire
    sent = (world - 1) / world
    values = sum(p.numel() for p in run.model.parameters())
    if not run.sharded:
        each = {"": 4.0, "bf16": 2.0, "int8": 1.0625}.get(hook)
        reduced = each and values * each
        if reduced is None:  # PowerSGD: two factors of each matrix
            flat = (p.flatten(1) if p.dim() > 1 else p for p in run.model.parameters())
            reduced = sum(4 * (RANK * sum(p.shape) if p.dim() > 1 else p.numel()) for p in flat)
        return {"gathered": 0.0, "reduced": 2 * sent * reduced}
    blocks = [*blocks_of(run.model, run._task.blocks).values()]
    twice = sum(p.numel() for block in blocks for p in block.parameters())
    linear = [m for block in blocks for m in block.modules() if isinstance(m, nn.Linear)]
    fewer = sum(m.weight.numel() for m in linear) if run.contender.fp8 == "gathered" else 0
    each = 1.0625 if hook in INT8_WEIGHTS else 2.0
    gathered = each * (values + twice) - 2 * fewer  # the root's once, the blocks' twice
    return {
        "gathered": sent * gathered,
        "reduced": sent * values * (1.0625 if hook in INT8_GRADIENTS else 2.0),
    }


def batches_of(run: Run, task: Task, device: torch.device) -> list[Batch]:
    """Batches of this process."""
    draw = torch.Generator().manual_seed(1 + dist.get_rank())
    if run.model != "llama_8b":
        size = task.small if run.quick or task.full is None else task.full
        batches = [size.batch(draw) for _ in range(2 if run.quick else BATCHES)]
        return [{name: value.to(device) for name, value in batch.items()} for batch in batches]
    sequences = (BATCHES, run.each, run.shape.length)
    # Frequent and rare tokens, so that the loss can fall.
    tokens = torch.rand(sequences, generator=draw).pow(6) * run.shape.config["vocab_size"]
    return [{"x": x} for x in tokens.long().to(device)]


class Timed:
    """A contender that was built and has warmed up. Every process of a run makes one.

    Raises Left.
    """

    def __init__(self, run: Run, name: str, device: torch.device) -> None:
        contender = named(run.model, name)
        self._run, self._taken, self._times = run, 0, list[float]()
        self._row: Row = {"how": described(contender)}
        cuda, begun = run.device == "cuda", time.perf_counter()
        held = torch.cuda.memory_allocated() if cuda else 0  # by contenders before
        plain, task = build(run, device)
        self._batches = batches_of(run, task, device)
        backend = "aot_eager" if run.quick else "inductor"
        self._trainer = Several(
            contender, plain, self._batches[0], task, in_place=True, backend=backend
        )
        del plain
        self._losses = [self._mean(self.step())]
        for _ in range(1 if run.quick else WARM_UP - 1):
            self.step()
        timing.synchronize(run.device)
        self._row["started_s"] = time.perf_counter() - begun
        if cuda and contender.compiled == "default":  # a CUDA graph's memory is not counted
            torch.cuda.reset_peak_memory_stats()
            self.step()
            self._row["peak_gib"] = (torch.cuda.max_memory_allocated() - held) / GIB

    def step(self) -> Tensor:
        """Train a step on the next batch."""
        self._taken += 1
        return self._trainer.next_step(self._batches[self._taken % len(self._batches)])

    def _mean(self, loss: Tensor) -> float:
        total = loss.float().clone()
        dist.all_reduce(total)
        return float(total) / dist.get_world_size()

    def repeat(self) -> None:
        """Time some steps."""
        steps = 1 if self._run.quick else STEPS[self._run.model]
        dist.barrier()
        timing.synchronize(self._run.device)
        start = time.perf_counter()
        for _ in range(steps):
            loss = self.step()
        timing.synchronize(self._run.device)
        self._times.append((time.perf_counter() - start) * 1e3 / steps)
        self._losses.append(self._mean(loss))

    def finished(self) -> Row:
        """The row, with kernels."""
        x, row, report = self._batches[0]["x"], self._row, self._trainer.report
        row["step"] = timing.spread(self._times)
        count = x.numel() if x.dim() == 2 else len(x)
        row["per_second_per_gpu"] = count / row["step"]["median_ms"] * 1e3
        row |= {"losses": self._losses, "wire": bytes_of(self._trainer)}
        row |= {} if report is None else {"converted": len(report.converted)}
        if self._run.device == "cuda":
            events = kernel_classes.profiled_events(self.step, 2)
            row["kernels"] = kernel_classes.beside_communication(events, 2)
        return row


def measured(run: Run, device: torch.device) -> dict[str, Row]:
    """Rows of the run's contenders, whose repeats take turns; every process calls this."""
    timed, rows = dict[str, Timed](), dict[str, Row]()
    for name in (run.contender, *run.beside):
        try:
            timed[name] = Timed(run, name, device)
        except Left as left:
            rows[name] = {"how": described(named(run.model, name)), "left_out": str(left)}
    for _ in range(REPEATS):
        for contender in timed.values():
            contender.repeat()
    finished = {name: contender.finished() for name, contender in timed.items()}
    if run.beside and "bf16" in finished:
        plain_ms = finished["bf16"]["step"]["median_ms"]
        finished = {name: row | {"bf16_ms": plain_ms} for name, row in finished.items()}
    return rows | finished


def process(rank: int, world: int, work: Any, run: Run, folder: Path) -> None:
    """Work as one of ``world`` processes; the first one writes the result."""
    device = torch.device(run.device, rank if run.device == "cuda" else None)
    if run.device == "cuda":
        torch.cuda.set_device(device)
    backend, timeout = "nccl" if run.device == "cuda" else "gloo", datetime.timedelta(seconds=300)
    store = f"file://{folder}/store"
    dist.init_process_group(backend, store, timeout, rank=rank, world_size=world)
    with many_recompilations():
        result = work(run, device)
    if rank == 0:
        (folder / "result.json").write_text(json.dumps(result))
    dist.destroy_process_group()
    os._exit(0)  # a gloo thread may outlive the interpreter, which would abort


# ---- all runs ----


def launched(work: Callable[[Any, torch.device], Any], run: Run, world: int) -> Any:
    """Return what ``work`` returns in the first of ``world`` new processes. Raises Said."""
    with tempfile.TemporaryDirectory(prefix="several-") as folder:
        words, method = (world, work, run, Path(folder)), timing.start_method(run.device)
        context = mp.start_processes(process, words, world, join=False, start_method=method)
        end = time.monotonic() + TIMEOUT_S
        try:
            while not context.join(max(0.0, end - time.monotonic())):
                if time.monotonic() > end:
                    raise Said(f"no result within {TIMEOUT_S:.0f} s")
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
            raise Said(str(error).strip().split("\n")[-1][:400]) from error
        finally:
            for one in context.processes:
                one.kill()
        return json.loads((Path(folder) / "result.json").read_text())


def arguments(parser: Any, argv: Sequence[str] | None, models: Mapping[str, int]) -> Any:
    """Parse the options that runs on several GPUs share, and check them.

    ``models``: sequences or images of a GPU's step, by model.
    """
    parser.add_argument("--gpus", type=int, default=2, help="processes, and parts of a batch")
    parser.add_argument("--model", choices=models, default=next(iter(models)))
    parser.add_argument("--layers", type=int, default=0, help="blocks of the model; 0: all")
    parser.add_argument("--each", type=int, help="sequences of a GPU's step; default: the model's")
    args = timing.begin(parser, argv)
    if args.device == "cpu" and not args.quick:
        parser.error("--device cpu: whole models need GPUs; --quick trains toys on a CPU")
    if args.device == "cuda" and args.gpus > torch.cuda.device_count():
        parser.error(f"--gpus: {args.gpus} GPUs are not there")
    args.each = args.each or (2 if args.quick else models[args.model])
    os.environ |= {"NCCL_NVLS_ENABLE": "0", "OMP_NUM_THREADS": "1"}
    return args


def measure_all(
    args: Any,
    benchmark: str,
    jobs: Mapping[str, Callable[[], Row]],
    settings: Row,
    before: Row | None = None,
) -> None:
    """Measure the jobs whose rows the report lacks, until ``--budget`` would be exceeded.

    Ends the script if the report has other settings than ``before``, by default ``settings``.
    """
    earlier = timing.resumed(timing.path_of(args, benchmark), before or settings)
    rows: dict[str, Row] = earlier["rows"] if earlier else {}
    begun, longest = time.perf_counter(), 0.0
    for key, job in jobs.items():
        start = time.perf_counter()
        if ("error" not in rows.get(key, {"error": ""})) or start - begun + longest > args.budget:
            continue
        try:
            rows[key] = job()
        except Exception as error:  # a row; the others go on
            rows[key] = {"error": said(error)}
        longest = max(longest, time.perf_counter() - start)
        rows[key] |= {"date": timing.today(), "seconds": time.perf_counter() - start}
        shown = {k: v for k, v in rows[key].items() if k not in ("kernels", "how", "losses")}
        print(key, timing.rounded(shown, 4), flush=True)
        timing.write(args, benchmark, {"settings": settings, "rows": rows})
    if failed := [key for key in jobs if "error" in rows.get(key, {})]:
        sys.exit(f"failed: {failed}")


def report_of(model: str, quick: bool) -> tuple[str, Row]:
    """Name of a model's report, and its settings."""
    toys: Row = {"quick": True} if quick else {}
    if model == "llama_8b":
        return "fsdp", {"steps": STEPS[model], "rank": RANK, **toys}
    return "ddp", {"steps": STEPS, "rank": RANK, "ddp": DDP, **toys}


def same_device(path: Path, device: str) -> None:
    """End the script if a report of speeds is another machine's."""
    there = json.loads(path.read_text())["device"] if path.exists() else None
    if there not in (None, here := timing.machine(device)["device"]):
        sys.exit(f"json: {path} is of {there}, this is {here}. Name another file, or remove it")


def main(argv: Sequence[str] | None = None) -> None:
    own = ("rounds", "seed")
    parser = timing.arguments(__doc__, "fsdp", "contenders", "quick", "budget", own=own)
    parser.add_argument("--no-peer", action="store_true", help="NCCL_P2P_DISABLE=1")
    args = arguments(parser, argv, EACH)
    os.environ |= {"NCCL_P2P_DISABLE": "1"} if args.no_peer else {}
    names = timing.fitting(parser, [c.name for c in contenders(args.model)], args.contenders)
    parts = [args.model, f"{args.gpus} GPUs", f"{args.each} a GPU"]
    parts += [f"{args.layers} blocks"] * bool(args.layers) + ["no peer access"] * args.no_peer
    shared = {o: vars(args)[o] for o in ("model", "gpus", "each", "device", "quick", "layers")}

    @functools.cache
    def together(first: str, *others: str) -> dict[str, Row]:
        run = Run(contender=first, beside=others, **shared)
        try:
            return dict(launched(measured, run, args.gpus))
        except Said as error:
            return {name: {"error": said(error)} for name in (first, *others)}

    sharded = args.model == "llama_8b"  # two of its contenders do not fit a GPU

    def row_of(name: str) -> Row:
        return together(*([name] if sharded else dict.fromkeys(["bf16", *names])))[name]

    jobs = {f"{', '.join(parts)}/{name}": functools.partial(row_of, name) for name in names}
    benchmark, settings = report_of(args.model, args.quick)
    same_device(timing.path_of(args, benchmark), args.device)
    measure_all(args, benchmark, jobs, settings)


if __name__ == "__main__":
    main()
