"""`warmup` and CUDA graphs (H17): a capturing call measures, compiles and loads nothing."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from helpers import OP_MODULE, assert_right, draw, exact, places, run, same_bits, weight_of

import tunegen
from tunegen import compile as compiling
from tunegen import dispatch, rms_norm
from tunegen.errors import CapturedError
from tunegen.model import Config
from tunegen.ops import notes

place = places("interpreter", "cuda")
BF16 = torch.bfloat16
CHOICE = dispatch.Choice  # the interpreter's place puts a function there


def warmed(place, hidden, rows, **more):
    return tunegen.warmup(hidden, rows, dtype=torch.float32, device=place.device, **more)


def test_warmup_tells_what_answers_and_later_calls_choose_nothing_new(place, monkeypatch):
    dispatch.forget()
    told = warmed(place, 100, [5, 6, 40])
    assert [(one.problem.direction, one.problem.rows, one.bucket) for one in told] == [
        (direction, rows, bucket)
        for rows, bucket in ((5, 8), (6, 8), (40, 64))
        for direction in ("forward", "backward")
    ]
    assert all(one.why.startswith("built-in default") for one in told)
    assert str(told).startswith("forward 5x100 fp32\n  answer")
    choices = dict(dispatch._choices)
    variants = {key: dict(choice._variants) for key, choice in choices.items()}
    monkeypatch.setattr(CHOICE, "_bind", lambda *_: pytest.fail("a variant that was not warmed"))
    x, w, dy = draw(7, 100, place=place), weight_of(100, place=place), draw(7, 100, seed=2, place=place)
    assert_right(run(x, w, dy), exact(x, w, dy), x, w, place)
    rms_norm(x, w)
    assert dispatch._choices == choices
    assert {key: choice._variants for key, choice in choices.items()} == variants


def test_warmup_of_one_direction_under_a_policy(place):
    dispatch.forget()
    (told,) = warmed(place, 100, 3, directions=["forward"], policy="invariant", weight=False, offset=1.0)
    assert (told.problem.policy, told.bucket, told.problem.weight_dtype) == ("invariant", 4096, None)
    (key,) = dispatch._choices
    assert key == OP_MODULE.key_of("forward", draw(9, 100, place=place), None, 1.0, "fp32", False, policy="invariant")


def test_warmup_without_a_gpu_says_so():
    (told,) = tunegen.warmup(64, directions=["backward"], weight_grad=False, device="cpu")
    assert (told.answer, told.why) == ("torch operators", "x is on cpu")
    assert not told.problem.weight_grad


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"rows": 0}, "rows must be one or several integers of at least 1, got 0"),
        ({"rows": []}, "rows must be"),
        ({"directions": "forward"}, "directions must be some of forward, backward, got 'forward'"),
        ({"hidden": 0}, "hidden must be a whole number of at least 1, got 0"),
        ({"hidden": torch.nn.Linear(1, 1)}, "hidden must be .* got Linear; of a model give the width of its norms"),
        ({"policy": "fast"}, "policy must be one of"),
        ({"casting": "none"}, "casting must be one of"),
    ],
    ids=str,
)
def test_warmup_refuses_what_is_no_call(wrong, told):
    with pytest.raises(ValueError, match=told):
        tunegen.warmup(**{"hidden": 64, "device": "cpu"} | wrong)


# A call that is captured


def test_h17_nothing_is_compiled_under_capture(monkeypatch):
    monkeypatch.setattr(compiling, "is_capturing", lambda: True)
    launch = SimpleNamespace(kernel=SimpleNamespace(__name__="forward_single_block"))
    with pytest.raises(CapturedError, match="forward_single_block was not loaded before the capture"):
        compiling.compile_launch(launch, Config("single_block"), {}, None)


@pytest.fixture
def capturing(monkeypatch):
    """Every kernel is new, and the stream is captured."""

    def refuse(*_):
        raise CapturedError("forward_single_block was not loaded before the capture of a CUDA graph")

    monkeypatch.setattr(CHOICE, "variant", refuse)
    monkeypatch.setattr(notes, "_told", set())


def test_h17_torch_answers_a_captured_call_of_a_new_kind_and_says_so_once(place, capturing, caplog):
    x, w = draw(5, 96, place=place), weight_of(96, place=place)
    for _ in range(2):
        assert same_bits(rms_norm(x, w), OP_MODULE.by_torch(x, w, 1e-6, 0.0, "fp32"))
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    told = "forward 8x96 fp32: forward_single_block was not loaded before the capture of a CUDA graph; "
    assert record.getMessage().startswith(f"{told}call tunegen.warmup(96, rows=8, ...)")
    dy = draw(5, 96, seed=2, place=place)
    assert_right(run(x, w, dy), exact(x, w, dy), x, w, place)
    assert dispatch.choose(OP_MODULE.key_of("forward", x, w, 0.0, "fp32", False)).config, "later calls may load it"


def test_h17_an_invariant_call_is_not_answered_by_torch_under_capture(place, capturing):
    with pytest.raises(CapturedError, match=r"call tunegen\.warmup\(96, rows=4096"):
        rms_norm(draw(5, 96, place=place), policy="invariant")


def test_h17_what_is_told_of_add_rms_norm_is_nothing_that_warmup_cannot_do(place, capturing, caplog):
    x, residual = draw(5, 96, place=place), draw(5, 96, seed=1, place=place)
    tunegen.add_rms_norm(x, residual)
    (record,) = caplog.records
    assert "capture of a CUDA graph; run the same call once, before; torch's own" in record.getMessage()


# On a GPU. Each test has a width of its own: no other has loaded its kernels.


def captured(x, w, dy, **norm):
    """A graph of forward and backward, and what it writes to."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = rms_norm(x, w, **norm)
        results = [y, *(torch.autograd.grad(y, (x, w), dy) if dy is not None else ())]
    return graph, results


def graph_inputs(rows, hidden):
    x, dy = (draw(rows, hidden, dtype=BF16, seed=seed).cuda() for seed in (0, 2))
    return x.requires_grad_(), weight_of(hidden, BF16).cuda().requires_grad_(), dy


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["fastest", "invariant"])
@pytest.mark.parametrize(("rows", "hidden"), [(1, 1152), (64, 1280), (3000, 1408)])
def test_h17_a_warm_call_is_captured_and_replays_its_eager_bits(rows, hidden, policy, caplog):
    tunegen.warmup(hidden, rows, policy=policy)
    x, w, dy = graph_inputs(rows, hidden)
    graph, results = captured(x, w, dy, policy=policy)
    for seed in (5, 6):
        with torch.no_grad():
            x.copy_(draw(rows, hidden, dtype=BF16, seed=seed))
            dy.copy_(draw(rows, hidden, dtype=BF16, seed=seed + 10))
        graph.replay()
        got = [t.detach().clone() for t in results]
        # Leaves of their own: those of the graph belong to the stream that it was captured on.
        leaves = x.detach().requires_grad_(), w.detach().requires_grad_()
        y = rms_norm(*leaves, policy=policy)
        eager = [y.detach(), *torch.autograd.grad(y, leaves, dy)]
        atomic = "atomic" in str(tunegen.explain(x, w, policy=policy)[1].answer)
        assert all(same_bits(a, b) for a, b in list(zip(got, eager, strict=True))[: 2 if atomic else 3])
    assert caplog.records == []


@pytest.mark.gpu
def test_h17_inference_replays_its_eager_bits():
    tunegen.warmup(1536, [1, 16], directions=["forward"])
    for rows in (1, 16):
        x, w, _ = (t.detach() for t in graph_inputs(rows, 1536))
        graph, (y,) = captured(x, w, None)
        x.copy_(draw(rows, 1536, dtype=BF16, seed=7))
        graph.replay()
        assert same_bits(y, rms_norm(x, w))


@pytest.mark.gpu
def test_h17_a_first_call_under_capture_gets_torch_and_one_warning_a_direction(caplog, monkeypatch):
    monkeypatch.setattr(notes, "_told", set())
    x, w, dy = graph_inputs(64, 1664)
    graph, results = captured(x, w, dy)
    told = [record.getMessage() for record in caplog.records if "tunegen.warmup(1664, rows=64" in record.getMessage()]
    assert len(told) == len(caplog.records) == 2
    with torch.no_grad():
        x.copy_(draw(64, 1664, dtype=BF16, seed=7))
    graph.replay()
    right = exact(x, w, dy)
    for got, want in zip(results, right, strict=True):
        assert float((got.detach().double() - want).abs().max()) <= 2**-7 * float(want.abs().max())
    assert rms_norm(x, w).isfinite().all()
    assert any(choice.config and choice._variants for choice in dispatch._choices.values())


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")  # so it is: what was to be captured raised
def test_h17_an_invariant_first_call_under_capture_is_refused():
    x, w, _ = (t.detach() for t in graph_inputs(64, 1792))
    with pytest.raises(CapturedError, match=r"tunegen\.warmup\(1792"):
        captured(x, w, None, policy="invariant")
    torch.cuda.synchronize()
    assert rms_norm(x, w, policy="invariant").isfinite().all()
