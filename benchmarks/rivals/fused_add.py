"""The residual addition fused with the next norm, as an op that the gate and the bench can take: s = x + residual,
rounded to the dtype of x, and y = rms_norm(s). Backward gets the gradients dy and ds of both; x and the residual have
one gradient, dx."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tunegen.model import Problem
from tunegen.ops import op_spec
from tunegen.reference import DTYPES, Expected
from tunegen.spec import OpSpec
from tunegen.spec import Tensor as Shape

from .cells import ADD_NORM, NORM, Cell

_NORM = op_spec(NORM)


def _norm_of(problem: Problem) -> Problem:
    return replace(problem, op=NORM, residual=False)


def tensors(problem: Problem) -> dict[str, Shape]:
    """Those of the norm, the residual, the sum `s` and its gradient `ds`."""
    found = _NORM.tensors(_norm_of(problem))
    rows = found["x"]
    found["residual"] = rows
    if problem.direction == "forward":
        found["s"] = rows._replace(role="output")
    else:
        found["ds"] = rows
    return found


def inputs(problem: Problem, device: torch.device, seed: int) -> dict[str, Tensor]:
    """The norm's, and half of x backwards as the residual: of the same scale row by row, whatever that is."""
    norm = _norm_of(problem)
    found: dict[str, Tensor] = dict(_NORM.inputs(norm, device, seed))
    found["residual"] = found["x"].flip(-1) * 0.5
    if problem.direction == "backward":
        found["rstd"] = torch.rsqrt(_sum(found).to(DTYPES[norm.accumulate]).square().mean(-1) + 1e-6)
        found["ds"] = found["dy"].flip(0)
    return found


def _sum(given: dict[str, Tensor]) -> Tensor:
    """Rounded once: bf16 and fp16 tensors are added in fp32 by torch."""
    return given["x"] + given["residual"]


def expected(problem: Problem, given: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Expected]:
    """The norm's of the rounded sum; to dx comes the gradient of the sum."""
    total = _sum(given)
    found: dict[str, Expected] = _NORM.expected(_norm_of(problem), {**given, "x": total}, dtype)
    if problem.direction == "forward":
        return {**found, "s": Expected(total.to(dtype))}
    dx, ds = found["dx"], given["ds"].to(dtype)
    scale = None if dx.scale is None else dx.scale + ds.abs().mean(-1, keepdim=True)
    return {**found, "dx": Expected(dx.value + ds, dx.slack, scale)}


def _bytes_moved(problem: Problem) -> int:
    return Cell(ADD_NORM, problem.rows, problem.hidden, problem.direction, problem.x_dtype).bytes_moved


def _no_template(*_: Any) -> Any:
    raise NotImplementedError("tunegen has no template of the fused addition")


def spec_of(cell: Cell) -> OpSpec:
    """The op of a cell."""
    return _NORM if cell.op == NORM else SPEC


SPEC = replace(
    _NORM,
    name=ADD_NORM,
    tensors=tensors,
    flags=_no_template,
    bytes_moved=_bytes_moved,
    inputs=inputs,
    expected=expected,
    torch_call=_no_template,
    compiled_call=_no_template,
)
