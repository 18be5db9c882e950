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
from typing import Any

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

# What torch.cuda.current_device and Triton's driver call, less their layers of Python; absent from builds for the CPU.
current_device: Any = getattr(torch._C, "_cuda_getDevice", None)
current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)


Bare = Callable[..., None]
"""Launches one kernel through Triton's C launcher: what a call gives, its workspace, and the stream."""


class Frame:
    """All launches of a call for one row count on one device, and how to make its workspace."""

    __slots__ = ("device", "launches", "workspace")

    def __init__(self, device: int, launches: tuple[Bare, ...], workspace: tuple[Callable[[], Tensor], ...]) -> None:
        self.device, self.launches, self.workspace = device, launches, workspace

    def __call__(self, values: tuple[Any, ...]) -> bool:
        """Run them on the current stream; `values` in the order of the names that were prepared for. False, and nothing
        is launched, where the workspace is not aligned."""
        if self.workspace:
            kept = [make() for make in self.workspace]  # until all is launched
            for tensor in kept:
                address = tensor.data_ptr()
                if address & MISALIGNED:
                    return False
                values += (address,)
        device = self.device
        if current_device() != device:
            with torch.cuda.device(device):
                return self(values)
        values += (current_stream(device),)
        for launch in self.launches:
            launch(*values)
        return True


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
        return Frame(variant.device.index or 0, tuple(loaded), tuple(map(self._maker, plan.scratch.values())))

    def _maker(self, scratch: Scratch) -> Callable[[], Tensor]:
        make = torch.zeros if scratch.zero else torch.empty
        return partial(make, math.prod(scratch.shape), dtype=DTYPES[scratch.dtype], device=self.variant.device)

    def _bare(self, launch: Launch, bound: Mapping[str, Any], names: Sequence[str]) -> Bare | None:
        found = self.variant.standing(launch, bound)
        compiled = self.variant.compiled.get(found.key)
        beside = None if compiled is None else _beside_arguments(compiled)
        if compiled is None or beside is None:
            return None
        fixed = {name: value for name, value in found.values.items() if name not in names or name in launch.values}
        places = {name: place for place, name in enumerate(names)} | dict.fromkeys(fixed)
        order = [(places[name], value) for name, value in found.values.items()]
        return _launching(compiled.run.launch, (*launch.grid, 1, 1)[:3], *beside, order, len(names))


def _launching(
    launch: Callable[..., None],
    grid: tuple[int, ...],
    behind: tuple[Any, ...],
    spread: bool,
    order: Sequence[tuple[int | None, Any]],
    given: int,
) -> Bare:
    """A function of `given` values and the stream that calls `launch` with the grid, the stream, `behind`, and then the
    kernel's arguments, `spread` or as one tuple: the value at a place, or a fixed one where `order` has no place.

    It is compiled from its text, as `collections.namedtuple` is: put together in each call, the arguments took as long
    as all else that Python does in a launch.
    """
    values: dict[str, Any] = {"launch": launch}

    def fixed(value: Any) -> str:
        name = f"f{len(values)}"
        values[name] = value
        return name

    arguments = [fixed(value) if place is None else f"v{place}" for place, value in order]
    kernel = arguments if spread else [f"({', '.join(arguments)},)"]
    text = ", ".join([*map(fixed, grid), "stream", *map(fixed, behind), *kernel])
    parameters = ", ".join([*(f"v{place}" for place in range(given)), "stream"])
    made: Bare = eval(_code(f"lambda {parameters}: launch({text})"), values)
    return made


@lru_cache(maxsize=1024)
def _code(text: str) -> CodeType:
    """Compiled once for all row counts: the text has names in place of values."""
    return compile(text, "<launch>", "eval")


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


def has_hooks() -> bool:
    """Whether someone wants to see launches; asked in every call, as Triton does."""
    runtime = _runtime()
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    try:
        return bool(enter.calls or leave.calls)
    except AttributeError:  # no chain was put there
        return enter is not None or leave is not None


@lru_cache(maxsize=1)
def _runtime() -> Any:
    from triton import knobs

    return knobs.runtime
