"""A :class:`Plan`: the configuration of each layer of a model, and the measurements behind it.

:func:`hotcore.torch.calibrate` makes plans from errors, :func:`hotcore.torch.autotune` from times
and bytes.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from torch import nn

from .. import _strict_json
from .._strict_json import Fields
from ..config import ConfigLike, HotConfig, as_config
from .report import listed, pattern_of

GX_SCALES: tuple[Literal["tensor", "row"], ...] = ("tensor", "row")
GW_SCALES = ("tensor", "channel", "token")
PLAIN = "plain"
"""The name of the plain layer, beside the recipes' names, in a plan of times."""

_ERRORS = "hotcore plan 1"
_TIMES = "hotcore plan 2"  # has times too


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

    ``gx_error`` and ``gw_error`` (:func:`calibrate`) map a scale of g_y to the relative squared
    error of that gradient, ``|g - g'|^2 / |g|^2`` over all batches. ``pattern`` holds the largest
    ``|g_y|`` in each cell of a grid over the first batch's g_y: rows are tokens, columns are out
    features. ``times`` (:func:`autotune`) maps ``"plain"`` and recipes to measurements. ``fields``
    are the layer's fields of HotConfig; None: it stays plain. ``choice`` is the chosen name in
    ``times``, ``reason`` says why it is not the fastest or the smallest.
    """

    name: str
    gx_error: Mapping[str, float] = dataclasses.field(default_factory=dict)
    gw_error: Mapping[str, float] = dataclasses.field(default_factory=dict)
    fields: Mapping[str, Any] | None = dataclasses.field(default_factory=dict)
    pattern: tuple[tuple[float, ...], ...] = dataclasses.field(default=(), repr=False)
    times: Mapping[str, Measured] = dataclasses.field(default_factory=dict)
    choice: str = ""
    reason: str = ""
    shape: str = ""
    """Kind and sizes, in words."""

    def __post_init__(self) -> None:
        """Make the mappings read-only."""
        for name in ("gx_error", "gw_error", "fields", "times"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, MappingProxyType(dict(value)))


@dataclasses.dataclass(frozen=True)
class Plan:
    """Fields of HotConfig per layer, and the measurements behind them; print it for a table."""

    layers: tuple[LayerPlan, ...]
    config: HotConfig
    batches: int = 0
    """Number of batches that :func:`calibrate` measured."""
    objective: str = ""
    """``"time"`` or ``"memory"`` for :func:`autotune`; empty for :func:`calibrate`."""
    machine: str = ""
    """Device, torch, and how :func:`autotune` measured."""
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
        if model is not None:
            self.check(model)
        return {
            _escape(layer.name): None
            if layer.fields is None
            else dataclasses.replace(base, **layer.fields)
            for layer in self.layers
        }

    def check(self, model: nn.Module) -> None:
        """Raise a ValueError that names the layers of this plan which ``model`` lacks."""
        known = {name for name, _ in model.named_modules()}
        missing = [layer.name for layer in self.layers if layer.name not in known]
        if missing:
            kinds = (nn.Linear, nn.Conv2d)
            have = [name for name, module in model.named_modules() if isinstance(module, kinds)]
            raise ValueError(
                f"plan: made for another model; {len(missing)} of its {len(self.layers)} layers "
                f"are not in this one: {listed(missing)} (this one has {listed(have)})"
            )

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
            "format": _TIMES if self.objective else _ERRORS,
            "config": json.loads(self.config.to_json()),
            "batches": self.batches,
            "layers": [
                {
                    "name": layer.name,
                    "gx_error": dict(layer.gx_error),
                    "gw_error": dict(layer.gw_error),
                    "fields": None if layer.fields is None else dict(layer.fields),
                    "pattern": [[float(f"{v:.3g}") for v in row] for row in layer.pattern],
                }
                for layer in self.layers
            ],
        }
        if self.objective:
            content |= {"objective": self.objective, "machine": self.machine}
            content["steps"] = _plain(self.steps)
            for entry, layer in zip(content["layers"], self.layers, strict=True):
                entry["times"] = _plain(layer.times)
                entry |= {"choice": layer.choice, "reason": layer.reason, "shape": layer.shape}
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
        if not isinstance(content, dict) or content.get("format") not in (_ERRORS, _TIMES):
            raise ValueError(f"{where} is no plan; expected the format {_ERRORS!r} or {_TIMES!r}")
        fields = Fields(content, where)
        times = fields.take("format", str) == _TIMES
        try:
            config = HotConfig.from_json(json.dumps(fields.take("config", dict)))
        except ValueError as error:
            raise ValueError(f"{where}: config: {str(error).removeprefix('text: ')}") from None
        layers = [
            _layer(Fields(entry, f"{where}: layers[{i}]"), f"{where}: layers[{i}]", config, times)
            for i, entry in enumerate(fields.take("layers", list))
        ]
        names = [layer.name for layer in layers]
        if len(set(names)) != len(names):
            raise ValueError(f"{where}: two layers have one name")
        batches = fields.take("batches", int)
        if batches < 0:
            raise ValueError(f"{where}: batches: {batches} is negative")
        objective, machine, steps = "", "", {}
        if times:
            objective = fields.take("objective", str)
            if objective not in ("time", "memory"):
                raise ValueError(
                    f"{where}: objective: {objective!r} is neither 'time' nor 'memory'"
                )
            machine = fields.take("machine", str)
            steps = _measured(fields.take("steps", dict), f"{where}: steps")
            if steps and not {PLAIN, "planned"} <= steps.keys():
                raise ValueError(f"{where}: steps: expected {PLAIN!r} and 'planned'")
        fields.end()
        return cls(tuple(layers), config, batches, objective, machine, steps)

    def __str__(self) -> str:
        """A table with one line per layer: the measurements of every choice, and the choice.

        Measurements are relative errors, or milliseconds and MB kept for backward. In a plan of
        times, layers with one measurement share a line, with their count in brackets.
        """
        return self._times() if self.objective else self._errors()

    def _errors(self) -> str:
        heads = [f"g_x {scale}" for scale in GX_SCALES] + [f"g_w {scale}" for scale in GW_SCALES]
        rows = [["layer", *heads, "chosen"]]
        for layer in self.layers:
            errors = [layer.gx_error.get(scale, math.nan) for scale in GX_SCALES]
            errors += [layer.gw_error.get(scale, math.nan) for scale in GW_SCALES]
            chosen = ", ".join(f"{name}={value}" for name, value in (layer.fields or {}).items())
            rows.append([layer.name, *(f"{math.sqrt(e):.4f}" for e in errors), chosen])
        lines = _aligned(rows)
        lines.append(
            f"|error| / |gradient| of {len(self.layers)} layers over {self.batches} batches, "
            f"{self.config}"
        )
        return "\n".join(lines)

    def _times(self) -> str:
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
        lines = _aligned(rows, left=2)
        converted = [layer for layer in self.layers if layer.fields is not None]
        lines.append(
            f"for {self.objective}: {len(converted)} of {len(self.layers)} layers run HOT; forward "
            f"and backward, medians, and what is kept in between; {self.machine}"
        )
        timed = [layer for layer in self.layers if layer.times]
        if timed:
            sums = [
                (
                    sum(row.median_ms for row in rows),
                    sum(row.kept_bytes for row in rows),
                )
                for rows in (
                    [layer.times[PLAIN] for layer in timed],
                    [layer.times[layer.choice] for layer in timed],
                )
            ]
            lines.append(
                f"sum of the layers: plain {sums[0][0]:.4g} ms ({sums[0][1] / 1e6:.4g} MB), "
                f"planned {sums[1][0]:.4g} ms ({sums[1][1] / 1e6:.4g} MB)"
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
        """Draw the plan into a file; raises ImportError without matplotlib.

        A plan of errors shows ``|g_y|`` of every layer, tokens by out features. Bright rows are
        outlier tokens, for which a finer scale helps; single bright cells are not. (The paper draws
        the same in Fig. 2 of supplement G.) A plan of times shows the time of every choice with its
        quartiles, one group of bars for equal layers.
        """
        if self.objective:
            self._plot_times(path)
        else:
            self._plot_patterns(path)

    def _plot_times(self, path: str | Path) -> None:
        names = self._contenders()
        groups = [layers for layers in self._groups() if layers[0].times]
        height = 1.2 + 0.22 * len(groups) * (len(names) + 1)
        figure = matplotlib_figure()(figsize=(8, height), layout="constrained")
        axis = figure.subplots()
        bar = 0.8 / max(1, len(names))
        for i, name in enumerate(names):
            rows = [
                (place, g[0].times[name]) for place, g in enumerate(groups) if name in g[0].times
            ]
            axis.barh(
                [place + (i - (len(names) - 1) / 2) * bar for place, _ in rows],
                [row.median_ms for _, row in rows],
                bar * 0.9,
                xerr=[
                    [row.median_ms - row.q1_ms for _, row in rows],
                    [row.q3_ms - row.median_ms for _, row in rows],
                ],
                label=name,
                color="#888888" if name == PLAIN else None,
            )
        labels = [
            f"{pattern_of(g[0].name) if len(g) > 1 else g[0].name} ({len(g)}): {g[0].choice}"
            for g in groups
        ]
        axis.set_yticks(range(len(groups)), labels, fontsize=8)
        axis.invert_yaxis()
        axis.set_xlabel("forward and backward of a layer, ms")
        axis.set_title(self.machine, fontsize=8)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend()
        figure.savefig(path, dpi=130)

    def _plot_patterns(self, path: str | Path) -> None:
        figure_class = matplotlib_figure()
        columns = min(4, len(self.layers))
        height = -(-len(self.layers) // columns)
        figure = figure_class(figsize=(3.1 * columns, 2.9 * height), layout="constrained")
        axes = figure.subplots(height, columns, squeeze=False)
        for axis, layer in itertools.zip_longest(axes.flat, self.layers):
            if layer is None:
                axis.set_visible(False)
                continue
            image = axis.imshow(layer.pattern, aspect="auto", cmap="viridis", vmin=0)
            figure.colorbar(image, ax=axis).formatter.set_powerlimits((0, 0))
            axis.set_title(layer.name, fontsize=8)
            fields = layer.fields or {}
            chosen = ", ".join(
                f"{key.removesuffix('_scale')}: {fields[key]}"
                for key in ("gx_scale", "gw_scale")
                if key in fields
            )
            axis.set_xlabel(f"out features   ({chosen})", fontsize=7)
            axis.set_ylabel("tokens", fontsize=7)
            axis.set_xticks([])
            axis.set_yticks([])
        figure.savefig(path, dpi=130)


def _escape(name: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)


def _aligned(rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Lines of a table; the first ``left`` columns and the last one are left-aligned."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    return [
        "  ".join(
            [
                cell.ljust(width) if i < left else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(row[:-1], widths, strict=True))
            ]
            + [row[-1]]
        ).rstrip()
        for row in rows
    ]


def _plain(times: Mapping[str, Measured]) -> dict[str, dict[str, float]]:
    return {name: dataclasses.asdict(row) for name, row in times.items()}


def _layer(fields: Fields, where: str, config: HotConfig, times: bool) -> LayerPlan:
    """A layer from a file; checks everything, including its fields against ``config``."""
    name = fields.take("name", str)
    gx_error = _errors_of(fields.take("gx_error", dict), GX_SCALES, f"{where}: gx_error")
    gw_error = _errors_of(fields.take("gw_error", dict), GW_SCALES, f"{where}: gw_error")
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
    pattern = tuple(
        tuple(
            float(_strict_json.expect(value, (int, float), f"{where}: pattern"))
            for value in _strict_json.expect(row, list, f"{where}: pattern")
        )
        for row in fields.take("pattern", list)
    )
    if len({len(row) for row in pattern}) > 1:
        raise ValueError(f"{where}: pattern: its rows differ in length")
    measured: dict[str, Measured] = {}
    choice = reason = shape = ""
    if times:
        measured = _measured(fields.take("times", dict), f"{where}: times")
        choice, reason, shape = (fields.take(text, str) for text in ("choice", "reason", "shape"))
        if measured and not {PLAIN, choice} <= measured.keys():
            raise ValueError(f"{where}: times: expected {PLAIN!r} and the choice, {choice!r}")
    fields.end()
    return LayerPlan(name, gx_error, gw_error, chosen, pattern, measured, choice, reason, shape)


def _errors_of(errors: dict[str, Any], known: Sequence[str], where: str) -> dict[str, float]:
    """Relative errors by scale: of all scales, or of none if none were measured."""
    fields = Fields(errors, where)
    found = {scale: fields.take(scale, (int, float)) for scale in known} if errors else {}
    fields.end()
    for scale, error in found.items():
        if error < 0:
            raise ValueError(f"{where}: {scale}: {error} is negative")
    return found


def _measured(entries: dict[str, Any], where: str) -> dict[str, Measured]:
    found = {}
    for name, entry in entries.items():
        fields = Fields(entry, f"{where}: {name}")
        row = Measured(
            float(fields.take("median_ms", (int, float))),
            float(fields.take("q1_ms", (int, float))),
            float(fields.take("q3_ms", (int, float))),
            fields.take("kept_bytes", int),
        )
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


def matplotlib_figure() -> Any:
    """matplotlib's Figure, which needs no display; an ImportError says how to install it."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plot needs matplotlib: pip install matplotlib") from error
    return Figure
