"""The norm problems of one step of a model, as a file: `tunegen.record` writes it, `tunegen sweep --from` reads it."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from .errors import RecordingError
from .model import CASTINGS, DIRECTIONS, DTYPE_BYTES, RMS_NORM, Problem
from .ops import OPS
from .paths import obstacle, write_named

FORMAT = 1
LARGEST = 2**62
WIDEST = 2**31 - 1
"""N: the kernels count the elements of a row in 32 bits."""
FORWARD_ONLY = "forward only: no norm ran backward; for that call model.train() first, and put labels into the batch"


@dataclass(frozen=True)
class RecordedCall:
    """Calls of a step that are alike. `shape` and `strides` (in elements) are x's, `dy_strides` the gradient's in
    backward. `copied` counts the tensors among x and dy that the op copies first, since no kernel reads them where
    they lie."""

    problem: Problem
    count: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dy_strides: tuple[int, ...] | None = None
    copied: int = 0


@dataclass(frozen=True)
class Recording:
    """All norm calls of one step; `model` is the name of its class."""

    model: str
    calls: tuple[RecordedCall, ...]

    def counts(self) -> dict[Problem, int]:
        """Calls of the step by problem, in order of their first occurrence."""
        found: Counter[Problem] = Counter()
        for call in self.calls:
            found[call.problem] += call.count
        return dict(found)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file whole or not at all, in a new folder if need be.

        Raises RecordingError where that is impossible."""
        target = _expanded(path)
        text = json.dumps({"format": FORMAT, "model": self.model, "calls": [asdict(c) for c in self.calls]}, indent=1)
        try:
            write_named(target, f"{text}\n".encode())
        except OSError as error:
            raise RecordingError(f"cannot write {target}: {obstacle(error)}; choose another file") from error

    def __str__(self) -> str:
        lines = [f"{sum(c.count for c in self.calls)} norm calls in a step of {self.model}"]
        for problem, count in self.counts().items():
            copied = sum(c.copied * c.count for c in self.calls if c.problem == problem)
            copies = f", {copied} tensors are copied first, for their strides" if copied else ""
            lines.append(f"  {count} x {problem.label()}{copies}")
        if all(call.problem.direction == "forward" for call in self.calls):
            lines.append(f"  {FORWARD_ONLY}")
        return "\n".join(lines)


def load_recording(path: str | os.PathLike[str]) -> Recording:
    """Read a file that `Recording.save` wrote.

    Raises RecordingError: it cannot be read, is no recording, or an entry is no problem that tunegen knows; the message
    names the file, the entry and the key.
    """
    path = _expanded(path)
    try:
        text = path.read_text(encoding="utf-8")
        document = json.loads(text)
    except OSError as error:
        raise RecordingError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise RecordingError(f"{path} is no recording: {error}; make one with tunegen.record") from error
    if (
        not isinstance(document, dict)
        or document.get("format") != FORMAT
        or not isinstance(document.get("calls"), list)
    ):
        raise RecordingError(f"{path} is no recording of format {FORMAT}; make one with tunegen.record")
    calls = tuple(_call(entry, f"{path}, call {number}") for number, entry in enumerate(document["calls"], 1))
    if not calls:
        raise RecordingError(f"{path} holds no calls: the recorded step ran no norm that tunegen knows")
    return Recording(str(document.get("model", "")), calls)


def _expanded(path: str | os.PathLike[str]) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError as error:  # ~somebody
        raise RecordingError(f"{path}: {error}") from error


def _call(entry: Any, where: str) -> RecordedCall:
    if not isinstance(entry, dict) or not isinstance(entry.get("problem"), dict):
        raise RecordingError(f"{where}: an entry must be an object with a problem")
    problem = _problem(entry["problem"], where)
    count = _number(entry, "count", 1, where)
    shape, strides = (_numbers(entry, key, where) for key in ("shape", "strides"))
    dy_strides = None if entry.get("dy_strides") is None else _numbers(entry, "dy_strides", where)
    copied = _number(entry, "copied", 0, where)
    return RecordedCall(problem, count, shape, strides, dy_strides, copied)


def _problem(entry: dict[str, Any], where: str) -> Problem:
    known = {field.name for field in fields(Problem)}
    if unknown := entry.keys() - known:
        raise RecordingError(f"{where}: unknown {', '.join(sorted(unknown))}; a problem has {', '.join(sorted(known))}")
    allowed: dict[str, Sequence[Any]] = {
        "op": tuple(OPS),
        "direction": DIRECTIONS,
        "x_dtype": tuple(DTYPE_BYTES),
        "weight_dtype": (*DTYPE_BYTES, None),
        "casting": CASTINGS,
        "offset": (False, True),
        "weight_grad": (False, True),
        "residual": (False,),
        "sum_in_fp32": (False, True),
        "layout": ("contiguous",),
        "policy": ("fastest",),
        "regime": ("cold_graph",),
    }
    for key, values in allowed.items():
        # By type too: 0 is equal to False.
        if key in entry and not any(type(entry[key]) is type(value) and entry[key] == value for value in values):
            raise RecordingError(f"{where}: {key} must be one of {', '.join(map(str, values))}, got {entry[key]!r}")
    _number(entry, "hidden", 1, where, WIDEST)
    _number(entry, "rows", 1, where)
    for key in ("op", "direction"):
        if key not in entry:
            raise RecordingError(f"{where}: {key} is missing")
    problem = Problem(**entry)
    for key in ("offset", "weight_grad"):
        if getattr(problem, key) and problem.weight_dtype is None:
            raise RecordingError(f"{where}: {key} is true, but weight_dtype is null: there is no weight")
    if problem.sum_in_fp32 and (problem.op == RMS_NORM or problem.direction == "backward"):
        raise RecordingError(f"{where}: sum_in_fp32 is true, but only the forward direction of add_rms_norm has a sum")
    if problem.weight_grad and problem.direction == "forward":
        raise RecordingError(f"{where}: weight_grad is true, but direction is forward: only backward makes gradients")
    return problem


def _numbers(entry: dict[str, Any], key: str, where: str) -> tuple[int, ...]:
    found = entry.get(key)
    if not isinstance(found, list) or not all(_whole(number, 0) for number in found):
        raise RecordingError(f"{where}: {key} must be a list of integers of at least 0, got {found!r}")
    return tuple(found)


def _number(entry: dict[str, Any], key: str, least: int, where: str, most: int = LARGEST) -> int:
    found = entry.get(key)
    if not _whole(found, least, most):
        limit = f" and at most {most}" if isinstance(found, int) and found > least else ""
        raise RecordingError(f"{where}: {key} must be an integer of at least {least}{limit}, got {found!r}")
    assert isinstance(found, int)
    return found


def _whole(value: object, least: int, most: int = LARGEST) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
