"""``freeze_int8``: frozen weights of converted layers in a byte a value; ``thaw`` undoes it."""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from .. import _compat, ops
from ..frozen.convrot import HotConvRotLinear
from ..frozen.convrot import why_not as why_no_convrot
from ..frozen.weights import FrozenModule, HotFrozenLinear, encoded, freeze, plain_weights
from ..layers.modules import HotLinear, HotModule, held_forwards, own_forward, unwrapped
from ..ops.frozen_codes import parameter
from .report import FREEZE_REPORT, listed
from .selection import Filter, hot_class, kind_of

_GIB = 2**30


@dataclasses.dataclass(frozen=True)
class FreezeReport:
    """Report of :func:`.freeze_int8`, the model's attribute ``freeze_report``; print it.

    It holds no tensor and no module.
    """

    layers: tuple[str, ...]
    """Names of the layers that are frozen now."""
    skipped: tuple[tuple[str, str], ...]
    """Names of the other converted layers, each with the reason."""
    before: int
    """Bytes of the layers' weights."""
    after: int
    """Bytes of their codes and scales."""
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        """The number of frozen layers, the bytes, and the other layers."""
        share = f"{self.after / self.before:.3f}" if self.before else "-"
        lines = [
            f"{len(self.layers)} layers frozen in INT8: {self.before / _GIB:.3f} GiB of weights "
            f"are now {self.after / _GIB:.3f} GiB ({share})"
        ]
        reasons: dict[str, list[str]] = {}
        for name, why in self.skipped:
            reasons.setdefault(why, []).append(name)
        lines += [f"not frozen ({why}): {listed(names)}" for why, names in reasons.items()]
        return "\n".join([*lines, *self.notes])

    def to_json(self) -> str:
        """The whole report as JSON."""
        return json.dumps(dataclasses.asdict(self), indent=1)


def freeze_int8(
    model: nn.Module,
    filter_fn: Filter | None = None,
    *,
    save_codes: bool = False,
    convrot: bool = False,
) -> nn.Module:
    """Keep the weights of converted linear layers as INT8 codes alone, in place.

    For fine-tuning by adapters (LoRA): about a byte a value instead of two or four. Call it after
    :func:`convert`, before or after ``peft.get_peft_model``, before ``torch.compile``, DDP and the
    optimizer. The weights are not trained any more; biases stay as they are. With
    ``forward="int8"`` in the layers' configurations the INT8 product takes the codes. Otherwise,
    and in eval mode without ``forward_in_eval``, every call dequantises the weight. Backward
    dequantises it, one layer at a time, and computes g_x as before.

    ``layer.weight`` still reads as a tensor of values. Writing to it by ``weight.data = ...`` or
    ``+=``, as peft's merge does, makes the layer one with a plain weight again; other writes raise
    an error. ``state_dict()`` has the dequantised weights under the plain keys, on the CPU;
    ``load_state_dict`` takes those, which are quantised, and codes.

    Args:
        model: has layers that :func:`convert` made: linear ones, or transformers' ``Conv1D``.
        filter_fn: ``filter_fn(module, fqn)`` says which layers to freeze. None freezes all, or
            those whose weight does not require grad if there are any. (peft's ``modules_to_save``
            are trained beside them.)
        save_codes: ``state_dict()`` has the codes themselves, ``weight_codes``, without a copy.
            They load into a model that is frozen alike.
        convrot: the codes are those of ConvRot, the 8-bit format of ComfyUI and of diffusion
            trainers, with ``forward_block`` as group. ``state_dict()`` and ``load_state_dict`` have
            its keys, ``weight``, ``weight_scale`` and ``comfy_quant``.

    Returns:
        The same model. Its ``freeze_report`` is the :class:`.FreezeReport` of this call.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: no layer can be frozen, or a weight has no codes (float64). The layer is named,
            and nothing has changed. Where memory runs out, the layers before the named one are
            frozen, and another call goes on.

    Source: docs/torch/lora.md, "Frozen weights in a byte".
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    layers: dict[str, Any] = {n: m for n, m in model.named_modules() if isinstance(m, HotModule)}
    why_not = functools.partial(_why_not, filter_fn=filter_fn, convrot=convrot)
    held = held_forwards(model)
    reasons = {fqn: why for fqn, m in layers.items() if (why := why_not(m, fqn) or held.get(m))}
    reasons |= _shared(model, {fqn: m for fqn, m in layers.items() if fqn not in reasons})
    if filter_fn is None:
        reasons |= _trained({fqn: m for fqn, m in layers.items() if fqn not in reasons})
    chosen = {fqn: m for fqn, m in layers.items() if fqn not in reasons}
    if not layers:
        raise ValueError("model: no converted layer; call hot.convert(model) before freeze_int8")
    if not chosen:
        why = listed([f"{fqn or '(root)'} ({reasons[fqn]})" for fqn in layers])
        raise ValueError(f"model: no layer can be frozen: {why}")
    weights = {fqn: m._parameters["weight"] for fqn, m in chosen.items()}
    owners = {fqn: id(weight) for fqn, weight in weights.items()}
    uses = collections.Counter(owners.values())
    before = sum({id(weight): weight.nbytes for weight in weights.values()}.values())
    weights.clear()  # each is freed when its layer is done
    for layer in chosen.values():  # a row each, before anything changes
        encoded(layer, _frozen_class(layer, convrot), slice(1))
    codes: dict[tuple[int, int, bool], nn.Parameter] = {}
    for fqn, layer in chosen.items():
        cls = _frozen_class(layer, convrot)
        key = (owners[fqn], layer.config.forward_block, cls.transposed)  # tied ones share codes
        if key not in codes:
            codes[key] = parameter(encoded(layer, cls))
        freeze(layer, cls, save_codes, uses[owners[fqn]] > 1, codes[key])
    after = sum(each.nbytes for each in codes.values())
    model.__dict__[FREEZE_REPORT] = FreezeReport(
        tuple(chosen), tuple(reasons.items()), before, after, tuple(_notes(chosen.values()))
    )
    return model


def thaw(model: nn.Module) -> int:
    """Undo :func:`.freeze_int8`: layers with plain, dequantised weights, in place.

    The weights are new Parameters, not trained until ``requires_grad_(True)``; they have the values
    that the codes stand for. An optimizer made before does not know them.

    Args:
        model: any module.

    Returns:
        The number of layers.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: a layer cannot be thawed, because something wraps it; nothing has changed.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    frozen = unwrapped(model, FrozenModule, "thaw()")
    for layer, weight in plain_weights(frozen.values()).items():
        layer.thaw(weight)
    for each in model.modules():
        each.__dict__.pop(FREEZE_REPORT, None)
    return len(frozen)


def _frozen_class(layer: HotModule, convrot: bool) -> type[FrozenModule]:
    if isinstance(layer, HotLinear):
        return HotConvRotLinear if convrot else HotFrozenLinear
    from ..frozen.conv1d import HotFrozenConv1D  # imports transformers

    return HotFrozenConv1D


def _why_not(layer: HotModule, fqn: str, filter_fn: Filter | None, convrot: bool) -> str:
    """Why a converted layer cannot or shall not be frozen; empty if it will be."""
    assert isinstance(layer, nn.Module)
    if isinstance(layer, FrozenModule):
        return "frozen already"
    kind = kind_of(layer)
    if kind not in ("Linear", "Conv1D"):
        return f"a {kind}; only linear layers can be"
    if type(layer) is not hot_class(layer):
        return f"now a {type(layer).__name__}; freeze_int8 comes before what was wrapped around it"
    if why := own_forward(layer):
        return why
    weight = layer._parameters.get("weight")
    if weight is None or type(weight) not in ops.PLAIN_TYPES:
        kind = "computed" if weight is None else f"a {type(weight).__name__}"
        return f"its weight is {kind}, not a Parameter"
    if filter_fn is not None and not filter_fn(layer, fqn):
        return "left out by filter_fn"
    if convrot:
        return why_no_convrot(layer) if isinstance(layer, HotLinear) else f"a {kind} has no ConvRot"
    return ""


def _shared(model: nn.Module, layers: Mapping[str, Any]) -> dict[str, str]:
    """Layers whose weight another module has, too, which stays as it is."""
    chosen = {id(layer) for layer in layers.values()}
    others = {
        id(parameter): name
        for name, module in model.named_modules()
        if id(module) not in chosen
        for parameter in module._parameters.values()
        if parameter is not None
    }
    names = {fqn: others.get(id(m._parameters["weight"])) for fqn, m in layers.items()}
    return {fqn: f"its weight is that of {name}, too" for fqn, name in names.items() if name}


def _trained(layers: Mapping[str, Any]) -> dict[str, str]:
    """Layers whose weight is trained beside frozen ones: peft's ``modules_to_save``."""
    trained = [fqn for fqn, m in layers.items() if m._parameters["weight"].requires_grad]
    if len(trained) == len(layers):  # a model without adapters yet
        return {}
    return dict.fromkeys(trained, "its weight is trained, beside frozen ones; a filter_fn takes it")


def _notes(layers: Iterable[HotModule]) -> Iterator[str]:
    if not _compat.traces_parameters():
        yield (
            "torch before 2.13: weight_codes are ordinary Parameters, and a write to their data is "
            "not found; averages of parameters (EMA, SWA) must leave out those of torch.uint8"
        )
    configs = [layer.config for layer in layers]
    if any(config.forward == "plain" for config in configs):
        yield (
            "with a plain forward the weight is dequantised by every call; forward='int8' in the "
            "configuration multiplies the codes"
        )
    elif not all(config.forward_in_eval for config in configs):
        yield (
            "in eval mode the weight is dequantised by every call; forward_in_eval=True in the "
            "configuration multiplies the codes there, too"
        )
