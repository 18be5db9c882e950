"""What the pipeline knows of the residual add that is fused with the norm behind it: tensors, bytes, inputs, reference,
torch's own form. What the norm itself is lies in `rms_norm_spec`.

Backward starts from the sum as it is stored: it is rms_norm's, of the sum, with the gradient that comes in for the sum
added to dx, which is the gradient of x and of residual alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import reference
from ..model import DTYPE_BYTES, Config, Problem
from ..reference import DTYPES, Expected
from ..spec import Tensor as Shape
from . import rms_norm_spec as norm

Pair = tuple[Tensor, Tensor]


def tensors(problem: Problem) -> dict[str, Shape]:
    """rms_norm's, where x is the stored sum in backward; forward residual and sum, backward dsum, all like x."""
    found = norm.tensors(problem)
    row = found["x"].shape
    if problem.direction == "forward":
        return {**found, "residual": Shape(row, problem.x_dtype, "input"), "sum": Shape(row, problem.x_dtype, "output")}
    return {**found, "dsum": Shape(row, problem.x_dtype, "input")}


def scalars(problem: Problem) -> dict[str, int | float]:
    """Run-time numbers of contiguous tensors."""
    further = "residual_row_stride" if problem.direction == "forward" else "dsum_row_stride"
    return {**norm.scalars(problem), further: problem.hidden}


def nestable(problem: Problem) -> list[tuple[str, ...]]:
    """None: hidden states come with their rows at one distance, and others are copied."""
    return []


def flags(problem: Problem, config: Config, nested: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """rms_norm's Jinja flags, `residual`, and forward whether the norm reads the sum in fp32."""
    own: dict[str, Any] = {"residual": True}
    if problem.direction == "forward":
        own["sum_in_fp32"] = problem.sum_in_fp32
    return [{**base, **own} for base in norm.flags(problem, config, nested)]


def bytes_moved(problem: Problem) -> int:
    """Each (rows, hidden) tensor once, four streams in both directions. Weight and rstd are left out, as is usual."""
    return 4 * problem.rows * problem.hidden * DTYPE_BYTES[problem.x_dtype]


def inputs(problem: Problem, device: torch.device, seed: int) -> dict[str, Tensor]:
    """Random inputs whose sum is of rms_norm's kinds of rows: where that is a row of zeros, x and residual cancel. dsum
    is about as large as the other part of dx, so that neither hides the other."""
    found = norm.inputs(problem, device, seed)
    wide, total = DTYPES[problem.accumulate], found["x"].to(DTYPES[problem.accumulate])
    generator = torch.Generator(device).manual_seed(seed + 1)
    noise = torch.randn(total.shape, generator=generator, device=device, dtype=wide)
    if problem.direction == "backward":
        found["dsum"] = (noise * found["rstd"][:, None]).to(found["x"].dtype)
        return found
    size = total.square().mean(-1, keepdim=True).sqrt()
    found["residual"] = (noise * torch.where(size > 0, size, 1.0)).to(found["x"].dtype)
    found["x"] = (total - found["residual"].to(wide)).to(found["x"].dtype)
    return found


def expected(problem: Problem, given: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Expected]:
    """Outputs by name, computed in `dtype` and not rounded, but for the sum: that is rounded as the contract says."""
    return norm.in_steps(_expected_rows, problem, given, dtype)


def _expected_rows(problem: Problem, given: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Expected]:
    if problem.direction == "backward":
        found, dsum = norm.expected_rows(problem, given, dtype), given["dsum"].to(dtype)
        dx = found["dx"]
        assert dx.scale is not None
        scale = dx.scale + dsum.abs().mean(-1, keepdim=True)
        return {**found, "dx": Expected(dx.value + dsum, None, scale)}
    total = given["x"] + given["residual"]  # in x's own dtype: torch rounds once
    read = given["x"].to(dtype) + given["residual"].to(dtype) if problem.sum_in_fp32 else total
    return {**norm.expected_rows(problem, {**given, "x": read}, dtype), "sum": Expected(total.to(dtype))}


def formula(problem: Problem) -> Callable[[Tensor, Tensor, Tensor | None], Pair]:
    """The plain formula under the problem's contract, for `torch.compile`."""
    contract = {
        "offset": norm.OFFSET if problem.offset else 0.0,
        "casting": problem.casting,
        "sum_in_fp32": problem.sum_in_fp32,
    }
    return lambda x, residual, w: reference.add_rms_norm(x, residual, w, norm.EPS, **contract)  # type: ignore[arg-type]


def native(problem: Problem) -> Callable[[Tensor, Tensor, Tensor | None], Pair]:
    """An addition and `F.rms_norm` where their contract is the problem's, else the plain formula in eager operators."""
    if problem.sum_in_fp32 or not norm.torch_has(problem):
        return formula(problem)

    def op(x: Tensor, residual: Tensor, w: Tensor | None) -> Pair:
        total = x + residual
        return F.rms_norm(total, (problem.hidden,), w, norm.EPS), total

    return op


def torch_call(problem: Problem, given: dict[str, Tensor]) -> Callable[[], dict[str, Tensor]]:
    """torch's own operators; backward through autograd."""
    return _call(problem, given, native(problem))


def compiled_call(problem: Problem) -> Callable[[dict[str, Tensor]], Callable[[], dict[str, Tensor]]]:
    """`torch.compile` of the plain formula, shapes static, for any number of inputs; backward through autograd."""
    compiled = torch.compile(formula(problem), dynamic=False)
    return lambda given: _call(problem, given, compiled)


def _call(
    problem: Problem, given: dict[str, Tensor], op: Callable[[Tensor, Tensor, Tensor | None], Pair]
) -> Callable[[], dict[str, Tensor]]:
    x, w = given["x"], given.get("w")
    if problem.direction == "backward":  # x is the sum, so that nothing is left to add
        zeros = torch.zeros_like(x)
        gradients = [given["dy"], given["dsum"]]
        return norm.backward_call(problem, x, w, lambda x, w: list(op(x, zeros, w)), gradients)

    def forward() -> dict[str, Tensor]:
        with torch.no_grad():
            return dict(zip(("y", "sum"), op(x, given["residual"], w), strict=True))

    return forward


SPEC = replace(
    norm.SPEC,
    name="add_rms_norm",
    tensors=tensors,
    scalars=scalars,
    nestable=nestable,
    flags=flags,
    bytes_moved=bytes_moved,
    inputs=inputs,
    expected=expected,
    torch_call=torch_call,
    compiled_call=compiled_call,
)
