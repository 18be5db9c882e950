"""The process of a cell: it brings in each player, holds it to the gate, captures it, and times all of them side by
side. It tells its parent what it is about to do, so that the parent knows who hung or ended it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import compress
from multiprocessing.connection import Connection

import torch
from torch import Tensor

from tunegen.bench import FINAL_BLOCKS, WARM_UP_SECONDS, Bench, Timed
from tunegen.errors import first_line
from tunegen.model import Problem
from tunegen.ops import op_spec
from tunegen.processes import follow_parent
from tunegen.verify import Gate, Runner, Verdict

from .calls import Form, calls_of, with_own
from .cells import Cell
from .natives import choice_of
from .players import COPY, Player
from .rows import NOT_MEASURED, OK, REFUSED, Outcome

TIMING_SECONDS = 120.0
WRONG = 0.05
"""A rival that fails the strict gate is timed all the same, since users have it as it is: the line says so, with its
error. Only where an output is not finite, or off by this share in the root mean square, it computes something else and
has no time; rounding everything to bf16 is .002. Ours has no time unless it passes the strict gate."""


class Lab:
    """The GPU for one cell. Tests put another one in its place."""

    def __init__(self, cell: Cell) -> None:
        from tunegen import dispatch

        self.cell, self.problem = cell, cell.problem()
        self.device = torch.device("cuda", 0)
        torch.cuda.set_device(self.device)
        self.silicon = dispatch.silicon_of(0)

    def facts(self) -> dict[str, str]:
        """What the figures depend on."""
        from tunegen.serving import versions

        found = versions(0)
        return {name: found.get(name, "") for name in ("gpu", "driver", "torch", "triton")}

    def bench(self, warm_up: float = WARM_UP_SECONDS) -> Bench:
        """The protocol of a sweep, on new buffers."""
        torch.cuda.empty_cache()
        silicon = self.silicon
        return Bench(op_spec(self.cell.op), self.problem, self.device, silicon.l2_bytes, silicon.sms, warm_up=warm_up)

    def settle(self) -> None:
        """Raise what the GPU has to say by now."""
        torch.cuda.synchronize()

    def answer_of(self, player: Player) -> str:
        """Which kernel of ours it is."""
        return choice_of(self.cell) if player.is_ours else ""


class Session:
    """Players of a cell in one process; `tell` sends a message to the parent."""

    def __init__(self, lab: Lab, tell: Callable[..., None], rounds: int) -> None:
        self.lab, self.tell, self.rounds = lab, tell, rounds
        self.gates: dict[str, Gate] = {}
        self.forms: dict[str, Form] = {}
        self.players: dict[str, Player] = {}
        self.outcomes: dict[str, Outcome] = {}

    def run(self, players: Sequence[Player]) -> list[Outcome]:
        """Every timed player's outcome, and the copy's."""
        times: dict[str, tuple[float, ...]] = {}
        for number in range(self.rounds):
            blocks = self._again() if number else self._first(players)
            times = {name: times.get(name, ()) + own for name, own in blocks.items()}
        copy = Outcome(COPY, OK, blocks=times.pop(COPY))
        return [copy, *(replace(self.outcomes[name], blocks=blocks) for name, blocks in times.items())]

    def _first(self, players: Sequence[Player]) -> dict[str, tuple[float, ...]]:
        """The round in which it turns out who can be timed."""
        bench = self.lab.bench()
        graphs = {COPY: bench.capture(partial(copied, bench))}
        for player in players:
            if graph := self._admitted(player, bench):
                graphs[player.name] = graph
        return self._round(bench, graphs)

    def _again(self) -> dict[str, tuple[float, ...]]:
        """Another round, on buffers that lie elsewhere; the GPU is warm from the one before."""
        bench = self.lab.bench(0.0)
        graphs = {COPY: bench.capture(partial(copied, bench))}
        for name, player in self.players.items():
            self.tell("begin", name, player.seconds)
            graphs[name] = self._captured(player, bench)
        return self._round(bench, graphs)

    def _admitted(self, player: Player, bench: Bench) -> Timed | None:
        """The first graph of a player that may be timed; else its outcome is told."""
        self.tell("begin", player.name, player.seconds)
        outcome = Outcome(player.name, NOT_MEASURED, installed(player.package), note=player.note)
        try:
            with player.around():
                self.forms[player.name] = player.forms[self.lab.cell.op](self.lab.cell)
                outcome = self._judged(player, outcome)
                self.lab.settle()
                note = "; ".join(filter(None, (outcome.note, self.lab.answer_of(player))))
        except Exception as error:  # whatever a library does is a result, with its reason
            self.tell("out", replace(outcome, state=NOT_MEASURED, note=first_line(error)))
            self.lab.settle()  # raises where the GPU is lost: the parent goes on without this player
            return None
        if outcome.state == REFUSED:
            self.tell("out", outcome)
            return None
        graph = self._captured(player, bench)  # after a failed capture the stream is of no use: the process ends
        self.players[player.name], self.outcomes[player.name] = player, replace(outcome, note=note)
        return graph

    def _captured(self, player: Player, bench: Bench) -> Timed:
        with player.around():
            graph = bench.capture(calls_of(bench, self.forms[player.name], player.own))
            self.lab.settle()
        return graph

    def _round(self, bench: Bench, graphs: Mapping[str, Timed]) -> dict[str, tuple[float, ...]]:
        self.tell("begin", "", TIMING_SECONDS)
        found = bench.measure(list(graphs.values()), FINAL_BLOCKS)
        # Which blocks are kept is the sentinel's to say, so that it is the same ones for all.
        return {
            name: tuple(compress(one.blocks, one.kept)) if one.kept else one.blocks
            for name, one in zip(graphs, found, strict=True)
        }

    def _judged(self, player: Player, outcome: Outcome) -> Outcome:
        """The verdict under the first contract whose strict gate is passed, else under the first."""
        form, cell = self.forms[player.name], self.lab.cell
        verdicts: dict[str, Verdict] = {}
        for contract in player.contracts:
            verdict = self._gate(contract).check(runner(form, player.own), outputs_of(cell))
            verdicts[contract] = verdict
            if verdict.ok:
                return replace(outcome, state=OK, contract=contract, gate="strict", error_ulp=verdict.error_ulp)
        contract, verdict = next(iter(verdicts.items()))
        error = verdict.error_ulp if math.isfinite(verdict.error_ulp) else None
        outcome = replace(outcome, contract=contract, error_ulp=error, gate="failed")
        if player.is_ours:
            return replace(outcome, state=REFUSED, note=verdict.reason)
        if reason := wrong(self._gate(contract), form, player.own):
            return replace(outcome, state=REFUSED, note=reason)
        return replace(outcome, state=OK, note="; ".join(filter(None, (outcome.note, verdict.reason))))

    def _gate(self, contract: str) -> Gate:
        """At the cell's own row count: a library that compiles or searches for each shape would do it thrice."""
        if contract not in self.gates:
            problem = replace(self.lab.problem, casting=contract)
            gate = Gate(op_spec(self.lab.cell.op), problem, self.lab.device)
            gate.cases = [case for case in gate.cases if case[0].rows == problem.rows]
            self.gates[contract] = gate
        return self.gates[contract]


def copied(bench: Bench, i: int) -> None:
    """`copy_` of rows x hidden, over an output."""
    tensors = bench.tensors[i]
    tensors["y" if "y" in tensors else "dx"].copy_(tensors["x"])


def outputs_of(cell: Cell) -> frozenset[str]:
    """What is checked; rstd never leaves an op."""
    tensors = op_spec(cell.op).tensors(cell.problem())
    return frozenset(name for name, shape in tensors.items() if shape.role == "output") - {"rstd"}


def runner(form: Form, own: Sequence[str]) -> Runner:
    """The form as the gate calls it."""

    def run(_: Problem, tensors: Mapping[str, Tensor]) -> None:
        for name, value in form(with_own(tensors, own))().items():
            if name in tensors:
                tensors[name].copy_(value)

    return run


def wrong(gate: Gate, form: Form, own: Sequence[str]) -> str:
    """Why a form computes something else, see WRONG; empty if it does not."""
    for _, given, bounds in gate.cases:
        found = form(with_own(given, own))()
        for name, bound in bounds.items():
            if name not in found:
                continue
            want, got = bound.want.value, found[name].to(torch.float64)
            if not bool(got.isfinite().all()):
                return f"{name} is not finite"
            if (off := float((got - want).norm() / want.norm())) > WRONG:
                return f"{name} is off by {off:.2g} of its root mean square, allowed {WRONG:g}"
    return ""


def installed(package: str) -> str:
    """Its version; empty where it is not installed."""
    with suppress(PackageNotFoundError):
        return version(package)
    return ""


def work(
    connection: Connection, make_lab: Callable[[Cell], Lab], cell: Cell, players: Sequence[Player], rounds: int
) -> None:
    """Body of the process."""
    follow_parent()

    def tell(*message: object) -> None:
        connection.send(message)

    try:
        lab = make_lab(cell)
        tell("facts", lab.facts())
        tell("done", Session(lab, tell, rounds).run(players))
    except Exception as error:
        tell("lost", first_line(error))
