"""The records that travel between layers: plain values, no torch, no triton."""

from __future__ import annotations

import enum
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .policies import FASTEST, INVARIANT, INVARIANT_ROWS

DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}
CASTINGS = ("fp32", "llama")
DIRECTIONS = ("forward", "backward")
TORCH_FAMILY = "torch"
"""The family of torch's own op, which competes with the templates."""

PROTOCOL = 2
"""Version of the way time is measured (`bench`); stored with every trial, a part of the key."""

Value = int | str
"""A parameter of a config: an int is a `tl.constexpr` (or a launch option), a str decides structure in the template."""


class TrialState(str, enum.Enum):
    """What became of a candidate; only an OK trial has a time."""

    OK = "ok"
    CONSTRAINT = "constraint"
    COMPILE = "compile"
    RUNTIME = "runtime"
    INCORRECT = "incorrect"
    TIMEOUT = "timeout"
    CRASHED = "crashed"
    DUPLICATE = "duplicate"


@dataclass(frozen=True)
class Problem:
    """One thing to tune: everything about the call that could change which kernel is best or what is right.

    `hidden` is N, the normalised width, `rows` is M, the product of all other sizes. `weight_dtype` is None without a
    weight. `offset` says whether something is added to the weight (Gemma), not how much. `weight_grad` is False in
    the forward direction and where the weight is frozen or absent.
    """

    op: str
    direction: str
    hidden: int
    rows: int
    x_dtype: str = "bf16"
    weight_dtype: str | None = "bf16"
    casting: str = "fp32"
    offset: bool = False
    weight_grad: bool = False
    residual: bool = False
    layout: str = "contiguous"
    policy: str = FASTEST
    regime: str = "cold_graph"

    @property
    def accumulate(self) -> str:
        """The dtype of sums and of rstd: fp64 for fp64 inputs, else fp32."""
        return "fp64" if self.x_dtype == "fp64" else "fp32"

    @property
    def rows_bucket(self) -> int:
        """What the database and the dispatcher tell row counts apart by: a power of two, one for all if invariant."""
        return INVARIANT_ROWS if self.policy == INVARIANT else rows_bucket(self.rows)

    def label(self) -> str:
        """Short text for people, such as `forward 16384x4096 bf16`."""
        return " ".join([self.direction, f"{self.rows}x{self.hidden}", self.x_dtype, *self.contract()])

    def contract(self) -> list[str]:
        """What sets the problem apart from the usual one, in words: no more than people need to tell rows of a
        table."""
        weight = "no weight" if self.weight_dtype is None else f"{self.weight_dtype} weight"
        return [
            *([weight] if self.weight_dtype != self.x_dtype else []),
            *([self.casting] if self.casting != "fp32" else []),
            *(["offset"] if self.offset else []),
            *(["dx only"] if self.direction == "backward" and not self.weight_grad else []),
            *([self.policy] if self.policy != FASTEST else []),
        ]


def rows_bucket(rows: int) -> int:
    """`rows` rounded up to a power of two, at least 1."""
    return 1 << max(rows - 1, 0).bit_length()


@dataclass(frozen=True)
class Config:
    """One point of a family's search space: its parameters, launch options (`num_warps`, `num_ctas`) among them."""

    family: str
    parameters: tuple[tuple[str, Value], ...] = ()

    LAUNCH_OPTIONS = ("num_warps", "num_ctas")

    @classmethod
    def of(cls, family: str, parameters: Mapping[str, Value]) -> Config:
        """Build from a mapping; the order of keys does not matter."""
        return cls(family, tuple(sorted(parameters.items())))

    def __getitem__(self, name: str) -> Value:
        return dict(self.parameters)[name]

    @property
    def structure(self) -> dict[str, str]:
        """String-valued parameters: they go to Jinja."""
        return {k: v for k, v in self.parameters if isinstance(v, str)}

    @property
    def numbers(self) -> dict[str, int]:
        """Integer-valued parameters without launch options: they go to `tl.constexpr`."""
        return {k: v for k, v in self.parameters if isinstance(v, int) and k not in self.LAUNCH_OPTIONS}

    @property
    def num_warps(self) -> int:
        """Warps a program, 4 unless the family says otherwise."""
        return int(dict(self.parameters).get("num_warps", 4))

    @property
    def num_ctas(self) -> int:
        """Thread blocks a cluster, 1 unless the family says otherwise."""
        return int(dict(self.parameters).get("num_ctas", 1))

    def to_json(self) -> str:
        """The parameters as JSON with sorted keys, the form that the database holds."""
        return json.dumps(dict(self.parameters), sort_keys=True)

    def label(self) -> str:
        """Short text for people, such as `single_block ROWS=2 num_warps=8`."""
        return " ".join([self.family, *(f"{k}={v}" for k, v in self.parameters)])


class Scratch(NamedTuple):
    """Workspace of a plan: allocated before its launches, filled with zeros where `zero` says so."""

    shape: tuple[int, ...]
    dtype: str
    zero: bool = False


class Launch(NamedTuple):
    """One kernel of a plan. `values` are further arguments, by name; `num_warps` overrides the config's."""

    kernel: Any
    grid: tuple[int, ...]
    values: Mapping[str, int] = {}
    num_warps: int | None = None


class Plan(NamedTuple):
    """What a template's `plan(p)` returns: the workspace and the launches of one call, in order."""

    launches: tuple[Launch, ...]
    scratch: Mapping[str, Scratch] = {}

    def scratch_bytes(self) -> int:
        """Bytes of workspace one call needs."""
        return sum(DTYPE_BYTES[item.dtype] * math.prod(item.shape) for item in self.scratch.values())


@dataclass(frozen=True)
class KernelSource:
    """A rendered template: its text, a digest of its code without comments, the flags it was rendered with."""

    op: str
    template: str
    text: str
    digest: str
    flags: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Resources:
    """What the compiler spent on a kernel: registers and spilled bytes a thread, shared memory a program, in bytes.
    `binary` is a digest of the machine code of all kernels of a call."""

    registers: int | None
    spill_bytes: int | None
    shared_bytes: int
    binary: str = ""


@dataclass(frozen=True)
class Silicon:
    """What the GPU is, by facts rather than by name: the part of the key that says where a timing is valid."""

    name: str
    capability: int
    sms: int
    l2_bytes: int
    memory_clock_khz: int
    memory_bus_bits: int
    shared_limit: int
    memory_bytes: int = 0

    @property
    def arch(self) -> str:
        """Such as `sm_90`."""
        return f"sm_{self.capability}"


class Conditions(NamedTuple):
    """What the GPU was like right after a block: clocks in MHz, power in watts, temperature in degrees Celsius; None
    where the driver does not say."""

    sm_mhz: float | None
    memory_mhz: float | None
    watts: float | None
    celsius: float | None


@dataclass(frozen=True)
class Measurement:
    """GPU time of one candidate. Times in microseconds a call; `blocks` are the raw block medians, `sentinel_blocks`
    those of the sentinel measured in the same blocks; `score` is the median of their ratios (1.0 = as fast as the
    sentinel). `rounds` are the scores of rounds with buffers of their own, `conditions` those of each block, where a
    sensor tells them."""

    us: float
    score: float
    sentinel_us: float
    blocks: tuple[float, ...]
    sentinel_blocks: tuple[float, ...]
    rounds: tuple[float, ...] = ()
    conditions: tuple[Conditions | None, ...] = ()


@dataclass(frozen=True)
class Trial:
    """A candidate and what became of it.

    In the finals `band` is the share by which the same kernel of this problem, measured twice, differs; `tied` says
    whether the trial is within that of the best, and `gains` whether it beats both the built-in default and torch's own
    op by more.
    """

    problem: Problem
    config: Config
    state: TrialState
    digest: str = ""
    kind: str = "measured"
    stage: str = "screen"
    reason: str = ""
    resources: Resources | None = None
    scratch_bytes: int | None = None
    error_ulp: float | None = None
    measurement: Measurement | None = None
    estimate_us: float | None = None
    band: float | None = None
    tied: bool | None = None
    gains: bool | None = None


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
