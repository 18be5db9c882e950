"""The arithmetic of search space files: a whitelist over Python's syntax tree, compiled to closures, never `eval`."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from .errors import ExpressionError, SearchSpaceError
from .model import Value
from .syntax import parse_expression

MAX_LENGTH = 500
MAX_DEPTH = 60
ALLOWED = (
    "numbers, text, names, + - * / // %, comparisons, `in` a list, and/or/not, `a if c else b`, "
    "next_power_of_2(n), cdiv(a, b), min, max, clamp(x, low, high)"
)

Step = Callable[[Mapping[str, Any]], Any]


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is not below `n`; `n` is a positive integer."""
    if _whole(n) < 1:
        raise ValueError(f"next_power_of_2 needs a positive integer, not {show(n)}")
    return 1 << (n - 1).bit_length()


def cdiv(a: int, b: int) -> int:
    """`a / b` rounded up, for integers."""
    return -(-_whole(a) // _whole(b))


def clamp(x: Any, low: Any, high: Any) -> Any:
    """`x`, but not below `low` nor above `high`."""
    if _below(high, low):
        raise ValueError(f"clamp needs low <= high, not {show(low)} and {show(high)}")
    return min(max(_number(x), _number(low)), _number(high))


class Expression:
    """A checked expression. `names` are its free names; `evaluate` is cheap enough for thousands of candidates."""

    __slots__ = ("_run", "names", "text")

    def __init__(self, text: str) -> None:
        self.text = text.strip()
        if len(self.text) > MAX_LENGTH:
            raise ExpressionError(f"'{self.text[:40]}...' has {len(self.text)} characters; at most {MAX_LENGTH}")
        try:
            tree = parse_expression(self.text)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            reason = getattr(error, "msg", type(error).__name__)
            raise ExpressionError(f"'{self.text}' is no expression ({reason}); allowed: {ALLOWED}") from None
        compiler = _Compiler(self.text)
        self._run = compiler.visit(tree.body)
        self.names = frozenset(compiler.names)

    def evaluate(self, scope: Mapping[str, Any]) -> Any:
        """The value where names stand for what `scope` says; `ExpressionError` names the text and the values."""
        try:
            return self._run(scope)
        except KeyError as error:
            raise ExpressionError(f"'{self.text}': unknown name {error.args[0]}") from None
        except (ArithmeticError, TypeError, ValueError) as error:
            values = ", ".join(f"{name}={show(scope[name])}" for name in sorted(self.names & scope.keys()))
            raise ExpressionError(f"'{self.text}'{' with ' if values else ''}{values}: {error}") from None


class Rule(NamedTuple):
    """An expression and where it stands in a search space file."""

    expression: Expression
    where: str

    def value(self, names: Mapping[str, Value]) -> Value:
        """What a computed parameter is: never a fraction, which would reach a template as one."""
        return self._evaluate(names, (int, str), "a parameter is a whole number (divide by //) or a word")

    def holds(self, names: Mapping[str, Value]) -> bool:
        """Whether a condition is met."""
        return bool(self._evaluate(names, (bool,), "a condition is true or false"))

    def _evaluate(self, names: Mapping[str, Value], kinds: tuple[type, ...], meant: str) -> Value:
        try:
            result: Value = self.expression.evaluate(names)
        except ExpressionError as error:
            raise SearchSpaceError(f"{self.where}: {error}") from None
        if type(result) in kinds:
            return result
        raise SearchSpaceError(f"{self.where}: '{self.expression.text}' gives {show(result)}, but {meant}")


class _Compiler(ast.NodeVisitor):
    """Turns a syntax tree into closures and collects its free names; a node without a method here is refused."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.names: set[str] = set()
        self.depth = 0

    def visit(self, node: ast.AST) -> Step:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise ExpressionError(f"'{self.text[:40]}...' is nested deeper than {MAX_DEPTH} levels")
        step: Step = super().visit(node)
        self.depth -= 1
        return step

    def generic_visit(self, node: ast.AST) -> Step:
        raise self.refuse(node, f"no {type(node).__name__} is allowed")

    def refuse(self, node: ast.AST, what: str) -> ExpressionError:
        part = ast.get_source_segment(self.text, node) or type(node).__name__
        return ExpressionError(f"'{self.text}': {what} in '{part}'; allowed: {ALLOWED}")

    def visit_Constant(self, node: ast.Constant) -> Step:
        value = node.value
        if type(value) in _NUMBERS or type(value) is str:
            return lambda scope: value
        raise self.refuse(node, f"no {type(value).__name__} is allowed")

    def visit_Name(self, node: ast.Name) -> Step:
        self.names.add(node.id)
        return operator.itemgetter(node.id)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> Step:
        operand = self.visit(node.operand)
        if isinstance(node.op, ast.Not):
            return lambda scope: not _truth(operand(scope))
        if isinstance(node.op, ast.USub):
            return lambda scope: -_number(operand(scope))
        raise self.refuse(node, f"no {type(node.op).__name__} is allowed")

    def visit_BinOp(self, node: ast.BinOp) -> Step:
        operate = _ARITHMETIC.get(type(node.op))
        if operate is None:
            raise self.refuse(node, f"no {type(node.op).__name__} is allowed")
        left, right = self.visit(node.left), self.visit(node.right)
        return lambda scope: operate(_number(left(scope)), _number(right(scope)))

    def visit_BoolOp(self, node: ast.BoolOp) -> Step:
        steps = [self.visit(value) for value in node.values]
        if isinstance(node.op, ast.And):
            return lambda scope: all(_truth(step(scope)) for step in steps)
        return lambda scope: any(_truth(step(scope)) for step in steps)

    def visit_Compare(self, node: ast.Compare) -> Step:
        first = self.visit(node.left)
        rest = [self._link(node, op, right) for op, right in zip(node.ops, node.comparators, strict=True)]

        def run(scope: Mapping[str, Any]) -> bool:
            left = first(scope)
            for test, step in rest:
                right = step(scope)
                if not test(left, right):
                    return False
                left = right
            return True

        return run

    def _link(self, node: ast.Compare, op: ast.cmpop, right: ast.expr) -> tuple[Callable[[Any, Any], bool], Step]:
        if isinstance(op, ast.In):
            if not isinstance(right, ast.Tuple | ast.List):
                raise self.refuse(node, "`in` without a list")
            steps = [self.visit(item) for item in right.elts]
            return _contains, lambda scope: [step(scope) for step in steps]
        test = _COMPARISONS.get(type(op))
        if test is None:
            raise self.refuse(node, f"no {type(op).__name__} is allowed")
        return test, self.visit(right)

    def visit_IfExp(self, node: ast.IfExp) -> Step:
        test, then, otherwise = self.visit(node.test), self.visit(node.body), self.visit(node.orelse)
        return lambda scope: then(scope) if _truth(test(scope)) else otherwise(scope)

    def visit_Call(self, node: ast.Call) -> Step:
        if not isinstance(node.func, ast.Name) or node.func.id not in _FUNCTIONS:
            raise self.refuse(node, "unknown function")
        function, least, most = _FUNCTIONS[node.func.id]
        if node.keywords or not least <= len(node.args) <= most:
            raise self.refuse(node, f"wrong arguments of {node.func.id}")
        steps = [self.visit(argument) for argument in node.args]
        return lambda scope: function(*[step(scope) for step in steps])


def show(value: Any) -> str:
    """Short text of any value, a hostile one included: Python refuses to print integers of thousands of digits."""
    if type(value) is int:
        return str(value) if value.bit_length() <= 64 else f"an integer of {value.bit_length()} bits"
    if type(value) is str:
        return repr(value[:40])
    return repr(value) if type(value) in _NUMBERS else f"a {type(value).__name__}"


def listed(values: Iterable[object]) -> str:
    """The values in one line, for messages."""
    return ", ".join(map(str, values)) or "nothing"


def _number(value: Any) -> Any:
    """`value`, when arithmetic may use it; text may not be multiplied or joined."""
    if type(value) in _NUMBERS:
        return value
    raise TypeError(f"{show(value)} is not a number")


def _whole(value: Any) -> int:
    if type(value) is int:
        return value
    raise TypeError(f"{show(value)} is not an integer")


def _truth(value: Any) -> bool:
    """A number where a condition is meant is nearly always a slip, so it is refused."""
    if value is True or value is False:
        return bool(value)
    raise TypeError(f"{show(value)} is not true or false; compare it with something")


def _comparison(test: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    """`test`, only between two numbers or two texts: `RSTD == 1` is a slip, not False."""

    def run(left: Any, right: Any) -> bool:
        numbers = (type(left) in _NUMBERS) + (type(right) in _NUMBERS)
        if numbers == 2 or (numbers == 0 and type(left) is type(right) is str):
            return test(left, right)
        raise TypeError(f"{show(left)} cannot be compared with {show(right)}")

    return run


def _contains(left: Any, items: list[Any]) -> bool:
    return any(_equal(left, item) for item in items)


_NUMBERS = frozenset({int, float, bool})
_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_equal = _comparison(operator.eq)
_below = _comparison(operator.lt)
_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: _equal,
    ast.NotEq: _comparison(operator.ne),
    ast.Lt: _below,
    ast.LtE: _comparison(operator.le),
    ast.Gt: _comparison(operator.gt),
    ast.GtE: _comparison(operator.ge),
}
_FUNCTIONS: dict[str, tuple[Callable[..., Any], int, int]] = {
    "next_power_of_2": (next_power_of_2, 1, 1),
    "cdiv": (cdiv, 2, 2),
    "min": (lambda *values: min(map(_number, values)), 2, 16),
    "max": (lambda *values: max(map(_number, values)), 2, 16),
    "clamp": (clamp, 3, 3),
}
