"""Findings as JSON: one schema, the same for every command that finds something."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import msgspec

from isolate.errors import IsolateError
from isolate.fault import Finding

SCHEMA = "isolate.findings/1"


def document(findings: Sequence[Finding], ran: int) -> dict[str, Any]:
    """Plain data: the findings, and how many cases ran to give them."""
    return {"schema": SCHEMA, "ran": ran, "findings": [finding.as_json() for finding in findings]}


def write(data: dict[str, Any], where: str) -> None:
    """Write plain data to a file, or to standard output for `-`."""
    text = msgspec.json.format(msgspec.json.encode(data), indent=2).decode()
    if where == "-":
        click.echo(text)
        return
    try:
        Path(where).write_text(text + "\n")
    except OSError as error:
        raise IsolateError(f"{where}: cannot be written: {error.strerror}") from None
