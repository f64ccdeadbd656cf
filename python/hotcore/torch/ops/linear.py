"""Linear layers: the forward of ``F.linear``, or an 8-bit one, and the backward of HOT.

Eager and compiled layers run one autograd function, :class:`Linear`. Eager ones go past the
dispatcher where nothing intercepts it. A compiled layer calls the composite operator ``linear``:
``product`` with the backward ``backward_linear``. ``product`` takes the codes of x without needing
them. Otherwise the partitioner would move the compression and its seed into backward
(:attr:`HotModule.defer` allows that). No codes of a weight are kept for the next call: nothing on
the host tells whether a weight was written in between.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import _core
from ...config import ConfigLike, HotConfig, Key
from .. import _compat
from . import calls, codes, core, frozen_codes, sharded
from .codes import Frozen
from .core import PLAIN_TYPES, call, parsed
from .registry import not_differentiable, operator, python_form, without_base

_DEFAULT = HotConfig()
Weight = Tensor | Frozen
"""A weight ``[O, I]``, or the codes that stand for it."""
_FIELDS = (
    "int block=0, int rows=0, int columns=0, ScalarType? dtype=None, int bits=8, "
    "Tensor? exponents=None"
)
"""Fields of a :class:`.codes.Frozen` whose codes an operator takes as its weight; else left out."""
_ARGUMENTS = (
    "Tensor x, Tensor weight, Tensor? bias, Tensor? saved, Tensor? seed, str config, "
    f"Tensor? codes=None, {_FIELDS}"
)
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
"""g_x, g_w and g_b; None: not wanted."""
_FROZEN_DTYPE = (
    ". The weight is frozen in codes: model.to(x.dtype) changes the dtype that it stands for, "
    "where the mp_policy of fully_shard casts x alone"
)


# ---- what a user calls ----


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, config: ConfigLike = _DEFAULT
) -> Tensor:
    """``x weight^T + bias``, bit for bit as ``F.linear``; gradients are computed with HOT.

    With ``forward="int8"`` the product is :func:`hotcore.forward_linear`. It takes x as autocast
    casts it, and the parameters as they are. Backward keeps only the compressed x, and nothing of x
    where ``weight`` is frozen. Every call draws one seed from torch's default CPU generator.

    Args:
        x: ``[..., I]`` float32, float16 or bfloat16, after autocast's cast.
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
    json = config.json if isinstance(config, HotConfig) else calls.config_json(config)
    return linear_from_json(x, weight, bias, json)


def linear_from_json(
    x: Tensor, weight: Weight, bias: Tensor | None, config_json: str, defer: bool = False
) -> Tensor:
    """:func:`linear` with the configuration as JSON, which compiled graphs hold as a constant.

    A frozen weight gets no gradient. It takes an empty text, too: the plain layer with the
    dequantised weight, in forward and backward, which draws no seed. ``defer``: see
    :attr:`.HotModule.defer`.
    """
    frozen = isinstance(weight, Frozen)
    held = weight.codes if isinstance(weight, Frozen) else weight
    plain = type(x) in PLAIN_TYPES and type(held) in PLAIN_TYPES
    if not plain or not (bias is None or type(bias) in PLAIN_TYPES):
        calls.check_tensors(bias, weight=held)
        if not isinstance(x, Tensor):
            return calls.handle_overrides(linear_from_json, x, weight, bias, config_json, defer)
        if not frozen and (sharded.is_dtensor(x) or sharded.is_dtensor(held)):
            parts, layout = sharded.split(x, held, bias)
            return sharded.joined(linear_from_json(*parts, config_json, defer), layout)
    if torch.compiler.is_compiling():
        return _prepared(x, weight, bias, config_json, None, defer)
    with calls.hide_from_modes(x, held) if _compat.torch_function_modes() else calls.OPEN:
        seed = calls.seed_for_call("linear", x, held, bias, config_json) if config_json else None
        if seed is None or frozen:
            return _prepared(x, weight, bias, config_json, seed)
        output: Tensor = Linear.apply(x, weight, bias, None, seed, config_json)  # type: ignore[no-untyped-call]  # so in torch
        return output


def _prepared(
    x: Tensor, weight: Weight, bias: Tensor | None, config: str, seed: Any, defer: bool = False
) -> Tensor:
    """A call that is compiled, has a frozen weight, or has nothing to differentiate."""
    held, fields = _parts(weight)
    frozen, int8 = isinstance(weight, Frozen), calls.is_int8(config)
    compiled, wanted = torch.compiler.is_compiling(), calls.wants_gradients(x, held, bias, config)
    if frozen and bias is not None:
        wanted = wanted or (torch.is_grad_enabled() and bias.requires_grad)
    if not (frozen or int8 or wanted):
        return F.linear(x, held, bias)
    dtype = calls.autocast_dtype(x)
    inner = calls.cast(x, dtype)  # in the graph, where the compiler fuses it with x's producer
    if int8 or (frozen and (config or x.dtype != weight.dtype)):
        calls.check_dtypes(x, weight.dtype, bias, dtype, _FROZEN_DTYPE if frozen else "")
    if int8 or (frozen and config):
        calls.check_transforms("linear", x, bias, None if frozen else held)
    traced = not compiled and (_compat.transforms_active() or _compat.jit_tracing())
    if not config and (traced or not wanted):
        # Plain operations, which every transform can trace.
        matrix = codes.dequantized(_for_product(weight, inner.dtype)).to(inner.dtype)
        return F.linear(inner, matrix, calls.cast(bias, dtype))
    if not wanted:
        return undifferentiated(inner, weight, bias, config)
    keep, saved, quantized = not frozen and held.requires_grad and not defer, None, None
    exponents = weight.exponents if isinstance(weight, Frozen) else None
    if compiled and int8:
        quantized, saved, seed = codes.input_of(x, inner, config, keep, exponents)
    elif compiled and config:
        saved, seed = codes.kept_of(x, inner, config, keep)
    call: Any = _linear if compiled else Linear.apply
    y: Tensor = call(inner, held, bias, saved if keep else None, seed, config, quantized, *fields)
    return y


# ---- the forward product ----


def _parts(weight: Any) -> tuple[Any, list[Any]]:
    """A weight as an operator takes it: the tensor, or codes and their fields."""
    if not isinstance(weight, Frozen):
        return weight, []
    held, *fields = weight
    return held, fields


def _whole(held: Any, fields: Sequence[Any]) -> Any:
    """The weight of an operator's arguments, from its :func:`_parts`."""
    return Frozen(held, *fields) if fields and held is not None else held


def int8_linear(
    x: Tensor, weight: Weight, bias: Tensor | None, config: HotConfig, quantized: Any = None
) -> Tensor:
    """``x weight^T + bias`` in INT8, ``[..., O]`` in x's dtype, straight to libhot.

    Weight and bias are of any of the three dtypes. ``quantized`` holds x's codes
    (:func:`codes.quantize_forward_input`); the values of x are then not read.
    """
    spec = config.forward_spec
    rows, tokens, in_features, group = None, math.prod(x.shape[:-1]), x.shape[-1], 0
    if isinstance(weight, Frozen) and weight.bits == 4:
        group = frozen_codes.GROUP
        if quantized is None:
            exponents = frozen_codes.exponents_of(codes.body(weight), in_features)
            quantized, _ = codes.quantize_forward_input(x, config, exponents=exponents)
    if quantized is None:
        rows, tokens, in_features = core.collapsible(x)
    if frozen := isinstance(weight, Frozen):
        out_features = weight.out_features
        operands = {"w": None, "quantized_weight": codes.body(weight)}
    else:
        out_features, operands = weight.shape[0], {"w": weight}
    y = torch.empty((*x.shape[:-1], out_features), dtype=x.dtype, device=x.device)
    out = y if 2 <= y.dim() <= 4 else y.view(tokens, out_features)
    operands |= {"x": rows, "bias": bias, "quantized_input": quantized}
    sizes = (tokens, out_features, in_features, spec, frozen, quantized is not None, group)
    scratch = (_core.forward_linear_workspace, *sizes)
    shape = {"in_features": in_features, "group": group}
    call(_core.forward_linear, x, scratch, spec=spec, y=out, **shape, **operands)
    return y


def plain_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``F.linear`` in x's dtype, contiguous."""
    dtype = x.dtype  # under autocast the parameters are of another
    return F.linear(x, weight.to(dtype), None if bias is None else bias.to(dtype)).contiguous()


def _flops(x_shape: Sequence[int], weight_shape: Sequence[int], *arguments: Any, **_: Any) -> int:
    out_features = arguments[6] if len(arguments) > 6 else weight_shape[0]
    return 2 * math.prod(x_shape) * int(out_features)


def _fake_product(x: Tensor, weight: Tensor, bias: Tensor | None, *arguments: Any) -> Tensor:
    fields = arguments[4:]
    matrix = codes.dequantize(Frozen(weight, *fields)) if fields else weight
    return plain_product(x, matrix, bias)  # which checks the shapes


@operator(
    f"product({_ARGUMENTS}) -> Tensor", fake=_fake_product, flops=_flops, product=True, native=True
)
def _product(
    x: Tensor, weight: Tensor, bias: Any, saved: Any, seed: Any, config: str, *rest: Any
) -> Tensor:
    quantized, *fields = rest or (None,)
    return _multiply(x, _whole(weight, fields), bias, config, quantized)


def _multiply(
    x: Tensor, weight: Weight, bias: Tensor | None, config: str, quantized: Tensor | None
) -> Tensor:
    if calls.is_int8(config):
        return int8_linear(x, weight, bias, parsed(config), quantized)
    if isinstance(weight, Frozen):
        weight = codes.dequantize(_for_product(weight, x.dtype))
    return plain_product(x, weight, bias)


def _for_product(weight: Any, dtype: torch.dtype) -> Frozen:
    """The frozen weight in ``dtype``, with the bits that a plain layer's cast would give."""
    frozen: Frozen = weight._replace(dtype=dtype) if weight.dtype == torch.float32 else weight
    return frozen


def product(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None,
    config: str,
    quantized: Tensor | None = None,
    saved: Tensor | None = None,
    seed: Tensor | None = None,
) -> Tensor:
    """``x weight^T + bias`` by the operator or directly; no gradients.

    The configuration is JSON; an empty one is a plain product. A graph makes ``saved`` and ``seed``
    before the product.
    """
    held, fields = _parts(weight)
    if core.product_bypasses_dispatcher(x, held):
        return _multiply(x, weight, bias, config, quantized)
    operator = python_form(_product) if fields and not config else _product
    y: Tensor = operator(x, held, bias, saved, seed, config, quantized, *fields)
    return y


def undifferentiated(x: Tensor, weight: Weight, bias: Tensor | None, config: str) -> Tensor:
    """:func:`product` of a call without gradients; in graphs the operator that sees transforms."""
    if not torch.compiler.is_compiling():
        return product(x, weight, bias, config)
    held, fields = _parts(weight)
    y: Tensor = _linear(x, held, bias, None, None, config, None, *fields)
    return y


# ---- autograd ----


class Linear(torch.autograd.Function):
    """A linear layer, eager and traced; in a graph operators before it cast and compress x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
        """Compute y. ``graph`` holds x's codes for the product, and a frozen weight's fields."""
        saved, seed, config, *graph = rest
        need_gx, need_gw = ctx.needs_input_grad[:2]
        settings: Any = parsed(config) if config else None
        deferred, saved_seed, fields = False, seed, graph[1:6]  # without exponents, a tensor
        own_seed = None
        if graph:
            y = product(x, _whole(weight, graph[1:]), bias, config, graph[0], saved, seed)
            if need_gw and saved is None:  # the compiler decides when x is compressed
                deferred, saved = True, x
        else:
            own_seed, int8, quantized = seed, settings.forward == "int8", None
            dtype, inner, matrix, plain_bias = None, x, weight, bias
            if _compat.any_autocast():
                # Cast here, because autocast's cache would keep a weight without its graph.
                dtype = calls.autocast_dtype(x)
                inner = calls.cast(x, dtype)
                if not int8:  # which takes the parameters as they are
                    matrix, plain_bias = calls.cast(weight, dtype), calls.cast(bias, dtype)
            if int8 and not weight.dtype == x.dtype == (x if bias is None else bias).dtype:
                calls.check_dtypes(x, weight.dtype, bias, dtype)  # seed_for_call has checked x's
            # seed_for_call has refused torch.jit.trace.
            past = int8 and type(weight) in PLAIN_TYPES and core.bypasses_dispatcher(inner)
            if past and need_gw:  # both forms of x, from one read
                quantized, saved = codes.quantize_forward_input(inner, settings, core.key_of(seed))
            elif need_gw:
                saved, saved_seed = codes.compress_activation(inner, seed, settings)
            if past:
                y = int8_linear(inner, weight, bias, settings, quantized)
            elif int8:
                y = product(inner, weight, bias, config)
            else:
                y = F.linear(inner, matrix, plain_bias)
        # The codes' seed is saved with them: a checkpoint may recompute both.
        for_gx = core.kept_weight(weight, need_gw) if need_gx else None
        ctx.save_for_backward(saved if need_gw else None, saved_seed, for_gx)
        ctx.set_materialize_grads(False)
        dtypes = (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        ctx.call = (settings, own_seed, x.shape, dtypes, deferred, fields)
        return without_base(y)

    @staticmethod
    @not_differentiable
    def backward(ctx: Any, gy: Tensor) -> Gradients:
        """g_x, g_w and g_b."""
        saved, saved_seed, weight = ctx.saved_tensors
        settings, seed, x_shape, dtypes, deferred, fields = ctx.call
        if deferred:
            saved, saved_seed = codes.compress_activation(saved, saved_seed, settings)
        need_gx, need_gw, need_gb = ctx.needs_input_grad[:3]
        dx, dw, db = dtypes
        wanted = (dx if need_gx else None, dw if need_gw else None, db if need_gb else None)
        seeds = (saved_seed, saved_seed if seed is None else seed)
        saved, weight = saved if need_gw else None, weight if need_gx else None
        if weight is not None and fields:
            weight = Frozen(weight, *fields)
        return gradients(gy, weight, saved, *seeds, settings, x_shape, wanted)


@operator(f"linear({_ARGUMENTS}) -> Tensor", flops=_flops, composite=True)
def _linear(*arguments: Any) -> Tensor:
    calls.refuse_transforms("linear")
    codes = () if len(arguments) > 6 else (None,)  # tells Linear that this is a graph
    y: Tensor = Linear.apply(*arguments, *codes)  # type: ignore[no-untyped-call]  # so in torch
    return y


# ---- the backward products ----


def backward(
    gy: Tensor,
    weight: Weight | None,
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
    ``accumulate`` g_w is added to the values in its tensor. ``quantized``: the weight's codes,
    instead of ``weight``.
    """
    gy, tokens, out_features = core.collapsible(gy)
    spec = config.spec
    gx, gw, gb = outputs
    if isinstance(weight, Frozen):
        weight = codes.dequantize(weight)
    if gx is not None and not 2 <= gx.dim() <= 4:
        gx = gx.view(tokens, in_features)
    operands = {"gy": gy, "w": weight, "saved": saved, "quantized_weight": quantized}
    results = {"gx": gx, "gw": gw, "gb": gb, "accumulate": accumulate}
    about = {"tokens": tokens, "in_features": in_features, "saved_key": keys[0], "key": keys[1]}
    sizes = (tokens, out_features, in_features, spec, gx is not None, gw is not None)
    scratch = (_core.backward_linear_workspace, *sizes)
    call(_core.backward_linear, gy, scratch, spec=spec, **operands, **results, **about)


def new_gradients(
    gy: Tensor, x_shape: Sequence[int], dtypes: Sequence[torch.dtype | None]
) -> Gradients:
    """Uninitialised g_x, g_w and g_b for :func:`backward`; None for a dtype of None."""
    (gx, gw, gb), out_features, device, empty = dtypes, gy.shape[-1], gy.device, torch.empty
    return (  # no loop, which would take 2 us of the host's time
        None if gx is None else empty(x_shape, dtype=gx, device=device),
        None if gw is None else empty((out_features, x_shape[-1]), dtype=gw, device=device),
        None if gb is None else empty(out_features, dtype=gb, device=device),
    )


@functools.cache
def dtypes_of(names: str) -> tuple[torch.dtype | None, ...]:
    """Dtypes of g_x, g_w and g_b of a text, which the dispatcher takes faster than three dtypes."""
    return tuple(None if name == "None" else getattr(torch, name) for name in names.split())


@functools.cache
def _names_of(dtypes: tuple[torch.dtype | None, ...]) -> str:
    return " ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def _backward_flops(gy_shape: Sequence[int], *arguments: Any, **_: Any) -> Any:
    """Both products at full rank, whatever their precision; a lower rank takes less time."""
    in_features, dtypes = arguments[5:7]
    wanted = sum(dtype is not None for dtype in dtypes_of(dtypes)[:2])
    return 2 * math.prod(gy_shape) * in_features * wanted


@operator(
    "backward_linear(Tensor gy, Tensor? weight, Tensor? saved, Tensor? saved_seed, Tensor? seed, "
    f"str config, SymInt in_features, str dtypes, {_FIELDS}) -> (Tensor, Tensor, Tensor)",
    flops=_backward_flops,
    product=True,
    native=True,
)
def _backward_linear(
    gy: Tensor, weight: Any, saved: Any, saved_seed: Any, seed: Any, config: str, *rest: Any
) -> tuple[Tensor, ...]:
    in_features, dtypes, whole = rest[0], dtypes_of(rest[1]), _whole(weight, rest[2:])
    gx, gw, gb = outputs = new_gradients(gy, (gy.shape[0], in_features), dtypes)
    if seed is not None:
        keys = core.keys_of(saved_seed, seed)
        backward(gy, whole, saved, in_features, parsed(config), keys, outputs)
    else:  # a plain product with a frozen weight
        if gx is not None:
            gx.copy_(gy @ codes.dequantize(_for_product(whole, gy.dtype)).to(gy.dtype))
        if gb is not None:
            gb.copy_(gy.sum(0))
    # An operator returns no None: unwanted gradients are empty.
    return tuple(gy.new_empty(0) if out is None else out for out in outputs)


def gradients(
    gy: Tensor,
    weight: Weight | None,
    saved: Tensor | None,
    saved_seed: Tensor | None,
    seed: Tensor | None,
    config: HotConfig | None,
    x_shape: torch.Size,
    dtypes: Sequence[torch.dtype | None],
) -> Gradients:
    """g_x, g_w, g_b, by the operator or directly, with equal results.

    None for a dtype of None. Without seed and configuration they are those of a plain product
    with a frozen weight.
    """
    held = weight.codes if isinstance(weight, Frozen) else weight
    plain = held is None or type(held) in PLAIN_TYPES
    if config is not None and seed is not None and plain and core.bypasses_dispatcher(gy):
        outputs = new_gradients(gy, x_shape, dtypes)
        keys = core.keys_of(saved_seed, seed)
        try:
            backward(gy, weight, saved, x_shape[-1], config, keys, outputs)
            return outputs
        except RuntimeError:
            # A check in advance would slow down every other call.
            if gy.layout is torch.strided and not _compat.batched(gy):
                raise
    rows = core.dense(gy).reshape(math.prod(x_shape[:-1]), gy.shape[-1])
    held, fields = _parts(weight)
    common = (saved, saved_seed, seed, config.json if config else "", x_shape[-1])
    operator = _backward_linear if config or not fields else python_form(_backward_linear)
    results = operator(rows, held, *common, _names_of(tuple(dtypes)), *fields)
    gx, gw, gb = (out if dtype else None for out, dtype in zip(results, dtypes, strict=True))
    return None if gx is None else gx.view(x_shape), gw, gb
