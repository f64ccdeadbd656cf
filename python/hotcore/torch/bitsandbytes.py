"""``HotLinear8bitLt`` and ``HotLinear4bit``: frozen layers of bitsandbytes, under adapters.

bitsandbytes keeps the whole x of a ``Linear8bitLt`` until backward, although its weight is frozen.
These layers keep only the seed, and compute g_x in integers. The module imports bitsandbytes.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from ..config import ConfigLike, as_config
from . import ops
from .functional import seed_for_call
from .modules import HotModule

# hotcore does not require bitsandbytes; the type checker runs without it.
_bnb: Any = importlib.import_module("bitsandbytes")
_Linear8bitLt: Any = _bnb.nn.Linear8bitLt
_Linear4bit: Any = _bnb.nn.Linear4bit


class _FrozenBase(HotModule):
    """Mix-in: a layer of bitsandbytes with a frozen weight, whose g_x is computed through HOT.

    The forward pass is that of bitsandbytes. Backward dequantises the weight as bitsandbytes does
    and computes the product ``g_y w`` in integers. Inside torch.compile the layer runs eagerly (a
    graph break). :func:`hotcore.torch.convert` makes these layers.

    Args:
        in_features: I.
        out_features: O.
        config: a HotConfig or a recipe's name.
        **options: of bitsandbytes' layer.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        config: ConfigLike = "default",
        **options: Any,
    ) -> None:
        """Make a layer with new parameters; ``.to(device)`` quantises them."""
        super().__init__(in_features, out_features, **options)  # type: ignore[call-arg]  # a mix-in
        self.config = as_config(config)

    @property
    def runs_plain(self) -> bool:
        """In eval mode always; its forward is bitsandbytes'."""
        return not self.training  # type: ignore[attr-defined]  # a layer has it

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # so in torch
    def forward(self, x: Tensor) -> Tensor:
        """``[..., I] -> [..., O]``."""
        bias: Tensor | None = self.bias  # type: ignore[attr-defined]  # a layer has it
        needed = x.requires_grad or (bias is not None and bias.requires_grad)
        if self.runs_plain or not (torch.is_grad_enabled() and needed):
            return self.plain_forward(x)
        try:
            seed = seed_for_call("linear", x, x)
            output: Tensor = _FrozenProduct.apply(x, bias, self, seed)  # type: ignore[no-untyped-call]
        except (ValueError, RuntimeError) as error:
            self.prefix_layer_name(error)
            raise
        return output

    def plain_forward(self, x: Tensor) -> Tensor:
        """The forward pass of bitsandbytes."""
        output: Tensor = super().forward(x)  # type: ignore[misc]  # a layer has it
        return output

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The weight ``[O, I]``, dequantised as in the backward of bitsandbytes."""
        raise NotImplementedError


class HotLinear8bitLt(_FrozenBase, _Linear8bitLt):  # type: ignore[misc]
    """``Linear8bitLt`` with a frozen 8-bit weight, whose g_x is computed through HOT."""

    plain = _Linear8bitLt

    def __init__(self, in_features: int, out_features: int, **options: Any) -> None:
        """Make a layer with new parameters; ``has_fp16_weights`` is False."""
        super().__init__(in_features, out_features, **{"has_fp16_weights": False, **options})

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The weight ``[O, I]``, dequantised as in the backward of bitsandbytes."""
        codes, scales = self.state.CB, self.state.SCB
        weight: Tensor = codes.to(dtype, copy=True).mul_(scales.unsqueeze(1).mul(1.0 / 127.0))
        return weight


class HotLinear4bit(_FrozenBase, _Linear4bit):  # type: ignore[misc]
    """``Linear4bit``, whose g_x is computed through HOT."""

    plain = _Linear4bit

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The weight ``[O, I]``, dequantised as in the backward of bitsandbytes."""
        weight: Tensor = _bnb.functional.dequantize_4bit(self.weight.data, self.weight.quant_state)
        return weight.to(dtype)


class _FrozenProduct(torch.autograd.Function):
    """Saves nothing of x: the weight has no gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor | None, layer: _FrozenBase, seed: Tensor
    ) -> Tensor:
        ctx.layer, ctx.seed, ctx.config_json = layer, seed, layer._config_json
        ctx.x_shape, ctx.x_dtype = x.shape, x.dtype
        ctx.set_materialize_grads(False)
        y = layer.plain_forward(x)
        ctx.bias_dtype = None if bias is None else bias.dtype  # Linear4bit may have cast it
        return ops.without_base(y)

    @staticmethod
    @ops.not_differentiable
    def backward(ctx: Any, gy: Tensor | None) -> tuple[Tensor | None, ...]:
        if gy is None:
            return None, None, None, None
        need_gx, need_gb = ctx.needs_input_grad[:2]
        gx, _, gb = ops.backward_linear(
            gy,
            ctx.layer.dequantized(gy.dtype) if need_gx else None,
            None,
            ctx.seed,
            ctx.seed,
            ctx.config_json,
            ctx.x_shape,
            ctx.x_dtype if need_gx else None,
            None,
            ctx.bias_dtype if need_gb else None,
        )
        return gx, gb, None, None
