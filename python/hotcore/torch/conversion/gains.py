"""Expected time of a layer's forward and backward on CUDA, as a multiple of plain torch's.

The default filter of :func:`hotcore.torch.convert` uses it on CUDA. The time of a linear layer is
fitted by the products, the passes over x and g_y, launches, and the passes over the weight. The fit
holds for device time in bf16. With few tokens the host may limit the speed;
:func:`hotcore.torch.advise` measures whole steps on your machine.

Source: one H100, torch 2.11, calls in CUDA graphs: :data:`REPORT`, made by
``bench_backward.py --part rule``. The worst errors of the fits are 0.1 to 0.25, and a test compares
them. Another GPU's integer products are scaled by its rate beside bf16's (:mod:`hotcore.gpus`).
Passes over memory keep the H100's proportion to bf16 products: only the products are derived.
"""

from __future__ import annotations

from typing import NamedTuple

from ... import gpus
from ...config import HotConfig

SLOWER = 1.05
"""On CUDA the default filter leaves a linear layer plain if it is expected to take more than this.
The fit is no better than 5 % near 1, and a converted layer keeps less memory."""

TOKENS = 16384
"""Tokens of a call where ``convert`` got no inputs."""

MIN_CUDA_FEATURES = 256
"""Layers with fewer in or out features stay plain on CUDA. Their kernels take 0.8 to 1.0 of plain
torch's time, but the host limits the speed. In eager mode it needs 1.2 to 1.3 times plain torch's
time to queue them (gpu-check's host rows)."""

REPORT = "benchmarks/results/cuda-rule.json"
NO_INT8 = "device has no fast INT8"
"""Why the default filter leaves every layer plain on some GPUs."""


def source(rate: gpus.Int8Rate) -> str:
    """Origin of the rule for a GPU, in words."""
    fitted = "one H100, bf16"
    if rate.source != "measured":
        fitted += f", and {rate}"
    return f"{fitted} (hotcore.torch.advise tries yours)"


class _Fit(NamedTuple):
    """Picoseconds per token: per in x out feature, per in feature, per out feature, and per token.

    Then picoseconds per call: constant, and per in x out feature.
    """

    products: float
    ins: float
    outs: float
    token: float
    call: float
    weight: float

    def per_token(self, tokens: float, ins: int, outs: int) -> float:
        each = self.products * ins * outs + self.ins * ins + self.outs * outs + self.token
        return each + (self.call + self.weight * ins * outs) / tokens


_FITS = {
    "plain": _Fit(0.0083359, 0.0278189, 0.480176, 1667.87, 2.07909e07, -1.3262),
    "frozen plain": _Fit(0.00536626, 0.145792, 0.149247, 347.745, 6.78028e06, -0.667185),
    "accurate": _Fit(0.00515521, 2.09961, 2.90693, 1254.77, 1.79464e07, 1.56821),
    "default": _Fit(0.00534499, 1.77291, 2.59156, 1736.89, 1.52575e07, 2.30782),
    "fast": _Fit(0.00444532, 2.03031, 2.85207, 1136.32, 1.78362e07, 2.03138),
    "default int8": _Fit(0.00361624, 3.00631, 3.25797, 1109.75, 1.99969e07, 5.11868),
    "frozen": _Fit(0.00397319, 0.320348, 1.4703, 253.455, 1.28076e07, 1.79619),
    "frozen int8": _Fit(0.00238367, 1.94119, 1.94646, -84.0927, 1.74885e07, 4.01803),
}
"""Fits by name in the report; "int8" has the 8-bit forward."""


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
    tokens: float = TOKENS
    """Tokens of a call."""


def expected_time(layer: Facts) -> float | None:
    """Time of forward and backward, HOT over plain torch; None without a fit."""
    ratio = layer.rate.ratio
    if layer.device != "cuda" or layer.products is not None or ratio is None:
        return None
    config, sizes = layer.config, (layer.in_features, layer.out_features)
    name = "fast" if config.basis != "full" else "default"
    if name == "default" and config.storage == "int8":
        name = "accurate"
    if layer.frozen:
        plain, hot = _FITS["frozen plain"], _FITS["frozen"]
        int8 = _FITS["frozen int8"]
    else:
        plain, hot = _FITS["plain"], _FITS[name]
        int8 = _FITS["default int8"]
        if name != "default":  # the 8-bit forward adds as much as to default
            int8 = _Fit(*(h + i - d for h, i, d in zip(hot, int8, _FITS["default"], strict=True)))
    # A plain forward product is bf16's: one of two products, or of three with g_w.
    forward = plain.products / (2 if layer.frozen else 3)
    if config.forward == "int8":
        hot, forward = int8, 0.0
    integers = (hot.products - forward) * (gpus.H200.ratio or 1) / ratio
    hot = hot._replace(products=forward + integers)
    return hot.per_token(layer.tokens, *sizes) / plain.per_token(layer.tokens, *sizes)


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
        tokens = f"{layer.tokens:,.0f} tokens: expected"
        return f"slower on CUDA with {tokens} to take {time:.2f} of plain torch's time"
    return ""
