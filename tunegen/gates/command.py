"""`tunegen gate`: run the gates, show what they measured, keep it."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import click
import torch
from rich import box
from rich.console import Console
from rich.table import Table

from ..progress import spoken
from . import record, run
from .checks import Check
from .training import Setting

NO_KERNEL = 3
"""Exit code where torch's operators passed in place of the kernels: no verdict on what would train on a GPU."""


def run_gate(
    console: Console,
    version: str,
    *,
    steps: int,
    dtype: str,
    seed: int,
    device: str | None,
    out: Path | None,
    as_json: bool,
) -> int:
    """Put the norm through the three gates, print what was measured, keep it in `out`; returns the exit code: 0 if the
    norm passes, 1 if not, NO_KERNEL if no kernel was checked and nobody asked for that with `device`.

    Raises, before anything runs, click.BadParameter for a device that is not there and ExtraMissingError without
    transformers or, for `out`, matplotlib; GateError where `out` cannot be written. `version` is tunegen's."""
    place = _device(device)
    if out is not None:
        record.prepare(out)
    outcome, kept = _measured(console, version, Setting(steps, seed, dtype), place)
    _show(console, outcome, kept, as_json)
    if out is not None:
        for path in record.save(out, outcome, kept):  # last: what is on the screen is not lost if this fails
            console.print(f"written: {path}", soft_wrap=True)
    if outcome.reasons:
        return 1
    asked_for = device is not None and place.type == "cpu"
    return 0 if outcome.kernels or asked_for else NO_KERNEL


def _measured(
    console: Console, version: str, setting: Setting, device: torch.device
) -> tuple[run.Outcome, dict[str, Any]]:
    """What the gates found, and the plain values that are kept of it."""
    began, clock = datetime.now(timezone.utc), time.monotonic()
    with spoken(console) as say:
        outcome = run.run(setting, device, say)
    outcome = replace(outcome, versions={**outcome.versions, "tunegen": version})  # also where it is not installed
    command = f"tunegen gate --steps {setting.steps} --dtype {setting.dtype} --seed {setting.seed} --device {device}"
    return outcome, record.as_json(outcome, command, began, time.monotonic() - clock)


def _show(console: Console, outcome: run.Outcome, kept: dict[str, Any], as_json: bool) -> None:
    """The plain values as JSON if asked for; a table of the checks, why some fail, what was checked, the verdict."""
    if as_json:
        click.echo(json.dumps(kept, indent=2))
    console.print(_table(outcome.checks))
    for line in (*outcome.reasons, outcome.subject):
        console.print(line, soft_wrap=True)
    verdict = "failed" if outcome.reasons else "passed" if outcome.kernels else "passed without a kernel"
    console.print(f"{verdict}: {len(outcome.checks)} checks, {len(outcome.reasons)} failed. {kept['seconds']:.0f} s.")


def _table(checks: Sequence[Check]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("gate", "what was measured", "measured", "limit", "verdict"):
        table.add_column(name, justify="right" if name in ("measured", "limit") else "left")
    for check in checks:
        verdict = "passed" if check.passed else "FAILED"
        table.add_row(check.gate, check.what, f"{check.measured:.3g}", f"{check.limit:.3g}", verdict)
    return table


def _device(text: str | None) -> torch.device:
    """The torch.device of that name, a GPU with its index; without a name the GPU, else the CPU. Raises
    click.BadParameter where there is no such device."""
    try:
        found = torch.device(text or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise click.BadParameter(f"{text!r} is no device, such as cuda:0 or cpu", param_hint="--device") from error
    if found.type == "cpu":
        return torch.device("cpu")
    if found.type != "cuda":
        raise click.BadParameter(f"{text!r} is neither a CUDA GPU nor the CPU", param_hint="--device")
    count = torch.cuda.device_count()
    index = found.index if found.index is not None else 0
    if index >= count:
        raise click.BadParameter(f"no {text}: {count} GPUs are visible to torch", param_hint="--device")
    return torch.device("cuda", index)
