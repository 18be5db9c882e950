"""Search space files: mistakes name their line, the shipped space holds what it must, hostile configs are refused."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import itertools
import os
import random
import re
from collections import defaultdict
from pathlib import Path

import pytest
import yaml

from tunegen import entries, paths
from tunegen import space as space_module
from tunegen.errors import SearchSpaceError, TunegenError
from tunegen.expressions import Rule
from tunegen.installed import triton_version
from tunegen.model import Config, Problem, Silicon
from tunegen.ops import OPS
from tunegen.space import SearchSpace, load_space

H200 = Silicon("NVIDIA H200", 90, 132, 62914560, 3201000, 6144, 232448)
A100 = Silicon("NVIDIA A100", 80, 108, 41943040, 1215000, 5120, 166912)
RTX4090 = Silicon("NVIDIA GeForce RTX 4090", 89, 128, 75497472, 10501000, 384, 101376)
B200 = Silicon("NVIDIA B200", 100, 148, 132120576, 3996000, 8192, 232448)
SLICE = Silicon("NVIDIA A100 MIG 1g.5gb", 80, 14, 5242880, 1215000, 640, 166912)
ROWS = (1, 64, 1024, 4096, 16384)
WIDTHS = (128, 1024, 2560, 4096, 5120, 8192, 16384, 65536)


def forward(hidden: int, rows: int, **others: object) -> Problem:
    return Problem("rms_norm", "forward", hidden, rows, **others)  # type: ignore[arg-type]


def backward(hidden: int, rows: int, weight_grad: bool = True, **others: object) -> Problem:
    return Problem("rms_norm", "backward", hidden, rows, weight_grad=weight_grad, **others)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def space() -> SearchSpace:
    return load_space("rms_norm")


@pytest.fixture(scope="module", params=OPS)
def any_space(request: pytest.FixtureRequest) -> SearchSpace:
    """Of every op: what expressions see of a problem is the same."""
    return load_space(request.param)


# A small file of its own, so that the tests below do not depend on the shipped one. {Lines are counted from 1.}
GOOD = """\
forward:
  tile:
    about: rows in registers
    when: "N <= 4096"
    parameters:
      BLOCK_SIZE: "=next_power_of_2(N)"
      ROWS: [1, 2, 4]
      RSTD: [saved, recomputed]
      num_warps: [1, 8]
    constraints:
      - ROWS * BLOCK_SIZE <= 8192
  split:
    about: parts of a row
    baseline: true
    parameters:
      num_warps: "=max(BLOCK_SIZE // 512, 1)"
      BLOCK_SIZE: "=next_power_of_2(cdiv(N, SPLITS))"
      SPLITS: [2, 4]
      DEPTH: 3
  parts:
    about: parts of a row, dispatched
    parameters:
      SPLITS: [2, 4]
      BLOCK_SIZE: "=next_power_of_2(cdiv(N, SPLITS))"
defaults:
  forward:
    sm90:
      - {when: "M > 64", family: tile, ROWS: 2, RSTD: saved, num_warps: "=8 if BLOCK_SIZE > 1024 else 1"}
    any:
      - {family: tile, ROWS: 4, RSTD: saved, num_warps: 8}
      - {family: tile, ROWS: 1, RSTD: saved, num_warps: 8}
      - {family: parts, SPLITS: 4}
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "tile.yaml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def small(tmp_path: Path) -> SearchSpace:
    return load_space("tile", write(tmp_path, GOOD))


def test_candidates_choices_and_size(small: SearchSpace) -> None:
    problem = forward(3000, 64)
    found = small.candidates(problem, H200, "tile")
    assert [(c["ROWS"], c["RSTD"], c["num_warps"]) for c in found] == list(
        itertools.product((1, 2), ("saved", "recomputed"), (1, 8))
    )
    assert {c["BLOCK_SIZE"] for c in found} == {4096}
    assert small.product_size(problem, H200, "tile") == 12
    assert small.choices(problem, H200, "tile") == {
        "ROWS": [1, 2, 4],
        "RSTD": ["saved", "recomputed"],
        "num_warps": [1, 8],
        "BLOCK_SIZE": [4096],
    }


def test_where_a_family_does_not_apply_it_has_nothing(small: SearchSpace) -> None:
    problem = forward(4097, 64)
    assert [f.name for f in small.families(problem, H200)] == ["split", "parts"]
    assert [f.name for f in small.families(forward(4096, 64), H200)] == ["tile", "split", "parts"]
    assert small.families(backward(64, 64), H200) == []
    assert small.candidates(problem, H200, "tile") == []
    assert small.product_size(problem, H200, "tile") == 0
    assert small.choices(problem, H200, "tile") == {}


def test_parameters_computed_from_others(small: SearchSpace) -> None:
    problem = forward(5120, 8)
    assert [c.parameters for c in small.candidates(problem, H200, "split")] == [
        (("BLOCK_SIZE", 4096), ("DEPTH", 3), ("SPLITS", 2), ("num_warps", 8)),
        (("BLOCK_SIZE", 2048), ("DEPTH", 3), ("SPLITS", 4), ("num_warps", 4)),
    ]
    assert small.choices(problem, H200, "split") == {"SPLITS": [2, 4], "DEPTH": [3]}
    assert small.product_size(problem, H200, "split") == 2


def test_chosen_narrows_and_recomputes(small: SearchSpace) -> None:
    winner = small.candidates(forward(3000, 64), H200, "tile", {"ROWS": 2, "RSTD": "saved", "num_warps": 8})
    assert [c["BLOCK_SIZE"] for c in winner] == [4096]
    carried = small.candidates(forward(1000, 64), H200, "tile", dict(winner[0].parameters))
    assert [c.label() for c in carried] == ["tile BLOCK_SIZE=1024 ROWS=2 RSTD=saved num_warps=8"]
    assert small.candidates(forward(3000, 64), H200, "tile", {"ROWS": 4}) == []
    assert len(small.candidates(forward(3000, 64), H200, "tile", {"ROWS": 1})) == 4


def test_family_records(small: SearchSpace) -> None:
    family = small.family("forward", "split")
    assert family is not None
    assert (family.template, family.about, family.baseline) == ("forward_split", "parts of a row", True)
    tile = small.family("forward", "tile")
    assert tile is not None
    assert not tile.baseline
    assert small.family("backward", "tile") is None
    for ask in (small.candidates, small.choices, small.product_size):
        with pytest.raises(SearchSpaceError, match=r"no forward family 'tiles'; there is tile, split, parts"):
            ask(forward(64, 1), H200, "tiles")


def test_default_takes_the_first_that_is_valid(small: SearchSpace) -> None:
    def label(problem: Problem, silicon: Silicon) -> str:
        config = small.default(problem, silicon)
        assert config is not None
        return config.label()

    assert label(forward(2048, 65), H200) == "tile BLOCK_SIZE=2048 ROWS=2 RSTD=saved num_warps=8"
    assert label(forward(512, 65), H200) == "tile BLOCK_SIZE=512 ROWS=2 RSTD=saved num_warps=1"
    assert label(forward(2048, 64), H200) == "tile BLOCK_SIZE=2048 ROWS=4 RSTD=saved num_warps=8"  # sm90's `when` fails
    assert label(forward(2048, 65), A100) == "tile BLOCK_SIZE=2048 ROWS=4 RSTD=saved num_warps=8"  # not sm90
    assert label(forward(4096, 65), A100) == "tile BLOCK_SIZE=4096 ROWS=1 RSTD=saved num_warps=8"  # a constraint fails
    assert label(forward(8192, 65), A100) == "parts BLOCK_SIZE=2048 SPLITS=4"  # the family's `when` fails
    assert small.default(backward(64, 1), H200) is None


MISTAKES = [
    # (text in GOOD, what stands there instead, line, key, what the message says)
    ("about: rows in registers", "abuot: rows", 3, "forward.tile.abuot", "unknown key; allowed: about, when, baseline"),
    ("    about: rows in registers\n", "", 2, "forward.tile", "lacks the key about"),
    ("about: rows in registers", "about: [rows]", 3, "forward.tile.about", "must be one line for people"),
    ("ROWS: [1, 2, 4]", "ROWS: []", 7, "forward.tile.parameters.ROWS", "list of at least one item"),
    ("ROWS: [1, 2, 4]", "ROWS: [1, 2, 2]", 7, "forward.tile.parameters.ROWS[2]", "2 stands twice"),
    ("ROWS: [1, 2, 4]", "ROWS: [1, two]", 7, "forward.tile.parameters.ROWS[1]", "values of another kind"),
    ("ROWS: [1, 2, 4]", "ROWS: [1, 2.5]", 7, "forward.tile.parameters.ROWS[1]", "must be a whole number, a word"),
    ("ROWS: [1, 2, 4]", "ROWS: [true, false]", 7, "forward.tile.parameters.ROWS[0]", "must be a whole number, a word"),
    ("ROWS: [1, 2, 4]", "ROWS: [-1]", 7, "forward.tile.parameters.ROWS[0]", "below 1000000000"),
    ("ROWS: [1, 2, 4]", "ROWS: [0x10]", 7, "forward.tile.parameters.ROWS[0]", "not '0x10'"),
    ("ROWS: [1, 2, 4]", "ROWS: [99999999999]", 7, "forward.tile.parameters.ROWS[0]", "below 1000000000"),
    ("ROWS: [1, 2, 4]", "ROWS: ['{{ x }}']", 7, "forward.tile.parameters.ROWS[0]", "a word in lower case"),
    ("ROWS: [1, 2, 4]", "ROWS:", 7, "forward.tile.parameters.ROWS", "must be a whole number, a word"),
    ("ROWS: [1, 2, 4]", "ROWS: {a: 1}", 7, "forward.tile.parameters.ROWS", "must be a list"),
    ("ROWS: [1, 2, 4]", "ROWS: ['=N']", 7, "forward.tile.parameters.ROWS[0]", "must be a whole number, a word"),
    (
        "ROWS: [1, 2, 4]",
        "rows: [1, 2, 4]",
        7,
        "forward.tile.parameters.rows",
        "an upper-case name, num_warps, num_ctas",
    ),
    ("ROWS: [1, 2, 4]", "N: [1, 2, 4]", 7, "forward.tile.parameters.N", "is the name of something else"),
    ("ROWS: [1, 2, 4]", "BLOCK_SIZE: 1", 7, "forward.tile.parameters.BLOCK_SIZE", "stands twice, first in line 6"),
    ("=next_power_of_2(N)", "=next_pow(N)", 6, "forward.tile.parameters.BLOCK_SIZE", "unknown function"),
    ("=next_power_of_2(N)", "=K", 6, "forward.tile.parameters.BLOCK_SIZE", "unknown name K in 'K'; known: BLOCK_SIZE"),
    ("=next_power_of_2(N)", "=BLOCK_SIZE", 6, "forward.tile.parameters.BLOCK_SIZE", "is computed from itself"),
    ('when: "N <= 4096"', 'when: "ROWS <= 4"', 4, "forward.tile.when", "unknown name ROWS in 'ROWS <= 4'; known: CAPA"),
    ('when: "N <= 4096"', "when: 4096", 4, "forward.tile.when", "must be an expression, not '4096'"),
    ('when: "N <= 4096"', 'when: "N.x"', 4, "forward.tile.when", "no Attribute is allowed in 'N.x'"),
    ("- ROWS * BLOCK_SIZE <= 8192", "- ROWS * <= 8192", 11, "forward.tile.constraints[0]", "is no expression"),
    ("- ROWS * BLOCK_SIZE <= 8192", "- ROWS <= 8\n      - SIZE > 1", 12, "forward.tile.constraints[1]", "name SIZE"),
    (
        "constraints:\n      - ROWS * BLOCK_SIZE <= 8192",
        "constraints: ROWS",
        10,
        "forward.tile.constraints",
        "be a list",
    ),
    ("num_warps: [1, 8]", "num_ctas: [3]", 9, "forward.tile.parameters.num_ctas[0]", "one of 1, 2, 4, 8 (a power"),
    ("num_warps: [1, 8]", "num_ctas: many", 9, "forward.tile.parameters.num_ctas", "one of 1, 2, 4, 8 (a power"),
    ("num_warps: [1, 8]", 'num_ctas: "=3"', 9, "forward.tile.parameters.num_ctas", "one of 1, 2, 4, 8 (a power"),
    ("num_warps: [1, 8]", 'num_warps: "=3"', 9, "forward.tile.parameters.num_warps", "one of 1, 2, 4, 8, 16, 32 (a"),
    ("num_warps: [1, 8]", "num_warps: \"='4'\"", 9, "forward.tile.parameters.num_warps", "not '4'"),
    (
        'num_warps: "=8 if BLOCK_SIZE > 1024 else 1"',
        'num_warps: "=5"',
        28,
        "defaults.forward.sm90[0].num_warps",
        "not 5",
    ),
    ("baseline: true", "baseline: 1", 14, "forward.split.baseline", "must be true or false, not '1'"),
    ("baseline: true", "baseline: yes", 14, "forward.split.baseline", "must be true or false, not 'yes'"),
    ("  split:", "  tile:", 12, "forward.tile", "stands twice, first in line 2"),
    ("  split:", "  Split:", 12, "forward.Split", "unknown key; allowed: a lower-case name"),
    ("forward:\n  tile", "fwd:\n  tile", 1, "fwd", "unknown key; allowed: forward, backward, defaults"),
    ("    sm90:", "    h100:", 27, "defaults.forward.h100", "unknown key; allowed: any, sm"),
    ("family: tile, ROWS: 2", "family: tlie, ROWS: 2", 28, "defaults.forward.sm90[0].family", "no family of forward"),
    ("family: tile, ROWS: 2", "family: 5, ROWS: 2", 28, "defaults.forward.sm90[0].family", "the name of a family"),
    ("family: tile, ROWS: 2", "ROWS: 2", 28, "defaults.forward.sm90[0]", "lacks the key family"),
    ("family: tile, ROWS: 2", "family: tile", 28, "defaults.forward.sm90[0]", "tile needs one value of ROWS: 1, 2, 4"),
    ("family: tile, ROWS: 2", "family: tile, ROWS: 3", 28, "defaults.forward.sm90[0].ROWS", "3 is no choice of tile"),
    ("family: tile, ROWS: 2", "family: tile, ROWS: [1, 2]", 28, "defaults.forward.sm90[0]", "needs one value of ROWS"),
    (
        "RSTD: saved, num_warps: 8}",
        "RSTD: kept, num_warps: 8}",
        30,
        "defaults.forward.any[0].RSTD",
        "kept is no choice",
    ),
    (
        "family: tile, ROWS: 2",
        "family: tile, TILES: 2",
        28,
        "defaults.forward.sm90[0].TILES",
        "is no parameter of tile",
    ),
    ('when: "M > 64"', 'when: "ROWS > 64"', 28, "defaults.forward.sm90[0].when", "unknown name ROWS"),
    ("BLOCK_SIZE > 1024", "SPLITS > 1024", 28, "defaults.forward.sm90[0].num_warps", "unknown name SPLITS"),
    ("family: parts, SPLITS: 4", "family: split, SPLITS: 4", 32, "defaults.forward.any[2].family", "may be dispatched"),
    ("  forward:\n    sm90", "  backward:\n    sm90", 28, "defaults.backward.sm90[0].family", "no family of backward"),
]


def test_a_list_without_end_is_refused_at_once(tmp_path: Path) -> None:
    """Each choice is looked for among the others: half a million would take hours."""
    path = write(tmp_path, GOOD.replace("ROWS: [1, 2, 4]", f"ROWS: {list(range(500_000))}", 1))
    with pytest.raises(SearchSpaceError, match=r"ROWS: has 500000 choices, at most 1000 are tried"):
        load_space("tile", path)


@pytest.mark.parametrize(("old", "new", "line", "key", "says"), MISTAKES)
def test_a_mistake_is_named_with_its_line_and_key(
    tmp_path: Path, old: str, new: str, line: int, key: str, says: str
) -> None:
    assert old in GOOD
    path = write(tmp_path, GOOD.replace(old, new, 1))
    with pytest.raises(SearchSpaceError) as caught:
        load_space("tile", path)
    message = str(caught.value)
    assert says in message
    assert "\n" not in message
    if says != "is computed from itself":
        assert message.startswith(f"{path}:{line}: {key}: ")
    else:
        assert f"{path}:{line}: {key}" in message


@pytest.mark.parametrize("value", ["3", "0", "64", "-4", "0x8", "4.0", "true", "many", "'4'"])
@pytest.mark.parametrize(
    ("old", "new", "line", "key"),
    [
        ("num_warps: [1, 8]", "num_warps: [1, {}]", 9, "forward.tile.parameters.num_warps[1]"),
        ("num_warps: [1, 8]", "num_warps: {}", 9, "forward.tile.parameters.num_warps"),
        ("num_warps: 8}}", "num_warps: {}}}", 30, "defaults.forward.any[0].num_warps"),
    ],
    ids=["list", "one", "default"],
)
def test_warps_that_cannot_be_launched_are_refused(
    tmp_path: Path, old: str, new: str, line: int, key: str, value: str
) -> None:
    assert old.format() in GOOD
    path = write(tmp_path, GOOD.replace(old.format(), new.format(value), 1))
    with pytest.raises(SearchSpaceError) as caught:
        load_space("tile", path)
    limit = "must be one of 1, 2, 4, 8, 16, 32 (a power of two; a block has at most 32 warps)"
    assert str(caught.value) == f"{path}:{line}: {key}: {limit}, not '{value.strip(chr(39))}'"


def test_computed_warps_that_cannot_be_launched_are_no_candidates(tmp_path: Path) -> None:
    text = GOOD.replace("=max(BLOCK_SIZE // 512, 1)", "=cdiv(N, 512) // SPLITS", 1)
    space = load_space("tile", write(tmp_path, text))
    warps = {
        n: [c["num_warps"] for c in space.candidates(forward(n, 1), H200, "split")] for n in (512, 2048, 3072, 65536)
    }
    assert warps == {512: [], 2048: [2, 1], 3072: [1], 65536: [32]}
    three = Config.of("split", {"SPLITS": 2, "DEPTH": 3, "BLOCK_SIZE": 2048, "num_warps": 3})
    assert space.check(forward(3072, 1), H200, three) == "split needs num_warps in [1, 2, 4, 8, 16, 32]"


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("", 1, "must hold keys and values"),
        ("- forward", 1, "must hold keys and values"),
        ("forward:\n  tile: [", 2, "no YAML"),
        ("forward:\n\ttile: 1", 2, "no YAML"),
        ("forward: *nowhere", 1, "no YAML"),
        ("forward:", 1, "forward: must hold keys and values"),
        ("? [a, b]\n: 1", 1, "unknown key"),
        ("forward:\n  <<: {a: 1}", 2, "unknown key"),
        ("forward: !!python/object/apply:os.system ['true']", 1, "must hold keys and values"),
    ],
)
def test_a_file_of_another_form_is_refused(tmp_path: Path, text: str, line: int, says: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(SearchSpaceError, match=re.escape(says)) as caught:
        load_space("tile", path)
    assert str(caught.value).startswith(f"{path}:{line}: ")
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(SearchSpaceError, match=r"no_such_op\.yaml: cannot be read"):
        load_space("no_such_op")
    path = tmp_path / "latin.yaml"
    path.write_bytes(b"about: \xff")
    with pytest.raises(SearchSpaceError, match=r"latin\.yaml: cannot be read"):
        load_space("latin", path)


def test_an_expression_that_fails_in_use_names_its_line(tmp_path: Path) -> None:
    space = load_space("tile", write(tmp_path, GOOD.replace("- ROWS * BLOCK_SIZE <= 8192", "- ROWS / (N - 64) > 0", 1)))
    assert space.candidates(forward(128, 1), H200, "tile")
    with pytest.raises(SearchSpaceError, match=r"tile\.yaml:11: forward\.tile\.constraints\[0\]: .*N=64.*by zero"):
        space.candidates(forward(64, 1), H200, "tile")
    space = load_space("tile", write(tmp_path, GOOD.replace("=next_power_of_2(N)", "=N / 2", 1) + "\n"))
    with pytest.raises(SearchSpaceError, match=r"tile\.yaml:6: .*gives 50\.0, but a parameter is a whole number"):
        space.candidates(forward(100, 1), H200, "tile")


def test_the_file_is_read_once_and_again_when_it_changes(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    first = load_space("tile", path)
    assert load_space("tile", path) is first
    write(tmp_path, GOOD.replace("[1, 2, 4]", "[1, 2]").replace("ROWS: 4", "ROWS: 2"))
    os.utime(path, ns=(1, 1))
    assert load_space("tile", path).choices(forward(64, 1), H200, "tile")["ROWS"] == [1, 2]


def test_triton_is_a_number_in_expressions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    space = load_space("tile", write(tmp_path, GOOD.replace("N <= 4096", "TRITON >= 308 and CAPABILITY >= 90", 1)))
    monkeypatch.setattr(space_module, "triton_version", lambda: 308)
    assert space.candidates(forward(64, 1), H200, "tile")
    assert not space.candidates(forward(64, 1), A100, "tile")
    monkeypatch.setattr(space_module, "triton_version", lambda: 307)
    assert not space.candidates(forward(64, 1), H200, "tile")


@pytest.mark.parametrize(("installed", "number"), [("3.6.0", 306), ("3.10.1+git1234", 310), (None, 0)])
def test_triton_version(monkeypatch: pytest.MonkeyPatch, installed: str | None, number: int) -> None:
    def version(name: str) -> str:
        assert name == "triton"
        if installed is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(importlib.metadata, "version", version)
    triton_version.cache_clear()
    try:
        assert triton_version() == number
    finally:
        triton_version.cache_clear()


@pytest.mark.parametrize("op", OPS)
def test_the_loader_in_c_finds_the_tree_and_lines_of_the_other(op: str) -> None:
    text = (paths.resource("search_spaces") / f"{op}.yaml").read_text()

    def told(node: yaml.Node) -> object:
        parts = node.value
        if isinstance(node, yaml.MappingNode):
            parts = [(told(key), told(value)) for key, value in node.value]
        elif isinstance(node, yaml.SequenceNode):
            parts = [told(item) for item in node.value]
        return node.tag, node.start_mark.line, parts

    assert told(yaml.compose(text, Loader=entries.IN_C)) == told(yaml.compose(text, Loader=yaml.SafeLoader))


# The shipped space.


def test_trap_block_size_below_hidden_is_rejected(space: SearchSpace) -> None:
    """The article's autotune list, keyed by N = 4096: three of its five configs read only a part of each row."""
    verdicts = {}
    for block, warps in ((512, 4), (1024, 4), (2048, 8), (4096, 8), (8192, 16)):
        config = Config.of("single_block", {"BLOCK_SIZE": block, "ROWS": 1, "num_warps": warps})
        verdicts[block] = space.check(forward(4096, 16384), H200, config)
    assert verdicts.pop(4096) is None
    for block, verdict in verdicts.items():
        assert verdict == f"single_block: BLOCK_SIZE is {block}, but may be 4096"
    for family in space.members.values():  # and were BLOCK_SIZE ever a list, the constraint would still reject it
        if "BLOCK_SIZE" in family.parameters:
            texts = {rule.expression.text for rule in family.constraints}
            splits = family.parameters.get("SPLITS")
            computed = isinstance(splits, Rule) and splits.expression.text == "cdiv(N, BLOCK_SIZE)"
            assert computed or texts & {"BLOCK_SIZE >= N", "SPLITS * BLOCK_SIZE >= N"}


KNOWN_GOOD = [  # measured on H200: rows, hidden, then ROWS, num_warps, PROGRAMS_PER_SM, STAGES
    (16384, 4096, 2, 8, 1, 3),
    (8192, 5120, 1, 8, 1, 4),
    (16384, 2048, 1, 4, 2, 4),
    (32768, 1024, 4, 4, 2, 3),
    (131072, 128, 8, 1, 4, 4),
    (524288, 128, 16, 2, 4, 3),
    (16384, 2560, 1, 8, 2, 4),
    (8192, 7168, 1, 8, 1, 3),
    (8192, 8192, 1, 8, 1, 3),
    (4096, 12288, 1, 16, 1, 3),
]


@pytest.mark.parametrize(("rows", "hidden", "tile", "warps", "programs", "stages"), KNOWN_GOOD)
def test_known_good_backward_is_in_the_space(
    space: SearchSpace, rows: int, hidden: int, tile: int, warps: int, programs: int, stages: int
) -> None:
    problem = backward(hidden, rows)
    chosen = {"ROWS": tile, "num_warps": warps, "PROGRAMS_PER_SM": programs, "STAGES": stages}
    for family in ("persistent_partials", "persistent_atomic"):
        found = space.candidates(problem, H200, family, chosen)
        assert {c["RSTD"] for c in found} >= {"saved"}


# measured on H200: .90 of an addition of the same bytes at 1024x65536
@pytest.mark.parametrize(("rows", "hidden"), [(2048, 32768), (1024, 65536), (512, 131072)])
def test_known_good_backward_of_wide_rows_is_in_the_space(space: SearchSpace, rows: int, hidden: int) -> None:
    problem = backward(hidden, rows)
    chosen = {"BLOCK_SIZE": 2048, "STAGES": 4, "PROGRAMS_PER_SM": 6, "num_warps": 2}
    found = space.candidates(problem, H200, "split_row_meet", chosen)
    assert {c["PDL"] for c in found} == {"late", "early"}
    default = space.default(problem, H200)
    assert default is not None
    assert default.family == "split_row_meet"


@pytest.mark.parametrize(
    ("op", "dtype", "widest"),
    [("rms_norm", "bf16", 262144), ("rms_norm", "fp32", 131072), ("add_rms_norm", "bf16", 131072)],
)
def test_wide_backward_without_atomics_by_default(op: str, dtype: str, widest: int) -> None:
    """As README.md says under Policies: from 257 rows on, wider than what one program holds."""

    def answer(hidden: int, rows: int) -> str | None:
        wide = dataclasses.replace(backward(hidden, rows), op=op, x_dtype=dtype, policy="deterministic")
        default = load_space(op).default(wide, H200)
        return default.family if default else None

    for hidden in (32769, 49152, 65536, 100000, 131072, widest):
        assert {answer(hidden, rows) for rows in (257, 4096)} == {"split_row_meet"}, hidden
    assert answer(widest + 1, 4096) is None
    assert answer(32769, 128) is None


@pytest.mark.parametrize(
    ("rows", "hidden"), [(16, 4096), (64, 4096), (256, 8192), (1024, 4096), (64, 2048), (8, 14336)]
)
def test_few_rows_take_one_launch_by_default(rows: int, hidden: int) -> None:
    """2.0 us at 16x4096 (H200), where the best two launches take 3.5; 6.6 at 256x8192 and 10.2."""
    for op in ("rms_norm", "add_rms_norm"):
        problem = dataclasses.replace(backward(hidden, rows), op=op)
        default = load_space(op).default(problem, H200)
        assert default is not None
        assert default.family == "side_by_side"


def test_forward_of_wide_rows_by_default(space: SearchSpace) -> None:
    """Of a copy: .98 at 4096x16384 (H200), .96 at 2048x32768; .94 at 1024x65536, where two passes reach .83."""
    wide = [(4096, 16384, "two_pass"), (2048, 32768, "two_pass"), (1024, 65536, "split_row_meet")]
    for rows, hidden, family in wide:
        default = space.default(forward(hidden, rows), H200)
        assert default is not None
        assert default.family == family


def test_knobs_that_matter_are_searched_at_4096(space: SearchSpace) -> None:
    for family in ("persistent_partials", "persistent_atomic"):
        found = space.candidates(backward(4096, 16384), H200, family)
        points = {(c["ROWS"], c["num_warps"], c["STAGES"], c["PROGRAMS_PER_SM"]) for c in found}
        wanted = set(itertools.product((1, 2), (4, 8, 16), (1, 3, 4), (1, 2)))
        # One row, no prefetch, one program: 16 KB in flight, two thirds of what an H200 needs.
        lacking = {(1, warps, 1, 1) for warps in (4, 8, 16)}
        # Two rows without prefetch came nowhere near the best: .5 of a copy where prefetch reaches .9.
        lacking |= {(2, warps, 1, programs) for warps in (4, 8, 16) for programs in (1, 2)}
        assert wanted - points == lacking
        assert {c["PDL"] for c in found} == {"late", "early"}
        assert {c["RSTD"] for c in found} == {"saved", "recomputed"}


def problems(hidden: int, rows: int) -> list[Problem]:
    return [forward(hidden, rows), backward(hidden, rows), backward(hidden, rows, weight_grad=False)]


OF_BOTH_OPS = {
    *("backward_dx_only", "backward_persistent_atomic", "backward_persistent_partials"),
    *("forward_persistent", "forward_single_block", "forward_two_pass"),
}
"""Templates of 16384x4096 whatever the op; one more is welcome, with candidates in the same limits."""
COUNTED_AT_4096 = {
    *("backward_persistent_atomic", "backward_persistent_partials", "backward_side_by_side", "backward_single_block"),
    *("backward_split_row_atomic", "forward_persistent", "forward_single_block", "forward_split_row_atomic"),
    *("forward_split_row_partials", "forward_two_pass"),
}
"""Those of `rms_norm` that are tried at any number of rows of 4096, where dw is wanted."""


def test_sizes_at_4096(space: SearchSpace) -> None:
    """Every one is compiled on two cores in under three minutes, hence the limits."""
    at_16384 = {}
    for problem in problems(4096, 16384):
        for family in space.families(problem, H200):
            at_16384[family.template] = len(space.candidates(problem, H200, family.name))
    assert {name: n for name, n in at_16384.items() if not 5 <= n <= 60} == {}
    assert OF_BOTH_OPS | {"backward_single_block"} <= at_16384.keys()
    distinct = defaultdict(set)
    for rows, direction in itertools.product(ROWS, (forward, backward)):
        problem = direction(4096, rows)
        for family in space.families(problem, H200):
            distinct[family.template].update(space.candidates(problem, H200, family.name))
    assert {name: len(found) for name, found in distinct.items() if len(found) > 75} == {}
    assert 150 <= sum(len(distinct[name]) for name in COUNTED_AT_4096) <= 280


def test_sizes_at_4096_with_a_residual() -> None:
    space, at_16384 = load_space("add_rms_norm"), {}
    for problem in problems(4096, 16384):
        for family in space.families(problem, H200):
            at_16384[family.template] = len(space.candidates(problem, H200, family.name))
    assert {name: n for name, n in at_16384.items() if not 5 <= n <= 60} == {}
    assert at_16384.keys() >= OF_BOTH_OPS


def test_no_atomics_where_the_policy_forbids_them_with_a_residual() -> None:
    space = load_space("add_rms_norm")
    for hidden, rows in itertools.product((2048, 65536, 131072), (1, 4096)):
        for direction in (forward, backward):
            problem = direction(hidden, rows, policy="deterministic")
            assert [f.name for f in space.families(problem, H200) if "atomic" in f.name] == []
            default = space.default(problem, H200)
            assert default is None or "atomic" not in default.family


@pytest.mark.parametrize("hidden", WIDTHS)
def test_every_applicable_family_has_candidates_and_they_pass_the_check(any_space: SearchSpace, hidden: int) -> None:
    for rows in ROWS:
        for problem in problems(hidden, rows):
            for family in any_space.families(problem, H200):
                found = any_space.candidates(problem, H200, family.name)
                assert 1 <= len(found) <= 80, (problem.label(), family.name)
                assert len(set(found)) == len(found)
                assert found == any_space.candidates(problem, H200, family.name)
                assert {any_space.check(problem, H200, config) for config in found} == {None}


def widths() -> list[int]:
    edges = {max(1, (1 << e) + d) for e in range(16) for d in (-1, 0, 1)} | {5120, 7168, 12288, 14336, 20480, 24576}
    return sorted({n for n in edges if n <= 32768} | set(random.Random(0).choices(range(1, 32769), k=30)))


@pytest.mark.parametrize("silicon", [H200, A100, RTX4090, B200, SLICE], ids=lambda s: s.name)
@pytest.mark.parametrize("dtype", ["bf16", "fp32", "fp64"])
def test_defaults_exist_for_every_width_rows_and_flags(any_space: SearchSpace, silicon: Silicon, dtype: str) -> None:
    lacking = []
    for hidden, bits in itertools.product(widths(), (0, 3, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 17, 20, 23)):
        for problem in problems(hidden, 1 << bits):
            problem = dataclasses.replace(problem, x_dtype=dtype)
            config = any_space.default(problem, silicon)
            if config is None or any_space.check(problem, silicon, config) is not None:
                lacking.append((problem.label(), config))
    assert lacking == []


def test_without_a_weight_there_are_defaults_too(any_space: SearchSpace) -> None:
    for hidden, rows in itertools.product((1, 128, 4096, 32768), ROWS):
        assert any_space.default(forward(hidden, rows, weight_dtype=None), H200) is not None
        config = any_space.default(backward(hidden, rows, weight_grad=False, weight_dtype=None), H200)
        assert config is not None
        assert config.family == "dx_only"


def test_wide_rows_have_the_defaults_that_exist(any_space: SearchSpace) -> None:
    for hidden, rows in itertools.product((32769, 65536, 131072, 524288), ROWS):
        wide = any_space.default(forward(hidden, rows), A100)
        assert wide is not None
        assert wide.family == "two_pass"
        assert any_space.default(forward(hidden, rows), H200) is not None
        split = any_space.default(backward(hidden, rows), A100)
        assert split is not None
        assert split.family == "split_row_atomic"
    assert any_space.default(forward(3_000_000, 16), RTX4090) is not None
    assert any_space.default(backward(524289, 16), H200) is None
    assert any_space.default(backward(32769, 16, weight_grad=False), H200) is None


def test_no_atomics_where_the_policy_forbids_them(space: SearchSpace) -> None:
    for hidden, rows, policy in itertools.product((2048, 65536, 131072), (1, 4096), ("deterministic", "invariant")):
        for direction in (forward, backward):
            problem = direction(hidden, rows, policy=policy)
            assert [f.name for f in space.families(problem, H200) if "atomic" in f.name] == []
            default = space.default(problem, H200)
            assert default is None or "atomic" not in default.family
    assert "split_row_partials" in [f.name for f in space.families(forward(2048, 1, policy="deterministic"), H200)]
    assert "split_row_atomic" in [f.name for f in space.families(forward(2048, 1), H200)]


def test_all_rows_of_a_bucket_have_one_space(any_space: SearchSpace) -> None:
    for rows in (1025, 1500, 2047):
        for make in (forward, backward):
            full, part = make(4096, 2048), make(4096, rows)
            assert any_space.default(part, H200) == any_space.default(full, H200)
            for family in any_space.families(full, H200):
                assert any_space.candidates(part, H200, family.name) == any_space.candidates(full, H200, family.name)


def test_both_persistent_backwards_have_the_same_constraints(any_space: SearchSpace) -> None:
    atomic, partials = (any_space.family("backward", f"persistent_{name}") for name in ("atomic", "partials"))
    assert atomic is not None
    assert partials is not None
    texts = [rule.expression.text for rule in partials.constraints]
    assert texts == [rule.expression.text for rule in atomic.constraints]


def test_shared_memory_limits_the_stages(space: SearchSpace) -> None:
    """At 16384 columns two buffers of x and dy take 131072 bytes; one buffer is a choice only where two do not fit."""
    for silicon, stages in ((H200, {1, 3, 4}), (RTX4090, {1, 2})):
        found = space.candidates(backward(16384, 16384), silicon, "persistent_partials")
        assert {c["STAGES"] for c in found} == stages


GOOD_POINT = {"BLOCK_SIZE": 4096, "ROWS": 1, "num_warps": 8}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"ROWS": 3}, "ROWS is 3, but may be 1, 2, 4, 8, 16"),
        ({"ROWS": "1"}, "ROWS is '1'"),
        ({"ROWS": True}, "ROWS is True"),
        ({"ROWS": 1.0}, "ROWS is 1.0"),
        ({"ROWS": None}, "ROWS is a NoneType"),
        ({"ROWS": [1]}, "ROWS is a list"),
        ({"ROWS": {"a": 1}}, "ROWS is a dict"),
        ({"ROWS": float("nan")}, "ROWS is nan"),
        ({"ROWS": 10**6000}, "ROWS is an integer of 19932 bits"),
        ({"ROWS": -1}, "ROWS is -1"),
        ({"ROWS": 0}, "ROWS is 0"),
        ({"ROWS": "x" * 100000}, "ROWS is 'xxxxxxxxxx"),
        ({"BLOCK_SIZE": 2**70}, "BLOCK_SIZE is an integer of 71 bits, but may be 4096"),
        ({"BLOCK_SIZE": "4096"}, "BLOCK_SIZE is '4096'"),
        ({"num_warps": 64}, "num_warps is 64"),
        ({"num_warps": 1}, "single_block needs ROWS * BLOCK_SIZE / (32 * num_warps) <= 64"),
        ({"num_stages": 3}, "single_block has no parameter 'num_stages'; it has ROWS, num_warps, BLOCK_SIZE"),
        ({5: 3}, "single_block has no parameter 5"),
        ({"N": 64}, "single_block has no parameter 'N'"),
    ],
)
def test_check_refuses_hostile_values(space: SearchSpace, changes: dict[str, object], says: str) -> None:
    problem = forward(4096, 16384)
    assert space.check(problem, H200, Config.of("single_block", GOOD_POINT)) is None  # type: ignore[arg-type]
    point = tuple({**GOOD_POINT, **changes}.items())
    verdict = space.check(problem, H200, Config("single_block", point))  # type: ignore[arg-type]
    assert verdict is not None
    assert says in verdict
    assert len(verdict) < 200
    assert "\n" not in verdict


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (Config("single_blok", ()), "no forward family is called 'single_blok'"),
        (Config("persistent_partials", ()), "no forward family is called 'persistent_partials'"),
        (Config(None, ()), "no forward family is called a NoneType"),  # type: ignore[arg-type]
        (Config(["single_block"], ()), "no forward family is called a list"),  # type: ignore[arg-type]
        (Config("single_block", ()), "single_block lacks its parameter ROWS"),
        (Config("single_block", (("ROWS", 1), ("ROWS", 2))), "a parameter is given twice"),
        (Config("single_block", (1, 2)), "no pairs of name and value"),  # type: ignore[arg-type]
        (Config("single_block", None), "no pairs of name and value"),  # type: ignore[arg-type]
        (Config("single_block", (([], 2),)), "no pairs of name and value"),  # type: ignore[arg-type]
        (Config.of("persistent", {"ROWS": 1}), "persistent is only for M >= 8 * SMS and 64 <= N <= 32768"),
    ],
)
def test_check_refuses_hostile_configs(space: SearchSpace, config: Config, says: str) -> None:
    verdict = space.check(forward(4096, 16), H200, config)
    assert verdict is not None
    assert says in verdict


def test_check_of_a_structural_word(space: SearchSpace) -> None:
    problem, good = backward(4096, 16384), {"BLOCK_SIZE": 4096, "RSTD": "saved", "num_warps": 8}
    assert space.check(problem, H200, Config.of("single_block", good)) is None  # type: ignore[arg-type]
    for word in ("kept", "", "saved\n", 0):
        verdict = space.check(problem, H200, Config.of("single_block", {**good, "RSTD": word}))  # type: ignore[arg-type]
        assert verdict == f"single_block: RSTD is {word!r}, but may be saved, recomputed"


def test_a_space_too_large_to_go_through_is_refused_at_once(tmp_path):
    many = ", ".join(map(str, range(1, 50)))
    lists = "\n".join(f"      P{i}: [{many}]" for i in range(6))
    whole = GOOD[: GOOD.index("defaults:")]
    path = write(tmp_path, whole.replace("      ROWS: [1, 2, 4]", f"      ROWS: [1, 2, 4]\n{lists}"))
    with pytest.raises(TunegenError, match=r"combinations of .* at most 1000000 are tried"):
        load_space("rms_norm", path).candidates(forward(64, 4), H200, "tile")


def test_deep_nesting_is_one_clear_error(tmp_path):
    with pytest.raises(SearchSpaceError, match="no YAML"):
        load_space("rms_norm", write(tmp_path, "forward: " + "[" * 3000 + "]" * 3000))


def test_clusters_are_for_gpus_that_have_them(tmp_path: Path) -> None:
    space = load_space("rms_norm", write(tmp_path, GOOD.replace("DEPTH: 3", "DEPTH: 3\n      num_ctas: [1, 2]")))
    for silicon, allowed in ((H200, {1, 2}), (A100, {1})):
        assert {c.num_ctas for c in space.candidates(forward(3072, 1), silicon, "split")} == allowed


def test_behind_the_default_of_a_gpu_stands_that_of_any(space: SearchSpace) -> None:
    """Where a kernel of wide rows does not compile or load, another algorithm answers before torch does."""
    problem = Problem("rms_norm", "backward", 65536, 1024, weight_grad=True)
    first, second = space.built_in(problem, H200)
    assert (first, first.family, second.family) == (space.default(problem, H200), "split_row_meet", "split_row_atomic")
    alike = Problem("rms_norm", "forward", 4096, 16384)
    assert [*space.built_in(alike, H200)] == [space.default(alike, H200)], "the same of both is given once"
