"""Guided search beside random search: on a made landscape, and replayed on what an H200 measured (tests/data)."""

from __future__ import annotations

import random
import statistics
import sys
from pathlib import Path

import pytest

from tests.test_sampler import LARGE, VALID, cost
from tunegen.sampler import FamilySampler, Sampler
from tunegen.silicon import of_arch

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from measured import read
from search import asked, nine_of_ten, replayed, sampler_of, shuffled, trials_needed

MEASURED = Path(__file__).parent / "data" / "h200_screened.jsonl"
SCORES = {config: cost(config) for config in VALID}
GOAL = 1.02 * min(SCORES.values())


def guided(seed, ranks):
    sampler = Sampler({"tile": FamilySampler(VALID, LARGE, seed, ranks=ranks)}, len(VALID))
    return trials_needed(asked(sampler, SCORES), SCORES, GOAL)


def noisy(seed, spread):
    """Ranks that are right up to a factor."""
    chance = random.Random(seed)
    return {config: score * chance.lognormvariate(0, spread) for config, score in SCORES.items()}


def test_guided_search_needs_fewer_trials_than_random_search():
    alone = [trials_needed(shuffled(VALID, seed), SCORES, GOAL) for seed in range(10)]
    found = [guided(seed, noisy(seed, 0.3)) for seed in range(10)]
    assert statistics.median(found) < 0.3 * statistics.median(alone)
    assert nine_of_ten(found) <= 0.15 * len(VALID)


def test_search_recovers_from_ranks_that_say_nothing():
    """TPE goes on from where ranks led: with ranks by lot it still beats random search."""
    alone = [trials_needed(shuffled(VALID, seed), SCORES, GOAL) for seed in range(10)]
    found = [
        guided(seed, dict(zip(SCORES, shuffled(range(1, len(SCORES) + 1), seed), strict=True))) for seed in range(10)
    ]
    assert statistics.median(found) < statistics.median(alone)


def test_nothing_is_asked_twice_and_everything_is_asked():
    sampler = Sampler({"tile": FamilySampler(VALID, LARGE, 0, VALID[7:9], ranks=noisy(0, 0.3))}, len(VALID))
    order = list(asked(sampler, SCORES))
    assert len(order) == len(set(order)) == len(VALID)


@pytest.fixture(scope="module")
def measured():
    return read([MEASURED])


def test_replay_covers_every_candidate_once(measured):
    for candidates in measured.values():
        scores = {c.config: c.score for c in candidates}
        order = list(asked(sampler_of(candidates, 0, [], {}), scores))
        assert len(order) == len(set(order)) == len(scores)


def test_replayed_on_an_h200_the_model_needs_a_seventh_of_the_space_and_less_than_random(measured):
    for problem, candidates in measured.items():
        found = replayed(measured, problem, of_arch("sm_90"), 10)
        for name in ("model", "near"):
            assert nine_of_ten(found[name]) <= 0.15 * len(candidates), (problem.label(), name)
            assert statistics.median(found[name]) < statistics.median(found["random"]), (problem.label(), name)


def test_nine_of_ten_leaves_one_seed_out():
    assert nine_of_ten([9, 1, 2, 3, 4, 5, 6, 7, 8, 100]) == 9
    assert nine_of_ten([5]) == 5
    assert nine_of_ten(list(range(1, 21))) == 18
