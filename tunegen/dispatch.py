"""Which variant answers a call: one dict look-up, and on a miss the ladder from the database down to torch's own op."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch

from . import paths
from .launch import Variant
from .model import PROTOCOL, Config, Problem, Silicon

LOG = logging.getLogger("tunegen")

ROWS_REACH = 8
"""A measured choice answers for row counts at most this factor away; beyond, the built-in default does."""

Key = tuple[object, ...]


class Choice:
    """The config that answers one kind of call on one device; without a config torch's own op does."""

    def __init__(self, problem: Problem, config: Config | None, rung: str, device: torch.device) -> None:
        self.problem, self.config, self.rung, self.device = problem, config, rung, device
        self.saves_rstd = config is not None and config.structure.get("RSTD") == "saved"
        self._variants: dict[tuple[bool, float], Variant] = {}

    def variant(self, save_rstd: bool, offset: float) -> Variant:
        """The bound kernel; `save_rstd` matters in the forward direction only. Raises RenderError or CompileError."""
        found = self._variants.get((save_rstd, offset))
        if found is None:
            found = self._variants[save_rstd, offset] = self._bind(save_rstd, offset)
        return found

    def _bind(self, save_rstd: bool, offset: float) -> Variant:
        from .ops import rms_norm_spec
        from .render import render

        assert self.config is not None
        renderings = rms_norm_spec.flags(self.problem, self.config)
        flags = next(f for f in renderings if f.get("save_rstd", save_rstd) == save_rstd)
        source = render(self.problem.op, f"{self.problem.direction}_{self.config.family}", flags)
        constants = rms_norm_spec.constants(self.problem, offset)
        sms = silicon_of(self.device.index).sms
        return Variant(source, self.config, constants, self.problem.accumulate, self.device, sms)


class _Demoted(NamedTuple):
    key: Key
    config: Config


_choices: dict[Key, Choice] = {}
_demoted: set[_Demoted] = set()


def choose(key: Key, problem: Problem, device: torch.device) -> Choice:
    """The choice for `key`, which must hold the device and all of `problem` but its exact rows (their bucket
    instead)."""
    choice = _choices.get(key)
    if choice is None:
        choice = next(
            c for c in _ladder(problem, device) if c.config is None or _Demoted(key, c.config) not in _demoted
        )
        LOG.info("%s: %s, %s", problem.label(), choice.config.label() if choice.config else "torch", choice.rung)
        _choices[key] = choice
    return choice


def demote(key: Key, choice: Choice, error: Exception) -> None:
    """Never use `choice` for `key` again in this process: it does not compile or load here. The next rung answers."""
    assert choice.config is not None
    LOG.warning(
        "%s: %s does not run here (%s); trying the next choice", choice.problem.label(), choice.config.label(), error
    )
    _demoted.add(_Demoted(key, choice.config))
    _choices.pop(key, None)


def forget() -> None:
    """Drop every remembered choice, as after a sweep in the same process; the next call reads the database again."""
    _choices.clear()
    _demoted.clear()


@lru_cache(maxsize=64)
def silicon_of(device: int) -> Silicon:
    """What the GPU is, asked once."""
    from . import silicon

    return silicon.query(device)


def triton_minor() -> str:
    """Such as "3.6", without importing triton."""
    from .space import triton_version

    return "{}.{}".format(*divmod(triton_version(), 100))


def _ladder(problem: Problem, device: torch.device) -> Iterator[Choice]:
    """Every choice that could answer, best first: measured nearest rows first, the default of this capability,
    torch."""
    from .space import load_space

    space, silicon = load_space(problem.op), silicon_of(device.index)
    for config, rung in _measured(problem, silicon):
        if config.family == "torch":
            yield Choice(problem, None, rung, device)
        elif space.check(problem, silicon, config) is None:
            yield Choice(problem, config, rung, device)
    default = space.default(problem, silicon)
    if default is not None:
        yield Choice(problem, default, "built-in default", device)
    yield Choice(problem, None, "torch: no default fits", device)


def _measured(problem: Problem, silicon: Silicon) -> Iterator[tuple[Config, str]]:
    """Stored winners for this problem on this silicon whose kernel text is still the same, nearest row count first."""
    from .lookup import find_winners
    from .ops import op_spec
    from .render import combined_digest

    path = paths.database()
    stored = find_winners(path, silicon, problem, triton_minor(), PROTOCOL)
    for row in sorted(stored, key=lambda row: abs(math.log2(row.rows / problem.rows))):
        if max(row.rows / problem.rows, problem.rows / row.rows) > ROWS_REACH:
            return
        config = Config.of(row.family, row.parameters)
        if config.family == "torch" or row.digest == combined_digest(problem, config, op_spec(problem.op)):
            half = ", from an unfinished sweep" if row.half else ""
            yield config, f"measured at {row.rows} rows on {row.silicon_name} ({path}, trial {row.trial_id}{half})"
