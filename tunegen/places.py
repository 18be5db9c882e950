"""Where in a template something stands that went wrong: templates are marked line by line, rendered again, and the
marks say which of their lines a rendered line comes from. Asked where an error is told only."""

from __future__ import annotations

import re
import traceback
from collections.abc import Sequence
from pathlib import Path

BEGIN, BETWEEN, END = "\ue000", "\ue001", "\ue002"
"""Around a mark: letters for private use, which no template has and no filter knows."""

MARK = re.compile(f"{BEGIN}([^{BETWEEN}]*){BETWEEN}([0-9]+){END}")
OPENED = re.compile(r"\{[{%#](?!.*[}%#]\})", re.DOTALL)
TRIMS = re.compile(r"(%|#|-\})\}\s*$")
TRIMMED = re.compile(r"\s*\{[{%#]-")


def marked(text: str, name: str) -> str:
    """The template `name` with a mark at the end of each line; but for those that Jinja joins with the next one, and
    those that end inside of a tag."""
    lines, inside = text.split("\n"), ""
    for number, line in enumerate(lines):
        inside = inside + "\n" + line if OPENED.search(inside) else line
        behind = "".join(lines[number + 1 : number + 2])
        if not (OPENED.search(inside) or TRIMS.search(line) or TRIMMED.match(behind)):
            lines[number] = f"{line}{BEGIN}{name}{BETWEEN}{number + 1}{END}"
    return "\n".join(lines)


def origin(rendered: str, plain: str, line: int) -> tuple[str, int] | None:
    """The template and its line that line number `line` of the rendering `plain` comes from; `rendered` is that of the
    marked templates. None where marks have changed what is rendered."""
    lines = rendered.split("\n")
    if [MARK.sub("", one).strip() for one in lines] != [one.strip() for one in plain.split("\n")]:  # filters indent
        return None
    behind = [found for one in lines[line - 1 :] for found in MARK.findall(one)[-1:]]
    return (behind[0][0], int(behind[0][1])) if behind else None


def raised(error: Exception, folders: Sequence[str]) -> tuple[str, int] | None:
    """The template in one of `folders`, and its line, in which Jinja failed; None where it does not say."""
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    if hasattr(error, "filename") and hasattr(error, "lineno"):  # of what cannot be parsed no line has run
        frames.append((error.filename, error.lineno))
    for file, line in reversed(frames):
        for folder in folders:
            if file and line and file.endswith(".jinja") and Path(file).is_relative_to(folder):
                return str(Path(file).relative_to(folder)), line
    return None
