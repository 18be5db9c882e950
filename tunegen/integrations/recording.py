"""`record`: the norm problems of one real step of a model, by hooks that are taken off again."""

from __future__ import annotations

import contextlib
import random
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UnknownNormError
from ..layouts import is_copied
from ..model import RMS_NORM, Problem
from ..ops.arguments import is_distributed
from ..ops.rms_norm import ADD_RMS_NORM
from ..recorded import RecordedCall, Recording
from ..reference import DTYPE_NAMES
from .forwards import forward_of
from .fusion import EXPECTS_RESIDUAL
from .recognition import Contract, is_candidate, recognised


def record(model: nn.Module, batch: Any) -> Recording:
    """Run one step of `model` and note every norm call: shapes, strides, dtypes, directions, counts.

    The step is `model(**batch)` for a mapping, `model(*batch)` for a tuple or list, else `model(batch)`. A model in
    training mode (`model.train()`) also runs backward, from the `loss` of the result (or the result itself) where that
    is one number. Gradients of its parameters stay as they are, and the random numbers of torch, Python and NumPy go on
    as if nothing had run. What else a step changes it changes: running statistics (BatchNorm), other buffers, and the
    gradients of tensors of the batch that ask for one.

    Args:
        model: patched or not; its norms are recognised as by `patch`.
        batch: what the model takes; for backward it holds the labels too.

    Raises:
        TypeError: model is no module.
        ValueError: no norm that tunegen knows ran; or the model is in training mode and its result has no loss.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a module, got {type(model).__name__}")
    notes: Counter[RecordedCall] = Counter()
    with contextlib.ExitStack() as stack:
        for module in model.modules():
            if is_candidate(module):
                with contextlib.suppress(UnknownNormError):
                    _, contract = recognised(module, forward_of(module))
                    handle = module.register_forward_hook(_hook(notes, contract), with_kwargs=True)
                    stack.callback(handle.remove)
        stack.enter_context(_random_states_kept(model))
        stack.enter_context(_gradients_kept(model))
        stack.enter_context(torch.compiler.set_stance("force_eager"))  # compiled code may not call hooks
        _step(model, batch)
    if not notes:
        raise ValueError("no norm that tunegen knows ran in this step; patch(model) says why each was left")
    calls = tuple(RecordedCall(**{**vars(call), "count": count}) for call, count in notes.items())
    return Recording(type(model).__name__, calls)


def _step(model: nn.Module, batch: Any) -> None:
    if isinstance(batch, Mapping):
        result = model(**batch)
    else:
        result = model(*batch) if isinstance(batch, (tuple, list)) else model(batch)
    if not (model.training and torch.is_grad_enabled()):
        return
    first = result[0] if isinstance(result, tuple) and result else result
    loss = result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", first)
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise ValueError(
            "the model is in training mode, but its result has no loss to run backward from: put labels into the "
            "batch, or call model.eval() to record forward alone"
        )
    torch.autograd.backward(loss)


def _hook(notes: Counter[RecordedCall], contract: Contract) -> Any:
    def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], y: Any) -> None:
        x, *others = (*args, *kwargs.values())
        residual = others[0] if others else None  # of a layer whose residual add is fused
        weight = getattr(module, "weight", None)
        y = y[0] if residual is not None else y
        if is_distributed(x, residual):  # what runs here is the norm of the rows that lie here
            x, residual = _here(x), _here(residual)
        if not isinstance(x, Tensor) or not isinstance(y, Tensor) or x.dtype not in DTYPE_NAMES or not x.numel():
            return
        notes[_call("forward", x, residual, weight, contract, None)] += 1
        if y.requires_grad:
            # Shape and strides alone: x itself would live as long as the graph.
            meta = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
            if residual is not None:  # backward starts from the sum
                meta = torch.empty_like(meta, memory_format=torch.contiguous_format)
            other = None if residual is None else meta
            wanted = weight is not None and weight.requires_grad
            y.register_hook(lambda dy: notes.update([_call("backward", meta, other, weight, contract, dy, wanted)]))  # type: ignore[no-untyped-call]

    setattr(after, EXPECTS_RESIDUAL, True)
    return after


def _here(tensor: Any) -> Any:
    """The same, or of a distributed tensor the part that lies here."""
    return tensor.to_local() if is_distributed(tensor) else tensor


def _call(
    direction: str,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    contract: Contract,
    dy: Tensor | None,
    weight_grad: bool = False,
) -> RecordedCall:
    problem = Problem(
        op=RMS_NORM if residual is None else ADD_RMS_NORM,
        direction=direction,
        hidden=x.shape[-1],
        rows=x.numel() // x.shape[-1],
        x_dtype=DTYPE_NAMES[x.dtype],
        weight_dtype=None if weight is None else DTYPE_NAMES[weight.dtype],
        casting=contract.casting,
        offset=weight is not None and contract.offset != 0.0,
        weight_grad=weight_grad,
    )
    dy = _here(dy)
    copied = sum(is_copied(t, nest=residual is None) for t in (x, residual, dy) if t is not None)
    return RecordedCall(problem, 1, tuple(x.shape), x.stride(), None if dy is None else dy.stride(), copied)


@contextlib.contextmanager
def _random_states_kept(model: nn.Module) -> Iterator[None]:
    """torch's, Python's, and NumPy's where that is loaded."""
    devices = {p.device.index for p in model.parameters() if p.is_cuda}
    numpy: Any = sys.modules.get("numpy")
    state, numpy_state = random.getstate(), numpy and numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(state)
        if numpy:
            numpy.random.set_state(numpy_state)


@contextlib.contextmanager
def _gradients_kept(model: nn.Module) -> Iterator[None]:
    # Copies too: under DistributedDataParallel a gradient may be a view of a bucket that backward writes.
    kept = [(p, p.grad, None if p.grad is None else p.grad.clone()) for p in model.parameters()]
    for parameter, _, _ in kept:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient, copy in kept:
            parameter.grad = gradient
            if gradient is not None and copy is not None:
                gradient.copy_(copy)
