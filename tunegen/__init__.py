"""tunegen: kernel variants from templates x search spaces, checked against float64, measured, stored, dispatched.

from tunegen import rms_norm, add_rms_norm, RMSNorm
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .explanation import explain
    from .integrations.patching import patch, unpatch
    from .integrations.recording import record
    from .ops.add_rms_norm import add_rms_norm, add_rms_norm_
    from .ops.rms_norm import rms_norm
    from .ops.rms_norm_module import RMSNorm
    from .policies import policy
    from .warming import warmup

__all__ = [
    "RMSNorm",
    "add_rms_norm",
    "add_rms_norm_",
    "explain",
    "patch",
    "policy",
    "record",
    "rms_norm",
    "unpatch",
    "warmup",
]
__version__ = "0.1.0"

_HOMES = {
    "rms_norm": ".ops.rms_norm",
    "add_rms_norm": ".ops.add_rms_norm",
    "add_rms_norm_": ".ops.add_rms_norm",
    "RMSNorm": ".ops.rms_norm_module",
    "explain": ".explanation",
    "patch": ".integrations.patching",
    "unpatch": ".integrations.patching",
    "policy": ".policies",
    "warmup": ".warming",
    "record": ".integrations.recording",
}


def __getattr__(name: str) -> Any:
    """Imports on first use: torch takes two seconds, which `tunegen --help` need not wait."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found = getattr(import_module(_HOMES[name], __name__), name)
    return found
