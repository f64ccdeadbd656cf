"""``freeze``: frozen weights of converted layers in half a byte or a byte; ``thaw`` undoes it."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .. import _compat, ops
from ..frozen import feature_sizes
from ..frozen.convrot import HotConvRotLinear
from ..frozen.convrot import why_not as why_no_convrot
from ..frozen.weights import FrozenModule, HotFrozenLinear, plain_weights
from ..layers.modules import HotLinear, HotModule, held_forwards, own_forward, unwrapped
from ..ops import frozen_codes
from ..ops.frozen_codes import parameter
from ..progress import shown
from .probe import seen_by
from .report import FREEZE_REPORT, listed
from .selection import Filter, hot_class, kind_of

_GIB = 2**30


@dataclasses.dataclass(frozen=True)
class FreezeReport:
    """Report of :func:`.freeze`, the model's attribute ``freeze_report``; print it."""

    layers: tuple[str, ...]
    """Names of the layers that are frozen now."""
    skipped: tuple[tuple[str, str], ...]
    """Names of the other converted layers, each with the reason."""
    before: int
    """Bytes of the layers' weights."""
    after: int
    """Bytes of their codes and scales."""
    notes: tuple[str, ...] = ()
    bits: int = 8
    sizes: str = ""
    """Origin of the sizes of in features, in 4 bits."""

    def __str__(self) -> str:
        share = f"{self.after / self.before:.3f}" if self.before else "-"
        lines = [
            f"{len(self.layers)} layers frozen in INT{self.bits}: {self.before / _GIB:.3f} GiB of "
            f"weights are now {self.after / _GIB:.3f} GiB ({share})"
        ]
        if self.sizes:
            lines.append(f"sizes of in features: {self.sizes}")
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
    progress: bool = True,
) -> nn.Module:
    """Call :func:`.freeze` with ``bits=8``: a byte a value, and about 1 % of error in a weight."""
    return freeze(model, 8, filter_fn, save_codes=save_codes, convrot=convrot, progress=progress)


@torch.inference_mode(False)  # whose tensors no training can take
def freeze(
    model: nn.Module,
    bits: Literal[8, 4] = 4,
    filter_fn: Filter | None = None,
    *,
    inputs: Iterable[Any] | None = None,
    save_codes: bool = False,
    convrot: bool = False,
    progress: bool = True,
) -> nn.Module:
    """Keep the weights of converted linear layers as INT4 or INT8 codes alone, in place.

    Call it after :func:`convert`, before or after ``peft.get_peft_model``, before
    ``torch.compile``, DDP and the optimizer. The weights are not trained any more.

    Args:
        model: has layers that :func:`convert` made: linear ones, or transformers' ``Conv1D``.
        bits: 4, or 8 (:func:`freeze_int8`).
        filter_fn: ``filter_fn(module, fqn)`` says which layers to freeze. None freezes all, or
            those whose weight does not require grad if there are any.
        inputs: only in 4 bits: batches of the training's text, a few thousand tokens in all, which
            the model runs in eval mode. The sizes of x's features then say where a weight must be
            exact; otherwise its columns do.
        save_codes: ``state_dict()`` has the codes themselves, ``weight_codes``, instead of the
            dequantised weights on the CPU. ``load_state_dict`` takes both.
        convrot: only in 8 bits: codes and keys of ConvRot, with ``forward_block`` as group.
        progress: show on a terminal which batch or layer is at work, and the time left.

    Returns:
        The same model. Its ``freeze_report`` is the :class:`.FreezeReport` of this call.

    Raises:
        TypeError: ``model`` is no module, or ``inputs`` is no iterable.
        ValueError: an argument is bad, no layer can be frozen, or a weight has no codes (float64).
            In 4 bits also where a weight or the x of a layer has a NaN or an infinity. The layer is
            named, and nothing has changed. Where memory runs out, the layers before the named one
            are frozen, and another call goes on.

    Source: docs/torch/lora.md, "Frozen weights".
    """
    check_inputs(model, bits, inputs)
    if bits == 4 and convrot:
        raise ValueError("convrot: expected False with bits=4; ConvRot's codes have 8 bits")
    freezing = Freezing(model, bits, filter_fn, save_codes=save_codes, convrot=convrot)
    exponents: Mapping[str, Any] = {}
    measured, sizes = frozenset[str](), ""
    if bits == 4:
        exponents, measured, sizes = _exponents(model, freezing, inputs, progress)
    for fqn in freezing.layers:  # a row each, before anything changes
        freezing.encoded(fqn, freezing.rows(fqn)[:1], exponents.get(fqn))
    for fqn in shown(list(freezing.layers), "freeze: {}", progress):
        codes = freezing.codes.get(freezing.key(fqn))
        if codes is None:
            codes = parameter(freezing.encoded(fqn, freezing.rows(fqn), exponents.get(fqn)))
        freezing.freeze(fqn, codes, measured=fqn in measured)
    freezing.report(sizes)
    return model


def check_inputs(model: object, bits: int, inputs: Any) -> None:
    """Raise TypeError or ValueError for bad arguments of :func:`freeze`."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    if bits not in (4, 8):
        raise ValueError(f"bits: expected 4 or 8, got {bits!r}")
    if bits == 8 and inputs is not None:
        raise ValueError("inputs: expected None with bits=8, whose codes need no sizes of x")
    if isinstance(inputs, Tensor | Mapping) or not isinstance(inputs, Iterable | None):
        kind = type(inputs).__name__
        raise TypeError(f"inputs: expected an iterable of batches, as [batch], got a {kind}")


class Freezing:
    """Layers to be frozen (ValueError: none), and their codes; :meth:`freeze` changes a layer."""

    def __init__(
        self,
        model: nn.Module,
        bits: int,
        filter_fn: Filter | None = None,
        *,
        save_codes: bool = False,
        convrot: bool = False,
    ) -> None:
        layers: dict[str, Any] = {
            n: m for n, m in model.named_modules() if isinstance(m, HotModule)
        }
        why_not = functools.partial(_why_not, filter_fn=filter_fn, convrot=convrot, bits=bits)
        held = held_forwards(model)
        reasons = {fqn: why for fqn, m in layers.items() if (why := why_not(m, fqn) or held.get(m))}
        reasons |= _shared(model, {fqn: m for fqn, m in layers.items() if fqn not in reasons})
        if filter_fn is None:
            rest = {n: m._parameters["weight"] for n, m in layers.items() if n not in reasons}
            trained = [fqn for fqn, weight in rest.items() if weight.requires_grad]
            if len(trained) < len(rest):  # otherwise a model without adapters yet
                why = "its weight is trained, beside frozen ones; a filter_fn takes it"
                reasons |= dict.fromkeys(trained, why)
        chosen = {fqn: m for fqn, m in layers.items() if fqn not in reasons}
        if not layers:
            raise ValueError("model: no converted layer; call hot.convert(model) before freeze")
        if not chosen:
            why = listed([f"{fqn or '(root)'} ({reasons[fqn]})" for fqn in layers])
            raise ValueError(f"model: no layer can be frozen: {why}")
        weights = {fqn: m._parameters["weight"] for fqn, m in chosen.items()}
        self.model, self.bits, self.save_codes = model, bits, save_codes
        self.layers: dict[str, Any] = chosen
        """Layers that are frozen, by name."""
        self.skipped = tuple(reasons.items())
        self.classes = {fqn: _frozen_class(layer, convrot) for fqn, layer in chosen.items()}
        self.owners = {fqn: id(weight) for fqn, weight in weights.items()}
        """Numbers of the layers' weights, which tied ones share."""
        self.codes: dict[Any, nn.Parameter] = {}
        """Codes that layers have, by :meth:`key`."""
        self._users: dict[int, list[str]] = {}
        for fqn, owner in self.owners.items():
            self._users.setdefault(owner, []).append(fqn)
        self._before = sum({id(weight): weight.nbytes for weight in weights.values()}.values())

    def key(self, fqn: str) -> tuple[int, int, bool]:
        """Key of a layer's codes, which tied weights share."""
        layer, cls = self.layers[fqn], self.classes[fqn]
        return self.owners[fqn], layer.config.forward_block, cls.transposed

    def sizes(self, fqn: str) -> tuple[int, int]:
        """Bytes of a layer's codes without and with their tail."""
        form = frozen_codes.Format(self.layers[fqn].config.forward_block, False, self.bits)
        shape = self.rows(fqn).shape
        return form.body(*shape), form.bytes(*shape)

    def rows(self, fqn: str) -> Tensor:
        """The weight ``[O, I]`` of a layer."""
        return self.classes[fqn].rows(self.layers[fqn]._parameters["weight"].detach())

    def encoded(self, fqn: str, rows: Tensor, exponents: Tensor | None) -> Tensor:
        """Codes of rows of a layer's weight; errors begin with its name."""
        layer = self.layers[fqn]
        try:
            return self.classes[fqn].encode(rows, layer.config, exponents)
        except (ValueError, RuntimeError) as error:
            layer.prefix_layer_name(error)
            raise

    def encoded_weight(self, fqn: str, weight: Tensor, size_of_x: Tensor | None = None) -> Tensor:
        """Codes of another weight for a layer. Raises ValueError for a NaN or an infinity."""
        rows = self.classes[fqn].rows(weight)
        exponents = None
        if self.bits == 4:
            exponents = feature_sizes.exponents(self.columns(fqn, rows), size_of_x)
        return self.encoded(fqn, rows, exponents)

    def columns(self, fqn: str, rows: Tensor) -> Tensor:
        """Sizes of the columns of a layer's weight. Raises ValueError for a NaN or an infinity."""
        sizes = feature_sizes.of_columns(rows)
        if not (sizes.is_meta or bool(sizes.isfinite().all())):
            raise ValueError(f"layer {fqn or '(root)'}: weight: it has a NaN or an infinity")
        return sizes

    def freeze(self, fqn: str, codes: nn.Parameter, measured: bool = False) -> None:
        """Replace the weight of a layer by its codes."""
        self.codes[self.key(fqn)] = codes
        fields: dict[str, Any] = {"weight_bits": self.bits, "weight_measured": measured}
        users = self._users[self.owners[fqn]]
        fields |= {"save_codes": self.save_codes, "weight_tied": users if len(users) > 1 else []}
        self.classes[fqn].freeze(self.layers[fqn], codes, **fields)

    def report(self, sizes: str = "weights") -> None:
        """Set the model's report, in 4 bits with the origin of the sizes."""
        after = sum(each.nbytes for each in self.codes.values())
        notes = tuple(_notes(self.layers.values()))
        about = (tuple(self.layers), self.skipped, self._before, after, notes, self.bits)
        self.model.__dict__[FREEZE_REPORT] = FreezeReport(*about, sizes if self.bits == 4 else "")


def _exponents(
    model: nn.Module, freezing: Freezing, inputs: Iterable[Any] | None, progress: bool
) -> tuple[dict[str, Tensor], frozenset[str], str]:
    """Exponents of the layers, the layers whose come from x, and words about their origin."""
    columns: dict[str, Tensor] = {}
    of_owner: dict[int, Tensor] = {}
    chosen, owners = freezing.layers, freezing.owners
    for fqn in shown(list(chosen), "freeze: columns of {}", progress):
        if owners[fqn] not in of_owner:
            of_owner[owners[fqn]] = freezing.columns(fqn, freezing.rows(fqn))
        columns[fqn] = of_owner[owners[fqn]]
    if inputs is None:
        return {n: feature_sizes.exponents(c) for n, c in columns.items()}, frozenset(), "weights"
    by_owner, words = sizes_of_x(model, freezing, inputs, progress)
    out = {n: feature_sizes.exponents(c, by_owner.get(owners[n])) for n, c in columns.items()}
    return out, frozenset(n for n in chosen if owners[n] in by_owner), words


def sizes_of_x(
    model: nn.Module, freezing: Freezing, inputs: Iterable[Any], progress: bool
) -> tuple[dict[int, Tensor], str]:
    """Sizes of the x of each weight, by its owner, and words about their origin."""
    seen = seen_by(model, freezing.layers, shown(inputs, "freeze: batch {}", progress))
    if not seen.squares:
        raise ValueError(f"inputs: none of {seen.batches} batches reached a layer to be frozen")
    squares: dict[int, Tensor] = {}
    for fqn, sums in seen.squares.items():  # tied weights have one size for all of their x
        owner, mean = freezing.owners[fqn], sums / seen.tokens[fqn]
        squares[owner] = squares.get(owner, 0.0) + mean
    words = f"x of {max(seen.tokens.values()):,} tokens, and weights"
    if rest := [fqn for fqn, owner in freezing.owners.items() if owner not in squares]:
        words += f"; weights alone for {listed(rest)}, which no batch reached"
    return {owner: mean.sqrt() for owner, mean in squares.items()}, words


def thaw(model: nn.Module) -> int:
    """Undo :func:`.freeze`: layers with plain, dequantised weights, in place; return their number.

    The weights are new Parameters, not trained until ``requires_grad_(True)``. An optimizer made
    before does not know them. Raises TypeError if ``model`` is no module, and ValueError if
    something wraps a layer; nothing has changed then.
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


def _why_not(layer: HotModule, fqn: str, filter_fn: Filter | None, convrot: bool, bits: int) -> str:
    """Why a converted layer cannot or shall not be frozen; empty if it will be."""
    assert isinstance(layer, nn.Module)
    if isinstance(layer, FrozenModule):
        return "frozen already"
    kind = kind_of(layer)
    if kind not in ("Linear", "Conv1D"):
        return f"a {kind}; only linear layers can be"
    if type(layer) is not hot_class(layer):
        return f"now a {type(layer).__name__}; freeze comes before what was wrapped around it"
    if why := own_forward(layer):
        return why
    weight = layer._parameters.get("weight")
    if weight is None or type(weight) not in ops.PLAIN_TYPES:
        kind = "computed" if weight is None else f"a {type(weight).__name__}"
        return f"its weight is {kind}, not a Parameter"
    if weight.dim() != 2:  # DeepSpeed leaves Parameters without values
        return f"its weight has shape {list(weight.shape)}; freeze comes before ZeRO 3's shards"
    if filter_fn is not None and not filter_fn(layer, fqn):
        return "left out by filter_fn"
    if bits == 4:
        features = weight.shape[0] if kind == "Conv1D" else weight.shape[1]
        codes, group = frozen_codes.padded(features, layer.config.forward_block), frozen_codes.GROUP
        if codes % group:
            return f"{codes} codes a row; INT4 needs a multiple of {group}, as forward_block 32 has"
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
