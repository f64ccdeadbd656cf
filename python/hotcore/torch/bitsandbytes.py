"""``HotLinear8bitLt``, for bitsandbytes' ``Linear8bitLt`` (adapters on an 8-bit model).

bitsandbytes keeps the whole x of such a layer until backward, although its weight is frozen. This
layer keeps only the seed. The module imports bitsandbytes.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from ..config import ConfigLike, as_config
from .modules import HotModule
from .ops.calls import seed_for_call
from .ops.core import handle_of, not_differentiable, without_base
from .ops.linear import gradients

# hotcore does not require bitsandbytes; the type checker runs without it.
_Linear8bitLt: Any = importlib.import_module("bitsandbytes").nn.Linear8bitLt


class HotLinear8bitLt(HotModule, _Linear8bitLt):  # type: ignore[misc]
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

    plain = _Linear8bitLt

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        config: ConfigLike = "default",
        **options: Any,
    ) -> None:
        """Make a layer with new parameters; ``.to(device)`` quantises them."""
        super().__init__(in_features, out_features, **{"has_fp16_weights": False, **options})
        self.config = as_config(config)

    @property
    def runs_plain(self) -> bool:
        """In eval mode always; its forward is bitsandbytes'."""
        return not self.training

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # so in torch
    def forward(self, x: Tensor) -> Tensor:
        """``[..., I] -> [..., O]``."""
        bias: Tensor | None = self.bias
        needed = x.requires_grad or (bias is not None and bias.requires_grad)
        if not (self.training and torch.is_grad_enabled() and needed):
            output: Tensor = super().forward(x)
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
        output: Tensor = super().forward(x)
        return output

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The weight ``[O, I]``, dequantised as in the backward of bitsandbytes."""
        codes, scales = self.state.CB, self.state.SCB
        weight: Tensor = codes.to(dtype, copy=True).mul_(scales.unsqueeze(1).mul(1.0 / 127.0))
        return weight


class _Frozen8bit(torch.autograd.Function):
    """Saves nothing of x: the weight has no gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor | None, layer: HotLinear8bitLt, seed: Tensor
    ) -> Tensor:
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
