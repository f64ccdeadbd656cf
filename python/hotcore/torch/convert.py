"""``convert`` a model's layers to HOT, in place, and ``revert`` them."""

from __future__ import annotations

import dataclasses
import difflib
import sys
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from ..config import HotConfig, as_config
from ..saved import saved_layout
from .conv import settings
from .functional import DTYPES
from .modules import HotConv2d, HotLinear, HotModule

Filter = Callable[[nn.Module, str], bool]
Override = HotConfig | str | Mapping[str, Any] | None

# ---- The rule of which layers gain. Figures: benchmarks/results, one H200. ----

MIN_FEATURES = 64
"""The default filter keeps a layer with fewer in or out features plain (a convolution's in features
are its channels times its kernel's area): its products are too small to pay for quantising their
operands."""

HEAD_NAMES = frozenset(
    (
        *("head", "heads", "head_dist", "lm_head", "classifier", "cls", "fc", "fc_out", "logits"),
        *("to_logits", "score", "predictions", "output_projection", "proj_out"),
    )
)
"""The output head is the model's last layer if its name, or the top-level module it is in, is one
of these: its error goes straight into the loss, and it is one layer of many."""

_WRAPPERS = frozenset(
    ("module", "base_model", "model", "base_layer", "modules_to_save", "original_module")
)
"""Parts of names that DDP, peft and transformers put around a model's own."""

_REPORT_TOKENS = 4096  # tokens for which the report states bytes


@dataclasses.dataclass(frozen=True)
class Converted:
    """A layer that now runs HOT."""

    name: str
    kind: str
    """``"Linear"``, ``"Conv1D"`` or, with its kernel, ``"Conv2d 3x3"``."""
    in_features: int
    """Channels, for a convolution."""
    out_features: int
    config: HotConfig
    bytes_per_value: float
    """Bytes kept for backward for each value of x (fp32: 4); 0 where the weight is frozen."""


@dataclasses.dataclass(frozen=True)
class Skipped:
    """A layer that was left as it was, and why."""

    name: str
    kind: str
    in_features: int
    out_features: int
    reason: str


@dataclasses.dataclass
class ConversionReport:
    """What :func:`convert` did; print it for a table."""

    model: nn.Module
    config: HotConfig
    converted: list[Converted]
    skipped: list[Skipped]
    layers: list[Converted | Skipped]
    """Both, in the model's order."""

    def __str__(self) -> str:
        """A table: layer, kind, in -> out, and what x costs until backward, or why it is plain."""
        rows = [("layer", "kind", "in -> out", "x is kept in")]
        for layer in self.layers:
            shape = f"{layer.in_features} -> {layer.out_features}"
            rows.append((layer.name or "(root)", layer.kind, shape, self._outcome(layer)))
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        lines = [
            f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c:>{widths[2]}}  {d}".rstrip()
            for a, b, c, d in rows
        ]
        lines.append(f"{len(self.converted)} of {len(self.layers)} layers run HOT, {self.config}")
        lines.append(
            f"default filter: plain stay the output head, the first convolution, layers with fewer "
            f"than {MIN_FEATURES} in or out features, weights tied to an embedding"
        )
        return "\n".join(lines)

    def _outcome(self, layer: Converted | Skipped) -> str:
        if isinstance(layer, Skipped):
            return f"stays plain: {layer.reason}"
        kept = "nothing (weight frozen)"
        if layer.bytes_per_value:
            kept = f"{layer.bytes_per_value:.2f} bytes a value (fp32 / "
            kept += f"{4 / layer.bytes_per_value:.1f})"
        return kept if layer.config == self.config else f"{kept}, {layer.config}"


def convert(
    model: nn.Module,
    config: HotConfig | str = "default",
    filter_fn: Filter | None = None,
    overrides: Mapping[str, Override] | None = None,
) -> ConversionReport:
    """Turn ``nn.Linear``, ``nn.Conv2d`` and transformers' ``Conv1D`` to HOT, in place.

    The new modules hold the same Parameters.

    Args:
        model: any module; if it is itself such a layer, take the new one from ``.model``.
        config: a HotConfig or a recipe's name.
        filter_fn: ``filter_fn(module, fqn)`` says whether to convert. Without one, all layers but
            the output head (:data:`HEAD_NAMES`), the first convolution, those with fewer than
            :data:`MIN_FEATURES` in or out features, those whose weight is an embedding's, and
            peft's adapters. With or without one, what cannot be converted stays as it is:
            subclasses of the three (what they add would be lost), convolutions in groups, computed
            weights and dtypes that HOT does not take.
        overrides: name pattern (``fnmatch``) to what the layers that it matches take instead of
            ``config``: a HotConfig, a recipe's name, a dict of the fields that differ from
            ``config``, or None to stay plain. Where several match, the last one counts.

    Returns:
        A :class:`ConversionReport`.

    Raises:
        ValueError: a layer is converted already, no layer was left to convert, a pattern matches
            no layer or none that is converted, or ``model`` is an ``nn.DataParallel``.
    """
    base = as_config(config)
    if isinstance(model, nn.DataParallel):
        raise ValueError(
            "model: torch.nn.DataParallel is not supported; use "
            "torch.nn.parallel.DistributedDataParallel"
        )
    layers = _layers(model)
    reasons = _reasons(model, layers, filter_fn)
    configs = _configs(base, overrides or {}, [fqn for fqn, _ in layers], reasons)
    left = [fqn for fqn, own in configs.items() if own is None]
    reasons = dict.fromkeys(left, "left out by overrides") | reasons
    twice = [fqn for fqn, m in layers if isinstance(m, HotModule) and fqn not in reasons]
    if twice:
        raise ValueError(
            f"model: already converted ({_listed(twice)}); revert() it first, or leave these "
            "layers out with filter_fn"
        )
    if len(reasons) == len(layers):
        which = "no layer" if filter_fn is None else "filter_fn matched no layer that"
        raise ValueError(
            f"model: {which} can be converted"
            + "".join(f"; {fqn or '(root)'}: {reason}" for fqn, reason in reasons.items())
        )
    rows: list[Converted | Skipped] = []
    replacements: dict[nn.Module, nn.Module] = {}
    for fqn, module in layers:
        about = (fqn, _kind(module), *_features(module))
        if fqn in reasons:
            rows.append(Skipped(*about, reasons[fqn]))
        else:
            own = configs[fqn]
            assert own is not None  # those have a reason
            replacements[module] = _hot_class(module).from_plain(module, own)  # type: ignore[assignment]
            rows.append(Converted(*about, own, _bytes_per_value(module, own)))
    converted = [row for row in rows if isinstance(row, Converted)]
    skipped = [row for row in rows if isinstance(row, Skipped)]
    return ConversionReport(_replace(model, replacements), base, converted, skipped, rows)


def revert(model: nn.Module) -> nn.Module:
    """Turn every HOT module back into the plain one it was, in place; return the model.

    Raises ValueError where something has made a subclass of a HOT module since (a parametrisation,
    ``fully_shard``): undo that first.
    """
    found = [(fqn, m) for fqn, m in model.named_modules() if isinstance(m, HotModule)]
    for fqn, module in found:
        assert isinstance(module, nn.Module)
        if type(module) is not _hot_class(module):
            raise ValueError(
                f"model: {fqn or '(root)'} is now a {type(module).__name__}; undo what was wrapped "
                "around it (a parametrisation, fully_shard) before revert()"
            )
    hots = [module for _, module in found]
    return _replace(model, {module: module.to_plain() for module in hots})


def _conv1d() -> type[nn.Module] | None:
    """transformers' Conv1D; None where it is not loaded, so that no model can hold one."""
    loaded = sys.modules.get("transformers.pytorch_utils")
    found: type[nn.Module] | None = getattr(loaded, "Conv1D", None)
    return found


def _layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    kinds: tuple[type[nn.Module], ...] = (nn.Linear, nn.Conv2d)
    conv1d = _conv1d()
    kinds = kinds if conv1d is None else (*kinds, conv1d)
    return [(fqn, module) for fqn, module in model.named_modules() if isinstance(module, kinds)]


def _hot_class(module: nn.Module) -> type[HotModule]:
    if isinstance(module, nn.Linear):
        return HotLinear
    if isinstance(module, nn.Conv2d):
        return HotConv2d
    from .huggingface import HotConv1D

    return HotConv1D


def _kind(module: nn.Module) -> str:
    if isinstance(module, nn.Conv2d):
        return f"Conv2d {'x'.join(map(str, module.kernel_size))}"
    return "Linear" if isinstance(module, nn.Linear) else "Conv1D"


def _features(module: nn.Module) -> tuple[int, int]:
    if isinstance(module, nn.Conv2d):
        return module.in_channels, module.out_channels
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    nx, nf = module.nx, module.nf
    assert isinstance(nx, int) and isinstance(nf, int)
    return nx, nf


def _reasons(
    model: nn.Module, layers: list[tuple[str, nn.Module]], filter_fn: Filter | None
) -> dict[str, str]:
    """Why layers stay plain; the others are converted."""
    if filter_fn is not None:
        reasons = {fqn: "left out by filter_fn" for fqn, m in layers if not filter_fn(m, fqn)}
    else:
        reasons = _default_reasons(model, layers)
    # What cannot be done says more than what is not wanted.
    return reasons | {fqn: why for fqn, module in layers if (why := _impossible(module))}


def _impossible(module: nn.Module) -> str:
    if isinstance(module, HotModule):
        return ""
    plain = _hot_class(module).plain
    if type(module) is not plain:
        return f"a subclass of {plain.__name__} ({type(module).__name__})"
    if isinstance(module, nn.Conv2d) and module.groups != 1:
        depthwise = module.groups == module.in_channels
        return "depthwise" if depthwise else f"a convolution in {module.groups} groups"
    weight = module._parameters.get("weight")
    if weight is None:
        return "its weight is computed, not a Parameter"
    if weight.dtype not in DTYPES:
        return f"its weight is {str(weight.dtype).removeprefix('torch.')}"
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
        inputs, outputs = _features(module)
        if isinstance(module, nn.Conv2d):
            inputs *= module.kernel_size[0] * module.kernel_size[1]
        if min(inputs, outputs) < MIN_FEATURES:
            reasons[fqn] = f"fewer than {MIN_FEATURES} features"
        if id(module._parameters.get("weight")) in embeddings:
            reasons[fqn] = "its weight is an embedding's"
        if id(module) in adapters:
            reasons[fqn] = "an adapter of peft"
    convolutions = [fqn for fqn, module in layers if isinstance(module, nn.Conv2d)]
    if convolutions:
        reasons[convolutions[0]] = "the first convolution"
    own = [fqn for fqn, module in layers if id(module) not in adapters]
    return reasons | dict.fromkeys(_heads(own), "the output head")


def _heads(names: list[str]) -> list[str]:
    """The last layer if it is named as a head, and heads of their own right in front of it."""
    heads: list[str] = []
    for fqn in reversed(names):
        parts = [part for part in fqn.split(".") if not part.isdigit() and part not in _WRAPPERS]
        named = bool(parts) and (parts[0] in HEAD_NAMES or parts[-1] in HEAD_NAMES)
        if not named or (heads and len(parts) > 1):
            break
        heads.append(fqn)
    return heads


def _adapters(model: nn.Module) -> set[int]:
    """Modules that peft adds beside the layers it wraps; they train in full precision."""
    loaded = sys.modules.get("peft.tuners.tuners_utils")
    wrapper = getattr(loaded, "BaseTunerLayer", None)
    if wrapper is None:
        return set()
    found: set[int] = set()
    for module in model.modules():
        if isinstance(module, wrapper):
            for name, child in module.named_children():
                if name != "base_layer":
                    found.update(map(id, child.modules()))
    return found


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
                + (f"near it: {', '.join(near)}" if near else f"layers: {_listed(names)}")
            )
        if all(fqn in reasons for fqn in matched):
            plain = _listed([f"{fqn} ({reasons[fqn]})" for fqn in matched])
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


def _bytes_per_value(module: nn.Module, config: HotConfig) -> float:
    weight = module._parameters["weight"]
    assert weight is not None
    if not weight.requires_grad:
        return 0.0
    tokens, visited = _REPORT_TOKENS, 1.0
    if isinstance(module, nn.Conv2d):
        pointwise = module.kernel_size == (1, 1) and module.padding in ((0, 0), "same", "valid")
        config, _ = settings(config, pointwise, None)
        if pointwise:
            visited = 1 / (module.stride[0] * module.stride[1])
    elif config.token_grid is not None:
        sample = config.token_grid[0] * config.token_grid[1] + config.prefix_tokens
        tokens = max(1, tokens // sample) * sample
    width = _features(module)[0]
    return visited * saved_layout(tokens, width, config).bytes / (tokens * width)


def _replace(model: nn.Module, replacements: Mapping[Any, nn.Module]) -> nn.Module:
    for parent, name, child in list(_children(model)):
        if child in replacements:
            parent._modules[name] = replacements[child]
    return replacements.get(model, model)


def _children(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    # A module that stands in two places is replaced in both, by the same new one.
    for parent in model.modules():
        for name, child in parent._modules.items():
            if child is not None:
                yield parent, name, child


def _listed(names: list[str]) -> str:
    shown = ", ".join(name or "(root)" for name in names[:8])
    return shown if len(names) <= 8 else f"{shown} and {len(names) - 8} more"
