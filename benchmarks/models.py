"""Models of the paper and a few more, built from their configurations without downloads.

A model has up to three sizes. "small" has the same kinds of layers, and a CPU trains it in a second
(for --quick and tests). "full" is the size whose step is timed on a GPU. "table" is the full model
with a smaller batch, which also fits in fp32 (bench_models.py --part table).
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Size:
    """Functions that build a model, and draw a batch for it from a generator."""

    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]


@dataclass(frozen=True)
class Task:
    """Model in its sizes, with its loss."""

    title: str
    small: Size
    loss: Callable[[nn.Module, Batch], Tensor]
    full: Size | None = None
    table: Size | None = None
    blocks: str = ""
    """End of the blocks' fully qualified name. Blocks are compiled and checkpointed one by one.
    If empty, the model is compiled as a whole and not checkpointed."""
    peak_gib: float = 16.0
    """Memory of a bf16 step at full size, roughly; it limits how many contenders share a device."""
    has_head: bool = False
    """Whether this is a language model, whose logits are its largest tensor."""
    frozen: bool = False
    """Whether only adapters train; FP8 and recipes that differ in g_w do not apply."""
    channels_last: bool = False
    """Whether images and weights are channels-last; then every convolution is converted."""
    liger: bool = False
    """Whether Liger-Kernel supports the model."""


def mend_torchvision() -> None:
    """Make torchvision importable if its binary belongs to another torch (CUDA beside CPU).

    timm and transformers import torchvision but do not use that binary. Its import registers
    functions for two operators, which are declared here. Does nothing if torchvision works or is
    missing.
    """
    try:
        importlib.import_module("torchvision")
        return
    except ImportError:
        return
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        del sys.modules[name]
    for name in ("nms", "qnms"):
        _declared.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    importlib.import_module("torchvision")


_declared = torch.library.Library("torchvision", "FRAGMENT")


def _built(module: str, name: str, *positional: str, **options: Any) -> Callable[[], nn.Module]:
    """Return a call of ``module.name(*positional, **options)`` of an optional package."""

    def build() -> nn.Module:
        mend_torchvision()
        model: nn.Module = getattr(importlib.import_module(module), name)(*positional, **options)
        return model

    return build


def _timm(name: str, **options: Any) -> Callable[[], nn.Module]:
    return _built("timm", "create_model", name, pretrained=False, **options)


def _transformers(model: str, config: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        settings = _built("transformers", config, **options)()
        return getattr(importlib.import_module("transformers"), model)(settings)

    return build


Maker = Callable[[torch.Generator], Batch]


def _batch(**arrays: Callable[[torch.Generator], Tensor]) -> Maker:
    return lambda generator: {name: make(generator) for name, make in arrays.items()}


def _normal(*shape: int) -> Callable[[torch.Generator], Tensor]:
    return lambda generator: torch.randn(shape, generator=generator)


def _below(limit: int, *shape: int) -> Callable[[torch.Generator], Tensor]:
    return lambda generator: torch.randint(limit, shape, generator=generator)


def _images(batch: int, pixels: int, classes: int) -> Maker:
    return _batch(x=_normal(batch, 3, pixels, pixels), y=_below(classes, batch))


def _classification(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["x"]).float(), batch["y"])


def _vision(
    title: str,
    name: str,
    pixels: int,
    options: dict[str, Any],
    *,
    table_batch: int | None = None,
    full_batch: int | None = None,
    table_options: dict[str, Any] | None = None,
    **more: Any,
) -> Task:
    images = 8 if pixels < 224 else 2
    small = Size(_timm(name, num_classes=10, **options), _images(images, pixels, 10))
    full = Size(_timm(name), _images(full_batch, 224, 1000)) if full_batch is not None else None
    table = None
    if table_batch is not None:
        table = Size(_timm(name, **(table_options or {})), _images(table_batch, 224, 1000))
    return Task(title, small, _classification, full, table, **more)


def _own_loss(inputs: str, labels: str, **options: Any) -> Callable[[nn.Module, Batch], Tensor]:
    """Return the loss that a model of transformers computes from the batch's x and ``labels``."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        value: Tensor = model(**{inputs: batch["x"]}, labels=batch[labels], **options).loss
        return value

    return loss


_language_model = _own_loss("input_ids", "x", use_cache=False)
_sequence_classification = _own_loss("input_ids", "y")
_segmentation = _own_loss("pixel_values", "y")


def _labelled_tokens(batch: int, length: int, vocabulary: int) -> Maker:
    # Labels are drawn first, as in earlier reports.
    make = _batch(y=_below(2, batch), x=_below(vocabulary, batch, length))
    return lambda generator: dict(reversed(make(generator).items()))


def _pixels(batch: int, pixels: int, classes: int) -> Maker:
    return _batch(x=_normal(batch, 3, pixels, pixels), y=_below(classes, batch, pixels, pixels))


def _hidden(batch: int, length: int, width: int) -> Maker:
    return _batch(x=_normal(batch, length, width))


def _tokens(batch: int, length: int, vocabulary: int) -> Maker:
    return _batch(x=_below(vocabulary, batch, length))


def _blocks(model: nn.Module, batch: Batch) -> Tensor:
    """Loss of decoder layers alone, which learn to repeat the previous token."""
    hidden: Tensor = model(inputs_embeds=batch["x"], use_cache=False).last_hidden_state
    return F.mse_loss(hidden[:, 1:].float(), batch["x"][:, :-1])


@functools.cache
def _ultralytics() -> tempfile.TemporaryDirectory[str]:
    """Import ultralytics without its network access and its settings in the home directory."""
    folder = tempfile.TemporaryDirectory(prefix="ultralytics-")
    settings = {"YOLO_OFFLINE": "true", "YOLO_VERBOSE": "false", "YOLO_CONFIG_DIR": folder.name}
    for name, value in settings.items():
        os.environ.setdefault(name, value)
    return folder


def _detector(classes: int) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        mend_torchvision()
        _ultralytics()
        tasks = importlib.import_module("ultralytics.nn.tasks")
        model: Any = tasks.DetectionModel("yolov5n.yaml", nc=classes, verbose=False)
        model.args = importlib.import_module("ultralytics.cfg").get_cfg()  # weights of losses
        built: nn.Module = model
        return built

    return build


def _boxes(batch: int, pixels: int, classes: int, each: int) -> Callable[[torch.Generator], Batch]:
    """Draw ``each`` random boxes per image: centre and size as shares of it."""

    def make(generator: torch.Generator) -> Batch:
        count = batch * each
        centre = 0.3 + 0.4 * torch.rand(count, 2, generator=generator)
        size = 0.1 + 0.4 * torch.rand(count, 2, generator=generator)
        return {
            "img": torch.rand(batch, 3, pixels, pixels, generator=generator),
            "batch_idx": torch.arange(batch).repeat_interleave(each).float(),
            "cls": torch.randint(classes, (count, 1), generator=generator).float(),
            "bboxes": torch.cat([centre, size], dim=1),
        }

    return make


def _detection(model: nn.Module, batch: Batch) -> Tensor:
    """Loss of ultralytics: boxes, classes, distribution of the edges."""
    parts: Tensor = model(batch)[0]
    return parts.sum()


_SMALL_VIT = {"img_size": 32, "patch_size": 4, "embed_dim": 128, "depth": 3, "num_heads": 4}
_RESNET = {"layers": (1, 1, 1, 1), "channels": (64, 64, 128, 128)}
_NO_ZEROS = {"zero_init_last": False}  # with zeros no branch would have a gradient at first
_LLAMA = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
_LLAMA_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}

_LLAMA_MODEL = functools.partial(_transformers, "LlamaModel", "LlamaConfig", vocab_size=16)
_QWEN_MODEL = functools.partial(_transformers, "Qwen2Model", "Qwen2Config", vocab_size=16)
_SMALL_LLAMA_BLOCKS = _LLAMA_MODEL(**_LLAMA, **_LLAMA_HEADS)


Widths = tuple[int, int, int, int]
"""Widths of a decoder's blocks: features, MLP features, heads, key-value heads."""
_LLAMA_8B: Widths = (4096, 14336, 32, 8)


def _decoder(
    model: Callable[..., Callable[[], nn.Module]], widths: Widths, count: int
) -> Callable[[], nn.Module]:
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    return model(**dict(zip(names, widths, strict=True)), num_hidden_layers=count)


def _llama_blocks(count: int) -> Callable[[], nn.Module]:
    return _decoder(_LLAMA_MODEL, _LLAMA_8B, count)


def _decoder_blocks(
    title: str,
    model: Callable[..., Callable[[], nn.Module]],
    widths: Widths,
    count: int,
    sequences: int,
    peak_gib: float,
) -> Task:
    """Build ``count`` blocks for sequences of 2048 tokens, without embedding and head."""
    small = Size(model(**_LLAMA, **_LLAMA_HEADS), _hidden(4, 32, 128))
    full = Size(_decoder(model, widths, count), _hidden(sequences, 2048, widths[0]))
    return Task(title, small, _blocks, full, blocks="layers", peak_gib=peak_gib, liger=True)


def with_lora(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Freeze bf16 weights and add peft's adapters of rank 16 to every linear layer."""
    return lambda: adapted(build().bfloat16())


def adapted(base: nn.Module) -> nn.Module:
    """Freeze a model and add peft's adapters of rank 16 to every linear layer."""
    mend_torchvision()
    peft = importlib.import_module("peft")
    config = peft.LoraConfig(r=16, target_modules="all-linear")
    model: nn.Module = peft.get_peft_model(base, config)
    return model


_GPT2 = functools.partial(_transformers, "GPT2LMHeadModel", "GPT2Config")
_BERT = functools.partial(_transformers, "BertForSequenceClassification", "BertConfig")
_SEGFORMER = functools.partial(
    _transformers, "SegformerForSemanticSegmentation", "SegformerConfig", drop_path_rate=0.0,
    hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, classifier_dropout_prob=0.0,
)  # fmt: skip
_BERT_UNDROPPED = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_EFFICIENTFORMER = {"depths": (1, 1, 1, 2), "embed_dims": (64, 64, 64, 128)}

TASKS: dict[str, Task] = {
    "vit_b": _vision(
        "ViT-B/16", "vit_base_patch16_224", 32, _SMALL_VIT,
        table_batch=16, full_batch=128, blocks="blocks", peak_gib=9.5,
    ),
    "vit_l": _vision(
        "ViT-L/16", "vit_large_patch16_224", 32, _SMALL_VIT,
        full_batch=64, blocks="blocks", peak_gib=14.5,
    ),
    "resnet50": _vision(
        "ResNet-50", "resnet50", 32, _RESNET,
        table_batch=32, full_batch=128, table_options=_NO_ZEROS, peak_gib=5.8,
    ),
    "efficientformer_l7": _vision(
        "EfficientFormer-L7", "efficientformer_l7", 224, _EFFICIENTFORMER,
        table_batch=8, full_batch=64,
    ),
    "gpt2": Task(
        "GPT-2 small",
        Size(
            _GPT2(
                n_embd=128, n_layer=2, n_head=4, vocab_size=128, n_positions=64,
                bos_token_id=0, eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
            ),
            _tokens(8, 64, 128),
        ),
        _language_model,
        # 50,257 entries are padded, because cuBLAS has only an unaligned kernel for an odd width.
        Size(_GPT2(vocab_size=50304), _tokens(8, 1024, 50257)),
        blocks="transformer.h", peak_gib=12.4, has_head=True,
    ),
    "llama_1b": Task(
        "Llama-3.2-1B's shape, 8 blocks",
        Size(
            _transformers(
                "LlamaForCausalLM", "LlamaConfig", vocab_size=128, tie_word_embeddings=True,
                **_LLAMA, **_LLAMA_HEADS,
            ),
            _tokens(4, 64, 128),
        ),
        _language_model,
        Size(
            _transformers(
                "LlamaForCausalLM", "LlamaConfig", vocab_size=128256, tie_word_embeddings=True,
                hidden_size=2048, intermediate_size=8192, num_hidden_layers=8,
                num_attention_heads=32, num_key_value_heads=8,
            ),
            _tokens(4, 2048, 128256),
        ),
        blocks="model.layers", peak_gib=24.0, has_head=True,
    ),
    "bert": Task(
        "BERT-base",
        Size(
            _BERT(
                hidden_size=128, num_hidden_layers=2, num_attention_heads=4,
                intermediate_size=256, vocab_size=128, max_position_embeddings=64,
                **_BERT_UNDROPPED,
            ),
            _labelled_tokens(8, 32, 128),
        ),
        _sequence_classification,
        Size(_BERT(), _labelled_tokens(32, 512, 30522)),
        Size(_BERT(**_BERT_UNDROPPED), _labelled_tokens(8, 256, 30522)),
        blocks="encoder.layer", peak_gib=7.7,
    ),
    "llama_blocks": Task(
        "Llama-3-8B's blocks",
        Size(_SMALL_LLAMA_BLOCKS, _hidden(2, 64, 128)),
        _blocks,
        Size(_llama_blocks(4), _hidden(1, 8192, 4096)),
        Size(_llama_blocks(2), _hidden(1, 1024, 4096)),
        blocks="layers", peak_gib=20.0,
    ),
    "llama_blocks_2k": _decoder_blocks(
        "Llama-3-8B's blocks, 4 sequences", _LLAMA_MODEL, _LLAMA_8B, 2, 4, peak_gib=8.5
    ),
    "llama_1b_blocks": _decoder_blocks(
        "Llama-3.2-1B's blocks", _LLAMA_MODEL, (2048, 8192, 32, 8), 4, 8, peak_gib=8.7
    ),
    "qwen_blocks": _decoder_blocks(
        "Qwen2.5-0.5B's blocks", _QWEN_MODEL, (896, 4864, 14, 2), 8, 8, peak_gib=7.2
    ),
    "llama_lora": Task(
        "LoRA on Llama-3-8B's blocks",
        Size(with_lora(_SMALL_LLAMA_BLOCKS), _hidden(4, 32, 128)),
        _blocks,
        Size(with_lora(_llama_blocks(4)), _hidden(4, 2048, 4096)),
        blocks="layers", peak_gib=14.0, frozen=True,
    ),
    "resnet18": _vision(
        "ResNet-18", "resnet18", 32, _RESNET, table_batch=32, table_options=_NO_ZEROS
    ),
    "resnet34": _vision(
        "ResNet-34", "resnet34", 32, {**_RESNET, "layers": (2, 1, 1, 1)},
        table_batch=32, table_options=_NO_ZEROS,
    ),
    "efficientnetv2_s": _vision(
        "EfficientNetV2-S", "tf_efficientnetv2_s", 64,
        {"channel_multiplier": 0.5, "depth_multiplier": 0.25}, table_batch=16,
    ),
    "efficientformer_l1": _vision(
        "EfficientFormer-L1", "efficientformer_l1", 224, _EFFICIENTFORMER, table_batch=16
    ),
    "efficientformer_l3": _vision(
        "EfficientFormer-L3", "efficientformer_l3", 224, _EFFICIENTFORMER, table_batch=16
    ),
    "vit_s": _vision(
        "ViT-S/16", "vit_small_patch16_224", 32,
        {"img_size": 32, "patch_size": 8, "embed_dim": 96, "depth": 2, "num_heads": 3},
        table_batch=32,
    ),
    "segformer": Task(
        "SegFormer-b2",
        Size(
            _SEGFORMER(
                depths=[1, 1, 1, 1], hidden_sizes=[64, 64, 128, 128], decoder_hidden_size=64,
                num_labels=4,
            ),
            _pixels(2, 64, 4),
        ),
        _segmentation,
        table=Size(
            _SEGFORMER(
                depths=[3, 4, 6, 3], hidden_sizes=[64, 128, 320, 512], decoder_hidden_size=768,
                num_labels=150,
            ),
            _pixels(2, 512, 150),
        ),
    ),
    "yolov5n": Task(
        "YOLOv5n",
        Size(_detector(4), _boxes(2, 128, 4, each=3)),
        _detection,
        table=Size(_detector(80), _boxes(8, 640, 80, each=8)),
    ),
    "llama": Task(
        "Llama",
        Size(
            _transformers(
                "LlamaForCausalLM", "LlamaConfig", vocab_size=128, **_LLAMA, **_LLAMA_HEADS
            ),
            _tokens(4, 64, 128),
        ),
        _language_model,
    ),
}  # fmt: skip
TASKS["resnet50_last"] = replace(
    TASKS["resnet50"], title="ResNet-50, channels last", table=None, channels_last=True
)
TASKS["bert_large"] = replace(
    TASKS["bert"],
    title="BERT-large",
    full=Size(
        _BERT(
            hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
        ),
        _labelled_tokens(32, 512, 30522),
    ),
    table=None,
    peak_gib=20.0,
)  # fmt: skip
"""All tasks. bench_models.py times those with a full size, its table those with a table size."""
