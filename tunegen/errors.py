"""Every error that tunegen raises on purpose, one sentence each."""

from __future__ import annotations

CUDA_ADVICE = ("Search for `cuda", "CUDA kernel errors might", "For debugging consider", "Compile with `TORCH_USE_CUDA")
"""What torch says behind every error of CUDA."""


def installs(extra: str) -> str:
    """The command that installs an extra, for a message: of a checkout, as tunegen is in no package index."""
    return f"pip install -e '.[{extra}]' (in a checkout of tunegen)"


class TunegenError(Exception):
    """Base of all errors raised by tunegen itself; the command line prints it as one line and exits with 2."""


class SearchSpaceError(TunegenError):
    """A search space file is wrong; the message names the file, the line and the key."""


class ExpressionError(TunegenError):
    """An expression of a search space uses something outside the whitelist, or cannot be evaluated."""


class RenderError(TunegenError):
    """A template is missing, leaves a variable undefined, or renders to text that is no Python."""


class CompileError(TunegenError):
    """A kernel does not compile for its target, or needs more than the target has."""


class PlanError(CompileError):
    """A template has no `plan(p)`, or it fails or returns what no GPU could launch; for another number of rows it may
    be right."""


class CapturedError(TunegenError):
    """A kernel would have to be compiled and loaded while a CUDA graph is captured; `tunegen.warmup` does it ahead."""


class BuildError(TunegenError):
    """Kernel files cannot be written or read: rendered ones, or Triton's compile cache. No fault of the kernel."""


class VariableError(TunegenError, ValueError):
    """An environment variable has a value that is none of its choices."""


class StoreError(TunegenError):
    """The database cannot be opened, written or understood."""


class ResourceMissingError(TunegenError):
    """A folder that ships with tunegen (templates, search_spaces) is nowhere to be found."""


class WorkerError(TunegenError):
    """The measuring process cannot be started or kept alive."""


class UnknownNormError(TunegenError):
    """A module is no RMSNorm that `rms_norm` could stand in for."""


class RecordingError(TunegenError):
    """A file of recorded problems cannot be read, written or understood."""


class ExportError(TunegenError):
    """A file by `tunegen export` cannot be read, written or understood; the message names the line and the key."""


class ExtraMissingError(TunegenError):
    """A package is not installed that only some commands need; the message says which extra brings it."""


class GateError(TunegenError):
    """The folder of `tunegen gate --out`, or a file in it, cannot be written: seen before the gates run, or after."""


def first_line(error: BaseException) -> str:
    """The most telling single line of an error, with its type."""
    lines, place = _lines(error), ""
    if "^" in lines:  # Triton shows the kernel's source up to where it fails, which may mention errors itself
        caret = len(lines) - 1 - lines[::-1].index("^")
        place = f", at `{lines[caret - 1][:120]}`"
        lines = lines[caret + 1 :] or _lines(_root(error))
    telling = [line for line in lines if "rror" in line or "assert" in line]
    return f"{type(error).__name__}: {(telling or lines or [''])[-1][:300]}{place}"


def _root(error: BaseException) -> BaseException:
    """What began it: where Triton says nothing behind the source, that has the message."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _lines(error: BaseException) -> list[str]:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return [line for line in lines if not line.startswith(CUDA_ADVICE)] or lines
