"""Trials a second of a sweep on one GPU and on all of them: the same problems, each in a fresh database.

    python benchmarks/two_gpus.py --hidden 4096 5120 --out two_gpus.json
    python benchmarks/two_gpus.py --from benchmarks/table.json --out two_gpus.json

Every run is `tunegen sweep` in a process of its own, with new and empty folders for rendered kernels and for the caches
of Triton and Inductor: both compile everything. The runs take turns, one GPU first. `measured_share` of one on a single
GPU is what of its whole time, start included, were replays that are measured.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpus import need_gpus
from sweeping import record, write

from tunegen.store import Store

COMMAND = (sys.executable, "-m", "tunegen")
CACHES = {"TUNEGEN_BUILD": "build", "TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}


def run(command: Sequence[str], arguments: Sequence[str], gpus: str, folder: Path) -> dict[str, Any]:
    """One sweep with everything new in `folder`."""
    folder.mkdir(parents=True)
    db = folder / "tune.db"
    caches = {name: str(folder / place) for name, place in CACHES.items()}
    began = time.monotonic()
    done = subprocess.run(
        [*command, "sweep", *arguments, "--gpus", gpus, "--db", str(db), "--json"],
        env={**os.environ, "CI": "1", **caches},
        capture_output=True,
        text=True,
    )
    seconds = time.monotonic() - began
    if done.returncode:
        raise SystemExit(f"--gpus {gpus}: {done.stderr}")
    with Store.read(db) as store:
        trials = store.trials()
    spent = json.loads(done.stdout)["seconds_spent"]
    measured = {"measured_share": round(spent["measured replays"] / seconds, 3)} if gpus == "0" else {}
    return {
        "gpus": gpus,
        "seconds": round(seconds, 2),
        "trials": len(trials),
        "timed": sum(row["state"] == "ok" for row in trials),
        "trials_per_second": round(len(trials) / seconds, 3),
        "versions": sorted({f"{row['silicon']}, torch {row['torch']}, triton {row['triton']}" for row in trials}),
        "seconds_spent": spent,
        **measured,
    }


def summary(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians over turns, and how many times as many trials a second all GPUs make."""
    rates = {
        gpus: statistics.median(one["trials_per_second"] for one in runs if one["gpus"] == gpus)
        for gpus in dict.fromkeys(one["gpus"] for one in runs)
    }
    one, every = rates.values()
    return {"trials_per_second": rates, "times": round(every / one, 3)}


def others(text: str) -> str:
    """What `--gpus` takes: anything but GPU 0 alone, which it is held against."""
    if text.strip() == "0":
        raise argparse.ArgumentTypeError("0 is what it is held against: name other GPUs too, or all")
    return text


def asked() -> argparse.Namespace:
    """The command line; `sweep` are the arguments that say what is tuned."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--hidden", nargs="+", default=["4096", "5120"])
    what.add_argument("--from", dest="recording", metavar="FILE", help="a recording, as in `tunegen sweep --from`")
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--gpus", type=others, default="all", help="what is held against GPU 0")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="a new one, to leave each run's database in")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    widths = [part for width in options.hidden for part in ("--hidden", width)]
    options.sweep = ["--from", options.recording] if options.recording else widths
    return options


def main() -> None:
    """Run, print, write."""
    options = asked()
    need_gpus(2)
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as place:
        for turn in range(options.turns):
            for gpus in ("0", options.gpus):
                runs.append(run(COMMAND, options.sweep, gpus, (options.keep or Path(place)) / f"{turn}-{gpus}"))
                print(runs[-1])
    found = summary(runs)
    write(options.out, record({"summary": found, "runs": runs}))
    print(found)


if __name__ == "__main__":
    main()
