"""Planted faults: each is seen on the least that shows it, and that is what `minimize` leaves of a case that shows it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from isolate.replay.supervisor import Outcome, Supervisor
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
