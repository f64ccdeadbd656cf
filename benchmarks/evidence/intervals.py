"""Intervals of a mean by Student's t, and tests of equivalence within a margin."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple


class Interval(NamedTuple):
    """Mean of values with its interval."""

    mean: float
    low: float
    high: float
    count: int


def cumulative(t: float, degrees: int) -> float:
    """Return P(T <= t) of Student's distribution with whole ``degrees`` of freedom."""
    if degrees < 1:
        raise ValueError(f"degrees: {degrees} is below 1")
    angle = math.atan2(t, math.sqrt(degrees))
    square = math.cos(angle) ** 2
    # Finite sums of Abramowitz and Stegun, 26.7.3 and 26.7.4.
    term, total = 1.0, 0.0
    for k in range(1 + degrees % 2, degrees, 2):
        total += term
        term *= square * k / (k + 1)
    if degrees % 2:
        share = 2 / math.pi * (angle + math.sin(angle) * math.cos(angle) * total)
    else:
        share = math.sin(angle) * total
    return (1 + share) / 2


def quantile(p: float, degrees: int) -> float:
    """Return t with ``cumulative(t, degrees) == p``, 0.5 <= p < 1."""
    if not 0.5 <= p < 1:
        raise ValueError(f"p: {p} is outside 0.5 <= p < 1")
    low, high = 0.0, 1.0
    while cumulative(high, degrees) < p:
        low, high = high, 2 * high
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if cumulative(middle, degrees) < p else (low, middle)
    return high


def interval(values: Sequence[float]) -> Interval | None:
    """Return Student's 95 % interval; None for fewer than two values or an infinite one."""
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return None
    mean = statistics.mean(values)
    half = quantile(0.975, len(values) - 1) * statistics.stdev(values)
    half /= math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half, len(values))


def tost(values: Sequence[float], margin: float) -> float | None:
    """Return p of two one-sided t tests: the chance of such a mean if the true one is ``margin``.

    p is below 0.025 exactly if :func:`verdict` of the 95 % interval is "equivalent". The result is
    None for fewer than two values or an infinite one.
    """
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return None
    away = margin - abs(statistics.mean(values))
    error = statistics.stdev(values) / math.sqrt(len(values))
    t = away / error if error else math.copysign(math.inf, away)
    return 1 - cumulative(t, len(values) - 1)


def verdict(ends: Interval | None, margin: float) -> str:
    """Return the result in words; "equivalent" if the interval is within ``margin`` of zero."""
    if ends is None:
        return "not shown"
    if -margin <= ends.low and ends.high <= margin:
        return "equivalent"
    if ends.low > margin or ends.high < -margin:
        return "differs by more than the margin"
    if ends.low > 0 or ends.high < 0:
        return f"not shown, {'above' if ends.low > 0 else 'below'} zero"
    return "not shown"
