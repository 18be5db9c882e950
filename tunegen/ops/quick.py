"""The short way of a `rms_norm` or `add_rms_norm` call: one look-up by what is at hand, then outputs and launches.

A call that took the long way (checks, policy, choice, binding by name) leaves here what it found, under a flat key of
all that decided it. The next of its kind asks only whether it is of that kind: contiguous, aligned, plain tensors, no
transform of torch.func, no hook of Triton. Whatever else comes takes the long way, which is always right. Choices that
change put a new, empty table in place of the old one (`dispatch`).
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .. import dispatch, launch, paths, policies
from ..compile import ArgumentClass
from ..key import Key
from ..prepared import MISALIGNED, Frame, Prepared, has_hooks
from .arguments import PLAIN_TENSORS, READ_BY_ROWS

MOST_KINDS = 4096
"""Of calls in the table; then it begins anew."""

LARGEST, NUMBERS = sys.float_info.max, (float, int)
# Tensors by the names of kernel parameters, in the order in which they are given; eps comes last.
_BACKWARD = ("x", "w", "dy", "rstd", "dx", "dw", "dsum")
GIVEN = {
    ("rms_norm", "forward"): ("x", "w", "y", "rstd"),
    ("rms_norm", "backward"): _BACKWARD,
    ("add_rms_norm", "forward"): ("x", "residual", "w", "y", "sum", "rstd"),
    ("add_rms_norm", "backward"): _BACKWARD,
}

Pair = tuple[Tensor, Tensor]
Values = tuple[Any, ...]
Table = dict[Values, Any]

transform: Any = torch._C._functorch.peek_interpreter_stack
is_grad_enabled: Any = torch.is_grad_enabled
is_deterministic: Any = torch.are_deterministic_algorithms_enabled


class Kind(NamedTuple):
    """What calls have in common, beside tensors and eps: a contract; whether autograd must know of them; and `forward`,
    which runs them the short way, if there is one."""

    offset: float
    casting: str
    policy: str
    save_rstd: bool
    graded: bool
    forward: Prepared | None = None

    @property
    def contract(self) -> tuple[float, str, str, bool]:
        """What decides the values and outputs of a forward, in the order of its arguments."""
        return self[:4]


def find(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    offset: float,
    casting: str,
    policy: str | None,
    more: Values | None = None,
) -> tuple[Values | None, Kind | None]:
    """A key of all that decides what answers, none for an unusual call; and what is known of such calls, if they may be
    launched the short way now. eps, which every kernel is given, is not in the key, and of the row count its bucket is.
    `more`: what else decides, beside the arguments of `rms_norm`."""
    if (
        type(x) not in PLAIN_TENSORS
        or eps.__class__ is not float
        or not 0.0 <= eps <= LARGEST
        or offset.__class__ not in NUMBERS  # True equals 1.0, but is refused
        or not x.is_contiguous()
        or transform() is not None
        or forward_ad._current_level >= 0
        or paths.disabled()
        or not (elements := x.numel())
        or not (shape := x.shape)
    ):
        return None, None
    hidden, graded = shape[-1], is_grad_enabled()
    bucket, around = (elements // hidden - 1).bit_length(), (policies.in_context(), is_deterministic(), more)
    key: Values = offset, casting, policy, around, x.dtype, x.device, hidden, bucket, graded and x.requires_grad
    if weight is not None:
        if type(weight) not in PLAIN_TENSORS or not weight.is_contiguous():
            return None, None
        key = key, weight.dtype, weight.device, weight.shape, graded and weight.requires_grad
    try:
        kind: Kind | None = dispatch.quick.get(key)
    except TypeError:  # a casting or a policy without a hash is none at all, as the long way says
        return None, None
    return key, (None if kind is None or has_hooks() else kind)


def forward(
    kind: Kind, x: Tensor, weight: Tensor | None, eps: float, out: Tensor | None = None
) -> tuple[Tensor, Tensor | None] | None:
    """y, in `out` if there is one, and rstd (M) if it is to be saved; None where the long way must be taken."""
    if (prepared := kind.forward) is None:
        return None
    rows = x.numel() // prepared.hidden
    if (frame := prepared.frames.get(rows) or prepared.frame(rows)) is None:
        return None
    y, rstd, rstd_at = torch.empty_like(x) if out is None else out, None, 0
    if kind.save_rstd:
        rstd = x.new_empty(rows, dtype=prepared.summed)
        rstd_at = rstd.data_ptr()
    x_at, y_at, weight_at = x.data_ptr(), y.data_ptr(), 0 if weight is None else weight.data_ptr()
    if (x_at | weight_at | y_at | rstd_at) & MISALIGNED or not frame((x_at, weight_at, y_at, rstd_at, eps)):
        return None
    return y, rstd


def into(out: Tensor, kind: Kind, x: Tensor, weight: Tensor | None, eps: float) -> bool:
    """Write y to `out`; False, and nothing is written, where the long way must be taken."""
    usual = type(out) in PLAIN_TENSORS and out.is_contiguous()
    return usual and forward(kind, x, weight, eps, out) is not None


def add_forward(
    kind: Kind, x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, out: Pair | None = None
) -> tuple[Pair, Tensor | None] | None:
    """As `forward`, of `add_rms_norm`, whose residual is as usual as x and of its shape: y and the sum, and rstd."""
    if (prepared := kind.forward) is None:
        return None
    rows = x.numel() // prepared.hidden
    if (frame := prepared.frames.get(rows) or prepared.frame(rows)) is None:
        return None
    y, total = out or (torch.empty_like(x), torch.empty_like(x))
    rstd = x.new_empty(rows, dtype=prepared.summed) if kind.save_rstd else None
    return ((y, total), rstd) if _launch(frame, eps, x, residual, weight, y, total, rstd) else None


def _launch(frame: Frame, eps: float, *tensors: Tensor | None) -> bool:
    """Launch, unless one of them is not aligned."""
    values, bits = [0 if tensor is None else tensor.data_ptr() for tensor in tensors], 0
    for value in values:
        bits |= value
    return not bits & MISALIGNED and frame((*values, eps))


def key_of_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor | None,
    contract: Values,
    weight_grad: bool,
    dsum: Tensor | None = None,
) -> Values | None:
    """A key of all that decides what a backward launches, none for an unusual one; `contract` has offset, casting and
    policy of its forward."""
    if (
        type(dy) not in PLAIN_TENSORS
        or type(x) not in PLAIN_TENSORS
        or not dy.is_contiguous()
        or not x.is_contiguous()
        or transform() is not None
    ):
        return None
    hidden = x.shape[-1]
    bucket = (x.numel() // hidden - 1).bit_length()
    key: Values = (*contract, weight_grad, rstd is None, dy.dtype, x.dtype, x.device, hidden, bucket)
    if dsum is not None:
        if type(dsum) not in PLAIN_TENSORS or not dsum.is_contiguous():
            return None
        key = *key, dsum.dtype
    if weight is None:
        return key
    if type(weight) not in PLAIN_TENSORS or not weight.is_contiguous():
        return None
    return *key, weight.dtype, weight.device, weight.shape


def backward(
    key: Values,
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor | None,
    eps: float,
    weight_grad: bool,
    dsum: Tensor | None = None,
) -> tuple[Tensor, Tensor | None] | None:
    """dx, and dw if it is wanted; None where the long way must be taken."""
    prepared: Prepared | None = dispatch.quick.get(key)
    if prepared is None or has_hooks():
        return None
    rows = x.numel() // prepared.hidden
    if (frame := prepared.frames.get(rows) or prepared.frame(rows)) is None:
        return None
    dx, dw, weight_at, dw_at = torch.empty_like(x), None, 0, 0
    if weight is not None:
        weight_at = weight.data_ptr()
        if weight_grad:
            dw = torch.empty_like(weight)
            dw_at = dw.data_ptr()
    # Written out: a loop over the names takes longer, in every call.
    x_at, dy_at, dx_at = x.data_ptr(), dy.data_ptr(), dx.data_ptr()
    rstd_at, dsum_at = 0 if rstd is None else rstd.data_ptr(), 0 if dsum is None else dsum.data_ptr()
    if (x_at | weight_at | dy_at | rstd_at | dx_at | dw_at | dsum_at) & MISALIGNED:
        return None
    return (dx, dw) if frame((x_at, weight_at, dy_at, rstd_at, dx_at, dw_at, dsum_at, float(eps))) else None


def is_new(table: Table, key: Values | None) -> bool:
    """Whether there is a key, and `table` does not know it."""
    return key is not None and key not in table


def keep(table: Table, key: Values | None, found: Kind | Prepared | None) -> None:
    """Leave in `table`, which was that of `dispatch` when the call began, what the next call of its kind may use."""
    if key is not None and found is not None:
        if len(table) >= MOST_KINDS:
            table.clear()
        table[key] = found


def ready(kind: Kind, key: Key) -> Kind | None:
    """The kind with what was launched forward, under `key`; None where there is no short way."""
    prepared = prepare(key, kind.save_rstd, kind.offset)
    return None if prepared is None else kind._replace(forward=prepared)


def prepare(key: Key, save_rstd: bool, offset: float) -> Prepared | None:
    """What was launched under `key`, made ready for tensors in standard layout; None where torch answers, or where
    kernels are launched the official way."""
    choice = dispatch.settled(key)  # a passing one must be asked for again
    variant = None if choice is None else choice.bound(save_rstd, offset)
    if choice is None or variant is None or not launch.launches_directly():
        return None
    problem = choice.problem
    x, summed = (ArgumentClass(f"*{dtype}", True) for dtype in (problem.x_dtype, problem.accumulate))
    weight = ArgumentClass(f"*{problem.weight_dtype}", True)  # without one no kernel has it
    classes = {"w": weight, "dw": weight, "rstd": summed}
    given = {f"{name}_ptr": classes.get(name, x) for name in GIVEN[problem.op, problem.direction]}
    given["eps"] = ArgumentClass(problem.accumulate)
    return Prepared(variant, given, {f"{name}_row_stride": problem.hidden for name in READ_BY_ROWS})
