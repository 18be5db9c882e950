"""The Python of the README runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from tiny_models import NORMS, batch, tiny

import tunegen
from tunegen.recorded import load_recording

README = (Path(__file__).resolve().parent.parent / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def run(block, **names):
    exec(compile(block, "README.md", "exec"), names)
    return names


def test_there_are_four_blocks():
    assert len(BLOCKS) == 4


def test_use_of_the_op():
    names = run(BLOCKS[0])
    assert names["x"].grad.shape == names["y"].shape == (4, 512, 4096)
    assert names["weight"].grad.dtype == torch.bfloat16


def test_policies_and_warmup(capsys):
    names = run(BLOCKS[1])
    assert names["y"].shape == (7, 4096)
    run(BLOCKS[2])
    assert capsys.readouterr().out.count("4096 bf16") == 4


def test_use_in_a_model(tmp_path, monkeypatch, capsys):
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    model = tiny("qwen3").eval()
    try:
        run(BLOCKS[3], model=model, batch=batch())
        assert tunegen.unpatch(model) == 0
        assert tunegen.unpatch("qwen3") == 0
    finally:
        tunegen.unpatch("qwen3")
    assert f"{NORMS['qwen3']} replaced, 0 left" in capsys.readouterr().out
    directions = {problem.direction for problem in load_recording("step.json").counts()}
    assert directions == {"forward", "backward"}
