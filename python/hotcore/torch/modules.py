"""``HotLinear``: an ``nn.Linear`` whose backward is HOT."""

from __future__ import annotations

from typing import Any, TypeVar

import torch.nn.functional as F
from torch import Tensor, nn

from ..config import HotConfig, as_config
from .functional import linear

_Linear = TypeVar("_Linear", bound=nn.Linear)


class HotLinear(nn.Linear):
    """``nn.Linear`` with the same parameters and state_dict keys, trained through HOT.

    In eval mode it is ``nn.Linear``: plain forward, plain autograd. In training mode the forward is
    bit-equal, and gradients are those of :func:`hotcore.torch.linear`.

    Args:
        in_features: I.
        out_features: O.
        bias: with a bias.
        device: as ``nn.Linear``.
        dtype: as ``nn.Linear``.
        config: a HotConfig or a recipe's name.
    """

    config: HotConfig

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        config: HotConfig | str = "default",
    ) -> None:
        """Make a layer with new parameters, initialised as ``nn.Linear`` does."""
        super().__init__(in_features, out_features, bias=bias, device=device, dtype=dtype)
        self.config = as_config(config)

    @classmethod
    def from_linear(cls, module: nn.Linear, config: HotConfig | str = "default") -> HotLinear:
        """Make a HotLinear that holds ``module``'s own Parameters and hooks; nothing is allocated.

        Raises TypeError unless ``module`` is exactly an ``nn.Linear`` (or a HotLinear): what a
        subclass adds would be lost.
        """
        if type(module) not in (nn.Linear, HotLinear):
            raise TypeError(f"module: expected an nn.Linear, got {type(module).__name__}")
        settings = as_config(config)
        new = _same_content(module, cls)
        new.config = settings
        return new

    def to_linear(self) -> nn.Linear:
        """Make the plain ``nn.Linear`` that holds the same Parameters and hooks."""
        new = _same_content(self, nn.Linear)
        del new.__dict__["config"]
        return new

    def forward(self, input: Tensor) -> Tensor:
        """``[..., I] -> [..., O]``; see :func:`hotcore.torch.linear`."""
        if not self.training:
            return F.linear(input, self.weight, self.bias)
        return linear(input, self.weight, self.bias, self.config)

    def extra_repr(self) -> str:
        """``nn.Linear``'s, and the recipe."""
        name = self.config.name
        return f"{super().extra_repr()}, config={self.config if name == 'custom' else name}"


def _same_content(module: nn.Linear, cls: type[_Linear]) -> _Linear:
    """A ``cls`` with everything ``module`` holds: Parameters, buffers, hooks, training mode."""
    new = cls.__new__(cls)
    new.__dict__.update(module.__dict__)
    # Own tables of content; the hooks' tables stay shared, their handles remove from them.
    for table in ("_parameters", "_buffers", "_modules"):
        new.__dict__[table] = module.__dict__[table].copy()
    return new
