"""What `patch` did, as records and as text."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from .recognition import Contract


class Replaced(NamedTuple):
    """A norm, or a class of norms, that `rms_norm` computes now; `hidden` is N, None for a class."""

    name: str
    kind: str
    hidden: int | None
    contract: Contract


class Left(NamedTuple):
    """A norm that stays as it is, with the reason."""

    name: str
    kind: str
    reason: str


class PatchReport(NamedTuple):
    """What was replaced, what was left and why, and what else there is to know; `print` shows it grouped."""

    replaced: tuple[Replaced, ...]
    left: tuple[Left, ...]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"{len(self.replaced)} replaced, {len(self.left)} left"]
        groups = Counter((r.kind, r.hidden, r.contract) for r in self.replaced)
        for (kind, hidden, contract), count in groups.items():
            width = "any hidden size" if hidden is None else f"hidden {hidden}"
            rule = f"eps {contract.eps:g}, offset {contract.offset:g}, casting {contract.casting}"
            lines.append(f"  replaced {count} x {kind}: {width}, {rule}")
        for (kind, reason), count in Counter((one.kind, one.reason) for one in self.left).items():
            first = next(one.name for one in self.left if (one.kind, one.reason) == (kind, reason))
            lines.append(f"  left {count} x {kind} ({first or 'the model itself'}): {reason}")
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])
