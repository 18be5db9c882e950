"""`patch` on small models of each architecture: what is replaced, that nothing else changes, that it can be undone."""

from __future__ import annotations

import copy
import functools
import importlib
import io
import sys
import types
import warnings
from types import SimpleNamespace

import pytest
import torch
from tiny_models import ARCHITECTURES, NORMS, batch, gradients, tiny, tokens
from torch import nn

import tunegen
from tunegen.integrations import architectures, patching
from tunegen.integrations.forwards import ORIGINAL, own_forward
from tunegen.integrations.recognition import Contract

transformers = pytest.importorskip("transformers")

every_architecture = pytest.mark.parametrize("architecture", ARCHITECTURES)


@pytest.fixture
def calls(monkeypatch):
    """The contracts with which the op was called."""
    found = []
    ours = patching.rms_norm

    def noted(x, weight=None, eps=1e-6, *, offset=0.0, casting="fp32"):
        found.append((tuple(x.shape), eps, offset, casting))
        return ours(x, weight, eps, offset=offset, casting=casting)

    monkeypatch.setattr(patching, "rms_norm", noted)
    return found


@pytest.fixture(params=ARCHITECTURES)
def by_name(request):
    """An architecture whose classes are patched while the test runs."""
    report = tunegen.patch(request.param)
    yield request.param, report
    tunegen.unpatch(request.param)


def gemma(architecture):
    return architecture.startswith("gemma")


def modeling(architecture):
    return importlib.import_module(f"transformers.models.{architecture}.modeling_{architecture}")


def close(got, want, dtype):
    scale = max(float(want.abs().max()), 1e-3)
    return float((got.double() - want.double()).abs().max()) <= 8 * torch.finfo(dtype).eps * scale


def off(got, want):
    return float((got.double() - want).norm())


@every_architecture
def test_each_norm_is_replaced_under_its_contract(architecture, calls):
    model = tiny(architecture)
    report = tunegen.patch(model)
    assert (len(report.replaced), report.left, report.notes) == (NORMS[architecture], (), ())
    contract = Contract(1e-6, 1.0, "fp32") if gemma(architecture) else Contract(1e-6, 0.0, "llama", "promoted")
    eps = model.config.rms_norm_eps
    assert {r.contract for r in report.replaced} == {contract._replace(eps=eps)}
    assert {r.name for r in report.replaced} == {n for n, _ in model.named_modules() if n.endswith("norm")}
    model(tokens())
    assert len(calls) == NORMS[architecture]
    assert {call[1:] for call in calls} == {tuple(contract._replace(eps=eps))[:3]}


@every_architecture
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_and_gradients_are_those_of_the_model(architecture, dtype):
    model = tiny(architecture, dtype)
    _, right = gradients(copy.deepcopy(model).double())
    logits, grads = gradients(model)
    tunegen.patch(model)
    patched_logits, patched_grads = gradients(model)
    # On the CPU both are torch operators, and forward has the same ones.
    assert torch.equal(patched_logits, logits)
    assert patched_grads.keys() == grads.keys() == right.keys()
    for name, want in right.items():
        assert off(patched_grads[name], want) <= 1.5 * off(grads[name], want), name
        assert dtype == torch.bfloat16 or close(patched_grads[name], grads[name], dtype), name


@every_architecture
def test_eager_backward_has_the_same_gradients(architecture):
    model = tiny(architecture)
    logits, grads = gradients(model)
    report = tunegen.patch(model, backward="eager")
    assert len(report.replaced) == NORMS[architecture]
    patched_logits, patched_grads = gradients(model)
    assert torch.equal(patched_logits, logits)
    for name, want in grads.items():
        assert close(patched_grads[name], want, torch.float32), name


def test_classes_are_patched_for_models_built_before_and_after(calls):
    before = tiny("qwen3")
    report = tunegen.patch("qwen3")
    try:
        after = tiny("qwen3")
        assert [(r.name, r.kind, r.hidden) for r in report.replaced] == [("Qwen3RMSNorm", "Qwen3RMSNorm", None)]
        for model in (before, after):
            calls.clear()
            model(tokens())
            assert len(calls) == NORMS["qwen3"]
    finally:
        assert tunegen.unpatch("qwen3") == 1
    calls.clear()
    before(tokens())
    assert not calls


def test_class_reads_eps_of_each_module(by_name, calls):
    architecture, _ = by_name
    model = tiny(architecture, rms_norm_eps=0.125)
    model(tokens())
    assert {call[1] for call in calls} == {0.125}


def test_class_patch_leaves_logits(by_name):
    architecture, _ = by_name
    model = tiny(architecture)
    patched = model(tokens()).logits
    tunegen.unpatch(architecture)
    assert torch.equal(patched, model(tokens()).logits)


def test_other_architectures_stay(calls):
    tunegen.patch("qwen3")
    try:
        tiny("llama")(tokens())
        assert not calls
    finally:
        tunegen.unpatch("qwen3")


@every_architecture
def test_unpatch_leaves_no_trace(architecture, calls):
    model = tiny(architecture)
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    tunegen.patch(model)
    assert tunegen.unpatch(model) == NORMS[architecture]
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before
    model(tokens())
    assert not calls
    assert tunegen.unpatch(model) == 0


def test_unpatched_class_is_what_it_was():
    tunegen.patch("qwen3")
    tunegen.unpatch("qwen3")
    cls = modeling("qwen3").Qwen3RMSNorm
    assert cls.forward.__module__ == cls.__module__
    assert not [name for name in vars(cls) if "tunegen" in name]


def test_patching_twice_is_patching_once(calls):
    model = tiny("qwen3")
    tunegen.patch(model)
    tunegen.patch(model, backward="eager")
    tunegen.patch(model)
    model(tokens())
    assert len(calls) == NORMS["qwen3"]
    assert tunegen.unpatch(model) == NORMS["qwen3"]
    assert not [name for module in model.modules() for name in vars(module) if name in ("forward", ORIGINAL)]


@every_architecture
def test_state_dicts_are_unchanged(architecture):
    model, other = tiny(architecture), tiny(architecture, seed=5)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    tunegen.patch(model)
    assert model.state_dict().keys() == before.keys()
    other.load_state_dict(model.state_dict())
    model.load_state_dict(before)
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())


def test_copies_and_pickles_of_a_patched_model_work(calls):
    model = tiny("qwen3")
    tunegen.patch(model)
    want = model(tokens()).logits
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    calls.clear()
    assert torch.equal(twin(tokens()).logits, want)  # by its own weights, not those it was copied from
    assert len(calls) == NORMS["qwen3"]
    assert tunegen.unpatch(twin) == NORMS["qwen3"]
    assert torch.equal(saved_and_loaded(twin)(tokens()).logits, want)


def saved_and_loaded(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_model_that_is_saved_whole_while_patched_is_loaded_unpatched(calls):
    model = tiny("qwen3")
    tunegen.patch(model)
    want = model(tokens()).logits
    loaded = saved_and_loaded(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    calls.clear()
    assert torch.equal(loaded(tokens()).logits, want)
    assert not calls
    assert tunegen.unpatch(loaded) == 0
    assert not [name for name in vars(loaded.model.norm) if name in vars(nn.Module)]  # pickle left methods there
    assert len(tunegen.patch(loaded).replaced) == NORMS["qwen3"]
    assert torch.equal(loaded(tokens()).logits, want)
    assert len(calls) == NORMS["qwen3"]
    assert tunegen.unpatch(loaded) == NORMS["qwen3"]
    assert torch.equal(loaded(tokens()).logits, want)


def test_gradient_checkpointing_has_the_same_gradients():
    model = tiny("qwen3").train()
    _, want = gradients(model)
    tunegen.patch(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # 5.x has another name for it, 4.57 only this
        model.gradient_checkpointing_enable()
    _, got = gradients(model)
    assert all(close(got[name], want[name], torch.float32) for name in want)


def test_compiled_model_says_that_nothing_changes():
    model = tiny("qwen3")
    compiled = torch.compile(model, backend="eager")
    report = tunegen.patch(compiled)
    assert len(report.replaced) == NORMS["qwen3"]
    assert "compiled" in report.notes[0]
    tunegen.unpatch(compiled)
    model.compile(backend="eager")
    assert "compiled" in tunegen.patch(model).notes[0]


def test_switched_off_is_said(monkeypatch):
    monkeypatch.setenv("TUNEGEN_DISABLE", "1")
    assert "TUNEGEN_DISABLE" in tunegen.patch(tiny("qwen3")).notes[0]


def test_patched_model_compiles_whole():
    model = tiny("qwen3")
    want, grads = gradients(model)
    tunegen.patch(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    got, compiled_grads = gradients(compiled)
    assert torch.allclose(got, want, rtol=1e-5, atol=1e-5)
    assert {name.removeprefix("_orig_mod.") for name in compiled_grads} == grads.keys()


class Dense(nn.Module):
    """Norms of others around one of torch's."""

    def __init__(self):
        super().__init__()
        self.first = nn.RMSNorm(16, eps=1e-5)
        self.second = nn.RMSNorm(16)
        self.third = nn.LayerNorm(16, bias=False)

    def forward(self, x):
        return self.third(self.second(self.first(x)))


def test_what_is_left_is_named_with_the_reason(calls):
    report = tunegen.patch(Dense())
    assert [(r.name, r.kind, r.hidden, r.contract) for r in report.replaced] == [
        ("first", "RMSNorm", 16, Contract(1e-5, 0.0, "fp32"))
    ]
    assert [(left.name, left.kind) for left in report.left] == [("second", "RMSNorm"), ("third", "LayerNorm")]
    assert "eps is None" in report.left[0].reason
    assert "something else" in report.left[1].reason
    text = str(report)
    assert "1 replaced, 2 left" in text
    assert "eps 1e-05, offset 0, casting fp32" in text


def test_model_may_be_a_norm_itself(calls):
    norm = nn.RMSNorm(16, eps=1e-6)
    assert tunegen.patch(norm).replaced[0].name == ""
    norm(torch.ones(2, 16))
    assert len(calls) == 1
    with pytest.raises(ValueError, match="the model itself"):
        tunegen.patch(nn.RMSNorm(16))


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (("qwen33",), ValueError, r"qwen33.*such as qwen3"),
        ((nn.Linear(4, 4),), ValueError, "nothing to patch"),
        (
            ("Qwen/Qwen3-8B",),
            ValueError,
            r"'Qwen/Qwen3-8B' is no architecture; .*load it, and give the model or its model",
        ),
        (("models/Qwen3.5",), ValueError, "load it, and give the model"),
        (("",), ValueError, "such as qwen3"),
        ((5,), TypeError, "int"),
        ((nn.RMSNorm,), TypeError, "type"),
    ],
)
def test_bad_targets_are_refused(arguments, error, words):
    with pytest.raises(error, match=words):
        tunegen.patch(*arguments)


def test_where_nothing_is_patched_what_was_seen_is_named_with_the_remedy():
    inside = nn.ModuleList([nn.LayerNorm(4)])
    model = nn.Sequential(nn.LayerNorm(4), nn.BatchNorm1d(4), nn.Linear(4, 4), inside, nn.RMSNorm(4))
    with pytest.raises(ValueError, match=r"^nothing to patch: 0 replaced, 1 left\n") as caught:
        tunegen.patch(model)
    *_, seen, remedy = str(caught.value).splitlines()
    assert seen == "  seen: 2 x LayerNorm, 1 x BatchNorm1d, 1 x RMSNorm"
    assert remedy.startswith("  patch takes norms that compute x / sqrt(mean(x^2) + eps) * weight")
    with pytest.raises(ValueError, match="seen: no class with Norm in its name"):
        tunegen.patch(nn.Linear(4, 4))
    many = [type(f"Norm{i}", (nn.Module,), {})() for i in range(8)]
    with pytest.raises(ValueError, match=r"1 x Norm4 and 3 other classes\n"):
        tunegen.patch(nn.Sequential(*many))


def test_architecture_without_an_rms_norm_names_its_norms():
    with pytest.raises(ValueError, match="seen: 1 x OlmoLayerNorm"):
        tunegen.patch("olmo")


def test_unknown_backward_is_refused_and_nothing_is_patched():
    model = tiny("llama")
    with pytest.raises(ValueError, match="tuned, eager"):
        tunegen.patch(model, backward="triton")
    assert tunegen.unpatch(model) == 0


@pytest.mark.parametrize("target", [5, None])
def test_unpatch_refuses_other_things(target):
    with pytest.raises(TypeError, match="model or the name"):
        tunegen.unpatch(target)


def test_fp32_weight_promotes_as_in_the_original():
    """Weights that PEFT keeps in fp32 under bf16 hidden states."""
    model = tiny("llama", torch.bfloat16)
    norm = model.model.norm.float()
    x = torch.randn(3, 64).bfloat16()
    want = norm(x).detach()
    tunegen.patch(model)
    got = norm(x).detach()
    assert got.dtype == want.dtype == torch.float32
    assert close(got, want, torch.bfloat16)


def test_argument_keeps_its_name(calls):
    """torch calls it x, Hugging Face hidden_states."""
    x = torch.randn(2, 64)
    for norm, name in ((nn.RMSNorm(64, eps=1e-6), "x"), (tiny("qwen3").model.norm, "hidden_states")):
        want = norm(**{name: x})
        tunegen.patch(norm)
        assert torch.allclose(norm(**{name: x}), want, rtol=1e-6, atol=1e-6)
    assert len(calls) == 2


def test_generated_tokens_are_the_same():
    model = tiny("qwen3").eval()
    want = model.generate(tokens(), max_new_tokens=8, do_sample=False)
    tunegen.patch(model)
    assert torch.equal(model.generate(tokens(), max_new_tokens=8, do_sample=False), want)


def test_subclass_without_a_forward_of_its_own_is_patched_by_what_it_inherits(calls):
    norm_class = modeling("qwen3").Qwen3RMSNorm
    plain = type("Plain", (norm_class,), {})(8)
    doubling = type("Doubling", (norm_class,), {"forward": lambda self, x: 2 * norm_class.forward(self, x)})(8)
    x = torch.randn(2, 8)
    want = plain(x), doubling(x)
    tunegen.patch("qwen3")
    try:
        assert torch.equal(plain(x), want[0])
        assert torch.equal(doubling(x), want[1])
        assert not calls  # what a subclass inherits may call methods of its own
        assert len(tunegen.patch(plain).replaced) == 1  # while its class is patched
        with pytest.raises(ValueError, match="something else"):
            tunegen.patch(doubling)
    finally:
        tunegen.unpatch("qwen3")
    assert tunegen.unpatch(plain) == 1


def test_own_forward_of_a_class_that_inherits_it_is_the_original(monkeypatch):
    norm_class = modeling("qwen3").Qwen3RMSNorm
    forward = norm_class.forward
    heir = type("HeirRMSNorm", (norm_class,), {})
    monkeypatch.setattr(modeling("qwen3"), "HeirRMSNorm", heir, raising=False)
    assert len(tunegen.patch("qwen3").replaced) == 2
    try:
        assert own_forward(norm_class) is own_forward(heir) is forward
        assert heir.forward is not forward
    finally:
        assert tunegen.unpatch("qwen3") == 2
    assert heir.forward is forward


def test_architecture_is_imported_once(monkeypatch):
    imported = []
    ours = architectures.importlib.import_module
    monkeypatch.setattr(architectures.importlib, "import_module", lambda name: imported.append(name) or ours(name))
    tunegen.patch("qwen3")
    found = imported.count("transformers.models.qwen3.modeling_qwen3")
    tunegen.unpatch("qwen3")
    assert found == 1


def test_replica_of_data_parallel_computes_by_its_own_weights(calls):
    norm = tiny("qwen3").model.norm
    tunegen.patch(norm)
    replica = norm._replicate_for_data_parallel()
    weight = torch.full((64,), 3.0)
    replica.weight = weight  # as torch's `replicate` gives a replica the weights of its device
    x = torch.randn(2, 64)
    want = own_forward(type(norm))(replica, x)
    assert torch.equal(replica(x), want)
    assert not torch.equal(norm(x), want)
    assert len(calls) == 2
    again = replica._replicate_for_data_parallel()
    again.weight = 2 * weight
    assert torch.equal(again(x), 2 * want)


class Grouped(nn.Module):
    """A class whose constructor has an option that changes the formula, as Qwen4's does."""

    def __init__(self, hidden, group_size=None, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))
        self.group_size, self.eps = group_size, eps

    def forward(self, x):
        wide = x.float().unflatten(-1, (-1, self.group_size or x.shape[-1]))
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.flatten(-2).to(x.dtype)


def test_class_whose_options_may_change_the_formula_is_left_to_patching_models(monkeypatch):
    monkeypatch.setattr(modeling("qwen3"), "GroupedRMSNorm", Grouped, raising=False)
    report = tunegen.patch("qwen3")
    tunegen.unpatch("qwen3")
    assert [(left.name, left.reason) for left in report.left] == [
        ("GroupedRMSNorm", "its group_size may change what it computes: patch the model in place of the class")
    ]
    assert not tunegen.patch(nn.Sequential(Grouped(8))).left
    with pytest.raises(ValueError, match="something else"):
        tunegen.patch(Grouped(8, group_size=4))


def test_forward_of_others_that_computes_otherwise_is_left():
    norm = tiny("qwen3").model.norm
    own = type(norm).forward
    norm.forward = types.MethodType(lambda self, x: 2 * own(self, x), norm)
    with pytest.raises(ValueError, match="something else"):
        tunegen.patch(norm)
    norm.forward = lambda x: 0 * x
    with pytest.raises(ValueError, match="no method of it"):
        tunegen.patch(norm)


def test_other_arguments_are_refused_by_the_original():
    norm = tiny("qwen3").model.norm
    tunegen.patch(norm)
    with pytest.raises(TypeError, match=r"forward\(\) takes 2 positional arguments but 3 were given"):
        norm(torch.ones(2, 64), torch.ones(2, 64))


def test_wrapper_that_looks_like_ours_stays():
    """functools.wraps copies the name and module of what it wraps, as accelerate does."""
    norm = tiny("qwen3").model.norm
    tunegen.patch(norm)
    ours = norm.forward
    norm.forward = theirs = functools.wraps(ours)(lambda x: ours(x))
    assert tunegen.unpatch(norm) == 0
    assert norm.forward is theirs


def test_ours_is_found_where_hooks_of_accelerate_moved_it(calls):
    hooks = pytest.importorskip("accelerate.hooks")
    for first, then in (("patch", "hook"), ("hook", "patch"), ("hook", "patch and unhook")):
        norm = tiny("qwen3").model.norm
        for step in (first, *then.split(" and ")):
            if step == "patch":
                tunegen.patch(norm)
            elif step == "hook":
                hooks.add_hook_to_module(norm, hooks.ModelHook())
            else:
                hooks.remove_hook_from_module(norm)
        assert tunegen.unpatch(norm) == 1
        calls.clear()
        norm(torch.ones(2, 64))
        assert not calls, (first, then)


@pytest.mark.parametrize("patch_first", [True, False])
def test_model_whose_weights_accelerate_offloads_has_the_same_logits(patch_first, calls):
    """Weights are on `meta` but while their module runs."""
    accelerate = pytest.importorskip("accelerate")
    model = tiny("qwen3").eval()
    want = model(tokens()).logits
    if patch_first:
        tunegen.patch(model)
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    if not patch_first:
        assert len(tunegen.patch(model).replaced) == NORMS["qwen3"]
    assert model.model.norm.weight.device.type == "meta"
    assert torch.equal(model(tokens()).logits, want)
    assert len(calls) == NORMS["qwen3"]
    assert tunegen.unpatch(model) == NORMS["qwen3"]
    assert torch.equal(model(tokens()).logits, want)
    assert len(calls) == NORMS["qwen3"]


def test_class_that_two_architectures_share_is_restored_with_the_last(monkeypatch, calls):
    """As Qwen2-VL's module used Qwen2's class in transformers 4."""
    monkeypatch.setattr(modeling("qwen3"), "Qwen2RMSNorm", modeling("qwen2").Qwen2RMSNorm, raising=False)
    tunegen.patch("qwen2")
    assert "belongs to transformers.models.qwen2" in tunegen.patch("qwen3").notes[0]
    norm = tiny("qwen2").model.norm
    assert tunegen.unpatch("qwen3") == 1
    norm(torch.ones(2, 64))
    assert len(calls) == 1
    assert tunegen.unpatch("qwen2") == 1
    norm(torch.ones(2, 64))
    assert len(calls) == 1


def test_weight_that_is_computed_is_left():
    model = tiny("llama")
    doubled = type("Doubled", (nn.Module,), {"forward": lambda self, weight: 2 * weight})()
    torch.nn.utils.parametrize.register_parametrization(model.model.norm, "weight", doubled)
    (left,) = tunegen.patch(model).left
    assert left.name == "model.norm"


def test_forward_of_others_is_kept_for_unpatch():
    """As the `kernels` library and Liger leave it on a module."""
    model = tiny("qwen3")
    norm = model.model.norm
    own = type(norm).forward
    norm.forward = theirs = types.MethodType(lambda self, hidden_states: own(self, hidden_states), norm)
    tunegen.patch(model)
    assert norm.forward is not theirs
    tunegen.unpatch(model)
    assert norm.forward is theirs


def test_forward_that_others_put_over_ours_stays():
    model = tiny("qwen3")
    tunegen.patch(model)
    model.model.norm.forward = theirs = lambda hidden_states: hidden_states
    assert tunegen.unpatch(model) == NORMS["qwen3"] - 1
    assert model.model.norm.forward is theirs


def test_hooks_of_accelerate_stay_around_ours(calls):
    """accelerate keeps the forward that it wraps as `_old_forward`, and calls that."""
    model = tiny("qwen3")
    norm, moved = model.model.norm, []
    norm._old_forward = norm.forward
    norm.forward = lambda *args, **kwargs: moved.append(1) or norm._old_forward(*args, **kwargs)
    tunegen.patch(model)
    model(tokens())
    assert (len(moved), len(calls)) == (1, NORMS["qwen3"])
    tunegen.unpatch(model)
    model(tokens())
    assert (len(moved), len(calls)) == (2, NORMS["qwen3"])


@pytest.mark.parametrize(("castings", "offset", "contract"), [("llama", 0.0, "llama"), ("gemma", 1.0, "fp32")])
def test_modules_of_liger_carry_their_contract(monkeypatch, castings, offset, contract, calls):
    """They run on a GPU alone, so that no formula can be tried; theirs or named as theirs."""
    cls = type("LigerRMSNorm", (nn.Module,), {"__module__": "liger_kernel.transformers.rms_norm"})
    cls.forward = lambda self, hidden_states: hidden_states
    module = cls()
    module.weight = nn.Parameter(torch.ones(8))
    module.variance_epsilon, module.offset, module.casting_mode = 1e-5, offset, castings
    model = nn.Sequential(module)
    assert tunegen.patch(model).replaced[0].contract == Contract(1e-5, offset, contract)
    model(torch.ones(2, 8))
    assert calls == [((2, 8), 1e-5, offset, contract)]
    module.casting_mode = "none"
    with pytest.raises(ValueError, match="Liger's casting 'none'"):
        tunegen.patch(model)
    module.casting_mode, module.offset = castings, None
    with pytest.raises(ValueError, match="its contract cannot be read: TypeError"):
        tunegen.patch(model)


def test_hook_of_transformers_is_given_a_layer_of_its_own(monkeypatch):
    """`use_kernels=True` binds what the `kernels` library finds under the layer's name."""
    registered = {}
    mode = SimpleNamespace(TRAINING=1, INFERENCE=2, TORCH_COMPILE=4)
    library = SimpleNamespace(Mode=mode, register_kernel_mapping=registered.update, FuncRepository=object)
    monkeypatch.setitem(sys.modules, "kernels", library)
    cls = modeling("qwen3").Qwen3RMSNorm
    monkeypatch.setattr(cls, "kernel_layer_name", "RMSNorm", raising=False)
    tunegen.patch("qwen3")
    try:
        (name, devices), *others = registered.items()
        assert cls.kernel_layer_name == name != "RMSNorm"
        assert not others
        assert devices["cuda"].keys() == {1, 2, 1 | 4, 2 | 4}
        layer = devices["cuda"][1].load()
        assert layer.forward is cls.forward
        assert layer.has_backward
        assert layer.can_torch_compile
    finally:
        tunegen.unpatch("qwen3")
    assert cls.kernel_layer_name == "RMSNorm"


def test_trainer_trains_a_patched_model(tmp_path):
    pytest.importorskip("accelerate")
    model = tiny("qwen3")
    tunegen.patch(model)
    data = [{key: value[0] for key, value in batch().items()} for _ in range(4)]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=2, per_device_train_batch_size=2, report_to=[], use_cpu=True
    )
    before = model.model.norm.weight.detach().clone()
    transformers.Trainer(model=model, args=arguments, train_dataset=data).train()
    assert not torch.equal(model.model.norm.weight, before)
    assert tunegen.unpatch(model) == NORMS["qwen3"]


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")
def test_adapters_of_peft_train_on_a_patched_model(calls):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], modules_to_save=["norm"], r=2)
    model = peft.get_peft_model(tiny("qwen3"), config)
    _, want = gradients(model)
    report = tunegen.patch(model)
    assert len(report.replaced) == 2 * NORMS["qwen3"]  # "norm" ends all their names; each original stays by its copy
    calls.clear()
    _, got = gradients(model)
    assert len(calls) == NORMS["qwen3"]
    assert got.keys() == want.keys()
    assert any("norm" in name for name in got)
    assert all(close(got[name], want[name], torch.float32) for name in want)


GPU = torch.device("cuda", 0)


@pytest.mark.gpu
@every_architecture
@pytest.mark.parametrize("backward", ["tuned", "eager"])
def test_gradients_on_a_gpu_are_as_near_to_float64_as_the_models_own(architecture, backward, calls):
    """bf16 under SDPA: every parameter's gradient, logits too."""
    model = tiny(architecture, hidden_size=128, head_dim=32).to(GPU, torch.bfloat16)
    exact = tiny(architecture, hidden_size=128, head_dim=32).double().to(GPU)
    exact.load_state_dict({name: value.double() for name, value in model.state_dict().items()})
    right_logits, right = gradients(exact, GPU)
    eager_logits, eager = gradients(model, GPU)
    tunegen.patch(model, backward=backward)
    ours_logits, ours = gradients(model, GPU)
    assert len(calls) == NORMS[architecture] * (backward == "tuned")

    assert off(ours_logits, right_logits) <= 1.2 * off(eager_logits, right_logits)
    for name, want in right.items():
        assert off(ours[name], want) <= 1.5 * off(eager[name], want), name


@pytest.mark.gpu
def test_checkpointed_step_on_a_gpu_has_the_same_bits(calls):
    """The kernels are deterministic where the database is empty and atomics are not chosen: dw is left out."""
    model = tiny("qwen3", hidden_size=128, head_dim=32).to(GPU, torch.bfloat16).train()
    tunegen.patch(model)
    logits, plain = gradients(model, GPU)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model.gradient_checkpointing_enable()
    again, checkpointed = gradients(model, GPU)
    assert torch.equal(logits, again)
    for name, want in plain.items():
        if "norm" not in name:
            assert torch.equal(checkpointed[name], want), name


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # of torch and transformers
def test_logits_differ_by_no_more_than_compiled_ones():
    """At most twice the distance between the model and its compiled form; the same token in 99.9 % of places."""
    sizes = {"hidden_size": 512, "head_dim": 64, "num_attention_heads": 8, "intermediate_size": 1024}
    model = tiny("qwen3", **sizes).to(GPU, torch.bfloat16).eval()
    ids = torch.randint(64, (8, 64), generator=torch.Generator().manual_seed(3)).to(GPU)
    with torch.no_grad():
        eager = model(ids).logits.float()
        compiled = torch.compile(model)(ids).logits.float()
        tunegen.patch(model)
        ours = model(ids).logits.float()
    assert float((ours - eager).square().mean()) ** 0.5 <= 2 * float((compiled - eager).square().mean()) ** 0.5
    assert float((ours.argmax(-1) == eager.argmax(-1)).double().mean()) >= 0.999
