"""Policies: which one holds, what it forbids, and the bits that it promises."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch
from command import run as command
from helpers import OP_MODULE, assert_right, draw, exact, places, run, same_bits, weight_of
from kernel_cases import evenly
from stored import keep

import tunegen
from tunegen import dispatch, policies, rms_norm
from tunegen.cli_options import rows_to_sweep
from tunegen.model import Config, Measurement, Problem, Trial, TrialState
from tunegen.ops import notes
from tunegen.policies import INVARIANT_ROWS, POLICIES
from tunegen.silicon import of_arch
from tunegen.space import load_space

place = places("interpreter", "cuda")
anywhere = places("cpu", "interpreter", "cuda")

H200 = of_arch("sm_90")
SPACE = load_space("rms_norm")
BACKWARD = Problem("rms_norm", "backward", 4096, 1024, weight_grad=True)


@pytest.fixture
def in_environment(monkeypatch):
    def set_to(name):
        monkeypatch.setattr(policies, "_ENVIRONMENT", name)

    return set_to


# Which one holds


def test_argument_then_context_then_environment(in_environment):
    assert dispatch.policy_of(None) == "fastest"
    in_environment("invariant")
    assert dispatch.policy_of(None) == "invariant"
    with tunegen.policy("deterministic"):
        assert dispatch.policy_of(None) == "deterministic"
        assert dispatch.policy_of("invariant") == "invariant"
        with tunegen.policy("fastest"):
            assert dispatch.policy_of(None) == "fastest"
        assert dispatch.policy_of(None) == "deterministic"
    assert dispatch.policy_of(None) == "invariant"


def test_a_context_ends_with_an_error_too_and_may_decorate():
    with pytest.raises(KeyError), tunegen.policy("invariant"):
        raise KeyError
    assert dispatch.policy_of(None) == "fastest"
    assert tunegen.policy("invariant")(dispatch.policy_of)(None) == "invariant"


def test_a_context_is_that_of_its_thread():
    seen = []
    with tunegen.policy("invariant"):
        thread = threading.Thread(target=lambda: seen.append(dispatch.policy_of(None)))
        thread.start()
        thread.join()
    assert seen == ["fastest"]


def test_an_unknown_policy_is_refused_with_all_names(in_environment):
    told = r"must be one of fastest, deterministic, invariant, got 'fast'"
    x = torch.ones(2, 8)
    with pytest.raises(ValueError, match=f"^policy {told}"):
        rms_norm(x, policy="fast")
    with pytest.raises(ValueError, match=f"^policy {told}"):
        tunegen.policy("fast")
    in_environment("fast")
    with pytest.raises(ValueError, match=f"^the variable TUNEGEN_POLICY {told}"):
        rms_norm(x)
    assert rms_norm(x, policy="fastest").shape == x.shape


def test_torchs_switch_makes_fastest_deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        assert [dispatch.policy_of(name) for name in (None, *POLICIES)] == [
            "deterministic",
            "deterministic",
            "deterministic",
            "invariant",
        ]
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", POLICIES)
def test_backward_follows_the_policy_of_its_forward(place, name, monkeypatch):
    """Autograd runs it in a thread of its own, after the context is left."""
    keys = []
    choose = dispatch.choose
    monkeypatch.setattr(dispatch, "choose", lambda key: keys.append(key) or choose(key))
    x, w = draw(3, 64, place=place).requires_grad_(), weight_of(64, place=place).requires_grad_()
    with tunegen.policy(name):
        y = rms_norm(x, w)
    y.sum().backward()
    assert [(key.direction, key.policy) for key in keys] == [
        (direction, name) for direction in ("backward", "forward", "backward")
    ]
    assert {key.problem().policy for key in keys} == {name}


@pytest.mark.parametrize("name", POLICIES)
def test_values_are_right_under_every_policy(anywhere, name):
    place = anywhere
    x, dy, w = draw(5, 100, place=place), draw(5, 100, seed=2, place=place), weight_of(100, place=place)
    assert_right(run(x, w, dy, policy=name), exact(x, w, dy), x, w, place)


# What answers


def timed(problem, config, us, rows=1024):
    problem = replace(problem, rows=rows)
    measurement = Measurement(us, us / 10.0, 10.0, (us,), (10.0,))
    return Trial(problem, config, TrialState.OK, digest=dispatch.digest_today(problem, config), measurement=measurement)


ATOMIC = SPACE.candidates(BACKWARD, H200, "persistent_atomic")[0]
ORDERED, OTHER = [
    config
    for config in SPACE.candidates(BACKWARD, H200, "persistent_partials")
    if SPACE.check(replace(BACKWARD, rows=INVARIANT_ROWS), H200, config) is None
][:2]


def answers(path, problem):
    return [rung.config for rung in dispatch.rungs(path, replace(problem, rows=problem.rows_bucket), H200)]


@pytest.mark.parametrize("name", ["deterministic", "invariant"])
def test_times_of_fastest_count_without_atomics(tmp_path, name):
    path = tmp_path / "tune.db"
    keep(path, timed(BACKWARD, ATOMIC, 1.0), timed(BACKWARD, ORDERED, 2.0))
    wanted = replace(BACKWARD, policy=name)
    assert answers(path, BACKWARD)[:2] == [ATOMIC, ORDERED]
    assert answers(path, wanted)[0] == ORDERED
    assert ATOMIC not in answers(path, wanted)
    keep(path, timed(wanted, OTHER, 3.0))
    assert answers(path, wanted)[:2] == [OTHER, ORDERED], "its own come first at the same row count"
    assert OTHER not in answers(path, BACKWARD)


def test_torch_may_answer_deterministic_calls_but_not_invariant_ones(tmp_path):
    path = tmp_path / "tune.db"
    keep(path, timed(BACKWARD, Config("torch"), 1.0), timed(BACKWARD, ORDERED, 2.0))
    assert answers(path, replace(BACKWARD, policy="deterministic"))[:2] == [None, ORDERED]
    assert answers(path, replace(BACKWARD, policy="invariant"))[0] == ORDERED


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_invariant_has_one_choice_for_all_row_counts(direction):
    keys = {
        OP_MODULE.key_of(direction, torch.empty(rows, 4096), None, 0.0, "fp32", False, policy="invariant")
        for rows in (1, 7, 64, 4096, 100_000)
    }
    assert [key.rows for key in keys] == [INVARIANT_ROWS]


def test_a_gate_that_rejects_under_fastest_rejects_under_all(tmp_path):
    path = tmp_path / "tune.db"
    default, *generic = SPACE.built_in(replace(BACKWARD, policy="deterministic"), H200)
    keep(path, replace(timed(BACKWARD, default, 1.0), state=TrialState.INCORRECT, measurement=None))
    assert answers(path, replace(BACKWARD, policy="deterministic")) == [*generic, None]


def test_torch_that_answers_an_invariant_call_is_noted_once(caplog, monkeypatch):
    monkeypatch.setattr(notes, "_told", set())
    for _ in range(2):
        rms_norm(torch.ones(2, 8), policy="invariant")
    rms_norm(torch.ones(0, 8), policy="invariant")
    rms_norm(torch.ones(2, 8), policy="deterministic")
    (record,) = caplog.records
    assert record.getMessage() == "policy invariant is not kept: torch's own operators answer (x is on cpu)"


def test_invariant_is_swept_at_its_one_row_count():
    assert rows_to_sweep([], "invariant", (1, 64)) == (INVARIANT_ROWS,)
    assert rows_to_sweep([INVARIANT_ROWS], "invariant", (1, 64)) == (INVARIANT_ROWS,)
    assert rows_to_sweep([], "deterministic", (1, 64)) == (1, 64)
    with pytest.raises(Exception, match="one kernel for all row counts, tuned at 4096; leave --rows out"):
        rows_to_sweep([1, 4096], "invariant", (1, 64))


# The bits that are promised


def parts(x, dy):
    """The same rows in other company: which rows of the whole they are, x, dy; fewer of them if there are few rows."""
    count = len(x)
    middle = count // 2
    if count < 10:
        yield slice(count - 1, count), x[-1:], dy[-1:]
        yield slice(0, 7), *(shifted(t[:7], 1) for t in (x, dy))
        return
    for start, stop in ((0, 1), (middle, middle + 1), (count - 1, count), (middle - 3, middle + 4), (1, count)):
        yield slice(start, stop), x[start:stop], dy[start:stop]
        yield slice(start, stop), x[start:stop].clone(), dy[start:stop].clone()
    for shift in (1, 3, 8):
        yield slice(0, count), *(shifted(t, shift) for t in (x, dy))
    yield slice(0, 7), *(torch.cat((t, t), dim=1)[:7, : t.shape[1]] for t in (x, dy))
    yield slice(0, 6), *(t[:6].reshape(2, 3, -1).transpose(0, 1).contiguous().transpose(0, 1) for t in (x, dy))


def shifted(tensor, by):
    """A copy that lies `by` elements behind an aligned address."""
    buffer = torch.empty(tensor.numel() + by, dtype=tensor.dtype, device=tensor.device)
    return buffer[by:].view(tensor.shape).copy_(tensor)


def check_rows(x, w, dy, weight_grad=True):
    """y and dx of every row are those of the whole, whatever comes with it; so is y without a gradient."""
    norm = {"policy": "invariant"}
    weights = [w, shifted(w, 1)]

    def results(x, w, dy):
        if weight_grad:
            return run(x, w, dy, **norm)[:2]
        leaf = x.detach().requires_grad_()
        y = rms_norm(leaf, w, **norm)
        y.backward(dy)
        return y.detach(), leaf.grad

    whole = results(x, w, dy)
    for number, (rows, some, some_dy) in enumerate(parts(x, dy)):
        weight = weights[number % 2]
        alone = rms_norm(some, weight.detach(), **norm)
        for got, want in zip((*results(some, weight, some_dy), alone), (*whole, whole[0]), strict=True):
            assert same_bits(got.reshape(-1, x.shape[1]), want[rows]), (rows, some.stride())


WIDTHS = (769, 4096, 5120)


@pytest.mark.parametrize("hidden", WIDTHS)
@pytest.mark.parametrize("weight_grad", [True, False], ids=["dw", "dx only"])
def test_a_row_has_the_same_bits_in_any_batch(place, hidden, weight_grad):
    """Alone, among 7, among all, at an odd alignment, at another distance: y, with and without a gradient, and dx."""
    rows = 9 if place.name == "interpreter" else 4096
    dtype = torch.float16 if place.name == "interpreter" else torch.bfloat16
    x, dy = (draw(rows, hidden, dtype=dtype, seed=seed, place=place) for seed in (0, 2))
    check_rows(x, weight_of(hidden, dtype, place), dy, weight_grad)


@pytest.mark.gpu
@pytest.mark.parametrize("hidden", [128, 4096])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_every_family_that_invariant_may_choose_keeps_the_bits(direction, hidden, monkeypatch):
    """Whatever a sweep finds best may answer: the first and the last config of each family's space."""
    x, dy = (draw(4096, hidden, dtype=torch.bfloat16, seed=seed).cuda() for seed in (0, 2))
    w = weight_of(hidden, torch.bfloat16).cuda()
    key = OP_MODULE.key_of(direction, x, w, 0.0, "fp32", direction == "backward", policy="invariant")
    problem, silicon = key.problem(), dispatch.silicon_of(0)
    families = [f for f in SPACE.families(problem, silicon) if not f.baseline]
    assert families
    for family in families:
        assert "atomic" not in family.name
        for config in evenly(SPACE.candidates(problem, silicon, family.name), 2):
            choice = dispatch.Choice(problem, config, "this test", x.device)
            monkeypatch.setitem(dispatch._choices, key, choice)
            monkeypatch.setattr(dispatch, "quick", dispatch.Table())  # what it knows is of the config before
            check_rows(x, w, dy)


@pytest.mark.gpu
@pytest.mark.parametrize("hidden", [128, 2048])
def test_deterministic_bits_repeat(hidden):
    """Forward of few rows and backward of many, where atomics would win."""
    for rows in (1, 32768):
        x, dy = (draw(rows, hidden, dtype=torch.bfloat16, seed=seed).cuda() for seed in (0, 2))
        w = weight_of(hidden, torch.bfloat16).cuda()
        first = run(x, w, dy, policy="deterministic")
        for _ in range(9):
            assert all(map(same_bits, first, run(x, w, dy, policy="deterministic")))


# Commands


def test_explain_of_a_policy(tmp_path):
    options = ("--hidden", 4096, "--rows", 3, "--direction", "backward", "--arch", "sm_90", "--db", tmp_path / "no.db")
    told = {name: command("explain", *options, "--policy", name).output for name in POLICIES}
    assert told["invariant"].startswith("backward 3x4096 bf16 invariant\n")
    assert "tunegen sweep --hidden 4096 --direction backward --policy invariant" in told["invariant"]
    assert "--rows 3 --direction backward --policy deterministic" in told["deterministic"]
    assert "--policy" not in told["fastest"]
    assert "STAGES=3" in told["invariant"], "as if for 4096 rows"
    assert "STAGES=3" not in told["fastest"]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--hidden", 64, "--policy", "invariant", "--rows", 1), "tuned at 4096; leave --rows out"),
        (("--hidden", 64, "--policy", "fast"), "'fast' is not one of 'fastest', 'deterministic', 'invariant'"),
        (("--from", "step.json", "--policy", "deterministic"), "--from and --policy both say what to tune"),
    ],
)
def test_a_sweep_that_contradicts_itself_is_refused(options, told):
    result = command("sweep", *options)
    assert result.exit_code == 2
    assert told in result.output
