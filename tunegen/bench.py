"""How time is measured: one protocol, its number (`model.PROTOCOL`) stored with every trial.

Tens of calls are captured in a CUDA graph and the graph is replayed, so that no launch gap is measured. The calls
rotate over sets of inputs, outputs and workspace of four times the last-level cache in all (at most MAX_SETS sets:
below about 10 MB a call the data therefore stays in the cache, and microseconds rather than shares should be
compared). Candidates are timed in interleaved blocks, their order rotated; every block also times a sentinel that
moves the same bytes without arithmetic. The score is the median over blocks of time / sentinel time, which survives
clocks, days and machines. A screened candidate gets SCREEN_BLOCKS of them, or FIRST_BLOCKS if it lost each of those to
the best so far. Finalists get FINAL_ROUNDS x FINAL_BLOCKS, each round on buffers of its own: where buffers lie changes
times by up to a per cent, and only another allocation shows by how much.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .launch import Argument, Variant
from .model import Conditions, Config, Measurement, OpSpec, Problem, Scratch
from .ops import row_tensors
from .reference import DTYPES
from .render import render
from .sensors import Sensor

MAX_SETS = 24
MAX_CALLS = 48
REPLAY_SECONDS = 2e-3
WARM_UP_SECONDS = 0.2
SENTINEL_MOVED = 0.03
SHARED_WORKSPACE = 256 << 20
"""Bytes: more than four times any last-level cache of today's GPUs, so that it is cold again when its turn comes."""
FIRST_BLOCKS = 2
SCREEN_BLOCKS = 6
CONTENDER = 0.06
"""A candidate is a contender while it is within this share of the best score: screening blocks are few and noisy."""
FINAL_ROUNDS = 3
FINAL_BLOCKS = 8

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
        self.sensor = Sensor(device)
        nbytes = spec.bytes_moved(problem)
        self.sets = max(2, min(MAX_SETS, -(-4 * l2_bytes // nbytes)))
        wanted = max(self.sets, min(MAX_CALLS, int(REPLAY_SECONDS / max(nbytes / 4e12, 3e-6))))
        self.calls = -(-wanted // self.sets) * self.sets
        self.tensors = [self._tensors(seed + 1000 + i) for i in range(self.sets)]
        self.sentinel = self._sentinel()
        deadline = time.perf_counter() + warm_up
        while time.perf_counter() < deadline:
            self.time([self.sentinel], 1)

    def _tensors(self, seed: int) -> dict[str, Tensor]:
        found = self.spec.inputs(self.problem, self.device, seed)
        for name, shape in self.spec.tensors(self.problem).items():
            if shape.role == "output":
                found[name] = torch.empty(shape.shape, dtype=DTYPES[shape.dtype], device=self.device)
        return found

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
        ours = self.capture(lambda i: streams(rows, {f"{n}_ptr": tensors[i][n] for n in (*reads, *writes)}))
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
        arguments: list[dict[str, Argument]] = [
            {**{f"{n}_ptr": t for n, t in tensors.items()}, **scalars} for tensors in self.tensors
        ]

        def run(i: int) -> None:
            place = 0 if shared else i

            def allocate(name: str, scratch: Scratch) -> Tensor:
                if (place, name) not in workspace:
                    workspace[place, name] = variant.allocate(scratch)
                elif scratch.zero:
                    workspace[place, name].zero_()
                return workspace[place, name]

            variant(self.problem.rows, arguments[i], allocate)

        return run

    def capture(self, call: Call) -> Timed:
        """Run every set twice, then capture the rotation as a graph. What a call returns is dropped at once."""
        with torch.cuda.stream(self.stream):
            for i in range(self.sets):
                call(i)
                call(i)
            self.stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            # Not `with torch.cuda.graph`, which gives all memory back to the driver first, candidate by candidate.
            graph.capture_begin()
            try:
                for i in range(self.calls):
                    call(i % self.sets)
            finally:
                graph.capture_end()
            graph.replay()
            self.stream.synchronize()
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
                    times[number].append(begin.elapsed_time(end) * 1e3 / candidates[number].calls)
        return times, conditions

    def _replay(self, candidate: Timed) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        begin, end = _event(), _event()
        begin.record(self.stream)
        candidate.graph.replay()
        end.record(self.stream)
        return begin, end

    def measure(self, candidates: Sequence[Timed], blocks: int) -> list[Measurement]:
        """Time candidates beside the sentinel; blocks whose sentinel moved are dropped, half of them at most."""
        (*times, sentinel), conditions = self.replay([*candidates, self.sentinel], blocks)
        kept = steady_blocks(sentinel)
        left = [sentinel[b] for b in kept], [conditions[b] for b in kept]
        return [summarize([t[b] for b in kept], *left) for t in times]

    def screen(self, candidate: Timed, best: float) -> Measurement:
        """Time one candidate; `best` is the best score so far."""
        first = self.measure([candidate], FIRST_BLOCKS)[0]
        if min(ratios(first)) > best * (1 + CONTENDER):
            return first
        return joined([first, self.measure([candidate], SCREEN_BLOCKS - FIRST_BLOCKS)[0]])


def rotated(count: int, block: int) -> list[int]:
    """The order of `count` candidates in a block: pairs of blocks begin with another one each, and the second runs
    backwards, so that each candidate is first, and last, as often as any other."""
    order = [(block // 2 + k) % count for k in range(count)]
    return order[::-1] if block % 2 else order


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def steady_blocks(sentinel: Sequence[float]) -> list[int]:
    """Numbers of the blocks whose sentinel is within SENTINEL_MOVED of the median, but no fewer than half: the
    nearest ones."""
    middle = statistics.median(sentinel)
    by_distance = sorted(range(len(sentinel)), key=lambda b: abs(sentinel[b] - middle))
    steady = sum(abs(s - middle) <= SENTINEL_MOVED * middle for s in sentinel)
    return sorted(by_distance[: max(steady, -(-len(sentinel) // 2))])


def summarize(
    blocks: Sequence[float], sentinel: Sequence[float], conditions: Sequence[Conditions | None] = ()
) -> Measurement:
    """Medians over the kept blocks."""
    return Measurement(
        us=statistics.median(blocks),
        score=statistics.median(b / s for b, s in zip(blocks, sentinel, strict=True)),
        sentinel_us=statistics.median(sentinel),
        blocks=tuple(blocks),
        sentinel_blocks=tuple(sentinel),
        conditions=tuple(conditions),
    )


def ratios(found: Measurement) -> list[float]:
    """Time over the sentinel's time, block by block."""
    return [b / s for b, s in zip(found.blocks, found.sentinel_blocks, strict=True)]


def joined(parts: Sequence[Measurement]) -> Measurement:
    """All blocks of several parts of one round."""
    return summarize(
        [b for one in parts for b in one.blocks],
        [s for one in parts for s in one.sentinel_blocks],
        [c for one in parts for c in one.conditions],
    )


def merged(rounds: Sequence[Measurement]) -> Measurement:
    """Several rounds as one measurement, whose score is the mean of theirs."""
    whole = joined(rounds)
    scores = [one.score for one in rounds]
    return replace(whole, score=statistics.fmean(scores), rounds=tuple(scores))
