"""Training in two processes, with the tuned norms, against the same in one: sharded parameters (FSDP2), and activations
sharded over positions (sequence parallel)."""

from __future__ import annotations

import pytest
import torch
from helpers import draw, weight_of
from ranks import BACKENDS, device_here, two_processes
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F

import tunegen
from tunegen import dispatch

pytestmark = pytest.mark.skipif(not distributed.is_gloo_available(), reason="needs gloo")

two = pytest.fixture(scope="module", params=BACKENDS)(two_processes)

BATCH, POSITIONS, HIDDEN, STEPS, RATE = 4, 8, 64, 4, 0.5


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(HIDDEN, eps=1e-6)
        self.up, self.down = nn.Linear(HIDDEN, 2 * HIDDEN, bias=False), nn.Linear(2 * HIDDEN, HIDDEN, bias=False)

    def forward(self, x):
        return x + self.down(F.silu(self.up(self.norm(x))))


class Model(nn.Module):
    """Two blocks and a last norm; parameters are the same wherever it is made."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm, self.head = nn.RMSNorm(HIDDEN, eps=1e-6), nn.Linear(HIDDEN, HIDDEN, bias=False)
        with torch.no_grad():
            for seed, parameter in enumerate(self.parameters()):
                new = weight_of(HIDDEN) if parameter.dim() == 1 else draw(*parameter.shape, seed=seed) / 8
                parameter.copy_(new)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def train(model, x, target):
    """A few steps; the losses, and the parameters as they are then, whole, on the CPU."""
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    found = {name: p.detach() for name, p in model.named_parameters()}
    return losses, {name: (p.full_tensor() if isinstance(p, DTensor) else p).cpu() for name, p in found.items()}


def data(dtype=torch.float32):
    shape = BATCH, POSITIONS, HIDDEN
    return [draw(*shape, seed=seed).to(device_here(), dtype) for seed in (100, 101)]


def here_alone(dtype, patched):
    model = Model().to(device_here(), dtype)
    if patched:
        tunegen.patch(model)
    return train(model, *data(dtype))


def here_fully_sharded(patch_first):
    model = Model().to(device_here())
    if patch_first:
        tunegen.patch(model)
    mesh = init_device_mesh(device_here().type, (2,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if not patch_first:
        tunegen.patch(model)
    found = train(model, *(t.chunk(2)[mesh.get_local_rank()] for t in data()))
    return *found, _kernels_answer()


def sequence_parallel(model):
    mesh = init_device_mesh(device_here().type, (2,))
    plan = {"norm": SequenceParallel(), "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())}
    for block in ("blocks.0", "blocks.1"):
        plan[f"{block}.norm"] = SequenceParallel()
        plan[f"{block}.up"] = ColwiseParallel(input_layouts=Shard(1))
        plan[f"{block}.down"] = RowwiseParallel(output_layouts=Shard(1))
    return parallelize_module(model, mesh, plan)


def positions_here(x):
    return x.chunk(2, dim=1)[distributed.get_rank()]


def here_sequence_parallel(patch_first):
    model = Model().to(device_here())
    if patch_first:
        tunegen.patch(model)
    sequence_parallel(model)
    if not patch_first:
        assert len(tunegen.patch(model).replaced) == 3
    x, target = data()
    return *train(model, positions_here(x), target), _kernels_answer()


def here_recorded():
    model = sequence_parallel(Model().to(device_here())).train()
    model.register_forward_hook(lambda module, args, y: y.square().mean())  # a result that is a loss
    found = tunegen.record(model, positions_here(data()[0]))
    return [(call.problem.direction, call.problem.rows, call.shape, call.count) for call in found.calls]


def _kernels_answer():
    """A choice was made: on a GPU, for what is not left to torch's operators at once."""
    return device_here().type == "cpu" or bool(dispatch.answers())


def rms(tensor):
    return float(tensor.double().square().mean().sqrt())


def assert_same_training(two, function, *arguments):
    """Both runs are fp32 evaluations of one function with sums in other orders, so that both are off float64's by about
    the same: the root mean square of each parameter by no more than eight times as much as the run in one process is,
    and half a rounding of the parameter. A sum that is left out is off by thousands of times that."""
    _, right = two.run(here_alone, torch.float64, False)[0]
    losses, alone = two.run(here_alone, torch.float32, True)[0]
    eps = torch.finfo(torch.float32).eps
    for _, found, kernels_answer in (results := two.run(function, *arguments)):
        assert found.keys() == right.keys()
        for name, want in right.items():
            allowed = 8 * rms(alone[name].double() - want) + eps / 2 * rms(want)
            assert rms(found[name].double() - want) <= allowed, name
        assert kernels_answer
    mean = torch.tensor([told for told, *_ in results], dtype=torch.float64).mean(0)
    assert torch.allclose(mean, torch.tensor(losses, dtype=torch.float64), rtol=64 * eps, atol=0.0)
    assert losses[-1] < 0.9 * losses[0], "it learns, so that a wrong step would show"


@pytest.mark.parametrize("patch_first", [True, False])
def test_fully_sharded_training_is_that_of_one_process(two, patch_first):
    assert_same_training(two, here_fully_sharded, patch_first)


@pytest.mark.parametrize("patch_first", [True, False])
def test_sequence_parallel_training_is_that_of_one_process(two, patch_first):
    assert_same_training(two, here_sequence_parallel, patch_first)


def test_what_is_recorded_is_the_part_that_runs_here(two):
    rows, shape = BATCH * POSITIONS // 2, (BATCH, POSITIONS // 2, HIDDEN)
    for calls in two.run(here_recorded):
        assert {(direction, *rest) for direction, *rest, _ in calls} == {
            ("forward", rows, shape),
            ("backward", rows, shape),
        }
        assert sum(count for *_, count in calls) == 6
