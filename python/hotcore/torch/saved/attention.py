"""``scaled_dot_product_attention`` that saves codes of q, k, v and the result.

The forward pass is the fused kernel that torch would use (flash or memory-efficient attention on
CUDA, flash attention on the CPU), called by the operator below ``F.scaled_dot_product_attention``.
It also returns the logarithms of the softmax's sums, which are saved exactly. Backward calls the
same operator as torch's backward.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import _compat, ops
from ..ops import DTYPES
from .blocks import BLOCK
from .codes import decode, draw_seed, encode, in_graph

aten: Any = torch.ops.aten

_TOKEN_MAJOR = (0, 2, 1, 3)
"""Memory order of a [B, H, S, D] that a projection has made: B, S, H, D. Blocks of codes go so."""

_HALF = (torch.float16, torch.bfloat16)
_HEAD_LIMIT = 256  # head width of flash attention
_CUDNN_HEAD_LIMIT = 128  # head width of cuDNN's backward


def _cuda_kernels(index: int) -> tuple[bool, bool]:
    """Whether flash and memory-efficient attention run on a device and are enabled."""
    modern = torch.cuda.get_device_capability(index) >= (8, 0)
    available = modern and torch.backends.cuda.is_flash_attention_available()
    switches: Any = torch.backends.cuda
    flash = available and switches.flash_sdp_enabled()
    return flash, modern and switches.mem_efficient_sdp_enabled()


def _prefers_cudnn(q: Tensor, causal: bool) -> bool:
    """Whether torch would use cuDNN's kernel for a call that flash attention supports.

    Queried for the same dtype, head width and mask at a moderate length.
    """
    switches: Any = torch.backends.cuda
    if q.shape[3] > _CUDNN_HEAD_LIMIT or not switches.cudnn_sdp_enabled():
        return False
    return _compat.prefers_cudnn_attention(q.get_device(), q.dtype, int(q.shape[3]), causal)


def _kernel(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, causal: bool, gqa: bool
) -> tuple[str, str]:
    """The kernel to use, or the reason why there is none.

    The kernels trust their caller: what ``F.scaled_dot_product_attention`` checks before it calls
    one is checked here. What does not pass goes to that function, which computes or refuses it.
    """
    every = (q, k, v)
    if _compat.replaces_attention():
        return "", "F.scaled_dot_product_attention was replaced, as context_parallel does"
    if any(map(ops.is_dtensor, every)):
        return "", "q, k or v is a DTensor"
    if any(t.dim() != 4 or t.layout is not torch.strided for t in every):
        return "", "q, k and v are not [B, H, S, D]"
    if q.dtype not in DTYPES or k.dtype != q.dtype or v.dtype != q.dtype:
        return "", "q, k and v are not of one dtype, float32, float16 or bfloat16"
    if k.device != q.device or v.device != q.device:
        return "", "q, k and v are on several devices"
    heads, shared = q.shape[1], k.shape[1]
    grouped = gqa and shared > 0 and heads % shared == 0
    if q.shape[0] != k.shape[0] or k.shape[:3] != v.shape[:3] or q.shape[3] != k.shape[3]:
        return "", "q, k and v are to be broadcast"
    if heads != shared and not grouped:
        return "", f"q has {heads} heads and k has {shared}"
    if any(t.shape[1] * t.shape[3] % BLOCK for t in every):
        return "", (
            f"its heads of one token have no multiple of {BLOCK} values, so that a block of codes "
            "would hold parts of two tokens"
        )
    if any(t.stride(3) != 1 for t in every):
        return "", "q, k or v is strided along a head's features"
    if mask is not None:
        if mask.requires_grad:
            return "", "its mask needs a gradient"
        if causal:
            return "", "it has a mask and is causal"
        if mask.dim() not in (2, 4) or mask.device != q.device:
            return "", "its mask has neither 2 nor 4 dimensions, or is on another device"
        sizes = (q.shape[0], heads, q.shape[2], k.shape[2])[-mask.dim() :]
        if any(found not in (1, size) for found, size in zip(mask.shape, sizes, strict=True)):
            return "", f"its mask {tuple(mask.shape)} does not fit {sizes}"
    if q.is_cpu:
        switches: Any = torch.backends.cuda
        if not switches.flash_sdp_enabled():  # the switch is the CPU's, too
            return "", "flash attention is switched off"
        if dropout > 0.0:
            return "", "it has dropout, which torch's kernel for the CPU has not"
        if v.shape[3] != q.shape[3]:
            return "", "heads of v are wider or narrower than those of q"
        return "cpu", ""
    if not q.is_cuda:
        return "", "the device has no fused kernel"
    if q.shape[3] % 8 != 0 or v.shape[3] % 8 != 0:
        return "", "the width of a head is no multiple of 8"
    flash, efficient = _cuda_kernels(q.get_device())
    if (
        flash
        and mask is None
        and q.dtype in _HALF
        and v.shape[3] == q.shape[3] <= _HEAD_LIMIT
        and not (causal and q.shape[2] != k.shape[2])
    ):
        several = dropout == 0.0 and q.shape[2] > 1 and k.shape[2] > 1
        return "cudnn" if several and _prefers_cudnn(q, causal) else "flash", ""
    if efficient:
        return "efficient", ""
    return "", "no fused kernel of torch for CUDA takes it, or they are switched off"


def _warn(reason: str) -> None:
    warnings.warn(
        f"hotcore.torch: attention keeps q, k, v and its result uncompressed: {reason}",
        RuntimeWarning,
        stacklevel=3,
    )


def _repeat_groups(x: Tensor, groups: int) -> Tensor:
    return x if groups == 1 else x.repeat_interleave(groups, dim=1)


def _sum_groups(gx: Tensor, groups: int) -> Tensor:
    if groups == 1:
        return gx
    batch, heads, tokens, width = gx.shape
    return gx.reshape(batch, heads // groups, groups, tokens, width).sum(2)


def _aligned(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """A mask for the memory-efficient kernel: q's dtype, rows aligned to 16 elements."""
    if mask is None:
        return None
    width = mask.shape[-1]
    if width % 16 != 0:
        mask = F.pad(mask, (0, 16 - width % 16))[..., :width]
    return mask.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        seed: Tensor,
        kernel: str,
        dropout: float,
        causal: bool,
        scale: float | None,
        bits: int,
    ) -> Tensor:
        # Flash attention on CUDA reads the shared heads of k and v in place.
        groups = 1 if kernel == "flash" else q.shape[1] // k.shape[1]
        keys, values = _repeat_groups(k, groups), _repeat_groups(v, groups)
        philox_seed, philox_offset = None, None
        if kernel == "cpu":
            y, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu(
                q, keys, values, dropout, causal, attn_mask=mask, scale=scale
            )
        elif kernel == "flash":
            found = aten._scaled_dot_product_flash_attention(
                q, keys, values, dropout, causal, False, scale=scale
            )
            y, logsumexp, philox_seed, philox_offset = found[0], found[1], found[6], found[7]
        elif kernel == "cudnn":
            found = aten._scaled_dot_product_cudnn_attention(
                q, keys, values, None, True, dropout, causal, False, scale=scale
            )
            y, logsumexp, philox_seed, philox_offset = found[0], found[1], found[6], found[7]
        else:
            y, logsumexp, philox_seed, philox_offset = aten._scaled_dot_product_efficient_attention(
                q, keys, values, _aligned(mask, q, k), True, dropout, causal, scale=scale
            )
        kept: list[Tensor] = []
        layouts = []
        for stream, tensor in enumerate((q, k, v, y)):
            parts, layout = encode(tensor, bits, seed, stream, _TOKEN_MAJOR)
            kept += parts
            layouts.append(layout)
        ctx.save_for_backward(mask, logsumexp, philox_seed, philox_offset, *kept)
        ctx.layouts, ctx.groups = layouts, groups
        ctx.kernel, ctx.dropout, ctx.causal, ctx.scale = kernel, dropout, causal, scale
        result: Tensor = y
        return result

    @staticmethod
    @ops.not_differentiable
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, ...]:
        mask, logsumexp, philox_seed, philox_offset, *kept = ctx.saved_tensors
        each = len(kept) // 4
        q, k, v, y = (
            decode(kept[i * each : (i + 1) * each], layout) for i, layout in enumerate(ctx.layouts)
        )
        groups, dropout, causal, scale = ctx.groups, ctx.dropout, ctx.causal, ctx.scale
        keys, values = _repeat_groups(k, groups), _repeat_groups(v, groups)
        if ctx.kernel == "cpu":
            gq, gk, gv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
                gy, q, keys, values, y, logsumexp, dropout, causal, attn_mask=mask, scale=scale
            )
        elif ctx.kernel == "flash":
            gq, gk, gv = aten._scaled_dot_product_flash_attention_backward(
                gy,
                q,
                keys,
                values,
                y,
                logsumexp,
                None,
                None,
                q.shape[2],
                k.shape[2],
                dropout,
                causal,
                philox_seed,
                philox_offset,
                scale=scale,
            )
        elif ctx.kernel == "cudnn":
            if in_graph(q):
                # The results have the strides of q, k and v. Inductor may choose other strides for
                # those than the trace had, unless they are contiguous.
                q, keys, values, y = (t.contiguous() for t in (q, keys, values, y))
            gq, gk, gv = aten._scaled_dot_product_cudnn_attention_backward(
                gy,
                q,
                keys,
                values,
                y,
                logsumexp,
                philox_seed,
                philox_offset,
                None,
                None,
                None,
                q.shape[2],
                k.shape[2],
                dropout,
                causal,
                scale=scale,
            )
        else:
            gq, gk, gv, _ = aten._scaled_dot_product_efficient_attention_backward(
                gy,
                q,
                keys,
                values,
                _aligned(mask, q, k),
                y,
                logsumexp,
                philox_seed,
                philox_offset,
                dropout,
                [True, True, True, False],
                causal,
                scale=scale,
            )
        gk, gv = _sum_groups(gk, groups), _sum_groups(gv, groups)
        return gq, gk, gv, None, None, None, None, None, None, None


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    bits: int = 8,
) -> Tensor:
    """``F.scaled_dot_product_attention`` that saves codes of q, k, v and the result.

    Arguments and result are those of torch's function, plus ``bits``, 8 or 4. With ``enable_gqa``
    the codes of k and v have their own number of heads. The mask is saved as it is.

    If no fused kernel of torch supports the call (a mask that needs a gradient, dropout on the CPU,
    odd head widths on CUDA), plain attention runs and a RuntimeWarning says why.
    """
    arguments = (query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, bits)
    if torch.compiler.is_compiling():
        y: Tensor = torch.ops.hotcore.saved_attention.default(*arguments)
        return y
    return _attention(*arguments)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    bits: int,
) -> Tensor:
    q, k, v, mask = query, key, value, attn_mask
    device = q.device.type
    if device != "meta" and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        q, k, v = (t.to(dtype) if t.dtype in DTYPES else t for t in (q, k, v))
        if mask is not None and mask.dtype in DTYPES:
            mask = mask.to(dtype)
    kernel, reason = _kernel(q, k, v, mask, dropout_p, is_causal, enable_gqa)
    if not kernel or q.numel() == 0 or k.numel() == 0:
        if reason:
            _warn(reason)
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    seed = draw_seed(q)
    if not (torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)):
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, float("-inf"))
    elif mask is not None:
        mask = mask.to(q.dtype)
    y: Tensor = _Attention.apply(  # type: ignore[no-untyped-call]  # so in torch
        q, k, v, mask, seed, kernel, dropout_p, is_causal, scale, bits
    )
    return y


ops.library.define(
    "saved_attention(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, float dropout_p, "
    "bool is_causal, float? scale, bool enable_gqa, int bits) -> Tensor"
)
ops.library.impl("saved_attention", _attention, "CompositeImplicitAutograd")
