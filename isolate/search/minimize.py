"""Shrink a case to what its fault needs: confirm it first, shrink while the signature holds, confirm what is left.

A different fault met on the way is kept aside as a finding of its own. Verdicts are kept by content: no case is run twice
for one, and a search that was interrupted takes up from the file they are written to.
"""

from __future__ import annotations

import hashlib
import json
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import msgspec

from isolate.case import CHECKS, JUDGED_BY, Case, Expect
from isolate.errors import IsolateError
from isolate.fault import Fault, Finding, Signature
from isolate.library.find import find_build
from isolate.replay.supervisor import Outcome, Supervisor
from isolate.search import needs, passes
from isolate.search.pin import Job, Settings
from isolate.search.reduce import Exhausted, Reducer
from isolate.search.repeat import still_comes
from isolate.search.room import overfull

FORMAT = "isolate.verdicts/1"
#: Runs that find the rate of a fault that did not come in each of the first.
FLAKY_RUNS = 20


@dataclass(frozen=True)
class Limits:
    """How much a search may cost. A budget of None has no end."""

    replays: int | None = None
    seconds: float | None = None
    #: candidates at once, each in a child of its own
    jobs: int = 1
    #: runs in fresh children before and after
    confirm: int = 3
    #: where verdicts are kept
    verdicts: Path | None = None


@dataclass(frozen=True)
class Minimized:
    """What is left of a case, and what was seen on the way."""

    case: Case
    fault: Fault
    #: how often it came in fresh children: `times` of `of`
    times: int
    of: int
    replays: int
    #: answers taken from the file of verdicts
    remembered: int
    seconds: float
    #: a whole round of passes found nothing more to remove
    minimal: bool
    not_needed: tuple[str, ...]
    #: other faults met on the way: the case that gives each
    others: tuple[tuple[Case, Fault], ...]


def minimize(
    job: Job, settings: Settings, limits: Limits, avoid: Callable[[Case], bool] = lambda case: False
) -> Minimized:
    """The smallest case found that still has the fault of `job`. IsolateError where it has none, or is not usable.

    Cases to `avoid` are not tried: another fault with the same signature that is known to lie there.
    """
    started = time.monotonic()
    asked = [name for name in CHECKS if name in {*job.case.checks(), *settings.check}]
    start = msgspec.structs.replace(job.case, check=asked)
    with _replays(job, settings, limits) as replays:
        fault, times, of = replays.confirm(start)
        if fault is None:
            raise IsolateError(f"nothing to minimize: no fault in {of} runs in fresh children; run: {job.replay}")
        replays.wanted, replays.rate = fault.signature, times / of
        trail = [start]
        # Where there is no room, a decode that finds none is right.
        had_room = fault.kind == "decode" and fault.origin.code == 1 and not overfull(_ended(start, fault))

        def interesting(case: Case) -> bool:
            if avoid(case) or (had_room and overfull(case)):
                return False
            return still_comes(replays.rate, lambda: replays.signature(case) == replays.wanted)

        reducer = Reducer(_ended(start, fault), interesting, passes.size, passes.content, limits.jobs)
        if reducer.best != start:
            trail.append(reducer.best)

        def keep(reducer: Reducer[Case]) -> None:
            if reducer.best != trail[-1]:
                trail.append(reducer.best)

        minimal = reducer.run([*passes.PASSES, keep])
        keep(reducer)
        replays.end_children()
        # A child that ran other cases before is no witness: what does not come in fresh ones falls back to what did, and
        # where the budget is spent to what came in the beginning.
        best, again = trail.pop(), None
        while replays.left() > 0:
            found, seen, runs = replays.confirm(best)
            if found is not None and found.signature == fault.signature:
                again, times, of = found, seen, runs
                break
            minimal = False
            if not trail:
                raise IsolateError(f"the fault did not come again in {runs} fresh children; run: {job.replay}")
            best = trail.pop()
        if again is None:
            best, again, minimal = start, fault, False
        others = tuple(replays.others.values())
    return Minimized(
        _named(best, again, settings), again, times, of, replays.ran, replays.remembered, time.monotonic() - started,
        minimal, tuple(needs.not_needed(job.case, best)), others,
    )  # fmt: skip


def finding(result: Minimized, replay: str) -> Finding:
    """The result as an entry of the one schema."""
    return Finding(result.case.as_json(), result.fault, result.times, result.of, replay)


def _ended(case: Case, fault: Fault) -> Case:
    """The case up to the step that fails: nothing after it was ever run. Only the check that failed is asked."""
    judged: Any = [JUDGED_BY[fault.kind]] if fault.kind in JUDGED_BY else []
    # What died in a check is not told which one.
    check = case.check if fault.step.kind == "check" else judged
    last = fault.step.index
    steps = case.steps if last is None else case.steps[: last + 1]
    return msgspec.structs.replace(case, steps=steps, check=check)


def _named(case: Case, fault: Fault, settings: Settings) -> Case:
    """The case with what it now gives."""
    signature = fault.signature
    on: Any = "gpu" if settings.target.hooked else "any"
    expect = Expect(kind=fault.kind, step=fault.step.kind, where=signature.where, on=on)
    return msgspec.structs.replace(case, expect=expect, about=f"Minimized: {signature}.")


@contextmanager
def _replays(job: Job, settings: Settings, limits: Limits) -> Iterator[Replays]:
    with ExitStack() as stack:
        pool: queue.LifoQueue[Supervisor] = queue.LifoQueue()
        for _ in range(limits.jobs):
            children = Supervisor(
                settings.build, settings.include, settings.target, settings.timeout, worker=settings.worker, spare=True
            )
            pool.put(stack.enter_context(children))
        where = {"build": find_build(settings.build, settings.include).key(), "target": settings.target.name}
        yield Replays(pool, job.folder, limits, where, stack)


class Replays:
    """Runs cases for verdicts, counts them, and keeps the verdicts."""

    def __init__(
        self, pool: queue.LifoQueue[Supervisor], folder: Path, limits: Limits, where: dict[str, str], stack: ExitStack
    ) -> None:
        self.pool = pool
        self.folder = folder
        self.limits = limits
        self.wanted: Signature | None = None
        self.rate = 1.0
        self.ran = 0
        self.remembered = 0
        self.others: dict[Signature, tuple[Case, Fault]] = {}
        self._ends = None if limits.seconds is None else time.monotonic() + limits.seconds
        self._lock = threading.Lock()
        self._known: dict[str, list[Any]] = {}
        self._file: IO[str] | None = None
        if limits.verdicts is not None:
            header = {"schema": FORMAT, **where}
            self._known = _read_verdicts(limits.verdicts, header)
            try:
                self._file = stack.enter_context(limits.verdicts.open("a"))
                # A line that was cut off must not be gone on with.
                whole = limits.verdicts.read_bytes().rfind(b"\n") + 1
                self._file.truncate(whole)
                self._file.seek(whole)
            except OSError as error:
                raise IsolateError(f"{limits.verdicts}: cannot be written: {error.strerror}") from None
            if self._file.tell() == 0:
                self._file.write(json.dumps(header) + "\n")

    def left(self) -> float:
        """Replays that may still be made."""
        return float("inf") if self.limits.replays is None else self.limits.replays - self.ran

    def end_children(self) -> None:
        """A child ends with the thread that started it: none may be left from a search in several threads."""
        for children in list(self.pool.queue):
            children.close()

    def confirm(self, case: Case) -> tuple[Fault | None, int, int]:
        """Run a case in fresh children: its fault, and how often it came of how many runs."""
        seen: list[Fault] = []
        wanted = self.wanted
        runs = 0
        while runs < (FLAKY_RUNS if self.rate < 1 or 0 < len(seen) < runs else self.limits.confirm) and self.left() > 0:
            fault = self._run(case, fresh=True).fault
            runs += 1
            wanted = wanted or (fault.signature if fault else None)
            if fault is not None and fault.signature == wanted:
                seen.append(fault)
        return (seen[0] if seen else None), len(seen), runs

    def signature(self, case: Case) -> Signature | None:
        """What a run of the case gives, from the verdicts where it is known. Exhausted when the budget is spent."""
        key = hashlib.blake2b(passes.content(case), digest_size=12).hexdigest()
        with self._lock:
            known = self._known.get(key, [])
            if known:
                self.remembered += 1
                told = known.pop(0)
                return None if told is None else Signature(*told)
            over = self._ends is not None and time.monotonic() > self._ends
            # What is left must do to confirm the result.
            kept = self.limits.confirm if self.rate >= 1 else FLAKY_RUNS
            if over or self.left() <= kept:
                raise Exhausted
            self.ran += 1
        try:
            fault = self._run(case, counted=True).fault
        except IsolateError:
            # Not usable on this build or machine: whatever it would show, it cannot be shown here.
            fault = None
        found = fault.signature if fault is not None else None
        with self._lock:
            if fault is not None and found is not None and found != self.wanted:
                self.others.setdefault(found, (case, fault))
            if self._file is not None:
                said = None if found is None else [found.kind, found.where, found.code, found.step]
                self._file.write(json.dumps({"case": key, "signature": said}) + "\n")
                self._file.flush()
        return found

    def _run(self, case: Case, fresh: bool = False, counted: bool = False) -> Outcome:
        if not counted:
            self.ran += 1
        children = self.pool.get()
        try:
            if fresh:
                children.fresh()
            return children.run(case, (), self.folder)
        finally:
            self.pool.put(children)


def _read_verdicts(path: Path, header: dict[str, str]) -> dict[str, list[Any]]:
    """Verdicts by content, in the order they came; a last line that was cut off is passed over."""
    known: dict[str, list[Any]] = {}
    if not path.exists():
        return known
    try:
        lines = path.read_text().splitlines()
        if not lines:
            return known
        first = json.loads(lines[0])
        if first["schema"] != FORMAT:
            raise ValueError
        if first != header:
            raise IsolateError(f"{path}: its verdicts are those of another build or target; give another file")
        for number, line in enumerate(lines[1:], 2):
            try:
                entry = json.loads(line)
            except ValueError:
                if number == len(lines):
                    break
                raise
            known.setdefault(str(entry["case"]), []).append(entry["signature"])
    except OSError as error:
        raise IsolateError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise IsolateError(f"{path}: not a file of verdicts that `isolate minimize --resume` wrote") from None
    return known
