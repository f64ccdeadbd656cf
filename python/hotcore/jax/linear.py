"""``linear``: jnp's product or an INT8 product forward, HOT's integers backward."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..arrays import FLOATS
from ..config import HotConfig, as_config
from . import calls
from .calls import Array

_THREEFRY = "threefry2x32"


def linear(
    x: Array, w: Array, b: Array | None = None, *, key: Array, config: HotConfig | str = "default"
) -> Array:
    """``x w^T + b``, by jnp or in INT8; HOT computes the gradients in integers.

    The gradient of w needs the compressed x (0.53 bytes per value with recipe ``"default"``), the
    gradient of x needs w. Only requested gradients cost memory and time. Works under jit, grad,
    checkpoint, scan and vmap (calls in sequence), but not in forward mode or differentiated twice.

    Args:
        x: ``[..., I]`` float32, float16 or bfloat16.
        w: ``[O, I]`` of these dtypes; a kernel ``[I, O]`` is passed as ``kernel.T``.
        b: ``[O]`` of these dtypes, or None.
        key: random key of the rounding, different for every layer and step: one key of
            ``jax.random``, its uint32 words, or an integer array of shape (). The number n means
            ``hotcore.Key(0, offset=n)``. ``jax.random.key(n)`` (threefry) has the number n; for
            other implementations ``jax.random.bits`` draws 64 bits.
        config: a HotConfig or a recipe's name. With ``forward="int8"`` y is that of
            :func:`hotcore.forward_linear`; gradients pass straight through it.

    Returns:
        ``[..., O]`` in jnp's dtype, for an INT8 product in x's. Gradients have the dtypes of x, w
        and b. An unusable argument is an error that names it, as in ``hotcore``.

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
    # Inside a shard_map devices share w and b but not x: backward sums the gradients of w and b.
    arrays = (x, w, seed) if b is None else (x, w, seed, b)
    x, w, seed, *rest = calls.pcast_to_varying(arrays, calls.varying_axes(*arrays))
    b = rest[0] if rest else None
    return _linear(settings, x, w, b, seed)


def _floats(array: Array, name: str) -> Array:
    try:
        converted = jnp.asarray(array)
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{name}: {error}") from error
    # Without x64 jnp narrows 64 bits of NumPy's and others' arrays: what came counts.
    dtype = str(getattr(array, "dtype", converted.dtype)).rpartition(".")[2]
    if dtype not in FLOATS:
        raise ValueError(f"{name}: dtype {dtype}; expected float32, float16 or bfloat16")
    return converted


def _seed(key: Array) -> Array:
    """Return the offset of the layer's key: two words, low word first."""
    if not isinstance(key, jax.Array | np.ndarray | np.generic):
        raise TypeError(
            "key: expected jax.random.key(...) or an integer array, a new one in every step, got "
            f"{type(key).__name__}"
        )
    if key.shape == (4,) and key.dtype == np.uint32:  # words of rbg and unsafe_rbg
        key = jax.random.wrap_key_data(jnp.asarray(key), impl="rbg")
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and key.shape == ():
        if jax.random.key_impl(key) != _THREEFRY:
            return jax.random.bits(key, (2,), np.uint32)
        key = jax.random.key_data(key)
    if key.shape == (2,) and key.dtype == np.uint32:  # jax.random's keys have the high word first
        return jnp.flip(jnp.asarray(key))
    if key.shape == () and jnp.issubdtype(key.dtype, jnp.integer):
        # jnp may truncate NumPy's 64 bits to 32, so they are read first.
        high = key >> 32 if key.dtype.itemsize > 4 else key * 0
        return jnp.stack([key.astype(np.uint32), high.astype(np.uint32)])
    raise ValueError(
        "key: expected one key of jax.random, its two (threefry) or four (rbg) uint32 words, or an "
        f"integer, got {key.dtype} {key.shape}"
    )


def _check_axes(**arrays: Array | None) -> None:
    """Refuse explicit axes: XLA does not split libhot's calls, and JAX's error names no array."""
    for name, a in arrays.items():
        if a is not None and any(jax.typeof(a).sharding.spec):
            raise NotImplementedError(
                f"{name}: sharded over explicit axes of a mesh, {jax.typeof(a)}; use shard_map, or "
                "a mesh with axis_types=(AxisType.Auto,)"
            )


def _product(config: HotConfig, x: Array, w: Array, b: Array | None) -> Array:
    if config.forward == "int8":
        _check_axes(x=x, w=w, b=b)
        _check_numbers(w, "w")
        return calls.forward_linear(_matrix(x), w, b, config).reshape(*x.shape[:-1], len(w))
    y = jnp.matmul(x, w.T)
    return y if b is None else y + b


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Residuals:
    """Residuals for backward: arrays, and static values known during tracing."""

    saved: Array | None
    w: Array | None
    seed: Array
    x_shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    dtypes: tuple[Any, Any, Any] = dataclasses.field(metadata={"static": True})
    """The dtypes of g_x, g_w and g_b; None: not requested."""


def _forward(
    config: HotConfig, x: Any, w: Any, b: Any | None, seed: Any
) -> tuple[Array, _Residuals]:
    """Compute y and the residuals. ``perturbed`` of an argument: it is differentiated."""
    bias = None if b is None else b.value
    _check_axes(x=x.value, w=w.value, b=bias)
    dtypes: Any = tuple(a.value.dtype if a and a.perturbed else None for a in (x, w, b))
    weight = w.value if x.perturbed else None
    saved = calls.compress_activation(_matrix(x.value), seed.value, config) if w.perturbed else None
    residuals = _Residuals(saved, weight, seed.value, x.value.shape, dtypes)
    return _product(config, x.value, w.value, bias), residuals


def _backward(config: HotConfig, residuals: _Residuals, gy: Array) -> tuple[Array | None, ...]:
    in_features = residuals.x_shape[-1]
    gx, gw, gb = calls.backward_linear(
        _matrix(gy, "y"),
        residuals.w,
        residuals.saved,
        residuals.seed,
        config,
        in_features,
        residuals.dtypes,
    )
    return None if gx is None else gx.reshape(residuals.x_shape), gw, gb, None


def _check_numbers(array: Array, name: str) -> None:
    if not all(isinstance(size, int) for size in array.shape):  # jax.export's symbolic shapes
        shape = ", ".join(map(str, array.shape))
        raise NotImplementedError(f"{name}: expected sizes that are numbers, got shape ({shape})")


def _matrix(x: Array, name: str = "x") -> Array:
    """Reshape ``[..., I]`` to ``[L, I]``."""
    _check_numbers(x, name)
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


_linear: Any = jax.custom_vjp(
    lambda config, x, w, b, seed: _product(config, x, w, b), nondiff_argnums=(0,)
)
_linear.defvjp(_forward, _backward, symbolic_zeros=True)
