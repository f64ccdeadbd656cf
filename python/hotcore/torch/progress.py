"""Lines of progress on a terminal."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable, Iterator, Sized
from typing import TypeVar

now = time.monotonic
_QUIET_S = 5.0
"""Seconds without a line of progress."""
_Item = TypeVar("_Item")


def shown(
    items: Iterable[_Item],
    text: str,
    progress: bool,
    budget: float = math.inf,
) -> Iterator[_Item]:
    """Yield items; on a terminal a line says which one is at work, and the time left.

    Args:
        items: without a length there is no time left.
        text: the line, with ``{}`` for an item that is a str, otherwise for its number.
        progress: False yields the items alone.
        budget: seconds after which the work ends.
    """
    begun, count = now(), len(items) if isinstance(items, Sized) else 0
    progress = progress and sys.stderr.isatty()
    for i, item in enumerate(items):
        took = now() - begun
        if progress and took > _QUIET_S:
            line = text.format(item if isinstance(item, str) else i + 1)
            if count and i:  # a loader's first batch may take long
                left = max(0.0, min(took / i * (count - i), budget - took))
                line += f", {i + 1} of {count}, {left:.0f} s left"
            print(f"\r{line}\033[K", end="", file=sys.stderr, flush=True)
        yield item
    if progress:
        print("\r\033[K", end="", file=sys.stderr, flush=True)
