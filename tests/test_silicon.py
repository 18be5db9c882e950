"""What a GPU is: the driver's answer, the table of known cards, and when two are the same."""

from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
import torch

from tunegen.model import Silicon
from tunegen.silicon import of_arch, query, same_silicon

ARCHES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
# The data sheets' memory bandwidth in GB/s, and what CUDA's guide allows a program in KiB of shared memory.
DATA_SHEET = {
    "sm_80": (2039, 163),
    "sm_86": (936, 99),
    "sm_89": (1008, 99),
    "sm_90": (4800, 227),
    "sm_100": (7700, 227),
    "sm_120": (1792, 99),
}


def properties(**changes):
    facts = {
        "name": "NVIDIA H200",
        "major": 9,
        "minor": 0,
        "multi_processor_count": 132,
        "L2_cache_size": 62914560,
        "memory_clock_rate": 3201000,
        "memory_bus_width": 6144,
        "shared_memory_per_block_optin": 232448,
        "total_memory": 150_000_000_000,
    }
    return SimpleNamespace(**{k: v for k, v in {**facts, **changes}.items() if v is not None})


def test_query_reads_every_fact_of_the_asked_device(monkeypatch):
    asked = []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: asked.append(device) or properties())
    assert query(3) == Silicon("NVIDIA H200", 90, 132, 62914560, 3201000, 6144, 232448, 150_000_000_000)
    assert asked == [3]


def test_query_counts_two_digit_capabilities(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties(major=12, minor=1))
    assert query(0).arch == "sm_121"


def test_query_has_zero_for_what_torch_does_not_report(monkeypatch):
    bare = properties(L2_cache_size=None, memory_clock_rate=None, shared_memory_per_block_optin=None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: bare)
    found = query(0)
    assert (found.l2_bytes, found.memory_clock_khz, found.shared_limit, found.sms) == (0, 0, 0, 132)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_table_agrees_with_the_gpu_here():
    found = query(0)
    assert found.sms > 0
    assert found.shared_limit >= 48 * 1024
    if found.arch in ARCHES and found.name == of_arch(found.arch).name:
        assert same_silicon(found, of_arch(found.arch))


@pytest.mark.parametrize("arch", ARCHES)
def test_table_agrees_with_data_sheets(arch):
    silicon = of_arch(arch)
    bandwidth, shared_kib = DATA_SHEET[arch]
    assert silicon.arch == arch
    assert silicon.shared_limit == shared_kib * 1024
    assert 2 * silicon.memory_clock_khz * silicon.memory_bus_bits / 8e6 == pytest.approx(bandwidth, rel=0.03)


def test_unknown_arch_names_the_known_ones():
    with pytest.raises(ValueError, match=r"sm_75.*sm_80, sm_86, sm_89, sm_90, sm_100, sm_120"):
        of_arch("sm_75")


@pytest.mark.parametrize("name", [f.name for f in fields(Silicon)])
def test_same_silicon_looks_at_facts_and_not_at_names(name):
    here = of_arch("sm_90")
    value = getattr(here, name)
    other = replace(here, **{name: value + 1 if isinstance(value, int) else value + " NVL"})
    assert same_silicon(here, other) == (name in ("name", "memory_bytes"))
