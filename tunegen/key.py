"""What decides which variant answers a call."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import policies
from .model import RMS_NORM, Problem, rows_bucket
from .policies import DETERMINISTIC, FASTEST, INVARIANT, INVARIANT_ROWS
from .reference import DTYPE_NAMES


class Key(NamedTuple):
    """What the hot look-up is by: plain values that are at hand in every call. `rows` is the bucket; dtypes are
    torch's."""

    op: str
    direction: str
    hidden: int
    rows: int
    x_dtype: torch.dtype
    weight_dtype: torch.dtype | None
    casting: str
    offset: bool
    weight_grad: bool
    device: int
    sum_in_fp32: bool = False
    policy: str = FASTEST

    def problem(self) -> Problem:
        """The same as the database knows it."""
        weight_dtype = None if self.weight_dtype is None else DTYPE_NAMES[self.weight_dtype]
        return Problem(
            op=self.op,
            direction=self.direction,
            hidden=self.hidden,
            rows=self.rows,
            x_dtype=DTYPE_NAMES[self.x_dtype],
            weight_dtype=weight_dtype,
            casting=self.casting,
            offset=self.offset,
            weight_grad=self.weight_grad,
            sum_in_fp32=self.sum_in_fp32,
            policy=self.policy,
        )


def policy_of(argument: str | None, traced: bool = False) -> str:
    """The policy that a call with `policy=argument` is under; `traced` while a compiler reads this. Raises ValueError
    for an unknown one."""
    policy = policies.asked_for(argument, traced)
    return DETERMINISTIC if policy == FASTEST and torch.are_deterministic_algorithms_enabled() else policy


def key_of(
    direction: str,
    x: Tensor,
    weight: Tensor | None,
    offset: float,
    casting: str,
    weight_grad: bool,
    op: str = RMS_NORM,
    sum_in_fp32: bool = False,
    *,
    policy: str | None = None,
) -> Key:
    """What the hot look-up is by, for these arguments; without a policy, under the one in force."""
    hidden = x.shape[-1]
    policy = policy or policy_of(None)
    return Key(
        op=op,
        direction=direction,
        hidden=hidden,
        # A choice holds for its whole bucket, whichever row count asks first.
        rows=INVARIANT_ROWS if policy == INVARIANT else rows_bucket(x.numel() // hidden),
        x_dtype=x.dtype,
        weight_dtype=None if weight is None else weight.dtype,
        casting=casting,
        offset=weight is not None and offset != 0.0,
        weight_grad=weight_grad,
        device=x.device.index,
        sum_in_fp32=sum_in_fp32,
        policy=policy,
    )
