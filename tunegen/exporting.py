"""A database's results as JSON Lines: a header, then a line for each GPU, sweep and trial, samples included.

Every line is an object whose `record` says what it is: `header`, `silicon`, `sweep` or `trial`; its other keys are the
columns of that table. Columns that are NULL are left out. Ids count from 1 in the file's own order, which is that of
the database, so that the same results give the same bytes. `samples` of a trial holds a list for each column. A file
whose name ends in `.xz` is packed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from . import packed, records
from .errors import ExportError, StoreError
from .migrations import STEPS, tables
from .paths import obstacle, on_database, write_named
from .store import Store

FORMAT = 1
SCHEMA = len(STEPS)
"""How many steps of the schema the columns of a file have seen."""
TABLES = {"silicon": "silicon", "sweep": "sweeps", "trial": "trials"}
"""Kinds of records behind the header, and their tables."""
Row = dict[str, Any]
_WITH_GPU = "silicon_id IN (SELECT id FROM silicon)"
_WHOLE = f"{_WITH_GPU} AND sweep_id IN (SELECT id FROM sweeps WHERE {_WITH_GPU})"
"""Without those whose GPU or sweep was deleted by a program that does not look at references: no view has them."""


def export(store: Store, path: Path, filters: Mapping[str, object]) -> dict[str, int]:
    """Write the trials that match, with their GPUs and sweeps, to a file, whole or not at all, in a new folder if need
    be; returns how many records there are of each kind. A filter names a column of `trials` and the value that it must
    have.

    Raises StoreError for an unknown column or an unreadable database, ExportError where no trials match or the file
    cannot be written.
    """
    found = _numbered(*_read(store, filters))
    if not found["trial"]:
        show = on_database("tunegen show trials", store.path)
        raise ExportError(f"no trials match in {store.path}: {path} is not written; `{show}` lists them all")
    counts = {kind: len(rows) for kind, rows in found.items()}
    header = {"record": "header", "format": FORMAT, "schema": SCHEMA, **counts}
    body = [{"record": kind, **row} for kind, rows in found.items() for row in rows]
    try:
        text = "".join(f"{json.dumps(row, allow_nan=False)}\n" for row in [header, *body])
    except (TypeError, ValueError) as error:
        raise StoreError(f"{store.path} holds a value that JSON cannot: {error}; delete its row") from error
    data = packed.pack(text.encode(), path) if packed.is_packed(path) else text.encode()
    try:
        write_named(path.absolute(), data)
    except OSError as error:
        raise ExportError(f"cannot write {path}: {obstacle(error)}; choose another file") from error
    return counts


def _read(store: Store, filters: Mapping[str, object]) -> tuple[list[Row], list[Row], list[Row], list[Row]]:
    """Rows of silicon, sweeps, trials and samples, each in the order of its ids, of one state of the database."""
    if unknown := sorted(filters.keys() - tables()["trials"].keys()):
        raise StoreError(f"unknown filter {unknown[0]!r}; allowed are {', '.join(tables()['trials'])}")
    values = {name: records.plain(name, value) for name, value in filters.items()}
    where = records.equal(values)
    with store.reading():
        trials = store.rows(f"SELECT * FROM trials WHERE {where} AND {_WHOLE} ORDER BY id", values)
        of_trial = f"trial_id IN (SELECT id FROM trials WHERE {where})" if filters else "1"
        samples = store.rows(f"SELECT * FROM samples WHERE {of_trial} ORDER BY trial_id, block", values)
        sweeps = store.rows(f"SELECT * FROM sweeps WHERE {_WITH_GPU} ORDER BY id", {})
        silicon = store.rows("SELECT * FROM silicon ORDER BY id", {})
    for rows in (trials, samples, sweeps, silicon):
        records.typed(rows)
    if filters:
        sweeps = _used(sweeps, "sweep_id", trials)
        silicon = _used(silicon, "silicon_id", [*trials, *sweeps])
    return silicon, sweeps, trials, samples


def _used(rows: Iterable[Row], reference: str, by: Iterable[Row]) -> list[Row]:
    wanted = {row[reference] for row in by}
    return [row for row in rows if row["id"] in wanted]


def _numbered(
    silicon: Sequence[Row], sweeps: Sequence[Row], trials: Sequence[Row], samples: Sequence[Row]
) -> dict[str, list[Row]]:
    """Rows as records, by kind: ids count from 1, and samples belong to their trial."""
    chip = {row["id"]: number for number, row in enumerate(silicon, 1)}
    sweep = {row["id"]: number for number, row in enumerate(sweeps, 1)}
    blocks: dict[int, list[Row]] = {}
    for sample in samples:
        blocks.setdefault(sample.pop("trial_id"), []).append(sample)
    return {
        "silicon": [_filled({**row, "id": chip[row["id"]]}) for row in silicon],
        "sweep": [_filled({**row, "id": sweep[row["id"]], "silicon_id": chip[row["silicon_id"]]}) for row in sweeps],
        "trial": [
            _filled({**row, "id": None, "sweep_id": sweep[row["sweep_id"]], "silicon_id": chip[row["silicon_id"]]})
            | _columns(blocks.get(row["id"], []))
            for row in trials
        ],
    }


def _filled(row: Row) -> Row:
    return {name: value for name, value in row.items() if value is not None}


def _columns(blocks: Sequence[Row]) -> Row:
    """Samples as a list for each column that is not NULL throughout."""
    if not blocks:
        return {}
    columns = {name: [block[name] for block in blocks] for name in blocks[0]}
    return {"samples": {name: values for name, values in columns.items() if values != [None] * len(values)}}
