"""HOT for torch: ``import hotcore.torch as hot``, then ``hot.convert(model)``."""

from ..config import HotConfig
from .accumulation import gradient_accumulation
from .compress_saved import Compression, compress_saved
from .convert import ConversionReport, Converted, Skipped, convert, revert
from .functional import conv2d, linear
from .lqs import LayerPlan, Plan, calibrate
from .memory import MemoryReport, ModuleMemory, memory_report
from .modules import HotConv2d, HotLinear
from .schedule import PrecisionSchedule

__all__ = [
    "Compression",
    "ConversionReport",
    "Converted",
    "HotConfig",
    "HotConv2d",
    "HotLinear",
    "LayerPlan",
    "MemoryReport",
    "ModuleMemory",
    "Plan",
    "PrecisionSchedule",
    "Skipped",
    "calibrate",
    "compress_saved",
    "conv2d",
    "convert",
    "gradient_accumulation",
    "linear",
    "memory_report",
    "revert",
]
