"""``HotConv1D`` for ``transformers.pytorch_utils.Conv1D`` (GPT-2), also with a frozen weight.

Imports transformers.
"""

from __future__ import annotations

import importlib
from typing import Any

from torch import Tensor

from ..config import ConfigLike, as_config
from .frozen import FrozenModule
from .modules import HotModule

# hotcore does not require transformers; the type checker runs without it.
_Conv1D: Any = importlib.import_module("transformers.pytorch_utils").Conv1D


class HotConv1D(HotModule, _Conv1D):  # type: ignore[misc]
    """``Conv1D``, a linear layer whose weight is ``[in, out]``, trained through HOT.

    The weight is used in place, transposed by its strides. Autograd transposes the gradient when it
    adds it to ``weight.grad``.

    Args:
        nf: out features.
        nx: in features.
        config: a HotConfig or a recipe's name.
    """

    plain = _Conv1D

    def __init__(self, nf: int, nx: int, *, config: ConfigLike = "default") -> None:
        """Make a layer with new parameters, initialised as ``Conv1D`` does."""
        super().__init__(nf, nx)
        self.config = as_config(config)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., nx] -> [..., nf]``; see :func:`hotcore.torch.linear`."""
        if self.runs_plain:
            output: Tensor = super().forward(x)
            return output
        # Two dimensions as in Conv1D's own addmm, for the same bits.
        rows = x.reshape(-1, x.shape[-1])
        y = self._named_product(rows, self.weight.t(), self.bias)
        return y.view(*x.shape[:-1], self.nf)

    def __repr__(self) -> str:
        """The text of Conv1D, the recipe and what differs from it."""
        return f"{type(self).__name__}(nf={self.nf}, nx={self.nx}, config={self.config})"


class HotFrozenConv1D(FrozenModule, HotConv1D):
    """:class:`HotConv1D` whose frozen weight is kept as INT8 codes alone.

    :func:`hotcore.torch.freeze_int8` makes it of a HotConv1D, as ``HotFrozenLinear``.
    """

    thawed = HotConv1D
    transposed = True
    bias: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """``[..., nx] -> [..., nf]``."""
        return self._named_product(x, self.weight_codes, self.bias)
