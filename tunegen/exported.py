"""A file by `tunegen export`, read and checked: nothing of it is trusted, and a mistake is told with line and key."""

from __future__ import annotations

import io
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TextIO

from . import packed, records
from .errors import ExportError
from .exporting import FORMAT, SCHEMA, TABLES, Row
from .migrations import Column, tables
from .model import CASTINGS, DIRECTIONS, DTYPE_BYTES, Config, TrialState
from .paths import on_database

CHOICES: dict[str, tuple[object, ...]] = {
    "sweep.state": ("running", "finished", "interrupted"),
    "trial.state": tuple(state.value for state in TrialState),
    "trial.stage": ("screen", "final"),
    "trial.kind": ("measured", "estimated", "baseline"),
    "trial.direction": DIRECTIONS,
    "trial.x_dtype": tuple(DTYPE_BYTES),
    "trial.weight_dtype": (*DTYPE_BYTES, ""),
    "trial.casting": CASTINGS,
    **{f"trial.{name}": (0, 1) for name in ("offset", "weight_grad", "residual", "sum_in_fp32")},
    "trial.tied": (0, 1, 2, None),
    "trial.gains": (0, 1, None),
    "samples.kept": (0, 1),
}
"""What the columns of a fixed set of values may hold."""
POSITIVE = ("hidden", "rows", "us", "score", "sentinel_us", "estimate_us")
LONGEST_LINE = 2**24
"""Characters; a trial with its samples has some thousands. Not every file ends, nor every line: /dev/zero does not."""
ELSEWHERE = {"silicon": (), "sweep": (), "trial": ("id",)}
"""Columns that a file does not hold: the database numbers its trials itself."""


@dataclass(frozen=True)
class Exported:
    """The rows of a file: ids are those of the file, and a trial has a list `samples` of rows."""

    silicon: list[Row]
    sweeps: list[Row]
    trials: list[Row]


@dataclass(frozen=True)
class _Line:
    """A line of the file, for what is wrong with it."""

    path: Path
    number: int

    def wrong(self, key: str, message: str) -> NoReturn:
        raise ExportError(f"{self.path}:{self.number}: {key}: {message}")


def read_export(path: Path) -> Exported:
    """Read the whole file.

    Raises ExportError: it cannot be read or unpacked, is of another format or a later schema, is cut short, or a record
    is not as this module of tunegen would have written it; the message names the line and the key.
    """
    found: dict[str, list[Row]] = {kind: [] for kind in TABLES}
    header: Row | None = None
    keys: dict[tuple[object, ...], int] = {}
    line = _Line(path, 1)
    try:
        with _opened(path) as file:
            for number, text in enumerate(iter(lambda: file.readline(LONGEST_LINE + 2), ""), 1):
                line = _Line(path, number)
                if len(text.rstrip("\n")) > LONGEST_LINE:
                    line.wrong("the line", f"has more than {LONGEST_LINE} characters; {_ADVICE}")
                record = _record(text, line)
                if header is None:
                    header = _header(record, line)
                    continue
                kind = record.pop("record", None)
                if not isinstance(kind, str) or kind not in found:
                    line.wrong("record", f"must be one of {', '.join(found)}, got {_shown(kind)}")
                found[kind].append(_row(kind, record, found, line))
                if kind == "trial":
                    _once(found[kind][-1], keys, line)
    except OSError as error:
        raise ExportError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError:
        if _is_database(path):
            export = on_database("tunegen export FILE", path)
            raise ExportError(f"{path} is a database; `{export}` makes a file of it that can be imported") from None
        line.wrong("the line", f"no text in UTF-8, here or soon after; {_ADVICE}")
    if header is None:
        raise ExportError(f"{path}:1: record: the file is empty; {_ADVICE}")
    for kind, rows in found.items():
        if len(rows) != header[kind]:
            _Line(path, 1).wrong(kind, f"says {header[kind]}, but the file has {len(rows)}: it is not whole")
    return Exported(found["silicon"], found["sweep"], found["trial"])


_ADVICE = "make one with `tunegen export`"


def _is_database(path: Path) -> bool:
    """Whether it begins as files of SQLite do."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(16) == b"SQLite format 3\0"


def _opened(path: Path) -> TextIO:
    if packed.is_packed(path):
        return io.TextIOWrapper(io.BytesIO(packed.unpack(path)), encoding="utf-8", newline="\n")
    return path.open(encoding="utf-8", newline="\n")


def _record(text: str, line: _Line) -> Row:
    def constant(name: str) -> NoReturn:
        raise ValueError(f"{name} is no number")

    try:
        record = json.loads(text, parse_constant=constant)
    except (ValueError, RecursionError) as error:
        line.wrong("the line", f"no JSON: {error}; {_ADVICE}")
    if not isinstance(record, dict):
        line.wrong("the line", f"must be an object, got {_shown(record)}; {_ADVICE}")
    return record


def _header(record: Row, line: _Line) -> Row:
    if record.get("record") != "header":
        line.wrong("record", f"must be header, got {_shown(record.get('record'))}: no file by `tunegen export`")
    if not _whole(record.get("format")) or record["format"] != FORMAT:
        line.wrong("format", f"must be {FORMAT}, got {_shown(record.get('format'))}: by another version of tunegen")
    if not _whole(record.get("schema")) or not 1 <= record["schema"] <= SCHEMA:
        got = _shown(record.get("schema"))
        line.wrong("schema", f"must be 1 to {SCHEMA}, got {got}: by a later tunegen; upgrade this one")
    for kind in TABLES:
        if not _whole(record.get(kind)):
            line.wrong(kind, f"must be how many there are, got {_shown(record.get(kind))}")
    return record


def _row(kind: str, record: Row, found: dict[str, list[Row]], line: _Line) -> Row:
    """The record as a row of its table, with every column."""
    blocks = record.pop("samples", {}) if kind == "trial" else {}
    columns = {name: c for name, c in tables()[TABLES[kind]].items() if name not in ELSEWHERE[kind]}
    if unknown := sorted(record.keys() - columns.keys()):
        line.wrong(unknown[0], f"unknown; a {kind} has {', '.join(columns)}")
    row = {name: _value(kind, name, record.get(name), column, line) for name, column in columns.items()}
    for name, of in (("silicon_id", "silicon"), ("sweep_id", "sweep")):
        if name in row and not 1 <= row[name] <= len(found[of]):
            line.wrong(name, f"no {of} of that number stands above, got {row[name]}")
    if kind != "trial" and row["id"] != len(found[kind]) + 1:
        line.wrong("id", f"must be {len(found[kind]) + 1}, got {row['id']}: they count from 1")
    return row if kind != "trial" else _trial(row, blocks, line)


def _trial(row: Row, blocks: object, line: _Line) -> Row:
    try:
        canonical = Config.read(row["family"], row["parameters"]).to_json()
    except ValueError:
        canonical = None
    if row["parameters"] != canonical:
        line.wrong("parameters", f"must be a JSON object with sorted keys, as text, got {_shown(row['parameters'])}")
    return {**row, "samples": _samples(blocks, line)}


def _samples(blocks: object, line: _Line) -> list[Row]:
    columns = {name: column for name, column in tables()["samples"].items() if name != "trial_id"}
    if not isinstance(blocks, dict) or not all(isinstance(values, list) for values in blocks.values()):
        line.wrong("samples", f"must hold a list for each column, got {_shown(blocks)}")
    if unknown := sorted(blocks.keys() - columns.keys()):
        line.wrong(f"samples.{unknown[0]}", f"unknown; samples have {', '.join(columns)}")
    count = max(map(len, blocks.values()), default=0)
    if short := [name for name, values in blocks.items() if len(values) != count]:
        line.wrong(f"samples.{short[0]}", f"has {len(blocks[short[0]])} values where others have {count}")
    whole = {name: blocks.get(name, [None] * count) for name in columns}
    rows = [
        {name: _value("samples", name, whole[name][i], column, line) for name, column in columns.items()}
        for i in range(count)
    ]
    if len({row["block"] for row in rows}) != count:
        line.wrong("samples.block", "has a number twice")
    return rows


def _value(kind: str, name: str, value: Any, column: Column, line: _Line) -> Any:
    """A column's value, or its default where the file has none."""
    key = f"samples.{name}" if kind == "samples" else name
    if value is None and column.default is not None:
        return int(column.default)
    if value is None and not column.nullable:
        line.wrong(key, "missing")
    allowed = CHOICES.get(f"{kind}.{name}")
    if allowed and value not in allowed:
        line.wrong(key, f"must be one of {', '.join(map(str, allowed))}, got {_shown(value)}")
    if value is not None and not (type(value) in records.TYPES[column.kind] and _storable(value)):
        line.wrong(key, f"must be {records.MEANT[column.kind]}, got {_shown(value)}")
    if name in POSITIVE and value is not None and value <= 0:
        line.wrong(key, f"must be above 0, got {_shown(value)}")
    return float(value) if column.kind == "REAL" and value is not None else value


def _storable(value: str | int | float) -> bool:
    """Whether SQLite can hold it: integers of 64 bits, text that is text."""
    if isinstance(value, str):
        return not any("\ud800" <= letter <= "\udfff" for letter in value)
    return -(2**63) <= value < 2**63 and math.isfinite(value)


def _once(row: Row, keys: dict[tuple[object, ...], int], line: _Line) -> None:
    key = tuple(row[name] for name in records.KEY)
    if (first := keys.setdefault(key, line.number)) != line.number:
        line.wrong("the line", f"has the trial of line {first} again")


def _whole(value: object) -> bool:
    return type(value) is int and value >= 0


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
