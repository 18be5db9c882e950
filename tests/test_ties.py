"""Which finalists cannot be told apart, and what a winner may claim."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
from fake_gpu import DEFAULT, H200, PROBLEM, TILES, measurement

from tunegen.blocks import of_rounds, summarize
from tunegen.evaluate import COMPILED, TORCH
from tunegen.model import Config, Resources, Trial, TrialState
from tunegen.store import Store
from tunegen.ties import LARGE as FROM
from tunegen.ties import LIMITS_LARGE, LIMITS_SMALL, MOST, band, judged, may_win, student_t, winner

LARGE, SMALL = 128_000_000, 8_000_000


def noisy(true, sigma, chance, rounds=3):
    return [[score * chance.lognormvariate(0.0, sigma) for _ in range(rounds)] for score in true]


@pytest.mark.parametrize("kernels", [2, 4, 8])
def test_band_is_what_two_measurements_of_one_kernel_differ_by(kernels, monkeypatch):
    """Of many pairs of measurements, 95 % differ by no more, however few kernels there are; the factor that a round
    shares does not count, and the score is that of `blocks.of_rounds`."""
    monkeypatch.setattr("tunegen.ties.LIMITS_SMALL", (0.0, 1.0))
    chance = random.Random(1)

    def measured():
        """Rounds whose blocks differ by little, as on a GPU."""
        rounds = [10 * chance.lognormvariate(0.0, 0.01) for _ in range(3)]
        return of_rounds([summarize([us, us * 1.0001, us * 0.9999], [10.0] * 3) for us in rounds])

    within = []
    for _ in range(4000):
        shared = [chance.lognormvariate(0.0, 0.05) for _ in range(3)]
        found = band([[s * f for s, f in zip(measured().rounds, shared, strict=True)] for _ in range(kernels)], SMALL)
        first, second = measured().score, measured().score
        within.append(max(first, second) / min(first, second) <= 1 + found)
    assert 0.94 <= sum(within) / len(within) <= 0.96


def test_students_distribution_is_that_of_the_tables():
    assert [round(student_t(n), 2) for n in (4, 6, 10, 30)] == [2.78, 2.45, 2.23, 2.04]
    assert student_t(2) == pytest.approx(4.303, rel=0.01)


def test_band_grows_with_the_noise_within_limits():
    chance = random.Random(1)
    calm, noise, wild = (band(noisy([1.0] * 8, sigma, chance), SMALL) for sigma in (0.001, 0.015, 0.1))
    assert calm == LIMITS_SMALL[0] < noise < wild == LIMITS_SMALL[1]


def test_limits_are_those_of_large_problems_from_sixty_megabytes():
    wild, calm = [[1.0, 1.2, 0.8], [1.2, 0.8, 1.0], [0.8, 1.0, 1.2]], [[1.0, 1.0, 1.0]] * 2
    assert (band(calm, 60_000_000), band(wild, 60_000_000)) == LIMITS_LARGE
    assert (band(calm, 59_999_999), band(wild, 59_999_999)) == LIMITS_SMALL


def test_band_of_a_single_kernel_is_that_of_its_rounds():
    """Two degrees of freedom: Student's 4.30 standard errors."""
    assert band([[1.0, 1.003, 0.997]], LARGE) == pytest.approx(4.27 * (2 / 3) ** 0.5 * 0.003, rel=0.02)


@pytest.mark.parametrize(("moved", "widest"), [(FROM, 0.025), (FROM - 1, 0.06)])
def test_one_round_sends_home_whoever_could_not_tie(moved, widest):
    scores = {7: 1.0 + widest + 1e-6, 3: 1.0 + widest - 1e-6, 5: 1.0}
    assert may_win(scores, moved) == [5, 3]
    assert may_win(dict.fromkeys(range(20), 1.0), moved) == list(range(MOST))
    assert may_win({}, moved) == []


def final(config, us, rounds=(), **changes):
    found = replace(measurement(us, 24), rounds=rounds or (us / 10 * 1.002, us / 10, us / 10 * 0.998))
    return Trial(PROBLEM, config, TrialState.OK, stage="final", measurement=found, **changes)


def turned(config, us):
    """Noise that runs the other way, so that it is no factor which all share."""
    return final(config, us, (us / 10 * 0.998, us / 10, us / 10 * 1.002))


def steady_final(config, us):
    """Without any noise."""
    return final(config, us, (us / 10,) * 3)


def verdicts(trials, rivals=(DEFAULT, TORCH), moved=LARGE):
    return {t.config: (t.tied, t.gains) for t in judged(trials, rivals, moved)}


def test_finalists_within_the_band_of_the_best_are_tied():
    best, near, far = TILES[1], TILES[2], TILES[3]
    found = verdicts([final(best, 10.0), turned(near, 10.02), turned(far, 10.5), final(TORCH, 30.0)])
    assert found == {best: (2, True), near: (2, True), far: (0, True), TORCH: (0, False)}


def test_winner_is_never_of_the_outer_half_of_the_band():
    """Another sweep might see it outside. 0.65 % is the least band of a large problem."""
    best, inner, outer, far = sorted(TILES[1:6], key=lambda config: -config.num_warps)[:4]
    assert best.num_warps > inner.num_warps > outer.num_warps
    finals = [steady_final(c, us) for c, us in ((best, 10.0), (inner, 10.032), (outer, 10.033), (far, 10.066))]
    found = judged(finals, (), LARGE)
    assert [(t.tied, t.band) for t in found] == [(2, 0.0065), (2, 0.0065), (1, 0.0065), (0, 0.0065)]
    assert winner(found) == inner


@pytest.mark.parametrize("rival", [DEFAULT, TORCH])
def test_winner_that_does_not_beat_a_rival_beyond_the_band_gains_nothing(rival):
    assert verdicts([final(TILES[1], 10.0), turned(rival, 10.01)]) == {TILES[1]: (2, False), rival: (2, False)}
    assert verdicts([final(TILES[1], 10.0), turned(rival, 10.6)])[TILES[1]] == (2, True)


def test_default_that_is_the_best_gains_nothing_over_itself():
    assert verdicts([final(DEFAULT, 10.0), turned(TORCH, 30.0)])[DEFAULT] == (2, False)


def test_baselines_take_no_part():
    compiled = final(COMPILED, 5.0, (0.5,), kind="baseline")
    found = judged([final(TILES[1], 10.0), turned(TILES[2], 10.01), compiled], (DEFAULT, TORCH), LARGE)
    assert [(t.tied, t.band is None) for t in found] == [(2, False), (2, False), (None, True)]


@pytest.mark.parametrize("us", [9.99, 10.01])
def test_one_round_makes_no_winner(us):
    """More finalists than MOST may lie within the band: of the others one round is known, which may be off by more."""
    best, other = sorted(TILES[1:3], key=lambda config: -config.num_warps)
    found = judged([final(best, 10.0), turned(DEFAULT, 10.02), final(other, us, (us / 10,))], (DEFAULT, TORCH), LARGE)
    assert [t.tied for t in found] == [2, 2, 0]
    assert winner(found) != other


@pytest.mark.parametrize(("us", "gains"), [(10.15, False), (10.25, True)])
def test_a_rival_of_one_round_is_beaten_by_more(us, gains):
    """By the band and what one round may be off by: 0.65 % and 1 %."""
    rival = final(DEFAULT, us, (us / 10,))
    assert verdicts([steady_final(TILES[1], 10.0), rival])[TILES[1]] == (2, gains)


def test_without_rounds_nothing_is_claimed():
    """Finalists that were timed one by one, because one of them had ended the process."""
    alone = Trial(PROBLEM, TILES[1], TrialState.OK, stage="final", measurement=measurement(10.0))
    assert judged([alone], (DEFAULT, TORCH), LARGE) == [alone]
    assert judged([], (DEFAULT, TORCH), LARGE) == []


def test_winner_is_the_one_that_the_database_names(tmp_path):
    """The same rule, once in SQL and once here: for these, and for what is left when the best of them is taken away."""
    spilling = Resources(255, 8, 0, "")
    trials = [
        final(TORCH, 9.0, tied=True, band=0.01, gains=False),
        final(TILES[1], 9.02, tied=True, band=0.01, gains=True),
        final(TILES[5], 9.01, tied=True, band=0.01, gains=True),
        final(TILES[6], 9.03, tied=True, band=0.01, gains=True, resources=spilling),
        final(TILES[9], 9.02, tied=2, band=0.01, gains=True, resources=spilling),
        final(TILES[10], 9.0, tied=2, band=0.01, gains=True, resources=spilling),
        final(TILES[7], 9.4, tied=False, band=0.01, gains=True),
        final(TILES[8], 9.3, tied=False, band=0.01, gains=True),
    ]
    for left in range(len(trials)):
        with Store.open(tmp_path / f"{left}.db") as store:
            store.add_all(store.begin_sweep(H200, {}, {}, 0), trials, 2, "3.8", "")
            (row,) = store.winners()
        assert winner(trials) == Config.of(row["family"], json.loads(row["parameters"]))
        trials = [trial for trial in trials if trial.config != winner(trials)]
