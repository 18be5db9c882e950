"""What `tunegen families` prints: all families with their parameters, the problems that each is for, and words."""

from __future__ import annotations

import json

import pytest
from command import output, run
from fake_gpu import H200, make_resources

from tunegen import paths
from tunegen.model import Problem
from tunegen.ops import OPS
from tunegen.space import ALWAYS, MEANINGS, NAMES, load_space


@pytest.mark.parametrize("op", OPS)
def test_all_are_listed_with_when_they_apply_and_their_parameters(op):
    members = load_space(op).members
    found = json.loads(output("families", "--op", op, "--json"))
    assert [(f["direction"], f["family"], f["baseline"]) for f in found] == [
        (*k, m.baseline) for k, m in members.items()
    ]
    assert [list(f["parameters"]) for f in found] == [list(m.parameters) for m in members.values()]
    assert [f["when"] for f in found] == [
        None if m.when is ALWAYS else m.when.expression.text for m in members.values()
    ]
    text = output("families", "--op", op)
    for family in members.values():
        assert family.about in text
        assert all(f" {name}: " in text for name in family.parameters)
        assert f" when: {family.when.expression.text}\n" in text or family.when is ALWAYS
    assert text.count("(baseline)") == sum(family.baseline for family in members.values())
    assert text.count("candidate") == 0, "no problem was named"


def test_names_choices_and_rules(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "PACKAGE", make_resources(tmp_path / "package"))
    space = tmp_path / "package" / "search_spaces" / "rms_norm.yaml"
    space.write_text(
        space.read_text().replace("      ROWS: [1, 2, 4, 8]\n", '      ROWS: [1, 2]\n      B: "=2*X_BYTES"\n')
    )
    lines = [line.strip() for line in output("families").splitlines()]
    assert lines[:5] == [
        "forward  tile                  twenty candidates",
        "when: always",
        "ROWS: 1, 2",
        "num_warps: 1, 2, 4, 8, 16",
        "B: =2*X_BYTES",
    ]
    assert f"where    X_BYTES               {MEANINGS['X_BYTES']}" in lines, "what a printed expression uses is told"
    assert not any(line.startswith("where    L2_BYTES") for line in lines)


def test_a_family_without_its_template_is_told(tmp_path, monkeypatch):
    """It was listed as if it were there."""
    package = make_resources(tmp_path / "package")
    monkeypatch.setattr(paths, "PACKAGE", package)
    template = load_space("rms_norm").members["forward", "tile"].template
    file = package / "templates" / "rms_norm" / f"{template}.py.jinja"
    file.parent.mkdir(parents=True, exist_ok=True)
    for there in (True, False):
        file.write_text("") if there else file.unlink()
        (row, *_) = json.loads(output("families", "--json"))
        assert row["template"] == (f"rms_norm/{template}.py.jinja" if there else None)
        told = "  NOT THERE: its template is missing, so no kernel of it can be made; reinstall tunegen\n"
        assert (told not in output("families")) == there


def test_every_name_of_expressions_has_its_words():
    assert MEANINGS.keys() == NAMES


@pytest.mark.parametrize("arguments", [[], ["--frozen-weight"], ["--policy", "deterministic"]])
def test_those_that_apply_to_a_problem_are_counted(arguments):
    """As a sweep does: by the search space, for the target, under the policy."""
    space = load_space("rms_norm")
    of = ["--hidden", 65536, "--rows", 1000, "--arch", "sm_90", *arguments]
    found = json.loads(output("families", *of, "--json"))
    told = output("families", *of)
    policy = "deterministic" if "--policy" in arguments else "fastest"
    problems = [
        Problem("rms_norm", "forward", 65536, 1000, policy=policy),
        Problem("rms_norm", "backward", 65536, 1000, weight_grad="--frozen-weight" not in arguments, policy=policy),
    ]
    for problem in problems:
        applying = {family.name for family in space.families(problem, H200)}
        for row in (one for one in found if one["direction"] == problem.direction):
            candidates = len(space.candidates(problem, H200, row["family"]))
            assert (row["applies"], row["candidates"]) == (row["family"] in applying, candidates)
        assert told.count(f"{problem.label()} on sm_90: not for this problem") == sum(
            not one["applies"] for one in found if one["direction"] == problem.direction
        )
    two_pass = next(one["candidates"] for one in found if one["family"] == "two_pass")
    assert f" on sm_90: {two_pass} candidates\n" in told


def test_a_family_whose_constraints_leave_nothing_is_told_apart():
    told = output("families", "--hidden", 100_000_000, "--rows", 64, "--arch", "sm_90")
    assert "forward 64x100000000 bf16 on sm_90: its constraints leave no candidate" in told


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--hidden", "64"], "--hidden is of a problem, which takes --hidden and --rows"),
        (["--rows", "64"], "--rows is of a problem, which takes --hidden and --rows"),
        (["--arch", "sm_90"], "--arch is of a problem"),
        (["--weight-dtype", "fp32", "--hidden", "64"], "is of a problem"),
        (["--hidden", "64", "--rows", "64", "--arch", "sm_1"], "unknown GPU architecture 'sm_1'"),
        (["--hidden", "0", "--rows", "64"], "0 is not in the range"),
    ],
)
def test_half_a_problem_is_refused(arguments, words):
    result = run("families", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert words in result.stderr.splitlines()[-1]
