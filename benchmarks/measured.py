"""What sweeps have measured, read back from their databases or from an excerpt of them in JSON Lines.

    python benchmarks/measured.py tune.db [more.db ...] --only "forward 4096x4096 bf16" --out excerpt.jsonl

writes an excerpt: a line that says on what it was measured, then a line for each timed candidate of the named problems.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, NamedTuple

from tunegen.model import Config, Plan, Problem, Resources, Silicon
from tunegen.ops import op_spec
from tunegen.plans import load, make_plan
from tunegen.render import renderings
from tunegen.spec import OpSpec
from tunegen.store import Store

DISTURBED = 1.1
"""Times the sentinel's usual time at a problem, beyond which something else had the GPU, if that is rare there."""
RARE = 0.05
"""Share of a problem's candidates; where more are slower, the sentinel has two levels, as small ones have."""

_PROBLEM = {field.name: field.type for field in fields(Problem)}


class Candidate(NamedTuple):
    """A config that a sweep screened: what the compiler spent, time over the sentinel's time."""

    problem: Problem
    config: Config
    kind: str
    resources: Resources
    score: float


def read(paths: Iterable[Path]) -> dict[Problem, list[Candidate]]:
    """Timed candidates with a template, by problem. One measured more than once has the median of its scores; one that
    was timed while something else had the GPU is left out."""
    found: dict[tuple[Problem, Config], list[Candidate]] = {}
    for path in paths:
        for row in _lines(path) if path.suffix == ".jsonl" else _calm(list(_screened(path))):
            candidate = _candidate(row)
            found.setdefault((candidate.problem, candidate.config), []).append(candidate)
    problems: dict[Problem, list[Candidate]] = {}
    for (problem, _), same in found.items():
        score = statistics.median(c.score for c in same)
        problems.setdefault(problem, []).append(same[-1]._replace(score=score))
    return problems


def line(candidate: Candidate) -> str:
    """One line of an excerpt; fields of the problem that have their usual value are left out."""
    usual = asdict(Problem("", "", 0, 0))
    problem = {name: value for name, value in asdict(candidate.problem).items() if value != usual[name]}
    spent = candidate.resources
    return json.dumps(
        {
            **problem,
            "family": candidate.config.family,
            "parameters": dict(candidate.config.parameters),
            "kind": candidate.kind,
            "registers": spent.registers,
            "spill_bytes": spent.spill_bytes,
            "shared_bytes": spent.shared_bytes,
            "score": round(candidate.score, 4),
        }
    )


def excerpt(paths: Sequence[Path], labels: Sequence[str]) -> list[str]:
    """Lines of an excerpt: the problems with these labels."""
    about = set()
    for path in paths:
        with Store.read(path) as store:
            about |= {f"{r['silicon']}, Triton {r['triton']}, torch {r['torch']}" for r in store.trials(stage="screen")}
    chosen = [c for problem, found in read(paths).items() if problem.label() in labels for c in found]
    return [json.dumps({"about": "; ".join(sorted(about))}), *map(line, chosen)]


def plan_of(spec: OpSpec, candidate: Candidate, silicon: Silicon) -> Plan:
    """What the candidate launches, by today's template; nothing is compiled."""
    problem, config = candidate.problem, candidate.config
    source, *_ = renderings(problem, config, spec)
    return make_plan(load(source), config, problem.hidden, problem.rows, silicon.sms)


def spec_of(problem: Problem) -> OpSpec:
    """The op of a problem."""
    return op_spec(problem.op)


def _lines(path: Path) -> Iterator[Mapping[str, Any]]:
    for text in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(text)
        if "about" not in row:  # the first line says on what, and with which versions, it was measured
            yield row | {"parameters": json.dumps(row["parameters"])}


def _screened(path: Path) -> Iterator[Mapping[str, Any]]:
    with Store.read(path) as store:
        for row in store.trials(stage="screen", state="ok"):
            if row["shared_bytes"] is not None and row["score"] is not None:
                yield row


def _calm(rows: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """All but the few rows whose sentinel took longer than at their problem, by the median over its candidates."""
    problems = [tuple(row[name] for name in _PROBLEM) for row in rows]
    times: dict[tuple[Any, ...], list[float]] = {}
    for problem, row in zip(problems, rows, strict=True):
        times.setdefault(problem, []).append(row["sentinel_us"])
    most = {problem: DISTURBED * statistics.median(found) for problem, found in times.items()}
    rare = {problem: sum(us > most[problem] for us in found) <= RARE * len(found) for problem, found in times.items()}
    for problem, row in zip(problems, rows, strict=True):
        if row["sentinel_us"] <= most[problem] or not rare[problem]:
            yield row


def _candidate(row: Mapping[str, Any]) -> Candidate:
    values = {name: row[name] for name in _PROBLEM if name in row}
    values |= {
        name: bool(values[name]) for name in ("offset", "weight_grad", "residual", "sum_in_fp32") if name in values
    }
    problem = Problem(**values | {"weight_dtype": values.get("weight_dtype", "bf16") or None})
    resources = Resources(row["registers"], row["spill_bytes"], row["shared_bytes"])
    config = Config.of(row["family"], json.loads(row["parameters"]))
    return Candidate(problem, config, row["kind"], resources, row["score"])


def main() -> None:
    """Write an excerpt."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("databases", nargs="+", type=Path)
    parser.add_argument("--only", action="append", required=True, help="a problem's label; may be repeated")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.out.write_text("\n".join(excerpt(options.databases, options.only)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
