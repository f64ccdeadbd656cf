"""Contenders of the benchmarks of whole models, and a model with its optimizer."""

from __future__ import annotations

import contextlib
import copy
import gc
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import hotcore.torch as hot
import torch
from evidence import rivals
from hotcore.torch.conversion.report import ConversionReport
from models import Batch, Task
from torch import Tensor, nn

RECIPES = ("default", "fast", "paper", "accurate")
LEARNING_RATE = 1e-4


@dataclass(frozen=True)
class Contender:
    """Settings by which a model trains."""

    name: str
    recipe: str | None = None
    """Recipe of HOT, or None for a plain model."""
    autocast: bool = False
    compiled: str | None = None
    """Mode of torch.compile, such as "default" or "reduce-overhead"; None for eager."""
    memory_budget: float = 1.0
    """Value of torch.compile's activation_memory_budget: the share of activations that its
    partitioner may keep for backward."""
    checkpointed: bool = False
    """Whether every block is recomputed in backward (torch.utils.checkpoint)."""
    attention_kept: bool = False
    """Whether ``checkpointed`` keeps attention's results (hot.policies.keep_attention)."""
    first: float = 1.0
    """Share of the blocks that are ``checkpointed``, from the first on. Backward reaches them last,
    when the other blocks have freed their activations."""
    fp8: str | None = None
    """Recipe of torchao: "tensorwise", "rowwise" or "rowwise_with_gw_hp"."""
    int8_torchao: bool = False
    """Whether torchao's INT8 mixed-precision training runs (a prototype)."""
    liger: bool = False
    """Whether Liger-Kernel's norms, rotary embedding, gated MLP, and head with loss run."""
    slower: bool = True
    """Value of convert's ``slower``: also converts layers that its filter expects to be slower."""
    forward: str = "plain"
    """Forward of HOT, "plain" or "int8"."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Fields of HotConfig that differ from the recipe's."""
    wide: bool = False
    """Whether only convolutions larger than 1x1 are converted, without the first."""
    frozen: str = ""
    """Form of the base's weights: "int8" or "int4" (hot.freeze), or one of ``NF4``."""
    adapters: str | None = None
    """Recipe of HOT for the adapters' layers ``lora_A``, or None for plain adapters."""
    head: str = ""
    """Value of convert's ``head``, also for plain models: "torch" (its products) or a recipe."""
    wire: str = ""
    """Form on the wire between processes: gradients as "int8" (hot.int8_gradients), "bf16" or
    "powersgd"; "int8 weights" (hot.int8_weights); "int8 both" of these."""
    whole: bool = False
    """Whether the model is compiled as a whole with head and loss, not block by block."""


NF4 = {
    "nf4": "NF4 of bitsandbytes, its scales quantised",
    "nf4 fp32": "NF4 of bitsandbytes, its scales in fp32",
    "nf4 torchao": "NF4Tensor of torchao",
}
"""Rivals' forms of a frozen base, and their words."""


class Left(Exception):
    """Reason to leave out a contender: a library or machine that it needs is missing."""


BUDGETS = (0.7, 0.5, 0.3, 0.2)
"""Values of activation_memory_budget for bf16, by which plain torch trades time for memory."""

REFERENCE = "bf16 compiled"
"""Contender that the others are compared with."""
HOWS = ("compiled", "reduce-overhead")

_KEEP: dict[str, Any] = {"checkpointed": True, "attention_kept": True}
PHRASES: dict[str, dict[str, Any]] = {
    "fp32": {"autocast": False, "slower": True}, "bf16": {}, "LoRA": {"autocast": True},
    **{recipe: {"recipe": recipe} for recipe in RECIPES},
    "int8-forward": {"forward": "int8"}, "plain forward": {"forward": "plain"},
    **{f"FP8 {name}": {"fp8": name} for name in ("tensorwise", "rowwise", "rowwise_with_gw_hp")},
    "gathered in FP8": {"fp8": "gathered"}, "torchao INT8": {"int8_torchao": True},
    "frozen int8": {"recipe": "default", "forward": "int8", "frozen": "int8"},
    "frozen int4": {"recipe": "default", "forward": "int8", "frozen": "int4"},
    **{f"frozen {form}": {"frozen": form} for form in NF4},
    "x of adapters in 8 bits": {"adapters": "accurate"},
    "eager": {}, "compiled": {"compiled": "default"}, "whole": {"whole": True},
    **{mode: {"compiled": mode} for mode in ("reduce-overhead", "max-autotune")},
    **{f"budget {share}": {"memory_budget": share} for share in BUDGETS},
    "checkpointed": {"checkpointed": True}, "recomputed": {"checkpointed": True},
    "nothing recomputed": {}, "attention kept": _KEEP,
    "attention kept in three quarters": _KEEP | {"first": 0.75},
    "attention kept in half": _KEEP | {"first": 0.5},
    "an eighth of the blocks recomputed": _KEEP | {"first": 0.125},
    "head": {"head": "torch"}, "8-bit head": {"head": "accurate"}, "Liger": {"liger": True},
    "all layers": {"slower": True}, "k x k alone": {"wide": True},
    "equalised": {"settings": {"equalize_tokens": True}},
    "INT8 gradients": {"wire": "int8"}, "INT8 weights": {"wire": "int8 weights"},
    "INT8 weights and gradients": {"wire": "int8 both"},
    "bf16_compress_hook": {"wire": "bf16"}, "PowerSGD": {"wire": "powersgd"},
}  # fmt: skip
"""Fields of a contender by the phrases of its name."""


def fields_of(name: str) -> dict[str, Any]:
    """Join the fields of the phrases of a name, which a space or a comma separates.

    The longest phrase that fits counts. Raises ValueError for words that are no phrase.
    """
    out: dict[str, Any] = {}
    rest = name
    while rest:
        fitting = [p for p in PHRASES if f"{rest} ".startswith((f"{p} ", f"{p},"))]
        if not fitting:
            raise ValueError(f"name: {name!r} has {rest!r}; expected one of {list(PHRASES)}")
        phrase = max(fitting, key=len)
        out |= PHRASES[phrase]
        rest = rest[len(phrase) :].lstrip(", ")
    return out


def by_name(name: str, **base: Any) -> Contender:
    """Make the contender that a name describes; ``base`` has fields that the name leaves open."""
    return Contender(name, **base | fields_of(name))


def people(task: Task) -> list[Contender]:
    """List contenders by importance, because a run out of time leaves out the last.

    All except "fp32 eager" run under bf16 autocast, with fp32 weights.
    """
    if task.channels_last:
        modes = (*HOWS, "eager")
        names = [f"bf16 {how}" for how in modes]
        names += [f"default {how}{layers}" for layers in ("", ", k x k alone") for how in modes]
        return [
            by_name(name, autocast=True, slower=name.startswith("default"))
            for name in (*names, "bf16 compiled, budget 0.5")
        ]
    names = [
        REFERENCE, "default compiled", "fast compiled",
        "bf16 reduce-overhead", "default reduce-overhead", "bf16 eager", "default eager",
        "FP8 tensorwise compiled",
        *(f"{recipe} int8-forward {how}" for how in HOWS for recipe in ("default", "fast")),
        *(f"bf16 {how}, budget {budget}" for how in HOWS for budget in BUDGETS),
        "fast reduce-overhead", "FP8 rowwise compiled", "fast eager",
        *(f"bf16 {how}, attention kept" for how in HOWS),
        "FP8 tensorwise reduce-overhead",
        *(f"default int8-forward {how}, budget 0.5" for how in HOWS),
        *(f"default int8-forward {how}, attention kept" for how in HOWS),
        *(_with_heads() if task.has_head else ()),
        *_in_some_blocks(),
        "default int8-forward compiled, equalised", "bf16 max-autotune",
        "FP8 rowwise_with_gw_hp compiled", *(f"torchao INT8 {how}" for how in HOWS),
        *(["bf16 compiled, Liger"] if task.liger else ()),
        "bf16 checkpointed", "bf16 checkpointed, compiled",
        "fp32 eager",
    ]  # fmt: skip
    # Convolutions have no blocks, and convert leaves them plain on CUDA by default.
    names += [] if task.blocks else ["default compiled, all layers"]
    chosen = [by_name(name, autocast=True, slower=False) for name in names]
    if not task.blocks:
        chosen = [c for c in chosen if not c.checkpointed]
    if task.peak_gib >= 16 or task.frozen:
        # Steps of seconds; such models are not trained in fp32. LoRA has bf16 weights.
        chosen = [c for c in chosen if c.autocast]
    if task.frozen:  # without g_w recipes are equal, and FP8 has no layer to train
        chosen = [c for c in chosen if c.recipe in (None, "default") and not _of_torchao(c)]
        names = [f"frozen {form} {how}" for form in ("int8", "int4") for how in HOWS]
        names += ["frozen int8, plain forward, compiled"]
        names += [f"frozen {form} compiled" for form in NF4]
        chosen += [by_name(name, autocast=True, slower=False) for name in names]
    return chosen


def _of_torchao(contender: Contender) -> bool:
    return contender.fp8 is not None or contender.int8_torchao


def _in_some_blocks() -> Iterator[str]:
    """Name contenders that keep attention in some of the blocks only."""
    for how, recipes in zip(HOWS, (["default"], ["default", "fast"]), strict=True):
        for share in ("three quarters", "half"):
            for plain_or_hot in ("bf16", *(f"{recipe} int8-forward" for recipe in recipes)):
                yield f"{plain_or_hot} {how}, attention kept in {share}"


def _with_heads() -> Iterator[str]:
    """Name contenders with chunked logits, and plain torch's best against them."""
    yield "bf16 compiled whole"
    for how in HOWS:
        yield f"bf16 {how}, head"
        yield f"default int8-forward {how}, head"
        yield f"default int8-forward {how}, 8-bit head"
    yield "bf16 compiled, attention kept, head"
    yield "default int8-forward compiled, attention kept, 8-bit head"


def config_of(contender: Contender) -> hot.HotConfig:
    """Return the configuration of a contender with a recipe."""
    assert contender.recipe is not None
    settings = {"forward": contender.forward, **contender.settings}
    return hot.HotConfig.recipe(contender.recipe, **settings)


def convert(model: nn.Module, contender: Contender, batch: Batch | None = None) -> nn.Module:
    """Convert the layers, and the head if the contender has one.

    The default filter takes the number of tokens from ``batch``.
    """
    head: bool | hot.HotConfig = contender.head == "torch"
    if contender.head and not head:
        head = hot.HotConfig.recipe(contender.head, forward="int8")
    if contender.frozen in NF4:
        freeze(model, contender)
    if contender.recipe is None:
        return hot.convert(model, filter_fn=lambda *_: False, head=head)
    config = config_of(contender)
    only = _wide if contender.wide else None
    slower, x = contender.slower, (batch or {}).get("x")
    tokens_or_images = contender.autocast and x is not None and x.dim() != 3  # no embeddings
    inputs = x if tokens_or_images and not slower else None
    model = hot.convert(model, config, only, inputs=inputs, slower=slower, head=head)
    if contender.frozen:
        freeze(model, contender)
        print(model.freeze_report)
    return model


def freeze(model: nn.Module, contender: Contender) -> None:
    """Freeze the base in the contender's form. Raises Left.

    NF4 replaces every linear layer that is not trained, as QLoRA does.
    """
    form = contender.frozen
    if form not in NF4:
        hot.freeze(model, 4 if form == "int4" else 8)
        return
    for parent in [*model.modules()]:
        for name, linear in [*parent.named_children()]:
            if not isinstance(linear, nn.Linear) or linear.weight.requires_grad:
                continue
            if form == "nf4 torchao":
                linear.weight = rivals.torchao_nf4(linear.weight.detach())
            else:
                setattr(parent, name, _of_bitsandbytes(linear, form == "nf4"))


def _imported(module: str, library: str) -> Any:
    """Import a module of another library. Raises Left."""
    try:
        return importlib.import_module(module)
    except ImportError as missing:
        raise Left(f"{library} does not import: {missing}") from missing


def _of_bitsandbytes(linear: nn.Linear, double: bool) -> nn.Module:
    """Make bitsandbytes' layer. Raises Left."""
    layers = _imported("bitsandbytes.nn", "bitsandbytes")
    form: dict[str, Any] = {"quant_type": "nf4", "compress_statistics": double}
    sizes, weight = (linear.in_features, linear.out_features), linear.weight.detach()
    biased = linear.bias is not None
    new: nn.Module = layers.Linear4bit(*sizes, biased, torch.bfloat16, **form, device="meta")
    new.weight = layers.Params4bit(weight, requires_grad=False, module=new, **form)
    new.bias = linear.bias
    return new.to(weight.device)  # which quantises


def _wide(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.Conv2d) and module.kernel_size != (1, 1) and module.in_channels > 3


def torchao_converted(model: nn.Module, contender: Contender, emulate: bool) -> None:
    """Convert the layers that HOT could convert by torchao. Raises Left."""
    report = hot.convert(model, "default", slower=True).hot_report
    names = {layer.name for layer in report.converted}
    hot.revert(model)
    try:
        if contender.fp8 is None:
            rivals.torchao_int8_convert(model, names)
        else:
            rivals.torchao_convert(model, contender.fp8, names, emulate)
    except rivals.TorchaoMissing as missing:
        raise Left(str(missing)) from missing


def liger_converted(model: nn.Module) -> None:
    """Let Liger-Kernel replace layers of a transformers model in place. Raises Left."""
    package = _imported("liger_kernel.transformers.monkey_patch", "Liger-Kernel")
    # Liger's loss replaces the head, which models of blocks alone do not have.
    head = hasattr(model, "lm_head")
    package._apply_liger_kernel_to_instance(model=model, fused_linear_cross_entropy=head)


def blocks_of(model: nn.Module, path: str) -> dict[str, nn.Module]:
    """Return the blocks by fully qualified name. Raises ValueError without such a list."""
    for name, module in model.named_modules():
        if name == path or name.endswith(f".{path}"):
            return {f"{name}.{index}": block for index, block in module.named_children()}
    raise ValueError(f"model: has no blocks at {path!r}")


def checkpoint_blocks(model: nn.Module, path: str, contender: Contender) -> None:
    """Recompute the blocks' activations in backward, with or without attention's results."""
    blocks = list(blocks_of(model, path).values())
    policy = hot.policies.keep_attention if contender.attention_kept else None
    hot.recompute(blocks[: round(contender.first * len(blocks))], policy)


def compile_all(modules: Iterable[nn.Module], mode: str, backend: str) -> None:
    """Compile modules in place. Backends other than inductor have no modes."""
    for module in modules:
        module.compile(backend=backend, mode=mode if backend == "inductor" else None)


class Trainer:
    """Copy of a model with its optimizer and step."""

    def __init__(
        self,
        contender: Contender,
        model: nn.Module,
        batch: Batch,
        task: Task,
        *,
        in_place: bool = False,
        backend: str = "inductor",
    ) -> None:
        """Copy ``model`` to the device of ``batch``; convert, checkpoint and compile the copy.

        ``in_place`` changes ``model`` itself. ``task`` gives the loss and the name of the blocks.
        Raises Left if something that the contender needs is missing.
        """
        self.contender, self._batch, self._task = contender, batch, task
        self.device = next(iter(batch.values())).device
        model = (model if in_place else copy.deepcopy(model)).to(self.device).train()
        if task.channels_last:
            last = torch.channels_last
            model = model.to(memory_format=last)  # type: ignore[call-overload]
            images = {n: t.contiguous(memory_format=last) for n, t in batch.items() if t.dim() == 4}
            self._batch = {**batch, **images}
        self.report: ConversionReport | None = None
        if _of_torchao(contender):  # reverts converted layers
            torchao_converted(model, contender, emulate=self.device.type == "cpu")
        if contender.liger:
            liger_converted(model)
        if contender.recipe is not None or contender.head:
            with autocast(contender, self.device):
                model = convert(model, contender, self._batch)
            self.report = model.hot_report
        if contender.checkpointed:
            checkpoint_blocks(model, task.blocks, contender)
        if contender.compiled is not None:
            apart = task.blocks and not contender.whole
            parts = blocks_of(model, task.blocks) if apart else {"": model}
            compile_all(parts.values(), contender.compiled, backend)
        self.wrap(model)

    def wrap(self, model: nn.Module) -> None:
        """Set the converted and compiled ``model`` and its optimizer."""
        self.model = model
        # Fused on CUDA, as in transformers' Trainer. Otherwise AdamW takes a fifth of the step.
        fused = self.device.type == "cuda"
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=fused)

    def loss(self) -> Tensor:
        """Run the forward pass and return the loss."""
        with autocast(self.contender, self.device):
            return self._task.loss(self.model, self._batch)

    def step(self) -> Tensor:
        """Run zero_grad, forward, backward and AdamW. Returns the loss."""
        _exact_products()
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients by their parameters' names."""
        _exact_products()
        self.optimizer.zero_grad(set_to_none=True)
        self.loss().backward()
        named = self.model.named_parameters()
        return {name: p.grad for name, p in named if p.grad is not None}


def autocast(contender: Contender, device: torch.device) -> Any:
    if not contender.autocast:
        return contextlib.nullcontext()
    return torch.autocast(device.type, torch.bfloat16)


def _exact_products() -> None:
    """Switch TF32 off."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False


def cosine(got: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> float:
    """Return the cosine of two gradients of all parameters, summed in float64."""
    sums = torch.zeros(3, dtype=torch.float64, device=next(iter(exact.values())).device)
    for name, b in exact.items():
        a, b = got[name].double().flatten(), b.double().flatten()
        sums += torch.stack([a @ b, a @ a, b @ b])
    product, left, right = sums.tolist()
    return float(product / (left * right) ** 0.5) if left * right else float("nan")


@contextlib.contextmanager
def cleaned(device: str) -> Iterator[None]:
    """Free the device's memory afterwards."""
    try:
        yield
    finally:
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()


def of_a_whole_model() -> tuple[Contender, ...]:
    """List bench_8b.py's contenders by importance: a run out of time leaves out the last."""
    names = (
        "default int8-forward, attention kept", "bf16, attention kept",
        "FP8 tensorwise, attention kept", "default int8-forward",
        "LoRA frozen int8, attention kept", "LoRA bf16, attention kept",
        "LoRA frozen int4, attention kept",
        *(f"LoRA frozen {form}, attention kept" for form in NF4),
        "LoRA frozen int4, nothing recomputed", "LoRA frozen int4, x of adapters in 8 bits",
        "LoRA frozen int4, an eighth of the blocks recomputed",
        "bf16", "FP8 tensorwise", "bf16, recomputed", "default int8-forward, recomputed",
        "default int8-forward, attention kept, 8-bit head", "FP8 rowwise, attention kept",
        "FP8 tensorwise, recomputed",
    )  # fmt: skip
    base: dict[str, Any] = {"compiled": "default", "head": "torch", "slower": False}
    return tuple(by_name(name, **base) for name in names)


Make = Callable[[Contender], Trainer]
