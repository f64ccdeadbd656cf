"""Quantisers of the rivals, simulated: float32 in, the codes' float32 values out.

Random numbers come from torch's default generator of the tensor's device. On a GPU the quantisers
are compiled, because each of their steps would read and write the whole tensor.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Concatenate, NamedTuple, ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

LUQ_MAGNITUDES = 7
"""Number of powers of two in FP4 [1, 3, 0]: eight exponent codes, one of them for zero."""
TWO_BIT_GROUP = 256


P, R = ParamSpec("P"), TypeVar("R")


def fused(function: Callable[Concatenate[Tensor, P], R]) -> Callable[Concatenate[Tensor, P], R]:
    """Compile ``function`` for tensors on a GPU, at the first: torch's compiler takes seconds."""

    @functools.cache
    def compiled() -> Callable[Concatenate[Tensor, P], R]:
        return torch.compile(function, dynamic=True)

    @functools.wraps(function)
    def call(x: Tensor, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return (compiled() if x.is_cuda else function)(x, *args, **kwargs)

    return call


def stochastic(v: Tensor) -> Tensor:
    """Round stochastically to the integer below or above, so that the expectation is ``v``."""
    return torch.floor(v + torch.rand_like(v))


def int_codes(x: Tensor, bits: int, *, rounding: str = "nearest") -> tuple[Tensor, Tensor]:
    """Return symmetric codes in [-Q, Q], Q = 2^(bits-1) - 1, and the tensor's scale.

    ``rounding``: "nearest" or "stochastic".
    """
    largest = 2 ** (bits - 1) - 1
    scale = x.abs().amax() / largest
    v = x / scale.clamp_min(torch.finfo(x.dtype).tiny)
    codes = v.round() if rounding == "nearest" else stochastic(v)
    return codes.clamp(-largest, largest), scale


@fused
def int_values(x: Tensor, bits: int, *, rounding: str = "nearest") -> Tensor:
    """Return the values that :func:`int_codes` represents."""
    codes, scale = int_codes(x, bits, rounding=rounding)
    return codes * scale


def sawb_clip(x: Tensor, dims: tuple[int, ...] | None = None) -> Tensor:
    """Return the clipping value for 4 bits, a linear function of two moments of ``x``.

    12.1 sqrt(E x^2) - 12.2 E|x| is 2.37 standard deviations of a normal distribution. If |x| is
    nearly constant it is negative, which the caller has to handle.

    Source: Choi et al., "Bridging the accuracy gap for 2-bit quantized neural networks" (SAWB).
    The coefficients come from the code of LUQ and of HOT.
    """
    if dims is None:
        return 12.1 * x.square().mean().sqrt() - 12.2 * x.abs().mean()
    second = x.square().mean(dims, keepdim=True)
    return 12.1 * second.sqrt() - 12.2 * x.abs().mean(dims, keepdim=True)


@fused
def sawb_values(x: Tensor, bits: int = 4) -> Tensor:
    """Clip ``x`` at :func:`sawb_clip` and round it to the nearest of 2^bits - 1 levels.

    The largest value replaces a clipping value that is not positive or is larger.
    """
    largest = 2 ** (bits - 1) - 1
    top = x.abs().amax()
    clip = sawb_clip(x)
    clip = torch.where((clip <= 0) | (clip > top), top, clip)
    scale = (clip / largest).clamp_min(torch.finfo(x.dtype).tiny)
    return (x / scale).round().clamp(-largest, largest) * scale


@fused
def luq_values(x: Tensor, magnitudes: int = LUQ_MAGNITUDES) -> Tensor:
    """Quantise logarithmically without bias: zero, or a sign and a power of two times alpha.

    alpha makes the largest |x| the largest magnitude. A value below alpha becomes alpha with
    probability |x| / alpha, else 0. A value above goes to one of its two neighbouring powers at
    random. The expectation is x everywhere.

    Source: Chmiel et al., "Accurate neural training with 4-bit matrix multiplications at standard
    formats" (ICLR 2023), section 4. Their code spans 2^7 above alpha, with zero and signs 17 codes.
    This function stays within 4 bits.
    """
    alpha = x.abs().amax() / 2 ** (magnitudes - 1)
    v = x.abs() / alpha.clamp_min(torch.finfo(x.dtype).tiny)
    _, exponent = torch.frexp(v)  # v = m 2^exponent, 1/2 <= m < 1: exact, as log2 is not
    low = torch.where(v < 1, torch.zeros_like(v), torch.ldexp(torch.ones_like(v), exponent - 1))
    gap = torch.where(v < 1, torch.ones_like(v), low)
    up = torch.rand_like(v) * gap < v - low
    return torch.sign(x) * (low + gap * up) * alpha


class TwoBits(NamedTuple):
    """Groups of 256 values in two bits each: packed codes, and each group's minimum and step."""

    codes: Tensor  # uint8 [groups, 64]
    low: Tensor  # bfloat16 [groups, 1]
    step: Tensor  # bfloat16 [groups, 1]


def pack_two_bits(x: Tensor) -> TwoBits:
    """Round stochastically to levels 0 to 3 between each group's minimum and maximum.

    The expectation is exact, because the bfloat16 bounds are rounded outwards before their use. The
    last value pads the last group.

    Source: Chen et al., "ActNN: reducing training memory footprint via 2-bit activation compressed
    training" (ICML 2021), with fixed 2 bits. ActNN's mixed precision by group is left out.
    """
    flat = x.detach().reshape(1, -1)
    flat = F.pad(flat, (0, -flat.shape[1] % TWO_BIT_GROUP), mode="replicate")
    groups = flat.reshape(-1, TWO_BIT_GROUP)
    least, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
    low = least.bfloat16()
    low = torch.where(low.float() > least, _next(low, -math.inf), low)
    step = ((high - low.float()) / 3).bfloat16()
    step = torch.where(low.float() + 3 * step.float() < high, _next(step, math.inf), step)
    v = (groups - low.float()) / step.float().clamp_min(torch.finfo(torch.float32).tiny)
    codes = stochastic(v).clamp(0, 3).to(torch.uint8).reshape(len(groups), -1, 4)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=x.device)
    return TwoBits((codes << shifts).sum(2, dtype=torch.uint8), low, step)


def _next(x: Tensor, towards: float) -> Tensor:
    return torch.nextafter(x, torch.full_like(x, towards))


def unpack_two_bits(kept: TwoBits, shape: torch.Size) -> Tensor:
    """Return the float32 values of :func:`pack_two_bits` in ``shape``."""
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=kept.codes.device)
    codes = (kept.codes.unsqueeze(2) >> shifts) & 3
    values = codes.flatten(1).float() * kept.step.float() + kept.low.float()
    return values.flatten()[: shape.numel()].reshape(shape)
