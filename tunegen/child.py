"""The child's side of the measuring process: what it is, what it sends, and its loop, which imports torch only once it
runs."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from .errors import WorkerError, first_line
from .model import Silicon
from .processes import follow_parent, lead_group


class Answer(NamedTuple):
    """What the child sends back: the result, the peak of GPU memory reserved so far in bytes, whether the child must be
    replaced, and what it has spent its seconds on since the last answer."""

    result: Any
    peak_bytes: int
    poisoned: bool
    seconds: Mapping[str, float] = {}


@dataclass(frozen=True)
class Facts:
    """What the measuring process is and runs on; `versions` names tunegen, torch, triton, driver."""

    silicon: Silicon
    versions: dict[str, str]


def installed_versions() -> dict[str, str]:
    """Versions of the packages that a result depends on; one that is not installed is left out."""
    found = {}
    for name in ("tunegen", "torch", "triton"):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def following(connection: Connection, target: Any, device: int, seed: int) -> None:
    """Body of every child: `target`, for as long as the parent lives."""
    lead_group()
    follow_parent()
    target(connection, device, seed)


def serve_later(connection: Connection, device: int, seed: int) -> None:
    """Body of a child that is started ahead."""
    serve(connection, device, seed, spare=True)


def serve(connection: Connection, device: int, seed: int, spare: bool = False) -> None:
    """Body of the child: answer requests until the parent goes away. What it raises itself is sent as a WorkerError."""
    from .serving import Server

    try:
        server = Server(device, seed, spare)
    except Exception as error:
        with contextlib.suppress(ConnectionError):  # nobody waits for it any more
            connection.send(WorkerError(f"the measuring process cannot use cuda:{device}: {first_line(error)}"))
        return
    with contextlib.suppress(EOFError, ConnectionError):
        connection.send(server.facts)
        while True:
            method, arguments = connection.recv()
            try:
                answer = getattr(server, method)(*arguments)
            except Exception as error:
                answer = WorkerError(first_line(error))
            connection.send(answer)
