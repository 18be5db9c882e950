"""What the operators take: checks with errors that name the value, the limit and what to do."""

from __future__ import annotations

import sys

from torch import Tensor

from ..model import CASTINGS
from ..reference import DTYPE_NAMES


def check(x: Tensor, weight: Tensor | None, eps: float, offset: float, casting: str) -> None:
    """Raise what `rms_norm` documents for arguments that it does not take."""
    if not isinstance(x, Tensor) or x.dtype not in DTYPE_NAMES:
        raise TypeError(f"x must be a tensor of {_dtypes()}, got {_kind(x)}; convert it first, as with x.float()")
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"x must have a last axis of at least 1 element, got shape {tuple(x.shape)}")
    for name, value in (("eps", eps), ("offset", offset)):
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"{name} must be a Python number, got {_kind(value)}; pass float({name})")
        if not abs(value) <= sys.float_info.max:  # NaN and integers beyond a double too
            raise ValueError(f"{name} must be a finite double, got {value if isinstance(value, float) else 'more'}")
    if eps < 0:
        raise ValueError(f"eps must be at least 0, got {eps}")
    if casting not in CASTINGS:
        raise ValueError(f"casting must be one of {', '.join(CASTINGS)}, got {casting!r}")
    if weight is None:
        return
    if not isinstance(weight, Tensor) or weight.dtype not in DTYPE_NAMES:
        raise TypeError(f"weight must be a tensor of {_dtypes()} or None, got {_kind(weight)}")
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"weight must have shape ({x.shape[-1]},), the last axis of x, got {tuple(weight.shape)}")
    if weight.device != x.device:
        raise ValueError(f"x is on {x.device} and weight on {weight.device}; move one of them")


def _dtypes() -> str:
    return ", ".join(DTYPE_NAMES.values())


def _kind(value: object) -> str:
    return str(value.dtype) if isinstance(value, Tensor) else type(value).__name__
