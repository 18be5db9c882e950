"""What every script here that measures on GPUs asks before anything else."""

from __future__ import annotations

import sys
from pathlib import Path


def need_gpus(count: int = 1) -> None:
    """End with one sentence and exit code 2 where torch sees fewer NVIDIA GPUs."""
    import torch

    seen = torch.cuda.device_count() if torch.cuda.is_available() and torch.version.hip is None else 0
    if seen < count:
        wanted = "an NVIDIA GPU" if count == 1 else f"{count} NVIDIA GPUs"
        print(f"{Path(sys.argv[0]).name} measures on {wanted}, and torch sees {seen or 'none'} here", file=sys.stderr)
        sys.exit(2)
