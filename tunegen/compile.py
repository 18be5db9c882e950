"""Rendered text -> module -> compiled kernel, for the GPU at hand or for a named target on a machine that has none."""

from __future__ import annotations

import hashlib
import re
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from .errors import BuildError, CapturedError, CompileError, first_line
from .layouts import like_heads
from .model import Config, Launch, Plan, Problem, Resources, Silicon
from .plans import plan_of
from .silicon import REGISTERS_PER_SM, REGISTERS_PER_THREAD
from .spec import OpSpec
from .syntax import again
from .toolchain import known_key

ALIGNED = "ALIGNED"
"""The parameter of kernels that copy into shared memory: whether all that `aligned` asks of their arguments is so."""

FEWEST_REGISTERS = 32
"""Of a thread, where as many run as a multiprocessor takes."""

# Passed explicitly: later releases of Triton change the default, and the bits with it.
FIXED_OPTIONS: dict[str, Any] = {"enable_fp_fusion": True}


class ArgumentClass(NamedTuple):
    """What a compiled kernel assumes of one argument: its type, whether 16 divides it, its value if that is fixed."""

    type: str
    divisible: bool = False
    value: int | float | None = None


def constexprs(kernel: Any) -> list[str]:
    """Names of the kernel's `tl.constexpr` parameters."""
    return [p.name for p in kernel.params if p.is_constexpr]


def integer_class(name: str, value: int, hidden: int) -> ArgumentClass:
    """How an integer is compiled: row strides may be fixed to N or known to be divisible by 16, other strides of rows
    too, column strides are fixed; no other value is assumed."""
    if name.endswith("_col_stride"):
        return ArgumentClass("constexpr", value=value)
    if name.endswith(("_outer_stride", "_middle_stride", "_inner_stride")):
        return ArgumentClass("i64", value % 16 == 0)
    if name.endswith("_row_stride"):
        return ArgumentClass("constexpr", value=hidden) if value == hidden else ArgumentClass("i64", value % 16 == 0)
    return ArgumentClass("i32" if value < 2**31 else "i64")


def aligned(classes: Mapping[str, ArgumentClass]) -> bool:
    """Whether a compiler knows of all tensors that they begin at multiples of 16 bytes, and of their rows that they lie
    multiples of 16 elements apart, or N: such are copied 16 bytes at a time."""
    asked = [found for name, found in classes.items() if name.endswith(("_ptr", "_row_stride"))]
    return all(found.divisible or found.type == "constexpr" for found in asked)


def launch_options(launch: Launch, config: Config) -> dict[str, Any]:
    """What Triton compiles a kernel with, beside its arguments. Raises CompileError for more programs that are to run
    at the same time than a multiprocessor has registers for."""
    warps = launch.num_warps or config.num_warps
    options = {**FIXED_OPTIONS, "num_warps": warps, "num_ctas": config.num_ctas}
    if launch.pdl:
        options["launch_pdl"] = True
    if launch.together is not None:
        room = REGISTERS_PER_SM // (32 * warps * launch.together) // 8 * 8  # they are handed out in eights a thread
        if room < FEWEST_REGISTERS:
            raise CompileError(
                f"{launch.kernel.__name__}: {launch.together} programs of {warps} warps cannot run at the same time on "
                f"a multiprocessor: {room} registers a thread"
            )
        options |= {"launch_cooperative_grid": True, "maxnreg": min(room, REGISTERS_PER_THREAD)}
    return options


def compile_launch(launch: Launch, config: Config, classes: Mapping[str, ArgumentClass], target: Any) -> Any:
    """Compile one kernel for `target` (a `triton.backends.compiler.GPUTarget`) and return Triton's CompiledKernel.

    `classes` holds a class for every parameter by name (pointers end in `_ptr`). Raises CompileError, and CapturedError
    while the current stream is captured: loading a kernel would end the capture.
    """
    if is_capturing():
        raise CapturedError(f"{launch.kernel.__name__} was not loaded before the capture of a CUDA graph")
    import triton

    kernel = launch.kernel
    fixed = {name: classes[name].value for name in kernel.arg_names if classes[name].type == "constexpr"}
    signature = {name: classes[name].type for name in kernel.arg_names}
    attributes = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if classes[name].divisible}
    options = launch_options(launch, config)
    try:
        with known_key():
            text = _source_class(kernel)(kernel, signature, fixed, attributes)
            return again(lambda: triton.compile(text, target=target, options=options))
    except OSError as error:
        cache = triton.knobs.cache.dir  # a disk that is full has no file name in its error
        raise BuildError(
            f"cannot compile {kernel.__name__} into {cache}: {error}; free space there or set TRITON_CACHE_DIR"
        ) from error
    except MemoryError:
        raise
    except Exception as error:  # Triton raises a dozen types here, RuntimeError and AssertionError among them
        raise CompileError(f"{kernel.__name__}: {first_line(error)}") from error


def _source_class(kernel: Any) -> Any:
    """What Triton compiles a kernel from: kernels in Gluon say that they are."""
    from triton.compiler import ASTSource

    if not kernel.is_gluon():
        return ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    return GluonASTSource


def is_capturing() -> bool:
    """Whether the current stream is captured into a CUDA graph."""
    import torch

    # CUDA stays asleep where nobody has used it: a process that only compiles wants no memory of the GPU.
    return bool(torch.cuda.is_initialized()) and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]


def build_launcher(compiled: Any) -> None:
    """Have Triton build the C stub that launches kernels of this signature, into its cache, here and now: .3 s of a C
    compiler, for which the measuring process would wait. Where there is no GPU there is nothing to build."""
    from triton.runtime import driver

    with suppress(Exception):  # a stub that cannot be built fails where it is needed, with its reason
        driver.active.launcher_cls(compiled.src, compiled.metadata)


def load_binary(compiled: Any) -> None:
    """Load a compiled kernel onto the current device. Raises CompileError if that has too little shared memory or
    registers."""
    from triton.runtime.errors import OutOfResources

    try:
        compiled.run  # noqa: B018 - the property loads
    except OutOfResources as error:
        raise CompileError(f"{compiled.name}: {first_line(error)}") from error


def compile_candidate(spec: OpSpec, problem: Problem, config: Config, silicon: Silicon) -> Resources:
    """Compile all kernels that `config` may launch for `problem`, with no GPU; resources of the first rendering's
    main kernel, and the digest of all binaries together.

    Every tensor counts as contiguous and aligned, as when it is timed; for a problem of layout "nested", what may be
    launched for nested rows is compiled, as a finalist is verified with. Raises CompileError, also for more shared
    memory than the silicon has.
    """
    worst: Resources | None = None
    binaries = hashlib.sha256()
    for number, compiled in _compiled(spec, problem, config, silicon):
        binaries.update(compiled.asm.get("cubin", compiled.hash.encode()))
        found = resources(compiled)
        if found.shared_bytes > silicon.shared_limit:
            raise CompileError(
                f"{compiled.name}: {found.shared_bytes} bytes of shared memory a program, "
                f"{silicon.arch} has {silicon.shared_limit}"
            )
        if number == 0 and (worst is None or (found.spill_bytes or 0) > (worst.spill_bytes or 0)):
            worst = found
    assert worst is not None
    return replace(worst, binary=binaries.hexdigest())


def _compiled(spec: OpSpec, problem: Problem, config: Config, silicon: Silicon) -> Iterator[tuple[int, Any]]:
    """Each kernel of each rendering, compiled, with the number of the rendering."""
    from triton.backends.compiler import GPUTarget

    from .render import renderings

    target = GPUTarget("cuda", silicon.capability, 32)
    layouts = spec.nestable(problem) if problem.layout == "nested" else [()]
    sources = [source for nested in layouts for source in renderings(problem, config, spec, nested)]
    for number, source in enumerate(sources):
        plan = plan_of(source, problem, config, silicon)
        for launch in plan.launches:
            classes = expected_classes(spec, problem, config, plan, launch, source.flags["nested"])
            compiled = compile_launch(launch, config, classes, target)
            build_launcher(compiled)
            yield number, compiled


def expected_classes(
    spec: OpSpec, problem: Problem, config: Config, plan: Plan, launch: Launch, nested: tuple[str, ...] = ()
) -> dict[str, ArgumentClass]:
    """The classes of aligned arguments, contiguous but for the rows of `nested`, without any tensor at hand."""
    classes = {f"{n}_ptr": ArgumentClass(f"*{t.dtype}", True) for n, t in spec.tensors(problem).items()}
    classes |= {f"{n}_ptr": ArgumentClass(f"*{s.dtype}", True) for n, s in plan.scratch.items()}
    fixed = constexprs(launch.kernel)
    scalars = {**spec.scalars(problem), ALIGNED: True}
    for name in nested:
        scalars |= like_heads(problem.hidden).arguments(name)
    for name, value in {**spec.constants(problem), **config.numbers, **scalars, **launch.values}.items():
        if name in fixed:
            classes[name] = ArgumentClass("constexpr", value=value)
        elif isinstance(value, float):
            classes[name] = ArgumentClass(problem.accumulate)
        else:
            classes[name] = integer_class(name, value, problem.hidden)
    if absent := [name for name in launch.kernel.arg_names if name not in classes]:
        raise CompileError(f"{launch.kernel.__name__} has an argument {absent[0]}, which no parameter or tensor gives")
    return classes


def resources(compiled: Any) -> Resources:
    """Registers and spilled bytes a thread, read from the binary by the cuobjdump that comes with Triton; None
    without it."""
    shared = int(compiled.metadata.shared)
    path = next((p for n, p in compiled.metadata_group.items() if n.endswith(".cubin")), None)
    if path is None:
        return Resources(None, None, shared)
    registers, spilled = _resource_usage(str(path))
    return Resources(registers, spilled, shared)


@lru_cache(maxsize=8192)
def _resource_usage(cubin: str) -> tuple[int | None, int | None]:
    from triton import knobs

    try:
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", cubin]
        output = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, RuntimeError, subprocess.SubprocessError):
        return None, None
    found = re.search(r"REG:(\d+) STACK:(\d+)", output)
    return (int(found[1]), int(found[2])) if found else (None, None)
