"""``HotFrozenConv1D``, a frozen ``HotConv1D``. Imports transformers."""

from __future__ import annotations

from torch import Tensor

from ..layers.conv1d import HotConv1D
from .weights import FrozenModule


class HotFrozenConv1D(FrozenModule, HotConv1D):
    """A :class:`HotConv1D` whose frozen weight is kept as codes; :func:`.freeze` makes it."""

    thawed = HotConv1D
    transposed = True
    bias: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """``[..., nx] -> [..., nf]``."""
        return self._named_product(x, self.weight_codes, self.bias)
