"""`rms_norm` as users call it: checks, the choice of a kernel, autograd."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from .. import dispatch, reference
from ..dispatch import Choice
from ..errors import BuildError, CapturedError, CompileError, RenderError
from ..key import Key
from ..key import key_of as key_of
from ..model import RMS_NORM
from ..policies import INVARIANT
from ..prepared import Call
from . import quick, registered
from .arguments import bound, check, check_out, is_distributed, written
from .arguments import has_kernels as has_kernels
from .arguments import no_kernels_because as no_kernels_because
from .by_torch import backward_by_torch as backward_by_torch
from .by_torch import by_torch as by_torch
from .by_torch import rstd_by_torch as rstd_by_torch
from .main_grad import adding_to, asked_for, check_main_grad, not_differentiated, not_traced
from .memory import check_memory
from .notes import give_way, note_torch

is_traced = torch.compiler.is_dynamo_compiling
OfCall = tuple[float, quick.Kind, Call | None, Tensor | None]
"""eps; kind, and call if that is known; main_grad, which is not saved since it changes until backward."""
ADD_RMS_NORM = "add_rms_norm"
"""The op whose backward kernels `backward` launches where a gradient of the sum comes in too."""


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    casting: str = "fp32",
    out: Tensor | None = None,
    policy: str | None = None,
    main_grad: Tensor | None = None,
) -> Tensor:
    """Root mean square normalisation over the last axis, y = x / sqrt(mean(x^2) + eps) * (weight + offset).

    Args:
        x: any shape (..., N) with N >= 1, any strides; bf16, fp16, fp32 or fp64.
        weight: (N) in any of these dtypes, on x's device, or None.
        eps: a finite Python number >= 0, added to the mean of squares; 1e-6 in every dtype.
        offset: added to the weight in fp32; 1.0 for Gemma. Ignored without a weight.
        casting: "fp32" rounds once; "llama" rounds x-hat to x's dtype first, as Hugging Face's Llama and Qwen3 do.
        out: where the result goes, of x's shape, dtype and device; x itself, or no memory of an input. No gradients.
        policy: "fastest", "deterministic" or "invariant", see `tunegen.policy`; backward follows that of its forward.
        main_grad: (N), contiguous, fp32 (fp64 for fp64 x): each backward through this call that is asked for dw adds it
            here, unrounded, and leaves weight.grad alone. Ignored where no gradient of the weight is wanted.

    Returns:
        `out`, or a contiguous tensor of x's shape and dtype. Gradients have the dtypes of x and of the weight. fp64
        inputs are computed in fp64, all others in fp32.

    Raises:
        TypeError: x, weight, out or main_grad is no tensor of these dtypes; eps or offset is no Python number.
        ValueError: shapes, devices, layouts, memory or numbers that do not fit; an unknown casting or policy.
        RuntimeError: out where a gradient is wanted; main_grad in a graph, under torch.func or with create_graph=True.

    The formula: Zhang and Sennrich 2019, arXiv:1910.07467. CUDA tensors go to kernels, others to torch operators.
    """
    if out is not None:
        return _into(out, x, weight, eps, offset, casting, policy)
    return _call(x, weight, eps, offset, casting, policy, main_grad)


def _call(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    offset: float,
    casting: str,
    policy: str | None,
    main_grad: Tensor | None = None,
) -> Tensor:
    if is_traced() or torch.compiler._is_compiling_flag:  # torch.compiler.is_compiling() takes twice as long
        not_traced(main_grad)
        return _traced(x, weight, eps, offset, casting, policy)
    table = dispatch.quick
    known, call = (None, None) if main_grad is not None else quick.find(x, weight, eps, offset, casting, policy)
    if call is not None:
        if call.kind.graded:
            y: Tensor = _apply(x, weight, (eps, call.kind, call, None))
            return y
        if (done := quick.forward(call, x, weight, eps)) is not None:
            return done[0]
    check(x, weight, eps, offset, casting)
    if main_grad is not None:
        check_main_grad(main_grad, x, weight)
    policy = dispatch.policy_of(policy)
    if not has_kernels(x, weight):
        if is_distributed(x, weight):
            from .distributed import by_shards

            if found := by_shards(lambda x, w: (_call(x, w, eps, offset, casting, policy),), (x,), weight):
                return found[0]
        if policy == INVARIANT and x.numel():
            note_torch(policy, no_kernels_because(x, weight))
        return by_torch(x, adding_to(weight, main_grad), eps, offset, casting)
    y, kind = _long_way(x, weight, eps, offset, casting, policy, main_grad)
    if kind is not None and quick.is_new(table, known):
        key = key_of("forward", x, weight, offset, casting, False, policy=policy)
        quick.keep(table, known, quick.ready(kind, key))
    return y


def _traced(x: Tensor, weight: Tensor | None, eps: float, offset: float, casting: str, policy: str | None) -> Tensor:
    """For a graph compiler: Inductor makes the kernel, and eps may be a symbol; or an operator is launched."""
    policy = dispatch.policy_of(policy, traced=True)
    of_call = x, weight, eps, offset, casting
    return registered.call(*of_call, policy) if registered.is_operator(policy) else by_torch(*of_call)


def _long_way(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    offset: float,
    casting: str,
    policy: str,
    main_grad: Tensor | None,
) -> tuple[Tensor, quick.Kind | None]:
    """y, looking everything up; and the kind of the call, None where torch answers all its like."""
    weight_grad, save_rstd = weight is not None and weight.requires_grad, policy == INVARIANT
    graded = torch.is_grad_enabled() and (x.requires_grad or weight_grad)
    if graded:
        choice = dispatch.choose(key_of("backward", x, weight, offset, casting, weight_grad, policy=policy))
        if choice.config is None:
            note_torch(policy, choice.rung)
            return by_torch(x, adding_to(weight, main_grad), eps, offset, casting), None
        save_rstd = save_rstd or choice.saves_rstd
    kind = quick.Kind(offset, casting, policy, save_rstd, graded)
    if not graded:
        return _forward(x, weight, eps, *kind.contract)[0], kind
    y: Tensor = _RMSNorm.apply(x, weight, (float(eps), kind, None, main_grad))
    return y, kind


def _into(
    out: Tensor, x: Tensor, weight: Tensor | None, eps: float, offset: float, casting: str, policy: str | None
) -> Tensor:
    """`rms_norm` without a gradient, written to `out`."""
    if not torch.compiler.is_compiling():
        _, call = quick.find(x, weight, eps, offset, casting, policy)
        if call is None:
            check(x, weight, eps, offset, casting)
        check_out("out", out, x, (x, weight))
        check_memory({"out": out}, {"x": x, "weight": weight})
        if call is not None and quick.into(out, call, x, weight, eps):
            return written(out)
        policy = dispatch.policy_of(policy)
        if has_kernels(x, weight, out) and writable(out, policy):
            _forward(x, weight, eps, offset, casting, policy, False, out)
            return written(out)
    return out.copy_(_call(x, weight, eps, offset, casting, policy))


def writable(out: Tensor, policy: str) -> bool:
    """Whether kernels may write to `out`; "invariant" has them compiled for aligned tensors only."""
    return out.is_contiguous() and not out.is_neg() and (policy != INVARIANT or out.data_ptr() % 16 == 0)


def _forward(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    offset: float,
    casting: str,
    policy: str,
    save_rstd: bool,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """y, in `out` if there is one, and rstd (M) if it is to be saved."""
    save_rstd = save_rstd or policy == INVARIANT  # one kernel, with a gradient or without
    rows = x.numel() // x.shape[-1]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    rstd = torch.empty(rows, dtype=reference.accumulate_dtype(x), device=x.device) if save_rstd else None
    tensors = {"x": x, "w": weight, "y": y, "rstd": rstd}
    key = key_of("forward", x, weight, offset, casting, False, policy=policy)
    if not launch(key, tensors, eps, offset, save_rstd):
        found = by_torch(x, weight, eps, offset, casting)
        y = found if out is None else out.copy_(found)
        if save_rstd:
            rstd = rstd_by_torch(x, eps)
    return y, rstd


def backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor | None,
    eps: float,
    offset: float,
    casting: str,
    weight_grad: bool,
    policy: str,
    dsum: Tensor | None = None,
    main_grad: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """dx, and dw if it is wanted and there is no `main_grad` to add it to; with `dsum`, which is added to dx, by the
    kernels of add_rms_norm."""
    table, of_call = dispatch.quick, (dy, x, weight, rstd, (offset, casting, policy), weight_grad, dsum)
    known, call = (None, None) if main_grad is not None else quick.find_backward(*of_call)
    if call is not None and (done := quick.backward(call, dy, x, weight, rstd, eps, weight_grad, dsum)) is not None:
        return done
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    in_place = main_grad is not None and writable(main_grad, policy)
    like = main_grad if main_grad is not None else weight if weight_grad else None
    dw = like if in_place or like is None else torch.empty_like(like, memory_format=torch.contiguous_format)
    tensors = {"x": x, "w": weight, "dy": dy, "rstd": rstd, "dx": dx, "dw": dw, "dsum": dsum}
    op = RMS_NORM if dsum is None else ADD_RMS_NORM
    key = key_of("backward", x, weight, offset, casting, weight_grad, op, policy=policy)
    launched = has_kernels(x, weight, dy, dsum, rstd) and launch(key, tensors, eps, offset, False, in_place)
    if not launched:
        wide = weight if weight is None or main_grad is None else weight.to(main_grad.dtype)
        dx, dw = backward_by_torch(dy, x, wide, eps, offset, casting, weight_grad, dsum)
    elif quick.is_new(table, known):
        quick.keep(table, known, quick.prepare(key, False, offset))
    if main_grad is None:
        return dx, dw
    if launched and in_place:
        written(main_grad)
    elif dw is not None:
        main_grad.add_(dw)
    return dx, None


def launch(
    key: Key,
    tensors: dict[str, Tensor | None],
    eps: float,
    offset: float,
    save_rstd: bool,
    accumulate_dw: bool = False,
) -> bool:
    """Launch the chosen variant; False where torch is the choice. What does not compile here gives way: a rendering for
    nested rows to copies, a choice to the next one."""
    x = tensors["x"]
    assert x is not None
    rows = x.numel() // x.shape[-1]
    while True:
        choice: Choice = dispatch.choose(key)
        if choice.config is None or (choice.saves_rstd and tensors["rstd"] is None):
            note_torch(key.policy, choice.rung)
            return False
        nested, arguments = bound(key, tensors, nest=choice.nests)
        try:
            choice.variant(save_rstd, offset, nested, accumulate_dw)(rows, {**arguments, "M": rows, "eps": float(eps)})
        except CapturedError as error:
            give_way(key, error)
            return False
        except (CompileError, RenderError, BuildError) as error:
            if nested:
                choice.copy_nested(error)
            else:
                dispatch.demote(key, choice, error)
        else:
            return True


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, of_call: OfCall) -> Tensor:
        eps, kind, call, _ = ctx.of_call = of_call
        done = None if call is None else quick.forward(call, x, weight, eps)
        y, rstd = done or _forward(x, weight, eps, *kind.contract)
        ctx.save_for_backward(x, weight, rstd)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, rstd = ctx.saved_tensors
        eps, kind, _, main_grad = ctx.of_call
        offset, casting, policy = kind[:3]  # the thread that runs this has no policy of its own
        x_grad, weight_grad, _ = ctx.needs_input_grad
        if main_grad is not None:
            main_grad = asked_for(main_grad if weight_grad else None, ctx, 1)
            not_differentiated(main_grad)
        if torch.is_grad_enabled():  # create_graph=True: operators that can be differentiated again
            dx, dw = backward_by_torch(dy, x, weight, eps, offset, casting, weight_grad)
        else:
            dx, dw = backward(dy, x, weight, rstd, eps, offset, casting, weight_grad, policy, None, main_grad)
        return dx if x_grad else None, dw, None


_apply = quick.bare_apply(_RMSNorm)
registered.register(sys.modules[__name__])
