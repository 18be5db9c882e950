"""What was decided while the database could not be read, locked by a writer say: it holds for a while; then the
database is read again."""

from __future__ import annotations

import time
from collections.abc import Hashable
from typing import Generic, TypeVar

from .compile import is_capturing

SECONDS = 30.0
"""How long it holds."""

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Passing(Generic[K, V]):
    """Values by key that hold for SECONDS after the last failed read, and beyond while a CUDA graph is captured: what
    that call needs is loaded. One time for all keys, so that a locked file is waited for once in SECONDS."""

    def __init__(self) -> None:
        self.values: dict[K, V] = {}
        self._until = 0.0

    def get(self, key: K) -> V | None:
        """The value, if it holds still."""
        found = self.values.get(key)
        return found if found is None or time.monotonic() < self._until or is_capturing() else None

    def put(self, key: K, value: V) -> V:
        """Keep a value, unless another thread has put one there, and return what is kept; all of them hold longer."""
        self._until = time.monotonic() + SECONDS
        return self.values.setdefault(key, value)
