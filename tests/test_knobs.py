"""What a choice is worth: the loss without it, of what an H200 measured (tests/data) and of a few made candidates."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import knobs
from measured import Candidate, read

from tunegen.model import Config, Problem, Resources

MEASURED = Path(__file__).parent / "data" / "h200_screened.jsonl"
PROBLEM = Problem("rms_norm", "forward", 4096, 16384)


def candidate(family, score, **parameters):
    return Candidate(PROBLEM, Config.of(family, parameters), "measured", Resources(32, 0, 0), score)


MADE = [
    candidate("single_block", 1.0, BLOCK_SIZE=4096, ROWS=2, num_warps=8),
    candidate("single_block", 1.5, BLOCK_SIZE=4096, ROWS=2, num_warps=4),
    candidate("single_block", 1.1, BLOCK_SIZE=4096, ROWS=1, num_warps=4),
    candidate("two_pass", 1.05, CHUNK=2048, num_warps=2),
]


def test_what_is_lost_without_each_knob():
    """Everything else is chosen anew; BLOCK_SIZE is computed, so it is no knob; other families have their own."""
    best, found = knobs.knobs(MADE)
    assert best == MADE[0]
    assert [(k.name, k.value, round(k.loss, 9), k.instead) for k in found] == [
        ("ROWS", 2, 0.1, 1),
        ("num_warps", 8, 0.1, 4),
        ("family", "single_block", 0.05, "two_pass"),
    ]
    won = "ROWS 2 (+10 %: 1), num_warps 8 (+10 %: 4), single_block (+5 %: two_pass)"
    assert knobs.row(PROBLEM, MADE) == f"| {PROBLEM.label()} | single_block | {won} |"


def test_a_star_where_the_space_ends():
    most = [
        candidate("single_block", score, BLOCK_SIZE=4096, ROWS=1, num_warps=n) for score, n in ((1.0, 32), (1.2, 16))
    ]
    assert knobs.row(PROBLEM, most).endswith("| num_warps 32* (+20 %: 16) |")
    assert knobs.row(PROBLEM, [m._replace(score=1 / m.score) for m in most]).endswith("| num_warps 16 (+20 %: 32) |")


def test_a_knob_that_has_one_value_says_nothing():
    assert knobs.knobs(MADE[:1]) == (MADE[0], [])
    assert knobs.row(PROBLEM, MADE[:1]).endswith("| nothing by itself |")
    close = [MADE[0], candidate("two_pass", 1.009, CHUNK=2048, num_warps=2)]
    assert knobs.row(PROBLEM, close).endswith("| nothing by itself |"), "less than a screening can tell"


@pytest.mark.parametrize("problem", read([MEASURED]), ids=Problem.label)
def test_losses_of_what_was_measured(problem):
    """Against a search of its own: of all that differ in a knob the fastest."""
    candidates = read([MEASURED])[problem]
    best, found = knobs.knobs(candidates)
    rows = [{"family": c.config.family, **dict(c.config.parameters), "score": c.score} for c in candidates]
    assert found
    for knob in found:
        kin = [r for r in rows if knob.name == "family" or r["family"] == best.config.family]
        other = min((r for r in kin if r[knob.name] != knob.value), key=lambda r: r["score"])
        assert min(kin, key=lambda r: r["score"])[knob.name] == knob.value
        assert (knob.instead, knob.loss) == (other[knob.name], pytest.approx(other["score"] / best.score - 1))
        assert knob.loss >= 0


def test_a_line_a_problem(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["knobs.py", str(MEASURED)])
    knobs.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0] for line in lines[2:]] == [f"| {problem.label()}" for problem in read([MEASURED])]
