"""Linear layers: the forward of ``F.linear``, or an 8-bit one, and the backward of HOT.

Eager and compiled layers run one autograd function, :class:`Linear`. Eager ones go past the
dispatcher where nothing intercepts it. A compiled layer calls the composite operator ``linear``:
``product`` (``F.linear``, or libhot's with ``forward="int8"``) with the backward
``backward_linear``. It takes the codes of x, although the product does not need them, so that they
exist before it. Otherwise the partitioner would move the compression and its seed into backward
(:attr:`HotModule.defer` allows that).

No codes of a weight stay for the next call: nothing on the host tells whether a weight was written
in between (``.data``, fused optimizers and FSDP raise no version).
:func:`hotcore.torch.freeze_int8` keeps codes, in place of the weight.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import _core
from ...config import ConfigLike, HotConfig, Key
from .. import _compat
from . import calls, codes, core, sharded, sharing
from .codes import Frozen
from .core import Handle, handle_of, lend, parsed, to_dlpack, workspace
from .registry import Size, not_differentiable, operator, without_base

_DEFAULT = HotConfig()
_FIELDS = "int block=0, int rows=0, int columns=0, ScalarType? dtype=None"
Fields = Annotated[Any, _FIELDS]
"""Of a :class:`.codes.Frozen` whose codes an operator takes as its weight; empty for others."""
_DTYPES = "ScalarType? gx_dtype, ScalarType? gw_dtype, ScalarType? gb_dtype"
DtypesAndFields = Annotated[Any, f"{_DTYPES}, {_FIELDS}"]
"""Dtypes of g_x, g_w and g_b, None: not wanted; and fields."""
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
"""g_x, g_w and g_b; None: not wanted."""


# ---- what a user calls ----


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, config: ConfigLike = _DEFAULT
) -> Tensor:
    """``x weight^T + bias``, bit for bit as ``F.linear``; gradients are computed with HOT.

    With ``forward="int8"`` in the configuration it is :func:`hotcore.forward_linear` of x, as
    autocast casts it, and of the parameters as they are; the gradients are the same.

    Backward keeps only the compressed x, and nothing of x where ``weight`` is frozen. Consecutive
    layers with the same x and configurations that compress it alike share one compressed x
    (:class:`share_inputs`). Without anything to differentiate the result is the same. Every call
    draws one seed from torch's default CPU generator, so ``torch.manual_seed`` makes a run
    repeatable.

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
    calls.check_tensors(bias, weight=weight)
    return linear_from_json(x, weight, bias, calls.config_json(config))


def linear_from_json(
    x: Tensor,
    weight: Tensor | Frozen,
    bias: Tensor | None,
    config_json: str,
    defer: bool = False,
) -> Tensor:
    """:func:`linear` with the configuration as JSON, which compiled graphs hold as a constant.

    ``defer``: see :attr:`.HotModule.defer`. Of a weight of which only codes exist g_x and g_b are
    computed; it takes an empty text, too: the plain layer with the dequantised weight, in forward
    and backward, which draws no seed.
    """
    if not isinstance(x, Tensor):
        return calls.handle_overrides(linear_from_json, x, weight, bias, config_json, defer)
    if isinstance(weight, Frozen):
        if torch.compiler.is_compiling():
            return _frozen(x, weight, bias, config_json)
        with calls.hide_from_modes(x, weight.codes):
            return _frozen(x, weight, bias, config_json)
    subclass = type(x) not in core.PLAIN_TYPES or type(weight) not in core.PLAIN_TYPES
    if subclass and (sharded.is_dtensor(x) or sharded.is_dtensor(weight)):
        parts, layout = sharded.split(x, weight, bias)
        return sharded.joined(linear_from_json(*parts, config_json, defer), layout)
    if torch.compiler.is_compiling():
        return _compiled_linear(x, weight, bias, config_json, defer)
    with calls.hide_from_modes(x, weight):
        seed = calls.seed_for_call("linear", x, weight, bias, config_json)
        if seed is None:
            return _without_gradients(x, weight, bias, config_json)
        output: Tensor = Linear.apply(x, weight, bias, seed, config_json)  # type: ignore[no-untyped-call]  # so in torch
        return output


def _without_gradients(x: Tensor, weight: Tensor, bias: Tensor | None, config_json: str) -> Tensor:
    if not calls.is_int8(config_json):
        return F.linear(x, weight, bias)
    dtype = calls.autocast_dtype(x)
    calls.check_dtypes(x, weight.dtype, bias, dtype)
    calls.check_transforms("linear", x, weight, bias)
    return undifferentiated(calls.cast(x, dtype), weight, bias, config_json)


def _compiled_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, config_json: str, defer: bool
) -> Tensor:
    if not calls.wants_gradients(x, weight, bias, config_json):
        return _without_gradients(x, weight, bias, config_json)
    dtype, int8 = calls.autocast_dtype(x), calls.is_int8(config_json)
    if int8:
        calls.check_dtypes(x, weight.dtype, bias, dtype)
    inner = calls.cast(x, dtype)  # in the graph, where the compiler fuses it with x's producer
    keep, quantized = weight.requires_grad and not defer, None
    if int8:
        quantized, saved, seed = codes.input_of(x, inner, config_json, keep)
    else:
        saved, seed = codes.kept_of(x, inner, config_json, keep)
    kept = saved if keep else None
    y: Tensor = _linear(inner, weight, bias, kept, seed, config_json, quantized)
    return y


# ---- the forward product ----


def int8_linear(
    x: Tensor,
    weight: Tensor | Frozen,
    bias: Tensor | None,
    config: HotConfig,
    quantized: Tensor | None = None,
) -> Tensor:
    """``x weight^T + bias`` in INT8, ``[..., O]`` in x's dtype, straight to libhot.

    Weight and bias are of any of the three dtypes. ``quantized`` is what
    :func:`codes.quantize_forward_input` made of x, whose values are then not looked at.
    """
    spec = config.forward_spec
    if quantized is None:
        rows, tokens, in_features = core.collapsible(x)
    else:
        rows, tokens, in_features = x, math.prod(x.shape[:-1]), x.shape[-1]
    if isinstance(weight, Frozen):
        matrix, frozen, out_features = None, codes.body(weight), weight.out_features
    else:
        matrix, frozen, out_features = weight, None, weight.shape[0]
    y = torch.empty((*x.shape[:-1], out_features), dtype=x.dtype, device=x.device)
    shape = (tokens, out_features, in_features, spec)
    given = (frozen is not None, quantized is not None)
    _core.forward_linear(
        core.context_for(x),
        None if quantized is not None else lend(rows, "x"),
        None if matrix is None else lend(matrix, "weight"),
        None if bias is None else lend(bias, "bias"),
        spec,
        to_dlpack(y if 2 <= y.dim() <= 4 else y.view(tokens, out_features)),
        workspace(_core.forward_linear_workspace, x, *shape, *given),
        None if frozen is None else lend(frozen, "codes of the weight"),
        None if quantized is None else lend(quantized, "codes of x"),
        in_features,
    )
    return y


def plain_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``F.linear`` in x's dtype, contiguous."""
    dtype = x.dtype
    if weight.dtype != dtype:  # under autocast
        weight = weight.to(dtype)
    if bias is not None and bias.dtype != dtype:
        bias = bias.to(dtype)
    return F.linear(x, weight, bias).contiguous()


def _held(weight: Any, frozen: Sequence[Any]) -> Any:
    """The weight of an operator's arguments: as it is, or what its codes stand for."""
    return Frozen(weight, *frozen) if frozen and weight is not None else weight


def _flops(x_shape: Sequence[int], weight_shape: Sequence[int], *arguments: Any, **_: Any) -> int:
    out_features = arguments[6] if len(arguments) > 6 else weight_shape[0]
    return 2 * math.prod(x_shape) * int(out_features)


def _fake_product(x: Tensor, weight: Tensor, bias: Tensor | None, *arguments: Any) -> Tensor:
    held = _held(weight, arguments[4:])
    matrix = codes.fake_dequantize(*held) if isinstance(held, Frozen) else held
    return plain_product(x, matrix, bias)  # which checks the shapes


@operator(fake=_fake_product, flops=_flops, product=True)
def _product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    saved: Tensor | None,
    seed: Tensor | None,
    config: str,
    codes: Tensor | None = None,
    *frozen: Fields,
) -> Tensor:
    return _multiply(x, _held(weight, frozen), bias, config, codes)


def _multiply(
    x: Tensor,
    weight: Tensor | Frozen,
    bias: Tensor | None,
    config: str,
    quantized: Tensor | None,
) -> Tensor:
    if calls.is_int8(config):
        return int8_linear(x, weight, bias, parsed(config), quantized)
    if isinstance(weight, Frozen):
        weight = codes.dequantize(_for_product(weight, x.dtype))
    return plain_product(x, weight, bias)


def _for_product(weight: Frozen, dtype: torch.dtype) -> Frozen:
    """The weight for a product in ``dtype``: the bits that a plain layer's cast would give.

    fp32 holds dequantised values as they are: they are rounded once in either case.
    """
    return weight._replace(dtype=dtype) if weight.dtype == torch.float32 else weight


def product(
    x: Tensor,
    weight: Tensor | Frozen,
    bias: Tensor | None,
    config: str,
    quantized: Tensor | None = None,
    saved: Tensor | None = None,
    seed: Tensor | None = None,
) -> Tensor:
    """``x weight^T + bias`` by the operator or directly; no gradients.

    With the configuration as JSON; an empty one is a plain product. A graph makes ``saved`` and
    ``seed`` before it.
    """
    parts: Any = weight if isinstance(weight, Frozen) else (weight,)
    held, *fields = parts
    if core.product_bypasses_dispatcher(x, held):
        return _multiply(x, _held(held, fields), bias, config, quantized)
    y: Tensor = _product(x, held, bias, saved, seed, config, quantized, *fields)
    return y


def undifferentiated(
    x: Tensor, weight: Tensor | Frozen, bias: Tensor | None, config: str
) -> Tensor:
    """:func:`product` of a call without gradients; in graphs the operator that sees transforms."""
    if not torch.compiler.is_compiling():
        return product(x, weight, bias, config)
    parts: Any = weight if isinstance(weight, Frozen) else (weight,)
    held, *fields = parts
    y: Tensor = _linear(x, held, bias, None, None, config, None, *fields)
    return y


# ---- autograd ----


class Linear(torch.autograd.Function):
    """A linear layer, in eager mode and as AOTAutograd traces it.

    In a graph x is cast, and compressed, by operators before it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        seed: Any,
        config: str,
        *graph: Any,
    ) -> Tensor:
        """Product; ``graph``: codes for backward and for the product, :data:`Fields`."""
        need_gx, need_gw = ctx.needs_input_grad[:2]
        handle: Any = handle_of(config) if config else None
        deferred = False
        own_seed = cache = None
        saved, quantized, *frozen = graph or (None, None)
        if graph:
            held, saved_seed = _held(weight, frozen), seed
            y = product(x, held, bias, config, quantized, saved, seed)
            if need_gw and saved is None:  # the compiler decides when x is compressed
                deferred, saved = True, x
        else:
            if need_gw:
                cache = sharing.current()
            own_seed = seed
            y, saved, saved_seed = _eager(ctx, x, weight, bias, seed, handle, cache)
        # The codes' seed is saved with them: a checkpoint may recompute both.
        kept = core.kept_weight(weight, need_gw) if need_gx else None
        ctx.save_for_backward(saved if need_gw else None, saved_seed, kept)
        ctx.set_materialize_grads(False)
        dtypes = (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        ctx.call = (handle, own_seed, x.shape, dtypes, cache, deferred, frozen)
        return without_base(y)

    @staticmethod
    @not_differentiable
    def backward(ctx: Any, gy: Tensor | None) -> tuple[Tensor | None, ...]:
        """g_x, g_w and g_b."""
        others = (None,) * 8
        if gy is None:
            return None, None, None, *others
        saved, saved_seed, weight = ctx.saved_tensors
        handle, seed, x_shape, dtypes, cache, deferred, frozen = ctx.call
        of_gx, of_gw, of_gb = dtypes
        if cache is not None:
            cache.clear()
        if deferred:
            saved, saved_seed = codes.compress_activation(saved, saved_seed, handle)
        need_gx, need_gw, need_gb = ctx.needs_input_grad[:3]
        gx, gw, gb = gradients(
            gy,
            _held(weight, frozen) if need_gx else None,
            saved if need_gw else None,
            saved_seed,
            saved_seed if seed is None else seed,
            handle,
            x_shape,
            (of_gx if need_gx else None, of_gw if need_gw else None, of_gb if need_gb else None),
        )
        return gx, gw, gb, *others


def _eager(
    ctx: Any,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    seed: Tensor,
    handle: Handle,
    cache: sharing.Cache | None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """y, the codes of x for backward, and their seed; without a cache no codes."""
    dtype, inner, matrix, plain_bias = None, x, weight, bias
    if _compat.any_autocast():
        # Cast here, because autocast's cache would keep a weight without its graph.
        dtype = calls.autocast_dtype(x)
        inner = calls.cast(x, dtype)
        if not handle.int8:  # which takes the parameters as they are
            matrix = calls.cast(weight, dtype)
            plain_bias = None if bias is None else calls.cast(bias, dtype)
    key = None if cache is None else sharing.linear_key(handle, dtype)
    if handle.int8:
        calls.check_dtypes(x, weight.dtype, bias, dtype)
        if core.product_bypasses_dispatcher(inner, weight):
            forms = codes.forms_of(x, inner, weight, ctx, seed, handle, key)
            return int8_linear(inner, weight, bias, handle.config, forms[0]), *forms[1:]
    saved, saved_seed = None, seed
    if cache is not None:
        entry = cache.entry_of(x)
        compress = functools.partial(codes.compress_activation, inner, seed, handle)
        saved, saved_seed = cache.compressed(entry, key, weight, ctx, compress)
    if handle.int8:
        return product(inner, weight, bias, handle.json), saved, saved_seed
    return F.linear(inner, matrix, plain_bias), saved, saved_seed


@operator(flops=_flops)
def _linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    saved: Tensor | None,
    seed: Tensor | None,
    config: str,
    codes: Tensor | None = None,
    *frozen: Fields,
) -> Tensor:
    calls.refuse_transforms("linear")
    y: Tensor = Linear.apply(x, weight, bias, seed, config, saved, codes, *frozen)  # type: ignore[no-untyped-call]  # so in torch
    return y


# ---- a frozen weight ----


def _frozen(x: Tensor, weight: Frozen, bias: Tensor | None, config_json: str) -> Tensor:
    compiled, seed = torch.compiler.is_compiling(), None
    if config_json and not compiled:
        seed = calls.seed_for_call("linear", x, weight.codes, bias, config_json)
    wanted = torch.is_grad_enabled() and (
        x.requires_grad or (bias is not None and bias.requires_grad)
    )
    dtype = calls.autocast_dtype(x)
    inner = calls.cast(x, dtype)
    if config_json or x.dtype != weight.dtype:
        _check_dtypes(x, weight, bias, dtype)
    if config_json:
        calls.check_transforms("linear", x, bias)
    elif not wanted or (not compiled and (_compat.transforms_active() or _compat.jit_tracing())):
        # Plain operations, which every transform can trace.
        matrix = codes.dequantized(_for_product(weight, inner.dtype)).to(inner.dtype)
        return F.linear(inner, matrix, None if bias is None else calls.cast(bias, dtype))
    if not wanted:
        return undifferentiated(inner, weight, bias, config_json)
    x_codes = None
    if not calls.is_int8(config_json):
        if compiled and config_json:
            _, seed = codes.kept_of(x, inner, config_json, False)
    elif compiled:
        x_codes, _, seed = codes.input_of(x, inner, config_json, False)
    elif seed is not None and core.product_bypasses_dispatcher(inner, weight.codes):
        handle = handle_of(config_json)
        x_codes, _, _ = codes.forms_of(x, inner, weight.codes, None, seed, handle, None)
    held, *fields = weight
    if compiled:
        traced: Tensor = _linear(inner, held, bias, None, seed, config_json, x_codes, *fields)
        return traced
    y: Tensor = Linear.apply(inner, held, bias, seed, config_json, None, x_codes, *fields)  # type: ignore[no-untyped-call]  # so in torch
    return y


def _check_dtypes(
    x: Tensor, weight: Frozen, bias: Tensor | None, autocast: torch.dtype | None
) -> None:
    try:
        calls.check_dtypes(x, weight.dtype, bias, autocast)
    except ValueError as error:
        if str(error).startswith("weight:"):
            error.args = (
                f"{error}. The weight is frozen in INT8: model.to(x.dtype) changes the dtype that "
                "it stands for, where the mp_policy of fully_shard casts x alone",
            )
        raise


# ---- the backward products ----


def backward(
    gy: Tensor,
    weight: Tensor | Frozen | None,
    saved: Tensor | None,
    in_features: int,
    config: HotConfig,
    keys: tuple[Key, Key],
    outputs: Gradients,
    accumulate: bool = False,
    quantized: Tensor | None = None,
) -> None:
    """Write ``outputs`` by libhot.

    gy is ``[..., O]`` and g_x ``[..., I]``, with equal or flattened leading dimensions. ``keys``:
    the key that ``saved`` was made with, and the key that rounds g_y (:func:`core.keys_of`). With
    ``accumulate`` g_w is added to the values in its tensor. ``quantized``: the weight's codes, in
    its place.
    """
    gy, tokens, out_features = core.collapsible(gy)
    spec = config.spec
    gx, gw, gb = outputs
    if isinstance(weight, Frozen):
        weight = codes.dequantize(weight)
    if gx is not None and not 2 <= gx.dim() <= 4:
        gx = gx.view(tokens, in_features)
    shape = (tokens, out_features, in_features, spec)
    wanted = (gx is not None, gw is not None)
    _core.backward_linear(
        core.context_for(gy),
        lend(gy, "gy"),
        None if weight is None else lend(weight, "weight"),
        None if saved is None else lend(saved, "the saved x"),
        tokens,
        in_features,
        keys[0],
        spec,
        keys[1],
        None if gx is None else to_dlpack(gx),
        None if gw is None else to_dlpack(gw),
        None if gb is None else to_dlpack(gb),
        accumulate,
        workspace(_core.backward_linear_workspace, gy, *shape, *wanted),
        None if quantized is None else lend(quantized, "codes of the weight"),
    )


def new_gradients(
    gy: Tensor, x_shape: Sequence[int], dtypes: Sequence[torch.dtype | None]
) -> Gradients:
    """Uninitialised g_x, g_w and g_b for :func:`backward`; None for a dtype of None."""
    out_features, device = gy.shape[-1], gy.device
    of_gx, of_gw, of_gb = dtypes
    matrix, empty = (out_features, x_shape[-1]), torch.empty
    return (
        None if of_gx is None else empty(x_shape, dtype=of_gx, device=device),
        None if of_gw is None else empty(matrix, dtype=of_gw, device=device),
        None if of_gb is None else empty(out_features, dtype=of_gb, device=device),
    )


def operator_outputs(
    gy: Tensor, in_features: int, dtypes: Sequence[torch.dtype | None]
) -> tuple[Tensor, Tensor, Tensor]:
    """As :func:`new_gradients`; unwanted ones are empty vectors: an operator returns no None."""
    new = new_gradients(gy, (gy.shape[0], in_features), dtypes)
    gx, gw, gb = (gy.new_empty(0) if gradient is None else gradient for gradient in new)
    return gx, gw, gb


def _backward_flops(gy_shape: Sequence[int], *arguments: Any, **_: Any) -> Any:
    """Both products at full rank, whatever their precision; a lower rank takes less time."""
    in_features, gx_dtype, gw_dtype = arguments[5:8]
    wanted = (gx_dtype is not None) + (gw_dtype is not None)
    return 2 * math.prod(gy_shape) * in_features * wanted


def _fake_backward(gy: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    return operator_outputs(gy, arguments[5], arguments[6:9])


@operator(fake=_fake_backward, flops=_backward_flops, product=True)
def _backward_linear(
    gy: Tensor,
    weight: Tensor | None,
    saved: Tensor | None,
    saved_seed: Tensor | None,
    seed: Tensor | None,
    config: str,
    in_features: Size,
    *rest: DtypesAndFields,
) -> tuple[Tensor, Tensor, Tensor]:
    dtypes, held = rest[:3], _held(weight, rest[3:])
    results = operator_outputs(gy, in_features, dtypes)
    gx, gw, gb = (out if dtype else None for out, dtype in zip(results, dtypes, strict=True))
    if seed is None:
        _plain_gradients(gy, held, gx, gb)
    else:
        keys = core.keys_of(saved_seed, seed)
        backward(gy, held, saved, in_features, parsed(config), keys, (gx, gw, gb))
    return results


def _plain_gradients(gy: Tensor, weight: Frozen, gx: Tensor | None, gb: Tensor | None) -> None:
    """g_x and g_b of a plain product."""
    if gx is not None:
        gx.copy_(gy @ codes.dequantize(_for_product(weight, gy.dtype)).to(gy.dtype))
    if gb is not None:
        gb.copy_(gy.sum(0))


def gradients(
    gy: Tensor,
    weight: Tensor | Frozen | None,
    saved: Tensor | None,
    saved_seed: Tensor | None,
    seed: Tensor | None,
    handle: Handle | None,
    x_shape: torch.Size,
    dtypes: Sequence[torch.dtype | None],
) -> Gradients:
    """g_x, g_w, g_b, by the operator or directly, with equal results.

    None for a dtype of None. Without seed and handle they are those of a plain product with a
    frozen weight.
    """
    parts: Any = weight if isinstance(weight, Frozen) else (weight,)
    held, *fields = parts
    plain = held is None or type(held) in core.PLAIN_TYPES
    if handle is not None and seed is not None and plain and core.bypasses_dispatcher(gy):
        outputs = new_gradients(gy, x_shape, dtypes)
        keys = core.keys_of(saved_seed, seed)
        try:
            backward(gy, weight, saved, x_shape[-1], handle.config, keys, outputs)
            return outputs
        except RuntimeError:  # a check in advance would slow down every other call
            if not core.is_sparse_or_batched(gy):
                raise
    rows = core.dense(gy).reshape(math.prod(x_shape[:-1]), gy.shape[-1])
    common = (saved, saved_seed, seed, handle.json if handle else "", x_shape[-1])
    gx, gw, gb = _backward_linear(rows, held, *common, *dtypes, *fields)
    wants_gx, wants_gw, wants_gb = (dtype is not None for dtype in dtypes)
    return (
        gx.view(x_shape) if wants_gx else None,
        gw if wants_gw else None,
        gb if wants_gb else None,
    )
