"""What the ladder of `dispatch` has answered before, in a small file beside the rendered kernels: a new process that
finds its call there reads neither search space, database nor templates.

An entry holds for as long as all that it came from is the same: `stamp` is a digest of that. Whatever is wrong with the
file, it has no entries, and is written anew. Nothing in it is executed. A rendered kernel is, if it lies in the build
folder and has the digest that is noted here: so the file counts only where nobody else can write.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
from pathlib import Path
from typing import Any, NamedTuple

from . import paths
from .installed import our_files, releases
from .model import Config, KernelSource, Problem, Silicon, StoredChoice

MOST = 1024
"""Entries of a kind; then the file begins anew."""

FILES = our_files()
"""What they were when this process began. Once they have changed, what it has loaded is not what they say."""

_HEADER_BYTES = 28
_databases: dict[tuple[int, int], int] = {}
"""Open files by device and number. They stay open: to close one would end every lock that SQLite holds on it in this
process."""

Answer = tuple[Config | None, str, StoredChoice | None]
"""The config, None for torch's own op; why; the stored trial that it comes from."""


class How(NamedTuple):
    """Which rendering of a config is launched: the arguments of `render.rendering`."""

    save_rstd: bool
    nested: tuple[str, ...]
    accumulate_dw: bool


def stamp() -> str | None:
    """A digest of all that decides an answer beside problem and GPU: our files, what renders them, the database. None
    where nothing may be remembered."""
    database = _state_of_database(paths.database())
    if database is None or not FILES or our_files() != FILES:
        return None
    return hashlib.sha256(repr((FILES, releases(), database)).encode("utf-8", "surrogateescape")).hexdigest()


def answer(known: str | None, problem: Problem, silicon: Silicon) -> Answer | None:
    """What the ladder answers first, if that is known under the stamp `known`."""
    return _answer(_entries(known).get("answers", {}).get(_name(problem, silicon)))


def keep_answer(known: str | None, problem: Problem, silicon: Silicon, found: Answer) -> None:
    """Remember an answer that was found after `stamp` returned `known`; raises nothing."""
    config, why, stored = found
    plain = None if config is None else [config.family, dict(config.parameters)]
    _keep(known, "answers", _name(problem, silicon), [plain, why, stored])


def rendering(problem: Problem, config: Config, how: How) -> KernelSource:
    """The kernel file of a config: that which is known and lies in the build folder as it was written, else a new one,
    which is remembered. Raises RenderError."""
    known, name = stamp(), _name(problem, config, how)
    source = _source(_entries(known).get("renderings", {}).get(name))
    if source is None:
        from .ops import op_spec
        from .render import rendering as render

        source = render(problem, config, op_spec(problem.op), **how._asdict())
        flags = [[name, value] for name, value in source.flags.items()]
        noted = [source.op, source.template, _digest(source.text.encode()), source.digest, flags]
        _keep(known, "renderings", name, noted)
    return source


def file() -> Path:
    """Where the index of today's database lies; each installation has its own."""
    place = f"{paths.database()}\0{paths.PACKAGE}"
    return paths.build_folder() / f"index_{_digest(place.encode('utf-8', 'surrogateescape'))[:16]}.json"


def _state_of_database(path: Path) -> tuple[Any, ...] | None:
    """What changes with each commit, its counter in SQLite's header included; None while a journal lies beside it."""
    try:
        if any(os.path.exists(f"{path}{journal}") for journal in ("-journal", "-wal")):
            return None
        status = os.stat(path)
        number = status.st_dev, status.st_ino
        if number not in _databases:
            if not stat.S_ISREG(status.st_mode):  # to open a pipe is to wait for someone who writes
                return None
            handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            status = os.fstat(handle)
            number = status.st_dev, status.st_ino
            _databases[number] = handle
        header = os.pread(_databases[number], _HEADER_BYTES, 0)
    except FileNotFoundError:
        return (str(path),)
    except OSError:
        return None
    return str(path), *number, status.st_size, status.st_mtime_ns, header[24:].hex()


def _name(*parts: object) -> str:
    return " ".join(map(repr, parts))


def _digest(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()


def _entries(known: str | None) -> dict[str, dict[str, Any]]:
    """Entries by kind and name that hold under this stamp."""
    text = None if known is None else paths.read_private(file())
    try:
        found = json.loads(text or b"{}")
        if found["stamp"] == known and all(type(found[kind]) is dict for kind in ("answers", "renderings")):
            return {kind: found[kind] for kind in ("answers", "renderings")}
    except (ValueError, TypeError, KeyError, RecursionError):
        pass
    return {}


def _keep(known: str | None, kind: str, name: str, value: Any) -> None:
    if known is None or stamp() != known:  # something has changed while it was found
        return
    entries: dict[str, dict[str, Any]] = {"answers": {}, "renderings": {}} | _entries(known)
    if len(entries[kind]) >= MOST:
        entries[kind] = {}
    entries[kind][name] = value
    paths.write_private(file(), json.dumps({"stamp": known, **entries}).encode())


def _answer(value: Any) -> Answer | None:
    """The entry as an answer; None when anything in it is of the wrong type."""
    try:
        plain, why, stored = _text_alone(value)
        config = None if plain is None else Config.of(_word(plain[0]), _parameters(plain[1]))
        trial = None if stored is None else _stored(*stored)
    except (ValueError, TypeError, IndexError, KeyError):
        return None
    return (config, why, trial) if type(why) is str else None


def _text_alone(value: Any) -> Any:
    """The entry; raises ValueError where one of its texts has half of a pair of surrogates, which no file can hold."""
    json.dumps(value, ensure_ascii=False).encode()
    return value


def _stored(family: Any, parameters: Any, digest: Any, rows: Any, us: Any, name: Any, trial: Any, *flags: Any) -> Any:
    half, final = flags
    texts = all(type(text) is str for text in (digest, name))
    whole = type(rows) is type(trial) is int and rows > 0 and type(us) is float and 0 < us < math.inf
    if not (texts and whole and type(half) is type(final) is bool):
        raise ValueError
    return StoredChoice(_word(family), _parameters(parameters), digest, rows, us, name, trial, half, final)


def _word(value: Any) -> str:
    if type(value) is not str or not value.isidentifier():
        raise ValueError
    return value


def _parameters(values: Any) -> dict[str, int | str]:
    if type(values) is not dict or not all(type(value) in (int, str) for value in values.values()):
        raise ValueError
    return values


def _source(value: Any) -> KernelSource | None:
    try:
        op, template, digest, code, flags = _text_alone(value)
        path = paths.build_folder() / f"{_word(template)}_{digest[:16]}.py"
        known = {_word(name): tuple(flag) if type(flag) is list else flag for name, flag in flags}
        text = paths.read_private(path)
        if text is None or _digest(text) != digest or type(code) is not str:
            return None
        return KernelSource(_word(op), template, text.decode(), code, known)
    except (ValueError, TypeError):
        return None
