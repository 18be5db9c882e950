"""What `tunegen export` wrote, back into a database: checked whole before the first row is written.

What is in the database stays as it is. Trials are compared in groups: the finals of a problem are one group, since
which of them are tied was decided among them; any other trial is one by itself. A group of which the database has a
trial that the file has not, or has otherwise, is left out and named, so that no measurement is replaced, nor a winner
chosen among those of two. To prefer what a file says, import it first, into a new database.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from . import records
from .exported import Exported, read_export
from .exporting import Row
from .model import Silicon
from .store import Store

SKIPPED_SHOWN = 20


@dataclass
class Imported:
    """What became of a file's trials; `skipped` has a line for each group that was left out."""

    added: int = 0
    present: int = 0
    left_out: int = 0
    skipped: list[str] = field(default_factory=list)

    def sentence(self) -> str:
        """How many trials of each kind there were."""
        return f"{self.added} trials added, {self.present} were there already, {self.left_out} left out"

    def skipped_lines(self) -> list[str]:
        """What was left out and why, as many lines as one reads."""
        more = len(self.skipped) - SKIPPED_SHOWN
        return self.skipped[:SKIPPED_SHOWN] + ([f"and {more} more such groups"] if more > 0 else [])


def import_file(path: Path, db: Path) -> Imported:
    """Add a file's results to a database, which is made where there is none; all of them in one transaction.

    Raises ExportError for a file that is not as `tunegen export` wrote it, before the database is touched, and
    StoreError for a database that cannot be written.
    """
    exported = read_export(path)
    with Store.open(db) as store, store.writing() as connection:
        return _import(connection, exported)


def _import(connection: sqlite3.Connection, exported: Exported) -> Imported:
    chips = {row["id"]: _silicon(connection, row) for row in exported.silicon}
    sweeps: dict[int, int] = {}
    for row in exported.sweeps:
        chip = chips[row["silicon_id"]]
        sweeps[row["id"]] = _sweep(connection, {**row, "silicon_id": chip}, set(sweeps.values()))
    names = {row["id"]: row["name"] for row in exported.silicon}
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in exported.trials:
        of = records.SAME_PROBLEM if row["stage"] == "final" else records.KEY
        groups.setdefault(tuple(row[name] for name in of), []).append(row)
    found = Imported()
    for group in groups.values():
        name = names[group[0]["silicon_id"]]
        rows = [{**r, "silicon_id": chips[r["silicon_id"]], "sweep_id": sweeps[r["sweep_id"]]} for r in group]
        _group(connection, rows, name, found)
    return found


def _group(connection: sqlite3.Connection, group: Sequence[Row], gpu: str, found: Imported) -> None:
    """Add those of a group that are not there yet, unless the database knows otherwise."""
    of = records.SAME_PROBLEM if group[0]["stage"] == "final" else records.KEY
    here = {
        _content(row): row for row in _rows(connection, f"SELECT * FROM trials WHERE {records.equal(of)}", group[0])
    }
    ours = {_content(row): row for row in group}
    if others := [row for content, row in here.items() if content not in ours]:
        same = len(here) - len(others)
        found.present += same
        found.left_out += len(group) - same
        if len(group) > same:
            found.skipped.append(_skipped(group, others[0], gpu))
        return
    for content, row in ours.items():
        if content in here:
            found.present += 1
            _adopt(connection, here[content], row)
            continue
        found.added += 1
        records.insert_trial(connection, {k: v for k, v in row.items() if k != "samples"}, row["samples"])


def _skipped(group: Sequence[Row], here: Row, gpu: str) -> str:
    problem = records.problem_of(here).label()
    if here["stage"] == "final":
        what = f"{len(group)} finals"
    else:
        what = f"{here['kind']} {here['family']} {here['parameters']}"
    measured = here["created"] if here["us"] is None else f"{here['created']}, {here['us']:.3f} us"
    theirs = max(group, key=lambda row: str(row["created"]))
    new = theirs["created"] if theirs["us"] is None else f"{theirs['created']}, {theirs['us']:.3f} us"
    return f"left out: {problem} on {gpu}, {what} ({new}): the database has its own ({measured})"


def _adopt(connection: sqlite3.Connection, here: Row, row: Row) -> None:
    """A trial that was exported while its sweep ran, and again once that had finished, is of the finished sweep."""
    sql = """UPDATE trials SET sweep_id = :new WHERE id = :id
        AND (SELECT state FROM sweeps WHERE id = :new) = 'finished'
        AND (SELECT state FROM sweeps WHERE id = trials.sweep_id) <> 'finished'"""
    connection.execute(sql, {"new": row["sweep_id"], "id": here["id"]})


def _content(row: Row) -> tuple[object, ...]:
    """All that a trial says, with its key; not where it is stored."""
    return tuple(value for name, value in sorted(row.items()) if name not in ("id", "sweep_id", "samples"))


def _silicon(connection: sqlite3.Connection, row: Row) -> int:
    return records.silicon_id(connection, Silicon(**{name: value for name, value in row.items() if name != "id"}))


def _sweep(connection: sqlite3.Connection, row: Row, taken: set[int]) -> int:
    """The number of this sweep here; those `taken` are other ones of the file, which may have begun in one second.

    One that ran when it was exported has been interrupted, as far as this database will ever know.
    """
    row = {name: value for name, value in row.items() if name != "id"}
    if row["state"] == "running":
        row["state"] = "interrupted"
    same = records.equal(name for name in row if name != "finished")
    for found in _rows(connection, f"SELECT id FROM sweeps WHERE {same} ORDER BY id", row):
        if found["id"] not in taken:
            return int(found["id"])
    return int(connection.execute(records.insert("sweeps", row), row).lastrowid or 0)


def _rows(connection: sqlite3.Connection, sql: str, values: Row) -> list[Row]:
    cursor = connection.execute(sql, {name: value for name, value in values.items() if name != "samples"})
    names = [column[0] for column in cursor.description]
    return records.typed([dict(zip(names, row, strict=True)) for row in cursor])
