"""HOT for torch: ``import hotcore.torch as hot``, then ``model = hot.convert(model)``.

``__all__`` is in the order of use. Results of these functions (reports, handles, measurements) are
documented beside them and importable from their modules.
"""

from typing import TYPE_CHECKING, Any

from ..config import HotConfig, check_gone
from . import (
    _requirement,  # noqa: F401  (imported first: it checks torch's version)
    openmp,
    policies,
)
from .advise import advise
from .convert import convert, revert
from .custom import CustomBackward
from .freeze import freeze, freeze_int8, thaw
from .head import LinearCrossEntropy
from .int8_gradients import int8_gradients
from .memory import memory_report
from .modules import HotConv2d, HotLinear
from .noise import NoiseMonitor
from .ops import share_inputs
from .ops.conv import conv2d
from .ops.head import linear_cross_entropy
from .ops.linear import linear
from .recompute import recompute
from .report import report

openmp.share()

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
    "thaw",
    "int8_gradients",
    "share_inputs",
    "NoiseMonitor",
    "CustomBackward",
]

if not TYPE_CHECKING:  # type checkers would take any name for one of the module

    def __getattr__(name: str) -> Any:
        """Raise AttributeError; for a removed function it says what to do instead."""
        try:
            check_gone(name)
        except ValueError as error:
            raise AttributeError(f"module {__name__}: {error}") from None
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
