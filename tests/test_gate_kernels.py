"""The gate's kernels against torch's formula, on the same tensors: every kind of output, and numbers that are none."""

from __future__ import annotations

import math
from collections import defaultdict

import pytest
import torch
from helpers import places

from tunegen.reference import DTYPES, Expected
from tunegen.ulps import Found, Plain, scaled

place = places("interpreter", "cuda")

ROWS, WIDTH = 5, 300


def in_kernels(device, room=4):
    """Imported late: Triton reads TRITON_INTERPRET then."""
    from tunegen.gate_kernels import InKernels

    return InKernels(device, room)


def output(dtype, shape=(ROWS, WIDTH), seed=0, device="cpu"):
    """What a kernel wrote, and what it should have: a few ulp off, over many binades."""
    generator = torch.Generator().manual_seed(seed)
    want = torch.randn(shape, generator=generator, dtype=torch.float64)
    want *= torch.exp2(torch.randint(-12, 12, shape, generator=generator).double())
    off = 1 + torch.randn(shape, generator=generator, dtype=torch.float64) * 2.0 ** -{"bf16": 7, "fp16": 10}.get(
        dtype, 22
    )
    return (want * off).to(DTYPES[dtype]).to(device), want.to(device)


def assert_alike(got, want, dtype):
    """Exactly the same largest error; the sum in another order."""
    want = scaled(want)
    numbers = []
    for findings in (Plain(), in_kernels(got.device)):
        findings.deviation(got, want, dtype)
        numbers.append(findings.read()[0])
    plain, found = numbers
    assert found.nan == plain.nan
    if not plain.nan:
        assert found.largest == plain.largest
        assert found.squares == pytest.approx(plain.squares, rel=1e-12)
    return found


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32", "fp64"])
def test_every_dtype_with_a_scale_for_each_row(place, dtype):
    got, want = output(dtype, device=place.device)
    found = assert_alike(got, Expected(want, None, want.abs().mean(-1, keepdim=True)), dtype)
    assert found.largest > 0


def test_one_scale_for_all_as_dw_has_it(place):
    got, want = output("fp32", (4100,), device=place.device)
    assert assert_alike(got, Expected(want), "fp32").squares > 0


def test_a_scale_for_each_element_as_rstd_has_it(place):
    got, want = output("fp32", (4100,), device=place.device)
    assert_alike(got, Expected(want, None, want), "fp32")


def test_slack_is_taken_off(place):
    got, want = output("bf16", device=place.device)
    scale = want.abs().mean(-1, keepdim=True)
    without = assert_alike(got, Expected(want, None, scale), "bf16")
    slack = torch.zeros_like(want)
    slack[::2] = 1e9
    some = assert_alike(got, Expected(want, slack, scale), "bf16")
    assert 0 < some.squares < without.squares
    assert assert_alike(got, Expected(want, slack.fill_(1e9), scale), "bf16") == Found(0.0)


@pytest.mark.parametrize("width", [1, 17, 1024, 1025, 2500])
def test_every_width(place, width):
    got, want = output("fp16", (3, width), device=place.device)
    assert_alike(got, Expected(want, None, want.abs().mean(-1, keepdim=True)), "fp16")


@pytest.mark.parametrize("dtype", ["fp16", "fp32", "fp64"])
def test_rows_of_zeros_are_counted_from_the_smallest_number(place, dtype):
    got, want = output(dtype, device=place.device)
    want[1], want[2] = 0.0, 0.0
    got[1] = 0.0
    got[2] = torch.finfo(got.dtype).smallest_normal
    assert assert_alike(got, Expected(want, None, want.abs().mean(-1, keepdim=True)), dtype).largest > 1


def test_powers_of_two_are_exact(place):
    """An element right at a power of two, and next to it on either side, has the ulp of its binade."""
    powers = torch.exp2(torch.arange(-900, 1000, dtype=torch.float64))
    want = torch.stack([powers.nextafter(torch.zeros(())), powers, powers.nextafter(torch.full((), math.inf))])
    want = want.to(place.device)
    assert_alike((want * (1 + 2.0**-50)), Expected(want, None, want.new_zeros(())), "fp64")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", [(0, 0), (ROWS - 1, WIDTH - 1)], ids=["first", "last"])
def test_what_is_no_number_shows_wherever_it_is(place, value, where):
    got, want = output("bf16", device=place.device)
    got[where] = value
    found = assert_alike(got, Expected(want, None, want.abs().mean(-1, keepdim=True)), "bf16")
    off = found.deviation(want.numel())
    assert math.isnan(off.largest) if math.isnan(value) else off.largest == math.inf


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # of numpy, in the interpreter
def test_infinity_where_there_should_be_one_is_no_number(place):
    got, want = output("fp32", device=place.device)
    scale = want.abs().mean(-1, keepdim=True)
    got[2, 3] = want[2, 3] = math.inf
    assert assert_alike(got, Expected(want, None, scale), "fp32").nan == 1


@pytest.mark.parametrize("dtype", ["bf16", "fp32", "fp64"])
def test_guards_and_inputs_bit_by_bit(place, dtype):
    """Not by value: NaN is equal to itself, and 0 differs from -0."""
    device, width = place.device, 64
    for guard in (math.nan, 1536.0):
        one = torch.full((1,), guard, dtype=DTYPES[dtype], device=device)
        for changed, whole in (
            (None, True),
            (0, False),
            (width - 1, False),
            (width, True),
            (-width - 1, True),
            (-width, False),
            (-1, False),
        ):
            buffer = torch.full((5000,), guard, dtype=DTYPES[dtype], device=device)
            if changed is not None:
                buffer[changed] = 7.0
            found = [answer(findings, "guards", buffer, width, one) for findings in (Plain(), in_kernels(device))]
            assert found == [Found(0.0 if whole else 1.0)] * 2
    one, other = (
        torch.zeros(5000, dtype=DTYPES[dtype], device=device),
        torch.zeros(5000, dtype=DTYPES[dtype], device=device),
    )
    one[9] = other[9] = math.nan
    assert [answer(findings, "same", one, other) for findings in (Plain(), in_kernels(device))] == [Found(0.0)] * 2
    one[-1] = -0.0
    assert [answer(findings, "same", one, other) for findings in (Plain(), in_kernels(device))] == [Found(1.0)] * 2


def answer(findings, question, *given):
    getattr(findings, question)(*given)
    return findings.read()[0]


def test_answers_come_in_the_order_of_the_questions(place):
    got, want = output("fp32", device=place.device)
    findings = in_kernels(place.device, 3)
    findings.same(got, got)
    findings.deviation(got, scaled(Expected(want)), "fp32")
    findings.same(got, got + 1)
    same, off, differs = findings.read()
    assert (same.largest, differs.largest) == (0.0, 1.0)
    assert off.squares > 0


@pytest.mark.parametrize("kernel", ["differs", "deviates"])
def test_a_launch_is_tried_again_where_threads_were_mixed_up(monkeypatch, kernel):
    """Triton parses a kernel when it is first launched, as everywhere (`syntax`)."""
    from tunegen import gate_kernels, syntax

    tries = []

    def launch(*arguments, **constants):
        tries.append(constants)
        if len(tries) == 1:
            raise SystemError(f"{syntax.MIXED_UP} (before=84, after=86)")

    monkeypatch.setattr(gate_kernels, kernel, defaultdict(lambda: launch))
    got, want = output("fp32")
    findings = in_kernels(torch.device("cpu"))
    if kernel == "differs":
        findings.same(got, got)
    else:
        findings.deviation(got, scaled(Expected(want)), "fp32")
    assert len(tries) == 2
    assert tries[0] == tries[1] != {}


@pytest.mark.compiler
@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile_for_gpus_that_are_not_here(capability):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from tunegen import gate_kernels as kernels

    def compiled(kernel, types, fixed):
        signature = {name: "constexpr" if name in fixed else types.get(name, "i64") for name in kernel.arg_names}
        source = ASTSource(kernel, signature, {(kernel.arg_names.index(n),): v for n, v in fixed.items()}, {})
        return triton.compile(source, target=GPUTarget("cuda", capability, 32))

    wide = {f"{name}_ptr": "*fp64" for name in ("want", "slack", "scale", "found")}
    fixed = {"SMALLEST": 1e-290, "MANTISSA": 52, "HAS_SLACK": True, "ROWS": 2, "COLS": 1024}
    assert "atom" in compiled(kernels.deviates, {"got_ptr": "*bf16", **wide}, fixed).asm["ptx"]
    words = {"got_ptr": "*i16", "want_ptr": "*i16", "found_ptr": "*fp64"}
    assert "st.global" in compiled(kernels.differs, words, {"TILE": kernels.TILE}).asm["ptx"]
