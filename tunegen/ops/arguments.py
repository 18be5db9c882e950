"""What the operators take, checked with errors that name the value, the limit and what to do; and the same as what
kernels take."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, ParamSpec

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .. import paths
from ..key import Key
from ..launch import Argument
from ..layouts import in_standard_layout, rows_of
from ..model import CASTINGS, RMS_NORM
from ..policies import INVARIANT
from ..reference import DTYPE_NAMES

Given = ParamSpec("Given")
PLAIN_TENSORS = (Tensor, torch.nn.Parameter)
READ_BY_ROWS = ("x", "residual", "dy", "dsum")
has_storage: Any = torch._C._has_storage
unwrapped: Any = torch._C._functorch.unwrap_if_dead


tracing_state: Any = torch._C._get_tracing_state
"""What torch.jit.trace keeps while it records torch's operators, else None: a launch would be left out of its graph,
and what it wrote be a constant there."""

_set_tracing_state: Any = torch._C._set_tracing_state  # type: ignore[attr-defined]


def _off_record(check: Callable[Given, None]) -> Callable[Given, None]:
    """A check whose questions torch.jit.trace does not record: it would warn of each."""

    @wraps(check)
    def quietly(*given: Given.args, **named: Given.kwargs) -> None:
        state = tracing_state()
        if state is None:
            return check(*given, **named)
        _set_tracing_state(None)  # sizes are plain numbers then
        try:
            return check(*given, **named)
        finally:
            _set_tracing_state(state)

    return quietly


@_off_record
def check(x: Tensor, weight: Tensor | None, eps: float, offset: float, casting: str) -> None:
    """Raise what `rms_norm` documents for arguments that it does not take."""
    if not isinstance(x, Tensor) or x.dtype not in DTYPE_NAMES:
        raise TypeError(f"x must be a tensor of {_dtypes()}, got {_kind(x)}; convert it first, as with x.float()")
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"x must have a last axis of at least 1 element, got shape {tuple(x.shape)}")
    check_contract(eps, offset, casting)
    if weight is None:
        return
    if not isinstance(weight, Tensor) or weight.dtype not in DTYPE_NAMES:
        raise TypeError(f"weight must be a tensor of {_dtypes()} or None, got {_kind(weight)}")
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"weight must have shape ({x.shape[-1]},), the last axis of x, got {tuple(weight.shape)}")
    if weight.device != x.device:
        raise ValueError(f"x is on {x.device} and weight on {weight.device}; move one of them")


def check_contract(eps: float, offset: float, casting: str) -> None:
    """Raise what `rms_norm` documents of arguments that are no tensors."""
    for name, value in (("eps", eps), ("offset", offset)):
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            remedy = f"pass float({name})" if value is not None else "give one, such as 1e-6"
            raise TypeError(f"{name} must be a Python number, got {_kind(value)}; {remedy}")
        if not abs(value) <= sys.float_info.max:  # NaN and integers beyond a double too
            raise ValueError(f"{name} must be a finite double, got {value if isinstance(value, float) else 'more'}")
    if eps < 0:
        raise ValueError(f"eps must be at least 0, got {eps}")
    if casting not in CASTINGS:
        raise ValueError(f"casting must be one of {', '.join(CASTINGS)}, got {casting!r}")


def _dtypes() -> str:
    return ", ".join(DTYPE_NAMES.values())


def _kind(value: object) -> str:
    return str(value.dtype) if isinstance(value, Tensor) else type(value).__name__


@_off_record
def check_like(name: str, tensor: Tensor, x: Tensor) -> None:
    """Raise TypeError or ValueError where a tensor called `name` is not of x's dtype, shape and device."""
    if not isinstance(tensor, Tensor) or tensor.dtype != x.dtype:
        raise TypeError(
            f"{name} must be a tensor of x's dtype, {_kind(x)}, got {_kind(tensor)}; convert one of them first"
        )
    if tensor.shape != x.shape:
        raise ValueError(
            f"{name} must have x's shape {tuple(x.shape)}, got {tuple(tensor.shape)}; expand or reshape it"
        )
    if tensor.device != x.device:
        raise ValueError(f"x is on {x.device} and {name} on {tensor.device}; move one of them")


@_off_record
def check_out(
    name: str, out: Tensor, x: Tensor, inputs: Sequence[Tensor | None], instead: str = "call it without out"
) -> None:
    """Raise what is documented of a tensor that is written to, `name`, where `inputs` are read."""
    check_like(name, out, x)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (out, *inputs)):
        raise RuntimeError(
            f"a gradient is wanted, and {name} is written to, which autograd cannot follow: call it under "
            f"torch.no_grad(), or {instead}"
        )


def written(out: Tensor) -> Tensor:
    """`out` after a kernel has written to it: a backward that has it saved must notice, as it does of torch's own."""
    if not out.is_inference():  # those are in no backward, and count nothing
        torch.autograd.graph.increment_version(out)
    return out


def has_address(tensor: Tensor) -> bool:
    """False of a tensor without memory of its own, sparse or a batch; what a transform has left behind has that of the
    tensor in it."""
    return has_storage(tensor) or unwrapped(tensor) is not tensor


def has_kernels(x: Tensor, *others: Tensor | None) -> bool:
    """Whether kernels may run. torch answers CPU and ROCm tensors, empty ones, subclasses (DTensor, fake tensors),
    functorch transforms, batches of `is_grads_batched=True`, forward-mode differentiation, and torch.jit.trace."""
    for other in others:  # a generator would cost as much as all the rest
        if other is not None and (type(other) not in PLAIN_TENSORS or not has_address(other)):
            return False
    return (
        tracing_state() is None
        and x.is_cuda
        and x.numel() > 0
        and type(x) in PLAIN_TENSORS
        and has_address(x)
        and torch.version.hip is None
        and not paths.disabled()
        and torch._C._functorch.peek_interpreter_stack() is None
        and forward_ad._current_level < 0
    )


def is_distributed(*tensors: Tensor | None) -> bool:
    """Whether one of them is a DTensor; where nobody has loaded their module none is."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(isinstance(t, getattr(module, "DTensor", ())) for t in tensors)


def no_kernels_because(x: Tensor, *others: Tensor | None) -> str:
    """Why `has_kernels` is false, in words; empty where it is true."""
    given = [t for t in (x, *others) if t is not None]
    kinds = [type(t).__name__ for t in given if type(t) not in PLAIN_TENSORS]
    reasons = (
        (tracing_state() is not None, "torch.jit.trace records it"),
        (not x.is_cuda, f"x is on {x.device}"),
        (x.numel() == 0, "x has no elements"),
        (bool(kinds), f"{', '.join(kinds)} is no plain tensor"),
        (not all(map(has_address, given)), "a tensor has no memory of its own"),
        (torch.version.hip is not None, "this torch is built for ROCm"),
        (paths.disabled(), "TUNEGEN_DISABLE is set"),
        (torch._C._functorch.peek_interpreter_stack() is not None, "a transform of torch.func is active"),
        (forward_ad._current_level >= 0, "forward-mode differentiation is active"),
    )
    return next((why for holds, why in reasons if holds), "")


def bound(key: Key, tensors: dict[str, Tensor | None], nest: bool) -> tuple[tuple[str, ...], dict[str, Argument]]:
    """The tensors by the names of kernel parameters, with the layout of their rows; and which of them are nested. Those
    whose sign torch has only noted, as of the imaginary part of a conjugate, are copied."""
    arguments: dict[str, Argument] = {f"{name}_ptr": t for name, t in tensors.items() if t is not None}
    if (weight := tensors["w"]) is not None:
        weight = weight.resolve_neg()
        arguments["w_ptr"] = in_standard_layout(weight) if key.policy == INVARIANT else weight.contiguous()
    nested: tuple[str, ...] = ()
    for name in READ_BY_ROWS:
        if (tensor := tensors.get(name)) is not None:
            tensor = tensor.resolve_neg()
            tensor = in_standard_layout(tensor) if key.policy == INVARIANT else tensor
            lying = rows_of(tensor, nest=nest and key.op == RMS_NORM)
            arguments |= {f"{name}_ptr": lying.tensor, **lying.arguments(name)}
            if lying.nested is not None:
                nested = (*nested, name)
    return nested, arguments
