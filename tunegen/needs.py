"""What a template file of no search space must be given: read from its text, computed where a family computes it."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from .compile import ALIGNED
from .errors import RenderError, TunegenError
from .expressions import Rule
from .model import Config, Problem, Silicon, Value
from .ops import op_spec
from .render import SUFFIX, renderings
from .space import load_space, names_of
from .syntax import parse

PLANS_OWN = {"M", "N", "SMS"}
"""What every plan is given."""


def completed(problem: Problem, path: Path, given: Mapping[str, Value], silicon: Silicon) -> Config:
    """The config of a template file: what is given, and what the file needs beside it and families of its direction
    compute, such as BLOCK_SIZE; the family whose name the file has comes first.

    Raises TunegenError for a number that its kernels never mention, as a slip of the pen would else go unnoticed, for
    one that the problem or the tensors say, and where the file needs more, with all that is missing and an example;
    RenderError where it does not render, whatever is given.
    """
    said = PLANS_OWN | op_spec(problem.op).constants(problem).keys() | {ALIGNED}
    if wrong := sorted(said & given.keys()):
        raise TunegenError(f"the problem and its tensors say what {wrong[0]} is; give {path.name} no value for it")
    filling = _Filling(_domains(problem, path), names_of(problem, silicon), dict(given))
    text = _rendered(problem, path, filling)
    for name in Config.of(str(path), given).numbers:
        if not re.search(rf"\b{re.escape(name)}\b", text):
            raise TunegenError(f"{path.name} does not use {name}; give only what its kernel or its plan names")
    filling.fill(_numbers(text) - said)
    if filling.missing:
        example = " ".join(f"{name}={value}" for name, value in filling.missing.items())
        raise TunegenError(f"{path.name} needs {', '.join(filling.missing)} too: give values, such as {example}")
    return Config.of(str(path), filling.values)


@dataclass
class _Filling:
    """`values` are given or computed, by `domains` (of each family, first that of the file's name) and the `names` of
    the problem; of what is `missing`, an example."""

    domains: list[Mapping[str, tuple[Value, ...] | Rule]]
    names: Mapping[str, Value]
    values: dict[str, Value]
    missing: dict[str, Value] = field(default_factory=dict)

    def fill(self, needed: set[str]) -> None:
        """Compute, or miss, each of `needed`."""
        follow = []
        for name in sorted(
            needed - self.values.keys() - self.missing.keys(), key=lambda name: self._follows(name, needed)
        ):
            rule = self._rule(name, needed)
            known = {**self.names, **self.values}
            if rule is None:
                self._miss(name)
            elif rule.expression.names <= known.keys():
                self.values[name] = rule.value(known)
            else:
                follow.append(name)
        if follow and not self.missing:  # from each other: SPLITS from BLOCK_SIZE in one family, else the reverse
            self._miss(min(follow, key=lambda name: sum(isinstance(d.get(name), Rule) for d in self.domains)))

    def _miss(self, name: str) -> None:
        found = [d[name] for d in self.domains if name in d]
        self.missing[name] = next((choices[0] for choices in found if not isinstance(choices, Rule)), 1)

    def _rule(self, name: str, needed: set[str]) -> Rule | None:
        """The one that uses most of what the file needs itself: BLOCK_SIZE of SPLITS where there are SPLITS. None where
        the family of the file's name has choices."""
        own = self.domains[0]
        if name in own and not isinstance(own[name], Rule):
            return None
        known = self.names.keys() | self.values.keys() | needed
        rules = [d[name] for d in self.domains if isinstance(d.get(name), Rule)]
        fit = [rule for rule in rules if isinstance(rule, Rule) and rule.expression.names <= known]
        return max(fit, key=lambda rule: len(rule.expression.names - self.names.keys()), default=None)

    def _follows(self, name: str, needed: set[str]) -> tuple[bool, str]:
        """Computed values come after those that they may be computed from."""
        return self._rule(name, needed) is not None, name


def _domains(problem: Problem, path: Path) -> list[Mapping[str, tuple[Value, ...] | Rule]]:
    """The parameters of each family of the direction, those of the one that the file is named after first, if any."""
    named = path.name.removesuffix(SUFFIX).removeprefix(f"{problem.direction}_")
    families = {
        f.name: f.parameters for f in load_space(problem.op).members.values() if f.direction == problem.direction
    }
    return [families.pop(named, {}), *families.values()]


def _rendered(problem: Problem, path: Path, filling: _Filling) -> str:
    """The text of the file, with an example of each word that is missing. Raises RenderError."""
    while True:
        config = Config.of(str(path), {**filling.values, **filling.missing})
        try:
            return renderings(problem, config, op_spec(problem.op))[0].text
        except RenderError as error:
            undefined = re.search(r"'([A-Z][A-Z0-9_]*)' is undefined", str(error))
            if undefined is None or undefined[1] in {**filling.values, **filling.missing}:
                raise
            filling.fill({undefined[1]})


def _numbers(text: str) -> set[str]:
    """The numbers that a rendered file asks its config for: attributes of the plan's argument, and constexprs of the
    kernels that the plan names, less those that it gives them itself."""
    functions = {node.name: node for node in parse(text).body if isinstance(node, ast.FunctionDef)}
    plan = functions.get("plan")
    if plan is None or not plan.args.args:
        return set()
    found, own, kernels = set[str](), set[str](), set[str]()
    for node in ast.walk(plan):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == plan.args.args[0].arg
        ):
            found.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            own.add(node.value)
        elif isinstance(node, ast.Name) and node.id in functions:
            kernels.add(node.id)
    for name in kernels:
        constexprs = (a for a in functions[name].args.args if a.annotation and "constexpr" in ast.unparse(a.annotation))
        found |= {argument.arg for argument in constexprs if argument.arg.isupper()} - own
    return found
