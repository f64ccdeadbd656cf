"""All that knows bitsandbytes: ``Linear8bitLt`` (adapters on an 8-bit model) and why others stay.

bitsandbytes keeps the whole x of such a layer until backward, although its weight is frozen. HOT's
layer keeps only the seed. Nothing here imports bitsandbytes: a model can hold its layers only once
it is loaded.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import Tensor, nn

from ..config import ConfigLike, as_config
from .modules import HotModule
from .ops.calls import seed_for_call
from .ops.core import handle_of
from .ops.linear import gradients
from .ops.registry import not_differentiable, without_base


def _layer_class(name: str) -> Any:
    """A layer class of bitsandbytes; None if it is not loaded."""
    return getattr(sys.modules.get("bitsandbytes.nn"), name, None)


def _is_a(module: nn.Module, name: str) -> bool:
    kind = _layer_class(name)
    return kind is not None and isinstance(module, kind)


def is_8bit(module: nn.Module) -> bool:
    """Whether it is bitsandbytes' Linear8bitLt: its weight is int8 codes, never trained here."""
    return _is_a(module, "Linear8bitLt")


def why_impossible(module: nn.Module) -> str:
    """Why this layer of bitsandbytes cannot be converted; empty for any other."""
    if _is_a(module, "Linear4bit"):
        return (
            "bitsandbytes' Linear4bit, which keeps nothing of x either; its weight would be "
            "dequantised, then quantised again, in every backward"
        )
    if is_8bit(module) and module.weight.requires_grad:
        return "bitsandbytes' Linear8bitLt with has_fp16_weights"
    return ""


@functools.cache
def hot_class() -> type[HotModule]:
    """``HotLinear8bitLt``, made once bitsandbytes is loaded."""
    plain = _layer_class("Linear8bitLt")
    content = {"plain": plain, "__module__": __name__, "__doc__": _Hot8bit.__doc__}
    # Not as a decorator: it imports the compiler.
    content["forward"] = torch.compiler.disable(_Hot8bit.forward)  # type: ignore[no-untyped-call]
    return type("HotLinear8bitLt", (_Hot8bit, plain), content)


def __getattr__(name: str) -> Any:
    # For pickle, which finds a class by its module and name.
    if name == "HotLinear8bitLt" and _layer_class("Linear8bitLt") is not None:
        return hot_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class _Hot8bit(HotModule):
    """``Linear8bitLt`` with a frozen 8-bit weight, whose g_x is computed through HOT.

    The forward pass is that of bitsandbytes. Backward dequantises the weight as bitsandbytes does
    and computes the product ``g_y w`` in integers. Inside torch.compile the layer runs eagerly (a
    graph break). :func:`hotcore.torch.convert` makes these layers.

    Args:
        in_features: I.
        out_features: O.
        config: a HotConfig or a recipe's name.
        **options: as ``Linear8bitLt``; ``has_fp16_weights`` is False.
    """

    bias: Any
    state: Any
    training: bool

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        config: ConfigLike = "default",
        **options: Any,
    ) -> None:
        """Make a layer with new parameters; ``.to(device)`` quantises them."""
        options = {"has_fp16_weights": False, **options}
        super().__init__(in_features, out_features, **options)  # type: ignore[call-arg]  # the plain class's
        self.config = as_config(config)

    @property
    def runs_plain(self) -> bool:
        """In eval mode always; its forward is bitsandbytes'."""
        return not self.training

    def forward(self, x: Tensor) -> Tensor:
        """``[..., I] -> [..., O]``."""
        bias: Tensor | None = self.bias
        needed = x.requires_grad or (bias is not None and bias.requires_grad)
        if not (self.training and torch.is_grad_enabled() and needed):
            output: Tensor = super().forward(x)  # type: ignore[misc]  # the plain class's
            return output
        try:
            seed = seed_for_call("linear", x, x)
            output = _Frozen8bit.apply(x, bias, self, seed)  # type: ignore[no-untyped-call]
        except (ValueError, RuntimeError) as error:
            self.prefix_layer_name(error)
            raise
        return output

    def plain_forward(self, x: Tensor) -> Tensor:
        """The forward pass of bitsandbytes."""
        output: Tensor = super().forward(x)  # type: ignore[misc]  # the plain class's
        return output

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The weight ``[O, I]``, dequantised as in the backward of bitsandbytes."""
        codes, scales = self.state.CB, self.state.SCB
        weight: Tensor = codes.to(dtype, copy=True).mul_(scales.unsqueeze(1).mul(1.0 / 127.0))
        return weight


class _Frozen8bit(torch.autograd.Function):
    """Saves nothing of x: the weight has no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, layer: _Hot8bit, seed: Tensor) -> Tensor:
        ctx.layer, ctx.seed, ctx.config_json = layer, seed, layer._config_json
        ctx.x_shape, ctx.x_dtype = x.shape, x.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.set_materialize_grads(False)
        return without_base(layer.plain_forward(x))

    @staticmethod
    @not_differentiable
    def backward(ctx: Any, gy: Tensor | None) -> tuple[Tensor | None, ...]:
        if gy is None:
            return None, None, None, None
        need_gx, need_gb = ctx.needs_input_grad[:2]
        gx, _, gb = gradients(
            gy,
            ctx.layer.dequantized(gy.dtype) if need_gx else None,
            None,
            ctx.seed,
            ctx.seed,
            handle_of(ctx.config_json),
            ctx.x_shape,
            (ctx.x_dtype if need_gx else None, None, ctx.bias_dtype if need_gb else None),
        )
        return gx, gb, None, None
