"""The second gate of the source: numbers against Hugging Face's Qwen3RMSNorm in bf16, each held against float64.

Errors of y, dx and dw, with a random dy, are at most 1.05 x those of Hugging Face's own module. With casting "llama" no
element of y is further than one bf16 ulp from its y, and at most 1e-4 of the elements differ.
"""

from __future__ import annotations

import pytest
import torch
from helpers import CPU, Results, draw, error, exact, places, run, same_bits
from torch import nn

place = places("cpu", "cuda")

SHAPES = {"hidden states": (4, 512, 4096), "q or k norm": (2, 8, 64, 128)}
BF16 = torch.bfloat16

every_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


class HuggingFaceNorm(nn.Module):
    """The arithmetic of Qwen3RMSNorm and LlamaRMSNorm, for machines without transformers; a test holds it to theirs."""

    def __init__(self, hidden: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


def inputs(shape, place):
    x, dy = (draw(*shape, dtype=BF16, seed=seed, place=place) for seed in (0, 2))
    return x, (1 + 0.3 * draw(shape[-1], seed=1)).to(BF16).to(place.device), dy


def theirs(module, x, w, dy):
    module = module.to(x.device, BF16)
    with torch.no_grad():
        module.weight.copy_(w)
    x = x.detach().requires_grad_()
    y = module(x)
    y.backward(dy)
    return Results(y.detach(), x.grad, module.weight.grad)


def root_mean_square(got, right):
    return float(((got.double() - right) / right.abs().mean()).square().mean().sqrt())


@every_shape
@pytest.mark.parametrize("casting", ["fp32", "llama"])
def test_errors_are_at_most_those_of_hugging_face(place, shape, casting):
    x, w, dy = inputs(shape, place)
    ours, hf, right = run(x, w, dy, casting=casting), theirs(HuggingFaceNorm(shape[-1]), x, w, dy), exact(x, w, dy)
    for name, got, other, want in zip(Results._fields, ours, hf, right, strict=True):
        for measure in (error, root_mean_square):
            assert measure(got, want) <= 1.05 * measure(other, want), f"{measure.__name__} of {name}"


@every_shape
@pytest.mark.parametrize(("weight", "steps"), [("ones", 1), ("random", 2)])
def test_casting_llama_gives_the_bits_of_hugging_face(place, shape, weight, steps):
    """An x-hat at a rounding boundary may fall on its other side, one ulp away: a weight of 1 to 2 can make it two."""
    x, w, dy = inputs(shape, place)
    w = torch.ones_like(w) if weight == "ones" else w
    ours, hf = run(x, w, dy, casting="llama").y, theirs(HuggingFaceNorm(shape[-1]), x, w, dy).y
    assert (ours != hf).double().mean() <= 1e-4
    # Neighbours in bf16 have neighbouring bit patterns: as integers they differ by one.
    assert (ours.view(torch.int16).int() - hf.view(torch.int16).int()).abs().max() <= steps
    if weight == "random":
        assert (run(x, w, dy).y != hf).double().mean() > 0.1, "the test must tell the castings apart"


@pytest.mark.parametrize("name", ["qwen3.modeling_qwen3.Qwen3RMSNorm", "llama.modeling_llama.LlamaRMSNorm"])
def test_the_stand_in_is_hugging_faces(name):
    pytest.importorskip("transformers")
    module, kind = name.rsplit(".", 1)
    norm = getattr(pytest.importorskip(f"transformers.models.{module}"), kind)
    x, w, dy = inputs((8, 512), CPU)
    real, stand_in = (theirs(make(512, eps=1e-6), x, w, dy) for make in (norm, HuggingFaceNorm))
    assert all(same_bits(a, b) for a, b in zip(real, stand_in, strict=True))
