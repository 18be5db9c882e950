"""How far from Hugging Face's loss curve a right norm is, and how far are wrong ones: that `tunegen gate` is not blind.

    python benchmarks/gate_controls.py --seeds 6 --out benchmarks/results/cpu_gate_controls.json

Trains the gate's small Qwen3, once a seed, with the norm without a fault and with each of the six faults of
`tests/faulty_norms.py`. The three figures are the gate's own, as `tunegen.gates.curves.judge` has them: "loss" is the
final loss over the baseline's, less one; "apart" the root mean square of the difference to the baseline's losses over
that of the furthest reordered run; "movement" how far the weight of a norm moved over the baseline's, less one, of the
norm that is furthest off. 500 steps of one seed take about two minutes on one core.
"""

from __future__ import annotations

import argparse
import json
import sys
from datetime import datetime, timezone
from pathlib import Path

import torch
import transformers
from gpus import need_gpus

import tunegen
from tunegen.gates import curves
from tunegen.gates.training import Setting

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from faulty_norms import FAULTS, RIGHT, norm_with

Figures = dict[str, list[float]]
"""By measure, one a seed."""

MEASURES = ("loss", "apart", "movement")


def main() -> None:
    """Train for each seed, print a table after each, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=6, help="as many, from 0 on")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--dtype", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--device", default="cpu", help="such as cuda:0")
    parser.add_argument("--out", type=Path, help="JSON file")
    arguments = parser.parse_args()
    if arguments.seeds < 1 or arguments.steps < 2 * curves.LAST:
        parser.error(f"--seeds is at least 1 and --steps at least {2 * curves.LAST}")
    device = torch.device(arguments.device)
    if device.type == "cuda":
        need_gpus()
    began = datetime.now(timezone.utc)
    found: dict[str, Figures] = {name: {measure: [] for measure in MEASURES} for name in (RIGHT, *FAULTS)}
    for seed in range(arguments.seeds):
        add(found, Setting(arguments.steps, seed, arguments.dtype), device)
        print(f"\n{seed + 1} of {arguments.seeds} seeds, {arguments.steps} steps, {arguments.dtype}, {device}")
        print(table(found), flush=True)
    if arguments.out is not None:
        record = {
            "command": " ".join(["python", *sys.argv]),
            "date": began.isoformat(timespec="seconds"),
            "versions": versions(device),
            "results": found,
        }
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(record, indent=2) + "\n")


def add(found: dict[str, Figures], setting: Setting, device: torch.device) -> None:
    """The figures of one seed, appended."""
    stage = curves.stage(setting, device)
    for name, figures in found.items():
        _, *judged = curves.judge(stage.run(norm_with(name)))
        for measure, check in zip(MEASURES, judged, strict=True):
            figures[measure].append(check.measured)


def table(found: dict[str, Figures]) -> str:
    """Smallest and largest of the seeds; a star where the gate turns every seed away."""
    limits = dict(zip(MEASURES, (curves.FINAL, curves.APART, curves.MOVEMENT), strict=True))
    lines = ["".join(["norm".ljust(26), *(f"{name} (at most {limit:g})".ljust(28) for name, limit in limits.items())])]
    for name, figures in found.items():
        cells = []
        for measure, values in figures.items():
            seen = all(not value <= limits[measure] for value in values)
            cells.append(f"{min(values):.3g} to {max(values):.3g}{' *' if seen else ''}".ljust(28))
        lines.append("".join([name.ljust(26), *cells]))
    return "\n".join(line.rstrip() for line in lines)


def versions(device: torch.device) -> dict[str, str]:
    """Versions that the figures depend on, and the GPU."""
    found = {"tunegen": tunegen.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
    return found | ({"gpu": torch.cuda.get_device_name(device)} if device.type == "cuda" else {})


if __name__ == "__main__":
    main()
