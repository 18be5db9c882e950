"""Whether a sweep that the database has as running still runs. One that was killed could not say that it ended."""

from __future__ import annotations

import os
import platform
import sqlite3
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from pathlib import Path

from .errors import StoreError
from .paths import ANOTHER_DATABASE
from .records import now

SILENCE = timedelta(days=1)
"""A sweep of another host, or of a container that is no more, counts as ended after so long without a trial."""

_RUNNING = """SELECT id, host, pid, process, (SELECT max(created) FROM trials WHERE sweep_id = sweeps.id), started
    FROM sweeps WHERE state = 'running'"""


def process_identity(pid: int) -> str:
    """What tells a living process from a later one with its pid: its start time, `alive` if unknown, '' if it ended."""
    with suppress(OSError):  # not Linux, or ended
        status = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if status[0] == "Z" else status[19]
    try:
        os.kill(pid, 0)
    except OSError as error:
        return "" if isinstance(error, ProcessLookupError) else "alive"
    return "alive"


def mark_interrupted(connection: sqlite3.Connection) -> None:
    """Within a transaction: sweeps of this host whose process has ended become `interrupted`, and those of others that
    have been silent for long."""
    for sweep_id, *known in connection.execute(_RUNNING).fetchall():
        if _has_ended(*known):
            sql = "UPDATE sweeps SET state = 'interrupted', finished = ? WHERE id = ?"
            connection.execute(sql, (now(), sweep_id))


def refuse_while_swept(connection: sqlite3.Connection, path: Path) -> None:
    """Raise StoreError while a sweep of another process runs, which knows the schema that it began with and no later
    one; a file without tables has none."""
    if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'sweeps'").fetchone():
        return
    for sweep_id, host, pid, *known in connection.execute(_RUNNING).fetchall():
        if (host, pid) != (platform.node(), os.getpid()) and not _has_ended(host, pid, *known):
            raise StoreError(
                f"{path} was written by an older tunegen, of which sweep {sweep_id} still runs (pid {pid} on {host}) "
                f"and would fail after an upgrade: wait until it has ended, {ANOTHER_DATABASE}"
            )


def _has_ended(host: str, pid: int, process: str, latest: str | None, started: str) -> bool:
    if host == platform.node():
        return process_identity(pid) not in (process, "alive")
    return str(latest or started) < (datetime.now(timezone.utc) - SILENCE).isoformat(timespec="seconds")
