"""``linear``: the forward of ``torch.nn.functional.linear``, the backward of HOT."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..config import HotConfig, as_config
from . import ops

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""What HOT takes."""
_DEFAULT = HotConfig()


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, config: HotConfig | str = _DEFAULT
) -> Tensor:
    """``x weight^T + bias``, bit for bit as ``F.linear``; gradients are computed with HOT.

    Of x only its compressed form is kept for backward, and nothing where ``weight`` is frozen.
    Without anything to differentiate the result is ``F.linear``'s. Every call draws one seed from
    torch's default CPU generator, so ``torch.manual_seed`` makes a run repeatable.

    Args:
        x: ``[..., I]`` float32, float16 or bfloat16 (under autocast, what it casts to that).
        weight: ``[O, I]``.
        bias: ``[O]`` or None.
        config: a HotConfig or a recipe's name.

    Returns:
        ``[..., O]``.

    Raises:
        ValueError: x is of another dtype, or the configuration does not fit its tokens.
        NotImplementedError: inside a ``torch.func`` transform, or on a device without a backend.
        RuntimeError: when differentiated twice.

    Source: spec.md, "Stages".
    """
    text = _text(config)
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        raise NotImplementedError(
            "hotcore.torch.linear: torch.func transforms (grad, vmap, jvp, ...) are not supported; "
            "use autograd, or revert() the model"
        )
    # Always, also where nothing is to be differentiated: a checkpoint may run the same region
    # first without gradients and then with them, and has to meet the same random numbers.
    seed = ops.seed_for(x, weight)
    if not (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)):
        return F.linear(x, weight, bias)
    if not torch.compiler.is_compiling():
        _check(x)
    output: Tensor = _HotLinear.apply(x, weight, bias, seed, text)  # type: ignore[no-untyped-call]
    return output


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _text(config: HotConfig | str) -> str:
    """The configuration as the operators take it; torch.compile need not look inside."""
    return as_config(config).json


def _check(x: Tensor) -> None:
    if x.device.type not in ("cpu", "meta"):
        ops.context_of(x.device)  # a missing backend is said in forward, not in backward
    dtype = _autocast_dtype(x) or x.dtype
    if dtype not in DTYPES:
        name = str(dtype).removeprefix("torch.")
        raise ValueError(f"x: dtype {name}; expected float32, float16 or bfloat16")


def _autocast_dtype(x: Tensor) -> torch.dtype | None:
    """What autocast would cast x to; None: it would leave x alone."""
    device = x.device.type
    if x.dtype not in DTYPES or device == "meta" or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor if dtype is None or tensor.dtype not in DTYPES else tensor.to(dtype)


class _HotLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, seed: Tensor, config: str
    ) -> Tensor:
        # Cast here, not by autocast: its cache would keep a weight without its graph.
        dtype = _autocast_dtype(x)
        inner = _cast(x, dtype)
        y = F.linear(inner, _cast(weight, dtype), None if bias is None else _cast(bias, dtype))
        saved = None
        if ctx.needs_input_grad[1]:
            flat = inner.reshape(math.prod(x.shape[:-1]), x.shape[-1])
            saved = ops.compress_activation(flat, seed, config)
        ctx.save_for_backward(saved, weight if ctx.needs_input_grad[0] else None, seed)
        ctx.set_materialize_grads(False)
        ctx.config = config
        ctx.x_shape = x.shape
        ctx.dtypes = (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gy: Tensor | None) -> tuple[Tensor | None, ...]:
        if gy is None:
            return None, None, None, None, None
        saved, weight, seed = ctx.saved_tensors
        need = ctx.needs_input_grad
        shape = ctx.x_shape
        gx, gw, gb = ops.backward_linear(
            gy.reshape(math.prod(shape[:-1]), gy.shape[-1]),
            weight if need[0] else None,
            saved if need[1] else None,
            seed,
            ctx.config,
            shape[-1],
            *(dtype if wanted else None for dtype, wanted in zip(ctx.dtypes, need, strict=False)),
        )
        return (
            gx.view(shape) if need[0] else None,
            gw if need[1] else None,
            gb if need[2] else None,
            None,
            None,
        )
