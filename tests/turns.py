"""Programs that wait for each other, in Triton's interpreter, which runs one after the other: here they take turns.

A program is a thread that runs until it reads volatile memory, which is how a program waits; then the next one goes on.
"""

from __future__ import annotations

import inspect
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

PATIENCE = 10_000
"""Turns of one launch after which its programs count as waiting for what never comes."""


class _Program:
    """A thread that runs only while it holds the turn."""

    def __init__(self, turns: _Turns, index: tuple[int, ...], run: Callable[[], None]) -> None:
        self.turns, self.index, self.run = turns, index, run
        self.turn = threading.Event()
        self.thread = threading.Thread(target=self._main, daemon=True)
        self.thread.start()

    def _main(self) -> None:
        self.take()
        try:
            if self.turns.failure is None:
                self.run()
        except BaseException as error:  # of any kind: the launch raises it
            self.turns.failure = self.turns.failure or error
        self.turns.hand_on()

    def take(self) -> None:
        """Wait for the turn."""
        self.turn.wait()
        self.turn.clear()
        self.turns.builder.set_grid_idx(*self.index)


class _Turns:
    """The programs of one launch."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder
        self.waiting: deque[_Program] = deque()
        self.running: _Program | None = None
        self.failure: BaseException | None = None
        self.taken = 0
        self.over = threading.Event()

    def hand_on(self) -> None:
        """Let the next program go on, or the launch end."""
        self.running = self.waiting.popleft() if self.waiting else None
        (self.running.turn if self.running else self.over).set()

    def swap(self) -> None:
        """Called by the running program when it may have to wait."""
        self.taken += 1
        if self.failure is not None or self.taken > PATIENCE:
            raise self.failure or AssertionError("the programs wait for each other")
        program = self.running
        assert program is not None
        self.waiting.append(program)
        self.hand_on()
        program.take()


class _Kernel:
    """Stands in for a kernel's function, which the interpreter calls once a program: the last call runs all."""

    def __init__(self, function: Callable[..., None], builder: Any) -> None:
        self.function, self.builder = function, builder
        self.__name__, self.__globals__ = function.__name__, function.__globals__
        self.__signature__ = inspect.signature(function)
        self.calls: list[tuple[tuple[int, ...], dict[str, Any]]] = []

    def __call__(self, **arguments: Any) -> None:
        self.calls.append((tuple(self.builder.grid_idx), arguments))
        x, y, z = self.builder.grid_dim
        if len(self.calls) < x * y * z:
            return
        turns = self.builder.turns = _Turns(self.builder)
        calls, self.calls = self.calls, []
        for index, given in calls:
            turns.waiting.append(_Program(turns, index, lambda given=given: self.function(**given)))
        turns.hand_on()
        turns.over.wait()
        self.builder.turns = None
        if turns.failure is not None:
            raise turns.failure


def take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on programs of kernels with volatile loads take turns in the interpreter, and those with shared memory
    are threads too, by which `gluon_interpreted` tells them apart."""
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    start, load = interpreter.GridExecutor.__init__, type(builder).create_masked_load

    def started(executor: Any, function: Any, *args: Any, **named: Any) -> None:
        start(executor, function, *args, **named)
        if "volatile=True" in (source := inspect.getsource(function)) or "allocate_shared_memory" in source:
            executor.fn = _Kernel(function, builder)

    def loaded(self: Any, *given: Any) -> Any:
        *_, is_volatile = given  # what is ahead of it differs among releases
        if is_volatile and self.turns is not None:
            self.turns.swap()
        return load(self, *given)

    monkeypatch.setattr(builder, "turns", None, raising=False)
    monkeypatch.setattr(type(builder), "create_masked_load", loaded)
    monkeypatch.setattr(interpreter.GridExecutor, "__init__", started)
