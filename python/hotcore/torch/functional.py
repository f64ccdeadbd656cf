"""``linear`` and ``conv2d``: the forward of ``torch.nn.functional``, the backward of HOT."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual
from torch.overrides import handle_torch_function, has_torch_function

from ..config import RECIPE_TEXTS, ConfigLike, HotConfig, as_config
from . import _compat, accumulation, conv, forward, input_cache, ops
from .conv import Window, is_channels_last

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Dtypes that HOT supports."""
_PADDING_MODES = ("zeros", "reflect", "replicate", "circular")
_DEFAULT = HotConfig()
Sizes = tuple[Any, Any, Any, str, int]
"""Stride, padding, dilation, padding mode and groups of a convolution."""


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, config: ConfigLike = _DEFAULT
) -> Tensor:
    """``x weight^T + bias``, bit for bit as ``F.linear``; gradients are computed with HOT.

    With ``forward="int8"`` in the configuration it is :func:`hotcore.forward_linear` of x, as
    autocast casts it, and of the parameters as they are; the gradients are the same.

    Backward keeps only the compressed x, and nothing of x where ``weight`` is frozen. Consecutive
    layers with the same x and configurations that compress it alike share one compressed x
    (:mod:`hotcore.torch.input_cache`). Without anything to differentiate the result is the same.
    Every call draws one seed from torch's default CPU generator, so ``torch.manual_seed`` makes a
    run repeatable.

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
        RuntimeError: when differentiated twice: in a backward pass with ``create_graph=True``.

    Source: docs/numerics.md.
    """
    return linear_from_json(x, weight, bias, _config_json(config))


def linear_from_json(
    x: Tensor, weight: Tensor, bias: Tensor | None, config_json: str, defer: bool = False
) -> Tensor:
    """:func:`linear` with the configuration as JSON, which compiled graphs hold as a constant.

    With ``defer`` the partitioner of a compiled graph decides when x is compressed. It keeps the
    codes, or has backward compress an x that is available there anyway (a norm of a kept tensor).
    """
    if not isinstance(x, Tensor):
        return _handle_overrides(linear_from_json, x, weight, bias, config_json, defer)
    if torch.compiler.is_compiling():
        return _compiled_linear(x, weight, bias, config_json, defer)
    with _hide_from_modes(x, weight):
        seed = seed_for_call("linear", x, weight, bias, config_json)
        if seed is None:
            return _without_gradients(x, weight, bias, config_json)
        output: Tensor = _HotLinear.apply(x, weight, bias, seed, config_json)  # type: ignore[no-untyped-call]  # so in torch
        return output


def evaluated_linear(x: Tensor, weight: Tensor, bias: Tensor | None, config_json: str) -> Tensor:
    """:func:`linear_from_json` for layers in eval mode that keep their 8-bit forward.

    It draws a seed only where gradients are wanted, which are HOT's.
    """
    if not isinstance(x, Tensor):
        return _handle_overrides(evaluated_linear, x, weight, bias, config_json)
    if _wants_gradients(x, weight, bias, config_json):
        return linear_from_json(x, weight, bias, config_json)
    if torch.compiler.is_compiling():
        return _without_gradients(x, weight, bias, config_json)
    with _hide_from_modes(x, weight):
        return _without_gradients(x, weight, bias, config_json)


def frozen_linear(x: Tensor, weight: ops.Frozen, bias: Tensor | None, config_json: str) -> Tensor:
    """A linear layer of whose weight only codes exist: gradients of x and bias, by HOT.

    Without a configuration (an empty text) it is the plain layer with the dequantised weight, in
    forward and backward, and draws no seed.
    """
    if not isinstance(x, Tensor):
        return _handle_overrides(frozen_linear, x, weight, bias, config_json)
    if torch.compiler.is_compiling():
        return _frozen_linear(x, weight, bias, config_json)
    with _hide_from_modes(x, weight.codes):
        return _frozen_linear(x, weight, bias, config_json)


def _frozen_linear(x: Tensor, weight: ops.Frozen, bias: Tensor | None, config_json: str) -> Tensor:
    compiled, seed = torch.compiler.is_compiling(), None
    if config_json and not compiled:
        seed = seed_for_call("linear", x, weight.codes, bias, config_json)
    wanted = torch.is_grad_enabled() and (
        x.requires_grad or (bias is not None and bias.requires_grad)
    )
    dtype = _autocast_dtype(x)
    inner = _cast(x, dtype)
    if config_json:
        _check_dtypes(x, weight.dtype, bias, dtype)
        _check_transforms("linear", x, bias)
    elif not wanted or (not compiled and (_compat.transforms_active() or _compat.jit_tracing())):
        # In operations that anything can follow.
        matrix = ops.dequantized(ops.for_product(weight, inner.dtype)).to(inner.dtype)
        return F.linear(inner, matrix, None if bias is None else _cast(bias, dtype))
    if not wanted:
        return ops.frozen_product(inner, bias, None, config_json, weight)
    x_codes = None
    if not forward.is_int8(config_json):
        if compiled and config_json:
            _, seed = ops.kept_of(x, inner, config_json, False)
    elif compiled:
        x_codes, _, seed = ops.input_of(x, inner, config_json, False)
    elif ops.bypasses_dispatcher(inner, weight.codes):
        x_codes = forward.Input(x, inner, config_json).codes()
    product = ops.frozen_linear if compiled else ops.apply_frozen_linear
    y: Tensor = product(inner, bias, seed, config_json, *weight, x_codes)
    return y


def _without_gradients(x: Tensor, weight: Tensor, bias: Tensor | None, config_json: str) -> Tensor:
    if not forward.is_int8(config_json):
        return F.linear(x, weight, bias)
    dtype = _autocast_dtype(x)
    _check_dtypes(x, weight.dtype, bias, dtype)
    _check_transforms("linear", x, weight, bias)
    if torch.compiler.is_compiling():
        operator = torch.ops.hotcore.forward_linear.default
        output: Tensor = operator(_cast(x, dtype), weight, bias, config_json)
        return output
    return forward.linear(_cast(x, dtype), weight, bias, config_json)


def _wants_gradients(x: Tensor, weight: Tensor, bias: Tensor | None, config_json: str) -> bool:
    """Whether HOT's backward is wanted. A plain forward leaves a bias alone to autograd."""
    if not torch.is_grad_enabled():
        return False
    if x.requires_grad or weight.requires_grad:
        return True
    return bias is not None and bias.requires_grad and forward.is_int8(config_json)


def _check_dtypes(
    x: Tensor, weight: torch.dtype, bias: Tensor | None, autocast: torch.dtype | None
) -> None:
    """What ``F.linear`` would refuse, an 8-bit forward refuses, too."""
    if not torch.compiler.is_compiling():
        _check(x)
    for name, dtype in (("weight", weight), ("bias", None if bias is None else bias.dtype)):
        if dtype is None:
            continue
        if dtype not in DTYPES or (autocast is None and dtype != x.dtype):
            found = str(dtype).removeprefix("torch.")
            expected = str(x.dtype).removeprefix("torch.")
            raise ValueError(f"{name}: dtype {found}; x has {expected}, and autocast is off")


def _check_transforms(name: str, *tensors: Tensor | None) -> None:
    """Refuse what would not see an 8-bit forward: it is one call, without a derivative."""
    if torch.compiler.is_compiling():
        return
    found = [tensor for tensor in tensors if tensor is not None]
    unpacked = map(unpack_dual, found)
    if _compat.transforms_active() or any(dual.tangent is not None for dual in unpacked):
        raise _unsupported_transform(name)


def _compiled_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, config_json: str, defer: bool
) -> Tensor:
    if not _wants_gradients(x, weight, bias, config_json):
        return _without_gradients(x, weight, bias, config_json)
    dtype = _autocast_dtype(x)
    if forward.is_int8(config_json):
        _check_dtypes(x, weight.dtype, bias, dtype)
    inner = _cast(x, dtype)  # in the graph, where the compiler fuses it with the producer of x
    keep, codes = weight.requires_grad and not defer, None
    if forward.is_int8(config_json):
        codes, saved, seed = ops.input_of(x, inner, config_json, keep)
    else:
        saved, seed = ops.kept_of(x, inner, config_json, keep)
    kept = saved if keep else None
    y: Tensor = ops.linear(inner, weight, bias, kept, seed, config_json, codes)
    return y


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    padding_mode: str = "zeros",
    config: ConfigLike = _DEFAULT,
) -> Tensor:
    """A convolution, bit for bit as ``F.conv2d``, of whose x only compressed pixels are kept.

    A 1x1 kernel in one group, without padding, is a linear layer over the pixels that it visits:
    its gradients are computed with HOT, and with ``forward="int8"`` in the configuration y is
    :func:`hotcore.forward_linear`'s. Its tokens are the output pixels; their grid replaces the
    ``token_grid`` and ``prefix_tokens`` of the configuration.

    Any other kernel gains memory alone: its products stay torch's, in forward and backward. It
    keeps x whole whatever the recipe's basis (a low-rank recipe's in INT4) and restores it in
    backward (:mod:`hotcore.torch.conv`): g_x has the plain layer's bits, g_w is that of the
    restored x. ``channels_last`` saves copies.

    Args:
        x: ``[N, C, H, W]`` or ``[C, H, W]``, dtypes as for :func:`linear`.
        weight: ``[O, C / groups, kh, kw]``.
        bias: ``[O]`` or None.
        stride: of the kernel, one number or (vertical, horizontal).
        padding: the same, or ``"same"`` or ``"valid"``.
        dilation: as stride.
        groups: as of ``F.conv2d``.
        padding_mode: ``"zeros"``, ``"reflect"``, ``"replicate"`` or ``"circular"``.
        config: a HotConfig or a recipe's name.

    Returns:
        ``[N, O, Ho, Wo]`` in the memory format of ``F.conv2d``; g_x has that of x.

    Raises:
        ValueError, NotImplementedError, RuntimeError: as :func:`linear`; also ValueError if the
            channels of weight and x do not fit.

    Source: docs/numerics.md, with L = batch x output pixels; docs/torch/convolution.md.
    """
    sizes = (stride, padding, dilation, padding_mode, groups)
    return conv2d_from_json(x, weight, bias, sizes, _config_json(config))


def conv2d_from_json(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    sizes: Sizes,
    config_json: str,
) -> Tensor:
    """:func:`conv2d` with the configuration as JSON."""
    if not isinstance(x, Tensor):
        return _handle_overrides(conv2d_from_json, x, weight, bias, sizes, config_json)
    if x.dim() == 3:
        return conv2d_from_json(x.unsqueeze(0), weight, bias, sizes, config_json).squeeze(0)
    groups = sizes[-1]
    if x.dim() != 4 or weight.dim() != 4 or x.shape[1] != weight.shape[1] * groups:
        raise ValueError(
            f"x: shape {tuple(x.shape)}, weight: shape {tuple(weight.shape)}; expected "
            f"[N, C, H, W] and [O, C / {groups}, kh, kw] ({groups} groups)"
        )
    window = _window(weight, *sizes)
    if torch.compiler.is_compiling():
        return _compiled_conv2d(x, weight, bias, window, config_json)
    with _hide_from_modes(x, weight):
        seed = seed_for_call(
            "conv2d", x, weight, bias, config_json if conv.is_pointwise(window) else ""
        )
        if seed is None:
            return _conv2d_without_gradients(x, weight, bias, window, config_json)
        output: Tensor = _HotConv2d.apply(x, weight, bias, seed, config_json, window)  # type: ignore[no-untyped-call]  # so in torch
        return output


def evaluated_conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    sizes: Sizes,
    config_json: str,
) -> Tensor:
    """As :func:`evaluated_linear`; for a kernel with an 8-bit forward."""
    if not isinstance(x, Tensor):
        return _handle_overrides(evaluated_conv2d, x, weight, bias, sizes, config_json)
    if x.dim() == 3:
        return evaluated_conv2d(x.unsqueeze(0), weight, bias, sizes, config_json).squeeze(0)
    if x.dim() != 4 or _wants_gradients(x, weight, bias, config_json):
        return conv2d_from_json(x, weight, bias, sizes, config_json)
    window = _window(weight, *sizes)
    if torch.compiler.is_compiling():
        return _conv2d_without_gradients(x, weight, bias, window, config_json)
    with _hide_from_modes(x, weight):
        return _conv2d_without_gradients(x, weight, bias, window, config_json)


def _conv2d_without_gradients(
    x: Tensor, weight: Tensor, bias: Tensor | None, window: Window, config_json: str
) -> Tensor:
    if not (conv.is_pointwise(window) and forward.is_int8(config_json)):
        return conv.plain_conv2d(x, weight, bias, window)
    dtype = _autocast_dtype(x)
    _check_dtypes(x, weight.dtype, bias, dtype)
    _check_transforms("conv2d", x, weight, bias)
    inner = _cast(x, dtype)
    if torch.compiler.is_compiling():
        product = functools.partial(torch.ops.hotcore.forward_linear.default, config=config_json)
        return conv.by_pixels(inner, weight, bias, window, product)
    return conv.by_pixels(inner, weight, bias, window, _pixel_product(config_json))


def _pixel_product(config_json: str) -> Callable[..., Tensor]:
    def product(rows: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
        return forward.linear(rows, matrix, bias, config_json)

    return product


def _compiled_conv2d(
    x: Tensor, weight: Tensor, bias: Tensor | None, window: Window, config_json: str
) -> Tensor:
    if not _wants_gradients(x, weight, bias, config_json if conv.is_pointwise(window) else ""):
        return _conv2d_without_gradients(x, weight, bias, window, config_json)
    dtype = _autocast_dtype(x)
    if conv.is_pointwise(window) and forward.is_int8(config_json):
        _check_dtypes(x, weight.dtype, bias, dtype)
    inner = _cast(x, dtype)
    keep = weight.requires_grad
    saved, seed = conv.kept_pixels_of(x, inner, config_json, keep, *window)
    y: Tensor = conv.conv2d(
        inner, weight, bias, saved if keep else None, seed, config_json, *window
    )
    return y


def _handle_overrides(function: Callable[..., Tensor], x: Any, *arguments: Any) -> Tensor:
    """Pass the call to the ``__torch_function__`` of x; torch.fx's proxies record it so."""
    if not has_torch_function((x,)):
        raise TypeError(f"x: {type(x).__name__}; expected a torch.Tensor")
    output: Tensor = handle_torch_function(function, (x,), x, *arguments)
    return output


def seed_for_call(
    name: str, x: Tensor, weight: Tensor, bias: Tensor | None = None, config_json: str = ""
) -> Tensor | None:
    """The seed of a call in eager mode; None if there is nothing to differentiate."""
    if _compat.transforms_active():
        raise _unsupported_transform(name)
    # A seed is drawn even if nothing is differentiated: a checkpoint may run a region without and
    # then with gradients, and must see the same random numbers.
    try:
        seed = ops.seed_for(x)
    except RuntimeError as error:
        if "vmap" in str(error):  # torch.autograd's vmap, which transforms_active() does not report
            raise _unsupported_transform(name) from error
        raise
    if not _wants_gradients(x, weight, bias, config_json):
        return None
    if _compat.jit_tracing():
        raise NotImplementedError(
            f"hotcore.torch.{name}: torch.jit.trace would turn the random seed into a constant; "
            "trace the model in eval mode or under no_grad, or use torch.compile to train"
        )
    _check(x)
    return seed


def _unsupported_transform(name: str) -> NotImplementedError:
    return NotImplementedError(
        f"hotcore.torch.{name}: torch.func transforms (grad, vmap, jvp, ...) and forward mode are "
        "not supported; use autograd, or revert() the model"
    )


def _hide_from_modes(x: Tensor, weight: Tensor) -> AbstractContextManager[Any]:
    """Hide a layer's inner calls from torch-function modes, such as those of ``convert(saved=)``.

    A mode would see about twenty attributes and calls, at 2 us of host time each. Nothing is hidden
    from subclasses of Tensor, which may need to see the calls.
    """
    if type(x) in ops.PLAIN_TYPES and type(weight) in ops.PLAIN_TYPES:
        return _compat.without_torch_function()
    return nullcontext()


def _config_json(config: ConfigLike) -> str:
    """The configuration as the operators take it; torch.compile can trace this function."""
    if isinstance(config, HotConfig):
        return config.json
    if isinstance(config, str) and config in RECIPE_TEXTS:
        return RECIPE_TEXTS[config]
    return as_config(config).json  # raises


def _check(x: Tensor) -> None:
    if not (x.is_cpu or x.is_meta):
        ops.context_for(x)  # reports a missing backend in forward, not in backward
    if (
        x.dtype not in DTYPES
    ):  # autocast leaves such dtypes alone, and casts others to a supported one
        name = str(x.dtype).removeprefix("torch.")
        raise ValueError(f"x: dtype {name}; expected float32, float16 or bfloat16")


def _autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype that autocast would cast x to; None if it would leave x alone."""
    device = x.device.type
    if x.dtype not in DTYPES or device == "meta" or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor if dtype is None or tensor.dtype not in DTYPES else tensor.to(dtype)


class _HotLinear(torch.autograd.Function):
    """A linear layer in eager mode."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, seed: Tensor, config: str
    ) -> Tensor:
        dtype, inner, matrix, plain_bias = None, x, weight, bias
        int8 = forward.is_int8(config)
        if _compat.any_autocast():
            # Cast here, because autocast's cache would keep a weight without its graph.
            dtype = _autocast_dtype(x)
            inner = _cast(x, dtype)
            if not int8:  # which takes the parameters as they are
                matrix = _cast(weight, dtype)
                plain_bias = None if bias is None else _cast(bias, dtype)
        need_gx, keep = ctx.needs_input_grad[:2]
        # The codes' seed is saved with them: a checkpoint may recompute both.
        saved, saved_seed, cache, codes = None, seed, None, None
        compress: Callable[..., Tensor] = ops.compress_activation
        if int8:
            _check_dtypes(x, weight.dtype, bias, dtype)
            if ops.bypasses_dispatcher(inner, weight):
                both = forward.Input(x, inner, config)
                codes, compress = both.codes, both.compress
        if keep:
            cache, key = input_cache.current(), input_cache.linear_key(config, dtype)
            arguments = (compress, inner, seed, config)
            saved, saved_seed = cache.get_or_compress(ctx, x, weight, key, *arguments)
        if int8:
            found = None if codes is None else codes()
            y = forward.linear(inner, weight, bias, config, found)
        else:
            y = F.linear(inner, matrix, plain_bias)
        ctx.save_for_backward(saved, saved_seed, weight if need_gx else None)
        ctx.set_materialize_grads(False)
        ctx.config, ctx.x_shape, ctx.seed, ctx.cache = config, x.shape, seed, cache
        ctx.dtypes = (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        ctx.shared = accumulation.shared(weight, bias)
        return ops.without_base(y)

    @staticmethod
    @ops.not_differentiable
    def backward(ctx: Any, gy: Tensor | None) -> tuple[Tensor | None, ...]:
        if gy is None:
            return None, None, None, None, None
        saved, saved_seed, weight = ctx.saved_tensors
        if ctx.cache is not None:
            ctx.cache.clear()
        need_gx, need_gw, need_gb, *_ = ctx.needs_input_grad
        gx_dtype, gw_dtype, gb_dtype = ctx.dtypes
        wanted = (
            gx_dtype if need_gx else None,
            gw_dtype if need_gw else None,
            gb_dtype if need_gb else None,
        )
        common = (saved if need_gw else None, saved_seed, ctx.seed, ctx.config, ctx.x_shape)
        if ctx.shared is not None:
            gx, gw, gb = ctx.shared.backward(gy, *common, wanted)
        else:
            gx, gw, gb = ops.backward_linear(gy, weight if need_gx else None, *common, *wanted)
        return gx, gw, gb, None, None


def _window(
    weight: Tensor,
    stride: int | Sequence[int],
    padding: int | Sequence[int] | str,
    dilation: int | Sequence[int],
    padding_mode: str,
    groups: int,
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
    return Window(kernel, step, around, spread, padding_mode, groups)


def _pair(value: int | Sequence[int], name: str) -> tuple[int, int]:
    if isinstance(value, int):
        return value, value
    if len(value) != 2:
        raise ValueError(f"{name}: {value!r}; expected one number or (vertical, horizontal)")
    return value[0], value[1]


class _HotConv2d(torch.autograd.Function):
    """A convolution in eager mode."""

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
        inner = _cast(x, dtype)
        if conv.is_pointwise(window) and forward.is_int8(config):
            _check_dtypes(x, weight.dtype, bias, dtype)
            product = _pixel_product(config)
            y = conv.by_pixels(inner, weight, bias, window, product)
        else:
            plain_bias = None if bias is None else _cast(bias, dtype)
            y = conv.plain_conv2d(inner, _cast(weight, dtype), plain_bias, window)
        need_gx, keep = ctx.needs_input_grad[:2]
        saved, saved_seed, cache = None, seed, None
        if keep:
            cache, key = input_cache.current(), conv.pixels_key(config, window, dtype)
            arguments = (conv.compress_pixels, inner, seed, config, *window)
            saved, saved_seed = cache.get_or_compress(ctx, x, weight, key, *arguments)
        ctx.save_for_backward(saved, saved_seed, weight if need_gx else None)
        ctx.set_materialize_grads(False)
        ctx.config, ctx.window, ctx.cache, ctx.seed = config, window, cache, seed
        ctx.x_shape = x.shape
        ctx.channels_last = (is_channels_last(x), is_channels_last(weight))
        ctx.dtypes = (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        return ops.without_base(y)

    @staticmethod
    @ops.not_differentiable
    def backward(ctx: Any, gy: Tensor | None) -> tuple[Tensor | None, ...]:
        if gy is None:
            return None, None, None, None, None, None
        gy = ops.dense(gy)
        saved, saved_seed, weight = ctx.saved_tensors
        if ctx.cache is not None:
            ctx.cache.clear()
        gx, gw, gb = conv.gradients(
            gy,
            (weight, saved, saved_seed, ctx.seed),
            ctx.config,
            ctx.x_shape,
            ctx.channels_last,
            ctx.window,
            ctx.needs_input_grad,
            ctx.dtypes,
        )
        return gx, gw, gb, None, None, None
