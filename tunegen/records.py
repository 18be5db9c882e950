"""Rows of the database that records become, and records again; the SQL of a row."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime, timezone
from typing import Any

from .errors import StoreError
from .migrations import tables
from .model import Conditions, Config, Measurement, Problem, Resources, Silicon, Trial, TrialState
from .silicon import FACTS

PROBLEM = tuple(field.name for field in fields(Problem))
SILICON = ("name", *FACTS)
KEY = ("silicon_id", "triton", "protocol", *PROBLEM, "family", "parameters", "digest", "stage", "kind")
SAME_PROBLEM = ("silicon_id", "triton", "protocol", *PROBLEM, "stage")
RESOURCES = ("registers", "spill_bytes", "shared_bytes", "binary")
MEASUREMENT = ("us", "score", "sentinel_us")
JUDGEMENT = ("band", "tied", "gains")
LOADED = (
    "torch",
    *("family", "parameters", "digest", "stage", "state", "reason", "scratch_bytes", "error_ulp", "estimate_us"),
    *JUDGEMENT,
    *RESOURCES,
    *MEASUREMENT,
)
NUMBERS = (
    *("registers", "spill_bytes", "shared_bytes", "scratch_bytes", "error_ulp", "estimate_us"),
    *MEASUREMENT,
    *JUDGEMENT,
)


TYPES = {"TEXT": (str,), "INTEGER": (int,), "REAL": (int, float)}
MEANT = {"TEXT": "text", "INTEGER": "a whole number", "REAL": "a number"}
"""What a column of each kind holds, and in words."""


@dataclass(frozen=True)
class StoredTrial(Trial):
    """A trial as the database holds it, with the number of its row and the release of torch that ran it."""

    id: int = 0
    torch: str = ""


def now() -> str:
    """The time in UTC, as all rows hold it."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def plain(name: str, value: object) -> object:
    """A value as its column holds it."""
    if value is None and name == "weight_dtype":
        return ""
    if isinstance(value, TrialState):
        return value.value
    return int(value) if isinstance(value, bool) else value


def typed(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows, each value of the kind of its column, where it is one of a table: SQLite keeps what it is given. Raises
    StoreError, which names the row."""
    kinds = {name: column.kind for columns in tables().values() for name, column in columns.items()}
    for row in rows:
        for name, value in row.items():
            if value is not None and name in kinds and type(value) not in TYPES[kinds[name]]:
                which = f"row {row['id']}" if "id" in row else f"a sample of trial {row['trial_id']}"
                meant = MEANT[kinds[name]]
                raise StoreError(f"{which} of the database has {value!r:.60} as {name}, not {meant}; delete it")
    return rows


def equal(names: Iterable[str], prefix: str = "") -> str:
    """SQL that each column has the value of the same name, NULL too."""
    return " AND ".join(f"{prefix}{name} IS :{name}" for name in names) or "1"


def insert(table: str, columns: Collection[str], conflict: Collection[str] = ()) -> str:
    """SQL that inserts values named as their columns, over the row with the same `conflict` columns if there is one."""
    sql = f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({', '.join(f':{name}' for name in columns)})"
    if conflict:
        sql += f" ON CONFLICT ({', '.join(conflict)}) DO UPDATE SET "
        sql += ", ".join(f"{name} = excluded.{name}" for name in columns)
    return sql


def untie() -> str:
    """SQL that ends the ties and gains of the other finals of a problem."""
    return f"UPDATE trials SET tied = 0, gains = 0 WHERE tied IS NOT NULL AND {equal(SAME_PROBLEM)}"


REPLACED_BY = {
    TrialState.OK.value: (TrialState.OK.value, TrialState.INCORRECT.value),
    TrialState.INCORRECT.value: (TrialState.INCORRECT.value,),
}
"""By what another sweep may replace a trial; one of a state that is not here by anything. A time gives way to a time
and to the gate: that another sweep ran out of time or memory, or timed another config with the same machine code, says
nothing of it. What the gate found wrong stays wrong."""


def insert_trial(connection: sqlite3.Connection, row: dict[str, Any], samples: list[dict[str, object]]) -> int:
    """Write a trial and its samples, over the row of the same key if there is one, unless that is another sweep's and
    stands against this one (REPLACED_BY); returns the id of the row."""
    sql = f"SELECT id, sweep_id, state FROM trials WHERE {equal(KEY)}"
    here = connection.execute(sql, row).fetchone()
    if (
        here is not None
        and here[1] != row["sweep_id"]
        and row["state"] not in REPLACED_BY.get(here[2], (row["state"],))
    ):
        return int(here[0])
    connection.execute(insert("trials", row, conflict=KEY), row)
    trial_id = int(connection.execute(sql, row).fetchone()[0])
    connection.execute("DELETE FROM samples WHERE trial_id = ?", (trial_id,))
    for sample in samples:
        connection.execute(insert("samples", ["trial_id", *sample]), {"trial_id": trial_id, **sample})
    return trial_id


def silicon_row(silicon: Silicon) -> dict[str, object]:
    """The columns that tell one row of `silicon` from another."""
    return {name: getattr(silicon, name) for name in SILICON}


def silicon_id(connection: sqlite3.Connection, silicon: Silicon) -> int:
    """The row of this GPU, made when it is new."""
    row = silicon_row(silicon)
    found = connection.execute(f"SELECT id FROM silicon WHERE {equal(SILICON)}", row).fetchone()
    if found is not None:
        return int(found[0])
    row["memory_bytes"] = silicon.memory_bytes
    return int(connection.execute(insert("silicon", row), row).lastrowid or 0)


def problem_of(row: Mapping[str, Any]) -> Problem:
    """The problem of a row of `trials`."""
    values = {name: row[name] for name in PROBLEM}
    values |= {name: bool(row[name]) for name in ("offset", "weight_grad", "residual", "sum_in_fp32")}
    return Problem(**{**values, "weight_dtype": row["weight_dtype"] or None})


def problem_row(problem: Problem) -> dict[str, object]:
    """The columns of `trials` that say which problem it is."""
    return {name: plain(name, getattr(problem, name)) for name in PROBLEM}


def trial_row(trial: Trial) -> dict[str, object]:
    """The columns of `trials` that the trial itself fills."""
    resources, measured = trial.resources, trial.measurement
    return {
        **problem_row(trial.problem),
        "rows_bucket": trial.problem.rows_bucket,
        "family": trial.config.family,
        "parameters": trial.config.to_json(),
        "digest": trial.digest,
        "stage": trial.stage,
        "kind": trial.kind,
        "state": trial.state.value,
        "reason": trial.reason.encode("utf-8", "replace").decode(),
        **{name: getattr(resources, name, None) for name in RESOURCES},
        **{name: getattr(measured, name, None) for name in MEASUREMENT},
        **{name: plain(name, getattr(trial, name)) for name in JUDGEMENT},
        "scratch_bytes": trial.scratch_bytes,
        "error_ulp": trial.error_ulp,
        "estimate_us": trial.estimate_us,
        "created": now(),
    }


def samples_of(trial: Trial) -> list[dict[str, object]]:
    """A row of `samples` for each block, without its trial. Raises StoreError when times and sentinels do not pair."""
    if trial.measurement is None:
        return []
    blocks, sentinels = trial.measurement.blocks, trial.measurement.sentinel_blocks
    if len(blocks) != len(sentinels):
        raise StoreError(f"{trial.config.label()}: {len(blocks)} samples and {len(sentinels)} of the sentinel")
    nothing = Conditions(None, None, None, None)
    measured, count = trial.measurement, len(blocks)
    conditions = [one or nothing for one in measured.conditions] or [nothing] * count
    rounds: Sequence[int | None] = measured.round_of or [None] * count
    kept = measured.kept or [True] * count
    return [
        {"block": block, "us": us, "sentinel_us": other, "round": number, "kept": int(counts), **around._asdict()}
        for block, (us, other, number, counts, around) in enumerate(
            zip(blocks, sentinels, rounds, kept, conditions, strict=True)
        )
    ]


def _has_types(row: dict[str, Any], rows: list[dict[str, Any]]) -> bool:
    """Whether texts are texts and numbers are numbers: SQLite keeps what it is given."""
    texts = (row["digest"], row["stage"], row["reason"])
    samples = [r[f"block_{name}"] for r in rows for name in ("us", "sentinel_us", "round", "kept")]
    numbers = [*(row[name] for name in NUMBERS), *samples]
    return all(type(text) is str for text in texts) and all(type(n) in (int, float, type(None)) for n in numbers)


def _measurement(row: dict[str, Any], samples: list[dict[str, Any]]) -> Measurement:
    """The scores of rounds are not stored, but which round each block is of."""
    rounds = [r["block_round"] for r in samples]
    kept = tuple(bool(r["block_kept"]) for r in samples)
    return Measurement(
        row["us"],
        row["score"],
        row["sentinel_us"],
        blocks=tuple(r["block_us"] for r in samples),
        sentinel_blocks=tuple(r["block_sentinel_us"] for r in samples),
        kept=() if all(kept) else kept,
        round_of=() if None in rounds else tuple(rounds),
    )


def load_trial(problem: Problem, kind: str, rows: list[dict[str, Any]]) -> StoredTrial | None:
    """The trial of a row, repeated once a sample; None when it is unreadable."""
    row = rows[0]
    try:
        config, state = Config.read(row["family"], row["parameters"]), TrialState(row["state"])
    except ValueError:
        return None
    if not _has_types(row, rows):
        return None
    measurement, resources = None, None
    if all(row[name] is not None for name in MEASUREMENT):
        measurement = _measurement(row, [r for r in rows if r["block_us"] is not None])
    elif state is TrialState.OK and kind != "estimated":
        return None
    if row["shared_bytes"] is not None:
        resources = Resources(row["registers"], row["spill_bytes"], row["shared_bytes"], row["binary"] or "")
    return StoredTrial(
        problem=problem,
        config=config,
        state=state,
        digest=row["digest"],
        kind=kind,
        stage=row["stage"],
        reason=row["reason"],
        resources=resources,
        scratch_bytes=row["scratch_bytes"],
        error_ulp=row["error_ulp"],
        measurement=measurement,
        estimate_us=row["estimate_us"],
        band=row["band"],
        tied=row["tied"],
        gains=None if row["gains"] is None else bool(row["gains"]),
        id=row["id"],
        torch=str(row["torch"]),
    )
