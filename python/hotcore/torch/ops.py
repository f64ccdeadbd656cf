"""The operators of linear layers, ``torch.ops.hotcore.*``, and the seeds of their random numbers.

These are low-level library operators with fakes. They cost half as much as
``torch.library.custom_op``, and ``torch.compile`` traces through them. A compiled layer calls two
composite operators:

* ``kept_of`` compresses x with a new seed (``compress``), once for all layers of a graph that take
  the same x and configuration. These layers round g_y with the same random numbers; every gradient
  is still unbiased. With ``forward="int8"`` it is ``input_of``, which also quantises x for the
  product, from the same read of x (``quantize_input``).
* ``linear`` is ``product`` (``F.linear``, or libhot's with ``forward="int8"``) with the backward
  ``backward_linear``. It takes the codes of x, although the product does not need them, so that
  they exist before it. Otherwise the partitioner would move the compression and its seed into
  backward (:attr:`HotModule.defer` allows that).

A seed is an int64 ``[]``, the offset of the layer's key (:func:`key_of`). Compiled and captured
code draws it with the generator of x's device, where the kernels read it: a graph needs no CPU
tensor, and every replay draws a new seed. Eager layers draw it on the CPU, which is cheaper.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeVar, overload

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula
from torch.utils.weak import WeakTensorKeyDictionary

from .. import _core, contexts
from ..config import TOKEN_STORAGES, HotConfig, Key
from . import _compat

_to_dlpack: Any = torch.utils.dlpack.to_dlpack  # type: ignore[attr-defined]  # ten times cheaper than Tensor.__dlpack__

_CPU = torch.device("cpu")
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
Pair = tuple[Tensor, Tensor]
"""Codes of an x and their seed."""


SEEDS = 0x7FFF_FFFF_FFFF_FFFF
"""Seeds are 0 <= seed < this."""

PLAIN_TYPES: Any = (Tensor, torch.nn.Parameter)
"""Types that override no operation of torch; subclasses of Tensor may."""

library: Any = torch.library.Library("hotcore", "DEF")  # type: ignore[no-untyped-call]  # so in torch

_RANDOM = (torch.Tag.nondeterministic_seeded,)
_ANY_STRIDES = (torch.Tag.flexible_layout,)
"""Without this tag inductor copies an argument into eager mode's strides for every operator that
takes it. These operators take any strides; their results are contiguous."""

_LINEAR = (
    "(Tensor x, Tensor weight, Tensor? bias, Tensor? saved, Tensor seed, str config, "
    "Tensor? codes=None) -> Tensor"
)
_FROZEN = "Tensor codes, int block, int out_features, int in_features, ScalarType dtype"
_FROZEN_LINEAR = (
    f"(Tensor x, Tensor? bias, Tensor? seed, str config, {_FROZEN}, Tensor? x_codes=None) -> Tensor"
)
_FROZEN_BACKWARD = (
    f"(Tensor gy, Tensor? seed, str config, {_FROZEN}, ScalarType? gx_dtype, "
    "ScalarType? gb_dtype) -> (Tensor, Tensor)"
)
_BACKWARD = (
    "(Tensor gy, Tensor? weight, Tensor? saved, Tensor? saved_seed, Tensor seed, str config, "
    "SymInt in_features, ScalarType? gx_dtype, ScalarType? gw_dtype, ScalarType? gb_dtype)"
    " -> (Tensor, Tensor, Tensor)"
)
for _schema, _tags in (
    ("draw_seed(Tensor x) -> Tensor", (*_RANDOM, *_ANY_STRIDES)),
    ("compress_activation(Tensor x, Tensor seed, str config) -> Tensor", _ANY_STRIDES),
    ("compress(Tensor x, str config) -> (Tensor, Tensor)", (*_RANDOM, *_ANY_STRIDES)),
    ("kept_of(Tensor x, Tensor inner, str config, bool codes) -> (Tensor, Tensor)", ()),
    ("forward_input(Tensor x, str config) -> Tensor", _ANY_STRIDES),
    (
        "quantize_input(Tensor x, str config) -> (Tensor, Tensor, Tensor)",
        (*_RANDOM, *_ANY_STRIDES),
    ),
    ("input_of(Tensor x, Tensor inner, str config, bool keep) -> (Tensor, Tensor, Tensor)", ()),
    (f"linear{_LINEAR}", ()),
    (f"product{_LINEAR}", _ANY_STRIDES),
    ("forward_linear(Tensor x, Tensor weight, Tensor? bias, str config) -> Tensor", _ANY_STRIDES),
    (f"backward_linear{_BACKWARD}", _ANY_STRIDES),
    (f"dequantize_weight({_FROZEN}) -> Tensor", _ANY_STRIDES),
    (f"frozen_linear{_FROZEN_LINEAR}", ()),
    (f"frozen_product{_FROZEN_LINEAR}", _ANY_STRIDES),
    (f"frozen_backward{_FROZEN_BACKWARD}", _ANY_STRIDES),
):
    library.define(_schema, tags=_tags)


@functools.lru_cache(maxsize=256)
def parsed(text: str) -> HotConfig:
    """The configuration that an operator has received as JSON."""
    return HotConfig.from_json(text)


def seed_for(x: Tensor) -> Tensor:
    """Draw a seed in eager mode: int64 ``[]`` from the default generator of its device.

    Its device is the CPU, or x's while a CUDA graph is captured.
    """
    captured = captured_seed(x)
    return torch.randint(SEEDS, (), device=_CPU) if captured is None else captured


def captured_seed(x: Tensor) -> Tensor | None:
    """A seed on x's device, drawn again by each replay; None if no CUDA graph is being captured."""
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        return torch.randint(SEEDS, (), device=x.device)  # int64 by default
    return None


def _draw_seed(x: Tensor) -> Tensor:
    return torch.randint(SEEDS, (), device=x.device)


_traced: Any = WeakTensorKeyDictionary()  # x -> configuration -> its codes and their seed


def compress_once(
    x: Tensor, inner: Tensor, key: Hashable, compress: Callable[[Tensor], Pair] | None
) -> Pair:
    """Codes and seed of x by ``compress(inner)``; without ``compress`` a seed and empty codes.

    The compiler does not merge random operators, so this function gives each x only one.
    """

    def make() -> Pair:
        if compress is not None:
            return compress(inner.detach())
        seed = draw_seed(inner.detach())
        return seed.new_empty(0), seed

    return _once(x, key, make)


_Made = TypeVar("_Made")


def _once(x: Tensor, key: Hashable, make: Callable[[], _Made]) -> _Made:
    """``make()``, once for an x and ``key`` while AOTAutograd traces a graph.

    A composite operator runs during tracing, on symbolic tensors.
    """
    if not _compat.functional(x):
        return make()
    made: dict[Hashable, Any] = _traced.setdefault(x, {})
    versioned = (x._version, key)
    if versioned not in made:
        made[versioned] = make()
    found: _Made = made[versioned]
    return found


Restore = Callable[[], Tensor]
# x -> its version, and a function that makes x in backward from tensors that are kept anyway. The
# function must not hold x: an entry is freed with its x.
_restores: Any = WeakTensorKeyDictionary()


def register_restore(x: Tensor, restore: Restore) -> None:
    """While AOTAutograd traces a graph: register ``restore``, which recomputes x in backward.

    For layers that let the compiler decide when x is compressed (:attr:`HotModule.defer`).
    """
    if _compat.functional(x):
        _restores[x] = (x._version, restore)


def _restore_of(x: Tensor) -> Restore | None:
    """The function registered for an unchanged x; None: backward has to keep x."""
    found: tuple[int, Restore] | None = _restores.get(x)
    return None if found is None or found[0] != x._version else found[1]


def _kept_of(x: Tensor, inner: Tensor, config: str, codes: bool) -> Pair:
    """Codes (empty unless ``codes``) and seed of x; ``inner`` is x as autocast casts it."""
    restore, dtype = _restore_of(x), inner.dtype
    if restore is not None and inner is not x:
        register_restore(inner, lambda: restore().to(dtype))

    def compress(rows: Tensor) -> Pair:
        kept: Pair = compress_seeded(rows, config)
        return kept

    return compress_once(x, inner, (config, codes), compress if codes else None)


Forms = tuple[Tensor, Tensor, Tensor]
"""An x for the forward product; the same x for backward, and the seed of that."""


def _input_of(x: Tensor, inner: Tensor, config: str, keep: bool) -> Forms:
    """Both forms of x; that for backward is empty unless ``keep``.

    Inside of a selective checkpoint by two operators: a policy that keeps what backward needs
    (:func:`hotcore.torch.keep_codes`) would keep the other form, of a byte a value, with it.
    """
    if keep and not _compat.in_selective_checkpoint():
        made: Forms = _once(x, (config, "both"), lambda: quantize_input(inner.detach(), config))
        return made
    saved, seed = _kept_of(x, inner, config, keep)
    key = (parsed(config).forward_block, inner.dtype)
    return _once(x, key, lambda: _codes_without_node(inner, config)), saved, seed


def _codes_without_node(inner: Tensor, config: str) -> Tensor:
    # Not of a detached x: torch 2.6 keeps that one too where a selective checkpoint recomputes.
    with torch.no_grad():
        codes: Tensor = forward_input(inner, config)
        return codes


def context_of(device: torch.device) -> _core.CoreContext:
    """The context for tensors of ``device``: torch's number of threads, or its current stream.

    Raises NotImplementedError for a device that this build has no backend for.
    """
    if device.type == "cpu":
        return contexts.cpu(torch.get_num_threads())
    if device.type == "cuda":
        return _cuda_context(torch.cuda.current_device() if device.index is None else device.index)
    raise NotImplementedError(f"x: no backend of hotcore for the device {device}")


def context_for(x: Tensor) -> _core.CoreContext:
    """``context_of(x.device)``; faster on CUDA, where reading a device's type makes a string."""
    return _cuda_context(x.get_device()) if x.is_cuda else context_of(x.device)


def _cuda_context(index: int) -> _core.CoreContext:
    # Only the handle: torch.cuda.current_stream() would wrap it in an object.
    return contexts.cuda(index, _compat.current_stream(index))


@functools.lru_cache(maxsize=4096)  # a call takes microseconds
def _saved_size(tokens: int, in_features: int, spec: _core.Spec) -> int:
    return _core.saved_layout(tokens, in_features, spec)[0]


@functools.lru_cache(maxsize=4096)  # the same for every stream of a device
def _workspace_size(
    size_of: Callable[..., int], device: torch.device, arguments: tuple[Any, ...]
) -> int:
    return size_of(context_of(device), *arguments)


def _workspace(size_of: Callable[..., int], x: Tensor, *arguments: Any) -> object:
    """Scratch of ``size_of(context, *arguments)`` bytes on x's device."""
    if x.is_cpu:  # the binding allocates its own
        return None
    device = x.device
    size = _workspace_size(size_of, device, arguments)
    return None if size == 0 else _to_dlpack(torch.empty(size, dtype=torch.uint8, device=device))


def _lend(tensor: Tensor, name: str) -> object:
    """A tensor's memory, for libhot: every tensor that was not made in this file passes here.

    torch may keep a minus sign as a bit beside the memory (``.imag`` of a conjugate), which libhot
    cannot see: such a tensor is copied. What has no memory of its own is refused by name, here or
    by libhot as a null pointer (a freed storage, a subclass that wraps other tensors).
    """
    if tensor.is_neg():
        tensor = tensor.resolve_neg()  # the capsule holds the copy
    try:
        return _to_dlpack(tensor)
    except (BufferError, RuntimeError) as error:
        raise RuntimeError(
            f"{name}: a tensor of layout {tensor.layout} on {tensor.device} has no memory that "
            f"hotcore could read ({error})"
        ) from error


def quantize_forward_weight(weight: Tensor, config: HotConfig) -> Tensor:
    """w ``[O, I]`` as one uint8 vector that :func:`forward` takes in its place.

    On the meta device a vector of that size.
    """
    rows, columns = weight.shape
    spec = config.forward_spec
    size = _core.forward_weight_bytes(rows, columns, spec)
    out = torch.empty(size, dtype=torch.uint8, device=weight.device)
    if weight.is_meta:
        return out
    _core.quantize_forward_weight(
        context_for(weight), _lend(weight, "weight"), spec, _to_dlpack(out)
    )
    return out


@functools.lru_cache(maxsize=4096)
def _input_size(tokens: int, in_features: int, spec: _core.ForwardLinearSpec) -> int:
    return _core.forward_input_bytes(tokens, in_features, spec)


@overload
def quantize_forward_input(x: Tensor, config: HotConfig) -> tuple[Tensor, None]: ...
@overload
def quantize_forward_input(x: Tensor, config: HotConfig, key: Key) -> tuple[Tensor, Tensor]: ...
def quantize_forward_input(
    x: Tensor, config: HotConfig, key: Key | None = None
) -> tuple[Tensor, Tensor | None]:
    """x ``[..., I]`` as a uint8 vector that :func:`forward` takes in its place, by libhot.

    With ``key`` also what :func:`compress` makes with it, from the same read of x where a kernel
    can.
    """
    x = collapsible(x)
    *leading, in_features = x.shape
    tokens, spec = math.prod(leading), config.forward_spec
    size = _input_size(tokens, in_features, spec)
    codes = torch.empty(size, dtype=torch.uint8, device=x.device)
    context, source, target = context_for(x), _lend(x, "x"), _to_dlpack(codes)
    if key is None:
        _core.quantize_forward_input(context, source, spec, target)
        return codes, None
    kept = config.spec
    saved = torch.empty(_saved_size(tokens, in_features, kept), dtype=torch.uint8, device=x.device)
    workspace = _workspace(_core.compress_activation_workspace, x, tokens, in_features, kept)
    _core.quantize_forward_input(
        context, source, spec, target, kept, key, _to_dlpack(saved), workspace
    )
    return codes, saved


class Frozen(NamedTuple):
    """A weight of which only codes exist (:mod:`hotcore.torch.frozen`)."""

    codes: Tensor
    """What :func:`quantize_forward_weight` makes: uint8, O rows of codes, then O fp32 scales."""
    block: int
    """Of the transform along I (``forward_block``)."""
    out_features: int
    in_features: int
    dtype: torch.dtype
    """Of the weight that it stands for."""


_CHUNK_VALUES = 1 << 24
"""Values of a weight that are dequantised at a time, by way of 64 MiB in fp32."""


def dequantize(weight: Frozen) -> Tensor:
    """The weight ``[O, I]`` that codes stand for, by libhot's stages; docs/numerics.md, "Forward".

    It is made in fp32 and rounded once, some rows at a time.
    """
    codes, rows, columns = weight.codes, weight.out_features, weight.in_features
    made = weight.dtype if weight.dtype in _FLOATS else torch.float32
    out = torch.empty((rows, columns), dtype=made, device=codes.device)
    if out.numel() and not codes.is_meta:
        context, width = context_for(codes), codes.numel() // rows - 4
        q = codes[: rows * width].view(torch.int8).view(rows, width)
        # 1 / n of the inverse transform, a power of two.
        scales = codes[rows * width :].view(torch.float32) / weight.block
        step = max(1, _CHUNK_VALUES // width)
        for begin in range(0, rows, step):
            part = slice(begin, begin + step)
            values = torch.empty((len(q[part]), width), dtype=torch.float32, device=codes.device)
            _core.dequantize(
                context, _to_dlpack(q[part]), _to_dlpack(scales[part]), "row", _to_dlpack(values)
            )
            whole = width == columns
            target = _to_dlpack(out[part] if whole else values)
            _core.fwht(context, _to_dlpack(values), 1, weight.block, target)
            if not whole:
                out[part] = values[:, :columns]
    return out.to(weight.dtype)


def forward(
    x: Tensor,
    weight: Tensor | Frozen,
    bias: Tensor | None,
    config: HotConfig,
    codes: Tensor | None = None,
) -> Tensor:
    """``x weight^T + bias`` in INT8, ``[..., O]`` in x's dtype, straight to libhot.

    Weight and bias are of any of the three dtypes. ``codes`` is what
    :func:`quantize_forward_input` made of x, whose values are then not looked at.
    """
    rows, spec = x if codes is not None else collapsible(x), config.forward_spec
    *leading, in_features = rows.shape
    matrix: Tensor | None = None
    if isinstance(weight, Frozen):
        matrix, quantized, out_features = None, weight.codes, weight.out_features
    else:
        matrix, quantized, out_features = weight, None, weight.shape[0]
    tokens = math.prod(leading)
    y = torch.empty((*x.shape[:-1], out_features), dtype=x.dtype, device=x.device)
    sizes = (
        *(tokens, out_features, in_features, spec),
        *(quantized is not None, codes is not None),
    )
    _core.forward_linear(
        context_for(x),
        None if codes is not None else _lend(rows, "x"),
        None if matrix is None else _lend(matrix, "weight"),
        None if bias is None else _lend(bias, "bias"),
        spec,
        _to_dlpack(y if 2 <= y.dim() <= 4 else y.view(tokens, out_features)),
        _workspace(_core.forward_linear_workspace, x, *sizes),
        None if quantized is None else _lend(quantized, "codes of the weight"),
        None if codes is None else _lend(codes, "codes of x"),
        in_features,
    )
    return y


def compress(x: Tensor, config: HotConfig, key: Key) -> Tensor:
    """x ``[..., I]`` compressed to a uint8 vector, by libhot without autograd or dispatcher."""
    x = collapsible(x)
    *leading, in_features = x.shape
    tokens, spec = math.prod(leading), config.spec
    size = _saved_size(tokens, in_features, spec)
    saved = torch.empty(size, dtype=torch.uint8, device=x.device)
    workspace = _workspace(_core.compress_activation_workspace, x, tokens, in_features, spec)
    _core.compress_activation(
        context_for(x), _lend(x, "x"), spec, key, _to_dlpack(saved), workspace
    )
    return saved


def decompress(
    saved: Tensor, tokens: int, in_features: int, config: HotConfig, key: Key, dtype: torch.dtype
) -> Tensor:
    """:func:`compress`'s x back, ``[tokens, I]``, rounded once to ``dtype``.

    Only for basis ``"full"`` and the token storages, which keep x itself; ``key`` is the one of
    :func:`compress`.
    """
    out = torch.empty((tokens, in_features), dtype=dtype, device=saved.device)
    _core.decompress_activation(
        context_for(saved),
        _lend(saved, "the saved x"),
        tokens,
        in_features,
        key,
        0,
        tokens,
        config.spec,
        _to_dlpack(out),
    )
    return out


def backward(
    gy: Tensor,
    weight: Tensor | None,
    saved: Tensor | None,
    in_features: int,
    config: HotConfig,
    keys: tuple[Key, Key],
    outputs: tuple[Tensor | None, Tensor | None, Tensor | None],
    accumulate: bool = False,
) -> None:
    """Write ``outputs`` (g_x, g_w, g_b; None: not wanted) by libhot.

    gy is ``[..., O]`` and g_x ``[..., I]``, with equal or flattened leading dimensions. ``keys``:
    the key that ``saved`` was made with, and the key that rounds g_y (:func:`keys_of`). With
    ``accumulate`` g_w and g_b are added to the values in their tensors.
    """
    gy = collapsible(gy)
    *leading, out_features = gy.shape
    tokens, spec = math.prod(leading), config.spec
    saved_key, key = keys
    gx, gw, gb = outputs
    if accumulate:  # to tensors of the caller, which may be negated, too
        gw = None if gw is None else gw.resolve_neg()
        gb = None if gb is None else gb.resolve_neg()
    if gx is not None and not 2 <= gx.dim() <= 4:
        gx = gx.view(tokens, in_features)
    workspace = _workspace(
        _core.backward_linear_workspace,
        gy,
        tokens,
        out_features,
        in_features,
        spec,
        gx is not None,
        gw is not None,
    )
    _core.backward_linear(
        context_for(gy),
        _lend(gy, "gy"),
        None if weight is None else _lend(weight, "weight"),
        None if saved is None else _lend(saved, "the saved x"),
        tokens,
        in_features,
        saved_key,
        spec,
        key,
        None if gx is None else _to_dlpack(gx),
        None if gw is None else _to_dlpack(gw),
        None if gb is None else _to_dlpack(gb),
        accumulate,
        workspace,
    )
    for given, made in zip(outputs[1:], (gw, gb), strict=True):
        if given is not None and made is not None and made is not given:
            given.copy_(made)


def keys_of(saved_seed: Tensor | None, seed: Tensor) -> tuple[Key, Key]:
    """Keys for :func:`backward`; without ``saved_seed`` x was compressed with the layer's seed."""
    key = key_of(seed)
    if saved_seed is None or saved_seed is seed:
        return key, key
    return key_of(saved_seed), key


def key_of(seed: Tensor) -> Key:
    """The key of a seed: ``Key(0, seed)``; kernels read a seed on a CUDA device there."""
    if seed.is_cuda:
        return Key(0, counter=seed.data_ptr())
    return Key(0, int(seed.item()))


def flat(x: Tensor) -> Tensor:
    """``[..., I]`` as ``[L, I]``."""
    if x.dim() == 2:
        return x
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def collapsible(x: Tensor) -> Tensor:
    """``[..., I]`` for libhot: x itself if its leading dimensions collapse, else flattened."""
    return x if 2 <= x.dim() <= 4 and x.is_contiguous() else flat(x)


def new_gradients(
    gy: Tensor, x_shape: Sequence[int], dtypes: Sequence[torch.dtype | None]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Uninitialised g_x, g_w and g_b for :func:`backward`; None for a dtype of None."""
    out_features, device = gy.shape[-1], gy.device
    of_gx, of_gw, of_gb = dtypes
    matrix, empty = (out_features, x_shape[-1]), torch.empty
    return (
        None if of_gx is None else empty(x_shape, dtype=of_gx, device=device),
        None if of_gw is None else empty(matrix, dtype=of_gw, device=device),
        None if of_gb is None else empty(out_features, dtype=of_gb, device=device),
    )


def register(*operators: tuple[str, Callable[..., Any], Callable[..., Any]]) -> None:
    """Register operators of :data:`library` (name, implementation, fake) for CPU and CUDA."""
    for name, implementation, fake in operators:
        for key in ("CPU", "CUDA"):
            library.impl(name, implementation, key)
        torch.library.register_fake(f"hotcore::{name}", fake, lib=library)


def _product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    saved: Tensor | None,
    seed: Tensor,
    config: str,
    codes: Tensor | None = None,
) -> Tensor:
    settings = parsed(config)
    if settings.forward == "int8":
        return forward(x, weight, bias, settings, codes)
    return _plain_product(x, weight, bias)


def _plain_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    dtype = x.dtype
    if weight.dtype != dtype:  # under autocast
        weight = weight.to(dtype)
    if bias is not None and bias.dtype != dtype:
        bias = bias.to(dtype)
    return F.linear(x, weight, bias).contiguous()


def _fake_product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    saved: Tensor | None,
    seed: Tensor,
    config: str,
    codes: Tensor | None = None,
) -> Tensor:
    return _fake_forward_linear(x, weight, bias, config)


def _forward_linear(x: Tensor, weight: Tensor, bias: Tensor | None, config: str) -> Tensor:
    return forward(x, weight, bias, parsed(config))


def _fake_forward_linear(x: Tensor, weight: Tensor, bias: Tensor | None, config: str) -> Tensor:
    register_with_partitioner()
    return _plain_product(x, weight, bias)  # which checks the shapes


_Backward = TypeVar("_Backward", bound=Callable[..., Any])


def not_differentiable(backward: _Backward) -> _Backward:
    """Have an autograd function's backward raise RuntimeError under ``create_graph=True``.

    Not when its result is differentiated, as ``once_differentiable`` does: autograd does not visit
    a node that leads to none of the inputs that it was asked for, so the term would just be left
    out.
    """

    @functools.wraps(backward)
    def checked(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled():  # by the engine, to follow this pass
            raise RuntimeError(
                "hotcore.torch: create_graph=True reaches a HOT layer, whose backward cannot be "
                "differentiated: revert() the model, or keep the layer plain (convert's filter_fn)"
            )
        return backward(ctx, *gradients)

    return checked  # type: ignore[return-value]  # of the same signature


def without_base(y: Tensor) -> Tensor:
    """The same memory as a tensor that is no view, for the result of an autograd function.

    ``F.linear`` may return a view of its product; autograd forbids writing such a result in place.
    """
    return y if y._base is None else y.data


class _Linear(torch.autograd.Function):
    """``product`` and its backward, as AOTAutograd traces them."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        saved: Tensor | None,
        seed: Tensor,
        config: str,
        codes: Tensor | None,
        restore: Restore | None,
    ) -> Tensor:
        need_gx, need_gw, need_gb, *_ = ctx.needs_input_grad
        # Without codes the compiler decides when x is compressed: backward uses x itself.
        deferred = need_gw and saved is None
        ctx.restore = restore if deferred else None
        kept = x if deferred and restore is None else saved
        ctx.save_for_backward(kept if need_gw else None, seed, weight if need_gx else None)
        ctx.config, ctx.x_shape, ctx.deferred = config, x.shape, deferred
        ctx.dtypes = (
            x.dtype if need_gx else None,
            weight.dtype if need_gw else None,
            bias.dtype if bias is not None and need_gb else None,
        )
        operator = torch.ops.hotcore.product.default
        y: Tensor = operator(x, weight, bias, saved, seed, config, codes)
        return without_base(y)

    @staticmethod
    @not_differentiable
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, ...]:
        kept, seed, weight = ctx.saved_tensors
        if ctx.restore is not None:
            kept = ctx.restore()
        if ctx.deferred:
            kept = compress_activation(kept, seed, ctx.config)
        arguments = (gy, weight, kept, seed, seed, ctx.config, ctx.x_shape, *ctx.dtypes)
        return (*backward_linear(*arguments), *(None,) * 5)


def _linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    saved: Tensor | None,
    seed: Tensor,
    config: str,
    codes: Tensor | None = None,
) -> Tensor:
    arguments = (x, weight, bias, saved, seed, config, codes, _restore_of(x))
    y: Tensor = _Linear.apply(*arguments)  # type: ignore[no-untyped-call]  # so in torch
    return y


def _compress_activation(x: Tensor, seed: Tensor, config: str) -> Tensor:
    return compress(x, parsed(config), key_of(seed))


def _compress(x: Tensor, config: str) -> Pair:
    seed = _draw_seed(x)
    return compress(x, parsed(config), key_of(seed)), seed


def _forward_input(x: Tensor, config: str) -> Tensor:
    return quantize_forward_input(x, parsed(config))[0]


def _fake_forward_input(x: Tensor, config: str) -> Tensor:
    size = input_bytes(math.prod(x.shape[:-1]), x.shape[-1], parsed(config))
    return torch.empty(size, dtype=torch.uint8, device=x.device)


def _quantize_input(x: Tensor, config: str) -> Forms:
    seed = _draw_seed(x)
    codes, saved = quantize_forward_input(x, parsed(config), key_of(seed))
    return codes, saved, seed


def _fake_quantize_input(x: Tensor, config: str) -> Forms:
    return (_fake_forward_input(x, config), *_fake_compress(x, config))


def _fake_compress(x: Tensor, config: str) -> Pair:
    seed = _fake_draw_seed(x)
    return _fake_compress_activation(flat(x), seed, config), seed


def _outputs(
    gy: Tensor, in_features: int, dtypes: Sequence[torch.dtype | None]
) -> tuple[Tensor, Tensor, Tensor]:
    new = new_gradients(gy, (gy.shape[0], in_features), dtypes)
    # An operator cannot return None: unwanted gradients are empty vectors.
    gx, gw, gb = (gy.new_empty(0) if gradient is None else gradient for gradient in new)
    return gx, gw, gb


def _backward_linear(
    gy: Tensor,
    weight: Tensor | None,
    saved: Tensor | None,
    saved_seed: Tensor | None,
    seed: Tensor,
    config: str,
    in_features: int,
    *dtypes: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:
    results = _outputs(gy, in_features, dtypes)
    gx, gw, gb = (out if dtype else None for out, dtype in zip(results, dtypes, strict=True))
    keys = keys_of(saved_seed, seed)
    backward(gy, weight, saved, in_features, parsed(config), keys, (gx, gw, gb))
    return results


def _fake_draw_seed(x: Tensor) -> Tensor:
    return torch.empty((), dtype=torch.int64, device=x.device)


def _fake_compress_activation(x: Tensor, seed: Tensor, config: str) -> Tensor:
    tokens, in_features = x.shape
    size = saved_bytes(tokens, in_features, parsed(config))
    return torch.empty(size, dtype=torch.uint8, device=x.device)


def _fake_backward_linear(
    gy: Tensor,
    weight: Tensor | None,
    saved: Tensor | None,
    saved_seed: Tensor | None,
    seed: Tensor,
    config: str,
    in_features: int,
    *dtypes: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:
    return _outputs(gy, in_features, dtypes)


def _up(value: int, multiple: int) -> int:
    return (value + multiple - 1) // multiple * multiple


def _feature_block(features: int, largest: int) -> int:
    """The block of the transform along so many features; docs/numerics.md, "One code a value"."""
    for block in (64, 32):
        if block <= largest and _up(features, block) <= features + features // 8:
            return block
    return 16


def saved_bytes(tokens: int, in_features: int, config: HotConfig) -> int:
    """``saved_layout(...).bytes`` in arithmetic that symbolic shapes can follow."""
    if config.storage in TOKEN_STORAGES:
        block = _feature_block(in_features, config.hadamard_block)
        width, packed = _up(in_features, block), config.storage != "token8"
        ratios = (width + 31) // 32 if packed else 0
        row = width // {"token8": 1, "token4": 2, "token2": 4}[config.storage]
        codes = _up(tokens * (row + ratios), 4)
        return codes + tokens * (2 if packed else 4) + in_features
    if config.storage != "int8":
        row = _up(tokens, 64) // 4 if config.storage == "rht2" else _up(tokens, 32) // 2
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
    exponents = tokens if config.equalize_tokens else 0
    return _up(in_features * row, 16) + scales + exponents


def input_bytes(tokens: int, in_features: int, config: HotConfig) -> int:
    """``forward_input_bytes(...)``, likewise."""
    return tokens * (_up(_up(in_features, config.forward_block), 16) + 4)


def _frozen_parts(arguments: Sequence[Any]) -> tuple[Frozen, Tensor | None]:
    """The weight of an operator's arguments, and x_codes, which it may leave out."""
    *frozen, x_codes = (*arguments, None)[: len(Frozen._fields) + 1]
    return Frozen(*frozen), x_codes


def _frozen_product(
    x: Tensor, bias: Tensor | None, seed: Tensor | None, config: str, *arguments: Any
) -> Tensor:
    weight, x_codes = _frozen_parts(arguments)
    if config and parsed(config).forward == "int8":
        return forward(x, weight, bias, parsed(config), x_codes)
    return _plain_product(x, dequantize(for_product(weight, x.dtype)), bias)


def for_product(weight: Frozen, dtype: torch.dtype) -> Frozen:
    """The weight for a product in ``dtype``: the bits that a plain layer's cast would give.

    fp32 holds dequantised values as they are: they are rounded once in either case.
    """
    return weight._replace(dtype=dtype) if weight.dtype == torch.float32 else weight


def _fake_frozen_product(
    x: Tensor, bias: Tensor | None, seed: Tensor | None, config: str, *arguments: Any
) -> Tensor:
    register_with_partitioner()
    weight, _ = _frozen_parts(arguments)
    return _plain_product(x, _fake_dequantize(*weight), bias)


def _dequantize(*frozen: Any) -> Tensor:
    return dequantize(Frozen(*frozen))


def _fake_dequantize(*frozen: Any) -> Tensor:
    weight = Frozen(*frozen)
    shape = (weight.out_features, weight.in_features)
    return torch.empty(shape, dtype=weight.dtype, device=weight.codes.device)


def _frozen_backward(
    gy: Tensor, seed: Tensor | None, config: str, *arguments: Any
) -> tuple[Tensor, Tensor]:
    *frozen, gx_dtype, gb_dtype = arguments
    weight = Frozen(*frozen)
    if seed is None:
        return _plain_gradients(gy, weight, gx_dtype, gb_dtype)
    gx, gb = _frozen_outputs(gy, weight, gx_dtype, gb_dtype)
    outputs = (gx if gx_dtype else None, None, gb if gb_dtype else None)
    matrix, keys = dequantize(weight) if gx_dtype else None, keys_of(seed, seed)
    backward(gy, matrix, None, weight.in_features, parsed(config), keys, outputs)
    return gx, gb


def _plain_gradients(
    gy: Tensor, weight: Frozen, gx_dtype: torch.dtype | None, gb_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    """g_x and g_b of a plain product; empty where not wanted."""
    gx = gb = gy.new_empty(0)
    if gx_dtype is not None:
        matrix = dequantize(for_product(weight, gy.dtype)).to(gy.dtype)
        gx = (gy @ matrix).to(gx_dtype)
    if gb_dtype is not None:
        gb = gy.sum(tuple(range(gy.dim() - 1))).to(gb_dtype)
    return gx, gb


def _frozen_outputs(
    gy: Tensor, weight: Frozen, gx_dtype: torch.dtype | None, gb_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    gx, _, gb = _outputs(gy, weight.in_features, (gx_dtype, None, gb_dtype))
    return gx, gb


def _fake_frozen_backward(
    gy: Tensor, seed: Tensor | None, config: str, *arguments: Any
) -> tuple[Tensor, Tensor]:
    *frozen, gx_dtype, gb_dtype = arguments
    return _frozen_outputs(gy, Frozen(*frozen), gx_dtype, gb_dtype)


class _FrozenLinear(torch.autograd.Function):
    """``frozen_product`` and its backward, in eager mode and as AOTAutograd traces them.

    Nothing is kept of x, and of the weight its codes, which are there anyway.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor | None, seed: Tensor | None, config: str, *arguments: Any
    ) -> Tensor:
        need_gx, need_gb, *_ = ctx.needs_input_grad
        weight, x_codes = _frozen_parts(arguments)
        codes, *rest = weight
        ctx.save_for_backward(seed, codes)
        ctx.set_materialize_grads(False)
        ctx.config, ctx.rest, ctx.x_shape = config, rest, x.shape
        ctx.dtypes = (
            x.dtype if need_gx else None,
            bias.dtype if bias is not None and need_gb else None,
        )
        return without_base(frozen_product(x, bias, seed, config, weight, x_codes))

    @staticmethod
    @not_differentiable
    def backward(ctx: Any, gy: Tensor | None) -> tuple[Tensor | None, ...]:
        others = (None,) * (len(ctx.needs_input_grad) - 2)
        if gy is None:
            return None, None, *others
        seed, codes = ctx.saved_tensors
        weight = Frozen(codes, *ctx.rest)
        gx, gb = _frozen_gradients(gy, seed, ctx.config, weight, ctx.x_shape, *ctx.dtypes)
        return gx, gb, *others


def _frozen_gradients(
    gy: Tensor,
    seed: Tensor | None,
    config: str,
    weight: Frozen,
    x_shape: torch.Size,
    gx_dtype: torch.dtype | None,
    gb_dtype: torch.dtype | None,
) -> tuple[Tensor | None, Tensor | None]:
    """g_x and g_b (None for a dtype of None), by the operator or directly, with equal results."""
    dtypes = (gx_dtype, gb_dtype)
    if _bypasses_dispatcher(gy) and seed is not None:
        matrix = None if gx_dtype is None else dequantize(weight)
        arguments = (gy, matrix, None, seed, seed, config, x_shape, gx_dtype, None, gb_dtype)
        gx, _, gb = backward_linear(*arguments)
        return gx, gb
    rows = dense(gy).reshape(math.prod(x_shape[:-1]), gy.shape[-1])
    found = torch.ops.hotcore.frozen_backward.default(rows, seed, config, *weight, *dtypes)
    gx, gb = (None if dtype is None else t for t, dtype in zip(found, dtypes, strict=True))
    return None if gx is None else gx.view(x_shape), gb


def apply_frozen_linear(x: Tensor, *arguments: Any) -> Tensor:
    """``frozen_linear`` without the operator."""
    y: Tensor = _FrozenLinear.apply(x, *arguments)  # type: ignore[no-untyped-call]  # so in torch
    return y


register(
    ("dequantize_weight", _dequantize, _fake_dequantize),
    ("frozen_product", _frozen_product, _fake_frozen_product),
    ("frozen_backward", _frozen_backward, _fake_frozen_backward),
    ("draw_seed", _draw_seed, _fake_draw_seed),
    ("compress_activation", _compress_activation, _fake_compress_activation),
    ("compress", _compress, _fake_compress),
    ("forward_input", _forward_input, _fake_forward_input),
    ("quantize_input", _quantize_input, _fake_quantize_input),
    ("product", _product, _fake_product),
    ("forward_linear", _forward_linear, _fake_forward_linear),
    ("backward_linear", _backward_linear, _fake_backward_linear),
)
for _name, _made in (
    ("kept_of", _kept_of),
    ("input_of", _input_of),
    ("linear", _linear),
    ("frozen_linear", apply_frozen_linear),
):
    library.impl(_name, _made, "CompositeImplicitAutograd")

draw_seed = torch.ops.hotcore.draw_seed.default
compress_seeded = torch.ops.hotcore.compress.default
kept_of = torch.ops.hotcore.kept_of.default
forward_input = torch.ops.hotcore.forward_input.default
quantize_input = torch.ops.hotcore.quantize_input.default
input_of = torch.ops.hotcore.input_of.default
linear = torch.ops.hotcore.linear.default
frozen_linear = torch.ops.hotcore.frozen_linear.default


@functools.cache
def register_with_partitioner() -> None:
    """Tell the partitioner that products are expensive; fakes call this, so only compilation does.

    Otherwise an activation memory budget would recompute them.
    """
    names = (
        *("product", "forward_linear", "backward_linear", "convolution", "backward_conv2d"),
        *("frozen_product", "frozen_backward"),
    )
    _compat.count_as_products(getattr(torch.ops.hotcore, name) for name in names)


# As in torch, a multiply-add counts as two; the arguments are the shapes of the operands.


@register_flop_formula(
    [torch.ops.hotcore.linear, torch.ops.hotcore.product, torch.ops.hotcore.forward_linear]
)
def _linear_flops(x_shape: Sequence[int], weight_shape: Sequence[int], *_: Any, **__: Any) -> int:
    return 2 * math.prod(x_shape) * weight_shape[0]


@register_flop_formula(torch.ops.hotcore.backward_linear)
def _backward_linear_flops(
    gy_shape: Sequence[int],
    weight_shape: Sequence[int] | None,
    saved_shape: Sequence[int] | None,
    saved_seed_shape: Any,
    seed_shape: Any,
    config: str,
    in_features: int,
    *dtypes: torch.dtype | None,
    **_: Any,
) -> int:
    """Both products at full rank, whatever their precision; a lower rank takes less time."""
    return 2 * math.prod(gy_shape) * in_features * sum(dtype is not None for dtype in dtypes[:2])


@register_flop_formula([torch.ops.hotcore.frozen_linear, torch.ops.hotcore.frozen_product])
def _frozen_flops(x_shape: Sequence[int], *arguments: Any, **_: Any) -> int:
    _bias, _seed, _config, _codes, _block, out_features, *_rest = arguments
    return 2 * math.prod(x_shape) * int(out_features)


@register_flop_formula(torch.ops.hotcore.frozen_backward)
def _frozen_backward_flops(gy_shape: Sequence[int], *arguments: Any, **_: Any) -> int:
    *_rest, in_features, _dtype, gx_dtype, _gb_dtype = arguments
    return 0 if gx_dtype is None else 2 * math.prod(gy_shape) * int(in_features)


_WITHOUT_FLOPS = (
    *("draw_seed", "kept_of", "compress", "compress_activation", "dequantize_weight"),
    *("forward_input", "quantize_input", "input_of"),
)


@register_flop_formula([getattr(torch.ops.hotcore, name) for name in _WITHOUT_FLOPS])
def _no_flops(*_: Any, **__: Any) -> int:
    return 0


def dense(gy: Tensor) -> Tensor:
    """g_y as a dense tensor: the consumer of y may have made a sparse one."""
    return gy if gy.layout is torch.strided else gy.to_dense()


def is_sparse_or_batched(gy: Tensor) -> bool:
    """Whether g_y is sparse or batched by vmap: then it has no memory for libhot to read."""
    return gy.layout is not torch.strided or _compat.batched(gy)


def is_intercepted(x: Tensor) -> bool:
    """Whether a subclass of Tensor or a dispatch mode intercepts operations on x."""
    return type(x) not in PLAIN_TYPES or _compat.dispatch_modes() != 0


def _bypasses_dispatcher(x: Tensor) -> bool:
    """Whether nothing intercepts the operator: the dispatcher then only costs 5 to 10 us."""
    return (
        not torch.compiler.is_compiling()
        and (x.is_cuda or x.is_cpu)  # device.type takes three times as long
        and not is_intercepted(x)
    )


def bypasses_dispatcher(x: Tensor, weight: Tensor) -> bool:
    """Whether :func:`forward_linear` of these goes past the dispatcher."""
    # torch.jit.trace would note an empty y, and nothing that fills it.
    return _bypasses_dispatcher(x) and type(weight) in PLAIN_TYPES and not _compat.jit_tracing()


def forward_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    config: str,
    codes: Tensor | None = None,
) -> Tensor:
    """``x weight^T + bias`` in INT8, by the operator or as it would be; no gradients.

    ``codes`` of x are :func:`forward`'s: only where the call :func:`bypasses_dispatcher`.
    """
    if codes is not None or bypasses_dispatcher(x, weight):
        return forward(x, weight, bias, parsed(config), codes)
    y: Tensor = torch.ops.hotcore.forward_linear.default(x, weight, bias, config)
    return y


def frozen_product(
    x: Tensor,
    bias: Tensor | None,
    seed: Tensor | None,
    config: str,
    weight: Frozen,
    x_codes: Tensor | None = None,
) -> Tensor:
    """``x w^T + bias``, by the operator or directly; no gradients. Without a config it is plain."""
    arguments = (x, bias, seed, config, *weight, x_codes)
    if bypasses_dispatcher(x, weight.codes):
        return _frozen_product(*arguments)
    y: Tensor = torch.ops.hotcore.frozen_product.default(*arguments)
    return y


def dequantized(weight: Frozen) -> Tensor:
    """:func:`dequantize`, by the operator or directly."""
    if bypasses_dispatcher(weight.codes, weight.codes) or weight.codes.is_meta:
        return dequantize(weight)
    out: Tensor = torch.ops.hotcore.dequantize_weight.default(*weight)
    return out


def compress_activation(x: Tensor, seed: Tensor, config: str) -> Tensor:
    """x ``[..., I]`` compressed, by the operator or directly, with the same result."""
    if _bypasses_dispatcher(x):
        return _compress_activation(x, seed, config)
    saved: Tensor = torch.ops.hotcore.compress_activation.default(flat(x), seed, config)
    return saved


def backward_linear(
    gy: Tensor,
    weight: Tensor | None,
    saved: Tensor | None,
    saved_seed: Tensor | None,
    seed: Tensor,
    config: str,
    x_shape: torch.Size,
    *dtypes: torch.dtype | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """g_x, g_w, g_b (None for a dtype of None), by the operator or directly, with equal results."""
    if _bypasses_dispatcher(gy) and (weight is None or type(weight) in PLAIN_TYPES):
        outputs = new_gradients(gy, x_shape, dtypes)
        keys = keys_of(saved_seed, seed)
        try:
            backward(gy, weight, saved, x_shape[-1], parsed(config), keys, outputs)
            return outputs
        except RuntimeError:  # a check in advance would slow down every other call
            if not is_sparse_or_batched(gy):
                raise
    rows = dense(gy).reshape(math.prod(x_shape[:-1]), gy.shape[-1])
    arguments = (rows, weight, saved, saved_seed, seed, config, x_shape[-1], *dtypes)
    gx, gw, gb = torch.ops.hotcore.backward_linear.default(*arguments)
    wants_gx, wants_gw, wants_gb = (dtype is not None for dtype in dtypes)
    return (
        gx.view(x_shape) if wants_gx else None,
        gw if wants_gw else None,
        gb if wants_gb else None,
    )
