"""Which candidate next: Optuna by ask and tell, one study a family. Small spaces are enumerated, large ones left to
TPE; what a model ranks high and what won for neighbouring problems goes first."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.trial import Trial as OptunaTrial
from optuna.trial import TrialState as OptunaState
from optuna.trial import create_trial

from .model import Config, Value

ENUMERATED = 64
"""Families with at most this many valid configs are tried whole, if the budget allows: in the order of the ranks, else
of the search space."""
SEEDED = 12
"""How many of a larger family's configs, by rank, go ahead of what TPE draws."""
EXPLORED = 2
"""Configs that every ranked family may show before the ranks alone decide: they may be wrong about an algorithm."""


class FamilySampler:
    """Candidates of one family: `candidates` are its valid configs, `choices` what each parameter may be.

    `leading` go ahead of all others: the default, winners of neighbouring problems. `ranks` says what each candidate
    may cost, a positive number in any unit, the lower the sooner. `seen` holds the scores of trials from an earlier
    sweep, None for failed ones: they are learned from and not asked for again.
    """

    def __init__(
        self,
        candidates: Sequence[Config],
        choices: Mapping[str, Sequence[Value]],
        seed: int,
        leading: Sequence[Config] = (),
        seen: Mapping[Config, float | None] | None = None,
        ranks: Mapping[Config, float] | None = None,
    ) -> None:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.seen = seen = dict(seen or {})
        self.ranks = ranks = dict(ranks or {})
        by_rank = sorted(candidates, key=lambda config: ranks.get(config, float("inf")))
        self.leading = [config for config in dict.fromkeys(leading) if config in candidates and config not in seen]
        self.unseen = {c: None for c in (*self.leading, *by_rank) if c not in seen}
        # Parameters that follow from others are not Optuna's business: a drawn point is completed to the one valid
        # config.
        self.distributions: dict[str, BaseDistribution] = {
            n: CategoricalDistribution(list(v)) for n, v in choices.items()
        }
        self.by_point = {self._point(c): c for c in self.unseen}
        self.places = {name: {value: i for i, value in enumerate(values)} for name, values in choices.items()}
        self.study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed))
        self.asked: dict[Config, OptunaTrial] = {}
        self.scores = {config: score for config, score in seen.items() if score is not None}
        self.tried = bool(seen)
        for config, score in self.scores.items():
            params = dict(self._point(config))
            self.study.add_trial(create_trial(params=params, distributions=self.distributions, value=score))
        enumerated = len(self.unseen) <= ENUMERATED
        # Without ranks TPE starts from the leading ones, else from the first of the file: it needs a point.
        ahead = len(self.leading) + SEEDED if ranks else max(len(self.leading), 1)
        self.queued = list(self.unseen)[: None if enumerated else ahead]
        for config in self.queued:
            self.study.enqueue_trial(dict(self._point(config)))
        self.first_share = max(EXPLORED, len(self.leading))

    @property
    def best(self) -> float:
        """The lowest score so far."""
        return min(self.scores.values(), default=float("inf"))

    def ratios(self) -> list[float]:
        """Score over rank, for every config that has both."""
        return [score / self.ranks[config] for config, score in self.scores.items() if config in self.ranks]

    def expected(self, config: Config, usual: float) -> float:
        """The score to expect: the rank times the family's ratio, or `usual` before anything is known."""
        return self.ranks.get(config, float("inf")) * statistics.median(self.ratios() or [usual])

    def promise(self, usual: float) -> float:
        """What to expect of the next config; where TPE will draw it, the best score so far."""
        following = next((c for c in self.queued if c in self.unseen), None)
        return self.best if following is None else self.expected(following, usual)

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
            self.scores[config] = score
            self.study.tell(trial, score)


class Sampler:
    """Shares a problem's budget between its families.

    With ranks: a few of each family, then whatever promises the best score, ranks corrected by how each family has
    scored so far. Without: a first share to each family, then batches to the one with the best score.
    """

    FIRST_SHARE = 8

    def __init__(self, families: Mapping[str, FamilySampler], budget: int) -> None:
        self.families = dict(families)
        self.leading = {config for family in families.values() for config in family.leading}
        self.left = self.total = max(0, min(budget, sum(len(f.unseen) for f in families.values())))

    def certain(self) -> list[Config]:
        """Configs that will all be asked for, likely ones first; none where the budget does not reach that far."""
        unseen: dict[Config, float] = {}
        for family in self.families.values():
            scale = statistics.median(family.ratios() or [1.0])
            unseen |= {c: family.ranks.get(c, float("inf")) * scale for c in family.unseen}
        if len(unseen) > self.left:
            return []
        return sorted(unseen, key=lambda c: (c not in self.leading, unseen[c]))

    def ask(self, count: int) -> list[Config]:
        """The next batch, about `count`; fewer at the end, [] when the budget is spent or every family is
        exhausted."""
        ranked = any(f.ranks for f in self.families.values())
        found = self._promising(count) if ranked else self._shared(count)
        self.left -= len(found)
        return found

    def _shared(self, count: int) -> list[Config]:
        """The first share of every family that has had none, else `count` configs of the best family."""
        open_families = [f for f in self.families.values() if f.unseen]
        untried = [f for f in open_families if not f.tried]
        chosen = untried or sorted(open_families, key=lambda f: f.best)[:1]
        found: list[Config] = []
        for family in chosen:
            found += family.ask(min(self.FIRST_SHARE if untried else count, self.left - len(found)))
        return found

    def _promising(self, count: int) -> list[Config]:
        """A few of every family that has had none, and what promises most; leading ones first."""
        found: list[Config] = []
        usual = statistics.median([r for f in self.families.values() for r in f.ratios()] or [1.0])
        for family in self.families.values():
            if not family.tried:
                found += family.ask(min(family.first_share, self.left - len(found)))
        while len(found) < min(count, self.left):
            open_families = [f for f in self.families.values() if f.unseen]
            if not open_families:
                break
            found += min(open_families, key=lambda f: f.promise(usual)).ask(1)
        places = {c: (c not in self.leading, self.families[c.family].expected(c, usual)) for c in found}
        return sorted(found, key=places.__getitem__)

    def tell(self, config: Config, score: float | None) -> None:
        """Pass a result on to its family."""
        self.families[config.family].tell(config, score)
