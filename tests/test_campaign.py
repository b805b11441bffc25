"""Campaigns on the real library: the same cases and findings however they are run, and however often they are interrupted."""

from __future__ import annotations

import io
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import Result

from isolate import case as cases_of
from isolate.errors import IsolateError
from isolate.fault import Call, Fault, Signature, StepInFlight
from isolate.replay.supervisor import Outcome, Supervisor
from isolate.report import campaign as report_campaign
from isolate.report import findings
from isolate.search import campaign as campaigns
from isolate.search import shard
from isolate.search.campaign import Campaign
from isolate.search.examples import Examples
from isolate.search.executors import processes
from isolate.search.fuzz import Space
from isolate.search.known import name_of, shipped
from isolate.search.shard import Found, Plan, Share, end_children, run_examples, run_share
from tests.campaigns import (
    CASES,
    PLAN,
    PLANTED,
    SHARES,
    SMALL,
    campaign,
    files,
    isolate,
    kept,
    sentence,
    whole_lines,
)
from tests.conftest import ROOT, descendants, left_behind, signals_as_at_a_terminal
from tests.mutants.worker import WORKER, with_mutant


@dataclass(frozen=True)
class Whole:
    """A campaign that ran to its end without an interruption, on a library with a planted fault."""

    folder: Path
    database: Path
    totals: campaigns.Totals


@pytest.fixture(scope="module", autouse=True)
def tracker() -> None:
    """multiprocessing keeps a process of its own from the first use on."""
    resource_tracker.ensure_running()


@pytest.fixture(scope="module")
def planted() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MUTANT", PLANTED)
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, planted: None) -> Whole:
    folder = tmp_path_factory.mktemp("whole")
    examples = Examples(str(folder / "database"))
    with campaign(folder / "campaign", examples=examples) as running, processes(2) as executor:
        running.run(executor, 2, CASES, None)
    return Whole(folder / "campaign", folder / "database", running.totals)


def planted_name(totals: campaigns.Totals) -> str:
    """The first finding that is the planted fault; one in other settings may count as another."""
    return next(name for name, found in totals.found.items() if found.fault.signature.step == "load")


# -- what is found


def test_a_planted_fault_is_found_confirmed_reduced_and_saved(whole: Whole) -> None:
    name = planted_name(whole.totals)
    found = whole.totals.found[name]
    assert name.startswith("positions-load-attention-")
    assert found.confirmed and found.times == found.of == 3
    assert [step.kind for step in found.case.steps] == ["decode", "save", "load"]
    case = cases_of.read(whole.folder / f"{name}.json")
    assert case == found.case
    with Supervisor(target=with_mutant(PLANTED), worker=WORKER) as children:
        again = children.run(case).fault
    assert again is not None and again.signature == found.fault.signature


def test_the_documents_of_a_campaign_are_what_the_report_reads(whole: Whole, tmp_path: Path) -> None:
    name = planted_name(whole.totals)
    ((finding, case),) = findings.read(whole.folder / "findings" / f"{name}.json")
    assert case == cases_of.read(whole.folder / f"{name}.json")
    assert shlex.split(finding.replay)[2] == str(whole.folder / f"{name}.json")
    result = isolate("report", whole.folder / "findings", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert f"{name}.json" in (tmp_path / "index.html").read_text()


def test_shares_go_on_from_cases_that_tried_something_new(whole: Whole) -> None:
    assert len(whole.totals.facts) > 50
    assert sum(len(share["kept"]) for share in kept(whole.folder)) > 10


def test_of_cases_drawn_the_one_that_tries_most_that_is_new_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = {}
    for drawn in (shard.DRAWN, 1):
        monkeypatch.setattr(shard, "DRAWN", drawn)
        plans = [Plan(seed, Space(slots=2, models=("llama",)), size=10) for seed in (1, 2, 3)]
        shares = [run_share(plan, 0, (), (), frozenset()) for plan in plans]
        tried[drawn] = sum(len(share.facts) for share in shares) / sum(share.steps for share in shares)
    end_children()
    chosen, any_of_them = tried.values()
    assert chosen > 1.1 * any_of_them


def test_what_one_campaign_found_is_run_first_by_another(whole: Whole, tmp_path: Path) -> None:
    plan = replace(PLAN, seed=99)
    examples = Examples(str(whole.database))
    with campaign(tmp_path / "b", plan, examples) as running, processes(1) as executor:
        running.run(executor, 1, 1, None)
    first = msgspec.json.decode((tmp_path / "b" / "journal.jsonl").read_bytes().splitlines()[0], type=Share)
    assert first.number == -1 and planted_name(whole.totals) in first.examples
    assert planted_name(running.totals) in whole.totals.found
    # and not once more by the same one
    with campaign(tmp_path / "b", plan, examples) as again, processes(1) as executor:
        again.run(executor, 1, 1, None)
    assert again.totals.cases == running.totals.cases


def test_a_fault_that_does_not_come_again_is_told_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONCE", str(tmp_path / "once"))
    plan = replace(PLAN, worker="tests.once_worker")
    with campaign(tmp_path / "c", plan) as running, processes(1) as executor:
        running.run(executor, 1, 1, None)
    ((name, found),) = running.totals.unconfirmed.items()
    assert not found.confirmed and found.fault.kind == "signal"
    case = cases_of.read(tmp_path / "c" / "unconfirmed" / f"{name}.json")
    assert "not in fresh children" in case.about and case.expect == "pass"
    with Supervisor() as children:
        assert children.run(case).fault is None
    said = report_campaign.text(running, [each.finding("") for each in running.totals.found.values()])
    assert "not confirmed in fresh children: FAULT  signal in step" in said
    assert str(tmp_path / "c" / "unconfirmed" / f"{name}.json") in said


# -- the same, however it is run


def test_one_job_finds_what_two_find(whole: Whole, tmp_path: Path) -> None:
    with campaign(tmp_path / "one") as running, processes(1) as executor:
        running.run(executor, 1, CASES, None)
    assert kept(tmp_path / "one") == kept(whole.folder)
    assert len(kept(whole.folder)) == SHARES
    assert files(tmp_path / "one") == files(whole.folder)


def lines(journal: Path) -> int:
    return journal.read_bytes().count(b"\n") if journal.exists() else 0


def of_session(session: int) -> list[str]:
    """The processes of a session, and of those that its processes began."""
    found, parents = [], {session}
    for stat in sorted(Path("/proc").glob("[0-9]*/stat"), key=lambda path: int(path.parent.name)):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] != "Z" and (int(fields[3]) == session or int(fields[1]) in parents):
            parents.add(int(stat.parent.name))
            found.append(stat.parent.name)
    return found


def nothing_left(process: subprocess.Popen[str], started: list[str]) -> None:
    """All processes that a command had started are gone soon after it."""
    ends = time.monotonic() + 10
    while any(Path("/proc", one).exists() for one in started) or of_session(process.pid):
        assert time.monotonic() < ends, [name for name in started if Path("/proc", name).exists()]
        time.sleep(0.05)


def test_a_campaign_that_was_killed_and_one_that_was_cut_short_end_as_one_that_ran_through(
    whole: Whole, tmp_path: Path
) -> None:
    folder = tmp_path / "killed"
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.campaigns", folder, "2"],
        cwd=ROOT, text=True, start_new_session=True, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    while lines(folder / "journal.jsonl") < 5:
        assert process.poll() is None
        time.sleep(0.01)
    started = of_session(process.pid)
    assert len(started) >= 3
    process.kill()
    process.wait()
    nothing_left(process, started)
    for path in folder.rglob("*.json"):
        json.loads(path.read_bytes())
    # as if the last line had been cut, and a finding had not been written
    with (folder / "journal.jsonl").open("ab") as file:
        file.write(b'{"number": 99, "cases"')
    before = len(whole_lines(folder))
    with campaign(folder) as running, processes(2) as executor:
        assert running.shares == before
        running.run(executor, 2, None, 0.5)
    assert (folder / "journal.jsonl").read_bytes().endswith(b"\n")
    with campaign(folder) as running, processes(2) as executor:
        running.run(executor, 2, CASES, None)
    assert kept(folder) == kept(whole.folder)
    assert files(folder) == files(whole.folder)
    assert running.totals.cases == CASES


def test_a_finding_that_was_cut_short_gives_way_to_what_it_is_reduced_to(whole: Whole, tmp_path: Path) -> None:
    """A share whose time was over is run again; what it had found by then is not kept beside what it finds then."""
    number, found = next(
        (share["number"], share["found"]) for share in kept(whole.folder) if any(each["confirmed"] for each in share["found"])
    )  # fmt: skip
    folder = tmp_path / "cut"
    with campaign(folder) as running:
        early = msgspec.convert(found[0]["case"], cases_of.Case)
        early = msgspec.structs.replace(early, about="", context=msgspec.structs.replace(early.context, n_batch=7))
        cut = Share(number, cases=1, cut=True, found=[replace_case(found[0], early)])
        running._add(cut)
        assert (folder / f"{name_of(early)}.json").exists()
    for line in (whole.folder / "journal.jsonl").read_bytes().splitlines(True)[: number + 1]:
        with (folder / "journal.jsonl").open("ab") as file:
            file.write(line)
    with campaign(folder) as running:
        assert name_of(early) not in running.totals.found
    assert not (folder / f"{name_of(early)}.json").exists()
    assert not (folder / "findings" / f"{name_of(early)}.json").exists()
    for name in running.totals.found:
        assert (folder / f"{name}.json").exists() and (folder / "findings" / f"{name}.json").exists()


def test_what_does_not_come_again_in_a_share_that_was_cut_short_stays(whole: Whole, tmp_path: Path) -> None:
    """A fault that comes now and then is still one; what was known when it came is no finding later."""
    name, found = next(iter(whole.totals.found.items()))
    longer = msgspec.structs.replace(found.case, steps=[cases_of.Clear(), *found.case.steps])
    same = replace(
        found, case=longer, fault=replace(found.fault, step=replace(found.fault.step, index=len(longer.steps) - 1))
    )
    folder = tmp_path / "flaky"
    with campaign(folder) as running:
        running._add(Share(0, cases=1, cut=True, found=[found, same]))
        assert (list(running.totals.found), sum(running.totals.known.values())) == ([name], 1)
    with campaign(folder) as running:
        assert list(running.totals.found) == [name]
        running._add(Share(0, cases=PLAN.size))
        assert list(running.totals.found) == [name] and running.totals.found[name] == found
    assert (folder / f"{name}.json").exists() and (folder / "findings" / f"{name}.json").exists()


@pytest.mark.usefixtures("nothing_left")
def test_a_hostile_example_that_is_answered_with_a_clean_error_is_no_finding() -> None:
    hostile = cases_of.Case(
        isolate=1, model=cases_of.Model(zoo="llama"), hostile=True,
        steps=[cases_of.Decode([cases_of.Run(0, [1])]), cases_of.Decode([cases_of.Run(0, [1], at=7)])],
    )  # fmt: skip
    try:
        share = run_examples(Plan(0, Space()), [hostile], shipped())
    finally:
        end_children()
    assert (share.cases, share.found, share.faults) == (1, [], [])


def test_what_is_known_does_not_change_the_cases_that_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    call = Call("llama_decode")
    fault = Fault("decode", Signature("decode", "x", -1, "decode"), StepInFlight(0, "decode"), call, call, "")

    def cases(known: bool) -> list[cases_of.Case]:
        ran: list[cases_of.Case] = []

        def run(children: object, case: cases_of.Case, wild: object) -> tuple[cases_of.Case, Outcome]:
            ran.append(case)
            return case, Outcome(fault, 1, 0.0)

        monkeypatch.setattr(shard, "_run", run)
        monkeypatch.setattr(shard, "recognized", lambda *_, **__: shipped()[0] if known else None)
        monkeypatch.setattr(shard._Runner, "_reduce", lambda self, case, fault: Found(case, fault, 1, 1))
        run_share(Plan(0, Space(), size=8), 0, (), (), frozenset())
        return ran

    try:
        assert cases(known=True) == cases(known=False)
    finally:
        end_children()


def replace_case(found: dict[str, Any], case: cases_of.Case) -> Found:
    return replace(msgspec.convert(found, Found), case=case)


@pytest.mark.usefixtures("planted", "nothing_left")
def test_a_share_ends_soon_after_the_time_is_over() -> None:
    """Also in the middle of reducing what it found: here it has more cases and replays than there is time for."""
    plan = replace(PLAN, replays=100_000, size=1000)
    started = time.monotonic()
    try:
        share = run_share(plan, 0, shipped(), (), frozenset(), time.time() + 3)
    finally:
        end_children()
    assert share.cut and 0 < share.cases < 1000
    assert time.monotonic() - started < 3 + 12


# -- interruptions


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_campaign_says_what_it_found_and_leaves_nothing(number: signal.Signals, tmp_path: Path) -> None:
    folder = tmp_path / "c"
    process = subprocess.Popen(
        [sys.executable, "-m", "isolate", "fuzz", *SMALL, "--cases", "100000", "--out", str(folder)],
        cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        preexec_fn=signals_as_at_a_terminal,
    )  # fmt: skip
    while len(descendants(process.pid)) < 2:
        assert process.poll() is None
        time.sleep(0.01)
    if number == signal.SIGTERM:
        while not lines(folder / "journal.jsonl"):
            time.sleep(0.01)
    started = of_session(process.pid)
    # Ctrl-C goes to every process of the terminal's job.
    os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
    output, errors = process.communicate(timeout=20)
    assert process.returncode == 128 + number
    assert f"kept in {folder}; the same command goes on from there" in output
    assert errors.strip() == ("interrupted" if number == signal.SIGINT else "")
    nothing_left(process, started)
    if number == signal.SIGTERM:
        again = isolate("fuzz", *SMALL, "--cases", 1, "--out", folder)
        assert again.exit_code in (0, 1), again.output
        assert any(line.startswith("40 cases") or line.startswith("80 cases") for line in again.output.splitlines())


@pytest.mark.usefixtures("planted")
def test_a_process_that_is_killed_ends_a_campaign_with_one_sentence(tmp_path: Path) -> None:
    def kill() -> None:
        os.kill(next(iter(executor._processes)), signal.SIGKILL)  # type: ignore[attr-defined]

    before = left_behind()
    killed = pytest.raises(IsolateError, match="a process of the campaign was killed; the same command goes on")
    with killed, campaign(tmp_path) as running, processes(1) as executor:
        running.run(executor, 1, CASES, None, kill)
    assert left_behind() == before
    assert 0 < len(kept(tmp_path)) < SHARES


# -- the command


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_is_told_where_a_campaign_stands(whole: Whole, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    totals = campaigns.Totals()
    with report_campaign.told(totals, 90) as show:
        totals.cases, totals.clock, totals.cases_here = 3, 2.0, 3
        totals.found = whole.totals.found
        show()
    said = terminal.getvalue()
    assert "3 cases, 0 steps (1.5 cases a second)" in said and " left" in said
    assert said.count("NEW  positions in load") >= 1


def test_a_log_is_told_of_what_is_new_at_once_and_of_the_rest_now_and_then(
    whole: Whole, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", log := io.StringIO())
    totals = campaigns.Totals()
    with report_campaign.told(totals, 90) as show:
        show()
        assert log.getvalue() == ""
        totals.found = whole.totals.found
        show()
        show()
        assert log.getvalue().splitlines() == ["NEW  " + str(found.fault.signature) for found in totals.found.values()]
        monkeypatch.setattr(report_campaign, "EVERY", 0)
        show()
    assert log.getvalue().splitlines()[-1].endswith(" left")


def fuzz(folder: Path, example: str, *words: object) -> Result:
    """`isolate fuzz` that finds the example's fault: it is in its database."""
    examples = Examples(str(folder / "database"))
    case = cases_of.read(ROOT / "cases" / "found" / f"{example}.json")
    examples.add(msgspec.structs.replace(case, expect="pass", about=""))
    return isolate(
        "fuzz",
        *SMALL,
        "--cases",
        1,
        "--database",
        folder / "database",
        "--out",
        folder / "campaign",
        "--jobs",
        1,
        *words,
    )


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Campaigns of the command are of one short case, and short of replays."""

    def small(plan: Plan, *arguments: Any) -> Campaign:
        space = replace(plan.space, steps=(1, 1))
        return Campaign(replace(plan, size=1, replays=40, space=space, served=0.0), *arguments)

    monkeypatch.setattr(campaigns, "Campaign", small)


@pytest.mark.usefixtures("quick", "nothing_left")
def test_a_known_finding_is_counted_and_is_no_failure(tmp_path: Path) -> None:
    result = fuzz(tmp_path, "part-copied-recurrent", "--json", tmp_path / "out.json")
    assert result.exit_code == 0, result.output
    assert "known       1 times  part-copied-recurrent" in result.output
    data = json.loads((tmp_path / "out.json").read_text())
    assert data["schema"] == "isolate.findings/1" and data["findings"] == []
    assert data["fuzz"]["known"] == {"part-copied-recurrent": 1} and data["ran"] == data["fuzz"]["cases"] == 2


@pytest.mark.usefixtures("quick")
def test_the_replay_line_of_a_new_finding_gives_it_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isolate.search.known.SHIPPED", (tmp_path / "none",))
    result = fuzz(tmp_path, "part-copied-recurrent", "--json", "-")
    assert result.exit_code == 1, result.output
    data = json.loads(result.stdout)
    (finding,) = data["findings"]
    again = fuzz(tmp_path, "part-copied-recurrent")
    assert again.exit_code == 1
    assert "OLD  FAULT" in again.output and "NEW" not in again.output
    assert "0 new findings, 1 of an earlier run" in again.output
    (line,) = (line for line in again.output.splitlines() if line.strip().startswith("replay"))
    words = shlex.split(line)[1:]
    assert words == shlex.split(finding["replay"]) and words[:2] == ["isolate", "run"]
    replayed = isolate(*words[1:], "--json", tmp_path / "again.json")
    assert replayed.exit_code == 1
    (same,) = json.loads((tmp_path / "again.json").read_text())["findings"]
    assert same["fault"]["signature"] == finding["fault"]["signature"]


def test_settings_that_leave_nothing_to_try_are_one_sentence(tmp_path: Path) -> None:
    out = ["--out", tmp_path / "c"]
    assert "no zoo model is called 'lama'" in sentence(isolate("fuzz", "--model", "zoo:lama", *out))
    assert "has recurrent memory" in sentence(isolate("fuzz", "--model", "zoo:llama", "--memory", "recurrent", *out))
    assert "exclude each other" in sentence(isolate("fuzz", "--hostile", "--server", *out))
    assert "nowhere: cannot be read" in sentence(isolate("fuzz", "--known", tmp_path / "nowhere", *out))


def test_a_type_of_weights_that_the_build_has_not_ends_a_campaign(tmp_path: Path) -> None:
    with pytest.raises(IsolateError, match=r"no case can be run: .*Q9_9"):
        plan = replace(PLAN, space=replace(PLAN.space, weights="Q9_9"), worker="isolate.replay.worker")
        with campaign(tmp_path, plan) as running, processes(1) as executor:
            running.run(executor, 1, None, 60)
