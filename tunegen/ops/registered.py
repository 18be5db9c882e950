"""`rms_norm` as registered operators, opaque to a graph compiler: `torch.ops.tunegen.rms_norm`, its backward, and
`rms_norm_inference` where no gradient is wanted, which has one result and no autograd around it.

Under `torch.compile` the formula is traced by default and Inductor fuses it with its neighbours. `TUNEGEN_COMPILE=op`
puts these operators into the graph instead, which launch what an eager call launches; so does the policy "invariant",
of which traced operators promise nothing. They have no atomics.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from .. import dispatch, paths
from ..errors import VariableError
from ..policies import INVARIANT
from ..reference import accumulate_dtype
from . import quick
from .arguments import check, is_distributed

TRACE, OPERATOR = MODES = ("trace", "op")


def _mode() -> str:
    """What TUNEGEN_COMPILE asks for. Raises VariableError, at import: an error that is raised while Dynamo traces makes
    it run the call eagerly, and nobody sees it."""
    found = paths.compiled_as() or TRACE
    if found not in MODES:
        raise VariableError(f"the variable TUNEGEN_COMPILE must be one of {', '.join(MODES)}, got {found!r}")
    return found


MODE = _mode()
"""As the environment says when this is imported: a compiled graph is guarded by it."""

CONTRACT = "float eps, float offset, str casting, str policy, bool weight_grad"
LIBRARY = Library("tunegen", "DEF")  # type: ignore[no-untyped-call]
_define: Callable[..., None] = LIBRARY.define
_define(f"rms_norm(Tensor x, Tensor? weight, {CONTRACT}) -> (Tensor, Tensor)")
_define("rms_norm_inference(Tensor x, Tensor? weight, float eps, float offset, str casting, str policy) -> Tensor")
_define(f"rms_norm_backward(Tensor dy, Tensor x, Tensor? weight, Tensor rstd, {CONTRACT}) -> (Tensor, Tensor)")


def is_operator(policy: str) -> bool:
    """Whether a call that is being compiled becomes an operator."""
    return policy == INVARIANT or MODE == OPERATOR


def call(x: Tensor, weight: Tensor | None, eps: float, offset: float, casting: str, policy: str) -> Tensor:
    """y by the operator, to be traced."""
    if is_distributed(x, weight):
        from .distributed import by_shards

        if found := by_shards(lambda x, w: (call(x, w, eps, offset, casting, policy),), (x,), weight):
            return found[0]
    weight_grad = weight is not None and weight.requires_grad
    training = torch.is_grad_enabled() and (x.requires_grad or weight_grad)
    of_call = x, weight, float(eps), float(offset), casting, policy
    y: Tensor = (
        torch.ops.tunegen.rms_norm(*of_call, weight_grad)[0]
        if training
        else torch.ops.tunegen.rms_norm_inference(*of_call)
    )
    return y


def register(op: ModuleType) -> None:
    """Bind the operators to the functions of the module `op`, as they are when they are called."""

    def differentiate(ctx: Any, dy: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight, rstd = ctx.saved_tensors
        eps, offset, casting, policy = ctx.contract
        x_grad, weight_grad = ctx.needs_input_grad[:2]
        if torch.is_grad_enabled():  # create_graph=True: operators that can be differentiated again
            dx, dw = op.backward_by_torch(dy, x, weight, eps, offset, casting, weight_grad)
        else:
            dx, dw = torch.ops.tunegen.rms_norm_backward(dy, x, weight, rstd, eps, offset, casting, policy, weight_grad)
        return dx if x_grad else None, dw if weight_grad else None, *[None] * 5

    impl: Callable[..., None] = LIBRARY.impl
    impl("rms_norm", partial(_forward, op), "CompositeExplicitAutograd")
    impl("rms_norm_inference", partial(_inference, op), "CompositeExplicitAutograd")
    impl("rms_norm_backward", partial(_backward, op), "CompositeExplicitAutograd")
    torch.library.register_fake("tunegen::rms_norm", _fake, lib=LIBRARY)
    torch.library.register_fake("tunegen::rms_norm_inference", _fake_inference, lib=LIBRARY)
    torch.library.register_fake("tunegen::rms_norm_backward", _fake_backward, lib=LIBRARY)
    torch.library.register_autograd("tunegen::rms_norm", differentiate, setup_context=_save, lib=LIBRARY)


def _forward(
    op: Any,
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    offset: float,
    casting: str,
    policy: str,
    weight_grad: bool,
) -> tuple[Tensor, Tensor]:
    """What an eager call in training computes, with the rstd (M) that any backward may ask for."""
    y, rstd = _computed(op, x, weight, eps, offset, casting, policy, weight_grad, True)
    assert rstd is not None
    return y, rstd


def _inference(
    op: Any, x: Tensor, weight: Tensor | None, eps: float, offset: float, casting: str, policy: str
) -> Tensor:
    return _computed(op, x, weight, eps, offset, casting, policy, False, False)[0]


def _computed(
    op: Any,
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    offset: float,
    casting: str,
    policy: str,
    weight_grad: bool,
    training: bool,
) -> tuple[Tensor, Tensor | None]:
    table = dispatch.quick
    known, call = quick.find(x, weight, eps, offset, casting, policy, (training, weight_grad))
    if call is not None and (done := quick.forward(call, x, weight, eps)) is not None:
        return done
    kernels = op.has_kernels(x, weight)
    if kernels and training:
        key = op.key_of("backward", x, weight, offset, casting, weight_grad, policy=policy)
        kernels = dispatch.choose(key).config is not None
    if kernels:
        y, rstd = op._forward(x, weight, eps, offset, casting, policy, training)
        if quick.is_new(table, known):
            kind = quick.Kind(offset, casting, policy, training or policy == INVARIANT, False)
            key = op.key_of("forward", x, weight, offset, casting, False, policy=policy)
            quick.keep(table, known, quick.ready(kind, key))
    else:
        y, rstd = op.by_torch(x, weight, eps, offset, casting), op.rstd_by_torch(x, eps) if training else None
    return y, rstd


def _backward(
    op: Any,
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    eps: float,
    offset: float,
    casting: str,
    policy: str,
    weight_grad: bool,
) -> tuple[Tensor, Tensor]:
    if op.has_kernels(x, weight):
        dx, dw = op.backward(dy, x, weight, rstd, eps, offset, casting, weight_grad, policy)
    else:
        dx, dw = op.backward_by_torch(dy, x, weight, eps, offset, casting, weight_grad)
    return dx, _nothing(x) if dw is None else dw


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, eps, offset, casting, policy, *_ = inputs
    ctx.save_for_backward(x, weight, output[1])
    ctx.contract = eps, offset, casting, policy
    ctx.mark_non_differentiable(output[1])


def _nothing(x: Tensor) -> Tensor:
    return x.new_empty(0, dtype=accumulate_dtype(x))


def _fake(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    offset: float,
    casting: str,
    policy: str,
    weight_grad: bool,
) -> tuple[Tensor, Tensor]:
    y = _fake_inference(x, weight, eps, offset, casting, policy)
    return y, x.new_empty(x.numel() // x.shape[-1], dtype=accumulate_dtype(x))


def _fake_inference(x: Tensor, weight: Tensor | None, eps: float, offset: float, casting: str, policy: str) -> Tensor:
    check(x, weight, 0.0, 0.0, casting)  # eps and offset may be symbols
    return x.new_empty(x.shape)


def _fake_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    eps: float,
    offset: float,
    casting: str,
    policy: str,
    weight_grad: bool,
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape) if weight is not None and weight_grad else _nothing(x)
