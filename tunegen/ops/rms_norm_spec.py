"""What the pipeline knows of RMSNorm: its tensors, bytes, inputs, reference, and torch's own forms of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import reference
from ..model import DTYPE_BYTES, Config, Problem
from ..reference import DTYPES, Expected
from ..spec import OpSpec
from ..spec import Tensor as Shape

EPS = 1e-6
RSTD_FLOOR_ULP = 4.0
"""rstd never leaves the op. CUDA's rsqrtf alone may be 2 ulp off, and half the relative error of the sum comes on
top: an order of addition that torch happens not to use is no fault. A bf16 rstd is off by thousands."""

CHUNK_ELEMENTS = 1 << 24
"""Elements whose reference is computed at a time: 128 MB a temporary in float64."""

OFFSET = 1.0
"""The value that is tuned with where a problem has an offset (Gemma's); the timing does not depend on it."""


def tensors(problem: Problem) -> dict[str, Shape]:
    """x, dy, y, dx are (rows, hidden) in x's dtype; w, dw (hidden) in the weight's; rstd (rows) in the accumulation
    dtype."""
    rows, hidden = problem.rows, problem.hidden
    forward = problem.direction == "forward"
    found = {"x": Shape((rows, hidden), problem.x_dtype, "input")}
    if problem.weight_dtype:
        found["w"] = Shape((hidden,), problem.weight_dtype, "input")
    if forward:
        found["y"] = Shape((rows, hidden), problem.x_dtype, "output")
    else:
        found["dy"] = Shape((rows, hidden), problem.x_dtype, "input")
        found["dx"] = Shape((rows, hidden), problem.x_dtype, "output")
    found["rstd"] = Shape((rows,), problem.accumulate, "output" if forward else "input", RSTD_FLOOR_ULP)
    if problem.weight_grad and problem.weight_dtype:
        found["dw"] = Shape((hidden,), problem.weight_dtype, "output")
    return found


def scalars(problem: Problem) -> dict[str, int | float]:
    """Run-time numbers of contiguous tensors."""
    strides = ("x_row_stride",) if problem.direction == "forward" else ("x_row_stride", "dy_row_stride")
    return {"M": problem.rows, "eps": EPS, **dict.fromkeys(strides, problem.hidden)}


def constants(problem: Problem, offset: float = OFFSET) -> dict[str, int | float]:
    """N, and OFFSET where something is added to the weight."""
    return {"N": problem.hidden, **({"OFFSET": offset} if problem.offset else {})}


def nestable(problem: Problem) -> list[tuple[str, ...]]:
    """The tensors whose rows may lie at no common distance; the last entry is all of them."""
    return [("x",)] if problem.direction == "forward" else [("dy",), ("x",), ("x", "dy")]


def flags(problem: Problem, config: Config, nested: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """Jinja flags of the renderings that are timed: forward without and with rstd saved for backward."""
    base: dict[str, Any] = {
        "weight": problem.weight_dtype is not None,
        "casting": problem.casting,
        "offset": problem.offset,
        "acc": {"fp32": "tl.float32", "fp64": "tl.float64"}[problem.accumulate],
        "acc_name": problem.accumulate,
        "nested": nested,
        **config.structure,
    }
    if problem.direction == "forward":
        return [{**base, "save_rstd": False}, {**base, "save_rstd": True}]
    return [{**base, "accumulate_dw": False}]


def bytes_moved(problem: Problem) -> int:
    """Each (rows, hidden) tensor once: two streams forward, three backward. Weight and rstd are left out, as is
    usual."""
    streams = 2 if problem.direction == "forward" else 3
    return streams * problem.rows * problem.hidden * DTYPE_BYTES[problem.x_dtype]


ROW_SCALES = (1.0, EPS**0.5, 1.0, 1.0, 512.0, 1.0, 1.0, 0.0)
"""Kinds of rows by their scale. Beside ordinary ones: rows whose mean square is as small as eps (a wrong eps shows),
rows whose squares overflow fp16, and rows of zeros."""
PEAK_LAST, PEAK_ANYWHERE, ALONG_X = 2, 3, 5
"""Kinds of rows where one element, the last or any, holds a 17th of the sum of squares, however wide the row (reading
only part of it shows); and where an eighth of xhat is added to dy (leaving out the mean term of dx shows)."""


def inputs(problem: Problem, device: torch.device, seed: int) -> dict[str, Tensor]:
    """Random inputs; row i is of kind (i + seed) % 8, see ROW_SCALES. Rows also differ in scale by up to 16, so that
    rstd visits several binades, and dy is never constant."""
    generator = torch.Generator(device).manual_seed(seed)
    wide = DTYPES[problem.accumulate]

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=wide)

    rows, hidden = problem.rows, problem.hidden
    kind = (torch.arange(rows, device=device) + seed) % len(ROW_SCALES)
    binades = torch.exp2(4 * torch.rand((rows, 1), generator=generator, device=device, dtype=wide) - 2)
    scale = binades * torch.tensor(ROW_SCALES, device=device, dtype=wide)[kind][:, None]
    x = draw(rows, hidden) * scale
    peak = torch.randint(hidden, (rows, 1), generator=generator, device=device)
    peak[kind == PEAK_LAST] = hidden - 1
    peaked = ((kind == PEAK_LAST) | (kind == PEAK_ANYWHERE))[:, None]
    x.scatter_(1, peak, torch.where(peaked, scale * hidden**0.5 / 4, x.gather(1, peak)))
    found = {"x": x.to(DTYPES[problem.x_dtype])}
    if problem.weight_dtype:
        center = 0.0 if problem.offset else 1.0
        found["w"] = (center + 0.25 * draw(hidden)).to(DTYPES[problem.weight_dtype])
    if problem.direction == "backward":
        found["rstd"] = torch.rsqrt(found["x"].to(wide).square().mean(-1) + EPS)
        # Of either sign, so that dw stays a sum of what cancels.
        share = torch.where(kind == ALONG_X, 0.125 * found["rstd"] * draw(rows).sign(), 0.0)
        found["dy"] = draw(rows, hidden).addcmul_(x, share[:, None]).to(DTYPES[problem.x_dtype])
    return found


SomeRows = Callable[[Problem, dict[str, Tensor], torch.dtype], dict[str, Expected]]
"""The outputs of some rows, by name, computed in a dtype."""


def expected(problem: Problem, given: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Expected]:
    """Outputs by name, computed in `dtype` and not rounded."""
    return in_steps(expected_rows, problem, given, dtype)


def in_steps(
    some_rows: SomeRows, problem: Problem, given: dict[str, Tensor], dtype: torch.dtype
) -> dict[str, Expected]:
    """`some_rows` of all rows, some at a time; dw is a sum over them."""
    step = max(1, CHUNK_ELEMENTS // problem.hidden)
    whole: dict[str, Expected] = {}
    for start in range(0, problem.rows, step):
        rows = {name: t if name == "w" else t[start : start + step] for name, t in given.items()}
        for name, part in some_rows(problem, rows, dtype).items():
            if name == "dw":
                whole[name] = _sum(whole[name], part) if start else part
            else:
                whole.setdefault(name, _room(part, problem.rows))
                _put(whole[name], part, start)
    return whole


def _sum(one: Expected, other: Expected) -> Expected:
    """dw is a sum over rows."""
    slack = None if one.slack is None or other.slack is None else one.slack + other.slack
    return Expected(one.value + other.value, slack)


def _room(part: Expected, rows: int) -> Expected:
    """Memory for all rows of what `part` is some rows of: joined in the end, the parts would take it twice."""
    value, slack, scale = (None if t is None else t.new_empty(rows, *t.shape[1:]) for t in part)
    assert value is not None
    return Expected(value, slack, scale)


def _put(whole: Expected, part: Expected, start: int) -> None:
    for target, source in zip(whole, part, strict=True):
        if target is not None and source is not None:
            target[start : start + len(source)] = source


def expected_rows(problem: Problem, given: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Expected]:
    """The outputs of some rows."""
    x = given["x"].to(dtype)
    weight = given.get("w")
    offset = OFFSET if problem.offset else 0.0
    # fp32 and fp64 x-hats are in the accumulation dtype already: there is nothing to round.
    round_to = DTYPES[problem.x_dtype] if problem.casting == "llama" and problem.x_dtype in ("bf16", "fp16") else None
    if problem.direction == "forward":
        y, rstd, slack = reference.forward(x, weight, EPS, offset, round_to)
        per_row = y.abs().mean(-1, keepdim=True)
        return {"y": Expected(y, slack if round_to else None, per_row), "rstd": Expected(rstd, None, rstd)}
    dy = given["dy"].to(dtype)
    dx, dw = reference.backward(dy, x, weight, EPS, offset, round_to)
    # The first term of dx: in a row of one element the second is as large, and all but an eps of both cancels.
    term = dy if weight is None else dy * (weight.to(dtype) + offset)
    found = {"dx": Expected(dx, None, (term.abs().mean(-1) * given["rstd"])[:, None])}
    if "dw" in tensors(problem):
        found["dw"] = Expected(dw, reference.weight_slack(dy, x, EPS, round_to))
    return found


def formula(problem: Problem) -> Callable[[Tensor, Tensor | None], Tensor]:
    """The plain formula under the problem's contract, for `torch.compile`."""
    offset = OFFSET if problem.offset else 0.0
    return lambda x, w: reference.rms_norm(x, w, EPS, offset=offset, casting=problem.casting)


def torch_has(problem: Problem) -> bool:
    """Whether the contract of `F.rms_norm` is the problem's."""
    return problem.casting == "fp32" and not problem.offset and problem.weight_dtype in (None, problem.x_dtype)


def native(problem: Problem) -> Callable[[Tensor, Tensor | None], Tensor]:
    """`F.rms_norm` where its contract is the problem's, else the plain formula in eager operators."""
    if not torch_has(problem):
        return formula(problem)
    return lambda x, w: F.rms_norm(x, (problem.hidden,), w, EPS)


def torch_call(problem: Problem, given: dict[str, Tensor]) -> Callable[[], dict[str, Tensor]]:
    """torch's own op; backward through autograd."""
    return _call(problem, given, native(problem))


def compiled_call(problem: Problem) -> Callable[[dict[str, Tensor]], Callable[[], dict[str, Tensor]]]:
    """`torch.compile` of the plain formula, shapes static, for any number of inputs; backward through autograd."""
    compiled = torch.compile(formula(problem), dynamic=False)
    return lambda given: _call(problem, given, compiled)


def _call(
    problem: Problem, given: dict[str, Tensor], norm: Callable[[Tensor, Tensor | None], Tensor]
) -> Callable[[], dict[str, Tensor]]:
    x, w = given["x"], given.get("w")
    if problem.direction == "forward":

        def forward() -> dict[str, Tensor]:
            with torch.no_grad():
                return {"y": norm(x, w)}

        return forward
    return backward_call(problem, x, w, lambda x, w: [norm(x, w)], [given["dy"]])


def backward_call(
    problem: Problem,
    x: Tensor,
    w: Tensor | None,
    op: Callable[[Tensor, Tensor | None], list[Tensor]],
    gradients: list[Tensor],
) -> Callable[[], dict[str, Tensor]]:
    """What computes dx and dw by autograd, from the gradients of all that `op` returns."""
    x = x.detach().requires_grad_()
    wanted = {"dx": x}
    if w is not None:
        w = w.detach().requires_grad_(problem.weight_grad)
        if problem.weight_grad:
            wanted["dw"] = w
    results = op(x, w)

    def backward() -> dict[str, Tensor]:
        grads = torch.autograd.grad(results, list(wanted.values()), gradients, retain_graph=True)
        return dict(zip(wanted, grads, strict=True))

    return backward


SPEC = OpSpec(
    name="rms_norm",
    tensors=tensors,
    scalars=scalars,
    constants=constants,
    nestable=nestable,
    flags=flags,
    bytes_moved=bytes_moved,
    inputs=inputs,
    expected=expected,
    torch_call=torch_call,
    compiled_call=compiled_call,
)
