"""Expected time of a layer's forward and backward on CUDA, as a multiple of plain torch's.

The default filter of :func:`hotcore.torch.convert` uses it on CUDA. A linear layer's time per token
is fitted by ``a I O + b I + c O + d``: the products, the passes over x and over g_y, and launches.
The fit holds for many tokens in bf16. With few tokens the host limits the speed;
:func:`hotcore.torch.advise` measures whole steps on your machine.

Source: one H200, bf16 autocast, torch 2.11, 16384 tokens, device time: :data:`REPORT`, made by
``bench_rule.py`` at the tag ``one-code``. Each time is within 8 %, and a test compares the fit. The
8-bit forward is fitted to gpu-check's eight layers on an H100, within 4 % of plain torch's time.
Another GPU's integer products are scaled by its rate beside bf16's (:mod:`hotcore.gpus`). Passes
over memory keep the H200's proportion to bf16 products: only ``a I O`` is derived.
"""

from __future__ import annotations

from typing import NamedTuple

from ... import gpus
from ...config import HotConfig

SLOWER = 1.05
"""On CUDA the default filter leaves a linear layer plain if it is expected to take more than this:
up to 512 features with ``default``. Layers of 768 features gain memory and little time (768 x 768:
0.97 of plain torch's time measured, 1.04 by the fit)."""

MIN_CUDA_FEATURES = 256
"""Layers with fewer in or out features stay plain on CUDA. Their kernels take 0.8 to 1.0 of plain
torch's time, but the host limits the speed. In eager mode it needs 1.2 to 1.3 times plain torch's
time to queue them (gpu-check's host rows)."""

REPORT = "benchmarks/results/cuda-rule.json"
NO_INT8 = "device has no fast INT8"
"""Why the default filter leaves every layer plain on some GPUs."""


def source(rate: gpus.Int8Rate) -> str:
    """Origin of the rule for a GPU, in words."""
    fitted = "one H200, bf16, 16384 tokens"
    if rate.source != "measured":
        fitted += f", and {rate}"
    return f"{fitted} (hotcore.torch.advise tries yours)"


class _Fit(NamedTuple):
    """Picoseconds per token: per in x out feature, per in feature, per out feature, constant."""

    products: float
    ins: float
    outs: float
    rest: float

    def per_token(self, ins: int, outs: int) -> float:
        return self.products * ins * outs + self.ins * ins + self.outs * outs + self.rest


_TRAINED = {
    "plain": _Fit(0.00757, 0.2347, 0.6734, 3555),
    "accurate": _Fit(0.005258, 1.524, 1.916, 3575),
    "default": _Fit(0.005207, 1.422, 2.035, 3312),
    "fast": _Fit(0.004652, 1.178, 1.868, 3363),
}
_FROZEN = {
    "plain": _Fit(0.005107, 0.202, 0.644, 2831),
    "accurate": _Fit(0.003955, 0.2153, 1.356, 3118),
    "default": _Fit(0.003938, 0.2345, 1.391, 3111),
    "fast": _Fit(0.003968, 0.2076, 1.339, 3139),
}
_INT8_FORWARD = _Fit(-0.000835, 0.1498, 0, 333.5)
"""Time that an 8-bit forward adds to a plain one, fitted to trained layers."""


class Facts(NamedTuple):
    """Properties of a layer that determine its time."""

    products: bool | None
    """Whether HOT computes a convolution's products in backward; None for a linear layer."""
    in_features: int
    out_features: int
    config: HotConfig
    device: str
    """Type of the training's device; only ``"cuda"`` has a fit."""
    frozen: bool = False
    """Whether the weight is not trained."""
    rate: gpus.Int8Rate = gpus.H200
    """INT8's rate on the device of the training."""


def expected_time(layer: Facts) -> float | None:
    """Time of forward and backward, HOT over plain torch; None without a fit."""
    ratio = layer.rate.ratio
    if layer.device != "cuda" or layer.products is not None or ratio is None:
        return None
    config, sizes = layer.config, (layer.in_features, layer.out_features)
    name = "fast" if config.basis != "full" else "default"
    if name == "default" and config.storage == "int8":
        name = "accurate"
    fits = _FROZEN if layer.frozen else _TRAINED
    plain, hot = fits["plain"], fits[name]
    # A plain forward product is bf16's: one of two products, or of three with g_w.
    forward = plain.products / (2 if layer.frozen else 3)
    if config.forward == "int8":
        hot = _Fit(*(a + b for a, b in zip(hot, _INT8_FORWARD, strict=True)))
        forward = 0.0
    integers = (hot.products - forward) * (gpus.H200.ratio or 1) / ratio
    hot = hot._replace(products=forward + integers)
    return hot.per_token(*sizes) / plain.per_token(*sizes)


def why_slow(layer: Facts) -> str:
    """Why the default filter leaves the layer plain on this device; empty if it does not."""
    if layer.device != "cuda":
        return ""
    if not layer.rate.fast:
        return NO_INT8
    if layer.products is False:  # for any size
        return "slower on CUDA: x is compressed and restored, and the products stay torch's own"
    if layer.products:  # 1.05 to 1.9 times plain torch's time; 9 to 21 times with 56 x 56 pixels
        return "slower on CUDA: quantising its pixels costs more than the integers save"
    if min(layer.in_features, layer.out_features) < MIN_CUDA_FEATURES:
        few = f"fewer than {MIN_CUDA_FEATURES} features"
        return f"slower on CUDA in eager mode: with {few} the host limits the speed"
    time = expected_time(layer)
    if time is not None and time > SLOWER:
        return f"slower on CUDA: expected to take {time:.2f} of plain torch's time"
    return ""
