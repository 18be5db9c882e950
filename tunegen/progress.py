"""Progress of a sweep: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from .model import Trial, TrialState

PLAIN_SECONDS = 5.0
"""Plain lines of progress are at least this far apart."""


class SweepProgress:
    """Shows how a sweep gets on, a bar for each GPU; a listener of `sweep` for a single one."""

    def __init__(self, console: Console) -> None:
        self.console, self.live = console, console.is_terminal
        self.failures: list[Trial] = []
        self._bars: dict[str, _Bar] = {}
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[best]}", markup=False),
            console=console,
            disable=not self.live,
        )

    def __enter__(self) -> SweepProgress:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        for bar in self._bars.values():
            bar.summary()
        self._progress.stop()

    def of(self, name: str) -> _Bar:
        """The listener of one of several GPUs."""
        if name not in self._bars:
            self._bars[name] = _Bar(self.console, self._progress, self.failures, f"{name}: " if name else "")
        return self._bars[name]

    def stage(self, text: str, total: int) -> None:
        """Of a single GPU."""
        self.of("").stage(text, total)

    def trial(self, trial: Trial) -> None:
        """Of a single GPU."""
        self.of("").trial(trial)


class _Bar:
    """A listener of `sweep`: the problem in hand, the best so far, candidates done and time left."""

    def __init__(self, console: Console, progress: Progress, failures: list[Trial], name: str) -> None:
        self.console, self.live, self.failures, self.name = console, console.is_terminal, failures, name
        self.done = self.total = 0
        self.best: Trial | None = None
        self._said = 0.0
        self._progress = progress
        self._task: TaskID | None = None

    def stage(self, text: str, total: int) -> None:
        """A new bar, or a line."""
        self.summary()
        self.best, self.done, self.total = None, 0, total
        if self._task is not None:
            self._progress.remove_task(self._task)
        text = f"{self.name}{text}"
        self._task = self._progress.add_task(text, total=total or None, best="")
        if not self.live:
            self.console.print(f"{text}: {total} candidates" if total else text, soft_wrap=True)

    def trial(self, trial: Trial) -> None:
        """One step."""
        self.done += 1
        if trial.state is not TrialState.OK:
            self.failures.append(trial)
        elif trial.kind != "baseline" and (self.best is None or _time(trial) < _time(self.best)):
            self.best = trial
        if self._task is not None:
            self._progress.update(self._task, completed=min(self.done, self.total), best=self._best(short=True))
        if not self.live and time.monotonic() - self._said > PLAIN_SECONDS:
            self._said = time.monotonic()
            self.console.print(f"  {self.name}{self.done} of {self.total}: {self._best()}", soft_wrap=True)

    def _best(self, short: bool = False) -> str:
        if self.best is None:
            return "nothing valid yet"
        kind = "best" if self.best.measurement else "best estimate"
        name = self.best.config.family if short else self.best.config.label()
        return f"{kind} {_time(self.best):.2f} us {name}"

    def summary(self) -> None:
        """The end of a stage as a line, where no bar shows it."""
        if self.done and not self.live:
            self.console.print(f"  {self.name}{self.done} done, {self._best()}", soft_wrap=True)


def _time(trial: Trial) -> float:
    if trial.measurement is not None:
        return trial.measurement.us
    return trial.estimate_us if trial.estimate_us is not None else float("inf")


@contextmanager
def spoken(console: Console) -> Iterator[Callable[[str], None]]:
    """A function that shows a text such as `part: where it is`: in place on a terminal, elsewhere as a line, the first
    of each part and then one in PLAIN_SECONDS."""
    if console.is_terminal:
        with console.status("") as status:
            yield status.update
        return
    before, last = "", 0.0

    def say(text: str) -> None:
        nonlocal before, last
        part, now = text.partition(":")[0], time.monotonic()
        if part != before or now - last > PLAIN_SECONDS:
            console.print(text, soft_wrap=True)
            before, last = part, now

    yield say
