"""Rules by which ``convert`` chooses layers, and the reasons why others stay plain."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ... import gpus
from ...config import HotConfig
from .. import _compat
from ..frozen import bitsandbytes
from ..frozen.bitsandbytes import is_4bit, is_8bit
from ..frozen.weights import FrozenModule
from ..layers import modules
from ..layers.attention import HotMultiheadAttention
from ..layers.modules import HotModule
from ..ops import DTYPES
from ..ops.conv import has_products
from ..ops.sharded import is_dtensor
from . import gains
from .report import ADAPTER, EARLIER

Filter = Callable[[nn.Module, str], bool]

MIN_FEATURES = 64
"""In or out features below which the default filter leaves a layer plain. Products of fewer are too
small to pay for quantisation. A convolution has a group's channels times its kernel's area."""

HEAD_NAMES = frozenset(
    (
        *("head", "heads", "head_dist", "lm_head", "classifier", "cls", "fc", "fc_out", "logits"),
        *("to_logits", "score", "predictions", "output_projection", "proj_out"),
    )
)
"""Names of an output head: of the model's last layer, or of the top-level module that contains it.
Its error goes straight into the loss, and it is one layer of many."""

_TOP_HEAD_NAMES = frozenset(("out", "output"))
"""Names of heads only at the top level; deeper ones belong to an attention or a block."""

_WRAPPERS = frozenset(
    (
        *("module", "base_model", "model", "base_layer", "modules_to_save", "original_module"),
        *("_orig_mod", "_checkpoint_wrapped_module"),
    )
)
"""Parts of names that DDP, peft, transformers, torch.compile and checkpoint wrappers add."""


def candidates(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Name and module of every layer of a kind that HOT supports, in the model's order."""
    conv1d = _compat.loaded("transformers.pytorch_utils", "Conv1D")
    kinds = (nn.Linear, nn.Conv2d, nn.MultiheadAttention, *conv1d)
    layers = [(fqn, module) for fqn, module in model.named_modules() if isinstance(module, kinds)]
    # An attention uses the weight of its out_proj and never calls the layer.
    inner = {id(m.out_proj) for _, m in layers if isinstance(m, nn.MultiheadAttention)}
    return [(fqn, module) for fqn, module in layers if id(module) not in inner]


def weights_of(module: nn.Module) -> Sequence[Tensor]:
    """The matrices of a layer; empty if they are computed instead of Parameters."""
    if isinstance(module, FrozenModule):
        return [module.weight]
    weights = [p for n, p in module._parameters.items() if n.endswith("weight") and p is not None]
    if isinstance(module, nn.MultiheadAttention) and weights:
        last = module.out_proj._parameters.get("weight")
        return [] if last is None else [*weights, last]
    return weights


def hot_class(module: nn.Module) -> type[HotModule]:
    """The HOT class that replaces a layer's class, or that the layer has already."""
    if isinstance(module, FrozenModule):
        return next(cls for cls in type(module).__mro__ if "thawed" in vars(cls))
    if is_8bit(module):
        return bitsandbytes.hot_class(module)
    if isinstance(module, nn.Linear):
        return modules.HotLinear
    if isinstance(module, nn.Conv2d):
        return modules.HotConv2d
    if isinstance(module, nn.MultiheadAttention):
        return HotMultiheadAttention
    from ..layers.conv1d import HotConv1D  # imports transformers

    return HotConv1D


def kind_of(module: nn.Module) -> str:
    """The kind of a layer in words; for a convolution with its kernel."""
    if isinstance(module, nn.Conv2d):
        return f"Conv2d {'x'.join(map(str, module.kernel_size))}"
    if isinstance(module, nn.MultiheadAttention):
        return "MultiheadAttention"
    if is_8bit(module):
        return "Linear4bit" if is_4bit(module) else "Linear8bitLt"
    return "Linear" if isinstance(module, nn.Linear) else "Conv1D"


def features_of(module: nn.Module) -> tuple[int, int]:
    """In and out features; channels of a convolution, sizes of an attention's in_proj."""
    if isinstance(module, nn.Conv2d):
        return module.in_channels, module.out_channels
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    if isinstance(module, nn.MultiheadAttention):
        return module.embed_dim, 3 * module.embed_dim
    conv1d: Any = module
    return conv1d.nx, conv1d.nf


def products_of(module: nn.Module, config: HotConfig, device: str = "") -> bool | None:
    """Whether a convolution has HOT's products on a type of device; None for other layers."""
    if not isinstance(module, nn.Conv2d):
        return None
    device = device or module.weight.device.type
    return has_products(modules.is_pointwise(module), config, device == "cuda")


def is_frozen(module: nn.Module) -> bool:
    """Whether a layer trains none of its weights."""
    weights = weights_of(module)
    return bool(weights) and not any(weight.requires_grad for weight in weights)


def why_plain(
    model: nn.Module, layers: list[tuple[str, nn.Module]], filter_fn: Filter | None
) -> dict[str, str]:
    """Names of the layers that stay plain, and the reasons."""
    if filter_fn is not None:
        left = ((fqn, m) for fqn, m in layers if not filter_fn(m, fqn))
        words = {True: EARLIER, False: "left out by filter_fn"}
        reasons = {fqn: words[isinstance(m, HotModule)] for fqn, m in left}
    else:
        reasons = _default_reasons(model, layers)
    # Reasons that make a conversion impossible come before reasons of choice.
    held = modules.held_forwards(model).items()
    held_plain = {m: why for m, why in held if not isinstance(m, HotModule)}
    return reasons | {n: why for n, m in layers if (why := why_impossible(m) or held_plain.get(m))}


def why_impossible(module: nn.Module) -> str:
    """Return why a layer cannot be converted; empty if it can."""
    if isinstance(module, HotModule):
        return ""
    if why := bitsandbytes.why_impossible(module):
        return why
    plain = hot_class(module).plain
    if type(module) is not plain:
        return f"a subclass of {plain.__name__} ({type(module).__name__})"
    if why := modules.own_forward(module):
        return why
    if plain.forward.__module__ != plain.__module__:
        return f"the forward of {plain.__name__} was replaced by {plain.forward.__module__}'s"
    attention = module if isinstance(module, nn.MultiheadAttention) else None
    if attention is not None and (attention.add_zero_attn or attention.bias_k is not None):
        return "add_bias_kv and add_zero_attn are not supported"
    if is_8bit(module):
        return ""
    weights = weights_of(module)
    if not weights:
        return "its weight is computed, not a Parameter"
    for weight in weights:
        if weight.dtype not in DTYPES:
            return f"its weight is {str(weight.dtype).removeprefix('torch.')}"
        wraps = hasattr(weight, "__tensor_flatten__") and not is_dtensor(weight)
        if wraps or weight.layout is not torch.strided:
            return f"its weight has no memory of values ({type(weight).__name__}, {weight.layout})"
    return ""


def _default_reasons(model: nn.Module, layers: list[tuple[str, nn.Module]]) -> dict[str, str]:
    reasons: dict[str, str] = {}
    adapters = _adapters(model)
    kinds = nn.Embedding | nn.EmbeddingBag
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, kinds)}
    for fqn, module in layers:
        inputs, outputs = features_of(module)
        if isinstance(module, nn.Conv2d):
            inputs = inputs // module.groups * module.kernel_size[0] * module.kernel_size[1]
        if min(inputs, outputs) < MIN_FEATURES:
            reasons[fqn] = f"fewer than {MIN_FEATURES} features"
        if id(module._parameters.get("weight")) in embeddings:
            reasons[fqn] = "its weight is an embedding's"
        if id(module) in adapters:
            reasons[fqn] = ADAPTER
        if is_4bit(module) and not isinstance(module, HotModule):
            reasons[fqn] = (
                "bitsandbytes' Linear4bit, which keeps nothing of x either. HOT would dequantise "
                "and quantise its weight in every backward; a filter_fn converts it"
            )
    convolutions = [fqn for fqn, module in layers if isinstance(module, nn.Conv2d)]
    if convolutions:
        reasons[convolutions[0]] = "the first convolution"
    others = [fqn for fqn, module in layers if id(module) not in adapters]
    return reasons | dict.fromkeys(_heads(model, others), "the output head")


def _heads(model: nn.Module, names: list[str]) -> list[str]:
    """The last layer if it is named as a head, and separate heads directly before it.

    Names in an ``nn.Sequential`` are numbers: its last layer is the head if it is linear and its
    input and output widths differ.
    """
    if type(model) is nn.Sequential and len(names) > 1:
        *_, last = (m for m in model.modules() if m._parameters or m._buffers)
        wide = isinstance(last, nn.Linear) and last.in_features != last.out_features
        if wide and last is model.get_submodule(names[-1]) and "." not in names[-1]:
            return names[-1:]
    heads: list[str] = []
    for fqn in reversed(names):
        parts = [part for part in fqn.split(".") if not part.isdigit() and part not in _WRAPPERS]
        named = bool(parts) and (parts[0] in HEAD_NAMES or parts[-1] in HEAD_NAMES)
        named = named or (len(parts) == 1 and parts[0] in _TOP_HEAD_NAMES)
        if not named or (heads and len(parts) > 1):
            break
        heads.append(fqn)
    return heads


def _adapters(model: nn.Module) -> set[int]:
    """Identities of the modules that peft adds to layers; they train in full precision."""
    wrapper = _compat.loaded("peft.tuners.tuners_utils", "BaseTunerLayer")
    return {
        id(part)
        for module in model.modules()
        if isinstance(module, wrapper)
        for name, child in module.named_children()
        if name != "base_layer"
        for part in child.modules()
    }


def why_slow(
    layers: list[tuple[str, nn.Module]],
    configs: Mapping[str, HotConfig | None],
    device: str,
    rate: gpus.Int8Rate,
    tokens: Mapping[str, float | None],
) -> dict[str, str]:
    """Names of the layers that are expected to be slower than plain torch's, and the reasons."""
    reasons = {}
    for fqn, module in layers:
        config = configs[fqn]
        # The time of bitsandbytes' layers was not measured; they gain memory.
        if config and not isinstance(module, HotModule) and not (is_8bit(module) and rate.fast):
            reasons[fqn] = gains.why_slow(facts_of(module, config, device, rate, tokens.get(fqn)))
    return {fqn: why for fqn, why in reasons.items() if why}


def facts_of(
    module: nn.Module, config: HotConfig, device: str, rate: gpus.Int8Rate, tokens: float | None
) -> gains.Facts:
    """Properties of a layer that determine its time; ``tokens`` of a call, if known."""
    sizes = (products_of(module, config, device), *features_of(module))
    transposed = kind_of(module) == "Conv1D"
    call = (tokens or gains.TOKENS, transposed)
    return gains.Facts(*sizes, config, device, is_frozen(module), rate, *call)


def rate_of(device: torch.device) -> gpus.Int8Rate:
    """INT8's rate on a CUDA device, or an H200's if torch sees none."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return gpus.ABSENT
    name = torch.cuda.get_device_name(device)
    return gpus.int8_rate(name, *torch.cuda.get_device_capability(device))
