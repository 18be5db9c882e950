"""How time is measured: one protocol, its number (`model.PROTOCOL`) stored with every trial.

Tens of calls are captured in a CUDA graph and the graph is replayed, so that no launch gap is measured. The calls
rotate over sets of inputs, outputs and workspace of four times the last-level cache in all (at most MAX_SETS sets:
below about 10 MB a call the data therefore stays in the cache, and microseconds rather than shares should be compared).
Candidates are timed in interleaved blocks, their order rotated; every block also times a sentinel that moves the same
bytes without arithmetic. The score is the median over blocks of time / sentinel time, which survives clocks, days and
machines. A candidate is screened beside the best one so far, in the same blocks: it gets FIRST_BLOCKS, and
SCREEN_BLOCKS in all unless it has lost by then (see `has_lost`). Finalists get FINAL_ROUNDS x FINAL_BLOCKS, each round
on buffers of its own: where buffers lie changes times by up to a per cent, and only another allocation shows by how
much.
"""

from __future__ import annotations

import operator
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .blocks import has_lost, rotated, steady, steady_blocks
from .launch import Argument, Variant
from .model import Conditions, Config, Measurement, Problem, Scratch
from .ops import row_tensors
from .reference import DTYPES
from .render import render
from .sensors import sensor_of
from .spec import OpSpec

MAX_SETS = 24
MAX_CALLS = 48
REPLAY_SECONDS = 2e-3
WARM_UP_SECONDS = 0.2
"""Of the first problem of a process; what comes later finds the clocks up."""
SHARED_WORKSPACE = 256 << 20
"""Bytes: more than four times any last-level cache of today's GPUs, so that it is cold again when its turn comes."""
FIRST_BLOCKS = 4
SCREEN_BLOCKS = 12
CONTENDER = 0.06
"""Within this share of the best score a candidate may go to the finals, which have buffers elsewhere."""
FINAL_ROUNDS = 6
FINAL_BLOCKS = 16

Call = Callable[[int], object]
"""`call(i)` runs the op once on input set i."""


@dataclass(frozen=True)
class Timed:
    """A captured graph of `calls` calls; `alive` keeps what it reads and writes."""

    graph: torch.cuda.CUDAGraph
    calls: int
    alive: object


class Bench:
    """The rotated inputs and the sentinel of one problem on one GPU, on a stream of its own."""

    def __init__(
        self,
        spec: OpSpec,
        problem: Problem,
        device: torch.device,
        l2_bytes: int,
        sms: int,
        seed: int = 0,
        warm_up: float = WARM_UP_SECONDS,
    ) -> None:
        """`l2_bytes` and `sms` are the GPU's; the sentinel runs for `warm_up` seconds first."""
        self.spec, self.problem, self.device, self.sms = spec, problem, device, sms
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.sensor = sensor_of(device)
        nbytes = spec.bytes_moved(problem)
        self.sets = max(2, min(MAX_SETS, -(-4 * l2_bytes // nbytes)))
        wanted = max(self.sets, min(MAX_CALLS, int(REPLAY_SECONDS / max(nbytes / 4e12, 3e-6))))
        self.calls = -(-wanted // self.sets) * self.sets
        self.replayed = 0.0
        self.tensors = self._sets(seed + 1000)
        self.stream.wait_stream(torch.cuda.current_stream(device))  # which fills them
        self.sentinel = self._sentinel()
        deadline = time.perf_counter() + warm_up
        while time.perf_counter() < deadline:
            self.time([self.sentinel], 1)
        self.replayed = 0.0

    def _sets(self, seed: int) -> list[dict[str, Tensor]]:
        """Inputs are drawn once and copied, which is quicker: times depend on where numbers lie, not on which they
        are."""
        drawn = tensors_of(self.spec, self.problem, self.device, seed)
        return [drawn, *({n: t.clone() for n, t in drawn.items()} for _ in range(self.sets - 1))]

    def _sentinel(self) -> Timed:
        """What reads and writes the op's tensors of whole rows: of one each the faster of `copy_` and a Triton copy, of
        two that are read and one torch's addition, else a kernel of so many streams."""
        tensors, rows = self.tensors, self.problem.rows  # kept in place of self: a cycle would outlive the problem
        reads, writes = row_tensors(self.spec, self.problem)
        if (len(reads), len(writes)) == (2, 1):
            (a, b), (c,) = reads, writes
            return self.capture(lambda i: torch.add(tensors[i][a], tensors[i][b], out=tensors[i][c]))
        config = Config.of("streams", {"BLOCK_SIZE": 4096, "num_warps": 8})
        source = render("sentinel", "streams", {"reads": tuple(reads), "writes": tuple(writes)})
        constants = {"N": self.problem.hidden}
        streams = Variant(source, config, constants, self.problem.accumulate, self.device, self.sms)
        with torch.cuda.stream(self.stream):
            bound = [streams.bind(rows, {f"{n}_ptr": own[n] for n in (*reads, *writes)}) for own in tensors]
        ours = self.capture(lambda i: bound[i]())
        if (len(reads), len(writes)) != (1, 1):
            return ours
        graphs = [self.capture(lambda i: tensors[i][writes[0]].copy_(tensors[i][reads[0]])), ours]
        times = self.time(graphs, 5)
        return graphs[0] if statistics.median(times[0]) <= statistics.median(times[1]) else graphs[1]

    def call(self, variant: Variant) -> Call:
        """Calls of a variant with workspace of its own for each set, or one for all where that alone exceeds the
        cache."""
        shared = variant.plan(self.problem.rows).scratch_bytes() > SHARED_WORKSPACE
        workspace: dict[tuple[int, str], Tensor] = {}
        scalars = self.spec.scalars(self.problem)

        def bound(i: int) -> Callable[[], None]:
            def allocate(name: str, scratch: Scratch) -> Tensor:
                place = 0 if shared else i, name
                if place not in workspace:
                    workspace[place] = variant.allocate(scratch)
                return workspace[place]

            pointers: dict[str, Argument] = {f"{name}_ptr": tensor for name, tensor in self.tensors[i].items()}
            return variant.bind(self.problem.rows, {**pointers, **scalars}, allocate)

        with torch.cuda.stream(self.stream):
            calls = [bound(i) for i in range(self.sets)]
        return lambda i: calls[i]()

    def capture(self, call: Call) -> Timed:
        """Run every set once, then capture the rotation as a graph. What a call returns is kept until behind its set's
        next turn: else torch's outputs would lie in one place, which stays in the cache; templates have one a set.

        Once is enough: a template's kernels were loaded when it was bound, and what torch loads, compiles or allocates
        for a set it does at the first call. Nothing waits for the GPU here: capturing needs no result, and takes the
        host as long as those calls take the GPU; errors come out at the next reading.
        """
        with torch.cuda.stream(self.stream):
            for i in range(self.sets):
                call(i)
            graph = torch.cuda.CUDAGraph()
            outputs: deque[object] = deque(maxlen=self.sets)
            # Not `with torch.cuda.graph`, which gives all memory back to the driver first, candidate by candidate.
            graph.capture_begin()
            try:
                for i in range(self.calls):
                    outputs.append(call(i % self.sets))
            except BaseException:
                with suppress(Exception):  # else an error of the broken capture would hide the candidate's own
                    graph.capture_end()
                raise
            graph.capture_end()
            graph.replay()
        return Timed(graph, self.calls, call)

    def time(self, candidates: Sequence[Timed], blocks: int) -> list[list[float]]:
        """Microseconds a call, per candidate and block."""
        return self.replay(candidates, blocks)[0]

    def replay(self, candidates: Sequence[Timed], blocks: int) -> tuple[list[list[float]], list[Conditions | None]]:
        """Microseconds a call, per candidate and block, and what the GPU was like after each block, which replays
        every candidate once, the order rotated."""
        times: list[list[float]] = [[] for _ in candidates]
        conditions = []
        with torch.cuda.stream(self.stream):
            for block in range(blocks):
                marks = [(number, self._replay(candidates[number])) for number in rotated(len(candidates), block)]
                self.stream.synchronize()
                conditions.append(self.sensor.read())
                for number, (begin, end) in marks:
                    elapsed = begin.elapsed_time(end)
                    times[number].append(elapsed * 1e3 / candidates[number].calls)
                    self.replayed += elapsed / 1e3
        return times, conditions

    def _replay(self, candidate: Timed) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record(self.stream)
        candidate.graph.replay()
        end.record(self.stream)
        return begin, end

    def measure(self, candidates: Sequence[Timed], blocks: int) -> list[Measurement]:
        """Time candidates beside the sentinel; blocks whose sentinel moved are dropped, half of them at most."""
        (*times, sentinel), conditions = self.replay([*candidates, self.sentinel], blocks)
        return [steady(own, sentinel, conditions) for own in times]

    def screen(self, candidate: Timed, best: Timed | None) -> Screened:
        """Time one candidate beside the best so far, if there is one yet; once more where something else had the GPU in
        half of the sentinel's turns, and so maybe in the candidate's others."""
        found = self._screen(candidate, best)
        blocks = found.measurement.sentinel_blocks
        return self._screen(candidate, best) if 2 * len(steady_blocks(blocks)) <= len(blocks) else found

    def _screen(self, candidate: Timed, best: Timed | None) -> Screened:
        rivals = [candidate, best, self.sentinel] if best else [candidate, self.sentinel]
        times, conditions = self.replay(rivals, FIRST_BLOCKS if best else SCREEN_BLOCKS)
        if best and not has_lost(times[0], times[1]):
            more, after = self.replay(rivals, SCREEN_BLOCKS - FIRST_BLOCKS)
            times, conditions = [a + b for a, b in zip(times, more, strict=True)], conditions + after
        found = steady(times[0], times[-1], conditions)
        return Screened(found, best is None or statistics.median(map(operator.truediv, times[0], times[1])) < 1)


def tensors_of(spec: OpSpec, problem: Problem, device: torch.device, seed: int) -> dict[str, Tensor]:
    """Inputs of a problem, drawn with `seed`, and outputs with nothing in them."""
    found = spec.inputs(problem, device, seed)
    for name, shape in spec.tensors(problem).items():
        if shape.role == "output":
            found[name] = torch.empty(shape.shape, dtype=DTYPES[shape.dtype], device=device)
    return found


class Screened(NamedTuple):
    """A candidate's times, and whether it was faster than the best before it, in half of their blocks at least."""

    measurement: Measurement
    leads: bool
