"""Every template on a GPU against float64, and the faults that only a GPU shows: races on masks, addresses beyond 2^31
elements, alignment that is assumed. Run without xdist: the first test fills Triton's cache on all cores."""

from __future__ import annotations

import functools
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import pytest
import torch
from kernel_cases import (
    TEMPLATES,
    carried,
    check,
    family_of,
    gate_of,
    in_place_runner,
    moderate,
    nests,
    outputs,
    placed_runner,
    problems,
    rounds_twice,
    space_of,
    spread,
    variants,
)
from torch import Tensor

from tunegen.launch import Variant
from tunegen.model import Config, Problem, Silicon
from tunegen.ops import op_spec
from tunegen.pool import compile_candidate
from tunegen.reference import DTYPES
from tunegen.silicon import query
from tunegen.verify import variant_runner

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda", 0)

# Outputs that are as precise as the arithmetic: sums in another order differ by a few ulp.
ALLOWANCE = {"fp32": 8.0, "fp64": 64.0}

HOMES = ((37, 5120), (2500, 5120), (2500, 20480), (2500, 40960))
"""Shapes for all families: configs for other shapes are carried over from the first that a family is meant for."""

DTYPE_PAIRS = [
    ("bf16", "bf16"),
    ("fp16", "fp16"),
    ("fp32", "fp32"),
    ("fp64", "fp64"),
    ("bf16", "fp32"),
    ("fp32", "bf16"),
]
CONTRACTS = [
    (x, w, casting, offset) for x, w in DTYPE_PAIRS for casting in ("fp32", "llama") for offset in (False, True)
]
SHAPES = [(1, 4096), (64, 4096), (1024, 4096), (1000, 769), (37, 5120), (4096, 128), (3, 102400), (1000, 33000)]
WIDTHS = [769, 768, 1023, 1025, 3584, 17]
HUGE = [(2**23 + 16, 256), (524289, 4096)]

Case = tuple[Problem, Config]


@functools.cache
def silicon() -> Silicon:
    return query(0)


@functools.cache
def home_cases(template: str, x: str, w: str, casting: str, offset: bool) -> list[Case]:
    """One config for every choice of structure, for every problem of the first home that the template is for."""
    for rows, hidden in HOMES:
        if found := problems(template, rows, hidden, x, w, silicon(), casting=casting, offset=offset):
            return [(p, c) for p in found for c in moderate(p, template, silicon())]
    raise AssertionError(f"{template} is for none of {HOMES}")


@functools.cache
def shape_cases(template: str, rows: int, hidden: int) -> list[Case]:
    """Configs from both ends and the middle of the space, where the family is meant for the shape."""
    found = problems(template, rows, hidden, "bf16", "bf16", silicon())
    return [(p, c) for p in found for c in spread(p, template, silicon(), 3)]


@functools.cache
def carried_cases(template: str, rows: int, hidden: int, x: str) -> list[Case]:
    """The home's configs at a shape that the family may not be meant for, with a weight."""
    cases = []
    for home, config in home_cases(template, x, x, "fp32", False):
        problem = replace(home, rows=rows, hidden=hidden)
        if home.weight_dtype:
            cases.append((problem, carried(config, template, problem, silicon())))
    return cases


def all_cases(template: str) -> Iterator[Case]:
    for contract in CONTRACTS:
        yield from home_cases(template, *contract)
    for shape in SHAPES:
        yield from shape_cases(template, *shape)
    for hidden in WIDTHS:
        yield from carried_cases(template, 7, hidden, "fp16")
    for shape in HUGE:
        yield from carried_cases(template, *shape, "bf16")


@pytest.fixture(scope="module", autouse=True)
def compiled(request: pytest.FixtureRequest) -> None:
    """Fill Triton's cache on all cores: one after another the compilations alone would take minutes."""
    parameters = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    selected = {values["template"] for values in parameters if values.get("template") in TEMPLATES}
    cases = dict.fromkeys(case for template in selected for case in all_cases(template))
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as executor:
        for outcome in [executor.submit(compile_candidate, *case, silicon()) for case in cases]:
            outcome.exception()  # a failure comes up again, with its reason, in the test of its case


@pytest.fixture(autouse=True)
def released() -> Iterator[None]:
    yield
    torch.cuda.empty_cache()


def check_cases(cases: list[Case], runs: int = 1) -> None:
    for problem, config in cases:
        gate = gate_of(problem, GPU, ALLOWANCE)
        for variant in variants(problem, config, GPU, silicon().sms):
            for _ in range(runs):
                check(problem, variant, gate)


@pytest.mark.parametrize(("x", "w", "casting", "offset"), CONTRACTS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_every_contract(template: str, x: str, w: str, casting: str, offset: bool) -> None:
    check_cases(home_cases(template, x, w, casting, offset))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("template", TEMPLATES)
def test_every_shape(template: str, shape: tuple[int, int]) -> None:
    cases = shape_cases(template, *shape)
    if not cases:
        pytest.skip(f"{template} is not meant for {shape}")
    check_cases(cases)


@pytest.mark.parametrize("hidden", WIDTHS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_h04_widths_that_no_vector_divides(template: str, hidden: int) -> None:
    check_cases(carried_cases(template, 7, hidden, "fp16"), runs=20)  # the damage is a race


@pytest.mark.parametrize("shape", [(999, 128), (37, 1000)], ids=str)
@pytest.mark.parametrize("template", [t for t in TEMPLATES if nests(t)])
def test_rows_at_no_common_distance(template: str, shape: tuple[int, int]) -> None:
    for problem, config in carried_cases(template, *shape, "bf16"):
        for layout in op_spec(problem.op).nestable(problem):
            for variant in variants(problem, config, GPU, silicon().sms, layout):
                check(problem, variant, gate_of(problem, GPU, ALLOWANCE))


@pytest.mark.parametrize(
    ("apart", "shift"),
    [({"x": 3, "dy": 5, "residual": 7, "dsum": 1}, 1), ({"x": 24, "dy": 8, "residual": 40, "dsum": 16}, 0)],
    ids=["nothing_aligned", "strides_of_16"],
)
@pytest.mark.parametrize("template", TEMPLATES)
def test_strides_and_alignment(template: str, apart: dict[str, int], shift: int) -> None:
    for problem, config in carried_cases(template, 37, 1000, "bf16"):
        variant = list(variants(problem, config, GPU, silicon().sms))[-1]
        check(problem, variant, gate_of(problem, GPU, ALLOWANCE), placed_runner(variant, apart, shift))


@pytest.mark.parametrize("template", [t for t in TEMPLATES if rounds_twice(t)])
def test_outputs_may_lie_over_the_inputs(template: str) -> None:
    for home, config in carried_cases(template, 37, 5120, "bf16"):
        for problem in (home, replace(home, sum_in_fp32=True)):
            gate = gate_of(problem, GPU, ALLOWANCE)
            for variant in variants(problem, config, GPU, silicon().sms):
                for _ in range(20):  # the damage would be a race
                    check(problem, variant, gate, in_place_runner(variant))


@pytest.mark.parametrize("template", [t for t in TEMPLATES if rounds_twice(t)])
def test_the_sum_in_fp32(template: str) -> None:
    for home, config in carried_cases(template, 1000, 769, "bf16"):
        problem = replace(home, sum_in_fp32=True)
        check_cases([(problem, config)])


def last_row_case(problem: Problem, spaced: bool) -> dict[str, Tensor]:
    """In the last row x is 1 and dy alternates between 1 and -0.5, elsewhere both are 0, as are residual and dsum; the
    weight is 1, outputs NaN.

    `spaced`: two rows that lie 2^31 elements apart.
    """
    shapes = op_spec(problem.op).tensors(problem)
    tensors = {
        name: torch.full(shape.shape, torch.nan, dtype=DTYPES[shape.dtype], device=GPU)
        for name, shape in shapes.items()
        if shape.role == "output"
    }
    for name in ("x", "dy", "residual", "dsum"):
        if name in shapes:
            size = 2**31 + problem.hidden if spaced else problem.rows * problem.hidden
            flat = torch.zeros(size, dtype=DTYPES[problem.x_dtype], device=GPU)
            stride = 2**31 if spaced else problem.hidden
            tensors[name] = flat.as_strided((problem.rows, problem.hidden), (stride, 1))
    tensors["x"][-1] = 1
    if problem.direction == "backward":
        tensors["dy"][-1, ::2], tensors["dy"][-1, 1::2] = 1, -0.5
        tensors["rstd"] = torch.full((problem.rows,), 1000.0, device=GPU)
        tensors["rstd"][-1] = 1
    tensors["w"] = torch.ones(problem.hidden, dtype=DTYPES[problem.weight_dtype], device=GPU)
    return tensors


def run_last_row(problem: Problem, variant: Variant, spaced: bool) -> None:
    tensors = last_row_case(problem, spaced)
    scalars = op_spec(problem.op).scalars(problem)
    if spaced:
        scalars |= {name: 2**31 for name in scalars if name.endswith("_row_stride")}
    variant(problem.rows, {**{f"{name}_ptr": tensor for name, tensor in tensors.items()}, **scalars})
    written = outputs(problem, variant)
    wide = "y" if problem.direction == "forward" else "dx"
    dy = torch.tensor([1.0, -0.5], device=GPU).repeat(problem.hidden // 2)
    last = torch.ones(problem.hidden, device=GPU) if wide == "y" else dy - 0.25
    torch.testing.assert_close(tensors[wide][-1].float(), last, rtol=1e-2, atol=0)
    for some_rows in tensors[wide][:-1].split(2**28 // problem.hidden):
        assert not some_rows.any(), f"{variant.config.label()}: a row of zeros has {wide} other than 0"
    if "rstd" in written:
        torch.testing.assert_close(tensors["rstd"][:-1], torch.full((problem.rows - 1,), 1000.0, device=GPU))
    if "dw" in written:
        torch.testing.assert_close(tensors["dw"].float(), dy, rtol=1e-2, atol=0)


def need_memory(gigabytes: float) -> None:
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info(GPU)[0] / 1e9
    if free < gigabytes:
        pytest.skip(f"needs {gigabytes:g} GB of free GPU memory, {free:.1f} are")


@pytest.mark.parametrize("shape", HUGE, ids=str)
@pytest.mark.parametrize("template", TEMPLATES)
def test_h06_more_elements_than_int32_counts(template: str, shape: tuple[int, int]) -> None:
    need_memory(24)
    for problem, config in carried_cases(template, *shape, "bf16"):
        for variant in variants(problem, config, GPU, silicon().sms):
            run_last_row(problem, variant, spaced=False)


@pytest.mark.parametrize("template", TEMPLATES)
def test_h06_a_stride_that_int32_does_not_hold(template: str) -> None:
    need_memory(14)
    for problem, config in carried_cases(template, 2, 128, "bf16"):
        run_last_row(problem, list(variants(problem, config, GPU, silicon().sms))[-1], spaced=True)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("template", [t for t in TEMPLATES if t.endswith("_meet")])
@pytest.mark.parametrize("shape", [(2048, 16384), (1000, 32768), (531, 65536), (512, 131072)], ids=str)
def test_programs_that_wait_for_each_other_meet(template: str, shape: tuple[int, int]) -> None:
    """Every way to split these rows ends, again and again, beside other work on the GPU too, and from a graph."""
    problem = next(iter(problems(template, *shape, "bf16", "bf16", silicon())), None)
    if problem is None:
        pytest.skip("the space has such problems from 32768 columns on")
    spec = op_spec(problem.op)
    gate, given = gate_of(problem, GPU, ALLOWANCE), spec.inputs(problem, GPU, seed=1)
    made = {
        name: torch.empty(tensor.shape, dtype=DTYPES[tensor.dtype], device=GPU)
        for name, tensor in spec.tensors(problem).items()
        if tensor.role == "output"
    }
    pointers = {f"{name}_ptr": tensor for name, tensor in {**given, **made}.items()}
    beside, other = torch.cuda.Stream(), torch.randn(4096, 4096, device=GPU)
    for config in space_of(problem).candidates(problem, silicon(), family_of(template).name)[::4]:
        variant = list(variants(problem, config, GPU, silicon().sms))[-1]
        check(problem, variant, gate)
        call = variant.bind(problem.rows, {**pointers, **spec.scalars(problem)})
        call()
        torch.cuda.synchronize()
        right = {name: tensor.clone() for name, tensor in made.items()}
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        for run in (call, graph.replay):
            for tensor in made.values():
                tensor.fill_(torch.nan)
            beside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(beside):
                for _ in range(4):
                    other = (other @ other).tanh()
            for _ in range(20):
                run()
            torch.cuda.synchronize()
            for name, tensor in made.items():
                assert torch.equal(tensor, right[name]), f"{config.label()}: {name} varies"


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_deterministic_policy_repeats_its_bits(template: str) -> None:
    for problem, config in home_cases(template, "bf16", "fp32", "fp32", False):
        if family_of(template) not in space_of(problem).families(replace(problem, policy="deterministic"), silicon()):
            pytest.skip(f"{template} is not offered under the deterministic policy")
        spec = op_spec(problem.op)
        given = spec.inputs(problem, GPU, seed=0)
        variant = list(variants(problem, config, GPU, silicon().sms))[-1]
        results = []
        for _ in range(10):
            shapes = {name: spec.tensors(problem)[name] for name in outputs(problem, variant)}
            made = {n: torch.full(t.shape, torch.nan, dtype=DTYPES[t.dtype], device=GPU) for n, t in shapes.items()}
            variant_runner(spec, variant)(problem, {**given, **made})
            results.append(made)
        for name, first in results[0].items():
            assert not first.isnan().any()
            assert all(torch.equal(first, other[name]) for other in results[1:]), f"{config.label()}: {name} varies"
