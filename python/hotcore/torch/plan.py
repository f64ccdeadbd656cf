"""A :class:`Plan`: the configuration of each layer of a model, and the times behind it.

:func:`hotcore.torch.autotune` makes plans.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import nn

from .. import _strict_json
from .._strict_json import Fields
from ..config import ConfigLike, HotConfig, as_config
from .report import aligned, listed, pattern_of

PLAIN = "plain"
"""The name of the plain layer, beside the recipes' names, in a plan of times."""

_FORMAT = "hotcore plan 3"


@dataclasses.dataclass(frozen=True)
class Measured:
    """Forward and backward of a layer, summed over its calls in a step.

    Milliseconds are the median and the quartiles of the rounds; bytes are those kept for backward.
    """

    median_ms: float
    q1_ms: float
    q3_ms: float
    kept_bytes: int

    @property
    def spread_ms(self) -> float:
        """Half of the distance between the quartiles."""
        return (self.q3_ms - self.q1_ms) / 2

    def beats(self, other: Measured) -> bool:
        """Whether it is faster by more than both spreads."""
        return self.median_ms + self.spread_ms < other.median_ms - other.spread_ms


@dataclasses.dataclass(frozen=True)
class LayerPlan:
    """The measurements of one layer, and the choice for it.

    ``fields`` are the layer's fields of HotConfig; None: it stays plain. ``times`` maps ``"plain"``
    and recipes to measurements. ``choice`` is the chosen name in ``times``, ``reason`` says why it
    is not the fastest or the smallest.
    """

    name: str
    fields: Mapping[str, Any] | None = dataclasses.field(default_factory=dict)
    times: Mapping[str, Measured] = dataclasses.field(default_factory=dict)
    choice: str = ""
    reason: str = ""
    shape: str = ""
    """Kind and sizes, in words."""

    def __post_init__(self) -> None:
        """Make the mappings read-only."""
        for name in ("fields", "times"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, MappingProxyType(dict(value)))


@dataclasses.dataclass(frozen=True)
class Plan:
    """Fields of HotConfig per layer, and the measurements behind them; print it for a table."""

    layers: tuple[LayerPlan, ...]
    config: HotConfig
    objective: str = "time"
    """``"time"`` or ``"memory"``."""
    machine: str = ""
    """Device, torch, and how the times were measured."""
    steps: Mapping[str, Measured] = dataclasses.field(default_factory=dict)
    """Forward and backward of the whole model, ``"plain"`` and ``"planned"``."""

    def __post_init__(self) -> None:
        """Make the mapping read-only."""
        object.__setattr__(self, "steps", MappingProxyType(dict(self.steps)))

    def overrides(
        self, config: ConfigLike | None = None, model: nn.Module | None = None
    ) -> dict[str, HotConfig | None]:
        """Layer name -> configuration, for ``convert(model, config, overrides=...)``.

        Args:
            config: the configuration that the layers' fields are set in (None: the plan's own).
            model: the model to check the plan against.

        Returns:
            A configuration for every layer, None for those that stay plain.

        Raises:
            ValueError: ``model`` lacks layers of this plan; they are named.
        """
        base = self.config if config is None else as_config(config)
        return overrides_of([(layer.name, layer.fields) for layer in self.layers], base, model)

    def override(self, pattern: str, **fields: Any) -> Plan:
        """Return a plan in which the matching layers also get these fields of HotConfig.

        ``plan.override("blocks.*.fc2", basis="sketch", rank=4, storage="int8")``. Patterns are
        those of :mod:`fnmatch`. A matching layer that was to stay plain will be converted. Raises
        ValueError if no layer matches, or for a bad field.
        """
        known = {field.name for field in dataclasses.fields(HotConfig)}
        for name in fields:
            if name not in known:
                raise ValueError(f"fields: HotConfig has no field {name!r}")
        layers = []
        matched = False
        for layer in self.layers:
            if fnmatch.fnmatchcase(layer.name, pattern):
                matched = True
                changed = {**(layer.fields or {}), **fields}
                dataclasses.replace(self.config, **changed)  # checks the values
                layer = dataclasses.replace(layer, fields=changed)
            layers.append(layer)
        if not matched:
            raise ValueError(
                f"pattern: {pattern!r} matches none of {listed([p.name for p in self.layers])}"
            )
        return dataclasses.replace(self, layers=tuple(layers))

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON. Raises ValueError if it is too large for :meth:`load`."""
        content: dict[str, Any] = {
            "format": _FORMAT,
            "config": json.loads(self.config.to_json()),
            "objective": self.objective,
            "machine": self.machine,
            "steps": _plain(self.steps),
            "layers": [
                {
                    **vars(layer),
                    "fields": None if layer.fields is None else dict(layer.fields),
                    "times": _plain(layer.times),
                }
                for layer in self.layers
            ],
        }
        text = json.dumps(content, indent=1) + "\n"
        if len(text) > _strict_json.MAX_FILE_BYTES:
            raise ValueError(
                f"plan: {len(self.layers)} layers make {len(text)} bytes of JSON; Plan.load takes "
                f"{_strict_json.MAX_FILE_BYTES}"
            )
        Path(path).write_text(text, encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a file of :meth:`save`, at most 64 MiB.

        Raises ValueError for any other file and names the field that is unknown, missing, of a
        wrong type or no setting of HotConfig. Raises OSError if the file cannot be read.
        """
        where = f"path: {path}"
        content = _strict_json.read(path, where)
        if not isinstance(content, dict) or content.get("format") != _FORMAT:
            raise ValueError(f"{where} is no plan; expected the format {_FORMAT!r}")
        fields = Fields(content, where)
        fields.take("format", str)
        try:
            config = HotConfig.from_json(json.dumps(fields.take("config", dict)))
        except ValueError as error:
            raise ValueError(f"{where}: config: {str(error).removeprefix('text: ')}") from None
        layers = [
            _layer(Fields(entry, f"{where}: layers[{i}]"), f"{where}: layers[{i}]", config)
            for i, entry in enumerate(fields.take("layers", list))
        ]
        names = [layer.name for layer in layers]
        if len(set(names)) != len(names):
            raise ValueError(f"{where}: two layers have one name")
        objective = fields.take("objective", str)
        if objective not in ("time", "memory"):
            raise ValueError(f"{where}: objective: {objective!r} is neither 'time' nor 'memory'")
        machine = fields.take("machine", str)
        steps = _measured(fields.take("steps", dict), f"{where}: steps")
        if steps and not {PLAIN, "planned"} <= steps.keys():
            raise ValueError(f"{where}: steps: expected {PLAIN!r} and 'planned'")
        fields.end()
        return cls(tuple(layers), config, objective, machine, steps)

    def __str__(self) -> str:
        """A table with one line per layer: milliseconds and MB kept for backward, and the choice.

        Layers with one measurement share a line, with their count in brackets.
        """
        names = self._contenders()
        rows = [["layer", "kind", *(f"{name}, ms (MB)" for name in names), "chosen"]]
        for layers in self._groups():
            first = layers[0]
            cells = []
            for name in names:
                row = first.times.get(name)
                cells.append(f"{row.median_ms:.4g} ({row.kept_bytes / 1e6:.4g})" if row else "-")
            shown = first.name or "(root)"
            if len(layers) > 1:
                shown = f"{pattern_of(first.name)} ({len(layers)})"
            chosen = first.choice + (f": {first.reason}" if first.reason else "")
            rows.append([shown, first.shape, *cells, chosen])
        lines = aligned(rows, last_left=True)
        converted = [layer for layer in self.layers if layer.fields is not None]
        lines.append(
            f"for {self.objective}: {len(converted)} of {len(self.layers)} layers run HOT; forward "
            f"and backward, medians, and what is kept in between; {self.machine}"
        )
        timed = [layer for layer in self.layers if layer.times]
        if timed:
            (ms, size), (own_ms, own_size) = (
                (sum(row.median_ms for row in rows), sum(row.kept_bytes for row in rows) / 1e6)
                for rows in (
                    [layer.times[PLAIN] for layer in timed],
                    [layer.times[layer.choice] for layer in timed],
                )
            )
            lines.append(
                f"sum of the layers: plain {ms:.4g} ms ({size:.4g} MB), "
                f"planned {own_ms:.4g} ms ({own_size:.4g} MB)"
            )
        if self.steps:
            plain, planned = self.steps[PLAIN], self.steps["planned"]
            verdict = "within the spread"
            if planned.beats(plain):
                verdict = "faster"
            elif plain.beats(planned):
                verdict = "slower"
            lines.append(
                f"whole forward and backward: plain {plain.median_ms:.4g} ms, planned "
                f"{planned.median_ms:.4g} ms: {planned.median_ms / plain.median_ms:.3f}, {verdict}"
            )
        return "\n".join(lines)

    def _contenders(self) -> list[str]:
        return list(dict.fromkeys(name for layer in self.layers for name in layer.times))

    def _groups(self) -> list[list[LayerPlan]]:
        groups: dict[Any, list[LayerPlan]] = {}
        for layer in self.layers:
            times = tuple(layer.times.items())
            key = (pattern_of(layer.name), layer.shape, layer.choice, layer.reason, times)
            groups.setdefault(key, []).append(layer)
        return list(groups.values())

    def plot(self, path: str | Path) -> None:
        """Draw the times of every choice with their quartiles, a group of bars for equal layers.

        Raises ImportError without matplotlib.
        """
        groups = [layers for layers in self._groups() if layers[0].times]
        labels = [
            f"{pattern_of(g[0].name) if len(g) > 1 else g[0].name} ({len(g)}): {g[0].choice}"
            for g in groups
        ]
        nothing = Measured(math.nan, math.nan, math.nan, 0)
        series = {
            name: [
                (row.median_ms, row.q1_ms, row.q3_ms)
                for row in (group[0].times.get(name, nothing) for group in groups)
            ]
            for name in self._contenders()
        }
        draw_bars(path, labels, series, "forward and backward of a layer, ms", self.machine)


def overrides_of(
    layers: Iterable[tuple[str, Mapping[str, Any] | None]], base: HotConfig, model: nn.Module | None
) -> dict[str, HotConfig | None]:
    """Name -> ``base`` with the layer's fields, or None, for ``convert(overrides=)``.

    Raises ValueError that names the layers which ``model``, if any, lacks.
    """
    fields = dict(layers)
    known = fields.keys() if model is None else {name for name, _ in model.named_modules()}
    if missing := [name for name in fields if name not in known]:
        assert model is not None
        kinds = (nn.Linear, nn.Conv2d)
        have = [name for name, module in model.named_modules() if isinstance(module, kinds)]
        raise ValueError(
            f"plan: made for another model; {len(missing)} of its {len(fields)} layers "
            f"are not in this one: {listed(missing)} (this one has {listed(have)})"
        )
    return {
        "".join(f"[{c}]" if c in "*?[" else c for c in name): None
        if own is None
        else dataclasses.replace(base, **own)
        for name, own in fields.items()
    }


def _plain(times: Mapping[str, Measured]) -> dict[str, dict[str, float]]:
    return {name: dataclasses.asdict(row) for name, row in times.items()}


def _layer(fields: Fields, where: str, config: HotConfig) -> LayerPlan:
    """A layer from a file; checks everything, including its fields against ``config``."""
    name = fields.take("name", str)
    chosen = fields.take("fields", (dict, type(None)))
    if chosen is not None:
        known = {field.name for field in dataclasses.fields(HotConfig)}
        for field in chosen:
            if field not in known:
                raise ValueError(f"{where}: fields: HotConfig has no field {field!r}")
        chosen = {k: tuple(v) if isinstance(v, list) else v for k, v in chosen.items()}
        try:
            dataclasses.replace(config, **chosen)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{where}: fields: {error}") from None
    measured = _measured(fields.take("times", dict), f"{where}: times")
    choice, reason, shape = (fields.take(text, str) for text in ("choice", "reason", "shape"))
    if measured and not {PLAIN, choice} <= measured.keys():
        raise ValueError(f"{where}: times: expected {PLAIN!r} and the choice, {choice!r}")
    fields.end()
    return LayerPlan(name, chosen, measured, choice, reason, shape)


def _measured(entries: dict[str, Any], where: str) -> dict[str, Measured]:
    found = {}
    for name, entry in entries.items():
        fields = Fields(entry, f"{where}: {name}")
        names = ("median_ms", "q1_ms", "q3_ms")
        median, q1, q3 = (float(fields.take(name, (int, float))) for name in names)
        row = Measured(median, q1, q3, fields.take("kept_bytes", int))
        fields.end()
        # The table divides by times, and the plot draws bars from quartile to quartile.
        if not 0 < row.q1_ms <= row.median_ms <= row.q3_ms < math.inf:
            raise ValueError(
                f"{where}: {name}: expected 0 < q1_ms <= median_ms <= q3_ms, got {row.q1_ms}, "
                f"{row.median_ms}, {row.q3_ms}"
            )
        if row.kept_bytes < 0:
            raise ValueError(f"{where}: {name}: kept_bytes: {row.kept_bytes} is negative")
        found[name] = row
    return found


def draw_bars(
    path: str | Path,
    labels: Sequence[str],
    series: Mapping[str, Sequence[tuple[float, float, float]]],
    xlabel: str,
    title: str,
) -> None:
    """Draw a group of bars a label, the first series grey: values, each with its lower and upper.

    Raises ImportError without matplotlib.
    """
    height = 1.2 + 0.22 * len(labels) * (len(series) + 1)
    figure = matplotlib_figure()(figsize=(8, height), layout="constrained")
    axis = figure.subplots()
    thick = 0.8 / max(1, len(series))
    for i, (name, rows) in enumerate(series.items()):
        shift = (i - (len(series) - 1) / 2) * thick
        bars = axis.barh(
            [place + shift for place in range(len(rows))],
            [value for value, _, _ in rows],
            thick * 0.9,
            xerr=[
                [value - low for value, low, _ in rows],
                [high - value for value, _, high in rows],
            ],
            label=name,
            color="#888888" if i == 0 else None,
        )
        axis.bar_label(bars, fmt="%.3g", padding=2, fontsize=7)
    axis.set_yticks(range(len(labels)), labels, fontsize=8)
    axis.invert_yaxis()
    axis.set_xlabel(xlabel)
    axis.set_title(title, fontsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend()
    figure.savefig(path, dpi=130)


def matplotlib_figure() -> Any:
    """matplotlib's Figure, which needs no display; an ImportError says how to install it."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plot needs matplotlib: pip install matplotlib") from error
    return Figure
