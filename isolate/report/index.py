"""An index page over a folder of findings: one row a finding, equal signatures together, each with a page of its own."""

from __future__ import annotations

import html
from collections.abc import Iterator
from pathlib import Path

from isolate.case import Case
from isolate.errors import IsolateError
from isolate.fault import Finding
from isolate.report import findings
from isolate.report import html as page
from isolate.search.needs import what_is_left

_HEAD = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<link rel="icon" href="data:,"><title>Findings</title><style>
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 1200px; padding: 20px 24px 60px; }
h1 { font-size: 20px; } table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: 6px 12px 6px 0; border-bottom: 1px solid color-mix(in srgb, currentColor 20%, transparent); overflow-wrap: break-word; }
th { font-weight: 600; } td:nth-child(3) { white-space: nowrap; } td:last-child { overflow-wrap: anywhere; } code { font: 13px/1.5 ui-monospace, monospace; } a { color: LinkText; }
</style></head><body>
"""


def read(folder: Path) -> list[tuple[Path, Finding, Case]]:
    """All findings of the JSON documents in a folder, in the order of their files; files of another kind are passed over."""
    if not folder.is_dir():
        raise IsolateError(f"{folder}: not a folder")
    found = []
    for path in sorted(folder.glob("*.json")):
        if b'"isolate.findings/' in _beginning(path):
            found += [(path, finding, case) for finding, case in findings.read(path)]
    if not found and (folder / "findings").is_dir():
        # A campaign's folder.
        return read(folder / "findings")
    if not found:
        raise IsolateError(f"{folder}: no file in it holds findings; write some with --json {folder / 'NAME.json'}")
    return sorted(found, key=lambda each: str(each[1].fault.signature))


def _beginning(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(4096)
    except OSError as error:
        raise IsolateError(f"{path}: cannot be read: {error.strerror}") from None


def write(folder: Path, out: Path) -> int:
    """Write `index.html` and a page a finding to `out`; how many findings there are."""
    found = read(folder)
    for number, (_, finding, case) in enumerate(found):
        _write(out / f"finding-{number}.html", page.text(finding, case))
    _write(out / "index.html", "".join(_index(found)))
    return len(found)


def _index(found: list[tuple[Path, Finding, Case]]) -> Iterator[str]:
    kinds = len({finding.fault.signature for _, finding, _ in found})
    yield _HEAD
    yield f"<h1>{len(found)} finding{'s' * (len(found) != 1)}, {kinds} different</h1>\n"
    yield "<table><thead><tr><th>Fault</th><th>Case</th><th>Seen</th><th>From</th><th>Replay</th></tr></thead><tbody>\n"
    for number, (path, finding, case) in enumerate(found):
        cells = (
            f'<a href="finding-{number}.html">{html.escape(str(finding.fault.signature))}</a>',
            html.escape(what_is_left(case)),
            f"{finding.times} of {finding.of}",
            html.escape(path.name),
            f"<code>{html.escape(finding.replay)}</code>",
        )
        yield f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>\n"
    yield "</tbody></table></body></html>\n"


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise IsolateError(f"{path}: cannot be written: {error.strerror}") from None
