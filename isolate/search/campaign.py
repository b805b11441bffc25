"""A campaign: shares of cases run side by side, in processes of this machine or of a cluster, and kept in a folder.

What a share may build on are the results of those that came long enough before it, so the same plan gives the same cases
however many run at once, and a campaign that was interrupted, or killed, goes on where its journal ends.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from isolate.case import Case, Expect
from isolate.errors import IsolateError
from isolate.library.find import find_build
from isolate.search.examples import Examples
from isolate.search.journal import Folder
from isolate.search.known import Known, name_of, recognized
from isolate.search.shard import Found, Plan, Share, run_examples, run_share

#: Shares handed out for each that can run at once: one that takes long must not leave the others without.
AHEAD = 8
#: A share builds on the first half of those before it, and on all but the last ones, in multiples of `TOGETHER`: the rest may
#: still be running.
LAST, TOGETHER = 128, 8
#: Cases to go on from, the newest ones.
KEPT = 400
#: Shares of which some case must be one that can be run.
SOME = 3
#: Examples of a database that are run one after the other in one process.
EXAMPLES = 8


@dataclass
class Totals:
    """What a campaign has done so far, in this run and those before."""

    cases: int = 0
    steps: int = 0
    #: of all processes together
    seconds: float = 0.0
    passed_over: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    known: Counter[str] = field(default_factory=Counter)
    found: dict[str, Found] = field(default_factory=dict)
    #: names of those that runs before this one found
    before: frozenset[str] = frozenset()
    unconfirmed: dict[str, Found] = field(default_factory=dict)
    facts: set[str] = field(default_factory=set)
    #: cases and steps of this run, and its time on the clock
    cases_here: int = 0
    steps_here: int = 0
    clock: float = 0.0

    def add(self, share: Share) -> None:
        """Count a share; its findings are added by the campaign."""
        self.cases += share.cases
        self.steps += share.steps
        self.seconds += share.seconds
        self.passed_over += share.passed_over
        self.refused.update(share.refused)
        self.known.update(share.known)
        self.facts.update(share.facts)

    def seen(self, kind: str) -> int:
        """How many facts of a kind were seen: `follows` are pairs of steps, `kernel` kernels with a class of grid."""
        return sum(fact.startswith(f"('{kind}'") for fact in self.facts)


class Campaign:
    """A plan, in a folder. Use as a context manager: nobody else can run it meanwhile.

    `document` is what is kept beside the case of a new finding, for the path that the case is at.
    """

    def __init__(
        self,
        plan: Plan,
        folder: Path,
        known: list[Known],
        document: Callable[[Found, Path], dict[str, Any]],
        examples: Examples | None = None,
    ) -> None:
        self.plan = plan
        self.place = folder
        self.known = known
        self.document = document
        self.examples = examples
        self.totals = Totals()
        #: shares that are kept
        self.shares = 0
        self._before = _Before(list(known))
        #: those that shares to come do not all build on
        self._recent: deque[Share] = deque()
        #: what only shares found that were cut short and are to be run again, by their number
        self._of_cut: dict[int, dict[str, Found]] = {}
        self._tried: set[str] = set()

    def __enter__(self) -> Campaign:
        self.folder = Folder(self.place)
        try:
            self.folder.begin(self.plan, find_build(self.plan.build, self.plan.include).key(), self.known)
            for share in self.folder.shares():
                self._take_up(share)
            self.totals.before = frozenset(self.totals.found)
        except BaseException:
            self.folder.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.folder.close()

    # -- what came of shares

    def _take_up(self, share: Share) -> None:
        """Count a share of the journal, unless it was cut short, which it is run again for."""
        if share.number == self.shares and not share.cut:
            self._count(share)
        elif share.number < 0:
            self._merge(share)
        else:
            new = {self._keep(found): found for found in share.found if found.confirmed and not self._known_as(found)}
            self._of_cut.setdefault(share.number, {}).update(new)

    def _add(self, share: Share) -> None:
        """Keep what came of a share. One that was cut short is counted now, and is run again when the campaign goes on."""
        if share.cases:
            self.folder.keep(share)
        if share.number == self.shares and not share.cut:
            self._count(share)
        else:
            self._merge(share)
        self.totals.cases_here += share.cases
        self.totals.steps_here += share.steps

    def _count(self, share: Share) -> None:
        self.shares += 1
        self._recent.append(share)
        while self._before.shares < _bound(self.shares):
            self._before.add(self._recent.popleft())
        # What was found until it was cut short is found again, perhaps reduced further; what does not come again stays.
        given_way = self._of_cut.pop(share.number, {})
        for name in given_way:
            self.totals.found.pop(name, None)
        self._merge(share)
        for name, found in given_way.items():
            if name in self.totals.found:
                continue
            if self._known_as(found):
                self.folder.remove_finding(name)
            else:
                self._keep(found)

    def _merge(self, share: Share) -> None:
        """Count a share, and write what is new in it."""
        self.totals.add(share)
        self._tried.update(share.examples)
        for found in share.found:
            if not found.confirmed:
                self._not_confirmed(found)
                continue
            known = self._known_as(found)
            if known is not None:
                self.totals.known[known.name] += 1
                continue
            self._keep(found)
            if self.examples is not None:
                self.examples.add(found.case)

    def _known_as(self, found: Found) -> Known | None:
        before = [*self.known, *(Known(name, other.case) for name, other in self.totals.found.items())]
        return recognized(before, found.case, found.fault, reduced=True)

    def _keep(self, found: Found) -> str:
        """Keep a finding that is not known; its name."""
        name = name_of(found.case)
        self.totals.found[name] = found
        self.folder.add_finding(name, found.case, self.document(found, self.folder.case(name)))
        return name

    def _not_confirmed(self, found: Found) -> None:
        fault = found.fault
        expect = Expect(kind=fault.kind, step=fault.step.kind, where=fault.signature.where)
        name = name_of(replace(found.case, expect=expect))
        self.totals.unconfirmed[name] = found
        about = f"Seen once, but not in fresh children: {fault.signature}."
        self.folder.add_unconfirmed(name, replace(found.case, about=about))

    # -- running

    def run(
        self, executor: Executor, at_once: int, cases: int | None, seconds: float | None,
        told: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """Run shares until so many cases were run in all, or so many seconds have gone by; `told` is called after each share."""
        started = time.monotonic()
        until = None if seconds is None else time.time() + seconds
        for share in self._shares(executor, at_once, cases, until):
            self.totals.clock = time.monotonic() - started
            self._add(share)
            told()
            refused = self.totals.refused
            if self.totals.cases >= SOME * self.plan.size and sum(refused.values()) == self.totals.cases:
                raise IsolateError(f"no case can be run: {refused.most_common(1)[0][0]}")

    def _shares(self, executor: Executor, at_once: int, cases: int | None, until: float | None) -> Iterator[Share]:
        last = None if cases is None else -(-cases // self.plan.size)
        waiting = deque(self._examples(executor, until))
        submitted, bound = self.shares, -1
        while True:
            over = until is not None and time.time() >= until
            while not over and len(waiting) < AHEAD * at_once and (last is None or submitted < last):
                if _bound(submitted) > self.shares:
                    break
                if _bound(submitted) != bound:
                    bound = _bound(submitted)
                    before = self._before.with_more(self._recent, bound)
                    # One copy for all shares that build on the same ones.
                    known, kept, seen = before.known, list(before.kept), frozenset(before.seen)
                waiting.append(executor.submit(run_share, self.plan, submitted, known, kept, seen, until))
                submitted += 1
            # When it is over they all end soon, those that have not begun at once.
            if not waiting:
                return
            yield waiting.popleft().result()

    def _examples(self, executor: Executor, until: float | None) -> Iterator[Future[Share]]:
        """What failed once is run first; what this campaign found or ran itself is not run again."""
        ran = self._tried | self.totals.found.keys()
        cases = [case for case in self.examples or () if name_of(case) not in ran]
        for first in range(0, len(cases), EXAMPLES):
            some = cases[first : first + EXAMPLES]
            yield executor.submit(run_examples, self.plan, some, self._before.known, until)


def _bound(number: int) -> int:
    """How many of the shares before it share `number` builds on."""
    return max(number // 2, number - LAST) // TOGETHER * TOGETHER


@dataclass
class _Before:
    """What the first shares leave to later ones."""

    #: what need not be reduced again
    known: list[Known]
    #: cases to go on from
    kept: deque[Case] = field(default_factory=lambda: deque(maxlen=KEPT))
    #: facts that are nothing new
    seen: set[str] = field(default_factory=set)
    shares: int = 0

    def add(self, share: Share) -> None:
        """Count the next share."""
        self.shares += 1
        self.kept.extend(share.kept)
        self.seen.update(share.facts)
        self.known += [Known(name_of(found.case), found.case) for found in share.found if found.confirmed]

    def with_more(self, shares: Iterable[Share], count: int) -> _Before:
        """The same with the next shares, so that there are `count` in all."""
        more = _Before(list(self.known), self.kept.copy(), set(self.seen), self.shares)
        for share in shares:
            if more.shares == count:
                break
            more.add(share)
        return more
