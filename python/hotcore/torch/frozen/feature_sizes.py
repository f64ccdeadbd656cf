"""Sizes of the in features of a weight in INT4, which bring x and w to like size before rounding.

Feature i of w is multiplied, and that of x divided, by a factor. The error of ``x w^T`` is least
where the factor is the square root of x's size over that of w's column.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops import frozen_codes

_LEAST = 1e-3
"""Smallest size of a feature, of their mean: a feature that was always zero may not be so later."""
_CHUNK_VALUES = 1 << 21
"""Number of a weight's values that are widened at a time."""


def of_columns(rows: Tensor) -> Tensor:
    """Root mean square of each column of a matrix ``[O, I]``, fp64 ``[I]``."""
    squares = torch.zeros(rows.shape[1], dtype=torch.float64, device=rows.device)
    for part in torch.split(rows, max(1, _CHUNK_VALUES // max(rows.shape[1], 1))):
        squares += torch.linalg.vector_norm(part, dim=0, dtype=torch.float64).square()
    return (squares / max(rows.shape[0], 1)).sqrt()


def exponents(columns: Tensor, x: Tensor | None = None) -> Tensor:
    """Exponents for the sizes of w's columns and of x's features, int8 ``[I]``."""
    if columns.is_meta:
        return torch.empty(columns.shape, dtype=torch.int8, device="meta")
    ratio = -_logs(columns) if x is None else _logs(x) - _logs(columns)
    steps = 0.5 * frozen_codes.STEPS
    return ((ratio - ratio.mean()) * steps).round().clamp(-127, 127).to(torch.int8)


def _logs(sizes: Tensor) -> Tensor:
    least = float(sizes.mean()) * _LEAST
    return sizes.clamp_min(max(least, 1e-300)).log2()
