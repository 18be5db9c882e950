"""How many trials a search needs, replayed against sweeps that tried everything.

    python benchmarks/search.py tune.db [more.db ...] [--arch sm_90] [--seeds 10] [--out figures.json]

A trial looks its score up in what was measured. Counted are trials until one is within 2 % of the best. Searches,
over the same candidates, baselines included (they cost a trial and never win):

- random: uniform, nothing twice;
- file: the sampler without the model: the default, a first share of each family, then the best family;
- model: the default and the model's ranks before anything is compiled;
- near: as `model`, with winners of other problems of the same databases that differ in rows and width only.

`model` and `near` draw lots only in families that are too large to be tried whole: with none, seeds agree.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from measured import Candidate, read

from tunegen.guide import Winner, carried, ranked
from tunegen.model import Config, Problem, Silicon
from tunegen.sampler import FamilySampler, Sampler
from tunegen.silicon import of_arch
from tunegen.space import load_space
from tunegen.sweep import BATCH

NEAR_ENOUGH = 1.02
Measured = Mapping[Problem, Sequence[Candidate]]


def trials_needed(order: Iterator[Config], scores: Mapping[Config, float], goal: float) -> int:
    """The place of the first config that scores `goal` or less."""
    return next(place for place, config in enumerate(order, 1) if scores[config] <= goal)


def asked(sampler: Sampler, scores: Mapping[Config, float]) -> Iterator[Config]:
    """Configs in the order of trials; as in a sweep, a batch is told one by one, and the next one is asked for before,
    so that it compiles meanwhile."""
    batch = sampler.ask(BATCH)
    while batch:
        following = sampler.ask(BATCH)
        for config in batch:
            yield config
            sampler.tell(config, scores[config])
        batch = following


def sampler_of(
    candidates: Sequence[Candidate], seed: int, leading: Sequence[Config], ranks: Mapping[Config, float]
) -> Sampler:
    """A sampler over the measured candidates."""
    families = {}
    for name in dict.fromkeys(c.config.family for c in candidates):
        configs = [c.config for c in candidates if c.config.family == name]
        choices = {key: sorted({c[key] for c in configs}, key=str) for key, _ in configs[0].parameters}
        mine = [config for config in leading if config.family == name]
        own = {config: ranks[config] for config in configs if config in ranks}
        families[name] = FamilySampler(configs, choices, seed, mine, None, own)
    return Sampler(families, len(candidates))


def shuffled(configs: Sequence[Config], seed: int) -> Iterator[Config]:
    """Random search."""
    return iter(random.Random(seed).sample(list(configs), len(configs)))


def winners(measured: Measured, problem: Problem) -> list[Winner]:
    """The best of every problem that differs in size only, this one left out."""
    alike = [p for p in measured if p != problem and replace(p, rows=problem.rows, hidden=problem.hidden) == problem]
    best = {p: min((c for c in measured[p] if c.kind == "measured"), key=lambda c: c.score) for p in alike}
    return [Winner(p.rows, p.hidden, found.config) for p, found in best.items()]


def replayed(measured: Measured, problem: Problem, silicon: Silicon, seeds: int) -> dict[str, list[int]]:
    """Trials needed by each search, for each seed."""
    candidates = measured[problem]
    configs = [c.config for c in candidates]
    goal = NEAR_ENOUGH * min(c.score for c in candidates if c.kind == "measured")
    scores = {c.config: c.score for c in candidates}
    countable = {c.config: c.score if c.kind == "measured" else float("inf") for c in candidates}
    space = load_space(problem.op)
    default = [c for c in [space.default(problem, silicon)] if c is not None]
    near = carried(space, problem, silicon, winners(measured, problem))
    ranks = ranked(problem, configs, silicon)
    searches: dict[str, Callable[[int], Iterator[Config]]] = {
        "random": lambda seed: shuffled(configs, seed),
        "file": lambda seed: asked(sampler_of(candidates, seed, default, {}), scores),
        "model": lambda seed: asked(sampler_of(candidates, seed, default, ranks), scores),
        "near": lambda seed: asked(sampler_of(candidates, seed, [*near, *default], ranks), scores),
    }
    return {
        name: [trials_needed(order(seed), countable, goal) for seed in range(seeds)] for name, order in searches.items()
    }


def nine_of_ten(counts: Sequence[int]) -> int:
    """Enough for nine seeds of ten."""
    return sorted(counts)[-(-9 * len(counts) // 10) - 1]


def row_of(problem: Problem, candidates: Sequence[Candidate], found: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """One problem's figures: medians and nine of ten in trials, the latter as a share of the space."""
    return {
        "problem": problem.label(),
        "candidates": len(candidates),
        "median": {name: statistics.median(counts) for name, counts in found.items()},
        "nine_of_ten": {name: nine_of_ten(counts) for name, counts in found.items()},
        "share": {name: round(nine_of_ten(counts) / len(candidates), 3) for name, counts in found.items()},
    }


def main() -> None:
    """Print the table and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("databases", nargs="+", type=Path, help="tune.db files, or excerpts in JSON Lines")
    parser.add_argument("--arch", default="sm_90", help="the GPU that they were measured on")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    options = parser.parse_args()
    silicon, measured = of_arch(options.arch), read(options.databases)
    rows = [row_of(p, c, replayed(measured, p, silicon, options.seeds)) for p, c in measured.items()]
    names = list(rows[0]["median"])
    print(f"{'problem':32} {'size':>4} " + " ".join(f"{name:>14}" for name in names) + "   median / 9 of 10 (share)")
    for row in rows:
        cells = [f"{row['median'][n]:5.1f}/{row['nine_of_ten'][n]:3} {row['share'][n]:4.0%}" for n in names]
        print(f"{row['problem']:32} {row['candidates']:4} " + " ".join(f"{cell:>14}" for cell in cells))
    shares = {name: statistics.median(row["share"][name] for row in rows) for name in names}
    within = {name: sum(row["share"][name] <= 0.15 for row in rows) for name in names}
    print(f"{'median share of the space':37} " + " ".join(f"{shares[n]:14.1%}" for n in names))
    print(f"{f'problems of {len(rows)} within 15 %':37} " + " ".join(f"{within[n]:14}" for n in names))
    if options.out:
        found = {"gpu": silicon.name, "seeds": options.seeds, "median_share": shares, "within_15": within, "rows": rows}
        options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
