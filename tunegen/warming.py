"""`warmup`: what the first call of a kind would do, done ahead: before a CUDA graph is captured, or traffic comes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

import torch
from torch import Tensor

from . import paths
from .dispatch import policy_of, silicon_of
from .explanation import Explanation, Explanations, explain_problem
from .key import Key
from .model import DIRECTIONS, rows_bucket
from .ops import rms_norm as op
from .ops.arguments import check
from .policies import INVARIANT
from .reference import accumulate_dtype


def warmup(
    hidden: int,
    rows: int | Sequence[int] = 1,
    *,
    dtype: torch.dtype = torch.bfloat16,
    weight_dtype: torch.dtype | None = None,
    weight: bool = True,
    weight_grad: bool = True,
    directions: Sequence[str] = DIRECTIONS,
    offset: float = 0.0,
    casting: str = "fp32",
    policy: str | None = None,
    device: torch.device | str | int | None = None,
) -> Explanations:
    """Choose, compile, load and launch once what answers `rms_norm` of x (rows, hidden): a later call does none of it,
    and may be captured in a CUDA graph.

    Args:
        hidden: N.
        rows: M, one or several; row counts with the same next power of two share their kernels.
        dtype, weight_dtype: of x, and of the weight if that is another; `weight=False` for none.
        weight_grad: False for a frozen weight.
        directions: "forward" and "backward", or one of them.
        offset, casting, policy: as in `rms_norm`.
        device: a CUDA device, by default the current one.

    Returns:
        What answers, row count by row count, forward first; printed, it is text for people. One row of memory is used.
        Kernels are those of contiguous, 16-byte aligned tensors; a call with another view loads its own.

    Raises:
        TypeError, ValueError: as `rms_norm`, and for row counts or directions that are none.
    """
    _check_width(hidden)
    x = torch.zeros(1, hidden, dtype=dtype, device=device or ("cuda" if torch.cuda.is_available() else "cpu"))
    w = torch.zeros(hidden, dtype=weight_dtype or dtype, device=x.device) if weight else None
    check(x, w, 1e-6, offset, casting)
    return Explanations(_each(_counts(rows), _checked(directions), x, w, weight_grad, offset, casting, policy))


def _check_width(hidden: object) -> None:
    if isinstance(hidden, bool) or not isinstance(hidden, int) or hidden < 1:
        given = hidden if isinstance(hidden, int) else type(hidden).__name__
        width = "of a model give the width of its norms, such as model.config.hidden_size"
        raise ValueError(f"hidden must be a whole number of at least 1, got {given}; {width}")


def _counts(rows: int | Sequence[int]) -> list[int]:
    counts = [rows] if isinstance(rows, int) else list(rows)
    if not counts or not all(isinstance(count, int) and count >= 1 for count in counts):
        raise ValueError(f"rows must be one or several integers of at least 1, got {rows!r}")
    return list(dict.fromkeys(counts))


def _checked(directions: Sequence[str]) -> list[str]:
    if isinstance(directions, str) or not directions or not set(directions) <= set(DIRECTIONS):
        raise ValueError(f"directions must be some of {', '.join(DIRECTIONS)}, got {directions!r}")
    return [direction for direction in DIRECTIONS if direction in directions]


def _each(
    counts: list[int],
    directions: list[str],
    x: Tensor,
    weight: Tensor | None,
    weight_grad: bool,
    offset: float,
    casting: str,
    policy: str | None,
) -> Iterator[Explanation]:
    policy = policy_of(policy)
    for count, direction in product(counts, directions):
        wanted = weight is not None and weight_grad and direction == "backward"
        key = op.key_of(direction, x, weight, offset, casting, wanted, policy=policy)
        key = key if policy == INVARIANT else key._replace(rows=rows_bucket(count))
        yield _warmed(key, count, x, weight, offset, training="backward" in directions)


def _warmed(key: Key, rows: int, x: Tensor, weight: Tensor | None, offset: float, training: bool) -> Explanation:
    problem = replace(key.problem(), rows=rows)
    if not op.has_kernels(x, weight):
        return Explanation(problem, key.rows, "torch operators", op.no_kernels_because(x, weight))
    rstd = torch.zeros(1, dtype=accumulate_dtype(x), device=x.device)
    tensors: dict[str, Tensor | None] = {"x": x, "w": weight}
    if key.direction == "backward":
        dw = torch.zeros_like(weight) if weight is not None and key.weight_grad else None
        tensors |= {"dy": torch.zeros_like(x), "rstd": rstd, "dx": torch.zeros_like(x), "dw": dw}
        op.launch(key, tensors, 1e-6, offset, False)
    else:
        # A call under "invariant" saves rstd always, another one where a gradient is wanted.
        for save in dict.fromkeys((key.policy == INVARIANT, training or key.policy == INVARIANT)):
            op.launch(key, {**tensors, "y": torch.zeros_like(x), "rstd": rstd if save else None}, 1e-6, offset, save)
    return explain_problem(paths.database(), problem, silicon_of(key.device), key)
