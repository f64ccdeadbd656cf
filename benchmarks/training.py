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
    shared: bool = True
    """Whether layers with one x keep it once (hot.share_inputs)."""
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


def people(task: Task) -> list[Contender]:
    """List contenders by importance, because a run out of time leaves out the last.

    All except "fp32 eager" run under bf16 autocast, with fp32 weights.
    """

    def one(name: str, recipe: str | None = None, **options: Any) -> Contender:
        return Contender(name, recipe, autocast=True, **({"slower": False} | options))

    compiled: dict[str, Any] = {"compiled": "default"}
    graphs: dict[str, Any] = {"compiled": "reduce-overhead"}
    if task.channels_last:
        kinds: dict[str, dict[str, Any]] = {
            "default {}": {},
            "default {}, k x k alone": {"wide": True},
        }
        modes = {"compiled": compiled, "reduce-overhead": graphs, "eager": {}}
        return [
            *(one(f"bf16 {how}", **more) for how, more in modes.items()),
            *(
                one(name.format(how), "default", slower=True, **options, **more)
                for name, options in kinds.items()
                for how, more in modes.items()
            ),
            one("bf16 compiled, budget 0.5", memory_budget=0.5, **compiled),
        ]
    again: dict[str, Any] = {"checkpointed": True, "attention_kept": True}
    equalised: dict[str, Any] = {"settings": {"equalize_tokens": True}, **compiled}
    chosen = [
        one(REFERENCE, **compiled),
        one("default compiled", "default", **compiled),
        one("fast compiled", "fast", **compiled),
        one("bf16 reduce-overhead", **graphs),
        one("default reduce-overhead", "default", **graphs),
        one("bf16 eager"),
        one("default eager", "default"),
        one("FP8 tensorwise compiled", fp8="tensorwise", **compiled),
        one("default int8-forward compiled", "default", forward="int8", **compiled),
        one("fast int8-forward compiled", "fast", forward="int8", **compiled),
        one("default int8-forward reduce-overhead", "default", forward="int8", **graphs),
        one("fast int8-forward reduce-overhead", "fast", forward="int8", **graphs),
        *(
            one(f"bf16 {how}, budget {budget}", memory_budget=budget, **mode)
            for how, mode in (("compiled", compiled), ("reduce-overhead", graphs))
            for budget in BUDGETS
        ),
        one("fast reduce-overhead", "fast", **graphs),
        one("FP8 rowwise compiled", fp8="rowwise", **compiled),
        one("fast eager", "fast"),
        one("bf16 compiled, attention kept", **again, **compiled),
        one("bf16 reduce-overhead, attention kept", **again, **graphs),
        one("FP8 tensorwise reduce-overhead", fp8="tensorwise", **graphs),
        *(
            one(f"default int8-forward {how}", "default", forward="int8", **more)
            for how, more in (
                ("compiled, budget 0.5", {"memory_budget": 0.5, **compiled}),
                ("reduce-overhead, budget 0.5", {"memory_budget": 0.5, **graphs}),
                ("compiled, attention kept", again | compiled),
                ("reduce-overhead, attention kept", again | graphs),
            )
        ),
        *(_with_heads(one, compiled, graphs, again) if task.has_head else ()),
        *_in_some_blocks(one, compiled, graphs),
        one("default int8-forward compiled, equalised", "default", forward="int8", **equalised),
        one("bf16 max-autotune", compiled="max-autotune"),
        one("FP8 rowwise_with_gw_hp compiled", fp8="rowwise_with_gw_hp", **compiled),
        one("torchao INT8 compiled", int8_torchao=True, **compiled),
        one("torchao INT8 reduce-overhead", int8_torchao=True, **graphs),
        *([one("bf16 compiled, Liger", liger=True, **compiled)] if task.liger else ()),
        one("bf16 checkpointed", checkpointed=True),
        one("default eager, not shared", "default", shared=False),
        one("bf16 checkpointed, compiled", checkpointed=True, **compiled),
        Contender("fp32 eager"),
    ]
    if not task.blocks:  # convolutions, which convert leaves plain on CUDA by default
        chosen = [contender for contender in chosen if not contender.checkpointed]
        chosen.append(one("default compiled, all layers", "default", slower=True, **compiled))
    if task.peak_gib >= 16:  # steps of seconds, and such models are not trained in fp32
        chosen = [contender for contender in chosen if contender.autocast]
    if task.frozen:  # without g_w recipes are equal, and FP8 has no layer to train
        chosen = [c for c in chosen if c.recipe in (None, "default") and not _of_torchao(c)]
        chosen = [c for c in chosen if c.autocast]  # bf16 weights and fp32 inputs
        for form in ("int8", "int4"):
            chosen += [
                one(f"frozen {form} {name}", "default", forward="int8", frozen=form, **how)
                for name, how in (("compiled", compiled), ("reduce-overhead", graphs))
            ]
        chosen += [
            one("frozen int8, plain forward, compiled", "default", frozen="int8", **compiled),
            *(one(f"frozen {form} compiled", frozen=form, **compiled) for form in NF4),
        ]
    return chosen


def _of_torchao(contender: Contender) -> bool:
    return contender.fp8 is not None or contender.int8_torchao


def _in_some_blocks(
    one: Callable[..., Contender], compiled: dict[str, Any], graphs: dict[str, Any]
) -> list[Contender]:
    """List contenders that keep attention in some of the blocks only."""
    chosen = []
    for how, mode, recipes in (
        ("compiled", compiled, ["default"]),
        ("reduce-overhead", graphs, ["default", "fast"]),
    ):
        for share, words in ((0.75, "three quarters"), (0.5, "half")):
            some = {"checkpointed": True, "attention_kept": True, "first": share, **mode}
            name = f"{how}, attention kept in {words}"
            chosen.append(one(f"bf16 {name}", **some))
            chosen += [
                one(f"{recipe} int8-forward {name}", recipe, forward="int8", **some)
                for recipe in recipes
            ]
    return chosen


def _with_heads(
    one: Callable[..., Contender],
    compiled: dict[str, Any],
    graphs: dict[str, Any],
    again: dict[str, Any],
) -> list[Contender]:
    """List contenders with chunked logits, and plain torch's best against them."""
    hot8: dict[str, Any] = {"recipe": "default", "forward": "int8"}
    chosen = [one("bf16 compiled whole", whole=True, **compiled)]
    for how, mode in (("compiled", compiled), ("reduce-overhead", graphs)):
        chosen += [
            one(f"bf16 {how}, head", head="torch", **mode),
            one(f"default int8-forward {how}, head", head="torch", **hot8, **mode),
            one(f"default int8-forward {how}, 8-bit head", head="accurate", **hot8, **mode),
        ]
    name = "default int8-forward compiled, attention kept, 8-bit head"
    chosen.append(one("bf16 compiled, attention kept, head", head="torch", **again, **compiled))
    return [*chosen, one(name, head="accurate", **hot8, **again, **compiled)]


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


def _of_bitsandbytes(linear: nn.Linear, double: bool) -> nn.Module:
    """Make bitsandbytes' layer. Raises Left."""
    try:
        layers = importlib.import_module("bitsandbytes.nn")
    except ImportError as missing:
        raise Left(f"bitsandbytes does not import: {missing}") from missing
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
    try:
        package = importlib.import_module("liger_kernel.transformers.monkey_patch")
    except ImportError as missing:
        raise Left(f"Liger-Kernel does not import: {missing}") from missing
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

        Args:
            contender: settings of the training.
            model: plain model.
            batch: batch of every step.
            task: gives the loss and the name of the blocks.
            in_place: whether to change ``model`` itself instead of a copy.
            backend: backend of torch.compile.

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
        with autocast(self.contender, self.device), hot.share_inputs(self.contender.shared):
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

    def one(name: str, **options: Any) -> Contender:
        options = {"compiled": "default", "head": "torch", "slower": False} | options
        return Contender(name, **options)

    again: dict[str, Any] = {"checkpointed": True}
    keep: dict[str, Any] = {**again, "attention_kept": True}
    hot8: dict[str, Any] = {"recipe": "default", "forward": "int8"}
    lora: dict[str, Any] = {"autocast": True, **keep}
    return (
        one("default int8-forward, attention kept", **hot8, **keep),
        one("bf16, attention kept", **keep),
        one("FP8 tensorwise, attention kept", fp8="tensorwise", **keep),
        one("default int8-forward", **hot8),
        one("LoRA frozen int8, attention kept", **hot8, **lora, frozen="int8"),
        one("LoRA bf16, attention kept", **lora),
        one("LoRA frozen int4, attention kept", **hot8, **lora, frozen="int4"),
        *(one(f"LoRA frozen {form}, attention kept", **lora, frozen=form) for form in NF4),
        *(
            one(f"LoRA frozen int4, {how}", **hot8, autocast=True, frozen="int4", **more)
            for how, more in (
                ("nothing recomputed", {}),
                ("x of adapters in 8 bits", {"adapters": "accurate"}),
                ("an eighth of the blocks recomputed", {**keep, "first": 0.125}),
            )
        ),
        one("bf16"),
        one("FP8 tensorwise", fp8="tensorwise"),
        one("bf16, recomputed", **again),
        one("default int8-forward, recomputed", **hot8, **again),
        one("default int8-forward, attention kept, 8-bit head", **hot8, **keep, head="accurate"),
        one("FP8 rowwise, attention kept", fp8="rowwise", **keep),
        one("FP8 tensorwise, recomputed", fp8="tensorwise", **again),
    )


Make = Callable[[Contender], Trainer]
