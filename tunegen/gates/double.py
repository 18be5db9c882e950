"""The first gate: gradients and values in float64.

gradcheck compares dx and dw with differences of y, so a norm that is consistently wrong, such as one with another eps,
passes it. Its values therefore stand beside the formula too, also where the mean square is of eps's size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError, gradcheck

from .checks import Check, Norm, Say, silent

GATE = "float64"
EPS = 1e-6
LARGEST_ERROR = 1e-13
"""Of y, dx and dw, relative. Sums of at most 33 elements in float64 stay below 4e-15; one rounding to fp32 is 6e-8."""

SCALES = (1.0, 1e-3)
"""Of x; the mean square is about EPS at the second."""

ROWS = 18
"""More than one block of 16 where a kernel sums dw block by block."""


class Case(NamedTuple):
    """One layout of x, normal numbers from `generator`; `weight` says whether there is one."""

    name: str
    x: Tensor
    weight: bool = True


def cases(seed: int, device: torch.device) -> list[Case]:
    """Shapes that models have, and those that implementations trip over."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device)

    return [
        Case("rows", draw(ROWS, 8)),
        Case("rows of an odd width", draw(3, 33)),
        Case("hidden states", draw(2, 3, 8)),
        Case("heads, 4-D", draw(2, 2, 3, 4)),
        Case("transposed heads", draw(2, 3, 2, 5).transpose(1, 2)),
        Case("every other column", draw(3, 16)[:, ::2]),
        Case("one vector", draw(7)),
        Case("one column", draw(3, 1)),
        Case("rows without a weight", draw(3, 8), weight=False),
        Case("transposed heads without a weight", draw(2, 3, 2, 4).transpose(1, 2), weight=False),
    ]


def check(norm: Norm, seed: int, device: torch.device, say: Say = silent) -> list[Check]:
    """Two checks: how many cases fail gradcheck, and the largest error against the formula."""
    found, failed = cases(seed, device), {}
    for number, case in enumerate(found, 1):
        say(f"gradcheck of {case.name}, case {number} of {len(found)}")
        if message := _gradcheck(norm, case, seed):
            failed[case.name] = message
    say(f"y, dx and dw of {len(found)} cases against the formula")
    errors = {
        f"{case.name}, x of size {scale:g}": _error(norm, case, scale, seed) for case in found for scale in SCALES
    }
    worst = max(errors, key=lambda name: (errors[name] != errors[name], errors[name]))
    first = next(iter(failed.items()), None)
    return [
        Check(GATE, f"gradcheck: failed of {len(found)} cases", len(failed), 0, ": ".join(first) if first else ""),
        Check(GATE, "y, dx, dw against the formula: relative error", errors[worst], LARGEST_ERROR, worst),
    ]


def _weight(case: Case, seed: int) -> Tensor | None:
    if not case.weight:
        return None
    generator = torch.Generator().manual_seed(seed + 1)
    return (1 + 0.3 * torch.randn(case.x.shape[-1], generator=generator, dtype=torch.float64)).to(case.x.device)


def _gradcheck(norm: Norm, case: Case, seed: int) -> str:
    """The first line of what gradcheck objects to, "" if nothing."""
    weight = _weight(case, seed)
    inputs = [case.x.detach().requires_grad_(), *([] if weight is None else [weight.requires_grad_()])]

    def call(x: Tensor, w: Tensor | None = None) -> Tensor:
        return norm(x, w, EPS)

    try:
        # Differences over 1e-6 are right to about 1e-9; sums by atomics may differ in the last bits from call to call.
        gradcheck(call, inputs, eps=1e-6, atol=1e-8, rtol=1e-6, nondet_tol=1e-12)
    except GradcheckError as error:
        return str(error).strip().splitlines()[0].rstrip(",")
    return ""


def _error(norm: Norm, case: Case, scale: float, seed: int) -> float:
    """The largest `relative` error of y, dx and dw; NaN if any element is. Where terms of dx cancel, as in a row of one
    element, its error is counted against those terms."""
    weight, x = _weight(case, seed), scale * case.x
    generator = torch.Generator().manual_seed(seed + 2)
    dy = torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.device)
    got, right = (_results(f, x, weight, dy) for f in (norm, formula))
    terms = dy * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * (1.0 if weight is None else weight)
    sizes = (right[0], terms, *right[2:])
    errors = [float(relative(a, b, size).max()) for a, b, size in zip(got, right, sizes, strict=True)]
    return max(errors, key=lambda error: (error != error, error))


def _results(norm: Norm, x: Tensor, weight: Tensor | None, dy: Tensor) -> list[Tensor]:
    x = x.detach().requires_grad_()
    w = None if weight is None else weight.detach().requires_grad_()
    y = norm(x, w, EPS)
    torch.autograd.backward(y, dy)
    return [y.detach(), *(gradient(t) for t in (x, w) if t is not None)]


def gradient(tensor: Tensor) -> Tensor:
    """What backward left in a leaf; zeros where it left nothing."""
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


def formula(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """RMSNorm as the papers print it, in the dtype at hand."""
    xhat = x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)
    return xhat if weight is None else xhat * weight


def relative(got: Tensor, right: Tensor, size: Tensor | None = None) -> Tensor:
    """|got - right| / (|right| + mean |size| over the last axis), of right's shape and in its dtype; `size` is right
    unless given."""
    size = right if size is None else size
    return (got.to(right.dtype) - right).abs() / (right.abs() + size.abs().mean(-1, keepdim=True))
