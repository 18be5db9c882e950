"""The baseline `torch.compile` of the formula: right, and compiled once however many inputs it is timed on."""

from __future__ import annotations

import pytest
import torch

from tunegen.ahead import compiling_here
from tunegen.evaluate import compiled_form
from tunegen.model import Problem
from tunegen.ops import op_spec

SPEC = op_spec("rms_norm")
CPU = torch.device("cpu")


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_baseline_is_compiled_once_for_all_inputs(direction):
    """Once for each of up to 24 sets of inputs made 34 s of a sweep of 105 s (H200)."""
    problem = Problem("rms_norm", direction, 64, 8, "fp32", "fp32", weight_grad=direction == "backward")
    torch._dynamo.utils.counters.clear()
    bind = SPEC.compiled_call(problem)
    for seed in range(3):
        given = SPEC.inputs(problem, CPU, seed)
        got = bind(given)()
        want = SPEC.expected(problem, given, torch.float64)
        for name, tensor in got.items():
            assert torch.allclose(tensor.double(), want[name].value, rtol=1e-4, atol=1e-4)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_baselines_of_many_problems_stay_compiled():
    """They are compiled while another process searches, and timed afterwards; torch stops at eight of one function."""
    problems = [Problem("rms_norm", "forward", 64, rows, "fp32", "fp32") for rows in range(2, 12)]
    forms = [compiled_form(SPEC, problem, SPEC.inputs(problem, CPU, 0)) for problem in problems]
    torch._dynamo.utils.counters.clear()
    with compiling_here(), torch.compiler.set_stance("fail_on_recompile"):
        for problem, form in zip(problems, forms, strict=True):
            form(SPEC.inputs(problem, CPU, 1))()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 0
