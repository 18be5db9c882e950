"""A training step of Qwen3-8B's widths, with each way to compute its norms, side by side on one GPU.

    python benchmarks/qwen3_step.py record --layers 16 --out benchmarks/results/qwen3_problems.json
    tunegen sweep --from benchmarks/results/qwen3_problems.json
    python benchmarks/qwen3_step.py measure --layers 16 --out benchmarks/results/qwen3_step.json

A step is forward with loss, backward, and fused AdamW in bf16. The weights are random. Variants share one model in one
process and take turns, in an order that is shuffled each turn; factors are medians of the ratios within a turn, with
their 95 % interval. "eager again" is eager once more: what the two differ by is the band. torch.compile runs in
processes of its own, each beside eager. Peak memory is that of torch's allocator over a step. The share of norms is
that of the profiler (`norm_profile.py`). The bound is what the step would gain if each norm call ran at the speed of
the sweep's sentinel, a copy (backward: an addition) of its bytes.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from gpus import need_gpus
from norm_profile import profiled
from paired import ratio
from step_figures import bound, compared, table
from step_variants import VARIANTS, State, dressed, look, wear
from torch import nn

import tunegen
from tunegen import dispatch
from tunegen.serving import versions

WIDTHS = {
    "8b": {"hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8},
    "tiny": {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2},
}
VOCABULARY = {"8b": 151936, "tiny": 512}
COMPILED = ("compile", "compile + ours")
PROFILED = ("eager", "ours", "Liger's norm alone")


def main() -> None:
    """Record, measure, or measure one compiled variant (called by `measure`)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["record", "measure", "compiled", "logits"])
    parser.add_argument("--widths", choices=list(WIDTHS), default="8b")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=20, help="turns of each variant")
    parser.add_argument("--variant", action="append", help="only these")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    need_gpus()
    torch.manual_seed(0)
    actions = {"record": write_recording, "measure": measure, "compiled": compiled, "logits": logits}
    actions[given.what](given)


def save(given: argparse.Namespace, found: dict[str, Any]) -> None:
    """Write what was found so far, with what it was found on."""
    record = {
        "command": " ".join(["python", *sys.argv]),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="minutes"),
        "versions": {"tunegen": tunegen.__version__, **versions(0), **dict(libraries())},
        "model": described(given),
        **found,
        "answers": dispatch.answers(),
    }
    given.out.write_text(json.dumps(record, indent=2) + "\n")


def libraries() -> Iterator[tuple[str, str]]:
    """The other packages that a figure depends on, if they are there."""
    for name in ("transformers", "liger-kernel"):
        with suppress(PackageNotFoundError):
            yield name, version(name)


def qwen3(given: argparse.Namespace) -> nn.Module:
    """Random weights, made on the GPU in bf16; attention is SDPA."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        **WIDTHS[given.widths],
        head_dim=128,
        num_hidden_layers=given.layers,
        vocab_size=VOCABULARY[given.widths],
        tie_word_embeddings=False,
        attn_implementation="sdpa",
        use_cache=False,
    )
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = Qwen3ForCausalLM(config).train()
    torch.set_default_dtype(torch.float32)
    return model


def inputs(given: argparse.Namespace) -> dict[str, torch.Tensor]:
    """Random tokens, which are their own labels."""
    ids = torch.randint(VOCABULARY[given.widths], (given.batch, given.sequence), device="cuda")
    return {"input_ids": ids, "labels": ids}


def write_recording(given: argparse.Namespace) -> None:
    """The norm problems of one step, for `tunegen sweep --from`."""
    recording = tunegen.record(qwen3(given), inputs(given))
    recording.save(given.out)
    print(recording)


class Step:
    """One training step, timed on the GPU."""

    def __init__(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> None:
        self.model, self.batch = model, batch
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def run(self, call: Callable[..., Any] | None = None) -> float:
        """Milliseconds of a step of the model, or of its compiled form."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        model = self.model if call is None else call  # a compiled model has no truth value
        loss = model(**self.batch).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)


def measure(given: argparse.Namespace) -> None:
    """All eager variants in turns, the profile, and torch.compile in processes of its own."""
    model, batch = qwen3(given), inputs(given)
    names = given.variant or list(VARIANTS)
    states, step = dressed(model, names), Step(model, batch)
    peaks = {name: peak_of(states[name], step) for name in names}
    times = in_turns(states, step, given.rounds)
    wear(states["eager"])
    recording = tunegen.record(model, batch)
    profiles, power = {}, {}
    for name in [name for name in PROFILED if name in states]:
        wear(states[name])
        profiles[name] = profiled(model, step.run)
        power[name] = sampled(step)
    wear(states["eager"])
    del model, states, step
    torch.cuda.empty_cache()
    found = {
        **compared(times),
        "peak_gb": {name: peak / 1e9 for name, peak in peaks.items()},
        **bound(times, profiles, recording),
        "clock_and_power": power,
        "compiled": {},
        "profiles": {name: profile._asdict() for name, profile in profiles.items()},
        "samples_ms": times,
    }
    for name in () if given.variant else COMPILED:
        save(given, found)  # of minutes that a failure of the next process must not lose
        found["compiled"][name] = in_another_process(name, given)
    save(given, found)
    print(table(found))


def peak_of(state: State, step: Step) -> int:
    """Bytes that torch's allocator hands out at most over a step; the step before it compiles kernels."""
    wear(state)
    step.run()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    step.run()
    return torch.cuda.max_memory_allocated()


def in_turns(states: dict[str, State], step: Step, turns: int) -> dict[str, list[float]]:
    """Milliseconds of each variant in each turn. The order is another one each turn: what ran before has heated the
    GPU."""
    times: dict[str, list[float]] = {name: [] for name in states}
    shuffled = random.Random(0)
    for _ in range(turns):
        for name in shuffled.sample(list(states), len(states)):
            wear(states[name])
            times[name].append(step.run())
    return times


def sampled(step: Step, steps: int = 6) -> dict[str, float]:
    """Median clock (MHz) and power (W) that nvidia-smi reports while a variant's steps run: at the limit of its power
    a GPU lowers its clock, and a step without pauses for memory may so have slower matrix products."""
    samples: list[tuple[float, float]] = []
    done = threading.Event()

    def watch() -> None:
        command = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw.instant", "--format=csv,noheader,nounits", "-i", "0"]
        while not done.is_set():
            text = subprocess.run(command, capture_output=True, text=True, check=False).stdout
            with suppress(ValueError):
                clock, power = map(float, text.split(","))
                samples.append((clock, power))

    watcher = threading.Thread(target=watch)
    step.run()
    watcher.start()
    for _ in range(steps):
        step.run()
    done.set()
    watcher.join()
    if not samples:
        return {}
    clocks, powers = zip(*samples, strict=True)
    return {"sm_mhz": statistics.median(clocks), "watts": statistics.median(powers), "samples": len(samples)}


def described(given: argparse.Namespace) -> str:
    """The model and batch in words."""
    return (
        f"Qwen3 of {given.widths} widths, {given.layers} layers, batch {given.batch} x {given.sequence}, bf16, SDPA, "
        "no checkpointing, AdamW fused"
    )


def in_another_process(name: str, given: argparse.Namespace) -> dict[str, Any]:
    """A compiled variant, beside eager."""
    out = given.out.with_suffix(".part")
    sizes = ("widths", "layers", "batch", "sequence", "rounds")
    options = [text for size in sizes for text in (f"--{size}", str(getattr(given, size)))]
    command = [sys.executable, __file__, "compiled", *options, "--variant", name, "--out", str(out)]
    subprocess.run(command, check=True, env=os.environ)
    found: dict[str, Any] = json.loads(out.read_text())["compiled"]
    out.unlink()
    return found


def compiled(given: argparse.Namespace) -> None:
    """torch.compile of the model, patched or not, in turns with eager."""
    model, batch = qwen3(given), inputs(given)
    bare = look(model)
    if given.variant == ["compile + ours"]:
        tunegen.patch(model)
    worn, step = look(model), Step(model, batch)
    call = torch.compile(model)
    for _ in range(3):
        step.run(call)
    torch.cuda.reset_peak_memory_stats()
    step.run(call)
    peak = torch.cuda.max_memory_allocated()
    wear(bare)
    step.run()
    eager, ours = [], []
    for _ in range(given.rounds):
        wear(bare)
        eager.append(step.run())
        wear(worn)
        ours.append(step.run(call))
    factor = ratio(eager, ours)._asdict()
    save(given, {"compiled": {"step_ms": statistics.median(ours), "over_eager": factor, "peak_gb": peak / 1e9}})


def logits(given: argparse.Namespace) -> None:
    """How far the logits of the patched model lie from eager's, beside those of the compiled model."""
    model, batch = qwen3(given).eval(), inputs(given)
    with torch.no_grad():
        eager = model(**batch).logits.float()
        other = torch.compile(model)(**batch).logits.float()
        tunegen.patch(model)
        ours = model(**batch).logits.float()
    found = {
        name: {
            "largest_difference": float((got - eager).abs().max()),
            "rms_difference": float((got - eager).square().mean().sqrt()),
            "same_argmax": float((got.argmax(-1) == eager.argmax(-1)).double().mean()),
        }
        for name, got in (("ours", ours), ("compiled", other))
    }
    print(found)
    save(given, {"logits_against_eager": found})


if __name__ == "__main__":
    main()
