"""What is told, once, where torch answers in a kernel's place."""

from __future__ import annotations

from ..dispatch import LOG
from ..errors import CapturedError
from ..key import Key
from ..model import RMS_NORM
from ..once import first
from ..policies import INVARIANT

_told: set[str] = set()


def note_torch(policy: str, why: str) -> None:
    """Say once for each reason that torch answers a call under "invariant", of which it promises nothing."""
    if policy == INVARIANT:
        _warn(f"policy invariant is not kept: torch's own operators answer ({why})")


def note_layout(tensors: str) -> None:
    """Say once for each layout that torch answers a call with distributed tensors laid out so."""
    _warn(
        f"torch's own operators answer distributed tensors {tensors}: kernels take x sharded over rows or replicated, "
        "other inputs of its shape laid out as x, the weight replicated, all on one mesh"
    )


def give_way(key: Key, error: CapturedError) -> None:
    """Have torch answer in a captured graph, and say so once for each kind of call; under "invariant" raise the error,
    since torch does not keep that."""
    warmup = f"call tunegen.warmup({key.hidden}, rows={key.rows}, ...), or " if key.op == RMS_NORM else ""
    told = f"{key.problem().label()}: {error}; {warmup}run the same call once, before"
    if key.policy == INVARIANT:
        raise CapturedError(told) from error
    _warn(f"{told}; torch's own op is captured instead")


def _warn(text: str) -> None:
    if first(_told, text):
        LOG.warning("%s", text)
