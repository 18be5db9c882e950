"""`tunegen.RMSNorm`: what it is built from, what it loads, and that it survives what users do to modules."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from helpers import draw, same_bits, weight_of
from torch import nn

from tunegen import RMSNorm, rms_norm

HIDDEN = 48


def trained(**contract):
    """A module whose weight is not what it started from."""
    module = RMSNorm(HIDDEN, 1e-5, **contract)
    with torch.no_grad():
        module.weight.copy_(weight_of(HIDDEN))
    return module


@pytest.mark.parametrize("contract", [{}, {"casting": "llama"}, {"offset": 1.0}], ids=str)
def test_forward_is_the_op(contract):
    x = draw(3, HIDDEN, dtype=torch.bfloat16)
    module = trained(**contract)
    y = module(x)
    assert same_bits(y, rms_norm(x, module.weight, 1e-5, **contract))
    y.float().square().sum().backward()
    assert module.weight.grad.abs().min() > 0


def test_loads_a_state_dict_of_torch():
    theirs = nn.RMSNorm(HIDDEN, 1e-5)
    nn.init.normal_(theirs.weight)
    ours = RMSNorm(HIDDEN, 1e-5)
    assert ours.load_state_dict(theirs.state_dict()).missing_keys == []
    x = draw(3, HIDDEN)
    assert torch.allclose(ours(x), theirs(x), rtol=1e-6, atol=1e-6)
    theirs.load_state_dict(ours.state_dict())


@pytest.mark.parametrize("name", ["qwen3.modeling_qwen3.Qwen3RMSNorm", "llama.modeling_llama.LlamaRMSNorm"])
def test_loads_a_state_dict_of_hugging_face(name):
    pytest.importorskip("transformers")
    module, kind = name.rsplit(".", 1)
    theirs = getattr(pytest.importorskip(f"transformers.models.{module}"), kind)(HIDDEN, 1e-5)
    nn.init.normal_(theirs.weight)
    ours = RMSNorm(HIDDEN, 1e-5, casting="llama")
    assert ours.load_state_dict(theirs.state_dict()).missing_keys == []
    x = draw(3, HIDDEN)
    assert torch.allclose(ours(x), theirs(x), rtol=1e-6, atol=1e-6)
    theirs.load_state_dict(ours.state_dict())


def test_refuses_a_state_dict_of_another_size():
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        RMSNorm(HIDDEN).load_state_dict(nn.RMSNorm(HIDDEN + 1).state_dict())


def test_repr_shows_the_contract():
    assert repr(RMSNorm(8, 1e-5, offset=1.0, casting="llama")) == "RMSNorm(8, eps=1e-05, offset=1.0, casting='llama')"


@pytest.mark.parametrize("hidden", [8, [8], (8,), torch.Size([8])], ids=repr)
def test_hidden_as_torch_takes_it(hidden):
    assert RMSNorm(hidden).weight.shape == (8,)


@pytest.mark.parametrize("hidden", [0, -1, [], (4, 4)], ids=repr)
def test_refuses_a_hidden_that_is_no_size(hidden):
    with pytest.raises(ValueError, match="one size of at least 1") as caught:
        RMSNorm(hidden)
    assert str(hidden) in str(caught.value)


@pytest.mark.parametrize("hidden", [8.0, True, "8", None, (8.0,)], ids=repr)
def test_refuses_a_hidden_that_is_no_int(hidden):
    with pytest.raises(TypeError, match="int or a sequence of one int") as caught:
        RMSNorm(hidden)
    assert repr(hidden) in str(caught.value)


def test_refuses_an_unknown_casting():
    with pytest.raises(ValueError, match=r"casting .*fp32, llama.*'gemma'"):
        RMSNorm(8, casting="gemma")


@pytest.mark.parametrize("name", ["eps", "offset"])
@pytest.mark.parametrize("value", [None, "1", True, math.nan, math.inf, 10**400, torch.tensor(1)], ids=str)
def test_refuses_what_the_call_refuses_when_it_is_made(name, value):
    """It failed at the first forward, maybe hours behind the mistake."""
    with pytest.raises((TypeError, ValueError), match=f"^{name} must be a ") as made:
        RMSNorm(8, **{name: value})
    with pytest.raises(made.type) as called:
        rms_norm(torch.ones(2, 8), torch.ones(8), **{name: value})
    assert str(made.value) == str(called.value)


def test_refuses_an_eps_below_zero_and_takes_zero():
    with pytest.raises(ValueError, match=r"^eps must be at least 0, got -1e-06$"):
        RMSNorm(8, -1e-6)
    assert RMSNorm(8, 0).eps == 0


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_starts_as_the_identity_on_normed_rows(offset):
    module = RMSNorm(8, offset=offset)
    assert same_bits(module.weight.detach(), torch.full((8,), 1.0 - offset))
    assert torch.allclose(module(torch.ones(2, 8)), torch.ones(2, 8), atol=1e-6)


def test_without_a_weight():
    module = RMSNorm(8, elementwise_affine=False)
    assert list(module.state_dict()) == []
    assert same_bits(module(draw(2, 8)), rms_norm(draw(2, 8)))


def test_deepcopy_is_a_module_of_its_own():
    module = trained(casting="llama")
    twin = copy.deepcopy(module)
    with torch.no_grad():
        module.weight.zero_()
    assert same_bits(twin.weight.detach(), weight_of(HIDDEN))
    assert repr(twin) == repr(module)


def test_pickle_keeps_everything():
    module = trained(offset=1.0, casting="llama")
    back = pickle.loads(pickle.dumps(module))
    assert repr(back) == repr(module)
    assert same_bits(back(draw(3, HIDDEN)), module(draw(3, HIDDEN)))


def test_half_changes_the_weight_and_not_the_contract():
    module = trained(casting="llama").half()
    assert (module.weight.dtype, module.eps) == (torch.float16, 1e-5)
    assert module(draw(3, HIDDEN).half()).dtype == torch.float16


def test_on_the_meta_device():
    module = RMSNorm(HIDDEN, device="meta", dtype=torch.bfloat16)
    y = module(torch.empty(3, HIDDEN, device="meta", dtype=torch.bfloat16))
    assert (y.device.type, y.shape, y.dtype) == ("meta", (3, HIDDEN), torch.bfloat16)
    real = module.to_empty(device="cpu")
    real.reset_parameters()
    assert same_bits(real.weight.detach(), torch.ones(HIDDEN, dtype=torch.bfloat16))


def test_a_weight_that_is_no_parameter_of_the_module_itself():
    """As parametrizations, weight_norm and flat parameters leave it: a property, or a plain attribute."""
    x, module = draw(3, 48), RMSNorm(48)
    torch.nn.utils.parametrize.register_parametrization(module, "weight", Doubled())
    assert torch.equal(module(x), rms_norm(x, torch.full((48,), 2.0)))
    plain = RMSNorm(48)
    del plain.weight
    plain.weight = torch.full((48,), 3.0)
    assert torch.equal(plain(x), rms_norm(x, plain.weight))


class Doubled(torch.nn.Module):
    def forward(self, weight):
        return 2 * weight
