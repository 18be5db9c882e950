"""A variant bound to its tensors: what is done once, what in each call, and that it is the same call."""

from __future__ import annotations

import importlib
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from kernel_cases import moderate, variants
from test_kernels_interpreted import CPU, SILICON, SMS

from tunegen import launch
from tunegen.compile import ArgumentClass
from tunegen.errors import CompileError
from tunegen.model import Config, Plan, Problem
from tunegen.ops import op_spec
from tunegen.reference import DTYPES
from tunegen.syntax import MIXED_UP

SPEC = op_spec("rms_norm")
FORWARD = Problem("rms_norm", "forward", 256, 6, "fp32", "fp32")
BACKWARD = Problem("rms_norm", "backward", 256, 6, "fp32", "fp32", weight_grad=True)
SPLIT = Problem("rms_norm", "forward", 4096, 2, "fp32", "fp32")
STREAM = 7


def bound_variant(problem, template):
    (config, *_) = moderate(problem, template, SILICON)
    return next(variants(problem, config, CPU, SMS))


def arguments_of(problem, seed=0):
    """Inputs and empty outputs, by the names of the kernels' parameters."""
    tensors = SPEC.inputs(problem, CPU, seed)
    for name, shape in SPEC.tensors(problem).items():
        if shape.role == "output":
            tensors[name] = torch.full(shape.shape, torch.nan, dtype=DTYPES[shape.dtype])
    return {**{f"{name}_ptr": tensor for name, tensor in tensors.items()}, **SPEC.scalars(problem)}


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("problem", "template"),
    [
        (FORWARD, "rms_norm/forward_single_block"),
        (SPLIT, "rms_norm/forward_split_row_atomic"),
        (BACKWARD, "rms_norm/backward_persistent_partials"),
    ],
    ids=["forward", "zeroed workspace", "two kernels"],
)
def test_bound_call_gives_the_same_bits_each_time(problem, template):
    """Also where a workspace must be zero each time: it is filled anew."""
    variant, given, outputs = bound_variant(problem, template), arguments_of(problem), ("y_ptr", "dx_ptr", "dw_ptr")
    variant(problem.rows, given)
    want = {name: given[name].clone() for name in outputs if name in given}
    call = variant.bind(problem.rows, given)
    for _ in range(2):
        for name in want:
            given[name].fill_(torch.nan)
        call()
        assert all(torch.equal(given[name], tensor) for name, tensor in want.items())


class Compiled:
    """In place of Triton's compiled kernel: notes its launches."""

    function, packed_metadata = "function", "metadata"

    def __init__(self):
        self.launches, self.described = [], []

    def launch_metadata(self, grid, stream, *arguments):
        self.described.append(grid)
        return "described"

    def run(self, *given):
        self.launches.append(given)


@pytest.fixture
def direct(monkeypatch):
    """Kernels are launched directly, on a GPU that is not there; what is compiled is noted."""
    found = SimpleNamespace(kernel=Compiled(), compiled=[], asked=0)
    active = SimpleNamespace(get_current_target=lambda: None, get_current_stream=lambda device: STREAM)
    monkeypatch.setattr(importlib.import_module("triton.runtime.driver"), "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(launch, "launches_directly", lambda: True)
    monkeypatch.setattr(launch, "load_binary", lambda compiled: None)
    monkeypatch.setattr(
        launch, "compile_launch", lambda one, config, classes, target: found.compiled.append(classes) or found.kernel
    )
    return found


@pytest.mark.compiler
@pytest.mark.parametrize("options", [{"pdl": True}, {"together": 2}, {"num_warps": 16}])
def test_a_kernel_launched_with_other_options_is_another(direct, options):
    """It is compiled with them: the second launch of a plan would have started with those of the first."""
    variant = bound_variant(FORWARD, "rms_norm/forward_single_block")
    (one,) = variant.plan(FORWARD.rows).launches
    variant._plan = FORWARD.rows, Plan((one, one, one._replace(**options)))
    variant.bind(FORWARD.rows, arguments_of(FORWARD))
    assert len(direct.compiled) == 2


@pytest.mark.compiler
def test_all_but_the_launch_is_done_when_it_is_bound(direct, monkeypatch):
    variant, given = bound_variant(FORWARD, "rms_norm/forward_single_block"), arguments_of(FORWARD)
    call = variant.bind(FORWARD.rows, given)
    assert (len(direct.compiled), direct.kernel.launches) == (1, [])
    for what in ("plan", "_classify", "_ready", "allocate"):
        monkeypatch.setattr(launch.Variant, what, None)
    call(), call()
    first, second = direct.kernel.launches
    assert first == second
    grid, (stream, function, metadata, described) = first[:3], first[3:7]
    assert grid == direct.kernel.described[0]
    assert (stream, function, metadata, described) == (STREAM, "function", "metadata", "described")
    assert any(argument is given["x_ptr"] for argument in first[9:])


@pytest.mark.compiler
def test_hooks_of_triton_that_are_set_later_are_called(direct, monkeypatch):
    from triton import knobs

    call = bound_variant(FORWARD, "rms_norm/forward_single_block").bind(FORWARD.rows, arguments_of(FORWARD))
    monkeypatch.setattr(knobs.runtime, "launch_enter_hook", "enter")
    monkeypatch.setattr(knobs.runtime, "launch_exit_hook", "leave")
    call()
    assert direct.kernel.launches[0][7:9] == ("enter", "leave")


@pytest.mark.compiler
def test_what_is_compiled_assumes_what_is_true_of_the_tensors_at_hand(direct):
    """A tensor at an odd address gets another kernel, also from the same variant."""
    variant, given = bound_variant(FORWARD, "rms_norm/forward_single_block"), arguments_of(FORWARD)
    variant.bind(FORWARD.rows, given)
    variant.bind(FORWARD.rows, arguments_of(FORWARD, 1))
    assert len(direct.compiled) == 1
    odd = torch.empty(FORWARD.rows * FORWARD.hidden + 1)[1:].view(FORWARD.rows, FORWARD.hidden)
    variant.bind(FORWARD.rows, {**given, "x_ptr": odd})
    assert [classes["x_ptr"].divisible for classes in direct.compiled] == [True, False]


@pytest.mark.compiler
def test_a_kernel_that_copies_is_told_whether_it_may(direct):
    """Another one is compiled where x begins, or its rows lie, where no 16 bytes can be copied at a time."""
    words = {"BLOCK_SIZE": 128, "SPLITS": 2, "STAGES": 3, "PROGRAMS_PER_SM": 1, "num_warps": 1}
    variant = next(variants(FORWARD, Config.of("split_row_meet", words), CPU, SMS))
    given = arguments_of(FORWARD)
    apart = torch.empty(FORWARD.rows * (FORWARD.hidden + 16) + 1)
    views = [
        apart[start:].as_strided(given["x_ptr"].shape, (FORWARD.hidden + more, 1))
        for start, more in ((0, 16), (0, 3), (1, 0))
    ]
    variant.bind(FORWARD.rows, given)
    for view in views:
        variant.bind(FORWARD.rows, {**given, "x_ptr": view, "x_row_stride": view.stride(0)})
    assert [classes["ALIGNED"] for classes in direct.compiled] == [
        ArgumentClass("constexpr", value=may) for may in (True, True, False, False)
    ]


@pytest.mark.compiler
@pytest.mark.parametrize(("hidden", "may"), [(256, True), (248, False)])
def test_what_is_launched_officially_copies_only_what_triton_can_see(monkeypatch, hidden, may):
    """In a release of Triton that is not on the tested list a row stride of 248 is any number: such copies did not
    compile."""
    told = []
    problem = replace(FORWARD, hidden=hidden)
    words = {"BLOCK_SIZE": 128, "SPLITS": 2, "STAGES": 3, "PROGRAMS_PER_SM": 1, "num_warps": 1}
    variant = next(variants(problem, Config.of("split_row_meet", words), CPU, SMS))
    (kernel,) = [one.kernel for one in variant.plan(problem.rows).launches]
    monkeypatch.setattr(launch, "launches_directly", lambda: False)
    monkeypatch.setattr(type(kernel), "__getitem__", lambda *_: lambda **given: told.append(given["ALIGNED"]))
    variant(problem.rows, arguments_of(problem))
    assert told == [may]


@pytest.mark.compiler
def test_an_official_launch_goes_on_where_threads_are_mixed_up(monkeypatch):
    """CPython 3.11 does that to Triton's parser."""
    tries = []
    variant = bound_variant(FORWARD, "rms_norm/forward_single_block")
    (kernel,) = [one.kernel for one in variant.plan(FORWARD.rows).launches]

    def fail_twice(**given):
        tries.append(given["x_ptr"])
        if len(tries) < 3:
            raise SystemError(f"{MIXED_UP} (before=84, after=86)")

    given = arguments_of(FORWARD)
    monkeypatch.setattr(launch, "launches_directly", lambda: False)
    monkeypatch.setattr(type(kernel), "__getitem__", lambda *_: fail_twice)
    variant(FORWARD.rows, given)
    assert [x is given["x_ptr"] for x in tries] == [True] * 3


@pytest.mark.compiler
def test_what_nobody_gives_is_an_error_when_it_is_bound(direct):
    given = arguments_of(FORWARD)
    del given["y_ptr"]
    with pytest.raises(CompileError, match="nothing gives its parameter 'y_ptr'"):
        bound_variant(FORWARD, "rms_norm/forward_single_block").bind(FORWARD.rows, given)
