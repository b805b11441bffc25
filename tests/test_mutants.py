"""Planted faults: each is seen on the least that shows it, and that is what `minimize` leaves of a case that shows it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from isolate.case import Case
from isolate.replay.supervisor import Outcome, Supervisor
from isolate.search.minimize import Limits, minimize
from isolate.search.needs import tokens
from isolate.search.pin import Job, Settings
from tests.conftest import TESTS
from tests.mutants.catalogue import MUTANTS
from tests.mutants.killing import KILLS, Kill
from tests.mutants.worker import WORKER, with_mutant


@pytest.fixture(scope="module")
def right() -> Iterator[Supervisor]:
    """A child that goes through the layer, with nothing wrong in it."""
    with Supervisor(target=with_mutant(""), worker=WORKER) as children:
        yield children


def test_every_planted_fault_has_a_case() -> None:
    assert list(KILLS) == list(MUTANTS)
    assert len(MUTANTS) >= 25


@pytest.mark.parametrize("name", KILLS)
def test_the_library_as_it_is_passes(name: str, right: Supervisor) -> None:
    outcome = right.run(KILLS[name].case())
    assert outcome.fault is None, outcome.fault.explanation
    assert outcome.notes == ()


def killed(name: str) -> Outcome:
    with Supervisor(target=with_mutant(name), worker=WORKER) as children:
        return children.run(KILLS[name].case())


@pytest.mark.parametrize("name", KILLS)
def test_a_planted_fault_is_seen(name: str) -> None:
    kill: Kill = KILLS[name]
    fault = killed(name).fault
    assert fault is not None
    assert (fault.kind, fault.step.kind, fault.step.index) == (kill.kind, kill.on, len(kill.steps) - 1)


#: For each planted fault a case that a campaign found, or a long one made by hand where cells are counted, and the steps and
#: tokens of the least that it can shrink to.
FOUND = {line["mutant"]: line for line in map(json.loads, (TESTS / "mutants/found.jsonl").read_text().splitlines())}
#: Those that end above the least: what is left, in steps and tokens.
ABOVE = {
    # a copy that could be a decode
    "KeepKeepsTheNextToo": (3, 1),
    # a state that could be taken of an empty slot
    "RestoreLeaksACell": (4, 256),
    # in one layer the first cells of this prompt are hardly looked at
    "ShiftLeavesTheFirstCell": (3, 5),
}
#: The release has a fault by itself with the same signature, that is smaller.
SLIPS = ("RestoreGivesTheNewestCheckpoint",)


def test_nearly_all_reach_the_least_and_none_ends_larger_than_twice_it() -> None:
    assert list(FOUND) == list(MUTANTS)
    assert len(ABOVE) <= 0.1 * len(MUTANTS)
    for name, left in ABOVE.items():
        assert left[0] <= 2 * FOUND[name]["steps"] and left[1] <= 2 * FOUND[name]["tokens"]


@pytest.mark.slow
@pytest.mark.parametrize("name", FOUND)
def test_a_planted_fault_shrinks_to_the_least_that_shows_it(name: str, right: Supervisor) -> None:
    found = FOUND[name]
    job = Job(msgspec.convert(found["case"], Case), Path(), "")
    settings = Settings(with_mutant(name), worker=WORKER)
    if name in SLIPS:
        left = minimize(job, settings, Limits(confirm=1), lambda case: right.run(case).fault is not None)
    else:
        left = minimize(job, settings, Limits(confirm=1))
    assert left.minimal
    assert (len(left.case.steps), tokens(left.case)) == ABOVE.get(name, (found["steps"], found["tokens"]))
