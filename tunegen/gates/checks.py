"""What the gates share: the norm under test, and one judgement."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ..ops.rms_norm import rms_norm

Say = Callable[[str], None]
"""Is told what is done now."""


def silent(text: str) -> None:
    """Where nobody listens."""


Norm = Callable[[Tensor, "Tensor | None", float], Tensor]
"""`norm(x, weight, eps)` for x (..., N) and weight (N) or None: y of x's shape and dtype, rounded as Qwen3 rounds."""


def tunegens(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """The norm that the command checks: `rms_norm` with Qwen3's casting."""
    return rms_norm(x, weight, eps, casting="llama")


@dataclass(frozen=True)
class Check:
    """One judgement of one gate: `measured` is at most `limit`, and is no NaN. `note` adds words to the reason."""

    gate: str
    what: str
    measured: float
    limit: float
    note: str = ""

    @property
    def passed(self) -> bool:
        return self.measured <= self.limit

    def reason(self) -> str:
        """Why it fails, in one line."""
        more = f" ({self.note})" if self.note else ""
        return f"{self.gate}: {self.what} is {self.measured:.3g}, at most {self.limit:.3g} is allowed{more}"
