"""Gluon in Triton's interpreter, which does not know it: what kernels use, on top of what `triton.language` does there.

Shared memory is as late as a GPU's may be: a tile is NaN until something is put there, and from the moment that a copy
to it begins until a `wait_group` waits for the group of that copy. Layouts say nothing about values, and are dropped.
"""

from __future__ import annotations

import functools
import importlib
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

GLUON = "triton.experimental.gluon"
WARPS = 4


class _Kernel(interpreter.InterpretedFunction):
    """One whose constants the interpreter knows: it looks for `tl.constexpr`."""

    def rewrite(self) -> Any:
        made = super().rewrite()
        made.__annotations__ = {name: kind.replace("gl.", "tl.") for name, kind in made.__annotations__.items()}
        return made


def jit(function: Any = None, **options: Any) -> Any:
    return functools.partial(jit, **options) if function is None else _Kernel(function)


class _Copies(threading.local):
    """Copies that a program has begun: each program is a thread (`turns`)."""

    def __init__(self) -> None:
        self.begun: list[tuple[Ring, int, Any]] = []
        self.groups: list[list[tuple[Ring, int, Any]]] = []


COPIES = _Copies()


class Ring:
    """Shared memory of a program: tiles of one shape."""

    def __init__(self, dtype: tl.dtype, shape: Sequence[int]) -> None:
        self.dtype, self.tile_shape = dtype, list(shape[1:])
        width = interpreter._get_np_dtype(dtype).itemsize
        # All bits set is NaN in every floating dtype.
        self.tiles = np.full((*shape[:-1], shape[-1] * width), 255, np.uint8).view(interpreter._get_np_dtype(dtype))
        self.nothing = self.tiles[0].copy()
        self.coming: Counter[int] = Counter()

    def index(self, slot: Any) -> Tile:
        """The tile in that slot."""
        number = int(slot)
        assert 0 <= number < len(self.tiles), f"slot {number} of {len(self.tiles)}"
        return Tile(self, number)


class Tile:
    """A tile of a ring."""

    def __init__(self, ring: Ring, slot: int) -> None:
        self.ring, self.slot = ring, slot

    def load(self, layout: Any) -> tl.tensor:
        """What is there; NaN while a copy is on its way."""
        ring = self.ring
        found = ring.nothing if ring.coming[self.slot] else ring.tiles[self.slot]
        handle = interpreter.TensorHandle(found.copy(), ring.dtype)
        return tl.tensor(handle, tl.block_type(ring.dtype, ring.tile_shape))

    def store(self, value: tl.tensor) -> None:
        """Put a value there at once."""
        assert not self.ring.coming[self.slot], "a copy is on its way to where this is stored"
        self.ring.tiles[self.slot] = self._fitting(value)

    def expect(self, value: tl.tensor) -> None:
        """Begin to copy a value."""
        COPIES.begun.append((self.ring, self.slot, self._fitting(value)))
        self.ring.coming[self.slot] += 1

    def _fitting(self, value: tl.tensor) -> Any:
        found, wanted = (value.dtype, list(value.shape)), (self.ring.dtype, self.ring.tile_shape)
        assert found == wanted, f"{found} for a tile of {wanted}"
        return value.handle.data


def async_copy_global_to_shared(tile: Tile, pointers: tl.tensor, mask: tl.tensor) -> None:
    tile.expect(tl.load(pointers, mask=mask, other=0.0))  # what is masked is filled with zeros, as cp.async does


def commit_group() -> None:
    COPIES.groups.append(COPIES.begun)
    COPIES.begun = []


def wait_group(num_outstanding: int) -> None:
    while len(COPIES.groups) > num_outstanding:
        for ring, slot, data in COPIES.groups.pop(0):
            ring.tiles[slot] = data
            ring.coming[slot] -= 1


def install() -> None:
    """From now on modules that import Gluon get what is here; a name that Gluon does not have, they do not find."""
    real = importlib.import_module(f"{GLUON}.language")

    def forwarded(name: str) -> Any:
        found = getattr(real, name)
        return found if name.endswith("Layout") else getattr(tl, name)  # late: the interpreter patches tl

    named = {
        "": {"jit": jit},
        ".language": {
            "__getattr__": forwarded,
            "arange": lambda start, end, layout: tl.arange(start, end),
            "zeros": lambda shape, dtype, layout: tl.zeros(shape, dtype),
            "num_warps": lambda: WARPS,
            "to_tensor": lambda value: interpreter.interpreter_semantic.to_tensor(value),
            "allocate_shared_memory": lambda dtype, shape, layout: Ring(dtype, shape),
        },
        ".language.nvidia": {},
        ".language.nvidia.ampere": {},
        ".language.nvidia.ampere.async_copy": {
            "async_copy_global_to_shared": async_copy_global_to_shared,
            "commit_group": commit_group,
            "wait_group": wait_group,
        },
    }
    for place, content in named.items():
        module = sys.modules[f"{GLUON}{place}"] = ModuleType(f"{GLUON}{place}")
        vars(module).update(content, __path__=[])
        parent, _, name = f"{GLUON}{place}".rpartition(".")
        setattr(sys.modules[parent], name, module)
