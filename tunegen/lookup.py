"""What the running program reads from the database: one short read-only query when the dispatcher misses.

Nothing here may fail a caller. A database that is busy, missing, unreadable or of another schema is a miss; one of an
older schema is named in one warning, a damaged one too and moved aside. Nothing read is executed, and each row is
checked.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import fields
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from .model import Problem, Silicon, StoredChoice
from .once import first
from .paths import on_database
from .silicon import FACTS

logger = logging.getLogger("tunegen")

# SQLite waits once to read the schema and once to read rows: a miss comes after 0.24 s at most.
_WAIT_SECONDS = 0.12
_warned: set[str] = set()
_failed_reads = 0
_PROBLEM = tuple(field.name for field in fields(Problem) if field.name != "rows")
_ORDER = "final DESC, tie DESC, rank, spills, warps, parameters, family, id"
_COLUMNS = ("family", "parameters", "digest", "rows", "us", "silicon", "id", "half", "final")
_KEY = "silicon_id = :silicon_id AND triton = :triton AND protocol = :protocol AND " + " AND ".join(
    f"{name} = :{name}" for name in _PROBLEM
)
_QUERY = f"SELECT {', '.join(_COLUMNS)} FROM candidates WHERE {_KEY} AND kind = 'measured' ORDER BY rows, {_ORDER}"
_OTHERS = f"""SELECT silicon.name, {", ".join(f"silicon.{fact}" for fact in FACTS)}, triton, protocol, kind, rows
    FROM candidates JOIN silicon ON silicon.id = silicon_id
    WHERE {" AND ".join(f"{name} = :{name}" for name in _PROBLEM)}"""
_REJECTED = f"SELECT DISTINCT family, parameters, digest FROM trials WHERE {_KEY} AND state = 'incorrect'"


class Other(NamedTuple):
    """A result of a problem, of whatever GPU, Triton, protocol and kind."""

    silicon: Silicon
    triton: str
    protocol: int
    kind: str
    rows: int


def failed_reads() -> int:
    """How often in this process a database that may be sound could not be read, locked by a writer say: what was found
    meanwhile is not what it holds."""
    return _failed_reads


def complained(path: Path) -> bool:
    """Whether this process has said that the database at `path` is damaged or of an older schema."""
    return str(path) in _warned


def database_exists(path: Path) -> bool:
    """Whether there is a file to look into; an empty one counts as none."""
    try:
        return os.path.isfile(path) and os.path.getsize(path) > 0
    except OSError:
        return False


def find_winners(path: Path, silicon: Silicon, problem: Problem, triton: str, protocol: int) -> list[StoredChoice]:
    """Every right, measured trial of this problem at any row count, on this GPU or one with the same facts.

    Those of the GPU's own name come first, then by rows, the winner of each row count ahead of all that come after
    it: its template may have been edited since, or no longer compile. Raises nothing: whatever is wrong with the
    file, the list is empty.
    """
    rows = _read(path, silicon, problem, {"triton": triton, "protocol": protocol}, _QUERY)
    return [choice for choice in map(_choice, rows) if choice is not None]


def find_rejected(
    path: Path, silicon: Silicon, problem: Problem, triton: str, protocol: int
) -> set[tuple[str, str, str]]:
    """Family, parameters as stored, and digest of what the gate has found wrong at any row count; raises nothing."""
    rows = _read(path, silicon, problem, {"triton": triton, "protocol": protocol}, _REJECTED)
    return {
        tuple(text.decode("utf-8", "replace") for text in row) for row in rows if all(type(t) is bytes for t in row)
    }


def find_others(path: Path, problem: Problem) -> list[Other]:
    """What kernels took, or are estimated to take, for this problem at any row count, wherever it is from; raises
    nothing."""
    found = _fetch(path, lambda connection: connection.execute(_OTHERS, _values(problem)).fetchall())
    sound = [row for row in found if type(row[-1]) is int and row[-1] > 0]
    rows: list[list[Any]] = [[v.decode("utf-8", "replace") if type(v) is bytes else v for v in row] for row in sound]
    chips: list[dict[str, Any]] = [dict(zip(("name", *FACTS), row, strict=False)) for row in rows]
    return [Other(Silicon(**chip, memory_bytes=0), *row[len(chip) :]) for chip, row in zip(chips, rows, strict=True)]


def _read(path: Path, silicon: Silicon, problem: Problem, key: dict[str, Any], query: str) -> list[tuple[Any, ...]]:
    """Raw rows of this problem on this GPU; [] from a file that is not sound."""
    key = key | _values(problem)
    facts = {fact: getattr(silicon, fact) for fact in FACTS} | {"name": silicon.name}
    sql = f"SELECT id FROM silicon WHERE {' AND '.join(f'{f} = :{f}' for f in FACTS)} ORDER BY name <> :name, name"

    def rows(connection: sqlite3.Connection) -> list[tuple[Any, ...]]:
        ids = [row[0] for row in connection.execute(sql, facts).fetchall()]
        return [row for i in ids for row in connection.execute(query, {**key, "silicon_id": i}).fetchall()]

    return _fetch(path, rows)


def _fetch(path: Path, rows: Callable[[sqlite3.Connection], list[tuple[Any, ...]]]) -> list[tuple[Any, ...]]:
    """Raw rows with text as bytes, since one that is no UTF-8 must not fail the query; [] from a file that is not
    sound."""
    global _failed_reads
    if not database_exists(path):
        return []
    try:
        with _reading(path) as connection:
            return rows(connection)
    except sqlite3.Error as error:
        if _is_damage(error):
            _set_aside(path, error)
        elif "no such column" in str(error):
            sweep = on_database("tunegen sweep", path)
            _warn_once(path, "database %s is of an older tunegen and not used: run `%s`", path, sweep)
        else:
            _failed_reads += 1
            logger.debug("database %s not used: %s", path, error)
        return []


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[sqlite3.Connection]:
    """One read transaction. `mode=ro` never makes the file; `immutable=1` would ignore a writer's journal."""
    uri = f"{Path(path).absolute().as_uri()}?mode=ro"
    with contextlib.closing(sqlite3.connect(uri, uri=True, timeout=_WAIT_SECONDS, isolation_level=None)) as connection:
        connection.text_factory = bytes
        connection.execute("BEGIN")
        yield connection


def _values(problem: Problem) -> dict[str, object]:
    """The problem, its rows aside, by column."""
    return {name: _plain(getattr(problem, name)) for name in _PROBLEM}


def _plain(value: object) -> object:
    """A problem's value as its column holds it: no weight is the empty text."""
    if value is None:
        return ""
    return int(value) if isinstance(value, bool) else value


def _choice(row: tuple[Any, ...]) -> StoredChoice | None:
    """The row as a choice; None when anything in it is unreadable or of the wrong type."""
    family, parameters, digest, rows, us, silicon, trial_id, half, final = row
    try:
        texts = [text.decode("utf-8") for text in (family, digest, silicon)]
        values = json.loads(parameters.decode("utf-8"))
    except (AttributeError, ValueError, RecursionError):
        return None
    if not isinstance(values, dict) or not all(type(value) in (int, str) for value in values.values()):
        return None
    if not texts[0] or type(rows) is not int or rows < 1 or type(us) is not float or not 0 < us < math.inf:
        return None
    return StoredChoice(texts[0], values, texts[1], rows, us, texts[2], trial_id, bool(half), bool(final))


def _is_damage(error: sqlite3.Error) -> bool:
    """Whether it is SQLITE_CORRUPT or SQLITE_NOTADB: those are a bare DatabaseError (Python 3.10 has no codes)."""
    return type(error) is sqlite3.DatabaseError


def _set_aside(path: Path, error: sqlite3.Error) -> None:
    """Rename a damaged file, under a lock, so that the next sweep starts afresh; warn once, in one process."""
    try:
        with _locked(path):
            if not _still_damaged(path):
                return
            aside = f"{path}.broken-{datetime.now():%Y%m%d-%H%M%S-%f}"
            # Journals go first: left alone beside a new database, they would be played back into it.
            for suffix in ("-journal", "-wal", "-shm", ""):
                if os.path.exists(f"{path}{suffix}"):
                    os.replace(f"{path}{suffix}", f"{aside}{suffix}")
    except BlockingIOError:
        return  # another process is moving it
    except (OSError, ImportError) as obstacle:
        _warn_once(path, "database %s is damaged (%s) and cannot be moved aside (%s)", path, error, obstacle)
        return
    logger.warning("database %s is damaged (%s): moved to %s, default choices are used", path, error, aside)


def _warn_once(path: Path, text: str, *values: object) -> None:
    """The first time that there is something to say of this file, in one process."""
    if first(_warned, str(path)):
        logger.warning(text, *values)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold `<path>.lock`, which ends with its process. Raises BlockingIOError when another process holds it."""
    import fcntl

    descriptor = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _still_damaged(path: Path) -> bool:
    """Whether the file fails to be read through; another process may have replaced it since."""
    try:
        with _reading(path) as connection:
            result = connection.execute("PRAGMA quick_check(1)").fetchone()
            return bool(result != (b"ok",))
    except sqlite3.Error as error:
        return _is_damage(error)
