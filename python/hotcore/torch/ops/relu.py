"""ReLU whose backward keeps one bit a value, x > 0, in place of y. Its gradient is exact.

A byte holds values that lie 128 apart, so that no value moves to another thread. Eager mode on CUDA
runs Triton kernels (``relu_triton.py``). Elsewhere, and in compiled graphs, which fuse them with
the kernel that makes y, torch operations compute the same bytes.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from types import ModuleType
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import _compat
from .core import DTYPES
from .registry import not_differentiable, operator
from .sharded import is_dtensor

BLOCK = 1024
"""Values that share 128 bytes."""


def relu(input: Tensor, inplace: bool = False) -> Tensor:
    """``F.relu`` that keeps one bit a value for backward, in whole blocks of 1024.

    The bit is x > 0, so a NaN passes no gradient on (the NaN itself already reached the loss). The
    plain function runs where nothing is differentiated, inside of ``torch.func`` transforms, for
    other dtypes than HOT's, for nested tensors, and with a warning for DTensors.
    """
    wanted = torch.is_grad_enabled() and input.requires_grad
    if wanted and not torch.compiler.is_compiling() and _compat.transforms_active():
        wanted = False
    if wanted and is_dtensor(input):
        what = "hotcore.torch: a ReLU of a DTensor keeps its result as it is"
        warnings.warn(what, RuntimeWarning, stacklevel=2)
        wanted = False
    if not wanted or input.dtype not in DTYPES or input.is_nested or input.numel() == 0:
        return F.relu(input, inplace=inplace)
    traced = inplace and torch.compiler.is_compiling()  # no dynamo follows a dirty x rightly
    y: Tensor = _Relu.apply(input, inplace and not traced)  # type: ignore[no-untyped-call]  # so in torch
    return input.copy_(y) if traced else y


class _Relu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, inplace: bool) -> Tensor:
        if inplace:
            ctx.mark_dirty(x)
            y = x.relu_()
        else:
            y = x.relu()
        images = y.dim() == 4 and not y.is_contiguous()
        ctx.last = images and y.is_contiguous(memory_format=torch.channels_last)
        dense = y.permute(0, 2, 3, 1) if ctx.last else y
        kernels = _kernels(y)
        codes = pack_signs(dense) if kernels is None else kernels.pack_signs(dense.contiguous())
        ctx.save_for_backward(codes)
        ctx.shape = dense.shape
        return y

    @staticmethod
    @not_differentiable
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, ...]:
        (codes,) = ctx.saved_tensors
        kernels = _kernels(codes)
        unpack = unpack_signs if kernels is None else kernels.unpack_signs
        positive = unpack(codes, ctx.shape)
        if ctx.last:
            positive = positive.permute(0, 3, 1, 2)
        return torch.where(positive, gy, 0.0), None


def _kernels(x: Tensor) -> ModuleType | None:
    """The Triton kernels, for CUDA in eager mode; None for the torch operations."""
    if not x.is_cuda or torch.compiler.is_compiling() or _compat.symbolic(x):
        return None
    slower = "saved=: in eager mode torch operations give ReLU's bits several times slower"
    return _compat.triton_kernels("hotcore.torch.ops.relu_triton", slower)


# Composite operators: the front end of torch.compile traces one call instead of about twenty.


@operator()
def pack_signs(y: Tensor) -> Tensor:
    """Bytes ``[blocks, 128]``: bit k of byte i is the sign of value ``i + 128 k`` of its block."""
    flat = y.reshape(-1)
    # Not -count % BLOCK: inductor's C++ of torch 2.6 takes the remainder of a negative number.
    missing = (flat.shape[0] + BLOCK - 1) // BLOCK * BLOCK - flat.shape[0]
    if missing:
        flat = F.pad(flat, (0, missing))
    signs = (flat.view(-1, 8, BLOCK // 8) > 0).to(torch.uint8)
    codes = signs[:, 0]
    for k in range(1, 8):  # ORing compiles to one pass; a sum over the eight would be a reduction
        codes = codes | (signs[:, k] << k)
    # Through an operator that the partitioner treats as a tensor in memory: it counts fusible ones
    # twice. Over one element amin is the identity, which inductor fuses like any other.
    return codes.unsqueeze(2).amin(2)


@operator()
def unpack_signs(codes: Tensor, shape: Annotated[Sequence[int], "SymInt[]"]) -> Tensor:
    """Whether each value is positive, bool of a contiguous ``shape``."""
    places = torch.arange(8, dtype=torch.int32, device=codes.device)
    of_byte = (torch.ones_like(places) << places).to(torch.uint8)[:, None]
    signs = (codes[:, None, :] & of_byte) != 0
    return signs.reshape(-1)[: math.prod(shape)].view(shape)
