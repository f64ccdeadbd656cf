"""``NoiseMonitor``: the noise of HOT's arithmetic relative to the gradient, while training.

The ratio is ``|g' - g|^2 / |g|^2``. Here g is a layer's gradient, g_w or g_x, in fp32. HOT's from
the same x, weight and g_y is g'. Source: docs/torch/integrations.md, "Noise to gradient ratio".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from ..conversion.probe import Call, eagerly, gradients_seen
from ..conversion.report import listed
from ..frozen.bitsandbytes import is_8bit
from ..frozen.weights import FrozenModule
from ..layers.modules import HotModule


class NoiseMonitor:
    """Measures the noise to gradient ratio of chosen layers on every ``every``-th step.

    ``with monitor:`` holds forward and backward of all micro-batches of a step; then
    :attr:`scalars` has the ratios. A measured step repeats every call of a chosen layer, in HOT
    with another random key, and in plain torch in fp32. The step's gradients, the parameters and
    torch's random state do not change. A compiled model runs the measured step eagerly. Attention,
    layers of bitsandbytes, layers whose weight is computed, and calls whose g_y has NaN or Inf are
    not measured.

    Args:
        model: a converted model.
        every: number of steps between measurements; the first step is measured.
        layers: name patterns (``fnmatch``) of the converted layers to measure.
        seed: seed of the measured rounding.

    Raises:
        ValueError: no converted layer matches ``layers``, or ``every`` is not positive.

    Source: docs/torch/integrations.md, "Noise to gradient ratio".
    """

    def __init__(
        self,
        model: nn.Module,
        every: int = 100,
        layers: str | Sequence[str] = "*",
        *,
        seed: int = 0,
    ) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"every: {every!r}; expected a number of steps, 1 or more")
        patterns = [layers] if isinstance(layers, str) else list(layers)
        able = {name: module for name, module in model.named_modules() if _measurable(module)}
        if not able:
            raise ValueError("model: no layer of it is converted; call hot.convert(model) first")
        if not (names := [name for name in able if any(fnmatchcase(name, p) for p in patterns)]):
            raise ValueError(f"layers: {layers!r} matches none of {listed(list(able))}")
        self.layers = names
        """Names of the chosen layers."""
        self._layers = {name: able[name] for name in names}
        self._every, self._seed = every, seed
        self._count = self._measured = 0
        self._open: ExitStack | None = None
        self._sums: dict[str, list[float]] = {}
        self.scalars: dict[str, float] = {}
        """Ratios of the last step; empty if it was not measured. Keys are ``hot/noise_gw/LAYER``
        and ``hot/noise_gx/LAYER``, and ``all`` in place of LAYER for all chosen layers' gradients.
        A layer without a g_x, or without a g_w because it is frozen, has none."""

    def __exit__(self, *error: Any) -> None:
        self.end()

    def begin(self) -> NoiseMonitor:
        """Begin a step and measure every n-th one. An unfinished step is dropped."""
        self.close()
        if self._count % self._every == 0:
            self._sums.clear()
            self._open = ExitStack()
            self._open.enter_context(eagerly())
            self._open.enter_context(gradients_seen(self._layers, self._measure))
        self._count += 1
        return self

    __enter__ = begin

    def end(self) -> dict[str, float]:
        """End a step after its backward pass; return :attr:`scalars`."""
        measured = self._open is not None
        self.close()
        sums = self._sums.items() if measured else ()
        self.scalars = {key: noise / power if power else 0.0 for key, (noise, power) in sums}
        return self.scalars

    def close(self) -> None:
        """Remove the hooks; measurements of an unfinished step are lost."""
        if self._open is not None:
            self._open.close()
            self._open = None

    def _measure(
        self, name: str, module: nn.Module, call: Call, read_x: Callable[[], Tensor], gy: Tensor
    ) -> None:
        # A graph may outlive its step, and a layer may have changed since.
        if self._open is None or not module.training or not _measurable(module):
            return
        if not bool(gy.isfinite().all()):  # a step that a GradScaler skips
            return
        assert isinstance(module, HotModule)
        x, needs_gx, dtype = read_x(), call.requires_grad, call.autocast
        content, cls = vars(module), type(module)
        if isinstance(module, FrozenModule):  # its g_x is that of the dequantised weight
            parameters = {"weight": module.dequantized(), "bias": module._parameters["bias"]}
            content, cls = {**content, "_parameters": parameters}, module.thawed
        device = x.device.type
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.manual_seed(self._seed + self._measured)
            self._measured += 1
            with torch.autocast(device, dtype, enabled=dtype is not None):
                noisy = _gradients(content, cls, x, gy, needs_gx)
            with torch.autocast(device, enabled=False):
                wide = (x.float(), gy.float(), needs_gx, torch.float)
                exact = _gradients(content, cls.plain, *wide)
        for kind, ours, true in zip(("gw", "gx"), noisy, exact, strict=True):
            if ours is not None and true is not None:
                for key in (name or "(root)", "all"):
                    sums = self._sums.setdefault(f"hot/noise_{kind}/{key}", [0.0, 0.0])
                    sums[0] += power(ours.float() - true)
                    sums[1] += power(true)


def _measurable(module: nn.Module) -> bool:
    if isinstance(module, nn.MultiheadAttention) or is_8bit(module):
        return False
    stored = isinstance(module, FrozenModule) or module._parameters.get("weight") is not None
    return isinstance(module, HotModule) and stored


def _gradients(
    content: Mapping[str, Any],
    cls: type[Any],
    x: Tensor,
    gy: Tensor,
    needs_gx: bool,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """g_w and g_x of one call of ``cls``'s forward; None for one that is not wanted."""
    copies: dict[str, Any] = {
        name: p if p is None else p.detach().to(p.dtype if dtype is None else dtype)
        for name, p in content["_parameters"].items()
    }
    weight = copies["weight"].requires_grad_(content["_parameters"]["weight"].requires_grad)
    x = x.detach().requires_grad_(needs_gx)
    if not (wanted := [tensor for tensor in (weight, x) if tensor.requires_grad]):
        return None, None
    bare = object.__new__(cls)
    bare.__dict__.update(content, _parameters=copies)
    # bare(x) would run the model's hooks, this monitor's, and a forward of the layer's own.
    y = cls.forward(bare, x)
    gradients = iter(torch.autograd.grad(y, wanted, gy.to(y.dtype)))
    gw, gx = (next(gradients) if t.requires_grad else None for t in (weight, x))
    return gw, gx


def power(values: Tensor) -> float:
    """Sum of the squares, in fp64."""
    return float(values.double().square().sum())
