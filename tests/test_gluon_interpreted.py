"""Rings of tiles in the interpreter: each of their depths, and that what a GPU would get wrong goes wrong there too."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from kernel_cases import TEMPLATES, check, family_of, gate_of, op_of, outputs, placed_runner, variants
from turns import take_turns

from tunegen.launch import Variant
from tunegen.model import Config, Problem
from tunegen.ops import op_spec
from tunegen.verify import variant_runner

pytestmark = pytest.mark.interpreter

CPU = torch.device("cpu")
SMS = 4
RINGS = [t for t in TEMPLATES if t.endswith("_meet")]
ALLOWANCE = {"fp32": 8.0}


@pytest.fixture(autouse=True)
def turns(monkeypatch: pytest.MonkeyPatch) -> None:
    take_turns(monkeypatch)


def problem_of(template: str, rows: int, hidden: int) -> Problem:
    direction = family_of(template).direction
    return Problem(op_of(template), direction, hidden, rows, "fp32", "fp32", weight_grad=direction == "backward")


def variant_of(template: str, problem: Problem, stages: int) -> Variant:
    """Two programs a row, two groups of them."""
    words = {"PDL": "off", "RSTD": "saved"} if problem.direction == "backward" else {}
    block = 1 << (-(-problem.hidden // 2) - 1).bit_length()
    numbers = {"BLOCK_SIZE": block, "SPLITS": 2, "STAGES": stages, "PROGRAMS_PER_SM": 1, "num_warps": 1}
    return next(variants(problem, Config.of("split_row_meet", {**words, **numbers}), CPU, SMS))


@pytest.mark.parametrize("stages", [3, 4, 5, 6])
@pytest.mark.parametrize("hidden", [128, 127], ids=["copied", "stored"])
@pytest.mark.parametrize("template", RINGS)
def test_a_ring_of_every_depth(template: str, hidden: int, stages: int) -> None:
    """With more rows than it has tiles, and with fewer; rows that are no multiple of 16 bytes are not copied."""
    for rows in (1, 2, 5, 23):
        problem = problem_of(template, rows, hidden)
        check(problem, variant_of(template, problem, stages), gate_of(problem, CPU, ALLOWANCE))


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The tiles that copies go to."""
    import gluon_interpreted

    found: list[Any] = []
    begin = gluon_interpreted.Tile.expect
    monkeypatch.setattr(gluon_interpreted.Tile, "expect", lambda tile, value: found.append(tile) or begin(tile, value))
    return found


@pytest.mark.parametrize(
    ("hidden", "apart", "shift", "copied"),
    [(128, 0, 0, True), (127, 0, 0, False), (128, 16, 0, True), (128, 3, 0, False), (128, 0, 1, False)],
    ids=["N", "odd N", "stride of 16", "odd stride", "odd address"],
)
@pytest.mark.parametrize("template", RINGS)
def test_only_rows_that_begin_at_multiples_of_16_bytes_are_copied(
    template: str, hidden: int, apart: int, shift: int, copied: bool, copies: list[Any]
) -> None:
    """The rest does not compile as a copy, or would be one of 4 bytes at a time."""
    problem = problem_of(template, 7, hidden)
    variant = variant_of(template, problem, 4)
    forward, fused = problem.direction == "forward", op_of(template) == "add_rms_norm"
    names = ["x", *["dy"] * (not forward), *["residual" if forward else "dsum"] * fused]
    streams = dict.fromkeys(names, apart)
    check(problem, variant, gate_of(problem, CPU, ALLOWANCE), placed_runner(variant, streams, shift))
    assert bool(copies) == copied


FAULTS = {
    "waits for one group less": ("wait_group(STAGES - 3)", "wait_group(STAGES - 2)"),
    "never waits": ("async_copy.wait_group(STAGES - 3)", "pass"),
    "does not commit": ("async_copy.commit_group()", "pass"),
    "begins one copy less ahead": ("gl.static_range(STAGES - 2)", "gl.static_range(STAGES - 3)"),
    "overwrites the tile that is read again": ("(slot + STAGES - 2) % STAGES", "(slot + STAGES - 1) % STAGES"),
    "overwrites the tile that comes next": ("(slot + STAGES - 2) % STAGES", "(slot + STAGES - 3) % STAGES"),
    "stays in its slot": ("slot = (slot + 1) % STAGES", "slot = slot % STAGES"),
    "fetches a row too late": ("row + (STAGES - 1) * groups", "row + STAGES * groups"),
}


def is_right(variant: Variant, problem: Problem) -> bool:
    gate = gate_of(problem, CPU, ALLOWANCE)
    return gate.check(variant_runner(op_spec(problem.op), variant), outputs(problem, variant)).ok


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("template", RINGS)
def test_a_wrong_ring_gives_wrong_values(template: str, fault: str) -> None:
    problem = problem_of(template, 23, 128)
    right = variant_of(template, problem, 4)
    faulty = right.source.text.replace(*FAULTS[fault])
    assert faulty != right.source.text
    source = replace(right.source, text=faulty, digest=f"{right.source.digest}{list(FAULTS).index(fault)}")
    spec = op_spec(problem.op)
    assert not is_right(Variant(source, right.config, spec.constants(problem), problem.accumulate, CPU, SMS), problem)


def in_a_program(run: Callable[[], None]) -> None:
    """Runs it as a program of its own."""
    failures: list[BaseException] = []

    def caught() -> None:
        try:
            run()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=caught)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]


def test_a_copy_arrives_when_its_group_is_waited_for() -> None:
    import gluon_interpreted as gluon
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    def tile(number: float) -> Any:
        return tl.tensor(
            TensorHandle(np.full((1, 2), number, np.float32), tl.float32), tl.block_type(tl.float32, [1, 2])
        )

    def program() -> None:
        ring = gluon.Ring(tl.float32, [2, 1, 2])

        def content() -> list[float]:
            return [float(ring.index(slot).load(None).handle.data[0, 0]) for slot in (0, 1)]

        assert np.isnan(content()).all(), "nothing is there yet"
        ring.index(0).store(tile(1.0))
        ring.index(0).expect(tile(2.0))
        gluon.commit_group()
        ring.index(1).expect(tile(3.0))
        gluon.commit_group()
        assert np.isnan(content()).all(), "both are on their way"
        in_a_program(lambda: gluon.wait_group(0))
        assert np.isnan(content()).all(), "another program has waited, for its own"
        gluon.wait_group(1)
        assert content()[0] == 2.0
        assert np.isnan(content()[1])
        with pytest.raises(AssertionError, match="on its way"):
            ring.index(1).store(tile(4.0))
        gluon.wait_group(0)
        assert content() == [2.0, 3.0]
        with pytest.raises(AssertionError, match="slot 2 of 2"):
            ring.index(2)

    in_a_program(program)


def test_what_gluon_does_not_have_is_not_there() -> None:
    from triton.experimental.gluon import language as gl

    assert not hasattr(gl, "swizzle2d")
    assert not hasattr(gl, "no_such_function")
