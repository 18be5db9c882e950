"""A guided sweep held against one that measures every candidate of a wider search space (`wide_space/`).

    python benchmarks/exhaustive.py --hidden 4096 --rows 16384 --folder /tmp/exhaustive --out exhaustive.json

For each problem: a sweep with no limit, a guided one in a database of its own with SHARE of the candidates, and how far
the guided winner is from the best: in their finals, and by the unlimited sweep's own screening. Then searches are
replayed on what was measured (`search.py`: random, file, model, near, with ten seeds), and the cost model is ranked
against it (`cost_model.py`). The databases stay in the folder: the same command goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import cost_model
import search
from gpus import need_gpus
from measured import Candidate, read
from sweeping import MakeWorker, add_problems, finals_of, first_gpu, problems_of, record, score, sweep, winner, write

from tunegen import paths
from tunegen.model import Config, Problem, Silicon
from tunegen.pool import Compile, compile_candidate
from tunegen.space import load_space
from tunegen.store import Store
from tunegen.sweep import SweepResult

SHARE = 0.15
"""Of the candidates, for the guided sweep."""
WIDE = Path(__file__).parent / "wide_space"
NO_LIMIT = 10**6


def use_space(folder: Path) -> None:
    """Have this process read search spaces in `folder`; the others read templates only."""
    usual = paths.resource
    paths.resource = lambda name: folder if name == "search_spaces" else usual(name)


def size_of(problem: Problem, silicon: Silicon) -> int:
    """Valid candidates, baselines included."""
    space = load_space(problem.op)
    return sum(len(space.candidates(problem, silicon, f.name)) for f in space.families(problem, silicon))


def states(db: Path, problem: Problem) -> dict[str, int]:
    """What became of a problem's candidates."""
    size = {"hidden": problem.hidden, "rows": problem.rows, "direction": problem.direction}
    with Store.read(db) as store:
        return dict(Counter(row["state"] for row in store.trials(stage="screen", **size) if row["family"] != "torch"))


def compared(
    problem: Problem, whole: SweepResult, guided: SweepResult, screened: Sequence[Candidate]
) -> dict[str, Any]:
    """The guided winner beside the best of all. `score_ratio_of_finals` is of two processes' scores, each with buffers
    of its own; `score_ratio_in_one_database` is of scores in the unlimited sweep, where both were timed by one."""
    all_finals, guided_finals = finals_of(whole, problem), finals_of(guided, problem)
    best, won = winner(all_finals), winner(guided_finals)
    by_config: dict[Config, float] = {t.config: score(t) for t in all_finals}
    for candidate in screened:
        by_config.setdefault(candidate.config, candidate.score)
    same = by_config.get(won.config, math.nan) / score(all_finals[0])
    return {
        "best": best.config.label(),
        "best_us": best.measurement and best.measurement.us,
        "fastest_us": all_finals[0].measurement and all_finals[0].measurement.us,
        "guided": won.config.label(),
        "guided_us": won.measurement and won.measurement.us,
        "same_or_tied": won.config in {t.config for t in all_finals if t.tied or t is best},
        "score_ratio_of_finals": round(score(won) / score(all_finals[0]), 4),
        "score_ratio_in_one_database": round(same, 4),
        "band": best.band,
    }


def measure(
    folder: Path,
    problem: Problem,
    seeds: int,
    make_worker: MakeWorker = first_gpu,
    compile_one: Compile = compile_candidate,
) -> dict[str, Any]:
    """One problem: both sweeps, the comparison, the replays."""
    place = folder / problem.label().replace(" ", "_")
    place.mkdir(parents=True, exist_ok=True)
    whole, whole_seconds = sweep(place / "all.db", [problem], NO_LIMIT, 0, make_worker, compile_one)
    silicon = whole.silicon
    size = size_of(problem, silicon)
    budget = max(1, int(SHARE * size))
    guided, guided_seconds = sweep(place / "guided.db", [problem], budget, 1, make_worker, compile_one)
    measured = read([place / "all.db"])
    replays = search.row_of(problem, measured[problem], search.replayed(measured, problem, silicon, seeds))
    groups = {blind: cost_model.figures(measured[problem], silicon, blind == "before compiling") for blind in BLIND}
    return {
        "problem": problem.label(),
        "versions": whole.versions,
        "candidates": size,
        "states": states(place / "all.db", problem),
        "timed": len(measured[problem]),
        "budget_of_guided": budget,
        "seconds": {"all": round(whole_seconds, 1), "guided": round(guided_seconds, 1)},
        "spent": whole.seconds,
        **compared(problem, whole, guided, measured[problem]),
        "replays": replays,
        "cost_model": groups,
    }


BLIND = ("before compiling", "compiled")
"""What the cost model knows: without and with registers and shared memory."""


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Over all problems."""
    names = list(rows[0]["replays"]["share"])
    groups = {blind: [group for row in rows for group in row["cost_model"][blind]] for blind in BLIND}
    return {
        "problems": len(rows),
        "fewest_candidates": min(row["candidates"] for row in rows),
        "fewest_timed": min(row["timed"] for row in rows),
        "guided_within_1_percent": sum(row["score_ratio_in_one_database"] <= 1.01 for row in rows),
        "within_15_percent_of_the_space": {n: sum(r["replays"]["share"][n] <= SHARE for r in rows) for n in names},
        "cost_model": {blind: cost_model.summary(found) for blind, found in groups.items() if found},
    }


def main() -> None:
    """Sweep, compare, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_problems(parser, [4096], [16384])
    parser.add_argument("--folder", type=Path, required=True, help="for the databases")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    need_gpus()
    use_space(WIDE)
    rows: list[dict[str, Any]] = []
    for problem in problems_of(options):
        rows.append(measure(options.folder, problem, options.seeds))
        print({name: rows[-1][name] for name in ("problem", "candidates", "timed", "score_ratio_in_one_database")})
        write(options.out, record({"summary": summary(rows), "rows": rows}))
    print(summary(rows))


if __name__ == "__main__":
    main()
