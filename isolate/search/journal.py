"""A campaign's folder: the plan, a journal with a line a share, and each new finding.

    campaign.json           what is tried; another campaign is refused
    journal.jsonl           what came of each share, in their order
    NAME.json               the case of a new finding
    findings/NAME.json      its document, for `isolate report`
    unconfirmed/NAME.json   a case whose fault did not come again in fresh children

The journal comes first: whatever is missing beside it is written when the campaign goes on.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from isolate import files
from isolate.case import Case
from isolate.errors import IsolateError
from isolate.search.known import Known
from isolate.search.shard import Plan, Share

FORMAT = "isolate.campaign/1"
#: The document of a finding, and a case that was not confirmed, are in folders of their own.
FINDINGS, UNCONFIRMED = "findings", "unconfirmed"


class Folder:
    """A campaign's folder, nobody else's while it is open. IsolateError where it is not usable."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.journal = place / "journal.jsonl"
        try:
            place.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(place, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise IsolateError(f"{place}: cannot be used as a campaign's folder: {error.strerror}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise IsolateError(f"{place}: another run is using this folder; give --out another one") from None

    def close(self) -> None:
        """Let others use it."""
        os.close(self._lock)

    def begin(self, plan: Plan, build: str, known: list[Known]) -> None:
        """Write what the campaign is. IsolateError where the folder holds another one."""
        names = [each.name for each in known]
        header = msgspec.json.encode({"schema": FORMAT, "plan": plan, "build": build, "known": names})
        path = self.place / "campaign.json"
        if not path.exists():
            self._write(path, msgspec.json.format(header) + b"\n")
            return
        try:
            there = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        except (OSError, msgspec.DecodeError, UnicodeDecodeError):
            raise IsolateError(f"{path}: not a campaign that `isolate fuzz` began; give --out another folder") from None
        other = set(_other(there, msgspec.json.decode(header)))
        if other == {"known"}:
            # More is known than when it began: from here on it is counted as known.
            self._write(path, msgspec.json.format(header) + b"\n")
        elif other:
            raise IsolateError(
                f"{self.place}: holds a campaign with other settings ({', '.join(sorted(other))}); repeat those to go on with it, or "
                "give --out another folder"
            )

    def shares(self) -> Iterator[Share]:
        """What is in the journal. A line that was cut off when a run was killed is removed."""
        if not self.journal.exists():
            return
        whole = 0
        try:
            with self.journal.open("rb") as file:
                for number, line in enumerate(file, 1):
                    if not line.endswith(b"\n"):
                        break
                    whole += len(line)
                    yield self._share(line, number)
            if whole < self.journal.stat().st_size:
                os.truncate(self.journal, whole)
        except OSError as error:
            raise IsolateError(f"{self.journal}: cannot be read: {error.strerror}") from None

    def _share(self, line: bytes, number: int) -> Share:
        try:
            return msgspec.json.decode(line, type=Share)
        except (msgspec.DecodeError, ValueError):
            raise IsolateError(
                f"{self.journal}: line {number} is not what this isolate writes; give --out another folder"
            ) from None

    def keep(self, share: Share) -> None:
        """Append a share to the journal."""
        try:
            with self.journal.open("ab") as file:
                file.write(msgspec.json.encode(share) + b"\n")
        except OSError as error:
            raise IsolateError(f"{self.journal}: cannot be written: {error.strerror}") from None

    def case(self, name: str) -> Path:
        """Where the case of a finding is."""
        return self.place / f"{name}.json"

    def unconfirmed(self, name: str) -> Path:
        """Where a case is whose fault did not come again."""
        return self.place / UNCONFIRMED / f"{name}.json"

    def add_finding(self, name: str, case: Case, document: dict[str, Any]) -> None:
        """Write a finding that is not there yet: its document, then its case."""
        for path, content in ((self.place / FINDINGS / f"{name}.json", document), (self.case(name), case)):
            if not path.exists():
                self._write(path, msgspec.json.format(msgspec.json.encode(content)) + b"\n")

    def add_unconfirmed(self, name: str, case: Case) -> None:
        """Write a case whose fault did not come again."""
        if not self.unconfirmed(name).exists():
            self._write(self.unconfirmed(name), msgspec.json.format(msgspec.json.encode(case)) + b"\n")

    def remove_finding(self, name: str) -> None:
        """Remove a finding that another one took the place of."""
        for path in (self.case(name), self.place / FINDINGS / f"{name}.json"):
            path.unlink(missing_ok=True)

    def _write(self, path: Path, data: bytes) -> None:
        """A file that is there whole or not at all."""

        def written(temporary: Path) -> str:
            temporary.write_bytes(data)
            return path.name

        try:
            path.parent.mkdir(exist_ok=True)
            files.appear(path.parent, written)
        except OSError as error:
            raise IsolateError(f"{path}: cannot be written: {error.strerror}") from None


def _other(there: dict[str, Any], here: dict[str, Any]) -> Iterator[str]:
    """The settings that differ, by name."""
    for name in sorted(there.keys() | here.keys()):
        one, other = there.get(name), here.get(name)
        if isinstance(one, dict) and isinstance(other, dict):
            yield from _other(one, other)
        elif one != other:
            yield name
