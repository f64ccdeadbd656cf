"""The rivals' quantisers, simulated: float32 in, the float32 values of the codes out.

Random numbers come from torch's default generator of the tensor's device.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

LUQ_MAGNITUDES = 7
"""Powers of two of FP4 [1, 3, 0]: eight exponent codes, one of them for zero."""
TWO_BIT_GROUP = 256


def stochastic(v: Tensor) -> Tensor:
    """Round to the integer below or above, by chance, so that the expectation is ``v``."""
    return torch.floor(v + torch.rand_like(v))


def int_codes(x: Tensor, bits: int, *, rounding: str = "nearest") -> tuple[Tensor, Tensor]:
    """Symmetric codes in [-Q, Q], Q = 2^(bits-1) - 1, and the tensor's scale.

    ``rounding``: "nearest" or "stochastic".
    """
    most = 2 ** (bits - 1) - 1
    scale = x.abs().amax() / most
    v = x / scale.clamp_min(torch.finfo(x.dtype).tiny)
    codes = v.round() if rounding == "nearest" else stochastic(v)
    return codes.clamp(-most, most), scale


def int_values(x: Tensor, bits: int, *, rounding: str = "nearest") -> Tensor:
    """What :func:`int_codes` stands for."""
    codes, scale = int_codes(x, bits, rounding=rounding)
    return codes * scale


def sawb_clip(x: Tensor, dims: tuple[int, ...] | None = None) -> Tensor:
    """Clipping value for 4 bits, a linear function of two moments of ``x``.

    12.1 sqrt(E x^2) - 12.2 E|x|: 2.37 standard deviations of a normal distribution. Where |x| is
    nearly constant the value is negative: what follows from that is the caller's affair.

    Source: Choi et al., "Bridging the accuracy gap for 2-bit quantized neural networks" (SAWB); the
    coefficients are those that the code of LUQ and of HOT has.
    """
    if dims is None:
        return 12.1 * x.square().mean().sqrt() - 12.2 * x.abs().mean()
    second = x.square().mean(dims, keepdim=True)
    return 12.1 * second.sqrt() - 12.2 * x.abs().mean(dims, keepdim=True)


def sawb_values(x: Tensor, bits: int = 4) -> Tensor:
    """``x`` clipped at :func:`sawb_clip` and rounded to the nearest of 2^bits - 1 levels.

    Where the formula gives nothing above zero or something above the largest value, that is taken.
    """
    most = 2 ** (bits - 1) - 1
    top = x.abs().amax()
    clip = sawb_clip(x)
    clip = torch.where((clip <= 0) | (clip > top), top, clip)
    scale = (clip / most).clamp_min(torch.finfo(x.dtype).tiny)
    return (x / scale).round().clamp(-most, most) * scale


def luq_values(x: Tensor, magnitudes: int = LUQ_MAGNITUDES) -> Tensor:
    """Logarithmic unbiased quantisation: zero, or a sign and a power of two times alpha.

    alpha is chosen so that the largest |x| is the largest magnitude. Below alpha a value becomes
    alpha with probability |x| / alpha, else 0; above it goes to one of the two powers around it, by
    chance, so that the expectation is x everywhere.

    Source: Chmiel et al., "Accurate neural training with 4-bit matrix multiplications at standard
    formats" (ICLR 2023), section 4. Their code spans 2^7 above alpha, which with zero and the signs
    are 17 codes; here 4 bits are 4 bits.
    """
    alpha = x.abs().amax() / 2 ** (magnitudes - 1)
    v = x.abs() / alpha.clamp_min(torch.finfo(x.dtype).tiny)
    _, exponent = torch.frexp(v)  # v = m 2^exponent, 1/2 <= m < 1: exact, as log2 is not
    low = torch.where(v < 1, torch.zeros_like(v), torch.ldexp(torch.ones_like(v), exponent - 1))
    gap = torch.where(v < 1, torch.ones_like(v), low)
    up = torch.rand_like(v) * gap < v - low
    return torch.sign(x) * (low + gap * up) * alpha


class TwoBits(NamedTuple):
    """Groups of 256 values in two bits each: packed codes, and each group's smallest and step."""

    codes: Tensor  # uint8 [groups, 64]
    low: Tensor  # bfloat16 [groups, 1]
    step: Tensor  # bfloat16 [groups, 1]


def pack_two_bits(x: Tensor) -> TwoBits:
    """Levels 0 to 3 between the least and the largest value of every group, rounded by chance.

    The bfloat16 bounds are rounded outwards first and then used, so that the expectation is exact.
    The last group is filled up with its own last value.

    Source: Chen et al., "ActNN: reducing training memory footprint via 2-bit activation compressed
    training" (ICML 2021), its fixed 2 bits; ActNN's mixed precision (bits by group, from a
    sensitivity) is left out.
    """
    flat = x.detach().reshape(1, -1)
    flat = F.pad(flat, (0, -flat.shape[1] % TWO_BIT_GROUP), mode="replicate")
    groups = flat.reshape(-1, TWO_BIT_GROUP)
    least, most = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
    low = least.bfloat16()
    low = torch.where(low.float() > least, _next(low, -math.inf), low)
    step = ((most - low.float()) / 3).bfloat16()
    step = torch.where(low.float() + 3 * step.float() < most, _next(step, math.inf), step)
    v = (groups - low.float()) / step.float().clamp_min(torch.finfo(torch.float32).tiny)
    codes = stochastic(v).clamp(0, 3).to(torch.uint8).reshape(len(groups), -1, 4)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=x.device)
    return TwoBits((codes << shifts).sum(2, dtype=torch.uint8), low, step)


def _next(x: Tensor, towards: float) -> Tensor:
    return torch.nextafter(x, torch.full_like(x, towards))


def unpack_two_bits(kept: TwoBits, shape: torch.Size) -> Tensor:
    """The float32 values of :func:`pack_two_bits`, in ``shape``."""
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=kept.codes.device)
    codes = (kept.codes.unsqueeze(2) >> shifts) & 3
    values = codes.flatten(1).float() * kept.step.float() + kept.low.float()
    return values.flatten()[: shape.numel()].reshape(shape)
