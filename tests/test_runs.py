"""`python -m tests`: what the exit codes of its two runs of pytest come to."""

from __future__ import annotations

import pytest

from tests import __main__ as runs

CASES = {
    "all good": ([], {"interpreter": 0, "other": 0}, 0),
    "one fails": ([], {"interpreter": 0, "other": 1}, 1),
    "a run that finds nothing of all there is": ([], {"interpreter": 5, "other": 0}, 1),
    "nothing at all": ([], {"interpreter": 5, "other": 5}, 1),
    "a file of one run": (["tests/test_ties.py"], {"interpreter": 5, "other": 0}, 0),
    "a file of one run, which fails": (["tests/test_ties.py"], {"interpreter": 5, "other": 1}, 1),
    "a slip of the pen": (["-k", "typo"], {"interpreter": 5, "other": 5}, 5),
}


@pytest.mark.parametrize("case", CASES)
def test_exit_code_of_both_runs(case, monkeypatch):
    options, codes, expected = CASES[case]
    monkeypatch.setattr(runs, "run", lambda name, *_: codes[name])
    assert runs.main(options) == expected
