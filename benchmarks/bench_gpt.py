"""A GPT of 10, 25, 91 or 311 M parameters trained on text: bf16 beside HOT's recipes and FP8.

    python benchmarks/bench_gpt.py --device cuda                       # goes on where it broke off
    python benchmarks/bench_gpt.py --device cuda --contenders bf16 default "* saved*" --steps 450
    python benchmarks/bench_gpt.py --device cuda --size 10M --tokens-per-parameter 1 --jobs 5
    python benchmarks/bench_gpt.py --quick                             # a toy; CPU too

The text is the source of the installed Python packages, files in a fixed pseudo-random order, each
content once; every 50th file is for validation. A byte-level BPE of 8192 tokens is made from a part
of it (the package `tokenizers`). Other packages give another text: compare losses within a report
only. Per seed all contenders start from the same weights and see the same batches once. Blocks are
compiled one by one under bf16 autocast. ``--jobs`` trains several runs side by side, for the losses
alone: no times and no peaks are reported then.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import itertools
import math
import random
import statistics
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import hotcore.torch as hot
import timing
import torch
import torch.nn.functional as F
from evidence import ROOT, doc_tables, rivals, side_by_side
from layers import HALF_OF_TOKENS, TOKEN_SETTINGS
from torch import Tensor
from train_lib.models import SmallGPT
from train_lib.training import in_blocks
from training import Contender, config_of

GIB = 2**30


RECIPES = ("default", "fast", "accurate", "paper", "compact")
CONTENDERS = (
    Contender("bf16"),
    *(Contender(recipe, recipe) for recipe in RECIPES),
    *(Contender(f"{recipe} int8-forward", recipe, forward="int8") for recipe in RECIPES),
    *(Contender(name, "default", settings=fields) for name, fields in TOKEN_SETTINGS.items()),
    Contender(
        "token4, half of the tokens",
        "default",
        settings={**TOKEN_SETTINGS["token4"], **HALF_OF_TOKENS},
    ),
    Contender("default, saved 8", "default", kept=8),
    Contender("default, saved 8/4", "default", kept={"attention": 4}),
    Contender("default, saved 4", "default", kept=4),
    Contender("default, attention kept", "default", attention_kept=True),
    Contender("fast, attention kept", "fast", attention_kept=True),
    Contender("FP8 tensorwise", fp8="tensorwise"),
    Contender("FP8 rowwise", fp8="rowwise"),
)


@dataclass(frozen=True)
class Size:
    """Of the model, its batches and its text."""

    width: int
    depth: int
    heads: int
    context: int
    batch: int
    vocabulary: int
    learning_rate: float
    warmup: int
    validation_batches: int

    @property
    def parameters(self) -> int:
        """Of the model, the embedding counted once: the head has the same weight."""
        w = self.width
        block = 12 * w * w + 13 * w
        return self.depth * block + (self.vocabulary + self.context + 2) * w + self.vocabulary


FULL = Size(768, 12, 12, 512, 64, 8192, 6e-4, 60, 8)
SIZES = {
    "10M": Size(320, 6, 5, 512, 64, 8192, 1.5e-3, 60, 8),
    "25M": Size(448, 9, 7, 512, 64, 8192, 1e-3, 60, 8),
    "91M": FULL,
    "311M": Size(1024, 24, 16, 512, 64, 8192, 3e-4, 60, 8),
}
"""Rates fall with the width, as is usual."""
QUICK = Size(64, 2, 2, 32, 4, 300, 3e-3, 2, 1)


# ---- the text ----


EVERY = 50
"""One of so many files is for validation, the first among them."""


def sources(min_bytes: int) -> Iterator[str]:
    """Texts of installed .py files, each once, in an order that depends on names alone.

    They end when the training texts have ``min_bytes``.
    """
    roots = sorted({sysconfig.get_paths()[key] for key in ("purelib", "platlib", "stdlib")})
    files = sorted({path for root in roots for path in Path(root).rglob("*.py")})
    random.Random(0).shuffle(files)
    seen: set[bytes] = set()
    training = 0
    for path in files:
        try:
            text = path.read_text("utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        digest = hashlib.sha256(text.encode()).digest()
        if len(text) < 256 or digest in seen:
            continue
        training += len(text) if len(seen) % EVERY else 0
        seen.add(digest)
        yield text
        if training >= min_bytes:
            return


def tokens(size: Size, wanted: int, cache: Path) -> tuple[Tensor, Tensor]:
    """int16 tokens for training, at least ``wanted``, and for validation. Kept in ``cache``.

    Raises ValueError if the installed packages hold too little text.
    """
    name = cache / f"gpt-{size.vocabulary}-{wanted}.pt"
    if name.exists():
        found: dict[str, Tensor] = torch.load(name, weights_only=True)
        return found["training"], found["validation"]
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    texts = list(sources(int(4.5 * wanted)))  # bytes; a token is 3.3 to 4 of them
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size.vocabulary,
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts[:: max(1, len(texts) // 1500)], trainer)
    parts: dict[str, list[Tensor]] = {"training": [], "validation": []}
    for first in range(0, len(texts), 512):
        for index, code in enumerate(tokenizer.encode_batch(texts[first : first + 512]), first):
            part = "training" if index % EVERY else "validation"
            parts[part].append(torch.tensor([0, *code.ids], dtype=torch.int16))
    joined = {key: torch.cat(value) for key, value in parts.items()}
    if len(joined["training"]) < wanted:
        raise ValueError(
            f"the installed packages give {len(joined['training'])} tokens; {wanted} are wanted "
            "(fewer --steps)"
        )
    cache.mkdir(parents=True, exist_ok=True)
    torch.save(joined, name)
    return joined["training"], joined["validation"]


def batches(text: Tensor, size: Size, order: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and targets ``[batch, context]``, every window of the text once."""
    windows = text[: (len(text) - 1) // size.context * size.context].view(-1, size.context)
    after = text[1 : windows.numel() + 1].view(-1, size.context)
    for rows in torch.randperm(len(windows), generator=order).split(size.batch):
        if len(rows) == size.batch:
            yield windows[rows].long(), after[rows].long()


# ---- one run ----


def model_of(size: Size, contender: Contender, device: str, backend: str) -> SmallGPT:
    """From torch's seed; on ``device``, converted and compiled."""
    model = SmallGPT(size.vocabulary, size.width, size.depth, size.heads, size.context)
    model.head.weight = model.embed.weight
    with torch.no_grad():  # GPT-2's: the residual stream must not grow with the depth
        for block in model.blocks:
            for layer in (block.proj, block.fc2):
                layer.weight /= math.sqrt(2 * size.depth)
    model.to(device).train()
    if contender.recipe is not None:
        config = config_of(contender)
        report = hot.convert(model, config, in_blocks, saved=contender.kept).hot_report
        assert len(report.converted) == 4 * size.depth, report
    if contender.fp8 is not None:
        names = {
            name
            for name, module in model.named_modules()
            if isinstance(module, torch.nn.Linear) and in_blocks(module, name)
        }
        count = rivals.torchao_convert(model, contender.fp8, names, emulate=device == "cpu")
        assert count == 4 * size.depth, count
    if contender.attention_kept:
        hot.recompute(model.blocks)
    for block in model.blocks:
        block.compile(backend=backend)
    return model


def loss_of(model: SmallGPT, batch: tuple[Tensor, Tensor], device: str) -> Tensor:
    inputs, targets = (part.to(device, non_blocking=True) for part in batch)
    with torch.autocast(device, torch.bfloat16):
        logits = model(inputs)
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def rate(step: int, steps: int, size: Size) -> float:
    """Factor of the learning rate: linear warm-up, then a cosine to a tenth."""
    warm = min(1.0, (step + 1) / size.warmup)
    return warm * (0.55 + 0.45 * math.cos(math.pi * step / steps))


def train(
    contender: Contender,
    seed: int,
    steps: int,
    size: Size,
    text: tuple[Tensor, Tensor],
    device: str,
    backend: str,
) -> dict[str, Any]:
    """One run: its curve, its last validation loss, time of a step, peak memory."""
    torch._dynamo.reset()
    torch.manual_seed(seed)
    model = model_of(size, contender, device, backend)
    torch.manual_seed(1000 + seed)  # for HOT's rounding; weights are already drawn
    options: dict[str, Any] = {"lr": size.learning_rate, "fused": device == "cuda"}
    parameters = model.parameters()
    optimizer = torch.optim.AdamW(parameters, betas=(0.9, 0.95), weight_decay=0.1, **options)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: rate(s, steps, size))

    def validation() -> float:
        model.eval()
        every = batches(text[1], size, torch.Generator().manual_seed(0))
        with torch.no_grad():
            first = itertools.islice(every, size.validation_batches)
            found = [float(loss_of(model, batch, device)) for batch in first]
        model.train()
        return statistics.mean(found)

    order = torch.Generator().manual_seed(seed)
    curve: list[tuple[int, float]] = []
    losses: list[Tensor] = []
    times: list[float] = []
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    began = last = time.perf_counter()
    every = max(1, steps // 10)
    for step, batch in enumerate(batches(text[0], size, order)):
        if step % every == 0 or step == steps:
            curve.append((step, validation()))
            timing.synchronize(device)
            last = time.perf_counter()
        if step == steps:
            break
        loss = loss_of(model, batch, device)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
        if step % every == every - 1:
            timing.synchronize(device)
            times.append((time.perf_counter() - last) / every * 1e3)
    out = {
        "validation_loss": curve[-1][1],
        "curve": curve,
        "training": [float(value) for value in losses[:: max(1, steps // 100)]],
        "step_ms": statistics.median(times),
        "seconds": time.perf_counter() - began,
        "date": timing.today(),
    }
    if device == "cuda":
        out["peak_gib"] = torch.cuda.max_memory_allocated() / GIB
    return out


# ---- all runs ----


def one_run(
    contender: Contender,
    seed: int,
    steps: int,
    size: Size,
    cache: Path,
    device: str,
    backend: str,
    *,
    timed: bool,
) -> dict[str, Any]:
    """:func:`train` on the text in ``cache``."""
    words = (contender, seed, steps, size, tokens(size, _wanted(steps, size), cache), device)
    run = side_by_side.or_left_out(device, lambda: train(*words, backend))
    if not timed:
        for key in ("step_ms", "peak_gib"):
            run.pop(key, None)
    return run


def _wanted(steps: int, size: Size) -> int:
    return (steps + 2) * size.batch * size.context


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = timing.arguments(__doc__, "gpt", "contenders", "quick", "budget", "backend")
    parser.set_defaults(backend="inductor")
    parser.add_argument("--size", choices=tuple(SIZES), default="91M")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, help="of 32,768 tokens (default: 900)")
    parser.add_argument(
        "--tokens-per-parameter", type=float, metavar="T", help="instead of --steps"
    )
    parser.add_argument("--jobs", type=int, default=1, help="side by side: losses, no times")
    default = ROOT / "build/text"
    parser.add_argument("--cache", type=Path, default=default, help="folder of the tokens")
    args = timing.begin(parser, argv)
    args.contenders = timing.fitting(parser, [c.name for c in CONTENDERS], args.contenders)
    if args.steps is not None and args.tokens_per_parameter is not None:
        parser.error("--steps and --tokens-per-parameter: one of them")
    if args.jobs < 1:
        parser.error("--jobs must be at least 1")
    args.model = QUICK if args.quick else SIZES[args.size]
    if args.tokens_per_parameter is not None:
        step = args.model.batch * args.model.context
        args.steps = math.ceil(args.tokens_per_parameter * args.model.parameters / step)
    args.steps = 900 if args.steps is None else args.steps
    if args.steps < 1:
        parser.error("--steps must be at least 1, --tokens-per-parameter above 0")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    begun = time.perf_counter()
    args = arguments(argv)
    size: Size = args.model
    steps = min(args.steps, 4) if args.quick else args.steps
    settings = {"steps": steps, "size": asdict(size), "device": args.device}
    name = "gpt" if size is FULL or args.quick else f"gpt-{args.size}"
    path = timing.RESULTS / f"{args.device}-{name}.json" if args.json is None else args.json
    try:
        earlier = timing.resumed(path, settings)
    except ValueError as error:
        sys.exit(f"bench_gpt.py: {error}")
    runs: dict[str, Any] = earlier["runs"] if earlier else {}
    text = tokens(size, _wanted(steps, size), args.cache)
    print(f"{len(text[0])} tokens, {len(text[1])} for validation", flush=True)
    chosen = [contender for contender in CONTENDERS if contender.name in args.contenders]
    content = {"settings": settings, "runs": runs, "tokens": len(text[0]),
               "parameters": size.parameters, "left out": {}}  # fmt: skip
    del text

    def done(key: str, run: dict[str, Any]) -> None:
        if "left out" in run:
            content["left out"][key.rpartition("/")[0]] = run["left out"]
            print(f"{key}: {run['left out']}")
            return
        runs[key] = run
        step = f", {run['step_ms']:.1f} ms a step" if "step_ms" in run else ""
        print(f"{key:28s} {run['validation_loss']:.4f}{step}, {run['seconds']:.0f} s", flush=True)
        timing.write(args, name, content)

    one = functools.partial(one_run, timed=args.jobs == 1)
    where = (steps, size, args.cache, args.device, args.backend)
    work = [
        (key, one, (contender, seed, *where))
        for seed in args.seeds
        for contender in chosen
        if (key := f"{contender.name}/{seed}") not in runs
    ]
    left_s = args.budget - (time.perf_counter() - begun)
    left = side_by_side.run_all(work, done, jobs=args.jobs, budget_s=left_s, title=name)
    for key in left:
        print(f"{key}: left out, no time left")
    print("\n".join(doc_tables.gpt({"runs": runs})))


if __name__ == "__main__":
    main()
