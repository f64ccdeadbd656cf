"""Codes in blocks of 128 values for tensors that backward needs: 8, 4 or 1 bit per value.

The format is that of :mod:`.blocks`, with its bound and its memory. A block keeps its minimum and
maximum, and for each value a code between them, rounded up or down at random so that its
expectation is the value. One bit is the exact sign (x > 0).

Eager mode runs the same Triton kernels on CUDA, and the same torch operations elsewhere. A compiled
graph holds ordinary torch operations instead. The compiler fuses them into the kernel that makes
the tensor, and its partitioner keeps the codes, because they are the fewest bytes that restore it.

Source: blockwise min-max codes with stochastic rounding as in ActNN (Chen et al., ICML 2021).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import _compat, ops
from .blocks import (
    BLOCK,
    GOLDEN32,
    MASK32,
    MASK_BLOCK,
    MIN_RANGE,
    Key,
    decode_blocks,
    encode_blocks,
    memory_order,
)


class Layout(NamedTuple):
    """Everything beside the codes that decoding a tensor needs."""

    shape: Sequence[int]
    """The shape, with dimensions in the order of the blocks."""
    order: tuple[int, ...]
    """The tensor's dimensions in the order of the blocks; empty: unchanged order."""
    dtype: torch.dtype
    bits: int


def in_graph(x: Tensor) -> bool:
    """Whether x is a tensor of a graph that is being compiled."""
    return torch.compiler.is_compiling() or _compat.symbolic(x)


def draw_seed(x: Tensor) -> Tensor:
    """Draw the seed of one call: int64 ``[]``.

    Eager calls draw it from torch's default CPU generator; compiled and captured ones draw it on
    x's device, from the generator there.
    """
    if ops.is_dtensor(x):
        x = x.to_local()  # type: ignore[attr-defined]  # a DTensor has it
    if in_graph(x):
        seed: Tensor = ops.draw_seed(x.detach())
        return seed
    return ops.core.seed_for(x)


def encode(
    x: Tensor,
    bits: int,
    seed: Tensor | None,
    stream: int = 0,
    order: tuple[int, ...] | None = None,
) -> tuple[tuple[Tensor, ...], Layout]:
    """Codes of x, and the layout that :func:`decode` needs.

    Args:
        x: float32, float16 or bfloat16, of any shape.
        bits: 8, 4 or 1.
        seed: from :func:`draw_seed`; None for one bit, which is exact.
        stream: distinguishes tensors that share a seed.
        order: dimensions in the order of the blocks; None: in a compiled graph x's own order, in
            eager mode that of the memory, unless elements of x overlap.

    Error and memory: see :mod:`.blocks`.
    """
    if in_graph(x):
        order = _graph_order(x) if order is None else order
        dense = x.permute(order) if order else x
        codes, lo, hi = _encode_graph(dense, bits, seed, stream)
        kept = (codes,) if bits == 1 else (codes, lo, hi)
        return kept, Layout(dense.shape, order, x.dtype, bits)
    if order is None:
        order = memory_order(x) or ()
    dense = (x.permute(order) if order else x).contiguous()
    codes, ranges = encode_blocks(dense, bits, _key(seed, stream))
    parts = (codes,) if bits == 1 else (codes, ranges)
    return parts, Layout(dense.shape, order, x.dtype, bits)


def decode(parts: Sequence[Tensor], layout: Layout) -> Tensor:
    """Decode the tensor, up to rounding; one-bit codes give 1 for positive values, else 0."""
    if in_graph(parts[0]):
        codes, lo, hi = (parts[0], None, None) if layout.bits == 1 else parts
        dense: Tensor = _decode_graph(codes, lo, hi, layout.bits, layout.shape, layout.dtype)
    else:
        codes, ranges = (parts[0], None) if layout.bits == 1 else parts
        dense = decode_blocks(codes, ranges, layout.bits, layout.shape, layout.dtype)
    if not layout.order:
        return dense
    inverse = [0] * len(layout.order)
    for place, dim in enumerate(layout.order):
        inverse[dim] = place
    return dense.permute(inverse)


def _key(seed: Tensor | None, stream: int) -> Key:
    """The two words of the blocks' hash; they stay on the device if the seed is there."""
    if seed is None:
        return 0, 0
    if not seed.is_cpu:
        return seed, stream
    value = int(seed.item())
    return value & MASK32, ((value >> 32) + stream * GOLDEN32) & MASK32


# ---- In a compiled graph ----
#
# Two operators that consist of their decomposition alone: the front end of torch.compile traces one
# call instead of about fifty, most of its time; the compiler sees the torch operations.


def _graph_order(x: Tensor) -> tuple[int, ...]:
    """Blocks follow the memory of images in channels_last, the shape of anything else."""
    images = x.dim() == 4 and not x.is_contiguous()
    if images and x.is_contiguous(memory_format=torch.channels_last):
        return (0, 2, 3, 1)
    return ()


def _graph_blocks(dense: Tensor, width: int) -> Tensor:
    """``[blocks, width]``; the last block is padded with its own first value."""
    flat = dense.reshape(-1)
    count = flat.shape[0]
    missing = -count % width
    if missing == 0:
        return flat.view(-1, width)
    values = F.pad(flat, (0, missing)).view(-1, width)
    place = torch.arange(count + missing, device=dense.device).view(-1, width)
    return torch.where(place < count, values, values[:, :1])


def _int32(word: int) -> int:
    """The same 32 bits as an int32."""
    return word - (1 << 32) if word >= 1 << 31 else word


def _graph_mix32(value: Tensor) -> Tensor:
    """``mix32`` on int32, whose products wrap: 64-bit words are several times slower on a GPU."""
    value = value ^ ((value >> 16) & 0xFFFF)
    value = value * 0x7FEB_352D
    value = value ^ ((value >> 15) & 0x1_FFFF)
    value = value * _int32(0x846C_A68B)
    return value ^ ((value >> 16) & 0xFFFF)


def _graph_dither(count: int, seed: Tensor, stream: int) -> tuple[Tensor, Tensor]:
    """A draw ``[blocks, 1]`` and shifts ``[1, 128]``; see :func:`_shifted`."""
    low = seed.to(torch.int32)
    high = (seed >> 32).to(torch.int32) + _int32((stream * GOLDEN32) & MASK32)
    block = torch.arange(count, dtype=torch.int32, device=seed.device)
    draw = (_graph_mix32(_graph_mix32(block ^ low) ^ high) >> 9) & 0x7F_FFFF
    # Adds a zero made from data: inductor would treat products of a bare arange as indices.
    i = torch.arange(BLOCK, dtype=torch.int32, device=seed.device) + (low & 0)
    shift = ((i * _int32(GOLDEN32)) >> 9) & 0x7F_FFFF
    return draw.float()[:, None] * 2.0**-23, shift.float()[None, :] * 2.0**-23


def _shifted(draw: Tensor, shift: Tensor) -> Tensor:
    # Exact: multiples of 2**-23 below 2.
    total = draw + shift
    return torch.where(total >= 1.0, total - 1.0, total)


def _graph_encode(
    dense: Tensor, bits: int, seed: Tensor | None, stream: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, minima and maxima (empty for one bit) of values in their order."""
    if bits == 1:
        values = _graph_blocks(dense, MASK_BLOCK).view(-1, 8, BLOCK)
        # ORing bit by bit compiles to one pass; a sum over the eight would be a reduction.
        signs = (values > 0).to(torch.uint8)
        codes = signs[:, 0]
        for k in range(1, 8):
            codes = codes | (signs[:, k] << k)
        codes = _as_stored_tensor(codes)
        return codes, codes.new_empty(0), codes.new_empty(0)
    assert seed is not None
    top = 2**bits - 1
    values = _graph_blocks(dense, BLOCK).float()
    draw, shift = _graph_dither(values.shape[0], seed, stream)
    if bits == 8:
        lo, hi = values.amin(1, keepdim=True), values.amax(1, keepdim=True)
        inverse = _inverse(lo, hi, top)
        codes = _as_stored_tensor(_code(values, lo, inverse, _shifted(draw, shift), top))
        return codes, lo, hi
    # Low and high nibbles separately: one pass over 64 pairs for range and codes.
    half = BLOCK // 2
    left, right = values[:, :half], values[:, half:]
    lo = torch.minimum(left, right).amin(1, keepdim=True)
    hi = torch.maximum(left, right).amax(1, keepdim=True)
    inverse = _inverse(lo, hi, top)
    low = _code(left, lo, inverse, _shifted(draw, shift[:, :half]), top)
    high = _code(right, lo, inverse, _shifted(draw, shift[:, half:]), top)
    codes = _as_stored_tensor(low | (high << 4))
    return codes, lo, hi


def _as_stored_tensor(codes: Tensor) -> Tensor:
    """The same codes, through an operator that the partitioner treats as a tensor in memory.

    The partitioner counts fusible tensors twice, so 8-bit codes would lose against the 16-bit
    values that they encode. amin is not on its list of fusible operators. Over one element it is
    the identity: inductor makes no reduction of it and fuses it like a pointwise operator.
    """
    return codes.unsqueeze(2).amin(2)


def _inverse(lo: Tensor, hi: Tensor, top: int) -> Tensor:
    span = hi - lo
    # Both operands are tensors: torch would multiply by the reciprocal of a number.
    return torch.where(span < MIN_RANGE, 0.0, torch.full_like(span, top) / span)


def _code(values: Tensor, lo: Tensor, inverse: Tensor, dither: Tensor, top: int) -> Tensor:
    return ((values - lo) * inverse + dither).floor().clamp(0, top).to(torch.uint8)


def _graph_decode(
    codes: Tensor,
    lo: Tensor | None,
    hi: Tensor | None,
    bits: int,
    shape: Sequence[int],
    dtype: torch.dtype,
) -> Tensor:
    if bits < 8:  # [blocks, 8 // bits, bytes]: a byte's values, one bits apart
        places = torch.arange(0, 8, bits, dtype=torch.int32, device=codes.device)[:, None]
        codes = (codes.to(torch.int32)[:, None, :] >> places) & (2**bits - 1)
    if lo is None or hi is None:
        values = codes.to(dtype)
    else:
        codes = codes.reshape(-1, BLOCK)
        top = 2**bits - 1
        step = (hi - lo) / torch.full_like(hi, top)
        values = torch.where(codes == top, hi, lo + codes.float() * step).to(dtype)
    flat = values.reshape(-1)
    count = math.prod(shape)
    if flat.shape[0] != count:
        flat = flat[:count]
    return flat.view(shape)


ops.library.define(
    "encode_saved(Tensor dense, int bits, Tensor? seed, int stream) -> (Tensor, Tensor, Tensor)"
)
ops.library.define(
    "decode_saved(Tensor codes, Tensor? lo, Tensor? hi, int bits, SymInt[] shape, "
    "ScalarType dtype) -> Tensor"
)
ops.library.impl("encode_saved", _graph_encode, "CompositeImplicitAutograd")
ops.library.impl("decode_saved", _graph_decode, "CompositeImplicitAutograd")
_encode_graph: Any = torch.ops.hotcore.encode_saved.default
_decode_graph: Any = torch.ops.hotcore.decode_saved.default
