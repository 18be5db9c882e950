"""`tunegen try`: one config through the steps of a sweep, in or out of the search space."""

from __future__ import annotations

import dataclasses
import json
import re
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from fake_gpu import FakeGpu, us_of
from rich.console import Console

from tunegen import cli, paths
from tunegen.attempt import attempt, config_of
from tunegen.errors import CompileError, PlanError, TunegenError
from tunegen.expressions import Rule
from tunegen.model import Config, Launch, Plan, Problem, TrialState
from tunegen.ops import op_spec
from tunegen.plans import make_plan, timed_plan
from tunegen.render import render, renderings
from tunegen.silicon import of_arch
from tunegen.single import CPU_CHECK
from tunegen.space import load_space

H200 = of_arch("sm_90")
FORWARD = Problem("rms_norm", "forward", 4096, 1024)
BACKWARD = Problem("rms_norm", "backward", 4096, 1024, weight_grad=True)
SPACE = load_space("rms_norm")
REPOSITORY = paths.PACKAGE.parent
TEMPLATES = paths.resource("templates") / "rms_norm"


def run(*arguments):
    return CliRunner().invoke(cli.main, ["try", *arguments, "--hidden", "256", "--arch", "sm_90"])


# What is not given


def test_rest_comes_from_the_default():
    default = SPACE.default(BACKWARD, H200)
    assert config_of(BACKWARD, default.family, {}, H200) == default
    assert config_of(BACKWARD, default.family, {"num_warps": default["num_warps"]}, H200) == default


def test_rest_is_valid_beside_what_is_given():
    for name in ("two_pass", "persistent"):
        family = SPACE.family("forward", name)
        for parameter, domain in family.parameters.items():
            for value in () if isinstance(domain, Rule) else domain:
                found = config_of(FORWARD, name, {parameter: value}, H200)
                assert found[parameter] == value
                possible = SPACE.candidates(FORWARD, H200, name, {parameter: value})
                assert not possible or SPACE.check(FORWARD, H200, found) is None


def test_values_outside_of_the_space_stay_as_given():
    found = config_of(FORWARD, "two_pass", {"CHUNK": 96, "num_warps": 2}, H200)
    assert (found["CHUNK"], found["num_warps"]) == (96, 2)


def test_computed_values_can_be_given():
    assert config_of(FORWARD, "single_block", {"BLOCK_SIZE": 2048}, H200)["BLOCK_SIZE"] == 2048


def test_file_has_what_is_given_and_nothing_else(tmp_path):
    path = tmp_path / "mine.py.jinja"
    path.write_text("def plan(p):\n    return p.ROWS\n")
    assert config_of(FORWARD, str(path), {"ROWS": 2}, H200) == Config.of(str(path), {"ROWS": 2})


def copy_of(tmp_path, template, name=None):
    path = tmp_path / f"{name or template}.py.jinja"
    path.write_text((TEMPLATES / f"{template}.py.jinja").read_text())
    return str(path)


@pytest.mark.parametrize(
    ("template", "name", "given", "computed"),
    [
        ("forward_single_block", "mine", {"ROWS": 1}, {"BLOCK_SIZE": 4096}),
        ("forward_single_block", "mine", {"ROWS": 1, "BLOCK_SIZE": 8192}, {}),
        ("forward_split_row_atomic", "mine", {"SPLITS": 4}, {"BLOCK_SIZE": 1024}),
        (
            "backward_persistent_partials",
            "backward_persistent_partials",
            {"ROWS": 1, "STAGES": 1, "PROGRAMS_PER_SM": 1, "RSTD": "saved", "PDL": "early"},
            {"BLOCK_SIZE": 4096},
        ),
    ],
)
def test_file_has_what_families_compute(tmp_path, template, name, given, computed):
    problem = BACKWARD if template.startswith("backward") else FORWARD
    path = copy_of(tmp_path, template, name)
    assert config_of(problem, path, given, H200) == Config.of(path, {**given, **computed})


@pytest.mark.parametrize(
    ("template", "given", "words"),
    [
        ("forward_single_block", {}, r"mine\.py\.jinja needs ROWS too: give values, such as ROWS=1$"),
        ("forward_split_row_atomic", {}, r"needs SPLITS too: give values, such as SPLITS=\d+$"),
        (
            "backward_persistent_partials",
            {"STAGES": 1},
            r"needs RSTD, PROGRAMS_PER_SM, ROWS too: give values, such as RSTD=\w+ PROGRAMS_PER_SM=\d+ ROWS=\d+$",
        ),
    ],
)
def test_all_that_a_file_misses_is_listed_with_an_example(tmp_path, template, given, words):
    """It was told one at a time, as an error of the compiler."""
    problem = BACKWARD if template.startswith("backward") else FORWARD
    with pytest.raises(TunegenError, match=words):
        config_of(problem, copy_of(tmp_path, template, "mine"), given, H200)


def test_every_template_asks_for_what_its_family_has(tmp_path):
    """Read from the text alone, as of a file that nobody knows."""
    for (direction, name), family in SPACE.members.items():
        problem = BACKWARD if direction == "backward" else FORWARD
        if name == "split_row_meet":
            problem = dataclasses.replace(problem, hidden=32768)
        if (whole := next(iter(SPACE.candidates(problem, H200, name)), None)) is None:
            continue
        path = copy_of(tmp_path, f"{direction}_{name}")
        wanted = {key: value for key, value in whole.parameters if key not in ("num_warps", "num_ctas")}
        free = {key: value for key, value in wanted.items() if not isinstance(family.parameters[key], Rule)}
        assert config_of(problem, path, free, H200) == Config.of(path, wanted), name


def test_a_file_named_after_a_family_is_asked_for_what_that_one_lists(tmp_path):
    """SPLITS follows from BLOCK_SIZE there, in other families it is the reverse."""
    problem = dataclasses.replace(FORWARD, hidden=32768)
    path = copy_of(tmp_path, "forward_split_row_meet")
    with pytest.raises(TunegenError, match=r"needs BLOCK_SIZE, PROGRAMS_PER_SM, STAGES too: give values, such as"):
        config_of(problem, path, {}, H200)
    given = {"BLOCK_SIZE": 1024, "PROGRAMS_PER_SM": 8, "STAGES": 3}
    assert config_of(problem, path, given, H200)["SPLITS"] == 32


@pytest.mark.parametrize("name", ["N", "SMS", "ALIGNED"])
def test_what_a_file_is_told_by_the_problem_cannot_be_given(tmp_path, name):
    """N was `TypeError: got multiple values for keyword argument 'N'`, and ALIGNED=0 went unnoticed."""
    given = {"BLOCK_SIZE": 1024, "PROGRAMS_PER_SM": 8, "STAGES": 3, name: 1}
    with pytest.raises(TunegenError, match=f"say what {name} is; give forward_split_row_meet.py.jinja no value"):
        config_of(FORWARD, copy_of(tmp_path, "forward_split_row_meet"), given, H200)


@pytest.mark.parametrize(
    ("family", "given", "words"),
    [
        ("flash", {}, r"no forward family 'flash'; there is single_block, .* or a path that ends in \.py\.jinja"),
        ("two_pass", {"COLS": 1}, "two_pass has no parameter 'COLS'; it has CHUNK"),
        ("no/such.py.jinja", {}, "no template file .*no/such.py.jinja"),
        ("two_pass", {"num_warps": 64}, "num_warps is 64, but a kernel may have 1, 2, 4, 8, 16, 32"),
        ("no/such.py.jinja", {"num_warps": "x"}, "num_warps is 'x', but a kernel may have 1, 2, 4, 8, 16, 32"),
        ("two_pass", {"num_ctas": 3}, "num_ctas is 3, but a kernel may have 1, 2, 4, 8, 16"),
        ("two_pass", {"CHUNK": 0}, "CHUNK of two_pass is 0, but must be an integer from 1 to"),
        ("two_pass", {"CHUNK": "x"}, "CHUNK of two_pass is 'x', but must be an integer"),
    ],
)
def test_what_is_unknown_is_refused(family, given, words):
    with pytest.raises(TunegenError, match=words):
        config_of(FORWARD, family, given, H200)


# Template files


def test_file_renders_as_the_template_of_the_space_does(tmp_path):
    """A copy elsewhere: the same code, includes and all, under its own name."""
    path = tmp_path / "forward_mine.py.jinja"
    path.write_text((TEMPLATES / "forward_two_pass.py.jinja").read_text())
    flags = renderings(FORWARD, Config.of("two_pass", {}), op_spec("rms_norm"))[0].flags
    copy = render("rms_norm", str(path), flags)
    assert copy.digest == render("rms_norm", "forward_two_pass", flags).digest
    assert copy.template == "forward_mine"


@pytest.mark.compiler
def test_copy_of_a_template_compiles_as_the_template(tmp_path):
    path = tmp_path / "forward_mine.py.jinja"
    path.write_text((TEMPLATES / "forward_two_pass.py.jinja").read_text())
    values = {"CHUNK": 1024, "num_warps": 4}
    copy = attempt(FORWARD, Config.of(str(path), values), H200, None)
    known = attempt(FORWARD, config_of(FORWARD, "two_pass", values, H200), H200, None)
    assert (copy.ok, copy.outside, known.outside) == (True, "a template file", "")
    assert copy.trial.resources.registers == known.trial.resources.registers
    assert copy.trial.estimate_us == known.trial.estimate_us


@pytest.mark.compiler
def test_broken_file_is_told_with_its_reason(tmp_path):
    path = tmp_path / "forward_mine.py.jinja"
    path.write_text("{{ nothing }}")
    found = attempt(FORWARD, Config.of(str(path), {}), H200, None)
    assert found.trial.state is TrialState.COMPILE
    assert "'nothing' is undefined" in found.trial.reason


WRONG = {
    "jinja": (
        "{% if weight %}\n    w_ptr",
        "{% if weight & %}\n    w_ptr",
        "    {% if weight & %}",
        "TemplateSyntaxError: ",
    ),
    "undefined": ("eps: {{ acc }},", "eps: {{ acc_ }},", "    eps: {{ acc_ }},", "UndefinedError: 'acc_' is undefined"),
    "python": ("def plan(p):", "def plan(p:", "def plan(p:", "renders to invalid Python: "),
    "behind": ("    N: tl.constexpr,\n", "    N tl.constexpr,\n", "    N tl.constexpr,", "renders to invalid Python: "),
}
"""Mistakes in a template: the text, what stands there instead, the line that is named, and what is said of it."""


@pytest.mark.compiler
@pytest.mark.parametrize("name", WRONG)
def test_mistake_of_a_template_is_told_with_its_line(tmp_path, name):
    """Of the template: the rendered file, of which a line was named, is nowhere to be seen."""
    old, new, line, words = WRONG[name]
    path = tmp_path / "forward_mine.py.jinja"
    text = (TEMPLATES / "forward_two_pass.py.jinja").read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    number = path.read_text().split("\n").index(line) + 1
    told = " ".join(run("rms_norm.forward", str(path), "CHUNK=256").output.split())
    assert f"reason forward_mine.py.jinja, line {number}: {words}" in told


def test_numbers_that_a_file_does_not_use_are_refused(tmp_path):
    path = tmp_path / "forward_mine.py.jinja"
    path.write_text((TEMPLATES / "forward_two_pass.py.jinja").read_text())
    with pytest.raises(TunegenError, match=r"forward_mine\.py\.jinja does not use CHUNKS"):
        config_of(FORWARD, str(path), {"CHUNKS": 1024}, H200)


@pytest.mark.compiler
@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("tl.load(", "tl.lode(", r"no attribute 'lode'.*, at `x = tl\.lode\("),
        ("CHUNK: tl.constexpr", "WIDTH: tl.constexpr", "has an argument WIDTH, which no parameter or tensor gives"),
        ("(p.M,)", "(p.M, p.SPLITS)", "its plan needs SPLITS, which no parameter gives"),
        ("def plan(p)", "def plans(p)", r"forward_mine\.py\.jinja has no plan\(p\)$"),
        ("Plan((Launch(forward_two_pass, (p.M,)),))", "Launch(forward_two_pass, (p.M,))", "return a Plan, got Launch$"),
        ("Plan((Launch(forward_two_pass, (p.M,)),))", "Launch", "plan must return a Plan, got Launch$"),
    ],
)
def test_mistakes_in_a_file_are_named_with_their_place(tmp_path, old, new, words):
    path = tmp_path / "forward_mine.py.jinja"
    path.write_text((TEMPLATES / "forward_two_pass.py.jinja").read_text().replace(old, new))
    found = attempt(FORWARD, Config.of(str(path), {"CHUNK": 1024}), H200, None).trial
    assert found.state is TrialState.COMPILE
    assert re.search(words, found.reason), found.reason


ONE = "(Launch(forward_two_pass, (p.M,)),)"


GRIDS = {
    "(p.M / 2,)": "(512.0,)",
    "()": "()",
    "(0,)": "(0,)",
    "(p.M, -1)": "(1024, -1)",
    "(p.M, True)": "(1024, True)",
    "(1, 65536)": "(1, 65536)",
    "(2**31,)": "(2147483648,)",
    "(p.M, 1, 1, 1)": "(1024, 1, 1, 1)",
    "p.M": "1024",
    "None": "None",
}
SHAPED = "scratch 's' must be a Scratch of a shape of integers (divide by //) and a dtype of "
PLANS = {
    "(Launch(forward_two_pass, (p.M,), 4),)": "the values of forward_two_pass must be a mapping of names to ",
    "(Launch(forward_two_pass, (p.M,), num_warps=64),)": "num_warps of forward_two_pass must be None or one of 1, 2, ",
    "(Launch(forward_two_pass, (p.M,), num_warps=0),)": "num_warps of forward_two_pass must be None or one of 1, 2, ",
    "(Launch(forward_two_pass, (p.M,), pdl='off'),)": "pdl of forward_two_pass must be True or False, got 'off'",
    "(Launch(forward_two_pass, (p.M,), together=0),)": "together of forward_two_pass must be None or an integer from ",
    "()": "Plan.launches must be a tuple of Launch, such as (launch,), got ()",
    ONE[1:-2]: "Plan.launches must be a tuple of Launch, such as (launch,), got Launch(",
    "(print,)": "Plan.launches must be a tuple of Launch, such as (launch,), got (<built-in",
    f"{ONE}, [1]": "Plan.scratch must be a mapping of names to Scratch, got [1]",
    f"{ONE}, {{'s': (4, 'fp32')}}": SHAPED,
    f"{ONE}, {{'s': Scratch((p.M / 2,), 'fp32')}}": SHAPED,
    f"{ONE}, {{'s': Scratch((p.M,), 'int8')}}": SHAPED,
}
"""What a plan must not return, and what is said of it."""


def with_launches(tmp_path, launches):
    text = (TEMPLATES / "forward_two_pass.py.jinja").read_text()
    assert f"Plan({ONE})" in text
    path = tmp_path / "forward_mine.py.jinja"
    text = text.replace("import Launch, Plan", "import Launch, Plan, Scratch")
    path.write_text(text.replace(f"Plan({ONE})", f"Plan({launches})"))
    return str(path)


@pytest.mark.parametrize(
    ("launches", "words"),
    [
        *(
            (f"(Launch(forward_two_pass, {grid}),)", f"the grid of forward_two_pass is {s}, but ")
            for grid, s in GRIDS.items()
        ),
        *PLANS.items(),
    ],
)
def test_plan_that_no_gpu_could_launch_is_refused(tmp_path, launches, words):
    """By the template's name, with the value and what it may be: (p.M / 2,) went as far as the launch."""
    config = Config.of(with_launches(tmp_path, launches), {"CHUNK": 256})
    with pytest.raises(PlanError) as caught:
        timed_plan(op_spec("rms_norm"), FORWARD, config, H200)
    assert str(caught.value).startswith(f"forward_mine.py.jinja: {words}")
    assert str(caught.value).endswith(", for 1024 rows")


@pytest.mark.compiler
def test_plan_that_divides_is_told_by_the_command(tmp_path):
    path = with_launches(tmp_path, "(Launch(forward_two_pass, (p.M / 2,)),)")
    done = run("rms_norm.forward", path, "CHUNK=256", "--rows", "1024")
    assert (done.exit_code, type(done.exception)) == (1, SystemExit)
    assert " ".join(done.output.split()).endswith(
        "forward_mine.py.jinja: the grid of forward_two_pass is (512.0,), but must be a tuple of one to three integers "
        "from 1 to 2147483647, 65535 and 65535; divide by // or triton.cdiv, and put rows first, for 1024 rows"
        " not in space a template file"
    )


def test_template_that_exits_ends_no_sweep(tmp_path):
    """sys.exit() in a plan or at import: the model's ranks are made in the sweeping process, which ended without a
    word, with exit code 0."""
    in_plan = Config.of(with_launches(tmp_path, "exit(0)"), {"CHUNK": 256})
    with pytest.raises(PlanError, match=r"forward_mine\.py\.jinja: SystemExit: 0, for 1024 rows"):
        timed_plan(op_spec("rms_norm"), FORWARD, in_plan, H200)
    at_import = tmp_path / "forward_ends.py.jinja"
    at_import.write_text("raise SystemExit('enough')\n")
    with pytest.raises(CompileError, match="SystemExit: enough"):
        timed_plan(op_spec("rms_norm"), FORWARD, Config.of(str(at_import), {}), H200)


def test_plans_of_all_ranks_and_limits_are_taken():
    for grid in [(1,), (2**31 - 1, 65535, 65535), [4, 2]]:
        module = SimpleNamespace(__name__="forward_mine_0", plan=lambda p, grid=grid: Plan((Launch(len, grid),)))
        assert make_plan(module, Config.of("mine", {}), 256, 4, 132).launches[0].grid == grid


@pytest.mark.compiler
def test_cause_of_a_compile_error_is_told():
    found = attempt(FORWARD, Config.of("two_pass", {"CHUNK": 96, "num_warps": 4}), H200, None).trial
    assert "Shape element 1 must be a power of 2, at `squares = tl.zeros([1, CHUNK], tl.float32)`" in found.reason


# With a GPU that is not there


@pytest.mark.compiler
def test_measured_config_has_state_resources_and_times(tmp_path):
    gpu = FakeGpu(str(tmp_path / "log"))
    problem = Problem("rms_norm", "forward", 4096, 1024)
    config = SPACE.default(problem, H200)
    with gpu.worker() as worker:
        values = attempt(problem, config, H200, worker).as_json()
    us = us_of(problem, config)
    assert (values["state"], values["verified"], values["us"]) == ("ok", True, us)
    assert values["share_of_copy"] == pytest.approx(10 / us)  # the sentinel takes 10 us
    assert values["tb_per_s"] == pytest.approx(2 * 1024 * 4096 * 2 / us / 1e6)


# The command


@pytest.mark.compiler
def test_command_without_a_gpu_compiles_and_says_so():
    done = run("rms_norm.forward", "single_block", "ROWS=1", "num_warps=1")
    assert done.exit_code == 3, done.output
    assert "single_block BLOCK_SIZE=256 ROWS=1 num_warps=1" in done.output
    assert "registers" in done.output
    assert "state          compiles" in done.output
    assert done.output.splitlines()[-2:] == [
        "Compiled for sm_90, neither verified nor timed.",
        f"Its values on the CPU, in a checkout: {CPU_CHECK} forward_single_block",
    ]


@pytest.mark.compiler
def test_wrong_file_that_compiles_is_not_said_to_be_ok_without_a_gpu(tmp_path):
    """It was `"state": "ok"` and exit code 0, though its values are wrong."""
    path = tmp_path / "forward_mine.py.jinja"
    text = (TEMPLATES / "forward_two_pass.py.jinja").read_text()
    assert "rsqrt(" in text
    path.write_text(text.replace("rsqrt(", "sqrt("))
    done = run("rms_norm.forward", str(path), "CHUNK=1024", "--json")
    assert done.exit_code == 3
    found = json.loads(done.stdout)
    assert (found["state"], found["verified"], found["timed"]) == ("compiles", False, False)
    assert f"{CPU_CHECK} forward_mine" in done.stderr


@pytest.mark.parametrize("file", ["CONTRIBUTING.md", "templates/README.md"])
def test_recipes_name_the_check_of_values_without_a_gpu(file):
    text = (REPOSITORY / file).read_text(encoding="utf-8")
    assert f"`.venv/bin/{CPU_CHECK} <direction>_<family>`" in text
    path = re.search(r"tests/\S+\.py", CPU_CHECK)[0]
    assert (REPOSITORY / path).is_file()


@pytest.mark.compiler
def test_long_values_go_on_below_their_beginning_in_a_terminal(monkeypatch):
    monkeypatch.setattr(cli, "console_for", lambda *_: Console(force_terminal=True, width=60))
    lines = run("rms_norm.backward", "persistent_partials").output.splitlines()
    assert max(len(line) for line in lines if line.startswith(" ")) <= 60  # the others hold a command, to be copied
    start = next(i for i, line in enumerate(lines) if line.startswith("  config         persistent_partials"))
    assert lines[start + 1].startswith(" " * 17)


@pytest.mark.compiler
def test_command_ends_with_1_where_the_config_is_wrong():
    done = run("rms_norm.forward", "single_block", "BLOCK_SIZE=128", "--json")
    assert done.exit_code == 1
    found = json.loads(done.output)
    assert (found["state"], found["verified"]) == ("compile", False)
    assert "narrower than the row" in found["reason"]
    assert found["outside_of_the_search_space"] == "single_block: BLOCK_SIZE is 128, but may be 256"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("rms_norm", "two_pass"), "'rms_norm' is none of rms_norm.forward, rms_norm.backward, add_rms_norm.forward"),
        (("layer_norm.forward", "two_pass"), "'layer_norm.forward' is none of"),
        (("rms_norm.forward", "flash"), "no forward family 'flash'"),
        (("rms_norm.forward", "two_pass", "CHUNK"), "no NAME=VALUE"),
        (("rms_norm.forward", "x.py.jinja"), "no template file"),
        (("rms_norm.forward", "two_pass", "CHUNK=1024", "CHUNK=2048"), "CHUNK is given twice, as 1024 and 2048"),
        (("rms_norm.forward", "two_pass", "--weight-dtype", "none", "--offset"), "leaves nothing for --offset"),
    ],
)
def test_bad_input_is_refused_in_one_line(arguments, words):
    done = run(*arguments)
    assert done.exit_code == 2
    assert words in " ".join(done.output.split())
    assert "Traceback" not in done.output
