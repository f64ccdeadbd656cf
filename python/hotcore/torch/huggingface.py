"""``HotConv1D``, for ``transformers.pytorch_utils.Conv1D`` (GPT-2). Imports transformers."""

from __future__ import annotations

import importlib
from typing import Any

from torch import Tensor

from ..config import ConfigLike, as_config
from .functional import linear_from_json
from .modules import HotModule

# transformers is no requirement of hotcore, and need not be there for the type checker.
_Conv1D: Any = importlib.import_module("transformers.pytorch_utils").Conv1D


class HotConv1D(HotModule, _Conv1D):  # type: ignore[misc]
    """``Conv1D``, a linear layer whose weight is ``[in, out]``, trained through HOT.

    The weight is used as it lies, transposed by its strides; its gradient is turned when autograd
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
        if not self.training:
            output: Tensor = super().forward(x)
            return output
        # Two dimensions, as Conv1D's own addmm, so that the bits are the same.
        rows = x.reshape(-1, x.shape[-1])
        try:
            y = linear_from_json(rows, self.weight.t(), self.bias, self._config_json, self.defer)
        except (ValueError, RuntimeError) as error:
            self.prefix_layer_name(error)
            raise
        return y.view(*x.shape[:-1], self.nf)

    def __repr__(self) -> str:
        """Conv1D's, and the recipe."""
        shown = self.config if self.config.name == "custom" else self.config.name
        return f"HotConv1D(nf={self.nf}, nx={self.nx}, config={shown})"
