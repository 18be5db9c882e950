"""The operators, by name. A new one is a module here with a `SPEC`, a folder of templates and a search space."""

from __future__ import annotations

from importlib import import_module

from ..model import OpSpec

OPS = {"rms_norm": ".rms_norm_spec", "add_rms_norm": ".add_rms_norm_spec"}


def op_spec(name: str) -> OpSpec:
    """The OpSpec called `name`; KeyError lists none, so check against OPS first."""
    spec: OpSpec = import_module(OPS[name], __package__).SPEC
    return spec
