"""Tasks and methods of the training benchmarks, table by table.

Two tasks are the README's (examples/train_lib). The others are a masked text model, a Llama, and
images (tiles of photographs, CIFAR, MNIST, folders, ImageNet) with a ViT, a ResNet-18 and
EfficientFormer-L1.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import hotcore.torch as hot
import timing
import torch
from evidence import rivals
from hotcore import paper
from models import mend_torchvision
from torch import Tensor, nn
from train_lib import images, training
from train_lib.data import MaskedText, StdlibText
from train_lib.models import SmallGPT, SmallViT

README = ("vit", "gpt")
VITS: dict[str, tuple[int, int, int, float, int]] = {
    "images-vit": (128, 4, 4, 2e-3, 600),
    "images-vit-s": (384, 12, 6, 5e-4, 400),
    "images-vit-b": (768, 12, 12, 3e-4, 600),
}
"""Width, depth, heads, learning rate, steps: a small ViT, and blocks of ViT-S and ViT-B."""
LARGE_VITS = {"images-vit-s": "vit_small_patch16_224", "images-vit-b": "vit_base_patch16_224"}
"""timm's models for photographs of 224 pixels."""
CONVOLUTIONS = ("images-resnet18", "images-efficientformer")
IMAGES = (*VITS, *CONVOLUTIONS)
TASKS = (*README, "bert", "llama", *IMAGES)
RECIPES = ("default", "fast", "paper", "accurate")
VIT_TILES: dict[str, Any] = {"token_grid": (8, 8), "prefix_tokens": 1}
LARGE_GRID = (14, 14)
"""Grid of a ViT's patches at 224 pixels."""
TABLES = ("rivals", "ablations", "finetune", "supplement")
SCALES = ("gx_scale", "gw_scale")
FINE_SCALES = {"gx_scale": "token", "gw_scale": "channel"}
COARSE_SCALES = dict.fromkeys(SCALES, "tensor")
ADAPTER_RANK = 8
INT8_FIRST = 25 / 200
"""Share of the paper's pre-training epochs with INT8 g_x."""


# ---- methods ----


@dataclass(frozen=True)
class Contender:
    """Method of ``rivals.convert`` with its settings and its name in tables."""

    name: str
    method: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    lqs: tuple[str, ...] = ()
    """Fields of ``SCALES`` that paper.calibrate chooses; g_w's is the paper's LQS."""
    int8_first: float = 0.0
    """Share of the steps with 8-bit g_x (paper.PrecisionSchedule)."""
    adapters: str = ""
    """LoRA's weights that have the method: "frozen", "decomposed" or "both"; empty without LoRA."""


def contenders(task: str) -> list[Contender]:
    """List every rival and recipe, with tiles of tokens for images."""
    tiles = task in ("vit", *VITS)
    plain = ("bf16", "torchao_fp8", "torchao_int8", "naive_int4", "luq", "lbp_wht_flat")
    if task in CONVOLUTIONS:  # feature maps have their own grid, and no prefix token
        plain = ("bf16", "torchao_fp8", "torchao_int8", "naive_int4", "luq", "lbp_wht")
    out = [Contender(name, name) for name in plain]
    if tiles:
        out.append(Contender("lbp_wht", "lbp_wht", VIT_TILES))
    out += [Contender(name, name) for name in ("authors_hot", "actnn_2bit")]
    out += [Contender(name, name) for name in RECIPES]
    out.append(GX_INT4)
    if tiles:
        out.append(Contender("paper, tiles", "paper", VIT_TILES))
    return out


FULL = Contender("fp32", "fp32")
GX_INT4 = Contender("int4", "default", {"gx_bits": 4})
"""The paper's bits of g_x with scales per token and column, to judge its transform by."""
INT4_WITHOUT_HT = Contender("int4, g_x without HT", "default", {"gx_bits": 4, "hadamard_block": 1})
INT8_FORWARD = tuple(
    Contender(f"{name} int8-forward", name, {"forward": "int8"}) for name in RECIPES
)
"""Recipes with an 8-bit forward."""
LUQ_FORWARD = (
    Contender("luq_forward", "luq_forward"),
    Contender("luq_forward, in eval, too", "luq", {"forward": True, "in_eval": True}),
)
"""LUQ with the INT4 forward of its paper, which HOT's authors leave out. It is validated by the
plain product, like every row with an 8-bit forward, and by its own."""


def _rounding(kind: str) -> dict[str, str]:
    return dict.fromkeys(("gx_rounding", "gw_rounding"), kind)


def published(task: str) -> list[Contender]:
    """List the paper's pre-training with all of its parts, by both readings of LQS.

    The parts are LQS, INT8 for the first eighth of the steps, pseudo-stochastic rounding, and tiles
    of image patches. In the paper LQS chooses g_w's scales, in its authors' code g_x's.
    """
    tiles = VIT_TILES if task in ("vit", *VITS) else {}  # convolutions always have tiles
    settings = {**tiles, **_rounding("pseudo_stochastic")}
    return [
        Contender(f"paper as published{suffix}", "paper", settings, lqs, INT8_FIRST)
        for suffix, lqs in (("", ("gw_scale",)), (", LQS of g_x, too", SCALES))
    ]


def ablations(task: str) -> list[Contender]:
    """List single changes of ``paper`` (the sources' ablations) and of ``default``."""
    out = [Contender("paper", "paper"), Contender("default", "default")]
    out += [Contender(f"paper, rank {r}", "paper", {"rank": r}) for r in (16, 4, 2, 1)]
    out += [
        Contender("paper, sequency", "paper", {"basis": "sequency"}),
        Contender("paper, sketch", "paper", {"basis": "sketch"}),
        Contender("paper, g_w of full rank", "paper", {"basis": "full"}),
    ]
    if task in ("vit", *VITS):
        out.append(Contender("paper, tiles", "paper", VIT_TILES))
    out += [
        Contender("paper, g_x without HT", "paper", {"hadamard_block": 1}),
        Contender("paper, g_x in INT8", "paper", {"gx_bits": 8}),
        *(
            Contender(f"paper, g_x in INT8, rank {r}", "paper", {"gx_bits": 8, "rank": r})
            for r in (16, 4, 2, 1)
        ),
        Contender("paper, a scale a token and a channel", "paper", FINE_SCALES),
        Contender("paper with LQS", "paper", lqs=("gw_scale",)),
        Contender("paper with LQS of g_x, too", "paper", lqs=SCALES),
        Contender("paper without ABC", "without_abc", {"recipe": "paper"}),
        Contender("paper, INT8 first", "paper", int8_first=INT8_FIRST),
        *published(task),
    ]
    for recipe in ("paper", "default"):
        out += [
            Contender(f"{recipe}, rounding {words}", recipe, _rounding(kind))
            for kind, words in (("nearest", "to nearest"), ("pseudo_stochastic", "as the paper's"))
        ]
    out += [
        Contender("fast", "fast"),
        *(Contender(f"fast, rank {rank}", "fast", {"rank": rank}) for rank in (4, 2)),
        Contender("default, g_x without HT", "default", {"hadamard_block": 1}),
        GX_INT4,
        INT4_WITHOUT_HT,
        Contender("default, one scale a tensor", "default", COARSE_SCALES),
        Contender("default without ABC", "without_abc", {"recipe": "default"}),
        Contender("accurate", "accurate"),
        Contender("default, equalised", "default", {"equalize_tokens": True}),
    ]
    return [*out, *_forward()]


def supplement(task: str) -> list[Contender]:
    """List the methods of the supplement's Table 4, the paper's by both readings of LQS."""
    names = ("bf16", "default", "luq", "lbp_wht", "naive_int4")
    return [*(c for c in contenders(task) if c.name in names), *published(task)]


def _forward() -> list[Contender]:
    return [c for c in INT8_FORWARD if c.method in ("default", "fast")]


def finetuned(task: str) -> list[Contender]:
    """List fine-tuning's contenders: those of both other tables, and LoRA with HOT."""
    chosen = ("bf16", "torchao_fp8", "naive_int4", "luq", "lbp_wht", "lbp_wht_flat",
              "authors_hot", "default", "fast", "int4", "paper", "paper, tiles")  # fmt: skip
    out = [c for c in contenders(task) if c.name in chosen]
    out += [*LUQ_FORWARD, *_forward()]
    if task in CONVOLUTIONS:
        return out  # no linear layers to adapt
    lora = [Contender("LoRA", "fp32", adapters="frozen")]
    for recipe in ("paper", "default"):
        lora += [
            Contender(f"LoRA, {recipe} on {words}", recipe, adapters=where)
            for where, words in (
                ("frozen", "the frozen"),
                ("decomposed", "the adapters"),
                ("both", "both"),
            )
        ]
    return out + lora


def table_of(task: str, table: str) -> list[Contender]:
    """List the contenders of one of ``TABLES`` or of "gradients"."""
    lists: dict[str, Callable[[str], list[Contender]]] = {
        "rivals": lambda task: [FULL, *INT8_FORWARD, *contenders(task), *LUQ_FORWARD],
        "ablations": lambda task: [FULL, *ablations(task)],
        "finetune": lambda task: [FULL, *finetuned(task)],
        "supplement": lambda task: [FULL, *supplement(task)],
        "gradients": lambda task: [INT4_WITHOUT_HT, *contenders(task)],
    }
    return lists[table](task)


def chosen(task: str, names: str | None, table: str) -> list[Contender]:
    """Select contenders of a table by a list with semicolons, or all.

    Each name must exist in some task, but not in this one. Other methods are ``FILE.py:Class``,
    whose name is the class's. Raises ValueError for another name.
    """
    if names is None:
        return table_of(task, table)
    chosen_names = [name.strip() for name in names.split(";")]
    more = []
    for spec in [name for name in chosen_names if ".py:" in name]:
        rivals.of_file(spec)  # reports errors here, not in the first run
        chosen_names[chosen_names.index(spec)] = name = spec.rpartition(":")[2]
        more.append(Contender(name, spec))
    every = {contender.name: contender for contender in (*table_of(task, table), *more)}
    known = {c.name for t in TASKS for c in table_of(t, table)}
    for contender in more:
        if contender.name in known:
            raise ValueError(f"methods: {contender.method}: another method has its name")
        known.add(contender.name)
    unknown = [name for name in chosen_names if name not in known]
    if unknown:
        raise ValueError(f"methods: {', '.join(unknown)}: none of {', '.join(sorted(known))}")
    return [contender for name, contender in every.items() if name in chosen_names]


def put(
    contender: Contender, model: nn.Module, task: training.Task, steps: int, seed: int
) -> Callable[[], None] | None:
    """Apply the contender's method to the task's layers of ``model``, in place.

    Returns a function to call after every step, or None.

    Raises ValueError if a layer stays plain (torchao's methods leave out convolutions).
    """
    settings: dict[str, Any] = dict(contender.settings)
    if "token_grid" in settings and pixels_of(task) > images.PIXELS:
        settings["token_grid"] = LARGE_GRID
        contender = replace(contender, settings=settings)
    selected = task.chosen
    if contender.adapters:
        rivals.convert(model, "lora", selected, rank=ADAPTER_RANK)
        selected = functools.partial(_adapted, selected, contender.adapters)
        if contender.method == "fp32":
            return None
    if contender.lqs:
        _convert_with_lqs(contender, model, task, selected, seed)
    else:
        expected = set(rivals.taken_by_hotcore(model, selected))
        done = rivals.convert(model, contender.method, selected, **settings)
        missing = expected - set(done.names)
        if missing and not contender.method.startswith("torchao"):
            raise ValueError(f"{contender.name}: not taken: {sorted(missing)}: {done.left}")
    if contender.int8_first:
        return paper.PrecisionSchedule(model, max(1, round(contender.int8_first * steps))).step
    return None


def _convert_with_lqs(
    contender: Contender,
    model: nn.Module,
    task: training.Task,
    selected: Callable[[nn.Module, str], bool],
    seed: int,
) -> None:
    """Convert with the scales of ``contender.lqs`` that paper.calibrate chooses per layer."""
    method: Any = contender.method
    config = hot.HotConfig.recipe(method, **contender.settings)
    batches = _batches(task, seed, next(model.parameters()).device)
    loss_of = training.loss_of
    plan = paper.calibrate(model, batches, loss_of, config, filter_fn=selected, slower=True)
    fixed = {name: getattr(config, name) for name in SCALES if name not in contender.lqs}
    overrides = {
        name: override and replace(override, **fixed)
        for name, override in plan.overrides(model=model).items()
    }
    hot.convert(model, config, selected, overrides=overrides, slower=True)


def _adapted(
    inner: Callable[[nn.Module, str], bool], where: str, module: nn.Module, name: str
) -> bool:
    """Whether a layer of a model with adapters is one of the weights ``where``."""
    parts = name.split(".")
    if "lora_A" in parts or "lora_B" in parts:
        return where in ("decomposed", "both")
    return where in ("frozen", "both") and parts[-1] == "base_layer" and inner(module, name)


def _batches(task: training.Task, seed: int, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Return two of the run's first batches."""
    order = torch.Generator().manual_seed(seed)
    drawn = [task.data.batch(task.batch_size, order) for _ in range(2)]
    return [(inputs.to(device), targets.to(device)) for inputs, targets in drawn]


# ---- tasks ----


def _timm(name: str, classes: int) -> Any:
    mend_torchvision()
    return importlib.import_module("timm").create_model(name, num_classes=classes)


def pixels_of(task: training.Task) -> int:
    """Return the side of a task's images."""
    return int(getattr(task.data, "pixels", images.PIXELS))


def resnet18(classes: int) -> nn.Module:
    """Build ResNet-18 for 32 x 32 pixels: a first convolution of 3 x 3, without pooling."""
    net = _timm("resnet18", classes)
    net.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    net.maxpool = nn.Identity()
    built: nn.Module = net
    return built


images_of = functools.cache(images.load_images)
"""train_lib's images, read once for all tasks."""


def load_task(name: str, where: str = "tiles") -> training.Task:
    """Load a task with its data.

    Args:
        name: one of ``TASKS``. "vit" and "gpt" are as examples/train.py has them.
        where: data of tasks with images, as for ``train_lib.images.load_images``.

    Raises ValueError for another name or place.
    """
    if name in README:
        return training.load_task(name)
    if name == "bert":
        text = MaskedText()
        title = "Small BERT, Python's standard library"
        build = functools.partial(SmallGPT, text.VOCAB, context=text.CONTEXT, causal=False)
        return training.Task(name, title, text, build, 3e-3, 600, 16)
    if name == "llama":
        characters = StdlibText()
        title = "Small Llama, Python's standard library"
        llama = functools.partial(Llama, characters.VOCAB)
        inside = functools.partial(_within, "net.model.layers.")
        return training.Task(name, title, characters, llama, 3e-3, 500, 16, inside)
    if name not in IMAGES:
        raise ValueError(f"tasks: {name!r} is none of {', '.join(TASKS)}")
    data = images_of(where)
    title = f"{name.removeprefix('images-')}, {data.description.partition(':')[0]}"
    large = data.pixels > images.PIXELS
    if name in VITS:
        *size, rate, steps = VITS[name]
        vit: Callable[[], nn.Module] = functools.partial(SmallViT, *size, data.classes, 3)
        if large and name not in LARGE_VITS:
            raise ValueError(f"tasks: {name!r} is for {images.PIXELS} pixels")
        if large:
            vit = functools.partial(_timm, LARGE_VITS[name], data.classes)
        return training.Task(name, title, data, vit, rate, steps, 64)
    if name == "images-resnet18":
        build = functools.partial(_timm, "resnet18") if large else resnet18
        net, inside = functools.partial(build, data.classes), functools.partial(_within, "layer")
        return training.Task(name, title, data, net, 2e-3, 300, 64, inside)
    efficient = functools.partial(_efficientformer, data.classes)
    inside = functools.partial(_within, "1.stages.")
    return training.Task(name, title, data, efficient, 1e-3, 300, 32, inside)


class Llama(nn.Module):
    """Llama of transformers: RMSNorm, rotary embedding, grouped queries, SwiGLU, tied weights."""

    def __init__(self, vocab: int, width: int = 128, depth: int = 3, heads: int = 4) -> None:
        super().__init__()
        mend_torchvision()
        package: Any = importlib.import_module("transformers")
        config = package.LlamaConfig(
            vocab_size=vocab, hidden_size=width, intermediate_size=3 * width,
            num_hidden_layers=depth, num_attention_heads=heads, num_key_value_heads=heads // 2,
            tie_word_embeddings=True,
        )  # fmt: skip
        self.net = package.LlamaForCausalLM(config)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map ``tokens [batch, length]`` to logits ``[batch, length, vocab]``."""
        logits: Tensor = self.net(tokens, use_cache=False).logits
        return logits


def _within(prefix: str, module: nn.Module, name: str) -> bool:
    return name.startswith(prefix)


def _efficientformer(classes: int) -> nn.Module:
    larger = nn.Upsample((224, 224), mode="bilinear")
    return nn.Sequential(larger, _timm("efficientformer_l1", classes))


def of_second_half(task: training.Task) -> training.Task:
    """Return the task for fine-tuning: other half of the data, smaller rate, half the steps."""
    rate, steps = task.learning_rate / 4, max(1, task.steps // 2)
    return replace(task, data=task.data.half(1), learning_rate=rate, steps=steps)


# ---- reports ----


def begun(
    path: Path,
    benchmark: str,
    settings: Mapping[str, Any],
    threads: int,
    lora: str,
    entries: str,
    methods_of: Mapping[str, Sequence[Contender]],
) -> dict[str, Any]:
    """Return :func:`timing.begun`, which names what is left out.

    ``lora`` is the reason to leave LoRA out, empty if it runs. ``methods_of`` has each task's
    contenders. Raises ValueError if the file of a method has changed since the report's rows.
    """
    report = timing.begun(path, benchmark, settings, entries)
    if "left out" not in report:
        report["versions"]["threads"] = threads
        report["left out"] = {"lora": lora} if lora else {}
    for contender in itertools.chain(*methods_of.values()):
        if ".py:" in contender.method:
            file = Path(contender.method.rpartition(":")[0])
            now = hashlib.sha256(file.read_bytes()).hexdigest()
            files = report.setdefault("files", {})
            # A run's key names its contender; a point has the rows of all.
            has_rows = any(
                "layers" in entry or contender.name in key.split("/")
                for key, entry in report[entries].items()
            )
            if has_rows and files.get(contender.name, now) != now:
                raise ValueError(
                    f"methods: {contender.method}: the file differs from that of {path}'s rows; "
                    "name another --json, or remove the report"
                )
            files[contender.name] = now
    return report
