"""A file of results for people: a table on the terminal, one in Markdown, a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from .players import AGAIN, OURS, PLAYERS
from .rows import OK, Row
from .verdicts import LOST, WON, Contest, Standing, figure

COLORS = {WON: "green", LOST: "red"}


def printed(console: Console, contests: Sequence[Contest]) -> None:
    """A line a cell; then who has no time, and whose time comes without the strict gate."""
    table = Table("cell", *(title for title in HEADINGS[1:]), title="our RMSNorm beside the fastest rival")
    for one in contests:
        color = COLORS.get(one.best.verdict if one.best else "", "default")
        table.add_row(*summary(one), style=color)
    console.print(table)
    for line in remarks(contests):
        console.print(line, markup=False, highlight=False)


HEADINGS = ("cell", "ours, us", "of copy", "best rival", "its us", "of copy", "its time / ours", "band", "verdict")


def summary(one: Contest) -> tuple[str, ...]:
    """The line of a cell."""
    ours, best, factor = one.ours, one.best, one.best and one.best.over_ours
    return (
        one.cell.label(),
        *((f"{ours.us:.2f}", f"{ours.share:.3f}") if ours else ("not measured", "")),
        *((best.name, f"{best.us:.2f}", f"{best.share:.3f}") if best else ("none", "", "")),
        f"{factor.median:.3f}" if factor else "",
        "" if one.band is None else f"{one.band:.2%}",
        best.verdict if best else "",
    )


def remarks(contests: Sequence[Contest]) -> list[str]:
    """Each reason once, with the cells that it holds for."""
    reasons: dict[str, list[str]] = {}
    for contest in contests:
        for row in [*contest.without, *(one.row for one in contest.standings.values())]:
            if reason := remark(row):
                reasons.setdefault(reason, []).append(row.cell.label())
    return [
        f"{reason} ({cells[0] if len(cells) == 1 else f'{len(cells)} cells, such as {cells[0]}'})"
        for reason, cells in reasons.items()
    ]


def remark(row: Row) -> str:
    """What a reader must know of a line."""
    outcome = row.outcome
    if outcome.state != OK:
        return f"{outcome.player}: {outcome.state}: {outcome.note}"
    if outcome.gate == "failed":
        return f"{outcome.player}: timed though it fails the gate of {outcome.contract}"
    return ""


def markdown(contests: Sequence[Contest]) -> str:
    """A table a direction: a line a cell, a column a player; the best rival is in bold."""
    text = [about(contests)]
    for op, direction in dict.fromkeys((one.cell.op, one.cell.direction) for one in contests):
        of_table = [one for one in contests if (one.cell.op, one.cell.direction) == (op, direction)]
        names = [p.name for p in PLAYERS if p.name != AGAIN and any(p.name in one.standings for one in of_table)]
        text += ["", f"{op}, {direction}", "", _line(["rows x hidden", *names, "verdict", "band"])]
        text.append(_line(["---"] * (len(names) + 3)))
        text += [_line(_cells(one, names)) for one in of_table]
    return "\n".join([*text, "", *(f"- {line}" for line in remarks(contests)), ""])


def about(contests: Sequence[Contest]) -> str:
    """What the figures are and were measured on."""
    stamps = {row.stamp for one in contests for row in (*one.without, *(s.row for s in one.standings.values()))}
    machines = {f"{s.gpu}, torch {s.torch}, Triton {s.triton}, driver {s.driver}" for s in stamps if s.gpu}
    versions = {s.name: s.row.outcome.version for one in contests for s in one.standings.values()}
    packages = {f"{p.package} {versions[p.name]}" for p in PLAYERS if p.package != "torch" and versions.get(p.name)}
    return (
        f"{'; '.join(sorted(machines))}. Share of the speed of `copy_`, by the bytes that a call must move; "
        f"microseconds where that is less than 60 MB. {', '.join(sorted(packages))}."
    )


def _cells(one: Contest, names: Sequence[str]) -> list[str]:
    dtype = "" if one.cell.dtype == "bf16" else f" {one.cell.dtype}"
    figures = [_figure(one.standings.get(name), one.best) for name in names]
    verdict = one.best.verdict if one.best else ""
    return [one.cell.shape + dtype, *figures, verdict, "" if one.band is None else f"{one.band:.2%}"]


def _figure(one: Standing | None, best: Standing | None) -> str:
    if one is None:
        return "-"
    return f"**{figure(one)}**" if best and one.name == best.name else figure(one)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def draw(contests: Sequence[Contest], path: Path) -> None:
    """A PNG file: a panel a direction, a line a cell, each player by its speed over ours. Raises ImportError without
    matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    directions = list(dict.fromkeys((one.cell.op, one.cell.direction) for one in contests))
    height = 1.5 + 0.3 * max(sum((c.cell.op, c.cell.direction) == d for c in contests) for d in directions)
    figure = Figure(figsize=(5.5 * len(directions), height), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    for axes, direction in zip(figure.subplots(1, len(directions), squeeze=False)[0], directions, strict=True):
        _panel(axes, [one for one in contests if (one.cell.op, one.cell.direction) == direction])
        axes.set_title(", ".join(direction), fontsize=10)
    handles = {
        text: handle for axes in figure.axes for handle, text in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=6, fontsize=8, frameon=False)
    canvas.print_png(str(path))


def _panel(axes: Any, contests: Sequence[Contest]) -> None:
    places = {one.cell: -number for number, one in enumerate(contests)}
    for number, player in enumerate(player for player in PLAYERS if player.name not in (OURS, AGAIN)):
        found = [(one.cell, s.over_ours) for one in contests if (s := one.standings.get(player.name)) and s.over_ours]
        if found:
            speeds, heights = [1 / r.median for _, r in found], [places[cell] for cell, _ in found]
            marker, color = "os^"[number // 10], f"C{number % 10}"
            axes.scatter(speeds, heights, s=18, marker=marker, color=color, label=player.name)
    for one in contests:
        if one.band is not None:
            axes.plot([1 / (1 + one.band), 1 + one.band], [places[one.cell]] * 2, color="black", linewidth=4, alpha=0.4)
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set_yticks(list(places.values()), [f"{c.shape} {c.dtype}" for c in places], fontsize=8)
    axes.set_xlabel("speed over ours: left of 1 is slower (black: the band)", fontsize=8)
    axes.set_xlim(left=0)


def written(contests: Sequence[Contest], results: Path) -> list[str]:
    """The Markdown table and the picture beside a file of results; tells what was written."""
    table, picture = results.with_suffix(".md"), results.with_suffix(".png")
    table.write_text(markdown(contests), encoding="utf-8")
    try:
        draw(contests, picture)
    except ImportError as error:
        return [f"wrote {table}", f"no picture: {error}"]
    return [f"wrote {table}", f"wrote {picture}"]
