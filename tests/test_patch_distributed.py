"""Patched models under DistributedDataParallel and FSDP: one process on the CPU, so shards are whole."""

from __future__ import annotations

import pytest
import torch
from test_patch import calls, close  # noqa: F401 - a fixture
from tiny_models import NORMS, batch, gradients, tiny
from torch import distributed
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import tunegen

pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(not distributed.is_gloo_available(), reason="needs gloo")


@pytest.fixture(autouse=True)
def _one_process(tmp_path):
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", world_size=1, rank=0)
    yield
    distributed.destroy_process_group()


@pytest.mark.parametrize("patch_first", [True, False])
def test_gradients_in_buckets_are_those_of_the_model(patch_first, calls):  # noqa: F811
    """They are views of what the next backward writes: recording a step in between leaves them as they were."""
    model = tiny("qwen3").train()
    _, want = gradients(model)
    model.zero_grad()
    if patch_first:
        tunegen.patch(model)
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    if not patch_first:
        tunegen.patch(wrapped)
    for _ in range(2):  # buckets are made anew after the first step
        wrapped.zero_grad()
        calls.clear()
        wrapped(**batch()).loss.backward()
    assert len(calls) == NORMS["qwen3"]
    tunegen.record(wrapped, {key: value[:1] for key, value in batch().items()})
    assert all(close(p.grad, want[name], torch.float32) for name, p in model.named_parameters())
    assert tunegen.unpatch(wrapped) == NORMS["qwen3"]


@pytest.mark.parametrize("patch_first", [True, False])
def test_sharded_weights_are_whole_when_their_norm_runs(patch_first, calls):  # noqa: F811
    model = tiny("qwen3").train()
    logits, want = gradients(model)
    model.zero_grad()
    if patch_first:
        tunegen.patch(model)
    mesh = distributed.device_mesh.init_device_mesh("cpu", (1,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if not patch_first:
        assert len(tunegen.patch(model).replaced) == NORMS["qwen3"]
    result = model(**batch())
    result.loss.backward()
    assert len(calls) == NORMS["qwen3"]
    assert torch.equal(result.logits, logits)
    for name, parameter in model.named_parameters():
        assert close(parameter.grad.full_tensor(), want[name], torch.float32), name
