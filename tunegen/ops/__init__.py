"""The operators, by name. A new one is a module here with a `SPEC`, a folder of templates and a search space."""

from __future__ import annotations

from importlib import import_module

from ..model import Problem
from ..spec import OpSpec

OPS = {"rms_norm": ".rms_norm_spec", "add_rms_norm": ".add_rms_norm_spec"}


def op_spec(name: str) -> OpSpec:
    """The OpSpec called `name`; KeyError lists none, so check against OPS first."""
    spec: OpSpec = import_module(OPS[name], __package__).SPEC
    return spec


def row_tensors(spec: OpSpec, problem: Problem) -> tuple[list[str], list[str]]:
    """Names of the tensors of whole rows, which the time goes into: those that are read, and those that are written."""
    whole = {name: t for name, t in spec.tensors(problem).items() if t.shape == (problem.rows, problem.hidden)}
    reads, writes = ([name for name, t in whole.items() if t.role == role] for role in ("input", "output"))
    return reads, writes
