"""``convert`` a model's linear layers to HOT, in place, and ``revert`` them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from torch import nn

from ..config import HotConfig, as_config
from ..saved import saved_layout
from .functional import DTYPES
from .modules import HotLinear

Filter = Callable[[nn.Module, str], bool]

HEAD_NAMES = frozenset(
    (
        *("head", "heads", "lm_head", "classifier", "cls", "fc", "fc_out", "logits", "to_logits"),
        *("score", "predictions", "output_projection", "proj_out"),
    )
)
"""The output head is the model's last linear layer if its name, or the top-level module it is in,
is one of these: its error goes straight into the loss, and it is one layer of many."""

MIN_FEATURES = 16
"""A layer with fewer in or out features is left alone: less than one block of the Hadamard
transform, and of a row's 16-byte alignment, so that it would mostly move padding."""

_REPORT_TOKENS = 4096  # tokens for which the report states bytes


@dataclasses.dataclass(frozen=True)
class Converted:
    """A layer that is now a HotLinear."""

    name: str
    in_features: int
    out_features: int
    config: HotConfig
    bytes_per_value: float
    """Bytes kept for backward for each value of x (fp32: 4); 0 where the weight is frozen."""


@dataclasses.dataclass(frozen=True)
class Skipped:
    """A linear layer that was left as it was, and why."""

    name: str
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

    def __str__(self) -> str:
        """A table: layer, in -> out, and what x costs until backward, or why it was skipped."""
        rows = [("layer", "in -> out", "x is kept in")]
        for done in self.converted:
            rows.append((done.name or "(root)", _shape(done), _kept(done)))
        for left in self.skipped:
            rows.append((left.name or "(root)", _shape(left), f"skipped: {left.reason}"))
        widths = [max(len(row[i]) for row in rows) for i in range(2)]
        lines = [f"{a:<{widths[0]}}  {b:>{widths[1]}}  {c}".rstrip() for a, b, c in rows]
        total = len(self.converted) + len(self.skipped)
        lines.append(f"{len(self.converted)} of {total} linear layers run HOT, {self.config}")
        return "\n".join(lines)


def convert(
    model: nn.Module, config: HotConfig | str = "default", filter_fn: Filter | None = None
) -> ConversionReport:
    """Turn ``nn.Linear`` layers into :class:`HotLinear`, in place, with the same Parameters.

    Args:
        model: any module; if it is itself an ``nn.Linear``, take the new one from ``.model``.
        config: a HotConfig or a recipe's name.
        filter_fn: ``filter_fn(module, fqn)`` says whether to convert. Without one, all linear
            layers but the output head (:data:`HEAD_NAMES`), those with fewer than
            :data:`MIN_FEATURES` in or out features, and those whose weight is an embedding's.
            Subclasses of ``nn.Linear`` are never converted: what they add would be lost. A layer
            that is already converted stays as it is and is reported so.

    Returns:
        A :class:`ConversionReport`.

    Raises:
        ValueError: no layer was left to convert (and none is converted already).
    """
    settings = as_config(config)
    linears = [(fqn, m) for fqn, m in model.named_modules() if isinstance(m, nn.Linear)]
    default = _default_reasons(model, linears) if filter_fn is None else {}
    converted: list[Converted] = []
    skipped: list[Skipped] = []
    replacements: dict[nn.Module, nn.Module] = {}
    for fqn, module in linears:
        reason = _impossible(module)
        if not reason and filter_fn is not None and not filter_fn(module, fqn):
            reason = "left out by filter_fn"
        reason = reason or default.get(fqn, "")
        if reason:
            skipped.append(Skipped(fqn, module.in_features, module.out_features, reason))
            continue
        replacements[module] = HotLinear.from_linear(module, settings)
        cost = _bytes_per_value(module, settings)
        converted.append(Converted(fqn, module.in_features, module.out_features, settings, cost))
    if not converted and not any(isinstance(module, HotLinear) for _, module in linears):
        which = "no nn.Linear" if filter_fn is None else "filter_fn matched no nn.Linear that"
        raise ValueError(
            f"model: {which} can be converted"
            + "".join(f"; {left.name or '(root)'}: {left.reason}" for left in skipped)
        )
    return ConversionReport(_replace(model, replacements), settings, converted, skipped)


def revert(model: nn.Module) -> nn.Module:
    """Turn every HotLinear back into the ``nn.Linear`` it was, in place; return the model."""
    hots = [module for module in model.modules() if isinstance(module, HotLinear)]
    return _replace(model, {module: module.to_linear() for module in hots})


def _impossible(module: nn.Linear) -> str:
    if isinstance(module, HotLinear):
        return f"already converted, {module.config}"
    if type(module) is not nn.Linear:
        return f"a subclass of nn.Linear ({type(module).__name__})"
    if module._parameters.get("weight") is None:
        return "its weight is computed, not a Parameter"
    if module.weight.dtype not in DTYPES:
        return f"its weight is {str(module.weight.dtype).removeprefix('torch.')}"
    return ""


def _default_reasons(model: nn.Module, linears: list[tuple[str, nn.Linear]]) -> dict[str, str]:
    reasons: dict[str, str] = {}
    embeddings = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
    }
    for fqn, module in linears:
        if min(module.in_features, module.out_features) < MIN_FEATURES:
            reasons[fqn] = f"fewer than {MIN_FEATURES} features"
        if id(module.weight) in embeddings:
            reasons[fqn] = "its weight is an embedding's"
    if linears and _is_head(linears[-1][0]):
        reasons[linears[-1][0]] = "the output head"
    return reasons


def _is_head(fqn: str) -> bool:
    parts = [part for part in fqn.split(".") if not part.isdigit()]
    return bool(parts) and (parts[0] in HEAD_NAMES or parts[-1] in HEAD_NAMES)


def _bytes_per_value(module: nn.Linear, config: HotConfig) -> float:
    if not module.weight.requires_grad:
        return 0.0
    tokens = _REPORT_TOKENS
    if config.token_grid is not None:
        sample = config.token_grid[0] * config.token_grid[1] + config.prefix_tokens
        tokens = max(1, tokens // sample) * sample
    return saved_layout(tokens, module.in_features, config).bytes / (tokens * module.in_features)


def _replace(model: nn.Module, replacements: dict[nn.Module, nn.Module]) -> nn.Module:
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


def _shape(layer: Converted | Skipped) -> str:
    return f"{layer.in_features} -> {layer.out_features}"


def _kept(layer: Converted) -> str:
    if layer.bytes_per_value == 0:
        return "nothing (weight frozen)"
    return f"{layer.bytes_per_value:.2f} bytes a value (fp32 / {4 / layer.bytes_per_value:.1f})"
