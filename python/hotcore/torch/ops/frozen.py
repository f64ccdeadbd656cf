"""Linear layers of whose weight only codes exist (:class:`.codes.Frozen`): g_x and g_b, by HOT.

Without a configuration (an empty text) such a layer is the plain one with the dequantised weight,
in forward and backward, and draws no seed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import _compat
from . import calls, codes, core, linear
from .codes import FROZEN, Frozen, dequantize
from .core import handle_of, parsed
from .registry import not_differentiable, operator, without_base

Weight = Annotated[Any, FROZEN]
WeightAndCodes = Annotated[Any, f"{FROZEN}, Tensor? x_codes=None"]
WeightAndDtypes = Annotated[Any, f"{FROZEN}, ScalarType? gx_dtype, ScalarType? gb_dtype"]


def frozen_linear(x: Tensor, weight: Frozen, bias: Tensor | None, config_json: str) -> Tensor:
    """A linear layer with a frozen weight: gradients of x and bias.

    Without a configuration it is plain.
    """
    if not isinstance(x, Tensor):
        return calls.handle_overrides(frozen_linear, x, weight, bias, config_json)
    if torch.compiler.is_compiling():
        return _call(x, weight, bias, config_json)
    with calls.hide_from_modes(x, weight.codes):
        return _call(x, weight, bias, config_json)


def _call(x: Tensor, weight: Frozen, bias: Tensor | None, config_json: str) -> Tensor:
    compiled, seed = torch.compiler.is_compiling(), None
    if config_json and not compiled:
        seed = calls.seed_for_call("linear", x, weight.codes, bias, config_json)
    wanted = torch.is_grad_enabled() and (
        x.requires_grad or (bias is not None and bias.requires_grad)
    )
    dtype = calls.autocast_dtype(x)
    inner = calls.cast(x, dtype)
    if config_json:
        calls.check_dtypes(x, weight.dtype, bias, dtype)
        calls.check_transforms("linear", x, bias)
    elif not wanted or (not compiled and (_compat.transforms_active() or _compat.jit_tracing())):
        # Plain operations, which every transform can trace.
        matrix = codes.dequantized(_for_product(weight, inner.dtype)).to(inner.dtype)
        return F.linear(inner, matrix, None if bias is None else calls.cast(bias, dtype))
    if not wanted:
        return _product(inner, bias, None, config_json, weight)
    x_codes = None
    if not calls.is_int8(config_json):
        if compiled and config_json:
            _, seed = codes.kept_of(x, inner, config_json, False)
    elif compiled:
        x_codes, _, seed = codes.input_of(x, inner, config_json, False)
    elif seed is not None and core.product_bypasses_dispatcher(inner, weight.codes):
        handle = handle_of(config_json)
        x_codes, _, _ = codes.forms_of(x, inner, weight.codes, None, seed, handle, None)
    product = _frozen_linear if compiled else _apply
    y: Tensor = product(inner, bias, seed, config_json, *weight, x_codes)
    return y


def _parts(arguments: Sequence[Any]) -> tuple[Frozen, Tensor | None]:
    """The weight of an operator's arguments, and x_codes, which it may leave out."""
    *frozen, x_codes = (*arguments, None)[: len(Frozen._fields) + 1]
    return Frozen(*frozen), x_codes


def _for_product(weight: Frozen, dtype: torch.dtype) -> Frozen:
    """The weight for a product in ``dtype``: the bits that a plain layer's cast would give.

    fp32 holds dequantised values as they are: they are rounded once in either case.
    """
    return weight._replace(dtype=dtype) if weight.dtype == torch.float32 else weight


@operator(fake=codes.fake_dequantize)
def _dequantize_weight(*frozen: Weight) -> Tensor:
    return dequantize(Frozen(*frozen))


# ---- the forward product ----


def _flops(x_shape: Sequence[int], *arguments: Any, **_: Any) -> int:
    _bias, _seed, _config, _codes, _block, out_features, *_rest = arguments
    return 2 * math.prod(x_shape) * int(out_features)


def _multiply(
    x: Tensor, bias: Tensor | None, config: str, weight: Frozen, x_codes: Tensor | None
) -> Tensor:
    if config and parsed(config).forward == "int8":
        return linear.int8_linear(x, weight, bias, parsed(config), x_codes)
    return linear.plain_product(x, dequantize(_for_product(weight, x.dtype)), bias)


def _fake_product(
    x: Tensor, bias: Tensor | None, seed: Tensor | None, config: str, *arguments: Any
) -> Tensor:
    return linear.plain_product(x, codes.fake_dequantize(*_parts(arguments)[0]), bias)


@operator(fake=_fake_product, flops=_flops, product=True)
def _frozen_product(
    x: Tensor, bias: Tensor | None, seed: Tensor | None, config: str, *frozen: WeightAndCodes
) -> Tensor:
    return _multiply(x, bias, config, *_parts(frozen))


def _product(
    x: Tensor,
    bias: Tensor | None,
    seed: Tensor | None,
    config: str,
    weight: Frozen,
    x_codes: Tensor | None = None,
) -> Tensor:
    """``x w^T + bias``, by the operator or directly; no gradients. Without a config it is plain."""
    if core.product_bypasses_dispatcher(x, weight.codes):
        return _multiply(x, bias, config, weight, x_codes)
    y: Tensor = _frozen_product(x, bias, seed, config, *weight, x_codes)
    return y


# ---- autograd ----


class FrozenLinear(torch.autograd.Function):
    """A layer with a frozen weight, in eager mode and as AOTAutograd traces it.

    Nothing is kept of x, and of the weight its codes, which are there anyway.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor | None, seed: Tensor | None, config: str, *arguments: Any
    ) -> Tensor:
        """``x w^T + bias``."""
        need_gx, need_gb, *_ = ctx.needs_input_grad
        weight, x_codes = _parts(arguments)
        ctx.save_for_backward(seed, weight.codes)
        ctx.set_materialize_grads(False)
        ctx.config, ctx.rest, ctx.x_shape = config, weight[1:], x.shape
        ctx.dtypes = (
            x.dtype if need_gx else None,
            bias.dtype if bias is not None and need_gb else None,
        )
        return without_base(_product(x, bias, seed, config, weight, x_codes))

    @staticmethod
    @not_differentiable
    def backward(ctx: Any, gy: Tensor | None) -> tuple[Tensor | None, ...]:
        """g_x and g_b."""
        others = (None,) * (len(ctx.needs_input_grad) - 2)
        if gy is None:
            return None, None, *others
        seed, held = ctx.saved_tensors
        weight, dtypes, x_shape = Frozen(held, *ctx.rest), ctx.dtypes, ctx.x_shape
        if core.bypasses_dispatcher(gy) and seed is not None:
            matrix = None if dtypes[0] is None else dequantize(weight)
            wanted = (dtypes[0], None, dtypes[1])
            found = linear.gradients(
                gy, matrix, None, seed, seed, handle_of(ctx.config), x_shape, wanted
            )
            return found[0], found[2], *others
        rows = core.dense(gy).reshape(math.prod(x_shape[:-1]), gy.shape[-1])
        made = _frozen_backward(rows, seed, ctx.config, *weight, *dtypes)
        gx, gb = (None if dtype is None else t for t, dtype in zip(made, dtypes, strict=True))
        return None if gx is None else gx.view(x_shape), gb, *others


def _apply(x: Tensor, *arguments: Any) -> Tensor:
    y: Tensor = FrozenLinear.apply(x, *arguments)  # type: ignore[no-untyped-call]  # so in torch
    return y


@operator(flops=_flops)
def _frozen_linear(
    x: Tensor, bias: Tensor | None, seed: Tensor | None, config: str, *frozen: WeightAndCodes
) -> Tensor:
    return _apply(x, bias, seed, config, *frozen)


# ---- the backward products ----


def _backward_flops(gy_shape: Sequence[int], *arguments: Any, **_: Any) -> int:
    *_rest, in_features, _dtype, gx_dtype, _gb_dtype = arguments
    return 0 if gx_dtype is None else 2 * math.prod(gy_shape) * int(in_features)


def _outputs(
    gy: Tensor, weight: Frozen, gx_dtype: torch.dtype | None, gb_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    gx, _, gb = linear.operator_outputs(gy, weight.in_features, (gx_dtype, None, gb_dtype))
    return gx, gb


def _fake_backward(
    gy: Tensor, seed: Tensor | None, config: str, *arguments: Any
) -> tuple[Tensor, Tensor]:
    *frozen, gx_dtype, gb_dtype = arguments
    return _outputs(gy, Frozen(*frozen), gx_dtype, gb_dtype)


@operator(fake=_fake_backward, flops=_backward_flops, product=True)
def _frozen_backward(
    gy: Tensor, seed: Tensor | None, config: str, *arguments: WeightAndDtypes
) -> tuple[Tensor, Tensor]:
    *frozen, gx_dtype, gb_dtype = arguments
    weight = Frozen(*frozen)
    if seed is None:
        return _plain_gradients(gy, weight, gx_dtype, gb_dtype)
    gx, gb = _outputs(gy, weight, gx_dtype, gb_dtype)
    outputs = (gx if gx_dtype else None, None, gb if gb_dtype else None)
    matrix, keys = dequantize(weight) if gx_dtype else None, core.keys_of(seed, seed)
    linear.backward(gy, matrix, None, weight.in_features, parsed(config), keys, outputs)
    return gx, gb


def _plain_gradients(
    gy: Tensor, weight: Frozen, gx_dtype: torch.dtype | None, gb_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    """g_x and g_b of a plain product; empty where not wanted."""
    gx = gb = gy.new_empty(0)
    if gx_dtype is not None:
        matrix = dequantize(_for_product(weight, gy.dtype)).to(gy.dtype)
        gx = (gy @ matrix).to(gx_dtype)
    if gb_dtype is not None:
        gb = gy.sum(tuple(range(gy.dim() - 1))).to(gb_dtype)
    return gx, gb
