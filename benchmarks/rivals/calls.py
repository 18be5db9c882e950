"""Calls of a norm on tensors that are there already: what is checked, and captured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from tunegen.bench import Bench, Call

from .cells import ADD_NORM, NORM, Cell

Norm = Callable[..., Tensor | tuple[Tensor, ...]]
"""`norm(x, weight)` is y; `norm(x, residual, weight)` is y and the sum."""

Form = Callable[[Mapping[str, Tensor]], Callable[[], dict[str, Tensor]]]
"""Binds tensors; what it returns computes the outputs by name."""

OPERANDS = {NORM: ("x", "w"), ADD_NORM: ("x", "residual", "w")}
OUTPUTS = {NORM: ("y",), ADD_NORM: ("y", "sum")}


def form_of(cell: Cell, norm: Norm) -> Form:
    """Forward as in inference: no gradient is wanted. Backward through autograd, the forward pass when the tensors are
    bound; that of the addition is given the sum as x, so that zeros are added."""
    operands, outputs = OPERANDS[cell.op], OUTPUTS[cell.op]

    def forward(tensors: Mapping[str, Tensor]) -> Callable[[], dict[str, Tensor]]:
        given = [tensors[name] for name in operands]

        def run() -> dict[str, Tensor]:
            with torch.no_grad():
                return dict(zip(outputs, _several(norm(*given)), strict=True))

        return run

    def backward(tensors: Mapping[str, Tensor]) -> Callable[[], dict[str, Tensor]]:
        zeros = {"residual": torch.zeros_like(tensors["x"])} if cell.op == ADD_NORM else {}
        given = {**zeros, **tensors}
        wanted = {f"d{name}": given[name].detach().requires_grad_() for name in operands}
        found = _several(norm(*wanted.values()))
        gradients = [tensors[f"d{name}"] for name in outputs]

        def run() -> dict[str, Tensor]:
            grads = torch.autograd.grad(found, list(wanted.values()), gradients, retain_graph=True)
            return dict(zip(wanted, grads, strict=True))

        return run

    return forward if cell.direction == "forward" else backward


def _several(found: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (found,) if isinstance(found, Tensor) else tuple(found)


def calls_of(bench: Bench, form: Form, own: Iterable[str] = ()) -> Call:
    """Calls on the bench's rotated tensors; those named in `own`, which the norm overwrites, are copied for it."""
    with torch.cuda.stream(bench.stream):
        runs = [form(with_own(tensors, own)) for tensors in bench.tensors]
    return lambda i: runs[i]()


def with_own(tensors: Mapping[str, Tensor], own: Iterable[str]) -> dict[str, Tensor]:
    """The tensors, those named in `own` as copies."""
    return {**tensors, **{name: tensors[name].clone() for name in own if name in tensors}}
