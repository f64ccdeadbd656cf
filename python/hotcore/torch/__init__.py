"""HOT for torch: ``import hotcore.torch as hot``, then ``model = hot.convert(model)``.

``__all__`` is in the order of use. Results of these functions (reports, handles, measurements) are
documented beside them and importable from their modules.
"""

import importlib
import sys

from ..config import HotConfig
from . import (
    _requirement,  # noqa: F401  (imported first: it checks torch's version)
    openmp,
)
from .conversion.convert import convert, revert
from .conversion.freeze import freeze, freeze_int8, thaw
from .conversion.load import load_frozen
from .conversion.report import report
from .distributed.int8_gradients import int8_gradients
from .distributed.int8_weights import int8_weights
from .layers.head import LinearCrossEntropy
from .layers.modules import HotConv2d, HotLinear
from .ops.conv import conv2d
from .ops.head import linear_cross_entropy
from .ops.linear import linear
from .tools import policies
from .tools.advise import advise
from .tools.custom import CustomBackward
from .tools.memory import memory_report
from .tools.noise import NoiseMonitor
from .tools.recompute import recompute

openmp.share()

for _path in (
    *("layers.attention", "layers.head", "layers.modules", "frozen.bitsandbytes", "frozen.convrot"),
    *("conversion.convert", "conversion.freeze", "conversion.report", "conversion.selection"),
    *("tools.advise", "tools.clocks", "tools.custom", "tools.memory", "tools.policies"),
    *("tools.noise", "tools.recompute"),
):  # Their paths before the folders, which programs import and pickles of whole models name.
    _module = importlib.import_module(f"{__name__}.{_path}")
    _name = _path.rpartition(".")[2]
    sys.modules[f"{__name__}.{_name}"] = _module
    globals().setdefault(_name, _module)  # the functions keep their names

__all__ = [  # noqa: RUF022  (the order of use)
    "convert",
    "report",
    "revert",
    "HotConfig",
    "HotLinear",
    "HotConv2d",
    "linear",
    "conv2d",
    "LinearCrossEntropy",
    "linear_cross_entropy",
    "memory_report",
    "recompute",
    "policies",
    "advise",
    "freeze",
    "freeze_int8",
    "load_frozen",
    "thaw",
    "int8_gradients",
    "int8_weights",
    "NoiseMonitor",
    "CustomBackward",
]
