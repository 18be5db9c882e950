"""Template -> text of a kernel file. The only module that knows Jinja, which it imports where it renders."""

from __future__ import annotations

import ast
import atexit
import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from . import paths, places
from .errors import BuildError, RenderError
from .model import Config, KernelSource, Problem
from .once import first
from .spec import OpSpec
from .syntax import parse

LOG = logging.getLogger("tunegen")
SUFFIX = ".py.jinja"

_told: set[str] = set()

# Triton's compile cache key holds the line on which a kernel starts: the header has this fixed number of lines and no
# date.
HEADER = "# Rendered by tunegen from templates/{op}/{template}.py.jinja: edit the template, not this file.\n# {flags}\n"


def templates(op: str, folder: Path | None = None) -> list[str]:
    """Names of the templates of `op`, such as `forward_single_block`; files that start with `_` are parts of others."""
    root = (folder or paths.resource("templates")) / op
    return sorted(p.name[: -len(SUFFIX)] for p in root.glob(f"[!_]*{SUFFIX}"))


def render(op: str, template: str, flags: Mapping[str, Any]) -> KernelSource:
    """Render `templates/<op>/<template>.py.jinja`, or the file at a path that ends so, with structural `flags`.

    Raises RenderError for a missing template, an undefined variable, or text that is no Python.
    """
    return _render(op, template, tuple(sorted(flags.items())), str(paths.resource("templates")))


@lru_cache(maxsize=4096)
def _render(op: str, template: str, flags: tuple[tuple[str, Any], ...], folder: str) -> KernelSource:
    import jinja2

    name = f"{op}/{template}{SUFFIX}"
    folders: tuple[str, ...] = (folder,)
    if template.endswith(SUFFIX):  # a file of its own, which may include the parts of the others
        home, _, name = template.rpartition("/")
        template, folders = name[: -len(SUFFIX)], (home or ".", folder)
    try:
        body = _environment(folders).get_template(name).render(dict(flags))
    except jinja2.TemplateNotFound as error:
        raise RenderError(f"no template {error.name} in {' or '.join(folders)}") from error
    except Exception as error:  # a template can raise whatever its expressions do
        place = _place(name, places.raised(error, folders))
        raise RenderError(f"{place}: {type(error).__name__}: {error}") from error
    header = HEADER.format(op=op, template=template, flags=" ".join(f"{k}={v}" for k, v in flags))
    try:
        digest = code_digest(header + body, name)
    except RenderError as error:
        wrong = error.__cause__
        line = (getattr(wrong, "lineno", None) or 0) - header.count("\n")
        found = _origin(folders, name, dict(flags), body, max(line, 1))
        if found is None:
            raise
        raise RenderError(f"{_place(name, found)}: renders to invalid Python: {getattr(wrong, 'msg', '')}") from wrong
    return KernelSource(op, template, header + body, digest, dict(flags))


def _origin(folders: tuple[str, ...], name: str, flags: dict[str, Any], body: str, line: int) -> tuple[str, int] | None:
    """The template and its line that a line of `body`, a rendering, comes from; None where that cannot be told."""
    try:
        return places.origin(_environment(folders, marked=True).get_template(name).render(flags), body, line)
    except Exception:  # of a template that cannot bear the marks
        return None


def _place(name: str, found: tuple[str, int] | None) -> str:
    """The template `name` and the line that was found, which may be that of a part that it includes."""
    if found is None:
        return name
    return f"{name}, line {found[1]}" if found[0] == name else f"{name}: {found[0]}, line {found[1]}"


@lru_cache(maxsize=8)
def _environment(folders: tuple[str, ...], marked: bool = False) -> Any:
    """Of templates in `folders`, or of the same with marks that say where each line comes from."""
    import jinja2

    class Marked(jinja2.FileSystemLoader):
        def get_source(self, environment: Any, template: str) -> Any:
            source, *rest = super().get_source(environment, template)
            return places.marked(source, template), *rest

    return jinja2.Environment(
        loader=(Marked if marked else jinja2.FileSystemLoader)(folders),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # the output is Python, not HTML
    )


def code_digest(text: str, name: str = "<kernel>") -> str:
    """16 hex digits over the code alone, so that editing a comment or a blank line throws no timing away."""
    try:
        code = ast.unparse(parse(text))
    except SyntaxError as error:
        raise RenderError(f"{name} renders to invalid Python, line {error.lineno}: {error.msg}") from error
    return hashlib.sha256(code.encode()).hexdigest()[:16]


def write(source: KernelSource) -> Path:
    """Put the text of `source` into the build folder and return the file. Raises BuildError if that cannot be done.

    The name is the hash of the text. A file that is there is compared before it is trusted; a new one appears by
    rename, so that another process never sees half of it.
    """
    text = source.text.encode()
    path = _build_folder() / f"{source.template}_{hashlib.sha256(text).hexdigest()[:16]}.py"
    try:
        if not path.exists() or path.read_bytes() != text:
            paths.write_whole(path, text)
    except OSError as error:
        raise BuildError(
            f"cannot write the rendered kernel {path}: {error}; free space there or set TUNEGEN_BUILD"
        ) from error
    return path


def _build_folder() -> Path:
    """The build folder, private to the user, or a temporary one (noted once) where it cannot be written."""
    folder = paths.build_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(13, "not writable", str(folder))
    except OSError as error:
        return _private_folder(str(error))
    return folder


@lru_cache(maxsize=1)
def _private_folder(reason: str) -> Path:
    try:
        folder = tempfile.mkdtemp(prefix="tunegen-build-")
    except OSError as error:
        raise BuildError(f"cannot keep rendered kernels ({reason}), nor for now: {error}; set TUNEGEN_BUILD") from error
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    if first(_told, reason):
        LOG.warning("cannot keep rendered kernels (%s): using %s for now; set TUNEGEN_BUILD", reason, folder)
    return Path(folder)


def template_of(problem: Problem, config: Config) -> str:
    """File name of the template of `config`, or its path where it is a file of its own."""
    return config.family if config.family.endswith(SUFFIX) else f"{problem.direction}_{config.family}{SUFFIX}"


def renderings(problem: Problem, config: Config, spec: OpSpec, nested: tuple[str, ...] = ()) -> list[KernelSource]:
    """Every kernel file that may be launched for `config` where the rows of the tensors `nested` lie at no common
    distance; the first is the one that is timed. Raises RenderError."""
    template = _template(problem, config)
    return [render(spec.name, template, flags) for flags in spec.flags(problem, config, nested)]


def _template(problem: Problem, config: Config) -> str:
    """What `render` knows the template of `config` by."""
    family = config.family
    return family if family.endswith(SUFFIX) else f"{problem.direction}_{family}"


def rendering(
    problem: Problem,
    config: Config,
    spec: OpSpec,
    *,
    save_rstd: bool,
    accumulate_dw: bool = False,
    nested: tuple[str, ...] = (),
) -> KernelSource:
    """The one that is launched: forward with or without rstd saved for backward; backward with dw written, as it is
    timed, or added to what is there."""
    found = renderings(problem, config, spec, nested)
    source = next(source for source in found if source.flags.get("save_rstd", save_rstd) == save_rstd)
    if not accumulate_dw:
        return source
    return render(spec.name, _template(problem, config), {**source.flags, "accumulate_dw": True})


def combined_digest(problem: Problem, config: Config, spec: OpSpec) -> str:
    """One digest over every rendering that may be launched for `config`: a change in any of them makes its timings
    stale."""
    kinds = ((), *spec.nestable(problem)[-1:])  # the last has all that the others have
    digests = " ".join(s.digest for nested in kinds for s in renderings(problem, config, spec, nested))
    return hashlib.sha256(digests.encode()).hexdigest()[:16]
