"""Findings as JSON: one schema, the same for every command that finds something."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import msgspec

from isolate.errors import IsolateError
from isolate.fault import Finding
from isolate.search.pin import Result

SCHEMA = "isolate.findings/1"


def document(findings: Sequence[Finding], ran: int, runs: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """Plain data: the findings, how many runs gave them, and a line on every case that was to be run."""
    found = [finding.as_json() for finding in findings]
    return {"schema": SCHEMA, "ran": ran, "findings": found, "runs": list(runs)}


def run(path: Path, result: Result) -> dict[str, Any]:
    """One case that was run: how it ended, where, and what could not be judged."""
    return {
        "case": str(path),
        "outcome": "fault" if result.findings else "pass",
        "target": result.target,
        "runs": result.runs,
        "seconds": result.seconds,
        "checked": list(result.checked),
        "notes": list(result.notes),
    }


def write(data: dict[str, Any], where: str) -> None:
    """Write plain data to a file, or to standard output for `-`."""
    text = msgspec.json.format(msgspec.json.encode(data), indent=2).decode()
    if where == "-":
        click.echo(text)
        return
    write_text(text + "\n", where)


def write_text(text: str, where: str) -> None:
    """Write a file. IsolateError where it cannot be written."""
    try:
        Path(where).write_text(text)
    except OSError as error:
        raise IsolateError(f"{where}: cannot be written: {error.strerror}") from None


def make_folder(path: Path) -> None:
    """Make a folder. IsolateError where it cannot be made."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise IsolateError(f"{path}: cannot be made: {error.strerror}") from None
