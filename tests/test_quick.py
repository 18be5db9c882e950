"""The short way of a call launches what the long way launches, and whatever is not of its kind goes the long way."""

from __future__ import annotations

import ast
import contextlib
import gc
import inspect
import sys
import textwrap
import threading
import weakref

import pytest
import standins
import torch
from helpers import OP_MODULE, draw, weight_of
from standins import STREAM, CudaLauncher
from test_launch import SPLIT, arguments_of, bound_variant
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import tunegen
from tunegen import add_rms_norm, add_rms_norm_, dispatch, launch, lookup, policies, prepared, rms_norm
from tunegen.compile import ArgumentClass
from tunegen.errors import CompileError
from tunegen.model import Config, rows_bucket
from tunegen.ops import quick
from tunegen.space import load_space

ADD_MODULE = sys.modules["tunegen.ops.add_rms_norm"]
stand_ins = standins.stand_ins
BF16 = torch.bfloat16
ROWS, HIDDEN = 5, 64


def given(rows=ROWS, hidden=HIDDEN, dtype=BF16, **more):
    return {"x": draw(rows, hidden, dtype=dtype), "weight": weight_of(hidden, BF16), **more}


def ways(found, call, *arguments, **named):
    """Each launch of one call, in order: by which way, its kernel, grid, stream and arguments."""
    found.launches.clear()
    call(*arguments, **named)
    return list(found.launches)


def train(x, weight, **named):
    """Forward and backward of leaves of their own, at the same addresses."""
    x = x.detach().requires_grad_()
    weight = None if weight is None else weight.detach().requires_grad_()
    y = rms_norm(x, weight, **named)
    y.backward(torch.ones_like(y))


def kinds(found, *arguments, call=rms_norm, **named):
    """The ways that one call takes."""
    return {one[0] for one in ways(found, call, *arguments, **named)}


def misaligned(tensor):
    """A copy that lies one element behind an address that 16 divides."""
    copy = torch.empty(tensor.numel() + 8, dtype=tensor.dtype)[1:][: tensor.numel()].view(tensor.shape)
    return copy.copy_(tensor)


def no_addresses(launches):
    """Launches without their way and their addresses, since outputs lie elsewhere each time: all other numbers here are
    smaller."""
    return [
        (*one[1:4], tuple("address" if isinstance(a, int) and a > 2**20 else a for a in one[4])) for one in launches
    ]


@pytest.mark.compiler
@pytest.mark.parametrize("call", [rms_norm, train])
@pytest.mark.parametrize(
    "case",
    [
        {},
        {"weight": None},
        {"weight": weight_of(HIDDEN), "offset": 1.0, "casting": "llama"},
        {"policy": "deterministic"},
        {"policy": "invariant"},
        {"eps": 0.5, "x": draw(2, 3, 4, HIDDEN)},
        {"x": draw(1, 32768, dtype=BF16), "weight": weight_of(32768, BF16)},
        {"x": draw(3, HIDDEN, dtype=torch.float64), "weight": weight_of(HIDDEN, torch.float64)},
        {"x": draw(2048, HIDDEN, dtype=BF16)},
    ],
    ids=[
        "usual",
        "no weight",
        "offset llama",
        "deterministic",
        "invariant",
        "four axes",
        "wide",
        "fp64",
        "two kernels",
    ],
)
def test_the_second_call_launches_what_the_first_does(stand_ins, call, case):
    """By the short way: the same kernels on the same grids with the same arguments, inputs at the same addresses."""
    case = {**given(), **case}
    first, second, third = (ways(stand_ins, call, **case) for _ in range(3))
    assert {one[0] for one in first} == {"official"}
    assert {one[0] for one in second} == {one[0] for one in third} == {"bare"}
    assert no_addresses(first) == no_addresses(second) == no_addresses(third)
    assert all(one[3] == STREAM for one in second)
    inputs = {case["x"].data_ptr()} | ({case["weight"].data_ptr()} if case["weight"] is not None else set())
    assert inputs <= {argument for one in second for argument in one[4]}


@pytest.mark.compiler
def test_results_are_new_tensors_like_those_of_the_long_way(stand_ins):
    x, w = draw(2, 3, HIDDEN, dtype=BF16), weight_of(HIDDEN, BF16).requires_grad_()
    for leaf in (x, x.clone().requires_grad_()):
        long, short = rms_norm(leaf, w), rms_norm(leaf, w)
        assert stand_ins.launches[-1][0] == "bare"
        assert (short.shape, short.dtype, short.stride()) == (long.shape, long.dtype, long.stride())
        assert short.data_ptr() not in (long.data_ptr(), x.data_ptr())
        gradients = [torch.autograd.grad(y, [t for t in (leaf, w) if t.requires_grad], y) for y in (long, short)]
        assert [[(g.shape, g.dtype) for g in some] for some in gradients][1:] == [
            [(g.shape, g.dtype) for g in gradients[0]]
        ]


@pytest.mark.compiler
def test_what_a_passing_choice_asked_of_forward_ends_with_it(stand_ins, monkeypatch):
    """One that wants no rstd, made for backward while the database could not be read; the next one wants it, and torch
    would answer in its place."""
    case, ladder, wanted = given(), dispatch.rungs, ["recomputed"]
    rms_norm(**case)  # the choice for forward stays

    def rungs(path, problem, silicon):
        if problem.direction == "forward":
            return ladder(path, problem, silicon)
        monkeypatch.setattr(lookup, "_failed_reads", lookup.failed_reads() + (wanted == ["recomputed"]))
        first, *_ = load_space("rms_norm").candidates(problem, silicon, "persistent_partials")
        return iter([dispatch.Rung(Config.of(first.family, {**dict(first.parameters), "RSTD": wanted[0]}), "")])

    monkeypatch.setattr(dispatch, "rungs", rungs)
    kernels = [one[1] for one in ways(stand_ins, train, **case)]
    assert ways(stand_ins, train, **case)[0][0] == "bare"
    monkeypatch.setattr(dispatch._passing, "_until", 0.0)
    wanted[0] = "saved"
    train(**case)  # its forward began before
    assert [one[1] for one in ways(stand_ins, train, **case)] == kernels


@pytest.mark.compiler
def test_calls_with_main_grad_take_the_long_way_among_others_of_their_kind(stand_ins):
    """There dw is added, and to what the caller gives; another buffer would share a key."""
    x, w = draw(ROWS, HIDDEN, dtype=BF16), weight_of(HIDDEN, BF16).requires_grad_()
    for _ in range(2):
        rms_norm(x, w).backward(x)
    assert stand_ins.launches[-1][0] == "bare"
    w.grad = None
    stand_ins.launches.clear()
    for _ in range(2):
        buffer = torch.zeros(HIDDEN)
        rms_norm(x, w, main_grad=buffer).backward(x)
        assert w.grad is None
        assert buffer.data_ptr() in stand_ins.launches[-1][4]
    assert {one[0] for one in stand_ins.launches} == {"official"}


# What decides is in the key. Each argument of `rms_norm` and of its surroundings, and how it may change what answers.

CHANGES = {
    "x": [
        draw(ROWS, HIDDEN).half(),
        draw(ROWS, HIDDEN),
        draw(ROWS, HIDDEN + 16, dtype=BF16),
        draw(2 * ROWS, HIDDEN, dtype=BF16),
        draw(ROWS, HIDDEN, dtype=BF16).requires_grad_(),
    ],
    "weight": [None, weight_of(HIDDEN), weight_of(HIDDEN).half(), weight_of(HIDDEN, BF16).requires_grad_()],
    "eps": [],
    "offset": [1.0, 0.5],
    "casting": ["llama"],
    "policy": ["fastest", "deterministic", "invariant"],
    "out": [],
    "main_grad": [],  # takes the long way
}
CASES = [
    pytest.param({name: value}, id=f"{name}-{n}") for name, values in CHANGES.items() for n, value in enumerate(values)
]


def key_of(x, weight, eps=1e-6, offset=0.0, casting="fp32", policy=None):
    return quick.find(x, weight, eps, offset, casting, policy)[0]


def test_every_argument_is_thought_of():
    assert set(CHANGES) == set(inspect.signature(rms_norm).parameters), "a new argument: does it change what answers?"
    assert set(inspect.signature(quick.find).parameters) - {"more", "residual"} == set(CHANGES) - {"out", "main_grad"}


@pytest.mark.parametrize("change", CASES)
def test_every_argument_that_changes_the_answer_is_in_the_key(change):
    case = {**given(), **change}
    if change.keys() & {"x"} and case["x"].shape[-1] != HIDDEN:
        case["weight"] = weight_of(case["x"].shape[-1], BF16)
    assert key_of(**case) not in (None, key_of(**given()))


def test_no_two_calls_that_differ_share_a_key():
    calls = [given(), *({**given(), name: value} for name, values in CHANGES.items() for value in values)]
    calls += [
        {**given(), "x": given()["x"].requires_grad_(), "weight": w.requires_grad_()} for w in (weight_of(HIDDEN),)
    ]
    keys = [key_of(**call) for call in calls]
    assert len({*keys}) == len(keys)


@pytest.mark.parametrize(
    "around",
    [
        lambda patch: torch.no_grad(),
        lambda patch: tunegen.policy("deterministic"),
        lambda patch: tunegen.policy("invariant"),
        lambda patch: patch.setattr(policies, "_ENVIRONMENT", "invariant"),
        lambda patch: deterministic(),
    ],
    ids=["no_grad", "with deterministic", "with invariant", "environment", "torch's switch"],
)
def test_what_is_around_a_call_and_changes_the_answer_is_in_the_key(around, monkeypatch):
    case = {**given(), "x": given()["x"].requires_grad_()}
    usual = key_of(**case)
    with around(monkeypatch) or contextlib.nullcontext():
        assert key_of(**case) not in (None, usual)


def test_everything_that_changes_what_answers_backward_is_in_its_key():
    usual = {**given(), "dy": draw(ROWS, HIDDEN, dtype=BF16), "rstd": torch.ones(ROWS), "weight_grad": True}
    usual |= {"contract": (0.0, "fp32", "fastest"), "dsum": None}
    changes = {
        "dy": [draw(ROWS, HIDDEN, dtype=BF16).to("meta")],
        "x": [draw(ROWS, 80, dtype=BF16), draw(2 * ROWS, HIDDEN, dtype=BF16)],
        "weight": [None, weight_of(HIDDEN), weight_of(80, BF16), weight_of(HIDDEN, BF16).to("meta")],
        "rstd": [None],
        "contract": [(1.0, "fp32", "fastest"), (0.0, "llama", "fastest"), (0.0, "fp32", "deterministic")],
        "weight_grad": [False],
        "dsum": [draw(ROWS, HIDDEN, dtype=BF16), draw(ROWS, HIDDEN)],
    }
    assert set(changes) == set(inspect.signature(quick.find_backward).parameters) == set(usual)
    changes["x"].append(torch.empty(ROWS, HIDDEN, dtype=BF16, device="meta"))
    calls = [usual, *({**usual, name: value} for name, values in changes.items() for value in values)]
    calls.append({**usual, "dy": draw(ROWS, HIDDEN), "x": draw(ROWS, HIDDEN)})
    keys = [quick.find_backward(**call)[0] for call in calls]
    assert None not in keys
    assert len({*keys}) == len(keys)
    for unlike in ({"dy": draw(ROWS, HIDDEN)}, {"rstd": torch.ones(ROWS, dtype=BF16)}):
        assert quick.find_backward(**{**usual, **unlike}) == (None, None)


def becomes(change):
    """A change of a tensor under the same identity."""

    def changed(tensor):
        tensor.data = change(tensor.data)

    return changed


IN_PLACE = {
    "dtype": becomes(torch.Tensor.float),
    "strides": becomes(lambda t: torch.stack([t, t], -1)[..., 0]),
    "shape": becomes(lambda t: t[: len(t) // 2].clone()),
    "address": becomes(misaligned),
    "gradient": torch.Tensor.requires_grad_,
}


@pytest.mark.compiler
@pytest.mark.parametrize("change", IN_PLACE)
@pytest.mark.parametrize("which", ["x", "residual", "weight"])
def test_a_tensor_that_changed_under_the_same_identity_is_not_taken_for_what_it_was(stand_ins, which, change):
    """A call is asked for by what its tensors are now, not by who they are."""
    case, call = (given(), rms_norm) if which != "residual" else (given_add(), add_rms_norm)
    assert [kinds(stand_ins, call=call, **case) for _ in range(3)] == [{"official"}, {"bare"}, {"bare"}]
    IN_PLACE[change](case[which])
    if (which, change) in {("residual", "dtype"), ("residual", "shape"), ("weight", "shape")}:
        with pytest.raises((TypeError, ValueError), match=f"{which} must"):
            call(**case)
    else:
        assert kinds(stand_ins, call=call, **case) == {"official"}


@pytest.mark.compiler
@pytest.mark.parametrize("which", ["dy", "x", "weight", "dsum"])
@pytest.mark.parametrize("change", ["dtype", "strides", "address"])
def test_nor_in_backward(stand_ins, which, change):
    case = given_add(dy=draw(ROWS, HIDDEN, dtype=BF16, seed=2), dsum=draw(ROWS, HIDDEN, dtype=BF16, seed=3))
    tensors = {name: case[name].clone() for name in ("dy", "x", "weight", "dsum")}

    def backward():
        contract = {"eps": 1e-6, "offset": 0.0, "casting": "fp32", "policy": "fastest"}
        OP_MODULE.backward(rstd=torch.ones(ROWS), weight_grad=True, **contract, **tensors)

    assert [{one[0] for one in ways(stand_ins, backward)} for _ in range(3)] == [{"official"}, {"bare"}, {"bare"}]
    IN_PLACE[change](tensors[which])
    assert {one[0] for one in ways(stand_ins, backward)} == {"official"}


@pytest.mark.compiler
@pytest.mark.parametrize("call", [rms_norm, train, add_rms_norm, "train_add"])
def test_a_call_like_one_at_hand_builds_no_key(stand_ins, call, monkeypatch):
    call, case = (train_add, given_add()) if call == "train_add" else (call, given())
    case = given_add() if call is add_rms_norm else case
    call(**case), call(**case)
    monkeypatch.setattr(quick, "_of_kind", lambda *_: pytest.fail("it asks one by one"))
    assert kinds(stand_ins, call=call, **case) == {"bare"}


@pytest.mark.parametrize("function", [OP_MODULE._RMSNorm, ADD_MODULE._AddRMSNorm])
def test_autograd_calls_backward_itself(function):
    assert function._backward_cls.apply is function.backward


@pytest.mark.compiler
def test_kinds_that_share_a_shape_are_told_apart(stand_ins):
    """In turns, by dtype and by who wants a gradient: each time the kernel of its own first call."""
    x, w = draw(ROWS, HIDDEN, dtype=BF16), weight_of(HIDDEN, BF16)
    calls = [(x, w), (x.half(), w), (x, w.float()), (x, torch.nn.Parameter(w)), (x.clone().requires_grad_(), w)]
    first = [ways(stand_ins, rms_norm, *call) for call in calls]
    for _ in range(2):
        for call, official in zip(calls, first, strict=True):
            again = ways(stand_ins, rms_norm, *call)
            assert {one[0] for one in again} == {"bare"}
            assert no_addresses(again) == no_addresses(official)


@pytest.mark.compiler
def test_a_tensor_given_twice_takes_the_short_way(stand_ins):
    """As dy and dsum are where y and the sum are added."""
    case = given_add()

    def train():
        y, total = add_rms_norm(case["x"].clone().requires_grad_(), case["residual"], case["weight"])
        dy = torch.ones_like(y)
        torch.autograd.backward([y, total], [dy, dy])

    twice = {**case, "x": case["residual"]}
    train(), add_rms_norm(**twice)
    for _ in range(2):
        assert kinds(stand_ins, call=train) == kinds(stand_ins, call=add_rms_norm, **twice) == {"bare"}


@pytest.mark.compiler
def test_calls_at_hand_are_few_and_keep_no_tensor(stand_ins, monkeypatch):
    monkeypatch.setattr(quick, "MOST_CALLS", 3)
    case = given()
    for rows in (5, 6, 7, 8, 5, 6, 7, 8):
        rms_norm(draw(rows, HIDDEN, dtype=BF16), case["weight"])
        assert len(dispatch.quick.calls) <= 3
    kept = weakref.ref(case["weight"])
    del case
    assert kept() is None


@pytest.mark.compiler
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_results_belong_to_the_mode_of_the_call(stand_ins, mode):
    x, w = draw(2, 1, HIDDEN, dtype=BF16), torch.nn.Parameter(weight_of(HIDDEN, BF16))
    with mode():
        long, *short = (rms_norm(x, w) for _ in range(3))
    assert stand_ins.launches[-1][0] == "bare"
    told = [(y.is_inference(), y.requires_grad, y.stride()) for y in (long, *short)]
    assert len({*told}) == 1


@pytest.mark.compiler
def test_a_weight_of_another_width_is_refused_after_one_that_fits(stand_ins):
    case = given()
    rms_norm(**case), rms_norm(**case)
    with pytest.raises(ValueError, match="weight must have shape"):
        rms_norm(case["x"], weight_of(2 * HIDDEN, BF16))


@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def test_row_counts_count_by_their_bucket_and_eps_not_at_all():
    counts = (1, 2, 3, 4, 5, 7, 8, 9, 1000, 1024, 1025)
    keys = {rows: key_of(**given(rows)) for rows in counts}
    for rows in counts:
        for other in counts:
            assert (keys[rows] == keys[other]) == (rows_bucket(rows) == rows_bucket(other))
    assert key_of(**given(), eps=0.5) == key_of(**given())
    assert key_of(**given(), offset=1) == key_of(**given(), offset=1.0)


def test_other_devices_are_other_kinds():
    """Of tensors without memory: there is no second GPU here."""
    x, w = (torch.empty(shape, device="meta") for shape in ((ROWS, HIDDEN), (HIDDEN,)))
    here, there = key_of(torch.empty(ROWS, HIDDEN), torch.empty(HIDDEN)), key_of(x, w)
    assert len({here, there, key_of(x, torch.empty(HIDDEN)), key_of(torch.empty(ROWS, HIDDEN), w)}) == 4


@pytest.mark.parametrize(
    "change",
    [
        {"x": draw(2 * ROWS, HIDDEN, dtype=BF16)[::2]},
        {"x": draw(ROWS, 2 * HIDDEN, dtype=BF16)[:, :HIDDEN]},
        {"x": draw(HIDDEN, ROWS, dtype=BF16).t()},
        {"x": draw(0, HIDDEN)},
        {"x": torch.tensor(1.0)},
        {"x": [1.0]},
        {"x": type("Wrapped", (torch.Tensor,), {})(draw(ROWS, HIDDEN))},
        {"weight": weight_of(2 * HIDDEN, BF16)[::2]},
        {"weight": [1.0]},
        *({"eps": eps} for eps in (0, 1, True, -1e-6, float("nan"), float("inf"), None, torch.tensor(1e-6))),
        *({"offset": offset} for offset in (True, None, "1")),
        *({"casting": casting} for casting in (["fp32"],)),
        *({"policy": policy} for policy in (["fastest"],)),
    ],
    ids=lambda change: f"{next(iter(change))}",
)
def test_what_is_not_of_the_usual_kind_has_no_key(change):
    assert quick.find(**{**given(), "eps": 1e-6, "offset": 0.0, "casting": "fp32", "policy": None, **change}) == (
        None,
        None,
    )


def test_transforms_and_the_switch_have_no_key(monkeypatch):
    case, seen = given(), []
    torch.func.vmap(lambda x: seen.append(key_of(x, case["weight"])) or x)(draw(3, ROWS, HIDDEN, dtype=BF16))
    with forward_ad.dual_level():
        seen.append(key_of(**case))
    monkeypatch.setenv("TUNEGEN_DISABLE", "1")
    seen.append(key_of(**case))
    assert seen == [None] * 3
    monkeypatch.setenv("TUNEGEN_DISABLE", "0")
    assert key_of(**case) is not None


@pytest.mark.compiler
def test_a_result_goes_into_out_the_short_way(stand_ins):
    case, out = given(), torch.empty(ROWS, HIDDEN, dtype=BF16)
    rms_norm(**case)
    for into in (out, case["x"]):
        version = into._version
        ((way, _, _, _, arguments),) = ways(stand_ins, rms_norm, **case, out=into)
        assert way == "bare"
        assert into.data_ptr() in arguments
        assert into._version == version + 1
    for into in (misaligned(out), torch.empty(HIDDEN, ROWS, dtype=BF16).t()):
        assert kinds(stand_ins, **case, out=into) == {"official"}
    with pytest.raises(ValueError, match="out must have x's shape"):
        rms_norm(**case, out=out[1:])
    with pytest.raises(RuntimeError, match="a gradient is wanted"):
        rms_norm(**case, out=torch.empty_like(out, requires_grad=True))


@pytest.mark.compiler
@pytest.mark.parametrize("training", [False, True])
def test_the_operators_take_the_short_way(stand_ins, training):
    """In training there is an rstd, without it there is none; calls that differ in that alone are of two kinds."""
    case, ops = given(), (torch.ops.tunegen.rms_norm_inference, torch.ops.tunegen.rms_norm)
    of_call = case["x"], case["weight"], 1e-6, 0.0, "fp32", "fastest"
    calls = [(ops[0], of_call), (ops[1], (*of_call, True))]
    op, arguments = calls[training]
    (official,) = ways(stand_ins, op, *arguments)
    for _ in range(2):
        (bare,) = ways(stand_ins, op, *arguments)
        assert (official[0], bare[0]) == ("official", "bare")
        assert no_addresses([official]) == no_addresses([bare])
    found = op(*arguments)
    y = found[0] if training else found
    assert (y.shape, y.dtype) == (case["x"].shape, BF16)
    if training:
        assert (found[1].shape, found[1].dtype) == ((ROWS,), torch.float32)
    other, arguments = calls[not training]
    assert kinds(stand_ins, *arguments, call=other) == {"official"}


# add_rms_norm


def train_add(x, residual, weight, **named):
    """Forward and backward of leaves at the same addresses, with a gradient of the sum too."""
    x, residual = x.detach().requires_grad_(), residual.detach().requires_grad_()
    y, total = add_rms_norm(x, residual, weight.detach().requires_grad_(), **named)
    torch.autograd.backward([y, total], [torch.ones_like(y), torch.ones_like(y)])


def given_add(**more):
    return {**given(), "residual": draw(ROWS, HIDDEN, dtype=BF16, seed=1), **more}


@pytest.mark.compiler
@pytest.mark.parametrize("call", [add_rms_norm, train_add, add_rms_norm_])
@pytest.mark.parametrize(
    "case",
    [{}, {"sum_in_fp32": True}, {"offset": 1.0, "casting": "llama"}, {"policy": "invariant"}],
    ids=["usual", "sum in fp32", "offset llama", "invariant"],
)
def test_the_second_fused_call_launches_what_the_first_does(stand_ins, call, case):
    case = given_add(**case)
    if call is add_rms_norm_:  # which only looks for what a call has left
        add_rms_norm(**case)
    first = ways(stand_ins, call, **case)
    for _ in range(2):
        again = ways(stand_ins, call, **case)
        assert {one[0] for one in again} == {"bare"}
        assert no_addresses(again) == no_addresses(first)
    assert {one[0] for one in first} == {"bare" if call is add_rms_norm_ else "official"}
    inputs = {case[name].data_ptr() for name in ("x", "residual", "weight")}
    assert inputs <= {argument for one in again for argument in one[4]}


ADD_CHANGES = {
    **CHANGES,
    "residual": [draw(ROWS, HIDDEN).half(), draw(ROWS, HIDDEN, dtype=BF16).requires_grad_()],
    "sum_in_fp32": [True],
}


def add_key_of(x, residual, weight, eps=1e-6, offset=0.0, casting="fp32", policy=None, sum_in_fp32=False):
    contract = ADD_MODULE.Contract(eps, offset, casting, sum_in_fp32, policy)
    return ADD_MODULE._find(x, residual, weight, contract)[0]


def test_every_argument_of_the_fused_op_that_changes_the_answer_is_in_the_key():
    assert set(ADD_CHANGES) == set(inspect.signature(add_rms_norm).parameters)
    calls = [given_add(), *(given_add(**{name: value}) for name, values in ADD_CHANGES.items() for value in values)]
    usual = [call for call in calls if call["x"].shape == call["residual"].shape]
    keys = [add_key_of(**call) for call in usual]
    assert None not in keys
    assert len({*keys, key_of(**given())}) == len(keys) + 1, "nor is it rms_norm's"


@pytest.mark.parametrize(
    "change",
    [
        {"residual": draw(1, HIDDEN, dtype=BF16)},
        {"residual": draw(ROWS, 2 * HIDDEN, dtype=BF16)[:, ::2]},
        {"residual": type("Wrapped", (torch.Tensor,), {})(draw(ROWS, HIDDEN))},
        {"residual": None},
        {"x": None},
        *({"sum_in_fp32": value} for value in (1, None)),
    ],
    ids=lambda change: f"{next(iter(change))}",
)
def test_what_is_no_usual_fused_call_has_no_key(change):
    assert add_key_of(**given_add(**change)) is None


@pytest.mark.compiler
@pytest.mark.parametrize("which", ["x", "residual", "weight", "dsum"])
def test_misaligned_tensors_of_the_fused_op_take_the_long_way(stand_ins, which):
    case, leaf = given_add(), draw(ROWS, HIDDEN, dtype=BF16).requires_grad_()
    for _ in range(2):
        add_rms_norm(**case), train_add(**case)
    if which != "dsum":
        assert kinds(stand_ins, call=add_rms_norm, **{**case, which: misaligned(case[which])}) == {"official"}
        return
    y, total = add_rms_norm(leaf, case["residual"].clone().requires_grad_(), case["weight"].clone().requires_grad_())
    gradients = [torch.ones_like(y), misaligned(torch.ones_like(y))]
    assert {one[0] for one in ways(stand_ins, torch.autograd.backward, [y, total], gradients)} == {"official"}


@pytest.mark.compiler
def test_backward_with_and_without_a_gradient_of_the_sum_are_two_kinds(stand_ins):
    case = given_add()
    train_add(**case), train_add(**case)
    x, residual = (case[name].clone().requires_grad_() for name in ("x", "residual"))
    y, _ = add_rms_norm(x, residual, case["weight"].clone().requires_grad_())
    assert {one[0] for one in ways(stand_ins, y.backward, torch.ones_like(y))} == {"official"}


# What takes the long way although its kind is known


@pytest.mark.compiler
@pytest.mark.parametrize("which", ["x", "weight", "out"])
def test_a_sign_that_torch_has_only_noted_is_not_overlooked(stand_ins, which):
    """Kernels get a copy of such an input, the long way, and never write to such an output."""
    case = given(out=torch.empty(ROWS, HIDDEN, dtype=BF16))
    noted = {**case, which: torch._neg_view(case[which])}
    for _ in range(2):
        launched = ways(stand_ins, rms_norm, **noted)
        assert which == "out" or {one[0] for one in launched} == {"official"}
        assert case[which].data_ptr() not in {argument for one in launched for argument in one[4]}
        assert kinds(stand_ins, **case) <= {"official", "bare"}  # those at hand are not for such ones


@pytest.mark.compiler
def test_nor_is_that_of_a_gradient(stand_ins):
    x, w = given()["x"].requires_grad_(), given()["weight"].requires_grad_()
    dy = torch.ones_like(x)
    for one in (dy, dy, torch._neg_view(dy)):
        y = rms_norm(x, w)
        launched = ways(stand_ins, y.backward, one)
    assert {one[0] for one in launched} == {"official"}
    assert dy.data_ptr() not in {argument for one in launched for argument in one[4]}


@pytest.mark.compiler
@pytest.mark.parametrize("name", ["TensorGuards", "empty"])
def test_a_torch_without_what_it_takes_has_no_short_way(stand_ins, name, monkeypatch):
    monkeypatch.setattr(prepared, name, None)
    for _ in range(2):
        assert kinds(stand_ins, **given()) == {"official"}


@pytest.mark.compiler
@pytest.mark.parametrize("which", ["x", "weight"])
@pytest.mark.parametrize("call", [rms_norm, train])
def test_misaligned_views_get_their_own_kernel(stand_ins, which, call):
    case = given()
    call(**case), call(**case)
    odd = {**case, which: misaligned(case[which])}
    for _ in range(2):
        assert kinds(stand_ins, call=call, **odd) == {"official"}
        assert kinds(stand_ins, call=call, **case) == {"bare"}
    name = f"{which[0]}_ptr"
    assert False in {classes[name].divisible for _, classes in stand_ins.compiled if name in classes}


@pytest.mark.compiler
def test_a_misaligned_first_call_leaves_the_way_to_aligned_ones(stand_ins):
    case = given()
    seen = [kinds(stand_ins, **one) for one in ({**case, "x": misaligned(case["x"])}, case, case)]
    assert seen == [{"official"}, {"official"}, {"bare"}]


@pytest.mark.compiler
@pytest.mark.parametrize(("which", "shape"), [("y", (ROWS, HIDDEN)), ("rstd", (ROWS,)), ("dw", (HIDDEN,))])
def test_outputs_at_odd_addresses_take_the_long_way(stand_ins, which, shape, monkeypatch):
    """No allocator of torch returns such, but one that is plugged in may."""
    case = given()
    train(**case), train(**case)
    make = prepared.empty

    def odd(size, strides, dtype):
        made = make(size, strides, dtype)
        return misaligned(made) if size == shape else made

    monkeypatch.setattr(prepared, "empty", odd)
    assert "official" in kinds(stand_ins, call=train, **case)


@pytest.mark.compiler
def test_a_workspace_at_an_odd_address_takes_the_long_way(stand_ins):
    case = given(2048)
    train(**case), train(**case)
    (frame,) = [one for entry in dispatch.quick.values() for one in frames_of(entry) if one.workspace]
    assert kinds(stand_ins, call=train, **case) == {"bare"}
    frame.workspace = tuple(lambda make=make: misaligned(make()) for make in frame.workspace)
    assert kinds(stand_ins, call=train, **case) == {"bare", "official"}


@pytest.mark.compiler
def test_a_workspace_that_must_be_zero_is_made_so_in_each_call(stand_ins):
    variant, arguments = bound_variant(SPLIT, "rms_norm/forward_split_row_atomic"), arguments_of(SPLIT)
    variant(SPLIT.rows, arguments)
    tensors = {name: ArgumentClass("*fp32", True) for name in arguments if name.endswith("_ptr")}
    given = tensors | {"eps": ArgumentClass("fp32")}
    frame = prepared.Prepared(variant, given, {"x_row_stride": SPLIT.hidden}).frame(SPLIT.rows)
    wanted = [scratch.zero for scratch in variant.plan(SPLIT.rows).scratch.values()]
    assert True in wanted
    assert [make.func is prepared.zeros for make in frame.workspace] == wanted
    values = [arguments[name].data_ptr() for name in tensors]
    stand_ins.launches.clear()
    assert frame.run(*values, 1e-6)
    assert [one[0] for one in stand_ins.launches] == ["bare"] * len(variant.plan(SPLIT.rows).launches)


def frames_of(entry):
    return (entry.forward if isinstance(entry, quick.Kind) else entry).frames.values()


@pytest.mark.compiler
def test_strided_rows_take_the_long_way(stand_ins):
    case = given()
    rms_norm(**case), rms_norm(**case)
    wide = draw(ROWS, 2 * HIDDEN, dtype=BF16)[:, :HIDDEN]
    assert [kinds(stand_ins, **{**case, "x": x}) for x in (wide, wide, case["x"])] == [
        {"official"},
        {"official"},
        {"bare"},
    ]
    x = case["x"].clone().requires_grad_()
    y = rms_norm(x, case["weight"])
    y.backward(torch.ones_like(y)), rms_norm(x, case["weight"]).backward(torch.ones_like(y))
    assert stand_ins.launches[-1][0] == "bare"
    for dy in (torch.ones(1, HIDDEN, dtype=BF16).expand(ROWS, -1), torch.ones(ROWS, 2 * HIDDEN, dtype=BF16)[:, ::2]):
        y = rms_norm(x, case["weight"])
        assert {one[0] for one in ways(stand_ins, y.backward, dy)} == {"official"}


@pytest.mark.compiler
@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
@pytest.mark.parametrize("how", ["added", "in place of the chain"])
def test_hooks_of_triton_are_called(stand_ins, hook, how, monkeypatch):
    from triton import knobs

    case, seen = given(), []
    train(**case), train(**case)
    if how == "added":
        chain = type(getattr(knobs.runtime, hook))()
        chain.add(lambda *_: None)
        monkeypatch.setattr(knobs.runtime, hook, chain)
    else:
        monkeypatch.setattr(knobs.runtime, hook, lambda *_: None)
    wanted = getattr(knobs.runtime, hook)
    monkeypatch.setattr(CudaLauncher, "__call__", lambda self, *a: seen.append(a))
    assert ways(stand_ins, train, **case) == []
    assert len(seen) >= 2
    assert all(a[6 if hook == "launch_enter_hook" else 7] is wanted for a in [one[1:] for one in seen])


@pytest.mark.compiler
@pytest.mark.parametrize("name", ["global_scratch_size", "profile_scratch_size", "gsan_enabled"])
def test_kernels_that_want_memory_of_triton_take_the_long_way(stand_ins, name, monkeypatch):
    monkeypatch.setattr(CudaLauncher, name, 1, raising=False)
    assert [kinds(stand_ins, call=train, **given()) for _ in range(3)] == [{"official"}] * 3


@pytest.mark.compiler
def test_a_launcher_that_nobody_knows_takes_the_long_way(stand_ins, monkeypatch):
    monkeypatch.setattr(standins, "CudaLauncher", type("OtherLauncher", (CudaLauncher,), {}))
    assert [kinds(stand_ins, call=train, **given()) for _ in range(3)] == [{"official"}] * 3


@pytest.mark.compiler
def test_arguments_are_spread_as_triton_3_6_takes_them(stand_ins, monkeypatch):
    seen = []
    monkeypatch.delattr(CudaLauncher, "kernel_signature")
    monkeypatch.setattr(CudaLauncher, "launch", lambda self, *a: seen.append(a))
    case = given()
    (official,) = ways(stand_ins, rms_norm, **case)
    rms_norm(**case)
    (bare,) = seen
    assert bare[:5] == (*official[2], STREAM, official[1])
    assert bare[5:13] == (False, False, None, None, "metadata", None, None, None)
    assert no_addresses([(0, 0, 0, 0, bare[13:])]) == no_addresses([(0, 0, 0, 0, official[4])])


@pytest.mark.compiler
def test_nothing_official_is_launched_where_triton_is_not_on_the_list(stand_ins, monkeypatch):
    monkeypatch.setattr(launch, "launches_directly", lambda: False)
    monkeypatch.setattr(launch.Variant, "_launch_officially", lambda *_: stand_ins.launches.append(("kernel[grid]",)))
    assert [kinds(stand_ins, call=train, **given()) for _ in range(3)] == [{"kernel[grid]"}] * 3
    assert dispatch.quick == {}


@pytest.mark.compiler
@pytest.mark.parametrize("which", ["x", "weight"])
def test_what_a_transform_has_left_behind_counts_as_what_it_wraps(stand_ins, which):
    """A tensor that outlives its transform has no address; `Function.apply` takes off what is around it."""
    case, left = {**given(), "x": given()["x"].requires_grad_()}, []
    case["weight"].requires_grad_()
    rms_norm(**case), rms_norm(**case)
    torch.func.grad(lambda t: left.append(t) or t.float().sum())(case[which])
    odd = {**case, which: left[0]}
    assert torch._C._functorch.is_dead_tensor_wrapper(left[0])
    for _ in range(2):
        (launched,) = ways(stand_ins, rms_norm, **odd)
        assert case[which].data_ptr() in launched[4]
    y = rms_norm(**case)
    assert type(y.grad_fn) is OP_MODULE._RMSNorm._backward_cls
    y.backward(torch.ones_like(y))
    assert case["weight"].grad.shape == case["weight"].shape


# What is remembered, and for how long


@pytest.mark.compiler
def test_ten_thousand_row_counts_make_few_entries_and_compile_once_a_bucket(stand_ins):
    w = weight_of(16, BF16)
    x, compiled = torch.zeros(10_000, 16, dtype=BF16), {}
    for rows in range(1, 10_001):
        rms_norm(x[:rows], w)
        compiled.setdefault(rows_bucket(rows), len(stand_ins.compiled))
        assert compiled[rows_bucket(rows)] == len(stand_ins.compiled), "compiled behind the first of its bucket"
        stand_ins.launches.clear()
    assert len(dispatch.quick) == len(compiled) == 15
    assert max(len(kind.forward.frames) for kind in dispatch.quick.values()) <= prepared.MOST_ROW_COUNTS


@pytest.mark.compiler
def test_the_table_begins_anew_when_it_is_full(stand_ins, monkeypatch):
    monkeypatch.setattr(quick, "MOST_KINDS", 2)
    for hidden in (16, 32, 48):
        assert [kinds(stand_ins, **given(3, hidden)) for _ in range(2)] == [{"official"}, {"bare"}]
    assert len(dispatch.quick) == 1


@pytest.mark.compiler
def test_each_row_count_has_its_own_launch(stand_ins):
    """Of one bucket, in turns: the grid and M are those of the call."""
    w = weight_of(HIDDEN, BF16)
    for rows in (5, 6, 5, 8, 6, 5):
        (one,) = ways(stand_ins, rms_norm, draw(rows, HIDDEN, dtype=BF16), w)
        (again,) = ways(stand_ins, rms_norm, draw(rows, HIDDEN, dtype=BF16), w)
        assert again[0] == "bare"
        assert no_addresses([one]) == no_addresses([again])
        assert rows in again[4]


@pytest.mark.compiler
def test_launches_of_many_row_counts_share_their_code(stand_ins):
    """Compiling it takes longer than the call."""
    w = weight_of(HIDDEN, BF16)
    for rows in (4096, 3000, 2500):
        rms_norm(draw(rows, HIDDEN, dtype=BF16), w), rms_norm(draw(rows, HIDDEN, dtype=BF16), w)
    (kind,) = dispatch.quick.values()
    frames = kind.forward.frames.values()
    assert len(frames) == 3
    assert len({frame.launches.__code__ for frame in frames}) == 1


@pytest.mark.compiler
@pytest.mark.parametrize("end", ["forget", "demote"])
def test_choices_that_change_end_the_short_way(stand_ins, end):
    case = given()
    train(**case), train(**case)
    old, key = dispatch.quick, OP_MODULE.key_of("forward", case["x"], case["weight"], 0.0, "fp32", False)
    before = dispatch.choose(key)
    dispatch.forget() if end == "forget" else dispatch.demote(key, before, CompileError("it does not load"))
    assert dispatch.quick == {}
    assert old, "who has begun a call before leaves what it found there"
    first, second = (kinds(stand_ins, call=train, **case) for _ in range(2))
    assert "official" in first
    assert second == {"bare"}
    after = dispatch.choose(key)
    assert after is not before
    assert (after.config == before.config) == (end == "forget")


@pytest.mark.compiler
def test_a_call_that_began_before_forget_leaves_nothing_behind(stand_ins, monkeypatch):
    forward = OP_MODULE._forward

    def meanwhile(*arguments):
        dispatch.forget()
        return forward(*arguments)

    monkeypatch.setattr(OP_MODULE, "_forward", meanwhile)
    rms_norm(**given())
    assert dispatch.quick == {}


@pytest.mark.compiler
def test_backward_of_a_forward_before_forget_asks_again(stand_ins):
    case = given()
    train(**case), train(**case)
    x = case["x"].clone().requires_grad_()
    y = rms_norm(x, case["weight"])
    dispatch.forget()
    assert {one[0] for one in ways(stand_ins, y.backward, torch.ones_like(y))} == {"official"}


@pytest.mark.compiler
def test_a_kernel_that_is_not_loaded_is_left_to_the_long_way(stand_ins):
    case = given()
    rms_norm(**case), rms_norm(**case)
    ((kind,), before) = dispatch.quick.values(), len(stand_ins.compiled)
    kind.forward.frames.clear(), kind.forward.variant.compiled.clear(), dispatch.quick.calls.clear()
    assert [kinds(stand_ins, **case) for _ in range(2)] == [{"official"}, {"bare"}]
    assert len(stand_ins.compiled) == before + 1


@pytest.mark.compiler
def test_no_tensor_is_kept(stand_ins):
    case = given(1, 32768)
    seen = []
    for call in (rms_norm, train, rms_norm, train):
        x = case["x"].clone()
        call(x, case["weight"])
        seen.append(weakref.ref(x))
    del x
    gc.collect()
    assert [ref() for ref in seen] == [None] * 4


@pytest.mark.compiler
def test_another_current_device_is_switched_for_the_launch(stand_ins, monkeypatch):
    entered = []

    @contextlib.contextmanager
    def device(index):
        entered.append(index)
        stand_ins.device, before = index, stand_ins.device
        yield
        stand_ins.device = before

    case = given()
    rms_norm(**case), rms_norm(**case)
    monkeypatch.setattr(torch.cuda, "device", device)
    stand_ins.device = 1
    assert kinds(stand_ins, **case) == {"bare"}
    assert (entered, stand_ins.device) == ([0], 1)


@pytest.mark.compiler
def test_threads_may_call_at_once(stand_ins):
    """While another one forgets: each call launches one forward kernel, whichever way."""
    failed = []

    def calls(hidden):
        try:
            for rows in range(1, 60):
                rms_norm(draw(rows, hidden, dtype=BF16), weight_of(hidden, BF16))
                if rows % 20 == 0:
                    dispatch.forget()
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=calls, args=(hidden,)) for hidden in (32, 32, 48)]
    [thread.start() for thread in threads], [thread.join() for thread in threads]
    assert failed == []
    assert len(stand_ins.launches) == 3 * 59


@pytest.mark.compiler
def test_the_second_derivative_is_left_to_operators(stand_ins):
    case = given()
    train(**case), train(**case)
    x = case["x"].clone().requires_grad_()
    y = rms_norm(x, case["weight"])
    stand_ins.launches.clear()
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y), create_graph=True)
    assert dx.requires_grad
    assert stand_ins.launches == []


@pytest.mark.compiler
def test_the_launcher_of_this_triton_takes_what_is_given():
    """In this order: what its own `__call__` hands on, whose names are read in its source."""
    from triton.backends.nvidia.driver import CudaLauncher as Real

    tree = ast.parse(textwrap.dedent(inspect.getsource(Real.__call__)))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "self.launch"]
    (given,) = [[ast.unparse(argument) for argument in call.args] for call in calls]
    ahead = ["gridX", "gridY", "gridZ", "stream", "function", "self.launch_cooperative_grid", "self.launch_pdl"]
    scratch = ["global_scratch", "profile_scratch"]
    hooks = ["kernel_metadata", "launch_metadata", "launch_enter_hook", "launch_exit_hook"]
    described = ["self.arg_annotations", "self.kernel_signature"]
    made = inspect.getsource(Real.__init__)
    if "self.kernel_signature" in made:
        assert given[:-1] == ahead + hooks + scratch + described
        assert given[-1] in ("args", "kernel_args")
    else:  # as `CompiledKernel.run` is called: metadata, hooks, then the kernel's arguments
        assert given == [*ahead, *scratch, "*args"]


class Seen(TorchDispatchMode):
    """Notes the operators that it sees."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


class SeenUnguarded(Seen):
    """As those of selective checkpoints, which guards leave out."""

    @classmethod
    def ignore_compile_internals(cls):
        return True


@pytest.mark.compiler
@pytest.mark.parametrize("seen", [Seen, SeenUnguarded])
@pytest.mark.parametrize("call", [rms_norm, train])
def test_a_dispatch_mode_sees_the_outputs_made(stand_ins, call, seen):
    """Such as one that counts memory, or that replays what a checkpoint kept by the count of each operator."""
    case = given()
    for _ in range(2):
        call(**case)
    for _ in range(2):
        with seen() as mode:
            assert kinds(stand_ins, call=call, **case) == {"official"}
        assert mode.names.count("aten::empty") >= (1 if call is rms_norm else 3)
    assert kinds(stand_ins, call=call, **case) == {"bare"}, "what was at hand stays there"


@pytest.mark.compiler
def test_rstd_that_hooks_brought_back_in_another_dtype_is_not_read_as_it_was(stand_ins):
    """By hooks that keep what is saved in 16 bits: x and the weight were like those of the call at hand."""
    case = given()
    for _ in range(2):
        train(**case)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor.to(BF16)):
        for _ in range(3):
            ways_back = [one[0] for one in ways(stand_ins, train, **case)]
            assert ways_back == ["bare", *["official"] * (len(ways_back) - 1)]
    assert kinds(stand_ins, call=train, **case) == {"bare"}


@pytest.mark.compiler
def test_backward_under_vmap_is_answered_by_torch(stand_ins):
    """`torch.autograd.functional.jacobian(vectorize=True)` does that: such gradients have no address."""
    case = given(dtype=torch.float32)
    x, w = (case[name].requires_grad_() for name in ("x", "weight"))
    dy = draw(3, ROWS, HIDDEN)
    for _ in range(2):
        dx, dw = torch.autograd.grad(rms_norm(x, w), [x, w], dy, is_grads_batched=True)
        for found, one in zip(zip(dx, dw, strict=True), dy, strict=True):
            wanted = OP_MODULE.backward_by_torch(one, x.detach(), w.detach(), 1e-6, 0.0, "fp32", True)
            torch.testing.assert_close(found, wanted)
