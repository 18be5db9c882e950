"""Which finalists cannot be told apart, and whether the best gains anything: what a winner may claim.

A kernel that is measured twice, on buffers of its own each time, does not take the same time twice. The finals of a
problem time every finalist in several rounds with new buffers; how far the rounds of one kernel lie apart, pooled
over all of them, says by how much two measurements of the same kernel differ: the band. Finalists within the band of
the best are a tie. Among those within half of it a fixed rule of the database's view `winners` chooses, so that two
sweeps and two ranks agree: fewest spills, fewest warps, then the first by the text of its parameters; torch's own op
comes last. Half, since what one sweep sees at the edge of the band another one sees beyond it: with the whole band, 6
of 20 problems that were swept three times on an H200 had a winner that another sweep did not count among its ties.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from .model import TORCH_FAMILY, Config, Trial

NORMAL = 1.959964
"""Standard deviations within which 95 % of a normal distribution lie."""
LARGE = 60e6
"""Bytes a call. Below, much of the data lies in the cache and a call takes a few microseconds."""
LIMITS_LARGE, LIMITS_SMALL = (0.0065, 0.015), (0.0165, 0.05)
"""The band is no narrower than what the finalists of two sweeps differed by, in other processes and hours on one H200:
95 % of 127 pairs of LARGE bytes and more by at most .65 %, of 109 smaller ones by 1.65 % (a factor that all
finalists of a problem share is taken out); of six rounds each, .56 and 1.5 %. Rounds of one process see less, .05
to .8 %. And it is no wider than a fault of the measurement that a tie would hide."""


def band(rounds: Sequence[Sequence[float]], bytes_moved: int) -> float:
    """The share by which two measurements of one kernel of this problem differ, at 95 %.

    Args:
        rounds: scores of each kernel, a sequence with one score a round; two rounds at least. A kernel's own score is
            their mean.
        bytes_moved: of one call; says how wide and how narrow the band may be.

    The factor that all kernels of a round share is taken out first. Of R rounds with a standard deviation s each, two
    means of R rounds differ by s * sqrt(2 / R).
    """
    logs = [[math.log(score) for score in kernel] for kernel in rounds]
    count = len(logs[0])
    shared = len(logs) > 1
    common = [statistics.mean(kernel[r] for kernel in logs) if shared else 0.0 for r in range(count)]
    own = [[kernel[r] - common[r] for r in range(count)] for kernel in logs]
    squares = sum((value - statistics.mean(kernel)) ** 2 for kernel in own for value in kernel)
    # The common factors were fitted too: they cost a degree of freedom for each round but one.
    freedom = max(len(logs) - 1, 1) * (count - 1)
    found = math.expm1(student_t(freedom) * math.sqrt(2 * squares / freedom / count))
    least, most = LIMITS_LARGE if bytes_moved >= LARGE else LIMITS_SMALL
    return min(max(found, least), most)


def student_t(freedom: int) -> float:
    """The same for Student's distribution with so many degrees of freedom, which has wider tails: 4.30 for 2, 2.23 for
    10. Cornish-Fisher expansion, Abramowitz and Stegun 26.7.5; within 1 % from 2 degrees on."""
    z, n = NORMAL, freedom
    return (
        z
        + (z**3 + z) / 4 / n
        + (5 * z**5 + 16 * z**3 + 3 * z) / 96 / n**2
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384 / n**3
        + (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160 / n**4
    )


ONE_ROUND = 0.01
"""One round of a kernel is off by .05 to .8 % (standard deviation, H200, 12 problems)."""
MOST = 8
"""Finalists that go on after one round."""
NEAR = 0.5
"""Of the band: within so much of the best the tie-breakers decide."""


def may_win(scores: Mapping[int, float], bytes_moved: int) -> list[int]:
    """Which of these finalists, by their numbers, go on after one round: at most MOST, best first, all within the
    widest band of the best and what one round may be off by."""
    _, most = LIMITS_LARGE if bytes_moved >= LARGE else LIMITS_SMALL
    limit = min(scores.values(), default=0.0) * (1 + most + ONE_ROUND)
    return sorted((i for i in scores if scores[i] <= limit), key=scores.__getitem__)[:MOST]


def judged(finals: Sequence[Trial], rivals: Sequence[Config], bytes_moved: int) -> list[Trial]:
    """The finals of one problem with their band, who is tied with the best, and who gains over the `rivals` (the
    built-in default and torch's op). Baselines take no part, and who went home after one round is neither the best nor
    tied: that round may be off by more than the band."""
    fit = [t for t in finals if t.kind == "measured" and t.measurement is not None]
    # Finalists that were timed one after the other, since one of them ends its process, come without rounds.
    known = {t.config: t.measurement.rounds for t in fit if t.measurement and len(t.measurement.rounds) > 1}
    if not known:
        return list(finals)
    width = band([*known.values()], bytes_moved)
    scores = {t.config: t.measurement.score for t in fit if t.measurement is not None}
    best = min(scores[config] for config in known)
    # A rival gains nothing over itself; of one that went home the round that is known may have been a slow one.
    present = [rival for rival in rivals if rival in scores]
    to_beat = min((scores[r] / (1 if r in known else 1 + ONE_ROUND) for r in present), default=math.inf)
    return [
        replace(
            trial,
            band=width,
            tied=sum(trial.config in known and scores[trial.config] <= best * (1 + width * part) for part in (1, NEAR)),
            gains=scores[trial.config] * (1 + width) < to_beat,
        )
        if trial in fit
        else trial
        for trial in finals
    ]


def tie_breakers(trial: Trial) -> tuple[int, int, str]:
    """What decides where the time does not: fewest spills, fewest warps, the first by its text."""
    spills = (trial.resources.spill_bytes or 0) if trial.resources else 0
    return spills, trial.config.num_warps, trial.config.to_json()


def winner(finals: Sequence[Trial]) -> Config:
    """The best of a problem's measured finals, by the rule of the view `winners`: the nearest ties first, torch's op
    last of them; then the least time where nothing is tied, and the tie-breakers."""

    def place(trial: Trial) -> tuple[int, float, tuple[int, int, str]]:
        assert trial.measurement is not None
        cost = float(trial.config.family == TORCH_FAMILY) if trial.tied else trial.measurement.score
        return -(trial.tied or 0), cost, tie_breakers(trial)

    return min(finals, key=place).config
