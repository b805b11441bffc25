"""A campaign: shares of cases run side by side, in processes of this machine or of a cluster, and kept in a folder.

The folder holds the plan, a journal with a line a share, each new finding as a case, and its documents. What a share may build
on are the results of those that came long enough before it, so the same plan gives the same cases however many run at
once, and a campaign that was interrupted, or killed, goes on where its journal ends.
"""

from __future__ import annotations

import ctypes
import fcntl
import multiprocessing
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

import msgspec

from isolate.case import Case
from isolate.errors import IsolateError
from isolate.search.examples import Examples
from isolate.search.known import Known, name_of, recognized
from isolate.search.shard import SIZE, Found, Plan, Share, run_examples, run_share

FORMAT = "isolate.campaign/1"
#: A share builds on the first half of those before it, rounded down to a multiple of this: the rest may still be running.
TOGETHER = 8
#: Cases to go on from, the newest ones.
KEPT = 400
PR_SET_PDEATHSIG = 1


@dataclass
class Totals:
    """What a campaign has done so far, in this run and those before."""

    shares: int = 0
    cases: int = 0
    steps: int = 0
    #: of all processes together
    seconds: float = 0.0
    passed_over: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    known: Counter[str] = field(default_factory=Counter)
    found: dict[str, Found] = field(default_factory=dict)
    unconfirmed: list[Found] = field(default_factory=list)
    facts: set[str] = field(default_factory=set)
    #: cases and steps of this run, and its time on the clock
    cases_here: int = 0
    steps_here: int = 0
    clock: float = 0.0

    def add(self, share: Share) -> None:
        """Count a share; its findings are added by the campaign."""
        self.shares += 1
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
    """A plan, in a folder. Use as a context manager: nobody else can run it meanwhile."""

    def __init__(self, plan: Plan, folder: Path, known: list[Known], examples: Examples | None = None) -> None:
        self.plan = plan
        self.folder = folder
        self.known = known
        self.examples = examples
        self.totals = Totals()
        self.shares: list[Share] = []

    def __enter__(self) -> Campaign:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.folder, os.O_RDONLY)
        except OSError as error:
            raise IsolateError(f"{self.folder}: cannot be used as a campaign's folder: {error.strerror}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise IsolateError(f"{self.folder}: another run is using this folder; give --out another one") from None
        try:
            self._take_up()
        except BaseException:
            os.close(self._lock)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._lock)

    # -- the folder

    def _take_up(self) -> None:
        """Read what an earlier run left. IsolateError where it was another plan."""
        header = {"schema": FORMAT, "plan": msgspec.to_builtins(self.plan), "known": [each.name for each in self.known]}
        place, journal = self.folder / "campaign.json", self.folder / "journal.jsonl"
        if place.exists():
            try:
                there = msgspec.json.decode(place.read_bytes())
            except (OSError, msgspec.DecodeError):
                raise IsolateError(
                    f"{place}: not a campaign that `isolate fuzz` began; give --out another folder"
                ) from None
            if there != header:
                raise IsolateError(
                    f"{self.folder}: holds a campaign with other settings; repeat those to go on with it, or give --out "
                    "another folder"
                )
        else:
            self._write(place, msgspec.json.format(msgspec.json.encode(header)))
        whole = 0
        if journal.exists():
            for line in journal.read_bytes().splitlines(keepends=True):
                # The last line of a run that was killed may be half a line.
                try:
                    share = msgspec.json.decode(line, type=Share)
                except msgspec.DecodeError:
                    break
                whole += len(line)
                self.shares.append(share)
                self._merge(share)
        self._journal = journal
        if journal.exists() and whole < journal.stat().st_size:
            os.truncate(journal, whole)

    def _write(self, path: Path, data: bytes) -> None:
        """A file that is there whole or not at all."""
        try:
            temporary = path.with_name(f".{path.name}.{os.getpid()}")
            temporary.write_bytes(data)
            temporary.replace(path)
        except OSError as error:
            raise IsolateError(f"{path}: cannot be written: {error.strerror}") from None

    def _keep(self, share: Share) -> None:
        self.shares.append(share)
        self._merge(share)
        try:
            with self._journal.open("ab") as file:
                file.write(msgspec.json.encode(share) + b"\n")
        except OSError as error:
            raise IsolateError(f"{self._journal}: cannot be written: {error.strerror}") from None

    def _merge(self, share: Share) -> None:
        """Count a share, and write what is new in it."""
        self.totals.add(share)
        for found in share.found:
            if not found.confirmed:
                self.totals.unconfirmed.append(found)
                continue
            before = [*self.known, *(Known(name, other.case) for name, other in self.totals.found.items())]
            known = recognized(before, found.case, found.fault, reduced=True)
            if known is not None:
                self.totals.known[known.name] += 1
                continue
            name = name_of(found.case)
            self.totals.found[name] = found
            if self.examples is not None:
                self.examples.add(found.case)
            place = self.folder / f"{name}.json"
            if not place.exists():
                self._write(place, msgspec.json.format(msgspec.json.encode(found.case)) + b"\n")

    def known_by(self, shares: int) -> list[Known]:
        """The known findings and those of the first shares, which later ones need not reduce again."""
        early = [found for share in self.shares[:shares] for found in share.found if found.confirmed]
        return [*self.known, *(Known(name_of(found.case), found.case) for found in early)]

    # -- running

    def run(
        self, executor: Executor, at_once: int, cases: int | None, seconds: float | None,
        told: Callable[[Totals], None] = lambda totals: None,
    ) -> None:  # fmt: skip
        """Run shares until so many cases were run in all, or so many seconds have gone by; `told` hears of each share."""
        started = time.monotonic()
        self._run_examples(executor)
        waiting: list[Future[Share]] = []
        submitted = len(self.shares)
        last = None if cases is None else -(-cases // SIZE)
        while True:
            over = seconds is not None and time.monotonic() - started >= seconds
            while (
                not over
                and len(waiting) < 2 * at_once
                and (last is None or submitted < last)
                and self._ready(submitted)
            ):
                waiting.append(executor.submit(run_share, self.plan, submitted, *self._before(submitted)))
                submitted += 1
            if not waiting:
                return
            if over:
                # Those that have begun are waited for: they are the first.
                waiting = list(takewhile(lambda future: not future.cancel(), waiting))
                if not waiting:
                    return
            try:
                share = waiting.pop(0).result()
            except BrokenProcessPool:
                raise IsolateError(
                    f"a process of the campaign was killed; what was found so far is in {self.folder}; the same command goes on"
                ) from None
            self._keep(share)
            self.totals.cases_here += share.cases
            self.totals.steps_here += share.steps
            self.totals.clock = time.monotonic() - started
            told(self.totals)

    def _run_examples(self, executor: Executor) -> None:
        """What failed once is run first; what this campaign found itself is there already."""
        cases = [case for case in self.examples or () if name_of(case) not in self.totals.found]
        if cases:
            share = executor.submit(run_examples, self.plan, cases, self.known_by(len(self.shares))).result()
            self._merge(share)

    def _bound(self, number: int) -> int:
        """How many of the shares before it share `number` builds on."""
        return number // 2 // TOGETHER * TOGETHER

    def _ready(self, number: int) -> bool:
        return len(self.shares) >= self._bound(number)

    def _before(self, number: int) -> tuple[list[Known], list[Case], frozenset[str]]:
        bound = self._bound(number)
        kept = [case for share in self.shares[:bound] for case in share.kept][-KEPT:]
        seen = frozenset(fact for share in self.shares[:bound] for fact in share.facts)
        return self.known_by(bound), kept, seen


@contextmanager
def processes(jobs: int) -> Iterator[Executor]:
    """So many processes of this machine; they are gone at the end, also when it comes early."""
    context = multiprocessing.get_context("spawn")
    executor = ProcessPoolExecutor(jobs, context, _end_with_parent, (os.getpid(),))
    try:
        yield executor
    except BaseException:
        for process in multiprocessing.active_children():
            process.kill()
        executor.shutdown(wait=False, cancel_futures=True)
        raise
    executor.shutdown()


def _end_with_parent(parent: int) -> None:
    """Ctrl-C is for the parent; whatever ends it ends this process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


@contextmanager
def cluster(address: str) -> Iterator[Executor]:
    """The workers of a Dask cluster that is running, as an executor. IsolateError where there is none."""
    try:
        from distributed import Client
    except ImportError:
        raise IsolateError("--cluster needs Dask: pip install 'isolate[cluster]'") from None
    try:
        client: Any = Client(address, timeout=10)
    except (OSError, ValueError, TimeoutError) as error:
        raise IsolateError(f"{address}: no Dask cluster answers there: {error}") from None
    with client:
        yield client.get_executor()
