"""``HotConv1D`` for ``transformers.pytorch_utils.Conv1D`` (GPT-2). Imports transformers."""

from __future__ import annotations

import importlib
from typing import Any

from torch import Tensor

from .modules import HotModule

# hotcore does not require transformers; the type checker runs without it.
_Conv1D: Any = importlib.import_module("transformers.pytorch_utils").Conv1D


class HotConv1D(HotModule, _Conv1D):  # type: ignore[misc]  # the base is Any
    """``Conv1D``, a linear layer whose weight is ``[in, out]``, trained through HOT.

    The weight is used in place, transposed by its strides. Autograd transposes the gradient when it
    adds it to ``weight.grad``. The arguments are those of ``Conv1D``, and ``config``.
    """

    plain = _Conv1D

    def forward(self, x: Tensor) -> Tensor:
        """``[..., nx] -> [..., nf]``; see :func:`hotcore.torch.linear`."""
        if self.runs_plain:
            output: Tensor = super().forward(x)
            return output
        # Conv1D's addmm has two dimensions, too, and hence the same bits.
        rows = x.reshape(-1, x.shape[-1])
        y = self._named_product(rows, self.weight.t(), self.bias)
        return y.view(x.size()[:-1] + (self.nf,))  # as Conv1D, which torch.fx can trace

    def __repr__(self) -> str:
        return f"{type(self).__name__}(nf={self.nf}, nx={self.nx}, config={self.config})"
