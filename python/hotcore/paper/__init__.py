"""The method as published (HOT, CVPR 2025), for comparisons with it.

The package has the published configuration, layer-wise quantiser selection (LQS), the precision
schedule, and the count of bit operations of the paper's tables. Its bases, tensor scales and
pseudo-stochastic rounding are settings of the common kernels. Nothing else in hotcore imports this
package. It needs torch. Source: docs/paper.md.
"""

from .compute import compute_report
from .lqs import calibrate
from .recipe import published
from .schedule import PrecisionSchedule

__all__ = ["PrecisionSchedule", "calibrate", "compute_report", "published"]
