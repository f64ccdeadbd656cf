"""HOT for torch: ``import hotcore.torch as hot``, then ``hot.convert(model)``."""

from ..config import HotConfig
from .convert import ConversionReport, Converted, Skipped, convert, revert
from .functional import linear
from .modules import HotLinear

__all__ = [
    "ConversionReport",
    "Converted",
    "HotConfig",
    "HotLinear",
    "Skipped",
    "convert",
    "linear",
    "revert",
]
