"""One rendering of every template, reviewed as text. After a change of a template that is meant:
TUNEGEN_UPDATE_GOLDEN=1 pytest tests/test_golden.py, then read the difference."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest

from tunegen.model import Config, Problem
from tunegen.ops import OPS, op_spec
from tunegen.render import render, templates
from tunegen.space import load_space

FOLDER = Path(__file__).parent / "golden"
CASES = [(op, template) for op in OPS for template in templates(op)]


def default_rendering(op: str, template: str) -> str:
    """With weight, casting fp32, no offset, fp32 sums, rstd saved, and the second kernel started early."""
    direction, family = template.split("_", 1)
    problem = Problem(op, direction, 4096, 16384, weight_grad=direction == "backward")
    found = load_space(op).family(direction, family)
    assert found is not None, f"{template} has no family in the search space"
    structure = {name: word for name, word in {"RSTD": "saved", "PDL": "late"}.items() if name in found.parameters}
    spec = op_spec(op)
    return render(op, template, spec.flags(problem, Config.of(family, structure))[-1]).text


@pytest.mark.parametrize(("op", "template"), CASES)
def test_renders_as_reviewed(op: str, template: str) -> None:
    path = FOLDER / op / f"{template}.py"
    text = default_rendering(op, template)
    if os.environ.get("TUNEGEN_UPDATE_GOLDEN"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert path.exists(), "a new template: TUNEGEN_UPDATE_GOLDEN=1 writes its rendering for review"
    assert text == path.read_text()


def test_no_rendering_outlives_its_template() -> None:
    assert {(p.parent.name, p.stem) for p in FOLDER.glob("*/*.py")} == set(CASES)


@pytest.mark.parametrize(("op", "template"), CASES)
def test_kernels_have_at_most_80_lines_of_code(op: str, template: str) -> None:
    """Signature on one, comments left out: what has more is hard to read from top to bottom."""
    tree = ast.parse(default_rendering(op, template))
    kernels = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.decorator_list]
    assert kernels
    assert {kernel.name: lines for kernel in kernels if (lines := len(ast.unparse(kernel).splitlines())) > 80} == {}


def aliases(function: ast.FunctionDef) -> list[str]:
    """Names that a kernel binds to the tensor of another name, outside of its loops."""
    found = []
    for statement in function.body:
        for node in [] if isinstance(statement, ast.For | ast.While) else ast.walk(statement):
            if isinstance(node, ast.Assign):
                values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
                found += [value.id for value in values if isinstance(value, ast.Name)]
    return found


def test_aliases_are_found() -> None:
    kernel = ast.parse("def f():\n    a = zeros()\n    b, c = a, a\n    for i in r:\n        a, b = b, load()").body[0]
    assert isinstance(kernel, ast.FunctionDef)
    assert aliases(kernel) == ["a", "a"]


@pytest.mark.parametrize(("op", "template"), CASES)
def test_no_tensor_has_two_names_before_a_loop(op: str, template: str) -> None:
    """Triton 3.6 to 3.9 take them for one variable of the loop: what was to be carried from step to step stays zero,
    and the interpreter does not show it."""
    for node in ast.walk(ast.parse(default_rendering(op, template))):
        if isinstance(node, ast.FunctionDef):
            assert not aliases(node), f"{node.name}: give each its own tensor"
