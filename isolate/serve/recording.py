"""A recording: what a program called of libllama, as native/record.c wrote it. Nothing in it is trusted.

A record that is cut short or does not fit ends the reading: what comes before it counts, as after a kill in the middle.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

from isolate.errors import TraceError

MAGIC = 0x31524F53
_HEAD = struct.Struct("<IIIIIIQ6q")
_TOKEN = struct.Struct("<5i")


class Kind(IntEnum):
    """enum isolate_call_kind of native/record.h."""

    OPENED = 1
    END = 2
    MODEL = 3
    CONTEXT = 4
    FREE = 5
    MEMORY = 6
    DECODE = 7
    STATE_GET = 8
    STATE_SET = 9
    FILE_SAVE = 10
    FILE_LOAD = 11
    SEQ_RM = 12
    SEQ_CP = 13
    SEQ_KEEP = 14
    SEQ_ADD = 15
    CLEAR = 16
    OTHER = 17
    LIBRARY = 18


@dataclass(frozen=True)
class Token:
    """One token of a batch; -1 where the program left a field to the library."""

    token: int
    position: int
    slot: int
    output: int
    #: how many sequences it belongs to
    sequences: int


@dataclass
class Call:
    """One call. `result` is None where it did not come back."""

    kind: Kind
    process: int
    a: tuple[int, ...]
    data: bytes
    result: int | None = None
    hash: int = 0

    def text(self) -> str:
        """The data as text."""
        return self.data.decode(errors="replace")

    def tokens(self) -> list[Token]:
        """The batch of a decode."""
        whole = len(self.data) // _TOKEN.size * _TOKEN.size
        return [Token(*fields) for fields in _TOKEN.iter_unpack(self.data[:whole])]


@dataclass
class Recording:
    """All calls in order of their beginning."""

    calls: list[Call] = field(default_factory=list)

    def first(self, kind: Kind) -> Call | None:
        """The first call of a kind."""
        return next((call for call in self.calls if call.kind == kind), None)


def read(path: Path) -> Recording:
    """The recording in a file. TraceError when it cannot be read."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror}") from None
    found = Recording()
    begun: dict[tuple[int, int], Call] = {}
    for kind, process, number, a, content in _records(data):
        if kind != Kind.END:
            call = Call(kind, process, a, content)
            begun[process, number] = call
            found.calls.append(call)
        elif (process, number) in begun:
            call = begun.pop((process, number))
            call.result, call.hash = a[0], a[1]
    return found


def _records(data: bytes) -> Iterator[tuple[Kind, int, int, tuple[int, ...], bytes]]:
    place = 0
    while place + _HEAD.size <= len(data):
        magic, size, process, _, kind, length, number, *a = _HEAD.unpack_from(data, place)
        end = place + size
        if magic != MAGIC or size < _HEAD.size + length or end > len(data) or size % 8:
            return
        if 1 <= kind <= max(Kind):
            start = place + _HEAD.size
            yield Kind(kind), process, number, tuple(a), data[start : start + length]
        place = end
