"""Processes that work together: started once for a module's tests, each with a place in one process group."""

from __future__ import annotations

import contextlib
import os
import tempfile
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import distributed

SECONDS = 120
BACKENDS = ("gloo", pytest.param("nccl", marks=pytest.mark.gpu))
"""Two processes on the CPU, and two on two GPUs."""


def two_processes(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """For a fixture of a module whose parameters are some of `BACKENDS`."""
    if request.param == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    with ranks(request.param) as found:
        yield found


def device_here() -> torch.device:
    """Of the process that asks: its GPU, or the CPU."""
    cuda = distributed.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")


class Ranks:
    """`run(function, ...)` gives what `function(...)` returns in each of the processes, in order of their ranks. It
    stands in a module that they can import; it takes and returns what can be pickled."""

    def __init__(self, backend: str, processes: int, folder: str) -> None:
        context = torch.multiprocessing.get_context("spawn")
        pipes = [context.Pipe() for _ in range(processes)]
        self.ends = [here for here, _ in pipes]
        self.processes = [
            context.Process(target=_serve, args=(there, backend, rank, processes, folder), daemon=True)
            for rank, (_, there) in enumerate(pipes)
        ]
        for process in self.processes:
            process.start()
        for _, there in pipes:
            there.close()

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        for end in self.ends:
            end.send((function, arguments))
        answers = [end.recv() if end.poll(SECONDS) else (False, "no answer") for end in self.ends]
        failed = [f"rank {rank}: {told}" for rank, (well, told) in enumerate(answers) if not well]
        assert not failed, "\n".join(failed)
        return [told for _, told in answers]

    def stop(self) -> None:
        for end in self.ends:
            with contextlib.suppress(OSError):
                end.send(None)
        for process in self.processes:
            process.join(20)
            process.kill()


@contextlib.contextmanager
def ranks(backend: str, processes: int = 2) -> Iterator[Ranks]:
    """Such processes; with "nccl" each has the GPU of its rank."""
    with tempfile.TemporaryDirectory() as folder:
        found = Ranks(backend, processes, folder)
        try:
            yield found
        finally:
            found.stop()


def _serve(end: Any, backend: str, rank: int, processes: int, folder: str) -> None:
    torch.set_num_threads(1)
    if backend == "nccl":
        os.environ["NCCL_NVLS_ENABLE"] = "0"  # multicast needs rights that a container may not have
        torch.cuda.set_device(rank)
    meeting = f"file://{os.path.join(folder, 'meeting')}"
    distributed.init_process_group(backend, init_method=meeting, world_size=processes, rank=rank)
    while (asked := end.recv()) is not None:
        function, arguments = asked
        try:
            end.send((True, function(*arguments)))
        except Exception:
            end.send((False, traceback.format_exc()))
    distributed.destroy_process_group()
