"""Clocks, power and temperature, with NVML and without."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from tunegen.model import Conditions
from tunegen.sensors import Sensor

GPU = torch.device("cuda", 0)


def nvml(**changes):
    """What `nvidia-ml-py` gives for one GPU."""
    return SimpleNamespace(
        **{
            "nvmlInit": lambda: None,
            "nvmlDeviceGetHandleByUUID": {"GPU-5e1f": "handle"}.__getitem__,
            "nvmlDeviceGetClockInfo": lambda gpu, which: {"sm": 1980, "memory": 3201}[which],
            "nvmlDeviceGetPowerUsage": lambda gpu: 412_500,
            "nvmlDeviceGetTemperature": lambda gpu, which: 51,
            "NVML_CLOCK_SM": "sm",
            "NVML_CLOCK_MEM": "memory",
            "NVML_TEMPERATURE_GPU": 0,
            **changes,
        }
    )


@pytest.fixture
def with_library(monkeypatch):
    def put(library):
        monkeypatch.setitem(sys.modules, "pynvml", library)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="5e1f"))
        return Sensor(GPU)

    return put


def test_sensor_reads_the_gpu_by_its_uuid(with_library):
    assert with_library(nvml()).read() == Conditions(1980.0, 3201.0, 412.5, 51.0)


def test_value_that_the_driver_does_not_say_is_none(with_library):
    def fail(gpu):
        raise RuntimeError("Not Supported")

    assert with_library(nvml(nvmlDeviceGetPowerUsage=fail)).read() == Conditions(1980.0, 3201.0, None, 51.0)


def test_without_the_package_or_without_a_driver_there_is_no_reading(with_library):
    def fail():
        raise RuntimeError("Driver Not Loaded")

    assert with_library(None).read() is None
    assert with_library(nvml(nvmlInit=fail)).read() is None


@pytest.mark.gpu
def test_real_sensor_reads_plausible_values():
    pytest.importorskip("pynvml")
    found = Sensor(GPU).read()
    assert found is not None
    assert 100 < found.sm_mhz < 4000
    assert 100 < found.memory_mhz < 20000
    assert 5 < found.watts < 3000
    assert 5 < found.celsius < 110
