"""One training run of the small Qwen3: the same weights and tokens every time, only the norm differs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..reference import DTYPES
from . import stream
from .checks import Norm
from .model import put_in, small_qwen3


@dataclass(frozen=True)
class Setting:
    """What a run depends on besides the norm. `dtype` is that of weights and activations; what the optimizers hold is
    fp32.

    Matrices learn by AdamW. The norms' weights learn by SGD with momentum, since Adam divides a wrong factor on dw
    out again: with it dw x .9 leaves no trace in how far the weights move.
    """

    steps: int = 500
    seed: int = 0
    dtype: str = "fp32"
    vocab: int = 32
    batch: int = 8
    sequence_length: int = 32
    lr: float = 1e-3
    norm_lr: float = 0.01
    momentum: float = 0.9
    warmup: int = 20


class Run(NamedTuple):
    """`losses` (steps) in nats a token, float64; `movements`: |w at the end - w at the start| of each norm's weight."""

    losses: Tensor
    movements: dict[str, float]


def tokens(setting: Setting) -> tuple[stream.Chain, Tensor]:
    """The chain, and its tokens (steps, batch, sequence_length)."""
    chain = stream.make_chain(setting.vocab, setting.seed)
    return chain, stream.sample(chain, setting.steps, setting.batch, setting.sequence_length, setting.seed + 1)


def train(
    norm: Norm | None, setting: Setting, batches: Tensor, device: torch.device, step_done: Callable[[], None]
) -> Run:
    """Train with `norm`, or with Hugging Face's own where it is None, on `batches` (steps, batch, sequence_length)."""
    model = small_qwen3(setting.vocab, setting.sequence_length, setting.seed).to(device, DTYPES[setting.dtype])
    if norm is not None:
        put_in(model, norm)
    learner = _Learner(model, setting)
    start = learner.norms()
    losses = []
    with _one_thread():
        for batch in batches.to(device):
            logits = model(input_ids=batch).logits
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).double(), batch[:, 1:].flatten())
            torch.autograd.backward(loss)
            learner.step()
            losses.append(loss.detach())
            step_done()
    movements = {name: float((end - start[name]).norm()) for name, end in learner.norms().items()}
    return Run(torch.stack(losses).cpu(), movements)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Tensors this small gain nothing from a second: on two cores shared with others a run took up to ten times as
    long with two."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Learner:
    """The optimizers, on fp32 copies of the parameters: in bf16 a step below an ulp of a weight would be lost."""

    def __init__(self, model: nn.Module, setting: Setting) -> None:
        self.setting, self.done = setting, 0
        self.parameters = dict(model.named_parameters())
        self.copies = {name: p.detach().float().clone() for name, p in self.parameters.items()}
        matrices = [copy for copy in self.copies.values() if copy.dim() > 1]
        # Adam's 1e-6 lets gradients of rounding's size be small steps; divided by themselves they would be full ones.
        self.optimizers = [
            torch.optim.AdamW(matrices, lr=setting.lr, eps=1e-6, weight_decay=0.0),
            torch.optim.SGD(list(self.norms(copy=False).values()), lr=setting.norm_lr, momentum=setting.momentum),
        ]

    def norms(self, copy: bool = True) -> dict[str, Tensor]:
        """The norms' weights in fp32, by name."""
        return {name: c.clone() if copy else c for name, c in self.copies.items() if c.dim() == 1}

    def step(self) -> None:
        """One step from the gradients at hand, which are dropped; a parameter without one had zeros."""
        self.done += 1
        warm = min(1.0, self.done / self.setting.warmup)
        for name, parameter in self.parameters.items():
            copy = self.copies[name]
            copy.grad = torch.zeros_like(copy) if parameter.grad is None else parameter.grad.float()
            parameter.grad = None
        for optimizer, lr in zip(self.optimizers, (self.setting.lr, self.setting.norm_lr), strict=True):
            optimizer.param_groups[0]["lr"] = warm * lr
            optimizer.step()
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(self.copies[name])
