"""Triton kernels of :mod:`.blocks`, with the same bits as its torch path.

A program works on ``TILE`` blocks of 128 values. It loads a value once and stores its code once. A
4-bit byte holds the values j (low) and j + 64 of its block, a byte of signs the values j + 128 k,
so no value moves to another thread.
"""
# mypy: ignore-errors
# Triton is no dependency (torch for CUDA brings it), and its language is not typed Python.

from __future__ import annotations

import contextlib

import torch
import triton
import triton.language as tl

_TILE = 32
_BLOCK = 128
_GOLDEN32 = 0x9E3779B1
_OPTIONS = {
    "num_warps": 4,
    "enable_fp_fusion": False,
}  # fused multiply-adds would round differently


@triton.jit
def _nan_min(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _nan_max(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _mix32(v):
    v ^= v >> 16
    v *= 0x7FEB352D
    v ^= v >> 15
    v *= 0x846CA68B
    v ^= v >> 16
    return v


@triton.jit
def _draw(block, key0, key1):
    word = _mix32(_mix32(block.to(tl.uint32) ^ key0) ^ key1) >> 9
    return word.to(tl.float32) * 1.1920928955078125e-07  # 2**-23


@triton.jit
def _shift(i):
    word = (i.to(tl.uint32) * 0x9E3779B1) >> 9
    return word.to(tl.float32) * 1.1920928955078125e-07


@triton.jit
def _code(values, lo, inverse, draw, i, TOP: tl.constexpr):
    dither = draw[:, None] + _shift(i)[None, :]
    dither = tl.where(dither >= 1.0, dither - 1.0, dither)
    code = ((values - lo[:, None]) * inverse[:, None] + dither).to(tl.int32)
    return tl.minimum(code, TOP)


@triton.jit
def _inverse(lo, hi, TOP: tl.constexpr):
    span = hi - lo
    narrow = span < 7.888609052210118e-31  # 2**-100
    safe = tl.where(narrow, 1.0, span)
    return tl.where(narrow, 0.0, tl.div_rn(tl.full(safe.shape, TOP, tl.float32), safe))


@triton.jit
def _load(x, base, first, i, count, EVEN: tl.constexpr):
    place = base[:, None] + i[None, :]
    if EVEN:
        return tl.load(x + place).to(tl.float32)
    # Past the end the block's first value is used: it does not change the range.
    inside = (first[:, None] + i[None, :]) < count
    head = tl.load(x + base, mask=first < count, other=0.0).to(tl.float32)
    values = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    return tl.where(inside, values, head[:, None])


@triton.jit(do_not_specialize=["key0", "key1"])
def _compress_kernel(
    x, codes, ranges, seed, count, blocks, per_row, pitch, key0, key1,
    BITS: tl.constexpr, TILE: tl.constexpr, PITCHED: tl.constexpr, EVEN: tl.constexpr,
    SEEDED: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    first = block * 128
    base = first
    if PITCHED:
        base = (block // per_row) * pitch + (block % per_row) * 128
    known = block < blocks
    low, high = key0.to(tl.uint32), key1.to(tl.uint32)
    if SEEDED:  # the words are on the device; the arguments are added
        word = tl.load(seed)
        low += word.to(tl.uint32)
        high += (word >> 32).to(tl.uint32)
    draw = _draw(block, low, high)
    if BITS == 8:
        i = tl.arange(0, 128)
        values = _load(x, base, first, i, count, EVEN)
        lo = tl.reduce(values, 1, _nan_min)
        hi = tl.reduce(values, 1, _nan_max)
        code = _code(values, lo, _inverse(lo, hi, 255), draw, i, 255).to(tl.uint8)
        place = codes + block[:, None] * 128 + i[None, :]
    else:
        i = tl.arange(0, 64)
        left = _load(x, base, first, i, count, EVEN)
        right = _load(x, base, first, i + 64, count, EVEN)
        lo = tl.reduce(_nan_min(left, right), 1, _nan_min)
        hi = tl.reduce(_nan_max(left, right), 1, _nan_max)
        inverse = _inverse(lo, hi, 15)
        low = _code(left, lo, inverse, draw, i, 15)
        high = _code(right, lo, inverse, draw, i + 64, 15)
        code = (low | (high << 4)).to(tl.uint8)
        place = codes + block[:, None] * 64 + i[None, :]
    if EVEN:
        tl.store(place, code)
        tl.store(ranges + 2 * block, lo)
        tl.store(ranges + 2 * block + 1, hi)
    else:
        tl.store(place, code, mask=known[:, None])
        tl.store(ranges + 2 * block, lo, mask=known)
        tl.store(ranges + 2 * block + 1, hi, mask=known)


@triton.jit
def _value(code, lo, hi, TOP: tl.constexpr):
    step = tl.div_rn(hi - lo, tl.full(lo.shape, TOP, tl.float32))
    between = lo[:, None] + code.to(tl.float32) * step[:, None]
    return tl.where(code == TOP, hi[:, None], between)


@triton.jit
def _store(out, values, first, i, count, EVEN: tl.constexpr):
    place = first[:, None] + i[None, :]
    if EVEN:
        tl.store(out + place, values.to(out.dtype.element_ty))
    else:
        tl.store(out + place, values.to(out.dtype.element_ty), mask=place < count)


@triton.jit
def _restore_kernel(
    codes, ranges, out, count, blocks,
    BITS: tl.constexpr, TILE: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    first = block * 128
    known = block < blocks
    lo = tl.load(ranges + 2 * block, mask=known, other=0.0)
    hi = tl.load(ranges + 2 * block + 1, mask=known, other=0.0)
    if BITS == 8:
        i = tl.arange(0, 128)
        place = codes + block[:, None] * 128 + i[None, :]
        code = tl.load(place, mask=known[:, None], other=0).to(tl.int32)
        _store(out, _value(code, lo, hi, 255), first, i, count, EVEN)
    else:
        i = tl.arange(0, 64)
        place = codes + block[:, None] * 64 + i[None, :]
        code = tl.load(place, mask=known[:, None], other=0).to(tl.int32)
        _store(out, _value(code & 15, lo, hi, 15), first, i, count, EVEN)
        _store(out, _value(code >> 4, lo, hi, 15), first, i + 64, count, EVEN)


@triton.jit
def _compress_signs_kernel(x, codes, count, blocks, TILE: tl.constexpr):
    block = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    i = tl.arange(0, 128)
    byte = tl.zeros((TILE, 128), tl.int32)
    for k in tl.static_range(8):
        place = block[:, None] * 1024 + k * 128 + i[None, :]
        values = tl.load(x + place, mask=place < count, other=0.0).to(tl.float32)
        byte |= tl.where(values > 0, 1 << k, 0)
    place = codes + block[:, None] * 128 + i[None, :]
    tl.store(place, byte.to(tl.uint8), mask=(block < blocks)[:, None])


@triton.jit
def _restore_signs_kernel(codes, out, count, blocks, TILE: tl.constexpr):
    block = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    i = tl.arange(0, 128)
    place = codes + block[:, None] * 128 + i[None, :]
    byte = tl.load(place, mask=(block < blocks)[:, None], other=0).to(tl.int32)
    for k in tl.static_range(8):
        place = block[:, None] * 1024 + k * 128 + i[None, :]
        sign = ((byte >> k) & 1).to(out.dtype.element_ty)
        tl.store(out + place, sign, mask=place < count)


def compress(
    dense: torch.Tensor,
    codes: torch.Tensor,
    ranges: torch.Tensor,
    bits: int,
    key: tuple[int, int] | tuple[torch.Tensor, int],
) -> None:
    """Fill codes and ranges; the dimensions of ``dense`` are in memory order.

    ``key`` is a ``blocks.Key``.
    """
    seed, stream = key
    seeded = isinstance(seed, torch.Tensor)
    words = (0, (stream * _GOLDEN32) & 0xFFFFFFFF) if seeded else key
    # Not triton.cdiv, which takes 2 us of the host's time.
    count, blocks = dense.numel(), codes.shape[0]
    with _current_device(dense.device):
        if bits == 1:
            flat = dense.reshape(-1).contiguous()  # a view may have a stride
            grid = (-(-blocks // 4),)
            _compress_signs_kernel[grid](flat, codes, count, blocks, TILE=4, **_OPTIONS)
            return
        rows = (count, count) if dense.is_contiguous() else _rows(dense)
        if rows is None:
            dense, rows = dense.contiguous(), (count, count)
        columns, pitch = rows
        grid = (-(-blocks // _TILE),)
        _compress_kernel[grid](
            dense,
            codes,
            ranges,
            seed if seeded else codes,
            count,
            blocks,
            max(1, columns // _BLOCK),
            pitch,
            _signed(words[0]),
            _signed(words[1]),
            BITS=bits,
            TILE=_TILE,
            PITCHED=columns != count,
            EVEN=count % (_BLOCK * _TILE) == 0,
            SEEDED=seeded,
            **_OPTIONS,
        )


def restore(codes: torch.Tensor, ranges: torch.Tensor, bits: int, out: torch.Tensor) -> None:
    """Fill ``out``, contiguous, of any shape."""
    count, blocks = out.numel(), codes.shape[0]
    with _current_device(out.device):
        if bits == 1:
            grid = (-(-blocks // 4),)
            _restore_signs_kernel[grid](codes, out, count, blocks, TILE=4, **_OPTIONS)
            return
        even = count % (_BLOCK * _TILE) == 0
        grid = (-(-blocks // _TILE),)
        _restore_kernel[grid](
            codes, ranges, out, count, blocks, BITS=bits, TILE=_TILE, EVEN=even, **_OPTIONS
        )


def _rows(dense: torch.Tensor) -> tuple[int, int] | None:
    """(columns, pitch) if memory is rows of whole blocks at one pitch; otherwise None."""
    columns, pitch, inner = 1, 0, 1
    for size, stride in zip(reversed(dense.shape), reversed(dense.stride()), strict=True):
        if size == 1:
            continue
        if pitch:
            if stride != pitch * inner:
                return None
            inner *= size
        elif stride == columns:
            columns *= size
        elif columns % _BLOCK == 0:
            pitch, inner = stride, size
        else:
            return None
    return columns, pitch or columns


def _signed(word: int) -> int:
    """The word as an int32, so that every key uses the same compiled kernel."""
    return word - (1 << 32) if word >= 1 << 31 else word


def _current_device(device: torch.device):
    """A context that makes ``device`` current; cheap if it already is."""
    if torch.cuda.current_device() == device.index:
        return contextlib.nullcontext()
    return torch.cuda.device(device)
