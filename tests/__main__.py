"""All tests: `python -m tests`, with options for pytest if need be.

Triton reads TRITON_INTERPRET when it is imported, and cannot compile afterwards. So there are two runs of pytest, one
for the tests marked `interpreter` and one for all others, those for a GPU among them; each on several cores.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from xml.etree import ElementTree

REPOSITORY = Path(__file__).resolve().parent.parent
PROCESSES = min(len(os.sched_getaffinity(0)), 8)
"""More of them would not fit side by side into the memory of a small GPU."""

RUNS = {"interpreter": "interpreter", "other": "not interpreter"}
NOTHING_COLLECTED = 5


def run(name: str, marks: str, options: list[str], report: Path) -> int:
    """One run of pytest; its exit code."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    if name == "interpreter":
        environment["TRITON_INTERPRET"] = "1"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n",
        str(PROCESSES),
        "-m",
        marks,
        f"--junitxml={report}",
        *options,
    ]
    began = time.monotonic()
    code = subprocess.run(command, cwd=REPOSITORY, env=environment).returncode
    told = "none of them was asked for" if options and code == NOTHING_COLLECTED else f"exit code {code}"
    print(f"{name} tests: {told}, {time.monotonic() - began:.0f} s", flush=True)
    return code


def count(report: Path, good: bool) -> dict[str, int]:
    """Tests by what became of them; a run that broke off counts as a failure at least."""
    suites = list(ElementTree.parse(report).getroot().iter("testsuite")) if report.exists() else []
    total, failed, errors, skipped = (
        sum(int(suite.get(name, 0)) for suite in suites) for name in ("tests", "failures", "errors", "skipped")
    )
    bad = failed + errors
    return {"passed": total - bad - skipped, "failed": bad if good else max(bad, 1), "skipped": skipped}


def main(options: list[str]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        reports = {name: Path(folder, f"{name}.xml") for name in RUNS}
        codes = {name: run(name, marks, options, reports[name]) for name, marks in RUNS.items()}
        # Options, such as the name of a file, may leave one of the runs nothing to do.
        good = {name: code == 0 or (code == NOTHING_COLLECTED and bool(options)) for name, code in codes.items()}
        counts = [count(reports[name], good[name]) for name in RUNS]
    if options and all(code == NOTHING_COLLECTED for code in codes.values()):
        print(f"no test is asked for by {' '.join(options)}")
        return NOTHING_COLLECTED
    print(", ".join(f"{sum(c[what] for c in counts)} {what}" for what in ("passed", "failed", "skipped")))
    return 0 if all(good.values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
