"""Findings that are known already: is what a case shows one of them?

A known finding is a small case that says what it gives. Another fault is taken to be the same when it is of the same kind,
at the same place, in the same kind of step, and the steps of the known case can be found in its own, in their order and with
the slots playing the same parts, the last of them being the one that failed. How many tokens were decoded is not compared.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from msgspec import UNSET

from isolate import case as cases_of
from isolate.case import (
    Case,
    Checkpoint,
    Clear,
    Context,
    Decode,
    Expect,
    Load,
    Reopen,
    Restore,
    Save,
    SeqAdd,
    SeqCp,
    SeqKeep,
    SeqRm,
    Step,
)
from isolate.errors import CaseError, IsolateError
from isolate.fault import DEATHS, Fault
from isolate.search.passes import content
from isolate.search.without import contexts_of
from isolate.serve.options import PLAIN_TYPES
from isolate.zoo import ZOO

#: Kinds of memory that have what a kind has: a fault of that is one of them, too.
_CONTAIN = {
    "attention": {"attention", "window", "hybrid"},
    "window": {"window"},
    "recurrent": {"recurrent", "hybrid"},
    "hybrid": {"hybrid"},
}
#: Kinds of fault that show only in what comes later.
_SILENT = {"positions", "logits", "cells", "nan"}
#: Settings that a known case has from need, where it has them.
_NEEDED = ("kv_unified", "swa_full")
#: Where the shipped cases are.
SHIPPED = (Path(__file__).parents[1] / "cases", Path(__file__).parents[2] / "cases")
#: How often two steps may be compared in one search.
_COMPARISONS = 20_000


@dataclass(frozen=True)
class Known:
    """A finding that has a name."""

    name: str
    case: Case

    @property
    def expect(self) -> Expect:
        """What its case gives."""
        assert not isinstance(self.case.expect, str)
        return self.case.expect


def read_all(places: Iterable[Path]) -> list[Known]:
    """The known findings of files and folders of cases; cases that pass are passed over. IsolateError where there is no case."""
    found = []
    for place in places:
        readable = False
        paths = sorted(place.rglob("*.json")) if place.is_dir() else [place]
        for path in paths:
            try:
                case = cases_of.read(path)
            except CaseError:
                if not place.is_dir():
                    raise
                continue
            readable = True
            if not isinstance(case.expect, str):
                found.append(Known(path.stem, case))
        if not readable:
            raise IsolateError(f"{place}: no case is in this folder")
    return found


def recognized(known: Sequence[Known], case: Case, fault: Fault, reduced: bool = False) -> Known | None:
    """The known finding that a case shows with this fault; None where it is a new one.

    A case that was reduced needs each of its steps. Where the heart of a known finding is among them, it is the same one,
    whatever led up to it: one that goes wrong in silence, whatever noticed it in the end, or one that dies at the same place.
    """
    last = len(case.steps) - 1 if fault.step.index is None else fault.step.index
    steps = _marked(case.steps[: last + 1])
    allowed = [each for each in known if _allowed(each.case, case)]
    same = (
        each
        for each in allowed
        if each.expect.given_by(fault) and _within(each, each.case.steps, steps).found(exactly=True)
    )
    later = (
        each
        for each in allowed
        if reduced
        and (_alike_in_kind(each, fault) or (fault.kind in DEATHS and each.expect.given_by(fault)))
        and _within(each, heart(each.case), steps).found(exactly=False)
    )
    return next(same, None) or next(later, None)


def _alike_in_kind(known: Known, fault: Fault) -> bool:
    """Both go wrong in silence, or by states that are lost on the device, which show as a death, too."""
    return {known.expect.kind, fault.kind} <= (_SILENT | DEATHS if _lost_on_device(known.case) else _SILENT)


def _within(known: Known, only: Sequence[Step], steps: Sequence[_Marked]) -> _Search:
    """The search for `only` these steps of a known case among others."""
    chosen = [marked for marked in _marked(known.case.steps) if any(marked.step is step for step in only)]
    # What part is copied matters only where the copy itself fails.
    return _Search(chosen, steps, ranges=known.expect.step == "seq_cp")


def heart(known: Case) -> list[Step]:
    """The steps that make a fault: not those that only fill or empty slots, nor both ends of a state that goes wrong on one.

    Of one that dies, the states that are taken and set. All steps where less than two would be left.
    """
    names = _lost_on_device(known)
    if names:
        return [step for step in known.steps if isinstance(step, Checkpoint | Restore) and step.name in names]
    if not isinstance(known.expect, str) and known.expect.kind in DEATHS:
        states: list[Step] = [step for step in known.steps if isinstance(step, Checkpoint | Save | Restore | Load)]
        return states if len(states) > 1 else list(known.steps)
    found: list[Step] = []
    touched: set[int] = set()
    kept: set[str] = set()
    for step in known.steps:
        if isinstance(step, SeqCp | SeqAdd | SeqKeep) or (isinstance(step, SeqRm) and (step.p0 > 0 or step.p1 >= 0)):
            touched |= {getattr(step, name) for name in ("slot", "into") if hasattr(step, name)}
        elif isinstance(step, Checkpoint | Save) and step.slot in touched:
            kept.add(step.name)
        elif not isinstance(step, Restore | Load) or step.name in kept:
            continue
        found.append(step)
    return found if len(found) > 1 else list(known.steps)


def _lost_on_device(known: Case) -> set[str]:
    """States of a quantized cache on the device: what is lost of them shows after any change of the slot, or as a crash."""
    if not {known.context.type_k, known.context.type_v} - PLAIN_TYPES:
        return set()
    return {step.name for step in known.steps if isinstance(step, Checkpoint) and "on_device" in step.flags}


def _allowed(known: Case, case: Case) -> bool:
    """The other case runs on such memory, with the settings that the known one needs."""
    if known.hostile and not case.hostile:
        return False
    cells = True
    if known.model.zoo is not UNSET and case.model.zoo is not UNSET:
        here, there = ZOO[str(known.model.zoo)].memory, ZOO[str(case.model.zoo)].memory
        # How a batch is split hangs on its slots, whatever keeps them.
        slow = not isinstance(known.expect, str) and known.expect.kind == "slow"
        if there not in _CONTAIN[here] and not slow:
            return False
        cells = here in ("attention", "window")
    copies = cells and any(isinstance(step, SeqCp) for step in known.steps)
    return any(_allowed_in(known.context, context, copies) for context in contexts_of(case).values())


def _allowed_in(known: Context, context: Context, copies: bool) -> bool:
    plain = Context()
    for name in _NEEDED:
        value = getattr(known, name)
        if value != getattr(plain, name) and value != getattr(context, name):
            return False
    if known.n_rs_seq is not UNSET and context.n_rs_seq is UNSET:
        # There are no snapshots.
        return False
    if copies and known.kv_unified != context.kv_unified:
        # A copy shares cells in a unified cache, and has its own in another.
        return False
    # One quantized type is as good as another.
    return all(
        getattr(known, name) in PLAIN_TYPES or getattr(context, name) not in PLAIN_TYPES
        for name in ("type_k", "type_v")
    )


class _Marked(NamedTuple):
    """A step, and whether it takes the state of a slot that holds nothing."""

    step: Step
    empty: bool


def _marked(steps: Sequence[Step]) -> list[_Marked]:
    """The steps, states of slots that hold nothing first: it is all the same when those are taken. The last step stays."""
    holding: set[int] = set()
    taken_from: dict[str, int] = {}
    found: list[_Marked] = []
    for step in steps:
        if isinstance(step, Checkpoint | Save):
            taken_from[step.name] = step.slot
        found.append(_Marked(step, isinstance(step, Checkpoint | Save) and step.slot not in holding))
        if found[-1].empty:
            assert isinstance(step, Checkpoint | Save)
            taken_from.pop(step.name, None)
        match step:
            case Decode():
                holding |= {run.slot for run in step.batch}
            case SeqCp() if step.slot in holding:
                holding.add(step.into)
            case Load() | Restore() if step.name in taken_from:
                holding.add(step.slot if isinstance(step.slot, int) else taken_from[step.name])
            case SeqRm() if step.p0 <= 0 and step.p1 < 0:
                holding = set() if step.slot < 0 else holding - {step.slot}
            case SeqKeep():
                holding &= {step.slot}
            case Clear() | Reopen():
                holding.clear()
    return sorted(found[:-1], key=lambda marked: not marked.empty) + found[-1:]


class _Search:
    """Backtracking over places for each known step, from the last one to the first."""

    def __init__(self, known: Sequence[_Marked], steps: Sequence[_Marked], ranges: bool) -> None:
        self.ranges = ranges
        self.known = known
        self.steps = steps
        self.left = _COMPARISONS

    def found(self, exactly: bool) -> bool:
        """There are places for all; `exactly`: the last step of both is the same, the one that failed."""
        return self._from(len(self.known) - 1, len(self.steps) - 1, {}, {}, exactly)

    def _from(self, number: int, last: int, slots: dict[int, int], names: dict[str, str], exactly: bool) -> bool:
        if number < 0:
            return True
        for place in range(last, last - 1 if exactly else -1, -1):
            self.left -= 1
            if self.left < 0:
                return False
            one, other = self.known[number], self.steps[place]
            if one.empty != other.empty:
                continue
            for own_slots, own_names in _matches(one.step, other.step, slots, names, self.ranges):
                if self._from(number - 1, place - 1, own_slots, own_names, exactly=False):
                    return True
        return False


def _matches(
    known: Step, step: Step, slots: dict[int, int], names: dict[str, str], ranges: bool
) -> Iterable[tuple[dict[int, int], dict[str, str]]]:
    """The parts of slots and names, extended by what must be so for the steps to be alike; none where they are not."""
    if isinstance(known, Decode) and len(known.batch) == 1 and isinstance(step, Load | Restore | SeqCp):
        # What gives a slot its tokens does not matter.
        into = getattr(step, "into", getattr(step, "slot", UNSET))
        own = dict(slots)
        if isinstance(into, int) and known.returns is UNSET and _pair(own, known.batch[0].slot, into):
            yield own, names
        return
    if isinstance(known, Clear) and isinstance(step, Clear | Reopen | SeqRm):
        # That something is taken away matters, not how.
        yield slots, names
        return
    if _alike(known) is not _alike(step) or _shape(known, ranges) != _shape(step, ranges):
        return
    if isinstance(known, Decode):
        assert isinstance(step, Decode)
        yield from (
            (found, names) for found in _placed(list(known.tokens_by_slot()), list(step.tokens_by_slot()), slots)
        )
        return
    pairs = [(getattr(known, name, UNSET), getattr(step, name, UNSET)) for name in ("slot", "into")]
    own = dict(slots)
    for one, other in pairs:
        if isinstance(one, int) and isinstance(other, int) and not _pair(own, one, other):
            return
    called = dict(names)
    if isinstance(known, Checkpoint | Save | Restore | Load):
        assert isinstance(step, Checkpoint | Save | Restore | Load)
        if called.setdefault(known.name, step.name) != step.name:
            return
    yield own, called


def _alike(step: Step) -> type:
    """The step's kind; a checkpoint and a save are both a state that is taken."""
    if isinstance(step, Save):
        return Checkpoint
    return Restore if isinstance(step, Load) else type(step)


def _placed(wanted: list[int], there: list[int], slots: dict[int, int]) -> Iterable[dict[int, int]]:
    """Ways to give each wanted slot one of those that are there."""
    if not wanted:
        yield slots
        return
    for slot in there:
        own = dict(slots)
        if _pair(own, wanted[0], slot):
            yield from _placed(wanted[1:], [other for other in there if other != slot], own)


def _pair(slots: dict[int, int], one: int, other: int) -> bool:
    if one in slots:
        return slots[one] == other
    if other in slots.values() or (one == -1) != (other == -1):
        return False
    slots[one] = other
    return True


def _shape(step: Step, ranges: bool) -> tuple[object, ...]:
    """What of a step is the same in alike ones, besides slots and names."""
    refused = step.returns is not UNSET and not step.returns
    match step:
        case SeqRm():
            return refused, step.p0 <= 0, step.p1 < 0
        case SeqCp() if ranges:
            return step.p0 <= 0, step.p1 < 0
        case Checkpoint():
            return ("on_device" in step.flags,)
        case Save():
            return (False,)
        case Restore() | Load():
            return refused, step.damage is not UNSET
        case SeqKeep() | Decode():
            return (refused,)
        case _:
            return ()


def shipped() -> list[Known]:
    """The findings that come with isolate: installed beside it, or in the folder of its checkout."""
    folder = next((place for place in SHIPPED if place.is_dir()), None)
    return read_all([folder / "reports", folder / "found"]) if folder else []


def name_of(case: Case) -> str:
    """A finding's name: the kind of its fault, the step, the kind of memory, and a few digits of its content."""
    digest = hashlib.blake2b(content(case), digest_size=3).hexdigest()
    given = "fault" if isinstance(case.expect, str) else f"{case.expect.kind}-{case.expect.step}"
    memory = ZOO[case.model.zoo].memory if isinstance(case.model.zoo, str) else "file"
    return f"{given}-{memory}-{digest}"
