"""Expected time of a layer's forward and backward on CUDA, as a multiple of plain torch's.

The default filter of :func:`hotcore.torch.convert` uses it. A linear layer's device time in bf16 is
fitted by the products, the passes over x, g_y and the weight, and launches. Source: one H100, torch
2.11, calls in CUDA graphs: :data:`REPORT`, made by ``bench_backward.py --part rule``. The worst
errors of the fits are 0.1 to 0.25, and a test compares them. Another GPU's integer products are
scaled by its rate beside bf16's (:mod:`hotcore.gpus`); passes over memory keep their proportion.
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
    "plain": _Fit(0.00816206, 0.105162, 0.504526, 1650.07, 2.0731e07, -1.18832),
    "frozen plain": _Fit(0.00536772, 0.13109, 0.0958459, 354.501, 6.8665e06, -0.702583),
    "accurate": _Fit(0.00500966, 2.142, 2.95018, 1238.65, 1.78246e07, 1.83152),
    "default": _Fit(0.00523465, 1.81644, 2.62582, 1691.36, 1.51687e07, 2.47491),
    "fast": _Fit(0.00430571, 2.11482, 2.88725, 1079.34, 1.80554e07, 2.11587),
    "default int8": _Fit(0.0035186, 3.06943, 3.32828, 1051.32, 2.00764e07, 5.23029),
    "frozen": _Fit(0.00390966, 0.367064, 1.48797, 212.31, 1.27583e07, 1.8563),
    "frozen int8": _Fit(0.00237683, 1.94672, 1.95264, -115.074, 1.74641e07, 4.03689),
}
"""Fits by name in the report; "int8" has the 8-bit forward."""

_TRANSPOSED = 47.0
"""Picoseconds per call and value of a weight ``[I, O]``, which quantisers read with strides.
Twelve converted layers (768 to 2304 features) cost GPT-2 small 1.0 ms of GPU time on an H100
(``cuda-models-h100-shared.json``)."""


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
    transposed: bool = False
    """Whether the weight is ``[I, O]`` (transformers' Conv1D)."""


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
    weight = hot.weight + (_TRANSPOSED if layer.transposed else 0.0)
    hot = hot._replace(products=forward + integers, weight=weight)
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
