"""Which modules are taken for an RMSNorm, by what they compute: right ones under their contract, wrong ones never."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tunegen import RMSNorm
from tunegen.errors import UnknownNormError
from tunegen.integrations.recognition import Contract, is_candidate, recognise


class Norm(nn.Module):
    """What the classes below share: one weight, one eps, arithmetic in fp32."""

    def __init__(self, hidden=64, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))
        self.eps = eps

    def scale(self, wide):
        return torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)


class Llama(Norm):
    def forward(self, x):
        wide = x.float()
        return self.weight * (wide * self.scale(wide)).to(x.dtype)


class Gemma(Norm):
    def forward(self, x):
        wide = x.float()
        return (wide * self.scale(wide) * (1.0 + self.weight.float())).type_as(x)


class Olmo(Norm):
    def forward(self, x):
        wide = x.float()
        return (self.weight * (wide * self.scale(wide))).to(x.dtype)


class ByPower(Norm):
    def forward(self, x):
        wide = x.float()
        return (wide * (wide.pow(2).mean(-1, keepdim=True) + self.eps).pow(-0.5) * self.weight.float()).type_as(x)


class InBf16(Norm):
    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class OtherEps(Norm):
    def forward(self, x):
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 10 * self.eps)).to(x.dtype)


class EpsOutside(Norm):
    def forward(self, x):
        wide = x.float()
        return self.weight * (wide / (wide.pow(2).mean(-1, keepdim=True).sqrt() + self.eps)).to(x.dtype)


class OverSequence(Norm):
    def forward(self, x):
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(1, keepdim=True) + self.eps)).to(x.dtype)


class Centered(Norm):
    def forward(self, x):
        wide = x.float() - x.float().mean(-1, keepdim=True)
        return self.weight * (wide * self.scale(wide)).to(x.dtype)


class HalfOffset(Norm):
    def forward(self, x):
        wide = x.float()
        return (wide * self.scale(wide) * (0.5 + self.weight.float())).type_as(x)


class MeanOfPart(Norm):
    def forward(self, x):
        wide = x.float()
        return self.weight * (wide * self.scale(wide[..., :32])).to(x.dtype)


class Gated(Norm):
    def forward(self, x, gate):
        return self.weight * F.silu(gate) * x


class Upcasting(Norm):
    def forward(self, x):
        wide = x.float()
        return self.weight.float() * (wide * self.scale(wide))


class T5(Norm):
    """Its result has the weight's dtype where that is of 16 bits."""

    def forward(self, x):
        x = x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * (x.to(self.weight.dtype) if self.weight.dtype == torch.bfloat16 else x)


class OptionalGate(Norm):
    def forward(self, x, gate=None):
        wide = x.float()
        return self.weight * (wide * self.scale(wide)).to(x.dtype)


class Dropping(Norm):
    def forward(self, x):
        wide = F.dropout(x.float(), 0.5, self.training)
        return self.weight * (wide * self.scale(wide)).to(x.dtype)


class PlainNone(Norm):
    """Without a weight, by a plain attribute."""

    def __init__(self):
        nn.Module.__init__(self)
        self.weight, self.eps = None, 1e-6

    def forward(self, x):
        wide = x.float()
        return (wide * self.scale(wide)).to(x.dtype)


class Weightless(nn.Module):
    def __init__(self, eps=1e-6):
        super().__init__()
        self.eps = eps

    def forward(self, x):
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class Biased(Llama):
    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(64))


class Raising(Norm):
    def forward(self, x):
        raise RuntimeError("needs\na GPU")


RIGHT = {
    "Llama": (Llama(), Contract(1e-6, 0.0, "llama", "promoted")),
    "Gemma": (Gemma(), Contract(1e-6, 1.0, "fp32")),
    "OLMo": (Olmo(), Contract(1e-6, 0.0, "fp32")),
    "power for rsqrt": (ByPower(), Contract(1e-6, 0.0, "fp32")),
    "without a weight": (Weightless(1e-5), Contract(1e-5, 0.0, "fp32")),
    "torch": (nn.RMSNorm(48, eps=1e-5), Contract(1e-5, 0.0, "fp32")),
    "torch without a weight": (nn.RMSNorm(64, eps=1e-5, elementwise_affine=False), Contract(1e-5, 0.0, "fp32")),
    "ours": (RMSNorm(32, eps=1e-4, offset=1.0), Contract(1e-4, 1.0, "fp32")),
    "T5": (T5(), Contract(1e-6, 0.0, "llama", "weight")),
    "weight None as a plain attribute": (PlainNone(), Contract(1e-6, 0.0, "fp32")),
    "odd width": (Llama(769, eps=1e-5), Contract(1e-5, 0.0, "llama", "promoted")),
    "eps 0": (Llama(eps=0.0), Contract(0.0, 0.0, "llama", "promoted")),
    "eps 1": (Llama(eps=1), Contract(1.0, 0.0, "llama", "promoted")),
    "bf16 weight": (Llama().bfloat16(), Contract(1e-6, 0.0, "llama", "promoted")),
    "no memory behind it": (Llama().to("meta"), Contract(1e-6, 0.0, "llama", "promoted")),
}
WRONG = {
    "sums in bf16": (InBf16(), "rounds otherwise"),
    "another eps than it says": (OtherEps(), "something else"),
    "eps outside of the root": (EpsOutside(), "something else"),
    "another axis": (OverSequence(), "something else"),
    "layer norm": (Centered(), "something else"),
    "offset of a half": (HalfOffset(), "something else"),
    "part of the row": (MeanOfPart(), "something else"),
    "two inputs": (Gated(), "other arguments"),
    "optional gate": (OptionalGate(), "other arguments"),
    "dropout in training": (Dropping().eval(), "something else"),
    "another dtype": (Upcasting(), "makes torch.float32 of torch.bfloat16"),
    "bias": (Biased(), "other parameters than a weight: bias"),
    "raises": (Raising(), "could not be tried: RuntimeError: a GPU"),
    "eps None": (nn.RMSNorm(8), "eps is None"),
    "two axes": (nn.RMSNorm((4, 4), eps=1e-6), "weight is no vector"),
    "submodules": (nn.Sequential(Llama()), "submodules"),
    "one element": (Llama(1), "has 1 elements"),
    "no eps": (nn.Linear(4, 4, bias=False), "no vector"),
    "torch's layer norm": (nn.LayerNorm(8, bias=False), "something else"),
}


@pytest.mark.parametrize("name", RIGHT)
def test_contract_is_read_from_what_is_computed(name):
    module, contract = RIGHT[name]
    assert is_candidate(module)
    assert recognise(module)(module) == contract


@pytest.mark.parametrize("name", WRONG)
def test_what_computes_otherwise_is_refused_with_the_reason(name):
    module, words = WRONG[name]
    with pytest.raises(UnknownNormError, match=words):
        recognise(module)


def test_contract_follows_a_change_of_eps():
    module = Llama()
    read = recognise(module)
    module.eps = 0.5
    assert read(module).eps == 0.5


@pytest.mark.parametrize("eps", ["1e-6", True, torch.tensor(1e-6)])
def test_eps_must_be_a_number(eps):
    module = Llama()
    module.eps = eps
    with pytest.raises(UnknownNormError, match="no number"):
        recognise(module)


def test_module_is_not_touched():
    """Neither its hooks nor its weight, and no random number is drawn."""
    module, seen = Llama(), []
    module.register_forward_hook(lambda *_: seen.append(1))
    before, state = dict(vars(module)), torch.get_rng_state()
    weight = module.weight.detach().clone()
    recognise(module)
    assert not seen
    assert vars(module) == before
    assert torch.equal(module.weight, weight)
    assert module.weight.grad is None
    assert torch.equal(torch.get_rng_state(), state)


def test_recognised_under_surroundings_of_the_caller():
    """Default device and dtype, autocast and grad mode are the caller's."""
    with torch.device("meta"), torch.autocast("cpu", torch.bfloat16), torch.enable_grad():
        module = Llama()
        assert recognise(module)(module) == Contract(1e-6, 0.0, "llama", "promoted")
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert recognise(Llama())(Llama()) == Contract(1e-6, 0.0, "llama", "promoted")
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("module", [nn.Linear(4, 4), nn.Linear(4, 4, bias=False), nn.GELU(), nn.BatchNorm1d(4)])
def test_what_is_clearly_no_norm_is_no_candidate(module):
    assert not is_candidate(module)
