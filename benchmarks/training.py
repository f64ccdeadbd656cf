"""How the benchmarks of whole models train: the contenders, and a model with its optimizer."""

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
from hotcore.torch.report import ConversionReport
from models import Batch, Task
from torch import Tensor, nn

RECIPES = ("default", "fast", "paper", "accurate")
LEARNING_RATE = 1e-4


@dataclass(frozen=True)
class Contender:
    """How a model is trained."""

    name: str
    recipe: str | None = None
    """Of HOT; None: a plain model."""
    autocast: bool = False
    compiled: str | None = None
    """torch.compile's mode, such as "default" or "reduce-overhead"; None: eager."""
    memory_budget: float = 1.0
    """torch.compile's activation_memory_budget: what its partitioner may keep for backward, of
    what it would keep by itself."""
    checkpointed: bool = False
    """Every block recomputed in backward (torch.utils.checkpoint)."""
    attention_kept: bool = False
    """``checkpointed``, but for attention's results (hot.policies.keep_attention)."""
    first: float = 1.0
    """Of the blocks that are ``checkpointed``: the first ones' share. Backward comes to them last,
    when the others have given back what they kept."""
    fp8: str | None = None
    """torchao's recipe: "tensorwise", "rowwise" or "rowwise_with_gw_hp"."""
    int8_torchao: bool = False
    """torchao's INT8 mixed-precision training (a prototype)."""
    liger: bool = False
    """Liger-Kernel's norms, rotary embedding, gated MLP, and head with loss."""
    slower: bool = True
    """convert's ``slower``: HOT also where its default filter expects it to lose on CUDA."""
    forward: str = "plain"
    """HOT's forward, "plain" or "int8"."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Fields of HotConfig that differ from the recipe's."""
    wide: bool = False
    """Of HOT's layers only the convolutions other than 1x1, but the first."""
    frozen_int8: bool = False
    """hot.freeze_int8: the converted layers' weights as codes alone."""
    head: str = ""
    """convert's ``head``, of plain models, too: "torch" (its products) or a recipe, in 8 bits."""
    whole: bool = False
    """Compiled as a whole, head and loss included, not block by block."""


class Left(Exception):
    """Why a contender is left out: something it needs is not there."""


BUDGETS = (0.7, 0.5, 0.3, 0.2)
"""torch.compile's activation_memory_budget, of bf16: what plain torch trades time for memory by."""

REFERENCE = "bf16 compiled"
"""What the contenders of a step are timed beside."""


def people(task: Task) -> list[Contender]:
    """Contenders as a person would train, by importance: a run without time leaves out the last.

    Everything but "fp32 eager" runs under bf16 autocast, with fp32 weights.
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
        ways = {"compiled": compiled, "reduce-overhead": graphs, "eager": {}}
        return [
            *(one(f"bf16 {how}", **more) for how, more in ways.items()),
            *(
                one(name.format(how), "default", slower=True, **options, **more)
                for name, options in kinds.items()
                for how, more in ways.items()
            ),
            one("bf16 compiled, budget 0.5", memory_budget=0.5, **compiled),
        ]
    again: dict[str, Any] = {"checkpointed": True, "attention_kept": True}
    found = [
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
            one(f"bf16 {how}, budget {budget}", memory_budget=budget, **ways)
            for how, ways in (("compiled", compiled), ("reduce-overhead", graphs))
            for budget in BUDGETS
        ),
        one("fast reduce-overhead", "fast", **graphs),
        one("FP8 rowwise compiled", fp8="rowwise", **compiled),
        one("fast eager", "fast"),
        one("bf16 compiled, attention kept", **again, **compiled),
        one("bf16 reduce-overhead, attention kept", **again, **graphs),
        one("FP8 tensorwise reduce-overhead", fp8="tensorwise", **graphs),
        one("FP8 tensorwise compiled, attention kept", fp8="tensorwise", **again, **compiled),
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
        one("bf16 max-autotune", compiled="max-autotune"),
        one("FP8 rowwise_with_gw_hp compiled", fp8="rowwise_with_gw_hp", **compiled),
        one("torchao INT8 compiled", int8_torchao=True, **compiled),
        one("torchao INT8 reduce-overhead", int8_torchao=True, **graphs),
        *([one("bf16 compiled, Liger", liger=True, **compiled)] if task.liger else ()),
        one("bf16 checkpointed", checkpointed=True),
        one("bf16 checkpointed, compiled", checkpointed=True, **compiled),
        Contender("fp32 eager"),
    ]
    if not task.blocks:  # convolutions, which the default filter leaves plain on CUDA
        found = [contender for contender in found if not contender.checkpointed]
        found.append(one("default compiled, all layers", "default", slower=True, **compiled))
    if task.peak_gib >= 16:  # seconds a step, and nobody trains a model of that size so
        found = [contender for contender in found if contender.autocast]
    if task.frozen:  # no g_w, and nothing that HOT keeps or FP8's layers would train
        found = [c for c in found if c.recipe in (None, "default") and not _of_torchao(c)]
        found = [c for c in found if c.autocast]  # bf16 weights and fp32 inputs
        frozen: dict[str, Any] = {"frozen_int8": True}
        found += [
            one("frozen int8 compiled", "default", forward="int8", **frozen, **compiled),
            one("frozen int8 reduce-overhead", "default", forward="int8", **frozen, **graphs),
            one("frozen int8, plain forward, compiled", "default", **frozen, **compiled),
        ]
    return found


def _of_torchao(contender: Contender) -> bool:
    return contender.fp8 is not None or contender.int8_torchao


def _in_some_blocks(
    one: Callable[..., Contender], compiled: dict[str, Any], graphs: dict[str, Any]
) -> list[Contender]:
    """Attention kept in some of the blocks alone."""
    found = []
    for how, ways, recipes in (
        ("compiled", compiled, ["default"]),
        ("reduce-overhead", graphs, ["default", "fast"]),
    ):
        for share, words in ((0.75, "three quarters"), (0.5, "half")):
            some = {"checkpointed": True, "attention_kept": True, "first": share, **ways}
            name = f"{how}, attention kept in {words}"
            found.append(one(f"bf16 {name}", **some))
            found += [
                one(f"{recipe} int8-forward {name}", recipe, forward="int8", **some)
                for recipe in recipes
            ]
    return found


def _with_heads(
    one: Callable[..., Contender],
    compiled: dict[str, Any],
    graphs: dict[str, Any],
    again: dict[str, Any],
) -> list[Contender]:
    """With the logits in chunks, and what plain torch has against them."""
    hot8: dict[str, Any] = {"recipe": "default", "forward": "int8"}
    found = [one("bf16 compiled whole", whole=True, **compiled)]
    for how, ways in (("compiled", compiled), ("reduce-overhead", graphs)):
        found += [
            one(f"bf16 {how}, head", head="torch", **ways),
            one(f"default int8-forward {how}, head", head="torch", **hot8, **ways),
            one(f"default int8-forward {how}, 8-bit head", head="accurate", **hot8, **ways),
        ]
    name = "default int8-forward compiled, attention kept, 8-bit head"
    found.append(one("bf16 compiled, attention kept, head", head="torch", **again, **compiled))
    return [*found, one(name, head="accurate", **hot8, **again, **compiled)]


def config_of(contender: Contender) -> hot.HotConfig:
    """Of a contender with a recipe."""
    assert contender.recipe is not None
    settings = {"forward": contender.forward, **contender.settings}
    return hot.HotConfig.recipe(contender.recipe, **settings)


def convert(model: nn.Module, contender: Contender) -> nn.Module:
    """HOT's layers, and its head if the contender asks for it."""
    head: bool | hot.HotConfig = contender.head == "torch"
    if contender.head and not head:
        head = hot.HotConfig.recipe(contender.head, forward="int8")
    if contender.recipe is None:
        return hot.convert(model, filter_fn=lambda *_: False, head=head)
    config = config_of(contender)
    only = _wide if contender.wide else None
    slower = contender.slower
    model = hot.convert(model, config, only, slower=slower, head=head)
    if contender.frozen_int8:
        print(hot.freeze_int8(model).freeze_report)
    return model


def _wide(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.Conv2d) and module.kernel_size != (1, 1) and module.in_channels > 3


def torchao_converted(model: nn.Module, contender: Contender, emulate: bool) -> None:
    """The layers that HOT would convert, expected gain or not, by torchao. Raises Left."""
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
    """All that Liger-Kernel replaces in a model of transformers, in place. Raises Left."""
    try:
        package = importlib.import_module("liger_kernel.transformers.monkey_patch")
    except ImportError as missing:
        raise Left(f"Liger-Kernel does not import: {missing}") from missing
    # Its loss takes a head's place, and blocks alone have none.
    head = hasattr(model, "lm_head")
    package._apply_liger_kernel_to_instance(model=model, fused_linear_cross_entropy=head)


def blocks_of(model: nn.Module, path: str) -> dict[str, nn.Module]:
    """Fully qualified name -> block. Raises ValueError where there is no such list."""
    for name, module in model.named_modules():
        if name == path or name.endswith(f".{path}"):
            return {f"{name}.{index}": block for index, block in module.named_children()}
    raise ValueError(f"model: has no blocks at {path!r}")


def checkpoint_blocks(model: nn.Module, path: str, contender: Contender) -> None:
    """Blocks' activations are recomputed in backward, attention's results as well or not."""
    blocks = list(blocks_of(model, path).values())
    policy = hot.policies.keep_attention if contender.attention_kept else None
    hot.recompute(blocks[: round(contender.first * len(blocks))], policy)


def compile_all(modules: Iterable[nn.Module], mode: str, backend: str) -> None:
    """``torch.compile`` in place; other backends than inductor have no modes."""
    for module in modules:
        module.compile(backend=backend, mode=mode if backend == "inductor" else None)


class Trainer:
    """A model of its own, its optimizer, and the step."""

    def __init__(
        self,
        contender: Contender,
        model: nn.Module,
        batch: Batch,
        task: Task,
        *,
        own: bool = False,
        backend: str = "inductor",
    ) -> None:
        """Copy ``model`` to the device of ``batch``; convert, checkpoint and compile the copy.

        Args:
            contender: what is done to it.
            model: a plain one.
            batch: of every step.
            task: says the loss and where the blocks are.
            own: take ``model`` itself instead of a copy.
            backend: of torch.compile.

        Raises Left where something that the contender needs is missing.
        """
        self.contender, self._batch, self._task = contender, batch, task
        self.device = next(iter(batch.values())).device
        model = (model if own else copy.deepcopy(model)).to(self.device).train()
        if task.channels_last:
            last = torch.channels_last
            model = model.to(memory_format=last)  # type: ignore[call-overload]
            images = {n: t.contiguous(memory_format=last) for n, t in batch.items() if t.dim() == 4}
            self._batch = {**batch, **images}
        self.report: ConversionReport | None = None
        if _of_torchao(contender):  # it reverts what was converted
            torchao_converted(model, contender, emulate=self.device.type == "cpu")
        if contender.liger:
            liger_converted(model)
        if contender.recipe is not None or contender.head:
            model = convert(model, contender)
            self.report = model.hot_report
        if contender.checkpointed:
            checkpoint_blocks(model, task.blocks, contender)
        if contender.compiled is not None:
            apart = task.blocks and not contender.whole
            parts = blocks_of(model, task.blocks) if apart else {"": model}
            compile_all(parts.values(), contender.compiled, backend)
        self.wrap(model)

    def wrap(self, model: nn.Module) -> None:
        """Train ``model``, converted and compiled, from now on."""
        self.model = model
        # Fused on CUDA, the default of transformers' Trainer: else AdamW is a fifth of the step.
        fused = self.device.type == "cuda"
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=fused)

    def loss(self) -> Tensor:
        """Forward pass."""
        with autocast(self.contender, self.device):
            return self._task.loss(self.model, self._batch)

    def step(self) -> Tensor:
        """zero_grad, forward, backward, AdamW; the loss."""
        _exact_products()
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def gradients(self) -> dict[str, Tensor]:
        """Gradient of every parameter that has one, by name."""
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
    """No TF32, whatever ran before."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False


def cosine(got: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> float:
    """Of two gradients of all parameters, summed in float64."""
    sums = torch.zeros(3, dtype=torch.float64, device=next(iter(exact.values())).device)
    for name, b in exact.items():
        a, b = got[name].double().flatten(), b.double().flatten()
        sums += torch.stack([a @ b, a @ a, b @ b])
    product, left, right = sums.tolist()
    return float(product / (left * right) ** 0.5) if left * right else float("nan")


@contextlib.contextmanager
def cleaned(device: str) -> Iterator[None]:
    """Gives the device's memory back afterwards."""
    try:
        yield
    finally:
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()


def of_a_whole_model() -> tuple[Contender, ...]:
    """Of bench_8b.py, by importance: a run without time leaves out the last."""

    def one(name: str, **options: Any) -> Contender:
        options = {"compiled": "default", "head": "torch", "slower": False} | options
        return Contender(name, **options)

    again: dict[str, Any] = {"checkpointed": True}
    kept: dict[str, Any] = {**again, "attention_kept": True}
    hot8: dict[str, Any] = {"recipe": "default", "forward": "int8"}
    lora: dict[str, Any] = {"autocast": True, **kept}
    return (
        one("default int8-forward, attention kept", **hot8, **kept),
        one("bf16, attention kept", **kept),
        one("FP8 tensorwise, attention kept", fp8="tensorwise", **kept),
        one("default int8-forward", **hot8),
        one("LoRA frozen int8, attention kept", **hot8, **lora, frozen_int8=True),
        one("LoRA bf16, attention kept", **lora),
        one("bf16"),
        one("FP8 tensorwise", fp8="tensorwise"),
        one("bf16, recomputed", **again),
        one("default int8-forward, recomputed", **hot8, **again),
        one("default int8-forward, attention kept, 8-bit head", **hot8, **kept, head="accurate"),
        one("FP8 rowwise, attention kept", fp8="rowwise", **kept),
        one("FP8 tensorwise, recomputed", fp8="tensorwise", **again),
    )


Make = Callable[[Contender], Trainer]
