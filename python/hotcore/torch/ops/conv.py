"""Convolutions: the forward of ``F.conv2d``, the saved x, and the gradients.

Pixels are tokens: x is saved as ``[N*H*W, C]``, compressed. The products stay torch's own: backward
restores x in y's dtype and calls ``aten.convolution_backward``. A 1x1 kernel is a linear layer over
the pixels that it visits, with HOT's products in backward. On CUDA these need a low rank
(:func:`has_products`). Operators take the fields of a :class:`Window` one by one.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import _core
from ...config import ConfigLike, HotConfig, HotConfigFields
from . import calls, codes, core, linear
from .codes import Pair, compress_with_seed, once, seed_alone
from .core import parsed
from .registry import not_differentiable, operator, without_base

_DEFAULT = HotConfig()
_PADDING_MODES = ("zeros", "reflect", "replicate", "circular")
Sizes = tuple[Any, Any, Any, str, int]
"""Stride, padding, dilation, padding mode and groups of a convolution."""
_WINDOW = "int[] kernel, int[] stride, int[] padding, int[] dilation, str padding_mode, int groups"
_ARGUMENTS = (
    "Tensor x, Tensor weight, Tensor? bias, Tensor? saved, Tensor seed, str config, " + _WINDOW
)


class Window(NamedTuple):
    """Geometry of a convolution: how its kernel moves over x, heights before widths."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int, int, int]
    """left, right, top, bottom, in the order of ``F.pad``."""
    dilation: tuple[int, int]
    padding_mode: str
    groups: int

    @classmethod
    def of(cls, *fields: Any) -> Window:
        """Make a window of the lists that an operator receives."""
        *lists, padding_mode, groups = fields
        kernel, stride, padding, dilation = map(tuple, lists)
        return cls(kernel, stride, padding, dilation, padding_mode, groups)


def is_pointwise(window: Window) -> bool:
    """Whether a 1x1 kernel in one group. (Torch 2.6 cannot compile a property of dynamic sizes.)"""
    return window.kernel == (1, 1) and not any(window.padding) and window.groups == 1


def _is_int8(window: Window, config: str) -> bool:
    return is_pointwise(window) and calls.is_int8(config)


def has_products(pointwise: bool, config: HotConfig, cuda: bool) -> bool:
    """Whether HOT, and not torch, computes the products of backward: for 1x1 kernels only.

    CUDA needs a low rank, too. At full rank torch's products are faster there, over so many pixels
    of so few channels, and g_x is exact: docs/torch/convolution.md.
    """
    return pointwise and (not cuda or config.basis != "full")


@functools.lru_cache(maxsize=1024)
def settings(config: HotConfig, pointwise: bool, grid: tuple[int, int] | None) -> HotConfig:
    """The configuration that saves x's pixels, and that of HOT's products.

    A 1x1 kernel saves the same as a linear layer. ``grid``, its output height and width, replaces
    the caller's token grid, which describes a transformer's tokens; a low-pass basis takes its
    tiles from it. Any other kernel needs x itself, basis ``"full"``. A low-rank configuration then
    keeps it in INT4, which takes about the bytes of the low-rank INT8 form.
    """
    if pointwise:
        tiled = config.basis in ("lowpass", "sequency")
        return dataclasses.replace(config, token_grid=grid if tiled else None, prefix_tokens=0)
    fields: HotConfigFields = {"token_grid": None, "prefix_tokens": 0}
    if config.basis != "full":
        fields |= {"basis": "full", "rows": None, "storage": "int4"}
    return dataclasses.replace(config, **fields)


@functools.lru_cache(maxsize=256)
def _pixels_key(config: str, window: Window, dtype: torch.dtype | None, cuda: bool) -> Hashable:
    """Key of everything but x that its kept bytes depend on; ``dtype`` is autocast's."""
    storage = settings(parsed(config), is_pointwise(window), None)  # x and stride give the grid
    return ("pixels", _visits(window, config, cuda), dtype, _core.saved_format(storage.spec))


def _multiplies(window: Window, config: str, cuda: bool) -> bool:
    return has_products(is_pointwise(window), parsed(config), cuda)


def _visits(window: Window, config: str, cuda: bool) -> tuple[int, int]:
    """The stride by which x's pixels are kept."""
    return window.stride if _multiplies(window, config, cuda) else (1, 1)


# ---- what a user calls ----


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
    """A convolution, bit for bit ``F.conv2d``; of x only compressed pixels are kept.

    It gains memory alone: the products stay torch's, and g_x has the bits of the plain layer. A
    low-rank recipe keeps x in INT4. A 1x1 kernel in one group, without padding, is a linear layer
    over the pixels that it visits. With ``forward="int8"`` y is :func:`hotcore.forward_linear`'s.
    Its gradients are HOT's, on CUDA only with a low rank. Its output's grid replaces the
    configuration's ``token_grid`` and ``prefix_tokens``.

    Args:
        x: ``[N, C, H, W]`` or ``[C, H, W]``, dtypes as for :func:`linear`.
        weight: ``[O, C / groups, kh, kw]``.
        bias: ``[O]`` or None.
        stride: one number or (vertical, horizontal).
        padding: one number or (vertical, horizontal), or ``"same"`` or ``"valid"``.
        dilation: one number or (vertical, horizontal).
        groups: number of groups.
        padding_mode: ``"zeros"``, ``"reflect"``, ``"replicate"`` or ``"circular"``.
        config: a HotConfig or a recipe's name.

    Returns:
        ``[N, O, Ho, Wo]`` in the memory format of ``F.conv2d``; g_x has that of x.

    Raises:
        ValueError, NotImplementedError, RuntimeError: as :func:`linear`; also ValueError if the
            channels of weight and x do not fit.

    Source: docs/numerics.md, with L = batch x output pixels; docs/torch/convolution.md.
    """
    calls.check_tensors(bias, weight=weight)
    sizes = (stride, padding, dilation, padding_mode, groups)
    return conv2d_from_json(x, weight, bias, sizes, calls.config_json(config))


def conv2d_from_json(
    x: Tensor, weight: Tensor, bias: Tensor | None, sizes: Sizes, config_json: str
) -> Tensor:
    """:func:`conv2d` with the configuration as JSON, which compiled graphs hold as a constant."""
    arguments = (weight, bias, sizes, config_json)
    if not isinstance(x, Tensor):
        return calls.handle_overrides(conv2d_from_json, x, *arguments)
    if x.dim() == 3:
        return conv2d_from_json(x.unsqueeze(0), *arguments).squeeze(0)
    groups = sizes[-1]
    if x.dim() != 4 or weight.dim() != 4 or x.shape[1] != weight.shape[1] * groups:
        raise ValueError(
            f"x: shape {tuple(x.shape)}, weight: shape {tuple(weight.shape)}; expected "
            f"[N, C, H, W] and [O, C / {groups}, kh, kw] ({groups} groups)"
        )
    window = _window(weight, *sizes)
    if torch.compiler.is_compiling():
        return _prepared(x, weight, bias, window, config_json)
    with calls.hide_from_modes(x, weight):
        of_bias = config_json if is_pointwise(window) else ""
        seed = calls.seed_for_call("conv2d", x, weight, bias, of_bias)
        if seed is None:
            return _prepared(x, weight, bias, window, config_json)
        output: Tensor = Conv2d.apply(x, weight, bias, seed, config_json, window)  # type: ignore[no-untyped-call]  # so in torch
        return output


def _prepared(
    x: Tensor, weight: Tensor, bias: Tensor | None, window: Window, config: str
) -> Tensor:
    """A compiled call, which compresses x before the autograd function, or a plain one."""
    int8 = _is_int8(window, config)
    wanted = calls.wants_gradients(x, weight, bias, config if int8 else "")
    if not (int8 or wanted):
        return plain_conv2d(x, weight, bias, window)
    dtype = calls.autocast_dtype(x)
    inner = calls.cast(x, dtype)
    if int8:
        calls.check_dtypes(x, weight.dtype, bias, dtype)
        calls.check_transforms("conv2d", x, weight, bias)
    if not wanted:
        return _by_pixels(inner, weight, bias, window, config, wanted)
    keep = weight.requires_grad
    saved, seed = _kept_pixels_of(x, inner, config, keep, *window)
    return _conv2d(inner, weight, bias, saved if keep else None, seed, config, *window)


def _window(
    weight: Tensor, stride: Any, padding: Any, dilation: Any, padding_mode: str, groups: int
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


def plain_conv2d(x: Tensor, weight: Tensor, bias: Tensor | None, window: Window) -> Tensor:
    """The calls of ``nn.Conv2d``, empty padding included, for its bits and strides."""
    x, around = padded(x, window)
    return F.conv2d(x, weight, bias, window.stride, around, window.dilation, window.groups)


def padded(x: Tensor, window: Window) -> tuple[Tensor, list[int]]:
    """x with the padding that ``F.conv2d`` cannot make, and the padding that it makes."""
    left, right, top, bottom = window.padding
    if window.padding_mode != "zeros":
        return F.pad(x, window.padding, window.padding_mode), [0, 0]
    if (left, top) != (right, bottom):  # padding "same" of an even kernel
        x = F.pad(x, (0, right - left, 0, bottom - top))
    return x, [top, left]


def unpadded(g: Tensor, height: int, width: int, window: Window) -> Tensor:
    """The adjoint of :func:`padded`, with the bits of autograd."""
    left, right, top, bottom = window.padding
    if not any(window.padding):
        return g
    if window.padding_mode == "zeros":
        return g if (left, top) == (right, bottom) else g[:, :, :height, :width]
    if window.padding_mode == "circular":
        # F.pad copies the edges left, right, top, bottom, one after the other.
        for dim, size, before, after in ((2, height, top, bottom), (3, width, left, right)):
            inner = g.narrow(dim, before, size)
            inner.narrow(dim, 0, after).add_(g.narrow(dim, before + size, after))
            inner.narrow(dim, size - before, before).add_(g.narrow(dim, 0, before))
            g = inner
        return g
    name = {"reflect": "reflection_pad2d", "replicate": "replication_pad2d"}[window.padding_mode]
    x = g.new_empty(()).expand(*g.shape[:2], height, width)  # its values are not read
    adjoint: Tensor = getattr(torch.ops.aten, f"{name}_backward").default(g, x, window.padding)
    return adjoint


def _by_pixels(
    x: Tensor, weight: Tensor, bias: Tensor | None, window: Window, config: str, wanted: bool = True
) -> Tensor:
    """The 8-bit product of a 1x1 kernel, in the memory format of ``F.conv2d``'s result."""
    nhwc = visited(x, window.stride)
    product = linear.product if wanted else linear.undifferentiated
    y = product(_tokens(nhwc), weight.flatten(1), bias, config)
    y = y.view(*nhwc.shape[:3], weight.shape[0]).permute(0, 3, 1, 2)
    return y.contiguous(memory_format=_format_of(x, weight))


def is_channels_last(x: Tensor) -> bool:
    """Whether ``[N, C, H, W]`` is stored as ``[N, H, W, C]``; torch's rule decides ties."""
    if not x.is_contiguous(memory_format=torch.channels_last):
        return False
    if not x.is_contiguous() or x.stride(3) != 1:
        return True
    return x.shape[1] == 1 and x.stride(1) == 1 and x.shape[2] * x.shape[3] > 1


def visited(x: Tensor, stride: Sequence[int]) -> Tensor:
    """The pixels of ``[N, C, H, W]`` that a 1x1 kernel reads, as ``[N, H, W, C]``."""
    return x[:, :, :: stride[0], :: stride[1]].permute(0, 2, 3, 1)


# ---- the saved pixels ----


def _rows(x: Tensor, config: str, window: Window) -> tuple[Tensor, HotConfig]:
    """The pixels of x to be kept, ``[tokens, C]``, and the configuration that keeps them."""
    nhwc = visited(x, _visits(window, config, x.is_cuda))
    return _tokens(nhwc), _settings_of(config, is_pointwise(window), nhwc.shape[1:3])


def _settings_of(config: str, pointwise: bool, grid: Sequence[int]) -> HotConfig:
    """:func:`settings` of a grid. A graph fixes the grid's sizes if tiles are taken from it."""
    layer, tiles = parsed(config), None
    if pointwise and layer.basis in ("lowpass", "sequency"):
        tiles = (int(grid[0]), int(grid[1]))
    return settings(layer, pointwise, tiles)


def _restored(
    saved: Tensor, seed: Tensor, config: str, shape: Sequence[int], last: bool, dtype: torch.dtype
) -> Tensor:
    """x of its kept pixels, ``[N, C, H, W]``, where all were kept."""
    n, channels, height, width = shape
    storage, tokens = settings(parsed(config), False, None), n * height * width
    if core.bypasses_dispatcher(saved):
        rows = codes.decompress(saved, tokens, channels, storage, core.key_of(seed), dtype)
    else:
        rows = codes.decompress_activation(saved, seed, storage.json, tokens, channels, dtype)
    x = rows.view(n, height, width, channels).permute(0, 3, 1, 2)
    return x if last else _stored_as(x, False, dtype)


@operator(
    f"kept_pixels_of(Tensor x, Tensor inner, str config, bool codes, {_WINDOW}) -> "
    "(Tensor, Tensor)",
    composite=True,
)
def _kept_pixels_of(x: Tensor, inner: Tensor, config: str, codes: bool, *shape: Any) -> Pair:
    """``kept_of`` for pixels."""
    window = Window.of(*shape)

    def compress(pixels: Tensor) -> Pair:
        rows, storage = _rows(pixels, config, window)
        return compress_with_seed(rows, storage.json)

    key = (_pixels_key(config, window, inner.dtype, inner.is_cuda), codes)
    make = compress if codes else seed_alone
    return once(x, key, lambda: make(inner.detach()))


# ---- the forward product ----


def _flops(x_shape: Any, weight_shape: Any, *_: Any, out_shape: Any, **__: Any) -> Any:
    return 2 * math.prod(out_shape) * math.prod(weight_shape[1:])


def _plain_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, window: Window, config: str = ""
) -> Tensor:
    dtype = x.dtype  # under autocast the parameters are of another
    y = plain_conv2d(x, weight.to(dtype), None if bias is None else bias.to(dtype), window)
    # Real and fake tensors must have the same strides.
    return y.contiguous(memory_format=_format_of(x, weight))


@operator(f"convolution({_ARGUMENTS}) -> Tensor", flops=_flops, any_strides=False, product=True)
def _convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, saved: Any, seed: Any, config: str, *shape: Any
) -> Tensor:
    window = Window.of(*shape)
    convolve = _by_pixels if _is_int8(window, config) else _plain_convolution
    return convolve(x, weight, bias, window, config)


# ---- autograd ----


class Conv2d(torch.autograd.Function):
    """A convolution, eager and traced; in a graph operators before it cast and compress x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
        """Compute y. ``graph`` holds the saved pixels."""
        seed, config, window, *graph = rest
        need_gx, keep = ctx.needs_input_grad[:2]
        ctx.seed = saved = None
        saved_seed = seed
        if graph:
            (saved,) = graph
            y = _convolution(x, weight, bias, saved, seed, config, *window)
        else:
            ctx.seed, dtype = seed, calls.autocast_dtype(x)
            inner = calls.cast(x, dtype)
            if _is_int8(window, config):
                calls.check_dtypes(x, weight.dtype, bias, dtype)
                y = _by_pixels(inner, weight, bias, window, config)
            else:
                matrix, plain_bias = calls.cast(weight, dtype), calls.cast(bias, dtype)
                y = plain_conv2d(inner, matrix, plain_bias, window)
            if keep:
                rows, storage = _rows(inner, config, window)
                saved, saved_seed = codes.compress_activation(rows, seed, storage)
        for_gx = core.kept_weight(weight, keep) if need_gx else None
        ctx.save_for_backward(saved, saved_seed, for_gx)
        ctx.set_materialize_grads(False)
        ctx.config, ctx.window, ctx.x_shape = config, window, x.shape
        ctx.products = _multiplies(window, config, x.is_cuda)
        ctx.channels_last = (is_channels_last(x), is_channels_last(weight))
        ctx.dtypes = (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        return without_base(y)

    @staticmethod
    @not_differentiable
    def backward(ctx: Any, gy: Tensor) -> linear.Gradients:
        """g_x, g_w and g_b, by the operator."""
        tensors = ctx.saved_tensors
        needed = ctx.needs_input_grad[:3]
        dtypes = [dtype if need else None for dtype, need in zip(ctx.dtypes, needed, strict=True)]
        backward = _backward_pixels if ctx.products else _backward_window
        results = backward(ctx, core.dense(gy), dtypes, *tensors)
        gx, gw, gb = (g if need else None for g, need in zip(results, needed, strict=True))
        return gx, gw, gb


@operator(f"conv2d({_ARGUMENTS}) -> Tensor", flops=_flops, composite=True)
def _conv2d(
    x: Tensor, weight: Tensor, bias: Tensor | None, saved: Any, seed: Any, config: str, *shape: Any
) -> Tensor:
    calls.refuse_transforms("conv2d")
    window = Window.of(*shape)
    if not (_multiplies(window, config, x.is_cuda) or calls.is_int8(config)):
        # Under autocast both passes take one copy.
        weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
    y: Tensor = Conv2d.apply(x, weight, bias, seed, config, window, saved)  # type: ignore[no-untyped-call]  # so in torch
    return y


# ---- the backward products ----


def _format_of(x: Tensor, weight: Tensor) -> torch.memory_format:
    last = is_channels_last(x) or is_channels_last(weight)
    return torch.channels_last if last else torch.contiguous_format


def _tokens(nhwc: Tensor) -> Tensor:
    """``[N, H, W, C]`` as ``[N*H*W, C]``; a copy unless x is channels_last."""
    return nhwc.reshape(math.prod(nhwc.shape[:3]), nhwc.shape[3])  # numel() would fix sizes


def _empty(like: Tensor, shape: Sequence[int], last: bool, dtype: torch.dtype) -> Tensor:
    """``[N, C, H, W]``, stored so or (``last``) as ``[N, H, W, C]``, on the device of ``like``."""
    n, c, h, w = shape
    if last:
        return like.new_empty((n, h, w, c), dtype=dtype).permute(0, 3, 1, 2)
    return like.new_empty((n, c, h, w), dtype=dtype)


def _stored_as(values: Tensor, last: bool, dtype: torch.dtype) -> Tensor:
    """Values as :func:`_empty` would store them; no copy if they already are."""
    dense = values.permute(0, 2, 3, 1) if last else values
    dense = dense.to(dtype, memory_format=torch.contiguous_format).contiguous()
    if 1 in dense.shape:  # the usual strides there, too
        dense = dense.view(-1).view(dense.shape)
    return dense.permute(0, 3, 1, 2) if last else dense


_Dtypes = Sequence[torch.dtype | None]
"""Dtypes of g_x, g_w and g_b; None: not wanted."""


def _backward_window(
    ctx: Any, gy: Tensor, dtypes: _Dtypes, saved: Any, seed: Tensor, weight: Tensor | None
) -> linear.Gradients:
    """torch's own backward, with the restored x."""
    window, x_shape, (x_last, weight_last) = ctx.window, ctx.x_shape, ctx.channels_last
    gx_dtype, gw_dtype, gb_dtype = dtypes
    height, width = x_shape[2:]
    if gw_dtype is None or saved is None:  # torch then reads the shape of x alone
        x = _empty(gy, x_shape, x_last, gy.dtype)
    else:
        x = _restored(saved, seed, ctx.config, x_shape, x_last, gy.dtype)
    if gx_dtype is None or weight is None:
        shape = (gy.shape[1], x_shape[1] // window.groups, *window.kernel)
        weight = _empty(gy, shape, weight_last, gy.dtype)
    x, around = padded(x, window)
    x = x.to(gy.dtype)  # a backward inside of autocast pads in fp32
    weight = weight.to(gy.dtype)  # under autocast the parameters are of another
    geometry = (window.stride, around, window.dilation, False, [0, 0], window.groups)
    wanted = [dtype is not None for dtype in dtypes]
    convolution_backward = torch.ops.aten.convolution_backward.default
    gx, gw, gb = convolution_backward(gy, x, weight, [gy.shape[1]], *geometry, wanted)
    del x
    if gx_dtype is not None:
        # In x's dtype first, in which autograd, too, adds the overlaps of padded pixels.
        gx = _stored_as(unpadded(gx.to(gx_dtype), height, width, window), x_last, gx_dtype)
    if gw_dtype is not None:
        gw = _stored_as(gw, weight_last, gw_dtype)
    return gx, gw, gb if gb_dtype is None else gb.to(gb_dtype)


def _backward_pixels(
    ctx: Any, gy: Tensor, dtypes: _Dtypes, saved: Any, saved_seed: Tensor, weight: Tensor | None
) -> linear.Gradients:
    """HOT's products: a linear layer over the pixels that the kernel reads."""
    x_shape, (x_last, weight_last) = ctx.x_shape, ctx.channels_last
    nhwc = gy.permute(0, 2, 3, 1)
    config = _settings_of(ctx.config, True, nhwc.shape[1:3])
    matrix = None if dtypes[0] is None or weight is None else weight.flatten(1)
    seeds = (saved_seed, saved_seed if ctx.seed is None else ctx.seed)
    shape = torch.Size((math.prod(nhwc.shape[:3]), x_shape[1]))
    rows, gw, gb = linear.gradients(_tokens(nhwc), matrix, saved, *seeds, config, shape, dtypes)
    gx = None
    if rows is not None:
        gx = rows.view(*nhwc.shape[:3], x_shape[1]).permute(0, 3, 1, 2)
        if ctx.window.stride == (1, 1):
            gx = _stored_as(gx, x_last, gx.dtype)
        else:  # zeros for the pixels that the kernel skips
            every = _empty(gy, x_shape, x_last, gx.dtype).zero_()
            visited(every, ctx.window.stride).copy_(gx.permute(0, 2, 3, 1))
            gx = every
    if gw is not None:
        gw = _stored_as(gw.view(*gw.shape, 1, 1), weight_last, gw.dtype)
    return gx, gw, gb
