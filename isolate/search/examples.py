"""Cases that failed once, in a Hypothesis example database: a folder, or a Redis server that several machines share."""

from __future__ import annotations

from collections.abc import Iterator
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


class Examples:
    """The cases of a database. IsolateError where it cannot be used."""

    def __init__(self, place: str) -> None:
        self.place = place
        self.database = _database(place)

    def __iter__(self) -> Iterator[Case]:
        for data in sorted(self._fetched()):
            try:
                yield cases_of.parse(data, self.place)
            except CaseError:
                # Of a version that knew other steps, or nothing of ours.
                continue

    def add(self, case: Case) -> None:
        """Keep a case."""
        try:
            self.database.save(_KEY, msgspec.json.encode(case))
        except Exception as error:
            raise self._unusable(error) from None

    def _fetched(self) -> list[bytes]:
        try:
            return list(self.database.fetch(_KEY))
        except Exception as error:
            raise self._unusable(error) from None

    def _unusable(self, error: Exception) -> IsolateError:
        """Whatever a database raises, of which there are as many kinds as there are databases."""
        return IsolateError(f"{self.place}: the example database cannot be used: {error}")


def _database(place: str) -> ExampleDatabase:
    if not place.startswith(("redis://", "rediss://")):
        from hypothesis.database import DirectoryBasedExampleDatabase

        return DirectoryBasedExampleDatabase(place)
    if not urlsplit(place).hostname:
        raise IsolateError(f"{place}: name a Redis server, redis://HOST:PORT")
    try:
        from hypothesis.extra.redis import RedisExampleDatabase
        from redis import Redis
    except ImportError:
        raise IsolateError("a database in Redis needs its client: pip install 'isolate[redis]'") from None
    return RedisExampleDatabase(Redis.from_url(place))
