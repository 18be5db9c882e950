"""The second gate: numbers in bf16 beside Hugging Face's Qwen3RMSNorm, each held against float64.

Element by element the two differ by an ulp wherever sums are ordered differently, so no tolerance on the difference
tells right from wrong. Errors do: those of y, dx and dw are at most 1.05 x those of the module. Only y, which Qwen3's
casting fixes to the last bit but for x-hats next to a rounding boundary, is compared element by element as well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .checks import Check, Norm, Say, silent
from .double import formula, gradient, relative

GATE = "bf16"
EPS = 1e-6
SHAPES = {"hidden states": (4, 512, 4096), "q or k norm": (2, 8, 64, 128)}
ELEMENTS = 4096
"""Of dw, together, that errors are taken over: so many draws of a shape. Of the 128 of one draw the largest error of a
right norm was over 1.05 x Hugging Face's in 2 of 60 seeds; of 4096 in none of 160, 1.03 x at most."""

SCALES = (1.0, 30.0, 0.05, 1e-3)
"""Of the rows of x in turn; at the last the mean square is about EPS, so that another eps shows."""

LARGEST_RATIO = 1.05
"""Errors over those of Hugging Face's module."""

DIFFERENT = 1e-4
"""The share of elements of y that may differ from Hugging Face's: x-hats next to a rounding boundary."""


class Results(NamedTuple):
    y: Tensor
    dx: Tensor
    dw: Tensor


class Inputs(NamedTuple):
    """x and dy (..., N) and w (N) in bf16."""

    x: Tensor
    w: Tensor
    dy: Tensor


class Comparison(NamedTuple):
    """`ratios`: by tensor, how many times larger the error is than Hugging Face's, and by which measure, the worse of
    root mean square and max. `different`: the share of y's elements that are not theirs. `ulps`: the furthest of them,
    counted in bf16 numbers."""

    ratios: dict[str, tuple[float, str]]
    different: float
    ulps: int


def inputs(shape: tuple[int, ...], seed: int, device: torch.device, ones: bool = False) -> list[Inputs]:
    """Draws of normal numbers: x by rows of several scales, dy with axes 1 and 2 exchanged in memory if 4-D, as
    attention leaves it. The weight is 1 + .3 x normal numbers, or all ones."""
    generator = torch.Generator().manual_seed(seed)
    hidden = shape[-1]
    scales = torch.tensor(SCALES)[torch.arange(math.prod(shape[:-1])) % len(SCALES)].view(*shape[:-1], 1)
    found = []
    for _ in range(math.ceil(ELEMENTS / hidden)):
        x, dy = (torch.randn(shape, generator=generator) for _ in range(2))
        if dy.dim() == 4:
            dy = dy.transpose(1, 2).contiguous().transpose(1, 2)
        w = torch.ones(hidden) if ones else 1 + 0.3 * torch.randn(hidden, generator=generator)
        found.append(Inputs(*(tensor.to(device, torch.bfloat16) for tensor in (scales * x, w, dy))))
    return found


def run(norm: Norm, given: Inputs) -> Results:
    """y, dx and dw; a gradient that is not there counts as zeros."""
    x, w = (tensor.detach().requires_grad_() for tensor in given[:2])
    y = norm(x, w, EPS)
    torch.autograd.backward(y, given.dy)
    return Results(y.detach(), gradient(x), gradient(w))


def run_module(module: nn.Module, given: Inputs) -> Results:
    """The same of a module with a `weight` of its own."""
    module = module.to(given.x.device, torch.bfloat16)
    module.zero_grad()
    weight = module.weight
    assert isinstance(weight, Tensor)
    with torch.no_grad():
        weight.copy_(given.w)
    x = given.x.detach().requires_grad_()
    y = module(x)
    torch.autograd.backward(y, given.dy)
    return Results(y.detach(), gradient(x), gradient(weight))


def exact(given: Inputs) -> Results:
    """The right values, by the formula in float64."""
    wide = Inputs(*(tensor.double() for tensor in given))
    return run(formula, wide)


def compare(norm: Norm, module: nn.Module, draws: Sequence[Inputs]) -> Comparison:
    """`norm` beside a module that holds its weight and eps, over all draws of one shape."""
    mine: dict[str, list[Tensor]] = {name: [] for name in Results._fields}
    others: dict[str, list[Tensor]] = {name: [] for name in Results._fields}
    steps = []
    for given in draws:
        got, theirs, right = run(norm, given), run_module(module, given), exact(given)
        for name, a, b, want in zip(Results._fields, got, theirs, right, strict=True):
            mine[name].append(relative(a, want))
            others[name].append(relative(b, want))
        steps.append(ulps(got.y, theirs.y))
    ratios = {name: _ratio(torch.stack(mine[name]), torch.stack(others[name])) for name in Results._fields}
    different = sum(float((s > 0).double().mean()) for s in steps) / len(steps)
    return Comparison(ratios, different, max(int(s.max()) for s in steps))


def _ratio(mine: Tensor, others: Tensor) -> tuple[float, str]:
    """The worse of two ratios of errors, with its measure; a NaN among mine is the worst."""
    found = {
        "root mean square": float(mine.square().mean().sqrt() / others.square().mean().sqrt()),
        "max": float(mine.max() / others.max()),
    }
    measure = max(found, key=lambda name: (found[name] != found[name], found[name]))
    return found[measure], measure


def ulps(a: Tensor, b: Tensor) -> Tensor:
    """How many steps from one bf16 number to the next lie between a and b; int32 of their shape."""
    ordered = []
    for tensor in (a, b):
        bits = tensor.contiguous().view(torch.int16).int()
        ordered.append(torch.where(bits < 0, -(bits & 0x7FFF), bits))  # below zero the bits count away from it
    return (ordered[0] - ordered[1]).abs()


def check(norm: Norm, module: type[nn.Module], seed: int, device: torch.device, say: Say = silent) -> list[Check]:
    """For each of SHAPES: the ratios of errors for y, dx and dw, and y's bits beside those of `module(N, eps)`.

    An x-hat next to a rounding boundary may fall on its other side, which is one ulp of it, and two of y once a weight
    between 1 and 2 is on it. How far y is off is therefore judged where the weight is 1.
    """
    found = []
    for number, (name, shape) in enumerate(SHAPES.items(), 1):
        say(f"{name}, {' x '.join(map(str, shape))}, shape {number} of {len(SHAPES)}")
        theirs = module(shape[-1], EPS)
        random = compare(norm, theirs, inputs(shape, seed, device))
        plain = compare(norm, theirs, inputs(shape, seed, device, ones=True)[:1])
        for tensor, (ratio, measure) in random.ratios.items():
            what = f"{name}: error of {tensor} over Hugging Face's"
            found.append(Check(GATE, what, ratio, LARGEST_RATIO, measure))
        found += [
            Check(GATE, f"{name}: share of y that is not Hugging Face's", random.different, DIFFERENT),
            Check(GATE, f"{name}: ulp of y from Hugging Face's, weight 1", plain.ulps, 1),
        ]
    return found
