"""What the pipeline must know of an op, and nothing of how it computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from .model import Problem


class Tensor(NamedTuple):
    """A tensor argument of an op: shape, dtype, and whether kernels read it (`input`) or write it (`output`). An
    output is never held to less than `floor_ulp` ulp of its dtype."""

    shape: tuple[int, ...]
    dtype: str
    role: str
    floor_ulp: float = 1.0


@dataclass(frozen=True)
class OpSpec:
    """All that the pipeline must know of an op; the callables take a `Problem` first.

    `tensors(problem)` names every tensor argument, as kernels do without their `_ptr`. `scalars(problem)` gives the
    run-time numbers, `constants(problem, offset)` the constexprs that do not come from the config, with the offset of
    a call or the one that is tuned with. `nestable(problem)` lists which tensors may have nested rows (see `layouts`)
    together; `flags(problem, config, nested)` is one set of Jinja flags for each rendering that may be launched for
    such tensors; the first one without any is timed. `bytes_moved` counts each input read once, each output written
    once. `inputs(problem, device, seed)` draws the inputs. `expected(problem, inputs, dtype)` is the reference computed
    in that dtype. `torch_call(problem, inputs)` returns torch's own form of the op as a function without arguments;
    `compiled_call(problem)` compiles the plain formula and returns what makes such functions of inputs.
    """

    name: str
    tensors: Callable[[Problem], dict[str, Tensor]]
    scalars: Callable[[Problem], dict[str, int | float]]
    constants: Callable[..., dict[str, int | float]]
    nestable: Callable[[Problem], list[tuple[str, ...]]]
    flags: Callable[..., list[dict[str, Any]]]
    bytes_moved: Callable[[Problem], int]
    inputs: Callable[..., dict[str, Any]]
    expected: Callable[..., dict[str, Any]]
    torch_call: Callable[..., Callable[[], Any]]
    compiled_call: Callable[[Problem], Callable[..., Callable[[], Any]]]
