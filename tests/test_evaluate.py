"""From config to trial in the measuring process, without a GPU: the digest that is stored, and what errors come to."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from fake_gpu import DEFAULT, H200, PROBLEM, make_resources, measurement, template_of

from tunegen import evaluate, paths, render, serving
from tunegen.bench import FINAL_ROUNDS, WARM_UP_SECONDS, Screened
from tunegen.errors import CompileError, first_line
from tunegen.evaluate import COMPILED, Session
from tunegen.model import Config, Launch, Plan, Resources, Trial, TrialState
from tunegen.ops import op_spec
from tunegen.serving import KEPT_BYTES, Server
from tunegen.spending import Spent
from tunegen.verify import Verdict

SPEC = replace(op_spec("rms_norm"), compiled_call=lambda problem: lambda given: lambda: None)


class Here(Session):
    """A session in which nothing is launched: every config is right and takes 8 us, or what `times` says."""

    def __init__(self, times=()):
        self.spec, self.problem, self.silicon = SPEC, PROBLEM, H200
        self.benches, self.times = [], list(times)
        self.bench = self._bench(0.2)
        self.verdict = Verdict(True, 0.5)
        self.form, self.best, self.by_machine, self.seconds = None, None, {}, Spent()
        self.grid, self.verified = (1,), []

    def _bench(self, warm_up):
        self.benches.append(
            SimpleNamespace(
                stream=None,
                tensors=[{}],
                call=lambda variant: variant,
                capture=lambda call: call,
                replayed=0.0,
                screen=lambda graph, best: Screened(self.time(), True),
                measure=lambda graphs, blocks: [self.time() for _ in graphs],
            )
        )
        return self.benches[-1]

    def time(self):
        return measurement(self.times.pop(0) if self.times else 8.0)

    def variants(self, config, nested=()):
        launch = Launch(SimpleNamespace(__name__="tile"), self.grid)
        return [SimpleNamespace(plan=lambda rows: Plan((launch,)), nested=nested)]

    def verify(self, variants):
        self.verified.append([variant.nested for variant in variants])
        return self.verdict


def test_kernels_of_a_config_are_loaded_once_for_all_row_counts(digest, monkeypatch):
    """And again for a template that has changed: what is launched is the text of today."""
    made, known = [], {}

    def variant(source, *_):
        made.append(source.text)
        return SimpleNamespace(text=source.text)

    monkeypatch.setattr(evaluate, "Variant", variant)

    def variants(rows):
        session = Here()
        session.problem, session.device, session.known = replace(PROBLEM, rows=rows), None, known
        return [variant.text for variant in Session.variants(session, DEFAULT)]

    first = variants(1)
    assert variants(64) == first == made
    assert len(set(first)) == 2, "with and without rstd"
    template_of(DEFAULT, paths.PACKAGE).write_text("EDITED_AGAIN = {{ save_rstd }}\n")
    render._render.cache_clear()
    assert "EDITED_AGAIN" in variants(1)[0]
    assert len(made) == 4


def test_a_template_that_forgets_rstd_is_asked_for_it(digest, monkeypatch):
    """One text, with rstd and without: as one variant it was never asked for rstd, and passed the gate."""
    monkeypatch.setattr(evaluate, "Variant", lambda source, *_: SimpleNamespace(source=source))
    template_of(DEFAULT, paths.PACKAGE).write_text("FORGETS = True\n")
    render._render.cache_clear()
    session = Here()
    session.device, session.known = None, {}
    asked = [variant.source.flags["save_rstd"] for variant in Session.variants(session, DEFAULT)]
    assert asked == [False, True]


@pytest.fixture
def digest(tmp_path, monkeypatch):
    """Of the text that this process launches for the default."""
    monkeypatch.setattr(paths, "PACKAGE", make_resources(tmp_path / "package"))
    template_of(DEFAULT, paths.PACKAGE).write_text("EDITED = {{ save_rstd }}\n")
    return render.combined_digest(PROBLEM, DEFAULT, SPEC)


def test_screened_trial_has_the_digest_of_what_was_launched(digest):
    trial = Here().screen(DEFAULT, None)
    assert (trial.state, trial.digest, trial.error_ulp) == (TrialState.OK, digest, 0.5)
    assert trial.measurement.us == 8.0


def test_wrong_trial_has_it_too(digest):
    session = Here()
    session.verdict = Verdict(False, float("inf"), "y: NaN")
    trial = session.screen(DEFAULT, None)
    assert (trial.state, trial.digest, trial.reason, trial.error_ulp) == (TrialState.INCORRECT, digest, "y: NaN", None)
    assert trial.measurement is None


def test_trial_that_does_not_compile_has_it_too(digest, monkeypatch):
    def fail(config):
        raise CompileError("tile: no registers left")

    session = Here()
    monkeypatch.setattr(session, "variants", fail)
    trial = session.screen(DEFAULT, None)
    assert (trial.state, trial.digest, trial.reason) == (TrialState.COMPILE, digest, "tile: no registers left")


def test_finalist_has_the_digest_of_what_was_launched_and_not_of_what_was_screened(digest):
    screened = Trial(PROBLEM, DEFAULT, TrialState.OK, digest="of an older text", measurement=measurement(9.0))
    (trial,) = Here().finals([screened])
    assert (trial.stage, trial.digest, trial.measurement.us) == ("final", digest, 8.0)


def test_finalist_is_verified_for_every_layout_that_it_may_be_launched_for(digest):
    session = Here()
    session.screen(DEFAULT, None)
    session.finals([Trial(PROBLEM, DEFAULT, TrialState.OK)])
    assert session.verified == [[()], [(), *SPEC.nestable(PROBLEM)]]


SPENT = Resources(32, 0, 1024, "cubin")


def test_same_machine_code_and_grid_are_timed_once(digest):
    session = Here()
    other = Config.of("tile", {"ROWS": 4, "num_warps": 4})
    first, second = session.screen(DEFAULT, SPENT), session.screen(other, SPENT)
    assert (first.state, second.state, second.measurement) == (TrialState.OK, TrialState.DUPLICATE, None)
    assert DEFAULT.label() in second.reason
    session.grid = (2,)
    assert session.screen(other, SPENT).state is TrialState.OK
    assert session.screen(DEFAULT, replace(SPENT, binary="another")).state is TrialState.OK


def test_what_was_found_wrong_or_has_no_known_machine_code_stands_for_no_other(digest):
    session = Here()
    other = Config.of("tile", {"ROWS": 4, "num_warps": 4})
    session.verdict = Verdict(False, 9.0, "y: off")
    assert [session.screen(c, SPENT).state for c in (DEFAULT, other)] == [TrialState.INCORRECT] * 2
    session.verdict = Verdict(True, 0.5)
    assert [session.screen(c, None).state for c in (DEFAULT, other)] == [TrialState.OK] * 2


def test_best_so_far_is_what_the_next_is_timed_beside(digest):
    session, held, leads = Here(), [], [True, False, True, True]
    session.bench.capture = lambda call: len(held)  # graphs by number
    session.bench.screen = lambda graph, best: held.append(best) or Screened(session.time(), leads[graph])
    for warps in (1, 2, 4, 8):
        session.screen(Config.of("tile", {"ROWS": 4, "num_warps": warps}), None)
    assert held == [None, 0, 0, 2]


def test_finals_take_their_rounds_on_buffers_of_their_own_and_compile_the_formula_once(digest):
    times = [8.0, 8.4, 7.9, 8.1, 8.2, 8.0]
    session = Here([times[0], 20.0, *times[1:]])
    compiled = Trial(PROBLEM, COMPILED, TrialState.OK, kind="baseline")
    tile, formula = session.finals([Trial(PROBLEM, DEFAULT, TrialState.OK), compiled])
    assert tile.measurement.rounds == pytest.approx([us / 10 for us in times])
    assert tile.measurement.score == pytest.approx(0.81)  # their mean
    assert len(tile.measurement.blocks) == 3 * FINAL_ROUNDS
    assert formula.measurement.rounds == (2.0,)
    assert len(session.benches) == FINAL_ROUNDS == len(times)


def test_finalist_that_cannot_win_any_more_plays_one_round(digest):
    """And the baselines too; whose turn it is follows the first round, not the screening."""
    order = [9.0, 30.0, 8.0, 8.1]  # the first is 12 % behind the third: a small problem's band is 5 % at most
    session = Here([*order, *[8.0, 8.1] * (FINAL_ROUNDS - 1)])
    kinds = ("measured", "baseline", "measured", "measured")
    configs = [Config.of("tile", {"ROWS": rows, "num_warps": 4}) for rows in (1, 2, 4, 8)]
    trials = [Trial(PROBLEM, c, TrialState.OK, kind=kind) for c, kind in zip(configs, kinds, strict=True)]
    found = session.finals(trials)
    assert [len(trial.measurement.rounds) for trial in found] == [1, 1, FINAL_ROUNDS, FINAL_ROUNDS]
    assert [trial.measurement.us for trial in found] == order
    assert len(session.benches) == FINAL_ROUNDS


def test_kernel_whose_timing_failed_stands_for_no_other(digest):
    session = Here()
    session.bench.screen = lambda graph, best: fail(RuntimeError("out of memory"))
    with pytest.raises(RuntimeError):
        session.screen(DEFAULT, SPENT)
    session.bench.screen = lambda graph, best: Screened(session.time(), True)
    assert session.screen(Config.of("tile", {"ROWS": 4, "num_warps": 4}), SPENT).state is TrialState.OK


def test_formula_that_does_not_compile_costs_its_baseline_only(digest, monkeypatch):
    session = Here([8.0] * FINAL_ROUNDS)
    broken = replace(SPEC, compiled_call=lambda problem: fail(RuntimeError("no compiler")))
    monkeypatch.setattr(session, "spec", broken)
    compiled = Trial(PROBLEM, COMPILED, TrialState.OK, kind="baseline")
    (tile,) = session.finals([Trial(PROBLEM, DEFAULT, TrialState.OK), compiled])
    assert tile.measurement.rounds == (0.8,) * FINAL_ROUNDS


@pytest.fixture
def server(monkeypatch):
    """One whose CUDA context is whole as long as `faults` is empty."""
    faults = []

    def synchronize():
        if faults:
            raise RuntimeError(faults[0])

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 1000)
    found = Server.__new__(Server)
    found.faults, found.freed, found.emptied = faults, 0, 0
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 1000)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 1000 + found.freed)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: setattr(found, "emptied", found.emptied + 1))
    found.session = SimpleNamespace(seconds=Spent())
    found.session.seconds["timing"] = 2.0
    found.session.bench = object()
    return found


def fail(error):
    raise error


def test_what_a_template_raises_is_a_result_and_leaves_the_process_whole(server):
    """A kernel argument that nothing is bound to, say."""
    assert server._answer(lambda: fail(KeyError("gamma_ptr"))) == (
        (TrialState.RUNTIME, "KeyError: 'gamma_ptr'"),
        1000,
        False,
        {"timing": 2.0},
    )
    assert server._answer(lambda: "a trial") == ("a trial", 1000, False, {})


def test_what_breaks_the_context_is_a_result_and_the_process_is_to_be_replaced(server):
    def launch():
        server.faults.append("CUDA error: an illegal memory access was encountered")

    reason = "RuntimeError: CUDA error: an illegal memory access was encountered"
    assert server._answer(launch) == ((TrialState.CRASHED, reason), 0, True, {})


def test_error_of_cuda_is_told_without_torchs_advice():
    """Its last line but for that says `assertions`, and was taken for the reason of an illegal access."""
    error = RuntimeError(
        "CUDA error: an illegal memory access was encountered\n"
        "Search for `cudaErrorIllegalAddress' in https://docs.nvidia.com for more information.\n"
        "CUDA kernel errors might be asynchronously reported at some other API call.\n"
        "For debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
        "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
    )
    assert first_line(error) == "RuntimeError: CUDA error: an illegal memory access was encountered"


def test_session_that_lost_its_buffers_is_to_be_replaced(server):
    """They are given up before new ones are allocated."""

    def renew():
        del server.session.bench
        raise RuntimeError("out of memory")

    assert server._answer(renew)[:3] == ((TrialState.RUNTIME, "RuntimeError: out of memory"), 0, True)


@pytest.mark.parametrize(("freed", "emptied"), [(0, 0), (KEPT_BYTES, 0), (KEPT_BYTES + 1, 1)])
def test_memory_that_a_candidate_leaves_behind_is_kept_for_the_next_up_to_a_limit(server, freed, emptied):
    server.freed = freed
    server._answer(lambda: "a trial")
    assert server.emptied == emptied


def test_replays_that_are_measured_are_told_apart_from_what_is_spent_around_them(digest):
    session = Here()

    def screen(graph, best):
        time.sleep(0.02)
        session.bench.replayed += 0.015
        return Screened(session.time(), True)

    session.bench.screen = screen
    session.screen(DEFAULT, None)
    assert session.seconds["measured replays"] == pytest.approx(0.015)
    assert 0.005 <= session.seconds["between replays"] < 0.2


def test_only_the_first_problem_of_a_process_is_warmed_up_for_long(monkeypatch):
    opened = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(serving, "Session", lambda *given: opened.append(given[-3:]))
    found = Server.__new__(Server)
    found.warm, found.facts, found.device, found.seed = False, SimpleNamespace(silicon=H200), None, 0
    found.forms, found.known = {PROBLEM: "compiled"}, "loaded"
    found.ahead = SimpleNamespace(join=lambda: opened.append("joined"))
    for _ in range(2):
        found.open(PROBLEM)
    again = serving.WARM_UP_AGAIN, None, "loaded"
    assert opened == ["joined", (WARM_UP_SECONDS, "compiled", "loaded"), "joined", again]


def test_baseline_that_is_foreseen_is_compiled_and_a_failure_is_left_to_the_finals(monkeypatch):
    found = Server.__new__(Server)
    found.device, found.seed, found.forms = torch.device("cpu"), 0, {}
    found.ahead = SimpleNamespace(join=lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    found.foresee(replace(PROBLEM, rows=2, hidden=8, x_dtype="fp32", weight_dtype="fp32"))
    monkeypatch.setattr(serving, "compiled_form", lambda *_: fail(RuntimeError("no compiler")))
    found.foresee(PROBLEM)
    ((problem, form),) = found.forms.items()
    assert problem.hidden == 8
    given = SPEC.inputs(problem, found.device, 1)
    got, want = form(given)(), SPEC.expected(problem, given, torch.float64)
    assert torch.allclose(got["y"].double(), want["y"].value, atol=1e-5)
