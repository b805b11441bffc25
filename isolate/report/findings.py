"""A JSON document of findings, read back: untrusted data, checked field by field before a writer sees it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from isolate import case as cases_of
from isolate import files
from isolate.case import Case
from isolate.errors import IsolateError
from isolate.fault import Fault, Finding
from isolate.report.json import SCHEMA

MAX_FILE_BYTES = 256 << 20


class _Repeats(msgspec.Struct):
    times: int
    of: int


class _Entry(msgspec.Struct):
    case: dict[str, Any]
    fault: Fault
    repeats: _Repeats
    replay: str


class _Document(msgspec.Struct):
    schema: str
    findings: list[_Entry]


def read(path: Path) -> list[tuple[Finding, Case]]:
    """The findings of a document that `--json` wrote, each with its case. IsolateError names what is wrong with the file."""
    try:
        document = msgspec.json.decode(files.read(path, MAX_FILE_BYTES), type=_Document)
    except OSError as error:
        raise IsolateError(f"{path}: cannot be read: {error.strerror}") from None
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        said = _case_instead(path) or f"not findings that a command's --json wrote: {error}"
        raise IsolateError(f"{path}: {said}") from None
    if document.schema != SCHEMA:
        raise IsolateError(f"{path}: its schema is {document.schema[:64]!r}, {SCHEMA!r} is what can be read")
    found = []
    for number, entry in enumerate(document.findings):
        case = cases_of.parse(msgspec.json.encode(entry.case), f"{path}: case of finding {number}")
        finding = Finding(entry.case, entry.fault, entry.repeats.times, entry.repeats.of, entry.replay)
        found.append((finding, case))
    return found


def _case_instead(path: Path) -> str:
    """What to do with a case where findings are wanted; "" where it is none."""
    try:
        cases_of.read(path)
    except IsolateError:
        return ""
    document = path.parent / "findings" / path.name
    if document.is_file():
        return f"this is a case; its finding is in {document}"
    return "this is a case; `isolate run CASE --json FILE` writes its findings"


def one(path: Path, number: int) -> tuple[Finding, Case]:
    """One finding of a document, counted from 0. IsolateError where there is none of that number."""
    found = read(path)
    if not found:
        raise IsolateError(f"{path}: it holds no finding; nothing failed in the runs it tells of")
    if number >= len(found):
        raise IsolateError(f"{path}: there is no finding {number}; it holds {len(found)}, counted from 0")
    return found[number]
