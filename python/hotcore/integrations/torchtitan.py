"""torchtitan: overrides for ``--override.imports``. Imports torchtitan.

::

    --override.imports hotcore.integrations.torchtitan.hot_linear,\
hotcore.integrations.torchtitan.hot_selective_ac
"""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import hotcore.torch as hot

from ..config import HotConfig
from ..torch.conversion.selection import MIN_FEATURES
from ..torch.tools.policies import CODES, PRODUCTS, SEEDS

# hotcore does not require torchtitan; the type checker runs without it.
_override: Any = importlib.import_module("torchtitan.config.override")
_Linear: Any = importlib.import_module("torchtitan.models.common.linear").Linear
_Module: Any = importlib.import_module("torchtitan.protocols.module").Module
_SelectiveAC: Any = importlib.import_module(
    "torchtitan.distributed.activation_checkpoint"
).SelectiveAC


class HotTitanLinear(hot.HotLinear, _Module):  # type: ignore[misc]
    """:class:`hotcore.torch.HotLinear` as a Module of torchtitan, with a nested Config."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(_Linear.Config):  # type: ignore[misc]
        """``Linear.Config`` and the layer's configuration."""

        hot: HotConfig = HotConfig()

    def __init__(self, config: Any) -> None:
        sizes = (config.in_features, config.out_features, config.bias)
        super().__init__(*sizes, config=config.hot)


class HotSelectiveAC(_SelectiveAC):  # type: ignore[misc]
    """torchtitan's SelectiveAC that also saves HOT's codes, seeds and products."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(_SelectiveAC.Config):  # type: ignore[misc]
        """SelectiveAC's fields."""

    def get_save_ops(self) -> set[Any]:
        """Return torchtitan's operators and HOT's."""
        operators: set[Any] = super().get_save_ops()
        return operators | CODES | SEEDS | PRODUCTS


@_override.override(
    target=_Linear.Config,
    fqns=[f"*layers.*.{part}.*" for part in ("attention", "feed_forward", "shared_experts")],
    description="HOT: backward products in 8-bit integers, x kept in 4 bits",
    exact=True,
)  # type: ignore[untyped-decorator]
def hot_linear(config: Any, recipe: Any = "default", **fields: Any) -> Any:
    """Convert the linear layers of attention and feed-forward; the head and routers stay plain.

    Args:
        config: the layer's; a layer with fewer than 64 in or out features stays plain.
        recipe: a recipe's name.
        **fields: changed fields of HotConfig, from
            ``hotcore.integrations.torchtitan.hot_linear={"recipe": "fast", "forward": "int8"}``.

    Raises:
        ValueError: no such recipe or field.
    """
    settings = HotConfig.recipe(recipe, **fields)
    if min(config.in_features, config.out_features) < MIN_FEATURES:
        return config
    return _override.derive(config, HotTitanLinear.Config, hot=settings)


@_override.override(
    target=_SelectiveAC.Config, description="SelectiveAC that saves HOT's operators", exact=True
)  # type: ignore[untyped-decorator]
def hot_selective_ac(config: Any) -> Any:
    """Have selective activation checkpointing save HOT's codes, seeds and products."""
    return _override.derive(config, HotSelectiveAC.Config)
