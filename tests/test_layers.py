"""Who may import whom, and a few other rules that a reader could check by eye: the source is parsed, not imported."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "tunegen"

# A module imports from rows above its own, or from a module further left in its row; imports inside functions too.
LAYERS = {
    "records": "errors once syntax paths installed spending policies model spec",
    "inputs": (
        "silicon expressions domains entries space layouts reference "
        "ops.rms_norm_spec ops.add_rms_norm_spec ops recorded"
    ),
    "making": (
        "places render index migrations records liveness store packed exporting exported importing defaults sampler"
    ),
    "running": (
        "toolchain plans compile launch prepared lookup passing key dispatch ops.arguments ops.memory ops.main_grad "
        "ops.by_torch ops.notes ops.distributed ops.quick ops.registered ops.rms_norm ops.add_rms_norm "
        "ops.rms_norm_module uncounted explanation warming"
    ),
    "judging": "ulps gate_kernels verify sensors ties blocks bench estimate",
    "tuning": (
        "ahead evaluate processes pool child worker serving guide standing sweep gpu_process fleet sweep_target needs "
        "attempt early"
    ),
    "telling": "report step_report progress",
    "integrations": (
        "integrations integrations.recognition integrations.architectures integrations.patch_report "
        "integrations.eager_backward integrations.hub_kernels integrations.forwards integrations.fusion "
        "integrations.patching integrations.recording"
    ),
    "gates": (
        "gates gates.checks gates.double gates.bf16 gates.stream gates.model gates.eager gates.training gates.curves "
        "gates.plot gates.run gates.record gates.command"
    ),
    "edge": "cli_options commands single rendered exchange families cli",
    "package": "__main__ tunegen",
}
ORDER = [module for row in LAYERS.values() for module in row.split()]

# The measuring process is started in `worker`, on the caller's side; what it runs is imported in that process alone.
STARTED = {("child", "serving")}

# Which modules may import what at module level. What is not named here belongs into the function that needs it.
TORCH = (
    "layouts reference ops.rms_norm_spec ops.add_rms_norm_spec launch prepared key dispatch ops.arguments ops.memory "
    "ops.main_grad ops.by_torch ops.distributed ops.quick ops.registered ops.rms_norm ops.add_rms_norm "
    "ops.rms_norm_module explanation warming ulps gate_kernels verify sensors bench evaluate serving "
    "integrations.recognition integrations.architectures integrations.eager_backward integrations.hub_kernels "
    "integrations.forwards integrations.fusion integrations.patching integrations.recording gates.checks gates.double "
    "gates.bf16 gates.stream gates.model gates.eager gates.training gates.curves gates.run gates.command"
)
HEAVY = {
    "torch": TORCH,
    "yaml": "entries",
    "jinja2": "",
    "sqlite_utils": "migrations store",
    "optuna": "sampler",
    "sqlite3": "lookup records liveness store importing",
    "click": "cli cli_options commands single exchange families gates.command",
    "rich": "cli_options commands single progress report gates.command",
    "triton": "gate_kernels",
    "transformers": "",
    "matplotlib": "",
    "platformdirs": "",
    "numpy": "",
    "pandas": "",
}


class Import(NamedTuple):
    """One imported module: of ours without the package's name, of others the first part of the name."""

    name: str
    ours: bool
    line: int
    in_function: bool


@functools.cache
def modules() -> dict[str, ast.Module]:
    """Syntax trees by name: `compile`, `ops.rms_norm`; a package by the name of its folder."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts[1:]
        name = ".".join(p for p in parts if p != "__init__") or "tunegen"
        found[name] = ast.parse(path.read_text(encoding="utf-8"))
    return found


def imports(module: str, tree: ast.Module | None = None) -> Iterator[Import]:
    """All of them, wherever they stand."""
    tree = tree or modules()[module]
    inside = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{absolute(module, node)}.{alias.name}" for alias in node.names]
        for name in names:
            yield resolve(name, node.lineno, id(node) in inside)


def absolute(module: str, node: ast.ImportFrom) -> str:
    """`from ..model import X` in ops.rms_norm -> tunegen.model."""
    if not node.level:
        return node.module or ""
    is_package = module == "tunegen" or any(other.startswith(f"{module}.") for other in modules())
    here = ["tunegen", *(module.split(".") if module != "tunegen" else [])]
    base = here[: len(here) - node.level + is_package]
    return ".".join([*base, *([node.module] if node.module else [])])


def resolve(name: str, line: int, in_function: bool) -> Import:
    """The longest part of a dotted name that is a module of ours."""
    parts = name.split(".")
    if parts[0] != "tunegen":
        return Import(parts[0], False, line, in_function)
    for end in range(len(parts), 1, -1):
        if (found := ".".join(parts[1:end])) in modules():
            return Import(found, True, line, in_function)
    return Import("tunegen", True, line, in_function)


def test_the_table_has_every_module_once():
    assert sorted(ORDER) == sorted(modules())


@pytest.mark.parametrize("module", ORDER)
def test_no_module_imports_upward(module):
    here = ORDER.index(module)
    for found in imports(module):
        if not found.ours or (module, found.name) in STARTED or found.name == "tunegen":
            continue
        assert ORDER.index(found.name) < here, f"{module}:{found.line} imports {found.name}, which stands above it"


def test_only_the_edge_asks_the_package_itself():
    """`from . import __version__`; any other name of the package would import the op."""
    askers = {module for module in ORDER if any(found.name == "tunegen" and found.ours for found in imports(module))}
    assert askers <= set(LAYERS["edge"].split())


def test_what_is_started_elsewhere_is_imported_there():
    for module, name in STARTED:
        found = [entry for entry in imports(module) if entry.name == name]
        assert found, f"{module} does not import {name} any more: take it off the list"
        assert all(entry.in_function for entry in found)


@pytest.mark.parametrize("module", ORDER)
def test_heavy_imports_stand_where_the_table_allows(module):
    for found in imports(module):
        if not found.ours and not found.in_function:
            allowed = HEAVY.get(found.name, module).split()
            assert module in allowed, f"{module}:{found.line} imports {found.name} at module level"


def test_every_entry_of_the_table_is_used():
    """An allowance that nobody needs is one that nobody would miss."""
    used = {(found.name, module) for module in ORDER for found in imports(module) if not found.in_function}
    allowed = {(name, module) for name, modules in HEAVY.items() for module in modules.split()}
    assert allowed <= used


EVERY_FORM = """
import torch.nn
import tunegen.space
from .. import dispatch, paths as where
from ..model import Problem
from . import rms_norm_spec
from .rms_norm_spec import SPEC
def function():
    from triton import knobs
    from tunegen.render import render
"""


def test_the_parser_sees_imports_of_every_form():
    """A checker that sees nothing finds nothing wrong."""
    found = {(entry.name, entry.in_function) for entry in imports("ops.rms_norm", ast.parse(EVERY_FORM))}
    above = {"torch", "space", "dispatch", "paths", "model", "ops.rms_norm_spec"}
    assert found == {*((name, False) for name in above), ("triton", True), ("render", True)}
    assert next(imports("ops", ast.parse("from ..model import OpSpec"))).name == "model"
    assert next(imports("tunegen", ast.parse("from .ops.rms_norm import rms_norm"))).name == "ops.rms_norm"


# Sizes.


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_modules_and_functions_stay_short(path):
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) < 300
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno - node.lineno + 1 < 40, f"{node.name} in line {node.lineno}"


# Things that stand in one place.


def test_no_device_is_assumed():
    """device="cuda" would be GPU 0 whatever the tensors are on."""
    for module, tree in modules().items():
        for call in ast.walk(tree):
            if isinstance(call, ast.Call):
                for keyword in call.keywords:
                    literal = keyword.value.value if isinstance(keyword.value, ast.Constant) else ""
                    assert keyword.arg != "device" or not str(literal).startswith("cuda"), f"{module}:{call.lineno}"


def reads_environment(node: ast.AST) -> bool:
    """`os.environ`, `os.getenv`, `from os import environ`, whatever `os` is called."""
    if isinstance(node, ast.Attribute):
        return node.attr in ("environ", "environb", "getenv", "getenvb", "putenv")
    return isinstance(node, ast.ImportFrom) and node.module == "os" and any("env" in a.name for a in node.names)


def test_environment_variables_are_read_in_one_place():
    found = {module for module, tree in modules().items() if any(map(reads_environment, ast.walk(tree)))}
    assert found == {"paths"}


def test_names_of_environment_variables_are_known_in_one_place():
    """Elsewhere they may be mentioned to people (in messages), not used as a name."""
    for module, tree in modules().items():
        literals = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
        exact = {v for v in literals if isinstance(v, str) and v.isupper() and v.startswith(("TUNEGEN_", "TRITON_"))}
        assert not exact or module == "paths", f"{module}: {exact}"


def test_how_to_install_is_said_in_one_place():
    """It named a package that no index has."""
    for module, tree in modules().items():
        literals = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
        told = [text for text in literals if isinstance(text, str) and ("pip install" in text or "tunegen[" in text)]
        assert not told or module == "errors", f"{module}: {told}"


def test_python_is_parsed_in_one_place():
    """Which goes on where CPython 3.11 mixes up threads."""
    for module, tree in modules().items():
        calls = [
            node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and ast.unparse(node) == "ast.parse"
        ]
        assert bool(calls) == (module == "syntax"), f"{module}: use syntax.parse"
