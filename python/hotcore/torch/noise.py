"""``NoiseMonitor``: how large the noise of HOT's arithmetic is beside the gradient, while training.

Of a layer's gradient g (g_w or g_x; exact, in fp32, from the same x, weight and g_y) and what HOT
computes instead, g', the noise to gradient ratio is ``|g' - g|^2 / |g|^2``: the power of what is
wrong beside that of the gradient. Most of it is rounded stochastically, hence noise of mean 0 whose
power adds up with that of other noise, a mini-batch's for one.

Source: docs/torch/integrations.md, "Noise to gradient ratio".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from .modules import HotModule
from .probe import autocast_dtype, eagerly
from .report import listed
from .selection import is_8bit

_KINDS = ("gw", "gx")


class NoiseMonitor:
    """Measures the noise to gradient ratio of chosen layers on every ``every``-th step.

    ::

        noise = hot.NoiseMonitor(model, every=100, layers="blocks.0.*")
        for batch in batches:
            with noise:                       # forward and backward of all micro-batches of a step
                loss_fn(model, batch).backward()
            optimizer.step()
            log(noise.scalars)                # empty but on measured steps

    A measured step gives every call of a chosen layer a second time, with its own x and g_y, to HOT
    (another random key) and to plain torch in fp32. The gradients of the step itself, parameters
    and torch's random state are not touched: an eager run goes on bit for bit as without a monitor.
    In a compiled model the measured step runs eagerly, since hooks see no call inside a graph.
    Several calls of a layer (micro-batches, weights that are used twice) add up: the sum of
    ``|g' - g|^2`` over the sum of ``|g|^2``.

    Args:
        model: a converted model.
        every: steps from one measurement to the next; the first step is measured.
        layers: name patterns (``fnmatch``) of the converted layers to measure.
        seed: of the roundings that are measured.

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
        """Of the last step: ``hot/noise_gw/LAYER`` and ``hot/noise_gx/LAYER``, and under
        ``hot/noise_gw/all`` the ratio of all chosen layers' gradients taken as one. A layer without
        a g_x (or a g_w: frozen) has none. Empty where the last step was not measured."""

    @property
    def layers(self) -> list[str]:
        """Names of the chosen layers."""
        return list(self._layers)

    def __enter__(self) -> NoiseMonitor:
        """Begin a step."""
        self.begin()
        return self

    def __exit__(self, *error: Any) -> None:
        """End it."""
        self.end()

    def begin(self) -> None:
        """A step begins; it is measured if it is its turn. A step that was not ended is dropped."""
        self.close()
        if self._count % self._every == 0:
            self._sums.clear()
            self._open = ExitStack()
            self._open.enter_context(eagerly())
            for name, module in self._layers.items():
                handle = module.register_forward_hook(self._follow(name))
                self._open.callback(handle.remove)
        self._count += 1

    def end(self) -> dict[str, float]:
        """The step's backward pass is over; return :attr:`scalars`."""
        measured = self._open is not None
        self.close()
        self.scalars = self._ratios() if measured else {}
        return self.scalars

    def close(self) -> None:
        """Take the hooks away; what a step has measured so far is lost."""
        if self._open is not None:
            self._open.close()
            self._open = None

    def _follow(self, name: str) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
        def hook(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            if not (module.training and isinstance(output, Tensor) and output.requires_grad):
                return
            x = inputs[0]
            needs, dtype = x.requires_grad, autocast_dtype(x.device.type)
            x = x.detach()

            def on_gradient(gy: Tensor) -> None:
                if self._open is not None:  # a graph may outlive its step
                    self._measure(name, module, x, needs, dtype, gy.detach())

            output.register_hook(on_gradient)  # type: ignore[no-untyped-call]

        return hook

    def _measure(
        self,
        name: str,
        module: nn.Module,
        x: Tensor,
        needs_gx: bool,
        dtype: torch.dtype | None,
        gy: Tensor,
    ) -> None:
        assert isinstance(module, HotModule)
        device = x.device.type
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.manual_seed(self._seed + self._measured)
            self._measured += 1
            enabled = dtype is not None
            with torch.autocast(device, dtype, enabled=enabled):
                noisy = _gradients(module, x, gy, needs_gx)
            with torch.autocast(device, enabled=False):
                exact = _gradients(module.to_plain(), x.float(), gy.float(), needs_gx, torch.float)
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
    attention = isinstance(module, nn.MultiheadAttention)
    return isinstance(module, HotModule) and not attention and not is_8bit(module)


def _gradients(
    module: nn.Module, x: Tensor, gy: Tensor, needs_gx: bool, dtype: torch.dtype | None = None
) -> tuple[Tensor | None, Tensor | None]:
    """g_w and g_x of one call; None where it is not wanted."""
    own = {
        name: None if p is None else p.detach().to(p.dtype if dtype is None else dtype)
        for name, p in module._parameters.items()
    }
    weight = own["weight"]
    assert weight is not None and module._parameters["weight"] is not None
    weight.requires_grad_(module._parameters["weight"].requires_grad)
    x = x.detach().requires_grad_(needs_gx)
    wanted = [tensor for tensor in (weight, x) if tensor.requires_grad]
    if not wanted:
        return None, None
    bare = object.__new__(type(module))
    bare.__dict__.update(module.__dict__, _parameters=own)
    y = bare.forward(x)  # not bare(x): the hooks are the model's, this monitor's among them
    found = dict(zip(map(id, wanted), torch.autograd.grad(y, wanted, gy.to(y.dtype)), strict=True))
    return found.get(id(weight)), found.get(id(x))


def _power(values: Tensor) -> float:
    return float(values.double().square().sum())


def _ratio(noise: float, power: float) -> float:
    return noise / power if power else 0.0
