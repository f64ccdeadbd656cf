"""Adapter for bitsandbytes: its frozen ``Linear8bitLt`` and ``Linear4bit``, under adapters.

bitsandbytes keeps the whole x of a ``Linear8bitLt`` until backward, although its weight is frozen.
HOT's layers keep only the seed, and compute g_x in integers. Nothing here imports bitsandbytes: a
model can hold its layers only once it is loaded.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import Tensor, nn

from ...config import ConfigLike, HotConfig, as_config
from .. import _compat
from ..layers.modules import HotModule
from ..ops.calls import seed_for_call
from ..ops.core import parsed
from ..ops.linear import gradients
from ..ops.registry import not_differentiable, without_base

_layer_class = functools.partial(_compat.loaded, "bitsandbytes.nn")


def is_4bit(module: nn.Module) -> bool:
    """Whether it is bitsandbytes' Linear4bit."""
    return isinstance(module, _layer_class("Linear4bit"))


def is_8bit(module: nn.Module) -> bool:
    """Whether it is bitsandbytes' Linear8bitLt or Linear4bit: codes, which are never trained."""
    return isinstance(module, _layer_class("Linear8bitLt")) or is_4bit(module)


def why_impossible(module: nn.Module) -> str:
    """Why this layer of bitsandbytes cannot be converted; empty for any other."""
    if is_8bit(module) and module.weight.requires_grad:
        if is_4bit(module):
            return "bitsandbytes' Linear4bit with a weight that requires grad"
        return "bitsandbytes' Linear8bitLt with has_fp16_weights"
    return ""


def hot_class(module: nn.Module) -> type[HotModule]:
    """The class for such a layer."""
    return _made("HotLinear4bit" if is_4bit(module) else "HotLinear8bitLt")


@functools.cache
def _made(name: str) -> type[HotModule]:
    """``HotLinear8bitLt`` or ``HotLinear4bit``; bitsandbytes must be loaded."""
    (plain,) = _layer_class(name.removeprefix("Hot"))
    content = {"plain": plain, "__module__": __name__, "__doc__": _HotFrozen.__doc__}
    # A decorator would import the compiler with this module.
    content["forward"] = torch.compiler.disable(_HotFrozen.forward)  # type: ignore[no-untyped-call]
    return type(name, (_HotFrozen, plain), content)


def __getattr__(name: str) -> Any:
    # For pickle, which finds a class by its module and name.
    if name in _NAMES and _layer_class(name.removeprefix("Hot")):
        return _made(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_NAMES = ("HotLinear8bitLt", "HotLinear4bit")


class _HotFrozen(HotModule):
    """A layer of bitsandbytes with a frozen weight, whose g_x is computed through HOT.

    The forward pass is that of bitsandbytes. Backward dequantises the weight as bitsandbytes does
    and computes the product ``g_y w`` in integers. Inside torch.compile the layer runs eagerly (a
    graph break). :func:`hotcore.torch.convert` makes these layers.

    Args:
        in_features: I.
        out_features: O.
        config: a HotConfig or a recipe's name.
        **options: of bitsandbytes' layer.
    """

    bias: Any
    state: Any
    weight: Any
    training: bool

    def __init__(
        self, in_features: int, out_features: int, *, config: ConfigLike = "default", **options: Any
    ) -> None:
        """Make a layer with new parameters; ``.to(device)`` quantises them."""
        if not is_4bit(self):  # type: ignore[arg-type]  # a module
            options = {"has_fp16_weights": False, **options}
        super().__init__(in_features, out_features, **options)
        self.config = as_config(config)

    @staticmethod
    def plain_in_eval(module: Any, config: HotConfig) -> bool:
        """Return True: its forward is always bitsandbytes'."""
        return True

    def forward(self, x: Tensor) -> Tensor:
        """``[..., I] -> [..., O]``."""
        return self._named_product(x, self.weight, self.bias)

    def _product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        seed = seed_for_call("linear", x, x) if self.training else None
        if seed is None:  # a bias alone is the plain layer's
            return self.plain_forward(x)
        output: Tensor = _FrozenProduct.apply(x, bias, self, seed)  # type: ignore[no-untyped-call]  # so in torch
        return output

    def plain_forward(self, x: Tensor) -> Tensor:
        """The forward pass of bitsandbytes."""
        output: Tensor = super().forward(x)  # type: ignore[misc]  # of the plain class
        return output

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The weight ``[O, I]``, dequantised as in the backward of bitsandbytes."""
        if is_4bit(self):  # type: ignore[arg-type]  # a module
            dequantize = sys.modules["bitsandbytes.functional"].dequantize_4bit
            values: Tensor = dequantize(self.weight.data, self.weight.quant_state)
            return values.to(dtype)
        codes, scales = self.state.CB, self.state.SCB
        weight: Tensor = codes.to(dtype, copy=True).mul_(scales.unsqueeze(1).mul(1.0 / 127.0))
        return weight


class _FrozenProduct(torch.autograd.Function):
    """A product that saves nothing of x: the weight has no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Any, layer: _HotFrozen, seed: Tensor) -> Tensor:
        ctx.layer, ctx.seed, ctx.config_json = layer, seed, layer._config_json
        ctx.x_shape, ctx.x_dtype = x.shape, x.dtype
        ctx.set_materialize_grads(False)
        y = layer.plain_forward(x)
        ctx.bias_dtype = None if bias is None else bias.dtype  # Linear4bit may have cast it
        return without_base(y)

    @staticmethod
    @not_differentiable
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, ...]:
        need_gx, need_gb = ctx.needs_input_grad[:2]
        dtypes = (ctx.x_dtype if need_gx else None, None, ctx.bias_dtype if need_gb else None)
        weight = ctx.layer.dequantized(gy.dtype) if need_gx else None
        seeds, config = (ctx.seed, ctx.seed), parsed(ctx.config_json)
        gx, _, gb = gradients(gy, weight, None, *seeds, config, ctx.x_shape, dtypes)
        return gx, gb
