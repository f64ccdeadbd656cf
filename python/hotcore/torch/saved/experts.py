"""Experts of a mixture: their grouped products keep x in 8 or 4 bits a value.

The products are torch's ``grouped_mm``, in the dtype of the weights; the experts' sizes stay on the
device. The x of the first product is kept once a token, however many experts take it. Storages
``token8`` and ``token4`` let no token's values into another's (docs/numerics.md, "One code a
value"), so the order of the experts does not matter.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...config import HotConfig
from .. import ops
from ..ops import codes
from ..ops.core import Handle, handle_of
from ..ops.registry import Size, operator
from .codes import draw_seed

AVAILABLE = hasattr(F, "grouped_mm")
"""Whether torch has the product (2.10 and newer)."""


@functools.cache
def _handle(bits: int) -> Handle:
    config = HotConfig(storage=f"token{bits}", gw_scale="token", gw_rounding="nearest")  # type: ignore[arg-type]  # bits: 4 or 8
    return handle_of(config.json)


def first_of(module: Any) -> Tensor:
    """The weights of the first product of transformers' experts."""
    found: Tensor = module.gate_up_proj if module.has_gate else module.up_proj
    return found


def why_plain(module: Any) -> str:
    """Why experts run transformers' own forward; empty where :func:`experts` does the same."""
    chosen = getattr(getattr(module, "config", None), "_experts_implementation", None)
    if not hasattr(module, "_is_expert_parallel"):
        return "transformers before 5.18: its experts do not say whether they are parallel"
    reasons = {
        "torch has no grouped_mm before 2.10": not AVAILABLE,
        f"its experts are {chosen!r}, not 'grouped_mm'": chosen != "grouped_mm",
        "experts with biases": module.has_bias,
        "experts with transposed weights": module.is_transposed,
        "experts with a norm of their own": getattr(module, "has_post_expert_norm", False),
        "experts of several ranks": module._is_expert_parallel or ops.is_dtensor(module.down_proj),
    }
    return next((why for why, holds in reasons.items() if holds), "")


# ---- the products ----


def _flops(x_shape: Sequence[int], weight_shape: Sequence[int], *_: Any, **__: Any) -> int:
    return 2 * x_shape[0] * weight_shape[1] * weight_shape[2]


def _fake_product(x: Tensor, weight: Tensor, ends: Tensor, transposed: bool) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[2 if transposed else 1])


@operator(fake=_fake_product, flops=_flops, product=True)
def _grouped_product(x: Tensor, weight: Tensor, ends: Tensor, transposed: bool) -> Tensor:
    """``x weight^T`` of each expert's rows, ``[S, I]`` and ``[E, O, I]``; or ``x weight``."""
    return F.grouped_mm(x.contiguous(), weight if transposed else weight.mT, offs=ends)


def _outer_flops(gy_shape: Sequence[int], x_shape: Sequence[int], *_: Any, **__: Any) -> int:
    return 2 * gy_shape[0] * gy_shape[1] * x_shape[1]


def _fake_outer(gy: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    return gy.new_empty(ends.shape[0], gy.shape[1], x.shape[1])


@operator(fake=_fake_outer, flops=_outer_flops, product=True)
def _grouped_outer(gy: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """``gy^T x`` of each expert's rows, ``[E, O, I]``."""
    return F.grouped_mm(gy.contiguous().t(), x.contiguous(), offs=ends)


# ---- autograd ----


def _by_token(rows: Tensor, order: Tensor, each: int) -> Tensor:
    """The sum of a token's rows, ``[S, F] -> [T, F]``."""
    places = torch.arange(order.shape[0], device=order.device)
    place = torch.empty_like(order).scatter(0, order, places)
    return rows[place].view(-1, each, rows.shape[1]).sum(1)


class _Product(torch.autograd.Function):
    """Rows of ``order // each`` by experts: without scores of x, with scores of the gradient.

    Nothing of y is kept: the gradient of a score, ``g_y y``, is ``(g_y weight) x``.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, scores: Tensor | None, ends: Tensor, *call: Any
    ) -> Tensor:
        order, each, seed, bits = call
        kept = any(ctx.needs_input_grad[1:3])
        saved = codes.compress_activation(x, seed, _handle(bits)) if kept else None
        ctx.save_for_backward(weight, saved, scores, seed, ends, order)
        ctx.call = (each, bits, x.shape)
        rows = x if scores is not None else x[order // each]
        y: Tensor = _grouped_product(rows, weight, ends, False)
        return y if scores is None else _by_token(y * scores[:, None], order, each)

    @staticmethod
    @ops.not_differentiable
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, ...]:
        weight, saved, scores, seed, ends, order = ctx.saved_tensors
        each, bits, shape = ctx.call
        need_gx, need_gw, need_scores = ctx.needs_input_grad[:3]
        last, gx, gw, of_scores = scores is not None, None, None, None
        rows = gy[order // each] if last else gy
        if saved is not None:
            kept = (saved, seed, _handle(bits).json, *shape, weight.dtype)
            x = codes.decompress_activation(*kept)
            x = x if last else x[order // each]
        if need_gx or need_scores:
            gx = _grouped_product(rows.to(weight.dtype), weight, ends, True)
        if need_scores:
            of_scores = (gx.float() * x.float()).sum(1).to(scores.dtype)  # type: ignore[union-attr]  # gx: formed above
        if last:
            rows = rows * scores[:, None]
            gx = None if gx is None else (gx * scores[:, None]).to(weight.dtype)
        elif gx is not None:
            gx = _by_token(gx, order, each)
        if need_gw:
            gw = _grouped_outer(rows.to(weight.dtype), x, ends)
        return gx, gw, of_scores, *(None,) * 5


@operator()
def _saved_experts(
    x: Tensor,
    weight: Tensor,
    scores: Tensor | None,
    ends: Tensor,
    order: Tensor,
    each: Size,
    bits: int,
) -> Tensor:
    call = (weight, scores, ends, order, each, draw_seed(x), bits)
    y: Tensor = _Product.apply(x, *call)  # type: ignore[no-untyped-call]  # so in torch
    return y


def experts(
    x: Tensor, chosen: Tensor, scores: Tensor, first: Tensor, last: Tensor, inner: Any, bits: int
) -> Tensor:
    """A mixture of experts, ``[T, I] -> [T, I]``; backward keeps x of both products in codes.

    Args:
        x: ``[T, I]``.
        chosen: the experts of each token, ``[T, k]``, integers.
        scores: their weights in a token's sum, ``[T, k]``.
        first: weights of the first product, ``[E, O, I]``.
        last: weights of the last product, ``[E, I, H]``.
        inner: what is between the products, ``[S, O] -> [S, H]``.
        bits: 8 or 4.

    g_w and the gradient of ``scores`` are unbiased with 4 bits; g_x is that of plain products.
    """
    each = chosen.shape[1]
    by_expert, order = torch.sort(chosen.reshape(-1), stable=True)
    of = torch.arange(first.shape[0], device=x.device, dtype=by_expert.dtype)
    ends = torch.searchsorted(by_expert, of, right=True, out_int32=True)
    call = (ends, order, each, bits)
    h = inner(_saved_experts(x.to(first.dtype), first, None, *call))
    y: Tensor = _saved_experts(h.to(last.dtype), last, scores.reshape(-1)[order], *call)
    return y.to(x.dtype)
