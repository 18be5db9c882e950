"""The process of one of several GPUs that share a sweep: what it is told, what it sends, and its body, which imports
torch only while its measuring process and its compilers do so too."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from .errors import TunegenError
from .model import Problem, Trial
from .pool import Compile, CompilePool
from .processes import follow_parent, interrupts_held
from .store import Store
from .worker import Worker

MakeWorker = Callable[[int, int], Worker]
"""`make(device, seed)`: the measuring process of a GPU; tests put a stand-in there."""


@dataclass(frozen=True)
class Order:
    """What every GPU's process is told. `cores` is how many it may compile on."""

    db: Path
    budget: int
    seed: int
    arguments: dict[str, Any]
    cores: int
    make_worker: MakeWorker
    compile_one: Compile


class Sender:
    """A listener that sends what it is told to the parent."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def stage(self, text: str, total: int) -> None:
        """As in `Listener`."""
        self.connection.send(("stage", (text, total)))

    def trial(self, trial: Trial) -> None:
        """As in `Listener`."""
        self.connection.send(("trial", (trial,)))


def sweep_device(connection: Connection, device: int, order: Order) -> None:
    """Body of the process of GPU `device`: tunes what it is given (see `given_to`). It sends pairs: "stage" and "trial"
    with what a listener is told, at the end "result" with a SweepResult, or "failure" with why there is none."""
    follow_parent()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    pool = CompilePool(None, order.cores, order.compile_one)
    then: dict[Problem, Problem] = {}
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        with order.make_worker(device, order.seed) as worker, pool, Store.open(order.db) as store:
            worker.launch()
            pool.prepare()
            with interrupts_held():
                from .sweep import sweep_gpu

            given, sender = given_to(connection, worker, then), Sender(connection)
            budget, seed, arguments = order.budget, order.seed, order.arguments
            result = sweep_gpu(store, given, budget, seed, sender, arguments, worker, pool=pool, then=then)
        connection.send(("result", result))
    except TunegenError as error:
        connection.send(("failure", str(error)))
    except (KeyboardInterrupt, EOFError, ConnectionError):  # the parent says what there is to say, or is gone
        os._exit(130)


def given_to(connection: Connection, worker: Worker, then: dict[Problem, Problem]) -> Iterator[Problem]:
    """Problems for a GPU whose measuring process has come up, as long as the parent gives some; what is likely behind
    each is in `then` before it is given. Sends "ready" with the silicon, and "next" for each; the answer is a problem,
    or None at the end, and what is likely behind it."""
    connection.send(("ready", worker.start().silicon))
    while True:
        connection.send(("next", None))
        problem, hint = connection.recv()
        if problem is None:
            return
        if hint is not None:
            then[problem] = hint
        yield problem
