"""A table of runs at a terminal: a row a case, a column a GPU, in each cell what came of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich import box
from rich.table import Table

from isolate.search.pin import Result
from isolate.serve.matrix import Cell


def table(cells: Sequence[Cell]) -> Table:
    """The cells in their order; GPUs down, cases across when there are more GPUs than cases."""
    rows = list(dict.fromkeys(cell.column for cell in cells))
    columns = list(dict.fromkeys(cell.row for cell in cells))
    at = {(cell.column, cell.row): word(cell) for cell in cells}
    found = Table("GPU", *columns, box=box.SIMPLE)
    for row in rows:
        found.add_row(row, *(at[row, column] for column in columns))
    return found


def below(cells: Sequence[Cell]) -> Iterator[str]:
    """What goes below the table: each reason for a cell that was not run, and the command that replays each kind of fault."""
    reasons: dict[str, list[str]] = {}
    replays: dict[str, str] = {}
    for cell in cells:
        if isinstance(cell.result, str):
            reasons.setdefault(cell.result, []).append(f"{cell.row} on {cell.column}")
        else:
            for finding in cell.result.findings:
                replays.setdefault(str(finding.fault.signature), finding.replay)
    for reason, where in reasons.items():
        yield f"not run: {where[0]}{f' and {len(where) - 1} more' if len(where) > 1 else ''}: {reason}"
    for signature, replay in replays.items():
        yield f"{signature}\n  replay {replay}"


def word(cell: Cell) -> str:
    """`pass`, or the launch that failed and its kernel, or that it was not run."""
    if isinstance(cell.result, str):
        return "not run"
    if not cell.result.findings:
        return "pass"
    fault = cell.result.findings[0].fault
    if fault.launch is None:
        return f"FAULT {fault.origin.text.partition(':')[0] if fault.kind == 'cuda' else fault.kind}"
    return f"FAULT launch {fault.launch.number} {fault.launch.demangled.partition('<')[0]}"


def data(cells: Sequence[Cell]) -> dict[str, Any]:
    """The findings of the table in the one schema, and every cell."""
    results = [cell.result for cell in cells if isinstance(cell.result, Result)]
    findings = [finding.as_json() for result in results for finding in result.findings]
    said = [
        {"row": c.row, "column": c.column, "said": c.result if isinstance(c.result, str) else word(c)} for c in cells
    ]
    return {
        "schema": "isolate.findings/1",
        "ran": sum(result.runs for result in results),
        "findings": findings,
        "cells": said,
    }
