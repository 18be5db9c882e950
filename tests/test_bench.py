"""The arithmetic of the measurements; what runs on a GPU is tested there."""

from __future__ import annotations

import pytest

from tunegen.bench import steady_blocks, summarize


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
