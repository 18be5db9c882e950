"""Files whose name ends in `.xz`: what is in them is packed by the standard library's lzma, and unpacked here whole."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from .errors import ExportError

LIMIT = 256 * 1024**2
"""Bytes that such a file may hold unpacked, those of some 1800 problems: else a small one could fill the memory."""
WORKING = 128 * 1024**2
"""Bytes that lzma may take beside: its highest preset wants half of that."""
_MEBIBYTES = f"{LIMIT // 1024**2} MiB"
_PLAIN = "take a name without .xz"


def is_packed(path: Path) -> bool:
    """Whether the file is packed, by its name."""
    return path.name.endswith(".xz")


def pack(text: bytes, path: Path) -> bytes:
    """What to write to such a file; the same text gives the same bytes. Raises ExportError if it could not be read."""
    lzma = _lzma(path)
    if len(text) > LIMIT:
        raise ExportError(f"cannot write {path}: it would hold more than {_MEBIBYTES}; {_PLAIN}")
    packed: bytes = lzma.compress(text)
    return packed


def unpack(path: Path) -> bytes:
    """What such a file holds.

    Raises OSError, and ExportError: it is no xz, damaged, cut short, goes on behind its end, or holds more than LIMIT.
    """
    lzma = _lzma(path)
    packed = path.read_bytes()
    unpacker = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=WORKING)
    try:
        text: bytes = unpacker.decompress(packed, max_length=LIMIT + 1)
    except lzma.LZMAError as error:
        raise ExportError(f"cannot read {path} as xz: {error}; make one with `tunegen export`") from error
    if len(text) > LIMIT:
        raise ExportError(f"cannot read {path}: it holds more than {_MEBIBYTES}; unpack it, and {_PLAIN}")
    if not unpacker.eof:
        raise ExportError(f"cannot read {path}: its xz is cut short")
    if unpacker.unused_data:
        raise ExportError(f"cannot read {path}: {len(unpacker.unused_data)} bytes stand behind the end of its xz")
    return text


def _lzma(path: Path) -> ModuleType:
    """The module, which a Python that was built without liblzma lacks."""
    try:
        import lzma
    except ImportError as error:
        raise ExportError(f"this Python has no lzma, which {path} needs ({error}); {_PLAIN}") from error
    return lzma
