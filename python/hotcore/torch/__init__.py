"""HOT for torch: ``import hotcore.torch as hot``, then ``hot.convert(model)``."""

from ..config import HotConfig
from . import (
    _requirement,  # noqa: F401  (first)
    openmp,
)
from .accumulation import gradient_accumulation
from .attention import HotMultiheadAttention
from .autotune import autotune
from .calibrate import calibrate
from .compute import ComputeReport, LayerCompute, compute_report
from .convert import convert, revert
from .custom import CustomBackward, Replaced
from .freeze import FreezeReport, freeze_int8, thaw
from .frozen import FrozenWeight, HotFrozenLinear
from .memory import MemoryReport, ModuleMemory, memory_report
from .modules import HotConv2d, HotLinear
from .noise import NoiseMonitor
from .ops import share_inputs
from .ops.conv import conv2d
from .ops.linear import linear
from .plan import LayerPlan, Measured, Plan
from .policies import keep_attention, keep_codes, keep_products
from .recompute import Recomputed, recompute
from .report import ConversionReport, Converted, Skipped
from .schedule import PrecisionSchedule

openmp.share()

__all__ = [
    "ComputeReport",
    "ConversionReport",
    "Converted",
    "CustomBackward",
    "FreezeReport",
    "FrozenWeight",
    "HotConfig",
    "HotConv2d",
    "HotFrozenLinear",
    "HotLinear",
    "HotMultiheadAttention",
    "LayerCompute",
    "LayerPlan",
    "Measured",
    "MemoryReport",
    "ModuleMemory",
    "NoiseMonitor",
    "Plan",
    "PrecisionSchedule",
    "Recomputed",
    "Replaced",
    "Skipped",
    "autotune",
    "calibrate",
    "compute_report",
    "conv2d",
    "convert",
    "freeze_int8",
    "gradient_accumulation",
    "keep_attention",
    "keep_codes",
    "keep_products",
    "linear",
    "memory_report",
    "recompute",
    "revert",
    "share_inputs",
    "thaw",
]
