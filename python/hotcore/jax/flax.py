"""Flax: ``HotDense`` for ``flax.linen.Dense``, ``HotLinear`` for ``flax.nnx.Linear``. Imports flax.

Both have the parameters of the plain layers (``kernel`` ``[I, O]``, ``bias``). Each call takes a
key from the random stream ``"hot"``. With ``deterministic`` they are the plain layers.
"""

from __future__ import annotations

import importlib
from typing import Any

from jax import lax

from ..config import ConfigLike, HotConfig, as_config
from .calls import Array
from .linear import linear

# hotcore does not require flax; the type checker runs without it.
_linen: Any = importlib.import_module("flax.linen")
_nnx: Any = importlib.import_module("flax.nnx")

_STREAM = "hot"
_PRODUCT = ("precision", "dot_general", "dot_general_cls", "preferred_element_type")


def _checked(layer: Any, config: ConfigLike) -> HotConfig:
    """Return the layer's configuration. Raises ValueError for options that HOT does not support."""
    for name in _PRODUCT:
        if getattr(layer, name, None) not in (None, lax.dot_general):
            raise ValueError(f"{name}: HOT replaces the product; leave it at its default")
    settings = as_config(config)
    if settings.forward_in_eval:
        raise ValueError("config: expected forward_in_eval=False: deterministic layers are plain")
    return settings


class HotDense(_linen.Dense):  # type: ignore[misc]
    """``flax.linen.Dense`` trained through HOT; the other arguments are Dense's.

    Args:
        config: a HotConfig or a recipe's name.
        deterministic: compute as the plain layer, which needs no key.

    Raises flax's error without a key of the stream ``"hot"``, and ValueError with ``precision``,
    ``dot_general`` or ``dot_general_cls``, or a configuration with ``forward_in_eval``.
    """

    config: ConfigLike = "default"
    deterministic: bool = False

    @_linen.compact  # type: ignore[untyped-decorator]
    def __call__(self, inputs: Array) -> Array:
        """``[..., I] -> [..., O]``."""
        settings = _checked(self, self.config)
        shape = (inputs.shape[-1], self.features)
        kernel = self.param("kernel", self.kernel_init, shape, self.param_dtype)
        bias = None
        if self.use_bias:
            bias = self.param("bias", self.bias_init, shape[1:], self.param_dtype)
        inputs, kernel, bias = self.promote_dtype(inputs, kernel, bias, dtype=self.dtype)
        if self.deterministic:
            y = inputs @ kernel
            return y if bias is None else y + bias
        key = self.make_rng(_STREAM)
        return linear(inputs, kernel.T, bias, key=key, config=settings)


class HotLinear(_nnx.Linear):  # type: ignore[misc]
    """``flax.nnx.Linear`` trained through HOT.

    ``model.train()``, ``model.eval()`` and ``nnx.view`` set ``deterministic``.

    Args:
        in_features: I.
        out_features: O.
        config: a HotConfig or a recipe's name.
        rngs: random streams with ``"hot"`` or a default one; the layer keeps a fork of it.
        deterministic: compute as the plain layer.
        **options: options of Linear, except those of its product (``precision``, ``dot_general``,
            ``preferred_element_type``): they raise a ValueError.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        config: ConfigLike = "default",
        rngs: Any,
        deterministic: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(in_features, out_features, rngs=rngs, **options)
        self.config = _checked(self, config)
        self.deterministic = deterministic
        self.rngs = rngs[_STREAM].fork()

    def __call__(self, inputs: Array, out_sharding: Any = None) -> Array:
        """``[..., I] -> [..., O]``; only the plain layer takes ``out_sharding``."""
        if self.deterministic:
            return super().__call__(inputs, out_sharding)
        if out_sharding is not None:
            raise ValueError("out_sharding: expected None for HOT's product; use shard_map")
        bias = None if self.bias is None else self.bias[...]
        inputs, kernel, bias = self.promote_dtype(
            (inputs, self.kernel[...], bias), dtype=self.dtype
        )
        return linear(inputs, kernel.T, bias, key=self.rngs(), config=self.config)

    def set_view(self, deterministic: bool | None = None) -> None:
        """Set ``deterministic`` for ``nnx.view``."""
        if deterministic is not None:
            self.deterministic = deterministic
