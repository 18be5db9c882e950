"""The database, for those who tune and report: every trial, not only winners. One writing process a sweep.

Each write is one transaction that opens with BEGIN IMMEDIATE (`writing`), under a rollback journal.
A plain BEGIN that reads and then writes fails at once when another writer comes between: 27 % of transactions with
eight writers, none of 3,200 with BEGIN IMMEDIATE. The running program reads through `lookup` instead.
"""

from __future__ import annotations

import json
import os
import platform
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from sqlite_utils import Database

from . import migrations as schema
from . import records
from .errors import StoreError
from .liveness import mark_interrupted, process_identity, refuse_while_swept
from .model import Problem, Silicon, Trial
from .paths import ANOTHER_DATABASE, obstacle, on_database
from .records import StoredTrial

BUSY_SECONDS = 30
VERSIONS = ("tunegen", "torch", "triton", "driver")

_REMEDIES = (
    ("locked", f"another process has held it for {BUSY_SECONDS} s: wait for it, {ANOTHER_DATABASE}"),
    ("not a database", f"it is left as it is: move it away, {ANOTHER_DATABASE}"),
    ("malformed", f"it is damaged and left as it is: move it away, {ANOTHER_DATABASE}"),
    ("full", "free some space on that disk"),
    ("disk I/O", "is that disk full, or failing?"),
)

TrialKey = tuple[str, str, str, str]
"""Family, parameters as sorted JSON (`Config.to_json`), digest, stage: a candidate among those of one problem."""


class Store:
    """An open database; close it, or use it in a `with`. Not to be shared between threads, nor kept across a fork."""

    def __init__(self, path: Path, mode: str) -> None:
        """Connect in SQLite's open mode `ro`, `rw` or `rwc`; callers use `open` and `read`, which check more."""
        self.path = path
        with self._explained():
            uri = f"{path.as_uri()}?mode={mode}"
            connection = sqlite3.connect(uri, uri=True, timeout=BUSY_SECONDS, isolation_level=None)
        # One unreadable text costs its own row, not the query.
        connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
        connection.execute("PRAGMA foreign_keys = ON")
        self._connection = connection

    @classmethod
    def open(cls, path: Path) -> Store:
        """Open for writing; creates the file and its folder, and brings an older schema up to date.

        Raises StoreError when the path is no file, cannot be created or written, is no database of tunegen's, or is of
        an older schema that a running sweep still writes; it is then left as it is.
        """
        path = Path(path).expanduser().absolute()
        _check_place(path)
        return cls(path, "rwc")._checked(Store._migrate)

    @classmethod
    def read(cls, path: Path) -> Store:
        """Open an existing database for queries only: it is neither created nor upgraded.

        Raises StoreError when there is none, when it cannot be read, or when its schema is of another version.
        """
        path = Path(path).expanduser().absolute()
        if not os.path.isfile(path):
            none = f"no database at {path}; run `{on_database('tunegen sweep', path)}`, {ANOTHER_DATABASE}"
            raise StoreError(f"{path} is no plain file; {ANOTHER_DATABASE}" if os.path.exists(path) else none)
        # Where it may be written, SQLite can roll back what a killed writer left; read-only, it would refuse the file.
        writable = os.access(path, os.W_OK) and os.access(path.parent, os.W_OK)
        return cls(path, "rw" if writable else "ro")._checked(Store._protect)

    def close(self) -> None:
        """Close the file; further calls raise StoreError."""
        self._connection.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def silicon_id(self, silicon: Silicon) -> int:
        """The row of this GPU, made when it is new. Raises StoreError when the file cannot be written."""
        with self.writing() as connection:
            return records.silicon_id(connection, silicon)

    def begin_sweep(
        self, silicon: Silicon, arguments: Mapping[str, Any], versions: Mapping[str, str], seed: int
    ) -> int:
        """Record that this process begins a sweep; sweeps that have ended without a word become `interrupted`.

        `versions` may have the keys of `VERSIONS`. Raises StoreError on another key or when the file cannot be written.
        """
        if unknown := sorted(set(versions) - set(VERSIONS)):
            raise StoreError(f"unknown version {unknown[0]!r} of a sweep; allowed are {', '.join(VERSIONS)}")
        with self.writing() as connection:
            mark_interrupted(connection)
            row = {
                "silicon_id": records.silicon_id(connection, silicon),
                "started": records.now(),
                "state": "running",
                "arguments": json.dumps(dict(arguments), sort_keys=True, default=str),
                "host": platform.node(),
                "pid": os.getpid(),
                "process": process_identity(os.getpid()),
                "seed": seed,
            }
            row.update({name: versions.get(name, "") for name in VERSIONS})
            return int(connection.execute(records.insert("sweeps", row), row).lastrowid or 0)

    def finish_sweep(self, sweep_id: int, state: str = "finished") -> None:
        """Set the state a sweep ended in. Raises StoreError for an unknown state, or for a sweep that is unknown or has
        finished."""
        with self.writing() as connection:
            sql = "UPDATE sweeps SET state = ?, finished = ? WHERE id = ? AND state <> 'finished'"
            if connection.execute(sql, (state, records.now(), sweep_id)).rowcount != 1:
                raise StoreError(f"{self.path} has no sweep {sweep_id} to finish")

    def add_all(self, sweep_id: int, trials: Sequence[Trial], protocol: int, triton: str, torch: str) -> list[int]:
        """Store trials with their samples in one transaction, all of them or none, and return their ids; a trial with
        the same key is replaced and keeps its id, unless it is another sweep's that stands against the new one (see
        `records.REPLACED_BY`). Finals say who is tied with whom: earlier ones then end.

        `triton` is the minor version, such as `3.6`. Raises StoreError for an unknown sweep, for samples that do not
        pair with sentinels, and when the file cannot be written.
        """
        rows = [(records.trial_row(trial), records.samples_of(trial)) for trial in trials]
        shared = {"sweep_id": sweep_id, "protocol": protocol, "triton": triton, "torch": torch}
        with self.writing() as connection:
            sweep = connection.execute("SELECT silicon_id FROM sweeps WHERE id = ?", (sweep_id,)).fetchone()
            if sweep is None:
                raise StoreError(f"{self.path} has no sweep {sweep_id}")
            whole = [({**shared, "silicon_id": sweep[0], **row}, samples) for row, samples in rows]
            for row, _ in whole:
                if (row["stage"], row["kind"], row["state"]) == ("final", "measured", "ok"):  # tied or timed one by one
                    connection.execute(records.untie(), row)
            return [records.insert_trial(connection, row, samples) for row, samples in whole]

    def seen(
        self, silicon: Silicon, problem: Problem, triton: str, protocol: int, kind: str
    ) -> dict[TrialKey, StoredTrial]:
        """What is stored already for exactly this problem and GPU: a sweep skips it. Unreadable rows are left out.

        Raises StoreError when the file cannot be read.
        """
        wanted = {"triton": triton, "protocol": protocol, "kind": kind, **records.problem_row(problem)}
        columns = ", ".join(f"trials.{name} AS {name}" for name in ("id", *records.LOADED))
        sql = f"""SELECT {columns}, samples.us AS block_us, samples.sentinel_us AS block_sentinel_us,
            samples.round AS block_round, samples.kept AS block_kept
            FROM trials JOIN silicon ON silicon.id = trials.silicon_id
            LEFT JOIN samples ON samples.trial_id = trials.id
            WHERE {records.equal(wanted, "trials.")} AND {records.equal(records.SILICON, "silicon.")}
            ORDER BY trials.id, samples.block"""
        grouped: dict[int, list[dict[str, Any]]] = {}
        for row in self.rows(sql, {**wanted, **records.silicon_row(silicon)}):
            grouped.setdefault(row["id"], []).append(row)
        loaded = [records.load_trial(problem, kind, rows) for rows in grouped.values()]
        return {(t.config.family, t.config.to_json(), t.digest, t.stage): t for t in loaded if t is not None}

    def adopt(self, sweep_id: int, trials: Iterable[StoredTrial]) -> None:
        """Make trials that an unfinished sweep left behind part of this one, which skips them.

        Else a winner among them would count as half a sweep's for ever. Trials of finished sweeps stay where they are.
        Raises StoreError when the file cannot be written.
        """
        unfinished = "SELECT id FROM sweeps WHERE state = 'interrupted'"
        with self.writing() as connection:
            mark_interrupted(connection)  # one may have been killed since this sweep began
            sql = f"UPDATE trials SET sweep_id = ? WHERE id = ? AND sweep_id IN ({unfinished})"
            connection.executemany(sql, [(sweep_id, trial.id) for trial in trials])

    def set_apart(self, sweep_id: int, problem: Problem) -> None:
        """Give the trials of a problem that a sweep had to leave out to an interrupted sweep of their own, if there are
        any, so that the best of them counts as half a sweep's. Raises StoreError when the file cannot be written."""
        of_problem = {"sweep_id": sweep_id, **records.problem_row(problem)}
        with self.writing() as connection:
            where = records.equal(of_problem)
            if connection.execute(f"SELECT 1 FROM trials WHERE {where} LIMIT 1", of_problem).fetchone() is None:
                return
            cursor = connection.execute("SELECT * FROM sweeps WHERE id = ?", (sweep_id,))
            row = dict(zip((column[0] for column in cursor.description), cursor.fetchone(), strict=True))
            row.update(id=None, state="interrupted", finished=records.now())
            new = connection.execute(records.insert("sweeps", row), row).lastrowid
            connection.execute(f"UPDATE trials SET sweep_id = {new} WHERE {where}", of_problem)

    def winners(self, **filters: object) -> list[dict[str, Any]]:
        """The best OK trial of each problem, GPU, Triton, protocol and kind; `half` is 1 while its sweep is unfinished.

        A filter names a column and the value it must have. Raises StoreError for an unknown column.
        """
        return self._select("winners", filters, "op, direction, hidden, rows, x_dtype, id")

    def trials(self, **filters: object) -> list[dict[str, Any]]:
        """Every trial, failed ones too, with the GPU's name in `silicon`; filters as in `winners`, same error."""
        joined = """(SELECT trials.*, silicon.name AS silicon, silicon.capability AS capability
            FROM trials JOIN silicon ON silicon.id = trials.silicon_id)"""
        return self._select(joined, filters, "id")

    def _select(self, source: str, filters: Mapping[str, object], order: str) -> list[dict[str, Any]]:
        with self._explained():
            allowed = [column[0] for column in self._connection.execute(f"SELECT * FROM {source} LIMIT 0").description]
        if unknown := sorted(set(filters) - set(allowed)):
            raise StoreError(f"unknown filter {unknown[0]!r}; allowed are {', '.join(allowed)}")
        values = {name: records.plain(name, value) for name, value in filters.items()}
        return self.rows(f"SELECT * FROM {source} WHERE {records.equal(values)} ORDER BY {order}", values)

    def rows(self, sql: str, values: Mapping[str, object]) -> list[dict[str, Any]]:
        """What a query finds, by column. Raises StoreError when the file cannot be read."""
        with self._explained():
            cursor = self._connection.execute(sql, values)
            names = [column[0] for column in cursor.description]
            return [dict(zip(names, row, strict=True)) for row in cursor]

    def writing(self) -> AbstractContextManager[sqlite3.Connection]:
        """The one way to write: BEGIN IMMEDIATE, then COMMIT, or ROLLBACK on any exception."""
        return self._transaction("BEGIN IMMEDIATE")

    def reading(self) -> AbstractContextManager[sqlite3.Connection]:
        """Several queries of one state of the file; no other process can write meanwhile."""
        return self._transaction("BEGIN")

    @contextmanager
    def _transaction(self, begin: str) -> Iterator[sqlite3.Connection]:
        with self._explained():
            try:  # around BEGIN too: an interrupt while it waits for another writer is raised once it has begun
                self._connection.execute(begin)
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn an error of SQLite into a StoreError with the path and what to do."""
        try:
            yield
        except sqlite3.Error as error:
            remedy = next((text for word, text in _REMEDIES if word in str(error)), f"check it, {ANOTHER_DATABASE}")
            raise StoreError(f"database {self.path}: {error}; {remedy}") from error

    def _pending(self) -> bool:
        """Whether migrations are to be applied. Raises StoreError for a database of someone else or later."""
        database = Database(self._connection, recursive_triggers=False, execute_plugins=False)
        with self._explained():
            tables = database.table_names()  # first: a process that creates the file commits both at once
            applied = {step.name for step in schema.migrations.applied(database)}
        if tables and not applied:
            raise StoreError(f"{self.path} is another program's database; {ANOTHER_DATABASE}")
        known = {step.__name__ for step in schema.STEPS}
        if later := sorted(applied - known):
            raise StoreError(f"{self.path} was written by a later tunegen (it has {later[0]}); upgrade tunegen")
        return applied != known

    def _checked(self, check: Callable[[Store], None]) -> Store:
        """This store after `check`; closed if that raises."""
        try:
            check(self)
        except BaseException:
            self.close()
            raise
        return self

    def _protect(self) -> None:
        if self._pending():
            raise StoreError(f"{self.path} is of an older tunegen; update: `{on_database('tunegen sweep', self.path)}`")
        self._connection.execute("PRAGMA query_only = ON")

    def _migrate(self) -> None:
        if self._pending():
            with self.writing() as connection:
                if self._pending():  # else another process has done it meanwhile
                    refuse_while_swept(connection, self.path)
                    schema.migrations.apply(Database(connection, recursive_triggers=False, execute_plugins=False))


def _check_place(path: Path) -> None:
    """Make the folder; raise StoreError unless a database at `path` can be written, or made."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():
            raise StoreError(f"{path} is no plain file; {ANOTHER_DATABASE}")
    except OSError as error:
        raise StoreError(f"cannot make {path}: {obstacle(error)}; {ANOTHER_DATABASE}") from error
    for place in (path, path.parent):  # the folder too: the journal lies beside the database
        if place.exists() and not os.access(place, os.W_OK):
            raise StoreError(f"{place} may not be written; change its permissions, {ANOTHER_DATABASE}")
