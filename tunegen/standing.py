"""Which stored trials stand, and which candidates go to the finals."""

from __future__ import annotations

from collections.abc import Sequence

from .bench import CONTENDER
from .dispatch import digest_today
from .evaluate import COMPILED, TORCH
from .model import Config, Silicon, Trial, TrialState
from .records import StoredTrial
from .space import load_space

FEWEST, FINALISTS = 8, 12
"""How many go to the finals, which look at all of them once before they choose (see `evaluate`): those within CONTENDER
of the best screening, FINALISTS at most, and FEWEST wherever they are. With the six best alone, 3 of 20 problems swept
three times on an H200 lost their winner on the way there: up to 13 candidates lie within 2 % of the best, and a score
of the screening is off by half a per cent, of small problems by three."""

PASSING = (TrialState.RUNTIME, TrialState.TIMEOUT, TrialState.CRASHED)
"""Failures that need not be the candidate's own, such as memory that another process held: tried again."""


def is_current(trial: StoredTrial, silicon: Silicon, torch: str) -> bool:
    """Whether a stored trial stands: the search space still has its config, its template still gives that kernel
    text, and it did not fail for a passing reason."""
    if trial.state in PASSING:
        return False
    if trial.config in (TORCH, COMPILED):
        return trial.torch == torch  # another release has another op, and another compiler
    if load_space(trial.problem.op).check(trial.problem, silicon, trial.config) is not None:
        return False
    return trial.digest == digest_today(trial.problem, trial.config)


def shortlist(trials: Sequence[Trial], default: Config | None) -> list[Trial]:
    """Who goes to the finals: the best of the screening, the built-in default, torch's op."""
    timed = sorted((t for t in trials if t.measurement is not None), key=score)
    fit = [t for t in timed if t.kind == "measured" and t.config != TORCH]
    near = [t for i, t in enumerate(fit[:FINALISTS]) if i < FEWEST or score(t) <= score(fit[0]) * (1 + CONTENDER)]
    return near + [t for t in timed if t not in near and t.config in (default, TORCH)]


def score(trial: Trial) -> float:
    """Time over the sentinel's time; lower is better."""
    assert trial.measurement is not None
    return trial.measurement.score
