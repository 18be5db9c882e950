"""`record` on small models, and the file that it makes."""

from __future__ import annotations

import importlib
import json
import random
import types
from dataclasses import replace

import pytest
import torch
from tiny_models import batch, gradients, tiny, tokens
from torch import nn

import tunegen
from tunegen.errors import RecordingError
from tunegen.integrations import recording
from tunegen.model import Problem
from tunegen.recorded import FORWARD_ONLY, RecordedCall, Recording, load_recording

op = importlib.import_module("tunegen.ops.rms_norm")

LLAMA = {"casting": "llama", "x_dtype": "bf16", "weight_dtype": "bf16"}


def forward(hidden, rows):
    return Problem("rms_norm", "forward", hidden, rows, **LLAMA)


def backward(hidden, rows, weight_grad=True):
    return Problem("rms_norm", "backward", hidden, rows, weight_grad=weight_grad, **LLAMA)


def test_step_of_qwen3_is_counted():
    """Two layers of 2 x 12 tokens: 5 norms of width 64, and q (4 heads) and k (2 heads) of width 16 in each layer."""
    found = tunegen.record(tiny("qwen3", torch.bfloat16).train(), batch())
    assert found.model == "Qwen3ForCausalLM"
    assert found.counts() == {
        forward(64, 24): 5,
        forward(16, 96): 2,
        forward(16, 48): 2,
        backward(64, 24): 5,
        backward(16, 96): 2,
        backward(16, 48): 2,
    }


def test_shapes_and_strides_are_those_of_the_call():
    found = tunegen.record(tiny("qwen3", torch.bfloat16).train(), batch())
    query = next(c for c in found.calls if c.problem == backward(16, 96))
    # Attention wants heads before positions: the gradient comes back with its axes exchanged, and is read so.
    assert (query.shape, query.strides, query.dy_strides) == ((2, 12, 4, 16), (768, 64, 16, 1), (768, 16, 192, 1))
    assert query.copied == 0
    assert "copied" not in str(found)
    hidden = next(c for c in found.calls if c.problem == backward(64, 24))
    assert (hidden.dy_strides, hidden.copied) == ((768, 64, 1), 0)


def test_forward_alone_in_evaluation():
    found = tunegen.record(tiny("qwen3", torch.bfloat16).eval(), {"input_ids": tokens()})
    assert {problem.direction for problem in found.counts()} == {"forward"}
    assert sum(found.counts().values()) == 9
    assert FORWARD_ONLY in str(found)
    assert "model.train()" in FORWARD_ONLY
    assert FORWARD_ONLY not in str(tunegen.record(tiny("qwen3").train(), batch()))


def test_frozen_weights_want_no_gradient():
    model = tiny("qwen3", torch.bfloat16).train()
    model.model.norm.weight.requires_grad_(False)
    counts = tunegen.record(model, batch()).counts()
    assert (counts[backward(64, 24)], counts[backward(64, 24, weight_grad=False)]) == (4, 1)


def test_offset_and_casting_are_recorded():
    counts = tunegen.record(tiny("gemma2").eval(), {"input_ids": tokens()}).counts()
    assert counts == {Problem("rms_norm", "forward", 64, 24, "fp32", "fp32", "fp32", offset=True): 9}


def test_patched_model_records_the_same():
    model = tiny("qwen3", torch.bfloat16).train()
    before = tunegen.record(model, batch())
    tunegen.patch(model)
    assert tunegen.record(model, batch()) == before


def test_checkpointed_step_counts_what_runs_again():
    model = tiny("qwen3", torch.bfloat16).train()
    plain = tunegen.record(model, batch()).counts()
    model.model.gradient_checkpointing = True
    for layer in model.model.layers:
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = lambda function, *args: torch.utils.checkpoint.checkpoint(
            function, *args, use_reentrant=False
        )
    counts = tunegen.record(model, batch()).counts()
    assert counts[forward(64, 24)] == plain[forward(64, 24)] + 4
    assert counts[backward(64, 24)] == plain[backward(64, 24)]


def test_model_is_left_as_it_was():
    model = tiny("qwen3", attention_dropout=0.5).train()
    gradients(model)
    before = {name: p.grad.clone() for name, p in model.named_parameters()}
    state = torch.get_rng_state()
    tunegen.record(model, batch())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(p.grad, before[name]) for name, p in model.named_parameters())
    assert not any(module._forward_hooks for module in model.modules())


def test_random_numbers_of_python_and_numpy_go_on_as_if_nothing_had_run():
    numpy = pytest.importorskip("numpy")

    class Shaking(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.RMSNorm(4, eps=1e-6)

        def forward(self, x):
            return self.norm(x * random.random() * numpy.random.rand())

    random.seed(1)
    numpy.random.seed(1)
    want = random.random(), numpy.random.rand()
    random.seed(1)
    numpy.random.seed(1)
    tunegen.record(Shaking().eval(), torch.ones(2, 4))
    assert (random.random(), numpy.random.rand()) == want


def test_forward_of_others_is_recorded_by_what_it_computes():
    """As `patch` sees it: neither a forward that is none of the module's nor one that computes otherwise is ours."""
    model = nn.Sequential(nn.RMSNorm(4, eps=1e-6), nn.RMSNorm(4, eps=1e-6), nn.RMSNorm(4, eps=1e-6)).eval()
    model[0].forward = lambda x: 0 * x
    model[1].forward = types.MethodType(lambda self, x: 2 * nn.RMSNorm.forward(self, x), model[1])
    assert sum(tunegen.record(model, torch.ones(2, 4)).counts().values()) == 1


@pytest.mark.parametrize("copies", [False, True])
def test_what_is_copied_is_said_as_the_op_does_it(copies, monkeypatch):
    """Of x and of dy, which the hook sees with the strides that the op will see."""
    monkeypatch.setattr(recording, "is_copied", lambda tensor, nest: copies)
    found = tunegen.record(tiny("qwen3").train(), {"input_ids": tokens(), "labels": tokens()})
    assert {call.copied for call in found.calls if call.problem.direction == "forward"} == {int(copies)}
    assert {call.copied for call in found.calls if call.problem.direction == "backward"} == {2 * int(copies)}


def test_hooks_are_taken_off_after_an_error():
    model = tiny("qwen3")
    with pytest.raises((TypeError, AttributeError)):
        tunegen.record(model, {"input_ids": "no tokens"})
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("given", [(tokens(),), [tokens()], tokens()])
def test_batch_may_be_positional(given):
    assert sum(tunegen.record(tiny("qwen3").eval(), given).counts().values()) == 9


def test_training_without_a_loss_is_refused_with_the_remedy():
    with pytest.raises(ValueError, match=r"labels.*model.eval"):
        tunegen.record(tiny("qwen3").train(), {"input_ids": tokens()})


def test_compiled_model_is_recorded_after_it_ran():
    model = tiny("qwen3").eval()
    for compiled in (torch.compile(model, backend="eager"), model):
        if compiled is model:
            model.compile(backend="eager")
        compiled(tokens())
        assert sum(tunegen.record(compiled, {"input_ids": tokens()}).counts().values()) == 9


def test_loss_may_be_the_first_of_a_tuple():
    counts = tunegen.record(tiny("qwen3").train(), {**batch(), "return_dict": False}).counts()
    assert {problem.direction for problem in counts} == {"forward", "backward"}


def test_model_without_norms_is_refused():
    with pytest.raises(ValueError, match="no norm"):
        tunegen.record(nn.Linear(4, 4).eval(), torch.ones(2, 4))
    with pytest.raises(TypeError, match="int"):
        tunegen.record(5, None)


RECORDING = Recording(
    "Model",
    (
        RecordedCall(forward(64, 24), 5, (2, 12, 64), (768, 64, 1)),
        RecordedCall(backward(16, 96), 2, (2, 12, 4, 16), (768, 64, 16, 1), (768, 16, 192, 1), 1),
    ),
)


def test_file_gives_back_what_was_recorded(tmp_path):
    path = tmp_path / "step.json"
    RECORDING.save(path)
    assert load_recording(path) == RECORDING
    assert [file.name for file in tmp_path.iterdir()] == ["step.json"]


def test_home_folder_may_be_written_as_a_tilde(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    RECORDING.save("~/step.json")
    assert [file.name for file in tmp_path.iterdir()] == ["step.json"]
    assert load_recording("~/step.json") == RECORDING
    with pytest.raises(RecordingError, match="~nobody_here"):
        load_recording("~nobody_here/step.json")


def test_unwritable_place_is_named_and_nothing_is_left(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RecordingError, match=r"cannot write .*file/step\.json: .*/file is no folder; choose another"):
        RECORDING.save(tmp_path / "file/step.json")
    (tmp_path / "folder").mkdir()
    with pytest.raises(RecordingError, match="folder"):
        RECORDING.save(tmp_path / "folder")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["file", "folder"]


def test_a_folder_that_is_named_is_made(tmp_path):
    RECORDING.save(tmp_path / "new/folder/step.json")
    assert load_recording(tmp_path / "new/folder/step.json") == RECORDING


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"problem": {"op": "layer_norm"}}, "call 1: op must be one of rms_norm, add_rms_norm, got 'layer_norm'"),
        (
            {"problem": {"sum_in_fp32": True}},
            "call 1: sum_in_fp32 is true, but only the forward direction of add_rms_norm",
        ),
        ({"problem": {"direction": "sideways"}}, "direction must be one of forward, backward"),
        ({"problem": {"hidden": 0}}, "hidden must be an integer of at least 1, got 0"),
        ({"problem": {"hidden": 2**31}}, "hidden must be .* at most 2147483647, got 2147483648"),
        ({"problem": {"rows": 2**63}}, f"rows must be .* at most {2**62}"),
        ({"problem": {"offset": True, "weight_dtype": None}}, "call 1: offset is true, but weight_dtype is null"),
        (
            {"problem": {"weight_grad": True, "weight_dtype": None, "direction": "backward"}},
            "call 1: weight_grad is true, but weight_dtype is null",
        ),
        ({"problem": {"weight_grad": True}}, "weight_grad is true, but direction is forward"),
        ({"problem": {"rows": True}}, "rows must be an integer"),
        ({"problem": {"rows": "24"}}, "rows must be an integer"),
        ({"problem": {"x_dtype": "int8"}}, "x_dtype must be one of"),
        ({"problem": {"offset": 1}}, "offset must be one of False, True, got 1"),
        ({"problem": {"layout": "tiled"}}, "layout must be one of contiguous"),
        ({"problem": {"colour": "red"}}, "unknown colour"),
        ({"count": 0}, "count must be an integer of at least 1, got 0"),
        ({"shape": "2x12"}, "shape must be a list"),
        ({"strides": [1.5]}, "strides must be a list"),
        ({"dy_strides": [-1]}, "dy_strides must be a list"),
        ({"copied": None}, "copied must be an integer"),
    ],
)
def test_wrong_entry_is_named(tmp_path, change, words):
    path = tmp_path / "step.json"
    RECORDING.save(path)
    document = json.loads(path.read_text())
    entry = document["calls"][0]
    document["calls"][0] = entry | change | {"problem": entry["problem"] | change.get("problem", {})}
    path.write_text(json.dumps(document))
    with pytest.raises(RecordingError, match=words):
        load_recording(path)


@pytest.mark.parametrize("text", ["", "[]", "{}", "{", '{"format": 2, "calls": []}', "[" * 100_000, '{"format": 1}'])
def test_what_is_no_recording_is_refused(tmp_path, text):
    path = tmp_path / "step.json"
    path.write_text(text)
    with pytest.raises(RecordingError, match="no recording"):
        load_recording(path)
    with pytest.raises(RecordingError, match="cannot read"):
        load_recording(tmp_path / "other.json")


def test_empty_recording_is_refused(tmp_path):
    replace(RECORDING, calls=()).save(tmp_path / "step.json")
    with pytest.raises(RecordingError, match="holds no calls"):
        load_recording(tmp_path / "step.json")
