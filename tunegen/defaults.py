"""The `defaults` of a search space, made from what a database holds for one kind of GPU: `tunegen export --defaults`.

The rule. Of each measured problem those finals may be its default that are tied with the best, or the fastest kernel
where torch's own op won alone. At each width the one is taken that may be the default at most row counts, then, for the
row counts that remain, again; among equals one without atomic additions, whose bits do not vary, then one that the
width below has, then one that is tied at more problems of the table, then the first by its text. A choice holds for the
widths nearer to its own than to another measured one, half the least and twice the largest included, and for the row
counts nearer, by their ratio, to those where it was chosen, an eighth of the least and all above included. Neighbours
with the same choices are one entry. Entries of a dtype of another size than 2 bytes say so, and belong in front.
"""

from __future__ import annotations

import itertools
import math
import tempfile
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from . import records
from .errors import ExportError
from .expressions import Rule
from .model import DTYPE_BYTES, Config, Problem, Silicon, rows_bucket
from .paths import on_database
from .policies import DETERMINISTIC
from .space import SearchSpace, load_space
from .store import Store

REACH = 8
"""Row counts below the least measured one, by this factor, still get its choice."""
USUAL_BYTES = 2
"""Of an element of x. What was measured of bf16 is the default of other dtypes too, but for those with their own."""
WIDTH = 116
Span = tuple[int | None, int | None]
"""Above the first, up to the second; None where nothing limits it."""


@dataclass(frozen=True, eq=False)
class Cell:
    """A measured problem: the scores of its finals, and which of them may be its default."""

    problem: Problem
    scores: Mapping[Config, float]
    fit: frozenset[Config]

    @property
    def best(self) -> float:
        """The score of the fastest final, torch's own op included."""
        return min(self.scores.values())

    @property
    def where(self) -> str:
        """Rows by width."""
        return f"{self.problem.rows}x{self.problem.hidden}"


@dataclass(frozen=True)
class Measured:
    """What a database has of one operator in one dtype, on one GPU and Triton."""

    silicon: Silicon
    triton: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Section:
    """One choice, for a span of widths and one of row counts; `cells` are those it was chosen at."""

    hidden: Span
    rows: Span
    choice: Config
    cells: tuple[Cell, ...]


def defaults_yaml(store: Store, space: SearchSpace, arch: str | None, x_dtype: str, filters: Mapping[str, Any]) -> str:
    """The section as text, with what it loses against the fastest final of each measured problem; loaded and asked
    before it is returned.

    Raises ExportError where the database holds no finals of this operator, dtype and architecture.
    """
    found = measured(store, space, arch, x_dtype, filters)
    text = _text(space, found)
    target = f"{found.silicon.name} (sm_{found.silicon.capability}), Triton {found.triton}, {space.op} {x_dtype}"
    head = f"{target}, {len(found.cells)} problems; loss against the fastest final: {loss(space, text, found)}."
    lines = textwrap.wrap(f"Made by `tunegen export --defaults`: {head}", WIDTH)
    return "".join(f"# {line}\n" for line in lines) + text


def measured(store: Store, space: SearchSpace, arch: str | None, x_dtype: str, filters: Mapping[str, Any]) -> Measured:
    """The finals of the usual contract, of the GPU and Triton that have most problems."""
    usual = records.problem_row(Problem(space.op, "", 1, 1, x_dtype, x_dtype))
    wanted = {
        name: value for name, value in usual.items() if name not in ("direction", "hidden", "rows", "weight_grad")
    }
    wanted |= {name: records.plain(name, value) for name, value in filters.items()}
    sql = f"""SELECT * FROM trials WHERE stage = 'final' AND kind = 'measured' AND state = 'ok' AND score IS NOT NULL
        AND silicon_id IN (SELECT id FROM silicon) AND {records.equal(wanted)} ORDER BY id"""
    with store.reading():
        silicon = {row.pop("id"): Silicon(**row) for row in records.typed(store.rows("SELECT * FROM silicon", {}))}
        finals = records.typed(store.rows(sql, wanted))
        rows = [row for row in finals if arch in (None, silicon[row["silicon_id"]].arch)]
        sql = f"""SELECT silicon_id FROM trials WHERE kind = 'estimated' AND silicon_id IN (SELECT id FROM silicon)
            AND {records.equal(wanted)}"""
        estimates = sum(arch in (None, silicon[row["silicon_id"]].arch) for row in store.rows(sql, wanted))
    if not rows:
        which = " ".join([space.op, x_dtype, *(f"{name} {value}" for name, value in filters.items())])
        there = f", but {estimates} estimate{'s' * (estimates > 1)}" if estimates else ""
        sweep, load = (on_database(f"tunegen {what}", store.path) for what in ("sweep", "import FILE"))
        raise ExportError(
            f"{store.path} holds no finals of {which} on {arch or 'any GPU'}{there}; finals are the times of the last "
            f"round of a sweep on a GPU: run `{sweep}` there, or `{load}` with what it measured"
        )
    if len(known := sorted({silicon[row["silicon_id"]].arch for row in rows})) > 1:
        raise ExportError(f"{store.path} holds finals on {', '.join(known)}; choose one with --arch")
    problems = {(row["silicon_id"], row["triton"], row["protocol"], records.problem_of(row)) for row in rows}
    (chip, triton, protocol), _ = max(Counter(p[:3] for p in problems).items(), key=lambda item: (item[1], item[0]))
    groups: dict[Problem, list[dict[str, Any]]] = {}
    for row in rows:
        if (row["silicon_id"], row["triton"], row["protocol"]) == (chip, triton, protocol):
            groups.setdefault(records.problem_of(row), []).append(row)
    cells = [_cell(space, silicon[chip], problem, finals) for problem, finals in groups.items()]
    whole = tuple(sorted((c for c in cells if c.fit), key=lambda c: (c.problem.hidden, c.problem.rows)))
    return Measured(silicon[chip], triton, whole)


def _cell(space: SearchSpace, silicon: Silicon, problem: Problem, finals: Sequence[Mapping[str, Any]]) -> Cell:
    scores: dict[Config, float] = {}
    tied: set[Config] = set()
    for row in finals:
        try:
            config = Config.read(row["family"], row["parameters"])
        except ValueError:
            continue  # a row of nonsense costs itself only
        scores[config] = min(row["score"], scores.get(config, math.inf))
        tied |= {config} if row["tied"] else set()
    kernels = [config for config in scores if _allowed(space, silicon, problem, config)]
    fit = frozenset(tied.intersection(kernels)) or frozenset(sorted(kernels, key=lambda config: scores[config])[:1])
    return Cell(problem, scores, fit)


def _allowed(space: SearchSpace, silicon: Silicon, problem: Problem, config: Config) -> bool:
    family = space.family(problem.direction, config.family)
    return family is not None and not family.baseline and space.check(problem, silicon, config) is None


def loss(space: SearchSpace, text: str, found: Measured) -> str:
    """What the section loses at worst, asked of the search space with it in place of its defaults."""
    source = space.path.read_text("utf-8").partition("\ndefaults:")[0]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"{space.op}.yaml")
        path.write_text(f"{source}\n{text}", "utf-8")
        asked = load_space(space.op, path)
    losses, untimed = {}, []
    for cell in found.cells:
        answer = asked.default(cell.problem, found.silicon)
        if answer is not None and answer in cell.scores:
            losses[cell] = cell.scores[answer] / cell.best - 1
        else:
            untimed.append(f"{cell.problem.label()} ({answer.label() if answer else 'none'})")
    worst = max(losses, key=lambda cell: losses[cell], default=None)
    told = f"worst {losses[worst]:.1%} at {worst.problem.label()}".replace("%", " %") if worst else "unknown"
    return told + (f"; not timed at {', '.join(untimed)}" if untimed else "")


def sections(space: SearchSpace, silicon: Silicon, cells: Sequence[Cell]) -> list[Section]:
    """The entries of one direction, by width and then by row count; cells of one bucket count as the largest of it."""
    slots = {(c.problem.hidden, rows_bucket(c.problem.rows)): c for c in cells}
    widths = sorted({hidden for hidden, _ in slots})
    above = [*((a + b) // 2 for a, b in itertools.pairwise(widths)), 2 * widths[-1]]
    below = [(widths[0] - 1) // 2, *above]
    everywhere = Counter(_free(space, c.problem, config) for c in slots.values() for config in c.fit)
    found: list[Section] = []
    last: list[Section] = []
    for hidden, least, most in zip(widths, below, above, strict=False):
        own = {bucket: cell for (width, bucket), cell in sorted(slots.items()) if width == hidden}
        chosen = _chosen(space, silicon, own, {s.choice for s in last}, everywhere)
        now = [Section((least, most), rows, choice, part) for rows, choice, part in _spans(own, chosen)]
        if [(s.rows, s.choice) for s in now] == [(s.rows, s.choice) for s in last]:
            now = [
                Section((b.hidden[0], most), s.rows, s.choice, b.cells + s.cells)
                for b, s in zip(last, now, strict=True)
            ]
            del found[-len(now) :]
        found += now
        last = now
    return found


def _free(space: SearchSpace, problem: Problem, config: Config) -> Config:
    """The config without what its family computes."""
    family = space.family(problem.direction, config.family)
    assert family is not None
    return Config.of(config.family, {k: v for k, v in config.parameters if not isinstance(family.parameters[k], Rule)})


def _chosen(
    space: SearchSpace,
    silicon: Silicon,
    cells: Mapping[int, Cell],
    before: set[Config],
    everywhere: Mapping[Config, int],
) -> dict[int, Config]:
    """The choice at each row count of one width."""
    asked = [replace(cell.problem, policy=DETERMINISTIC) for cell in cells.values()]
    steady = {family.name for problem in asked for family in space.families(problem, silicon)}
    fit = {bucket: {_free(space, cell.problem, config) for config in cell.fit} for bucket, cell in cells.items()}
    found: dict[int, Config] = {}
    while open_ := fit.keys() - found.keys():
        served = Counter(config for bucket in open_ for config in fit[bucket])
        best = min(
            served, key=lambda c: (-served[c], c.family not in steady, c not in before, -everywhere[c], c.label())
        )
        found |= {bucket: best for bucket in open_ if best in fit[bucket]}
    return found


def _spans(cells: Mapping[int, Cell], chosen: Mapping[int, Config]) -> Iterator[tuple[Span, Config, tuple[Cell, ...]]]:
    """Runs of row counts with one choice."""
    buckets = sorted(cells)
    least: int | None = buckets[0] // REACH - 1 if buckets[0] > REACH else None
    for choice, run in itertools.groupby(buckets, key=lambda bucket: chosen[bucket]):
        own = list(run)
        following = buckets[buckets.index(own[-1]) + 1 :]
        most = math.isqrt(own[-1] * following[0]) if following else None
        yield (least, most), choice, tuple(cells[bucket] for bucket in own)
        least = most


def _text(space: SearchSpace, found: Measured) -> str:
    lines = ["defaults:"]
    for direction in ("forward", "backward"):
        cells = [cell for cell in found.cells if cell.problem.direction == direction]
        if not cells:
            continue
        lines += [f"  {direction}:", f"    sm{found.silicon.capability}:"]
        for weight_grad in (True, False):
            if own := [cell for cell in cells if cell.problem.weight_grad is weight_grad]:
                which = ("WEIGHT_GRAD" if weight_grad else "not WEIGHT_GRAD") if direction == "backward" else ""
                if (size := DTYPE_BYTES[own[0].problem.x_dtype]) != USUAL_BYTES:
                    which = " and ".join(filter(None, (which, f"X_BYTES == {size}")))
                for section in sections(space, found.silicon, own):
                    lines += _entry(space, section, which)
    return "\n".join(lines) + "\n"


def _entry(space: SearchSpace, section: Section, which: str) -> list[str]:
    """A comment with the share of the sentinel at each measured problem, and the entry."""
    shares = []
    for cell in section.cells:
        score = min(cell.scores[c] for c in cell.fit if _free(space, cell.problem, c) == section.choice)
        shares.append(f"{1 / score:.2f}".removeprefix("0") + f" at {cell.where}")
    when = " and ".join(filter(None, (which, _condition("N", section.hidden), _condition("M", section.rows))))
    parts = [
        f'when: "{when}"',
        f"family: {section.choice.family}",
        *(f"{k}: {v}" for k, v in section.choice.parameters),
    ]
    comment = [f"      # {line}" for line in textwrap.wrap(", ".join(shares), WIDTH - 8)]
    # No line ends inside a part.
    whole = "{" + ", ".join(part.replace(" ", "\u00a0") for part in parts) + "}"
    body = [line.replace("\u00a0", " ") for line in textwrap.wrap(whole, WIDTH - 8, break_on_hyphens=False)]
    return [*comment, f"      - {body[0]}", *(f"         {line}" for line in body[1:])]


def _condition(name: str, span: Span) -> str:
    least, most = span
    if least is None:
        return "" if most is None else f"{name} <= {most}"
    return f"{name} > {least}" if most is None else f"{least} < {name} <= {most}"
