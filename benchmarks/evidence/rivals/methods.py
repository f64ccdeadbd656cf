"""Backward passes of the rivals, each a :class:`hotcore.torch.CustomBackward`.

The tokens of a convolution are its output pixels, as in the code of HOT's authors. Everything is
simulated in float32: values and bytes are the method's, times are not.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import hotcore
import torch
from hotcore.torch import CustomBackward as Method
from torch import Tensor

from . import quantizers
from .quantizers import TwoBits, int_values, luq_values, sawb_values

Kept = tuple[Tensor, ...]


class BFloat16(Method):
    """All three products in bfloat16 with float32 sums. x is kept in bfloat16."""

    def forward_operands(self, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return x.bfloat16(), w.bfloat16()

    def keep(self, x: Tensor) -> Kept:
        return (x.bfloat16(),)

    def gx_operands(self, gy: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return gy.bfloat16(), w.bfloat16()

    def gw_gradient(self, gy: Tensor) -> Tensor:
        return gy.bfloat16()


class NaiveInt4(Method):
    """INT4 scaled by the tensor's largest value, for g_y, w and x, without a transform.

    g_y is rounded stochastically, w and x to nearest. x is kept in INT4 (here one code per byte).
    """

    def keep(self, x: Tensor) -> Kept:
        codes, scale = quantizers.int_codes(x, 4)
        return codes.to(torch.int8), scale

    def unkeep(self, kept: Kept, shape: torch.Size) -> Tensor:
        return kept[0].float() * kept[1]

    def gw_gradient(self, gy: Tensor) -> Tensor:
        return int_values(gy, 4, rounding="stochastic")

    def gx_operands(self, gy: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return int_values(gy, 4, rounding="stochastic"), int_values(w, 4)


class Luq(Method):
    """LUQ: g_y in unbiased logarithmic FP4, w and x in INT4 by SAWB, rounded to nearest.

    Each product draws its g_y. x is kept in full, so the method saves no memory.

    Args:
        forward: whether the forward product is INT4, as in LUQ's paper. HOT's authors compare with
            an exact forward.
        in_eval: whether eval mode uses the INT4 forward, too.
    """

    def __init__(self, forward: bool = False, in_eval: bool = False) -> None:
        if in_eval and not forward:
            raise ValueError("in_eval: the forward product is exact without forward=True")
        self._forward, self.in_eval = forward, in_eval

    def forward_operands(self, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return (sawb_values(x), sawb_values(w)) if self._forward else (x, w)

    def unkeep(self, kept: Kept, shape: torch.Size) -> Tensor:
        return sawb_values(kept[0])

    def gw_gradient(self, gy: Tensor) -> Tensor:
        return luq_values(gy)

    def gx_operands(self, gy: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return luq_values(gy), sawb_values(w)


class TwoBitActivations(Method):
    """Exact products of an x that is kept in two unbiased bits per value, after ActNN."""

    def keep(self, x: Tensor) -> Kept:
        return tuple(quantizers.pack_two_bits(x))

    def unkeep(self, kept: Kept, shape: torch.Size) -> Tensor:
        return quantizers.unpack_two_bits(TwoBits(*kept), shape)


def power_of_two_factor(n: int, limit: int | None = None) -> int:
    """Return the largest power of two up to ``limit`` that divides ``n``."""
    factor = n & -n
    return factor if limit is None else min(factor, limit)


class WithoutAbc(Method):
    """Recipe of hotcore without activation buffer compression: x is kept in full.

    x is compressed in backward, with values of the same distribution.

    Args:
        recipe: name of the recipe.
    """

    def __init__(self, recipe: str = "paper") -> None:
        name: Any = recipe
        self._config = hotcore.HotConfig.recipe(name)

    @staticmethod
    def _key() -> hotcore.Key:
        return hotcore.Key(int(torch.randint(2**63 - 1, ())))

    def g_x(self, gy: Tensor, w: Tensor) -> Tensor:
        grads = hotcore.backward_linear(
            gy.flatten(0, 1), w, None, config=self._config, need="gx", key=self._key()
        )
        return grads.gx.reshape(*gy.shape[:2], w.shape[1])

    def g_w(self, gy: Tensor, x: Tensor) -> Tensor:
        grads = hotcore.backward_linear(
            gy.flatten(0, 1),
            None,
            x.flatten(0, 1).contiguous(),
            config=self._config,
            need="gw",
            key=self._key(),
        )
        gw: Tensor = grads.gw
        return gw


def _sequency(k: int, bits: int) -> int:
    """Count the sign changes of row ``k`` of the Sylvester matrix of order ``2**bits``: the
    reversed bits, read as a Gray code."""
    code = sum((k >> i & 1) << (bits - 1 - i) for i in range(bits))
    changes = 0
    while code:
        changes ^= code
        code >>= 1
    return changes


@functools.cache
def triangle_rows(n: int) -> tuple[int, ...]:
    """Return the natural indices of the Hadamard rows that the code of HOT's authors keeps.

    The rows by sequency fill a square of side s back and forth; s^2 is the largest power of four up
    to n. The code keeps the triangle i + j < s: 10 of 16 rows, 36 of 64, 36 of 128, 3 of 4, 1 of 1.
    """
    side = 2 ** (int(math.log2(n)) // 2)
    by_sequency = sorted(range(n), key=lambda k: _sequency(k, n.bit_length() - 1))
    selected = []
    for i in range(side):
        columns = range(side - i) if i % 2 == 0 else range(i, side)
        selected += [by_sequency[side * i + j] for j in columns]
    return tuple(selected)


@functools.cache
def hadamard(n: int, device: torch.device, rows: tuple[int, ...] | None = None) -> Tensor:
    """Return Sylvester's unnormalised matrix ``[n, n]`` or rows of it, float32 and read-only."""
    matrix = hotcore.fwht(torch.eye(n), block=n)
    return (matrix if rows is None else matrix[list(rows)]).to(device)


class AuthorsHot(Method):
    """HOT as its authors' code computes it, by fake quantisation.

    It differs from the paper's recipe, hotcore's ``paper``, in these points:

    * The tokens of a block are the largest power of two that divides T. Therefore 197 or 49 tokens
      get no transform and lose no row. The code keeps 10 of 16 rows, not 8.
    * x (8 bits) and w are clipped by SAWB's coefficients for 4 bits, and rounded to nearest.
    * For g_x, g_y has a scale per token. For g_w, x and g_y have a scale per sample. There g_y has
      4 bits, because the code's layer-wise quantiser selection passes the bits of g_x.

    Args:
        gw_bits: bits of g_y in g_w; the paper has 8.

    Source: github.com/sungonuni/HOT at 460db09, utils/quant_matmul.py, utils/hadamard_matmul.py.
    """

    elementwise = False
    _EPSILON = 1e-11

    def __init__(self, gw_bits: int = 4) -> None:
        self._gw_bits = gw_bits

    def _project(self, x: Tensor) -> Tensor:
        n = power_of_two_factor(x.shape[1])
        rows = hadamard(n, x.device, triangle_rows(n))
        blocks = x.reshape(x.shape[0], -1, n, x.shape[2])
        return torch.einsum("rn,bknc->bkrc", rows, blocks).flatten(1, 2)

    def _sawb(self, x: Tensor, bits: int, dims: tuple[int, ...] | None = None) -> Kept:
        clip = quantizers.sawb_clip(x, dims)
        scale = clip / (2 ** (bits - 1) - 1)
        inside = torch.minimum(torch.maximum(x, -clip), clip)  # the upper bound wins, as in clamp
        return (inside / (scale + self._EPSILON)).round(), scale

    def _by_chance(self, x: Tensor, bits: int, dims: tuple[int, ...]) -> Tensor:
        scale = x.abs().amax(dims, keepdim=True) / (2 ** (bits - 1) - 1)
        return quantizers.stochastic(x / (scale + self._EPSILON)) * scale

    def keep(self, x: Tensor) -> Kept:
        codes, scale = self._sawb(self._project(x), 8, (1, 2))
        return codes.to(torch.int8), scale

    def unkeep(self, kept: Kept, shape: torch.Size) -> Tensor:
        return kept[0].float() * kept[1] / power_of_two_factor(shape[1])

    def gw_gradient(self, gy: Tensor) -> Tensor:
        return self._by_chance(self._project(gy), self._gw_bits, (1, 2))

    def g_x(self, gy: Tensor, w: Tensor) -> Tensor:
        n = power_of_two_factor(w.shape[0], 16)
        matrix = hadamard(n, w.device)
        blocks = gy.reshape(*gy.shape[:2], -1, n) @ matrix
        turned = torch.einsum("nm,kmi->kni", matrix, w.reshape(-1, n, w.shape[1])).flatten(0, 1)
        codes, scale = self._sawb(turned, 4)
        return self._by_chance(blocks.flatten(2), 4, (2,)) @ (codes * scale) / n
