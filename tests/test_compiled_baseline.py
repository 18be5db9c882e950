"""The baseline `torch.compile` of the formula: right, and compiled once however many inputs it is timed on."""

from __future__ import annotations

import pytest
import torch

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
