"""`tunegen gate`: run the gates, show what they measured, keep it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import click
import torch
from rich import box
from rich.console import Console
from rich.table import Table

from ..progress import spoken
from . import record, run
from .training import Setting


def run_gate(
    console: Console, *, steps: int, dtype: str, seed: int, device: str | None, out: Path | None, as_json: bool
) -> bool:
    """Put the norm through the three gates, print what was measured, and return whether it passes."""
    place = _device(device)
    if out is not None:
        record.prepare(out)
    began = time.monotonic()
    with spoken(console) as say:
        outcome = run.run(Setting(steps, seed, dtype), place, say)
    command = f"tunegen gate --steps {steps} --dtype {dtype} --seed {seed} --device {place}"
    found = record.as_json(outcome, command, time.monotonic() - began)
    if as_json:
        click.echo(json.dumps(found, indent=2))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("gate", "what was measured", "measured", "limit", "verdict"):
        table.add_column(name, justify="right" if name in ("measured", "limit") else "left")
    for check in outcome.checks:
        verdict = "passed" if check.passed else "FAILED"
        table.add_row(check.gate, check.what, f"{check.measured:.3g}", f"{check.limit:.3g}", verdict)
    console.print(table)
    for line in (*outcome.reasons, outcome.subject):
        console.print(line, soft_wrap=True)
    verdict = "failed" if outcome.reasons else "passed"
    console.print(f"{verdict}: {len(outcome.checks)} checks, {len(outcome.reasons)} failed. {found['seconds']:.0f} s.")
    if out is not None:
        record.save(out, outcome, found)  # last: what is on the screen by now is not lost if this fails
    return not outcome.reasons


def _device(text: str | None) -> Any:
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
