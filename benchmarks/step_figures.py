"""What is made of the times of a step: factors with intervals, the bound, and a table."""

from __future__ import annotations

import statistics
from typing import Any

import torch
from norm_profile import Profile
from paired import beyond, ratio

from tunegen import dispatch
from tunegen.bench import FINAL_BLOCKS, FINAL_ROUNDS, Bench
from tunegen.ops import op_spec
from tunegen.recorded import Recording

RIVALS = (
    ("eager", "ours"),
    ("ours", "ours, residual add fused"),
    ("Liger's norm alone", "ours"),
    ("all of Liger", "all of Liger, our norms"),
)
"""Pairs that are compared directly; the second is to be the faster one."""


def compared(times: dict[str, list[float]]) -> dict[str, Any]:
    """Medians, factors over eager, and the comparisons that have a goal."""
    factors = {name: ratio(times["eager"], ts) for name, ts in times.items()}
    pairs = {
        f"{over} / {under}": ratio(times[over], times[under]) for over, under in RIVALS if {over, under} <= set(times)
    }
    same = factors.get("eager again")
    return {
        "step_ms": {name: statistics.median(ts) for name, ts in times.items()},
        "over_eager": {name: factor._asdict() for name, factor in factors.items()},
        "rivals": {
            name: {**found._asdict(), "beyond_the_band": None if same is None else beyond(found, same)}
            for name, found in pairs.items()
        },
    }


def bound(times: dict[str, list[float]], profiles: dict[str, Profile], recording: Recording) -> dict[str, Any]:
    """What the norms of the eager step take, what they would take at the speed of a copy, and how much of the
    difference the patched step saves."""
    eager, norms = statistics.median(times["eager"]), profiles["eager"].norm_ms
    limit = milliseconds_of_a_copy(recording)
    found = {
        "norm_calls": sum(recording.counts().values()),
        "norm_ms_by_profiler": {name: profile.norm_ms for name, profile in profiles.items()},
        "norm_ms_at_copy_speed": limit,
        "norm_share_of_eager": norms / eager,
        "bound_over_eager": eager / (eager - norms + limit),
    }
    if "ours" in times:
        saved = statistics.median(e - o for e, o in zip(times["eager"], times["ours"], strict=True))
        found |= {"saved_ms": saved, "savable_ms": norms - limit, "saved_share": saved / (norms - limit)}
    return found


def milliseconds_of_a_copy(recording: Recording) -> float:
    """All norm calls of a step at the speed of the sweep's sentinel, each on tensors of its own size."""
    silicon, total = dispatch.silicon_of(0), 0.0
    for problem, count in recording.counts().items():
        bench = Bench(op_spec(problem.op), problem, torch.device("cuda", 0), silicon.l2_bytes, silicon.sms)
        (times,) = bench.time([bench.sentinel], FINAL_ROUNDS * FINAL_BLOCKS)
        total += count * statistics.median(times) / 1e3
        del bench
        torch.cuda.empty_cache()
    return total


def table(found: dict[str, Any]) -> str:
    """For people."""
    lines = [f"{'variant':26}{'ms a step':>11}{'x eager':>9}{'95 % interval':>18}{'peak GB':>9}"]
    for name, ms in found["step_ms"].items():
        lines.append(row(name, ms, found["over_eager"][name], found["peak_gb"][name]))
    for name, one in found["compiled"].items():
        lines.append(row(name, one["step_ms"], one["over_eager"], one["peak_gb"]))
    for name, one in found["rivals"].items():
        verdict = {True: "beyond the band", False: "within the band", None: "no band"}[one["beyond_the_band"]]
        lines.append(f"{name}: {one['median']:.4f} ({one['low']:.4f} to {one['high']:.4f}), {verdict}")
    norms = {name: round(ms, 1) for name, ms in found["norm_ms_by_profiler"].items()}
    lines.append(
        f"norms: {norms} ms by the profiler, {found['norm_ms_at_copy_speed']:.1f} at the speed "
        f"of a copy; bound {found['bound_over_eager']:.3f} x eager; saved {found.get('saved_ms', 0.0):.1f} ms"
    )
    return "\n".join(lines)


def row(name: str, ms: float, factor: dict[str, float], peak_gb: float) -> str:
    """One variant."""
    interval = f"{factor['low']:.3f} to {factor['high']:.3f}"
    return f"{name:26}{ms:11.1f}{factor['median']:9.3f}{interval:>18}{peak_gb:9.1f}"
