"""The cost model: what must not make a kernel faster, and how well it ranks what was measured (tests/data)."""

from __future__ import annotations

import itertools
import statistics
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tunegen import estimate
from tunegen.estimate import estimate_us, guess_resources, resident_programs
from tunegen.model import Config, Launch, Plan, Problem, Resources, Scratch
from tunegen.ops import op_spec
from tunegen.silicon import of_arch

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from cost_model import figures, spearman, top_share
from measured import read

H200 = of_arch("sm_90")
SPEC = op_spec("rms_norm")
FORWARD = Problem("rms_norm", "forward", 4096, 16384)
BACKWARD = Problem("rms_norm", "backward", 4096, 16384, weight_grad=True)
ROW = Config.of("single_block", {"BLOCK_SIZE": 4096, "ROWS": 1, "num_warps": 8})
MEASURED = Path(__file__).parent / "data" / "h200_screened.jsonl"


def once(problem=FORWARD, config=ROW, registers=40, spilled=0, shared=0, silicon=H200, plan=None):
    """Microseconds of a program a row, unless told otherwise."""
    plan = plan or Plan((Launch("main", (problem.rows,)),))
    return estimate_us(SPEC, problem, config, plan, Resources(registers, spilled, shared), silicon)


def walking(stages, programs_per_sm=1, rows=1, problem=BACKWARD):
    """Microseconds of a persistent backward that prefetches."""
    numbers = {"BLOCK_SIZE": 4096, "ROWS": rows, "STAGES": stages, "num_warps": 8}
    plan = Plan((Launch("main", (programs_per_sm * H200.sms,)),))
    shared = max(stages - 1, 0) * 2 * rows * 8192
    return once(problem, Config.of("persistent", numbers), 100, shared=shared, plan=plan)


def nondecreasing(values):
    values = list(values)
    assert all(a <= b for a, b in itertools.pairwise(values)), values


@pytest.mark.parametrize("rows", [1, 64, 1024, 16384])
@pytest.mark.parametrize("warps", [1, 4, 16])
def test_fewer_resident_programs_are_never_faster(rows, warps):
    problem, config = replace(FORWARD, rows=rows), Config.of("tile", {**dict(ROW.parameters), "num_warps": warps})
    nondecreasing(once(problem, config, registers=count) for count in range(16, 256, 8))
    nondecreasing(once(problem, config, shared=size) for size in range(0, H200.shared_limit, 4096))


def test_fewer_resident_programs_are_slower_where_latency_counts():
    assert once(registers=255) > 1.2 * once(registers=32)


def test_registers_and_shared_memory_and_threads_limit_residents():
    assert resident_programs(Resources(32, 0, 0), ROW, H200) == 8  # 64 warps
    assert resident_programs(Resources(33, 0, 0), ROW, H200) == 6  # given out by eight: 40 x 256
    assert resident_programs(Resources(32, 0, 100_000), ROW, H200) == 2
    assert resident_programs(Resources(255, 0, H200.shared_limit), ROW, H200) == 1  # never none


def test_more_work_spills_and_launches_cost_more():
    nondecreasing(once(replace(FORWARD, rows=rows)) for rows in (1, 64, 132, 133, 1024, 16384, 524288))
    nondecreasing(once(spilled=size) for size in (0, 8, 64, 256))
    more = Plan((Launch("main", (16384,)), Launch("closing", (128,), num_warps=4)))
    assert once(plan=more) > once()
    assert once(plan=Plan((Launch("main", (16384,)),), {"sums": Scratch((4096,), "fp32", zero=True)})) > once()


def test_plans_of_another_order_and_odd_numbers_have_an_estimate():
    """Each ended `tunegen try`, and a whole `tunegen sweep --arch`, in a traceback."""
    main, closing = Launch("main", (16384,)), Launch("closing", (128,), num_warps=4, pdl=True)
    early = Config.of("mine", {**dict(ROW.parameters), "PDL": "early"})
    assert once(config=early, plan=Plan((closing, main))) == once(config=early, plan=Plan((main, closing)))
    assert once(plan=Plan((main,), {"counter": Scratch((), "fp32", zero=True)})) > once()
    for name in ("ROWS", "BLOCK_SIZE"):
        for value in (0, -1):
            assert 0 < once(config=Config.of("mine", {**dict(ROW.parameters), name: value})) < float("inf")


def test_a_faster_memory_is_never_slower():
    nondecreasing(-once(silicon=replace(H200, memory_clock_khz=clock)) for clock in range(10**6, 10**7, 10**6))


def test_prefetch_helps_until_the_memory_is_crowded():
    assert walking(4) < walking(3) < walking(1)
    # Measured on an H200: 110 us against 101, twice the bytes under way.
    assert walking(4, rows=2) > walking(3, rows=2)


def test_a_program_a_row_of_128_is_bound_by_starts():
    """Measured on an H200 at 524288 x 128: 317, 160 and 81 us with 1, 2 and 4 rows a program."""
    problem = Problem("rms_norm", "forward", 128, 524288, casting="llama")
    for rows, us in ((1, 317), (2, 160), (4, 81)):
        config = Config.of("single_block", {"BLOCK_SIZE": 128, "ROWS": rows, "num_warps": 1})
        assert once(problem, config, 26, plan=Plan((Launch("main", (524288 // rows,)),))) == pytest.approx(us, rel=0.2)


def test_an_unknown_family_counts_by_its_grid():
    """A new template needs no Python: without a word that the model knows, a program has its share of the elements."""
    config = Config.of("new", {"WIDTH": 7, "num_warps": 4})
    few, many = (once(config=config, plan=Plan((Launch("main", (n,)),))) for n in (8, 16384))
    assert few > 2 * many > 0


@pytest.mark.parametrize(
    "words", [{"DEPTH": 16}, {"COLS": 16}, {"COLS": 0, "DEPTH": 16}, {"COLS": 16, "DEPTH": 0}], ids=str
)
def test_one_word_of_dw_programs_makes_none(words):
    """A template of one's own may use it for something else."""
    assert once(config=Config.of("mine", {**dict(ROW.parameters), **words})) == once()
    both = Config.of("mine", {**dict(ROW.parameters), "COLS": 16, "DEPTH": 16})
    assert once(config=both) > once()


def test_a_plan_whose_kernels_all_choose_their_warps_is_estimated():
    assert once(plan=Plan((Launch("main", (16384,), num_warps=8),))) > 0


def test_guess_before_compiling_is_near_what_was_compiled():
    ratios = [
        guess_resources(SPEC, problem, c.config).registers / c.resources.registers
        for problem, group in read([MEASURED]).items()
        for c in group
        if c.kind == "measured"
    ]
    assert 0.7 < statistics.median(ratios) < 1.3
    assert sum(0.5 < ratio < 2 for ratio in ratios) > 0.8 * len(ratios)


def ranked_groups(blind):
    return [row for group in read([MEASURED]).values() for row in figures(group, H200, blind)]


@pytest.mark.parametrize("blind", [False, True], ids=["compiled", "blind"])
def test_ranks_of_what_an_h200_measured(blind):
    rows = ranked_groups(blind)
    assert len(rows) == 9
    assert statistics.median(row["spearman"] for row in rows) >= 0.8
    assert min(row["spearman"] for row in rows) >= 0.6
    assert statistics.mean(row["top"] for row in rows) >= 0.75


RING = {"BLOCK_SIZE": 2048, "STAGES": 4, "PROGRAMS_PER_SM": 6, "num_warps": 2}
WIDE = Problem("rms_norm", "backward", 65536, 1024, weight_grad=True)


def ring(resources, silicon=H200, **changed):
    """Microseconds of a backward whose programs share rows; resources are guessed where none are given."""
    numbers = {**RING, **changed}
    splits = -(-WIDE.hidden // numbers["BLOCK_SIZE"])
    config = Config.of("split_row_meet", {**numbers, "SPLITS": splits, "RSTD": "saved"})
    programs = numbers["PROGRAMS_PER_SM"] * silicon.sms // splits * splits
    plan = Plan((Launch("main", (programs,), together=numbers["PROGRAMS_PER_SM"]),))
    return estimate_us(SPEC, WIDE, config, plan, resources, silicon)


def test_a_ring_takes_all_its_tiles_of_shared_memory():
    """Compiled for sm_90: 32776 bytes, and 167 registers of the 168 that six programs of two warps leave each."""
    config = Config.of("split_row_meet", {**RING, "SPLITS": 32})
    guessed = guess_resources(SPEC, WIDE, config, together=6)
    assert (guessed.registers, guessed.shared_bytes) == (168, 32768)
    assert resident_programs(guessed, config, H200) == 6


def test_programs_that_wait_run_at_the_same_time_whatever_is_guessed():
    compiled = Resources(167, 0, 32776)
    assert ring(None) == pytest.approx(ring(compiled))
    assert ring(Resources(255, 0, 100_000)) == pytest.approx(ring(compiled))
    one_wave = ring(compiled)
    memory = SPEC.bytes_moved(WIDE) / estimate.bandwidth(H200) * 1e6
    assert memory < one_wave < 1.25 * memory


def test_a_ring_has_two_tiles_less_under_way_than_it_holds(monkeypatch):
    """With three, one: as a loop that prefetches one."""
    monkeypatch.setattr(estimate, "MEETING", 0.0)
    few = {"PROGRAMS_PER_SM": 1, "BLOCK_SIZE": 2048}
    assert ring(None, STAGES=6, **few) < ring(None, STAGES=4, **few) < ring(None, STAGES=3, **few)
    assert ring(None, STAGES=3, **few) > 1.5 * ring(None, STAGES=4, **few)


def test_few_programs_wait_for_what_they_hand_each_other():
    """Measured at 4096x16384: four warps an SM took 1.45 times as long as twelve, with deep rings too."""
    few = {"PROGRAMS_PER_SM": 2, "BLOCK_SIZE": 2048}
    assert ring(None, STAGES=6, **few) == pytest.approx(ring(None, STAGES=4, **few), rel=0.02)
    assert 1.3 < ring(None, STAGES=4, **few) / ring(None) < 1.9


def test_ranks_need_the_latency(monkeypatch):
    """The figures can tell a model from none: without latency and starts they fall below the bar."""
    for name in ("BUSY", "LATENCY", "START", "THREAD_ELEMENT", "REDUCTION", "REDUCTION_WARP", "SUM", "FOLD"):
        monkeypatch.setattr(estimate, name, 1e-9)
    assert statistics.median(row["spearman"] for row in ranked_groups(False)) < 0.7


def test_rank_statistics_by_hand():
    assert spearman([1.0, 2.0, 3.0], [10.0, 20.0, 30.0]) == pytest.approx(1.0)
    assert spearman([3.0, 2.0, 1.0], [10.0, 20.0, 30.0]) == pytest.approx(-1.0)
    assert spearman([1.0, 1.0, 1.0], [10.0, 20.0, 30.0]) == 0.0
    times = [float(n) for n in range(25)]
    assert top_share(times, times) == 1.0
    assert top_share(times[::-1], times) == 0.0
    assert top_share([1.0] * 25, times) == pytest.approx(0.2)  # one tie: what chance gives
