"""Who plays: each implementation of the norm by a name, with what it needs to be called. Nothing of them is imported
before its turn in the process of a cell."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from . import natives, peers
from .cells import ADD_NORM, NORM, Cell

if TYPE_CHECKING:
    from .calls import Form

OURS, AGAIN, DEFAULT, COPY = "ours", "ours again", "ours, default", "copy"
ANCHORS = (OURS, AGAIN)
"""In every session: what all others are compared with, and the same once more, which shows the band."""

EITHER = ("llama", "fp32")
"""For torch.compile too: Inductor leaves out the rounding of x-hat that Hugging Face's formula asks for."""


@dataclass(frozen=True)
class Player:
    """One implementation.

    `forms` makes, by op, the callable of a cell and raises whatever is missing. `contracts` are those that it may
    follow, the one that it documents first. `directions` says where it plays; `own` names inputs that it overwrites
    and so gets as copies; `note` goes into its lines. It must be ready within `seconds`, and is bound and captured
    inside of `around`.
    """

    name: str
    package: str
    forms: Mapping[str, Callable[[Cell], Form]]
    contracts: tuple[str, ...] = ("fp32",)
    directions: tuple[str, ...] = ("forward", "backward")
    own: tuple[str, ...] = ()
    note: str = ""
    seconds: float = 90.0
    around: Callable[[], AbstractContextManager[None]] = field(default=nullcontext)

    @property
    def is_ours(self) -> bool:
        """Whether it is held to the strict gate."""
        return self.package == "tunegen"

    def plays(self, cell: Cell) -> bool:
        """Whether it has a mode of its own for such a cell."""
        return cell.op in self.forms and cell.direction in self.directions


@contextmanager
def without_database() -> Iterator[None]:
    """Every choice anew, as if nothing had been tuned."""
    from tunegen import dispatch

    before = os.environ.get("TUNEGEN_DB")
    os.environ["TUNEGEN_DB"] = os.devnull + ".absent"
    dispatch.forget()
    try:
        yield
    finally:
        os.environ.pop("TUNEGEN_DB")
        if before is not None:
            os.environ["TUNEGEN_DB"] = before
        dispatch.forget()


def _both(norm: Callable[[Cell], Form], add: Callable[[Cell], Form]) -> dict[str, Callable[[Cell], Form]]:
    return {NORM: norm, ADD_NORM: add}


_OURS = _both(natives.ours, natives.ours_add)
_IN_PLACE = "overwrites the gradient that it is given, so that it is timed on what it wrote the turn before"

PLAYERS = (
    Player(OURS, "tunegen", _OURS),
    Player(AGAIN, "tunegen", _OURS),
    Player(DEFAULT, "tunegen", _OURS, around=without_database),
    Player("eager", "torch", _both(natives.eager, natives.eager_add), ("llama",), note="Hugging Face's formula"),
    Player("F.rms_norm", "torch", _both(natives.functional, natives.functional_add)),
    Player("compile", "torch", _both(natives.compiled, natives.compiled_add), EITHER, note="of Hugging Face's formula"),
    Player(
        "compile max",
        "torch",
        _both(natives.compiled_max, natives.compiled_max_add),
        EITHER,
        note="max_autotune, coordinate_descent_tuning",
        seconds=240.0,
    ),
    Player("Liger", "liger-kernel", _both(peers.liger, peers.liger_add), EITHER, note="Triton, in_place=False"),
    Player(
        "Liger in place",
        "liger-kernel",
        _both(peers.liger_in_place, peers.liger_add_in_place),
        EITHER,
        ("backward",),
        ("dy", "dsum"),
        _IN_PLACE,
    ),
    Player("Liger CuTe", "liger-kernel", _both(peers.liger_cute, peers.liger_cute_add), EITHER, note="in_place=False"),
    Player(
        "Liger CuTe in place",
        "liger-kernel",
        _both(peers.liger_cute_in_place, peers.liger_cute_add_in_place),
        EITHER,
        ("backward",),
        ("dy", "dsum"),
        _IN_PLACE,
    ),
    Player("Unsloth", "unsloth", {NORM: peers.unsloth}, EITHER),
    Player("Unsloth in place", "unsloth", {NORM: peers.unsloth_in_place}, EITHER, ("backward",), ("dy",), _IN_PLACE),
    Player(
        "Unsloth add",
        "unsloth",
        {ADD_NORM: peers.unsloth_add},
        EITHER,
        own=("x", "residual"),
        note="for inference; writes both outputs over both inputs",
    ),
    Player("FLA", "fla-core", _both(peers.fla, peers.fla_add), EITHER[::-1]),
    Player("quack", "quack-kernels", _both(peers.quack, peers.quack_add)),
    Player(
        "quack tuned",
        "quack-kernels",
        _both(peers.quack_tuned, peers.quack_tuned_add),
        note="its *_tuned functions, which have no autograd: backward is rmsnorm_bwd_tuned and the sum of its partials",
        seconds=300.0,
    ),
    Player("TransformerEngine", "transformer-engine", {NORM: peers.transformer_engine}),
    Player("Apex", "apex", {NORM: peers.apex}, EITHER),
    Player("xFormers", "xformers", {NORM: peers.xformers}),
    Player("xFormers add", "xformers", {ADD_NORM: peers.xformers_add}, own=("x",), note="writes the sum over x"),
)


def playing(cell: Cell, names: list[str] | None = None) -> list[Player]:
    """Who plays in a cell, of those named. Raises ValueError at a name that nobody has."""
    if unknown := set(names or ()) - {player.name for player in PLAYERS}:
        raise ValueError(f"no player {', '.join(sorted(unknown))}; they are {', '.join(p.name for p in PLAYERS)}")
    return [player for player in PLAYERS if player.plays(cell) and (not names or player.name in {*names, *ANCHORS})]
