"""A campaign as text: a line while it runs, and what came of it; and as JSON."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from isolate.report import json as report_json
from isolate.report import text as report_text
from isolate.search.needs import what_is_left
from isolate.terminal import plain, say

if TYPE_CHECKING:
    from isolate.fault import Finding
    from isolate.search.campaign import Campaign, Totals

#: Seconds between two lines in a log.
EVERY = 60.0


@contextmanager
def told(totals: Totals, seconds: float | None) -> Iterator[Callable[[], None]]:
    """Says where the campaign stands and what is new, on standard error: at a terminal all the time, in a log now and then.

    `seconds`: how long it takes, where that is known.
    """
    if sys.stderr is None:
        yield lambda: None
        return
    ends = None if seconds is None else time.monotonic() + seconds
    shown = set(totals.found)

    def new() -> Iterator[str]:
        for name in totals.found.keys() - shown:
            yield f"NEW  {totals.found[name].fault.signature}"
        shown.update(totals.found)

    def stands() -> str:
        return line(totals) + ("" if ends is None else f"; {_clock(ends - time.monotonic())} left")

    if not sys.stderr.isatty():
        said = time.monotonic()

        def say_all() -> None:
            nonlocal said
            for each in new():
                say(each, err=True)
            if time.monotonic() - said >= EVERY:
                say(stands(), err=True)
                said = time.monotonic()

        yield say_all
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True)

    def show() -> None:
        for each in new():
            console.print(Text(plain(each)))
        status.update(Text(stands()))

    with console.status("the first cases are running; Ctrl-C ends it, and the same command goes on") as status:
        yield show


def _clock(seconds: float) -> str:
    whole = max(0, round(seconds))
    return f"{whole // 60}:{whole % 60:02}"


def line(totals: Totals) -> str:
    """Where a campaign stands."""
    rate = f" ({totals.cases_here / totals.clock:.1f} cases a second)" if totals.clock and totals.cases_here else ""
    kernels = totals.seen("kernel")
    seen = f"{totals.seen('follows')} pairs of steps" + (f" and {kernels} kernels by grid" if kernels else "")
    return f"{totals.cases} cases, {totals.steps} steps{rate}; {seen} seen; {_findings(totals)}"


def _findings(totals: Totals) -> str:
    new = len(totals.found.keys() - totals.before)
    old = len(totals.found.keys() & totals.before)
    before = f", {old} of an earlier run" if old else ""
    return f"{new} new finding{'s' * (new != 1)}{before}, {sum(totals.known.values())} times a known one"


def text(campaign: Campaign, findings: Sequence[Finding]) -> str:
    """What came of it: each finding, OLD where an earlier run had it, with the command that replays it, then what was recognized and what was not judged."""
    return "\n".join(_lines(campaign, findings))


def _lines(campaign: Campaign, findings: Sequence[Finding]) -> Iterator[str]:
    totals, folder = campaign.totals, campaign.folder
    for (name, found), finding in zip(totals.found.items(), findings, strict=True):
        yield f"{'OLD' if name in totals.before else 'NEW'}  {report_text.headline(found.fault)}"
        yield f"     {what_is_left(found.case)}; {found.times} of {found.of} in fresh children"
        yield f"     replay       {finding.replay}"
    for name, count in totals.known.most_common():
        yield f"known  {count:>6} times  {name}"
    if totals.passed_over:
        yield f"not reduced  {totals.passed_over} more of the signatures above"
    for name, found in totals.unconfirmed.items():
        yield f"not confirmed in fresh children: {report_text.headline(found.fault)}"
        yield f"     case         {folder.unconfirmed(name)}"
    for sentence, count in totals.refused.most_common(5):
        yield f"refused  {count} cases: {sentence}"
    yield line(totals)
    documents = f"; documents for `isolate report` and `export` in {folder.place / 'findings'}" if totals.found else ""
    yield f"kept in {folder.place}; the same command goes on from there, and runs cases again that were cut short{documents}"


def document(campaign: Campaign, findings: Sequence[Finding]) -> dict[str, Any]:
    """The findings in the one schema, and under `fuzz` what else came of it."""
    totals = campaign.totals
    said = {
        "seed": campaign.plan.seed, "cases": totals.cases, "steps": totals.steps, "known": dict(totals.known),
        "passed_over": totals.passed_over, "refused": dict(totals.refused),
        "unconfirmed": [
            {"case": str(campaign.folder.unconfirmed(name)), "fault": msgspec.to_builtins(found.fault)}
            for name, found in totals.unconfirmed.items()
        ],
    }  # fmt: skip
    return {**report_json.document(findings, totals.cases), "fuzz": said}
