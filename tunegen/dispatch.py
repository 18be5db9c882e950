"""Which variant answers a call: one dict look-up, and on a miss the ladder from the database down to torch's own op."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch

from . import index, paths
from .errors import RenderError
from .installed import triton_version
from .key import Key
from .key import policy_of as policy_of
from .launch import Variant
from .model import PROTOCOL, TORCH_FAMILY, Config, Problem, Silicon, StoredChoice
from .once import first
from .passing import Passing
from .policies import FASTEST, INVARIANT
from .prepared import Table

LOG = logging.getLogger("tunegen")

ROWS_REACH = 8
"""A measured choice answers for row counts at most this factor away; beyond, the built-in default does."""


class Rung(NamedTuple):
    """One step of the ladder: the config that could answer, None for torch's own op; why; and the stored trial where it
    comes from one."""

    config: Config | None
    why: str
    stored: StoredChoice | None = None


class Choice:
    """The config that answers one kind of call on one device; without a config torch's own op does."""

    def __init__(
        self,
        problem: Problem,
        config: Config | None,
        rung: str,
        device: torch.device,
        stored: StoredChoice | None = None,
    ) -> None:
        self.problem, self.config, self.rung, self.device = problem, config, rung, device
        self.stored = stored
        self.saves_rstd = config is not None and config.structure.get("RSTD") == "saved"
        # Does it read nested rows where they lie? Of stored trials only finals were verified in that form; a built-in
        # default has no trial, and ships with that form tested.
        self.nests = stored is None or stored.final
        self._variants: dict[tuple[bool, float, tuple[str, ...], bool], Variant] = {}

    def variant(
        self, save_rstd: bool, offset: float, nested: tuple[str, ...] = (), accumulate_dw: bool = False
    ) -> Variant:
        """The bound kernel; `save_rstd` matters in the forward direction only, `nested` names the tensors whose rows
        lie at no common distance; with `accumulate_dw` dw is added to what is there. Raises RenderError or
        CompileError."""
        wanted = save_rstd, offset, nested, accumulate_dw
        found = self._variants.get(wanted)
        if found is None:
            found = self._variants.setdefault(wanted, self._bind(*wanted))  # all threads use the first one's
        return found

    def bound(self, save_rstd: bool, offset: float) -> Variant | None:
        """The kernel that `variant` returns for rows at a common distance, if it was asked for before."""
        return self._variants.get((save_rstd, offset, (), False))

    def copy_nested(self, error: Exception) -> None:
        """From now on have nested rows copied: the rendering that reads them in place does not run here."""
        assert self.config is not None
        self.nests = False
        if first(_copying, self):
            label = self.config.label()
            LOG.warning("%s: %s reads no nested rows here (%s); copying them", self.problem.label(), label, error)

    def _bind(self, save_rstd: bool, offset: float, nested: tuple[str, ...], accumulate_dw: bool) -> Variant:
        from .ops import op_spec

        assert self.config is not None
        source = index.rendering(self.problem, self.config, index.How(save_rstd, nested, accumulate_dw))
        constants = op_spec(self.problem.op).constants(self.problem, offset)
        sms = silicon_of(self.device.index).sms
        return Variant(source, self.config, constants, self.problem.accumulate, self.device, sms)


_choices: dict[Key, Choice] = {}
_passing: Passing[Key, Choice] = Passing()
"""Choices made while the database could not be read: apart from the others, whose look-up then asks for no time."""
_demoted: set[tuple[Key, Config]] = set()
_copying: set[Choice] = set()
_unrendered: set[str] = set()
"""Configs whose template could not be rendered, for whatever reason, the want of open files say."""

quick = Table()
"""What `ops.quick` knows of calls. Where choices change a new one takes its place, so that who has begun a call before
leaves what it finds in the old one."""


def choose(key: Key) -> Choice:
    """The choice for `key`: remembered, or found by going down the ladder."""
    choice = _choices.get(key)
    if choice is None:
        choice = _passing.get(key) or _found(key)
    return choice


def _found(key: Key) -> Choice:
    """A choice for `key` by going down the ladder, remembered; several threads may do so, and all use one choice."""
    problem = key.problem()
    (config, why, stored), unread = _answer(key, problem)
    why += "; the database could not be read" * unread
    made = Choice(problem, config, why, torch.device("cuda", key.device), stored)
    before = _passing.values.pop(key, None)
    if before is not None and before.config == config:
        made._variants, made.nests = before._variants, made.nests and before.nests
    elif before is not None:
        _forget_quick()
    passing = unread and key.policy == FASTEST  # the others promise the same bits again: theirs stays
    choice = _passing.put(key, made) if passing else _choices.setdefault(key, made)
    if choice is made:
        LOG.info("%s: %s, %s", problem.label(), config.label() if config else "torch", choice.rung)
    return choice


def _answer(key: Key, problem: Problem) -> tuple[Rung, bool]:
    """The first rung for `key` that has not failed, from the index where it knows that one; and whether the database
    could not be read."""
    silicon, began = silicon_of(key.device), index.stamp()
    known = index.answer(began, problem, silicon)
    if known is not None and (key, known[0]) not in _demoted:
        return Rung(*known), False
    from .lookup import complained, failed_reads

    path, failed = paths.database(), failed_reads()
    found = next(standing(key, rungs(path, problem, silicon)))
    unread = failed_reads() != failed
    # What holds for this process alone is not remembered, nor what the next one is to be told of, too.
    if not (unread or complained(path) or _unrendered or any(key == other for other, _ in [*_demoted])):
        index.keep_answer(began, problem, silicon, found)
    return found, unread


def standing(key: Key, ladder: Iterable[Rung]) -> Iterator[Rung]:
    """The rungs of `ladder` that have not failed `key` in this process."""
    return (rung for rung in ladder if rung.config is None or (key, rung.config) not in _demoted)


def remembered(key: Key) -> Choice | None:
    """The choice that this process has made for `key`, if any: unless it is a passing one it stays until `forget`."""
    return _choices.get(key) or _passing.values.get(key)


def settled(key: Key) -> Choice | None:
    """The same, less passing ones."""
    return _choices.get(key)


def demote(key: Key, choice: Choice, error: Exception) -> None:
    """Never use `choice` for `key` again in this process: it does not compile or load here. The next rung answers."""
    assert choice.config is not None
    label = choice.config.label()
    if first(_demoted, (key, choice.config)):
        LOG.warning("%s: %s does not run here (%s); trying the next choice", choice.problem.label(), label, error)
    for kept in (_choices, _passing.values):
        if kept.get(key) is choice:  # else another thread has put the next one there
            kept.pop(key, None)
    _forget_quick()


def answers() -> dict[str, str]:
    """What has answered in this process so far: the problem, and the config's label or "torch"; where two devices have
    two answers, the other one's with its name."""
    found: dict[str, str] = {}
    for choice in (*_choices.values(), *_passing.values.values()):
        label, answer = choice.problem.label(), choice.config.label() if choice.config else TORCH_FAMILY
        if found.setdefault(label, answer) != answer:
            found[f"{label} on {choice.device}"] = answer
    return found


def forget() -> None:
    """Drop every remembered choice, as after a sweep in the same process; the next call asks anew."""
    _choices.clear()
    _passing.values.clear()
    _demoted.clear()
    _copying.clear()
    _unrendered.clear()
    _forget_quick()


def _forget_quick() -> None:
    global quick
    quick = Table()


@lru_cache(maxsize=64)
def silicon_of(device: int) -> Silicon:
    """What the GPU is, asked once."""
    from . import silicon

    return silicon.query(device)


def triton_minor() -> str:
    """Such as "3.6", without importing triton."""
    return "{}.{}".format(*divmod(triton_version(), 100))


def rungs(path: Path, problem: Problem, silicon: Silicon) -> Iterator[Rung]:
    """Every config that could answer, best first: measured nearest rows first, the default of this capability, that of
    any, torch's own op."""
    from .space import load_space

    wrong = rejected(path, problem, silicon)
    for config, stored in stored_choices(path, problem, silicon, wrong):
        half = ", from an unfinished sweep" if stored.half else ""
        why = f"measured at {stored.rows} rows on {stored.silicon_name} ({path}, trial {stored.trial_id}{half})"
        yield Rung(None if config.family == TORCH_FAMILY else config, why, stored)
    last = "no built-in default fits"
    for default in load_space(problem.op).built_in(problem, silicon):
        if wrong(default):
            last = f"the gate found the built-in default wrong: {default.label()} ({path})"
        else:
            last = "the last resort"
            yield Rung(default, f"built-in default on {silicon.name}")
    yield Rung(None, last)


def stored_choices(
    path: Path, problem: Problem, silicon: Silicon, wrong: Callable[[Config], bool] | None = None
) -> Iterator[tuple[Config, StoredChoice]]:
    """What the database at `path` has for this problem on this silicon, nearest row count and then best first.

    What is read is checked: the config must be valid in today's search space and no baseline there, the kernel text
    must be the one that was timed, and the gate must not have found it wrong at another row count (`wrong`, the test
    that `rejected` returns, if the caller has it already). A time does not depend on a policy, so that those of
    "fastest" count too, less what the policy forbids: atomics, and under "invariant" torch's own op.
    """
    from .lookup import find_winners
    from .space import load_space

    space, wrong = load_space(problem.op), wrong or rejected(path, problem, silicon)
    found = [s for p in counting(problem) for s in find_winners(path, silicon, p, triton_minor(), PROTOCOL)]
    for stored in sorted(found, key=lambda choice: abs(math.log2(choice.rows / problem.rows))):
        if max(stored.rows / problem.rows, problem.rows / stored.rows) > ROWS_REACH:
            return
        config = Config.of(stored.family, stored.parameters)
        family = space.family(problem.direction, config.family)
        if config.family == TORCH_FAMILY:
            if problem.policy != INVARIANT:
                # Also where another release of torch is here than the one that was timed: the kernels that its op beat
                # are the same, by more than the band, and what it computes is torch's promise. The next sweep times it
                # again.
                yield config, stored
        elif family is None or family.baseline or space.check(problem, silicon, config) is not None:
            continue
        elif stored.digest == digest_today(problem, config) and not wrong(config):
            yield config, stored


def rejected(path: Path, problem: Problem, silicon: Silicon) -> Callable[[Config], bool]:
    """A test whether the gate has found a config wrong for this problem, whatever the row count, as its template is
    today."""
    from .lookup import find_rejected

    found = {trial for p in counting(problem) for trial in find_rejected(path, silicon, p, triton_minor(), PROTOCOL)}

    def is_wrong(config: Config) -> bool:
        return bool(found) and (config.family, config.to_json(), digest_today(problem, config)) in found

    return is_wrong


def counting(problem: Problem) -> list[Problem]:
    """The problem under each policy whose trials count for it, its own first."""
    return [replace(problem, policy=policy) for policy in dict.fromkeys((problem.policy, FASTEST))]


def digest_today(problem: Problem, config: Config) -> str:
    """The digest of the config's kernel text, "" if its template is broken or its op is none of this tunegen's."""
    from .ops import OPS, op_spec
    from .render import combined_digest

    try:
        return combined_digest(problem, config, op_spec(problem.op)) if problem.op in OPS else ""
    except RenderError as error:
        _unrendered.add(config.label())
        LOG.info("%s: %s", config.label(), error)
        return ""
