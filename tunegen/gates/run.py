"""All three gates, and what they ran on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch

from .. import dispatch, paths
from ..child import installed_versions
from ..model import TORCH_FAMILY
from ..serving import versions
from . import bf16, curves, double
from .checks import Check, Norm, Say, silent, tunegens
from .curves import Curves
from .eager import REORDERED
from .model import hugging_faces_norm
from .training import Setting

REFERENCE = "the reference in torch operators was checked and not the kernels"


@dataclass(frozen=True)
class Outcome:
    """What the gates found. `subject` says in one line what was checked, `answers` which config answered each problem
    on a GPU."""

    checks: Sequence[Check]
    curves: Curves
    setting: Setting
    subject: str
    versions: dict[str, str]
    answers: dict[str, str]

    @property
    def kernels(self) -> bool:
        """Whether it was the dispatch of a GPU that answered, and not the reference in torch operators."""
        return bool(self.answers)

    @property
    def reasons(self) -> list[str]:
        """Why the norm does not pass; empty if it does."""
        return [check.reason() for check in self.checks if not check.passed]


def run(setting: Setting, device: torch.device, say: Say = silent, norm: Norm = tunegens) -> Outcome:
    """Put `norm` through all gates; one that it does not pass does not stop the next.

    Raises ExtraMissingError without transformers; what `norm` itself raises is passed on.
    """
    module = hugging_faces_norm()
    checks = double.check(norm, setting.seed, device, lambda text: say(f"gate 1 of 3: float64, {text}"))
    checks += bf16.check(norm, module, setting.seed, device, lambda text: say(f"gate 2 of 3: bf16, {text}"))
    step_done = _steps(setting, lambda text: say(f"gate 3 of 3: loss curves, {text}"))
    found = curves.stage(setting, device, step_done).run(norm, step_done)
    checks += curves.judge(found)
    answers = dispatch.answers() if device.type == "cuda" else {}
    return Outcome(checks, found, setting, _subject(device, answers), _versions(device), answers)


def _steps(setting: Setting, say: Say) -> Callable[[], None]:
    """A function to be called after each step of the trainings in their order; says where they are, every ten steps."""
    others = [f"Hugging Face's arithmetic with {name}" for name in REORDERED]
    trainings, done = ["Hugging Face's norm", *others, "the norm under test"], 0

    def where() -> str:
        number, step = divmod(min(done, curves.RUNS * setting.steps - 1), setting.steps)
        return f"{trainings[number]}, step {step} of {setting.steps}, training {number + 1} of {curves.RUNS}"

    def step_done() -> None:
        nonlocal done
        done += 1
        if done % 10 == 0:
            say(where())

    say(where())
    return step_done


def _subject(device: torch.device, answers: dict[str, str]) -> str:
    if device.type != "cuda":
        return f"No GPU was used: {REFERENCE}."
    name = torch.cuda.get_device_name(device)
    if not answers:
        why = "TUNEGEN_DISABLE is set" if paths.disabled() else "kernels do not run here"
        return f"{name}, but {why}: {REFERENCE}."
    by_torch = sum(label == TORCH_FAMILY for label in answers.values())
    rest = f", torch's own op in {by_torch} of them: no kernel was checked there" if by_torch else ""
    return f"{name}: kernels of tunegen answered in {len(answers)} kinds of calls{rest}."


def _versions(device: torch.device) -> dict[str, str]:
    """Of torch, triton, transformers and, on a GPU, its driver, with its name; of tunegen where it is installed."""
    found = versions(device.index) if device.type == "cuda" else installed_versions()
    with contextlib.suppress(PackageNotFoundError):
        found["transformers"] = version("transformers")
    return found
