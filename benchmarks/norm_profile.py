"""Which kernels of a training step belong to its norms: torch's profiler, with a range around each norm's forward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from tunegen.integrations.recognition import is_candidate

LONGEST = 12
"""Kernels of the whole step that are kept by name."""


class Profile(NamedTuple):
    """GPU milliseconds of one step: of the kernels that norms launch, backward included, by name, longest first; of
    all kernels; and of the longest kernels that are no norm's."""

    norms: dict[str, float]
    all: float
    longest_others: dict[str, float]

    @property
    def norm_ms(self) -> float:
        """Of all norms together."""
        return sum(self.norms.values())


def profiled(model: nn.Module, step: Callable[[], object]) -> Profile:
    """One step under the profiler, after one without. A norm's backward are the kernels of the autograd nodes that the
    operators of its forward made."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    step()
    with annotated(model), torch.profiler.profile(activities=activities) as profile:
        step()
    events = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CPU]
    inside = within(events, [e for e in events if e.name == "norm"])
    numbers = {e.sequence_nr for e in inside if e.sequence_nr >= 0 and e.fwd_thread in (None, 0)}
    back = [e for e in events if e.name.startswith("autograd::engine::evaluate_function") and e.sequence_nr in numbers]
    norms = by_name([*inside, *within(events, back)])
    everything = Counter[str]()
    for event in profile.events():  # each kernel once: a range that launches several has each of them several times
        if event.device_type == torch.autograd.DeviceType.CUDA:
            everything[event.name[:80]] += event.time_range.elapsed_us() / 1e3
    others = dict((everything - norms).most_common(LONGEST))
    return Profile(dict(norms.most_common()), sum(everything.values()), others)


@contextmanager
def annotated(model: nn.Module) -> Iterator[None]:
    """A range named `norm` around each norm's forward."""
    handles, open_ranges = [], []

    def enter(*_: Any) -> None:
        open_ranges.append(torch.autograd.profiler.record_function("norm"))
        open_ranges[-1].__enter__()

    def leave(*_: Any) -> None:
        open_ranges.pop().__exit__(None, None, None)

    for module in model.modules():
        if is_candidate(module):
            handles += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def by_name(events: Sequence[Any]) -> Counter[str]:
    """Milliseconds of the kernels that these events launched."""
    found: Counter[str] = Counter()
    for event in events:
        for kernel in event.kernels:
            found[kernel.name[:80]] += kernel.duration / 1e3
    return found


def within(events: Sequence[Any], ranges: Sequence[Any]) -> list[Any]:
    """Events that lie in any of the ranges, on its thread; ranges of one thread do not overlap."""
    found = []
    for thread in {r.thread for r in ranges}:
        spans = sorted((r.time_range.start, r.time_range.end) for r in ranges if r.thread == thread)
        mine = sorted((e for e in events if e.thread == thread), key=lambda e: e.time_range.start)
        at = 0
        for event in mine:
            while at < len(spans) and spans[at][1] < event.time_range.start:
                at += 1
            if at < len(spans) and spans[at][0] <= event.time_range.start and event.time_range.end <= spans[at][1]:
                found.append(event)
    return found
