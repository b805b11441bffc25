"""What was left of a case, at a terminal: the fault, what it needs, what it does not, and what it cost to find out."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from isolate.case import Case
from isolate.report import text as report_text
from isolate.search.minimize import Minimized, finding
from isolate.search.needs import what_is_left


def text(before: Case, result: Minimized, replay: str, others: list[tuple[Path, str]]) -> str:
    """Some lines, ending with the command that replays what is left. `others`: where other faults were written."""
    found = finding(result, replay)
    lines = [f"{len(before.steps)} steps -> {len(result.case.steps)}: {what_is_left(result.case)}"]
    if result.not_needed:
        lines += _wrapped("not needed", ", ".join(result.not_needed))
    lines += _wrapped("searched", cost(result))
    for path, headline in others:
        lines += _wrapped("also met", f"{headline} (isolate run {path})")
    return "\n".join([*lines, report_text.finding(found)])


def cost(result: Minimized) -> str:
    """Replays, time, and whether it is known that nothing more can be removed."""
    remembered = f" and {result.remembered} remembered" if result.remembered else ""
    known = (
        "nothing more can be removed: each single removal was tried"
        if result.minimal
        else "not known to be minimal: the search ended before each removal was tried"
    )
    return f"{result.replays} replays{remembered} in {result.seconds:.1f} s; {known}"


def data(result: Minimized) -> dict[str, Any]:
    """What the schema's `minimized` field holds."""
    return {
        "replays": result.replays,
        "remembered": result.remembered,
        "seconds": result.seconds,
        "minimal": result.minimal,
        "left": what_is_left(result.case),
        "not_needed": list(result.not_needed),
    }


def _wrapped(label: str, said: str) -> list[str]:
    return textwrap.wrap(f"{label:<12} {said}", 110, initial_indent="  ", subsequent_indent=" " * 15)
