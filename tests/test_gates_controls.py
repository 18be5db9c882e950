"""`benchmarks/gate_controls.py`, with few steps."""

from __future__ import annotations

import json
import math
import runpy
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

SCRIPT = Path(__file__).resolve().parent.parent / "benchmarks" / "gate_controls.py"


@pytest.fixture(scope="module")
def script():
    path = list(sys.path)
    yield runpy.run_path(str(SCRIPT))
    sys.path[:] = path


def test_right_norm_and_faults_are_told_apart(script, monkeypatch, tmp_path, capsys):
    out = tmp_path / "new" / "controls.json"
    monkeypatch.setattr(sys, "argv", ["gate_controls.py", "--seeds", "1", "--steps", "40", "--out", str(out)])
    script["main"]()
    found = json.loads(out.read_text())["results"]
    right, *faults = (figures["apart"] for figures in found.values())
    assert len(faults) == 6
    assert right[0] < 2 < 10 < min(value for values in faults for value in values)
    assert capsys.readouterr().out.count(" *") >= 6


def test_star_is_for_what_every_seed_turns_away(script):
    figures = {"loss": [0.001, math.nan], "apart": [3.0, math.nan], "movement": [0.0, 0.1]}
    row = script["table"]({"one": figures}).splitlines()[1]
    assert row.count("*") == 1
    assert "3 to " in row.partition("*")[0]
