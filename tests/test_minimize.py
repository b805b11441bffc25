"""`isolate minimize` on real libraries: what is left, what was not needed, budgets, resuming, faults that come and go."""

from __future__ import annotations

import functools
import json
import shlex
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result

from isolate import case as cases
from isolate.case import Case, Decode
from isolate.cli import main
from isolate.fault import Call, Fault, Signature, StepInFlight
from isolate.replay.supervisor import Outcome
from isolate.replay.target import find
from isolate.search import minimize as minimizer
from isolate.search.needs import tokens
from isolate.search.pin import Job, Settings
from isolate.search.repeat import still_comes
from tests import cuda_builds
from tests.conftest import ROOT

REPORTS = ROOT / "cases/reports"


@pytest.fixture(autouse=True)
def default_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ISOLATE_BUILD", raising=False)


def minimize(*words: str | Path) -> Result:
    return CliRunner().invoke(main, ["minimize", *map(str, words)], catch_exceptions=False)


def left(path: Path, out: Path, *words: str | Path) -> tuple[Case, dict[str, Any]]:
    """What is left of a case, and the JSON document."""
    found = out.with_suffix(".found")
    result = minimize(path, "--out", out, "--json", found, *words)
    assert result.exit_code == 1, result.output
    return cases.read(out), json.loads(found.read_text())


def replayed(document: dict[str, Any]) -> Result:
    words = shlex.split(document["findings"][0]["replay"])
    assert words[:2] == ["isolate", "run"]
    return CliRunner().invoke(main, [*words[1:], "--expected"], catch_exceptions=False)


def test_the_report_that_started_this_ends_at_one_decode_of_six_tokens(tmp_path: Path, nothing_left: None) -> None:
    build = cuda_builds.ptx80()
    seed = ROOT / "cases/cuda/seed-two-slots.json"
    case, document = left(seed, tmp_path / "seed.json", "--build", build, "--target", "dry:h200", "--budget", "80,60s")
    (step,) = case.steps
    assert isinstance(step, Decode)
    assert step.tokens_by_slot() == {0: 6}
    assert (case.context.n_ctx, case.context.n_seq_max, case.context.type_k) == (256, 1, "f16")
    assert document["ran"] <= 80
    told = document["minimized"]
    assert told["minimal"] and told["left"] == "one decode of 6 tokens"
    assert {"no context checkpoint", "no second slot", "no flash_attn_type enabled"} <= set(told["not_needed"])
    assert replayed(document).exit_code == 0


#: Steps and tokens that are left of a shipped case, at most.
LEAST = {
    "r10-on-device-size-of-all": (4, 4),
    "r11-part-copied-between-streams": (1, 0),
    "r12-shift-of-m-rope": (3, 4),
    "r18-batch-smaller-than-slots": (1, 1),
    "r24-save-before-the-shift-is-done": (6, 10),
}


@pytest.mark.parametrize("name", LEAST)
def test_a_fault_of_the_cpu_shrinks(name: str, tmp_path: Path, nothing_left: None) -> None:
    case, document = left(REPORTS / f"{name}.json", tmp_path / "left.json", "--confirm", "1")
    steps, count = LEAST[name]
    assert (len(case.steps), tokens(case)) <= (steps, count)
    assert document["minimized"]["minimal"]
    assert replayed(document).exit_code == 0


def test_what_dies_in_a_check_keeps_its_checks_and_what_a_check_says_only_that() -> None:
    case = cases.read(REPORTS / "r12-shift-of-m-rope.json")
    case = msgspec.structs.replace(case, check=["positions", "logits"])
    call = Call("llama_decode")

    def ended(kind: str, step: str) -> Any:
        fault = Fault(kind, Signature(kind, "x", None, step), StepInFlight(0, step), call, call, "")
        return minimizer._ended(case, fault).check

    assert ended("assert", "check") == ["positions", "logits"]
    assert ended("logits", "decode") == ["logits"]
    assert ended("assert", "decode") == []


def test_a_case_without_a_fault_is_refused_with_the_command_that_ran(tmp_path: Path) -> None:
    path = REPORTS / "r13-right-restore-moe.json"
    result = minimize(path, "--out", tmp_path / "x.json", "--confirm", "2")
    assert result.exit_code == 2
    assert f"no fault in 2 runs in fresh children; run: isolate run {path}" in result.output
    assert not (tmp_path / "x.json").exists()


def test_a_budget_keeps_the_best_so_far_and_resuming_runs_no_case_twice(tmp_path: Path) -> None:
    path, verdicts = REPORTS / "r12-shift-of-m-rope.json", tmp_path / "verdicts"
    words = ("--confirm", "1", "--resume", verdicts)
    _, cut = left(path, tmp_path / "cut.json", *words, "--budget", "5")
    assert cut["ran"] <= 5
    assert not cut["minimized"]["minimal"]
    resumed, second = left(path, tmp_path / "resumed.json", *words)
    assert second["minimized"]["remembered"] == cut["ran"] - 2
    whole, third = left(path, tmp_path / "whole.json", "--confirm", "1")
    assert resumed == whole
    assert second["ran"] + second["minimized"]["remembered"] == third["ran"]
    with verdicts.open("a") as file:
        file.write('{"case": "00')
    again, fourth = left(path, tmp_path / "again.json", *words)
    assert (again, fourth["ran"]) == (whole, 2)
    # what was cut off is gone, whatever was written after it
    assert all(json.loads(line) for line in verdicts.read_text().splitlines())
    wrong = tmp_path / "wrong"
    wrong.write_text("[1]\n")
    refused = minimize(path, "--out", tmp_path / "x.json", "--resume", wrong)
    assert refused.exit_code == 2 and "not a file of verdicts" in refused.output


@pytest.mark.parametrize("replays", [1, 4, 7, 9, 30])
def test_the_budget_is_kept_where_nothing_comes_again_in_fresh_children(
    replays: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = REPORTS / "r12-shift-of-m-rope.json"
    start = cases.read(path)
    call = Call("llama_decode", 1)
    step = StepInFlight(len(start.steps) - 1, "seq_add")
    fault = Fault("decode", Signature("decode", "llama_decode", 1, "seq_add"), step, call, call, "planted")

    def run(self: minimizer.Replays, case: Case, fresh: bool = False, counted: bool = False) -> Outcome:
        self.ran += not counted
        return Outcome(fault if not fresh or len(case.steps) == len(start.steps) else None, 1, 0.0)

    monkeypatch.setattr(minimizer.Replays, "_run", run)
    limits = minimizer.Limits(replays=replays, confirm=3)
    result = minimizer.minimize(Job(start, path.parent, ""), Settings(find("cpu"), None, None), limits)
    assert result.replays <= replays
    assert len(result.case.steps) == len(start.steps) and not result.minimal


def test_several_at_once_end_alike(tmp_path: Path, nothing_left: None) -> None:
    path = REPORTS / "r12-shift-of-m-rope.json"
    alone, _ = left(path, tmp_path / "alone.json", "--confirm", "1")
    together, _ = left(path, tmp_path / "together.json", "--confirm", "1", "--jobs", "2")
    assert alone == together


@pytest.mark.slow
def test_a_fault_that_comes_and_goes_keeps_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLAKY", str(tmp_path / "count"))
    monkeypatch.setattr(Settings, "__init__", functools.partialmethod(Settings.__init__, worker="tests.flaky_worker"))
    path = tmp_path / "flaky.json"
    batch = [{"slot": 0, "tokens": {"count": 40, "modulo": 100}}]
    steps = [{"step": "decode", "batch": [{"slot": 0, "tokens": [1]}]}, {"step": "decode", "batch": batch}]
    path.write_text(json.dumps({"isolate": 1, "model": {"zoo": "llama"}, "steps": steps}))
    case, document = left(path, tmp_path / "left.json", "--confirm", "4")
    assert (len(case.steps), tokens(case)) == (1, 3)
    repeats = document["findings"][0]["repeats"]
    assert 0 < repeats["times"] < repeats["of"]


@pytest.mark.parametrize(("rate", "comes", "verdict"), [(1.0, True, True), (1.0, False, False), (0.5, True, True), (0.5, False, False)])  # fmt: skip
def test_runs_that_agree_decide_soon(rate: float, comes: bool, verdict: bool) -> None:
    asked = []
    assert still_comes(rate, lambda: bool(asked.append(1)) or comes) is verdict
    assert len(asked) == 1 if rate == 1 else len(asked) <= 8


@pytest.mark.parametrize("words", ["0", "10x", "s", "-3", "1,2.5s"])
def test_a_budget_that_is_none_is_refused(words: str) -> None:
    result = minimize(REPORTS / "r12-shift-of-m-rope.json", "--budget", words)
    assert result.exit_code == 2
    assert "neither a number of replays" in result.output
