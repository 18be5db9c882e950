"""The arithmetic of the measurements; what runs on a GPU is tested there."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from tunegen.bench import FIRST_BLOCKS, SCREEN_BLOCKS, Bench, merged, rotated, steady_blocks, summarize
from tunegen.launch import Variant
from tunegen.model import Conditions, Config, Problem
from tunegen.ops import OPS, op_spec, row_tensors
from tunegen.render import render


def test_all_blocks_are_kept_while_the_sentinel_is_steady():
    assert steady_blocks([10.0, 10.2, 9.9, 10.1]) == [0, 1, 2, 3]


def test_blocks_whose_sentinel_moved_are_dropped():
    assert steady_blocks([10.0, 13.0, 10.1, 9.0, 10.0, 10.05]) == [0, 2, 4, 5]


@pytest.mark.parametrize(("sentinel", "kept"), [(10.29, True), (10.31, False), (9.71, True), (9.69, False)])
def test_three_per_cent_is_steady(sentinel, kept):
    assert (2 in steady_blocks([10.0, 10.0, sentinel, 10.0, 10.0])) is kept


def test_no_fewer_than_half_are_kept_the_nearest_ones():
    assert steady_blocks([10.0, 20.0, 30.0, 40.0, 21.0]) == [1, 2, 4]
    assert len(steady_blocks([1.0, 2.0, 4.0, 8.0, 16.0, 32.0])) == 3


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


class Fixed(Bench):
    """A bench whose one candidate takes these times, beside a sentinel of 10 us."""

    def __init__(self, times):
        self.sentinel, self.times, self.asked = object(), list(times), []

    def replay(self, candidates, blocks):
        self.asked.append(blocks)
        return [[self.times.pop(0) for _ in range(blocks)], [10.0] * blocks], [None] * blocks


def test_loser_is_dropped_after_the_first_blocks():
    bench = Fixed([11.0, 10.7, 1.0, 1.0, 1.0, 1.0])
    assert bench.screen(object(), best=1.0).blocks == (11.0, 10.7)
    assert bench.asked == [FIRST_BLOCKS]


@pytest.mark.parametrize("first", [[10.5, 12.0], [12.0, 10.5], [9.0, 9.0]])
def test_candidate_that_came_near_the_best_once_gets_all_blocks(first):
    bench = Fixed([*first, 10.0, 10.0, 10.0, 10.0])
    bench.found = bench.screen(object(), best=1.0)
    assert bench.found.blocks == (*first, 10.0, 10.0, 10.0, 10.0)
    assert sum(bench.asked) == SCREEN_BLOCKS
    assert bench.found.rounds == ()  # all on the same buffers


def test_first_candidate_gets_all_blocks():
    assert len(Fixed([50.0] * 6).screen(object(), best=float("inf")).blocks) == SCREEN_BLOCKS


def test_rounds_are_merged_block_by_block():
    hot, cold = Conditions(1980.0, 3201.0, 600.0, 70.0), Conditions(1980.0, 3201.0, 300.0, 50.0)
    found = merged([summarize([8.0, 9.0], [10.0, 10.0], [hot, hot]), summarize([7.0], [10.0], [cold])])
    assert (found.us, found.score) == (8.0, pytest.approx((0.85 + 0.7) / 2))
    assert found.blocks == (8.0, 9.0, 7.0)
    assert found.rounds == (pytest.approx(0.85), pytest.approx(0.7))
    assert found.conditions == (hot, hot, cold)


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
