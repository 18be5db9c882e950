"""The database's schema as named steps, and the rows that records become in it.

A released step is never edited; a change of schema is a new step, and the rows follow. Apply the steps only through
`Store.open`: `Migrations.apply` creates its own table outside any transaction and opens plain BEGINs, so the store
puts all of it into one BEGIN IMMEDIATE, inside which sqlite-utils falls back to savepoints.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass, fields
from datetime import datetime, timezone
from typing import Any

from sqlite_utils import Database, Migrations

from .errors import StoreError
from .model import Config, Measurement, Problem, Resources, Silicon, Trial, TrialState
from .silicon import FACTS

migrations = Migrations("tunegen")

_SILICON_SQL = """
CREATE TABLE silicon (
    id INTEGER PRIMARY KEY,
    name TEXT NOT NULL,
    capability INTEGER NOT NULL,
    sms INTEGER NOT NULL,
    l2_bytes INTEGER NOT NULL,
    memory_clock_khz INTEGER NOT NULL,
    memory_bus_bits INTEGER NOT NULL,
    shared_limit INTEGER NOT NULL,
    memory_bytes INTEGER NOT NULL,
    UNIQUE (name, capability, sms, l2_bytes, memory_clock_khz, memory_bus_bits, shared_limit)
)"""

# `process` tells a process from a later one with its pid (see store.process_identity).
_SWEEPS = """
CREATE TABLE sweeps (
    id INTEGER PRIMARY KEY,
    silicon_id INTEGER NOT NULL REFERENCES silicon (id),
    started TEXT NOT NULL,
    finished TEXT,
    state TEXT NOT NULL CHECK (state IN ('running', 'finished', 'interrupted')),
    arguments TEXT NOT NULL,
    host TEXT NOT NULL,
    pid INTEGER NOT NULL,
    process TEXT NOT NULL,
    tunegen TEXT NOT NULL,
    torch TEXT NOT NULL,
    triton TEXT NOT NULL,
    driver TEXT NOT NULL,
    seed INTEGER NOT NULL
)"""

# NULLs never collide in a unique index: every column of the key is NOT NULL, and no weight is the weight_dtype ''.
_TRIALS = """
CREATE TABLE trials (
    id INTEGER PRIMARY KEY,
    sweep_id INTEGER NOT NULL REFERENCES sweeps (id),
    silicon_id INTEGER NOT NULL REFERENCES silicon (id),
    triton TEXT NOT NULL,
    torch TEXT NOT NULL,
    protocol INTEGER NOT NULL,
    op TEXT NOT NULL,
    direction TEXT NOT NULL,
    hidden INTEGER NOT NULL,
    rows INTEGER NOT NULL,
    rows_bucket INTEGER NOT NULL,
    x_dtype TEXT NOT NULL,
    weight_dtype TEXT NOT NULL,
    casting TEXT NOT NULL,
    offset INTEGER NOT NULL,
    weight_grad INTEGER NOT NULL,
    residual INTEGER NOT NULL,
    layout TEXT NOT NULL,
    policy TEXT NOT NULL,
    regime TEXT NOT NULL,
    family TEXT NOT NULL,
    parameters TEXT NOT NULL,
    digest TEXT NOT NULL,
    stage TEXT NOT NULL CHECK (stage IN ('screen', 'final')),
    kind TEXT NOT NULL CHECK (kind IN ('measured', 'estimated', 'baseline')),
    state TEXT NOT NULL,
    reason TEXT NOT NULL,
    registers INTEGER,
    spill_bytes INTEGER,
    shared_bytes INTEGER,
    binary TEXT,
    scratch_bytes INTEGER,
    error_ulp REAL,
    us REAL,
    score REAL,
    sentinel_us REAL,
    estimate_us REAL,
    created TEXT NOT NULL
)"""

_SAMPLES = """
CREATE TABLE samples (
    trial_id INTEGER NOT NULL REFERENCES trials (id) ON DELETE CASCADE,
    block INTEGER NOT NULL,
    us REAL NOT NULL,
    sentinel_us REAL NOT NULL,
    PRIMARY KEY (trial_id, block)
) WITHOUT ROWID"""

_PROBLEM_SQL = (
    "silicon_id, triton, protocol, op, direction, hidden, x_dtype, weight_dtype, casting, offset, weight_grad, "
    "residual, layout, policy, regime, rows"
)
_KEY = f"CREATE UNIQUE INDEX trials_key ON trials ({_PROBLEM_SQL}, family, parameters, digest, stage, kind)"

# Every trial that may win, with what decides: `final` stage before `screen` (measured with more care), then the least
# `cost`, then the tie-breakers `spills` and `warps`. json_valid stands before json_extract, which would fail the whole
# query on one unreadable row.
_CANDIDATES = """
CREATE VIEW candidates AS
SELECT trials.*, silicon.name AS silicon, silicon.capability AS capability, sweeps.state <> 'finished' AS half,
    trials.stage = 'final' AS final,
    CASE trials.kind WHEN 'estimated' THEN trials.estimate_us ELSE trials.score END AS cost,
    coalesce(trials.spill_bytes, 0) AS spills,
    CASE WHEN json_valid(trials.parameters)
        THEN coalesce(json_extract(trials.parameters, '$.num_warps'), 4) END AS warps
FROM trials
JOIN silicon ON silicon.id = trials.silicon_id
JOIN sweeps ON sweeps.id = trials.sweep_id
WHERE trials.state = 'ok'
    AND CASE trials.kind WHEN 'measured' THEN trials.score WHEN 'estimated' THEN trials.estimate_us END IS NOT NULL
    AND CASE WHEN json_valid(trials.parameters) THEN json_type(trials.parameters) = 'object' ELSE 0 END"""

# The one best of each problem. A reader's filter on columns of PARTITION BY is pushed down to the index.
_WINNERS = f"""
CREATE VIEW winners AS
SELECT * FROM (
    SELECT *, row_number() OVER (
        PARTITION BY {_PROBLEM_SQL}, kind
        ORDER BY final DESC, cost, spills, warps, parameters, family, id
    ) AS place FROM candidates
) WHERE place = 1"""


def m001_initial(db: Database) -> None:
    """Tables silicon, sweeps, trials, samples; views candidates and winners."""
    for statement in (_SILICON_SQL, _SWEEPS, _TRIALS, _SAMPLES, _KEY, _CANDIDATES, _WINNERS):
        db.execute(statement)


STEPS = (m001_initial,)
for _step in STEPS:
    migrations()(_step)

PROBLEM = tuple(field.name for field in fields(Problem))
SILICON = ("name", *FACTS)
KEY = ("silicon_id", "triton", "protocol", *PROBLEM, "family", "parameters", "digest", "stage", "kind")
RESOURCES = ("registers", "spill_bytes", "shared_bytes", "binary")
MEASUREMENT = ("us", "score", "sentinel_us")
LOADED = (
    *("family", "parameters", "digest", "stage", "state", "reason", "scratch_bytes", "error_ulp", "estimate_us"),
    *RESOURCES,
    *MEASUREMENT,
)


@dataclass(frozen=True)
class StoredTrial(Trial):
    """A trial as the database holds it, with the number of its row."""

    id: int = 0


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


def silicon_row(silicon: Silicon) -> dict[str, object]:
    """The columns that tell one row of `silicon` from another."""
    return {name: getattr(silicon, name) for name in SILICON}


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
        "scratch_bytes": trial.scratch_bytes,
        "error_ulp": trial.error_ulp,
        "estimate_us": trial.estimate_us,
        "created": now(),
    }


def samples_of(trial: Trial) -> list[tuple[int, float, float]]:
    """Block, time and sentinel's time of each sample. Raises StoreError when they do not pair."""
    if trial.measurement is None:
        return []
    blocks, sentinels = trial.measurement.blocks, trial.measurement.sentinel_blocks
    if len(blocks) != len(sentinels):
        raise StoreError(f"{trial.config.label()}: {len(blocks)} samples and {len(sentinels)} of the sentinel")
    return [(block, *pair) for block, pair in enumerate(zip(blocks, sentinels, strict=True))]


def load_trial(problem: Problem, kind: str, rows: list[dict[str, Any]]) -> StoredTrial | None:
    """The trial of a row, repeated once a sample; None when it is unreadable."""
    row = rows[0]
    try:
        config, state = Config.of(row["family"], json.loads(row["parameters"])), TrialState(row["state"])
    except (ValueError, TypeError, AttributeError):
        return None
    pairs = [(r["block_us"], r["block_sentinel_us"]) for r in rows if r["block_us"] is not None]
    blocks, sentinels = tuple(p[0] for p in pairs), tuple(p[1] for p in pairs)
    measurement, resources = None, None
    if all(row[name] is not None for name in MEASUREMENT):
        measurement = Measurement(row["us"], row["score"], row["sentinel_us"], blocks, sentinels)
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
        id=row["id"],
    )
