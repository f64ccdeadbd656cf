"""The saved x of a convolution, and its gradients from integer products.

The operators ``torch.ops.hotcore.compress_pixels`` and ``torch.ops.hotcore.backward_conv2d``.

Pixels are tokens, ``[N, H, W, C]``. The forward pass saves the pixels of x, compressed
``[N*H*W, C]``. The unfolded x (kernel height * width times as large) exists only in backward, for a
few images at a time. There, with K = kh*kw*C and T = output pixels:

* ``g_w [O, K] = g_y^T [O, T] unfold(x) [T, K]``, summed over the chunks in fp32;
* ``g_x = fold(g_y [T, O] w [O, K])``, an integer product whose overlaps are added in fp32.

Beside the results a chunk takes 5 bytes per value of ``[T, K]`` (the fp32 unfolded x and its codes,
then the codes and the fp32 columns of g_x), the fp32 padded x or g_x of its images, and libhot's
scratch. A chunk holds :data:`CHUNK_BYTES` of fp32 ``[T, K]``, or one image if that is more.
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

from ..config import TOKEN_STORAGES, HotConfig, Key, Storage
from . import input_cache, ops

CHUNK_BYTES = 1 << 26
"""fp32 bytes of the unfolded x of one chunk."""


class Window(NamedTuple):
    """How a convolution's kernel moves over x, heights before widths."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int, int, int]
    """left, right, top, bottom, in the order of ``F.pad``."""
    dilation: tuple[int, int]
    padding_mode: str

    @property
    def pointwise(self) -> bool:
        """A 1x1 kernel: a linear layer over (every stride-th) pixel."""
        return self.kernel == (1, 1) and not any(self.padding)

    @classmethod
    def of(
        cls,
        kernel: Sequence[int],
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        padding_mode: str,
    ) -> Window:
        """From the lists that an operator receives."""
        kh, kw = kernel
        sh, sw = stride
        left, right, top, bottom = padding
        dh, dw = dilation
        return cls((kh, kw), (sh, sw), (left, right, top, bottom), (dh, dw), padding_mode)

    def reach(self) -> tuple[int, int]:
        """Height and width that the dilated kernel covers."""
        (kh, kw), (dh, dw) = self.kernel, self.dilation
        return dh * (kh - 1) + 1, dw * (kw - 1) + 1


@functools.lru_cache(maxsize=1024)
def settings(
    config: HotConfig, pointwise: bool, grid: tuple[int, int] | None
) -> tuple[HotConfig, HotConfig]:
    """The configurations that save x's pixels, and that make the products.

    ``grid``, the layer's output height and width, replaces the caller's token grid, which describes
    a transformer's tokens; a low-pass basis takes its tiles from it. A 1x1 convolution saves the
    same as a linear layer. Any other has to unfold x in backward, so x itself (basis ``"full"``) is
    saved: in the storage of a full-basis recipe, otherwise in INT4, which takes about the bytes of
    the low-rank INT8 form. The unfolded x is quantised to INT8 at once (``token8`` for both token
    storages).
    """
    tiled = config.basis in ("lowpass", "sequency")
    products = dataclasses.replace(config, token_grid=grid if tiled else None, prefix_tokens=0)
    if pointwise:
        return products, products
    wide: Storage = "token8" if config.storage in TOKEN_STORAGES else "int8"
    products = dataclasses.replace(products, storage=wide)
    kept = dataclasses.replace(config, token_grid=None, prefix_tokens=0)
    if config.storage in TOKEN_STORAGES:
        kept = dataclasses.replace(kept, basis="full")
    elif config.basis != "full":
        kept = dataclasses.replace(kept, basis="full", rows=None, storage="int4", x_scale="channel")
    return kept, products


@functools.lru_cache(maxsize=256)
def pixels_key(config: str, window: Window, dtype: torch.dtype | None) -> Hashable:
    """Key of everything but x that :func:`compress_pixels`'s bytes depend on.

    ``dtype`` is the one autocast casts x to.
    """
    kept, _ = settings(ops.parsed(config), window.pointwise, None)  # x and stride give the grid
    visits = window.stride if window.pointwise else (1, 1)
    return ("pixels", visits, dtype, input_cache.config_key(kept))


def plain_conv2d(x: Tensor, weight: Tensor, bias: Tensor | None, window: Window) -> Tensor:
    """The same calls as ``nn.Conv2d``, empty padding included: the same bits and strides."""
    left, right, top, bottom = window.padding
    around = [top, left]
    if window.padding_mode != "zeros":
        x, around = F.pad(x, window.padding, window.padding_mode), [0, 0]
    elif (left, top) != (right, bottom):  # padding "same" of an even kernel
        x = F.pad(x, (0, right - left, 0, bottom - top))
    return F.conv2d(x, weight, bias, window.stride, around, window.dilation)


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
    """Whether ``[N, C, H, W]`` is stored as ``[N, H, W, C]``; ambiguous shapes go by strides."""
    if not x.is_contiguous(memory_format=torch.channels_last):
        return False
    return not x.is_contiguous() or x.stride(3) != 1


def visited(x: Tensor, window: Window) -> Tensor:
    """``[N, C, H, W]`` as ``[N, H, W, C]``; for a 1x1 kernel only the pixels that it reads."""
    if window.pointwise:
        x = x[:, :, :: window.stride[0], :: window.stride[1]]
    return x.permute(0, 2, 3, 1)


def unfolded(x: Tensor, window: Window) -> Tensor:
    """Padded x ``[n, H, W, C]`` as ``[T, kh*kw*C]``: the window of every output pixel."""
    (eh, ew), (sh, sw), (dh, dw) = window.reach(), window.stride, window.dilation
    patches = x.unfold(1, eh, sh).unfold(2, ew, sw)[..., ::dh, ::dw]  # [n, Ho, Wo, C, kh, kw]
    patches = patches.permute(0, 1, 2, 4, 5, 3)
    return patches.reshape(patches.shape[:3].numel(), patches.shape[3:].numel())


def folded(columns: Tensor, shape: tuple[int, int, int, int], window: Window) -> Tensor:
    """The adjoint of :func:`unfolded`: ``[n, Ho, Wo, kh, kw, C]`` added up to ``[n, H, W, C]``."""
    (sh, sw), (dh, dw) = window.stride, window.dilation
    total = columns.new_zeros(shape)
    height, width = columns.shape[1:3]
    for i in range(window.kernel[0]):
        for j in range(window.kernel[1]):
            rows = slice(i * dh, i * dh + sh * (height - 1) + 1, sh)
            cols = slice(j * dw, j * dw + sw * (width - 1) + 1, sw)
            total[:, rows, cols] += columns[:, :, :, i, j]
    return total


def padded(x: Tensor, window: Window) -> Tensor:
    """``[n, H, W, C]`` with the convolution's padding around it."""
    if not any(window.padding):
        return x
    if window.padding_mode == "zeros":
        return F.pad(x, (0, 0, *window.padding))
    rows, columns = _sources(x.shape[1], x.shape[2], window, x.device)
    return x.index_select(1, rows).index_select(2, columns)


def unpadded(total: Tensor, height: int, width: int, window: Window) -> Tensor:
    """The adjoint of :func:`padded`: ``[n, Hp, Wp, C]`` to ``[n, height, width, C]``."""
    left, _, top, _ = window.padding
    if not any(window.padding):
        return total
    if window.padding_mode == "zeros":
        return total[:, top : top + height, left : left + width]
    rows, columns = _sources(height, width, window, total.device)
    n, tall, _, channels = total.shape
    narrow = total.new_zeros(n, tall, width, channels).index_add_(2, columns, total)
    return total.new_zeros(n, height, width, channels).index_add_(1, rows, narrow)


def _sources(
    height: int, width: int, window: Window, device: torch.device
) -> tuple[Tensor, Tensor]:
    """For every row and column of the padded x, the row and column of x that it repeats."""
    left, right, top, bottom = window.padding

    def index(size: int, before: int, after: int) -> Tensor:
        line = torch.arange(size, dtype=torch.float32, device=device)[None, None]
        return F.pad(line, (before, after), window.padding_mode)[0, 0].long()

    return index(height, top, bottom), index(width, left, right)


_WINDOW = "int[] kernel, int[] stride, int[] padding, int[] dilation, str padding_mode"
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
    kept, _ = settings(ops.parsed(config), window.pointwise, grid)
    return ops.compress(_tokens(nhwc), kept, ops.key_of(seed))


def _fake_compress_pixels(x: Tensor, seed: Tensor, config: str, *shape: Any) -> Tensor:
    window = Window.of(*shape)
    n, height, width, channels = visited(x, window).shape
    kept, _ = settings(ops.parsed(config), window.pointwise, None)  # a grid changes no size
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
    window, settings = Window.of(*shape), ops.parsed(config)
    if settings.forward == "int8" and window.pointwise:

        def product(rows: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
            return ops.forward(rows, matrix, bias, settings)

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
        return (*found, *(None,) * 8)


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


def _outputs(
    gy: Tensor,
    x_shape: Sequence[int],
    x_last: bool,
    weight_last: bool,
    kernel: tuple[int, int],
    gx_dtype: torch.dtype | None,
    gw_dtype: torch.dtype | None,
    gb_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """g_x and g_w in the memory formats of x and weight, and g_b; empty vectors if not wanted."""

    def empty(n: int, c: int, h: int, w: int, last: bool, dtype: torch.dtype | None) -> Tensor:
        if dtype is None:
            return gy.new_empty(0)
        if last:
            return gy.new_empty((n, h, w, c), dtype=dtype).permute(0, 3, 1, 2)
        return gy.new_empty((n, c, h, w), dtype=dtype)

    n, c, h, w = x_shape
    gx = empty(n, c, h, w, x_last, gx_dtype)
    gw = empty(gy.shape[1], c, *kernel, weight_last, gw_dtype)
    gb = gy.new_empty((gy.shape[1],) if gb_dtype else (0,), dtype=gb_dtype or gy.dtype)
    return gx, gw, gb


class _Call(NamedTuple):
    """The operands of one backward pass, for pointwise and other kernels."""

    gy: Tensor
    weight: Tensor | None
    saved: Tensor | None
    keys: tuple[Key, Key]
    """The key of ``saved`` and the layer's own."""
    config: HotConfig
    window: Window
    gx: Tensor | None
    gw: Tensor | None
    gb: Tensor | None


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
    window = Window.of(*rest[:5])
    results = _outputs(gy, x_shape, x_last, weight_last, window.kernel, *rest[5:])
    wanted = (out if dtype else None for out, dtype in zip(results, rest[5:], strict=True))
    keys = ops.keys_of(saved_seed, seed)
    call = _Call(gy, weight, saved, keys, ops.parsed(config), window, *wanted)
    (_backward_pointwise if window.pointwise else _backward_window)(call, tuple(x_shape))
    return results


def _backward_pointwise(call: _Call, x_shape: tuple[int, ...]) -> None:
    """A 1x1 kernel: a linear layer over the pixels that it reads."""
    gy, weight, window = call.gy, call.weight, call.window
    n, channels, _, _ = x_shape
    height, width = gy.shape[2:]
    _, products = settings(call.config, True, (height, width))
    matrix = None if weight is None else weight.flatten(1)
    gw = None if call.gw is None else call.gw.view(-1, channels)
    gx = None
    if call.gx is not None:
        gx = gy.new_empty((n * height * width, channels), dtype=call.gx.dtype)
    outputs = (gx, gw, call.gb)
    grad = _tokens(gy.permute(0, 2, 3, 1))
    ops.backward(grad, matrix, call.saved, channels, products, call.keys, outputs)
    if call.gx is not None and gx is not None:
        if window.stride != (1, 1):
            call.gx.zero_()  # pixels that the kernel skips
        visited(call.gx, window).copy_(gx.view(n, height, width, channels))


def _backward_window(call: _Call, x_shape: tuple[int, ...]) -> None:
    """Any other kernel: unfold the saved x and fold the columns of g_x, one chunk at a time."""
    gy, weight, window = call.gy, call.weight, call.window
    n, channels, height, width = x_shape
    out_channels, out_height, out_width = gy.shape[1:]
    features = window.kernel[0] * window.kernel[1] * channels
    kept, products = settings(call.config, False, (out_height, out_width))
    taps = None if weight is None else weight.permute(0, 2, 3, 1).reshape(out_channels, features)
    exact: dict[str, Any] = {"dtype": torch.float32, "device": gy.device}
    gw = None if call.gw is None else torch.zeros((out_channels, features), **exact)
    gb = None if call.gb is None else torch.zeros((out_channels,), **exact)
    left, right, top, bottom = window.padding
    kept_key, own = call.keys
    frame = (top + height + bottom, left + width + right, channels)
    for chunk, (first, last) in enumerate(chunks(n, features * out_height * out_width), start=1):
        # Offsets differ from the key's own, which rounded the saved x.
        key = own._replace(offset=own.offset + (chunk << 32))
        codes = columns = None
        if call.saved is not None and gw is not None:
            span = (first * height * width, last * height * width)
            x = ops.decompress(call.saved, n * height * width, channels, kept, kept_key, *span)
            patches = unfolded(padded(x.reshape(-1, height, width, channels), window), window)
            del x
            codes = ops.compress(patches, products, key)
            del patches  # before the columns of g_x are made
        grad = _tokens(gy[first:last].permute(0, 2, 3, 1))
        if call.gx is not None:
            columns = torch.empty((grad.shape[0], features), **exact)
        ops.backward(
            grad, taps, codes, features, products, (key, key), (columns, gw, gb), accumulate=True
        )
        if columns is not None and call.gx is not None:
            columns = columns.view(-1, out_height, out_width, *window.kernel, channels)
            total = folded(columns, (last - first, *frame), window)
            total = unpadded(total, height, width, window)
            call.gx[first:last].copy_(total.permute(0, 3, 1, 2))
    if call.gw is not None and gw is not None:
        call.gw.copy_(gw.view(out_channels, *window.kernel, channels).permute(0, 3, 1, 2))
    if call.gb is not None and gb is not None:
        call.gb.copy_(gb)


def chunks(images: int, values: int) -> list[tuple[int, int]]:
    """Ranges of images whose unfolded x, ``values`` an image, takes :data:`CHUNK_BYTES` of fp32."""
    step = max(1, CHUNK_BYTES // max(1, 4 * values))
    return [(first, min(first + step, images)) for first in range(0, images, step)]


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
    return _outputs(gy, x_shape, x_last, weight_last, tuple(rest[0]), *rest[5:])


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
    kernel: Sequence[int],
    *rest: Any,
    **_: Any,
) -> int:
    wanted = sum(dtype is not None for dtype in rest[4:6])
    return 2 * math.prod(gy_shape) * x_shape[1] * math.prod(kernel) * wanted


_WITHOUT_FLOPS = ("compress_pixels", "compress_pixels_seeded", "kept_pixels_of")


@register_flop_formula([getattr(torch.ops.hotcore, name) for name in _WITHOUT_FLOPS])
def _no_flops(*_: Any, **__: Any) -> int:
    return 0
