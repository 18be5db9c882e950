"""Which candidate next: Optuna by ask and tell, one study a family. Small spaces are enumerated, large ones left to
TPE."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.trial import Trial as OptunaTrial
from optuna.trial import TrialState as OptunaState
from optuna.trial import create_trial

from .model import Config, Value

ENUMERATED = 64
"""Families with at most this many valid configs are tried whole, in the order of the search space, if the budget
allows."""


class FamilySampler:
    """Candidates of one family: `candidates` are its valid configs, `choices` what each parameter may be.

    `first` (the default) goes ahead of all others; `seen` holds the scores of trials from an earlier sweep, None for
    failed ones: they are learned from and not asked for again.
    """

    def __init__(
        self,
        candidates: Sequence[Config],
        choices: Mapping[str, Sequence[Value]],
        seed: int,
        first: Config | None = None,
        seen: Mapping[Config, float | None] | None = None,
    ) -> None:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.seen = seen = dict(seen or {})
        ordered = [first, *candidates] if first in candidates else candidates
        self.unseen = {c: None for c in ordered if c is not None and c not in seen}
        # Parameters that follow from others are not Optuna's business: a drawn point is completed to the one valid
        # config.
        self.distributions: dict[str, BaseDistribution] = {
            n: CategoricalDistribution(list(v)) for n, v in choices.items()
        }
        self.by_point = {self._point(c): c for c in self.unseen}
        self.places = {name: {value: i for i, value in enumerate(values)} for name, values in choices.items()}
        self.study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed))
        self.asked: dict[Config, OptunaTrial] = {}
        self.best = min((s for s in seen.values() if s is not None), default=float("inf"))
        self.tried = bool(seen)
        for config, score in seen.items():
            if score is not None:
                params = dict(self._point(config))
                self.study.add_trial(create_trial(params=params, distributions=self.distributions, value=score))
        for config in list(self.unseen)[: None if len(self.unseen) <= ENUMERATED else 1]:
            self.study.enqueue_trial(dict(self._point(config)))

    def _point(self, config: Config) -> tuple[tuple[str, Value], ...]:
        return tuple((name, value) for name, value in config.parameters if name in self.distributions)

    def _nearest(self, point: Mapping[str, Value]) -> Config:
        """The unseen config that is the fewest steps along the lists of choices away."""

        def steps(config: Config) -> int:
            mine = self._point(config)
            return sum(abs(self.places[name][value] - self.places[name][point[name]]) for name, value in mine)

        return min(self.unseen, key=steps)

    def ask(self, count: int) -> list[Config]:
        """Up to `count` configs not asked before; fewer when the family is exhausted."""
        self.tried = True
        found: list[Config] = []
        while self.unseen and len(found) < count:
            trial = self.study.ask(self.distributions)
            config = self.by_point.get(tuple(sorted(trial.params.items())))
            if config not in self.unseen:
                # Invalid or asked before: TPE knows no constraints, and in a discrete space most of its draws are
                # repeats (27 for each new config among 292). The next ask returns the nearest one instead.
                self.study.tell(trial, state=OptunaState.FAIL)
                self.study.enqueue_trial(dict(self._point(self._nearest(trial.params))))
                continue
            assert config is not None
            del self.unseen[config]
            self.asked[config] = trial
            found.append(config)
        return found

    def tell(self, config: Config, score: float | None) -> None:
        """The score of a config that was asked for (lower is better), or None for a failed one."""
        trial = self.asked.pop(config)
        if score is None:
            self.study.tell(trial, state=OptunaState.FAIL)
        else:
            self.best = min(self.best, score)
            self.study.tell(trial, score)


class Sampler:
    """Shares a problem's budget between its families: a first share to each, then batches to the one with the best
    score."""

    FIRST_SHARE = 8

    def __init__(self, families: Mapping[str, FamilySampler], budget: int) -> None:
        self.families = dict(families)
        self.left = self.total = max(0, min(budget, sum(len(f.unseen) for f in families.values())))

    def ask(self, count: int) -> list[Config]:
        """The next batch: the first share of every family that has had none, else `count` configs of the best family;
        fewer at the end, [] when the budget is spent or every family is exhausted."""
        open_families = [f for f in self.families.values() if f.unseen]
        untried = [f for f in open_families if not f.tried]
        chosen = untried or sorted(open_families, key=lambda f: f.best)[:1]
        found: list[Config] = []
        for family in chosen:
            found += family.ask(min(self.FIRST_SHARE if untried else count, self.left - len(found)))
        self.left -= len(found)
        return found

    def tell(self, config: Config, score: float | None) -> None:
        """Pass a result on to its family."""
        self.families[config.family].tell(config, score)
