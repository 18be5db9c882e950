"""Distributed tensors: rows that lie here are computed here, in two processes, and nothing is gathered.

What `here_...` functions do runs in each of the two processes; what they return comes back to the test.
"""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest
import torch
from helpers import CPU, draw, error, exact, weight_of
from ranks import BACKENDS, device_here, two_processes
from torch import distributed
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.experimental import implicit_replication

import tunegen
from tunegen import add_rms_norm, add_rms_norm_, dispatch, reference, rms_norm
from tunegen.integrations.eager_backward import rms_norm_eager_backward
from tunegen.ops.distributed import by_shards, parts_here

pytestmark = pytest.mark.skipif(not distributed.is_gloo_available(), reason="needs gloo")

SHAPE = (3, 5, 48)
"""Five positions on two processes: shards of different sizes."""
PLACES = {"batch": Shard(0), "positions": Shard(1), "replicated": Replicate()}


two = pytest.fixture(scope="module", params=BACKENDS)(two_processes)
on_the_cpu = pytest.mark.parametrize("two", ["gloo"], indirect=True)


def mesh():
    return init_device_mesh(device_here().type, (2,))


def inputs(shape=SHAPE, dtype=torch.float32):
    """x, residual, dy, dsum, weight: whole, the same in every process."""
    return [draw(*shape, dtype=dtype, seed=seed) for seed in range(4)] + [weight_of(shape[-1], dtype)]


def placed(tensor, place, grad=False):
    return distribute_tensor(tensor.to(device_here()), mesh(), [place]).requires_grad_(grad)


def whole(tensor):
    return tensor.full_tensor().detach().cpu()


NORMS = {"kernels": rms_norm, "eager backward": rms_norm_eager_backward}


def here_norm(place, norm, contract, weighted):
    """Whole results, their placements, and the collectives that ran until they were there."""
    x, _, dy, _, w = inputs()
    x, w = placed(x, PLACES[place], True), placed(w, Replicate(), True) if weighted else None
    dy = placed(dy, PLACES[place])
    with CommDebugMode() as traffic:
        y = NORMS[norm](x, w, **contract)
        y.backward(dy)
    grads = [t.grad for t in (x, w) if t is not None]
    found = [y, *grads]
    assert device_here().type == "cpu" or dispatch.answers(), "kernels answer"
    return [whole(t) for t in found], [t.placements for t in found], traffic.get_total_counts()


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("weighted", [True, False], ids=["weight", "no weight"])
def test_rows_are_computed_where_they_lie(two, place, norm, weighted):
    contract = {"casting": "llama", "offset": 1.0}
    x, _, dy, _, w = inputs()
    right = exact(x, w if weighted else None, dy, **contract)
    for values, placements, collectives in two.run(here_norm, place, norm, contract, weighted):
        for got, want in zip(values, right, strict=False):
            assert error(got, want) <= CPU.allowed(torch.float32, torch.float32)
        of_weight = Replicate() if place == "replicated" else Partial()
        assert placements == [(PLACES[place],), (PLACES[place],), (of_weight,)][: 3 if weighted else 2]
        assert collectives == 0


def here_torchs_placements(place):
    x, _, dy, _, w = inputs()
    x, w = placed(x, PLACES[place], True), placed(w, Replicate(), True)
    y = torch.nn.functional.layer_norm(x, SHAPE[-1:], w)
    y.backward(placed(dy, PLACES[place]))
    return y.placements, x.grad.placements, w.grad.placements


@pytest.mark.parametrize("place", PLACES)
def test_results_are_placed_as_those_of_torchs_own_norms(two, place):
    torchs = two.run(here_torchs_placements, place)
    ours = two.run(here_norm, place, "kernels", {}, True)
    assert [tuple(placements) for _, placements, _ in ours] == torchs


def here_add(place, used):
    x, residual, dy, dsum, w = inputs()
    x, residual, dy, dsum = (placed(t, PLACES[place], n < 2) for n, t in enumerate((x, residual, dy, dsum)))
    w = placed(w, Replicate(), True)
    with CommDebugMode() as traffic:
        y, total = add_rms_norm(x, residual, w)
        parts = {"both": ((y, total), (dy, dsum)), "y": (y, dy), "sum": (total, dsum)}[used]
        torch.autograd.backward(*parts)
    grads = [t.grad for t in (x, residual, w) if t.grad is not None]
    apart = {t.to_local().untyped_storage().data_ptr() for t in (x, residual, w, y, total, dy, dsum, *grads)}
    return [whole(t) for t in (y, total, *grads)], traffic.get_total_counts(), len(apart) - len(grads)


@pytest.mark.parametrize("used", ["both", "y", "sum"])
@pytest.mark.parametrize("place", PLACES)
def test_the_fused_addition_too(two, place, used):
    """And no two gradients share memory, nor one with what came in for the sum."""
    x, residual, dy, dsum, w = inputs()
    leaves = [t.double().requires_grad_() for t in (x, residual, w)]
    total = leaves[0] + leaves[1]
    y = reference.rms_norm(total, leaves[2], 1e-6, offset=0.0, casting="fp32")
    parts = {"both": ((y, total), (dy, dsum)), "y": (y, dy), "sum": (total, dsum)}[used]
    torch.autograd.backward(*[[t.double() for t in part] if used == "both" else part.double() for part in parts])
    right = [y, total, *(t.grad for t in leaves if t.grad is not None)]
    for values, collectives, others in two.run(here_add, place, used):
        assert len(values) == len(right)
        for got, want in zip(values, right, strict=True):
            assert error(got, want.detach()) <= CPU.allowed(torch.float32, torch.float32)
        assert (collectives, others) == (0, 7)


def here_other_layouts():
    """Of each layout the result and the notes; twice, for the second time no note."""
    notes = []
    handler = logging.Handler()
    handler.emit = lambda record: notes.append(record.getMessage())
    logging.getLogger("tunegen").addHandler(handler)
    x, residual, _, _, w = inputs((4, 6, 48))
    part = x if distributed.get_rank() == 0 else 0 * x
    summed = DTensor.from_local(part.to(device_here()), mesh(), [Partial()])
    calls = {
        "hidden": lambda: rms_norm(placed(x, Shard(2)), placed(w, Replicate())),
        "partial": lambda: rms_norm(summed, placed(w, Replicate())),
        "sharded weight": lambda: rms_norm(placed(x, Shard(0)), placed(w, Shard(0))),
        "residual elsewhere": lambda: add_rms_norm(
            placed(x, Shard(0)), placed(residual, Replicate()), placed(w, Replicate())
        )[0],
    }
    found = {}
    for name, call in calls.items():
        notes.clear()
        values = [whole(call()) for _ in range(2)]
        found[name] = values[0], list(notes)
    logging.getLogger("tunegen").removeHandler(handler)
    return found


def test_torch_answers_other_layouts_and_that_is_noted_once(two):
    x, residual, _, _, w = inputs((4, 6, 48))
    for found in two.run(here_other_layouts):
        for name, (value, notes) in found.items():
            read = x + residual if name == "residual elsewhere" else x
            assert error(value, exact(read, w, read).y) <= 2 * CPU.allowed(torch.float32, torch.float32), name
            (note,) = notes
            assert note.startswith("torch's own operators answer distributed tensors (4, 6, 48) as (")
            assert note.endswith("all on one mesh")


def here_mixed():
    x, _, _, _, w = inputs()
    told = []
    for pair in ((placed(x, Shard(0)), w.to(device_here())), (x.to(device_here()), placed(w, Replicate()))):
        with pytest.raises(RuntimeError) as caught:
            rms_norm(*pair)
        told.append(str(caught.value))
    with implicit_replication():
        return told, whole(rms_norm(placed(x, Shard(0)), w.to(device_here())))


def test_plain_and_distributed_tensors_together_are_torchs_error(two):
    """Or what torch makes of them where the user asked it to."""
    x, _, dy, _, w = inputs()
    for told, replicated in two.run(here_mixed):
        assert all("got mixed torch.Tensor and DTensor" in text for text in told)
        assert error(replicated, exact(x, w, dy).y) <= 2 * CPU.allowed(torch.float32, torch.float32)


def here_without_gradient():
    x, residual, _, _, w = inputs()
    x, residual, w = placed(x, Shard(1)), placed(residual, Shard(1)), placed(w, Replicate(), True)
    with torch.no_grad():
        y, into = rms_norm(x, w), torch.empty_like(x)
        assert rms_norm(x, w, out=into) is into
        total = x + residual
        both = add_rms_norm_(x, residual, w)
        assert both[0] is x
        assert both[1] is residual
        assert not y.requires_grad
        with torch.inference_mode():
            again = rms_norm(total, w)
        return [whole(t) for t in (y, into, x, residual, total, again)]


def test_inference_and_results_that_are_written_in_place(two):
    x, residual, dy, _, w = inputs()
    y, fused = exact(x, w, dy).y, exact(x + residual, w, dy).y
    for found in two.run(here_without_gradient):
        for got, want in zip(found, (y, y, fused, (x + residual), x + residual, fused), strict=True):
            assert error(got, want.double()) <= CPU.allowed(torch.float32, torch.float32)


def here_penalty():
    x, w = (
        placed(draw(4, 8, dtype=torch.float64), Shard(0), True),
        placed(weight_of(8, torch.float64), Replicate(), True),
    )
    (g,) = torch.autograd.grad(rms_norm(x, w).pow(2).sum(), x, create_graph=True)
    return [whole(t) for t in torch.autograd.grad(g.pow(2).sum(), (x, w))]


def test_h13_second_derivative_of_distributed_tensors(two):
    x, w = draw(4, 8, dtype=torch.float64).requires_grad_(), weight_of(8, torch.float64).requires_grad_()
    (g,) = torch.autograd.grad(rms_norm(x, w).pow(2).sum(), x, create_graph=True)
    right = torch.autograd.grad(g.pow(2).sum(), (x, w))
    for found in two.run(here_penalty):
        assert all(error(got, want) < 1e-12 for got, want in zip(found, right, strict=True))


def here_few_rows():
    """A row for the first process, and none for the other."""
    x, w = placed(draw(1, 48), Shard(0), True), placed(weight_of(48), Replicate(), True)
    rms_norm(x, w).backward(placed(draw(1, 48, seed=2), Shard(0)))
    return whole(x.grad), whole(w.grad)


def test_h07_a_process_without_rows(two):
    right = exact(draw(1, 48), weight_of(48), draw(1, 48, seed=2))
    for found in two.run(here_few_rows):
        for got, want in zip(found, right[1:], strict=True):
            assert error(got, want) <= CPU.allowed(torch.float32, torch.float32)


def here_two_axes():
    """A mesh of two axes, one of them of a single process: the batch over one, positions over the other."""
    both, places = init_device_mesh(device_here().type, (2, 1)), [Shard(0), Shard(1)]
    x, _, dy, _, w = (t.to(device_here()) for t in inputs())
    x = distribute_tensor(x, both, places).requires_grad_()
    w = distribute_tensor(w, both, [Replicate(), Replicate()]).requires_grad_()
    y = rms_norm(x, w)
    y.backward(distribute_tensor(dy, both, places))
    found = y, x.grad, w.grad
    return [whole(t) for t in found], [t.placements for t in found]


def test_meshes_of_several_axes(two):
    x, _, dy, _, w = inputs()
    right = exact(x, w, dy)
    for values, placements in two.run(here_two_axes):
        assert placements == [(Shard(0), Shard(1))] * 2 + [(Partial(), Partial())]
        for got, want in zip(values, right, strict=True):
            assert error(got, want) <= CPU.allowed(torch.float32, torch.float32)


def here_on_its_way():
    """What nobody has waited for: a gathered x; and a dy that is summed and scattered, as before a linear layer whose
    columns are shared out. What reads them here, and the gradients."""
    x, _, dy, _, w = inputs((4, 6, 48))
    leaf, w = placed(x, Shard(0), True), placed(w, Replicate(), True)
    sent = leaf.redistribute(placements=[Replicate()], async_op=True)
    kinds = [type(sent._local_tensor), type(parts_here((sent,), None)[0])]

    def seen(x, w):
        y = rms_norm(x, w)
        y.register_hook(lambda dy: kinds.append(type(dy)))
        return [y]

    (y,) = by_shards(seen, (leaf,), w)
    y.register_hook(lambda dy: kinds.append(type(dy._local_tensor)))
    gathered = y.redistribute(placements=[Replicate()], async_op=True).to_local(grad_placements=[Partial()])
    gathered.backward(dy.to(gathered) / 2)
    return [whole(leaf.grad), whole(w.grad)], kinds


def test_tensors_that_are_still_on_their_way_are_waited_for(two):
    """Kernels read memory, and would read what is not there yet."""
    x, _, dy, _, w = inputs((4, 6, 48))
    right = exact(x, w, dy)
    for gradients, (sent, read, sent_back, read_back) in two.run(here_on_its_way):
        assert sent is AsyncCollectiveTensor is sent_back
        assert read is torch.Tensor is read_back
        for got, want in zip(gradients, right[1:], strict=True):
            assert error(got, want) <= CPU.allowed(torch.float32, torch.float32)


def here_explained():
    x, _, _, _, w = inputs((4, 6, 48))
    told = [tunegen.explain(placed(x, place, True), placed(w, Replicate(), True)) for place in (Shard(0), Shard(2))]
    told.append(tunegen.explain(placed(x, Shard(0)), placed(w, Replicate()), residual=placed(x, Shard(0))))
    return [[(one.problem.rows, one.why) for one in each] for each in told]


@on_the_cpu
def test_what_is_explained_is_the_part_that_lies_here(two):
    here, elsewhere = (12, "x is on cpu"), (24, "x is on cpu")
    assert two.run(here_explained) == [[[here] * 2, [elsewhere] * 2, [here]]] * 2


def here_compiled(policy):
    x, _, dy, _, w = inputs()
    x, w = placed(x, Shard(1), True), placed(w, Replicate(), True)
    y = torch.compile(lambda x, w: rms_norm(x, w, policy=policy), backend="aot_eager", fullgraph=True)(x, w)
    y.backward(placed(dy, Shard(1)))
    return [whole(t) for t in (y, x.grad, w.grad)]


@on_the_cpu
@pytest.mark.parametrize("policy", ["fastest", "invariant"])
def test_h16_inside_torch_compile(two, policy):
    """Traced, and as an operator of what lies here."""
    x, _, dy, _, w = inputs()
    right = exact(x, w, dy)
    for found in two.run(here_compiled, policy):
        for got, want in zip(found, right, strict=True):
            assert error(got, want) <= CPU.allowed(torch.float32, torch.float32)


def test_plain_tensors_do_not_load_what_only_distributed_ones_need():
    code = """
import sys, torch, tunegen
tunegen.rms_norm(torch.ones(2, 8))
print(any(name in sys.modules for name in ("torch.distributed.tensor", "tunegen.ops.distributed")))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "False"


def here_main_grad(itself):
    x, *_, w = inputs()
    buffer = torch.zeros_like(w)
    given = (x, w.requires_grad_()) if itself else (placed(x, Shard(0)), placed(w, Replicate(), grad=True))
    try:
        rms_norm(*given, main_grad=placed(buffer, Replicate()) if itself else buffer)
    except TypeError as error:
        return str(error)
    return "no error"


@on_the_cpu
@pytest.mark.parametrize("itself", [False, True], ids=["x", "main_grad"])
def test_main_grad_of_a_distributed_tensor_is_refused(two, itself):
    """Also the one that is distributed itself, whose address is 0: a kernel would write there."""
    assert {*two.run(here_main_grad, itself)} == {
        "main_grad takes no gradient of a distributed tensor, nor is it one; pass what lies here, as x.to_local()"
    }
