"""What :func:`hotcore.torch.convert` did, layer by layer: :class:`ConversionReport`."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from ..config import HotConfig

REPORT = "hot_report"
"""The attribute of a converted model that holds its report."""


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
    """Time of forward and backward as a multiple of plain torch's; None if not measured."""
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Skipped:
    """A layer, or a matrix outside of layers, that was not converted, and why."""

    name: str
    kind: str
    in_features: int
    out_features: int
    reason: str
    parameters: int = 0
    macs: int | None = None
    expected_time: float | None = None
    """Time of forward and backward as a multiple of plain torch's, if it were converted."""


@dataclasses.dataclass
class ConversionReport:
    """What :func:`~hotcore.torch.convert` did, layer by layer; print it for a table.

    It is the attribute ``hot_report`` of a converted model, holds no tensor and no module, and goes
    along where the model is copied or pickled.
    """

    config: HotConfig
    converted: list[Converted]
    skipped: list[Skipped]
    layers: list[Converted | Skipped]
    """Converted and skipped layers in the model's order."""
    unsupported: list[Skipped] = dataclasses.field(default_factory=list)
    """Matrices outside of the kinds of layers that HOT supports: experts in one Parameter,
    recurrent layers, other convolutions."""
    notes: list[str] = dataclasses.field(default_factory=list)
    """Sentences below the table."""
    parameter_count: int = 0
    """Values of all Parameters of the model."""
    macs: int | None = None
    """Multiply-adds of the whole forward pass over ``inputs``; None without ``inputs``."""
    head: str = ""
    """With ``head``: how the model computes its loss."""
    in_eval_mode: list[str] = dataclasses.field(default_factory=list)
    """Converted layers in eval mode: forward and gradients stay plain until ``.train()``."""

    @property
    def parameter_share(self) -> float:
        """Share of the model's parameters that converted layers hold."""
        return _share(sum(layer.parameters for layer in self.converted), self.parameter_count)

    @property
    def mac_share(self) -> float | None:
        """Share of the forward pass's multiply-adds in converted layers; None if unknown."""
        if self.macs is None:
            return None
        return _share(sum(layer.macs or 0 for layer in self.converted), self.macs)

    @property
    def expected_time(self) -> float | None:
        """Time of all converted layers' forward and backward as a multiple of plain torch's.

        Layers are weighted by their multiply-adds, or without ``inputs`` by their parameters. None
        without measurements (on a CPU).
        """
        timed = [layer for layer in self.converted if layer.expected_time is not None]
        weights = [layer.parameters if layer.macs is None else layer.macs for layer in timed]
        if not sum(weights):
            return None
        pairs = zip(timed, weights, strict=True)
        return sum((layer.expected_time or 0) * weight for layer, weight in pairs) / sum(weights)

    def __str__(self) -> str:
        """A table with one line for equal layers; ``*`` stands for the numbers in names."""
        return self.table()

    def table(self, grouped: bool = True) -> str:
        """Columns: layer, kind, in -> out, and the bytes kept of x or why the layer is plain.

        Args:
            grouped: one line for equal layers whose names differ only in numbers, with their count
                in brackets; False: one line for every layer.
        """
        rows: list[tuple[str, ...]] = [("layer", "kind", "in -> out", "x is kept in")]
        rows += self._rows(self.layers, grouped)
        lines = aligned(rows, last_left=True)
        if self.unsupported:
            others = aligned(self._rows(self.unsupported, grouped), last_left=True)
            lines.append("matrices outside of the layers that HOT supports:")
            lines += ["  " + line for line in others]
        running = len(self.converted) - len(self.in_eval_mode)
        lines.append(f"{running} of {len(self.layers)} layers run HOT, {self.config}")
        if self.in_eval_mode:
            lines[-1] += f"; {len(self.in_eval_mode)} more after .train()"
        if self.parameter_count:
            covered = f"they hold {self.parameter_share:.1%} of the model's parameters"
            if self.mac_share is not None:
                covered += f" and do {self.mac_share:.1%} of its forward pass's multiply-adds"
            lines.append(covered)
        if self.head:
            lines.append(f"head: {self.head}")
        return "\n".join([*lines, *self.notes])

    def to_dict(self) -> dict[str, Any]:
        """Everything, as numbers, strings, lists and dicts."""
        return {
            "config": json.loads(self.config.to_json()),
            "recipe": self.config.name,
            "layers": [_as_dict(layer) for layer in self.layers],
            "unsupported": [_as_dict(layer) for layer in self.unsupported],
            "notes": list(self.notes),
            "in_eval_mode": list(self.in_eval_mode),
            "parameters": self.parameter_count,
            "parameter_share": self.parameter_share,
            "macs": self.macs,
            "mac_share": self.mac_share,
            "expected_time": self.expected_time,
            "head": self.head,
        }

    def to_json(self) -> str:
        """:meth:`to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=1)

    def _rows(self, layers: Iterable[Converted | Skipped], grouped: bool) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = []
        for layer in layers:
            sizes = f"{layer.in_features} -> {layer.out_features}"
            rows.append((layer.name or "(root)", layer.kind, sizes, self._outcome(layer)))
        return group_alike(rows) if grouped else rows

    def _outcome(self, layer: Converted | Skipped) -> str:
        if isinstance(layer, Skipped):
            return f"stays plain: {layer.reason}"
        kept = "nothing (weight frozen)"
        if layer.bytes_per_value:
            kept = f"{layer.bytes_per_value:.2f} bytes a value (fp32 / "
            kept += f"{4 / layer.bytes_per_value:.1f})"
        parts = [kept]
        if layer.config != self.config:
            parts.append(str(layer.config))
        if layer.expected_time is not None:
            parts.append(f"{layer.expected_time:.2f} of the time")
        if layer.note:
            parts.append(layer.note)
        return ", ".join(parts)


def listed(names: Sequence[str], limit: int = 8) -> str:
    """Names in one line, at most ``limit`` of them."""
    shown = ", ".join(name or "(root)" for name in names[:limit])
    if len(names) > limit:
        return f"{shown} and {len(names) - limit} more"
    return shown or "none"


def pattern_of(name: str) -> str:
    """The name with ``*`` for every number between dots, as a pattern for ``overrides``."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def group_alike(rows: Iterable[Sequence[str]], many: str = "{} ({})") -> list[tuple[str, ...]]:
    """Rows that are equal but for numbers in names, the first column, as one, with their count."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, *rest in rows:
        groups.setdefault((pattern_of(name), *rest), []).append(name)
    return [
        (names[0] if len(names) == 1 else many.format(pattern, len(names)), *rest)
        for (pattern, *rest), names in groups.items()
    ]


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _as_dict(layer: Converted | Skipped) -> dict[str, Any]:
    entry = {field.name: getattr(layer, field.name) for field in dataclasses.fields(layer)}
    if isinstance(layer, Converted):
        entry["config"] = json.loads(layer.config.to_json())
        entry["recipe"] = layer.config.name
    return {"converted": isinstance(layer, Converted), **entry}


def aligned(rows: Sequence[Sequence[str]], left: int = 2, last_left: bool = False) -> list[str]:
    """Lines of a table: ``left`` left-aligned columns, then right-aligned ones but for the last."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    ends = {*range(left), *([len(widths) - 1] if last_left else [])}
    return [
        "  ".join(
            cell.ljust(width) if i in ends else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
