"""Other libraries: each function makes the form of a cell, and raises what their import or their limits raise. Which of
a library's functions is called is the strongest that the release ships, by its own comments and benchmarks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tunegen.ops.rms_norm_spec import EPS

from .calls import Form, form_of
from .cells import Cell


def _forward_only(cell: Cell) -> None:
    if cell.direction == "backward":
        raise NotImplementedError("it has no backward")


def liger(cell: Cell, in_place: bool = False) -> Form:
    """The Triton kernel, by module: `liger_kernel.ops` may export another backend's."""
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    return form_of(cell, lambda x, w: LigerRMSNormFunction.apply(x, w, EPS, 0.0, "llama", in_place))


def liger_add(cell: Cell, in_place: bool = False) -> Form:
    """The Triton kernel."""
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction

    return form_of(cell, lambda x, r, w: LigerFusedAddRMSNormFunction.apply(x, r, w, EPS, 0.0, "llama", in_place))


def liger_cute(cell: Cell, in_place: bool = False) -> Form:
    """The CuTe DSL kernel. Where it would hand over to Triton, it does not play."""
    from liger_kernel.ops.backends._cutedsl.rms_norm import rms_norm_cutedsl

    _no_fallback()
    return form_of(cell, lambda x, w: rms_norm_cutedsl(x, w, EPS, in_place=in_place))


def liger_cute_add(cell: Cell, in_place: bool = False) -> Form:
    """The CuTe DSL kernel. Where it would hand over to Triton, it does not play."""
    from liger_kernel.ops.backends._cutedsl.fused_add_rms_norm import fused_add_rms_norm_cutedsl

    _no_fallback()
    return form_of(cell, lambda x, r, w: fused_add_rms_norm_cutedsl(x, r, w, EPS, in_place=in_place))


def _no_fallback() -> None:
    from liger_kernel.backends import LigerImplFallbackWarning

    warnings.simplefilter("error", LigerImplFallbackWarning)


liger_in_place, liger_add_in_place = partial(liger, in_place=True), partial(liger_add, in_place=True)
liger_cute_in_place, liger_cute_add_in_place = (
    partial(liger_cute, in_place=True),
    partial(liger_cute_add, in_place=True),
)


def unsloth(cell: Cell, in_place: bool = False) -> Form:
    """Its autograd function, which `fast_rms_layernorm` applies."""
    from unsloth.kernels.rms_layernorm import Fast_RMS_Layernorm

    return form_of(cell, lambda x, w: Fast_RMS_Layernorm.apply(x, w, EPS, False, False, in_place))


unsloth_in_place = partial(unsloth, in_place=True)


def unsloth_add(cell: Cell) -> Form:
    """Its fused addition of decoding."""
    from unsloth.kernels.fused_add_rms_layernorm import fast_add_rms_layernorm_inference

    _forward_only(cell)
    return form_of(cell, lambda x, r, w: (fast_add_rms_layernorm_inference(x, r, w, EPS), r))


def fla(cell: Cell) -> Form:
    """Its function; without a bias."""
    from fla.modules.norm.layernorm import rms_norm

    return form_of(cell, lambda x, w: rms_norm(x, w, None, eps=EPS))


def fla_add(cell: Cell) -> Form:
    """The same function with a residual and the sum returned."""
    from fla.modules.norm.layernorm import rms_norm

    return form_of(cell, lambda x, r, w: rms_norm(x, w, None, r, EPS, True))


def quack(cell: Cell) -> Form:
    """Its function, configured by its table of widths."""
    from quack import rmsnorm

    return form_of(cell, lambda x, w: rmsnorm(x, w, eps=EPS))


def quack_add(cell: Cell) -> Form:
    """The same function with a residual and the sum returned."""
    from quack import rmsnorm

    return form_of(cell, lambda x, r, w: rmsnorm(x, w, residual=r, eps=EPS, prenorm=True))


def quack_tuned(cell: Cell) -> Form:
    """What its autotuner finds for this shape."""
    return _quack_tuned_backward if cell.direction == "backward" else form_of(cell, _quack_tuned_norm)


def _quack_tuned_norm(x: Tensor, w: Tensor) -> Tensor:
    from quack.rmsnorm import rmsnorm_fwd_tuned

    y = torch.empty_like(x)
    rmsnorm_fwd_tuned(x, w, y, eps=EPS)
    return y


def quack_tuned_add(cell: Cell) -> Form:
    """What its autotuner finds for this shape."""
    from quack.rmsnorm import rmsnorm_fwd_tuned

    def norm(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y, total = torch.empty_like(x), torch.empty_like(x)
        rmsnorm_fwd_tuned(x, w, y, residual=r, residual_out=total, eps=EPS)
        return y, total

    return _quack_tuned_backward if cell.direction == "backward" else form_of(cell, norm)


def _quack_tuned_backward(tensors: Mapping[str, Tensor]) -> Callable[[], dict[str, Tensor]]:
    """As its `rmsnorm_bwd` does it, but by the tuned kernel."""
    from quack.rmsnorm import get_sm_count, rmsnorm_bwd_tuned

    x, w = tensors["x"], tensors["w"]  # with the addition x is the sum
    extra = {"dresidual_out": tensors["dsum"]} if "dsum" in tensors else {}
    programs = get_sm_count(x.shape[-1], x.device)

    def run() -> dict[str, Tensor]:
        dx = torch.empty_like(x)
        partials = torch.empty((programs, x.shape[-1]), device=x.device, dtype=torch.float32)
        rmsnorm_bwd_tuned(x, w, tensors["dy"], tensors["rstd"], dx, partials, has_dw_partial=True, **extra)
        return {"dx": dx, "dw": partials.sum(dim=0).to(w.dtype)}

    return run


def transformer_engine(cell: Cell) -> Form:
    """Its module, called with the weight of the moment."""
    from transformer_engine.pytorch import RMSNorm

    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[cell.dtype]
    module = RMSNorm(cell.hidden, eps=EPS, params_dtype=dtype, device="cuda")
    call: Any = torch.func.functional_call
    return form_of(cell, lambda x, w: call(module, {"weight": w}, (x,)))


def apex(cell: Cell) -> Form:
    """The function behind its module FusedRMSNorm."""
    from apex.normalization.fused_layer_norm import fused_rms_norm_affine

    return form_of(cell, lambda x, w: fused_rms_norm_affine(x, w, (cell.hidden,), eps=EPS))


def xformers(cell: Cell) -> Form:
    """Its function."""
    from xformers.ops.rmsnorm import rms_norm

    _forward_only(cell)
    return form_of(cell, lambda x, w: rms_norm(x, w, EPS))


def xformers_add(cell: Cell) -> Form:
    """Its fused addition, which adds in place."""
    from xformers.ops.rmsnorm import rms_norm_add

    _forward_only(cell)
    return form_of(cell, lambda x, r, w: (rms_norm_add(x, r, w, EPS), x))
