"""The short way of a `rms_norm` or `add_rms_norm` call: one look-up by what is at hand, then outputs and launches.

A call that took the long way (checks, policy, choice, binding by name) leaves here what it found, under a flat key of
all that decided it. The next of its kind asks only whether it is of that kind: contiguous, aligned, plain tensors, no
transform of torch.func, no hook of Triton. Whatever else comes takes the long way, which is always right. Choices that
change put a new, empty table in place of the old one (`dispatch`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .. import dispatch, launch, paths, policies, prepared
from ..compile import ArgumentClass
from ..key import Key
from ..prepared import MISALIGNED, ONE, Call, Prepared, Table
from ..reference import accumulate_dtype
from .arguments import PLAIN_TENSORS, READ_BY_ROWS, has_storage, tracing_state, unwrapped

MOST_KINDS = 4096
"""Of calls in the table; then it begins anew."""

MOST_CALLS = 1024
"""As many calls, whose shapes count too, are kept at hand; then they are made anew from their kinds."""

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

transform: Any = torch._C._functorch.peek_interpreter_stack
# How many modes are to see outputs made. The guards of a call do not tell: they leave out those of torch's compilers
# and of selective checkpoints, which replay what they kept by the count of each operator.
modes: Any = torch._C._len_torch_dispatch_stack
is_grad_enabled: Any = torch.is_grad_enabled
is_deterministic: Any = torch._C._get_deterministic_algorithms
in_context: Any = policies._POLICY.get


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
    more: Any = None,
    residual: Tensor | None = None,
) -> tuple[Values | None, Call | None]:
    """A key of all that decides what answers, none for an unusual call; or the call itself, if it may be run the short
    way now. eps, which every kernel is given, is not in the key, and of the row count its bucket is. `more`: what else
    decides, beside the arguments of `rms_norm`; a `residual` is as usual as x and of its shape."""
    if (
        type(x) not in PLAIN_TENSORS
        or eps.__class__ is not float
        or not 0.0 <= eps <= LARGEST
        or offset.__class__ not in NUMBERS  # True equals 1.0, but is refused
        or transform() is not None
        or modes()
        or forward_ad._current_level >= 0
        or paths.disabled()
    ):
        return None, None
    table, graded = dispatch.quick, is_grad_enabled()
    of_call: Values = offset, casting, policy, more, in_context(), policies._ENVIRONMENT, is_deterministic()
    key: Values = of_call, graded, weight is None, x.shape
    try:
        call = table.calls.get(key)
    except TypeError:  # a casting or a policy without a hash is none at all, as the long way says
        return None, None
    given = (x,) if weight is None else (x, weight)
    if residual is not None:
        given = *given, residual
    if call is not None and call.fits(*given):
        return None, call
    if tracing_state() is not None or not are_usual(given) or (residual is not None and residual.shape != x.shape):
        return None, None
    return _of_kind(table, key, (*of_call, *[graded and t.requires_grad for t in given]), x, weight, given)


def are_usual(tensors: Iterable[Tensor]) -> bool:
    """Plain tensors in standard layout, none of which a transform has left behind or holds a batch: such a one has no
    address. Nor has one whose sign torch has only noted its values there."""
    usual = (
        type(t) in PLAIN_TENSORS and has_storage(t) and t.is_contiguous() and unwrapped(t) is t and not t.is_neg()
        for t in tensors
    )
    return all(usual)


def _of_kind(
    table: Table, key: Values, others: Values, x: Tensor, weight: Tensor | None, given: Sequence[Tensor]
) -> tuple[Values | None, Call | None]:
    """What `find` returns where no call under `key` fits the tensors that are given: `others`, what the tensors decide,
    and the bucket of the row count; and the call, kept for the next one, if its kind is known."""
    elements = x.numel()
    if not elements or not x.dim():
        return None, None
    hidden = x.shape[-1]
    sizes = hidden, (elements // hidden - 1).bit_length(), None if weight is None else weight.shape
    known: Values = *others, *sizes, *[(t.dtype, t.device) for t in given]
    found = table.get(known)
    kind, ready = (found, found.forward) if isinstance(found, Kind) else (None, found)
    call = None if ready is None else ready.call(kind, given, x)
    if call is not None:
        if len(table.calls) >= MOST_CALLS:
            table.calls.clear()
        table.calls[key] = call
    return known, call


def forward(
    call: Call, x: Tensor, weight: Tensor | None, eps: float, out: Tensor | None = None
) -> tuple[Tensor, Tensor | None] | None:
    """y, in `out` if there is one, and rstd (M) if it is to be saved; None where the long way must be taken."""
    if prepared.current_device() != call.device:
        with torch.cuda.device(call.device):
            return forward(call, x, weight, eps, out)
    y, rstd, rstd_at = prepared.empty(call.size, call.strides, call.dtype) if out is None else out, None, 0
    if call.kind.save_rstd:
        rstd = prepared.empty(call.height, ONE, call.summed)
        rstd_at = rstd.data_ptr()
    x_at, y_at, weight_at = x.data_ptr(), y.data_ptr(), 0 if weight is None else weight.data_ptr()
    if (x_at | weight_at | y_at | rstd_at) & MISALIGNED or not call.run(x_at, weight_at, y_at, rstd_at, eps):
        return None
    return y, rstd


def into(out: Tensor, call: Call, x: Tensor, weight: Tensor | None, eps: float) -> bool:
    """Write y to `out`; False, and nothing is written, where the long way must be taken."""
    return are_usual((out,)) and forward(call, x, weight, eps, out) is not None


def add_forward(
    call: Call, x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, out: Pair | None = None
) -> tuple[Pair, Tensor | None] | None:
    """As `forward`, of `add_rms_norm`, whose residual is as usual as x and of its shape: y and the sum, and rstd."""
    if prepared.current_device() != call.device:
        with torch.cuda.device(call.device):
            return add_forward(call, x, residual, weight, eps, out)
    empty, like = prepared.empty, (call.size, call.strides, call.dtype)
    (y, total), rstd, rstd_at = out or (empty(*like), empty(*like)), None, 0
    if call.kind.save_rstd:
        rstd = empty(call.height, ONE, call.summed)
        rstd_at = rstd.data_ptr()
    x_at, residual_at, weight_at = x.data_ptr(), residual.data_ptr(), 0 if weight is None else weight.data_ptr()
    y_at, total_at = y.data_ptr(), total.data_ptr()
    if (x_at | residual_at | weight_at | y_at | total_at | rstd_at) & MISALIGNED:
        return None
    launched = call.run(x_at, residual_at, weight_at, y_at, total_at, rstd_at, eps)
    return ((y, total), rstd) if launched else None


def find_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor | None,
    contract: Values,
    weight_grad: bool,
    dsum: Tensor | None = None,
) -> tuple[Values | None, Call | None]:
    """As `find`, of all that decides what a backward launches; `contract` has offset, casting and policy of its
    forward."""
    if type(x) not in PLAIN_TENSORS or transform() is not None or modes():
        return None, None
    apart = None if dsum is None else dsum is not dy  # `fits` turns down a tensor that is given twice
    key: Values = contract, weight_grad, rstd is None, weight is None, apart, x.shape
    table = dispatch.quick
    call = table.calls.get(key)
    given = (dy, x) if weight is None else (dy, x, weight)
    if apart:
        given = *given, dsum
    if rstd is not None:
        given = *given, rstd
    if call is not None and call.fits(*given):
        return None, call
    # Hooks of saved tensors may have brought back what they like.
    if not are_usual(given) or dy.dtype != x.dtype or (rstd is not None and rstd.dtype != accumulate_dtype(x)):
        return None, None
    return _of_kind(table, key, key[:-1], x, weight, given)


def backward(
    call: Call,
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor | None,
    eps: float,
    weight_grad: bool,
    dsum: Tensor | None = None,
) -> tuple[Tensor, Tensor | None] | None:
    """dx, and dw if it is wanted; None where the long way must be taken."""
    if prepared.current_device() != call.device:
        with torch.cuda.device(call.device):
            return backward(call, dy, x, weight, rstd, eps, weight_grad, dsum)
    dx, dw, weight_at, dw_at = prepared.empty(call.size, call.strides, call.dtype), None, 0, 0
    if weight is not None:
        weight_at = weight.data_ptr()
        if weight_grad:
            dw = prepared.empty(call.width, ONE, weight.dtype)
            dw_at = dw.data_ptr()
    # Written out: a loop over the names takes longer, in every call.
    x_at, dy_at, dx_at = x.data_ptr(), dy.data_ptr(), dx.data_ptr()
    rstd_at, dsum_at = 0 if rstd is None else rstd.data_ptr(), 0 if dsum is None else dsum.data_ptr()
    if (x_at | weight_at | dy_at | rstd_at | dx_at | dw_at | dsum_at) & MISALIGNED:
        return None
    return (dx, dw) if call.run(x_at, weight_at, dy_at, rstd_at, dx_at, dw_at, dsum_at, eps) else None


def bare_apply(function: Any) -> Any:
    """`apply` of an autograd function as it is from torch 2.14 on: before, it was wrapped in Python that looks for
    transforms, as `find` has. And autograd calls its backward, not Python of torch that looks for a `vjp` first."""
    function._backward_cls.apply = function.backward
    return super(torch.autograd.Function, function).apply


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
