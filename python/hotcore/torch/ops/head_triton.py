"""A Triton kernel of :mod:`.head`: losses, and logits turned into their gradient.

A program works on one token: it reads the row for the softmax's sums, then again, mostly from the
L2 cache, to write the gradient. Sums and exponents are fp32.
"""
# mypy: ignore-errors
# Triton is no dependency (torch for CUDA brings it), and its language is not typed Python.

from __future__ import annotations

import torch
import triton
import triton.language as tl

_TILE = 8192
_WARPS = 16


@triton.jit
def _values(row, i, width, vocab, cap, CAPPED: tl.constexpr):
    """Logits of the words i, capped, and the cap's slope; past the end -inf."""
    logits = tl.load(row + i, mask=i < width, other=0.0).to(tl.float32)
    slope = 1.0
    if CAPPED:
        tanh = 2.0 * tl.sigmoid(2.0 * logits / cap) - 1.0
        slope = 1.0 - tanh * tanh
        logits = cap * tanh
    return tl.where(i < vocab, logits, float("-inf")), slope


@triton.jit
def _expm1(x):
    """exp(x) - 1 for x <= 0 without cancellation (Kahan's quotient)."""
    e = tl.exp(x)
    safe = tl.where((e == 1.0) | (e < 0.5), 2.0, e)
    near = (e - 1.0) * (x / tl.log(safe))
    return tl.where(e == 1.0, x, tl.where(e < 0.5, e - 1.0, near))


@triton.jit
def _rows_kernel(
    logits, targets, losses, at_target, pitch, width, vocab, smoothing, cap, z,
    SMOOTHED: tl.constexpr, CAPPED: tl.constexpr, SQUARED: tl.constexpr, GRADIENT: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    row = logits + token * pitch
    target = tl.load(targets + token)
    top, total, sum_of_values = float("-inf"), 0.0, 0.0
    for begin in range(0, width, TILE):
        i = begin + tl.arange(0, TILE)
        values, _ = _values(row, i, width, vocab, cap, CAPPED)
        highest = tl.maximum(top, tl.max(values, 0))
        # A row may begin with a tile of -inf.
        base = tl.where(highest == float("-inf"), 0.0, highest)
        total = total * tl.exp(top - base) + tl.sum(tl.exp(values - base), 0)
        top = highest
        if SMOOTHED:
            sum_of_values += tl.sum(tl.where(i < vocab, values, 0.0), 0)
    log_total = tl.log(total)
    lse = top + log_total
    of_target, slope_at = _values(row, target, width, vocab, cap, CAPPED)
    logp = (of_target - top) - log_total  # exact where the target has all
    loss = -logp
    share = smoothing / vocab
    if SMOOTHED:
        loss = (1.0 - smoothing) * loss - share * (sum_of_values - vocab * lse)
    grow = 1.0
    if SQUARED:
        loss += z * lse * lse
        grow += 2.0 * z * lse
    tl.store(losses + token, loss)
    if not GRADIENT:
        return
    at = _expm1(logp)
    if SMOOTHED or SQUARED:
        at = tl.exp(logp) * grow - share - (1.0 - smoothing)
    at *= slope_at
    tl.store(at_target + token, at)
    for begin in range(0, width, TILE):
        i = begin + tl.arange(0, TILE)
        values, slope = _values(row, i, width, vocab, cap, CAPPED)
        p = (tl.exp((values - top) - log_total) * grow - share) * slope
        p = tl.where(i < vocab, tl.where(i == target, at, p), 0.0)
        tl.store(row + i, p.to(logits.dtype.element_ty), mask=i < width)


def rows(
    logits: torch.Tensor,
    vocab: int,
    target: torch.Tensor,
    losses: torch.Tensor,
    at_target: torch.Tensor,
    smoothing: float,
    softcap: float,
    lse_square_scale: float,
    gradient: bool,
) -> None:
    """``head.differentiate``: fill ``losses`` and ``at_target``, write over ``logits``."""
    width = logits.shape[1]
    with torch.cuda.device(logits.device):
        _rows_kernel[(len(logits),)](
            *(logits, target, losses, at_target, logits.stride(0), width, vocab),
            *(smoothing, softcap, lse_square_scale),
            SMOOTHED=smoothing != 0,
            CAPPED=softcap != 0,
            SQUARED=lse_square_scale != 0,
            GRADIENT=gradient,
            TILE=min(_TILE, triton.next_power_of_2(width)),
            num_warps=_WARPS,
        )
