"""Experts of a mixture: their grouped products, and the gate between, keep 8 or 4 bits a value.

The products are torch's ``grouped_mm``, in the dtype of the weights; the experts' sizes stay on the
device. The x of the first product is kept once a token, however many experts take it. Storages
``token8`` and ``token4`` let no token's values into another's (docs/numerics.md, "One code a
value"), so the order of the experts does not matter.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...config import HotConfig
from .. import _compat
from . import calls, codes, core
from .core import Handle, handle_of
from .registry import Size, not_differentiable, operator

aten: Any = torch.ops.aten

AVAILABLE = hasattr(F, "grouped_mm")
"""Whether torch has the product (2.10 and newer)."""

GATES: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "silu": (F.silu, aten.silu_backward),
    "gelu": (F.gelu, aten.gelu_backward),
    "gelu_tanh": (
        functools.partial(F.gelu, approximate="tanh"),
        functools.partial(aten.gelu_backward, approximate="tanh"),
    ),
}
"""Activations of :func:`gated`: forward, and backward of g_y and x."""


@functools.cache
def _handle(bits: int) -> Handle:
    config = HotConfig(storage=f"token{bits}", gw_scale="token", gw_rounding="nearest")  # type: ignore[arg-type]  # bits: 4 or 8
    return handle_of(config.json)


def _draw_seed(x: Tensor) -> Tensor:
    """A seed of a call, also where nothing is differentiated: a checkpoint runs a region twice."""
    if torch.compiler.is_compiling() or _compat.symbolic(x):
        seed: Tensor = codes.draw_seed(x.detach())
        return seed
    return core.seed_for(x)


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
        saved = None
        if kept:
            saved, seed = codes.compress_activation(x, seed, _handle(bits))
        ctx.save_for_backward(weight, saved, scores, seed, ends, order)
        ctx.call = (each, bits, x.shape)
        rows = x if scores is not None else x[order // each]
        y: Tensor = _grouped_product(rows, weight, ends, False)
        return y if scores is None else _by_token(y * scores[:, None], order, each)

    @staticmethod
    @not_differentiable
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
    calls.refuse_transforms("experts")
    call = (weight, scores, ends, order, each, _draw_seed(x), bits)
    y: Tensor = _Product.apply(x, *call)  # type: ignore[no-untyped-call]  # so in torch
    return y


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, seed: Tensor, name: str, bits: int) -> Tensor:
        factors = rows.chunk(2, -1)
        saved: tuple[Tensor, ...] = ()
        if ctx.needs_input_grad[0]:  # a seed each, so that their roundings are independent
            handle = _handle(bits)
            pairs = map(codes.compress_activation, factors, (seed, seed + 1), (handle, handle))
            saved = tuple(itertools.chain(*pairs))
        ctx.save_for_backward(*saved)
        ctx.call = (name, bits, factors[0].shape, rows.dtype)
        return GATES[name][0](factors[0]) * factors[1]

    @staticmethod
    @not_differentiable
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, ...]:
        saved, seeds = ctx.saved_tensors[::2], ctx.saved_tensors[1::2]
        name, bits, shape, dtype = ctx.call
        config = _handle(bits).json
        gate, up = (
            codes.decompress_activation(factor, own, config, *shape, dtype)
            for factor, own in zip(saved, seeds, strict=True)
        )
        forward, backward = GATES[name]
        return torch.cat([backward(gy * up, gate), gy * forward(gate)], -1), None, None, None


@operator()
def _saved_gate(rows: Tensor, name: str, bits: int) -> Tensor:
    y: Tensor = _Gated.apply(rows, _draw_seed(rows), name, bits)  # type: ignore[no-untyped-call]  # so in torch
    return y


def gated(rows: Tensor, name: str, bits: int) -> Tensor:
    """``act(gate) * up`` of rows ``[S, 2H]``, both factors one after the other.

    Args:
        rows: a row for every token and expert.
        name: of the activation, a key of :data:`GATES`.
        bits: 8 or 4, in which backward keeps both factors, each with scales of its own.

    The gradient is that at the decoded factors.
    """
    y: Tensor = _saved_gate(rows, name, bits)
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
