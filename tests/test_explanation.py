"""`explain` says what dispatch does: the same ladder, told."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner
from helpers import OP_MODULE
from stored import keep
from test_dispatch import BASELINE, DEFAULT, FIRST, H200, PROBLEM, SECOND, SPACE, timed

import tunegen
from tunegen import cli, dispatch, explanation, single, uncounted
from tunegen.explanation import explain_problem
from tunegen.model import PROTOCOL, Config, Trial, TrialState
from tunegen.ops import arguments
from tunegen.silicon import of_arch


def valid(rows):
    return SPACE.candidates(replace(PROBLEM, rows=rows), H200, "persistent_partials")


LARGER = next(config for config in valid(1024) if config in valid(4096))
SMALLER = next(config for config in valid(1024) if config in valid(256))


@pytest.fixture
def db(tmp_path, monkeypatch):
    """Stores trials of PROBLEM, 1024 rows, and returns the path."""
    path = tmp_path / "tune.db"
    monkeypatch.setenv("TUNEGEN_DB", str(path))
    for module in (dispatch, explanation):
        monkeypatch.setattr(module, "silicon_of", lambda index: H200)

    def store(*trials):
        keep(path, *trials)
        return path

    return store


def test_measured_answer_with_its_trial_and_the_runner_up(db):
    path = db(timed(SECOND, 20.0), timed(FIRST, 10.0))
    found = explain_problem(path, PROBLEM, H200)
    assert (found.answer, found.trial, found.measured_rows, found.apart) == (FIRST.label(), 2, 1024, 1.0)
    assert (found.measured_us, found.expected_us) == (10.0, 10.0)
    assert (found.runner_up, found.runner_up_why) == (
        SECOND.label(),
        f"measured at 1024 rows on {H200.name} ({path}, trial 1)",
    )
    assert found.why == f"measured at 1024 rows on {H200.name} ({path}, trial 2)"
    assert found.runner_up_us == 20.0
    assert str(found).endswith("trial 1), 20.00 us there")


def test_nested_rows_are_told_of_where_no_finals_verified_them(db, tmp_path):
    path = db(timed(FIRST, 10.0), timed(SECOND, 20.0, stage="final"))
    assert explain_problem(path, PROBLEM, H200).layouts is None, "the final comes first"
    default = explain_problem(tmp_path / "no.db", PROBLEM, H200)
    assert default.layouts == explanation.UNVERIFIED
    assert f"\n  layouts   {explanation.UNVERIFIED}\n" in str(default)
    invariant = replace(PROBLEM, policy="invariant")
    assert explain_problem(tmp_path / "no.db", invariant, H200).layouts is None, "those are copied under it"
    assert explain_problem(db(timed(Config("torch"), 5.0, stage="final", digest="-")), PROBLEM, H200).layouts is None


def test_what_was_only_screened_copies_nested_rows(db):
    found = explain_problem(db(timed(FIRST, 10.0)), PROBLEM, H200)
    assert (found.answer, found.layouts) == (FIRST.label(), explanation.COPIED_UNVERIFIED)


def test_a_kernel_for_nested_rows_that_did_not_run_is_told_of(db, monkeypatch):
    db(timed(FIRST, 10.0, stage="final"))
    on_a_gpu(monkeypatch)
    x, w = wanting_gradients()
    dispatch.forget()
    choice = dispatch.choose(OP_MODULE.key_of("backward", x, w, 0.0, "fp32", True))
    assert tunegen.explain(x, w)[1].layouts is None
    choice.copy_nested(RuntimeError("too large"))
    assert tunegen.explain(x, w)[1].layouts == explanation.COPIED_BROKEN
    dispatch.forget()


def test_distance_and_cost_of_other_row_counts(db):
    """Measured at 1024 rows, asked for 3000: looked up as 4096, four times away; three times the bytes."""
    path = db(timed(LARGER, 10.0), timed(SMALLER, 20.0))
    found = explain_problem(path, replace(PROBLEM, rows=3000), H200)
    assert (found.bucket, found.apart, found.measured_rows) == (4096, 4.0, 1024)
    assert found.expected_us == pytest.approx(10.0 * 3000 / 1024)
    small = explain_problem(path, replace(PROBLEM, rows=200), H200)
    assert (small.answer, small.bucket) == (SMALLER.label(), 256)
    assert small.expected_us == pytest.approx(20.0 * 10e6 / (3 * 1024 * 4096 * 2))  # no less than latency
    text = str(found)
    assert "4 x away from 4096" in text
    assert f"expected  {10.0 * 3000 / 1024:.2f} us for 3000 rows, by its bytes" in text


def test_too_far_away_is_the_default(db):
    many = replace(PROBLEM, rows=100_000)
    found = explain_problem(db(timed(LARGER, 10.0)), many, H200)
    default = SPACE.default(replace(many, rows=many.rows_bucket), H200)
    assert (found.answer, found.trial, found.expected_us) == (default.label(), None, None)
    assert found.why == f"built-in default on {H200.name}"
    _, generic = SPACE.built_in(replace(many, rows=many.rows_bucket), H200)
    assert (found.runner_up, found.runner_up_why) == (generic.label(), found.why)
    assert "expected  unknown; no valid measurement within 8 x of" in str(found)
    assert found.remedy.endswith("tunegen sweep --hidden 4096 --rows 100000 --direction backward")


def test_missing_database_is_the_default(tmp_path):
    found = explain_problem(tmp_path / "no.db", PROBLEM, H200)
    assert found.answer == DEFAULT.label()
    assert f"1024 rows (no database at {tmp_path / 'no.db'}): " in found.remedy
    assert found.remedy.endswith(f" --direction backward --db {tmp_path / 'no.db'}")


OTHER_CHIP = of_arch("sm_80")
FEWER_SMS = replace(H200, sms=114)
UNCOUNTED = {
    "another Triton": ({"triton": "3.1"}, "of Triton 3.1, and this is {triton}"),
    "another GPU": ({"silicon": OTHER_CHIP}, f"of {OTHER_CHIP.name}, and this is {H200.name}"),
    "both": (
        {"silicon": OTHER_CHIP, "triton": "3.1"},
        f"of {OTHER_CHIP.name} and Triton 3.1, and this is {H200.name} and {{triton}}",
    ),
    "a GPU of that name": ({"silicon": FEWER_SMS}, f"of {H200.name} with sms 114, and this is one with 132"),
    "another protocol": ({"protocol": PROTOCOL - 1}, f"of measuring protocol {PROTOCOL - 1}, and this is {PROTOCOL}"),
}


@pytest.mark.parametrize("case", UNCOUNTED)
def test_measurements_that_do_not_count_are_told_of(db, case):
    """How many there are within reach, of any policy that counts, and what they are of."""
    where, of = UNCOUNTED[case]
    of = of.format(triton=dispatch.triton_minor())
    far = replace(PROBLEM, rows=65536)
    path = db()
    keep(path, timed(FIRST, 10.0), timed(SECOND, 20.0), replace(timed(FIRST, 30.0), problem=far), **where)
    asked = replace(PROBLEM, policy="deterministic")
    for problem in (PROBLEM, asked):
        remedy = explain_problem(path, problem, H200).remedy
        assert f"no valid measurement within 8 x of 1024 rows (2 measurements of it are {of}): " in remedy
    assert "rows: " in explain_problem(path, replace(PROBLEM, hidden=5120), H200).remedy, "there is none of it"


def test_estimates_and_edited_kernels_do_not_count_and_are_told_of(db):
    path = db(
        Trial(PROBLEM, FIRST, TrialState.OK, "d", kind="estimated", estimate_us=3.0),
        timed(SECOND, 20.0, digest="old"),
        timed(BASELINE, 1.0, kind="baseline"),
    )
    told = explain_problem(path, PROBLEM, H200).remedy
    assert f"(1 measurement of it is {uncounted.EDITED}; 1 estimate of it does not count): " in told


def test_rows_that_are_no_number_are_passed_over(db):
    path = db()
    keep(path, timed(FIRST, 10.0), triton="3.1")
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE trials SET rows = 'many'")
        connection.commit()
    assert "within 8 x of 1024 rows: " in explain_problem(path, PROBLEM, H200).remedy


def test_a_sweep_that_has_to_run_elsewhere_says_where(db, monkeypatch):
    path = db()
    command = "tunegen sweep --hidden 4096 --rows 1024 --direction backward"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert explain_problem(path, PROBLEM, H200).remedy.endswith(f" rows: on an {H200.name}: {command}")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert explain_problem(path, PROBLEM, H200).remedy.endswith(f" rows: {command}")
    assert explain_problem(path, PROBLEM, OTHER_CHIP).remedy.endswith(f": on an {OTHER_CHIP.name}: {command}")


def test_baselines_do_not_answer(db):
    assert explain_problem(db(timed(BASELINE, 1.0, kind="baseline")), PROBLEM, H200).answer == DEFAULT.label()


def on_a_gpu(monkeypatch):
    """Tensors of the CPU pass for those of cuda:0."""
    monkeypatch.setattr(OP_MODULE, "has_kernels", lambda x, *others: True)
    key_of = OP_MODULE.key_of
    monkeypatch.setattr(OP_MODULE, "key_of", lambda *args, **named: key_of(*args, **named)._replace(device=0))


def test_call_is_explained_in_the_directions_it_needs(db, monkeypatch):
    db(timed(FIRST, 10.0))
    on_a_gpu(monkeypatch)
    x, w = torch.empty(1024, 4096, dtype=torch.bfloat16), torch.empty(4096, dtype=torch.bfloat16)
    assert [one.problem.direction for one in tunegen.explain(x, w)] == ["forward"]
    w.requires_grad_()
    forward, backward = tunegen.explain(x, w)
    assert backward.answer == FIRST.label()
    assert backward.problem == PROBLEM
    assert forward.why == f"built-in default on {H200.name}"
    x.requires_grad_()
    assert not tunegen.explain(x, w.detach())[1].problem.weight_grad


def test_call_with_a_residual_is_one_of_the_other_op(monkeypatch, tmp_path):
    monkeypatch.setenv("TUNEGEN_DB", str(tmp_path / "no.db"))
    x, w = torch.empty(8, 4096, dtype=torch.bfloat16), torch.empty(4096, dtype=torch.bfloat16)
    (here,) = tunegen.explain(x, w, residual=x)
    assert (here.problem.op, here.answer, here.why) == ("add_rms_norm", "torch operators", "x is on cpu")
    on_a_gpu(monkeypatch)
    monkeypatch.setattr("tunegen.explanation.silicon_of", lambda index: H200)
    forward, backward = tunegen.explain(x, w, residual=x.clone().requires_grad_(), sum_in_fp32=True)
    assert (forward.problem.sum_in_fp32, backward.problem.sum_in_fp32) == (True, False)
    assert backward.answer.startswith("persistent_partials") or not backward.problem.weight_grad
    assert forward.remedy.endswith(
        "tunegen sweep --op add_rms_norm --hidden 4096 --rows 8 --direction forward --sum-in-fp32"
    )
    with pytest.raises(ValueError, match="residual must have x's shape"):
        tunegen.explain(x, w, residual=x[:1])


def test_what_is_explained_is_what_dispatch_chooses(db, monkeypatch):
    db(timed(FIRST, 10.0), timed(SECOND, 20.0))
    on_a_gpu(monkeypatch)
    x = torch.empty(1000, 4096, dtype=torch.bfloat16, requires_grad=True)
    w = torch.empty(4096, dtype=torch.bfloat16, requires_grad=True)
    dispatch.forget()
    for one in tunegen.explain(x, w):
        key = OP_MODULE.key_of(one.problem.direction, x, w, 0.0, "fp32", one.problem.weight_grad)
        choice = dispatch.choose(key)
        assert (choice.config.label(), choice.rung) == (one.answer, one.why)
    dispatch.forget()


def test_where_torch_answers_backward_it_answers_forward_too(db, monkeypatch):
    db(timed(Config("torch"), 5.0, digest="-"))
    on_a_gpu(monkeypatch)
    x = torch.empty(1024, 4096, dtype=torch.bfloat16, requires_grad=True)
    w = torch.empty(4096, dtype=torch.bfloat16, requires_grad=True)
    forward, backward = tunegen.explain(x, w)
    assert (forward.answer, backward.answer) == ("torch", "torch")
    assert forward.why == "torch's own op answers backward"


def test_command_remarks_that_torch_answers_where_a_gradient_is_wanted(db):
    path = db(timed(Config("torch"), 5.0, digest="-"))
    arguments = ["explain", "--hidden", "4096", "--rows", "1024", "--db", str(path), "--json"]
    forward, backward = json.loads(CliRunner().invoke(cli.main, arguments).stdout)
    assert (forward["answer"] != "torch", backward["answer"]) == (True, "torch")
    assert forward["why"].endswith("without a gradient; with one torch answers, as it does backward")


def test_sweep_that_is_advised_is_of_the_problem(tmp_path):
    odd = replace(PROBLEM, x_dtype="fp16", weight_dtype="fp32", casting="llama", offset=True, weight_grad=False)
    assert explain_problem(tmp_path / "no.db", odd, H200).remedy.partition("tunegen sweep ")[2] == (
        "--hidden 4096 --rows 1024 --direction backward --dtype fp16 --weight-dtype fp32 --casting llama --offset "
        f"--frozen-weight --db {tmp_path / 'no.db'}"
    )


def wanting_gradients():
    x = torch.empty(1024, 4096, dtype=torch.bfloat16, requires_grad=True)
    return x, torch.empty(4096, dtype=torch.bfloat16, requires_grad=True)


def test_without_gradients_in_force_there_is_no_backward(db, monkeypatch):
    db(timed(FIRST, 10.0))
    on_a_gpu(monkeypatch)
    with torch.no_grad():
        assert [one.problem.direction for one in tunegen.explain(*wanting_gradients())] == ["forward"]


def test_what_did_not_run_here_is_left_out(db, monkeypatch):
    db(timed(FIRST, 10.0), timed(SECOND, 20.0))
    on_a_gpu(monkeypatch)
    x, w = wanting_gradients()
    dispatch.forget()
    key = OP_MODULE.key_of("backward", x, w, 0.0, "fp32", True)
    dispatch.demote(key, dispatch.choose(key), RuntimeError("too large"))
    assert tunegen.explain(x, w)[1].answer == SECOND.label() == dispatch.choose(key).config.label()
    dispatch.forget()
    assert tunegen.explain(x, w)[1].answer == FIRST.label()


def test_a_choice_once_made_stays_until_it_is_forgotten(db, monkeypatch):
    db(timed(SECOND, 20.0))
    on_a_gpu(monkeypatch)
    x, w = wanting_gradients()
    dispatch.forget()
    dispatch.choose(OP_MODULE.key_of("backward", x, w, 0.0, "fp32", True))
    db(timed(FIRST, 10.0))
    found = tunegen.explain(x, w)[1]
    assert (found.answer, found.measured_us, found.runner_up) == (SECOND.label(), 20.0, FIRST.label())
    assert found.why.endswith("as it was when this process first asked")
    dispatch.forget()
    assert tunegen.explain(x, w)[1].answer == FIRST.label()


def test_a_call_is_printed_as_text(db, monkeypatch):
    db(timed(FIRST, 10.0))
    on_a_gpu(monkeypatch)
    found = tunegen.explain(*wanting_gradients())
    assert str(found) == f"{found[0]}\n{found[1]}"
    assert f"  answer    {FIRST.label()}\n" in str(found)


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (torch.ones(2, 8), "x is on cpu"),
        (torch.ones(2, 8).to("meta"), "x is on meta"),
    ],
)
def test_calls_without_kernels_say_why(x, words):
    (found,) = tunegen.explain(x)
    assert (found.answer, found.why) == ("torch operators", words)


def test_reasons_agree_with_the_hot_check(monkeypatch):
    """Each reason holds where `has_kernels` is false for it alone."""
    x = SimpleNamespace(is_cuda=True, numel=lambda: 4, device="cuda:0")
    monkeypatch.setattr(arguments, "PLAIN_TENSORS", (SimpleNamespace,))
    monkeypatch.setattr(arguments, "has_address", lambda tensor: tensor is not sparse)
    sparse = SimpleNamespace(is_cuda=True, numel=lambda: 4, device="cuda:0")
    assert (OP_MODULE.has_kernels(x, None), OP_MODULE.no_kernels_because(x, None)) == (True, "")
    empty = SimpleNamespace(is_cuda=True, numel=lambda: 0, device="cuda:0")
    for tensor, weight, words in (
        (empty, None, "no elements"),
        (x, torch.ones(4), "Tensor is no plain tensor"),
        (x, sparse, "no memory of its own"),
        (sparse, None, "no memory of its own"),
    ):
        assert not OP_MODULE.has_kernels(tensor, weight)
        assert words in OP_MODULE.no_kernels_because(tensor, weight)
    monkeypatch.setenv("TUNEGEN_DISABLE", "1")
    assert not OP_MODULE.has_kernels(x, None)
    assert "TUNEGEN_DISABLE" in OP_MODULE.no_kernels_because(x, None)


def test_bad_arguments_are_those_of_the_op():
    with pytest.raises(TypeError, match="x must be a tensor"):
        tunegen.explain(torch.ones(2, 8, dtype=torch.int32))
    with pytest.raises(ValueError, match="casting must be one of"):
        tunegen.explain(torch.ones(2, 8), casting="hf")


def test_command_prints_text_or_json(db):
    path = db(timed(FIRST, 10.0))
    arguments = ["explain", "--hidden", "4096", "--rows", "1024", "--db", str(path)]
    text = CliRunner().invoke(cli.main, arguments).stdout
    assert f"backward 1024x4096 bf16\n  answer    {FIRST.label()}\n" in text
    assert "forward 1024x4096 bf16\n" in text
    found = json.loads(CliRunner().invoke(cli.main, [*arguments, "--direction", "backward", "--json"]).stdout)
    assert [(one["answer"], one["measured_us"], one["problem"]["rows"]) for one in found] == [
        (FIRST.label(), 10.0, 1024)
    ]


def test_command_says_what_makes_its_answer_a_supposition(db, monkeypatch):
    """No GPU, or one that torch's operators are told to serve."""
    arguments = ["explain", "--hidden", "4096", "--rows", "1024", "--db", str(db(timed(FIRST, 10.0)))]
    monkeypatch.setattr(single, "target_of", lambda arch: H200)
    assert CliRunner().invoke(cli.main, arguments).stderr == (
        f"No GPU here: this is what would answer on sm_90 ({H200.name}).\n"
    )
    monkeypatch.setenv("TUNEGEN_DISABLE", "1")
    named = CliRunner().invoke(cli.main, [*arguments, "--arch", "sm_90"])
    assert named.stderr == "TUNEGEN_DISABLE is set: torch answers every call; this is what would answer without it.\n"
    assert FIRST.label() in named.stdout
