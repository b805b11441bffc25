"""A table of runs: each cell is a case on a target, run in a child of its own, several at once.

Cells that come to the same case on the same target are run once. What was found can be kept in a file, a line a cell,
from which an interrupted table is taken up again.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from isolate.errors import BuildError, IsolateError
from isolate.library.find import find_build
from isolate.replay.target import Target
from isolate.search.pin import Job, Result, Settings, pin_all
from isolate.serve.factors import Observed, sentence


@dataclass(frozen=True)
class Cell:
    """One run of the table: a result, or the sentence that says why it was not run."""

    row: str
    column: str
    result: Result | str
    #: the build, or its dry device, has not got what the cell needs
    lacking: bool = False
    #: the settings that the table varies, by option
    factors: dict[str, Any] = field(default_factory=dict)
    #: the case file that gives the finding
    file: str = ""


@dataclass(frozen=True)
class Place:
    """A cell that is to be run."""

    row: str
    column: str
    job: Job
    target: Target
    factors: dict[str, Any] = field(default_factory=dict)
    file: str = ""


class Kept:
    """The results of cells in a file, by what was run; `None` keeps nothing."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.known: dict[str, Result] = {}
        if path is None or not path.exists():
            return
        data = path.read_bytes()
        if data and not data.endswith(b"\n"):
            # The run was killed in the middle of a line: the next must not go on with it.
            path.write_bytes(data[: data.rfind(b"\n") + 1])
        for line in data.splitlines():
            with contextlib.suppress(msgspec.DecodeError):
                entry = msgspec.json.decode(line, type=_Entry)
                self.known[entry.key] = entry.result

    def keep(self, key: str, result: Result) -> None:
        """Append a result; IsolateError when the file cannot be written."""
        self.known[key] = result
        if self.path is None:
            return
        try:
            with self.path.open("ab") as file:
                file.write(msgspec.json.encode(_Entry(key, result)) + b"\n")
        except OSError as error:
            raise IsolateError(f"{self.path}: cannot be written: {error.strerror}") from None


class _Entry(msgspec.Struct):
    key: str
    result: Result


def run(places: Sequence[Place], settings: Settings, at_once: int, kept: Kept | None = None) -> Iterator[Cell]:
    """Run the cells in their order, those that come to the same run only once."""
    kept = kept or Kept(None)
    build = find_build(settings.build, settings.include).key()
    distinct: dict[str, Callable[[], Result | IsolateError]] = {}
    keys = [_key(place, build) for place in places]
    with ThreadPoolExecutor(at_once) as pool:
        try:
            for key, place in zip(keys, places, strict=True):
                if key not in distinct and key not in kept.known:
                    distinct[key] = pool.submit(_run, place, settings).result
            for key, place in zip(keys, places, strict=True):
                result = kept.known.get(key) or distinct[key]()
                if isinstance(result, Result) and key not in kept.known:
                    kept.keep(key, result)
                yield _cell(place, result)
        except BaseException:
            # Interrupted: what has not begun is not begun.
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _run(place: Place, settings: Settings) -> Result | IsolateError:
    try:
        (result,) = pin_all([place.job], replace(settings, target=place.target))
    except IsolateError as error:
        return error
    return result


def _cell(place: Place, result: Result | IsolateError) -> Cell:
    if isinstance(result, IsolateError):
        lacking = isinstance(result, BuildError)
        return Cell(place.row, place.column, result.message, lacking, place.factors)
    # The same run may stand in several cells: each has its own case file.
    findings = tuple(replace(found, replay=place.job.replay) for found in result.findings)
    file = place.file if findings else ""
    return Cell(place.row, place.column, replace(result, findings=findings), False, place.factors, file)


def _key(place: Place, build: str) -> str:
    case = msgspec.structs.replace(place.job.case, about="")
    said = (case.as_json(), str(place.job.folder.absolute()), place.column, str(place.target), build)
    return hashlib.sha256(repr(said).encode()).hexdigest()[:32]


def follow(cells: Sequence[Cell]) -> str:
    """What the faults of a table follow, in one sentence; "" where nothing can be said."""
    rows = [
        Observed({**cell.factors, "target": cell.column}, bool(cell.result.findings))
        for cell in cells
        if isinstance(cell.result, Result)
    ]
    return sentence(rows)
