"""What is installed, told by releases and by what the file system knows of files: whoever remembers something keeps
this with it, and trusts it for as long as this is the same. No file is read."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from . import paths
from .errors import ResourceMissingError

RELEASES = ("torch", "triton", "jinja2", "pyyaml")
"""What decides what a template renders to and which trials count, beside our own files and Python's release."""


@functools.lru_cache(maxsize=1)
def triton_version() -> int:
    """The installed Triton as a number, 306 for 3.6; 0 where there is none."""
    version = _release("triton")
    if not version:
        return 0
    major, minor = version.split(".")[:2]
    return int(major) * 100 + int(minor)


@functools.lru_cache(maxsize=1)
def releases() -> tuple[str, ...]:
    """Of Python and of RELEASES, "" for what is not there; those that this process began with."""
    return (sys.version, *map(_release, RELEASES))


def _release(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def our_files() -> str:
    """A digest of what is known of our sources, templates and search spaces; "" where they cannot be asked for."""
    try:
        return state_of(paths.PACKAGE, paths.resource("templates"), paths.resource("search_spaces"))
    except (OSError, ResourceMissingError):
        return ""


def state_of(*roots: Path) -> str:
    """A digest of the place, size, times and number of every file below `roots`. The time of change is set by nobody
    but the kernel: a package that puts other contents under an old date has another one. Raises OSError."""
    found = hashlib.sha256()
    for root in roots:
        for path, status in _files(str(root)):
            known = status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino
            found.update(f"{path} {known}\n".encode("utf-8", "surrogateescape"))
    return found.hexdigest()


def _files(folder: str) -> Iterator[tuple[str, os.stat_result]]:
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            if not entry.is_dir():
                yield entry.path, entry.stat()
            elif entry.name != "__pycache__":
                yield from _files(entry.path)
