"""What a measuring process loads while it has nothing to do, so that nobody waits for it later. Of a sweep of 117 s
`torch.compile` of its baselines took 32 s (H200), most of them imports and the start of processes of Inductor's own,
which import torch too. Nothing here launches anything on a GPU.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module

from .dispatch import LOG

NICE = 10
"""Of a process that loads for later, so that it yields to the compilers and to what is being timed."""

INDUCTOR = ("compile_fx", "choices", "codegen.cuda_combined_scheduling", "codegen.triton", "runtime.triton_heuristics")
MOST_FORMULAS = 1 << 20
"""That a process may compile."""
PASSES = ("joint_graph", "post_grad")


def load_autograd() -> None:
    """What every measuring process needs: sympy, which autograd imports at the first gradient that it is given, and
    Triton's driver and its key of the compile cache."""
    import torch.fx.experimental.symbolic_shapes  # noqa: F401
    from triton.runtime import cache, driver

    driver.active.get_current_target()
    cache.triton_key()


def load_compiler() -> None:
    """The same and `torch.compile`, by a compilation for the CPU up to where Inductor would begin."""
    import torch

    from . import reference

    load_autograd_quietly()
    x, w = (torch.ones(*shape, requires_grad=True) for shape in ((2, 8), (8,)))
    with compiling_here():
        compiled = torch.compile(
            lambda x, w: reference.rms_norm(x, w), backend="aot_eager_decomp_partition", dynamic=False
        )
        torch.autograd.grad(compiled(x, w).sum(), (x, w))
        torch.compiler.reset()
        for name in INDUCTOR:
            import_module(f"torch._inductor.{name}")
        for name in PASSES:
            import_module(f"torch._inductor.fx_passes.{name}").lazy_init()
        import_module("torch._inductor.codegen.common").init_backend_registration()


def load_autograd_quietly() -> None:
    """A release that has something elsewhere loads it when it is needed; so does a machine without a GPU."""
    with suppress(Exception):
        load_autograd()


@contextmanager
def compiling_here() -> Iterator[None]:
    """Inductor compiles in this process: its pool of up to 32 processes, each of which imports torch, takes longer to
    start than a formula's one or two kernels to compile (8 s of waiting on an H200's 16 cores). And it leaves Triton's
    cache folder where it was: Inductor moves it for the whole process, which would compile every finalist of later
    problems again, and build its launcher (4 s of gcc, up to 3 s of ptxas). The formula is the same function for all
    problems, of which torch would compile eight and run the others as they are."""
    import torch._dynamo.config as dynamo
    import torch._inductor.config as inductor
    from triton import knobs

    limits = dict.fromkeys(("recompile_limit", "accumulated_recompile_limit"), MOST_FORMULAS)
    with dynamo.patch(limits), inductor.patch(compile_threads=1), knobs.cache.scope():
        yield


class Ahead:
    """Work in a thread of its own; `join` before anything is timed, since two threads of Python share one lock."""

    def __init__(self, work: Callable[[], None], nice: int = 0) -> None:
        self._work, self._nice = work, nice
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with suppress(AttributeError, OSError):  # on Linux a thread has a priority of its own, which ends with it
            if self._nice:
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), self._nice)
        try:
            self._work()
        except Exception as error:  # it will come up again where it is needed, with a reason
            LOG.debug("not loaded ahead: %s: %s", type(error).__name__, error)

    def join(self) -> None:
        """Wait until it is done."""
        self._thread.join()
