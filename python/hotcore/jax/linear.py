"""``linear``: jnp's product forward, HOT's integers backward."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..arrays import FLOATS
from ..config import HotConfig, as_config
from .calls import Array, backward_linear, compress_activation, spread, varying


def linear(
    x: Array,
    w: Array,
    b: Array | None = None,
    *,
    key: Array,
    config: HotConfig | str = "default",
) -> Array:
    """``x w^T + b``, as jnp computes it; gradients are computed in integers with HOT.

    For a gradient of w, x is kept compressed (0.53 bytes a value with recipe ``"default"``); for
    one of x, w itself. What is not differentiated is neither kept nor computed. Works under jit,
    grad, checkpoint, scan and vmap (one call after another); there is no forward mode and no second
    derivative.

    Args:
        x: ``[..., I]`` float32, float16 or bfloat16.
        w: ``[O, I]`` of these dtypes; a kernel ``[I, O]`` is passed as ``kernel.T``.
        b: ``[O]`` of these dtypes, or None.
        key: random key of the rounding, another one for every layer and step: a key of
            ``jax.random`` (threefry's), or an integer array of one element. Number n stands for
            ``hotcore.Key(0, offset=n)``; that of ``jax.random.key(n)`` is n.
        config: a HotConfig or a recipe's name.

    Returns:
        ``[..., O]``, in the dtype that jnp gives. Gradients have the dtypes of x, w and b.

    Raises:
        ValueError, TypeError: an argument is wrong; the message names it.
        NotImplementedError: the configuration does not run here.

    Source: docs/jax.md; docs/numerics.md.
    """
    settings = as_config(config)
    x, w = _floats(x, "x"), _floats(w, "w")
    if x.ndim < 1:
        raise ValueError("x: shape (); expected [..., I]")
    if w.ndim != 2 or w.shape[1] != x.shape[-1]:
        raise ValueError(
            f"w: shape {w.shape}; expected [O, {x.shape[-1]}], since x has {x.shape[-1]} features"
        )
    if b is not None:
        b = _floats(b, "b")
        if b.shape != w.shape[:1]:
            raise ValueError(f"b: shape {b.shape}; w has {w.shape[0]} out features")
    seed = _seed(key)
    # Inside a shard_map devices share w and b but not x: their gradients are to be added up.
    axes = varying(x, w, seed, *([] if b is None else [b]))
    x, w, seed = spread((x, w, seed), axes)
    if b is not None:
        (b,) = spread((b,), axes)
    output: Array = _linear(settings, x, w, b, seed)
    return output


def _floats(array: Array, name: str) -> Array:
    try:
        array = jnp.asarray(array)
    except TypeError as error:
        raise TypeError(f"{name}: {error}") from error
    if array.dtype.name not in FLOATS:
        raise ValueError(f"{name}: dtype {array.dtype}; expected float32, float16 or bfloat16")
    return array


def _seed(key: Array) -> Array:
    """The offset of the layer's key: two words, the low one first."""
    if not (hasattr(key, "dtype") and hasattr(key, "shape")):
        raise TypeError(
            f"key: {type(key).__name__}; expected jax.random.key(...) or an integer array, another "
            "one in every step"
        )
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.key_data(key)
    words = jnp.asarray(key)
    if words.shape == (2,) and words.dtype == np.uint32:  # jax.random's: the high word first
        return jnp.flip(words)
    if words.shape == () and jnp.issubdtype(words.dtype, jnp.integer):
        low_bits = min(words.dtype.itemsize * 8, 32)
        high = words >> np.array(low_bits, words.dtype) if words.dtype.itemsize > 4 else words * 0
        return jnp.stack([words.astype(np.uint32), high.astype(np.uint32)])
    raise ValueError(
        f"key: {key.dtype} {key.shape}; expected one key of jax.random of two 32-bit words "
        "(threefry), or one integer"
    )


def _product(x: Array, w: Array, b: Array | None) -> Array:
    y = jnp.matmul(x, w.T)
    return y if b is None else y + b


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["saved", "w", "seed"],
    meta_fields=["x_shape", "dtypes"],
)
@dataclasses.dataclass(frozen=True)
class _Kept:
    """What backward needs: arrays, and what is known when the function is traced."""

    saved: Array | None
    w: Array | None
    seed: Array
    x_shape: tuple[int, ...]
    dtypes: tuple[Any, Any, Any]
    """Of g_x, g_w and g_b; None: not wanted."""


def _linear(config: HotConfig, x: Array, w: Array, b: Array | None, seed: Array) -> Array:
    return _product(x, w, b)


def _forward(config: HotConfig, *arguments: Any) -> tuple[Array, _Kept]:
    """``arguments``: x, w, b and seed as values that know whether they are differentiated."""
    x, w, b, seed = (None if a is None else a.value for a in arguments)
    dtypes = tuple(
        None if a is None or not a.perturbed else a.value.dtype for a in arguments[:3]
    )
    need_gx, need_gw, _ = (dtype is not None for dtype in dtypes)
    saved = compress_activation(_matrix(x), seed, config) if need_gw else None
    kept = _Kept(saved, w if need_gx else None, seed, x.shape, dtypes)
    return _product(x, w, b), kept


def _backward(config: HotConfig, kept: _Kept, gy: Array) -> tuple[Array | None, ...]:
    in_features = kept.x_shape[-1]
    gx, gw, gb = backward_linear(
        _matrix(gy), kept.w, kept.saved, kept.seed, config, in_features, kept.dtypes
    )
    return None if gx is None else gx.reshape(kept.x_shape), gw, gb, None


def _matrix(x: Array) -> Array:
    """``[..., I]`` as ``[L, I]``."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


_linear = jax.custom_vjp(_linear, nondiff_argnums=(0,))
_linear.defvjp(_forward, _backward, symbolic_zeros=True)
