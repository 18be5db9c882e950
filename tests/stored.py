"""Databases with results in them, for tests of what reads them."""

from __future__ import annotations

from fake_gpu import H200

from tunegen.dispatch import triton_minor
from tunegen.model import PROTOCOL
from tunegen.store import Store


def keep(path, *trials, torch=""):
    """Store trials in a database, as a finished sweep of the H200 with that torch leaves them."""
    with Store.open(path) as file:
        sweep = file.begin_sweep(H200, {}, {}, 0)
        for trial in trials:
            file.add_all(sweep, [trial], PROTOCOL, triton_minor(), torch)
        file.finish_sweep(sweep)
