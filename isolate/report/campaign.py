"""A campaign as text: a line while it runs, and what came of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from isolate.report import text as report_text
from isolate.search.needs import what_is_left

if TYPE_CHECKING:
    from pathlib import Path

    from isolate.search.campaign import Campaign, Totals


def line(totals: Totals) -> str:
    """Where a campaign stands."""
    rate = (
        f"{totals.cases_here / totals.clock:.0f} cases, {totals.steps_here / totals.clock:.0f} steps a second"
        if totals.clock
        else ""
    )
    kernels = totals.seen("kernel")
    seen = f"{totals.seen('follows')} pairs of steps" + (f", {kernels} kernels by grid" if kernels else "")
    return f"{totals.cases} cases, {rate}; seen: {seen}; {_findings(totals)}"


def _findings(totals: Totals) -> str:
    count = len(totals.found)
    return f"{count} new finding{'s' * (count != 1)}, {sum(totals.known.values())} times a known one"


def text(campaign: Campaign, replays: dict[str, str]) -> str:
    """What came of it: each new finding with the command that replays it, then what was recognized and what was not judged."""
    return "\n".join(_lines(campaign, replays))


def _lines(campaign: Campaign, replays: dict[str, str]) -> Iterator[str]:
    totals = campaign.totals
    for name, found in totals.found.items():
        yield f"NEW  {report_text.headline(found.fault)}"
        yield f"     {what_is_left(found.case)}; {found.times} of {found.of} in fresh children"
        yield f"     replay       {replays[name]}"
    for name, count in totals.known.most_common():
        yield f"known  {count:>6} times  {name}"
    if totals.passed_over:
        yield f"not reduced  {totals.passed_over} more of the signatures above"
    for found in totals.unconfirmed:
        yield f"not confirmed in fresh children: {report_text.headline(found.fault)}"
    for sentence, count in totals.refused.most_common(5):
        yield f"refused  {count} cases: {sentence}"
    yield line(totals)
    yield _where(campaign.folder)


def _where(folder: Path) -> str:
    return f"kept in {folder}; the same command goes on from there"
