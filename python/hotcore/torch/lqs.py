"""Layer-wise quantiser selection (LQS): :func:`calibrate` measures, a :class:`Plan` remembers.

One scale for all of g_y is cheapest, but a gradient whose outliers sit in single tokens drowns the
other tokens in it; a layer gets the finer scale only where that pays.

Source: the paper's LQS and supplement G; spec.md, "LQS".
"""

from __future__ import annotations

import dataclasses
import fnmatch
import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import ops as arrays_ops
from ..config import HotConfig, Key, as_config
from .convert import Filter, convert

GX_SCALES = ("tensor", "row")
GW_SCALES = ("tensor", "channel", "token")
PATTERN_SIZE = 32
"""Rows and columns of a stored outlier pattern."""

UNFOLDED_BYTES = 1 << 28
"""Of a convolution's input, unfolded in fp32, that calibrate measures with."""

_FORMAT = "hotcore plan 1"
_AXIS = {"tensor": "tensor", "channel": "column", "token": "row"}  # of P g_y [K, O]


@dataclasses.dataclass(frozen=True)
class LayerPlan:
    """What was measured of one layer, and what was chosen for it.

    ``gx_error`` and ``gw_error`` map a scale of g_y to the relative squared error of that gradient,
    ``|g - g'|^2 / |g|^2`` over all batches. ``pattern`` holds the largest ``|g_y|`` of the cells of
    a grid laid over the first batch's g_y: rows are tokens, columns are out features.
    ``fields`` are the fields of HotConfig that this layer gets.
    """

    name: str
    gx_error: Mapping[str, float]
    gw_error: Mapping[str, float]
    fields: Mapping[str, Any]
    pattern: tuple[tuple[float, ...], ...] = dataclasses.field(repr=False)

    def __post_init__(self) -> None:
        """Make the mappings read-only."""
        for name in ("gx_error", "gw_error", "fields"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))


@dataclasses.dataclass(frozen=True)
class Plan:
    """Fields of HotConfig per layer, and the measurements behind them; print it for a table."""

    layers: tuple[LayerPlan, ...]
    config: HotConfig
    batches: int

    def overrides(
        self, config: HotConfig | str | None = None, model: nn.Module | None = None
    ) -> dict[str, HotConfig]:
        """Layer name -> configuration, for ``convert(model, config, overrides=...)``.

        Args:
            config: what the layers' fields are put into (None: what the plan was made with).
            model: the model that it is meant for, to be checked.

        Raises:
            ValueError: ``model`` lacks layers of this plan; they are named.
        """
        base = self.config if config is None else as_config(config)
        if model is not None:
            self.check(model)
        return {
            _escape(layer.name): dataclasses.replace(base, **layer.fields) for layer in self.layers
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
                f"are not in this one: {_some(missing)} (this one has {_some(have)})"
            )

    def override(self, pattern: str, **fields: Any) -> Plan:
        """Return a plan where the layers that match get these fields of HotConfig, too.

        ``plan.override("blocks.*.fc2", basis="sketch", rank=4, storage="int8")``. Patterns are
        those of :mod:`fnmatch`. Raises ValueError when no layer matches, or for a bad field.
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
                changed = {**layer.fields, **fields}
                dataclasses.replace(self.config, **changed)  # checks the values
                layer = dataclasses.replace(layer, fields=changed)
            layers.append(layer)
        if not matched:
            raise ValueError(
                f"pattern: {pattern!r} matches none of {_some([p.name for p in self.layers])}"
            )
        return dataclasses.replace(self, layers=tuple(layers))

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON."""
        content = {
            "format": _FORMAT,
            "config": json.loads(self.config.to_json()),
            "batches": self.batches,
            "layers": [
                {
                    "name": layer.name,
                    "gx_error": dict(layer.gx_error),
                    "gw_error": dict(layer.gw_error),
                    "fields": dict(layer.fields),
                    "pattern": [[float(f"{v:.3g}") for v in row] for row in layer.pattern],
                }
                for layer in self.layers
            ],
        }
        Path(path).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read what :meth:`save` wrote. Raises ValueError for any other file."""
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise ValueError(f"path: {path} is no JSON ({error})") from None
        if not isinstance(content, dict) or content.get("format") != _FORMAT:
            raise ValueError(f"path: {path} is no plan; expected the format {_FORMAT!r}")
        layers = []
        for entry in content["layers"]:
            fields = {k: tuple(v) if isinstance(v, list) else v for k, v in entry["fields"].items()}
            pattern = tuple(tuple(row) for row in entry["pattern"])
            layers.append(
                LayerPlan(entry["name"], entry["gx_error"], entry["gw_error"], fields, pattern)
            )
        config = HotConfig.from_json(json.dumps(content["config"]))
        return cls(tuple(layers), config, content["batches"])

    def __str__(self) -> str:
        """A table: a layer a line, the relative error of every choice, and what was chosen."""
        heads = [f"g_x {scale}" for scale in GX_SCALES] + [f"g_w {scale}" for scale in GW_SCALES]
        rows = [["layer", *heads, "chosen"]]
        for layer in self.layers:
            errors = [layer.gx_error[scale] for scale in GX_SCALES]
            errors += [layer.gw_error[scale] for scale in GW_SCALES]
            chosen = ", ".join(f"{name}={value}" for name, value in layer.fields.items())
            rows.append([layer.name, *(f"{math.sqrt(e):.4f}" for e in errors), chosen])
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
        lines = [
            "  ".join(
                [f"{row[0]:<{widths[0]}}"]
                + [f"{cell:>{width}}" for cell, width in zip(row[1:-1], widths[1:], strict=True)]
                + [row[-1]]
            ).rstrip()
            for row in rows
        ]
        lines.append(
            f"|error| / |gradient| of {len(self.layers)} layers over {self.batches} batches, "
            f"{self.config}"
        )
        return "\n".join(lines)

    def plot(self, path: str | Path) -> None:
        """Draw where the large gradients of every layer are: ``|g_y|``, tokens by out features.

        Bright rows are outlier tokens, which a scale of their own tames; single bright cells are
        not. (The paper draws the same in its Fig. 2 of supplement G.) Raises ImportError without
        matplotlib.
        """
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
            chosen = ", ".join(
                f"{key.removesuffix('_scale')}: {layer.fields[key]}"
                for key in ("gx_scale", "gw_scale")
                if key in layer.fields
            )
            axis.set_xlabel(f"out features   ({chosen})", fontsize=7)
            axis.set_ylabel("tokens", fontsize=7)
            axis.set_xticks([])
            axis.set_yticks([])
        figure.savefig(path, dpi=130)


def calibrate(
    model: nn.Module,
    batches: Iterable[Any],
    loss_fn: Callable[[nn.Module, Any], Tensor],
    config: HotConfig | str = "paper",
    *,
    filter_fn: Filter | None = None,
    gw_fine: str | None = None,
    gain: float = 0.5,
    seed: int = 0,
) -> Plan:
    """Measure what coarse and fine scales of g_y cost every layer, and choose.

    Runs forward and backward on every batch (a few are enough), with plain gradients where the
    model is plain. Of each layer that :func:`convert` would take, or has taken, g_y is quantised by
    each choice and the error of g_x and of g_w is measured against the same product of the
    unquantised g_y: the transformed one for g_x; for g_w after the basis of ``config``, so that its
    loss of rank is not counted. The fine scale is chosen where it cuts the squared error by more
    than ``gain``. Parameters, their ``.grad`` and buffers are left as they were.

    Args:
        model: plain or converted.
        batches: what ``loss_fn`` takes, one after the other.
        loss_fn: ``loss_fn(model, batch)`` -> loss, a scalar.
        config: bits, blocks, basis and rounding to measure with.
        filter_fn: which layers of a plain model, as for :func:`convert`.
        gw_fine: the finer choice for g_w: ``"token"`` (the paper's) or ``"channel"`` (as cheap as
            ``"tensor"`` in hotcore's products); None: ``"channel"`` where ``config`` has it.
        gain: share of the squared error that the finer scale has to save.
        seed: of the rounding that is measured.

    Returns:
        A :class:`Plan`.

    Raises:
        ValueError: no batch, no gradient (``torch.no_grad``, a loss without a graph, frozen
            layers), a bad argument.

    Source: spec.md, "LQS"; supplement G of the paper.
    """
    settings = as_config(config)
    if gw_fine is None:
        gw_fine = "channel" if settings.gw_scale == "channel" else "token"
    if gw_fine not in GW_SCALES[1:]:
        raise ValueError(f"gw_fine: {gw_fine!r} is not one of 'token', 'channel'")
    if not 0 <= gain < 1:
        raise ValueError(f"gain: {gain} is outside 0 <= gain < 1")
    if not torch.is_grad_enabled():
        raise ValueError("calibrate: gradients are off (torch.no_grad); LQS measures g_y")
    names = _layers(model, settings, filter_fn)
    probes = {name: _Probe(settings, Key(seed, stream=i % 8192)) for i, name in enumerate(names)}
    count = 0
    with Untouched(model):
        for batch in batches:
            _measure(model, batch, loss_fn, probes)
            count += 1
    if count == 0:
        raise ValueError("batches: empty; calibrate needs at least one")
    blind = [name for name, probe in probes.items() if not probe.seen]
    if blind:
        raise ValueError(
            f"calibrate: no gradient reached {_some(blind)}; "
            "leave them out with filter_fn, or let their outputs require grad"
        )
    layers = [probe.plan(name, gw_fine, gain) for name, probe in probes.items()]
    return Plan(tuple(layers), settings, count)


class _Probe:
    """Adds up, over batches, the squared errors of one layer."""

    def __init__(self, config: HotConfig, key: Key) -> None:
        self._config = config
        self._key = key
        self._errors: dict[tuple[str, str], float] = {}
        self._norms = {"gx": 0.0, "gw": 0.0}
        self._pattern: tuple[tuple[float, ...], ...] | None = None

    @property
    def seen(self) -> bool:
        return self._pattern is not None

    @torch.no_grad()
    def add(self, module: nn.Module, x: Tensor, gy: Tensor) -> None:
        """Input and gradient of the output of one call of the layer."""
        x, weight, gy, config = _as_linear(module, x, gy, self._config)
        if self._pattern is None:
            self._pattern = _pattern(gy)
        key = self._key
        x, weight, gy = x.float(), weight.float(), gy.float().contiguous()
        block = config.hadamard_block
        pad = -gy.shape[1] % block
        turned = arrays_ops.fwht(F.pad(gy, (0, pad)), block=block)
        turned_weight = arrays_ops.fwht(F.pad(weight, (0, 0, 0, pad)), axis=0, block=block)
        self._norms["gx"] += _square(turned @ turned_weight)
        for scale in GX_SCALES:
            rounded = _rounded(turned, config.gx_bits, scale, config.gx_rounding, key)
            self._add("gx", scale, (rounded - turned) @ turned_weight)
        options: dict[str, Any] = {
            name: getattr(config, name)
            for name in ("rank", "basis", "block", "rows", "token_grid", "prefix_tokens")
        }
        kept = arrays_ops.hla(gy, **options, side="gradient", key=key)
        kept_x = arrays_ops.hla(x, **options, side="activation", key=key)
        self._norms["gw"] += _square(kept.T @ kept_x)
        for scale in GW_SCALES:
            rounded = _rounded(kept, 8, _AXIS[scale], config.gw_rounding, key)
            self._add("gw", scale, (rounded - kept).T @ kept_x)
        self._key = key._replace(offset=key.offset + 1)

    def _add(self, path: str, scale: str, error: Tensor) -> None:
        entry = (path, scale)
        self._errors[entry] = self._errors.get(entry, 0.0) + _square(error)

    def plan(self, name: str, gw_fine: str, gain: float) -> LayerPlan:
        gx = {scale: self._relative("gx", scale) for scale in GX_SCALES}
        gw = {scale: self._relative("gw", scale) for scale in GW_SCALES}
        fields = {
            "gx_scale": "row" if gx["tensor"] - gx["row"] > gain * gx["tensor"] else "tensor",
            "gw_scale": gw_fine if gw["tensor"] - gw[gw_fine] > gain * gw["tensor"] else "tensor",
        }
        return LayerPlan(name, gx, gw, fields, self._pattern or ())

    def _relative(self, path: str, scale: str) -> float:
        norm = self._norms[path]
        return self._errors[path, scale] / norm if norm else 0.0


class Untouched:
    """Puts .grad, buffers, submodules and torch's random state back on leaving."""

    def __init__(self, model: nn.Module) -> None:
        """Of this model."""
        self._model = model

    def __enter__(self) -> None:
        """Take .grad away, and a copy of the rest."""
        self._grads = [(p, p.grad) for p in self._model.parameters()]
        for parameter, _ in self._grads:
            parameter.grad = None
        self._buffers = [(b, b.detach().clone()) for b in self._model.buffers()]
        self._children = [(m, dict(m._modules)) for m in self._model.modules()]
        devices = {p.device for p, _ in self._grads if p.is_cuda}
        self._random = torch.random.fork_rng(devices)
        self._random.__enter__()

    def __exit__(self, *error: Any) -> None:
        """Put it all back."""
        self._random.__exit__(*error)
        for module, children in self._children:
            module._modules.update(children)
        for parameter, grad in self._grads:
            parameter.grad = grad
        with torch.no_grad():
            for buffer, value in self._buffers:
                buffer.copy_(value)


def _layers(model: nn.Module, config: HotConfig, filter_fn: Filter | None) -> list[str]:
    """Names of the layers that are converted, or that convert would take."""
    converted = [
        name
        for name, module in model.named_modules()
        if isinstance(getattr(module, "config", None), HotConfig)
    ]
    if converted:
        return converted
    with Untouched(model):
        report = convert(model, config, filter_fn)
    return [layer.name for layer in report.converted]


def _measure(
    model: nn.Module,
    batch: Any,
    loss_fn: Callable[[nn.Module, Any], Tensor],
    probes: Mapping[str, _Probe],
) -> None:
    handles = []
    try:
        for name, probe in probes.items():
            hook = _capture(probe)
            handles.append(model.get_submodule(name).register_forward_hook(hook))
        loss = loss_fn(model, batch)
        if not isinstance(loss, Tensor) or not loss.requires_grad:
            raise ValueError(
                "loss_fn: returned nothing that requires grad; calibrate runs backward, which "
                "needs a loss with a graph (no torch.no_grad, no detach, no .item())"
            )
        loss.backward()  # type: ignore[no-untyped-call]
    finally:
        for handle in handles:
            handle.remove()
        for parameter in model.parameters():
            parameter.grad = None


def _capture(probe: _Probe) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
    def hook(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if not isinstance(output, Tensor) or not output.requires_grad:
            return
        x = inputs[0].detach()

        def on_gradient(gy: Tensor) -> None:
            probe.add(module, x, gy.detach())

        output.register_hook(on_gradient)  # type: ignore[no-untyped-call]

    return hook


def _as_linear(
    module: nn.Module, x: Tensor, gy: Tensor, config: HotConfig
) -> tuple[Tensor, Tensor, Tensor, HotConfig]:
    """x ``[L, I]``, weight ``[O, I]``, gy ``[L, O]`` and the settings of the layer's products.

    Of a convolution, whose tokens are the output's pixels, the first images alone: as many as
    unfold into :data:`UNFOLDED_BYTES`, one at least.
    """
    weight = module.weight
    assert isinstance(weight, Tensor)
    weight = weight.detach()
    if not isinstance(module, nn.Conv2d):
        if not isinstance(module, nn.Linear):
            weight = weight.T  # transformers' Conv1D keeps [I, O]
        return x.reshape(-1, x.shape[-1]), weight, gy.reshape(-1, gy.shape[-1]), config
    grid = (gy.shape[2], gy.shape[3])
    image = 4 * weight[0].numel() * math.prod(grid)
    images = max(1, UNFOLDED_BYTES // max(1, image))
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    padded = F.pad(x[:images].float(), module._reversed_padding_repeated_twice, mode)
    stride, dilation = module.stride, module.dilation
    unfolded = F.unfold(padded, module.kernel_size, dilation=dilation, stride=stride)
    tiled = config.basis in ("lowpass", "sequency")
    return (
        unfolded.transpose(1, 2).reshape(-1, weight[0].numel()),
        weight.flatten(1),
        gy[:images].permute(0, 2, 3, 1).reshape(-1, gy.shape[1]),
        dataclasses.replace(config, token_grid=grid if tiled else None, prefix_tokens=0),
    )


def _rounded(values: Tensor, bits: int, scale: str, rounding: str, key: Key) -> Tensor:
    codes, scales = arrays_ops.quantize(values, bits=bits, scale=scale, rounding=rounding, key=key)
    result: Tensor = arrays_ops.dequantize(codes, scales, granularity=scale)
    return result


def _square(values: Tensor) -> float:
    return float(values.double().square().sum())


def _pattern(gy: Tensor) -> tuple[tuple[float, ...], ...]:
    size = (min(PATTERN_SIZE, gy.shape[0]), min(PATTERN_SIZE, gy.shape[1]))
    if 0 in size:
        return ()
    cells = F.adaptive_max_pool2d(gy.detach().float().abs()[None, None], size)[0, 0]
    return tuple(tuple(row) for row in cells.tolist())


def _escape(name: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)


def _some(names: list[str], most: int = 8) -> str:
    shown = ", ".join(name or "(root)" for name in names[:most])
    return f"{shown}, ... ({len(names)} in all)" if len(names) > most else shown or "none"


def matplotlib_figure() -> Any:
    """matplotlib's Figure, which needs no display; an ImportError says how to get it."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plot needs matplotlib: pip install matplotlib") from error
    return Figure
