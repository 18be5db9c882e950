"""What decides which variant answers a call."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .model import Problem
from .policies import FASTEST
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
