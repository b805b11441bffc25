"""Cases that failed once, in a Hypothesis example database: a folder, or a Redis server that several machines share."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec

from isolate import case as cases_of
from isolate.case import Case
from isolate.errors import CaseError, IsolateError

if TYPE_CHECKING:
    from hypothesis.database import ExampleDatabase

#: Under which all are kept; a case says itself what it runs on.
_KEY = b"isolate.case/1"
#: Seconds in which a Redis server must answer.
PATIENCE = 10


class Examples:
    """The cases of a database. IsolateError where it cannot be used."""

    def __init__(self, place: str) -> None:
        self.place = place
        self.database = _database(place)
        self._fetched()

    def __iter__(self) -> Iterator[Case]:
        for data in sorted(self._fetched()):
            try:
                yield cases_of.parse(data, self.place)
            except CaseError:
                # Of a version that knew other steps, or nothing of ours.
                continue

    def add(self, case: Case) -> None:
        """Keep a case."""
        data = msgspec.json.encode(case)
        try:
            self.database.save(_KEY, data)
        except Exception as error:
            raise self._unusable(error) from None
        # A folder that cannot be written is nothing that Hypothesis speaks of.
        if data not in self._fetched():
            raise IsolateError(f"{self.place}: the example database did not keep a case; is its disk full?")

    def _fetched(self) -> list[bytes]:
        try:
            return list(self.database.fetch(_KEY))
        except Exception as error:
            raise self._unusable(error) from None

    def _unusable(self, error: Exception) -> IsolateError:
        """Whatever a database raises, of which there are as many kinds as there are databases."""
        return IsolateError(f"{self.place}: the example database cannot be used: {error}")


def _database(place: str) -> ExampleDatabase:
    if "://" not in place:
        return _folder(Path(place))
    if not place.startswith(("redis://", "rediss://")) or not urlsplit(place).hostname:
        raise IsolateError(f"{place}: name a folder, or a Redis server as redis://HOST:PORT")
    try:
        from hypothesis.extra.redis import RedisExampleDatabase
        from redis import Redis
    except ImportError:
        raise IsolateError("a database in Redis needs its client: pip install 'isolate[redis]'") from None
    try:
        return RedisExampleDatabase(Redis.from_url(place, socket_connect_timeout=PATIENCE, socket_timeout=PATIENCE))
    except ValueError as error:
        raise IsolateError(f"{place}: not the address of a Redis server: {error}") from None


def _folder(path: Path) -> ExampleDatabase:
    from hypothesis.database import DirectoryBasedExampleDatabase

    try:
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise IsolateError(f"{path}: cannot be used as an example database: {error.strerror}") from None
    return DirectoryBasedExampleDatabase(path)
