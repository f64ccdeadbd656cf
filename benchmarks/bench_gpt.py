"""Train a GPT of 10, 25, 91 or 311 M parameters on text: bf16 beside HOT's recipes and FP8.

    python benchmarks/bench_gpt.py --device cuda                       # continues a report
    python benchmarks/bench_gpt.py --device cuda --contenders bf16 default "* kept" --steps 450
    python benchmarks/bench_gpt.py --device cuda --size 10M --tokens-per-parameter 1 --jobs 5
    python benchmarks/bench_gpt.py --device cuda --size 10M --tokens-per-parameter 20 --graph \
        --validation-batches 50 --points 30 --devices 0                # docs/dev/evidence.md
    python benchmarks/bench_gpt.py --quick                             # a toy; CPU too

The text is the source of the installed Python packages, each content once in a fixed random order.
Their headers and documents follow if it is too short. Every 50th file is for validation, or every
20th if validation is long. A part of the text trains a byte-level BPE of 8192 tokens (package
`tokenizers`). Other packages give another text, so compare losses within a report only. A run
longer than the text reads it again in another order, up to ``--epochs`` times.

All contenders of a seed start from the same weights and see the same batches. Blocks are compiled
one by one under bf16 autocast. ``--graph`` captures the whole step in a CUDA graph and compiles the
loss, because launches and logits dominate the step of a small model. ``--jobs`` trains several runs
side by side on ``--devices``. Runs that share a device report neither times nor peaks. A run saves
its state every ``--save`` seconds in ``--cache``, and goes on from there if it was cut.

A run has diverged if its loss is no number or ends 0.5 above its lowest; its row says so.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import random
import statistics
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import hotcore
import hotcore.torch as hot
import timing
import torch
import torch.nn.functional as F
from evidence import doc_tables, rivals, side_by_side
from torch import Tensor
from train_lib.models import SmallGPT
from train_lib.training import in_blocks
from training import Contender, by_name, cleaned, config_of

RECIPES = ("default", "fast", "accurate", "paper")
NAMES = (
    "bf16", *RECIPES, *(f"{recipe} int8-forward" for recipe in RECIPES),
    "default, attention kept", "fast, attention kept", "FP8 tensorwise", "FP8 rowwise",
)  # fmt: skip
CONTENDERS = tuple(map(by_name, NAMES))


@dataclass(frozen=True)
class Size:
    """Size of the model, its batches and its text."""

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
        """Number of parameters; the embedding counts once, because the head shares it."""
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
"""Sizes by name; the learning rate falls with the width."""
DIVERGED = 0.5
"""Nats by which the last validation loss may exceed the lowest before a run has diverged."""
QUICK = Size(64, 2, 2, 32, 4, 300, 3e-3, 2, 1)


# ---- the text ----


EVERY, EVERY_LONG = 50, 20
"""One of so many files, the first, is for validation; the second number is for a long one."""
KINDS = ((".py",), (".pyi", ".md", ".rst", ".h", ".hpp", ".cuh", ".cpp", ".cu"))
"""Suffixes of files: all files of the first kind come before those of the second."""
PYTHON = "Python's library"


@dataclass(frozen=True)
class Text:
    """Tokens as int16, and the characters that each package gave."""

    training: Tensor
    validation: Tensor
    packages: dict[str, int]

    def digest(self) -> str:
        """Return a hash of the training tokens."""
        return hashlib.sha256(self.training.numpy().tobytes()).hexdigest()[:16]

    def facts(self, size: Size, count: int) -> dict[str, Any]:
        """Describe the text for a report of ``count`` batches a run. A run that continues on
        another machine compares these figures.
        """
        a_pass = len(_windows(self.training, size)) // size.batch
        return {
            "sha256": self.digest(),
            "training": len(self.training),
            "validation": len(self.validation),
            "epochs": round(count / a_pass, 3),
            "packages": self.packages,
        }


def sources(min_chars: int, every: int = EVERY) -> Iterator[tuple[str, str]]:
    """Yield package and text of installed files, each text once, in an order given by their names.

    Ends when the training texts have ``min_chars``.
    """
    libraries = {Path(sysconfig.get_paths()[key]) for key in ("purelib", "platlib")}
    roots = sorted({*libraries, Path(sysconfig.get_paths()["stdlib"])})
    seen: set[bytes] = set()
    training = 0
    for suffixes in KINDS:
        paths = {path for root in roots for end in suffixes for path in root.rglob(f"*{end}")}
        files = sorted(paths)
        random.Random(0).shuffle(files)
        for path in files:
            try:
                text = path.read_text("utf-8")
            except (OSError, UnicodeDecodeError):
                continue
            digest = hashlib.sha256(text.encode()).digest()
            if len(text) < 256 or digest in seen:
                continue
            training += len(text) if len(seen) % every else 0
            seen.add(digest)
            inside = [path.relative_to(root).parts for root in libraries if root in path.parents]
            yield inside[0][0].partition("-")[0].removesuffix(".py") if inside else PYTHON, text
            if training >= min_chars:
                return


def tokens(size: Size, count: int, cache: Path, epochs: int = 1) -> Text:
    """Take text for ``count`` tokens of ``epochs`` passes from ``cache``, or make it there.

    Raises ValueError if the installed packages hold too little text.
    """
    every = EVERY if size.validation_batches <= FULL.validation_batches else EVERY_LONG
    name = cache / f"gpt-{size.vocabulary}-{count}-{every}.pt"
    if name.exists():
        text = Text(**torch.load(name, weights_only=True))
    else:
        text = tokenised(size.vocabulary, int(4.5 * count), every)  # 3.3 to 4 characters a token
    if len(text.training) * epochs < count:
        raise ValueError(
            f"the installed packages give {len(text.training)} tokens, read {epochs} times at "
            f"most; expected {count} (fewer --steps, more --epochs)"
        )
    windows = len(_windows(text.validation, size))
    if windows < size.validation_batches * size.batch:
        raise ValueError(
            f"the installed packages give {windows // size.batch} batches for validation; "
            f"expected {size.validation_batches} (--validation-batches)"
        )
    if not name.exists():
        timing.write_whole(name, lambda part: torch.save(vars(text), part))
    return text


def tokenised(vocabulary: int, min_chars: int, every: int) -> Text:
    """Tokenise the installed packages' text by a BPE that a part of it trains."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    files = list(sources(min_chars, every))
    texts = [text for _, text in files]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts[:: max(1, len(texts) // 1500)], trainer)
    parts: dict[str, list[Tensor]] = {"training": [], "validation": []}
    for first in range(0, len(texts), 512):
        for index, code in enumerate(tokenizer.encode_batch(texts[first : first + 512]), first):
            part = "training" if index % every else "validation"
            parts[part].append(torch.tensor([0, *code.ids], dtype=torch.int16))
    joined: dict[str, Any] = {key: torch.cat(value) for key, value in parts.items()}
    characters: Counter[str] = Counter()
    for package, text in files:
        characters[package] += len(text)
    return Text(**joined, packages=dict(characters.most_common()))


def _windows(text: Tensor, size: Size) -> Tensor:
    return text[: (len(text) - 1) // size.context * size.context].view(-1, size.context)


def batches(
    text: Tensor, size: Size, order: torch.Generator, skip: int = 0
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield inputs and targets ``[batch, context]`` on the text's device, without end.

    Every pass contains each window of the text once, in another order. The first ``skip`` batches
    are left out.
    """
    windows = _windows(text, size)
    after = text[1 : windows.numel() + 1].view(-1, size.context)
    while True:
        for rows in torch.randperm(len(windows), generator=order).split(size.batch):
            if len(rows) < size.batch:
                continue
            skip -= 1
            if skip < 0:
                rows = rows.to(text.device)
                yield windows[rows].long(), after[rows].long()


# ---- one run ----


DEFAULTS: dict[str, Any] = {"graph": False, "points": 10, "backend": "inductor"}


@dataclass(frozen=True)
class How:
    """Settings that all runs of a report share."""

    steps: int
    size: Size
    device: str
    backend: str
    cache: Path
    epochs: int
    points: int
    graph: bool
    timed: bool
    save_s: float = math.inf
    """Seconds between saved states of a run."""

    def state(self, contender: Contender, seed: int, text: Text) -> Path:
        """Path of a run's saved state; its name contains everything the run depends on."""
        facts = [self.settings(), contender.name, seed, text.digest()]
        name = json.dumps([*facts, torch.__version__, hotcore.__version__])
        return self.cache / f"state-{hashlib.sha256(name.encode()).hexdigest()[:16]}.pt"

    def text(self) -> Text:
        count = (self.steps + 2) * self.size.batch * self.size.context
        return tokens(self.size, count, self.cache, self.epochs)

    def settings(self) -> dict[str, Any]:
        """Settings that must be equal for a report to continue."""
        always = {"steps": self.steps, "size": asdict(self.size), "device": self.device}
        return always | timing.unusual(self, DEFAULTS)


def model_of(size: Size, contender: Contender, device: str, backend: str | None) -> SmallGPT:
    """Build the model from torch's seed on ``device``, convert it, and compile with ``backend``."""
    model = SmallGPT(size.vocabulary, size.width, size.depth, size.heads, size.context)
    model.head.weight = model.embed.weight
    with torch.no_grad():  # GPT-2's scaling: the residual stream does not grow with the depth
        for block in model.blocks:
            for layer in (block.proj, block.fc2):
                layer.weight /= math.sqrt(2 * size.depth)
    model.to(device).train()
    if contender.recipe is not None:
        config = config_of(contender)
        report = hot.convert(model, config, in_blocks).hot_report
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
    for block in model.blocks if backend is not None else ():
        block.compile(backend=backend)
    return model


def optimizer_of(weights: Sequence[Tensor], graph: bool) -> torch.optim.Optimizer:
    """Return AdamW; the caller sets the learning rate."""
    options: dict[str, Any] = {"betas": (0.9, 0.95), "weight_decay": 0.1}
    # A CUDA graph reads the learning rate from a tensor.
    first = torch.zeros((), device=weights[0].device) if graph else 0.0
    fused = weights[0].is_cuda
    return torch.optim.AdamW(weights, lr=first, fused=fused, capturable=graph, **options)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


Batch = tuple[Tensor, Tensor]


def rate(step: int, steps: int, size: Size) -> float:
    """Factor of the learning rate: linear warm-up of at most a fifth, then a cosine to a tenth."""
    warm = min(1.0, (step + 1) / max(1, min(size.warmup, steps // 5)))
    return warm * (0.55 + 0.45 * math.cos(math.pi * step / steps))


def set_rate(optimizer: torch.optim.Optimizer, now: float) -> None:
    """Set the learning rate, in place where a CUDA graph reads it."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(now)
        else:
            group["lr"] = now


def update(optimizer: torch.optim.Optimizer, losses: Iterable[Tensor], count: int) -> list[Tensor]:
    """Train a step on the mean of ``count`` losses, each computed in its turn. Returns them."""
    optimizer.zero_grad(set_to_none=True)
    out = []
    for loss in losses:
        (loss / count).backward()
        out.append(loss.detach())
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    torch.nn.utils.clip_grad_norm_(weights, 1.0)
    optimizer.step()
    return out


class Captured:
    """Training step that a CUDA graph replays, without launches by the host.

    The first calls run the step eagerly on the stream of the later capture. They compile the model
    and create the optimizer's state, and they train like the others.
    """

    WARM = 3

    def __init__(self, step: Callable[[Batch], Tensor], weights: Sequence[Tensor]) -> None:
        self._step, self._weights = step, weights
        self._graph, self._stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        self._calls = 0
        self._batch: Batch
        self._loss: Tensor

    def __call__(self, batch: Batch) -> Tensor:
        self._calls += 1
        if self._calls <= self.WARM:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                loss = self._step(batch)
            torch.cuda.current_stream().wait_stream(self._stream)
            return loss
        if self._calls == self.WARM + 1:
            self._batch = (batch[0].clone(), batch[1].clone())
            with torch.cuda.graph(self._graph, stream=self._stream):
                self._loss = self._step(self._batch)
        for buffer, part in zip(self._batch, batch, strict=True):
            buffer.copy_(part)
        self._graph.replay()
        # A replay does not advance the weights' version counters, which caches compare.
        torch.autograd.graph.increment_version(self._weights)
        return self._loss


def random_states() -> list[Tensor]:
    """Return the states of torch's generators: the CPU's, and the current GPU's if there is one."""
    cuda = [torch.cuda.get_rng_state()] if torch.cuda.is_available() else []
    return [torch.get_rng_state(), *cuda]


def set_random_states(states: Sequence[Tensor]) -> None:
    """Set :func:`random_states`."""
    cpu, *cuda = (state.cpu() for state in states)
    torch.set_rng_state(cpu)
    for state in cuda:
        torch.cuda.set_rng_state(state)


def train(contender: Contender, seed: int, how: How, text: Text) -> dict[str, Any]:
    """Train one run. Returns its curve, last validation loss, step time, peak memory and noise.

    It goes on from its saved state, if there is one, and removes that at its end.
    """
    size, steps, device = how.size, how.steps, how.device
    torch._dynamo.reset()
    torch.manual_seed(seed)
    model = model_of(size, contender, device, how.backend)
    torch.manual_seed(1000 + seed)  # seeds HOT's rounding; the weights are drawn
    weights = list(model.parameters())
    optimizer = optimizer_of(weights, how.graph)
    criterion = torch.compile(cross_entropy, backend=how.backend) if how.graph else cross_entropy

    def loss_of(batch: Batch) -> Tensor:
        with torch.autocast(device, torch.bfloat16):
            logits = model(batch[0])
        loss: Tensor = criterion(logits, batch[1])
        return loss

    def plain_step(batch: Batch) -> Tensor:
        (loss,) = update(optimizer, map(loss_of, [batch]), 1)
        return loss

    training, held_out = text.training.to(device), text.validation.to(device)

    def validation() -> float:
        model.eval()
        every = batches(held_out, size, torch.Generator().manual_seed(0))
        with torch.no_grad():
            losses = [loss_of(b) for b in itertools.islice(every, size.validation_batches)]
        model.train()
        return float(torch.stack(losses).double().mean())

    one_step = Captured(plain_step, weights) if how.graph else plain_step
    kept: dict[str, Any] = {"curve": [], "losses": [], "times": [], "step": 0, "seconds": 0.0}
    path, diverged = how.state(contender, seed, text), ""
    if path.exists():
        kept = torch.load(path, weights_only=True, map_location=device)
        model.load_state_dict(kept.pop("model"))
        optimizer.load_state_dict(kept.pop("optimizer"))
        set_random_states(kept.pop("random"))
    curve, losses, times = kept["curve"], kept["losses"], kept["times"]

    def save(step: int) -> None:
        """Save the run's state before ``step``."""
        content = {**kept, "step": step, "seconds": kept["seconds"] + time.perf_counter() - began,
                   "model": model.state_dict(), "optimizer": optimizer.state_dict(),
                   "random": random_states()}  # fmt: skip
        timing.write_whole(path, lambda part: torch.save(content, part))

    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    began = last = saved = time.perf_counter()
    every, loss_every = max(1, steps // how.points), max(1, steps // 100)
    first = kept["step"]
    order = torch.Generator().manual_seed(seed)
    source = batches(training, size, order, first)
    for step in range(first, steps + 1):
        if (step % every == 0 and step not in dict(curve)) or step == steps:
            loss_now = validation()
            if not math.isfinite(loss_now):
                diverged = f"loss is {loss_now} at step {step}"
                break
            curve.append((step, loss_now))
            timing.synchronize(device)
            last = time.perf_counter()
            if last - saved >= how.save_s and step < steps:
                save(step)
                saved = last = time.perf_counter()
        if step == steps:
            break
        set_rate(optimizer, size.learning_rate * rate(step, steps, size))
        loss = one_step(next(source))
        if step % loss_every == 0:
            losses.append(loss.clone())
        if step % every == every - 1:
            timing.synchronize(device)
            times.append((time.perf_counter() - last) / every * 1e3)
    least = min((loss for _, loss in curve), default=math.nan)
    if not diverged and curve[-1][1] > least + DIVERGED:
        diverged = f"loss is {curve[-1][1]:.3f} after {least:.3f}"
    out: dict[str, Any] = {
        "curve": curve,
        "training": [value for value in map(float, losses) if math.isfinite(value)],
        "seconds": kept["seconds"] + time.perf_counter() - began,
        "date": timing.today(),
    }
    path.unlink(missing_ok=True)
    out |= {"diverged": diverged} if diverged else {"validation_loss": curve[-1][1]}
    if times:
        out["step_ms"] = statistics.median(times)
    if device == "cuda":
        out["peak_gib"] = torch.cuda.max_memory_allocated() / timing.GIB
    return out


# ---- all runs ----


def one_run(contender: Contender, seed: int, how: How) -> dict[str, Any]:
    """Run :func:`train` on the text in the cache."""
    words = (contender, seed, how)
    with cleaned(how.device):  # other processes may share the device
        run = side_by_side.or_left_out(how.device, lambda: train(*words, how.text()))
    if not how.timed:
        for key in ("step_ms", "peak_gib"):
            run.pop(key, None)
    return run


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    options = ("contenders", "quick", "budget", "backend", "cache", "devices")
    parser = timing.arguments(__doc__, "gpt", *options, own=("rounds", "seed"))
    parser.set_defaults(backend=DEFAULTS["backend"])
    add, names = parser.add_argument, [contender.name for contender in CONTENDERS]
    add("--size", choices=tuple(SIZES), default="91M")
    add("--seeds", type=int, nargs="+", default=[0])
    run = parser.add_mutually_exclusive_group()
    run.add_argument("--steps", type=timing.COUNT, help="default: 900")
    run.add_argument("--tokens-per-parameter", type=timing.above_zero(float), metavar="T")
    count = {"type": timing.COUNT}
    add("--epochs", **count, default=4, help="largest number of passes over the text")
    add("--validation-batches", **count, metavar="N", help="default: the size's")
    add("--points", **count, default=DEFAULTS["points"], help="points of the validation curve")
    add("--graph", action="store_true", help="capture a step in a CUDA graph")
    add("--jobs", **count, help="parallel runs (default: one per device)")
    add("--save", type=float, default=60, metavar="SECONDS", help="between saved states of a run")
    args = timing.begin(parser, argv)
    args.contenders = timing.fitting(parser, names, args.contenders)
    args.devices = timing.devices_of(parser, args)
    args.jobs = args.jobs or args.devices
    if args.graph and args.device == "cpu":
        parser.error("--graph needs --device cuda")
    args.model = QUICK if args.quick else SIZES[args.size]
    if args.validation_batches is not None:
        args.model = replace(args.model, validation_batches=args.validation_batches)
    if args.tokens_per_parameter is not None:
        step = args.model.batch * args.model.context
        args.steps = math.ceil(args.tokens_per_parameter * args.model.parameters / step)
    args.steps = args.steps or 900
    return args


def main(argv: Sequence[str] | None = None) -> None:
    begun = time.perf_counter()
    args = arguments(argv)
    size: Size = args.model
    how = How(
        min(args.steps, 4) if args.quick else args.steps, size, args.device, args.backend,
        args.cache, args.epochs, args.points, args.graph, args.jobs <= args.devices,
        args.save,
    )  # fmt: skip
    name = "gpt" if args.quick or args.size == "91M" else f"gpt-{args.size}"
    path = timing.path_of(args, name)
    settings = how.settings()
    earlier = timing.resumed(path, settings)
    try:
        text = how.text()
    except ValueError as error:
        sys.exit(f"bench_gpt.py: {error}")
    facts = text.facts(size, how.steps)
    if earlier and earlier.get("text", facts)["sha256"] != facts["sha256"]:
        sys.exit(f"json: {path} has runs on another text: name another file")
    runs: dict[str, Any] = earlier["runs"] if earlier else {}
    print(f"{len(text.training)} tokens, {len(text.validation)} for validation, "
          f"{facts['epochs']} epochs", flush=True)  # fmt: skip
    chosen = [contender for contender in CONTENDERS if contender.name in args.contenders]
    content = {"settings": settings, "runs": runs, "tokens": len(text.training),
               "parameters": size.parameters, "text": facts,
               "left out": (earlier or {}).get("left out", {})}  # fmt: skip
    del text

    def done(key: str, run: dict[str, Any]) -> None:
        name_of = key.rpartition("/")[0]
        content["left out"].pop(name_of, None)
        if "left out" in run:
            content["left out"][name_of] = run["left out"]
            print(f"{key}: {run['left out']}")
            timing.write(args, name, content)
            return
        runs[key] = run
        step = f", {run['step_ms']:.1f} ms a step" if "step_ms" in run else ""
        loss = run["diverged"] if "diverged" in run else f"{run['validation_loss']:.4f}"
        print(f"{key:28s} {loss}{step}, {run['seconds']:.0f} s", flush=True)
        timing.write(args, name, content)

    work = [
        (key, one_run, (contender, seed, how))
        for seed in args.seeds
        for contender in chosen
        if (key := f"{contender.name}/{seed}") not in runs
    ]
    left_s = args.budget - (time.perf_counter() - begun)
    options = {"jobs": args.jobs, "devices": args.devices, "budget_s": left_s, "title": name}
    options["longest_s"] = max((run["seconds"] for run in runs.values()), default=0.0)
    left = side_by_side.run_all(work, done, **options)
    for key in left:
        print(f"{key}: left out, no time left")
    print("\n".join(doc_tables.gpt({"runs": runs})))


if __name__ == "__main__":
    main()
