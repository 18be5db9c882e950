"""The keys and values of a search space file, each with its line, and what may be written there."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from .domains import Domain
from .errors import ExpressionError, SearchSpaceError
from .expressions import Expression, Rule, listed, show
from .model import Value
from .silicon import WARPS

WORD, UPPER = r"[a-z][a-z0-9_]*", r"[A-Z][A-Z0-9_]*"
PARAMETER = f"{UPPER}|num_warps|num_ctas"
CTAS = (1, 2, 4, 8)
"""Blocks of a cluster that work on one program; GPUs before sm_90 have no clusters."""
MOST_CHOICES = 1000
"""In a list: each point of the space is looked up in it."""
LAUNCH_OPTIONS = {
    "num_warps": (WARPS, "a power of two; a block has at most 32 warps"),
    "num_ctas": (CTAS, "a power of two; a cluster has at most 8 blocks"),
}

IN_C: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""Where PyYAML was built with it: much faster, with the same tree and the same lines in it."""


def read(path: Path) -> Entry:
    """The whole file. Raises SearchSpaceError where it is no YAML, and OSError or UnicodeDecodeError."""
    try:
        node = _tree(path.read_text("utf-8"))
    except (yaml.YAMLError, RecursionError) as error:
        line = getattr(getattr(error, "problem_mark", None), "line", 0) + 1
        raise SearchSpaceError(f"{path}:{line}: no YAML: {' '.join(str(error).split())}") from None
    return Entry(str(path), 1, "", node)


def _tree(text: str) -> yaml.Node | None:
    with contextlib.suppress(yaml.YAMLError):
        return yaml.compose(text, Loader=IN_C)
    return yaml.compose(text, Loader=yaml.SafeLoader)  # of a mistake this one knows the line


class Entry(NamedTuple):
    """A key of the file, or an item of a list: where it stands and its value."""

    file: str
    line: int
    key: str
    node: yaml.Node | None

    def error(self, message: str) -> SearchSpaceError:
        """To be raised: where it is, and what is wrong there."""
        return SearchSpaceError(f"{self.file}:{self.line}: {self.key or 'the file'}: {message}")

    def mapping(self, allowed: str, required: Iterable[str] = ()) -> dict[str, Entry]:
        """The entries under this key; `allowed` is a pattern that keys must match."""
        meant = allowed.replace(WORD, "a lower-case name").replace(UPPER, "an upper-case name").replace("|", ", ")
        if not isinstance(self.node, yaml.MappingNode) or not self.node.value:
            raise self.error(f"must hold keys and values; allowed: {meant}")
        found: dict[str, Entry] = {}
        for key_node, node in self.node.value:
            key = str(key_node.value)
            entry = Entry(self.file, key_node.start_mark.line + 1, f"{self.key}.{key}".lstrip("."), node)
            if key in found:
                raise entry.error(f"stands twice, first in line {found[key].line}")
            if not re.fullmatch(allowed, key):
                raise entry.error(f"unknown key; allowed: {meant}")
            found[key] = entry
        if missing := [key for key in required if key not in found]:
            raise self.error(f"lacks the key {missing[0]}")
        return found

    def items(self) -> list[Entry]:
        """Those of the list under this key."""
        if not isinstance(self.node, yaml.SequenceNode) or not self.node.value:
            raise self.error("must be a list of at least one item")
        return [Entry(self.file, n.start_mark.line + 1, f"{self.key}[{i}]", n) for i, n in enumerate(self.node.value)]

    def scalar(self, kind: str, pattern: str, meant: str) -> str:
        """The text of a plain value whose YAML type and form are as stated."""
        node = self.node
        if isinstance(node, yaml.ScalarNode) and node.tag.endswith(f":{kind}") and re.fullmatch(pattern, node.value):
            return str(node.value)
        raise self.error(f"must be {meant}, not {show(getattr(node, 'value', None))}")

    def rule(self, known: Iterable[str]) -> Rule:
        """The expression that stands here; it may use the `known` names."""
        try:
            expression = Expression(self.scalar("str", r"(?s).+", "an expression").removeprefix("="))
        except ExpressionError as error:
            raise self.error(str(error)) from None
        if unknown := sorted(expression.names.difference(known)):
            raise self.error(f"unknown name {unknown[0]} in '{expression.text}'; known: {listed(sorted(known))}")
        return Rule(expression, f"{self.file}:{self.line}: {self.key}")

    @property
    def option(self) -> str:
        """The parameter that stands here, or in whose list this is."""
        return self.key.rpartition(".")[2].partition("[")[0]

    @property
    def launchable(self) -> str:
        """What a launch option may be, for messages."""
        allowed, why = LAUNCH_OPTIONS[self.option]
        return f"one of {listed(allowed)} ({why})"

    def value(self) -> Value:
        """A choice of a parameter."""
        if self.option in LAUNCH_OPTIONS:
            allowed, _ = LAUNCH_OPTIONS[self.option]
            return int(self.scalar("int", "|".join(map(str, allowed)), self.launchable))
        if str(getattr(self.node, "tag", "")).endswith(":int"):
            return int(self.scalar("int", r"0|[1-9]\d{0,8}", "a plain number below 1000000000"))
        return self.scalar("str", WORD, "a whole number, a word in lower case or '=expression'")

    def domain(self, known: Iterable[str]) -> Domain:
        """The choices of a parameter: a list, one value, or how it is computed."""
        if isinstance(self.node, yaml.ScalarNode):
            return self._computed(known) if self.node.value.startswith("=") else (self.value(),)
        values: list[Value] = []
        items = self.items()
        if len(items) > MOST_CHOICES:
            raise self.error(f"has {len(items)} choices, at most {MOST_CHOICES} are tried")
        for item in items:
            value = item.value()
            if value in values or type(value) is not type((*values, value)[0]):
                raise item.error(f"{value!r} stands twice, or beside values of another kind")
            values.append(value)
        return tuple(values)

    def _computed(self, known: Iterable[str]) -> Rule:
        """The rule of a parameter; a launch option computed from nothing is checked as one that is given."""
        rule = self.rule(known)
        if self.option in LAUNCH_OPTIONS and not rule.expression.names:
            allowed, _ = LAUNCH_OPTIONS[self.option]
            if (value := rule.value({})) not in allowed:
                raise self.error(f"must be {self.launchable}, not {show(value)}")
        return rule
