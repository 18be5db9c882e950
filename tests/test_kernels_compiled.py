"""Every template compiled for every supported GPU, on a machine that has none: registers, spills, shared memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from kernel_cases import TEMPLATES, family_of, moderate, nests, problems

from tunegen.compile import (
    ALIGNED,
    ArgumentClass,
    aligned,
    compile_candidate,
    compile_launch,
    expected_classes,
    launch_options,
)
from tunegen.errors import CompileError
from tunegen.layouts import rows_of
from tunegen.model import Config, Launch, Problem, Silicon
from tunegen.ops import OPS, op_spec
from tunegen.plans import load, make_plan
from tunegen.render import renderings
from tunegen.silicon import of_arch
from tunegen.space import load_space

pytestmark = pytest.mark.compiler

ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
OTHER_TRITONS = [folder for folder in os.environ.get("TUNEGEN_TEST_TRITONS", "").split(":") if folder]

SHAPES = ((16384, 4096), (64, 16384), (4096, 16384), (4096, 32768))
"""The first one that the family is meant for."""


def first_problem(template: str, silicon: Silicon, x: str = "bf16", w: str = "bf16", **contract: object) -> Problem:
    found = [p for rows, hidden in SHAPES for p in problems(template, rows, hidden, x, w, silicon, **contract)]
    assert found, f"{template} is for none of {SHAPES} on {silicon.arch}"
    return found[0]


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("template", TEMPLATES)
def test_compiles_without_spills_for(template: str, arch: str) -> None:
    silicon = of_arch(arch)
    problem = first_problem(template, silicon)
    for config in moderate(problem, template, silicon):
        found = compile_candidate(op_spec(problem.op), problem, config, silicon)
        assert found.registers is not None, "cuobjdump said nothing"
        assert 0 < found.registers <= 255
        assert found.spill_bytes == 0, config.label()
        assert found.shared_bytes <= silicon.shared_limit


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_no_candidate_of_one_launch_spills_with_a_residual(arch: str) -> None:
    """The stream more is what 32 warps have no registers for: its space is narrower than rms_norm's."""
    silicon, spec = of_arch(arch), op_spec("add_rms_norm")
    space = load_space("add_rms_norm")
    for hidden in (8192, 16384):
        problem = Problem("add_rms_norm", "backward", hidden, 64, weight_grad=True)
        tiles = {}  # how dw is added up takes fewer registers
        for config in space.candidates(problem, silicon, "side_by_side"):
            tiles.setdefault((config["ROWS"], config.num_warps), config)
        assert tiles
        for config in tiles.values():
            assert compile_candidate(spec, problem, config, silicon).spill_bytes == 0, config.label()
    wider = replace(problem, hidden=16385)
    assert "side_by_side" not in [family.name for family in space.families(wider, silicon)]


@pytest.mark.parametrize(
    ("x", "w", "contract"),
    [
        ("fp64", "fp64", {"casting": "llama", "offset": True}),
        ("bf16", "fp32", {"casting": "llama"}),
        ("fp32", "bf16", {"offset": True}),
        ("fp16", "fp16", {}),
    ],
    ids=str,
)
@pytest.mark.parametrize("template", TEMPLATES)
def test_every_contract_compiles(template: str, x: str, w: str, contract: dict[str, object]) -> None:
    silicon = of_arch("sm_90")
    problem = first_problem(template, silicon, x, w, **contract)
    for config in moderate(problem, template, silicon):
        assert compile_candidate(op_spec(problem.op), problem, config, silicon).registers


@pytest.mark.parametrize("template", [t for t in TEMPLATES if nests(t)])
def test_rows_at_no_common_distance_compile_without_spills(template: str) -> None:
    """As transposed heads lie: 32 of them over 4096 positions."""
    silicon = of_arch("sm_90")
    problem = first_problem(template, silicon)
    heads = torch.empty(2, 32, 4096, problem.hidden, device="meta").transpose(1, 2)
    usual = op_spec(problem.op)
    for layout in usual.nestable(problem):
        scalars = usual.scalars(problem)
        for name in layout:
            scalars |= rows_of(heads).arguments(name)
        spec = replace(
            usual, scalars=lambda p, found=scalars: found, flags=lambda p, c, _, use=layout: usual.flags(p, c, use)
        )
        for config in moderate(problem, template, silicon):
            spilled = compile_candidate(spec, problem, config, silicon).spill_bytes
            assert spilled == 0, (layout, config.label())


@pytest.mark.parametrize("template", [t for t in TEMPLATES if "BLOCK_SIZE" in family_of(t).parameters])
def test_a_block_narrower_than_the_row_does_not_compile(template: str) -> None:
    silicon = of_arch("sm_90")
    problem = first_problem(template, silicon)
    config = moderate(problem, template, silicon)[0]
    narrow = Config.of(config.family, {**dict(config.parameters), "BLOCK_SIZE": config.numbers["BLOCK_SIZE"] // 2})
    with pytest.raises(CompileError, match="row"):
        compile_candidate(op_spec(problem.op), problem, narrow, silicon)


def test_an_odd_width_needs_fewer_registers_than_its_block() -> None:
    silicon = of_arch("sm_90")
    full = Problem("rms_norm", "forward", 8192, 16384)
    config = Config.of("single_block", {"BLOCK_SIZE": 8192, "ROWS": 1, "num_warps": 8})
    padded, whole = (
        compile_candidate(op_spec(p.op), p, config, silicon).registers for p in (replace(full, hidden=5120), full)
    )
    assert padded < whole, "N is a constant: lanes beyond it must vanish"


@pytest.mark.parametrize(("arch", "early"), [("sm_90", True), ("sm_89", False)])
@pytest.mark.parametrize("op", OPS)
def test_second_kernel_starts_early_where_the_hardware_can(op: str, arch: str, early: bool) -> None:
    """And waits for the first one, which lets it start: else it would add what is not there yet."""
    silicon = of_arch(arch)
    problem = Problem(op, "backward", 4096, 16384, weight_grad=True)
    config = load_space(op).candidates(problem, silicon, "persistent_partials")[0]
    source = renderings(problem, config, op_spec(op))[0]
    first, second = make_plan(load(source), config, 4096, 16384, silicon.sms).launches
    assert (first.pdl, second.pdl) == (False, early)
    assert launch_options(second, config).get("launch_pdl", False) == early
    ahead, behind = source.text.split("def sum_partials")
    assert ("gdc_launch_dependents" in ahead, "gdc_wait" in behind) == (early, early)


WAITS = [t for t in TEMPLATES if t.endswith("_meet")]


def test_more_programs_than_run_at_the_same_time_are_refused_with_the_reason() -> None:
    """For 400 programs of two warps ptxas was given 0 registers, and said `Ptx assembly aborted due to errors`."""
    launch, config = Launch(SimpleNamespace(__name__="waits"), (800,)), Config.of("waits", {"num_warps": 2})
    assert launch_options(launch._replace(together=32), config)["maxnreg"] == 32
    with pytest.raises(CompileError, match="waits: 33 programs of 2 warps cannot run at the same time"):
        launch_options(launch._replace(together=33), config)


@pytest.mark.parametrize("template", WAITS)
def test_programs_that_wait_fit_all_at_once(template: str) -> None:
    """The driver is told, and the registers of a multiprocessor are shared out: 65536 of them, in eights a thread."""
    silicon = of_arch("sm_90")
    problem = first_problem(template, silicon)
    found = load_space(problem.op).candidates(problem, silicon, family_of(template).name)
    for config in found:
        source = renderings(problem, config, op_spec(problem.op))[0]
        first, *behind = make_plan(load(source), config, problem.hidden, problem.rows, silicon.sms).launches
        options, programs = launch_options(first, config), first.grid[0]
        assert options["launch_cooperative_grid"]
        assert not any({"launch_cooperative_grid", "maxnreg"} & launch_options(one, config).keys() for one in behind)
        each = config.numbers["PROGRAMS_PER_SM"]
        assert options["maxnreg"] % 8 == 0 or options["maxnreg"] == 255
        assert options["maxnreg"] * 32 * config.num_warps * each <= 65536
        assert silicon.sms * each - config.numbers["SPLITS"] < programs <= silicon.sms * each
    for config in found[:: len(found) // 4]:
        assert compile_candidate(op_spec(problem.op), problem, config, silicon).registers <= 255


@pytest.mark.parametrize("template", WAITS)
def test_no_barrier_where_each_warp_waits_by_itself(template: str) -> None:
    """Warps leave the wait after different numbers of rounds: a barrier in it would hang, or let results through."""
    from triton.backends.compiler import GPUTarget

    silicon = of_arch("sm_90")
    problem = first_problem(template, silicon)
    target = GPUTarget("cuda", silicon.capability, 32)
    for config in load_space(problem.op).candidates(problem, silicon, family_of(template).name)[::3]:
        source = renderings(problem, config, op_spec(problem.op))[0]
        plan = make_plan(load(source), config, problem.hidden, problem.rows, silicon.sms)
        classes = expected_classes(op_spec(problem.op), problem, config, plan, plan.launches[0])
        ptx = compile_launch(plan.launches[0], config, classes, target).asm["ptx"]
        inner, *around = sorted([loop for loop in loops(ptx) if "ld.volatile" in loop], key=len)
        assert around, "the wait, and the loop over rows around it"
        assert inner.count("ld.volatile") == 1
        assert "bar.sync" not in inner
        assert "barrier" not in inner
        assert "shared" not in inner
        assert config.num_warps == 1 or all("bar.sync" in loop for loop in around)


@pytest.mark.parametrize("odd", ["x_ptr", "x_row_stride"])
@pytest.mark.parametrize("template", WAITS)
def test_rows_that_begin_anywhere_are_not_copied_into_shared_memory(template: str, odd: str) -> None:
    """A copy moves 4 bytes at least: of rows that begin at any multiple of 2, it does not compile."""
    from triton.backends.compiler import GPUTarget

    silicon = of_arch("sm_90")
    problem = first_problem(template, silicon)
    (config, *_) = moderate(problem, template, silicon)
    plan = make_plan(
        load(renderings(problem, config, op_spec(problem.op))[0]), config, problem.hidden, problem.rows, silicon.sms
    )
    classes = expected_classes(op_spec(problem.op), problem, config, plan, plan.launches[0])
    assert aligned(classes)
    unaligned = {**classes, odd: ArgumentClass("*bf16" if odd == "x_ptr" else "i64")}
    assert not aligned(unaligned)
    for found, copied in ((classes, True), ({**unaligned, ALIGNED: ArgumentClass("constexpr", value=False)}, False)):
        ptx = compile_launch(plan.launches[0], config, found, GPUTarget("cuda", silicon.capability, 32)).asm["ptx"]
        assert ("cp.async.cg.shared.global" in ptx) == copied, "16 bytes at a time"
        assert "cp.async.ca" not in ptx


def loops(ptx: str) -> list[str]:
    """The text from a label to each branch back to it."""
    lines = ptx.splitlines()
    labels = {line.split(":")[0]: number for number, line in enumerate(lines) if line.startswith("$")}
    found = []
    for number, line in enumerate(lines):
        if "bra" in line and (label := line.rstrip(";").split()[-1]) in labels and labels[label] <= number:
            found.append("\n".join(lines[labels[label] : number + 1]))
    return found


@pytest.mark.parametrize("hidden", [4096, 5120])
@pytest.mark.parametrize("op", OPS)
def test_what_runs_untuned_does_not_spill_at_the_usual_widths(op: str, hidden: int) -> None:
    silicon, space, spec = of_arch("sm_90"), load_space(op), op_spec(op)
    for rows in (64, 1024, 16384):
        forward = Problem(op, "forward", hidden, rows)
        backward = replace(forward, direction="backward")
        for problem in (forward, backward, replace(backward, weight_grad=True)):
            default = space.default(problem, silicon)
            assert default is not None
            assert compile_candidate(spec, problem, default, silicon).spill_bytes == 0, default.label()


def test_launchers_are_built_with_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both kernels of backward, by the driver of a machine with a GPU; the digest is that of their machine code."""
    silicon = of_arch("sm_90")
    problem = first_problem("rms_norm/backward_persistent_partials", silicon)
    family = load_space("rms_norm").candidates(problem, silicon, "persistent_partials")
    built: list[str] = []
    active = SimpleNamespace(launcher_cls=lambda source, metadata: built.append(metadata.name))
    monkeypatch.setattr("triton.runtime.driver._active", active)
    first, second = (compile_candidate(op_spec(problem.op), problem, config, silicon) for config in family[:2])
    assert built == ["backward_persistent_partials", "sum_partials"] * 2
    assert len(first.binary) == 64
    assert first.binary != second.binary
    assert compile_candidate(op_spec(problem.op), problem, family[0], silicon) == first


FRESH = """
import json, os
from tunegen.compile import compile_launch, expected_classes
from tunegen.ops import op_spec
from tunegen.plans import load, make_plan
from tunegen.model import Config, Problem
from tunegen.render import renderings
from tunegen.silicon import of_arch
from tunegen.space import load_space
from triton.backends.compiler import GPUTarget
from triton.runtime import cache
problem, silicon, spec = Problem("rms_norm", "forward", 256, 64), of_arch("sm_90"), op_spec("rms_norm")
config = load_space("rms_norm").default(problem, silicon)
plan = make_plan(load(renderings(problem, config, spec)[0]), config, 256, 64, silicon.sms)
(launch,) = plan.launches
classes = expected_classes(spec, problem, config, plan, launch)
compiled = compile_launch(launch, config, classes, GPUTarget("cuda", 90, 32))
asked = cache.triton_key.cache_info().currsize
print(json.dumps([compiled.hash, asked, cache.triton_key()]))
"""


def test_the_key_of_a_compiled_kernel_is_tritons_own(tmp_path: Path) -> None:
    """A second process asks Triton for no digest of itself, and finds what the first has compiled; so does one that
    has remembered none."""
    places = {"TUNEGEN_BUILD": str(tmp_path / "build"), "TRITON_CACHE_DIR": str(tmp_path / "cache")}

    def fresh(**changed: str) -> list[object]:
        environment = {**os.environ, **places, **changed}
        done = subprocess.run([sys.executable, "-c", FRESH], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        found: list[object] = json.loads(done.stdout)
        return found

    first, again, other = fresh(), fresh(), fresh(TUNEGEN_BUILD=str(tmp_path / "other"))
    assert first[::2] == again[::2] == other[::2]
    assert (first[1], again[1], other[1]) == (1, 0, 1)
    assert len(list((tmp_path / "cache").glob("*/forward_*.json"))) == 1


@pytest.mark.timeout(900)
@pytest.mark.parametrize("folder", OTHER_TRITONS or [pytest.param("", marks=pytest.mark.skip("TUNEGEN_TEST_TRITONS"))])
def test_the_same_with_another_triton(folder: str) -> None:
    """Everything above once more, in a process of its own; `folder` was filled by `pip install --no-deps --target`."""
    found_first = f"{folder}:{os.environ.get('PYTHONPATH', '')}"
    environment = {**os.environ, "PYTHONPATH": found_first, "TUNEGEN_TEST_TRITONS": ""}
    command = [sys.executable, "-c", "import triton; print(triton.__file__)"]
    where = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert Path(where.stdout.strip()).is_relative_to(Path(folder).resolve()), where.stdout + where.stderr
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(Path(__file__).resolve())]
    found = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout[-5000:]
