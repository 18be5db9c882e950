"""Made-up implementations of the norm, and a lab without a GPU in which the gate is real and the times are made up.

Every process of a cell imports this module."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from fake_gpu import measurement

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from rivals import natives
from rivals.calls import form_of
from rivals.cells import Cell
from rivals.players import AGAIN, OURS, Player

from tunegen.ops import op_spec

CELL = Cell("rms_norm", 16, 32, "forward", "bf16")
FACTS = {"gpu": "none", "driver": "580", "torch": "2.14", "triton": "3.8"}


class FakeLab:
    """On the CPU; player number i of a bench takes i us."""

    def __init__(self, cell):
        self.cell, self.problem, self.device = cell, cell.problem(), torch.device("cpu")
        self.benches = 0

    def facts(self):
        return FACTS

    def settle(self):
        pass

    def answer_of(self, player):
        return "tile" if player.is_ours else ""

    def bench(self, warm_up=0.2):
        spec = op_spec(self.cell.op)
        tensors = spec.inputs(self.problem, self.device, self.benches)
        for name, shape in spec.tensors(self.problem).items():
            if shape.role == "output":
                tensors[name] = torch.empty(shape.shape, dtype=torch.bfloat16)
        self.benches += 1
        return SimpleNamespace(stream=None, tensors=[tensors], capture=captured, measure=measure)


def captured(call):
    call(0)
    return call


def measure(graphs, blocks):
    return [measurement(1.0 + number, blocks) for number in range(len(graphs))]


def half(cell):
    """Off by a factor of two."""
    return form_of(cell, lambda x, w: natives.hugging_face(x, w) / 2)


def rough(cell):
    """Off by a few ulp, as if it summed in bf16."""
    return form_of(cell, lambda x, w: natives.hugging_face(x, w) * 1.01)


def absent(cell):
    import nobody_has_this  # noqa: F401


def hanging(cell):
    time.sleep(600)


def exiting(cell):
    os._exit(7)


def failing_when_timed(cell):
    """Right at the gate; a capture calls it with no guard around its tensors."""

    def norm(x, w):
        if x.storage_offset() == 0:
            raise RuntimeError("operation not permitted when stream is capturing")
        return natives.hugging_face(x, w)

    return form_of(cell, norm)


def player(name, make, **more):
    return Player(name, "made-up", {"rms_norm": make}, ("llama", "fp32"), **more)


def ours(make=natives.ours):
    return [Player(name, "tunegen", {"rms_norm": make}) for name in (OURS, AGAIN)]
