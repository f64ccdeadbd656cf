"""The method as it was published (HOT, CVPR 2025), for those who compare with it.

The published configuration, layer-wise quantiser selection (LQS), the precision schedule, and the
count of bit operations that its tables are in. Its bases, scales of a tensor and pseudo-stochastic
rounding are settings of the kernels that every recipe uses, not code of their own. Nothing else of
hotcore imports this package. It needs torch. Source: docs/paper.md.
"""

from .compute import compute_report
from .lqs import calibrate
from .recipe import published
from .schedule import PrecisionSchedule

__all__ = ["PrecisionSchedule", "calibrate", "compute_report", "published"]
