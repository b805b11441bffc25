"""A table of runs at a terminal: a row a case, a column a target, in each cell what came of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from isolate.search.pin import Result
from isolate.serve.matrix import Cell, follow
from isolate.terminal import plain


def by_target(cells: Sequence[Cell]) -> Table:
    """The cells in their order; targets down, cases across."""
    rows = list(dict.fromkeys(cell.column for cell in cells))
    columns = list(dict.fromkeys(cell.row for cell in cells))
    at = {(cell.column, cell.row): word(cell) for cell in cells}
    return _table(["GPU", *columns], [[row, *(at[row, column] for column in columns)] for row in rows])


def grid(cells: Sequence[Cell]) -> list[list[str]]:
    """Rows of a table of treatments, a heading first: the treatment, each target, the finding's file (below which folder, the replay line says)."""
    columns = list(dict.fromkeys(cell.column for cell in cells))
    rows: dict[str, dict[str, Cell]] = {}
    for cell in cells:
        rows.setdefault(cell.row, {})[cell.column] = cell
    files = any(cell.file for cell in cells)
    heading = ["treatment", *columns, *(["finding"] if files else [])]
    lines = [
        [name, *(word(at[column]) for column in columns), *([_files(at)] if files else [])] for name, at in rows.items()
    ]
    return [heading, *lines]


def _files(at: dict[str, Cell]) -> str:
    return ", ".join(dict.fromkeys(Path(cell.file).name for cell in at.values() if cell.file))


def by_treatment(cells: Sequence[Cell]) -> Table:
    """A row a treatment, for a terminal."""
    heading, *rows = grid(cells)
    return _table(heading, rows)


def _table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Texts as they are: nothing in them is markup, or a command to the terminal."""
    found = Table(box=box.SIMPLE)
    for text in heading:
        found.add_column(Text(plain(text)))
    for row in rows:
        found.add_row(*(Text(plain(text)) for text in row))
    return found


def markdown(cells: Sequence[Cell]) -> str:
    """The table of treatments for a report, with what the faults follow."""
    heading, *rows = ([text.replace("|", "\\|") for text in row] for row in grid(cells))
    lines = [heading, ["---"] * len(heading), *rows]
    return "\n".join([*(f"| {' | '.join(line)} |" for line in lines), "", *_said(cells)]) + "\n"


def html(cells: Sequence[Cell]) -> str:
    """The same as a page that needs nothing else."""
    heading, *rows = grid(cells)
    lines = ["<!doctype html>", '<meta charset="utf-8">', "<title>isolate matrix</title>"]
    lines += ["<style>table{border-collapse:collapse}td,th{border:1px solid #999;padding:.2em .6em;text-align:left}"]
    lines += [".FAULT{background:#fdd}.pass{background:#dfd}</style>", "<table>"]
    lines += [f"<tr>{''.join(f'<th>{escape(text)}</th>' for text in heading)}</tr>"]
    for row in rows:
        cell = "".join(f'<td class="{escape(text.split(" ")[0])}">{escape(text)}</td>' for text in row)
        lines.append(f"<tr>{cell}</tr>")
    return "\n".join([*lines, "</table>", *(f"<p>{escape(text)}</p>" for text in _said(cells))]) + "\n"


def _said(cells: Sequence[Cell]) -> list[str]:
    followed = follow(cells)
    return [*([followed] if followed else []), *below(cells)]


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
        return "not in this build" if cell.lacking else "not run"
    if not cell.result.findings:
        return "pass"
    fault = cell.result.findings[0].fault
    if fault.launch is None:
        return f"FAULT {fault.origin.text.partition(':')[0] if fault.kind == 'cuda' else fault.kind}"
    return f"FAULT launch {fault.launch.number} {fault.launch.demangled.partition('<')[0]}"


def data(cells: Sequence[Cell]) -> dict[str, Any]:
    """The findings of the table in the one schema, every cell, and what the faults follow."""
    results = [cell.result for cell in cells if isinstance(cell.result, Result)]
    findings = [finding.as_json() for result in results for finding in result.findings]
    return {
        "schema": "isolate.findings/1",
        "ran": sum(result.runs for result in results),
        "findings": findings,
        "cells": [_data(cell) for cell in cells],
        "follows": follow(cells),
    }


def _data(cell: Cell) -> dict[str, Any]:
    said = {"row": cell.row, "column": cell.column, "said": word(cell)}
    why = {"why": cell.result} if isinstance(cell.result, str) else {"seconds": cell.result.seconds}
    return {**said, **why, "factors": cell.factors, "file": cell.file}
