"""``convert`` a model's layers to HOT, in place, and ``revert`` them."""

from __future__ import annotations

import dataclasses
import difflib
import warnings
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from .. import _core, contexts, gpus
from ..config import ConfigLike, HotConfig, HotConfigFields, as_config, refuse_arguments
from ..saved import saved_layout
from . import gains, probe, selection, unconverted
from .bitsandbytes import is_8bit
from .freeze import FREEZE_REPORT
from .frozen import FrozenModule, plain_weights
from .head import attach, detach, is_attached
from .modules import HotModule, become, is_pointwise, own_forward, unwrapped
from .ops import is_dtensor
from .ops.conv import settings
from .report import REPORT, ConversionReport, Converted, Skipped, group_alike, listed
from .selection import (
    MIN_FEATURES,
    Filter,
    candidates,
    facts_of,
    features_of,
    hot_class,
    is_frozen,
    kind_of,
    products_of,
    why_plain,
)

Override = ConfigLike | HotConfigFields | None
_Model = TypeVar("_Model", bound=nn.Module)
_REPORT_TOKENS = 4096  # tokens for which the report states bytes
_NEVER_CALLED = "never called"
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
    **removed: NoReturn,
) -> _Model:
    """Convert linear layers, convolutions and attention's projections to HOT, in place.

    Supported are ``nn.Linear``, ``nn.Conv2d``, ``nn.MultiheadAttention``, transformers' ``Conv1D``
    and bitsandbytes' ``Linear8bitLt``. Layers stay the same objects with the same Parameters; their
    class changes, so that whatever holds a layer sees the conversion.

    Args:
        model: any module.
        config: a HotConfig or a recipe's name.
        filter_fn: ``filter_fn(module, fqn)`` decides whether to convert a layer. The default
            leaves out the output head (:data:`HEAD_NAMES`), the first convolution, layers with
            fewer than :data:`MIN_FEATURES` in or out features, layers whose weight is an
            embedding's, peft's adapters, and on CUDA layers that are expected to be slower than
            plain torch (:mod:`hotcore.torch.gains`), which all are on a GPU without fast INT8. With
            any filter these stay plain, because they cannot be converted: subclasses of supported
            layers (their additions would be lost), computed, wrapped or sparse weights, unsupported
            dtypes, and layers whose weight is used without the layer.
        overrides: maps name patterns (``fnmatch``) to the configuration of the matching layers: a
            HotConfig, a recipe's name, a dict of the fields that differ from ``config``, or None to
            stay plain. If several patterns match, the last one counts. A layer that is named in
            full is converted even if it is expected to be slower.
        inputs: a Tensor, a tuple of positional or a mapping of keyword arguments for ``model``. One
            forward pass without gradients then finds layers that never run, token grids that do not
            fit, and the share of multiply-adds. Without inputs, the source code of the layers'
            parents is searched for uses of a layer's weight. Model and random state do not change.
        device: the device of training, if it is not that of the first weight. It selects the rule
            by which layers are slower: on CUDA by INT8's rate on this GPU (docs/gpus.md).
        slower: also convert layers that are expected to be slower than plain torch.
        head: True: a causal LM model of transformers, called with labels in training, computes its
            loss by :func:`hotcore.torch.linear_cross_entropy` with torch's products, and returns
            empty ``logits``; a configuration: with HOT's. A UserWarning says where it cannot. With
            ``filter_fn=lambda *_: False`` that is all that changes.
        **removed: none; an argument of an earlier version is a ValueError that says what to do.

    Returns:
        ``model``. Its attribute ``hot_report`` is the :class:`.ConversionReport` of this call: its
        text says which layers were converted, and why the others stay plain. A UserWarning says
        that all stay plain because they would be slower.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: a layer is already converted, or sharded (``fully_shard`` comes after), no layer
            can be converted, a pattern matches no layer or no converted one, a ``token_grid`` does
            not fit ``inputs``, or ``model`` is an ``nn.DataParallel``.
        NotImplementedError: ``model`` is on CUDA, but this build of hotcore has no CUDA backend or
            no kernels for that GPU.
    """
    refuse_arguments("convert", removed)
    products = None if isinstance(head, bool) else as_config(head, "head")
    settings = (config, filter_fn, overrides, inputs, device, slower)
    decision = decide(model, *settings, head=head is not False)
    for row in decision.report.converted:
        layer: Any = model.get_submodule(row.name)
        hot_class(layer).from_plain(layer, row.config).layer_name = row.name
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
    """What :func:`convert` would do; the model is as it was."""

    report: ConversionReport
    warning: str
    slow: Mapping[str, str]
    """Layers that stay plain as slower -> why."""


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
    """Choose the layers of :func:`convert`; change nothing.

    Arguments and errors are those of :func:`convert`; ``head`` says whether it has one, so that a
    model without layers to convert is no error.
    """
    _check_model(model)
    _check_devices(model)
    base = as_config(config)
    layers = candidates(model)
    uses, total = ({}, None) if inputs is None else _dry_run(model, layers, inputs)
    reasons = why_plain(model, layers, filter_fn)
    reasons |= _unreached(model, layers, uses, reasons)
    _check_sharded(layers, reasons, filter_fn)
    configs = _configs(base, overrides or {}, [fqn for fqn, _ in layers], reasons)
    left = [fqn for fqn, own in configs.items() if own is None]
    reasons = dict.fromkeys(left, _LEFT_OUT) | reasons
    where = _device(model, device)
    target, rate = where.type, selection.rate_of(where)
    slowly = selection.why_slow(layers, configs, target, rate)
    anyway = slowly if slower or filter_fn is not None else {*reasons, *(overrides or {})}
    slow = {fqn: why for fqn, why in slowly.items() if fqn not in anyway}
    twice = [fqn for fqn, m in layers if isinstance(m, HotModule) and fqn not in {*reasons, *slow}]
    if twice:
        raise ValueError(
            f"model: already converted ({listed(twice)}); revert() it first, or leave these "
            "layers out with filter_fn"
        )
    others = unconverted.matrices(model)
    chosen = {fqn for fqn in left if fqn in (overrides or {})}  # by calibrate, as a rule
    nothing = all(fqn in reasons and fqn not in chosen for fqn, _ in layers)
    if not slow and nothing and not head:
        raise ValueError(_nothing(model, layers, reasons, others, filter_fn is not None))
    reasons |= slow
    rows: list[Converted | Skipped] = []
    counted: set[int] = set()
    in_eval_mode: list[str] = []
    for fqn, module in layers:
        own = configs[fqn]
        about = (fqn, kind_of(module), *features_of(module))
        measures = _measures(module, fqn, own or base, uses, target, rate, counted)
        if fqn in reasons:
            rows.append(Skipped(*about, reasons[fqn], **measures))
        else:
            assert own is not None  # those have a reason
            _check_grid(fqn, module, own, uses)
            if not module.training and hot_class(module).plain_in_eval(module, own):
                in_eval_mode.append(fqn)
            notes = (_note(fqn, uses), _plain_note(module, own, target), slowly.get(fqn))
            kept, note = _bytes_per_value(module, own, target), "; ".join(filter(None, notes))
            rows.append(Converted(*about, own, kept, **measures, note=note))
    converted = [row for row in rows if isinstance(row, Converted)]
    skipped = [row for row in rows if isinstance(row, Skipped)]
    report = ConversionReport(
        base,
        converted,
        skipped,
        rows,
        others,
        parameter_count=sum(parameter.numel() for parameter in model.parameters()),
        macs=total,
        in_eval_mode=in_eval_mode,
    )
    report.notes += _notes(report, model, layers, reasons, slow, target, rate, filter_fn is None)
    warning = ""
    if not converted and (slow or chosen):
        why = "expected to be slower than plain torch's" if slow else "left out by overrides"
        if gains.NO_INT8 in slow.values():
            why += f" ({gains.NO_INT8})"
        warning = f"no layer is converted; all {len({*slow, *chosen})} that could be are {why}" + (
            " on CUDA; slower=True converts them anyway, for memory" if slow else ""
        )
    return Decision(report, warning, slow)


def revert(model: nn.Module) -> nn.Module:
    """Give every HOT module its plain class back, in place; return the model.

    Modules of ``saved=`` and layers with a :class:`.CustomBackward` become plain, too, frozen ones
    get a plain weight; ``hot_report`` goes, accelerate's hooks stay.

    Raises ValueError if a HOT module has become a subclass in the meantime (a parametrisation,
    ``fully_shard``), or has got a ``forward`` of its own (``recompute`` of the layer itself, a
    patch), or something holds its bound ``forward``: undo that first. Nothing has changed then.
    """
    found = unwrapped(model, why=lambda m: "" if is_attached(m) else own_forward(m))
    weights = plain_weights(m for m in found.values() if isinstance(m, FrozenModule))
    detach(model)  # the last that may raise, before it changes anything
    for layer, weight in weights.items():
        layer.thaw(weight)
    for module in found.values():
        become(module, module.plain)
    for each in model.modules():
        for name in (REPORT, FREEZE_REPORT):
            each.__dict__.pop(name, None)
    return model


def _check_model(model: object) -> None:
    if isinstance(model, nn.DataParallel):
        raise ValueError(
            "model: torch.nn.DataParallel is not supported; use "
            "torch.nn.parallel.DistributedDataParallel"
        )
    if isinstance(model, nn.Module):
        for fqn, module in model.named_modules():
            if any(map(is_lazy, module._parameters.values())):
                raise ValueError(
                    f"model: {fqn or '(root)'} is a {type(module).__name__}, whose weights have no "
                    "shapes yet; call the model once, then convert it"
                )
        return
    found = f"expected a torch.nn.Module, got {type(model).__name__}"
    if isinstance(model, type):
        found = f"expected a module, got the class {model.__name__}; make one of it first"
    elif isinstance(model, list | tuple):
        found += "; convert each of them, or put them into an nn.ModuleList"
    raise TypeError(f"model: {found}")


def _check_devices(model: nn.Module) -> None:
    # Otherwise the first backward would fail.
    for device in {p.device for p in model.parameters() if p.device.type == "cuda"}:
        try:
            contexts.cuda(device.index or 0, 0)
        except (NotImplementedError, ValueError) as error:
            raise type(error)(f"model: it is on {device}; {error}") from None


def _check_sharded(
    layers: list[tuple[str, nn.Module]], reasons: Mapping[str, str], filter_fn: Filter | None
) -> None:
    for fqn, module in layers:
        if isinstance(module, HotModule) or not any(map(is_dtensor, module.parameters())):
            continue
        # fully_shard of a layer makes a subclass of it, which is a reason, too.
        subclass = reasons.get(fqn) == selection.why_impossible(module)
        if fqn not in reasons or (subclass and (filter_fn is None or filter_fn(module, fqn))):
            raise ValueError(
                f"model: the weight of {fqn or '(root)'} is a DTensor, sharded already; call "
                "hot.convert first, then fully_shard (or parallelize_module)"
            )


def _dry_run(
    model: nn.Module, layers: list[tuple[str, nn.Module]], inputs: Any
) -> tuple[dict[str, probe.LayerUse], int]:
    """How a forward pass uses every layer, and the pass's multiply-adds."""
    watch = probe.Watch(dict(layers))
    with probe.preserve_state(model), torch.no_grad(), probe.eagerly(), watch:
        total = probe.total_macs(lambda: probe.output_of(model, inputs))
    return watch.uses, total


def _unreached(
    model: nn.Module,
    layers: list[tuple[str, nn.Module]],
    uses: Mapping[str, probe.LayerUse],
    reasons: Mapping[str, str],
) -> dict[str, str]:
    """Layers that are never called because other code multiplies their weight."""
    if uses:
        found = {fqn for fqn, row in uses.items() if row.bypassed and not row.calls}
    else:
        found = unconverted.bypassed(model, dict(layers))
    why = f"{_NEVER_CALLED}: its weight is multiplied without it, as in F.linear(x, layer.weight)"
    return {fqn: why for fqn, _ in layers if fqn in found and fqn not in reasons}


def _note(fqn: str, uses: Mapping[str, probe.LayerUse]) -> str:
    row = uses.get(fqn)
    if row is None:
        return ""
    if row.bypassed:
        return "its weight is also multiplied without it, plain"
    return "" if row.calls else "not called with these inputs"


def _plain_note(module: nn.Module, config: HotConfig, device: str) -> str:
    """What of the configuration the layer does not have."""
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


def _check_grid(
    fqn: str, module: nn.Module, config: HotConfig, uses: Mapping[str, probe.LayerUse]
) -> None:
    if config.token_grid is None or config.basis == "full" or isinstance(module, nn.Conv2d):
        return
    if isinstance(module, nn.MultiheadAttention) and not module.batch_first:
        raise ValueError(
            f"config: token_grid {config.token_grid} needs a sample's tokens one after the other; "
            f"{fqn or '(root)'} is an nn.MultiheadAttention with batch_first=False, which gets "
            "[tokens, samples, features]: give it another configuration by overrides"
        )
    sample = config.token_grid[0] * config.token_grid[1] + config.prefix_tokens
    for call in uses[fqn].calls if fqn in uses else ():
        tokens = 1
        for size in call.shape[:-1]:
            tokens *= size
        if tokens % sample:
            raise ValueError(
                f"config: token_grid {config.token_grid} with {config.prefix_tokens} prefix tokens "
                f"makes samples of {sample} tokens; layer {fqn or '(root)'} is given {tokens} "
                f"(x {list(call.shape)}). Other layers' grids go into overrides"
            )


def _device(model: nn.Module, device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    first = next(model.parameters(), None)
    return torch.device("cpu") if first is None else first.device


def _measures(
    module: nn.Module,
    fqn: str,
    config: HotConfig,
    uses: Mapping[str, probe.LayerUse],
    device: str,
    rate: gpus.Int8Rate,
    counted: set[int],
) -> dict[str, Any]:
    """The numbers of a report row. Tied Parameters count once."""
    inner = [module]
    if isinstance(module, nn.MultiheadAttention):
        inner.append(module.out_proj)
    every = [p for each in inner for p in each._parameters.values() if p is not None]
    own = [p for p in every if id(p) not in counted]
    counted.update(map(id, own))
    return {
        "parameters": sum(p.numel() for p in own),
        "macs": uses[fqn].macs if fqn in uses else None,
        "expected_time": None
        if is_8bit(module)  # not measured
        else gains.expected_time(facts_of(module, config, device, rate)),
    }


def _nothing(
    model: nn.Module,
    layers: list[tuple[str, nn.Module]],
    reasons: Mapping[str, str],
    others: list[Skipped],
    filtered: bool,
) -> str:
    """Error text: why no layer can be converted, and which filter could allow some."""
    which = "filter_fn matched no layer that" if filtered else "no layer"
    parts = [f"model: {which} can be converted"]
    if layers:
        described = []
        for fqn, module in layers:
            ins, outs = features_of(module)
            described.append((fqn, f"({kind_of(module)} {ins} -> {outs}): {reasons[fqn]}"))
        parts += [f"{names} {why}" for names, why in _group_alike(described)]
    else:
        kinds = listed(sorted({type(module).__name__ for module in model.modules()}))
        parts.append(
            "it has no nn.Linear, nn.Conv2d, nn.MultiheadAttention or transformers Conv1D; its "
            f"modules: {kinds}"
        )
    described = [(row.name, f"({row.kind}): {row.reason}") for row in others]
    parts += [f"{names} {why}" for names, why in _group_alike(described)]
    able = [
        (fqn, "")
        for fqn, module in layers
        if reasons[fqn] == _LEFT_OUT or _by_choice(reasons[fqn], module)
    ]
    if able:
        names = ", ".join(name for name, _ in _group_alike(able))
        parts.append(f"a filter_fn (without overrides to None) could have converted: {names}")
    return "; ".join(parts)


def _by_choice(reason: str, module: nn.Module) -> bool:
    """Whether a filter, the default one or the caller's, left the layer out."""
    if reason == _LEFT_OUT or reason.startswith(_NEVER_CALLED):
        return False
    return not selection.why_impossible(module)


def _group_alike(entries: list[tuple[str, str]]) -> list[tuple[str, ...]]:
    """Groups entries of alike names and equal text, with counts; at most a dozen groups."""
    rows = group_alike([(name or "(root)", said) for name, said in entries], "{} x {}")
    return rows if len(rows) <= 12 else [*rows[:12], (f"{len(rows) - 12} more", "alike")]


def _notes(
    report: ConversionReport,
    model: nn.Module,
    layers: list[tuple[str, nn.Module]],
    reasons: Mapping[str, str],
    slow: Mapping[str, str],
    device: str,
    rate: gpus.Int8Rate,
    default_filter: bool,
) -> list[str]:
    notes = []
    if report.in_eval_mode and len(report.in_eval_mode) == len(report.converted):
        notes.append("the model is in eval mode, where every layer is plain: call model.train()")
    elif report.in_eval_mode:
        notes.append(f"in eval mode, hence plain until .train(): {listed(report.in_eval_mode)}")
    time = report.expected_time
    if time is not None:
        gain = f"{1 - time:.0%} less" if time < 1 else f"{time - 1:.0%} more"
        notes.append(
            f"expected on CUDA: the converted layers' forward and backward take {gain} time than "
            f"plain torch's; by {gains.source(rate)}"
            + ("" if report.config.forward == "plain" else "; with a plain forward")
        )
    kept = any(layer.config.forward_in_eval for layer in report.converted)
    if kept and any(isinstance(module, nn.TransformerEncoderLayer) for module in model.modules()):
        notes.append(
            "in eval mode without gradients nn.TransformerEncoderLayer goes past its layers, "
            "plain: torch.backends.mha.set_fastpath_enabled(False) keeps their 8-bit forward"
        )
    if slow:
        why = f"slower on CUDA, by {gains.source(rate)}" if rate.fast else str(rate)
        notes.append(
            f"{len(slow)} layers stay plain: {why}; slower=True, or their full names in overrides, "
            "convert them"
        )
    if device == "cuda" and not _core.built_with_cuda():
        notes.append(
            "this build of hotcore has no CUDA backend, which training on CUDA needs: "
            "python -m hotcore.info"
        )
    if default_filter:
        if any(_by_choice(reasons.get(fqn, _LEFT_OUT), module) for fqn, module in layers):
            notes.append(
                "default filter: plain stay the output head, the first convolution, layers with "
                f"fewer than {MIN_FEATURES} in or out features, weights tied to an embedding"
                + (", what is slower on CUDA" if slow else "")
            )
        last = report.layers[-1]
        if isinstance(last, Converted):
            notes.append(
                f"no output head was recognised: the last layer, {last.name or '(root)'}, is "
                "converted; leave it out by overrides if the loss reads its output"
            )
    maybe = (
        unconverted.bypassed(model, dict(layers), certain=False) if report.macs is None else set()
    )
    unsure = [layer.name for layer in report.converted if layer.name in maybe]
    if unsure:
        notes.append(
            f"may be used without being called: {listed(unsure)}; "
            "convert(..., inputs=...) finds out"
        )
    return notes


def _configs(
    base: HotConfig,
    overrides: Mapping[str, Override],
    names: list[str],
    reasons: Mapping[str, str],
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
        configs.update(dict.fromkeys(matched, _override(base, pattern, override)))
    return configs


def _override(base: HotConfig, pattern: str, override: Override) -> HotConfig | None:
    if override is None:
        return None
    if not isinstance(override, Mapping):
        return as_config(override, f"overrides[{pattern!r}]")
    known = {field.name for field in dataclasses.fields(HotConfig)}
    unknown = [str(name) for name in override if name not in known]
    if unknown:
        raise ValueError(f"overrides[{pattern!r}]: HotConfig has no field {', '.join(unknown)}")
    return dataclasses.replace(base, **override)


def _bytes_per_value(module: nn.Module, config: HotConfig, device: str) -> float:
    width = features_of(module)[0]
    if is_frozen(module) or not width:
        return 0.0
    tokens, visited = _REPORT_TOKENS, 1.0
    if isinstance(module, nn.Conv2d):
        if products_of(module, config, device):
            visited = 1 / (module.stride[0] * module.stride[1])
        config = settings(config, is_pointwise(module), None)
    elif config.token_grid is not None:
        sample = config.token_grid[0] * config.token_grid[1] + config.prefix_tokens
        tokens = max(1, tokens // sample) * sample
    return visited * saved_layout(tokens, width, config).bytes / (tokens * width)
