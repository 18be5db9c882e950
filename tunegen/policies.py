"""What a caller asks of results beside being right: speed, the same bits again, or the same bits in any batch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

from . import paths

FASTEST, DETERMINISTIC, INVARIANT = POLICIES = ("fastest", "deterministic", "invariant")

INVARIANT_ROWS = 4096
"""Under `invariant` a choice is made for this row count, whatever the call's: it depends on the width alone."""

_ENVIRONMENT = paths.policy() or FASTEST
"""As it is when this is imported: asking each time would take longer than the look-up of a kernel."""
_POLICY: ContextVar[str | None] = ContextVar("tunegen_policy", default=None)
_entered: str | None = None
"""That of the context entered last by any thread: what a compiled graph is guarded by, as torch's compiler follows
context variables from 2.14 on only."""


def policy(name: str) -> contextlib.AbstractContextManager[None]:
    """`with tunegen.policy("deterministic"):` the policy of all calls inside, and of their backward wherever it runs.

    Args:
        name: "fastest", "deterministic" (no atomics: the same call gives the same bits again) or "invariant" (beyond
            that, y and dx of a row do not depend on how many rows there are, nor on where the row lies).

    The nearest one holds, in this thread and in asyncio tasks that start inside; other threads have their own. An
    argument `policy=` of a call comes before it, `TUNEGEN_POLICY` behind it. Under
    `torch.use_deterministic_algorithms(True)`, "fastest" means "deterministic". Enter it around a compiled function,
    not inside; where several threads run compiled functions under several policies, give the argument instead.

    Raises:
        ValueError: an unknown name.
    """
    return _policy(checked(name))


@contextlib.contextmanager
def _policy(name: str) -> Iterator[None]:
    global _entered
    token, before = _POLICY.set(name), _entered
    _entered = name
    try:
        yield
    finally:
        _entered = before
        _POLICY.reset(token)


def checked(name: str, whose: str = "policy") -> str:
    """`name`, if it is a policy's. Raises ValueError."""
    if name not in POLICIES:
        raise ValueError(f"{whose} must be one of {', '.join(POLICIES)}, got {name!r}")
    return name


def asked_for(argument: str | None, traced: bool = False) -> str:
    """The policy of a call: its argument, else the nearest `with policy(...)`, else TUNEGEN_POLICY, else "fastest";
    `traced` while a compiler reads this. Raises ValueError."""
    if argument is not None:
        return checked(argument)
    return (_entered if traced else _POLICY.get()) or checked(_ENVIRONMENT, "the variable TUNEGEN_POLICY")


def in_context() -> str:
    """The policy of a call without an argument, not checked: a part of what calls are known by."""
    return _POLICY.get() or _ENVIRONMENT
