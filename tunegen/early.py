"""What a sweep starts before it imports torch itself: the measuring process and the compilers, which import it too, at
the same time. One after the other they took 6 s more, a tenth of a sweep (H200)."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from glob import glob
from pathlib import Path
from typing import NamedTuple

from . import paths
from .pool import CompilePool
from .worker import Worker

DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/dxg"))
"""Files of NVIDIA's driver, on Linux and in WSL: where none of them is, no GPU is."""

CARDS = "/dev/nvidia[0-9]*"
"""A file for each GPU, on Linux; not more than these are visible to CUDA. WSL has none."""


class Early(NamedTuple):
    """A measuring process and compilers that are coming up."""

    worker: Worker
    pool: CompilePool


@contextmanager
def started_early(gpus: str | None, arch: str | None, seed: int) -> Iterator[Early | None]:
    """Both until the end of the block, for a sweep with these options; None unless they ask for one GPU and it may be
    there."""
    one = arch is None and (gpus or "0").isdecimal() and int(gpus or 0) < max(len(glob(CARDS)), 1)
    if not one or paths.interpreted() or not any(path.exists() for path in DRIVERS):
        yield None
        return
    with Worker(int(gpus or 0), seed) as worker, CompilePool(None) as pool:
        worker.launch()
        pool.prepare()
        yield Early(worker, pool)


def stop_in_order() -> None:
    """Have SIGTERM, a batch system's way to stop, end this process as Ctrl-C does: what it has started ends with it."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
