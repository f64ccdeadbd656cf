"""LBP-WHT: both backward products in a low-rank Walsh-Hadamard basis of the tokens.

Tiles of the feature map are padded by reflection. Class tokens bypass the projection.

Source: Yang et al., "Efficient low-rank backpropagation for vision transformer adaptation"
(NeurIPS 2023); github.com/SLDGroup/LBP-WHT at 967c816.
"""

from __future__ import annotations

import math

import hotcore
import torch
import torch.nn.functional as F
from torch import Tensor

from .methods import Kept, Method, hadamard

BLOCK = 16  # tokens of a 4 x 4 tile
SIDE = 4


def _rows(rank: int, like: Tensor) -> Tensor:
    """Return the ``rank`` lowest rows by LP_L1 order, ``[rank, 16]``."""
    order = hotcore.basis_order("lowpass", BLOCK)
    return hadamard(BLOCK, like.device, tuple(order[:rank]))


class LbpWht(Method):
    """Products of projections P = H_r^T H_r / 16: ``g_x = P^T (P g_y w)``, ``g_w = (P g_y)^T P x``.

    Nothing is quantised. A layer keeps r of 16 coefficients per tile and channel, in float32.

    Args:
        rank: number of bases for a tile of 16 tokens; LBP-WHT's sets have 1, 3, 6, 10.
        tiles: whether tiles are 4 x 4 parts of a sample's grid. Otherwise they are 16 consecutive
            tokens, for text.
        token_grid: height and width of a sample, by default a square.
        prefix_tokens: class tokens in front of each grid, whose products are exact.
    """

    elementwise = False

    def __init__(
        self,
        rank: int = 8,
        tiles: bool = True,
        token_grid: tuple[int, int] | None = None,
        prefix_tokens: int = 0,
    ) -> None:
        if not 1 <= rank <= BLOCK:
            raise ValueError(f"rank: {rank}; expected 1 to {BLOCK}")
        if not tiles and (token_grid is not None or prefix_tokens):
            raise ValueError("tiles: False has no token_grid and no prefix_tokens")
        self.rank, self.tiles = rank, tiles
        self.token_grid, self.prefix_tokens = token_grid, prefix_tokens

    def on_grid(self, grid: tuple[int, int]) -> LbpWht:
        """Return the method for a convolution with this output."""
        return LbpWht(self.rank, True, grid) if self.tiles else self

    def _grid(self, tokens: int) -> tuple[int, int]:
        inner = tokens - self.prefix_tokens
        grid = self.token_grid or (math.isqrt(max(inner, 0)),) * 2
        if inner < 1 or grid[0] * grid[1] != inner:
            raise ValueError(
                f"token_grid: {tokens} tokens are not {self.prefix_tokens} + {grid[0]} x {grid[1]}"
            )
        return grid

    def _blocks(self, x: Tensor) -> Tensor:
        """Rearrange ``[B, T, C]`` without its prefix to ``[blocks, 16, C]``."""
        if not self.tiles:
            flat = x.flatten(0, 1)
            return F.pad(flat, (0, 0, 0, -len(flat) % BLOCK)).reshape(-1, BLOCK, x.shape[2])
        height, width = self._grid(x.shape[1])
        image = x[:, self.prefix_tokens :].mT.reshape(len(x), -1, height, width)
        image = _pad(image, _margins(height, width))
        tall, wide = image.shape[2] // SIDE, image.shape[3] // SIDE
        tiles = image.reshape(len(x), -1, tall, SIDE, wide, SIDE).permute(0, 2, 4, 3, 5, 1)
        return tiles.reshape(-1, BLOCK, x.shape[2])

    def _unblocks(self, blocks: Tensor, shape: torch.Size) -> Tensor:
        """Rearrange blocks to ``[B, T - prefix, C]``, without the padding."""
        samples, tokens, _ = shape
        if not self.tiles:
            return blocks.flatten(0, 1)[: samples * tokens].reshape(samples, tokens, -1)
        height, width = self._grid(tokens)
        left, right, above, below = _margins(height, width)
        tall, wide = (height + above + below) // SIDE, (width + left + right) // SIDE
        tiles = blocks.reshape(samples, tall, wide, SIDE, SIDE, -1).permute(0, 5, 1, 3, 2, 4)
        image = tiles.reshape(samples, -1, tall * SIDE, wide * SIDE)
        return image[:, :, above : above + height, left : left + width].flatten(2).mT

    def _project(self, x: Tensor) -> Tensor:
        """Return coefficients ``[1, K, C]``: rank rows of each block, then the prefix tokens."""
        rows = (_rows(self.rank, x) @ self._blocks(x)).flatten(0, 1) / SIDE  # orthonormal rows
        prefix = x[:, : self.prefix_tokens].flatten(0, 1)
        return torch.cat([rows, prefix]).unsqueeze(0)

    def keep(self, x: Tensor) -> Kept:
        return (self._project(x),)

    def gw_gradient(self, gy: Tensor) -> Tensor:
        return self._project(gy)

    def g_x(self, gy: Tensor, w: Tensor) -> Tensor:
        rows = _rows(self.rank, gy) / SIDE
        low = rows @ self._blocks(gy) @ w
        shape = torch.Size((*gy.shape[:2], w.shape[1]))
        patches = self._unblocks(rows.t() @ low, shape)
        return torch.cat([gy[:, : self.prefix_tokens] @ w, patches], dim=1)


def _margins(height: int, width: int) -> tuple[int, int, int, int]:
    """Return margins left, right, above, below to whole tiles, the larger half in front."""
    out = []
    for size in (width, height):
        more = -size % SIDE
        out += [math.ceil(more / 2), more // 2]
    left, right, above, below = out
    return left, right, above, below


def _pad(image: Tensor, margins: tuple[int, int, int, int]) -> Tensor:
    """Pad by reflection, or by zeros if the grid is too small, which LBP-WHT's code refuses."""
    fits = max(margins[:2]) < image.shape[3] and max(margins[2:]) < image.shape[2]
    return F.pad(image, margins, mode="reflect" if fits else "constant")
