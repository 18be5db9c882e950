"""The second gate of the source: numbers against Hugging Face's Qwen3RMSNorm in bf16, each held against float64.

What `tunegen gate` measures, for both castings and with random weights and weights of one.
"""

from __future__ import annotations

import pytest
import torch
from helpers import CPU, places, same_bits
from torch import nn

from tunegen import rms_norm
from tunegen.gates import bf16
from tunegen.gates.eager import eager

place = places("cpu", "cuda")

every_shape = pytest.mark.parametrize("shape", bf16.SHAPES.values(), ids=bf16.SHAPES)


class HuggingFaceNorm(nn.Module):
    """The arithmetic of Qwen3RMSNorm and LlamaRMSNorm, for machines without transformers; a test holds it to theirs."""

    def __init__(self, hidden: int, eps: float = bf16.EPS) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return eager(x, self.weight, self.eps)


def compared(shape, place, casting, weight="random"):
    def norm(x, w, eps):
        return rms_norm(x, w, eps, casting=casting)

    draws = bf16.inputs(shape, 0, place.device, ones=weight == "ones")
    return bf16.compare(norm, HuggingFaceNorm(shape[-1]), draws)


@every_shape
@pytest.mark.parametrize("casting", ["fp32", "llama"])
def test_errors_are_at_most_those_of_hugging_face(place, shape, casting):
    for tensor, (ratio, measure) in compared(shape, place, casting).ratios.items():
        assert ratio <= bf16.LARGEST_RATIO, f"{measure} of {tensor}"


@every_shape
@pytest.mark.parametrize(("weight", "steps"), [("ones", 1), ("random", 2)])
def test_casting_llama_gives_the_bits_of_hugging_face(place, shape, weight, steps):
    """An x-hat at a rounding boundary may fall on its other side, one ulp away: a weight of 1 to 2 can make it two."""
    found = compared(shape, place, "llama", weight)
    assert found.different <= bf16.DIFFERENT
    assert found.ulps <= steps
    if weight == "random":
        assert compared(shape, place, "fp32").different > 0.1, "the test must tell the castings apart"


@pytest.mark.parametrize("name", ["qwen3.modeling_qwen3.Qwen3RMSNorm", "llama.modeling_llama.LlamaRMSNorm"])
def test_the_stand_in_is_hugging_faces(name):
    pytest.importorskip("transformers")
    module, kind = name.rsplit(".", 1)
    norm = getattr(pytest.importorskip(f"transformers.models.{module}"), kind)
    given = bf16.inputs((8, 512), 0, CPU.device)[0]
    real, stand_in = (bf16.run_module(make(512, eps=bf16.EPS), given) for make in (norm, HuggingFaceNorm))
    assert all(same_bits(a, b) for a, b in zip(real, stand_in, strict=True))
