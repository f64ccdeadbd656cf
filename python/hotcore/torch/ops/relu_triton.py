"""Triton kernels of :mod:`.relu`, with the same bytes as its torch operations.

A thread holds a byte: it loads eight values that lie 128 apart, or stores them.
"""
# mypy: ignore-errors
# Triton is no dependency (torch for CUDA brings it), and its language is not typed Python.

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

_TILE = 4  # blocks of 1024 values that a program works on


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
        tl.store(out + place, ((byte >> k) & 1).to(tl.uint8), mask=place < count)


def pack_signs(y: torch.Tensor) -> torch.Tensor:
    """Bytes ``[blocks, 128]`` of the signs of y, contiguous."""
    blocks = -(-y.numel() // 1024)  # not triton.cdiv, which takes 2 us of the host's time
    codes = torch.empty((blocks, 128), dtype=torch.uint8, device=y.device)
    with torch.cuda.device(y.device):
        grid = (-(-blocks // _TILE),)
        _compress_signs_kernel[grid](y, codes, y.numel(), blocks, TILE=_TILE)
    return codes


def unpack_signs(codes: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Whether each value is positive, bool of a contiguous ``shape``."""
    out = torch.empty(shape, dtype=torch.uint8, device=codes.device)
    with torch.cuda.device(codes.device):
        grid = (-(-codes.shape[0] // _TILE),)
        _restore_signs_kernel[grid](codes, out, math.prod(shape), codes.shape[0], TILE=_TILE)
    return out.view(torch.bool)
