"""The operators under the modules, ``torch.ops.hotcore.compress_activation`` and
``torch.ops.hotcore.backward_linear``, and the seeds of their random numbers.

Low-level library operators with fakes: they cost half of what ``torch.library.custom_op`` does, and
``torch.compile`` sees through them. The seed travels as a tensor, so that drawing it stays inside a
compiled graph. There ``linear`` (and ``conv2d``) computes the output and what is kept in one: left
alone, the partitioner would move what only backward needs, with the drawing of its seed, there.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import _core, contexts
from ..config import HotConfig, Key

_to_dlpack: Any = torch.utils.dlpack.to_dlpack  # type: ignore[attr-defined]  # ten times cheaper than Tensor.__dlpack__

library: Any = torch.library.Library("hotcore", "DEF")  # type: ignore[no-untyped-call]
library.define(
    "draw_seed(Tensor x, Tensor weight) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,)
)
library.define(
    "linear(Tensor x, Tensor weight, Tensor? bias, Tensor seed, str config, bool keep)"
    " -> (Tensor, Tensor)"
)
library.define("compress_activation(Tensor x, Tensor seed, str config) -> Tensor")
library.define(
    "backward_linear(Tensor gy, Tensor? weight, Tensor? saved, Tensor seed, str config, "
    "SymInt in_features, ScalarType? gx_dtype, ScalarType? gw_dtype, ScalarType? gb_dtype)"
    " -> (Tensor, Tensor, Tensor)"
)


@functools.lru_cache(maxsize=256)
def parsed(text: str) -> HotConfig:
    """The configuration that an operator was given as JSON."""
    return HotConfig.from_json(text)


def _draw_seed(x: Tensor | None = None, weight: Tensor | None = None) -> Tensor:
    return torch.randint(0x7FFF_FFFF_FFFF_FFFF, (), dtype=torch.int64, device="cpu")


def seed_for(x: Tensor, weight: Tensor) -> Tensor:
    """A 63-bit seed from torch's default CPU generator: int64 ``[]`` on the CPU.

    While compiling an operator of its own that depends on the layer: torch's partitioner would draw
    a bare ``randint`` once more in backward, and merge those of layers that share x.
    """
    if torch.compiler.is_compiling():
        seed: Tensor = draw_seed(x.detach(), weight.detach())
        return seed
    return _draw_seed()


def context_of(device: torch.device) -> _core.CoreContext:
    """Where calls on tensors of ``device`` run: torch's number of threads, or current stream.

    Raises NotImplementedError for a device that this build has no backend for.
    """
    if device.type == "cpu":
        return contexts.cpu(torch.get_num_threads())
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        # The handle alone: torch.cuda.current_stream() makes an object around it.
        return contexts.cuda(index, torch._C._cuda_getCurrentRawStream(index))
    raise NotImplementedError(f"x: no backend of hotcore for the device {device}")


def _workspace(size: int, device: torch.device) -> object:
    # On the CPU the binding has scratch of its own.
    if size == 0 or device.type == "cpu":
        return None
    return _to_dlpack(torch.empty(size, dtype=torch.uint8, device=device))


# Sizes of scratch depend on a device and not on its streams; asking takes microseconds.
@functools.lru_cache(maxsize=4096)
def _saved_size(tokens: int, in_features: int, spec: _core.Spec) -> int:
    return _core.saved_layout(tokens, in_features, spec)[0]


@functools.lru_cache(maxsize=4096)
def _compress_workspace(
    device: torch.device, spec: _core.Spec, tokens: int, in_features: int
) -> int:
    return _core.compress_activation_workspace(context_of(device), tokens, in_features, spec)


@functools.lru_cache(maxsize=4096)
def _backward_workspace(
    device: torch.device,
    spec: _core.Spec,
    tokens: int,
    out_features: int,
    in_features: int,
    need_gx: bool,
    need_gw: bool,
) -> int:
    sizes = (tokens, out_features, in_features)
    return _core.backward_linear_workspace(context_of(device), *sizes, spec, need_gx, need_gw)


def quantize_weight(weight: Tensor, config: HotConfig) -> Tensor:
    """w ``[O, I]`` as one uint8 vector that :func:`backward` takes in its place."""
    rows, columns = weight.shape
    context = context_of(weight.device)
    size = _core.quantized_weight_bytes(rows, columns, config.spec)
    out = torch.empty(size, dtype=torch.uint8, device=weight.device)
    scratch = 0
    if weight.is_cuda:
        scratch = _core.quantize_weight_workspace(context, rows, columns, config.spec)
    workspace = _workspace(scratch, weight.device)
    _core.quantize_weight(context, _to_dlpack(weight), config.spec, _to_dlpack(out), workspace)
    return out


def compress(x: Tensor, config: HotConfig, key: Key) -> Tensor:
    """x ``[..., I]`` as one uint8 vector, straight to libhot: no autograd, no dispatcher."""
    x = collapsible(x)
    tokens, in_features = math.prod(x.shape[:-1]), x.shape[-1]
    device = x.device
    size = _saved_size(tokens, in_features, config.spec)
    saved = torch.empty(size, dtype=torch.uint8, device=device)
    context = context_of(device)
    scratch = 0
    if device.type == "cuda":
        scratch = _compress_workspace(device, config.spec, tokens, in_features)
    _core.compress_activation(
        context, _to_dlpack(x), config.spec, key, _to_dlpack(saved), _workspace(scratch, device)
    )
    return saved


def backward(
    gy: Tensor,
    weight: Tensor | None,
    saved: Tensor | None,
    in_features: int,
    config: HotConfig,
    key: Key,
    outputs: tuple[Tensor | None, Tensor | None, Tensor | None],
    accumulate: bool = False,
    quantized: Tensor | None = None,
) -> None:
    """Write ``outputs`` (g_x, g_w, g_b; None: not wanted), straight to libhot.

    gy is ``[..., O]``, and g_x ``[..., I]`` of 2 to 4 dimensions, leading ones alike or flattened.
    With ``accumulate`` g_w and g_b are added to what is there. ``quantized`` is what
    :func:`quantize_weight` made of ``weight``, which is then not looked at.
    """
    gy = collapsible(gy)
    tokens, out_features = math.prod(gy.shape[:-1]), gy.shape[-1]
    gx, gw, gb = outputs
    device = gy.device
    context = context_of(device)
    scratch = 0
    if device.type == "cuda":
        sizes = (tokens, out_features, in_features)
        wanted = (gx is not None, gw is not None)
        scratch = _backward_workspace(device, config.spec, *sizes, *wanted)
    _core.backward_linear(
        context,
        _to_dlpack(gy),
        None if weight is None or quantized is not None else _to_dlpack(weight),
        None if saved is None else _to_dlpack(saved),
        tokens,
        in_features,
        key,
        config.spec,
        key,
        None if gx is None else _to_dlpack(gx),
        None if gw is None else _to_dlpack(gw),
        None if gb is None else _to_dlpack(gb),
        accumulate,
        _workspace(scratch, device),
        None if quantized is None else _to_dlpack(quantized),
    )


def flat(x: Tensor) -> Tensor:
    """``[..., I]`` as ``[L, I]``."""
    if x.dim() == 2:
        return x
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def collapsible(x: Tensor) -> Tensor:
    """``[..., I]`` as libhot takes it: as it is, where its leading dimensions surely collapse."""
    return x if 2 <= x.dim() <= 4 and x.is_contiguous() else flat(x)


def register(*operators: tuple[str, Callable[..., Any], Callable[..., Any]]) -> None:
    """Give operators of :data:`library` (name, implementation, fake) to CPU and CUDA tensors."""
    for name, implementation, fake in operators:
        for key in ("CPU", "CUDA"):
            library.impl(name, implementation, key)
        torch.library.register_fake(f"hotcore::{name}", fake, lib=library)


def _linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, seed: Tensor, config: str, keep: bool
) -> tuple[Tensor, Tensor]:
    saved = _compress_activation(flat(x), seed, config) if keep else seed.new_empty(0)
    return F.linear(x, weight, bias), saved


def _fake_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, seed: Tensor, config: str, keep: bool
) -> tuple[Tensor, Tensor]:
    saved = _fake_compress_activation(flat(x), seed, config) if keep else seed.new_empty(0)
    return F.linear(x, weight, bias), saved


def _compress_activation(x: Tensor, seed: Tensor, config: str) -> Tensor:
    return compress(x, parsed(config), Key(int(seed.item())))


def _outputs(
    gy: Tensor,
    in_features: int,
    gx_dtype: torch.dtype | None,
    gw_dtype: torch.dtype | None,
    gb_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, out_features = gy.shape
    device, own = gy.device, gy.dtype
    # An operator returns no None: what is not wanted is an empty vector.
    gx = (0,) if gx_dtype is None else (tokens, in_features)
    gw = (0,) if gw_dtype is None else (out_features, in_features)
    gb = (0,) if gb_dtype is None else (out_features,)
    return (
        torch.empty(gx, dtype=gx_dtype or own, device=device),
        torch.empty(gw, dtype=gw_dtype or own, device=device),
        torch.empty(gb, dtype=gb_dtype or own, device=device),
    )


def _backward_linear(
    gy: Tensor,
    weight: Tensor | None,
    saved: Tensor | None,
    seed: Tensor,
    config: str,
    in_features: int,
    gx_dtype: torch.dtype | None,
    gw_dtype: torch.dtype | None,
    gb_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:
    gx, gw, gb = _outputs(gy, in_features, gx_dtype, gw_dtype, gb_dtype)
    outputs = (gx if gx_dtype else None, gw if gw_dtype else None, gb if gb_dtype else None)
    key = Key(int(seed.item()))
    backward(gy, weight, saved, in_features, parsed(config), key, outputs)
    return gx, gw, gb


def _fake_draw_seed(x: Tensor, weight: Tensor) -> Tensor:
    return torch.empty((), dtype=torch.int64, device="cpu")


def _fake_compress_activation(x: Tensor, seed: Tensor, config: str) -> Tensor:
    tokens, in_features = x.shape
    size = saved_bytes(tokens, in_features, parsed(config))
    return torch.empty(size, dtype=torch.uint8, device=x.device)


def _fake_backward_linear(
    gy: Tensor,
    weight: Tensor | None,
    saved: Tensor | None,
    seed: Tensor,
    config: str,
    in_features: int,
    gx_dtype: torch.dtype | None,
    gw_dtype: torch.dtype | None,
    gb_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:
    return _outputs(gy, in_features, gx_dtype, gw_dtype, gb_dtype)


def _up(value: int, multiple: int) -> int:
    return (value + multiple - 1) // multiple * multiple


def saved_bytes(tokens: int, in_features: int, config: HotConfig) -> int:
    """``saved_layout(...).bytes`` in arithmetic that symbolic shapes can follow."""
    if config.storage == "int4":
        row = _up(tokens, 32) // 2
        scales = 2 * in_features * ((tokens + 63) // 64)
    else:
        kept = tokens
        if config.basis != "full":
            rank = len(config.rows) if config.rows else config.rank
            body = prefix = 0
            if config.token_grid is None:
                body = tokens
            else:
                area = config.token_grid[0] * config.token_grid[1]
                samples = tokens // (area + config.prefix_tokens)
                body, prefix = samples * area, samples * config.prefix_tokens
            kept = (body + config.block - 1) // config.block * rank + prefix
        row = _up(kept, 16)
        scales = 4 * (in_features if config.x_scale == "channel" else 1)
    return _up(in_features * row, 16) + scales


register(
    ("draw_seed", _draw_seed, _fake_draw_seed),
    ("linear", _linear, _fake_linear),
    ("compress_activation", _compress_activation, _fake_compress_activation),
    ("backward_linear", _backward_linear, _fake_backward_linear),
)

draw_seed = torch.ops.hotcore.draw_seed.default
linear = torch.ops.hotcore.linear.default


def _at_once(x: Tensor) -> bool:
    """Whether nothing wants to see the operator itself: the dispatcher takes 5 to 10 us."""
    return (
        not torch.compiler.is_compiling()
        and type(x) in (Tensor, torch.nn.Parameter)
        and x.device.type in ("cpu", "cuda")
        and torch._C._len_torch_dispatch_stack() == 0
    )


def compress_activation(x: Tensor, seed: Tensor, config: str) -> Tensor:
    """x ``[..., I]`` compressed, by ``torch.ops.hotcore.compress_activation`` or as it would be."""
    if _at_once(x):
        return compress(x, parsed(config), Key(int(seed.item())))
    saved: Tensor = torch.ops.hotcore.compress_activation.default(flat(x), seed, config)
    return saved


def backward_linear(
    gy: Tensor,
    weight: Tensor | None,
    saved: Tensor | None,
    seed: Tensor,
    config: str,
    x_shape: torch.Size,
    gx_dtype: torch.dtype | None,
    gw_dtype: torch.dtype | None,
    gb_dtype: torch.dtype | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """g_x, g_w, g_b (None where the dtype is), by the operator or as it would be."""
    in_features, out_features = x_shape[-1], gy.shape[-1]
    gx = gw = gb = None
    if _at_once(gy) and 2 <= len(x_shape) <= 4:
        device = gy.device
        if gx_dtype is not None:
            gx = torch.empty(x_shape, dtype=gx_dtype, device=device)
        if gw_dtype is not None:
            gw = torch.empty((out_features, in_features), dtype=gw_dtype, device=device)
        if gb_dtype is not None:
            gb = torch.empty((out_features,), dtype=gb_dtype, device=device)
        key = Key(int(seed.item()))
        backward(gy, weight, saved, in_features, parsed(config), key, (gx, gw, gb))
        return gx, gw, gb
    rows = gy.reshape(math.prod(x_shape[:-1]), out_features)
    arguments = (rows, weight, saved, seed, config, in_features, gx_dtype, gw_dtype, gb_dtype)
    gx, gw, gb = torch.ops.hotcore.backward_linear.default(*arguments)
    return (
        None if gx_dtype is None else gx.view(x_shape),
        None if gw_dtype is None else gw,
        None if gb_dtype is None else gb,
    )
