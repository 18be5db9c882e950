"""Launches of a variant made ready for tensors in standard layout: a call puts addresses in their places, no more.

`Variant.__call__` binds tensors by name, classifies each argument and asks Triton's driver for the rest, in every call.
Here that is done once for each row count. What is left holds for what its kernels were compiled for, contiguous and
16-byte aligned tensors of these dtypes, while Triton has no hook that wants to see launches. Nothing here compiles or
loads a kernel, and no tensor is kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .compile import ArgumentClass
from .launch import Variant
from .model import Launch, Scratch
from .reference import DTYPES

MISALIGNED = 15
"""The bits of an address that are zero where 16 divides it."""

MOST_ROW_COUNTS = 16
"""Of one variant, whose launches are kept; then it begins anew."""

ONE = (1,)
"""The strides of a vector."""

# What compiled graphs ask of their inputs, in one question. A release without it, or without `empty`, has no short way.
TensorGuards: Any = getattr(torch._C._dynamo.guards, "TensorGuards", None)
# What torch.cuda.current_device and Triton's driver call, less their layers of Python; and what Inductor's code makes
# tensors with, on the current device: sizes, strides, dtype. Absent from builds for the CPU.
current_device: Any = getattr(torch._C, "_cuda_getDevice", None)
current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
empty: Any = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)

Run = Callable[..., bool]
"""Runs all launches of a call on the current stream, given addresses and eps. False, and nothing is launched, where
someone wants to see launches, or the workspace is not aligned."""


def zeros(size: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """As `empty`, filled."""
    made: Tensor = empty(size, strides, dtype).zero_()
    return made


class Frame:
    """All launches of a call for one row count, and how to make its workspace."""

    __slots__ = ("launches", "workspace")

    def __init__(self, launches: Run, workspace: tuple[Callable[[], Tensor], ...]) -> None:
        self.launches, self.workspace = launches, workspace

    @property
    def run(self) -> Run:
        """To be called on the device, with values in the order of the names that were prepared for."""
        return self._with_workspace if self.workspace else self.launches

    def _with_workspace(self, *values: Any) -> bool:
        kept = [make() for make in self.workspace]  # until all is launched
        addresses = [tensor.data_ptr() for tensor in kept]
        return not any(address & MISALIGNED for address in addresses) and self.launches(*values, *addresses)


class Call:
    """Calls of one kind and one shape, of which nothing is left to find out but addresses.

    `fits(*given)`: whether tensors are like those that were given, of their types, dtypes, devices, shapes and strides,
    with a gradient or without, under the same transforms; it keeps none of them, and turns down one given twice. `kind`
    is what the caller knows of such calls; `run` launches them on `device`. For outputs: `size`, `strides` and `dtype`
    of x, `width` (N) of the weight, `height` (M) and `summed`, the dtype, of rstd.
    """

    __slots__ = ("device", "dtype", "fits", "height", "kind", "run", "size", "strides", "summed", "width")

    def __init__(self, kind: Any, prepared: Prepared, run: Run, given: Sequence[Tensor], x: Tensor) -> None:
        sizes, strides = [[*tensor.shape] for tensor in given], [[*tensor.stride()] for tensor in given]
        self.fits = TensorGuards(*given, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
        self.kind, self.run, self.device = kind, run, prepared.variant.device.index or 0
        self.size, self.strides, self.dtype = tuple(x.shape), _contiguous(x.shape), x.dtype
        self.width, self.height = (prepared.hidden,), (x.numel() // prepared.hidden,)
        self.summed = prepared.summed


class Table(dict[tuple[Any, ...], Any]):
    """What is known of calls, by all that decides what answers; and `calls`, those that came last, which their shapes
    tell apart too."""

    __slots__ = ("calls",)

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[tuple[Any, ...], Call] = {}


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[place + 1 :]) for place in range(len(shape)))


class Prepared:
    """A variant with a frame for each of MOST_ROW_COUNTS row counts at most. `given` has the names and classes of what
    a call gives, in its order; `numbers` the other run-time numbers, M excepted; rows lie `hidden` elements apart;
    `summed` is the dtype of sums and of rstd."""

    __slots__ = ("frames", "given", "hidden", "numbers", "summed", "variant")

    def __init__(self, variant: Variant, given: Mapping[str, ArgumentClass], numbers: Mapping[str, int]) -> None:
        self.variant, self.given, self.numbers = variant, given, numbers
        self.hidden = numbers["x_row_stride"]
        self.summed = DTYPES[variant.accumulate]
        self.frames: dict[int, Frame] = {}

    def call(self, kind: Any, given: Sequence[Tensor], x: Tensor) -> Call | None:
        """Ready to be run for tensors like those that are given, one of them x; None where there is no `frame`, or
        torch has not what it takes."""
        if TensorGuards is None or empty is None:
            return None
        frame = self.frame(x.numel() // self.hidden)
        return None if frame is None else Call(kind, self, frame.run, given, x)

    def frame(self, rows: int) -> Frame | None:
        """The launches for `rows` rows, which `frames` may have already; None where their kernels are not loaded yet,
        or must be launched otherwise."""
        found = self.frames.get(rows) or self._make(rows)
        if found is not None:
            if len(self.frames) >= MOST_ROW_COUNTS:
                self.frames = {}  # a new one: another thread may read the old
            self.frames[rows] = found
        return found

    def _make(self, rows: int) -> Frame | None:
        variant, plan = self.variant, self.variant.plan(rows)
        scratch = {f"{name}_ptr": ArgumentClass(f"*{one.dtype}", True) for name, one in plan.scratch.items()}
        bound = {**self.given, **scratch, **self.numbers, "M": rows}
        names = (*self.given, *scratch)
        launches = [self._bare(launch, bound, names) for launch in plan.launches]
        loaded = [one for one in launches if one is not None]
        if len(loaded) < len(launches):
            return None
        run = _running(loaded, variant.device.index or 0, len(names))
        return Frame(run, tuple(map(_maker, plan.scratch.values())))

    def _bare(self, launch: Launch, bound: Mapping[str, Any], names: Sequence[str]) -> Bare | None:
        found = self.variant.standing(launch, bound)
        compiled = self.variant.compiled.get(found.key)
        beside = None if compiled is None else _beside_arguments(compiled)
        if compiled is None or beside is None:
            return None
        fixed = {name: value for name, value in found.values.items() if name not in names or name in launch.values}
        places = {name: place for place, name in enumerate(names)} | dict.fromkeys(fixed)
        order = [(places[name], value) for name, value in found.values.items()]
        return Bare(compiled.run.launch, (*launch.grid, 1, 1)[:3], *beside, order)


def _maker(scratch: Scratch) -> Callable[[], Tensor]:
    return partial(zeros if scratch.zero else empty, (math.prod(scratch.shape),), ONE, DTYPES[scratch.dtype])


class Bare(NamedTuple):
    """A kernel for Triton's C launcher, `launch`, which takes the grid, the stream, what is `behind` it, and then the
    kernel's arguments, `spread` or as one tuple: the value at a place, or a fixed one where `order` has no place."""

    launch: Callable[..., None]
    grid: tuple[int, ...]
    behind: tuple[Any, ...]
    spread: bool
    order: Sequence[tuple[int | None, Any]]


_RUN = """
def run({given}):
    try:
        if runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls:
            return False
    except AttributeError:  # no chain was put there
        if runtime.launch_enter_hook is not None or runtime.launch_exit_hook is not None:
            return False
    stream = current_stream(device)
    {launches}
    return True
"""


def _running(launches: Sequence[Bare], device: int, given: int) -> Run:
    """A function of `given` values that runs them, unless someone wants to see launches; that is asked in every call,
    as Triton does.

    It is compiled from its text, as `collections.namedtuple` is: put together in each call, the arguments took as long
    as all else that Python does in a launch.
    """
    from triton import knobs

    values: dict[str, Any] = {"runtime": knobs.runtime, "current_stream": current_stream, "device": device}

    def fixed(value: Any) -> str:
        name = f"f{len(values)}"
        values[name] = value
        return name

    lines = []
    for launch, grid, behind, spread, order in launches:
        arguments = [fixed(value) if place is None else f"v{place}" for place, value in order]
        kernel = arguments if spread else [f"({', '.join(arguments)},)"]
        text = ", ".join([*map(fixed, grid), "stream", *map(fixed, behind), *kernel])
        lines.append(f"{fixed(launch)}({text})")
    names = ", ".join(f"v{place}" for place in range(given))
    exec(_code(_RUN.format(given=names, launches="\n    ".join(lines))), values)
    run: Run = values.pop("run")  # a function in its own globals would be kept until cycles are collected
    return run


@lru_cache(maxsize=1024)
def _code(text: str) -> CodeType:
    """Compiled once for all row counts: the text has names in place of values."""
    return compile(text, "<launch>", "exec")


def _beside_arguments(compiled: Any) -> tuple[tuple[Any, ...], bool] | None:
    """What the C launcher of a loaded kernel takes between the stream and the kernel's arguments, without hooks and
    without scratch memory of Triton's own; and whether these are spread. None for one that needs such memory or that is
    no launcher of the releases on the list of `launch`."""
    run = compiled.run
    wants = ("global_scratch_size", "profile_scratch_size", "gsan_enabled")
    if type(run).__name__ != "CudaLauncher" or any(getattr(run, name, 0) for name in wants):
        return None
    ahead = (compiled.function, run.launch_cooperative_grid, run.launch_pdl)
    if hasattr(run, "kernel_signature"):  # 3.7 and later
        metadata = (compiled.packed_metadata, None, None, None, None, None, run.arg_annotations, run.kernel_signature)
        return (*ahead, *metadata), False
    return (*ahead, None, None, compiled.packed_metadata, None, None, None), True
