"""Times of blocks: which of them count, and what they say."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace

from .model import Conditions, Measurement
from .ties import student_t

SENTINEL_MOVED = 0.03
"""Share by which a sentinel's time may differ in a block that counts."""


def has_lost(times: Sequence[float], rival: Sequence[float]) -> bool:
    """Whether a candidate is slower than a rival that was timed in the same blocks: Student's interval of the mean of
    log(time / rival's time) lies above 0, at 95 %. Clocks that change from block to block change both alike."""
    logs = [math.log(t / r) for t, r in zip(times, rival, strict=True)]
    error = statistics.stdev(logs) / math.sqrt(len(logs))
    return statistics.mean(logs) > student_t(len(logs) - 1) * error


def rotated(count: int, block: int) -> list[int]:
    """The order of `count` candidates in a block: pairs of blocks begin with another one each, and the second runs
    backwards, so that each candidate is first, and last, as often as any other."""
    order = [(block // 2 + k) % count for k in range(count)]
    return order[::-1] if block % 2 else order


def steady_blocks(sentinel: Sequence[float]) -> list[int]:
    """Numbers of the blocks whose sentinel is within SENTINEL_MOVED of its usual time, but no fewer than half: the
    nearest ones. Usual is the end of the fastest quarter: whatever else the GPU does makes it slower, never faster."""
    usual = sorted(sentinel)[len(sentinel) // 4]
    by_distance = sorted(range(len(sentinel)), key=lambda b: abs(sentinel[b] - usual))
    steady = sum(abs(s - usual) <= SENTINEL_MOVED * usual for s in sentinel)
    return sorted(by_distance[: max(steady, -(-len(sentinel) // 2))])


def steady(times: Sequence[float], sentinel: Sequence[float], conditions: Sequence[Conditions | None]) -> Measurement:
    """Of the blocks whose sentinel did not move; the others are kept on record."""
    kept = steady_blocks(sentinel)
    found = summarize([times[b] for b in kept], [sentinel[b] for b in kept])
    return replace(
        found,
        blocks=tuple(times),
        sentinel_blocks=tuple(sentinel),
        conditions=tuple(conditions),
        kept=unless_all(b in kept for b in range(len(times))),
    )


def unless_all(kept: Iterable[bool]) -> tuple[bool, ...]:
    """Empty where every block counts."""
    found = tuple(kept)
    return () if all(found) else found


def summarize(blocks: Sequence[float], sentinel: Sequence[float]) -> Measurement:
    """Medians over blocks that all count."""
    return Measurement(
        us=statistics.median(blocks),
        score=statistics.median(b / s for b, s in zip(blocks, sentinel, strict=True)),
        sentinel_us=statistics.median(sentinel),
        blocks=tuple(blocks),
        sentinel_blocks=tuple(sentinel),
    )


def of_rounds(rounds: Sequence[Measurement]) -> Measurement:
    """Several rounds as one measurement, whose score is the mean of theirs."""
    blocks, sentinel = ([b for one in rounds for b in getattr(one, n)] for n in ("blocks", "sentinel_blocks"))
    kept = [k for one in rounds for k in one.kept or [True] * len(one.blocks)]
    whole = summarize(list(itertools.compress(blocks, kept)), list(itertools.compress(sentinel, kept)))
    scores = tuple(one.score for one in rounds)
    return replace(
        whole,
        score=statistics.fmean(scores),
        rounds=scores,
        blocks=tuple(blocks),
        sentinel_blocks=tuple(sentinel),
        conditions=tuple(c for one in rounds for c in one.conditions),
        kept=unless_all(kept),
        round_of=tuple(number for number, one in enumerate(rounds) for _ in one.blocks),
    )
