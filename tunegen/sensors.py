"""Clocks, power and temperature of a GPU, through NVML where the package `nvidia-ml-py` is installed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from .model import Conditions


class Sensor:
    """Reads one GPU. Without the package, without a driver or in a container that hides it, every reading is None."""

    def __init__(self, device: torch.device) -> None:
        self._library: Any = None
        with contextlib.suppress(Exception):  # NVML's own errors cannot be named without it
            import pynvml

            pynvml.nvmlInit()
            # By its UUID: NVML numbers GPUs by their place on the bus, CUDA by CUDA_VISIBLE_DEVICES.
            uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
            self._library = pynvml

    def read(self) -> Conditions | None:
        """What the GPU is like now."""
        if self._library is None:
            return None
        nvml, gpu = self._library, self._handle
        return Conditions(
            sm_mhz=_value(lambda: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM)),
            memory_mhz=_value(lambda: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_MEM)),
            watts=_value(lambda: nvml.nvmlDeviceGetPowerUsage(gpu) / 1e3),
            celsius=_value(lambda: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU)),
        )


@lru_cache(maxsize=64)
def sensor_of(device: torch.device) -> Sensor:
    """One for each GPU: opening NVML takes longer than all readings of a problem."""
    return Sensor(device)


def _value(read: Callable[[], float]) -> float | None:
    try:
        return float(read())
    except Exception:  # a GPU without that sensor
        return None
