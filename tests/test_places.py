"""Lines of templates in errors: every line of every rendering is traced to the one that it comes from."""

from __future__ import annotations

from pathlib import Path

import jinja2
import pytest
from kernel_cases import TEMPLATES, op_of, problems, spread

from tunegen import paths, places, render
from tunegen.errors import RenderError
from tunegen.ops import op_spec
from tunegen.silicon import of_arch

H200 = of_arch("sm_90")
FOLDER = paths.resource("templates")
SHAPES = ((16384, 4096), (64, 16384), (4096, 16384), (4096, 32768))


@pytest.mark.parametrize("template", TEMPLATES)
def test_every_line_is_found_in_its_template(template):
    spec, name = op_spec(op_of(template)), f"{template}{render.SUFFIX}"
    plain, marked = (render._environment((str(FOLDER),), marked=marks).get_template(name) for marks in (False, True))
    found = [problem for shape in SHAPES for problem in problems(template, *shape, "bf16", "bf16", H200)]
    assert found
    traced = 0
    for problem in found:
        for config in spread(problem, template, H200, 1):
            for flags in spec.flags(problem, config, spec.nestable(problem)[-1] if spec.nestable(problem) else ()):
                text, marks = plain.render(flags), marked.render(flags)
                for number, line in enumerate(text.rstrip("\n").split("\n"), 1):
                    file, at = places.origin(marks, text, number)
                    source = (FOLDER / file).read_text().split("\n")[at - 1]
                    if "{" not in source and line.strip():  # without tags a line is rendered as it is
                        assert source.strip() == line.strip()
                        traced += 1
    assert traced > 20


def test_a_library_below_the_folder_of_a_template_is_no_place_in_it():
    """`{{ 5 | join }}` beside a virtual environment was told as a line of Jinja's own source."""
    with pytest.raises(TypeError) as caught:
        jinja2.Environment().from_string("{{ 5 | join }}").render()
    assert places.raised(caught.value, [str(Path(jinja2.__file__).parents[1])]) is None


def test_rendering_that_the_marks_change_has_no_lines():
    assert places.origin(places.marked("a\nb", "mine"), "a\nc", 1) is None
    assert places.origin(places.marked("a\nb", "mine"), "a\nb", 2) == ("mine", 2)


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ("{{ nothing }}\n", "UndefinedError: 'nothing' is undefined"),
        ("x = (\n", "renders to invalid Python: '(' was never closed"),
        ("{% endif %}\n", "TemplateSyntaxError: Encountered unknown tag 'endif'."),
    ],
)
def test_mistake_in_a_part_names_the_part_and_what_includes_it(tmp_path, part, words):
    (tmp_path / "_part.py.jinja").write_text(f"a = 1\nb = 2\n{part}")
    path = tmp_path / "forward_mine.py.jinja"
    path.write_text('"""Mine."""\n\n{% if save_rstd %}\nc = 3\n{% endif %}\n{% include "_part.py.jinja" %}\n')
    with pytest.raises(RenderError) as caught:
        render.render("rms_norm", str(path), {"save_rstd": True})
    assert str(caught.value).startswith(f"forward_mine.py.jinja: _part.py.jinja, line 3: {words}")


@pytest.mark.parametrize(
    "tags", ["{% set n %}\n7\n{% endset %}\n{{ n | int }}", "{% set n %}\n7\n{% endset %}\n{{ 6 // (n | int) }}"]
)
def test_template_that_cannot_bear_marks_is_told_by_its_rendered_line(tmp_path, tags):
    """As the whole of it was: the marks change what it renders, or let it fail."""
    path = tmp_path / "forward_mine.py.jinja"
    path.write_text(f"a = (\n{tags}\n")
    with pytest.raises(
        RenderError, match=r"^forward_mine\.py\.jinja renders to invalid Python, line 3: '\(' was never"
    ):
        render.render("rms_norm", str(path), {})
