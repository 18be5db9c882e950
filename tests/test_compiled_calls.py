"""`rms_norm` inside `torch.compile` and `torch.export` (H16): no graph break, no tuning, an eager call's values."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import torch._dynamo.testing
from helpers import CPU, MARKS, Place, assert_right, draw, error, exact, run, same_bits, weight_of

import tunegen
from tunegen import dispatch, rms_norm
from tunegen.errors import TunegenError, VariableError
from tunegen.ops import registered

# Of torch 2.11, as its compiler loads.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")

BACKENDS = ("aot_eager", "inductor")
WHERE = [pytest.param(Place(name), marks=MARKS[name], id=name) for name in ("cpu", "cuda")]
HIDDEN = 48


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def operator(monkeypatch):
    monkeypatch.setattr(registered, "MODE", "op")


def norm(x, w, eps=1e-6, **contract):
    return rms_norm(x * 1, w, eps, **contract)


def compiled(backend, function=norm, **options):
    return torch.compile(function, backend=backend, fullgraph=True, **options)


def case(rows, place=CPU, dtype=torch.bfloat16, seed=0):
    x, dy = (
        draw(rows, HIDDEN, dtype=dtype, seed=seed, place=place),
        draw(rows, HIDDEN, dtype=dtype, seed=9, place=place),
    )
    return x, weight_of(HIDDEN, place=place), dy


def nodes(function, *arguments):
    """The names of the operators of the graph that is compiled, forward."""
    found = []

    def backend(graph, _):
        found.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    torch.compile(function, backend=backend, fullgraph=True)(*arguments)
    return found


@pytest.mark.parametrize("place", WHERE)
@pytest.mark.parametrize("backend", BACKENDS)
def test_h16_the_operator_gives_the_bits_of_eager_calls(place, backend, operator):
    """Rows 3, then 5 and 6, which compiles for any row count; x plain and every other column of one."""
    step = compiled(backend)
    for rows in (3, 5, 6):
        x, w, dy = case(rows, place)
        wide = draw(rows, 2 * HIDDEN, dtype=x.dtype, seed=rows, place=place)
        for given in (x, wide[:, ::2]):
            got, eager = run(given, w, dy, norm=step), run(given, w, dy, norm=norm)
            assert same_bits(got.y, eager.y)
            assert_right(got, exact(given, w, dy), x, w, place)
            if place.name == "cuda":  # on the CPU eager gradients are autograd's, these are the formula's
                assert all(map(same_bits, got, eager))
            with torch.no_grad():
                assert same_bits(step(given, w), norm(given, w))


@pytest.mark.parametrize("place", WHERE)
def test_h16_traced_calls_are_right(place):
    """The default: Inductor makes the kernel."""
    step = compiled("inductor")
    for rows in (3, 5):
        x, w, dy = case(rows, place, torch.float32)
        assert_right(run(x, w, dy, norm=step), exact(x, w, dy), x, w, place)


def test_h16_one_graph_serves_many_row_counts_and_eps(operator):
    counts = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    step = torch.compile(norm, backend=counts, fullgraph=True, dynamic=True)
    graphs = []
    for rows in (3, 5, 40):
        x, w, dy = case(rows)
        assert_right(run(x, w, dy, norm=step), exact(x, w, dy), x, w)
        graphs.append(counts.frame_count)
    assert graphs == graphs[:1] * 3
    for eps in (1e-5, 0.5):
        x, w, dy = case(3, dtype=torch.float32)
        assert_right(run(x, w, dy, eps, norm=step), exact(x, w, dy, eps), x, w)


@pytest.mark.parametrize("weight", [True, False], ids=["weight", "no weight"])
@pytest.mark.parametrize("x_grad", [True, False], ids=["x", "frozen x"])
def test_the_operator_computes_the_gradients_that_are_wanted(weight, x_grad, operator):
    x, w, dy = case(4, dtype=torch.float32)
    w = w.requires_grad_() if weight else None
    x.requires_grad_(x_grad)
    y = compiled("aot_eager")(x, w, casting="llama", offset=1.0)
    assert y.requires_grad == (x_grad or weight)
    if y.requires_grad:
        y.backward(dy)
    right = exact(x, w, dy, offset=1.0, casting="llama")
    assert error(y.detach(), right.y) < 1e-6
    for leaf, want in ((x, right.dx), (w, right.dw)):
        if leaf is None or not leaf.requires_grad:
            assert leaf is None or leaf.grad is None
        else:
            assert error(leaf.grad, want) < 1e-5


def test_what_a_call_becomes(monkeypatch):
    x, w, _ = case(3)
    seen = [nodes(norm, x, w)]
    with tunegen.policy("invariant"):
        seen.append(nodes(norm, x, w))
    seen.append(nodes(lambda x, w: norm(x, w, policy="deterministic"), x, w))
    monkeypatch.setattr(registered, "MODE", "op")
    seen.append(nodes(norm, x, w))
    assert [any("tunegen.rms_norm" in name for name in graph) for graph in seen] == [False, True, False, True]


def test_the_operator_is_that_of_inference_where_no_gradient_is_wanted(operator):
    """With and without a gradient by turns, each call has the graph of its kind."""
    x, w, dy = case(3, dtype=torch.float32)
    w.requires_grad_()
    with torch.no_grad():
        assert "tunegen.rms_norm_inference" in nodes(norm, x, w)
    assert "tunegen.rms_norm_inference" in nodes(norm, x, w.detach())
    assert "tunegen.rms_norm" in nodes(norm, x, w)
    torch._dynamo.reset()
    step = compiled("aot_eager")
    for _ in range(2):
        with torch.no_grad():
            y = step(x, w)
        assert not y.requires_grad
        again = step(x, w)
        assert same_bits(y, again.detach())
        (dw,) = torch.autograd.grad(again, w, dy)
        assert error(dw, exact(x, w, dy).dw) < 1e-5


def test_a_graph_is_compiled_again_under_another_policy():
    counts = torch._dynamo.testing.CompileCounter()
    step = torch.compile(lambda x, w: rms_norm(x, w), backend=counts, fullgraph=True)
    x, w, _ = case(3)
    for policy, graphs in (("fastest", 1), ("invariant", 2), ("fastest", 2), ("invariant", 2)):
        with tunegen.policy(policy):
            step(x, w)
        assert counts.frame_count == graphs


COMPILED_CALL = """
import torch
from tunegen import rms_norm
torch.compile(lambda x: rms_norm(x), backend="eager")(torch.ones(2, 8))
"""


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({"TUNEGEN_COMPILE": "kernel"}, "TUNEGEN_COMPILE must be one of trace, op, got 'kernel'"),
        ({"TUNEGEN_POLICY": "fast"}, "TUNEGEN_POLICY must be one of fastest, deterministic, invariant, got 'fast'"),
    ],
)
def test_an_unknown_value_of_a_variable_ends_a_compiled_call(variables, told):
    """Raised while Dynamo traces, an error makes it run the call eagerly: it was never seen."""
    command = [sys.executable, "-c", COMPILED_CALL]
    done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    *_, error = [line for line in done.stderr.splitlines() if "Error: " in line]
    assert error.endswith(f"Error: the variable {told}")


def test_an_unknown_mode_is_an_error_of_tunegen_and_a_value_error(monkeypatch):
    monkeypatch.setenv("TUNEGEN_COMPILE", "kernel")
    with pytest.raises(VariableError) as caught:
        registered._mode()
    assert isinstance(caught.value, TunegenError)
    assert isinstance(caught.value, ValueError)
    for value in ("", *registered.MODES):
        monkeypatch.setenv("TUNEGEN_COMPILE", value)
        assert registered._mode() == (value or "trace")


def test_nothing_is_looked_up_while_tracing(operator, monkeypatch):
    monkeypatch.setattr(dispatch, "choose", lambda key: pytest.fail("a look-up"))
    x, w, _ = case(3)
    assert nodes(norm, x.requires_grad_(), w.requires_grad_())


def test_export_with_any_number_of_rows(operator):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = tunegen.RMSNorm(HIDDEN)

        def forward(self, x):
            return self.norm(x)

    model = Model()
    x, _, _ = case(4, dtype=torch.float32)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("rows")},))
    assert "torch.ops.tunegen.rms_norm.default" in program.graph_module.code
    other, _, _ = case(7, dtype=torch.float32)
    assert same_bits(program.module()(other), model(other))


def test_the_operators_pass_torchs_own_checks():
    """Schema, fakes, autograd registration and dynamic shapes, as torch.library judges them."""
    x, w, dy = case(4, dtype=torch.float32)
    contract = (1e-6, 0.0, "fp32", "fastest")
    x.requires_grad_(), w.requires_grad_()
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.tunegen.rms_norm.default, (x, w, *contract, True), test_utils=checks)
    torch.library.opcheck(
        torch.ops.tunegen.rms_norm_inference.default,
        (x.detach(), w.detach(), *contract),
        test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"),
    )
    torch.library.opcheck(
        torch.ops.tunegen.rms_norm_backward.default,
        (dy, x.detach(), w.detach(), torch.ones(4), *contract, True),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_the_operator_has_a_second_derivative():
    x, w = draw(3, 8).requires_grad_(), weight_of(8).requires_grad_()

    def penalty(function, x, w):
        (g,) = torch.autograd.grad(function(x, w).pow(2).sum(), x, create_graph=True)
        return torch.autograd.grad(g.pow(2).sum(), (x, w))

    found = penalty(lambda x, w: torch.ops.tunegen.rms_norm(x, w, 1e-6, 0.0, "fp32", "fastest", True)[0], x, w)
    for got, want in zip(found, penalty(rms_norm, x, w), strict=True):
        assert error(got, want.double()) < 1e-5
