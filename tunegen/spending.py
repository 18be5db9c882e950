"""What time is spent on, by name."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


class Spent(defaultdict[str, float]):
    """Seconds by activity."""

    def __init__(self) -> None:
        super().__init__(float)

    @contextmanager
    def on(self, activity: str) -> Iterator[None]:
        """Count the time inside, also of what fails."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self[activity] += time.perf_counter() - began

    def add(self, other: Mapping[str, float]) -> None:
        """Count what another one has counted."""
        for activity, seconds in other.items():
            self[activity] += seconds

    def taken(self) -> dict[str, float]:
        """What was counted since the last time, as plain values; the count starts again."""
        found = dict(self)
        self.clear()
        return found
