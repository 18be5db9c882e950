"""What a sweep found, for people: the table at the end, and the one sentence that says whether it was worth it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from .evaluate import COMPILED, TORCH
from .model import RMS_NORM, Config, Problem, Silicon, Trial, TrialState
from .ops import op_spec
from .space import load_space
from .ties import tie_breakers

COLUMNS = ("direction", "rows", "hidden", "us", "TB/s", "of copy", "x torch", "x compile", "x default")
"""Of the table, without the winner."""

NAMED = ("op", "weight", "casting", "policy")
"""Columns of the database whose values do not say what they are."""

BELOW = (
    *("config", *NAMED, "offset", "sum in fp32", "dx only"),
    *("stage", "reason", "of half a sweep", "stale", "silicon"),
)
"""Columns of the database that go below the others where there is no room beside them."""

LONG_WORD = len("PROGRAMS_PER_SM=1")
"""What the end of a folded line may leave empty."""

NOT_TIMED = {
    TrialState.CONSTRAINT: "they spill where others do not",
    TrialState.DUPLICATE: "they are the machine code of another one on the same grid",
}
"""No failures: what a sweep leaves out on purpose."""

FAILURES_SHOWN = 20
"""Reasons listed at the end of a sweep, at most."""


@dataclass(frozen=True)
class Line:
    """One problem in the table. Times in us a call; factors are how many times faster the winner is; None = not
    measured. `band` is the share by which two measurements of one kernel of this problem differ, `tied` the configs
    within it of the best, the winner among them; `gains` says whether the winner beats the built-in default and torch's
    op by more."""

    direction: str
    rows: int
    hidden: int
    dtype: str
    winner: str
    us: float
    tb_per_s: float
    share_of_copy: float | None
    over_torch: float | None
    over_compiled: float | None
    over_default: float | None
    scratch_bytes: int | None
    band: float | None
    tied: tuple[str, ...]
    gains: bool | None
    op: str = RMS_NORM

    @property
    def gains_over_default(self) -> bool | None:
        """Whether tuning gained anything; None where that is not known."""
        if self.over_default is None or self.band is None:
            return None
        return self.over_default > 1 + self.band


def lines(finals: Sequence[Trial], winners: Mapping[Problem, Config], silicon: Silicon) -> list[Line]:
    """A line for each problem; `winners` are the database's, so that the table shows what will be dispatched."""
    found = []
    for problem, config in winners.items():
        own = [t for t in finals if t.problem == problem and t.measurement is not None]
        best = next((t for t in own if t.config == config), None)
        if best is not None:
            found.append(_line(problem, best, own, load_space(problem.op).default(problem, silicon)))
    return found


def _line(problem: Problem, best: Trial, own: Sequence[Trial], default: Config | None) -> Line:
    assert best.measurement is not None
    us = best.measurement.us

    def factor(config: Config | None) -> float | None:
        times = [t.measurement.us for t in own if t.config == config and t.measurement is not None]
        return times[0] / us if times else None

    return Line(
        direction=problem.direction,
        rows=problem.rows,
        hidden=problem.hidden,
        dtype=problem.x_dtype,
        winner=best.config.label(),
        us=us,
        tb_per_s=op_spec(problem.op).bytes_moved(problem) / us / 1e6,
        share_of_copy=1 / best.measurement.score,
        over_torch=factor(TORCH),
        over_compiled=factor(COMPILED),
        over_default=factor(default),
        scratch_bytes=best.scratch_bytes,
        band=best.band,
        tied=tuple(t.config.label() for t in own if t.tied),
        gains=best.gains,
        op=problem.op,
    )


def table(found: Sequence[Line], width: int) -> RenderableType:
    """The table at the end of a sweep on a GPU, for a terminal of that width."""
    cells = [_cells(line) for line in found]
    return _fitted(COLUMNS, cells, "winner", [line.winner for line in found], COLUMNS.index("us"), width)


def _cells(line: Line) -> list[str]:
    """The numbers of a line as text, by column."""
    factors = (line.share_of_copy, line.over_torch, line.over_compiled, line.over_default)
    size = (_named(line.op, line.direction), str(line.rows), str(line.hidden))
    equal = "=" if line.gains_over_default is False else ""
    return [*size, f"{line.us:.2f}", f"{line.tb_per_s:.2f}", *map(_number, factors[:-1]), _number(factors[-1]) + equal]


def estimated_table(found: Sequence[Trial], width: int, per_problem: int = 3) -> RenderableType:
    """The best-ranked candidates of each problem of a sweep without a GPU, for a terminal of that width."""
    cells, labels = [], []
    for problem in dict.fromkeys(t.problem for t in found):
        ranked = sorted(
            (t for t in found if t.problem == problem and t.estimate_us is not None and t.kind == "estimated"),
            key=_rank,
        )
        for place, trial in enumerate(ranked[:per_problem]):
            spent = trial.resources
            assert spent is not None
            numbers = map(str, (spent.registers, spent.spill_bytes, spent.shared_bytes))
            cells.append(["" if place else problem.label(), *numbers, f"{trial.estimate_us:.1f}"])
            labels.append(trial.config.label())
    columns = ("problem", "registers", "spilled B", "shared B", "estimate us")
    return _fitted(columns, cells, "candidate", labels, 1, width)


def stored_table(rows: Sequence[Mapping[str, str]], width: int) -> RenderableType:
    """Rows of the database, without the columns that are empty in all of them. Where they are wider than the terminal,
    what is long stands below the rest."""
    shown = [name for name in rows[0] if any(row[name] for row in rows)]
    if sum(max(len(name), *(len(row[name]) for row in rows)) + 3 for name in shown) <= width:
        result = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for name in shown:
            result.add_column(name, no_wrap=True)
        for row in rows:
            result.add_row(*(row[name] for name in shown))
        return result
    short = [name for name in shown if name not in BELOW]
    cells = [[row[name] for name in short] for row in rows]
    labels = [", ".join(_told(name, row[name]) for name in BELOW if row.get(name)) for row in rows]
    return _stacked(short, cells, labels, _widths(short, cells), width)


def _told(name: str, value: str) -> str:
    """A value where its column has no head."""
    return name if value == "yes" else f"{name} {value}" if name in NAMED else value


def _widths(columns: Sequence[str], cells: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(columns, *cells, strict=True)]


def _fitted(
    columns: Sequence[str], cells: Sequence[Sequence[str]], name: str, labels: Sequence[str], place: int, width: int
) -> RenderableType:
    """A table of cells, with labels as one more column called `name`. Where they would take more than two lines of it,
    each stands below its cells instead."""
    widths = _widths(columns, cells)
    longest = max(map(len, labels), default=0)
    room = width - sum(widths) - 3 * (len(columns) + 1) - 1  # the space around each column, and at the right end
    if room < longest and 2 * room < longest + LONG_WORD:
        return _stacked(columns, cells, labels, widths, width)
    result = Table(box=box.SIMPLE_HEAD)
    for i, column in enumerate(columns):
        if i == place:
            result.add_column(name, overflow="fold")
        result.add_column(column, justify="right" if i else "left", no_wrap=True)
    for row, label in zip(cells, labels, strict=True):
        result.add_row(*row[:place], label, *row[place:])
    return result


def _stacked(
    columns: Sequence[str], cells: Sequence[Sequence[str]], labels: Sequence[str], widths: Sequence[int], width: int
) -> RenderableType:
    """A line of cells, and below it its label over the whole width."""
    gap = "  " if sum(widths) + 2 * (len(widths) - 1) <= width else " "

    def line(row: Sequence[str]) -> Text:
        aligned = [cell.rjust(size) for cell, size in zip(row, widths, strict=True)]
        return Text(gap.join([row[0].ljust(widths[0]), *aligned[1:]]))

    below = [Padding(Text(label), (0, 0, 0, 4), expand=False) for label in labels]
    rows = [part for pair in zip(map(line, cells), below, strict=True) for part in pair]
    head = line(columns)
    head.stylize("bold")
    return Group(Text(), head, Text("\u2500" * len(head)), *rows, Text())


def _rank(trial: Trial) -> tuple[float, tuple[int, int, str]]:
    """The order of the database's winners: many estimates are ties."""
    return trial.estimate_us or 0.0, tie_breakers(trial)


def sentence(found: Sequence[Line]) -> str:
    """What is gained a call, or that it is not worth it."""
    known = [line for line in found if line.gains_over_default is not None]
    if not known:
        return "Nothing was compared with the built-in default."
    worth = [line for line in known if line.gains_over_default]
    if not worth:
        return (
            f"Not worth it: in {len(known)} problems no tuned choice is faster than the built-in default by more than "
            "two measurements of one kernel differ."
        )
    others = "; in the others (=) the difference is within what two measurements of one kernel differ by"
    others = others if len(worth) < len(known) else ""
    gains = {line: (line.over_default or 1.0) for line in worth}
    line = max(worth, key=lambda one: gains[one])
    saved = sum(one.us * (gain - 1) for one, gain in gains.items()) / len(worth)
    return (
        f"Gained: {len(worth)} of {len(known)} problems are faster than the built-in default, by {saved:.2f} us a call "
        f"on average, at most {gains[line]:.2f}x ({_named(line.op, line.direction)} {line.rows}x{line.hidden}){others}."
    )


def left_out_lines(left_out: Mapping[Problem, str]) -> list[str]:
    """Problems that have no result, with the reason."""
    return [f"left out: {problem.label()}: {why}" for problem, why in left_out.items()]


def time_line(seconds: Mapping[str, float], whole: float, gpus: int = 1) -> str:
    """What a sweep of `whole` seconds spent its time on, longest first; on several GPUs their seconds together."""
    parts = dict(sorted(seconds.items(), key=lambda item: -item[1]))
    parts["the rest"] = whole * gpus - sum(parts.values())
    shown = ", ".join(f"{value:.0f} s {what}" for what, value in parts.items() if value >= 0.5)
    return f"Spent{'' if gpus == 1 else f', on {gpus} GPUs together,'} {shown}."


def failure_lines(failed: Sequence[Trial], show: str) -> list[str]:
    """Every reason once, with the first candidate that it stopped; those of NOT_TIMED are one line each in all. `show`
    is the command that has the rest."""
    shown = []
    for (state, reason), candidates in _by_reason(failed).items():
        others = f" and {len(candidates) - 1} more" if len(candidates) > 1 else ""
        shown.append(f"{state}: {candidates[0]}{others}: {reason}")
    if (more := len(shown) - FAILURES_SHOWN) > 0:
        shown[FAILURES_SHOWN:] = [f"and {more} more reasons; `{show}` has them all"]
    for state, why in NOT_TIMED.items():
        if passed_over := len({_candidate(t) for t in failed if t.state is state}):
            shown.append(f"{state.value}: {passed_over} candidates were not timed, since {why}")
    return shown


def failures_as_json(failed: Sequence[Trial]) -> list[dict[str, Any]]:
    """The same, whole, as plain values."""
    return [{"state": s, "reason": r, "candidates": c} for (s, r), c in _by_reason(failed).items()]


def _by_reason(failed: Sequence[Trial]) -> dict[tuple[str, str], list[str]]:
    """Candidates by state and reason; one that fails alike at several row counts counts once."""
    found: dict[tuple[str, str], list[str]] = {}
    for trial in failed:
        if trial.state not in NOT_TIMED:
            candidates = found.setdefault((trial.state.value, trial.reason), [])
            if _candidate(trial) not in candidates:
                candidates.append(_candidate(trial))
    return found


def _candidate(trial: Trial) -> str:
    return f"{_named(trial.problem.op, trial.problem.direction)} {trial.config.label()}"


def _named(op: str, direction: str) -> str:
    """The direction, with the op where that is not the usual one."""
    return direction if op == RMS_NORM else f"{op} {direction}"


def as_json(found: Sequence[Line]) -> list[dict[str, Any]]:
    """The lines as plain values."""
    return [{**asdict(line), "tied": list(line.tied)} for line in found]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
