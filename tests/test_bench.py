"""The arithmetic of the measurements; what runs on a GPU is tested there."""

from __future__ import annotations

import random
import re
import weakref
from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from triton.backends.compiler import GPUTarget

from tunegen.bench import FIRST_BLOCKS, SCREEN_BLOCKS, Bench
from tunegen.blocks import has_lost, of_rounds, rotated, steady, steady_blocks, summarize
from tunegen.compile import ArgumentClass, compile_launch, integer_class
from tunegen.launch import Variant
from tunegen.model import Conditions, Config, Problem
from tunegen.ops import OPS, op_spec, row_tensors
from tunegen.plans import load, make_plan
from tunegen.render import render


def test_all_blocks_are_kept_while_the_sentinel_is_steady():
    assert steady_blocks([10.0, 10.2, 9.9, 10.1]) == [0, 1, 2, 3]


def test_blocks_whose_sentinel_moved_are_dropped():
    assert steady_blocks([10.0, 13.0, 10.1, 9.0, 10.0, 10.05]) == [0, 2, 4, 5]


@pytest.mark.parametrize(("sentinel", "kept"), [(10.29, True), (10.31, False), (9.71, True), (9.69, False)])
def test_three_per_cent_is_steady(sentinel, kept):
    assert (2 in steady_blocks([10.0, 10.0, sentinel, 10.0, 10.0])) is kept


def test_no_fewer_than_half_are_kept_the_nearest_ones():
    assert steady_blocks([10.0, 20.0, 30.0, 40.0, 21.0]) == [0, 1, 4]
    assert len(steady_blocks([1.0, 2.0, 4.0, 8.0, 16.0, 32.0])) == 3


def test_usual_is_what_is_undisturbed_even_where_half_of_the_blocks_are_not():
    """The median of two peaks was the slow one: beside a sentinel of 166 us, for 70, a candidate had half its score."""
    assert steady_blocks([166.0, 70.0] * 6) == [1, 3, 5, 7, 9, 11]


def test_single_block_is_kept():
    assert steady_blocks([7.0]) == [0]


def test_summary_is_of_medians():
    found = summarize([8.0, 9.0, 100.0], [10.0, 12.0, 10.0])
    assert (found.us, found.sentinel_us) == (9.0, 10.0)
    assert found.score == pytest.approx(0.8)  # of 0.8, 0.75 and 10; not 9 / 10
    assert (found.blocks, found.sentinel_blocks) == ((8.0, 9.0, 100.0), (10.0, 12.0, 10.0))


def test_score_survives_a_slower_clock():
    calm = summarize([8.0, 8.0, 8.0, 8.0], [10.0, 10.0, 10.0, 10.0])
    throttled = summarize([8.0, 8.0, 12.0, 12.0], [10.0, 10.0, 15.0, 15.0])
    assert throttled.score == pytest.approx(calm.score)
    assert throttled.us != calm.us


def test_blocks_must_pair():
    with pytest.raises(ValueError, match="shorter"):
        summarize([8.0, 8.0], [10.0])


class BrokenGraph:
    """As torch's behaves once a call has broken the capture."""

    def capture_begin(self):
        pass

    def capture_end(self):
        raise RuntimeError("operation failed due to a previous error during capture")


def test_error_of_a_call_is_not_hidden_by_that_of_ending_its_capture(monkeypatch):
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", BrokenGraph)
    bench = Bench.__new__(Bench)
    bench.stream, bench.sets, bench.calls = None, 1, 1
    called = []

    def call(i):
        called.append(i)
        if len(called) > 1:
            raise ValueError("the candidate's own")

    with pytest.raises(ValueError, match="the candidate's own"):
        bench.capture(call)
    with pytest.raises(RuntimeError, match="previous error"):
        bench.capture(lambda i: None)


class Recording:
    """A graph that takes part in nothing."""

    def __getattr__(self, name):
        return lambda: None


class Output:
    """Stands in for a tensor that a call made."""


def test_what_torch_returns_lies_elsewhere_in_each_set(monkeypatch):
    """Dropped at once it got the same memory again and again, which stayed in the cache: 128x4096 by `torch.compile`
    looked faster than a kernel with an output for each set."""
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recording)
    bench = Bench.__new__(Bench)
    bench.stream, bench.sets, bench.calls = None, 3, 9
    made, alive = [], []

    def call(i):
        output = Output()
        alive.append(sum(reference() is not None for reference in made))
        made.append(weakref.ref(output))
        return output

    bench.capture(call)
    assert alive[bench.sets :] == [0, 1, 2, *[3] * 6], "of the calls before each captured one"
    assert not any(reference() for reference in made), "the graph alone has the memory then"


class Fixed(Bench):
    """A bench whose candidate takes these times, beside a best one of 10 us and a sentinel of 10 us, both times the
    `clock` of a block."""

    def __init__(self, times, clock=None):
        self.sentinel, self.times = object(), list(times)
        self.clock, self.asked = clock or [1.0] * len(self.times), []

    def replay(self, candidates, blocks):
        begin = sum(count for _, count in self.asked)
        self.asked.append((len(candidates), blocks))
        part = slice(begin, begin + blocks)
        slower = [10.0 * factor for factor in self.clock[part]]
        return [self.times[part], *([slower] * (len(candidates) - 1))], [None] * blocks


BEST = object()


def test_loser_is_dropped_after_the_first_blocks():
    bench = Fixed([10.5, 10.4, 10.6, 10.5] + [1.0] * 8)
    found = bench.screen(object(), BEST)
    assert found.measurement.blocks == (10.5, 10.4, 10.6, 10.5)
    assert not found.leads
    assert bench.asked == [(3, FIRST_BLOCKS)]


@pytest.mark.parametrize("first", [[10.5, 9.9, 10.6, 10.0], [10.0, 10.0, 10.0, 10.0], [9.0, 9.1, 9.0, 9.1]])
def test_candidate_that_may_be_as_fast_as_the_best_gets_all_blocks(first):
    bench = Fixed([*first, *[10.2] * 8])
    found = bench.screen(object(), BEST)
    assert found.measurement.blocks == (*first, *[10.2] * 8)
    assert bench.asked == [(3, FIRST_BLOCKS), (3, SCREEN_BLOCKS - FIRST_BLOCKS)]
    assert found.measurement.rounds == ()  # all on the same buffers


def test_faster_one_leads_also_when_the_clock_fell_meanwhile():
    """Its score is from blocks of its own: against one from other blocks it was luck who led."""
    clock = [1.0, 1.01, 1.02, 1.025] * 3
    assert Fixed([9.9 * factor for factor in clock], clock).screen(object(), BEST).leads
    assert not Fixed([10.1 * factor for factor in clock], clock).screen(object(), BEST).leads


def test_candidate_is_timed_again_where_something_else_had_the_gpu():
    """Half of the sentinel's turns: the other half may have been the candidate's."""
    disturbed, calm = [1.0, 2.4] * (SCREEN_BLOCKS // 2), [1.0] * SCREEN_BLOCKS
    bench = Fixed([24.0, 10.0] * (SCREEN_BLOCKS // 2) + [9.0] * SCREEN_BLOCKS, disturbed + calm)
    found = bench.screen(object(), None)
    assert bench.asked == [(2, SCREEN_BLOCKS)] * 2
    assert found.measurement.score == pytest.approx(0.9)


def test_first_candidate_gets_all_blocks_and_leads():
    bench = Fixed([50.0] * SCREEN_BLOCKS)
    found = bench.screen(object(), None)
    assert (len(found.measurement.blocks), found.leads) == (SCREEN_BLOCKS, True)
    assert bench.asked == [(2, SCREEN_BLOCKS)]


def test_blocks_whose_sentinel_moved_are_left_out_of_a_screening():
    clock = [1.0] * 11 + [1.5]
    found = Fixed([9.0] * 11 + [13.0], clock).screen(object(), BEST)
    assert (found.measurement.us, found.measurement.blocks) == (9.0, (*[9.0] * 11, 13.0))  # on record all the same
    assert found.measurement.kept == (*[True] * 11, False)


def test_equal_kernels_lose_as_rarely_as_the_interval_says():
    """Of one thousand comparisons of a kernel with itself 2.5 % lie above, as many below."""
    chance = random.Random(0)
    lost = 0
    for _ in range(1000):
        times, rival = ([chance.lognormvariate(0.0, 0.005) for _ in range(FIRST_BLOCKS)] for _ in range(2))
        lost += has_lost(times, rival)
    assert 10 <= lost <= 40


def test_rounds_are_merged_block_by_block():
    hot, cold = Conditions(1980.0, 3201.0, 600.0, 70.0), Conditions(1980.0, 3201.0, 300.0, 50.0)
    parts = [steady([8.0, 9.0], [10.0, 10.0], [hot, hot]), steady([7.0], [10.0], [cold])]
    found = of_rounds(parts)
    assert (found.us, found.score) == (8.0, pytest.approx((0.85 + 0.7) / 2))
    assert found.blocks == (8.0, 9.0, 7.0)
    assert found.rounds == (pytest.approx(0.85), pytest.approx(0.7))
    assert found.conditions == (hot, hot, cold)
    assert (found.kept, found.round_of) == ((), (0, 0, 1))


def test_blocks_that_do_not_count_are_on_record_and_count_for_nothing():
    found = of_rounds(
        [steady([8.0, 8.0, 30.0], [10.0, 10.0, 20.0], [None] * 3), steady([8.0] * 2, [10.0] * 2, [None] * 2)]
    )
    assert (found.us, found.score, found.sentinel_us) == (8.0, pytest.approx(0.8), 10.0)
    assert found.blocks == (8.0, 8.0, 30.0, 8.0, 8.0)
    assert found.kept == (True, True, False, True, True)
    assert found.round_of == (0, 0, 0, 1, 1)


@pytest.mark.parametrize("count", [2, 3, 4, 7])
def test_every_candidate_is_first_and_last_as_often_as_any_other(count):
    orders = [rotated(count, block) for block in range(2 * count)]
    assert all(sorted(order) == list(range(count)) for order in orders)
    assert Counter(o[0] for o in orders) == Counter(o[-1] for o in orders) == dict.fromkeys(range(count), 2)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_streams_are_the_bytes_that_count(op, direction):
    """What the sentinel moves, and what bytes a second are computed from."""
    problem = Problem(op, direction, 4096, 64, weight_grad=direction == "backward")
    spec = op_spec(op)
    reads, writes = row_tensors(spec, problem)
    assert spec.bytes_moved(problem) == (len(reads) + len(writes)) * 64 * 4096 * 2
    assert all(spec.tensors(problem)[name].role == "output" for name in writes)


@pytest.mark.interpreter
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_sentinel_reads_and_writes_every_element(op, direction):
    problem = Problem(op, direction, 100, 21, "fp32", "fp32")
    reads, writes = row_tensors(op_spec(op), problem)
    source = render("sentinel", "streams", {"reads": tuple(reads), "writes": tuple(writes)})
    config, cpu = Config.of("streams", {"BLOCK_SIZE": 512, "num_warps": 4}), torch.device("cpu")
    streams = Variant(source, config, {"N": 100}, "fp32", cpu, 4)
    given = {name: torch.randn(21, 100) for name in reads}
    made = {name: torch.full((21, 100), torch.nan) for name in writes}
    streams(21, {f"{name}_ptr": tensor for name, tensor in (given | made).items()})
    for name in writes:
        assert torch.equal(made[name], sum(given[n] for n in reads)), name


@pytest.mark.compiler
@pytest.mark.parametrize(("reads", "writes"), [(1, 1), (2, 2), (3, 1)])
def test_the_sentinel_moves_sixteen_bytes_at_a_time(reads, writes):
    """It is the limit that kernels are held against: element by element, it took 3.6 times as long (H200)."""
    names = [f"t{i}" for i in range(reads + writes)]
    source = render("sentinel", "streams", {"reads": tuple(names[:reads]), "writes": tuple(names[reads:])})
    config = Config.of("streams", {"BLOCK_SIZE": 4096, "num_warps": 8})
    (launch,) = make_plan(load(source), config, 4096, 64, 132).launches
    classes = {f"{name}_ptr": ArgumentClass("*bf16", True) for name in names}
    classes |= {"rows": integer_class("rows", 64, 4096)}
    classes |= {name: ArgumentClass("constexpr", value=value) for name, value in (("N", 4096), ("BLOCK_SIZE", 4096))}
    ptx = compile_launch(launch, config, classes, GPUTarget("cuda", 90, 32)).asm["ptx"]
    wide, narrow = (len(re.findall(rf"(?:ld|st)\.global[\w.]*\.{kind}", ptx)) for kind in (r"v4\.b32", r"b16"))
    assert (wide, narrow) == (2 * (reads + writes), 0)
