"""HOT for JAX: ``import hotcore.jax as hot``, then ``hot.linear(x, w, b, key=key)``."""

from ..config import HotConfig
from . import _requirement  # noqa: F401  (first)
from .linear import linear

__all__ = ["HotConfig", "linear"]
