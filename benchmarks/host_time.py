"""Host time of a call: what Python and torch take to issue it, beside `F.rms_norm` in the same process.

    python benchmarks/host_time.py --rows 16 --hidden 4096 --out benchmarks/results/host_time.json

A turn times each contender once, the next turn in another order: it waits for the GPU, issues a batch of calls and
stops the clock without waiting. Calls are small and a batch is short, so that the GPU does not hold the host up:
`waited`, the time a call that the GPU still needs behind a batch, says how far it was behind. A ratio is the median
over turns, with its interval (`paired.py`). Also measured:

- the parts of a call: checks with key and look-up, the output, the launch, an autograd function that computes nothing;
- what 10,000 row counts leave behind: entries of the table, compiled kernels, and in how many buckets something was
  compiled behind the bucket's first call;
- compiled graphs of 20 norms beside F.rms_norm: extra host time a norm, traced as by default, whose kernels Inductor
  makes, and as operators (TUNEGEN_COMPILE=op).

Needs a CUDA GPU.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from gpus import need_gpus
from host_calls import (
    MODES,
    NORMS,
    WAYS,
    Call,
    Tensors,
    compiled_as,
    contenders,
    graph_calls,
    parts,
    row_counts,
    tensors,
)
from paired import ratio
from sweeping import record, write

from tunegen import dispatch
from tunegen.serving import versions


class Times(NamedTuple):
    """Of one contender, turn by turn, in us a call: until all calls were issued, and from then until all were done."""

    host: list[float]
    waited: list[float]


def timed(
    calls: Mapping[str, Call], batch: int, turns: int, wait: Call, clock: Callable[[], float] = time.perf_counter
) -> dict[str, Times]:
    """The times of each call in `turns` turns of `batch` calls; `wait` returns when the GPU is idle."""
    found = {name: Times([], []) for name in calls}
    for call in calls.values():  # compiles, and takes the short way the second time
        call(), call()
    for turn in range(turns):
        for name in rotated(list(calls), turn):
            call = calls[name]
            wait()
            began = clock()
            for _ in range(batch):
                call()
            issued = clock()
            wait()
            found[name].host.append((issued - began) / batch * 1e6)
            found[name].waited.append((clock() - issued) / batch * 1e6)
    return found


def rotated(names: Sequence[str], turn: int) -> list[str]:
    """Names in the order of a turn: each is first as often as the others."""
    first = turn % len(names)
    return [*names[first:], *names[:first]]


def summary(found: Mapping[str, Times], rivals: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Medians by name; and of each name in `rivals`, whose rival was timed too, the ratio to that."""
    told: dict[str, dict[str, Any]] = {}
    for name, times in found.items():
        told[name] = {
            "us": round(statistics.median(times.host), 3),
            "least_us": round(min(times.host), 3),
            "waited_us": round(statistics.median(times.waited), 3),
        }
        if (rival := rivals.get(name)) in found:
            told[name] |= {"rival": rival, "ratio": ratio(times.host, found[rival].host)._asdict()}
    return told


def cpu_name(text: str) -> str:
    """From the text of /proc/cpuinfo; empty where it does not say."""
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return names[0] if names else ""


def graphs(given: Tensors, batch: int, turns: int, wait: Call = torch.cuda.synchronize) -> dict[str, Any]:
    """By mode of torch.compile and by way: us a graph, and how many more a norm than with F.rms_norm."""
    found: dict[str, Any] = {}
    for mode in MODES:
        for way, asked in WAYS.items():
            torch.compiler.reset()
            with torch.no_grad(), compiled_as(asked):
                calls = graph_calls(given, mode)
                times = timed(calls, batch, turns, wait)
            ours, theirs = (statistics.median(times[name].host) for name in calls)
            found[f"{mode}, {way}"] = {
                "mode": mode,
                "TUNEGEN_COMPILE": asked,
                "default": way == next(iter(WAYS)),
                **summary(times, {"rms_norm": "F.rms_norm"}),
                "extra_us_a_norm": round((ours - theirs) / NORMS, 3),
            }
    return found


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=100, help="calls between two waits")
    parser.add_argument("--turns", type=int, default=60)
    parser.add_argument("--row-counts", type=int, default=10_000)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    need_gpus()
    given = tensors(options.rows, options.hidden)
    calls, rivals, absent = contenders(given)
    gc.disable()  # as timeit does: what a collection takes falls on whoever is being timed
    found = timed({**calls, **parts(given)}, options.batch, options.turns, torch.cuda.synchronize)
    results = {
        "cpu": cpu_name(Path("/proc/cpuinfo").read_text()),
        "rows": options.rows,
        "hidden": options.hidden,
        "batch": options.batch,
        "turns": options.turns,
        "answers": dispatch.answers(),
        "host_time": summary(found, rivals),
        "not_measured": absent,
        "graphs": graphs(given, max(options.batch // NORMS, 1), options.turns),
        "row_counts": row_counts(options.hidden, options.row_counts),
    }
    write(options.out, record(results, **versions(0)))
    show(results)


def show(results: Mapping[str, Any]) -> None:
    """A line for each figure."""
    for name, one in results["host_time"].items():
        beside = f", {one['ratio']['median']:.2f} of {one['rival']}" if "ratio" in one else ""
        print(f"{name:40} {one['us']:8.2f} us{beside}")
    for name, why in results["not_measured"].items():
        print(f"{name:40} not measured: {why}")
    for what, one in results["graphs"].items():
        of = f"TUNEGEN_COMPILE={one['TUNEGEN_COMPILE']}{', the default' if one['default'] else ''}"
        print(f"{f'graph of {NORMS} norms, {what}':48} {one['extra_us_a_norm']:+8.2f} us a norm over F.rms_norm ({of})")
    for what, one in results["row_counts"].items():
        print(f"{one['row_counts']} row counts, {what}: {', '.join(f'{v} {k}' for k, v in [*one.items()][1:])}")


if __name__ == "__main__":
    main()
