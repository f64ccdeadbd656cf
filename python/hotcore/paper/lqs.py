"""Layer-wise quantiser selection (LQS): :func:`.calibrate` makes a :class:`.Selection`.

LQS gives the finer scale of g_y only to the layers that gain by it. Source: LQS of the paper and
its supplement G; docs/paper.md.
"""

from __future__ import annotations

import collections
import dataclasses
import glob
import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import functions
from ..config import ConfigLike, HotConfig, Key, Rounding, as_config, as_key
from ..functions import Granularity
from ..torch.conversion.convert import decide
from ..torch.conversion.probe import Call, eagerly, gradients_seen, loss_of, preserve_state
from ..torch.conversion.report import aligned, listed
from ..torch.conversion.selection import Filter, products_of
from ..torch.frozen.bitsandbytes import is_8bit
from ..torch.layers.modules import HotModule
from ..torch.ops.conv import settings, visited
from ..torch.tools.noise import power

PATTERN_SIZE = 32
"""Rows and columns of a stored outlier pattern."""

GX_SCALES: tuple[Literal["tensor", "token"], ...] = ("tensor", "token")
GW_SCALES: tuple[Literal["tensor", "channel", "token"], ...] = ("tensor", "channel", "token")


@dataclasses.dataclass(frozen=True)
class LayerErrors:
    """The measurements of one layer, and the choice for it.

    ``gx_error`` and ``gw_error`` map a scale of g_y to the relative squared error of that gradient,
    ``|g - g'|^2 / |g|^2`` over all batches. ``fields`` has the chosen ``gx_scale`` and
    ``gw_scale``. ``pattern`` holds the largest ``|g_y|`` per cell of a grid over the first batch:
    rows are tokens, columns are out features.
    """

    name: str
    gx_error: Mapping[str, float]
    gw_error: Mapping[str, float]
    fields: Mapping[str, Any]
    pattern: tuple[tuple[float, ...], ...] = dataclasses.field(repr=False)

    def __post_init__(self) -> None:
        for name in ("gx_error", "gw_error", "fields"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))

    def __reduce__(self) -> tuple[Any, ...]:
        # A MappingProxyType can be neither pickled nor copied.
        values = (getattr(self, field.name) for field in dataclasses.fields(self))
        return LayerErrors, tuple(dict(v) if isinstance(v, Mapping) else v for v in values)


@dataclasses.dataclass(frozen=True)
class Selection:
    """The result of :func:`.calibrate`: scales of g_y per layer; print it for a table."""

    layers: tuple[LayerErrors, ...]
    config: HotConfig
    batches: int
    """Number of measured batches."""

    def overrides(
        self, config: ConfigLike | None = None, model: nn.Module | None = None
    ) -> dict[str, HotConfig]:
        """Layer name -> configuration, for ``convert(model, config, overrides=...)``.

        Args:
            config: the configuration that gets the scales; None: that of the measurement.
            model: the model to check the names against.

        Raises ValueError that names the layers which ``model`` lacks.
        """
        base = self.config if config is None else as_config(config)
        modules = {} if model is None else dict(model.named_modules())
        missing = [layer.name for layer in self.layers if layer.name not in modules]
        if model is not None and missing:
            have = [n for n, m in modules.items() if isinstance(m, nn.Linear | nn.Conv2d)]
            raise ValueError(
                f"selection: made for another model; {len(missing)} of its {len(self.layers)} "
                f"layers are not in this one: {listed(missing)} (this one has {listed(have)})"
            )
        return {
            glob.escape(layer.name): dataclasses.replace(base, **layer.fields)
            for layer in self.layers
        }

    def __str__(self) -> str:
        heads = [f"g_x {scale}" for scale in GX_SCALES] + [f"g_w {scale}" for scale in GW_SCALES]
        rows = [["layer", *heads, "chosen"]]
        for layer in self.layers:
            errors = (*layer.gx_error.values(), *layer.gw_error.values())
            chosen = ", ".join(f"{name}={value}" for name, value in layer.fields.items())
            rows.append([layer.name, *(f"{math.sqrt(e):.4f}" for e in errors), chosen])
        measured = f"|error| / |gradient| of {len(self.layers)} layers over {self.batches} batches"
        return "\n".join([*aligned(rows, left=1, last_left=True), f"{measured}, {self.config}"])

    def plot(self, path: str | Path) -> None:
        """Draw ``|g_y|`` of every layer into a file, tokens by out features (supplement G)."""
        try:
            from matplotlib.figure import Figure  # needs no display
        except ImportError as error:
            raise ImportError("plot needs matplotlib: pip install matplotlib") from error
        columns = min(4, len(self.layers))
        height = -(-len(self.layers) // columns)
        size = (3.1 * columns, 2.9 * height)
        figure: Any = Figure(figsize=size, layout="constrained")
        axes = figure.subplots(height, columns, squeeze=False)
        for axis, layer in itertools.zip_longest(axes.flat, self.layers):
            if layer is None:
                axis.set_visible(False)
                continue
            image = axis.imshow(layer.pattern, aspect="auto", cmap="viridis", vmin=0)
            figure.colorbar(image, ax=axis).formatter.set_powerlimits((0, 0))
            axis.set_title(layer.name, fontsize=8)
            chosen = ", ".join(f"{k.removesuffix('_scale')}: {v}" for k, v in layer.fields.items())
            axis.set_xlabel(f"out features   ({chosen})", fontsize=7)
            axis.set_ylabel("tokens", fontsize=7)
            axis.set(xticks=[], yticks=[])
        figure.savefig(path, dpi=130)


def calibrate(
    model: nn.Module,
    batches: Iterable[Any],
    loss_fn: Callable[[nn.Module, Any], Tensor],
    config: ConfigLike = "paper",
    *,
    filter_fn: Filter | None = None,
    gw_fine: Literal["token", "channel"] | None = None,
    gain: float = 0.5,
    seed: int = 0,
    slower: bool = False,
) -> Selection:
    """Measure the error of coarse and fine scales of g_y for every layer, and choose.

    Runs forward and backward on every batch; a few are enough. The error of g_x and g_w is relative
    to the product of the unquantised g_y; for g_w that is projected on the basis of ``config``. The
    fine scale is chosen where it reduces the squared error by more than ``gain``. Convolutions with
    torch's products are left out. Parameters, their ``.grad`` and buffers do not change; other
    tensors behind the loss get gradients.

    Args:
        model: plain or converted.
        batches: arguments of ``loss_fn``, one batch each.
        loss_fn: ``loss_fn(model, batch)`` -> loss, a scalar.
        config: bits, blocks, basis and rounding of the measurement.
        filter_fn: selects layers of a plain model, see :func:`hotcore.torch.convert`.
        gw_fine: the finer choice for g_w: ``"token"`` (the paper's) or ``"channel"`` (as cheap as
            ``"tensor"`` in hotcore's products); None: ``"channel"`` if ``config`` has it.
        gain: share of the squared error that the finer scale has to save.
        seed: seed of the measured rounding.
        slower: see :func:`hotcore.torch.convert`.

    Returns:
        A :class:`.Selection`.

    Raises:
        ValueError: no batch, no gradient (``torch.no_grad``, a loss without a graph, frozen
            layers), NaN or Inf in a gradient, a bad argument.

    Source: LQS of the paper and its supplement G; docs/paper.md.
    """
    settings = as_config(config)
    if gw_fine is None:
        gw_fine = "channel" if settings.gw_scale == "channel" else "token"
    if gw_fine not in GW_SCALES[1:]:
        raise ValueError(f"gw_fine: {gw_fine!r} is not one of 'token', 'channel'")
    if not 0 <= gain < 1:
        raise ValueError(f"gain: expected 0 <= gain < 1, got {gain}")
    if not torch.is_grad_enabled():
        raise ValueError("calibrate: gradients are off (torch.no_grad); LQS measures g_y")
    key = as_key(seed, "seed")
    names = _layers(model, settings, filter_fn, slower)
    probes = {n: _Probe(settings, key._replace(stream=i % 8192)) for i, n in enumerate(names)}
    layers = {name: model.get_submodule(name) for name in names}
    count = 0
    seen = gradients_seen(layers, lambda name, *call: probes[name].add(*call))
    with preserve_state(model), eagerly(), seen:
        for batch in batches:
            loss_of(model, batch, loss_fn).backward()  # type: ignore[no-untyped-call]
            for parameter in model.parameters():
                parameter.grad = None
            count += 1
    if count == 0:
        raise ValueError("batches: empty; calibrate needs at least one")
    if unreached := [name for name, probe in probes.items() if probe.pattern is None]:
        raise ValueError(
            f"calibrate: no gradient reached {listed(unreached)}; "
            "leave them out with filter_fn, or let their outputs require grad"
        )
    if broken := [name for name, probe in probes.items() if not probe.finite]:
        raise ValueError(
            f"calibrate: NaN or Inf in the gradients of {listed(broken)}; expected finite ones; "
            "leave out batches or, with filter_fn, layers, or scale the loss"
        )
    chosen = [probe.choose(name, gw_fine, gain) for name, probe in probes.items()]
    return Selection(tuple(chosen), settings, count)


class _Probe:
    """Sums of the squared errors of one layer over batches."""

    def __init__(self, config: HotConfig, key: Key) -> None:
        self._config = config
        self._key = key
        self._sums: dict[tuple[str, str], float] = collections.defaultdict(float)
        self.pattern: tuple[tuple[float, ...], ...] | None = None

    @torch.no_grad()
    def add(
        self, module: nn.Module, call: Call, input_of: Callable[[], Tensor], gy: Tensor
    ) -> None:
        """Add one call of the layer, from :func:`.gradients_seen`."""
        x, weight, gy, config = _as_linear(module, input_of(), gy, self._config)
        if self.pattern is None:
            self.pattern = _pattern(gy)
        key = self._key
        x, weight, gy = x.float(), weight.float(), gy.float().contiguous()
        block = config.hadamard_block
        pad = -gy.shape[1] % block
        transformed = functions.fwht(F.pad(gy, (0, pad)), block=block)
        transformed_weight = functions.fwht(F.pad(weight, (0, 0, 0, pad)), axis=0, block=block)
        self._sums["gx", ""] += power(transformed @ transformed_weight)
        for scale in GX_SCALES:
            rounded = _rounded(transformed, config.gx_bits, scale, config.gx_rounding, key)
            error = (rounded - transformed) @ transformed_weight
            self._sums["gx", scale] += power(error)
        options: dict[str, Any] = {
            name: getattr(config, name)
            for name in ("rank", "basis", "block", "rows", "token_grid", "prefix_tokens")
        }
        if config.equalize_tokens:  # g_w is the product of x / t and t g_y
            exponents = functions.compress_activation(x, config).exponents().int() - 127
            sizes = torch.ldexp(torch.ones_like(x[:, :1]), exponents[:, None])
            x, gy = x / sizes, gy * sizes
        projected = functions.hla(gy, **options, side="gradient", key=key)
        projected_x = functions.hla(x, **options, side="activation", key=key)
        self._sums["gw", ""] += power(projected.T @ projected_x)
        for choice in GW_SCALES:
            rounded = _rounded(projected, 8, choice, config.gw_rounding, key)
            self._sums["gw", choice] += power((rounded - projected).T @ projected_x)
        self._key = key._replace(offset=key.offset + 1)

    @property
    def finite(self) -> bool:
        """Whether no gradient had NaN or Inf."""
        return all(map(math.isfinite, self._sums.values()))

    def choose(self, name: str, gw_fine: str, gain: float) -> LayerErrors:
        gx: dict[str, float] = {scale: self._relative("gx", scale) for scale in GX_SCALES}
        gw: dict[str, float] = {scale: self._relative("gw", scale) for scale in GW_SCALES}
        fields = {
            "gx_scale": "token" if gx["tensor"] - gx["token"] > gain * gx["tensor"] else "tensor",
            "gw_scale": gw_fine if gw["tensor"] - gw[gw_fine] > gain * gw["tensor"] else "tensor",
        }
        return LayerErrors(name, gx, gw, fields, self.pattern or ())

    def _relative(self, path: str, scale: str) -> float:
        norm = self._sums[path, ""]
        return self._sums[path, scale] / norm if norm else 0.0


def _layers(
    model: nn.Module, config: HotConfig, filter_fn: Filter | None, slower: bool
) -> list[str]:
    """Return the names of the converted layers, or of the layers that convert takes."""
    modules = dict(model.named_modules())
    names = [n for n, m in modules.items() if isinstance(m, HotModule)]
    reason: object = "the converted layers quantise no g_y, or are not measured"
    if not names:
        reason = report = decide(model, config, filter_fn, slower=slower).report
        names = [layer.name for layer in report.converted]

    def measurable(module: nn.Module) -> bool:
        other = isinstance(module, nn.MultiheadAttention) or is_8bit(module)
        return not other and products_of(module, config) is not False

    if not (names := [name for name in names if measurable(modules[name])]):
        raise ValueError(f"model: no layer to measure\n{reason}")
    return names


def _as_linear(
    module: nn.Module, x: Tensor, gy: Tensor, config: HotConfig
) -> tuple[Tensor, Tensor, Tensor, HotConfig]:
    """Return x ``[L, I]``, weight ``[O, I]``, gy ``[L, O]`` and the settings of the products."""
    assert isinstance(module.weight, Tensor)
    weight = module.weight.detach()
    if not isinstance(module, nn.Conv2d):
        if not isinstance(module, nn.Linear):
            weight = weight.T  # transformers' Conv1D keeps [I, O]
        return x.reshape(-1, x.shape[-1]), weight, gy.reshape(-1, gy.shape[-1]), config
    if x.dim() == 3:
        x, gy = x[None], gy[None]
    pixels = visited(x, module.stride).reshape(-1, x.shape[1])
    gradients = visited(gy, (1, 1)).reshape(-1, gy.shape[1])
    return pixels, weight.flatten(1), gradients, settings(config, True, (gy.shape[2], gy.shape[3]))


def _rounded(
    values: Tensor, bits: Literal[4, 8], scale: Granularity, rounding: Rounding, key: Key
) -> Tensor:
    codes, scales = functions.quantize(values, bits=bits, scale=scale, rounding=rounding, key=key)
    result: Tensor = functions.dequantize(codes, scales, granularity=scale)
    return result


def _pattern(gy: Tensor) -> tuple[tuple[float, ...], ...]:
    if not gy.numel():
        return ()
    size = tuple(min(PATTERN_SIZE, length) for length in gy.shape)
    cells = F.adaptive_max_pool2d(gy.detach().float().abs()[None, None], size)[0, 0]
    return tuple(map(tuple, cells.tolist()))
