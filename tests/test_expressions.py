"""The expression language of search space files: what it computes, what it refuses, and how it says so."""

from __future__ import annotations

import pytest

from tunegen.domains import arranged, combinations
from tunegen.errors import ExpressionError, SearchSpaceError
from tunegen.expressions import MAX_DEPTH, MAX_LENGTH, Expression, Rule

SCOPE = {"N": 5120, "M": 16, "WEIGHT": True, "RSTD": "saved", "ROWS": 2}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("N", 5120),
        ("1.5 + 2", 3.5),
        ("-N + 1", -5119),
        ("N // 3 % 7 * 2", 5120 // 3 % 7 * 2),
        ("N / 2048", 2.5),
        ("2 + 3 * 4 - (1 - 2)", 15),
        ("8 <= ROWS * 8 <= 16", True),
        ("8 <= ROWS * 8 < 16", False),
        ("1 < 2 > 1 == 1 != 3", True),
        ("RSTD == 'saved'", True),
        ("RSTD != 'saved'", False),
        ("RSTD in ('saved', 'recomputed')", True),
        ("ROWS in [1, 4, N]", False),
        ("N > 1 and not WEIGHT or M == 16", True),
        ("not WEIGHT", False),
        ("'wide' if N > 4096 else 'narrow'", "wide"),
        ("1 if N < 4096 else 2 if N < 8192 else 3", 2),
        ("next_power_of_2(N)", 8192),
        ("next_power_of_2(8192)", 8192),
        ("next_power_of_2(1)", 1),
        ("cdiv(N, 3)", 1707),
        ("cdiv(6, 3)", 2),
        ("min(N, M, 3)", 3),
        ("max(N, M)", 5120),
        ("clamp(N // 512, 1, 8)", 8),
        ("clamp(0, 1, 8)", 1),
        ("clamp(5, 1, 8)", 5),
        ("True", True),
    ],
)
def test_value(text: str, value: object) -> None:
    result = Expression(text).evaluate(SCOPE)
    assert result == value
    assert type(result) is type(value)


def test_names_are_the_free_ones() -> None:
    assert Expression("cdiv(N, SPLITS) if WEIGHT else max(N, 1)").names == {"N", "SPLITS", "WEIGHT"}


def test_and_or_and_if_evaluate_only_what_they_need() -> None:
    assert Expression("M == 0 or N / M > 1").evaluate({"N": 1, "M": 0}) is True
    assert Expression("M != 0 and N / M > 1").evaluate({"N": 1, "M": 0}) is False
    assert Expression("0 if M == 0 else N / M").evaluate({"N": 1, "M": 0}) == 0


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("__import__('os')", "__import__('os')"),
        ("__import__('os').system('true')", "__import__('os').system('true')"),
        ("N.bit_length", "N.bit_length"),
        ("N.bit_length()", "N.bit_length()"),
        ("M + abs(N)", "abs(N)"),
        ("(1).__class__", "(1).__class__"),
        ("N ** 2", "N ** 2"),
        ("9 ** 9 ** 9", "9 ** 9 ** 9"),
        ("1 << 99999999", "1 << 99999999"),
        ("N & 1", "N & 1"),
        ("N @ M", "N @ M"),
        ("~N", "~N"),
        ("+N", "+N"),
        ("RSTD[0]", "RSTD[0]"),
        ("lambda: 1", "lambda: 1"),
        ("[i for i in (1, 2)]", "[i for i in (1, 2)]"),
        ("{1: 2}", "{1: 2}"),
        ("(N, M)", "(N, M)"),
        ("N == (1, 2)", "(1, 2)"),
        ("N in M", "N in M"),
        ("N not in (1, 2)", "N not in (1, 2)"),
        ("N is M", "N is M"),
        ("f'{N}'", "f'{N}'"),
        ("None", "None"),
        ("...", "..."),
        ("1j", "1j"),
        ("b'x'", "b'x'"),
        ("(N := 1)", "N := 1"),
        ("min(N)", "min(N)"),
        ("min(1, *(N, M))", "*(N, M)"),
        ("cdiv(a=N, b=2)", "cdiv(a=N, b=2)"),
        ("next_power_of_2(N, 2)", "next_power_of_2(N, 2)"),
        ("(min if WEIGHT else max)(1, 2)", "(min if WEIGHT else max)(1, 2)"),
    ],
)
def test_refused_when_built(text: str, part: str) -> None:
    with pytest.raises(ExpressionError) as caught:
        Expression(text)
    message = str(caught.value)
    assert f"in '{part}'" in message
    assert "allowed: numbers, text, names" in message


@pytest.mark.parametrize("text", ["", "N +", "N; M", "N = 1", "import os", "(" * 300, "N\x00"])
def test_text_that_is_no_expression_is_refused(text: str) -> None:
    with pytest.raises(ExpressionError, match="is no expression"):
        Expression(text)


def test_absurd_sizes_are_refused() -> None:
    longest = "1" + "+1" * ((MAX_LENGTH - 1) // 2)
    with pytest.raises(ExpressionError, match=f"at most {MAX_LENGTH}"):
        Expression(longest + "+1")
    with pytest.raises(ExpressionError, match=f"deeper than {MAX_DEPTH}"):
        Expression(longest)
    with pytest.raises(ExpressionError, match=f"deeper than {MAX_DEPTH}"):
        Expression("-" * (MAX_LENGTH - 1) + "1")


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("N / SPLITS", "unknown name SPLITS"),
        ("N / (M - 16)", "with M=16, N=5120: division by zero"),
        ("N // 0", "by zero"),
        ("N % 0", "by zero"),
        ("cdiv(N, 0)", "by zero"),
        ("RSTD * 1000000", "with RSTD='saved': 'saved' is not a number"),
        ("RSTD + 'x'", "not a number"),
        ("-RSTD", "not a number"),
        ("max(RSTD, 1)", "not a number"),
        ("clamp(N, 'a', 'b')", "not a number"),
        ("clamp(N, 8, 1)", "low <= high"),
        ("RSTD < 5", "cannot be compared"),
        ("RSTD == 1", "cannot be compared"),
        ("N in ('saved', 1)", "cannot be compared"),
        ("N and WEIGHT", "5120 is not true or false"),
        ("not N", "5120 is not true or false"),
        ("1 if N else 2", "5120 is not true or false"),
        ("next_power_of_2(N / 2)", "2560.0 is not an integer"),
        ("next_power_of_2(WEIGHT)", "True is not an integer"),
        ("next_power_of_2(0)", "positive integer"),
        ("cdiv(N, 2.0)", "2.0 is not an integer"),
    ],
)
def test_failure_names_the_text_and_the_values(text: str, cause: str) -> None:
    with pytest.raises(ExpressionError) as caught:
        Expression(text).evaluate(SCOPE)
    assert f"'{text}'" in str(caught.value)
    assert cause in str(caught.value)


def test_failure_with_a_huge_value_can_still_be_said() -> None:
    with pytest.raises(ExpressionError, match=r"N=an integer of \d+ bits"):
        Expression("N / 3").evaluate({"N": 10**6000})


def test_rule_insists_on_the_kind_of_its_value() -> None:
    assert Rule(Expression("N // 2"), "file:7: x").value(SCOPE) == 2560
    assert Rule(Expression("N > 2"), "file:7: x").holds(SCOPE) is True
    with pytest.raises(SearchSpaceError, match=r"file:7: x: 'N / 2' gives 2560.0, but a parameter is a whole number"):
        Rule(Expression("N / 2"), "file:7: x").value(SCOPE)
    with pytest.raises(SearchSpaceError, match="gives True, but a parameter"):
        Rule(Expression("N > 2"), "file:7: x").value(SCOPE)
    with pytest.raises(SearchSpaceError, match="gives 5120, but a condition is true or false"):
        Rule(Expression("N"), "file:7: x").holds(SCOPE)
    with pytest.raises(SearchSpaceError, match="file:7: x: 'Q': unknown name Q"):
        Rule(Expression("Q"), "file:7: x").value(SCOPE)


def test_computed_parameters_are_computed_after_those_they_need() -> None:
    domains = arranged(
        {
            "WARPS": Rule(Expression("max(BLOCK // 512, 1)"), "f:1"),
            "BLOCK": Rule(Expression("next_power_of_2(cdiv(N, SPLITS))"), "f:2"),
            "SPLITS": (2, 4),
        }
    )
    assert list(domains) == ["SPLITS", "BLOCK", "WARPS"]
    assert list(combinations(domains, {"N": 5120})) == [
        {"SPLITS": 2, "BLOCK": 4096, "WARPS": 8},
        {"SPLITS": 4, "BLOCK": 2048, "WARPS": 4},
    ]


def test_a_circle_of_computed_parameters_is_refused() -> None:
    with pytest.raises(SearchSpaceError, match=r"f:[12]: is computed from itself"):
        arranged({"A": Rule(Expression("B + 1"), "f:1"), "B": Rule(Expression("A + 1"), "f:2")})


def test_constraints_leave_out_what_they_turn_down_and_nothing_else():
    """Asked as soon as they can be: of no branch that lives, and in the order of all combinations."""
    domains = arranged({"A": (1, 2, 3), "D": Rule(Expression("A * B"), ""), "B": (4, 5), "C": (0, 6)})
    constraints = [Rule(Expression(text), "") for text in ("C != 0", "D // C < 2", "A != 2", "N > 1")]
    kept = list(combinations(domains, {"N": 7}, constraints))
    assert kept == [
        point for point in combinations(domains, {"N": 7}) if all(rule.holds({"N": 7, **point}) for rule in constraints)
    ]
    assert [(point["A"], point["B"]) for point in kept] == [(1, 4), (1, 5)]
    assert list(combinations(domains, {"N": 1}, constraints)) == []


def test_constraint_that_another_one_guards_is_not_asked_for_an_answer():
    """`8 // A` has none at 0, where the first constraint turns the point down once B is known."""
    domains = arranged({"A": (0, 2), "B": (1,)})
    guarded = [Rule(Expression("A > 0 * B"), ""), Rule(Expression("8 // A == 4"), "")]
    assert list(combinations(domains, {}, guarded)) == [{"A": 2, "B": 1}]
