"""Layers whose weight is not trained: HOT's own codes, ConvRot's, and those of bitsandbytes."""

from .weights import FrozenWeight as FrozenWeight
from .weights import HotFrozenLinear as HotFrozenLinear
