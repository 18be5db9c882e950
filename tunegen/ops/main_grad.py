"""`main_grad`: a buffer in the dtype of sums that backward adds dw to, in place of the weight's own `.grad`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..reference import accumulate_dtype
from .arguments import is_distributed, tracing_state
from .memory import share_memory


def check_main_grad(main_grad: Tensor, x: Tensor, weight: Tensor | None, residual: Tensor | None = None) -> None:
    """Raise what `rms_norm` documents of a `main_grad` that cannot take dw (N)."""
    if weight is None:
        raise ValueError("main_grad takes the gradient of a weight, and there is none; leave it out")
    if is_distributed(x, weight, main_grad):
        raise TypeError(
            "main_grad takes no gradient of a distributed tensor, nor is it one; pass what lies here, as x.to_local()"
        )
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise RuntimeError("main_grad is written to, which transforms of torch.func cannot follow; leave it out there")
    if tracing_state() is not None:
        raise RuntimeError(
            "main_grad is written to in backward, which torch.jit.trace does not record; leave it out there"
        )
    dtype = accumulate_dtype(x)
    make = f"make it with torch.zeros_like(weight, dtype={dtype})"
    if not isinstance(main_grad, Tensor) or main_grad.dtype != dtype:
        got = main_grad.dtype if isinstance(main_grad, Tensor) else type(main_grad).__name__
        raise TypeError(f"main_grad must be a tensor of {dtype}, in which {x.dtype} is summed, got {got}; {make}")
    if main_grad.shape != weight.shape:
        raise ValueError(
            f"main_grad must have weight's shape {tuple(weight.shape)}, got {tuple(main_grad.shape)}; {make}"
        )
    if main_grad.device != x.device:
        raise ValueError(f"x is on {x.device} and main_grad on {main_grad.device}; move one of them")
    if not main_grad.is_contiguous():
        raise ValueError(f"main_grad must be contiguous, got a stride of {main_grad.stride()[0]}; {make}")
    if main_grad.requires_grad:
        raise ValueError("main_grad must not require a gradient itself; pass main_grad.detach()")
    for name, tensor in (("x", x), ("residual", residual), ("weight", weight)):
        if tensor is not None and share_memory(main_grad, tensor):
            raise ValueError(f"main_grad and {name} share memory, which backward reads; {make}")


def not_traced(main_grad: Tensor | None) -> None:
    """Raise RuntimeError for a `main_grad` while a compiler traces the call."""
    if main_grad is not None:
        raise RuntimeError(
            "main_grad is written to in backward, which a graph compiler cannot follow: leave it out, or keep the "
            "call out of the graph with torch.compiler.disable"
        )


def not_differentiated(main_grad: Tensor | None) -> None:
    """Raise RuntimeError for a `main_grad` in a backward that is to be differentiated again."""
    if main_grad is not None and torch.is_grad_enabled():
        raise RuntimeError(
            "create_graph=True asks for a gradient that can be differentiated, and main_grad is a plain sum of them: "
            "call the norm without main_grad"
        )


def asked_for(main_grad: Tensor | None, node: Any, place: int) -> Tensor | None:
    """`main_grad` in a backward that computes the gradient of the weight, which is tensor argument `place` of `node`;
    None in one that computes others alone, as `torch.autograd.grad(y, x)` does and schedules of pipelines do."""
    if main_grad is None:
        return None
    try:
        return main_grad if torch._C._will_engine_execute_node(node.next_functions[place][0]) else None
    except RuntimeError:  # what torch says of a leaf that is asked for by torch.autograd.grad
        return main_grad


def adding_to(weight: Tensor | None, main_grad: Tensor | None) -> Tensor | None:
    """The weight for torch operators; where its gradient is wanted in `main_grad`, a copy in that dtype, whose gradient
    is added there, unrounded."""
    if weight is None or main_grad is None or not (torch.is_grad_enabled() and weight.requires_grad):
        return weight
    wide: Tensor = _AddedTo.apply(weight, main_grad)
    return wide


class _AddedTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, main_grad: Tensor) -> Tensor:
        ctx.main_grad = main_grad  # not saved: what is saved must not change until backward, and this does
        return weight.to(main_grad.dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, dw: Tensor) -> tuple[None, None]:
        not_differentiated(ctx.main_grad)
        ctx.main_grad.add_(dw)
        return None, None
