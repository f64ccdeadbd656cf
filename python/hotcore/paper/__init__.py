"""The method as published (HOT, CVPR 2025), for comparisons with it.

The package has the published configuration, layer-wise quantiser selection (LQS), the precision
schedule, and the count of bit operations of the paper's tables. Its bases, tensor scales and
pseudo-stochastic rounding are settings of the common kernels. Nothing else in hotcore imports this
package. It needs torch. Source: docs/paper.md.
"""

from ..config import HotConfig
from .compute import compute_report
from .lqs import calibrate
from .schedule import PrecisionSchedule

__all__ = ["PrecisionSchedule", "calibrate", "compute_report", "published"]


def published(token_grid: tuple[int, int] | None = None, prefix_tokens: int = 0) -> HotConfig:
    """The recipe ``"paper"`` with the paper's rounding and tiles of tokens.

    Args:
        token_grid: (height, width) of an image's patches, in tiles of 4 x 4; None for text.
        prefix_tokens: class tokens in front of every image's patches.

    Raises ValueError for ``prefix_tokens`` without a grid, or a bad number. Source: the paper,
    Sections 4 and 5; docs/paper.md.
    """
    return HotConfig.recipe(
        "paper",
        token_grid=token_grid,
        prefix_tokens=prefix_tokens,
        gx_rounding="pseudo_stochastic",
        gw_rounding="pseudo_stochastic",
    )
