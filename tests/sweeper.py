"""Starts `tunegen sweep` on the fake GPU as often as a test asks, by fork: the imports alone would take 2 s a sweep.

As a program it reads requests from standard input, one a line as JSON, and answers with one line each: the pid of a
sweep that it started, or how one ended. Each sweep is a process of its own, the leader of its group.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent


class Sweep:
    """A sweep that runs, or ran."""

    def __init__(self, sweeper: Sweeper, pid: int, output: Path) -> None:
        self.sweeper, self.pid, self.output, self.code = sweeper, pid, output, None

    def running(self) -> bool:
        return self._told(block=False) is None

    def wait(self) -> int:
        """The exit code, as `subprocess` has it."""
        return self._told(block=True)

    def kill(self) -> int:
        return self.signal(signal.SIGKILL)

    def signal(self, number: int, group: bool = False) -> int:
        """Send it, to the whole group as a terminal does, unless the sweep has ended; returns the exit code."""
        if self.running():
            (os.killpg if group else os.kill)(self.pid, number)
        return self.wait()

    def stdout(self) -> str:
        return self.output.read_text()

    def stderr(self) -> str:
        return Path(f"{self.output}.err").read_text()

    def _told(self, block: bool) -> int | None:
        if self.code is None:
            self.code = self.sweeper.ask({"wait": self.pid, "block": block})
        return self.code


class Sweeper:
    """The process that forks; close it when the tests are done."""

    def __init__(self) -> None:
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "CI": "1"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen([sys.executable, __file__], env=environment, **pipes)

    def start(self, package: Path, plan: str, arguments: list[str], output: Path, file_limit: int = 0) -> Sweep:
        """With `file_limit` the sweep can make no file larger than so many bytes."""
        request = {"package": str(package), "plan": plan, "arguments": arguments, "limit": file_limit}
        return Sweep(self, self.ask(request | {"output": str(output)}), output)

    def ask(self, request: dict[str, object]) -> int | None:
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        self.process.communicate(timeout=60)


def serve() -> None:
    """Body of the program; returns in a child, with what it is to do."""
    import fake_gpu

    import tunegen.commands  # noqa: F401 - once, for all sweeps

    gc.freeze()  # a child would else copy these pages as it collects garbage

    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            pid, status = os.waitpid(request["wait"], 0 if request["block"] else os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            answer = os.fork()
            if not answer:
                become(request)
                fake_gpu.main(request["package"], request["plan"], *request["arguments"])
        print(json.dumps(answer), flush=True)


def become(request: dict[str, object]) -> None:
    """What tells a child from its parent: its group, its files, its limit, and one compiling process to save time."""
    os.setsid()
    os.sched_getaffinity = lambda pid: {0}
    for target, path in ((0, os.devnull), (1, request["output"]), (2, f"{request['output']}.err")):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(descriptor, target)
        os.close(descriptor)
    if request["limit"]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (request["limit"], resource.RLIM_INFINITY))


if __name__ == "__main__":
    serve()
