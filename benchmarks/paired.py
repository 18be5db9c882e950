"""Ratios of times that were measured in turns: clocks drift over minutes, two steps of one turn drift together."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

CONFIDENCE = 0.95


class Ratio(NamedTuple):
    """Median of the ratios of all turns, with the interval that holds the true median with `confidence`."""

    median: float
    low: float
    high: float
    confidence: float
    turns: int


def ratio(over: Sequence[float], under: Sequence[float]) -> Ratio:
    """`over / under`, turn by turn: above 1 where `under` is the faster one. Both have one time a turn, at least two.

    The interval lies between two order statistics, and how often it holds the median follows from the binomial
    distribution alone: nothing is assumed of the noise. With fewer than six turns even all of them give less than
    95 %; `confidence` says what they do give.
    """
    ratios = sorted(o / u for o, u in zip(over, under, strict=True))
    count = len(ratios)

    def outside(left_out: int) -> float:
        return sum(math.comb(count, k) for k in range(left_out + 1)) * 2 / 2**count

    left_out = max((k for k in range(count // 2) if outside(k) <= 1 - CONFIDENCE), default=0)
    return Ratio(
        statistics.median(ratios), ratios[left_out], ratios[count - 1 - left_out], 1 - outside(left_out), count
    )


def beyond(found: Ratio, same: Ratio) -> bool:
    """Whether a gain is larger than what the same thing, measured twice, differs by: the near end of its interval
    against the far end of that one's, whichever way it leans."""
    return found.low > max(same.high, 1 / same.low)
