"""What a sweep says for people: the table, the sentence, failures, progress."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace

import pytest
from fake_gpu import DEFAULT, H200, PROBLEM, TILES, make_resources, measurement
from rich.console import Console

from tunegen import paths, progress, report
from tunegen.evaluate import COMPILED, TORCH
from tunegen.model import Problem, Resources, Trial, TrialState
from tunegen.progress import SweepProgress

FEW = replace(PROBLEM, rows=4)
WINNER = TILES[1]


@pytest.fixture(autouse=True)
def _package(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "PACKAGE", make_resources(tmp_path / "package"))


def timed(config, us, problem=PROBLEM, **changes):
    return Trial(problem, config, TrialState.OK, stage="final", measurement=measurement(us), **changes)


def failed(config, state=TrialState.COMPILE, reason="too large", problem=PROBLEM):
    return Trial(problem, config, state, reason=reason)


def finals(us, default=12.0, problem=PROBLEM):
    times = ((DEFAULT, default), (WINNER, us), (TORCH, 30.0), (COMPILED, 24.0))
    judged = {"scratch_bytes": 512, "band": 0.02}
    return [
        timed(config, time, problem, **judged, tied=time <= us * 1.02, gains=time * 1.02 < default)
        for config, time in times
    ]


def lines(*problems_and_times):
    trials = [t for problem, us in problems_and_times for t in finals(us, problem=problem)]
    return report.lines(trials, {problem: WINNER for problem, _ in problems_and_times}, H200)


def printed(table, width=1000):
    console = Console(file=io.StringIO(), width=width)
    console.print(table)
    return [line.rstrip() for line in console.file.getvalue().splitlines() if line.strip()]


def shown(table):
    return [line.split() for line in printed(table)]


# The table


def test_line_compares_the_winner_with_all_others():
    (line,) = lines((PROBLEM, 8.0))
    assert (line.direction, line.rows, line.hidden, line.dtype) == ("forward", 1024, 4096, "bf16")
    assert (line.winner, line.us, line.scratch_bytes) == (WINNER.label(), 8.0, 512)
    assert line.tb_per_s == pytest.approx(2 * 1024 * 4096 * 2 / 8e-6 / 1e12)
    assert line.share_of_copy == pytest.approx(10 / 8)
    assert (line.over_torch, line.over_compiled, line.over_default) == (30 / 8, 3.0, 1.5)


def test_what_was_not_measured_has_no_factor():
    (line,) = report.lines([timed(WINNER, 8.0)], {PROBLEM: WINNER}, H200)
    assert (line.over_torch, line.over_compiled, line.over_default) == (None, None, None)
    assert shown(report.table([line], 1000))[-1][-3:] == ["-", "-", "-"]


def test_winners_come_from_the_database_not_from_the_fastest():
    (line,) = report.lines([*finals(8.0), timed(TILES[2], 7.9)], {PROBLEM: WINNER}, H200)
    assert line.winner == WINNER.label()


def test_problem_without_a_time_has_no_line():
    assert report.lines([failed(WINNER)], {PROBLEM: WINNER}, H200) == []


def test_table_has_a_line_for_each_problem():
    head, _, *body = shown(report.table(lines((PROBLEM, 8.0), (FEW, 6.0)), 1000))
    assert head[:4] == ["direction", "rows", "hidden", "winner"]
    assert [row[:4] for row in body] == [["forward", "1024", "4096", "tile"], ["forward", "4", "4096", "tile"]]
    assert [row[-6] for row in body] == ["8.00", "6.00"]


LONG = "persistent_partials BLOCK_SIZE=4096 COLS=32 PROGRAMS_PER_SM=1 ROWS=1 RSTD=saved STAGES=1 num_warps=16"
HEAD = ["direction", "rows", "hidden", "us", "TB/s", "of copy", "x torch", "x compile", "x default"]
NUMBERS = ["forward", "1024", "4096", "8.00", "2.10", "1.25", "3.75", "3.00", "1.50"]


def with_long_winner():
    (line,) = lines((PROBLEM, 8.0))
    return [line, replace(line, winner=LONG), replace(line, direction="backward", rows=16384, us=1234.56, winner=LONG)]


@pytest.mark.parametrize(("width", "folds"), [(80, 2), (100, 2), (120, 1), (130, 1)])
def test_table_on_a_narrow_terminal_has_each_winner_below_its_numbers(width, folds):
    """Nothing is cut or left out, and no row is taller than three lines."""
    found = with_long_winner()
    head, rule, *body = printed(report.table(found, width), width)
    assert re.split(r"  +", head.strip()) == HEAD
    assert set(rule) == {"\u2500"}
    assert max(map(len, [head, rule, *body])) <= width
    assert body[0].split() == body[2].split() == NUMBERS
    assert body[1] == f"    {WINNER.label()}"
    assert " ".join(" ".join(body[3 : 3 + folds]).split()) == LONG
    assert body[3 + folds].split()[:4] == ["backward", "16384", "4096", "1234.56"]
    assert len(body) == 4 + 2 * folds
    assert len({line.rindex(".") for line in (body[0], body[2], body[3 + folds])}) == 1, (
        "columns stand below each other"
    )


@pytest.mark.parametrize(("width", "folds"), [(160, 2), (200, 1), (1000, 1)])
def test_table_on_a_wide_terminal_has_winners_in_a_column(width, folds):
    found = with_long_winner()
    head, _, *body = printed(report.table(found, width), width)
    assert re.split(r"  +", head.strip()) == [*HEAD[:3], "winner", *HEAD[3:]]
    assert len(body) == 1 + 2 * folds
    assert body[0].split() == [*NUMBERS[:3], *WINNER.label().split(), *NUMBERS[3:]]
    start = head.index("winner")
    assert " ".join(line[start : start + len(LONG)].split("  ")[0] for line in body[1 : 1 + folds]).strip() == LONG


def test_table_cuts_nothing_at_any_width():
    short, long = lines((PROBLEM, 8.0)), with_long_winner()
    for width in range(80, 220):
        for found in (short, long):
            text = printed(report.table(found, width), width)
            words = " ".join(text).split()
            assert [word for word in (*NUMBERS, *WINNER.label().split()) if word not in words] == [], width
            assert "\u2026" not in "".join(text), width
            assert len(text) <= 2 + 3 * len(found), width


def test_lines_as_json_are_plain():
    found = report.as_json(lines((PROBLEM, 8.0)))
    assert json.loads(json.dumps(found)) == found
    assert found[0]["over_default"] == 1.5


def test_estimates_are_ranked_within_each_problem():
    def estimate(config, us, problem=PROBLEM):
        resources = Resources(40, 0, 2048)
        return Trial(problem, config, TrialState.OK, kind="estimated", resources=resources, estimate_us=us)

    trials = [estimate(c, us) for c, us in zip(TILES[:4], (9.0, 7.0, 8.0, 6.5), strict=True)]
    found = [*trials, estimate(TILES[0], 3.0, FEW), failed(TILES[5])]
    _, _, *body = shown(report.estimated_table(found, 1000, per_problem=3))
    assert [row[-1] for row in body] == ["6.5", "7.0", "8.0", "3.0"]
    assert body[0][-4:] == ["40", "0", "2048", "6.5"]
    assert [row[:2] == ["forward", "1024x4096"] for row in body] == [True, False, False, False]
    narrow = printed(report.estimated_table(found, 80, per_problem=3), 80)
    assert narrow[0].split() == ["problem", "registers", "spilled", "B", "shared", "B", "estimate", "us"]
    assert [line.split()[-4:] for line in narrow[2::2]] == [row[-4:] for row in body]
    assert narrow[3::2] == [f"    {TILES[i].label()}" for i in (3, 1, 2, 0)]


# The sentence


def test_sentence_says_what_is_gained():
    text = report.sentence(lines((PROBLEM, 8.0), (FEW, 10.0)))
    assert text == (
        "Gained: 2 of 2 problems are faster than the built-in default, by 3.00 us a call on average, at most 1.50x "
        "(forward 1024x4096)."
    )


def test_sentence_counts_only_what_is_worth_it():
    text = report.sentence(lines((PROBLEM, 11.9), (FEW, 8.0)))
    assert text.startswith("Gained: 1 of 2 problems")
    assert text.endswith("; in the others (=) the difference is within what two measurements of one kernel differ by.")
    assert "by 4.00 us a call" in text


@pytest.mark.parametrize("us", [12.0, 12.5, 11.77])
def test_h26_winner_within_the_noise_of_the_default_is_no_gain(us):
    """H26."""
    text = report.sentence(lines((PROBLEM, us)))
    assert text == (
        "Not worth it: in 1 problems no tuned choice is faster than the built-in default by more than two measurements "
        "of one kernel differ."
    )


def test_no_gain_is_marked_in_the_table():
    gain, none = lines((PROBLEM, 8.0), (FEW, 11.9))
    assert (gain.gains_over_default, none.gains_over_default) == (True, False)
    assert (none.band, none.tied) == (0.02, (DEFAULT.label(), WINNER.label()))
    assert [row[-1] for row in shown(report.table([gain, none], 1000))[-2:]] == ["1.50", "1.01="]


def test_time_line_names_the_largest_first_and_the_rest():
    spent = {"timing": 12.4, "verifying": 30.0, "waiting for the compiler": 0.2}
    assert report.time_line(spent, 50.0) == "Spent 30 s verifying, 12 s timing, 7 s the rest."
    assert report.time_line(spent, 50.0, 2) == (
        "Spent, on 2 GPUs together, 30 s verifying, 12 s timing, 57 s the rest."
    )


def test_sentence_where_the_default_has_no_time():
    found = report.lines([timed(WINNER, 8.0)], {PROBLEM: WINNER}, H200)
    assert report.sentence(found) == report.sentence([]) == "Nothing was compared with the built-in default."


# Failures


def test_each_reason_is_listed_once_with_its_candidates():
    """H25."""
    again = failed(TILES[0], problem=FEW)
    other = failed(TILES[2], TrialState.TIMEOUT, "no answer within 60 s")
    backward = failed(TILES[1], problem=Problem("rms_norm", "backward", 4096, 4))
    trials = [failed(TILES[0]), again, failed(TILES[1]), other, backward]
    assert report.failure_lines(trials, "") == [
        f"compile: forward {TILES[0].label()} and 2 more: too large",
        f"timeout: forward {TILES[2].label()}: no answer within 60 s",
    ]
    assert report.failures_as_json(trials)[0]["candidates"] == [
        f"forward {TILES[0].label()}",
        f"forward {TILES[1].label()}",
        f"backward {TILES[1].label()}",
    ]


def test_long_lists_are_cut_and_say_so():
    trials = [failed(config, reason=f"reason {i}") for i, config in enumerate(TILES)]
    many = [*trials, *(failed(TILES[0], reason=f"another {i}") for i in range(5))]
    found = report.failure_lines(many, "tunegen show trials --db x.db")
    assert len(found) == report.FAILURES_SHOWN + 1
    assert found[-1] == "and 5 more reasons; `tunegen show trials --db x.db` has them all"
    assert len(report.failures_as_json(many)) == 25


def test_candidates_that_spill_are_counted_only():
    spilling = [failed(c, TrialState.CONSTRAINT, f"spills {i}") for i, c in enumerate(TILES[:3])]
    found = report.failure_lines([*spilling, replace(spilling[0], problem=FEW)], "")
    assert len(found) == 1
    assert found[0].startswith("constraint: 3 candidates")
    assert report.failures_as_json(spilling) == []


def test_no_failures_no_lines():
    assert report.failure_lines([], "") == []


# Progress


def followed(plain_seconds, monkeypatch):
    monkeypatch.setattr(progress, "PLAIN_SECONDS", plain_seconds)
    out = io.StringIO()
    console = Console(file=out, width=150)
    with SweepProgress(console) as followed:
        followed.stage("starting", 0)
        followed.stage(PROBLEM.label(), 3)
        for trial in (failed(TILES[0]), timed(TILES[1], 9.0), timed(TILES[2], 8.0)):
            followed.trial(trial)
        followed.stage(FEW.label(), 1)
        followed.trial(failed(TILES[0], problem=FEW))
    return out.getvalue(), followed


def test_plain_lines_where_no_terminal_is(monkeypatch):
    text, followed_ = followed(-1, monkeypatch)
    assert text.splitlines() == [
        "starting",
        "forward 1024x4096 bf16: 3 candidates",
        "  1 of 3: nothing valid yet",
        f"  2 of 3: best 9.00 us {TILES[1].label()}",
        f"  3 of 3: best 8.00 us {TILES[2].label()}",
        f"  3 done, best 8.00 us {TILES[2].label()}",
        "forward 4x4096 bf16: 1 candidates",
        "  1 of 1: nothing valid yet",
        "  1 done, nothing valid yet",
    ]
    assert [trial.problem for trial in followed_.failures] == [PROBLEM, FEW]


def test_plain_lines_are_seconds_apart(monkeypatch):
    text, _ = followed(1e9, monkeypatch)
    assert "of 3:" not in text


def test_bar_with_best_so_far_on_a_terminal():
    out = io.StringIO()
    with SweepProgress(Console(file=out, force_terminal=True, width=150)) as shown_:
        shown_.stage(PROBLEM.label(), 3)
        shown_.trial(timed(TILES[1], 9.0))
    last = out.getvalue()
    assert "forward 1024x4096 bf16" in last
    assert "1/3" in last
    assert f"best 9.00 us {TILES[1].family}" in last
