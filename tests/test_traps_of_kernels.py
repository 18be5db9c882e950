"""Every trap of the source that the project follows, each with a test named after it: traps of kernels and tuners."""

from __future__ import annotations

import ast
import shutil
from dataclasses import replace

import pytest
import torch
from helpers import places, same_bits
from kernel_cases import TEMPLATES, op_of, variants

from tunegen import paths
from tunegen.compile import compile_candidate
from tunegen.errors import CompileError
from tunegen.launch import Variant
from tunegen.model import Config, KernelSource, Problem
from tunegen.ops import OPS, op_spec
from tunegen.render import code_digest, render, write
from tunegen.silicon import of_arch
from tunegen.space import load_space
from tunegen.verify import Gate, variant_runner

H200 = of_arch("sm_90")
WIDTHS = (1, 17, 64, 128, 1000, 1024, 2560, 4096, 5120, 8192, 16384, 32768, 65536, 102400)
ROWS = (1, 64, 1024, 16384)

FORWARD = Problem("rms_norm", "forward", 4096, 5)
BACKWARD = replace(FORWARD, direction="backward", weight_grad=True)
SPACE, SPEC = load_space("rms_norm"), op_spec("rms_norm")
SPACES = {op: load_space(op) for op in OPS}
MEMBERS = [(op, direction, family) for op, space in SPACES.items() for direction, family in space.members]

place = places("interpreter", "cuda")


# Too few warps.


def elements_a_thread(config):
    width = config.numbers.get("BLOCK_SIZE") or config.numbers["CHUNK"]
    return config.numbers.get("ROWS", 1) * width / (32 * config.num_warps)


def problems(op):
    for rows in ROWS:
        for hidden in WIDTHS:
            for problem in (FORWARD, BACKWARD, replace(BACKWARD, weight_grad=False)):
                yield replace(problem, op=op, rows=rows, hidden=hidden)


@pytest.mark.parametrize("member", MEMBERS, ids="-".join)
def test_trap_too_few_warps(member):
    """A thread that holds more than 64 elements of a row spills; the default stays at 32, with a margin, where no sweep
    has chosen it."""
    op, *mine = member
    starved = []
    for silicon, most in ((of_arch("sm_80"), 32), (H200, 64)):
        for problem in problems(op):
            default = SPACES[op].default(problem, silicon)
            if (
                default is not None
                and [problem.direction, default.family] == mine
                and elements_a_thread(default) > most
            ):
                starved.append(f"{silicon.arch}, {problem.label()}: {default.label()}")
    assert starved == [], f"{' '.join(member)}: too few warps in its defaults"


@pytest.mark.compiler
def test_trap_too_few_warps_spill_in_no_default_of_a_sweep():
    """Those beyond that margin, compiled."""
    bold = {}
    for problem in (problem for op in SPACES for problem in problems(op)):
        default = SPACES[problem.op].default(problem, H200)
        if default is not None and elements_a_thread(default) > 32:
            bold[replace(problem, rows=0), default] = problem
    found = {
        p.label(): compile_candidate(op_spec(p.op), p, config, H200).spill_bytes for (_, config), p in bold.items()
    }
    assert set(found.values()) <= {0}, found
    assert found, "none is left: the margin holds everywhere"


@pytest.mark.parametrize("hidden", [4096, 16384, 32768])
@pytest.mark.parametrize("member", MEMBERS, ids="-".join)
def test_trap_too_few_warps_is_no_candidate(member, hidden):
    op, direction, family = member
    space = SPACES[op]
    mine = [problem for problem in problems(op) if (problem.direction, problem.hidden) == (direction, hidden)]
    found = {config for problem in mine for config in space.candidates(problem, H200, family)}
    starved = sorted(config.label() for config in found if elements_a_thread(config) > 64)
    assert starved == [], f"{direction} {family}: too few warps in its candidates"
    if space.family(direction, family) in (f for problem in mine for f in space.families(problem, H200)):
        assert found, f"{direction} {family} is offered at {hidden} and has no candidate"


@pytest.mark.parametrize("hidden", [4096, 16384, 32768])
def test_trap_too_few_warps_is_refused(hidden):
    starved = Config.of("single_block", {"BLOCK_SIZE": hidden, "ROWS": 1, "num_warps": 1})
    assert "num_warps" in (SPACE.check(replace(FORWARD, hidden=hidden), H200, starved) or "")


# Shared memory that overflows, known at compile time.

TOO_LARGE = Config.of("persistent", {"BLOCK_SIZE": 4096, "ROWS": 8, "STAGES": 4, "PROGRAMS_PER_SM": 1, "num_warps": 16})


@pytest.mark.compiler
def test_trap_shared_memory_overflow():
    """The message names the bytes and the limit; nothing waits for the launch to fail."""
    problem = replace(FORWARD, rows=16384)
    with pytest.raises(CompileError, match=r"\d{6} bytes of shared memory a program, sm_86 has 101376"):
        compile_candidate(SPEC, problem, TOO_LARGE, of_arch("sm_86"))


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90"])
def test_trap_shared_memory_overflow_is_no_candidate(arch):
    assert SPACE.check(replace(FORWARD, rows=16384), of_arch(arch), TOO_LARGE) is not None


# Addition that is not associative.


def offered(op, **others):
    """The templates of all families that some problem is offered."""
    found = {family for problem in problems(op) for family in SPACES[op].families(replace(problem, **others), H200)}
    return {f"{op}/{family.template}" for family in found}


@pytest.mark.parametrize("op", OPS)
def test_trap_addition_not_associative(op):
    """Whoever asks for determinism gets no atomics, forward or backward: their order changes the last bits."""
    atomic = {t for t in TEMPLATES if op_of(t) == op and "atomic_add" in rendered(t).text}
    assert atomic
    assert not atomic & offered(op, policy="deterministic")


@pytest.mark.parametrize("op", OPS)
def test_trap_addition_not_associative_is_not_thrown_out_with_the_bath(op):
    """The same problems do have the atomic families where determinism is not asked for."""
    assert {t for t in TEMPLATES if op_of(t) == op and t.endswith("atomic")} <= offered(op)


def rendered(template):
    """One rendering of `<op>/<direction>_<family>`."""
    op, _, name = template.partition("/")
    direction, family = name.split("_", 1)
    words = {"RSTD": "saved", "PDL": "off"} if direction == "backward" else {}
    problem = replace(FORWARD if direction == "forward" else BACKWARD, op=op)
    return render(op, name, op_spec(op).flags(problem, Config.of(family, words))[0])


@pytest.mark.gpu
@pytest.mark.parametrize(("problem", "family"), [(FORWARD, "split_row_partials"), (BACKWARD, "persistent_partials")])
def test_trap_addition_not_associative_on_the_gpu(problem, family):
    """Families without atomics add in a fixed order: 20 runs, the same bits."""
    problem, device = replace(problem, rows=64), torch.device("cuda", 0)
    variant = next(variants(problem, SPACE.candidates(problem, H200, family)[0], device, H200.sms))
    given = SPEC.inputs(problem, device, 0)
    found = [outputs_of(variant, problem, given) for _ in range(20)]
    for again in found[1:]:
        assert all(same_bits(again[name], found[0][name]) for name in again)


def outputs_of(variant, problem, given):
    written = {
        name: torch.zeros(shape.shape, dtype=given["x" if name != "dw" else "w"].dtype, device=variant.device)
        for name, shape in SPEC.tensors(problem).items()
        if name in ("y", "dx", "dw")
    }
    variant_runner(SPEC, variant)(problem, {**given, **written})
    return written


# A missing mask, or one that leaves open what is read behind it.


LOADS = ("tl.load", "gl.load")


@pytest.mark.parametrize("template", TEMPLATES)
def test_trap_missing_mask_with_other_0(template):
    """Every load has a mask and zeros for the rest; without, a GPU may read anything there, and the interpreter hides
    it. A copy into shared memory has a mask, and fills the rest with zeros itself."""
    tree = ast.parse(rendered(template).text)
    loads = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) in LOADS]
    assert loads
    for load in loads:
        keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in load.keywords}
        assert "mask" in keywords, ast.unparse(load)
        assert keywords.get("other") == ("0" if "words" in ast.unparse(load) else "0.0"), ast.unparse(load)
    copies = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and "copy_to" in ast.unparse(node.func)]
    assert all(ast.unparse(copy.args[2]) == "mask" for copy in copies)
    assert bool(copies) == template.endswith("_meet")


# A stale compile cache.


def test_trap_stale_compile_cache(tmp_path, monkeypatch):
    """Changed code has another digest and another file, so no cache answers for it. A changed comment has another file,
    and keeps its digest and with it its timings."""
    original = paths.resource("templates")
    edits = {
        "as it was": ("", ""),
        "code": ("1.0 / N", "1.0 / (N + 1)"),
        "comment": ("# [BLOCK_SIZE]", "# [columns of a block]"),
    }
    found = {}
    for name, (old, new) in edits.items():
        folder = tmp_path / name
        shutil.copytree(original, folder)
        template = folder / "rms_norm" / "forward_single_block.py.jinja"
        text = template.read_text()
        assert old in text
        template.write_text(text.replace(old, new))
        monkeypatch.setattr(paths, "resource", lambda _, folder=folder: folder)
        source = rendered("rms_norm/forward_single_block")
        found[name] = source.digest, write(source)
    digests, files = ({name: pair[i] for name, pair in found.items()} for i in (0, 1))
    assert digests["code"] != digests["as it was"]
    assert digests["comment"] == digests["as it was"]
    assert len(set(files.values())) == 3


def test_trap_stale_compile_cache_in_an_included_part(tmp_path, monkeypatch):
    """What a template includes is part of its code."""
    folder = tmp_path / "templates"
    shutil.copytree(paths.resource("templates"), folder)
    before = rendered("rms_norm/backward_persistent_partials").digest
    part = folder / "common" / "_backward_dx.py.jinja"
    part.write_text(part.read_text().replace("projection[:, None]", "(2 * projection[:, None])"))
    monkeypatch.setattr(paths, "resource", lambda _: folder)
    assert rendered("rms_norm/backward_persistent_partials").digest != before


# A block narrower than the row: the article's tuner, at N = 4096.

ARTICLE = ((512, 4), (1024, 4), (2048, 8), (4096, 8), (8192, 16))
NARROW = ARTICLE[:3]


def one_row(block, warps):
    return Config.of("single_block", {"BLOCK_SIZE": block, "ROWS": 1, "num_warps": warps})


@pytest.mark.parametrize(("block", "warps"), ARTICLE)
def test_trap_block_size_below_hidden(block, warps):
    """Our space allows the one block of the article's list that fits the row."""
    objection = SPACE.check(FORWARD, H200, one_row(block, warps))
    assert objection is None if block == 4096 else "BLOCK_SIZE" in objection


@pytest.mark.compiler
@pytest.mark.parametrize(("block", "warps"), NARROW)
def test_trap_block_size_below_hidden_does_not_compile(block, warps):
    with pytest.raises(CompileError, match="narrower than the row"):
        compile_candidate(SPEC, FORWARD, one_row(block, warps), H200)


def unguarded(problem):
    """The template's text without its assertion."""
    source = render("rms_norm", f"{problem.direction}_single_block", SPEC.flags(problem, one_row(1, 1))[0])
    lines = [line for line in source.text.splitlines(keepends=True) if "static_assert" not in line]
    assert len(lines) == len(source.text.splitlines()) - 1
    text = "".join(lines)
    return KernelSource("rms_norm", f"{source.template}_unguarded", text, code_digest(text), source.flags)


def gate_on_unguarded(block, warps, device):
    config = one_row(block, warps)
    variant = Variant(unguarded(FORWARD), config, SPEC.constants(FORWARD), FORWARD.accumulate, device, H200.sms)
    problem = replace(FORWARD, x_dtype="fp32", weight_dtype="fp32")
    return Gate(SPEC, problem, device).check(variant_runner(SPEC, variant), frozenset({"y"}))


@pytest.mark.parametrize(("block", "warps"), ARTICLE)
def test_trap_block_size_below_hidden_does_not_pass_the_gate(place, block, warps):
    """With constraint and assertion taken away it runs, and is rejected all the same; blocks that hold the row pass."""
    verdict = gate_on_unguarded(block, warps, place.device)
    assert verdict.ok == (block >= 4096), verdict.reason
