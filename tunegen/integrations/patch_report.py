"""What `patch` did, as records and as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
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


class Fused(NamedTuple):
    """A layer in which `add_rms_norm` computes the residual adds right before `norms`, its attributes."""

    name: str
    kind: str
    norms: tuple[str, ...]


class PatchReport(NamedTuple):
    """What was replaced, what was left and why, and what else there is to know; `print` shows it grouped. `fused` and
    `not_fused` are layers, where that was asked for."""

    replaced: tuple[Replaced, ...]
    left: tuple[Left, ...]
    notes: tuple[str, ...] = ()
    fused: tuple[Fused, ...] = ()
    not_fused: tuple[Left, ...] = ()

    def __str__(self) -> str:
        lines = [f"{len(self.replaced)} replaced, {len(self.left)} left"]
        groups = Counter((r.kind, r.hidden, r.contract) for r in self.replaced)
        for (kind, hidden, contract), count in groups.items():
            width = "any hidden size" if hidden is None else f"hidden {hidden}"
            rule = f"eps {contract.eps:g}, offset {contract.offset:g}, casting {contract.casting}"
            lines.append(f"  replaced {count} x {kind}: {width}, {rule}")
        lines += _grouped("left", self.left)
        for (kind, norms), count in Counter((one.kind, one.norms) for one in self.fused).items():
            lines.append(f"  fused {count} x {kind}: the residual add with {', '.join(norms)}")
        lines += _grouped("not fused", self.not_fused)
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])


MOST_KINDS = 5
REMEDY = (
    "patch takes norms that compute x / sqrt(mean(x^2) + eps) * weight over the last axis; where another norm may "
    "become one, use tunegen.RMSNorm, or call tunegen.rms_norm in its forward"
)


def nothing_to_patch(report: PatchReport, kinds: Iterable[str]) -> str:
    """Why a report replaces nothing, as the text of an error: what is left, which classes called a norm were seen, of
    all `kinds` there are, and what can be done."""
    norms = Counter(kind for kind in kinds if "norm" in kind.lower())
    seen = ", ".join(f"{count} x {kind}" for kind, count in norms.most_common(MOST_KINDS))
    others = len(norms) - MOST_KINDS
    seen += f" and {others} other classes" * (others > 0)
    return f"nothing to patch: {report}\n  seen: {seen or 'no class with Norm in its name'}\n  {REMEDY}"


def _grouped(what: str, left: tuple[Left, ...]) -> list[str]:
    """A line for each reason of each kind, with the first of them."""
    found = []
    for (kind, reason), count in Counter((one.kind, one.reason) for one in left).items():
        first = next(one.name for one in left if (one.kind, one.reason) == (kind, reason))
        found.append(f"  {what} {count} x {kind} ({first or 'the model itself'}): {reason}")
    return found
