"""``NoiseMonitor``: the noise of HOT's arithmetic relative to the gradient, while training.

Let g be a layer's exact gradient (g_w or g_x in fp32, from the same x, weight and g_y) and g' the
one that HOT computes. The noise to gradient ratio is ``|g' - g|^2 / |g|^2``, the power of the error
over that of the gradient. Most of the error comes from stochastic rounding: it has mean 0, and its
power adds to that of other noise, such as a mini-batch's.

Source: docs/torch/integrations.md, "Noise to gradient ratio".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from .bitsandbytes import is_8bit
from .frozen import FrozenModule
from .modules import HotModule
from .probe import Call, eagerly, gradients_seen
from .report import listed

_KINDS = ("gw", "gx")


class NoiseMonitor:
    """Measures the noise to gradient ratio of chosen layers on every ``every``-th step.

    ::

        noise = hot.NoiseMonitor(model, every=100, layers="blocks.0.*")
        for batch in batches:
            with noise:                       # forward and backward of all micro-batches of a step
                loss_fn(model, batch).backward()
            optimizer.step()
            log(noise.scalars)                # empty except on measured steps

    A measured step repeats every call of a chosen layer, with its own x and g_y, in HOT (with
    another random key) and in plain torch in fp32. The gradients of the step, the parameters and
    torch's random state do not change: an eager run continues with the same bits as without a
    monitor. In a compiled model the measured step runs eagerly, because hooks see no call inside a
    graph. Several calls of a layer (micro-batches, weights that are used twice) are summed: the sum
    of ``|g' - g|^2`` over the sum of ``|g|^2``. Attention, layers of bitsandbytes, and layers whose
    weight is computed (pruning, weight norm) are left out.

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
        """Choose the layers."""
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"every: {every!r}; expected a number of steps, 1 or more")
        patterns = [layers] if isinstance(layers, str) else list(layers)
        able: dict[str, nn.Module] = {
            name: module for name, module in model.named_modules() if _measurable(module)
        }
        if not able:
            raise ValueError("model: no layer of it is converted; call hot.convert(model) first")
        self._layers = {
            name: module
            for name, module in able.items()
            if any(fnmatchcase(name, pattern) for pattern in patterns)
        }
        if not self._layers:
            raise ValueError(f"layers: {layers!r} matches none of {listed(list(able))}")
        self._every, self._seed = every, seed
        self._count = 0
        self._measured = 0
        self._open: ExitStack | None = None
        self._sums: dict[tuple[str, str], list[float]] = {}
        self.scalars: dict[str, float] = {}
        """Ratios of the last step: ``hot/noise_gw/LAYER`` and ``hot/noise_gx/LAYER``, and
        ``hot/noise_gw/all`` and ``hot/noise_gx/all`` for the chosen layers' gradients taken as one.
        A layer without a g_x (or g_w, if frozen) has none. Empty if the last step was not
        measured."""

    @property
    def layers(self) -> list[str]:
        """Names of the chosen layers."""
        return list(self._layers)

    def __enter__(self) -> NoiseMonitor:
        """Begin a step."""
        self.begin()
        return self

    def __exit__(self, *error: Any) -> None:
        """End the step."""
        self.end()

    def begin(self) -> None:
        """Begin a step and measure every n-th one. An unfinished step is dropped."""
        self.close()
        if self._count % self._every == 0:
            self._sums.clear()
            self._open = ExitStack()
            self._open.enter_context(eagerly())
            self._open.enter_context(gradients_seen(self._layers, self._measure))
        self._count += 1

    def end(self) -> dict[str, float]:
        """End a step after its backward pass; return :attr:`scalars`."""
        measured = self._open is not None
        self.close()
        self.scalars = self._ratios() if measured else {}
        return self.scalars

    def close(self) -> None:
        """Remove the hooks; measurements of an unfinished step are lost."""
        if self._open is not None:
            self._open.close()
            self._open = None

    def _measure(
        self, name: str, module: nn.Module, call: Call, given: Callable[[], Tensor], gy: Tensor
    ) -> None:
        if self._open is None or not module.training:  # a graph may outlive its step
            return
        if not _measurable(module):  # any more
            return
        assert isinstance(module, HotModule)
        x, needs_gx, dtype = given(), call.requires_grad, call.autocast
        content, cls = vars(module), type(module)
        if isinstance(module, FrozenModule):  # the same g_x
            parameters = {"weight": module.dequantized(), "bias": module._parameters["bias"]}
            content, cls = {**content, "_parameters": parameters}, module.thawed
        device = x.device.type
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.manual_seed(self._seed + self._measured)
            self._measured += 1
            enabled = dtype is not None
            with torch.autocast(device, dtype, enabled=enabled):
                noisy = _gradients(content, cls, x, gy, needs_gx)
            with torch.autocast(device, enabled=False):
                wide = (x.float(), gy.float(), needs_gx, torch.float)
                exact = _gradients(content, cls.plain, *wide)
        for kind, ours, true in zip(_KINDS, noisy, exact, strict=True):
            if ours is not None and true is not None:
                sums = self._sums.setdefault((name, kind), [0.0, 0.0])
                sums[0] += _power(ours.float() - true)
                sums[1] += _power(true)

    def _ratios(self) -> dict[str, float]:
        ratios = {}
        for kind in _KINDS:
            own = {name: sums for (name, of), sums in self._sums.items() if of == kind}
            for name, (noise, power) in own.items():
                ratios[f"hot/noise_{kind}/{name or '(root)'}"] = _ratio(noise, power)
            if own:
                noise, power = (sum(sums[i] for sums in own.values()) for i in range(2))
                ratios[f"hot/noise_{kind}/all"] = _ratio(noise, power)
        return ratios


def _measurable(module: nn.Module) -> bool:
    if isinstance(module, nn.MultiheadAttention) or is_8bit(module):
        return False
    held = isinstance(module, FrozenModule) or module._parameters.get("weight") is not None
    return isinstance(module, HotModule) and held


def _gradients(
    content: Mapping[str, Any],
    cls: type[Any],
    x: Tensor,
    gy: Tensor,
    needs_gx: bool,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """g_w and g_x of one call of ``cls``'s forward; None for one that is not wanted."""
    parameters: Mapping[str, Tensor | None] = content["_parameters"]
    own = {
        name: None if p is None else p.detach().to(p.dtype if dtype is None else dtype)
        for name, p in parameters.items()
    }
    weight, held = own["weight"], parameters["weight"]
    assert weight is not None and held is not None
    weight.requires_grad_(held.requires_grad)
    x = x.detach().requires_grad_(needs_gx)
    wanted = [tensor for tensor in (weight, x) if tensor.requires_grad]
    if not wanted:
        return None, None
    bare = object.__new__(cls)
    bare.__dict__.update(content, _parameters=own)
    # Not bare(x), which would run the model's hooks and this monitor's, nor a forward of its own.
    y = cls.forward(bare, x)
    found = dict(zip(map(id, wanted), torch.autograd.grad(y, wanted, gy.to(y.dtype)), strict=True))
    return found.get(id(weight)), found.get(id(x))


def _power(values: Tensor) -> float:
    return float(values.double().square().sum())


def _ratio(noise: float, power: float) -> float:
    return noise / power if power else 0.0
