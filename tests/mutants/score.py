"""The mutation score: how many planted faults generated cases find, and after how many cases.

    PYTHONPATH=. python -m tests.mutants.score [NAME...]

Cases are those of a campaign with one seed, so the same every time. A fault that the library has by itself is no kill.
"""

from __future__ import annotations

import os
import sys
import time
from concurrent.futures import as_completed
from dataclasses import dataclass

from isolate.case import Case
from isolate.errors import IsolateError
from isolate.fault import Fault
from isolate.replay.supervisor import Supervisor
from isolate.search.campaign import KEPT
from isolate.search.executors import processes
from isolate.search.fuzz import Space
from isolate.search.shard import Plan, _Runner, end_children
from tests.mutants.catalogue import MUTANTS
from tests.mutants.worker import WORKER, with_mutant

SEED = 1
MOST = 2000
JOBS = 2
#: Cases on one model with one set of settings: few, since one that cannot show a fault is soon left.
SIZE = 10
#: Share of the planted faults that must be found.
NEEDED = 24 / 25


@dataclass(frozen=True)
class Hunted:
    """How a planted fault was found, or that it was not."""

    name: str
    cases: int
    steps: int
    seconds: float
    #: what showed it, None where nothing did
    fault: Fault | None = None
    case: Case | None = None


class _Killed(Exception):
    def __init__(self, case: Case, fault: Fault) -> None:
        self.case, self.fault = case, fault


class _Hunt(_Runner):
    """A share that ends at the first fault that the library does not have by itself."""

    right: Supervisor

    def _examine(self, case: Case, fault: Fault) -> None:
        own = self.right.run(case).fault
        if own is None or (own.signature, own.step) != (fault.signature, fault.step):
            raise _Killed(case, fault)


def hunt(name: str, seed: int = SEED, guided: bool = True, most: int = MOST) -> Hunted:
    """Run generated cases on the library with this planted fault until one shows it."""
    os.environ["MUTANT"] = name
    plan = Plan(seed, Space(), guided=guided, worker=WORKER, size=SIZE)
    started = time.monotonic()
    kept: list[Case] = []
    seen: set[str] = set()
    cases = steps = 0
    try:
        with Supervisor(target=with_mutant(""), worker=WORKER) as right:
            for number in range(-(-most // SIZE)):
                share = _Hunt(plan, number, (), kept[-KEPT:], frozenset(seen))
                share.right = right
                try:
                    done = share.run()
                except _Killed as killed:
                    cases, steps = cases + share.share.cases, steps + share.share.steps
                    return Hunted(name, cases, steps, time.monotonic() - started, killed.fault, killed.case)
                if sum(done.refused.values()) == done.cases:
                    raise IsolateError(next(iter(done.refused)))
                cases, steps = cases + done.cases, steps + done.steps
                kept += done.kept
                seen |= set(done.facts)
    finally:
        end_children()
    return Hunted(name, cases, steps, time.monotonic() - started)


def main() -> None:
    """Hunt all planted faults, or those that are named, and print the table."""
    names = sys.argv[1:] or list(MUTANTS)
    found = 0
    began = time.monotonic()
    width = max(map(len, names))
    with processes(JOBS) as executor:
        for future in as_completed([executor.submit(hunt, name) for name in names]):
            hunted = future.result()
            found += hunted.fault is not None
            how = "not found" if hunted.fault is None else f"{hunted.fault.kind} on {hunted.fault.step.kind}"
            print(f"{hunted.name:<{width}}  {how:<24} {hunted.cases:>5} cases {hunted.seconds:>7.1f} s", flush=True)
    print(f"{found} of {len(names)} found, {time.monotonic() - began:.0f} s with {JOBS} jobs")
    sys.exit(found < NEEDED * len(names))


if __name__ == "__main__":
    main()
