"""The rules by which ``convert`` chooses layers, and why the others stay plain."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from .. import gpus
from ..config import HotConfig
from . import _compat, bitsandbytes, gains
from .attention import HotMultiheadAttention
from .bitsandbytes import is_4bit, is_8bit
from .frozen import FrozenModule
from .modules import HotConv2d, HotLinear, HotModule, held_forwards, is_pointwise, own_forward
from .ops import DTYPES
from .ops.conv import has_products
from .ops.sharded import is_dtensor
from .report import ADAPTER

Filter = Callable[[nn.Module, str], bool]

# ---- The rule for layers that gain. Figures: benchmarks/results, one H200. ----

MIN_FEATURES = 64
"""The default filter leaves layers with fewer in or out features plain (a convolution's in features
are a group's channels times its kernel's area): their products are too small to pay for
quantisation."""

HEAD_NAMES = frozenset(
    (
        *("head", "heads", "head_dist", "lm_head", "classifier", "cls", "fc", "fc_out", "logits"),
        *("to_logits", "score", "predictions", "output_projection", "proj_out"),
    )
)
"""The output head is the model's last layer if it, or the top-level module that contains it, has
one of these names. Its error goes straight into the loss, and it is one layer of many."""

_TOP_HEAD_NAMES = frozenset(("out", "output"))
"""Names of heads at the top level only; deeper they belong to an attention or a block."""

_WRAPPERS = frozenset(
    (
        *("module", "base_model", "model", "base_layer", "modules_to_save", "original_module"),
        *("_orig_mod", "_checkpoint_wrapped_module"),
    )
)
"""Parts that DDP, peft, transformers, torch.compile and checkpoint wrappers add to a model's
names."""


def candidates(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Name and module of every layer of a kind that HOT supports, in the model's order."""
    conv1d = _compat.loaded("transformers.pytorch_utils", "Conv1D")
    kinds = (nn.Linear, nn.Conv2d, nn.MultiheadAttention, *conv1d)
    found = [(fqn, module) for fqn, module in model.named_modules() if isinstance(module, kinds)]
    # out_proj belongs to its attention, which uses the weight and never calls the layer.
    own = {id(m.out_proj) for _, m in found if isinstance(m, nn.MultiheadAttention)}
    return [(fqn, module) for fqn, module in found if id(module) not in own]


def weights_of(module: nn.Module) -> Sequence[Tensor]:
    """The matrices of a layer; empty if they are computed instead of Parameters."""
    if isinstance(module, FrozenModule):
        return [module.weight]
    if not isinstance(module, nn.MultiheadAttention):
        weight = module._parameters.get("weight")
        return [] if weight is None else [weight]
    found = [p for n, p in module._parameters.items() if n.endswith("weight") and p is not None]
    last = module.out_proj._parameters.get("weight")
    return [*found, last] if found and last is not None else []


def hot_class(module: nn.Module) -> type[HotModule]:
    """The HOT class that replaces such a layer, or that it is of."""
    if isinstance(module, FrozenModule):
        return next(cls for cls in type(module).__mro__ if "thawed" in vars(cls))
    if is_8bit(module):
        return bitsandbytes.hot_class(module)
    if isinstance(module, nn.Linear):
        return HotLinear
    if isinstance(module, nn.Conv2d):
        return HotConv2d
    if isinstance(module, nn.MultiheadAttention):
        return HotMultiheadAttention
    from .huggingface import HotConv1D

    return HotConv1D


def kind_of(module: nn.Module) -> str:
    """The kind in words; for a convolution with its kernel."""
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
    nx, nf = module.nx, module.nf
    assert isinstance(nx, int) and isinstance(nf, int)
    return nx, nf


def products_of(module: nn.Module, config: HotConfig, device: str = "") -> bool | None:
    """Whether a convolution has HOT's products in backward; None: it is none.

    On a type of device, by default the weight's.
    """
    if not isinstance(module, nn.Conv2d):
        return None
    device = device or module.weight.device.type
    return has_products(is_pointwise(module), config, device == "cuda")


def is_frozen(module: nn.Module) -> bool:
    """Whether no weight is trained."""
    weights = weights_of(module)
    return bool(weights) and not any(weight.requires_grad for weight in weights)


def why_plain(
    model: nn.Module, layers: list[tuple[str, nn.Module]], filter_fn: Filter | None
) -> dict[str, str]:
    """Why layers stay plain; the others are converted."""
    if filter_fn is not None:
        reasons = {fqn: "left out by filter_fn" for fqn, m in layers if not filter_fn(m, fqn)}
    else:
        reasons = _default_reasons(model, layers)
    # Reasons why a conversion is impossible come before reasons of choice.
    held = {m: why for m, why in held_forwards(model).items() if not isinstance(m, HotModule)}
    return reasons | {fqn: why for fqn, m in layers if (why := why_impossible(m) or held.get(m))}


def why_impossible(module: nn.Module) -> str:
    """Why this layer cannot be converted; empty if it can."""
    if isinstance(module, HotModule):
        return ""
    if why := bitsandbytes.why_impossible(module):
        return why
    plain = hot_class(module).plain
    if type(module) is not plain:
        return f"a subclass of {plain.__name__} ({type(module).__name__})"
    if why := own_forward(module):
        return why
    if plain.forward.__module__ != plain.__module__:
        return f"the forward of {plain.__name__} was replaced by {plain.forward.__module__}'s"
    if isinstance(module, nn.MultiheadAttention) and (
        module.add_zero_attn or module.bias_k is not None
    ):
        return "add_bias_kv and add_zero_attn are not taken"
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
    embeddings = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
    }
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
                "bitsandbytes' Linear4bit, which keeps nothing of x either; its weight would be "
                "dequantised, then quantised again, in every backward. A filter_fn converts it"
            )
    convolutions = [fqn for fqn, module in layers if isinstance(module, nn.Conv2d)]
    if convolutions:
        reasons[convolutions[0]] = "the first convolution"
    own = [fqn for fqn, module in layers if id(module) not in adapters]
    return reasons | dict.fromkeys(_heads(model, own), "the output head")


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
    """Modules that peft adds to the layers it wraps; they train in full precision."""
    wrapper = _compat.loaded("peft.tuners.tuners_utils", "BaseTunerLayer")
    found: set[int] = set()
    for module in model.modules():
        if isinstance(module, wrapper):
            for name, child in module.named_children():
                if name != "base_layer":
                    found.update(map(id, child.modules()))
    return found


def why_slow(
    layers: list[tuple[str, nn.Module]],
    configs: Mapping[str, HotConfig | None],
    device: str,
    rate: gpus.Int8Rate,
) -> dict[str, str]:
    """Why layers are expected to be slower than plain torch's."""
    found = {}
    for fqn, module in layers:
        own = configs[fqn]
        if own is None or isinstance(module, HotModule):
            continue
        if is_8bit(module) and rate.fast:
            continue  # the time of 8-bit layers was not measured; they gain memory
        if why := gains.why_slow(facts_of(module, own, device, rate)):
            found[fqn] = why
    return found


def facts_of(module: nn.Module, config: HotConfig, device: str, rate: gpus.Int8Rate) -> gains.Facts:
    """What the time of a layer depends on."""
    sizes = (products_of(module, config, device), *features_of(module))
    return gains.Facts(*sizes, config, device, is_frozen(module), rate)


def rate_of(device: torch.device) -> gpus.Int8Rate:
    """INT8's rate on a CUDA device; where torch sees none, that of an H200."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return gpus.ABSENT
    name = torch.cuda.get_device_name(device)
    return gpus.int8_rate(name, *torch.cuda.get_device_capability(device))
