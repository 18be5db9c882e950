"""A training step of Qwen3-8B's widths, with each way to compute its norms, side by side on one GPU.

    python benchmarks/qwen3_step.py record --layers 8 --out benchmarks/results/qwen3_problems.json
    tunegen sweep --from benchmarks/results/qwen3_problems.json
    python benchmarks/qwen3_step.py measure --layers 8 --out benchmarks/results/qwen3_step.json

A step is forward with loss, backward, and fused AdamW in bf16. The weights are random. Variants share one model in one
process and take turns, step by step; "eager again" is eager once more, and what the two differ by is the band. Peak
memory is that of torch's allocator over a step. torch.compile runs in processes of its own, each beside eager. The
share of norms is that of the profiler: kernels launched by a norm's forward and by the backward of its operators. The
bound is what the step would gain if all norm calls ran at the speed of a copy of their bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import tunegen
from tunegen.integrations.recognition import is_candidate
from tunegen.ops import op_spec
from tunegen.recorded import Recording
from tunegen.serving import versions

WIDTHS = {
    "8b": {"hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8},
    "tiny": {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2},
}
VOCABULARY = {"8b": 151936, "tiny": 512}
COMPILED = ("compile", "compile + ours")


def main() -> None:
    """Record, measure, or measure one compiled variant (called by `measure`)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["record", "measure", "compiled", "logits"])
    parser.add_argument("--widths", choices=list(WIDTHS), default="8b")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--variant", action="append", help="only these")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    torch.manual_seed(0)
    actions = {"record": write_recording, "measure": measure, "compiled": compiled, "logits": logits}
    actions[given.what](given)


def save(given: argparse.Namespace, found: dict[str, Any]) -> None:
    """Write what was found so far, with what it was found on."""
    record = {"command": " ".join(["python", *sys.argv]), "versions": versions(0), "model": described(given), **found}
    given.out.write_text(json.dumps(record, indent=2) + "\n")


def qwen3(given: argparse.Namespace) -> nn.Module:
    """Random weights, made on the GPU in bf16; attention is SDPA's flash backend."""
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


# Variants: what each leaves on the modules and in the modeling module is kept, so that one model can change among them.

State = tuple[list[tuple[nn.Module, dict[str, Any]]], dict[str, Any]]


def look(model: nn.Module) -> State:
    """The attributes of every module, and the names of the modeling module."""
    from transformers.models.qwen3 import modeling_qwen3

    return [(module, dict(vars(module))) for module in model.modules()], dict(vars(modeling_qwen3))


def wear(state: State) -> None:
    """Make the model what it was when `look` looked."""
    from transformers.models.qwen3 import modeling_qwen3

    for module, attributes in state[0]:
        vars(module).clear()
        vars(module).update(attributes)
    for name, value in state[1].items():
        setattr(modeling_qwen3, name, value)


def liger(model: nn.Module, **parts: bool) -> None:
    """Liger's patch on this model, norms included unless `rms_norm` is False."""
    from liger_kernel.transformers import apply_liger_kernel_to_qwen3

    apply_liger_kernel_to_qwen3(model=model, **parts)


def liger_norm(model: nn.Module) -> None:
    """Nothing of Liger but its norm."""
    liger(model, rope=False, swiglu=False, fused_linear_cross_entropy=False, rms_norm=True)


def liger_and_ours(model: nn.Module) -> None:
    """All of Liger, then our norms in place of its own."""
    liger(model)
    tunegen.patch(model)


VARIANTS: dict[str, Callable[[nn.Module], object]] = {
    "eager": lambda model: None,
    "eager again": lambda model: None,
    "ours, forward only": lambda model: tunegen.patch(model, backward="eager"),
    "ours": tunegen.patch,
    "Liger's norm alone": liger_norm,
    "all of Liger": liger,
    "all of Liger, our norms": liger_and_ours,
}


def dressed(model: nn.Module, names: Sequence[str]) -> dict[str, State]:
    """The state of the model under each variant; it ends as it was."""
    bare = look(model)
    found = {}
    for name in names:
        VARIANTS[name](model)
        found[name] = look(model)
        wear(bare)
    return found


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
    peaks: dict[str, int] = {}
    for name, state in states.items():  # compiles kernels, warms up
        wear(state)
        step.run()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        step.run()
        peaks[name] = torch.cuda.max_memory_allocated()
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(given.rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            wear(states[name])
            times[name].append(step.run())
    wear(states["eager"])
    recording = tunegen.record(model, batch)
    profiles = {}
    for name in ("eager", "ours", "Liger's norm alone"):
        if name in states:
            wear(states[name])
            profiles[name] = profiled(model, step)
    wear(states["eager"])
    limit = milliseconds_of_a_copy(recording)
    del model, states, step
    torch.cuda.empty_cache()
    found = {"norm_calls": sum(recording.counts().values()), **summary(times, peaks, profiles, limit)}
    for name in () if given.variant else COMPILED:
        save(given, found)  # of minutes that a failure of the next process must not lose
        found["compiled"][name] = in_another_process(name, given)
    save(given, found)
    print(table(found))


def described(given: argparse.Namespace) -> str:
    """The model and batch in words."""
    return (
        f"Qwen3 of {given.widths} widths, {given.layers} layers, batch {given.batch} x {given.sequence}, bf16, SDPA, "
        "no checkpointing, AdamW fused"
    )


def summary(
    times: dict[str, list[float]],
    peaks: dict[str, int],
    profiles: dict[str, Profile],
    limit: float,
) -> dict[str, Any]:
    """Medians, factors over eager, and the bound."""
    eager = statistics.median(times["eager"])
    # Of ratios within a turn: clocks drift over minutes.
    ratios = {
        name: statistics.median(e / t for e, t in zip(times["eager"], ts, strict=True)) for name, ts in times.items()
    }
    norm_ms = {name: sum(profile.norms.values()) for name, profile in profiles.items()}
    norms = norm_ms["eager"]
    return {
        "step_ms": {name: statistics.median(ts) for name, ts in times.items()},
        "over_eager": ratios,
        "band": abs(ratios.get("eager again", 1.0) - 1),
        "peak_gb": {name: peak / 1e9 for name, peak in peaks.items()},
        "norm_ms_by_profiler": norm_ms,
        "norm_ms_at_copy_speed": limit,
        "norm_share_of_eager": norms / eager,
        "bound_over_eager": eager / (eager - norms + limit),
        "compiled": {},
        "kernel_ms_by_profiler": {name: profile.all for name, profile in profiles.items()},
        "norm_kernels_ms": {name: profile.norms for name, profile in profiles.items()},
        "samples_ms": times,
    }


def table(found: dict[str, Any]) -> str:
    """For people."""
    lines = [f"{'variant':26}{'ms a step':>11}{'x eager':>9}{'peak GB':>9}"]
    for name, ms in found["step_ms"].items():
        lines.append(f"{name:26}{ms:11.1f}{found['over_eager'][name]:9.3f}{found['peak_gb'][name]:9.1f}")
    for name, one in found["compiled"].items():
        lines.append(f"{name:26}{one['step_ms']:11.1f}{one['over_eager']:9.3f}{one['peak_gb']:9.1f}")
    norms = {name: round(ms, 1) for name, ms in found["norm_ms_by_profiler"].items()}
    lines.append(
        f"norms: {norms} ms by the profiler, {found['norm_ms_at_copy_speed']:.1f} at the speed "
        f"of a copy; bound {found['bound_over_eager']:.3f} x eager; band {found['band']:.4f}"
    )
    return "\n".join(lines)


@contextmanager
def annotated(model: nn.Module) -> Iterator[None]:
    """A range named `norm` around each norm's forward while a profile is taken."""
    handles, open_ranges = [], []

    def enter(*_: Any) -> None:
        open_ranges.append(torch.autograd.profiler.record_function("norm"))
        open_ranges[-1].__enter__()

    def leave(*_: Any) -> None:
        open_ranges.pop().__exit__(None, None, None)

    for module in model.modules():
        if is_candidate(module):
            handles += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class Profile(NamedTuple):
    """GPU milliseconds of a step under the profiler: of the kernels that norms launch, backward included, by name,
    longest first; and of all kernels."""

    norms: dict[str, float]
    all: float


def profiled(model: nn.Module, step: Step) -> Profile:
    """One step under the profiler."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    step.run()
    with annotated(model), torch.profiler.profile(activities=activities) as profile:
        step.run()
    events = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CPU]
    norms = [e for e in events if e.name == "norm"]
    inside = within(events, norms)
    numbers = {e.sequence_nr for e in inside if e.sequence_nr >= 0 and e.fwd_thread in (None, 0)}
    back = [e for e in events if e.name.startswith("autograd::engine::evaluate_function") and e.sequence_nr in numbers]
    kernels = [k for e in [*inside, *within(events, back)] for k in e.kernels]
    found: Counter[str] = Counter()
    for kernel in kernels:
        found[kernel.name[:80]] += kernel.duration / 1e3
    return Profile(dict(found.most_common()), sum(k.duration for e in events for k in e.kernels) / 1e3)


def within(events: Sequence[Any], ranges: Sequence[Any]) -> list[Any]:
    """Events that lie in any of the ranges, on its thread; ranges of one thread do not overlap."""
    found = []
    for thread in {r.thread for r in ranges}:
        spans = sorted((r.time_range.start, r.time_range.end) for r in ranges if r.thread == thread)
        mine = sorted((e for e in events if e.thread == thread), key=lambda e: e.time_range.start)
        at = 0
        for event in mine:
            while at < len(spans) and spans[at][1] < event.time_range.start:
                at += 1
            if at < len(spans) and spans[at][0] <= event.time_range.start and event.time_range.end <= spans[at][1]:
                found.append(event)
    return found


def milliseconds_of_a_copy(recording: Recording) -> float:
    """The bytes of all norm calls of a step at the speed of `copy_` on 256 MB."""
    moved = sum(op_spec(p.op).bytes_moved(p) * n for p, n in recording.counts().items())
    source = torch.empty(1 << 27, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(source)
    times = []
    for _ in range(20):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return moved / (2 * source.numel() * 2) * statistics.median(times)


def in_another_process(name: str, given: argparse.Namespace) -> dict[str, float]:
    """A compiled variant, beside eager."""
    out = given.out.with_suffix(".part")
    sizes = ("widths", "layers", "batch", "sequence", "rounds")
    options = [text for size in sizes for text in (f"--{size}", str(getattr(given, size)))]
    command = [sys.executable, __file__, "compiled", *options, "--variant", name, "--out", str(out)]
    subprocess.run(command, check=True, env=os.environ)
    found: dict[str, float] = json.loads(out.read_text())["compiled"]
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
    ratio = statistics.median(e / o for e, o in zip(eager, ours, strict=True))
    save(given, {"compiled": {"step_ms": statistics.median(ours), "over_eager": ratio, "peak_gb": peak / 1e9}})


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
