"""The report of :func:`hotcore.torch.convert`: :class:`ConversionReport`."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from ...config import HotConfig

REPORT = "hot_report"
"""Attribute of a converted model that holds its report."""
FREEZE_REPORT = "freeze_report"
"""Attribute of a frozen model that holds the report of its freezing."""
ADAPTER = "an adapter of peft"
"""Reason for which the default filter leaves an adapter plain."""
EARLIER = "HOT by an earlier call"
"""Reason for a converted layer that ``filter_fn`` leaves out: it stays as it is."""


@dataclasses.dataclass(frozen=True)
class Converted:
    """A layer that now runs HOT."""

    name: str
    kind: str
    """``"Linear"``, ``"Conv1D"``, ``"MultiheadAttention"``, or ``"Conv2d 3x3"`` with its kernel."""
    in_features: int
    """Channels for a convolution; for an attention both sizes are those of its in_proj."""
    out_features: int
    config: HotConfig
    bytes_per_value: float
    """Bytes kept for backward per value of x (fp32: 4); 0 if the weight is frozen."""
    parameters: int = 0
    """Values of weight and bias."""
    macs: int | None = None
    """Multiply-adds of its forward pass over ``inputs``; None without ``inputs``."""
    expected_time: float | None = None
    """Time over plain torch's, of forward and backward; None without a fit (``gains.py``)."""
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Skipped:
    """A layer that stays plain, or a matrix outside of layers, and the reason."""

    name: str
    kind: str
    in_features: int
    out_features: int
    reason: str
    parameters: int = 0
    macs: int | None = None
    expected_time: float | None = None
    """Time of forward and backward over plain torch's if the layer were converted."""


Row = Converted | Skipped


@dataclasses.dataclass
class ConversionReport:
    """The converted layers and the plain ones; print it for a table.

    :func:`hotcore.torch.report` and the model's attribute ``hot_report`` return it. It holds no
    tensor and no module. Copies and pickles of the model contain it.
    """

    config: HotConfig
    converted: list[Converted]
    skipped: list[Skipped]
    layers: list[Row]
    """Converted and skipped layers in the model's order."""
    unsupported: list[Skipped] = dataclasses.field(default_factory=list)
    """Matrices that HOT does not support: experts in one Parameter, recurrent layers, other
    convolutions."""
    notes: list[str] = dataclasses.field(default_factory=list)
    """Sentences below the table."""
    parameter_count: int = 0
    """Values of all Parameters of the model."""
    macs: int | None = None
    """Multiply-adds of the whole forward pass over ``inputs``; None without ``inputs``."""
    head: str = ""
    """How the model computes its loss, if ``convert`` was given ``head``."""
    in_eval_mode: list[str] = dataclasses.field(default_factory=list)
    """Converted layers in eval mode, which are plain until ``.train()``."""

    @property
    def parameter_share(self) -> float:
        """Share of the model's parameters that converted layers hold."""
        return sum(layer.parameters for layer in self.converted) / (self.parameter_count or 1)

    @property
    def mac_share(self) -> float | None:
        """Share of the forward pass's multiply-adds in converted layers; None if unknown."""
        if self.macs is None:
            return None
        return sum(layer.macs or 0 for layer in self.converted) / (self.macs or 1)

    @property
    def expected_time(self) -> float | None:
        """Time of all converted layers' forward and backward over plain torch's.

        Layers are weighted by their multiply-adds, or by their parameters without ``inputs``. None
        without a fit, as on a CPU.
        """
        timed = [
            (layer.expected_time, layer.parameters if layer.macs is None else layer.macs)
            for layer in self.converted
            if layer.expected_time is not None
        ]
        total = sum(weight for _, weight in timed)
        return sum(time * weight for time, weight in timed) / total if total else None

    def __str__(self) -> str:
        return self.table()

    def table(self, grouped: bool = True) -> str:
        """Columns: layer, kind, in -> out, and the bytes kept of x or why the layer is plain.

        Args:
            grouped: one line for equal layers whose names differ only in numbers, with their
                count, and none for adapters. False: one line for every layer.
        """
        adapters = [row for row in self.skipped if row.reason == ADAPTER]
        hidden = ADAPTER if grouped else None
        layers = [row for row in self.layers if getattr(row, "reason", "") != hidden]
        lines = self.rows(layers, grouped, ("layer", "kind", "in -> out", "x is kept in"))
        if self.unsupported:
            lines.append("matrices outside of the layers that HOT supports:")
            lines += ["  " + line for line in self.rows(self.unsupported, grouped)]
        running = len(self.converted) - len(self.in_eval_mode)
        count = len(self.layers) - len(adapters)
        lines.append(f"{running} of {count} layers run HOT, {self.config}")
        if earlier := [row for row in self.skipped if row.reason == EARLIER]:
            lines[-1] += f"; {len(earlier)} more by an earlier call"
        if self.in_eval_mode:
            lines[-1] += f"; {len(self.in_eval_mode)} more after .train()"
        if adapters:
            lines.append(f"{len(adapters)} layers of peft's adapters stay plain")
        if self.parameter_count:
            covered = f"they hold {self.parameter_share:.1%} of the model's parameters"
            if self.mac_share is not None:
                covered += f" and do {self.mac_share:.1%} of its forward pass's multiply-adds"
            lines.append(covered)
        if self.head:
            lines.append(f"head: {self.head}")
        return "\n".join([*lines, *self.notes])

    def to_dict(self) -> dict[str, Any]:
        """Return all fields and shares as numbers, strings, lists and dicts."""
        content: dict[str, Any] = json.loads(self.to_json())
        return content

    def to_json(self) -> str:
        """Return all fields and shares as JSON."""
        content = {
            "config": self.config,
            "recipe": self.config.name,
            "layers": [_as_dict(layer) for layer in self.layers],
            "unsupported": [_as_dict(layer) for layer in self.unsupported],
            "notes": self.notes,
            "in_eval_mode": self.in_eval_mode,
            "parameters": self.parameter_count,
            "parameter_share": self.parameter_share,
            "macs": self.macs,
            "mac_share": self.mac_share,
            "expected_time": self.expected_time,
            "head": self.head,
        }
        return json.dumps(content, indent=1, default=dataclasses.asdict)

    def rows(self, layers: Iterable[Row], grouped: bool = True, *head: Sequence[str]) -> list[str]:
        """Return the lines of some layers, below those of ``head``."""
        rows: list[tuple[str, ...]] = []
        for layer in layers:
            sizes = f"{layer.in_features} -> {layer.out_features}"
            rows.append((layer.name or "(root)", layer.kind, sizes, self._outcome(layer)))
        return aligned([*head, *(group_alike(rows) if grouped else rows)], last_left=True)

    def _outcome(self, layer: Row) -> str:
        if isinstance(layer, Skipped):
            return layer.reason if layer.reason == EARLIER else f"stays plain: {layer.reason}"
        size = "nothing (weight frozen)"
        if bytes_per_value := layer.bytes_per_value:
            size = f"{bytes_per_value:.2f} bytes a value (fp32 / {4 / bytes_per_value:.1f})"
        config = "" if layer.config == self.config else str(layer.config)
        time = "" if layer.expected_time is None else f"{layer.expected_time:.2f} of the time"
        return ", ".join(filter(None, (size, config, time, layer.note)))


def report(model: nn.Module) -> ConversionReport:
    """Return the report of the last ``convert`` of ``model`` or of a part; ValueError: none."""
    for module in model.modules():
        content = vars(module).get(REPORT)
        if isinstance(content, ConversionReport):
            return content
    raise ValueError("model: it has no report; call hot.convert(model) first")


def listed(names: Sequence[str], limit: int = 8) -> str:
    """Return names in one line, at most ``limit`` of them."""
    shown = ", ".join(name or "(root)" for name in names[:limit])
    if len(names) > limit:
        return f"{shown} and {len(names) - limit} more"
    return shown or "none"


def group_alike(rows: Iterable[Sequence[str]]) -> list[tuple[str, ...]]:
    """Merge rows whose names differ only in numbers between dots: ``*``, then the count."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, *rest in rows:
        pattern = re.sub(r"(?<![^.])\d+(?![^.])", "*", name)
        groups.setdefault((pattern, *rest), []).append(name)
    return [
        (names[0] if len(names) == 1 else f"{pattern} ({len(names)})", *rest)
        for (pattern, *rest), names in groups.items()
    ]


def _as_dict(layer: Row) -> dict[str, Any]:
    recipe = {"recipe": layer.config.name} if isinstance(layer, Converted) else {}
    return {"converted": isinstance(layer, Converted), **vars(layer), **recipe}


def aligned(rows: Sequence[Sequence[str]], left: int = 2, last_left: bool = False) -> list[str]:
    """Lines of a table: ``left`` columns left-aligned, also the last one with ``last_left``."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    ends = {*range(left), *([len(widths) - 1] if last_left else [])}
    return [
        "  ".join(
            cell.ljust(width) if i in ends else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
