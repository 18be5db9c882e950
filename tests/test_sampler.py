"""Which candidate comes next: small spaces whole, large ones by TPE, a budget shared between families."""

from __future__ import annotations

import optuna
import pytest
from optuna.trial import TrialState as OptunaState

from tunegen.model import Config
from tunegen.sampler import ENUMERATED, SEEDED, FamilySampler, Sampler

SMALL = {"ROWS": [1, 2, 4], "num_warps": [2, 4]}
LARGE = {"ROWS": [1, 2, 4, 8], "STAGES": [1, 2, 3, 4], "CHUNK": [1, 2, 4, 8, 16], "num_warps": [1, 2, 4, 8, 16]}


def configs(choices, family="tile"):
    points = [{}]
    for name, values in choices.items():
        points = [{**point, name: value} for point in points for value in values]
    return [Config.of(family, point) for point in points]


# As in a search space, many points are no valid config, and one parameter follows from others.
VALID = [c for c in configs(LARGE) if c["ROWS"] * c["CHUNK"] <= 32 and c["num_warps"] <= 4 * c["CHUNK"]]
COMPUTED = [Config.of("tile", {**dict(c.parameters), "BLOCK": c["ROWS"] * 64}) for c in configs(SMALL)]


def cost(config):
    """Best at ROWS 4, STAGES 3, CHUNK 8, num_warps 8."""
    wanted = {"ROWS": 4, "STAGES": 3, "CHUNK": 8, "num_warps": 8}
    known = dict(config.parameters)
    return 1 + sum(abs(known[name] - value) / value for name, value in wanted.items() if name in known)


def play(sampler, count=16, scores=cost):
    """Ask and tell to the end; what was asked, in order."""
    asked = []
    while batch := sampler.ask(count):
        asked += batch
        for config in batch:
            sampler.tell(config, scores(config))
    return asked


def tile(candidates=VALID, choices=LARGE, seed=0, **options):
    return FamilySampler(candidates, choices, seed, **options)


def test_spaces_are_as_large_as_the_tests_need():
    assert len(COMPUTED) <= ENUMERATED < len(VALID) < len(configs(LARGE))


def test_small_space_is_tried_whole_once_in_the_order_of_the_file_after_the_default():
    first = COMPUTED[3]
    asked = play(Sampler({"tile": tile(COMPUTED, SMALL, leading=[first])}, 100))
    assert asked == [first, *(c for c in COMPUTED if c != first)]


def test_default_that_is_no_candidate_is_not_asked_for():
    assert play(Sampler({"tile": tile(COMPUTED, SMALL, leading=[Config.of("tile", {"ROWS": 3})])}, 100)) == COMPUTED


def test_large_space_keeps_to_the_budget_and_repeats_nothing():
    asked = play(Sampler({"tile": tile(leading=[VALID[9]])}, 100))
    assert len(asked) == len(set(asked)) == 100
    assert set(asked) <= set(VALID)
    assert asked[0] == VALID[9]


def test_large_space_is_exhausted_when_the_budget_allows():
    asked = play(Sampler({"tile": tile()}, 10_000))
    assert len(asked) == len(VALID)
    assert set(asked) == set(VALID)


def test_search_is_better_than_the_order_of_the_file():
    ranks = sorted(map(cost, VALID))
    asked = play(Sampler({"tile": tile()}, 60))
    assert min(map(cost, asked)) <= ranks[2]
    assert sum(map(cost, asked[30:])) < sum(map(cost, asked[:30]))


@pytest.mark.parametrize("candidates", [VALID, COMPUTED], ids=["searched", "enumerated"])
def test_same_seed_gives_the_same_order(candidates):
    choices = LARGE if candidates is VALID else SMALL
    once, again = (play(Sampler({"tile": tile(candidates, choices, seed=5)}, 80)) for _ in range(2))
    assert once == again


def test_another_seed_gives_another_order():
    assert play(Sampler({"tile": tile(seed=5)}, 40)) != play(Sampler({"tile": tile(seed=6)}, 40))


def test_what_was_seen_is_not_asked_again():
    seen = {c: (None if c["ROWS"] == 1 else cost(c)) for c in VALID[::2]}
    asked = play(Sampler({"tile": tile(seen=seen, leading=[VALID[0]])}, 10_000))
    assert len(asked) == len(set(asked))
    assert set(asked) == set(VALID) - set(seen)


def test_what_was_seen_is_learned_from():
    seen = {c: cost(c) for c in VALID[::3]}
    rest = [c for c in VALID if c not in seen]
    informed = FamilySampler(VALID, LARGE, 0, seen=seen).ask(20)
    assert sum(map(cost, informed)) / 20 < 0.8 * sum(map(cost, rest)) / len(rest)
    assert FamilySampler(VALID, LARGE, 0, seen=seen).best == min(seen.values())


def test_failure_is_told_as_such_and_not_as_a_bad_score():
    family = tile()
    failed, good = family.ask(2)
    family.tell(failed, None)
    family.tell(good, 3.5)
    states = {t.number: (t.state, t.value) for t in family.study.trials}
    assert states == {0: (OptunaState.FAIL, None), 1: (OptunaState.COMPLETE, 3.5)}
    assert family.best == 3.5


def test_failures_do_not_stop_the_search():
    asked = play(Sampler({"tile": tile()}, 10_000), scores=lambda config: None)
    assert len(asked) == len(VALID)


def families(**scores):
    made = {name: FamilySampler(configs(LARGE, name), LARGE, 0) for name in scores}
    return made, lambda config: scores[config.family]


def test_every_family_has_a_first_share_then_the_best_one_goes_on():
    made, scores = families(slow=3.0, fast=1.0, middling=2.0)
    asked = play(Sampler(made, 60), scores=scores)
    share = Sampler.FIRST_SHARE
    assert [c.family for c in asked[: 3 * share]] == ["slow"] * share + ["fast"] * share + ["middling"] * share
    assert {c.family for c in asked[3 * share :]} == {"fast"}
    assert len(asked) == 60


def test_next_best_family_goes_on_when_the_best_is_exhausted():
    made, scores = families(slow=3.0, fast=1.0, middling=2.0)
    made["fast"] = FamilySampler(configs(SMALL, "fast"), SMALL, 0)
    asked = [c.family for c in play(Sampler(made, 60), scores=scores)]
    assert asked.count("fast") == len(configs(SMALL))
    assert asked.count("slow") == Sampler.FIRST_SHARE
    assert asked.count("middling") == 60 - Sampler.FIRST_SHARE - len(configs(SMALL))


def test_family_known_from_an_earlier_sweep_needs_no_first_share():
    known = dict.fromkeys(configs(LARGE, "known")[:10], 0.5)
    made, scores = families(new=2.0)
    made["known"] = FamilySampler(configs(LARGE, "known"), LARGE, 0, seen=known)
    asked = [c.family for c in play(Sampler(made, 30), scores=lambda c: 1.0 if c.family == "known" else scores(c))]
    assert asked == ["new"] * Sampler.FIRST_SHARE + ["known"] * (30 - Sampler.FIRST_SHARE)


def test_ranks_order_a_small_space_after_the_leading_ones():
    ranks = {config: place for place, config in enumerate(reversed(COMPUTED), 1)}
    asked = play(Sampler({"tile": tile(COMPUTED, SMALL, leading=COMPUTED[2:4], ranks=ranks)}, 100))
    assert set(asked[:2]) == set(COMPUTED[2:4])
    assert asked[2:] == [c for c in reversed(COMPUTED) if c not in COMPUTED[2:4]]


def test_leading_and_best_ranked_go_ahead_of_tpe():
    ranks = {config: place for place, config in enumerate(reversed(VALID), 1)}
    asked = play(Sampler({"tile": tile(leading=VALID[:2], ranks=ranks)}, 30))
    assert set(asked[:2]) == set(VALID[:2])
    assert asked[2 : 2 + SEEDED] == VALID[: -SEEDED - 1 : -1]


def ranked_families(ranks, scores):
    """Small families whose configs all have the same rank and score: which is asked when?"""
    made = {}
    for name, rank in ranks.items():
        candidates = configs(SMALL, name)
        made[name] = FamilySampler(candidates, SMALL, 0, ranks=dict.fromkeys(candidates, rank))
    return [c.family for c in play(Sampler(made, 100), count=8, scores=lambda config: scores[config.family])]


def test_every_ranked_family_is_looked_at_and_the_best_ranked_goes_on():
    asked = ranked_families({"bad": 9.0, "good": 1.0}, {"bad": 9.0, "good": 1.0})
    assert asked == ["good"] * 6 + ["bad"] * 6
    asked = ranked_families({"bad": 9.0, "good": 1.0, "so": 2.0}, {"bad": 9.0, "good": 1.0, "so": 2.0})
    assert asked[:8] == ["good"] * 4 + ["so"] * 2 + ["bad"] * 2


def test_a_family_that_the_ranks_wrong_is_found_by_its_scores():
    asked = ranked_families({"praised": 1.0, "slighted": 3.0}, {"praised": 5.0, "slighted": 1.0})
    assert asked[:8] == ["praised"] * 6 + ["slighted"] * 2  # the first batch knows no better
    asked = ranked_families(
        {"praised": 1.0, "slighted": 3.0, "dull": 2.0}, {"praised": 5.0, "slighted": 1.0, "dull": 4.0}
    )
    assert asked[8:12] == ["slighted"] * 4


@pytest.mark.parametrize("budget", [0, -3, 5, 20])
def test_budget_holds_with_ranks(budget):
    made = {n: FamilySampler(configs(LARGE, n), LARGE, 0, ranks=dict.fromkeys(configs(LARGE, n), 1.0)) for n in "abc"}
    sampler = Sampler(made, budget)
    assert sampler.total == len(play(sampler)) == max(budget, 0)


@pytest.mark.parametrize("budget", [0, -3, 5, 20])
def test_budget_is_never_exceeded(budget):
    made, scores = families(a=1.0, b=2.0, c=3.0)
    sampler = Sampler(made, budget)
    assert sampler.total == len(play(sampler, scores=scores)) == max(budget, 0)


def test_optuna_says_nothing(capfd):
    play(Sampler({"tile": tile()}, 70))
    assert capfd.readouterr() == ("", "")
    assert optuna.logging.get_verbosity() == optuna.logging.ERROR  # for the process: it is left so


def test_what_will_be_asked_for_in_any_case_may_be_compiled_ahead():
    families = {"tile": FamilySampler(VALID[:20], LARGE, 0, ranks={c: cost(c) for c in VALID[:20]})}
    sampler = Sampler(families, 20)
    first = sampler.ask(4)
    rest = sampler.certain()
    assert sorted(map(repr, [*first, *rest])) == sorted(map(repr, VALID[:20]))
    assert [cost(config) for config in rest] == sorted(cost(config) for config in rest)
    short = Sampler({"tile": FamilySampler(VALID[:20], LARGE, 0)}, 19)
    assert short.certain() == []
