"""Implementations of RMSNorm side by side on one GPU: ours, torch's, and those of other libraries that are installed.

    python benchmarks/norms.py run --run first --out benchmarks/results/norms.csv --quick
    python benchmarks/norms.py run --run first --out benchmarks/results/norms.csv --cells 11-30
    python benchmarks/norms.py show benchmarks/results/norms.csv

A cell is (op, rows, hidden, direction, dtype); `cells` lists them. Each is measured in a process of its own by the
protocol of a sweep (`tunegen/bench.py`): all players are captured as graphs over the same rotated inputs and replayed
in interleaved blocks, their order rotated, in rounds on new buffers each; blocks whose sentinel moved count for nobody.
Ours is measured twice: what it differs from itself by is the band. Shares are of the speed of `copy_` by the bytes that
a call must move: forward 2 tensors, backward 3, with the addition 4. Backward is dx and dw; with the addition it starts
from the sum.

Outputs are held to the gate of a sweep at the cell's row count, under the contract that the player documents. If ours
fails it the run ends. A rival that fails it is timed and marked; see `WRONG` in `rivals/session.py`. What is not
installed, does not compile, does not take the width or exceeds its time has a line with the reason. A run appends to
its file, and goes on where it was when the command is given again.
"""

from __future__ import annotations

import argparse
import datetime
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from gpus import need_gpus
from rich.console import Console
from rivals.cells import CELLS, QUICK, Cell, chosen
from rivals.players import ANCHORS, COPY, OURS, PLAYERS, Player, playing
from rivals.rows import NOT_MEASURED, REFUSED, Row, Stamp, append, missing, read
from rivals.show import printed, written
from rivals.verdicts import contests
from rivals.watch import Found, measured

from tunegen.bench import FINAL_ROUNDS

Measure = Callable[[Cell, list[Player]], Found]


def main() -> None:
    """Run, list the cells, or show a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="what", required=True)
    run = commands.add_parser("run", help="measure, and append to a file")
    run.add_argument("--run", required=True, help="a name; the cells that it has in the file are not measured again")
    run.add_argument("--out", type=Path, required=True)
    run.add_argument("--cells", type=_chosen, default=CELLS, help="such as 1-10,14,8192x5120; all if left out")
    run.add_argument("--quick", action="store_true", help=f"the first {len(QUICK)} cells")
    run.add_argument("--players", type=lambda text: text.split(","), help="only these and ours")
    run.add_argument("--without", type=lambda text: text.split(","), default=[], help="not these")
    run.add_argument("--rounds", type=int, default=FINAL_ROUNDS)
    run.add_argument("--minutes", type=float, default=float("inf"), help="begin no cell after that")
    run.add_argument("--limit", type=float, default=1.0, help="a factor on every player's time limit")
    run.add_argument("--retry", action="store_true", help="once more what could not be measured")
    run.add_argument("--commit", default="", help="of this checkout; asked of git if left out")
    commands.add_parser("cells", help="number them")
    commands.add_parser("players", help="name them")
    show = commands.add_parser("show", help="tables and a picture of a file")
    show.add_argument("results", type=Path)
    show.add_argument("--run", help="only this one")
    given = parser.parse_args()
    {"run": _run, "cells": _cells, "players": _players, "show": _show}[given.what](given)


def _chosen(text: str) -> list[Cell]:
    try:
        return chosen(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _run(given: argparse.Namespace) -> None:
    cells = QUICK if given.quick else given.cells
    for cell in cells:
        playing(cell, [*(given.players or []), *given.without])  # a name that nobody has ends it before anything runs
    need_gpus()

    def measure(cell: Cell, players: list[Player]) -> Found:
        return measured(cell, players, given.rounds, limit=given.limit)

    stamp = Stamp(given.run, "", "", given.commit or _commit(), " ".join(["python", *sys.argv]))
    sys.exit(run(cells, stamp, given, measure))


def run(cells: list[Cell], stamp: Stamp, given: argparse.Namespace, measure: Measure) -> int:
    """The cells that the file lacks, one after the other; an exit code."""
    deadline = time.monotonic() + 60 * given.minutes
    retried = (NOT_MEASURED, REFUSED) if given.retry else ()
    for cell in cells:
        players = [player for player in playing(cell, given.players) if player.name not in given.without]
        lacking = missing(read(given.out), stamp.run, cell, [player.name for player in players], retried)
        if not lacking:
            continue
        if time.monotonic() > deadline:
            print("out of time; give the command again for the rest")
            return 0
        began = time.monotonic()
        found = measure(cell, [player for player in players if player.name in {*lacking, *ANCHORS}])
        if not found.facts:
            print(f"nothing can be measured here: {found.outcomes[0].note}", file=sys.stderr)
            return 1
        append(given.out, _lines(cell, stamp, found))
        print(f"{cell.label()}: {_told(found)}, {time.monotonic() - began:.0f} s", flush=True)
        if refused := [one for one in found.outcomes if one.player == OURS and one.state == REFUSED]:
            print(f"ours fails the gate, so that the run ends: {refused[0].note}", file=sys.stderr)
            return 1
    return 0


def _lines(cell: Cell, stamp: Stamp, found: Found) -> list[Row]:
    now = datetime.datetime.now(datetime.timezone.utc)
    values = {**vars(stamp), "session": now.strftime("%Y%m%dT%H%M%S.%f"), "date": now.isoformat(timespec="minutes")}
    whole = Stamp(**{**values, **found.facts})
    return [Row(whole, cell, outcome) for outcome in found.outcomes]


def _told(found: Found) -> str:
    without = [one.player for one in found.outcomes if not one.blocks]
    timed = [one for one in found.outcomes if one.blocks and one.player != COPY]
    return f"{len(timed)} players" + (f", not {', '.join(without)}" if without else "")


def _commit() -> str:
    """Empty where there is no git; with a mark where files are changed."""
    folder = Path(__file__).parent
    try:
        return subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=folder, capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def _cells(_: argparse.Namespace) -> None:
    for number, cell in enumerate(CELLS, 1):
        print(f"{number:3} {cell.label()}")


def _players(_: argparse.Namespace) -> None:
    for player in PLAYERS:
        print(f"{player.name:22}{player.package:20}{player.note}")


def _show(given: argparse.Namespace) -> None:
    rows = [row for row in read(given.results) if given.run in (None, row.stamp.run)]
    found = contests(rows)
    console = Console()
    if not found:
        sys.exit(f"{given.results} has no results")
    printed(console, found)
    for line in written(found, given.results):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
