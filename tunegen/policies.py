"""What a caller asks of results beside being right: speed, the same bits again, or the same bits in any batch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from functools import lru_cache

from . import paths

FASTEST, DETERMINISTIC, INVARIANT = POLICIES = ("fastest", "deterministic", "invariant")

INVARIANT_ROWS = 4096
"""Under `invariant` a choice is made for this row count, whatever the call's: it depends on the width alone."""

_POLICY: ContextVar[str | None] = ContextVar("tunegen_policy", default=None)


def policy(name: str) -> contextlib.AbstractContextManager[None]:
    """`with tunegen.policy("deterministic"):` the policy of all calls inside, and of their backward wherever it runs.

    Args:
        name: "fastest", "deterministic" (no atomics: the same call gives the same bits again) or "invariant" (beyond
            that, y and dx of a row do not depend on how many rows there are, nor on where the row lies).

    The nearest one holds, in this thread and in asyncio tasks that start inside; other threads have their own. An
    argument `policy=` of a call comes before it, `TUNEGEN_POLICY` behind it. Under
    `torch.use_deterministic_algorithms(True)`, "fastest" means "deterministic".

    Raises:
        ValueError: an unknown name.
    """
    return _policy(checked(name))


@contextlib.contextmanager
def _policy(name: str) -> Iterator[None]:
    token = _POLICY.set(name)
    try:
        yield
    finally:
        _POLICY.reset(token)


def checked(name: str, whose: str = "policy") -> str:
    """`name`, if it is a policy's. Raises ValueError."""
    if name not in POLICIES:
        raise ValueError(f"{whose} must be one of {', '.join(POLICIES)}, got {name!r}")
    return name


def asked_for(argument: str | None) -> str:
    """The policy of a call: its argument, else the nearest `with policy(...)`, else TUNEGEN_POLICY, else "fastest".
    Raises ValueError."""
    if argument is not None:
        return checked(argument)
    return _POLICY.get() or _of_environment()


@lru_cache(maxsize=1)
def _of_environment() -> str:
    return checked(paths.policy() or FASTEST, "the variable TUNEGEN_POLICY")
