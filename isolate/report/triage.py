"""The table of a triage, for a terminal and as data: each line a run, then one sentence on what the fault needs."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any

from isolate.report import text as report_text
from isolate.search.triage import Cell, Triage, needs, sentence


def text(found: Triage, replays: dict[int, str]) -> str:
    """`replays`: for cells by number, the command that runs them again."""
    return "\n".join(_lines(found, replays))


def _lines(found: Triage, replays: dict[int, str]) -> Iterator[str]:
    yield report_text.headline(found.fault)
    yield f"  seen {found.times} of {found.of} times in fresh children"
    group = ""
    for number, cell in enumerate(found.cells):
        label = cell.treatment.group if cell.treatment.group != group else ""
        group = cell.treatment.group
        yield f"  {label:<10} {cell.treatment.name:<28} {said(found, cell)}".rstrip()
        if number in replays:
            yield f"  {'':<10} {'':<28} {replays[number]}"
    yield sentence(found)


def said(found: Triage, cell: Cell) -> str:
    """What came of it, in a few words."""
    outcome = cell.outcome(found.fault.signature)
    if outcome == "not run":
        return f"not run: {cell.why_not}"
    if outcome == "pass" or cell.fault is None:
        return "pass"
    same = cell.fault.signature == found.fault.signature
    return "fault" if same else f"{'fault, variant' if outcome == 'fault' else 'another fault'}: {cell.fault.signature}"


def replay(cell: Cell, path: str, switches: dict[str, str | None]) -> str:
    """The command that runs a cell again, from the case that was written to `path`."""
    treatment = cell.treatment
    words = [f"{name}={shlex.quote(value)}" for name, value in treatment.environment.items()]
    given = {**switches, "--build": treatment.settings.build or switches.get("--build")}
    if "--target" in treatment.switches:
        given["--target"] = None
    line = ["isolate", "run", path, *(word for pair in given.items() if pair[1] for word in pair), *treatment.switches]
    return " ".join([*words, shlex.join(str(word) for word in line)])


def data(found: Triage, replays: dict[int, str]) -> dict[str, Any]:
    """Plain data: the cells in their order, what is needed and what is not."""
    need, needless = needs(found)
    cells = [
        {
            "group": cell.treatment.group,
            "treatment": cell.treatment.name,
            "outcome": cell.outcome(found.fault.signature),
            "signature": str(cell.fault.signature) if cell.fault else None,
            "why_not": cell.why_not or None,
            "replay": replays.get(number),
        }
        for number, cell in enumerate(found.cells)
    ]
    return {"needs": need, "needless": needless, "sentence": sentence(found), "cells": cells}
