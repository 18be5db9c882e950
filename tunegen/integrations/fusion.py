"""The residual add of a layer and the norm right behind it as one call: which layers have them, and their forward so.

A layer is recognised by the source of its own forward, whatever its class is called and whatever else it does:

    hidden_states = residual + hidden_states
    residual = hidden_states
    hidden_states = self.post_attention_layernorm(hidden_states)

become one call of `add_then_norm`, which hands x and residual to the patched norm. All other statements stay as they
are.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterator, Sequence
from types import CellType, CodeType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import UnknownNormError
from ..syntax import parse
from .forwards import OURS, SLOTS, forward_of, own_forward

BLOCKS = ("body", "orelse", "finalbody")
TAKES_RESIDUAL = "_tunegen_takes_residual"
"""Set on a forward of a norm that may be called with x and residual, and then returns y and their sum."""

EXPECTS_RESIDUAL = "_tunegen_expects_residual"
"""Set on a forward hook that knows calls with x and residual: a norm with any other hook gets none."""

HOOKS_OF_ALL = (
    "_global_forward_pre_hooks",
    "_global_forward_hooks",
    "_global_backward_pre_hooks",
    "_global_backward_hooks",
)
"""What holds the hooks of all modules, in torch.nn.modules.module."""

ADD = "_tunegen_add_then_norm"


class Step(NamedTuple):
    """Three statements that a fused call replaces: the names of sum and residual, what is added, and whose norm."""

    hidden: str
    residual: str
    added: tuple[str, str]
    owner: str
    norm: str

    def call(self) -> ast.stmt:
        """The statement in their place."""
        one, other = self.added
        x, residual = (other, one) if one == self.residual else (one, other)
        text = f"{self.hidden}, {self.residual} = {ADD}({self.owner}.{self.norm}, {x}, {residual})"
        return parse(text).body[0]


def add_then_norm(norm: nn.Module, x: Tensor, residual: Tensor) -> tuple[Any, Tensor]:
    """`norm` of x + residual, and that sum. In one call where the norm still is a patched one, whose forward others may
    have replaced since, and no hook is there to see that it was called with two tensors."""
    here = next((vars(norm)[slot] for slot in SLOTS if slot in vars(norm)), None)
    if not getattr(getattr(here, "__func__", None), TAKES_RESIDUAL, False) or _is_hooked(norm):
        total = residual + x
        return norm(total), total
    y, total = norm(x, residual)
    return y, total


def _is_hooked(norm: nn.Module) -> bool:
    """Whether hooks run around its forward or backward, others than those that are marked to expect fused calls."""
    hooks = norm._forward_pre_hooks or norm._backward_pre_hooks or norm._backward_hooks
    if hooks or any(getattr(nn.modules.module, name) for name in HOOKS_OF_ALL):
        return True
    return not all(getattr(hook, EXPECTS_RESIDUAL, False) for hook in norm._forward_hooks.values())


def is_layer(module: nn.Module) -> bool:
    """Whether it looks like one whose residual stream goes through norms: two blocks at least lie beside them."""
    return sum(any(True for _ in child.children()) for child in module.children()) >= 2


def fuse(layer: nn.Module, norms: frozenset[str]) -> tuple[Callable[..., Any], tuple[str, ...]]:
    """The forward for a layer whose attributes `norms` hold norms that take a residual, and those that it hands one to.

    Raises UnknownNormError as `fused`.
    """
    original = forward_of(layer)
    _, attributes = fused(original, norms)
    return _by_class(None if original is own_forward(type(layer)) else original, norms), attributes


@functools.lru_cache(maxsize=256)
def _by_class(own: Callable[..., Any] | None, norms: frozenset[str]) -> Callable[..., Any]:
    """A forward that runs the fused form of `own`, by default of what the class of the layer computes: FSDP2 gives a
    module another class later, around whose forward transformers checkpoints."""
    known: dict[type, Callable[..., Any]] = {}

    def forward(self: Any, *args: Any, **named: Any) -> Any:
        cls = type(self)
        if torch.compiler.is_compiling():  # traced, the steps are left for Inductor to fuse
            return (own or cls.forward)(self, *args, **named)
        if cls not in known:
            known[cls] = _fused_or_own(own or own_forward(cls), norms)
        return known[cls](self, *args, **named)

    OURS[forward] = own or nn.Module.forward
    return forward


def _fused_or_own(original: Callable[..., Any], norms: frozenset[str]) -> Callable[..., Any]:
    try:
        return fused(original, norms)[0]
    except UnknownNormError:
        return original


@functools.lru_cache(maxsize=256)
def fused(forward: Callable[..., Any], norms: frozenset[str]) -> tuple[Callable[..., Any], tuple[str, ...]]:
    """`forward` with each residual add fused with the norm behind it, and the attributes that those norms are of self.

    Args:
        forward: the function of a class, with all that is wrapped around it.
        norms: attributes that hold a norm which takes a residual.

    Raises:
        UnknownNormError: there is no such add, or the source is not what runs; the message says why.
    """
    inner = inspect.unwrap(forward)
    if not isinstance(inner, FunctionType):
        raise UnknownNormError("its forward is no Python function")
    definition = _definition(inner)
    found = [step for block in _blocks(definition) for step in _fuse(block, norms)]
    if not found:
        raise UnknownNormError("its forward has no residual add right before a patched norm")
    if strangers := {step.owner for step in found} - {definition.args.args[0].arg if definition.args.args else ""}:
        raise UnknownNormError(f"its forward calls a norm of {', '.join(strangers)}, which is not the layer")
    result = _wrapped_again(forward, inner, _made(definition, inner))
    return result, tuple(dict.fromkeys(step.norm for step in found))


def _wrapped_again(outer: Callable[..., Any], inner: FunctionType, made: FunctionType) -> FunctionType:
    """`made` within copies of the wrappers that `outer` has around `inner`: transformers checkpoints in one of them."""
    if outer is inner:
        return made
    below = outer.__wrapped__  # type: ignore[attr-defined]
    cells = getattr(outer, "__closure__", None) or ()
    if not isinstance(outer, FunctionType) or sum(_holds(cell, below) for cell in cells) != 1:
        raise UnknownNormError("its forward is wrapped in something that does not show what it calls")
    replacement = CellType(_wrapped_again(below, inner, made))
    closure = tuple(replacement if _holds(cell, below) else cell for cell in cells)
    copied = FunctionType(outer.__code__, outer.__globals__, outer.__name__, outer.__defaults__, closure)
    vars(copied).update(vars(outer), __wrapped__=replacement.cell_contents)
    copied.__kwdefaults__, copied.__qualname__, copied.__doc__ = outer.__kwdefaults__, outer.__qualname__, outer.__doc__
    return copied


def _holds(cell: CellType, value: object) -> bool:
    try:
        return cell.cell_contents is value
    except ValueError:  # it is empty
        return False


def _made(definition: ast.FunctionDef, inner: FunctionType) -> FunctionType:
    """The function of a definition, where `inner` is from and with its defaults. What it calls reaches it as a closure:
    the globals of others' modules get no new name."""
    maker = parse(f"def make({ADD}):\n    return {definition.name}")
    make = maker.body[0]
    assert isinstance(make, ast.FunctionDef)
    make.body.insert(0, definition)
    names: dict[str, Any] = {}
    text = ast.fix_missing_locations(maker)
    exec(compile(text, inner.__code__.co_filename, "exec", dont_inherit=True), inner.__globals__, names)
    made: FunctionType = names["make"](add_then_norm)
    made.__defaults__, made.__kwdefaults__ = inner.__defaults__, inner.__kwdefaults__
    made.__qualname__, made.__doc__ = inner.__qualname__, inner.__doc__
    return made


def _definition(function: FunctionType) -> ast.FunctionDef:
    """The syntax tree of a function without decorators, defaults and annotations, once it is sure that it is the one
    that runs."""
    try:
        tree = parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError) as error:
        raise UnknownNormError(f"the source of its forward cannot be read: {error}") from error
    definition = tree.body[0]
    if not isinstance(definition, ast.FunctionDef):
        raise UnknownNormError("its forward is no plain function")
    for argument in ast.walk(definition.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None  # may need names that only type checkers import
    definition.returns, definition.decorator_list = None, []
    definition.args.defaults, definition.args.kw_defaults = [], [None] * len(definition.args.kwonlyargs)
    ast.increment_lineno(tree, function.__code__.co_firstlineno - 1)  # for tracebacks
    compiled = compile(ast.Module([definition], []), "<forward>", "exec", dont_inherit=True)
    running, read = function.__code__, next(code for code in compiled.co_consts if isinstance(code, CodeType))
    if running.co_freevars:
        raise UnknownNormError(f"its forward uses {', '.join(running.co_freevars)} of a scope around it")
    if not _same(read, running):
        raise UnknownNormError("the source of its forward is not what runs: the file changed, or others replaced it")
    return definition


def _same(one: CodeType, other: CodeType) -> bool:
    """Whether two codes do the same, wherever their lines are."""
    if (one.co_code, one.co_names, one.co_varnames) != (other.co_code, other.co_names, other.co_varnames):
        return False
    return len(one.co_consts) == len(other.co_consts) and all(
        _same(a, b) if isinstance(a, CodeType) and isinstance(b, CodeType) else (type(a), a) == (type(b), b)
        for a, b in zip(one.co_consts, other.co_consts, strict=True)
    )


def _blocks(definition: ast.FunctionDef) -> Iterator[list[ast.stmt]]:
    for node in ast.walk(definition):
        for field in BLOCKS:
            if isinstance(block := getattr(node, field, None), list):
                yield block


def _fuse(block: list[ast.stmt], norms: frozenset[str]) -> list[Step]:
    """Replace the steps of a block in place; returns them."""
    found = []
    for i in range(len(block) - 2):
        step = _step(block[i : i + 3])
        if step is not None and step.norm in norms:
            block[i : i + 3] = [ast.copy_location(step.call(), block[i])]
            found.append(step)
    return found


def _step(statements: Sequence[ast.stmt]) -> Step | None:
    """The step that three statements are, if they are one."""
    if len(statements) < 3:
        return None
    match statements[0], statements[1], statements[2]:
        case (
            ast.Assign(targets=[ast.Name(id=total)], value=ast.BinOp(ast.Name(id=one), ast.Add(), ast.Name(id=other))),
            ast.Assign(targets=[ast.Name(id=residual)], value=ast.Name(id=kept)),
            ast.Assign(
                targets=[ast.Name(id=hidden)],
                value=ast.Call(ast.Attribute(ast.Name(id=owner), norm), args=[ast.Name(id=normed)], keywords=[]),
            ),
        ) if total == kept == normed == hidden != residual:
            return Step(hidden, residual, (one, other), owner, norm)
    return None
