"""How well the cost model ranks candidates that were measured.

    python benchmarks/cost_model.py tune.db [more.db ...] [--arch sm_90] [--blind] [--out figures.json]

Reads what sweeps on that GPU stored. For every problem and family with at least ten timed candidates that the search
space still has: Spearman's rank correlation of estimate and time, and how many of the five fastest stand in the
model's first fifth (at least five places). `--blind` withholds what the compiler spent: that is how the sampler orders
candidates before it compiles.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from measured import Candidate, plan_of, read, spec_of

from tunegen.estimate import estimate_us
from tunegen.model import Silicon
from tunegen.silicon import of_arch
from tunegen.space import load_space

SMALLEST_GROUP = 10
TOP = 5
TOP_SHARE = 0.2


def ranks(values: Sequence[float]) -> list[float]:
    """Ranks from 0; equal values share their mean rank."""
    ordered = sorted(values)
    return [(ordered.index(v) + len(ordered) - 1 - ordered[::-1].index(v)) / 2 for v in values]


def spearman(one: Sequence[float], other: Sequence[float]) -> float:
    """Correlation of the ranks; 0 where one side is a single tie."""
    a, b = ranks(one), ranks(other)
    if len(set(a)) == 1 or len(set(b)) == 1:
        return 0.0
    return statistics.correlation(a, b)


def top_share(estimates: Sequence[float], times: Sequence[float]) -> float:
    """How many of the TOP fastest are in the model's first TOP_SHARE; of a tie, as many as chance would put there."""
    places = max(TOP, round(TOP_SHARE * len(times)))
    fastest = sorted(range(len(times)), key=lambda i: times[i])[:TOP]
    better = [sum(e < estimates[i] for e in estimates) for i in fastest]
    tied = [estimates.count(estimates[i]) for i in fastest]
    return sum(min(max(places - b, 0) / t, 1.0) for b, t in zip(better, tied, strict=True)) / TOP


def offered(candidate: Candidate, silicon: Silicon) -> bool:
    """Whether the search space has it today."""
    problem, config = candidate.problem, candidate.config
    return load_space(problem.op).check(problem, silicon, config) is None


def figures(candidates: Sequence[Candidate], silicon: Silicon, blind: bool) -> list[dict[str, Any]]:
    """One row a family of one problem."""
    rows = []
    for family in sorted({c.config.family for c in candidates}):
        group = [c for c in candidates if c.config.family == family]
        if len(group) < SMALLEST_GROUP:
            continue
        estimates = [estimated(c, silicon, blind) for c in group]
        times = [c.score for c in group]
        rows.append(
            {
                "problem": group[0].problem.label(),
                "hidden": group[0].problem.hidden,
                "family": family,
                "candidates": len(group),
                "spearman": round(spearman(estimates, times), 3),
                "top": round(top_share(estimates, times), 3),
            }
        )
    return rows


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Over groups."""
    spearmans, tops = [row["spearman"] for row in rows], [row["top"] for row in rows]
    return {
        "groups": len(rows),
        "median spearman": round(statistics.median(spearmans), 3),
        "median top": round(statistics.median(tops), 3),
        "mean top": round(statistics.mean(tops), 3),
    }


def estimated(candidate: Candidate, silicon: Silicon, blind: bool = False) -> float:
    """Microseconds by the model."""
    spec = spec_of(candidate.problem)
    plan = plan_of(spec, candidate, silicon)
    resources = None if blind else candidate.resources
    return estimate_us(spec, candidate.problem, candidate.config, plan, resources, silicon)


def main() -> None:
    """Print the table and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("databases", nargs="+", type=Path, help="tune.db files, or excerpts in JSON Lines")
    parser.add_argument("--arch", default="sm_90", help="the GPU that they were measured on")
    parser.add_argument("--blind", action="store_true", help="without registers and shared memory")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    options = parser.parse_args()
    silicon = of_arch(options.arch)
    rows = [
        row
        for group in read(options.databases).values()
        for row in figures([c for c in group if offered(c, silicon)], silicon, options.blind)
    ]
    for row in rows:
        print(f"{row['problem']:34} {row['family']:20} {row['candidates']:4} {row['spearman']:7.3f} {row['top']:5.2f}")
    summaries = {"all": summary(rows)}
    for width in sorted({row["hidden"] for row in rows}):
        summaries[f"N = {width}"] = summary([row for row in rows if row["hidden"] == width])
    for name, found in summaries.items():
        print(f"{name}: {', '.join(f'{key} {value}' for key, value in found.items())}")
    if options.out:
        found = {"gpu": silicon.name, "blind": options.blind, "summaries": summaries, "groups": rows}
        options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
