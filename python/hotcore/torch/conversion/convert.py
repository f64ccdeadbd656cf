"""``convert`` a model's layers to HOT, in place, and ``revert`` them."""

from __future__ import annotations

import dataclasses
import difflib
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ... import _core, contexts, gpus
from ...config import ConfigLike, HotConfig, HotConfigFields, as_config, check_names
from ...saved import saved_layout
from ..frozen.bitsandbytes import is_8bit
from ..frozen.weights import FrozenModule, plain_weights
from ..layers.head import attach, detach, is_attached
from ..layers.modules import (
    HotModule,
    become,
    defer_in_blocks,
    is_pointwise,
    own_forward,
    unwrapped,
)
from ..ops import is_dtensor
from ..ops.conv import settings
from . import gains, probe, selection, unconverted
from .report import (
    FREEZE_REPORT,
    REPORT,
    ConversionReport,
    Converted,
    Row,
    Skipped,
    group_alike,
    listed,
)
from .selection import Filter, features_of, hot_class, products_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

Override = ConfigLike | HotConfigFields | None
_Model = TypeVar("_Model", bound=nn.Module)
_ARGUMENTS = ("filter_fn", "overrides", "inputs", "device", "slower", "head")
_REPORT_TOKENS = 4096  # tokens for which the report states bytes
_NEVER_CALLED = "never called: its weight is multiplied without it, as in F.linear(x, layer.weight)"
_LEFT_OUT = "left out by overrides"


def convert(
    model: _Model,
    config: ConfigLike = "default",
    filter_fn: Filter | None = None,
    overrides: Mapping[str, Override] | None = None,
    *,
    inputs: Any = None,
    device: torch.device | str | None = None,
    slower: bool = False,
    head: bool | ConfigLike = False,
    **fields: Unpack[HotConfigFields],
) -> _Model:
    """Convert linear layers, convolutions and attention's projections to HOT, in place.

    ``nn.Linear``, ``nn.Conv2d``, ``nn.MultiheadAttention``, transformers' ``Conv1D`` and
    bitsandbytes' ``Linear8bitLt`` stay the same objects with the same Parameters; their class
    changes.

    Args:
        model: any module.
        config: a HotConfig or a recipe's name.
        filter_fn: ``filter_fn(module, fqn)`` decides whether to convert a layer. None: the rules of
            docs/torch/convert.md, with :data:`HEAD_NAMES`, :data:`MIN_FEATURES` and, on CUDA,
            :mod:`hotcore.torch.conversion.gains`.
        overrides: maps name patterns (``fnmatch``) to the configuration of the matching layers.
            This is a HotConfig, a recipe's name, a dict of the fields that differ from ``config``,
            or None to stay plain. The last match counts. A layer that is named in full is converted
            even if it is expected to be slower.
        inputs: a Tensor, a tuple of positional or a mapping of keyword arguments for ``model``. One
            forward pass without gradients then finds layers that never run, token grids that do not
            fit, and the share of multiply-adds. Model and random state do not change.
        device: the device of training; by default that of the first weight.
        slower: also convert layers that are expected to be slower than plain torch.
        head: True or a configuration: a causal LM model of transformers computes its loss by
            :func:`hotcore.torch.linear_cross_entropy`. It then returns empty ``logits``. A
            UserWarning says why it cannot.
        **fields: fields of :class:`.HotConfig` that replace those of ``config``.

    Returns:
        ``model``. :func:`hotcore.torch.report` and the attribute ``hot_report`` give the
        :class:`.ConversionReport` of this call. A UserWarning says if all layers stay plain because
        they would be slower.

    Raises:
        TypeError: ``model`` is no module, ``filter_fn`` no function, ``overrides`` no mapping of
            texts, or an argument is unknown.
        ValueError: a layer is already converted, or sharded (``fully_shard`` comes after). No layer
            can be converted. A pattern matches no layer or only plain ones. A ``token_grid`` does
            not fit ``inputs``. ``model`` is an ``nn.DataParallel``.
        NotImplementedError: ``model`` is on CUDA, without a CUDA backend or kernels for that GPU.

    Source: docs/torch/convert.md.
    """
    base = _with_fields(as_config(config), fields, "convert", _ARGUMENTS)
    products = None if isinstance(head, bool) else as_config(head, "head")
    options = (filter_fn, overrides, inputs, device, slower)
    decision = decide(model, base, *options, head=head is not False)
    for row in decision.report.converted:
        layer: Any = model.get_submodule(row.name)
        hot_class(layer).from_plain(layer, row.config).layer_name = row.name
    defer_in_blocks(model)
    if head is not False:
        why = attach(model, products)
        if why and not decision.report.converted:
            raise ValueError(f"head: {why}; and no layer is converted")
        done = f"loss in chunks, {products or 'torch products'}"
        decision.report.head = f"stays plain: {why}" if why else done
        if why:
            warnings.warn(f"hotcore.torch.convert: head: {why}", stacklevel=2)
    model.__dict__[REPORT] = decision.report
    if decision.warning:
        warnings.warn(f"hotcore.torch.convert: {decision.warning}", stacklevel=2)
    return model


@dataclasses.dataclass
class Decision:
    """Plan of :func:`convert` for a model, which has not changed."""

    report: ConversionReport
    warning: str
    slow: Mapping[str, str]
    """Names of layers that stay plain because they would be slower, and the reasons."""


def decide(
    model: nn.Module,
    config: ConfigLike = "default",
    filter_fn: Filter | None = None,
    overrides: Mapping[str, Override] | None = None,
    inputs: Any = None,
    device: torch.device | str | None = None,
    slower: bool = False,
    head: bool = False,
) -> Decision:
    """Choose the layers of :func:`convert`; with ``head`` none at all is no error."""
    _check_model(model)
    if filter_fn is not None and not callable(filter_fn):
        kind = type(filter_fn).__name__
        raise TypeError(f"filter_fn: expected a function, got {kind}; did you mean overrides=?")
    base, overrides = as_config(config), overrides or {}
    if not isinstance(overrides, Mapping) or not all(isinstance(name, str) for name in overrides):
        raise TypeError(
            f"overrides: expected a mapping of name patterns to configurations, got {overrides!r}"
        )
    layers = selection.candidates(model)
    uses, total, never_called = _dry_run(model, dict(layers), inputs)
    reasons = selection.why_plain(model, layers, filter_fn)
    reasons = dict.fromkeys(never_called, _NEVER_CALLED) | reasons
    _check_sharded(layers, reasons, filter_fn)
    configs = _configs(base, overrides, [fqn for fqn, _ in layers], reasons)
    left_out = [fqn for fqn, layer_config in configs.items() if layer_config is None]
    reasons = dict.fromkeys(left_out, _LEFT_OUT) | reasons
    first = next(model.parameters(), None)
    where = torch.device(device or ("cpu" if first is None else first.device))
    target, rate = where.type, selection.rate_of(where)
    tokens = {fqn: use.tokens for fqn, use in uses.items()}
    slowly = selection.why_slow(layers, configs, target, rate, tokens)
    anyway = slowly if slower or filter_fn is not None else {*reasons, *overrides}
    slow = {fqn: why for fqn, why in slowly.items() if fqn not in anyway}
    twice = [fqn for fqn, m in layers if isinstance(m, HotModule) and fqn not in {*reasons, *slow}]
    if twice:
        raise ValueError(
            f"model: already converted ({listed(twice)}); revert() it first, or leave these "
            "layers out with filter_fn"
        )
    chosen = {*left_out} & {*overrides}  # named in full, as paper.calibrate does
    nothing = all(fqn in reasons and fqn not in chosen for fqn, _ in layers)
    reasons |= slow
    rows: list[Row] = []
    counted: set[int] = set()
    in_eval_mode: list[str] = []
    for fqn, module in layers:
        layer_config, use = configs[fqn] or base, uses.get(fqn)
        about = (fqn, selection.kind_of(module), *features_of(module))
        facts = selection.facts_of(module, layer_config, target, rate, tokens.get(fqn))
        time = gains.expected_time(facts)
        measures: dict[str, Any] = {
            "parameters": _count_parameters(module, counted),
            "macs": use.macs if use else None,
            "expected_time": None if is_8bit(module) else time,  # bitsandbytes' was not measured
        }
        if fqn in reasons:
            rows.append(Skipped(*about, reasons[fqn], **measures))
            continue
        _check_grid(fqn, module, layer_config, use)
        if not module.training and hot_class(module).plain_in_eval(module, layer_config):
            in_eval_mode.append(fqn)
        notes = (_use_note(use), _plain_note(module, layer_config, target), slowly.get(fqn))
        size, note = _bytes_per_value(module, layer_config, target), "; ".join(filter(None, notes))
        rows.append(Converted(*about, layer_config, size, **measures, note=note))
    converted = [row for row in rows if isinstance(row, Converted)]
    report = ConversionReport(
        base,
        converted,
        [row for row in rows if isinstance(row, Skipped)],
        rows,
        unconverted.matrices(model),
        parameter_count=sum(parameter.numel() for parameter in model.parameters()),
        macs=total,
        in_eval_mode=in_eval_mode,
    )
    if not slow and nothing and not head:
        able = [n for n, m in layers if reasons[n] == _LEFT_OUT or _by_choice(reasons[n], m)]
        raise ValueError(_nothing(report, model, able, filter_fn is not None))
    report.notes += _notes(report, model, layers, reasons, slow, rate, filter_fn is None)
    if target == "cuda" and not _core.built_with_cuda():
        report.notes.append("this build of hotcore has no CUDA backend: python -m hotcore.info")
    warning = ""
    if not converted and (slow or chosen):
        why = _LEFT_OUT
        if slow:
            rule = f" ({gains.NO_INT8})" if gains.NO_INT8 in slow.values() else ""
            why = f"expected to be slower than plain torch's{rule} on CUDA; slower=True converts "
            why += "them anyway, for memory"
        warning = f"no layer is converted; all {len({*slow, *chosen})} that could be are {why}"
    return Decision(report, warning, slow)


def revert(model: nn.Module) -> nn.Module:
    """Give every HOT module its plain class back, in place; return the model.

    Layers with a :class:`.CustomBackward` become plain, too, and frozen ones get a plain weight.
    ``hot_report`` is removed; accelerate's hooks stay. A UserWarning says if nothing was converted.

    Raises ValueError if something wraps a HOT module. This may be a subclass (a parametrisation,
    ``fully_shard``), a ``forward`` of its own (a patch), or an attribute that holds its bound
    ``forward``. Undo that first; nothing has changed then.
    """
    changed = unwrapped(model, why=lambda m: "" if is_attached(m) else own_forward(m))
    weights = plain_weights(m for m in changed.values() if isinstance(m, FrozenModule))
    detach(model)  # the last call that may raise
    for layer, weight in weights.items():
        layer.thaw(weight)
    for module in changed.values():
        become(module, module.plain)
    reports = [vars(m).pop(name, None) for m in model.modules() for name in (REPORT, FREEZE_REPORT)]
    if not changed and not any(reports):
        warnings.warn("hotcore.torch.revert: model: no layer of it is converted", stacklevel=2)
    return model


def _with_fields(
    config: HotConfig, fields: Mapping[str, Any], where: str, arguments: Sequence[str] = ()
) -> HotConfig:
    """Return ``config`` with some fields replaced; ``arguments`` are other names to suggest."""
    check_names(fields, where, arguments)
    try:
        return dataclasses.replace(config, **fields)
    except (TypeError, ValueError) as error:
        raise type(error)(str(error) if arguments else f"{where}: {error}") from None


def _check_model(model: object) -> None:
    if isinstance(model, nn.DataParallel):
        raise ValueError("model: nn.DataParallel is not supported; use DistributedDataParallel")
    if isinstance(model, nn.Module):
        for fqn, module in model.named_modules():
            if any(map(is_lazy, module._parameters.values())):
                raise ValueError(
                    f"model: {fqn or '(root)'} is a {type(module).__name__}, whose weights have no "
                    "shapes yet; call the model once, then convert it"
                )
        for device in {p.device for p in model.parameters() if p.device.type == "cuda"}:
            try:
                contexts.cuda(device.index or 0, 0)  # otherwise the first backward would fail
            except (NotImplementedError, ValueError) as error:
                raise type(error)(f"model: it is on {device}; {error}") from None
        return
    what = type(model).__name__
    if isinstance(model, type):
        what = f"the class {model.__name__}; make an object of it first"
    elif isinstance(model, list | tuple):
        what += "; convert each of them, or put them into an nn.ModuleList"
    raise TypeError(f"model: expected a torch.nn.Module, got {what}")


def _check_sharded(
    layers: list[tuple[str, nn.Module]], reasons: Mapping[str, str], filter_fn: Filter | None
) -> None:
    for fqn, module in layers:
        if isinstance(module, HotModule) or not any(map(is_dtensor, module.parameters())):
            continue
        # fully_shard makes a subclass of a layer, which is a reason, too.
        subclass = reasons.get(fqn) == selection.why_impossible(module)
        if fqn not in reasons or (subclass and (filter_fn is None or filter_fn(module, fqn))):
            raise ValueError(
                f"model: the weight of {fqn or '(root)'} is a DTensor, sharded already; call "
                "hot.convert first, then fully_shard (or parallelize_module)"
            )


def _dry_run(
    model: nn.Module, layers: Mapping[str, nn.Module], inputs: Any
) -> tuple[dict[str, probe.LayerUse], int | None, set[str]]:
    """Uses of layers, multiply-adds, and layers whose weight is used without calling them."""
    if inputs is None:
        return {}, None, unconverted.bypassed(model, layers)
    watch = probe.Watch(layers)
    with probe.preserve_state(model), torch.no_grad(), probe.eagerly(), watch:
        total = probe.total_macs(lambda: probe.output_of(model, inputs))
    never = {fqn for fqn, use in watch.uses.items() if use.bypassed and not use.calls}
    return watch.uses, total, never


def _use_note(use: probe.LayerUse | None) -> str:
    if use is not None and use.bypassed:
        return "its weight is also multiplied without it, plain"
    return "" if use is None or use.calls else "not called with these inputs"


def _plain_note(module: nn.Module, config: HotConfig, device: str) -> str:
    """Parts of the configuration that the layer ignores, in words."""
    int8 = config.forward == "int8"
    if is_8bit(module):
        return "its forward stays bitsandbytes'" if int8 else ""
    if products_of(module, config, device) is not False:
        return ""
    pointwise8 = int8 and isinstance(module, nn.Conv2d) and is_pointwise(module)
    notes = [f"its products{' of backward' if pointwise8 else ''} stay torch's own"]
    if config.basis != "full":
        storage = settings(config, False, None).storage
        notes.append(f"x is kept whole, in {storage}: a low rank is for 1x1 kernels")
    if int8 and not pointwise8:
        notes.append("its forward stays plain: 8 bits are for 1x1 kernels without padding")
    return "; ".join(notes)


def _check_grid(fqn: str, module: nn.Module, config: HotConfig, use: probe.LayerUse | None) -> None:
    if config.token_grid is None or config.basis == "full" or isinstance(module, nn.Conv2d):
        return
    if isinstance(module, nn.MultiheadAttention) and not module.batch_first:
        raise ValueError(
            f"config: token_grid {config.token_grid} needs a sample's tokens one after the other; "
            f"{fqn or '(root)'} is an nn.MultiheadAttention with batch_first=False, which gets "
            "[tokens, samples, features]: give it another configuration by overrides"
        )
    sample = _sample_tokens(config)
    for call in use.calls if use else ():
        tokens = math.prod(call.shape[:-1])
        if tokens % sample:
            raise ValueError(
                f"config: token_grid {config.token_grid} with {config.prefix_tokens} prefix tokens "
                f"makes samples of {sample} tokens; layer {fqn or '(root)'} is given {tokens} "
                f"(x {list(call.shape)}). Other layers' grids go into overrides"
            )


def _sample_tokens(config: HotConfig) -> int:
    """Tokens of a sample; 1 without a grid."""
    return math.prod(config.token_grid or (1,)) + config.prefix_tokens


def _count_parameters(module: nn.Module, counted: set[int]) -> int:
    """Count a layer's values without the Parameters in ``counted``, which grows by the others."""
    parts = [module, module.out_proj] if isinstance(module, nn.MultiheadAttention) else [module]
    every = {id(p): p.numel() for part in parts for p in part._parameters.values() if p is not None}
    count = sum(size for key, size in every.items() if key not in counted)
    counted.update(every)
    return count


def _nothing(report: ConversionReport, model: nn.Module, able: list[str], filtered: bool) -> str:
    """Return an error's text: why no layer can be converted, and which ones a filter could."""
    which = "filter_fn matched no layer that" if filtered else "no layer"
    text = f"model: {which} can be converted"
    if not report.layers:
        text += "; it has no nn.Linear, nn.Conv2d, nn.MultiheadAttention or transformers Conv1D"
        text += f"; its modules: {listed(sorted({type(m).__name__ for m in model.modules()}))}"
    lines = report.rows([*report.layers, *report.unsupported])
    lines[12:] = [f"{len(lines) - 12} more"] if len(lines) > 12 else []
    if able:
        names = ", ".join(name for (name,) in group_alike([(name or "(root)",) for name in able]))
        lines.append(f"a filter_fn (without overrides to None) could have converted: {names}")
    return "\n".join([text, *lines])


def _by_choice(reason: str, module: nn.Module) -> bool:
    """Whether a filter, the default one or the caller's, left the layer out."""
    return reason not in (_LEFT_OUT, _NEVER_CALLED) and not selection.why_impossible(module)


def _notes(
    report: ConversionReport,
    model: nn.Module,
    layers: list[tuple[str, nn.Module]],
    reasons: Mapping[str, str],
    slow: Mapping[str, str],
    rate: gpus.Int8Rate,
    default_filter: bool,
) -> Iterator[str]:
    if report.in_eval_mode and len(report.in_eval_mode) == len(report.converted):
        yield "the model is in eval mode, where every layer is plain: call model.train()"
    elif report.in_eval_mode:
        yield f"in eval mode, hence plain until .train(): {listed(report.in_eval_mode)}"
    if (time := report.expected_time) is not None:
        yield (
            f"expected on CUDA: the converted layers' forward and backward take {time:.2f} of "
            f"plain torch's time; by {gains.source(rate)}"
        )
    in_eval = any(layer.config.forward_in_eval for layer in report.converted)
    if in_eval and any(isinstance(m, nn.TransformerEncoderLayer) for m in model.modules()):
        yield (
            "in eval mode without gradients nn.TransformerEncoderLayer does not call its layers: "
            "torch.backends.mha.set_fastpath_enabled(False) keeps their 8-bit forward"
        )
    if slow:
        why = f"slower on CUDA, by {gains.source(rate)}" if rate.fast else str(rate)
        options = "slower=True, or their full names in overrides, convert them"
        yield f"{len(slow)} layers stay plain: {why}; {options}"
    if default_filter:
        if any(_by_choice(reasons.get(fqn, _LEFT_OUT), module) for fqn, module in layers):
            few = f"layers with fewer than {selection.MIN_FEATURES} in or out features"
            slower = ", layers that are slower on CUDA" if slow else ""
            yield (
                "default filter: it leaves the output head plain, the first convolution, weights "
                f"tied to an embedding, {few}{slower}"
            )
        last = report.layers[-1] if report.layers else None
        if isinstance(last, Converted):
            yield (
                f"no output head was recognised: the last layer, {last.name or '(root)'}, is "
                "converted; leave it out by overrides if the loss reads its output"
            )
    if report.macs is None:  # without inputs
        maybe = unconverted.bypassed(model, dict(layers), certain=False)
        if unsure := [layer.name for layer in report.converted if layer.name in maybe]:
            names = listed(unsure)
            yield f"may be used without being called: {names}; convert(..., inputs=...) finds out"


def _configs(
    base: HotConfig, overrides: Mapping[str, Override], names: list[str], reasons: Mapping[str, str]
) -> dict[str, HotConfig | None]:
    configs: dict[str, HotConfig | None] = dict.fromkeys(names, base)
    for pattern, override in overrides.items():
        matched = [fqn for fqn in names if fnmatchcase(fqn, pattern)]
        if not matched:
            near = difflib.get_close_matches(pattern.strip("*."), names, n=3, cutoff=0.3)
            raise ValueError(
                f"overrides: {pattern!r} matches no layer; "
                + (f"near it: {', '.join(near)}" if near else f"layers: {listed(names)}")
            )
        if override is not None and all(fqn in reasons for fqn in matched):
            plain = listed([f"{fqn} ({reasons[fqn]})" for fqn in matched])
            raise ValueError(f"overrides: {pattern!r} matches only layers that stay plain: {plain}")
        where, chosen = f"overrides[{pattern!r}]", None
        if isinstance(override, Mapping):
            chosen = _with_fields(base, override, where)
        elif override is not None:
            chosen = as_config(override, where)
        configs.update(dict.fromkeys(matched, chosen))
    return configs


def _bytes_per_value(module: nn.Module, config: HotConfig, device: str) -> float:
    width = features_of(module)[0]
    if selection.is_frozen(module) or not width:
        return 0.0
    pixels = 1  # of which a strided product reads one
    if isinstance(module, nn.Conv2d):
        if products_of(module, config, device):
            pixels = math.prod(module.stride)
        config = settings(config, is_pointwise(module), None)
    sample = _sample_tokens(config)
    tokens = max(1, _REPORT_TOKENS // sample) * sample
    return saved_layout(tokens, width, config).bytes / (tokens * width * pixels)
