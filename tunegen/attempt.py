"""One config, tried in seconds: the inner loop of someone who writes a template.

It goes through the same steps as a candidate of a sweep: render, compile, verify, time; nothing is stored. Values need
not be in the search space, and the template may be a file that the space does not know.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .domains import combinations
from .errors import RenderError, TunegenError
from .estimate import estimate_us
from .expressions import Rule, listed, show
from .model import Config, Problem, Resources, Silicon, Trial, TrialState, Value
from .needs import completed
from .ops import op_spec
from .plans import timed_plan
from .pool import CompilePool
from .render import SUFFIX
from .silicon import WARPS
from .space import Family, load_space, names_of
from .worker import Worker

ALLOWED = {"num_warps": WARPS, "num_ctas": (1, 2, 4, 8, 16)}
"""Of the hardware: a block has at most 1024 threads, a cluster at most 16 blocks."""


@dataclass(frozen=True)
class Attempt:
    """What became of a config. `outside` says why the search space does not have it, empty if it does; `trial` has
    state, reason, resources, error and times; `estimate_us` stands in for a time where no GPU is."""

    trial: Trial
    outside: str

    @property
    def ok(self) -> bool:
        """Whether every step that could be taken succeeded."""
        return self.trial.state is TrialState.OK

    @property
    def verified(self) -> bool:
        """Whether its values are right: without a GPU nobody knows."""
        return self.ok and self.trial.kind != "estimated"

    def facts(self) -> dict[str, Any]:
        """What people want to know, by names for people."""
        names = {
            "problem": "problem",
            "config": "config",
            "state": "state",
            "reason": "reason",
            "outside_of_the_search_space": "not in space",
            "registers": "registers",
            "spill_bytes": "spilled bytes",
            "shared_bytes": "shared bytes",
            "scratch_bytes": "scratch bytes",
            "error_ulp": "error, ulp",
            "us": "time, us",
            "tb_per_s": "TB/s",
            "share_of_copy": "share of copy",
            "estimate_us": "estimate, us",
        }
        values = self.as_json()
        return {name: values[key] for key, name in names.items() if values[key] not in (None, "")}

    def as_json(self) -> dict[str, Any]:
        """Plain values; None is what was not measured."""
        trial, spent = self.trial, self.trial.resources
        timed = trial.measurement
        moved = op_spec(trial.problem.op).bytes_moved(trial.problem)
        return {
            "problem": trial.problem.label(),
            "config": trial.config.label(),
            "state": "compiles" if self.ok and not self.verified else trial.state.value,
            "verified": self.verified,
            "timed": timed is not None,
            "reason": trial.reason,
            "outside_of_the_search_space": self.outside,
            "registers": spent.registers if spent else None,
            "spill_bytes": spent.spill_bytes if spent else None,
            "shared_bytes": spent.shared_bytes if spent else None,
            "scratch_bytes": trial.scratch_bytes,
            "error_ulp": trial.error_ulp,
            "us": timed.us if timed else None,
            "tb_per_s": moved / timed.us / 1e6 if timed else None,
            "share_of_copy": 1 / timed.score if timed else None,
            "estimate_us": trial.estimate_us,
        }


def attempt(problem: Problem, config: Config, silicon: Silicon, worker: Worker | None) -> Attempt:
    """Take `config` through the steps; without a `worker` nothing is verified or timed, but estimated for `silicon`."""
    alone = config.family.endswith(SUFFIX)
    outside = "a template file" if alone else load_space(problem.op).check(problem, silicon, config) or ""
    with CompilePool(silicon, workers=1) as pool:
        ((_, outcome),) = pool.compile(problem, [config])
    if not isinstance(outcome, Resources):
        state, reason = outcome
        return Attempt(Trial(problem, config, state, reason=reason), outside)
    if worker is not None:
        worker.open(problem)
        return Attempt(worker.screen(config, outcome), outside)
    spec = op_spec(problem.op)
    plan = timed_plan(spec, problem, config, silicon)
    us = estimate_us(spec, problem, config, plan, outcome, silicon)
    scratch = plan.scratch_bytes()
    trial = Trial(
        problem, config, TrialState.OK, kind="estimated", resources=outcome, scratch_bytes=scratch, estimate_us=us
    )
    return Attempt(trial, outside)


def config_of(problem: Problem, family_name: str, given: Mapping[str, Value], silicon: Silicon) -> Config:
    """The config of a family of the search space, or of a template file, with the values that are given.

    What is not given is taken from the built-in default if that is of this family, else from the first valid config
    that has the given values. A file has what is given, and what it needs and families compute (see `needs`); its
    kernels have 4 warps if nothing is said.

    Raises TunegenError for an unknown family, file or parameter, for a value that no kernel can have, and for a file
    that needs more than is given.
    """
    _check_launch_options(given)
    if family_name.endswith(SUFFIX):
        return _config_of_file(problem, Path(family_name).absolute(), given, silicon)
    space = load_space(problem.op)
    family = space.family(problem.direction, family_name)
    if family is None:
        raise TunegenError(f"{space.unknown(problem.direction, family_name)}, or a path that ends in {SUFFIX}")
    if unknown := sorted(given.keys() - family.parameters.keys()):
        raise TunegenError(f"{family_name} has no parameter {unknown[0]!r}; it has {listed(family.parameters)}")
    _check_kinds(family, given)
    default = space.default(problem, silicon)
    return _completed(family, given, default, names_of(problem, silicon))


def _check_launch_options(given: Mapping[str, Value]) -> None:
    for name, allowed in ALLOWED.items():
        if name in given and given[name] not in allowed:
            raise TunegenError(f"{name} is {show(given[name])}, but a kernel may have {listed(allowed)}")


def _check_kinds(family: Family, given: Mapping[str, Value]) -> None:
    """Numbers may be any that fit a kernel, words only those that the template knows."""
    for name, value in given.items():
        domain = family.parameters[name]
        if not isinstance(domain, Rule) and isinstance(domain[0], str):
            if value not in domain:
                raise TunegenError(f"{name} of {family.name} is {show(value)}, but may be {listed(domain)}")
        elif not isinstance(value, int) or not 1 <= value < 2**31:
            raise TunegenError(
                f"{name} of {family.name} is {show(value)}, but must be an integer from 1 to {2**31 - 1}"
            )


def _config_of_file(problem: Problem, path: Path, given: Mapping[str, Value], silicon: Silicon) -> Config:
    """With what it is given alone, where it does not render: that is told as what becomes of the config."""
    if not path.is_file():
        raise TunegenError(f"no template file {path}")
    try:
        return completed(problem, path, given, silicon)
    except RenderError:
        return Config.of(str(path), given)


def _completed(
    family: Family, given: Mapping[str, Value], default: Config | None, names: Mapping[str, Value]
) -> Config:
    start = dict(default.parameters) if default is not None and default.family == family.name else {}
    chosen = {**{k: v for k, v in start.items() if not isinstance(family.parameters[k], Rule)}, **given}
    for values in (chosen, given):  # the rest of the default need not go with what is given
        domains = {**family.parameters, **_single(values)}
        if found := next(family.configs(domains, names), None):
            return found
    # Outside of the space: computed parameters follow all the same. The most warps, since one warp for a wide row
    # takes minutes to compile.
    points = [Config.of(family.name, p) for p in combinations({**family.parameters, **_single(chosen)}, names)]
    within = (config for config in points if family.objection(dict(config.parameters), names) is None)
    return next(within, max(points, key=lambda config: config.num_warps))


def _single(values: Mapping[str, Value]) -> dict[str, tuple[Value, ...]]:
    return {name: (value,) for name, value in values.items()}
