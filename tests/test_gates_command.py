"""`tunegen gate`: what it prints, writes and ends with."""

from __future__ import annotations

import io
import json
import os
import sys
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner
from faulty_norms import norm_with
from rich.console import Console

from tunegen import __version__, cli, paths, progress
from tunegen.gates import bf16, checks, curves, plot, run
from tunegen.gates.checks import Check
from tunegen.gates.curves import Curves
from tunegen.gates.training import Run, Setting

pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def fewer_rows(monkeypatch):
    monkeypatch.setattr(bf16, "SHAPES", {**bf16.SHAPES, "hidden states": (2, 64, 4096)})


@pytest.fixture
def made_up():
    """Curves of 40 steps, ours 1e-8 from the baseline and a reordered run 2e-8."""
    steps = torch.linspace(3.5, 2.0, 40, dtype=torch.float64)
    return Curves(2.0, Run(steps, {"a": 1.0}), Run(steps + 1e-8, {"a": 1.0}), {"one": Run(steps - 2e-8, {})})


@pytest.fixture
def at_once(monkeypatch, made_up):
    """The gates without their minutes: one check, passed."""

    def done(setting, device, say=None, norm=None):
        return run.Outcome([Check("curves", "all", 0.0, 1.0)], made_up, setting, "Nothing was run.", {}, {})

    monkeypatch.setattr(run, "run", done)


def gate(*arguments):
    return CliRunner().invoke(cli.main, ["gate", "--device", "cpu", "--steps", "100", *arguments])


def test_command_passes_and_leaves_both_files(tmp_path):
    done = gate("--out", str(tmp_path / "new" / "folder"))
    assert done.exit_code == 0, done.output
    *_, verdict, record, picture = done.output.splitlines()
    assert verdict.startswith("passed without a kernel: 16 checks, 0 failed.")
    assert [Path(line.removeprefix("written: ")).name for line in (record, picture)] == ["gate.json", "curves.png"]
    assert "the reference in torch operators was checked and not the kernels" in done.output
    assert sorted(os.listdir(tmp_path / "new" / "folder")) == ["curves.png", "gate.json"]
    assert (tmp_path / "new" / "folder" / "curves.png").read_bytes().startswith(b"\x89PNG")
    found = json.loads((tmp_path / "new" / "folder" / "gate.json").read_text())
    assert list(dict.fromkeys(check["gate"] for check in found["checks"])) == ["float64", "bf16", "curves"]
    assert (found["passed"], found["reasons"], len(found["curves"]["ours"]["losses"])) == (True, [], 100)
    assert found["versions"].keys() >= {"tunegen", "torch", "triton", "transformers"}
    assert found["versions"]["tunegen"] == __version__, "also where it is not installed"
    assert found["command"] == "tunegen gate --steps 100 --dtype fp32 --seed 0 --device cpu"
    began = datetime.fromisoformat(found["date"])
    assert began.utcoffset() == timedelta(0)
    assert timedelta(0) < datetime.now(timezone.utc) - began < timedelta(minutes=10)


def test_command_fails_with_the_reason(monkeypatch, tmp_path):
    faulty = norm_with("dw x .9")
    monkeypatch.setattr(checks, "rms_norm", lambda x, weight, eps, casting: faulty(x, weight, eps))
    done = gate("--json", "--out", str(tmp_path))
    assert done.exit_code == 1
    found = json.loads(done.stdout)
    assert not found["passed"]
    assert any(reason.startswith("float64: gradcheck") for reason in found["reasons"])
    assert any("error of dw over Hugging Face's is" in reason for reason in found["reasons"])
    assert any("movement of a norm's weight" in reason for reason in found["reasons"])
    assert json.loads((tmp_path / "gate.json").read_text())["reasons"] == found["reasons"]


@pytest.mark.parametrize(
    ("arguments", "answers", "fails", "code"),
    [
        ([], {}, False, 3),
        ([], {}, True, 1),
        (["--device", "cpu"], {}, False, 0),
        (["--device", "cpu"], {}, True, 1),
        (["--device", "cuda:0"], {}, False, 3),
        (["--device", "cuda:0"], {"forward": "single_block"}, False, 0),
    ],
)
def test_passed_without_a_kernel_is_a_verdict_only_if_asked_for(
    monkeypatch, made_up, tmp_path, arguments, answers, fails, code
):
    """It ended with 0 on a machine whose GPU torch does not see, as if the kernels had passed."""

    def done(setting, device, say=None, norm=None):
        return run.Outcome([Check("curves", "all", 2.0 * fails, 1.0)], made_up, setting, "", {}, answers)

    monkeypatch.setattr(run, "run", done)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    ended = CliRunner().invoke(cli.main, ["gate", "--out", str(tmp_path), *arguments])
    assert ended.exit_code == code, ended.output
    verdict = "failed" if fails else "passed" if answers else "passed without a kernel"
    assert f"\n{verdict}: 1 checks" in ended.output
    assert json.loads((tmp_path / "gate.json").read_text())["kernels_checked"] == bool(answers)
    assert "with 3 if they" in " ".join(CliRunner().invoke(cli.main, ["gate", "--help"]).output.split())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--steps", "99"], "99 is not in the range 100<=x<=1000000"),
        (["--device", "tpu:0"], "'tpu:0'"),
        (["--device", "mps"], "neither a CUDA GPU nor the CPU"),
        (["--device", "cuda:99"], "no cuda:99"),
        (["--dtype", "fp16"], "'fp32', 'bf16'"),
    ],
)
def test_bad_arguments_are_refused(arguments, words):
    done = gate(*arguments)
    assert done.exit_code == 2
    assert words in " ".join(done.output.split())


def test_place_that_cannot_be_written_is_refused_before_anything_runs(tmp_path):
    (tmp_path / "file").write_text("")
    done = gate("--out", str(tmp_path / "file"))
    assert done.exit_code == 2
    assert f"{tmp_path / 'file'} is no folder; give --out another folder" in done.output
    assert "gate 1" not in done.output


@pytest.mark.parametrize(("package", "extra"), [("transformers", "qwen3"), ("matplotlib", "plot")])
def test_missing_package_is_named_with_its_extra(monkeypatch, tmp_path, package, extra):
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, package, None)
    done = gate("--out", str(tmp_path))
    assert done.exit_code == 2
    assert f"install it with: pip install -e '.[{extra}]'" in done.output
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["gate.json", "curves.png"])
def test_folder_in_place_of_a_file_is_refused_before_anything_runs(tmp_path, name):
    """It was seen when the file was to be written: after all the training, and before the verdict was on the screen."""
    (tmp_path / name).mkdir()
    done = gate("--out", str(tmp_path))
    assert done.exit_code == 2
    assert f"{name}: it is a folder" in done.output
    assert "gate 1" not in done.output


@pytest.mark.parametrize("as_json", [[], ["--json"]])
def test_verdict_is_shown_though_it_cannot_be_saved(at_once, monkeypatch, tmp_path, as_json):
    def full(path, text, mode):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(paths, "write_whole", full)
    done = gate("--out", str(tmp_path), *as_json)
    assert done.exit_code == 2
    *_, verdict, error = done.output.splitlines()
    assert verdict.startswith("passed without a kernel: 1 checks, 0 failed.")
    place = tmp_path / "gate.json"
    assert error == f"tunegen: cannot write {place}: No space left on device; give --out another folder"
    if as_json:
        assert json.loads(done.stdout)["passed"]


def test_numbers_are_saved_before_the_picture_is_drawn(at_once, monkeypatch, tmp_path):
    def broken(curves, title):
        raise RuntimeError("no font")

    monkeypatch.setattr("tunegen.gates.plot.draw", broken)
    assert isinstance(gate("--out", str(tmp_path)).exception, RuntimeError)
    assert os.listdir(tmp_path) == ["gate.json"]


def test_paths_at_the_end_can_be_opened(at_once, monkeypatch, tmp_path):
    """Whatever folder they are opened from, and however long they are."""
    monkeypatch.chdir(tmp_path)
    folder = "a b/" + "long" * 30
    written = [line for line in gate("--out", folder).output.splitlines() if line.startswith("written: ")]
    found = [Path(line.removeprefix("written: ")) for line in written]
    assert found == [tmp_path / folder / "gate.json", tmp_path / folder / "curves.png"]
    assert all(path.is_file() for path in found)


def test_what_is_done_now_is_said_with_how_much_there_is(monkeypatch):
    said = []
    monkeypatch.setattr(curves, "stage", lambda setting, device, step: SimpleNamespace(run=lambda *_: step))
    monkeypatch.setattr(curves, "judge", lambda found: [found() for _ in range(curves.RUNS * 20)] and [])
    run.run(Setting(20, 0, "fp32"), torch.device("cpu"), said.append)
    gates = [[text for text in said if text.startswith(f"gate {n} of 3: ")] for n in (1, 2, 3)]
    assert [text for own in gates for text in own] == said
    assert gates[0][:2] == [
        "gate 1 of 3: float64, gradcheck of rows, case 1 of 10",
        "gate 1 of 3: float64, gradcheck of rows of an odd width, case 2 of 10",
    ]
    assert len(gates[0]) == 11
    assert gates[1][0].startswith("gate 2 of 3: bf16, ")
    assert gates[1][-1].endswith(f", shape {len(bf16.SHAPES)} of {len(bf16.SHAPES)}")
    three = "gate 3 of 3: loss curves, "
    assert gates[2][:3] == [
        f"{three}Hugging Face's norm, step 0 of 20, training 1 of 5",
        f"{three}Hugging Face's norm, step 10 of 20, training 1 of 5",
        f"{three}Hugging Face's arithmetic with columns backward, step 0 of 20, training 2 of 5",
    ]
    assert gates[2][-1] == f"{three}the norm under test, step 19 of 20, training 5 of 5"


def test_where_no_terminal_is_lines_come_at_each_part_and_now_and_then(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    console = Console(file=io.StringIO(), force_terminal=False)
    with progress.spoken(console) as say:
        for seconds, text in ((0.0, "one: a"), (1.0, "one: b"), (2.0, "two: c"), (3.0, "two: d"), (7.5, "two: e")):
            now[0] = seconds
            say(text)
    assert console.file.getvalue().splitlines() == ["one: a", "two: c", "two: e"]


def test_interrupted_is_no_verdict(monkeypatch, tmp_path):
    """click ends with 1 after Ctrl-C, as the gate does where a norm fails."""

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "run", interrupted)
    done = gate("--out", str(tmp_path))
    assert done.exit_code == 130
    assert done.output.splitlines()[-1] == "tunegen: interrupted"
    assert os.listdir(tmp_path) == []


def test_picture_shows_what_is_judged(made_up):
    """The difference over all steps, that of reordered runs, and the limit between right and wrong."""
    axes = pytest.importorskip("matplotlib.figure").Figure().subplots()
    plot._apart(axes, made_up)
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [
        "Hugging Face's norm, sums in other orders: 2.0e-08 at most",
        "norm under test: 1.0e-08",
        "limit of the norm under test: 2 x the reordered runs",
    ]
    assert axes.get_lines()[-1].get_ydata()[0] == pytest.approx(4e-8)


def test_record_holds_what_the_picture_is_drawn_from(at_once, made_up, tmp_path):
    assert gate("--out", str(tmp_path)).exit_code == 0
    kept = json.loads((tmp_path / "gate.json").read_text())["curves"]
    assert kept["reordered"]["one"]["losses"] == made_up.reordered["one"].losses.tolist()


@pytest.mark.gpu
def test_record_names_gpu_driver_and_what_answered(tmp_path):
    done = CliRunner().invoke(cli.main, ["gate", "--steps", "100", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "gate.json").read_text())
    assert found["command"].endswith(" --device cuda:0")
    assert found["versions"]["gpu"] == torch.cuda.get_device_name(0)
    assert found["versions"]["driver"]
    assert len(found["answers"]) > 10
