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
from .calls import Array, backward_linear, compress_activation, pcast_to_varying, varying_axes


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
    if settings.forward != "plain":
        raise NotImplementedError(
            f"config: forward = {settings.forward!r} is not built for JAX; use forward='plain' "
            "(hotcore.forward_linear takes JAX's arrays, outside of jit and grad)"
        )
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
    arrays = (x, w, seed) if b is None else (x, w, seed, b)
    x, w, seed, *rest = pcast_to_varying(arrays, varying_axes(*arrays))
    b = rest[0] if rest else None
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
    if key.shape == (2,) and key.dtype == np.uint32:  # jax.random's: the high word first
        return jnp.flip(jnp.asarray(key))
    if key.shape == () and jnp.issubdtype(key.dtype, jnp.integer):
        # Not by jnp, which may make 32 bits of NumPy's 64 before they are looked at.
        high = key >> 32 if key.dtype.itemsize > 4 else key * 0
        return jnp.stack([key.astype(np.uint32), high.astype(np.uint32)])
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


def _forward(config: HotConfig, x: Any, w: Any, b: Any | None, seed: Any) -> tuple[Array, _Kept]:
    """Each argument is a value and whether it is differentiated."""
    gx_dtype, gw_dtype, gb_dtype = (
        a.value.dtype if a is not None and a.perturbed else None for a in (x, w, b)
    )
    saved = None
    if gw_dtype is not None:
        saved = compress_activation(_matrix(x.value), seed.value, config)
    kept = _Kept(
        saved,
        None if gx_dtype is None else w.value,
        seed.value,
        x.value.shape,
        (gx_dtype, gw_dtype, gb_dtype),
    )
    return _product(x.value, w.value, None if b is None else b.value), kept


def _backward(config: HotConfig, kept: _Kept, gy: Array) -> tuple[Array | None, ...]:
    in_features = kept.x_shape[-1]
    gx, gw, gb = backward_linear(
        _matrix(gy), kept.w, kept.saved, kept.seed, config, in_features, kept.dtypes
    )
    return None if gx is None else gx.reshape(kept.x_shape), gw, gb, None


def _matrix(x: Array) -> Array:
    """``[..., I]`` as ``[L, I]``."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


_linear: Any = jax.custom_vjp(lambda config, x, w, b, seed: _product(x, w, b), nondiff_argnums=(0,))
_linear.defvjp(_forward, _backward, symbolic_zeros=True)
