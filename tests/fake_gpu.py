"""A GPU that is not there: a measuring process with made-up times, a compiler that compiles nothing, a small space.

As a program it is the `tunegen` command on that GPU: `python fake_gpu.py PACKAGE PLAN ARGUMENT...`, where PACKAGE is a
folder by `make_resources` and PLAN a `FakeGpu` as JSON.

Every measuring process and every compiling one imports this module: it must not import torch, which takes a second.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from tunegen import paths
from tunegen.child import Facts
from tunegen.errors import CompileError, WorkerError
from tunegen.model import Config, Measurement, Problem, Resources, Silicon, Trial, TrialState
from tunegen.pool import compile_candidate
from tunegen.silicon import of_arch
from tunegen.worker import Worker

H200 = of_arch("sm_90")
TORCH_US, COMPILED_US = 30.0, 25.0
REPLAYED = 0.01
"""Seconds that a screening says it has measured."""
VERSIONS = {"tunegen": "0.1.0", "torch": "2.14", "triton": "3.8", "driver": "580", "gpu": "none"}
PROBLEM = Problem("rms_norm", "forward", 4096, 1024)

SPACE = """\
forward:
  tile:
    about: twenty candidates
    parameters:
      ROWS: [1, 2, 4, 8]
      num_warps: [1, 2, 4, 8, 16]
  old:
    about: never dispatched
    baseline: true
    parameters:
      num_warps: [1, 2]
defaults:
  forward:
    any:
      - {family: tile, ROWS: 2, num_warps: 4}
"""
DEFAULT = Config.of("tile", {"ROWS": 2, "num_warps": 4})
FILE_ORDER = [
    Config.of("tile", {"ROWS": rows, "num_warps": warps}) for rows in (1, 2, 4, 8) for warps in (1, 2, 4, 8, 16)
]
TILES = [DEFAULT, *(config for config in FILE_ORDER if config != DEFAULT)]
"""In the order in which they are tried."""
OLD = [Config.of("old", {"num_warps": warps}) for warps in (1, 2)]


def make_resources(folder: Path) -> Path:
    """A folder that serves as `paths.PACKAGE`: the space above, and a template for each of its families."""
    templates = folder / "templates" / "rms_norm"
    templates.mkdir(parents=True)
    for family in ("tile", "old"):
        (templates / f"forward_{family}.py.jinja").write_text("SAVE_RSTD = {{ save_rstd }}\n")
    (folder / "search_spaces").mkdir()
    (folder / "search_spaces" / "rms_norm.yaml").write_text(SPACE)
    return folder


def template_of(config: Config, package: Path | str) -> Path:
    return Path(package) / "templates" / "rms_norm" / f"forward_{config.family}.py.jinja"


def us_of(problem: Problem, config: Config) -> float:
    """The made-up time: 10 to 20 us for a config of a template, the same whenever and wherever it is asked for."""
    if not config.parameters:
        return TORCH_US if config.family == "torch" else COMPILED_US
    digest = hashlib.sha256(f"{problem.label()} {config.label()}".encode()).digest()
    return 10 + int.from_bytes(digest[:2], "big") / 6553.6


def measurement(us: float, blocks: int = 3) -> Measurement:
    return Measurement(us, us / 10, 10.0, (us,) * blocks, (10.0,) * blocks)


@dataclass
class FakeGpu:
    """`faults` says by label of a config what comes of it instead of a time, and of a problem what comes of opening it.
    `us` sets times by label; `jitter` is how far the three rounds of the finals lie apart. The file `log` gets a line
    for each thing that is done, with the process that did it. With `package`, trials have the digest of the templates
    there, as the measuring process finds them. `others` are architectures of further GPUs by number, `memory`
    is how many bytes they have more of."""

    log: str
    faults: dict[str, str] = field(default_factory=dict)
    us: dict[str, float] = field(default_factory=dict)
    jitter: float = 0.0
    opened: Problem = PROBLEM
    package: str = ""
    others: dict[str, str] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)
    device: int = 0

    def worker(self, seed: int = 0) -> Worker:
        return self.worker_on(0, seed)

    def worker_on(self, device: int, seed: int) -> Worker:
        """For one of several GPUs, in a process of its own, which knows nothing of a test's changes."""
        if self.package:
            paths.PACKAGE = Path(self.package)
        return Worker(device, seed, self.serve)

    def serve(self, connection, device: int, seed: int) -> None:
        """In place of `worker.serve`, in the child."""
        self.note("start")
        if fault := self.faults.get("start"):
            os._exit(3) if fault == "exit" else time.sleep(600)
        self.device = device
        silicon = of_arch(self.others.get(str(device), "sm_90"))
        silicon = replace(silicon, memory_bytes=silicon.memory_bytes + self.memory.get(str(device), 0))
        connection.send(Facts(silicon, VERSIONS))
        with contextlib.suppress(EOFError, ConnectionError):
            while True:
                method, arguments = connection.recv()
                connection.send(getattr(self, method)(*arguments))

    def open(self, problem: Problem) -> WorkerError | None:
        self.note(f"open {problem.label()}")
        fault = self.faults.get(problem.label(), "")
        again = fault == "out of memory again" and self.lines("open").count(problem.label()) > 1
        if fault == "out of memory" or again or (fault == "out of memory in finals" and len(self.lines("start")) > 1):
            return WorkerError("OutOfMemoryError: 2 TiB")
        if fault == "exit":
            os._exit(4)
        self.opened = problem
        return None

    def foresee(self, problem: Problem) -> None:
        self.note(f"foresee {problem.label()}")
        if self.faults.get("foresee") == "exit":
            os._exit(6)

    def screen(self, config: Config, resources: Resources | None):
        fault = self.faults.get(config.label(), "")
        trial = Trial(self.opened, config, TrialState.OK, resources=resources)
        if fault == "exit":
            os._exit(7)
        if fault == "hang":
            self.note(f"hang {config.label()}")
            time.sleep(600)
        if fault == "hang in C":
            self.note(f"hang {config.label()}")
            sum(itertools.repeat(0))  # no thread of this process runs any more, nor does a handler of a signal
        if fault == "waits for another process":
            self.wait_for_another_process()
        if fault == "illegal address":
            return (TrialState.CRASHED, fault), 0, True
        if fault == "out of memory":
            return (TrialState.RUNTIME, fault), 0, False
        if fault == "wrong":
            return replace(trial, state=TrialState.INCORRECT, reason="y: half of each row is NaN"), 2000, False
        if fault == "edits its template":
            template_of(config, self.package).write_text("EDITED = {{ save_rstd }}\n")
        self.note(f"screen {self.opened.label()} {config.label()}")
        found = replace(trial, digest=self.digest(config), measurement=measurement(self.time_of(config)))
        return found, 1000, False, {"measured replays": REPLAYED}

    def finals(self, trials: list[Trial]):
        for trial in trials:
            if self.faults.get(trial.config.label()) == "exit in finals":
                os._exit(8)
        if self.faults.get("finals") == "compiles layouts":  # which the compilers do ahead, and are done with by then
            templated = {trial.config.label() for trial in trials if trial.config.family == "tile"}
            end = time.monotonic() + 20
            while time.monotonic() < end and not templated <= set(self.lines("layouts")):
                time.sleep(0.02)
        good = [t for t in trials if self.faults.get(t.config.label()) != "wrong in finals"]
        self.note(f"finals {self.opened.label()} " + ", ".join(t.config.label() for t in good))
        return (
            [self.final(t) for t in good],
            3000,
            False,
        )

    def final(self, trial: Trial) -> Trial:
        found = measurement(self.time_of(trial.config), 20)
        turned = (-1, 0, 1) if trial.config.label() in self.us else (1, 0, -1)
        found = replace(found, rounds=tuple(found.score * (1 + self.jitter * turn) for turn in turned))
        return replace(trial, stage="final", digest=self.digest(trial.config) or trial.digest, measurement=found)

    def digest(self, config: Config) -> str:
        """Of the text that this process launches."""
        if not self.package or not config.parameters:
            return ""
        from tunegen.ops import op_spec
        from tunegen.render import combined_digest

        paths.PACKAGE = Path(self.package)
        return combined_digest(self.opened, config, op_spec(self.opened.op))

    def time_of(self, config: Config) -> float:
        return self.us.get(config.label()) or us_of(self.opened, config)

    def compile(self, problem: Problem, config: Config, silicon: Silicon) -> Resources:
        """In place of the compiler, in a process of the pool."""
        self.note(f"{'layouts' if problem.layout == 'nested' else 'compile'} {config.label()}")
        fault = self.faults.get(config.label(), "")
        if fault == "abort":
            os._exit(9)
        if fault == "slow":
            time.sleep(1)
        if fault == "compiles for ever":
            time.sleep(600)
        if fault == "waits for another process":
            self.wait_for_another_process()
        if fault == "out of host memory":
            raise MemoryError
        if fault == "too large":
            raise CompileError("tile_kernel: OutOfResources: shared memory")
        if fault == "compiles in earnest":
            paths.PACKAGE = Path(self.package)
            return compile_candidate(problem, config, silicon)
        spilled = {"spills": 64, "spills a little": 8}.get(fault, 0)
        return Resources(32, spilled, 1024, "binary")

    def wait_for_another_process(self) -> None:
        """As Triton waits for ptxas."""
        with subprocess.Popen(["sleep", "600"]) as other:
            self.note(f"started {other.pid}")

    def note(self, line: str) -> None:
        with open(self.log, "a") as file:
            file.write(f"{os.getpid()} {line}\n")

    def lines(self, word: str) -> list[str]:
        """What was noted under that first word, without it."""
        return [line[1:] and line[1][len(word) + 1 :] for line in self._log() if line[1].split()[0] == word]

    def processes(self) -> set[int]:
        return {int(line[0]) for line in self._log()}

    def _log(self) -> list[list[str]]:
        return [line.split(" ", 1) for line in Path(self.log).read_text().splitlines()]

    def command(self, package: Path, *arguments: str) -> list[str]:
        return [sys.executable, __file__, str(package), self.plan(), *arguments]

    def plan(self) -> str:
        return json.dumps(asdict(self) | {"opened": None})


def main(package: str, plan: str, *arguments: str) -> None:
    """The command; each trial that it reports as done is noted too."""
    from tunegen import commands
    from tunegen.cli import main as tunegen

    gpu = FakeGpu(**json.loads(plan))

    class Noted(commands.SweepProgress):
        def trial(self, trial: Trial) -> None:
            us = trial.measurement and trial.measurement.us
            key = [trial.stage, trial.problem.rows, trial.config.family, trial.config.to_json(), trial.state.value, us]
            gpu.note(f"told {json.dumps(key)}")
            super().trial(trial)

    commands.SweepProgress = Noted
    paths.PACKAGE = Path(package)
    commands.target_of = lambda arch: None
    commands.Worker = gpu.worker_on
    commands.devices_of = lambda text: [int(number) for number in (text or "0").split(",")]
    commands.sweep_gpu = functools.partial(commands.sweep_gpu, compile_one=gpu.compile)
    commands.sweep_gpus = functools.partial(commands.sweep_gpus, make_worker=gpu.worker_on, compile_one=gpu.compile)
    tunegen(arguments, prog_name="tunegen")


if __name__ == "__main__":
    main(*sys.argv[1:])
