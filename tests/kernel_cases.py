"""What the kernel tests share: every template on disk, with configs that the op's search space allows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from tunegen.expressions import Rule
from tunegen.launch import Variant
from tunegen.model import Config, Problem, Scratch, Silicon
from tunegen.ops import OPS, op_spec
from tunegen.plans import load, make_plan
from tunegen.reference import DTYPES
from tunegen.render import render, templates
from tunegen.space import Family, SearchSpace, load_space, names_of
from tunegen.verify import Gate, Runner, Verdict, variant_runner

TEMPLATES = [f"{op}/{name}" for op in OPS for name in templates(op)]


def op_of(template: str) -> str:
    return template.partition("/")[0]


def family_of(template: str) -> Family:
    direction, name = template.partition("/")[2].split("_", 1)
    space = load_space(op_of(template))
    family = space.family(direction, name)
    assert family is not None, f"{template} has no family in {space.path}"
    return family


def space_of(problem: Problem) -> SearchSpace:
    return load_space(problem.op)


def nests(template: str) -> bool:
    """Whether the template reads rows at no common distance."""
    return bool(op_spec(op_of(template)).nestable(Problem(op_of(template), "backward", 64, 64)))


def rounds_twice(template: str) -> bool:
    """Whether a result is computed from one that is rounded, under the usual contract: y from the sum."""
    return template.startswith("add_rms_norm/forward_")


def problems(
    template: str, rows: int, hidden: int, x: str, w: str, silicon: Silicon, **contract: object
) -> list[Problem]:
    """The problems of that shape that the template is for: a weight that is trained, frozen, or none."""
    family = family_of(template)
    found = []
    for weight, grad in ((w, family.direction == "backward"), (w, False), (None, False)):
        if weight is None and contract.get("offset"):
            continue  # nothing to add it to
        problem = Problem(op_of(template), family.direction, hidden, rows, x, weight, weight_grad=grad, **contract)
        if problem not in found and family in space_of(problem).families(problem, silicon):
            found.append(problem)
    return found


def spread(problem: Problem, template: str, silicon: Silicon, count: int) -> list[Config]:
    """Up to `count` candidates for every choice of structure (RSTD, say), from one end of the space to the other."""
    groups: dict[tuple[tuple[str, str], ...], list[Config]] = {}
    for config in space_of(problem).candidates(problem, silicon, family_of(template).name):
        groups.setdefault(tuple(config.structure.items()), []).append(config)
    return [config for group in groups.values() for config in evenly(group, count)]


def evenly(configs: list[Config], count: int) -> list[Config]:
    """Up to `count` of them, the first and the last included."""
    picks = {i * (len(configs) - 1) // max(count - 1, 1) for i in range(count)}
    return [configs[i] for i in sorted(picks)]


def moderate(problem: Problem, template: str, silicon: Silicon) -> list[Config]:
    """For every choice of structure the candidate nearest to 16 elements a thread: it neither spills nor idles."""

    def distance(config: Config) -> float:
        width = config.numbers.get("BLOCK_SIZE") or config.numbers["CHUNK"]
        return abs(math.log2(config.numbers.get("ROWS", 1) * width / (32 * config.num_warps * 16)))

    nearest: dict[str, Config] = {}
    for config in space_of(problem).candidates(problem, silicon, family_of(template).name):
        key = str(config.structure)
        if key not in nearest or distance(config) < distance(nearest[key]):
            nearest[key] = config
    return list(nearest.values())


def carried(config: Config, template: str, problem: Problem, silicon: Silicon) -> Config:
    """`config` at the problem's width: what the space computes (BLOCK_SIZE) computed anew, its limits set aside; where
    it computes SPLITS instead, blocks are as much narrower as the row is."""
    scope = names_of(problem, silicon)
    parameters = {}
    for name, domain in family_of(template).parameters.items():
        if isinstance(domain, Rule):
            value = domain.value(scope)
        elif name == "BLOCK_SIZE":
            value = 1 << (-(-problem.hidden // config.numbers["SPLITS"]) - 1).bit_length()
        else:
            value = config[name]
        parameters[name] = scope[name] = value
    return Config.of(config.family, parameters)


def variants(
    problem: Problem, config: Config, device: torch.device, sms: int, nested: tuple[str, ...] = ()
) -> Iterator[Variant]:
    """One for every rendering that the product may launch where rows of the tensors `nested` lie at no common
    distance."""
    spec = op_spec(problem.op)
    for flags in spec.flags(problem, config, nested):
        source = render(problem.op, f"{problem.direction}_{config.family}", flags)
        yield Variant(source, config, spec.constants(problem), problem.accumulate, device, sms)


def programs(problem: Problem, config: Config, sms: int) -> int:
    """The grid of the first kernel that `config` launches; those behind it are small."""
    source = render(problem.op, f"{problem.direction}_{config.family}", op_spec(problem.op).flags(problem, config)[0])
    plan = make_plan(load(source), config, problem.hidden, problem.rows, sms)
    return math.prod(plan.launches[0].grid)


def gate_of(problem: Problem, device: torch.device, allowance: Mapping[str, float]) -> Gate:
    """The gate with at least so many ulp of an output's dtype allowed, by dtype.

    The gate's own budget is 1.5 x what plain torch is off by on these inputs: on a few rows that is a matter of luck,
    and a right kernel that adds in another order may be less lucky. An fp32 dw that M rows are added to one by one, as
    atomics do, walks at random: the k-th of M additions rounds a sum of about sqrt(k) terms, by half an ulp at most, so
    the whole is off by sqrt(M) / 2 ulp of |dw|, and by four times that somewhere among thousands of columns.
    """
    spec = op_spec(problem.op)
    gate = Gate(spec, problem, device)
    for case, _, truth in gate.cases:
        for name, expected in truth.items():
            dtype = spec.tensors(problem)[name].dtype
            floor = allowance.get(dtype, 0.0)
            if name == "dw" and dtype == "fp32":
                floor = max(floor, 2 * case.rows**0.5)
            truth[name] = replace(expected, budget=max(expected.budget, floor))
    return gate


def outputs(problem: Problem, variant: Variant) -> frozenset[str]:
    written = {name for name, tensor in op_spec(problem.op).tensors(problem).items() if tensor.role == "output"}
    return frozenset(written if variant.source.flags.get("save_rstd", True) else written - {"rstd"})


def check(problem: Problem, variant: Variant, gate: Gate, runner: Runner | None = None) -> Verdict:
    """Run a variant through the gate, on contiguous tensors unless a runner says otherwise."""
    verdict = gate.check(runner or variant_runner(op_spec(problem.op), variant), outputs(problem, variant))
    assert verdict.ok, f"{verdict.reason}\n{problem}\n{variant.config.label()}\n{variant.source.flags}"
    return verdict


def in_place_runner(variant: Variant) -> Runner:
    """Runs a forward variant of add_rms_norm with y over x and the sum over residual."""

    def run(problem: Problem, tensors: Mapping[str, Tensor]) -> None:
        over = {"y": tensors["x"].clone(), "sum": tensors["residual"].clone()}
        inputs = {**tensors, **over, "x": over["y"], "residual": over["sum"]}
        variant_runner(op_spec(problem.op), variant)(problem, inputs)
        for name, written in over.items():
            tensors[name].copy_(written)

    return run


def placed_runner(variant: Variant, apart: Mapping[str, int], shift: int = 0) -> Runner:
    """Runs a variant on copies of its tensors that lie `shift` elements behind an aligned address; the rows of
    inputs are `apart` elements further apart than N, with NaN between them."""

    def poisoned(_: str, scratch: Scratch) -> Tensor:
        fill = 0.0 if scratch.zero else math.nan
        return torch.full(scratch.shape, fill, dtype=DTYPES[scratch.dtype], device=variant.device)

    def placed(name: str, tensor: Tensor) -> Tensor:
        width = tensor.shape[-1]
        rows, row = tensor.numel() // width, width + apart.get(name, 0)
        buffer = torch.full((shift + rows * row,), math.nan, dtype=tensor.dtype, device=tensor.device)
        view = buffer[shift:].view(rows, row)[:, :width]
        view.copy_(tensor.view(rows, width))
        return view.view(width) if tensor.ndim == 1 else view

    def run(problem: Problem, tensors: Mapping[str, Tensor]) -> None:
        spec = op_spec(problem.op)
        moved = {name: placed(name, tensor) for name, tensor in tensors.items()}
        strides = {f"{name}_row_stride": problem.hidden + more for name, more in apart.items()}
        pointers = {f"{name}_ptr": tensor for name, tensor in moved.items()}
        variant(problem.rows, {**pointers, **spec.scalars(problem), **strides}, poisoned)
        for name, tensor in spec.tensors(problem).items():
            if tensor.role == "output" and name in tensors:
                tensors[name].copy_(moved[name])

    return run
