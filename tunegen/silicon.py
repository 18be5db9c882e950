"""What a GPU is: asked of the driver, or taken from a table of well-known cards when there is no GPU."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from .model import Silicon

FACTS = tuple(f.name for f in fields(Silicon) if f.name not in ("name", "memory_bytes"))
"""What says that two GPUs time alike. Not the name (the same chip is sold under several), and not the memory's size: it
decides no timing, and drivers report it a few MB apart for one card."""

REGISTERS_PER_SM, REGISTERS_PER_THREAD = 65536, 255
"""Of every architecture from sm_80 to sm_120."""
WARPS = (1, 2, 4, 8, 16, 32)
"""Of a block that can be launched: a power of two, and at most 1024 threads. Triton compiles 64 warps too."""

_KIB, _MIB, _GIB = 1024, 1024**2, 1024**3

# As their drivers report them. The B200: 7680 bits (first drivers said 8192), pytorch/ao#4002.
_KNOWN = (
    Silicon("NVIDIA A100-SXM4-80GB", 80, 108, 40 * _MIB, 1_593_000, 5120, 163 * _KIB, 80 * _GIB),
    Silicon("NVIDIA GeForce RTX 3090", 86, 82, 6 * _MIB, 9_751_000, 384, 99 * _KIB, 24 * _GIB),
    Silicon("NVIDIA GeForce RTX 4090", 89, 128, 72 * _MIB, 10_501_000, 384, 99 * _KIB, 24 * _GIB),
    Silicon("NVIDIA H200", 90, 132, 60 * _MIB, 3_201_000, 6016, 227 * _KIB, 141 * 10**9),
    Silicon("NVIDIA B200", 100, 148, 132_644_864, 3_996_000, 7680, 227 * _KIB, 180 * 10**9),
    Silicon("NVIDIA GeForce RTX 5090", 120, 170, 96 * _MIB, 14_001_000, 512, 99 * _KIB, 32 * _GIB),
)


def query(device: int) -> Silicon:
    """The GPU with this CUDA index, as torch reports it; a fact that this torch does not report is 0.

    Raises what torch raises without a GPU: RuntimeError or AssertionError, the latter also for an unknown index.
    """
    import torch

    found: Any = torch.cuda.get_device_properties(device)

    def fact(name: str) -> int:
        return int(getattr(found, name, 0))

    return Silicon(
        name=str(found.name),
        capability=fact("major") * 10 + fact("minor"),
        sms=fact("multi_processor_count"),
        l2_bytes=fact("L2_cache_size"),
        memory_clock_khz=fact("memory_clock_rate"),
        memory_bus_bits=fact("memory_bus_width"),
        shared_limit=fact("shared_memory_per_block_optin"),
        memory_bytes=fact("total_memory"),
    )


def of_arch(arch: str) -> Silicon:
    """A representative card of a compile target such as `sm_90`, for work without a GPU.

    Raises ValueError that lists the known targets.
    """
    for silicon in _KNOWN:
        if silicon.arch == arch:
            return silicon
    raise ValueError(f"unknown GPU architecture {arch!r}; known are {', '.join(s.arch for s in _KNOWN)}")


def same_silicon(a: Silicon, b: Silicon) -> bool:
    """Whether timings on one hold on the other: every fact is equal, under whatever name (see `FACTS`)."""
    return all(getattr(a, fact) == getattr(b, fact) for fact in FACTS)


def kind_of(silicon: Silicon) -> Silicon:
    """What timings are valid for: all but the size of the memory, which differs by megabytes from card to card."""
    return replace(silicon, memory_bytes=0)
