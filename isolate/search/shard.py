"""A share of a campaign: some cases that follow from the plan and a number, run, and what was found among them reduced.

Everything that a share depends on is given to it, so it can run in any process on any machine, and gives the same cases.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

import msgspec

from isolate.case import Case, Decode, SeqRm
from isolate.errors import IsolateError
from isolate.fault import Fault, Finding
from isolate.replay.supervisor import Outcome, Supervisor
from isolate.replay.target import find as find_target
from isolate.search import fuzz, pin
from isolate.search.coverage import Fact, facts
from isolate.search.even import Even
from isolate.search.followed import Followed
from isolate.search.fuzz import Ground, Space, changed, generated, ground
from isolate.search.hostile import CLEAN, accepted
from isolate.search.known import Known, name_of, recognized
from isolate.search.minimize import Limits, minimize
from isolate.search.room import overfull
from isolate.zoo import ZOO

#: Cases in a share. Few models and settings serve all of them, so that noise is measured once for each.
SIZE = 40
#: Models with settings in a share, where guided: on one that can show a fault a few cases do.
GROUNDS = 4
#: Replays that reducing one finding may cost.
REPLAYS = 250
#: The same for a step that hangs: each costs the time limit.
HANG_REPLAYS = 12
#: Seconds beyond the campaign's time in which what was found last is reduced a little.
LAST_SECONDS = 4.0
#: Findings of one signature and kind of memory that a share reduces.
REDUCED = 2
#: One of so many faults that look known is reduced all the same, since another may hide behind it.
LOOKED_AT = 20
#: Of shares with something to go on from, how many do; and how many of their cases.
GUIDED_SHARES, GUIDED_CASES = 0.3, 0.6
#: Cases drawn for each that is run, where guided: the one that would try most that is new.
DRAWN = 6
#: A child is replaced after so many cases: it keeps what it measured.
CHILD_CASES = 2000


@dataclass(frozen=True)
class Plan:
    """What a campaign tries. Equal plans give equal cases."""

    seed: int
    space: Space
    build: str | None = None
    include: str | None = None
    target: str = "cpu"
    timeout: float = 30.0
    #: share of cases that a server would make
    served: float = 0.3
    #: oversteps limits
    hostile: bool = False
    #: models and settings are spread evenly, what would try most that is new is run, and what did is changed further
    guided: bool = True
    #: module of the child
    worker: str = "isolate.replay.worker"
    #: cases in a share
    size: int = SIZE
    #: replays that reducing one finding may cost
    replays: int = REPLAYS


@dataclass(frozen=True)
class Found:
    """A fault, reduced."""

    case: Case
    fault: Fault
    times: int
    of: int
    #: it came when it was found, but not in fresh children
    confirmed: bool = True

    def finding(self, replay: str) -> Finding:
        """It as an entry of the one schema, with the command that replays it."""
        return Finding(self.case.as_json(), self.fault, self.times, self.of, replay)


@dataclass
class Share:
    """What came of a share."""

    #: -1 for cases of an example database
    number: int
    cases: int = 0
    steps: int = 0
    seconds: float = 0.0
    #: cases that the build refused, by its sentence
    refused: dict[str, int] = field(default_factory=dict)
    #: faults that were recognized, by the name of the known finding
    known: dict[str, int] = field(default_factory=dict)
    #: faults of a signature that the share had reduced often enough
    passed_over: int = 0
    found: list[Found] = field(default_factory=list)
    facts: list[str] = field(default_factory=list)
    #: cases that tried something new
    kept: list[Case] = field(default_factory=list)
    #: of each fault in the order of cases: its number among them and its signature
    faults: list[tuple[int, str]] = field(default_factory=list)
    #: names of the examples that were run
    examples: list[str] = field(default_factory=list)
    #: the campaign's time was over before all was done
    cut: bool = False


_own = threading.local()


def run_share(
    plan: Plan,
    number: int,
    known: Sequence[Known],
    kept: Sequence[Case],
    seen: frozenset[str],
    until: float | None = None,
) -> Share:
    """Run share `number` of a plan. `kept` are cases to go on from, `seen` the facts that are nothing new.

    The share is cut short at `until`, in seconds since the epoch.
    """
    return _Runner(plan, number, known, kept, seen, until).run()


def run_examples(plan: Plan, examples: Sequence[Case], known: Sequence[Known], until: float | None = None) -> Share:
    """Run cases that failed once as a share of their own."""
    runner = _Runner(plan, -1, known, (), frozenset(), until)
    # Which steps of a hostile one overstep is not told: each may be answered with a clean error.
    share = runner.run((case, frozenset(range(len(case.steps)) if case.hostile else ())) for case in examples)
    share.examples = [name_of(case) for case in examples[: share.cases]]
    return share


class _Runner:
    def __init__(
        self,
        plan: Plan,
        number: int,
        known: Sequence[Known],
        kept: Sequence[Case],
        seen: frozenset[str],
        until: float | None = None,
    ) -> None:
        self.plan = plan
        self.known = list(known)
        self.kept = kept
        self.seen = set(seen)
        self.until = math.inf if until is None else until
        self.chance = Random(f"{plan.seed}:{number}")
        self.share = Share(number)
        self.reduced: Counter[tuple[str, str]] = Counter()

    def run(self, cases: Iterable[tuple[Case, frozenset[int]]] | None = None) -> Share:
        """Run the cases given, or those that follow from the plan and the number."""
        started = time.monotonic()
        children = _children(self.plan)
        for case, wild in self._cases() if cases is None else cases:
            if time.time() >= self.until:
                self.share.cut = True
                break
            self.share.cases += 1
            try:
                case, outcome = _run(children, case, wild)
            except IsolateError as error:
                self.share.refused[error.message] = self.share.refused.get(error.message, 0) + 1
                continue
            self.share.steps += outcome.steps
            self._learn(case, outcome, children)
            if outcome.fault is not None:
                self.share.faults.append((self.share.cases, str(outcome.fault.signature)))
                self._examine(case, outcome.fault)
        self.share.seconds = time.monotonic() - started
        return self.share

    def _cases(self) -> Iterator[tuple[Case, frozenset[int]]]:
        plan, chance = self.plan, self.chance
        going_on = plan.guided and not plan.hostile and self.kept and chance.random() < GUIDED_SHARES
        from_here: list[Case] = []
        if going_on:
            first = chance.choice(self.kept)
            grounds = [Ground(first.model, first.context, first.api)]
            from_here = [
                case
                for case in self.kept
                if (case.model, case.context, case.api) == (first.model, first.context, first.api)
            ]
        elif plan.guided:
            # All that there is to choose from comes soon.
            first_place = GROUNDS * self.share.number
            grounds = [ground(Even(plan.seed, first_place + number), plan.space) for number in range(GROUNDS)]
        else:
            grounds = [ground(chance, plan.space)]
        for index in range(plan.size):
            here = grounds[index * len(grounds) // plan.size]
            if plan.hostile:
                yield fuzz.hostile(chance, here, plan.space)
            else:
                drawn = [self._drawn(here, from_here) for _ in range(DRAWN if plan.guided else 1)]
                yield max(drawn, key=lambda case: len(self._new(facts(case, len(case.steps))))), frozenset()

    def _drawn(self, here: Ground, from_here: Sequence[Case]) -> Case:
        """A case on this ground: one that begins as another, or any."""
        plan, chance = self.plan, self.chance
        if from_here and chance.random() < GUIDED_CASES:
            return changed(chance, chance.choice(from_here), plan.space)
        return generated(chance, here, plan.space, "served" if chance.random() < plan.served else "free")

    def _new(self, tried: Iterable[Fact]) -> set[str]:
        return {repr(fact) for fact in tried} - self.seen

    def _learn(self, case: Case, outcome: Outcome, children: Supervisor) -> None:
        """Keep a case that tried something new, as far as it came."""
        tried = facts(case, outcome.steps) | {("kernel", *launched) for launched in children.seen()}
        new = self._new(tried)
        if not new:
            return
        self.seen |= new
        self.share.facts += sorted(new)
        # What a fault cut short is a way into the same fault only.
        if self.plan.guided and outcome.fault is None and all(step.kind != "context" for step in case.steps):
            self.share.kept.append(case)

    def _examine(self, case: Case, fault: Fault) -> None:
        """Reduce a fault, unless it is known."""
        last = fault.step.index
        case = msgspec.structs.replace(case, steps=case.steps if last is None else case.steps[: last + 1])
        known = recognized(self.known, case, fault)
        # By a chance of its own: what is known must not change the cases that follow.
        looked_at = not Random(f"{self.plan.seed}:{self.share.number}:{self.share.cases}").randrange(LOOKED_AT)
        if known is not None and not looked_at:
            return self._count(known)
        kind = str(fault.signature), str(case.model.zoo)
        self.reduced[kind] += 1
        if self.reduced[kind] > REDUCED:
            self.share.passed_over += 1
            return None
        found = self._reduce(case, fault)
        known = recognized(self.known, found.case, found.fault, reduced=True) if found.confirmed else None
        if known is not None:
            return self._count(known)
        self.share.found.append(found)
        if found.confirmed:
            self.known.append(Known(name_of(found.case), found.case))
        return None

    def _count(self, known: Known) -> None:
        self.share.known[known.name] = self.share.known.get(known.name, 0) + 1

    def _reduce(self, case: Case, fault: Fault) -> Found:
        plan = self.plan
        settings = pin.Settings(
            find_target(plan.target, plan.build, plan.include), plan.build, plan.include, timeout=plan.timeout,
            worker=plan.worker,
        )  # fmt: skip
        at_its_end = replace(fault, step=replace(fault.step, index=None))
        seconds = None if self.until == math.inf else max(0.0, self.until + LAST_SECONDS - time.time())
        limits = Limits(replays=plan.replays, seconds=seconds)
        if fault.kind == "hang":
            limits = Limits(replays=HANG_REPLAYS, seconds=seconds, confirm=1)
        try:
            least = minimize(
                pin.Job(case, Path(), ""), settings, limits,
                # Else most end at the known finding that is the smallest.
                avoid=lambda candidate: other_rules(case, candidate, fault)
                or recognized(self.known, candidate, at_its_end) is not None,
            )  # fmt: skip
        except IsolateError:
            return Found(case, fault, 0, 1, confirmed=False)
        finally:
            # It may not be all that more time would have reduced it to.
            self.share.cut |= time.time() >= self.until
        return Found(least.case, least.fault, least.times, least.of)


def other_rules(case: Case, candidate: Case, fault: Fault) -> bool:
    """Another answer would be right: a removal is asked of memory that may refuse it, or no limit is overstepped any more."""
    if case.hostile and (not candidate.hostile or fault.kind in CLEAN):
        # An answer that says no is right there, and what is asked without overstepping is not what it was.
        return True
    last = candidate.steps[-1]
    if isinstance(last, Decode) and last.returns == 1 and not overfull(candidate):
        return True
    if fault.kind != "memory" or not isinstance(candidate.model.zoo, str):
        return False
    if isinstance(last, SeqRm) and last.returns is False:
        return not refusable(candidate)
    recipe, snapshots = ZOO[candidate.model.zoo], 0
    if case.context.n_rs_seq is not msgspec.UNSET:
        if case.context.n_rs_seq != candidate.context.n_rs_seq or recipe.name not in fuzz.SNAPSHOTS:
            return True
        snapshots = int(case.context.n_rs_seq)
    elif recipe.partial_removal:
        return False
    followed = Followed(recipe, candidate.context)
    for step in candidate.steps:
        if isinstance(step, SeqRm) and step.returns is msgspec.UNSET and step.p0 > 0:
            taken_back = followed.ends.get(step.slot, 0) - step.p0
            if taken_back > min(snapshots, followed.fresh.get(step.slot, 0)):
                return True
        followed.add(step)
    return False


def refusable(case: Case) -> bool:
    """The removal that a case ends with is one that memory cannot do: the end of what a recurrent state has seen."""
    recipe, last = ZOO[str(case.model.zoo)], case.steps[-1]
    assert isinstance(last, SeqRm)
    followed = Followed(recipe, case.context)
    for step in case.steps[:-1]:
        followed.add(step)
    return not recipe.partial_removal and 0 < last.p0 < followed.ends.get(last.slot, 0)


def _children(plan: Plan) -> Supervisor:
    """This thread's child, kept from one share to the next."""
    own: tuple[Plan, Supervisor, int] | None = getattr(_own, "children", None)
    if own is not None and own[0] == plan and own[2] < CHILD_CASES:
        _own.children = plan, own[1], own[2] + plan.size
        return own[1]
    if own is not None:
        own[1].close()
    target = find_target(plan.target, plan.build, plan.include)
    children = Supervisor(plan.build, plan.include, target, plan.timeout, worker=plan.worker)
    _own.children = plan, children, plan.size
    return children


def end_children() -> None:
    """End this thread's child."""
    own = getattr(_own, "children", None)
    if own is not None:
        own[1].close()
        del _own.children


def _run(children: Supervisor, case: Case, wild: frozenset[int]) -> tuple[Case, Outcome]:
    """Run a case; where it oversteps a limit and is told so, that is what it should get, and it is run on from there."""
    while True:
        outcome = children.run(case)
        answered = accepted(case, outcome.fault, wild) if outcome.fault is not None and wild else None
        if answered is None:
            return case, outcome
        case = answered
