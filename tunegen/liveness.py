"""Whether a sweep that the database has as running still runs. One that was killed could not say that it ended."""

from __future__ import annotations

import os
import platform
import sqlite3
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from pathlib import Path

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
    silent = (datetime.now(timezone.utc) - SILENCE).isoformat(timespec="seconds")
    for sweep_id, host, pid, process, latest, started in connection.execute(_RUNNING).fetchall():
        if host == platform.node():
            ended = process_identity(pid) not in (process, "alive")
        else:
            ended = str(latest or started) < silent
        if ended:
            sql = "UPDATE sweeps SET state = 'interrupted', finished = ? WHERE id = ?"
            connection.execute(sql, (now(), sweep_id))
