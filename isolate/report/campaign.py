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
from isolate.terminal import plain

if TYPE_CHECKING:
    from isolate.fault import Finding
    from isolate.search.campaign import Campaign, Totals


@contextmanager
def told(totals: Totals, seconds: float | None) -> Iterator[Callable[[], None]]:
    """Says where the campaign stands, and what is new, to whoever waits at a terminal; nothing is shown anywhere else.

    `seconds`: how long it takes, where that is known.
    """
    if sys.stderr is None or not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True)
    ends = None if seconds is None else time.monotonic() + seconds
    shown = set(totals.found)

    def show() -> None:
        for name in totals.found.keys() - shown:
            console.print(Text(plain(f"NEW  {totals.found[name].fault.signature}")))
        shown.update(totals.found)
        left = "" if ends is None else f"; {_clock(ends - time.monotonic())} left"
        status.update(Text(line(totals) + left))

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
    count = len(totals.found)
    return f"{count} new finding{'s' * (count != 1)}, {sum(totals.known.values())} times a known one"


def text(campaign: Campaign, findings: Sequence[Finding]) -> str:
    """What came of it: each new finding with the command that replays it, then what was recognized and what was not judged."""
    return "\n".join(_lines(campaign, findings))


def _lines(campaign: Campaign, findings: Sequence[Finding]) -> Iterator[str]:
    totals, folder = campaign.totals, campaign.folder
    for found, finding in zip(totals.found.values(), findings, strict=True):
        yield f"NEW  {report_text.headline(found.fault)}"
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
