"""The records that travel between layers: plain values, no torch, no triton."""

from __future__ import annotations

import enum
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .policies import FASTEST, INVARIANT, INVARIANT_ROWS

DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}
CASTINGS = ("fp32", "llama")
DIRECTIONS = ("forward", "backward")
RMS_NORM = "rms_norm"
"""The op that is meant where none is named."""
TORCH_FAMILY = "torch"
"""The family of torch's own op, which competes with the templates."""
PROTOCOL = 4
"""Version of what a stored time means (`bench`), a part of the key; more blocks of the same mean the same."""

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
    the forward direction and where the weight is frozen or absent. `sum_in_fp32` says of add_rms_norm, forward, 16-bit
    x, whether the norm reads x + residual before it is rounded.
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
    sum_in_fp32: bool = False
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
        """What sets the problem apart from the usual one, in as many words as tell rows of a table apart."""
        weight = "no weight" if self.weight_dtype is None else f"{self.weight_dtype} weight"
        return [
            *([self.op] if self.op != RMS_NORM else []),
            *([weight] if self.weight_dtype != self.x_dtype else []),
            *([self.casting] if self.casting != "fp32" else []),
            *(["offset"] if self.offset else []),
            *(["sum in fp32"] if self.sum_in_fp32 else []),
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

    @classmethod
    def read(cls, family: str, text: str) -> Config:
        """The config whose `to_json` is `text`, or says the same. Raises ValueError for any other text."""
        try:
            parameters = json.loads(text)
        except (TypeError, RecursionError) as error:
            raise ValueError(str(error)) from None
        if type(parameters) is not dict or not all(type(value) in (int, str) for value in parameters.values()):
            raise ValueError("parameters are a JSON object of whole numbers and words")
        return cls.of(family, parameters)

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


class StoredChoice(NamedTuple):
    """A measured trial for `rows` rows on the GPU `silicon_name`; `half` says that its sweep has not finished, `final`
    that it was timed in the finals, which verify it for nested rows too."""

    family: str
    parameters: dict[str, Value]
    digest: str
    rows: int
    us: float
    silicon_name: str
    trial_id: int
    half: bool
    final: bool


class Scratch(NamedTuple):
    """Workspace of a plan: allocated before its launches, filled with zeros where `zero` says so."""

    shape: tuple[int, ...]
    dtype: str
    zero: bool = False


class Launch(NamedTuple):
    """One kernel of a plan. `values`: further arguments, by name; `num_warps` overrides the config's; with `pdl`
    (programmatic dependent launch) it may start before the kernel ahead has ended, for which it then waits itself. With
    `together` all programs run at the same time, so many a multiprocessor: the compiler keeps to their registers, and
    the driver refuses a larger grid."""

    kernel: Any
    grid: tuple[int, ...]
    values: Mapping[str, int] = {}
    num_warps: int | None = None
    pdl: bool = False
    together: int | None = None


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
    """GPU time of one candidate. Times in microseconds a call; `blocks` are the times of all blocks, `sentinel_blocks`
    those of the sentinel in the same blocks; `score` is the median of their ratios (1.0 = as fast as the sentinel).
    `rounds` are the scores of rounds with buffers of their own. Of each block, where known: `conditions` by a sensor,
    `kept` (does it count; empty: all do), `round_of`."""

    us: float
    score: float
    sentinel_us: float
    blocks: tuple[float, ...]
    sentinel_blocks: tuple[float, ...]
    rounds: tuple[float, ...] = ()
    conditions: tuple[Conditions | None, ...] = ()
    kept: tuple[bool, ...] = ()
    round_of: tuple[int, ...] = ()


@dataclass(frozen=True)
class Trial:
    """A candidate and what became of it.

    In the finals `band` is the share by which the same kernel of this problem, measured twice, differs; `tied`: is the
    trial within that of the best (1), or so near that the tie-breakers choose among it and the best (2, see `ties`);
    `gains`: does it beat both the built-in default and torch's own op by more.
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
    tied: int | None = None
    gains: bool | None = None
