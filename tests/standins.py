"""Kernels that do nothing, for CPU tensors, on a GPU that is not there: what is launched, and how, is noted.

`stand_ins` has `rms_norm` choose, render and bind as on that GPU. In place of Triton's compiler something makes kernels
that only tell how they were launched, and the stream is a number.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import OP_MODULE

from tunegen import dispatch, launch, prepared
from tunegen.ops.arguments import has_address
from tunegen.silicon import of_arch

STREAM = 7


class CudaLauncher:
    """Under the name of Triton's. `official` has the arguments of launches by the long way, `bare` of those by the
    short way: grid, stream, and the kernel's arguments; with tensors as their addresses."""

    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid = launch_pdl = False
    arg_annotations, kernel_signature = "annotations", b"signature"

    def __init__(self, seen: list[Any]) -> None:
        self.seen = seen

    def __call__(self, x: int, y: int, z: int, stream: int, function: str, *more: Any) -> None:
        self.seen.append(("official", function, (x, y, z), stream, tuple(map(_address, more[4:]))))

    def launch(self, x: int, y: int, z: int, stream: int, function: str, *more: Any) -> None:
        assert more[:10] == (False, False, "metadata", None, None, None, None, None, "annotations", b"signature")
        assert len(more) == 11
        self.seen.append(("bare", function, (x, y, z), stream, more[10]))


def _address(value: Any) -> Any:
    return value.data_ptr() if isinstance(value, torch.Tensor) else value


def _has_kernels(x: torch.Tensor, *others: torch.Tensor | None) -> bool:
    """Also on the CPU."""
    return x.numel() > 0 and all(has_address(tensor) for tensor in (x, *others) if tensor is not None)


class Compiled:
    """In place of Triton's compiled kernel."""

    packed_metadata = "metadata"

    def __init__(self, name: str, seen: list[Any]) -> None:
        self.function, self.run = name, CudaLauncher(seen)

    def launch_metadata(self, *_: Any) -> None:
        return None


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """`launches` and `compiled`, in order; `device`: the number of the current one."""
    found = SimpleNamespace(launches=[], compiled=[], device=0)

    def compile_launch(one: Any, config: Any, classes: Any, target: Any) -> Compiled:
        found.compiled.append((one.kernel.__name__, classes))
        return Compiled(one.kernel.__name__, found.launches)

    key, choice, cpu = OP_MODULE.key_of, dispatch.Choice, torch.device("cpu")
    active = SimpleNamespace(get_current_target=lambda: None, get_current_stream=lambda device: STREAM)
    monkeypatch.setattr(importlib.import_module("triton.runtime.driver"), "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(launch, "launches_directly", lambda: True)
    monkeypatch.setattr(launch, "load_binary", lambda compiled: None)
    monkeypatch.setattr(launch, "compile_launch", compile_launch)
    monkeypatch.setattr(prepared, "current_stream", lambda device: STREAM)
    monkeypatch.setattr(prepared, "current_device", lambda: found.device)
    monkeypatch.setattr(prepared, "empty", torch._C._dynamo.guards._empty_strided_cpu)
    monkeypatch.setattr(OP_MODULE, "has_kernels", _has_kernels)
    monkeypatch.setattr(OP_MODULE, "key_of", lambda *args, **named: key(*args, **named)._replace(device=0))
    monkeypatch.setattr(dispatch, "Choice", lambda p, config, why, device, stored: choice(p, config, why, cpu, stored))
    monkeypatch.setattr(dispatch, "silicon_of", lambda index: of_arch("sm_90"))
    dispatch.forget()
    yield found
    dispatch.forget()
