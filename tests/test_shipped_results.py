"""`cache/h200.jsonl.xz`, the results that come with the repository, and the defaults that were made from them."""

from __future__ import annotations

import json
import lzma
import re
import sys
from collections import Counter

import pytest
from command import output
from fake_gpu import H200

from tunegen import defaults, paths, records
from tunegen.silicon import FACTS
from tunegen.space import load_space
from tunegen.store import Store

FILE = paths.PACKAGE.parent / "cache" / "h200.jsonl.xz"
MADE_OF = {"rms_norm": ("fp32", "bf16"), "add_rms_norm": ("bf16",)}
"""Dtypes of x whose defaults an operator has, in the order in which they stand; those of bf16 serve fp16 too."""
PROBLEMS = {("rms_norm", "bf16"): 57, ("rms_norm", "fp16"): 4, ("rms_norm", "fp32"): 4, ("add_rms_norm", "bf16"): 18}
SECTIONS = [(op, direction) for op in MADE_OF for direction in ("forward", "backward")]


@pytest.fixture(scope="module")
def db(tmp_path_factory):
    path = tmp_path_factory.mktemp("shipped") / "h200.db"
    told = output("import", FILE, "--db", path)
    assert re.fullmatch(r".*: [1-9]\d* trials added, 0 were there already, 0 left out\n", told)
    return path


def measured(db, op, dtype):
    with Store.read(db) as store:
        return defaults.measured(store, load_space(op), "sm_90", dtype, {})


def printed(db, op, dtype):
    return output("export", "--defaults", "--op", op, "--dtype", dtype, "--db", db).splitlines()


def generated(text, direction):
    """What was printed for a direction, with the comment that stands over all of it, indented as in a search space."""
    head = [f"      {line}" for line in text[: text.index("defaults:")]]
    start = text.index(f"  {direction}:")
    assert text[start + 1] == "    sm90:"
    entries = text[start + 2 :]
    ends = [i for i, line in enumerate(entries) if not line.startswith("      ")]
    return head + entries[: ends[0] if ends else None]


def section(op, direction):
    """The lines of a search space's defaults for sm_90."""
    text = load_space(op).path.read_text("utf-8").partition("\ndefaults:\n")[2]
    [found] = re.findall(rf"^  {direction}:\n    sm90:.*\n((?:      .*\n)+)", text, re.MULTILINE)
    return found.splitlines()


def test_its_readme_says_how_much_there_is(db):
    with Store.read(db) as store:
        trials = len(store.trials())
    served = sum(count for (op, dtype), count in PROBLEMS.items() if dtype in MADE_OF[op])
    text = " ".join((FILE.parent / "README.md").read_text().split())
    assert f"{sum(PROBLEMS.values())} problems, {trials} trials" in text
    assert f"made of {served} of these problems" in text


def test_it_is_of_one_h200_whose_facts_are_those_that_kernels_are_compiled_for(db):
    with Store.read(db) as store:
        [chip] = store.rows("SELECT * FROM silicon", {})
        sweeps = store.rows("SELECT * FROM sweeps", {})
    assert {(row["torch"], row["triton"]) for row in sweeps} == {("2.11.0+cu130", "3.6.0")}
    assert [row["state"] for row in sweeps] == ["finished"]
    assert {name: chip[name] for name in ("name", *FACTS)} == {name: getattr(H200, name) for name in ("name", *FACTS)}


def test_every_problem_has_finals_and_show_lists_its_winner(db):
    with Store.read(db) as store:
        finals = store.rows("SELECT * FROM trials WHERE stage = 'final' AND kind = 'measured' AND state = 'ok'", {})
    problems = {records.problem_of(row) for row in finals}
    assert Counter((p.op, p.x_dtype) for p in problems) == PROBLEMS
    shown = json.loads(output("show", "--json", "--db", db))
    assert Counter(records.problem_of(row) for row in shown if row["kind"] == "measured") == Counter(problems)
    assert {row["silicon"] for row in shown} == {"NVIDIA H200"}


def test_written_again_it_is_the_same(db, tmp_path):
    """Unpacked: another release of liblzma may pack the same into other bytes."""
    again = tmp_path / "h200.jsonl"
    output("export", again, "--db", db)
    assert again.read_bytes() == lzma.decompress(FILE.read_bytes())


@pytest.mark.parametrize(("op", "direction"), SECTIONS)
def test_defaults_are_what_the_tool_makes_of_it(db, op, direction):
    """Line by line, shares and losses in comments included; what stands behind them is for what was not measured."""
    expected = [line for dtype in MADE_OF[op] for line in generated(printed(db, op, dtype), direction)]
    found = section(op, direction)
    assert found[: len(expected)] == expected
    assert found[len(expected) :][:1] in (
        [],
        ["      # Where no sweep has measured; the shares are those of single measurements."],
    )


@pytest.mark.parametrize(("op", "dtype"), PROBLEMS)
def test_every_default_is_among_the_finals_and_close_to_the_best(db, op, dtype):
    """Without exception: what is launched untuned was timed there, at most 5 % behind the fastest."""
    found, space = measured(db, op, dtype), load_space(op)
    assert len(found.cells) == PROBLEMS[op, dtype]
    for cell in found.cells:
        default = space.default(cell.problem, found.silicon)
        assert default in cell.scores, f"{cell.problem.label()}: {default.label()} has no time"
        assert cell.scores[default] <= 1.05 * cell.best, cell.problem.label()


def test_the_document_of_knobs_is_what_the_tool_makes_of_it(db, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(FILE.parents[1] / "benchmarks"))
    import knobs

    monkeypatch.setattr(sys, "argv", ["knobs.py", str(db)])
    knobs.main()
    text = (FILE.parents[1] / "docs" / "knobs.md").read_text("utf-8")
    assert text[text.index("| problem |") :] == capsys.readouterr().out
