"""Every template in Triton's interpreter, on the CPU, against float64: numbers, masks, strides, grids; no GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from kernel_cases import (
    TEMPLATES,
    carried,
    check,
    evenly,
    family_of,
    gate_of,
    in_place_runner,
    nests,
    op_of,
    placed_runner,
    problems,
    programs,
    rounds_twice,
    space_of,
    variants,
)
from turns import take_turns

from tunegen.expressions import Rule
from tunegen.launch import Variant
from tunegen.layouts import rows_of
from tunegen.model import RMS_NORM, Config, Problem, Silicon
from tunegen.ops import op_spec, rms_norm_spec
from tunegen.plans import load
from tunegen.render import render, rendering
from tunegen.verify import variant_runner

pytestmark = pytest.mark.interpreter

CPU = torch.device("cpu")
SMS = 4
SHARED = 512 * 1024
"""More than any GPU has: with four SMs, rings of wide rows of two fp64 tensors would find no room in 227 KB."""
SILICON = Silicon("interpreter", 89, SMS, 2**20, 0, 0, SHARED)
PROGRAMS = 80
"""In the largest grid of a case: a program takes about five milliseconds."""
WAITING_PROGRAMS = 8
"""The same where programs wait for each other: each of them walks over all rows of its group."""

# bf16: the interpreter truncates where a GPU rounds, which is one ulp more.
ALLOWANCE = {"bf16": 2.0, "fp32": 8.0}

HOMES = ((37, 4096), (37, 8192), (37, 16384), (37, 32768), (1100, 8192))
"""Shapes for all families: configs are taken from the first that one is meant for, and carried to the width under
test."""

CONTRACTS = [
    (x, casting, offset)
    for x in ("fp32", "fp16", "fp64", "bf16")
    for casting in ("fp32", "llama")
    for offset in (False, True)
    if (x, casting) != ("bf16", "llama")  # two truncations on end: more than an ulp, and no fault of the kernel
]


@pytest.fixture(autouse=True)
def turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that wait for each other do not run one after the other."""
    take_turns(monkeypatch)


def home_of(template: str) -> tuple[int, int]:
    return next(shape for shape in HOMES if problems(template, *shape, "fp32", "fp32", SILICON))


def chosen(template: str) -> list[str]:
    """Its parameters that the space does not compute."""
    return [name for name, domain in family_of(template).parameters.items() if not isinstance(domain, Rule)]


def configs(template: str, problem: Problem, count: int) -> list[Config]:
    """`count` for every choice of structure, from the largest tile that PROGRAMS allows to the smallest."""
    rows, hidden = home_of(template)
    home = replace(problem, rows=rows, hidden=hidden)
    most = WAITING_PROGRAMS if template.endswith("_meet") else PROGRAMS
    distinct: dict[str, dict[str, Config]] = {}
    for candidate in space_of(home).candidates(home, SILICON, family_of(template).name):
        config = carried(candidate, template, problem, SILICON)
        if programs(problem, config, SMS) <= most:  # the number of warps makes no difference here
            distinct.setdefault(str(config.structure), {})[str(config.numbers)] = config
    assert distinct, f"no config of {template} for {problem}"
    return [config for group in distinct.values() for config in evenly(list(group.values())[::-1], count)]


def check_all(
    template: str,
    shape: tuple[int, int],
    x: str,
    w: str,
    *,
    count: int = 1,
    apart: Mapping[str, int] | None = None,
    nested: bool = False,
    **contract: object,
) -> None:
    """Every problem of the shape that the template is for, with `count` configs, in every rendering."""
    if x == "bf16" and rounds_twice(template):  # two truncations on end, as above
        contract["sum_in_fp32"] = True
    found = problems(template, *home_of(template), x, w, SILICON, **contract)
    assert found, f"{template} is for no problem with x {x}"
    for problem in (replace(p, rows=shape[0], hidden=shape[1]) for p in found):
        gate = gate_of(problem, CPU, ALLOWANCE)
        for config in configs(template, problem, count):
            for layout in op_spec(problem.op).nestable(problem) if nested else [()]:
                for variant in variants(problem, config, CPU, SMS, layout):
                    check(problem, variant, gate, placed_runner(variant, apart) if apart else None)


@pytest.mark.parametrize(("x", "casting", "offset"), CONTRACTS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_every_contract(template: str, x: str, casting: str, offset: bool) -> None:
    check_all(template, (21, 100), x, x, casting=casting, offset=offset)


@pytest.mark.parametrize(("x", "w"), [("fp16", "fp32"), ("fp32", "fp16"), ("bf16", "fp32")])
@pytest.mark.parametrize("template", TEMPLATES)
def test_a_weight_of_another_dtype(template: str, x: str, w: str) -> None:
    check_all(template, (5, 100), x, w)


@pytest.mark.parametrize("shape", [(37, 128), (21, 17), (5, 1), (1, 100), (1, 129), (3, 2500)], ids=str)
@pytest.mark.parametrize("template", TEMPLATES)
def test_every_shape(template: str, shape: tuple[int, int]) -> None:
    # fp16: with one column dx is a difference of equal numbers, of which fp32 leaves nothing.
    check_all(template, shape, "fp16", "fp16", count=2)


@pytest.mark.parametrize("shape", [(5, 100), (2, 2500)], ids=str)
@pytest.mark.parametrize("template", TEMPLATES)
def test_rows_further_apart_than_n(template: str, shape: tuple[int, int]) -> None:
    check_all(template, shape, "fp32", "fp32", count=2, apart={"x": 13, "dy": 5, "residual": 7, "dsum": 3})


@pytest.mark.parametrize(("x", "casting"), [("fp16", "fp32"), ("fp16", "llama"), ("bf16", "fp32")])
@pytest.mark.parametrize("shape", [(21, 100), (3, 2500)], ids=str)
@pytest.mark.parametrize("template", [t for t in TEMPLATES if rounds_twice(t)])
def test_the_sum_in_fp32(template: str, shape: tuple[int, int], x: str, casting: str) -> None:
    check_all(template, shape, x, x, count=2, casting=casting, sum_in_fp32=True)


@pytest.mark.parametrize("sum_in_fp32", [False, True])
@pytest.mark.parametrize("template", [t for t in TEMPLATES if rounds_twice(t)])
def test_outputs_may_lie_over_the_inputs(template: str, sum_in_fp32: bool) -> None:
    for home in problems(template, *home_of(template), "fp16", "fp16", SILICON, sum_in_fp32=sum_in_fp32):
        problem = replace(home, rows=5, hidden=2500)
        gate = gate_of(problem, CPU, ALLOWANCE)
        for config in configs(template, problem, 2):
            for variant in variants(problem, config, CPU, SMS):
                check(problem, variant, gate, in_place_runner(variant))


@pytest.mark.parametrize("shape", [(37, 100), (2, 2500)], ids=str)
@pytest.mark.parametrize("template", [t for t in TEMPLATES if nests(t)])
def test_rows_at_no_common_distance(template: str, shape: tuple[int, int]) -> None:
    check_all(template, shape, "fp16", "fp16", nested=True)


@pytest.mark.parametrize("template", TEMPLATES)
def test_another_eps_and_offset_than_is_tuned_with(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gate of a sweep knows one eps and one offset: a kernel with those written into it would pass there."""
    monkeypatch.setattr(rms_norm_spec, "EPS", 1e-2)
    monkeypatch.setattr(rms_norm_spec, "OFFSET", 0.5)
    monkeypatch.setattr(rms_norm_spec.constants, "__defaults__", (0.5,))
    check_all(template, (5, 100), "fp32", "fp32", offset=True)


def computes_dw(template: str) -> bool:
    """Whether the family is for backwards that want the gradient of the weight."""
    return any(p.weight_grad for p in problems(template, *home_of(template), "fp16", "fp16", SILICON))


@pytest.mark.parametrize("template", [t for t in TEMPLATES if computes_dw(t)])
def test_dw_is_added_to_what_is_there(template: str) -> None:
    """To the bit what it is without, and one addition in the dtype of sums."""
    problem = Problem(op_of(template), "backward", 100, 21, "fp16", "fp32", weight_grad=True)
    spec = op_spec(problem.op)
    given = spec.inputs(problem, CPU, seed=0)
    start = torch.linspace(-3, 3, 100)
    for config in configs(template, problem, 2):
        for variant in variants(problem, config, CPU, SMS):
            flags = {**variant.source.flags, "accumulate_dw": True}
            source = render(problem.op, template.partition("/")[2], flags)
            adding = Variant(source, config, spec.constants(problem), problem.accumulate, CPU, SMS)
            results = []
            for run, dw in ((variant, torch.zeros(100)), (adding, start.clone())):
                results.append((torch.empty_like(given["x"]), dw))
                made = dict(zip(("dx", "dw"), results[-1], strict=True))
                variant_runner(spec, run)(problem, {**given, **made})
            (dx, dw), (dx_again, added) = results
            assert dw.any()
            assert torch.equal(dx_again, dx)
            assert torch.equal(added, start + dw)


@pytest.mark.parametrize("hidden", [1, 9, 33])
@pytest.mark.parametrize("template", [t for t in TEMPLATES if "SPLITS" in chosen(t)])
def test_parts_past_the_end_of_the_row_do_nothing(template: str, hidden: int) -> None:
    for problem in problems(template, *home_of(template), "fp16", "fp16", SILICON):
        narrow = replace(problem, rows=5, hidden=hidden)
        wide = space_of(problem).candidates(problem, SILICON, family_of(template).name)[-1]
        config = carried(Config.of(wide.family, {**dict(wide.parameters), "SPLITS": 8}), template, narrow, SILICON)
        assert 7 * config.numbers["BLOCK_SIZE"] >= hidden, "every part holds columns: the case tests nothing"
        for variant in variants(narrow, config, CPU, SMS):
            check(narrow, variant, gate_of(narrow, CPU, ALLOWANCE))


@pytest.mark.parametrize("template", [t for t in TEMPLATES if t.endswith("_meet")])
def test_a_sum_that_is_0_would_be_waited_for_if_it_were_published_as_it_is(
    template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row of zeros: on a GPU that call would never end. Here programs that wait for ever are found out."""
    monkeypatch.setattr("turns.PATIENCE", 500)
    problem = replace(problems(template, *home_of(template), "fp32", "fp32", SILICON)[0], rows=3, hidden=100)
    spec = op_spec(problem.op)
    given = {name: torch.zeros_like(tensor) for name, tensor in spec.inputs(problem, CPU, seed=0).items()}
    outputs = {name: shape for name, shape in spec.tensors(problem).items() if shape.role == "output"}
    made = {name: torch.full(shape.shape, torch.nan) for name, shape in outputs.items()}
    config = configs(template, problem, 1)[0]
    right = list(variants(problem, config, CPU, SMS))[-1]
    variant_runner(spec, right)(problem, {**given, **made})
    assert not any(tensor.any() for name, tensor in made.items() if name != "rstd")
    faulty = right.source.text.replace("gl.where(word == 0, -2147483648, word)", "word")
    assert faulty != right.source.text
    source = replace(right.source, text=faulty, digest=f"{right.source.digest}faulty")
    waiting = Variant(source, config, spec.constants(problem), problem.accumulate, CPU, SMS)
    with pytest.raises(Exception, match="the programs wait for each other"):
        variant_runner(spec, waiting)(problem, {**given, **made})


STORES_OFFSETS = """

@triton.jit
def store_offsets(offsets_ptr, M, middle, inner, outer_stride, middle_stride, inner_stride):
    rows = tl.cast(tl.program_id(0), tl.int64) + tl.arange(0, 1)
    offsets = row_offsets(rows, middle, inner, outer_stride, middle_stride, inner_stride)
    tl.store(offsets_ptr + rows, tl.cast(offsets, tl.int64), mask=rows < M)
"""


def test_offsets_beyond_32_bits_of_strides_that_are_not() -> None:
    """Triton hands numbers below 2^31 over in 32 bits: rows of 12.9 GB of fp16, which nobody needs to have."""
    problem = Problem(RMS_NORM, "forward", 16, 8)
    config = next(iter(space_of(problem).candidates(problem, SILICON, "single_block")))
    source = rendering(problem, config, op_spec(RMS_NORM), save_rstd=False, nested=("x",))
    text = source.text + STORES_OFFSETS
    kernel = load(replace(source, text=text, digest=f"{source.digest}offsets")).store_offsets
    shape, strides = (4, 2), (2**31 - 16, 32)
    nested = rows_of(torch.empty_strided((*shape, 16), (*strides, 1), dtype=torch.float16, device="meta")).nested
    assert nested is not None
    offsets = torch.zeros(8, dtype=torch.int64)
    kernel[(8,)](offsets, 8, *nested[:-1])
    assert offsets.tolist() == [i * strides[0] + j * strides[1] for i in range(shape[0]) for j in range(shape[1])]
