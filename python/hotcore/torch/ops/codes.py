"""Codes: an x compressed for backward, an x and a weight quantised for 8-bit products.

A compiled layer calls ``kept_of``. It compresses x with a new seed (``compress``), once for all
layers of a graph that take the same x and configuration. With ``forward="int8"`` it is
``input_of``, which also quantises x for the product, from the same read of x (``quantize_input``).

A seed is an int64 ``[]``, the offset of the layer's key (:func:`~.core.key_of`). Compiled and
captured code draws it with the generator of x's device, so that every replay draws a new one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakIdRef, WeakTensorKeyDictionary

from ... import _core
from ...config import HotConfig, Key
from .. import _compat
from . import core, frozen_codes
from .core import DTYPES, call, collapsible, flat, parsed
from .frozen_codes import Format, up
from .registry import operator

Pair = tuple[Tensor, Tensor]
"""Codes of an x and their seed."""
Forms = tuple[Tensor, Tensor, Tensor]
"""x for the forward product, x for backward, and the seed of the latter."""


# ---- once in a graph ----

_traced: Any = WeakTensorKeyDictionary()
"""Results of :func:`once` by x, and then by its version and a key."""
_Result = TypeVar("_Result")


def once(x: Tensor, key: Hashable, make: Callable[[], _Result]) -> _Result:
    """``make()``, once for an x and ``key`` in a graph: the compiler merges no random operators.

    Layers with one x (q, k and v; gate and up) then keep it once, as plain torch does.
    """
    if not _compat.functional(x):
        return make()
    results: dict[Hashable, _Result] = _traced.setdefault(x, {})
    versioned = (x._version, key)
    if versioned not in results:
        results[versioned] = make()
    return results[versioned]


# ---- sizes ----


# Graphs have symbolic sizes, for which libhot cannot be asked: for them it is arithmetic.


def saved_bytes(tokens: int, in_features: int, config: HotConfig) -> int:
    """``saved_layout(...).bytes``, also of symbolic sizes."""
    if type(tokens) is int and type(in_features) is int:
        return _saved_bytes(tokens, in_features, config.spec)
    rows = tokens
    if config.basis != "full":
        body, prefix = tokens, 0
        if config.token_grid is not None:
            area = math.prod(config.token_grid)
            samples = tokens // (area + config.prefix_tokens)
            body, prefix = samples * area, samples * config.prefix_tokens
        rank = len(config.rows) if config.rows else config.rank
        rows = -(-body // config.block) * rank + prefix
    if config.storage == "int4":
        width, scales = up(rows, 32) // 2, 2 * in_features * -(-tokens // 64)
    else:
        width, scales = up(rows, 16), 4 * (in_features if config.gw_scale == "channel" else 1)
    return up(in_features * width, 16) + scales + (tokens if config.equalize_tokens else 0)


def input_bytes(tokens: int, in_features: int, config: HotConfig) -> int:
    """``forward_input_bytes(...)``, also of symbolic sizes."""
    if type(tokens) is int and type(in_features) is int:
        return _input_bytes(tokens, in_features, config.forward_spec)
    return Format(config.forward_block).body(tokens, in_features)


@functools.lru_cache(maxsize=4096)  # a call takes microseconds
def _saved_bytes(tokens: int, in_features: int, spec: _core.Spec) -> int:
    return _core.saved_layout(tokens, in_features, spec)[0]


_input_bytes = functools.lru_cache(maxsize=4096)(_core.forward_input_bytes)


def _bytes(size: int, device: torch.device) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device=device)


# ---- an x for backward ----


def compress(x: Tensor, config: HotConfig, key: Key) -> Tensor:
    """x ``[..., I]`` compressed to a uint8 vector, by libhot without autograd or dispatcher."""
    x, tokens, in_features = collapsible(x)
    saved = _bytes(saved_bytes(tokens, in_features, config), x.device)
    scratch = (_core.compress_activation_workspace, tokens, in_features, config.spec)
    call(_core.compress_activation, x, scratch, x=x, spec=config.spec, key=key, saved=saved)
    return saved


def decompress(
    saved: Tensor, tokens: int, in_features: int, config: HotConfig, key: Key, dtype: torch.dtype
) -> Tensor:
    """:func:`compress`'s x back (basis ``"full"``), ``[tokens, I]``, rounded once to ``dtype``."""
    out = torch.empty((tokens, in_features), dtype=dtype, device=saved.device)
    sizes = {"tokens": tokens, "in_features": in_features, "first": 0, "last": tokens}
    arguments = {"saved": saved, "saved_key": key, "spec": config.spec, "out": out}
    call(_core.decompress_activation, saved, **sizes, **arguments)
    return out


def _draw(x: Tensor) -> Tensor:
    return torch.randint(core.SEEDS, (), device=x.device)


draw_seed = operator("draw_seed(Tensor x) -> Tensor", random=True, native=True)(_draw)
"""Draw a seed on x's device."""


@operator("compress_activation(Tensor x, Tensor seed, str config) -> (Tensor, Tensor)")
def _compress_activation(x: Tensor, seed: Tensor, config: str) -> Pair:
    return compress(x, parsed(config), core.key_of(seed)), seed.clone()


def compress_activation(x: Tensor, seed: Tensor, config: HotConfig) -> Pair:
    """Codes of x ``[..., I]`` and their seed, by the operator or directly, with the same result.

    Backward takes the seed from here. A selective checkpoint that keeps the codes of the forward
    pass keeps their seed with them, while the recomputation draws another ``seed``.
    """
    if core.bypasses_dispatcher(x):
        return compress(x, config, core.key_of(seed)), seed
    return _compress_activation(flat(x), seed, config.json)


@operator(
    "decompress_activation(Tensor saved, Tensor seed, str config, SymInt tokens, "
    "SymInt in_features, ScalarType dtype) -> Tensor"
)
def decompress_activation(
    saved: Tensor, seed: Tensor, config: str, tokens: int, in_features: int, dtype: torch.dtype
) -> Tensor:
    """:func:`decompress` as an operator."""
    return decompress(saved, tokens, in_features, parsed(config), core.key_of(seed), dtype)


@operator("compress(Tensor x, str config) -> (Tensor, Tensor)", random=True, native=True)
def compress_with_seed(x: Tensor, config: str) -> Pair:
    """Draw a seed; return the codes of x and this seed."""
    seed = _draw(x)
    return compress(x, parsed(config), core.key_of(seed)), seed


def seed_alone(x: Tensor) -> Pair:
    """Empty codes and a seed."""
    seed = draw_seed(x)
    return seed.new_empty(0), seed


@operator(
    "kept_of(Tensor x, Tensor inner, str config, bool codes) -> (Tensor, Tensor)", composite=True
)
def kept_of(x: Tensor, inner: Tensor, config: str, codes: bool) -> Pair:
    """Codes (empty unless ``codes``) and seed of x; ``inner`` is x as autocast casts it."""
    make = functools.partial(compress_with_seed, config=config) if codes else seed_alone
    return once(x, (config, codes, inner.dtype), lambda: make(inner.detach()))


# ---- an x for 8-bit products ----


def quantize_forward_input(
    x: Tensor, config: HotConfig, key: Key | None = None, exponents: Tensor | None = None
) -> tuple[Tensor, Any]:
    """x ``[..., I]`` as a uint8 vector that an 8-bit product takes in its place, by libhot.

    With ``key`` also the result of :func:`compress`, from the same read of x where a kernel can;
    else None. ``exponents`` are those of a weight in INT4 (:attr:`Frozen.exponents`).
    """
    x, tokens, in_features = collapsible(x)
    spec = config.forward_spec
    codes = _bytes(input_bytes(tokens, in_features, config), x.device)
    if key is None:
        call(_core.quantize_forward_input, x, x=x, spec=spec, out=codes, exponents=exponents)
        return codes, None
    saved = _bytes(saved_bytes(tokens, in_features, config), x.device)
    kept = {"kept": config.spec, "key": key, "saved": saved}
    scratch = (_core.compress_activation_workspace, tokens, in_features, config.spec)
    call(_core.quantize_forward_input, x, scratch, x=x, spec=spec, out=codes, **kept)
    return codes, saved


@operator("forward_input(Tensor x, str config, Tensor? exponents=None) -> Tensor", native=True)
def forward_input(x: Tensor, config: str, exponents: Tensor | None = None) -> Tensor:
    """x quantised for 8-bit products."""
    return quantize_forward_input(x, parsed(config), exponents=exponents)[0]


@operator(
    "quantize_input(Tensor x, str config) -> (Tensor, Tensor, Tensor)", random=True, native=True
)
def quantize_input(x: Tensor, config: str) -> Forms:
    """Draw a seed; return both forms of x, from one read, and this seed."""
    seed = _draw(x)
    codes, saved = quantize_forward_input(x, parsed(config), core.key_of(seed))
    return codes, saved, seed


@operator(
    "input_of(Tensor x, Tensor inner, str config, bool keep, Tensor? exponents=None) -> "
    "(Tensor, Tensor, Tensor)",
    composite=True,
)
def input_of(
    x: Tensor, inner: Tensor, config: str, keep: bool, exponents: Tensor | None = None
) -> Forms:
    """Both forms of x; that for backward is empty unless ``keep``, which is without ``exponents``.

    A selective checkpoint gets two operators. A policy that keeps codes for backward
    (:func:`hotcore.torch.keep_codes`) would keep the other form, of a byte a value, with them.
    """
    if keep and not _compat.in_selective_checkpoint():
        forms = (config, "both", inner.dtype)
        return once(x, forms, lambda: quantize_input(inner.detach(), config))
    saved, seed = kept_of(x, inner, config, keep)
    same = None if exponents is None else WeakIdRef(exponents)
    key = (parsed(config).forward_block, inner.dtype, same)
    return once(x, key, lambda: _input_without_node(inner, config, exponents)), saved, seed


def _input_without_node(inner: Tensor, config: str, exponents: Tensor | None) -> Tensor:
    # Not of a detached x: torch 2.6 keeps that one too where a selective checkpoint recomputes.
    with torch.no_grad():
        return forward_input(inner, config, exponents)


# ---- a weight for 8-bit products ----


class Frozen(NamedTuple):
    """A weight that exists only as codes (:mod:`hotcore.torch.frozen`)."""

    codes: Tensor
    """uint8: O rows of codes, then O fp32 scales (:func:`quantize_forward_weight`). Behind those of
    a frozen layer a tail says their format (:mod:`hotcore.torch.ops.frozen_codes`)."""
    block: int
    """Block size of the Hadamard transform along I (``forward_block``)."""
    out_features: int
    in_features: int
    dtype: torch.dtype
    """Dtype of the weight that the codes stand for."""
    bits: int = 8
    """Bits of a code (:class:`.frozen_codes.Format`)."""
    exponents: Tensor | None = None
    """int8 ``[I]``, only in INT4: feature i of w is multiplied, and x divided, by 2 to the power of
    ``exponents[i] / 4``. The codes hold them, too."""


def quantize_forward_weight(weight: Tensor, config: HotConfig) -> Tensor:
    """w ``[O, I]`` as one uint8 vector that an 8-bit product takes in its place."""
    rows, columns = weight.shape
    spec = config.forward_spec
    out = _bytes(_core.forward_weight_bytes(rows, columns, spec), weight.device)
    call(_core.quantize_forward_weight, weight, w=weight, spec=spec, out=out)
    return out


def quantize_weight_int4(weight: Tensor, exponents: Tensor, config: HotConfig) -> Tensor:
    """w ``[O, I]`` in INT4 as one uint8 vector, with the ``exponents`` behind its codes."""
    rows, columns = weight.shape
    spec, group = config.forward_spec, frozen_codes.GROUP
    out = _bytes(Format(config.forward_block, bits=4).body(rows, columns), weight.device).zero_()
    size = _core.weight_int4_bytes(rows, columns, spec, group)
    operands = {"w": weight, "exponents": exponents, "out": out[:size]}
    call(_core.quantize_weight_int4, weight, spec=spec, group=group, **operands)
    frozen_codes.exponents_of(out, columns).copy_(exponents)
    return out


@functools.cache  # a HotConfig takes 70 us, and every call of a frozen layer needs the spec
def _forward_spec(block: int) -> _core.ForwardLinearSpec:
    return HotConfig(forward_block=block).forward_spec


@functools.lru_cache(maxsize=4096)
def _body_bytes(rows: int, columns: int, block: int, bits: int) -> int:
    return Format(block, bits=bits).body(rows, columns)


def body(weight: Frozen, check: bool = False) -> Tensor:
    """The codes and scales, as libhot reads them.

    Raises RuntimeError where the bytes of a frozen layer are not codes. ``check`` looks at a plain
    tensor, too, which does not remember that it was checked.
    """
    codes, columns = weight.codes, weight.in_features
    size = _body_bytes(weight.out_features, columns, weight.block, weight.bits)
    if check or hasattr(codes, "_hot_seen"):
        frozen_codes.check(codes, size, weight.exponents)
    return codes[:size]


def dequantize(weight: Frozen) -> Tensor:
    """The weight ``[O, I]`` that codes stand for; docs/numerics.md, "Forward"."""
    codes, out_features, in_features = body(weight), weight.out_features, weight.in_features
    group, exponents = 0, None
    if weight.bits == 4:
        group, exponents = frozen_codes.GROUP, frozen_codes.exponents_of(codes, in_features)
    dtype = weight.dtype if weight.dtype in DTYPES else torch.float32
    out = torch.empty((out_features, in_features), dtype=dtype, device=codes.device)
    spec = _forward_spec(weight.block)
    shape = {"out_features": out_features, "in_features": in_features, "spec": spec}
    scratch = (_core.dequantize_weight_workspace, *shape.values(), group) if group else ()
    operands = {"w": codes, "exponents": exponents, "out": out, "group": group}
    call(_core.dequantize_weight, codes, scratch, **operands, **shape)
    return out.to(weight.dtype)


@operator(
    "dequantize_weight(Tensor codes, int block, int out_features, int in_features, "
    "ScalarType dtype, int bits=8, Tensor? exponents=None) -> Tensor"
)
def _dequantize_weight(*frozen: Any) -> Tensor:
    return dequantize(Frozen(*frozen))


def dequantized(weight: Frozen) -> Tensor:
    """:func:`dequantize`, by the operator or directly."""
    past = core.product_bypasses_dispatcher(weight.codes, weight.codes)
    # A transform wraps every new tensor, so that it has no memory to write.
    if (past and not _compat.transforms_active()) or weight.codes.is_meta:
        return dequantize(weight)
    return _dequantize_weight(*weight)
