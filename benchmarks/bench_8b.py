"""Train a whole language model, or LoRA on it, on one GPU: speed, energy, peak, largest batch.

    python benchmarks/bench_8b.py --device cuda --budget 250     # continues an interrupted report
    python benchmarks/bench_8b.py --device cuda --contenders "LoRA*" --size 1b
    python benchmarks/bench_8b.py --device cuda --contenders "LoRA frozen *4, *" --size 70b
    python benchmarks/bench_8b.py --quick                        # a toy; CPU too

The model is Llama-3-8B with random weights; 1b is Llama-3.2-1B, 0.5b has Qwen2.5's shapes, and 70b
is Llama-3-70B. Weights are bf16. A frozen base never exists in bf16, because each block is frozen
before the next is made. "frozen_s" of a row has the seconds of freezing.
Sequences are 2048 tokens of bench_gpt.py's text, whose 8192 tokens are the first of the vocabulary.
Without LoRA every contender trains all parameters by torchao's AdamW with 8-bit states and
stochastic rounding of bf16 weights. LoRA's fp32 adapters train by torch's AdamW. Blocks are
compiled one by one, with a dynamic batch size.
Head and loss run in chunks with torch's products, except for "8-bit head". Contenders run one after
the other in this process, which frees all memory between them.

Speed is that of queued steps with COMMON sequences, or as many as fit. Energy is the board's
counter (NVML) over these steps. Whole steps search the largest batch: the bytes of the last sizes
predict the next. The search ends when a step is out of memory, or none is predicted to fit into
SHARE of the card. PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True avoids fragmentation.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import math
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import bench_gpt
import hotcore.torch as hot
import timing
import torch
from evidence import doc_tables, rivals
from models import TASKS, Batch, Task, adapted, mend_torchvision
from steps import compiler_counts, described, many_recompilations, said
from timing import GIB, Row
from torch import Tensor, nn
from training import Contender, Left, Trainer, cleaned, config_of, freeze, of_a_whole_model

SHARE = 0.97
"""Share of the card's memory for torch's allocator; the process needs the rest."""
SLACK = 0.985
"""Share of that limit which a predicted batch may use; fragmentation takes the rest."""
TIMED_STEPS = 6
LEARNING_RATE = 1e-5
"""Low, because there is no warm-up: at 1e-4 AdamW's first steps raised the loss to 19."""
LEAST_S = 40.0
"""Seconds that must be left for a contender to start."""
COMMON, FIRST = 4, 2
"""Sequences of the timed steps and of the first; not 1, which compilers treat as a constant."""
MOST_TRIALS = 4
DEFAULTS = {"seed": 0, "backend": "inductor"}


@dataclasses.dataclass(frozen=True)
class Size:
    """Configuration of the model, and its sequences."""

    config: dict[str, int]
    length: int
    text: bench_gpt.Size
    sequences: int
    """Sequences of text, through which the steps cycle."""


def shape_of(
    vocabulary: int, features: int, mlp: int, blocks: int, heads: int, key_values: int, **more: Any
) -> dict[str, Any]:
    """Return the configuration of a Llama."""
    sizes = {"vocab_size": vocabulary, "hidden_size": features, "intermediate_size": mlp}
    sizes |= {"num_hidden_layers": blocks, "num_attention_heads": heads}
    return sizes | {"num_key_value_heads": key_values, **more}


LONG = {"max_position_embeddings": 8192, "rope_theta": 500000}
TIED = {**LONG, "tie_word_embeddings": True}
SIZES = {
    name: Size(shape_of(*sizes, **more), 2048, bench_gpt.FULL, 128)
    for name, sizes, more in (
        ("70b", (128256, 8192, 28672, 80, 64, 8), LONG),
        ("8b", (128256, 4096, 14336, 32, 32, 8), LONG),
        ("1b", (128256, 2048, 8192, 16, 32, 8), TIED),
        ("0.5b", (151936, 896, 4864, 24, 14, 2), TIED),
    )
}
FULL = SIZES["8b"]
TOY = Size(shape_of(512, 128, 256, 2, 4, 2), 32, bench_gpt.QUICK, 16)


CONTENDERS = of_a_whole_model()


def is_lora(contender: Contender) -> bool:
    return contender.name.startswith("LoRA")


# ---- one contender ----


def build(
    size: Size, contender: Contender, device: str, dtype: torch.dtype = torch.bfloat16
) -> tuple[nn.Module, float]:
    """Build the model with random weights on ``device``, and LoRA's adapters.

    A frozen base never exists in bf16: each block gets its form before the next one is made.

    Returns the model, and the seconds of freezing. Raises ModuleNotFoundError, TorchaoMissing and
    Left.
    """
    mend_torchvision()
    import transformers
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    seed, seconds = torch.initial_seed(), 0.0
    config = transformers.LlamaConfig(**size.config | {"num_hidden_layers": 0})
    with _made_on(device, dtype):
        model = transformers.LlamaForCausalLM(config)
    config.num_hidden_layers = size.config["num_hidden_layers"]
    for index in range(config.num_hidden_layers):
        torch.manual_seed(seed + 1 + index)  # freezing may draw numbers
        with _made_on(device, dtype):
            block = LlamaDecoderLayer(config, index).apply(model._init_weights)
        model.model.layers.append(block)
        if contender.frozen:
            timing.synchronize(device)
            begun = time.perf_counter()
            block.requires_grad_(False)
            if contender.recipe is not None:
                hot.convert(block, config_of(contender), slower=contender.slower)
            freeze(block, contender)
            timing.synchronize(device)
            seconds += time.perf_counter() - begun
    torch.manual_seed(seed)
    if is_lora(contender):
        model = adapted(model)
    if contender.adapters is not None:
        hot.convert(model, contender.adapters, filter_fn=lambda _, name: ".lora_A." in name)
    return model, seconds


@contextlib.contextmanager
def _made_on(device: str, dtype: torch.dtype) -> Iterator[None]:
    """Make new parameters on ``device``, in ``dtype``."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


class Whole(Trainer):
    """Model of a contender; its steps on text record their memory."""

    def __init__(
        self, contender: Contender, size: Size, text: Tensor, backend: str, device: str
    ) -> None:
        """Build, convert, compile. ``text`` is ``[sequences, length]``, on the device."""
        self.text, self._next, self._cuda = text, 0, device == "cuda"
        self.kept = self.after = self.forward_peak = self.backward_peak = 0
        task: Task = dataclasses.replace(TASKS["llama"], blocks="model.layers")
        batch: Batch = {"x": text[:FIRST]}
        model, self.frozen_s = build(size, contender, device)
        if contender.frozen:  # the Trainer has only the head left to convert
            contender = dataclasses.replace(contender, recipe=None, frozen="")
        super().__init__(contender, model, batch, task, in_place=True, backend=backend)
        embedding = next(m for m in self.model.modules() if isinstance(m, nn.Embedding))
        embedding.register_forward_hook(_hidden)

    def wrap(self, model: nn.Module) -> None:
        """Add the optimizer."""
        super().wrap(model)
        if not is_lora(self.contender):
            self.optimizer = rivals.torchao_adamw(model.parameters(), LEARNING_RATE)

    def take(self, sequences: int) -> Tensor:
        """Train a step on the next sequences and return its loss."""
        places = self._next + torch.arange(sequences, device=self.text.device)
        self._next += sequences
        self._batch = {"x": self.text[places % len(self.text)]}
        return self.step()

    def step(self) -> Tensor:
        """Run a Trainer's step, and read the allocator's bytes without a synchronisation."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss()
        self.kept, self.forward_peak = self._held()
        if self._cuda:  # the head's temporary buffers do not grow with the batch
            torch.cuda.reset_peak_memory_stats()
        loss.backward()
        self.after, self.backward_peak = self._held()
        self.optimizer.step()
        return loss.detach()

    def _held(self) -> tuple[int, int]:
        """Return the allocated bytes now, and their peak since the last reset."""
        if not self._cuda:
            return 0, 0
        return torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()


def _hidden(_: nn.Module, __: Any, hidden: Tensor) -> Tensor:
    """Mark the batch as dynamic, and require a gradient below LoRA's blocks, to share one graph."""
    torch._dynamo.maybe_mark_dynamic(hidden, 0)
    return hidden if hidden.requires_grad else hidden.requires_grad_()


@dataclasses.dataclass(frozen=True)
class Tried:
    """Memory in bytes and time of one whole step."""

    sequences: int
    kept: int
    """Bytes allocated between forward and backward."""
    after: int
    """Bytes after backward: weights, optimizer states, gradients."""
    peak: int
    """Peak of backward."""
    ms: float
    loss: float

    @property
    def beyond(self) -> int:
        """Temporary bytes of backward above the larger of its start and its end."""
        return self.peak - max(self.kept, self.after)


def tried(run: Whole, sequences: int, device: str) -> Tried | None:
    """Try a step. Returns None if it is out of memory."""
    if device == "cuda":
        fill()
    start = time.perf_counter()
    try:
        loss = float(run.take(sequences))
    except torch.OutOfMemoryError:
        loss = None
    if loss is None:  # not in the handler: the error's frames hold tensors
        run.optimizer.zero_grad(set_to_none=True)
        with cleaned(device):
            return None
    if not math.isfinite(loss):
        raise RuntimeError(f"the loss is not finite: {loss}")
    ms = (time.perf_counter() - start) * 1e3
    return Tried(sequences, run.kept, run.after, run.backward_peak, ms, loss)


def fill() -> None:
    """Let the allocator reserve all its memory, so that no step waits for the driver."""
    left = int(SHARE * torch.cuda.get_device_properties(0).total_memory)
    left -= torch.cuda.memory_reserved() + (64 << 20)
    with contextlib.suppress(torch.OutOfMemoryError):
        torch.empty(max(0, left), dtype=torch.uint8, device="cuda")


def next_size(trials: Sequence[Tried], failed: int | None, limit: float) -> int | None:
    """Return the next number of sequences to try; None if the largest is known to a sixteenth.

    Extrapolates the last two ``trials`` linearly: the bytes that forward keeps, and backward's
    temporary bytes. The peak is at the begin or at the end of backward.
    """
    last = trials[-1]
    size = last.sequences
    if len(trials) == 1:
        size = 2 * size
    else:
        before = trials[-2]
        step = last.sequences - before.sequences
        beyond = max(0.0, (last.beyond - before.beyond) / step)
        kept = max(0.0, (last.kept - before.kept) / step)
        room = [(limit - last.beyond - last.kept, beyond + kept)]
        room.append((limit - last.beyond - last.after, beyond))
        size += int(min((left / each for left, each in room if each > 0), default=0.0))
    if failed is not None:
        gap = failed - last.sequences
        if gap <= max(1, failed // 16):
            return None
        size = min(size, failed - max(1, gap // 4))
    return size if size > last.sequences else None


def largest(
    attempt: Callable[[int], Tried | None],
    trials: list[Tried],
    failed: int | None,
    limit: float,
    left_s: Callable[[], float],
) -> int | None:
    """Add larger steps to ``trials``. Returns the smallest size that is out of memory."""
    for _ in range(MOST_TRIALS):
        size = next_size(trials, failed, limit)
        if size is None or left_s() < 1.5e-3 * trials[-1].ms / trials[-1].sequences * size:
            break
        got = attempt(size)
        if got is None:
            failed = size
        else:
            trials.append(got)
    return failed


def speed(run: Whole, sequences: int, device: str, joules: Callable[[], float | None]) -> Row:
    """Time steps that are queued one after the other, as in training."""
    run.take(sequences)
    timing.synchronize(device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    begun_j, begun = joules(), time.perf_counter()
    marks = [timing.mark(device)]
    for _ in range(TIMED_STEPS):
        loss = run.take(sequences)
        marks.append(timing.mark(device))
    timing.synchronize(device)
    seconds, ended_j = time.perf_counter() - begun, joules()
    tokens = TIMED_STEPS * sequences * run.text.shape[1]
    out: Row = {
        "sequences": sequences,
        "step": timing.spread(timing.between(marks, device)),
        "tokens_per_s": tokens / seconds,
        "loss": float(loss),
    }
    if begun_j is not None and ended_j is not None:
        out |= {"joules_per_token": (ended_j - begun_j) / tokens,
                "watts": (ended_j - begun_j) / seconds}  # fmt: skip
    if device == "cuda":
        out["peak_gib"] = max(run.forward_peak, torch.cuda.max_memory_allocated()) / GIB
        out["after_backward_gib"] = run.after / GIB
    return out


def measured(contender: Contender, args: Any, text: Tensor, left_s: Callable[[], float]) -> Row:
    """Measure a contender. Raises Left if a library is missing."""
    begun, graphs, device = time.perf_counter(), compiler_counts()["graphs"], args.device
    row: Row = {"how": described(contender), "date": timing.today()}
    limit = math.inf
    if device == "cuda":
        limit = SHARE * torch.cuda.get_device_properties(0).total_memory
        row["held_before_gib"] = torch.cuda.memory_allocated() / GIB
    torch.manual_seed(args.seed)
    try:
        run = Whole(contender, args.model, text, args.backend, device)
    except (ModuleNotFoundError, rivals.TorchaoMissing) as missing:
        raise Left(str(missing)) from missing
    if run.report is not None:
        row["converted"] = sum(isinstance(m, hot.HotLinear) for m in run.model.modules())
        row["head"] = run.report.head
    row["built_s"] = time.perf_counter() - begun
    if contender.frozen:
        row["frozen_s"] = run.frozen_s

    losses: list[float] = []
    row["losses"] = losses

    def attempt(sequences: int, again: bool = True) -> Tried | None:
        """Try a step; ``again`` repeats it if it compiled. The first steps are never repeated."""
        known = compiler_counts()["graphs"]
        got = tried(run, sequences, device)
        if again and got is not None and compiler_counts()["graphs"] > known:
            print(f"  {sequences} sequences: compiled, {got.ms:.0f} ms", flush=True)
            got = tried(run, sequences, device)
        words = "out of memory"
        if got is not None:
            losses.append(got.loss)
            words = f"{got.ms:.0f} ms, {got.peak / GIB:.2f} GiB, loss {got.loss:.4f}"
        print(f"  {sequences} sequences: {words}", flush=True)
        return got

    first = [attempt(FIRST, again=False) for _ in range(2)]
    row["started_s"] = time.perf_counter() - begun - row["built_s"]
    if None in first:
        raise RuntimeError(f"{FIRST} sequences do not fit")
    trials, failed = [one for one in first[1:] if one is not None], None
    common = attempt(COMMON, again=False)
    if common is None:
        failed = COMMON
    else:
        trials.append(common)
    if failed is None:
        row |= speed(run, COMMON, device, energy_counter(device))
        trials[-1] = dataclasses.replace(trials[-1], ms=row["step"]["median_ms"])
        print(f"  {row['tokens_per_s']:,.0f} tokens/s", flush=True)
    if device == "cuda":
        failed = largest(attempt, trials, failed, SLACK * limit, left_s)
    best = trials[-1]
    if "step" not in row:
        row |= speed(run, best.sequences, device, energy_counter(device))
    length = text.shape[1]
    tokens = best.sequences * length
    row["largest"] = {
        "tokens": tokens, "tokens_per_s": tokens / best.ms * 1e3, "peak_gib": best.peak / GIB,
    }  # fmt: skip
    if failed is not None:
        row["largest"]["out_of_memory"] = failed * length
    row["graphs"] = compiler_counts()["graphs"] - graphs
    row["seconds"] = time.perf_counter() - begun
    return row


# ---- energy ----


def energy_counter(device: str) -> Callable[[], float | None]:
    """Return a function that reads the board's joules since its driver was loaded, or None.

    The counter is NVML's (nvidia-ml-py).
    """
    if device != "cuda":
        return lambda: None
    try:
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
        uuid = torch.cuda.get_device_properties(0).uuid
        board = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        nvml.nvmlDeviceGetTotalEnergyConsumption(board)
    except Exception as error:  # no package, no driver, no counter
        print(f"  no energy: {error}", flush=True)
        return lambda: None
    return lambda: float(nvml.nvmlDeviceGetTotalEnergyConsumption(board)) / 1e3


# ---- all ----


def sequences_of(size: Size, cache: Path, device: str) -> Tensor:
    """Return text as ``[sequences, length]`` tokens on the device."""
    tokens = size.sequences * size.length
    read = dataclasses.replace(size.text, validation_batches=0)
    return (
        bench_gpt.tokens(read, tokens, cache)
        .training[:tokens]
        .view(-1, size.length)
        .long()
        .to(device)
    )


def arguments(argv: Sequence[str] | None) -> Any:
    options = ("contenders", "quick", "budget", "backend", "cache")
    parser = timing.arguments(__doc__, "8b", *options, own=("rounds",))
    parser.set_defaults(backend=DEFAULTS["backend"])
    parser.add_argument("--size", choices=SIZES, default="8b", help="model; not with --quick")
    args = timing.begin(parser, argv)
    args.contenders = timing.fitting(parser, [c.name for c in CONTENDERS], args.contenders)
    args.model = TOY if args.quick else SIZES[args.size]
    return args


def main(argv: Sequence[str] | None = None) -> None:
    begun = time.perf_counter()
    args = arguments(argv)
    settings = {"size": dataclasses.asdict(args.model), "device": args.device}
    settings |= timing.unusual(args, DEFAULTS)
    if args.device == "cuda":
        settings["card"] = torch.cuda.get_device_name(0)
        torch.cuda.set_per_process_memory_fraction(SHARE)
    args.json = path = timing.path_of(args, args.size)
    earlier = timing.resumed(path, settings)
    rows: dict[str, Row] = earlier["whole"] if earlier else {}
    content: dict[str, Any] = {"settings": settings, "share": SHARE, "whole": rows}
    text = sequences_of(args.model, args.cache, args.device)

    def left_s() -> float:
        return float(args.budget - (time.perf_counter() - begun))

    for contender in CONTENDERS:
        name = contender.name
        before = rows.get(name, {})
        died = before.get("begun", 0)
        if name not in args.contenders or "step" in before or "error" in before:
            continue
        if died > 1:
            rows[name] = {"how": described(contender), "error": "its process ended, twice"}
            timing.write(args, "8b", content)
            continue
        if left_s() < LEAST_S:
            print(f"{name}: no time left", flush=True)
            break
        print(f"{name}, {left_s():.0f} s left", flush=True)
        rows[name] = {"begun": died + 1}
        timing.write(args, "8b", content)
        with cleaned(args.device):
            rows[name] = row_of(contender, args, text, left_s)
        known = {c.name: rows[c.name] for c in CONTENDERS if c.name in rows}
        rows = content["whole"] = known | rows  # last those that this version does not have
        timing.write(args, "8b", content)
        let_go(args.device)
    print("\n".join(doc_tables.whole(content)))
    errors = [name for name, row in rows.items() if "error" in row]
    if errors:
        sys.exit(f"failed: {errors}")


def let_go(device: str) -> None:
    """End the process if a contender's memory is still allocated: the next would have less."""
    for forget in (torch._dynamo.reset, lambda: sys.exit("memory is still held: start again")):
        if device == "cuda" and torch.cuda.memory_allocated() > GIB:
            with cleaned(device):
                forget()


def row_of(contender: Contender, args: Any, text: Tensor, left_s: Callable[[], float]) -> Row:
    """Return :func:`measured`, or the reason for no figure, and release an error's frames."""
    try:
        with many_recompilations():
            return measured(contender, args, text, left_s)
    except Left as left:
        return {"how": described(contender), "left_out": str(left)}
    except Exception as error:
        traceback.print_exc()
        return {"how": described(contender), "error": said(error)}


if __name__ == "__main__":
    main()
