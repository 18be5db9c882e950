"""The database's schema as named steps.

A released step is never edited; a change of schema is a new step, and `rows` follows. Apply the steps only through
`Store.open`: `Migrations.apply` creates its own table outside any transaction and opens plain BEGINs, so the store
puts all of it into one BEGIN IMMEDIATE, inside which sqlite-utils falls back to savepoints.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from sqlite_utils import Database, Migrations

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

# `process` tells a process from a later one with its pid (see liveness.process_identity).
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


def _key(problem: str = _PROBLEM_SQL) -> str:
    return f"CREATE UNIQUE INDEX trials_key ON trials ({problem}, family, parameters, digest, stage, kind)"


_COST = "CASE trials.kind WHEN 'estimated' THEN trials.estimate_us ELSE trials.score END"


# Every trial that may win, with what decides: `final` stage before `screen` (measured with more care), then the least
# `cost`, then the tie-breakers `spills` and `warps`. json_valid stands before json_extract, which would fail the whole
# query on one unreadable row.
def _candidates(further: str = "") -> str:
    return f"""
CREATE VIEW candidates AS
SELECT trials.*, silicon.name AS silicon, silicon.capability AS capability, sweeps.state <> 'finished' AS half,
    trials.stage = 'final' AS final, {_COST} AS cost,{further}
    coalesce(trials.spill_bytes, 0) AS spills,
    CASE WHEN json_valid(trials.parameters)
        THEN coalesce(json_extract(trials.parameters, '$.num_warps'), 4) END AS warps
FROM trials
JOIN silicon ON silicon.id = trials.silicon_id
JOIN sweeps ON sweeps.id = trials.sweep_id
WHERE trials.state = 'ok'
    AND CASE trials.kind WHEN 'measured' THEN trials.score WHEN 'estimated' THEN trials.estimate_us END IS NOT NULL
    AND CASE WHEN json_valid(trials.parameters) THEN json_type(trials.parameters) = 'object' ELSE 0 END"""


_BREAKERS = "spills, warps, parameters, family, id"


# The one best of each problem. A reader's filter on columns of PARTITION BY is pushed down to the index.
def _winners(order: str, problem: str = _PROBLEM_SQL) -> str:
    return f"""
CREATE VIEW winners AS
SELECT * FROM (
    SELECT *, row_number() OVER (PARTITION BY {problem}, kind ORDER BY {order}) AS place FROM candidates
) WHERE place = 1"""


# Among tied finalists the time says nothing: torch's op comes last of them, then the tie-breakers decide.
_TIE = """
    coalesce(trials.tied, 0) AS tie,
    CASE WHEN trials.tied THEN trials.family = 'torch' ELSE {cost} END AS rank,"""
_ORDER = f"final DESC, tie DESC, rank, {_BREAKERS}"
_TIES = """
ALTER TABLE trials ADD COLUMN band REAL
ALTER TABLE trials ADD COLUMN tied INTEGER
ALTER TABLE trials ADD COLUMN gains INTEGER
ALTER TABLE samples ADD COLUMN sm_mhz REAL
ALTER TABLE samples ADD COLUMN memory_mhz REAL
ALTER TABLE samples ADD COLUMN watts REAL
ALTER TABLE samples ADD COLUMN celsius REAL
DROP VIEW winners
DROP VIEW candidates"""

# A second op, and a contract that only it has: what was stored before is of the other one.
_SUM = """
DROP VIEW winners
DROP VIEW candidates
DROP INDEX trials_key
ALTER TABLE trials ADD COLUMN sum_in_fp32 INTEGER NOT NULL DEFAULT 0"""
_PROBLEM_WITH_SUM = f"{_PROBLEM_SQL}, sum_in_fp32"


def m001_initial(db: Database) -> None:
    """Tables silicon, sweeps, trials, samples; views candidates and winners."""
    views = _candidates(), _winners(f"final DESC, cost, {_BREAKERS}")
    for statement in (_SILICON_SQL, _SWEEPS, _TRIALS, _SAMPLES, _key(), *views):
        db.execute(statement)


def m002_ties(db: Database) -> None:
    """The band of a problem's finals, who is tied and who gains; clocks, power and temperature of each sample."""
    views = _candidates(_TIE.format(cost=_COST)), _winners(_ORDER)
    for statement in (*_TIES.strip().splitlines(), *views):
        db.execute(statement)


def m003_blocks(db: Database) -> None:
    """Of each sample the number of its round, and whether it counts: until now those that did not were not stored, nor
    where rounds begin, which is NULL for those samples."""
    db.execute("ALTER TABLE samples ADD COLUMN round INTEGER")
    db.execute("ALTER TABLE samples ADD COLUMN kept INTEGER NOT NULL DEFAULT 1")


def m004_sum(db: Database) -> None:
    """Whether add_rms_norm's norm reads the sum in fp32, as a part of the key."""
    views = _candidates(_TIE.format(cost=_COST)), _winners(_ORDER, _PROBLEM_WITH_SUM)
    for statement in (*_SUM.strip().splitlines(), _key(_PROBLEM_WITH_SUM), *views):
        db.execute(statement)


STEPS = (m001_initial, m002_ties, m003_blocks, m004_sum)
for _step in STEPS:
    migrations()(_step)


class Column(NamedTuple):
    """A column as SQLite has it: its kind (TEXT, INTEGER, REAL), whether NULL is allowed, and its default as SQL."""

    kind: str
    nullable: bool
    default: str | None


@functools.cache
def tables() -> dict[str, dict[str, Column]]:
    """The columns of each table after all steps, in their order."""
    db = Database(memory=True, execute_plugins=False)
    try:
        for step in STEPS:
            step(db)
        return {
            name: {c.name: Column(c.type, not c.notnull, c.default_value) for c in db[name].columns}
            for name in ("silicon", "sweeps", "trials", "samples")
        }
    finally:
        db.close()
