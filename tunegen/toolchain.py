"""Triton's digest of itself, remembered between processes: for one it reads all its files, in the first call of each
process, although they are the same as ever."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from . import paths
from .installed import state_of

FOLDERS = ("_C", "backends", "compiler", "language", "runtime")
"""Those of Triton that hold what it reads for that, and more."""


@contextlib.contextmanager
def known_key() -> Iterator[None]:
    """Inside, Triton's `triton_key` returns what it has returned before, for as long as none of Triton's files has
    changed; else it is asked, and what it says is remembered.

    It is the only part of the key of a compiled kernel that is not asked for anew: source, types, options, ptxas and
    variables are, by Triton itself. Triton puts another function in its place in the same way, in its pool for tests.
    """
    from triton.runtime import cache

    compute = _original(cache)
    state = None if compute is None or compute.cache_info().currsize else _state(cache)
    if state is None:
        yield
        return
    known = _read(cache, state)
    if known is not None:
        cache.triton_key = lambda: known
        try:
            yield
        finally:
            cache.triton_key = compute
        return
    yield
    if compute.cache_info().currsize and _state(cache) == state:
        paths.write_private(_file(state), f"{state}\n{compute()}".encode())


@lru_cache(maxsize=1)
def _original(cache: Any) -> Any:
    """Triton's own function, None where there is no such function that remembers what it said."""
    found = getattr(cache, "triton_key", None)
    return found if hasattr(found, "cache_info") else None


def _state(cache: Any) -> str | None:
    """What is known of Triton's files, None where they cannot be asked for."""
    try:
        return state_of(*(Path(cache.__file__).parent.parent / folder for folder in FOLDERS))
    except OSError:
        return None


def _file(state: str) -> Path:
    return paths.build_folder() / f"triton_{state[:16]}.txt"


def _read(cache: Any, state: str) -> str | None:
    """What was remembered under `state`, if it is Triton's version and digests."""
    stored, _, key = (paths.read_private(_file(state)) or b"").decode("ascii", "replace").partition("\n")
    sound = re.fullmatch(re.escape(cache.__version__) + r"[0-9a-f]{64}(-[0-9a-f]{64})*", key)
    return key if stored == state and sound else None
