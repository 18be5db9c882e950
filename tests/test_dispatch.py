"""What answers a call: the ladder over a database of trials, and what never may, on a GPU that is not there."""

from __future__ import annotations

import inspect
import sqlite3
from contextlib import closing, contextmanager
from dataclasses import replace

import pytest
import torch
from stored import keep

from tunegen import dispatch, lookup, passing, render, rms_norm
from tunegen.errors import CompileError, RenderError
from tunegen.key import Key
from tunegen.model import Config, Measurement, Problem, Trial, TrialState
from tunegen.ops.rms_norm import key_of, launch
from tunegen.silicon import of_arch
from tunegen.space import load_space

H200 = of_arch("sm_90")
PROBLEM = Problem("rms_norm", "backward", 4096, 1024, weight_grad=True)
SPACE = load_space("rms_norm")
DEFAULT, GENERIC = SPACE.built_in(PROBLEM, H200)
FIRST, SECOND = SPACE.candidates(PROBLEM, H200, "persistent_partials")[:2]
KEY = Key("rms_norm", "backward", 4096, 1024, torch.bfloat16, torch.bfloat16, "fp32", False, True, 0)
BASELINE = SPACE.candidates(PROBLEM, H200, "single_block")[0]


def timed(config, us, **changes):
    digest = changes.pop("digest", None) or dispatch.digest_today(PROBLEM, config)
    measurement = Measurement(us, us / 10.0, 10.0, (us,), (10.0,))
    return Trial(PROBLEM, config, TrialState.OK, digest=digest, measurement=measurement, **changes)


def wrong(config, **changes):
    found = replace(timed(config, 1.0), state=TrialState.INCORRECT, measurement=None)
    return replace(found, **changes)


@pytest.fixture
def answers(tmp_path, monkeypatch):
    """Stores trials and returns what would answer, in order."""
    path = tmp_path / "tune.db"
    monkeypatch.setenv("TUNEGEN_DB", str(path))
    monkeypatch.setattr(dispatch, "silicon_of", lambda index: H200)

    def store(*trials):
        keep(path, *trials)
        return [rung.config for rung in dispatch.rungs(path, PROBLEM, H200)]

    return store


def test_measured_then_default_then_torch(answers):
    assert answers(timed(SECOND, 20.0), timed(FIRST, 10.0)) == [FIRST, SECOND, DEFAULT, GENERIC, None]


def test_torch_where_it_won(answers):
    assert answers(timed(Config("torch"), 5.0, digest="-"), timed(FIRST, 10.0))[0] is None


def test_torch_also_where_another_release_of_it_won(tmp_path):
    """What it beat has not changed; a sweep times it again (tests/test_sweep.py)."""
    path = tmp_path / "tune.db"
    keep(path, timed(Config("torch"), 5.0, digest="-"), timed(FIRST, 10.0), torch="1.0")
    assert next(dispatch.rungs(path, PROBLEM, H200)).config is None


def test_what_the_gate_rejected_at_another_row_count_never_answers(answers):
    elsewhere = replace(PROBLEM, rows=4096)
    assert FIRST not in answers(timed(FIRST, 10.0), wrong(FIRST, problem=elsewhere))
    assert answers(timed(SECOND, 20.0))[0] == SECOND


def test_a_rejected_default_never_answers(answers):
    assert answers(wrong(DEFAULT)) == [GENERIC, None]
    assert answers(wrong(GENERIC)) == [None]


def test_each_rung_says_why_it_answers(answers, tmp_path):
    path = tmp_path / "tune.db"
    answers(timed(FIRST, 10.0), timed(Config("torch"), 20.0, digest="-"))
    measured = f"measured at {PROBLEM.rows} rows on {H200.name} ({path}, trial"
    assert [rung[:2] for rung in dispatch.rungs(path, PROBLEM, H200)] == [
        (FIRST, f"{measured} 1)"),
        (None, f"{measured} 2)"),
        (DEFAULT, f"built-in default on {H200.name}"),
        (GENERIC, f"built-in default on {H200.name}"),
        (None, "the last resort"),
    ]
    answers(wrong(DEFAULT), wrong(GENERIC))
    told = f"the gate found the built-in default wrong: {GENERIC.label()} ({path})"
    assert [rung[:2] for rung in dispatch.rungs(path, PROBLEM, H200)][2:] == [(None, told)]
    wide = replace(PROBLEM, hidden=10**6)
    assert [rung[:2] for rung in dispatch.rungs(path, wide, H200)] == [(None, "no built-in default fits")]


def test_what_was_rejected_before_its_template_changed_may_answer(answers):
    assert answers(wrong(DEFAULT, digest="of an older text")) == [DEFAULT, GENERIC, None]


def test_a_baseline_never_answers(answers):
    assert answers(timed(BASELINE, 1.0)) == [DEFAULT, GENERIC, None]


def test_h23_a_changed_template_never_answers(answers):
    assert answers(timed(FIRST, 1.0, digest="of an older text")) == [DEFAULT, GENERIC, None]


@pytest.mark.parametrize("parameters", [{"BLOCK_SIZE": -1}, {"BLOCK_SIZE": 2**62}, {"ROWS": "; import os"}, {}])
def test_a_hostile_row_costs_itself_alone(answers, parameters):
    broken = timed(Config.of("persistent_partials", {**dict(FIRST.parameters), **parameters}), 1.0, digest="x")
    assert (
        answers(replace(broken, config=Config.of("../../etc/passwd", parameters)), broken, timed(FIRST, 9.0))[0]
        == FIRST
    )


def test_a_broken_template_is_no_answer_and_no_error(answers, monkeypatch):
    def fail(*_):
        raise RenderError("no template")

    trial = timed(FIRST, 1.0)
    monkeypatch.setattr(render, "combined_digest", fail)
    assert answers(trial)[0] != FIRST


@pytest.fixture
def launches(answers, monkeypatch):
    """Launch backward with these gradients, in place of real kernels by `variant`; FIRST is tuned before
    SECOND, in trials of `stage`, or without one nothing is. The gradients are made of x."""
    bf16 = torch.bfloat16

    def run(variant, gradients, stage="final"):
        if stage is not None:
            answers(timed(FIRST, 10.0, stage=stage), timed(SECOND, 20.0, stage=stage))
        monkeypatch.setattr(dispatch.Choice, "variant", variant)
        dispatch.forget()
        x = torch.ones(PROBLEM.rows, PROBLEM.hidden, dtype=bf16)
        tensors = {"x": x, "w": x[0], "rstd": x[:, 0]}
        try:
            assert all(launch(KEY, {**tensors, "dy": make(x)}, 1e-6, 0.0, True) is True for make in gradients)
        finally:
            dispatch.forget()

    return run


def rows_like_x(x):
    return x


def heads(x):
    return x.view(4, -1, 8, PROBLEM.hidden).transpose(1, 2)


def test_h22_what_does_not_compile_here_gives_way_in_the_same_call(launches, caplog):
    launched = []

    def variant(choice, save_rstd, offset, nested, accumulate_dw):
        launched.append(choice.config)
        if choice.config == FIRST:
            raise CompileError("persistent_partials: OutOfResources: shared memory")
        return lambda rows, arguments: None

    launches(variant, [rows_like_x, rows_like_x])
    assert launched == [FIRST, SECOND, SECOND]
    (record,) = [r for r in caplog.records if "does not run here" in r.getMessage()]
    assert "OutOfResources: shared memory" in record.getMessage()


def test_h22_what_reads_no_nested_rows_here_gets_copies_and_keeps_its_place(launches, caplog):
    """Heads that the tuned kernel cannot read in place must not cost the contiguous calls their kernel."""
    launched = []

    def variant(choice, save_rstd, offset, nested, accumulate_dw):
        launched.append((choice.config, nested))
        if nested:
            raise CompileError("row_offsets: no such thing")
        return lambda rows, arguments: None

    launches(variant, [rows_like_x, heads, heads, rows_like_x])
    assert launched == [(FIRST, ()), (FIRST, ("dy",)), (FIRST, ()), (FIRST, ()), (FIRST, ())]
    (record,) = [r for r in caplog.records if "copying them" in r.getMessage()]
    assert "no such thing" in record.getMessage()


@pytest.mark.parametrize(
    ("stage", "config", "nested"), [("final", FIRST, ("dy",)), ("screen", FIRST, ()), (None, DEFAULT, ("dy",))]
)
def test_nested_rows_are_read_in_place_only_by_what_was_verified_so(launches, stage, config, nested):
    """Only finals verify a trial for nested rows; a built-in default was verified when tunegen was tested."""
    launched = []

    def variant(choice, save_rstd, offset, nested, accumulate_dw):
        launched.append((choice.config, nested))
        return lambda rows, arguments: None

    launches(variant, [heads, rows_like_x], stage)
    assert launched == [(config, nested), (config, ())]


@pytest.fixture
def clock(monkeypatch):
    """Sets the time that `passing` goes by."""
    dispatch.forget()
    now = [1000.0]
    monkeypatch.setattr(passing.time, "monotonic", lambda: now[0])
    yield lambda seconds: now.__setitem__(0, now[0] + seconds)
    dispatch.forget()


@contextmanager
def locked(path):
    with closing(sqlite3.connect(path, isolation_level=None)) as writer:
        writer.execute("BEGIN EXCLUSIVE")
        yield


def test_a_locked_database_is_asked_again_after_a_while(answers, clock, tmp_path):
    answers(timed(FIRST, 10.0))
    with locked(tmp_path / "tune.db"):
        choice = dispatch.choose(KEY)
    assert choice.config == DEFAULT
    assert choice.rung == f"built-in default on {H200.name}; the database could not be read"
    assert list(dispatch.answers().values()) == [DEFAULT.label()]
    clock(29.0)
    assert dispatch.choose(KEY) is dispatch.remembered(KEY) is choice
    clock(2.0)
    found = dispatch.choose(KEY)
    assert found.config == FIRST
    assert dispatch.remembered(KEY) is found
    keep(tmp_path / "tune.db", timed(SECOND, 1.0))
    clock(100.0)
    assert dispatch.choose(KEY) is found, "read once, it stays"


def test_while_it_stays_locked_what_was_loaded_stays_loaded_and_one_call_waits(answers, clock, tmp_path, monkeypatch):
    answers(timed(FIRST, 10.0))
    other = KEY._replace(rows=4096)
    with locked(tmp_path / "tune.db"):
        first, _ = dispatch.choose(KEY), dispatch.choose(other)
        first._variants["a rendering"] = "loaded"
        first.nests = False
        clock(31.0)
        again = dispatch.choose(KEY)
        assert again is not first
        assert (again._variants, again.nests) == ({"a rendering": "loaded"}, False)
        monkeypatch.setattr(lookup, "_read", None)
        assert dispatch.choose(other).config is not None, "not read again so soon"


def test_no_choice_changes_while_a_graph_is_captured(answers, clock, tmp_path, monkeypatch):
    answers(timed(FIRST, 10.0))
    with locked(tmp_path / "tune.db"):
        choice = dispatch.choose(KEY)
    clock(31.0)
    with monkeypatch.context() as capture:
        capture.setattr(passing, "is_capturing", lambda: True)
        assert dispatch.choose(KEY) is choice
    assert dispatch.choose(KEY).config == FIRST


@pytest.mark.parametrize("policy", ["deterministic", "invariant"])
def test_policies_that_promise_the_same_bits_again_keep_what_answered(answers, clock, tmp_path, policy):
    answers(timed(FIRST, 10.0))
    key = KEY._replace(policy=policy)
    with locked(tmp_path / "tune.db"):
        choice = dispatch.choose(key)
    clock(31.0)
    assert dispatch.choose(key) is choice


def test_what_was_demoted_or_forgotten_while_the_database_was_locked_is_gone(answers, clock, tmp_path):
    answers(timed(FIRST, 10.0))
    with locked(tmp_path / "tune.db"):
        for expected in (DEFAULT, GENERIC):
            choice = dispatch.choose(KEY)
            assert choice.config == expected
            dispatch.demote(KEY, choice, CompileError("too large"))
        assert dispatch.choose(KEY).config is None
    dispatch.forget()
    assert dispatch.remembered(KEY) is None
    assert dispatch.choose(KEY).config == FIRST


# Each argument of `rms_norm` and how it may change what answers; eps is a number that every kernel is
# given, out and main_grad are places that every kernel may write to.
CHANGES = {
    "x": [torch.empty(4, 64).half(), torch.empty(4, 65).bfloat16(), torch.empty(5, 64).bfloat16()],
    "weight": [None, torch.empty(64), torch.empty(64).half()],
    "eps": [],
    "offset": [1.0],
    "casting": ["llama"],
    "policy": ["deterministic", "invariant"],
    "out": [],
    "main_grad": [],
}


def test_h23_every_argument_that_changes_the_answer_is_in_the_key():
    assert set(CHANGES) == set(inspect.signature(rms_norm).parameters), "a new argument: does it change what answers?"
    bf16 = torch.bfloat16
    usual = {"x": torch.empty(4, 64, dtype=bf16), "weight": torch.empty(64, dtype=bf16), "offset": 0.0}
    usual |= {"casting": "fp32", "policy": "fastest", "weight_grad": False}
    calls = [usual, usual | {"weight_grad": True}]
    calls += [usual | {name: value} for name, values in CHANGES.items() for value in values]
    keys = [key_of(direction, **call) for call in calls for direction in ("forward", "backward")]
    assert len({*keys}) == len(keys) == 24
    assert len({key.problem() for key in keys}) == len(keys), "nor does the database mix them up"
    assert keys[0] != keys[0]._replace(device=1)
    assert key_of("forward", **usual | {"x": torch.empty(3, 64, dtype=bf16)}) == keys[0], "one bucket"
