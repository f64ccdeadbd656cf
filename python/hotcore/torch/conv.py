"""The saved x of a convolution, and its gradients.

The operators ``torch.ops.hotcore.compress_pixels`` and ``torch.ops.hotcore.backward_conv2d``.

Pixels are tokens, ``[N, H, W, C]``. The forward pass saves the pixels of x, compressed as
``[N*H*W, C]``.

* A 1x1 kernel is a linear layer over the pixels that it visits: integer products in backward.
* Any other kernel keeps torch's own products. Backward restores x in y's dtype and calls
  ``aten.convolution_backward``: g_x has the bits of the plain layer, since it does not depend on x;
  g_w and g_b are those of the restored x. That needs one x in y's dtype beside the results, and one
  more where a padding mode other than zeros pads it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..config import HotConfig, HotConfigFields, Key
from . import input_cache, ops


class Window(NamedTuple):
    """How a convolution's kernel moves over x, heights before widths."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int, int, int]
    """left, right, top, bottom, in the order of ``F.pad``."""
    dilation: tuple[int, int]
    padding_mode: str
    groups: int

    @classmethod
    def of(
        cls,
        kernel: Sequence[int],
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        padding_mode: str,
        groups: int,
    ) -> Window:
        """From the lists that an operator receives."""
        kh, kw = kernel
        sh, sw = stride
        left, right, top, bottom = padding
        dh, dw = dilation
        return cls((kh, kw), (sh, sw), (left, right, top, bottom), (dh, dw), padding_mode, groups)


def is_pointwise(window: Window) -> bool:
    """A 1x1 kernel in one group: a linear layer over (every stride-th) pixel.

    No property of the class: torch 2.6 cannot compile one whose tuple holds dynamic sizes.
    """
    return window.kernel == (1, 1) and not any(window.padding) and window.groups == 1


@functools.lru_cache(maxsize=1024)
def settings(config: HotConfig, pointwise: bool, grid: tuple[int, int] | None) -> HotConfig:
    """The configuration that saves x's pixels and, of a 1x1 kernel, makes the products.

    A 1x1 kernel saves the same as a linear layer. ``grid``, its output height and width, replaces
    the caller's token grid, which describes a transformer's tokens; a low-pass basis takes its
    tiles from it. Any other kernel needs x itself (basis ``"full"``): in the storage of a full
    basis or of a token storage, otherwise in INT4, which takes about the bytes of the low-rank
    INT8 form.
    """
    if pointwise:
        tiled = config.basis in ("lowpass", "sequency")
        return dataclasses.replace(config, token_grid=grid if tiled else None, prefix_tokens=0)
    fields: HotConfigFields = {"token_grid": None, "prefix_tokens": 0}
    if config.basis != "full":
        fields |= {"basis": "full", "rows": None}
        if config.storage == "int8":
            fields |= {"storage": "int4", "x_scale": "channel"}
    return dataclasses.replace(config, **fields)


@functools.lru_cache(maxsize=256)
def pixels_key(config: str, window: Window, dtype: torch.dtype | None) -> Hashable:
    """Key of everything but x that :func:`compress_pixels`'s bytes depend on.

    ``dtype`` is the one autocast casts x to.
    """
    kept = settings(ops.parsed(config), is_pointwise(window), None)  # x and stride give the grid
    visits = window.stride if is_pointwise(window) else (1, 1)
    return ("pixels", visits, dtype, input_cache.config_key(kept))


def plain_conv2d(x: Tensor, weight: Tensor, bias: Tensor | None, window: Window) -> Tensor:
    """The same calls as ``nn.Conv2d``, empty padding included: the same bits and strides."""
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
    """The adjoint of :func:`padded`, with the bits of autograd's."""
    left, right, top, bottom = window.padding
    if not any(window.padding):
        return g
    if window.padding_mode == "zeros":
        return g[:, :, :height, :width]
    if window.padding_mode == "circular":
        # F.pad copies the edges left, right, top, bottom, one after the other.
        for dim, size, before, after in ((2, height, top, bottom), (3, width, left, right)):
            inner = g.narrow(dim, before, size)
            inner.narrow(dim, 0, after).add_(g.narrow(dim, before + size, after))
            inner.narrow(dim, size - before, before).add_(g.narrow(dim, 0, before))
            g = inner
        return g
    name = {"reflect": "reflection_pad2d", "replicate": "replication_pad2d"}[window.padding_mode]
    x = g.new_empty(()).expand(*g.shape[:2], height, width)  # of whose values nothing is read
    adjoint = getattr(torch.ops.aten, f"{name}_backward").default
    found: Tensor = adjoint(g, x, window.padding)
    return found


def by_pixels(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    window: Window,
    product: Callable[[Tensor, Tensor, Tensor | None], Tensor],
) -> Tensor:
    """A 1x1 convolution by ``product(rows, weight as [O, C], bias)``, rows being its pixels.

    In the memory format of ``F.conv2d``'s result.
    """
    nhwc = visited(x, window)
    y = product(_tokens(nhwc), weight.flatten(1), bias)
    y = y.view(*nhwc.shape[:3], weight.shape[0]).permute(0, 3, 1, 2)
    return y.contiguous(memory_format=_format_of(x, weight))


def is_channels_last(x: Tensor) -> bool:
    """Whether ``[N, C, H, W]`` is stored as ``[N, H, W, C]``; what is both goes by torch's rule."""
    if not x.is_contiguous(memory_format=torch.channels_last):
        return False
    if not x.is_contiguous() or x.stride(3) != 1:
        return True
    return x.shape[1] == 1 and x.stride(1) == 1 and x.shape[2] * x.shape[3] > 1


def visited(x: Tensor, window: Window) -> Tensor:
    """``[N, C, H, W]`` as ``[N, H, W, C]``; for a 1x1 kernel only the pixels that it reads."""
    if is_pointwise(window):
        x = x[:, :, :: window.stride[0], :: window.stride[1]]
    return x.permute(0, 2, 3, 1)


_WINDOW = "int[] kernel, int[] stride, int[] padding, int[] dilation, str padding_mode, int groups"
ops.library.define(f"compress_pixels(Tensor x, Tensor seed, str config, {_WINDOW}) -> Tensor")
ops.library.define(
    f"compress_pixels_seeded(Tensor x, str config, {_WINDOW}) -> (Tensor, Tensor)",
    tags=(torch.Tag.nondeterministic_seeded,),
)
ops.library.define(
    f"kept_pixels_of(Tensor x, Tensor inner, str config, bool codes, {_WINDOW}) -> (Tensor, Tensor)"
)
_CONV2D = (
    "(Tensor x, Tensor weight, Tensor? bias, Tensor? saved, Tensor seed, str config, "
    f"{_WINDOW}) -> Tensor"
)
ops.library.define(f"conv2d{_CONV2D}")
ops.library.define(f"convolution{_CONV2D}")
ops.library.define(
    "backward_conv2d(Tensor gy, Tensor? weight, Tensor? saved, Tensor? saved_seed, Tensor seed, "
    f"str config, SymInt[] x_shape, bool x_last, bool weight_last, {_WINDOW}, "
    "ScalarType? gx_dtype, ScalarType? gw_dtype, ScalarType? gb_dtype) -> (Tensor, Tensor, Tensor)"
)


def _compress_pixels(x: Tensor, seed: Tensor, config: str, *shape: Any) -> Tensor:
    window = Window.of(*shape)
    nhwc = visited(x, window)
    grid = (nhwc.shape[1], nhwc.shape[2])
    kept = settings(ops.parsed(config), is_pointwise(window), grid)
    return ops.compress(_tokens(nhwc), kept, ops.key_of(seed))


def _fake_compress_pixels(x: Tensor, seed: Tensor, config: str, *shape: Any) -> Tensor:
    window = Window.of(*shape)
    n, height, width, channels = visited(x, window).shape
    kept = settings(ops.parsed(config), is_pointwise(window), None)  # a grid changes no size
    size = ops.saved_bytes(n * height * width, channels, kept)
    return torch.empty(size, dtype=torch.uint8, device=x.device)


def _compress_pixels_seeded(x: Tensor, config: str, *shape: Any) -> ops.Pair:
    seed = ops.draw_seed(x)
    return _compress_pixels(x, seed, config, *shape), seed


def _fake_compress_pixels_seeded(x: Tensor, config: str, *shape: Any) -> ops.Pair:
    seed = torch.empty((), dtype=torch.int64, device=x.device)
    return _fake_compress_pixels(x, seed, config, *shape), seed


def _kept_pixels_of(x: Tensor, inner: Tensor, config: str, codes: bool, *shape: Any) -> ops.Pair:
    """``kept_of`` of ops.py for pixels."""

    def compress(pixels: Tensor) -> ops.Pair:
        operator = torch.ops.hotcore.compress_pixels_seeded.default
        kept: ops.Pair = operator(pixels, config, *shape)
        return kept

    key = (config, codes, Window.of(*shape))
    return ops.compress_once(x, inner, key, compress if codes else None)


def _conv2d(*arguments: Any) -> Tensor:
    y: Tensor = _Conv2d.apply(*arguments)  # type: ignore[no-untyped-call]  # so in torch
    return y


def _convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    saved: Tensor | None,
    seed: Tensor,
    config: str,
    *shape: Any,
) -> Tensor:
    window, own = Window.of(*shape), ops.parsed(config)
    if own.forward == "int8" and is_pointwise(window):

        def product(rows: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
            return ops.forward(rows, matrix, bias, own)

        return by_pixels(x, weight, bias, window, product)
    return _plain_convolution(x, weight, bias, window)


def _plain_convolution(x: Tensor, weight: Tensor, bias: Tensor | None, window: Window) -> Tensor:
    dtype = x.dtype  # under autocast the parameters are of another
    plain_bias = None if bias is None else bias.to(dtype)
    return _output(x, weight.to(dtype), plain_bias, window)


def _fake_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, saved: Any, seed: Any, config: str, *shape: Any
) -> Tensor:
    ops.register_with_partitioner()
    return _plain_convolution(x, weight, bias, Window.of(*shape))


class _Conv2d(torch.autograd.Function):
    """``convolution`` and its backward, as AOTAutograd traces them."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        saved: Tensor | None,
        seed: Tensor,
        config: str,
        *shape: Any,
    ) -> Tensor:
        ctx.save_for_backward(weight if ctx.needs_input_grad[0] else None, saved, seed)
        ctx.config, ctx.window, ctx.x_shape = config, Window.of(*shape), x.shape
        ctx.channels_last = (is_channels_last(x), is_channels_last(weight))
        ctx.dtypes = (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        operator = torch.ops.hotcore.convolution.default
        y: Tensor = operator(x, weight, bias, saved, seed, config, *shape)
        return ops.without_base(y)

    @staticmethod
    @ops.not_differentiable
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, ...]:
        weight, saved, seed = ctx.saved_tensors
        kept = (weight, saved, seed, seed)
        about = (ctx.config, ctx.x_shape, ctx.channels_last, ctx.window)
        found = gradients(gy, kept, *about, ctx.needs_input_grad, ctx.dtypes)
        return (*found, *(None,) * 9)


def gradients(
    gy: Tensor,
    kept: tuple[Tensor | None, Tensor | None, Tensor, Tensor],
    config: str,
    x_shape: torch.Size,
    channels_last: tuple[bool, bool],
    window: Window,
    needed: Sequence[bool],
    dtypes: Sequence[torch.dtype | None],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The needed ones of g_x, g_w and g_b, by the operator; None for the others.

    ``kept``: weight, the codes, their seed, the layer's seed.
    """
    need_gx, need_gw, need_gb, *_ = needed
    weight, saved, saved_seed, seed = kept
    gx_dtype, gw_dtype, gb_dtype = dtypes
    gx, gw, gb = backward_conv2d(
        gy,
        weight if need_gx else None,
        saved if need_gw else None,
        saved_seed,
        seed,
        config,
        x_shape,
        *channels_last,
        *window,
        gx_dtype if need_gx else None,
        gw_dtype if need_gw else None,
        gb_dtype if need_gb else None,
    )
    return (gx if need_gx else None, gw if need_gw else None, gb if need_gb else None)


def _output(x: Tensor, weight: Tensor, bias: Tensor | None, window: Window) -> Tensor:
    # Real and fake tensors must have the same strides.
    y = plain_conv2d(x, weight, bias, window)
    return y.contiguous(memory_format=_format_of(x, weight))


def _format_of(x: Tensor, weight: Tensor) -> torch.memory_format:
    last = is_channels_last(x) or is_channels_last(weight)
    return torch.channels_last if last else torch.contiguous_format


def _tokens(nhwc: Tensor) -> Tensor:
    """``[N, H, W, C]`` as ``[N*H*W, C]``; a copy unless x is channels_last."""
    return nhwc.reshape(nhwc.shape[:3].numel(), nhwc.shape[3])


def _empty(like: Tensor, shape: Sequence[int], last: bool, dtype: torch.dtype) -> Tensor:
    """``[N, C, H, W]``, stored so or (``last``) as ``[N, H, W, C]``, on the device of ``like``."""
    n, c, h, w = shape
    if last:
        return like.new_empty((n, h, w, c), dtype=dtype).permute(0, 3, 1, 2)
    return like.new_empty((n, c, h, w), dtype=dtype)


def _stored_as(found: Tensor, last: bool, dtype: torch.dtype) -> Tensor:
    """The same values as :func:`_empty` would store them; no copy where they are so."""
    dense = found.permute(0, 2, 3, 1) if last else found
    dense = dense.to(dtype, memory_format=torch.contiguous_format).contiguous()
    dense = dense.view(-1).view(dense.shape)  # the usual strides, of sizes of 1, too
    return dense.permute(0, 3, 1, 2) if last else dense


def _outputs(
    gy: Tensor,
    x_shape: Sequence[int],
    x_last: bool,
    weight_last: bool,
    window: Window,
    gx_dtype: torch.dtype | None,
    gw_dtype: torch.dtype | None,
    gb_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """g_x and g_w in the memory formats of x and weight, and g_b; empty vectors if not wanted."""
    w_shape = _weight_shape(gy, x_shape, window)
    return (
        gy.new_empty(0) if gx_dtype is None else _empty(gy, x_shape, x_last, gx_dtype),
        gy.new_empty(0) if gw_dtype is None else _empty(gy, w_shape, weight_last, gw_dtype),
        gy.new_empty(0 if gb_dtype is None else gy.shape[1], dtype=gb_dtype),
    )


def _weight_shape(gy: Tensor, x_shape: Sequence[int], window: Window) -> tuple[int, int, int, int]:
    return gy.shape[1], x_shape[1] // window.groups, *window.kernel


def _backward_conv2d(
    gy: Tensor,
    weight: Tensor | None,
    saved: Tensor | None,
    saved_seed: Tensor | None,
    seed: Tensor,
    config: str,
    x_shape: Sequence[int],
    x_last: bool,
    weight_last: bool,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    fields = len(Window._fields)
    window, dtypes = Window.of(*rest[:fields]), rest[fields:]
    keys, formats = ops.keys_of(saved_seed, seed), (x_last, weight_last)
    backward = _backward_pointwise if is_pointwise(window) else _backward_window
    return backward(gy, weight, saved, keys, ops.parsed(config), x_shape, formats, window, dtypes)


def _backward_pointwise(
    gy: Tensor,
    weight: Tensor | None,
    saved: Tensor | None,
    keys: tuple[Key, Key],
    config: HotConfig,
    x_shape: Sequence[int],
    formats: tuple[bool, bool],
    window: Window,
    dtypes: Sequence[torch.dtype | None],
) -> tuple[Tensor, Tensor, Tensor]:
    """A 1x1 kernel: a linear layer over the pixels that it reads."""
    results = _outputs(gy, x_shape, *formats, window, *dtypes)
    gx, gw, gb = (out if dtype else None for out, dtype in zip(results, dtypes, strict=True))
    channels, height, width = x_shape[1], gy.shape[2], gy.shape[3]
    products = settings(config, True, (height, width))
    matrix = None if weight is None else weight.flatten(1)
    pixels = rows = None
    if gx is not None:
        if window.stride != (1, 1):
            gx.zero_()  # pixels that the kernel skips
        pixels = visited(gx, window)
        rows = pixels if pixels.is_contiguous() else pixels.new_empty(pixels.shape)
    outputs = (rows, None if gw is None else gw.view(-1, channels), gb)
    grad = _tokens(gy.permute(0, 2, 3, 1))
    ops.backward(grad, matrix, saved, channels, products, keys, outputs)
    if pixels is not None and rows is not None and rows is not pixels:
        pixels.copy_(rows)
    return results


def _backward_window(
    gy: Tensor,
    weight: Tensor | None,
    saved: Tensor | None,
    keys: tuple[Key, Key],
    config: HotConfig,
    x_shape: Sequence[int],
    formats: tuple[bool, bool],
    window: Window,
    dtypes: Sequence[torch.dtype | None],
) -> tuple[Tensor, Tensor, Tensor]:
    """Any other kernel: torch's own backward, of the restored x."""
    (x_last, weight_last), (gx_dtype, gw_dtype, gb_dtype) = formats, dtypes
    height, width = x_shape[2:]
    if gw_dtype is None or saved is None:  # of x and of weight torch reads then the shape alone
        x = _empty(gy, x_shape, x_last, gy.dtype)
    else:
        n, channels, _, _ = x_shape
        kept = settings(config, False, None)
        rows = ops.decompress(saved, n * height * width, channels, kept, keys[0], gy.dtype)
        x = rows.view(n, height, width, channels).permute(0, 3, 1, 2)
        del rows
        x = _stored_as(x, x_last, gy.dtype)
    if weight is None:
        weight = _empty(gy, _weight_shape(gy, x_shape, window), weight_last, gy.dtype)
    x, around = padded(x, window)
    found = torch.ops.aten.convolution_backward.default(
        gy,
        x,
        weight.to(gy.dtype),  # under autocast the parameters are of another
        [gy.shape[1]],
        window.stride,
        around,
        window.dilation,
        False,
        [0, 0],
        window.groups,
        [dtype is not None for dtype in dtypes],
    )
    del x
    gx, gw, gb = found
    if gx_dtype is not None:
        # In x's dtype first: the overlaps of padded pixels add up in it, as autograd's do.
        gx = _stored_as(unpadded(gx.to(gx_dtype), height, width, window), x_last, gx_dtype)
    return (
        gy.new_empty(0) if gx_dtype is None else gx,
        gy.new_empty(0) if gw_dtype is None else _stored_as(gw, weight_last, gw_dtype),
        gy.new_empty(0) if gb_dtype is None else gb.to(gb_dtype),
    )


def _fake_backward_conv2d(
    gy: Tensor,
    weight: Tensor | None,
    saved: Tensor | None,
    saved_seed: Tensor | None,
    seed: Tensor,
    config: str,
    x_shape: Sequence[int],
    x_last: bool,
    weight_last: bool,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    fields = len(Window._fields)
    window = Window.of(*rest[:fields])
    return _outputs(gy, x_shape, x_last, weight_last, window, *rest[fields:])


ops.register(
    ("compress_pixels", _compress_pixels, _fake_compress_pixels),
    ("compress_pixels_seeded", _compress_pixels_seeded, _fake_compress_pixels_seeded),
    ("convolution", _convolution, _fake_convolution),
    ("backward_conv2d", _backward_conv2d, _fake_backward_conv2d),
)
for _name, _made in (("kept_pixels_of", _kept_pixels_of), ("conv2d", _conv2d)):
    ops.library.impl(_name, _made, "CompositeImplicitAutograd")

conv2d = torch.ops.hotcore.conv2d.default
kept_pixels_of = torch.ops.hotcore.kept_pixels_of.default
compress_pixels = torch.ops.hotcore.compress_pixels.default
backward_conv2d = torch.ops.hotcore.backward_conv2d.default


# Multiply-adds count twice, as torch's own; the shapes are those of the arguments.


@register_flop_formula([torch.ops.hotcore.conv2d, torch.ops.hotcore.convolution])
def _conv2d_flops(
    x_shape: Sequence[int],
    weight_shape: Sequence[int],
    *_: Any,
    out_shape: Sequence[int],
    **__: Any,
) -> int:
    return 2 * math.prod(out_shape) * math.prod(weight_shape[1:])


@register_flop_formula(torch.ops.hotcore.backward_conv2d)
def _backward_conv2d_flops(
    gy_shape: Sequence[int],
    weight_shape: Any,
    saved_shape: Any,
    saved_seed_shape: Any,
    seed_shape: Any,
    config: str,
    x_shape: Sequence[int],
    x_last: bool,
    weight_last: bool,
    *rest: Any,
    **_: Any,
) -> int:
    fields = len(Window._fields)
    window = Window.of(*rest[:fields])
    wanted = sum(dtype is not None for dtype in rest[fields : fields + 2])
    channels = x_shape[1] // window.groups
    return 2 * math.prod(gy_shape) * channels * math.prod(window.kernel) * wanted


_WITHOUT_FLOPS = ("compress_pixels", "compress_pixels_seeded", "kept_pixels_of")


@register_flop_formula([getattr(torch.ops.hotcore, name) for name in _WITHOUT_FLOPS])
def _no_flops(*_: Any, **__: Any) -> int:
    return 0
