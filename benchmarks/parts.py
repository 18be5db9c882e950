"""What a call is made of: all that it launches beside its first kernel alone, and a copy of the same bytes.

    python benchmarks/parts.py backward:4096x12288 backward:4096x4096 --out benchmarks/results/parts.json

Of each problem (bf16) the config that answers untuned calls, by the protocol of a sweep (`tunegen/bench.py`): all
kernels and the first are replayed in the same blocks, in rounds on new buffers. The first has the pass over the rows;
behind it backward adds up dw. Shares of a copy are by the bytes that must move, 1.5 copies of x for backward.

    ncu --profile-from-start off --csv --page raw --log-file ncu.csv --section SpeedOfLight --section WarpStateStats \\
        --section LaunchStats python benchmarks/parts.py backward:4096x12288 --once

With `--once` a profiler sees one call of each and one copy.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpus import need_gpus
from rivals.cells import NORM, Cell
from rivals.session import copied
from sweeping import record, write

from tunegen import dispatch
from tunegen.bench import FINAL_BLOCKS, Bench
from tunegen.evaluate import Session
from tunegen.launch import Variant
from tunegen.model import DIRECTIONS, Plan
from tunegen.serving import versions
from tunegen.space import load_space

ROUNDS = 4


class FirstKernel(Variant):
    """Of a variant, what it launches first."""

    def plan(self, rows: int) -> Plan:
        """Cut short."""
        whole = super().plan(rows)
        return whole._replace(launches=whole.launches[:1])


def variants_of(session: Session, cell: Cell) -> dict[str, Variant]:
    """By name, of the config that answers untuned calls; ends the script where that is wrong."""
    config = load_space(cell.op).default(session.problem, session.silicon)
    assert config is not None
    whole, *others = session.variants(config)
    verdict = session.verify([whole, *others])
    if not verdict.ok:
        raise SystemExit(f"{cell.label()}: {config.label()} fails the gate: {verdict.reason}")
    first = FirstKernel(whole.source, config, whole.constants, whole.accumulate, whole.device, whole.sms)
    return {"call": whole, "first_kernel": first}


def timed(session: Session, variants: Mapping[str, Variant]) -> dict[str, float]:
    """Microseconds of each and of a copy, medians over the blocks of all rounds."""
    blocks: dict[str, list[float]] = {}
    for number in range(ROUNDS):
        if number:
            session.renew()
        bench = session.bench
        calls = {name: bench.call(variant) for name, variant in variants.items()}
        calls["copy"] = partial(copied, bench)
        graphs = [bench.capture(call) for call in calls.values()]
        for name, found in zip(calls, bench.measure(graphs, FINAL_BLOCKS), strict=True):
            blocks.setdefault(name, []).extend(found.blocks)
    return {name: round(statistics.median(own), 2) for name, own in blocks.items()}


def once(bench: Bench, variant: Variant) -> None:
    """One call and one copy for a profiler, after those that warm them up."""
    with torch.cuda.stream(bench.stream):
        for call in (bench.call(variant), partial(copied, bench)):
            for _ in range(3):
                call(0)
            torch.cuda.synchronize()
            with torch.cuda.profiler.profile():  # type: ignore[no-untyped-call]
                call(0)
                torch.cuda.synchronize()


def cell_of(text: str) -> Cell:
    """Of a direction, rows and a hidden size such as backward:4096x12288. Raises ArgumentTypeError."""
    direction, _, shape = text.partition(":")
    rows, _, hidden = shape.partition("x")
    if direction not in DIRECTIONS or not (rows.isdecimal() and hidden.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is no problem such as backward:4096x12288")
    return Cell(NORM, int(rows), int(hidden), direction, "bf16")


def main() -> None:
    """Measure, print, write; or call once."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("problems", nargs="+", type=cell_of, metavar="DIRECTION:ROWSxHIDDEN")
    parser.add_argument("--once", action="store_true", help="for a profiler: nothing is timed")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    need_gpus()
    silicon, device = dispatch.silicon_of(0), torch.device("cuda", 0)
    rows: list[dict[str, Any]] = []
    for cell in options.problems:
        session = Session(cell.problem(), silicon, device, 0)
        variants = variants_of(session, cell)
        if options.once:
            once(session.bench, variants["call"])
            continue
        us = timed(session, variants)
        shares = {name: round(cell.streams / 2 * us["copy"] / us[name], 3) for name in variants}
        rows.append(
            {"problem": cell.label(), "config": variants["call"].config.label(), "us": us, "share_of_copy": shares}
        )
        print(f"{cell.label():28} {us}, of a copy {shares}", flush=True)
    if not options.once:
        write(options.out, record({"problems": rows}, **versions(0)))


if __name__ == "__main__":
    main()
