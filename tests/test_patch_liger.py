"""Liger's patch and ours on one model, in either order: ours computes the norms, Liger the rest."""

from __future__ import annotations

import sys

import pytest
import torch
from tiny_models import NORMS, gradients, tiny, tokens

import tunegen
from tunegen.integrations import patching

pytest.importorskip("transformers")
liger = pytest.importorskip("liger_kernel.transformers")

GPU = torch.device("cuda", 0)


@pytest.fixture
def modeling():
    """The modeling module of Qwen3, put back in the end."""
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401

    module = sys.modules["transformers.models.qwen3.modeling_qwen3"]
    before = dict(vars(module))
    forward = module.Qwen3ForCausalLM.forward
    yield module
    vars(module).update(before)
    module.Qwen3ForCausalLM.forward = forward


@pytest.fixture
def calls(monkeypatch):
    """The shapes for which the op was called."""
    found = []
    ours = patching.rms_norm
    monkeypatch.setattr(
        patching, "rms_norm", lambda x, *args, **kwargs: found.append(x.shape) or ours(x, *args, **kwargs)
    )
    return found


NORM_ALONE = {"rope": False, "swiglu": False, "fused_linear_cross_entropy": False}


def test_model_that_liger_patched_gets_our_norms(modeling, calls):
    model = tiny("qwen3")
    want = model(tokens()).logits
    liger.apply_liger_kernel_to_qwen3(model=model, **NORM_ALONE)
    theirs = [vars(m)["forward"] for m in model.modules() if "forward" in vars(m)]
    assert len(theirs) == NORMS["qwen3"]
    assert len(tunegen.patch(model).replaced) == NORMS["qwen3"]
    assert torch.equal(model(tokens()).logits, want)  # Liger's own norm would fail on the CPU
    assert len(calls) == NORMS["qwen3"]
    tunegen.unpatch(model)
    assert [vars(m)["forward"] for m in model.modules() if "forward" in vars(m)] == theirs


def test_liger_after_ours_takes_the_norms_until_ours_is_called_again(modeling, calls):
    """Therefore: call ours last."""
    model = tiny("qwen3")
    want = model(tokens()).logits
    tunegen.patch(model)
    liger.apply_liger_kernel_to_qwen3(model=model, **NORM_ALONE)
    norms = [m for m in model.modules() if "forward" in vars(m)]
    assert {m.forward.__func__.__module__.partition(".")[0] for m in norms} == {"liger_kernel"}
    theirs = [vars(m)["forward"] for m in norms]
    assert len(tunegen.patch(model).replaced) == NORMS["qwen3"]
    assert torch.equal(model(tokens()).logits, want)
    assert len(calls) == NORMS["qwen3"]
    assert tunegen.unpatch(model) == NORMS["qwen3"]
    assert [vars(m)["forward"] for m in norms] == theirs


def test_classes_that_liger_put_in_place_get_our_forward(modeling, calls):
    liger.apply_liger_kernel_to_qwen3(**NORM_ALONE)
    cls = modeling.Qwen3RMSNorm
    assert cls.__module__.startswith("liger_kernel.")
    forward = cls.forward
    report = tunegen.patch("qwen3")
    try:
        assert [(r.name, r.kind, r.contract.casting) for r in report.replaced] == [
            ("Qwen3RMSNorm", "LigerRMSNorm", "llama")
        ]
        tiny("qwen3")(tokens())
        assert len(calls) == NORMS["qwen3"]
    finally:
        tunegen.unpatch("qwen3")
    assert cls.forward is forward


@pytest.mark.parametrize(("architecture", "contract"), [("gemma2", (1.0, "fp32")), ("gemma3", (1.0, "fp32"))])
def test_ligers_gemma_norms_keep_their_contract(architecture, contract, calls):
    model = tiny(architecture)
    want = model(tokens()).logits
    patch_gemma = getattr(liger, f"apply_liger_kernel_to_{architecture.replace('gemma3', 'gemma3_text')}")
    module = sys.modules[f"transformers.models.{architecture}.modeling_{architecture}"]
    before = dict(vars(module))
    try:
        patch_gemma(model=model, rope=False, geglu=False, fused_linear_cross_entropy=False)
        report = tunegen.patch(model)
        assert {(r.contract.offset, r.contract.casting) for r in report.replaced} == {contract}
        assert torch.equal(model(tokens()).logits, want)
    finally:
        vars(module).update(before)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, for an argument that Liger passes on
def test_all_of_liger_with_our_norms_trains_as_the_model_does(modeling, calls):
    """Its fused loss, SwiGLU and rotary embedding stay; the norms in its place are ours."""
    model = tiny("qwen3", hidden_size=128, head_dim=32).to(GPU, torch.bfloat16)
    exact = tiny("qwen3", hidden_size=128, head_dim=32).double().to(GPU)
    exact.load_state_dict({name: value.double() for name, value in model.state_dict().items()})
    _, right = gradients(exact, GPU)
    _, eager = gradients(model, GPU)
    liger.apply_liger_kernel_to_qwen3(model=model)
    tunegen.patch(model)
    model.zero_grad()
    ids = tokens().to(GPU)
    model(input_ids=ids, labels=ids.clone()).loss.backward()
    assert len(calls) == NORMS["qwen3"]
    for name, parameter in model.named_parameters():
        ours, theirs = (float((g.double() - right[name]).norm()) for g in (parameter.grad, eager[name]))
        assert ours <= 1.5 * theirs, name
