"""`benchmarks/norms.py` without a GPU: what becomes of each kind of player, the file of results, verdicts, tables."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import fake_norms
import norms
import pytest
import torch
from fake_norms import CELL, FACTS, FakeLab, ours, player
from rivals import natives, players
from rivals.cells import CELLS, QUICK, Cell, chosen
from rivals.players import AGAIN, COPY, DEFAULT, OURS, PLAYERS, playing
from rivals.rows import NOT_MEASURED, OK, REFUSED, Outcome, Row, Stamp, append, missing, read
from rivals.session import Session, outputs_of, runner
from rivals.show import markdown, remarks
from rivals.verdicts import LEVEL, LOST, NO_BAND, WON, contest, contests, figure
from rivals.watch import Found, measured

from tunegen import paths
from tunegen.bench import FINAL_BLOCKS
from tunegen.blocks import steady
from tunegen.ops import op_spec, row_tensors
from tunegen.recorded import load_recording
from tunegen.verify import Gate

STAMP = Stamp("first", "s1", "2026-11-30", "abc", "python norms.py", "H200", "580", "2.11", "3.6")


def session(*wanted, cell=CELL):
    """Outcomes of players that fail in no way that would end the process, by name, and what was told."""
    told = []
    found = Session(FakeLab(cell), lambda *message: told.append(message), rounds=2).run(wanted)
    left = [message[1] for message in told if message[0] == "out"]
    return {one.player: one for one in [*found, *left]}


# What becomes of a player


def test_players_are_timed_side_by_side_in_rounds():
    found = session(*ours(), player("eager", natives.eager, note="by operators"))
    assert {name: one.blocks for name, one in found.items()} == {
        name: (1.0 + number,) * (2 * FINAL_BLOCKS) for number, name in enumerate([COPY, OURS, AGAIN, "eager"])
    }
    assert (found["eager"].contract, found["eager"].gate, found["eager"].note) == ("llama", "strict", "by operators")
    assert (found[OURS].contract, found[OURS].note) == ("fp32", "tile")


def test_blocks_whose_sentinel_moved_count_for_nobody(monkeypatch):
    def moved(graphs, blocks):
        return [steady([n + b for b in range(4)], [10.0, 10.1, 20.0, 9.9], [None] * 4) for n in range(len(graphs))]

    monkeypatch.setattr(fake_norms, "measure", moved)
    found = session(*ours())
    assert {name: one.blocks for name, one in found.items()} == {
        name: (n, n + 1, n + 3) * 2 for n, name in enumerate([COPY, OURS, AGAIN])
    }


def test_rival_that_fails_the_strict_gate_is_timed_and_marked():
    found = session(player("rough", fake_norms.rough))["rough"]
    assert (found.state, found.gate, found.contract) == (OK, "failed", "llama")
    assert found.error_ulp > 1
    assert "ulp, allowed 1" in found.note


def test_rival_that_computes_something_else_has_no_time():
    found = session(player("half", fake_norms.half))["half"]
    assert (found.state, found.blocks) == (REFUSED, ())
    assert found.note == "y is off by 0.5 of its root mean square, allowed 0.05"


def test_ours_has_no_time_unless_it_passes_the_strict_gate():
    found = session(*ours(fake_norms.rough))[OURS]
    assert (found.state, found.gate, found.blocks) == (REFUSED, "failed", ())


def test_rival_follows_the_other_contract_if_not_its_first():
    assert session(player("ours", natives.ours))["ours"].contract == "fp32"


def test_what_is_not_installed_has_a_line_with_the_reason():
    found = session(player("absent", fake_norms.absent))["absent"]
    assert (found.state, found.note) == (NOT_MEASURED, "ModuleNotFoundError: No module named 'nobody_has_this'")


def test_one_that_hangs_and_one_that_ends_the_process_cost_nobody_else_his_time():
    rivals = [
        player("hangs", fake_norms.hanging, seconds=0.5),
        player("exits", fake_norms.exiting),
        player("uncapturable", fake_norms.failing_when_timed),
        player("eager", natives.eager),
    ]
    found = measured(CELL, [*ours(), *rivals], rounds=1, make_lab=FakeLab)
    assert found.facts == FACTS
    states = {one.player: (one.state, one.note) for one in found.outcomes}
    assert states["hangs"] == (NOT_MEASURED, "no answer within 0.5 s")
    assert states["exits"] == (NOT_MEASURED, "ended its process, exit code 7")
    assert states["uncapturable"] == (
        NOT_MEASURED,
        "RuntimeError: operation not permitted when stream is capturing",
    )
    assert {name for name, (state, _) in states.items() if state == OK} == {COPY, OURS, AGAIN, "eager"}


def test_process_that_does_not_come_up_leaves_everybody_without_a_time():
    found = measured(CELL, ours(), rounds=1, make_lab=FakeLab, start_seconds=0.0)
    assert {one.note for one in found.outcomes} == {"no answer within 0 s"}
    assert [one.player for one in found.outcomes] == [OURS, AGAIN]


@pytest.mark.parametrize("form", [natives.ours_add, natives.functional_add])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_fused_addition_passes_its_gate(direction, form):
    cell = Cell("add_rms_norm", 16, 32, direction, "fp32")
    gate = Gate(op_spec(cell.op), cell.problem(), torch.device("cpu"))
    assert gate.check(runner(form(cell), ()), outputs_of(cell)).ok


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("op", ["rms_norm", "add_rms_norm"])
def test_streams_of_a_cell_are_those_of_the_op(op, direction):
    cell = Cell(op, 16, 32, direction, "bf16")
    reads, writes = row_tensors(op_spec(op), cell.problem())
    assert len(reads) + len(writes) == cell.streams
    assert op_spec(op).bytes_moved(cell.problem()) == cell.bytes_moved


def test_fused_addition_without_the_gradient_of_the_sum_is_rejected():
    cell = Cell("add_rms_norm", 16, 32, "backward", "fp32")
    gate = Gate(op_spec(cell.op), cell.problem(), torch.device("cpu"))

    def without(tensors):
        return natives.functional_add(cell)({**tensors, "dsum": torch.zeros_like(tensors["dsum"])})

    assert not gate.check(runner(without, ()), outputs_of(cell)).ok


def test_norm_that_overwrites_the_gradient_gets_its_own():
    def overwriting(cell):
        form = natives.eager(cell)

        def bind(tensors):
            run = form(tensors)

            def call():
                found = run()
                tensors["dy"].copy_(found["dx"])
                return {**found, "dx": tensors["dy"]}

            return call

        return bind

    cell = CELL._replace(direction="backward", rows=64)
    found = session(player("in place", overwriting, own=("dy",)), player("eager", natives.eager), cell=cell)
    assert found["in place"].error_ulp == found["eager"].error_ulp
    greedy = session(player("in place", overwriting), cell=cell)["in place"]
    assert "an input was written" in greedy.note


# Who plays where


def test_every_cell_is_played_by_ours_twice_and_by_torch():
    for cell in CELLS:
        names = [one.name for one in playing(cell)]
        assert {OURS, AGAIN, DEFAULT, "eager", "F.rms_norm", "compile", "compile max"} <= set(names)
        assert ("Liger in place" in names) == (cell.direction == "backward")
    assert len(set(CELLS)) == len(CELLS)
    assert len({one.name for one in PLAYERS}) == len(PLAYERS)


def test_named_players_play_beside_ours():
    assert [one.name for one in playing(CELL, ["quack"])] == [OURS, AGAIN, "quack"]
    with pytest.raises(ValueError, match="no player quark; they are ours"):
        playing(CELL, ["quark"])


def test_cells_are_chosen_by_number_and_by_shape():
    assert chosen("1-3,2,8192x5120")[:3] == CELLS[:3]
    assert {cell.shape for cell in chosen("8192x5120")} == {"8192x5120"}
    assert CELLS[: len(QUICK)] == QUICK
    for wrong in ("0", "999", "1x1", "a"):
        with pytest.raises(ValueError, match="names no cell"):
            chosen(wrong)


def test_default_is_chosen_without_the_database(monkeypatch):
    from tunegen import paths

    monkeypatch.setenv("TUNEGEN_DB", "/somewhere/tune.db")
    with players.without_database():
        assert not paths.database().exists()
    assert str(paths.database()) == "/somewhere/tune.db"


# The file


def row(name, us, *, cell=CELL, stamp=STAMP, **more):
    """With six blocks that drift by a tenth, as all of a session do."""
    blocks = tuple(us * (1 + 0.02 * block) for block in range(6)) if us else ()
    return Row(stamp, cell, Outcome(name, OK if us else NOT_MEASURED, blocks=blocks, **more))


def test_lines_come_back_as_they_were_written(tmp_path):
    path = tmp_path / "results" / "norms.csv"
    rows = [
        row("eager", 8.0, contract="llama", gate="failed", error_ulp=1.5),
        row("Apex", None, note='no "apex", here'),
    ]
    append(path, rows[:1])
    append(path, rows[1:])
    assert read(path) == rows
    assert len(path.read_text().splitlines()) == 3


def test_reason_of_several_lines_is_one_line(tmp_path):
    append(tmp_path / "norms.csv", [row("Apex", None, note="no\nsuch\n  thing")])
    assert read(tmp_path / "norms.csv")[0].outcome.note == "no such thing"


@pytest.mark.parametrize("left", [0.3, 0.97, 1.0])
def test_line_that_was_cut_off_is_left_out_and_spoils_no_other(tmp_path, left):
    path = tmp_path / "norms.csv"
    append(path, [row("eager", 8.0), row("quack", 9.0)])
    whole, last = path.read_text()[:-1].rsplit("\n", 1)
    path.write_text(f"{whole}\n{last[: int(left * len(last))]}")
    assert [one.outcome.player for one in read(path)] == ["eager"]
    append(path, [row("FLA", 7.0)])
    assert [one.outcome.player for one in read(path)] == ["eager", "FLA"]


def test_line_without_a_field_is_left_out(tmp_path):
    path = tmp_path / "norms.csv"
    append(path, [row("eager", 8.0), row("quack", 9.0)])
    path.write_text(path.read_text().replace("quack,ok", "quack"))
    assert [one.outcome.player for one in read(path)] == ["eager"]


def test_run_goes_on_with_what_is_missing():
    rows = [row("eager", 8.0), row("Apex", None)]
    names = ["eager", "Apex", "quack"]
    assert missing(rows, "first", CELL, names) == ["quack"]
    assert missing(rows, "second", CELL, names) == names
    assert missing(rows, "first", CELL._replace(rows=17), names) == names
    assert missing(rows, "first", CELL, names, retry=(NOT_MEASURED,)) == ["Apex", "quack"]


# A run


def given(path, **more):
    options = {"out": path, "players": ["eager", "FLA"], "without": ["FLA"], "minutes": 9.0, "retry": False}
    return argparse.Namespace(**options | more)


def test_run_measures_each_cell_once_and_the_rest_beside_ours(tmp_path):
    calls = []

    def measure(cell, wanted):
        calls.append((cell, [one.name for one in wanted]))
        return Found([row(one.name, 8.0).outcome for one in wanted], FACTS)

    path, cells = tmp_path / "norms.csv", CELLS[:2]
    for _ in range(2):
        assert norms.run(cells, STAMP, given(path), measure) == 0
    assert calls == [(cell, [OURS, AGAIN, "eager"]) for cell in cells]
    assert norms.run(cells[:1], STAMP, given(path, without=[]), measure) == 0
    assert calls[2:] == [(cells[0], [OURS, AGAIN, "FLA"])]
    assert read(path)[0].stamp.gpu == "none"
    assert len({one.stamp.session for one in read(path)}) == 3
    assert norms.run(CELLS, STAMP, given(path, minutes=-1.0), measure) == 0
    assert len(calls) == 3


def test_run_ends_where_ours_fails_the_gate(tmp_path, capsys):
    refused = Found([Outcome(OURS, REFUSED, note="y: off by 3 ulp")], FACTS)
    path = tmp_path / "norms.csv"
    assert norms.run(CELLS[:2], STAMP, given(path), lambda cell, wanted: refused) == 1
    assert [one.cell for one in read(path)] == CELLS[:1]
    assert "off by 3 ulp" in capsys.readouterr().err


def test_machine_without_a_gpu_leaves_no_lines(tmp_path, capsys):
    found = Found([Outcome(OURS, NOT_MEASURED, note="no driver")], {})
    assert norms.run(CELLS, STAMP, given(tmp_path / "norms.csv"), lambda cell, wanted: found) == 1
    assert not (tmp_path / "norms.csv").exists()
    assert "nothing can be measured here: no driver" in capsys.readouterr().err


# Verdicts and tables


@pytest.mark.parametrize(
    ("rival", "again", "expected"),
    [(10.3, 10.1, WON), (10.1, 10.2, LEVEL), (9.9, 10.2, LEVEL), (9.9, 9.8, LEVEL), (9.7, 10.1, LOST)],
)
def test_verdict_asks_for_more_than_ours_differs_from_itself_by(rival, again, expected):
    found = contest(CELL, [row(OURS, 10.0), row(AGAIN, again), row("FLA", rival), row(COPY, 9.0)])
    assert found.best.verdict == expected
    assert found.band == pytest.approx(max(again, 10.0**2 / again) / 10 - 1)


def test_shares_count_the_bytes_and_the_best_rival_is_nothing_of_ours():
    cell = CELL._replace(direction="backward")
    rows = [
        row(name, us, cell=cell) for name, us in {COPY: 8.0, OURS: 15.0, DEFAULT: 11.0, "A": 16.0, "B": 17.0}.items()
    ]
    found = contest(cell, rows)
    assert found.ours.share == pytest.approx(1.5 * 8 / 15)
    assert (found.best.name, found.best.verdict, found.band) == ("A", NO_BAND, None)
    assert found.best.over_ours.median == pytest.approx(16 / 15)


def test_players_of_different_sessions_are_compared_with_ours_of_their_own():
    """The second session runs on slower clocks."""
    slow = replace(STAMP, session="s2")
    found = contest(
        CELL,
        [row(OURS, 10.0), row("A", 10.5), row(OURS, 20.0, stamp=slow), row("B", 20.4, stamp=slow), row("C", None)],
    )
    assert found.best.name == "B"
    assert found.best.over_ours.median == pytest.approx(1.02)
    assert [one.outcome.player for one in found.without] == ["C"]


def test_small_cells_are_told_in_microseconds():
    large = Cell("rms_norm", 16384, 4096, "forward", "bf16")
    rows = [row(name, us, cell=large) for name, us in ((COPY, 62.0), (OURS, 64.0))]
    assert figure(contest(large, rows).ours) == ".969"
    assert figure(contest(CELL, [row(OURS, 4.0)]).ours) == "4.20 us"


def recorded():
    shown = [COPY, OURS, AGAIN, DEFAULT, "eager", "quack"]
    rows = [
        row(name, 10.0 + number, cell=cell, version="1.0" if name == "quack" else "")
        for cell in (*QUICK, CELL)
        for number, name in enumerate(shown)
    ]
    return [
        *rows,
        row("Apex", None, note="ModuleNotFoundError: No module named 'apex'"),
        row("FLA", 9.0, gate="failed"),
    ]


@pytest.fixture
def shown(tmp_path, monkeypatch, capsys):
    append(tmp_path / "norms.csv", recorded())
    monkeypatch.setattr(sys, "argv", ["norms.py", "show", str(tmp_path / "norms.csv")])

    def show():
        norms.main()
        return capsys.readouterr().out

    return show


def test_table_of_a_recorded_file(tmp_path, shown):
    pytest.importorskip("matplotlib")
    out = shown()
    assert (tmp_path / "norms.png").read_bytes().startswith(b"\x89PNG")
    text = (tmp_path / "norms.md").read_text()
    assert "| 16384x4096 |" in text
    assert "quack-kernels 1.0" in text
    assert "Apex: not measured" in text
    assert out.endswith(f"wrote {tmp_path}/norms.png\n")


def test_without_matplotlib_there_is_a_table_and_no_picture(tmp_path, shown, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "no picture: " in shown()
    assert (tmp_path / "norms.md").exists()


def test_markdown_has_a_column_for_each_player_and_marks_the_best():
    text = markdown(contests(recorded()))
    header, _, line = text[text.index("| rows x hidden") :].splitlines()[:3]
    assert header == "| rows x hidden | ours | ours, default | eager | FLA | quack | verdict | band |"
    assert line.count("**") == 2
    assert len(line.split("|")) == len(header.split("|"))


def test_remarks_say_who_has_no_time_and_who_failed_the_gate():
    assert remarks(contests(recorded())) == [
        f"Apex: not measured: ModuleNotFoundError: No module named 'apex' ({CELL.label()})",
        f"FLA: timed though it fails the gate of  ({CELL.label()})",
    ]


def test_the_table_in_the_repository_is_that_of_the_results():
    results = Path(norms.__file__).parent / "results" / "h200_norms.csv"
    assert results.with_suffix(".md").read_text(encoding="utf-8") == markdown(contests(read(results)))


def test_the_table_to_sweep_holds_the_cells():
    """`tunegen sweep --from benchmarks/table.json` tunes what is then measured side by side, and some between."""
    found = load_recording(paths.PACKAGE.parent / "benchmarks" / "table.json").counts()
    assert found.keys() > {cell.problem() for cell in CELLS}
    assert set(found.values()) == {1}
