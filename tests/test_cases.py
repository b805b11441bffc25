"""Every shipped case ends as it says it does, and what is printed of a fault replays it."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result

from isolate import case as cases
from isolate.case import Case, Expect
from isolate.cli import main
from isolate.errors import BuildError
from isolate.replay.supervisor import Outcome, Supervisor
from isolate.search.pin import wanted
from tests.conftest import ROOT

FILES = sorted((ROOT / "cases").glob("**/*.json"))
#: Needs a cache type that only the TurboQuant fork has.
FORK_ONLY = ROOT / "cases/cuda/r07-turbo4-one-row.json"
#: The public reports that a CPU can show, or be a control for.
REPORTS = {f"r{number:02}" for number in (*range(8, 21), 22, 24, 25, 26)}


def name(path: Path) -> str:
    return str(path.relative_to(ROOT / "cases"))


def by_file(paths: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("path", [pytest.param(path, id=name(path)) for path in paths])


def ends_badly(path: Path) -> bool:
    return wanted(cases.read(path), "cpu") is not None


def varies(path: Path) -> bool:
    expected = wanted(cases.read(path), "cpu")
    return expected is not None and expected.varies


FAULTY = [path for path in FILES if ends_badly(path)]


@pytest.fixture(scope="module", autouse=True)
def embedded() -> Iterator[None]:
    """The build that the cases were written for, whatever the environment says."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("ISOLATE_BUILD", raising=False)
        yield


@pytest.fixture(scope="module")
def children(embedded: None) -> Iterator[Supervisor]:
    with Supervisor() as supervisor:
        yield supervisor


def run(*words: str) -> Result:
    return CliRunner().invoke(main, ["run", *words], catch_exceptions=False)


def signatures(path: Path) -> list[Any]:
    return [finding["fault"]["signature"] for finding in json.loads(path.read_text())["findings"]]


def test_each_report_that_a_cpu_can_show_has_a_case() -> None:
    shipped = {path.name.split("-")[0] for path in (ROOT / "cases/reports").glob("*.json")}
    assert shipped == REPORTS


@by_file(FILES)
def test_a_shipped_case_is_read_and_says_what_it_is_about(path: Path) -> None:
    case = cases.read(path)
    assert case.about.endswith(".")
    report = re.match(r"r0?(\d+)-", path.name)
    assert report is None or re.search(rf"\breport r{report[1]}\b", case.about, re.IGNORECASE)


@by_file([path for path in FILES if path != FORK_ONLY])
def test_a_shipped_case_ends_as_expected(path: Path, children: Supervisor) -> None:
    case = cases.read(path)
    outcome = children.run(case, folder=path.parent)
    expected = wanted(case, "cpu")
    if expected is not None:
        assert_fault(case, expected, outcome)
    else:
        assert outcome.fault is None, outcome.fault
        assert outcome.steps == len(case.steps)
        assert not outcome.notes


def assert_fault(case: Case, wanted: Expect, outcome: Outcome) -> None:
    """The fault is the one the case is about: in its last step, or before the first where no context could be made."""
    fault = outcome.fault
    assert fault is not None
    assert wanted.given_by(fault), fault
    assert fault.step.index == (None if wanted.step == "context" else len(case.steps) - 1)
    if fault.kind == "assert":
        assert fault.report.file.endswith((".cpp", ".c"))
        assert fault.report.line
        assert wanted.varies or wanted.where in fault.report.text


def test_a_death_that_varies_is_any_death_in_that_step_and_nothing_else(children: Supervisor) -> None:
    path = next(path for path in FAULTY if varies(path))
    expect, fault = cases.read(path).expect, children.run(cases.read(path), folder=path.parent).fault
    assert isinstance(expect, Expect) and fault is not None
    other = {"signal": "assert", "assert": "signal"}[fault.kind]
    somewhere = replace(fault, kind=other, signature=replace(fault.signature, kind=other, where="somewhere else"))
    assert expect.given_by(somewhere)
    assert not expect.given_by(replace(somewhere, step=replace(fault.step, kind="decode")))
    assert not expect.given_by(replace(somewhere, kind="logits"))
    assert not msgspec.structs.replace(expect, varies=False).given_by(somewhere)


def test_a_cache_type_that_the_build_lacks_is_refused_by_name(children: Supervisor) -> None:
    with pytest.raises(BuildError, match=r"turbo4.*q8_0"):
        children.run(cases.read(FORK_ONLY))


@by_file([path for path in FAULTY if not varies(path)])
def test_the_printed_command_gives_the_same_fault_again(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    first, again = tmp_path / "first.json", tmp_path / "again.json"
    printed = run(os.path.relpath(path, ROOT), "--json", str(first))
    assert printed.exit_code == 1
    words = shlex.split(replay_line(printed.output))
    assert words[0] == "isolate"
    replayed = CliRunner().invoke(main, [*words[1:], "--json", str(again)], catch_exceptions=False)
    assert replayed.exit_code == 1
    assert signatures(again) == signatures(first) != []


def replay_line(output: str) -> str:
    """What the last line of a report says after `replay`."""
    label, _, command = output.rstrip("\n").rsplit("\n", 1)[-1].strip().partition(" ")
    assert label == "replay"
    return command


def test_the_printed_command_holds_switches_and_odd_names(tmp_path: Path) -> None:
    odd = tmp_path / "it's one; of mine.json"
    shutil.copy(ROOT / "cases/reports/r11-part-copied-between-streams.json", odd)
    printed = run(str(odd), "--check", "nan,positions", "--model", "zoo:qwen3moe")
    words = shlex.split(replay_line(printed.output))
    assert words == ["isolate", "run", str(odd), "--model", "zoo:qwen3moe", "--check", "positions,nan"]
    assert CliRunner().invoke(main, words[1:]).exit_code == 1


def test_expected_asks_for_each_case_to_end_as_it_says(tmp_path: Path) -> None:
    fault, control = (
        ROOT / f"cases/reports/r11-part-copied-{how}.json" for how in ("between-streams", "in-unified-cache")
    )
    right = run("--expected", str(fault), str(control))
    assert right.exit_code == 0
    assert right.output.count("(as expected)") == 2
    wrong = tmp_path / "wrong.json"
    wrong.write_text(fault.read_text().replace("full KV buffers", "half KV buffers"))
    refuted = run("--expected", str(wrong), str(control))
    assert refuted.exit_code == 1
    assert "(NOT as expected: it should fail with assert in seq_cp" in refuted.output
    # Among a hundred cases the last lines say which.
    summary, named = refuted.output.rstrip().splitlines()[-2:]
    assert summary.endswith("1 NOT as expected")
    assert f"{wrong}: it should fail with assert in seq_cp" in named
    assert "and failed with assert in seq_cp: llama-kv-cache.cpp:" in named
