"""HOT for torch: ``import hotcore.torch as hot``, then ``hot.convert(model)``."""

from ..config import HotConfig
from .convert import ConversionReport, Converted, Skipped, convert, revert
from .functional import conv2d, linear
from .lqs import LayerPlan, Plan, calibrate
from .modules import HotConv2d, HotLinear
from .schedule import PrecisionSchedule

__all__ = [
    "ConversionReport",
    "Converted",
    "HotConfig",
    "HotConv2d",
    "HotLinear",
    "LayerPlan",
    "Plan",
    "PrecisionSchedule",
    "Skipped",
    "calibrate",
    "conv2d",
    "convert",
    "linear",
    "revert",
]
