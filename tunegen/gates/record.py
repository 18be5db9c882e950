"""What is kept of the gates: plain values, and the two files of `--out`."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from .. import paths
from ..errors import GateError
from . import plot
from .model import required
from .run import Outcome
from .training import Run

RECORD, PICTURE = "gate.json", "curves.png"


def as_json(outcome: Outcome, command: str, began: datetime, seconds: float) -> dict[str, Any]:
    """Plain values; a number that is not finite is null. `command` repeats the run, `began` is a time of UTC."""
    found = outcome.curves
    return {
        "command": command,
        "date": began.isoformat(timespec="seconds"),
        "passed": not outcome.reasons,
        "reasons": outcome.reasons,
        "kernels_checked": outcome.kernels,
        "subject": outcome.subject,
        "versions": outcome.versions,
        "seconds": round(seconds, 1),
        "checks": [_finite_ones(asdict(check) | {"passed": check.passed}) for check in outcome.checks],
        "answers": outcome.answers,
        "curves": {
            "setting": asdict(outcome.setting),
            "entropy": found.entropy,
            "apart": _finite(found.apart()),
            "reordered_apart": _finite(found.noise()),
            "baseline": _run(found.baseline),
            "ours": _run(found.ours),
            "reordered": {name: _run(run) for name, run in found.reordered.items()},
        },
    }


def _run(run: Run) -> dict[str, Any]:
    return {"losses": [_finite(value) for value in run.losses.tolist()], "movements": _finite_ones(run.movements)}


def _finite_ones(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _finite(value) for name, value in values.items()}


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def prepare(folder: Path) -> None:
    """Make sure that `save` can write there, before minutes are spent. Raises GateError or ExtraMissingError."""
    required("matplotlib.figure", "plot")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise GateError(f"cannot write into {folder}: {paths.obstacle(error)}; give --out another folder") from error
    for name in (RECORD, PICTURE):
        if (folder / name).is_dir():
            raise GateError(f"cannot write {folder / name}: it is a folder; remove it, or give --out another folder")


def save(folder: Path, outcome: Outcome, record: dict[str, Any]) -> Iterator[Path]:
    """RECORD and PICTURE, each whole or not at all; older ones are replaced. Yields their absolute paths as they are
    written. Raises GateError."""
    yield _write(folder / RECORD, f"{json.dumps(record, indent=2)}\n".encode())
    dtype, seed = outcome.setting.dtype, outcome.setting.seed
    device = outcome.versions.get("gpu", "CPU, reference in torch operators")
    title = f"Small Qwen3 in {dtype}, {outcome.setting.steps} steps, seed {seed}; {device}"
    yield _write(folder / PICTURE, plot.draw(outcome.curves, title))


def _write(path: Path, text: bytes) -> Path:
    try:
        paths.write_named(path, text)
        return path.resolve()
    except OSError as error:
        raise GateError(f"cannot write {path}: {error.strerror}; give --out another folder") from error
