"""The file that runs append to: one line of CSV for each player of each cell."""

from __future__ import annotations

import csv
import io
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from .cells import Cell

OK, NOT_MEASURED, REFUSED = "ok", "not measured", "refused"


@dataclass(frozen=True)
class Outcome:
    """What became of one player of a cell. `state` is OK with times in `blocks` (microseconds, block by block, those of
    all players of a session side by side), else `note` has the reason. `gate` says whether the strict gate was passed
    under `contract`, `error_ulp` the largest error there."""

    player: str
    state: str
    version: str = ""
    contract: str = ""
    gate: str = ""
    error_ulp: float | None = None
    note: str = ""
    blocks: tuple[float, ...] = ()


@dataclass(frozen=True)
class Stamp:
    """What a run and a session have in common; a session is one process that measured players of a cell side by
    side."""

    run: str
    session: str
    date: str
    commit: str
    command: str
    gpu: str = ""
    driver: str = ""
    torch: str = ""
    triton: str = ""


@dataclass(frozen=True)
class Row:
    """A line."""

    stamp: Stamp
    cell: Cell
    outcome: Outcome


FIELDS = [
    *(field.name for field in fields(Stamp)),
    *Cell._fields,
    *(field.name for field in fields(Outcome)),
]


def read(path: Path) -> list[Row]:
    """All whole lines. A line that is cut off, as by a full disk or a killed process, is left out."""
    found = []
    for line in csv.DictReader(_whole(path).decode().splitlines()):
        try:
            found.append(_row(line))
        except (TypeError, ValueError, KeyError):
            continue
    return found


def _whole(path: Path) -> bytes:
    """The file up to its last end of a line."""
    found = path.read_bytes() if path.exists() else b""
    return found[: found.rfind(b"\n") + 1]


def _row(line: dict[str, str]) -> Row:
    if None in line or None in line.values():
        raise ValueError("a field too few or too many")
    stamp = Stamp(**{field.name: line[field.name] for field in fields(Stamp)})
    cell = Cell(line["op"], int(line["rows"]), int(line["hidden"]), line["direction"], line["dtype"])
    outcome = Outcome(
        **{name: line[name] for name in ("player", "state", "version", "contract", "gate", "note")},
        error_ulp=float(line["error_ulp"]) if line["error_ulp"] else None,
        blocks=tuple(map(float, line["blocks"].split())),
    )
    if (outcome.state == OK) != bool(outcome.blocks):
        raise ValueError("times and state disagree")
    return Row(stamp, cell, outcome)


def append(path: Path, rows: Iterable[Row]) -> None:
    """Write lines at the end, all at once, in place of one that was cut off there."""
    text = io.StringIO()
    writer = csv.DictWriter(text, FIELDS, lineterminator="\n")
    whole = len(_whole(path))
    if not whole:
        writer.writeheader()
    for row in rows:
        outcome = asdict(row.outcome)
        outcome["note"] = " ".join(row.outcome.note.split())
        outcome["blocks"] = " ".join(f"{us:.5g}" for us in row.outcome.blocks)
        writer.writerow({**asdict(row.stamp), **row.cell._asdict(), **outcome})
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.truncate(whole)
        file.write(text.getvalue().encode())


def missing(rows: Iterable[Row], run: str, cell: Cell, names: Iterable[str], retry: Collection[str] = ()) -> list[str]:
    """Those of `names` that the run has no line for in this cell. With `retry`, a line in one of these states does not
    count."""
    there = {
        row.outcome.player
        for row in rows
        if row.stamp.run == run and row.cell == cell and row.outcome.state not in retry
    }
    return [name for name in names if name not in there]
