"""Losses of LoRA on a frozen base in bf16, NF4, INT4 and INT8.

    python -m benchmarks.evidence.bench_lora gpt     # 20 minutes on a core; continues its report
    python -m benchmarks.evidence.bench_lora bert albert
    python -m benchmarks.evidence.bench_lora --adapters
    python -m benchmarks.evidence.bench_lora --quick # toys, for a test

bench_base.py compares the outputs of bases that nobody trains. Here adapters of rank 16 train on
every linear layer of the blocks.

The plan of seeds and rules is in docs/dev/evidence.md. The tasks and forms:

* ``gpt``: a decoder of 446,208 parameters: 2 blocks of 128 features, bytes as tokens, contexts of
  128. It trains in fp32 on sources of Python's library for 20 tokens a parameter, 8.9 million. It
  is far smaller than a model that people freeze, and one core trains it in minutes. On sources
  that were held back, each form of the frozen base has a loss. KL is the mean divergence of its
  predictions there from those of fp32. Then LoRA learns descriptions of installed packages, in
  200 steps of 16 x 128 bytes.
* ``bert``: bench_base.py's BERT with a new head learns from which of the 20 largest modules of
  Python's library 64 tokens are. The head reads the mean of their last hidden states. 100 steps
  of 8.
* ``albert``: bench_base.py's ALBERT with a new head learns 15 % of the tokens of molecules, which
  are masked. 100 steps of 8 sequences of 64 tokens.
* The forms: weights rounded to bf16; bitsandbytes' NF4 with double quantisation, dequantised; and
  hotcore's own layers, with x and g_x in INT8. Everything else computes in fp32, so that only the
  forms differ. ``inputs`` are 32 sequences of the text that LoRA learns.
* A seed draws the adapters and the order of batches, alike for all forms. AdamW has no weight
  decay, its rate of 2e-3 falls linearly to zero. Dropout is off. The figure is the mean cross
  entropy on text that was held back, after the last step.
* ``--adapters``: adapters on INT4 whose x is kept in codes, beside plain ones.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib
import itertools
import math
import random
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import bench_gpt
import hotcore.torch as hot
import timing
import torch
import torch.nn.functional as F
from evidence import ROOT, bench_base, doc_tables
from models import mend_torchvision
from torch import Tensor, nn
from training import Contender

FORMS = ("bf16", bench_base.BASELINE, *bench_base.FROZEN)
PLAIN = "hot.freeze(model, 4)"
CODED = {f"x in {bits} bits": recipe for bits, recipe in ((4, "default"), (8, "accurate"))}
"""Recipes of the layers ``lora_A``, by the form of the adapters on ``PLAIN``."""
SEEDS = (0, 1, 2)
RATE = 2e-3
SIZE = bench_gpt.Size(128, 2, 4, 128, 16, 256, 3e-3, 60, 20)
TOKENS_PER_PARAMETER = 20
CLASSES, MASKED, HELD = 20, 0.15, 20
"""Modules of ``bert``, share of masked tokens, batches that are held back."""
Batch = tuple[Tensor, Tensor]


@dataclasses.dataclass(frozen=True)
class Task:
    """A model that maps tokens to logits, and its text: rows of tokens, and their targets."""

    model: nn.Module
    names: list[str]
    """Layers of the base."""
    training: Batch
    held: Batch
    batch: int
    steps: int
    before: Batch | None = None
    """Text that was held back from the model's own training."""

    def batches(self, seed: int) -> Iterator[Batch]:
        """Rows in an order that ``seed`` draws."""
        ids, targets = self.training
        order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(seed))
        for rows in itertools.islice(order.split(self.batch), self.steps):
            yield ids[rows].long(), targets[rows].long()


class Headed(nn.Module):
    """An encoder with a new head, for each token or for the mean over them."""

    def __init__(self, encoder: nn.Module, features: int, classes: int, mean: bool) -> None:
        super().__init__()
        self.encoder, self.mean = encoder, mean
        self.head = nn.Linear(features, classes)
        nn.init.zeros_(self.head.weight)

    def forward(self, ids: Tensor) -> Tensor:
        """``ids [batch, tokens]`` to logits."""
        hidden = self.encoder(input_ids=ids).last_hidden_state
        logits: Tensor = self.head(hidden.mean(1) if self.mean else hidden)
        return logits


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def linears(model: nn.Module) -> list[str]:
    """Names of the linear layers in the blocks."""
    named = model.named_modules()
    return [n for n, m in named if isinstance(m, nn.Linear) and "head" not in n]


# ---- tasks ----


def _split(ids: Tensor, targets: Tensor, batch: int) -> tuple[Batch, Batch]:
    """Rows for training, and those that are held back: the last."""
    held = HELD * batch
    return (ids[:-held], targets[:-held]), (ids[-held:], targets[-held:])


def _windows(files: Sequence[Path], size: bench_gpt.Size) -> tuple[Batch, Batch]:
    """Windows of the files' bytes, each with the next bytes as targets."""
    content = bytearray(b"".join(file.read_bytes() for file in files))
    text = torch.frombuffer(content, dtype=torch.uint8)
    count = (len(text) - 1) // size.context * size.context
    rows = [part.view(-1, size.context) for part in (text[:count], text[1 : count + 1])]
    return _split(rows[0], rows[1], size.batch)


def gpt(quick: bool) -> Task:
    """The decoder, trained on sources; adapters learn descriptions."""
    size = dataclasses.replace(SIZE, depth=1, context=32, batch=4) if quick else SIZE
    paths, draw = sysconfig.get_paths(), random.Random(0)
    skipped = {"site-packages", "test", "tests"}
    files = sorted(p for p in Path(paths["stdlib"]).rglob("*.py") if not skipped & {*p.parts})
    others = sorted(Path(paths["purelib"]).glob("*.dist-info/METADATA"))
    for each in (files, others):
        draw.shuffle(each)
    steps = math.ceil(TOKENS_PER_PARAMETER * size.parameters / (size.batch * size.context))
    sources, before = _windows(files[:20] if quick else files, size)
    plain = Task(nn.Module(), [], sources, before, size.batch, 3 if quick else steps)
    digest = f"{bench_base.digest_of(*sources)}-{torch.__version__}"
    model = pretrained(size, plain, None if quick else ROOT / f"build/bench_lora-{digest}.pt")
    other, held = _windows(others, size)
    return Task(model, linears(model), other, held, size.batch, 2 if quick else 200, before)


def pretrained(size: bench_gpt.Size, text: Task, cache: Path | None) -> nn.Module:
    """The decoder, trained on a text; its state is in ``cache``."""
    torch.manual_seed(0)
    model = bench_gpt.model_of(size, Contender("fp32"), "cpu", None)
    optimizer = bench_gpt.optimizer_of(list(model.parameters()), graph=False)
    done, batches = 0, list(text.batches(0))
    if len(batches) < text.steps:
        raise ValueError(f"text: {len(batches)} batches of sources; expected {text.steps}")
    if cache is not None and cache.exists():
        done, *states = torch.load(cache, weights_only=True)
        for each, state in zip((model, optimizer), states, strict=True):
            each.load_state_dict(state)
    for step, (ids, targets) in enumerate(batches[done:], done + 1):
        rate = size.learning_rate * bench_gpt.rate(step - 1, text.steps, size)
        loss = stepped(model, optimizer, rate, ids, targets)
        if cache is not None and (step % 500 == 0 or step == text.steps):
            print(f"step {step} of {text.steps}, loss {float(loss):.3f}", flush=True)
            content = (step, model.state_dict(), optimizer.state_dict())
            timing.write_whole(cache, functools.partial(torch.save, content))
    return model


def stepped(
    model: nn.Module, optimizer: torch.optim.Optimizer, rate: float, ids: Tensor, targets: Tensor
) -> Tensor:
    """Train one step at a learning rate. Returns the loss."""
    bench_gpt.set_rate(optimizer, rate)
    (loss,) = bench_gpt.update(optimizer, [cross_entropy(model(ids), targets)], 1)
    return loss


def bert(quick: bool) -> Task:
    """The BERT learns from which module a text comes."""
    library = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(library.glob("*.py"), key=lambda path: -path.stat().st_size)[:CLASSES]
    encode, length, rows = bench_base.bert_encoder(), bench_base.LENGTH, []
    for file in files:
        ids = encode(file.read_text("utf-8"))
        rows.append(torch.tensor(ids[: len(ids) // length * length]).view(-1, length))
    labels = torch.arange(CLASSES).repeat_interleave(torch.tensor([len(part) for part in rows]))
    model, _ = bench_base.bert()
    return _encoder(Headed(model, 384, CLASSES, mean=True), torch.cat(rows), labels, quick)


def albert(quick: bool) -> Task:
    """The ALBERT learns masked tokens of molecules."""
    model, texts = bench_base.albert(count=1000)
    ids = texts["molecules"]
    words = (bench_base.fetch() / "albert/vocab.txt").read_text("utf-8").split("\n")
    masked = torch.rand(ids.shape, generator=torch.Generator().manual_seed(0)) < MASKED
    targets = ids.where(masked, -100)
    ids = ids.masked_fill(masked, words.index("[MASK]"))
    return _encoder(Headed(model, 256, len(words), mean=False), ids, targets, quick)


def _encoder(model: Headed, ids: Tensor, targets: Tensor, quick: bool) -> Task:
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))
    training, held = _split(ids[order], targets[order], 8)
    return Task(model, linears(model), training, held, 8, 2 if quick else 100)


TASKS: dict[str, Callable[[bool], Task]] = {"gpt": gpt, "bert": bert, "albert": albert}


# ---- forms and losses ----


def based(task: Task, form: str) -> nn.Module:
    """A copy of the model with its base in a form."""
    form = PLAIN if form in CODED else form
    model = copy.deepcopy(task.model).requires_grad_(False)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    if form in bench_base.FROZEN:
        bits, measured = bench_base.FROZEN[form]
        config = hot.HotConfig(forward="int8", forward_in_eval=True)
        hot.convert(model, config, filter_fn=lambda _, name: name in task.names)
        inputs = [ids.long() for ids in task.training[0][:32].split(8)] if measured else None
        return hot.freeze(model, bits, inputs=inputs)
    for name in task.names:
        weight = model.get_parameter(f"{name}.weight")
        nf4 = form == bench_base.BASELINE
        weight.data = bench_base.nf4(weight.data, True) if nf4 else weight.data.bfloat16().float()
    return model


def tuned(task: Task, base: nn.Module, seed: int, recipe: str | None = None) -> float:
    """Loss after LoRA; ``recipe`` is that of the layers ``lora_A``."""
    peft = importlib.import_module("peft")
    torch.manual_seed(seed)
    lora = peft.LoraConfig(r=16, lora_alpha=32, target_modules=task.names)
    model = peft.get_peft_model(copy.deepcopy(base), lora).train()
    if recipe is not None:
        hot.convert(model, recipe, filter_fn=lambda _, name: ".lora_A." in name)
    if isinstance(task.model, Headed):
        model.base_model.model.head.requires_grad_(True)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, weight_decay=0.0)
    for step, batch in enumerate(task.batches(seed)):
        stepped(model, optimizer, RATE * (1 - step / task.steps), *batch)
    return loss_of(model, task.held, task.batch)


def logits_of(model: nn.Module, text: Batch, batch: int) -> Tensor:
    """Logits of a text."""
    with torch.no_grad():
        return torch.cat([model.eval()(ids.long()) for ids in text[0].split(batch)])


def loss_of(model: nn.Module, text: Batch, batch: int) -> float:
    """Mean cross entropy on a text."""
    return float(cross_entropy(logits_of(model, text, batch), text[1].long()))


def measured(
    task: Task, forms: Sequence[str], rows: dict[str, Any], seeds: Sequence[int], write: Any
) -> None:
    """Add to ``rows`` what they lack: by form, losses before LoRA and those by seed after it."""
    for form in forms:
        row = rows.setdefault(form, {"loss": {}})
        base = based(task, form)
        if task.before is not None and "kl" not in row:
            logs, exact = (
                F.log_softmax(logits_of(each, task.before, task.batch), -1)
                for each in (base, task.model)
            )
            kl = F.kl_div(logs.flatten(0, 1), exact.flatten(0, 1), log_target=True,
                          reduction="batchmean")  # fmt: skip
            row |= {"kl": float(kl), "before": loss_of(base, task.before, task.batch)}
            row["other before"] = loss_of(base, task.held, task.batch)
        for seed in seeds:
            if str(seed) not in row["loss"]:
                row["loss"][str(seed)] = tuned(task, base, seed, CODED.get(form))
                print(f"{form}, seed {seed}: {row['loss'][str(seed)]:.4f}", flush=True)
                write()


def main(argv: Sequence[str] | None = None) -> int:
    """Measure every form in every task, print the differences and write the report."""
    parser = timing.error_arguments(__doc__, "base-lora[-adapters]", "quick")
    parser.add_argument("tasks", nargs="*", choices=[[], *TASKS], help="default: all")
    parser.add_argument("--adapters", action="store_true", help="forms of the adapters")
    args = parser.parse_args(argv)
    args.json = timing.path_of(args, "base-lora-adapters" if args.adapters else "base-lora")
    mend_torchvision()
    torch.set_num_threads(1)
    report = timing.begun(args.json, "base-lora", {}, "tasks")
    forms = (PLAIN, *CODED) if args.adapters else FORMS
    for name in args.tasks or (["gpt"] if args.quick else TASKS):
        rows, task = report["tasks"].setdefault(name, {}), TASKS[name](args.quick)
        bench_base.keep_text(report, name, *task.training, *task.held)
        write = functools.partial(timing.write_json, args.json, report)
        measured(task, forms, rows, SEEDS[:2] if args.quick else SEEDS, write)
        for form in forms[1:]:
            print(name, form, doc_tables.lora_gap(rows, form, forms[0]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
