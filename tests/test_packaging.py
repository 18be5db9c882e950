"""What is in the wheel and where it is found, and versions that stand in two places."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys

import pytest
import yaml

import tunegen
from tunegen import paths

try:
    import tomllib
except ImportError:  # Python 3.10: pytest brings it
    import tomli as tomllib

REPOSITORY = paths.PACKAGE.parent
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
WHEEL = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
RESOURCES = ("templates", "search_spaces")
ASK = """
from tunegen import paths
for name in ("templates", "search_spaces"):
    print(paths.resource(name))
print(paths.in_checkout(), paths.database(), sep="\\n")
"""


def pins():
    """Tools of the `lint` extra with their exact versions."""
    found = [re.fullmatch(r"([\w-]+)==([\w.]+)", text) for text in PROJECT["project"]["optional-dependencies"]["lint"]]
    return {match[1]: match[2] for match in found if match}


def test_version_is_the_same_everywhere():
    assert PROJECT["project"]["version"] == tunegen.__version__


def test_tools_that_judge_the_code_are_pinned():
    assert {"ruff", "mypy"} <= pins().keys()


def test_hooks_run_the_pinned_tools():
    """From the environment of the checkout: a version of their own here would drift."""
    text = (REPOSITORY / ".pre-commit-config.yaml").read_text()
    repositories = yaml.safe_load(text)["repos"]
    hooks = [hook for repository in repositories for hook in repository["hooks"]]
    assert {repository["repo"] for repository in repositories} == {"local"}
    assert {hook["language"] for hook in hooks} == {"system"}
    assert {hook["entry"].split()[0] for hook in hooks} == {f".venv/bin/{tool}" for tool in ("ruff", "mypy")}
    assert not re.search(r"==|rev:|additional_dependencies", text)


def test_every_resource_is_in_the_wheel():
    sources = "".join(path.read_text() for path in paths.PACKAGE.rglob("*.py"))
    used = set(re.findall(r'paths\.resource\("(\w+)"\)', sources))
    assert used == set(RESOURCES)
    included = WHEEL["force-include"]
    assert included == {name: f"tunegen/{name}" for name in used}
    assert all((REPOSITORY / name).is_dir() for name in included)


def test_measured_results_are_not_in_the_wheel():
    """They belong to the repository: nothing in the package reads them."""
    assert WHEEL.keys() == {"packages", "force-include"}
    assert WHEEL["packages"] == ["tunegen"]
    assert [path.name for path in paths.PACKAGE.rglob("*") if ".jsonl" in path.name or ".db" in path.name] == []
    assert (REPOSITORY / "cache" / "h200.jsonl.xz").is_file()


@pytest.fixture
def layout(tmp_path):
    """A copy of the package in a folder of its own, without resources."""
    shutil.copytree(paths.PACKAGE, tmp_path / "lib" / "tunegen", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "lib"


def ask(layout, **variables):
    environment = {k: v for k, v in os.environ.items() if k != "TUNEGEN_DB"} | {"PYTHONPATH": str(layout), **variables}
    command = [sys.executable, "-c", ASK]
    return subprocess.run(command, cwd=layout, env=environment, capture_output=True, text=True, timeout=60)


def add_resources(folder):
    for name in RESOURCES:
        shutil.copytree(REPOSITORY / name, folder / name)


def test_resources_of_an_installed_package_lie_inside_it(layout):
    add_resources(layout / "tunegen")
    found = ask(layout, XDG_CACHE_HOME=str(layout / "cache of the user"))
    inside = [str(layout / "tunegen" / name) for name in RESOURCES]
    assert found.stdout.splitlines() == [*inside, "False", str(layout / "cache of the user" / "tunegen" / "tune.db")]


def test_resources_of_a_checkout_lie_beside_the_package(layout):
    add_resources(layout)
    (layout / "pyproject.toml").touch()
    found = ask(layout)
    beside = [str(layout / name) for name in RESOURCES]
    assert found.stdout.splitlines() == [*beside, "True", str(layout / "cache" / "tune.db")]


def test_folders_beside_an_installed_package_are_not_taken(layout):
    """site-packages may hold a `templates` of anybody."""
    add_resources(layout)
    assert "ResourceMissingError" in ask(layout).stderr


def test_missing_resource_is_told_with_both_places(layout):
    (layout / "pyproject.toml").touch()
    told = ask(layout).stderr.splitlines()[-1]
    places = [str(layout / "tunegen" / "templates"), str(layout / "templates")]
    assert [place for place in ("'templates'", *places, "reinstall") if place not in told] == []


def test_ci_is_a_program_without_addresses():
    script = REPOSITORY / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert "://" not in script.read_text()
