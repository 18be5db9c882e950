"""Python's parser, as several threads may use it at once."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")

MIXED_UP = "AST constructor recursion depth mismatch"
TRIES = 10
EXPRESSION = "<expression of a search space>"
"""The file's name in what Python says of an expression, by which its warnings are known: nobody can act on them, since
they name neither file nor line. The filters are those of all threads: they are not changed for a while, but once."""
warnings.filterwarnings("ignore", module=EXPRESSION)


def again(work: Callable[[], Result]) -> Result:
    """`work()`, which parses Python; again where CPython 3.11 took what another thread parses at the same time for a
    part of this text. It counts the depth of a tree once for all threads (python/cpython#106905), and a thread that
    collects garbage in the middle of a tree gives the others a turn. Nothing is wrong with the text."""
    for _ in range(TRIES - 1):
        try:
            return work()
        except SystemError as error:
            if MIXED_UP not in str(error):
                raise
    return work()


def parse(text: str) -> ast.Module:
    """`ast.parse`, tried again where threads were mixed up."""
    return again(lambda: ast.parse(text))


def parse_expression(text: str) -> ast.Expression:
    """`ast.parse` of one expression, likewise."""
    return again(lambda: ast.parse(text, EXPRESSION, mode="eval"))
