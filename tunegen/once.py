"""What is said once in a process, whichever of its threads comes first."""

from __future__ import annotations

import os
import threading
from typing import TypeVar

What = TypeVar("What")

_lock = threading.Lock()


def _renew() -> None:
    """A thread that held it when the process forked is not there to give it back."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew)


def first(seen: set[What], what: What) -> bool:
    """Put `what` into `seen`; True for the one thread that finds it missing there."""
    with _lock:
        found = what in seen
        seen.add(what)
        return not found
