"""``published``: the configuration with all that the paper says of a layer."""

from __future__ import annotations

from ..config import HotConfig


def published(token_grid: tuple[int, int] | None = None, prefix_tokens: int = 0) -> HotConfig:
    """The recipe ``"paper"`` with the paper's rounding and tiles of tokens.

    g_x in INT4 and g_w from 8 low-pass rows of 16 tokens in INT8, one scale for a tensor, rounding
    by the values' own low bits. The two parts that change with the layer or in time stand beside
    it: :func:`hotcore.paper.calibrate` and :class:`hotcore.paper.PrecisionSchedule`.

    Args:
        token_grid: (height, width) of the patches of an image, which are taken in 4 x 4 tiles; None
            for text.
        prefix_tokens: class tokens in front of every image's patches.

    Raises:
        ValueError: ``prefix_tokens`` without a grid, or a bad number.

    Source: the paper, Sections 4 and 5; docs/paper.md.
    """
    return HotConfig.recipe(
        "paper",
        token_grid=token_grid,
        prefix_tokens=prefix_tokens,
        gx_rounding="pseudo_stochastic",
        gw_rounding="pseudo_stochastic",
    )
