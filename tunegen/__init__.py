"""tunegen: kernel variants from templates x search spaces, checked against float64, measured, stored, dispatched.

from tunegen import rms_norm, RMSNorm
"""

from .ops.rms_norm import rms_norm
from .ops.rms_norm_module import RMSNorm

__all__ = ["RMSNorm", "rms_norm"]
__version__ = "0.1.0"
