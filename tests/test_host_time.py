"""The pure parts of `benchmarks/host_time.py`, and its calls with kernels that are stand-ins."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest
import standins
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import host_calls
from host_time import Times, cpu_name, graphs, rotated, show, summary, timed

from tunegen import rms_norm
from tunegen.ops import registered

stand_ins = standins.stand_ins
BENCHMARKS = Path(host_calls.__file__).parent


def test_each_contender_is_first_as_often_as_the_others():
    orders = [rotated("abc", turn) for turn in range(6)]
    assert orders[:4] == [["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"], ["a", "b", "c"]]
    assert [order[0] for order in orders].count("c") == 2


def test_the_clock_stops_before_the_wait_and_tells_it_apart():
    """Each call takes 3 us of a made-up clock to issue; the GPU is 1 us a call behind."""
    now = itertools.count()
    at, seen = [0.0], []

    def call(name):
        at[0] += 3e-6
        seen.append(name)

    def wait():
        behind = seen[-4:] if next(now) else []
        at[0] += len(behind) * 1e-6

    found = timed({"a": lambda: call("a"), "b": lambda: call("b")}, 4, 3, wait, lambda: at[0])
    assert seen[:4] == ["a", "a", "b", "b"]
    assert "".join(seen[4:]) == "aaaabbbb" + "bbbbaaaa" + "aaaabbbb"
    for times in found.values():
        assert times.host == pytest.approx([3.0] * 3)
        assert times.waited == pytest.approx([1.0] * 3)


def test_ratios_are_taken_turn_by_turn():
    drift = [1.0 + turn for turn in range(8)]
    found = summary({"ours": Times([2 * d for d in drift], drift), "theirs": Times(drift, drift)}, {"ours": "theirs"})
    assert (found["ours"]["us"], found["ours"]["least_us"], found["ours"]["waited_us"]) == (9.0, 2.0, 4.5)
    assert (found["ours"]["rival"], found["ours"]["ratio"]["median"]) == ("theirs", 2.0)
    assert "ratio" not in found["theirs"]
    assert "ratio" not in summary({"ours": Times(drift, drift)}, {"ours": "absent"})["ours"]


def test_name_of_the_cpu():
    assert cpu_name("processor\t: 0\nmodel name\t: A CPU: fast\nmodel name\t: another\n") == "A CPU: fast"
    assert cpu_name("processor : 0\n") == ""


@pytest.fixture
def given():
    return host_calls.Tensors(*(torch.ones(*shape, dtype=torch.bfloat16) for shape in ((4, 64), (64,), (4, 64))), *(
        torch.ones(*shape, dtype=torch.bfloat16, requires_grad=True) for shape in ((4, 64), (64,))
    ))  # fmt: skip


@pytest.mark.compiler
def test_contenders_and_parts_can_be_called(stand_ins, given):
    calls, rivals, absent = host_calls.contenders(given)
    assert {"rms_norm, no gradient", "torch.nn.RMSNorm, forward + backward"} <= {*calls}
    assert {*rivals, *rivals.values()} <= {*calls}
    assert ("Liger, forward + backward" in calls) != ("Liger, forward + backward" in absent)
    calls.pop("Liger, forward + backward", None)
    for name, call in calls.items():
        result = call()
        assert [t.requires_grad for t in (result if isinstance(result, tuple) else (result,))].count(True) == 0, name
    told = {"checks, key, look-up", "fits alone", "torch.empty_like", "allocation", "launch"}
    told |= {"autograd", "autograd and launches"}
    assert {*host_calls.parts(given)} == told
    for call in host_calls.parts(given).values():
        call()


def test_graphs_are_timed_as_they_are_by_default_and_as_operators(given, monkeypatch, capsys):
    """Each in a graph of its own: Inductor's place is taken by something that notes what it is given."""
    seen = []

    def note(chain, fullgraph, mode="default"):
        def backend(graph, _):
            names = {str(node.target) for node in graph.graph.nodes if node.op == "call_function"}
            seen.append((mode, "tunegen.rms_norm_inference" in names))
            return graph

        return real(chain, backend=backend, fullgraph=fullgraph)

    real = torch.compile
    monkeypatch.setattr(torch, "compile", note)
    monkeypatch.setattr(registered, "MODE", before := "trace")
    found = graphs(given, 1, 2, lambda: None)
    ours = seen[::2]
    assert ours == [(mode, way) for mode in host_calls.MODES for way in (False, True)]
    assert not any(operator for _, operator in seen[1::2]), "of F.rms_norm"
    assert len(seen) == 8, "no graph was compiled twice"
    assert [one["TUNEGEN_COMPILE"] for one in found.values()] == ["trace", "op"] * 2
    assert [one["default"] for one in found.values()] == [True, False] * 2
    assert registered.MODE == before == registered.TRACE
    show({"host_time": {}, "not_measured": {}, "graphs": found, "row_counts": {}})
    lines = capsys.readouterr().out.splitlines()
    assert ["the default" in line for line in lines] == [True, False] * 2
    assert all("us a norm over F.rms_norm" in line for line in lines)


@pytest.mark.compiler
def test_what_row_counts_leave_behind_is_counted(stand_ins):
    w = torch.ones(64, dtype=torch.bfloat16)
    found = host_calls.many_rows(lambda rows: rms_norm(torch.ones(rows, 64, dtype=torch.bfloat16), w), range(1, 10))
    assert (found["row_counts"], found["buckets"], found["entries"]) == (9, 5, 5)
    assert found["compiled_kernels"] == len(stand_ins.compiled)
    assert found["buckets_compiled_behind_their_first_call"] == 0


@pytest.mark.compiler
def test_a_late_compilation_is_counted(stand_ins):
    """Of a misaligned view in a bucket that has been seen."""
    w, wide = torch.ones(64, dtype=torch.bfloat16), torch.ones(1000, dtype=torch.bfloat16)
    views = {5: wide[: 5 * 64].view(5, 64), 6: wide[1 : 6 * 64 + 1].view(6, 64)}
    assert (
        host_calls.many_rows(lambda n: rms_norm(views[n], w), [5, 6])["buckets_compiled_behind_their_first_call"] == 1
    )
