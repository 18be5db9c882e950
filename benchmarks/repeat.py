"""Whether sweeps agree: the same problems swept several times, each time from nothing.

    python benchmarks/repeat.py --out repeat.json

Twenty problems, three sweeps, a new database and new processes for each; with a reduced budget of candidates a problem,
since each is swept three times. Two sweeps agree on a problem if they choose the same winner, or if one's winner is in
the other's set of ties. Told too: how wide those sets are, and how many they hold, where a call moves 60 MB or more.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpus import need_gpus
from sweeping import MakeWorker, add_problems, finals_of, first_gpu, problems_of, record, score, sweep, winner, write

from tunegen.model import Config, Problem, Trial
from tunegen.ops import op_spec
from tunegen.pool import Compile, compile_candidate
from tunegen.ties import LARGE

BUDGET = 32


def tied(finals: Sequence[Trial]) -> list[Trial]:
    """The set of ties, the winner at least."""
    return [t for t in finals if t.tied] or [winner(finals)]


def outcome(finals: Sequence[Trial]) -> dict[str, Any]:
    """One sweep's answer for a problem."""
    won, among = winner(finals), tied(finals)
    return {
        "winner": won.config.label(),
        "us": won.measurement and round(won.measurement.us, 3),
        "band": won.band,
        "tied": [t.config.label() for t in among],
        "width": round(max(map(score, among)) / min(map(score, among)) - 1, 5),
        "scores": {t.config.label(): round(score(t), 5) for t in finals},
    }


def agree(one: Sequence[Trial], other: Sequence[Trial]) -> bool:
    """The same winner, or each sweep's is in the other's set."""
    sets: list[set[Config]] = [{t.config for t in tied(finals)} for finals in (one, other)]
    first, second = winner(one).config, winner(other).config
    return first == second or (first in sets[1] and second in sets[0])


def row_of(problem: Problem, sweeps: Sequence[Sequence[Trial]]) -> dict[str, Any]:
    """One problem over all sweeps; one whose sweep left it out agrees with nothing."""
    moved = op_spec(problem.op).bytes_moved(problem)
    whole = all(sweeps)
    outcomes = [outcome(finals) for finals in sweeps if finals]
    return {
        "problem": problem.label(),
        "bytes": moved,
        "large": moved >= LARGE,
        "same_winner": whole and len({one["winner"] for one in outcomes}) == 1,
        "same_winner_or_tied": whole and all(agree(a, b) for a, b in itertools.combinations(sweeps, 2)),
        "sweeps": outcomes,
    }


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Over problems; widths and sizes over their sweeps."""
    large = [one for row in rows if row["large"] for one in row["sweeps"]]
    small = [one for row in rows if not row["large"] for one in row["sweeps"]]
    found: dict[str, Any] = {
        "problems": len(rows),
        "same_winner": sum(row["same_winner"] for row in rows),
        "same_winner_or_tied": sum(row["same_winner_or_tied"] for row in rows),
    }
    for name, outcomes in (("60 MB and more", large), ("below", small)):
        if outcomes:
            found[name] = {
                "widest": max(one["width"] for one in outcomes),
                "widest_band": max((one["band"] or 0.0) for one in outcomes),
                "median_size": statistics.median(len(one["tied"]) for one in outcomes),
            }
    return found


def measure(
    folder: Path,
    problems: Sequence[Problem],
    times: int,
    budget: int,
    make_worker: MakeWorker = first_gpu,
    compile_one: Compile = compile_candidate,
) -> dict[str, Any]:
    """All sweeps, one after the other: the same problem comes again minutes later."""
    sweeps = [sweep(folder / f"{i}.db", problems, budget, i, make_worker, compile_one) for i in range(times)]
    rows = [row_of(p, [finals_of(result, p) for result, _ in sweeps]) for p in problems]
    return {
        "measured_on": sweeps[0][0].versions,
        "budget": budget,
        "seconds": [round(seconds, 1) for _, seconds in sweeps],
        "summary": summary(rows),
        "rows": rows,
    }


def main() -> None:
    """Sweep, compare, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_problems(parser, [1024, 2048, 4096, 5120, 8192], [4096, 16384])
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--budget", type=int, default=BUDGET, help="candidates a problem")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    need_gpus()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), problems_of(options), options.times, options.budget)
    write(options.out, record(found))
    print(found["summary"], found["seconds"])


if __name__ == "__main__":
    main()
