"""Activations and normalisations whose backward pass uses codes instead of saved tensors.

Forward gives the bits of the plain function. If nothing is differentiated, the plain function runs,
but a seed is still drawn: a checkpoint may run a region without and then with gradients, and must
see the same random numbers.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import ops
from ..ops import DTYPES
from .blocks import BLOCK, memory_order
from .codes import decode, draw_seed, encode, in_graph

aten: Any = torch.ops.aten

EXACT_ENOUGH = 8
"""Fewest bits with which a layer's x, needed for g_w, may be recomputed from codes. With 4 bits the
error of the recomputed x is no longer small compared with that of x's own codes."""

_GELU_COEFFICIENT = math.sqrt(2.0 / math.pi)


def _gelu_new(x: Tensor) -> Tensor:
    """The arithmetic of transformers' NewGELUActivation."""
    inner = _GELU_COEFFICIENT * (x + 0.044715 * torch.pow(x, 3.0))
    return 0.5 * x * (1.0 + torch.tanh(inner))


def _gelu_fast(x: Tensor) -> Tensor:
    """The arithmetic of transformers' FastGELUActivation."""
    return 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x)))


def _gelu_quick(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def _gelu_quick_backward(gy: Tensor, x: Tensor) -> Tensor:
    gate = torch.sigmoid(1.702 * x)
    return gy * (gate * (1 + 1.702 * x * (1 - gate)))


def _gelu_backward(gy: Tensor, x: Tensor) -> Tensor:
    gx: Tensor = aten.gelu_backward(gy, x)
    return gx


def _gelu_tanh_backward(gy: Tensor, x: Tensor) -> Tensor:
    gx: Tensor = aten.gelu_backward(gy, x, approximate="tanh")
    return gx


def _silu_backward(gy: Tensor, x: Tensor) -> Tensor:
    gx: Tensor = aten.silu_backward(gy, x)
    return gx


def _mish_backward(gy: Tensor, x: Tensor) -> Tensor:
    gx: Tensor = aten.mish_backward(gy, x)
    return gx


def _hardswish_backward(gy: Tensor, x: Tensor) -> Tensor:
    gx: Tensor = aten.hardswish_backward(gy, x)
    return gx


ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "gelu": (F.gelu, _gelu_backward),
    "gelu_tanh": (lambda x: F.gelu(x, approximate="tanh"), _gelu_tanh_backward),
    "gelu_new": (_gelu_new, _gelu_tanh_backward),
    "gelu_fast": (_gelu_fast, _gelu_tanh_backward),
    "gelu_quick": (_gelu_quick, _gelu_quick_backward),
    "silu": (F.silu, _silu_backward),
    "mish": (F.mish, _mish_backward),
    "hardswish": (F.hardswish, _hardswish_backward),
}
"""Name -> (forward, backward): backward takes g_y and x, and gives g_x."""


def _differentiable(*tensors: Tensor | None) -> bool:
    """Whether anything is differentiated, as codes support it; no DTensors, no nested tensors."""
    given = [t for t in tensors if t is not None]
    wanted = torch.is_grad_enabled() and any(t.requires_grad for t in given)
    if wanted and any(map(ops.is_dtensor, given)):
        what = "hotcore.torch: an operation on DTensors keeps its input uncompressed"
        warnings.warn(what, RuntimeWarning, stacklevel=4)
        return False
    fits = given[0].dtype in DTYPES and not given[0].is_nested
    return wanted and fits and given[0].numel() > 0


def _by_token(x: Tensor, dims: int = 1) -> bool:
    """Whether no block of codes holds values of two tokens; else a warning says so.

    A block has one range for its values: beside a token 100 times as large, the codes of another
    would say nothing. The last ``dims`` dimensions are a token's; of an image ``[N, C, H, W]`` an
    activation's neighbours are pixels, which blocks may mix.
    """
    width = math.prod(x.shape[-dims:])
    images = dims == 1 and x.dim() == 4
    order = None if in_graph(x) or x.is_contiguous() else memory_order(x)
    last = tuple(range(x.dim() - dims, x.dim()))
    innermost = not order or order[-dims:] == last
    if images or (innermost and (width % BLOCK == 0 or width == x.numel())):
        return True
    warnings.warn(
        f"hotcore.torch: an operation on {width} features keeps its input uncompressed: codes come "
        f"in blocks of {BLOCK} values, which would hold parts of two tokens",
        RuntimeWarning,
        stacklevel=4,
    )
    return False


_Kept = list[tuple[Any, ...]]
"""Holds what a forward pass saves, so that backward can recompute other tensors from it."""


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seed: Tensor, name: str, bits: int, kept: _Kept) -> Tensor:
        y = ACTIVATIONS[name][0](x)
        parts, ctx.layout = encode(x, bits, seed)
        kept.append((parts, ctx.layout))
        ctx.name = name
        ctx.save_for_backward(*parts)
        return y

    @staticmethod
    @ops.not_differentiable
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, ...]:
        x = decode(ctx.saved_tensors, ctx.layout)
        return ACTIVATIONS[ctx.name][1](gy, x), None, None, None, None


def activation(x: Tensor, name: str, bits: int) -> Tensor:
    """One of :data:`ACTIVATIONS`; saves codes of its input.

    Args:
        x: any shape.
        name: a key of :data:`ACTIVATIONS`.
        bits: 8 or 4.

    Returns:
        A tensor like x.

    The gradient is that of the function at x', the decoded value (:func:`encode` bounds
    ``|x' - x|``).
    """
    if torch.compiler.is_compiling():
        y: Tensor = torch.ops.hotcore.saved_activation.default(x, name, bits)
        return y
    return _activation(x, name, bits)


def _activation(x: Tensor, name: str, bits: int) -> Tensor:
    seed = draw_seed(x)
    if not _differentiable(x) or not _by_token(x):
        return ACTIVATIONS[name][0](x)
    kept: _Kept = []
    y: Tensor = _Activation.apply(x, seed, name, bits, kept)  # type: ignore[no-untyped-call]  # so in torch
    if bits == EXACT_ENOUGH:
        ops.register_restore(y, lambda: ACTIVATIONS[name][0](decode(*kept[-1])))
    return y


class _Relu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, inplace: bool) -> Tensor:
        if inplace:
            ctx.mark_dirty(x)
            y = x.relu_()
        else:
            y = x.relu()
        parts, ctx.layout = encode(y, 1, None)
        ctx.save_for_backward(*parts)
        return y

    @staticmethod
    @ops.not_differentiable
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, ...]:
        sign = decode(ctx.saved_tensors, ctx.layout)
        return torch.where(sign > 0, gy, 0.0), None


def relu(x: Tensor, inplace: bool = False) -> Tensor:
    """``F.relu`` that saves one bit per value; gradients are exact.

    The bit is x > 0, so a NaN passes no gradient on (the NaN itself already reached the loss).
    """
    if not _differentiable(x):
        return F.relu(x, inplace=inplace)
    traced = inplace and torch.compiler.is_compiling()  # no dynamo follows a dirty x rightly
    y: Tensor = _Relu.apply(x, inplace and not traced)  # type: ignore[no-untyped-call]  # so in torch
    return x.copy_(y) if traced else y


class _ReluSquared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seed: Tensor, bits: int) -> Tensor:
        root = x.relu()
        parts, ctx.layout = encode(root, bits, seed)
        ctx.save_for_backward(*parts)
        return root.square()

    @staticmethod
    @ops.not_differentiable
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, ...]:
        return gy * (2 * decode(ctx.saved_tensors, ctx.layout)), None, None


def relu_squared(x: Tensor, bits: int) -> Tensor:
    """``relu(x)**2`` that saves codes of ``relu(x)``; zeros stay exact zeros."""
    if torch.compiler.is_compiling():
        y: Tensor = torch.ops.hotcore.saved_relu_squared.default(x, bits)
        return y
    return _relu_squared(x, bits)


def _relu_squared(x: Tensor, bits: int) -> Tensor:
    seed = draw_seed(x)
    if not _differentiable(x) or not _by_token(x):
        return x.relu().square()
    y: Tensor = _ReluSquared.apply(x, seed, bits)  # type: ignore[no-untyped-call]  # so in torch
    return y


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, seed: Tensor, name: str, bits: int) -> Tensor:
        y = ACTIVATIONS[name][0](gate) * up
        kept_gate, ctx.gate_layout = encode(gate, bits, seed)
        kept_up, ctx.up_layout = encode(up, bits, seed, stream=1)
        ctx.name, ctx.parts = name, len(kept_gate)
        ctx.save_for_backward(*kept_gate, *kept_up)
        return y

    @staticmethod
    @ops.not_differentiable
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        gate = decode(saved[: ctx.parts], ctx.gate_layout)
        up = decode(saved[ctx.parts :], ctx.up_layout)
        forward, backward = ACTIVATIONS[ctx.name]
        return backward(gy * up, gate), gy * forward(gate), None, None, None


def gated(gate: Tensor, up: Tensor, name: str, bits: int) -> Tensor:
    """``act(gate) * up`` (SwiGLU, GeGLU) that saves codes of both inputs.

    Args:
        gate: any shape.
        up: the same shape and dtype.
        name: the activation, a key of :data:`ACTIVATIONS`.
        bits: 8 or 4.
    """
    if torch.compiler.is_compiling():
        y: Tensor = torch.ops.hotcore.saved_gated.default(gate, up, name, bits)
        return y
    return _gated(gate, up, name, bits)


def _gated(gate: Tensor, up: Tensor, name: str, bits: int) -> Tensor:
    seed = draw_seed(gate)
    alike = gate.shape == up.shape and gate.dtype == up.dtype
    if not _differentiable(gate, up) or not alike or not (_by_token(gate) and _by_token(up)):
        return ACTIVATIONS[name][0](gate) * up
    y: Tensor = _Gated.apply(gate, up, seed, name, bits)  # type: ignore[no-untyped-call]  # so in torch
    return y


def _float32_under_autocast(x: Tensor) -> bool:
    """Whether autocast makes normalisations compute in float32 (on CUDA, not on the CPU)."""
    return x.is_cuda and x.dtype in DTYPES and torch.is_autocast_enabled("cuda")


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        seed: Tensor,
        shape: Sequence[int],
        eps: float,
        bits: int,
        kept: _Kept,
    ) -> Tensor:
        y, mean, rstd = torch.native_layer_norm(x, shape, weight, bias, eps)
        parts, ctx.layout = encode(x, bits, seed)
        kept.append((parts, ctx.layout, mean, rstd))
        ctx.shape = shape
        ctx.save_for_backward(weight, bias, mean, rstd, *parts)
        return y

    @staticmethod
    @ops.not_differentiable
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, ...]:
        weight, bias, mean, rstd, *parts = ctx.saved_tensors
        x = decode(parts, ctx.layout)
        mask = [ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.needs_input_grad[2]]
        gx, gw, gb = aten.native_layer_norm_backward(
            gy, x, ctx.shape, mean, rstd, weight, bias, mask
        )
        return (
            gx if mask[0] else None,
            gw if mask[1] else None,
            gb if mask[2] else None,
            *(None,) * 5,
        )


def layer_norm(
    x: Tensor,
    shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    bits: int = 8,
) -> Tensor:
    """``F.layer_norm`` that saves codes of x, and mean and 1/std exactly.

    Gradients of x, weight and bias are those of layer_norm at x' (see :func:`activation`) with the
    exact statistics.
    """
    if torch.compiler.is_compiling():
        y: Tensor = torch.ops.hotcore.saved_layer_norm.default(x, shape, weight, bias, eps, bits)
        return y
    return _layer_norm(x, shape, weight, bias, eps, bits)


def _layer_norm(
    x: Tensor,
    shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    bits: int,
) -> Tensor:
    seed = draw_seed(x)
    if not _differentiable(x, weight, bias) or not _by_token(x, len(shape)):
        return F.layer_norm(x, shape, weight, bias, eps)
    if _float32_under_autocast(x):
        x = x.float()
        weight = None if weight is None else weight.float()
        bias = None if bias is None else bias.float()
    kept: _Kept = []
    y: Tensor = _LayerNorm.apply(x, weight, bias, seed, shape, eps, bits, kept)  # type: ignore[no-untyped-call]  # so in torch

    dtype = y.dtype  # restore must not hold y

    def restore() -> Tensor:
        parts, layout, mean, rstd = kept[-1]
        again: Tensor = (decode(parts, layout) - mean) * rstd
        again = again if weight is None else again * weight.detach()
        again = again if bias is None else again + bias.detach()
        return again.to(dtype)

    if bits == EXACT_ENOUGH:
        ops.register_restore(y, restore)
    return y


def _rms_torch(x: Tensor, weight: Tensor | None, dims: tuple[int, ...], eps: Any) -> Tensor:
    return F.rms_norm(x, x.shape[-len(dims) :], weight, eps)


def _rms_llama(x: Tensor, weight: Any, dims: tuple[int, ...], eps: Any) -> Tensor:
    """The arithmetic of transformers' LlamaRMSNorm."""
    wide = x.to(torch.float32)
    variance = wide.pow(2).mean(-1, keepdim=True)
    wide = wide * torch.rsqrt(variance + eps)
    y: Tensor = weight * wide.to(x.dtype)
    return y


def _rms_timm(x: Tensor, weight: Tensor | None, dims: tuple[int, ...], eps: Any) -> Tensor:
    """The arithmetic of timm's rms_norm."""
    y = x * torch.rsqrt(torch.mean(x.pow(2), dim=dims, keepdim=True) + eps)
    return y if weight is None else y * weight


def _rms_eps(dtype: torch.dtype) -> float:
    """The default eps of F.rms_norm: in old versions of torch that of the dtype."""
    tiny = torch.full((1,), 2.0**-20).to(dtype)  # its square is negligible beside either eps
    found = float((tiny.double() / F.rms_norm(tiny, (1,)).double()) ** 2)
    choices = (torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
    return min(choices, key=lambda eps: abs(math.log(eps / found)))


RMS_EPS = {dtype: _rms_eps(dtype) for dtype in DTYPES}
"""eps of F.rms_norm by default."""

RMS_FORMS = {"torch": _rms_torch, "llama": _rms_llama, "timm": _rms_timm}
"""The same formula with different orders of casts and products."""


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        seed: Tensor,
        dims: tuple[int, ...],
        eps: float | None,
        form: str,
        bits: int,
        kept: _Kept,
    ) -> Tensor:
        y = RMS_FORMS[form](x, weight, dims, eps)
        least = RMS_EPS[x.dtype] if eps is None else eps
        rstd = torch.rsqrt(x.float().pow(2).mean(dims, keepdim=True) + least)
        parts, ctx.layout = encode(x, bits, seed)
        kept.append((parts, ctx.layout, rstd))
        ctx.dims, ctx.x_dtype = dims, x.dtype
        ctx.save_for_backward(weight, rstd, *parts)
        return y

    @staticmethod
    @ops.not_differentiable
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, ...]:
        weight, rstd, *parts = ctx.saved_tensors
        normal = decode(parts, ctx.layout).float() * rstd
        gy = gy.float()
        need_gx, need_gw = ctx.needs_input_grad[:2]
        gx, gw = None, None
        if need_gx:
            inner = gy if weight is None else gy * weight.float()
            mean = (inner * normal).mean(ctx.dims, keepdim=True)
            gx = ((inner - normal * mean) * rstd).to(ctx.x_dtype)
        if need_gw:
            gw = (gy * normal).sum_to_size(weight.shape).to(weight.dtype)
        return gx, gw, *(None,) * 6


def rms_norm(
    x: Tensor,
    shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    bits: int = 8,
    form: str = "torch",
) -> Tensor:
    """``F.rms_norm`` that saves codes of x, and 1/rms exactly.

    ``form`` selects the arithmetic of the forward pass, a key of :data:`RMS_FORMS`. Gradients are
    as for :func:`layer_norm`.
    """
    if torch.compiler.is_compiling():
        y: Tensor = torch.ops.hotcore.saved_rms_norm.default(x, shape, weight, eps, bits, form)
        return y
    return _rms_norm(x, shape, weight, eps, bits, form)


def _rms_norm(
    x: Tensor,
    shape: Sequence[int],
    weight: Tensor | None,
    eps: float | None,
    bits: int,
    form: str,
) -> Tensor:
    seed = draw_seed(x)
    dims = tuple(range(-len(shape), 0))
    if not _differentiable(x, weight) or not _by_token(x, len(shape)):
        return RMS_FORMS[form](x, weight, dims, eps)
    kept: _Kept = []
    y: Tensor = _RmsNorm.apply(x, weight, seed, dims, eps, form, bits, kept)  # type: ignore[no-untyped-call]  # so in torch

    dtype = y.dtype  # restore must not hold y

    def restore() -> Tensor:
        parts, layout, rstd = kept[-1]
        again: Tensor = decode(parts, layout).float() * rstd
        again = again if weight is None else again * weight.detach()
        return again.to(dtype)

    if bits == EXACT_ENOUGH:
        ops.register_restore(y, restore)
    return y


# In compiled graphs a call is an operator that consists of the function alone: AOTAutograd traces
# into it, and can cache the compiled result.
for _schema, _made in (
    ("saved_activation(Tensor x, str name, int bits) -> Tensor", _activation),
    ("saved_relu_squared(Tensor x, int bits) -> Tensor", _relu_squared),
    ("saved_gated(Tensor gate, Tensor up, str name, int bits) -> Tensor", _gated),
    (
        "saved_layer_norm(Tensor x, SymInt[] shape, Tensor? weight, Tensor? bias, float eps, "
        "int bits) -> Tensor",
        _layer_norm,
    ),
    (
        "saved_rms_norm(Tensor x, SymInt[] shape, Tensor? weight, float? eps, int bits, str form)"
        " -> Tensor",
        _rms_norm,
    ),
):
    ops.library.define(_schema)
    ops.library.impl(_schema.partition("(")[0], _made, "CompositeImplicitAutograd")
