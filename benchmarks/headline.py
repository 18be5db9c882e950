"""The figures of README: tuned `rms_norm`, through the public function, beside `copy_` on the same GPU in the same run.

    python benchmarks/headline.py --shape 16384x4096 --shape 8192x5120 --out benchmarks/results/headline.json

Timing is tunegen's own protocol (`tunegen/bench.py`): graph replay over rotated inputs, interleaved blocks. "share"
is the time of `torch.Tensor.copy_` on M x N over the kernel's time; for backward 1.5 x the copy's time, since three
streams move instead of two. Bytes are what torch's allocator handed out during one call. The first call is timed in a
fresh process.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpus import need_gpus
from rivals.calls import calls_of
from rivals.cells import Cell
from rivals.natives import choice_of, functional, ours
from torch import Tensor

from tunegen import dispatch, rms_norm
from tunegen.bench import FINAL_BLOCKS, FINAL_ROUNDS, Bench, Call
from tunegen.model import DIRECTIONS, Problem
from tunegen.ops import op_spec
from tunegen.serving import versions


def main() -> None:
    """Measure each shape, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", action="append", required=True, help="MxN, several allowed")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    need_gpus()
    results = []
    for shape in arguments.shape:
        rows, hidden = (int(part) for part in shape.split("x"))
        results.append(measure(rows, hidden, arguments.dtype))
        print(json.dumps(results[-1]))
    record = {
        "command": " ".join(["python", *sys.argv]),
        "date": datetime.date.today().isoformat(),
        "versions": versions(0),
        "results": results,
        "first_call_seconds": first_call(results[0]["rows"], results[0]["hidden"]),
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record["first_call_seconds"]))


def measure(rows: int, hidden: int, dtype: str) -> dict[str, Any]:
    """Times and bytes of one shape."""
    device = torch.device("cuda", 0)
    problem = Problem("rms_norm", "backward", hidden, rows, dtype, dtype, weight_grad=True)
    silicon = dispatch.silicon_of(0)
    bench = Bench(op_spec("rms_norm"), problem, device, silicon.l2_bytes, silicon.sms)
    calls: dict[str, Call] = {
        "copy": lambda i: bench.tensors[i]["dx"].copy_(bench.tensors[i]["x"]),
    }
    for direction in DIRECTIONS:
        cell = Cell("rms_norm", rows, hidden, direction, dtype)
        calls[direction] = calls_of(bench, ours(cell))
        calls[f"{direction}_torch"] = calls_of(bench, functional(cell))
    graphs = [bench.capture(call) for call in calls.values()]
    times = dict(zip(calls, map(statistics.median, bench.time(graphs, FINAL_ROUNDS * FINAL_BLOCKS)), strict=True))
    again = dict(zip(calls, map(statistics.median, bench.time(graphs, FINAL_ROUNDS * FINAL_BLOCKS)), strict=True))
    streams = {"forward": 1.0, "backward": 1.5}
    return {
        "rows": rows,
        "hidden": hidden,
        "dtype": dtype,
        "us": times,
        "us_again": again,
        "share_of_copy": {name: factor * times["copy"] / times[name] for name, factor in streams.items()},
        "over_torch": {name: times[f"{name}_torch"] / times[name] for name in streams},
        "bytes": allocated(bench.tensors[0]),
        "choice": {name: choice_of(Cell("rms_norm", rows, hidden, name, dtype)) for name in streams},
    }


def allocated(tensors: dict[str, Tensor]) -> dict[str, int]:
    """Bytes that one warm call takes at its peak: forward without and with a gradient, backward; x and w are inputs."""
    x, w, dy = tensors["x"], tensors["w"], tensors["dy"]
    grown_x, grown_w = x.detach().requires_grad_(), w.detach().requires_grad_()
    y = rms_norm(grown_x, grown_w)
    torch.cuda.synchronize()

    def peak(call: Callable[[], object]) -> int:
        call()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    return {
        "x": x.numel() * x.element_size(),
        "forward": peak(lambda: rms_norm(x, w)),
        "forward_with_gradient": peak(lambda: rms_norm(grown_x, grown_w)),
        "backward": peak(lambda: torch.autograd.grad(y, (grown_x, grown_w), dy, retain_graph=True)),
    }


FIRST_CALL = """
import json, sys, time
rows, hidden = map(int, sys.argv[1:])
marks = [("start", time.perf_counter())]
def mark(name): marks.append((name, time.perf_counter()))
import torch
mark("import torch")
x = torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16)
w = torch.ones(hidden, device="cuda", dtype=torch.bfloat16)
torch.cuda.synchronize()
mark("torch's CUDA start")
import tunegen
mark("import tunegen")
import triton
mark("import triton")
from tunegen import dispatch
from tunegen.key import Key
from tunegen.model import rows_bucket
bucket = rows_bucket(rows)
choice = dispatch.choose(Key("rms_norm", "forward", hidden, bucket, x.dtype, w.dtype, "fp32", False, False, 0))
mark("choice")
if choice.config is not None:
    choice.variant(False, 0.0)
mark("text of the kernel, import it")
tunegen.rms_norm(x, w)
torch.cuda.synchronize()
mark("load the kernel from Triton's cache, launch")
tunegen.rms_norm(x, w)
torch.cuda.synchronize()
mark("second call")
print(json.dumps({b[0]: round(b[1] - a[1], 4) for a, b in zip(marks, marks[1:])}))
"""


def first_call(rows: int, hidden: int) -> dict[str, float]:
    """Seconds of each part of a first call in a new process, compile cache and index warm from calls of this one."""
    command = [sys.executable, "-c", FIRST_CALL, str(rows), str(hidden)]
    runs = [
        json.loads(subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ).stdout)
        for _ in range(3)
    ]
    best = min(runs, key=lambda parts: sum(parts.values()))
    ours = sum(v for k, v in best.items() if k not in ("import torch", "torch's CUDA start", "second call"))
    return {**best, "beyond torch's CUDA start": round(ours, 4)}


if __name__ == "__main__":
    main()
