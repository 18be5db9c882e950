"""The main job without a GPU: compile every candidate for a named target and rank it by the model; nothing is timed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from .child import installed_versions
from .dispatch import digest_today
from .errors import CompileError
from .estimate import estimate_us
from .model import Problem, Resources, Silicon, Trial, TrialState
from .ops import op_spec
from .plans import timed_plan
from .pool import CompilePool
from .space import load_space
from .store import Store
from .sweep import Context, Listener, sweep_row


def sweep_target(
    store: Store,
    problems: Sequence[Problem],
    silicon: Silicon,
    seed: int,
    listener: Listener,
    arguments: dict[str, Any],
    pool: CompilePool | None = None,
) -> list[Trial]:
    """Without a GPU: compile every candidate for `silicon`, in `pool` if one is given, and rank it by the model;
    nothing is timed."""
    versions = installed_versions()
    with sweep_row(store, silicon, arguments, versions, seed) as sweep_id, pool or CompilePool(silicon) as pool:
        pool.silicon = silicon
        context = Context(store, sweep_id, silicon, versions, pool, listener, seed, 0)
        return [context.save(trial) for problem in problems for trial in estimates(context, problem)]


def estimates(context: Context, problem: Problem) -> Iterator[Trial]:
    """A trial for each candidate of a problem: compiled and estimated, or failed with its reason."""
    space, spec, silicon = load_space(problem.op), op_spec(problem.op), context.silicon
    configs = [
        config
        for family in space.families(problem, silicon)
        for config in space.candidates(problem, silicon, family.name)
    ]
    none = "" if configs else ": 0 candidates: no family takes this problem"
    context.listener.stage(f"{problem.label()}{none}", len(configs))
    for config, outcome in context.pool.compile(problem, configs):
        digest = digest_today(problem, config)
        family = space.family(problem.direction, config.family)
        kind = "baseline" if family is not None and family.baseline else "estimated"
        trial = Trial(problem, config, TrialState.OK, digest=digest, kind=kind)
        if not isinstance(outcome, Resources):
            yield replace(trial, state=outcome[0], reason=outcome[1])
            continue
        try:
            plan = timed_plan(spec, problem, config, silicon)
        except CompileError as error:  # the pool has compiled it for another row count
            yield replace(trial, state=TrialState.COMPILE, reason=str(error), resources=outcome)
            continue
        us = estimate_us(spec, problem, config, plan, outcome, silicon)
        yield replace(trial, resources=outcome, scratch_bytes=plan.scratch_bytes(), estimate_us=us)
