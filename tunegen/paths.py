"""Where things are: the only module that reads environment variables or knows a folder."""

from __future__ import annotations

import contextlib
import os
import shlex
import stat
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .errors import ResourceMissingError

PACKAGE = Path(__file__).resolve().parent

ANOTHER_DATABASE = "give another with --db, or set TUNEGEN_DB"
"""What helps where the database is no good, whichever of the two has named it."""

HOMELESS = "~"
"""What a path begins with where no home folder is known."""

# What `os.environ` keeps is encoded, and follows every change that is made through it.
_ENCODED: Mapping[Any, Any] = getattr(os.environ, "_data", os.environ)
_encode: Callable[[str], Any] = getattr(os.environ, "encodekey", str) if _ENCODED is not os.environ else str
_DISABLE, _NO = _encode("TUNEGEN_DISABLE"), (None, *map(_encode, ("", "0")))


def resource(name: str) -> Path:
    """Folder `templates` or `search_spaces`: inside the package (wheel), else beside it (checkout).

    `importlib.resources` finds neither in an editable install, hence the look-up by file position.
    """
    installed, checkout = PACKAGE / name, PACKAGE.parent / name
    if installed.is_dir():
        return installed
    if in_checkout() and checkout.is_dir():
        return checkout
    raise ResourceMissingError(f"no folder {name!r} at {installed} or {checkout}; reinstall tunegen")


def in_checkout() -> bool:
    """Whether the package runs from a source checkout, as in an editable install."""
    return (PACKAGE.parent / "pyproject.toml").is_file()


def user_cache() -> Path:
    """The user's cache folder of the operating system. A user without a home folder has that of the root folder, where
    a login would put them: mostly it cannot be written, and what follows from that is said where it matters."""
    import platformdirs

    try:
        found = platformdirs.user_cache_dir("tunegen", appauthor=False)
    except RuntimeError:
        found = HOMELESS
    return Path("/.cache/tunegen" if found.startswith(HOMELESS) else found)


def database() -> Path:
    """`TUNEGEN_DB`, else `cache/tune.db` of a checkout, else `tune.db` in the user's cache folder."""
    if value := os.environ.get("TUNEGEN_DB"):
        return absolute(_expanded(value))
    return (PACKAGE.parent / "cache" if in_checkout() else user_cache()) / "tune.db"


def _expanded(value: str) -> Path:
    """With the home folder in place of `~`; the root where there is none, as in `user_cache`."""
    found = os.path.expanduser(value)
    return Path("/" + found[1:].lstrip("/") if found.split("/")[0] == HOMELESS else found)


def absolute(path: Path) -> Path:
    """`path` from the root on; as it is where the current folder has been deleted, since nothing lies there."""
    try:
        return path.absolute()
    except FileNotFoundError:
        return path


def is_somewhere() -> bool:
    """Whether this process has a current folder; where it has been deleted, torch ends the process as it is loaded."""
    try:
        return bool(os.getcwd())
    except FileNotFoundError:
        return False


def on_database(command: str, path: Path) -> str:
    """A command to be typed, with --db where it would not find the database at `path` by itself."""
    path = absolute(path)
    return command if path == absolute(database()) else f"{command} --db {shlex.quote(str(path))}"


def build_folder() -> Path:
    """`TUNEGEN_BUILD`, else `build` in the user's cache folder: where rendered kernels lie."""
    if value := os.environ.get("TUNEGEN_BUILD"):
        return absolute(_expanded(value))
    return user_cache() / "build"


def disabled() -> bool:
    """`TUNEGEN_DISABLE`: any value but empty and 0 sends every call to torch. Asked in every call, hence the look past
    `os.environ`, which encodes the name and decodes the value each time."""
    return _ENCODED.get(_DISABLE) not in _NO


def policy() -> str:
    """`TUNEGEN_POLICY`: fastest, deterministic or invariant; empty where it is not set."""
    return os.environ.get("TUNEGEN_POLICY", "")


def compiled_as() -> str:
    """`TUNEGEN_COMPILE`: trace or op, what a call becomes under `torch.compile`; empty where it is not set."""
    return os.environ.get("TUNEGEN_COMPILE", "")


def interpreted() -> bool:
    """`TRITON_INTERPRET`: kernels run in Triton's interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "") not in ("", "0")


def continuous_integration() -> bool:
    """`CI`: set by the usual services; progress is then printed as plain lines."""
    return bool(os.environ.get("CI"))


def write_whole(path: Path, text: bytes, mode: int = 0o600) -> None:
    """Write a file so that others see all of it or none, whatever fails. Raises OSError."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(text)
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def write_named(path: Path, text: bytes) -> None:
    """Write a file that the caller has named, for all to read, whole or not at all; its folder is made where there is
    none. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text, 0o644)


def obstacle(error: OSError) -> str:
    """Why a folder or a file in it could not be made, in a few words."""
    return f"{error.filename} is no folder" if isinstance(error, FileExistsError) else str(error.strerror)


def is_private(folder: Path) -> bool:
    """Whether it is a folder that is ours, and nobody else may write to it."""
    try:
        status = os.stat(folder)
        return stat.S_ISDIR(status.st_mode) and _ours(status)
    except OSError:
        return False


def read_private(path: Path) -> bytes | None:
    """What a file holds that nobody else can have written; None where there is none."""
    if not is_private(path.parent):
        return None
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(handle, "rb") as file:
            status = os.fstat(file.fileno())
            return file.read() if stat.S_ISREG(status.st_mode) and _ours(status) else None
    except OSError:
        return None


def write_private(path: Path, text: bytes) -> None:
    """Keep what `read_private` finds, whole or not at all; nothing where the folder is not private or not writable."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if is_private(path.parent):
            write_whole(path, text)


def _ours(status: os.stat_result) -> bool:
    return status.st_uid == os.geteuid() and not status.st_mode & 0o022
