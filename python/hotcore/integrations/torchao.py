"""torchao: ``quantize_(model, HotTrainingConfig())`` converts layers to HOT. Imports torchao."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

from torch import nn

import hotcore.torch as hot

from ..config import ConfigLike, as_config
from ..torch.conversion.selection import candidates, hot_class
from ..torch.layers.modules import HotModule

# hotcore does not require torchao; the type checker runs without it.
_AOBaseConfig: Any = importlib.import_module("torchao.core.config").AOBaseConfig
_register: Any = importlib.import_module(
    "torchao.quantization.transform_module"
).register_quantize_module_handler


@dataclasses.dataclass
class HotTrainingConfig(_AOBaseConfig):  # type: ignore[misc]
    """Configuration of HOT for ``torchao.quantization.quantize_``, alone or in a ``FqnToConfig``.

    ``filter_fn`` chooses modules. torchao's default is every ``nn.Linear``, with the head and small
    layers. A chosen layer is converted. In any other chosen module, for example the whole model
    (``lambda module, fqn: fqn == ""``), :func:`hotcore.torch.convert` chooses the layers.

    Args:
        config: a HotConfig or a recipe's name.
    """

    config: ConfigLike = "default"

    def __post_init__(self) -> None:
        self.config = as_config(self.config)


@_register(HotTrainingConfig)  # type: ignore[untyped-decorator]
def _convert(module: nn.Module, config: HotTrainingConfig) -> nn.Module:
    """Convert ``module`` in place, unless it is HOT or has no layer."""
    if isinstance(module, HotModule):
        return module
    layers = dict(candidates(module))
    if "" in layers:  # the module is a layer itself
        layer: Any = hot_class(module).from_plain(module, config.config)
        return layer  # type: ignore[no-any-return]  # a module
    if layers:
        hot.convert(module, config.config)
    return module
