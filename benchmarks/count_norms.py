"""The norm classes of the installed transformers, as `tunegen.patch` by name sees them: how many follow which contract,
and why the others are left.

    python benchmarks/count_norms.py
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
import warnings
from collections import Counter
from collections.abc import Iterator

import transformers
from torch import nn

from tunegen.errors import UnknownNormError
from tunegen.integrations.architectures import instance_of, norm_classes
from tunegen.integrations.recognition import PROBE_HIDDEN, Contract, is_candidate, recognised

SHOWN = 10
"""Names a reason."""


def classes() -> Iterator[type[nn.Module]]:
    """Every class called a norm, once, of every modeling module that can be imported here."""
    seen = set()
    for name in [entry.name for entry in pkgutil.iter_modules(transformers.models.__path__) if entry.ispkg]:
        try:
            module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
        except Exception as error:  # no such module, or a package that is not installed
            if not isinstance(error, ModuleNotFoundError):
                print(f"{name} cannot be imported: {error}", file=sys.stderr)
            continue
        for _, cls in norm_classes(module):
            if cls.__module__ == module.__name__ and cls not in seen:
                seen.add(cls)
                yield cls


def contract_of(cls: type[nn.Module]) -> tuple[Contract, str] | None:
    """Of the class, and a note where `patch` by name leaves it to `patch(model)`; None for what is no candidate."""
    note = ""
    try:
        module = instance_of(cls)
    except UnknownNormError as error:
        note = str(error)
        try:
            module = cls(PROBE_HIDDEN)
        except Exception:  # neither way
            raise error from None
    return (recognised(module)[1], note) if is_candidate(module) else None


def main() -> None:
    """Count and print."""
    warnings.simplefilter("ignore")
    found: Counter[tuple[str, float]] = Counter()
    in_models: list[str] = []
    left: dict[str, list[str]] = {}
    for cls in classes():
        try:
            if counted := contract_of(cls):
                contract, note = counted
                found[contract.casting, contract.offset] += 1
                if note:
                    in_models.append(f"{cls.__name__}: {note}")
        except UnknownNormError as error:
            left.setdefault(str(error), []).append(cls.__name__)
    print(f"transformers {transformers.__version__}: {found.total()} norm classes are an RMSNorm that tunegen computes")
    for (casting, offset), count in found.most_common():
        print(f"{count:5} casting {casting}, offset {offset:g}")
    print("\n".join(f"      of them only by patch(model): {text}" for text in in_models))
    print(f"{sum(map(len, left.values())):5} others with norm in their names are left")
    for reason, names in sorted(left.items(), key=lambda item: -len(item[1])):
        shown = [*sorted(names)[:SHOWN], *(["..."] if len(names) > SHOWN else [])]
        print(f"{len(names):5} {reason}: {', '.join(shown)}")


if __name__ == "__main__":
    main()
