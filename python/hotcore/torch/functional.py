"""``linear`` and ``conv2d``: the forward of ``torch.nn.functional``, the backward of HOT."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C._functorch import unwrap_if_dead
from torch.autograd.function import once_differentiable

from ..config import HotConfig, as_config
from . import accumulation, conv, ops, reuse
from .conv import Window, is_channels_last

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""What HOT takes."""
_PADDING_MODES = ("zeros", "reflect", "replicate", "circular")
_DEFAULT = HotConfig()


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, config: HotConfig | str = _DEFAULT
) -> Tensor:
    """``x weight^T + bias``, bit for bit as ``F.linear``; gradients are computed with HOT.

    Of x only its compressed form is kept for backward, once for layers that follow each other with
    the same x and alike configurations (:mod:`hotcore.torch.reuse`); nothing where ``weight`` is
    frozen.
    Without anything to differentiate the result is ``F.linear``'s. Every call draws one seed from
    torch's default CPU generator, so ``torch.manual_seed`` makes a run repeatable.

    Args:
        x: ``[..., I]`` float32, float16 or bfloat16 (under autocast, what it casts to that).
        weight: ``[O, I]``.
        bias: ``[O]`` or None.
        config: a HotConfig or a recipe's name.

    Returns:
        ``[..., O]``.

    Raises:
        ValueError: x is of another dtype, or the configuration does not fit its tokens.
        NotImplementedError: inside a ``torch.func`` transform, or on a device without a backend.
        RuntimeError: when differentiated twice.

    Source: spec.md, "Stages".
    """
    text = _text(config)
    with _one_operation(x, weight):
        seed = _seed("linear", x, weight)
        if seed is None:
            return F.linear(x, weight, bias)
        return _HotLinear.call(x, weight, bias, seed, text)


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0,
    dilation: int | Sequence[int] = 1,
    padding_mode: str = "zeros",
    config: HotConfig | str = _DEFAULT,
) -> Tensor:
    """A convolution in one group, bit for bit as ``F.conv2d``; gradients are computed with HOT.

    Of x only its pixels are kept, compressed (never the unfolded x); a 1x1 kernel keeps those that
    it visits, and is a linear layer over pixels in backward. The tokens of the configuration are
    the output pixels; their grid replaces its ``token_grid`` and ``prefix_tokens``. Any other
    kernel keeps x at full rank whatever the recipe's basis, and unfolds it in backward a few images
    at a time (:mod:`hotcore.torch.conv` states the memory). ``channels_last`` saves two copies.

    Args:
        x: ``[N, C, H, W]`` or ``[C, H, W]``, dtypes as for :func:`linear`.
        weight: ``[O, C, kh, kw]``.
        bias: ``[O]`` or None.
        stride: of the kernel, one number or (vertical, horizontal).
        padding: the same, or ``"same"`` or ``"valid"``.
        dilation: as stride.
        padding_mode: ``"zeros"``, ``"reflect"``, ``"replicate"`` or ``"circular"``.
        config: a HotConfig or a recipe's name.

    Returns:
        ``[N, O, Ho, Wo]``; it and g_x have the memory format that ``F.conv2d`` gives, and x's.

    Raises:
        ValueError, NotImplementedError, RuntimeError: as :func:`linear`; ValueError, too, where
            weight has not x's channels (several groups are not taken).

    Source: spec.md, "Stages" (L is batch x pixels); docs/torch.md, "Convolution".
    """
    if x.dim() == 3:
        sizes = (stride, padding, dilation, padding_mode)
        return conv2d(x.unsqueeze(0), weight, bias, *sizes, config=config).squeeze(0)
    if x.dim() != 4 or weight.dim() != 4 or x.shape[1] != weight.shape[1]:
        raise ValueError(
            f"x: shape {tuple(x.shape)}, weight: shape {tuple(weight.shape)}; expected "
            "[N, C, H, W] and [O, C, kh, kw] (one group)"
        )
    text = _text(config)
    window = _window(weight, stride, padding, dilation, padding_mode)
    with _one_operation(x, weight):
        seed = _seed("conv2d", x, weight)
        if seed is None:
            return conv.plain_conv2d(x, weight, bias, window)
        return _HotConv2d.call(x, weight, bias, seed, text, window)


def _seed(name: str, x: Tensor, weight: Tensor) -> Tensor | None:
    """The seed of a call; None where there is nothing to differentiate."""
    compiling = torch.compiler.is_compiling()
    if not compiling and torch._C._are_functorch_transforms_active():
        raise NotImplementedError(
            f"hotcore.torch.{name}: torch.func transforms (grad, vmap, jvp, ...) are not "
            "supported; use autograd, or revert() the model"
        )
    # Always, also where nothing is to be differentiated: a checkpoint may run the same region
    # first without gradients and then with them, and has to meet the same random numbers.
    seed = ops.seed_for(x, weight, compiling)
    if not (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)):
        return None
    if compiling:
        return seed
    _check(x)
    return ops.counted(seed, x)


def _one_operation(x: Tensor, weight: Tensor) -> AbstractContextManager[Any]:
    """Hides what a layer does inside from torch-function modes, compress_saved's among them.

    They would be asked about some twenty attributes and calls, 2 us of the host's time each.
    Subclasses of Tensor may need to be asked: nothing is hidden from them.
    """
    if type(x) in ops.PLAIN and type(weight) in ops.PLAIN and not torch.compiler.is_compiling():
        inside: AbstractContextManager[Any] = torch._C.DisableTorchFunction()
        return inside
    return nullcontext()


class _Function(torch.autograd.Function):
    """An autograd function whose first three arguments are x, weight and bias."""

    @classmethod
    def call(cls, x: Tensor, weight: Tensor, bias: Tensor | None, *arguments: Any) -> Tensor:
        """What ``apply`` does, in 3 us less.

        Left out is the question for torch.func transforms, which :func:`_seed` has refused; what
        has outlived one can only be among the three.
        """
        if torch.compiler.is_compiling():
            return cls.apply(x, weight, bias, *arguments)  # type: ignore[no-any-return, no-untyped-call]  # so in torch
        inner = None if bias is None else unwrap_if_dead(bias)
        tensors = (unwrap_if_dead(x), unwrap_if_dead(weight), inner)
        base: Any = super(torch.autograd.Function, cls)
        output: Tensor = base.apply(*tensors, *arguments)
        return output


def _once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """As torch's, whose wrapper takes 2 us: used where a graph of backward is asked for."""
    refusing = once_differentiable(backward)

    @functools.wraps(backward)
    def either(ctx: Any, gy: Tensor | None) -> Any:
        return refusing(ctx, gy) if torch.is_grad_enabled() else backward(ctx, gy)

    return either


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _text(config: HotConfig | str) -> str:
    """The configuration as the operators take it; torch.compile need not look inside."""
    return as_config(config).json


def _check(x: Tensor) -> None:
    if not (x.is_cpu or x.is_meta):
        ops.context_for(x)  # a missing backend is said in forward, not in backward
    if x.dtype not in DTYPES:  # autocast leaves those alone, and casts the others to one of them
        name = str(x.dtype).removeprefix("torch.")
        raise ValueError(f"x: dtype {name}; expected float32, float16 or bfloat16")


def _autocast_dtype(x: Tensor) -> torch.dtype | None:
    """What autocast would cast x to; None: it would leave x alone."""
    device = x.device.type
    if x.dtype not in DTYPES or device == "meta" or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor if dtype is None or tensor.dtype not in DTYPES else tensor.to(dtype)


class _HotLinear(_Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, seed: Tensor, config: str
    ) -> Tensor:
        compiling = torch.compiler.is_compiling()
        dtype, inner, matrix, plain_bias = None, x, weight, bias
        if compiling or torch._C._is_any_autocast_enabled():
            # Cast here, not by autocast: its cache would keep a weight without its graph.
            dtype = _autocast_dtype(x)
            inner, matrix = _cast(x, dtype), _cast(weight, dtype)
            plain_bias = None if bias is None else _cast(bias, dtype)
        need_gx, keep = ctx.needs_input_grad[:2]
        y: Tensor
        # own_seed: None while compiling, where a seed has to travel with the saved tensors.
        saved, saved_seed, last, own_seed, shared = None, seed, None, None, None
        if compiling:
            y, kept = ops.linear(inner, matrix, plain_bias, seed, config, keep)
            saved = kept if keep else None
        else:
            y = F.linear(inner, matrix, plain_bias)
            own_seed = seed
            if keep:
                form, compress = reuse.linear_form(config, dtype), ops.compress_activation
                last = reuse.threads.last
                saved, saved_seed = last.compressed(ctx, x, form, compress, inner, seed, config)
            shared = accumulation.shared(weight, bias)
        ctx.save_for_backward(saved, saved_seed, weight if need_gx else None)
        ctx.set_materialize_grads(False)
        dtypes = (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        # One attribute: a sixth would make the context's dict grow, for as much as all the others.
        ctx.call = (config, x.shape, dtypes, shared, own_seed, last)
        return y

    @staticmethod
    @_once_differentiable
    def backward(ctx: Any, gy: Tensor | None) -> tuple[Tensor | None, ...]:
        if gy is None:
            return None, None, None, None, None
        saved, saved_seed, weight = ctx.saved_tensors
        config, shape, dtypes, shared, own_seed, last = ctx.call
        if last is not None:
            last.forget()
        need_gx, need_gw, need_gb, *_ = ctx.needs_input_grad
        gx_dtype, gw_dtype, gb_dtype = dtypes
        wanted = (
            gx_dtype if need_gx else None,
            gw_dtype if need_gw else None,
            gb_dtype if need_gb else None,
        )
        kept = saved if need_gw else None
        seeds = (saved_seed, saved_seed if own_seed is None else own_seed)
        if shared is not None:
            gx, gw, gb = shared.backward(gy, kept, *seeds, config, shape, wanted)
            return gx, gw, gb, None, None
        matrix = weight if need_gx else None
        gx, gw, gb = ops.backward_linear(gy, matrix, kept, *seeds, config, shape, *wanted)
        return gx, gw, gb, None, None


def _window(
    weight: Tensor,
    stride: int | Sequence[int],
    padding: int | Sequence[int] | str,
    dilation: int | Sequence[int],
    padding_mode: str,
) -> Window:
    kernel = (weight.shape[2], weight.shape[3])
    step, spread = _pair(stride, "stride"), _pair(dilation, "dilation")
    if padding_mode not in _PADDING_MODES:
        known = ", ".join(map(repr, _PADDING_MODES))
        raise ValueError(f"padding_mode: {padding_mode!r} is not one of {known}")
    if padding == "same":
        if step != (1, 1):
            raise ValueError(f"padding: 'same' with stride {step}; expected stride 1")
        tall, wide = (d * (k - 1) for d, k in zip(spread, kernel, strict=True))
        around = (wide // 2, wide - wide // 2, tall // 2, tall - tall // 2)
    elif padding == "valid":
        around = (0, 0, 0, 0)
    elif isinstance(padding, str):
        raise ValueError(f"padding: {padding!r} is not a number, 'same' or 'valid'")
    else:
        vertical, horizontal = _pair(padding, "padding")
        around = (horizontal, horizontal, vertical, vertical)
    return Window(kernel, step, around, spread, padding_mode)


def _pair(value: int | Sequence[int], name: str) -> tuple[int, int]:
    if isinstance(value, int):
        return value, value
    if len(value) != 2:
        raise ValueError(f"{name}: {value!r}; expected one number or (vertical, horizontal)")
    return value[0], value[1]


class _HotConv2d(_Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        seed: Tensor,
        config: str,
        window: Window,
    ) -> Tensor:
        dtype = _autocast_dtype(x)
        inner, kernel = _cast(x, dtype), _cast(weight, dtype)
        plain_bias = None if bias is None else _cast(bias, dtype)
        keep = ctx.needs_input_grad[1]
        y: Tensor
        saved, saved_seed, last, own_seed = None, seed, None, None
        if torch.compiler.is_compiling():
            y, kept = conv.conv2d(inner, kernel, plain_bias, seed, config, *window, keep)
            saved = kept if keep else None
        else:
            y = conv.plain_conv2d(inner, kernel, plain_bias, window)
            own_seed = seed
            if keep:
                form, last = conv.kept_form(config, window, dtype), reuse.threads.last
                arguments = (conv.compress_pixels, inner, seed, config, *window)
                saved, saved_seed = last.compressed(ctx, x, form, *arguments)
        weight_kept = weight if ctx.needs_input_grad[0] else None
        ctx.save_for_backward(saved, saved_seed, weight_kept)
        ctx.set_materialize_grads(False)
        ctx.config, ctx.window, ctx.last, ctx.seed = config, window, last, own_seed
        ctx.x_shape = x.shape
        ctx.channels_last = (is_channels_last(x), is_channels_last(weight))
        ctx.dtypes = (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        return y

    @staticmethod
    @_once_differentiable
    def backward(ctx: Any, gy: Tensor | None) -> tuple[Tensor | None, ...]:
        if gy is None:
            return None, None, None, None, None, None
        saved, saved_seed, weight = ctx.saved_tensors
        seed = saved_seed if ctx.seed is None else ctx.seed
        if ctx.last is not None:
            ctx.last.forget()
        need = ctx.needs_input_grad
        gx, gw, gb = conv.backward_conv2d(
            gy,
            weight if need[0] else None,
            saved if need[1] else None,
            saved_seed,
            seed,
            ctx.config,
            ctx.x_shape,
            *ctx.channels_last,
            *ctx.window,
            *(dtype if wanted else None for dtype, wanted in zip(ctx.dtypes, need, strict=False)),
        )
        return (
            gx if need[0] else None,
            gw if need[1] else None,
            gb if need[2] else None,
            None,
            None,
            None,
        )
