"""Threads that parse Python at the same time, which CPython 3.11 mixes up: every parse of ours goes on."""

from __future__ import annotations

import ast
import gc
import subprocess
import sys
from contextlib import contextmanager

import pytest

from tunegen import syntax
from tunegen.compile import compile_candidate
from tunegen.expressions import Expression
from tunegen.model import Config, Problem
from tunegen.ops import op_spec
from tunegen.render import code_digest
from tunegen.silicon import of_arch

TEXT = "NUM_WARPS >= 8 or 6 * ROWS * BLOCK_SIZE * X_BYTES * PROGRAMS_PER_SM > SHARED_LIMIT"


@pytest.fixture
def mixed_up(monkeypatch):
    """Makes the next parses of texts that begin so fail as in CPython 3.11; the list says which did."""
    parse, failed = ast.parse, []

    def make(times, beginning):
        def fail(text, *args, **named):
            if len(failed) < times and text.startswith(beginning):
                failed.append(text)
                raise SystemError(f"{syntax.MIXED_UP} (before=84, after=86)")
            return parse(text, *args, **named)

        failed.clear()
        monkeypatch.setattr(ast, "parse", fail)
        return failed

    return make


@contextmanager
def interrupted():
    """Others are parsed in the middle of the next text, as by a thread that gets turns when garbage is collected."""
    limits, turns = gc.get_threshold(), []

    def turn(phase, info):
        if len(turns) < 20:
            turns.append(phase)
            ast.parse("1 + 1")

    gc.callbacks.append(turn)
    gc.set_threshold(1)
    try:
        yield
    finally:
        gc.set_threshold(*limits)
        gc.callbacks.remove(turn)


def test_a_parse_in_the_middle_of_another():
    with interrupted():
        tree = syntax.parse_expression(TEXT)
    assert ast.unparse(tree) == TEXT


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="only CPython 3.11 counts all threads together")
def test_python_itself_fails_there():
    """Where this no longer fails, the test above says nothing."""
    with pytest.raises(SystemError, match=syntax.MIXED_UP), interrupted():
        ast.parse(TEXT, mode="eval")


def test_expressions_and_digests(mixed_up):
    failed = mixed_up(syntax.TRIES - 1, "a * 2")
    assert Expression("a * 2").evaluate({"a": 4}) == 8
    assert failed == ["a * 2"] * (syntax.TRIES - 1)
    right = code_digest("x = 1\n")
    mixed_up(syntax.TRIES - 1, "x = 1")
    assert code_digest("x = 1  # a comment\n") == right
    assert len(failed) == syntax.TRIES - 1


@pytest.mark.compiler
def test_kernels_that_triton_parses(mixed_up, tmp_path, monkeypatch):
    """Triton parses a kernel, and each function that it calls, while it compiles it."""
    problem = Problem("rms_norm", "forward", 256, 16)
    config = Config.of("single_block", {"BLOCK_SIZE": 256, "ROWS": 1, "num_warps": 1})
    right = None
    for folder, times in ("right", 0), ("mixed up", 3):
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / folder))
        failed = mixed_up(times, "def ")
        found = compile_candidate(op_spec("rms_norm"), problem, config, of_arch("sm_90"))
        right = right or found
    assert len(failed) == 3
    assert found == right


def test_warnings_about_an_expression_are_not_printed():
    r"""Python's own about '\d' name neither file nor line; those of others are left as they are."""
    code = r"""
import ast
from tunegen.expressions import Expression
Expression(r"'\d' == 1 or X")
ast.parse(r"'\d'", "theirs")
"""
    done = subprocess.run([sys.executable, "-W", "default", "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("invalid escape sequence") == 1
    assert "theirs:1: " in done.stderr


def test_it_does_not_try_for_ever(mixed_up):
    failed = mixed_up(1000, "1")
    with pytest.raises(SystemError, match=syntax.MIXED_UP):
        syntax.parse("1")
    assert len(failed) == syntax.TRIES


def test_other_errors_are_told_at_once():
    tries = []

    def fail():
        tries.append(1)
        raise SystemError("bad call flags")

    with pytest.raises(SystemError, match="bad call flags"):
        syntax.again(fail)
    assert len(tries) == 1
