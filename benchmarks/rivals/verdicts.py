"""From times to verdicts: who is ahead in a cell, and whether by more than the same kernel differs from itself."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from paired import Ratio, beyond, ratio

from tunegen.ties import LARGE

from .cells import CELLS, Cell
from .players import AGAIN, COPY, DEFAULT, OURS
from .rows import OK, Row

WON, LEVEL, LOST, NO_BAND = "won", "level within the band", "lost", "no band"


class Standing(NamedTuple):
    """One player of a cell: microseconds, share of the copy's speed, its time over ours, and the verdict on ours. The
    last two are None where ours has no time."""

    row: Row
    us: float
    share: float
    over_ours: Ratio | None
    verdict: str

    @property
    def name(self) -> str:
        """The player's."""
        return self.row.outcome.player


class Contest(NamedTuple):
    """A cell: ours if it has a time, everybody with a time, the fastest rival, the band as a share, and the lines
    without a time."""

    cell: Cell
    ours: Standing | None
    standings: dict[str, Standing]
    best: Standing | None
    band: float | None
    without: list[Row]


def contests(rows: Iterable[Row]) -> list[Contest]:
    """By cell, in the order of CELLS. A player that was measured more than once counts with its last time, compared
    within that session."""
    cells: dict[Cell, list[Row]] = {}
    for row in rows:
        cells.setdefault(row.cell, []).append(row)
    order = {cell: number for number, cell in enumerate(CELLS)}
    return [contest(cell, cells[cell]) for cell in sorted(cells, key=lambda cell: order.get(cell, len(order)))]


def contest(cell: Cell, rows: Sequence[Row]) -> Contest:
    """Of a cell's lines."""
    sessions: dict[str, dict[str, Row]] = {}
    for row in rows:
        if row.outcome.state == OK:
            sessions.setdefault(row.stamp.session, {})[row.outcome.player] = row
    standings = {name: standing(row, session) for session in sessions.values() for name, row in session.items()}
    rivals = [one for one in standings.values() if one.name not in (OURS, AGAIN, DEFAULT, COPY)]
    compared = [one for one in rivals if one.over_ours] or rivals
    best = min(compared, key=lambda one: one.over_ours.median if one.over_ours else one.us, default=None)
    again = standings.get(AGAIN)
    width = max(again.over_ours.high, 1 / again.over_ours.low) - 1 if again and again.over_ours else None
    without = {row.outcome.player: row for row in rows if row.outcome.player not in standings}
    return Contest(cell, standings.get(OURS), standings, best, width, list(without.values()))


def standing(row: Row, session: dict[str, Row]) -> Standing:
    """A player against ours and the copy of the same session."""
    blocks, copy = row.outcome.blocks, session.get(COPY)
    us = statistics.median(blocks)
    share = row.cell.streams / 2 * statistics.median(copy.outcome.blocks) / us if copy else float("nan")
    if OURS not in session:
        return Standing(row, us, share, None, "")
    ours = session[OURS].outcome.blocks
    same = ratio(session[AGAIN].outcome.blocks, ours) if AGAIN in session else None
    return Standing(row, us, share, ratio(blocks, ours), verdict(blocks, ours, same))


def verdict(rival: Sequence[float], ours: Sequence[float], same: Ratio | None) -> str:
    """On ours: the near end of the interval of the ratio against the far end of that of ours with itself."""
    if same is None:
        return NO_BAND
    if beyond(ratio(rival, ours), same):
        return WON
    return LOST if beyond(ratio(ours, rival), same) else LEVEL


def figure(one: Standing) -> str:
    """The share of copy; where little is moved, microseconds: a copy is no limit there."""
    if one.row.cell.bytes_moved >= LARGE:
        return f"{one.share:.3f}".removeprefix("0")
    return f"{one.us:.1f} us" if one.us >= 10 else f"{one.us:.2f} us"
