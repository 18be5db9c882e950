"""The first call in a new process, with a cold and a warm compile cache, beside an article's kernel under
`triton.autotune`.

    python benchmarks/first_call.py --rows 16384 --hidden 4096 --db tune.db --out first_call.json

Each run is a new process with Triton's cache folder of its own, new and empty, and counts seconds from when torch has
started CUDA until the result of the first call is there; imports of tunegen and triton count. Six kinds:

- tunegen: the choice of the database; renders, compiles one kernel, launches it; build folder new, too;
- autotune: 24 configs (num_warps 1 to 32 x num_stages 1 to 4, `article_norm.py`), compiled and timed in the call;
- autotune, stored: the same with `cache_results=True`, whose stored timings a run before has left; its compiled kernels
  were removed again, so that one is compiled, as after an upgrade or on a new machine that got the file;
- tunegen, from its index: another process with all that the first has left;
- tunegen, again: the same without what tunegen remembers (its index, and Triton's digest of itself);
- tunegen, compiles: with that, but Triton's cache removed: as "autotune, stored", one kernel is compiled.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from gpus import need_gpus
from sweeping import record, write

STORED = "*.autotune.json"
"""The name under which Triton stores what `cache_results` keeps, in its cache folder."""

CHILD = """
import json, sys, time
kind, rows, hidden = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
import torch
x = torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16)
w = torch.ones(hidden, device="cuda", dtype=torch.bfloat16)
torch.cuda.synchronize()
began = time.perf_counter()
if kind.startswith("tunegen"):
    from tunegen import rms_norm
    call = lambda: rms_norm(x, w)
else:
    import article_norm
    kernel = article_norm.tuned(kind == "autotune, stored")
    call = None if kernel is None else lambda: article_norm.rms_norm(kernel, x, w)
seconds, answer = None, ""
if call is not None:
    y = call()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    torch.testing.assert_close(y, torch.nn.functional.rms_norm(x, (hidden,), w, 1e-6), rtol=0.02, atol=0.02)
    if kind.startswith("tunegen"):
        import tunegen.dispatch
        answer = str(tunegen.dispatch.answers())
    else:
        answer = str(kernel.best_config)
import triton
print(json.dumps({"seconds": seconds, "answer": answer, "torch": torch.__version__, "triton": triton.__version__,
                  "gpu": torch.cuda.get_device_name()}))
"""


def run(kind: str, rows: int, hidden: int, folder: Path, db: Path | None) -> dict[str, Any]:
    """One process; `folder` holds its caches."""
    here = Path(__file__).resolve().parent
    environment = {
        **os.environ,
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "TUNEGEN_BUILD": str(folder / "build"),
        "PYTHONPATH": os.pathsep.join([str(here.parent), str(here), os.environ.get("PYTHONPATH", "")]),
        **({"TUNEGEN_DB": str(db.absolute())} if db else {}),
    }
    command = [sys.executable, "-c", CHILD, kind, str(rows), str(hidden)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{kind}: {done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def forget_kernels(cache: Path) -> int:
    """Leave only stored timings in a cache folder of Triton's; how many there are."""
    kept = 0
    for folder in [path for path in cache.iterdir() if path.is_dir()]:
        if stored := list(folder.glob(STORED)):
            kept += len(stored)
            for path in folder.iterdir():
                if path not in stored:
                    path.unlink()
        else:
            shutil.rmtree(folder)
    return kept


def forget_remembered(build: Path) -> int:
    """Leave only rendered kernels in a build folder; how many files of the other kind there were."""
    found = [path for path in build.iterdir() if path.suffix in (".json", ".txt")]
    for path in found:
        path.unlink()
    return len(found)


def kinds(rows: int, hidden: int, db: Path | None) -> list[tuple[str, dict[str, Any]]]:
    """One turn: each kind once."""
    found = []
    with tempfile.TemporaryDirectory() as place:
        own, article, stored = (Path(place, name) for name in ("own", "article", "stored"))
        found.append(("tunegen", run("tunegen", rows, hidden, own, db)))
        found.append(("tunegen, from its index", run("tunegen, from its index", rows, hidden, own, db)))
        if forget_remembered(own / "build") < 2:
            raise SystemExit("tunegen has remembered nothing in its build folder")
        found.append(("tunegen, again", run("tunegen, again", rows, hidden, own, db)))
        shutil.rmtree(own / "triton")
        found.append(("tunegen, compiles", run("tunegen, compiles", rows, hidden, own, db)))
        found.append(("autotune", run("autotune", rows, hidden, article, db)))
        if run("autotune, stored", rows, hidden, stored, db)["seconds"] is not None:
            if not forget_kernels(stored / "triton"):
                raise SystemExit(f"triton.autotune has stored no timings as {STORED}")
            found.append(("autotune, stored", run("autotune, stored", rows, hidden, stored, db)))
    return found


def summary(turns: list[list[tuple[str, dict[str, Any]]]]) -> dict[str, Any]:
    """Seconds by kind over turns, and the answer of the last."""
    found: dict[str, Any] = {}
    for turn in turns:
        for kind, one in turn:
            found.setdefault(kind, {"seconds": []})["seconds"].append(round(one["seconds"], 3))
            found[kind]["answer"] = one["answer"]
    for one in found.values():
        one["median"], one["least"] = statistics.median(one["seconds"]), min(one["seconds"])
    return found


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=16384)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--db", type=Path, help="tune.db with the tuned choice [default: the usual one]")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    need_gpus()
    turns = [kinds(options.rows, options.hidden, options.db) for _ in range(options.turns)]
    found = summary(turns)
    first = turns[0][0][1]
    versions = {name: first[name] for name in ("torch", "triton", "gpu")}
    write(options.out, record({"rows": options.rows, "hidden": options.hidden, "first_call": found}, **versions))
    for kind, one in found.items():
        print(f"{kind:24} {one['median']:8.3f} s  {one['answer']}")


if __name__ == "__main__":
    main()
