"""`add_rms_norm` as users call it: the residual add fused with the norm behind it. Checks, the choice of a kernel and
backward are rms_norm's."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import dispatch, reference
from ..key import Key
from ..policies import INVARIANT
from ..prepared import Call
from . import quick, registered
from . import rms_norm as norm
from .arguments import check, check_like, check_out, is_distributed, written
from .main_grad import adding_to, asked_for, check_main_grad, not_differentiated, not_traced
from .memory import check_memory
from .notes import note_torch

Pair = tuple[Tensor, Tensor]


class Contract(NamedTuple):
    """What is computed, beside the tensors."""

    eps: float
    offset: float
    casting: str
    sum_in_fp32: bool
    policy: str | None


OfCall = tuple[Contract, quick.Kind, Call | None, Tensor | None]
"""As that of rms_norm, with the contract in place of eps."""


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    casting: str = "fp32",
    sum_in_fp32: bool = False,
    out: Pair | None = None,
    policy: str | None = None,
    main_grad: Tensor | None = None,
) -> Pair:
    """The residual add and the norm behind it in one pass: sum = x + residual, y = rms_norm(sum, weight, eps).

    Args:
        x: any shape (..., N) with N >= 1, any strides; bf16, fp16, fp32 or fp64.
        residual: of x's shape, dtype and device, any strides.
        weight, eps, offset, casting, policy, main_grad: as in `tunegen.rms_norm`.
        sum_in_fp32: True lets the norm read x + residual in fp32, as flash-attn and quack do; by default it reads the
            sum that is returned, rounded to x's dtype, as Hugging Face's layers do.
        out: where y and the sum go, like x. They may be x and residual, else no memory of an input. No gradients.

    Returns:
        (y, sum), `out` or contiguous tensors of x's shape and dtype. x and residual have one gradient, one tensor. It
        is that of the sum as it is returned; with `sum_in_fp32`, that takes the rounding for the identity.

    Raises:
        TypeError, ValueError, RuntimeError: as `tunegen.rms_norm`, and for a residual that is not like x or for `out`
            of which both share memory.

    The norm is that of Zhang and Sennrich 2019, arXiv:1910.07467; the fusion is known from flash-attn and vLLM.
    """
    contract = tuple.__new__(Contract, (eps, offset, casting, sum_in_fp32, policy))  # less a layer of Python
    if out is not None:
        return _into(out, x, residual, weight, contract)
    return _call(x, residual, weight, contract, main_grad)


def add_rms_norm_(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    casting: str = "fp32",
    sum_in_fp32: bool = False,
    policy: str | None = None,
) -> Pair:
    """`add_rms_norm` in place, for inference: y is written over x and the sum over residual; returns them both.

    Args, arithmetic and errors are those of `add_rms_norm`.

    Raises:
        RuntimeError: a gradient is wanted; call it under torch.no_grad(), or `add_rms_norm`.
        ValueError: x and residual share memory: one result would be written over the other. Or the weight is in them.
    """
    contract = Contract(eps, offset, casting, sum_in_fp32, policy)
    return _into((x, residual), x, residual, weight, contract, ("x", "residual"), "use add_rms_norm")


def _check(x: Tensor, residual: Tensor, weight: Tensor | None, contract: Contract) -> None:
    check(x, weight, contract.eps, contract.offset, contract.casting)
    check_like("residual", residual, x)
    if not isinstance(contract.sum_in_fp32, bool):
        raise TypeError(f"sum_in_fp32 must be True or False, got {type(contract.sum_in_fp32).__name__}")


def _call(
    x: Tensor, residual: Tensor, weight: Tensor | None, contract: Contract, main_grad: Tensor | None = None
) -> Pair:
    if norm.is_traced() or torch.compiler._is_compiling_flag:  # traced: Inductor fuses the two by itself
        not_traced(main_grad)
        policy = dispatch.policy_of(contract.policy, traced=True)
        if policy == INVARIANT and not contract.sum_in_fp32:  # an addition depends on nothing else, a traced norm may
            total = (x + residual).contiguous()
            return registered.call(total, weight, contract.eps, contract.offset, contract.casting, policy), total
        return by_torch(x, residual, weight, contract)
    table = dispatch.quick
    known, call = (None, None) if main_grad is not None else _find(x, residual, weight, contract)
    if call is not None:
        if call.kind.graded:
            y, total = _apply(x, residual, weight, (contract, call.kind, call, None))
            return y, total
        if (done := quick.add_forward(call, x, residual, weight, contract.eps)) is not None:
            return done[0]
    _check(x, residual, weight, contract)
    if main_grad is not None:
        check_main_grad(main_grad, x, weight, residual)
    policy = dispatch.policy_of(contract.policy)
    contract = contract._replace(policy=policy)
    if not norm.has_kernels(x, weight, residual):
        if is_distributed(x, residual, weight):
            from .distributed import by_shards

            if found := by_shards(lambda x, r, w: _call(x, r, w, contract), (x, residual), weight):
                return found[0], found[1]
        if policy == INVARIANT and x.numel():
            note_torch(policy, norm.no_kernels_because(x, weight, residual))
        return by_torch(x, residual, adding_to(weight, main_grad), contract)
    result, kind = _long_way(x, residual, weight, contract, main_grad)
    if kind is not None and quick.is_new(table, known):
        quick.keep(table, known, quick.ready(kind, _forward_key(x, weight, contract)))
    return result


def _find(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, contract: Contract
) -> tuple[quick.Values | None, Call | None]:
    """`quick.find` with what the residual and `sum_in_fp32` decide."""
    eps, offset, casting, sum_in_fp32, policy = contract
    if residual is None or sum_in_fp32.__class__ is not bool:
        return None, None
    return quick.find(x, weight, eps, offset, casting, policy, sum_in_fp32, residual)


def _long_way(
    x: Tensor, residual: Tensor, weight: Tensor | None, contract: Contract, main_grad: Tensor | None
) -> tuple[Pair, quick.Kind | None]:
    """y and the sum, looking everything up; and the kind of the call, None where torch answers all its like."""
    _, offset, casting, _, policy = contract
    assert policy is not None
    weight_grad, save_rstd = weight is not None and weight.requires_grad, policy == INVARIANT
    graded = torch.is_grad_enabled() and (x.requires_grad or residual.requires_grad or weight_grad)
    if graded:
        of_call = x, weight, offset, casting, weight_grad, norm.ADD_RMS_NORM
        choice = dispatch.choose(norm.key_of("backward", *of_call, policy=policy))
        if choice.config is None:
            note_torch(policy, choice.rung)
            return by_torch(x, residual, adding_to(weight, main_grad), contract), None
        save_rstd = save_rstd or choice.saves_rstd
    kind = quick.Kind(offset, casting, policy, save_rstd, graded)
    if not graded:
        return _forward(x, residual, weight, contract, save_rstd)[0], kind
    contract = contract._replace(eps=float(contract.eps))
    y, total = _AddRMSNorm.apply(x, residual, weight, (contract, kind, None, main_grad))
    return (y, total), kind


def _into(
    out: Pair,
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    contract: Contract,
    names: tuple[str, str] = ("out[0]", "out[1]"),
    instead: str = "call it without out",
) -> Pair:
    """Without a gradient, written to `out`, whose tensors are called `names`; `instead` does not write there."""
    if not torch.compiler.is_compiling():
        _, call = _find(x, residual, weight, contract)
        if call is None:
            _check(x, residual, weight, contract)
        if not isinstance(out, (tuple, list)) or len(out) != 2:
            raise TypeError(f"out must be a pair of tensors, for y and the sum, got {type(out).__name__}")
        for name, tensor in zip(names, out, strict=True):
            check_out(name, tensor, x, (x, residual, weight), instead)
        check_memory(dict(zip(names, out, strict=True)), {"x": x, "residual": residual, "weight": weight})
        if call is not None and quick.are_usual(out):
            done = quick.add_forward(call, x, residual, weight, contract.eps, out)
            if done is not None:
                return written(out[0]), written(out[1])
        policy = dispatch.policy_of(contract.policy)
        contract = contract._replace(policy=policy)
        if norm.has_kernels(x, weight, residual, *out) and all(norm.writable(t, policy) for t in out):
            _forward(x, residual, weight, contract, save_rstd=False, out=out)
            return written(out[0]), written(out[1])
    y, total = _call(x, residual, weight, contract)
    return out[0].copy_(y), out[1].copy_(total)


def by_torch(x: Tensor, residual: Tensor, weight: Tensor | None, contract: Contract) -> Pair:
    """An addition and rms_norm in torch operators."""
    eps, offset, casting, sum_in_fp32, _ = contract
    if sum_in_fp32:
        y, total = reference.add_rms_norm(
            x, residual, weight, eps, offset=offset, casting=casting, sum_in_fp32=sum_in_fp32
        )
        return y.contiguous(), total.contiguous()
    total = x + residual
    return norm.by_torch(total, weight, eps, offset, casting), total.contiguous()


def reads_another_sum(x: Tensor, sum_in_fp32: bool) -> bool:
    """Whether the norm reads another sum than the one that is returned: only 16-bit x rounds it."""
    return sum_in_fp32 and x.element_size() == 2


def _forward(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    contract: Contract,
    save_rstd: bool,
    out: Pair | None = None,
) -> tuple[Pair, Tensor | None]:
    """y and the sum, in `out` if there is one, and rstd (M) if it is to be saved."""
    eps, offset, *_, policy = contract
    save_rstd = save_rstd or policy == INVARIANT  # one kernel, with a gradient or without
    y, total = out or [torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2)]
    rows = x.numel() // x.shape[-1]
    rstd = torch.empty(rows, dtype=reference.accumulate_dtype(x), device=x.device) if save_rstd else None
    tensors = {"x": x, "residual": residual, "w": weight, "y": y, "sum": total, "rstd": rstd}
    if not norm.launch(_forward_key(x, weight, contract), tensors, eps, offset, save_rstd):
        found = by_torch(x, residual, weight, contract)
        y, total = found if out is None else (out[0].copy_(found[0]), out[1].copy_(found[1]))
        rstd = norm.rstd_by_torch(total, eps) if save_rstd else None
    return (y, total), rstd


def _forward_key(x: Tensor, weight: Tensor | None, contract: Contract) -> Key:
    _, offset, casting, sum_in_fp32, policy = contract
    apart = reads_another_sum(x, sum_in_fp32)
    return norm.key_of("forward", x, weight, offset, casting, False, norm.ADD_RMS_NORM, apart, policy=policy)


class _AddRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor, weight: Tensor | None, of_call: OfCall) -> Pair:
        contract, kind, call, _ = ctx.of_call = of_call
        done = None if call is None else quick.add_forward(call, x, residual, weight, contract.eps)
        if done is None:
            done = _forward(x, residual, weight, contract._replace(policy=kind.policy), kind.save_rstd)
        (y, total), rstd = done
        ctx.save_for_backward(total, weight, rstd)
        # A result that nobody uses has no gradient, rather than zeros to add: the last norm's sum, in every model.
        ctx.set_materialize_grads(False)
        x_grad, residual_grad, *_ = ctx.needs_input_grad
        if not (x_grad or residual_grad):  # the sum does not depend on the weight
            ctx.mark_non_differentiable(total)
        return y, total

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dsum: Tensor | None) -> tuple[Tensor | None, ...]:
        total, weight, rstd = ctx.saved_tensors
        contract, kind, _, main_grad = ctx.of_call
        eps, (offset, casting, policy) = contract.eps, kind[:3]
        x_grad, residual_grad, weight_grad, _ = ctx.needs_input_grad
        dx: Tensor | None
        if main_grad is not None:
            main_grad = asked_for(main_grad if weight_grad else None, ctx, 2)
            not_differentiated(main_grad)
        if dy is None:
            dx, dw = dsum, None
        elif torch.is_grad_enabled():  # create_graph=True: operators that can be differentiated again
            dx, dw = norm.backward_by_torch(dy, total, weight, eps, offset, casting, weight_grad, dsum)
        else:
            if dsum is None and rstd is None:  # rms_norm's kernels may want what those of this op recompute
                rstd = norm.rstd_by_torch(total, eps)
            of_call = eps, offset, casting, weight_grad, policy
            dx, dw = norm.backward(dy, total, weight, rstd, *of_call, dsum, main_grad)
        return dx if x_grad else None, dx if residual_grad else None, dw, None


_apply = quick.bare_apply(_AddRMSNorm)
