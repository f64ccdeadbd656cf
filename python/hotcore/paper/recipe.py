"""``published``: the paper's configuration of a layer."""

from __future__ import annotations

from ..config import HotConfig


def published(token_grid: tuple[int, int] | None = None, prefix_tokens: int = 0) -> HotConfig:
    """The recipe ``"paper"`` with the paper's rounding and tiles of tokens.

    g_x in INT4, g_w from 8 low-pass rows of 16 tokens in INT8, one scale per tensor, rounding by
    the values' low bits. :func:`hotcore.paper.calibrate` chooses scales per layer, and
    :class:`hotcore.paper.PrecisionSchedule` changes the bits of g_x in time.

    Args:
        token_grid: (height, width) of an image's patches, in tiles of 4 x 4; None for text.
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
