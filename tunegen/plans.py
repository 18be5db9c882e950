"""Rendered text -> module -> what its `plan(p)` says that one call launches, and whether a GPU could launch that."""

from __future__ import annotations

import importlib.util
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from .errors import BuildError, CompileError, PlanError, first_line
from .model import DTYPE_BYTES, Config, KernelSource, Launch, Plan, Problem, Scratch, Silicon
from .silicon import WARPS
from .spec import OpSpec

GRID_LIMITS = (2**31 - 1, 65535, 65535)
"""Programs along x, y and z, at most, on any GPU of NVIDIA's."""
FAILURES = (Exception, SystemExit)
"""Of a template: sys.exit() in one would end a sweep without a word, and with exit code 0."""
SEQUENCES = (tuple, list)
"""By type: a Launch is a tuple too."""
PLAN_SECONDS = 10.0
"""For a template to say what one config launches; its import is in it, and the first time that of Triton."""

_hung: set[tuple[str, str]] = set()


@lru_cache(maxsize=4096)
def _import(path: Path) -> ModuleType:
    name = f"tunegen_kernels.{path.stem}"
    specification = importlib.util.spec_from_file_location(name, path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module
    try:
        specification.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)  # another thread may have failed with the same file, and done so already
        raise
    return module


def load(source: KernelSource) -> ModuleType:
    """Import the rendered file of `source`; imports triton. The module has `plan(p)` and its kernels. Raises BuildError
    where the file cannot be written or read, CompileError, whatever the template raises."""
    from .render import write

    path = write(source)
    try:
        return _import(path)
    except FAILURES as error:
        if isinstance(error, OSError) and error.filename == str(path):  # else the template's own code raised it
            raise BuildError(f"cannot read the rendered kernel {path}: {error}") from error
        raise CompileError(f"{source.template}.py.jinja: {first_line(error)}") from error


def make_plan(module: ModuleType, config: Config, hidden: int, rows: int, sms: int) -> Plan:
    """What `config` launches for `rows` rows of `hidden` elements on a GPU with `sms` multiprocessors. Raises
    PlanError, whatever the template's `plan` raises, and where it has none or one that returns no Plan, or a Plan
    that no GPU could launch."""
    file = f"{module.__name__.rpartition('.')[2].rpartition('_')[0]}.py.jinja"
    if not hasattr(module, "plan"):
        raise PlanError(f"{file} has no plan(p)")
    given = SimpleNamespace(M=rows, N=hidden, SMS=sms, **config.numbers)
    try:
        plan = module.plan(given)
    except FAILURES as error:
        if isinstance(error, AttributeError) and error.obj is given:
            raise PlanError(f"{file}: its plan needs {error.name}, which no parameter gives") from error
        raise PlanError(f"{file}: {first_line(error)}, for {rows} rows") from error
    if not isinstance(plan, Plan):
        raise PlanError(f"{file}: plan must return a Plan, got {_kind(plan)}")
    if wrong := _objection(plan):
        raise PlanError(f"{file}: {wrong}, for {rows} rows")
    return plan


def timed_plan(spec: OpSpec, problem: Problem, config: Config, silicon: Silicon) -> Plan:
    """The plan of the first rendering, the one that is timed, on a GPU that need not be here. Raises RenderError, and
    what `plan_of` raises."""
    from .render import renderings

    source, *_ = renderings(problem, config, spec)
    return plan_of(source, problem, config, silicon)


def plan_of(source: KernelSource, problem: Problem, config: Config, silicon: Silicon) -> Plan:
    """What `config` launches for `problem`, on a GPU that need not be here. Raises CompileError and PlanError, where
    the template says nothing within PLAN_SECONDS too, and from then on for every config of it."""
    file, template = f"{source.template}.py.jinja", (source.op, source.template)
    if template in _hung:
        raise PlanError(f"{file}: its plan has hung before")
    try:
        with _deadline(PLAN_SECONDS):
            return make_plan(load(source), config, problem.hidden, problem.rows, silicon.sms)
    except TimeoutError as error:  # not in the template's own code: a disk that hangs, say
        raise PlanError(f"{file}: {error}") from error
    except CompileError as error:
        if isinstance(error.__cause__, TimeoutError):
            _hung.add(template)
        raise


@contextmanager
def _deadline(seconds: float) -> Iterator[None]:
    """Raises TimeoutError inside of the block after `seconds`, in a main thread: no other one gets signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(*_: object) -> None:
        raise TimeoutError(f"no plan within {seconds:g} s")

    before = signal.signal(signal.SIGALRM, ring)
    timer = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, *timer)  # somebody else's, which may ring later than it would have


def _objection(plan: Plan) -> str | None:
    """What of a plan could not be launched, and what could; None where all of it could."""
    whole: tuple[Any, Any] = plan  # what the annotations promise is what is asked here
    launches, scratch = whole
    if not (type(launches) in SEQUENCES and launches and all(isinstance(launch, Launch) for launch in launches)):
        return f"Plan.launches must be a tuple of Launch, such as (launch,), got {_shown(launches)}"
    for launch in launches:
        if wrong := _objection_to(launch):
            return wrong
    if not isinstance(scratch, Mapping):
        return f"Plan.scratch must be a mapping of names to Scratch, got {_shown(scratch)}"
    for name, item in scratch.items():
        if not (isinstance(item, Scratch) and _is_workspace(item)):
            return (
                f"scratch {name!r} must be a Scratch of a shape of integers (divide by //) and a dtype of "
                f"{', '.join(DTYPE_BYTES)}, got {_shown(item)}"
            )
    return None


def _objection_to(launch: Launch) -> str | None:
    """What of one launch is not what the annotations of Launch promise, and what could be launched."""
    whole: tuple[Any, ...] = launch
    kernel, grid, values, warps, pdl, together = whole
    name = getattr(kernel, "__name__", kernel)
    if not _fits(grid):
        x, y, z = GRID_LIMITS
        return (
            f"the grid of {name} is {_shown(grid)}, but must be a tuple of one to three integers from 1 to "
            f"{x}, {y} and {z}; divide by // or triton.cdiv, and put rows first"
        )
    if not isinstance(values, Mapping):
        return f"the values of {name} must be a mapping of names to numbers, got {_shown(values)}"
    if warps is not None and not (type(warps) is int and warps in WARPS):
        return f"num_warps of {name} must be None or one of {', '.join(map(str, WARPS))}, got {_shown(warps)}"
    if type(pdl) is not bool:  # the word "off" is true
        return f"pdl of {name} must be True or False, got {_shown(pdl)}"
    if together is not None and not (type(together) is int and together >= 1):
        return f"together of {name} must be None or an integer from 1 on, got {_shown(together)}"
    return None


def _fits(grid: Any) -> bool:
    return (
        type(grid) in SEQUENCES
        and 1 <= len(grid) <= len(GRID_LIMITS)
        and all(type(n) is int and 1 <= n <= most for n, most in zip(grid, GRID_LIMITS, strict=False))
    )


def _is_workspace(item: Scratch) -> bool:
    shape: Any = item.shape
    return (
        type(shape) in SEQUENCES
        and all(type(size) is int and size >= 0 for size in shape)
        and item.dtype in list(DTYPE_BYTES)
    )


def _kind(value: Any) -> str:
    return str((value if isinstance(value, type) else type(value)).__name__)


def _shown(value: Any) -> str:
    """A value on one line, no longer than one reads."""
    return " ".join(repr(value).split())[:80]
