"""Telling a living process from a later one with its number."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


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
