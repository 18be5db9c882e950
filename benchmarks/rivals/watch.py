"""The parent of a cell's process: a player that hangs, or ends the process, loses its own time there and no other's."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from tunegen.processes import deaf_to_interrupts

from .cells import Cell
from .players import Player
from .rows import NOT_MEASURED, Outcome
from .session import Lab, work

START_SECONDS = 120.0
KILL_SECONDS = 10.0


class Found(NamedTuple):
    """What a cell came to: an outcome for each player, and what it was measured on."""

    outcomes: list[Outcome]
    facts: dict[str, str]


class _Ended(NamedTuple):
    """How a process ended before it had measured: whose turn it was ("" for none's), and why."""

    player: str
    reason: str


def measured(
    cell: Cell,
    players: Sequence[Player],
    rounds: int,
    make_lab: Callable[[Cell], Lab] = Lab,
    limit: float = 1.0,
    start_seconds: float = START_SECONDS,
) -> Found:
    """Measure a cell. A process that fails is begun again without the player whose turn it was; if it was none's, all
    that are left have no time. `limit` is a factor on everybody's deadline."""
    out: dict[str, Outcome] = {}
    facts: dict[str, str] = {}
    while left := [player for player in players if player.name not in out]:
        process = _Process(make_lab, cell, left, rounds)
        try:
            ended = _followed(process, out, facts, limit, start_seconds)
        finally:
            process.end()
        if ended is None:
            break
        for player in left:
            if player.name not in out and ended.player in ("", player.name):
                out[player.name] = Outcome(player.name, NOT_MEASURED, note=ended.reason)
    return Found(list(out.values()), facts)


def _followed(
    process: _Process, out: dict[str, Outcome], facts: dict[str, str], limit: float, start_seconds: float
) -> _Ended | None:
    """Collect what a process tells until it is done; None if it was."""
    turn, seconds = "", start_seconds
    deadline = time.monotonic() + seconds
    while True:
        try:
            kind, *values = process.receive(deadline - time.monotonic())
        except TimeoutError:
            return _Ended(turn, f"no answer within {seconds:g} s")
        except (EOFError, OSError):
            return _Ended(turn, f"ended its process, exit code {process.exit_code()}")
        if kind == "begin":
            turn, seconds = values[0], values[1] * limit
            deadline = time.monotonic() + seconds
        elif kind == "facts":
            facts.update(values[0])
        elif kind == "out":
            out[values[0].player] = values[0]
        elif kind == "lost":
            return _Ended(turn, values[0])
        elif kind == "done":
            out.update({outcome.player: outcome for outcome in values[0]})
            return None


class _Process:
    """A process of a cell, spawned: a fork would share this one's threads."""

    def __init__(self, *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection: Connection
        self.connection, theirs = context.Pipe(duplex=False)
        # No daemon: quack's search starts processes of its own. It follows its parent, however that ends.
        self.process = context.Process(target=work, args=(theirs, *arguments))
        with deaf_to_interrupts():
            self.process.start()
        theirs.close()

    def receive(self, seconds: float) -> tuple[Any, ...]:
        """The next message. Raises TimeoutError, and EOFError once the process has ended."""
        if not self.connection.poll(max(seconds, 0.0)):
            raise TimeoutError
        message: tuple[Any, ...] = self.connection.recv()
        return message

    def exit_code(self) -> int | None:
        """Of a process that has closed its connection."""
        self.process.join(KILL_SECONDS)
        return self.process.exitcode

    def end(self) -> None:
        """At once."""
        self.process.kill()
        self.process.join(KILL_SECONDS)
        self.connection.close()
