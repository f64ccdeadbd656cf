"""libhot's calls as JAX functions: operands in, results out, settings as attributes.

XLA calls the handlers of ``_jax_ffi`` while a program runs; this module runs only during tracing.
The workspace on CUDA is an extra result, whose size is computed during tracing.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import _core, _jax_ffi, contexts, selftest
from ..config import HotConfig

Array = Any
"""A jax.Array, or a tracer of one."""

_NOTHING = (0,)  # shape of an absent operand or result

try:
    for platform, handlers in _jax_ffi.handlers().items():
        for name, handler in handlers.items():
            jax.ffi.register_ffi_target(f"hotcore_{name}", handler, platform=platform)
except Exception as error:  # XLA's own error types differ between versions
    version = ".".join(map(str, _jax_ffi.API_VERSION))
    raise ImportError(
        f"hotcore.jax: jax {jax.__version__} does not take handlers for version {version} of XLA's "
        f"foreign function interface, for which this hotcore was built: {error}"
    ) from error
contexts.follow_cpu(_jax_ffi.set_cpu)


def compress_activation(x: Array, seed: Array, config: HotConfig) -> Array:
    """Compress x ``[L, I]`` to a uint8 vector; ``seed`` is uint32 ``[2]``, low word first."""
    tokens, in_features = x.shape
    size = _core.saved_layout(tokens, in_features, config.spec)[0]
    workspace = (_core.compress_activation_workspace, tokens, in_features, config.spec)
    operands, result = (x, seed), ((size,), np.uint8)
    return _call("compress_activation", {"config": _text(config)}, operands, [result], workspace)[0]


def backward_linear(
    gy: Array,
    w: Array | None,
    saved: Array | None,
    seed: Array,
    config: HotConfig,
    in_features: int,
    dtypes: tuple[Any, Any, Any],
) -> tuple[Array | None, Array | None, Array | None]:
    """Return g_x ``[L, I]``, g_w ``[O, I]`` and g_b ``[O]`` for gy ``[L, O]``.

    A gradient whose dtype is None is None. Only g_x needs ``w``, only g_w needs ``saved`` (from
    :func:`compress_activation` with the same seed).
    """
    tokens, out_features = gy.shape
    _core.saved_layout(tokens, in_features, config.spec)  # raises errors during tracing
    sizes = (tokens, out_features, in_features)
    shapes = ((tokens, in_features), (out_features, in_features), (out_features,))
    need_gx, need_gw, need_gb = (dtype is not None for dtype in dtypes)
    operands = (
        gy,
        jnp.zeros(_NOTHING, gy.dtype) if w is None else w,
        jnp.zeros(_NOTHING, np.uint8) if saved is None else saved,
        seed,
    )
    results = [
        (_NOTHING, gy.dtype) if dtype is None else (shape, dtype)
        for shape, dtype in zip(shapes, dtypes, strict=True)
    ]
    workspace = (_core.backward_linear_workspace, *sizes, config.spec, need_gx, need_gw)
    attribute = {"config": _text(config)}
    gx, gw, gb = _call("backward_linear", attribute, operands, results, workspace)
    return gx if need_gx else None, gw if need_gw else None, gb if need_gb else None


def forward_linear(x: Array, w: Array, b: Array | None, config: HotConfig) -> Array:
    """Return ``x w^T + b`` in INT8, ``[L, O]`` in x's dtype; see :func:`hotcore.forward_linear`."""
    sizes = (x.shape[0], len(w), x.shape[1])
    workspace = (_core.forward_linear_workspace, *sizes, config.forward_spec, False, False)
    operands = (x, w, jnp.zeros(_NOTHING, x.dtype) if b is None else b)
    attribute = {"forward_block": np.int64(config.forward_block)}
    return _call("forward_linear", attribute, operands, [(sizes[:2], x.dtype)], workspace)[0]


def varying_axes(*arrays: Array) -> tuple[Any, ...]:
    """Return the mesh axes of a ``shard_map`` over which any of these arrays varies."""
    axes = {axis for array in arrays for axis in jax.typeof(array).manual_axis_type.varying}
    return tuple(sorted(axes, key=str))


def pcast_to_varying(arrays: Sequence[Array], axes: Sequence[Any]) -> tuple[Array, ...]:
    """Return the arrays with types that vary over ``axes``; backward sums over the devices."""

    def cast(array: Array) -> Array:
        more = tuple(axis for axis in axes if axis not in varying_axes(array))
        return jax.lax.pcast(array, more, to="varying") if more else array

    return tuple(map(cast, arrays))


def _call(
    name: str,
    attribute: dict[str, Any],
    operands: Sequence[Array],
    results: Sequence[tuple[Sequence[int], Any]],
    workspace: tuple[Any, ...],
) -> tuple[Array, ...]:
    """Call libhot with one attribute, on the platform that the program runs on.

    ``workspace`` is the function of the workspace's bytes and its arguments after the context.
    Under vmap calls run in sequence: every layer has its own scales and random numbers.
    """
    cuda = _cuda_context()
    size_of, *arguments = workspace
    scratch = ((0 if cuda is None else size_of(cuda, *arguments),), np.uint8)
    shape_of: Any = jax.ShapeDtypeStruct
    shapes = tuple(shape_of(*result) for result in (*results, scratch))
    call: Any = jax.ffi.ffi_call(f"hotcore_{name}", shapes, vmap_method="sequential")
    # All operands must vary over the same axes. The call does not infer the axes of its results.
    axes = varying_axes(*operands)
    return pcast_to_varying(call(*pcast_to_varying(operands, axes), **attribute)[:-1], axes)


def self_test(platform: str = "cuda") -> dict[str, Any]:
    """Return arrays of :func:`hotcore.selftest.results`, by XLA on a platform's first device."""
    config = selftest.CONFIG
    results: dict[str, Any] = {}

    def layer(x: Array, w: Array, gy: Array, seed: Array) -> dict[str, Array]:
        saved = compress_activation(x, seed, config)
        dtypes = (x.dtype, w.dtype, None)
        gx, gw, _ = backward_linear(gy, w, saved, seed, config, x.shape[1], dtypes)
        y = forward_linear(x, w, None, config)
        return {"compress_activation": saved, "g_x": gx, "g_w": gw, "forward_linear": y}

    seed = np.array([selftest.KEY.offset, 0], np.uint32)
    for sizes in selftest.SIZES:
        device = jax.local_devices(backend=platform)[0]
        operands = jax.device_put((*selftest.layer(*sizes), seed), device)
        for name, array in jax.jit(layer)(*operands).items():
            results[f"{name} of {sizes[0]} tokens"] = np.asarray(array)
    return results


@functools.lru_cache(maxsize=256)
def _text(config: HotConfig) -> str:
    """Return the backward's fields as the one attribute of a call."""

    def value_of(value: Any) -> str:
        if isinstance(value, bool):
            return str(value).lower()
        if isinstance(value, tuple):
            return ",".join(map(str, value))
        return "" if value is None else str(value)

    return "".join(f"{name}={value_of(value)};" for name, value in config.spec_fields().items())


@functools.lru_cache(maxsize=1)
def _cuda_context() -> _core.CoreContext | None:
    """Return a context for sizes of workspaces; None if JAX or this build has no CUDA."""
    if not (_core.built_with_cuda() and has_cuda()):
        return None
    return contexts.cuda(jax.local_devices(backend="cuda")[0].local_hardware_id, 0)


def has_cuda() -> bool:
    """Whether JAX has a CUDA device."""
    try:
        return bool(jax.local_devices(backend="cuda"))
    except RuntimeError:
        return False
