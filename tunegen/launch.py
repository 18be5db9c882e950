"""A config bound to a device: compiles what the arguments at hand need, once, and launches it. The only place that
launches."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, partial
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import paths
from .compile import (
    ALIGNED,
    ArgumentClass,
    aligned,
    compile_launch,
    constexprs,
    integer_class,
    launch_options,
    load_binary,
)
from .errors import CompileError, first_line
from .model import Config, KernelSource, Launch, Plan, Scratch
from .once import first
from .plans import load, make_plan
from .reference import DTYPE_NAMES, DTYPES
from .syntax import again

# Releases whose compiled kernels are launched directly: their `CompiledKernel.run` takes the same arguments. Any
# other goes the official way, kernel[grid](...), which is slower on the host by about 10 us a launch.
DIRECT_LAUNCH = ("3.6", "3.7", "3.8", "3.9")

Argument = Tensor | int | float
Allocate = Callable[[str, Scratch], Tensor]

_told: set[str] = set()
HERE = nullcontext()
"""Where nothing is to be switched; kept, since a new one costs as much as the question."""


@lru_cache(maxsize=1)
def launches_directly() -> bool:
    """Whether this process may launch compiled kernels itself; says so once where it may not."""
    if paths.interpreted():
        return False
    import triton

    minor = ".".join(triton.__version__.split(".")[:2])
    if minor not in DIRECT_LAUNCH and first(_told, minor):
        logging.getLogger("tunegen").warning(
            "Triton %s is not on the tested list: using its slower official launch", minor
        )
    return minor in DIRECT_LAUNCH


@lru_cache(maxsize=4096)
def _fixed_names(kernel: Any) -> frozenset[str]:
    return frozenset(constexprs(kernel))


class _Ready(NamedTuple):
    """A loaded kernel, its grid, the number of its device, its arguments in order."""

    compiled: Any
    grid: tuple[int, ...]
    device: int
    arguments: list[Any]

    def run(self) -> None:
        """Launch on the current stream."""
        from triton import knobs
        from triton.runtime.driver import driver

        compiled, grid, device, arguments = self
        stream = driver.active.get_current_stream(device)
        metadata = compiled.launch_metadata(grid, stream, *arguments)
        enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
        compiled.run(*grid, stream, compiled.function, compiled.packed_metadata, metadata, enter, leave, *arguments)


class Standing(NamedTuple):
    """Where a variant keeps the compiled kernel of a launch, and the arguments by name in the kernel's order."""

    key: tuple[Any, ...]
    values: dict[str, Any]


class Variant:
    """One config of one rendered template on one device.

    `constants` are the constexprs that come from the problem (N, OFFSET). Compiled kernels are kept by what they
    assume of their arguments: dtypes, 16-byte alignment, row strides.
    """

    def __init__(
        self,
        source: KernelSource,
        config: Config,
        constants: Mapping[str, int | float],
        accumulate: str,
        device: torch.device,
        sms: int,
    ) -> None:
        self.module: ModuleType = load(source)
        self.source, self.config, self.device, self.sms = source, config, device, sms
        self.constants = {**constants, **config.numbers}
        self.hidden = int(constants["N"])
        self.accumulate = accumulate
        self.compiled: dict[tuple[Any, ...], Any] = {}
        self._plan: tuple[int, Plan] | None = None

    def plan(self, rows: int) -> Plan:
        """Launches and workspace for `rows` rows; the last one is remembered."""
        last = self._plan  # read once: another thread may put its own there
        if last is None or last[0] != rows:
            last = self._plan = rows, make_plan(self.module, self.config, self.hidden, rows, self.sms)
        return last[1]

    def __call__(self, rows: int, arguments: Mapping[str, Argument], allocate: Allocate | None = None) -> None:
        """Run all launches on the current stream of the device.

        `arguments` maps kernel parameter names (`x_ptr`, `x_row_stride`, ...) to tensors and numbers; `allocate(name,
        scratch)` returns the workspace tensors, new ones by default.
        """
        plan = self.plan(rows)
        bound = {**arguments, **self._workspace(plan, allocate)}
        if not launches_directly():
            for launch in plan.launches:
                self._launch_officially(launch, bound)
            return
        with self._on_device():
            for launch in plan.launches:
                self._ready(launch, bound).run()

    def bind(
        self, rows: int, arguments: Mapping[str, Argument], allocate: Allocate | None = None
    ) -> Callable[[], None]:
        """The same call as a function that only launches: all else is done here, once, for these very tensors. Kernels
        are compiled and loaded, and the workspace is there; what a plan wants zero is filled anew in each call."""
        plan = self.plan(rows)
        workspace = self._workspace(plan, allocate)
        bound = {**arguments, **workspace}
        zeros = [workspace[f"{name}_ptr"] for name, scratch in plan.scratch.items() if scratch.zero]
        run: list[Callable[[], None]]
        if launches_directly():
            with self._on_device():
                run = [self._ready(launch, bound).run for launch in plan.launches]
        else:
            run = [partial(self._launch_officially, launch, bound) for launch in plan.launches]

        def call() -> None:
            with self._on_device():
                for tensor in zeros:
                    tensor.zero_()
                for launch in run:
                    launch()

        return call

    def _workspace(self, plan: Plan, allocate: Allocate | None) -> dict[str, Tensor]:
        make = allocate or (lambda _, scratch: self.allocate(scratch))
        return {f"{name}_ptr": make(name, scratch) for name, scratch in plan.scratch.items()}

    def _on_device(self) -> AbstractContextManager[Any]:
        here = self.device.type != "cuda" or torch.cuda.current_device() == self.device.index
        return HERE if here else torch.cuda.device(self.device)

    def allocate(self, scratch: Scratch) -> Tensor:
        """A workspace tensor as a plan describes it."""
        make = torch.zeros if scratch.zero else torch.empty
        return make(scratch.shape, dtype=DTYPES[scratch.dtype], device=self.device)

    def _launch_officially(self, launch: Launch, bound: Mapping[str, Argument]) -> None:
        values = {**bound, **launch.values, **{n: v for n, v in self.constants.items() if n not in launch.values}}
        try:
            if ALIGNED in launch.kernel.arg_names:
                # A row stride of N is no constant here: Triton knows what may be copied only where 16 divides N.
                values[ALIGNED] = self.hidden % 16 == 0 and self._aligned(bound)
            named = {name: values[name] for name in launch.kernel.arg_names}
        except (AttributeError, KeyError) as error:
            raise self._unbound(launch, error) from error
        options = launch_options(launch, self.config)
        again(lambda: launch.kernel[launch.grid](**named, **options))  # it parses before it launches

    def _ready(self, launch: Launch, bound: Mapping[str, Argument]) -> _Ready:
        """A launch with all that it takes; compiles and loads the kernel where that is new."""
        found = self.standing(launch, bound)
        compiled = self.compiled.get(found.key)
        if compiled is None:
            from triton.runtime.driver import driver

            by_name = dict(zip(found.values, found.key[-1], strict=True))
            compiled = compile_launch(launch, self.config, by_name, driver.active.get_current_target())
            load_binary(compiled)
            compiled = self.compiled.setdefault(found.key, compiled)  # of several threads all launch the first one's
        return _Ready(compiled, (*launch.grid, 1, 1)[:3], self.device.index, [*found.values.values()])

    def standing(self, launch: Launch, bound: Mapping[str, Argument | ArgumentClass]) -> Standing:
        """Where the compiled kernel of a launch is kept, and its arguments; a class in `bound` stands for a tensor or
        number of that class. Raises CompileError for a parameter that nobody gives."""
        kernel = launch.kernel
        values = {**self.constants, **bound, **launch.values}
        try:
            fixed = _fixed_names(kernel)
            if ALIGNED in fixed:
                values[ALIGNED] = self._aligned(bound)
            arguments = {name: values[name] for name in kernel.arg_names}
            classes = tuple([self._classify(name, value, name in fixed) for name, value in arguments.items()])
        except (AttributeError, KeyError) as error:
            raise self._unbound(launch, error) from error
        options = launch.num_warps, launch.pdl, launch.together  # a kernel may be launched twice, once early
        return Standing((kernel.__name__, *options, classes), arguments)

    def _aligned(self, bound: Mapping[str, Argument | ArgumentClass]) -> bool:
        return aligned({name: self._classify(name, value, False) for name, value in bound.items()})

    def _unbound(self, launch: Launch, error: Exception) -> CompileError:
        """For a template whose launch is of no kernel, or of one with a parameter that nobody gives."""
        kernel = getattr(launch.kernel, "__name__", launch.kernel)
        why = f"nothing gives its parameter {error}" if isinstance(error, KeyError) else first_line(error)
        return CompileError(f"{self.source.template}.py.jinja: {kernel}: {why}")

    def _classify(self, name: str, value: Argument | ArgumentClass, fixed: bool) -> ArgumentClass:
        if isinstance(value, Tensor):
            return ArgumentClass(f"*{DTYPE_NAMES[value.dtype]}", value.data_ptr() % 16 == 0)
        if isinstance(value, ArgumentClass):
            return value
        if fixed:
            return ArgumentClass("constexpr", value=value)
        if isinstance(value, float):
            return ArgumentClass(self.accumulate)
        return integer_class(name, value, self.hidden)
