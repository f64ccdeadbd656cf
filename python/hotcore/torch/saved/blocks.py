"""Blocks of codes, in eager mode: 8 or 4 bits per value, or one exact sign.

A block of 128 values keeps its minimum and maximum, and for each value a stochastically rounded
code between them. One bit is x > 0, eight of them in a byte.

On CUDA, Triton kernels (``blocks_triton.py``) read every value once and write it once, near the
bandwidth of the memory. Eager torch operations would pass over the data about ten times. On the
CPU, and on CUDA without Triton, torch operations compute the same bits.

Error, of a value x of a block with ``lo = min``, ``hi = max`` and b bits: ``|x' - x| <= (hi - lo) /
(2**b - 1)``, plus one rounding to the tensor's dtype. The expectation over the seed is x, within
2**-15 of that step (plus the dtype's rounding again). ``lo`` and ``hi`` are exact, so blocks of one
or two values are exact, too. A range below 2**-100 counts as 0. A block with NaN or Inf, or whose
range overflows float32, decodes to NaN or Inf.

Random numbers: the roundings of a block share one draw, shifted by multiples of the golden ratio.
Each is unbiased, but they are not independent.

Memory: ``1 + 8/128`` bytes per value at 8 bits, ``0.5 + 8/128`` at 4, 1/8 at one.

Source: blockwise min-max codes with stochastic rounding as in ActNN (Chen et al., ICML 2021).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import ModuleType

import torch
from torch import Tensor

from .. import _compat

BLOCK = 128
"""Values that share a minimum and a maximum."""

MASK_BLOCK = 1024
"""Values whose signs share 128 bytes (one bit each)."""

CHUNK_VALUES = 1 << 20
"""Values that the torch path processes at a time."""

MIN_RANGE = 2.0**-100  # of a block; narrower blocks count as constant
MASK32 = 0xFFFF_FFFF
GOLDEN32 = 0x9E37_79B1

Key = tuple[int, int] | tuple[Tensor, int]
"""Two 32-bit words; or a tensor on the device that holds them (an int64, low word first), and a
number that distinguishes the tensors that share it."""


def memory_order(tensor: Tensor) -> tuple[int, ...] | None:
    """Dimensions from the outermost in memory to the innermost; None if elements overlap.

    Empty for a contiguous tensor, which needs no permutation.
    """
    if tensor.is_contiguous():
        return ()
    stride, shape = tensor.stride(), tensor.shape
    order = tuple(sorted(range(tensor.dim()), key=lambda i: (stride[i], shape[i]), reverse=True))
    extent = 1
    for i in reversed(order):
        if shape[i] == 1:
            continue
        if stride[i] < extent:
            return None
        extent = stride[i] * (shape[i] - 1) + extent
    return order


def encode_blocks(dense: Tensor, bits: int, key: Key) -> tuple[Tensor, Tensor]:
    """Codes ``[blocks, bytes]`` and ranges ``[blocks, 2]`` (none for one bit) of any values.

    The dimensions of ``dense`` are in memory order.
    """
    width = MASK_BLOCK if bits == 1 else BLOCK
    blocks = -(-dense.numel() // width)
    device = dense.device
    codes = torch.empty((blocks, width * bits // 8), dtype=torch.uint8, device=device)
    ranges = torch.empty((0 if bits == 1 else blocks, 2), dtype=torch.float32, device=device)
    if blocks == 0:
        return codes, ranges
    kernels = _kernels(device)
    if kernels is not None:
        kernels.compress(dense, codes, ranges, bits, key)
    else:
        _compress(dense.reshape(-1), codes, ranges, bits, key)
    return codes, ranges


def decode_blocks(
    codes: Tensor, ranges: Tensor | None, bits: int, shape: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """Decode to a contiguous tensor; one-bit codes decode to 1 for positive values, else 0."""
    dense = torch.empty(shape, dtype=dtype, device=codes.device)
    if dense.numel() == 0:
        return dense
    kernels = _kernels(dense.device)
    if kernels is not None:
        kernels.restore(codes, ranges, bits, dense)
    else:
        _restore(codes, ranges, bits, dense.view(-1))
    return dense


def _kernels(device: torch.device) -> ModuleType | None:
    """The Triton kernels, for CUDA; None for the torch path."""
    if device.type != "cuda":
        return None
    slower = "saved=: in eager mode torch operations give the same bits several times slower"
    return _compat.triton_kernels("hotcore.torch.saved.blocks_triton", slower)


def mix32(value: Tensor) -> Tensor:
    """A hash of 32-bit words kept in int64 (lowbias32 of Ellis, 2018)."""
    value = value ^ (value >> 16)
    value = (value * 0x7FEB_352D) & MASK32
    value = value ^ (value >> 15)
    value = (value * 0x846C_A68B) & MASK32
    return value ^ (value >> 16)


def _words(key: Key) -> tuple[Tensor | int, Tensor | int]:
    seed, stream = key
    if isinstance(seed, int):
        return seed, stream
    return seed & MASK32, ((seed >> 32) + stream * GOLDEN32) & MASK32


def _dither(first: int, blocks: int, key: Key, device: torch.device) -> Tensor:
    """Uniform numbers ``[blocks, 128]`` in [0, 1), multiples of 2**-23.

    Value i of a block gets ``frac(u + i * phi)``, where u is the block's draw.
    """
    block = torch.arange(first, first + blocks, dtype=torch.int64, device=device)
    low, high = _words(key)
    draw = mix32(mix32((block & MASK32) ^ low) ^ high) >> 9
    i = torch.arange(BLOCK, dtype=torch.int64, device=device)
    shift = ((i * GOLDEN32) & MASK32) >> 9
    sums = (draw[:, None] + shift) & 0x7F_FFFF
    return sums.float() * 2.0**-23


def _chunks(blocks: int, width: int) -> Iterator[tuple[int, int]]:
    step = CHUNK_VALUES // width
    for first in range(0, blocks, step):
        yield first, min(first + step, blocks)


def _compress(flat: Tensor, codes: Tensor, ranges: Tensor, bits: int, key: Key) -> None:
    """Fill codes and ranges from flat ``[N]``, with torch operations."""
    width = MASK_BLOCK if bits == 1 else BLOCK
    for first, last in _chunks(len(codes), width):
        part = flat[first * width : last * width].float()
        missing = (last - first) * width - len(part)
        if missing:  # repeating the last value changes no range
            part = torch.cat([part, part[-1:].expand(missing)])
        values = part.view(last - first, width)
        if bits == 1:
            signs = (values > 0).view(-1, 8, BLOCK).to(torch.uint8)
            weights = (2 ** torch.arange(8, device=flat.device)).to(torch.uint8)[:, None]
            codes[first:last] = (signs * weights).sum(1, dtype=torch.uint8)
            continue
        top = 2**bits - 1
        lo, hi = values.aminmax(dim=1, keepdim=True)
        span = hi - lo
        # Both operands are tensors: torch would multiply by the reciprocal of a number.
        inverse = torch.where(span < MIN_RANGE, 0.0, torch.full_like(span, top) / span)
        dither = _dither(first, last - first, key, flat.device)
        code = ((values - lo) * inverse).add_(dither).floor_().clamp_(0, top).to(torch.uint8)
        if bits == 4:
            code = code[:, : BLOCK // 2] | (code[:, BLOCK // 2 :] << 4)
        codes[first:last] = code
        ranges[first:last] = torch.cat([lo, hi], dim=1)


def _restore(codes: Tensor, ranges: Tensor | None, bits: int, flat: Tensor) -> None:
    """Fill flat ``[N]`` from codes and ranges, with torch operations."""
    width = MASK_BLOCK if bits == 1 else BLOCK
    for first, last in _chunks(len(codes), width):
        code = codes[first:last]
        if bits == 1:
            shifts = torch.arange(8, dtype=torch.uint8, device=codes.device)[:, None]
            values = ((code[:, None, :] >> shifts) & 1).float()
        else:
            if bits == 4:
                code = torch.cat([code & 15, code >> 4], dim=1)
            assert ranges is not None
            top = 2**bits - 1
            lo, hi = ranges[first:last, :1], ranges[first:last, 1:]
            step = (hi - lo) / torch.full_like(hi, top)
            values = torch.where(code == top, hi, lo + code.float() * step)
        part = flat[first * width : last * width]
        part.copy_(values.reshape(-1)[: len(part)])
