"""Layers whose weight is not trained: HOT's own codes, ConvRot's, and those of bitsandbytes."""

from .weights import FrozenWeight, HotFrozenLinear

__all__ = ["FrozenWeight", "HotFrozenLinear"]
