"""The benchmarks: ratios of turns with their intervals, and what each script says where there is no GPU."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from paired import CONFIDENCE, Ratio, beyond, ratio

FOLDER = Path(__file__).parents[1] / "benchmarks"


def test_ratio_survives_drift_that_both_share():
    drift = [1.0 + turn for turn in range(20)]
    found = ratio([1.2 * d for d in drift], drift)
    assert found.median == found.low == found.high == pytest.approx(1.2)
    assert found.turns == 20


def test_interval_of_twenty_turns_lies_between_the_sixth_and_the_fifteenth():
    """Tables of the binomial distribution: P(X <= 5) is .0207 of 20 throws of a coin."""
    found = ratio([float(n) for n in range(1, 21)], [1.0] * 20)
    assert (found.low, found.high) == (6.0, 15.0)
    assert found.confidence == pytest.approx(1 - 2 * 0.020695, abs=1e-6)


def test_interval_holds_the_true_median_as_often_as_it_says():
    chance = random.Random(0)
    held = 0
    for _ in range(500):
        found = ratio([chance.lognormvariate(0.0, 0.01) for _ in range(20)], [1.0] * 20)
        held += found.low <= 1.0 <= found.high
    assert held / 500 >= CONFIDENCE - 0.02


def test_few_turns_say_how_little_they_tell():
    found = ratio([1.0, 2.0], [1.0, 1.0])
    assert (found.low, found.high, found.confidence) == (1.0, 2.0, 0.5)


def test_turns_must_match():
    with pytest.raises(ValueError, match="argument 2"):
        ratio([1.0, 2.0], [1.0])


@pytest.mark.parametrize(("low", "same", "verdict"), [(1.02, (0.99, 1.01), True), (1.005, (0.99, 1.0), False)])
def test_gain_must_exceed_what_the_same_thing_differs_by_either_way(low, same, verdict):
    gain, again = (Ratio(1.0, *ends, 0.95, 20) for ends in ((low, 1.1), same))
    assert beyond(gain, again) is verdict


SCRIPTS = sorted(
    str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*.py") if "__main__" in path.read_text(encoding="utf-8")
)
WITHOUT_A_GPU = {"cost_model.py", "count_norms.py", "knobs.py", "measured.py", "search.py"}
"""They read what was measured, or count."""

ON_A_GPU = {
    "exhaustive.py": "--folder new",
    "first_call.py": "",
    "gate_controls.py": "--device cuda",
    "headline.py": "--shape 8x64 --out new.json",
    "host_time.py": "--out new.json",
    "norms.py": "run --run one --out new.jsonl",
    "one_family.py": "two_pass --shape 8x4096 --out new.json",
    "parts.py": "backward:8x64 --out new.json",
    "qwen3_step.py": "measure --out new.json",
    "repeat.py": "",
    "two_gpus.py": "",
    "walks.py": "--out new.json",
}


def test_each_script_is_known_to_need_a_gpu_or_none():
    assert {*SCRIPTS} == WITHOUT_A_GPU | ON_A_GPU.keys(), "a new script: name it here"


@pytest.mark.parametrize("name", ON_A_GPU)
def test_without_a_gpu_a_script_ends_with_one_sentence(name, tmp_path):
    if name in ("gate_controls.py", "qwen3_step.py"):
        pytest.importorskip("transformers")
    command = [sys.executable, str(FOLDER / name), *ON_A_GPU[name].split()]
    hidden = {**os.environ, "PYTHONPATH": str(FOLDER.parent), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=tmp_path, env=hidden, capture_output=True, text=True, timeout=120)
    wanted = "2 NVIDIA GPUs" if name == "two_gpus.py" else "an NVIDIA GPU"
    told = f"{name} measures on {wanted}, and torch sees none here"
    assert (done.returncode, done.stdout, done.stderr.splitlines()[-1:]) == (2, "", [told]), done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.interpreter
def test_additions_that_are_held_against_each_other_add_the_same():
    import torch
    import walks

    x, y = torch.arange(4096.0), torch.full((4096,), 0.5)
    once, walked = torch.zeros(2, 4096)
    walks.add_blocks[(4,)](x, y, once, 1024)
    walks.add_walking[(3,)](x, y, walked, 4, 1024, 3)
    assert once.equal(x + y)
    assert walked.equal(once)
