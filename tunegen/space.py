"""Search spaces: `search_spaces/<op>.yaml`, checked with line numbers, and the configs that it allows for a problem."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import paths
from .domains import Domain, arranged, combinations
from .entries import CTAS, PARAMETER, WORD, Entry, read
from .errors import SearchSpaceError
from .expressions import Expression, Rule, listed, show
from .installed import triton_version
from .model import DTYPE_BYTES, Config, Problem, Silicon, Value
from .policies import FASTEST
from .silicon import WARPS


def names_of(problem: Problem, silicon: Silicon) -> dict[str, Value]:
    """What expressions may use. M is the bucket of the row count, so that all rows of a bucket see one space."""
    return {
        "N": problem.hidden,
        "M": problem.rows_bucket,
        "X_BYTES": DTYPE_BYTES[problem.x_dtype],
        "WEIGHT": problem.weight_dtype is not None,
        "WEIGHT_GRAD": problem.weight_grad,
        "DETERMINISTIC": problem.policy != FASTEST,
        "SMS": silicon.sms,
        "CAPABILITY": silicon.capability,
        "SHARED_LIMIT": silicon.shared_limit,
        "L2_BYTES": silicon.l2_bytes,
        "TRITON": triton_version(),
    }


MEANINGS = {
    "N": "hidden size",
    "M": "rows, rounded up to a power of two",
    "X_BYTES": "bytes of an element of x",
    "WEIGHT": "whether there is a weight",
    "WEIGHT_GRAD": "whether the weight's gradient is wanted",
    "DETERMINISTIC": "whether atomic additions are forbidden, as by --policy deterministic",
    "SMS": "multiprocessors of the GPU",
    "CAPABILITY": "the GPU's architecture, 90 for sm_90",
    "SHARED_LIMIT": "bytes of shared memory that a program may have",
    "L2_BYTES": "bytes of the GPU's L2 cache",
    "TRITON": "the release of Triton, 306 for 3.6",
}
"""What `names_of` gives, in words."""
NAMES = frozenset(names_of(Problem("", "", 1, 1), Silicon("", 0, 1, 0, 0, 0, 0)))
ALWAYS = Rule(Expression("True"), "")
LAUNCHABLE = Rule(Expression(f"num_warps in {list(WARPS)}"), "")
"""What every family needs that computes its warps; listed ones are checked where they stand."""
CLUSTERS = Rule(Expression(f"num_ctas == 1 or num_ctas in {list(CTAS)} and CAPABILITY >= 90"), "")
"""What every family with clusters needs."""


@dataclass(frozen=True, eq=False)
class Family:
    """One algorithm: its parameters (computed ones last, each after those it needs) and what they must satisfy."""

    name: str
    direction: str
    about: str
    baseline: bool
    when: Rule
    parameters: Mapping[str, Domain]
    constraints: tuple[Rule, ...]

    @property
    def template(self) -> str:
        """Name of the template's file, without its ending."""
        return f"{self.direction}_{self.name}"

    def objection(self, point: Mapping[str, object], names: Mapping[str, Value]) -> str | None:
        """Why `point` is no config of this family, in one sentence; `point` may hold anything at all."""
        if absent := [name for name in self.parameters if name not in point]:
            return f"{self.name} lacks its parameter {absent[0]}"
        if unknown := [name for name in point if name not in self.parameters]:
            return f"{self.name} has no parameter {show(unknown[0])}; it has {listed(self.parameters)}"
        scope = dict(names)
        for name, domain in self.parameters.items():
            value, allowed = point[name], (domain.value(scope),) if isinstance(domain, Rule) else domain
            if not (type(value) is int or type(value) is str) or value not in allowed:
                return f"{self.name}: {name} is {show(value)}, but may be {listed(allowed)}"
            scope[name] = value
        return next((f"{self.name} needs {r.expression.text}" for r in self.constraints if not r.holds(scope)), None)

    def configs(self, domains: Mapping[str, Domain], names: Mapping[str, Value]) -> Iterator[Config]:
        """The valid ones among all combinations of `domains`, in the order of the file."""
        for point in combinations(domains, names, self.constraints) if self.when.holds(names) else ():
            if self.objection(point, names) is None:
                yield Config.of(self.name, point)


Default = tuple[Rule, Family, Mapping[str, Domain]]
"""A choice for problems that nobody has tuned: when, the family, one value for each of its parameters."""


@dataclass(frozen=True, eq=False)
class SearchSpace:
    """All families of one op and its defaults. Methods that take a family's name refuse an unknown one."""

    op: str
    path: Path
    members: Mapping[tuple[str, str], Family]
    defaults: Mapping[tuple[str, str], Sequence[Default]]

    def family(self, direction: str, name: str) -> Family | None:
        """The family of that name, whatever the problem."""
        return self.members.get((direction, name))

    def families(self, problem: Problem, silicon: Silicon) -> list[Family]:
        """Those meant for the problem, baselines included, in the order of the file."""
        names = names_of(problem, silicon)
        return [f for f in self.members.values() if f.direction == problem.direction and f.when.holds(names)]

    def candidates(
        self, problem: Problem, silicon: Silicon, family_name: str, chosen: Mapping[str, Value] | None = None
    ) -> list[Config]:
        """All valid configs in the order of the file; with `chosen` those that agree with it, computed values aside."""
        family = self._named(problem, family_name)
        free = {k: v for k, v in (chosen or {}).items() if not isinstance(family.parameters.get(k), Rule)}
        found = family.configs(family.parameters, names_of(problem, silicon))
        return [config for config in found if free.items() <= dict(config.parameters).items()]

    def product_size(self, problem: Problem, silicon: Silicon, family_name: str) -> int:
        """How many points there are before constraints."""
        choices = self.choices(problem, silicon, family_name)
        return math.prod(map(len, choices.values())) if choices else 0

    def choices(self, problem: Problem, silicon: Silicon, family_name: str) -> dict[str, list[Value]]:
        """What a sampler may pick from; `candidates` fills in parameters that are computed from others, absent here."""
        family, names = self._named(problem, family_name), names_of(problem, silicon)
        return {
            name: [domain.value(names)] if isinstance(domain, Rule) else list(domain)
            for name, domain in (family.parameters.items() if family.when.holds(names) else ())
            if not isinstance(domain, Rule) or domain.expression.names <= names.keys()
        }

    def check(self, problem: Problem, silicon: Silicon, config: Config) -> str | None:
        """None for a valid config, else one sentence. Nothing is assumed of the values: they come from a database."""
        if not isinstance(config.family, str) or not (family := self.family(problem.direction, config.family)):
            return f"no {problem.direction} family is called {show(config.family)}"
        names = names_of(problem, silicon)
        if not family.when.holds(names):
            return f"{family.name} is only for {family.when.expression.text}"
        try:
            point = dict(config.parameters)
        except (TypeError, ValueError):
            return f"{family.name}: the parameters are no pairs of name and value"
        if len(point) != len(config.parameters):
            return f"{family.name}: a parameter is given twice"
        return family.objection(point, names)

    def default(self, problem: Problem, silicon: Silicon) -> Config | None:
        """What is launched untuned; None where nothing fits."""
        return next(self.built_in(problem, silicon), None)

    def built_in(self, problem: Problem, silicon: Silicon) -> Iterator[Config]:
        """The first default of this capability that applies and is valid, then that of `any`, if it is another one."""
        names = names_of(problem, silicon)
        given: Config | None = None
        for target in (f"sm{silicon.capability}", "any"):
            for when, family, domains in self.defaults.get((problem.direction, target), ()):
                if when.holds(names) and (found := next(family.configs(domains, names), None)):
                    if found != given:
                        yield found
                    given = found
                    break

    def _named(self, problem: Problem, name: str) -> Family:
        if family := self.family(problem.direction, name):
            return family
        raise SearchSpaceError(f"{self.path}: {self.unknown(problem.direction, name)}")

    def unknown(self, direction: str, name: str) -> str:
        """What to say of a family that is not there."""
        return f"no {direction} family {name!r}; there is {listed(n for d, n in self.members if d == direction)}"


def load_space(op: str, path: Path | None = None) -> SearchSpace:
    """The search space of an op, from `search_spaces/<op>.yaml` unless told otherwise; read again when it changes."""
    path = path or paths.resource("search_spaces") / f"{op}.yaml"
    try:
        return _load(op, path, path.stat().st_mtime_ns)
    except (OSError, UnicodeDecodeError) as error:
        raise SearchSpaceError(f"{path}: cannot be read as a search space: {error}") from None


@functools.lru_cache(maxsize=32)
def _load(op: str, path: Path, changed: int) -> SearchSpace:
    top = read(path).mapping("forward|backward|defaults")
    chosen = top.pop("defaults").mapping("forward|backward") if "defaults" in top else {}
    members = {(d, name): _family(d, name, entry) for d, e in top.items() for name, entry in e.mapping(WORD).items()}
    defaults = {
        (direction, target): [_default(direction, item, members) for item in entry.items()]
        for direction, section in chosen.items()
        for target, entry in section.mapping(r"any|sm\d{2,3}").items()
    }
    return SearchSpace(op, path, members, defaults)


def _family(direction: str, name: str, entry: Entry) -> Family:
    parts = entry.mapping("about|when|baseline|parameters|constraints", ("about", "parameters"))
    found = parts["parameters"].mapping(PARAMETER)
    if clash := NAMES.intersection(found):
        raise found[min(clash)].error("is the name of something else already")
    known = NAMES.union(found)
    domains = arranged({key: item.domain(known) for key, item in found.items()})
    constraints = [item.rule(known) for item in parts["constraints"].items()] if "constraints" in parts else []
    computed = [LAUNCHABLE] if isinstance(domains.get("num_warps"), Rule) else []
    computed += [CLUSTERS] if "num_ctas" in domains else []
    return Family(
        name=name,
        direction=direction,
        about=parts["about"].scalar("str", ".+", "one line for people"),
        baseline="baseline" in parts and parts["baseline"].scalar("bool", "true|false", "true or false") == "true",
        when=parts["when"].rule(NAMES) if "when" in parts else ALWAYS,
        parameters=domains,
        constraints=(*computed, *constraints),
    )


def _default(direction: str, entry: Entry, members: Mapping[tuple[str, str], Family]) -> Default:
    parts = entry.mapping(f"when|family|{PARAMETER}", ("family",))
    chosen = parts.pop("family")
    family = members.get((direction, chosen.scalar("str", WORD, "the name of a family")))
    if family is None or family.baseline:
        raise chosen.error(f"is no family of {direction} that may be dispatched")
    when = parts.pop("when").rule(NAMES) if "when" in parts else ALWAYS
    domains = dict(family.parameters)
    for name, item in parts.items():
        if name not in domains:
            raise item.error(f"is no parameter of {family.name}; it has {listed(family.parameters)}")
        allowed, given = family.parameters[name], item.domain(NAMES.union(family.parameters))
        if not (isinstance(given, Rule) or isinstance(allowed, Rule) or {*given} <= {*allowed}):
            raise item.error(f"{listed(given)} is no choice of {family.name}, which has {listed(allowed)}")
        domains[name] = given
    if vague := [name for name, domain in domains.items() if not isinstance(domain, Rule) and len(domain) > 1]:
        raise entry.error(f"{family.name} needs one value of {vague[0]}: {listed(domains[vague[0]])}")
    return when, family, arranged(domains)
