"""`patch(model, fuse_residual=True)`: which layers are fused, that nothing else changes, that it can be undone."""

from __future__ import annotations

import copy
import io
import linecache
import sys
import textwrap
import traceback
from types import SimpleNamespace

import pytest
import torch
from test_patch import close
from tiny_models import NORMS, batch, gradients, tiny, tokens
from torch import nn

import tunegen
from tunegen.errors import UnknownNormError
from tunegen.integrations import patching
from tunegen.integrations.fusion import fused

transformers = pytest.importorskip("transformers")

FUSED = {
    **dict.fromkeys(("qwen3", "qwen2", "llama", "mistral"), "post_attention_layernorm"),
    **dict.fromkeys(("gemma2", "gemma3"), "pre_feedforward_layernorm"),
}
"""The norm that stands right behind an add, by architecture."""

every_architecture = pytest.mark.parametrize("architecture", FUSED)


@pytest.fixture
def calls(monkeypatch):
    """Shapes of the fused calls."""
    found = []
    ours = patching.add_rms_norm

    def noted(x, residual, *others, **contract):
        found.append(tuple(x.shape))
        return ours(x, residual, *others, **contract)

    monkeypatch.setattr(patching, "add_rms_norm", noted)
    return found


@every_architecture
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_is_that_of_the_model_to_the_last_bit(architecture, dtype, calls):
    """On the CPU all of it is torch operators: forward has the same ones as the model, backward the same as unfused."""
    model = tiny(architecture, dtype)
    logits, _ = gradients(model)
    tunegen.patch(model)
    _, grads = gradients(model)
    report = tunegen.patch(model, fuse_residual=True)
    assert (len(report.replaced), report.left, report.not_fused) == (NORMS[architecture], (), ())
    kind = type(model.model.layers[0]).__name__
    assert report.fused == tuple((f"model.layers.{i}", kind, (FUSED[architecture],)) for i in range(2))
    assert f"fused 2 x {kind}: the residual add with {FUSED[architecture]}" in str(report)
    fused_logits, fused_grads = gradients(model)
    assert calls == [(2, 12, 64)] * 2
    assert torch.equal(fused_logits, logits)
    assert fused_grads.keys() == grads.keys()
    assert all(torch.equal(fused_grads[name], want) for name, want in grads.items())


@every_architecture
def test_unpatch_gives_everything_back(architecture, calls):
    model = tiny(architecture)
    logits, grads = gradients(model)
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    tunegen.patch(model, fuse_residual=True)
    assert tunegen.unpatch(model) == NORMS[architecture] + 2
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    calls.clear()
    again, grads_again = gradients(model)
    assert calls == []
    assert torch.equal(again, logits)
    assert all(torch.equal(grads_again[name], want) for name, want in grads.items())


def test_patched_once_more_without_it_nothing_is_fused(calls):
    model = tiny("qwen3")
    tunegen.patch(model, fuse_residual=True)
    assert tunegen.patch(model).fused == ()
    model(tokens())
    assert calls == []
    tunegen.patch(model, fuse_residual=True)
    tunegen.patch(model, fuse_residual=True)
    model(tokens())
    assert len(calls) == 2
    assert tunegen.unpatch(model) == NORMS["qwen3"] + 2


def test_a_norm_that_others_took_back_is_called_as_ever(calls):
    """Liger's patch, say, or `unpatch` of that norm alone: the layer then adds, and calls it with one tensor."""
    model = tiny("qwen3")
    logits = model(tokens()).logits
    tunegen.patch(model, fuse_residual=True)
    tunegen.unpatch(model.model.layers[0].post_attention_layernorm)
    assert torch.equal(model(tokens()).logits, logits)
    assert len(calls) == 1


def test_a_norm_that_is_left_is_not_fused():
    model = tiny("qwen3")
    model.model.layers[1].post_attention_layernorm.variance_epsilon = None
    report = tunegen.patch(model, fuse_residual=True)
    assert [one.name for one in report.fused] == ["model.layers.0"]
    assert [(one.name, one.reason) for one in report.not_fused] == [
        ("model.layers.1", "its forward has no residual add right before a patched norm")
    ]
    assert "not fused 1 x Qwen3DecoderLayer (model.layers.1): its forward has no" in str(report)


def test_under_autocast_dtypes_may_differ_and_the_steps_are_taken_apart(calls):
    model = tiny("qwen3")
    with torch.autocast("cpu", torch.bfloat16):
        want = model(tokens()).logits
        tunegen.patch(model, fuse_residual=True)
        got = model(tokens()).logits
    assert calls == []
    assert close(got.detach(), want.detach(), torch.bfloat16)


def test_copies_checkpoints_and_pickles_of_a_fused_model(calls):
    model = tiny("llama")
    logits = model(tokens()).logits
    tunegen.patch(model, fuse_residual=True)
    assert torch.equal(copy.deepcopy(model)(tokens()).logits, logits)
    assert len(calls) == 2
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert torch.equal(loaded(tokens()).logits, logits)
    assert tunegen.patch(loaded, fuse_residual=True).fused
    model.train()
    model.model.gradient_checkpointing = True
    for layer in model.model.layers:
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = lambda function, *args: torch.utils.checkpoint.checkpoint(
            function, *args, use_reentrant=False
        )
    calls.clear()
    _, grads = gradients(model)
    assert len(calls) == 4, "each runs again for backward: what transformers wraps around a layer's forward stays"
    tunegen.unpatch(model)
    for name, want in gradients(model)[1].items():
        assert close(grads[name], want, torch.float32), name


def test_a_layer_that_gets_another_class_later_is_checkpointed_all_the_same(calls):
    """As FSDP2 does; transformers checkpoints around the forward of the class that a layer has when it runs."""
    model = tiny("qwen3").train()
    _, want = gradients(model)
    tunegen.patch(model, fuse_residual=True)
    for layer in model.model.layers:
        layer.__class__ = type(f"FSDP{type(layer).__name__}", (type(layer),), {})
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = lambda function, *args: torch.utils.checkpoint.checkpoint(
            function, *args, use_reentrant=False
        )
    model.model.gradient_checkpointing = True
    calls.clear()
    _, grads = gradients(model)
    assert len(calls) == 4
    for name, right in want.items():
        assert close(grads[name], right, torch.float32), name


def test_inside_torch_compile():
    model = tiny("qwen2").eval()
    logits = model(tokens()).logits
    tunegen.patch(model, fuse_residual=True)
    try:
        compiled = torch.compile(model.model.layers[0], backend="eager", fullgraph=True)
        x = torch.randn(2, 12, 64)
        rotary = model.model.rotary_emb(x, torch.arange(12)[None])
        assert torch.equal(
            compiled(x, position_embeddings=rotary), model.model.layers[0](x, position_embeddings=rotary)
        )
        assert torch.equal(model(tokens()).logits, logits)
    finally:
        torch._dynamo.reset()


def test_recorded_steps_have_the_fused_calls():
    model = tiny("qwen3", torch.bfloat16).train()
    plain = tunegen.record(model, batch()).counts()
    tunegen.patch(model, fuse_residual=True)
    found = tunegen.record(model, batch()).counts()
    assert sum(found.values()) == sum(plain.values())
    for direction in ("forward", "backward"):
        counts = [
            sum(n for p, n in found.items() if (p.op, p.direction, p.hidden) == (op, direction, 64))
            for op in ("rms_norm", "add_rms_norm")
        ]
        assert counts == [3, 2]


HOOKED = {
    "forward": lambda norm, hook: norm.register_forward_hook(lambda _, args, y: hook(args, y)),
    "forward pre": lambda norm, hook: norm.register_forward_pre_hook(lambda _, args: hook(args, args)),
    "backward": lambda norm, hook: norm.register_full_backward_hook(lambda _, dx, dy: hook(dy, dx)),
    "backward pre": lambda norm, hook: norm.register_full_backward_pre_hook(lambda _, dy: hook(dy, dy)),
    "all forward": lambda norm, hook: nn.modules.module.register_module_forward_hook(
        lambda module, args, y: hook(args, y) if module is norm else None
    ),
    "all forward pre": lambda norm, hook: nn.modules.module.register_module_forward_pre_hook(
        lambda module, args: hook(args, args) if module is norm else None
    ),
    "all backward": lambda norm, hook: nn.modules.module.register_module_full_backward_hook(
        lambda module, dx, dy: hook(dy, dx) if module is norm else None
    ),
    "all backward pre": lambda norm, hook: nn.modules.module.register_module_full_backward_pre_hook(
        lambda module, dy: hook(dy, dy) if module is norm else None
    ),
}


@pytest.mark.filterwarnings("ignore:(For|Full) backward hook")  # of hooks of all modules, the model among them
@pytest.mark.parametrize("register", HOOKED.values(), ids=HOOKED)
def test_a_hook_sees_and_changes_what_it_does_without_fusion(register, calls):
    model = tiny("qwen3").train()

    def step():
        """Logits, gradients and what the hook saw, which doubles what it may change."""
        seen = []

        def hook(given, result):
            seen.append([t.detach().clone() for t in given])
            return result * 2 if isinstance(result, torch.Tensor) else tuple(t * 2 for t in result)

        handle = register(model.model.layers[0].post_attention_layernorm, hook)
        try:
            logits, grads = gradients(model)
        finally:
            handle.remove()
        return [logits, *grads.values(), *(t for given in seen for t in given)], [len(given) for given in seen]

    tunegen.patch(model)
    want, shown = step()
    tunegen.patch(model, fuse_residual=True)
    got, shown_fused = step()
    assert shown == shown_fused == [1]
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    calls.clear()
    gradients(model)
    assert len(calls) == 2, "and without the hook all is as before"


@pytest.mark.parametrize("target", ["qwen3", "model"])
def test_what_cannot_be_fused_is_refused(target):
    if target == "qwen3":
        with pytest.raises(ValueError, match=r"'qwen3' is a name: give the model, or leave fuse_residual out$"):
            tunegen.patch("qwen3", fuse_residual=True)
    else:
        with pytest.raises(
            ValueError, match=r"backward is 'eager': give backward='tuned', or leave fuse_residual out$"
        ):
            tunegen.patch(tiny("qwen3"), fuse_residual=True, backward="eager")


# Layers of others.


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(x)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.mlp = Mlp(), Mlp()
        self.first, self.second = nn.RMSNorm(8, eps=1e-6), nn.RMSNorm(8, eps=1e-6)

    def forward(self, h, scale: float = 1.0):
        r = h
        h = self.attention(self.first(h)) * scale
        if h.dim() > 1:
            h = h + r
            r = h
            h = self.second(h)
        return self.mlp(h) + r


class AddsLater(Layer):
    def forward(self, h):
        r = h
        h = self.attention(self.first(h))
        h = h + r
        h = self.second(h)
        return self.mlp(h) + r


class NormsAnother(Layer):
    def forward(self, h):
        r = h
        g = self.attention(self.first(h))
        h = g + r
        r = h
        h = self.second(g)
        return self.mlp(h) + r


class WithSuper(Layer):
    def forward(self, h):
        h = h + h
        r = h
        h = self.second(h)
        return super().forward(h) + r


class Multiplies(Layer):
    def forward(self, h):
        r = h
        h = h - r
        r = h
        h = self.second(h)
        return self.mlp(h) + r


def test_any_layer_with_these_statements_is_fused(calls):
    model, x = nn.Sequential(Layer(), Layer()), torch.randn(3, 8)
    want = model(x)
    report = tunegen.patch(model, fuse_residual=True)
    assert [(one.kind, one.norms) for one in report.fused] == [("Layer", ("second",))] * 2
    assert torch.equal(model(x), want)
    assert len(calls) == 2
    assert torch.equal(model[0](x, scale=2.0), Layer.forward(model[0], x, 2.0))


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (AddsLater, "no residual add right before a patched norm"),
        (NormsAnother, "no residual add right before a patched norm"),
        (Multiplies, "no residual add right before a patched norm"),
        (WithSuper, "uses __class__ of a scope around it"),
    ],
)
def test_other_layers_are_left_and_compute_what_they_did(kind, why):
    torch.manual_seed(0)
    model, x = nn.Sequential(kind()), torch.randn(3, 8)
    want = model(x)
    report = tunegen.patch(model, fuse_residual=True)
    assert report.fused == ()
    assert why in report.not_fused[0].reason
    assert torch.allclose(model(x), want, atol=1e-6)


def loaded(tmp_path, monkeypatch, text):
    """A module from a file."""
    path = tmp_path / "others.py"
    path.write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "others", raising=False)
    import others

    return others, path


OTHERS = """
    import functools

    def noisy(function):
        @functools.wraps(function)
        def wrapper(*args, **named):
            calls.append(function.__name__)
            return function(*args, **named)
        return wrapper

    calls = []

    @noisy
    def forward(self, h, r, *, scale=2.0):
        h = r + h
        r = h
        h = self.norm(h)
        if scale is None:
            raise ValueError("no scale")
        return h * scale, r
"""


def test_decorators_defaults_and_lines_of_tracebacks_stay(tmp_path, monkeypatch):
    others, path = loaded(tmp_path, monkeypatch, OTHERS)
    forward, norms = fused(others.forward, frozenset({"norm"}))
    assert norms == ("norm",)
    here = SimpleNamespace(norm=nn.Identity())
    h, r = torch.ones(2), torch.ones(2)
    for function in (forward, others.forward):
        y, total = function(here, h, r)
        assert (y.tolist(), total.tolist()) == ([4.0, 4.0], [2.0, 2.0])
    assert others.calls == ["forward", "forward"]
    assert set(vars(others)) & {"_tunegen_add_then_norm", "make"} == set()
    with pytest.raises(ValueError, match="no scale") as caught:
        forward(here, h, r, scale=None)
    last = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert (last.filename, last.line) == (str(path), 'raise ValueError("no scale")')


@pytest.mark.parametrize(
    ("old", "new"), [("h * scale", "h + scale"), ("no scale", "a scale"), ("self.norm", "self.nrom")]
)
def test_a_source_that_is_not_what_runs_is_not_trusted(tmp_path, monkeypatch, old, new):
    others, path = loaded(tmp_path, monkeypatch, OTHERS)
    path.write_text(path.read_text().replace(old, new))
    linecache.checkcache()
    with pytest.raises(UnknownNormError, match="is not what runs"):
        fused(others.forward, frozenset({"norm"}))


def test_without_a_source_nothing_is_fused():
    names = {}
    exec("def forward(self, h, r):\n    h = r + h\n    r = h\n    h = self.norm(h)\n    return h, r\n", names)
    with pytest.raises(UnknownNormError, match="cannot be read"):
        fused(names["forward"], frozenset({"norm"}))
