"""Losses on several GPUs: bf16, FP8 and HOT; the same bits on resume; one process or several.

    python -m benchmarks.evidence.several --device cuda --gpus 4    # Llama-3-8B, FSDP2
    python -m benchmarks.evidence.several --device cuda --gpus 4 --model vit_l    # DDP
    python -m benchmarks.evidence.several --device cuda --gpus 4 --model gpt_10m    # DDP
    python -m benchmarks.evidence.several --device cuda --gpus 4 --model gpt_91m    # FSDP2
    python -m benchmarks.evidence.several --quick --json FILE    # toy, two processes on the CPU

Parts: ``losses`` trains the whole model. ``resume`` cuts a run of ``SHORT`` steps at its half and
goes on in new processes by torch.distributed.checkpoint, with deterministic algorithms. ``one``
trains on all parts of a batch in one process, and on one part in each. FSDP2 shards fp32 weights
and AdamW's states, computes and reduces in bf16. DDP trains fp32 weights under bf16 autocast. Text
is bench_gpt.py's. A report continues; a row with an error is measured again.

The GPTs have model, rates and optimizer of bench_gpt.py, and part ``losses`` alone. Gradients are
reduced in fp32, or in INT8. Their rows end with a validation loss. Both sizes read one text, which
the first run tokenises.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import bench_8b
import bench_fsdp
import bench_gpt
import timing
import torch
import torch.distributed as dist
import torch.nn.functional as F
from evidence import small_tasks
from models import TASKS, Batch, Task
from timing import Row
from torch import Tensor, nn
from training import Contender, Left

PARTS = ("losses", "resume", "one")
STEPS, SHORT = 300, 20
"""Steps of a whole run, and of ``resume`` and ``one``."""
GPTS = {"gpt_10m": ("10M", 1200), "gpt_91m": ("91M", 800)}
"""Sizes of bench_gpt.py, and steps of a run."""
MODELS = {model: bench_fsdp.EACH[model] for model in ("llama_8b", "vit_l")} | dict.fromkeys(
    GPTS, 16
)
"""Sequences or images of a GPU's step."""
TOKENS, QUICK_TOKENS, VALIDATION = 40_000_000, 4096, 50
"""Training tokens of the GPTs' text, of --quick's, and batches for validation."""
WARM_UP, RATE = 50, 1e-4


def contenders(model: str) -> list[Contender]:
    """List bf16, FP8, HOT with an 8-bit forward, and bf16 with a byte on the wire."""
    if model in GPTS:
        names: tuple[str, ...] = ("bf16", "bf16, INT8 gradients", "bf16, bf16_compress_hook")
        alike = "vit_l"
        if model == "gpt_91m":
            names, alike = ("bf16", "bf16, INT8 weights and gradients"), "llama_8b"
        listed = bench_fsdp.contenders(alike)
        return [replace(one, head="") for one in listed if one.name in names]
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

    @property
    def gpt(self) -> bench_gpt.Size:
        """Size of a GPT. Its batch is that of all GPUs."""
        size = bench_gpt.QUICK
        if not self.quick:
            size = replace(bench_gpt.SIZES[GPTS[self.model][0]], validation_batches=VALIDATION)
        return replace(size, batch=self.gpus * self.each, depth=self.layers or size.depth)

    def text(self) -> bench_gpt.Text:
        """Text of a GPT, tokenised by the first call and cached."""
        return bench_gpt.tokens(self.gpt, QUICK_TOKENS if self.quick else TOKENS, self.cache)

    def rate(self, step: int) -> float:
        """Learning rate of a step."""
        if self.model in GPTS:
            return self.gpt.learning_rate * bench_gpt.rate(step, self.steps, self.gpt)
        return RATE * min(1.0, (step + 1) / WARM_UP)


# ---- a process of a run ----


class Several(bench_fsdp.Several):
    """Contender's model on the processes of a run."""

    def train(self, rate: float, parts: Sequence[Batch]) -> Tensor:
        """Train a step on this process's parts of a batch. Returns the mean loss of all parts."""
        bench_gpt.set_rate(self.optimizer, rate)
        losses = bench_gpt.update(self.optimizer, self.losses(parts), len(parts))
        return self.mean([loss.float() for loss in losses])

    def losses(self, batches: Iterable[Batch]) -> Iterator[Tensor]:
        """Yield the loss of each batch when it is asked for."""
        for self._batch in batches:
            yield self.loss()

    @torch.no_grad()
    def validate(self, batches: Iterator[list[Batch]]) -> float:
        """Return the mean loss of all processes' parts of the batches."""
        self.model.eval()
        losses = self.losses(itertools.chain.from_iterable(batches))
        return float(self.mean([loss.double() for loss in losses]))

    def mean(self, losses: Sequence[Tensor]) -> Tensor:
        """Return the mean over all processes, which have as many losses each."""
        mean = torch.stack([*losses]).mean() / dist.get_world_size()
        dist.all_reduce(mean)
        return mean


class Gpt(Several):
    """A GPT with bench_gpt.py's optimizer, whose gradients FSDP2 reduces in fp32."""

    reduced = torch.float32

    def wrap(self, model: nn.Module) -> None:
        """Distribute the model, and make its optimizer."""
        super().wrap(model)
        self.optimizer = bench_gpt.optimizer_of([*self.model.parameters()], graph=False)


def build(run: Run, device: torch.device, backend: str) -> tuple[nn.Module, Task]:
    """Build the model with fp32 weights, equal in every process, and its task."""
    if run.model not in GPTS:
        return bench_fsdp.build(run, device)
    torch.manual_seed(run.seed)
    model = bench_gpt.model_of(run.gpt, Contender("bf16"), str(device), None)
    cross_entropy = torch.compile(bench_gpt.cross_entropy, backend=backend)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return cross_entropy(model(batch["x"]), batch["y"])

    return model, replace(TASKS["llama"], loss=loss, blocks="blocks")


def parts_of(run: Run) -> range:
    """Return the parts of a batch that are this process's."""
    world, rank = dist.get_world_size(), dist.get_rank()
    return range(rank * run.gpus // world, (rank + 1) * run.gpus // world)


def text_batches(run: Run, text: Tensor, seed: int) -> Iterator[list[Batch]]:
    """Yield this process's parts of batches of a GPT's text, without end."""
    for batch in bench_gpt.batches(text, run.gpt, torch.Generator().manual_seed(seed)):
        x, y = (values.split(run.each) for values in batch)
        yield [{"x": x[part], "y": y[part]} for part in parts_of(run)]


def data(run: Run, device: torch.device) -> Iterator[list[Batch]]:
    """Yield this process's parts of each step's batch, from ``run.first`` on."""
    rank, parts = dist.get_rank(), parts_of(run)
    if run.model in GPTS:
        text = run.text().training.to(device)
        yield from itertools.islice(text_batches(run, text, run.seed), run.first, run.steps)
        return
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


def trained(run: Run, device: torch.device) -> Row:
    """Train from ``run.first`` to ``run.steps``, in every process of the run. Returns losses."""
    contender = next(one for one in contenders(run.model) if one.name == run.contender)
    torch.use_deterministic_algorithms(run.deterministic)
    backend = "aot_eager" if run.quick else "inductor"
    model, task = build(run, device, backend)
    steps = data(run, device)
    parts = next(steps)
    kind = Gpt if run.model in GPTS else Several
    try:
        several = kind(contender, model, parts[0], task, in_place=True, backend=backend)
    except Left as left:
        return {"left_out": str(left)}
    torch.manual_seed(1000 * (run.seed + 1) + dist.get_rank())  # HOT's rounding
    if run.first:
        checkpointed(several, run)
    losses = []
    for step in range(run.first, run.steps):
        losses.append(several.train(run.rate(step), parts))
        parts = next(steps, [])
    if run.checkpoint and not run.first:
        checkpointed(several, run)
    row: Row = {"losses": [float(loss) for loss in losses]}
    if run.model in GPTS:
        row["losses"] = row["losses"][:: max(1, run.steps // 100)]
        batches = text_batches(run, run.text().validation.to(device), 0)
        row["validation_loss"] = several.validate(
            itertools.islice(batches, run.gpt.validation_batches)
        )
    return row


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
    losses: list[float] = bench_fsdp.launched(trained, run, world)["losses"]
    return losses


def row_of(part: str, run: Run) -> Row:
    """Return the row of a part."""
    if part == "losses":
        row: Row = bench_fsdp.launched(trained, run, run.gpus)
        return row
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
    options = ("contenders", "quick", "budget", "cache")
    parser = timing.arguments(__doc__, "several", *options, own=("rounds", "seed"))
    parser.add_argument("--part", nargs="+", choices=PARTS, help="default: all of the model")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument(
        "--images", default="tiles", help="data of the ViT, as in bench_training.py"
    )
    parser.add_argument("--steps", type=int, help="of a whole run; default: the model's, quick 4")
    args = bench_fsdp.arguments(parser, argv, MODELS)
    names = timing.fitting(parser, [c.name for c in contenders(args.model)], args.contenders)
    gpt, whole = GPTS.get(args.model, ("", STEPS))
    if gpt and args.part not in (None, ["losses"]):
        parser.error(f"--part: {args.model} has losses alone")
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # for deterministic products
    options = ("model", "gpus", "each", "cache", "device", "images", "quick", "layers")
    steps = args.steps or (4 if args.quick else whole)
    shared = {o: vars(args)[o] for o in options}
    jobs = {}
    for part, seed, name in itertools.product(
        args.part or (("losses",) if gpt else PARTS), args.seeds, names
    ):
        run = Run(contender=name, steps=steps, seed=seed, **shared)
        key = f"{args.model}/{args.gpus}/{part}/{name}/{seed}"
        jobs[key] = functools.partial(row_of, part, run)
    benchmark, settings = f"wire-{gpt}" if gpt else "several", {"steps": steps}
    before: Row = settings
    if gpt:
        begun = time.perf_counter()
        settings |= {"size": asdict(run.gpt), "text": run.text().facts(run.gpt, steps)}
        args.budget -= time.perf_counter() - begun
    else:  # a report has models with settings of their own; an old one lacks some
        before = dict(settings)
        path = timing.path_of(args, benchmark)
        there = json.loads(path.read_text())["settings"] if path.exists() else {}
        for name in ("each", "images", "layers"):
            known = there.get(name, {})
            settings[name] = known | {args.model: vars(args)[name]}
            before |= {name: {model: settings[name][model] for model in known}} if known else {}
    bench_fsdp.measure_all(args, benchmark, jobs, settings, before)


if __name__ == "__main__":
    main()
